# SPDX-License-Identifier: Apache-2.0
"""Primitives that work value by value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from ....kit.device.functions import FUNCTIONS, named_by
from ....kit.device.primitives import NUMPY, NumPyPrimitives
from ..core import masks
from ..core.builder import Moving
from ..core.functions import Curve
from ..core.refusals import Refused
from ..core.sizes import Batch, Shape
from ..passes import composites
from .converter import HANDLERS, Converter, Operation, handles
from .items import Fixed, Item, Result

# Below this, softmax makes nothing of a value: a mask.
_MASK = -1e4

_UNARY = named_by("jax")
_BINARY = {"add": "add", "add_any": "add", "sub": "sub", "mul": "mul", "div": "div", "max": "maximum", "min": "minimum"}
_COMPARISONS = {
    **{"gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal, "eq": np.equal},
    "ne": np.not_equal,
}
_LOGIC = {"and": np.logical_and, "or": np.logical_or, "not": np.logical_not, "xor": np.logical_xor}
# In NumPy, to know functions by their values.
_VALUES: dict[str, Callable[..., Any]] = {
    **{name: partial(FUNCTIONS[kind], NUMPY) for name, kind in _UNARY.items()},
    # Roots of negative numbers are none.
    **{"sqrt": np.sqrt, "rsqrt": NumPyPrimitives.rsqrt},
    **{"add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide},
    **{"max": np.maximum, "min": np.minimum, "pow": np.power, "is_finite": np.isfinite, "ceil": np.ceil},
    **{"exp2": np.exp2, "log1p": np.log1p, "expm1": np.expm1, "cbrt": np.cbrt},
    "erfc": lambda x: 1 - NumPyPrimitives.erf(x),
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "select_n": lambda condition, *cases: np.where(condition, cases[1], cases[0]),
    **_COMPARISONS,
    **_LOGIC,
}


def samples_of(c: Converter, operation: Operation, operands: Sequence[Item]) -> dict[str, Curve]:
    """What a result is as a function of earlier values, where it is one value by value."""
    name = operation.name
    function = _VALUES.get(name)
    if name == "integer_pow":
        function = lambda x: np.power(x, operation.params["y"])  # noqa: E731
    if function is None:
        return {}
    dtype = bool if name in (*_COMPARISONS, *_LOGIC) else np.float64

    def evaluate(*numbers: np.ndarray | float) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.asarray(function(*(n if isinstance(n, np.ndarray) else np.float64(n) for n in numbers)), dtype)

    return c.sampled(operands, evaluate)


def elementwise(c: Converter, operation: Operation, operands: Sequence[Item], kind: str, **attributes: Any) -> Moving:
    """One step, or the function that it completes."""
    samples, shape = samples_of(c, operation, operands), operation.shape
    result = c.recognized(samples, operands, shape)
    return result if result is not None else c.emit(kind, operands, shape, samples=samples, **attributes)


HANDLERS.update(
    {
        name: lambda c, operation, *operands: elementwise(c, operation, operands, _UNARY[operation.name])
        for name in _UNARY
    }
)
HANDLERS["stop_gradient"] = lambda c, operation, x: c.emit(
    "identity", [x], x.shape, expression=None, stop_gradient=True
)


@handles("expm1", "log1p", "exp2", "cbrt", "ceil", "erfc", "is_finite")
def _composite(c: Converter, operation: Operation, *operands: Item) -> Item:
    """What the network has no kind for, in kinds that it has; mostly a part of a function that is recognised later."""
    name, (x,), shape = operation.name, operands, operation.shape
    samples = samples_of(c, operation, operands)
    if name == "is_finite":
        return Moving("", shape, bool, samples, ("is_finite", x, None))
    result = c.recognized(samples, operands, shape)
    if result is not None:
        return result
    if name not in _COMPOSITES:
        raise Refused("")
    *first, (kind, before, after) = _COMPOSITES[name]
    for step, *numbers in first:
        x = c.emit(step, [operand for operand in (numbers[0], x, numbers[1]) if operand is not None], shape)
    return c.emit(kind, [operand for operand in (before, x, after) if operand is not None], shape, samples=samples)


# Steps one after another, each with a number before or after its operand.
_COMPOSITES: dict[str, list[tuple[str, float | None, float | None]]] = {
    "expm1": [("exp", None, None), ("sub", None, 1.0)],
    "log1p": [("add", None, 1.0), ("log", None, None)],
    "exp2": [("mul", None, float(np.log(2))), ("exp", None, None)],
    "erfc": [("erf", None, None), ("sub", 1.0, None)],
    "ceil": [("neg", None, None), ("floor", None, None), ("neg", None, None)],
}


@handles(*_BINARY)
def _binary(c: Converter, operation: Operation, *operands: Item) -> Item:
    name, shape, (first, second) = operation.name, operation.shape, operands
    numbers = [operand.number if isinstance(operand, Fixed) else None for operand in operands]
    if name in ("max", "min"):
        # Where a maximum begins.
        nothing = -np.inf if name == "max" else np.inf
        for at, number in enumerate(numbers):
            if number == nothing and operands[1 - at].shape == shape:
                return operands[1 - at]
    if (mask := masks.arithmetic(c, _BINARY[name], operands, shape)) is not None:
        return mask
    if name in ("mul", "div"):
        result = composites.mean_or_pool(c, name, first, second)
        result = composites.softmax(c, first, second) if result is None and name == "div" else result
        if result is not None:
            return result
    if name == "sub":
        result = composites.log_softmax(c, first, second)
        if result is not None:
            return result
    rows = [
        _of_rows(c, operand, shape) if number is None else c.data(np.float32(number))
        for operand, number in zip(operands, numbers, strict=True)
    ]
    return elementwise(c, operation, rows, _BINARY[name])


def _of_rows(c: Converter, item: Item, shape: Shape) -> Item:
    """What was repeated for several rows of each example, as a bias for [batch * time, n], as one row.

    Raises:
        Refused: the rows differ.
    """
    if not isinstance(item, Fixed) or len(item.shape) != len(shape) or len(c.batch_axes(shape)) != 1:
        return item
    axis = c.batch_axis(shape)
    if item.shape[axis] == 1 or shape[axis] == Batch():
        return item
    if not c.repeats(item, axis):
        raise Refused(
            "it gives rows of one example numbers of their own where examples and rows are one axis; do so before the "
            "axes are joined"
        )
    return item.then(lambda array: jnp.take(array, jnp.array([0]), axis))


@handles("integer_pow")
def _integer_power(c: Converter, operation: Operation, *operands: Item) -> Item:
    exponent = int(operation.params["y"])
    if exponent == 2:
        return elementwise(c, operation, operands, "square")
    return elementwise(c, operation, operands, "pow", exponent=float(exponent))


@handles("pow")
def _power(c: Converter, operation: Operation, x: Moving, exponent: Item) -> Item:
    if not isinstance(exponent, Fixed) or exponent.number is None:
        raise Refused("its exponent is no number")
    samples = samples_of(c, operation, [x, exponent])
    return c.emit("pow", [x], operation.shape, samples=samples, exponent=exponent.number)


@handles("clamp")
def _clamp(c: Converter, operation: Operation, low: Item, x: Item, high: Item) -> Item:
    shape = operation.shape
    result = c.recognized(samples_of(c, operation, [low, x, high]), [x], shape)
    if result is not None:
        return result
    return c.emit("minimum", [c.emit("maximum", [x, low], shape), high], shape)


@handles(*_COMPARISONS, *_LOGIC)
def _comparison(c: Converter, operation: Operation, *operands: Item) -> Item:
    name, shape = operation.name, operation.shape
    left, right = operands if len(operands) == 2 else (operands[0], None)
    if name in _LOGIC:
        mask = masks.combined(c, name, operands, shape)
    else:
        mask = None if _is_below_zero(name, left, right) else masks.compared(c, name, left, right, shape)
    if mask is not None:
        return mask
    samples = samples_of(c, operation, operands)
    return Moving("", shape, bool, samples, (name, left, right))


@handles("select_n")
def _select(c: Converter, operation: Operation, condition: Item, *cases: Item) -> Item:
    shape = operation.shape
    if len(cases) != 2:
        raise Refused("")
    if masks.is_truth(c, condition):
        assert isinstance(condition, Moving)
        return masks.chosen(c, condition, cases[1], cases[0], shape)
    if isinstance(condition, Moving):
        word, left, right = condition.comparison or ("", None, None)
        if left is cases[0] and _is_below_zero(word, left, right):
            # What indexing does for negative integers, which are not rows of a table on the device.
            return cases[0]
        samples = samples_of(c, operation, [condition, *cases])
        result = c.recognized(samples, cases, shape)
        if result is not None:
            return result
        if samples:
            # Part of a function that is recognised further on; on its own there is no operator for it.
            result = c.emit("unsupported", [case for case in cases if isinstance(case, Moving)], shape, label="where")
            result.samples = {**samples, **result.samples}
            return result
        result = composites.parametric_relu(c, condition, cases[0], cases[1])
        if result is None:
            raise Refused("")
        return result
    mask = condition.values
    if mask is None:
        raise Refused("its condition is computed from parameters")
    if condition.number is not None:
        chosen = cases[int(bool(condition.number))]
        return chosen if chosen.shape == shape else c.emit("expand", [chosen], shape, shape=c.for_one(shape))
    return _masked(c, condition, cases[1], cases[0], shape)


def _is_below_zero(word: str, left: Item, right: Item | None) -> bool:
    """Whether integers are asked if they are negative."""
    whole = isinstance(left, Moving) and np.issubdtype(left.dtype, np.integer)
    return whole and word == "lt" and isinstance(right, Fixed) and right.number == 0


def _masked(c: Converter, condition: Fixed, chosen: Item, other: Item, shape: Shape) -> Item:
    """A fixed mask: where it is off, the other one."""
    if isinstance(chosen, Fixed) and isinstance(other, Moving):
        return _masked(c, condition.then(lambda mask: ~mask), other, chosen, shape)
    mask = condition.then(lambda mask: mask.astype(np.float32))
    holes = condition.then(lambda mask: (~mask).astype(np.float32))
    if isinstance(other, Fixed):
        number = other.number
        if number is not None and number < _MASK:
            # In front of a softmax: what is added to a value so far below the others makes no difference.
            return c.emit("add", [chosen, holes.then(lambda array: array * np.float32(max(number, -1e9)))], shape)
        kept = c.emit("mul", [chosen, mask], shape)
        if number == 0:
            return kept
        return c.emit("add", [kept, holes.then(lambda array, values: array * values, other)], shape)
    return c.emit("add", [c.emit("mul", [chosen, mask], shape), c.emit("mul", [other, holes], shape)], shape)


@handles("convert_element_type")
def _convert(c: Converter, operation: Operation, x: Moving) -> Item:
    if x.comparison is not None:
        raise Refused("truth values made numbers")
    if np.dtype(operation.params["new_dtype"]).kind == "b" and (mask := masks.as_truth(c, x)) is not None:
        return mask
    if masks.is_truth(c, x):
        return x
    whole = x.name in c.counted or not jnp.issubdtype(x.dtype, jnp.floating)
    if not jnp.issubdtype(operation.params["new_dtype"], jnp.floating) and not whole:
        raise Refused("whole numbers made of real ones")
    return x


@handles("copy", "copy_p", "reduce_precision", "optimization_barrier", "name", "sharding_constraint", "mesh_cast")
def _same(c: Converter, operation: Operation, *operands: Item) -> Result:
    return list(operands) if len(operands) > 1 else operands[0]
