# SPDX-License-Identifier: Apache-2.0
"""Ranges and statistics of several processes' batches together, as one process with all the data finds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

import exactqat as eq

from ..core.ranges import rank_of_ends
from .layers import BatchNormTensors, scale_and_offset
from .primitives import per_channel


def extremes(x: Tensor, percentile: float | None) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of all processes' tensors, or those at a percentile, as one process with all
    the data finds them; rank 0.

    A percentile is that of all processes' values together, not a mean or an extreme of their percentiles. For this the
    processes exchange the values at and beyond it: ``1 - percentile / 100`` of the whole tensor from each of them.
    """
    # The smallest values negated, so that both ends are maxima. An empty share does not count.
    values = x.flatten()
    if percentile is None:
        ends = values.new_full((2,), -torch.inf)
        if values.numel():
            # A maximum may skip NaN, depending on the order of processes; it finds infinity. Neither moves a range.
            ends = torch.stack([-values.amin(), values.amax()]).nan_to_num_(torch.inf, torch.inf, -torch.inf)
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        return -ends[0], ends[1]
    # As one process counts NaN: above all other values, at the lower end too.
    values = values.nan_to_num(torch.inf, torch.inf, -torch.inf)
    count = torch.tensor(values.numel(), device=values.device)
    dist.all_reduce(count)
    rank = rank_of_ends(percentile, int(count))
    own = min(rank, values.numel())
    largest = values.new_full((2, rank), -torch.inf)
    largest[0, :own] = -values.topk(own, largest=False).values
    largest[1, :own] = values.topk(own).values
    everyones = [torch.empty_like(largest) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, largest)
    ends = torch.cat(everyones, 1).topk(rank).values[:, -1]
    return -ends[0], ends[1]


def statistics(raw: Tensor, axes: Sequence[int], channel_axis: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel of all processes' tensors, for a layer with folded batch norm."""
    from torch.distributed.nn.functional import all_reduce  # which has a gradient: a PyTorch may lack processes

    axes = list(axes)
    count = raw.new_tensor(raw.numel() // raw.shape[channel_axis], dtype=torch.float64)
    dist.all_reduce(count)
    mean = (all_reduce(raw.sum(axes, dtype=torch.float64)) / count).to(raw.dtype)
    squares = (raw - per_channel(mean, raw.dim(), channel_axis)).square().sum(axes, dtype=torch.float64)
    return mean, (all_reduce(squares) / count).to(raw.dtype)


def normalized(
    x: Tensor, tensors: BatchNormTensors, epsilon: float, share: float | None, channel_axis: int = 1
) -> Tensor:
    """A training batch by the statistics of all processes' batches; moves the running ones.

    share: of this batch in these; None: they stay.
    """
    scale, offset = scale_and_offset(tensors)
    moved = x.movedim(channel_axis, -1)
    image = moved if moved.dim() == 4 else moved.reshape(-1, 1, 1, moved.shape[-1])
    y, mean, variance, count = _Normalize.apply(image.contiguous(), scale, offset, epsilon)
    if share is not None:
        with torch.no_grad():
            unbiased = variance * (count / (count - 1))
            for statistic, new in ((tensors.mean, mean), (tensors.variance, unbiased)):
                statistic.copy_((1.0 - share) * statistic.double() + share * new)
    return cast(Tensor, y).reshape(moved.shape).movedim(-1, channel_axis)


def _statistics(x: Tensor) -> tuple[Tensor, Tensor, float]:
    """Mean and biased variance for each channel of float64 `x`, and the number of values for each, of all processes.

    Two exchanges, (count, sum) and the sum of squares about the mean: a difference of large sums would lose precision.
    """
    channels = x.shape[-1]
    count = x.numel() // channels
    mean, variance = x.new_zeros(channels), x.new_zeros(channels)
    if count:
        nothing = x.new_zeros(0)
        ones, zeros = torch.ones_like(mean), torch.zeros_like(mean)
        # The operator's own statistics for the share: the library's sums in their documented order.
        local = eq.raw_ops.FusedBatchNormV3(x=x, scale=ones, offset=zeros, mean=nothing, variance=nothing)
        mean, variance = local.reserve_space_1, local.reserve_space_2
    sums = torch.cat([mean * count, mean.new_tensor([count])])
    dist.all_reduce(sums)
    total = sums[-1].item()
    if total < 2:
        raise ValueError(f"a training batch needs more than one value per channel over all processes, got {total:.0f}")
    whole_mean = sums[:-1] / total
    squares = count * (variance + (mean - whole_mean).square())
    dist.all_reduce(squares)
    return whole_mean, squares / total, total


class _Normalize(torch.autograd.Function):
    """x [n, height, width, channels], scale and offset [channels]; gives y, mean, variance (float64) and the count."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, offset: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        mean, variance, count = _statistics(x.double())
        # As the operator computes elements (docs/decisions/batch-norm.md): 16-bit ones in float32, rounded once.
        real = torch.promote_types(x.dtype, torch.float32)
        slope = scale.double() / (variance + epsilon).sqrt()
        rounded = mean.to(real)
        shift = offset.double() + (rounded.double() - mean) * slope
        y = ((x.to(real) - rounded) * slope.to(real) + shift.to(real)).to(x.dtype)
        ctx.save_for_backward(x, scale, rounded, variance.to(real))
        ctx.count, ctx.epsilon = count, epsilon
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, None]:
        x, scale, rounded, variance = ctx.saved_tensors
        gradient = gradient.contiguous()
        mean, variance, wide_scale = rounded.double(), variance.double(), scale.double()
        local = eq.raw_ops.FusedBatchNormGradV3(
            y_backprop=gradient.double(),
            x=x.double(),
            scale=wide_scale,
            reserve_space_1=mean,
            reserve_space_2=variance,
            reserve_space_3=mean.new_zeros(()),
            epsilon=ctx.epsilon,
            is_training=False,
        )
        # The gradients of scale and offset stay those of the share, as DistributedDataParallel averages them itself;
        # the gradient of x needs their sums.
        sums = torch.stack([local.scale_backprop, local.offset_backprop])
        dist.all_reduce(sums)
        inverse = 1 / (variance + ctx.epsilon).sqrt()
        factor, slope, shift = (
            v.to(rounded.dtype) for v in (wide_scale * inverse, inverse * sums[0] / ctx.count, sums[1] / ctx.count)
        )
        return (
            (factor * ((gradient.to(rounded.dtype) - shift) - (x.to(rounded.dtype) - rounded) * slope)).to(x.dtype),
            local.scale_backprop.to(scale.dtype),
            local.offset_backprop.to(scale.dtype),
            None,
        )
