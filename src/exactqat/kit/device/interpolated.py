# SPDX-License-Identifier: Apache-2.0
"""Functions of int16 codes as LiteRT's and TFLite-Micro's kernels have them: tables, and straight lines in between."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import short_fixed_point as short
from .arithmetic import checked_log2, fixed_point, multiply_fixed_point, round_half_away
from .profile import Profile
from .tensor import INT16_MAX, INT16_MIN

# Between two entries of a table of 513 that covers all codes.
SEGMENT = 128


def interpolation_table(
    function: Callable[[np.ndarray], np.ndarray], scale: np.floating, output_scale: np.floating, zero_point: int = 0
) -> np.ndarray:
    """513 int64 codes of a function, at every 128th code of a grid (LiteRT's LUTPopulate).

    Every value is moved by half of what a straight line to the next one misses in the middle.

    Args:
        function: of arrays in the scales' type, in which the table is computed.
        scale: of the operand, whose zero point is `zero_point`.
        output_scale: of the result, whose zero point is 0.
    """
    real = type(scale)
    low, high = scale * real(INT16_MIN - zero_point), scale * real(INT16_MAX - zero_point)
    factor = real(INT16_MAX - INT16_MIN + 1) / (output_scale * real(INT16_MAX) - output_scale * real(INT16_MIN))
    step = (high - low) / real(512)
    at = low + np.arange(512).astype(real) * step
    following = low + np.arange(1, 513).astype(real) * step
    with np.errstate(over="ignore", invalid="ignore"):
        value = round_half_away(function(at) * factor)
        line = round_half_away((function(following) * factor + value) / real(2))
        middle = round_half_away(function(at + step / real(2)) * factor)
        values = value - round_half_away((line - middle) / real(2))
        last = round_half_away(function(np.array([high])) * factor)
    # Where infinity is taken from itself, processors make 0 of it.
    whole = np.nan_to_num(np.concatenate([values, last]), posinf=INT16_MAX, neginf=INT16_MIN)
    return np.clip(whole, INT16_MIN, INT16_MAX).astype(np.int64)


def look_up(codes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The table at int64 codes -32768..32767 (LiteRT's LUTLookup); slopes and results wrap within int16."""
    index = 256 + (codes >> 7)
    base, slope = table[index], (table[index + 1] - table[index]).astype(np.int16).astype(np.int64)
    return (base + ((slope * (codes & (SEGMENT - 1)) + 64) >> 7)).astype(np.int16).astype(np.int64)


def softmax(codes: np.ndarray, scale: np.floating, beta: float, profile: Profile) -> np.ndarray:
    """Softmax over the last axis of int64 codes, in 1 / 2**15."""
    powers, reciprocals = softmax_tables(profile)
    rescale = fixed_point(softmax_multiplier(scale, beta, profile))
    difference = multiply_fixed_point(codes - codes.max(-1, keepdims=True), *rescale)
    values = look_up(np.clip(difference + INT16_MAX, INT16_MIN, INT16_MAX), powers)
    total = values.sum(-1, keepdims=True)
    headroom = 32 - np.frexp(total.astype(np.float64))[1].astype(np.int64)
    shifted = ((total << (headroom - 1)) + (1 << 13)) >> 14
    factor = look_up(np.clip(shifted - (1 << 15) - (1 << 16), INT16_MIN, INT16_MAX), reciprocals)
    shift = 31 - headroom
    return np.clip((values * factor + (np.int64(1) << (shift - 1))) >> shift, 0, INT16_MAX)


def softmax_multiplier(scale: np.floating, beta: float, profile: Profile) -> float:
    """Positions in the table of exponentials, which spans 10, per code."""
    real = profile.multiplier_dtype
    return float(real(scale) * real(beta)) / (10.0 / 65535.0)


def softmax_tables(profile: Profile) -> list[np.ndarray]:
    """exp in -10..0 and 1 / (1 + x) in 0..1, whose codes reach from -1 to 1."""
    real = profile.table_dtype
    full = real(INT16_MAX - INT16_MIN)
    return [
        interpolation_table(function, real(width) / full, real(2) / full, zero_point)
        for function, width, zero_point in ((exponential, 10, INT16_MAX), (one_over_one_plus, 1, INT16_MIN))
    ]


def exponential(x: np.ndarray) -> np.ndarray:
    """exp in the precision of x, as the C library has it."""
    return np.exp(x.astype(np.float64)).astype(x.dtype)


def one_over_one_plus(x: np.ndarray) -> np.ndarray:
    """1 / (1 + x) in the precision of x."""
    one = x.dtype.type(1)
    return np.asarray(one / (one + x))


# sigmoid(i / 24) in 1 / 2**16, one table for sigmoid and tanh. In the kernels these entries are not the nearest number
# but the one above it, as was read from them.
_ONE_MORE = (
    (4, 8, 12, 14, 15, 16, 17, 19, 20, 21, 22, 25, 27, 28, 29, 30, 31, 33, 34, 35, 37, 39, 40, 41, 43, 44, 45, 46)
    + (49, 50, 54, 62, 63, 64, 66, 82, 86, 93, 100, 103, 112, 116, 135, 255)
)  # fmt: skip
SIGMOID = np.minimum(np.rint(65536 / (1 + np.exp(-np.arange(256) / 24))), 65535).astype(np.int64)
SIGMOID[list(_ONE_MORE)] += 1


def table_positions(codes: np.ndarray, scale: np.floating, power: int | None) -> np.ndarray:
    """Codes as multiples of 1 / (3 * 2**12), by a 15-bit multiplier, or by 3 where the scale is taken for `power`."""
    if power is not None:
        return codes * (3 << power)
    multiplier, shift = float(scale) * 4096 * 3, 0
    while multiplier <= 32767 / 2 and shift <= 30:
        multiplier, shift = multiplier * 2, shift + 1
    half = 1 << (shift - 1) if shift else 0
    return (codes * int(multiplier) + half) >> shift


def power_of_two(scale: np.floating, largest: int) -> int | None:
    """log2 of a scale in 2**-12, if it is one of 0..largest."""
    power = checked_log2(scale)
    return None if power is None or not 0 <= power + 12 <= largest else power + 12


def logistic(codes: np.ndarray, scale: np.floating, profile: Profile) -> np.ndarray:
    """1 / (1 + exp(-x)) in 1 / 2**15 of int64 codes."""
    power = power_of_two(scale, 0)
    if power is not None and profile.optimized:
        return short.logistic(codes)
    return logistic_at(table_positions(codes, scale, power))


def logistic_at(position: np.ndarray) -> np.ndarray:
    """Likewise of multiples of 1 / (3 * 2**12)."""
    index = np.minimum(np.abs(position) >> 9, 254)
    line = (SIGMOID[index] << 9) + (np.abs(position) & 0x1FF) * (SIGMOID[index + 1] - SIGMOID[index])
    result = np.where(np.abs(position) >> 9 >= 255, 0x7FFF << 10, line)
    return np.where(position >= 0, result + (1 << 9), (1 << 25) - result + (1 << 9) - 1) >> 10


def tanh(codes: np.ndarray, scale: np.floating, profile: Profile) -> np.ndarray:
    """The hyperbolic tangent in 1 / 2**15 of int64 codes."""
    power = power_of_two(scale, 1)
    if power is not None and profile.optimized:
        return short.tanh(short.doubled(codes) if power else codes)
    return tanh_at(table_positions(codes, scale, power))


def tanh_at(position: np.ndarray) -> np.ndarray:
    """Likewise of multiples of 1 / (3 * 2**12)."""
    index = np.minimum(np.abs(position) >> 8, 254)
    line = (SIGMOID[index] << 8) + (np.abs(position) & 0xFF) * (SIGMOID[index + 1] - SIGMOID[index])
    result = np.where(np.abs(position) >> 8 >= 255, 0xFFFF << 8, line)
    return np.where(position >= 0, result - (1 << 23) + (1 << 7), -result + (1 << 23) + (1 << 7) - 1) >> 8
