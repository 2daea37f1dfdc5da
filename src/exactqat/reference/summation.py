# SPDX-License-Identifier: Apache-2.0
"""The one order in which this library sums, on every device: see docs/decisions/summation-order.md."""

import numpy as np

from exactqat.reference.arithmetic import add

BLOCK = 64
LANES = 8


def tree_sum(values):
    """Sum over the first axis, in float64.

    Blocks of 64 consecutive items; within a block lane k takes items k, k + 8, k + 16, ... one after the other,
    starting from +0, then the 8 lanes are folded in halves, lane i + lane i + h for h = 4, 2, 1. The blocks' sums are
    items again, until one is left. Items beyond the end count as nothing.
    """
    values = np.asarray(values, np.float64)
    while True:
        count = values.shape[0]
        blocks = max(-(-count // BLOCK), 1)
        padded = np.full((blocks * BLOCK, *values.shape[1:]), -0.0)  # adding -0 changes nothing, not even -0
        padded[:count] = values
        items = padded.reshape(blocks, BLOCK // LANES, LANES, *values.shape[1:])
        lanes = np.zeros((blocks, LANES, *values.shape[1:]))
        for step in range(BLOCK // LANES):
            lanes = add(lanes, items[:, step])
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = add(lanes[:, :half], lanes[:, half:])
        values = lanes[:, 0]
        if blocks == 1:
            return values[0]
