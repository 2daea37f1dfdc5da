# SPDX-License-Identifier: Apache-2.0
"""Reductions over axes."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from ..core.refusals import MIXES, Refused
from .contents import Content, Meta
from .expression import Node
from .reader import Reader, handles, require_numbers
from .schema import base_name

aten = torch.ops.aten


def _axes(c: Reader, x: Content, given: Any) -> tuple[int, ...]:
    require_numbers(c, x)
    rank = len(x.shape)
    given = [given] if isinstance(given, int) else given
    axes = tuple(sorted(axis % rank for axis in given)) if given else tuple(range(rank))
    c.keep_batch(x, axes)
    return axes


_REDUCTIONS = {
    "mean": "mean",
    "sum": "sum",
    "amax": "amax",
    "amin": "amin",
    "max.default": "amax",
    "min.default": "amin",
}


@handles(*_REDUCTIONS)
def _reduce(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    name = base_name(c.applied)
    axes = _axes(c, a.self, getattr(a, "dim", None))
    kind = _REDUCTIONS.get(name) or _REDUCTIONS[f"{name}.default"]
    return c.emit(kind, [a.self], meta, axes=axes, keep_dims=bool(getattr(a, "keepdim", False)))


@handles("cumsum")
def _cumulative_sum(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    """A product with a triangle of ones."""
    (axis,) = _axes(c, a.self, a.dim)
    # What is counted is numbers, too, whatever the model stores them in.
    x = replace(a.self, meta=Meta(meta.shape, torch.float32))
    size = meta.shape[axis]
    ones = Content(Meta((size, size), torch.float32), node=Node("data", (torch.ones(size, size).tril(),)))
    moved = c.call(aten.movedim.int, x, axis, -1)
    summed = c.call(aten.linear.default, moved, ones)
    if not meta.dtype.is_floating_point:
        c.integers.add(summed.name)
    return replace(c.call(aten.movedim.int, summed, -1, axis), meta=meta)


@handles("max.dim", "min.dim")
def _max(c: Reader, a: SimpleNamespace, meta: list[Meta]) -> list[Any]:
    axes = _axes(c, a.self, a.dim)
    greatest = base_name(c.applied) == "max"
    values = c.emit("amax" if greatest else "amin", [a.self], meta[0], axes=axes, keep_dims=bool(a.keepdim))
    if greatest:
        return [values, c.emit("argmax", [a.self], meta[1], axis=axes[0], keep_dims=bool(a.keepdim))]
    return [values, c.unsupported_part(a, meta, 1, "its indices are read; only the values are computed")]


@handles("argmax")
def _argmax(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    if a.dim is None:
        raise Refused(MIXES)
    return c.emit("argmax", [a.self], meta, axis=_axes(c, a.self, a.dim)[0], keep_dims=bool(a.keepdim))


def _correction(a: SimpleNamespace) -> float:
    if hasattr(a, "unbiased"):
        return int(a.unbiased)
    return 1 if a.correction is None else a.correction


@handles("var", "std")
def _var(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    axes, keep = _axes(c, a.self, getattr(a, "dim", None)), bool(getattr(a, "keepdim", False))
    return c.emit(base_name(c.applied), [a.self], meta, axes=axes, keep_dims=keep, correction=_correction(a))


@handles("var_mean", "std_mean")
def _var_mean(c: Reader, a: SimpleNamespace, meta: list[Meta]) -> list[Content]:
    axes, keep = _axes(c, a.self, getattr(a, "dim", None)), bool(getattr(a, "keepdim", False))
    kind = base_name(c.applied).removesuffix("_mean")
    return [
        c.emit(kind, [a.self], meta[0], axes=axes, keep_dims=keep, correction=_correction(a)),
        c.emit("mean", [a.self], meta[1], axes=axes, keep_dims=keep),
    ]


@handles("linalg_vector_norm", "norm")
def _norm(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    order = a.ord if hasattr(a, "ord") else getattr(a, "p", 2)
    order = 2 if order is None else order
    axes, keep = _axes(c, a.self, getattr(a, "dim", None)), bool(getattr(a, "keepdim", False))
    if order == math.inf:
        magnitude = c.call(aten.abs.default, a.self)
        return c.emit("amax", [magnitude], meta, axes=axes, keep_dims=keep)
    if order not in (1, 2):
        raise Refused.argument("ord" if hasattr(a, "ord") else "p", order, "1, 2 and infinity are allowed")
    return c.emit("norm", [a.self], meta, axes=axes, keep_dims=keep, order=int(order))


@handles("cosine_similarity")
def _cosine_similarity(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    shape, units = torch.broadcast_shapes(a.x1.shape, a.x2.shape), []
    for x in (a.x1, a.x2):
        from_last = a.dim % len(shape) - len(shape)
        if len(x.shape) < -from_last or x.shape[from_last] != shape[from_last]:
            # PyTorch takes lengths of what is repeated.
            x = c.call(aten.expand.default, x, list(shape))
        axis = from_last + len(x.shape)
        c.keep_batch(x, [axis])
        length = c.call(aten.linalg_vector_norm.default, x, 2, [axis], True)
        length = c.call(aten.clamp_min.default, length, a.eps)
        units.append(c.call(aten.div.Tensor, x, length))
    return c.call(aten.sum.dim_IntList, c.call(aten.mul.Tensor, *units), [a.dim])


@handles("logsumexp")
def _logsumexp(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    axes = list(_axes(c, a.self, a.dim))
    greatest = c.call(aten.amax.default, a.self, axes, True)
    terms = c.call(aten.exp.default, c.call(aten.sub.Tensor, a.self, greatest))
    total = c.call(aten.log.default, c.call(aten.sum.dim_IntList, terms, axes, True))
    return c.call(aten.reshape.default, c.call(aten.add.Tensor, total, greatest), list(meta.shape))
