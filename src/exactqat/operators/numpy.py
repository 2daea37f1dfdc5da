# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays in, NumPy arrays out: how any declared operator runs on them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from exactqat.operators.cpu import LARGE, Learned, block, planned, shortcut
from exactqat.operators.declarations.dispatch import is_array_like
from exactqat.operators.declarations.memory import Memory, check_out, dtypes_that_fit, unreadable
from exactqat.operators.declarations.op import Operator
from exactqat.operators.declarations.specification import FLOATS, Lowering, TensorSpec, Value

Results = TypeVar("Results")
_FLOAT32 = np.dtype("float32")
_NUMBERS = (np.float16, np.float32, np.float64)  # an array's `min()` is one of them
_NAMES: dict[np.dtype, str] = {}  # `dtype.name` is slow
_DTYPES: dict[str, np.dtype] = {name: np.dtype(name) for name in ("float32", "float64", "uint8")}


def _name(dtype: np.dtype) -> str:
    name = _NAMES.get(dtype)
    if name is None:
        name = dtype.name
        _DTYPES.setdefault(name, dtype.newbyteorder("="))  # bfloat16 has no name in NumPy until somebody brings it
        _NAMES[dtype] = name  # afterwards: another thread that finds it makes arrays of that dtype
    return name


def _dtype_of_numbers(operands: Sequence[object]) -> np.dtype:
    """Numbers and lists are ranges and statistics: float64 with a float64 array, otherwise float32."""
    dtype = next((v.dtype for v in operands if isinstance(v, np.ndarray)), _FLOAT32)
    return dtype if dtype.name == "float64" else _FLOAT32


def _arrays(op: Operator, operands: Sequence[object]) -> list[np.ndarray]:
    """Dense native arrays."""
    arrays = []
    for name, value in zip(op.operands, operands, strict=True):
        if type(value) is not np.ndarray:
            value = _array(op, name, value, None if is_array(value) else _dtype_of_numbers(operands))
        if not (value.flags.c_contiguous and value.flags.aligned and value.dtype.isnative):
            value = np.array(value, value.dtype.newbyteorder("="), order="C")
        arrays.append(value)
    return arrays


def is_array(value: object) -> bool:
    """Whether a value that is no array of another framework has a dtype of its own."""
    return isinstance(value, np.ndarray) or (is_array_like(value) and not isinstance(value, np.generic))


def _array(op: Operator, name: str, value: object, dtype: np.dtype | None) -> np.ndarray:
    try:
        with np.errstate(over="ignore"):  # a number beyond float32 is infinite there
            return np.asarray(value, dtype)
    except (ValueError, TypeError) as error:
        raise unreadable(op, name, error) from None


def _fitted(op: Operator, operands: Sequence[object]) -> list[np.ndarray]:
    """The arrays of a call whose dtypes do not fit, as ones that do where nothing is lost: ranges of any kind of number
    are rounded as Python's numbers are, integers that the dtype of the data holds become data."""
    values = [np.asarray(value) if is_array(value) else value for value in operands]
    dtypes = [value.dtype if isinstance(value, np.ndarray) else None for value in values]
    kept = [
        _name(dtype) if dtype is not None and name not in op.ranges and dtype.kind not in "iub" else None
        for name, dtype in zip(op.operands, dtypes, strict=True)
    ]
    floats = [dtype.name for dtype in dtypes if dtype is not None and dtype.kind == "f"]
    wanted = dtypes_that_fit(op, kept, "float64" if floats[:1] == ["float64"] else "float32")
    known = {_name(dtype): dtype for dtype in dtypes if dtype is not None}
    arrays = []
    for name, value, dtype, fits in zip(op.operands, values, dtypes, wanted, strict=True):
        if fits in FLOATS:
            target = known.get(fits) or np.dtype(fits)
            is_real = dtype is None or dtype.kind in "biuf" or dtype.name == "bfloat16"
            if is_real and (dtype is None or name in op.ranges or np.can_cast(dtype, target, "safe")):
                value = _array(op, name, value, target)
        arrays.append(value)
    return _arrays(op, arrays)


def _empty(spec: TensorSpec) -> Callable[[], np.ndarray]:
    """What makes an array for a result."""
    dtype = _DTYPES[spec.dtype]
    bytes = spec.size * dtype.itemsize
    if bytes < LARGE:
        return partial(np.empty, spec.shape, dtype)
    return lambda: np.frombuffer(block(bytes), dtype).reshape(spec.shape)


def _memory(array: object) -> Memory:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"out must be NumPy arrays like the operands, got {type(array).__name__}")
    dense = array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative
    address = array.__array_interface__["data"][0]
    return Memory(TensorSpec(array.shape, _name(array.dtype)), address, dense, array.flags.writeable)


def _planned(
    op: Operator, arrays: list[np.ndarray], attributes: dict[str, Value]
) -> tuple[Lowering, Callable[..., None]]:
    return planned(op, tuple([TensorSpec(a.shape, _name(a.dtype)) for a in arrays]), tuple(attributes.items()))


def _learn(op: Operator, args: tuple[object, ...], kwargs: dict[str, object]) -> Learned:
    """For `shortcut`."""
    operands, attributes = op.bind(args, kwargs)
    lowered, plan = _planned(op, _arrays(op, operands), attributes)
    return plan, [_empty(spec) for spec in lowered.results], tuple(attributes.values())


def call(
    op: Operator, operands: Sequence[object], attributes: dict[str, Value], out: tuple[Any, ...] | None = None
) -> Any:
    """Run `op` on NumPy arrays; results go into `out` if it is given."""
    if np.ndarray not in op.shortcuts:
        op.shortcuts[np.ndarray] = shortcut(op, (np.ndarray,), partial(_learn, op), numbers=_NUMBERS)
    arrays = _arrays(op, operands)
    try:
        planned_call = _planned(op, arrays, attributes)
    except TypeError:
        planned_call = None
    if planned_call is None:
        arrays = _fitted(op, operands)
        planned_call = _planned(op, arrays, attributes)
    lowered, plan = planned_call
    targets = out or (None,) * len(op.results)
    results = [_empty(spec)() if array is None else array for spec, array in zip(lowered.results, targets, strict=True)]
    if out is not None:
        check_out(op, lowered, [_memory(array) for array in arrays], [_memory(array) for array in results])
    try:  # bfloat16 has no buffer protocol
        plan(*[a if a.itemsize != 2 else a.view(np.uint16) for a in (*arrays, *results)])
    except ValueError as error:
        raise op.refusal(error, arrays, attributes) from None
    return op.wrap(results)


def pass_through(function: Callable[..., Results], arrays: tuple[np.ndarray, ...]) -> Results:
    """NumPy has no gradients to pass."""
    return function(*arrays)
