# SPDX-License-Identifier: Apache-2.0
"""FusedBatchNorm* and its gradient: the formulas of TensorFlow's `fused_batch_norm_op.cc`, what belongs to a channel in
float64 and what belongs to an element in its own dtype (docs/decisions/batch-norm.md).

Differences, all towards the exact value: sums in float64 in the library's own order, the square root's reciprocal as
IEEE operations, the variance from values shifted by the channel's first one so that one pass over memory is enough,
a channel's coefficients rounded once, and what rounding its mean leaves out made good by its offset.
"""

import numpy as np

from exactqat.operators.reference import fake_quant
from exactqat.operators.reference.arithmetic import add, divide, flush, multiply, narrow, subtract
from exactqat.operators.reference.arrays import namespace
from exactqat.operators.reference.summation import tree_sum


def _rows(x, outer, channels, inner):
    """`[outer, channels, inner]` as rows `[outer * inner, channels]`."""
    return flush(x).reshape(outer, channels, inner).transpose(0, 2, 1).reshape(outer * inner, channels)


def _unrows(rows, x, outer, channels, inner):
    return rows.reshape(outer, inner, channels).transpose(0, 2, 1).reshape(x.shape)


def _double(*vectors):
    return [flush(v).astype(np.float64) for v in vectors]


def _count(rows):
    """How many there are, in float64; a compiler may know that late."""
    count = rows.shape[0]
    return float(count) if isinstance(count, int) else namespace(rows).asarray(count).astype(np.float64)


def _statistics(rows):
    """Mean and biased variance of each column."""
    xp, count, rows = namespace(rows), _count(rows), rows.astype(np.float64)
    first = xp.where(xp.isfinite(rows[0]), rows[0], 0.0)
    shifted = subtract(rows, first)
    total = tree_sum(shifted)
    squares = tree_sum(multiply(shifted, shifted))
    mean = add(first, divide(total, count))
    variance = divide(subtract(squares, divide(multiply(total, total), count)), count)
    return mean, xp.where(variance < 0, 0.0, variance)


def _updated(mean, variance, batch_mean, batch_variance, count, exponential_avg_factor, real):
    """The running statistics after a batch."""
    unbiased = multiply(batch_variance, count / namespace(count).maximum(count - 1, 1.0))
    if exponential_avg_factor == 1.0:
        return batch_mean, unbiased
    factor = _attribute(exponential_avg_factor, real)
    return tuple(
        add(multiply(1.0 - factor, old), multiply(factor, new))
        for old, new in ((mean, batch_mean), (variance, unbiased))
    )


def _attribute(value, dtype):
    """A real attribute as the kernel reads it: in the tensor's dtype, denormals flushed."""
    return float(narrow(np.float64(value), np.dtype(dtype)))


def _normalized(rows, scale, offset, mean, variance, epsilon):
    xp, slope = namespace(variance), multiply(divide(1.0, namespace(variance).sqrt(add(variance, epsilon))), scale)
    rounded = narrow(mean, rows.dtype)
    left_out = subtract(rounded.astype(np.float64), mean)
    # Where nothing is left out nothing is added, not even nothing times infinity.
    offset = xp.where(left_out == 0, offset, add(offset, multiply(left_out, slope)))
    slope, offset = narrow(slope, rows.dtype), narrow(offset, rows.dtype)
    return add(multiply(subtract(rows, rounded), slope), offset)


def fused_batch_norm(
    x, scale, offset, mean, variance, *, epsilon, exponential_avg_factor, is_training, outer, channels, inner
):
    real = x.dtype.type
    if x.size == 0:
        nothing, zeros = np.full(channels, np.nan), np.zeros(channels)
        return x, nothing, nothing, zeros, zeros, real(0)
    rows = _rows(x, outer, channels, inner)
    scale, offset, mean, variance = _double(scale, offset, mean, variance)
    epsilon = _attribute(epsilon, real)
    running = mean, variance
    if is_training:
        batch_mean, batch_variance = _statistics(rows)
        running = _updated(mean, variance, batch_mean, batch_variance, _count(rows), exponential_avg_factor, real)
        mean, variance = batch_mean, batch_variance
    y = _normalized(rows, scale, offset, mean, variance, epsilon)
    vectors = [narrow(v, x.dtype) for v in (*running, mean, variance)]
    return _unrows(y, x, outer, channels, inner), *vectors, real(0)


def channel_sum(x, *, outer, channels, inner):
    return narrow(tree_sum(_rows(x, outer, channels, inner).astype(np.float64)), x.dtype)


