# SPDX-License-Identifier: Apache-2.0
"""The device's accumulators in PyTorch, formed without rounding, and how its profiles round them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from exactqat.operators.torch import fused, is_plain

from ...device.arithmetic import fixed_point
from ..core.on_device import Clamp
from ..core.steps import WeightedStep
from .primitives import per_channel

_round_sums, _gradient_of_sums = fused("rounded_sums_by_grid"), fused("rounded_sums_by_grid_gradient")

# Below this, float32 holds every sum of whole numbers. A little less, as the bounds are themselves summed in float32.
_EXACT = 2.0**24 * (1 - 2.0**-12)
# How many float64 a core's L2 cache holds besides everything else.
_CACHED_VALUES = 1 << 15
# What multiplies float32 and may be allowed to use lower precision; before PyTorch 2.9 there is one switch for all.
_UNITS: tuple[Any, ...] = ()
if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    _on_cpu: Any = torch.backends.mkldnn
    _UNITS = (torch.backends.cuda.matmul, _on_cpu.matmul, _on_cpu.conv)
# Of float64, for products of a sum and a 31-bit multiplier that are not clamped anyway.
_LARGEST_EXACT_SHIFT = 12


@dataclass(frozen=True)
class Parts:
    """How a sum is formed without rounding.

    ends: where the parts of the input channels end; float32 can sum each of them. whole: there is one part, and float32
    holds the bias as well. wide: float64 is needed.
    """

    ends: tuple[int, ...] = ()
    whole: bool = True
    wide: bool = False


def parts_of(layer: WeightedStep, codes: Tensor, bias: Tensor, lowest: int, highest: int) -> Parts | None:
    """For operands in lowest..highest. None: weights are not finite."""
    output_axis, input_axis = layer.weight_axis, 1 - layer.weight_axis
    others = [axis for axis in range(codes.dim()) if axis not in (output_axis, input_axis)]
    if not bias.numel():
        return Parts()
    # One pass over the weights, which nearly always suffices. With NaN the sum is NaN.
    sizes = torch.linalg.vector_norm(codes, 1, [input_axis, *others])
    total = float((sizes * max(-lowest, highest) + bias.abs()).amax())
    if math.isnan(total):
        return None
    if total < _EXACT:
        return Parts()
    # Sums of any of the products, in any order, stay between the sum of the negative ones and that of the positive
    # ones.
    magnitude = codes.abs().sum(others) if others else codes.abs()
    signed = codes.sum(others) if others else codes
    if output_axis == 1:
        magnitude, signed = magnitude.T, signed.T
    above, below = (magnitude + signed) / 2, (magnitude - signed) / 2
    reach = torch.stack([above * highest - below * lowest, below * highest - above * lowest])  # [2, out, in / groups]
    if float((reach.sum(2).amax(0) + bias.abs()).amax()) < _EXACT:
        return Parts()
    if float(reach.sum(2).amax()) < _EXACT:
        return Parts(whole=False)
    if layer.attributes.get("groups", 1) != 1:
        return Parts(whole=False, wide=True)
    channels = reach.shape[2]
    for count in range(2, min(channels, 64) + 1):
        size = -(-channels // count)
        ends = tuple(min(end, channels) for end in range(size, channels + size, size))
        if all(float(part.sum(2).amax()) < _EXACT for part in reach.split(size, 2)):
            return Parts(ends, whole=False)
    return Parts(whole=False, wide=True)


def accumulated(layer: WeightedStep, steps: Tensor, codes: Tensor, bias: Tensor, parts: Parts) -> Tensor:
    """The device's accumulators: float32 where it holds them, else float64."""
    with _without_transforms(steps):
        return _accumulated(layer, steps, codes, bias, parts)


