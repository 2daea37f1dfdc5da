# SPDX-License-Identifier: Apache-2.0
"""A precision plan: bits for the weights and the results of each layer that make a network fit, found from each layer's
loss and checked on the device's integers and on the files themselves."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import numpy as np

from ..deploy.footprint import MICRO, arena_of
from ..deploy.formats.tflite import tflite_bytes
from ..deploy.graph import Graph
from ..deploy.packing import packed
from ..kit.device import Profile, profile_named
from ..kit.progress import Clock, Progress
from .assignment import FEW, Assignments, Bits, multiply_adds
from .budgets import Budgets
from .costs import Costs
from .evaluations import Evaluations
from .metrics import Data, Mark, Metric, accuracy
from .network import Candidate
from .planned import PlanPoint, PrecisionPlan, front_of
from .precisions import Part
from .variants import Observer

WEIGHTS, ACTIVATIONS = (4, 8), (8, 16)
# Bits that devices know for weights, and for results.
KNOWN_WEIGHTS, KNOWN_ACTIVATIONS = range(2, 9), (*range(2, 9), 16)
# Shares of the budgets that estimates aim at: files are a little larger than estimated, or smaller.
AIMS = (1.0, 0.97, 0.92)
# How many plans on each way down from the finest to the coarsest, and on the front, are looked at more closely.
LOOKED_AT, MEASURED = 6, 12
# Where metrics do not separate two plans, neither does this much noise, in dB: then the smaller one is better.
AS_GOOD = 1.0


def plan(
    network: object,
    data: object,
    metric: Metric = accuracy,
    *,
    max_drop: float | str | None = None,
    flash: int | str | None = None,
    arena: int | str | None = None,
    multiply_adds: int | str | None = None,
    weight_bits: Sequence[int] = WEIGHTS,
    activation_bits: Sequence[int] | None = None,
    keep: Collection[str] = (),
    candidates: int = 60,
    device: str | Profile | None = None,
    executor: Executor | None = None,
    higher_is_better: bool = True,
    progress: Progress | bool | None = None,
) -> PrecisionPlan:
    """Finds the bits of each layer's weights and results that keep a network within budgets and make it most accurate.

    First each layer's loss with fewer bits is measured by itself. Plans are made from these: those that meet the
    budgets with the least loss, and others on the way from the finest to the coarsest. Every plan is lowered, written
    and evaluated on the device's integers, as after post-training quantization; flash is the size of the file, the
    arena is measured with TFLite-Micro. With a budget for flash, arena or multiply-adds the result is the most accurate
    plan within them; with `max_drop` alone, the smallest. The result is deterministic.

    Args:
        network: a prepared and calibrated, trained or frozen model (for JAX ``(prepared, params, state)``). It is not
            changed. Its rules decide everything but the bits.
        data: ``(inputs, targets)`` to base decisions on, such as the validation set; or a loader of such pairs.
        metric, higher_is_better: see `sensitivity`.
        max_drop: the most by which the metric may be worse than the float network's, in its own unit (0.005) or in
            percentage points ("0.5%"). It applies to post-training quantization; training recovers more.
        flash, arena: bytes, such as 262144 or "256k".
        multiply_adds: for one example, in units of 8 by 8 bits: 16 by 8 count as two, 4 by 8 as a half.
        weight_bits: those that a layer's weights may have, 2 to 8. No file holds 16-bit weights.
        activation_bits: those that a layer's results may have, 2 to 8, or 16; by default 8 and 16, and with a budget of
            multiply-adds 4 as well: fewer than 8 save neither flash nor memory on these devices.
        keep: globs of layers that keep their bits, such as ``["input"]``, or only the weights or the result of layers,
            such as ``["head (result)"]``; each glob has to match something.
        candidates: the most plans to evaluate as a whole, in addition to each layer's loss.
        device: whose integers; by default the one the network was prepared for. Four-bit weights save flash only where
            the device's runtime computes the same with them: see `deploy.packed`.
        executor: as for `search`.
        progress: see `sensitivity`.

    Raises:
        ValueError: a budget is missing or in another unit, no device has such bits, or the network's arena cannot
            be measured.
        TypeError: the network is not prepared.
        MissingData: it is not calibrated.
        ImportError: the arena has a budget, and TFLite-Micro, which measures it, is not installed.
    """
    asked = Budgets.of(max_drop=max_drop, flash=flash, arena=arena, multiply_adds=multiply_adds)
    if activation_bits is None:
        activation_bits = ACTIVATIONS if asked.multiply_adds is None else (4, *ACTIVATIONS)
    for name, bits, known, words in (
        ("weight_bits", weight_bits, KNOWN_WEIGHTS, "2 to 8, as no file holds weights of more"),
        ("activation_bits", activation_bits, KNOWN_ACTIVATIONS, "2 to 8, or 16"),
    ):
        if not bits or not set(bits) <= set(known):
            raise ValueError(f"{name} must be bits from {words}, got {bits!r}")
    if candidates < 1:
        raise ValueError(f"candidates must be a number of plans, 1 or more, got {candidates!r}")
    if asked.arena is not None and importlib.util.find_spec("tflite_micro") is None:
        raise ImportError(f"a budget of arena is measured by TFLite-Micro: {MICRO}")
    if isinstance(keep, str):
        raise TypeError(f"keep must be a list of globs of layers, got {keep!r}")
    base = Candidate.of(network, None if device is None else profile_named(device).name).settled()
    examples = Data(data, True).numbers_for(base.graph())
    paths = [*(source.path for source in base.plan.inputs), *(step.path for step in base.plan.steps)]
    for pattern in keep:
        if not any(Part(path, of_weights).named_by(pattern) for path in paths for of_weights in (True, False)):
            raise ValueError(f"keep names {pattern!r}, which matches no layer; there are {', '.join(paths[:20])}")
    assignments = Assignments(base, Observer(base, examples).seen(), weight_bits, activation_bits, keep)
    assignments.require_possible()
    clock = Clock("plan", sum(len(options) - 1 for options in assignments.options.values()) + candidates, progress)
    evaluator = Evaluations(base, examples, metric, executor)
    return _Planning(assignments, evaluator, examples.examples, higher_is_better, asked, candidates, clock).run()


@dataclass(eq=False)
class _Tried:
    """A plan that was evaluated. What takes a process of its own is measured on demand.

    price: relative to that of eight bits. why_not: why it has no arena.
    """

    bits: Bits
    candidate: Candidate
    graph: Graph
    mark: Mark
    price: float
    point: PlanPoint
    why_not: str = ""


class _Planning:
    def __init__(
        self,
        assignments: Assignments,
        evaluator: Evaluations,
        examples: int,
        higher: bool,
        budgets: Budgets,
        candidates: int,
        clock: Clock,
    ) -> None:
        self.assignments, self.evaluator, self.examples, self.higher = assignments, evaluator, examples, higher
        self.budgets, self.left, self.clock = budgets, candidates, clock
        self.evaluations, self.device = 0, assignments.base.device
        self.float_metric = evaluator.float_metric
        self.plans: dict[tuple[int, ...], _Tried | None] = {}
        self.harm: dict[tuple[Part, int], float] = {}

    def run(self) -> PrecisionPlan:
        assignments = self.assignments
        eight, self.start = assignments.nearest(), assignments.finest()
        self.costs = Costs(assignments, assignments.candidate(eight).graph(), self.device)
        # Prices are relative to those of the network in eight bits. Without a budget for multiply-adds, fewer bits make
        # them no cheaper: these devices compute them in eight.
        self.fewest = FEW if self.budgets.multiply_adds is None else 2
        self.unit_prices = self.costs.all(eight, self.fewest)
        plain = self._evaluate(eight, counted=False)
        if plain is None:
            assignments.candidate(eight)  # says why it does not fit
        assert plain is not None
        # What the arena holds besides tensors.
        self.overhead = 0.0
        if self.budgets.arena is not None:
            self._measure(plain)
            if plain.point.arena is None:
                raise ValueError(f"the arena of this network cannot be measured: {plain.why_not}")
            self.overhead = max(plain.point.arena - float(self.costs.arena(eight).max(initial=0)), 0.0)
        finest = self._evaluate(self.start, counted=False)
        if finest is None:
            assignments.left_out["16 bits in all layers at once"] = "their ranges do not fit one another"
            finest, self.start = plain, eight
        self._sensitivities(_power(finest.mark.decibels))
        self._along()
        chosen, missed = self._choose()
        return self._finished(chosen if missed else self._refined(chosen), missed)

    # --- what each layer loses ----------------------------------------------------------------------------------------

    def _sensitivities(self, quiet: float) -> None:
        """The noise that fewer bits in one part alone add to the finest plan's outputs, beyond its own."""
        options, start = self.assignments.options, self.start
        tasks = [(part, bits) for part in options for bits in options[part] if bits < start[part]]
        marks = self._marks([self.assignments.attempt({**start, part: bits}) for part, bits in tasks])
        self.least = 1e-3 * quiet + 1e-12
        for (part, bits), mark in zip(tasks, marks, strict=True):
            loss = math.inf if mark is None else max(_power(mark.decibels) - quiet, 0.0)
            # Fewer bits never lose less.
            self.harm[part, bits] = max(loss, *(self.harm.get((part, more), 0.0) for more in options[part]))

    def _loss(self, part: Part, bits: int) -> float:
        return self.harm.get((part, bits), 0.0)

    # --- ways down ----------------------------------------------------------------------------------------------------

    def _along(self) -> None:
        """Evaluates plans with the same bits everywhere, and some on the ways from the finest to the coarsest."""
        for bits in self._uniform():
            self._evaluate(bits)
        for aim in AIMS if self.budgets.of_resources else ():
            (*_, last) = self._down(functools.partial(self._beyond, aim=aim))
            self._evaluate(last)
        # What a way down may save: all resources, and each alone.
        names = [name for name in self.unit_prices if name in self.budgets.of_resources] or list(self.unit_prices)
        saved = [names, *([name] for name in names if len(names) > 1)]
        ways = [list(self._down(functools.partial(self._price, names=several))) for several in saved]
        for way in ways if self.budgets.max_drop is not None else ():
            self._bisect(way)
        for way in ways:
            for bits in [*way[:: max(1, (len(way) - 1) // LOOKED_AT)], way[-1]]:
                self._evaluate(bits)

    def _uniform(self) -> Iterator[Bits]:
        """The same bits everywhere, as far as layers can have them; plans with the finest results first."""
        options = self.assignments.options
        results, weights = (
            sorted({bits for part in options if part.weights == kind for bits in options[part]}, reverse=True)
            for kind in (False, True)
        )
        for of_results, of_weights in itertools.product(results, weights):
            yield self.assignments.nearest(of_weights, of_results)

    def _price(self, bits: Bits, names: Collection[str]) -> float:
        costs = self.costs.all(bits, self.fewest)
        price = sum(costs[name] / self.unit_prices[name] for name in names if self.unit_prices[name])
        # Memory is what is held at the peak. What is held at other times breaks ties.
        return price + (
            1e-3 * float(self.costs.arena(bits).mean()) / self.unit_prices["arena"] if "arena" in names else 0.0
        )

    def _beyond(self, bits: Bits, aim: float) -> float:
        """How far a plan exceeds the budgets, by the estimates; for memory, summed over all moments."""
        costs, beyond = self.costs.all(bits), 0.0
        for name, limit in self.budgets.of_resources.items():
            held = self.costs.arena(bits) + self.overhead if name == "arena" else costs[name]
            beyond += float(np.maximum(held / (aim * limit) - 1, 0).sum())
        return beyond

    def _down(self, price: Callable[[Bits], float]) -> Iterator[Bits]:
        """From the finest plan, removes bits move by move: always the move that saves most for what it loses. Ends when
        the price is 0 or nothing is left to save."""
        bits = dict(self.start)
        yield dict(bits)
        now = price(bits)
        while now > 0:
            best: tuple[float, Bits, float] | None = None
            for move in self._moves(bits):
                lost = sum(self._loss(part, move[part]) - self._loss(part, bits[part]) for part in move)
                cost = price({**bits, **move})
                if cost < now and math.isfinite(lost):
                    worth = (now - cost) / (lost + self.least)
                    if best is None or worth > best[0]:
                        best = worth, move, cost
            if best is None:
                return
            bits.update(best[1])
            now = best[2]
            yield dict(bits)

    def _moves(self, bits: Bits) -> Iterator[Bits]:
        """The next fewer bits for one part, or for a layer's weights and its result together: in 16 bits no runtime has
        four-bit weights."""
        for part in self.assignments.options:
            lower = self._next(part, bits[part])
            if lower is None:
                continue
            yield {part: lower}
            result = self.assignments.part_of(part.layer) if part.weights else None
            below = None if result is None else self._next(result, bits[result])
            if result is not None and below is not None and bits[result] > FEW:
                yield {part: lower, result: below}

    def _next(self, part: Part, bits: int, steps: int = 1) -> int | None:
        """The bits that a part may have so many steps further down; negative ones are up."""
        options = self.assignments.options[part]
        at = options.index(bits) + steps
        return options[at] if 0 <= at < len(options) else None

    def _bisect(self, way: Sequence[Bits]) -> None:
        """Looks for the last plan on a way whose metric is good enough."""
        low, high = 0, len(way) - 1
        while low < high:
            middle = (low + high + 1) // 2
            tried = self._evaluate(way[middle])
            if tried is not None and "drop" not in self.budgets.excess({}, self._drop(tried)):
                low = middle
            else:
                high = middle - 1

    # --- the choice ---------------------------------------------------------------------------------------------------

    def _drop(self, tried: _Tried) -> float:
        return (self.float_metric - tried.point.metric) * (1 if self.higher else -1)

    def _excess(self, tried: _Tried, measure: bool = True) -> dict[str, float]:
        """By how much a plan exceeds the budgets. measure: False: by the estimates of what was not measured yet."""
        if measure and self.budgets.arena is not None:
            self._measure(tried)
        costs = tried.point.costs
        if costs["arena"] is None and not measure and not tried.why_not:
            costs["arena"] = round(float(self.costs.arena(tried.bits).max(initial=0)) + self.overhead)
        return self.budgets.excess(costs, self._drop(tried))

    def _better(self, one: _Tried, other: _Tried) -> bool:
        """Whether a plan within the budgets is better: more accurate, or as good and smaller; if only the metric has a
        budget, smaller."""
        if self.budgets.of_resources:
            first, second = one.point.metric, other.point.metric
            if abs(first - second) > one.mark.chance(other.mark):
                return (first > second) == self.higher
            if abs(one.mark.decibels - other.mark.decibels) > AS_GOOD:
                return one.mark.decibels > other.mark.decibels
        return one.price < other.price

    def _choose(self) -> tuple[_Tried, dict[str, float]]:
        """The best plan within the budgets, or the nearest to them and what it misses."""
        left = self._known()
        while fits := [tried for tried in left if not self._excess(tried, measure=False)]:
            best = fits[0]
            for tried in fits[1:]:
                if self._better(tried, best):
                    best = tried
            if not self._excess(best):
                return best, {}
            left.remove(best)
        nearest = sorted(self._known(), key=functools.partial(self._far, measure=False))[:MEASURED]
        # An estimate may have been too high.
        fitting = (tried for tried in nearest if not self._excess(tried))
        best = next(fitting, None) or min(nearest, key=self._far)
        return best, self._excess(best)

    def _far(self, tried: _Tried, measure: bool = True) -> float:
        limits = {**self.budgets.of_resources, "drop": abs(self.float_metric) or 1.0}
        return sum(by / limits[name] for name, by in self._excess(tried, measure).items())

    def _refined(self, chosen: _Tried) -> _Tried:
        """Tries other bits for one part after another on the device: more if the budgets leave room, fewer if the
        smallest plan is wanted."""
        better: _Tried | None = chosen
        while better is not None and self.left > 0:
            chosen, better = better, None
            for bits in self._neighbours(chosen):
                tried = self._evaluate(bits)
                if tried is not None and self._better(tried, chosen) and not self._excess(tried):
                    better = tried
                if better is not None or self.left <= 0:
                    break
        return better or chosen

    def _neighbours(self, chosen: _Tried) -> list[Bits]:
        """Plans that differ in one part, the most promising first."""
        larger = bool(self.budgets.of_resources)
        neighbours: list[tuple[float, Bits]] = []
        for part in self.assignments.options:
            now = chosen.bits[part]
            other = self._next(part, now, -1 if larger else 1)
            if other is None or other > self.start[part]:
                continue
            bits = {**chosen.bits, part: other}
            if self._key(bits) in self.plans or (larger and self._beyond(bits, 1.02) > 0):
                continue
            if larger or self._price(bits, list(self.unit_prices)) < chosen.price:
                neighbours.append((self._loss(part, other) - self._loss(part, now), bits))
        return [bits for _, bits in sorted(neighbours, key=lambda pair: pair[0])]

    # --- evaluations --------------------------------------------------------------------------------------------------

    def _known(self) -> list[_Tried]:
        return [tried for tried in self.plans.values() if tried is not None]

    def _key(self, bits: Bits) -> tuple[int, ...]:
        return tuple(bits[part] for part in self.assignments.options)

    def _evaluate(self, bits: Bits, counted: bool = True) -> _Tried | None:
        """Evaluates a plan. None: the device has no such network, or no evaluations are left of those counted."""
        key = self._key(bits)
        if key in self.plans or (counted and self.left <= 0):
            return self.plans.get(key)
        self.left -= counted
        candidate, self.plans[key] = self.assignments.attempt(bits), None
        (mark,) = self._marks([candidate])
        if candidate is None or mark is None or mark.metric is None:
            return None
        graph = packed(candidate.graph(), self.device)
        counts = Counter((row.weight_bits, row.bits) for row in candidate.plan.rows() if row.weight_bits is not None)
        several = sorted(counts.items(), reverse=True)
        layers = ", ".join(f"{count} W{weights}A{result}" for (weights, result), count in several)
        flash, work, rules = len(tflite_bytes(graph)), multiply_adds(candidate), self.assignments.rules(bits)
        point = PlanPoint(mark.metric, mark.decibels, flash, None, work, layers, rules)
        tried = _Tried(bits, candidate, graph, mark, self._price(bits, list(self.unit_prices)), point)
        self.plans[key] = tried
        return tried

    def _marks(self, candidates: Sequence[Candidate | None]) -> list[Mark | None]:
        """How good each network is; None: the device has no such network."""
        marks = self.evaluator.marks(candidates)
        self.evaluations += sum(mark is not None for mark in marks)
        self.clock.did(len(candidates))
        return marks

    def _measure(self, tried: _Tried) -> None:
        """Measures the arena. A plan that TFLite-Micro cannot run has none."""
        if tried.point.arena is None and not tried.why_not:
            arena, tried.why_not = arena_of(tflite_bytes(tried.graph))
            tried.point = replace(tried.point, arena=arena)

    # --- the result ---------------------------------------------------------------------------------------------------

    def _finished(self, chosen: _Tried, missed: dict[str, float]) -> PrecisionPlan:
        plans, even = self._known(), None
        if self.budgets.of_resources:
            uniform = (self.plans.get(self._key(bits)) for bits in self._uniform())
            even = next((tried for tried in uniform if tried is not None and not self._excess(tried)), None)
        if importlib.util.find_spec("tflite_micro") is not None:
            front = front_of(tuple(tried.point for tried in plans), self.higher)
            shown = [tried for tried in plans if tried.point in front]
            for tried in [chosen, *shown[:: max(1, -(-len(shown) // MEASURED))]]:
                self._measure(tried)
        points = tuple(tried.point for tried in plans)
        return PrecisionPlan(
            self.device,
            self.examples,
            self.float_metric,
            self.budgets,
            chosen.point,
            missed,
            points,
            front_of(points, self.higher),
            None if even is None else even.point,
            chosen.graph,
            chosen.candidate,
            self.assignments.left_out,
            self.evaluations,
            self.higher,
        )


def _power(noise: float) -> float:
    """The power of noise relative to a signal of 1, from decibels."""
    return 10.0 ** (-noise / 10)
