# SPDX-License-Identifier: Apache-2.0
"""Which layers cost accuracy on the device, how much, and why."""

from __future__ import annotations

import json
import math
import textwrap
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..deploy.codes import codes_of, output_values
from ..deploy.graph import Graph
from ..deploy.inspect import name_in_short
from ..deploy.simulate import compile as compiled
from ..kit.device import DEFAULT_PROFILE, OPERATORS, Profile, profile_named
from ..kit.device.tensor import CODE_RANGES, dequantize
from ..kit.display import Finding, shortened, table
from ..kit.engine import Compiled
from ..kit.planning.plans import PlanInput, PlanStep
from ..kit.progress import Clock, Progress
from .metrics import Data, Mark, Metric, accuracy, decibels, score
from .network import Candidate, FineWeights
from .precisions import Part, Precisions
from .reasons import Values, reasons_of_weights

MEASURES = ("alone", "fine", "cumulative")
HEADER = ("layer", "part", "alone", "kept fine", "cumulative", "fine dB", "dB")
# Bytes that the tensors of one part of the examples may take, and the most examples in it.
MEMORY, TOGETHER = 2**28, 64
# Rounds in which the fine grids are fitted to the data.
ROUNDS = 5
# About how many times as long a multiply-add in 16 bits takes as one in 8, to estimate the time left.
COST_OF_FINE = 12


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
        why = f": it {self.reasons[0]}" if self.reasons and self.kind != "weights" else ""
        why = f": they {self.reasons[0]}" if self.reasons and self.kind == "weights" else why
        return f"{self.layer} ({self.kind}){why}"


