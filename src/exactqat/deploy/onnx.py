# SPDX-License-Identifier: Apache-2.0
"""Writes a Graph as an .onnx file in QDQ form, and compares it with the simulation on onnxruntime.

Every tensor passes through QuantizeLinear and DequantizeLinear, and the operators between them are ONNX's float ones
(opset 21), as each operator's declaration in `exactqat.device` says; runtimes with integer kernels fuse the three.
Inputs and outputs are float32 (indices: integers) with any batch; tensors of four axes have their channels second, the
others lie as in the graph. What the file means is fixed by float arithmetic, rounded half to even, so results that lie
exactly between two codes may differ from the integers of `simulate`; `verify_onnx` counts them.

Runtimes on x86 without VNNI instructions add products of uint8 and int8 in 16 bits, which can saturate. Activations
are int8 here, for which such kernels use wider sums.

Needs `pip install exactqat[onnx]`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..device import OPERATORS
from ..device.tensor import CODE_RANGES
from .graph import Graph, Operator, Quantization, Tensor
from .simulate import check_inputs, dequantize, simulate, simulate_operator
from .tflite import import_deploy, write_whole
from .trial import RuntimeRefusal
from .verify import Comparison, Report, Tally

OPSET = 21


def write_onnx(graph: Graph, path: str | os.PathLike[str], description: str = "") -> Path:
    """Validates `graph` and writes it to `path`; the same graph always gives the same bytes.

    The file's inputs and outputs have the graph's names, float32, channels first. Their codes, and those of every
    tensor in between, are called ``<name>/codes``. The file appears whole or not at all.
    """
    return write_whole(Path(path), onnx_bytes(graph, description))


def onnx_bytes(graph: Graph, description: str = "") -> bytes:
    """The content of the .onnx file of `graph`."""
    graph.validate()
    return _Writer(graph).finish("; ".join(filter(None, ("exactqat", description))))


def verify_onnx(
    graph: Graph, path: str | os.PathLike[str], x: np.ndarray | Mapping[str, np.ndarray], batch_size: int = 8
) -> Report:
    """Compares the file at `path` on onnxruntime with the simulation of `graph`, as `verify` does for .tflite.

    x: int8 codes [batch, height, width, channels], or one array per input name; the file gets the real numbers that
    they stand for. Nothing is claimed to be exact: the report says how many codes differ, and by how much. Raises
    ValueError when the file has no tensor for a result of the graph, RuntimeRefusal when onnxruntime does not take it.
    """
    inputs = check_inputs(graph, x)
    total = next(iter(inputs.values())).shape[0]
    if total == 0:
        raise ValueError("x holds no images, so nothing would be compared")
    content = Path(path).read_bytes()
    names = graph.results()
    plain = _Runtime(graph, content, graph.outputs)
    opened = _Runtime(graph, _with_codes_as_outputs(graph, content), tuple(f"{name}/codes" for name in names))
    operators = {name: Tally() for name in names}
    outputs = {name: Tally() for name in graph.outputs}
    for start in range(0, total, batch_size):
        batch = {name: codes[start : start + batch_size] for name, codes in inputs.items()}
        device = {**batch, **dict(zip(names, opened.run(batch), strict=True))}
        for operator in graph.operators:
            name = operator.outputs[0]
            operators[name].add(device[name], simulate_operator(graph, operator, device, "xnnpack"))
        end_to_end = simulate(graph, batch)
        for name, real in zip(graph.outputs, plain.run(batch), strict=True):
            quantization = graph.tensors[name].quantization
            codes = np.rint(real / quantization.scale[0]).astype(np.int64) + quantization.zero_point[0]
            outputs[name].add(codes, end_to_end[name])
    rows: list[Comparison] = [
        operators[operator.outputs[0]].comparison(operator.outputs[0], graph.measured_as(operator), False)
        for operator in graph.operators
    ]
    whole = tuple(tally.comparison(name, "whole graph", False) for name, tally in outputs.items())
    return Report("onnxruntime", tuple(rows), whole)


class _Writer:
    """Collects nodes and constants; what declarations say of their form in ONNX, they say to this."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.onnx: Any = import_deploy("onnx", "onnx")
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def finish(self, description: str) -> bytes:
        for name in self.graph.inputs:
            self.store(name, name, self.graph.tensors[name].quantization, f"{name}/stored")
        for operator in self.graph.operators:
            OPERATORS[operator.kind].onnx(self, operator, self.graph.tensors[operator.outputs[0]])
        helper = self.onnx.helper
        body = helper.make_graph(
            self.nodes,
            "main",
            [self.description(name) for name in self.graph.inputs],
            [self.description(name) for name in self.graph.outputs],
            list(self.constants.values()),
        )
        opset = [helper.make_opsetid("", OPSET)]
        # The oldest file format that holds the opset, so that older readers take it.
        model = helper.make_model(
            body, opset_imports=opset, producer_name="exactqat", doc_string=description, ir_version=10
        )
        self.onnx.checker.check_model(model, full_check=True)
        return bytes(model.SerializeToString(deterministic=True))

    def description(self, name: str) -> Any:
        return tensor_description(self.onnx, self.graph.tensors[name], name, self.onnx.TensorProto.FLOAT)

    def constant(self, name: str, values: Any) -> str:
        self.constants[name] = self.onnx.numpy_helper.from_array(np.asarray(values, order="C"), name)
        return name

    def node(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def parameters(self, name: str, quantization: Quantization, dtype: Any = None) -> list[str]:
        scale: Any = quantization.scale
        zero_point: Any = quantization.zero_point.astype(quantization.dtype if dtype is None else dtype)
        if quantization.axis is None:
            scale, zero_point = scale[0], zero_point[0]
        return [self.constant(f"{name}/scale", scale), self.constant(f"{name}/zero_point", zero_point)]

    def store(self, name: str, real: str, quantization: Quantization, result: str) -> str:
        """Real numbers to codes, and what these stand for."""
        parameters = self.parameters(name, quantization)
        codes = self.node("QuantizeLinear", [real, *parameters], f"{name}/codes")
        return self.node("DequantizeLinear", [codes, *parameters], result)

    def real(self, name: str) -> str:
        """The tensor's name in the file as real numbers."""
        return f"{name}/stored" if name in self.graph.inputs else name

    def operands(self, operator: Operator) -> list[str]:
        """The activations among the operands, as real numbers."""
        return [self.real(name) for name in operator.inputs if self.graph.tensors[name].data is None]

    def aligned(self, operator: Operator, rank: int) -> list[str]:
        """All operands as real numbers, constants with their axes where those of a result of `rank` axes lie."""
        results = []
        for name in operator.inputs:
            tensor = self.graph.tensors[name]
            if tensor.data is None:
                results.append(self.real(name))
            else:
                data = tensor.data.reshape([1] * (rank - tensor.data.ndim) + list(tensor.data.shape))
                results.append(self.dequantized(tensor, data.transpose(self.order(rank)), None))
        return results

    def dequantized(self, tensor: Tensor, data: np.ndarray, axis: int | None) -> str:
        """A constant as real numbers; `axis` is that of its channels in `data`."""
        if tensor.name not in {node.output[0] for node in self.nodes}:
            if data.dtype == np.int64:
                # ONNX dequantizes up to 32 bits; what these stand for, float32 holds as well.
                real = data * tensor.quantization.scale.astype(np.float64)
                return self.constant(tensor.name, real.astype(np.float32))
            codes = self.constant(f"{tensor.name}/codes", data)
            parameters = self.parameters(tensor.name, tensor.quantization, data.dtype.type)
            attributes = {} if axis is None else {"axis": axis}
            self.node("DequantizeLinear", [codes, *parameters], tensor.name, **attributes)
        return tensor.name

    def activated(self, operator: Operator, output: Tensor, computed: str) -> str:
        """Behind the fused activation."""
        activation = operator.attributes.get("activation", "NONE")
        if activation == "RELU":
            return self.node("Relu", [computed], f"{output.name}/activated")
        if activation == "RELU6":
            bounds = [self.constant(name, np.float32(value)) for name, value in (("zero", 0), ("six", 6))]
            return self.node("Clip", [computed, *bounds], f"{output.name}/activated")
        return computed

    def result(self, operator: Operator, output: Tensor, computed: str) -> None:
        """The fused activation, then the codes of the result."""
        computed = self.activated(operator, output, computed)
        self.store(output.name, computed, output.quantization, output.name)

    def store_indices(self, output: Tensor, computed: str) -> None:
        """Integers that stand for themselves and lie as in the graph."""
        dtype = self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(output.dtype))
        if len(output.shape) == 4:
            computed = self.node("Transpose", [computed], f"{output.name}/turned", perm=[0, 3, 1, 2])
        codes = self.node("Cast", [computed], f"{output.name}/codes", to=dtype)
        self.node("Identity", [codes], output.name)

    def order(self, rank: int) -> tuple[int, ...]:
        """The graph's axis that each of ONNX's axes holds."""
        return channels_first(tuple(range(rank)))

    def axis(self, axis: int, rank: int) -> int:
        """Where one of the graph's axes lies in ONNX."""
        return self.order(rank).index(axis)

    def in_order(self, entries: Any) -> tuple[Any, ...]:
        """One entry for each of the graph's axes, in ONNX's order."""
        return channels_first(tuple(entries))

    def codes_in_graph_order(self, name: str, label: str) -> str:
        """The codes of a tensor with its axes as in the graph."""
        codes, rank = f"{name}/codes", len(self.graph.tensors[name].shape)
        return self.node("Transpose", [codes], f"{label}/codes", perm=[0, 2, 3, 1]) if rank == 4 else codes

    def in_graph_order(self, name: str, label: str) -> str:
        """A tensor as real numbers with its axes as in the graph.

        Codes are moved, not real numbers: runtimes that move a Transpose of these lose zero points on the way.
        """
        if len(self.graph.tensors[name].shape) != 4:
            return self.real(name)
        parameters = self.parameters(name, self.graph.tensors[name].quantization)
        return self.node("DequantizeLinear", [self.codes_in_graph_order(name, label), *parameters], label)

    def result_in_graph_order(self, operator: Operator, output: Tensor, computed: str) -> None:
        """As `result`, of what lies as in the graph."""
        if len(output.shape) != 4:
            self.result(operator, output, computed)
            return
        parameters = self.parameters(output.name, output.quantization)
        computed = self.activated(operator, output, computed)
        self.codes_to_result(output, self.node("QuantizeLinear", [computed, *parameters], f"{output.name}/unturned"))

    def codes_to_result(self, output: Tensor, codes: str) -> None:
        """Codes that lie as in the graph are the result's."""
        if len(output.shape) == 4:
            codes = self.node("Transpose", [codes], f"{output.name}/codes", perm=[0, 3, 1, 2])
        else:
            codes = self.node("Identity", [codes], f"{output.name}/codes")
        self.node("DequantizeLinear", [codes, *self.parameters(output.name, output.quantization)], output.name)


