# SPDX-License-Identifier: Apache-2.0
"""Steps that move values, repeat them or pad them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .maker import Maker
from .network import Constant, Step
from .planner import BROADCASTING, Planner, handles
from .refusals import Refused, word
from .stored import Stored

# How many slices or copies a step may become before it is refused.
MOST_PARTS = 64


@handles("identity")
def identity(planner: Planner, step: Step) -> Stored:
    x = planner.tensor(step)
    if step.attributes.get("stop_gradient"):
        return Maker(planner, step, "detach").only_in_training(x, stop_gradient=True)
    return x


@handles("stored_again")
def stored_again(planner: Planner, step: Step) -> Stored:
    return Maker(planner, step, "stored").unary("QUANTIZE", planner.tensor(step))


@handles("dropout")
def dropout(planner: Planner, step: Step) -> Stored:
    x = planner.tensor(step)
    return Maker(planner, step, "dropout").only_in_training(x, expression=step.attributes.get("expression"))


@handles("reshape")
def reshape(planner: Planner, step: Step) -> Stored:
    x, shape, batch_axis = planner.tensor(step), planner.shape(step), planner.batch_axis(step)
    if shape == x.shape and batch_axis == x.batch_axis:
        return x
    if x.grid.root().indices:  # what is looked up is reshaped
        return replace(x, shape=shape, batch_axis=batch_axis)
    return Maker(planner, step, "reshape").reshape(x, shape, batch_axis)


@handles("permute")
def permute(planner: Planner, step: Step) -> Stored:
    x, axes = planner.tensor(step), tuple(step.attributes["axes"])
    if axes == tuple(range(x.rank)):
        return x
    return Maker(planner, step, "permute").transpose(x, axes)


@handles("expand")
def expand(planner: Planner, step: Step) -> Stored:
    x, shape = planner.tensor(step), planner.shape(step)
    batch_axis = planner.batch_axis(step)
    missing = len(shape) - x.rank
    if missing == 0 and shape == x.shape:
        return x
    if _readers_broadcast(planner, step, x):
        return x
    maker = Maker(planner, step, "expand")
    if x.batch_axis + missing != batch_axis or (missing == 0 and shape[batch_axis] != x.shape[x.batch_axis]):
        raise Refused(f"{word(step)} along the batch; every example is computed separately")
    if missing:
        x = maker.reshape(x, (1,) * missing + x.shape, batch_axis, "aligned")
    repeated = [axis for axis in range(len(shape)) if shape[axis] != x.shape[axis]]
    for number, axis in enumerate(repeated, 1):
        part = None if number == len(repeated) else f"axis_{axis}"
        x = repeat(maker, x, axis, shape[axis], part)
    return x


def _readers_broadcast(planner: Planner, step: Step, x: Stored) -> bool:
    """Whether all readers get the same result without the repetition."""
    readers = planner.readers(step)
    if planner.returned(step) or not readers:
        return False
    made_by = {each.output: each for each in planner.network.steps}
    for reader in readers:
        if reader.kind not in BROADCASTING:
            return False
        others = [each for each in reader.inputs if each != step.output]
        if len(others) != 1 or not isinstance(others[0], str):
            return False
        other = made_by.get(others[0])
        if other is not None and other.kind == "expand":
            return False
        known = planner.network.values.get(others[0]) or planner.network.constants[others[0]]
        if np.broadcast_shapes(x.shape, known.shape) != planner.shape(reader):
            return False
    return True


def repeat(maker: Maker, x: Stored, axis: int, count: int, part: str | None = None) -> Stored:
    """Expands an axis of size 1 to size `count`."""
    if maker.has("GATHER"):
        return take(maker, x, axis, (0,) * count, part)
    if count <= MOST_PARTS:
        return maker.concatenate([x] * count, axis, part)
    ones = np.ones([count if at == axis else 1 for at in range(x.rank)], np.float32)
    return maker.multiply(x, maker.array(ones, f"{part}/ones" if part else "ones"), part)


def take(maker: Maker, x: Stored, axis: int, indices: Sequence[int], part: str | None = None) -> Stored:
    """Entries of an axis by their indices, in any order and number."""
    indices = tuple(int(index) for index in indices)
    if axis == x.batch_axis:
        raise Refused(f"{word(maker.step)} along the batch; every example is computed separately")
    runs = _runs(indices)
    if len(runs) == 1:
        start, stop, step = runs[0]
        if (start, stop, step) == (0, x.shape[axis], 1):
            return x
        return maker.slice(x, [(axis, start, stop, step)], part)
    if maker.has("GATHER") and not (x.grid.is_int16 and len(runs) <= MOST_PARTS):  # TFLite-Micro has none in int16
        shape = [len(indices) if at == axis else size for at, size in enumerate(x.shape)]
        attributes = {"axis": axis, "indices": indices}
        return maker.store("GATHER", [x], shape, part, attributes=attributes, channels=x.channels)
    if len(runs) > MOST_PARTS:
        raise Refused(f"{word(maker.step)} that reorders {len(runs)} pieces")
    name = f"{part}_" if part else ""
    pieces = [
        maker.slice(x, [(axis, start, stop, step)], f"{name}piece_{number}")
        for number, (start, stop, step) in enumerate(runs)
    ]
    return maker.concatenate(pieces, axis, part)


def _runs(indices: Sequence[int]) -> list[tuple[int, int, int]]:
    """(start, stop, step) of the ascending runs that make up the indices."""
    runs: list[tuple[int, int, int]] = []
    at = 0
    while at < len(indices):
        end = at + 1
        step = indices[end] - indices[at] if end < len(indices) else 1
        if step < 1:
            step = 1
        while end < len(indices) and indices[end] - indices[end - 1] == step:
            end += 1
        runs.append((indices[at], indices[end - 1] + 1, step))
        at = end
    return runs


@handles("slice")
def slice_(planner: Planner, step: Step) -> Stored:
    x, attributes = planner.tensor(step), step.attributes
    cuts = [_cut(attributes, x)]
    more = planner.following()
    while more is not None and more.kind == "slice":
        cut = _cut(more.attributes, x)
        if cut[0] in [axis for axis, *_ in cuts]:
            break
        planner.absorb(more)
        cuts.append(cut)
        more = planner.following()
    cuts = [cut for cut in cuts if cut[1:] != (0, x.shape[cut[0]], 1)]
    if not cuts:
        return x
    if x.batch_axis in [axis for axis, *_ in cuts]:
        raise Refused(f"{word(step)} along the batch; every example is computed separately")
    return Maker(planner, step, "slice").slice(x, sorted(cuts))


def _cut(attributes: Mapping[str, Any], x: Stored) -> tuple[int, int, int, int]:
    """(axis, start, stop, step)"""
    axis = int(attributes["axis"])
    stop = min(int(attributes["stop"]), x.shape[axis])
    return axis, int(attributes["start"]), stop, int(attributes["step"])


@handles("gather")
def gather(planner: Planner, step: Step) -> Stored:
    x = planner.tensor(step)
    axis, indices = int(step.attributes["axis"]), step.attributes["indices"]
    if tuple(indices) == tuple(range(x.shape[axis])):
        return x
    return take(Maker(planner, step, "gather"), x, axis, indices)


@handles("flip")
def flip(planner: Planner, step: Step) -> Stored:
    x = planner.tensor(step)
    axes = [axis for axis in step.attributes["axes"] if x.shape[axis] > 1]
    if not axes:
        return x
    maker = Maker(planner, step, "flip")
    for number, axis in enumerate(axes, 1):
        x = take(maker, x, axis, range(x.shape[axis])[::-1], None if number == len(axes) else f"axis_{axis}")
    return x


@handles("concat")
def concatenation(planner: Planner, step: Step) -> Stored:
    axis = int(step.attributes["axis"])
    shape = planner.shape(step)
    operands = [planner.read(each) for each in step.inputs]
    tensors = [each for each in operands if isinstance(each, Stored)]
    if not tensors:
        raise Refused(f"{word(step)} of something that does not depend on the input; compute it beforehand")
    if axis == planner.batch_axis(step):
        raise Refused(f"{word(step)} along the batch; every example is computed separately")
    if len(operands) == 1:
        return tensors[0]
    maker = Maker(planner, step, "cat")
    if len(tensors) == len(operands):
        return maker.concatenate(tensors, axis)
    return _with_constants(maker, operands, axis, shape)


def _with_constants(maker: Maker, operands: Sequence[Any], axis: int, shape: tuple[int, ...]) -> Stored:
    """Zeros where constants belong, and then a sum with them: a sum repeats its constant over any batch."""
    rank = len(shape)
    tensors: list[Stored] = []
    placed: list[tuple[int, Constant]] = []
    gap, at = 0, 0
    for operand in operands:
        if isinstance(operand, Stored):
            if gap:
                operand = maker.pad(operand, [(gap, 0) if k == axis else (0, 0) for k in range(rank)], "with_zeros")
            gap, size = 0, operand.shape[axis] - gap
            tensors.append(operand)
            at += size
        elif isinstance(operand, Constant):
            size = operand.shape[axis]
            placed.append((at, operand))
            gap += size
            at += size
        else:
            raise Refused(f"{word(maker.step)} with a number; make it a tensor")
    if gap:
        tensors[-1] = maker.pad(tensors[-1], [(0, gap) if k == axis else (0, 0) for k in range(rank)], "with_zeros")
    x = tensors[0] if len(tensors) == 1 else maker.concatenate(tensors, axis, "of_tensors")
    return maker.add(x, place_constants(maker, placed, axis, shape[axis], rank))


def place_constants(maker: Maker, placed: Sequence[tuple[int, Constant]], axis: int, size: int, rank: int) -> str:
    """One constant that holds others starting at given positions of an axis, and zeros elsewhere."""
    names: list[tuple[str, int]] = []
    rows: list[str] = []
    for start, constant in placed:
        for row in range(constant.shape[axis]):
            here = np.zeros([size if at == axis else 1 for at in range(rank)], np.float32)
            here[tuple(start + row if at == axis else 0 for at in range(rank))] = 1
            names.append((constant.name, row))
            rows.append(maker.array(here, f"place_{len(rows)}"))
    distinct = list(dict.fromkeys(name for name, _ in names))

    def function(*arrays: Any) -> Any:
        constants, masks = dict(zip(distinct, arrays, strict=False)), arrays[len(distinct) :]
        total: Any = 0
        for (name, row), mask in zip(names, masks, strict=True):
            total = total + constants[name][(slice(None),) * axis + (slice(row, row + 1),)] * mask
        return total

    shapes = [np.broadcast_shapes(constant.shape, (1,) * rank) for _, constant in placed]
    others = np.broadcast_shapes(
        *[tuple(1 if at == axis else each for at, each in enumerate(shape)) for shape in shapes]
    )
    shape = tuple(size if at == axis else each for at, each in enumerate(others))
    return maker.derived("constants", shape, function, *distinct, *rows)


@handles("pad")
def pad(planner: Planner, step: Step) -> Stored:
    x, attributes = planner.tensor(step), step.attributes
    padding = [(int(before), int(after)) for before, after in attributes["padding"]]
    if not any(map(any, padding)):
        return x
    if any(padding[x.batch_axis]):
        raise Refused(f"{word(step)} along the batch; every example is computed separately")
    mode, value = attributes.get("mode", "constant"), float(attributes.get("value") or 0.0)
    reader = planner.following()
    if mode == "constant" and reader is not None and _pads_itself(reader, x, padding, value):
        planner.ahead[str(reader.inputs[0])] = padding
        return x
    return padded(Maker(planner, step, "pad"), x, padding, mode, value)


def _pads_itself(reader: Step, x: Stored, padding: Sequence[tuple[int, int]], value: float) -> bool:
    """Whether the reader can use its own padding instead: zeros of a convolution, or values that are never the
    maximum."""
    axis = reader.attributes.get("channel_axis")
    if axis is None or any(padding[axis]) or any(low < 0 for pair in padding for low in pair):
        return False
    if reader.kind == "conv":
        zeros = reader.attributes.get("padding_mode", "zeros") == "zeros" or not any(
            map(any, reader.attributes["padding"])
        )
        return value == 0 and zeros and x.rank <= 4
    return reader.kind == "max_pool" and (value == -math.inf or (value == 0 and x.nonnegative))


def own_padding(planner: Planner, step: Step, x: Stored) -> tuple[tuple[int, int], ...]:
    """A window's padding of its spatial axes, including a pad before it."""
    padding = [(int(before), int(after)) for before, after in step.attributes["padding"]]
    around = planner.ahead.get(str(step.inputs[0]))
    if around is not None:
        fixed = (int(step.attributes["channel_axis"]), x.batch_axis)
        more = [pair for at, pair in enumerate(around) if at not in fixed]
        padding = [(a + c, b + d) for (a, b), (c, d) in zip(padding, more, strict=True)]
    return tuple(padding)


