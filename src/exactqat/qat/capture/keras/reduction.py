# SPDX-License-Identifier: Apache-2.0
"""Reductions over axes, norms and pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from ..core import masks
from ..core.builder import Moving
from ..core.products import cumulative_sum
from ..core.refusals import MIXES, Refused
from ..core.windows import each, padding_in_numbers
from .items import Item, Result
from .reader import OPERATIONS, Reader, layers, operations


def axes_of(axis: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Keras' word for axes in numbers, in order: None is all."""
    axes = range(rank) if axis is None else [axis] if isinstance(axis, int) else axis
    return tuple(sorted(number % rank for number in axes))


# By the name of Keras' operation: the kind of step, and what it has besides the axes.
_REDUCTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{"Mean": ("mean", {}), "Sum": ("sum", {}), "Max": ("amax", {}), "Min": ("amin", {}), "Prod": ("prod", {})},
    **{"Amax": ("amax", {}), "Amin": ("amin", {}), "All": ("amin", {}), "Any": ("amax", {})},
    **{"Var": ("var", {"correction": 0}), "Std": ("std", {"correction": 0})},
}


@operations(*_REDUCTIONS)
def _reduce(c: Reader, operation: keras.Operation, x: Moving) -> Result:
    kind, more = _REDUCTIONS[type(operation).__name__]
    axes, of_truths = axes_of(operation.axis, x.rank), type(operation).__name__ in ("All", "Any")
    # Of masks, all is the least and any the largest.
    operand = masks.as_truth(c, x) if of_truths else x
    if operand is None:
        raise Refused("of truth values that the network computes; give masks as inputs of integers or truth values")
    if c.batch_axis(x.shape) in axes:
        raise Refused(MIXES)
    if getattr(operation, "initial", None) is not None:
        raise Refused(f"with initial={operation.initial}; leave it out, and take keras.ops.maximum or minimum of both")
    keep = bool(operation.keepdims)
    result = c.emit(kind, [operand], c.shape_of(operation, x), axes=axes, keep_dims=keep, **more)
    if of_truths:
        c.truths.add(result.name)
    return result


@operations("Cumsum")
def _cumulative_sum(c: Reader, operation: keras.Operation, x: Moving) -> Result:
    if operation.axis is None:
        raise Refused("over all axes, laid flat; name one axis")
    return cumulative_sum(c, x, int(operation.axis) % x.rank)


@operations("Norm")
def _length(c: Reader, operation: keras.Operation, x: Moving) -> Result:
    axes = axes_of(operation.axis or (), x.rank)
    order = 2 if operation.ord is None else operation.ord
    if len(axes) != 1 or order not in (1, 2) or c.batch_axis(x.shape) in axes:
        raise Refused(f"with ord={operation.ord}, axis={operation.axis}; it is computed with ord=1 or 2 over one axis")
    keep = bool(operation.keepdims)
    return c.emit("norm", [x], c.shape_of(operation, x), axes=axes, keep_dims=keep, order=order)


OPERATIONS["Argmax"] = lambda c, how, x: c.emit(
    "argmax", [x], c.shape_of(how, x), "int64", axis=int(how.axis) % x.rank, keep_dims=bool(how.keepdims)
)


@operations("LayerNorm", "RMSNorm")
def _norm(c: Reader, operation: keras.Operation, x: Item, *weights: Item | None, **named: Item | None) -> Result:
    """Over the last axes."""
    if getattr(operation, "rms_scaling", False):
        raise Refused("with rms_scaling=True; use RMSNormalization")
    if not isinstance(x, Moving):
        raise Refused("of something fixed")
    kind, names = "layer_norm", ["gamma", "beta"]
    if type(operation).__name__ == "RMSNorm":
        kind, names = "rms_norm", ["scale"]
    tensors, axes = {**dict(zip(names, weights, strict=False)), **named}, axes_of(operation.axis, x.rank)
    if axes != tuple(range(x.rank - len(axes), x.rank)) or 0 in axes:
        raise Refused(f"with axis={operation.axis} of {x.rank} axes; it is computed over the last ones, as with -1")
    epsilon = float(keras.config.epsilon() if operation.epsilon is None else operation.epsilon)
    operands = [x, *map(tensors.get, names)]
    return c.emit(kind, operands, x.shape, module=c.place().path, axes=axes, epsilon=epsilon)


