# SPDX-License-Identifier: Apache-2.0
"""Declarations of the DepthwiseConv2dNative family."""

import math
from typing import Literal

from exactqat.operators.declarations.checks import check_dtypes, check_rank
from exactqat.operators.declarations.op import operator
from exactqat.operators.declarations.specification import Axes, Lowering, Tensor, TensorSpec

# An array of so many elements cannot exist; said before anybody tries to make one.
_TOO_MANY = 2**60

Padding = Literal["SAME", "VALID", "EXPLICIT"]
DataFormat = Literal["NHWC", "NCHW"]


def _elements(shape: tuple[int, ...]) -> int:
    """At least so many would an array of this shape hold without its empty dimensions; symbolic sizes may be 1."""
    return math.prod([max(size, 1) for size in shape if isinstance(size, int)])


def _window(
    name: str, size: int, kernel: int, stride: int, dilation: int, padding: str, explicit: tuple[int, ...]
) -> tuple[int, int]:
    """Number of output positions along one dimension and the padding before the first input position."""
    reach = (kernel - 1) * dilation + 1 if kernel else 0
    if padding == "SAME":
        positions = -(-size // stride)
        return positions, max((positions - 1) * stride + reach - size, 0) // 2
    before, after = explicit if padding == "EXPLICIT" else (0, 0)
    span = size + before + after - reach + stride
    positions = span // stride
    if span <= -stride:
        raise ValueError(
            f"filter is larger than the padded {name}: {reach} (with dilations) against {size + before + after}"
        )
    return max(positions, 0), before


def _geometry(
    input: TensorSpec,
    filter: TensorSpec,
    strides: tuple[int, ...],
    padding: str,
    explicit_paddings: tuple[int, ...],
    data_format: str,
    dilations: tuple[int, ...],
) -> tuple[dict[str, int | float], TensorSpec]:
    """The numbers the kernels work with, and the output. Padding names and layouts end here."""
    check_rank(4, input=input, filter=filter)
    n, h, w, c = (data_format.index(letter) for letter in "NHWC")
    for name, values in (("strides", strides), ("dilations", dilations)):
        if len(values) != 4:
            raise ValueError(f"{name} must have 4 values, one for each dimension of {data_format}, got {list(values)}")
        if values[n] != 1 or values[c] != 1:
            raise ValueError(
                f"{name} must be 1 in the batch and depth dimensions, got {list(values)} for {data_format}"
            )
        if min(values) < 1:
            raise ValueError(f"{name} must be > 0, got {list(values)}")
        if max(values) >= 2**31:
            raise ValueError(f"{name} must be below 2**31, got {list(values)}")
    if padding == "EXPLICIT":
        if len(explicit_paddings) != 8:
            raise ValueError(
                f"explicit_paddings must contain 8 values, a pair for each dimension of {data_format}, "
                f"got {list(explicit_paddings)}"
            )
        if min(explicit_paddings) < 0 or max(explicit_paddings) >= 2**31:
            raise ValueError(f"explicit_paddings must be from 0 to 2**31 - 1, got {list(explicit_paddings)}")
        if any(explicit_paddings[2 * i + k] for i in (n, c) for k in (0, 1)):
            raise ValueError(
                f"explicit_paddings must be 0 in the batch and depth dimensions, "
                f"got {list(explicit_paddings)} for {data_format}"
            )
    elif explicit_paddings:
        raise ValueError(
            f"explicit_paddings must be empty if padding is not 'EXPLICIT', "
            f"got {list(explicit_paddings)} with {padding!r}"
        )
    if input.shape[c] != filter.shape[2]:
        raise ValueError(f"input and filter must have the same depth: {input.shape[c]} vs {filter.shape[2]}")

    pairs = explicit_paddings or (0,) * 8
    rows, top = _window(
        "height", input.shape[h], filter.shape[0], strides[h], dilations[h], padding, pairs[2 * h : 2 * h + 2]
    )
    cols, left = _window(
        "width", input.shape[w], filter.shape[1], strides[w], dilations[w], padding, pairs[2 * w : 2 * w + 2]
    )
    numbers: dict[str, int | float] = {
        "batch": input.shape[n],
        "input_height": input.shape[h],
        "input_width": input.shape[w],
        "channels": input.shape[c],
        "multiplier": filter.shape[3],
        "filter_height": filter.shape[0],
        "filter_width": filter.shape[1],
        "output_height": rows,
        "output_width": cols,
        "stride_height": strides[h],
        "stride_width": strides[w],
        "dilation_height": dilations[h],
        "dilation_width": dilations[w],
        "pad_top": top,
        "pad_left": left,
        "channels_first": int(data_format == "NCHW"),
    }
    sizes = {"N": input.shape[n], "H": rows, "W": cols, "C": filter.shape[2] * filter.shape[3]}
    shape = tuple(sizes[letter] for letter in data_format)
    if _elements(shape) >= _TOO_MANY:
        raise ValueError(f"explicit_paddings, strides and dilations make the output too large: {list(shape)}")
    return numbers, TensorSpec(shape, input.dtype)


def _sizes(name: str, sizes: tuple[int, ...], dtype: str) -> TensorSpec:
    if len(sizes) != 4:
        raise ValueError(f"{name} must have 4 values, got {list(sizes)}")
    if any(size < 0 for size in sizes):
        raise ValueError(f"{name} must be >= 0, got {list(sizes)}")
    if _elements(sizes) >= _TOO_MANY:
        raise ValueError(f"{name} is too large: {list(sizes)}")
    return TensorSpec(tuple(sizes), dtype)


def _check_out_backprop(out_backprop: TensorSpec, expected: TensorSpec) -> None:
    check_rank(4, out_backprop=out_backprop)
    if out_backprop.shape != expected.shape:
        raise ValueError(
            f"out_backprop must have the shape of the convolution's output, "
            f"{list(expected.shape)}, got {list(out_backprop.shape)}"
        )


@operator("DepthwiseConv2dNative", ("output",))
def depthwise_conv2d_native(
    input: Tensor,
    filter: Tensor,
    strides: tuple[int, ...],
    padding: Padding,
    explicit_paddings: tuple[int, ...] = (),
    data_format: DataFormat = "NHWC",
    dilations: tuple[int, ...] = (1, 1, 1, 1),
) -> Lowering:
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
    check_dtypes(input=input, filter=filter)
    numbers, output = _geometry(input, filter, strides, padding, explicit_paddings, data_format, dilations)
    return Lowering((output,), "depthwise_conv2d_native", numbers)


@operator("DepthwiseConv2dNativeBackpropInput", ("output",))
def depthwise_conv2d_native_backprop_input(
    input_sizes: tuple[int, ...],
    filter: Tensor,
    out_backprop: Tensor,
    strides: tuple[int, ...],
    padding: Padding,
    explicit_paddings: tuple[int, ...] = (),
    data_format: DataFormat = "NHWC",
    dilations: tuple[int, ...] = (1, 1, 1, 1),
) -> Lowering:
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
    check_dtypes(filter=filter, out_backprop=out_backprop)
    input = _sizes("input_sizes", input_sizes, filter.dtype)
    numbers, output = _geometry(input, filter, strides, padding, explicit_paddings, data_format, dilations)
    _check_out_backprop(out_backprop, output)
    return Lowering((input,), "depthwise_conv2d_native_backprop_input", numbers)


@operator("DepthwiseConv2dNativeBackpropFilter", ("output",))
def depthwise_conv2d_native_backprop_filter(
    input: Tensor,
    filter_sizes: tuple[int, ...],
    out_backprop: Tensor,
    strides: tuple[int, ...],
    padding: Padding,
    explicit_paddings: tuple[int, ...] = (),
    data_format: DataFormat = "NHWC",
    dilations: tuple[int, ...] = (1, 1, 1, 1),
) -> Lowering:
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
    check_dtypes(input=input, out_backprop=out_backprop)
    filter = _sizes("filter_sizes", filter_sizes, input.dtype)
    numbers, output = _geometry(input, filter, strides, padding, explicit_paddings, data_format, dilations)
    _check_out_backprop(out_backprop, output)
    return Lowering((filter,), "depthwise_conv2d_native_backprop_filter", numbers)


# The three are the partial derivatives of one trilinear form, so each one's gradients are the other two.


@depthwise_conv2d_native.gradient
def _(gradients, operands, results, attributes):
    input, filter = operands
    (gradient,) = gradients
    return (
        depthwise_conv2d_native_backprop_input(tuple(input.shape), filter, gradient, **attributes),
        depthwise_conv2d_native_backprop_filter(input, tuple(filter.shape), gradient, **attributes),
    )


@depthwise_conv2d_native_backprop_input.gradient
def _(gradients, operands, results, attributes):
    filter, out_backprop = operands
    (gradient,) = gradients
    geometry = {key: value for key, value in attributes.items() if key != "input_sizes"}
    return (
        depthwise_conv2d_native_backprop_filter(gradient, tuple(filter.shape), out_backprop, **geometry),
        depthwise_conv2d_native(gradient, filter, **geometry),
    )


@depthwise_conv2d_native_backprop_filter.gradient
def _(gradients, operands, results, attributes):
    input, out_backprop = operands
    (gradient,) = gradients
    geometry = {key: value for key, value in attributes.items() if key != "filter_sizes"}
    return (
        depthwise_conv2d_native_backprop_input(tuple(input.shape), gradient, out_backprop, **geometry),
        depthwise_conv2d_native(input, gradient, **geometry),
    )


# What the dimensions mean: images are independent, and so are channels; filter gradients are sums over images. The
# output's channels have the letter of the input's, whose multiples they are.


def _letters(data_format: str) -> tuple[str, str, str]:
    image = data_format.lower()
    return image, "ijcm", image.translate(str.maketrans("hw", "yx"))


_WHOLE = "hwyxijm"


@depthwise_conv2d_native.axes
def _(data_format, **_):
    image, filter, output = _letters(data_format)
    return Axes((image, filter), (output,), ("",), _WHOLE)


@depthwise_conv2d_native_backprop_input.axes
def _(data_format, **_):
    image, filter, output = _letters(data_format)
    return Axes((filter, output), (image,), ("",), _WHOLE, {"input_sizes": image})


@depthwise_conv2d_native_backprop_filter.axes
def _(data_format, **_):
    image, filter, output = _letters(data_format)
    return Axes((image, output), (filter,), ("n",), _WHOLE, {"filter_sizes": filter})
