# SPDX-License-Identifier: Apache-2.0
"""A small graph of a fully quantized network: what training is lowered to, what is simulated and what is written.

Operators carry TensorFlow Lite's names and meaning, tensors are NHWC with batch 1, activations and weights are int8,
biases int32. `Builder` puts a graph together; `Graph.validate` refuses everything the device would refuse or compute
differently, before a file is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

INT8_MIN, INT8_MAX = -128, 127

ACTIVATIONS = ("NONE", "RELU", "RELU6")
PADDINGS = ("SAME", "VALID")

# Attribute names of each kind, all required. Order of inputs: activations first, then filter, then bias.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "CONV_2D": ("strides", "padding", "dilations", "activation"),
    "DEPTHWISE_CONV_2D": ("strides", "padding", "dilations", "activation"),
    "FULLY_CONNECTED": ("activation",),
    "ADD": ("activation",),
    "MEAN": ("keep_dims",),
    "AVERAGE_POOL_2D": ("filter_size", "strides", "padding"),
    "MAX_POOL_2D": ("filter_size", "strides", "padding"),
    "PAD": ("paddings",),
    "CONCATENATION": ("axis",),
    "RESHAPE": ("new_shape",),
    "QUANTIZE": (),
    "MUL": ("activation",),
}
KINDS = tuple(ATTRIBUTES)
FILTER_AXIS = {"CONV_2D": 0, "DEPTHWISE_CONV_2D": 3, "FULLY_CONNECTED": 0}
# The device moves or compares codes here without rescaling them: results must share their operands' quantization.
SAME_QUANTIZATION = ("AVERAGE_POOL_2D", "MAX_POOL_2D", "PAD", "CONCATENATION", "RESHAPE")


@dataclass(frozen=True, eq=False)
class Quantization:
    """real = scale * (code - zero_point), per tensor (axis None) or per channel along `axis`.

    scale: float32 [1] or [channels]; zero_point: int64 of the same shape, or [1]. See also `per_tensor`.
    """

    scale: np.ndarray
    zero_point: np.ndarray
    axis: int | None = None

    def __post_init__(self) -> None:
        scale = np.atleast_1d(np.asarray(self.scale, np.float32))
        zero_point = np.atleast_1d(np.asarray(self.zero_point, np.int64))
        if scale.ndim != 1 or zero_point.shape not in (scale.shape, (1,)):
            raise ValueError(f"scale and zero_point must be [1] or [channels], got {scale.shape}, {zero_point.shape}")
        if self.axis is None and scale.size != 1:
            raise ValueError(f"per-tensor quantization takes one scale, got {scale.size}; name the channel `axis`")
        if not (np.all(np.isfinite(scale)) and np.all(scale > 0)):
            raise ValueError(f"scale must be positive and finite, got {scale[~((scale > 0) & np.isfinite(scale))][:4]}")
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "zero_point", np.broadcast_to(zero_point, scale.shape).copy())

    def equals(self, other: Quantization) -> bool:
        """True when both stand for the same real numbers, bit for bit."""
        return (
            self.axis == other.axis
            and np.array_equal(self.scale, other.scale)
            and np.array_equal(self.zero_point, other.zero_point)
        )


def per_tensor(scale: float | np.floating, zero_point: int) -> Quantization:
    """One float32 scale and one int8 zero point (-128..127) for a whole tensor."""
    return Quantization(np.array([scale], np.float32), np.array([zero_point], np.int64))


@dataclass(frozen=True, eq=False)
class Tensor:
    """An activation (`data` None), or a constant. shape: NHWC with batch 1, or [1, features], or the constant's own."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    quantization: Quantization
    data: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Operator:
    """One step: `kind` is TensorFlow Lite's name, inputs and outputs are tensor names, attributes as in ATTRIBUTES."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Graph:
    """A fully quantized network: tensors by name, operators in order of execution, names of inputs and outputs.

    Filters: CONV_2D [out, height, width, in], DEPTHWISE_CONV_2D [1, height, width, in * multiplier],
    FULLY_CONNECTED [out, in]; int8 in -127..127, zero point 0, per channel (axis 0, 3, 0) or per tensor.
    Biases: int32 [out], zero point 0, scale exactly float32(input scale * filter scale).

    Activations of fewer than eight bits live in int8 containers, placed so that the device's own saturation is the
    clamp of training (`place_codes` gives the placement, `Builder` follows it). Take 4 bits, codes 0..15:

    * after RELU or RELU6 the codes stand at the TOP of int8: code c is stored as 112 + c. The upper clamp (15) is int8
      saturation at 127, the lower clamp is the fused RELU at the zero point (112 for zero-point code 0).
    * without an activation they are first placed at the top, which clamps at code 15; a QUANTIZE of equal scale then
      shifts them to the BOTTOM, where code 0 is -128 and int8 saturation is the lower clamp.

    Weights of fewer bits need no placement: their codes are a subset of -127..127.
    """

    tensors: Mapping[str, Tensor]
    operators: tuple[Operator, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def validate(self) -> None:
        """Raises ValueError naming the operator or tensor, what was given and what is allowed."""
        for key, tensor in self.tensors.items():
            if key != tensor.name:
                raise ValueError(f"tensor {tensor.name!r} is stored under the name {key!r}")
            _check_tensor(tensor)
        for name in (*self.inputs, *self.outputs):
            if name not in self.tensors:
                raise ValueError(f"graph input or output {name!r} is not among the tensors")
        if not self.inputs or not self.outputs:
            raise ValueError("a graph needs at least one input and one output")
        ready = set(self.inputs) | {name for name, tensor in self.tensors.items() if tensor.data is not None}
        for index, operator in enumerate(self.operators):
            where = f"operator {index} ({operator.kind} -> {', '.join(operator.outputs)})"
            _check_operator(operator, self.tensors, ready, where)
            ready.update(operator.outputs)
        for name in self.outputs:
            if name not in ready:
                raise ValueError(f"graph output {name!r} is produced by no operator")

    def with_outputs(self, outputs: Sequence[str]) -> Graph:
        """The same graph with other tensors as its outputs."""
        return Graph(self.tensors, self.operators, self.inputs, tuple(outputs))

    def results(self) -> tuple[str, ...]:
        """Names of all computed tensors, in order of execution."""
        return tuple(name for operator in self.operators for name in operator.outputs)

    def multiply_accumulates(self, operator: Operator) -> int:
        """Multiply-accumulates of one image through `operator`; 0 for kinds without weights."""
        if operator.kind not in FILTER_AXIS:
            return 0
        filter_shape = self.tensors[operator.inputs[1]].shape
        positions = math.prod(self.tensors[operator.outputs[0]].shape[:-1])
        return positions * math.prod(filter_shape)

    def summary(self) -> list[dict[str, str | int | float]]:
        """One row per operator: number, kind, output, shape, scale, zero_point, activation, parameters, MACs."""
        rows: list[dict[str, str | int | float]] = []
        for index, operator in enumerate(self.operators):
            output = self.tensors[operator.outputs[0]]
            constants = [self.tensors[name].data for name in operator.inputs]
            rows.append(
                {
                    "number": index,
                    "kind": operator.kind,
                    "output": output.name,
                    "shape": "x".join(map(str, output.shape)),
                    "scale": float(output.quantization.scale[0]),
                    "zero_point": int(output.quantization.zero_point[0]),
                    "activation": str(operator.attributes.get("activation", "NONE")),
                    "parameters": sum(data.size for data in constants if data is not None),
                    "multiply_accumulates": self.multiply_accumulates(operator),
                }
            )
        return rows


def place_codes(
    scale: float | np.floating,
    zero_point: int,
    num_bits: int = 8,
    activation: str = "NONE",
    narrow_range: bool = False,
) -> tuple[Quantization, ...]:
    """How an activation with FakeQuant's codes is stored in int8 so that the device clamps where training clamped.

    scale: the nudged scale; zero_point: the code (0..2**num_bits - 1) that stands for real 0; activation: what is fused
    into the operator that computes the tensor. Returns one Quantization, or two when the lower clamp needs a QUANTIZE
    of equal scale behind the operator (see `Graph`); the last one is how consumers see the tensor.
    """
    if not 2 <= num_bits <= 8:
        raise ValueError(f"num_bits must be in 2..8, got {num_bits}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    lowest, highest = (1 if narrow_range else 0), 2**num_bits - 1
    if not lowest <= zero_point <= highest:
        raise ValueError(f"zero_point must be a code in {lowest}..{highest}, got {zero_point}")
    top = per_tensor(scale, zero_point + INT8_MAX - highest)
    bottom = per_tensor(scale, zero_point + INT8_MIN - lowest)
    # A fused RELU never yields a code below that of real 0, so the top placement alone clamps both ends.
    return (top,) if activation != "NONE" or top.equals(bottom) else (top, bottom)


def same_padding(size: int, filter_size: int, stride: int, dilation: int = 1) -> tuple[int, int]:
    """(before, after) zero padding of TensorFlow's SAME along one axis."""
    total = max((-(-size // stride) - 1) * stride + (filter_size - 1) * dilation + 1 - size, 0)
    return total // 2, total - total // 2


def infer_shape(
    kind: str, shapes: Sequence[tuple[int, ...]], attributes: Mapping[str, Any], where: str = ""
) -> tuple[int, ...]:
    """Shape of the result from the shapes of all inputs (filter and bias included)."""
    where = where or kind
    first = shapes[0]
    if kind in ("CONV_2D", "DEPTHWISE_CONV_2D"):
        _need(where, len(first) == 4 and len(shapes[1]) == 4, f"input and filter must be rank 4, got {shapes[:2]}")
        out_channels = shapes[1][FILTER_AXIS[kind]]
        if kind == "CONV_2D":
            _need(where, shapes[1][3] == first[3], f"filter {shapes[1]} does not fit {first[3]} input channels")
        else:
            fits = shapes[1][0] == 1 and out_channels % first[3] == 0
            _need(where, fits, f"filter {shapes[1]} must be [1, height, width, {first[3]} * multiplier]")
        _need(where, shapes[2] == (out_channels,), f"bias must have shape ({out_channels},), got {shapes[2]}")
        return _window_shape(first, shapes[1][1:3], attributes, where) + (out_channels,)
    if kind == "FULLY_CONNECTED":
        fits = len(first) == 2 and len(shapes[1]) == 2 and first[1] == shapes[1][1]
        _need(where, fits, f"input [1, in] and filter [out, in] do not fit: {first}, {shapes[1]}")
        _need(where, shapes[2] == shapes[1][:1], f"bias must have shape {shapes[1][:1]}, got {shapes[2]}")
        return (first[0], shapes[1][0])
    if kind == "ADD":
        _need(where, shapes[0] == shapes[1], f"operands must have equal shapes, got {shapes[0]} and {shapes[1]}")
        return first
    if kind == "MUL":
        per_channel = (1,) * (len(first) - 1) + first[-1:]
        fits = shapes[1] in (first, per_channel)
        _need(where, fits, f"the second operand must have shape {first} or {per_channel}, got {shapes[1]}")
        return first
    if kind == "MEAN":
        _need(where, len(first) == 4, f"input must be rank 4, got {first}")
        return (first[0], 1, 1, first[3]) if attributes["keep_dims"] else (first[0], first[3])
    if kind in ("AVERAGE_POOL_2D", "MAX_POOL_2D"):
        _need(where, len(first) == 4, f"input must be rank 4, got {first}")
        return _window_shape(first, attributes["filter_size"], attributes, where) + (first[3],)
    if kind == "PAD":
        paddings = attributes["paddings"]
        _need(where, len(paddings) == len(first), f"paddings must have one pair per axis of {first}, got {paddings}")
        _need(where, paddings[0] == (0, 0), f"the batch cannot be padded, got {paddings[0]}")
        return tuple(size + before + after for size, (before, after) in zip(first, paddings, strict=True))
    if kind == "CONCATENATION":
        axis = attributes["axis"]
        _need(where, 1 <= axis < len(first), f"axis must be in 1..{len(first) - 1}, got {axis}")
        others = {shape[:axis] + shape[axis + 1 :] for shape in shapes}
        _need(where, len(others) == 1, f"operands differ outside axis {axis}: {list(shapes)}")
        return first[:axis] + (sum(shape[axis] for shape in shapes),) + first[axis + 1 :]
    if kind == "RESHAPE":
        new_shape = tuple(attributes["new_shape"])
        fits = math.prod(new_shape) == math.prod(first) and new_shape[0] == first[0]
        _need(where, fits, f"new_shape {new_shape} must keep the batch and the number of elements of {first}")
        return new_shape
    return first


class Builder:
    """Puts a graph together operator by operator; every method returns the name of its result.

    `output` is the result's Quantization, or the placement from `place_codes`: for two placements the shifting
    QUANTIZE is added and its name returned. Filters and biases are given as integer codes; their tensors are made here,
    the bias scale included.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._operators: list[Operator] = []
        self._inputs: list[str] = []

    def graph(self, outputs: Sequence[str]) -> Graph:
        """The validated graph."""
        graph = Graph(dict(self._tensors), tuple(self._operators), tuple(self._inputs), tuple(outputs))
        graph.validate()
        return graph

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name."""
        return self._tensors[name]

    def input(self, name: str, shape: Sequence[int], quantization: Quantization) -> str:
        """shape: with batch 1."""
        self._inputs.append(name)
        return self._add_tensor(Tensor(name, tuple(shape), "int8", quantization))

    def conv_2d(
        self,
        input: str,
        filter: np.ndarray,
        filter_scale: np.ndarray,
        bias: np.ndarray,
        output: Quantization | Sequence[Quantization],
        *,
        name: str,
        strides: tuple[int, int] = (1, 1),
        padding: str = "SAME",
        dilations: tuple[int, int] = (1, 1),
        activation: str = "NONE",
    ) -> str:
        """filter: int8 codes [out, height, width, in]; filter_scale: [1] or [out]; bias: int32 codes [out]."""
        attributes = {"strides": strides, "padding": padding, "dilations": dilations, "activation": activation}
        return self._weighted("CONV_2D", input, filter, filter_scale, bias, output, name, attributes)

    def depthwise_conv_2d(
        self,
        input: str,
        filter: np.ndarray,
        filter_scale: np.ndarray,
        bias: np.ndarray,
        output: Quantization | Sequence[Quantization],
        *,
        name: str,
        strides: tuple[int, int] = (1, 1),
        padding: str = "SAME",
        dilations: tuple[int, int] = (1, 1),
        activation: str = "NONE",
    ) -> str:
        """filter: int8 codes [1, height, width, in * multiplier] (input channel major); otherwise as conv_2d."""
        attributes = {"strides": strides, "padding": padding, "dilations": dilations, "activation": activation}
        return self._weighted("DEPTHWISE_CONV_2D", input, filter, filter_scale, bias, output, name, attributes)

    def fully_connected(
        self,
        input: str,
        filter: np.ndarray,
        filter_scale: np.ndarray,
        bias: np.ndarray,
        output: Quantization | Sequence[Quantization],
        *,
        name: str,
        activation: str = "NONE",
    ) -> str:
        """input [1, in]; filter: int8 codes [out, in]; bias: int32 codes [out]."""
        attributes = {"activation": activation}
        return self._weighted("FULLY_CONNECTED", input, filter, filter_scale, bias, output, name, attributes)

    def add(
        self,
        first: str,
        second: str,
        output: Quantization | Sequence[Quantization],
        *,
        name: str,
        activation: str = "NONE",
    ) -> str:
        """Sum of two tensors of equal shape; their scales may differ."""
        return self._append("ADD", (first, second), output, name, {"activation": activation})

    def mul(
        self,
        first: str,
        second: str,
        output: Quantization | Sequence[Quantization],
        *,
        name: str,
        activation: str = "NONE",
    ) -> str:
        """Product of two tensors of equal shape, or of [1, height, width, channels] with [1, 1, 1, channels]."""
        return self._append("MUL", (first, second), output, name, {"activation": activation})

    def mean(
        self, input: str, output: Quantization | Sequence[Quantization], *, name: str, keep_dims: bool = False
    ) -> str:
        """Global average over height and width: [1, 1, 1, channels] with keep_dims, else [1, channels]."""
        return self._append("MEAN", (input,), output, name, {"keep_dims": keep_dims})

    def average_pool_2d(
        self,
        input: str,
        *,
        name: str,
        filter_size: tuple[int, int],
        strides: tuple[int, int],
        padding: str = "VALID",
    ) -> str:
        """Mean over windows, padding not counted; keeps the quantization of its input."""
        return self._pool("AVERAGE_POOL_2D", input, name, filter_size, strides, padding)

    def max_pool_2d(
        self,
        input: str,
        *,
        name: str,
        filter_size: tuple[int, int],
        strides: tuple[int, int],
        padding: str = "VALID",
    ) -> str:
        """Maximum over windows; keeps the quantization of its input."""
        return self._pool("MAX_POOL_2D", input, name, filter_size, strides, padding)

    def pad(self, input: str, paddings: Sequence[tuple[int, int]], *, name: str) -> str:
        """Pads with real 0; paddings: one (before, after) per axis, (0, 0) for the batch."""
        pairs = tuple((int(before), int(after)) for before, after in paddings)
        return self._append("PAD", (input,), self._tensors[input].quantization, name, {"paddings": pairs})

    def concatenation(
        self, inputs: Sequence[str], output: Quantization | Sequence[Quantization], *, name: str, axis: int = 3
    ) -> str:
        """Joins along `axis`; an operand in another quantization than the result's gets a QUANTIZE in front.

        With two placements every operand is requantized into the first and shifted into the second, so that it is
        clamped like any other tensor.
        """
        placements = _placements(output)
        operands = []
        for index, operand in enumerate(inputs):
            if len(placements) > 1 or not self._tensors[operand].quantization.equals(placements[-1]):
                operand = self.quantize(operand, placements, name=f"{name}/requantized_{index}")
            operands.append(operand)
        return self._append("CONCATENATION", tuple(operands), placements[-1], name, {"axis": axis})

    def reshape(self, input: str, new_shape: Sequence[int], *, name: str) -> str:
        """new_shape: with batch 1 as its first axis."""
        attributes = {"new_shape": tuple(int(size) for size in new_shape)}
        return self._append("RESHAPE", (input,), self._tensors[input].quantization, name, attributes)

    def quantize(self, input: str, output: Quantization | Sequence[Quantization], *, name: str) -> str:
        """Requantizes int8 to int8."""
        return self._append("QUANTIZE", (input,), output, name, {})

    def _weighted(
        self,
        kind: str,
        input: str,
        filter: np.ndarray,
        filter_scale: np.ndarray,
        bias: np.ndarray,
        output: Quantization | Sequence[Quantization],
        name: str,
        attributes: dict[str, Any],
    ) -> str:
        for what, codes, bound in (("filter", filter, 127), ("bias", bias, 2**31 - 1)):
            values = np.asarray(codes, np.float64)
            if not np.all((np.abs(values) <= bound) & (values == np.rint(values))):
                raise ValueError(f"{kind} {name!r}: {what} codes must be integers within -{bound}..{bound}")
        filter_scale = np.atleast_1d(np.asarray(filter_scale, np.float32))
        # One scale for all channels is stored per tensor: kernels then take it as such.
        axis = FILTER_AXIS[kind] if filter_scale.size > 1 else None
        bias_scale = self._tensors[input].quantization.scale * filter_scale
        filter_name = self._add_tensor(
            Tensor(
                f"{name}/filter",
                np.shape(filter),
                "int8",
                Quantization(filter_scale, np.zeros(1), axis),
                np.asarray(filter, np.int8),
            )
        )
        bias_name = self._add_tensor(
            Tensor(
                f"{name}/bias",
                np.shape(bias),
                "int32",
                Quantization(bias_scale, np.zeros(1), None if axis is None else 0),
                np.asarray(bias, np.int32),
            )
        )
        return self._append(kind, (input, filter_name, bias_name), output, name, attributes)

    def _pool(
        self,
        kind: str,
        input: str,
        name: str,
        filter_size: tuple[int, int],
        strides: tuple[int, int],
        padding: str,
    ) -> str:
        attributes = {"filter_size": filter_size, "strides": strides, "padding": padding}
        return self._append(kind, (input,), self._tensors[input].quantization, name, attributes)

    def _append(
        self,
        kind: str,
        inputs: tuple[str, ...],
        output: Quantization | Sequence[Quantization],
        name: str,
        attributes: dict[str, Any],
    ) -> str:
        placements = _placements(output)
        for input in inputs:
            if input not in self._tensors:
                raise ValueError(f"{kind} {name!r}: input {input!r} does not exist")
        _check_attributes(kind, attributes, f"{kind} {name!r}")
        shape = infer_shape(kind, [self._tensors[i].shape for i in inputs], attributes, f"{kind} {name!r}")
        result = name if len(placements) == 1 else f"{name}/unshifted"
        self._add_tensor(Tensor(result, shape, "int8", placements[0]))
        self._operators.append(Operator(kind, inputs, (result,), attributes))
        return result if len(placements) == 1 else self._append("QUANTIZE", (result,), placements[1:], name, {})

    def _add_tensor(self, tensor: Tensor) -> str:
        if tensor.name in self._tensors:
            raise ValueError(f"tensor name {tensor.name!r} is used twice")
        self._tensors[tensor.name] = tensor
        return tensor.name


def _placements(output: Quantization | Sequence[Quantization]) -> tuple[Quantization, ...]:
    return (output,) if isinstance(output, Quantization) else tuple(output)


def _need(where: str, condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"{where}: {message}")


def _window_shape(
    input_shape: tuple[int, ...], filter_size: Sequence[int], attributes: Mapping[str, Any], where: str
) -> tuple[int, ...]:
    sizes = []
    dilations = attributes.get("dilations", (1, 1))
    for size, window, stride, dilation in zip(
        input_shape[1:3], filter_size, attributes["strides"], dilations, strict=True
    ):
        reach = (window - 1) * dilation + 1
        if attributes["padding"] == "VALID":
            _need(where, size >= reach, f"a window of {reach} does not fit into {size} with VALID padding")
            sizes.append((size - reach) // stride + 1)
        else:
            sizes.append(-(-size // stride))
    return (input_shape[0], *sizes)


def _check_tensor(tensor: Tensor) -> None:
    where = f"tensor {tensor.name!r}"
    quantization = tensor.quantization
    _need(where, tensor.dtype in ("int8", "int32"), f"dtype must be int8 or int32, got {tensor.dtype!r}")
    _need(where, len(tensor.shape) > 0 and min(tensor.shape) > 0, f"every size must be positive, got {tensor.shape}")
    in_range = bool(np.all((quantization.zero_point >= INT8_MIN) & (quantization.zero_point <= INT8_MAX)))
    _need(where, in_range, f"zero points must be in {INT8_MIN}..{INT8_MAX}, got {quantization.zero_point[:4]}")
    if quantization.axis is not None:
        fits = 0 <= quantization.axis < len(tensor.shape)
        _need(where, fits, f"channel axis {quantization.axis} is not an axis of {tensor.shape}")
        channels = tensor.shape[quantization.axis]
        _need(where, quantization.scale.size == channels, f"{quantization.scale.size} scales for {channels} channels")
    if tensor.data is None:
        _need(where, tensor.dtype == "int8", f"activations must be int8, got {tensor.dtype}")
        _need(where, tensor.shape[0] == 1, f"activations have batch 1 in the graph, got {tensor.shape}")
        _need(where, quantization.axis is None, "activations are quantized per tensor, not per channel")
        return
    _need(where, tensor.data.dtype == tensor.dtype, f"data must be {tensor.dtype}, got {tensor.data.dtype}")
    _need(where, tensor.data.shape == tensor.shape, f"data has shape {tensor.data.shape}, not {tensor.shape}")
    _need(where, not np.any(quantization.zero_point), "weights and biases have zero point 0")
    if tensor.dtype == "int8":
        _need(where, int(tensor.data.min()) >= -127, "weights must be within -127..127, got -128")


def _check_attributes(kind: str, attributes: Mapping[str, Any], where: str) -> None:
    _need(where, kind in ATTRIBUTES, f"unknown operator kind {kind!r}; known: {', '.join(KINDS)}")
    expected = set(ATTRIBUTES[kind])
    _need(where, set(attributes) == expected, f"attributes must be {sorted(expected)}, got {sorted(attributes)}")
    if "activation" in expected:
        fits = attributes["activation"] in ACTIVATIONS
        _need(where, fits, f"activation must be one of {', '.join(ACTIVATIONS)}, got {attributes['activation']!r}")
    if "padding" in expected:
        fits = attributes["padding"] in PADDINGS
        _need(where, fits, f"padding must be one of {', '.join(PADDINGS)}, got {attributes['padding']!r}")
    for pair in ("strides", "dilations", "filter_size"):
        if pair in expected:
            value = attributes[pair]
            _need(where, len(value) == 2 and min(value) >= 1, f"{pair} must be two positive integers, got {value}")


def _check_operator(operator: Operator, tensors: Mapping[str, Tensor], ready: set[str], where: str) -> None:
    kind = operator.kind
    _check_attributes(kind, operator.attributes, where)
    for name in (*operator.inputs, *operator.outputs):
        _need(where, name in tensors, f"tensor {name!r} is missing")
    for name in operator.inputs:
        _need(where, name in ready, f"input {name!r} is used before it is computed")
    _need(where, len(operator.outputs) == 1, f"takes one output, got {operator.outputs}")
    _need(where, operator.outputs[0] not in ready, f"output {operator.outputs[0]!r} is written twice")
    arity = 3 if kind in FILTER_AXIS else 2 if kind in ("ADD", "MUL") else 1
    fits = len(operator.inputs) >= 1 if kind == "CONCATENATION" else len(operator.inputs) == arity
    _need(where, fits, f"takes {arity} inputs, got {operator.inputs}")

    inputs = [tensors[name] for name in operator.inputs]
    output = tensors[operator.outputs[0]]
    activations = inputs[:1] if kind in FILTER_AXIS else inputs
    for tensor in (*activations, output):
        _need(where, tensor.data is None, f"{tensor.name!r} must be an activation, not a constant")
    shape = infer_shape(kind, [tensor.shape for tensor in inputs], operator.attributes, where)
    _need(where, shape == output.shape, f"output must have shape {shape}, got {output.shape}")
    if kind in SAME_QUANTIZATION:
        for tensor in inputs:
            same = tensor.quantization.equals(output.quantization)
            _need(where, same, f"input {tensor.name!r} must have the output's quantization; put a QUANTIZE before it")
    if kind == "QUANTIZE":
        ratio = float(inputs[0].quantization.scale[0] / output.quantization.scale[0])
        _need(where, 2**-8 <= ratio <= 2**7, f"input scale / output scale must be in [2**-8, 2**7], got {ratio:g}")
    if kind == "ADD":
        ratio = max(float(tensor.quantization.scale[0] / output.quantization.scale[0]) for tensor in inputs)
        _need(where, ratio < 256, f"input scale / output scale must be below 256, got {ratio:g}")
    if kind == "MUL":
        first_scale, second_scale = (tensor.quantization.scale[0] for tensor in inputs)
        ratio = float(first_scale * second_scale / output.quantization.scale[0])
        message = f"product of the input scales / output scale must be in [2**-16, 256), got {ratio:g}"
        _need(where, 2.0**-16 <= ratio < 256, message)
    if kind in FILTER_AXIS:
        _check_weights(kind, inputs[0], inputs[1], inputs[2], output, where)


def _check_weights(kind: str, input: Tensor, filter: Tensor, bias: Tensor, output: Tensor, where: str) -> None:
    for tensor, dtype in ((filter, "int8"), (bias, "int32")):
        fits = tensor.data is not None and tensor.dtype == dtype
        _need(where, fits, f"{tensor.name!r} must be a constant of dtype {dtype}")
    assert filter.data is not None and bias.data is not None
    axis = FILTER_AXIS[kind]
    fits = filter.quantization.axis in (None, axis)
    _need(where, fits, f"filter channels must be on axis {axis}, got {filter.quantization.axis}")
    bias_scale = input.quantization.scale * filter.quantization.scale
    fits = np.array_equal(bias.quantization.scale, bias_scale)
    _need(where, fits, "bias scale must be exactly float32(input scale * filter scale)")

    multiplier = (bias_scale / output.quantization.scale).astype(np.float64)
    fits = bool(np.all((multiplier >= 2.0**-32) & (multiplier < 256)))
    message = "input scale * filter scale / output scale must be in [2**-32, 256) for every channel"
    _need(where, fits, f"{message}, got {multiplier.min():g}..{multiplier.max():g}")
    zero_point = int(input.quantization.zero_point[0])
    reach = max(INT8_MAX - zero_point, zero_point - INT8_MIN)
    other_axes = tuple(i for i in range(filter.data.ndim) if i != axis)
    bound = np.abs(filter.data.astype(np.int64)).sum(other_axes) * reach + np.abs(bias.data.astype(np.int64))
    _need(where, int(bound.max()) < 2**31, "the int32 accumulator can overflow; the bias or the filter is too large")
