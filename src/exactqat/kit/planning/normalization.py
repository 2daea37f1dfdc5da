# SPDX-License-Identifier: Apache-2.0
"""Normalizations by each example's own statistics. The device has no operator for them: they are decomposed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Unpack

from .maker import Coefficient, How, Maker
from .network import Step
from .planner import Planner, handles
from .refusals import Refused, need_separate, word
from .stored import Stored
from .weights import product

# As one more value in the row, a larger epsilon takes too much of the range of the others.
LARGEST_EPSILON = 1e-4
# Values of a row of length 1 are stored in steps of 1/128: rows with more values keep too little precision.
LONGEST_ROW = 1024


def _normalized(
    maker: Maker,
    x: Stored,
    axes: Sequence[int],
    epsilon: float,
    part: str | None,
    centered: bool = True,
    **how: Unpack[How],
) -> Stored:
    """(x - mean) / sqrt(variance + epsilon) over axes."""
    need_separate(maker.step, x.batch_axis not in axes, "over")
    if centered:
        average = maker.reduce("MEAN", x, axes, True, "mean", nonnegative=x.nonnegative)
        x = maker.subtract(x, average, "centered")
    if maker.is_int16() and _has_rows(x, axes):
        count = math.prod(x.shape[axis] for axis in axes)
        lengths = _squared_lengths(maker, x, len(axes))
        formula = (("mul", (0, 1 / count), ()), ("add", (1, epsilon), ()), ("rsqrt", (2,), ()))
        inverse = maker.function("composition", lengths, "inverse_deviation", formula, nonnegative=True)
    else:
        squared = maker.multiply(x, x, "squared")
        variance = maker.reduce("MEAN", squared, axes, True, "variance", nonnegative=True)
        inverse = maker.function("rsqrt", variance, "inverse_deviation", (epsilon,), nonnegative=True)
    return maker.multiply(x, inverse, part, **how)


def _has_rows(x: Stored, axes: Sequence[int]) -> bool:
    """Whether what is normalized lies in one piece on the device: over the last axes, after the batch."""
    last = x.rank - 1
    trailing = sorted(axes) == list(range(x.rank - len(axes), x.rank))
    return trailing and x.batch_axis == 0 < min(axes) and x.channels in (None, last)


def _squared_lengths(maker: Maker, x: Stored, axes: int) -> Stored:
    """The sum of squares over the last axes, which the result has with length 1, as products of rows with themselves.

    Squares that are stored do not do in a transformer: beside those of its few large values, whole rows of others are
    less than a step. A product is rounded once, after its sum.
    """
    lead = x.shape[: x.rank - axes]
    rows = maker.reshape(x, (lead[0], math.prod(lead[1:]), 1, math.prod(x.shape[len(lead) :])), 0, "rows")
    lengths = product(maker, rows, rows, "products", adj_y=True, nonnegative=True)
    return maker.reshape(lengths, (*lead, *[1] * axes), 0, "squared_lengths")


def _scaled(
    maker: Maker,
    x: Stored,
    weight: str | None,
    bias: str | None,
    activation: str,
    axis: int | None,
    factor: float = 1.0,
) -> Stored:
    """The last step: factor * weight * x + bias, with one weight for each entry of an axis, or of several axes."""
    if axis is not None and x.rank <= 4:
        slope = factor if weight is None else Coefficient.of(weight) * factor
        offset = 0.0 if bias is None else Coefficient.of(bias)
        return maker.affine(x, slope, offset, activation=activation, channel_axis=axis)
    if axis is not None:
        sizes = [size if at == axis else 1 for at, size in enumerate(x.shape)]
        weight, bias = (None if name is None else maker.reshaped(name, sizes) for name in (weight, bias))
    last: How = {"activation": activation} if bias is None else {}
    part = None if bias is None else "scaled"
    if weight is not None:
        shape = maker.shape_of(weight)
        scaled = weight if factor == 1 else maker.derived("weight", shape, lambda array: array * factor, weight)
        x = maker.multiply(x, scaled, part, **last)
    elif factor != 1:
        x = maker.affine(x, factor, 0.0, part, **last)
    return x if bias is None else maker.add(x, bias, activation=activation)


@handles("layer_norm", "rms_norm")
def layer_norm(planner: Planner, step: Step) -> Stored:
    x = planner.tensor(step)
    weight = planner.optional(step, 1)
    bias = planner.optional(step, 2) if step.kind == "layer_norm" else None
    axes = tuple(int(axis) for axis in step.attributes["axes"])
    epsilon = float(step.attributes.get("epsilon") or 0.0)
    activation = planner.take_activation()
    maker = Maker(planner, step, step.kind)
    axis = axes[0] if len(axes) == 1 else None
    short = axis is not None and axis != x.batch_axis and x.shape[axis] <= LONGEST_ROW
    if axis is not None and short and epsilon <= LARGEST_EPSILON and not maker.is_int16():
        return _by_length(maker, x, weight, bias, activation, axis, epsilon)
    centered = step.kind == "layer_norm"
    if weight is None and bias is None:
        return _normalized(maker, x, axes, epsilon, None, centered, activation=activation)
    return _scaled(maker, _normalized(maker, x, axes, epsilon, "normalized", centered), weight, bias, activation, axis)


def _by_length(
    maker: Maker, x: Stored, weight: str | None, bias: str | None, activation: str, axis: int, epsilon: float
) -> Stored:
    """The normalized row is sqrt(count) times a row of length 1, for which the device has an operator.

    Its rows are exact, however much their deviations differ; a stored deviation has 256 values for the largest and the
    smallest together.
    """
    first = None
    if maker.step.kind == "layer_norm":
        first = average = maker.reduce("MEAN", x, (axis,), True, "mean", nonnegative=x.nonnegative)
        x = maker.subtract(x, average, "centered")
    row = _of_length_one(maker, x, first, axis, epsilon)
    return _scaled(maker, row, weight, bias, activation, axis, math.sqrt(x.shape[axis]))


def _of_length_one(maker: Maker, x: Stored, one_value: Stored | None, axis: int, epsilon: float) -> Stored:
    """x / sqrt(its squared length + count * epsilon): the row is divided by its length with one more value in it.

    one_value: any tensor of one value in each row.
    """
    count = x.shape[axis]
    if epsilon == 0:
        return maker.unary("L2_NORMALIZATION", x, "normalized", attributes={"axis": axis})
    if one_value is None:
        one_value = maker.slice(x, [(axis, 0, 1, 1)], "first")
    constant = (("mul", (0, 0.0), ()), ("add", (1, math.sqrt(count * epsilon)), ()))
    more = maker.function("composition", one_value, "epsilon", constant, nonnegative=True)
    longer = maker.concatenate([x, more], axis, "with_epsilon")
    row = maker.unary("L2_NORMALIZATION", longer, "normalized_with_epsilon", attributes={"axis": axis})
    return maker.slice(row, [(axis, 0, count, 1)], "normalized")


@handles("group_norm")
def group_norm(planner: Planner, step: Step) -> Stored:
    x, groups = planner.tensor(step), int(step.attributes["groups"])
    weight, bias = planner.optional(step, 1), planner.optional(step, 2)
    axis = int(step.attributes.get("channel_axis", 1))
    channels = x.shape[axis]
    activation = planner.take_activation()
    maker = Maker(planner, step, "group_norm")
    spatial = [at for at in range(x.rank) if at not in (axis, x.batch_axis)]
    plain = weight is None and bias is None
    how: How = {"activation": activation} if plain else {}
    part = None if plain else "normalized"
    epsilon = float(step.attributes.get("epsilon") or 0.0)
    if groups in (1, channels):
        axes = spatial if groups == channels else sorted([*spatial, axis])
        if not axes:
            raise Refused(f"{word(step)} with {groups} groups of one value each")
        result = _normalized(maker, x, axes, epsilon, part, **how)
    else:
        if axis != 1 or x.batch_axis != 0:
            raise Refused(f"{word(step)} with channels on axis {axis}; only axis 1 is supported")
        shape = (x.shape[0], groups, channels // groups, math.prod(x.shape[2:]))
        split = maker.reshape(x, shape, 0, "groups")
        by_group = _normalized(maker, split, (2, 3), epsilon, "by_group", **how)
        result = maker.reshape(by_group, x.shape, 0, part)
        result.channels = axis
    return result if plain else _scaled(maker, result, weight, bias, activation, axis)


# A row shorter than this vanishes on a grid: its steps are at least as wide.
_FINEST_STEP = 1e-5


@handles("normalize")
def normalize(planner: Planner, step: Step) -> Stored:
    """x / max(length, epsilon)"""
    x, axis = planner.tensor(step), int(step.attributes["axis"])
    need_separate(step, axis != x.batch_axis, "over")
    maker = Maker(planner, step, "normalize")
    epsilon = float(step.attributes.get("epsilon") or 0.0)
    if epsilon > _FINEST_STEP:
        mean = maker.reduce("MEAN", maker.multiply(x, x, "squares"), (axis,), True, "mean", nonnegative=True)
        inverse = (
            ("mul", (0, float(x.shape[axis])), ()),
            *(("sqrt", (1,), ()), ("maximum", (2, epsilon), ()), ("reciprocal", (3,), ())),
        )
        return maker.multiply(x, maker.function("composition", mean, "inverse", inverse, nonnegative=True))
    if maker.is_int16():  # no runtime has the operator in int16
        row = _normalized(maker, x, (axis,), 0.0, "row", centered=False)
        return maker.affine(row, 1 / math.sqrt(x.shape[axis]), 0.0)
    return maker.unary("L2_NORMALIZATION", x, attributes={"axis": axis, "epsilon": epsilon})
