# SPDX-License-Identifier: Apache-2.0
"""FakeQuantWithMinMax*: the arithmetic of TensorFlow's `fake_quant_ops_functor.h`."""

from typing import NamedTuple

import numpy as np

from exactqat.operators.reference.arithmetic import add, divide, flush, multiply, narrow, subtract
from exactqat.operators.reference.arrays import namespace
from exactqat.operators.reference.summation import tree_sum


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
    xp = namespace(min, max)
    whole = xp.floor(zero_point_from_min)
    rounded = xp.where(zero_point_from_min - whole >= 0.5, whole + 1, whole)
    zero_point = xp.where(
        zero_point_from_min < quant_min, quant_min, xp.where(zero_point_from_min > quant_max, quant_max, rounded)
    )
    zero_point = xp.where(xp.isnan(zero_point_from_min), real(0), zero_point).astype(real)
    nudged_min = multiply(subtract(quant_min, zero_point), scale)
    nudged_max = multiply(subtract(quant_max, zero_point), scale)
    quant_zero = xp.floor(add(multiply(-nudged_min, inverse), real(0.5)))
    return _Nudged(nudged_min, nudged_max, scale, inverse, quant_zero)


def _quantize(inputs, nudged, by_division):
    xp = namespace(inputs)
    clamped = xp.where(nudged.nudged_max < inputs, nudged.nudged_max, inputs)
    clamped = xp.where(clamped < nudged.nudged_min, nudged.nudged_min, clamped)
    shifted = subtract(clamped, nudged.nudged_min)
    steps = divide(shifted, nudged.nudged_scale) if by_division else multiply(shifted, nudged.inv_nudged_scale)
    half = inputs.dtype.type(0.5)
    return multiply(xp.floor(add(subtract(steps, nudged.quant_zero), half)), nudged.nudged_scale)


def _no_range(min, max):
    return (flush(min) == 0) & (flush(max) == 0)


def _sides(inputs, nudged):
    """Inside (ends included), below and above the nudged range, as 1 and 0; NaN is in none of them."""
    inputs = flush(inputs)
    real = inputs.dtype
    inside = (inputs >= nudged.nudged_min) & (inputs <= nudged.nudged_max)
    return inside.astype(real), (inputs < nudged.nudged_min).astype(real), (inputs > nudged.nudged_max).astype(real)


def _pack(inputs, nudged):
    """Four elements in a byte, the first in its lowest 2 bits: 1 above, 2 below, 3 inside (or both), 0 neither."""
    inside, below, above = (side == 1 for side in _sides(inputs, nudged))
    codes = ((inside | above) + 2 * (inside | below)).astype(np.uint8).reshape(-1)
    xp = namespace(inputs)
    codes = xp.concatenate([codes, xp.zeros(-codes.size % 4, dtype=np.uint8)]).reshape(-1, 4)
    return (codes << np.array([0, 2, 4, 6], np.uint8)).sum(axis=1, dtype=np.uint8)


