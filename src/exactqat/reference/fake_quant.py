# SPDX-License-Identifier: Apache-2.0
"""FakeQuantWithMinMax*: the arithmetic of TensorFlow's `fake_quant_ops_functor.h`."""

from typing import NamedTuple

import numpy as np

from exactqat.reference.arithmetic import add, divide, flush, multiply, narrow, subtract
from exactqat.reference.summation import tree_sum


class _Nudged(NamedTuple):
    nudged_min: np.ndarray
    nudged_max: np.ndarray
    nudged_scale: np.ndarray
    inv_nudged_scale: np.ndarray
    quant_zero: np.ndarray


def _nudge(min, max, num_bits, narrow_range):
    """TensorFlow's `Nudge`, elementwise over ranges."""
    real = min.dtype.type
    quant_min, quant_max = real(narrow_range), real(2**num_bits - 1)
    steps = quant_max - quant_min
    scale = divide(subtract(max, min), steps)
    inverse = divide(steps, subtract(max, min))
    zero_point_from_min = subtract(quant_min, divide(min, scale))
    # Half away from zero; the zero point is never negative here. trunc + comparison avoids the rounding of "+ 0.5".
    whole = np.floor(zero_point_from_min)
    rounded = np.where(zero_point_from_min - whole >= 0.5, whole + 1, whole)
    zero_point = np.where(
        zero_point_from_min < quant_min, quant_min, np.where(zero_point_from_min > quant_max, quant_max, rounded)
    )
    zero_point = np.where(np.isnan(zero_point_from_min), real(0), zero_point).astype(real)
    nudged_min = multiply(subtract(quant_min, zero_point), scale)
    nudged_max = multiply(subtract(quant_max, zero_point), scale)
    quant_zero = np.floor(add(multiply(-nudged_min, inverse), real(0.5)))
    return _Nudged(nudged_min, nudged_max, scale, inverse, quant_zero)


def _quantize(inputs, nudged, by_division):
    clamped = np.where(nudged.nudged_max < inputs, nudged.nudged_max, inputs)
    clamped = np.where(clamped < nudged.nudged_min, nudged.nudged_min, clamped)
    shifted = subtract(clamped, nudged.nudged_min)
    steps = divide(shifted, nudged.nudged_scale) if by_division else multiply(shifted, nudged.inv_nudged_scale)
    half = inputs.dtype.type(0.5)
    return multiply(np.floor(add(subtract(steps, nudged.quant_zero), half)), nudged.nudged_scale)


def _no_range(min, max):
    return (flush(min) == 0) & (flush(max) == 0)


def _sides(inputs, nudged):
    """Inside (ends included), below and above the nudged range, as 1 and 0; NaN is in none of them."""
    inputs = flush(inputs)
    real = inputs.dtype
    inside = (inputs >= nudged.nudged_min) & (inputs <= nudged.nudged_max)
    return inside.astype(real), (inputs < nudged.nudged_min).astype(real), (inputs > nudged.nudged_max).astype(real)


def fake_quant_with_min_max_args(inputs, *, min, max, num_bits, narrow_range):
    min, max = inputs.dtype.type(min), inputs.dtype.type(max)
    return _quantize(flush(inputs), _nudge(min, max, num_bits, narrow_range), by_division=False)


def fake_quant_with_min_max_args_gradient(gradients, inputs, *, min, max, num_bits, narrow_range):
    min, max = inputs.dtype.type(min), inputs.dtype.type(max)
    inside, _, _ = _sides(inputs, _nudge(min, max, num_bits, narrow_range))
    return multiply(gradients, inside)


def fake_quant_with_min_max_vars(inputs, min, max, *, num_bits, narrow_range):
    outputs = _quantize(flush(inputs), _nudge(min, max, num_bits, narrow_range), by_division=True)
    return np.where(_no_range(min, max), inputs.dtype.type(0), outputs)


def fake_quant_with_min_max_vars_per_channel(inputs, min, max, *, num_bits, narrow_range):
    outputs = _quantize(flush(inputs), _nudge(min, max, num_bits, narrow_range), by_division=False)
    return np.where(_no_range(min, max), inputs.dtype.type(0), outputs)


def fake_quant_with_min_max_vars_gradient(gradients, inputs, min, max, *, num_bits, narrow_range):
    """Rows of one channel: the whole tensor is one column."""
    backprops, backprop_min, backprop_max = fake_quant_with_min_max_vars_per_channel_gradient(
        gradients.reshape(-1, 1),
        inputs.reshape(-1, 1),
        min.reshape(1),
        max.reshape(1),
        num_bits=num_bits,
        narrow_range=narrow_range,
    )
    return backprops, backprop_min, backprop_max


def fake_quant_with_min_max_vars_per_channel_gradient(gradients, inputs, min, max, *, num_bits, narrow_range):
    inside, below, above = _sides(inputs, _nudge(min, max, num_bits, narrow_range))
    no_range = _no_range(min, max)
    backprops = np.where(no_range, gradients, multiply(gradients, inside))
    rows = (-1, min.size) if min.size else (0, 0)
    sums = [narrow(tree_sum(multiply(gradients, side).reshape(rows)), inputs.dtype) for side in (below, above)]
    return backprops, *(np.where(no_range, inputs.dtype.type(0), total) for total in sums)


def fake_quant_with_min_max_vars_gradient_transpose(
    input_cotangent, min_cotangent, max_cotangent, inputs, min, max, *, num_bits, narrow_range
):
    nudged = _nudge(min, max, num_bits, narrow_range)
    inside, below, above = _sides(inputs, nudged)
    chosen = np.where(below == 1, min_cotangent, np.where(above == 1, max_cotangent, inputs.dtype.type(0)))
    chosen = np.where(inside == 1, input_cotangent, chosen)
    return np.where(_no_range(min, max), input_cotangent, chosen)