def channels_first(axes: Any) -> tuple[Any, ...]:
    """Anything that names four axes as [batch, height, width, channels] in ONNX's order; others stay as they are."""
    return (axes[0], axes[3], axes[1], axes[2]) if len(axes) == 4 else tuple(axes)


def tensor_description(onnx: Any, tensor: Tensor, name: str, dtype: int) -> Any:
    """A tensor of the graph for the list of inputs or outputs; indices keep their own type."""
    if tensor.dtype not in CODE_RANGES:
        dtype = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype))
    shape = channels_first(tensor.shape)
    # Rows that the network folds into the batch make it a multiple of the inputs' batch.
    batch = "batch" if shape[0] == 1 else f"{shape[0]}*batch"
    return onnx.helper.make_tensor_value_info(name, dtype, [batch, *shape[1:]])


@contextmanager
def _refusing(doing: str) -> Iterator[None]:
    """Says in one sentence what onnx and onnxruntime, whose errors have no common kind, have against a file."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - parsers of damaged files raise nearly anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RuntimeRefusal(f"{doing}: {reason}") from error


class _Runtime:
    """onnxruntime on one model: codes in, arrays with channels last out."""

    def __init__(self, graph: Graph, content: bytes, outputs: tuple[str, ...]) -> None:
        runtime = import_deploy("onnxruntime", "onnx")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = 1
        self.graph = graph
        self.outputs = list(outputs)
        with _refusing("onnxruntime does not take the file"):
            self.session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def run(self, batch: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        feeds = {}
        for name, codes in batch.items():
            real = dequantize(codes, self.graph.tensors[name].quantization)
            feeds[name] = np.ascontiguousarray(real.transpose(channels_first(range(real.ndim))))
        with _refusing("onnxruntime does not run the file"):
            results = self.session.run(self.outputs, feeds)
        return [result.transpose(0, 2, 3, 1) if result.ndim == 4 else result for result in results]


def _with_codes_as_outputs(graph: Graph, content: bytes) -> bytes:
    """The same model with the codes of all results as its outputs."""
    onnx: Any = import_deploy("onnx", "onnx")
    with _refusing("the file is damaged"):
        model = onnx.load_model_from_string(content)
    present = {output for node in model.graph.node for output in node.output}
    missing = [name for name in graph.results() if f"{name}/codes" not in present]
    if missing:
        raise ValueError(f"the file has no tensors {missing}; was it written from another graph?")
    del model.graph.output[:]
    for name in graph.results():
        stored = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(graph.tensors[name].dtype))
        codes = tensor_description(onnx, graph.tensors[name], f"{name}/codes", stored)
        model.graph.output.append(codes)
    return bytes(model.SerializeToString())
