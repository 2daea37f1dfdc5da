# SPDX-License-Identifier: Apache-2.0
"""The operations as anybody would write them in array arithmetic: what `torch.compile` and `jax.jit` are given.

`xp` is `torch` or `jax.numpy`. Each function takes the operands of the raw operator it replaces, by name, and its
attributes; channels are last unless `data_format` says otherwise. They compute what the operators compute, but in
float32 and without a promise about bits.
"""

from __future__ import annotations

from typing import Any

Array = Any


def _nudged(xp: Any, low: Array, high: Array, num_bits: int, narrow_range: bool) -> tuple[Array, Array, Array]:
    lowest, highest = int(narrow_range), 2**num_bits - 1
    scale = (high - low) / (highest - lowest)
    zero = xp.clip(xp.floor(lowest - low / scale + 0.5), lowest, highest)
    return (lowest - zero) * scale, (highest - zero) * scale, scale


def _fake_quant(xp: Any, x: Array, low: Array, high: Array, num_bits: int, narrow_range: bool) -> Array:
    low, high, scale = _nudged(xp, low, high, num_bits, narrow_range)
    inverse = 1 / scale
    return xp.floor((xp.clip(x, low, high) - low) * inverse + 0.5) * scale + low


def _gradients(xp: Any, g: Array, x: Array, low: Array, high: Array, axes: Any, **quantization: Any) -> Any:
    low, high, _ = _nudged(xp, low, high, **quantization)
    below, above = x < low, x > high
    return (
        xp.where(below | above, 0.0, g),
        xp.sum(xp.where(below, g, 0.0), axis=axes),
        xp.sum(xp.where(above, g, 0.0), axis=axes),
    )


def args(xp: Any, inputs: Array, min: Array, max: Array, **quantization: Any) -> Array:
    return _fake_quant(xp, inputs, min, max, **quantization)


def args_gradient(
    xp: Any, gradients: Array, inputs: Array, min: Array, max: Array, num_bits: int, narrow_range: bool
) -> Array:
    low, high, _ = _nudged(xp, min, max, num_bits, narrow_range)
    return xp.where((inputs >= low) & (inputs <= high), gradients, 0.0)


vars = per_channel = args


def vars_gradient(xp: Any, gradients: Array, inputs: Array, min: Array, max: Array, **quantization: Any) -> Any:
    return _gradients(xp, gradients, inputs, min, max, (0, 1, 2, 3), **quantization)


def per_channel_gradient(xp: Any, gradients: Array, inputs: Array, min: Array, max: Array, **quantization: Any) -> Any:
    return _gradients(xp, gradients, inputs, min, max, (0, 1, 2), **quantization)


def dequantize(
    xp: Any,
    input: Array,
    input_min: Array,
    input_max: Array,
    num_bits: int,
    range_given: bool,
    axis: int,
    **others: Any,
) -> Array:
    """Signed, half to even, one range or, from the data, one for each of the last dimension."""
    if range_given:
        low, high = input_min, input_max
    elif axis < 0:
        low, high = xp.min(input), xp.max(input)
    else:
        low, high = xp.amin(input, axis=(0, 1, 2)), xp.amax(input, axis=(0, 1, 2))
    lowest, highest = -(2 ** (num_bits - 1)), 2 ** (num_bits - 1) - 1
    scale = xp.maximum(low / lowest, high / highest)
    x = xp.clip(input, scale * lowest, scale * highest) if range_given else input
    return xp.round(x * (1 / scale)) * scale


dequantize_from_data = dequantize_axis = dequantize


def dequantize_gradient(
    xp: Any, gradients: Array, input: Array, input_min: Array, input_max: Array, **others: Any
) -> Array:
    return xp.where((input >= input_min) & (input <= input_max), gradients, 0.0)


def _channels(data_format: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes that are summed, and the shape of a vector beside an image."""
    return ((0, 1, 2), (1, 1, 1, -1)) if data_format == "NHWC" else ((0, 2, 3), (1, -1, 1, 1))


def batch_norm(
    xp: Any, x: Array, scale: Array, offset: Array, epsilon: float, data_format: str, **others: Any
) -> tuple[Array, Array, Array]:
    axes, beside = _channels(data_format)
    mean = xp.mean(x, axis=axes)
    centered = x - mean.reshape(beside)
    variance = xp.mean(centered * centered, axis=axes)
    y = centered * (scale / xp.sqrt(variance + epsilon)).reshape(beside) + offset.reshape(beside)
    return y, mean, variance


def batch_norm_gradient(
    xp: Any,
    y_backprop: Array,
    x: Array,
    scale: Array,
    reserve_space_1: Array,
    reserve_space_2: Array,
    epsilon: float,
    data_format: str,
    **others: Any,
) -> tuple[Array, Array, Array]:
    axes, beside = _channels(data_format)
    count = x.shape[0] * x.shape[1] * x.shape[2] * x.shape[3] // scale.shape[0]
    inverse = 1 / xp.sqrt(reserve_space_2 + epsilon)
    normalized = (x - reserve_space_1.reshape(beside)) * inverse.reshape(beside)
    offset_backprop = xp.sum(y_backprop, axis=axes)
    scale_backprop = xp.sum(y_backprop * normalized, axis=axes)
    rest = (offset_backprop.reshape(beside) + normalized * scale_backprop.reshape(beside)) / count
    return (y_backprop - rest) * (scale * inverse).reshape(beside), scale_backprop, offset_backprop
