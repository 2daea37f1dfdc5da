# SPDX-License-Identifier: Apache-2.0
"""Runs .tflite files on the TOSA reference model, which Arm's `tosa-tools` brings: what `device="tosa"` was found from.

    python -m venv ENVIRONMENT && ENVIRONMENT/bin/pip install tosa-tools==2026.8.0
    python tests/campaigns/identify.py --devices tosa --tosa ENVIRONMENT --write src/exactqat/kit/device/tosa.json

The package pins NumPy, so it has an environment of its own. TOSA has no operators with scales: an operator of
TensorFlow Lite becomes several of TOSA's, in the manner of TensorFlow's own passes from `tfl` to `tosa`: sums of
products in int32, then RESCALE with double rounding; operands of ADD are brought to 20 bits more with single rounding;
functions are TABLEs.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _tests_folder  # noqa: F401
import numpy as np

from exactqat.deploy import Graph, RuntimeRefusal, Tensor
from exactqat.deploy.formats.read_tflite import read_content
from exactqat.deploy.runtimes import emulated_runtime
from exactqat.kit.device.arithmetic import bounds, fixed_point, same_padding

INT8, INT32 = "int8", "int32"
SINGLE, DOUBLE = 1, 3  # RoundingMode
ACCUMULATOR, PROPAGATE = 5, 1  # DType.INT32; NanPropagationMode
EXTRA_BITS = 20  # of operands of ADD
Numbers = Sequence[int]


@dataclass
class Writer:
    """A TOSA graph, operation by operation; see `tosa_process`."""

    graph: Graph
    tensors: dict[str, tuple[list[int], str]] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    shapes: dict[str, list[int]] = field(default_factory=dict)
    operations: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in self.graph.inputs:
            self.tensors[name] = list(self.graph.tensors[name].shape), INT8

    def add(self, kind: str, inputs: Sequence[str], shape: Numbers, *attributes: Any, dtype: str = INT8,
            name: str = "") -> str:  # fmt: skip
        name = name or f"tosa/{len(self.operations)}"
        self.tensors[name] = [int(size) for size in shape], dtype
        self.operations.append([kind, list(inputs), name, list(attributes)])
        return name

    def constant(self, values: Any, dtype: str) -> str:
        array, name = np.asarray(values, np.dtype(dtype)), f"tosa/constant/{len(self.constants)}"
        array = array.reshape(array.shape or (1,))
        self.constants[name], self.tensors[name] = array, (list(array.shape), dtype)
        return name

    def sizes(self, numbers: Numbers) -> str:
        name = f"tosa/shape/{len(self.shapes)}"
        self.shapes[name] = [int(number) for number in numbers]
        return name

    def operand(self, tensor: Tensor, rank: int | None = None) -> str:
        """The tensor, with as many axes in front as make up the rank."""
        name = tensor.name if tensor.data is None else self.constant(tensor.data, INT8)
        if rank in (None, len(tensor.shape)):
            return name
        return self.reshape(name, [*[1] * (rank - len(tensor.shape)), *tensor.shape])

    def reshape(self, name: str, shape: Numbers, dtype: str = INT8) -> str:
        return self.add("RESHAPE", [name, self.sizes(shape)], shape, dtype=dtype)

    def rescale(
        self, name: str, factors: Any, zero_points: tuple[int, int], dtypes: tuple[str, str], rounding: int
    ) -> str:
        """Codes times a factor, or one for each channel."""
        significands, exponents = fixed_point(np.atleast_1d(np.asarray(factors, np.float64)))
        shifts = 31 - exponents
        over = np.minimum(np.maximum(shifts - 62, 0), 31)
        operands = [
            name,
            self.constant(significands >> over, INT32),
            self.constant(shifts - over, INT8),
            *(self.constant([zero], dtype) for zero, dtype in zip(zero_points, dtypes, strict=True)),
        ]
        if min(shifts) < 2:
            raise RuntimeRefusal("a factor above 2**29")
        per_channel = np.ndim(factors) > 0
        shape, (_, dtype) = self.tensors[name][0], dtypes
        return self.add("RESCALE", operands, shape, True, rounding, per_channel, False, False, dtype=dtype)

    def windowed(self, x: Tensor, window: Numbers, attributes: Mapping[str, Any]) -> tuple[str, list[int]]:
        """The operand of a sliding window and its padding. TOSA's windows meet the operand's end, so what TensorFlow
        Lite's leave out there is cut off."""
        pads, sizes, name = [], list(x.shape), self.operand(x)
        dilations = attributes.get("dilations", (1, 1))
        for axis, (size, stride, gap) in enumerate(zip(window, attributes["strides"], dilations, strict=True), 1):
            before, after = (0, 0)
            if attributes["padding"] == "SAME":
                before, after = same_padding(x.shape[axis], size, stride, gap)
            rest = (x.shape[axis] + before + after - (size - 1) * gap - 1) % stride
            sizes[axis] -= max(rest - after, 0)
            pads += [before, max(after - rest, 0)]
        if sizes != list(x.shape):
            name = self.add("SLICE", [name, self.sizes([0] * 4), self.sizes(sizes)], sizes)
        return name, pads

    def finish(self, name: str, output: Tensor, attributes: Mapping[str, Any]) -> None:
        """Clamps as a fused activation does, and calls it as the graph does."""
        low, high = bounds(output, attributes, PLAIN)
        shape = self.tensors[name][0]
        if (low, high) == (-128, 127):
            self.add("IDENTITY", [name], shape, name=output.name)
        else:
            self.add("CLAMP", [name], shape, low, high, name=output.name)


