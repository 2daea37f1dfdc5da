# SPDX-License-Identifier: Apache-2.0
"""Declarations of the FusedBatchNorm family."""

import math
from functools import partial
from typing import Any, Literal

from exactqat.operators.declarations.checks import (
    check_dtypes,
    check_length,
    check_rank,
    check_same_shape,
    check_wide_dtypes,
)
from exactqat.operators.declarations.dispatch import positions, repeated, reshaped, widened
from exactqat.operators.declarations.op import operator
from exactqat.operators.declarations.specification import Axes, Lowering, Range, Tensor, TensorSpec, letters_of, wide

DataFormat2D = Literal["NHWC", "NCHW"]
DataFormat = Literal["NHWC", "NCHW", "NDHWC", "NCDHW"]


def _channel_axis(x: TensorSpec, data_format: str) -> int:
    """TensorFlow takes 4-D and 5-D images with either set of names: what counts is where the channels are."""
    if x.rank not in (4, 5):
        raise ValueError(f"x must be 4 or 5-dimensional, got shape {list(x.shape)}")
    return 1 if data_format.startswith("NC") else x.rank - 1


def _layout(x: TensorSpec, data_format: str) -> dict[str, int | float]:
    """x as `[outer, channels, inner]`."""
    axis = _channel_axis(x, data_format)
    return {"outer": math.prod(x.shape[:axis]), "channels": x.shape[axis], "inner": math.prod(x.shape[axis + 1 :])}


def _check_vectors(x: TensorSpec, data_format: str, **vectors: TensorSpec) -> TensorSpec:
    channels = x.shape[_channel_axis(x, data_format)]
    check_length(channels, "the channels of x", **vectors)
    return TensorSpec((channels,), wide(x.dtype))


def _forward(
    x: TensorSpec,
    scale: TensorSpec,
    offset: TensorSpec,
    mean: TensorSpec,
    variance: TensorSpec,
    epsilon: float,
    exponential_avg_factor: float,
    data_format: str,
    is_training: bool,
) -> Lowering:
    check_dtypes(x=x)
    check_wide_dtypes(x, "x", scale=scale, offset=offset, mean=mean, variance=variance)
    vector = _check_vectors(x, data_format, scale=scale, offset=offset)
    check_rank(1, mean=mean, variance=variance)
    if not is_training or exponential_avg_factor != 1.0:
        check_length(
            vector.shape[0],
            "the channels of x, needed when is_training is False or exponential_avg_factor is not 1",
            mean=mean,
            variance=variance,
        )
    numbers = {
        "epsilon": epsilon,
        "exponential_avg_factor": exponential_avg_factor,
        "is_training": int(is_training),
    }
    return Lowering((x, vector, vector, vector, vector), "fused_batch_norm", numbers | _layout(x, data_format))


def _gradient(
    y_backprop: TensorSpec,
    x: TensorSpec,
    scale: TensorSpec,
    reserve_space_1: TensorSpec,
    reserve_space_2: TensorSpec,
    epsilon: float,
    data_format: str,
    is_training: bool,
) -> Lowering:
    check_dtypes(x=x, y_backprop=y_backprop)
    check_wide_dtypes(x, "x", scale=scale, reserve_space_1=reserve_space_1, reserve_space_2=reserve_space_2)
    _channel_axis(x, data_format)
    check_same_shape(x=x, y_backprop=y_backprop)
    vector = _check_vectors(
        x, data_format, scale=scale, reserve_space_1=reserve_space_1, reserve_space_2=reserve_space_2
    )
    empty = TensorSpec((0,), wide(x.dtype))
    numbers = {"epsilon": epsilon, "is_training": int(is_training)}
    return Lowering((x, vector, vector, empty, empty), "fused_batch_norm_grad", numbers | _layout(x, data_format))


_FORWARD_RESULTS = ("y", "batch_mean", "batch_variance", "reserve_space_1", "reserve_space_2")
_RESERVES = ("reserve_space_1", "reserve_space_2")
_GRADIENT_RESULTS = ("x_backprop", "scale_backprop", "offset_backprop")


@operator("FusedBatchNorm", _FORWARD_RESULTS, reuses=("x",))
def fused_batch_norm(
    x: Tensor,
    scale: Range,
    offset: Range,
    mean: Range,
    variance: Range,
    epsilon: float = 1e-4,
    exponential_avg_factor: float = 1.0,
    data_format: DataFormat2D = "NHWC",
    is_training: bool = True,
) -> Lowering:
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
    return _forward(x, scale, offset, mean, variance, epsilon, exponential_avg_factor, data_format, is_training)