@operations("Normalize")
def _normalize(c: Reader, operation: keras.Operation, x: Moving) -> Result:
    axes = [operation.axis] if isinstance(operation.axis, int) else list(operation.axis or ())
    if len(axes) != 1 or operation.order != 2:
        raise Refused(
            f"with axis={operation.axis}, order={operation.order}; it is computed over one axis, with order=2"
        )
    return c.emit("normalize", [x], x.shape, axis=axes[0] % x.rank, epsilon=float(operation.epsilon or 1e-7))


@layers("GroupNormalization")
def _group_norm(c: Reader, layer: keras.Layer, x: Moving) -> Result:
    axis = int(layer.axis) % x.rank
    groups = x.shape[axis] if layer.groups == -1 else int(layer.groups)
    tensors = [c.weight(layer.gamma), c.weight(layer.beta)]
    return c.group_norm(x, tensors, "", axis, groups=groups, epsilon=float(layer.epsilon))


def channel_axis_of(data_format: str | None, rank: int) -> int:
    return 1 if (data_format or keras.config.image_data_format()) == "channels_first" else rank - 1


def spatial_axes(x: Moving, axis: int) -> list[int]:
    """All axes but those of the batch and the channels."""
    return [at for at in range(1, x.rank) if at != axis]


def padded(c: Reader, x: Moving, pairs: tuple[tuple[int, int], ...], mode: str, value: float = 0.0) -> Moving:
    """With so many values before and after each axis."""
    shape = [size + sum(pair) if any(pair) else size for size, pair in zip(x.shape, pairs, strict=True)]
    return c.emit("pad", [x], shape, padding=pairs, mode=mode, value=value)


def padding_of(
    word: str, x: Moving, axis: int, window: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Before and after each spatial axis, of an operation with windows."""
    return padding_in_numbers(word, [x.shape[at] for at in spatial_axes(x, axis)], window, strides, dilations)


@operations("MaxPool", "AveragePool")
def _pool(c: Reader, operation: keras.Operation, x: Moving) -> Result:
    axis, count = channel_axis_of(operation.data_format, x.rank), x.rank - 2
    shape, largest = c.shape_of(operation, x), type(operation).__name__ == "MaxPool"
    window = each(operation.pool_size, count)
    strides = window if operation.strides is None else each(operation.strides, count)
    padding = padding_of(operation.padding, x, axis, window, strides, (1,) * count)
    if not largest and keras.backend.backend() == "torch" and any(before != after for before, after in padding):
        # There Keras repeats the edge and counts it, where the padding is not the same on both sides.
        spatial = dict(zip(spatial_axes(x, axis), padding, strict=True))
        x = padded(c, x, tuple(spatial.get(at, (0, 0)) for at in range(x.rank)), "replicate")
        padding = ((0, 0),) * count
    common: dict[str, Any] = {"window": window, "strides": strides, "padding": padding, "channel_axis": axis}
    if largest:
        return c.emit("max_pool", [x], shape, dilations=(1,) * count, **common)
    outside = not any(map(any, padding))
    return c.emit("avg_pool", [x], shape, over=(0,) * count, count_include_pad=outside, divisor=None, **common)


@operations("AdaptiveAveragePool", "AdaptiveMaxPool")
def _adaptive_pool(c: Reader, operation: keras.Operation, x: Moving) -> Result:
    axis, size = channel_axis_of(operation.data_format, x.rank), each(operation.output_size, x.rank - 2)
    kind = "adaptive_avg_pool" if type(operation).__name__ == "AdaptiveAveragePool" else "adaptive_max_pool"
    return c.emit(kind, [x], c.shape_of(operation, x), size=size, channel_axis=axis)
