# SPDX-License-Identifier: Apache-2.0
"""The graph of a .tflite file in float32 as a `Network`: each operator's declaration says which steps it is."""

from __future__ import annotations

from typing import Any

from ....kit.device import ACTIVATIONS, OPERATORS
from ....kit.device.operator import FLOAT, Refusal
from ....kit.device.real import real_numbers
from ....kit.device.tensor import INDICES
from ....kit.display import listed
from ..core.builder import Moving
from ..core.refusals import CaptureError, Refused
from .reader import FileNetwork, Fixed, Reader

# Steps of the activations that operators are fused with.
_FUSED = dict(zip(ACTIVATIONS, ("", "relu", "relu6"), strict=True))


def capture(graph: Any) -> FileNetwork:
    """The network of a `deploy.Graph` in float32, with the file's own axes. What a file's words have no step for is
    refused by the plan, all of it at once.

    Raises:
        CaptureError: the graph keeps something from call to call, or has inputs that are neither real numbers nor
            indices.
    """
    if graph.variables:
        raise CaptureError(f"the file keeps {listed(graph.variables)} from call to call")
    reader = GraphReader(graph)
    for operator in graph.operators:
        reader.read(operator)
    names = {port.tensor: port.name for port in (*graph.signature.inputs, *graph.signature.outputs)}
    return reader.finished(
        {names.get(name, name): reader.items_by_name[name].name for name in graph.inputs},
        {names.get(name, name): reader.items_by_name[name] for name in graph.outputs},
    )


def is_float(graph: Any) -> bool:
    """Whether a graph's inputs are real numbers, and none of its activations is on a grid."""
    computed = [graph.tensors[name] for name in (*graph.inputs, *graph.results())]
    return all(tensor.dtype not in ("int8", "int16") for tensor in computed)


class GraphReader(Reader):
    """Attributes: items_by_name: of the graph's tensors."""

    def __init__(self, graph: Any) -> None:
        super().__init__()
        self.graph = graph
        self.items_by_name: dict[str, Any] = {}
        for name, tensor in graph.tensors.items():
            if tensor.data is not None:
                plain = tensor.quantization is INDICES or tensor.data.dtype.kind == "f"
                data = tensor.data if plain else real_numbers(tensor.data, tensor)
                self.items_by_name[name] = Fixed(name, data)
        for name in graph.inputs:
            tensor = graph.tensors[name]
            if tensor.dtype not in (FLOAT, "int32"):
                raise CaptureError(f"input '{name}' is {tensor.dtype}; networks get float32, or indices")
            self.items_by_name[name] = self.input(f"input:{name}", self.traced(tensor.shape), tensor.dtype)

    def read(self, operator: Any) -> None:
        self.begin(operator.outputs[0], operator.kind)
        try:
            OPERATORS[operator.kind].float_steps(self, operator)
        except (Refusal, Refused) as refused:
            read = [operand for operand in self.operands(operator) if isinstance(operand, Moving)]
            shapes = [self.traced(shape) for shape in self.results(operator)]
            for name, item in zip(
                operator.outputs, self.unsupported(operator.kind, read, shapes, str(refused)), strict=True
            ):
                self.items_by_name[name] = item

    # --- for declarations ---------------------------------------------------------------------------------------------

    def operands(self, operator: Any) -> list[Any]:
        """What an operator reads: values, and what the file holds."""
        return [self.items_by_name[name] for name in operator.inputs]

    def shapes(self, operator: Any) -> list[tuple[int, ...]]:
        """Of the operands, for one example."""
        return [self.graph.tensors[name].shape for name in operator.inputs]

    def results(self, operator: Any) -> list[tuple[int, ...]]:
        """The shapes of the results, for one example."""
        return [self.graph.tensors[name].shape for name in operator.outputs]

    def give(self, operator: Any, item: Any, result: int = 0) -> None:
        """What an operator makes, before its fused activation. result: which one."""
        kind = _FUSED[operator.attributes.get("activation", "NONE")]
        if kind:
            item = self.step(kind, [item], item.shape)
        self.items_by_name[operator.outputs[result]] = item
