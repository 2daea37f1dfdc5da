# SPDX-License-Identifier: Apache-2.0
"""How sums become a device's integers with the scales that make their multiplier, and the gradients of that."""

import numpy as np

from exactqat.operators.reference.arrays import namespace


def rounded_sums_by_grid(sums, scale, grid, *, rounding):
    xp = namespace(sums)
    lowest, highest = grid[2], grid[3]
    if rounding == 0:
        factor = grid[0] * scale / grid[1]
        return _clamped(xp, xp.round(sums * factor), lowest, highest)
    factor = grid[0].astype(np.float64) * scale.astype(np.float64) / grid[1].astype(np.float64)
    if rounding == 1:
        scaled = sums.astype(np.float64) * factor
        rounded = xp.copysign(xp.floor(xp.abs(scaled) + 0.5), scaled)
    else:
        rounded = _rounded_twice(xp, sums, *_fixed_point(xp, factor))
    rounded = _clamped(xp, rounded, lowest.astype(np.float64), highest.astype(np.float64))
    return rounded.astype(np.float32)


def rounded_sums_by_grid_gradient(gradients, sums, scale, grid):
    xp = namespace(sums)
    factor = grid[0] * scale / grid[1]
    scaled = sums * factor
    outside = (scaled <= grid[4]) | (scaled >= grid[5])
    return xp.where(outside, np.float32(0), gradients) * factor


def _clamped(xp, rounded, lowest, highest):
    return xp.where(rounded < lowest, lowest, xp.where(rounded > highest, highest, rounded))


def _fixed_point(xp, multiplier):
    """TensorFlow Lite's QuantizeMultiplier: a significand in Q31 and an exponent."""
    fraction, exponent = xp.frexp(multiplier)
    significand = xp.floor(fraction * 2.0**31 + 0.5).astype(np.int64)
    exponent = exponent.astype(np.int64)
    carry = significand == 2**31
    significand, exponent = xp.where(carry, 2**30, significand), xp.where(carry, exponent + 1, exponent)
    vanishes = exponent < -31
    return xp.where(vanishes, 0, significand), xp.where(vanishes, 0, exponent)


def _rounded_twice(xp, sums, significand, exponent):
    """MultiplyByQuantizedMultiplier: a doubled high product, rounded half up, then a shift, half away from zero."""
    zero = np.int64(0)
    left, right = xp.maximum(exponent, zero), xp.maximum(-exponent, zero)
    whole = xp.where(xp.isfinite(sums), sums, np.float32(0)).astype(np.int64)
    high = ((whole << left).astype(np.int32).astype(np.int64) * significand + 2**30) >> 31
    half = (xp.ones_like(right) << right) >> 1
    product = (high + half - ((high < 0) & (right > 0)).astype(np.int64)) >> right
    return xp.where(xp.isfinite(sums), product.astype(np.float64), sums.astype(np.float64))
