# SPDX-License-Identifier: Apache-2.0
"""Networks with some parts in 16 bits and the others in the device's, on the same examples: outputs, and what is stored
within."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..deploy.codes import codes_of, output_values
from ..deploy.graph import Graph, Operator
from ..deploy.simulate import compile as compiled
from ..kit.device import OPERATORS
from ..kit.device.tensor import CODE_RANGES, dequantize
from ..kit.device.weighted import Weighted
from ..kit.progress import Clock, Progress
from .metrics import Data, Inputs
from .network import Candidate, Places
from .precisions import Part, Precisions, layer_of
from .reasons import Values, reasons_of_weights

# Bytes that the tensors of one part of the examples may take, and the most examples in it.
MEMORY, TOGETHER = 2**28, 64
# Rounds in which the fine grids are fitted to the data.
ROUNDS = 5
# How many values of each grid are kept, and examples that statistics are computed from.
SAMPLE, EXAMPLES = 2**17, 256

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
    """Names of the tensors that two graphs compute identically."""
    makers = {name: operator for operator in base.operators for name in operator.outputs}
    same = {name for name in graph.inputs if base.tensors.get(name) is graph.tensors[name] and name in base.inputs}
    for operator in graph.operators:
        if makers.get(operator.outputs[0]) is not operator:
            continue
        alike = all(base.tensors.get(name) is graph.tensors[name] for name in (*operator.inputs, *operator.outputs))
        if alike and all(name in same or graph.tensors[name].data is not None for name in operator.inputs):
            same.update(operator.outputs)
    return same


def fine_outputs(network: Candidate, data: Data) -> Outputs:
    """The float network's outputs, from 16 bits."""
    variants = Variants(Precisions(network), data)
    return variants.outputs([])[variants.fine]


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

    Only the fine network is computed once; the device's changes with each trial.

    Attributes:
        candidate: with ranges as they are lowered.
        values: every activation of the fine network by the graph's tensor name, real numbers.
    """

    def __init__(self, candidate: Candidate, data: Data, examples: int = EXAMPLES) -> None:
        self.candidate = candidate.settled()
        super().__init__(Precisions(candidate), data.only(np.arange(min(examples, data.examples))))
        graph = self.precisions.graph
        names = [name for name in (*graph.inputs, *graph.results()) if graph.tensors[name].dtype in CODE_RANGES]
        fine = {name: self.precisions.fine_tensor(name) for name in names}
        codes = self.codes(self.precisions.variant(self.fine))
        self.values = {
            name: dequantize(codes[tensor.name], tensor.quantization)
            for name, tensor in fine.items()
            if tensor.name in codes
        }

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
        kept = self.precisions.weights[operator.inputs[1]]
        fine = _summed(operator, graph, self.values[operator.inputs[0]], kept.codes, kept.scale, kept.bias)
        values = dequantize(self.codes(graph, [input.name])[input.name], input.quantization)
        assert filter.data is not None and bias.data is not None
        real = bias.data.astype(np.float64) * bias.quantization.scale.astype(np.float64)
        return fine, _summed(operator, graph, values, filter.data, filter.quantization.scale, real)


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
    filter = codes.astype(np.float64) * scale.astype(np.float64).reshape(shape)
    output = graph.tensors[operator.outputs[0]]
    sums = declaration.wide_sums(values.astype(np.float64), filter, output, operator.attributes)
    return np.asarray(sums.reshape(-1, sums.shape[-1]) + bias)
