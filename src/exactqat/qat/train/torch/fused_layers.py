# SPDX-License-Identifier: Apache-2.0
"""A layer in training as one operation of autograd: its weight on its grid, convolution, batch norm, activation and
the grid of its result; the bits are those of `core.steps.WeightedStep.compose`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from exactqat.operators.torch import declared, is_plain, kernel

from ..core.steps import WeightedStep
from .image_layers import ImageLayer, Window, is_image, is_unwatched
from .layers import BatchNormTensors, scale_and_offset
from .primitives import channels_first_view, channels_last_view
from .state import ModuleGrid, ModuleNormalization, ModuleState

_STATISTICS, _BATCH_NORM = declared("batch_norm_statistics"), declared("quantized_batch_norm_training")
_BATCH_NORM_GRADIENT = declared("quantized_batch_norm_gradient")
# Of a layer, which may see images of many sizes.
_MOST_PLANS = 64

# Addresses: of scale, offset, running mean and variance, of the range's ends and its count.
Places = tuple[int, ...]


def trains_plainly(state: ModuleState) -> bool:
    """Whether a call is nothing but a step of training on the CPU."""
    mode = state.mode
    if not (mode.training and mode.quantizing and torch.is_grad_enabled()) or mode.frozen or mode.observing:
        return False
    return not (state.synchronized or torch.is_autocast_enabled("cpu")) and is_unwatched()


class _Plans(NamedTuple):
    """Kernels for a convolution's result of one shape, and what allocates what they write."""

    statistics: Callable[..., None]
    quantize: Callable[..., None]
    gradient: Callable[..., None]
    outputs: Callable[[], Tensor]
    mask: Callable[[], Tensor]


class FusedLayer(ImageLayer):
    """A layer of images, with batch norm and without bias, for calls that `trains_plainly` approves."""

    def __init__(self, layer: WeightedStep) -> None:
        super().__init__(layer)
        self.activation = layer.activation
        self.norm = cast(ModuleNormalization, layer.batch_norm)
        self.grid = cast(ModuleGrid, layer.output_quantizer)
        self._plans: dict[tuple[Any, ...], _Plans] = {}
        self._places: Places = ()

    @staticmethod
    def of(layer: object) -> FusedLayer | None:
        """The layer as one operation, if it is of that kind."""
        if not isinstance(layer, WeightedStep) or not ImageLayer.fits(layer):
            return None
        plain = layer.batch_norm is not None and layer.bias_source is None and layer.bounds is None
        return FusedLayer(layer) if plain and layer.output_quantizer.policy != "percentile" else None

    def __call__(self, x: Tensor) -> Tensor:
        weight, norm = self.layer.weight_source(), self.norm
        if not (norm.training and is_image(x) and is_image(weight) and weight.numel()):
            return cast(Tensor, self.layer.compose(x))
        tensors = norm.tensors()
        scale, offset = scale_and_offset(tensors)
        places = self._at_hand(len(weight), scale, offset, tensors.mean, tensors.variance)
        if places is None:
            return cast(Tensor, self.layer.compose(x))
        magnitudes = self.weight_grid.learned_magnitudes()
        # A range that follows the batch is known later, and has no gradient.
        low, high, *ends = (None, None) if self.grid.observes else self.grid.operands()
        x, window = self.arranged(x, weight)
        operands = x, weight, magnitudes, scale, offset, low, high
        return cast(Tensor, _apply(self, window, tensors, places, ends, *operands))

    def _at_hand(self, channels: int, *vectors: Tensor) -> Places | None:
        """Where batch norm's vectors, [channels], and the range are, if they are plain numbers in memory."""
        tensors = *vectors, *self.grid.raw()
        places = tuple([tensor.data_ptr() for tensor in tensors])
        # Looking at a few numbers takes longer than computing with them: what lies where it did was looked at.
        if places != self._places or any(vector.numel() != channels for vector in vectors):
            plain = all(tensor.is_cpu and is_plain(tensor) and not tensor.is_inference() for tensor in tensors)
            if not plain or any(tensor.dtype != torch.float32 for tensor in tensors[:-1]):
                return None
            if any(vector.shape != (channels,) or not vector.is_contiguous() for vector in vectors):
                return None
            self._places = places
        return places

    # --- batch norm and what follows ----------------------------------------------------------------------------------

    def stored(
        self,
        raw: Tensor,
        tensors: BatchNormTensors,
        places: Places,
        ends: Sequence[Tensor],
        trained: bool,
    ) -> tuple[_Plans, Tensor, Tensor, Tensor, Tensor]:
        """The kernels, the result, channels last, the mask of its gradient, and the batch's precise mean and variance.
        Running statistics and the range move. ends: of the range; none if it follows the batch."""
        norm, grid, channels, x = self.norm, self.grid, raw.shape[-1], raw.data_ptr()
        share = norm.share(raw, tensors)
        plans = self._planned(raw, share or 0.0, norm.epsilon, trained)
        scale, offset, *running = places[:4]
        # Both moments of the batch, and its extremes in the place of another float64; then what nobody reads.
        precise = torch.empty((2 if share is not None else 3) * channels + 1, dtype=torch.float64)
        mean = precise.data_ptr()
        variance, extremes = mean + 8 * channels, mean + 16 * channels
        moved = running if share is not None else (extremes + 8, extremes + 8 + 4 * channels)
        plans.statistics(x, scale, offset, *running, *moved, mean, variance, extremes, extremes + 4)
        if share is not None:
            torch.autograd.graph.increment_version((tensors.mean, tensors.variance))
        if not ends:
            usable = False
            if grid.writers == 1:
                usable = grid.move(extremes, extremes + 4, *places[4:])
            else:
                grid.observe_extremes(*precise[2 * channels : 2 * channels + 1].view(torch.float32).unbind())
            ends = grid.held()[:2] if usable else grid.at_this_moment()
        low, high = ends
        outputs, mask = plans.outputs(), plans.mask()
        results = outputs.data_ptr(), mask.data_ptr()
        plans.quantize(x, scale, offset, mean, variance, low.data_ptr(), high.data_ptr(), *results)
        return plans, outputs, mask, precise[:channels], precise[channels : 2 * channels]

    def gradients(
        self, plans: _Plans, gradient: Tensor, saved: Sequence[Tensor], epsilon: float, trained: bool
    ) -> Sequence[Tensor]:
        """Of the convolution's result, of scale, offset and both ends of the range. gradient: channels last.

        saved: the convolution's result, scale, mean, variance and mask.
        """
        raw, scale, *others = saved
        if torch.is_grad_enabled() or not is_plain(gradient):
            return cast(Sequence[Tensor], _BATCH_NORM_GRADIENT(gradient, raw, scale, *others, epsilon, trained))
        to_raw, to_scale, to_offset = plans.outputs(), torch.empty_like(scale), torch.empty_like(scale)
        ends = torch.empty(2)
        results = to_raw.data_ptr(), to_scale.data_ptr(), to_offset.data_ptr(), ends.data_ptr(), ends.data_ptr() + 4
        plans.gradient(gradient.data_ptr(), *[tensor.data_ptr() for tensor in saved], *results)
        return to_raw, to_scale, to_offset, *(ends.split(1) if trained else ())

    def _planned(self, raw: Tensor, share: float, epsilon: float, trained: bool) -> _Plans:
        key = raw.shape, share, epsilon, trained
        plans = self._plans.get(key)
        if plans is None:
            x, vector, end = ("float32", raw.shape), ("float32", raw.shape[-1:]), ("float32", ())
            precise, activation = ("float64", raw.shape[-1:]), self.activation
            statistics, _ = kernel(
                _STATISTICS, (x, *[vector] * 4), epsilon=epsilon, exponential_avg_factor=share, activation=activation
            )
            operands = x, vector, vector, precise, precise, end, end
            settings = {"num_bits": self.grid.bits, "narrow_range": False, "range_gradients": trained}
            quantize, (outputs, mask) = kernel(
                _BATCH_NORM, operands, epsilon=epsilon, activation=activation, **settings
            )
            arriving = x, x, vector, precise, precise, ("uint8", mask().shape)
            gradient, _ = kernel(_BATCH_NORM_GRADIENT, arriving, epsilon=epsilon, range_gradients=trained)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plans = self._plans[key] = _Plans(statistics, quantize, gradient, outputs, mask)
        return plans


