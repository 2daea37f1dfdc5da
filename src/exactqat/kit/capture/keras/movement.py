# SPDX-License-Identifier: Apache-2.0
"""Operations that move values, repeat them or put others beside them; resizing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import tree

from ..core.builder import Moving
from ..core.refusals import SIZE_OF_BATCH, Refused
from ..core.sizes import Batch, Size, exact
from .items import Fixed, Item
from .known import path_of
from .products import linear
from .reader import Reader, layers, operations
from .reduction import axes_of, channel_axis_of, padded, spatial_sizes


@operations("Reshape")
def _reshape(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    sizes = list(exact(tree.flatten(operation.newshape)))
    if -1 in sizes:
        unknown = sizes.index(-1)
        sizes[unknown] = math.prod(x.shape) // math.prod(sizes[:unknown] + sizes[unknown + 1 :])
    return c.reshape(x, sizes)


@operations("Squeeze", "ExpandDims")
def _units(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, axis = args[0], operation.axis
    shape = list(x.shape)
    if type(operation).__name__ == "ExpandDims":
        for each in sorted(a % (x.rank + 1) for a in ([axis] if isinstance(axis, int) else axis)):
            shape.insert(each, 1)
    else:
        axes = (
            [at for at, size in enumerate(shape) if size == 1]
            if axis is None
            else [axis]
            if isinstance(axis, int)
            else axis
        )
        gone = [each % x.rank for each in axes]
        shape = [size for at, size in enumerate(shape) if at not in gone]
    return c.reshape(x, shape)


@operations("Transpose")
def _transpose(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    axes = range(x.rank)[::-1] if operation.axes is None else operation.axes
    return c.permute(x, [axis % x.rank for axis in axes])


@operations("Moveaxis")
def _move(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    # Axes whose sizes are their numbers, moved.
    moved = np.moveaxis(np.empty(range(x.rank)), operation.source, operation.destination)
    return c.permute(x, moved.shape)


@operations("Swapaxes")
def _swap(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    order = list(range(x.rank))
    first, second = operation.axis1 % x.rank, operation.axis2 % x.rank
    order[first], order[second] = second, first
    return c.permute(x, order)


@operations("DepthToSpace", "SpaceToDepth")
def _blocks(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, side = args[0], int(operation.block_size)
    first = channel_axis_of(operation.data_format, x.rank) == 1
    batch, *sizes = x.shape
    channels, height, width = sizes if first else (sizes[2], sizes[0], sizes[1])
    if type(operation).__name__ == "DepthToSpace":
        parts = (batch, channels // side**2, side, side, height, width) if first else (
            batch, height, width, side, side, channels // side**2)  # fmt: skip
        order = (0, 1, 4, 2, 5, 3) if first else (0, 1, 3, 2, 4, 5)
        made = (channels // side**2, height * side, width * side)
    else:
        parts = (batch, channels, height // side, side, width // side, side) if first else (
            batch, height // side, side, width // side, side, channels)  # fmt: skip
        order = (0, 1, 3, 5, 2, 4) if first else (0, 1, 3, 2, 4, 5)
        made = (channels * side**2, height // side, width // side)
    turned = c.permute(c.reshape(x, parts), order)
    return c.reshape(turned, (batch, *(made if first else (*made[1:], made[0]))))


@operations("GetItem")
def _get(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, key = args[0], args[1] if len(args) > 1 else kwargs["key"]
    keys = list(key) if isinstance(key, tuple | list) else [key]
    parts = [part for each in keys for part in ([each.start, each.stop] if isinstance(each, slice) else [each])]
    if any(isinstance(part, Item) for part in parts):
        raise Refused("its indices depend on the input")
    if any(isinstance(part, Batch) for part in parts):
        raise Refused(SIZE_OF_BATCH)
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        given = sum(each is not None for each in keys) - 1
        keys[at : at + 1] = [slice(None)] * (x.rank - given)
    keys += [slice(None)] * (x.rank - sum(each is not None for each in keys))
    shape: list[Size] = []
    axis = 0
    for each in keys:
        if each is None:
            shape.append(1)
            continue
        size = x.shape[axis]
        if each == slice(None):
            shape.append(size)
        elif isinstance(size, Batch):
            raise Refused("it takes examples out of the batch")
        elif isinstance(each, slice):
            start, stop, step = each.indices(size)
            if step < 1:
                raise Refused("backwards; use a flip")
            x = c.cut(x, axis, start, stop, step)
            shape.append(x.shape[axis])
        else:
            at = int(each) % size
            x = c.cut(x, axis, at, at + 1)
        axis += 1
    return c.reshape(x, shape)


@layers("Embedding")
def _embedding(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    held = getattr(layer, "_embeddings", None)
    return _looked_up(c, c.weight(layer.embeddings if held is None else held), args[0])


@layers("ReversibleEmbedding")
def _reversible_embedding(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if not (args[1] if len(args) > 1 else kwargs.get("reverse", False)):
        return _embedding(c, layer, args, kwargs)
    held = getattr(layer, "_embeddings", None)
    kernel = c.weight(layer.embeddings if held is None else held) if layer.tie_weights else None
    if kernel is None:
        kernel = c.weight(layer.reverse_embeddings)
    else:
        kernel = c.then(kernel, kernel.shape[::-1], lambda array: array.transpose((1, 0)))
    made, cap = linear(c, args[0], kernel, None, path_of(layer)), layer.logit_soft_cap
    if cap is None:
        return made
    turned = c.emit("tanh", [c.emit("div", [made, float(cap)], made.shape)], made.shape)
    return c.emit("mul", [turned, float(cap)], made.shape)


@operations("Take")
def _take(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, indices = args[0], args[1] if len(args) > 1 else kwargs["indices"]
    if isinstance(x, Fixed) and isinstance(indices, Moving) and len(x.shape) == 2 and operation.axis in (0, -2):
        return _looked_up(c, x, indices)
    raise Refused("its indices depend on the input and are not those of rows")


@operations("TakeAlongAxis")
def _take_along(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Fixed places of an axis, others for each row of the axes in front."""
    x, indices = args[0], args[1] if len(args) > 1 else kwargs["indices"]
    places = None if isinstance(indices, Moving) else c.numbers(indices)
    if not isinstance(x, Moving) or places is None or operation.axis is None or operation.axis % x.rank != x.rank - 1:
        raise Refused("its indices depend on the input, or are not along the last axis")
    if c.batch_axis(x.shape) != 0 or not (places == places[:1]).all():
        raise Refused("its indices differ from example to example")
    batch, *rows, size = x.shape
    places = np.broadcast_to(places[0], (*rows, places.shape[-1])).astype(int) % size
    count = math.prod(rows)
    flat = (np.arange(count)[:, None] * size + places.reshape(count, -1)).reshape(-1)
    joined = c.reshape(x, (batch, count * size))
    taken = c.emit("gather", [joined], (batch, flat.size), axis=1, indices=tuple(int(each) for each in flat))
    return c.reshape(taken, (batch, *places.shape))


