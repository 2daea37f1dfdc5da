# SPDX-License-Identifier: Apache-2.0
"""Means and maxima over windows."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from ..device.arithmetic import same_padding
from .maker import Maker
from .movement import MOST_PARTS, in_all_axes, one_by_one, own_padding, take, within
from .network import Step
from .planner import Planner, handles
from .refusals import Refused, word
from .stored import Stored

Pairs = tuple[tuple[int, int], ...]


def _sizes(step: Step, x: Stored) -> tuple[int, tuple[int, ...]]:
    """The channel axis and the sizes of the others, except the batch's."""
    axis = int(step.attributes["channel_axis"])
    if x.rank > 4:
        raise Refused(f"{word(step)} over {x.rank - 2} axes; the device pools over at most two")
    return axis, tuple(size for at, size in enumerate(x.shape) if at not in (axis, x.batch_axis))


def _pairs(padding: Sequence[Sequence[int]]) -> Pairs:
    return tuple((int(before), int(after)) for before, after in padding)


def pool(
    maker: Maker,
    kind: str,
    x: Stored,
    window: Sequence[int],
    strides: Sequence[int],
    padding: str,
    axis: int,
    part: str | None = None,
) -> Stored:
    """One pool without padding ("VALID"), or with TensorFlow's SAME, whose padding does not affect the result."""
    spatial = iter(zip(window, strides, strict=True))
    shape = []
    for at, size in enumerate(x.shape):
        if at in (axis, x.batch_axis):
            shape.append(size)
            continue
        side, stride = next(spatial)
        shape.append(-(-size // stride) if padding == "SAME" else (size - side) // stride + 1)
    attributes = {"filter_size": tuple(window), "strides": tuple(strides), "padding": padding, "channel_axis": axis}
    return maker.store(kind, [x], shape, part, attributes=attributes, channels=axis)


@handles("max_pool")
def max_pool(planner: Planner, step: Step) -> Stored:
    x, attributes = planner.tensor(step), step.attributes
    axis, sizes = _sizes(step, x)
    window, strides, padding = tuple(attributes["window"]), tuple(attributes["strides"]), own_padding(planner, step, x)
    if any(apart != 1 and side > 1 for apart, side in zip(attributes["dilations"], window, strict=True)):
        raise Refused(f"{word(step)} with dilation {tuple(attributes['dilations'])}; use no dilation")
    # Along an axis with one window that covers all of the image, what is beyond the image does not matter.
    for at, (size, side, stride, pair) in enumerate(zip(sizes, window, strides, padding, strict=True)):
        if size > 0 and _inside(size, side, stride, *pair) == [(0, size)]:
            window = (*window[:at], size, *window[at + 1 :])
            padding = (*padding[:at], (0, 0), *padding[at + 1 :])
    maker = Maker(planner, step, "pool")
    if not any(map(any, padding)):
        return pool(maker, "MAX_POOL_2D", x, window, strides, "VALID", axis)
    if padding == tuple(same_padding(*geometry) for geometry in zip(sizes, window, strides, strict=True)):
        return pool(maker, "MAX_POOL_2D", x, window, strides, "SAME", axis)
    x = below_all(maker, x, in_all_axes(x, axis, padding), "padded")
    return pool(maker, "MAX_POOL_2D", x, window, strides, "VALID", axis)


def _inside(size: int, side: int, stride: int, before: int, after: int) -> list[tuple[int, int]]:
    """(start, stop) of what windows see of the image itself."""
    starts = range(-before, size + after - side + 1, stride)
    return [(max(start, 0), min(start + side, size)) for start in starts]


def below_all(maker: Maker, x: Stored, paddings: Sequence[tuple[int, int]], part: str | None = None) -> Stored:
    """Padding that is never the maximum."""
    return maker.pad(x, paddings, part, 0.0 if x.nonnegative else None)  # zeros change no maximum


@handles("avg_pool")
def average_pool(planner: Planner, step: Step) -> Stored:
    x, attributes = planner.tensor(step), step.attributes
    axis, sizes = _sizes(step, x)
    window, strides, padding = tuple(attributes["window"]), tuple(attributes["strides"]), _pairs(attributes["padding"])
    over = tuple(int(excess) for excess in attributes.get("over") or (0,) * len(sizes))
    counts_zeros, divisor = bool(attributes.get("count_include_pad", True)), attributes.get("divisor")
    maker = Maker(planner, step, "pool")
    reach = tuple((before, after + more) for (before, after), more in zip(padding, over, strict=True))
    same = tuple(same_padding(*geometry) for geometry in zip(sizes, window, strides, strict=True))
    counts_all = not any(over) and (counts_zeros or not any(map(any, padding)))
    if divisor is None and not counts_all and reach == same and not (counts_zeros and any(map(any, padding))):
        return pool(maker, "AVERAGE_POOL_2D", x, window, strides, "SAME", axis)
    factors = _factors(sizes, window, strides, padding, over, counts_zeros, divisor)
    seen = [
        _inside(size, side, stride, *pair)
        for size, side, stride, pair in zip(sizes, window, strides, reach, strict=True)
    ]
    # A pool over all of a larger image is a mean, which has its own grid; a pool's result keeps its input's.
    covers = all(spans == [(0, size)] for spans, size in zip(seen, sizes, strict=True)) and math.prod(sizes) > 1
    if (covers or any(map(any, reach))) and _better_by_windows(seen, factors):
        counts = _products([np.array([stop - start for start, stop in spans], float) for spans in seen])
        ratios = factors * (counts / float(np.prod(window)))  # what the means of `seen` are multiplied by
        plain = bool(np.allclose(ratios, 1, rtol=1e-12))
        averaged = _by_windows(maker, x, axis, seen, None if plain else "of_all", average=True)
        return averaged if plain else _times(maker, averaged, axis, ratios)
    if any(map(any, reach)):
        x = maker.pad(x, in_all_axes(x, axis, reach), "padded")
    full = bool(np.all(factors == 1))
    averaged = pool(maker, "AVERAGE_POOL_2D", x, window, strides, "VALID", axis, None if full else "of_all")
    return averaged if full else _times(maker, averaged, axis, factors)


# A mean that includes padding is multiplied by this factor, which widens the steps of its grid just as much.
_LARGEST_FACTOR = 4.0


def _better_by_windows(seen: Sequence[Sequence[tuple[int, int]]], factors: np.ndarray) -> bool:
    """Whether to take the mean of what each window sees of the image, instead of that with all the padding.

    seen: as returned by `_inside`, for each axis; factors: what the mean with the padding is multiplied by.
    """
    if any(start >= stop for spans in seen for start, stop in spans):
        return False
    if all(len(spans) == 1 for spans in seen):
        return True
    return float(factors.max()) > _LARGEST_FACTOR and sum(map(len, seen)) <= MOST_PARTS


def _products(along: Sequence[np.ndarray]) -> np.ndarray:
    """The products of one number for each axis, at every place."""
    return functools.reduce(np.multiply.outer, along)


def _times(maker: Maker, averaged: Stored, axis: int, factors: np.ndarray) -> Stored:
    """factors: by position."""
    nonnegative = averaged.nonnegative
    if np.all(factors == factors.flat[0]):
        return maker.affine(averaged, float(factors.flat[0]), 0.0, channel_axis=axis, nonnegative=nonnegative)
    spatial = iter(factors.shape)
    shape = [1 if at in (axis, averaged.batch_axis) else next(spatial) for at in range(averaged.rank)]
    return maker.multiply(averaged, maker.array(factors.reshape(shape), "ratios"), nonnegative=nonnegative)


def _factors(
    sizes: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    padding: Pairs,
    over: Sequence[int],
    counts_zeros: bool,
    divisor: float | None,
) -> np.ndarray:
    """The factor for the mean over whole windows, for every position of the result."""
    counts = []
    for size, side, stride, (before, after), more in zip(sizes, window, strides, padding, over, strict=True):
        counted = np.zeros(size + before + after + more)
        counted[before : before + size] = 1
        if counts_zeros:
            counted[: size + before + after] = 1
        count = (counted.size - side) // stride + 1
        counts.append(np.array([counted[at * stride : at * stride + side].sum() for at in range(count)]))
    whole = float(np.prod(window))
    if divisor is not None:
        return np.full([len(array) for array in counts], whole / float(divisor))
    return whole / _products(counts)


def _windows(size: int, result: int) -> list[tuple[int, int]]:
    """(start, stop) of the windows of adaptive pooling."""
    return [(at * size // result, -(-(at + 1) * size // result)) for at in range(result)]


def _uniform(windows: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """(window, stride) if one pool without padding has these windows."""
    side = {stop - start for start, stop in windows}
    steps = {second[0] - first[0] for first, second in zip(windows, windows[1:], strict=False)}
    if len(side) != 1 or len(steps) > 1 or windows[0][0] != 0:
        return None
    stride = steps.pop() if steps else side.copy().pop()
    return (side.pop(), stride) if stride > 0 else None


@handles("adaptive_avg_pool", "adaptive_max_pool")
def adaptive_pool(planner: Planner, step: Step) -> Stored:
    x = planner.tensor(step)
    axis, sizes = _sizes(step, x)
    results = tuple(int(size) for size in step.attributes["size"])
    average = step.kind == "adaptive_avg_pool"
    if results == sizes:
        return x
    spatial = [at for at in range(x.rank) if at not in (axis, x.batch_axis)]
    if all(result == 1 for result in results):
        maker = Maker(planner, step, "mean" if average else "max")
        if average:
            return maker.reduce("MEAN", x, spatial, True, nonnegative=x.nonnegative)
        return maker.reduce("REDUCE_MAX", x, spatial, True)
    maker = Maker(planner, step, "pool")
    kind = "AVERAGE_POOL_2D" if average else "MAX_POOL_2D"
    windows = [_windows(size, result) for size, result in zip(sizes, results, strict=True)]
    uniform = [_uniform(spans) for spans in windows]
    if all(pair is not None for pair in uniform):
        sides, strides = zip(*[pair for pair in uniform if pair is not None], strict=True)
        return pool(maker, kind, x, sides, strides, "VALID", axis)
    work = [spans for spans in windows if len(spans) != spans[-1][1]]
    if sum(map(len, work)) > MOST_PARTS:
        raise Refused(
            f"{word(step)} of {sizes} to {results}, with windows of different sizes; use a divisor of the size"
        )
    return _by_windows(maker, x, axis, windows, None, average)


def _by_windows(
    maker: Maker, x: Stored, axis: int, windows: Sequence[Sequence[tuple[int, int]]], part: str | None, average: bool
) -> Stored:
    """Means or maxima of slices, along one axis after the other; axes with one window are done at once.

    windows: (start, stop) of all windows, for each axis.
    """
    spatial = [at for at in range(x.rank) if at not in (axis, x.batch_axis)]
    work = [
        (at, spans)
        for at, spans in zip(spatial, windows, strict=True)
        if list(spans) != [(place, place + 1) for place in range(x.shape[at])]
    ]
    whole = [at for at, spans in work if average and list(spans) == [(0, x.shape[at])]]
    work = [pair for pair in work if pair[0] not in whole]
    if whole:
        x = maker.reduce("MEAN", x, whole, True, within(part, "mean") if work else part, nonnegative=x.nonnegative)
    for (at, last), (_, spans) in zip(one_by_one([at for at, _ in work], part), work, strict=True):
        if all(stop - start == 1 for start, stop in spans):
            x = take(maker, x, at, [start for start, _ in spans], last)
            continue
        pieces = []
        for index, (start, stop) in enumerate(spans):
            name = within(part, f"axis_{at}_window_{index}")
            piece = x if (start, stop) == (0, x.shape[at]) else maker.slice(x, [(at, start, stop, 1)], name)
            if stop - start > 1 and average:
                result = last if len(spans) == 1 else f"{name}_mean"
                piece = maker.reduce("MEAN", piece, [at], True, result, nonnegative=x.nonnegative)
            elif stop - start > 1:
                window = [stop - start if k == at else 1 for k in spatial]
                result = last if len(spans) == 1 else f"{name}_largest"
                piece = pool(maker, "MAX_POOL_2D", piece, window, window, "VALID", axis, result)
            pieces.append(piece)
        x = pieces[0] if len(pieces) == 1 else maker.concatenate(pieces, at, last)
    return x
