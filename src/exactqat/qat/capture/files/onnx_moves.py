# SPDX-License-Identifier: Apache-2.0
"""ONNX's operators that move values, as steps of a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.builder import Moving
from ..core.refusals import Refused
from ..core.sizes import broadcast
from .onnx_nodes import handles
from .reader import Fixed


@handles("Shape", "Size")
def _shape(c: Any, node: Any) -> Any:
    x, given = c.item(node, 0), c.attributes(node)
    sizes = c.for_one(x.shape) if c.one_example else c.in_numbers(x.shape)
    if node.op_type == "Size":
        return Fixed(node.output[0], np.asarray(math.prod(sizes), np.int64))
    return Fixed(node.output[0], np.asarray(sizes[given.get("start", 0) : given.get("end")], np.int64))


def _reshaped(c: Any, x: Any, sizes: Sequence[int]) -> Any:
    """x under the file's own words for a shape, in which the batch may be fixed to one example."""
    if isinstance(x, Fixed):
        return Fixed(x.name, x.data.reshape(sizes))
    whole = list(c.for_one(x.shape) if c.one_example else c.in_numbers(x.shape))
    sizes = [whole[at] if size == 0 and at < len(whole) else size for at, size in enumerate(sizes)]
    others = math.prod(size for size in sizes if size != -1)
    sizes = [math.prod(whole) // max(others, 1) if size == -1 else size for size in sizes]
    if math.prod(sizes) != math.prod(whole):
        # The batch is open, and the shape is that of one example all the same.
        if math.prod(sizes) != math.prod(c.for_one(x.shape)):
            raise Refused(f"a shape of {sizes} does not hold {list(c.for_one(x.shape))}")
        return c.reshaped(x, sizes)
    return c.reshaped(x, sizes) if c.one_example else c.reshape(x, c.in_batches(sizes))


@handles("Reshape")
def _reshape(c: Any, node: Any) -> Any:
    sizes = c.operand_numbers(node, 1)
    if sizes is None:
        sizes = np.asarray(c.attributes(node)["shape"])
    if c.attributes(node).get("allowzero") and 0 in sizes:
        raise Refused("its result is empty")
    return _reshaped(c, c.item(node, 0), sizes.reshape(-1).astype(int).tolist())


@handles("Flatten")
def _flatten(c: Any, node: Any) -> Any:
    x = c.item(node, 0)
    axis = int(c.attributes(node).get("axis", 1))
    axis = axis % (x.rank + 1) if axis < 0 else axis
    return c.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


def _axes(c: Any, node: Any, rank: int) -> list[int]:
    axes = c.operand_numbers(node, 1)
    axes = c.attributes(node).get("axes") if axes is None else axes.reshape(-1).tolist()
    return sorted(int(axis) % rank for axis in axes or ())


@handles("Squeeze")
def _squeeze(c: Any, node: Any) -> Any:
    x = c.item(node, 0)
    axes = _axes(c, node, x.rank) or [at for at, size in enumerate(x.shape) if size == 1]
    if c.batch_axis(x.shape) in axes:
        raise Refused("it drops the batch's axis")
    return c.reshape(x, [size for at, size in enumerate(x.shape) if at not in axes])


@handles("Unsqueeze")
def _unsqueeze(c: Any, node: Any) -> Any:
    x, count = c.item(node, 0), len(c.attributes(node).get("axes") or c.operand_numbers(node, 1).reshape(-1))
    shape = list(x.shape)
    for axis in _axes(c, node, x.rank + count):
        shape.insert(axis, 1)
    return c.reshape(x, shape)


@handles("Transpose")
def _transpose(c: Any, node: Any) -> Any:
    x = c.item(node, 0)
    return c.permute(x, c.attributes(node).get("perm") or range(x.rank)[::-1])


@handles("Concat")
def _concat(c: Any, node: Any) -> Any:
    items = [c.item(node, position) for position in range(len(node.input))]
    axis = int(c.attributes(node)["axis"]) % len(items[0].shape)
    moving = next(each for each in items if isinstance(each, Moving))
    if c.batch_axis(moving.shape) == axis:
        raise Refused("it joins examples of the batch")
    return c.join(items, axis)


@handles("Split")
def _split(c: Any, node: Any) -> Any:
    x, given, sizes = c.item(node, 0), c.attributes(node), c.operand_numbers(node, 1)
    axis = int(given.get("axis", 0)) % x.rank
    if sizes is None and not given.get("split"):
        count = int(given.get("num_outputs", len(node.output)))
        size = -(-x.shape[axis] // count)
        sizes = [min(size, x.shape[axis] - size * at) for at in range(count)]
    sizes = [int(size) for size in (given.get("split") if sizes is None else sizes)]
    ends = np.cumsum([0, *sizes]).tolist()
    return [c.cut(x, axis, first, last) for first, last in zip(ends, ends[1:], strict=False)]


@handles("Slice")
def _slice(c: Any, node: Any) -> Any:
    x, given = c.item(node, 0), c.attributes(node)
    columns = [c.operand_numbers(node, position) for position in range(1, 5)]
    if columns[0] is None:  # as attributes, before opset 10
        columns = [np.asarray(given[name]) if name in given else None for name in ("starts", "ends", "axes")] + [None]
    starts, ends = (np.asarray(each).reshape(-1).tolist() for each in columns[:2])
    axes = range(len(starts)) if columns[2] is None else columns[2].reshape(-1).tolist()
    steps = [1] * len(starts) if columns[3] is None else columns[3].reshape(-1).tolist()
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        axis, size = int(axis) % x.rank, c.in_numbers(x.shape)[int(axis) % x.rank]
        if axis == c.batch_axis(x.shape) and range(size)[int(start) : int(end) : int(step)] == range(size):
            continue
        first, last, step = slice(int(start), int(end), int(step)).indices(size)
        if step == -1 and len(range(first, last, step)) == size:
            x = c.flip(x, (axis,))
        elif step < 1 or first >= last:
            raise Refused(f"it takes {first}:{last}:{step} of an axis of {size}")
        else:
            x = c.cut(x, axis, first, last, step)
    return x


@handles("Pad")
def _pad(c: Any, node: Any) -> Any:
    x, given = c.item(node, 0), c.attributes(node)
    amounts, value, axes = (c.operand_numbers(node, position) for position in range(1, 4))
    amounts = given["pads"] if amounts is None else amounts.reshape(-1).tolist()
    over = range(x.rank) if axes is None else [int(axis) % x.rank for axis in axes.reshape(-1)]
    pairs = [(0, 0)] * x.rank
    for at, axis in enumerate(over):
        pairs[axis] = int(amounts[at]), int(amounts[at + len(over)])
    mode = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}[
        given.get("mode", "constant")
    ]
    number = float(given.get("value", 0.0)) if value is None else float(value.reshape(()))
    if pairs[c.batch_axis(x.shape)] != (0, 0):
        raise Refused("it pads the batch")
    if not any(map(any, pairs)):
        return x
    shape = [size + sum(pair) if any(pair) else size for size, pair in zip(x.shape, pairs, strict=True)]
    return c.step("pad", [x], shape, padding=tuple(pairs), mode=mode, value=number)


@handles("Gather")
def _gather(c: Any, node: Any) -> Any:
    x, indices = c.item(node, 0), c.item(node, 1)
    rank = len(x.shape)
    axis = int(c.attributes(node).get("axis", 0)) % rank
    if isinstance(indices, Moving):
        if axis or rank != 2 or not isinstance(x, Fixed):
            raise Refused("its indices are computed from the network's input")
        return c.step("embedding", [indices, x], (*indices.shape, x.shape[1]))
    places = indices.data
    if axis == c.batch_axis(x.shape):
        raise Refused("it chooses examples of the batch")
    wanted = [int(each) % x.shape[axis] for each in places.reshape(-1)]
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    if places.ndim == 0:
        return c.reshape(c.cut(x, axis, wanted[0], wanted[0] + 1), (*before, *after))
    made = c.step("gather", [x], (*before, len(wanted), *after), axis=axis, indices=tuple(wanted))
    return c.reshape(made, (*before, *places.shape, *after))


@handles("Expand")
def _expand(c: Any, node: Any) -> Any:
    x, sizes = c.item(node, 0), c.operand_numbers(node, 1)
    shape = broadcast(x.shape, c.in_batches(sizes))
    return x if shape == x.shape else c.step("expand", [x], shape, shape=c.for_one(shape))


@handles("Tile")
def _tile(c: Any, node: Any) -> Any:
    x, times = c.item(node, 0), c.operand_numbers(node, 1)
    for axis, count in enumerate(int(each) for each in times):
        x = c.join([x] * count, axis)
    return x


@handles("DepthToSpace", "SpaceToDepth")
def _blocks(c: Any, node: Any) -> Any:
    x, given = c.item(node, 0), c.attributes(node)
    block, (rows, channels, height, width) = int(given["blocksize"]), x.shape
    if node.op_type == "SpaceToDepth":
        split = c.reshape(x, (rows, channels, height // block, block, width // block, block))
        turned = c.permute(split, (0, 3, 5, 1, 2, 4))
        return c.reshape(turned, (rows, channels * block * block, height // block, width // block))
    if given.get("mode", "DCR") == "CRD":
        return c.step("pixel_shuffle", [x], c.shapes(node)[0], factor=block)
    kept = channels // (block * block)
    turned = c.permute(c.reshape(x, (rows, block, block, kept, height, width)), (0, 3, 4, 1, 5, 2))
    return c.reshape(turned, (rows, kept, height * block, width * block))


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
def _resize(c: Any, node: Any) -> Any:
    x, given, shape = c.item(node, 0), c.attributes(node), c.shapes(node)[0]
    mode, place = given.get("mode", "nearest"), given.get("coordinate_transformation_mode", "half_pixel")
    found = _RESIZES.get((mode, place))
    rounding = given.get("nearest_mode", "round_prefer_floor")
    # Of whole factors, the two roundings that files have for these places choose the same values.
    if found is None or (mode == "nearest" and place == "asymmetric" and rounding != "floor"):
        raise Refused(f"mode {mode}, {place}, {rounding} is no resize that networks have")
    if shape[:2] != x.shape[:2] or given.get("antialias"):
        raise Refused("it resizes channels or filters before it")
    if mode == "cubic" and float(given.get("cubic_coeff_a", -0.75)) != -0.75:
        raise Refused("its cubic coefficient must be -0.75")
    how = {"size": tuple(shape[2:]), "mode": found[0], "align_corners": found[1], "scales": None, "channel_axis": 1}
    return x if shape == x.shape else c.step("resize", [x], shape, **how)
