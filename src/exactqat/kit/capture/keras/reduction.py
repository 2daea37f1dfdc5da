# SPDX-License-Identifier: Apache-2.0
"""Reductions over axes, and pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from ..core import masks
from ..core.builder import Moving
from ..core.products import cumulative_sum
from ..core.refusals import MIXES, Refused
from ..core.sizes import Shape, Size
from ..core.windows import count_of_windows, each, padding_in_numbers
from .reader import Reader, operations


def axes_of(axis: Any, rank: int) -> tuple[int, ...]:
    """Keras' word for axes in numbers: None is all."""
    given = range(rank) if axis is None else [axis] if isinstance(axis, int) else axis
    return tuple(each % rank for each in given)


def _without(x: Moving, axes: Sequence[int], keep: bool) -> list[int]:
    """The shape of what is left of some axes."""
    return [1 if at in axes else size for at, size in enumerate(x.shape) if keep or at not in axes]


@operations("Mean", "Sum", "Max", "Min", "Amax", "Amin", "Var", "Std")
def _reduce(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axes = axes_of(operation.axis, x.rank)
    if c.batch_axis(x.shape) in axes:
        raise Refused(MIXES)
    if getattr(operation, "initial", None) is not None:
        raise Refused(f"with initial={operation.initial}; leave it out, and take keras.ops.maximum or minimum of both")
    keep = bool(operation.keepdims)
    name = type(operation).__name__.lower()
    kind = {"max": "amax", "min": "amin"}.get(name, name)
    shape = _without(x, axes, keep)
    more: dict[str, Any] = {"correction": 0} if kind in ("var", "std") else {}
    return c.emit(kind, [x], shape, axes=tuple(sorted(axes)), keep_dims=keep, **more)


@operations("All", "Any")
def _every(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Of masks: the least, or the largest."""
    (x,) = args
    truth, axes = masks.as_truth(c, x), axes_of(operation.axis, x.rank)
    if truth is None:
        raise Refused("of truth values that the network computes; give masks as inputs of integers or truth values")
    if c.batch_axis(x.shape) in axes:
        raise Refused(MIXES)
    keep = bool(operation.keepdims)
    kind = "amin" if type(operation).__name__ == "All" else "amax"
    made = c.emit(kind, [truth], _without(x, axes, keep), axes=tuple(sorted(axes)), keep_dims=keep)
    c.truths.add(made.name)
    return made


@operations("Cumsum")
def _cumulative_sum(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,), axis = args, operation.axis
    if axis is None:
        raise Refused("over all axes, laid flat; name one axis")
    return cumulative_sum(c, x, int(axis) % x.rank)


@operations("Norm")
def _length(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axes = tuple(sorted(int(axis) % x.rank for axis in operation.axis or ()))
    order = 2 if operation.ord is None else operation.ord
    if len(axes) != 1 or order not in (1, 2) or c.batch_axis(x.shape) in axes:
        raise Refused(f"with ord={operation.ord}, axis={operation.axis}; it is computed with ord=1 or 2 over one axis")
    keep = bool(operation.keepdims)
    shape = _without(x, axes, keep)
    return c.emit("norm", [x], shape, axes=axes, keep_dims=keep, order=order)


@operations("Argmax")
def _argmax(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axis = int(operation.axis) % x.rank
    keep = bool(operation.keepdims)
    shape = _without(x, [axis], keep)
    return c.emit("argmax", [x], shape, "int64", axis=axis, keep_dims=keep)


def channel_axis_of(data_format: str | None, rank: int) -> int:
    return 1 if (data_format or keras.config.image_data_format()) == "channels_first" else rank - 1


def windowed(x: Moving, axis: int, window: Any, strides: Any, padding: Any, dilations: Any, channels: int) -> list[int]:
    """Shape of what windows give."""
    counts = map(count_of_windows, spatial_sizes(x, axis), window, strides, padding, dilations)
    return [size if at == 0 else channels if at == axis else next(counts) for at, size in enumerate(x.shape)]


def padded(shape: Shape, pairs: Sequence[tuple[int, int]]) -> list[Size]:
    """The shape of what is padded by so many before and after each axis."""
    return [size + sum(pair) if any(pair) else size for size, pair in zip(shape, pairs, strict=True)]


def spatial_sizes(x: Moving, axis: int) -> list[int]:
    """The sizes of all axes but those of the batch and the channels."""
    return [size for at, size in enumerate(x.shape) if at not in (0, axis)]


@operations("MaxPool", "AveragePool")
def _pool(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axis, count = channel_axis_of(operation.data_format, x.rank), x.rank - 2
    window = each(operation.pool_size, count)
    strides = window if operation.strides is None else each(operation.strides, count)
    ones = (1,) * count
    padding = padding_in_numbers(operation.padding, spatial_sizes(x, axis), window, strides, ones)
    uneven = any(before != after for before, after in padding)
    if uneven and type(operation).__name__ == "AveragePool" and keras.backend.backend() == "torch":
        # There Keras repeats the edge and counts it, where the padding is not the same on both sides.
        spatial = iter(padding)
        pairs = tuple((0, 0) if at in (0, axis) else next(spatial) for at in range(x.rank))
        x = c.emit("pad", [x], padded(x.shape, pairs), padding=pairs, mode="replicate", value=0.0)
        padding = ((0, 0),) * count
    shape = windowed(x, axis, window, strides, padding, ones, x.shape[axis])
    common: dict[str, Any] = {"window": window, "strides": strides, "padding": padding, "channel_axis": axis}
    if type(operation).__name__ == "MaxPool":
        return c.emit("max_pool", [x], shape, dilations=ones, **common)
    return c.emit(
        "avg_pool", [x], shape, over=(0,) * count, count_include_pad=not any(map(any, padding)), divisor=None, **common
    )


@operations("AdaptiveAveragePool", "AdaptiveMaxPool")
def _adaptive_pool(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axis = channel_axis_of(operation.data_format, x.rank)
    size = each(operation.output_size, x.rank - 2)
    spatial = iter(size)
    shape = [each if at in (0, axis) else next(spatial) for at, each in enumerate(x.shape)]
    kind = "adaptive_avg_pool" if type(operation).__name__ == "AdaptiveAveragePool" else "adaptive_max_pool"
    return c.emit(kind, [x], shape, size=size, channel_axis=axis)
