# SPDX-License-Identifier: Apache-2.0
"""What Keras keeps of layers: paths, state, and kernels that are not what a layer computes with."""

from __future__ import annotations

from typing import Any


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
