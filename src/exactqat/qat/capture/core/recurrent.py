# SPDX-License-Identifier: Apache-2.0
"""Recurrent cells and plain recurrences as products, sums and functions, by the cells of planning.

A whole LSTM or GRU as most use it is a step of its own; here are single cells, other activations and other forms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from ....kit.planning.sequence import MOST_TIME_STEPS, Cell, over_time
from .builder import Either, HasShape, ItemBuilder, Moving
from .refusals import Refused


@dataclass
class ComposedCell:
    """A `planning.sequence.Cell` whose results are steps of the network.

    Attributes:
        multiplied: of the state, the first gate and how many: what the state adds to these gates.
        activation, gate_activation: of new values, and of gates.
    """

    c: ItemBuilder[Any]
    units: int
    multiplied: Callable[[Moving, int, int], HasShape]
    activation: Callable[[Moving], Moving]
    gate_activation: Callable[[Moving], Moving]
    reset_after: bool = True
    update_first: bool = False
    bias: HasShape | None = None

    def combine(self, kind: str, one: object, other: object, role: str) -> Moving:
        return self.c.emit(kind, [one, other], cast(Moving, one if isinstance(one, Moving) else other).shape)

    def part(self, x: Either, first: int, count: int, role: str = "") -> Either:
        return self.c.cut(x, len(x.shape) - 1, first * self.units, (first + count) * self.units)

    def product(self, state: Moving, first: int, count: int) -> HasShape:
        return self.multiplied(state, first, count)

    def function(self, x: Moving, role: str) -> Moving:
        return self.activation(x)

    def gate(self, x: Moving, role: str) -> Moving:
        return self.gate_activation(x)


def unrolled(
    kind: str,
    cell: ComposedCell,
    entry: Callable[[int], Moving],
    count: int,
    backwards: bool,
    state: HasShape | None = None,
    kept: Callable[[int, Moving, Moving | None], Moving] | None = None,
) -> tuple[list[Moving], Moving, Moving | None]:
    """`over_time`, of a number of steps that is not too large. entry: what the input adds at a time."""
    if count > MOST_TIME_STEPS:
        raise Refused(f"over {count} time steps; at most {MOST_TIME_STEPS} are unrolled")
    steps: Cell[Any] = cell
    return over_time(kind, steps, lambda at, starts: entry(at), count, backwards, state, kept)
