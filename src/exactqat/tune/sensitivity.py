# SPDX-License-Identifier: Apache-2.0
"""Which layers cost accuracy on the device, how much, and why."""

from __future__ import annotations

import json
import math
import textwrap
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from ..deploy.inspect import name_in_short
from ..kit.device import Profile
from ..kit.display import Finding, aligned, shortened, table
from ..kit.progress import Progress
from .metrics import Data, Mark, Metric, accuracy, decibels, score
from .precisions import Part, Precisions
from .variants import Variants

MEASURES = ("alone", "fine", "cumulative")
COLORS = {"weights": "#3b6fb6", "result": "#d9822b", "input": "#5a9e6f"}
# Bars that fit a page.
BARS = 40
HEADER = ("layer", "part", "alone", "kept fine", "cumulative", "fine dB", "dB")


@dataclass(frozen=True)
class PartSensitivity:
    """What one part of a layer costs.

    Attributes:
        layer: its path; kind: ``weights``, ``result`` (what it stores) or ``input``.
        alone: the metric with this part alone in the device's bits, all else in 16; None if it was not measured.
        fine: with this part alone in 16 bits, all else in the device's.
        cumulative: with this part and all before it in the device's bits, all after it in 16.
        decibels: signal to noise of the outputs with this part alone in the device's bits; infinite without noise; None
            if that was not measured. fine_decibels: likewise with this part alone kept fine.
        loss: of the metric from this part alone; gain: in the metric if this part alone is kept fine. Both are positive
            where quantizing this part is harmful.
        chance: by how much the loss (without it, the gain) may be off by chance: the standard error of the difference,
            and of the accuracy one example at least.
        reasons: why, in words, the most important first; empty if nothing is unusual.
    """

    layer: str
    kind: str
    alone: float | None
    fine: float | None
    cumulative: float | None
    decibels: float | None
    loss: float | None
    gain: float | None
    reasons: tuple[str, ...]
    fine_decibels: float | None = None
    chance: float = 0.0

    @property
    def cost(self) -> float | None:
        """What it costs beyond chance: its loss alone, or what keeping it fine brings; 0 where chance explains it."""
        cost = self.gain if self.decibels is None else self.loss
        return cost if cost is None or cost > self.chance * (1 + 1e-9) else 0.0

    def __str__(self) -> str:
        subject = "they" if self.kind == "weights" else "it"
        return f"{self.layer} ({self.kind})" + (f": {subject} {self.reasons[0]}" if self.reasons else "")


