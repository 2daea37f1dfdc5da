# SPDX-License-Identifier: Apache-2.0
"""Operators that move data."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import torch

from ..core.refusals import MIXES, Refused
from . import masks
from .composition import composed, is_truth
from .contents import Content, Meta
from .expression import Node
from .reader import Reader, handles, require_fixed
from .schema import IDENTITIES, PERMUTES, RESHAPES, base_name, permutation, slice_bounds

aten = torch.ops.aten


@handles(*IDENTITIES)
def _identity(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    if is_truth(a.self) and meta.dtype.is_floating_point:
        return composed(c, "where", [a.self, 1.0, 0.0], {}, meta)
    if masks.is_given(c, a.self) and meta.dtype == torch.bool:
        return masks.as_truth(c, a.self)
    exact = masks.is_given(c, a.self) and not a.self.meta.dtype.is_floating_point
    if a.self.meta.dtype.is_floating_point != meta.dtype.is_floating_point and not exact:
        raise Refused("it converts between integers and numbers")
    return replace(a.self, meta=meta)


@handles("detach")
def _detach(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    return c.emit("identity", [a.self], meta, expression=None, stop_gradient=True)


@handles(*RESHAPES)
def _reshape(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    x, shape = a.self, meta.shape
    if x.shape == shape:
        return x
    producer = c.producers.get(x.name)
    if producer is not None and producer[0].kind == "reshape" and not x.broken:
        return c.call(aten.reshape.default, producer[1][0], list(shape))
    axes = c.batch_axes(shape)
    if x.broken or len(axes) != 1:
        return c.emit("reshape", [x], meta, shape=c.for_one(shape))
    before = math.prod(x.shape[: c.batch_axis(x)]) * x.outer
    outer, rest = divmod(before, math.prod(shape[: axes[0]]))
    if rest or outer < 1 or c.for_one(shape)[axes[0]] % outer:
        raise Refused(MIXES)
    return c.emit("reshape", [x], meta, outer=outer, shape=c.for_one(shape))


@handles(*PERMUTES)
def _permute(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    axes = permutation(base_name(c.applied), a, len(a.self.shape))
    return a.self if axes == sorted(axes) else c.emit("permute", [a.self], meta, axes=tuple(axes))


@handles("expand", "expand_as", "broadcast_to")
def _expand(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    return a.self if a.self.shape == meta.shape else c.emit("expand", [a.self], meta, shape=c.for_one(meta.shape))


@handles("repeat", "tile")
def _repeat(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    x, counts = a.self, list(getattr(a, "repeats", None) or a.dims)
    counts = [1] * (len(meta.shape) - len(counts)) + counts
    x = c.call(aten.reshape.default, x, [1] * (len(counts) - len(x.shape)) + list(x.shape))
    single = [
        size if count == 1 else count for size, count in zip(x.shape, counts, strict=True) if size == 1 or count == 1
    ]
    if len(single) == len(counts):
        return c.call(aten.expand.default, x, list(meta.shape))
    for axis, count in enumerate(counts):
        if count > 1:
            c.keep_batch(x, [axis])
            x = c.call(aten.cat.default, [x] * count, axis)
    return x


@handles("repeat_interleave.self_int")
def _repeat_interleave(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    if a.dim is None:
        raise Refused(MIXES)
    axis = a.dim % len(a.self.shape)
    return c.gather(a.self, axis, [index // a.repeats for index in range(a.self.shape[axis] * a.repeats)])


@handles("unfold")
def _unfold(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    x, rank = a.self, len(a.self.shape)
    if not rank:
        raise Refused("it takes a number apart")
    axis = a.dimension % rank
    count = meta.shape[axis]
    windows = c.gather(x, axis, [start * a.step + place for start in range(count) for place in range(a.size)])
    windows = c.call(aten.reshape.default, windows, [*x.shape[:axis], count, a.size, *x.shape[axis + 1 :]])
    return c.call(aten.permute.default, windows, [*range(axis + 1), *range(axis + 2, rank + 1), axis + 1])


@handles("col2im")
def _fold(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    x: Content = a.self
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
        return c.call(aten.reshape.default, beside, list(meta.shape))
    # Windows that overlap are added up, which a transposed convolution does: every value stays at its own place.
    places = torch.eye(height * width).reshape(height * width, 1, height, width).repeat(channels, 1, 1, 1)
    weight = Content(Meta(tuple(places.shape), places.dtype), node=Node("data", (places,)))
    apart = c.call(aten.reshape.default, x, [*x.shape[:2], rows, columns])
    beyond = [span % stride for span, stride in spans]
    return c.call(
        aten.convolution.default, apart, weight, None, list(a.stride), list(a.padding), list(a.dilation), True, beyond,
        channels,
    )  # fmt: skip


def _slice_of(c: Reader, x: Content, axis: int, start: int, stop: int, step: int, meta: Meta) -> Content:
    if (start, stop, step) == (0, x.shape[axis], 1):
        return x
    c.keep_batch(x, [axis])
    return c.emit("slice", [x], meta, axis=axis, start=start, stop=stop, step=step)


@handles("slice")
def _slice(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    axis = a.dim % len(a.self.shape)
    return _slice_of(c, a.self, axis, *slice_bounds(a.start, a.end, a.step, a.self.shape[axis]), meta)


@handles("narrow")
def _narrow(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    axis = a.dim % len(a.self.shape)
    start = a.start % a.self.shape[axis]
    return _slice_of(c, a.self, axis, start, start + a.length, 1, meta)


def _without(x: Content, axis: int, index: int, c: Reader, meta: Meta) -> Content:
    kept = Meta((*x.shape[:axis], 1, *x.shape[axis + 1 :]), x.meta.dtype)
    c.keep_batch(x, [axis])
    return c.call(aten.reshape.default, _slice_of(c, x, axis, index, index + 1, 1, kept), list(meta.shape))


@handles("select")
def _select(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    axis = a.dim % len(a.self.shape)
    return _without(a.self, axis, a.index % a.self.shape[axis], c, meta)


@handles("unbind")
def _unbind(c: Reader, a: SimpleNamespace, meta: list[Meta]) -> list[Content]:
    axis = a.dim % len(a.self.shape)
    return [_without(a.self, axis, index, c, one) for index, one in enumerate(meta)]


@handles(
    "split", "split_with_sizes", "chunk", "tensor_split", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"
)
def _split(c: Reader, a: SimpleNamespace, meta: list[Meta]) -> list[Content]:
    axis, start, parts = a.dim % len(a.self.shape), 0, []
    for one in meta:
        parts.append(_slice_of(c, a.self, axis, start, start + one.shape[axis], 1, one))
        start += one.shape[axis]
    return parts


@handles("cat", "concat", "concatenate")
def _concat(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    axis = (getattr(a, "dim", None) or getattr(a, "axis", None) or 0) % len(meta.shape)
    pieces = [tensor for tensor in a.tensors if tensor.shape != (0,)]
    for piece in pieces:
        c.keep_batch(piece, [axis])
    return pieces[0] if len(pieces) == 1 else c.emit("concat", pieces, meta, axis=axis)


@handles("stack")
def _stack(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    axis = a.dim % len(meta.shape)
    return c.call(aten.cat.default, [c.call(aten.unsqueeze.default, tensor, axis) for tensor in a.tensors], axis)


@handles("flip")
def _flip(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    axes = tuple(sorted(axis % len(a.self.shape) for axis in a.dims))
    c.keep_batch(a.self, axes)
    return c.emit("flip", [a.self], meta, axes=axes) if axes else a.self


@handles("roll")
def _roll(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    x = a.self
    if not a.dims:
        raise Refused(MIXES)
    for shift, dim in zip(a.shifts, a.dims, strict=True):
        axis = dim % len(x.shape)
        size = x.shape[axis]
        if (shift := shift % size) == 0:
            continue
        head = c.call(aten.slice.Tensor, x, axis, size - shift, size, 1)
        x = c.call(aten.cat.default, [head, c.call(aten.slice.Tensor, x, axis, 0, size - shift, 1)], axis)
    return x


@handles("embedding")
def _embedding(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    require_fixed(a.weight, "table")
    if a.scale_grad_by_freq:
        raise Refused.argument("scale_grad_by_freq", True, "False is allowed")
    row = a.padding_idx
    fixed = None if row is None or row < 0 else int(row)
    return c.emit("embedding", [a.indices, a.weight], meta, ("", "weight"), fixed_row=fixed, checked=True)


def _looked_up(c: Reader, table: Content, indices: Content, meta: Meta) -> Content:
    """table[indices], where the indices depend on the input."""
    if indices.meta.dtype in (torch.bool, torch.uint8):
        raise Refused("its mask depends on the input")
    rows, *features = table.shape
    table = c.call(aten.reshape.default, table, [rows, math.prod(features)])
    shape = (*indices.shape, math.prod(features))
    picked = c.emit("embedding", [indices, table], Meta(shape, meta.dtype), ("", "weight"), fixed_row=None)
    return c.call(aten.reshape.default, picked, list(meta.shape))


@handles("index_select")
def _index_select(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    if not a.self.is_value and a.index.is_value and a.dim % len(a.self.shape) == 0:
        return _looked_up(c, a.self, a.index, meta)
    return c.gather(a.self, a.dim % len(a.self.shape), c.data(a.index).reshape(-1).tolist())


@handles("index")
def _index(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    x = a.self
    if not x.is_value and len(a.indices) == 1 and a.indices[0].is_value:
        return _looked_up(c, x, a.indices[0], meta)
    if (places := masks.without_examples(c, x, a.indices)) is not None:
        (batch, *index_shape) = torch.broadcast_shapes(*(index.shape for index in a.indices if index is not None))
        return _picked(c, x, places, tuple(index_shape), meta)
    given = {axis: c.data(index) for axis, index in enumerate(a.indices) if index is not None}
    if any(index.dtype in (torch.bool, torch.uint8) for index in given.values()):
        if len(given) > 1:
            raise Refused(f"it has {len(given)} indices, a mask among them; a mask alone is allowed")
        ((axis, mask),) = given.items()
        given = {axis + k: found for k, found in enumerate(mask.bool().nonzero(as_tuple=True))}
    axes = sorted(given)
    c.keep_batch(x, axes)
    if axes != list(range(axes[0], axes[0] + len(axes))):
        raise Refused(f"its indices are on the axes {axes}; axes beside one another are allowed")
    sizes = [x.shape[axis] for axis in axes]
    flat, index_shape = 0, torch.broadcast_shapes(*(index.shape for index in given.values()))
    for axis, size in zip(axes, sizes, strict=True):
        flat = flat * size + given[axis] % size
    first = axes[0]
    joined = c.call(aten.reshape.default, x, [*x.shape[:first], math.prod(sizes), *x.shape[axes[-1] + 1 :]])
    picked = c.gather(joined, first, torch.as_tensor(flat).expand(index_shape).reshape(-1).tolist())
    return c.call(aten.reshape.default, picked, list(meta.shape))


def _picked(c: Reader, x: Content, given: dict[int, torch.Tensor], index_shape: tuple[int, ...], meta: Meta) -> Content:
    """x[examples, places] of all examples: fixed places of one axis."""
    if list(given) != [1]:
        raise Refused(f"its indices are on the axes {[0, *given]}; the examples and one more axis are allowed")
    flat = (given[1] % x.shape[1]).reshape(given[1].shape[-len(index_shape) :])
    picked = c.gather(x, 1, flat.expand(index_shape).reshape(-1).tolist())
    return c.call(aten.reshape.default, picked, list(meta.shape))


@handles("index_put", "_unsafe_index_put")
def _index_put(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    if len(a.indices) == 1 and is_truth(a.indices[0]) and a.indices[0].shape == meta.shape and not a.accumulate:
        return c.call(aten.where.self, a.indices[0], a.values, a.self)
    given = [(axis, c.data(index)) for axis, index in enumerate(a.indices) if index is not None]
    axis, index = given[0]
    if index.dtype == torch.bool:
        index = index.nonzero().squeeze(-1)
    if a.accumulate:
        raise Refused("it adds to the values at its indices; writing there (accumulate=False) is allowed")
    if len(given) > 1 or index.dim() != 1 or len(set(index.tolist())) != len(index):
        raise Refused(
            "it writes at indices of several axes or at one place twice; different indices of one axis are allowed"
        )
    shape = [*meta.shape[:axis], len(index), *meta.shape[axis + 1 :]]
    return c.put(a.self, axis, index.tolist(), c.call(aten.expand.default, a.values, shape))


@handles("gather")
def _gather(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    if a.index.is_value and not a.self.is_value and not meta.dtype.is_floating_point:
        held = c.data(a.self)
        if bool((held == held.reshape(-1)[0]).all()):  # whatever is chosen, as of kinds of words that are all alike
            return c.call(aten.full.default, list(meta.shape), held.reshape(-1)[0].item(), dtype=meta.dtype)
    index, axis = c.data(a.index), a.dim % len(a.self.shape)
    line = index.movedim(axis, -1).reshape(-1, index.shape[axis])
    others = [size for k, size in enumerate(c.for_one(a.self.shape)) if k != axis]
    if others != [size for k, size in enumerate(index.shape) if k != axis]:
        raise Refused("its index has other sizes than what it takes from, along axes that it does not go along")
    if (line == line[0]).all():
        return c.gather(a.self, axis, line[0].tolist())
    # Other places in other rows: one by one, out of all rows of an example.
    x, count = c.call(aten.movedim.int, a.self, axis, -1), len(line)
    if c.batch_axis(x) != 0 or x.outer != 1 or axis == 0:
        raise Refused("its index takes other places in other rows, where the batch is not the first axis")
    size = x.shape[-1]
    places = (torch.arange(count)[:, None] * size + line % size).reshape(-1)
    taken = c.gather(c.call(aten.reshape.default, x, [c.prime, count * size]), 1, places.tolist())
    rows = c.call(aten.reshape.default, taken, [*x.shape[:-1], line.shape[1]])
    return c.call(aten.movedim.int, rows, -1, axis)


@handles("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d")
@handles("_pad_circular", "_pad_enum")
def _pad(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    name = base_name(c.applied)
    modes = {"reflection_": "reflect", "replication": "replicate", "_pad_circul": "circular", "constant_pa": "constant"}
    mode = getattr(a, "mode", None) if name == "pad" else modes.get(name[:11])
    if not isinstance(mode, str):
        raise Refused("")
    given = list(getattr(a, "pad", None) or a.padding)
    x, rank = a.self, len(a.self.shape)
    pairs = [(0, 0)] * (rank - len(given) // 2)
    pairs += [(given[k], given[k + 1]) for k in range(len(given) - 2, -1, -2)]
    for axis, (before, after) in enumerate(pairs):
        if before < 0 or after < 0:
            stop = x.shape[axis] + min(after, 0)
            x = c.call(aten.slice.Tensor, x, axis, max(-before, 0), stop, 1)
    pairs = [(max(before, 0), max(after, 0)) for before, after in pairs]
    c.keep_batch(x, [axis for axis, pair in enumerate(pairs) if any(pair)])
    if not any(map(any, pairs)):
        return x
    value = c.number(getattr(a, "value", None) or 0)
    return c.emit("pad", [x], meta, padding=tuple(pairs), mode=mode, value=float(value))


@handles("pixel_shuffle", "pixel_unshuffle")
def _pixel_shuffle(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    name = base_name(c.applied)
    if len(a.self.shape) != 4 or c.batch_axis(a.self) not in (0, None):
        raise Refused("only for [batch, channels, height, width]")
    factor = a.upscale_factor if name == "pixel_shuffle" else a.downscale_factor
    return c.emit(name, [a.self], meta, factor=factor)


@handles("channel_shuffle", "native_channel_shuffle")
def _channel_shuffle(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    batch, channels, *rest = a.self.shape
    x = c.call(aten.reshape.default, a.self, [batch, a.groups, channels // a.groups, *rest])
    x = c.call(aten.permute.default, x, [0, 2, 1, *range(3, len(rest) + 3)])
    return c.call(aten.reshape.default, x, list(meta.shape))
