# SPDX-License-Identifier: Apache-2.0
"""Weights and constants: their ranges and scales, batch norm folded into them, biases on the accumulator's grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ....kit.planning.plans import Weights
from ....kit.planning.rules import Rule
from . import primitives_numpy
from .primitives import Array, Ends, NumberPrimitives
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

    factor: Array
    weight_scale: Array
    bias_code: Array
    bias: Array


class NormArrays(NamedTuple):
    """Batch norm in evaluation. weight, bias: [channels] or None; mean, variance: [channels], without gradients."""

    weight: Array
    bias: Array
    mean: Array
    variance: Array
    epsilon: float


class LayerArrays(NamedTuple):
    """What a layer's grid follows from; or those of several layers of one form, joined.

    raw_scale: the step width of the weight, [out_channels], without gradient.
    bias: [out_channels] or None.
    folded: whether batch norm's factor is in the weight already.
    """

    raw_scale: Array
    bias: Array
    norm: NormArrays | None
    folded: bool
    is_int16: bool

    def leaves(self) -> tuple[Any, ...]:
        """All it consists of, in one tuple."""
        return self.raw_scale, self.bias, self.folded, self.is_int16, *(self.norm or ())

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> LayerArrays:
        """The inverse of `leaves`."""
        raw_scale, bias, folded, is_int16, *norm = leaves
        return cls(raw_scale, bias, NormArrays(*norm) if norm else None, folded, is_int16)


def per_channel(p: NumberPrimitives, vector: Array, rank: int, axis: int) -> Array:
    """A vector [channels] that broadcasts along all axes of an array but `axis`."""
    shape = [1] * rank
    shape[axis] = -1
    return p.reshape(vector, tuple(shape))


def folds(weights: Weights) -> bool:
    """Whether the weight is quantized with batch norm in it (`Rule.fold_batch_norm`)."""
    return weights.batch_norm is not None and weights.rule.fold_batch_norm


def shared_range(weights: Weights) -> tuple[Array, ...]:
    """Steps for which this is equal share one range for their weight."""
    rule = replace(weights.rule, match="*")
    return weights.weight, weights.channel_axis, rule, weights.batch_norm if folds(weights) else None


# --- ranges -----------------------------------------------------------------------------------------------------------


def extremes(p: NumberPrimitives, rule: Rule, channels_last: Array) -> Ends:
    """The range that holds a weight, per channel of the last axis or rank 0."""
    rank = len(channels_last.shape)
    axes = tuple(range(rank - 1 if rule.per_channel and rank else rank))
    if rule.symmetric:
        magnitude = p.amax(p.abs(channels_last), axes)
        return -magnitude, magnitude
    return p.minimum(p.amin(channels_last, axes), 0.0), p.maximum(p.amax(channels_last, axes), 0.0)


def learned_ends(p: NumberPrimitives, rule: Rule, channels_last: Array, range_end: Array = None) -> dict[str, Array]:
    """Where the learned range of a weight starts: at `range_end`, or where its squared error is least. Symmetric
    ranges have no minimum."""
    if range_end is not None:
        return {"maximum": range_end}
    low, high = extremes(p, rule, channels_last)
    fraction = least_error_fraction(p, channels_last, low, high, rule.weight_bits, rule.narrow_range)
    return {"maximum": high * fraction} | ({} if rule.symmetric else {"minimum": low * fraction})


def weight_ends(p: NumberPrimitives, rule: Rule, channels_last: Array, learned: Mapping[str, Array] | None) -> Ends:
    """The range of a weight. learned: what `learned_ends` started, if it is trained."""
    if learned is None:
        return extremes(p, rule, p.stop_gradient(channels_last))
    high = above_zero(p, learned["maximum"])
    return -high if rule.symmetric else below_zero(p, learned["minimum"]), high


def constant_rule(rule: Rule) -> Rule:
    """The rule of constant operands: rules' ranges concern what is stored, a constant's follows its largest
    magnitude."""
    return replace(rule, ranges="ema", fixed_range=None, per_channel=False)


def step_width(ends: Ends, bits: int, narrow_range: bool) -> Array:
    """The scale of a range."""
    return (ends[1] - ends[0]) / grid_steps(bits, narrow_range)


# --- batch norm -------------------------------------------------------------------------------------------------------


def factor_and_offset(
    p: NumberPrimitives, weight: Array, bias: Array, mean: Array, variance: Array, epsilon: float
) -> tuple[Array, Array]:
    """Batch norm in evaluation as ``factor * x + offset``, both [channels]; weight and bias may be None."""
    deviation = p.exact_sqrt(variance + epsilon)
    factor = 1.0 / deviation if weight is None else weight / deviation
    return factor, (0.0 if bias is None else bias) - mean * factor


def folded_weight(p: NumberPrimitives, weight: Array, factor: Array, channel_axis: int) -> Array:
    """The weight times batch norm's factor for each output channel."""
    return weight * per_channel(p, factor, len(weight.shape), channel_axis)


def grid_of(p: NumberPrimitives, layer: LayerArrays, input_scale: Array, output_scale: Array) -> ChannelGrid:
    """A layer on the device. Scales: rank 0, or one for each channel; without gradients."""
    factor = p.ones_like(layer.raw_scale)
    bias = p.zeros_like(layer.raw_scale) if layer.bias is None else layer.bias
    if layer.norm is not None:
        own, offset = factor_and_offset(p, *layer.norm)
        bias = bias * own + offset
        factor = factor if layer.folded else own
    return channel_grid(p, factor, bias, layer.raw_scale, input_scale, output_scale, layer.is_int16)


def channel_grid(
    p: NumberPrimitives,
    factor: Array,
    bias: Array,
    raw_scale: Array,
    input_scale: Array,
    output_scale: Array,
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
