# SPDX-License-Identifier: Apache-2.0
"""Writes a Graph as an .onnx file in QDQ form, and compares it with the simulation on onnxruntime.

Every tensor passes through QuantizeLinear and DequantizeLinear, and the operators between them are ONNX's float ones
(opset 21); runtimes with integer kernels fuse the three. Inputs and outputs are float32, [batch, channels, height,
width] with any batch. What the file means is fixed by float arithmetic, rounded half to even, so results that lie
exactly between two codes may differ from the integers of `simulate`; `verify_onnx` counts them.

Runtimes on x86 without VNNI instructions add products of uint8 and int8 in 16 bits, which can saturate. Activations
are int8 here, for which such kernels use wider sums.

Needs `pip install exactqat[onnx]`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .graph import Graph, Operator, Quantization, Tensor, same_padding
from .simulate import check_inputs, dequantize, simulate, simulate_operator
from .tflite import import_deploy, write_whole
from .verify import Comparison, Report, Tally

OPSET = 21
# Averages that lie exactly between two codes go away from zero on the device. QuantizeLinear rounds them to even;
# a scale this much below 1 carries them over, and is too close to 1 to move an average of fewer than 2**17 values.
BELOW_ONE = np.float32(1 - 2**-20)


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
    ValueError when the file has no tensor for a result of the graph.
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
        operators[operator.outputs[0]].comparison(operator.outputs[0], operator.kind, False)
        for operator in graph.operators
    ]
    whole = tuple(tally.comparison(name, "whole graph", False) for name, tally in outputs.items())
    return Report("onnxruntime", tuple(rows), whole)


class _Writer:
    """Collects nodes and constants; one method for each kind of operator, found by its name."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.onnx: Any = import_deploy("onnx", "onnx")
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def finish(self, description: str) -> bytes:
        for name in self.graph.inputs:
            self.store(name, name, self.graph.tensors[name].quantization, f"{name}/stored")
        for operator in self.graph.operators:
            getattr(self, operator.kind.lower())(operator, self.graph.tensors[operator.outputs[0]])
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
        shape = channels_first(self.graph.tensors[name].shape)
        return self.onnx.helper.make_tensor_value_info(name, self.onnx.TensorProto.FLOAT, ["batch", *shape[1:]])

    def constant(self, name: str, values: Any) -> str:
        self.constants[name] = self.onnx.numpy_helper.from_array(np.asarray(values, order="C"), name)
        return name

    def node(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def parameters(self, name: str, quantization: Quantization, dtype: type = np.int8) -> list[str]:
        scale: Any = quantization.scale
        zero_point: Any = quantization.zero_point.astype(dtype)
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
        return [self.real(name) for name in operator.inputs if self.graph.tensors[name].data is None]

    def result(self, operator: Operator, output: Tensor, computed: str) -> None:
        """The fused activation, then the codes of the result."""
        activation = operator.attributes.get("activation", "NONE")
        if activation == "RELU":
            computed = self.node("Relu", [computed], f"{output.name}/activated")
        elif activation == "RELU6":
            bounds = [self.constant(name, np.float32(value)) for name, value in (("zero", 0), ("six", 6))]
            computed = self.node("Clip", [computed, *bounds], f"{output.name}/activated")
        self.store(output.name, computed, output.quantization, output.name)

    def weights(self, operator: Operator, axes: tuple[int, ...], shape: tuple[int, ...]) -> list[str]:
        """The constants of a layer as real numbers, the filter's axes in ONNX's order."""
        results = []
        for name, order in zip(operator.inputs[1:], (axes, (0,)), strict=True):
            tensor = self.graph.tensors[name]
            assert tensor.data is not None
            data = tensor.data.transpose(order)
            codes = self.constant(f"{name}/codes", data if order == (0,) else data.reshape(shape))
            parameters = self.parameters(name, tensor.quantization, tensor.data.dtype.type)
            axis = {} if tensor.quantization.axis is None else {"axis": 0}
            results.append(self.node("DequantizeLinear", [codes, *parameters], name, **axis))
        return results

    def window(self, operator: Operator, filter_size: tuple[int, ...]) -> dict[str, Any]:
        """ONNX's attributes for filter size, strides, dilations and padding."""
        attributes = operator.attributes
        dilations = attributes.get("dilations", (1, 1))
        window: dict[str, Any] = {"kernel_shape": list(filter_size), "strides": list(attributes["strides"])}
        if tuple(dilations) == (1, 1):
            window["auto_pad"] = "SAME_UPPER" if attributes["padding"] == "SAME" else "VALID"
            return window
        window["dilations"] = list(dilations)
        if attributes["padding"] == "SAME":  # in numbers: runtimes refuse the word beside dilations
            sizes = self.graph.tensors[operator.inputs[0]].shape[1:3]
            axes = zip(sizes, filter_size, attributes["strides"], dilations, strict=True)
            pads = [same_padding(*axis) for axis in axes]
            window["pads"] = [before for before, _ in pads] + [after for _, after in pads]
        return window

    def conv_2d(self, operator: Operator, output: Tensor) -> None:
        outputs, height, width, inputs = self.graph.tensors[operator.inputs[1]].shape
        weights = self.weights(operator, (0, 3, 1, 2), (outputs, inputs, height, width))
        self.convolve(operator, output, weights, (height, width), 1)

    def depthwise_conv_2d(self, operator: Operator, output: Tensor) -> None:
        _, height, width, outputs = self.graph.tensors[operator.inputs[1]].shape
        weights = self.weights(operator, (3, 0, 1, 2), (outputs, 1, height, width))
        self.convolve(operator, output, weights, (height, width), self.graph.tensors[operator.inputs[0]].shape[3])

    def convolve(
        self, operator: Operator, output: Tensor, weights: list[str], filter_size: tuple[int, int], group: int
    ) -> None:
        operands = [*self.operands(operator), *weights]
        window = self.window(operator, filter_size)
        self.result(operator, output, self.node("Conv", operands, f"{output.name}/computed", group=group, **window))

    def fully_connected(self, operator: Operator, output: Tensor) -> None:
        weights = self.weights(operator, (0, 1), self.graph.tensors[operator.inputs[1]].shape)
        operands = [*self.operands(operator), *weights]
        self.result(operator, output, self.node("Gemm", operands, f"{output.name}/computed", transB=1))

    def add(self, operator: Operator, output: Tensor) -> None:
        self.result(operator, output, self.node("Add", self.operands(operator), f"{output.name}/computed"))

    def mul(self, operator: Operator, output: Tensor) -> None:
        self.result(operator, output, self.node("Mul", self.operands(operator), f"{output.name}/computed"))

    def mean(self, operator: Operator, output: Tensor) -> None:
        axes = self.constant("height_and_width", np.array([2, 3]))
        keep = int(operator.attributes["keep_dims"])
        operands = [*self.operands(operator), axes]
        self.result(operator, output, self.node("ReduceMean", operands, f"{output.name}/computed", keepdims=keep))

    def average_pool_2d(self, operator: Operator, output: Tensor) -> None:
        # The codes themselves are averaged: it is in codes that the device rounds away from zero.
        name, window = output.name, self.window(operator, operator.attributes["filter_size"])
        one = [self.constant("one", np.float32(1)), self.constant("no_shift", np.int8(0))]
        below_one = [self.constant("below_one", BELOW_ONE), one[1]]
        counted = self.node("DequantizeLinear", [f"{operator.inputs[0]}/codes", *one], f"{name}/counted")
        averaged = self.node("AveragePool", [counted], f"{name}/computed", count_include_pad=0, **window)
        codes = self.node("QuantizeLinear", [averaged, *below_one], f"{name}/codes")
        self.node("DequantizeLinear", [codes, *self.parameters(name, output.quantization)], name)

    def max_pool_2d(self, operator: Operator, output: Tensor) -> None:
        window = self.window(operator, operator.attributes["filter_size"])
        computed = self.node("MaxPool", self.operands(operator), f"{output.name}/computed", **window)
        self.result(operator, output, computed)

    def pad(self, operator: Operator, output: Tensor) -> None:
        pairs = channels_first(operator.attributes["paddings"])
        amounts = [before for before, _ in pairs] + [after for _, after in pairs]
        operands = [*self.operands(operator), self.constant(f"{output.name}/paddings", np.array(amounts, np.int64))]
        self.result(operator, output, self.node("Pad", operands, f"{output.name}/computed"))

    def concatenation(self, operator: Operator, output: Tensor) -> None:
        axis = channels_first(tuple(range(len(output.shape)))).index(operator.attributes["axis"])
        computed = self.node("Concat", self.operands(operator), f"{output.name}/computed", axis=axis)
        self.result(operator, output, computed)

    def reshape(self, operator: Operator, output: Tensor) -> None:
        # The graph's order of elements is that of channels last.
        name, (real,) = output.name, self.operands(operator)
        before, after = self.graph.tensors[operator.inputs[0]].shape, output.shape
        if len(before) == 4 and before[1:3] != (1, 1):
            real = self.node("Transpose", [real], f"{name}/channels_last", perm=[0, 2, 3, 1])
        turned = len(after) == 4 and after[1:3] != (1, 1)
        shape = np.array([-1, *(after if turned else channels_first(after))[1:]], np.int64)
        real = self.node("Reshape", [real, self.constant(f"{name}/shape", shape)], f"{name}/computed")
        if turned:
            real = self.node("Transpose", [real], f"{name}/channels_first", perm=[0, 3, 1, 2])
        self.result(operator, output, real)

    def quantize(self, operator: Operator, output: Tensor) -> None:
        self.result(operator, output, self.operands(operator)[0])


def channels_first(axes: Any) -> tuple[Any, ...]:
    """Anything that names four axes as [batch, height, width, channels] in ONNX's order; two stay as they are."""
    return (axes[0], axes[3], axes[1], axes[2]) if len(axes) == 4 else tuple(axes)


class _Runtime:
    """onnxruntime on one model: codes in, arrays with channels last out."""

    def __init__(self, graph: Graph, content: bytes, outputs: tuple[str, ...]) -> None:
        runtime = import_deploy("onnxruntime", "onnx")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = 1
        self.graph = graph
        self.outputs = list(outputs)
        self.session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def run(self, batch: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        feeds = {}
        for name, codes in batch.items():
            real = dequantize(codes, self.graph.tensors[name].quantization)
            feeds[name] = np.ascontiguousarray(real.transpose(channels_first(range(real.ndim))))
        results = self.session.run(self.outputs, feeds)
        return [result.transpose(0, 2, 3, 1) if result.ndim == 4 else result for result in results]


def _with_codes_as_outputs(graph: Graph, content: bytes) -> bytes:
    """The same model with the codes of all results as its outputs."""
    onnx: Any = import_deploy("onnx", "onnx")
    model = onnx.load_model_from_string(content)
    present = {output for node in model.graph.node for output in node.output}
    missing = [name for name in graph.results() if f"{name}/codes" not in present]
    if missing:
        raise ValueError(f"the file has no tensors {missing}; was it written from another graph?")
    del model.graph.output[:]
    for name in graph.results():
        shape = channels_first(graph.tensors[name].shape)
        codes = onnx.helper.make_tensor_value_info(f"{name}/codes", onnx.TensorProto.INT8, ["batch", *shape[1:]])
        model.graph.output.append(codes)
    return bytes(model.SerializeToString())
