# SPDX-License-Identifier: Apache-2.0
"""Declarations of the FakeQuantWithMinMax family."""

from typing import Any

from exactqat.operators.declarations.checks import (
    check_dtypes,
    check_length,
    check_rank,
    check_same_shape,
    check_wide_dtypes,
)
from exactqat.operators.declarations.op import Operator, operator
from exactqat.operators.declarations.plain_numbers import rounded, written
from exactqat.operators.declarations.specification import Axes, Lowering, Range, Tensor, TensorSpec, letters_of

GRADIENTS = ("backprops_wrt_input", "backprop_wrt_min", "backprop_wrt_max")


def _exports(name: str) -> tuple[str, str]:
    return f"quantization.{name}", name


def quantization(num_bits: int, narrow_range: bool) -> dict[str, int | float]:
    if not 2 <= num_bits <= 16:
        raise ValueError(f"num_bits must be between 2 and 16, inclusive, got {num_bits}")
    return {"num_bits": num_bits, "narrow_range": int(narrow_range)}


def _fixed_range(dtype: str, min: float, max: float) -> dict[str, int | float]:
    if not rounded(dtype, min) < rounded(dtype, max):  # NaN fails too
        raise ValueError(f"min has to be smaller than max (as {dtype}), was: {written(min)} >= {written(max)}")
    return {"min": min, "max": max}


def _channels(inputs: TensorSpec, min: TensorSpec, max: TensorSpec) -> None:
    if inputs.rank < 1:
        raise ValueError("inputs must be at least rank 1 (the last dimension holds the channels) but is rank 0")
    check_length(inputs.shape[-1], "the last dimension of inputs", min=min, max=max)


@operator("FakeQuantWithMinMaxArgs", ("outputs",), _exports("fake_quant_with_min_max_args"), ("inputs",))
def fake_quant_with_min_max_args(
    inputs: Tensor, min: float = -6.0, max: float = 6.0, num_bits: int = 8, narrow_range: bool = False
) -> Lowering:
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
    check_dtypes(inputs=inputs)
    return Lowering(
        (inputs,),
        "fake_quant_with_min_max_args",
        _fixed_range(inputs.dtype, min, max) | quantization(num_bits, narrow_range),
    )


@operator(
    "FakeQuantWithMinMaxArgsGradient",
    ("backprops",),
    _exports("fake_quant_with_min_max_args_gradient"),
    ("gradients", "inputs"),
)
def fake_quant_with_min_max_args_gradient(
    gradients: Tensor,
    inputs: Tensor,
    min: float = -6.0,
    max: float = 6.0,
    num_bits: int = 8,
    narrow_range: bool = False,
) -> Lowering:
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
    check_dtypes(gradients=gradients, inputs=inputs)
    check_same_shape(gradients=gradients, inputs=inputs)
    return Lowering(
        (inputs,),
        "fake_quant_with_min_max_args_gradient",
        _fixed_range(inputs.dtype, min, max) | quantization(num_bits, narrow_range),
    )


@operator("FakeQuantWithMinMaxVars", ("outputs",), _exports("fake_quant_with_min_max_vars"), ("inputs",))
def fake_quant_with_min_max_vars(
    inputs: Tensor, min: Range, max: Range, num_bits: int = 8, narrow_range: bool = False
) -> Lowering:
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
    check_dtypes(inputs=inputs)
    check_wide_dtypes(inputs, "inputs", min=min, max=max)
    check_rank(0, min=min, max=max)
    return Lowering((inputs,), "fake_quant_with_min_max_vars", quantization(num_bits, narrow_range))


@operator(
    "FakeQuantWithMinMaxVarsGradient",
    GRADIENTS,
    _exports("fake_quant_with_min_max_vars_gradient"),
    ("gradients", "inputs"),
)
def fake_quant_with_min_max_vars_gradient(
    gradients: Tensor, inputs: Tensor, min: Range, max: Range, num_bits: int = 8, narrow_range: bool = False
) -> Lowering:
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
    check_dtypes(inputs=inputs, gradients=gradients)
    check_wide_dtypes(inputs, "inputs", min=min, max=max)
    check_same_shape(gradients=gradients, inputs=inputs)
    check_rank(0, min=min, max=max)
    return Lowering((inputs, min, max), "fake_quant_with_min_max_vars_gradient", quantization(num_bits, narrow_range))