PLAIN: Any = SimpleNamespace(arithmetic=None, scales_sums_in_float32=False)


def zero(tensor: Tensor) -> int:
    return int(tensor.quantization.zero_point[0])


def scale(tensor: Tensor) -> float:
    return float(tensor.quantization.scale[0])


def rescaled_sums(writer: Writer, sums: str, x: Tensor, filter: Tensor, y: Tensor) -> str:
    scales = filter.quantization.scale.astype(np.float64)
    factors = scale(x) * (scales if len(scales) > 1 else scales[0]) / scale(y)
    return writer.rescale(sums, factors, (0, zero(y)), (INT32, INT8), DOUBLE)


def convolution(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Mapping[str, Any]) -> str:
    x, filter, bias = tensors
    weights, shape = filter.data, list(y.shape)
    assert weights is not None and bias.data is not None
    strides, dilations = list(attributes["strides"]), list(attributes["dilations"])
    kind, window = "CONV2D", weights.shape[1:3]
    if "depth_multiplier" in attributes or weights.shape[0] == 1 != shape[3]:
        kind, weights = "DEPTHWISE_CONV2D", weights[0].reshape(*window, x.shape[3], -1)
    elif weights.shape[3] != x.shape[3]:
        raise RuntimeRefusal("groups")
    name, wanted = writer.windowed(x, window, attributes)
    operands = [name, writer.constant(weights, INT8), writer.constant(bias.data, INT32),
                writer.constant([zero(x)], INT8), writer.constant([0], INT8)]  # fmt: skip
    sums = writer.add(kind, operands, shape, wanted, strides, dilations, False, ACCUMULATOR, dtype=INT32)
    return rescaled_sums(writer, sums, x, filter, y)


def fully_connected(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Mapping[str, Any]) -> str:
    x, filter, bias = tensors
    assert filter.data is not None and bias.data is not None
    outputs, inputs = filter.shape
    rows = math.prod(x.shape) // inputs
    operands = [writer.reshape(writer.operand(x), [rows, 1, 1, inputs]),
                writer.constant(filter.data[:, None, None], INT8), writer.constant(bias.data, INT32),
                writer.constant([zero(x)], INT8), writer.constant([0], INT8)]  # fmt: skip
    shape = [rows, 1, 1, outputs]
    sums = writer.add("CONV2D", operands, shape, [0] * 4, [1, 1], [1, 1], False, ACCUMULATOR, dtype=INT32)
    return writer.reshape(rescaled_sums(writer, sums, x, filter, y), y.shape)


