# SPDX-License-Identifier: Apache-2.0
"""Which framework a model belongs to, by where its class comes from, without importing any framework."""

from __future__ import annotations

import inspect

_PACKAGES = {"torch": "torch", "keras": "keras", "flax": "jax", "jax": "jax", "jaxlib": "jax", "equinox": "jax"}
_KITS = {"torch": "exactqat.qat.torch", "keras": "exactqat.qat.keras", "jax": "exactqat.qat.jax"}


def framework_of(value: object) -> str | None:
    """torch, keras or jax; None if its class does not say."""
    for base in type(value).__mro__:
        module = base.__module__ or ""
        if module.startswith("exactqat.qat.train.") and (kit := module.split(".")[3]) in _KITS:
            return kit
        if (framework := _PACKAGES.get(module.partition(".")[0])) is not None:
            return framework
    return None


def kit_of(model: object) -> str:
    """The framework of a model, prepared or not.

    Raises:
        TypeError: it is not a model of any of them.
    """
    framework = framework_of(model)
    if framework is None and callable(model) and not inspect.isclass(model):
        framework = "jax"  # a function
    if framework is None:
        kind = f"the class {model.__name__}: give an instance" if inspect.isclass(model) else type(model).__name__
        raise TypeError(
            f"model must be a torch.nn.Module, a keras.Model, a Flax module or a function for JAX, got {kind}"
        )
    return framework


def elsewhere(value: object, here: str) -> str:
    """What to do with a model that is not one `here`: the end of a sentence, empty if there is nothing to say."""
    if inspect.isclass(value):
        return f" {value.__name__}, a class: give an instance of it"
    if type(value).__module__ == "exactqat.qat.train.jax.prepared":
        return ", whose numbers are outside of it: call its methods calibrate, freeze and lower with params and state"
    framework = framework_of(value)
    if framework is None and inspect.isfunction(value) and here != "jax":
        framework = "jax"
    if framework is None or framework == here:
        return ""
    return f"; models of {_WORDS[framework]} are for {_KITS[framework]}"


_WORDS = {"torch": "PyTorch", "keras": "Keras", "jax": "JAX"}