def _unpack(mask, like):
    codes = (mask[:, np.newaxis] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    return codes.reshape(-1)[: like.size].reshape(like.shape)


def _sides_from(mask, like, min, max, num_bits, narrow_range):
    """What `_sides` says of the inputs that the mask is of."""
    nudged = _nudge(min, max, num_bits, narrow_range)
    codes = _unpack(mask, like)
    reversed = nudged.nudged_min > nudged.nudged_max
    sides = (codes == 3) & ~reversed, (codes == 2) | (codes == 3) & reversed, (codes == 1) | (codes == 3) & reversed
    return tuple(side.astype(like.dtype) for side in sides)


def fake_quant_with_min_max_args(inputs, *, min, max, num_bits, narrow_range):
    min, max = inputs.dtype.type(min), inputs.dtype.type(max)
    return _quantize(flush(inputs), _nudge(min, max, num_bits, narrow_range), by_division=False)


def fake_quant_with_min_max_args_training(inputs, *, min, max, num_bits, narrow_range):
    attributes = {"min": min, "max": max, "num_bits": num_bits, "narrow_range": narrow_range}
    nudged = _nudge(inputs.dtype.type(min), inputs.dtype.type(max), num_bits, narrow_range)
    return fake_quant_with_min_max_args(inputs, **attributes), _pack(inputs, nudged)


def fake_quant_with_min_max_args_gradient_from_mask(gradients, mask):
    codes = _unpack(mask, gradients)
    return multiply(gradients, (codes == 3).astype(gradients.dtype))


def fake_quant_with_min_max_args_gradient(gradients, inputs, *, min, max, num_bits, narrow_range):
    min, max = inputs.dtype.type(min), inputs.dtype.type(max)
    inside, _, _ = _sides(inputs, _nudge(min, max, num_bits, narrow_range))
    return multiply(gradients, inside)


def fake_quant_with_min_max_vars(inputs, min, max, *, num_bits, narrow_range):
    outputs = _quantize(flush(inputs), _nudge(min, max, num_bits, narrow_range), by_division=True)
    return namespace(inputs).where(_no_range(min, max), inputs.dtype.type(0), outputs)


def fake_quant_with_min_max_vars_per_channel(inputs, min, max, *, num_bits, narrow_range):
    outputs = _quantize(flush(inputs), _nudge(min, max, num_bits, narrow_range), by_division=False)
    return namespace(inputs).where(_no_range(min, max), inputs.dtype.type(0), outputs)


def fake_quant_with_min_max_vars_training(inputs, min, max, *, num_bits, narrow_range):
    outputs = fake_quant_with_min_max_vars(inputs, min, max, num_bits=num_bits, narrow_range=narrow_range)
    return outputs, _pack(inputs, _nudge(min, max, num_bits, narrow_range))


def fake_quant_with_min_max_vars_per_channel_training(inputs, min, max, *, num_bits, narrow_range):
    outputs = fake_quant_with_min_max_vars_per_channel(inputs, min, max, num_bits=num_bits, narrow_range=narrow_range)
    return outputs, _pack(inputs, _nudge(min, max, num_bits, narrow_range))


def _gradients(gradients, sides, min, max):
    """Over rows of channels."""
    inside, below, above = sides
    xp, no_range = namespace(gradients), _no_range(min, max)
    backprops = xp.where(no_range, gradients, multiply(gradients, inside))
    rows = (-1, min.size) if min.size else (0, 0)
    sums = [narrow(tree_sum(multiply(gradients, side).reshape(rows)), gradients.dtype) for side in (below, above)]
    return backprops, *(xp.where(no_range, gradients.dtype.type(0), total) for total in sums)


def fake_quant_with_min_max_vars_per_channel_gradient(gradients, inputs, min, max, *, num_bits, narrow_range):
    return _gradients(gradients, _sides(inputs, _nudge(min, max, num_bits, narrow_range)), min, max)


def fake_quant_with_min_max_vars_gradient(gradients, inputs, min, max, *, num_bits, narrow_range):
    """Rows of one channel: the whole tensor is one column."""
    return fake_quant_with_min_max_vars_per_channel_gradient(
        gradients.reshape(-1, 1),
        inputs.reshape(-1, 1),
        min.reshape(1),
        max.reshape(1),
        num_bits=num_bits,
        narrow_range=narrow_range,
    )


def fake_quant_with_min_max_vars_per_channel_gradient_from_mask(gradients, mask, min, max, *, num_bits, narrow_range):
    return _gradients(gradients, _sides_from(mask, gradients, min, max, num_bits, narrow_range), min, max)


def fake_quant_with_min_max_vars_gradient_from_mask(gradients, mask, min, max, *, num_bits, narrow_range):
    """Rows of one channel: the whole tensor is one column."""
    return fake_quant_with_min_max_vars_per_channel_gradient_from_mask(
        gradients.reshape(-1, 1), mask, min.reshape(1), max.reshape(1), num_bits=num_bits, narrow_range=narrow_range
    )


def _transpose(input_cotangent, min_cotangent, max_cotangent, sides, min, max):
    inside, below, above = sides
    xp, zero = namespace(input_cotangent), input_cotangent.dtype.type(0)
    chosen = xp.where(below == 1, min_cotangent, xp.where(above == 1, max_cotangent, zero))
    return xp.where((inside == 1) | _no_range(min, max), input_cotangent, chosen)


def fake_quant_with_min_max_vars_gradient_transpose(
    input_cotangent, min_cotangent, max_cotangent, inputs, min, max, *, num_bits, narrow_range
):
    sides = _sides(inputs, _nudge(min, max, num_bits, narrow_range))
    return _transpose(input_cotangent, min_cotangent, max_cotangent, sides, min, max)


def fake_quant_with_min_max_vars_gradient_from_mask_transpose(
    input_cotangent, min_cotangent, max_cotangent, mask, min, max, *, num_bits, narrow_range
):
    sides = _sides_from(mask, input_cotangent, min, max, num_bits, narrow_range)
    return _transpose(input_cotangent, min_cotangent, max_cotangent, sides, min, max)
