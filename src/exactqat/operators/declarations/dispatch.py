# SPDX-License-Identifier: Apache-2.0
"""Which framework's module runs an operator, found from its operands; and arrays of whatever framework."""

import math
import numbers
import sys
import types
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from exactqat.operators.declarations.specification import HALVES

# What loads the module for each framework; `exactqat.operators.frontends` fills it, as declarations know none of them.
FRONTENDS: dict[str, Callable[[], types.ModuleType]] = {}
# Where an array type is defined, in the order in which they are asked; a framework counts only once the caller
# imported it.
FRAMEWORKS = {"numpy": ("numpy", "ndarray"), "torch": ("torch", "Tensor"), "jax": ("jax", "Array")}
AN_ARRAY = "a NumPy, PyTorch, JAX or TensorFlow array or a number"


def compiling() -> bool:
    """Whether torch.compile is tracing, which cannot follow shortcuts."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def is_array_like(value: object) -> bool:
    """Whether `value` is an object that NumPy can unambiguously convert to an array: pandas' columns, TensorFlow's
    tensors, the standard library's arrays."""
    return hasattr(value, "__array__") or isinstance(value, array | memoryview)


def arrays_in(value: Sequence[object]) -> list[object]:
    """What a nested sequence holds beside numbers."""
    arrays = []
    for item in value:
        if isinstance(item, list | tuple):
            arrays += arrays_in(item)
        elif type(item) not in (float, int) and not isinstance(item, numbers.Number):
            arrays.append(item)
    return arrays


def rank_of(value: object) -> int:
    """Number of dimensions of anything that can be an operand."""
    if hasattr(value, "shape"):
        return len(value.shape)
    if isinstance(value, list | tuple):
        return 1 + (rank_of(value[0]) if value else 0)
    if hasattr(value, "__array__"):
        return len(value.__array__().shape)
    return memoryview(value).ndim if isinstance(value, array | memoryview) else 0


def framework_of(value: object) -> str | None:
    """ "numpy", "torch", "jax" or "tensorflow" for an array, None for a Python number or sequence."""
    for framework, (module, array_type) in FRAMEWORKS.items():
        loaded = sys.modules.get(module)
        if loaded is not None and isinstance(value, getattr(loaded, array_type)):
            return framework
    # Its tensors and variables, and those of Keras that hold one of these, have no class in common that is public.
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and not compiling() and getattr(tensorflow, "is_tensor", _is_nothing)(value):
        return "tensorflow"
    return None


def _is_nothing(value: object) -> bool:
    return False


def frontend_for(operator: str, names: Sequence[str], operands: Sequence[object]) -> types.ModuleType:
    """The module that runs an operator on these arrays: one framework's, optionally mixed with NumPy's.

    operator, names: its name and those of its operands, for messages.
    """
    choice, first = None, ""
    for name, value in zip(names, operands, strict=True):
        for item in arrays_in(value) if isinstance(value, list | tuple) else (value,):
            framework = framework_of(item)
            if framework is None:
                if type(item).__name__ == "KerasTensor":
                    raise TypeError(
                        f"{operator}: {name} is a KerasTensor, which has no values yet; call it in the `call` "
                        "method of a keras.layers.Layer"
                    )
                if not isinstance(item, numbers.Number) and not is_array_like(item):
                    raise TypeError(f"{operator}: {name} must be {AN_ARRAY}, got {type(item).__name__}")
            elif choice in (None, "numpy"):
                choice, first = framework, name
            elif framework not in (choice, "numpy"):
                raise TypeError(
                    f"{operator}: {name} is a {framework} array but {first} is a {choice} array; "
                    f"all operands must come from one framework, or from NumPy"
                )
    return frontend(choice or "numpy")


def frontend_of(array: object) -> types.ModuleType:
    """The module that runs operators on what `array` is."""
    return frontend(framework_of(array) or "numpy")


def frontend(framework: str) -> types.ModuleType:
    """The module that runs operators on the arrays of one framework."""
    return FRONTENDS[framework]()


def widened(array: Any) -> Any:
    """A 16-bit array of any framework as float32; others as they are."""
    if getattr(array.dtype, "itemsize", None) != 2 and getattr(array.dtype, "name", "") not in HALVES:
        return array
    if hasattr(array, "astype"):
        return array.astype("float32")
    return array.float() if hasattr(array, "float") else frontend_of(array).cast(array, "float32")


def reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    """An array of any framework in another shape."""
    return array.reshape(shape) if hasattr(array, "reshape") else frontend_of(array).reshape(array, shape)


def positions(array: Any, axis: int) -> Any:
    """How many elements an array of any framework has for each index of an axis, at least 1."""
    if None in array.shape:
        return frontend_of(array).positions(array, axis)
    return max(math.prod(array.shape) // max(array.shape[axis], 1), 1)


def repeated(array: Any, like: Any) -> Any:
    """An array of any framework, broadcast to the shape of another one."""
    everywhere = (like == like) | (like != like)
    return array * (everywhere if hasattr(everywhere, "reshape") else frontend_of(array).cast(everywhere, array.dtype))
