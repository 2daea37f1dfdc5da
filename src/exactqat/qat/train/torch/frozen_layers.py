# SPDX-License-Identifier: Apache-2.0
"""A frozen layer as one operation of autograd: its weight's codes, the accumulators and what the device rounds them to;
the bits are those of `core.accumulators.layer_steps`, where float32 holds every sum.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from exactqat.operators.torch import declared

from ..core.accumulators import LayerVectors, sums_fit
from ..core.on_device import ROUNDED_BY
from ..core.steps import WeightedStep
from .image_layers import ImageLayer, Window, is_image
from .primitives import channels_first_view, channels_last_view, straight_through

_ROUND, _ROUND_GRADIENT = declared("rounded_sums_by_grid"), declared("rounded_sums_by_grid_gradient")


class FrozenLayer(ImageLayer):
    """A frozen layer of images, for calls that `is_unwatched` approves."""

    @staticmethod
    def of(layer: object) -> FrozenLayer | None:
        """The layer as one operation, if it is of that kind."""
        return FrozenLayer(layer) if isinstance(layer, WeightedStep) and ImageLayer.fits(layer) else None

    def __call__(self, x: Tensor, vectors: LayerVectors, numbers: Tensor, rounding: str, fits: bool) -> Tensor | None:
        """What `layer_steps` returns; None for what it has to compute otherwise.

        Args:
            x: the operand's steps from real 0.
            numbers: as `DeviceSteps.rounded_by` returns them.
            rounding: of the operator `rounded_sums_by_grid`.
            fits: whether float32 is known to hold every sum.
        """
        weight = self.layer.weight_source()
        if not (is_image(x) and is_image(weight) and x.numel() and weight.numel()):
            return None
        x, window = self.arranged(x, weight)
        magnitudes = self.weight_grid.learned_magnitudes()
        with torch.no_grad():
            codes = self.codes(weight, magnitudes, vectors.multiplier)
            if not (fits or sums_fit(self.layer.primitives, codes[1], vectors.bias, 0, numbers)):
                return None
        settings = self, window, rounding, numbers[:ROUNDED_BY], vectors.scale.detach(), codes
        return cast(Tensor, _apply(*settings, x, weight, magnitudes, vectors.multiplier, vectors.bias))

    def codes(self, weight: Tensor, magnitudes: Tensor | None, multiplier: Tensor) -> tuple[Tensor, Tensor]:
        """The weight on its grid, and its codes."""
        quantized = self.quantized(weight, magnitudes)
        steps = quantized * multiplier[:, None, None, None]
        return quantized, straight_through(steps.round(), steps) if torch.is_grad_enabled() else steps.round_()


class _FrozenLayer(_SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        layer: FrozenLayer,
        window: Window,
        rounding: str,
        grid: Tensor,
        scale: Tensor,
        codes: tuple[Tensor, Tensor],
        x: Tensor,
        weight: Tensor,
        magnitudes: Tensor | None,
        multiplier: Tensor,
        bias: Tensor,
    ) -> Tensor:
        quantized, filter = codes[0], layer.filter_of(x, codes[1])
        sums = layer.convolved(x, filter, window, bias)
        steps = _ROUND(sums, scale, grid, rounding=rounding)
        ctx.layer, ctx.window = layer, window
        ctx.save_for_backward(x, weight, magnitudes, multiplier, bias, quantized, filter, sums, scale, grid)
        return channels_first_view(steps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        layer, window = cast(FrozenLayer, ctx.layer), ctx.window
        x, weight, magnitudes, multiplier, bias, quantized, filter, sums, scale, grid = ctx.saved_tensors
        wants_x, wants_weight, _, wants_multiplier, wants_bias = ctx.needs_input_grad[6:]
        again = torch.is_grad_enabled()
        if again:
            # To be differentiated again: as functions of the operands.
            quantized, codes = layer.codes(weight, magnitudes, multiplier)
            filter = layer.filter_of(x, codes)
            sums = layer.convolved(x, filter, window, bias)
        to_sums = _ROUND_GRADIENT(channels_last_view(gradients[0]), sums, scale, grid)
        wanted = wants_x, wants_weight or wants_multiplier, wants_bias
        to_x, to_codes, to_bias = layer.convolution_gradients(to_sums, x, filter, window, wanted, len(bias))
        to_weight = to_multiplier = None
        if to_codes is not None:
            if wants_multiplier:
                to_multiplier = (to_codes * quantized).sum((1, 2, 3), keepdim=True).reshape(-1)
            if wants_weight:
                factor = multiplier[:, None, None, None]
                to_quantized = to_codes * factor if again else to_codes.mul_(factor)
                to_weight, _ = layer.weight_gradients(to_quantized, weight, magnitudes)
        return None, None, None, None, None, None, to_x, to_weight, None, to_multiplier, to_bias


_apply = cast(Any, _FrozenLayer).apply