@operator(
    "FakeQuantWithMinMaxVarsPerChannel", ("outputs",), _exports("fake_quant_with_min_max_vars_per_channel"), ("inputs",)
)
def fake_quant_with_min_max_vars_per_channel(
    inputs: Tensor, min: Range, max: Range, num_bits: int = 8, narrow_range: bool = False
) -> Lowering:
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
    check_dtypes(inputs=inputs)
    check_wide_dtypes(inputs, "inputs", min=min, max=max)
    _channels(inputs, min, max)
    return Lowering((inputs,), "fake_quant_with_min_max_vars_per_channel", quantization(num_bits, narrow_range))


@operator(
    "FakeQuantWithMinMaxVarsPerChannelGradient",
    GRADIENTS,
    _exports("fake_quant_with_min_max_vars_per_channel_gradient"),
    ("gradients", "inputs"),
)
def fake_quant_with_min_max_vars_per_channel_gradient(
    gradients: Tensor, inputs: Tensor, min: Range, max: Range, num_bits: int = 8, narrow_range: bool = False
) -> Lowering:
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
    check_dtypes(inputs=inputs, gradients=gradients)
    check_wide_dtypes(inputs, "inputs", min=min, max=max)
    check_same_shape(gradients=gradients, inputs=inputs)
    _channels(inputs, min, max)
    return Lowering(
        (inputs, min, max), "fake_quant_with_min_max_vars_per_channel_gradient", quantization(num_bits, narrow_range)
    )


@operator(None, ("gradients",))
def fake_quant_with_min_max_vars_gradient_transpose(
    input_cotangent: Tensor,
    min_cotangent: Range,
    max_cotangent: Range,
    inputs: Tensor,
    min: Range,
    max: Range,
    num_bits: int = 8,
    narrow_range: bool = False,
) -> Lowering:
    """The transpose of the two `fake_quant_with_min_max_vars*_gradient` operators, which are linear in `gradients`.

    TensorFlow has no second derivative of this family; it is defined here. Where `inputs` lie inside the
    nudged range the result is `input_cotangent`, below it `min_cotangent`, above it `max_cotangent`.

    Args:
        input_cotangent: same shape as `inputs`.
        min_cotangent, max_cotangent: same shape as `min`.
        inputs, min, max, num_bits, narrow_range: as passed to the gradient operator; `min` of rank 0, or 1 for
            channels.
    Returns:
        gradients: like `inputs`.
    Raises:
        ValueError: incompatible shapes, `num_bits` outside 2..16. TypeError: dtypes differ.
    Source: the linear map of semantics of `FakeQuantWithMinMaxVars[PerChannel]Gradient`, transposed.
    """
    check_dtypes(inputs=inputs, input_cotangent=input_cotangent)
    check_wide_dtypes(inputs, "inputs", min_cotangent=min_cotangent, max_cotangent=max_cotangent, min=min, max=max)
    check_same_shape(input_cotangent=input_cotangent, inputs=inputs)
    check_same_shape(min_cotangent=min_cotangent, min=min)
    check_same_shape(max_cotangent=max_cotangent, max=max)
    if min.rank == 0:
        check_rank(0, max=max)
    else:
        _channels(inputs, min, max)
    return Lowering((inputs,), "fake_quant_with_min_max_vars_gradient_transpose", quantization(num_bits, narrow_range))


