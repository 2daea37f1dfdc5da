# SPDX-License-Identifier: Apache-2.0
"""What a network stores and reads: values in 16 bits, close to those in real numbers, and codes on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..deploy.codes import codes_of
from ..deploy.graph import Graph, Operator
from ..deploy.lower import Lowering
from ..deploy.simulate import compile as compiled
from ..kit.device import OPERATORS
from ..kit.device.tensor import dequantize
from ..kit.device.weighted import Weighted
from ..kit.planning.plans import PlanInput, PlanStep, WeightNumbers
from .metrics import Data
from .network import Candidate
from .sensitivity import Evaluation, at_two_precisions

# How many values of each grid are kept.
SAMPLE = 2**17
# Examples that statistics are computed from.
EXAMPLES = 256


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


@dataclass(frozen=True)
class Places:
    """Where the weights of an operator of the graph are in the plan.

    Attributes:
        path: of the step.
        weights: int64 in the filter's shape, positions in the flattened weight of the plan.
        channels: int64 [channels], positions among the plan's output channels.
    """

    path: str
    weights: np.ndarray
    channels: np.ndarray


class Observer:
    """A candidate in 16 bits and on the device, on the same examples.

    Only the fine network is computed once; the device's changes with each trial.

    Attributes:
        candidate: with ranges as they are lowered.
        precisions: the graph's variants.
        fine: every activation of the fine network by the graph's tensor name, real numbers.
    """

    def __init__(self, candidate: Candidate, data: Data, examples: int = EXAMPLES) -> None:
        self.candidate = candidate.settled()
        self.data = data.only(np.arange(min(examples, data.examples)))
        self.precisions, device, ends = at_two_precisions(candidate, None)
        evaluation = Evaluation(self.precisions, device, self.data, ends)
        evaluation.fit()
        self._together = evaluation.together
        graph = self.precisions.variant(self.precisions.parts)
        self._fine_graph, self._device = graph, device
        names = {self.precisions.fine_tensor(name).name: name for name in self._activations()}
        self.fine = {
            names[name]: dequantize(codes, graph.tensors[name].quantization)
            for name, codes in self._run(graph, [name for name in graph.tensors if name in names]).items()
        }

    def _activations(self) -> list[str]:
        graph = self.precisions.graph
        return [name for name in (*graph.inputs, *graph.results()) if graph.tensors[name].dtype in ("int8", "int16")]

    def _run(self, graph: Graph, names: list[str]) -> dict[str, np.ndarray]:
        return compiled(graph, self._device).run(codes_of(graph, self.data.inputs), names, self._together)

    def seen(self) -> dict[str, Seen]:
        """What the tensors of each grid hold, by its name."""
        plan, found = self.candidate.plan, {}
        paths: dict[str, list[str]] = {}
        stored: list[PlanInput | PlanStep] = [*plan.inputs, *plan.steps]
        for each in stored:
            if each.path in self.fine:
                paths.setdefault(each.grid, []).append(each.path)
        for grid, names in paths.items():
            values = np.concatenate([self.fine[name].reshape(-1) for name in names])
            step = -(-values.size // SAMPLE)
            least, most = min(0.0, float(values.min())), max(0.0, float(values.max()))
            found[grid] = Seen(least, most, values[::step].astype(np.float32))
        return found

    def before_activation(self, operator: Operator, graph: Graph) -> tuple[np.ndarray, np.ndarray]:
        """The sums of an operator with weights, in the fine network and on the device: real numbers [n, channels],
        without its fused activation.

        graph: the candidate's current one, whose weights and earlier layers may have changed.
        """
        input, filter, bias = (graph.tensors[name] for name in operator.inputs)
        kept = self.precisions.weights[operator.inputs[1]]
        fine = summed(operator, graph, self.fine[operator.inputs[0]], kept.codes, kept.scale, kept.bias)
        codes = self._run(graph, [operator.inputs[0]])[operator.inputs[0]]
        assert filter.data is not None and bias.data is not None
        real = bias.data.astype(np.float64) * bias.quantization.scale.astype(np.float64)
        values = dequantize(codes, input.quantization)
        return fine, summed(operator, graph, values, filter.data, filter.quantization.scale, real)

    def device_operand(self, operator: Operator, graph: Graph) -> np.ndarray:
        """Codes of an operator's activation on the device, without their zero point."""
        name = operator.inputs[0]
        zero_point = int(graph.tensors[name].quantization.zero_point[0])
        return self._run(graph, [name])[name].astype(np.int32) - zero_point


def summed(
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


def places_of(candidate: Candidate) -> dict[str, Places]:
    """Where the weights of the graph's operators are in the plan, by the name of their filter.

    The plan is lowered with digits of the positions in place of codes.
    """
    plan, numbers = candidate.plan, candidate.numbers()
    sizes = [each.codes.size for each in numbers.weights.values()]
    digits, graphs = max(1, int(np.ceil(np.log(max(sizes, default=1) + 1) / np.log(255)))), []
    for digit in range(digits):
        weights = {}
        for path, given in numbers.weights.items():
            step = next(each for each in plan.steps if each.path == path)
            assert step.weights is not None
            position = np.arange(given.codes.size).reshape(given.codes.shape) // 255**digit % 255 - 127
            channels = np.arange(given.codes.shape[step.weights.channel_axis])
            weights[path] = WeightNumbers(position, given.scale, channels.astype(np.float64))
        graphs.append(Lowering(plan, replace(numbers, weights=weights)).run(validated=False))
    found: dict[str, Places] = {}
    paths = sorted(numbers.weights, key=len, reverse=True)
    for operator in graphs[0].operators:
        if len(operator.inputs) != 3 or not operator.inputs[1].endswith("/filter"):
            continue
        name = operator.inputs[1]
        path = next((each for each in paths if name.startswith(each)), "")
        if not path:
            continue
        parts = [np.asarray(graph.tensors[name].data, np.int64) + 127 for graph in graphs]
        if parts[0].size != numbers.weights[path].codes.size:
            continue
        places = np.sum([part * 255**digit for digit, part in enumerate(parts)], axis=0)
        channels = np.asarray(graphs[0].tensors[operator.inputs[2]].data, np.int64)
        found[name] = Places(path, places, channels)
    return found


__all__ = ["Observer", "Places", "Seen", "places_of", "summed"]
