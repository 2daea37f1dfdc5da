# SPDX-License-Identifier: Apache-2.0
"""Operators that move data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from ..core import masks
from ..core.refusals import MIXES, Refused
from ..core.sizes import Batch
from .composition import is_truth
from .converter import HANDLERS, Converter, handles, require_fixed
from .elementwise import as_number
from .expression import Expression
from .items import Fixed, Item, Meta, Traced
from .operators import IDENTITIES, PERMUTES, RESHAPES, base_name, permutation, slice_bounds

aten = torch.ops.aten


@handles(*IDENTITIES)
def _identity(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    x = a.self
    if isinstance(x, Fixed):  # as another tensor is: only its type is read
        return c.call(aten.to.dtype, x, meta.dtype)
    if is_truth(x) and meta.dtype.is_floating_point:
        return as_number(c, x)
    whole = isinstance(x, Traced) and x.name in c.truths | c.wholes | c.counted
    truth = masks.as_truth(c, x) if whole and meta.dtype == torch.bool else None
    if truth is not None:
        return replace(truth, dtype=torch.bool)
    if x.dtype.is_floating_point != meta.dtype.is_floating_point and not (whole and not x.dtype.is_floating_point):
        raise Refused("it converts between integers and numbers")
    return replace(x, dtype=meta.dtype)


HANDLERS.update(
    {
        "detach": lambda c, a, meta: c.emit("identity", [a.self], *meta, expression=None, stop_gradient=True),
        "stack": lambda c, a, meta: c.stacked(a.tensors, a.dim % len(meta.shape)),
        "slice": lambda c, a, meta: c.cut(
            a.self, a.dim % len(a.self.shape), *slice_bounds(a.start, a.end, a.step, a.self.shape[a.dim])
        ),
    }
)


@handles(*RESHAPES)
def _reshape(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    x, shape = a.self, meta.shape
    if x.shape == shape:
        return x
    if isinstance(x, Fixed):  # as another tensor is: only its shape is read
        return c.reshape(x, shape)
    step = c.step_of(x)
    if step is not None and step.kind == "reshape":
        return c.reshape(c.operands_of[x.name][0], shape)
    axis = c.batch_axis(shape)
    before = math.prod(x.shape[: c.batch_of(x)]) * x.outer
    outer, rest = divmod(before, math.prod(shape[:axis]))
    if rest or outer < 1 or c.for_one(shape)[axis] % outer:
        raise Refused(MIXES)
    return c.emit("reshape", [x], *meta, outer=outer, shape=c.for_one(shape))


@handles(*PERMUTES)
def _permute(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    axes = permutation(c.applied, vars(a), len(a.self.shape))
    return a.self if axes == sorted(axes) else c.emit("permute", [a.self], *meta, axes=tuple(axes))


@handles("expand", "expand_as", "broadcast_to")
def _expand(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    if isinstance(a.self, Fixed):
        return c.call(aten.expand.default, a.self, list(meta.shape))
    return a.self if a.self.shape == meta.shape else c.emit("expand", [a.self], *meta, shape=c.for_one(meta.shape))


@handles("repeat", "tile")
def _repeat(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    counts = list(getattr(a, "repeats", None) or a.dims)
    counts = [1] * (len(meta.shape) - len(counts)) + counts
    x = c.reshape(a.self, [1] * (len(counts) - len(a.self.shape)) + list(a.self.shape))
    if all(1 in (size, count) for size, count in zip(x.shape, counts, strict=True)):
        return c.call(aten.expand.default, x, list(meta.shape))
    for axis, count in enumerate(counts):
        if count != 1:
            c.keep_batch(x, [axis])
            x = c.call(aten.cat.default, [x] * count, axis)
    return x


@handles("repeat_interleave.self_int")
def _repeat_interleave(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    if a.dim is None:
        raise Refused(MIXES)
    axis = a.dim % len(a.self.shape)
    c.keep_batch(a.self, [axis])
    return gathered(c, a.self, axis, [index // a.repeats for index in range(a.self.shape[axis] * a.repeats)])


@handles("unfold")
def _unfold(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    x, rank = a.self, len(a.self.shape)
    if not rank:
        raise Refused("it takes a number apart")
    axis = a.dimension % rank
    c.keep_batch(x, [axis])
    count = meta.shape[axis]
    windows = gathered(c, x, axis, [start * a.step + place for start in range(count) for place in range(a.size)])
    windows = c.call(aten.reshape.default, windows, [*x.shape[:axis], count, a.size, *x.shape[axis + 1 :]])
    return c.call(aten.permute.default, windows, [*range(axis + 1), *range(axis + 2, rank + 1), axis + 1])


@handles("col2im")
def _fold(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    x = a.self
    height, width = map(int, a.kernel_size)
    if len(x.shape) != 3:
        raise Refused(MIXES)
    spans = [
        (size + 2 * before - dilation * (window - 1) - 1, stride)
        for size, before, dilation, window, stride in zip(
            a.output_size, a.padding, a.dilation, a.kernel_size, a.stride, strict=True
        )
    ]
    rows, columns = (span // stride + 1 for span, stride in spans)
    channels = x.shape[1] // (height * width)
    if list(a.stride) == [height, width] and list(a.output_size) == [rows * height, columns * width]:
        apart = c.call(aten.reshape.default, x, [x.shape[0], channels, height, width, rows, columns])
        beside = c.call(aten.permute.default, apart, [0, 1, 4, 2, 5, 3])
        return c.reshape(beside, meta.shape)
    # Windows that overlap are added up, which a transposed convolution does: every value stays at its own place.
    places = torch.eye(height * width).reshape(height * width, 1, height, width).repeat(channels, 1, 1, 1)
    weight = c.fixed_of(places)
    apart = c.call(aten.reshape.default, x, [*x.shape[:2], rows, columns])
    beyond = [span % stride for span, stride in spans]
    return c.call(
        aten.convolution.default, apart, weight, None, list(a.stride), list(a.padding), list(a.dilation), True, beyond,
        channels,
    )  # fmt: skip


@handles("select")
def _select(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    axis = a.dim % len(a.self.shape)
    c.keep_batch(a.self, [axis])
    return c.entry(a.self, axis, a.index % a.self.shape[axis])


@handles("unbind")
def _unbind(c: Converter, a: SimpleNamespace, meta: list[Meta]) -> list[Item]:
    axis = a.dim % len(a.self.shape)
    c.keep_batch(a.self, [axis])
    return [c.entry(a.self, axis, at) for at in range(len(meta))]


@handles(
    "split", "split_with_sizes", "chunk", "tensor_split", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"
)
def _split(c: Converter, a: SimpleNamespace, meta: list[Meta]) -> list[Item]:
    axis = a.dim % len(a.self.shape)
    if len(meta) == 1:
        return [a.self]
    c.keep_batch(a.self, [axis])
    return c.sections(a.self, axis, [one.shape[axis] for one in meta])


@handles("cat", "concat", "concatenate")
def _concat(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    axis = (getattr(a, "dim", None) or getattr(a, "axis", None) or 0) % len(meta.shape)
    pieces = [tensor for tensor in a.tensors if tensor.shape != (0,) and tensor.shape[axis] != 0] or a.tensors[:1]
    for piece in pieces:
        c.keep_batch(piece, [axis])
    return pieces[0] if len(pieces) == 1 else c.emit("concat", pieces, *meta, axis=axis)


@handles("flip")
def _flip(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    axes = tuple(sorted(axis % len(a.self.shape) for axis in a.dims))
    c.keep_batch(a.self, axes)
    return c.emit("flip", [a.self], *meta, axes=axes) if axes else a.self


@handles("roll")
def _roll(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    x = a.self
    if not a.dims:
        raise Refused(MIXES)
    for shift, dim in zip(a.shifts, a.dims, strict=True):
        axis = dim % len(x.shape)
        c.keep_batch(x, [axis])
        x = c.rolled(x, axis, shift)
    return x


@handles("embedding")
def _embedding(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    require_fixed(a.weight, "table")
    if a.scale_grad_by_freq:
        raise Refused.argument("scale_grad_by_freq", True, "False is allowed")
    row = a.padding_idx
    fixed = None if row is None or row < 0 else int(row)
    return c.emit("embedding", [a.indices, a.weight], *meta, fixed_row=fixed, checked=True)


def _looked_up(c: Converter, table: Item, indices: Item, meta: Meta) -> Item:
    """table[indices], where the indices depend on the input."""
    if indices.dtype in (torch.bool, torch.uint8):
        raise Refused("its mask depends on the input")
    rows, *features = table.shape
    count = math.prod(features)
    operands = [indices, c.reshape(table, [rows, count])]
    picked = c.emit("embedding", operands, (*indices.shape, count), fixed_row=None)
    return c.reshape(picked, meta.shape)


@handles("index_select")
def _index_select(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    axis = a.dim % len(a.self.shape)
    if isinstance(a.self, Fixed) and isinstance(a.index, Traced) and axis == 0:
        return _looked_up(c, a.self, a.index, meta)
    return gathered(c, a.self, axis, c.data(a.index).reshape(-1).tolist())


@handles("index")
def _index(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    x, indices = a.self, {axis: index for axis, index in enumerate(a.indices) if index is not None}
    if isinstance(x, Fixed) and len(a.indices) == 1 and isinstance(a.indices[0], Traced):
        return _looked_up(c, x, a.indices[0], meta)
    if c.batch_of(x) == 0 and 0 in indices and _are_all_examples(c, indices[0]):
        if list(indices) != [0, 1]:
            raise Refused(f"its indices are on the axes {list(indices)}; the examples and one more axis are allowed")
        shape = torch.broadcast_shapes(*(c.for_one(index.shape) for index in indices.values()))[1:]
        places = c.data(indices[1]) % x.shape[1]
        picked = places.reshape(places.shape[-len(shape) :]).expand(shape).reshape(-1)
        return c.reshape(gathered(c, x, 1, picked.tolist()), meta.shape)
    numbers = {axis: c.data(index) for axis, index in indices.items()}
    if any(index.dtype in (torch.bool, torch.uint8) for index in numbers.values()):
        if len(numbers) > 1:
            raise Refused(f"it has {len(numbers)} indices, a mask among them; a mask alone is allowed")
        ((axis, mask),) = numbers.items()
        numbers = {axis + k: index for k, index in enumerate(mask.bool().nonzero(as_tuple=True))}
    first, *others = axes = sorted(numbers)
    c.keep_batch(x, axes)
    if axes != list(range(first, first + len(axes))):
        raise Refused(f"its indices are on the axes {axes}; axes beside one another are allowed")
    flat = numbers[first] % x.shape[first]
    for axis in others:
        flat = flat * x.shape[axis] + numbers[axis] % x.shape[axis]
    joined = c.reshape(x, [*x.shape[:first], math.prod(x.shape[axis] for axis in axes), *x.shape[axes[-1] + 1 :]])
    return c.reshape(gathered(c, joined, first, flat.reshape(-1).tolist()), meta.shape)


def _are_all_examples(c: Converter, index: Item) -> bool:
    """Whether indices are all examples in order, as libraries of transformers read masks."""
    if not isinstance(index, Fixed) or index.noise or index.dtype == torch.bool:
        return False
    expression = Expression(index.node)
    if not expression.follows_the_batch or expression.sources:
        return False
    for examples in (1, 3):
        places = c.evaluate(expression, batch=examples)
        if places.shape[:1] != (examples,) or places.reshape(-1).tolist() != list(range(examples)):
            return False
    return True


def gathered(c: Converter, x: Item, axis: int, places: Sequence[int]) -> Any:
    """These places of an axis."""
    if isinstance(x, Fixed):
        return c.call(aten.index_select.default, x, axis, c.fixed_of(torch.tensor(places)))
    c.keep_batch(x, [axis])
    size, steps = x.shape[axis], {b - a for a, b in zip(places, places[1:], strict=False)} or {1}
    if list(places) == list(range(size - 1, -1, -1)) and size > 1:
        return c.emit("flip", [x], x.shape, x.dtype, axes=(axis,))
    if len(steps) == 1 and min(steps) > 0:
        return c.cut(x, axis, places[0], places[-1] + 1, steps.pop())
    shape = (*x.shape[:axis], len(places), *x.shape[axis + 1 :])
    return c.emit("gather", [x], shape, x.dtype, axis=axis, indices=tuple(map(int, places)))


def placed(c: Converter, x: Item, axis: int, places: Sequence[int], part: Item) -> Any:
    """A tensor that holds `part` at these places of an axis."""
    size = x.shape[axis]
    order = list(range(size))
    for at, place in enumerate(places):
        order[place % size] = size + at
    return gathered(c, c.call(aten.cat.default, [x, part], axis), axis, order)


@handles("index_put", "_unsafe_index_put")
def _index_put(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    if a.accumulate:
        raise Refused("it adds to the values at its indices; writing there (accumulate=False) is allowed")
    (axis, index), *others = ((axis, index) for axis, index in enumerate(a.indices) if index is not None)
    if not others and axis == 0 and is_truth(index) and index.shape == meta.shape:
        return c.call(aten.where.self, index, a.values, a.self)
    places = c.data(index)
    places = places.nonzero().squeeze(-1) if places.dtype == torch.bool else places
    if others or places.dim() != 1 or len(set(places.tolist())) != len(places):
        raise Refused(
            "it writes at indices of several axes or at one place twice; different indices of one axis are allowed"
        )
    shape = [*meta.shape[:axis], len(places), *meta.shape[axis + 1 :]]
    return placed(c, a.self, axis, places.tolist(), c.call(aten.expand.default, a.values, shape))


@handles("gather")
def _gather(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    if isinstance(a.self, Fixed) and not meta.dtype.is_floating_point:
        numbers = c.data(a.self).unique()
        if len(numbers) == 1:  # whatever is chosen, as of kinds of words that are all alike
            return c.call(aten.full.default, list(meta.shape), int(numbers), dtype=meta.dtype)
    index, axis = c.data(a.index), a.dim % len(a.self.shape)
    line = index.movedim(axis, -1).reshape(-1, index.shape[axis])
    sizes = zip(c.for_one(a.self.shape), index.shape, strict=True)
    if any(size != other for k, (size, other) in enumerate(sizes) if k != axis):
        raise Refused("its index has other sizes than what it takes from, along axes that it does not go along")
    if (line == line[0]).all():
        return gathered(c, a.self, axis, line[0].tolist())
    # Other places in other rows: one by one, out of all rows of an example.
    x, count = c.call(aten.movedim.int, a.self, axis, -1), len(line)
    if c.batch_of(x) != 0 or x.outer != 1 or axis == 0:
        raise Refused("its index takes other places in other rows, where the batch is not the first axis")
    size = x.shape[-1]
    places = (torch.arange(count)[:, None] * size + line % size).reshape(-1)
    rows = gathered(c, c.reshape(x, [Batch(), count * size]), 1, places.tolist())
    return c.call(aten.movedim.int, c.reshape(rows, [*x.shape[:-1], line.shape[1]]), -1, axis)


_PADS = {
    **{"constant_pad_nd": "constant", "_pad_circular": "circular"},
    **{f"reflection_pad{axes}d": "reflect" for axes in (1, 2)},
    **{f"replication_pad{axes}d": "replicate" for axes in (1, 2)},
}


@handles("pad", *_PADS)
def _pad(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    mode = _PADS.get(base_name(c.applied)) or a.mode
    sides = list(getattr(a, "pad", None) or a.padding)
    x, rank = a.self, len(a.self.shape)
    pairs = [(0, 0)] * (rank - len(sides) // 2)
    pairs += [(sides[k], sides[k + 1]) for k in range(len(sides) - 2, -1, -2)]
    for axis, (before, after) in enumerate(pairs):
        if before < 0 or after < 0:
            x = c.cut(x, axis, max(-before, 0), x.shape[axis] + min(after, 0))
    pairs = [(max(before, 0), max(after, 0)) for before, after in pairs]
    c.keep_batch(x, [axis for axis, pair in enumerate(pairs) if any(pair)])
    if not any(map(any, pairs)):
        return x
    value = float(c.operand(getattr(a, "value", None) or 0) or 0)
    return c.emit("pad", [x], *meta, padding=tuple(pairs), mode=mode, value=value)


@handles("pixel_shuffle", "pixel_unshuffle")
def _pixel_shuffle(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    name = base_name(c.applied)
    if len(a.self.shape) != 4 or c.batch_of(a.self) not in (0, None):
        raise Refused("only for [batch, channels, height, width]")
    factor = a.upscale_factor if name == "pixel_shuffle" else a.downscale_factor
    return c.emit(name, [a.self], *meta, factor=factor)
