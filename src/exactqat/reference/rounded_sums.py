# SPDX-License-Identifier: Apache-2.0
"""How sums become integers with a multiplier, and the gradient of that."""

import numpy as np

from exactqat.reference.arrays import namespace


def rounded_sums(sums, factor, nudge, *, lowest, highest, away_from_zero, in_float32):
    xp = namespace(sums)
    if in_float32:
        rounded = xp.round(sums * factor.astype(np.float32))
        lowest, highest = np.float32(lowest), np.float32(highest)
        return xp.where(rounded < lowest, lowest, xp.where(rounded > highest, highest, rounded))
    scaled = sums.astype(np.float64) * factor
    if away_from_zero:
        rounded = xp.copysign(xp.floor(xp.abs(scaled) + 0.5), scaled)
    else:
        rounded = xp.floor((scaled + xp.copysign(nudge, scaled)) + 0.5)
    rounded = xp.where(rounded < lowest, lowest, xp.where(rounded > highest, highest, rounded))
    return rounded.astype(np.float32)


def rounded_sums_gradient(gradients, sums, factor, *, low, high):
    xp = namespace(sums)
    factor = factor.astype(np.float32)
    scaled = sums * factor
    outside = (scaled <= np.float32(low)) | (scaled >= np.float32(high))
    return xp.where(outside, np.float32(0), gradients) * factor
