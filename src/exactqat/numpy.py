# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays in, NumPy arrays out: how any declared operator runs on them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from exactqat.cpu import LARGE, block, planned, shortcut
from exactqat.operators.op import Memory, Operator, TensorSpec, check_out

_FLOAT32 = np.dtype("float32")
_NUMBERS = (np.float16, np.float32, np.float64)  # an array's `min()` is one of them
_NAMES: dict[np.dtype, str] = {}  # `dtype.name` is slow
_DTYPES: dict[str, np.dtype] = {name: np.dtype(name) for name in ("float32", "float64", "uint8")}


def _name(dtype: np.dtype) -> str:
    name = _NAMES.get(dtype)
    if name is None:
        name = _NAMES[dtype] = dtype.name
        _DTYPES.setdefault(name, dtype.newbyteorder("="))  # bfloat16 has no name in NumPy until somebody brings it
    return name


def _dtype_of_numbers(operands: list[Any]) -> np.dtype:
    """Numbers and lists are ranges and statistics: float64 beside a float64 array, else float32."""
    dtype = next((v.dtype for v in operands if isinstance(v, np.ndarray)), _FLOAT32)
    return dtype if dtype.name == "float64" else _FLOAT32


def _arrays(operands: list[Any]) -> list[np.ndarray]:
    """Dense native arrays."""
    arrays = []
    for value in operands:
        if type(value) is not np.ndarray:
            with np.errstate(over="ignore"):  # a number beyond float32 is infinite there
                value = np.asarray(value, None if isinstance(value, np.ndarray) else _dtype_of_numbers(operands))
        if not (value.flags.c_contiguous and value.flags.aligned and value.dtype.isnative):
            value = np.array(value, value.dtype.newbyteorder("="), order="C")
        arrays.append(value)
    return arrays


def _empty(spec: TensorSpec) -> Callable[[], np.ndarray]:
    """What makes an array for a result."""
    dtype = _DTYPES[spec.dtype]
    bytes = spec.size * dtype.itemsize
    if bytes < LARGE:
        return partial(np.empty, spec.shape, dtype)
    return lambda: np.frombuffer(block(bytes), dtype).reshape(spec.shape)


def _memory(array: Any) -> Memory:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"out must be NumPy arrays like the operands, got {type(array).__name__}")
    dense = array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative
    address = array.__array_interface__["data"][0]
    return Memory(TensorSpec(array.shape, _name(array.dtype)), address, dense, array.flags.writeable)


def _planned(op: Operator, arrays: list[np.ndarray], attributes: dict[str, Any]) -> Any:
    return planned(op, tuple([TensorSpec(a.shape, _name(a.dtype)) for a in arrays]), tuple(attributes.items()))


def _learn(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """For `shortcut`."""
    operands, attributes = op.bind(args, kwargs)
    lowered, plan = _planned(op, _arrays(operands), attributes)
    return plan, [_empty(spec) for spec in lowered.results], tuple(attributes.values())


def call(op: Operator, operands: list[Any], attributes: dict[str, Any], out: tuple[Any, ...] | None = None) -> Any:
    """Run `op` on NumPy arrays; results go into `out` if it is given."""
    if np.ndarray not in op.shortcuts:
        op.shortcuts[np.ndarray] = shortcut(op, (np.ndarray,), partial(_learn, op), numbers=_NUMBERS)
    arrays = _arrays(operands)
    lowered, plan = _planned(op, arrays, attributes)
    if out is None:
        results = [_empty(spec)() for spec in lowered.results]
    else:
        check_out(op, lowered, [_memory(array) for array in arrays], [_memory(array) for array in out])
        results = list(out)
    plan(*[a if a.itemsize != 2 else a.view(np.uint16) for a in (*arrays, *results)])  # bfloat16 has no buffer protocol
    return op.wrap(results)


def pass_through(function: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    """NumPy has no gradients to pass."""
    return function(*arrays)