@contextmanager
def in_full_float32(device_type: str) -> Iterator[None]:
    """True float32: neither autocast nor, where the program allows them, matrix products in TF32 or bfloat16, which
    round 16-bit codes."""
    with ExitStack() as stack:
        stack.enter_context(torch.autocast(device_type, enabled=False))
        for unit in _UNITS:
            given = unit.fp32_precision
            if given not in ("none", "ieee"):
                stack.callback(setattr, unit, "fp32_precision", given)
                unit.fp32_precision = "ieee"
        if not _UNITS and (given := torch.get_float32_matmul_precision()) != "highest":
            stack.callback(torch.set_float32_matmul_precision, given)
            torch.set_float32_matmul_precision("highest")
        yield


@contextmanager
def _without_transforms(like: Tensor) -> Iterator[None]:
    """Convolutions as sums of products: NNPACK and cuDNN may use Winograd or FFT algorithms, which round."""
    with torch.backends.nnpack.flags(enabled=False):
        if not like.is_cuda:
            yield
            return
        with torch.backends.cudnn.flags(enabled=False):
            yield


def _accumulated(layer: WeightedStep, steps: Tensor, codes: Tensor, bias: Tensor, parts: Parts) -> Tensor:
    if parts.whole:
        return layer.compute(steps, codes, bias)
    axis = layer.channel_axis % steps.dim()
    if parts.wide:
        sums = layer.compute(steps.double(), codes.double(), None)
    elif not parts.ends:
        sums = layer.compute(steps, codes, None).double()
    else:
        starts = (0, *parts.ends[:-1])
        pieces = [
            layer.compute(
                steps.narrow(axis, start, end - start),
                codes.narrow(1 - layer.weight_axis, start, end - start),
                None,
            ).double()
            for start, end in zip(starts, parts.ends, strict=True)
        ]
        sums = torch.stack(pieces).sum(0) if len(pieces) > 2 else pieces[0] + pieces[1]
    return sums + per_channel(bias.double(), sums.dim(), layer.channel_axis % sums.dim())


def is_at_hand(sums: Tensor) -> bool:
    """Whether the kernels take them."""
    return sums.is_cpu and sums.dtype == torch.float32 and is_plain(sums)


def rounded(
    sums: Tensor, scale: Tensor, axis: int, input_scale: float, result: Clamp, rounding: str, differentiated: bool
) -> Tensor:
    """The device's steps, by kernels that read the sums once in the forward pass and once in the backward one.

    sums: such that `is_at_hand`. scale: of the weight, float32 [channels] or [1]. rounding: one of
    `device.weighted.ROUNDINGS`.
    """
    with torch.no_grad():
        scale = scale.expand(sums.shape[axis]).contiguous()
        ends = (result.lowest, result.highest, result.low, result.high)
        grid = torch.tensor((input_scale, float(result.scale), *ends), dtype=torch.float32)
        dense = sums.detach().movedim(axis, -1).contiguous()
        steps = cast(Tensor, _round_sums(dense, scale, grid, rounding=rounding)).movedim(-1, axis)
    return cast(Tensor, _Rounded.apply(sums, steps, scale, grid, axis)) if differentiated else steps


