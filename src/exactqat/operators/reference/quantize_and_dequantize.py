# SPDX-License-Identifier: Apache-2.0
"""QuantizeAndDequantize*: the arithmetic of TensorFlow's `quantize_and_dequantize_op.h`."""

import numpy as np

from exactqat.operators.reference.arithmetic import add, divide, flush, multiply
from exactqat.operators.reference.arrays import namespace


def _range_of(slices):
    """Minimum and maximum of each slice `[outer, slices, inner]`; NaN if any element is. A maximum of -0 only if
    there is no +0."""
    xp = namespace(slices)
    minimum = slices.min(axis=(0, 2))
    maximum = slices.max(axis=(0, 2))
    positive_zero = ((slices == 0) & ~xp.signbit(slices)).any(axis=(0, 2))
    zero = xp.where(positive_zero, slices.dtype.type(0), -slices.dtype.type(0))
    return xp.where(minimum == 0, slices.dtype.type(0), minimum), xp.where(maximum == 0, zero, maximum)


def _scales(minimum, maximum, signed_input, num_bits, narrow_range):
    """Scale, its inverse, and the range it covers, elementwise over ranges."""
    real = minimum.dtype.type
    min_quantized = -(2 ** (num_bits - 1)) + narrow_range if signed_input else 0
    max_quantized = 2 ** (num_bits - 1) - 1 if signed_input else 2**num_bits - 1
    low, high, largest = real(min_quantized), real(max_quantized), np.finfo(real).max
    xp = namespace(minimum)
    from_min = xp.where(multiply(low, minimum) > 0, divide(low, minimum), largest)
    from_max = xp.where(multiply(high, maximum) > 0, divide(high, maximum), largest)
    min_side = from_min < from_max
    inverse = xp.where(min_side, divide(minimum, low), divide(maximum, high))
    return (
        xp.where(min_side, from_min, from_max),
        inverse,
        xp.where(min_side, minimum, multiply(low, inverse)),
        xp.where(min_side, multiply(high, inverse), maximum),
    )


def quantize_and_dequantize(
    input,
    *bounds,
    signed_input,
    num_bits,
    range_given,
    half_up,
    narrow_range,
    outer,
    slices,
    inner,
    check_range,
    input_min=None,
    input_max=None,
):
    if input.size == 0:
        return input
    xp = namespace(input, *bounds)
    values = flush(input).reshape(outer, slices, inner)
    if range_given:
        minimum, maximum = (xp.asarray(b, dtype=input.dtype).reshape(slices) for b in bounds or (input_min, input_max))
        minimum, maximum = flush(minimum), flush(maximum)
        valid = minimum <= maximum
        if xp is np and check_range and not valid[0]:
            raise ValueError(f"Invalid range: input_min {minimum[0]:g} > input_max {maximum[0]:g}")
    else:
        minimum, maximum = _range_of(values)
    scale, inverse, minimum, maximum = (
        v.astype(input.dtype).reshape(1, slices, 1)
        for v in _scales(minimum, maximum, signed_input, num_bits, narrow_range)
    )
    if range_given:
        values = xp.where(maximum < values, maximum, values)
        values = xp.where(values < minimum, minimum, values)
    scaled = multiply(values, scale)
    rounded = xp.floor(add(scaled, input.dtype.type(0.5))) if half_up else xp.rint(scaled)
    output = multiply(rounded, inverse)
    if range_given and check_range:
        output = xp.where(valid[0], output, np.nan)  # where values are not known before, no error can be raised
    return output.astype(input.dtype).reshape(input.shape)


def quantize_and_dequantize_v4_grad(gradients, input, input_min, input_max, *, outer, slices, inner):
    xp = namespace(input)
    values, minimum, maximum = flush(input).reshape(outer, slices, inner), flush(input_min), flush(input_max)
    minimum, maximum = minimum.reshape(1, slices, 1), maximum.reshape(1, slices, 1)
    inside = ((values >= minimum) & (values <= maximum)).astype(input.dtype).reshape(input.shape)
    return multiply(gradients, inside), xp.zeros_like(input_min), xp.zeros_like(input_max)