def fused_batch_norm_grad(
    y_backprop, x, scale, reserve_space_1, reserve_space_2, *ignored, epsilon, is_training, outer, channels, inner
):
    empty = np.zeros(0)
    if x.size == 0:
        zeros = np.zeros(channels)
        return x, zeros, zeros, empty, empty
    gradients, rows = _rows(y_backprop, outer, channels, inner), _rows(x, outer, channels, inner)
    scale, mean, variance = _double(scale, reserve_space_1, reserve_space_2)
    inverse = divide(1.0, namespace(variance).sqrt(add(variance, _attribute(epsilon, x.dtype))))
    exact_gradients = gradients.astype(np.float64)
    offset_backprop = tree_sum(exact_gradients)
    product = tree_sum(multiply(exact_gradients, subtract(rows.astype(np.float64), mean)))
    factor = multiply(scale, inverse)
    if is_training:
        count = _count(rows)
        gradient_mean = divide(offset_backprop, count)
        slope = multiply(multiply(inverse, inverse), divide(product, count))
        mean, factor, gradient_mean, slope = (narrow(v, x.dtype) for v in (mean, factor, gradient_mean, slope))
        shifted, centered = subtract(gradients, gradient_mean), subtract(rows, mean)
        x_backprop = multiply(factor, subtract(shifted, multiply(centered, slope)))
    else:
        x_backprop = multiply(gradients, narrow(factor, x.dtype))
    return (
        _unrows(x_backprop, x, outer, channels, inner),
        narrow(multiply(product, inverse), x.dtype),
        narrow(offset_backprop, x.dtype),
        empty,
        empty,
    )


_NONE, _RELU, _RELU6 = range(3)


def _activated(y, activation):
    """The activation, and where gradients pass it; NaN stays and passes."""
    if activation == _NONE:
        return y, True
    xp, real = namespace(y), y.dtype.type
    passes, activated = ~(y <= 0), xp.where(y < 0, real(0), y)
    return (xp.where(y > 6, real(6), activated), passes & ~(y >= 6)) if activation == _RELU6 else (activated, passes)


def batch_norm_statistics(x, scale, offset, mean, variance, *, epsilon, exponential_avg_factor, activation):
    channels, real = x.shape[-1], x.dtype.type
    rows = _rows(x, x.size // channels, channels, 1)
    scale, offset, mean, variance = _double(scale, offset, mean, variance)
    batch_mean, batch_variance = _statistics(rows)
    running = _updated(mean, variance, batch_mean, batch_variance, _count(rows), exponential_avg_factor, real)
    y = _normalized(rows, scale, offset, batch_mean, batch_variance, _attribute(epsilon, real))
    activated, _ = _activated(y, activation)
    vectors = [narrow(v, x.dtype) for v in running]
    return *vectors, batch_mean, batch_variance, activated.min(), activated.max()


def quantized_batch_norm(x, scale, offset, mean, variance, min, max, **numbers):
    return quantized_batch_norm_training(x, scale, offset, mean, variance, min, max, **numbers)[0]


def quantized_batch_norm_training(
    x, scale, offset, mean, variance, min, max, *, epsilon, activation, num_bits, narrow_range
):
    xp = namespace(x)
    if xp is np and min > max:
        raise ValueError("min must not be greater than max")
    channels = x.shape[-1]
    rows = _rows(x, x.size // channels if channels else 0, channels, 1)
    scale, offset, mean, variance = _double(scale, offset, mean, variance)
    y = _normalized(rows, scale, offset, mean, variance, _attribute(epsilon, x.dtype))
    activated, passes = _activated(y, activation)
    quantization = {"num_bits": num_bits, "narrow_range": narrow_range}
    outputs = fake_quant.fake_quant_with_min_max_vars(activated, min, max, **quantization)
    outputs = xp.where(min > max, np.nan, outputs).astype(x.dtype)  # where no error can be raised
    one = xp.ones_like(activated)
    states = fake_quant.fake_quant_with_min_max_vars_gradient_transpose(
        one, 2 * one, 3 * one, activated, min, max, **quantization
    )
    states = xp.where((states != 1) | passes, states, 0).astype(np.uint8).reshape(-1)
    fours = xp.pad(states, (0, -states.size % 4)).reshape(-1, 4)
    return outputs.reshape(x.shape), (fours << np.arange(0, 8, 2, dtype=np.uint8)).sum(1, dtype=np.uint8)


def _states(mask, size):
    return (mask[:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(-1)[:size]


def quantized_batch_norm_states(mask, x):
    return _states(mask, x.size).reshape(x.shape).astype(x.dtype)


def quantized_batch_norm_gradient(gradients, x, scale, mean, variance, mask, *, epsilon, range_gradients):
    xp, real, channels = namespace(x), x.dtype.type, x.shape[-1]
    states = _states(mask, x.size).reshape(x.shape)
    passed = xp.where(states == 1, gradients, real(0))
    mean, variance = narrow(mean, x.dtype), narrow(variance, x.dtype)
    outer = x.size // channels if channels else 0
    computed = fused_batch_norm_grad(
        passed, x, scale, mean, variance, epsilon=epsilon, is_training=1, outer=outer, channels=channels, inner=1
    )
    sides = [xp.where(states == side, gradients, real(0)).reshape(-1) for side in (2, 3)]
    of_range = [narrow(tree_sum(flush(side).astype(np.float64)), x.dtype) if range_gradients else 0 for side in sides]
    return *computed[:3], *of_range
