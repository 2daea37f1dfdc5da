# SPDX-License-Identifier: Apache-2.0
"""exp, 1 / (1 + x), 1 / x, 1 / sqrt(x), log, logistic, tanh in 32-bit fixed point, as in LiteRT's integer kernels.

The algorithms and constants are those of the gemmlowp library (fixedpoint.h) and of LiteRT (internal/common.h). Arrays
hold raw int32 values as int64; "Q5.26" has 5 integer bits and 26 fractional ones beside its sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .arithmetic import rounding_shift

ONE = 2**31 - 1  # the largest Q0.31, which represents 1
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

Raw = Any


def high_multiply(a: Raw, b: Raw) -> np.ndarray:
    """The doubled product's upper 32 bits, rounded: SaturatingRoundingDoublingHighMul."""
    a, b = np.asarray(a, np.int64), np.asarray(b, np.int64)
    # The library's nudge of 2**30, or 1 - 2**30 with division towards zero, comes down to rounding half up.
    return np.where((a == INT32_MIN) & (b == INT32_MIN), INT32_MAX, (a * b + 2**30) >> 31)


def saturating_shift_left(x: Raw, bits: int) -> np.ndarray:
    """x * 2**bits within int32."""
    return np.clip(np.asarray(x, np.int64) << bits, INT32_MIN, INT32_MAX)


def add(a: Raw, b: Raw) -> np.ndarray:
    """The sum within int32, as it wraps there."""
    return (np.asarray(a, np.int64) + b).astype(np.int32).astype(np.int64)


def half_sum(a: Raw, b: Raw) -> np.ndarray:
    """(a + b) / 2, rounded half away from zero."""
    total = np.asarray(a, np.int64) + b
    nudged = total + np.where(total >= 0, 1, -1)
    return np.where(nudged >= 0, nudged >> 1, -(-nudged >> 1))


def leading_zeros(x: Raw) -> np.ndarray:
    """Of 32-bit numbers that are not negative."""
    return 32 - np.frexp(np.asarray(x, np.float64))[1].astype(np.int64)


# exp(-2**k) in Q0.31 for k = -2..4.
EXP_OF_POWERS = (1672461947, 1302514674, 790015084, 290630308, 39332535, 720401, 242)


def exp_on_negative_values(a: Raw, integer_bits: int) -> np.ndarray:
    """exp(a) in Q0.31 for a <= 0 of `integer_bits` integer bits (at most 5)."""
    a = np.asarray(a, np.int64)
    fractional_bits = 31 - integer_bits
    quarter = 1 << (fractional_bits - 2)
    remainder = (a & (quarter - 1)) - quarter
    result = _exp_between_minus_quarter_and_0(saturating_shift_left(remainder, integer_bits))
    bits = remainder - a
    for power, factor in enumerate(EXP_OF_POWERS, -2):
        if power < integer_bits:
            result = np.where(bits & (1 << (fractional_bits + power)), high_multiply(result, factor), result)
    return np.where(a == 0, ONE, result)


def _exp_between_minus_quarter_and_0(a: np.ndarray) -> np.ndarray:
    """Q0.31: exp(-1/8) times the Taylor series about -1/8."""
    exp_of_minus_eighth, third = 1895147668, 715827883
    x = a + (1 << 28)
    square = high_multiply(x, x)
    cube, fourth = high_multiply(square, x), high_multiply(square, square)
    upper = rounding_shift(high_multiply(rounding_shift(fourth, 2) + cube, third) + square, 1)
    return add(exp_of_minus_eighth, high_multiply(exp_of_minus_eighth, x + upper))


def one_over_one_plus_x(x: Raw) -> np.ndarray:
    """1 / (1 + x) in Q0.31 for x in 0..1 of Q0.31: three steps of Newton and Raphson."""
    half_denominator = half_sum(x, ONE)
    # 48 / 17 - 32 / 17 * d, in Q2.29.
    estimate = add(1515870810, high_multiply(half_denominator, -1010580540))
    for _ in range(3):
        error = (1 << 29) - high_multiply(half_denominator, estimate)
        estimate = add(estimate, saturating_shift_left(high_multiply(estimate, error), 2))
    return saturating_shift_left(estimate, 1)