def padded(
    maker: Maker, x: Stored, padding: Sequence[tuple[int, int]], mode: str, value: float, part: str | None = None
) -> Stored:
    """Pads every axis with (before, after) values; negative numbers crop."""
    cuts = [
        (axis, -min(before, 0), x.shape[axis] + min(after, 0), 1)
        for axis, (before, after) in enumerate(padding)
        if before < 0 or after < 0
    ]
    around = [(max(before, 0), max(after, 0)) for before, after in padding]
    word_ = f"{part}_" if part else ""
    if cuts:
        x = maker.slice(x, cuts, f"{word_}cut" if any(map(any, around)) else part)
    if not any(map(any, around)):
        return x
    if mode == "constant":
        if value == 0:
            return maker.pad(x, around, part)
        if not math.isfinite(value):
            raise Refused(f"{word(maker.step)} with {value}; use a number within the tensor's range")
        border = np.pad(np.zeros(_flat_sizes(x, around), np.float32), around, constant_values=value)
        return maker.add(maker.pad(x, around, f"{word_}with_zeros"), maker.array(border, f"{word_}border"), part)
    if mode == "reflect" and maker.has("MIRROR_PAD"):
        shape = [size + before + after for size, (before, after) in zip(x.shape, around, strict=True)]
        attributes = {"paddings": tuple(around), "mode": "REFLECT"}
        return maker.store("MIRROR_PAD", [x], shape, part, attributes=attributes, channels=x.channels)
    axes = [axis for axis, pair in enumerate(around) if any(pair)]
    for number, axis in enumerate(axes, 1):
        indices = np.pad(np.arange(x.shape[axis]), around[axis], mode=_PAD_MODES[mode])  # type: ignore[call-overload]
        x = take(maker, x, axis, indices.tolist(), part if number == len(axes) else f"{word_}axis_{axis}")
    return x


