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
from ..kit.display import Finding, listed
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
        flips: numbers of the examples whose classes differ between the devices; None: only one was asked, or the metric
            is not accuracy.
    """

    devices: tuple[OnDevice, ...]
    failures: tuple[str, ...]
    examples: int
    step: int | None = None
    best: bool = False
    higher_is_better: bool = True
    asked: bool = True
    flips: tuple[int, ...] | None = None

    @property
    def passes(self) -> bool:
        """Whether all requirements are met.

        Raises:
            ValueError: there is none.
        """
        if not self.asked:
            raise ValueError("nothing is asked of the network: give minimum, maximum, max_differ or max_flips")
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
            "flips": None if self.flips is None else list(self.flips),
            "failures": list(self.failures),
        }
        return json.dumps(content, indent=2)

    def text(self) -> str:
        scores = ", ".join(
            f"{grade.device} {grade.score:.4g}"
            + ("" if grade.differing is None else f" ({grade.differing:,} of {grade.values:,} outputs differ)")
            for grade in self.devices
        )
        if self.flips:
            scores += f"; {flips_in_words(self.flips)}"
        word = ("passes" if self.passes else "fails") if self.asked else "scores"
        return "\n  ".join([f"{word} on {self.examples:,} examples: {scores}", *self.failures])


def flips_in_words(flips: Sequence[int]) -> str:
    """How many examples have another class on another device, and which ones."""
    count = len(flips)
    return f"{count:,} example{'s' * (count > 1)} flip{'s' * (count == 1)} (numbers {listed(list(map(str, flips)), 8)})"


class Gate:
    """Scores networks on devices' integers, whatever framework trains them, and keeps the best.

    Call it in a training loop, or give it to one of `tune.callbacks`::

        gate = tune.Gate((images, classes), devices=["xnnpack-x86", "micro"], minimum=0.95, keep="best")
        for epoch in range(epochs):
            train(prepared)
            verdict = gate(prepared, epoch)

    A network that is not frozen is scored as if it were frozen now. Of several devices, the best network is the one
    that is most often right on the worst of them; an example whose class differs between them counts as wrong.

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
        max_flips: int | None = None,
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
            max_flips: how many examples may have other classes on one of the devices, or `beside`, than on another.
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
        for name, most, what in (("max_differ", max_differ, "integers"), ("max_flips", max_flips, "examples")):
            counts = isinstance(most, int) and not isinstance(most, bool)
            if most is not None and not (counts and most >= 0):
                raise ValueError(f"{name} must be a number of {what}, 0 or more, got {most!r}")
        if max_flips is not None and metric is not accuracy:
            raise ValueError("max_flips counts classes that differ, so it needs the metric accuracy; give max_differ")
        names = (devices,) if isinstance(devices, str | Profile) else devices
        if names is not None and not isinstance(names, Sequence):
            raise TypeError(f"devices must be names of devices, got {devices!r}")
        if names is not None and not names:
            raise ValueError("devices is empty: name one at least, or leave it out")
        self._devices = tuple(dict.fromkeys(profile_named(device).name for device in names or ()))
        self._beside = None if beside is None else profile_named(beside, "beside").name
        self._data, self._metric, self._warned = Data(data, True, "test"), metric, False
        self._minimum, self._maximum, self._max_differ, self._max_flips = minimum, maximum, max_differ, max_flips
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
        compares = self._max_differ is not None or self._max_flips is not None
        known = {
            name: simulate(graph, codes, name, batch_size=TOGETHER, progress=False)
            for name in dict.fromkeys((*devices, *([beside] if compares else [])))
        }
        outputs = {name: output_values(graph, known[name]) for name in known}
        if self._max_flips is not None and len(known) == 1:
            raise ValueError(f"max_flips compares devices, and {beside} is the only one: name others")
        rows, failures = [], []
        for name in devices:
            reached = score(self._metric, outputs[name], self._data.targets)
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
        flips = None
        if self._metric is accuracy and len(known) > 1:
            first, *others = (next(iter(values.values())).argmax(-1) for values in outputs.values())
            differ = np.any([first != classes for classes in others], axis=0)
            flips = tuple(np.flatnonzero(differ.reshape(len(differ), -1).any(axis=1)).tolist())
            if self._max_flips is not None and len(flips) > self._max_flips:
                failures.append(f"{' and '.join(known)}: {flips_in_words(flips)}, {self._max_flips:,} may")
        asked = compares or self._minimum is not None or self._maximum is not None
        examples = self._data.examples
        return Verdict(
            tuple(rows), tuple(failures), examples, higher_is_better=self._higher, asked=asked, flips=flips
        )  # fmt: skip


def _rank(verdict: Verdict) -> tuple[bool, float]:
    """A network that passes is better than one that does not. An example that flips counts as wrong."""
    score = verdict.score if verdict.higher_is_better else -verdict.score
    return not verdict.failures, score - len(verdict.flips or ()) / verdict.examples


def gate(network: object, data: object, metric: Metric = accuracy, **settings: Any) -> Verdict:
    """Whether a network meets its requirements on its devices' integers; see `Gate` for the settings. Without minimum,
    maximum, max_differ or max_flips the verdict has scores, and its truth value is an error.

    Args:
        network: a prepared model (for JAX ``(prepared, params, state)``), a `deploy.Graph`, or the path of a .tflite
            file.
    """
    return Gate(data, metric, **settings)(network)


def _graph_of(network: object) -> Graph:
    if isinstance(network, Graph):
        return network
    return read_tflite(network) if isinstance(network, str | os.PathLike) else Candidate.of(network).graph()