def reciprocal(x: Raw, integer_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(m in Q0.31, e) with 1 / x = m * 2**-e, for x > 0 of `integer_bits` integer bits: LiteRT's GetReciprocal."""
    x = np.asarray(x, np.int64)
    headroom = leading_zeros(x)
    return one_over_one_plus_x((x << headroom) - 2**31), integer_bits - headroom


def inverse_square_root(x: Raw) -> tuple[np.ndarray, np.ndarray]:
    """(m in Q0.31, e) with 1 / sqrt(x) = m * 2**-e, for integers x >= 0; 0 is taken for 1: LiteRT's
    GetInvSqrtQuantizedMultiplierExp."""
    x = np.asarray(x, np.int64)
    shift = np.full(x.shape, 11, np.int64)
    scaled = np.maximum(x, 2)
    for _ in range(2):  # from 2**31 to below 2**29
        large = scaled >= 2**29
        scaled, shift = np.where(large, scaled // 4, scaled), shift + large
    pairs = (leading_zeros(scaled) - 1) // 2 - 1
    shift = shift - pairs
    scaled = scaled << (2 * pairs)
    value = scaled >> 1  # Q3.28
    half_value = rounding_shift(value, 1)
    half_three = (1 << 28) + (1 << 27)
    estimate = np.full(x.shape, 1 << 28, np.int64)
    for _ in range(5):
        # Products of Q3.28 are Q6.25, and of three Q9.22; the kernel goes back to Q3.28 after them.
        cube = saturating_shift_left(high_multiply(high_multiply(estimate, estimate), estimate), 6)
        difference = add(high_multiply(half_three, estimate), -high_multiply(half_value, cube))
        estimate = saturating_shift_left(difference, 3)
    result = high_multiply(estimate, 1518500250)  # sqrt(1 / 2): Q3.28 again, read as Q0.31
    result = np.where(shift < 0, result << np.maximum(-shift, 0), result)
    small = x <= 1
    return np.where(small, ONE, result), np.where(small, 0, np.maximum(shift, 0))


def log_of_one_and_more(x: Raw, input_integer_bits: int, output_integer_bits: int) -> np.ndarray:
    """log(x) of `output_integer_bits` integer bits for x >= 1 of `input_integer_bits`: LiteRT's
    log_x_for_x_greater_than_or_equal_to_1."""
    log_2, root_of_half, fourth_root_of_half = 1488522236, 1518500250, 1805811301
    alpha_n, alpha_d, alpha_i, alpha_f = 117049297, 127690142, 1057819769, 638450708
    accumulator_bits = output_integer_bits + 1
    x = np.asarray(x, np.int64)
    quarter = 2**29 >> accumulator_bits
    headroom = leading_zeros(x)
    first = x << (headroom - 1)
    first = saturating_shift_left(high_multiply(first, root_of_half), 1)
    first_power = saturating_shift_left(input_integer_bits - headroom, 31 - accumulator_bits)
    first_power = np.clip(first_power + quarter, INT32_MIN, INT32_MAX)
    second_headroom = leading_zeros(high_multiply(x, root_of_half)) - 1
    second = np.clip(x << second_headroom, INT32_MIN, INT32_MAX)
    second_power = saturating_shift_left(input_integer_bits - second_headroom, 31 - accumulator_bits)
    second_power = np.clip(second_power - quarter, INT32_MIN, INT32_MAX)

    r, power = np.minimum(first, second), np.maximum(first_power, second_power)
    p = half_sum(r, fourth_root_of_half)
    q = add(r, -fourth_root_of_half)
    q = add(q, q)
    square = high_multiply(q, q)
    numerator = add(high_multiply(q, r), high_multiply(high_multiply(q, square), alpha_n))
    inner = add(add(alpha_i, q), high_multiply(alpha_d, square))
    denominator = add(high_multiply(p, inner), high_multiply(alpha_f, q))
    quotient = high_multiply(rounding_shift(numerator, accumulator_bits), one_over_one_plus_x(denominator))
    return saturating_shift_left(add(high_multiply(power, log_2), quotient), 1)


def logistic(x: Raw, integer_bits: int) -> np.ndarray:
    """1 / (1 + exp(-x)) in Q0.31."""
    x = np.asarray(x, np.int64)
    positive = one_over_one_plus_x(exp_on_negative_values(-np.abs(x), integer_bits))
    result = np.where(x > 0, positive, ONE - positive)
    return np.where(x == 0, 1 << 30, result)


def tanh(x: Raw, integer_bits: int) -> np.ndarray:
    """tanh(x) in Q0.31."""
    x = np.asarray(x, np.int64)
    # exp(-2 |x|): the same bits read with one integer bit more.
    y = exp_on_negative_values(-np.abs(x), integer_bits + 1)
    magnitude = _one_minus_x_over_one_plus_x(y)
    return np.where(x == 0, 0, np.where(x < 0, -magnitude, magnitude))


def _one_minus_x_over_one_plus_x(x: np.ndarray) -> np.ndarray:
    """(1 - x) / (1 + x) in Q0.31 for x in 0..1."""
    half_denominator = half_sum(x, ONE)
    estimate = add(1515870810, high_multiply(half_denominator, -1010580540))
    for _ in range(3):
        error = (1 << 29) - high_multiply(half_denominator, estimate)
        estimate = add(estimate, saturating_shift_left(high_multiply(estimate, error), 2))
    return saturating_shift_left(add(estimate, -(1 << 29)), 2)
