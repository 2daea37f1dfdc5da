# SPDX-License-Identifier: Apache-2.0
"""Tensors and their grids while a network is planned."""

from __future__ import annotations

from dataclasses import dataclass

from .plans import Grid
from .rules import Rule


class SharedGrid:
    """The grid of one or several tensors during planning: grids that must be one are joined."""

    def __init__(
        self,
        name: str,
        rule: Rule,
        nonnegative: bool = False,
        fixed: tuple[float, int] | None = None,
        of_inputs: bool = False,
        indices: int = 0,
    ) -> None:
        self.name = name
        self.rule = rule
        self.nonnegative = nonnegative
        self.writers = 1
        self.fixed = fixed
        self.of_inputs = of_inputs
        self.indices = indices
        self._joined: SharedGrid | None = None

    def root(self) -> SharedGrid:
        grid = self
        while grid._joined is not None:
            grid = grid._joined
        return grid

    def join(self, other: SharedGrid) -> None:
        first, second = self.root(), other.root()
        if first is second:
            return
        first.nonnegative = first.nonnegative and second.nonnegative
        first.of_inputs = first.of_inputs and second.of_inputs
        first.writers += second.writers
        second._joined = first

    @property
    def is_int16(self) -> bool:
        """Whether the device stores its tensors in int16."""
        return self.root().rule.is_int16

    def accepts(self, rule: Rule, fixed: tuple[float, int] | None = None) -> bool:
        """Whether a tensor under `rule`, or on a `fixed` grid, may be stored on this one."""
        grid = self.root()
        if grid.fixed is not None or fixed is not None:
            return grid.fixed == fixed
        names = ("activation_bits", "ranges", "fixed_range", "ema_decay", "percentile")
        return all(getattr(grid.rule, name) == getattr(rule, name) for name in names)

    def finished(self) -> Grid:
        return Grid(self.name, self.rule, self.nonnegative, self.writers, self.fixed, self.of_inputs, self.indices)


@dataclass(eq=False)
class Stored:
    """A tensor that the device stores.

    Attributes:
        channels: the axis that holds channels or features, if known.
        high: see `PlanStep.high`.
    """

    path: str
    shape: tuple[int, ...]
    batch_axis: int
    grid: SharedGrid
    channels: int | None = None
    high: bool = False

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def nonnegative(self) -> bool:
        return self.grid.root().nonnegative