def _mask_of(inputs: TensorSpec) -> TensorSpec:
    """2 bits for each element of `inputs`: element i has bits `2 * (i % 4)` and the next of byte `i // 4`.

    3 is inside the nudged range, 1 above, 2 below, 0 neither (NaN). In a reversed range, with `max < min`, nothing is
    inside and 3 is above and below at the same time.
    """
    return TensorSpec(((inputs.size + 3) // 4,), "uint8")


def _check_mask(mask: TensorSpec, gradients: TensorSpec, first: str) -> None:
    wanted = _mask_of(gradients)
    if mask.dtype != wanted.dtype:
        raise TypeError(f"mask must be {wanted.dtype}, got {mask.dtype}")
    if mask.shape != wanted.shape:
        raise ValueError(
            f"mask must have 2 bits per element of {first}, shape {list(wanted.shape)}, got {list(mask.shape)}"
        )


def _training(forward: Lowering, inputs: TensorSpec) -> Lowering:
    return forward._replace(results=(*forward.results, _mask_of(inputs)), kernel=f"{forward.kernel}_training")


@operator(None, ("outputs", "mask"))
def fake_quant_with_min_max_args_training(
    inputs: Tensor, min: float = -6.0, max: float = 6.0, num_bits: int = 8, narrow_range: bool = False
) -> Lowering:
    """`fake_quant_with_min_max_args`, and what its gradient needs to know about the inputs.

    Args:
        inputs, min, max, num_bits, narrow_range: see `fake_quant_with_min_max_args`.
    Returns:
        outputs: like `inputs`.
        mask: uint8, shape `[ceil(size / 4)]`, 2 bits per element: 3 inside the nudged range, 1 above, 2 below, 0 for
            NaN, the first element in the lowest bits.
    Raises:
        ValueError: as `fake_quant_with_min_max_args`.
    Source: TensorFlow `FakeQuantWithMinMaxArgs`; the mask contains the comparisons of its gradient.
    """
    return _training(fake_quant_with_min_max_args.rule(inputs, min, max, num_bits, narrow_range), inputs)


@operator(None, ("outputs", "mask"))
def fake_quant_with_min_max_vars_training(
    inputs: Tensor, min: Range, max: Range, num_bits: int = 8, narrow_range: bool = False
) -> Lowering:
    """`fake_quant_with_min_max_vars`, and what its gradient needs to know about the inputs.

    Args:
        inputs, min, max, num_bits, narrow_range: see `fake_quant_with_min_max_vars`.
    Returns:
        outputs: like `inputs`.
        mask: see `fake_quant_with_min_max_args_training`; in a reversed range 3 is above and below at the same time.
    Raises:
        ValueError, TypeError: as `fake_quant_with_min_max_vars`.
    Source: TensorFlow `FakeQuantWithMinMaxVars`; the mask contains the comparisons of its gradient.
    """
    return _training(fake_quant_with_min_max_vars.rule(inputs, min, max, num_bits, narrow_range), inputs)


@operator(None, ("outputs", "mask"))
def fake_quant_with_min_max_vars_per_channel_training(
    inputs: Tensor, min: Range, max: Range, num_bits: int = 8, narrow_range: bool = False
) -> Lowering:
    """`fake_quant_with_min_max_vars_per_channel`, and what its gradient needs to know about the inputs.

    Args:
        inputs, min, max, num_bits, narrow_range: see `fake_quant_with_min_max_vars_per_channel`.
    Returns:
        outputs: like `inputs`.
        mask: see `fake_quant_with_min_max_vars_training`, each element by its channel's range.
    Raises:
        ValueError, TypeError: as `fake_quant_with_min_max_vars_per_channel`.
    Source: TensorFlow `FakeQuantWithMinMaxVarsPerChannel`; the mask contains the comparisons of its gradient.
    """
    return _training(fake_quant_with_min_max_vars_per_channel.rule(inputs, min, max, num_bits, narrow_range), inputs)


@operator(None, ("backprops",), reuses=("gradients",))
def fake_quant_with_min_max_args_gradient_from_mask(gradients: Tensor, mask: Tensor) -> Lowering:
    """`fake_quant_with_min_max_args_gradient` by the mask of `fake_quant_with_min_max_args_training`, bit for bit.

    Args:
        gradients: a float tensor, any shape.
        mask: uint8, shape `[ceil(size / 4)]`.
    Returns:
        backprops: like `gradients`.
    Raises:
        ValueError: wrong mask size. TypeError: dtypes.
    Source: TensorFlow `FakeQuantWithMinMaxArgsGradient`.
    """
    check_dtypes(gradients=gradients)
    _check_mask(mask, gradients, "gradients")
    return Lowering((gradients,), "fake_quant_with_min_max_args_gradient_from_mask", {})


@operator(None, GRADIENTS, reuses=("gradients",))
def fake_quant_with_min_max_vars_gradient_from_mask(
    gradients: Tensor, mask: Tensor, min: Range, max: Range, num_bits: int = 8, narrow_range: bool = False
) -> Lowering:
    """`fake_quant_with_min_max_vars_gradient` by the mask of `fake_quant_with_min_max_vars_training`, bit for bit.

    Args:
        gradients: a float tensor, any shape.
        mask: uint8, shape `[ceil(size / 4)]`.
        min, max, num_bits, narrow_range: as passed to the forward operator.
    Returns:
        backprops_wrt_input, backprop_wrt_min, backprop_wrt_max: as `fake_quant_with_min_max_vars_gradient`.
    Raises:
        ValueError: wrong mask size, `min` or `max` not of rank 0, `num_bits` outside 2..16. TypeError: dtypes.
    Source: TensorFlow `FakeQuantWithMinMaxVarsGradient`.
    """
    check_dtypes(gradients=gradients)
    check_wide_dtypes(gradients, "gradients", min=min, max=max)
    _check_mask(mask, gradients, "gradients")
    check_rank(0, min=min, max=max)
    return Lowering(
        (gradients, min, max),
        "fake_quant_with_min_max_vars_gradient_from_mask",
        quantization(num_bits, narrow_range),
    )


@operator(None, GRADIENTS, reuses=("gradients",))
def fake_quant_with_min_max_vars_per_channel_gradient_from_mask(
    gradients: Tensor, mask: Tensor, min: Range, max: Range, num_bits: int = 8, narrow_range: bool = False
) -> Lowering:
    """`fake_quant_with_min_max_vars_per_channel_gradient` by the mask of
    `fake_quant_with_min_max_vars_per_channel_training`, bit for bit.

    Args:
        gradients: a float tensor, shape `[..., d]`.
        mask: uint8, shape `[ceil(size / 4)]`.
        min, max, num_bits, narrow_range: as passed to the forward operator.
    Returns:
        backprops_wrt_input, backprop_wrt_min, backprop_wrt_max: as `fake_quant_with_min_max_vars_per_channel_gradient`.
    Raises:
        ValueError: wrong mask size, `min` or `max` not of shape `[d]`, `num_bits` outside 2..16. TypeError:
            dtypes.
    Source: TensorFlow `FakeQuantWithMinMaxVarsPerChannelGradient`.
    """
    check_dtypes(gradients=gradients)
    check_wide_dtypes(gradients, "gradients", min=min, max=max)
    _check_mask(mask, gradients, "gradients")
    _channels(gradients, min, max)
    return Lowering(
        (gradients, min, max),
        "fake_quant_with_min_max_vars_per_channel_gradient_from_mask",
        quantization(num_bits, narrow_range),
    )


@operator(None, ("gradients",))
def fake_quant_with_min_max_vars_gradient_from_mask_transpose(
    input_cotangent: Tensor,
    min_cotangent: Range,
    max_cotangent: Range,
    mask: Tensor,
    min: Range,
    max: Range,
    num_bits: int = 8,
    narrow_range: bool = False,
) -> Lowering:
    """`fake_quant_with_min_max_vars_gradient_transpose` by the mask of the training form, bit for bit.

    Args:
        input_cotangent: a float tensor, shape of the inputs.
        min_cotangent, max_cotangent: same shape as `min`.
        mask: uint8, shape `[ceil(size / 4)]`.
        min, max, num_bits, narrow_range: as passed to the forward operator; `min` of rank 0, or 1 for channels.
    Returns:
        gradients: like `input_cotangent`.
    Raises:
        ValueError: incompatible shapes, `num_bits` outside 2..16. TypeError: dtypes.
    Source: the linear map of semantics of `FakeQuantWithMinMaxVars[PerChannel]Gradient`, transposed.
    """
    check_dtypes(input_cotangent=input_cotangent)
    check_wide_dtypes(
        input_cotangent,
        "input_cotangent",
        min_cotangent=min_cotangent,
        max_cotangent=max_cotangent,
        min=min,
        max=max,
    )
    _check_mask(mask, input_cotangent, "input_cotangent")
    check_same_shape(min_cotangent=min_cotangent, min=min)
    check_same_shape(max_cotangent=max_cotangent, max=max)
    if min.rank == 0:
        check_rank(0, max=max)
    else:
        _channels(input_cotangent, min, max)
    return Lowering(
        (input_cotangent,),
        "fake_quant_with_min_max_vars_gradient_from_mask_transpose",
        quantization(num_bits, narrow_range),
    )


# Training keeps a mask of a sixteenth of the inputs' memory in their place, unless the inputs may have to be cut.


@fake_quant_with_min_max_args.gradient_by_parts
def _(gradients, operands, results, attributes):
    return (fake_quant_with_min_max_args_gradient(*gradients, *operands, **attributes),)


@fake_quant_with_min_max_vars.gradient_by_parts
def _(gradients, operands, results, attributes):
    return fake_quant_with_min_max_vars_gradient(*gradients, *operands, **attributes)


@fake_quant_with_min_max_vars_per_channel.gradient_by_parts
def _(gradients, operands, results, attributes):
    return fake_quant_with_min_max_vars_per_channel_gradient(*gradients, *operands, **attributes)


@fake_quant_with_min_max_args.gradient(keeps=(), training_form=fake_quant_with_min_max_args_training)
def _(gradients, operands, results, attributes):
    return (fake_quant_with_min_max_args_gradient_from_mask(*gradients, *results),)


@fake_quant_with_min_max_args_gradient.gradient(keeps=("inputs",))
def _(gradients, operands, results, attributes):
    # Linear in its first operand with a diagonal matrix, so it is its own transpose.
    return fake_quant_with_min_max_args_gradient(*gradients, operands[1], **attributes), None


@fake_quant_with_min_max_args_gradient_from_mask.gradient(keeps=("mask",))
def _(gradients, operands, results, attributes):
    return fake_quant_with_min_max_args_gradient_from_mask(*gradients, operands[1]), None


@fake_quant_with_min_max_vars.gradient(keeps=("min", "max"), training_form=fake_quant_with_min_max_vars_training)
def _(gradients, operands, results, attributes):
    return fake_quant_with_min_max_vars_gradient_from_mask(*gradients, *results, *operands[1:], **attributes)


@fake_quant_with_min_max_vars_per_channel.gradient(
    keeps=("min", "max"), training_form=fake_quant_with_min_max_vars_per_channel_training
)
def _(gradients, operands, results, attributes):
    return fake_quant_with_min_max_vars_per_channel_gradient_from_mask(
        *gradients, *results, *operands[1:], **attributes
    )


@fake_quant_with_min_max_vars_gradient.gradient(keeps=("inputs", "min", "max"))
@fake_quant_with_min_max_vars_per_channel_gradient.gradient(keeps=("inputs", "min", "max"))
def _(gradients, operands, results, attributes):
    transposed = fake_quant_with_min_max_vars_gradient_transpose(*gradients, *operands[1:], **attributes)
    return transposed, None, None, None


@fake_quant_with_min_max_vars_gradient_from_mask.gradient(keeps=("mask", "min", "max"))
@fake_quant_with_min_max_vars_per_channel_gradient_from_mask.gradient(keeps=("mask", "min", "max"))
def _(gradients, operands, results, attributes):
    transposed = fake_quant_with_min_max_vars_gradient_from_mask_transpose(*gradients, *operands[1:], **attributes)
    return transposed, None, None, None


@fake_quant_with_min_max_vars_gradient_transpose.gradient(keeps=("inputs", "min", "max"))
def _(gradients, operands, results, attributes):
    _, _, _, inputs, min, max = operands
    per_tensor = len(min.shape) == 0
    forward = fake_quant_with_min_max_vars_gradient if per_tensor else fake_quant_with_min_max_vars_per_channel_gradient
    return *forward(*gradients, inputs, min, max, **attributes), None, None, None


@fake_quant_with_min_max_vars_gradient_from_mask_transpose.gradient(keeps=("mask", "min", "max"))
def _(gradients, operands, results, attributes):
    _, _, _, mask, min, max = operands
    per_tensor = len(min.shape) == 0
    forward = (
        fake_quant_with_min_max_vars_gradient_from_mask
        if per_tensor
        else fake_quant_with_min_max_vars_per_channel_gradient_from_mask
    )
    return *forward(*gradients, mask, min, max, **attributes), None, None, None


# What the dimensions mean: elements are independent, ranges belong to all of them or to those of one channel, and the
# gradients of ranges are sums over the rest.


def _axes(op: Operator, tensors: tuple[str, ...]) -> None:
    """`tensors`: operands and results of the inputs' shape; masks and ranges are known by their names."""

    @op.axes
    def _(**arguments: Any) -> Axes:
        inputs = arguments[next(name for name in op.operands if name in tensors)]
        letters = letters_of(inputs)
        per_channel = "min" in arguments and isinstance(arguments["min"], TensorSpec) and arguments["min"].rank == 1
        channel = letters[-1:] if per_channel else ""

        def meaning(name: str) -> str:
            return "." + letters if name in tensors else "/" if name == "mask" else channel

        sums = tuple(
            "" if name in tensors or name == "mask" else "." + letters.removesuffix(channel) for name in op.results
        )
        return Axes(tuple(map(meaning, op.operands)), tuple(map(meaning, op.results)), sums)


for _op in (
    fake_quant_with_min_max_args,
    fake_quant_with_min_max_args_gradient,
    fake_quant_with_min_max_args_gradient_from_mask,
    fake_quant_with_min_max_args_training,
    fake_quant_with_min_max_vars,
    fake_quant_with_min_max_vars_gradient,
    fake_quant_with_min_max_vars_gradient_from_mask,
    fake_quant_with_min_max_vars_gradient_from_mask_transpose,
    fake_quant_with_min_max_vars_gradient_transpose,
    fake_quant_with_min_max_vars_per_channel,
    fake_quant_with_min_max_vars_per_channel_gradient,
    fake_quant_with_min_max_vars_per_channel_gradient_from_mask,
    fake_quant_with_min_max_vars_per_channel_training,
    fake_quant_with_min_max_vars_training,
):
    _axes(_op, ("inputs", "outputs", "gradients", "backprops", "backprops_wrt_input", "input_cotangent"))
