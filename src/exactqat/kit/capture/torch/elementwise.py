# SPDX-License-Identifier: Apache-2.0
"""Operators element by element, and noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from ...device.functions import named_by
from ..core.refusals import MIXES, Refused
from . import masks
from .composition import COMPARISONS, composed, formula, is_composed, is_truth, uniform
from .contents import Content, Meta
from .reader import Reader, handles, require_fixed, require_numbers
from .schema import DROPOUTS, base_name

aten = torch.ops.aten


_UNARY = named_by("aten")


@handles(*_UNARY)
def _unary(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    require_numbers(c, a.self)
    return c.emit(_UNARY[base_name(c.applied)], [a.self], meta)


@handles("round")
def _round(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    if getattr(a, "decimals", 0):
        raise Refused.argument("decimals", a.decimals, "0 is allowed")
    return c.emit("round", [a.self], meta)


@handles("ceil", "trunc", "fix", "frac")
def _ceil(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    if base_name(c.applied) != "ceil":
        raise Refused("")
    down = c.emit("floor", [c.emit("neg", [a.self], meta)], meta)
    return c.emit("neg", [down], meta)


def _clamped(c: Reader, x: Content, low: Any, high: Any, meta: Meta) -> Content:
    require_numbers(c, x)
    for kind, bound in (("maximum", low), ("minimum", high)):
        if isinstance(bound, Content):
            x = c.emit(kind, [x, bound], meta)
    low, high = (None if isinstance(b, Content) or b in (-math.inf, math.inf) else b for b in (low, high))
    if low is None and high is None:
        return x
    if low == 0 and high in (None, 6):
        return c.emit("relu" if high is None else "relu6", [x], meta)
    return c.emit("clamp", [x], meta, min=low, max=high)


@handles("clamp", "clip", "clamp_min", "clamp_max", "hardtanh")
def _clamp(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    low = getattr(a, "min", None) if not hasattr(a, "min_val") else a.min_val
    high = getattr(a, "max", None) if not hasattr(a, "max_val") else a.max_val
    return _clamped(c, a.self, low, high, meta)


@handles("threshold")
def _threshold(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    require_numbers(c, a.self)
    if a.threshold != a.value:
        return c.emit("threshold", [a.self], meta, least=float(a.threshold), value=float(a.value))
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
}


@handles(*_WITH_NUMBERS)
def _with_numbers(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    require_numbers(c, a.self)
    kind, attributes = _WITH_NUMBERS[base_name(c.applied)]
    return c.emit(kind, [a.self], meta, **attributes(a))


@handles("rrelu")
def _rrelu(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    if a.training:
        raise Refused("its slope is random")
    return c.emit("leaky_relu", [a.self], meta, slope=(a.lower + a.upper) / 2)


@handles("prelu", "_prelu_kernel")
def _prelu(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    require_fixed(a.weight, "weight")
    weight = a.weight
    if base_name(c.applied) == "_prelu_kernel":
        weight = c.call(aten.reshape.default, weight, [math.prod(weight.shape)])
    axis = 1 if len(a.self.shape) > 1 else 0
    if weight.shape != (1,):
        c.keep_batch(a.self, [axis])
    return c.emit("prelu", [a.self, weight], meta, ("", "weight"), channel_axis=axis)


@handles("glu")
def _glu(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    first, second = c.call(aten.chunk.default, a.self, 2, a.dim)
    return c.call(aten.mul.Tensor, first, c.call(aten.sigmoid.default, second))


@handles("exp2", "log2", "log10", "log1p", "expm1")
def _by_exp_and_log(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    name, x = base_name(c.applied), a.self
    if name == "exp2":
        return c.call(aten.exp.default, c.call(aten.mul.Tensor, x, math.log(2)))
    if name == "expm1":
        return c.call(aten.sub.Tensor, c.call(aten.exp.default, x), 1.0)
    if name == "log1p":
        return c.call(aten.log.default, c.call(aten.add.Tensor, x, 1.0))
    return c.call(aten.mul.Tensor, c.call(aten.log.default, x), 1 / math.log(2 if name == "log2" else 10))


@handles("pow")
def _pow(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    x, exponent = a.self, a.exponent
    if isinstance(exponent, Content) and not exponent.is_value and not exponent.shape and not c.sources(exponent):
        exponent = c.data(exponent).item()
    if isinstance(exponent, Content):
        if isinstance(x, (int, float)) and x > 0:
            return c.call(aten.exp.default, c.call(aten.mul.Tensor, exponent, math.log(x)))
        raise Refused("its exponent is no number")
    require_numbers(c, x)
    known = {1: None, 2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if exponent in known:
        kind = known[exponent]
        return x if kind is None else c.emit(kind, [x], meta)
    return c.emit("pow", [x], meta, exponent=float(exponent))


def _binary(c: Reader, kind: str, x: Any, y: Any, meta: Meta) -> Content:
    if meta.dtype.is_floating_point:
        x, y = (as_number(c, each, meta) if is_truth(each) else each for each in (x, y))
    require_numbers(c, x, y)
    neutral = {"add": 0, "sub": 0, "mul": 1, "div": 1}.get(kind)
    for operand, other in ((x, y), (y, x)) if kind in ("add", "mul") else ((x, y),):
        if isinstance(other, (int, float)) and other == neutral and isinstance(operand, Content):
            return replace(operand, meta=meta)
    for operand in (x, y):
        if isinstance(operand, Content) and (axis := c.batch_axis(operand)) is not None:
            axes = c.batch_axes(meta.shape)
            if axes != [axis + len(meta.shape) - len(operand.shape)]:
                raise Refused(MIXES)
    return c.emit(kind, [x, y], meta)


def _scaled(c: Reader, x: Any, factor: float) -> Any:
    if factor == 1:
        return x
    return c.call(aten.mul.Tensor, x, factor) if isinstance(x, Content) else x * factor


@handles("add", "sub", "subtract")
def _add(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    kind = "add" if base_name(c.applied) == "add" else "sub"
    return _binary(c, kind, a.self, _scaled(c, a.other, a.alpha), meta)


@handles("rsub")
def _rsub(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    return _binary(c, "sub", a.other, _scaled(c, a.self, a.alpha), meta)


@handles("mul", "multiply")
def _mul(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    if isinstance(a.self, Content) and a.self is a.other:
        return c.emit("square", [a.self], meta)
    return _binary(c, "mul", a.self, a.other, meta)


@handles("div", "divide", "true_divide", "floor_divide")
def _div(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    mode = "floor" if base_name(c.applied) == "floor_divide" else getattr(a, "rounding_mode", None)
    if mode == "trunc":
        raise Refused.argument("rounding_mode", mode, "None and 'floor' are allowed")
    normal = None if mode else _normalize(c, a, meta)
    if normal is not None:
        return normal
    quotient = _binary(c, "div", a.self, a.other, meta)
    return quotient if mode is None else c.emit("floor", [quotient], meta)


def _normalize(c: Reader, a: SimpleNamespace, meta: Meta) -> Content | None:
    """F.normalize, from the steps that it consists of: x / expand(clamp(norm(x)))."""

    def made_by(tensor: Any, kind: str) -> Any:
        producer = c.producers.get(tensor.name) if isinstance(tensor, Content) and tensor.is_value else None
        return producer if producer is not None and producer[0].kind == kind else None

    divisor = a.other
    if (expanded := made_by(divisor, "expand")) is not None:
        divisor = expanded[1][0]
    clamped = made_by(divisor, "clamp")
    norm = made_by(clamped[1][0], "norm") if clamped is not None else None
    if clamped is None or norm is None or norm[1][0].name != getattr(a.self, "name", None):
        return None
    attributes, epsilon = norm[0].attributes, clamped[0].attributes["min"]
    whole = attributes["order"] == 2 and attributes["keep_dims"] and len(attributes["axes"]) == 1
    if not whole or epsilon is None or clamped[0].attributes["max"] is not None:
        return None
    return c.emit("normalize", [a.self], meta, label="F.normalize", axis=attributes["axes"][0], epsilon=epsilon)


@handles("maximum", "max.other", "fmax")
def _maximum(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    return _binary(c, "maximum", uniform(c, a.self), uniform(c, a.other), meta)


@handles("minimum", "min.other", "fmin")
def _minimum(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    return _binary(c, "minimum", uniform(c, a.self), uniform(c, a.other), meta)


@handles("addcmul", "addcdiv")
def _addcmul(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    operator = aten.mul.Tensor if base_name(c.applied) == "addcmul" else aten.div.Tensor
    return c.call(aten.add.Tensor, a.self, _scaled(c, c.call(operator, a.tensor1, a.tensor2), a.value))


@handles("lerp")
def _lerp(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    difference = c.call(aten.sub.Tensor, a.end, a.self)
    return c.call(aten.add.Tensor, a.self, c.call(aten.mul.Tensor, difference, a.weight))


_COMPARISONS = {
    **{name: name for name in COMPARISONS},
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
}  # fmt: skip
_LOGIC = {f"{start}_{name}": name for start in ("logical", "bitwise") for name in ("and", "or", "xor", "not")}
_LOGIC |= {f"__{name}__": name for name in ("and", "or", "xor")}


@handles(*_COMPARISONS, *_LOGIC)
def _compare(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    """There is no step for truth values: this one vanishes where only a function of one value reads it."""
    name = base_name(c.applied)
    operands = [a.self, *([a.other] if hasattr(a, "other") else [])]
    if name in _COMPARISONS:
        mask = masks.compared(c, _COMPARISONS[name], uniform(c, a.self), uniform(c, a.other), meta)
    else:
        mask = masks.combined(c, _LOGIC[name], operands, meta) if name in _LOGIC else None
    if mask is not None:
        return mask
    made: Content = c.opaque(c.applied, vars(a), meta, "unsupported")
    if name in _COMPARISONS:
        # Both sides as PyTorch compares them: a number becomes a float32 beside a tensor of float32.
        operands = [uniform(c, each) for each in operands]
        operands = [each if isinstance(each, Content) else float(torch.tensor(c.number(each))) for each in operands]
        fits = all(not isinstance(each, Content) or each.meta.dtype.is_floating_point for each in operands)
        name = _COMPARISONS[name]
    else:
        fits, name = all(map(is_truth, operands)), _LOGIC[name]
    return replace(made, formula=formula(c, name, operands)) if fits else made


@handles("heaviside")
def _heaviside(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    above = as_number(c, c.call(aten.gt.Scalar, a.self, 0.0), meta)
    return c.call(aten.where.self, c.call(aten.eq.Scalar, a.self, 0.0), a.values, above)


def as_number(c: Reader, truth: Content, meta: Meta) -> Content:
    """1 where it is true, else 0."""
    return composed(c, "where", [truth, 1.0, 0.0], {}, Meta(truth.shape, meta.dtype))


def _parametric_relu(c: Reader, condition: Content, on: Any, off: Any, meta: Meta) -> Content | None:
    """where(x > 0, x, slope * x) with slopes that are parameters."""
    test = condition.formula
    producer = c.producers.get(off.name) if isinstance(off, Content) and off.is_value else None
    if test is None or test.name not in ("gt", "ge") or test.operands[1] != 0 or producer is None:
        return None
    x, (step, operands) = test.operands[0], producer
    slopes = [each for each in operands if isinstance(each, Content) and not each.is_value]
    values = [each for each in operands if isinstance(each, Content) and each.is_value]
    same = step.kind == "mul" and [each.name for each in values] == [x.name] and getattr(on, "name", None) == x.name
    if not same or len(slopes) != 1 or x.shape != meta.shape:
        return None
    sizes = (1,) * (len(x.shape) - len(slopes[0].shape)) + slopes[0].shape
    wide = [axis for axis, size in enumerate(sizes) if size != 1]
    if len(wide) > 1 or wide == [c.batch_axis(x)]:
        return None
    weight = c.call(aten.reshape.default, slopes[0], [math.prod(sizes)])
    axis = wide[0] if wide else min(1, len(x.shape) - 1)
    return c.emit("prelu", [x, weight], meta, ("", "weight"), channel_axis=axis)


def _unit_length_or_zero(c: Reader, mask: Content, chosen: Any, other: Any) -> Content | None:
    """where(row is 0, 0, row of length 1): the length divides 0 as well, so it says nothing."""
    if mask.formula.name != "eq" or uniform(c, chosen) != 0 or not isinstance(other, Content):
        return None
    largest, number = mask.formula.operands
    unit, greatest = (c.producers.get(getattr(each, "name", "")) for each in (other, largest))
    absolute = None if greatest is None else c.producers.get(greatest[1][0].name)
    kinds = [each and each[0].kind for each in (unit, greatest, absolute)]
    if number != 0 or unit is None or greatest is None or absolute is None or kinds != ["normalize", "amax", "abs"]:
        return None
    (x, *_), axis = unit[1], unit[0].attributes["axis"]
    how = greatest[0].attributes
    if absolute[1][0].name != x.name or tuple(how["axes"]) != (axis,) or not how["keep_dims"]:
        return None
    return other


@handles("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar", "masked_fill")
def _where(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    if hasattr(a, "mask"):
        mask, chosen, other = a.mask, a.value, a.self
    else:
        mask, chosen, other = a.condition, a.self, a.other
    if is_composed(mask) and meta.dtype.is_floating_point:
        chosen, other = (as_number(c, each, meta) if is_truth(each) else each for each in (chosen, other))
        made = _parametric_relu(c, mask, chosen, other, meta) or _unit_length_or_zero(c, mask, chosen, other)
        return composed(c, "where", [mask, chosen, other], {}, meta) if made is None else made
    if masks.is_mask(c, mask) and meta.dtype != torch.bool:
        return masks.chosen(c, mask, chosen, other, meta)
    require_fixed(mask, "condition")
    dtype = meta.dtype

    def weight(condition: Content) -> Content:
        return c.call(aten.to.dtype, condition, dtype)

    def is_fixed(operand: Any) -> bool:
        return not isinstance(operand, Content) or not operand.is_value

    inverse = c.call(aten.logical_not.default, mask)
    if is_fixed(chosen) or is_fixed(other):
        fixed, value, at = (chosen, other, mask) if is_fixed(chosen) else (other, chosen, inverse)
        elsewhere = inverse if at is mask else mask
        nothing = c.call(aten.zeros.default, [1], dtype=dtype)
        if not isinstance(fixed, Content):
            fixed = c.call(aten.full.default, [1], fixed, dtype=dtype)
        addend = c.call(aten.where.self, at, fixed, nothing)
        # Minus infinity absorbs what it is added to.
        if not c.sources(fixed) and bool((c.data(fixed) == -math.inf).all()):
            return c.call(aten.add.Tensor, value, addend)
        kept = c.call(aten.mul.Tensor, value, weight(elsewhere))
        zero = not c.sources(fixed) and not c.data(fixed).any()
        return kept if zero else c.call(aten.add.Tensor, kept, addend)
    first, second = c.call(aten.mul.Tensor, chosen, weight(mask)), c.call(aten.mul.Tensor, other, weight(inverse))
    return c.call(aten.add.Tensor, first, second)


@handles("softmax", "log_softmax", "_softmax", "_log_softmax", "special_softmax", "special_log_softmax")
def _softmax(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    axis = a.dim % max(len(a.self.shape), 1)
    c.keep_batch(a.self, [axis])
    return c.emit("log_softmax" if "log" in base_name(c.applied) else "softmax", [a.self], meta, axis=axis)


@handles(*DROPOUTS, "native_dropout")
def _dropout(c: Reader, a: SimpleNamespace, meta: Any) -> Any:
    x = a.input
    if not a.train or a.p == 0:
        return [x, None] if isinstance(meta, list) else x
    if isinstance(meta, list):
        return [c.call(aten.dropout.default, x, a.p, True), None]
    return c.noisy(c.applied, vars(a), meta)