@dataclass(frozen=True, repr=False)
class Sensitivity(Finding):
    """What `sensitivity` found.

    Attributes:
        device: whose integers.
        examples: how many were evaluated.
        reference: the metric with everything in 16 bits; device_metric: on the device; None without a metric.
        decibels: signal to noise of the device's outputs.
        parts: in order of execution.
        evaluations: how many networks were evaluated; seconds: their total time; one_evaluation: the time of the
            device's alone.
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
    one_evaluation: float
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
        for each in (content, *content["parts"]):
            for name in {"decibels", "fine_decibels"} & each.keys():
                known = each[name] is not None and math.isfinite(each[name])
                each[name] = each[name] if known else None
        return json.dumps(content, indent=2)

    def text(self, width: int = 80, count: int | None = None) -> str:
        """A table for a terminal of `width` columns, and the reasons for the worst five.

        count: number of rows, the most harmful ones; None: all, in order of execution.
        """
        rows = [_cells(part) for part in (self.parts if count is None else self.worst(count))]
        header = HEADER
        room = [max([len(header[at]), *(len(row[at]) for row in rows)]) for at in range(1, len(HEADER))]
        most = max(8, width - sum(room) - 2 * len(room))
        names = [name_in_short(row[0], most) for row in rows]
        longest = max(map(len, (*names, header[0])))
        lines = self._head(width)
        for name, row in zip([header[0], *names], [header, *rows], strict=True):
            cells = [row[1].ljust(room[0]), *(cell.rjust(size) for cell, size in zip(row[2:], room[1:], strict=True))]
            lines.append("  ".join([name.ljust(longest), *cells]).rstrip())
        lines += ["", "What costs most:"]
        for number, part in enumerate(self.worst(), 1):
            why = part.reasons[0] if part.reasons else "nothing unusual: its rounding"
            line = f"{number}. {shortened(part.layer)} ({part.kind}){self._cost(part)}: {why}"
            lines += textwrap.wrap(line, width, subsequent_indent="   ")
        if any(part.chance and not part.cost for part in self.worst()):
            floor = max(part.chance for part in self.parts)
            lines += textwrap.wrap(
                f"Costs within chance, up to {self._points(floor)} here, are not listed as costs: those layers come by "
                "their noise.",
                width,
            )
        return "\n".join(lines)

    def _cost(self, part: PartSensitivity) -> str:
        """What a part costs, beyond chance; else its noise."""
        if part.cost:
            word = "kept fine brings" if part.decibels is None else "costs"
            alone = "" if part.decibels is None else " alone"
            return f", {word} {self._points(part.cost)}{alone}"
        if part.decibels is None or not math.isfinite(part.decibels):
            return ""
        return f", {part.decibels:.1f} dB alone"

    def _points(self, amount: float) -> str:
        return f"{100 * amount:.3g} points" if self.in_points else f"{amount:.4g}"

    def _head(self, width: int) -> list[str]:
        metric = ""
        if self.reference is not None and self.device_metric is not None:
            metric = f": {self.device_metric:.4g} on the device, {self.reference:.4g} with everything in 16 bits"
        noise = f"{self.decibels:.1f} dB" if math.isfinite(self.decibels) else "no noise"
        times = self.seconds / max(self.one_evaluation, 1e-9)
        line = (
            f"{self.device}, {self.examples:,} examples{metric}; outputs {noise}. {self.evaluations} networks in "
            f"{self.seconds:.1f} s, {times:.0f} times one evaluation on the device."
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
        """Draws what each part costs to a .svg, .png or .pdf file. Needs Matplotlib."""
        from .pictures import sensitivity_picture

        return sensitivity_picture(self, Path(path))


def _cells(part: PartSensitivity) -> tuple[str, ...]:
    numbers = ["-" if each is None else f"{each:.4g}" for each in (part.alone, part.fine, part.cumulative)]
    noises = [
        "-" if each is None else f"{each:.1f}" if math.isfinite(each) else "inf"
        for each in (part.fine_decibels, part.decibels)
    ]
    return part.layer, part.kind, *numbers, *noises


def sensitivity(
    network: Any,
    data: Any,
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
            terminal.

    Raises:
        ValueError: the data does not fit, a measure is unknown, or the metric is not a finite number.
        TypeError: the network is not prepared.
        MissingData: it is not calibrated.
    """
    unknown = [each for each in measure if each not in MEASURES]
    if unknown or not measure:
        raise ValueError(f"measure must be some of {', '.join(MEASURES)}, got {list(measure)}")
    if metric is None and "alone" not in measure:
        raise ValueError(
            f"measure must include alone if there is no metric: noise is measured there, got {list(measure)}"
        )
    began = time.monotonic()
    given = Data(data, metric is not None)
    precisions, name, bits = at_two_precisions(network, device)
    given = given.numbers_for(precisions.graph)
    plans = _variants(precisions, measure)
    evaluation = Evaluation(precisions, name, given, bits)
    found = evaluation.run(plans, progress)

    fine, coarse = found["reference", None], found["device", None]

    def marked(outputs: Mapping[str, np.ndarray], parted: bool = True) -> Mark:
        """parted: whether to measure what is chance, too."""
        if metric is None:
            return Mark(None, decibels(fine, outputs))
        if parted:
            return Mark.of(outputs, given, metric, fine)
        return Mark(score(metric, outputs, given.targets), decibels(fine, outputs))

    reference, on_device = marked(fine), marked(coarse)
    sign, least = 1.0 if higher_is_better else -1.0, 1 / given.examples if metric is accuracy else 0.0

    def worse(mark: Mark | None, than: Mark) -> float | None:
        if mark is None or mark.metric is None or than.metric is None:
            return None
        return sign * (than.metric - mark.metric)

    rows = []
    for part in precisions.parts:
        marks = {each: marked(found[each, part], each != "cumulative") for each in measure}
        alone, kept = marks.get("alone"), marks.get("fine")
        gain = worse(kept, on_device)
        compared = ((alone, reference), (kept, on_device))
        chance = next((mark.chance(other) for mark, other in compared if mark is not None), 0.0)
        rows.append(
            PartSensitivity(
                part.layer,
                part.kind,
                None if alone is None else alone.metric,
                None if kept is None else kept.metric,
                marks["cumulative"].metric if "cumulative" in marks else None,
                None if alone is None else alone.decibels,
                worse(alone, reference),
                None if gain is None else -gain,
                evaluation.reasons(part),
                None if kept is None else kept.decibels,
                0.0 if metric is None else max(chance, least),
            )
        )
    return Sensitivity(
        profile_named(name).name,
        given.examples,
        reference.metric,
        on_device.metric,
        on_device.decibels,
        tuple(rows),
        len(plans),
        time.monotonic() - began,
        evaluation.one_evaluation,
        metric is accuracy,
    )


