# SPDX-License-Identifier: Apache-2.0
"""Arithmetic as data: what a device's integers follow from, one field for each question that an operator asks.

The declared devices name kernels, which their operators know. A user's device states answers instead: how a multiplier
is held, how products are rounded, when an accumulator overflows. Every operator that has a `stated` form computes by
them, and `deploy.identify` finds them from outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from operator import mul
from types import MappingProxyType
from typing import Any

import numpy as np

from .refusals import need

# How a number between two integers becomes one of them: floor is an arithmetic shift, toward_zero C's division.
ROUNDINGS = ("half_up", "half_even", "half_away", "half_down", "half_toward_zero", "floor", "toward_zero")
# Bits of an accumulator that never overflows.
UNBOUNDED = 64
# What int64 holds of a product.
_BITS = 62

WORDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "scales": ("real", "powers_of_two"),
        "quotient": ("float64", "float32"),
        "multiplier": ("fixed_point", "float32", "float64"),
        "multiplier_rounding": ROUNDINGS,
        "zero_point": ("after", "before"),
        "channels": ("each", "first"),
        "overflow": ("saturate", "wrap"),
        "overflow_at": ("end", "each"),
        "bias": ("first", "last"),
        "addition": ("once", "each", "operands_once"),
        "division": ("exact", "multiplied"),
        "table_end": ("beyond", "held"),
        "table_values": ("exact", "balanced"),
    }
)
NUMBERS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "multiplier_bits": (1, 32),
        "accumulator_bits": (8, UNBOUNDED),
        "table_segments": (0, 512),
        "position_bits": (0, UNBOUNDED),
    }
)


@dataclass(frozen=True)
class Arithmetic:
    """How a device goes from sums to codes.

    Attributes:
        scales: real numbers, or each is first taken for the nearest power of two (of its logarithm).
        quotient: what the quotient of scales is formed in.
        multiplier: what a number is multiplied by: a fixed-point number, or one in float32 or float64.
        multiplier_bits: of a fixed-point multiplier's significand, without its sign; 1: powers of two alone.
        multiplier_rounding: from the quotient to that significand.
        roundings: one: the exact product is rounded once; two: it is rounded to the size of what was multiplied (its
            upper half), and once more where it is then shifted to the right.
        zero_point: added after the last rounding, or before it, so that halves are even in codes and not in steps.
        channels: each output channel of a filter has its own scale, or the first one's is taken for all.
        accumulator_bits: of the sums of products; 64: they never overflow.
        overflow: an accumulator saturates or wraps.
        overflow_at: once at the end, or at each product, in the order of the filter's axes.
        bias: where an accumulator overflows at each product, it begins with the bias, or the bias comes last.
        addition: a sum of two tensors is rounded once, or each of them and then their sum; where a product is rounded
            twice, the operands may be rounded once.
        division: a mean of a window is divided by the count, or multiplied by its reciprocal as by any other factor.
        table_segments: a function is a table of this many equal segments and straight lines between their ends; 0: the
            kernels' own function. Of 256 segments of int8 codes nothing lies between.
        table_end: the last segment's end is the function beyond the last code, or its beginning once more.
        table_values: of the function itself or, of int16, moved by half of what a straight line misses in the middle.
        position_bits: fractional bits of a place between two pixels, up to 16; 0: float32; 64: places are fractions of
            whole numbers, and the sum of what lies around one is multiplied by the reciprocal of their denominators.
    """

    scales: str = "real"
    quotient: str = "float64"
    multiplier: str = "fixed_point"
    multiplier_bits: int = 31
    multiplier_rounding: str = "half_away"
    roundings: tuple[str, ...] = ("half_up",)
    zero_point: str = "after"
    channels: str = "each"
    accumulator_bits: int = UNBOUNDED
    overflow: str = "saturate"
    overflow_at: str = "end"
    bias: str = "first"
    addition: str = "once"
    division: str = "exact"
    table_segments: int = 0
    table_end: str = "beyond"
    table_values: str = "exact"
    position_bits: int = 11

    def __post_init__(self) -> None:
        for name, words in WORDS.items():
            need(getattr(self, name) in words, f"{name} must be one of {', '.join(words)}, got {getattr(self, name)!r}")
        for name, (low, high) in NUMBERS.items():
            value = getattr(self, name)
            fits = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
            need(fits, f"{name} must be an integer in {low}..{high}, got {value!r}")
        fits = isinstance(self.roundings, tuple) and 1 <= len(self.roundings) <= 2
        fits = fits and all(rounding in ROUNDINGS for rounding in self.roundings)
        need(fits, f"roundings must be one or two of {', '.join(ROUNDINGS)}, got {self.roundings!r}")
        fits = self.position_bits <= 16 or self.position_bits == UNBOUNDED
        need(fits, f"position_bits must be in 0..16, or {UNBOUNDED}, got {self.position_bits}")
        whole = self.table_segments == 0 or 256 % self.table_segments == 0 or self.table_segments == 512
        need(whole, f"table_segments must divide 256, or be 512, got {self.table_segments}")

    def as_data(self) -> dict[str, Any]:
        """What differs from the defaults."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Arithmetic:
        """The inverse of `as_data`.

        Raises:
            Refusal: a name or a value is not allowed.
        """
        known = [field.name for field in fields(Arithmetic)]
        unknown = sorted(set(data) - set(known))
        need(not unknown, f"arithmetic has {', '.join(unknown)}; known are {', '.join(known)}")
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
        return Arithmetic(**values)

    # --- from scales to a factor, from a factor to steps ------------------------------------------------------------

    def scale(self, scale: Any) -> np.ndarray:
        """float32: what the device takes a scale for."""
        scale = np.asarray(scale, np.float32)
        return np.exp2(np.rint(np.log2(scale))) if self.scales == "powers_of_two" else scale

    def factor(self, scales: Sequence[Any], result: Any, count: int = 1) -> np.ndarray:
        """float64: the product of scales divided by that of the result, and by a count."""
        dtype = np.float32 if "float32" in (self.quotient, self.multiplier) else np.float64
        numbers: list[Any] = [self.scale(scale).astype(dtype) for scale in (*scales, result)]
        quotient = np.asarray(reduce(mul, numbers[:-1]) / numbers[-1])
        return np.asarray(quotient / quotient.dtype.type(count), np.float64)

    def rescale(self, x: np.ndarray, factor: Any, zero_point: int = 0) -> np.ndarray:
        """int64 steps of the result: whole numbers times a real factor, [...] or [channels]."""
        return self.combine([x], [factor], zero_point)

    def combine(self, terms: Sequence[np.ndarray], factors: Sequence[Any], zero_point: int = 0) -> np.ndarray:
        """Likewise the sum of several, each with its factor, rounded once."""
        before = zero_point if self.zero_point == "before" else 0
        if self.multiplier != "fixed_point":
            real = np.dtype(self.multiplier).type
            products = [np.asarray(x).astype(real) * np.asarray(factor, real)
                        for x, factor in zip(terms, factors, strict=True)]  # fmt: skip
            total = reduce(np.add, products) + real(before)
            return rounded(np.asarray(total, np.float64), self.roundings[-1]).astype(np.int64) - before
        bits = self.multiplier_bits
        largest = reduce(np.maximum, (np.abs(np.asarray(factor, np.float64)) for factor in factors))
        # The largest factor fills the bits; the others are held as finely.
        exponent = np.frexp(largest)[1].astype(np.int64)
        exponent += rounded(np.ldexp(largest, bits - exponent), self.multiplier_rounding) >= 2.0**bits
        # A factor below all shifts does not become 0: what it leaves of a negative sum, a floor makes -1.
        tiny = (bits - exponent > _BITS) & (largest > 0)
        exponent = np.where(bits - exponent > _BITS, bits - _BITS, exponent)
        fractions = (np.ldexp(np.asarray(factor, np.float64), bits - exponent) for factor in factors)
        significands = [np.maximum(rounded(x, self.multiplier_rounding).astype(np.int64), tiny) for x in fractions]
        reach = sum(int(np.abs(x).max(initial=0)) for x in terms) << bits
        wide = object if reach + (abs(before) << min(bits + 32, _BITS)) >= 2**_BITS else np.int64
        total = reduce(np.add, (np.asarray(x).astype(wide) * s for x, s in zip(terms, significands, strict=True)))
        first, second = bits - np.maximum(exponent, 0), np.maximum(-exponent, 0)
        if len(self.roundings) == 1:
            first, second = np.zeros_like(first), first + second
        high = shifted(total, first, self.roundings[0])
        steps = shifted(high + (np.int64(before) << np.maximum(second, 0)), second, self.roundings[-1])
        return steps.astype(np.int64) - before

    def divide(self, total: np.ndarray, count: Any, zero_point: int = 0) -> np.ndarray:
        """Steps of a mean from the sum of steps."""
        if self.division == "multiplied":
            return self.rescale(total, 1.0 / np.asarray(count, np.float64), zero_point)
        before = zero_point if self.zero_point == "before" else 0
        return divided(total + before * count, count, self.roundings[-1]) - before

    # --- accumulators ------------------------------------------------------------------------------------------------

    def limited(self, sums: np.ndarray) -> np.ndarray:
        """int64 sums as the accumulator holds them."""
        if self.accumulator_bits >= UNBOUNDED:
            return sums
        low = -(1 << (self.accumulator_bits - 1))
        if self.overflow == "saturate":
            return np.clip(sums, low, -low - 1)
        return ((sums - low) & ((1 << self.accumulator_bits) - 1)) + low

    def holds(self, largest: int) -> bool:
        """Whether no sum up to this magnitude overflows."""
        return self.accumulator_bits >= UNBOUNDED or largest < 1 << (self.accumulator_bits - 1)

    def accumulated(self, products: Iterable[np.ndarray], bias: np.ndarray) -> np.ndarray:
        """The sum of products, one after the other, and the bias."""
        total: Any = self.limited(bias) if self.bias == "first" else np.zeros_like(bias)
        for product in products:
            total = self.limited(total + product)
        return np.asarray(total if self.bias == "first" else self.limited(total + bias))

    # --- tables ------------------------------------------------------------------------------------------------------

    def look_up(self, codes: np.ndarray, entries: np.ndarray, lowest: int, width: int) -> np.ndarray:
        """int64 codes in a table of `table_segments` + 1 entries, `width` codes apart from the lowest code on."""
        index, rest = np.divmod(codes - lowest, width)
        base, slope = entries[index], entries[index + 1] - entries[index]
        return base + divided(slope * rest, width, self.roundings[-1])


