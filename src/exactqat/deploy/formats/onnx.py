# SPDX-License-Identifier: Apache-2.0
"""Writes a Graph as an .onnx file in QDQ form.

Every tensor passes through QuantizeLinear and DequantizeLinear, and the operators between them are ONNX's float ones
(opset 21), as each operator's declaration in `exactqat.kit.device` says; runtimes with integer kernels fuse the three.
Inputs and outputs are float32 (indices: integers) with any batch size, and the names and axes of `Graph.signature`. If
the graph was built by hand, they have the graph's names, and tensors of four axes are channels-first. In between,
tensors of four axes are channels-first, the others are ordered as in the graph. The file computes in float, rounding
half to even; the device "onnxruntime-x86" is how onnxruntime does it, and `verify` compares the two.

Activations of 8 bits are uint8 in the file, 128 above the graph's codes, because only those reach onnxruntime's
integer kernels on x86; weights are int8. A fused activation that does not follow from the range of the codes is a Clip
of codes: in float it would keep the operator from these kernels. On x86 without VNNI instructions, onnxruntime adds
products of uint8 and int8 in 16 bits, which can saturate; setting its session option session.x64quantprecision to 1
avoids that.

Needs `pip install 'exactqat[onnx]'`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ...kit.device import OPERATORS
from ...kit.device.arithmetic import bounds
from ...kit.device.as_onnx import SHIFT
from ...kit.device.operator import Attributes, Refusal
from ...kit.device.profile import ONNXRUNTIME_X86
from ...kit.device.tensor import CODE_RANGES, code_range
from ...kit.display import listed, shortened
from ..graph import Graph, Operator, Quantization, Tensor, require_graph
from ..signature import METADATA, Port, Signature
from .tflite import import_deploy, write_whole
from .tflite_metadata import as_properties

OPSET = 21
# A message of the file format: its classes are generated, and have no types.
Proto = Any
T = TypeVar("T")


def write_onnx(graph: Graph, path: str | os.PathLike[str], description: str = "") -> Path:
    """Validates `graph` and writes it to `path`; the same graph always gives the same bytes.

    Inputs and outputs are float32 and have the user's names and axes; ``metadata_props`` contains the signature as JSON
    under "exactqat", and what `with_metadata` added. The codes of every tensor of the graph are called
    ``<name>/codes``. The file is written completely or not at all.
    """
    require_graph(graph)
    return write_whole(Path(path), onnx_bytes(graph, description))


def onnx_bytes(graph: Graph, description: str = "") -> bytes:
    """The content of the .onnx file of `graph`."""
    graph.validate()
    if graph.variables:
        raise Refusal(f"ONNX has no variables, and the graph keeps {listed(graph.variables)} from call to call")
    return _OnnxWriter(graph).finish("; ".join(filter(None, ("exactqat", description))))


def declared_differences(graph: Graph, content: bytes) -> tuple[str, ...]:
    """What a file says of scales, zero points, inputs and outputs that the graph does not say, a sentence each.

    Raises:
        ValueError: the file is damaged.
    """
    onnx = import_deploy("onnx", "onnx")
    own = onnx_bytes(graph)
    if own == content:
        return ()
    try:
        ours, theirs = (onnx.load_model_from_string(file) for file in (own, content))
    except Exception as error:  # noqa: BLE001 - protobuf raises errors of its own
        raise ValueError(f"the file is damaged: {error}") from error
    differences = []

    def words(entries: Iterable[Proto]) -> dict[str, bytes]:
        return {entry.name: entry.SerializeToString(deterministic=True) for entry in entries}

    constants = words(theirs.graph.initializer)
    for key, content in words(ours.graph.initializer).items():
        name, _, word = key.rpartition("/")
        if word in ("scale", "zero_point") and constants.get(key, content) != content:
            differences.append(f"tensor {shortened(name)!r} has another {word.replace('_', ' ')} in the file")
    for side in ("input", "output"):
        own_ends, ends_there = (list(words(getattr(model.graph, side)).items()) for model in (ours, theirs))
        if own_ends != ends_there:
            differences.append(f"the file's {side}s are not the graph's in name, dtype or shape")
    props = [{entry.key: entry.value for entry in model.metadata_props}.get(METADATA) for model in (ours, theirs)]
    if props[0] != props[1]:
        what = "says nothing" if props[1] is None else "says something else"
        differences.append(f"the file's metadata {what} about names and axes of inputs and outputs")
    return tuple(differences)


class _OnnxWriter:
    """Collects nodes and constants; the declarations use it to emit their ONNX form."""

    def __init__(self, graph: Graph) -> None:
        self.ends = ends(graph)
        self.inner = inner = inner_names(graph)

        def renamed(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(inner[name] for name in names)

        self.properties = as_properties(graph.attached)
        self.graph = Graph(
            {inner[name]: replace(tensor, name=inner[name]) for name, tensor in graph.tensors.items()},
            tuple(
                replace(node, inputs=renamed(node.inputs), outputs=renamed(node.outputs)) for node in graph.operators
            ),
            renamed(graph.inputs),
            renamed(graph.outputs),
        )
        self.onnx = import_deploy("onnx", "onnx")
        self.nodes: list[Proto] = []
        self.constants: dict[str, Proto] = {}

    def finish(self, description: str) -> bytes:
        for end in self.ends[0]:
            self.take(end)
        for operator in self.graph.operators:
            output = self.graph.tensors[operator.outputs[0]]
            if {output.dtype, self.graph.tensors[operator.inputs[0]].dtype}.isdisjoint(CODE_RANGES):
                raise Refusal(f"{operator.kind} of {output.dtype} has no form in ONNX here, only that of codes has")
            OPERATORS[operator.kind].onnx(self, operator, output)
        for end in self.ends[1]:
            self.give(end)
        helper = self.onnx.helper
        body = helper.make_graph(
            self.nodes,
            "main",
            *([self.description(end) for end in side] for side in self.ends),
            list(self.constants.values()),
        )
        opset = [helper.make_opsetid("", OPSET)]
        # The oldest file format that holds the opset, so that older readers take it.
        model = helper.make_model(
            body, opset_imports=opset, producer_name="exactqat", doc_string=description, ir_version=10
        )
        ports = (tuple(end.port for end in side) for side in self.ends)
        helper.set_model_props(model, {METADATA: Signature(*ports).as_json(), **self.properties})
        self.onnx.checker.check_model(model, full_check=True)
        return bytes(model.SerializeToString(deterministic=True))

    def description(self, end: End) -> Proto:
        """For the list of inputs or outputs: real numbers, but indices in their own dtype."""
        tensor = self.graph.tensors[self.inner[end.tensor]]
        dtype = self.onnx.TensorProto.FLOAT
        if tensor.dtype not in CODE_RANGES:
            dtype = self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype))
        # Rows that the network folds into the batch make it a multiple of the inputs' batch.
        batch = "batch" if tensor.shape[0] == 1 else f"{tensor.shape[0]}*batch"
        shape = [tensor.shape[axis] if axis else batch for axis in end.order]
        return self.onnx.helper.make_tensor_value_info(end.name, dtype, shape)

    def take(self, end: End) -> None:
        """An input: real numbers in the user's axes."""
        name, real = self.inner[end.tensor], end.name
        if self.graph.tensors[name].dtype not in CODE_RANGES:
            self.node("Identity", [real], f"{name}/stored")
            return
        quantization = self.graph.tensors[name].quantization
        if end.port.limits is not None:
            scale, zero_point = quantization.scale[0], quantization.zero_point[0]
            ends = [np.float32((limit - zero_point) * scale) for limit in end.port.limits]
            limits = [self.constant(f"{name}/{word}", bound) for word, bound in zip(("low", "high"), ends, strict=True)]
            real = self.node("Clip", [real, *limits], f"{name}/clipped")
        inner = channels_first(range(len(end.order)))
        if end.order == inner:
            self.store(name, real, quantization, f"{name}/stored")
            return
        parameters = self.parameters(name, quantization)
        integers = self.node("QuantizeLinear", [real, *parameters], f"{name}/given")
        turn = [end.order.index(axis) for axis in inner]
        codes = self.node("Transpose", [integers], f"{name}/codes", perm=turn)
        self.node("DequantizeLinear", [codes, *parameters], f"{name}/stored")

    def give(self, end: End) -> None:
        """An output in the user's axes and under the user's name."""
        name = self.inner[end.tensor]
        inner = channels_first(range(len(end.order)))
        if end.order == inner:
            if self.real(name) != end.name:
                self.node("Identity", [self.real(name)], end.name)
            return
        tensor, turn = self.graph.tensors[name], [inner.index(axis) for axis in end.order]
        if tensor.dtype not in CODE_RANGES:
            self.node("Transpose", [name], end.name, perm=turn)
            return
        codes = self.node("Transpose", [f"{name}/codes"], f"{end.name}/turned", perm=turn)
        self.node("DequantizeLinear", [codes, *self.parameters(name, tensor.quantization)], end.name)

    def constant(self, name: str, values: npt.ArrayLike) -> str:
        self.constants[name] = self.onnx.numpy_helper.from_array(np.asarray(values, order="C"), name)
        return name

    def node(self, kind: str, inputs: list[str], output: str, **attributes: object) -> str:
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def parameters(self, name: str, quantization: Quantization, dtype: npt.DTypeLike | None = None) -> list[str]:
        """Scale and zero point as constants; for weights and biases in the named dtype."""
        zero_point = quantization.zero_point.astype(quantization.dtype if dtype is None else dtype)
        zero_point = self.as_stored(zero_point) if dtype is None else zero_point
        one = 0 if quantization.axis is None else slice(None)
        scale = self.constant(f"{name}/scale", quantization.scale[one])
        return [scale, self.constant(f"{name}/zero_point", zero_point[one])]

    @staticmethod
    def as_stored(codes: np.ndarray) -> np.ndarray:
        """Codes of activations as stored in the file."""
        return (codes.astype(np.int16) + SHIFT).astype(np.uint8) if codes.dtype == np.int8 else codes

    def store(self, name: str, real: str, quantization: Quantization, result: str) -> str:
        """Real numbers to codes, and the values these represent."""
        codes = self.node("QuantizeLinear", [real, *self.parameters(name, quantization)], f"{name}/codes")
        return self.dequantize(codes, quantization, result, name)

    def dequantize(self, codes: str, quantization: Quantization, result: str, name: str = "") -> str:
        """The values that an activation's codes represent; name: of its parameters."""
        return self.node("DequantizeLinear", [codes, *self.parameters(name or result, quantization)], result)

    def quantize(self, real: str, output: Tensor, attributes: Attributes, codes: str) -> str:
        """Codes of an operator's result within its fused activation, whatever their order of axes."""
        parameters = self.parameters(output.name, output.quantization)
        if output.dtype != "int8":
            activation = attributes.get("activation", "NONE")
            if activation == "RELU":
                real = self.node("Relu", [real], f"{output.name}/activated")
            elif activation == "RELU6":
                ends = [self.constant(name, np.float32(value)) for name, value in (("zero", 0), ("six", 6))]
                real = self.node("Clip", [real, *ends], f"{output.name}/activated")
            return self.node("QuantizeLinear", [real, *parameters], codes)
        limits = bounds(output, attributes, ONNXRUNTIME_X86)
        if limits == code_range(output):
            return self.node("QuantizeLinear", [real, *parameters], codes)
        stored = self.node("QuantizeLinear", [real, *parameters], f"{output.name}/unclipped")
        ends = [
            self.constant(f"{output.name}/{word}", self.as_stored(np.array(limit, np.int8)))
            for word, limit in zip(("lowest", "highest"), limits, strict=True)
        ]
        return self.node("Clip", [stored, *ends], codes)

    def stored(self, output: Tensor, computed: str, attributes: Attributes) -> None:
        """An operator's result, its axes in ONNX's order."""
        codes = self.quantize(computed, output, attributes, f"{output.name}/codes")
        self.dequantize(codes, output.quantization, output.name)

    def times_one(self, real: str, output: Tensor) -> str:
        """Unchanged real numbers, for another grid: onnxruntime merges two consecutive grids into one."""
        if "one/stored" not in {node.output[0] for node in self.nodes}:
            one = [self.constant("one/codes", np.uint8(1)), self.constant("one/scale", np.float32(1))]
            self.node("DequantizeLinear", [*one, self.constant("one/zero_point", np.uint8(0))], "one/stored")
        return self.node("Mul", [real, "one/stored"], f"{output.name}/computed")

    def reshaped(self, codes: str, shape: Sequence[int], label: str) -> str:
        """Codes in another shape, in which -1 follows from the batch."""
        return self.node("Reshape", [codes, self.constant(f"{label}/shape", np.array(shape, np.int64))], label)

    def transposed(self, codes: str, permutation: Sequence[int], label: str) -> str:
        """Codes with their axes in another order."""
        if list(permutation) == sorted(permutation):
            return codes
        return self.node("Transpose", [codes], label, perm=list(permutation))

    def real(self, name: str) -> str:
        """The tensor's name in the file as real numbers."""
        return f"{name}/stored" if name in self.graph.inputs else name

    def operands(self, operator: Operator) -> list[str]:
        """The activations among the operands, as real numbers."""
        return [self.real(name) for name in operator.inputs if self.graph.tensors[name].data is None]

    def aligned(self, operator: Operator, rank: int) -> list[str]:
        """All operands as real numbers, constants with their axes aligned to those of a result of `rank` axes."""
        results = []
        for name in operator.inputs:
            tensor = self.graph.tensors[name]
            if tensor.data is None:
                results.append(self.real(name))
            else:
                data = tensor.data.reshape([1] * (rank - tensor.data.ndim) + list(tensor.data.shape))
                results.append(self.dequantized(tensor, data.transpose(self.order(rank)), None))
        return results

    def dequantized(self, tensor: Tensor, data: np.ndarray, axis: int | None, weights: bool = False) -> str:
        """A constant as real numbers; `axis` is that of its channels in `data`. weights: it keeps its dtype, unlike an
        operand that could be an activation."""
        if tensor.name not in {node.output[0] for node in self.nodes}:
            if data.dtype == np.int64:
                # ONNX dequantizes up to 32 bits; float32 also holds the values these represent.
                real = data * tensor.quantization.scale.astype(np.float64)
                return self.constant(tensor.name, real.astype(np.float32))
            codes = self.constant(f"{tensor.name}/codes", data if weights else self.as_stored(data))
            own = data.dtype.type if weights or data.dtype != np.int8 else None
            parameters = self.parameters(tensor.name, tensor.quantization, own)
            attributes = {} if axis is None else {"axis": axis}
            self.node("DequantizeLinear", [codes, *parameters], tensor.name, **attributes)
        return tensor.name

    def result(self, operator: Operator, output: Tensor, computed: str) -> None:
        """The fused activation, then the codes of the result."""
        self.stored(output, computed, operator.attributes)

    def computed(self, operator: Operator, output: Tensor, kind: str, inputs: list[str], **attributes: Any) -> None:
        """The result of one node."""
        self.result(operator, output, self.node(kind, inputs, f"{output.name}/computed", **attributes))

    def store_indices(self, output: Tensor, computed: str) -> None:
        """Plain integers, ordered as in the graph."""
        dtype = self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(output.dtype))
        if len(output.shape) == 4:
            computed = self.node("Transpose", [computed], f"{output.name}/turned", perm=[0, 3, 1, 2])
        codes = self.node("Cast", [computed], f"{output.name}/codes", to=dtype)
        self.node("Identity", [codes], output.name)

    def order(self, rank: int) -> tuple[int, ...]:
        """The graph's axis that each of ONNX's axes holds."""
        return channels_first(tuple(range(rank)))

    def axis(self, axis: int, rank: int) -> int:
        """The position of one of the graph's axes in ONNX."""
        return self.order(rank).index(axis)

    def in_order(self, entries: Iterable[T]) -> tuple[T, ...]:
        """One entry for each of the graph's axes, in ONNX's order."""
        return channels_first(tuple(entries))

    def codes_in_graph_order(self, name: str, label: str) -> str:
        """The codes of a tensor with its axes as in the graph."""
        codes, rank = f"{name}/codes", len(self.graph.tensors[name].shape)
        return self.node("Transpose", [codes], f"{label}/codes", perm=[0, 2, 3, 1]) if rank == 4 else codes

    def in_graph_order(self, name: str, label: str) -> str:
        """A tensor as real numbers with its axes as in the graph.

        Codes are moved, not real numbers: runtimes that move a Transpose of real numbers lose zero points in doing so.
        """
        if len(self.graph.tensors[name].shape) != 4:
            return self.real(name)
        parameters = self.parameters(name, self.graph.tensors[name].quantization)
        return self.node("DequantizeLinear", [self.codes_in_graph_order(name, label), *parameters], label)

    def result_in_graph_order(self, operator: Operator, output: Tensor, computed: str) -> None:
        """As `result`, for values with their axes as in the graph."""
        if len(output.shape) != 4:
            self.result(operator, output, computed)
            return
        self.codes_to_result(output, self.quantize(computed, output, operator.attributes, f"{output.name}/unturned"))

    def codes_to_result(self, output: Tensor, codes: str) -> None:
        """Stores codes with their axes as in the graph as the result's."""
        if len(output.shape) == 4:
            codes = self.node("Transpose", [codes], f"{output.name}/codes", perm=[0, 3, 1, 2])
        else:
            codes = self.node("Identity", [codes], f"{output.name}/codes")
        self.node("DequantizeLinear", [codes, *self.parameters(output.name, output.quantization)], output.name)


