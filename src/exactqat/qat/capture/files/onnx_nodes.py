# SPDX-License-Identifier: Apache-2.0
"""ONNX's operators as steps of a network, one handler each: of (reader, attributes, *operands); it gives the results.

Operands that are left out are None. Axes are ONNX's own, which images have as [batch, channels, height, width].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....kit.device.arithmetic import same_padding
from ....kit.device.functions import named_by
from ..core.builder import Moving, entering
from ..core.refusals import Refused
from ..core.sizes import broadcast
from ..core.windows import each, windows
from .reader import Fixed, Item, Result

if TYPE_CHECKING:
    from .onnx import OnnxReader


class Attributes(dict[str, Any]):
    """Of an operator, with ONNX' own defaults; None where there is none."""

    def __missing__(self, name: str) -> None:
        return None


Handler = Callable[..., Result]
# By the operators' words.
HANDLERS: dict[str, Handler] = {}
handles = entering(HANDLERS)
# Where ONNX puts channels.
_CHANNELS = 1

# --- value by value ---------------------------------------------------------------------------------------------------

# Words, kinds of steps, and the attributes of these, of ONNX's.
_FUNCTIONS: dict[str, tuple[str, Callable[[Attributes], dict[str, Any]]]] = {
    **{word: (kind, lambda node: {}) for word, kind in named_by("onnx").items()},
    "LeakyRelu": ("leaky_relu", lambda node: {"slope": node["alpha"]}),
    "Elu": ("elu", lambda node: {"alpha": node["alpha"], "scale": 1.0, "input_scale": 1.0}),
    "Celu": ("elu", lambda node: {"alpha": node["alpha"], "scale": 1.0, "input_scale": 1.0 / node["alpha"]}),
    "Selu": ("elu", lambda node: {"alpha": node["alpha"], "scale": node["gamma"], "input_scale": 1.0}),
    "Softplus": ("softplus", lambda node: {"beta": 1.0, "threshold": 20.0}),
    "ThresholdedRelu": ("threshold", lambda node: {"least": node["alpha"], "value": 0.0}),
    "Gelu": ("gelu", lambda node: {"approximate": node["approximate"]}),
}
_OF_SEVERAL = {"Sub": "sub", "Mul": "mul", "Div": "div", "Max": "maximum", "Min": "minimum", "Sum": "add"}


@handles(*_FUNCTIONS)
def _function(c: OnnxReader, node: Attributes, x: Moving) -> Result:
    kind, attributes = _FUNCTIONS[c.word]
    return c.step(kind, [x], x.shape, **attributes(node))


@handles("HardSigmoid")
def _hard_sigmoid(c: OnnxReader, node: Attributes, x: Moving) -> Result:
    if c.grids:  # between the file's codes nothing else is stored
        alpha, beta = float(node["alpha"]), float(node["beta"])
        line = ("mul", (0, alpha), ()), ("add", (1, beta), ()), ("clamp", (2,), (0.0, 1.0))
        return c.emit("composition", [x], x.shape, instructions=line)
    line = c.step("add", [c.step("mul", [x, node["alpha"]], x.shape), node["beta"]], x.shape)
    return c.step("clamp", [line], x.shape, min=0.0, max=1.0)


@handles("Swish")
def _swish(c: OnnxReader, node: Attributes, x: Moving) -> Result:
    scaled = c.step("mul", [x, node["alpha"]], x.shape)
    return c.step("mul", [x, c.step("sigmoid", [scaled], x.shape)], x.shape)


HANDLERS.update(
    {
        "Add": lambda c, node, first, second: c.plus(first, second),
        "Ceil": lambda c, node, x: c.step("neg", [c.step("floor", [c.step("neg", [x], x.shape)], x.shape)], x.shape),
    }
)


@handles("Clip")
def _clip(c: OnnxReader, node: Attributes, x: Moving, *ends: Item | None) -> Result:
    bounds = {name: node[name] for name in ("min", "max")}
    for name, end in zip(bounds, map(c.fixed, ends), strict=False):
        if end is not None and end.dtype.kind != "f":  # codes
            if x.name not in c.grids:
                raise Refused("its ends are codes of no grid")
            (scale, zero_point), shift = c.grids[x.name], 128 if end.dtype == np.uint8 else 0
            end = np.asarray((end.astype(np.int64) - shift - zero_point) * np.float32(scale), np.float32)
        bounds[name] = node[name] if end is None else float(end.reshape(()))
    return c.step("clamp", [x], x.shape, **bounds)


