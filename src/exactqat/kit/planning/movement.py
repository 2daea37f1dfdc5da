# SPDX-License-Identifier: Apache-2.0
"""Steps that move values, repeat them or pad them."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..device.attribute import Attributes
from .maker import Maker
from .network import Constant, Step
from .planner import BROADCASTING, Operand, Planner, handles
from .refusals import Refused, need_separate, word
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
    if x.grid.now.indices:  # what is looked up is reshaped
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
    kept = x.batch_axis + missing == batch_axis and (missing > 0 or shape[batch_axis] == x.shape[x.batch_axis])
    need_separate(step, kept)
    if missing:
        x = maker.reshape(x, (1,) * missing + x.shape, batch_axis, "aligned")
    for axis, part in one_by_one([axis for axis in range(len(shape)) if shape[axis] != x.shape[axis]]):
        x = take(maker, x, axis, (0,) * shape[axis], part)
    return x


def one_by_one(axes: Sequence[int], part: str | None = None) -> Iterator[tuple[int, str | None]]:
    """Axes, and names of what is done along each of them; the last one's is `part` itself."""
    for number, axis in enumerate(axes, 1):
        yield axis, part if number == len(axes) else within(part, f"axis_{axis}")


def within(part: str | None, word: str) -> str:
    """The name of a result that `part` is made of."""
    return f"{part}_{word}" if part else word


def _readers_broadcast(planner: Planner, step: Step, x: Stored) -> bool:
    """Whether all readers get the same result without the repetition."""
    readers = planner.readers(step)
    if planner.returned(step) or not readers:
        return False
    made_by = {producer.output: producer for producer in planner.network.steps}
    for reader in readers:
        if reader.kind not in BROADCASTING:
            return False
        others = [operand for operand in reader.inputs if operand != step.output]
        if len(others) != 1 or not isinstance(others[0], str):
            return False
        other = made_by.get(others[0])
        if other is not None and other.kind == "expand":
            return False
        known = planner.network.values.get(others[0]) or planner.network.constants[others[0]]
        if np.broadcast_shapes(x.shape, known.shape) != planner.shape(reader):
            return False
    return True


