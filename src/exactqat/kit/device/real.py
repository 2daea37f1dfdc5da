# SPDX-License-Identifier: Apache-2.0
"""Real numbers in NumPy, for what others' files compute in float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .functions import NumPyPrimitives
from .tensor import CODE_RANGES, INT4, Tensor


class FloatPrimitives(NumPyPrimitives):
    """The functions of tensors among the primitives as well, in NumPy."""

    reshape, transpose, matmul, concatenate = np.reshape, np.transpose, np.matmul, np.concatenate
    argmax, argmin = np.argmax, np.argmin

    @staticmethod
    def gather(x: np.ndarray, indices: Sequence[int], axis: int) -> np.ndarray:
        return np.take(x, indices, axis)

    @staticmethod
    def mean(x: np.ndarray, axes: Sequence[int], keep_dims: bool = False) -> np.ndarray:
        return x.mean(tuple(axes), keepdims=keep_dims)

    @staticmethod
    def sum(x: np.ndarray, axes: Sequence[int], keep_dims: bool = False) -> np.ndarray:
        return x.sum(tuple(axes), keepdims=keep_dims)

    @staticmethod
    def softmax(x: np.ndarray, axis: int) -> np.ndarray:
        shares = np.exp(x - x.max(axis, keepdims=True))
        return np.asarray(shares / shares.sum(axis, keepdims=True))

    @staticmethod
    def log_softmax(x: np.ndarray, axis: int) -> np.ndarray:
        below = x - x.max(axis, keepdims=True)
        return np.asarray(below - np.log(np.exp(below).sum(axis, keepdims=True)))


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


__all__ = ["FloatPrimitives", "real_numbers"]
