# SPDX-License-Identifier: Apache-2.0
"""More bits for results that training cannot repair, and where bits cost next to nothing.

Where a network ends, what it returns may be of several kinds, such as scores and boxes, which share one grid of 8 bits
badly: 16 bits are proposed. Means on a grid of fewer than 8 bits, possibly that of the averaged values, are rounded to
its few codes: 8 bits are proposed, which take no more memory.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..deploy.footprint import arena_of
from ..deploy.formats.tflite import tflite_bytes
from ..deploy.graph import Graph
from ..deploy.packing import packed
from ..kit.device import OPERATORS
from ..kit.display import Finding
from ..kit.planning.plans import Plan, PlanStep
from ..kit.planning.rule_text import rules_text
from ..kit.planning.rules import Rule
from .assignment import FEW, Assignments
from .metrics import Data, Mark, Metric
from .network import Candidate
from .precisions import Part, Precisions, layer_of
from .variants import Outputs, Seen, Variants

WIDE = 16


@dataclass(frozen=True, repr=False)
class Proposal(Finding):
    """Rules that would make a network better than a search of ranges and weights can.

    Attributes:
        layers: paths of the layers whose results get more bits, with how many: 16 where the network ends, 8 where they
            are averaged.
        rules: all rules, for `qat.prepare`.
        reference: the metric of the float network (in 16 bits).
        alone: the metric with only these results in their present bits.
        then: the metric with only these results in the proposed bits.
        flash, arena: bytes by which the file and TFLite-Micro's arena grow; arena None: it cannot be measured here.
        graph: the network with these rules, otherwise as the search left it.
    """

    layers: Mapping[str, int]
    rules: tuple[Rule, ...]
    reference: float
    alone: float
    then: float
    flash: int
    arena: int | None
    graph: Graph = field(repr=False, compare=False)

    def as_json(self) -> dict[str, object]:
        """What is proposed, for a file."""
        return {
            "layers": dict(self.layers),
            "rules": rules_text(self.rules).splitlines(),
            "reference": self.reference,
            "alone": self.alone,
            "then": self.then,
            "flash": self.flash,
            "arena": self.arena,
        }

    def text(self) -> str:
        """Why, what it costs, and the rules."""
        places = {WIDE: "where the network ends", FEW: "where results are averaged"}
        wanted = [bits for bits in places if bits in self.layers.values()]
        arena = "" if self.arena is None else f" and {self.arena:+,} of arena"
        said = (
            f"The bits {' and '.join(places[bits] for bits in wanted)} alone take the metric from {self.reference:.4g} "
            f"to {self.alone:.4g}. These rules with {' and '.join(map(str, wanted))} bits there take it to "
            f"{self.then:.4g} and cost {self.flash:+,} bytes of flash{arena}:"
        )
        return f"{textwrap.fill(said, 80)}\n{rules_text(self.rules)}"

    def __bool__(self) -> bool:
        return True


def proposed(
    start: Candidate, best: Candidate, seen: Mapping[str, Seen], data: Data, metric: Metric, higher_is_better: bool
) -> Proposal | None:
    """16 bits at the end of a network and 8 bits where results of fewer are averaged.

    Only if the present bits clearly cost accuracy even with all else in 16 bits, and the proposed ones cost clearly
    less.

    Args:
        start: the network as it was given: ranges that clip large values may spare the metric, but they would hinder
            training.
        best: as a search left it.
        seen: what the tensors of each grid hold.
        data: used for no other choice.
    """
    plan = best.plan
    end, averaged = _end_of(plan), _averaged(best)
    others = [step.path for step in plan.stored_steps if step.path not in end and step.grid not in averaged]
    assignments = Assignments(best, seen, (), (FEW, WIDE), keep=others)
    offered: dict[Part, int] = {}
    for part, options in assignments.options.items():
        now, of_means = assignments.given[part], plan.stored(part.layer).grid in averaged
        bits = FEW if of_means and now < FEW else WIDE
        if not part.weights and bits in options and now < bits and (bits == FEW or part.layer in end):
            offered[part] = bits
    attempt = assignments.attempt({**assignments.given, **offered})
    if not offered or attempt is None:
        return None
    groups = [[*offered], *([part] for part in offered if len(offered) > 1)]
    fine, *alone = _alone(start, assignments, groups, data)
    reference, *marks = [Mark.of(outputs, data, metric, fine) for outputs in (fine, *alone)]
    costly = [reference.clearly_better_than(mark, higher_is_better) for mark in marks]
    if not costly[0]:
        return None
    needed, mark = offered, marks[0]
    single = [part for part, costs in zip(offered, costly[1:], strict=False) if costs]
    if 0 < len(single) < len(offered):
        # Two that cost nothing alone may cost something together.
        other = assignments.attempt({**assignments.given, **{part: offered[part] for part in single}})
        if other is not None:
            needed, attempt = {part: offered[part] for part in single}, other
            mark = Mark.of(_alone(start, assignments, [single], data)[1], data, metric, fine)
    then = Mark.of(_alone(attempt, assignments, [[*needed]], data)[1], data, metric, fine)
    if not then.clearly_better_than(mark, higher_is_better):
        return None
    before, after = (packed(candidate.graph(), best.device) for candidate in (best, attempt))
    contents = [tflite_bytes(graph) for graph in (before, after)]
    (narrow, _), (wide, _) = map(arena_of, contents)
    assert reference.metric is not None and mark.metric is not None and then.metric is not None
    return Proposal(
        {part.layer: bits for part, bits in needed.items()},
        assignments.rules({**assignments.given, **needed}),
        reference.metric,
        mark.metric,
        then.metric,
        len(contents[1]) - len(contents[0]),
        None if narrow is None or wide is None else wide - narrow,
        after,
    )


def _averaged(candidate: Candidate) -> set[str]:
    """The grids of means, such as a pool's, possibly shared with the averaged values: means lie between codes."""
    plan, operators = candidate.plan, candidate.graph().operators
    paths = [layer_of(operator.outputs[0]) for operator in operators if OPERATORS[operator.kind].averages]
    return {plan.stored(path).grid for path in paths if plan.is_stored(path)}


def _end_of(plan: Plan) -> set[str]:
    """Paths of what is stored at the end: results, and what they are made from without weights, back to the first
    layers with weights."""
    left, paths = list(plan.device_outputs), set()
    while left:
        step = plan.stored(left.pop())
        if isinstance(step, PlanStep) and step.path not in paths:
            paths.add(step.path)
            left += [] if step.weights is not None else filter(plan.is_stored, step.operands)
    return paths


def _alone(
    candidate: Candidate, assignments: Assignments, groups: Sequence[Sequence[Part]], data: Data
) -> list[Outputs]:
    """The outputs with everything in 16 bits, and with only one group of parts at a time in its bits."""
    variants = Variants(Precisions(candidate), data)
    fine = [
        frozenset(
            part
            for part, names in variants.precisions.tensors_of.items()
            if part.weights or not any(assignments.part_of(layer_of(name)) in group for name in names)
        )
        for group in groups
    ]
    outputs = variants.outputs(fine, explained=False)
    return [outputs[one] for one in (variants.fine, *fine)]
