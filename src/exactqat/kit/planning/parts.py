# SPDX-License-Identifier: Apache-2.0
"""Tensors that are joined or added on one grid although their ranges differ much: the smallest of them loses its
signal, and no figure of the whole shows it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..device import OPERATORS
from ..display import listed, shortened
from .callers import users_line
from .plans import Plan, PlanStep

# How many times wider than a part a whole of 8 bits may be, and how many steps it has; one of 16 bits leaves more.
WIDEST, STEPS, WIDE_STEPS = 2**5, 2**8 - 1, 2**16 - 1


class UnequalPartsWarning(UserWarning):
    """A tensor is stored on the grid of a much wider one, where little of its signal is left."""


class UnequalPart(NamedTuple):
    """The result that is joined or a sum, the operand, and what signal to noise this keeps on the grid of the whole if
    it fills its own."""

    whole: str
    part: str
    decibels: float


def meets(kind: str) -> bool:
    """Whether an operator joins or adds tensors."""
    declaration = OPERATORS[kind]
    return declaration.adds or (declaration.same_quantization and declaration.operands[1] is None)


def unequal(whole: str, part: str, steps: float) -> Iterable[UnequalPart]:
    """A part to which the grid of the whole leaves so many steps, if these are few; none at 0: it has no signal."""
    if 0 < steps < STEPS / WIDEST:
        yield UnequalPart(whole, part, 20 * math.log10(max(steps, 1e-3)))


def warn_of(parts: Sequence[UnequalPart]) -> None:
    """One warning for all of them."""
    words = [f"{shortened(part)} in {shortened(whole)} ({left:.0f} dB left)" for whole, part, left in parts]
    if parts:
        warnings.warn(
            f"the whole's range is more than {WIDEST} times that of a part, and its grid leaves that little: "
            f"{listed(words, length=160)}. Return the parts as separate outputs, scale them "
            f"alike before they meet, or give the whole 16 bits: qat.Rule({parts[0].whole!r}, activation_bits=16)",
            UnequalPartsWarning,
            stacklevel=users_line(),
        )


class ObservedParts:
    """What calibration sees of the parts that meet in a plan: on the grid of the whole, they have no range of their
    own.

    Attributes:
        last: of the last batch: by the path of what is joined or added, the smallest and the largest value of it, then
            of its computed operands; numbers of the framework's.
    """

    def __init__(self, plan: Plan) -> None:
        self.last: dict[str, list[tuple[Any, Any]]] = {}
        self._plan, self._widths = plan, dict[str, list[float]]()
        meeting = [step for step in plan.steps if step.kind and not step.outside and meets(step.kind)]
        self._operands = {step.path: [name for name in step.operands if plan.is_stored(name)] for step in meeting}

    def see(self, path: str, p: Any, tensors: Sequence[Any]) -> None:
        """A step computes the first of the tensors from the others, in real numbers. p: the framework's primitives."""
        if path in self._operands:
            axes = [tuple(range(len(tensor.shape))) for tensor in tensors]
            pairs = zip(map(p.stop_gradient, tensors), axes, strict=True)
            self.last[path] = [(p.amin(x, own), p.amax(x, own)) for x, own in pairs]

    def end_of_batch(self, number: int) -> None:
        """From here on the last batch counts; after the first one, no earlier calibration does."""
        if number == 1:
            self._widths.clear()
        for path, ends in self.last.items():
            widths = [max(float(high), 0.0) - min(float(low), 0.0) for low, high in ends]
            self._widths[path] = list(map(max, widths, self._widths.get(path, widths)))
        self.last = {}

    def warn(self) -> None:
        """Warns of parts to which the whole leaves few steps."""
        parts: list[UnequalPart] = []
        for path, (whole, *widths) in self._widths.items():
            steps = WIDE_STEPS if self._plan.grids[self._plan.stored(path).grid].rule.is_int16 else STEPS
            for name, width in zip(self._operands[path], widths, strict=True):
                parts += unequal(path, self._source(path, name), steps * width / whole if whole > 0 else 0)
        warn_of(parts)

    def _source(self, whole: str, name: str) -> str:
        """What an operand was before planning moved it to the whole's grid, by a step that it calls so."""
        step = self._plan.stored(name)
        return step.operands[0] if isinstance(step, PlanStep) and name.startswith(f"{whole}_operand_") else name
