# SPDX-License-Identifier: Apache-2.0
"""Batch norm, activation and fake quantization in one: what a layer of quantization-aware training does after its
convolution. Two operators, because ranges that follow the data are made between them."""

import math
from collections.abc import Mapping
from typing import Literal

from exactqat.operators.declarations.checks import (
    check_dtypes,
    check_length,
    check_rank,
    check_same_shape,
    check_wide_dtypes,
)
from exactqat.operators.declarations.fake_quant import quantization
from exactqat.operators.declarations.fused_batch_norm import second_order
from exactqat.operators.declarations.op import operator
from exactqat.operators.declarations.specification import Lowering, Tensor, TensorSpec, wide

Activation = Literal["NONE", "RELU", "RELU6"]


def _check_images(x: TensorSpec, **vectors: TensorSpec) -> TensorSpec:
    """x: [..., channels]; what its vectors look like."""
    check_dtypes(x=x)
    if x.rank < 1:
        raise ValueError("x must be at least rank 1 (the last dimension holds the channels) but is rank 0")
    check_wide_dtypes(x, "x", **vectors)
    check_length(x.shape[-1], "the channels of x", **vectors)
    return TensorSpec((x.shape[-1],), wide(x.dtype))


def _check_statistics(x: TensorSpec, mean: TensorSpec, variance: TensorSpec) -> None:
    for name, spec in (("mean", mean), ("variance", variance)):
        if spec.dtype != "float64":
            raise TypeError(f"{name} must be float64, as returned by batch_norm_statistics, got {spec.dtype}")
    check_length(x.shape[-1], "the channels of x", mean=mean, variance=variance)


def _activation_number(activation: str) -> dict[str, int | float]:
    return {"activation": ("NONE", "RELU", "RELU6").index(activation)}


@operator(None, ("batch_mean", "batch_variance", "precise_mean", "precise_variance", "low", "high"))
def batch_norm_statistics(
    x: Tensor,
    scale: Tensor,
    offset: Tensor,
    mean: Tensor,
    variance: Tensor,
    epsilon: float = 1e-4,
    exponential_avg_factor: float = 1.0,
    activation: Activation = "NONE",
) -> Lowering:
    """Computes what `quantized_batch_norm` needs from a batch in one pass: statistics, and the range of the result.

    Args:
        x: a float tensor, `[..., channels]`, not empty.
        scale, offset, mean, variance, epsilon, exponential_avg_factor: as in `fused_batch_norm_v3`.
        activation: what follows the normalization.
    Returns:
        batch_mean, batch_variance: the running statistics, updated, as in `fused_batch_norm_v3`.
        precise_mean, precise_variance: mean and biased variance of the batch, float64.
        low, high: scalars, the smallest and the largest value after batch norm and activation, NaN if any is. No
            element is normalized for that: both steps are monotonic per channel, including rounding. The sign of a zero
            is unspecified.
    Raises:
        ValueError: empty `x`, vectors whose length is not the number of channels. TypeError: dtypes differ.
    Source: `fused_batch_norm_v3`.
    """
    vector = _check_images(x, scale=scale, offset=offset, mean=mean, variance=variance)
    if x.size == 0:
        raise ValueError(f"x must not be empty, got shape {list(x.shape)}")
    precise, end = TensorSpec(vector.shape, "float64"), TensorSpec((), vector.dtype)
    numbers = {"epsilon": epsilon, "exponential_avg_factor": exponential_avg_factor} | _activation_number(activation)
    return Lowering((vector, vector, precise, precise, end, end), "batch_norm_statistics", numbers)


def _quantized(
    x: TensorSpec,
    scale: TensorSpec,
    offset: TensorSpec,
    mean: TensorSpec,
    variance: TensorSpec,
    min: TensorSpec,
    max: TensorSpec,
    epsilon: float,
    activation: str,
    num_bits: int,
    narrow_range: bool,
) -> Mapping[str, int | float]:
    _check_images(x, scale=scale, offset=offset)
    _check_statistics(x, mean, variance)
    check_wide_dtypes(x, "x", min=min, max=max)
    check_rank(0, min=min, max=max)
    return {"epsilon": epsilon} | _activation_number(activation) | quantization(num_bits, narrow_range)