@operator("FusedBatchNormV2", _FORWARD_RESULTS, reuses=("x",))
def fused_batch_norm_v2(
    x: Tensor,
    scale: Range,
    offset: Range,
    mean: Range,
    variance: Range,
    epsilon: float = 1e-4,
    exponential_avg_factor: float = 1.0,
    data_format: DataFormat2D = "NHWC",
    is_training: bool = True,
) -> Lowering:
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
    return _forward(x, scale, offset, mean, variance, epsilon, exponential_avg_factor, data_format, is_training)


@operator("FusedBatchNormV3", (*_FORWARD_RESULTS, "reserve_space_3"), reuses=("x",))
def fused_batch_norm_v3(
    x: Tensor,
    scale: Range,
    offset: Range,
    mean: Range,
    variance: Range,
    epsilon: float = 1e-4,
    exponential_avg_factor: float = 1.0,
    data_format: DataFormat = "NHWC",
    is_training: bool = True,
) -> Lowering:
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
    lowered = _forward(x, scale, offset, mean, variance, epsilon, exponential_avg_factor, data_format, is_training)
    return lowered._replace(results=(*lowered.results, TensorSpec((), wide(x.dtype))))


@operator("FusedBatchNormGrad", (*_GRADIENT_RESULTS, "reserve_space_3", "reserve_space_4"), reuses=("y_backprop", "x"))
def fused_batch_norm_grad(
    y_backprop: Tensor,
    x: Tensor,
    scale: Range,
    reserve_space_1: Range,
    reserve_space_2: Range,
    epsilon: float = 1e-4,
    data_format: DataFormat2D = "NHWC",
    is_training: bool = True,
) -> Lowering:
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
    return _gradient(y_backprop, x, scale, reserve_space_1, reserve_space_2, epsilon, data_format, is_training)


@operator(
    "FusedBatchNormGradV2", (*_GRADIENT_RESULTS, "reserve_space_3", "reserve_space_4"), reuses=("y_backprop", "x")
)
def fused_batch_norm_grad_v2(
    y_backprop: Tensor,
    x: Tensor,
    scale: Range,
    reserve_space_1: Range,
    reserve_space_2: Range,
    epsilon: float = 1e-4,
    data_format: DataFormat2D = "NHWC",
    is_training: bool = True,
) -> Lowering:
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
    return _gradient(y_backprop, x, scale, reserve_space_1, reserve_space_2, epsilon, data_format, is_training)


@operator(
    "FusedBatchNormGradV3", (*_GRADIENT_RESULTS, "reserve_space_4", "reserve_space_5"), reuses=("y_backprop", "x")
)
def fused_batch_norm_grad_v3(
    y_backprop: Tensor,
    x: Tensor,
    scale: Range,
    reserve_space_1: Range,
    reserve_space_2: Range,
    reserve_space_3: Range,
    epsilon: float = 1e-4,
    data_format: DataFormat = "NHWC",
    is_training: bool = True,
) -> Lowering:
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
    check_wide_dtypes(x, "x", reserve_space_3=reserve_space_3)
    return _gradient(y_backprop, x, scale, reserve_space_1, reserve_space_2, epsilon, data_format, is_training)


@operator(None, ("sums",))
def channel_sum(x: Tensor, data_format: DataFormat = "NHWC") -> Lowering:
    """Sums over all dimensions except the channels, in the library's order, for second-order gradients.

    Args:
        x: float32 or float64, 4-D or 5-D images.
        data_format: where the channels are.
    Returns:
        sums: a vector, one element per channel, of the dtype of `x` (float32 if that has 16 bits).
    Raises:
        ValueError: `x` not 4-D or 5-D.
    Source: docs/decisions/summation-order.md.
    """
    check_dtypes(x=x)
    layout = _layout(x, data_format)
    return Lowering((TensorSpec((int(layout["channels"]),), wide(x.dtype)),), "channel_sum", layout)


def _backward(
    gradient_operator: Any, gradients: Any, operands: Any, results: Any, attributes: Any, reserves: Any
) -> Any:
    x, scale, _, mean, variance = operands
    attributes = {key: value for key, value in attributes.items() if key != "exponential_avg_factor"}
    saved = results[:2] if attributes["is_training"] else (mean, variance)
    computed = gradient_operator(gradients[0], x, scale, *saved, *reserves, **attributes)
    x_backprop, scale_backprop, offset_backprop = computed[:3]
    if attributes["is_training"]:
        return x_backprop, scale_backprop, offset_backprop, None, None
    # d y / d mean = -scale / sqrt(variance + epsilon); d y / d variance = -(x - mean) * scale / 2 / (variance +
    # epsilon)**1.5
    inverse = (variance + attributes["epsilon"]) ** -0.5
    return (
        x_backprop,
        scale_backprop,
        offset_backprop,
        -offset_backprop * scale * inverse,
        -0.5 * scale_backprop * scale * inverse * inverse,
    )


