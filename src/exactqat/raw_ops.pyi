# SPDX-License-Identifier: Apache-2.0
# Made by docs/stubs.py from the declarations in operators/; do not edit.

from collections.abc import Iterable
from typing import Any, Generic, Literal, NamedTuple, Protocol, SupportsIndex, TypeAlias, TypeVar, overload

import jax
import numpy as np
import torch

_Array = TypeVar("_Array")
_NumPy: TypeAlias = np.ndarray[Any, Any]
_Float: TypeAlias = float | np.floating[Any] | np.integer[Any]
_Numbers: TypeAlias = _Float | list[Any] | tuple[Any, ...]

class _TensorFlow(Protocol):
    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> Any: ...

class _FakeQuantWithMinMaxVarsGradientResults(NamedTuple, Generic[_Array]):
    backprops_wrt_input: _Array
    backprop_wrt_min: _Array
    backprop_wrt_max: _Array

class _FakeQuantWithMinMaxVarsPerChannelGradientResults(NamedTuple, Generic[_Array]):
    backprops_wrt_input: _Array
    backprop_wrt_min: _Array
    backprop_wrt_max: _Array

class _FusedBatchNormResults(NamedTuple, Generic[_Array]):
    y: _Array
    batch_mean: _Array
    batch_variance: _Array
    reserve_space_1: _Array
    reserve_space_2: _Array

class _FusedBatchNormV2Results(NamedTuple, Generic[_Array]):
    y: _Array
    batch_mean: _Array
    batch_variance: _Array
    reserve_space_1: _Array
    reserve_space_2: _Array

class _FusedBatchNormV3Results(NamedTuple, Generic[_Array]):
    y: _Array
    batch_mean: _Array
    batch_variance: _Array
    reserve_space_1: _Array
    reserve_space_2: _Array
    reserve_space_3: _Array

class _FusedBatchNormGradResults(NamedTuple, Generic[_Array]):
    x_backprop: _Array
    scale_backprop: _Array
    offset_backprop: _Array
    reserve_space_3: _Array
    reserve_space_4: _Array

class _FusedBatchNormGradV2Results(NamedTuple, Generic[_Array]):
    x_backprop: _Array
    scale_backprop: _Array
    offset_backprop: _Array
    reserve_space_3: _Array
    reserve_space_4: _Array

class _FusedBatchNormGradV3Results(NamedTuple, Generic[_Array]):
    x_backprop: _Array
    scale_backprop: _Array
    offset_backprop: _Array
    reserve_space_4: _Array
    reserve_space_5: _Array

class _QuantizeAndDequantizeV4GradResults(NamedTuple, Generic[_Array]):
    input_backprop: _Array
    input_min_backprop: _Array
    input_max_backprop: _Array

