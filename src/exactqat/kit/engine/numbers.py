# SPDX-License-Identifier: Apache-2.0
"""Conversion between real numbers and codes, on all threads."""

from __future__ import annotations

import numpy as np

from ...operators import cpu
from ..device import Tensor
from ..device.tensor import CODE_RANGES
from .forms import has_kernels, run

# How many numbers the kernel checks for NaN together.
PIECE = 16384
# Below this scale, quotients and products may be too small for kernels, which flush them to zero.
SMALLEST_SCALE = np.float32(1e-30)


def quantized(values: np.ndarray, tensor: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes of float32 numbers [rows, ...] on a tensor's grid, NaN as real 0, and which rows have one, bool [rows]."""
    values = np.ascontiguousarray(values, np.float32)
    scale, zero_point = tensor.quantization.scale[0], int(tensor.quantization.zero_point[0])
    rows = values.shape[0]
    if not values.size or not _serves(tensor):
        missing = np.isnan(values)
        with np.errstate(over="ignore"):
            steps = np.rint(np.where(missing, np.float32(0), values) / scale) + np.float32(zero_point)
        codes = np.clip(steps, *CODE_RANGES[tensor.dtype]).astype(tensor.dtype)
        return codes, missing.reshape(rows, -1).any(1) if values.size else np.zeros(rows, bool)
    codes = np.empty(values.shape, tensor.dtype)
    length = values.size // rows
    flags = np.empty((rows, -(-length // PIECE)), np.uint8)
    numbers = {"scale": float(scale), "zero_point": zero_point}
    run("integer_quantize", [values.reshape(rows, length)], [codes.reshape(rows, length), flags], **numbers)
    return codes, np.asarray(flags.any(1))


def dequantized(codes: np.ndarray, tensor: Tensor) -> np.ndarray:
    """The real numbers that a tensor's codes represent, float32."""
    scale, zero_point = tensor.quantization.scale[0], int(tensor.quantization.zero_point[0])
    if not codes.size or not _serves(tensor):
        return (codes.astype(np.float32) - np.float32(zero_point)) * scale
    codes = np.ascontiguousarray(codes)
    values = np.empty(codes.shape, np.float32)
    run("integer_dequantize", [codes.reshape(-1)], [values.reshape(-1)], scale=float(scale), zero_point=zero_point)
    return values


def _serves(tensor: Tensor) -> bool:
    return has_kernels(cpu.kernels) and tensor.dtype in CODE_RANGES and tensor.quantization.scale[0] >= SMALLEST_SCALE