def at_two_precisions(
    network: Any, device: str | Profile | None
) -> tuple[Precisions, str, dict[str, tuple[float, float, int]]]:
    """The graph at two precisions, the device, and the real ends and bits of its tensors where these differ from their
    dtype's."""
    wanted = None if device is None else profile_named(device).name
    if isinstance(network, Graph):
        name = wanted or network.trained_for or DEFAULT_PROFILE
        return Precisions(network, {}, clamps_of(network)), name, {}
    candidate = Candidate.of(network, wanted).settled()
    plan, graph = candidate.plan, candidate.graph()
    numbers = candidate.numbers()
    clamped, ends = {}, {}
    stored: list[PlanInput | PlanStep] = [*plan.inputs, *plan.steps]
    for step in stored:
        grid = plan.grids.get(step.grid)
        if grid is None or grid.bits > 8 or step.path not in graph.tensors or step.grid not in numbers.grids:
            continue
        scale, zero_point = numbers.grids[step.grid]
        low, high = (float(scale) * (code - zero_point) for code in (0, 2**grid.bits - 1))
        ends[step.path] = (low, high, grid.bits)
        bounds = getattr(step, "bounds", None)
        if bounds is not None:
            clamped[step.path] = bounds
    return Precisions(graph, candidate.fine_weights(), clamped), candidate.device, ends


def clamps_of(graph: Graph) -> dict[str, tuple[float, float]]:
    """The ranges of a file's results that the ends of their grids clamp by design, as far as grids can tell: from 0, or
    from minus it, to a whole number, such as 1 of a hard sigmoid; and those from 0, where nothing is lost if they are
    not meant to clamp."""
    found = {}
    for operator in graph.operators:
        tensor = graph.tensors[operator.outputs[0]]
        if tensor.dtype != "int8" or operator.attributes.get("activation") != "NONE":
            continue
        scale, zero_point = (float(each[0]) for each in (tensor.quantization.scale, tensor.quantization.zero_point))
        lowest, highest = CODE_RANGES["int8"]
        width, from_zero = scale * (highest - lowest), zero_point == lowest
        whole = width > 0.5 and abs(width - round(width)) < 1e-6 * width
        if whole and (from_zero or (zero_point in (-1, 0) and round(width) % 2 == 0)):
            found[tensor.name] = (0.0, float(round(width))) if from_zero else (-round(width) / 2, round(width) / 2)
        elif from_zero:
            found[tensor.name] = (0.0, math.inf)
    return found


Key = tuple[str, Part | None]


def _variants(precisions: Precisions, measure: Iterable[str]) -> dict[Key, frozenset[Part]]:
    """The fine parts for each measurement."""
    every = frozenset(precisions.parts)
    found: dict[Key, frozenset[Part]] = {("device", None): frozenset(), ("reference", None): every}
    for each in measure:
        for number, part in enumerate(precisions.parts):
            found[each, part] = {
                "alone": every - {part},
                "fine": frozenset([part]),
                "cumulative": frozenset(precisions.parts[number + 1 :]),
            }[each]
    return found