def take(maker: Maker, x: Stored, axis: int, indices: Sequence[int], part: str | None = None) -> Stored:
    """Entries of an axis by their indices, in any order and number."""
    indices = tuple(int(index) for index in indices)
    need_separate(maker.step, axis != x.batch_axis)
    runs = _runs(indices)
    if len(runs) == 1:
        start, stop, step = runs[0]
        if (start, stop, step) == (0, x.shape[axis], 1):
            return x
        return maker.slice(x, [(axis, start, stop, step)], part)
    if not x.grid.is_int16 or len(runs) > MOST_PARTS:  # TFLite-Micro has none in int16
        shape = [len(indices) if at == axis else size for at, size in enumerate(x.shape)]
        attributes = {"axis": axis, "indices": indices}
        return maker.store("GATHER", [x], shape, part, attributes=attributes, channels=x.channels)
    pieces = [
        maker.slice(x, [(axis, start, stop, step)], within(part, f"piece_{number}"))
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
    need_separate(step, x.batch_axis not in [axis for axis, *_ in cuts])
    return Maker(planner, step, "slice").slice(x, sorted(cuts))


def _cut(attributes: Attributes, x: Stored) -> tuple[int, int, int, int]:
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
    for axis, part in one_by_one(axes):
        x = take(maker, x, axis, range(x.shape[axis])[::-1], part)
    return x


@handles("concat")
def concatenation(planner: Planner, step: Step) -> Stored:
    axis = int(step.attributes["axis"])
    shape = planner.shape(step)
    operands = [planner.read(operand) for operand in step.inputs]
    tensors = [operand for operand in operands if isinstance(operand, Stored)]
    if not tensors:
        raise Refused(f"{word(step)} of something that does not depend on the input; compute it beforehand")
    need_separate(step, axis != planner.batch_axis(step))
    if len(operands) == 1:
        return tensors[0]
    maker = Maker(planner, step, "cat")
    if len(tensors) == len(operands):
        return maker.concatenate(tensors, axis)
    return _with_constants(maker, operands, axis, shape)


def _with_constants(maker: Maker, operands: Sequence[Operand], axis: int, shape: tuple[int, ...]) -> Stored:
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
    indices: list[tuple[Any, ...]] = []
    masks: list[str] = []
    for start, constant in placed:
        own = np.arange(size) - start  # which of the constant's rows lies at each place
        inside = (own >= 0) & (own < constant.shape[axis])
        indices.append((slice(None),) * axis + (np.clip(own, 0, constant.shape[axis] - 1),))
        mask = inside.astype(np.float32).reshape([size if at == axis else 1 for at in range(rank)])
        masks.append(maker.array(mask, f"place_{len(masks)}"))

    def function(*arrays: np.ndarray) -> np.ndarray:
        parts = zip(arrays, indices, arrays[len(placed) :], strict=False)
        return functools.reduce(operator.add, (constant[index] * mask for constant, index, mask in parts))

    shapes = [np.broadcast_shapes(constant.shape, (1,) * rank) for _, constant in placed]
    others = np.broadcast_shapes(
        *[tuple(1 if at == axis else extent for at, extent in enumerate(shape)) for shape in shapes]
    )
    shape = tuple(size if at == axis else extent for at, extent in enumerate(others))
    return maker.derived("constants", shape, function, *(constant.name for _, constant in placed), *masks)


@handles("pad")
def pad(planner: Planner, step: Step) -> Stored:
    x, attributes = planner.tensor(step), step.attributes
    padding = [(int(before), int(after)) for before, after in attributes["padding"]]
    if not any(map(any, padding)):
        return x
    need_separate(step, not any(padding[x.batch_axis]))
    mode, value = attributes.get("mode", "constant"), float(attributes.get("value") or 0.0)
    reader, line = planner.following(), planner.lines.get(str(step.inputs[0]))
    if reader is not None and line is not None:
        planner.lines[str(reader.inputs[0])] = line
    if mode == "constant" and reader is not None and pads_itself(reader, x, padding, value):
        planner.ahead[str(reader.inputs[0])] = padding
        return x
    return padded(Maker(planner, step, "pad"), x, padding, mode, value)


def pads_itself(reader: Step, x: Stored, padding: Sequence[tuple[int, int]], value: float) -> bool:
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
    if cuts:
        x = maker.slice(x, cuts, within(part, "cut") if any(map(any, around)) else part)
    if not any(map(any, around)):
        return x
    if mode == "constant":
        if value == 0:
            return maker.pad(x, around, part)
        if not math.isfinite(value):
            raise Refused(f"{word(maker.step)} with {value}; use a number within the tensor's range")
        # It differs only along the padded axes.
        sizes = [size if any(pair) else 1 for size, pair in zip(x.shape, around, strict=True)]
        border = np.pad(np.zeros(sizes, np.float32), around, constant_values=value)
        inner = maker.pad(x, around, within(part, "with_zeros"))
        return maker.add(inner, maker.array(border, within(part, "border")), part)
    if mode == "reflect":
        shape = [size + before + after for size, (before, after) in zip(x.shape, around, strict=True)]
        attributes = {"paddings": tuple(around), "mode": "REFLECT"}
        return maker.store("MIRROR_PAD", [x], shape, part, attributes=attributes, channels=x.channels)
    for axis, name in one_by_one([axis for axis, pair in enumerate(around) if any(pair)], part):
        positions = np.arange(x.shape[axis])
        indices = np.pad(positions, around[axis], mode="edge" if mode == "replicate" else "wrap")
        x = take(maker, x, axis, indices.tolist(), name)
    return x


def in_all_axes(x: Stored, channel_axis: int, padding: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The padding of spatial axes as padding of all axes."""
    spatial = iter(padding)
    return [(0, 0) if at in (channel_axis, x.batch_axis) else next(spatial) for at in range(x.rank)]


@handles("resize")
def resize(planner: Planner, step: Step) -> Stored:
    x, attributes = planner.tensor(step), step.attributes
    axis = int(attributes["channel_axis"])
    size = tuple(int(length) for length in attributes["size"])
    spatial = [at for at in range(x.rank) if at not in (axis, x.batch_axis)]
    if tuple(x.shape[at] for at in spatial) == size and attributes.get("scales") is None:
        return x
    scales = [None if scale is None else float(scale) for scale in attributes.get("scales") or [None] * len(size)]
    align = bool(attributes.get("align_corners"))
    maker = Maker(planner, step, "resize")
    true_sizes = all(
        scale is None or scale * x.shape[at] == result for scale, at, result in zip(scales, spatial, size, strict=True)
    )
    mode = attributes["mode"]
    kind, half = _RESIZES.get(mode, ("", False))
    if kind and true_sizes and len(size) <= 2:
        half = half and not align
        how = {"size": size, "align_corners": align, "half_pixel_centers": half, "channel_axis": axis}
        return maker.store(kind, [x], planner.shape(step), attributes=how, channels=axis)
    for (at, part), result, scale in zip(one_by_one(spatial), size, scales, strict=True):
        if mode in ("nearest", "nearest_exact"):
            x = take(maker, x, at, nearest_indices(x.shape[at], result, scale, half), part)
        else:
            x = resample(maker, x, at, interpolation(mode, x.shape[at], result, align, scale), part)
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
        reach: Callable[[float], float] = lambda distance: np.maximum(0, 1 - np.abs(distance))  # noqa: E731
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
    if axis == x.rank - 1:
        weight = maker.array(matrix, "weight" if part is None else f"{part}/weight")
        return maker.linear(x, weight, part=part, fixed=True)
    order = [at for at in range(x.rank) if at != axis] + [axis]
    turned, name = maker.transpose(x, order, within(part, "turned")), within(part, "resampled")
    result = maker.linear(turned, maker.array(matrix, f"{name}/weight"), part=name, fixed=True)
    return maker.transpose(result, [order.index(at) for at in range(x.rank)], part)


@handles("pixel_shuffle")
def pixel_shuffle(planner: Planner, step: Step) -> Stored:
    x, factor = planner.tensor(step), int(step.attributes["factor"])
    axis = int(step.attributes.get("channel_axis", 1))
    channels = x.shape[axis] // factor**2
    maker = Maker(planner, step, "pixel_shuffle")
    # The device counts the position in the block as the slower part of a channel's number, the user as the faster.
    x = _swapped(maker, x, axis, channels, "reordered")
    how = {"block_size": factor, "channel_axis": axis}
    return maker.store("DEPTH_TO_SPACE", [x], planner.shape(step), attributes=how, channels=axis)


def _swapped(maker: Maker, x: Stored, axis: int, outer: int, part: str | None = None) -> Stored:
    """An axis of `outer` times some entries, with outer and inner ones swapped; by a transpose in int16, in which
    TFLite-Micro has no GATHER."""
    inner = x.shape[axis] // outer
    if not x.grid.is_int16 or outer == 1:
        return take(maker, x, axis, np.arange(x.shape[axis]).reshape(outer, inner).T.reshape(-1).tolist(), part)
    batch_axis = x.batch_axis + (axis < x.batch_axis)
    split = maker.reshape(x, (*x.shape[:axis], outer, inner, *x.shape[axis + 1 :]), batch_axis, within(part, "split"))
    axes = [axis + 1 if at == axis else axis if at == axis + 1 else at for at in range(x.rank + 1)]
    turned = maker.transpose(split, axes, within(part, "turned"))
    joined = maker.reshape(turned, x.shape, x.batch_axis, part)
    joined.channels = axis
    return joined


@handles("pixel_unshuffle")
def pixel_unshuffle(planner: Planner, step: Step) -> Stored:
    x, factor = planner.tensor(step), int(step.attributes["factor"])
    axis = int(step.attributes.get("channel_axis", 1))
    maker = Maker(planner, step, "pixel_unshuffle")
    how, channels = {"block_size": factor, "channel_axis": axis}, x.shape[axis]
    part = None if channels == 1 else "blocks"
    x = maker.store("SPACE_TO_DEPTH", [x], planner.shape(step), part, attributes=how, channels=axis)
    return x if channels == 1 else _swapped(maker, x, axis, factor**2)
