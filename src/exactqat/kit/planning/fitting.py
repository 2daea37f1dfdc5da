# SPDX-License-Identifier: Apache-2.0
"""Ranges that fit each other.

Kernels rescale with fixed-point numbers of limited bits, so an operator takes the scales of its operands only within
limits relative to that of its result (`DeviceOperator.scale_limits`). Ranges that follow data nearly always keep to
them; those of values close to zero, of layers whose results all but cancel, or learned ranges may not. Scales beyond
the limits are of no use anyway: either the operands' steps are larger than the result's whole range, or everything they
contribute is less than its step. So a network need not be refused for this after training: `freeze` moves such ranges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..device import OPERATORS
from ..device.operator import ScaleLimits
from .plans import SMALLEST_WIDTH, Grid, Plan, PlanStep

Ends = tuple[float, float]
# Scales are later rounded to float32, and so are their quotients.
_MARGIN = 1 + 2.0**-10
# One change may require another, in a layer before or after.
_ROUNDS = 64


class RangesMovedWarning(UserWarning):
    """Ranges were moved by `freeze`, as the device's operators cannot take them together, or values are too small for
    any range."""


@dataclass(frozen=True)
class _Limited:
    """A step whose operator bounds scales: grids of the operands (None: a constant's own) and of the result."""

    limits: ScaleLimits
    operands: tuple[str | None, ...]
    constants: tuple[float, ...]
    result: str

    def grids(self) -> set[str]:
        """All grids that have to be known."""
        return {self.result, *(name for name in self.operands if name is not None)}

    def bounded(self, scales: Mapping[str, float]) -> list[float]:
        own = iter(self.constants)
        operand_scales = [next(own) if name is None else scales[name] for name in self.operands]
        return self.limits.bounded(operand_scales, scales[self.result])


def limits_of(step: PlanStep, grids: Sequence[Grid], result: Grid) -> ScaleLimits | None:
    """What a step's operator requires of scales. grids: of the operands; constants have those of the others."""
    if not step.kind or step.outside or step.expression is not None:
        return None
    operator, dtypes = OPERATORS[step.kind], [grid.dtype for grid in (*grids, result)]
    return operator.scale_limits(dtypes, {**operator.attributes, **step.attributes})


def constant_limits(plan: Plan, step: PlanStep, position: int) -> tuple[ScaleLimits, str] | None:
    """What bounds the scale of a step's constant operand, and the grid of the other operand."""
    other = next((path for at, path in enumerate(step.operands) if at != position and plan.is_stored(path)), None)
    if other is None:
        return None
    name = plan.stored(other).grid
    limits = limits_of(step, [plan.grids[name]] * len(step.operands), plan.grids[step.grid])
    return None if limits is None or limits.of == "operand" else (limits, name)


def constant_step(limits: ScaleLimits, other: Any, result: Any) -> tuple[Any, Any]:
    """The smallest and the largest scale of a constant, given those of the other operand and of the result."""
    unit = result / other if limits.of == "product" else result
    return unit * (limits.lowest * _MARGIN), unit * (limits.highest / _MARGIN)


def _ends(grid: Grid, ends: Ends) -> Ends:
    """The ends as used: see `ranges`."""
    if grid.fixed_range is not None:
        return grid.fixed_range
    return (0.0, 1.0) if ends[1] - ends[0] < SMALLEST_WIDTH else ends


def _scale(grid: Grid, ends: Ends) -> float:
    if grid.fixed is not None:
        return grid.fixed[0]
    low, high = _ends(grid, ends)
    if grid.rule.is_int16:
        return max(-low, high) / (2**15 - 1)
    return (high - low) / (2**grid.bits - 1)


def _limited(plan: Plan, constants: Mapping[tuple[str, int], float]) -> Iterator[_Limited]:
    for step in plan.steps:
        names = [plan.stored(path).grid if plan.is_stored(path) else None for path in step.operands]
        first = next((name for name in names if name is not None), None)
        if first is None:
            continue
        if step.weights is not None:
            names.append(None)
        grids = [plan.grids[first if name is None else name] for name in names]
        limits = limits_of(step, grids, plan.grids[step.grid])
        if limits is None:
            continue
        own = tuple(constants.get((step.path, position), 0.0) for position, name in enumerate(names) if name is None)
        yield _Limited(limits, tuple(names), own, step.grid)


def fitting_ranges(plan: Plan, ends: Mapping[str, Ends], constants: Mapping[tuple[str, int], float]) -> dict[str, Ends]:
    """The ranges that have to change so that every operator accepts its scales: grid -> (min, max).

    Results become coarser where operands are too coarse for them, operands where they are too fine for the result. A
    range that has seen nothing is made finer instead, as its width means nothing.

    Args:
        ends: (min, max) of every grid that has a range, as training left them.
        constants: (step's path, position among its operands) -> the scale that its values ask for, if known; for
            weights, which follow the operands, the largest one. Training itself keeps them from being too small
            (`constant_step`, `layers.channel_grid`), so ranges are moved only for large ones.
    """
    # The last training step may have moved a learned end beyond zero.
    ends = {name: (min(low, 0.0), max(high, 0.0)) for name, (low, high) in ends.items()}
    presets = {name for name, grid in plan.grids.items() if grid.fixed is not None or name not in ends}
    scales = {
        name: _scale(grid, ends.get(name, (0.0, 0.0)))
        for name, grid in plan.grids.items()
        if name in ends or grid.fixed is not None
    }
    before = dict(scales)
    limited = [step for step in _limited(plan, constants) if scales.keys() >= step.grids()]
    empty = {name for name, (low, high) in ends.items() if high - low < SMALLEST_WIDTH} - presets
    least = {name: _scale(plan.grids[name], (0.0, SMALLEST_WIDTH * _MARGIN)) for name in empty}

    def finer(name: str, wanted: float) -> None:
        """Once; afterwards it is a range like any other."""
        empty.discard(name)
        scales[name] = min(scales[name], max(wanted, least[name]))

    for _ in range(_ROUNDS):
        earlier = dict(scales)
        for step in limited:
            _fit(step, scales, presets, empty, finer)
        if scales == earlier:
            break
    moved = {}
    for name, scale in scales.items():
        if scale != before[name]:
            low, high = _ends(plan.grids[name], ends[name])
            factor = scale / before[name]
            moved[name] = (low * factor, high * factor)
    return moved


def _fit(
    step: _Limited, scales: dict[str, float], presets: set[str], empty: set[str], finer: Callable[[str, float], None]
) -> None:
    limits, result = step.limits, step.result
    for position in range(len(step.bounded(scales))):
        value = step.bounded(scales)[position]
        # What this value depends on, the smallest first: its values matter least.
        read = step.operands if limits.of == "product" else step.operands[position : position + 1]
        own = {name for name in read if name is not None}
        operands = sorted(own - presets - {result}, key=lambda name: (scales[name], name))
        if value >= limits.highest:
            if limits.of == "operand":
                continue
            excess = value / limits.highest * _MARGIN
            for name in operands:
                if name in empty and excess > 1:
                    finer(name, scales[name] / excess)
                    excess = step.bounded(scales)[position] / limits.highest * _MARGIN
            if excess > _MARGIN and result not in presets and result not in own:
                scales[result] *= excess
        # A constant's scale follows automatically.
        elif value < limits.lowest and None not in step.operands:
            if result in empty and limits.of != "operand":
                finer(result, scales[result] * value / limits.lowest / _MARGIN)
                value = step.bounded(scales)[position]
            if value < limits.lowest and operands:
                scales[operands[0]] *= limits.lowest / max(value, math.ulp(0.0)) * _MARGIN


def moved_sentence(moved: Mapping[str, Ends], ends: Mapping[str, Ends]) -> str:
    """A sentence for users on what `fitting_ranges` has moved; empty if only ranges of zeros moved."""
    names = [name for name in moved if ends[name][1] - ends[name][0] >= SMALLEST_WIDTH]
    if not names:
        return ""
    (low, high), (new_low, new_high) = ends[names[0]], moved[names[0]]
    more = f", and {len(names) - 1} more like it" if len(names) > 1 else ""
    return (
        "the device's operators do not support some combinations of ranges, so freeze has changed that of "
        f"'{names[0]}' from {low:.3g}..{high:.3g} to {new_low:.3g}..{new_high:.3g}{more}: few codes are left for "
        "the values stored there; check whether they nearly vanish or cancel, or whether its learned range ran away"
    )