@handles(*_OF_SEVERAL)
def _of_several(c: OnnxReader, node: Attributes, first: Item, *others: Item) -> Result:
    for other in others:
        first = c.step(_OF_SEVERAL[c.word], [first, other], broadcast(first.shape, other.shape))
    return first


@handles("Pow")
def _power(c: OnnxReader, node: Attributes, x: Item, exponent: Item) -> Result:
    if not isinstance(exponent, Fixed) or exponent.data.size != 1 or not isinstance(x, Moving):
        raise Refused("its exponent is not one number; a power of the input by a number can be had")
    number = float(exponent.data.reshape(()))
    named = {2.0: "square", 0.5: "sqrt", -1.0: "reciprocal"}
    if number in named:
        return c.step(named[number], [x], x.shape)
    return c.step("pow", [x], x.shape, exponent=number)


@handles("PRelu")
def _prelu(c: OnnxReader, node: Attributes, x: Moving, slope: Item) -> Result:
    sizes = (1,) * (x.rank - len(slope.shape)) + tuple(slope.shape)
    axis = next((at for at, size in enumerate(sizes) if size != 1), _CHANNELS)
    if not isinstance(slope, Fixed) or sizes[axis] != math.prod(sizes):
        raise Refused("its slopes are not one number for each channel")
    return c.step("prelu", [x, c.weight(slope, lambda data: data.reshape(-1))], x.shape, channel_axis=axis)


@handles("Identity", "Dropout", "Cast", "CastLike")
def _same(c: OnnxReader, node: Attributes, x: Moving, *others: Item | None) -> Result:
    if c.word == "Cast" and node["to"] != c.onnx.TensorProto.FLOAT and x.dtype == "float32":
        raise Refused("it makes something else than float32 of real numbers")
    return x


# --- with weights -----------------------------------------------------------------------------------------------------


