# SPDX-License-Identifier: Apache-2.0
"""Post-training quantization by search: cheap methods first, each kept only if the device's integers say so."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..deploy.graph import Graph
from ..kit.device import Profile, profile_named
from ..kit.display import Finding
from ..kit.progress import Clock, Progress
from .correction import corrections
from .equalization import STRENGTHS, Scaled, equalizations, groups, smoothings
from .evaluations import Evaluations
from .metrics import Data, Mark, Metric, accuracy
from .network import Candidate, Ends
from .proposal import Proposal, proposed
from .ranges import WAYS, chosen, open_grids, ranges_of_all
from .rounding import rounded
from .variants import Observer

# What a method tries: networks, each with what was done in words, and what is observed of it where that changes.
Method = Callable[[Candidate, Observer], Sequence[tuple[str, Candidate] | Scaled]]
# By name, in the order in which they are tried: their title, and what they try. What remains of the budget is for the
# last one.
METHODS: dict[str, tuple[str, Method | None]] = {
    "ranges": ("ranges", ranges_of_all),
    "equalization": ("equalization", equalizations),
    "smoothing": ("smoothing", smoothings),
    "batch_norm": ("batch norms", functools.partial(corrections, with_scale=True)),
    "rounding": ("rounding of weights", rounded),
    "bias": ("biases", functools.partial(corrections, with_scale=False)),
    "layer_ranges": ("ranges of each layer", None),
}
# Those that go through the network once, each with how many times as long as it takes to observe it.
PASSES = {"batch_norm": 1.0, "rounding": 3.0, "bias": 1.0}
# Likewise, what the proposal takes.
PROPOSAL = 4.0
# How many networks the others try at most.
TRIED = {"ranges": len(WAYS), "equalization": len(WAYS), "smoothing": len(WAYS) * len(STRENGTHS)}


@dataclass(frozen=True)
class Trial:
    """One method that was tried.

    Attributes:
        name: of the method.
        what: what was chosen, in words.
        fitted: on the examples used for the choice; held_out: on the others.
        kept: whether it is part of the result.
        evaluations: how many networks were evaluated for it.
    """

    name: str
    what: str
    fitted: Mark
    held_out: Mark
    kept: bool
    evaluations: int


@dataclass(frozen=True, repr=False)
class Search(Finding):
    """What `search` found.

    Attributes:
        device: whose integers.
        trials: in order; the first is the network as it was given.
        graph: the best network, to be written, simulated and verified.
        candidate: its numbers, as `sensitivity` and a further `search` take them.
        reference: the metric of the float network (in 16 bits) on the held-out examples.
        fitted, held_out: how many examples.
        evaluations: of networks, in all.
        proposal: more bits for some results, if their bits alone cost accuracy. It needs other rules: prepare the
            network with them, and search or train.
    """

    device: str
    trials: tuple[Trial, ...]
    graph: Graph
    candidate: Candidate
    reference: float
    fitted: int
    held_out: int
    evaluations: int
    proposal: Proposal | None = None

    @property
    def before(self) -> Mark:
        """The network as it was given, on the held-out examples."""
        return self.trials[0].held_out

    @property
    def after(self) -> Mark:
        """The best network, on the held-out examples."""
        return next(trial for trial in reversed(self.trials) if trial.kept).held_out

    @property
    def ranges(self) -> Mapping[str, Ends]:
        """(min, max) of every grid of the best network."""
        return self.candidate.settled().ranges

    def apply(self, network: object) -> Any:
        """Gives the original model the result's weights, biases and ranges, to train on or freeze.

        Args:
            network: the model, not frozen; for JAX ``(prepared, params, state)``.

        Returns:
            For JAX the new ``(params, state)``; otherwise the model, which is changed in place.

        Raises:
            ValueError: the model is frozen, or the result cannot be expressed in its own parameters: then `graph` is
                its only form.
        """
        return self.candidate.given_to(network)

    def as_json(self) -> str:
        """What was tried."""
        proposal = None if self.proposal is None else self.proposal.as_json()
        trials = [asdict(trial) for trial in self.trials]
        return json.dumps({"device": self.device, "trials": trials, "proposal": proposal}, indent=2)

    def text(self) -> str:
        """A table of at most 80 columns of what was tried and what each trial gained."""
        chance = self.before.chance(self.after)
        lines = [
            f"{self._gain()}, {self.reference:.4g} in float" + (f" (chance: {chance:.2g})" if chance else ""),
            f"({self.held_out:,} examples held out of {self.held_out + self.fitted:,}; {self.evaluations} evaluations)",
            "",
            f"{'tried':<24}{'fitted':>9}{'held out':>10}{'dB':>7}  {'':<5}",
        ]
        for trial in self.trials:
            metrics = f"{_number(trial.fitted.metric):>9}{_number(trial.held_out.metric):>10}"
            kept = f"{'kept' if trial.kept else '-':<5}{trial.what}"
            lines.append(f"{trial.name:<24}{metrics}{trial.held_out.decibels:>7.1f}  {kept}"[:80].rstrip())
        if self.proposal is not None:
            lines += ["", self.proposal.text().rstrip()]
        return "\n".join(lines)

    def in_short(self) -> str:
        kept = sum(trial.kept for trial in self.trials[1:])
        return f"{self._gain()}, {kept} of {len(self.trials) - 1} methods kept"

    def _gain(self) -> str:
        return f"{self.device}: {_number(self.before.metric)} before, {_number(self.after.metric)} after"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def search(
    network: object,
    data: object,
    metric: Metric = accuracy,
    *,
    budget: int = 300,
    methods: Iterable[str] = tuple(METHODS),
    device: str | Profile | None = None,
    executor: Executor | None = None,
    seed: int = 0,
    held_out: float = 0.5,
    higher_is_better: bool = True,
    progress: Progress | bool | None = None,
) -> Search:
    """Finds the ranges, weights and biases that make a network most accurate on the device, without training.

    In order: ranges of all layers by one method after another (extremes, percentiles, least squares, entropy),
    cross-layer equalization, smoothing of activations into the normalization before them, batch norms re-estimated on
    the device's integers, weights rounded up or down in view of one another, biases corrected, ranges layer by layer.
    Choices are made on one part of the examples, and a choice is kept only if the other, held-out part agrees: by the
    metric, or, where that differs by no more than its standard error, by the noise of the outputs. If the given network
    is better in the end, that is the result.

    Where the bits of some results alone cost accuracy, the result has a `proposal`: rules with more bits there, and
    what they cost in flash and memory. 16 bits where the network ends, as for scores and boxes on one grid; 8 where
    results of fewer bits are averaged, as by an average pool.

    Args:
        network: a prepared and calibrated, trained or frozen model (for JAX ``(prepared, params, state)``). It is not
            changed; see the result's `graph`.
        data: ``(inputs, targets)`` that calibration may look at, or a loader of such pairs; not the test examples.
        metric, higher_is_better: see `sensitivity`.
        budget: the most evaluations of the network. What the other methods leave of it is for ranges layer by layer.
        methods: which of ``"ranges"``, ``"equalization"``, ``"smoothing"``, ``"batch_norm"``, ``"rounding"``,
            ``"bias"`` and ``"layer_ranges"`` are tried, in this order whatever theirs; by default all.
        device: whose integers; by default the one the network was prepared for.
        executor: runs independent evaluations, like any `concurrent.futures.Executor`; the answer is the same. For
            executors in other processes the metric must be picklable.
        seed: for the split into two parts.
        held_out: share of the examples that are only for judging.
        progress: see `sensitivity`.

    Raises:
        ValueError: an argument is not allowed, or there are too few examples.
        TypeError: the network is not prepared.
        MissingData: it is not calibrated.
    """
    if not isinstance(held_out, int | float) or not 0 < held_out < 1:
        raise ValueError(f"held_out must be between 0 and 1, got {held_out!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an integer of at least 0, got {seed!r}")
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise ValueError(f"budget must be a number of evaluations, 1 or more, got {budget!r}")
    wanted = [methods] if isinstance(methods, str) else list(methods)
    unknown = [name for name in wanted if name not in METHODS]
    if unknown or not wanted:
        raise ValueError(f"methods must be some of {', '.join(METHODS)}, got {unknown[0] if unknown else wanted!r}")
    start = Candidate.of(network, None if device is None else profile_named(device).name)
    examples = Data(data, True).numbers_for(start.graph())
    order = np.random.default_rng(seed).permutation(examples.examples)
    judges = round(examples.examples * held_out)
    if not 0 < judges < examples.examples:
        raise ValueError(f"data has {examples.examples} examples, too few to hold some out")
    parts = examples.only(np.sort(order[judges:])), examples.only(np.sort(order[:judges]))
    clock = Clock("search", 1, progress)
    searching = _Searching(start, parts, metric, higher_is_better, budget, executor, clock, wanted)
    result, seen = searching.run(), searching.observer.seen()
    proposal = proposed(start, result.candidate, seen, examples, metric, higher_is_better)
    searching.finish()
    return replace(result, proposal=proposal)


def adjusted(network: object, data: object, method: str) -> object:
    """The model, or for JAX its parameters and state, with what one of `METHODS` finds first, without judging it.

    Raises: see `qat.reestimate`.
    """
    start = Candidate.of(network).settled()
    examples = Data(data, False).numbers_for(start.graph())
    title, find = METHODS[method]
    assert find is not None
    found = find(start, Observer(start, examples))
    if not found:
        raise ValueError(f"the network has no layers for this ({title})")
    return found[0][1].given_to(network)


class _Searching:
    def __init__(
        self,
        start: Candidate,
        parts: tuple[Data, Data],
        metric: Metric,
        higher_is_better: bool,
        budget: int,
        executor: Executor | None,
        clock: Clock,
        methods: Collection[str],
    ) -> None:
        self.best, self.parts, self.higher = start.settled(), parts, higher_is_better
        self.left, self.clock, self.evaluations = budget, clock, 0
        self.trials: list[Trial] = []
        kinds = {"smoothing" if group.scales else "equalization" for group in groups(self.best)}
        self.todo = [name for name in METHODS if name in {*methods} - ({"smoothing", "equalization"} - kinds)]
        self.layers = sum(step.weights is not None for step in self.best.plan.steps)
        self.now, self.passed = "", 0
        self.since = began = time.monotonic()
        self.observer = Observer(start, parts[0])
        self.observer.passed = self._layer_passed
        # Seconds of an evaluation, and of a layer in a passage through the network.
        self.evaluation, self.passage = 0.0, (time.monotonic() - began) / max(self.layers, 1)
        # The observer has computed the float network, if it looks at all examples of its part.
        known = self.observer.fine_outputs if self.observer.data.examples == parts[0].examples else None
        self.evaluators = [
            Evaluations(start, part, metric, executor, reference)
            for part, reference in zip(parts, (known, None), strict=True)
        ]

    def run(self) -> Search:
        start, began = self.best, time.monotonic()
        (self.fitted,), (self.judged,) = self._marks([start]), self._marks([start], 1)
        if self.judged.metric is None:
            start.graph()  # says why it does not fit
        self.trials.append(Trial("as calibrated", "", self.fitted, self.judged, True, 1))
        self.evaluation = (time.monotonic() - began) / 2
        while self.todo:
            self.now, self.passed = self.todo.pop(0), 0
            title, method = METHODS[self.now]
            if method is None:
                self._ranges_of_each(title)
            else:
                self._best_of(title, method)
        self.now, self.left = "", 0
        if self.trials[0].held_out.better_than(self.judged, self.higher):
            self.best = start
            self.trials = [replace(trial, kept=at == 0) for at, trial in enumerate(self.trials)]
        return Search(
            self.best.device,
            tuple(self.trials),
            self.best.graph(),
            self.best,
            self.evaluators[1].float_metric,
            self.parts[0].examples,
            self.parts[1].examples,
            self.evaluations,
        )

    def _best_of(self, title: str, method: Method) -> None:
        """Keeps the best network that a method tries, if it is better."""
        # What goes through the network once is worth two evaluations, whatever is tried before it.
        kept = 0 if self.now in PASSES else 2 * len(PASSES.keys() & set(self.todo))
        most = self.left - 1 - kept
        tried = method(self.best, self.observer)[:most] if most > 0 else []
        if tried:
            before = self.evaluations
            marks = self._marks([candidate for _, candidate, *_ in tried])
            at = 0
            for position, mark in enumerate(marks):
                if mark.better_than(marks[at], self.higher):
                    at = position
            what, candidate, *observer = tried[at]
            if self._settle(title, what, candidate, marks[at], self.evaluations - before) and observer:
                (self.observer,) = observer

    def _ranges_of_each(self, title: str) -> None:
        """Chooses ranges tensor by tensor: each by itself at first, then one after another, the best first.

        As many as the budget allows: those whose ranges differ most between the ways.
        """
        seen = self.observer.seen()
        options: dict[str, list[Ends]] = {}
        for grid in open_grids(self.best):
            if grid in seen:
                every = dict.fromkeys(chosen(way, seen[grid], self.best.plan, grid) for way in WAYS)
                options[grid] = [ends for ends in every if ends != self.best.ranges[grid]]
        widths = {grid: [high - low for low, high in ends if high > low] for grid, ends in options.items()}

        def spread(grid: str) -> float:
            return -max(widths[grid], default=0.0) / min(widths[grid], default=1.0)

        tasks: list[tuple[str, Ends]] = []
        for number, grid in enumerate(sorted(options, key=spread)):
            if len(tasks) + number + len(options[grid]) + 1 > self.left - 1:
                break
            tasks += [(grid, ends) for ends in options[grid]]
        if not tasks:
            return
        before = self.evaluations
        better: dict[str, tuple[Mark, Ends]] = {}
        marks = self._marks([_with_range(grid, ends, self.best) for grid, ends in tasks])
        for (grid, ends), mark in zip(tasks, marks, strict=True):
            if mark.better_than(better[grid][0] if grid in better else self.fitted, self.higher):
                better[grid] = mark, ends
        sign = -1 if self.higher else 1
        order = sorted(better, key=lambda grid: (sign * (better[grid][0].metric or 0.0), -better[grid][0].decibels))
        changes = [functools.partial(_with_range, grid, better[grid][1]) for grid in order]
        self._one_by_one(title, "tensors", changes, before)

    def _one_by_one(
        self, name: str, what: str, changes: Iterable[Callable[[Candidate], Candidate]], before: int
    ) -> None:
        """Applies one change after another, each if it makes the network better. before: evaluations until then."""
        now, fitted, taken = self.best, self.fitted, 0
        for change in changes:
            if self.left < 2:
                break
            changed = change(now)
            (mark,) = self._marks([changed])
            if mark.better_than(fitted, self.higher):
                now, fitted, taken = changed, mark, taken + 1
        self._settle(name, f"of {taken} {what}", now, fitted, self.evaluations - before)

    def _settle(self, name: str, what: str, candidate: Candidate, fitted: Mark, evaluations: int) -> bool:
        """Whether a network is kept, as the held-out examples agree."""
        (judged,) = self._marks([candidate], 1)
        kept = fitted.better_than(self.fitted, self.higher) and judged.better_than(self.judged, self.higher)
        self.trials.append(Trial(name, what, fitted, judged, kept, evaluations + 1))
        if kept:
            self.best, self.fitted, self.judged = candidate, fitted, judged
        return kept

    def _marks(self, candidates: Sequence[Candidate], part: int = 0) -> list[Mark]:
        """The mark of each candidate, in order. The most expensive part; the candidates are independent of one
        another."""
        marks = [mark or Mark(None, -math.inf) for mark in self.evaluators[part].marks(candidates)]
        self.evaluations += len(candidates)
        self.left -= len(candidates)
        self._spent()
        return marks

    def _spent(self) -> None:
        """Says how long it took until now, and how long it will take."""
        since, self.since = self.since, time.monotonic()
        todo = [self.now, *self.todo]
        tried = sum(TRIED.get(name, 1) + 1 for name in todo if name != "layer_ranges")
        tried += (len(WAYS) + 1) * len(open_grids(self.best)) if "layer_ranges" in todo else 0
        passages = PROPOSAL + sum(PASSES.get(name, 0) for name in todo)
        layers = self.layers * passages - self.passed * PASSES.get(self.now, 0)
        self.clock.did(self.since - since, self.evaluation * min(self.left, tried) + self.passage * max(layers, 0))

    def finish(self) -> None:
        """Says that all is done."""
        self.clock.did(time.monotonic() - self.since, 0)

    def _layer_passed(self) -> None:
        self.passed += 1
        self._spent()


def _with_range(grid: str, ends: Ends, candidate: Candidate) -> Candidate:
    return replace(candidate, ranges={**candidate.ranges, grid: ends})
