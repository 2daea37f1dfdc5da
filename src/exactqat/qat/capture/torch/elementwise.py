# SPDX-License-Identifier: Apache-2.0
"""Operators element by element, and noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from ....kit.device.functions import named_by
from ..core import masks
from ..core.refusals import MIXES, Refused
from ..passes import composites
from .composition import COMPARISONS, composed, curves, is_composed, is_truth
from .converter import HANDLERS, Converter, handles, require_fixed, require_numbers
from .items import Fixed, Item, Meta, Traced
from .operators import DROPOUTS, base_name

aten = torch.ops.aten


_UNARY = named_by("aten")


@handles(*_UNARY)
def _unary(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    require_numbers(c, a.self)
    return c.emit(_UNARY[base_name(c.applied)], [a.self], *meta)


HANDLERS["ceil"] = lambda c, a, meta: c.emit("neg", [c.emit("floor", [c.emit("neg", [a.self], *meta)], *meta)], *meta)


def _clamped(c: Converter, x: Item, low: object, high: object, meta: Meta) -> Item:
    require_numbers(c, x)
    for kind, bound in (("maximum", low), ("minimum", high)):
        if isinstance(bound, Traced | Fixed):
            x = c.emit(kind, [x, bound], *meta)
    low, high = (None if isinstance(b, Traced | Fixed) or b in (-math.inf, math.inf) else b for b in (low, high))
    if low is None and high is None:
        return x
    if low == 0 and high in (None, 6):
        return c.emit("relu" if high is None else "relu6", [x], *meta)
    return c.emit("clamp", [x], *meta, min=low, max=high)


@handles("clamp", "clip", "clamp_min", "clamp_max", "hardtanh")
def _clamp(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    low, high = (getattr(a, f"{side}_val", getattr(a, side, None)) for side in ("min", "max"))
    return _clamped(c, a.self, low, high, meta)


@handles("threshold")
def _threshold(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    require_numbers(c, a.self)
    if a.threshold != a.value:
        return c.emit("threshold", [a.self], *meta, least=float(a.threshold), value=float(a.value))
    return _clamped(c, a.self, a.value, None, meta)


# By the operator: its kind, and the kind's attributes by the operator's arguments.
_WITH_NUMBERS: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "hardshrink": ("hardshrink", lambda a: {"width": float(a.lambd)}),
    "softshrink": ("softshrink", lambda a: {"width": float(a.lambd)}),
    "gelu": ("gelu", lambda a: {"approximate": a.approximate}),
    "softplus": ("softplus", lambda a: {"beta": float(a.beta), "threshold": float(a.threshold)}),
    "elu": ("elu", lambda a: {name: float(getattr(a, name)) for name in ("alpha", "scale", "input_scale")}),
    "celu": ("elu", lambda a: {"alpha": float(a.alpha), "scale": 1.0, "input_scale": 1 / float(a.alpha)}),
    "leaky_relu": ("leaky_relu", lambda a: {"slope": float(a.negative_slope)}),
    "rrelu": ("leaky_relu", lambda a: {"slope": (a.lower + a.upper) / 2}),
    "round": ("round", lambda a: {}),
}


@handles(*_WITH_NUMBERS)
def _with_numbers(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    if getattr(a, "training", False):
        raise Refused("its slope is random")
    if getattr(a, "decimals", 0):
        raise Refused.argument("decimals", a.decimals, "0 is allowed")
    require_numbers(c, a.self)
    kind, attributes = _WITH_NUMBERS[base_name(c.applied)]
    return c.emit(kind, [a.self], *meta, **attributes(a))


@handles("prelu", "_prelu_kernel")
def _prelu(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    require_fixed(a.weight, "weight")
    weight = a.weight
    if base_name(c.applied) == "_prelu_kernel":
        weight = c.call(aten.reshape.default, weight, [math.prod(weight.shape)])
    axis = 1 if len(a.self.shape) > 1 else 0
    if weight.shape != (1,):
        c.keep_batch(a.self, [axis])
    return c.emit("prelu", [a.self, weight], *meta, channel_axis=axis)


@handles("exp2", "log2", "log10", "log1p", "expm1")
def _by_exp_and_log(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    name, x = base_name(c.applied), a.self
    if name.startswith("exp"):
        y = c.call(aten.exp.default, x if name == "expm1" else c.call(aten.mul.Tensor, x, math.log(2)))
        return c.call(aten.sub.Tensor, y, 1.0) if name == "expm1" else y
    y = c.call(aten.log.default, c.call(aten.add.Tensor, x, 1.0) if name == "log1p" else x)
    return y if name == "log1p" else c.call(aten.mul.Tensor, y, 1 / math.log(2 if name == "log2" else 10))


@handles("pow")
def _pow(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    x, exponent = a.self, c.uniform(a.exponent)
    if isinstance(exponent, Traced | Fixed):
        if isinstance(x, int | float) and x > 0:
            return c.call(aten.exp.default, c.call(aten.mul.Tensor, exponent, math.log(x)))
        raise Refused("its exponent is not a number")
    require_numbers(c, x)
    known = {1: None, 2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if exponent in known:
        kind = known[exponent]
        return x if kind is None else c.emit(kind, [x], *meta)
    return c.emit("pow", [x], *meta, exponent=float(exponent))


def _binary(c: Converter, kind: str, x: Any, y: Any, meta: Meta) -> Item:
    if meta.dtype.is_floating_point:
        x, y = (as_number(c, operand) if is_truth(operand) else operand for operand in (x, y))
    require_numbers(c, x, y)
    neutral = {"add": 0, "sub": 0, "mul": 1, "div": 1}.get(kind)
    for operand, other in ((x, y), (y, x)) if kind in ("add", "mul") else ((x, y),):
        if isinstance(other, int | float) and other == neutral and isinstance(operand, Traced | Fixed):
            return replace(operand, shape=meta.shape, dtype=meta.dtype)
    for operand in (x, y):
        axis = c.batch_of(operand) if isinstance(operand, Traced) else None
        if axis is not None and c.batch_axes(meta.shape) != [axis + len(meta.shape) - len(operand.shape)]:
            raise Refused(MIXES)
    return c.emit(kind, [x, y], *meta)


def _scaled(c: Converter, x: Any, factor: float) -> Any:
    if factor == 1:
        return x
    return c.call(aten.mul.Tensor, x, factor) if isinstance(x, Traced | Fixed) else x * factor


# Of two operands, the kinds of step.
_BINARY = {
    **{"add": "add", "sub": "sub", "subtract": "sub", "mul": "mul", "multiply": "mul"},
    **{"maximum": "maximum", "max.other": "maximum", "fmax": "maximum"},
    **{"minimum": "minimum", "min.other": "minimum", "fmin": "minimum"},
}


@handles(*_BINARY)
def _arithmetic(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    name = base_name(c.applied)
    kind = _BINARY.get(name) or _BINARY[f"{name}.other"]
    if kind == "mul" and isinstance(a.self, Traced | Fixed) and a.self is a.other:
        return c.emit("square", [a.self], *meta)
    if kind in ("maximum", "minimum"):
        return _binary(c, kind, c.uniform(a.self), c.uniform(a.other), meta)
    return _binary(c, kind, a.self, _scaled(c, a.other, getattr(a, "alpha", 1)), meta)


@handles("div", "divide", "true_divide", "floor_divide")
def _div(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    mode = "floor" if base_name(c.applied) == "floor_divide" else getattr(a, "rounding_mode", None)
    if mode == "trunc":
        raise Refused.argument("rounding_mode", mode, "None and 'floor' are allowed")
    normal = None if mode else composites.normalized(c, a.self, a.other, "F.normalize")
    if normal is not None:
        return normal
    quotient = _binary(c, "div", a.self, a.other, meta)
    return quotient if mode is None else c.emit("floor", [quotient], *meta)


@handles("lerp")
def _lerp(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    difference = c.call(aten.sub.Tensor, a.end, a.self)
    return c.call(aten.add.Tensor, a.self, c.call(aten.mul.Tensor, difference, a.weight))


# --- comparisons, masks and choices -----------------------------------------------------------------------------------

_COMPARISONS = {
    **{name: name for name in COMPARISONS},
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
}  # fmt: skip
_LOGIC = {f"{start}_{name}": name for start in ("logical", "bitwise") for name in ("and", "or", "xor", "not")}
_LOGIC |= {f"__{name}__": name for name in ("and", "or", "xor")}


def is_mask(c: Converter, item: Any) -> bool:
    """Whether it is truth values that the network is given, or computes of what it is given."""
    return masks.is_truth(c, item) and item.dtype == torch.bool


@handles(*_COMPARISONS, *_LOGIC)
def _compare(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    """There is no step for truth values: this one vanishes where only a function of one value reads it."""
    name = base_name(c.applied)
    operands = [a.self, *([a.other] if hasattr(a, "other") else [])]
    if name in _COMPARISONS:
        name, operands = _COMPARISONS[name], [c.uniform(operand) for operand in operands]
        whole = all(not isinstance(operand, Traced) or not operand.dtype.is_floating_point for operand in operands)
        numbers = [
            c.call(aten.to.dtype, operand, torch.float32) if isinstance(operand, Fixed) else operand
            for operand in operands
        ]
        mask = masks.compared(c, name, numbers[0], numbers[1], meta.shape) if whole else None
    else:
        name = _LOGIC[name]
        of_truths = all(item.dtype == torch.bool for item in operands if isinstance(item, Traced | Fixed))
        mask = masks.combined(c, name, operands, meta.shape) if of_truths else None
    if mask is not None:
        return mask
    result: Traced = c.refused(vars(a), meta)
    if name in COMPARISONS:
        # Both sides as PyTorch compares them: a number becomes a float32 beside a tensor of float32.
        tensors = [operand for operand in operands if isinstance(operand, Traced | Fixed)]
        operands = [operand if operand in tensors else float(torch.tensor(c.operand(operand))) for operand in operands]
        fits = all(tensor.dtype.is_floating_point for tensor in tensors)
    else:
        fits = all(map(is_truth, operands))
    if not fits:
        return result
    return replace(result, samples=curves(c, name, operands), comparison=(name, *operands))


@handles("heaviside")
def _heaviside(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    above = as_number(c, c.call(aten.gt.Scalar, a.self, 0.0))
    return c.call(aten.where.self, c.call(aten.eq.Scalar, a.self, 0.0), a.values, above)


def as_number(c: Converter, truth: Traced) -> Item:
    """1 where it is true, else 0."""
    return composed(c, "where", [truth, 1.0, 0.0], {}, truth.shape)


@handles("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar", "masked_fill")
def _where(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    if hasattr(a, "mask"):
        condition, on, off = a.mask, a.value, a.self
    else:
        condition, on, off = a.condition, a.self, a.other
    if is_composed(c, condition) and meta.dtype.is_floating_point:
        on, off = (as_number(c, operand) if is_truth(operand) else operand for operand in (on, off))
        result = composites.parametric_relu(c, condition, off, on)
        return composed(c, "where", [condition, on, off], {}, meta.shape) if result is None else result
    if is_mask(c, condition) and meta.dtype != torch.bool:
        return replace(masks.chosen(c, condition, on, off, meta.shape), dtype=meta.dtype)
    require_fixed(condition, "condition")
    inverse = c.call(aten.logical_not.default, condition)
    if isinstance(on, Traced) and isinstance(off, Traced):
        parts = zip((on, off), (condition, inverse), strict=True)
        first, second = (c.call(aten.mul.Tensor, x, c.call(aten.to.dtype, at, meta.dtype)) for x, at in parts)
        return c.call(aten.add.Tensor, first, second)
    value, fixed, kept, filled = (
        (off, on, inverse, condition) if isinstance(off, Traced) else (on, off, condition, inverse)
    )
    if not isinstance(fixed, Fixed):
        fixed = c.call(aten.full.default, [1], fixed, dtype=meta.dtype)
    addend = c.call(aten.where.self, filled, fixed, c.call(aten.zeros.default, [1], dtype=meta.dtype))
    number = c.uniform(fixed)
    if number == -math.inf:  # absorbs what it is added to
        return c.call(aten.add.Tensor, value, addend)
    result = c.call(aten.mul.Tensor, value, c.call(aten.to.dtype, kept, meta.dtype))
    return result if number == 0 else c.call(aten.add.Tensor, result, addend)


@handles("softmax", "log_softmax", "_softmax", "_log_softmax", "special_softmax", "special_log_softmax")
def _softmax(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    axis = a.dim % max(len(a.self.shape), 1)
    c.keep_batch(a.self, [axis])
    return c.emit("log_softmax" if "log" in base_name(c.applied) else "softmax", [a.self], *meta, axis=axis)


# What reads a tensor's shape only, by what it is made of.
_FILLS: dict[str, Any] = {
    **{"zeros": 0, "ones": 1, "full": None, "empty": aten.empty.memory_format},
    **{"rand": aten.rand.default, "randn": aten.randn.default},
}


@handles(*(name for kind in _FILLS for name in (f"{kind}_like", f"new_{kind}")))
def _filled(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    fill = _FILLS[base_name(c.applied).removesuffix("_like").removeprefix("new_")]
    if fill is None or isinstance(fill, int):
        value = a.fill_value if fill is None else fill
        return c.call(aten.full.default, list(meta.shape), value, dtype=meta.dtype)
    return c.call(fill, list(meta.shape), dtype=meta.dtype)


@handles(*DROPOUTS, "native_dropout")
def _dropout(c: Converter, a: SimpleNamespace, meta: Any) -> Any:
    x = a.input
    if not a.train or a.p == 0:
        return [x, None] if isinstance(meta, list) else x
    if isinstance(meta, list):
        return [c.call(aten.dropout.default, x, a.p, True), None]
    return c.noisy(c.applied, vars(a), meta)