@overload
def DepthwiseConv2dNative(
    *,
    input: _NumPy | _Numbers,
    filter: _NumPy | _Numbers,
    strides: Iterable[SupportsIndex],
    padding: Literal["SAME", "VALID", "EXPLICIT"],
    explicit_paddings: Iterable[SupportsIndex] = (),
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Iterable[SupportsIndex] = (1, 1, 1, 1),
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy:
    """Depthwise convolution: each input channel is convolved with its own `multiplier` filters.

    `output[b, i, j, c * multiplier + q] = sum over (di, dj) of filter[di, dj, c, q] *
    input[b, i * stride + di * dilation - pad, j * stride + dj * dilation - pad, c]`, one fused multiply-add per tap,
    taps in row-major order; taps that fall on the padding are skipped.

    Args:
        input: a float tensor, `[batch, height, width, channels]` (NHWC) or `[batch, channels, height, width]`
            (NCHW).
        filter: `[filter_height, filter_width, channels, multiplier]`, of the dtype of `input`.
        strides: 4 values in the order of `data_format`; 1 for batch and channels, those of height and width may differ.
        padding: "SAME" (output `ceil(size / stride)`, the extra cell at the end), "VALID" (none) or "EXPLICIT".
        explicit_paddings: for "EXPLICIT" 8 values, before and after for each dimension of `data_format`.
        data_format: "NHWC" or "NCHW".
        dilations: 4 values in the order of `data_format`, combined with any strides.
    Returns:
        output: `[batch, output_height, output_width, channels * multiplier]`, or NCHW likewise.
    Raises:
        ValueError: incompatible ranks, lengths or values. TypeError: dtypes differ.
    Source: TensorFlow `DepthwiseConv2dNative` with oneDNN, its default on x86; layouts, strides and dilations that it
        rejects or ignores work here.
    """

@overload
def DepthwiseConv2dNative(
    *,
    input: torch.Tensor,
    filter: torch.Tensor | _NumPy | _Numbers,
    strides: Iterable[SupportsIndex],
    padding: Literal["SAME", "VALID", "EXPLICIT"],
    explicit_paddings: Iterable[SupportsIndex] = (),
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Iterable[SupportsIndex] = (1, 1, 1, 1),
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Depthwise convolution: each input channel is convolved with its own `multiplier` filters.

    `output[b, i, j, c * multiplier + q] = sum over (di, dj) of filter[di, dj, c, q] *
    input[b, i * stride + di * dilation - pad, j * stride + dj * dilation - pad, c]`, one fused multiply-add per tap,
    taps in row-major order; taps that fall on the padding are skipped.

    Args:
        input: a float tensor, `[batch, height, width, channels]` (NHWC) or `[batch, channels, height, width]`
            (NCHW).
        filter: `[filter_height, filter_width, channels, multiplier]`, of the dtype of `input`.
        strides: 4 values in the order of `data_format`; 1 for batch and channels, those of height and width may differ.
        padding: "SAME" (output `ceil(size / stride)`, the extra cell at the end), "VALID" (none) or "EXPLICIT".
        explicit_paddings: for "EXPLICIT" 8 values, before and after for each dimension of `data_format`.
        data_format: "NHWC" or "NCHW".
        dilations: 4 values in the order of `data_format`, combined with any strides.
    Returns:
        output: `[batch, output_height, output_width, channels * multiplier]`, or NCHW likewise.
    Raises:
        ValueError: incompatible ranks, lengths or values. TypeError: dtypes differ.
    Source: TensorFlow `DepthwiseConv2dNative` with oneDNN, its default on x86; layouts, strides and dilations that it
        rejects or ignores work here.
    """

@overload
def DepthwiseConv2dNative(
    *,
    input: jax.Array,
    filter: jax.Array | _NumPy | _Numbers,
    strides: Iterable[SupportsIndex],
    padding: Literal["SAME", "VALID", "EXPLICIT"],
    explicit_paddings: Iterable[SupportsIndex] = (),
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Iterable[SupportsIndex] = (1, 1, 1, 1),
    name: str | None = None,
) -> jax.Array:
    """Depthwise convolution: each input channel is convolved with its own `multiplier` filters.

    `output[b, i, j, c * multiplier + q] = sum over (di, dj) of filter[di, dj, c, q] *
    input[b, i * stride + di * dilation - pad, j * stride + dj * dilation - pad, c]`, one fused multiply-add per tap,
    taps in row-major order; taps that fall on the padding are skipped.

    Args:
        input: a float tensor, `[batch, height, width, channels]` (NHWC) or `[batch, channels, height, width]`
            (NCHW).
        filter: `[filter_height, filter_width, channels, multiplier]`, of the dtype of `input`.
        strides: 4 values in the order of `data_format`; 1 for batch and channels, those of height and width may differ.
        padding: "SAME" (output `ceil(size / stride)`, the extra cell at the end), "VALID" (none) or "EXPLICIT".
        explicit_paddings: for "EXPLICIT" 8 values, before and after for each dimension of `data_format`.
        data_format: "NHWC" or "NCHW".
        dilations: 4 values in the order of `data_format`, combined with any strides.
    Returns:
        output: `[batch, output_height, output_width, channels * multiplier]`, or NCHW likewise.
    Raises:
        ValueError: incompatible ranks, lengths or values. TypeError: dtypes differ.
    Source: TensorFlow `DepthwiseConv2dNative` with oneDNN, its default on x86; layouts, strides and dilations that it
        rejects or ignores work here.
    """

@overload
def DepthwiseConv2dNative(
    *,
    input: _TensorFlow,
    filter: _TensorFlow | _NumPy | _Numbers,
    strides: Iterable[SupportsIndex],
    padding: Literal["SAME", "VALID", "EXPLICIT"],
    explicit_paddings: Iterable[SupportsIndex] = (),
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Iterable[SupportsIndex] = (1, 1, 1, 1),
    name: str | None = None,
) -> Any:
    """Depthwise convolution: each input channel is convolved with its own `multiplier` filters.

    `output[b, i, j, c * multiplier + q] = sum over (di, dj) of filter[di, dj, c, q] *
    input[b, i * stride + di * dilation - pad, j * stride + dj * dilation - pad, c]`, one fused multiply-add per tap,
    taps in row-major order; taps that fall on the padding are skipped.

    Args:
        input: a float tensor, `[batch, height, width, channels]` (NHWC) or `[batch, channels, height, width]`
            (NCHW).
        filter: `[filter_height, filter_width, channels, multiplier]`, of the dtype of `input`.
        strides: 4 values in the order of `data_format`; 1 for batch and channels, those of height and width may differ.
        padding: "SAME" (output `ceil(size / stride)`, the extra cell at the end), "VALID" (none) or "EXPLICIT".
        explicit_paddings: for "EXPLICIT" 8 values, before and after for each dimension of `data_format`.
        data_format: "NHWC" or "NCHW".
        dilations: 4 values in the order of `data_format`, combined with any strides.
    Returns:
        output: `[batch, output_height, output_width, channels * multiplier]`, or NCHW likewise.
    Raises:
        ValueError: incompatible ranks, lengths or values. TypeError: dtypes differ.
    Source: TensorFlow `DepthwiseConv2dNative` with oneDNN, its default on x86; layouts, strides and dilations that it
        rejects or ignores work here.
    """

@overload
def DepthwiseConv2dNativeBackpropInput(
    *,
    input_sizes: Iterable[SupportsIndex],
    filter: _NumPy | _Numbers,
    out_backprop: _NumPy | _Numbers,
    strides: Iterable[SupportsIndex],
    padding: Literal["SAME", "VALID", "EXPLICIT"],
    explicit_paddings: Iterable[SupportsIndex] = (),
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Iterable[SupportsIndex] = (1, 1, 1, 1),
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy:
    """Gradient of `depthwise_conv2d_native` with respect to its input.

    For each input position one fused multiply-add per tap that uses it, taps in row-major order,
    multipliers in order within a tap.

    Args:
        input_sizes: shape of the convolution's input, 4 static integers.
        filter: as passed to the convolution.
        out_backprop: the incoming gradient of the output, of its shape.
        strides, padding, explicit_paddings, data_format, dilations: as passed to the convolution.
    Returns:
        output: of shape `input_sizes`.
    Raises:
        ValueError: incompatible ranks, lengths or values. TypeError: dtypes differ.
    Source: TensorFlow `DepthwiseConv2dNativeBackpropInput` with oneDNN, its default on x86; dilations, which TensorFlow
    ignores, work here.
    """

@overload
def DepthwiseConv2dNativeBackpropInput(
    *,
    input_sizes: Iterable[SupportsIndex],
    filter: torch.Tensor,
    out_backprop: torch.Tensor | _NumPy | _Numbers,
    strides: Iterable[SupportsIndex],
    padding: Literal["SAME", "VALID", "EXPLICIT"],
    explicit_paddings: Iterable[SupportsIndex] = (),
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Iterable[SupportsIndex] = (1, 1, 1, 1),
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Gradient of `depthwise_conv2d_native` with respect to its input.

    For each input position one fused multiply-add per tap that uses it, taps in row-major order,
    multipliers in order within a tap.

    Args:
        input_sizes: shape of the convolution's input, 4 static integers.
        filter: as passed to the convolution.
        out_backprop: the incoming gradient of the output, of its shape.
        strides, padding, explicit_paddings, data_format, dilations: as passed to the convolution.
    Returns:
        output: of shape `input_sizes`.
    Raises:
        ValueError: incompatible ranks, lengths or values. TypeError: dtypes differ.
    Source: TensorFlow `DepthwiseConv2dNativeBackpropInput` with oneDNN, its default on x86; dilations, which TensorFlow
    ignores, work here.
    """

@overload
def DepthwiseConv2dNativeBackpropInput(
    *,
    input_sizes: Iterable[SupportsIndex],
    filter: jax.Array,
    out_backprop: jax.Array | _NumPy | _Numbers,
    strides: Iterable[SupportsIndex],
    padding: Literal["SAME", "VALID", "EXPLICIT"],
    explicit_paddings: Iterable[SupportsIndex] = (),
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Iterable[SupportsIndex] = (1, 1, 1, 1),
    name: str | None = None,
) -> jax.Array:
    """Gradient of `depthwise_conv2d_native` with respect to its input.

    For each input position one fused multiply-add per tap that uses it, taps in row-major order,
    multipliers in order within a tap.

    Args:
        input_sizes: shape of the convolution's input, 4 static integers.
        filter: as passed to the convolution.
        out_backprop: the incoming gradient of the output, of its shape.
        strides, padding, explicit_paddings, data_format, dilations: as passed to the convolution.
    Returns:
        output: of shape `input_sizes`.
    Raises:
        ValueError: incompatible ranks, lengths or values. TypeError: dtypes differ.
    Source: TensorFlow `DepthwiseConv2dNativeBackpropInput` with oneDNN, its default on x86; dilations, which TensorFlow
    ignores, work here.
    """

@overload
def DepthwiseConv2dNativeBackpropInput(
    *,
    input_sizes: Iterable[SupportsIndex],
    filter: _TensorFlow,
    out_backprop: _TensorFlow | _NumPy | _Numbers,
    strides: Iterable[SupportsIndex],
    padding: Literal["SAME", "VALID", "EXPLICIT"],
    explicit_paddings: Iterable[SupportsIndex] = (),
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Iterable[SupportsIndex] = (1, 1, 1, 1),
    name: str | None = None,
) -> Any:
    """Gradient of `depthwise_conv2d_native` with respect to its input.

    For each input position one fused multiply-add per tap that uses it, taps in row-major order,
    multipliers in order within a tap.

    Args:
        input_sizes: shape of the convolution's input, 4 static integers.
        filter: as passed to the convolution.
        out_backprop: the incoming gradient of the output, of its shape.
        strides, padding, explicit_paddings, data_format, dilations: as passed to the convolution.
    Returns:
        output: of shape `input_sizes`.
    Raises:
        ValueError: incompatible ranks, lengths or values. TypeError: dtypes differ.
    Source: TensorFlow `DepthwiseConv2dNativeBackpropInput` with oneDNN, its default on x86; dilations, which TensorFlow
    ignores, work here.
    """

@overload
def DepthwiseConv2dNativeBackpropFilter(
    *,
    input: _NumPy | _Numbers,
    filter_sizes: Iterable[SupportsIndex],
    out_backprop: _NumPy | _Numbers,
    strides: Iterable[SupportsIndex],
    padding: Literal["SAME", "VALID", "EXPLICIT"],
    explicit_paddings: Iterable[SupportsIndex] = (),
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Iterable[SupportsIndex] = (1, 1, 1, 1),
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy:
    """Gradient of `depthwise_conv2d_native` with respect to its filter.

    Sums over batch and positions in float64, in an order fixed by the shapes: within an output row from left to
    right, then the rows by the library's summation tree; rounded once.

    Args:
        input: as passed to the convolution.
        filter_sizes: shape of the convolution's filter, 4 static integers.
        out_backprop: the incoming gradient of the output, of its shape.
        strides, padding, explicit_paddings, data_format, dilations: as passed to the convolution.
    Returns:
        output: of shape `filter_sizes`; zeros for an empty batch.
    Raises:
        ValueError: incompatible ranks, lengths or values. TypeError: dtypes differ.
    Source: TensorFlow `DepthwiseConv2dNativeBackpropFilter`; dilations, which TensorFlow ignores, work here.
    """

@overload
def DepthwiseConv2dNativeBackpropFilter(
    *,
    input: torch.Tensor,
    filter_sizes: Iterable[SupportsIndex],
    out_backprop: torch.Tensor | _NumPy | _Numbers,
    strides: Iterable[SupportsIndex],
    padding: Literal["SAME", "VALID", "EXPLICIT"],
    explicit_paddings: Iterable[SupportsIndex] = (),
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Iterable[SupportsIndex] = (1, 1, 1, 1),
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Gradient of `depthwise_conv2d_native` with respect to its filter.

    Sums over batch and positions in float64, in an order fixed by the shapes: within an output row from left to
    right, then the rows by the library's summation tree; rounded once.

    Args:
        input: as passed to the convolution.
        filter_sizes: shape of the convolution's filter, 4 static integers.
        out_backprop: the incoming gradient of the output, of its shape.
        strides, padding, explicit_paddings, data_format, dilations: as passed to the convolution.
    Returns:
        output: of shape `filter_sizes`; zeros for an empty batch.
    Raises:
        ValueError: incompatible ranks, lengths or values. TypeError: dtypes differ.
    Source: TensorFlow `DepthwiseConv2dNativeBackpropFilter`; dilations, which TensorFlow ignores, work here.
    """

@overload
def DepthwiseConv2dNativeBackpropFilter(
    *,
    input: jax.Array,
    filter_sizes: Iterable[SupportsIndex],
    out_backprop: jax.Array | _NumPy | _Numbers,
    strides: Iterable[SupportsIndex],
    padding: Literal["SAME", "VALID", "EXPLICIT"],
    explicit_paddings: Iterable[SupportsIndex] = (),
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Iterable[SupportsIndex] = (1, 1, 1, 1),
    name: str | None = None,
) -> jax.Array:
    """Gradient of `depthwise_conv2d_native` with respect to its filter.

    Sums over batch and positions in float64, in an order fixed by the shapes: within an output row from left to
    right, then the rows by the library's summation tree; rounded once.

    Args:
        input: as passed to the convolution.
        filter_sizes: shape of the convolution's filter, 4 static integers.
        out_backprop: the incoming gradient of the output, of its shape.
        strides, padding, explicit_paddings, data_format, dilations: as passed to the convolution.
    Returns:
        output: of shape `filter_sizes`; zeros for an empty batch.
    Raises:
        ValueError: incompatible ranks, lengths or values. TypeError: dtypes differ.
    Source: TensorFlow `DepthwiseConv2dNativeBackpropFilter`; dilations, which TensorFlow ignores, work here.
    """

@overload
def DepthwiseConv2dNativeBackpropFilter(
    *,
    input: _TensorFlow,
    filter_sizes: Iterable[SupportsIndex],
    out_backprop: _TensorFlow | _NumPy | _Numbers,
    strides: Iterable[SupportsIndex],
    padding: Literal["SAME", "VALID", "EXPLICIT"],
    explicit_paddings: Iterable[SupportsIndex] = (),
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Iterable[SupportsIndex] = (1, 1, 1, 1),
    name: str | None = None,
) -> Any:
    """Gradient of `depthwise_conv2d_native` with respect to its filter.

    Sums over batch and positions in float64, in an order fixed by the shapes: within an output row from left to
    right, then the rows by the library's summation tree; rounded once.

    Args:
        input: as passed to the convolution.
        filter_sizes: shape of the convolution's filter, 4 static integers.
        out_backprop: the incoming gradient of the output, of its shape.
        strides, padding, explicit_paddings, data_format, dilations: as passed to the convolution.
    Returns:
        output: of shape `filter_sizes`; zeros for an empty batch.
    Raises:
        ValueError: incompatible ranks, lengths or values. TypeError: dtypes differ.
    Source: TensorFlow `DepthwiseConv2dNativeBackpropFilter`; dilations, which TensorFlow ignores, work here.
    """

@overload
def FakeQuantWithMinMaxArgs(
    *,
    inputs: _NumPy | _Numbers,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy:
    """Quantize and dequantize a tensor with one fixed range.

    The range is first moved ("nudged") so that zero is one of its `2**num_bits` steps (one step fewer with
    `narrow_range`); values outside it are clamped to its ends, values inside it are rounded to the nearest step, ties
    upwards. NaN stays NaN.

    Args:
        inputs: a float tensor, any shape.
        min, max: the range; `min < max`. Values beyond the dtype are infinite, as in TensorFlow, and a non-finite
            range gives NaN.
        num_bits: 2 to 16.
        narrow_range: omit the lowest code, so that a symmetric range has symmetric codes.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `num_bits` outside 2..16, or not `min < max`.
    Source: TensorFlow `FakeQuantWithMinMaxArgs`.
    """

@overload
def FakeQuantWithMinMaxArgs(
    *,
    inputs: torch.Tensor,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Quantize and dequantize a tensor with one fixed range.

    The range is first moved ("nudged") so that zero is one of its `2**num_bits` steps (one step fewer with
    `narrow_range`); values outside it are clamped to its ends, values inside it are rounded to the nearest step, ties
    upwards. NaN stays NaN.

    Args:
        inputs: a float tensor, any shape.
        min, max: the range; `min < max`. Values beyond the dtype are infinite, as in TensorFlow, and a non-finite
            range gives NaN.
        num_bits: 2 to 16.
        narrow_range: omit the lowest code, so that a symmetric range has symmetric codes.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `num_bits` outside 2..16, or not `min < max`.
    Source: TensorFlow `FakeQuantWithMinMaxArgs`.
    """

@overload
def FakeQuantWithMinMaxArgs(
    *,
    inputs: jax.Array,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Quantize and dequantize a tensor with one fixed range.

    The range is first moved ("nudged") so that zero is one of its `2**num_bits` steps (one step fewer with
    `narrow_range`); values outside it are clamped to its ends, values inside it are rounded to the nearest step, ties
    upwards. NaN stays NaN.

    Args:
        inputs: a float tensor, any shape.
        min, max: the range; `min < max`. Values beyond the dtype are infinite, as in TensorFlow, and a non-finite
            range gives NaN.
        num_bits: 2 to 16.
        narrow_range: omit the lowest code, so that a symmetric range has symmetric codes.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `num_bits` outside 2..16, or not `min < max`.
    Source: TensorFlow `FakeQuantWithMinMaxArgs`.
    """

@overload
def FakeQuantWithMinMaxArgs(
    *,
    inputs: _TensorFlow,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> Any:
    """Quantize and dequantize a tensor with one fixed range.

    The range is first moved ("nudged") so that zero is one of its `2**num_bits` steps (one step fewer with
    `narrow_range`); values outside it are clamped to its ends, values inside it are rounded to the nearest step, ties
    upwards. NaN stays NaN.

    Args:
        inputs: a float tensor, any shape.
        min, max: the range; `min < max`. Values beyond the dtype are infinite, as in TensorFlow, and a non-finite
            range gives NaN.
        num_bits: 2 to 16.
        narrow_range: omit the lowest code, so that a symmetric range has symmetric codes.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `num_bits` outside 2..16, or not `min < max`.
    Source: TensorFlow `FakeQuantWithMinMaxArgs`.
    """

@overload
def FakeQuantWithMinMaxArgsGradient(
    *,
    gradients: _NumPy | _Numbers,
    inputs: _NumPy | _Numbers,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy:
    """Gradient of `fake_quant_with_min_max_args`: `gradients` where `inputs` lie in the nudged range, times 0
    elsewhere.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_args`.
    Returns:
        backprops: like `inputs`. The nudged range includes both ends; the product with 0 keeps NaN, infinity and the
            sign of zero.
    Raises:
        ValueError: shapes differ, `num_bits` outside 2..16, or not `min < max`.
    Source: TensorFlow `FakeQuantWithMinMaxArgsGradient`.
    """

@overload
def FakeQuantWithMinMaxArgsGradient(
    *,
    gradients: torch.Tensor,
    inputs: torch.Tensor | _NumPy | _Numbers,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Gradient of `fake_quant_with_min_max_args`: `gradients` where `inputs` lie in the nudged range, times 0
    elsewhere.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_args`.
    Returns:
        backprops: like `inputs`. The nudged range includes both ends; the product with 0 keeps NaN, infinity and the
            sign of zero.
    Raises:
        ValueError: shapes differ, `num_bits` outside 2..16, or not `min < max`.
    Source: TensorFlow `FakeQuantWithMinMaxArgsGradient`.
    """

@overload
def FakeQuantWithMinMaxArgsGradient(
    *,
    gradients: jax.Array,
    inputs: jax.Array | _NumPy | _Numbers,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Gradient of `fake_quant_with_min_max_args`: `gradients` where `inputs` lie in the nudged range, times 0
    elsewhere.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_args`.
    Returns:
        backprops: like `inputs`. The nudged range includes both ends; the product with 0 keeps NaN, infinity and the
            sign of zero.
    Raises:
        ValueError: shapes differ, `num_bits` outside 2..16, or not `min < max`.
    Source: TensorFlow `FakeQuantWithMinMaxArgsGradient`.
    """

@overload
def FakeQuantWithMinMaxArgsGradient(
    *,
    gradients: _TensorFlow,
    inputs: _TensorFlow | _NumPy | _Numbers,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> Any:
    """Gradient of `fake_quant_with_min_max_args`: `gradients` where `inputs` lie in the nudged range, times 0
    elsewhere.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_args`.
    Returns:
        backprops: like `inputs`. The nudged range includes both ends; the product with 0 keeps NaN, infinity and the
            sign of zero.
    Raises:
        ValueError: shapes differ, `num_bits` outside 2..16, or not `min < max`.
    Source: TensorFlow `FakeQuantWithMinMaxArgsGradient`.
    """

@overload
def FakeQuantWithMinMaxVars(
    *,
    inputs: _NumPy | _Numbers,
    min: _NumPy | _Numbers,
    max: _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy:
    """Quantize and dequantize a tensor with one trainable range.

    As `fake_quant_with_min_max_args`, but the step is computed by a true division, so a few values in a million round
    the other way. With `min == max == 0` every output is 0, also for NaN; any other `min == max` and every non-finite
    range give NaN; `min > max` gives a constant.

    Args:
        inputs: a float tensor, any shape.
        min, max: the range, scalars of the dtype of `inputs` (float32 if that has 16 bits).
        num_bits: 2 to 16.
        narrow_range: omit the lowest code.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `min` or `max` not of rank 0, `num_bits` outside 2..16. TypeError: dtypes differ.
    Source: TensorFlow `FakeQuantWithMinMaxVars`.
    """

@overload
def FakeQuantWithMinMaxVars(
    *,
    inputs: torch.Tensor,
    min: torch.Tensor | _NumPy | _Numbers,
    max: torch.Tensor | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Quantize and dequantize a tensor with one trainable range.

    As `fake_quant_with_min_max_args`, but the step is computed by a true division, so a few values in a million round
    the other way. With `min == max == 0` every output is 0, also for NaN; any other `min == max` and every non-finite
    range give NaN; `min > max` gives a constant.

    Args:
        inputs: a float tensor, any shape.
        min, max: the range, scalars of the dtype of `inputs` (float32 if that has 16 bits).
        num_bits: 2 to 16.
        narrow_range: omit the lowest code.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `min` or `max` not of rank 0, `num_bits` outside 2..16. TypeError: dtypes differ.
    Source: TensorFlow `FakeQuantWithMinMaxVars`.
    """

@overload
def FakeQuantWithMinMaxVars(
    *,
    inputs: jax.Array,
    min: jax.Array | _NumPy | _Numbers,
    max: jax.Array | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Quantize and dequantize a tensor with one trainable range.

    As `fake_quant_with_min_max_args`, but the step is computed by a true division, so a few values in a million round
    the other way. With `min == max == 0` every output is 0, also for NaN; any other `min == max` and every non-finite
    range give NaN; `min > max` gives a constant.

    Args:
        inputs: a float tensor, any shape.
        min, max: the range, scalars of the dtype of `inputs` (float32 if that has 16 bits).
        num_bits: 2 to 16.
        narrow_range: omit the lowest code.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `min` or `max` not of rank 0, `num_bits` outside 2..16. TypeError: dtypes differ.
    Source: TensorFlow `FakeQuantWithMinMaxVars`.
    """

@overload
def FakeQuantWithMinMaxVars(
    *,
    inputs: _TensorFlow,
    min: _TensorFlow | _NumPy | _Numbers,
    max: _TensorFlow | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> Any:
    """Quantize and dequantize a tensor with one trainable range.

    As `fake_quant_with_min_max_args`, but the step is computed by a true division, so a few values in a million round
    the other way. With `min == max == 0` every output is 0, also for NaN; any other `min == max` and every non-finite
    range give NaN; `min > max` gives a constant.

    Args:
        inputs: a float tensor, any shape.
        min, max: the range, scalars of the dtype of `inputs` (float32 if that has 16 bits).
        num_bits: 2 to 16.
        narrow_range: omit the lowest code.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `min` or `max` not of rank 0, `num_bits` outside 2..16. TypeError: dtypes differ.
    Source: TensorFlow `FakeQuantWithMinMaxVars`.
    """

@overload
def FakeQuantWithMinMaxVarsGradient(
    *,
    gradients: _NumPy | _Numbers,
    inputs: _NumPy | _Numbers,
    min: _NumPy | _Numbers,
    max: _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: tuple[_NumPy, _NumPy, _NumPy] | None = None,
) -> _FakeQuantWithMinMaxVarsGradientResults[_NumPy]:
    """Gradients of `fake_quant_with_min_max_vars` for its inputs and both ends of the range.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_vars`.
    Returns:
        backprops_wrt_input: like `inputs`; `gradients` inside the nudged range (ends included), times 0 outside.
        backprop_wrt_min: scalar, sum of `gradients` where `inputs` lie below the nudged range.
        backprop_wrt_max: scalar, sum of `gradients` where `inputs` lie above it.
        Elements on the other side count as `gradient * 0`, so a NaN makes both sums NaN and an infinite gradient the
        sum of the side it is not on. With `min == max == 0` the gradient passes unchanged.
    Raises:
        ValueError: shapes differ, `min` or `max` not of rank 0, `num_bits` outside 2..16. TypeError: dtypes differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsGradient`.
    """

@overload
def FakeQuantWithMinMaxVarsGradient(
    *,
    gradients: torch.Tensor,
    inputs: torch.Tensor | _NumPy | _Numbers,
    min: torch.Tensor | _NumPy | _Numbers,
    max: torch.Tensor | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _FakeQuantWithMinMaxVarsGradientResults[torch.Tensor]:
    """Gradients of `fake_quant_with_min_max_vars` for its inputs and both ends of the range.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_vars`.
    Returns:
        backprops_wrt_input: like `inputs`; `gradients` inside the nudged range (ends included), times 0 outside.
        backprop_wrt_min: scalar, sum of `gradients` where `inputs` lie below the nudged range.
        backprop_wrt_max: scalar, sum of `gradients` where `inputs` lie above it.
        Elements on the other side count as `gradient * 0`, so a NaN makes both sums NaN and an infinite gradient the
        sum of the side it is not on. With `min == max == 0` the gradient passes unchanged.
    Raises:
        ValueError: shapes differ, `min` or `max` not of rank 0, `num_bits` outside 2..16. TypeError: dtypes differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsGradient`.
    """

@overload
def FakeQuantWithMinMaxVarsGradient(
    *,
    gradients: jax.Array,
    inputs: jax.Array | _NumPy | _Numbers,
    min: jax.Array | _NumPy | _Numbers,
    max: jax.Array | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> _FakeQuantWithMinMaxVarsGradientResults[jax.Array]:
    """Gradients of `fake_quant_with_min_max_vars` for its inputs and both ends of the range.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_vars`.
    Returns:
        backprops_wrt_input: like `inputs`; `gradients` inside the nudged range (ends included), times 0 outside.
        backprop_wrt_min: scalar, sum of `gradients` where `inputs` lie below the nudged range.
        backprop_wrt_max: scalar, sum of `gradients` where `inputs` lie above it.
        Elements on the other side count as `gradient * 0`, so a NaN makes both sums NaN and an infinite gradient the
        sum of the side it is not on. With `min == max == 0` the gradient passes unchanged.
    Raises:
        ValueError: shapes differ, `min` or `max` not of rank 0, `num_bits` outside 2..16. TypeError: dtypes differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsGradient`.
    """

@overload
def FakeQuantWithMinMaxVarsGradient(
    *,
    gradients: _TensorFlow,
    inputs: _TensorFlow | _NumPy | _Numbers,
    min: _TensorFlow | _NumPy | _Numbers,
    max: _TensorFlow | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> _FakeQuantWithMinMaxVarsGradientResults[Any]:
    """Gradients of `fake_quant_with_min_max_vars` for its inputs and both ends of the range.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_vars`.
    Returns:
        backprops_wrt_input: like `inputs`; `gradients` inside the nudged range (ends included), times 0 outside.
        backprop_wrt_min: scalar, sum of `gradients` where `inputs` lie below the nudged range.
        backprop_wrt_max: scalar, sum of `gradients` where `inputs` lie above it.
        Elements on the other side count as `gradient * 0`, so a NaN makes both sums NaN and an infinite gradient the
        sum of the side it is not on. With `min == max == 0` the gradient passes unchanged.
    Raises:
        ValueError: shapes differ, `min` or `max` not of rank 0, `num_bits` outside 2..16. TypeError: dtypes differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsGradient`.
    """

@overload
def FakeQuantWithMinMaxVarsPerChannel(
    *,
    inputs: _NumPy | _Numbers,
    min: _NumPy | _Numbers,
    max: _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy:
    """Quantize and dequantize a tensor with one trainable range per channel, the last dimension.

    Each channel behaves as `fake_quant_with_min_max_args` with its own range; ranges of 0 as
    `fake_quant_with_min_max_vars`.

    Args:
        inputs: a float tensor, shape `[..., d]`, any rank from 1.
        min, max: the ranges, shape `[d]`, of the dtype of `inputs` (float32 if that has 16 bits).
        num_bits: 2 to 16.
        narrow_range: omit the lowest code.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `inputs` of rank 0, `min` or `max` not of shape `[d]`, `num_bits` outside 2..16. TypeError: dtypes
            differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsPerChannel`.
    """

@overload
def FakeQuantWithMinMaxVarsPerChannel(
    *,
    inputs: torch.Tensor,
    min: torch.Tensor | _NumPy | _Numbers,
    max: torch.Tensor | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Quantize and dequantize a tensor with one trainable range per channel, the last dimension.

    Each channel behaves as `fake_quant_with_min_max_args` with its own range; ranges of 0 as
    `fake_quant_with_min_max_vars`.

    Args:
        inputs: a float tensor, shape `[..., d]`, any rank from 1.
        min, max: the ranges, shape `[d]`, of the dtype of `inputs` (float32 if that has 16 bits).
        num_bits: 2 to 16.
        narrow_range: omit the lowest code.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `inputs` of rank 0, `min` or `max` not of shape `[d]`, `num_bits` outside 2..16. TypeError: dtypes
            differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsPerChannel`.
    """

@overload
def FakeQuantWithMinMaxVarsPerChannel(
    *,
    inputs: jax.Array,
    min: jax.Array | _NumPy | _Numbers,
    max: jax.Array | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Quantize and dequantize a tensor with one trainable range per channel, the last dimension.

    Each channel behaves as `fake_quant_with_min_max_args` with its own range; ranges of 0 as
    `fake_quant_with_min_max_vars`.

    Args:
        inputs: a float tensor, shape `[..., d]`, any rank from 1.
        min, max: the ranges, shape `[d]`, of the dtype of `inputs` (float32 if that has 16 bits).
        num_bits: 2 to 16.
        narrow_range: omit the lowest code.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `inputs` of rank 0, `min` or `max` not of shape `[d]`, `num_bits` outside 2..16. TypeError: dtypes
            differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsPerChannel`.
    """

@overload
def FakeQuantWithMinMaxVarsPerChannel(
    *,
    inputs: _TensorFlow,
    min: _TensorFlow | _NumPy | _Numbers,
    max: _TensorFlow | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> Any:
    """Quantize and dequantize a tensor with one trainable range per channel, the last dimension.

    Each channel behaves as `fake_quant_with_min_max_args` with its own range; ranges of 0 as
    `fake_quant_with_min_max_vars`.

    Args:
        inputs: a float tensor, shape `[..., d]`, any rank from 1.
        min, max: the ranges, shape `[d]`, of the dtype of `inputs` (float32 if that has 16 bits).
        num_bits: 2 to 16.
        narrow_range: omit the lowest code.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `inputs` of rank 0, `min` or `max` not of shape `[d]`, `num_bits` outside 2..16. TypeError: dtypes
            differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsPerChannel`.
    """

@overload
def FakeQuantWithMinMaxVarsPerChannelGradient(
    *,
    gradients: _NumPy | _Numbers,
    inputs: _NumPy | _Numbers,
    min: _NumPy | _Numbers,
    max: _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: tuple[_NumPy, _NumPy, _NumPy] | None = None,
) -> _FakeQuantWithMinMaxVarsPerChannelGradientResults[_NumPy]:
    """Gradients of `fake_quant_with_min_max_vars_per_channel` for its inputs and both ends of each channel's range.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_vars_per_channel`.
    Returns:
        backprops_wrt_input: like `inputs`; `gradients` inside the channel's nudged range (ends included), times 0
            outside.
        backprop_wrt_min: shape `[d]`, sums of `gradients` where `inputs` lie below the channel's nudged range.
        backprop_wrt_max: shape `[d]`, sums of `gradients` where `inputs` lie above it.
        Elements on the other side count as `gradient * 0`, so a NaN makes both sums of its channel NaN and an infinite
        gradient the sum of the side it is not on. Where `min == max == 0` it passes unchanged.
    Raises:
        ValueError: shapes differ, `min` or `max` not of shape `[d]`, `num_bits` outside 2..16. TypeError: dtypes
            differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsPerChannelGradient`.
    """

@overload
def FakeQuantWithMinMaxVarsPerChannelGradient(
    *,
    gradients: torch.Tensor,
    inputs: torch.Tensor | _NumPy | _Numbers,
    min: torch.Tensor | _NumPy | _Numbers,
    max: torch.Tensor | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _FakeQuantWithMinMaxVarsPerChannelGradientResults[torch.Tensor]:
    """Gradients of `fake_quant_with_min_max_vars_per_channel` for its inputs and both ends of each channel's range.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_vars_per_channel`.
    Returns:
        backprops_wrt_input: like `inputs`; `gradients` inside the channel's nudged range (ends included), times 0
            outside.
        backprop_wrt_min: shape `[d]`, sums of `gradients` where `inputs` lie below the channel's nudged range.
        backprop_wrt_max: shape `[d]`, sums of `gradients` where `inputs` lie above it.
        Elements on the other side count as `gradient * 0`, so a NaN makes both sums of its channel NaN and an infinite
        gradient the sum of the side it is not on. Where `min == max == 0` it passes unchanged.
    Raises:
        ValueError: shapes differ, `min` or `max` not of shape `[d]`, `num_bits` outside 2..16. TypeError: dtypes
            differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsPerChannelGradient`.
    """

@overload
def FakeQuantWithMinMaxVarsPerChannelGradient(
    *,
    gradients: jax.Array,
    inputs: jax.Array | _NumPy | _Numbers,
    min: jax.Array | _NumPy | _Numbers,
    max: jax.Array | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> _FakeQuantWithMinMaxVarsPerChannelGradientResults[jax.Array]:
    """Gradients of `fake_quant_with_min_max_vars_per_channel` for its inputs and both ends of each channel's range.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_vars_per_channel`.
    Returns:
        backprops_wrt_input: like `inputs`; `gradients` inside the channel's nudged range (ends included), times 0
            outside.
        backprop_wrt_min: shape `[d]`, sums of `gradients` where `inputs` lie below the channel's nudged range.
        backprop_wrt_max: shape `[d]`, sums of `gradients` where `inputs` lie above it.
        Elements on the other side count as `gradient * 0`, so a NaN makes both sums of its channel NaN and an infinite
        gradient the sum of the side it is not on. Where `min == max == 0` it passes unchanged.
    Raises:
        ValueError: shapes differ, `min` or `max` not of shape `[d]`, `num_bits` outside 2..16. TypeError: dtypes
            differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsPerChannelGradient`.
    """

@overload
def FakeQuantWithMinMaxVarsPerChannelGradient(
    *,
    gradients: _TensorFlow,
    inputs: _TensorFlow | _NumPy | _Numbers,
    min: _TensorFlow | _NumPy | _Numbers,
    max: _TensorFlow | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> _FakeQuantWithMinMaxVarsPerChannelGradientResults[Any]:
    """Gradients of `fake_quant_with_min_max_vars_per_channel` for its inputs and both ends of each channel's range.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_vars_per_channel`.
    Returns:
        backprops_wrt_input: like `inputs`; `gradients` inside the channel's nudged range (ends included), times 0
            outside.
        backprop_wrt_min: shape `[d]`, sums of `gradients` where `inputs` lie below the channel's nudged range.
        backprop_wrt_max: shape `[d]`, sums of `gradients` where `inputs` lie above it.
        Elements on the other side count as `gradient * 0`, so a NaN makes both sums of its channel NaN and an infinite
        gradient the sum of the side it is not on. Where `min == max == 0` it passes unchanged.
    Raises:
        ValueError: shapes differ, `min` or `max` not of shape `[d]`, `num_bits` outside 2..16. TypeError: dtypes
            differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsPerChannelGradient`.
    """

@overload
def FusedBatchNorm(
    *,
    x: _NumPy | _Numbers,
    scale: _NumPy | _Numbers,
    offset: _NumPy | _Numbers,
    mean: _NumPy | _Numbers,
    variance: _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    exponential_avg_factor: _Float = 1.0,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[_NumPy, _NumPy, _NumPy, _NumPy, _NumPy] | None = None,
) -> _FusedBatchNormResults[_NumPy]:
    """Batch normalization, version 1: `fused_batch_norm_v3` without its third reserve space.

    Args:
        x, scale, offset, mean, variance, epsilon, exponential_avg_factor, is_training: see `fused_batch_norm_v3`.
        data_format: "NHWC" or "NCHW".
    Returns:
        y, batch_mean, batch_variance, reserve_space_1, reserve_space_2: see `fused_batch_norm_v3`.
    Raises:
        ValueError, TypeError: as `fused_batch_norm_v3`.
    Source: TensorFlow `FusedBatchNorm`.
    """

@overload
def FusedBatchNorm(
    *,
    x: torch.Tensor,
    scale: torch.Tensor | _NumPy | _Numbers,
    offset: torch.Tensor | _NumPy | _Numbers,
    mean: torch.Tensor | _NumPy | _Numbers,
    variance: torch.Tensor | _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    exponential_avg_factor: _Float = 1.0,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _FusedBatchNormResults[torch.Tensor]:
    """Batch normalization, version 1: `fused_batch_norm_v3` without its third reserve space.

    Args:
        x, scale, offset, mean, variance, epsilon, exponential_avg_factor, is_training: see `fused_batch_norm_v3`.
        data_format: "NHWC" or "NCHW".
    Returns:
        y, batch_mean, batch_variance, reserve_space_1, reserve_space_2: see `fused_batch_norm_v3`.
    Raises:
        ValueError, TypeError: as `fused_batch_norm_v3`.
    Source: TensorFlow `FusedBatchNorm`.
    """

@overload
def FusedBatchNorm(
    *,
    x: jax.Array,
    scale: jax.Array | _NumPy | _Numbers,
    offset: jax.Array | _NumPy | _Numbers,
    mean: jax.Array | _NumPy | _Numbers,
    variance: jax.Array | _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    exponential_avg_factor: _Float = 1.0,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
) -> _FusedBatchNormResults[jax.Array]:
    """Batch normalization, version 1: `fused_batch_norm_v3` without its third reserve space.

    Args:
        x, scale, offset, mean, variance, epsilon, exponential_avg_factor, is_training: see `fused_batch_norm_v3`.
        data_format: "NHWC" or "NCHW".
    Returns:
        y, batch_mean, batch_variance, reserve_space_1, reserve_space_2: see `fused_batch_norm_v3`.
    Raises:
        ValueError, TypeError: as `fused_batch_norm_v3`.
    Source: TensorFlow `FusedBatchNorm`.
    """

@overload
def FusedBatchNorm(
    *,
    x: _TensorFlow,
    scale: _TensorFlow | _NumPy | _Numbers,
    offset: _TensorFlow | _NumPy | _Numbers,
    mean: _TensorFlow | _NumPy | _Numbers,
    variance: _TensorFlow | _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    exponential_avg_factor: _Float = 1.0,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
) -> _FusedBatchNormResults[Any]:
    """Batch normalization, version 1: `fused_batch_norm_v3` without its third reserve space.

    Args:
        x, scale, offset, mean, variance, epsilon, exponential_avg_factor, is_training: see `fused_batch_norm_v3`.
        data_format: "NHWC" or "NCHW".
    Returns:
        y, batch_mean, batch_variance, reserve_space_1, reserve_space_2: see `fused_batch_norm_v3`.
    Raises:
        ValueError, TypeError: as `fused_batch_norm_v3`.
    Source: TensorFlow `FusedBatchNorm`.
    """

@overload
def FusedBatchNormV2(
    *,
    x: _NumPy | _Numbers,
    scale: _NumPy | _Numbers,
    offset: _NumPy | _Numbers,
    mean: _NumPy | _Numbers,
    variance: _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    exponential_avg_factor: _Float = 1.0,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[_NumPy, _NumPy, _NumPy, _NumPy, _NumPy] | None = None,
) -> _FusedBatchNormV2Results[_NumPy]:
    """Batch normalization, version 2: `fused_batch_norm_v3` without its third reserve space.

    Args:
        x, scale, offset, mean, variance, epsilon, exponential_avg_factor, is_training: see `fused_batch_norm_v3`.
        data_format: "NHWC" or "NCHW".
    Returns:
        y, batch_mean, batch_variance, reserve_space_1, reserve_space_2: see `fused_batch_norm_v3`.
    Raises:
        ValueError, TypeError: as `fused_batch_norm_v3`.
    Source: TensorFlow `FusedBatchNormV2`.
    """

@overload
def FusedBatchNormV2(
    *,
    x: torch.Tensor,
    scale: torch.Tensor | _NumPy | _Numbers,
    offset: torch.Tensor | _NumPy | _Numbers,
    mean: torch.Tensor | _NumPy | _Numbers,
    variance: torch.Tensor | _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    exponential_avg_factor: _Float = 1.0,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _FusedBatchNormV2Results[torch.Tensor]:
    """Batch normalization, version 2: `fused_batch_norm_v3` without its third reserve space.

    Args:
        x, scale, offset, mean, variance, epsilon, exponential_avg_factor, is_training: see `fused_batch_norm_v3`.
        data_format: "NHWC" or "NCHW".
    Returns:
        y, batch_mean, batch_variance, reserve_space_1, reserve_space_2: see `fused_batch_norm_v3`.
    Raises:
        ValueError, TypeError: as `fused_batch_norm_v3`.
    Source: TensorFlow `FusedBatchNormV2`.
    """

@overload
def FusedBatchNormV2(
    *,
    x: jax.Array,
    scale: jax.Array | _NumPy | _Numbers,
    offset: jax.Array | _NumPy | _Numbers,
    mean: jax.Array | _NumPy | _Numbers,
    variance: jax.Array | _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    exponential_avg_factor: _Float = 1.0,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
) -> _FusedBatchNormV2Results[jax.Array]:
    """Batch normalization, version 2: `fused_batch_norm_v3` without its third reserve space.

    Args:
        x, scale, offset, mean, variance, epsilon, exponential_avg_factor, is_training: see `fused_batch_norm_v3`.
        data_format: "NHWC" or "NCHW".
    Returns:
        y, batch_mean, batch_variance, reserve_space_1, reserve_space_2: see `fused_batch_norm_v3`.
    Raises:
        ValueError, TypeError: as `fused_batch_norm_v3`.
    Source: TensorFlow `FusedBatchNormV2`.
    """

@overload
def FusedBatchNormV2(
    *,
    x: _TensorFlow,
    scale: _TensorFlow | _NumPy | _Numbers,
    offset: _TensorFlow | _NumPy | _Numbers,
    mean: _TensorFlow | _NumPy | _Numbers,
    variance: _TensorFlow | _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    exponential_avg_factor: _Float = 1.0,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
) -> _FusedBatchNormV2Results[Any]:
    """Batch normalization, version 2: `fused_batch_norm_v3` without its third reserve space.

    Args:
        x, scale, offset, mean, variance, epsilon, exponential_avg_factor, is_training: see `fused_batch_norm_v3`.
        data_format: "NHWC" or "NCHW".
    Returns:
        y, batch_mean, batch_variance, reserve_space_1, reserve_space_2: see `fused_batch_norm_v3`.
    Raises:
        ValueError, TypeError: as `fused_batch_norm_v3`.
    Source: TensorFlow `FusedBatchNormV2`.
    """

@overload
def FusedBatchNormV3(
    *,
    x: _NumPy | _Numbers,
    scale: _NumPy | _Numbers,
    offset: _NumPy | _Numbers,
    mean: _NumPy | _Numbers,
    variance: _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    exponential_avg_factor: _Float = 1.0,
    data_format: Literal["NHWC", "NCHW", "NDHWC", "NCDHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[_NumPy, _NumPy, _NumPy, _NumPy, _NumPy, _NumPy] | None = None,
) -> _FusedBatchNormV3Results[_NumPy]:
    """Batch normalization: `y = (x - mean) / sqrt(variance + epsilon) * scale + offset` per channel.

    In training, mean and variance are those of the batch (normalizing with the biased variance); otherwise
    they are the arguments. Statistics are computed in float64, elements in the dtype of `x` (float32 if that has 16
    bits) with coefficients rounded once; see docs/decisions/batch-norm.md.

    Args:
        x: a float tensor, 4-D or 5-D images.
        scale, offset: vectors, one element per channel, of the dtype of `x` (float32 if that has 16 bits).
        mean, variance: running statistics, likewise vectors. In training with `exponential_avg_factor` 1 they are
            ignored and may have any length, even 0.
        epsilon: added to the variance.
        exponential_avg_factor: weight of the batch in the returned running statistics; 1 returns only those of the
            batch.
        data_format: where the channels are: last for "NHWC" and "NDHWC", second for "NCHW" and "NCDHW".
        is_training: use the statistics of the batch.
    Returns:
        y: like `x`.
        batch_mean: the running mean, updated; NaN for an empty `x`.
        batch_variance: the running variance, updated with the unbiased variance of the batch (`N / (N - 1)`, Bessel).
        reserve_space_1, reserve_space_2: what the gradient needs: in training mean and biased variance of the batch,
            else copies of `mean` and `variance`; zeros for an empty `x`.
        reserve_space_3: scalar 0.
    Raises:
        ValueError: `x` not 4-D or 5-D, vectors whose length is not the number of channels. TypeError: dtypes differ.
    Source: TensorFlow `FusedBatchNormV3`. Gradients of the statistics with respect to `x` are zero, as there.
    """

@overload
def FusedBatchNormV3(
    *,
    x: torch.Tensor,
    scale: torch.Tensor | _NumPy | _Numbers,
    offset: torch.Tensor | _NumPy | _Numbers,
    mean: torch.Tensor | _NumPy | _Numbers,
    variance: torch.Tensor | _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    exponential_avg_factor: _Float = 1.0,
    data_format: Literal["NHWC", "NCHW", "NDHWC", "NCDHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _FusedBatchNormV3Results[torch.Tensor]:
    """Batch normalization: `y = (x - mean) / sqrt(variance + epsilon) * scale + offset` per channel.

    In training, mean and variance are those of the batch (normalizing with the biased variance); otherwise
    they are the arguments. Statistics are computed in float64, elements in the dtype of `x` (float32 if that has 16
    bits) with coefficients rounded once; see docs/decisions/batch-norm.md.

    Args:
        x: a float tensor, 4-D or 5-D images.
        scale, offset: vectors, one element per channel, of the dtype of `x` (float32 if that has 16 bits).
        mean, variance: running statistics, likewise vectors. In training with `exponential_avg_factor` 1 they are
            ignored and may have any length, even 0.
        epsilon: added to the variance.
        exponential_avg_factor: weight of the batch in the returned running statistics; 1 returns only those of the
            batch.
        data_format: where the channels are: last for "NHWC" and "NDHWC", second for "NCHW" and "NCDHW".
        is_training: use the statistics of the batch.
    Returns:
        y: like `x`.
        batch_mean: the running mean, updated; NaN for an empty `x`.
        batch_variance: the running variance, updated with the unbiased variance of the batch (`N / (N - 1)`, Bessel).
        reserve_space_1, reserve_space_2: what the gradient needs: in training mean and biased variance of the batch,
            else copies of `mean` and `variance`; zeros for an empty `x`.
        reserve_space_3: scalar 0.
    Raises:
        ValueError: `x` not 4-D or 5-D, vectors whose length is not the number of channels. TypeError: dtypes differ.
    Source: TensorFlow `FusedBatchNormV3`. Gradients of the statistics with respect to `x` are zero, as there.
    """

@overload
def FusedBatchNormV3(
    *,
    x: jax.Array,
    scale: jax.Array | _NumPy | _Numbers,
    offset: jax.Array | _NumPy | _Numbers,
    mean: jax.Array | _NumPy | _Numbers,
    variance: jax.Array | _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    exponential_avg_factor: _Float = 1.0,
    data_format: Literal["NHWC", "NCHW", "NDHWC", "NCDHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
) -> _FusedBatchNormV3Results[jax.Array]:
    """Batch normalization: `y = (x - mean) / sqrt(variance + epsilon) * scale + offset` per channel.

    In training, mean and variance are those of the batch (normalizing with the biased variance); otherwise
    they are the arguments. Statistics are computed in float64, elements in the dtype of `x` (float32 if that has 16
    bits) with coefficients rounded once; see docs/decisions/batch-norm.md.

    Args:
        x: a float tensor, 4-D or 5-D images.
        scale, offset: vectors, one element per channel, of the dtype of `x` (float32 if that has 16 bits).
        mean, variance: running statistics, likewise vectors. In training with `exponential_avg_factor` 1 they are
            ignored and may have any length, even 0.
        epsilon: added to the variance.
        exponential_avg_factor: weight of the batch in the returned running statistics; 1 returns only those of the
            batch.
        data_format: where the channels are: last for "NHWC" and "NDHWC", second for "NCHW" and "NCDHW".
        is_training: use the statistics of the batch.
    Returns:
        y: like `x`.
        batch_mean: the running mean, updated; NaN for an empty `x`.
        batch_variance: the running variance, updated with the unbiased variance of the batch (`N / (N - 1)`, Bessel).
        reserve_space_1, reserve_space_2: what the gradient needs: in training mean and biased variance of the batch,
            else copies of `mean` and `variance`; zeros for an empty `x`.
        reserve_space_3: scalar 0.
    Raises:
        ValueError: `x` not 4-D or 5-D, vectors whose length is not the number of channels. TypeError: dtypes differ.
    Source: TensorFlow `FusedBatchNormV3`. Gradients of the statistics with respect to `x` are zero, as there.
    """

@overload
def FusedBatchNormV3(
    *,
    x: _TensorFlow,
    scale: _TensorFlow | _NumPy | _Numbers,
    offset: _TensorFlow | _NumPy | _Numbers,
    mean: _TensorFlow | _NumPy | _Numbers,
    variance: _TensorFlow | _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    exponential_avg_factor: _Float = 1.0,
    data_format: Literal["NHWC", "NCHW", "NDHWC", "NCDHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
) -> _FusedBatchNormV3Results[Any]:
    """Batch normalization: `y = (x - mean) / sqrt(variance + epsilon) * scale + offset` per channel.

    In training, mean and variance are those of the batch (normalizing with the biased variance); otherwise
    they are the arguments. Statistics are computed in float64, elements in the dtype of `x` (float32 if that has 16
    bits) with coefficients rounded once; see docs/decisions/batch-norm.md.

    Args:
        x: a float tensor, 4-D or 5-D images.
        scale, offset: vectors, one element per channel, of the dtype of `x` (float32 if that has 16 bits).
        mean, variance: running statistics, likewise vectors. In training with `exponential_avg_factor` 1 they are
            ignored and may have any length, even 0.
        epsilon: added to the variance.
        exponential_avg_factor: weight of the batch in the returned running statistics; 1 returns only those of the
            batch.
        data_format: where the channels are: last for "NHWC" and "NDHWC", second for "NCHW" and "NCDHW".
        is_training: use the statistics of the batch.
    Returns:
        y: like `x`.
        batch_mean: the running mean, updated; NaN for an empty `x`.
        batch_variance: the running variance, updated with the unbiased variance of the batch (`N / (N - 1)`, Bessel).
        reserve_space_1, reserve_space_2: what the gradient needs: in training mean and biased variance of the batch,
            else copies of `mean` and `variance`; zeros for an empty `x`.
        reserve_space_3: scalar 0.
    Raises:
        ValueError: `x` not 4-D or 5-D, vectors whose length is not the number of channels. TypeError: dtypes differ.
    Source: TensorFlow `FusedBatchNormV3`. Gradients of the statistics with respect to `x` are zero, as there.
    """

@overload
def FusedBatchNormGrad(
    *,
    y_backprop: _NumPy | _Numbers,
    x: _NumPy | _Numbers,
    scale: _NumPy | _Numbers,
    reserve_space_1: _NumPy | _Numbers,
    reserve_space_2: _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[_NumPy, _NumPy, _NumPy, _NumPy, _NumPy] | None = None,
) -> _FusedBatchNormGradResults[_NumPy]:
    """Gradient of `fused_batch_norm`; see `fused_batch_norm_grad_v3`.

    Args:
        y_backprop, x, scale, reserve_space_1, reserve_space_2, epsilon, is_training: see `fused_batch_norm_grad_v3`.
        data_format: "NHWC" or "NCHW".
    Returns:
        x_backprop, scale_backprop, offset_backprop: see `fused_batch_norm_grad_v3`.
        reserve_space_3, reserve_space_4: empty.
    Raises:
        ValueError, TypeError: as `fused_batch_norm_grad_v3`.
    Source: TensorFlow `FusedBatchNormGrad`.
    """

@overload
def FusedBatchNormGrad(
    *,
    y_backprop: torch.Tensor,
    x: torch.Tensor | _NumPy | _Numbers,
    scale: torch.Tensor | _NumPy | _Numbers,
    reserve_space_1: torch.Tensor | _NumPy | _Numbers,
    reserve_space_2: torch.Tensor | _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _FusedBatchNormGradResults[torch.Tensor]:
    """Gradient of `fused_batch_norm`; see `fused_batch_norm_grad_v3`.

    Args:
        y_backprop, x, scale, reserve_space_1, reserve_space_2, epsilon, is_training: see `fused_batch_norm_grad_v3`.
        data_format: "NHWC" or "NCHW".
    Returns:
        x_backprop, scale_backprop, offset_backprop: see `fused_batch_norm_grad_v3`.
        reserve_space_3, reserve_space_4: empty.
    Raises:
        ValueError, TypeError: as `fused_batch_norm_grad_v3`.
    Source: TensorFlow `FusedBatchNormGrad`.
    """

@overload
def FusedBatchNormGrad(
    *,
    y_backprop: jax.Array,
    x: jax.Array | _NumPy | _Numbers,
    scale: jax.Array | _NumPy | _Numbers,
    reserve_space_1: jax.Array | _NumPy | _Numbers,
    reserve_space_2: jax.Array | _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
) -> _FusedBatchNormGradResults[jax.Array]:
    """Gradient of `fused_batch_norm`; see `fused_batch_norm_grad_v3`.

    Args:
        y_backprop, x, scale, reserve_space_1, reserve_space_2, epsilon, is_training: see `fused_batch_norm_grad_v3`.
        data_format: "NHWC" or "NCHW".
    Returns:
        x_backprop, scale_backprop, offset_backprop: see `fused_batch_norm_grad_v3`.
        reserve_space_3, reserve_space_4: empty.
    Raises:
        ValueError, TypeError: as `fused_batch_norm_grad_v3`.
    Source: TensorFlow `FusedBatchNormGrad`.
    """

@overload
def FusedBatchNormGrad(
    *,
    y_backprop: _TensorFlow,
    x: _TensorFlow | _NumPy | _Numbers,
    scale: _TensorFlow | _NumPy | _Numbers,
    reserve_space_1: _TensorFlow | _NumPy | _Numbers,
    reserve_space_2: _TensorFlow | _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
) -> _FusedBatchNormGradResults[Any]:
    """Gradient of `fused_batch_norm`; see `fused_batch_norm_grad_v3`.

    Args:
        y_backprop, x, scale, reserve_space_1, reserve_space_2, epsilon, is_training: see `fused_batch_norm_grad_v3`.
        data_format: "NHWC" or "NCHW".
    Returns:
        x_backprop, scale_backprop, offset_backprop: see `fused_batch_norm_grad_v3`.
        reserve_space_3, reserve_space_4: empty.
    Raises:
        ValueError, TypeError: as `fused_batch_norm_grad_v3`.
    Source: TensorFlow `FusedBatchNormGrad`.
    """

@overload
def FusedBatchNormGradV2(
    *,
    y_backprop: _NumPy | _Numbers,
    x: _NumPy | _Numbers,
    scale: _NumPy | _Numbers,
    reserve_space_1: _NumPy | _Numbers,
    reserve_space_2: _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[_NumPy, _NumPy, _NumPy, _NumPy, _NumPy] | None = None,
) -> _FusedBatchNormGradV2Results[_NumPy]:
    """Gradient of `fused_batch_norm_v2`; see `fused_batch_norm_grad_v3`.

    Args:
        y_backprop, x, scale, reserve_space_1, reserve_space_2, epsilon, is_training: see `fused_batch_norm_grad_v3`.
        data_format: "NHWC" or "NCHW".
    Returns:
        x_backprop, scale_backprop, offset_backprop: see `fused_batch_norm_grad_v3`.
        reserve_space_3, reserve_space_4: empty.
    Raises:
        ValueError, TypeError: as `fused_batch_norm_grad_v3`.
    Source: TensorFlow `FusedBatchNormGradV2`.
    """

@overload
def FusedBatchNormGradV2(
    *,
    y_backprop: torch.Tensor,
    x: torch.Tensor | _NumPy | _Numbers,
    scale: torch.Tensor | _NumPy | _Numbers,
    reserve_space_1: torch.Tensor | _NumPy | _Numbers,
    reserve_space_2: torch.Tensor | _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _FusedBatchNormGradV2Results[torch.Tensor]:
    """Gradient of `fused_batch_norm_v2`; see `fused_batch_norm_grad_v3`.

    Args:
        y_backprop, x, scale, reserve_space_1, reserve_space_2, epsilon, is_training: see `fused_batch_norm_grad_v3`.
        data_format: "NHWC" or "NCHW".
    Returns:
        x_backprop, scale_backprop, offset_backprop: see `fused_batch_norm_grad_v3`.
        reserve_space_3, reserve_space_4: empty.
    Raises:
        ValueError, TypeError: as `fused_batch_norm_grad_v3`.
    Source: TensorFlow `FusedBatchNormGradV2`.
    """

@overload
def FusedBatchNormGradV2(
    *,
    y_backprop: jax.Array,
    x: jax.Array | _NumPy | _Numbers,
    scale: jax.Array | _NumPy | _Numbers,
    reserve_space_1: jax.Array | _NumPy | _Numbers,
    reserve_space_2: jax.Array | _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
) -> _FusedBatchNormGradV2Results[jax.Array]:
    """Gradient of `fused_batch_norm_v2`; see `fused_batch_norm_grad_v3`.

    Args:
        y_backprop, x, scale, reserve_space_1, reserve_space_2, epsilon, is_training: see `fused_batch_norm_grad_v3`.
        data_format: "NHWC" or "NCHW".
    Returns:
        x_backprop, scale_backprop, offset_backprop: see `fused_batch_norm_grad_v3`.
        reserve_space_3, reserve_space_4: empty.
    Raises:
        ValueError, TypeError: as `fused_batch_norm_grad_v3`.
    Source: TensorFlow `FusedBatchNormGradV2`.
    """

@overload
def FusedBatchNormGradV2(
    *,
    y_backprop: _TensorFlow,
    x: _TensorFlow | _NumPy | _Numbers,
    scale: _TensorFlow | _NumPy | _Numbers,
    reserve_space_1: _TensorFlow | _NumPy | _Numbers,
    reserve_space_2: _TensorFlow | _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
) -> _FusedBatchNormGradV2Results[Any]:
    """Gradient of `fused_batch_norm_v2`; see `fused_batch_norm_grad_v3`.

    Args:
        y_backprop, x, scale, reserve_space_1, reserve_space_2, epsilon, is_training: see `fused_batch_norm_grad_v3`.
        data_format: "NHWC" or "NCHW".
    Returns:
        x_backprop, scale_backprop, offset_backprop: see `fused_batch_norm_grad_v3`.
        reserve_space_3, reserve_space_4: empty.
    Raises:
        ValueError, TypeError: as `fused_batch_norm_grad_v3`.
    Source: TensorFlow `FusedBatchNormGradV2`.
    """

@overload
def FusedBatchNormGradV3(
    *,
    y_backprop: _NumPy | _Numbers,
    x: _NumPy | _Numbers,
    scale: _NumPy | _Numbers,
    reserve_space_1: _NumPy | _Numbers,
    reserve_space_2: _NumPy | _Numbers,
    reserve_space_3: _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    data_format: Literal["NHWC", "NCHW", "NDHWC", "NCDHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[_NumPy, _NumPy, _NumPy, _NumPy, _NumPy] | None = None,
) -> _FusedBatchNormGradV3Results[_NumPy]:
    """Gradient of `fused_batch_norm_v3`.

    Args:
        y_backprop: the incoming gradient of `y`; same shape as `x`.
        x, scale, epsilon, data_format, is_training: as passed to `fused_batch_norm_v3`.
        reserve_space_1, reserve_space_2: its outputs of that name: the mean and the variance used for normalizing.
        reserve_space_3: ignored.
    Returns:
        x_backprop: like `x`. In training the statistics are functions of `x`, otherwise constants.
        scale_backprop, offset_backprop: vectors, one element per channel.
        reserve_space_4, reserve_space_5: empty.
    Raises:
        ValueError: incompatible shapes. TypeError: dtypes differ.
    Source: TensorFlow `FusedBatchNormGradV3`; inference with NCHW, which TensorFlow's CPU kernel rejects, works here.
    """

@overload
def FusedBatchNormGradV3(
    *,
    y_backprop: torch.Tensor,
    x: torch.Tensor | _NumPy | _Numbers,
    scale: torch.Tensor | _NumPy | _Numbers,
    reserve_space_1: torch.Tensor | _NumPy | _Numbers,
    reserve_space_2: torch.Tensor | _NumPy | _Numbers,
    reserve_space_3: torch.Tensor | _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    data_format: Literal["NHWC", "NCHW", "NDHWC", "NCDHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _FusedBatchNormGradV3Results[torch.Tensor]:
    """Gradient of `fused_batch_norm_v3`.

    Args:
        y_backprop: the incoming gradient of `y`; same shape as `x`.
        x, scale, epsilon, data_format, is_training: as passed to `fused_batch_norm_v3`.
        reserve_space_1, reserve_space_2: its outputs of that name: the mean and the variance used for normalizing.
        reserve_space_3: ignored.
    Returns:
        x_backprop: like `x`. In training the statistics are functions of `x`, otherwise constants.
        scale_backprop, offset_backprop: vectors, one element per channel.
        reserve_space_4, reserve_space_5: empty.
    Raises:
        ValueError: incompatible shapes. TypeError: dtypes differ.
    Source: TensorFlow `FusedBatchNormGradV3`; inference with NCHW, which TensorFlow's CPU kernel rejects, works here.
    """

@overload
def FusedBatchNormGradV3(
    *,
    y_backprop: jax.Array,
    x: jax.Array | _NumPy | _Numbers,
    scale: jax.Array | _NumPy | _Numbers,
    reserve_space_1: jax.Array | _NumPy | _Numbers,
    reserve_space_2: jax.Array | _NumPy | _Numbers,
    reserve_space_3: jax.Array | _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    data_format: Literal["NHWC", "NCHW", "NDHWC", "NCDHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
) -> _FusedBatchNormGradV3Results[jax.Array]:
    """Gradient of `fused_batch_norm_v3`.

    Args:
        y_backprop: the incoming gradient of `y`; same shape as `x`.
        x, scale, epsilon, data_format, is_training: as passed to `fused_batch_norm_v3`.
        reserve_space_1, reserve_space_2: its outputs of that name: the mean and the variance used for normalizing.
        reserve_space_3: ignored.
    Returns:
        x_backprop: like `x`. In training the statistics are functions of `x`, otherwise constants.
        scale_backprop, offset_backprop: vectors, one element per channel.
        reserve_space_4, reserve_space_5: empty.
    Raises:
        ValueError: incompatible shapes. TypeError: dtypes differ.
    Source: TensorFlow `FusedBatchNormGradV3`; inference with NCHW, which TensorFlow's CPU kernel rejects, works here.
    """

@overload
def FusedBatchNormGradV3(
    *,
    y_backprop: _TensorFlow,
    x: _TensorFlow | _NumPy | _Numbers,
    scale: _TensorFlow | _NumPy | _Numbers,
    reserve_space_1: _TensorFlow | _NumPy | _Numbers,
    reserve_space_2: _TensorFlow | _NumPy | _Numbers,
    reserve_space_3: _TensorFlow | _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    data_format: Literal["NHWC", "NCHW", "NDHWC", "NCDHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
) -> _FusedBatchNormGradV3Results[Any]:
    """Gradient of `fused_batch_norm_v3`.

    Args:
        y_backprop: the incoming gradient of `y`; same shape as `x`.
        x, scale, epsilon, data_format, is_training: as passed to `fused_batch_norm_v3`.
        reserve_space_1, reserve_space_2: its outputs of that name: the mean and the variance used for normalizing.
        reserve_space_3: ignored.
    Returns:
        x_backprop: like `x`. In training the statistics are functions of `x`, otherwise constants.
        scale_backprop, offset_backprop: vectors, one element per channel.
        reserve_space_4, reserve_space_5: empty.
    Raises:
        ValueError: incompatible shapes. TypeError: dtypes differ.
    Source: TensorFlow `FusedBatchNormGradV3`; inference with NCHW, which TensorFlow's CPU kernel rejects, works here.
    """

@overload
def QuantizeAndDequantize(
    *,
    input: _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: SupportsIndex = 8,
    range_given: bool = False,
    input_min: _Float = 0.0,
    input_max: _Float = 0.0,
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy:
    """Version 1: as `quantize_and_dequantize_v2` with the range as attributes, half to even, whole tensor.

    TensorFlow can no longer call it; it exists here for old graphs. The gradient passes straight through.

    Args:
        input: a float tensor, any shape.
        signed_input, num_bits, range_given: see `quantize_and_dequantize_v2`.
        input_min, input_max: the range if `range_given`.
    Returns:
        output: like `input`.
    Raises:
        ValueError: `num_bits` out of range, or `range_given` and not `input_min <= input_max`.
    Source: TensorFlow `QuantizeAndDequantize`.
    """

@overload
def QuantizeAndDequantize(
    *,
    input: torch.Tensor,
    signed_input: bool = True,
    num_bits: SupportsIndex = 8,
    range_given: bool = False,
    input_min: _Float = 0.0,
    input_max: _Float = 0.0,
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Version 1: as `quantize_and_dequantize_v2` with the range as attributes, half to even, whole tensor.

    TensorFlow can no longer call it; it exists here for old graphs. The gradient passes straight through.

    Args:
        input: a float tensor, any shape.
        signed_input, num_bits, range_given: see `quantize_and_dequantize_v2`.
        input_min, input_max: the range if `range_given`.
    Returns:
        output: like `input`.
    Raises:
        ValueError: `num_bits` out of range, or `range_given` and not `input_min <= input_max`.
    Source: TensorFlow `QuantizeAndDequantize`.
    """

@overload
def QuantizeAndDequantize(
    *,
    input: jax.Array,
    signed_input: bool = True,
    num_bits: SupportsIndex = 8,
    range_given: bool = False,
    input_min: _Float = 0.0,
    input_max: _Float = 0.0,
    name: str | None = None,
) -> jax.Array:
    """Version 1: as `quantize_and_dequantize_v2` with the range as attributes, half to even, whole tensor.

    TensorFlow can no longer call it; it exists here for old graphs. The gradient passes straight through.

    Args:
        input: a float tensor, any shape.
        signed_input, num_bits, range_given: see `quantize_and_dequantize_v2`.
        input_min, input_max: the range if `range_given`.
    Returns:
        output: like `input`.
    Raises:
        ValueError: `num_bits` out of range, or `range_given` and not `input_min <= input_max`.
    Source: TensorFlow `QuantizeAndDequantize`.
    """

@overload
def QuantizeAndDequantize(
    *,
    input: _TensorFlow,
    signed_input: bool = True,
    num_bits: SupportsIndex = 8,
    range_given: bool = False,
    input_min: _Float = 0.0,
    input_max: _Float = 0.0,
    name: str | None = None,
) -> Any:
    """Version 1: as `quantize_and_dequantize_v2` with the range as attributes, half to even, whole tensor.

    TensorFlow can no longer call it; it exists here for old graphs. The gradient passes straight through.

    Args:
        input: a float tensor, any shape.
        signed_input, num_bits, range_given: see `quantize_and_dequantize_v2`.
        input_min, input_max: the range if `range_given`.
    Returns:
        output: like `input`.
    Raises:
        ValueError: `num_bits` out of range, or `range_given` and not `input_min <= input_max`.
    Source: TensorFlow `QuantizeAndDequantize`.
    """

@overload
def QuantizeAndDequantizeV2(
    *,
    input: _NumPy | _Numbers,
    input_min: _NumPy | _Numbers,
    input_max: _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: SupportsIndex = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    narrow_range: bool = False,
    axis: SupportsIndex = -1,
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy:
    """Quantize and dequantize with a scale derived from a range, given or computed from the data. Straight-through
    gradient.

    The scale maps the range onto the integers of `num_bits` bits so that both ends fit and 0 stays 0. Values are
    clamped only if the range is given. If the range is computed from data that contain NaN, the whole slice is NaN.

    Args:
        input: a float tensor, any shape.
        input_min, input_max: the range if `range_given`: scalars for axis -1, else vectors of the length of that axis;
            otherwise ignored.
        signed_input: integers from `-2**(num_bits-1)` (one more with `narrow_range`), else from 0.
        num_bits: 1 to 61, or to 62 if not signed.
        range_given: use `input_min`, `input_max`; otherwise the minimum and maximum of the data.
        round_mode: "HALF_TO_EVEN" or "HALF_UP".
        narrow_range: omit the lowest signed integer.
        axis: -1 for one range for the whole tensor, else the axis with one range per index.
    Returns:
        output: like `input`.
    Raises:
        ValueError: `axis`, `num_bits` or `round_mode` out of range, bounds of the wrong shape, or, with axis -1,
            a bound that is NaN or a minimum above its maximum (known only when the kernel runs). With an axis
            TensorFlow does not check, and such a slice is whatever the formula gives.
    Source: TensorFlow `QuantizeAndDequantizeV2`; per-slice given ranges, which TensorFlow rejects, work as in its V3.
    """

@overload
def QuantizeAndDequantizeV2(
    *,
    input: torch.Tensor,
    input_min: torch.Tensor | _NumPy | _Numbers,
    input_max: torch.Tensor | _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: SupportsIndex = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    narrow_range: bool = False,
    axis: SupportsIndex = -1,
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Quantize and dequantize with a scale derived from a range, given or computed from the data. Straight-through
    gradient.

    The scale maps the range onto the integers of `num_bits` bits so that both ends fit and 0 stays 0. Values are
    clamped only if the range is given. If the range is computed from data that contain NaN, the whole slice is NaN.

    Args:
        input: a float tensor, any shape.
        input_min, input_max: the range if `range_given`: scalars for axis -1, else vectors of the length of that axis;
            otherwise ignored.
        signed_input: integers from `-2**(num_bits-1)` (one more with `narrow_range`), else from 0.
        num_bits: 1 to 61, or to 62 if not signed.
        range_given: use `input_min`, `input_max`; otherwise the minimum and maximum of the data.
        round_mode: "HALF_TO_EVEN" or "HALF_UP".
        narrow_range: omit the lowest signed integer.
        axis: -1 for one range for the whole tensor, else the axis with one range per index.
    Returns:
        output: like `input`.
    Raises:
        ValueError: `axis`, `num_bits` or `round_mode` out of range, bounds of the wrong shape, or, with axis -1,
            a bound that is NaN or a minimum above its maximum (known only when the kernel runs). With an axis
            TensorFlow does not check, and such a slice is whatever the formula gives.
    Source: TensorFlow `QuantizeAndDequantizeV2`; per-slice given ranges, which TensorFlow rejects, work as in its V3.
    """

@overload
def QuantizeAndDequantizeV2(
    *,
    input: jax.Array,
    input_min: jax.Array | _NumPy | _Numbers,
    input_max: jax.Array | _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: SupportsIndex = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    narrow_range: bool = False,
    axis: SupportsIndex = -1,
    name: str | None = None,
) -> jax.Array:
    """Quantize and dequantize with a scale derived from a range, given or computed from the data. Straight-through
    gradient.

    The scale maps the range onto the integers of `num_bits` bits so that both ends fit and 0 stays 0. Values are
    clamped only if the range is given. If the range is computed from data that contain NaN, the whole slice is NaN.

    Args:
        input: a float tensor, any shape.
        input_min, input_max: the range if `range_given`: scalars for axis -1, else vectors of the length of that axis;
            otherwise ignored.
        signed_input: integers from `-2**(num_bits-1)` (one more with `narrow_range`), else from 0.
        num_bits: 1 to 61, or to 62 if not signed.
        range_given: use `input_min`, `input_max`; otherwise the minimum and maximum of the data.
        round_mode: "HALF_TO_EVEN" or "HALF_UP".
        narrow_range: omit the lowest signed integer.
        axis: -1 for one range for the whole tensor, else the axis with one range per index.
    Returns:
        output: like `input`.
    Raises:
        ValueError: `axis`, `num_bits` or `round_mode` out of range, bounds of the wrong shape, or, with axis -1,
            a bound that is NaN or a minimum above its maximum (known only when the kernel runs). With an axis
            TensorFlow does not check, and such a slice is whatever the formula gives.
    Source: TensorFlow `QuantizeAndDequantizeV2`; per-slice given ranges, which TensorFlow rejects, work as in its V3.
    """

@overload
def QuantizeAndDequantizeV2(
    *,
    input: _TensorFlow,
    input_min: _TensorFlow | _NumPy | _Numbers,
    input_max: _TensorFlow | _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: SupportsIndex = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    narrow_range: bool = False,
    axis: SupportsIndex = -1,
    name: str | None = None,
) -> Any:
    """Quantize and dequantize with a scale derived from a range, given or computed from the data. Straight-through
    gradient.

    The scale maps the range onto the integers of `num_bits` bits so that both ends fit and 0 stays 0. Values are
    clamped only if the range is given. If the range is computed from data that contain NaN, the whole slice is NaN.

    Args:
        input: a float tensor, any shape.
        input_min, input_max: the range if `range_given`: scalars for axis -1, else vectors of the length of that axis;
            otherwise ignored.
        signed_input: integers from `-2**(num_bits-1)` (one more with `narrow_range`), else from 0.
        num_bits: 1 to 61, or to 62 if not signed.
        range_given: use `input_min`, `input_max`; otherwise the minimum and maximum of the data.
        round_mode: "HALF_TO_EVEN" or "HALF_UP".
        narrow_range: omit the lowest signed integer.
        axis: -1 for one range for the whole tensor, else the axis with one range per index.
    Returns:
        output: like `input`.
    Raises:
        ValueError: `axis`, `num_bits` or `round_mode` out of range, bounds of the wrong shape, or, with axis -1,
            a bound that is NaN or a minimum above its maximum (known only when the kernel runs). With an axis
            TensorFlow does not check, and such a slice is whatever the formula gives.
    Source: TensorFlow `QuantizeAndDequantizeV2`; per-slice given ranges, which TensorFlow rejects, work as in its V3.
    """

@overload
def QuantizeAndDequantizeV3(
    *,
    input: _NumPy | _Numbers,
    input_min: _NumPy | _Numbers,
    input_max: _NumPy | _Numbers,
    num_bits: SupportsIndex,
    signed_input: bool = True,
    range_given: bool = True,
    narrow_range: bool = False,
    axis: SupportsIndex = -1,
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy:
    """As `quantize_and_dequantize_v2`, half to even; `num_bits` is an operand in TensorFlow and a static integer here.

    Args:
        input: a float tensor, any shape.
        input_min, input_max: the range if `range_given`: scalars (or one element) for axis -1, else vectors of that
            axis' length.
        num_bits: 1 to 61, or to 62 if not signed; an integer or a scalar array with a known value.
        signed_input, range_given, narrow_range, axis: see `quantize_and_dequantize_v2`.
    Returns:
        output: like `input`.
    Raises:
        ValueError: `axis` or `num_bits` out of range, bounds of the wrong shape, or, with axis -1,
            a bound that is NaN or a minimum above its maximum.
    Source: TensorFlow `QuantizeAndDequantizeV3`.
    """

@overload
def QuantizeAndDequantizeV3(
    *,
    input: torch.Tensor,
    input_min: torch.Tensor | _NumPy | _Numbers,
    input_max: torch.Tensor | _NumPy | _Numbers,
    num_bits: SupportsIndex,
    signed_input: bool = True,
    range_given: bool = True,
    narrow_range: bool = False,
    axis: SupportsIndex = -1,
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor:
    """As `quantize_and_dequantize_v2`, half to even; `num_bits` is an operand in TensorFlow and a static integer here.

    Args:
        input: a float tensor, any shape.
        input_min, input_max: the range if `range_given`: scalars (or one element) for axis -1, else vectors of that
            axis' length.
        num_bits: 1 to 61, or to 62 if not signed; an integer or a scalar array with a known value.
        signed_input, range_given, narrow_range, axis: see `quantize_and_dequantize_v2`.
    Returns:
        output: like `input`.
    Raises:
        ValueError: `axis` or `num_bits` out of range, bounds of the wrong shape, or, with axis -1,
            a bound that is NaN or a minimum above its maximum.
    Source: TensorFlow `QuantizeAndDequantizeV3`.
    """

@overload
def QuantizeAndDequantizeV3(
    *,
    input: jax.Array,
    input_min: jax.Array | _NumPy | _Numbers,
    input_max: jax.Array | _NumPy | _Numbers,
    num_bits: SupportsIndex,
    signed_input: bool = True,
    range_given: bool = True,
    narrow_range: bool = False,
    axis: SupportsIndex = -1,
    name: str | None = None,
) -> jax.Array:
    """As `quantize_and_dequantize_v2`, half to even; `num_bits` is an operand in TensorFlow and a static integer here.

    Args:
        input: a float tensor, any shape.
        input_min, input_max: the range if `range_given`: scalars (or one element) for axis -1, else vectors of that
            axis' length.
        num_bits: 1 to 61, or to 62 if not signed; an integer or a scalar array with a known value.
        signed_input, range_given, narrow_range, axis: see `quantize_and_dequantize_v2`.
    Returns:
        output: like `input`.
    Raises:
        ValueError: `axis` or `num_bits` out of range, bounds of the wrong shape, or, with axis -1,
            a bound that is NaN or a minimum above its maximum.
    Source: TensorFlow `QuantizeAndDequantizeV3`.
    """

@overload
def QuantizeAndDequantizeV3(
    *,
    input: _TensorFlow,
    input_min: _TensorFlow | _NumPy | _Numbers,
    input_max: _TensorFlow | _NumPy | _Numbers,
    num_bits: SupportsIndex,
    signed_input: bool = True,
    range_given: bool = True,
    narrow_range: bool = False,
    axis: SupportsIndex = -1,
    name: str | None = None,
) -> Any:
    """As `quantize_and_dequantize_v2`, half to even; `num_bits` is an operand in TensorFlow and a static integer here.

    Args:
        input: a float tensor, any shape.
        input_min, input_max: the range if `range_given`: scalars (or one element) for axis -1, else vectors of that
            axis' length.
        num_bits: 1 to 61, or to 62 if not signed; an integer or a scalar array with a known value.
        signed_input, range_given, narrow_range, axis: see `quantize_and_dequantize_v2`.
    Returns:
        output: like `input`.
    Raises:
        ValueError: `axis` or `num_bits` out of range, bounds of the wrong shape, or, with axis -1,
            a bound that is NaN or a minimum above its maximum.
    Source: TensorFlow `QuantizeAndDequantizeV3`.
    """

@overload
def QuantizeAndDequantizeV4(
    *,
    input: _NumPy | _Numbers,
    input_min: _NumPy | _Numbers,
    input_max: _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: SupportsIndex = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    narrow_range: bool = False,
    axis: SupportsIndex = -1,
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy:
    """`quantize_and_dequantize_v2` with a gradient that is zero outside `[input_min, input_max]`.

    As in TensorFlow the gradient uses these two bounds even when `range_given` is False;
    `quantization.quantize_and_dequantize_v2` passes the whole gradient in that case.

    Args:
        input, input_min, input_max, signed_input, num_bits, range_given, round_mode, narrow_range, axis: see
            `quantize_and_dequantize_v2`.
    Returns:
        output: like `input`.
    Raises:
        ValueError: as `quantize_and_dequantize_v2`.
    Source: TensorFlow `QuantizeAndDequantizeV4`.
    """

@overload
def QuantizeAndDequantizeV4(
    *,
    input: torch.Tensor,
    input_min: torch.Tensor | _NumPy | _Numbers,
    input_max: torch.Tensor | _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: SupportsIndex = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    narrow_range: bool = False,
    axis: SupportsIndex = -1,
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor:
    """`quantize_and_dequantize_v2` with a gradient that is zero outside `[input_min, input_max]`.

    As in TensorFlow the gradient uses these two bounds even when `range_given` is False;
    `quantization.quantize_and_dequantize_v2` passes the whole gradient in that case.

    Args:
        input, input_min, input_max, signed_input, num_bits, range_given, round_mode, narrow_range, axis: see
            `quantize_and_dequantize_v2`.
    Returns:
        output: like `input`.
    Raises:
        ValueError: as `quantize_and_dequantize_v2`.
    Source: TensorFlow `QuantizeAndDequantizeV4`.
    """

@overload
def QuantizeAndDequantizeV4(
    *,
    input: jax.Array,
    input_min: jax.Array | _NumPy | _Numbers,
    input_max: jax.Array | _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: SupportsIndex = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    narrow_range: bool = False,
    axis: SupportsIndex = -1,
    name: str | None = None,
) -> jax.Array:
    """`quantize_and_dequantize_v2` with a gradient that is zero outside `[input_min, input_max]`.

    As in TensorFlow the gradient uses these two bounds even when `range_given` is False;
    `quantization.quantize_and_dequantize_v2` passes the whole gradient in that case.

    Args:
        input, input_min, input_max, signed_input, num_bits, range_given, round_mode, narrow_range, axis: see
            `quantize_and_dequantize_v2`.
    Returns:
        output: like `input`.
    Raises:
        ValueError: as `quantize_and_dequantize_v2`.
    Source: TensorFlow `QuantizeAndDequantizeV4`.
    """

@overload
def QuantizeAndDequantizeV4(
    *,
    input: _TensorFlow,
    input_min: _TensorFlow | _NumPy | _Numbers,
    input_max: _TensorFlow | _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: SupportsIndex = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    narrow_range: bool = False,
    axis: SupportsIndex = -1,
    name: str | None = None,
) -> Any:
    """`quantize_and_dequantize_v2` with a gradient that is zero outside `[input_min, input_max]`.

    As in TensorFlow the gradient uses these two bounds even when `range_given` is False;
    `quantization.quantize_and_dequantize_v2` passes the whole gradient in that case.

    Args:
        input, input_min, input_max, signed_input, num_bits, range_given, round_mode, narrow_range, axis: see
            `quantize_and_dequantize_v2`.
    Returns:
        output: like `input`.
    Raises:
        ValueError: as `quantize_and_dequantize_v2`.
    Source: TensorFlow `QuantizeAndDequantizeV4`.
    """

@overload
def QuantizeAndDequantizeV4Grad(
    *,
    gradients: _NumPy | _Numbers,
    input: _NumPy | _Numbers,
    input_min: _NumPy | _Numbers,
    input_max: _NumPy | _Numbers,
    axis: SupportsIndex = -1,
    name: str | None = None,
    out: tuple[_NumPy, _NumPy, _NumPy] | None = None,
) -> _QuantizeAndDequantizeV4GradResults[_NumPy]:
    """Gradient of `quantize_and_dequantize_v4`.

    Args:
        gradients: a float tensor, the incoming gradient of the output; same shape as `input`.
        input, input_min, input_max, axis: as passed to `quantize_and_dequantize_v4`.
    Returns:
        input_backprop: like `input`; `gradients` where `input_min <= input <= input_max`, times 0 elsewhere.
        input_min_backprop, input_max_backprop: zeros, like the bounds.
    Raises:
        ValueError: shapes differ, bounds of the wrong shape, `axis` out of range. TypeError: dtypes differ.
    Source: TensorFlow `QuantizeAndDequantizeV4Grad`.
    """

@overload
def QuantizeAndDequantizeV4Grad(
    *,
    gradients: torch.Tensor,
    input: torch.Tensor | _NumPy | _Numbers,
    input_min: torch.Tensor | _NumPy | _Numbers,
    input_max: torch.Tensor | _NumPy | _Numbers,
    axis: SupportsIndex = -1,
    name: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _QuantizeAndDequantizeV4GradResults[torch.Tensor]:
    """Gradient of `quantize_and_dequantize_v4`.

    Args:
        gradients: a float tensor, the incoming gradient of the output; same shape as `input`.
        input, input_min, input_max, axis: as passed to `quantize_and_dequantize_v4`.
    Returns:
        input_backprop: like `input`; `gradients` where `input_min <= input <= input_max`, times 0 elsewhere.
        input_min_backprop, input_max_backprop: zeros, like the bounds.
    Raises:
        ValueError: shapes differ, bounds of the wrong shape, `axis` out of range. TypeError: dtypes differ.
    Source: TensorFlow `QuantizeAndDequantizeV4Grad`.
    """

@overload
def QuantizeAndDequantizeV4Grad(
    *,
    gradients: jax.Array,
    input: jax.Array | _NumPy | _Numbers,
    input_min: jax.Array | _NumPy | _Numbers,
    input_max: jax.Array | _NumPy | _Numbers,
    axis: SupportsIndex = -1,
    name: str | None = None,
) -> _QuantizeAndDequantizeV4GradResults[jax.Array]:
    """Gradient of `quantize_and_dequantize_v4`.

    Args:
        gradients: a float tensor, the incoming gradient of the output; same shape as `input`.
        input, input_min, input_max, axis: as passed to `quantize_and_dequantize_v4`.
    Returns:
        input_backprop: like `input`; `gradients` where `input_min <= input <= input_max`, times 0 elsewhere.
        input_min_backprop, input_max_backprop: zeros, like the bounds.
    Raises:
        ValueError: shapes differ, bounds of the wrong shape, `axis` out of range. TypeError: dtypes differ.
    Source: TensorFlow `QuantizeAndDequantizeV4Grad`.
    """

@overload
def QuantizeAndDequantizeV4Grad(
    *,
    gradients: _TensorFlow,
    input: _TensorFlow | _NumPy | _Numbers,
    input_min: _TensorFlow | _NumPy | _Numbers,
    input_max: _TensorFlow | _NumPy | _Numbers,
    axis: SupportsIndex = -1,
    name: str | None = None,
) -> _QuantizeAndDequantizeV4GradResults[Any]:
    """Gradient of `quantize_and_dequantize_v4`.

    Args:
        gradients: a float tensor, the incoming gradient of the output; same shape as `input`.
        input, input_min, input_max, axis: as passed to `quantize_and_dequantize_v4`.
    Returns:
        input_backprop: like `input`; `gradients` where `input_min <= input <= input_max`, times 0 elsewhere.
        input_min_backprop, input_max_backprop: zeros, like the bounds.
    Raises:
        ValueError: shapes differ, bounds of the wrong shape, `axis` out of range. TypeError: dtypes differ.
    Source: TensorFlow `QuantizeAndDequantizeV4Grad`.
    """
