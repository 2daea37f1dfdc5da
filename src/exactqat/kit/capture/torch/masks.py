# SPDX-License-Identifier: Apache-2.0
"""Masks that a network is given: integers of 0 and 1, or truth values, with which it computes as with numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...planning.masks import HIDES, HOLDS
from ..core.refusals import Refused
from .contents import Content, Meta
from .expression import Expression

aten = torch.ops.aten
# What is added to a score that a mask hides, where the model adds minus infinity, or nearly so.
HIDDEN = -1e9
# The same comparison from the other side.
MIRRORED = {"eq": "eq", "ne": "ne", "gt": "lt", "ge": "le", "lt": "gt", "le": "ge"}


def is_given(c: Any, operand: Any) -> bool:
    """Whether it is integers or truth values that the network is given, or computes of such."""
    return isinstance(operand, Content) and operand.is_value and operand.name in c.integers and not operand.broken


def is_mask(c: Any, operand: Any) -> bool:
    """Likewise, of truth values."""
    return is_given(c, operand) and operand.meta.dtype == torch.bool


def as_truth(c: Any, x: Content) -> Content:
    """1 where an integer is not 0, else 0."""
    meta = Meta(x.shape, torch.bool)
    return replace(x, meta=meta) if x.meta.dtype == torch.bool else c.emit("compare", [x, 0.0], meta, how="ne")


def opposite(c: Any, x: Content) -> Content:
    return c.emit("sub", [1.0, x], Meta(x.shape, torch.bool))


def compared(c: Any, name: str, x: Any, other: Any, meta: Meta) -> Content | None:
    """A comparison of what is given with numbers; None if it is another one."""
    if not is_given(c, x):
        x, other, name = other, x, MIRRORED[name]
    if not is_given(c, x) or x.meta.dtype.is_floating_point:
        return None
    if isinstance(other, Content):
        if other.is_value or other.noise or c.sources(other):
            return None
        if c.batch_axes(other.shape):
            raise Refused("it compares with numbers of another kind for each example")
        other = c.call(aten.to.dtype, other, torch.float32)
    if x.meta.dtype == torch.bool:
        holds = None if isinstance(other, Content) else HOLDS.get((name, other))
        return None if holds is None else x if holds else opposite(c, x)
    if isinstance(other, Content):
        return c.emit("compare", [before_repeated(c, x), other], meta, how=name)
    return c.emit("compare", [x, other], Meta(x.shape, torch.bool), how=name)


def combined(c: Any, name: str, operands: Sequence[Any], meta: Meta) -> Content | None:
    """Logic of masks, and of masks with fixed truth values; None if something else is among them."""
    masks = [each for each in operands if is_mask(c, each)]
    fixed = [each for each in operands if isinstance(each, Content) and not each.is_value]
    if not masks or len(masks) + len(fixed) < len(operands) or any(x.meta.dtype != torch.bool for x in fixed):
        return None
    if name == "not":
        return opposite(c, masks[0])
    if name not in ("and", "or"):
        return None
    if name == "or":
        inverse = [
            combined(c, "not", [x], x.meta) if x in masks else c.call(aten.logical_not.default, x) for x in operands
        ]
        both = combined(c, "and", inverse, meta)
        return None if both is None else opposite(c, both)
    if fixed:
        values = c.data(fixed[0])
        if bool(values.all()):
            return c.spread(masks[0], meta)
        return c.emit("mul", [masks[0], c.call(aten.to.dtype, fixed[0], torch.float32)], meta)
    return c.emit("mul", masks, meta)


def before_repeated(c: Any, x: Content) -> Content:
    """A mask before it was repeated along axes: what reads it repeats it as well."""
    producer = c.producers.get(x.name)
    if producer is not None and producer[0].kind == "expand" and len(producer[1][0].shape) == len(x.shape):
        return before_repeated(c, producer[1][0])
    return x


def hiding(c: Any, mask: Content, number: float, dtype: torch.dtype) -> Content:
    """`number`, which hides a score, where the mask is 0, and 0 elsewhere."""
    shown = before_repeated(c, mask)
    meta = Meta(shown.shape, dtype)
    return c.emit("mul", [c.emit("sub", [1.0, shown], meta), max(float(number), HIDDEN)], meta)


def chosen(c: Any, mask: Content, on: Any, off: Any, meta: Meta) -> Content:
    """`on` where the mask is 1, else `off`: values, constants or numbers."""
    if _hides(c, on):
        return chosen(c, opposite(c, mask), off, on, meta)
    dtype = meta.dtype
    if _hides(c, off):
        added = hiding(c, mask, _number(c, off), dtype)
        if _is_zero(c, on):
            return c.spread(added, meta)
        return c.call(aten.add.Tensor, on, added)
    shown = replace(mask, meta=Meta(mask.shape, dtype))
    parts = []
    for operand, weight in ((on, shown), (off, None)):
        if _is_zero(c, operand):
            continue
        weight = c.emit("sub", [1.0, shown], shown.meta) if weight is None else weight
        parts.append(c.call(aten.mul.Tensor, weight, operand))
    if not parts:
        raise Refused("it chooses between 0 and 0")
    return c.spread(parts[0] if len(parts) == 1 else c.call(aten.add.Tensor, *parts), meta)


def _number(c: Any, operand: Any) -> float:
    if isinstance(operand, Content):
        return float(c.data(operand).reshape(-1)[0])
    return float(operand)


def _hides(c: Any, operand: Any) -> bool:
    if isinstance(operand, Content):
        if operand.is_value or operand.noise or c.sources(operand):
            return False
        values = c.data(operand)
        return values.numel() > 0 and bool((values == values.reshape(-1)[0]).all()) and _number(c, operand) <= HIDES
    return float(operand) <= HIDES


def _is_zero(c: Any, operand: Any) -> bool:
    if isinstance(operand, Content):
        return not operand.is_value and not operand.noise and not c.sources(operand) and not c.data(operand).any()
    return float(operand) == 0


def without_examples(c: Any, x: Content, indices: Sequence[Any]) -> dict[int, torch.Tensor] | None:
    """The fixed places among the indices of `x[examples, places]`, where the first ones are all examples in order, as
    libraries of transformers read masks; None if they are not."""
    axis = c.batch_axis(x)
    if axis != 0 or not indices or indices[0] is None or indices[0].is_value or indices[0].noise:
        return None
    expression = Expression(indices[0].node, c.prime)
    if not expression.follows_the_batch or expression.sources:
        return None
    for examples in (1, 3):
        found = c.evaluate(expression, batch=examples)
        if found.dtype == torch.bool or found.numel() != examples or found.shape[:1] != (examples,):
            return None
        if found.reshape(-1).tolist() != list(range(examples)):
            return None
    return {at: c.data(each) for at, each in enumerate(indices) if at and each is not None}


__all__ = ["as_truth", "chosen", "combined", "compared", "hiding", "is_given", "is_mask"]