class _Layer(_SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        layer: FusedLayer,
        window: Window,
        tensors: BatchNormTensors,
        places: Places,
        ends: Sequence[Tensor],
        x: Tensor,
        weight: Tensor,
        magnitudes: Tensor | None,
        scale: Tensor,
        offset: Tensor,
        low: Tensor | None,
        high: Tensor | None,
    ) -> Tensor:
        filter = layer.filter_of(x, layer.quantized(weight, magnitudes))
        raw = layer.convolved(x, filter, window)
        trained = any(ctx.needs_input_grad[-2:])
        plans, outputs, mask, mean, variance = layer.stored(raw, tensors, places, ends, trained)
        ctx.layer, ctx.window, ctx.plans, ctx.rest = layer, window, plans, (layer.norm.epsilon, trained)
        ctx.shapes = None if low is None or high is None else (low.shape, high.shape)
        ctx.save_for_backward(x, weight, magnitudes, scale, filter, raw, mean, variance, mask)
        return channels_first_view(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        layer, window = cast(FusedLayer, ctx.layer), ctx.window
        x, weight, magnitudes, scale, filter, raw, mean, variance, mask = ctx.saved_tensors
        wants_x, wants_weight, wants_magnitudes = ctx.needs_input_grad[5:8]
        if torch.is_grad_enabled():
            # To be differentiated again: as functions of the operands.
            filter = layer.filter_of(x, layer.quantized(weight, magnitudes))
            raw = layer.convolved(x, filter, window)
        saved = raw, scale, mean, variance, mask
        to_raw, to_scale, to_offset, *to_ends = layer.gradients(
            ctx.plans, channels_last_view(gradients[0]), saved, *ctx.rest
        )
        wanted = wants_x, wants_weight or wants_magnitudes, False
        to_x, to_weight, _ = layer.convolution_gradients(to_raw, x, filter, window, wanted)
        to_magnitudes = None
        if to_weight is not None:
            to_weight, to_magnitudes = layer.weight_gradients(to_weight, weight, magnitudes)
        ends: Sequence[Tensor | None] = (None, None)
        if ctx.rest[1]:
            ends = [end.reshape(shape) for end, shape in zip(to_ends, ctx.shapes, strict=True)]
        return None, None, None, None, None, to_x, to_weight, to_magnitudes, to_scale, to_offset, *ends


_apply = cast(Any, _Layer).apply
