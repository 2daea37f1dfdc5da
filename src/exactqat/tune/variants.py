# SPDX-License-Identifier: Apache-2.0
"""Networks with some parts in 16 bits and the others in the device's, on the same examples: outputs, and what is stored
within."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..deploy.codes import codes_of, output_values
from ..deploy.graph import Graph, Operator
from ..deploy.simulate import compile as compiled
from ..kit.device import OPERATORS, Profile, profile_named
from ..kit.device.arithmetic import windows_of
from ..kit.device.tensor import CODE_RANGES, Tensor, dequantize
from ..kit.device.weighted import Weighted
from ..kit.engine.compiled import Compiled
from ..kit.progress import Clock, Progress
from .metrics import Data, Inputs
from .network import Candidate, Places
from .precisions import Part, Precisions, layer_of
from .reasons import Values, reasons_of_weights

# Bytes that the tensors of one part of the examples may take, and the most examples in it.
MEMORY, TOGETHER = 2**27, 64
# Rounds in which the fine grids are fitted to the data.
ROUNDS = 5
# How many values of each grid are kept, and rows of operands of each layer.
SAMPLE, ROWS = 2**17, 2**13
# The most examples that statistics are computed from, and values of their tensors; the fewest, whatever their size.
EXAMPLES, OBSERVED, FEWEST = 256, 2**29, 16
# Bytes of the sums of one layer that are looked at, and how many numbers of its operands.
SUMMED, OPERANDS = 2**24, 2**23

# The parts that are fine.
Fine = frozenset[Part]
Outputs = dict[str, np.ndarray]


class Variants:
    """What variants have in common with the network on the device, or with the fine one, is computed once.

    Attributes:
        precisions: the network's; its fine grids fit the data.
        coarse, fine: the variants with everything on the device, and with everything in 16 bits.
        fine_outputs: those of the variant in 16 bits, real numbers.
    """

    def __init__(self, precisions: Precisions, data: Data) -> None:
        self.precisions, self.data = precisions, data
        self.coarse: Fine = frozenset()
        self.fine: Fine = frozenset(precisions.parts)
        self._values: dict[Part, Values] = {}
        graph = precisions.graph
        bytes_each = sum(4 * math.prod(graph.tensors[name].shape) for name in (*graph.inputs, *graph.results()))
        self._together = max(1, min(TOGETHER, MEMORY // max(bytes_each, 1)))
        # What 16 bits stand for is real numbers.
        self._float_like = replace(profile_named(precisions.device), sums_in_float32=True)
        self.fine_outputs = self._fit()

    def outputs(
        self, variants: Iterable[Fine], progress: Progress | bool | None = False, explained: bool = True
    ) -> dict[Fine, Outputs]:
        """The outputs of each variant, of the fine one and, if explained, of the coarse one, in real numbers.

        explained: what the fine network stores is looked at too, for `reasons`, which takes as long as to compute it.
        """
        bases = (self.coarse, self.fine) if explained else (self.fine,)
        graphs = {fine: self.precisions.variant(fine) for fine in dict.fromkeys((*bases, *variants))}
        # Where the device has int16 itself, its sums are what is judged.
        wide = any(tensor.dtype == "int16" for tensor in self.precisions.graph.tensors.values())
        profile = self.precisions.device if wide else self._float_like
        engines = {base: compiled(graphs[base], profile) for base in bases}
        # For each variant, the base that it has most in common with, and which tensors.
        shared = {
            fine: max(((_same(graphs[base], graphs[fine]), base) for base in bases), key=lambda same: len(same[0]))
            for fine in graphs.keys() - set(bases)
        }
        batches = self._batches()
        clock = Clock("sensitivity", max(len(batches) * len(shared), 1), progress)
        parts: dict[Fine, list[Outputs]] = {fine: [] for fine in graphs}
        for inputs in batches:
            stored = {
                base: engine.run(
                    codes_of(graphs[base], inputs), [*graphs[base].inputs, *graphs[base].results()], self._together
                )
                for base, engine in engines.items()
            }
            if explained:
                self._look(stored[self.fine])
            for fine, graph in graphs.items():
                if fine in stored:
                    parts[fine].append(output_values(graph, stored[fine]))
                    continue
                # Only what differs from the base is computed.
                same, base = shared[fine]
                codes = {name: stored[base][name] for name in same}
                if not same.issuperset(graph.inputs):
                    codes = {**codes_of(graph, inputs), **codes}
                engine = compiled(graph, profile, engines[base])
                parts[fine].append(output_values(graph, engine.run(codes, graph.outputs, self._together)))
                clock.did(1)
        return {
            fine: {name: np.concatenate([part[name] for part in several]) for name in several[0]}
            for fine, several in parts.items()
        }

    def _batches(self) -> list[Inputs]:
        return [self.data.part(at, at + self._together) for at in range(0, self.data.examples, self._together)]

    def _fit(self) -> Outputs:
        """Fits the fine grids to the examples: to the first ones closely; others only widen them."""
        precisions, outputs = self.precisions, []
        first, *others = self._batches()
        for number, inputs in enumerate((first, first, *others)):
            for _ in range(ROUNDS):
                graph = precisions.variant(self.fine)
                codes = self.codes(graph, inputs)
                size = {name: int(np.abs(array.astype(np.int32)).max(initial=0)) for name, array in codes.items()}
                largest = {
                    part: max(size.get(precisions.fine_tensor(name).name, 0) for name in names)
                    for part, names in precisions.tensors_of.items()
                    if not part.weights
                }
                if not precisions.fit(largest, narrower=number == 0):
                    break
            if number > 0:
                self._look_at(graph, codes)
                outputs.append(output_values(graph, codes))
        return {name: np.concatenate([part[name] for part in outputs]) for name in outputs[0]}

    def _look_at(self, graph: Graph, codes: Mapping[str, np.ndarray]) -> None:
        """Records what the network in 16 bits stores."""

    def codes(self, graph: Graph, inputs: Inputs) -> dict[str, np.ndarray]:
        """The codes of all activations of the variant in 16 bits."""
        engine = compiled(graph, self._float_like)
        return engine.run(codes_of(graph, inputs), [*graph.inputs, *graph.results()], self._together)

    # --- why ----------------------------------------------------------------------------------------------------------

    def _look(self, stored: Mapping[str, np.ndarray]) -> None:
        """Records what the fine network stores."""
        for part, names in self.precisions.tensors_of.items():
            for name in names if not part.weights else ():
                fine = self.precisions.fine_tensor(name)
                if fine.name in stored and self.precisions.graph.tensors[name].dtype == "int8":
                    if part not in self._values:
                        self._values[part] = Values(*self._ends(part))
                    self._values[part].add(dequantize(stored[fine.name], fine.quantization))

    def _ends(self, part: Part) -> tuple[float, float, int]:
        names = self.precisions.tensors_of[part]
        for name in (part.layer, *names):
            if name in self.precisions.ends:
                return self.precisions.ends[name]
        tensor = self.precisions.graph.tensors[names[0]]
        scale, zero_point = float(tensor.quantization.scale[0]), int(tensor.quantization.zero_point[0])
        low, high = (scale * (code - zero_point) for code in CODE_RANGES[tensor.dtype])
        return low, high, 8

    def reasons(self, part: Part) -> tuple[str, ...]:
        """Why a part costs what it costs."""
        if not part.weights:
            return self._values[part].reasons() if part in self._values else ()
        graph = self.precisions.graph
        (name,) = self.precisions.tensors_of[part]
        operator = next(
            node for node in graph.operators if name in node.inputs and layer_of(node.outputs[0]) == part.layer
        )
        filter, axis = graph.tensors[name], OPERATORS[operator.kind].filter_axis
        assert filter.data is not None and axis is not None
        input_scale = float(graph.tensors[operator.inputs[0]].quantization.scale[0])
        weights = self.precisions.weights[name]
        return reasons_of_weights(filter.data, filter.quantization.scale, weights, axis, input_scale)


def _same(base: Graph, graph: Graph) -> set[str]:
    """Names of the tensors that two graphs compute identically, from the same objects."""
    makers = {name: operator for operator in base.operators for name in operator.outputs}
    same = {name for name in graph.inputs if base.tensors.get(name) is graph.tensors[name] and name in base.inputs}
    for operator in graph.operators:
        if makers.get(operator.outputs[0]) is not operator:
            continue
        alike = all(base.tensors.get(name) is graph.tensors[name] for name in (*operator.inputs, *operator.outputs))
        if alike and all(name in same or graph.tensors[name].data is not None for name in operator.inputs):
            same.update(operator.outputs)
    return same


def sharing(base: Graph, graph: Graph) -> Graph:
    """A graph with the objects of another one where they say the same."""

    def alike(own: Tensor, other: Tensor) -> bool:
        if own is other:
            return True
        if (own.shape, own.dtype, own.data is None) != (other.shape, other.dtype, other.data is None):
            return False
        grids = (own.quantization, other.quantization)
        fields = [[grid.scale, grid.zero_point, str(grid.axis), grid.dtype] for grid in grids]
        if not all(map(np.array_equal, *fields)):
            return False
        return own.data is None or np.array_equal(own.data, np.asarray(other.data))

    def tensor(own: Tensor) -> Tensor:
        other = base.tensors.get(own.name)
        return other if other is not None and alike(own, other) else own

    makers = {operator.outputs: operator for operator in base.operators}

    def shared(own: Operator) -> Operator:
        other = makers.get(own.outputs)
        if other is None or (own.kind, own.inputs, own.attributes.keys()) != (
            other.kind,
            other.inputs,
            other.attributes.keys(),
        ):
            return own
        same = all(np.array_equal(value, other.attributes[name]) for name, value in own.attributes.items())
        return other if same else own

    tensors = {name: tensor(own) for name, own in graph.tensors.items()}
    return replace(graph, tensors=tensors, operators=tuple(map(shared, graph.operators)))


@dataclass(frozen=True)
class Seen:
    """What the tensors of a grid hold.

    Attributes:
        least, most: the extremes, with zero between them.
        sample: float32 [n], evenly taken.
    """

    least: float
    most: float
    sample: np.ndarray


class Observer(Variants):
    """A candidate in 16 bits and on the device, on a few examples.

    The network in 16 bits is the float network of all candidates that come of this one. Both networks are
    computed layer by layer, and only what later layers read is kept.

    Attributes:
        reference: the candidate that the network in 16 bits is of.
        values: every activation of the network in 16 bits by the graph's tensor name, real numbers, float32; computed
            when it is asked for.
        passed: called when the next layer is looked at.
    """

    def __init__(self, candidate: Candidate, data: Data) -> None:
        self.candidate = candidate.settled()
        precisions = Precisions(candidate)
        graph = precisions.graph
        self._names = [name for name in (*graph.inputs, *graph.results()) if graph.tensors[name].dtype in CODE_RANGES]
        self._seen: dict[str, _Channels] = {}
        bytes_each = sum(math.prod(graph.tensors[name].shape) for name in self._names)
        examples = min(EXAMPLES, data.examples, max(FEWEST, OBSERVED // max(bytes_each, 1)))
        super().__init__(precisions, data.only(np.arange(examples)))
        self.reference = self.candidate
        self.passed: Callable[[], None] = lambda: None
        self._weights = self.precisions.weights
        self._factors: Mapping[str, np.ndarray] = {}
        batches = self._batches()
        self._in_float = _Stream(batches, self._float_like, self._together)
        self._on_device = _Stream(batches, precisions.device, self._together)
        self._variant = precisions.variant(self.fine)
        self.values: Mapping[str, np.ndarray] = _Values(self)

    def scaled(self, candidate: Candidate, factors: Mapping[str, np.ndarray]) -> Observer:
        """What is observed of a candidate that is the same network in real numbers, some of whose tensors hold other
        multiples, channel by channel.

        factors: of the last axis, by the tensor's name.
        """
        observer = copy.copy(self)
        observer.reference, observer._weights = candidate, candidate.fine_weights()
        both = {name: factor * self._factors.get(name, np.float32(1)) for name, factor in factors.items()}
        observer._factors = {**self._factors, **both}
        observer.values = _Values(observer)
        return observer

    def reach(self, name: str) -> np.ndarray:
        """The largest magnitude in each channel, the last axis, of a tensor."""
        seen = self._channels(name)
        return np.maximum(-seen.least, seen.most)

    def seen(self) -> dict[str, Seen]:
        """What the tensors of each grid hold, by its name."""
        paths: dict[str, list[_Channels]] = {}
        for step in self.candidate.plan.stored_steps:
            if step.path in self._seen:
                paths.setdefault(step.grid, []).append(self._channels(step.path))
        ranges = {}
        for grid, parts in paths.items():
            sample = np.concatenate([part.sample.reshape(-1) for part in parts])
            least, most = min(float(part.least.min()) for part in parts), max(float(part.most.max()) for part in parts)
            ranges[grid] = Seen(min(0.0, least), max(0.0, most), sample[:: -(-sample.size // SAMPLE)])
        return ranges

    def layers(self, candidate: Candidate) -> Iterator[tuple[Operator, Places]]:
        """The operators whose filter holds each weight of a step of the candidate's once, and whose input is looked
        at."""
        places = candidate.places()
        for operator in self.precisions.graph.operators:
            place = places.get(operator.inputs[1]) if len(operator.inputs) == 3 else None
            if place is None or place.weights.size != candidate.tensors[place.weight].size:
                continue
            if operator.inputs[0] in self._seen:
                self.passed()
                yield operator, place

    def sums(self, operator: Operator, graph: Graph) -> tuple[np.ndarray, np.ndarray]:
        """The sums of an operator with weights, in the network in 16 bits and on the device: real numbers [n,
        channels], without its fused activation.

        graph: the candidate's current one, whose weights and earlier layers may have changed.
        """
        filter, bias = (graph.tensors[name] for name in operator.inputs[1:])
        kept = self._weights[filter.name]
        assert filter.data is not None and bias.data is not None
        real = bias.data.astype(np.float64) * bias.quantization.scale.astype(np.float64)
        weights = (kept.codes, kept.scale, kept.bias), (filter.data, filter.quantization.scale, real)
        size = 8 * math.prod(graph.tensors[operator.outputs[0]].shape[1:]) * self.data.examples
        every = -(-size // SUMMED)
        sums: list[list[np.ndarray]] = [[], []]
        first = 0
        for parts in zip(*self._operands(operator, graph), strict=True):
            for into, values, own in zip(sums, parts, weights, strict=True):
                if len(chosen := values[-first % every :: every]):
                    into.append(_summed(operator, graph, self._real(operator, graph, chosen, into is sums[0]), *own))
            first += len(parts[0])
        return np.concatenate(sums[0]), np.concatenate(sums[1])

    def operands(self, operator: Operator, graph: Graph, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What meets the weights of an operator in the network in 16 bits and on the device, float32 [groups, rows,
        inputs], in steps of the device's operand from its zero point; some `ROWS` rows, evenly taken, fewer of many
        groups.

        Args:
            graph: the candidate's, whose weights and earlier layers may have changed.
            rows: positions in the filter, [groups, outputs, inputs], see `rows_of`.
        """
        input, filter = (graph.tensors[name] for name in operator.inputs[:2])
        wanted = min(ROWS, max(OPERANDS // (len(rows) * rows.shape[2]), FEWEST))
        per_example = math.prod(graph.tensors[operator.outputs[0]].shape[1:-1])
        every = max(per_example * self.data.examples // wanted, 1) | 1
        met: list[list[np.ndarray]] = [[], []]
        first = 0
        for parts in zip(*self._operands(operator, graph), strict=True):
            for into, codes in zip(met, parts, strict=True):
                values = self._real(operator, graph, codes, into is met[0]) / input.quantization.scale[0]
                if len(filter.shape) == 4:
                    windows = windows_of(values, filter.shape[1:3], operator.attributes, 0)
                    places = math.prod(windows.shape[:3])
                    values = windows[np.unravel_index(np.arange(-first % every, places, every), windows.shape[:3])]
                    groups = values.reshape(*values.shape[:3], len(rows), -1).transpose(3, 0, 1, 2, 4)
                else:
                    groups = values.reshape(1, -1, rows.shape[2])
                    places, groups = groups.shape[1], groups[:, -first % every :: every]
                into.append(groups.reshape(len(rows), -1, rows.shape[2]))
            first += places
        fine, device = (np.concatenate(parts, 1) for parts in met)
        return fine, device

    def _operands(self, operator: Operator, graph: Graph) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The codes of an operator's input in parts of the examples, in the network in 16 bits and on the device."""
        position = next(at for at, own in enumerate(graph.operators) if own.outputs == operator.outputs)
        before = [*graph.inputs, *(name for own in graph.operators[:position] for name in own.outputs)]
        return self._fine_codes(operator.inputs[0], before), self._on_device.codes(graph, operator.inputs[0], position)

    def _fine_codes(self, name: str, before: Collection[str]) -> list[np.ndarray]:
        """before: names in the device's graph of what is computed before it is read."""
        names = {self.precisions.fine_tensor(other).name for other in before}
        made = [at for at, own in enumerate(self._variant.operators) if names.intersection(own.outputs)]
        return self._in_float.codes(self._variant, self.precisions.fine_tensor(name).name, max(made, default=-1) + 1)

    def _real(self, operator: Operator, graph: Graph, codes: np.ndarray, fine: bool) -> np.ndarray:
        name = operator.inputs[0]
        if not fine:
            return dequantize(codes, graph.tensors[name].quantization)
        values = dequantize(codes, self.precisions.fine_tensor(name).quantization)
        return values * self._factors[name] if name in self._factors else values

    def _look_at(self, graph: Graph, codes: Mapping[str, np.ndarray]) -> None:
        parts = -(-self.data.examples // self._together)
        for name in self._names:
            tensor = graph.tensors.get(self.precisions.fine_tensor(name).name)
            if tensor is None or tensor.name not in codes:
                continue
            array = codes[tensor.name]
            rows = array.reshape(-1, array.shape[-1] if array.ndim > 1 else 1)
            least, most = (dequantize(end(rows, 0)[None], tensor.quantization)[0] for end in (np.min, np.max))
            every = -(-rows.size * parts // SAMPLE)
            part = _Channels(least, most, dequantize(rows[::every], tensor.quantization))
            self._seen[name] = part.joined(self._seen[name]) if name in self._seen else part

    def _channels(self, name: str) -> _Channels:
        seen = self._seen[name]
        return seen.scaled(self._factors[name]) if name in self._factors else seen


@dataclass(frozen=True)
class _Channels:
    """What a tensor holds: the extremes of each channel, float32 [channels], and a sample, [n, channels]."""

    least: np.ndarray
    most: np.ndarray
    sample: np.ndarray

    def joined(self, other: _Channels) -> _Channels:
        sample = np.concatenate([other.sample, self.sample])
        return _Channels(np.minimum(self.least, other.least), np.maximum(self.most, other.most), sample)

    def scaled(self, factor: np.ndarray) -> _Channels:
        return _Channels(self.least * factor, self.most * factor, self.sample * factor)


class _Values(Mapping[str, np.ndarray]):
    """What an observer's network in 16 bits holds, as real numbers."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def __getitem__(self, name: str) -> np.ndarray:
        observer = self._observer
        graph = observer.precisions.graph
        if name not in observer._seen:
            raise KeyError(name)
        names = [*graph.inputs, *graph.results()]
        codes = np.concatenate(observer._fine_codes(name, names[: names.index(name) + 1]))
        values = dequantize(codes, observer.precisions.fine_tensor(name).quantization)
        return values * observer._factors[name] if name in observer._factors else values

    def __iter__(self) -> Iterator[str]:
        return iter(self._observer._seen)

    def __len__(self) -> int:
        return len(self._observer._seen)


class _Stream:
    """The codes of a graph's tensors, from the first operators to the last: of what was computed, only what is still
    read is kept. The graph may change meanwhile; what changed is computed again."""

    def __init__(self, batches: Sequence[Inputs], device: str | Profile, together: int) -> None:
        self._batches, self._device, self._together = batches, device, together
        self._graph: Graph | None = None
        self._engine: Compiled | None = None
        self._codes: list[dict[str, np.ndarray]] = [{} for _ in batches]

    def codes(self, graph: Graph, name: str, position: int) -> list[np.ndarray]:
        """The codes of a tensor in parts of the examples. position: of the operator that is next."""
        same = set(graph.tensors)
        if self._graph is None:
            same = set()
        elif graph is not self._graph:
            graph = sharing(self._graph, graph)
            same = _same(self._graph, graph)
        read = {source for operator in graph.operators[position:] for source in operator.inputs}
        made = [*graph.inputs, *(result for operator in graph.operators[:position] for result in operator.outputs)]
        wanted = {*(tensor for tensor in made if tensor in read), name}
        if self._engine is None or graph is not self._graph:
            self._engine = compiled(graph, self._device, self._engine)
        for inputs, codes in zip(self._batches, self._codes, strict=True):
            for tensor in codes.keys() - same:
                del codes[tensor]
            missing = [tensor for tensor in made if tensor in wanted and tensor not in codes]
            if missing:
                known = codes if _follow(missing, codes, graph) else {**codes_of(graph, inputs), **codes}
                codes |= self._engine.run(known, missing, self._together)
            for tensor in codes.keys() - wanted:
                del codes[tensor]
        self._graph = graph
        return [codes[name] for codes in self._codes]


def _follow(tensors: Sequence[str], codes: Mapping[str, np.ndarray], graph: Graph) -> bool:
    """Whether tensors follow from given codes."""
    makers = {name: operator for operator in graph.operators for name in operator.outputs}
    left, passed = [name for name in tensors if name not in codes], set(codes)
    while left:
        name = left.pop()
        if name in graph.inputs:
            return False
        operands = makers[name].inputs if name in makers else ()
        left += [source for source in operands if source not in passed and graph.tensors[source].data is None]
        passed.update(operands)
    return True


def _summed(
    operator: Operator, graph: Graph, values: np.ndarray, codes: np.ndarray, scale: np.ndarray, bias: np.ndarray
) -> np.ndarray:
    """The result of an operator with weights before its activation, [n, channels].

    values: of its operand, real numbers; codes, scale: of its filter; bias: real numbers.
    """
    declaration = OPERATORS[operator.kind]
    assert isinstance(declaration, Weighted)
    shape = [1] * codes.ndim
    shape[declaration.filter_axis] = -1
    filter = codes.astype(np.float32) * scale.astype(np.float32).reshape(shape)
    sums = declaration.wide_sums(values, filter, graph.tensors[operator.outputs[0]], operator.attributes)
    return np.asarray(sums.reshape(-1, sums.shape[-1]) + bias)


def rows_of(operator: Operator, graph: Graph) -> np.ndarray | None:
    """Positions in an operator's flattened filter, int64 [groups, outputs, inputs]; None: its operands are not looked
    at that way."""
    shape, axis = graph.tensors[operator.inputs[1]].shape, OPERATORS[operator.kind].filter_axis
    positions = np.arange(math.prod(shape)).reshape(shape)
    if len(shape) == 2 and axis == 0:
        return positions[None]
    if len(shape) != 4 or not {"dilations", "padding", "strides"} <= set(operator.attributes):
        return None
    channels = graph.tensors[operator.inputs[0]].shape[3]
    if axis == 0:
        groups = channels // shape[3]
        return positions.reshape(groups, shape[0] // groups, -1)
    return positions.reshape(shape[1] * shape[2], channels, -1).transpose(1, 2, 0)
