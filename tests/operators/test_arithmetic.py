# SPDX-License-Identifier: Apache-2.0
"""The reference's arithmetic about the smallest normal number: rounded, then flushed, as exact fractions say.

Triton's is compared with it in the kernels' tests and the fuzzer's.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from bits import assert_same_bits

from exactqat.operators.reference import arithmetic

SMALLEST, BITS = {"float32": -126, "float64": -1022}, {"float32": 24, "float64": 53}


def rounded(exact: Fraction, dtype: str) -> float:
    """To the nearest with as many bits as the dtype has and any exponent; 0 if that is denormal."""
    if exact == 0:
        return 0.0
    bits, smallest = BITS[dtype], SMALLEST[dtype]
    exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length() - bits
    for unit in (Fraction(2) ** exponent, Fraction(2) ** (exponent + 1)):
        steps = round(exact / unit)  # half to even
        if abs(steps) <= 2**bits:
            break
    value = steps * unit
    return float(value) if abs(value) >= Fraction(2) ** smallest else 0.0


def factors(dtype: str) -> list[tuple[float, float]]:
    """Whose products lie on both sides of the smallest normal number, within steps and parts of steps of it."""
    step, smallest = float(np.finfo(dtype).eps), SMALLEST[dtype]
    pairs = []
    for exponent in (0, 1, 30, smallest // 2, smallest + 1, smallest):
        for up in range(-3, 4):
            for down in range(-3, 4):
                pairs.append((2.0 ** (smallest - exponent) * (1 + up * step), 2.0**exponent * (1 + down * step / 2)))
    return [(a, b) for a, b in pairs if min(a, b) >= 2.0**smallest]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_products_and_quotients(dtype: str) -> None:
    a, b = (np.array(column, dtype) for column in zip(*factors(dtype), strict=True))
    products = [rounded(Fraction(float(x)) * Fraction(float(y)), dtype) for x, y in zip(a, b, strict=True)]
    assert_same_bits(arithmetic.multiply(a, b), np.array(products, dtype), what="products")
    assert_same_bits(arithmetic.multiply(-a, b), -np.array(products, dtype), what="negative products")
    with np.errstate(over="ignore"):
        inverse = (1 / b.astype("float64")).astype(dtype)
    quotients = [rounded(Fraction(float(x)) / Fraction(float(y)), dtype) for x, y in zip(a, inverse, strict=True)]
    assert_same_bits(arithmetic.divide(a, inverse), np.array(quotients, dtype), what="quotients")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_fused_multiply_adds(dtype: str) -> None:
    smallest = 2.0 ** SMALLEST[dtype]
    a, b, c = [], [], []
    for x, y in factors(dtype):
        for third in (0.0, smallest, -smallest, 3 * smallest, -1.5 * smallest):
            a.append(x), b.append(y), c.append(third)
    operands = [np.array(v, dtype) for v in (a, b, c)]
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(*operands, strict=True)]
    expected = np.array([rounded(value, dtype) for value in exact], dtype)
    result = arithmetic.fused_multiply_add(*operands)
    assert_same_bits(
        np.abs(result), np.abs(expected), what="multiply-adds"
    )  # the sign of a zero is the hardware's rule
