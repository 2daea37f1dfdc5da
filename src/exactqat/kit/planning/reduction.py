# SPDX-License-Identifier: Apache-2.0
"""One value from many: means, sums, extremes, deviations, softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .activations import is_last, leave_outside, outside
from .maker import Maker
from .network import Step
from .planner import Planner, handles
from .refusals import Refused, need_separate, word
from .stored import Stored


def _axes(step: Step) -> tuple[tuple[int, ...], bool]:
    return tuple(int(axis) for axis in step.attributes["axes"]), bool(step.attributes["keep_dims"])


def _count(x: Stored, axes: Sequence[int]) -> int:
    return math.prod(x.shape[axis] for axis in axes)


@handles("mean")
def mean(planner: Planner, step: Step) -> Stored:
    x = planner.tensor(step)
    axes, keep = _axes(step)
    if not axes:
        return x
    return Maker(planner, step, "mean").reduce("MEAN", x, axes, keep, nonnegative=x.nonnegative)


@handles("sum")
def total(planner: Planner, step: Step) -> Stored:
    x = planner.tensor(step)
    axes, keep = _axes(step)
    return sum_of(Maker(planner, step, "sum"), x, axes, keep, nonnegative=x.nonnegative)


def sum_of(
    maker: Maker, x: Stored, axes: Sequence[int], keep: bool, part: str | None = None, nonnegative: bool = False
) -> Stored:
    """The mean times the count: LiteRT's reference kernel for SUM takes int8 for uint8."""
    average = maker.reduce("MEAN", x, axes, keep, f"{part}_mean" if part else "mean", nonnegative=nonnegative)
    return maker.affine(average, float(_count(x, axes)), 0.0, part, nonnegative=nonnegative)


@handles("amax", "amin", "prod")
def extreme_or_product(planner: Planner, step: Step) -> Stored:
    x = planner.tensor(step)
    axes, keep = _axes(step)
    word, kind = {"amax": ("max", "REDUCE_MAX"), "amin": ("min", "REDUCE_MIN"), "prod": ("prod", "REDUCE_PROD")}[
        step.kind
    ]
    if step.kind == "prod" and _count(x, axes) == 1:
        kind = "REDUCE_MAX"  # the value itself, which LiteRT's kernel of products would put on another grid
    return Maker(planner, step, word).reduce(kind, x, axes, keep)


@handles("var", "std")
def deviation(planner: Planner, step: Step) -> Stored:
    x = planner.tensor(step)
    axes, keep = _axes(step)
    maker = Maker(planner, step, step.kind)
    count, correction = _count(x, axes), float(step.attributes.get("correction", 0) or 0)
    if count <= correction:
        raise Refused(f"{word(step)} of {count} value(s) with correction {correction:g}")
    root = step.kind == "std"
    centered = maker.subtract(x, maker.reduce("MEAN", x, axes, True, "mean", nonnegative=x.nonnegative), "centered")
    squared = maker.multiply(centered, centered, "squared")
    part = "variance" if root else None
    if correction:
        biased = maker.reduce("MEAN", squared, axes, keep, "biased", nonnegative=True)
        result = maker.affine(biased, count / (count - correction), 0.0, part, nonnegative=True)
    else:
        result = maker.reduce("MEAN", squared, axes, keep, part, nonnegative=True)
    return maker.function("sqrt", result, nonnegative=True) if root else result


@handles("norm")
def norm(planner: Planner, step: Step) -> Stored:
    x = planner.tensor(step)
    axes, keep = _axes(step)
    maker = Maker(planner, step, "norm")
    order = float(step.attributes.get("order", 2))
    if order == 1:
        return sum_of(maker, maker.function("abs", x, "magnitude", nonnegative=True), axes, keep, nonnegative=True)
    if order != 2:
        raise Refused(f"{word(step)} of order {order:g}; 1 and 2 are supported")
    squares = sum_of(maker, maker.multiply(x, x, "squared"), axes, keep, "sum", nonnegative=True)
    return maker.function("sqrt", squares, nonnegative=True)


@handles("argmax")
def largest_index(planner: Planner, step: Step) -> Stored:
    if outside(planner, step):
        return leave_outside(planner, step, "argmax")
    if not is_last(planner, step):
        raise Refused(f"{word(step)} whose result the network uses further; it is only supported as the last step")
    # As the device's last operator: its results are plain integers, without a grid.
    x, axis = planner.tensor(step), int(step.attributes["axis"])
    maker = Maker(planner, step, "argmax")
    need_separate(step, axis != x.batch_axis, "over")
    if step.attributes.get("keep_dims"):
        raise Refused(f"{word(step)} that keeps its axis, in the file; let it drop the axis")
    if x.grid.is_int16:
        raise Refused(f"{word(step)} in 16 bits in the file; leave it outside (keep_final_activation=False)")
    return maker.leave(x, "ARG_MAX")


@handles("softmax", "log_softmax")
def softmax(planner: Planner, step: Step) -> Stored:
    if outside(planner, step):
        return leave_outside(planner, step, step.kind)
    x, axis = planner.tensor(step), int(step.attributes["axis"])
    maker = Maker(planner, step, step.kind)
    need_separate(step, axis != x.batch_axis, "over")
    return maker.unary(step.kind.upper(), x, attributes={"axis": axis}, nonnegative=step.kind == "softmax")