class Evaluation:
    """Runs variants on parts of the examples: what they have in common with one of two bases is computed once."""

    def __init__(
        self, precisions: Precisions, device: str, data: Data, ends: Mapping[str, tuple[float, float, int]]
    ) -> None:
        self.precisions, self.device, self.data, self.ends = precisions, device, data, ends
        self.one_evaluation = 0.0
        self._values: dict[Part, Values] = {}
        graph = precisions.graph
        bytes_each = sum(4 * math.prod(graph.tensors[name].shape) for name in (*graph.inputs, *graph.results()))
        self.together = max(1, min(TOGETHER, MEMORY // max(bytes_each, 1)))

    def run(
        self, variants: Mapping[Key, frozenset[Part]], progress: Progress | bool | None
    ) -> dict[Key, dict[str, np.ndarray]]:
        """The outputs of each variant, in real numbers."""
        self.fit()
        precisions = self.precisions
        outputs: dict[Key, list[dict[str, np.ndarray]]] = {key: [] for key in variants}
        graphs = {key: precisions.variant(fine) for key, fine in variants.items()}
        bases = [graphs["device", None], graphs["reference", None]]
        ready = [compiled(graph, self.device) for graph in bases]
        # For each variant, the base it has most in common with, and what is known of it.
        shared = {
            key: max((_same(base, graph), at) for at, base in enumerate(bases)) for key, graph in _counted(graphs)
        }
        work = {key: _work(graph, shared[key][0]) for key, graph in graphs.items() if key[1] is not None}
        parts = range(0, self.data.examples, self.together)
        clock = Clock("sensitivity", max(1, len(parts)) * sum(work.values()) + 1e-9, progress)
        for start in parts:
            given = self.data.part(start, start + self.together)
            known = []
            for base, engine in zip(bases, ready, strict=True):
                began = time.monotonic()
                codes = codes_of(base, given)
                values = engine.run(codes, [*base.inputs, *base.results()], self.together)
                known.append(values)
                if base is bases[0]:
                    self.one_evaluation += time.monotonic() - began
            self._look(known[1])
            for key, graph in graphs.items():
                if key[1] is None:
                    at = 0 if key[0] == "device" else 1
                    outputs[key].append(output_values(graph, known[at]))
                    continue
                same, at = shared[key]
                outputs[key].append(self._rest(graph, same.names, known[at], ready[at], given))
                clock.did(work[key])
        return {
            key: {name: np.concatenate([part[name] for part in parts_of]) for name in parts_of[0]}
            for key, parts_of in outputs.items()
        }

    def _rest(
        self,
        graph: Graph,
        same: Collection[str],
        known: Mapping[str, np.ndarray],
        like: Compiled,
        given: Any,
    ) -> dict[str, np.ndarray]:
        """The outputs of a variant from the tensors that it has in common with a base."""
        begin = {name: known[name] for name in _frontier(graph, same)}
        missing = [name for name in graph.inputs if name not in same]
        if missing:
            codes = codes_of(graph, given)
            begin.update({name: codes[name] for name in missing})
        return output_values(graph, compiled(graph, self.device, like).run(begin, graph.outputs, self.together))

    def fit(self) -> None:
        """Fits the fine grids to the examples: to the first ones closely; others only widen them."""
        for start in range(0, self.data.examples, self.together):
            for _ in range(ROUNDS):
                largest = self._largest_codes(self.data.part(start, start + self.together))
                if not self.precisions.fit(largest, narrower=start == 0):
                    break

    def _largest_codes(self, given: Any) -> dict[Part, int]:
        """The largest magnitude of the codes of each activation in 16 bits."""
        precisions = self.precisions
        graph = precisions.variant(precisions.parts)
        names = [*graph.inputs, *graph.results()]
        found = compiled(graph, self.device).run(codes_of(graph, given), names, self.together)
        sizes = {name: int(np.abs(codes.astype(np.int32)).max(initial=0)) for name, codes in found.items()}
        return {
            part: max(sizes.get(precisions.fine_tensor(name).name, 0) for name in precisions.tensors_of[part])
            for part in precisions.parts
            if not part.weights
        }

    # --- why ----------------------------------------------------------------------------------------------------------

    def _look(self, known: Mapping[str, np.ndarray]) -> None:
        """Records what the fine network stores."""
        precisions = self.precisions
        for part in precisions.parts:
            if part.weights:
                continue
            for name in precisions.tensors_of[part]:
                fine, tensor = precisions.fine_tensor(name), precisions.graph.tensors[name]
                if fine.name not in known or tensor.dtype != "int8":
                    continue
                if part not in self._values:
                    self._values[part] = Values(*self._ends(part))
                self._values[part].add(dequantize(known[fine.name], fine.quantization))

    def _ends(self, part: Part) -> tuple[float, float, int]:
        for name in precisions_names(self.precisions, part):
            if name in self.ends:
                return self.ends[name]
        tensor = self.precisions.graph.tensors[self.precisions.tensors_of[part][0]]
        low, high = CODE_RANGES[tensor.dtype]
        grid = tensor.quantization
        scale, zero_point = float(grid.scale[0]), int(grid.zero_point[0])
        return scale * (low - zero_point), scale * (high - zero_point), 8

    def reasons(self, part: Part) -> tuple[str, ...]:
        """Why a part costs what it costs."""
        if not part.weights:
            return self._values[part].reasons() if part in self._values else ()
        graph = self.precisions.graph
        operator = graph.operators[part.place]
        (name,) = self.precisions.tensors_of[part]
        filter, weights = graph.tensors[name], self.precisions.weights[name]
        axis = OPERATORS[operator.kind].filter_axis
        assert filter.data is not None and axis is not None and isinstance(weights, FineWeights)
        input_scale = float(graph.tensors[operator.inputs[0]].quantization.scale[0])
        return reasons_of_weights(filter.data, filter.quantization.scale, weights, axis, input_scale)


def precisions_names(precisions: Precisions, part: Part) -> tuple[str, ...]:
    """The tensors of a part, and the layer."""
    return (part.layer, *precisions.tensors_of[part])


@dataclass(frozen=True)
class _Same:
    """Names of the tensors that two graphs compute identically."""

    names: frozenset[str]

    def __lt__(self, other: _Same) -> bool:
        return len(self.names) < len(other.names)


def _counted(graphs: Mapping[Key, Graph]) -> list[tuple[Key, Graph]]:
    return [(key, graph) for key, graph in graphs.items() if key[1] is not None]


def _same(base: Graph, graph: Graph) -> _Same:
    made = {name: operator for operator in base.operators for name in operator.outputs}
    same = {name for name in graph.inputs if base.tensors.get(name) is graph.tensors[name] and name in base.inputs}
    for operator in graph.operators:
        if made.get(operator.outputs[0]) is not operator:
            continue
        alike = all(base.tensors.get(name) is graph.tensors[name] for name in (*operator.inputs, *operator.outputs))
        if alike and all(name in same or graph.tensors[name].data is not None for name in operator.inputs):
            same.update(operator.outputs)
    return _Same(frozenset(same))


def _frontier(graph: Graph, same: Collection[str]) -> set[str]:
    """The tensors of `same` that the others are computed from, and outputs among them."""
    found = {name for name in graph.outputs if name in same}
    for operator in graph.operators:
        if operator.outputs[0] not in same:
            found |= {name for name in operator.inputs if name in same}
    return found


def _work(graph: Graph, same: _Same) -> float:
    """What is left to compute, in multiply-adds of 8 bits."""
    work = 1.0
    for operator in graph.operators:
        if operator.outputs[0] not in same.names:
            tensor = graph.tensors[operator.outputs[0]]
            cost = math.prod(tensor.shape) + graph.multiply_accumulates(operator)
            work += cost * (COST_OF_FINE if tensor.dtype == "int16" else 1)
    return work


__all__ = ["MEASURES", "Evaluation", "PartSensitivity", "Sensitivity", "at_two_precisions", "sensitivity"]
