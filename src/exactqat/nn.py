# SPDX-License-Identifier: Apache-2.0
"""`tf.nn` (and `tf.compat.v1.nn`): functions of these families, which rearrange arguments and call one operator."""

from collections.abc import Sequence
from typing import Any, Literal

from exactqat.operators.declarations import depthwise_conv2d as _depthwise
from exactqat.operators.declarations import fused_batch_norm as _batch_norm
from exactqat.operators.declarations.depthwise_conv2d import DataFormat
from exactqat.operators.declarations.fused_batch_norm import DataFormat as ImageFormat
from exactqat.operators.declarations.op import showing_arrays as _showing_arrays
from exactqat.operators.declarations.plain_numbers import integer as _integer
from exactqat.operators.declarations.plain_numbers import text as _text

Paddings = Literal["SAME", "VALID"] | Sequence[Sequence[int]]


def _padding(padding: Paddings) -> dict[str, str | tuple[int, ...]]:
    """The operators' `padding` and `explicit_paddings` from a name or a list of 4 pairs."""
    if isinstance(padding, str | bytes):
        return {"padding": padding}
    try:
        pairs = [(_integer(before), _integer(after)) for before, after in padding]
    except (TypeError, ValueError):
        pairs = []
    if len(pairs) != 4 or any(value is None for pair in pairs for value in pair):
        raise ValueError(f"padding must be 'SAME', 'VALID' or 4 pairs of integers, one per dimension, got {padding!r}")
    return {"padding": "EXPLICIT", "explicit_paddings": tuple(value for pair in pairs for value in pair)}


@_showing_arrays
def depthwise_conv2d(
    input: Any,
    filter: Any,
    strides: Sequence[int],
    padding: Paddings,
    data_format: DataFormat | None = None,
    dilations: Sequence[int] | None = None,
    name: str | None = None,
    *,
    out: Any = None,
) -> Any:
    """Depthwise convolution.

    Args:
        input, filter, strides: see `raw_ops.DepthwiseConv2dNative`.
        padding: "SAME", "VALID", or 4 pairs (before, after), one per dimension of `data_format`.
        data_format: "NHWC" (default) or "NCHW".
        dilations: 2 values, for height and width; combined with any strides (where TensorFlow's result is wrong).
        name: ignored.
        out: an array to write the result into.
    Returns:
        The output, see `raw_ops.DepthwiseConv2dNative`.
    Raises:
        ValueError, TypeError: as `raw_ops.DepthwiseConv2dNative`.
    Source: `tf.nn.depthwise_conv2d`.
    """
    layout = "NHWC" if data_format is None else _text(data_format)
    dilations = (1, 1) if dilations is None else dilations
    if not hasattr(dilations, "__len__") or len(dilations) != 2:
        raise ValueError(f"dilations must have 2 values, for height and width, got {dilations}")
    by_letter = {"N": 1, "H": dilations[0], "W": dilations[1], "C": 1}
    four = [by_letter.get(letter, 1) for letter in layout]
    return _depthwise.depthwise_conv2d_native(
        input, filter, strides, data_format=layout, dilations=four, out=out, **_padding(padding)
    )


@_showing_arrays
def depthwise_conv2d_native(
    input: Any,
    filter: Any,
    strides: Sequence[int],
    padding: Paddings,
    data_format: DataFormat = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
    *,
    out: Any = None,
) -> Any:
    """Depthwise convolution with 4 dilations, in the order of `data_format`.

    Args:
        input, filter, strides, data_format, dilations: see `raw_ops.DepthwiseConv2dNative`.
        padding: "SAME", "VALID", or 4 pairs (before, after), one per dimension of `data_format`.
        name: ignored.
        out: an array to write the result into.
    Returns:
        The output, see `raw_ops.DepthwiseConv2dNative`.
    Raises:
        ValueError, TypeError: as `raw_ops.DepthwiseConv2dNative`.
    Source: `tf.compat.v1.nn.depthwise_conv2d_native`.
    """
    return _depthwise.depthwise_conv2d_native(
        input, filter, strides, data_format=data_format, dilations=dilations, out=out, **_padding(padding)
    )