def _windows(node: Attributes, x: Moving, window: Sequence[int]) -> dict[str, Any]:
    """The attributes of steps with windows over the spatial axes."""
    count, word = len(window), node["auto_pad"]
    strides, dilations = each(node["strides"] or 1, count), each(node["dilations"] or 1, count)
    axes = list(zip(x.shape[2:], window, strides, dilations, strict=True))
    pairs = [(0, 0)] * count
    if word == "NOTSET" and node["pads"]:
        pairs = list(zip(node["pads"][:count], node["pads"][count:], strict=True))
    elif word not in ("NOTSET", "VALID"):
        for size, side, stride, dilation in axes:
            if (-(-size // stride) - 1) * stride + (side - 1) * dilation + 1 < size:
                # onnxruntime pads with fewer than none: it rejects floats, and moves the window of integers.
                raise Refused(f"{word} asks for less than no padding of {size} values; export it with pads")
        pairs = [same_padding(*axis) for axis in axes]
        pairs = pairs if word == "SAME_UPPER" else [(after, before) for before, after in pairs]
    return windows(strides, pairs, dilations)


@handles("Conv")
def _convolution(c: OnnxReader, node: Attributes, x: Moving, kernel: Item, bias: Item | None = None) -> Result:
    weight = c.weight(kernel)
    how = _windows(node, x, weight.shape[2:])
    return c.step("conv", [x, weight, bias], c.shape, **how, groups=node["group"], channel_axis=_CHANNELS)


@handles("ConvTranspose")
def _transposed(c: OnnxReader, node: Attributes, x: Moving, kernel: Item, bias: Item | None = None) -> Result:
    weight, shape = c.weight(kernel), c.shape
    if node["output_shape"] or node["auto_pad"] not in ("NOTSET", "VALID"):
        raise Refused("its padding follows from the shape of its result; export it with pads")
    more = {"output_padding": each(node["output_padding"] or 0, x.rank - 2), "groups": node["group"]}
    how = {**_windows(node, x, weight.shape[2:]), **more}
    return c.step("conv_transpose", [x, weight, bias], shape, channel_axis=_CHANNELS, **how)


@handles("Gemm")
def _gemm(c: OnnxReader, node: Attributes, x: Moving, matrix: Item, bias: Item | None = None) -> Result:
    if node["transA"]:
        raise Refused("its first operand is transposed")
    alpha, beta = node["alpha"], node["beta"]
    weight = c.weight(matrix, lambda data: data if node["transB"] else data.T)
    weight = weight if alpha == 1 else Fixed(weight.name, weight.data * np.asarray(alpha, weight.data.dtype))
    if bias is not None:
        bias = c.weight(bias, lambda data: np.broadcast_to(data, (1, weight.shape[0])).reshape(-1))
        bias = bias if beta == 1 else Fixed(bias.name, bias.data * np.float32(beta))
    return c.step("linear", [x, weight, bias], c.shape)


@handles("MatMul")
def _matmul(c: OnnxReader, node: Attributes, first: Item, second: Item) -> Result:
    shape = c.shape
    if isinstance(first, Moving) and isinstance(second, Fixed) and len(second.shape) == 2:
        return c.step("linear", [first, c.weight(second, lambda data: data.T)], shape)
    return c.step("matmul", [first, second], shape)


# --- normalization ----------------------------------------------------------------------------------------------------


@handles("BatchNormalization")
def _batch_norm(c: OnnxReader, node: Attributes, x: Moving, *tensors: Item) -> Result:
    if node["training_mode"]:
        raise Refused("it was exported in training; export it in evaluation")
    scale, bias, *statistics = map(c.weight, tensors)
    operands = [x, scale, bias, *(Fixed(statistic.name, statistic.data, trained=False) for statistic in statistics)]
    how: dict[str, Any] = {"channel_axis": _CHANNELS, "momentum": None, "training": False}
    return c.step("batch_norm", operands, x.shape, epsilon=node["epsilon"], **how)


@handles("InstanceNormalization", "GroupNormalization")
def _group_norm(c: OnnxReader, node: Attributes, x: Moving, weight: Item, bias: Item) -> Result:
    channels = x.shape[_CHANNELS]
    groups = node["num_groups"] or channels
    if weight.shape != (channels,):  # one number for each group, as opset 18 had it
        weight, bias = (c.weight(item, lambda data: np.repeat(data, channels // groups)) for item in (weight, bias))
    how = {"groups": groups, "epsilon": node["epsilon"], "channel_axis": _CHANNELS}
    return c.step("group_norm", [x, weight, bias], x.shape, **how)


@handles("LayerNormalization", "RMSNormalization")
def _layer_norm(c: OnnxReader, node: Attributes, x: Moving, *weights: Item | None) -> Result:
    kind = "layer_norm" if c.word == "LayerNormalization" else "rms_norm"
    axes = tuple(range(node["axis"] % x.rank, x.rank))
    return c.step(kind, [x, *weights], x.shape, axes=axes, epsilon=node["epsilon"])


@handles("LpNormalization")
def _normalize(c: OnnxReader, node: Attributes, x: Moving) -> Result:
    if node["p"] != 2:
        raise Refused("its order must be 2")
    return c.step("normalize", [x], x.shape, axis=node["axis"] % x.rank, epsilon=1e-12)


@handles("Softmax", "LogSoftmax")
def _softmax(c: OnnxReader, node: Attributes, x: Moving) -> Result:
    axis = node["axis"] % x.rank
    if c.opset < 13 and math.prod(x.shape[axis + 1 :]) != 1:
        raise Refused("before opset 13 it is over several axes; convert the model to a later one")
    return c.step("softmax" if c.word == "Softmax" else "log_softmax", [x], x.shape, axis=axis)


# --- over axes and windows --------------------------------------------------------------------------------------------

_REDUCTIONS = {
    **{"ReduceMean": "mean", "ReduceSum": "sum", "ReduceSumSquare": "sum", "ReduceMax": "amax", "ReduceMin": "amin"},
    **{"ReduceProd": "prod", "ReduceL1": "norm", "ReduceL2": "norm"},
}


@handles(*_REDUCTIONS)
def _reduced(c: OnnxReader, node: Attributes, x: Moving, over: Item | None = None) -> Result:
    axes = tuple(sorted(axis % x.rank for axis in c.integers(over, node["axes"])))
    if not axes and node["noop_with_empty_axes"]:
        return x
    how: dict[str, Any] = {"axes": axes or tuple(range(x.rank)), "keep_dims": bool(node["keepdims"])}
    shape = c.shape
    if c.batch_axis(x.shape) in how["axes"]:
        raise Refused("it reduces the batch's axis")
    how |= {"order": int(c.word[-1])} if c.word[-1].isdigit() else {}
    operand = c.step("square", [x], x.shape) if c.word == "ReduceSumSquare" else x
    return c.step(_REDUCTIONS[c.word], [operand], shape, **how)


@handles("ArgMax")
def _argmax(c: OnnxReader, node: Attributes, x: Moving) -> Result:
    if node["select_last_index"]:
        raise Refused("of equal values it takes the last")
    keep = bool(node["keepdims"])
    return c.step("argmax", [x], c.shape, dtype="int64", axis=node["axis"] % x.rank, keep_dims=keep)


@handles("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(c: OnnxReader, node: Attributes, x: Moving) -> Result:
    kind = "mean" if c.word == "GlobalAveragePool" else "amax"
    return c.step(kind, [x], c.shape, axes=tuple(range(2, x.rank)), keep_dims=True)


@handles("AveragePool", "MaxPool")
def _pool(c: OnnxReader, node: Attributes, x: Moving) -> Result:
    shape, window = c.shape, tuple(node["kernel_shape"])
    how = {"window": window, **_windows(node, x, window), "channel_axis": _CHANNELS}
    sides: Any = (shape[2:], x.shape[2:], window, how["strides"], how["dilations"], how["padding"])
    over = tuple(
        max((result - 1) * stride + (side - 1) * dilation + 1 - (size + before + after), 0)
        for result, size, side, stride, dilation, (before, after) in zip(*sides, strict=True)
    )
    if c.word == "MaxPool":
        pairs = zip(how["padding"], over, strict=True)
        return c.step(
            "max_pool", [x], shape, **how | {"padding": tuple((one, two + more) for (one, two), more in pairs)}
        )
    if any(dilation != 1 for dilation in how.pop("dilations")):
        raise Refused("its window is dilated")
    counted = bool(node["count_include_pad"])
    return c.step("avg_pool", [x], shape, over=over, count_include_pad=counted, divisor=None, **how)


# --- recurrent layers -------------------------------------------------------------------------------------------------

# Places in ONNX of a network's gates: input, forget, cell and output gate of an LSTM; a GRU has them as networks have.
_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (0, 1, 2)}
_ACTIVATIONS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"]}


@handles("LSTM", "GRU")
def _recurrent(c: OnnxReader, node: Attributes, x: Moving, *operands: Item | None) -> Result:
    """operands: kernel, recurrent kernel, biases, lengths, first state, first memory, peepholes."""
    held, others = operands[:3], list(operands[3:])
    lengths, *states, peepholes = others + [None] * (4 - len(others))
    if any(begins is not None and np.any(begins) for begins in map(c.fixed, states)):
        raise Refused("it begins with a state other than 0")
    directions, gates = 2 if node["direction"] == "bidirectional" else 1, _GATES[c.word]
    activations, usual = [word.decode() for word in node["activations"] or ()], _ACTIVATIONS[c.word] * directions
    if activations not in ([], usual) or node["clip"] or node["input_forget"]:
        raise Refused("its activations, clip or coupled gates are others than usual")
    if lengths is not None or peepholes is not None:
        raise Refused("its sequences end at different places, or it has peepholes")
    if c.word == "GRU" and not node["linear_before_reset"]:
        raise Refused("linear_before_reset=0 resets in front of the product; export it with 1")
    kernels, weights = [c.weight(item) for item in held if item is not None], []
    for at in range(directions):
        parts = [(item.name, item.data[at]) for item in kernels[:2]]
        parts += [(item.name, half) for item in kernels[2:] for half in np.split(item.data[at], 2)]
        for number, (name, part) in enumerate(parts):
            rows = np.split(part, len(gates), 0)
            weights.append(Fixed(f"{name}_{at}_{number}", np.concatenate([rows[gate] for gate in gates])))
    layout, (first, second), hidden = bool(node["layout"]), x.shape[:2], kernels[1].shape[-1]
    how: dict[str, Any] = {"layers": 1, "bidirectional": directions == 2, "has_bias": len(kernels) == 3}
    how |= {"batch_first": layout, "backwards": node["direction"] == "reverse"}
    how |= {"update_first": True} if c.word == "GRU" else {}
    results: list[Item | None] = [None] * len(c.outputs)
    for number in (number for number, name in enumerate(c.outputs) if name):
        end = (directions, first if layout else second, hidden)
        shape = end if number else (first, second, directions * hidden)
        result = c.step(c.word.lower(), [x, *weights], shape, output=number, **how)
        if number:
            results[number] = c.permute(result, (1, 0, 2)) if layout else result
        else:
            apart = c.reshape(result, (first, second, directions, hidden))
            results[number] = apart if layout else c.permute(apart, (0, 2, 1, 3))
    return results
