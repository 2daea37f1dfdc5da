# SPDX-License-Identifier: Apache-2.0
"""Does a network meet its requirements on its devices? Answered with their integers, in training and afterwards."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..deploy.codes import Intake, output_values
from ..deploy.formats.read_tflite import read_tflite
from ..deploy.formats.tflite import write_tflite
from ..deploy.graph import Graph
from ..deploy.simulate import simulate
from ..kit.device import DEFAULT_PROFILE, Profile, profile_named
from ..kit.display import Finding
from .metrics import Data, Metric, accuracy, score
from .network import Candidate

# Examples computed at a time.
TOGETHER = 64
# Files in the folder where the best network is kept.
BEST, VERDICT = "best.tflite", "best.json"


@dataclass(frozen=True)
class OnDevice:
    """What a network computes on one device.

    Attributes:
        device: a name in `deploy.PROFILES`.
        score: the metric.
        differing: how many of the outputs' integers differ from those of the device compared with; None if they were
            not compared. values: out of how many.
    """

    device: str
    score: float
    differing: int | None
    values: int


@dataclass(frozen=True, repr=False)
class Verdict(Finding):
    """Whether a network passes, which is its truth value; without a requirement there is none.

    Attributes:
        devices: what it computes on each of them.
        failures: one sentence for each unmet requirement; empty if it passes.
        examples: how many were evaluated.
        step: the caller's counter, such as the epoch.
        best: whether it is the best so far.
        asked: whether there was a requirement.
    """

    devices: tuple[OnDevice, ...]
    failures: tuple[str, ...]
    examples: int
    step: int | None = None
    best: bool = False
    higher_is_better: bool = True
    asked: bool = True

    @property
    def passes(self) -> bool:
        """Whether all requirements are met.

        Raises:
            ValueError: there is none.
        """
        if not self.asked:
            raise ValueError("nothing is asked of the network: give minimum, maximum or max_differ")
        return not self.failures

    def __bool__(self) -> bool:
        return self.passes

    @property
    def score(self) -> float:
        """The metric on the worst of the devices."""
        scores = [grade.score for grade in self.devices]
        return min(scores) if self.higher_is_better else max(scores)

    def as_json(self) -> str:
        """All of it."""
        content = {
            "passes": self.passes if self.asked else None,
            "score": self.score,
            "step": self.step,
            "examples": self.examples,
            "devices": {grade.device: {"score": grade.score, "differing": grade.differing} for grade in self.devices},
            "failures": list(self.failures),
        }
        return json.dumps(content, indent=2)

    def text(self) -> str:
        scores = ", ".join(
            f"{grade.device} {grade.score:.4g}"
            + ("" if grade.differing is None else f" ({grade.differing:,} of {grade.values:,} outputs differ)")
            for grade in self.devices
        )
        word = ("passes" if self.passes else "fails") if self.asked else "scores"
        return "\n  ".join([f"{word} on {self.examples:,} examples: {scores}", *self.failures])


class Gate:
    """Scores networks on devices' integers, whatever framework trains them, and keeps the best.

    Call it in a training loop, or give it to one of `tune.callbacks`::

        gate = tune.Gate((images, classes), devices=["xnnpack-x86", "micro"], minimum=0.95, keep="best")
        for epoch in range(epochs):
            train(prepared)
            verdict = gate(prepared, epoch)

    A network that is not frozen is scored as if it were frozen now.

    Attributes:
        best: the verdict on the best network so far; None before the first.
    """

    def __init__(
        self,
        data: object,
        metric: Metric = accuracy,
        *,
        devices: Sequence[str | Profile] | str | None = None,
        minimum: float | None = None,
        maximum: float | None = None,
        max_differ: int | None = None,
        beside: str | Profile | None = None,
        higher_is_better: bool = True,
        keep: str | os.PathLike[str] | None = None,
    ) -> None:
        """
        Args:
            data: ``(inputs, targets)`` as `deploy.input_codes` and the metric take them, or a loader of such pairs.
            metric: a function of outputs and targets; see `sensitivity`.
            devices: names in `deploy.PROFILES`; by default the device the network was prepared for.
            minimum, maximum: bounds of the metric, on every device.
            max_differ: how many of the outputs' integers may differ between a device and `beside`.
            beside: the device that others are compared with; by default the one the network was prepared for.
            higher_is_better: False for losses and errors.
            keep: a folder for the best network so far, ``best.tflite``, and the verdict on it, ``best.json``.

        Raises:
            ValueError: a bound is not a number, not a possible accuracy or beyond the other bound; there is no such
                device; or keep is empty.
            TypeError: data is something else.
        """
        for name, bound in (("minimum", minimum), ("maximum", maximum)):
            if bound is not None and not (isinstance(bound, int | float) and math.isfinite(bound)):
                raise ValueError(f"{name} must be a finite number, got {bound!r}")
            if bound is not None and metric is accuracy and not 0 <= bound <= 1:
                raise ValueError(f"{name} is one of accuracy, a share from 0 to 1, got {bound!r}; 95 % is 0.95")
        if minimum is not None and maximum is not None and minimum > maximum:
            raise ValueError(f"no metric is at least minimum={minimum:g} and at most maximum={maximum:g}")
        if keep is not None and not os.fspath(keep):
            raise ValueError("keep is empty; name a folder, or '.' for this one")
        counts = isinstance(max_differ, int) and not isinstance(max_differ, bool)
        if max_differ is not None and not (counts and max_differ >= 0):
            raise ValueError(f"max_differ must be a number of integers, 0 or more, got {max_differ!r}")
        names = (devices,) if isinstance(devices, str | Profile) else devices
        if names is not None and not isinstance(names, Sequence):
            raise TypeError(f"devices must be names of devices, got {devices!r}")
        if names is not None and not names:
            raise ValueError("devices is empty: name one at least, or leave it out")
        self._devices = tuple(dict.fromkeys(profile_named(device).name for device in names or ()))
        self._beside = None if beside is None else profile_named(beside, "beside").name
        self._data, self._metric, self._warned = Data(data, True, "test"), metric, False
        self._minimum, self._maximum, self._max_differ = minimum, maximum, max_differ
        self._higher, self._keep = higher_is_better, None if keep is None else Path(keep)
        self.best: Verdict | None = None

    def __call__(self, network: object, step: int | None = None) -> Verdict:
        """Scores a network; if it is the best so far, keeps it.

        Args:
            network: a prepared model (for JAX ``(prepared, params, state)``), a `deploy.Graph`, or the path of a
                .tflite file.
            step: recorded in the verdict, such as the epoch.
        """
        graph = _graph_of(network)
        verdict = replace(self.verdict(graph), step=step)
        if self.best is None or _rank(verdict) > _rank(self.best):
            verdict = self.best = replace(verdict, best=True)
            if self._keep is not None:
                self._keep.mkdir(parents=True, exist_ok=True)
                write_tflite(graph, self._keep / BEST)
                (self._keep / VERDICT).write_text(verdict.as_json() + "\n", "utf-8")
        return verdict

    def verdict(self, graph: Graph) -> Verdict:
        """Scores a graph, without keeping it."""
        devices = self._devices or (graph.trained_for or DEFAULT_PROFILE,)
        beside = self._beside or graph.trained_for or devices[0]
        codes = Intake(graph, warns=not self._warned).codes(self._data.inputs)
        self._warned = True
        known = {
            name: simulate(graph, codes, name, batch_size=TOGETHER, progress=False)
            for name in dict.fromkeys((*devices, *([beside] if self._max_differ is not None else [])))
        }
        rows, failures = [], []
        for name in devices:
            reached = score(self._metric, output_values(graph, known[name]), self._data.targets)
            differing, values = None, sum(array.size for array in known[name].values())
            if beside in known and name != beside:
                differing = sum(
                    int(np.count_nonzero(array != known[beside][tensor])) for tensor, array in known[name].items()
                )
            rows.append(OnDevice(name, reached, differing, values))
            failures += [f"{name} does not run it: {reason}" for reason in graph.absent_from(name)]
            if self._minimum is not None and reached < self._minimum:
                failures.append(f"{name}: {reached:.6g} is below {self._minimum:g}")
            if self._maximum is not None and reached > self._maximum:
                failures.append(f"{name}: {reached:.6g} is above {self._maximum:g}")
            if self._max_differ is not None and (differing or 0) > self._max_differ:
                failures.append(
                    f"{name}: {differing:,} of {values:,} outputs differ from {beside}, {self._max_differ:,} may"
                )
        asked = any(bound is not None for bound in (self._minimum, self._maximum, self._max_differ))
        return Verdict(tuple(rows), tuple(failures), self._data.examples, higher_is_better=self._higher, asked=asked)


def _rank(verdict: Verdict) -> tuple[bool, float]:
    """A network that passes is better than one that does not."""
    return not verdict.failures, verdict.score if verdict.higher_is_better else -verdict.score


def gate(network: object, data: object, metric: Metric = accuracy, **settings: Any) -> Verdict:
    """Whether a network meets its requirements on its devices' integers; see `Gate` for the settings. Without minimum,
    maximum or max_differ the verdict has scores, and its truth value is an error.

    Args:
        network: a prepared model (for JAX ``(prepared, params, state)``), a `deploy.Graph`, or the path of a .tflite
            file.
    """
    return Gate(data, metric, **settings)(network)


def _graph_of(network: object) -> Graph:
    if isinstance(network, Graph):
        return network
    return read_tflite(network) if isinstance(network, str | os.PathLike) else Candidate.of(network).graph()
