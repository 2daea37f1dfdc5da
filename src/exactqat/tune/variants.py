# SPDX-License-Identifier: Apache-2.0
"""Networks with some parts in 16 bits and the others in the device's, on the same examples: outputs, and what is stored
within."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from ..deploy.codes import codes_of, output_values
from ..deploy.graph import Graph, Operator
from ..deploy.simulate import compile as compiled
from ..kit.device import OPERATORS
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
MEMORY, TOGETHER = 2**28, 64
# Rounds in which the fine grids are fitted to the data.
ROUNDS = 5
# How many values of each grid are kept, and rows of operands of each layer.
SAMPLE, ROWS = 2**17, 2**13
# The most examples that statistics are computed from, and bytes of their tensors; the fewest, whatever their size.
EXAMPLES, OBSERVED, FEWEST = 256, 2**29, 16
# Bytes of the sums of one layer that are looked at.
SUMMED = 2**26

# The parts that are fine.
Fine = frozenset[Part]
Outputs = dict[str, np.ndarray]


class Variants:
    """What variants have in common with the network on the device, or with the fine one, is computed once.

    Attributes:
        precisions: the network's; its fine grids fit the data.
        coarse, fine: the variants with everything on the device, and with everything in 16 bits.
    """

    def __init__(self, precisions: Precisions, data: Data) -> None:
        self.precisions, self.data = precisions, data
        self.coarse: Fine = frozenset()
        self.fine: Fine = frozenset(precisions.parts)
        self._values: dict[Part, Values] = {}
        graph = precisions.graph
        bytes_each = sum(4 * math.prod(graph.tensors[name].shape) for name in (*graph.inputs, *graph.results()))
        self._together = max(1, min(TOGETHER, MEMORY // max(bytes_each, 1)))
        self._fit()

    def outputs(self, variants: Iterable[Fine], progress: Progress | bool | None = False) -> dict[Fine, Outputs]:
        """The outputs of each variant and of both bases, in real numbers."""
        bases = (self.coarse, self.fine)
        graphs = {fine: self.precisions.variant(fine) for fine in dict.fromkeys((*bases, *variants))}
        engines = {base: compiled(graphs[base], self.precisions.device) for base in bases}
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
                engine = compiled(graph, self.precisions.device, engines[base])
                parts[fine].append(output_values(graph, engine.run(codes, graph.outputs, self._together)))
                clock.did(1)
        return {
            fine: {name: np.concatenate([part[name] for part in several]) for name in several[0]}
            for fine, several in parts.items()
        }

    def _batches(self) -> list[Inputs]:
        return [self.data.part(at, at + self._together) for at in range(0, self.data.examples, self._together)]

    def _fit(self) -> None:
        """Fits the fine grids to the examples: to the first ones closely; others only widen them."""
        precisions = self.precisions
        for number, inputs in enumerate(self._batches()):
            for _ in range(ROUNDS):
                codes = self.codes(precisions.variant(self.fine), inputs=inputs)
                size = {name: int(np.abs(array.astype(np.int32)).max(initial=0)) for name, array in codes.items()}
                largest = {
                    part: max(size.get(precisions.fine_tensor(name).name, 0) for name in names)
                    for part, names in precisions.tensors_of.items()
                    if not part.weights
                }
                if not precisions.fit(largest, narrower=number == 0):
                    break

    def codes(self, graph: Graph, names: Collection[str] = (), inputs: Inputs | None = None) -> dict[str, np.ndarray]:
        """The codes of tensors of a variant, by default all activations, for some inputs, by default all."""
        wanted = list(names or (*graph.inputs, *graph.results()))
        codes = codes_of(graph, self.data.inputs if inputs is None else inputs)
        return compiled(graph, self.precisions.device).run(codes, wanted, self._together)

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


def fine_outputs(network: Candidate, data: Data) -> Outputs:
    """The float network's outputs, from 16 bits."""
    variants = Variants(Precisions(network), data)
    graph = variants.precisions.variant(variants.fine)
    return output_values(graph, variants.codes(graph, graph.outputs))


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

    The fine network is computed once, and stands for the float network of all candidates that come of this one. The
    device's changes with each trial; what a trial leaves as it was is not computed again.

    Attributes:
        reference: the candidate that the fine network is of.
        values: every activation of the fine network by the graph's tensor name, real numbers, float32.
    """

    def __init__(self, candidate: Candidate, data: Data) -> None:
        self.candidate = candidate.settled()
        precisions = Precisions(candidate)
        graph = precisions.graph
        names = [name for name in (*graph.inputs, *graph.results()) if graph.tensors[name].dtype in CODE_RANGES]
        bytes_each = sum(2 * math.prod(graph.tensors[name].shape) for name in names)
        examples = min(EXAMPLES, data.examples, max(FEWEST, OBSERVED // max(bytes_each, 1)))
        super().__init__(precisions, data.only(np.arange(examples)))
        fine = {name: self.precisions.fine_tensor(name) for name in names}
        codes = self.codes(self.precisions.variant(self.fine))
        self.values: Mapping[str, np.ndarray] = _Dequantized(
            {name: (codes[tensor.name], tensor) for name, tensor in fine.items() if tensor.name in codes}, {}
        )
        self.reference = self.candidate
        self._weights = self.precisions.weights
        self._engine: Compiled | None = None
        self._device: tuple[Graph, dict[str, np.ndarray]] = (graph, {})

    def scaled(self, candidate: Candidate, factors: Mapping[str, np.ndarray]) -> Observer:
        """What is observed of a candidate that is the same network in real numbers, some of whose tensors hold other
        multiples, channel by channel.

        factors: of the last axis, by the tensor's name.
        """
        observer = copy.copy(self)
        observer.reference, observer._weights = candidate, candidate.fine_weights()
        observer.values = cast(_Dequantized, self.values).scaled(factors)
        return observer

    def seen(self) -> dict[str, Seen]:
        """What the tensors of each grid hold, by its name."""
        ranges: dict[str, Seen] = {}
        paths: dict[str, list[str]] = {}
        for step in self.candidate.plan.stored_steps:
            if step.path in self.values:
                paths.setdefault(step.grid, []).append(step.path)
        for grid, names in paths.items():
            values = np.concatenate([self.values[name].reshape(-1) for name in names])
            least, most = min(0.0, float(values.min())), max(0.0, float(values.max()))
            ranges[grid] = Seen(least, most, values[:: -(-values.size // SAMPLE)].astype(np.float32))
        return ranges

    def layers(self, candidate: Candidate) -> Iterator[tuple[Operator, Places]]:
        """The operators whose filter holds each weight of a step of the candidate's once."""
        places = candidate.places()
        for operator in self.precisions.graph.operators:
            place = places.get(operator.inputs[1]) if len(operator.inputs) == 3 else None
            if place is not None and place.weights.size == candidate.tensors[place.weight].size:
                yield operator, place

    def sums(self, operator: Operator, graph: Graph) -> tuple[np.ndarray, np.ndarray]:
        """The sums of an operator with weights, in the fine network and on the device: real numbers [n, channels],
        without its fused activation.

        graph: the candidate's current one, whose weights and earlier layers may have changed.
        """
        input, filter, bias = (graph.tensors[name] for name in operator.inputs)
        size = 8 * math.prod(graph.tensors[operator.outputs[0]].shape[1:]) * len(self.values[input.name])
        every = slice(None, None, -(-size // SUMMED))
        kept = self._weights[filter.name]
        fine = _summed(operator, graph, self.values[input.name][every], kept.codes, kept.scale, kept.bias)
        values = dequantize(self.device_codes(graph, input.name)[every], input.quantization)
        assert filter.data is not None and bias.data is not None
        real = bias.data.astype(np.float64) * bias.quantization.scale.astype(np.float64)
        return fine, _summed(operator, graph, values, filter.data, filter.quantization.scale, real)

    def device_codes(self, graph: Graph, name: str) -> np.ndarray:
        """The codes of a tensor on the device. graph: a candidate's; what it has in common with the one before is kept
        from there."""
        before, stored = self._device
        graph = sharing(before, graph)
        same = _same(before, graph)
        codes = {tensor: array for tensor, array in stored.items() if tensor in same}
        if name not in codes:
            if not codes.keys() >= set(graph.inputs):
                codes = {**codes_of(graph, self.data.inputs), **codes}
            order = [*graph.inputs, *graph.results()]
            wanted = [tensor for tensor in order[: order.index(name) + 1] if tensor not in codes]
            self._engine = compiled(graph, self.precisions.device, self._engine)
            codes |= self._engine.run(codes, wanted, self._together)
        self._device = graph, codes
        return codes[name]

    def operands(self, operator: Operator, graph: Graph, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What meets the weights of an operator in the fine network and on the device, float32 [groups, rows, inputs],
        in steps of the device's operand from its zero point; some `ROWS` rows, evenly taken.

        Args:
            graph: the candidate's, whose weights and earlier layers may have changed.
            rows: positions in the filter, [groups, outputs, inputs], see `rows_of`.
        """
        input, filter = (graph.tensors[name] for name in operator.inputs[:2])
        scale, zero_point = input.quantization.scale[0], int(input.quantization.zero_point[0])
        device = self.device_codes(graph, input.name).astype(np.float32) - np.float32(zero_point)
        met = []
        for values in (self.values[input.name] / scale, device):
            if len(filter.shape) == 4:
                windows = windows_of(values, filter.shape[1:3], operator.attributes, 0)
                places = math.prod(windows.shape[:3])
                chosen = np.unravel_index(np.arange(0, places, places // ROWS | 1), windows.shape[:3])
                values = windows[chosen]
            groups = np.split(values, len(rows), -1)
            parts = [group.reshape(-1, rows.shape[2]) for group in groups]
            met.append(np.stack([part[:: len(part) // ROWS | 1] for part in parts]))
        return met[0], met[1]


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


class _Dequantized(Mapping[str, np.ndarray]):
    """Codes as real numbers, made when they are asked for. factors: of channels, by name."""

    def __init__(self, codes: dict[str, tuple[np.ndarray, Tensor]], factors: Mapping[str, np.ndarray]) -> None:
        self._codes, self._factors = codes, factors

    def __getitem__(self, name: str) -> np.ndarray:
        codes, tensor = self._codes[name]
        values = dequantize(codes, tensor.quantization)
        return values * self._factors[name] if name in self._factors else values

    def __iter__(self) -> Iterator[str]:
        return iter(self._codes)

    def __len__(self) -> int:
        return len(self._codes)

    def scaled(self, factors: Mapping[str, np.ndarray]) -> _Dequantized:
        both = {name: factor * self._factors.get(name, np.float32(1)) for name, factor in factors.items()}
        return _Dequantized(self._codes, {**self._factors, **both})


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
