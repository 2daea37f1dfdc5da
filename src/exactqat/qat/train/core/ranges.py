# SPDX-License-Identifier: Apache-2.0
"""Ranges: where the min and max of a quantized tensor come from, and how they move.

Five rules hold for every policy. A range always contains zero, so that zero (padding, ReLU's floor) is represented
exactly. A range narrower than `SMALLEST_WIDTH` (2**-60), such as that of an all-zero tensor, has no usable scale;
``[0, 1]`` is used instead, both in training and on the device. A range of 16 bits is symmetric, because the zero point
of int16 is 0. Values that are not finite do not move a range. Averages are float32, every operation rounded by itself:
the same batches give the same bits in every framework, compiled or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ....kit.planning.plans import SMALLEST_WIDTH
from .primitives import Array, Ends, NumberPrimitives, Primitives, RangePrimitives

# Policies whose ranges every training batch moves, without gradients.
FOLLOWING = ("ema", "last_batch", "percentile")
# Policies whose ranges calibration sets before training.
CALIBRATED = ("learned", "min_max")
_FRACTIONS = 1.0 - np.arange(24, dtype=np.float32) / 32
# How many values of a batch decide where a learned range starts.
_SAMPLE = 2**14
_LOWEST = float(np.finfo(np.float32).min)


class DeviceGrid(NamedTuple):
    """A result's grid as the device knows it, for operators that round in its codes."""

    scale: Array
    zero_point: Array


def grid_steps(bits: int, narrow_range: bool) -> int:
    """Steps between the lowest and the highest code."""
    return 2**bits - 1 - int(narrow_range)


def with_width(p: RangePrimitives, low: Array, high: Array) -> Ends:
    """``[0, 1]`` in place of a range without a usable scale."""
    collapsed = high - low < SMALLEST_WIDTH
    return p.where(collapsed, low * 0.0, low), p.where(collapsed, low * 0.0 + 1.0, high)


def symmetric(p: RangePrimitives, low: Array, high: Array) -> Ends:
    """The ends -32768 and 32767 steps from 0, so that 32767 steps reach the larger magnitude, as in TensorFlow Lite's
    quantizer."""
    step = p.maximum(-low, high) / (2**15 - 1)
    return step * -(2.0**15), step * (2**15 - 1)


def usable(p: RangePrimitives, low: Array, high: Array, is_int16: bool) -> Ends:
    """The ends that fake quantization takes. is_int16: of 16 bits."""
    low, high = with_width(p, low, high)
    return symmetric(p, low, high) if is_int16 else (low, high)


def below_zero(p: NumberPrimitives, low: Array) -> Array:
    """A trained lower end as it is used: an optimizer step may have moved it above zero. Gradients pass either way, or
    it would stay there."""
    return p.straight_through(p.minimum(low, 0.0), low)


def above_zero(p: NumberPrimitives, high: Array) -> Array:
    """A trained upper end as it is used; see `below_zero`."""
    return p.straight_through(p.maximum(high, 0.0), high)


def with_zero(p: RangePrimitives, low: Array, high: Array, nonnegative: bool) -> Ends:
    """The range that one tensor's extremes ask for: low <= 0 <= high. nonnegative: the tensor comes from a ReLU."""
    low = p.minimum(p.maximum(low, 0.0) if nonnegative else low, 0.0)
    return low, p.maximum(high, 0.0)


def rank_of_ends(percentile: float, count: int) -> int:
    """Which of `count` sorted values is the end for a percentile, counted from either side; 1: the outermost."""
    return count + 1 - math.ceil(percentile / 100 * count)


def observed(
    p: RangePrimitives,
    policy: str,
    decay: float,
    shown: Sequence[Ends],
    writers: int,
    before: Ends,
    batches: Array,
    finite: Array = None,
) -> tuple[Array, Array, Array]:
    """A range after what a batch has shown: minimum, maximum and the number of batches seen; rank 0, float32.

    Args:
        policy, decay: of the rule.
        shown: (low, high) of each tensor of this batch so far that is stored on the grid, with zero within. They count
            together: only the last of `writers` moves a range that has seen data.
        before: the range, and `batches` the number of batches, before this batch.
        finite: whether all of the tensor's values are, if known; otherwise its extremes decide.
    """
    low, high = shown[0]
    for other_low, other_high in shown[1:]:
        low, high = p.minimum(low, other_low), p.maximum(high, other_high)
    takes = high - low < math.inf
    takes = takes if finite is None else takes & finite
    low, high = _moved(p, policy, decay, (low, high), before, batches)
    complete = len(shown) == writers
    moves = takes if complete else takes & (batches == 0)
    low, high = p.where(moves, low, before[0]), p.where(moves, high, before[1])
    return low, high, p.where(takes, batches + 1, batches) if complete else batches