class _Rounded(torch.autograd.Function):
    """The steps, with the gradient of the scaled sums in float32 where these are between two ends."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, steps: Tensor, scale: Tensor, grid: Tensor, axis: int) -> Tensor:
        ctx.save_for_backward(sums, scale, grid)
        ctx.axis = axis
        return steps.view_as(steps)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        sums, scale, grid = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_at_hand(gradient):
            input_scale, result_scale, _, _, low, high = grid.tolist()
            factor = per_channel(scale * input_scale / grid[1], sums.dim(), ctx.axis)
            found = torch.ops.aten.hardtanh_backward(gradient, sums * factor, low, high) * factor
        else:
            # The gradient of a mean, say, comes in another memory order; a copy costs less than the three passes above.
            dense = (each.movedim(ctx.axis, -1).contiguous() for each in (gradient, sums))
            found = _gradient_of_sums(*dense, scale, grid).movedim(-1, ctx.axis)
        return found, None, None, None, None


def rounded_once(factor: np.ndarray, sums: Tensor, axis: int, result: Clamp, in_place: bool) -> Tensor:
    """`device.weighted.ROUNDINGS`: float64."""
    along = _along(factor, sums, axis)
    half = torch.full((), 0.5, dtype=torch.float64, device=sums.device)

    def of_block(block: Tensor) -> Tensor:
        scaled = block.double() * along
        scaled.add_(_with_sign(half, scaled))
        # The nearest integer towards 0; `trunc` takes many times as long.
        return scaled.abs().floor_().mul_(scaled.sign_())

    return _in_blocks(of_block, sums, result, in_place)


def rounded_twice(factor: np.ndarray, sums: Tensor, axis: int, result: Clamp, in_place: bool) -> Tensor:
    """`device.weighted.ROUNDINGS`: fixed_point.

    The doubled high product is rounded half up, what is then shifted out half away from zero. For shifts s > 0
    both together are floor(x + 1/2 + 2**-(s + 1)) of the exact product x, with the last term subtracted where x is
    negative. float64 holds all of that for results below 2**9 while the shift is small; larger ones are clamped.
    """
    significand, exponent = fixed_point(factor)
    if exponent.min(initial=0) < -_LARGEST_EXACT_SHIFT or exponent.max(initial=0) > 0:
        return _in_blocks(_rounding_twice_in_int64(significand, exponent, sums, axis), sums, result, in_place)
    product = np.ldexp(significand.astype(np.float64), exponent - 31)
    sign = np.where(exponent < 0, np.ldexp(1.0, exponent - 1), 0.0)
    along, nudge = _along(product, sums, axis), _along(sign, sums, axis)

    def of_block(block: Tensor) -> Tensor:
        scaled = block.double() * along
        return scaled.add_(_with_sign(nudge, scaled)).add_(0.5).floor_()

    return _in_blocks(of_block, sums, result, in_place)


def _with_sign(magnitude: Tensor, of: Tensor) -> Tensor:
    # In the other's memory order, which PyTorch does not choose by itself.
    return torch.copysign(magnitude, of, out=torch.empty_like(of))


def _rounding_twice_in_int64(
    significand: np.ndarray, exponent: np.ndarray, sums: Tensor, axis: int
) -> Callable[[Tensor], Tensor]:
    left, right = (_along(shift, sums, axis) for shift in (np.maximum(exponent, 0), np.maximum(-exponent, 0)))
    factor, half = _along(significand, sums, axis), (1 << right) >> 1

    def of_block(block: Tensor) -> Tensor:
        shifted = (block.long() << left).to(torch.int32).long()  # int32 wraps in the kernels too
        high = (shifted * factor + 2**30) >> 31
        return (high + half - ((high < 0) & (right > 0)).long()) >> right

    return of_block


def _in_blocks(function: Callable[[Tensor], Tensor], sums: Tensor, end: Clamp, in_place: bool) -> Tensor:
    """In float32 and clamped, a few rows at a time: float64 intermediates stay in the cores' own caches."""
    result = sums if in_place and sums.dtype == torch.float32 else torch.empty_like(sums, dtype=torch.float32)
    # PyTorch divides a block among its threads, always in the same way.
    together = _CACHED_VALUES * torch.get_num_threads() if sums.device.type == "cpu" else sums.numel()
    rows = max(together * sums.shape[0] // max(sums.numel(), 1), 1)
    for start in range(0, sums.shape[0], rows):
        block = result[start : start + rows]
        block.copy_(function(sums[start : start + rows])).clamp_(end.lowest, end.highest)
    return result


def _along(vector: np.ndarray, like: Tensor, axis: int) -> Tensor:
    """A vector [channels] along one axis; also a single value for all channels."""
    return per_channel(torch.from_numpy(np.ascontiguousarray(vector)).to(like.device), like.dim(), axis)