def added(writer: Writer, tensors: list[Tensor], y: Tensor, kind: str) -> str:
    twice = 2 * max(map(scale, tensors))
    terms = [
        writer.rescale(writer.operand(x, len(y.shape)), scale(x) * 2.0**EXTRA_BITS / twice, (zero(x), 0), (INT8, INT32),
                       SINGLE)
        for x in tensors
    ]  # fmt: skip
    total = writer.add(kind, terms, y.shape, dtype=INT32)
    return writer.rescale(total, twice / (scale(y) * 2.0**EXTRA_BITS), (0, zero(y)), (INT32, INT8), DOUBLE)


def multiplied(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Mapping[str, Any]) -> str:
    terms = [writer.rescale(writer.operand(x, len(y.shape)), 1.0, (zero(x), 0), (INT8, INT32), SINGLE) for x in tensors]
    product = writer.add("MUL", [*terms, writer.constant([0], INT8)], y.shape, dtype=INT32)
    return writer.rescale(
        product, scale(tensors[0]) * scale(tensors[1]) / scale(y), (0, zero(y)), (INT32, INT8), DOUBLE
    )


def requantized(writer: Writer, tensors: list[Tensor], y: Tensor, rounding: int) -> str:
    (x,) = tensors
    return writer.rescale(writer.operand(x), scale(x) / scale(y), (zero(x), zero(y)), (INT8, INT8), rounding)


def rectified(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Mapping[str, Any]) -> str:
    return writer.add("CLAMP", [requantized(writer, tensors, y, SINGLE)], y.shape, zero(y), 127)


def looked_up(writer: Writer, tensors: list[Tensor], y: Tensor, function: Callable[[np.ndarray], np.ndarray]) -> str:
    (x,) = tensors
    real = np.float32(scale(x)) * np.arange(-128 - zero(x), 128 - zero(x)).astype(np.float32)
    with np.errstate(over="ignore"):  # in float32
        values = np.asarray(function(real), np.float32) / np.float32(scale(y))
    codes = np.trunc(values + np.copysign(np.float32(0.5), values)) + zero(y)
    table = writer.constant(np.clip(codes, -128, 127).astype(np.int8), INT8)
    return writer.add("TABLE", [writer.operand(x), table], y.shape)


def pooled(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Mapping[str, Any], average: bool) -> str:
    (x,) = tensors
    window, strides = list(attributes["filter_size"]), list(attributes["strides"])
    name, pad = writer.windowed(x, window, attributes)
    if not average:
        return writer.add("MAX_POOL2D", [name], y.shape, window, strides, pad, PROPAGATE)
    zeros = [writer.constant([zero(tensor)], INT8) for tensor in (x, y)]
    return writer.add("AVG_POOL2D", [name, *zeros], y.shape, window, strides, pad, ACCUMULATOR)


def reduced(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Mapping[str, Any], mean: bool) -> str:
    (x,) = tensors
    name, shape = writer.rescale(writer.operand(x), 1.0, (zero(x), 0), (INT8, INT32), SINGLE), list(x.shape)
    count = 1
    for axis in sorted(attributes["axes"]):
        count, shape[axis] = count * shape[axis], 1
        name = writer.add("REDUCE_SUM", [name], shape, axis, dtype=INT32)
    factor = scale(x) / (scale(y) * (count if mean else 1))
    return writer.reshape(writer.rescale(name, factor, (0, zero(y)), (INT32, INT8), SINGLE), y.shape)


def moved(writer: Writer, tensors: list[Tensor], y: Tensor, kind: str, attributes: Mapping[str, Any]) -> str:
    names = [writer.operand(x) for x in tensors]
    if kind == "CONCAT":
        return writer.add(kind, names, y.shape, attributes["axis"] % len(y.shape))
    if kind == "PAD":
        sizes = writer.sizes([size for pair in attributes["paddings"] for size in pair])
        return writer.add(kind, [*names, sizes, writer.constant([zero(y)], INT8)], y.shape)
    if kind == "TRANSPOSE":
        return writer.add(kind, names, y.shape, list(attributes["permutation"]))
    if kind == "RESHAPE":
        return writer.reshape(names[0], y.shape)
    # In int8 there is none of the others.
    terms = [writer.rescale(writer.operand(x, len(y.shape)), 1.0, (zero(x), 0), (INT8, INT32), SINGLE) for x in tensors]
    total = writer.add(kind, terms, y.shape, PROPAGATE, dtype=INT32)
    return writer.rescale(total, 1.0, (0, zero(y)), (INT32, INT8), SINGLE)