_PAD_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def _flat_sizes(x: Stored, around: Sequence[tuple[int, int]]) -> list[int]:
    """Sizes of a constant that differs only along the padded axes."""
    return [size if any(pair) else 1 for size, pair in zip(x.shape, around, strict=True)]


@handles("resize")
def resize(planner: Planner, step: Step) -> Stored:
    x, attributes = planner.tensor(step), step.attributes
    axis = int(attributes["channel_axis"])
    size = tuple(int(each) for each in attributes["size"])
    spatial = [at for at in range(x.rank) if at not in (axis, x.batch_axis)]
    if tuple(x.shape[at] for at in spatial) == size and attributes.get("scales") is None:
        return x
    scales = attributes.get("scales") or [None] * len(size)
    align = bool(attributes.get("align_corners"))
    maker = Maker(planner, step, "resize")
    true_sizes = all(
        scale is None or float(scale) * x.shape[at] == each
        for scale, at, each in zip(scales, spatial, size, strict=True)
    )
    mode = attributes["mode"]
    kind, half = _RESIZES.get(mode, ("", False))
    if maker.has(kind) and true_sizes and len(size) <= 2:
        half = half and not align
        how = {"size": size, "align_corners": align, "half_pixel_centers": half, "channel_axis": axis}
        return maker.store(kind, [x], planner.shape(step), attributes=how, channels=axis)
    if mode in ("nearest", "nearest_exact"):
        for number, (at, each, scale) in enumerate(zip(spatial, size, scales, strict=True), 1):
            source = nearest_indices(x.shape[at], each, None if scale is None else float(scale), half)
            x = take(maker, x, at, source, None if number == len(size) else f"axis_{at}")
        return x
    for number, (at, each, scale) in enumerate(zip(spatial, size, scales, strict=True), 1):
        scale = None if scale is None else float(scale)
        weights = interpolation(mode, x.shape[at], each, align, scale)
        x = resample(maker, x, at, weights, None if number == len(size) else f"axis_{at}")
    return x


