# SPDX-License-Identifier: Apache-2.0
"""A layer in training as one operation of autograd: its weight on its grid, convolution, batch norm, activation and
the grid of its result.

For a small layer the bookkeeping of autograd and of operators takes longer than the numbers. The kernels are those of
the layer's parts one by one (`core.steps.WeightedStep.compose`), in the same order and so with the same bits; whatever
is unusual is left to those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from exactqat.operators.torch import declared, is_plain, kernel

from ..core.steps import WeightedStep
from . import primitives as p
from .layers import BatchNormTensors, scale_and_offset
from .primitives import channels_first_view, channels_last_view, depthwise_filter
from .state import ModuleGrid, ModuleNormalization, ModuleState, ModuleWeightGrid, rows_of, with_layout_of

_STATISTICS, _BATCH_NORM = declared("batch_norm_statistics"), declared("quantized_batch_norm_training")
_BATCH_NORM_GRADIENT = declared("quantized_batch_norm_gradient")
_DEPTHWISE = declared("depthwise_conv2d_native")
_TO_INPUT = declared("depthwise_conv2d_native_backprop_input")
_TO_FILTER = declared("depthwise_conv2d_native_backprop_filter")
_ROWS, _ROWS_GRADIENT = declared("fake_quant_rows"), declared("fake_quant_rows_gradient")
_ROWS_WITHIN, _ROWS_WITHIN_GRADIENT = declared("fake_quant_rows_within"), declared("fake_quant_rows_within_gradient")
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
# Of a layer, which may see images of many sizes.
_MOST_PLANS = 64

# Addresses: of scale, offset, running mean and variance, of the range's ends and its count.
Places = tuple[int, ...]
# PyTorch's strides and padding; nothing for a depthwise convolution.
Window = tuple[Any, ...]


def trains_plainly(state: ModuleState) -> bool:
    """Whether a call is nothing but a step of training on the CPU: nobody watches its operations or replaces them."""
    mode = state.mode
    if not (mode.training and mode.quantizing and torch.is_grad_enabled()) or mode.frozen or mode.observing:
        return False
    if torch.compiler.is_compiling() or state.synchronized or torch.is_autocast_enabled("cpu"):
        return False
    watched = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    # Whoever replaces saved tensors may return others than kernels take.
    watched = watched or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    transformed = forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    return not (watched or transformed or torch._C._get_tracing_state())


class _Plans(NamedTuple):
    """Kernels for a convolution's result of one shape, and what allocates what they write."""

    statistics: Callable[..., None]
    quantize: Callable[..., None]
    gradient: Callable[..., None]
    outputs: Callable[[], Tensor]
    mask: Callable[[], Tensor]


