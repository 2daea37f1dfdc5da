# SPDX-License-Identifier: Apache-2.0
"""What `tune.plan` found: plans and their costs, the best of them, and its rules to read, edit and train with."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ..deploy.graph import Graph
from ..kit.display import Finding, aligned, table
from ..kit.planning.rule_text import rules_text, save_rules
from ..kit.planning.rules import Rule
from .budgets import WORDS, Budgets
from .network import Candidate

HEADER = ("metric", "dB", "flash", "arena", "multiply-adds", "layers")


@dataclass(frozen=True)
class PlanPoint:
    """One plan that was evaluated.

    Attributes:
        metric: on the device's integers; decibels: signal to noise of its outputs against the float network's.
        flash: bytes of its file, as written.
        arena: the smallest one in which TFLite-Micro runs it, measured; None if it was not measured.
        multiply_adds: for one example, in units of 8 by 8 bits.
        layers: how many have which bits, such as "3 W8A8, 1 W4A16".
        rules: of all layers.
    """

    metric: float
    decibels: float
    flash: int
    arena: int | None
    multiply_adds: float
    layers: str
    rules: tuple[Rule, ...]

    @property
    def costs(self) -> dict[str, float | None]:
        """By the names of budgets."""
        return {"flash": self.flash, "arena": self.arena, "multiply_adds": self.multiply_adds}

    def cells(self) -> tuple[str, ...]:
        """For a table with `HEADER`."""
        noise = f"{self.decibels:.1f}" if math.isfinite(self.decibels) else "inf"
        arena = "-" if self.arena is None else f"{self.arena:,}"
        return f"{self.metric:.4g}", noise, f"{self.flash:,}", arena, f"{self.multiply_adds:,.0f}", self.layers


@dataclass(frozen=True, repr=False)
class PrecisionPlan(Finding):
    """What `plan` found. It is true if all budgets are met.

    Attributes:
        device: whose integers.
        examples: how many were evaluated.
        reference: the metric of the float network, computed in 16 bits.
        budgets: as requested.
        chosen: the best plan within the budgets; if there is none, the nearest.
        missed: for each budget that the chosen plan exceeds, by how much; empty if all are met.
        points: all plans that were evaluated as a whole.
        front: the points that no other one beats in everything.
        even: the plan with the same bits everywhere, as far as layers can have them, that stays within the budgets and
            has the finest results; None: there is none, or only the metric has a budget.
        graph: the chosen network in the integers that post-training quantization gives it, as written to a file:
            four-bit filters are packed where the device has them.
        candidate: its numbers, as `sensitivity` and `search` take them.
        left_out: bits that a layer cannot have, and why.
        evaluations: of networks, in all.
        higher_is_better: of the metric.
    """

    device: str
    examples: int
    reference: float
    budgets: Budgets
    chosen: PlanPoint
    missed: Mapping[str, float]
    points: tuple[PlanPoint, ...]
    front: tuple[PlanPoint, ...]
    even: PlanPoint | None
    graph: Graph
    candidate: Candidate
    left_out: Mapping[str, str]
    evaluations: int
    higher_is_better: bool = True

    def __bool__(self) -> bool:
        return not self.missed

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The chosen plan, for `qat.prepare`."""
        return self.chosen.rules

    @property
    def to_train(self) -> tuple[PlanPoint, ...]:
        """The plans to train: the chosen one, and the even one if it differs; keep the one that is better on the device
        afterwards. Training repairs weights of few bits better than results of few bits, so the better plan before
        training need not be the better one after it."""
        return (self.chosen, *(() if self.even is None or self.even.rules == self.rules else (self.even,)))

    @property
    def drop(self) -> float:
        """How much worse the metric of the chosen plan is than the float network's, before any training."""
        return self._loss(self.chosen)

    def save_rules(self, path: str | Path) -> Path:
        """Writes the chosen plan as a text that `qat.load_rules` reads, with its costs at the top."""
        return save_rules(self.rules, path, self.sentence())

    def sentence(self) -> str:
        """What was chosen, and whether it stays within the budgets."""
        said = self._costs(self.chosen)
        if not self.missed:
            return f"{said} It keeps to the budgets: {self.budgets.text()}."
        beyond = "; ".join(self._beyond(name, by) for name, by in self.missed.items())
        none = f"No plan that was found keeps to the budgets ({self.budgets.text()})"
        return f"{said} {none}; this is the nearest: {beyond}."

    def _costs(self, point: PlanPoint) -> str:
        arena = "" if point.arena is None else f", {point.arena:,} bytes of arena"
        return (
            f"{self.device}: {point.metric:.4g} before training ({self.reference:.4g} in float), {point.flash:,} "
            f"bytes of flash{arena}, {point.multiply_adds:,.0f} multiply-adds: {point.layers}."
        )

    def _beyond(self, name: str, by: float) -> str:
        if not math.isfinite(by):
            return f"{WORDS[name]} could not be measured"
        if name == "drop":
            least = min(map(self._loss, self.points))
            return f"the metric drops by {by:.4g} more than allowed (the least drop of all plans is {least:.4g})"
        fewest = min(cost for cost in (point.costs[name] for point in self.points) if cost is not None)
        return f"{by:,.0f} {WORDS[name]} too many (the fewest of all plans are {fewest:,.0f})"

    def _loss(self, point: PlanPoint) -> float:
        return (self.reference - point.metric) * (1 if self.higher_is_better else -1)

    def text(self, width: int = 80) -> str:
        """What was chosen, its rules, what else to train, and the front, in `width` columns if the rules are short
        enough."""
        lines = [*textwrap.wrap(self.sentence(), width), "", rules_text(self.rules).rstrip(), ""]
        for other in self.to_train[1:]:
            said = f"Train this one too, and keep what is better afterwards. {self._costs(other)}"
            lines += [*textwrap.wrap(said, width), "", rules_text(other.rules).rstrip(), ""]
        lines.append("Plans that no other one beats in everything:")
        rows = [("*" if point == self.chosen else " ", *point.cells()) for point in self.front]
        lines += [line[:width].rstrip() for line in aligned([(" ", *HEADER), *rows], (0, len(HEADER)))]
        for what, why in self.left_out.items():
            lines += textwrap.wrap(f"Left out: {what}: {why}", width)
        return "\n".join(lines)

    def in_short(self) -> str:
        return self.sentence()

    def _repr_html_(self) -> str:
        return table(self.sentence(), HEADER, [point.cells() for point in self.front], 0)

    def as_json(self) -> str:
        """Everything except the network."""

        def of(point: PlanPoint) -> dict[str, object]:
            noise = point.decibels if math.isfinite(point.decibels) else None
            return {**asdict(point), "decibels": noise, "rules": rules_text(point.rules)}

        content = {
            "device": self.device,
            "examples": self.examples,
            "reference": self.reference,
            "budgets": asdict(self.budgets),
            "met": not self.missed,
            "missed": {name: by if math.isfinite(by) else None for name, by in self.missed.items()},
            "chosen": of(self.chosen),
            "front": [of(point) for point in self.front],
            "even": None if self.even is None else of(self.even),
            "left_out": dict(self.left_out),
            "evaluations": self.evaluations,
        }
        return json.dumps(content, indent=2)


def front_of(points: tuple[PlanPoint, ...], higher_is_better: bool) -> tuple[PlanPoint, ...]:
    """The points that no other one beats: none is as good in everything and better in something. In order of flash."""

    def values(point: PlanPoint) -> tuple[float, ...]:
        sign = -1.0 if higher_is_better else 1.0
        return sign * point.metric, point.flash, math.inf if point.arena is None else point.arena, point.multiply_adds

    kept: dict[tuple[float, ...], PlanPoint] = {}
    for point in points:
        mine = values(point)
        beaten = any(
            all(a <= b for a, b in zip(values(other), mine, strict=True)) and values(other) != mine for other in points
        )
        if not beaten:
            kept.setdefault(mine, point)
    return tuple(sorted(kept.values(), key=lambda point: (point.flash, values(point))))
