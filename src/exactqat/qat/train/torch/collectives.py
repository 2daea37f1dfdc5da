# SPDX-License-Identifier: Apache-2.0
"""Ranges and statistics of several processes' batches together, as one process with all the data finds them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.ranges import rank_of_ends
from ..core.weights import per_channel
from . import primitives as p
from .layers import BatchNormTensors, scale_and_offset


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


def statistics(raw: Tensor, axes: Sequence[int], channel_axis: int) -> tuple[Tensor, Tensor, float]:
    """Mean and biased variance of each channel of all processes' tensors, with gradients, and the number of values.

    Two exchanges, (count, sum) and the sum of squares about the mean: a difference of large sums would lose precision.
    """
    from torch.distributed.nn.functional import all_reduce  # which has a gradient: a PyTorch may lack processes

    axes = list(axes)
    own = raw.new_tensor([raw.numel() // raw.shape[channel_axis]], dtype=torch.float64)
    sums = all_reduce(torch.cat([raw.sum(axes, dtype=torch.float64), own]))
    count = sums[-1].item()
    if count < 2:
        raise ValueError(f"a training batch needs more than one value per channel over all processes, got {count:.0f}")
    mean = (sums[:-1] / count).to(raw.dtype)
    squares = (raw - per_channel(p, mean, raw.dim(), channel_axis)).square().sum(axes, dtype=torch.float64)
    return mean, (all_reduce(squares) / count).to(raw.dtype), count


def normalized(
    x: Tensor, tensors: BatchNormTensors, epsilon: float, share: float | None, channel_axis: int = 1
) -> Tensor:
    """A training batch by the statistics of all processes' batches, in float64; moves the running ones.

    The gradients of scale and offset are those of the share, as DistributedDataParallel averages them itself. share: of
    this batch in the running statistics; None: they stay.
    """
    scale, offset = scale_and_offset(tensors)
    rows = x.movedim(channel_axis, -1).double()
    mean, variance, count = statistics(rows, range(rows.dim() - 1), -1)
    slope = scale.double() / (variance + epsilon).sqrt()
    # The operator's gradients know the mean in the precision of its elements.
    rounded = mean.to(torch.promote_types(x.dtype, torch.float32)).double()
    y = (rows - rounded) * slope + offset.double() + ((rounded - mean) * slope).detach()
    if share is not None:
        with torch.no_grad():
            unbiased = variance * (count / (count - 1))
            for statistic, new in ((tensors.mean, mean), (tensors.variance, unbiased)):
                statistic.copy_((1.0 - share) * statistic.double() + share * new)
    return y.to(x.dtype).movedim(-1, channel_axis)
