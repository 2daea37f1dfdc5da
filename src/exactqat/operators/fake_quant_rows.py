# SPDX-License-Identifier: Apache-2.0
"""Declarations of fake quantization for weights as PyTorch keeps them, one row for each output channel."""

from exactqat.operators.fake_quant import quantization
from exactqat.operators.op import (
    Axes,
    Lowering,
    Tensor,
    TensorSpec,
    check_dtypes,
    check_same_shape,
    letters_of,
    operator,
)


def _check_rows(inputs: TensorSpec) -> None:
    if inputs.rank < 1:
        raise ValueError("inputs must be at least rank 1 (the first dimension holds the channels) but is rank 0")


@operator(None, ("outputs",))
def fake_quant_rows(inputs: Tensor, num_bits: int = 8, narrow_range: bool = False) -> Lowering:
    """`fake_quant_with_min_max_vars_per_channel` with the channels first, each with the range `[-m, m]`, where m is its
    largest magnitude. The range counts as a constant.

    Args:
        inputs: a float tensor, shape `[d, ...]`, any rank from 1.
        num_bits: 2 to 16.
        narrow_range: leave out the lowest code.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `inputs` of rank 0, `num_bits` outside 2..16.
    Source: `fake_quant_with_min_max_vars_per_channel`.
    """
    check_dtypes(inputs=inputs)
    _check_rows(inputs)
    return Lowering((inputs,), "fake_quant_rows", quantization(num_bits, narrow_range))


@operator(None, ("backprops",))
def fake_quant_rows_gradient(
    gradients: Tensor, inputs: Tensor, num_bits: int = 8, narrow_range: bool = False
) -> Lowering:
    """Gradient of `fake_quant_rows`.

    Args:
        gradients: the gradient that arrives at the outputs; same shape as `inputs`.
        inputs, num_bits, narrow_range: what was given to `fake_quant_rows`.
    Returns:
        backprops: like `inputs`; `gradients` inside the channel's nudged range, times 0 outside.
    Raises:
        ValueError: shapes that differ, `inputs` of rank 0, `num_bits` outside 2..16. TypeError: dtypes that differ.
    Source: `fake_quant_with_min_max_vars_per_channel_gradient`.
    """
    check_dtypes(inputs=inputs, gradients=gradients)
    check_same_shape(gradients=gradients, inputs=inputs)
    _check_rows(inputs)
    return Lowering((inputs,), "fake_quant_rows_gradient", quantization(num_bits, narrow_range))


@fake_quant_rows.gradient
def _(gradients, operands, results, attributes):
    return (fake_quant_rows_gradient(*gradients, *operands, **attributes),)


@fake_quant_rows_gradient.gradient(keeps=("inputs",))
def _(gradients, operands, results, attributes):
    # Linear in its first operand with a diagonal matrix, so it is its own transpose.
    return fake_quant_rows_gradient(*gradients, operands[1], **attributes), None


@fake_quant_rows.axes
def _(inputs, num_bits, narrow_range):
    letters = letters_of(inputs)
    return Axes((letters,), (letters,), ("",), whole=letters[1:])


@fake_quant_rows_gradient.axes
def _(gradients, inputs, num_bits, narrow_range):
    letters = letters_of(inputs)
    return Axes((letters, letters), (letters,), ("",), whole=letters[1:])