# mode -> the device's operator, and whether it takes the centers of values as their positions.
_RESIZES = {
    "nearest": ("RESIZE_NEAREST_NEIGHBOR", False),
    "nearest_exact": ("RESIZE_NEAREST_NEIGHBOR", True),
    "bilinear": ("RESIZE_BILINEAR", True),
}


def nearest_indices(size: int, result: int, scale: float | None, centers: bool = False) -> list[int]:
    """Which entry each entry of the result repeats."""
    ratio = np.float32(size / result if scale is None else 1 / scale)
    shift = np.float32(0.5 if centers else 0)
    return [min(int((np.float32(at) + shift) * ratio), size - 1) for at in range(result)]


def interpolation(mode: str, size: int, result: int, align_corners: bool, scale: float | None) -> np.ndarray:
    """[result, size]: what every entry of an axis contributes to every entry of the result.

    Raises:
        Refused: an unknown mode.
    """
    if align_corners:
        ratio = (size - 1) / (result - 1) if result > 1 else 0.0
        centers = np.arange(result) * ratio
    else:
        ratio = size / result if scale is None else 1 / scale
        centers = (np.arange(result) + 0.5) * ratio - 0.5
    if mode == "bilinear":
        centers = np.maximum(centers, 0) if not align_corners else centers
        reach: Callable[[Any], Any] = lambda distance: np.maximum(0, 1 - np.abs(distance))  # noqa: E731
        taps = range(0, 2)
    elif mode == "bicubic":
        reach, taps = _cubic, range(-1, 3)
    else:
        raise Refused(f"resizing by {mode!r}; use nearest, bilinear or bicubic")
    matrix = np.zeros((result, size), np.float32)
    for row, center in enumerate(centers):
        first = math.floor(center)
        for tap in taps:
            matrix[row, min(max(first + tap, 0), size - 1)] += reach(center - (first + tap))
    return matrix


