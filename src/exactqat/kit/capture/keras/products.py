# SPDX-License-Identifier: Apache-2.0
"""Convolutions, products and attention."""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...planning.elementwise import SURELY_MASKED
from ..core import masks
from ..core.builder import Moving
from ..core.products import along, of_two, with_weight
from ..core.refusals import Refused
from ..core.sizes import broadcast
from ..core.windows import each, padding_in_numbers, windows
from .items import Fixed, Item
from .reader import Reader, layers, operations
from .reduction import channel_axis_of, spatial_sizes, windowed


def _variable(layer: Any) -> Any:
    """A layer's kernel as it is kept: under LoRA, `kernel` is a sum."""
    held = getattr(layer, "_kernel", None)
    return layer.kernel if held is None else held


# A convolution that only joins channels.
_POINTWISE = SimpleNamespace(strides=1, padding="valid", dilation_rate=1)


def _convolve(
    c: Reader, how: Any, x: Moving, weight: Fixed, bias: Fixed | None, groups: int, axis: int, module: str
) -> Moving:
    """how: has `strides`, `padding` and `dilation_rate`. weight: [out, in / groups, *window]"""
    count, window = x.rank - 2, weight.shape[2:]
    strides, dilations = each(how.strides, count), each(how.dilation_rate, count)
    padding = padding_in_numbers(how.padding, spatial_sizes(x, axis), window, strides, dilations)
    shape = windowed(x, axis, window, strides, padding, dilations, weight.shape[0])
    attributes = windows(strides, padding, dilations)
    return c.emit("conv", [x, weight, bias], shape, module=module, **attributes, groups=groups, channel_axis=axis)


def _kernel(c: Reader, kernel: Fixed) -> Fixed:
    """[*window, in / groups, out] as [out, in / groups, *window]."""
    rank = len(kernel.shape)
    order = (rank - 1, rank - 2, *range(rank - 2))
    return c.then(kernel, [kernel.shape[at] for at in order], lambda array: array.transpose(order))


def _depthwise_kernel(c: Reader, kernel: Fixed) -> Fixed:
    """[*window, channels, multiplier] as [channels * multiplier, 1, *window]."""
    rank = len(kernel.shape)
    window, outputs = kernel.shape[:-2], kernel.shape[-2] * kernel.shape[-1]
    order = (rank - 2, rank - 1, *range(rank - 2))
    return c.then(kernel, (outputs, 1, *window), lambda array: array.transpose(order).reshape((outputs, 1, *window)))