@dataclass(frozen=True)
class End:
    """An input or output of the file: its name, the graph's tensor, the graph's axis that each of its axes holds, and
    what the file's metadata says about it."""

    name: str
    tensor: str
    order: tuple[int, ...]
    port: Port


def ends(graph: Graph) -> tuple[list[End], list[End]]:
    def end(port: Port) -> End:
        order = channels_first(range(len(port.axes))) if graph.ports is None else port.order
        axes = tuple(port.axes[axis] for axis in order)
        return End(port.name, port.tensor, order, replace(port, tensor=port.name, axes=axes))

    inputs, taken = graph.signature.inputs, {port.name for port in graph.signature.inputs}
    outputs: list[Port] = []
    others = {port.name for port in graph.signature.outputs}
    for port in graph.signature.outputs:
        # No two tensors of the file may have one name; a model may well give an output the name of an input.
        name = port.name
        while name in taken or (name != port.name and name in others):
            name += "_output"
        taken.add(name)
        outputs.append(replace(port, name=name))
    return [end(port) for port in inputs], [end(port) for port in outputs]


def inner_names(graph: Graph) -> dict[str, str]:
    """What the file calls the graph's tensors: as the graph does, unless an input or output has that name."""
    inputs, outputs = ends(graph)
    # Where an input or output of the file is a tensor unchanged, there is nothing to distinguish.
    same = {end.name for end in inputs if end.name == end.tensor}
    same |= {
        end.name for end in outputs if end.name == end.tensor and end.order == channels_first(range(len(end.order)))
    }
    taken = {end.name for end in (*inputs, *outputs)} - same
    names: dict[str, str] = {}
    for name in graph.tensors:
        unique = name
        while unique in taken or (unique != name and unique in graph.tensors):
            unique += "/stored"
        names[name] = unique
    return names


def channels_first(axes: Sequence[T]) -> tuple[T, ...]:
    """Anything that lists four axes as [batch, height, width, channels] in ONNX's order; others stay as they are."""
    return (axes[0], axes[3], axes[1], axes[2]) if len(axes) == 4 else tuple(axes)
