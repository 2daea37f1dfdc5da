# SPDX-License-Identifier: Apache-2.0
"""Reductions over axes."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from ..core.products import cumulative_sum
from ..core.refusals import MIXES, Refused
from ..core.sizes import broadcast
from .converter import Converter, handles, require_numbers
from .items import Item, Meta
from .operators import base_name

aten = torch.ops.aten


def _axes(c: Converter, x: Item, dimensions: Any) -> tuple[int, ...]:
    require_numbers(c, x)
    rank = len(x.shape)
    dimensions = [dimensions] if isinstance(dimensions, int) else dimensions
    axes = tuple(sorted(axis % rank for axis in dimensions)) if dimensions else tuple(range(rank))
    c.keep_batch(x, axes)
    return axes


@handles("mean", "sum", "amax", "amin", "prod", "max.default", "min.default")
def _reduce(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    name = base_name(c.applied)
    axes = _axes(c, a.self, getattr(a, "dim", None))
    kind = {"max": "amax", "min": "amin"}.get(name, name)
    return c.emit(kind, [a.self], *meta, axes=axes, keep_dims=bool(getattr(a, "keepdim", False)))


@handles("cumsum")
def _cumulative_sum(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    (axis,) = _axes(c, a.self, a.dim)
    return replace(cumulative_sum(c, a.self, axis), dtype=meta.dtype)


@handles("max.dim", "min.dim")
def _max(c: Converter, a: SimpleNamespace, meta: list[Meta]) -> list[Any]:
    axes, keep = _axes(c, a.self, a.dim), bool(a.keepdim)
    greatest = base_name(c.applied) == "max"
    values = c.emit("amax" if greatest else "amin", [a.self], *meta[0], axes=axes, keep_dims=keep)
    if greatest:
        return [values, c.emit("argmax", [a.self], *meta[1], axis=axes[0], keep_dims=keep)]
    reason = "its indices are read; only the values are computed"
    return [values, c.refused(vars(a), meta, reason)[1]]


@handles("argmax")
def _argmax(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    if a.dim is None:
        raise Refused(MIXES)
    return c.emit("argmax", [a.self], *meta, axis=_axes(c, a.self, a.dim)[0], keep_dims=bool(a.keepdim))


@handles("var", "std", "var_mean", "std_mean")
def _var(c: Converter, a: SimpleNamespace, meta: Any) -> Any:
    axes, keep = _axes(c, a.self, getattr(a, "dim", None)), bool(getattr(a, "keepdim", False))
    kind = base_name(c.applied).removesuffix("_mean")
    correction = int(a.unbiased) if hasattr(a, "unbiased") else 1 if a.correction is None else a.correction
    first = meta[0] if isinstance(meta, list) else meta
    varied = c.emit(kind, [a.self], *first, axes=axes, keep_dims=keep, correction=correction)
    if not isinstance(meta, list):
        return varied
    return [varied, c.emit("mean", [a.self], *meta[1], axes=axes, keep_dims=keep)]


@handles("linalg_vector_norm", "norm")
def _norm(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    order = a.ord if hasattr(a, "ord") else getattr(a, "p", 2)
    order = 2 if order is None else order
    axes, keep = _axes(c, a.self, getattr(a, "dim", None)), bool(getattr(a, "keepdim", False))
    if order == math.inf:
        magnitude = c.call(aten.abs.default, a.self)
        return c.emit("amax", [magnitude], *meta, axes=axes, keep_dims=keep)
    if order not in (1, 2):
        raise Refused.argument("ord" if hasattr(a, "ord") else "p", order, "1, 2 and infinity are allowed")
    return c.emit("norm", [a.self], *meta, axes=axes, keep_dims=keep, order=int(order))


@handles("cosine_similarity")
def _cosine_similarity(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    shape, units = torch.broadcast_shapes(*(c.for_one(x.shape) for x in (a.x1, a.x2))), []
    for x in (a.x1, a.x2):
        from_last = a.dim % len(shape) - len(shape)
        if len(x.shape) < -from_last or x.shape[from_last] != shape[from_last]:
            # PyTorch takes lengths of what is repeated.
            x = c.call(aten.expand.default, x, list(broadcast(a.x1.shape, a.x2.shape)))
        axis = from_last + len(x.shape)
        c.keep_batch(x, [axis])
        length = c.call(aten.linalg_vector_norm.default, x, 2, [axis], True)
        length = c.call(aten.clamp_min.default, length, a.eps)
        units.append(c.call(aten.div.Tensor, x, length))
    return c.call(aten.sum.dim_IntList, c.call(aten.mul.Tensor, *units), [a.dim])


@handles("logsumexp")
def _logsumexp(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    axes = list(_axes(c, a.self, a.dim))
    greatest = c.call(aten.amax.default, a.self, axes, True)
    terms = c.call(aten.exp.default, c.call(aten.sub.Tensor, a.self, greatest))
    total = c.call(aten.log.default, c.call(aten.sum.dim_IntList, terms, axes, True))
    return c.reshape(c.call(aten.add.Tensor, total, greatest), meta.shape)
