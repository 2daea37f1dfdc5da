# SPDX-License-Identifier: Apache-2.0
"""Ranges and statistics of several processes' batches together, as one process with all the data finds them; parameters
that ``fully_shard`` has divided among processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..core.ranges import rank_of_ends
from ..core.weights import per_channel
from . import primitives as p
from .layers import BatchNormTensors, scale_and_offset
from .tree import Owner


def several_processes() -> bool:
    """Whether this process is one of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def gathered(model: nn.Module, writing: bool = False) -> Iterator[bool]:
    """While the context lasts, `model` holds the whole of every parameter that ``fully_shard`` has divided, in each
    process; what is written to it stays, if `writing`. Whether there are any. All processes have to enter it."""
    if hasattr(type(model), "reshard"):  # `fully_shard` has put another class there
        cast(Any, model).reshard()
    if writing and any(isinstance(module, Owner) and module.unsharded for module in model.modules()):
        raise RuntimeError(
            "fully_shard holds this model's parameters whole for the module around it, where nothing can be written to "
            "them: call reshard() of that module first, or give fully_shard the prepared model itself, too"
        )
    held: list[tuple[dict[str, Any], str, Any]] = [
        (module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if hasattr(parameter, "full_tensor")
    ]
    wholes = {divided: nn.Parameter(p.whole(divided).detach(), divided.requires_grad) for _, _, divided in held}
    versions = {divided: whole._version for divided, whole in wholes.items()}
    for parameters, name, divided in held:
        parameters[name] = wholes[divided]
    try:
        yield bool(held)
    finally:
        for parameters, name, divided in held:
            parameters[name] = divided
        for divided, whole in wholes.items():
            if whole._version != versions[divided]:
                from torch.distributed.tensor import distribute_tensor  # here, as it takes long to import

                with torch.no_grad():
                    divided.copy_(distribute_tensor(whole.detach(), divided.device_mesh, divided.placements))


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


def moments(x: Tensor, axes: Sequence[int], channel_axis: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each channel of all processes' tensors, float64: mean and biased variance, with gradients; the number of
    values, rank 0; the smallest and the largest one, [2, channels].

    One exchange forward and one backward, as `torch.nn.SyncBatchNorm` has. Each process sends the mean of its own
    values and their squares about it, which combine without cancellation (Chan, Golub and LeVeque).
    """
    axes, x = list(axes), x.double()
    count = x.numel() // x.shape[channel_axis]
    mean = x.sum(axes) / max(count, 1)
    squares = (x - per_channel(p, mean.detach(), x.dim(), channel_axis)).square().sum(axes)
    ends = x.new_full((2, len(mean)), torch.inf) if count == 0 else torch.stack([x.amin(axes), -x.amax(axes)])
    mean, variance, total, extremes = _Moments.apply(mean, squares, ends.detach(), count)
    if count < 2 and total < 2:
        raise ValueError(f"a training batch needs more than one value per channel over all processes, got {int(total)}")
    return mean, variance, total, extremes


class _Moments(torch.autograd.Function):
    """All processes' moments from those of each, whose gradients are the same everywhere."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, squares: Tensor, ends: Tensor, count: int) -> Any:
        channels = len(mean)
        own = torch.cat([mean, squares, ends.flatten(), mean.new_tensor([count])])
        everyones = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, own)
        means, sums, low, high, counts = torch.stack(everyones).split([channels] * 4 + [1], 1)
        total = counts.sum()
        together = (means * counts).sum(0) / total
        variance = (sums + (means - together).square() * counts).sum(0) / total
        extremes = torch.stack([low.amin(0), -high.amin(0)])
        ctx.save_for_backward(mean - together, total)
        ctx.count = count
        ctx.mark_non_differentiable(total, extremes)
        return together, variance, total, extremes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        apart, total = ctx.saved_tensors
        summed = torch.stack(gradients[:2])
        dist.all_reduce(summed)
        of_mean, of_squares = summed / total
        return ctx.count * (of_mean + 2 * apart * of_squares), of_squares, None, None


def normalized(
    x: Tensor, tensors: BatchNormTensors, epsilon: float, share: float | None, channel_axis: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """A training batch by the statistics of all processes' batches, in float64; moves the running ones. With it the
    smallest and the largest normalized value of all processes, rank 0: every step keeps the order of a channel's
    values, so they are those of its extremes.

    The gradients of scale and offset are those of the share, as DistributedDataParallel averages them itself. share: of
    this batch in the running statistics; None: they stay.
    """
    scale, offset = scale_and_offset(tensors)
    rows = x.movedim(channel_axis, -1).double()
    mean, variance, count, extremes = moments(rows, range(rows.dim() - 1), -1)
    slope = scale.double() / (variance + epsilon).sqrt()
    # The operator's gradients know the mean in the precision of its elements.
    rounded = mean.to(torch.promote_types(x.dtype, torch.float32)).double()
    rest = ((rounded - mean) * slope).detach()

    def on_scale(rows: Tensor) -> Tensor:
        return ((rows - rounded) * slope + offset.double() + rest).to(x.dtype)

    if share is not None:
        with torch.no_grad():
            unbiased = variance * (count / (count - 1))
            for statistic, new in ((tensors.mean, mean), (tensors.variance, unbiased)):
                statistic.copy_((1.0 - share) * statistic.double() + share * new)
    with torch.no_grad():
        ends = on_scale(extremes)
    return on_scale(rows).movedim(-1, channel_axis), ends.amin(), ends.amax()
