# SPDX-License-Identifier: Apache-2.0
"""DepthwiseConv2dNative and its two gradients: one fused multiply-add for each tap that meets the image, taps
row-major."""

import numpy as np

from exactqat.reference.arithmetic import flush, fused_multiply_add, narrow
from exactqat.reference.summation import tree_sum


def _channels_last(image, channels_first):
    return image.transpose(0, 2, 3, 1) if channels_first else image


def _as_given(image, channels_first):
    return image.transpose(0, 3, 1, 2) if channels_first else image


def _meeting(tap, stride, dilation, pad, input_size, output_size):
    """Output positions at which a tap meets the image, and the input positions it meets there."""
    positions = np.arange(output_size)
    met = positions * stride + tap * dilation - pad
    valid = (met >= 0) & (met < input_size)
    return positions[valid], met[valid]


def _taps(g):
    """For each tap, row-major: its index, and matching index grids into output and input images."""
    for di in range(g["filter_height"]):
        rows = _meeting(
            di, g["stride_height"], g["dilation_height"], g["pad_top"], g["input_height"], g["output_height"]
        )
        for dj in range(g["filter_width"]):
            cols = _meeting(
                dj, g["stride_width"], g["dilation_width"], g["pad_left"], g["input_width"], g["output_width"]
            )
            yield di, dj, np.ix_(rows[0], cols[0]), np.ix_(rows[1], cols[1])


def depthwise_conv2d_native(input, filter, **g):
    image = _channels_last(input, g["channels_first"])
    shape = (g["batch"], g["output_height"], g["output_width"], g["channels"], g["multiplier"])
    output = np.zeros(shape, input.dtype)
    for di, dj, (oi, oj), (ii, ij) in _taps(g):
        output[:, oi, oj] = fused_multiply_add(image[:, ii, ij][..., None], filter[di, dj], output[:, oi, oj])
    return _as_given(output.reshape(*shape[:3], g["channels"] * g["multiplier"]), g["channels_first"])


def depthwise_conv2d_native_backprop_input(filter, out_backprop, **g):
    gradient = _channels_last(out_backprop, g["channels_first"]).reshape(
        g["batch"], g["output_height"], g["output_width"], g["channels"], g["multiplier"]
    )
    output = np.zeros((g["batch"], g["input_height"], g["input_width"], g["channels"]), filter.dtype)
    for di, dj, (oi, oj), (ii, ij) in _taps(g):
        for q in range(g["multiplier"]):
            output[:, ii, ij] = fused_multiply_add(gradient[:, oi, oj][..., q], filter[di, dj, :, q], output[:, ii, ij])
    return _as_given(output, g["channels_first"])


def depthwise_conv2d_native_backprop_filter(input, out_backprop, **g):
    image = flush(_channels_last(input, g["channels_first"])).astype(np.float64)
    gradient = flush(_channels_last(out_backprop, g["channels_first"])).astype(np.float64)
    rows = g["batch"] * g["output_height"]
    gradient = gradient.reshape(g["batch"], g["output_height"], g["output_width"], g["channels"], g["multiplier"])
    output = np.zeros((g["filter_height"], g["filter_width"], g["channels"], g["multiplier"]), input.dtype)
    for di, dj, (oi, oj), (ii, ij) in _taps(g):
        met, arriving = image[:, ii, ij][..., None], gradient[:, oi, oj]
        row_sums = np.zeros((g["batch"], g["output_height"], g["channels"], g["multiplier"]))
        for column in range(met.shape[2]):
            row_sums[:, oi[:, 0]] = fused_multiply_add(met[:, :, column], arriving[:, :, column], row_sums[:, oi[:, 0]])
        output[di, dj] = narrow(tree_sum(row_sums.reshape(rows, g["channels"], g["multiplier"])), input.dtype)
    return output