# Neither y, so that an activation may take its place, nor running statistics, which training goes on to update.
_KEPT = ("x", "scale", "mean", "variance")
_KEPT_IF = {"mean": ("is_training", False), "variance": ("is_training", False)}


@fused_batch_norm.gradient(of=("y",), saves_results=_RESERVES, keeps=_KEPT, keeps_if=_KEPT_IF)
def _(gradients, operands, results, attributes):
    return _backward(fused_batch_norm_grad, gradients, operands, results, attributes, ())


@fused_batch_norm_v2.gradient(of=("y",), saves_results=_RESERVES, keeps=_KEPT, keeps_if=_KEPT_IF)
def _(gradients, operands, results, attributes):
    return _backward(fused_batch_norm_grad_v2, gradients, operands, results, attributes, ())


@fused_batch_norm_v3.gradient(of=("y",), saves_results=(*_RESERVES, "reserve_space_3"), keeps=_KEPT, keeps_if=_KEPT_IF)
def _(gradients, operands, results, attributes):
    return _backward(fused_batch_norm_grad_v3, gradients, operands, results, attributes, (results[2],))


@fused_batch_norm_grad.gradient(of=_GRADIENT_RESULTS)
@fused_batch_norm_grad_v2.gradient(of=_GRADIENT_RESULTS)
@fused_batch_norm_grad_v3.gradient(of=_GRADIENT_RESULTS)
def _(gradients, operands, results, attributes):
    computed = second_order(gradients, operands, attributes)
    return *computed, *(None for _ in operands[5:])


def second_order(gradients: Any, operands: Any, attributes: Any) -> Any:
    """The closed form of the second-order gradient, in the arrays' own arithmetic, so that it can be differentiated
    again.

    As in TensorFlow the statistics are those of `x` in training, whatever the reserve spaces hold, and the reserve
    spaces get no gradient then; in inference they are operands like any other. h is x normalized,
    r = 1/sqrt(variance + epsilon), M the mean over all but the channels.
    """
    a, b, c = (widened(gradient) for gradient in gradients[:3])
    dy, x, scale, mean, variance = (widened(operand) for operand in operands[:5])
    data_format, epsilon = attributes["data_format"], attributes["epsilon"]
    axis = 1 if data_format.startswith("NC") else len(x.shape) - 1
    broadcast = tuple(n if i == axis else 1 for i, n in enumerate(x.shape))
    count = positions(x, axis)

    def spread(vector: Any) -> Any:
        return reshaped(vector, broadcast)

    def M(z: Any) -> Any:
        return spread(channel_sum(z, data_format) / count)

    s, b, c = spread(scale), spread(b), spread(c)
    if not attributes["is_training"]:
        r = (spread(variance) + epsilon) ** -0.5
        h = (x - spread(mean)) * r
        to_dy = a * s * r + b * h + c
        to_x = b * dy * r
        to_scale = channel_sum(a * dy * r, data_format)
        inverse, to_h = (variance + epsilon) ** -0.5, reshaped(b, scale.shape)
        to_mean = -to_h * inverse * channel_sum(dy, data_format)
        slope = scale * channel_sum(a * dy, data_format) + to_h * channel_sum(dy * (x - spread(mean)), data_format)
        return to_dy, to_x, to_scale, to_mean, -0.5 * inverse**3 * slope
    else:
        centered = x - M(x)
        r = (M(centered * centered) + epsilon) ** -0.5
        h = centered * r
        a_mean, a_slope, dy_mean, dy_slope = M(a), M(a * h), M(dy), M(dy * h)
        projected_a, projected_dy = a - a_mean - h * a_slope, dy - dy_mean - h * dy_slope
        to_dy = s * r * projected_a + b * h + c
        to_scale = channel_sum(a * r * projected_dy, data_format)
        curvature = h * (M(a * dy) - a_mean * dy_mean - a_slope * dy_slope)
        to_x = b * r * projected_dy - s * r * r * (curvature + dy_slope * projected_a + a_slope * projected_dy)
    return to_dy, to_x, to_scale, None, None


@channel_sum.gradient
def _(gradients, operands, results, attributes):
    (x,) = operands
    axis = 1 if attributes["data_format"].startswith("NC") else len(x.shape) - 1
    spread = reshaped(gradients[0], tuple(n if i == axis else 1 for i, n in enumerate(x.shape)))
    return (repeated(spread, x),)


