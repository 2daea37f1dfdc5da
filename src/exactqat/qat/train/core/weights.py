# SPDX-License-Identifier: Apache-2.0
"""Weights and constants: their ranges and scales, batch norm folded into them, biases on the accumulator's grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ....kit.device.operator import ScaleLimits
from ....kit.planning.fitting import constant_step
from ....kit.planning.plans import WeightNumbers, Weights
from ....kit.planning.rules import Rule
from . import primitives_numpy
from .primitives import NumberPrimitives
from .ranges import above_zero, below_zero, grid_steps, least_error_fraction

LARGEST_BIAS_CODE = 2.0**30
# The largest bias in int64, after int16 activations.
LARGEST_WIDE_BIAS_CODE = 2.0**40
# Sums are below 2**31; twice the smallest multiplier that the device takes.
SMALLEST_MULTIPLIER = 2.0**-31


class ChannelGrid(NamedTuple):
    """A layer on the device, per output channel; all [out_channels].

    factor: multiplies the quantized weight (batch norm's scale; 0 for a constant channel).
    weight_scale: positive; the device's scale of the weight codes.
    bias_code: the bias as a whole number of ``input scale * weight_scale``, float32.
    bias: what those codes mean in real numbers, with the gradient of the bias.
    """

    factor: Any
    weight_scale: Any
    bias_code: Any
    bias: Any


def per_channel(p: NumberPrimitives, vector: Any, rank: int, axis: int) -> Any:
    """A vector [channels] that broadcasts along all axes of an array but `axis`."""
    shape = [1] * rank
    shape[axis] = -1
    return p.reshape(vector, tuple(shape))


def folds(weights: Weights) -> bool:
    """Whether the weight is quantized with batch norm in it (`Rule.fold_batch_norm`)."""
    return weights.batch_norm is not None and weights.rule.fold_batch_norm


def shared_range(weights: Weights) -> tuple[Any, ...]:
    """Steps for which this is equal share one range for their weight."""
    rule = replace(weights.rule, match="*")
    return weights.weight, weights.channel_axis, rule, weights.batch_norm if folds(weights) else None


# --- ranges -----------------------------------------------------------------------------------------------------------


def extremes(p: NumberPrimitives, rule: Rule, channels_last: Any) -> tuple[Any, Any]:
    """The range that holds a weight, per channel of the last axis or rank 0."""
    rank = len(channels_last.shape)
    axes = tuple(range(rank - 1 if rule.per_channel and rank else rank))
    if rule.symmetric:
        magnitude = p.amax(p.abs(channels_last), axes)
        return -magnitude, magnitude
    return p.minimum(p.amin(channels_last, axes), 0.0), p.maximum(p.amax(channels_last, axes), 0.0)


def learned_ends(p: NumberPrimitives, rule: Rule, channels_last: Any, given: Any = None) -> dict[str, Any]:
    """Where the learned range of a weight starts: at the `given` end, or where its squared error is least. Symmetric
    ranges have no minimum."""
    if given is not None:
        return {"maximum": given}
    low, high = extremes(p, rule, channels_last)
    fraction = least_error_fraction(p, channels_last, low, high, rule.weight_bits, rule.narrow_range)
    return {"maximum": high * fraction} | ({} if rule.symmetric else {"minimum": low * fraction})


def weight_ends(
    p: NumberPrimitives, rule: Rule, channels_last: Any, learned: Mapping[str, Any] | None
) -> tuple[Any, Any]:
    """The range of a weight. learned: what `learned_ends` started, if it is trained."""
    if learned is None:
        return extremes(p, rule, p.stop_gradient(channels_last))
    high = above_zero(p, learned["maximum"])
    return -high if rule.symmetric else below_zero(p, learned["minimum"]), high


def constant_rule(rule: Rule) -> Rule:
    """The rule of constant operands: rules' ranges concern what is stored, a constant's follows its largest
    magnitude."""
    return replace(rule, ranges="ema", fixed_range=None, per_channel=False)


def limited_magnitude(
    p: NumberPrimitives, high: Any, steps: int, limits: ScaleLimits, scales: tuple[Any, Any], seen: Any
) -> Any:
    """A constant's largest magnitude, as far as the operator accepts its scale.

    Args:
        steps: of the constant's grid.
        scales: of the other operand and of the result. seen: whether both ranges have seen data.
    """
    least, most = constant_step(limits, *scales)
    limited = p.minimum(p.maximum(high, least * (steps / 2)), most * (steps / 2))
    return limited if seen is True else p.where(seen, limited, high)


def step_width(ends: tuple[Any, Any], bits: int, narrow_range: bool) -> Any:
    """The scale of a range."""
    return (ends[1] - ends[0]) / grid_steps(bits, narrow_range)


# --- batch norm -------------------------------------------------------------------------------------------------------


def factor_and_offset(
    p: NumberPrimitives, weight: Any, bias: Any, mean: Any, variance: Any, epsilon: float
) -> tuple[Any, Any]:
    """Batch norm in evaluation as ``factor * x + offset``, both [channels]; weight and bias may be None."""
    deviation = p.exact_sqrt(variance + epsilon)
    factor = 1.0 / deviation if weight is None else weight / deviation
    return factor, (0.0 if bias is None else bias) - mean * factor


def folded_weight(p: NumberPrimitives, weight: Any, factor_and_offset: tuple[Any, Any], channel_axis: int) -> Any:
    """The weight times batch norm's factor for each output channel."""
    return weight * per_channel(p, factor_and_offset[0], len(weight.shape), channel_axis)


def correction_and_shift(
    p: NumberPrimitives, factor: Any, beta: Any, bias: Any, running: Any, mean: Any, variance: Any, epsilon: float
) -> tuple[Any, Any]:
    """What corrects a convolution with batch norm folded into its weight from the running statistics, which are steady,
    to those of the batch (TensorFlow's fold with correction): ``convolution * correction + shift``, both [channels].

    Args:
        factor: batch norm's in evaluation. beta, bias: batch norm's and the convolution's, or None.
        running: the running variance. mean, variance: the batch's, of the convolution with its bias.
    """
    correction = p.sqrt(running + epsilon) / p.sqrt(variance + epsilon)
    # A bias of the convolution is part of the mean, and batch norm removes it.
    shift = factor * correction * (mean if bias is None else mean - bias)
    return correction, -shift if beta is None else beta - shift


def channel_grid(
    p: NumberPrimitives,
    factor: Any,
    bias: Any,
    raw_scale: Any,
    input_scale: Any,
    output_scale: Any,
    is_int16: bool = False,
) -> ChannelGrid:
    """Folds batch norm's `factor` into the weight's `raw_scale` and puts the bias on the accumulator's grid.

    The integer weight codes do not change, except that a negative factor flips their signs. A channel is constant if
    its factor or its weights are zero, or if they are so small that they cannot matter: the largest possible sum would
    move the result by less than a step, or the bias is more than 2**30 steps of its own grid (2**40 after int16). It
    keeps only its bias, on a grid 256 times finer than that of the result.
    """
    scale = raw_scale * p.abs(p.stop_gradient(factor))
    step = scale * input_scale
    largest = LARGEST_WIDE_BIAS_CODE if is_int16 else LARGEST_BIAS_CODE
    alive = (step > SMALLEST_MULTIPLIER * output_scale) & (p.abs(bias) <= largest * step)
    scale = p.where(alive, scale, output_scale / input_scale / 256)
    step = input_scale * scale
    code = p.round(p.stop_gradient(bias / step))
    return ChannelGrid(p.where(alive, factor, factor * 0.0), scale, code, p.straight_through(code * step, bias))


# --- in NumPy ---------------------------------------------------------------------------------------------------------


def weight_codes(quantized: np.ndarray, raw_scale: np.ndarray, channel_axis: int) -> np.ndarray:
    """Codes around zero of a quantized weight, int64. raw_scale: [channels], 0 where a channel's range is zero."""
    safe = np.where(raw_scale > 0, raw_scale, np.float32(1))
    return np.rint(quantized / per_channel(primitives_numpy, safe, quantized.ndim, channel_axis)).astype(np.int64)


def weight_numbers(
    quantized: np.ndarray, raw_scale: np.ndarray, grid: ChannelGrid, channel_axis: int, per_channel_scale: bool
) -> WeightNumbers:
    """A layer's weights on the device; a negative batch norm factor has flipped the signs of its channel."""
    codes = weight_codes(quantized, raw_scale, channel_axis)
    signs = np.sign(np.asarray(grid.factor)).astype(np.int64)
    scales = np.asarray(grid.weight_scale)
    one_scale = not per_channel_scale and bool(np.all(scales == scales[0]))
    return WeightNumbers(
        codes * per_channel(primitives_numpy, signs, codes.ndim, channel_axis),
        scales[:1] if one_scale else scales,
        np.asarray(grid.bias_code).astype(np.float64),
    )
