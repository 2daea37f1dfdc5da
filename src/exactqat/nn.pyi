# SPDX-License-Identifier: Apache-2.0
# Made by docs/stubs.py from the declarations in operators/; do not edit.

from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import torch

from exactqat.raw_ops import (
    _Numbers,
    _NumPy,
    _TensorFlow,
)

@overload
def depthwise_conv2d(
    input: _NumPy | _Numbers,
    filter: _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] | None = None,
    dilations: Sequence[int] | None = None,
    name: str | None = None,
    *,
    out: _NumPy | None = None,
) -> _NumPy:
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

@overload
def depthwise_conv2d(
    input: torch.Tensor,
    filter: torch.Tensor | _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] | None = None,
    dilations: Sequence[int] | None = None,
    name: str | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
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

@overload
def depthwise_conv2d(
    input: jax.Array,
    filter: jax.Array | _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] | None = None,
    dilations: Sequence[int] | None = None,
    name: str | None = None,
) -> jax.Array:
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

@overload
def depthwise_conv2d(
    input: _TensorFlow,
    filter: _TensorFlow | _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] | None = None,
    dilations: Sequence[int] | None = None,
    name: str | None = None,
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

@overload
def depthwise_conv2d_native(
    input: _NumPy | _Numbers,
    filter: _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
    *,
    out: _NumPy | None = None,
) -> _NumPy:
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

@overload
def depthwise_conv2d_native(
    input: torch.Tensor,
    filter: torch.Tensor | _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
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

@overload
def depthwise_conv2d_native(
    input: jax.Array,
    filter: jax.Array | _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
) -> jax.Array:
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

@overload
def depthwise_conv2d_native(
    input: _TensorFlow,
    filter: _TensorFlow | _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
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

@overload
def depthwise_conv2d_backprop_input(
    input_sizes: Sequence[int],
    filter: _NumPy | _Numbers,
    out_backprop: _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
    *,
    out: _NumPy | None = None,
) -> _NumPy:
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

@overload
def depthwise_conv2d_backprop_input(
    input_sizes: Sequence[int],
    filter: torch.Tensor,
    out_backprop: torch.Tensor | _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
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

@overload
def depthwise_conv2d_backprop_input(
    input_sizes: Sequence[int],
    filter: jax.Array,
    out_backprop: jax.Array | _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
) -> jax.Array:
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

@overload
def depthwise_conv2d_backprop_input(
    input_sizes: Sequence[int],
    filter: _TensorFlow,
    out_backprop: _TensorFlow | _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
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

@overload
def depthwise_conv2d_backprop_filter(
    input: _NumPy | _Numbers,
    filter_sizes: Sequence[int],
    out_backprop: _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
    *,
    out: _NumPy | None = None,
) -> _NumPy:
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

@overload
def depthwise_conv2d_backprop_filter(
    input: torch.Tensor,
    filter_sizes: Sequence[int],
    out_backprop: torch.Tensor | _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
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

@overload
def depthwise_conv2d_backprop_filter(
    input: jax.Array,
    filter_sizes: Sequence[int],
    out_backprop: jax.Array | _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
) -> jax.Array:
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

@overload
def depthwise_conv2d_backprop_filter(
    input: _TensorFlow,
    filter_sizes: Sequence[int],
    out_backprop: _TensorFlow | _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
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

@overload
def depthwise_conv2d_native_backprop_input(
    input_sizes: Sequence[int],
    filter: _NumPy | _Numbers,
    out_backprop: _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
    *,
    out: _NumPy | None = None,
) -> _NumPy:
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

@overload
def depthwise_conv2d_native_backprop_input(
    input_sizes: Sequence[int],
    filter: torch.Tensor,
    out_backprop: torch.Tensor | _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
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

@overload
def depthwise_conv2d_native_backprop_input(
    input_sizes: Sequence[int],
    filter: jax.Array,
    out_backprop: jax.Array | _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
) -> jax.Array:
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

@overload
def depthwise_conv2d_native_backprop_input(
    input_sizes: Sequence[int],
    filter: _TensorFlow,
    out_backprop: _TensorFlow | _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
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

@overload
def depthwise_conv2d_native_backprop_filter(
    input: _NumPy | _Numbers,
    filter_sizes: Sequence[int],
    out_backprop: _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
    *,
    out: _NumPy | None = None,
) -> _NumPy:
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

@overload
def depthwise_conv2d_native_backprop_filter(
    input: torch.Tensor,
    filter_sizes: Sequence[int],
    out_backprop: torch.Tensor | _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
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

@overload
def depthwise_conv2d_native_backprop_filter(
    input: jax.Array,
    filter_sizes: Sequence[int],
    out_backprop: jax.Array | _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
) -> jax.Array:
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

@overload
def depthwise_conv2d_native_backprop_filter(
    input: _TensorFlow,
    filter_sizes: Sequence[int],
    out_backprop: _TensorFlow | _NumPy | _Numbers,
    strides: Sequence[int],
    padding: Literal["SAME", "VALID"] | Sequence[Sequence[int]],
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
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

@overload
def fused_batch_norm(
    x: _NumPy | _Numbers,
    scale: _NumPy | _Numbers,
    offset: _NumPy | _Numbers,
    mean: _NumPy | _Numbers | None = None,
    variance: _NumPy | _Numbers | None = None,
    epsilon: float = 0.001,
    data_format: Literal["NHWC", "NCHW", "NDHWC", "NCDHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    exponential_avg_factor: float = 1.0,
    *,
    out: tuple[_NumPy | None, _NumPy | None, _NumPy | None] | None = None,
) -> tuple[_NumPy, _NumPy, _NumPy]:
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

@overload
def fused_batch_norm(
    x: torch.Tensor,
    scale: torch.Tensor | _NumPy | _Numbers,
    offset: torch.Tensor | _NumPy | _Numbers,
    mean: torch.Tensor | _NumPy | _Numbers | None = None,
    variance: torch.Tensor | _NumPy | _Numbers | None = None,
    epsilon: float = 0.001,
    data_format: Literal["NHWC", "NCHW", "NDHWC", "NCDHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    exponential_avg_factor: float = 1.0,
    *,
    out: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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

@overload
def fused_batch_norm(
    x: jax.Array,
    scale: jax.Array | _NumPy | _Numbers,
    offset: jax.Array | _NumPy | _Numbers,
    mean: jax.Array | _NumPy | _Numbers | None = None,
    variance: jax.Array | _NumPy | _Numbers | None = None,
    epsilon: float = 0.001,
    data_format: Literal["NHWC", "NCHW", "NDHWC", "NCDHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    exponential_avg_factor: float = 1.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
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

@overload
def fused_batch_norm(
    x: _TensorFlow,
    scale: _TensorFlow | _NumPy | _Numbers,
    offset: _TensorFlow | _NumPy | _Numbers,
    mean: _TensorFlow | _NumPy | _Numbers | None = None,
    variance: _TensorFlow | _NumPy | _Numbers | None = None,
    epsilon: float = 0.001,
    data_format: Literal["NHWC", "NCHW", "NDHWC", "NCDHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    exponential_avg_factor: float = 1.0,
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