# By TensorFlow Lite's name; what is missing the device rejects.
LOWERED: dict[str, Callable[..., str]] = {
    **dict.fromkeys(("CONV_2D", "DEPTHWISE_CONV_2D"), convolution),
    "FULLY_CONNECTED": fully_connected,
    "ADD": lambda w, x, y, a: added(w, x, y, "ADD"),
    "SUB": lambda w, x, y, a: added(w, x, y, "SUB"),
    "MUL": multiplied,
    "QUANTIZE": lambda w, x, y, a: requantized(w, x, y, DOUBLE),
    "RELU": rectified,
    "LOGISTIC": lambda w, x, y, a: looked_up(w, x, y, lambda v: np.float32(1) / (np.float32(1) + np.exp(-v))),
    "TANH": lambda w, x, y, a: looked_up(w, x, y, np.tanh),
    "EXP": lambda w, x, y, a: looked_up(w, x, y, np.exp),
    "HARD_SWISH": lambda w, x, y, a: looked_up(w, x, y, lambda v: v * np.clip(v + 3, 0, 6) / np.float32(6)),
    "AVERAGE_POOL_2D": lambda w, x, y, a: pooled(w, x, y, a, True),
    "MAX_POOL_2D": lambda w, x, y, a: pooled(w, x, y, a, False),
    "MEAN": lambda w, x, y, a: reduced(w, x, y, a, True),
    "SUM": lambda w, x, y, a: reduced(w, x, y, a, False),
    **{kind: (lambda w, x, y, a, name=name: moved(w, x, y, name, a)) for kind, name in {
        "CONCATENATION": "CONCAT", "PAD": "PAD", "TRANSPOSE": "TRANSPOSE", "RESHAPE": "RESHAPE",
        "MAXIMUM": "MAXIMUM", "MINIMUM": "MINIMUM"}.items()},
}  # fmt: skip


def written(graph: Graph) -> Writer:
    """The graph in TOSA's operators."""
    writer = Writer(graph)
    for operator in graph.operators:
        tensors, (y,) = [graph.tensors[name] for name in operator.inputs], [graph.tensors[n] for n in operator.outputs]
        if operator.kind not in LOWERED or {y.dtype, tensors[0].dtype} != {INT8}:
            raise RuntimeRefusal(f"no {operator.kind} of {y.dtype}")
        name = LOWERED[operator.kind](writer, tensors, y, operator.attributes)
        writer.finish(name, y, operator.attributes)
    return writer


class ReferenceModel:
    """A `Run`: from a .tflite file and codes by input to codes by output."""

    def __init__(self, environment: Path) -> None:
        here, messages = Path(__file__).parent, Path(emulated_runtime.__file__).parent
        command = [environment / "bin" / "python", here / "tosa_process.py", messages]
        clean = {"PYTHONPATH": "", "PATH": ""}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, env=clean)  # fmt: skip

    def __call__(self, content: bytes, codes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        graph = read_content(content).graph
        writer = written(graph)
        header = {
            "inputs": list(graph.inputs), "outputs": list(graph.outputs), "tensors": writer.tensors,
            "constants": list(writer.constants), "shapes": writer.shapes, "operations": writer.operations,
        }  # fmt: skip
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        emulated_runtime.write(stdin, header, [*writer.constants.values(), *(codes[name] for name in graph.inputs)])
        message = emulated_runtime.read(stdout)
        if message is None:
            raise RuntimeError("the reference model has gone")
        answer, results = message
        if "error" in answer:
            raise RuntimeRefusal(answer["error"])
        return dict(zip(graph.outputs, results, strict=True))
