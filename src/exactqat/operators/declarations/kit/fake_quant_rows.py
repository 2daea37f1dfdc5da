# SPDX-License-Identifier: Apache-2.0
"""Declarations of fake quantization for weights in PyTorch's layout, one row per output channel."""

import math

from exactqat.operators.declarations.checks import check_dtypes, check_same_shape, check_wide_dtypes
from exactqat.operators.declarations.fake_quant import fake_quant_with_min_max_vars_gradient_transpose, quantization
from exactqat.operators.declarations.op import operator
from exactqat.operators.declarations.specification import Axes, Lowering, Range, Tensor, TensorSpec, letters_of


def _check_rows(inputs: TensorSpec) -> None:
    if inputs.rank < 1:
        raise ValueError("inputs must be at least rank 1 (the first dimension holds the channels) but is rank 0")


@operator(None, ("outputs",))
def fake_quant_rows(inputs: Tensor, num_bits: int = 8, narrow_range: bool = False) -> Lowering:
    """`fake_quant_with_min_max_vars_per_channel` with the channels first, each with the range `[-m, m]`, where m is its
    largest magnitude. The range is treated as a constant.

    Args:
        inputs: a float tensor, shape `[d, ...]`, any rank from 1.
        num_bits: 2 to 16.
        narrow_range: omit the lowest code.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `inputs` of rank 0, `num_bits` outside 2..16.
    Source: `fake_quant_with_min_max_vars_per_channel`.
    """
    check_dtypes(inputs=inputs)
    _check_rows(inputs)
    return Lowering((inputs,), "fake_quant_rows", quantization(num_bits, narrow_range))


@operator(None, ("backprops",), reuses=("gradients",))
def fake_quant_rows_gradient(
    gradients: Tensor, inputs: Tensor, num_bits: int = 8, narrow_range: bool = False
) -> Lowering:
    """Gradient of `fake_quant_rows`.

    Args:
        gradients: the incoming gradient of the outputs; same shape as `inputs`.
        inputs, num_bits, narrow_range: as passed to `fake_quant_rows`.
    Returns:
        backprops: like `inputs`; `gradients` inside the channel's nudged range, times 0 outside.
    Raises:
        ValueError: shapes differ, `inputs` of rank 0, `num_bits` outside 2..16. TypeError: dtypes differ.
    Source: `fake_quant_with_min_max_vars_per_channel_gradient`.
    """
    check_dtypes(inputs=inputs, gradients=gradients)
    check_same_shape(gradients=gradients, inputs=inputs)
    _check_rows(inputs)
    return Lowering((inputs,), "fake_quant_rows_gradient", quantization(num_bits, narrow_range))


def _check_magnitudes(inputs: TensorSpec, magnitudes: TensorSpec) -> None:
    check_dtypes(inputs=inputs)
    _check_rows(inputs)
    check_wide_dtypes(inputs, "inputs", magnitudes=magnitudes)
    if magnitudes.shape != inputs.shape[:1]:
        raise ValueError(
            f"magnitudes must have shape {list(inputs.shape[:1])}, one per row of inputs, got {list(magnitudes.shape)}"
        )


@operator(None, ("outputs",))
def fake_quant_rows_within(
    inputs: Tensor, magnitudes: Range, num_bits: int = 8, narrow_range: bool = False
) -> Lowering:
    """`fake_quant_with_min_max_vars_per_channel` with the channels first, each with the range `[-m, m]` of its
    magnitude m.

    Args:
        inputs: a float tensor, shape `[d, ...]`, any rank from 1.
        magnitudes: shape `[d]`.
        num_bits: 2 to 16.
        narrow_range: omit the lowest code.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `inputs` of rank 0, `magnitudes` not of shape `[d]`, `num_bits` outside 2..16. TypeError: dtypes.
    Source: `fake_quant_with_min_max_vars_per_channel`.
    """
    _check_magnitudes(inputs, magnitudes)
    return Lowering((inputs,), "fake_quant_rows_within", quantization(num_bits, narrow_range))


@operator(None, ("backprops_wrt_input", "backprop_wrt_magnitudes"), reuses=("gradients",))
def fake_quant_rows_within_gradient(
    gradients: Tensor, inputs: Tensor, magnitudes: Range, num_bits: int = 8, narrow_range: bool = False
) -> Lowering:
    """Gradients of `fake_quant_rows_within`.

    Args:
        gradients: the incoming gradient of the outputs; same shape as `inputs`.
        inputs, magnitudes, num_bits, narrow_range: as passed to `fake_quant_rows_within`.
    Returns:
        backprops_wrt_input: like `inputs`; `gradients` inside the channel's nudged range, times 0 outside.
        backprop_wrt_magnitudes: shape `[d]`: the gradient of the range's upper end minus that of its lower end.
    Raises:
        ValueError: incompatible shapes, `num_bits` outside 2..16. TypeError: dtypes differ.
    Source: `fake_quant_with_min_max_vars_per_channel_gradient`.
    """
    check_dtypes(inputs=inputs, gradients=gradients)
    check_same_shape(gradients=gradients, inputs=inputs)
    _check_magnitudes(inputs, magnitudes)
    return Lowering((inputs, magnitudes), "fake_quant_rows_within_gradient", quantization(num_bits, narrow_range))


@fake_quant_rows.gradient
def _(gradients, operands, results, attributes):
    return (fake_quant_rows_gradient(*gradients, *operands, **attributes),)


@fake_quant_rows_gradient.gradient(keeps=("inputs",))
def _(gradients, operands, results, attributes):
    # Linear in its first operand with a diagonal matrix, so it is its own transpose.
    return fake_quant_rows_gradient(*gradients, operands[1], **attributes), None


@fake_quant_rows_within.gradient
def _(gradients, operands, results, attributes):
    return fake_quant_rows_within_gradient(*gradients, *operands, **attributes)


@fake_quant_rows_within_gradient.gradient(keeps=("inputs", "magnitudes"))
def _(gradients, operands, results, attributes):
    _, inputs, magnitudes = operands
    to_inputs, to_magnitudes = gradients
    rows = (inputs.shape[0], math.prod(inputs.shape[1:]))
    # Channels last there is an operator for it.
    transposed = fake_quant_with_min_max_vars_gradient_transpose(
        to_inputs.reshape(rows).T, -to_magnitudes, to_magnitudes, inputs.reshape(rows).T, -magnitudes, magnitudes,
        **attributes,
    )  # fmt: skip
    return transposed.T.reshape(inputs.shape), None, None


@fake_quant_rows.axes
def _(inputs, num_bits, narrow_range):
    letters = letters_of(inputs)
    return Axes((letters,), (letters,), ("",), whole=letters[1:])


@fake_quant_rows_gradient.axes
def _(gradients, inputs, num_bits, narrow_range):
    letters = letters_of(inputs)
    return Axes((letters, letters), (letters,), ("",), whole=letters[1:])


@fake_quant_rows_within.axes
def _(inputs, magnitudes, num_bits, narrow_range):
    letters = letters_of(inputs)
    return Axes((letters, letters[:1]), (letters,), ("",))


@fake_quant_rows_within_gradient.axes
def _(gradients, inputs, magnitudes, num_bits, narrow_range):
    letters = letters_of(inputs)
    return Axes((letters, letters, letters[:1]), (letters, letters[:1]), ("", letters[1:]))
