# SPDX-License-Identifier: Apache-2.0
"""Arithmetic as TensorFlow's kernels do it: denormal operands and results count as zeros of the same sign.

x86 decides after rounding, as if to an exponent without limit, whether a result is denormal. float32 products and
quotients are therefore formed in float64 and compared with the smallest value that still rounds up to a normal number;
for float64 ones the same operation 64 binary orders higher decides.
"""

import numpy as np

from exactqat.operators.reference.arrays import divisor, namespace

SMALLEST_NORMAL = {np.dtype("float32"): 2.0**-126, np.dtype("float64"): 2.0**-1022}
# Below this a float32 result, rounded to 24 bits with unlimited exponent, would still be less than the smallest normal.
ROUNDS_BELOW_NORMAL = 2.0**-126 * (1 - 2.0**-25)
UP = 2.0**64
SMALLEST_NORMAL_UP = 2.0**-1022 * UP


def flush(v):
    """Denormals become zeros of the same sign."""
    xp = namespace(v)
    v = xp.asarray(v)
    return xp.where(xp.abs(v) < SMALLEST_NORMAL[v.dtype], v * v.dtype.type(0), v)


def _round(exact, dtype):
    """A float64 result to `dtype`, denormals flushed."""
    if dtype == np.float64:
        return flush(exact)
    xp, rounded = namespace(exact), exact.astype(dtype)
    return xp.where(xp.abs(exact) < ROUNDS_BELOW_NORMAL, rounded * dtype.type(0), rounded)


def _round_double(result, up):
    """A float64 result, and the same one 64 binary orders higher, where only what is far from denormal overflows."""
    xp = namespace(result)
    return xp.where(xp.abs(up) < SMALLEST_NORMAL_UP, xp.copysign(0.0, result), flush(result))


def _operands(*values):
    xp = namespace(*values)
    dtype = xp.result_type(*values)
    return dtype, [flush(xp.asarray(v, dtype=dtype)).astype(np.float64) for v in values]


def add(a, b):
    return flush(flush(a) + flush(b))


def subtract(a, b):
    return flush(flush(a) - flush(b))


def multiply(a, b):
    dtype, (a, b) = _operands(a, b)
    return _round_double(a * b, (a * UP) * b) if dtype == np.float64 else _round(a * b, dtype)


def divide(a, b):
    # A quotient of 24-bit numbers rounded to 53 bits and then to 24 is the correctly rounded one (53 >= 2 * 24 + 2).
    dtype, (a, b) = _operands(a, b)
    b = divisor(b, a)
    return _round_double(a / b, (a * UP) / b) if dtype == np.float64 else _round(a / b, dtype)


def narrow(v, dtype):
    """A float64 value rounded once to `dtype`, denormals flushed."""
    return _round(namespace(v).asarray(v, dtype=np.float64), np.dtype(dtype))


def fused_multiply_add(a, b, c):
    """a * b + c, rounded once."""
    dtype, (a, b, c) = _operands(a, b, c)
    if dtype == np.float64:
        xp = namespace(a, b, c)
        plain, up = _fused_multiply_add_double(a, b, c), _fused_multiply_add_double(a * UP, b, c * UP)
        # Small products have rounding errors that only the larger ones can hold, and zeros their signs from plain sums.
        product = a * b
        zero = xp.where((a != 0) & (b != 0) & (c == 0), product, product + c)
        return _round_double(xp.where(up == 0, zero, xp.where(xp.abs(up) < 2.0**-512, up / UP, plain)), up)
    product = a * b  # exact: 24 + 24 bits
    total, error = _two_sum(product, c)
    return _round(_to_odd(total, error), dtype)


def _two_sum(a, b):
    """a + b as its rounded value and the exact error of that rounding (Knuth)."""
    total = a + b
    virtual = total - a
    return total, (a - (total - virtual)) + (b - virtual)


def _two_product(a, b):
    """a * b as its rounded value and the exact error of that rounding (Dekker, with Veltkamp's splitting)."""

    def split(v):
        t = v * (2.0**27 + 1)
        high = t - (t - v)
        return high, v - high

    product = a * b
    (ah, al), (bh, bl) = split(a), split(b)
    return product, ((ah * bh - product) + ah * bl + al * bh) + al * bl


def _to_odd(total, error):
    """Round to odd: the one intermediate rounding after which a second rounding to fewer bits is right (Boldo,
    Melquiond)."""
    xp = namespace(total)
    even = (total.view(np.int64) & 1) == 0
    inexact = (error != 0) & xp.isfinite(total) & xp.isfinite(error)
    return xp.where(inexact & even, xp.nextafter(total, xp.where(error > 0, np.inf, -np.inf)), total)


def _fused_multiply_add_double(a, b, c):
    """Boldo and Melquiond's emulation in float64; the plain sum where an intermediate overflows."""
    high, low = _two_product(a, b)
    t_high, t_low = _two_sum(c, low)
    v_high, v_low = _two_sum(high, t_high)
    result = v_high + _to_odd(*_two_sum(t_low, v_low))
    xp = namespace(result)
    return xp.where(xp.isfinite(result), result, a * b + c)
