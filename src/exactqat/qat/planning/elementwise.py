# SPDX-License-Identifier: Apache-2.0
"""Sums, products, quotients, maxima and minima of tensors, constants and numbers."""

from __future__ import annotations

import math

from ..network import Constant, Step
from .planner import Maker, Operand, Planner, Stored, handles
from .refusals import Refused, word

# Behind this, softmax gives less than half a step of its grid, whatever stands beside it.
SURELY_MASKED = -32.0


def operands(planner: Planner, step: Step) -> tuple[Operand, Operand]:
    """The two operands, one of which is a stored tensor."""
    first, second = (planner.read(each) for each in step.inputs)
    if not isinstance(first, Stored) and not isinstance(second, Stored):
        raise Refused(f"{word(step)} of two operands that do not depend on the input; compute it beforehand")
    return first, second


@handles("add")
def add(planner: Planner, step: Step) -> Stored:
    first, second = operands(planner, step)
    if isinstance(first, float):
        first, second = second, first
    if isinstance(first, Stored) and isinstance(second, float):
        return shifted_and_scaled(planner, step, "add", first, 1.0, second)
    maker = Maker(planner, step, "add")
    names = [_masked(planner, maker, step, each) for each in (first, second)]
    return maker.add(names[0], names[1], activation=planner.take_activation())


def _masked(planner: Planner, maker: Maker, step: Step, operand: Operand) -> Stored | str:
    """The operand; of a mask in front of a softmax no more than what matters, so that the grid is not all mask."""
    if not isinstance(operand, Constant):
        assert isinstance(operand, Stored)
        return operand
    readers = planner.readers(step)
    if operand.trainable or not readers or any(reader.kind != "softmax" for reader in readers):
        return operand.name
    return maker.derived("mask", operand.shape, lambda mask: mask.clip(min=SURELY_MASKED), operand.name)


def shifted_and_scaled(planner: Planner, step: Step, name: str, x: Stored, weight: float, bias: float) -> Stored:
    """``weight * x + bias`` with an activation that follows; x itself where that is all there is."""
    if not (math.isfinite(weight) and math.isfinite(bias)):
        raise Refused(f"{word(step)} by a number that is not finite")
    activation = planner.take_activation()
    if weight == 1 and bias == 0 and activation == "NONE":
        return x
    return Maker(planner, step, name).affine(x, weight, bias, activation=activation)


@handles("sub")
def subtract(planner: Planner, step: Step) -> Stored:
    first, second = operands(planner, step)
    if isinstance(first, Stored) and isinstance(second, float):
        return shifted_and_scaled(planner, step, "sub", first, 1.0, -second)
    if isinstance(first, float) and isinstance(second, Stored):
        return shifted_and_scaled(planner, step, "sub", second, -1.0, first)
    maker = Maker(planner, step, "sub")
    return maker.subtract(_named(first), _named(second), activation=planner.take_activation())


@handles("mul")
def multiply(planner: Planner, step: Step) -> Stored:
    first, second = operands(planner, step)
    if isinstance(first, float):
        first, second = second, first
    if isinstance(first, Stored) and isinstance(second, float):
        return shifted_and_scaled(planner, step, "mul", first, second, 0.0)
    return Maker(planner, step, "mul").multiply(_named(first), _named(second), activation=planner.take_activation())


@handles("div")
def divide(planner: Planner, step: Step) -> Stored:
    first, second = operands(planner, step)
    if isinstance(second, float):
        if second == 0:
            raise Refused(f"{word(step)} by 0")
        assert isinstance(first, Stored)
        return shifted_and_scaled(planner, step, "div", first, 1.0 / second, 0.0)
    maker = Maker(planner, step, "div")
    if isinstance(second, Constant):
        constant = maker.derived("inverse", second.shape, lambda array: 1.0 / array, second.name)
        return maker.multiply(_named(first), constant, activation=planner.take_activation())
    assert isinstance(second, Stored)
    numerator = first if isinstance(first, Stored) else first.name if isinstance(first, Constant) else None
    activation = planner.take_activation()
    if numerator is not None:
        inverse = maker.function("reciprocal", second, "inverse", nonnegative=second.nonnegative)
        return maker.multiply(numerator, inverse, activation=activation)
    assert isinstance(first, float)
    if first == 1 and activation == "NONE":
        return maker.function("reciprocal", second, nonnegative=second.nonnegative)
    inverse = maker.function("reciprocal", second, "inverse", nonnegative=second.nonnegative)
    return maker.affine(inverse, float(first), 0.0, activation=activation)


def _named(operand: Operand) -> Stored | str:
    if isinstance(operand, Constant):
        return operand.name
    assert isinstance(operand, Stored)
    return operand


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
    return clamped(planner, step, planner.tensor(step), low, high)


def clamped(planner: Planner, step: Step, x: Stored, low: float | None, high: float | None) -> Stored:
    """x between two numbers."""
    low = None if low is None or low == -math.inf else float(low)
    high = None if high is None or high == math.inf else float(high)
    if low is not None and high is not None and low >= high:
        raise Refused(f"{word(step)} to ({low:g}, {high:g}), which leaves one value only")
    if (low is None and high is None) or (low is not None and low <= 0 and high is None and x.nonnegative):
        return x
    maker = Maker(planner, step, "clamp" if step.kind == "clamp" else step.kind)
    if low == 0 and high in (None, 6.0):
        return maker.affine(x, 1.0, 0.0, activation="RELU" if high is None else "RELU6")
    if low is not None and high is not None and low <= 0 <= high:
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
    maker = Maker(planner, step, "pow")
    if exponent == 2:
        return maker.multiply(x, x)
    return maker.function("pow", x, parameters=(exponent,), nonnegative=x.nonnegative)


@handles("neg")
def negate(planner: Planner, step: Step) -> Stored:
    return shifted_and_scaled(planner, step, "neg", planner.tensor(step), -1.0, 0.0)
