# SPDX-License-Identifier: Apache-2.0
"""Which layers are Keras' own, and what of them the user has changed."""

from __future__ import annotations

import itertools
from typing import Any

import keras

# What a class of the user's may say otherwise without changing what a layer computes.
_HARMLESS = {
    "__init__", "__module__", "__doc__", "__qualname__", "__firstlineno__", "__static_attributes__",
    "__annotations__", "__call__", "__repr__", "__str__", "__orig_bases__", "__parameters__", "__abstractmethods__",
    "_abc_impl", "__slots__", "__dict__", "__weakref__", "__annotate__", "__annotate_func__", "__new__",
    "__init_subclass__", "__del__", "__annotations_cache__", "get_config", "from_config", "build", "quantize",
    "compute_output_shape", "compute_output_spec", "compute_mask", "count_params", "get_build_config",
    "build_from_config", "get_compile_config", "compile_from_config", "save_own_variables", "load_own_variables",
    "save_assets", "load_assets", "add_weight", "add_loss", "stateless_call", "supports_masking", "name", "path",
    "summary", "train_step", "test_step", "predict_step", "compute_loss", "compute_metrics", "compile", "fit",
    "evaluate", "predict", "metrics", "make_train_function", "make_test_function", "make_predict_function",
    "train_on_batch", "test_on_batch", "predict_on_batch",
}  # fmt: skip


def changed_of(operation: Any, known: type) -> set[str]:
    """The methods and properties of a class of Keras that a class of the user's, or the object, has its own of."""
    classes = itertools.takewhile(lambda each: each is not known, type(operation).__mro__)
    names = {name for each in classes for name in vars(each) if hasattr(known, name)}
    names |= {name for name, value in vars(operation).items() if callable(value) and hasattr(known, name)}
    return names - _HARMLESS


def known_class(operation: Any) -> type | None:
    """The class of Keras, or of this library, that it is one of."""
    ours = ("keras.", "exactqat.")
    return next((each for each in type(operation).__mro__ if each.__module__.startswith(ours)), None)


def is_container(layer: Any) -> bool:
    """Whether a model does nothing but call its layers."""
    return (
        isinstance(layer, keras.Model)
        and "call" not in vars(layer)
        and type(layer).call.__module__.startswith("keras.")
    )


def is_seed(variable: Any) -> bool:
    return "seed_generator" in variable.path


def own_state(layer: Any) -> list[Any]:
    """Variables that are no weights and no state of random numbers."""
    return [each for each in layer.non_trainable_variables if not is_seed(each)]


def changed_kernel(layer: Any) -> str:
    """Why a layer's kernel is not what it computes with; empty where it is."""
    if getattr(layer, "quantization_mode", None):
        return f"quantized by Keras (quantize({layer.quantization_mode!r})); give the float model, before quantize"
    if getattr(layer, "lora_enabled", False):
        return "with enable_lora, its kernel is a sum; save the model and load it, which stores the sum as the kernel"
    return ""


def path_of(layer: Any) -> str:
    return str(getattr(layer, "path", None) or layer.name).replace("/", ".")
