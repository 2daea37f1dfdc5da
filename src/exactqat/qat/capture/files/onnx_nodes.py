# SPDX-License-Identifier: Apache-2.0
"""ONNX's operators as steps of a network, one handler each: of (reader, node), which gives the results.

Axes are ONNX's own, which images have as [batch, channels, height, width].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ....kit.device.arithmetic import same_padding
from ....kit.device.functions import named_by
from ..core.builder import Moving, entering
from ..core.refusals import Refused
from ..core.sizes import broadcast
from .reader import Fixed

Handler = Callable[[Any, Any], Any]
# By the operators' words.
HANDLERS: dict[str, Handler] = {}
handles = entering(HANDLERS)
# Where ONNX puts channels.
_CHANNELS = 1

# --- value by value ---------------------------------------------------------------------------------------------------

# Words of functions without attributes, and the kinds of steps that they are.
_UNARY = named_by("onnx")
# Words, kinds, and what the attributes of ONNX are in those of steps, with ONNX' defaults.
_FUNCTIONS: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "LeakyRelu": ("leaky_relu", lambda given: {"slope": float(given.get("alpha", 0.01))}),
    "Elu": ("elu", lambda given: {"alpha": float(given.get("alpha", 1.0)), "scale": 1.0, "input_scale": 1.0}),
    "Celu": ("elu", lambda given: _celu(float(given.get("alpha", 1.0)))),
    "Selu": ("elu", lambda given: _selu(given)),
    "Softplus": ("softplus", lambda given: {"beta": 1.0, "threshold": 20.0}),
    "ThresholdedRelu": ("threshold", lambda given: {"least": float(given.get("alpha", 1.0)), "value": 0.0}),
    "Gelu": ("gelu", lambda given: {"approximate": given.get("approximate", "none")}),
}
_BINARY = {"Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div"}
_MANY = {"Max": "maximum", "Min": "minimum", "Sum": "add"}


def _celu(alpha: float) -> dict[str, Any]:
    return {"alpha": alpha, "scale": 1.0, "input_scale": 1.0 / alpha}


def _selu(given: dict[str, Any]) -> dict[str, Any]:
    alpha, gamma = float(given.get("alpha", 1.6732632423543772)), float(given.get("gamma", 1.0507009873554805))
    return {"alpha": alpha, "scale": gamma, "input_scale": 1.0}


@handles(*_UNARY)
def _unary(c: Any, node: Any) -> Any:
    x = c.item(node, 0)
    return c.step(_UNARY[node.op_type], [x], x.shape)


@handles(*_FUNCTIONS)
def _function(c: Any, node: Any) -> Any:
    x, (kind, attributes) = c.item(node, 0), _FUNCTIONS[node.op_type]
    return c.step(kind, [x], x.shape, **attributes(c.attributes(node)))


@handles("HardSigmoid")
def _hard_sigmoid(c: Any, node: Any) -> Any:
    x, given = c.item(node, 0), c.attributes(node)
    line = c.step("mul", [x, float(given.get("alpha", 0.2))], x.shape)
    return c.step("clamp", [c.step("add", [line, float(given.get("beta", 0.5))], x.shape)], x.shape, min=0.0, max=1.0)


@handles("Swish")
def _swish(c: Any, node: Any) -> Any:
    x, alpha = c.item(node, 0), float(c.attributes(node).get("alpha", 1.0))
    scaled = x if alpha == 1 else c.step("mul", [x, alpha], x.shape)
    return c.step("mul", [x, c.step("sigmoid", [scaled], x.shape)], x.shape)


@handles("Ceil")
def _ceil(c: Any, node: Any) -> Any:
    x = c.item(node, 0)
    return c.step("neg", [c.step("floor", [c.step("neg", [x], x.shape)], x.shape)], x.shape)


@handles("Clip")
def _clip(c: Any, node: Any) -> Any:
    x, given = c.item(node, 0), c.attributes(node)
    ends = [real_end(c, x, c.operand_numbers(node, position)) for position in (1, 2)]
    low, high = (
        given.get(word) if end is None else float(end.reshape(()))
        for word, end in zip(("min", "max"), ends, strict=True)
    )
    if (low, high) in ((0.0, None), (0.0, 6.0)):
        return c.step("relu" if high is None else "relu6", [x], x.shape)
    return c.step("clamp", [x], x.shape, min=low, max=high)


def real_end(c: Any, x: Any, end: np.ndarray | None) -> np.ndarray | None:
    """An end of a range; of codes, the real number."""
    if end is None or end.dtype.kind == "f":
        return end
    if x.name not in c.grids:
        raise Refused("its ends are codes of no grid")
    (scale, zero_point), shift = c.grids[x.name], 128 if end.dtype == np.uint8 else 0
    return np.asarray((end.astype(np.int64) - shift - zero_point) * np.float32(scale), np.float32)


@handles(*_BINARY)
def _binary(c: Any, node: Any) -> Any:
    first, second = c.item(node, 0), c.item(node, 1)
    if _BINARY[node.op_type] == "add":
        return c.plus(first, second)
    return c.step(_BINARY[node.op_type], [first, second], broadcast(first.shape, second.shape))


@handles(*_MANY)
def _several(c: Any, node: Any) -> Any:
    first, *others = (c.item(node, position) for position in range(len(node.input)))
    for each in others:
        first = c.step(_MANY[node.op_type], [first, each], broadcast(first.shape, each.shape))
    return first


@handles("Pow")
def _power(c: Any, node: Any) -> Any:
    x, exponent = c.item(node, 0), c.item(node, 1)
    if not isinstance(exponent, Fixed) or exponent.data.size != 1 or not isinstance(x, Moving):
        raise Refused("its exponent is not one number; a power of the input by a number can be had")
    number = float(exponent.data.reshape(()))
    named = {2.0: "square", 0.5: "sqrt", -1.0: "reciprocal"}
    if number in named:
        return c.step(named[number], [x], x.shape)
    return c.step("pow", [x], x.shape, exponent=number)


@handles("PRelu")
def _prelu(c: Any, node: Any) -> Any:
    x, slope = c.item(node, 0), c.item(node, 1)
    sizes = (1,) * (x.rank - len(slope.shape)) + tuple(slope.shape)
    axis = next((at for at, size in enumerate(sizes) if size != 1), _CHANNELS)
    if not isinstance(slope, Fixed) or sizes[axis] != math.prod(sizes):
        raise Refused("its slopes are not one number for each channel")
    return c.step("prelu", [x, c.weight(slope, lambda data: data.reshape(-1))], x.shape, channel_axis=axis)


@handles("Identity", "Dropout", "Cast", "CastLike")
def _same(c: Any, node: Any) -> Any:
    x = c.item(node, 0)
    if node.op_type == "Cast" and c.attributes(node)["to"] != c.onnx.TensorProto.FLOAT and x.dtype == "float32":
        raise Refused("it makes something else than float32 of real numbers")
    return x


# --- with weights -----------------------------------------------------------------------------------------------------


def pads_of(given: dict[str, Any], sizes: Sequence[int], window: Sequence[int]) -> list[tuple[int, int]]:
    """(before, after) for each spatial axis."""
    spatial, word = len(window), given.get("auto_pad", "NOTSET")
    if word == "VALID":
        return [(0, 0)] * spatial
    if word == "NOTSET":
        pads = list(given.get("pads") or [0] * (2 * spatial))
        return [(int(pads[at]), int(pads[at + spatial])) for at in range(spatial)]
    strides, dilations = (given.get(name) or [1] * spatial for name in ("strides", "dilations"))
    axes = list(zip(sizes, window, strides, dilations, strict=True))
    for size, side, stride, dilation in axes:
        if (-(-size // stride) - 1) * stride + (side - 1) * dilation + 1 < size:
            # onnxruntime pads with fewer than none: it rejects floats, and moves the window of integers.
            raise Refused(f"{word} asks for less than no padding of {size} values; export it with pads")
    found = [same_padding(*axis) for axis in axes]
    return [pair if word == "SAME_UPPER" else pair[::-1] for pair in found]


@handles("Conv")
def _convolution(c: Any, node: Any) -> Any:
    x, given, weight = c.item(node, 0), c.attributes(node), c.weight(c.item(node, 1))
    spatial = x.rank - 2
    return c.step(
        "conv",
        [x, weight, c.item(node, 2)],
        c.shapes(node)[0],
        strides=tuple(given.get("strides") or [1] * spatial),
        padding=tuple(pads_of(given, x.shape[2:], weight.shape[2:])),
        dilations=tuple(given.get("dilations") or [1] * spatial),
        groups=int(given.get("group", 1)),
        channel_axis=_CHANNELS,
    )


@handles("ConvTranspose")
def _transposed_convolution(c: Any, node: Any) -> Any:
    x, given, weight = c.item(node, 0), c.attributes(node), c.weight(c.item(node, 1))
    spatial, shape = x.rank - 2, c.shapes(node)[0]
    strides, dilations, more = (
        tuple(given.get(name) or [default] * spatial)
        for name, default in (("strides", 1), ("dilations", 1), ("output_padding", 0))
    )
    if given.get("output_shape") or given.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise Refused("its padding follows from the shape of its result; export it with pads")
    pads = tuple(pads_of(given, x.shape[2:], weight.shape[2:]))
    how = {"strides": strides, "dilations": dilations, "output_padding": more, "padding": pads}
    groups = int(given.get("group", 1))
    return c.step("conv_transpose", [x, weight, c.item(node, 2)], shape, groups=groups, channel_axis=_CHANNELS, **how)


@handles("Gemm")
def _gemm(c: Any, node: Any) -> Any:
    x, given, weight, bias = c.item(node, 0), c.attributes(node), c.item(node, 1), c.item(node, 2)
    if given.get("transA"):
        raise Refused("its first operand is transposed")
    alpha, beta = float(given.get("alpha", 1.0)), float(given.get("beta", 1.0))
    weight = c.weight(weight, lambda data: data if given.get("transB") else data.T)
    weight = weight if alpha == 1 else Fixed(weight.name, weight.data * np.asarray(alpha, weight.data.dtype))
    if bias is not None:
        bias = c.weight(bias, lambda data: np.broadcast_to(data, (1, weight.shape[0])).reshape(-1))
        bias = bias if beta == 1 else Fixed(bias.name, bias.data * np.float32(beta))
    return c.step("linear", [x, weight, bias], c.shapes(node)[0])


@handles("MatMul")
def _matmul(c: Any, node: Any) -> Any:
    first, second = c.item(node, 0), c.item(node, 1)
    shape = c.shapes(node)[0]
    if isinstance(first, Moving) and isinstance(second, Fixed) and len(second.shape) == 2:
        return c.step("linear", [first, c.weight(second, lambda data: data.T)], shape)
    return c.step("matmul", [first, second], shape)


# --- normalization ----------------------------------------------------------------------------------------------------


@handles("BatchNormalization")
def _batch_norm(c: Any, node: Any) -> Any:
    x, given = c.item(node, 0), c.attributes(node)
    if given.get("training_mode"):
        raise Refused("it was exported in training; export it in evaluation")
    tensors = [c.weight(c.item(node, position)) for position in range(1, 5)]
    tensors[2:] = [Fixed(each.name, each.data, trained=False) for each in tensors[2:]]
    how = {"epsilon": float(given.get("epsilon", 1e-5)), "momentum": None, "training": False}
    return c.step("batch_norm", [x, *tensors], x.shape, channel_axis=_CHANNELS, **how)


@handles("InstanceNormalization", "GroupNormalization")
def _group_norm(c: Any, node: Any) -> Any:
    x, given, weight, bias = c.item(node, 0), c.attributes(node), c.item(node, 1), c.item(node, 2)
    channels = x.shape[_CHANNELS]
    groups = int(given.get("num_groups", channels))
    if weight.shape != (channels,):  # one number for each group, as opset 18 had it
        weight, bias = (c.weight(each, lambda data: np.repeat(data, channels // groups)) for each in (weight, bias))
    epsilon = float(given.get("epsilon", 1e-5))
    return c.step("group_norm", [x, weight, bias], x.shape, groups=groups, epsilon=epsilon, channel_axis=_CHANNELS)


@handles("LayerNormalization", "RMSNormalization")
def _layer_norm(c: Any, node: Any) -> Any:
    x, given = c.item(node, 0), c.attributes(node)
    axes = tuple(range(int(given.get("axis", -1)) % x.rank, x.rank))
    kind = "layer_norm" if node.op_type == "LayerNormalization" else "rms_norm"
    operands = [c.item(node, position) for position in range(1, len(node.input))]
    return c.step(kind, [x, *operands], x.shape, axes=axes, epsilon=float(given.get("epsilon", 1e-5)))


@handles("LpNormalization")
def _normalize(c: Any, node: Any) -> Any:
    x, given = c.item(node, 0), c.attributes(node)
    if int(given.get("p", 2)) != 2:
        raise Refused("its order must be 2")
    return c.step("normalize", [x], x.shape, axis=int(given.get("axis", -1)) % x.rank, epsilon=1e-12)


@handles("Softmax", "LogSoftmax")
def _softmax(c: Any, node: Any) -> Any:
    x, flat = c.item(node, 0), c.opset < 13
    axis = int(c.attributes(node).get("axis", 1 if flat else -1)) % x.rank
    if flat and math.prod(x.shape[axis + 1 :]) != 1:
        raise Refused("before opset 13 it is over several axes; convert the model to a later one")
    return c.step("softmax" if node.op_type == "Softmax" else "log_softmax", [x], x.shape, axis=axis)


# --- over axes and windows --------------------------------------------------------------------------------------------

_REDUCTIONS = {
    f"Reduce{word}": kind
    for word, kind in (("Mean", "mean"), ("Sum", "sum"), ("Max", "amax"), ("Min", "amin"), ("Prod", "prod"))
}


@handles(*_REDUCTIONS, "ReduceL1", "ReduceL2", "ReduceSumSquare")
def _reduced(c: Any, node: Any) -> Any:
    x, given, axes = c.item(node, 0), c.attributes(node), c.operand_numbers(node, 1)
    axes = given.get("axes") if axes is None else axes.reshape(-1).tolist()
    if not axes and given.get("noop_with_empty_axes"):
        return x
    axes = tuple(sorted(int(axis) % x.rank for axis in axes)) if axes else tuple(range(x.rank))
    shape, how = c.shapes(node)[0], {"axes": axes, "keep_dims": bool(given.get("keepdims", 1))}
    if c.batch_axis(x.shape) in axes:
        raise Refused("it reduces the batch's axis")
    if node.op_type in ("ReduceL1", "ReduceL2"):
        return c.step("norm", [x], shape, order=int(node.op_type[-1]), **how)
    if node.op_type == "ReduceSumSquare":
        return c.step("sum", [c.step("square", [x], x.shape)], shape, **how)
    return c.step(_REDUCTIONS[node.op_type], [x], shape, **how)


@handles("ArgMax")
def _argmax(c: Any, node: Any) -> Any:
    x, given = c.item(node, 0), c.attributes(node)
    if given.get("select_last_index"):
        raise Refused("of equal values it takes the last")
    how = {"axis": int(given.get("axis", 0)) % x.rank, "keep_dims": bool(given.get("keepdims", 1))}
    return c.step("argmax", [x], c.shapes(node)[0], dtype="int64", **how)


@handles("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(c: Any, node: Any) -> Any:
    x = c.item(node, 0)
    kind, axes = "mean" if node.op_type == "GlobalAveragePool" else "amax", tuple(range(2, x.rank))
    return c.step(kind, [x], c.shapes(node)[0], axes=axes, keep_dims=True)


@handles("AveragePool", "MaxPool")
def _pool(c: Any, node: Any) -> Any:
    x, given, shape = c.item(node, 0), c.attributes(node), c.shapes(node)[0]
    window = tuple(given["kernel_shape"])
    spatial = len(window)
    strides = tuple(given.get("strides") or [1] * spatial)
    dilations = tuple(given.get("dilations") or [1] * spatial)
    pads = pads_of(given, x.shape[2:], window)
    reach = [(size - 1) * apart + 1 for size, apart in zip(window, dilations, strict=True)]
    over = [
        max((result - 1) * stride + side - (size + before + after), 0)
        for result, stride, side, size, (before, after) in zip(
            shape[2:], strides, reach, x.shape[2:], pads, strict=True
        )
    ]
    how: dict[str, Any] = {"window": window, "strides": strides, "channel_axis": _CHANNELS}
    if node.op_type == "MaxPool":
        padding = tuple((before, after + more) for (before, after), more in zip(pads, over, strict=True))
        return c.step("max_pool", [x], shape, padding=padding, dilations=dilations, **how)
    if any(apart != 1 for apart in dilations):
        raise Refused("its window is dilated")
    counting = {"over": tuple(over), "count_include_pad": bool(given.get("count_include_pad", 0)), "divisor": None}
    return c.step("avg_pool", [x], shape, padding=tuple(pads), **counting, **how)