def rounded(x: np.ndarray, rounding: str) -> np.ndarray:
    """Real numbers in float64, which holds them exactly, as whole ones."""
    below = np.floor(x)
    rest = x - below
    return np.asarray(below + _above(rest - 0.5, rest == 0, x < 0, below % 2 == 1, rounding))


def divided(x: np.ndarray, divisor: Any, rounding: str) -> np.ndarray:
    """Whole numbers divided by positive ones."""
    below = x // divisor
    rest = x - below * divisor
    return np.asarray(below + _above(2 * rest - divisor, rest == 0, x < 0, below % 2 == 1, rounding))


def shifted(x: np.ndarray, shift: np.ndarray, rounding: str) -> np.ndarray:
    """x / 2**shift; exact to the left, where the shift is negative."""
    return divided(x << np.maximum(-shift, 0), np.int64(1) << np.maximum(shift, 0), rounding)


def _above(beyond_half: Any, whole: Any, negative: Any, odd: Any, rounding: str) -> Any:
    """Whether numbers become the integer above them, by the sign of what they have beyond the half."""
    if rounding in ("floor", "toward_zero"):
        return (negative & ~whole) * int(rounding == "toward_zero")
    up = {"half_up": True, "half_down": False, "half_away": ~negative, "half_toward_zero": negative, "half_even": odd}
    return (beyond_half > 0) | ((beyond_half == 0) & up[rounding])


__all__ = ["NUMBERS", "ROUNDINGS", "UNBOUNDED", "WORDS", "Arithmetic", "divided", "rounded", "shifted"]
