# SPDX-License-Identifier: Apache-2.0
"""Range policies: where the min and max of a quantized tensor come from.

Four rules hold for every policy. A range always contains zero, so that zero (padding, ReLU's floor) is represented
exactly. A range with min > max is refused when it enters (constructor, `load_state_dict`). An activation range narrower
than `SMALLEST_WIDTH`, such as that of a tensor which is always zero, has no usable scale; ``[0, 1]`` stands in for it,
in training and on the device alike. Weights need no such rule: a channel whose range is zero is all zero. A range of 16
bits is symmetric, because the zero point of int16 is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

import exactqat as eq
from exactqat.torch import is_plain

from ..device.operator import ScaleLimits
from ..display import shortened
from ..planning.fitting import constant_step
from ..planning.plans import SMALLEST_WIDTH, MissingData, without_data
from ..planning.rules import Rule

_CLIPPING_CANDIDATES = 24
# Of activations that the device stores in int16.
WIDE_BITS = 16


def grid_steps(bits: int, narrow_range: bool) -> int:
    """Steps between the lowest and the highest code."""
    return 2**bits - 1 - int(narrow_range)


def least_error_fraction(channels_last: Tensor, minimum: Tensor, maximum: Tensor, bits: int, narrow: bool) -> Tensor:
    """The fraction of a range, from 1 down to about a quarter, that quantizes a tensor with the least squared error.

    Args:
        channels_last: any shape; with `minimum` and `maximum` of shape [d], the last axis is d.
        minimum, maximum: rank 0 or [d].

    Returns:
        Of the shape of `minimum`.
    """
    best_error = torch.full_like(minimum, torch.inf)
    best = torch.ones_like(minimum)
    for step in range(_CLIPPING_CANDIDATES):
        fraction = 1.0 - step / 32
        quantized = fake_quantize(channels_last, minimum * fraction, maximum * fraction, bits, narrow)
        squared = (quantized - channels_last).square()
        error = squared.sum() if minimum.dim() == 0 else squared.flatten(0, -2).sum(0)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = torch.where(better, torch.full_like(best, fraction), best)
    return best


def fake_quantize(channels_last: Tensor, minimum: Tensor, maximum: Tensor, bits: int, narrow_range: bool) -> Tensor:
    """TensorFlow's fake quantization, per tensor for rank 0 bounds and per channel of the last axis for bounds [d]."""
    operators: Any = eq.quantization
    operator = operators.fake_quant_with_min_max_vars_per_channel
    if minimum.dim() == 0:
        operator = operators.fake_quant_with_min_max_vars
    return cast(Tensor, operator(channels_last, minimum, maximum, num_bits=bits, narrow_range=narrow_range))