class FusedLayer:
    """A layer of images, with batch norm and without bias, for calls that `trains_plainly` approves.

    Attributes:
        layer: what it computes.
    """

    def __init__(self, layer: WeightedStep) -> None:
        attributes = layer.attributes
        self.layer, self.activation = layer, layer.activation
        self.norm = cast(ModuleNormalization, layer.batch_norm)
        self.grid = cast(ModuleGrid, layer.output_quantizer)
        self.weight_grid = cast(ModuleWeightGrid, layer.weight_quantizer)
        self.strides, self.dilations = tuple(attributes["strides"]), tuple(attributes["dilations"])
        self.groups = attributes["groups"]
        self.pairs = [(int(before), int(after)) for before, after in attributes["padding"]]
        # As the operator takes them, one after the other.
        amounts = (0, 0, *(amount for pair in self.pairs for amount in pair), 0, 0)
        self.window = (1, *self.strides, 1), "EXPLICIT", amounts, "NHWC", (1, *self.dilations, 1)
        self._plans: dict[tuple[Any, ...], _Plans] = {}
        self._places: Places = ()
        # Strides and padding, once it is known that the operand is convolved as it is.
        self._plain_window: Window | None = None

    @staticmethod
    def of(layer: object) -> FusedLayer | None:
        """The layer as one operation, if it is of that kind."""
        if not isinstance(layer, WeightedStep) or layer.operator.float_kind != "conv":
            return None
        rule, grid = layer.weight_quantizer.rule, layer.output_quantizer
        rows = layer.weight_axis == 0 and rule.symmetric and rule.per_channel
        plain = layer.batch_norm is not None and layer.bias_source is None and not layer.folded and layer.bounds is None
        fits = rows and plain and layer.channel_axis == 1 and grid.policy != "percentile"
        return FusedLayer(layer) if fits else None

    def __call__(self, x: Tensor) -> Tensor:
        weight, norm = self.layer.weight_source(), self.norm
        if not (norm.training and _is_image(x) and _is_image(weight) and weight.numel()):
            return cast(Tensor, self.layer.compose(x))
        tensors = norm.tensors()
        scale, offset = scale_and_offset(tensors)
        places = self._at_hand(len(weight), scale, offset, tensors.mean, tensors.variance)
        if places is None:
            return cast(Tensor, self.layer.compose(x))
        magnitudes = self.weight_grid.learned_magnitudes()
        # A range that follows the batch is known later, and has no gradient.
        low, high, *ends = (None, None) if self.grid.observes else self.grid.operands()
        window = self._plain_window
        if window is None:
            arranged, *sizes = (x,) if self.is_depthwise(x) else p.arranged(x, weight, self.strides, self.pairs)
            window = tuple(sizes)
            if arranged is x:
                self._plain_window = window
            x = arranged
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

    def is_depthwise(self, x: Tensor) -> bool:
        return bool(self.groups == x.shape[1] > 1)

    # --- the weight ---------------------------------------------------------------------------------------------------

    def quantized(self, x: Tensor, weight: Tensor, magnitudes: Tensor | None) -> Tensor:
        """The weight on its grid, as the convolution of `x` takes it."""
        dense, rule = rows_of(weight), self.weight_grid.rule
        if magnitudes is None:
            rows = _ROWS(dense, rule.weight_bits, rule.narrow_range)
        else:
            rows = _ROWS_WITHIN(dense, magnitudes, rule.weight_bits, rule.narrow_range)
        weight = with_layout_of(weight, rows)
        return depthwise_filter(weight, x.shape[1]) if self.is_depthwise(x) else weight

    def weight_gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, magnitudes: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Of the weight and of its magnitudes. gradient: of what `quantized` returns."""
        if self.is_depthwise(x):
            gradient = gradient.reshape(*weight.shape[2:], 1, len(weight)).permute(3, 2, 0, 1)
        dense, arriving, rule = rows_of(weight), rows_of(gradient, like=weight), self.weight_grid.rule
        # In its own memory, which nobody else has; unless autograd follows this.
        own = not torch.is_grad_enabled()
        if magnitudes is None:
            out = arriving if own else None
            rows = _ROWS_GRADIENT(arriving, dense, rule.weight_bits, rule.narrow_range, out=out)
            return with_layout_of(weight, rows), None
        outs = (arriving, torch.empty_like(magnitudes)) if own else None
        rows, to_magnitudes = _ROWS_WITHIN_GRADIENT(
            arriving, dense, magnitudes, rule.weight_bits, rule.narrow_range, out=outs
        )
        return with_layout_of(weight, rows), to_magnitudes

    # --- the convolution ----------------------------------------------------------------------------------------------

    def convolved(self, x: Tensor, weight: Tensor, window: Window) -> Tensor:
        """Channels last."""
        if self.is_depthwise(x):
            return cast(Tensor, _DEPTHWISE(channels_last_view(x), weight, *self.window))
        strides, amounts = window
        return channels_last_view(torch.conv2d(x, weight, None, strides, amounts, self.dilations, self.groups))

    def convolution_gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, window: Window, to_x: bool, to_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Of x and of the weight. gradient: channels last."""
        if not self.is_depthwise(x):
            first, (strides, amounts) = channels_first_view(gradient), window
            fixed = strides, amounts, self.dilations, False, (0, 0), self.groups
            return _CONVOLUTION_BACKWARD(first, x, weight, None, *fixed, (to_x, to_weight, False))[:2]
        x = channels_last_view(x)
        return (
            channels_first_view(_TO_INPUT(tuple(x.shape), weight, gradient, *self.window)) if to_x else None,
            _TO_FILTER(x, tuple(weight.shape), gradient, *self.window) if to_weight else None,
        )

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
        quantized = layer.quantized(x, weight, magnitudes)
        raw = layer.convolved(x, quantized, window)
        trained = any(ctx.needs_input_grad[-2:])
        plans, outputs, mask, mean, variance = layer.stored(raw, tensors, places, ends, trained)
        ctx.layer, ctx.window, ctx.plans, ctx.rest = layer, window, plans, (layer.norm.epsilon, trained)
        ctx.shapes = None if low is None or high is None else (low.shape, high.shape)
        ctx.save_for_backward(x, weight, magnitudes, scale, quantized, raw, mean, variance, mask)
        return channels_first_view(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        layer, window = cast(FusedLayer, ctx.layer), ctx.window
        x, weight, magnitudes, scale, quantized, raw, mean, variance, mask = ctx.saved_tensors
        wants_x, wants_weight, wants_magnitudes = ctx.needs_input_grad[5:8]
        if torch.is_grad_enabled():
            # To be differentiated again: as functions of the operands.
            quantized = layer.quantized(x, weight, magnitudes)
            raw = layer.convolved(x, quantized, window)
        saved = raw, scale, mean, variance, mask
        to_raw, to_scale, to_offset, *to_ends = layer.gradients(
            ctx.plans, channels_last_view(gradients[0]), saved, *ctx.rest
        )
        wanted = wants_x, wants_weight or wants_magnitudes
        to_x, to_weight = layer.convolution_gradients(to_raw, x, quantized, window, *wanted)
        to_magnitudes = None
        if to_weight is not None:
            to_weight, to_magnitudes = layer.weight_gradients(to_weight, x, weight, magnitudes)
        ends: Sequence[Tensor | None] = (None, None)
        if ctx.rest[1]:
            ends = [end.reshape(shape) for end, shape in zip(to_ends, ctx.shapes, strict=True)]
        return None, None, None, None, None, to_x, to_weight, to_magnitudes, to_scale, to_offset, *ends


_apply = cast(Any, _Layer).apply


def _is_image(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.dtype == torch.float32 and tensor.is_cpu and is_plain(tensor)
