# SPDX-License-Identifier: Apache-2.0
"""What the layers of images that are one operation of autograd share, in training and frozen: the weight on its grid
and the convolution, with their gradients.

For a small layer the bookkeeping of autograd and of operators takes longer than the numbers. The kernels are those of
the layer's parts one by one, in the same order and so with the same bits; whatever is unusual is left to those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from exactqat.operators.torch import declared, empty, is_plain

from ..core.steps import WeightedStep
from . import primitives as p
from .primitives import channels_first_view, channels_last_view, depthwise_filter
from .state import ModuleWeightGrid, rows_of, with_layout_of

_DEPTHWISE = declared("depthwise_conv2d_native")
_TO_INPUT = declared("depthwise_conv2d_native_backprop_input")
_TO_FILTER = declared("depthwise_conv2d_native_backprop_filter")
_ROWS, _ROWS_GRADIENT = declared("fake_quant_rows"), declared("fake_quant_rows_gradient")
_ROWS_WITHIN, _ROWS_WITHIN_GRADIENT = declared("fake_quant_rows_within"), declared("fake_quant_rows_within_gradient")
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default

# Bytes. The C library returns larger blocks to the system at once; to get the pages of a new one takes several times as
# long as to convolve.
_MOST_KEPT = 32 << 20
# What the caches hold until it is copied.
_PIECE = 10 << 20

# PyTorch's strides and padding; nothing for a depthwise convolution.
Window = tuple[Any, ...]


def is_unwatched() -> bool:
    """Whether a call is nothing but what it computes: nobody watches its operations or replaces them."""
    if torch.compiler.is_compiling():
        return False
    watched = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    # Whoever replaces saved tensors may return others than kernels take.
    watched = watched or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    transformed = forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    return not (watched or transformed or torch._C._get_tracing_state())


def is_image(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.dtype == torch.float32 and tensor.is_cpu and is_plain(tensor)


def _is_large(shape: Sequence[int]) -> bool:
    """Whether memory for so many float32 numbers is fresh each time it is asked for."""
    return 4 * math.prod(shape) > _MOST_KEPT and not torch.is_grad_enabled()


def _in_pieces(shape: Sequence[int], compute: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """What PyTorch computes from images, channels last; a large result in pieces, in memory that is kept.

    shape: of the result.
    """
    if not _is_large(shape):
        return channels_last_view(compute(*operands))
    result, images = empty(shape), max(1, _PIECE // (4 * math.prod(shape[1:])))
    for first in range(0, shape[0], images):
        part = compute(*(operand[first : first + images] for operand in operands))
        result[first : first + images].copy_(part.permute(0, 2, 3, 1))
    return result


class ImageLayer:
    """A convolution of images whose weight has a range for each output channel.

    Attributes:
        layer: what it computes.
    """

    def __init__(self, layer: WeightedStep) -> None:
        attributes = layer.attributes
        self.layer, self.weight_grid = layer, cast(ModuleWeightGrid, layer.weight_quantizer)
        self.strides, self.dilations = tuple(attributes["strides"]), tuple(attributes["dilations"])
        self.groups = attributes["groups"]
        self.pairs = [(int(before), int(after)) for before, after in attributes["padding"]]
        # As the operator takes them, one after the other.
        amounts = (0, 0, *(amount for pair in self.pairs for amount in pair), 0, 0)
        self.window = (1, *self.strides, 1), "EXPLICIT", amounts, "NHWC", (1, *self.dilations, 1)
        # Strides and padding, once it is known that the operand is convolved as it is.
        self._plain_window: Window | None = None

    @staticmethod
    def fits(layer: WeightedStep) -> bool:
        """Whether a layer is of that kind."""
        rule = layer.weight_quantizer.rule
        rows = layer.weight_axis == 0 and rule.symmetric and rule.per_channel and not layer.folded
        return rows and layer.operator.float_kind == "conv" and layer.channel_axis == 1

    def is_depthwise(self, x: Tensor) -> bool:
        return bool(self.groups == x.shape[1] > 1)

    def arranged(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Window]:
        """What the convolution reads, and its strides and padding."""
        window = self._plain_window
        if window is None:
            arranged, *sizes = (x,) if self.is_depthwise(x) else p.arranged(x, weight, self.strides, self.pairs)
            window = tuple(sizes)
            if arranged is x:
                self._plain_window = window
            x = arranged
        return x, window

    # --- the weight ---------------------------------------------------------------------------------------------------

    def quantized(self, weight: Tensor, magnitudes: Tensor | None) -> Tensor:
        """The weight on its grid. magnitudes: the upper ends of its ranges; None if they are its largest ones."""
        dense, rule = rows_of(weight), self.weight_grid.rule
        if magnitudes is None:
            rows = _ROWS(dense, rule.weight_bits, rule.narrow_range)
        else:
            rows = _ROWS_WITHIN(dense, magnitudes, rule.weight_bits, rule.narrow_range)
        return with_layout_of(weight, rows)

    def weight_gradients(
        self, gradient: Tensor, weight: Tensor, magnitudes: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Of the weight and of its magnitudes. gradient: of what `quantized` returns, in memory that nobody else
        has."""
        dense, arriving, rule = rows_of(weight), rows_of(gradient, like=weight), self.weight_grid.rule
        # In place, unless autograd follows this.
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

    def filter_of(self, x: Tensor, weight: Tensor) -> Tensor:
        """A weight as the convolution of `x` takes it."""
        return depthwise_filter(weight, x.shape[1]) if self.is_depthwise(x) else weight

    def convolved(self, x: Tensor, filter: Tensor, window: Window, bias: Tensor | None = None) -> Tensor:
        """Channels last."""
        if not self.is_depthwise(x):
            strides, amounts = window

            def computed(images: Tensor) -> Tensor:
                return torch.conv2d(images, filter, bias, strides, amounts, self.dilations, self.groups)

            sizes = zip(x.shape[2:], amounts, self.dilations, filter.shape[2:], strides, strict=True)
            rows, columns = ((n + 2 * pad - step * (k - 1) - 1) // stride + 1 for n, pad, step, k, stride in sizes)
            return _in_pieces((len(x), rows, columns, len(filter)), computed, x)
        sums = cast(Tensor, _DEPTHWISE(channels_last_view(x), filter, *self.window))
        if bias is None:
            return sums
        # In place where nothing else reads the sums.
        return sums + bias if torch.is_grad_enabled() else sums.add_(bias)

    def convolution_gradients(
        self,
        gradient: Tensor,
        x: Tensor,
        filter: Tensor,
        window: Window,
        wanted: tuple[bool, bool, bool],
        channels: int | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of x, of the weight and of the bias. gradient: channels last. channels: of the bias, if there is one."""
        to_x, to_weight, to_bias = wanted
        if not self.is_depthwise(x):
            first, (strides, amounts) = channels_first_view(gradient), window
            fixed = strides, amounts, self.dilations, False, (0, 0), self.groups
            sizes = None if channels is None else (channels,)
            shape = len(x), *x.shape[2:], x.shape[1]
            if to_x and _is_large(shape) and x.is_contiguous(memory_format=torch.channels_last):

                def computed(gradient: Tensor, images: Tensor) -> Tensor:
                    backward = _CONVOLUTION_BACKWARD(gradient, images, filter, None, *fixed, (True, False, False))
                    return cast(Tensor, backward[0])

                of_x = channels_first_view(_in_pieces(shape, computed, first, x))
                wanted = False, to_weight, to_bias
                return of_x, *_CONVOLUTION_BACKWARD(first, x, filter, sizes, *fixed, wanted)[1:]
            return cast(Any, _CONVOLUTION_BACKWARD(first, x, filter, sizes, *fixed, wanted))
        x = channels_last_view(x)
        of_filter = None
        if to_weight:
            of_filter = _TO_FILTER(x, tuple(filter.shape), gradient, *self.window)
            of_filter = of_filter.reshape(*filter.shape[:2], 1, -1).permute(3, 2, 0, 1)
        return (
            channels_first_view(_TO_INPUT(tuple(x.shape), filter, gradient, *self.window)) if to_x else None,
            of_filter,
            gradient.sum((0, 1, 2)) if to_bias else None,
        )
