# SPDX-License-Identifier: Apache-2.0
"""ONNX's operators that move values, as steps of a network."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..core.builder import Moving
from ..core.refusals import Refused
from ..core.sizes import broadcast
from .onnx_nodes import HANDLERS, Attributes, handles
from .reader import Fixed, Item, Result

if TYPE_CHECKING:
    from .onnx import OnnxReader


@handles("Shape", "Size")
def _shape(c: OnnxReader, node: Attributes, x: Moving) -> Result:
    sizes = c.for_one(x.shape) if c.one_example else c.in_numbers(x.shape)
    return Fixed(
        c.outputs[0],
        np.asarray(math.prod(sizes) if c.word == "Size" else sizes[node["start"] or 0 : node["end"]], np.int64),
    )


@handles("Reshape")
def _reshape(c: OnnxReader, node: Attributes, x: Item, wanted: Item | None = None) -> Result:
    sizes = c.integers(wanted, node["shape"])
    if node["allowzero"] and 0 in sizes:
        raise Refused("its result is empty")
    if isinstance(x, Fixed):
        return Fixed(x.name, x.data.reshape(sizes))
    whole = list(c.for_one(x.shape) if c.one_example else c.in_numbers(x.shape))
    sizes = [whole[at] if size == 0 and at < len(whole) else size for at, size in enumerate(sizes)]
    others = math.prod(size for size in sizes if size != -1)
    sizes = [math.prod(whole) // max(others, 1) if size == -1 else size for size in sizes]
    if c.one_example or math.prod(sizes) == math.prod(whole):
        return c.reshaped(x, sizes) if c.one_example else c.reshape(x, c.in_batches(sizes))
    # The batch is open, and the shape is that of one example all the same.
    if math.prod(sizes) != math.prod(c.for_one(x.shape)):
        raise Refused(f"a shape of {sizes} does not hold {list(c.for_one(x.shape))}")
    return c.reshaped(x, sizes)


@handles("Flatten")
def _flatten(c: OnnxReader, node: Attributes, x: Moving) -> Result:
    axis = node["axis"] + (x.rank + 1 if node["axis"] < 0 else 0)
    return c.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@handles("Squeeze")
def _squeeze(c: OnnxReader, node: Attributes, x: Moving, which: Item | None = None) -> Result:
    dropped = [axis % x.rank for axis in c.integers(which, node["axes"])]
    dropped = dropped or [at for at, size in enumerate(x.shape) if size == 1]
    if c.batch_axis(x.shape) in dropped:
        raise Refused("it drops the batch's axis")
    return c.reshape(x, [size for at, size in enumerate(x.shape) if at not in dropped])


@handles("Unsqueeze")
def _unsqueeze(c: OnnxReader, node: Attributes, x: Moving, which: Item | None = None) -> Result:
    new, shape = c.integers(which, node["axes"]), list(x.shape)
    for axis in sorted(axis % (x.rank + len(new)) for axis in new):
        shape.insert(axis, 1)
    return c.reshape(x, shape)


HANDLERS["Transpose"] = lambda c, node, x: c.permute(x, node["perm"] or range(x.rank)[::-1])


@handles("Concat")
def _concat(c: OnnxReader, node: Attributes, *items: Item) -> Result:
    axis = node["axis"] % len(items[0].shape)
    if c.batch_axis(next(item for item in items if isinstance(item, Moving)).shape) == axis:
        raise Refused("it joins examples of the batch")
    return c.join(items, axis)


@handles("Split")
def _split(c: OnnxReader, node: Attributes, x: Moving, sections: Item | None = None) -> Result:
    axis, sizes = node["axis"] % x.rank, c.integers(sections, node["split"])
    if not sizes:
        count = node["num_outputs"] or len(c.outputs)
        size = -(-x.shape[axis] // count)
        sizes = [min(size, x.shape[axis] - size * at) for at in range(count)]
    return list(c.sections(x, axis, sizes))


@handles("Slice")
def _slice(c: OnnxReader, node: Attributes, x: Moving, *bounds: Item | None) -> Result:
    operands = dict(zip(("starts", "ends", "axes", "steps"), bounds, strict=False))
    starts, ends, axes, steps = (
        c.integers(operands.get(name), node[name]) for name in ("starts", "ends", "axes", "steps")
    )
    axes, steps = axes or list(range(len(starts))), steps or [1] * len(starts)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        axis, size = axis % x.rank, c.in_numbers(x.shape)[axis % x.rank]
        if axis == c.batch_axis(x.shape) and range(size)[start:end:step] == range(size):
            continue
        first, last, step = slice(start, end, step).indices(size)
        if step == -1 and len(range(first, last, step)) == size:
            x = c.flip(x, (axis,))
        elif step < 1 or first >= last:
            raise Refused(f"it takes {first}:{last}:{step} of an axis of {size}")
        else:
            x = c.cut(x, axis, first, last, step)
    return x


_PADS = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


@handles("Pad")
def _pad(
    c: OnnxReader,
    node: Attributes,
    x: Moving,
    amounts: Item | None = None,
    constant: Item | None = None,
    which: Item | None = None,
) -> Result:
    ends, over = c.integers(amounts, node["pads"]), [axis % x.rank for axis in c.integers(which, range(x.rank))]
    pairs, number = [(0, 0)] * x.rank, c.fixed(constant)
    for at, axis in enumerate(over):
        pairs[axis] = ends[at], ends[at + len(over)]
    if pairs[c.batch_axis(x.shape)] != (0, 0):
        raise Refused("it pads the batch")
    if not any(map(any, pairs)):
        return x
    shape = [size + sum(pair) if any(pair) else size for size, pair in zip(x.shape, pairs, strict=True)]
    value = (node["value"] or 0.0) if number is None else float(number.reshape(()))
    return c.step("pad", [x], shape, padding=tuple(pairs), mode=_PADS[node["mode"]], value=value)


@handles("Gather")
def _gather(c: OnnxReader, node: Attributes, x: Item, indices: Item) -> Result:
    axis = node["axis"] % len(x.shape)
    if isinstance(indices, Moving):
        if axis or len(x.shape) != 2 or not isinstance(x, Fixed):
            raise Refused("its indices are computed from the network's input")
        return c.step("embedding", [indices, x], (*indices.shape, x.shape[1]))
    assert isinstance(x, Moving)
    if axis == c.batch_axis(x.shape):
        raise Refused("it chooses examples of the batch")
    places, before, after = indices.data, x.shape[:axis], x.shape[axis + 1 :]
    wanted = [int(place) % x.shape[axis] for place in places.reshape(-1)]
    if places.ndim == 0:
        return c.entry(x, axis, wanted[0])
    entries = c.step("gather", [x], (*before, len(wanted), *after), axis=axis, indices=tuple(wanted))
    return c.reshape(entries, (*before, *places.shape, *after))


@handles("Expand")
def _expand(c: OnnxReader, node: Attributes, x: Moving, sizes: Item) -> Result:
    shape = broadcast(x.shape, c.in_batches(c.integers(sizes)))
    return x if shape == x.shape else c.step("expand", [x], shape, shape=c.for_one(shape))


@handles("Tile")
def _tile(c: OnnxReader, node: Attributes, x: Moving, times: Item) -> Result:
    for axis, count in enumerate(c.integers(times)):
        x = c.join([x] * count, axis)
    return x


@handles("DepthToSpace", "SpaceToDepth")
def _blocks(c: OnnxReader, node: Attributes, x: Moving) -> Result:
    block, (rows, channels, height, width) = node["blocksize"], x.shape
    if c.word == "SpaceToDepth":
        split = c.reshape(x, (rows, channels, height // block, block, width // block, block))
        return c.reshape(c.permute(split, (0, 3, 5, 1, 2, 4)), c.shape)
    if node["mode"] == "CRD":
        return c.step("pixel_shuffle", [x], c.shape, factor=block)
    split = c.reshape(x, (rows, block, block, channels // (block * block), height, width))
    return c.reshape(c.permute(split, (0, 3, 4, 1, 5, 2)), c.shape)


# (mode, place of values) -> mode of a step, and whether corners are aligned.
_RESIZES = {
    ("nearest", "asymmetric"): ("nearest", False),
    ("nearest", "half_pixel"): ("nearest_exact", False),
    ("linear", "half_pixel"): ("bilinear", False),
    ("linear", "pytorch_half_pixel"): ("bilinear", False),
    ("linear", "align_corners"): ("bilinear", True),
    ("cubic", "half_pixel"): ("bicubic", False),
    ("cubic", "align_corners"): ("bicubic", True),
}


@handles("Resize")
def _resize(c: OnnxReader, node: Attributes, x: Moving, *sizes: Item | None) -> Result:
    shape, mode, place = c.shape, node["mode"], node["coordinate_transformation_mode"] or "half_pixel"
    known = _RESIZES.get((mode, place))
    # Of whole factors, the two roundings that files have for these places choose the same values.
    if known is None or (mode == "nearest" and place == "asymmetric" and node["nearest_mode"] != "floor"):
        raise Refused(f"mode {mode}, {place}, {node['nearest_mode']} is no resize that networks have")
    if shape[:2] != x.shape[:2] or node["antialias"]:
        raise Refused("it resizes channels or filters before it")
    if mode == "cubic" and node["cubic_coeff_a"] != -0.75:
        raise Refused("its cubic coefficient must be -0.75")
    if shape == x.shape:
        return x
    size, (mode, aligned) = tuple(shape[2:]), known
    return c.step("resize", [x], shape, size=size, mode=mode, align_corners=aligned, scales=None, channel_axis=1)
