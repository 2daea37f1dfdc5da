# SPDX-License-Identifier: Apache-2.0
"""How sums become integers with a fixed-point multiplier."""

import numpy as np

from exactqat.reference.arrays import namespace


def rounded_sums(sums, factor, nudge, *, lowest, highest, away_from_zero):
    xp = namespace(sums)
    scaled = sums.astype(np.float64) * factor
    if away_from_zero:
        rounded = xp.copysign(xp.floor(xp.abs(scaled) + 0.5), scaled)
    else:
        rounded = xp.floor((scaled + xp.copysign(nudge, scaled)) + 0.5)
    rounded = xp.where(rounded < lowest, lowest, xp.where(rounded > highest, highest, rounded))
    return rounded.astype(np.float32)