def _moved(p: RangePrimitives, policy: str, decay: float, asked: Ends, before: Ends, batches: Array) -> Ends:
    if policy == "min_max":
        return p.minimum(asked[0], before[0]), p.maximum(asked[1], before[1])
    if policy == "last_batch":
        return asked
    # The first batch sets the range; the average is that of all batches until the decay takes over.
    count = p.to_float(batches)
    keep = p.minimum(count / (count + p.to_float(1)), p.to_float(decay))
    low, high = (
        # The maximum changes nothing; compilers would contract the product and the sum.
        new + p.maximum((old - new) * keep, _LOWEST)
        for new, old in zip(asked, before, strict=True)
    )
    return low, high


def learned_start(p: NumberPrimitives, x: Array, low: Array, high: Array, bits: int, is_int16: bool) -> Ends:
    """Where a learned range starts: it already clips a little, since gradients reach a bound only through values
    outside it. Values at every odd place decide how much: all channels and rows take part."""
    values = p.reshape(x, (-1,))
    values = p.reshape(values[:: int(values.shape[0]) // _SAMPLE | 1], (-1, 1))
    # All fractions at once, as channels.
    fractions = p.array(_FRACTIONS, values)
    values = values + fractions * 0.0
    least, most = usable(p, low, high, is_int16)
    error = p.fake_quantize(values, least * fractions, most * fractions, bits, False) - values
    error = p.sum(error * error, (0,))
    fraction = p.amax(p.where(error <= p.amin(error, (0,)), fractions, 0.0), (0,))
    return low * fraction, high * fraction


def least_error_fraction(
    p: NumberPrimitives, channels_last: Array, low: Array, high: Array, bits: int, narrow_range: bool
) -> Array:
    """The fraction of a range, from 1 down to about a quarter, that quantizes a tensor with the least squared error.

    Args:
        channels_last: any shape; with `low` and `high` of shape [d], the last axis is d.
        low, high: rank 0 or [d].

    Returns:
        Of the shape of `low`.
    """
    axes = tuple(range(len(channels_last.shape) - (1 if len(low.shape) else 0)))
    best = low * 0.0 + 1.0
    best_error = low * 0.0 + math.inf
    for fraction in map(float, _FRACTIONS):
        error = p.fake_quantize(channels_last, low * fraction, high * fraction, bits, narrow_range)
        # In place, where a framework can: new memory takes longer than the arithmetic.
        error -= channels_last
        error *= error
        error = p.sum(error, axes)
        better = error < best_error
        best_error = p.where(better, error, best_error)
        best = p.where(better, best * 0.0 + fraction, best)
    return best


def device_grid(p: Primitives, low: Array, scale: Array, bits: int, is_int16: bool, high: bool) -> DeviceGrid:
    """A grid as the device places its codes. low: of its range; high: at the top of int8, not at its bottom."""
    exact = p.clip(-low / scale, 0.0, 2.0**bits - 1)
    whole = p.floor(exact)
    zero_point = whole + p.where(exact - whole >= 0.5, 1.0, 0.0)
    return DeviceGrid(scale, zero_point + float(-(2**15) if is_int16 else -128 + high * (256 - 2**bits)))


# --- in NumPy ---------------------------------------------------------------------------------------------------------


def nudged(low: Array, high: Array, bits: int) -> tuple[np.float32, int]:
    """The grid of a range: real = scale * (code - zero point), codes 0..2**bits - 1, in TensorFlow's float32 steps."""
    low, high, steps = np.float32(float(low)), np.float32(float(high)), np.float32(grid_steps(bits, False))
    scale = np.float32((high - low) / steps)
    exact = np.float32(-(low / scale))
    return scale, int(np.floor(np.float64(min(max(exact, np.float32(0)), steps)) + 0.5))


def codes_of(values: np.ndarray, scale: np.float32, zero_point: int) -> np.ndarray:
    """Codes 0..2**bits - 1 of values on a grid, int64; -infinity, which pads a maximum, has the lowest one."""
    return np.where(np.isneginf(values), -zero_point, np.rint(values / scale)).astype(np.int64) + zero_point
