# SPDX-License-Identifier: Apache-2.0
"""Weights whose codes go back and forth in training at few bits: how many there are, and holding them still."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....kit.display import shortened
from ....kit.planning.plans import PlanStep
from ..core.weights import per_channel
from . import primitives
from .prepared import PreparedModel, prepared_model


@dataclass
class _Layer:
    """Of a weight, all of its shape.

    Attributes:
        codes: after the last step.
        direction: in which each code moved last; 0: it has not moved.
        frequency: moving average of turns, 0..1.
        average: moving average of the codes.
        held: the code that a weight is held at; NaN where it trains.
        flipped: how many codes the last step changed.
    """

    codes: Tensor
    direction: Tensor
    frequency: Tensor
    average: Tensor
    held: Tensor
    flipped: int = 0


class Oscillations:
    """Counts how often the codes of weights flip in training, and holds still the weights that oscillate::

        oscillations = qat.Oscillations(model)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            oscillations.step()
        print(oscillations)

    At few bits a weight near the middle between two codes is pushed across it by nearly every step, and back by the
    next one; its noise is the batch norms' and the other weights' too. A weight whose code has turned back in more than
    a share of the last steps is held at the code that it had on average (iterative weight freezing, arXiv:2203.11086).
    That raised the accuracy of one network of two at 3 bits and of none at 4: let validation examples decide.

    Weights that are shared, folded with batch norm before they are quantized, or computed from others are counted, but
    not held.
    """

    def __init__(self, model: PreparedModel, hold_above: float | None = 0.02, momentum: float = 0.02) -> None:
        """
        Args:
            model: what `prepare` returned, before or after `freeze`.
            hold_above: 0..1, the share of steps in which a code turns back, above which its weight is held. None:
                flips are only counted.
            momentum: 0..1, of the moving averages, over some ``1 / momentum`` steps.

        Raises:
            TypeError: the model is not prepared.
            ValueError: a number is outside of its range.
        """
        self._model = prepared_model(model)
        for name, value in {"hold_above": hold_above, "momentum": momentum}.items():
            if value is not None and not (isinstance(value, float | int) and 0 < value < 1 and math.isfinite(value)):
                raise ValueError(f"{name} must be a number above 0 and below 1, got {value!r}")
        self.hold_above, self.momentum = hold_above, momentum
        self._layers: dict[str, _Layer] = {}

    @torch.no_grad()
    def step(self) -> None:
        """To be called after each step of the optimizer."""
        for step in self._model.plan.steps:
            if step.weights is not None:
                self._step(step)

    def _step(self, step: PlanStep) -> None:
        assert step.weights is not None
        state, weights = self._model._state, step.weights
        if state.functional.weight_owner[step.path] != step.path:
            return  # the same weight as another step's
        weight = state.constant(weights.weight)
        codes, scale = self._codes(step, weight)
        layer = self._layers.get(step.path)
        if layer is None or layer.codes.shape != codes.shape:
            zeros = torch.zeros_like(codes)
            self._layers[step.path] = _Layer(
                codes, zeros, zeros.clone(), codes.clone(), torch.full_like(codes, math.nan)
            )
            return
        codes = torch.where(layer.held.isnan(), codes, layer.held)
        moved = codes - layer.codes
        turned = moved * layer.direction < 0
        layer.flipped = int(torch.count_nonzero(moved))
        layer.direction = torch.where(moved == 0, layer.direction, moved.sign())
        layer.frequency.lerp_(turned.to(codes.dtype), self.momentum)
        layer.average.lerp_(codes, self.momentum)
        layer.codes = codes
        folded = weights.rule.fold_batch_norm and weights.batch_norm is not None
        if self.hold_above is None or folded or not (isinstance(weight, nn.Parameter) and weight.requires_grad):
            return
        oscillates = (layer.frequency > self.hold_above) & layer.held.isnan()
        layer.held = torch.where(oscillates, layer.average.round(), layer.held)
        weight.copy_(torch.where(layer.held.isnan(), weight, layer.held * scale))
        layer.codes = torch.where(layer.held.isnan(), codes, layer.held)

    def _codes(self, step: PlanStep, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A weight's codes, in float32, and the scale of each, which broadcasts."""
        assert step.weights is not None
        grid, quantizing = self._model._state.weight_grid(step.path, step.weights), self._model.quantizing
        self._model.quantizing = True
        try:
            quantized, scale = grid(weight), grid.scale(weight)
        finally:
            self._model.quantizing = quantizing
        scale = per_channel(primitives, scale, weight.ndim, step.weights.channel_axis)
        return torch.where(scale > 0, quantized / scale, 0.0).round(), scale

    def flips(self) -> dict[str, float]:
        """By layer, the share of the weight's codes that the last step changed, 0..1."""
        return {path: layer.flipped / layer.codes.numel() for path, layer in self._layers.items()}

    def held(self) -> dict[str, float]:
        """By layer, the share of the weight's codes that are held, 0..1."""
        return {path: float(1 - layer.held.isnan().float().mean()) for path, layer in self._layers.items()}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """For a checkpoint beside the model's and the optimizer's."""
        return {path: dict(vars(layer)) for path, layer in self._layers.items()}

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Continues from what `state_dict` returned."""
        self._layers = {path: _Layer(**tensors) for path, tensors in state.items()}

    def __str__(self) -> str:
        flips, held = self.flips(), self.held()
        width = max(len(shortened(path)) for path in ("layer", *self._layers))
        lines = [f"{'layer':{width}}  weights  flipped    held"]
        for path, layer in self._layers.items():
            lines.append(f"{shortened(path):{width}}  {layer.codes.numel():7,}  {flips[path]:7.2%}  {held[path]:6.2%}")
        return "\n".join(lines)
