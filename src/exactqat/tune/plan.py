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
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..deploy.footprint import DEFAULT_ACCELERATOR, MICRO, arena_of, npu_footprint
from ..deploy.formats.tflite import tflite_bytes
from ..deploy.graph import Graph
from ..deploy.packing import packed
from ..kit.device import Profile, profile_named
from ..kit.progress import Clock, Progress
from .assignment import FEW, Assignments, Bits, Unit, multiply_adds
from .budgets import Budgets
from .costs import Costs
from .evaluations import Evaluations, Task, require_executor
from .metrics import Data, Mark, Metric, accuracy, score
from .network import Candidate
from .observing import Observer
from .planned import PlanPoint, PrecisionPlan, front_of
from .search import fine_outputs

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
    network: Any,
    data: Any,
    metric: Metric = accuracy,
    *,
    max_drop: float | str | None = None,
    flash: int | str | None = None,
    arena: int | str | None = None,
    multiply_adds: int | str | None = None,
    cycles: int | str | None = None,
    accelerator: str = DEFAULT_ACCELERATOR,
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
    arena is measured with TFLite-Micro. With a budget for flash, arena, multiply-adds or cycles the result is the most
    accurate plan within them; with `max_drop` alone, the smallest. The result is deterministic.

    Args:
        network: a prepared and calibrated, trained or frozen model (for JAX ``(prepared, params, state)``). It is not
            changed. Its rules decide everything but the bits.
        data: ``(inputs, targets)`` to base decisions on, such as the validation set; or a loader of such pairs.
        metric, higher_is_better: see `sensitivity`.
        max_drop: the most by which the metric may be worse than the float network's, in its own unit (0.005) or in
            percentage points ("0.5%"). It applies to post-training quantization; training recovers more.
        flash, arena: bytes, such as 262144 or "256k".
        multiply_adds: for one example, in units of 8 by 8 bits: 16 by 8 count as two, 4 by 8 as a half.
        cycles: on an Ethos-U, as estimated by Vela; `accelerator`: which one, from `deploy.footprint.ACCELERATORS`.
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
        ValueError: a budget is missing or in another unit, no device has such bits, or the network's arena or cycles
            cannot be measured.
        TypeError: the network is not prepared.
        MissingData: it is not calibrated.
        ImportError: the arena or cycles have a budget and the tool that measures them is not installed.
    """
    asked = Budgets.of(max_drop=max_drop, flash=flash, arena=arena, multiply_adds=multiply_adds, cycles=cycles)
    if activation_bits is None:
        activation_bits = ACTIVATIONS if asked.multiply_adds is None else (4, *ACTIVATIONS)
    _check("weight_bits", weight_bits, KNOWN_WEIGHTS, "2 to 8, as no file holds weights of more")
    _check("activation_bits", activation_bits, KNOWN_ACTIVATIONS, "2 to 8, or 16")
    if isinstance(candidates, bool) or not isinstance(candidates, int) or candidates < 1:
        raise ValueError(f"candidates must be a number of plans, 1 or more, got {candidates!r}")
    if asked.cycles is not None and importlib.util.find_spec("ethosu") is None:
        raise ImportError("a budget of cycles needs Vela: pip install 'exactqat[npu]'")
    if asked.arena is not None and importlib.util.find_spec("tflite_micro") is None:
        raise ImportError(f"a budget of arena is measured by TFLite-Micro: {MICRO}")
    if isinstance(keep, str) or not isinstance(keep, Collection):
        raise TypeError(f"keep must be a list of globs of layers, got {keep!r}")
    require_executor(executor)
    base = Candidate.of(network, None if device is None else profile_named(device).name).settled()
    given = Data(data, True).numbers_for(base.graph())
    paths = [*(each.path for each in base.plan.inputs), *(step.path for step in base.plan.steps)]
    units = [Unit(path, of_weights) for path in paths for of_weights in (True, False)]
    for pattern in keep:
        if not any(unit.named_by(pattern) for unit in units):
            raise ValueError(f"keep names {pattern!r}, which matches no layer; there are {', '.join(paths[:20])}")
    assignments = Assignments(base, Observer(base, given).seen(), weight_bits, activation_bits, keep)
    assignments.require_possible()
    clock = Clock("plan", sum(len(options) - 1 for options in assignments.units.values()) + candidates, progress)
    planning = _Planning(assignments, given, metric, higher_is_better, asked, accelerator, candidates, executor, clock)
    try:
        return planning.run()
    finally:
        planning.evaluator.close()


def _check(name: str, bits: Sequence[int], allowed: Collection[int], words: str) -> None:
    several = isinstance(bits, Sequence) and not isinstance(bits, str)
    if not several or not bits or any(isinstance(each, bool) or each not in allowed for each in bits):
        raise ValueError(f"{name} must be bits from {words}, got {bits!r}")


@dataclass
class _Plan:
    """A plan that was evaluated. What takes a process of its own is measured on demand."""

    bits: dict[Unit, int]
    candidate: Candidate
    graph: Graph
    content: bytes
    mark: Mark
    work: float
    price: float
    arena: int | None = None
    why_not: str = ""
    cycles: int | None = None


class _Planning:
    def __init__(
        self,
        assignments: Assignments,
        data: Data,
        metric: Metric,
        higher: bool,
        budgets: Budgets,
        accelerator: str,
        candidates: int,
        executor: Executor | None,
        clock: Clock,
    ) -> None:
        self.assignments, self.data, self.metric, self.higher = assignments, data, metric, higher
        self.budgets, self.accelerator, self.left = budgets, accelerator, candidates
        self.clock, self.evaluations, self.device = clock, 0, assignments.base.device
        self.reference = fine_outputs(assignments.base, data)
        self.evaluator = Evaluations(Task(self.device, data, metric, self.reference), executor)
        self.float_metric = score(metric, self.reference, data.targets)
        self.plans: dict[tuple[int, ...], _Plan | None] = {}
        self.harm: dict[tuple[Unit, int], float] = {}

    def run(self) -> PrecisionPlan:
        assignments = self.assignments
        eight = assignments.coarsest_of_eight()
        self.costs = Costs(assignments, assignments.candidate(eight).graph(), self.device)
        start = assignments.finest()
        # Prices are relative to those of the network in eight bits. Without a budget for multiply-adds, fewer bits make
        # them no cheaper: these devices compute them in eight.
        self.fewest = FEW if self.budgets.multiply_adds is None else 2
        self.unit_prices = self.costs.all(eight, self.fewest)
        plain = self._evaluated(eight)
        if plain is None:
            assignments.candidate(eight).graph()  # says why it does not fit
        assert plain is not None
        self.overhead = self._measured_at_first(plain, eight)
        if self._evaluated(start) is None:
            assignments.left_out["16 bits in all layers at once"] = "their ranges do not fit one another"
            start = eight
        self._sensitivities(start)
        self._along(start)
        chosen, missed = self._choose()
        if not missed:
            chosen = self._refined(chosen)
        return self._finished(chosen, missed)

    # --- what each layer loses ----------------------------------------------------------------------------------------

    def _sensitivities(self, start: Bits) -> None:
        """The noise that fewer bits in one unit alone add to the finest plan's outputs."""
        self.start = dict(start)
        tasks = [
            (unit, bits) for unit, options in self.assignments.units.items() for bits in options if bits < start[unit]
        ]
        marks = self._marks([{**start, unit: bits} for unit, bits in tasks])
        quiet = _noise(self._evaluated(start))
        self.least = 1e-3 * quiet + 1e-12
        for (unit, bits), found in zip(tasks, marks, strict=True):
            loss = math.inf if found is None else max(_power(found.decibels) - quiet, 0.0)
            # Fewer bits never lose less.
            above = [self.harm[unit, more] for more in self.assignments.units[unit] if (unit, more) in self.harm]
            self.harm[unit, bits] = max([loss, *above])

    def _loss(self, unit: Unit, bits: int) -> float:
        return self.harm.get((unit, bits), 0.0)

    # --- ways down ----------------------------------------------------------------------------------------------------

    def _along(self, start: Bits) -> None:
        """Evaluates plans with the same bits everywhere, and some on the ways from the finest to the coarsest."""
        for bits in self._uniform():
            self._evaluate(bits)
        for aim in AIMS if self.budgets.of_resources else ():
            way = list(self._down(start, functools.partial(self._beyond, aim=aim)))
            self._evaluate(way[-1])
        ways = [list(self._down(start, price)) for price in self._prices()]
        if self.budgets.max_drop is not None:
            for way in ways:
                self._bisect(way)
        for way in ways:
            step = max(1, (len(way) - 1) // LOOKED_AT)
            for bits in [*way[::step], way[-1]]:
                self._evaluate(bits)

    def _uniform(self) -> Iterator[dict[Unit, int]]:
        """The same bits everywhere, as far as layers can have them; plans with the finest results first."""
        units = self.assignments.units
        for result, weights in itertools.product(
            *(
                sorted(
                    {bits for unit, options in units.items() if unit.weights == kind for bits in options}, reverse=True
                )
                for kind in (False, True)
            )
        ):
            wanted = {unit: weights if unit.weights else result for unit in units}
            yield {unit: min(options, key=lambda bits: abs(bits - wanted[unit])) for unit, options in units.items()}  # noqa: B023

    def _prices(self) -> list[Callable[[Bits], float]]:
        """What a way down may save: each resource alone, then all of them."""
        names = [name for name in self.unit_prices if name in self.budgets.of_resources] or list(self.unit_prices)
        single: list[Callable[[Bits], float]] = [functools.partial(self._price, names=[name]) for name in names]
        return [lambda bits: self._price(bits, names), *(single if len(names) > 1 else [])]

    def _price(self, bits: Bits, names: Collection[str]) -> float:
        costs = self.costs.all(bits, self.fewest)
        # Memory is what is held at the peak. What is held at other times breaks ties.
        return sum(costs[name] / self.unit_prices[name] for name in names if self.unit_prices[name]) + (
            1e-3 * float(self.costs.arena(bits).mean()) / self.unit_prices["arena"] if "arena" in names else 0.0
        )

    def _beyond(self, bits: Bits, aim: float) -> float:
        """How far a plan exceeds the budgets, by the estimates; for memory, summed over all moments."""
        costs, limits, found = self.costs.all(bits), self.budgets.of_resources, 0.0
        for name, limit in limits.items():
            if name == "arena":
                held = self.costs.arena(bits) + self.overhead["arena"]
                found += float(np.maximum(held / (aim * limit) - 1, 0).sum())
                continue
            cost = costs["multiply_adds"] * self.overhead["cycles"] if name == "cycles" else costs[name]
            found += max(cost / (aim * limit) - 1, 0.0)
        return found

    def _down(self, start: Bits, price: Callable[[Bits], float]) -> Iterator[dict[Unit, int]]:
        """Removes bits move by move: always the move that saves most for what it loses. Ends when the price is 0 or
        nothing is left to save."""
        bits = dict(start)
        yield dict(bits)
        now = price(bits)
        while now > 0:
            best: tuple[float, dict[Unit, int], float] | None = None
            for move in self._moves(bits):
                changed = {**bits, **move}
                lost = sum(self._loss(unit, move[unit]) - self._loss(unit, bits[unit]) for unit in move)
                cost = price(changed)
                if cost < now and math.isfinite(lost):
                    worth = (now - cost) / (lost + self.least)
                    if best is None or worth > best[0]:
                        best = worth, move, cost
            if best is None:
                return
            bits.update(best[1])
            now = best[2]
            yield dict(bits)

    def _moves(self, bits: Bits) -> Iterator[dict[Unit, int]]:
        """The next fewer bits for one unit, or for a layer's weights and its result together: in 16 bits no runtime has
        four-bit weights."""
        for unit in self.assignments.units:
            lower = self._next(unit, bits[unit])
            if lower is None:
                continue
            yield {unit: lower}
            result = self.assignments.unit_of(unit.layer) if unit.weights else None
            below = None if result is None else self._next(result, bits[result])
            if result is not None and below is not None and bits[result] > FEW:
                yield {unit: lower, result: below}

    def _next(self, unit: Unit, bits: int) -> int | None:
        options = self.assignments.units[unit]
        at = options.index(bits) + 1
        return options[at] if at < len(options) else None

    def _bisect(self, way: Sequence[Bits]) -> None:
        """Looks for the last plan on a way whose metric is good enough."""
        low, high = 0, len(way) - 1
        while low < high:
            middle = (low + high + 1) // 2
            found = self._evaluate(way[middle])
            if found is not None and not self._drops(found):
                low = middle
            else:
                high = middle - 1

    # --- the choice ---------------------------------------------------------------------------------------------------

    def _drop(self, found: _Plan) -> float:
        assert found.mark.metric is not None
        return (self.float_metric - found.mark.metric) * (1 if self.higher else -1)

    def _drops(self, found: _Plan) -> bool:
        return "drop" in self.budgets.excess({}, self._drop(found))

    def _excess(self, found: _Plan, measure: bool = True) -> dict[str, float]:
        if measure:
            self._measure(found)
        arena = found.arena
        if arena is None and not measure and not found.why_not:
            arena = round(float(self.costs.arena(found.bits).max(initial=0)) + self.overhead["arena"])
        cycles = found.cycles
        if cycles is None and not measure:
            cycles = round(found.work * self.overhead["cycles"])
        costs = {"flash": len(found.content), "multiply_adds": found.work, "arena": arena, "cycles": cycles}
        return self.budgets.excess(costs, self._drop(found))

    def _better(self, one: _Plan, other: _Plan) -> bool:
        """Whether a plan within the budgets is better: more accurate, or as good and smaller; if only the metric has a
        budget, smaller."""
        if self.budgets.of_resources:
            first, second = one.mark.metric or 0.0, other.mark.metric or 0.0
            if abs(first - second) > one.mark.chance(other.mark):
                return (first > second) == self.higher
            if abs(one.mark.decibels - other.mark.decibels) > AS_GOOD:
                return one.mark.decibels > other.mark.decibels
        return one.price < other.price

    def _choose(self) -> tuple[_Plan, dict[str, float]]:
        """The best plan within the budgets, or the nearest to them and what it misses."""
        left = [found for found in self.plans.values() if found is not None]
        while True:
            fits = [found for found in left if not self._excess(found, measure=False)]
            if not fits:
                break
            best = fits[0]
            for each in fits[1:]:
                if self._better(each, best):
                    best = each
            if not self._excess(best):
                return best, {}
            left = [found for found in left if found is not best]
        everything = [found for found in self.plans.values() if found is not None]
        nearest = sorted(everything, key=lambda found: self._far(found, measure=False))[:MEASURED]
        for found in nearest:
            # An estimate may have been too high.
            if not self._excess(found):
                return found, {}
        best = min(nearest, key=self._far)
        return best, self._excess(best)

    def _far(self, found: _Plan, measure: bool = True) -> float:
        limits = {**self.budgets.of_resources, "drop": abs(self.float_metric) or 1.0}
        return sum(by / limits[name] for name, by in self._excess(found, measure).items())

    def _refined(self, chosen: _Plan) -> _Plan:
        """Tries other bits for one unit after another on the device: more if the budgets leave room, fewer if the
        smallest plan is wanted."""
        larger = bool(self.budgets.of_resources)
        tried = True
        while tried and self.left > 0:
            tried = False
            for bits in self._neighbours(chosen, larger):
                found = self._evaluate(bits)
                if found is not None and self._better(found, chosen) and not self._excess(found):
                    chosen, tried = found, True
                    break
                if self.left <= 0:
                    break
        return chosen

    def _neighbours(self, chosen: _Plan, larger: bool) -> list[dict[Unit, int]]:
        """Plans that differ in one unit, the most promising first."""
        found = []
        for unit, options in self.assignments.units.items():
            at = options.index(chosen.bits[unit]) + (-1 if larger else 1)
            if not 0 <= at < len(options) or options[at] > self.start[unit]:
                continue
            bits = {**chosen.bits, unit: options[at]}
            key = self._key(bits)
            if key in self.plans or (larger and self._beyond(bits, 1.02) > 0):
                continue
            change = self._loss(unit, chosen.bits[unit]) - self._loss(unit, options[at])
            if larger or self._price(bits, list(self.unit_prices)) < chosen.price:
                found.append((-change, bits))
        return [bits for _, bits in sorted(found, key=lambda each: each[0])]

    # --- evaluations --------------------------------------------------------------------------------------------------

    def _key(self, bits: Bits) -> tuple[int, ...]:
        return tuple(bits[unit] for unit in self.assignments.units)

    def _evaluate(self, bits: Bits) -> _Plan | None:
        """Evaluates a plan on the way, if any evaluations are left."""
        key = self._key(bits)
        if key not in self.plans:
            if self.left <= 0:
                return None
            self.left -= 1
        return self._evaluated(bits)

    def _evaluated(self, bits: Bits) -> _Plan | None:
        key = self._key(bits)
        if key not in self.plans:
            (found,) = self._marks([bits])
            self.plans[key] = None if found is None else self._whole(bits, found)
        return self.plans[key]

    def _whole(self, bits: Bits, found: Mark) -> _Plan:
        candidate = self.assignments.candidate(bits)
        graph = packed(candidate.graph(), self.device)
        price = self._price(bits, list(self.unit_prices))
        return _Plan(dict(bits), candidate, graph, tflite_bytes(graph), found, multiply_adds(candidate), price)

    def _marks(self, wanted: Sequence[Bits]) -> list[Mark | None]:
        """How good each plan is; None: the device has no such network."""
        graphs: list[Graph | None] = []
        for bits in wanted:
            try:
                graphs.append(self.assignments.candidate(bits).graph())
            except ValueError:
                graphs.append(None)
        marks = self.evaluator.marks([graph for graph in graphs if graph is not None])
        found: list[Mark | None] = []
        for graph in graphs:
            found.append(None if graph is None else next(marks))
            self.evaluations += graph is not None
            self.clock.did(1)
        return found

    def _measured_at_first(self, plain: _Plan, eight: Bits) -> dict[str, float]:
        """What measuring adds to the estimates: what the arena holds besides tensors, and cycles per multiply-add.

        Raises:
            ValueError: the network cannot be measured.
        """
        self._measure(plain)
        found = {"arena": 0.0, "cycles": 0.0}
        if self.budgets.arena is not None:
            if plain.arena is None:
                raise ValueError(f"the arena of this network cannot be measured: {plain.why_not}")
            found["arena"] = max(plain.arena - float(self.costs.arena(eight).max(initial=0)), 0.0)
        if plain.cycles is not None:
            found["cycles"] = plain.cycles / max(self.costs.multiply_adds(eight), 1.0)
        return found

    def _measure(self, found: _Plan) -> None:
        """Measures what has a budget. A plan that TFLite-Micro cannot run has no arena."""
        if self.budgets.arena is not None and found.arena is None and not found.why_not:
            found.arena, found.why_not = arena_of(found.content)
        if self.budgets.cycles is not None and found.cycles is None:
            # Vela takes no four-bit weights.
            found.cycles = npu_footprint(found.candidate.graph(), self.accelerator).cycles

    # --- the result ---------------------------------------------------------------------------------------------------

    def _even(self) -> _Plan | None:
        """The plan with the finest results among those with the same bits everywhere and within the budgets; none if
        the smallest plan is wanted."""
        if not self.budgets.of_resources:
            return None
        known = (self.plans.get(self._key(bits)) for bits in self._uniform())
        return next((found for found in known if found is not None and not self._excess(found)), None)

    def _finished(self, chosen: _Plan, missed: dict[str, float]) -> PrecisionPlan:
        plans = [found for found in self.plans.values() if found is not None]
        even = self._even()
        if importlib.util.find_spec("tflite_micro") is not None:
            front = front_of(tuple(self._point(found) for found in plans), self.higher)
            shown = [found for found in plans if self._point(found) in front]
            for found in [chosen, *shown[:: max(1, -(-len(shown) // MEASURED))]]:
                if found.arena is None and not found.why_not:
                    found.arena, found.why_not = arena_of(found.content)
        points = {id(found): self._point(found) for found in plans}
        front = front_of(tuple(points.values()), self.higher)
        return PrecisionPlan(
            self.device,
            self.data.examples,
            self.float_metric,
            self.budgets,
            points[id(chosen)],
            missed,
            tuple(points.values()),
            front,
            None if even is None else points[id(even)],
            chosen.graph,
            chosen.candidate,
            self.assignments.left_out,
            self.evaluations,
            self.higher,
        )

    def _point(self, found: _Plan) -> PlanPoint:
        assert found.mark.metric is not None
        return PlanPoint(
            found.mark.metric,
            found.mark.decibels,
            len(found.content),
            found.arena,
            found.work,
            found.cycles,
            _layers(found.candidate),
            self.assignments.rules(found.bits),
        )


def _power(noise: float) -> float:
    """The power of noise relative to a signal of 1, from decibels."""
    return 10.0 ** (-noise / 10)


def _noise(found: _Plan | None) -> float:
    return 0.0 if found is None else _power(found.mark.decibels)


def _layers(candidate: Candidate) -> str:
    """How many layers with weights have which bits."""
    counts = Counter((row.weight_bits, row.bits) for row in candidate.plan.rows() if row.weight_bits is not None)
    return ", ".join(
        f"{count} W{weights}A{result}" for (weights, result), count in sorted(counts.items(), reverse=True)
    )


__all__ = ["plan"]
