# SPDX-License-Identifier: Apache-2.0
"""The one order in which this library sums, on every device: see docs/decisions/summation-order.md."""

from exactqat.operators.reference.arithmetic import flush
from exactqat.operators.reference.arrays import namespace, zeros

BLOCK = 64
LANES = 8
# Enough for any tensor where a compiler does not know how many items there are: adding up one sum changes nothing.
MOST_LEVELS = 6


def tree_sum(values):
    """Sum over the first axis, in float64.

    Blocks of 64 consecutive items; within a block lane k takes items k, k + 8, k + 16, ... one after the other,
    starting from +0, then the 8 lanes are folded in halves, lane i + lane i + h for h = 4, 2, 1. The blocks' sums are
    items again, until one is left. Items beyond the end count as nothing.
    """
    xp = namespace(values)
    values = flush(xp.asarray(values, dtype=xp.float64))
    if values.shape[0] == 0:
        return xp.zeros(values.shape[1:])
    levels = 0
    while True:
        count = values.shape[0]
        blocks = -(-count // BLOCK)
        # Adding -0 changes nothing, not even -0.
        beyond = xp.full((blocks * BLOCK - count, *values.shape[1:]), -0.0)
        items = xp.concatenate([values, beyond]).reshape(blocks, BLOCK // LANES, LANES, *values.shape[1:])
        lanes = zeros(xp, (blocks, LANES, *values.shape[1:]), values.dtype)
        for step in range(BLOCK // LANES):
            lanes = flush(lanes + items[:, step])
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = flush(lanes[:, :half] + lanes[:, half:])
        values, levels = lanes[:, 0], levels + 1
        if isinstance(blocks, int) and blocks == 1 or levels == MOST_LEVELS:
            return values[0]
