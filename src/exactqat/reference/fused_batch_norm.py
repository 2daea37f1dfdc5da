# SPDX-License-Identifier: Apache-2.0
"""FusedBatchNorm* and its gradient: the formulas of TensorFlow's `fused_batch_norm_op.cc`, in float64, rounded once.

Differences, all towards the exact value: sums in float64 in the library's own order, the square root's reciprocal as
IEEE operations, the variance from values shifted by the channel's first one so that one pass over memory is enough.
"""

import numpy as np

from exactqat.reference.arithmetic import add, divide, flush, multiply, narrow, subtract
from exactqat.reference.summation import tree_sum


def _rows(x, outer, channels, inner):
    """`[outer, channels, inner]` as float64 rows `[outer * inner, channels]`."""
    return (
        flush(x).astype(np.float64).reshape(outer, channels, inner).transpose(0, 2, 1).reshape(outer * inner, channels)
    )


def _unrows(rows, x, outer, channels, inner):
    return narrow(rows, x.dtype).reshape(outer, inner, channels).transpose(0, 2, 1).reshape(x.shape)


def _double(*vectors):
    return [flush(v).astype(np.float64) for v in vectors]


def _statistics(rows):
    """Mean and biased variance of each column."""
    count = float(rows.shape[0])
    first = np.where(np.isfinite(rows[0]), rows[0], 0.0)
    shifted = subtract(rows, first)
    total = tree_sum(shifted)
    squares = tree_sum(multiply(shifted, shifted))
    mean = add(first, divide(total, count))
    variance = divide(subtract(squares, divide(multiply(total, total), count)), count)
    return mean, np.where(variance < 0, 0.0, variance)


def fused_batch_norm(
    x, scale, offset, mean, variance, *, epsilon, exponential_avg_factor, is_training, outer, channels, inner
):
    real = x.dtype.type
    if x.size == 0:
        nothing, zeros = np.full(channels, np.nan), np.zeros(channels)
        return x, nothing, nothing, zeros, zeros, real(0)
    rows = _rows(x, outer, channels, inner)
    scale, offset, mean, variance = _double(scale, offset, mean, variance)
    epsilon, factor = float(real(epsilon)), float(real(exponential_avg_factor))
    if is_training:
        batch_mean, batch_variance = _statistics(rows)
        count = float(rows.shape[0])
        unbiased = multiply(batch_variance, count / max(count - 1, 1.0))
        if exponential_avg_factor == 1.0:
            running = batch_mean, unbiased
        else:
            running = tuple(
                add(multiply(1.0 - factor, old), multiply(factor, new))
                for old, new in ((mean, batch_mean), (variance, unbiased))
            )
        mean, variance = batch_mean, batch_variance
    else:
        running = mean, variance
    factor_of_x = multiply(divide(1.0, np.sqrt(add(variance, epsilon))), scale)
    y = add(multiply(subtract(rows, mean), factor_of_x), offset)
    vectors = [narrow(v, x.dtype) for v in (*running, mean, variance)]
    return _unrows(y, x, outer, channels, inner), *vectors, real(0)


def channel_sum(x, *, outer, channels, inner):
    return narrow(tree_sum(_rows(x, outer, channels, inner)), x.dtype)


def fused_batch_norm_grad(
    y_backprop, x, scale, reserve_space_1, reserve_space_2, *ignored, epsilon, is_training, outer, channels, inner
):
    empty = np.zeros(0)
    if x.size == 0:
        zeros = np.zeros(channels)
        return x, zeros, zeros, empty, empty
    gradients, rows = _rows(y_backprop, outer, channels, inner), _rows(x, outer, channels, inner)
    scale, mean, variance = _double(scale, reserve_space_1, reserve_space_2)
    inverse = divide(1.0, np.sqrt(add(variance, float(x.dtype.type(epsilon)))))
    centered = subtract(rows, mean)
    offset_backprop = tree_sum(gradients)
    product = tree_sum(multiply(gradients, centered))
    factor = multiply(scale, inverse)
    if is_training:
        count = float(rows.shape[0])
        gradient_mean = divide(offset_backprop, count)
        slope = multiply(multiply(inverse, inverse), divide(product, count))
        x_backprop = multiply(factor, subtract(subtract(gradients, gradient_mean), multiply(centered, slope)))
    else:
        x_backprop = multiply(gradients, factor)
    return (
        _unrows(x_backprop, x, outer, channels, inner),
        narrow(multiply(product, inverse), x.dtype),
        narrow(offset_backprop, x.dtype),
        empty,
        empty,
    )