def _looked_up(c: Reader, table: Fixed, indices: Moving) -> Moving:
    """Rows of a table by integers that the network is given."""
    variable = next((key for key, name in c.names.items() if name == table.name), None)
    module = "" if variable is None else table.name.rpartition(".")[0]
    return c.emit("embedding", [indices, table], (*indices.shape, table.shape[1]), module=module, fixed_row=None)


@operations("Concatenate")
def _concatenate(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    items = tree.flatten(args)
    rank = next(each for each in items if isinstance(each, Moving)).rank
    return c.join(items, int(operation.axis) % rank)


@operations("Stack")
def _stack(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    items = tree.flatten(args)
    axis = int(operation.axis) % (items[0].rank + 1)
    return c.stacked(items, axis)


@operations("Split")
def _split(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, axis = args[0], int(operation.axis) % args[0].rank
    given = operation.indices_or_sections
    ends = (
        [x.shape[axis] // given * (at + 1) for at in range(given)]
        if isinstance(given, int)
        else [*given, x.shape[axis]]
    )
    starts = [0, *ends[:-1]]
    return [c.cut(x, axis, start, end) for start, end in zip(starts, ends, strict=True)]


@operations("Unstack")
def _unstack(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,), axis = args, int(operation.axis) % args[0].rank
    shape = [size for at, size in enumerate(x.shape) if at != axis]
    return [c.reshape(c.cut(x, axis, at, at + 1), shape) for at in range(x.shape[axis])]


@operations("Roll")
def _roll(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    if operation.axis is None:
        raise Refused("over all axes, laid flat; name the axes")
    shifts, axes = ([each] if isinstance(each, int) else list(each) for each in (operation.shift, operation.axis))
    for shift, given in zip(shifts * (len(axes) if len(shifts) == 1 else 1), axes, strict=True):
        axis = given % x.rank
        end = x.shape[axis] - shift % x.shape[axis]
        if end < x.shape[axis]:
            x = c.join([c.cut(x, axis, end, x.shape[axis]), c.cut(x, axis, 0, end)], axis)
    return x


@operations("Pad")
def _pad(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, *rest = args
    value = rest[0] if rest else kwargs.get("constant_values")
    value = value.number if isinstance(value, Fixed) else value
    pairs = tuple((int(before), int(after)) for before, after in operation.pad_width)
    pairs = pairs * x.rank if len(pairs) == 1 else pairs
    mode = {"constant": "constant", "reflect": "reflect"}.get(operation.mode)
    if mode is None:
        raise Refused(f"with mode {operation.mode}")
    return c.emit("pad", [x], padded(x.shape, pairs), padding=pairs, mode=mode, value=float(value or 0.0))


@operations("Flip")
def _flip(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    return c.flip(x, axes_of(operation.axis, x.rank))


@operations("Repeat")
def _repeat(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, count = args[0], operation.repeats
    if not isinstance(count, int) or operation.axis is None:
        raise Refused("with a count for each entry")
    axis = int(operation.axis) % x.rank
    shape = list(x.shape)
    shape[axis] *= count
    indices = tuple(np.repeat(np.arange(x.shape[axis]), count).tolist())
    if axis == c.batch_axis(x.shape):
        raise Refused("it repeats the batch")
    return c.emit("gather", [x], shape, axis=axis, indices=indices)


@operations("BroadcastTo")
def _broadcast(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    shape = exact(operation.shape)
    return c.emit("expand", [args[0]], shape, shape=c.for_one(shape))


@operations("Resize")
def _resize(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    if operation.crop_to_aspect_ratio or operation.pad_to_aspect_ratio or operation.antialias:
        raise _aspect(operation)
    return _resized(c, x, channel_axis_of(operation.data_format, x.rank), operation.size, operation.interpolation)


def _aspect(resizing: Any) -> Refused:
    given = [name for name in ("crop_to_aspect_ratio", "pad_to_aspect_ratio", "antialias") if getattr(resizing, name)]
    return Refused(f"with {', '.join(f'{name}=True' for name in given)}; it is computed with False")


def _resized(c: Reader, x: Moving, axis: int, size: Sequence[int], word: str) -> Moving:
    spatial = [at for at in range(x.rank) if at not in (0, axis)]
    factors = [new / x.shape[at] for new, at in zip(size, spatial, strict=True)]
    whole = all(factor == int(factor) for factor in factors)
    if word not in ("nearest", "bilinear") or (word == "nearest" and not whole):
        shown = ", ".join(f"{factor:.4g}" for factor in factors)
        raise Refused(
            f"with interpolation={word!r} by {shown}; it is computed by 'nearest' by whole factors or 'bilinear'"
        )
    shape = list(x.shape)
    for at, new in zip(spatial, size, strict=True):
        shape[at] = int(new)
    return c.emit(
        "resize",
        [x],
        shape,
        size=tuple(int(new) for new in size),
        mode=word,
        align_corners=False,
        scales=None,
        channel_axis=axis,
    )


@layers("UpSampling2D")
def _up_sampling(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axis = channel_axis_of(layer.data_format, x.rank)
    sizes = [size * by for size, by in zip(spatial_sizes(x, axis), layer.size, strict=True)]
    return _resized(c, x, axis, sizes, layer.interpolation)


@layers("Resizing")
def _resizing(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if layer.crop_to_aspect_ratio or layer.pad_to_aspect_ratio or layer.antialias:
        raise _aspect(layer)
    x = args[0]
    return _resized(c, x, channel_axis_of(layer.data_format, x.rank), (layer.height, layer.width), layer.interpolation)


@layers("CenterCrop")
def _center_crop(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, axis = args[0], channel_axis_of(layer.data_format, args[0].rank)
    spatial = [at for at in range(1, x.rank) if at != axis]
    for at, size in zip(spatial, (layer.height, layer.width), strict=True):
        if size > x.shape[at]:
            raise Refused("of images that are smaller than the crop")
        start = (x.shape[at] - size) // 2
        x = c.cut(x, at, start, start + size)
    return x