# What the dimensions mean: channels are independent. In training the statistics tie everything else together; in
# inference gradients of the vectors are sums over it.


def _channel_letters(x: TensorSpec, data_format: str) -> tuple[str, str, str]:
    """Those of x, of its channels, and of the rest."""
    letters = letters_of(x)
    channel = letters[_channel_axis(x, data_format)]
    return letters, channel, letters.replace(channel, "")


@fused_batch_norm.axes
@fused_batch_norm_v2.axes
@fused_batch_norm_v3.axes
def _(x, scale, offset, mean, variance, data_format, is_training, **_):
    letters, channel, rest = _channel_letters(x, data_format)
    ignored = "-"  # in training the running statistics may have any length
    running = [channel if vector.shape == scale.shape else ignored for vector in (mean, variance)]
    results = (letters, channel, channel, channel, channel, "")
    return Axes((letters, channel, channel, *running), results, ("",) * 6, rest if is_training else "")


@fused_batch_norm_grad.axes
@fused_batch_norm_grad_v2.axes
@fused_batch_norm_grad_v3.axes
def _(x, data_format, is_training, **_):
    letters, channel, rest = _channel_letters(x, data_format)
    empty = "?"
    return Axes(
        (letters, letters, channel, channel, channel, ""),
        (letters, channel, channel, empty, empty),
        ("", rest, rest, "", ""),
        empty + (rest if is_training else ""),
    )


@channel_sum.axes
def _(x, data_format):
    letters, channel, rest = _channel_letters(x, data_format)
    return Axes((letters,), (channel,), (rest,))


# Training of a batch that lies on several devices: their sums, rounded, are added up. Everything else is as above.


def _forward_by_parts(inference: Any, total: Any, operands: Any, attributes: Any) -> Any:
    x, scale, offset, mean, variance = operands
    data_format, factor = attributes["data_format"], attributes["exponential_avg_factor"]
    broadcast, count = _part(total, x, data_format)
    wide_x = widened(x)
    batch_mean = total(channel_sum(wide_x, data_format)) / count
    centered = wide_x - batch_mean.reshape(broadcast)
    # What rounding has left of the mean.
    rest = total(channel_sum(centered, data_format)) / count
    deviation = centered - rest.reshape(broadcast)
    batch_variance = total(channel_sum(deviation * deviation, data_format)) / count
    still = attributes | {"is_training": False}
    y = inference(centered, scale, offset, rest, batch_variance, **still)[0].astype(x.dtype)
    batch_mean = batch_mean + rest
    unbiased = batch_variance * (count / max(count - 1, 1))
    running = (batch_mean, unbiased)
    if factor != 1.0:
        running = (
            (1.0 - factor) * mean + factor * batch_mean,
            (1.0 - factor) * variance + factor * unbiased,
        )
    # Not the sum of an empty array: XLA has none under `shard_map` without `jit`.
    nothing = 0 * (batch_mean != batch_mean).astype(batch_mean.dtype).sum()
    return y, *running, batch_mean, batch_variance, nothing


def _part(total: Any, x: Any, data_format: str) -> tuple[tuple[int, ...], Any]:
    """The shape of a vector of channels beside x, and the number of elements of a channel in all parts."""
    axis = 1 if data_format.startswith("NC") else len(x.shape) - 1
    return tuple(n if i == axis else 1 for i, n in enumerate(x.shape)), total(math.prod(x.shape) // x.shape[axis])


def _gradient_by_parts(gradient: Any, total: Any, operands: Any, attributes: Any) -> Any:
    y_backprop, x, scale, mean, variance = operands[:5]
    broadcast, count = _part(total, x, attributes["data_format"])
    still = attributes | {"is_training": False}
    x_backprop, *sums = gradient(*operands, **still)[:3]
    to_scale, to_offset = map(total, sums)
    r = (variance + attributes["epsilon"]) ** -0.5
    h = (widened(x) - mean.reshape(broadcast)) * r.reshape(broadcast)
    shared = to_offset.reshape(broadcast) + h * to_scale.reshape(broadcast)
    to_x = (scale * r).reshape(broadcast) * (widened(y_backprop) - shared / count)
    return to_x.astype(x.dtype), to_scale, to_offset, scale[:0], scale[:0]


for _op in (fused_batch_norm, fused_batch_norm_v2, fused_batch_norm_v3):
    _op.by_parts(partial(_forward_by_parts, _op))
for _op in (fused_batch_norm_grad, fused_batch_norm_grad_v2, fused_batch_norm_grad_v3):
    _op.by_parts(partial(_gradient_by_parts, _op))
