# SPDX-License-Identifier: Apache-2.0
"""Whole numbers that a network computes from masks and uses to look up rows: positions, which it counts.

They are on grids of scale 1, on which the device's sums and products of such numbers are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from . import masks
from .network import Network, Step
from .rules import Rule

Ends = tuple[int, int]
# What grids of scale 1 hold: bits, and the range.
_GRIDS: tuple[tuple[int, Ends], ...] = ((8, (0, 255)), (8, (-128, 127)), (16, (-32767, 32767)))
# Beyond this, the 15 bits of a multiplier in int16 kernels are not enough for the next number.
LARGEST = 2**13


def extents(network: Network) -> Mapping[str, Ends]:
    """The smallest and the largest possible values: of row numbers, and of what they are computed from."""
    given = [name for name in network.inputs if not masks.rows_of_tables(network, name)]
    known: dict[str, Ends] = {name: (0, 1) for name in given if masks.is_mask(network, name)}
    for step in network.steps:
        found = (0, 1) if step.kind == "compare" else _extent(network, step, known)
        if found is not None and max(map(abs, found)) <= LARGEST:
            known[step.output] = found
    made_by = {step.output: step for step in network.steps}
    wanted: set[str] = set()
    rows = [step.inputs[0] for step in network.steps if step.kind == "embedding"]
    while rows:
        name = rows.pop()
        if isinstance(name, str) and name in known and name not in wanted:
            wanted.add(name)
            rows += made_by[name].inputs if name in made_by and made_by[name].kind != "compare" else ()
    return {name: ends for name, ends in known.items() if name in wanted}


def _extent(network: Network, step: Step, known: Mapping[str, Ends]) -> Ends | None:
    if step.kind in masks.MOVES:
        return known.get(str(step.inputs[0]))
    if step.kind == "linear":
        return _of_product(network, step, known)
    if step.kind not in ("add", "sub", "mul", "neg") or not any(each in known for each in step.inputs):
        return None
    ends = [_ends(network, each, known) for each in step.inputs]
    if any(each is None for each in ends):
        return None
    (low, high), *others = (each for each in ends if each is not None)
    if step.kind == "neg":
        return -high, -low
    ((least, most),) = others
    if step.kind == "add":
        return low + least, high + most
    if step.kind == "sub":
        return low - most, high - least
    corners = [a * b for a in (low, high) for b in (least, most)]
    return min(corners), max(corners)


def _of_product(network: Network, step: Step, known: Mapping[str, Ends]) -> Ends | None:
    """Likewise for sums with a matrix of whole numbers."""
    ends, matrix = known.get(str(step.inputs[0])), _numbers(network, step.inputs[1])
    if ends is None or matrix is None or any(each is not None for each in step.inputs[2:]):
        return None
    products = np.stack([matrix * ends[0], matrix * ends[1]])
    return int(products.min(0).sum(-1).min()), int(products.max(0).sum(-1).max())


def _ends(network: Network, operand: object, known: Mapping[str, Ends]) -> Ends | None:
    if operand in known:
        return known[str(operand)]
    numbers = _numbers(network, operand)
    return None if numbers is None or not numbers.size else (int(numbers.min()), int(numbers.max()))


def _numbers(network: Network, operand: object) -> np.ndarray | None:
    """Constant whole numbers; None if it is something else."""
    held = network.constants.get(operand) if isinstance(operand, str) else None
    data = (None if held is None or held.trainable else held.data) if isinstance(operand, str) else operand
    numbers = None if data is None else np.asarray(data, np.float64)
    fits = numbers is not None and (np.rint(numbers) == numbers) & (abs(numbers) <= LARGEST)
    return numbers if np.all(fits) else None


def on_whole_grid(rule: Rule, ends: Ends) -> Rule:
    """The rule for a tensor on a grid of scale 1 that reaches from end to end."""
    bits, (low, high) = next(each for each in _GRIDS if each[1][0] <= ends[0] and ends[1] <= each[1][1])
    return replace(rule, activation_bits=bits, ranges="fixed", fixed_range=(float(low), float(high)))


def is_on_whole_grid(rule: Rule) -> bool:
    """Whether it is such a rule."""
    grids = [(bits, tuple(map(float, ends))) for bits, ends in _GRIDS]
    return rule.ranges == "fixed" and (rule.activation_bits, rule.fixed_range) in grids


__all__ = ["LARGEST", "extents", "is_on_whole_grid", "on_whole_grid"]
