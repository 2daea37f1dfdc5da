# SPDX-License-Identifier: Apache-2.0
"""Operations that move values, repeat them or put others beside them; resizing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from ..core.builder import Moving
from ..core.refusals import SIZE_OF_BATCH, Refused
from ..core.sizes import Batch, Size, exact
from .items import Fixed, Item, Result
from .reader import OPERATIONS, Reader, layers, operations
from .reduction import axes_of, channel_axis_of, padded, spatial_axes

OPERATIONS.update(
    {
        **dict.fromkeys(("Squeeze", "ExpandDims"), lambda c, how, x: c.reshape(x, c.shape_of(how, x))),
        "Flip": lambda c, how, x: c.flip(x, axes_of(how.axis, x.rank)),
        "BroadcastTo": lambda c, how, x: c.emit("expand", [x], exact(how.shape), shape=c.for_one(exact(how.shape))),
        "Concatenate": lambda c, how, items: c.join(items, int(how.axis) % len(items[0].shape)),
        "Stack": lambda c, how, items: c.stacked(items, int(how.axis) % (len(items[0].shape) + 1)),
        "Unstack": lambda c, how, x: [c.entry(x, int(how.axis) % x.rank, at) for at in range(x.shape[how.axis])],
    }
)


@operations("Reshape")
def _reshape(c: Reader, operation: keras.Operation, x: Moving) -> Result:
    newshape = operation.newshape
    sizes = list(exact(newshape if isinstance(newshape, Sequence) else [newshape]))
    if -1 in sizes:
        unknown = sizes.index(-1)
        sizes[unknown] = math.prod(x.shape) // math.prod(sizes[:unknown] + sizes[unknown + 1 :])
    return c.reshape(x, sizes)


@operations("Transpose", "Moveaxis", "Swapaxes")
def _permute(c: Reader, operation: keras.Operation, x: Moving) -> Result:
    name, axes = type(operation).__name__, range(x.rank)
    # Axes whose sizes are their numbers, moved.
    whole = np.empty(axes)
    if name == "Transpose":
        moved = whole.transpose(operation.axes)
    elif name == "Moveaxis":
        moved = np.moveaxis(whole, operation.source, operation.destination)
    else:
        moved = whole.swapaxes(operation.axis1, operation.axis2)
    return c.permute(x, moved.shape)


@operations("DepthToSpace", "SpaceToDepth")
def _blocks(c: Reader, operation: keras.Operation, x: Moving) -> Result:
    """As Keras writes it, over channels that are last."""
    side, result = int(operation.block_size), c.shape_of(operation, x)
    first = channel_axis_of(operation.data_format, x.rank) == 1
    batch, height, width, channels = (x.shape[axis] for axis in ((0, 2, 3, 1) if first else range(4)))
    if type(operation).__name__ == "DepthToSpace":
        rest = channels // side**2
        parts = (batch, rest, side, side, height, width) if first else (batch, height, width, side, side, rest)
        order = (0, 1, 4, 2, 5, 3) if first else (0, 1, 3, 2, 4, 5)
    else:
        rows, columns = (height // side, side), (width // side, side)
        parts = (batch, channels, *rows, *columns) if first else (batch, *rows, *columns, channels)
        order = (0, 1, 3, 5, 2, 4) if first else (0, 1, 3, 2, 4, 5)
    return c.reshape(c.permute(c.reshape(x, parts), order), result)


@operations("GetItem")
def _get(c: Reader, operation: keras.Operation, x: Moving, key: Any) -> Result:
    keys = list(key) if isinstance(key, tuple | list) else [key]
    parts = [part for index in keys for part in ([index.start, index.stop] if isinstance(index, slice) else [index])]
    if any(isinstance(part, Item) for part in parts):
        raise Refused("its indices depend on the input")
    if any(isinstance(part, Batch) for part in parts):
        raise Refused(SIZE_OF_BATCH)
    if Ellipsis not in keys:
        keys.append(Ellipsis)
    at = keys.index(Ellipsis)
    keys[at : at + 1] = [slice(None)] * (x.rank - sum(index is not None for index in keys) + 1)
    shape: list[Size] = []
    axis = 0
    for index in keys:
        if index is None:
            shape.append(1)
            continue
        size = x.shape[axis]
        if index == slice(None):
            shape.append(size)
        elif isinstance(size, Batch):
            raise Refused("it takes examples out of the batch")
        elif isinstance(index, slice):
            start, stop, step = index.indices(size)
            if step < 1:
                raise Refused("backwards; use a flip")
            x = c.cut(x, axis, start, stop, step)
            shape.append(x.shape[axis])
        else:
            at = int(index) % size
            x = c.cut(x, axis, at, at + 1)
        axis += 1
    return c.reshape(x, shape)


@operations("Take")
def _take(c: Reader, operation: keras.Operation, x: Item, indices: object) -> Result:
    """Rows of a table by integers that the network is given."""
    if (
        not isinstance(x, Fixed)
        or not isinstance(indices, Moving)
        or len(x.shape) != 2
        or operation.axis not in (0, -2)
    ):
        raise Refused("its indices depend on the input and are not those of rows")
    module = x.name.rpartition(".")[0] if x.name in c.names.values() else ""
    return c.emit("embedding", [indices, x], (*indices.shape, x.shape[1]), module=module, fixed_row=None)


@operations("Split")
def _split(c: Reader, operation: keras.Operation, x: Moving) -> Result:
    axis, parts = int(operation.axis) % x.rank, operation.indices_or_sections
    size = x.shape[axis]
    ends = [size // parts * (at + 1) for at in range(parts)] if isinstance(parts, int) else [*parts, size]
    return c.sections(x, axis, np.diff([0, *ends]).tolist())


@operations("Roll")
def _roll(c: Reader, operation: keras.Operation, x: Moving) -> Result:
    if operation.axis is None:
        raise Refused("over all axes, laid flat; name the axes")
    shifts, axes = ([part] if isinstance(part, int) else list(part) for part in (operation.shift, operation.axis))
    for shift, axis in zip(shifts * (len(axes) if len(shifts) == 1 else 1), axes, strict=True):
        x = c.rolled(x, axis % x.rank, shift)
    return x


@operations("Pad")
def _pad(c: Reader, operation: keras.Operation, x: Moving, constant_values: Any = None) -> Result:
    value = constant_values.number if isinstance(constant_values, Fixed) else constant_values
    pairs = tuple((int(before), int(after)) for before, after in operation.pad_width)
    if operation.mode not in ("constant", "reflect"):
        raise Refused(f"with mode {operation.mode}")
    return padded(c, x, pairs * x.rank if len(pairs) == 1 else pairs, operation.mode, float(value or 0.0))


@operations("Repeat")
def _repeat(c: Reader, operation: keras.Operation, x: Moving) -> Result:
    if not isinstance(operation.repeats, int) or operation.axis is None:
        raise Refused("with a count for each entry")
    axis = int(operation.axis) % x.rank
    if axis == c.batch_axis(x.shape):
        raise Refused("it repeats the batch")
    return c.take(x, axis, np.repeat(np.arange(x.shape[axis]), operation.repeats))


@operations("Resize")
@layers("Resizing", "UpSampling2D")
def _resize(c: Reader, how: Any, x: Moving) -> Result:
    """An operation or a layer."""
    others = ("crop_to_aspect_ratio", "pad_to_aspect_ratio", "antialias")
    if on := [f"{name}=True" for name in others if getattr(how, name, False)]:
        raise Refused(f"with {', '.join(on)}; it is computed with False")
    axis, word = channel_axis_of(how.data_format, x.rank), how.interpolation
    spatial, size = spatial_axes(x, axis), how.size if hasattr(how, "size") else (how.height, how.width)
    if isinstance(how, keras.layers.UpSampling2D):
        size = [x.shape[at] * by for at, by in zip(spatial, how.size, strict=True)]
    factors = [new / x.shape[at] for new, at in zip(size, spatial, strict=True)]
    if word not in ("nearest", "bilinear") or (word == "nearest" and any(factor % 1 for factor in factors)):
        by = ", ".join(f"{factor:.4g}" for factor in factors)
        raise Refused(
            f"with interpolation={word!r} by {by}; it is computed by 'nearest' by whole factors or 'bilinear'"
        )
    sizes = dict(zip(spatial, map(int, size), strict=True))
    shape, size = [sizes.get(at, old) for at, old in enumerate(x.shape)], tuple(sizes.values())
    return c.emit("resize", [x], shape, size=size, mode=word, align_corners=False, scales=None, channel_axis=axis)


@layers("CenterCrop")
def _center_crop(c: Reader, layer: keras.Layer, x: Moving) -> Result:
    spatial = spatial_axes(x, channel_axis_of(layer.data_format, x.rank))
    for at, size in zip(spatial, (layer.height, layer.width), strict=True):
        if size > x.shape[at]:
            raise Refused("of images that are smaller than the crop")
        start = (x.shape[at] - size) // 2
        x = c.cut(x, at, start, start + size)
    return x
