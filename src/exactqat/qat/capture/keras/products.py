# SPDX-License-Identifier: Apache-2.0
"""Convolutions, products and attention."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np

from ....kit.planning.elementwise import SURELY_MASKED
from ..core import masks
from ..core.builder import Moving
from ..core.products import along, einsum
from ..core.refusals import Refused
from ..core.sizes import broadcast
from ..core.windows import each, windows
from .items import Fixed, Item, Result
from .reader import Reader, operations
from .reduction import channel_axis_of, padding_of, spatial_axes


def _turned(c: Reader, kernel: Item, depthwise: bool = False) -> Fixed:
    """[*window, in / groups, out] as [out, in / groups, *window]; [*window, channels, multiplier], which is depthwise,
    as [channels * multiplier, 1, *window]."""
    if not isinstance(kernel, Fixed) or not kernel.name:
        raise Refused("its kernel is no weight")
    *window, inputs, outputs = kernel.shape
    if len(window) > 2:
        raise Refused(f"with windows over three axes, {tuple(window)}; use layers for images, frame by frame")
    last = len(window)
    order = (last, last + 1, *range(last)) if depthwise else (last + 1, last, *range(last))
    shape = (inputs * outputs, 1, *window) if depthwise else (outputs, inputs, *window)
    return c.then(kernel, shape, lambda array: array.transpose(order).reshape(shape))


def _convolved(c: Reader, how: Any, x: Moving, weight: Fixed, module: str) -> Moving:
    """how: has `strides`, `padding`, `dilation_rate` and `data_format`. weight: [out, in / groups, *window]"""
    axis, (outputs, inputs, *window) = channel_axis_of(how.data_format, x.rank), weight.shape
    strides, dilations = each(how.strides, len(window)), each(how.dilation_rate, len(window))
    padding = padding_of(how.padding, x, axis, window, strides, dilations)
    shape = list(x.shape)
    shape[axis] = outputs
    sides = zip(spatial_axes(x, axis), window, strides, padding, dilations, strict=True)
    for at, side, stride, pair, dilation in sides:
        shape[at] = (x.shape[at] + sum(pair) - (side - 1) * dilation - 1) // stride + 1
    attributes = {**windows(strides, padding, dilations), "groups": x.shape[axis] // inputs, "channel_axis": axis}
    return c.emit("conv", [x, weight, None], shape, module=module, **attributes)


@operations("Conv", "DepthwiseConv")
def _conv(c: Reader, operation: keras.Operation, inputs: Moving, kernel: Fixed) -> Result:
    weight = _turned(c, kernel, type(operation).__name__ == "DepthwiseConv")
    return _convolved(c, operation, inputs, weight, c.module_of(kernel))


@operations("SeparableConv")
def _separable(c: Reader, operation: keras.Operation, inputs: Moving, *kernels: Fixed) -> Result:
    depthwise, pointwise = _turned(c, kernels[0], True), _turned(c, kernels[1])
    path, form = c.module_of(kernels[0]), operation.data_format
    features = _convolved(c, operation, inputs, depthwise, f"{path}.depthwise")
    how = SimpleNamespace(strides=1, padding="valid", dilation_rate=1, data_format=form)
    return _convolved(c, how, features, pointwise, path)


@operations("ConvTranspose")
def _conv_transpose(c: Reader, operation: keras.Operation, inputs: Moving, kernel: Fixed) -> Result:
    axis, count = channel_axis_of(operation.data_format, inputs.rank), inputs.rank - 2
    weight, shape = _turned(c, kernel), c.shape_of(operation, inputs, kernel)
    strides, dilations = each(operation.strides, count), each(operation.dilation_rate, count)
    cut, extra = [], []
    for at, side, stride, dilation in zip(spatial_axes(inputs, axis), kernel.shape, strides, dilations, strict=False):
        size, result = inputs.shape[at], shape[at]
        whole = (size - 1) * stride + (side - 1) * dilation + 1
        # As the gradient of a convolution with that padding.
        before = 0 if operation.padding == "valid" else max((size - 1) * stride + side - result, 0) // 2
        after = whole - before - result
        cut.append((before, max(after, 0)))
        extra.append(max(-after, 0))
    return c.emit(
        "conv_transpose",
        [inputs, weight, None],
        shape,
        module=c.module_of(kernel),
        **windows(strides, cut, dilations),
        output_padding=tuple(extra),
        groups=1,
        channel_axis=axis,
    )


def linear(c: Reader, x: Item, kernel: Fixed, bias: Fixed | None, module: str) -> Moving:
    """kernel: [in, out]"""
    weight = c.then(kernel, kernel.shape[::-1], lambda array: array.transpose((1, 0)))
    return c.emit("linear", [x, weight, bias], (*x.shape[:-1], kernel.shape[1]), module=module)


@operations("Matmul")
def _matmul(c: Reader, operation: keras.Operation, x1: Item, x2: Item) -> Result:
    if isinstance(x1, Moving) and isinstance(x2, Fixed) and len(x2.shape) == 2 and x2.name:
        return linear(c, x1, x2, None, c.module_of(x2))
    shape = (*broadcast(x1.shape[:-2], x2.shape[:-2]), x1.shape[-2], x2.shape[-1])
    return c.emit("matmul", [x1, x2], shape)


@operations("Einsum")
def _einsum(c: Reader, operation: keras.Operation, *operands: Item) -> Result:
    return einsum(c, operation.subscripts, operands, lambda weight: c.module_of(weight) if weight.name else "")


@operations("DotProductAttention")
def _attention(c: Reader, operation: keras.Operation, *operands: Item, **more: Any) -> Result:
    """Query, key and value [batch, time, heads, size]; perhaps a bias, a mask and a scale."""
    bias, mask, scale = map(more.get, ("bias", "mask", "scale"))
    if operation.attn_logits_soft_cap:
        raise Refused(f"with attn_logits_soft_cap={operation.attn_logits_soft_cap}; it is computed without, None")
    if mask is not None and bias is not None:
        raise Refused("with mask and bias; give one of them")
    if isinstance(mask, Moving):
        bias = masks.hiding(c, c.truth_of(mask))
    elif mask is not None:
        bias = Fixed(data=np.where(mask.data, 0.0, SURELY_MASKED).astype(np.float32), shape=mask.shape)
    batch = next(item for item in operands if isinstance(item, Moving)).shape[0]
    query, key, value = (c.permute(item, (0, 2, 1, 3)) for item in operands)
    shape, causal = (batch, *query.shape[1:3], value.shape[3]), bool(operation.is_causal)
    scale = float(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    result = c.emit("attention", [query, key, value, bias], shape, causal=causal, scale=scale)
    return c.permute(result, (0, 2, 1, 3))


@operations("FFT", "FFT2")
def _fourier(c: Reader, operation: keras.Operation, x: tuple[Any, Any]) -> Result:
    """Real and imaginary part, by products with the cosines and sines of each axis."""
    real, imaginary = x
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
