# SPDX-License-Identifier: Apache-2.0
"""Real numbers in NumPy, for what others' files compute in float32."""

from __future__ import annotations

import numpy as np

from .tensor import CODE_RANGES, INT4, Tensor


def real_numbers(codes: np.ndarray, tensor: Tensor) -> np.ndarray:
    """An operand in float32; weights may be codes beside it, one scale for each channel."""
    if tensor.dtype not in (*CODE_RANGES, INT4):
        return codes.astype(np.float32)
    grid = tensor.quantization
    channels = [1] * codes.ndim
    if grid.axis is not None:
        channels[grid.axis] = -1
    steps = codes.astype(np.int32) - grid.zero_point.astype(np.int32).reshape(channels)
    return np.asarray(steps.astype(np.float32) * grid.scale.reshape(channels))
