# SPDX-License-Identifier: Apache-2.0
"""`tf.nn` (and `tf.compat.v1.nn`): the functions of these families, which rearrange arguments and call one operator."""

from collections.abc import Sequence
from typing import Any

from exactqat.operators import depthwise_conv2d as _depthwise
from exactqat.operators import fused_batch_norm as _batch_norm

Paddings = str | Sequence[Sequence[int]]


def _padding(padding: Paddings) -> dict[str, Any]:
    """The operators' `padding` and `explicit_paddings` from a name or a list of 4 pairs."""
    if isinstance(padding, str):
        return {"padding": padding}
    try:
        pairs = [(int(before), int(after)) for before, after in padding]
    except (TypeError, ValueError):
        pairs = []
    if len(pairs) != 4:
        raise ValueError(
            f"padding must be 'SAME', 'VALID' or 4 pairs of integers, one for each dimension, got {padding!r}"
        )
    return {"padding": "EXPLICIT", "explicit_paddings": tuple(value for pair in pairs for value in pair)}


def depthwise_conv2d(
    input: Any,
    filter: Any,
    strides: Sequence[int],
    padding: Paddings,
    data_format: str | None = None,
    dilations: Sequence[int] | None = None,
    name: str | None = None,
) -> Any:
    """Depthwise convolution.

    Args:
        input, filter, strides: see `raw_ops.DepthwiseConv2dNative`.
        padding: "SAME", "VALID", or 4 pairs (before, after), one for each dimension of `data_format`.
        data_format: "NHWC" (default) or "NCHW".
        dilations: 2 values, for height and width; together with any strides (TensorFlow gives a wrong result there).
        name: ignored.
    Returns:
        The output, see `raw_ops.DepthwiseConv2dNative`.
    Raises:
        ValueError, TypeError: as `raw_ops.DepthwiseConv2dNative`.
    Source: `tf.nn.depthwise_conv2d`.
    """
    data_format = "NHWC" if data_format is None else data_format
    dilations = (1, 1) if dilations is None else dilations
    if len(dilations) != 2:
        raise ValueError(f"dilations must have 2 values, for height and width, got {list(dilations)}")
    by_letter = {"N": 1, "H": dilations[0], "W": dilations[1], "C": 1}
    four = [by_letter.get(letter, 1) for letter in data_format]
    return _depthwise.depthwise_conv2d_native(
        input, filter, strides, data_format=data_format, dilations=four, **_padding(padding)
    )


def depthwise_conv2d_native(
    input: Any,
    filter: Any,
    strides: Sequence[int],
    padding: Paddings,
    data_format: str = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
) -> Any:
    """Depthwise convolution with 4 dilations, in the order of `data_format`.

    Args:
        input, filter, strides, data_format, dilations: see `raw_ops.DepthwiseConv2dNative`.
        padding: "SAME", "VALID", or 4 pairs (before, after), one for each dimension of `data_format`.
        name: ignored.
    Returns:
        The output, see `raw_ops.DepthwiseConv2dNative`.
    Raises:
        ValueError, TypeError: as `raw_ops.DepthwiseConv2dNative`.
    Source: `tf.compat.v1.nn.depthwise_conv2d_native`.
    """
    return _depthwise.depthwise_conv2d_native(
        input, filter, strides, data_format=data_format, dilations=dilations, **_padding(padding)
    )


def depthwise_conv2d_backprop_input(
    input_sizes: Sequence[int],
    filter: Any,
    out_backprop: Any,
    strides: Sequence[int],
    padding: Paddings,
    data_format: str = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
) -> Any:
    """Gradient of a depthwise convolution with respect to its input.

    Args:
        input_sizes, filter, out_backprop, strides, data_format, dilations: see
            `raw_ops.DepthwiseConv2dNativeBackpropInput`.
        padding: "SAME", "VALID", or 4 pairs (before, after), one for each dimension of `data_format`.
        name: ignored.
    Returns:
        An array of shape `input_sizes`.
    Raises:
        ValueError, TypeError: as `raw_ops.DepthwiseConv2dNativeBackpropInput`.
    Source: `tf.nn.depthwise_conv2d_backprop_input`.
    """
    return _depthwise.depthwise_conv2d_native_backprop_input(
        input_sizes, filter, out_backprop, strides, data_format=data_format, dilations=dilations, **_padding(padding)
    )


def depthwise_conv2d_backprop_filter(
    input: Any,
    filter_sizes: Sequence[int],
    out_backprop: Any,
    strides: Sequence[int],
    padding: Paddings,
    data_format: str = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
) -> Any:
    """Gradient of a depthwise convolution with respect to its filter.

    Args:
        input, filter_sizes, out_backprop, strides, data_format, dilations: see
            `raw_ops.DepthwiseConv2dNativeBackpropFilter`.
        padding: "SAME", "VALID", or 4 pairs (before, after), one for each dimension of `data_format`.
        name: ignored.
    Returns:
        An array of shape `filter_sizes`.
    Raises:
        ValueError, TypeError: as `raw_ops.DepthwiseConv2dNativeBackpropFilter`.
    Source: `tf.nn.depthwise_conv2d_backprop_filter`.
    """
    return _depthwise.depthwise_conv2d_native_backprop_filter(
        input, filter_sizes, out_backprop, strides, data_format=data_format, dilations=dilations, **_padding(padding)
    )


depthwise_conv2d_native_backprop_input = depthwise_conv2d_backprop_input
depthwise_conv2d_native_backprop_filter = depthwise_conv2d_backprop_filter


def fused_batch_norm(
    x: Any,
    scale: Any,
    offset: Any,
    mean: Any = None,
    variance: Any = None,
    epsilon: float = 0.001,
    data_format: str = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    exponential_avg_factor: float = 1.0,
) -> Any:
    """Batch normalization.

    Args:
        x, scale, offset, epsilon, data_format, is_training, exponential_avg_factor: see `raw_ops.FusedBatchNormV3`.
        mean, variance: running statistics; may be left out in training with `exponential_avg_factor` 1.
        name: ignored.
    Returns:
        y, running mean, running variance: see `raw_ops.FusedBatchNormV3`.
    Raises:
        ValueError: statistics that are needed and missing; else as `raw_ops.FusedBatchNormV3`.
    Source: `tf.compat.v1.nn.fused_batch_norm`.
    """
    for argument, vector in (("mean", mean), ("variance", variance)):
        if vector is None and (not is_training or exponential_avg_factor != 1.0):
            raise ValueError(
                f"{argument} must be a vector when is_training is False or exponential_avg_factor is not 1, got None"
            )
    nothing = scale[:0]
    results = _batch_norm.fused_batch_norm_v3(
        x,
        scale,
        offset,
        nothing if mean is None else mean,
        nothing if variance is None else variance,
        epsilon,
        exponential_avg_factor,
        data_format,
        is_training,
    )
    return results[:3]
