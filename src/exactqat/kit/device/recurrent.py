# SPDX-License-Identifier: Apache-2.0
"""Operators with a state that lasts from one call to the next: SVDF and LSTM of others' files, in int8 with int16
inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, ClassVar

import numpy as np

from . import interpolated
from . import short_fixed_point as short
from .arithmetic import (
    Arrays,
    Tensors,
    centered,
    checked_log2,
    fixed_point,
    multiply_fixed_point,
    rounding_shift,
    scale_of,
    zero_point_of,
)
from .file_forms import ACTIVATION, Option
from .floating import Floating
from .operator import (
    FLOAT,
    REQUIRED,
    Attributes,
    Call,
    DeviceOperator,
    FileOperator,
    FileStep,
    Shape,
    Unreadable,
    in_float,
    need,
    register,
)
from .profile import Profile
from .real import real_numbers
from .tensor import INDICES, INT8_MAX, INT8_MIN, INT16_MAX, INT16_MIN, Quantization, Tensor, per_tensor

PURPOSE = "files: a plan writes such a layer step by step"
# What an LSTM whose hidden state is a projection is measured as.
PROJECTED = "projection"


class Recurrent(DeviceOperator):
    """An operator with variables, which the runtimes' own kernels compute, one example at a time."""

    any_batch = False
    purpose = PURPOSE
    weight_dtypes: ClassVar[tuple[str, ...]]
    state_dtypes: ClassVar[tuple[tuple[str, ...], ...]]

    def measured_as(self, inputs: Sequence[Tensor], output: Tensor) -> str:
        return self.kind

    def check(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> None:
        for position, dtype in zip(self.weights, self.weight_dtypes, strict=True):
            if position >= len(inputs):
                continue
            tensor = inputs[position]
            need(tensor.dtype == dtype, f"{tensor.name!r} must be a constant of dtype {dtype}, got {tensor.dtype}")
            one = tensor.quantization.axis is None and not np.any(tensor.quantization.zero_point)
            need(one, f"{tensor.name!r} must be quantized per tensor, with zero point 0")
        for position, dtypes in zip(self.states, self.state_dtypes, strict=True):
            tensor = inputs[position]
            fits = tensor.dtype in dtypes
            need(fits, f"{tensor.name!r} must be a variable of dtype {' or '.join(dtypes)}, got {tensor.dtype}")
        need(output.dtype == "int8", f"the result must be int8, got {output.dtype}")


def products(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """int64 sums of products of integers [batch, in] and [out, in]; below 2**53, float64 forms them exactly."""
    return np.asarray(x.astype(np.float64) @ weights.astype(np.float64).T).astype(np.int64)


def reach(tensor: Tensor) -> int:
    """The largest magnitude of an int8 activation in steps from real 0."""
    zero_point = zero_point_of(tensor)
    return max(INT8_MAX - zero_point, zero_point - INT8_MIN)


def need_32_bits(bound: np.ndarray) -> None:
    """Refuses sums that can be larger."""
    need(int(bound.max()) < 2**31, "the int32 accumulator can overflow; a bias or a weight is too large")


def magnitudes(weights: Tensor) -> np.ndarray:
    """Sums of the weights' magnitudes for each of their rows."""
    assert weights.data is not None
    return np.asarray(np.abs(weights.data.astype(np.int64)).sum(1))


@register
class Svdf(Recurrent):
    """A filter over features, whose last results are kept, and one over these.

    Operands: x [1, in]; weights of features int8 [rank * units, in]; of time int16 [rank * units, memory]; bias int32
    [units], of the state's scale times that of the time's weights; the state int16 [1, rank * units * memory], the
    latest result last. The integer kernels saturate and have no other activation, whatever the file says; LiteRT takes
    files that say RELU, and no others.
    """

    kind = "SVDF"
    attributes = {"rank": REQUIRED, "activation": "RELU"}
    in_file = {"rank": Option("rank"), "activation": ACTIVATION}
    operands = (5, 5)
    weights = (1, 2, 3)
    weight_dtypes = ("int8", "int16", "int32")
    states = (4,)
    state_dtypes = (("int16",),)
    version = 3
    options = "SVDFOptions"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        x, features, time, bias, state = shapes
        rank = attributes["rank"]
        fits = len(x) == len(features) == len(time) == len(state) == 2 and x[1] == features[1]
        need(fits and time[0] == features[0], f"weights must be [filters, in] and [filters, memory], got {shapes[:3]}")
        need(rank >= 1 and features[0] % rank == 0, f"rank must divide the {features[0]} filters, got {rank}")
        units = features[0] // rank
        need(bias == (units,), f"the bias must be [{units}], got {list(bias)}")
        need(state == (x[0], math.prod(time)), f"the state must be {[x[0], math.prod(time)]}, got {list(state)}")
        return (x[0], units)

    def check(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> None:
        super().check(inputs, output, attributes)
        x, features, time, bias, state = inputs
        off = abs(float(scale_of(bias)) - float(scale_of(state) * scale_of(time)))
        need(off < 1e-5, "bias scale must be the state's scale * that of the time's weights")
        multipliers = self.multipliers(inputs, output)
        fits = all(2.0**-31 <= multiplier < 256 for multiplier in multipliers)
        need(fits, f"quotients of scales must be in [2**-31, 256), got {multipliers[0]:g} and {multipliers[1]:g}")
        need_32_bits(magnitudes(features) * reach(x) * max(math.ceil(multipliers[0]), 1))
        assert bias.data is not None
        stored = np.minimum(np.ceil(magnitudes(features) * reach(x) * multipliers[0]) + 1, -INT16_MIN)
        sums = (magnitudes(time) * stored).reshape(-1, attributes["rank"]).sum(1) + np.abs(bias.data.astype(np.int64))
        need_32_bits(sums * max(math.ceil(multipliers[1]), 1))

    @staticmethod
    def multipliers(inputs: Tensors, output: Tensor) -> tuple[float, float]:
        """Of the sums over features, and of those over time: float32 quotients of scales."""
        x, features, time, _, state = (scale_of(tensor) for tensor in inputs)
        return float(x * features / state), float(state * time / scale_of(output))

    def multiply_accumulates(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> int:
        return math.prod(inputs[1].shape) + math.prod(inputs[2].shape)

    def all_results(self, call: Call) -> tuple[np.ndarray, ...]:
        x, features, time, bias, state = call.codes
        (output,) = call.outputs
        first, second = (fixed_point(multiplier) for multiplier in self.multipliers(call.inputs, output))
        latest = multiply_fixed_point(products(centered(x, call.inputs[0]), features), *first)
        kept = state.reshape(len(x), *time.shape).astype(np.int64)
        kept[..., -1] = np.clip(latest, INT16_MIN, INT16_MAX)
        sums = (kept * time).sum(-1).reshape(len(x), -1, call.attributes["rank"]).sum(-1) + bias
        steps = multiply_fixed_point(sums, *second) + zero_point_of(output)
        # The place of the next result is the last one.
        moved = np.concatenate([kept[..., 1:], np.zeros_like(kept[..., :1])], -1)
        result = np.clip(steps, INT8_MIN, INT8_MAX).astype(np.int8)
        return result, moved.reshape(state.shape).astype(state.dtype)

    def read_operands(self, read: FileOperator) -> tuple[Tensor, ...]:
        """A bias that a file leaves out is 0."""
        x, features, time, state = (read.operand(position) for position in (0, 1, 2, 4))
        bias = read.inputs[3]
        if bias is None:
            rank = read.option("rank") or 1
            zeros = np.zeros(features.shape[0] // max(rank, 1), np.int32)
            scale = Quantization(state.quantization.scale[:1] * time.quantization.scale[:1], np.zeros(1))
            bias = Tensor(f"{read.output.name}/bias", zeros.shape, "int32", scale, zeros)
        return x, features, time, bias, state


@register
class UnidirectionalSequenceRnn(Floating):
    """A recurrent layer in float32, all of whose states are the result; its weights may be integers.

    Operands: x [1, time, in]; weights of x [units, in] and of the state [units, units]; bias float32 [units]; the state
    float32 [1, units]. Attributes: function, which is applied to the sums.
    """

    kind = "UNIDIRECTIONAL_SEQUENCE_RNN"
    attributes = {"function": "TANH"}
    in_file = {"function": ACTIVATION}
    operands = (5, 5)
    weights = (1, 2, 3)
    states = (4,)
    any_batch = False
    options = "SequenceRNNOptions"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        x, own, other, bias, state = map(tuple, shapes)
        need(len(x) == 3 and len(own) == 2, f"x must be [1, time, in] and its weights [units, in], got {x} and {own}")
        units = own[0]
        expected = (units, x[2]), (units, units), (units,), (x[0], units)
        operands = own, other, bias, state
        need(operands == expected, f"weights, bias and state must be {list(expected)}, got {list(operands)}")
        return (x[0], x[1], units)

    def check_attributes(self, attributes: Attributes) -> None:
        super().check_attributes(attributes)
        function = attributes["function"]
        need(function in FUSED, f"function must be one of {', '.join(FUSED)}, got {function}")

    def multiply_accumulates(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> int:
        return inputs[0].shape[1] * sum(math.prod(tensor.shape) for tensor in inputs[1:3])

    def all_results(self, call: Call) -> tuple[np.ndarray, ...]:
        x, own, other, bias, state = (
            real_numbers(code, tensor) for code, tensor in zip(call.codes, call.inputs, strict=True)
        )
        function, result = FUSED[call.attributes["function"]], np.empty((*x.shape[:2], len(own)), np.float32)
        with np.errstate(all="ignore"):
            for moment in range(x.shape[1]):
                state = function(x[:, moment] @ own.T + state @ other.T + bias).astype(np.float32)
                result[:, moment] = state
        return result, state

    def read_attributes(self, read: FileOperator) -> Attributes:
        if read.option("timeMajor"):
            raise Unreadable(f"{self.kind} over a first axis of time")
        return super().read_attributes(read)


# Functions of sums in float32.
FUSED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "NONE": lambda x: x,
    "RELU": lambda x: np.maximum(x, 0),
    "RELU6": lambda x: np.clip(x, 0, 6),
    "TANH": np.tanh,
}

GATES = ("input", "forget", "cell", "output")
# Where a file has the graph's operands: x, weights of x and of the hidden state, biases, both states.
PLACES = (0, *range(1, 5), *range(5, 9), *range(12, 16), 18, 19)
# And where what it may leave out.
OPTIONAL_PLACES = {"projection": (16, 17), "peepholes": (9, 10, 11), "layer normalization": (20, 21, 22, 23)}
CLIPS = {"cell_clip": "cellClip", "projection_clip": "projClip"}
FILE_OPERANDS = 24
# Of what goes into the functions of the gates, and comes out of them.
GATE_SCALE, FUNCTION_SCALE = 2.0**-12, 2.0**-15
HIDDEN = 4
# Where a graph's operands are: the states, and the weights and bias of a projection, if there is one.
STATE, CELL, PROJECTION, PROJECTION_BIAS = range(13, 17)
# What may follow the states, in this order, and how many operands that is: no two choices have the same number.
OPTIONAL = {"projection": 2, "peepholes": 3, "layer normalization": 4}
# Added to a variance, in float32.
LEAST_VARIANCE = np.float32(1e-8)


def optional(operands: Sequence[Any]) -> dict[str, list[Any]]:
    """An LSTM's operands after the states, by what they are."""
    rest = list(operands[PROJECTION:])
    choices = (names for count in range(len(OPTIONAL) + 1) for names in combinations(OPTIONAL, count))
    names = next((names for names in choices if sum(map(OPTIONAL.__getitem__, names)) == len(rest)), None)
    need(names is not None, f"a projection has 2 operands, peepholes 3, layer normalization 4; got {len(rest)} of them")
    return {name: [rest.pop(0) for _ in range(OPTIONAL[name])] for name in names or ()}


@register
class UnidirectionalSequenceLstm(Recurrent):
    """An LSTM over a sequence, all of whose hidden states are the result.

    Operands: x [1, time, in]; int8 weights of x [units, in] and of the hidden state [units, out], and int32 biases
    [units], each for the gates input, forget, cell, output; the hidden state int8 [1, out] and that of the cell int16
    [1, units], whose scale is a power of two; and, where the hidden state is a projection of what the cell shows, its
    int8 weights [out, units] and int32 bias [out], which TFLite-Micro refuses. Otherwise out is units.

    Attributes: cell_clip, the largest magnitude of the cell in real numbers (0: none); hidden_scale and
    hidden_zero_point, by which LiteRT stores the hidden state before the projection, whatever the grid of the result;
    projection_clip, the largest magnitude of a projection (0: none), which LiteRT takes for one of codes, whatever
    their zero point.

    In float32, where weights may be integers, these may follow: the cell's weights [units] for the gates input, forget
    and output (peepholes), and those of a layer normalization [units] for each gate.
    """

    kind = "UNIDIRECTIONAL_SEQUENCE_LSTM"
    attributes = {"cell_clip": 0.0, "hidden_scale": REQUIRED, "hidden_zero_point": REQUIRED, "projection_clip": 0.0}
    floats = True
    axes: ClassVar[int] = 3
    operands = (15, 24)
    weights = (*range(1, 13), *range(PROJECTION, 24))
    weight_dtypes = (*("int8",) * 8, *("int32",) * 4, "int8", *("int32",) * 8)
    states = (STATE, CELL)
    state_dtypes = (("int8",), ("int16",))
    options = "UnidirectionalSequenceLSTMOptions"

    def measured_as(self, inputs: Sequence[Tensor], output: Tensor) -> str:
        if in_float(inputs, output):
            return f"{self.kind}:{FLOAT}"
        return f"{self.kind}:{PROJECTED}" if len(inputs) > PROJECTION else self.kind

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        x, first, others = shapes[0], shapes[1], optional(shapes)
        fits = len(x) == self.axes and len(first) == 2
        need(fits, f"x must have {self.axes} axes and its weights must be [units, in], got {shapes[:2]}")
        units = first[0]
        out = others["projection"][0][0] if "projection" in others else units
        expected = [(units, x[-1])] * 4 + [(units, out)] * 4 + [(units,)] * 4 + [(x[0], out), (x[0], units)]
        expected += [(out, units), (out,)] if "projection" in others else []
        expected += [(units,)] * (len(shapes) - 1 - len(expected))
        for shape, whole in zip(shapes[1:], expected, strict=True):
            need(tuple(shape) == whole, f"weights, biases and states must be {expected}, got {list(shapes[1:])}")
        return (*x[:-1], out)

    def check(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> None:
        variants = [name for name in optional(inputs) if name != "projection"]
        need(not variants, f"{' and '.join(variants)} in integers")
        super().check(inputs, output, attributes)
        hidden, cell = inputs[STATE], inputs[CELL]
        need(hidden.quantization.equals(output.quantization), "the hidden state must be on the grid of the result")
        power = checked_log2(scale_of(cell))
        fits = power is not None and -24 <= power <= -9
        need(fits, f"the scale of the cell must be a power of two in 2**-24..2**-9, got {scale_of(cell):g}")
        for name, clipped in (("cell_clip", cell), ("projection_clip", hidden)):
            clip, least = attributes[name], float(scale_of(clipped))
            need(0 <= clip < np.inf, f"{name} must be finite and 0 or more, got {clip}")
            # Of less than a step some kernels leave 0, and others do not clip.
            need(clip == 0 or clip >= least, f"{name} must be 0 or at least the scale {least:g}, got {clip:g}")
        scale, zero_point = attributes["hidden_scale"], attributes["hidden_zero_point"]
        need(scale > 0, f"hidden_scale must be positive, got {scale}")
        fits = INT8_MIN <= zero_point <= INT8_MAX
        need(fits, f"hidden_zero_point must be in {INT8_MIN}..{INT8_MAX}, got {zero_point}")
        for gate in range(len(GATES)):
            own, other, bias = inputs[1 + gate], inputs[5 + gate], inputs[9 + gate]
            assert bias.data is not None
            sums = [
                (magnitudes(own) * reach(inputs[0]) + np.abs(bias.data.astype(np.int64)), inputs[0], own),
                (magnitudes(other) * reach(hidden), hidden, other),
            ]
            for bound, operand, weights in sums:
                multiplier = gate_multiplier(operand, weights)
                need(multiplier < 256, f"scales of an operand and its weights must be below 1 / 16, got {multiplier:g}")
                need_32_bits(bound * max(math.ceil(multiplier), 1))
        if len(inputs) > PROJECTION:
            weights, bias = inputs[PROJECTION], inputs[PROJECTION_BIAS]
            assert bias.data is not None
            multiplier = projection_multiplier(inputs, attributes)
            fits = 2.0**-31 <= multiplier < 256
            need(fits, f"the projection's multiplier must be in [2**-31, 256), got {multiplier:g}")
            bound = magnitudes(weights) * (INT8_MAX - INT8_MIN) + np.abs(bias.data.astype(np.int64))
            need_32_bits(bound * max(math.ceil(multiplier), 1))

    def multiply_accumulates(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> int:
        weights = (*inputs[1:9], *inputs[PROJECTION : PROJECTION + 1])
        return math.prod(inputs[0].shape[1:-1]) * sum(math.prod(tensor.shape) for tensor in weights)

    def in_real_numbers(self, call: Call) -> tuple[np.ndarray, ...]:
        """In float32."""
        values = [real_numbers(code, tensor) for code, tensor in zip(call.codes, call.inputs, strict=True)]
        hidden, cell, others = values[STATE], values[CELL], optional(values)
        result, (clip, projection_clip) = [], (call.attributes[name] for name in ("cell_clip", "projection_clip"))

        def gate(number: int, x: np.ndarray, peephole: int | None = None) -> np.ndarray:
            sums = x @ values[1 + number].T + hidden @ values[5 + number].T
            if peephole is not None and "peepholes" in others:
                sums = sums + cell * others["peepholes"][peephole]
            if "layer normalization" in others:
                centered = sums - sums.mean(-1, keepdims=True)
                deviation = np.sqrt(np.square(centered).mean(-1, keepdims=True) + LEAST_VARIANCE)
                sums = centered / deviation * others["layer normalization"][number]
            sums = sums + values[9 + number]
            return np.tanh(sums) if GATES[number] == "cell" else 1 / (1 + np.exp(-sums))

        for x in values[0].reshape(len(values[0]), -1, values[0].shape[-1]).swapaxes(0, 1):
            cell = gate(1, x, 1) * cell + gate(0, x, 0) * gate(2, x)
            cell = np.clip(cell, -clip, clip) if clip > 0 else cell
            hidden = gate(3, x, 2) * np.tanh(cell)
            if "projection" in others:
                weights, bias = others["projection"]
                hidden = hidden @ weights.T + bias
                hidden = np.clip(hidden, -projection_clip, projection_clip) if projection_clip > 0 else hidden
            result.append(hidden)
        whole = np.stack(result, 1).reshape(*values[0].shape[:-1], -1)
        return tuple(array.astype(np.float32) for array in (whole, hidden, cell))

    def all_results(self, call: Call) -> tuple[np.ndarray, ...]:
        if in_float(call.inputs, call.output):
            with np.errstate(all="ignore"):
                return self.in_real_numbers(call)
        x, hidden, cell = call.codes[0], call.codes[STATE], call.codes[CELL].astype(np.int64)
        fits = not call.profile.lstm_of_operators or len(call.inputs) <= PROJECTION
        need(fits, "TFLite-Micro has no LSTM with a projection")
        compute = by_operators if call.profile.lstm_of_operators else by_one_kernel
        result = np.empty((len(x), *call.outputs[0].shape[1:]), np.int8)
        for moment in range(x.shape[1]):
            hidden, cell = compute(x[:, moment], hidden, cell, call.codes, call.inputs, call.attributes)
            result[:, moment] = hidden
        return result, hidden, cell.astype(np.int16)

    def tflite_steps(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Sequence[FileStep]:
        operands: list[int | str | Tensor | None] = [None] * FILE_OPERANDS
        present = optional(range(len(inputs)))
        places = [*PLACES, *(place for name in present for place in OPTIONAL_PLACES[name])]
        for position, place in enumerate(places):
            operands[place] = position
        fields = {
            "fusedActivationFunction": ("ActivationFunctionType", "TANH"),
            "cellClip": attributes["cell_clip"],
            "projClip": attributes["projection_clip"],
        }
        gate = per_tensor(GATE_SCALE, 0, "int16")
        hidden = per_tensor(attributes["hidden_scale"], attributes["hidden_zero_point"])
        between = (
            *(Tensor(f"{name}_gate", (0,), "int16", gate) for name in GATES),
            Tensor("hidden", (0,), "int8", hidden),
        )
        return (FileStep(self.kind, tuple(operands), self.version, self.options, fields, intermediates=between),)

    def read_operands(self, read: FileOperator) -> tuple[Tensor, ...]:
        variants = [
            tuple(read.operand(place) for place in OPTIONAL_PLACES[name])
            for name in ("peepholes", "layer normalization")
            if any(read.inputs[place] is not None for place in OPTIONAL_PLACES[name] if place < len(read.inputs))
        ]
        if not any(tensor is not None for tensor in read.inputs[1:2]):
            raise Unreadable(f"{self.kind} whose input and forget gates are one")
        weights, bias = (*read.inputs[16:18], None, None)[:2]
        operands = tuple(map(read.operand, PLACES))
        if weights is not None:
            if bias is None:  # a bias that a file leaves out is 0
                zeros = np.zeros(weights.shape[:1], FLOAT if read.operand(0).dtype == FLOAT else np.int32)
                bias = Tensor(f"{read.output.name}/projection_bias", zeros.shape, str(zeros.dtype), INDICES, zeros)
            operands += (weights, bias)
        return sum(variants, operands)

    def read_attributes(self, read: FileOperator) -> Attributes:
        word = read.activation()
        if word != "TANH":
            raise Unreadable(f"{self.kind} with {word} as its activation")
        if self.axes > 2 and read.option("timeMajor"):
            raise Unreadable(f"{self.kind} over a first axis of time")
        clips = {name: float(read.option(field) or 0) for name, field in CLIPS.items()}
        if read.operand(0).dtype == FLOAT:
            return {**clips, "hidden_scale": 1.0, "hidden_zero_point": 0}
        if len(read.intermediates) != HIDDEN + 1:
            raise Unreadable(f"{self.kind} without the grids of what it computes on the way")
        hidden = read.intermediates[HIDDEN]
        if hidden.dtype != "int8":
            raise Unreadable(f"{self.kind} with a hidden state in {hidden.dtype} on the way")
        grid = hidden.quantization
        return {**clips, "hidden_scale": float(grid.scale[0]), "hidden_zero_point": int(grid.zero_point[0])}


@register
class LstmCell(UnidirectionalSequenceLstm):
    """One moment of it, in float32 alone; in files LSTM."""

    kind = "LSTM_CELL"
    axes = 2
    dtypes = ()
    other_forms = (("LSTM",),)
    options = "LSTMOptions"

    def tflite_steps(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Sequence[FileStep]:
        return tuple(replace(step, kind="LSTM") for step in super().tflite_steps(inputs, output, attributes))

    def read_steps(self, steps: Sequence[FileOperator]) -> tuple[tuple[Tensor, ...], Attributes] | None:
        (step,) = steps
        if step.operand(0).dtype != FLOAT:
            raise Unreadable(f"LSTM in {step.operand(0).dtype}")
        return self.read_operands(step), self.read_attributes(step)

    def absent_from(self, profile: Profile, name: str, operands: int) -> str:
        return f"{profile.title} has no {self.kind}" if profile.lstm_of_operators else ""


def gate_multiplier(operand: Tensor, weights: Tensor) -> float:
    """Of the sums of their products, to the scale of the gates' functions."""
    return float(scale_of(weights) * scale_of(operand) / np.float32(GATE_SCALE))


def projection_multiplier(inputs: Tensors, attributes: Attributes) -> float:
    """Of the sums of what the cell shows by a projection's weights, to the scale of the result."""
    hidden = np.float32(attributes["hidden_scale"])
    return float(scale_of(inputs[PROJECTION]) * hidden / scale_of(inputs[STATE]))


def projected(steps: np.ndarray, codes: Arrays, inputs: Tensors, attributes: Attributes) -> np.ndarray:
    """The hidden state of what the cell shows, in steps from real 0, which LiteRT takes the zero point from instead of
    adding it: other codes saturate."""
    zero_point = -attributes["hidden_zero_point"]
    shown = np.clip(steps, INT8_MIN - zero_point, INT8_MAX - zero_point)
    sums = products(shown, codes[PROJECTION]) + codes[PROJECTION_BIAS]
    steps = multiply_fixed_point(sums, *fixed_point(projection_multiplier(inputs, attributes)))
    result = np.clip(steps + zero_point_of(inputs[STATE]), INT8_MIN, INT8_MAX)
    clip = attributes["projection_clip"]
    most = int(min(float(np.float32(clip) / scale_of(inputs[STATE])), INT8_MAX))
    return (np.clip(result, -most, most) if clip > 0 and most > 0 else result).astype(np.int8)


def clipped_cell(cell: np.ndarray, inputs: Tensors, attributes: Attributes) -> np.ndarray:
    """The cell within its clip, which keeps whole steps."""
    clip = attributes["cell_clip"]
    if clip <= 0:
        return cell
    steps = min(int(np.float32(clip) / scale_of(inputs[CELL])), INT16_MAX)
    return np.clip(cell, -steps, steps) if steps > 0 else cell


def gate_sums(
    gate: int, x: np.ndarray, hidden: np.ndarray, codes: Arrays, inputs: Tensors
) -> tuple[np.ndarray, np.ndarray]:
    """What a gate has from x, within int16, and from the hidden state."""
    own, other, bias = codes[1 + gate], codes[5 + gate], codes[9 + gate]
    first = products(centered(x, inputs[0]), own) + bias
    second = products(centered(hidden, inputs[STATE]), other)
    multipliers = (gate_multiplier(inputs[0], inputs[1 + gate]), gate_multiplier(inputs[STATE], inputs[5 + gate]))
    first, second = (
        multiply_fixed_point(sums, *fixed_point(gain)) for sums, gain in zip((first, second), multipliers, strict=True)
    )
    return within_int16(first), second


def within_int16(x: np.ndarray) -> np.ndarray:
    return np.clip(x, INT16_MIN, INT16_MAX)


def by_one_kernel(
    x: np.ndarray, hidden: np.ndarray, cell: np.ndarray, codes: Arrays, inputs: Tensors, attributes: Attributes
) -> tuple[np.ndarray, np.ndarray]:
    """One moment in LiteRT's kernel: its functions in fixed point of 16 bits, its products shifted.

    Of a cell whose scale is below 2**-15, as files have it where all calibrated cells are small, it leaves the tanh out
    and takes what its memory for the result holds, the input gate: a defect.
    """
    sums = [within_int16(np.add(*gate_sums(gate, x, hidden, codes, inputs))) for gate in range(len(GATES))]
    enter, forget, leave = (short.logistic(sums[gate]) for gate in (0, 1, 3))
    candidate = short.tanh(sums[2])
    power = checked_log2(scale_of(inputs[CELL]))
    assert power is not None
    old = rounding_shift(forget * cell, 15).astype(np.int16)
    new = rounding_shift(enter * candidate, 30 + power).astype(np.int16)
    cell = clipped_cell(within_int16(old.astype(np.int64) + new), inputs, attributes)
    scale = np.float32(FUNCTION_SCALE) / np.float32(attributes["hidden_scale"]) * np.float32(FUNCTION_SCALE)
    shown = short.tanh(cell, 15 + power) if power >= -15 else enter
    steps = multiply_fixed_point(leave * shown, *fixed_point(float(scale)))
    if len(inputs) > PROJECTION:
        return projected(steps, codes, inputs, attributes), cell
    steps = steps + attributes["hidden_zero_point"]
    return np.clip(steps, INT8_MIN, INT8_MAX).astype(np.int8), cell


def by_operators(
    x: np.ndarray, hidden: np.ndarray, cell: np.ndarray, codes: Arrays, inputs: Tensors, attributes: Attributes
) -> tuple[np.ndarray, np.ndarray]:
    """One moment in TFLite-Micro, of the kernels of FULLY_CONNECTED, LOGISTIC, TANH, MUL and ADD."""
    sums = []
    for gate in range(len(GATES)):
        first, second = gate_sums(gate, x, hidden, codes, inputs)
        sums.append(within_int16(first + within_int16(second)))
    enter, forget, leave = (interpolated.logistic_at(3 * sums[gate]) for gate in (0, 1, 3))
    candidate = interpolated.tanh_at(3 * sums[2])
    scale, power = float(scale_of(inputs[CELL])), checked_log2(scale_of(inputs[CELL]))
    assert power is not None
    old = within_int16(multiply_fixed_point(forget * cell, *fixed_point(FUNCTION_SCALE * scale / scale)))
    new = within_int16(multiply_fixed_point(enter * candidate, *fixed_point(FUNCTION_SCALE**2 / scale)))
    cell = clipped_cell(within_int16(old + new), inputs, attributes)
    shift = 12 + power
    position = 3 * cell << shift if shift >= 0 else (3 * cell + (1 << (-shift - 1))) >> -shift
    factor = fixed_point(FUNCTION_SCALE**2 / float(scale_of(inputs[STATE])))
    steps = multiply_fixed_point(leave * interpolated.tanh_at(position), *factor) + zero_point_of(inputs[STATE])
    return np.clip(steps, INT8_MIN, INT8_MAX).astype(np.int8), cell