def _mask(x: TensorSpec) -> TensorSpec:
    return TensorSpec((-(-x.size // 4),), "uint8")


@operator(None, ("outputs",))
def quantized_batch_norm(
    x: Tensor,
    scale: Tensor,
    offset: Tensor,
    mean: Tensor,
    variance: Tensor,
    min: Tensor,
    max: Tensor,
    epsilon: float = 1e-4,
    activation: Activation = "NONE",
    num_bits: int = 8,
    narrow_range: bool = False,
    range_gradients: bool = True,
) -> Lowering:
    """Batch norm in training, activation and `fake_quant_with_min_max_vars` in one operator, with the same bits as
    three.

    Gradients are those of the three as well, with mean and variance as functions of `x`, if incoming gradients are
    finite; the sign of a zero may differ.

    Args:
        x: a float tensor, `[..., channels]`.
        scale, offset, epsilon, activation: as passed to `batch_norm_statistics`.
        mean, variance: its precise statistics, float64.
        min, max: the range, scalars of the dtype of `x` (float32 if that has 16 bits).
        num_bits, narrow_range: as in `fake_quant_with_min_max_vars`.
        range_gradients: compute gradients for `min` and `max`; otherwise they are 0.
    Returns:
        outputs: like `x`.
    Raises:
        ValueError: incompatible shapes, `num_bits` outside 2..16, `min > max`. TypeError: dtypes differ.
    Source: `fused_batch_norm_v3`, `fake_quant_with_min_max_vars`.
    """
    numbers = _quantized(x, scale, offset, mean, variance, min, max, epsilon, activation, num_bits, narrow_range)
    return Lowering((x,), "quantized_batch_norm", numbers)


@operator(None, ("outputs", "mask"))
def quantized_batch_norm_training(
    x: Tensor,
    scale: Tensor,
    offset: Tensor,
    mean: Tensor,
    variance: Tensor,
    min: Tensor,
    max: Tensor,
    epsilon: float = 1e-4,
    activation: Activation = "NONE",
    num_bits: int = 8,
    narrow_range: bool = False,
    range_gradients: bool = True,
) -> Lowering:
    """`quantized_batch_norm` with what its gradient needs.

    Args:
        x, scale, offset, mean, variance, min, max: see `quantized_batch_norm`.
        epsilon, activation, num_bits, narrow_range, range_gradients: see `quantized_batch_norm`.
    Returns:
        outputs: like `x`.
        mask: uint8, two bits per element, the first one's lowest: 0 where gradients stop, 1 where they pass to
            `x`, 2 where they pass to `min`, 3 to `max`.
    Raises:
        ValueError, TypeError: as `quantized_batch_norm`.
    Source: `quantized_batch_norm`.
    """
    numbers = _quantized(x, scale, offset, mean, variance, min, max, epsilon, activation, num_bits, narrow_range)
    return Lowering((x, _mask(x)), "quantized_batch_norm_training", numbers)


_QUANTIZED_GRADIENTS = ("x_backprop", "scale_backprop", "offset_backprop", "min_backprop", "max_backprop")


@operator(None, _QUANTIZED_GRADIENTS)
def quantized_batch_norm_gradient(
    gradients: Tensor,
    x: Tensor,
    scale: Tensor,
    mean: Tensor,
    variance: Tensor,
    mask: Tensor,
    epsilon: float = 1e-4,
    range_gradients: bool = True,
) -> Lowering:
    """Gradients of `quantized_batch_norm`.

    Args:
        gradients: the incoming gradient of the outputs; same shape as `x`.
        x, scale, mean, variance, epsilon, range_gradients: as passed to `quantized_batch_norm`.
        mask: the mask returned by `quantized_batch_norm_training`.
    Returns:
        x_backprop: like `x`.
        scale_backprop, offset_backprop: vectors, one element per channel.
        min_backprop, max_backprop: scalars; 0 without `range_gradients`.
    Raises:
        ValueError: incompatible shapes. TypeError: dtypes differ.
    Source: `fused_batch_norm_grad_v3`, `fake_quant_with_min_max_vars_gradient`.
    """
    check_dtypes(x=x, gradients=gradients)
    check_same_shape(x=x, gradients=gradients)
    vector = _check_images(x, scale=scale)
    _check_statistics(x, mean, variance)
    _check_mask(x, mask)
    end = TensorSpec((), vector.dtype)
    numbers = {"epsilon": epsilon, "range_gradients": int(range_gradients)}
    return Lowering((x, vector, vector, end, end), "quantized_batch_norm_gradient", numbers)


def _check_mask(x: TensorSpec, mask: TensorSpec) -> None:
    if mask != _mask(x):
        wanted = f"uint8 of shape {list(_mask(x).shape)}"
        raise ValueError(f"mask must be {wanted} for x of shape {list(x.shape)}, got {mask.dtype} {list(mask.shape)}")


@operator(None, ("states",))
def quantized_batch_norm_states(mask: Tensor, x: Tensor) -> Lowering:
    """The numbers in a mask of `quantized_batch_norm_training`, for second-order gradients.

    Args:
        mask: the mask returned by `quantized_batch_norm_training`.
        x: determines shape and dtype.
    Returns:
        states: like `x`; 0, 1, 2 or 3.
    Raises:
        ValueError: wrong mask size.
    Source: `quantized_batch_norm_training`.
    """
    check_dtypes(x=x)
    _check_mask(x, mask)
    return Lowering((x,), "quantized_batch_norm_states", {})


@quantized_batch_norm.gradient(keeps=("x", "scale", "mean", "variance"), training_form=quantized_batch_norm_training)
def _(gradients, operands, results, attributes):
    x, scale, _, mean, variance, _, _ = operands
    to_x, to_scale, to_offset, *to_range = quantized_batch_norm_gradient(
        gradients[0], x, scale, mean, variance, results[0], attributes["epsilon"], attributes["range_gradients"]
    )
    return to_x, to_scale, to_offset, None, None, *(to_range if attributes["range_gradients"] else (None, None))


@quantized_batch_norm_gradient.gradient(keeps=("gradients", "x", "scale", "mask"))
def _(gradients, operands, results, attributes):
    incoming, x, scale, _, _, mask = operands
    states = quantized_batch_norm_states(mask, x)
    image = (math.prod(x.shape[:-1]), 1, 1, x.shape[-1])
    to_passed, to_x, to_scale, *_ = second_order(
        [gradients[0].reshape(image), *gradients[1:3]],
        # The statistics are those of x, whatever is given for them.
        [(incoming * (states == 1)).reshape(image), x.reshape(image), scale, scale, scale],
        {"data_format": "NHWC", "epsilon": attributes["epsilon"], "is_training": True},
    )
    to_incoming = to_passed.reshape(x.shape) * (states == 1)
    if attributes["range_gradients"]:
        to_incoming = to_incoming + gradients[3] * (states == 2) + gradients[4] * (states == 3)
    return to_incoming, to_x.reshape(x.shape), to_scale, None, None, None
