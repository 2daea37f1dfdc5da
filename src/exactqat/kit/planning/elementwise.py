# SPDX-License-Identifier: Apache-2.0
"""Sums, products, quotients, maxima and minima of tensors, constants and numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

from . import masks
from .maker import Coefficient, Maker
from .masks import SURELY_MASKED
from .network import Constant, Step
from .planner import Operand, Planner, handles
from .refusals import Refused, word
from .stored import Stored
from .weights import passes_on


def operands(planner: Planner, step: Step) -> tuple[Operand, Operand]:
    """The two operands; at least one is a stored tensor."""
    first, second = (planner.read(operand) for operand in step.inputs)
    if not isinstance(first, Stored) and not isinstance(second, Stored):
        raise Refused(f"{word(step)} of two operands that do not depend on the input; compute it beforehand")
    return first, second


Line = tuple[float | Coefficient, float | Coefficient]


def _coefficient(planner: Planner, operand: Operand, x: Stored) -> float | Coefficient | None:
    """The operand as one number for each channel of x, or one for all; None if it is more than that."""
    if isinstance(operand, float):
        return operand
    if not isinstance(operand, Constant) or x.channels is None or x.rank > 4 or len(operand.shape) > x.rank:
        return None
    if operand.name in planner.constants_on_grids:
        return None
    sizes = (1,) * (x.rank - len(operand.shape)) + operand.shape
    only_channels = all(size == 1 or axis == x.channels for axis, size in enumerate(sizes))
    return Coefficient.of(operand.name) if only_channels and sizes[x.channels] in (1, x.shape[x.channels]) else None


# Kinds of steps that may be linear: (weight, bias) from the other operand, and whether that is the first.
_LINES: dict[str, Callable[[float | Coefficient, bool], Line | None]] = {
    "add": lambda other, first: (1.0, other),
    "sub": lambda other, first: (-1.0, other) if first else (1.0, -other),
    "mul": lambda other, first: (other, 0.0),
    "div": lambda other, first: None if first or other == 0 else (1.0 / other, 0.0),
    "neg": lambda other, first: (-1.0, 0.0),
}


def _line(planner: Planner, step: Step, x: Stored, at: int) -> Line | None:
    """(weight, bias) if the step is ``weight * x + bias``; `at`: which operand is x."""
    if step.kind not in _LINES or (step.kind != "neg" and planner.shape(step) != x.shape):
        return None
    if step.kind == "neg":
        return _LINES["neg"](0.0, False)
    other = step.inputs[1 - at]
    if other is None or (isinstance(other, str) and other not in planner.constants):
        return None
    value = _coefficient(planner, planner.read(other), x)
    return None if value is None else _LINES[step.kind](value, at == 1)


@handles("add", "sub", "mul", "div", "neg")
def arithmetic(planner: Planner, step: Step) -> Stored:
    """A line of one tensor, together with any lines that follow, or an operator on two."""
    tensors = [at for at, operand in enumerate(step.inputs) if operand in planner.network.values]
    if not tensors:
        raise Refused(f"{word(step)} of something that does not depend on the input; compute it beforehand")
    x = planner.tensor(step, tensors[0])
    line = _line(planner, step, x, tensors[0]) if len(tensors) == 1 else None
    if line is None:
        return _BINARY[step.kind](planner, step)
    weight, bias = line
    more = planner.following()
    while more is not None:
        at = [position for position, operand in enumerate(more.inputs) if operand == planner.end]
        line = _line(planner, more, x, at[0]) if at else None
        if line is None:
            break
        planner.absorb(more)
        weight, bias = weight * line[0], bias * line[0] + line[1]
        more = planner.following()
    if not all(isinstance(coefficient, Coefficient) or math.isfinite(coefficient) for coefficient in (weight, bias)):
        raise Refused(f"{word(step)} by a non-finite number")
    if not isinstance(weight, Coefficient) and not isinstance(bias, Coefficient):
        weight, bias = masks.line_in_front_of_softmax(planner.network, planner.end, x, weight, bias)
    if passes_on(planner, x, weight, bias):
        return x
    activation = planner.take_activation()
    if (weight, bias, activation) == (1.0, 0.0, "NONE"):
        return x
    maker = Maker(planner, step, step.kind)
    if (weight, bias, activation) == (-1.0, 1.0, "NONE") and masks.is_truth(x):
        return maker.affine(x, weight, bias, bounds=masks.TRUTH)
    return maker.affine(x, weight, bias, activation=activation)


def _add(planner: Planner, step: Step) -> Stored:
    maker = Maker(planner, step, "add")
    first, second = (_masked(planner, maker, step, operand) for operand in operands(planner, step))
    return maker.add(first, second, activation=planner.take_activation())


def _masked(planner: Planner, maker: Maker, step: Step, operand: Operand) -> Stored | str:
    """The operand; for a mask before a softmax no more than what matters, so that the mask does not fill the grid."""
    named = as_operand(maker, operand)
    if isinstance(operand, Stored) and masks.is_hiding(operand):
        return maker.affine(operand, 1.0, 0.0, "mask", bounds=masks.HIDING)
    if not isinstance(operand, Constant) or operand.trainable or not _only_for_softmax(planner, step):
        return named
    return maker.derived("mask", operand.shape, lambda mask: mask.clip(min=SURELY_MASKED), operand.name)


def _only_for_softmax(planner: Planner, step: Step) -> bool:
    """Whether only softmax reads a step's result, or what other masks make of it."""

    def passes(reader: Step) -> bool:
        names = reader.inputs if reader.kind == "add" else ()
        added = [planner.constants[name] for name in names if name in planner.constants]
        return reader.kind in ("reshape", "permute", "identity", "dropout") or any(map(masks.hides_or_keeps, added))

    readers = planner.readers(step)
    return bool(readers) and all(
        reader.kind == "softmax" or (passes(reader) and _only_for_softmax(planner, reader)) for reader in readers
    )


