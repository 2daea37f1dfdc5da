# SPDX-License-Identifier: Apache-2.0
"""Tensors and their grids while a network is planned."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .plans import Grid
from .rules import Rule


class SharedGrid:
    """The grid of one or several tensors during planning: grids that must be one are joined."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._joined: SharedGrid | None = None

    def root(self) -> SharedGrid:
        grid = self
        while grid._joined is not None:
            grid = grid._joined
        return grid

    @property
    def now(self) -> Grid:
        """The grid of all that were joined so far."""
        return self.root()._grid

    def join(self, other: SharedGrid) -> None:
        first, second = self.root(), other.root()
        if first is not second:
            one, two = first._grid, second._grid
            first._grid = replace(
                one,
                nonnegative=one.nonnegative and two.nonnegative,
                of_inputs=one.of_inputs and two.of_inputs,
                writers=one.writers + two.writers,
            )
            second._joined = first

    @property
    def is_int16(self) -> bool:
        """Whether the device stores its tensors in int16."""
        return self.now.rule.is_int16

    def accepts(self, rule: Rule, fixed: tuple[float, int] | None = None) -> bool:
        """Whether a tensor under `rule`, or on a `fixed` grid, may be stored on this one."""
        grid = self.now
        if grid.fixed is not None or fixed is not None:
            return grid.fixed == fixed
        names = ("activation_bits", "ranges", "fixed_range", "ema_decay", "percentile")
        return all(getattr(grid.rule, name) == getattr(rule, name) for name in names)


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
        return self.grid.now.nonnegative