@dataclass(frozen=True, repr=False)
class Sensitivity(Finding):
    """What `sensitivity` found.

    Attributes:
        device: whose integers.
        examples: how many were evaluated.
        reference: the metric with everything in 16 bits; device_metric: on the device; None without a metric.
        decibels: signal to noise of the device's outputs.
        parts: in order of execution.
        evaluations: how many networks were evaluated; seconds: their total time.
        in_points: whether the metric is a share, such as the accuracy, so that costs are points of a hundred.
    """

    device: str
    examples: int
    reference: float | None
    device_metric: float | None
    decibels: float
    parts: tuple[PartSensitivity, ...]
    evaluations: int
    seconds: float
    in_points: bool = False

    def ranked(self) -> tuple[PartSensitivity, ...]:
        """The parts, the most harmful first: by what they lose alone beyond chance (if that was not measured, by what
        is gained by keeping them fine), then by their noise."""

        def harm(part: PartSensitivity) -> tuple[float, float]:
            noise = -(part.fine_decibels or 0.0) if part.decibels is None else part.decibels
            return -(part.cost or 0.0), noise

        return tuple(sorted(self.parts, key=harm))

    def worst(self, count: int = 5) -> tuple[PartSensitivity, ...]:
        """The most harmful parts."""
        return self.ranked()[:count]

    def as_json(self) -> str:
        """All of it; missing noise is null."""
        content = asdict(self)
        for one in (content, *content["parts"]):
            one.update({name: None for name in {"decibels", "fine_decibels"} & one.keys() if not _measured(one[name])})
        return json.dumps(content, indent=2)

    def text(self, width: int = 80, count: int | None = None) -> str:
        """A table for a terminal of `width` columns, and the reasons for the worst five.

        count: number of rows, the most harmful ones; None: all, in order of execution.
        """
        rows = [HEADER, *map(_cells, self.parts if count is None else self.worst(count))]
        others = sum(2 + max(map(len, column)) for column in list(zip(*rows, strict=True))[1:])
        most = max(8, width - others)
        lines = [*self._head(width), *aligned(((name_in_short(row[0], most), *row[1:]) for row in rows), range(2))]
        costly = [part for part in self.worst() if self._cost(part)]
        lines += ["", "What costs most:" if costly else "Nothing costs anything."]
        for number, part in enumerate(costly, 1):
            why = part.reasons[0] if part.reasons else "nothing unusual: its rounding"
            line = f"{number}. {shortened(part.layer)} ({part.kind}){self._cost(part)}: {why}"
            lines += textwrap.wrap(line, width, subsequent_indent="   ")
        if chance := max((part.chance for part in self.parts), default=0.0):
            said = (
                f"Costs within chance, up to {self._points(chance)} here, are not listed as costs: those layers come "
                "by their noise."
            )
            lines += textwrap.wrap(said, width)
        return "\n".join(lines)

    def _cost(self, part: PartSensitivity) -> str:
        """What a part costs, beyond chance; else its noise."""
        if part.cost and part.decibels is None:
            return f", kept fine brings {self._points(part.cost)}"
        if part.cost:
            return f", costs {self._points(part.cost)} alone"
        return f", {part.decibels:.1f} dB alone" if _measured(part.decibels) else ""

    def _points(self, amount: float) -> str:
        return f"{100 * amount:.3g} points" if self.in_points else f"{amount:.4g}"

    def _head(self, width: int) -> list[str]:
        metric = ""
        if self.reference is not None and self.device_metric is not None:
            metric = f": {self.device_metric:.4g} on the device, {self.reference:.4g} with everything in 16 bits"
        noise = f"{self.decibels:.1f} dB" if math.isfinite(self.decibels) else "no noise"
        line = (
            f"{self.device}, {self.examples:,} examples{metric}; outputs {noise}. {self.evaluations} networks in "
            f"{self.seconds:.1f} s."
        )
        return [*textwrap.wrap(line, width), ""]

    def in_short(self) -> str:
        (worst,) = self.worst(1) or (None,)
        metric = "" if self.device_metric is None else f", {self.device_metric:.4g} on the device"
        return f"{self.device}, {self.examples:,} examples{metric}, {len(self.parts):,} parts; worst: {worst}"

    def _repr_html_(self) -> str:
        header = (*HEADER, "why")
        rows = [(*_cells(part), "; ".join(part.reasons)) for part in self.parts]
        return table(" ".join(self._head(10_000)), header, rows, 2)

    def picture(self, path: str | Path) -> Path:
        """Draws what each part costs alone to a .svg, .png or .pdf file; its noise where that costs nothing or there is
        no metric; what keeping it fine brings where nothing else was measured. Needs Matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("pictures need Matplotlib: pip install matplotlib", name=error.name) from None
        parts = self.parts if len(self.parts) <= BARS else sorted(self.worst(BARS), key=self.parts.index)
        lowest = 0.0
        if any(part.loss for part in parts):
            title, values = "loss of the metric by this part alone", [part.loss or 0.0 for part in parts]
        elif any(part.decibels is not None for part in parts):
            title = "noise of the outputs by this part alone, dB"
            noise = [-part.decibels if part.decibels is not None else -math.inf for part in parts]
            lowest = min(filter(math.isfinite, noise), default=0.0)
            values = [max(decibels, lowest) for decibels in noise]
        else:
            title, values = "gain in the metric by keeping this part fine", [part.gain or 0.0 for part in parts]
        figure = Figure(figsize=(7, 1.2 + 0.22 * len(parts)), layout="constrained")
        plot = figure.subplots()
        names = [f"{name_in_short(part.layer, 30)} ({part.kind})".replace("$", r"\$") for part in parts]
        widths = [value - lowest for value in values]
        plot.barh(range(len(parts)), widths, left=lowest, color=[COLORS[part.kind] for part in parts])
        plot.set_yticks(range(len(parts)), names, fontsize=7)
        plot.invert_yaxis()
        plot.set_xlabel(title)
        plot.set_title(f"What costs accuracy on {self.device}, {self.examples:,} examples", fontsize=10)
        figure.savefig(path)
        return Path(path)


def _measured(noise: float | None) -> bool:
    return noise is not None and math.isfinite(noise)


def _cells(part: PartSensitivity) -> tuple[str, ...]:
    metrics = ["-" if metric is None else f"{metric:.4g}" for metric in (part.alone, part.fine, part.cumulative)]
    noises = ["-" if noise is None else f"{noise:.1f}" for noise in (part.fine_decibels, part.decibels)]
    return part.layer, part.kind, *metrics, *noises


def sensitivity(
    network: object,
    data: object,
    metric: Metric | None = accuracy,
    *,
    device: str | Profile | None = None,
    measure: Collection[str] = MEASURES,
    higher_is_better: bool = True,
    progress: Progress | bool | None = None,
) -> Sensitivity:
    """Says which layers cost accuracy on the device, how much, and why: weights and activations separately.

    Every number comes from an integer network: the device's own in 8 bits (or fewer, as its rules say), and the
    device's int16 operators with 16-bit weights for what is kept fine. What variants have in common is computed once.

    Args:
        network: a model that is prepared and calibrated, trained or frozen (for JAX ``(prepared, params, state)``), or
            a `deploy.Graph`, such as `deploy.read_tflite(path)`: a file does not say what its weights were before
            quantization, so only activations are measured then.
        data: ``(inputs, targets)``: real numbers in the user's axes, as `deploy.input_codes` takes them, and what the
            metric takes; or a loader of such pairs. Without a metric the inputs alone will do (two inputs as a
            dictionary by name: a bare pair is taken as inputs and targets).
        metric: a function of outputs and targets that returns a number. Outputs are real numbers: an array, or a
            dictionary by name if there are several; final steps left out of the file, such as softmax, are not applied.
            None: signal to noise alone.
        device: whose integers, a name in `deploy.PROFILES`; by default the device the network was prepared for.
        measure: which of ``alone``, ``fine`` and ``cumulative``; parts are ranked by ``alone``, without it by ``fine``.
            Single parts have a signal to noise only with ``alone``, so it is needed without a metric.
        higher_is_better: False for losses and errors.
        progress: a function of (done, all, seconds left); True: a line on standard error, which is the default on a
            terminal; in a log, the default is a line from time to time.

    Raises:
        ValueError: the data does not fit, a measure is unknown, or the metric is not a finite number.
        TypeError: the network is not prepared.
        MissingData: it is not calibrated.
    """
    unknown = [name for name in measure if name not in MEASURES]
    if unknown or not measure:
        raise ValueError(f"measure must be some of {', '.join(MEASURES)}, got {list(measure)}")
    if metric is None and "alone" not in measure:
        raise ValueError(
            f"measure must include alone if there is no metric: noise is measured there, got {list(measure)}"
        )
    began = time.monotonic()
    examples = Data(data, metric is not None)
    precisions = Precisions(network, device)
    examples, parts = examples.numbers_for(precisions.graph), precisions.parts
    variants = Variants(precisions, examples)
    # The parts that are fine, for each measurement.
    fine_in = {}
    for number, part in enumerate(parts):
        sets = {"alone": variants.fine - {part}, "fine": {part}, "cumulative": parts[number + 1 :]}
        fine_in.update({(part, name): frozenset(sets[name]) for name in measure})
    outputs = variants.outputs(fine_in.values(), progress)
    exact = outputs[variants.fine]

    def mark_of(fine: frozenset[Part], chance: bool = True) -> Mark:
        """chance: whether it is asked how much of the metric is chance, which takes its blocks."""
        if metric is not None and chance:
            return Mark.of(outputs[fine], examples, metric, exact)
        value = None if metric is None else score(metric, outputs[fine], examples.targets)
        return Mark(value, decibels(exact, outputs[fine]))

    def difference(mark: Mark, than: Mark) -> float | None:
        """How much better a mark is than another one."""
        if mark.metric is None or than.metric is None:
            return None
        return (mark.metric - than.metric) * (1.0 if higher_is_better else -1.0)

    reference, on_device, none = mark_of(variants.fine), mark_of(variants.coarse), Mark(None, 0.0)
    least = 1 / examples.examples if metric is accuracy else 0.0
    rows = []
    for part in parts:
        marks = {name: mark_of(fine_in[part, name], name != "cumulative") for name in measure}
        alone, kept, cumulative = (marks.get(name, none) for name in MEASURES)
        judged, base = (alone, reference) if "alone" in measure else (kept, on_device)
        rows.append(
            PartSensitivity(
                part.layer,
                precisions.kind(part),
                alone.metric,
                kept.metric,
                cumulative.metric,
                alone.decibels if "alone" in measure else None,
                difference(reference, alone),
                difference(kept, on_device),
                variants.reasons(part),
                kept.decibels if "fine" in measure else None,
                0.0 if metric is None else max(judged.chance(base), least),
            )
        )
    return Sensitivity(
        precisions.device,
        examples.examples,
        reference.metric,
        on_device.metric,
        on_device.decibels,
        tuple(rows),
        2 + len(fine_in),
        time.monotonic() - began,
        metric is accuracy,
    )