def _subtract(planner: Planner, step: Step) -> Stored:
    maker = Maker(planner, step, "sub")
    first, second = (as_operand(maker, operand) for operand in operands(planner, step))
    return maker.subtract(first, second, activation=planner.take_activation())


def _multiply(planner: Planner, step: Step) -> Stored:
    maker = Maker(planner, step, "mul")
    both = operands(planner, step)
    truths = all(
        masks.is_truth(operand)
        if isinstance(operand, Stored)
        else isinstance(operand, Constant) and masks.are_zeros_and_ones(operand)
        for operand in both
    )
    first, second = (as_operand(maker, operand) for operand in both)
    if truths:
        return maker.multiply(first, second, bounds=masks.TRUTH)
    return maker.multiply(first, second, activation=planner.take_activation())


def _divide(planner: Planner, step: Step) -> Stored:
    first, second = operands(planner, step)
    if second == 0:
        raise Refused(f"{word(step)} by 0")
    maker = Maker(planner, step, "div")
    if not isinstance(second, Stored):
        name = as_operand(maker, second)
        assert isinstance(name, str)
        inverse: Stored | str = maker.derived("inverse", maker.shape_of(name), lambda array: 1.0 / array, name)
    else:
        activation = planner.take_activation()
        if first == 1 and activation == "NONE":
            return maker.function("reciprocal", second, nonnegative=second.nonnegative)
        inverse = maker.function("reciprocal", second, "inverse", nonnegative=second.nonnegative)
        if isinstance(first, float):
            return maker.affine(inverse, first, 0.0, activation=activation)
        return maker.multiply(as_operand(maker, first), inverse, activation=activation)
    return maker.multiply(as_operand(maker, first), inverse, activation=planner.take_activation())


_BINARY = {"add": _add, "sub": _subtract, "mul": _multiply, "div": _divide}


def as_operand(maker: Maker, operand: Operand) -> Stored | str:
    """A tensor, or the name of a constant."""
    if isinstance(operand, float):
        return maker.array(operand, "number")
    return operand.name if isinstance(operand, Constant) else operand


@handles("maximum", "minimum")
def extreme(planner: Planner, step: Step) -> Stored:
    first, second = operands(planner, step)
    if not isinstance(first, Stored):
        first, second = second, first
    assert isinstance(first, Stored)
    largest = step.kind == "maximum"
    if isinstance(second, float):
        return clamped(planner, step, first, *((second, None) if largest else (None, second)))
    maker = Maker(planner, step, step.kind)
    if isinstance(second, Stored):
        return maker.binary(step.kind.upper(), first, second)
    # max(x, c) = relu(x - c) + c, min(x, c) = c - relu(c - x): the constant needs no code on the grid of x.
    if largest:
        return maker.add(maker.subtract(first, second.name, "above", activation="RELU"), second.name)
    return maker.subtract(second.name, maker.subtract(second.name, first, "below", activation="RELU"))


@handles("clamp")
def clamp(planner: Planner, step: Step) -> Stored:
    low, high = (step.attributes.get(name) for name in ("min", "max"))
    x = planner.tensor(step)
    if (low, high) == masks.TRUTH and x.grid.now.of_inputs and masks.is_truth(x):
        return x  # the input's own range ends there
    return clamped(planner, step, x, low, high)


def clamped(planner: Planner, step: Step, x: Stored, low: float | None, high: float | None) -> Stored:
    """x between two numbers."""
    low = None if low is None or low == -math.inf else float(low)
    high = None if high is None or high == math.inf else float(high)
    if low is not None and high is not None and low >= high:
        raise Refused(f"{word(step)} to ({low:g}, {high:g}), which leaves only one value")
    if (low is None and high is None) or (low is not None and low <= 0 and high is None and x.nonnegative):
        return x
    maker = Maker(planner, step, step.kind)
    if low == 0 and high in (None, 6.0):
        return maker.affine(x, 1.0, 0.0, activation="RELU" if high is None else "RELU6")
    symmetric = low in (0, None if high is None else -high)
    if low is not None and high is not None and low <= 0 <= high and (symmetric or not maker.is_int16()):
        # The ends of the result's range are those of the clamp.
        return maker.affine(x, 1.0, 0.0, bounds=(low, high))
    return maker.function("clamp", x, parameters=(low, high), nonnegative=low is not None and low >= 0)


@handles("square")
def square(planner: Planner, step: Step) -> Stored:
    x = planner.tensor(step)
    return Maker(planner, step, "square").multiply(x, x)


@handles("pow")
def power(planner: Planner, step: Step) -> Stored:
    x, exponent = planner.tensor(step), float(step.attributes["exponent"])
    if not math.isfinite(exponent):
        raise Refused(f"{word(step)} by a non-finite number")
    maker = Maker(planner, step, "pow")
    if exponent == 2:
        return maker.multiply(x, x)
    return maker.function("pow", x, parameters=(exponent,), nonnegative=x.nonnegative)
