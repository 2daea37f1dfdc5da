# SPDX-License-Identifier: Apache-2.0
"""Norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from ..core.builder import Moving
from ..core.refusals import Refused
from .known import path_of
from .reader import Reader, layers, operations


@layers("LayerNormalization")
def _layer_norm(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if getattr(layer, "rms_scaling", False):
        raise Refused("with rms_scaling=True; use RMSNormalization")
    axes = _last_axes(layer.axis, x.rank)
    tensors = [c.optional(each) for each in (layer.gamma, layer.beta)]
    return c.emit("layer_norm", [x, *tensors], x.shape, module=path_of(layer), axes=axes, epsilon=float(layer.epsilon))


def _last_axes(axis: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """The axes that a norm is over."""
    axes = tuple(sorted(int(each) % rank for each in ([axis] if isinstance(axis, int) else axis)))
    if axes != tuple(range(rank - len(axes), rank)) or 0 in axes:
        raise Refused(f"with axis={axis} of {rank} axes; it is computed over the last ones, such as axis=-1")
    return axes


@layers("RMSNormalization")
def _rms_norm(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, axes = args[0], _last_axes(layer.axis, args[0].rank)
    weight = c.weight(layer.scale)
    return c.emit("rms_norm", [x, weight], x.shape, module=path_of(layer), axes=axes, epsilon=float(layer.epsilon))


@operations("LayerNorm", "RMSNorm")
def _norm_operation(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """`keras.ops.layer_normalization` and `rms_normalization`, in a layer of the user's."""
    x, *weights = [*args, *kwargs.values()]
    if not isinstance(x, Moving) or getattr(operation, "rms_scaling", False):
        raise Refused("with rms_scaling; use rms_normalization")
    kind, count = ("layer_norm", 2) if type(operation).__name__ == "LayerNorm" else ("rms_norm", 1)
    epsilon = keras.config.epsilon() if operation.epsilon is None else operation.epsilon
    weights = (weights + [None, None])[:count]
    return c.emit(kind, [x, *weights], x.shape, axes=_last_axes(operation.axis, x.rank), epsilon=float(epsilon))


@operations("Normalize")
def _normalize(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    axis = operation.axis if isinstance(operation.axis, int) else [*(operation.axis or ())]
    if isinstance(axis, list) and len(axis) == 1:
        (axis,) = axis
    if not isinstance(axis, int) or operation.order != 2:
        raise Refused(
            f"with axis={operation.axis}, order={operation.order}; it is computed over one axis, with order=2"
        )
    return c.emit("normalize", [x], x.shape, axis=axis % x.rank, epsilon=float(operation.epsilon or 1e-7))


@layers("GroupNormalization")
def _group_norm(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, axis = args[0], int(layer.axis) % args[0].rank
    groups = x.shape[axis] if layer.groups == -1 else int(layer.groups)
    tensors = [c.optional(each) for each in (layer.gamma, layer.beta)]
    return c.group_norm(x, tensors, "", axis, groups=groups, epsilon=float(layer.epsilon))
