# SPDX-License-Identifier: Apache-2.0
"""Logistic and tanh in 16-bit fixed point, as LiteRT's default kernels have them for some scales of int16.

The algorithms are those of `fixed_point_functions`, gemmlowp's, with raw values of 16 bits: "Q3.12" has 3 integer bits
and 12 fractional ones beside its sign.
"""

from __future__ import annotations

import numpy as np

from .arithmetic import rounding_shift
from .fixed_point_functions import EXP_OF_POWERS, half_sum
from .tensor import INT16_MAX, INT16_MIN

ONE = INT16_MAX  # the largest Q0.15, which represents 1


def logistic(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) in Q0.15 for x in Q3.12."""
    magnitude = _wrapped(np.abs(x))
    positive = _one_over_one_plus_x(_exp_on_negative_values(_wrapped(-magnitude), 3))
    return np.where(x == 0, 1 << 14, np.where(x > 0, positive, _wrapped(ONE - positive)))


def tanh(x: np.ndarray, integer_bits: int = 3) -> np.ndarray:
    """tanh(x) in Q0.15 for x of `integer_bits` integer bits, 0 to 6."""
    # exp(-2 |x|): the same bits read with one integer bit more.
    magnitude = _one_minus_x_over_one_plus_x(_exp_on_negative_values(np.minimum(x, _wrapped(-x)), integer_bits + 1))
    return np.where(x == 0, 0, np.where(x < 0, _wrapped(-magnitude), magnitude))


def doubled(x: np.ndarray) -> np.ndarray:
    """2 * x within int16."""
    return np.clip(x * 2, INT16_MIN, INT16_MAX)


def _wrapped(x: np.ndarray) -> np.ndarray:
    return x.astype(np.int16).astype(np.int64)


def _short(constant: int) -> int:
    """A constant of 32 bits in 16."""
    return int(rounding_shift(np.array(constant), 16))


def _multiply(a: np.ndarray, b: np.ndarray | int) -> np.ndarray:
    """The doubled product's upper 16 bits, rounded."""
    product = a * b
    nudged = product + np.where(product >= 0, 2**14, 1 - 2**14)
    return np.clip(np.where(nudged >= 0, nudged >> 15, -(-nudged >> 15)), INT16_MIN, INT16_MAX)


def _shift_left(x: np.ndarray, bits: int) -> np.ndarray:
    return np.clip(x << bits, INT16_MIN, INT16_MAX)


def _exp_on_negative_values(a: np.ndarray, integer_bits: int) -> np.ndarray:
    """exp(a) in Q0.15 for a <= 0 of `integer_bits` integer bits."""
    fractional_bits = 15 - integer_bits
    quarter = 1 << (fractional_bits - 2)
    remainder = (a & (quarter - 1)) - quarter
    result = _exp_between_minus_quarter_and_0(_shift_left(remainder, integer_bits))
    bits = remainder - a
    for power, factor in enumerate(EXP_OF_POWERS, -2):
        if power < integer_bits:
            chosen = bits & (1 << (fractional_bits + power))
            result = np.where(chosen, _multiply(result, _short(factor)), result)
    if integer_bits > 5:  # below -32 nothing is left
        result = np.where(a < -(1 << (fractional_bits + 5)), 0, result)
    return np.where(a == 0, ONE, result)


def _exp_between_minus_quarter_and_0(a: np.ndarray) -> np.ndarray:
    exp_of_minus_eighth, third = _short(1895147668), _short(715827883)
    x = a + (1 << 12)
    square = _multiply(x, x)
    cube, fourth = _multiply(square, x), _multiply(square, square)
    upper = rounding_shift(_multiply(rounding_shift(fourth, 2) + cube, third) + square, 1)
    return np.clip(exp_of_minus_eighth + _multiply(x + upper, exp_of_minus_eighth), INT16_MIN, INT16_MAX)


def _two_over_one_plus_x(x: np.ndarray) -> np.ndarray:
    """Q2.13, for x in 0..1 of Q0.15: three steps of Newton and Raphson."""
    half_denominator = half_sum(x, ONE)
    estimate = _wrapped(_short(1515870810) + _multiply(half_denominator, _short(-1010580540)))
    for _ in range(3):
        error = (1 << 13) - _multiply(half_denominator, estimate)
        estimate = _wrapped(estimate + _shift_left(_multiply(estimate, error), 2))
    return estimate


def _one_over_one_plus_x(x: np.ndarray) -> np.ndarray:
    return _shift_left(_two_over_one_plus_x(x), 1)


def _one_minus_x_over_one_plus_x(x: np.ndarray) -> np.ndarray:
    return _shift_left(_wrapped(_two_over_one_plus_x(x) - (1 << 13)), 2)
