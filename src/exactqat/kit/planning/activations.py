# SPDX-License-Identifier: Apache-2.0
"""Functions of one value."""

from __future__ import annotations

from ..device import OPERATORS
from ..device.functions import FUNCTIONS
from .maker import Coefficient, Maker
from .network import Step
from .planner import Planner, fused_activation, handles
from .stored import Stored


@handles("relu", "relu6")
def rectify(planner: Planner, step: Step) -> Stored:
    """Unfused: after a tensor that other steps read too."""
    x = planner.tensor(step)
    activation = fused_activation(step)
    if activation == "RELU" and x.nonnegative:
        return x
    return Maker(planner, step, "activation").affine(x, 1.0, 0.0, activation=activation)


@handles("hardsigmoid")
def hard_sigmoid(planner: Planner, step: Step) -> Stored:
    # Its two clamps are the ends of the int8 range.
    return Maker(planner, step, "hardsigmoid").affine(planner.tensor(step), 1 / 6, 0.5, bounds=(0.0, 1.0))


@handles("hardswish")
def hard_swish(planner: Planner, step: Step) -> Stored:
    """x * hard_sigmoid(x), in two operators: the runtime's own HARD_SWISH is not among its fast kernels."""
    x = planner.tensor(step)
    maker = Maker(planner, step, "hardswish")
    return maker.multiply(x, maker.affine(x, 1 / 6, 0.5, "gate", bounds=(0.0, 1.0)))


def outside(planner: Planner, step: Step) -> bool:
    """Whether a step is left to the program that runs the device: only the model's caller reads it."""
    return is_last(planner, step) and not planner.keep_final_activation


def is_last(planner: Planner, step: Step) -> bool:
    """Whether only the model's caller reads a step."""
    return planner.returned(step) and not planner.readers(step)


@handles("sigmoid")
def sigmoid(planner: Planner, step: Step) -> Stored:
    if outside(planner, step):
        return leave_outside(planner, step, "sigmoid")
    return logistic(Maker(planner, step, "sigmoid"), planner.tensor(step))


def leave_outside(planner: Planner, step: Step, name: str) -> Stored:
    """A final function of the results: computed in training, left to the program that runs the device."""
    x = planner.tensor(step)
    return Maker(planner, step, name).leave(x)


def logistic(maker: Maker, x: Stored, part: str | None = None) -> Stored:
    return maker.unary("LOGISTIC", x, part, nonnegative=True)


@handles("silu")
def silu(planner: Planner, step: Step) -> Stored:
    x = planner.tensor(step)
    maker = Maker(planner, step, "silu")
    return maker.multiply(x, logistic(maker, x, "gate"))


def by_one_operator(table: bool) -> tuple[str, ...]:
    """Kinds of functions that become one device operator: a table, or one that computes exactly this function."""
    return tuple(function.name for function in FUNCTIONS.values() if function.operator and function.is_table == table)


@handles(*by_one_operator(table=False))
def direct(planner: Planner, step: Step) -> Stored:
    """By a device operator that is fast in the runtimes."""
    x, function = planner.tensor(step), FUNCTIONS[step.kind]
    if step.kind == "leaky_relu" and float(step.attributes["slope"]) < 0:
        return table(planner, step)
    maker, arguments = Maker(planner, step, step.kind), function.of_step(step.attributes)
    dtype = "int16" if maker.is_int16() else "int8"
    if not OPERATORS[function.operator].planned_in(dtype) or maker.is_absent(function.operator, dtype):
        return table(planner, step)
    return maker.unary(function.operator, x, attributes=arguments, nonnegative=function.nonnegative)


@handles(*by_one_operator(table=True))
def table(planner: Planner, step: Step) -> Stored:
    """By a table over all codes."""
    x, function = planner.tensor(step), FUNCTIONS[step.kind]
    parameters = tuple(function.of_step(step.attributes).values())
    maker = Maker(planner, step, step.kind)
    return maker.function(step.kind, x, parameters=parameters, nonnegative=function.nonnegative)


@handles("composition")
def composition(planner: Planner, step: Step) -> Stored:
    """By one table, whatever it consists of."""
    maker = Maker(planner, step, step.kind)
    return maker.function(step.kind, planner.tensor(step), parameters=step.attributes["instructions"])


@handles("prelu")
def prelu(planner: Planner, step: Step) -> Stored:
    x, slope = planner.tensor(step), planner.constant(step, 1)
    axis = int(step.attributes.get("channel_axis", 1))
    (count,) = planner.constants[slope].shape or (1,)
    maker = Maker(planner, step, "prelu")
    if maker.is_int16():
        # relu(x) - slope * relu(-x): the slopes of PRELU are int8 there.
        below = maker.affine(x, -1.0, 0.0, "below", activation="RELU", channel_axis=axis)
        scaled = maker.affine(below, -Coefficient.of(slope), 0.0, "scaled", channel_axis=axis)
        above = maker.affine(x, 1.0, 0.0, "above", activation="RELU", channel_axis=axis)
        return maker.add(above, scaled)
    shape = [count if at == axis else 1 for at in range(x.rank)][1:] if count > 1 else [1] * (x.rank - 1)
    slope = maker.reshaped(slope, shape)
    return maker.store("PRELU", [x, slope], x.shape, channels=x.channels)
