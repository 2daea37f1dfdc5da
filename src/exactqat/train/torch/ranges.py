# SPDX-License-Identifier: Apache-2.0
"""Modules that hold ranges; `train.core.ranges` says how these move.

A range with min > max is refused when it enters (constructor, `load_state_dict`).
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from exactqat.torch import is_plain

from ...device.operator import ScaleLimits
from ...display import shortened
from ...planning.plans import SMALLEST_WIDTH, MissingData, without_data
from ...planning.rules import Rule
from ..core import ranges as core
from ..core.weights import learned_ends, limited_magnitude, step_width, weight_ends
from . import primitives as p

# Bits of activations that the device stores in int16.
WIDE_BITS = 16
# From here on, differences are infinite in float32.
_TOO_WIDE = 2.0**128 - 2.0**103


class ActivationRange(nn.Module):
    """The range of one stored tensor. Calling it gives ``(min, max)``, both rank 0, min <= 0 <= max; with 16 bits these
    are the ends of the symmetric grid that holds the range.

    State: ``minimum``, ``maximum`` (parameters if they are trained, else buffers) and ``batches``, the number of
    batches seen, so that a range without data is noticed.
    """

    minimum: Tensor
    maximum: Tensor
    batches: Tensor
    # The network layer that stores on it.
    name = ""

    def __init__(self, rule: Rule, nonnegative: bool = False, trained: bool = True) -> None:
        """
        Args:
            rule: decides policy, bits and decay.
            nonnegative: the tensor has no values below zero (it comes from a ReLU): the minimum stays 0.
            trained: False leaves a learned range as calibration has found it.
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
        # `batches` and its version once there were some.
        self._counted: tuple[Tensor | None, int] = (None, -1)
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
        """Minimum, maximum and the number of batches, all rank 0, as stored."""
        return self.minimum, self.maximum, self.batches

    def forget_shown(self) -> None:
        """Discards what an unfinished batch has shown."""
        self._shown.clear()

    @property
    def is_int16(self) -> bool:
        """Whether the device stores int16."""
        return self.bits == WIDE_BITS

    @property
    def follows_training_data(self) -> bool:
        """Whether every training batch moves the range (outside of gradients)."""
        return self.policy in core.FOLLOWING

    @torch.no_grad()
    def observe(self, activation: Tensor) -> None:
        """Takes one batch into account; a fixed range stays as it is."""
        if self.policy == "fixed":
            return
        low, high = self._ends(activation)
        if self.policy == "learned":
            low, high = core.with_zero(p, low.to(self.minimum.dtype), high.to(self.minimum.dtype), self.nonnegative)
            low, high = core.learned_start(p, activation.to(low.dtype), low, high, self.bits, self.is_int16)
        self.observe_ends(low, high)

    def observe_ends(self, low: Tensor, high: Tensor) -> None:
        """`observe` from a batch's extremes, rank 0 and without gradients, if no policy has to see more of it."""
        minimum, maximum, batches = self.minimum, self.maximum, self.batches
        if self.writers == 1 and _are_at_hand(minimum, maximum) and is_plain(low):
            # A few numbers: a small layer takes less time than PyTorch's operators on them.
            ends = core.with_zero(core.scalars, low.item(), high.item(), self.nonnegative)
            if not ends[1] - ends[0] < _TOO_WIDE:
                return
            shown, before = ((np.float32(a), np.float32(b)) for a, b in (ends, (minimum.item(), maximum.item())))
            moved = core.observed(core.scalars, self.policy, self.decay, [shown], 1, before, batches.item())
            for held, value in zip((minimum, maximum, batches), moved, strict=True):
                held.fill_(value)
        else:
            self._observe_tensors(low, high)

    @torch.no_grad()
    def _observe_tensors(self, low: Tensor, high: Tensor) -> None:
        # Nothing is read from a tensor here: that would end a compiled graph, and wait for a GPU.
        # Under autocast an activation may have 16 bits; ranges never do.
        low, high = (end.to(self.minimum.dtype) for end in (low, high))
        had_data = self._is_known_to_have_data()
        self._shown.append(core.with_zero(p, low, high, self.nonnegative))
        moved = core.observed(
            p, self.policy, self.decay, self._shown, self.writers, (self.minimum, self.maximum), self.batches
        )
        if len(self._shown) == self.writers:
            self._shown.clear()
        for held, value in zip((self.minimum, self.maximum, self.batches), moved, strict=True):
            held.copy_(value)
        if had_data:
            self._remember_data()

    def _ends(self, activation: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and largest value of a tensor, rank 0; under "percentile" without those beyond it."""
        if self.policy != "percentile":
            # After a ReLU there is nothing below zero to look for.
            low = activation.new_zeros(()) if self.nonnegative else activation.amin()
            return low, activation.amax()
        values = activation.flatten()
        rank = core.rank_of_ends(self.percentile, values.numel())
        return values.kthvalue(rank).values, values.kthvalue(values.numel() + 1 - rank).values

    def forward(self) -> tuple[Tensor, Tensor]:
        # Copies of what the next batch may move: an operator may keep them for its backward pass.
        low, high = (
            end.clone() if end is kept and not end.requires_grad else end
            for end, kept in zip(self.at_this_moment(), (self.minimum, self.maximum), strict=True)
        )
        return low, high

    def at_this_moment(self) -> tuple[Tensor, Tensor]:
        """What a call returns, for callers that keep neither: the next batch may move them."""
        minimum, maximum = self.minimum, self.maximum
        at_hand = _are_at_hand(minimum, maximum)
        if self.policy != "fixed" and not self._shown:
            if torch.compiler.is_compiling():  # where values must not decide what is called
                torch._assert_async(self.batches > 0, without_data([self.named()]))
            elif not self._has_data():
                raise MissingData(without_data([self.named()]))
        if self.policy == "learned":
            if not at_hand or minimum.item() > 0:
                minimum = core.below_zero(p, minimum)
            if not at_hand or maximum.item() < 0:
                maximum = core.above_zero(p, maximum)
        if not (at_hand and maximum.item() - minimum.item() > 2 * SMALLEST_WIDTH):
            minimum, maximum = core.with_width(p, minimum, maximum)
        return core.symmetric(p, minimum, maximum) if self.is_int16 else (minimum, maximum)

    def _has_data(self) -> bool:
        """Whether a batch was seen. Asking a GPU means waiting for it, so it is done once for each state of the
        count."""
        if self._is_known_to_have_data():
            return True
        if self.batches.item() == 0:
            return False
        self._remember_data()
        return True

    def _is_known_to_have_data(self) -> bool:
        held, version = self._counted
        return held is self.batches and version == held._version

    def _remember_data(self) -> None:
        if not (self.batches.is_cpu or self.batches.is_inference() or torch.compiler.is_compiling()):
            self._counted = (self.batches, self.batches._version)

    @torch.no_grad()
    def scale_so_far(self) -> tuple[Tensor, Tensor]:
        """The width of a step, and whether the range has seen data, without which the width means nothing; rank 0."""
        ends = core.usable(p, self.minimum.clamp(max=0.0), self.maximum.clamp(min=0.0), self.is_int16)
        seen = torch.ones_like(self.batches) if self.policy == "fixed" else self.batches
        return step_width(ends, self.bits, False), seen > 0

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        low, high = state_dict.get(prefix + "minimum"), state_dict.get(prefix + "maximum")
        if low is not None and high is not None and self.policy == "learned":
            # Training may have left an end beyond zero; it counts as zero.
            low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        if low is not None and high is not None and not low <= 0 <= high:
            raise ValueError(f"{prefix}minimum and {prefix}maximum must hold min <= 0 <= max, got {low}, {high}")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"policy={self.policy}, min={float(self.minimum):.6g}, max={float(self.maximum):.6g}"


def _are_at_hand(minimum: Tensor, maximum: Tensor) -> bool:
    """Whether numbers can be read for next to nothing."""
    return not torch.compiler.is_compiling() and minimum.is_cpu and is_plain(minimum) and is_plain(maximum)


class WeightRange(nn.Module):
    """The range of one layer's weight. Calling it with the weight gives ``(min, max)``, [d] or rank 0.

    Under ``"learned"`` the bounds are parameters that start where the squared error of the weight is least; otherwise
    they are the extremes of the weight at each call, and the module has no state.
    """

    def __init__(self, rule: Rule, weight: Tensor, end: np.ndarray | None = None) -> None:
        """
        Args:
            weight: channels last; the learned bounds start from it.
            end: where the learned bounds start instead.
        """
        super().__init__()
        self.rule = rule
        self.learned = rule.ranges == "learned"
        if self.learned:
            with torch.no_grad():
                given = None if end is None else torch.as_tensor(end, device=weight.device)
                for name, value in learned_ends(p, rule, weight, given).items():
                    setattr(self, name, nn.Parameter(value.clone()))

    def forward(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight_ends(p, self.rule, weight, self._parameters if self.learned else None)

    def magnitudes(self) -> Tensor:
        """The upper bounds of symmetric learned ranges."""
        maximum = cast(Tensor, self.maximum)
        at_hand = not torch.compiler.is_compiling() and maximum.is_cpu and is_plain(maximum)
        return maximum if at_hand and maximum.detach().amin().item() >= 0 else core.above_zero(p, maximum)

    def extra_repr(self) -> str:
        return "learned" if self.learned else "largest magnitude"


class ConstantRange(WeightRange):
    """The range of a constant operand: its largest magnitude, as far as the operator accepts its scale, given those of
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
        steps = core.grid_steps(self.bits, self.rule.narrow_range)
        high = limited_magnitude(p, high, steps, self.limits, (other, result), other_seen & result_seen)
        return -high, high
