# SPDX-License-Identifier: Apache-2.0
"""Declarations of the FusedBatchNorm family."""

import math
from typing import Any, Literal

from exactqat.spec.op import (
    Lowering,
    Tensor,
    TensorSpec,
    check_dtypes,
    check_length,
    check_rank,
    check_same_shape,
    check_wide_dtypes,
    operator,
    wide,
    widened,
)

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
_GRADIENT_RESULTS = ("x_backprop", "scale_backprop", "offset_backprop")


@operator("FusedBatchNorm", _FORWARD_RESULTS, reuses=("x",))
def fused_batch_norm(
    x: Tensor,
    scale: Tensor,
    offset: Tensor,
    mean: Tensor,
    variance: Tensor,
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
    scale: Tensor,
    offset: Tensor,
    mean: Tensor,
    variance: Tensor,
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
    scale: Tensor,
    offset: Tensor,
    mean: Tensor,
    variance: Tensor,
    epsilon: float = 1e-4,
    exponential_avg_factor: float = 1.0,
    data_format: DataFormat = "NHWC",
    is_training: bool = True,
) -> Lowering:
    """Batch normalization: `y = (x - mean) / sqrt(variance + epsilon) * scale + offset` for each channel.

    In training, mean and variance are those of the batch (the variance that normalizes is the biased one); otherwise
    they are the arguments. Everything is computed in float64 and rounded once.

    Args:
        x: a float tensor, 4-D or 5-D images.
        scale, offset: vectors, one element for each channel, of the dtype of `x` (float32 if that has 16 bits).
        mean, variance: running statistics, vectors likewise. In training with `exponential_avg_factor` 1 they are
            ignored and may have any length, as an empty vector.
        epsilon: added to the variance.
        exponential_avg_factor: weight of the batch in the returned running statistics; 1 returns those of the batch
            alone.
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
        ValueError: `x` not 4-D or 5-D, vectors whose length is not the number of channels. TypeError: dtypes that
            differ.
    Source: TensorFlow `FusedBatchNormV3`. Gradients of the statistics with respect to `x` are zero, as there.
    """
    lowered = _forward(x, scale, offset, mean, variance, epsilon, exponential_avg_factor, data_format, is_training)
    return lowered._replace(results=(*lowered.results, TensorSpec((), wide(x.dtype))))


@operator("FusedBatchNormGrad", (*_GRADIENT_RESULTS, "reserve_space_3", "reserve_space_4"), reuses=("y_backprop", "x"))
def fused_batch_norm_grad(
    y_backprop: Tensor,
    x: Tensor,
    scale: Tensor,
    reserve_space_1: Tensor,
    reserve_space_2: Tensor,
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
    scale: Tensor,
    reserve_space_1: Tensor,
    reserve_space_2: Tensor,
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
    scale: Tensor,
    reserve_space_1: Tensor,
    reserve_space_2: Tensor,
    reserve_space_3: Tensor,
    epsilon: float = 1e-4,
    data_format: DataFormat = "NHWC",
    is_training: bool = True,
) -> Lowering:
    """Gradient of `fused_batch_norm_v3`.

    Args:
        y_backprop: the gradient that arrives at `y`; same shape as `x`.
        x, scale, epsilon, data_format, is_training: what was given to `fused_batch_norm_v3`.
        reserve_space_1, reserve_space_2: its outputs of that name: the mean and the variance that normalized.
        reserve_space_3: ignored.
    Returns:
        x_backprop: like `x`. In training the statistics are functions of `x`, otherwise constants.
        scale_backprop, offset_backprop: vectors, one element for each channel.
        reserve_space_4, reserve_space_5: empty.
    Raises:
        ValueError: shapes that do not fit. TypeError: dtypes that differ.
    Source: TensorFlow `FusedBatchNormGradV3`; inference with NCHW, which its CPU kernel rejects, works.
    """
    check_wide_dtypes(x, "x", reserve_space_3=reserve_space_3)
    return _gradient(y_backprop, x, scale, reserve_space_1, reserve_space_2, epsilon, data_format, is_training)


@operator(None, ("sums",))
def channel_sum(x: Tensor, data_format: DataFormat = "NHWC") -> Lowering:
    """Sums over all dimensions but the channels, in the library's order: what second-order gradients are made of.

    Args:
        x: float32 or float64, 4-D or 5-D images.
        data_format: where the channels are.
    Returns:
        sums: a vector, one element for each channel, of the dtype of `x` (float32 if that has 16 bits).
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
    saved = results[3:5] if attributes["is_training"] else (mean, variance)
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


@fused_batch_norm.gradient(of=("y",), saves_results=True)
def _(gradients, operands, results, attributes):
    return _backward(fused_batch_norm_grad, gradients, operands, results, attributes, ())


@fused_batch_norm_v2.gradient(of=("y",), saves_results=True)
def _(gradients, operands, results, attributes):
    return _backward(fused_batch_norm_grad_v2, gradients, operands, results, attributes, ())


@fused_batch_norm_v3.gradient(of=("y",), saves_results=True)
def _(gradients, operands, results, attributes):
    return _backward(fused_batch_norm_grad_v3, gradients, operands, results, attributes, (results[5],))


@fused_batch_norm_grad.gradient(of=_GRADIENT_RESULTS)
@fused_batch_norm_grad_v2.gradient(of=_GRADIENT_RESULTS)
@fused_batch_norm_grad_v3.gradient(of=_GRADIENT_RESULTS)
def _(gradients, operands, results, attributes):
    """The closed form of the second-order gradient, in the arrays' own arithmetic, so that it can be differentiated
    again.

    As in TensorFlow the statistics are those of `x` in training, whatever the reserve spaces hold, and the reserve
    spaces get no gradient. h is x normalized, r = 1/sqrt(variance + epsilon), M the mean over all but the channels.
    """
    a, b, c = (widened(gradient) for gradient in gradients[:3])
    dy, x, scale, mean, variance = (widened(operand) for operand in operands[:5])
    data_format, epsilon = attributes["data_format"], attributes["epsilon"]
    axis = 1 if data_format.startswith("NC") else len(x.shape) - 1
    broadcast = tuple(n if i == axis else 1 for i, n in enumerate(x.shape))
    count = math.prod(x.shape) // max(x.shape[axis], 1)

    def spread(vector: Any) -> Any:
        return vector.reshape(broadcast)

    def M(z: Any) -> Any:
        return spread(channel_sum(z, data_format) / max(count, 1))

    s, b, c = spread(scale), spread(b), spread(c)
    if not attributes["is_training"]:
        r = (spread(variance) + epsilon) ** -0.5
        h = (x - spread(mean)) * r
        to_dy = a * s * r + b * h + c
        to_x = b * dy * r
        to_scale = channel_sum(a * dy * r, data_format)
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
    return to_dy, to_x, to_scale, *(None for _ in operands[3:])


@channel_sum.gradient
def _(gradients, operands, results, attributes):
    (x,) = operands
    axis = 1 if attributes["data_format"].startswith("NC") else len(x.shape) - 1
    everywhere = (x == x) | (x != x)
    return (everywhere * gradients[0].reshape(tuple(n if i == axis else 1 for i, n in enumerate(x.shape))),)
