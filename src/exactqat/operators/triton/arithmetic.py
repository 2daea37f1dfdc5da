# SPDX-License-Identifier: Apache-2.0
"""reference/arithmetic.py on a GPU: denormal operands and results count as zeros of the same sign, by selection.

A product or quotient is denormal if it is after rounding to as many bits with unlimited exponent, so what rounds up to
the smallest normal number from just below must be distinguished: the same operation 64 binary orders higher does.
None of these functions depends on whether the hardware keeps denormals.
"""

import triton
import triton.language as tl

_UP = tl.constexpr(2.0**64)
_DOWN = tl.constexpr(2.0**-64)
_LIMIT_UP_FLOAT32 = tl.constexpr(2.0**-62)  # the smallest normal number, scaled
_LIMIT_UP_FLOAT64 = tl.constexpr(2.0**-958)
_SMALLEST_FLOAT32 = tl.constexpr(2.0**-126)
_SMALLEST_FLOAT64 = tl.constexpr(2.0**-1022)
# Below this a float32 result, rounded to 24 bits with unlimited exponent, would still be less than the smallest normal.
_ROUNDS_BELOW_NORMAL = tl.constexpr(2.0**-126 * (1 - 2.0**-25))


@triton.jit
def widened(v):
    """16-bit tensors are computed with as float32 ones; the results are rounded to 16 bits when they are stored."""
    if v.dtype == tl.float64:
        return v
    else:
        return v.to(tl.float32)


@triton.jit
def flush(v):
    """Denormals become zeros of the same sign."""
    if v.dtype == tl.float64:
        return tl.where(tl.abs(v) < _SMALLEST_FLOAT64, v * 0.0, v)
    else:
        return tl.where(tl.abs(v) < _SMALLEST_FLOAT32, v * 0.0, v)


@triton.jit
def _is_denormal(up):
    """Whether a result is, from the one 64 binary orders higher."""
    if up.dtype == tl.float64:
        return tl.abs(up) < _LIMIT_UP_FLOAT64
    else:
        return tl.abs(up) < _LIMIT_UP_FLOAT32


# The operands of the following are flushed already.


@triton.jit
def add(a, b):
    return flush(a + b)


@triton.jit
def subtract(a, b):
    return flush(a - b)


@triton.jit
def multiply(a, b):
    product = a * b
    # Where a scaled overflows the product is far from denormal: infinity and NaN are not below the limit.
    return tl.where(_is_denormal((a * _UP) * b), product * 0.0, product)


@triton.jit
def quotient(a, b):
    """a / b, correctly rounded; a denormal result may be flushed or not."""
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def divide(a, b):
    """a / b, correctly rounded."""
    # Only such quotients can be denormal, and scaled they cannot overflow.
    scaled = (tl.abs(b) >= 1.0) & (tl.abs(a) < 1.152921504606846976e18)
    result = quotient(tl.where(scaled, a * _UP, a), b)
    kept = tl.where(_is_denormal(result), result * 0.0, result * _DOWN)
    return tl.where(scaled, kept, result)


@triton.jit
def fused_multiply_add(a, b, c):
    """a * b + c, rounded once."""
    total = tl.fma(a, b, c)
    # Where a term scaled overflows, what is left after cancellation is far from denormal, or 0.
    up = tl.fma(a * _UP, b, c * _UP)
    return tl.where(_is_denormal(up), up * 0.0, total)


@triton.jit
def narrow(v, DTYPE: tl.constexpr):
    """A float64 value rounded once to float32 or float64, denormals flushed."""
    if tl.float64 == DTYPE:
        return flush(v)
    else:
        rounded = v.to(tl.float32)
        return tl.where(tl.abs(v) < _ROUNDS_BELOW_NORMAL, rounded * 0.0, rounded)


@triton.jit
def clamp(x, low, high):
    """TensorFlow's clamp: NaN in x survives, a NaN bound is ignored."""
    below = tl.where(high < x, high, x)
    return tl.where(below < low, low, below)


@triton.jit
def masked(gradient, keep):
    """gradient * (keep ? 1 : 0), which keeps NaN, infinity and the sign of zero. `gradient` is flushed already."""
    return gradient * tl.where(keep, 1.0, 0.0).to(gradient.dtype)