def _cubic(distance: float) -> float:
    """Keys' kernel with -0.75, PyTorch's."""
    x, a = abs(distance), -0.75
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def resample(maker: Maker, x: Stored, axis: int, matrix: np.ndarray, part: str | None = None) -> Stored:
    """A fixed linear function of the entries of one axis: [result, size]."""
    maker.need("FULLY_CONNECTED")
    name = f"{part}_" if part else ""
    last = x.rank - 1
    order = [at for at in range(x.rank) if at != axis] + [axis]
    turned = x if axis == last else maker.transpose(x, order, f"{name}turned")
    result = maker.fixed_linear(turned, matrix, part if axis == last else f"{name}resampled")
    if axis == last:
        return result
    return maker.transpose(result, [order.index(at) for at in range(x.rank)], part)


@handles("pixel_shuffle")
def pixel_shuffle(planner: Planner, step: Step) -> Stored:
    x, factor = planner.tensor(step), int(step.attributes["factor"])
    axis = int(step.attributes.get("channel_axis", 1))
    channels = x.shape[axis] // factor**2
    maker = Maker(planner, step, "pixel_shuffle")
    if maker.has("DEPTH_TO_SPACE"):
        # The device counts the position in the block as the slower part of a channel's number, the user as the faster.
        order = np.arange(x.shape[axis]).reshape(channels, factor**2).T.reshape(-1)
        if x.grid.is_int16 and channels > 1:
            x = _swapped(maker, x, axis, channels, "reordered")
        else:
            x = take(maker, x, axis, order.tolist(), "reordered")
        how = {"block_size": factor, "channel_axis": axis}
        return maker.store("DEPTH_TO_SPACE", [x], planner.shape(step), attributes=how, channels=axis)
    if x.rank != 4 or axis != 1 or x.batch_axis != 0:
        raise Refused(f"{word(step)} on a tensor of shape {list(x.shape)}")
    rows, _, height, width = x.shape
    split = maker.reshape(x, (rows, channels, factor, factor, height, width), 0, "split")
    turned = maker.transpose(split, (0, 1, 4, 2, 5, 3), "turned")
    return maker.reshape(turned, planner.shape(step), 0)


