# SPDX-License-Identifier: Apache-2.0
"""Gradients that are not those of the value: straight through a rounding; and the hooks of parameters."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient_of: Tensor, value: Tensor, low: float, high: float, factor: float) -> Tensor:
        result = value.view_as(value)
        _StraightThrough.keep(ctx, (gradient_of, value, low, high, factor))
        return result

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...]) -> None:
        gradient_of, _, ctx.low, ctx.high, ctx.factor = inputs
        if not math.isinf(ctx.low):
            ctx.save_for_backward(gradient_of)
            ctx.save_for_forward(gradient_of)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if not math.isinf(ctx.low):
            gradient = torch.ops.aten.hardtanh_backward(gradient, ctx.saved_tensors[0], ctx.low, ctx.high)
        return gradient if ctx.factor == 1 else gradient * ctx.factor, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *rest: Any) -> Any:
        if not math.isinf(ctx.low):
            (x,) = ctx.saved_tensors
            tangent = torch.where((x > ctx.low) & (x < ctx.high), tangent, torch.zeros_like(tangent))
        return (tangent * ctx.factor).view_as(tangent)


class _StraightThroughTransformed(_StraightThrough):
    """The form that `torch.func` takes; Its signature is inspected at every call, which costs more than the rest."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient_of: Tensor, value: Tensor, low: float, high: float, factor: float) -> Tensor:  # type: ignore[override]
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _StraightThrough.keep(ctx, inputs)


def is_differentiated(tensor: Tensor) -> bool:
    return (torch.is_grad_enabled() and tensor.requires_grad) or forward_ad._current_level >= 0


def straight_through(
    gradient_of: Tensor, value: Tensor, low: float = -math.inf, high: float = math.inf, factor: float = 1.0
) -> Tensor:
    """The value, with `factor` times the gradient of another tensor where that lies between low and high."""
    if not is_differentiated(gradient_of):
        return value
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    function = _StraightThroughTransformed if transformed else _StraightThrough
    return cast(Tensor, function.apply(gradient_of, value, low, high, factor))


def unwrapped(tensor: Tensor) -> Tensor:
    """Transforms such as torch.func.grad wrap tensors in others that have no memory."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def with_hooks(parameter: nn.Parameter, original: nn.Parameter) -> nn.Parameter:
    """A parameter with the hooks of another, and trained if that is."""
    parameter.requires_grad_(True)  # else it takes none
    for hook in (original._backward_hooks or {}).values():
        parameter.register_hook(hook)
    for hook in (getattr(original, "_post_accumulate_grad_hooks", None) or {}).values():
        parameter.register_post_accumulate_grad_hook(hook)
    return cast(nn.Parameter, parameter.requires_grad_(original.requires_grad))
