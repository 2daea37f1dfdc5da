# SPDX-License-Identifier: Apache-2.0
"""Numbers of examples that stand in for a batch of any size while a model is traced.

Every size that follows the batch is then a multiple of the stand-in. Nothing else in the model may be a multiple
of it; a second trace with another one shows what computes with the size itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Large, so that no loop over the examples goes unnoticed; primes, so that sizes of the model's own are no multiples.
PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 2003, 2011, 2017, 2027, 3001, 3011, 3019, 3023, 4001, 4003)
# Small, and with many divisors: what holds for these and for the primes holds for all.
DIVISIBLE = (84, 90, 60, 72, 96, 66, 78, 54, 70, 42)
# A multiple of 2 to 8, 10, 12, 16, 32 and 64: what asks whether these divide the batch answers otherwise for a prime.
MULTIPLE = 6720
# Multiples of 2 to 6, 8, 10, 12, 16, 32 and 64, or many of these, where constants have the batch's size in memory.
MULTIPLES = (960, 480, 1440, 1920)


def fitting(stand_ins: Sequence[int], numbers: Iterable[float]) -> list[int]:
    """Those that no number of the model is a multiple of, or a fraction with it as the denominator."""
    known = set(numbers)
    return [each for each in stand_ins if not any(follows(number, each) for number in known)]


def follows(number: float, stand_in: int) -> bool:
    """Whether a number may come from the size of the batch."""
    if not number or number != number or number in (float("inf"), float("-inf")):
        return False
    return number % stand_in == 0 or abs((1 / number) % stand_in) < 1e-9