def _swapped(maker: Maker, x: Stored, axis: int, outer: int, part: str | None = None) -> Stored:
    """An axis of `outer` times some entries, with outer and inner ones swapped: a transpose, as TFLite-Micro has no
    GATHER in int16."""
    name = f"{part}_" if part else ""
    inner = x.shape[axis] // outer
    batch_axis = x.batch_axis + (axis < x.batch_axis)
    split = maker.reshape(x, (*x.shape[:axis], outer, inner, *x.shape[axis + 1 :]), batch_axis, f"{name}split")
    axes = [axis + 1 if at == axis else axis if at == axis + 1 else at for at in range(x.rank + 1)]
    turned = maker.transpose(split, axes, f"{name}turned")
    joined = maker.reshape(turned, x.shape, x.batch_axis, part)
    joined.channels = axis
    return joined


@handles("pixel_unshuffle")
def pixel_unshuffle(planner: Planner, step: Step) -> Stored:
    x, factor = planner.tensor(step), int(step.attributes["factor"])
    axis = int(step.attributes.get("channel_axis", 1))
    maker = Maker(planner, step, "pixel_unshuffle")
    channels = x.shape[axis]
    if maker.has("SPACE_TO_DEPTH"):
        how = {"block_size": factor, "channel_axis": axis}
        part = None if channels == 1 else "blocks"
        x = maker.store("SPACE_TO_DEPTH", [x], planner.shape(step), part, attributes=how, channels=axis)
        order = np.arange(channels * factor**2).reshape(factor**2, channels).T.reshape(-1)
        if channels == 1:
            return x
        if x.grid.is_int16:
            return _swapped(maker, x, axis, factor**2)
        return take(maker, x, axis, order.tolist())
    if x.rank != 4 or axis != 1 or x.batch_axis != 0:
        raise Refused(f"{word(step)} on a tensor of shape {list(x.shape)}")
    rows, _, height, width = x.shape
    shape = (rows, channels, height // factor, factor, width // factor, factor)
    turned = maker.transpose(maker.reshape(x, shape, 0, "split"), (0, 1, 3, 5, 2, 4), "turned")
    return maker.reshape(turned, planner.shape(step), 0)
