# SPDX-License-Identifier: Apache-2.0
"""Sums, extremes and windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..core.builder import Moving
from ..core.products import cumulative_sum
from ..core.refusals import Refused
from ..core.windows import windows
from .converter import Converter, Operation, handles
from .items import Item

_REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "amax", "reduce_min": "amin", "reduce_prod": "prod"}


@handles(*_REDUCTIONS)
def _reduce(c: Converter, operation: Operation, x: Any) -> Item:
    axes = tuple(int(axis) for axis in operation.params["axes"])
    if not axes:
        return x
    if c.batch_axis(x.shape) in axes:
        raise Refused("it mixes the examples of a batch; batch norm needs its form for evaluation")
    shape = operation.shape
    return c.emit(_REDUCTIONS[operation.name], [x], shape, axes=axes, keep_dims=False)


@handles("cumsum")
def _cumulative_sum(c: Converter, operation: Operation, x: Any) -> Any:
    return cumulative_sum(c, x, int(operation.params["axis"]), bool(operation.params["reverse"]))


@handles("argmax")
def _largest(c: Converter, operation: Operation, x: Any) -> Item:
    axis, dtype = int(operation.params["axes"][0]), operation.params["index_dtype"]
    return c.emit("argmax", [x], operation.shape, dtype, axis=axis, keep_dims=False)


def _window(c: Converter, operation: Operation, x: Moving) -> tuple[int, dict[str, Any]]:
    """The axis of the channels, and a pool's attributes."""
    params = operation.params
    sides, strides, padding = (params[name] for name in ("window_dimensions", "window_strides", "padding"))
    if any(each != 1 for each in params["base_dilation"]):
        raise Refused("with values in between")
    batch = c.batch_axis(x.shape)
    still = [
        axis for axis in range(x.rank) if axis != batch and sides[axis] == strides[axis] == 1 and not any(padding[axis])
    ]
    if batch != 0 or (sides[0], strides[0]) != (1, 1) or not still:
        raise Refused("over the batch, or over all axes: one must hold channels")
    channel_axis = x.rank - 1 if x.rank - 1 in still else still[0]
    spatial = [axis for axis in range(1, x.rank) if axis != channel_axis]
    how = windows(*([each[axis] for axis in spatial] for each in (strides, padding, params["window_dilation"])))
    return channel_axis, {"window": tuple(int(sides[axis]) for axis in spatial), **how}


_WINDOWS = ("window_dimensions", "window_strides", "window_dilation", "base_dilation", "padding")


def _without_single_axes(pool: Any) -> Any:
    """Axes of size 1 that a window leaves alone are no axes of the pool: Equinox pools one example with one more."""

    def handler(c: Converter, operation: Operation, x: Any) -> Item:
        params, shape = operation.params, operation.shape
        sizes, windows = x.shape, params["window_dimensions"]
        alone = [axis for axis in range(1, x.rank) if sizes[axis] == shape[axis] == windows[axis] == 1]
        extra = alone[: max(0, x.rank - 4)]
        if not extra:
            return pool(c, operation, x)
        kept = [axis for axis in range(x.rank) if axis not in extra]
        fewer = {**params, **{name: tuple(params[name][axis] for axis in kept) for name in _WINDOWS if name in params}}
        smaller = c.reshape(x, [sizes[axis] for axis in kept])
        inner = replace(operation, params=fewer, shapes=(tuple(shape[axis] for axis in kept),))
        return c.reshape(pool(c, inner, smaller), shape)

    return handler


@handles("reduce_window_max")
@_without_single_axes
def _max_pool(c: Converter, operation: Operation, x: Any) -> Item:
    channel_axis, how = _window(c, operation, x)
    return c.emit("max_pool", [x], operation.shape, channel_axis=channel_axis, **how)


@handles("reduce_window_sum")
@_without_single_axes
def _sum_pool(c: Converter, operation: Operation, x: Any) -> Item:
    """A mean whose divisor is 1; the division that mostly follows makes it a plain mean."""
    channel_axis, how = _window(c, operation, x)
    if any(each != 1 for each in how.pop("dilations")):
        raise Refused("with dilation")
    how |= {"over": (0,) * len(how["window"]), "count_include_pad": True, "divisor": 1}
    return c.emit("avg_pool", [x], operation.shape, channel_axis=channel_axis, **how)
