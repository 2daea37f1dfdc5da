# SPDX-License-Identifier: Apache-2.0
"""Gradients that are not those of the value: straight through a rounding, or by the user's own rule."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree


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


class UsersFunction:
    """A `torch.autograd.Function` of the user's with the arguments that are no tensors.

    Attributes:
        function: the class.
        spec, leaves: how its arguments (args, kwargs) nest, and what they hold; None for tensors.
        tensors: which of the leaves are tensors.
        results: how many of its results are asked for, each by a call of its own.
    """

    def __init__(self, function: Any, spec: Any, leaves: Sequence[Any], tensors: Sequence[int]) -> None:
        self.function, self.spec = function, spec
        self.leaves, self.tensors = list(leaves), tuple(tensors)
        self.results = 0
        self._last: tuple[tuple[Tensor, ...], tuple[Any, ...], set[int]] | None = None

    def __call__(self, index: int, *given: Tensor) -> Tensor:
        """One of the results, by its position; its gradient is the user's.

        Calls for different results of the same tensors share one run: a gradient may depend on those of all results.
        """
        if self._last is not None:
            known, results, taken = self._last
            if index not in taken and all(a is b for a, b in zip(known, given, strict=True)):
                taken.add(index)
                self._last = None if len(taken) == self.results else self._last
                return cast(Tensor, results[index])
        leaves = list(self.leaves)
        for position, tensor in zip(self.tensors, given, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        made = self.function.apply(*args, **kwargs)
        results = made if isinstance(made, tuple) else (made,)
        self._last = (given, results, {index}) if self.results > 1 else None
        return cast(Tensor, results[index])

    def __getstate__(self) -> dict[str, Any]:
        # What the last step of training has left is no part of it.
        return {**vars(self), "_last": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> UsersFunction:
        copied = UsersFunction(self.function, self.spec, self.leaves, self.tensors)
        copied.results = self.results
        return copied

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, UsersFunction)
            and (self.function, self.spec, self.tensors) == (other.function, other.spec, other.tensors)
            and all(map(_same, self.leaves, other.leaves))
        )

    __hash__ = None  # type: ignore[assignment]


class GradientHooks:
    """What the user has registered on a tensor inside of forward, in order."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hooks = [hook]

    def __call__(self, index: int, tensor: Tensor) -> Tensor:
        """The tensor, whose gradient goes through the hooks."""
        result = tensor.view_as(tensor)
        if result.requires_grad:
            for hook in self.hooks:
                result.register_hook(hook)
        return result

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, GradientHooks) and len(self.hooks) == len(other.hooks)
        return same and all(map(_same, self.hooks, cast(GradientHooks, other).hooks))

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class UnitLength:
    """Rows of length 1 as `F.cosine_similarity` makes them: PyTorch's gradient knows nothing of the least length that
    it divides by."""

    axis: int
    epsilon: float

    def __call__(self, index: int, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, 2, self.axis, keepdim=True)
        least = torch.clamp_min(length.detach(), self.epsilon)
        return x / straight_through(length, least)


@dataclasses.dataclass(frozen=True)
class UnitLengthOrZero:
    """Rows of length 1, and 0 without a gradient where a row is 0."""

    axis: int
    epsilon: float

    def __call__(self, index: int, x: Tensor) -> Tensor:
        zero = x.abs().amax(self.axis, keepdim=True) == 0
        return torch.where(zero, 0.0, nn.functional.normalize(x, 2.0, self.axis, self.epsilon))


def _same(one: Any, other: Any) -> bool:
    """Equality that looks into functions: each export of a model makes lambdas of its own."""
    if isinstance(one, nn.Module) and isinstance(other, nn.Module):
        return type(one) is type(other)
    if isinstance(one, functools.partial) and isinstance(other, functools.partial):
        return _same((one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    code, others_code = getattr(one, "__code__", None), getattr(other, "__code__", None)
    if code is not None and code is others_code:
        return _same(held_by(one), held_by(other))
    return type(one) is type(other) and bool(one is other or one == other)


def held_by(function: Any) -> list[Any]:
    """What a function or a method holds beside its arguments: what it closes over, its defaults, its object."""
    cells = getattr(function, "__closure__", None) or ()
    found = []
    for cell in cells:
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    found += getattr(function, "__defaults__", None) or ()
    owner = getattr(function, "__self__", None)
    return found if owner is None or isinstance(owner, type) else [*found, owner]


def with_hooks(parameter: nn.Parameter, original: nn.Parameter) -> nn.Parameter:
    """A parameter with the hooks of another, and trained if that is."""
    parameter.requires_grad_(True)  # else it takes none
    for hook in (original._backward_hooks or {}).values():
        parameter.register_hook(hook)
    for hook in (getattr(original, "_post_accumulate_grad_hooks", None) or {}).values():
        parameter.register_post_accumulate_grad_hook(hook)
    return cast(nn.Parameter, parameter.requires_grad_(original.requires_grad))


__all__ = [
    "GradientHooks",
    "UnitLength",
    "UnitLengthOrZero",
    "UsersFunction",
    "held_by",
    "is_differentiated",
    "straight_through",
    "unwrapped",
    "with_hooks",
]