class ActivationRange(nn.Module):
    """The range of one stored tensor. Calling it gives ``(min, max)``, both rank 0, min <= 0 <= max; with 16 bits these
    are the ends of the symmetric grid that holds the range.

    State: ``minimum``, ``maximum`` (parameters where they are trained, else buffers) and ``batches``, the number
    of batches seen, so that a range without data is noticed.
    """

    minimum: Tensor
    maximum: Tensor
    batches: Tensor
    # The layer that stores on it, of a network.
    name = ""

    def __init__(self, rule: Rule, nonnegative: bool = False, trained: bool = True) -> None:
        """
        Args:
            rule: decides policy, bits and decay.
            nonnegative: the tensor has no values below zero (it comes from a ReLU): the minimum stays 0.
            trained: False leaves a range that is learned as calibration has found it.
        """
        super().__init__()
        self.policy = rule.ranges
        self.bits = rule.activation_bits
        self.decay = rule.ema_decay
        self.percentile = rule.percentile
        self.nonnegative = nonnegative
        # Layers that store a tensor under this range. What they show of one batch counts together, as one tensor.
        self.writers = 1
        self._shown: list[tuple[Tensor, Tensor]] = []
        low, high = rule.fixed_range if rule.fixed_range is not None else (0.0, 0.0)
        self.register_buffer("batches", torch.tensor(0))
        if self.policy == "learned" and trained:
            self.maximum = nn.Parameter(torch.tensor(float(high)))
            if nonnegative:
                self.register_buffer("minimum", torch.tensor(0.0))
            else:
                self.minimum = nn.Parameter(torch.tensor(float(low)))
        else:
            self.register_buffer("minimum", torch.tensor(float(low)))
            self.register_buffer("maximum", torch.tensor(float(high)))

    def named(self) -> str:
        """What messages call it."""
        return f"'{shortened(self.name)}'" if self.name else "a tensor"

    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        """Minimum, maximum and the number of batches, all rank 0, as they are kept."""
        return self.minimum, self.maximum, self.batches

    def forget_shown(self) -> None:
        """Leaves out what a batch that came to no end has shown."""
        self._shown.clear()

    @property
    def follows_training_data(self) -> bool:
        """Whether every training batch moves the range (outside of gradients)."""
        return self.policy in ("ema", "last_batch", "percentile")

    @torch.no_grad()
    def observe(self, activation: Tensor) -> None:
        """Takes one batch into account; a fixed range stays as it is."""
        if self.policy == "fixed":
            return
        low, high = self._ends(activation)
        if self.policy == "learned":
            # Gradients reach a bound only through values outside of it, so the start must already clip a little.
            low, high = self._within_zero(low, high)
            ends = _with_width(low, high)
            ends = _symmetric(*ends) if self.bits == WIDE_BITS else ends
            fraction = least_error_fraction(activation.to(low.dtype), *ends, bits=self.bits, narrow=False)
            low, high = low * fraction, high * fraction
        self.observe_ends(low, high)

    def observe_ends(self, low: Tensor, high: Tensor) -> None:
        """`observe` by what a batch asks for, rank 0 and without gradients, where no policy has to see more of it.

        Values that are not finite say nothing about a range, and would never leave an average again: such a batch does
        not count.
        """
        minimum, maximum, batches = self.minimum, self.maximum, self.batches
        if self.writers == 1 and _are_at_hand(minimum, maximum) and is_plain(low):
            # A few numbers: a small layer takes less time than PyTorch's operators on them.
            ends = 0.0 if self.nonnegative else min(low.item(), 0.0), max(high.item(), 0.0)
            if not math.isfinite(ends[1] - ends[0]):
                return
            low_end, high_end = self._moved(min, max, *ends, minimum.item(), maximum.item(), batches.item())
            minimum.fill_(low_end)
            maximum.fill_(high_end)
            batches.add_(1)
        else:
            self._observe_tensors(low, high)

    @torch.no_grad()
    def _observe_tensors(self, low: Tensor, high: Tensor) -> None:
        low, high = self._within_zero(low, high)
        complete = True
        if self.writers > 1:
            self._shown.append((low, high))
            low = torch.stack([bounds[0] for bounds in self._shown]).amin()
            high = torch.stack([bounds[1] for bounds in self._shown]).amax()
            complete = len(self._shown) == self.writers
            if complete:
                self._shown.clear()
        # Nothing is read from a tensor here: that would end a compiled graph, and wait for a GPU.
        known = [end.double() for end in (low, high, self.minimum, self.maximum, self.batches)]
        takes = torch.isfinite(known[1] - known[0])
        low, high = (end.to(self.minimum.dtype) for end in self._moved(torch.minimum, torch.maximum, *known))
        if not complete:  # what some writers show opens a range, and moves none
            takes = takes & (self.batches == 0)
        low, high = torch.where(takes, low, self.minimum), torch.where(takes, high, self.maximum)
        self.minimum.copy_(low)
        self.maximum.copy_(high)
        if complete:
            self.batches.add_(takes)

    def _moved(
        self,
        smaller: Callable[[Any, Any], Any],
        larger: Callable[[Any, Any], Any],
        low: Any,
        high: Any,
        minimum: Any,
        maximum: Any,
        batches: Any,
    ) -> tuple[Any, Any]:
        """The range after one more batch: of numbers or of tensors, in float64, so that both give the same bits."""
        if self.policy == "min_max":
            return smaller(low, minimum), larger(high, maximum)
        if self.policy == "last_batch":
            return low, high
        # The first batch sets the range; the average then runs over all batches until the decay takes over.
        keep = smaller(batches / (batches + 1), batches * 0 + self.decay)
        return low + (minimum - low) * keep, high + (maximum - high) * keep

    def _within_zero(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """What one tensor of one batch asks for, rank 0, low <= 0 <= high."""
        # Under autocast an activation may have 16 bits; ranges never have. Behind a ReLU nothing is below zero.
        low, high = (end.to(self.minimum.dtype) for end in (low, high))
        return (torch.zeros_like(low) if self.nonnegative else low.clamp(max=0.0)), high.clamp(min=0.0)

    def _ends(self, activation: Tensor) -> tuple[Tensor, Tensor]:
        """Where the values of a tensor begin and end, rank 0; under "percentile" without those beyond it."""
        if self.policy != "percentile":
            # Behind a ReLU there is nothing below zero to look for.
            low = activation.new_zeros(()) if self.nonnegative else activation.amin()
            return low, activation.amax()
        values = activation.flatten()
        rank = self._rank_of_ends(values.numel())
        return values.kthvalue(rank).values, values.kthvalue(values.numel() + 1 - rank).values

    def _rank_of_ends(self, count: int) -> int:
        """Which of the sorted `count` values is the end by the percentile; 1: the smallest, or the largest, of all."""
        return count + 1 - math.ceil(self.percentile / 100 * count)

    def forward(self) -> tuple[Tensor, Tensor]:
        # Copies of what the next batch may move: an operator may keep them for its backward pass.
        low, high = (
            end.clone() if end is kept and not end.requires_grad else end
            for end, kept in zip(self.at_this_moment(), (self.minimum, self.maximum), strict=True)
        )
        return low, high

    def at_this_moment(self) -> tuple[Tensor, Tensor]:
        """What a call gives, for those who keep neither: the next batch may move them."""
        minimum, maximum = self.minimum, self.maximum
        at_hand = _are_at_hand(minimum, maximum)
        if self.policy != "fixed" and not self._shown:
            if torch.compiler.is_compiling():  # where no value decides what is called
                torch._assert_async(self.batches > 0, without_data([self.named()]))
            elif self.batches.item() == 0:
                raise MissingData(without_data([self.named()]))
        if self.policy == "learned":
            # An optimizer's step may cross zero, where the gradient would end for good. `.data`: a version counter must
            # not move, another forward of the same step may have saved this tensor (with these very values) for its
            # backward.
            if not at_hand or minimum.item() > 0:
                minimum.data.clamp_(max=0.0)
            if not at_hand or maximum.item() < 0:
                maximum.data.clamp_(min=0.0)
        if not (at_hand and maximum.item() - minimum.item() > 2 * SMALLEST_WIDTH):
            minimum, maximum = _with_width(minimum, maximum)
        return _symmetric(minimum, maximum) if self.bits == WIDE_BITS else (minimum, maximum)

    @torch.no_grad()
    def scale_so_far(self) -> tuple[Tensor, Tensor]:
        """The width of a step, and whether the range has seen data, without which the width says nothing; rank 0."""
        minimum, maximum = _with_width(self.minimum.clamp(max=0.0), self.maximum.clamp(min=0.0))
        if self.bits == WIDE_BITS:
            minimum, maximum = _symmetric(minimum, maximum)
        seen = torch.ones_like(self.batches) if self.policy == "fixed" else self.batches
        return (maximum - minimum) / grid_steps(self.bits, False), seen > 0

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        low, high = state_dict.get(prefix + "minimum"), state_dict.get(prefix + "maximum")
        if low is not None and high is not None and not low <= 0 <= high:
            raise ValueError(f"{prefix}minimum and {prefix}maximum must hold min <= 0 <= max, got {low}, {high}")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"policy={self.policy}, min={float(self.minimum):.6g}, max={float(self.maximum):.6g}"


def _are_at_hand(minimum: Tensor, maximum: Tensor) -> bool:
    """Whether numbers can be read for next to nothing."""
    return not torch.compiler.is_compiling() and minimum.is_cpu and is_plain(minimum) and is_plain(maximum)


def _with_width(minimum: Tensor, maximum: Tensor) -> tuple[Tensor, Tensor]:
    collapsed = maximum - minimum < SMALLEST_WIDTH
    return torch.where(collapsed, 0.0, minimum), torch.where(collapsed, 1.0, maximum)


def _symmetric(minimum: Tensor, maximum: Tensor) -> tuple[Tensor, Tensor]:
    """The ends -32768 and 32767 steps from 0, so that 32767 steps reach the larger magnitude, as TensorFlow Lite's
    quantizer has it."""
    step = torch.maximum(-minimum, maximum) / (2**15 - 1)
    return step * -(2.0**15), step * (2**15 - 1)


class WeightRange(nn.Module):
    """The range of one layer's weight. Calling it with the weight gives ``(min, max)``, [d] or rank 0.

    Under ``"learned"`` the bounds are parameters that start where the squared error of the weight is least; otherwise
    they are the extremes of the weight at each call, and the module has no state.
    """

    def __init__(self, rule: Rule, weight: Tensor) -> None:
        """
        Args:
            weight: channels last; the learned bounds start from it.
        """
        super().__init__()
        self.rule = rule
        self.learned = rule.ranges == "learned"
        if self.learned:
            with torch.no_grad():
                low, high = self._extremes(weight)
                fraction = least_error_fraction(weight, low, high, rule.weight_bits, rule.narrow_range)
            self.maximum = nn.Parameter(high * fraction)
            if not rule.symmetric:
                self.minimum = nn.Parameter(low * fraction)

    def _extremes(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        weight = weight.detach()
        columns = weight.reshape(-1, weight.shape[-1]) if self.rule.per_channel else weight.reshape(-1)
        if self.rule.symmetric:
            magnitude = columns.abs().amax(0)
            return -magnitude, magnitude
        return columns.amin(0).clamp(max=0.0), columns.amax(0).clamp(min=0.0)

    def magnitudes(self) -> Tensor:
        """The upper bounds of learned ranges that are symmetric."""
        self.maximum.data.clamp_(min=0.0)
        return self.maximum

    def forward(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        if not self.learned:
            return self._extremes(weight)
        if self.rule.symmetric:
            magnitudes = self.magnitudes()
            return -magnitudes, magnitudes
        self.maximum.data.clamp_(min=0.0)
        self.minimum.data.clamp_(max=0.0)
        return self.minimum, self.maximum

    def extra_repr(self) -> str:
        return "learned" if self.learned else "largest magnitude"


class ConstantRange(WeightRange):
    """The range of a constant operand: its largest magnitude, as far as the operator takes its scale beside those of
    the other operand and of the result (see `planning.fitting`). It has no state."""

    def __init__(
        self,
        rule: Rule,
        values: Tensor,
        bits: int,
        limits: ScaleLimits,
        others: tuple[ActivationRange, ActivationRange],
    ) -> None:
        """
        Args:
            rule: one per-tensor range that is not learned.
            bits: of the constant's codes.
            others: the ranges of the other operand and of the result.
        """
        super().__init__(rule, values)
        self.bits = bits
        self.limits = limits
        # In a tuple, so that these are not registered as children a second time.
        self._others = others

    def forward(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        low, high = super().forward(weight)
        if not self.rule.symmetric:
            return low, high
        (other, other_seen), (result, result_seen) = (each.scale_so_far() for each in self._others)
        least, most = constant_step(self.limits, other, result)
        seen = other_seen & result_seen
        reach = grid_steps(self.bits, self.rule.narrow_range) / 2
        high = torch.where(seen, high.clamp(least * reach, most * reach), high)
        return -high, high

    def wanted(self, weight: Tensor) -> float:
        """The scale that the values ask for."""
        low, high = super().forward(weight)
        return float(high - low) / grid_steps(self.bits, self.rule.narrow_range)
