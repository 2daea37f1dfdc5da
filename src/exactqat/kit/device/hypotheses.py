# SPDX-License-Identifier: Apache-2.0
"""What a device may compute: the declared devices, and all that can be stated, question by question.

An operator's declaration says what it asks of a stated arithmetic (`DeviceOperator.asks`). The answers to one group of
questions are guessed at a time: on operands that show them alone, whatever the later answers are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from .profile import PROFILES, REFERENCE, Profile, with_runtimes
from .stated_arithmetic import ROUNDINGS, UNBOUNDED, WORDS, Arithmetic

Answers = Mapping[str, Any]


@dataclass(frozen=True)
class Hypothesis:
    """An operator computes as it does on a declared device or, where it asks for more, as the arithmetic states."""

    like: str
    arithmetic: Arithmetic | None = None

    @property
    def profile(self) -> Profile:
        """The device that computes so."""
        return replace(PROFILES[self.like], arithmetic=self.arithmetic)

    @property
    def shared(self) -> tuple[object, ...]:
        """What it says of roundings and multipliers, which operators of one device have in common."""
        stated = self.arithmetic
        if stated is None:
            return (self.like,)
        return (stated.scales, stated.quotient, stated.multiplier, stated.multiplier_bits, stated.multiplier_rounding,
                stated.roundings, stated.zero_point)  # fmt: skip

    def __str__(self) -> str:
        if self.arithmetic is None:
            return f"as {self.like}"
        stated = self.arithmetic.as_data().items()
        words = (f"{name} {', '.join(value) if isinstance(value, tuple) else value}" for name, value in stated)
        return "; ".join(words) or "31 bits, rounded once, half up"


# These round alike wherever the zero point is added, and after a floor as at once.
SHIFTING = ("half_up", "half_down", "floor")


def _roundings() -> Iterator[Answers]:
    for rounding in ROUNDINGS:
        yield {"roundings": (rounding,)}
    for rounding in ROUNDINGS:
        if rounding not in SHIFTING:
            yield {"roundings": (rounding,), "zero_point": "before"}
    for first, last in product(("half_up", "half_away", "half_even", "floor"), ROUNDINGS):
        if first != "floor" or last not in ("half_up", "floor"):
            yield {"roundings": (first, last)}


def _multipliers() -> Iterator[Answers]:
    for multiplier, quotient in (("fixed_point", "float64"), ("fixed_point", "float32"), ("float32", "float32"),
                                 ("float64", "float64"), ("float64", "float32")):  # fmt: skip
        yield {"multiplier": multiplier, "quotient": quotient}
    yield {"scales": "powers_of_two"}
    for bits, rounding in product((32, *range(30, 0, -1)), ("half_away", "floor")):
        yield {"multiplier_bits": bits, "multiplier_rounding": rounding}
    for bits in range(24, 20, -1):  # with fewer, both quotients make one multiplier
        yield {"multiplier_bits": bits, "quotient": "float32"}


def _accumulators() -> Iterator[Answers]:
    yield {"accumulator_bits": UNBOUNDED}
    for bits, overflow in product(range(31, 15, -1), ("saturate", "wrap")):
        yield {"accumulator_bits": bits, "overflow": overflow}
        # Where each sum wraps, the last one is the same.
        for bias in ("first", "last") if overflow == "saturate" else ():
            yield {"accumulator_bits": bits, "overflow": overflow, "overflow_at": "each", "bias": bias}


def _tables() -> Iterator[Answers]:
    for scales, segments, end in product(WORDS["scales"], (256, 512, 128, 64, 32, 16), WORDS["table_end"]):
        if segments == 512 and end == "beyond":
            yield {"table_segments": segments, "table_values": "balanced"}
        for rounding in ROUNDINGS:
            yield {"table_segments": segments, "table_end": end, "roundings": (rounding,), "scales": scales}


def _positions() -> Iterator[Answers]:
    for bits, zero_point, rounding in product((31, 15), WORDS["zero_point"], ROUNDINGS):
        words = {"multiplier_bits": bits, "zero_point": zero_point, "roundings": (rounding,)}
        yield {"position_bits": UNBOUNDED, **words}
    for bits, rounding in product((11, 10, 0, 16, 15, 14, 13, 12, 9, 8, 7), ROUNDINGS):
        for zero_point in ("before",) if rounding in SHIFTING else ("before", "after"):
            yield {"position_bits": bits, "zero_point": zero_point, "roundings": (rounding,)}


# By the name of a group: all answers to its questions, the most usual ones first. `probes` has operands for each.
GROUPS: Mapping[str, tuple[Answers, ...]] = {
    "rounding": tuple(_roundings()),
    "channels": ({"channels": "each"}, {"channels": "first"}),
    "multiplier": tuple(_multipliers()),
    "addition": tuple({"addition": word} for word in WORDS["addition"]),
    "division": ({"division": "exact"}, {"division": "multiplied"}),
    "accumulator": tuple(_accumulators()),
    "table": tuple(_tables()),
    "position": tuple(_positions()),
    "place": ({"position_bits": 11}, {"position_bits": UNBOUNDED}),
}


def beginning(file: str) -> list[Hypothesis]:
    """One for each declared device, those that run such files first, and one whose questions are open."""
    names = [profile.name for profile in sorted(with_runtimes(), key=lambda profile: profile.file != file)]
    like = REFERENCE.name if PROFILES[REFERENCE.name].file == file else names[0]
    return [*map(Hypothesis, names), Hypothesis(like, Arithmetic())]


def answering(hypotheses: Sequence[Hypothesis], groups: Sequence[str], most: int = 1) -> list[Hypothesis]:
    """Those of a declared device, and the first few that state their arithmetic with all answers to further
    questions."""
    answers: dict[Hypothesis, None] = {}
    for hypothesis in [entry for entry in hypotheses if entry.arithmetic is not None][:most]:
        stated = hypothesis.arithmetic
        assert stated is not None
        for choice in product(*(GROUPS[group] for group in groups)):
            entry = replace(stated, **{name: value for part in choice for name, value in part.items()})
            # A real multiplier knows no upper half of a product, and what is rounded once is as with each.
            twice = len(entry.roundings) > 1
            if entry.multiplier == "fixed_point" if twice else entry.addition != "operands_once":
                answers[replace(hypothesis, arithmetic=entry)] = None
    return [*(hypothesis for hypothesis in hypotheses if hypothesis.arithmetic is None), *answers]


__all__ = ["GROUPS", "Hypothesis", "answering", "beginning"]