@_showing_arrays
def depthwise_conv2d_backprop_input(
    input_sizes: Sequence[int],
    filter: Any,
    out_backprop: Any,
    strides: Sequence[int],
    padding: Paddings,
    data_format: DataFormat = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
    *,
    out: Any = None,
) -> Any:
    """Gradient of a depthwise convolution with respect to its input.

    Args:
        input_sizes, filter, out_backprop, strides, data_format, dilations: see
            `raw_ops.DepthwiseConv2dNativeBackpropInput`.
        padding: "SAME", "VALID", or 4 pairs (before, after), one per dimension of `data_format`.
        name: ignored.
        out: an array to write the result into.
    Returns:
        An array of shape `input_sizes`.
    Raises:
        ValueError, TypeError: as `raw_ops.DepthwiseConv2dNativeBackpropInput`.
    Source: `tf.nn.depthwise_conv2d_backprop_input`.
    """
    return _depthwise.depthwise_conv2d_native_backprop_input(
        input_sizes,
        filter,
        out_backprop,
        strides,
        data_format=data_format,
        dilations=dilations,
        out=out,
        **_padding(padding),
    )


@_showing_arrays
def depthwise_conv2d_backprop_filter(
    input: Any,
    filter_sizes: Sequence[int],
    out_backprop: Any,
    strides: Sequence[int],
    padding: Paddings,
    data_format: DataFormat = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
    *,
    out: Any = None,
) -> Any:
    """Gradient of a depthwise convolution with respect to its filter.

    Args:
        input, filter_sizes, out_backprop, strides, data_format, dilations: see
            `raw_ops.DepthwiseConv2dNativeBackpropFilter`.
        padding: "SAME", "VALID", or 4 pairs (before, after), one per dimension of `data_format`.
        name: ignored.
        out: an array to write the result into.
    Returns:
        An array of shape `filter_sizes`.
    Raises:
        ValueError, TypeError: as `raw_ops.DepthwiseConv2dNativeBackpropFilter`.
    Source: `tf.nn.depthwise_conv2d_backprop_filter`.
    """
    return _depthwise.depthwise_conv2d_native_backprop_filter(
        input,
        filter_sizes,
        out_backprop,
        strides,
        data_format=data_format,
        dilations=dilations,
        out=out,
        **_padding(padding),
    )


depthwise_conv2d_native_backprop_input = depthwise_conv2d_backprop_input
depthwise_conv2d_native_backprop_filter = depthwise_conv2d_backprop_filter


@_showing_arrays
def fused_batch_norm(
    x: Any,
    scale: Any,
    offset: Any,
    mean: Any = None,
    variance: Any = None,
    epsilon: float = 0.001,
    data_format: ImageFormat = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    exponential_avg_factor: float = 1.0,
    *,
    out: Any = None,
) -> tuple[Any, Any, Any]:
    """Batch normalization.

    Args:
        x, scale, offset, epsilon, data_format, is_training, exponential_avg_factor: see `raw_ops.FusedBatchNormV3`.
        mean, variance: running statistics; optional in training with `exponential_avg_factor` 1.
        name: ignored.
        out: a tuple of 3 arrays to write the results into; None for a new array.
    Returns:
        y, running mean, running variance: see `raw_ops.FusedBatchNormV3`.
    Raises:
        ValueError: required statistics are missing; otherwise as `raw_ops.FusedBatchNormV3`.
    Source: `tf.compat.v1.nn.fused_batch_norm`.
    """
    for argument, vector in (("mean", mean), ("variance", variance)):
        if vector is None and (not is_training or exponential_avg_factor != 1.0):
            raise ValueError(
                f"{argument} must be a vector when is_training is False or exponential_avg_factor is not 1, got None"
            )
    try:
        nothing = scale[:0]
    except Exception:  # no vector: the operator says so
        nothing = ()
    if out is not None:
        if not isinstance(out, tuple) or len(out) != 3:
            raise ValueError("fused_batch_norm: out must be a tuple of 3 arrays: y, running mean, running variance")
        out = (*out, None, None, None)
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
        out=out,
    )
    return results[0], results[1], results[2]
