# SPDX-License-Identifier: Apache-2.0
"""Results in 16 bits, proposed where a network ends: what it returns may be of several kinds, such as scores and boxes,
which share one grid of 8 bits badly. No training can mend that, and there 16 bits cost next to nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..deploy.footprint import arena_of
from ..deploy.formats.tflite import tflite_bytes
from ..deploy.graph import Graph
from ..deploy.packing import packed
from ..device.operator import Refusal
from ..planning.plans import Plan
from ..planning.rule_text import rules_text
from ..planning.rules import Rule
from .assignment import Assignments, Unit
from .metrics import Data, Mark, Metric
from .network import Candidate
from .observing import Observer
from .precisions import Part, layer_of
from .sensitivity import Evaluation, Key, at_two_precisions

WIDE = 16


@dataclass(frozen=True)
class Proposal:
    """Rules with which a network would be better than a search of ranges and weights can make it.

    Attributes:
        layers: paths of the layers whose results get 16 bits.
        rules: all rules, for `qat.prepare`.
        reference: the metric of the float network (in 16 bits).
        alone: the metric with nothing but these results in their present bits.
        flash, arena: bytes that the file and TFLite-Micro's arena get more; arena None: it cannot be measured here.
        graph: the network with these rules, otherwise as the search left it.
    """

    layers: tuple[str, ...]
    rules: tuple[Rule, ...]
    reference: float
    alone: float
    flash: int
    arena: int | None
    graph: Graph = field(repr=False, compare=False)

    def as_json(self) -> dict[str, Any]:
        """What is proposed, for a file."""
        return {
            "layers": list(self.layers),
            "rules": rules_text(self.rules).splitlines(),
            "reference": self.reference,
            "alone": self.alone,
            "flash": self.flash,
            "arena": self.arena,
        }

    def text(self) -> str:
        """Why, what it costs, and the rules."""
        arena = "" if self.arena is None else f" and {self.arena:+,} of arena"
        said = (
            f"Where the network ends, its bits alone take the metric from {self.reference:.4g} to {self.alone:.4g}. "
            f"These rules with 16 bits there cost {self.flash:+,} bytes of flash{arena}:"
        )
        return f"{textwrap.fill(said, 80)}\n{rules_text(self.rules)}"

    def __str__(self) -> str:
        return self.text()


def proposed(start: Candidate, best: Candidate, data: Data, metric: Metric, higher_is_better: bool) -> Proposal | None:
    """16 bits at the end of a network, if its present bits clearly cost accuracy even with all else in 16 bits.

    Args:
        start: the network as it was given: ranges that clip what is large may spare the metric, but in training they
            would hinder it.
        best: as a search left it.
        data: nothing is chosen by it but this.
    """
    end = _end_of(best.plan)
    plan = best.plan
    others = [
        path for path in [*(each.path for each in plan.inputs), *(step.path for step in plan.steps)] if path not in end
    ]
    assignments = Assignments(best, Observer(best, data).seen(), (), (WIDE,), keep=others)
    units = [
        unit
        for unit, bits in assignments.units.items()
        if not unit.weights and bits == (WIDE,) and assignments.given[unit] < WIDE
    ]
    found = _with(assignments, units)
    if not units or found is None:
        return None
    alone = _alone(start, assignments, units, data)
    reference, *marks = [Mark.of(each, data, metric, alone[0]) for each in alone]

    def costs(mark: Mark) -> bool:
        return reference.clearly_better_than(mark, higher_is_better)

    if not costs(marks[0]):
        return None
    needed, mark = units, marks[0]
    single = [unit for unit, each in zip(units, marks[1:], strict=False) if costs(each)]
    if 0 < len(single) < len(units):
        # Two that cost nothing alone may cost something together.
        fewer = _with(assignments, single)
        if fewer is not None:
            needed, found = single, fewer
            mark = marks[1 + units.index(single[0])] if len(single) == 1 else mark
    before, after = (packed(each.graph(), best.device) for each in (best, found))
    contents = [tflite_bytes(each) for each in (before, after)]
    (narrow, _), (wide, _) = map(arena_of, contents)
    assert reference.metric is not None and mark.metric is not None
    return Proposal(
        tuple(unit.layer for unit in needed),
        assignments.rules(_bits(assignments, needed)),
        reference.metric,
        mark.metric,
        len(contents[1]) - len(contents[0]),
        None if narrow is None or wide is None else wide - narrow,
        after,
    )


def _end_of(plan: Plan) -> set[str]:
    """Paths of what is stored at the end: results, and what they are made of without weights, back to the first layers
    with weights."""
    left, found = list(plan.device_outputs), set(plan.device_outputs)
    given = {each.path for each in plan.inputs}
    while left:
        stored = plan.stored(left.pop())
        if getattr(stored, "weights", None) is not None:
            continue
        fresh = {name for name in getattr(stored, "operands", ()) if plan.is_stored(name)} - found - given
        found |= fresh
        left += sorted(fresh)
    return found - given


def _bits(assignments: Assignments, wide: Sequence[Unit]) -> Mapping[Unit, int]:
    return {**assignments.given, **dict.fromkeys(wide, WIDE)}


def _with(assignments: Assignments, wide: Sequence[Unit]) -> Candidate | None:
    """The network with results of some units in 16 bits; None: the device has no such network."""
    try:
        return assignments.possible(_bits(assignments, wide))
    except (ValueError, Refusal):
        return None


def _alone(
    candidate: Candidate, assignments: Assignments, units: Sequence[Unit], data: Data
) -> list[dict[str, np.ndarray]]:
    """The outputs with everything in 16 bits, with nothing but all units in their bits, and with each unit alone."""
    precisions, device, ends = at_two_precisions(candidate, None)
    every = frozenset(precisions.parts)

    def parts_of(wanted: Sequence[Unit]) -> frozenset[Part]:
        return frozenset(
            part
            for part in precisions.parts
            if not part.weights
            and any(assignments.unit_of(layer_of(name)) in wanted for name in precisions.tensors_of[part])
        )

    choices = [units, *([unit] for unit in units if len(units) > 1)]
    variants: dict[Key, frozenset[Part]] = {("device", None): frozenset(), ("reference", None): every}
    keys: list[Key] = [("reference", None)]
    for number, choice in enumerate(choices):
        keys.append((f"choice {number}", precisions.parts[0]))
        variants[keys[-1]] = every - parts_of(choice)
    outputs = Evaluation(precisions, device, data, ends).run(variants, False)
    return [outputs[key] for key in keys]


__all__ = ["Proposal", "proposed"]