@layers("Conv1D", "Conv2D")
def _conv(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axis = channel_axis_of(layer.data_format, x.rank)
    kernel = _variable(layer)
    weight, bias = _kernel(c, c.weight(kernel)), c.optional(layer.bias)
    made = _convolve(c, layer, x, weight, bias, int(layer.groups), axis, c.layer_path(kernel))
    return c.apply(layer.activation, made)


@layers("DepthwiseConv1D", "DepthwiseConv2D")
def _depthwise(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axis = channel_axis_of(layer.data_format, x.rank)
    weight, bias = _depthwise_kernel(c, c.weight(layer.kernel)), c.optional(layer.bias)
    made = _convolve(c, layer, x, weight, bias, x.shape[axis], axis, c.layer_path(layer.kernel))
    return c.apply(layer.activation, made)


@layers("SeparableConv1D", "SeparableConv2D")
def _separable(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axis, path = channel_axis_of(layer.data_format, x.rank), c.layer_path(layer.depthwise_kernel)
    first = _depthwise_kernel(c, c.weight(layer.depthwise_kernel))
    second = _kernel(c, c.weight(layer.pointwise_kernel))
    y = _convolve(c, layer, x, first, None, x.shape[axis], axis, f"{path}.depthwise")
    made = _convolve(c, _POINTWISE, y, second, c.optional(layer.bias), 1, axis, path)
    return c.apply(layer.activation, made)


@layers("Conv1DTranspose", "Conv2DTranspose")
def _conv_transpose(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axis, count = channel_axis_of(layer.data_format, x.rank), x.rank - 2
    kernel = c.weight(layer.kernel)
    *window, outputs, inputs = kernel.shape
    order = (count + 1, count, *range(count))
    weight = c.then(kernel, (inputs, outputs, *window), lambda array: array.transpose(order))
    strides, dilations = each(layer.strides, count), each(layer.dilation_rate, count)
    shape = [x.shape[0], *layer.compute_output_shape((None, *x.shape[1:]))[1:]]
    sizes, results = spatial_sizes(x, axis), [size for at, size in enumerate(shape) if at not in (0, axis)]
    cut, extra = [], []
    for size, result, side, stride, dilation in zip(sizes, results, window, strides, dilations, strict=True):
        whole = (size - 1) * stride + (side - 1) * dilation + 1
        # As the gradient of a convolution with that padding.
        before = 0 if layer.padding == "valid" else max((size - 1) * stride + side - result, 0) // 2
        after = whole - before - result
        cut.append((before, max(after, 0)))
        extra.append(max(-after, 0))
    made = c.emit(
        "conv_transpose",
        [x, weight, c.optional(layer.bias)],
        shape,
        module=c.layer_path(layer.kernel),
        **windows(strides, cut, dilations),
        output_padding=tuple(extra),
        groups=1,
        channel_axis=axis,
    )
    return c.apply(layer.activation, made)


@operations("Conv", "DepthwiseConv")
def _conv_operation(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """`keras.ops.conv` with a weight, in a layer of the user's."""
    x, kernel = args
    if not isinstance(x, Moving) or not isinstance(kernel, Fixed) or not kernel.name:
        raise Refused("its kernel is no weight")
    axis, path = channel_axis_of(operation.data_format, x.rank), kernel.name.rpartition(".")[0]
    depthwise = type(operation).__name__ == "DepthwiseConv"
    weight = _depthwise_kernel(c, kernel) if depthwise else _kernel(c, kernel)
    return _convolve(c, operation, x, weight, None, x.shape[axis] // weight.shape[1], axis, path)


def linear(c: Reader, x: Any, kernel: Fixed, bias: Fixed | None, module: str) -> Moving:
    """kernel: [in, out]"""
    weight = c.then(kernel, kernel.shape[::-1], lambda array: array.transpose((1, 0)))
    return c.emit("linear", [x, weight, bias], (*x.shape[:-1], kernel.shape[1]), module=module)


@layers("Dense")
def _dense(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    kernel = _variable(layer)
    return c.apply(layer.activation, linear(c, x, c.weight(kernel), c.optional(layer.bias), c.layer_path(kernel)))


@layers("EinsumDense")
def _einsum_dense(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    kernel = _variable(layer)
    made = _contract(c, layer.equation, x, c.weight(kernel), c.optional(layer.bias), c.layer_path(kernel))
    return c.apply(layer.activation, made)


def _contract(c: Reader, equation: str, x: Moving, kernel: Fixed, bias: Fixed | None, module: str) -> Item:
    """An einsum of a value with a weight."""
    left, result = equation.replace(" ", "").split("->")
    first, second = left.split(",")
    if first.startswith("..."):
        free = "".join(each for each in "ABCDEFGH" if each not in equation)[: x.rank - len(first) + 3]
        first, result = first.replace("...", free), result.replace("...", free)
    summed = [letter for letter in first if letter not in result]
    kept, made = [each for each in first if each in result], [each for each in second if each not in first]
    if any(each in kept for each in second) or len(first) != x.rank:
        raise Refused(f"with the equation {equation}")
    if bias is not None:
        wanted = [kernel.shape[second.index(each)] if each in made else 1 for each in result]
        if [1] * (len(wanted) - len(bias.shape)) + list(bias.shape) != wanted or [
            each for each in result if each in made
        ] != made:
            raise Refused("with a bias over other axes than its own")
        count = math.prod(bias.shape)
        bias = c.then(bias, (count,), lambda array: array.reshape((count,)))
    axes, weight_axes = ([letters.index(each) for each in summed] for letters in (first, second))
    product = with_weight(c, x, axes, kernel, weight_axes, module, bias)
    names = [*kept, *made]
    return c.permute(product, [names.index(each) for each in result])


@operations("Einsum")
def _einsum(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    equation, (first, second) = operation.subscripts, args
    if isinstance(second, Fixed) and isinstance(first, Moving):
        return _contract(c, equation, first, second, None, "")
    if not isinstance(first, Moving) or not isinstance(second, Moving) or "." in equation:
        raise Refused(f"with the equation {equation}")
    left, result = equation.replace(" ", "").split("->")
    a, b = left.split(",")
    lead = [letter for letter in a if letter in b and letter in result]
    summed = [letter for letter in a if letter in b and letter not in result]
    batched, contracted = ([[term.index(each) for each in letters] for term in (a, b)] for letters in (lead, summed))
    names = [*lead, *(letter for letter in a + b if (letter in a) != (letter in b))]
    made = of_two(c, first, second, (batched[0], batched[1]), (contracted[0], contracted[1]))
    return c.permute(made, [names.index(each) for each in result])


@operations("Matmul")
def _matmul(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    first, second = args
    if isinstance(first, Moving) and isinstance(second, Fixed) and len(second.shape) == 2 and second.name:
        return linear(c, first, second, None, second.name.rpartition(".")[0])
    shape = (*broadcast(first.shape[:-2], second.shape[:-2]), first.shape[-2], second.shape[-1])
    return c.emit("matmul", [first, second], shape)


@operations("DotProductAttention")
def _attention(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """[batch, time, heads, size]"""
    given = inspect.signature(operation.call).bind(*args, **kwargs).arguments
    query, key, value = (given[name] for name in ("query", "key", "value"))
    mask, bias = given.get("mask"), given.get("bias")
    if getattr(operation, "attn_logits_soft_cap", None):
        raise Refused(f"with attn_logits_soft_cap={operation.attn_logits_soft_cap}; it is computed without, None")
    if mask is not None and bias is not None:
        raise Refused("with mask and bias; give one of them")
    if isinstance(mask, Moving):
        shown = masks.as_truth(c, mask)
        if shown is None:
            raise Refused("with a mask that the network computes; give it as an input of integers or truth values")
        bias = masks.hiding(c, shown)
    elif mask is not None:
        bias = Fixed(data=np.where(mask.data, 0.0, SURELY_MASKED).astype(np.float32), shape=mask.shape)
    batch = next(each for each in (query, key, value) if isinstance(each, Moving)).shape[0]
    query, key, value = (c.permute(one, (0, 2, 1, 3)) for one in (query, key, value))
    scale = given.get("scale")
    made = c.emit(
        "attention",
        [query, key, value, bias],
        (batch, *query.shape[1:3], value.shape[3]),
        causal=bool(operation.is_causal),
        scale=float(1 / math.sqrt(query.shape[-1]) if scale is None else scale),
    )
    return c.permute(made, (0, 2, 1, 3))


@operations("FFT", "FFT2")
def _fourier(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Real and imaginary part, by products with the cosines and sines of each axis."""
    real, imaginary = args[0]
    if not isinstance(real, Moving) or (not isinstance(imaginary, Moving) and c.numbers(imaginary).any()):  # type: ignore[union-attr]
        raise Refused("with a fixed real part, or with an imaginary part that is fixed and not 0")
    parts: list[Any] = [real, imaginary if isinstance(imaginary, Moving) else None]
    for axis in range(real.rank - (2 if type(operation).__name__ == "FFT2" else 1), real.rank):
        size = real.shape[axis]
        angles = 2 * np.pi * (np.outer(np.arange(size), np.arange(size)) % size) / size
        # exp(-i angle) of both parts.
        cosines, sines = (along(c, parts[0], axis, wave(angles)) for wave in (np.cos, np.sin))
        if parts[1] is None:
            parts = [cosines, c.emit("neg", [sines], sines.shape)]
            continue
        others, twins = (along(c, parts[1], axis, wave(angles)) for wave in (np.cos, np.sin))
        parts = [c.emit("add", [cosines, twins], cosines.shape), c.emit("sub", [others, sines], cosines.shape)]
    return parts
