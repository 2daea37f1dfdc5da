# SPDX-License-Identifier: Apache-2.0
"""DepthwiseConv2dNative and its two gradients: one fused multiply-add for each tap that meets the image, taps
row-major."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from exactqat.operators.reference.arithmetic import add, flush, fused_multiply_add, narrow
from exactqat.operators.reference.arrays import fold, namespace, zeros
from exactqat.operators.reference.summation import tree_sum


def _channels_last(image, channels_first):
    return image.transpose(0, 2, 3, 1) if channels_first else image


def _as_given(image, channels_first):
    return image.transpose(0, 3, 1, 2) if channels_first else image


class _Meeting(NamedTuple):
    """For each position along an axis of one image, where a tap meets the other one; anywhere where it does not."""

    positions: Any
    valid: Any


def _meets(position, size):
    valid = (position >= 0) & (position < size)
    return _Meeting(position.clip(0, size - 1), valid)


def _of_outputs(xp, g, axis, tap):
    """The positions in the input."""
    offset = tap * g[f"dilation_{axis}"] - g["pad_top" if axis == "height" else "pad_left"]
    return _meets(xp.arange(g[f"output_{axis}"]) * g[f"stride_{axis}"] + offset, g[f"input_{axis}"])


def _of_inputs(xp, g, axis, tap):
    """The positions in the output."""
    stride, offset = g[f"stride_{axis}"], tap * g[f"dilation_{axis}"] - g["pad_top" if axis == "height" else "pad_left"]
    shifted = xp.arange(g[f"input_{axis}"]) - offset
    positions = _meets(shifted // stride, g[f"output_{axis}"])
    return positions._replace(valid=positions.valid & (shifted % stride == 0))


def _taps(g, meeting):
    """For each tap, row-major: its index, and what it meets along rows and along columns."""
    for di in range(g["filter_height"]):
        rows = meeting(g, "height", di)
        for dj in range(g["filter_width"]):
            yield di, dj, rows, meeting(g, "width", dj)


def _met(image, rows, columns):
    """The part of an image `[batch, height, width, ...]` that a tap meets."""
    xp = namespace(image)
    return xp.take(xp.take(image, rows.positions, axis=1), columns.positions, axis=2)


def _everywhere(rows, columns, rank):
    """Where a tap meets something, beside an image of this rank."""
    return (rows.valid[:, None] & columns.valid).reshape(1, len(rows.valid), len(columns.valid), *[1] * (rank - 3))


def depthwise_conv2d_native(input, filter, **g):
    xp, image = namespace(input, filter), _channels_last(input, g["channels_first"])
    shape = (g["batch"], g["output_height"], g["output_width"], g["channels"], g["multiplier"])
    output = zeros(xp, shape, input.dtype)
    for di, dj, rows, columns in _taps(g, partial(_of_outputs, xp)) if input.size and output.size else ():
        added = fused_multiply_add(_met(image, rows, columns)[..., None], filter[di, dj], output)
        output = xp.where(_everywhere(rows, columns, 5), added, output)
    return _as_given(output.reshape(*shape[:3], g["channels"] * g["multiplier"]), g["channels_first"])


def depthwise_conv2d_native_backprop_input(filter, out_backprop, **g):
    xp = namespace(filter, out_backprop)
    gradient = _channels_last(out_backprop, g["channels_first"]).reshape(
        g["batch"], g["output_height"], g["output_width"], g["channels"], g["multiplier"]
    )
    output = zeros(xp, (g["batch"], g["input_height"], g["input_width"], g["channels"]), filter.dtype)
    for di, dj, rows, columns in _taps(g, partial(_of_inputs, xp)) if output.size and gradient.size else ():
        arriving = _met(gradient, rows, columns)
        for q in range(g["multiplier"]):
            added = fused_multiply_add(arriving[..., q], filter[di, dj, :, q], output)
            output = xp.where(_everywhere(rows, columns, 4), added, output)
    return _as_given(output, g["channels_first"])


def depthwise_conv2d_native_backprop_filter(input, out_backprop, **g):
    xp = namespace(input, out_backprop)
    image = flush(_channels_last(input, g["channels_first"])).astype(np.float64)
    gradient = flush(_channels_last(out_backprop, g["channels_first"])).astype(np.float64)
    rows_of_outputs = g["batch"] * g["output_height"]
    outputs = (g["channels"], g["multiplier"])
    gradient = gradient.reshape(g["batch"], g["output_height"], g["output_width"], *outputs)
    sums = []
    for _, _, rows, columns in _taps(g, partial(_of_outputs, xp)) if image.size and gradient.size else ():
        valid = rows.valid[:, None, None]

        def add_column(row_sums, met, arriving, meets, valid=valid):
            if input.dtype == np.float64:
                added = fused_multiply_add(met, arriving, row_sums)
            else:  # products of float32 values are exact in float64
                added = add(met * arriving, row_sums)
            return xp.where(valid & meets, added, row_sums)

        met = xp.moveaxis(_met(image, rows, columns)[..., None], 2, 0)
        start = zeros(xp, (g["batch"], g["output_height"], *outputs), np.float64)
        row_sums = fold(add_column, start, (met, xp.moveaxis(gradient, 2, 0), columns.valid))
        sums.append(narrow(tree_sum(row_sums.reshape(rows_of_outputs, *outputs)), input.dtype))
    shape = (g["filter_height"], g["filter_width"], *outputs)
    return xp.stack(sums).reshape(shape) if sums else xp.zeros(shape, dtype=input.dtype)
