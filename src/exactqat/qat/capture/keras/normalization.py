# SPDX-License-Identifier: Apache-2.0
"""Norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from ..core.builder import Moving
from ..core.refusals import Refused
from .items import Fixed
from .reader import Reader, layers, operations


@layers("BatchNormalization")
def _batch_norm(c: Reader, layer: Any, x: Moving, mask: Any = None) -> Any:
    axis = layer.axis if isinstance(layer.axis, int) else layer.axis[0]
    mean = c.weight(layer.moving_mean)
    return c.emit(
        "batch_norm",
        [x, c.weight(layer.gamma), c.weight(layer.beta), mean, c.weight(layer.moving_variance)],
        x.shape,
        module=c.module_of(mean),
        epsilon=float(layer.epsilon),
        momentum=1.0 - float(layer.momentum),
        channel_axis=axis % x.rank,
        training=bool(layer.trainable) and c.trains,
        counter="",
    )


@operations("LayerNorm")
def _layer_norm(c: Reader, operation: Any, x: Any, gamma: Fixed | None = None, beta: Fixed | None = None) -> Any:
    if getattr(operation, "rms_scaling", False):
        raise Refused("with rms_scaling=True; use RMSNormalization")
    return _norm(c, operation, "layer_norm", x, gamma, beta)


@operations("RMSNorm")
def _rms_norm(c: Reader, operation: Any, x: Any, scale: Fixed | None = None) -> Any:
    return _norm(c, operation, "rms_norm", x, scale)


def _norm(c: Reader, operation: Any, kind: str, x: Any, *weights: Fixed | None) -> Moving:
    """Over the last axes."""
    if not isinstance(x, Moving):
        raise Refused("of something fixed")
    axis: int | Sequence[int] = operation.axis
    axes = tuple(sorted(int(each) % x.rank for each in ([axis] if isinstance(axis, int) else axis)))
    if axes != tuple(range(x.rank - len(axes), x.rank)) or 0 in axes:
        raise Refused(f"with axis={axis} of {x.rank} axes; it is computed over the last ones, such as axis=-1")
    epsilon = keras.config.epsilon() if operation.epsilon is None else operation.epsilon
    return c.emit(kind, [x, *weights], x.shape, module=c.place().path, axes=axes, epsilon=float(epsilon))


@operations("Normalize")
def _normalize(c: Reader, operation: Any, x: Moving) -> Any:
    axes = [operation.axis] if isinstance(operation.axis, int) else list(operation.axis or ())
    if len(axes) != 1 or operation.order != 2:
        raise Refused(
            f"with axis={operation.axis}, order={operation.order}; it is computed over one axis, with order=2"
        )
    return c.emit("normalize", [x], x.shape, axis=axes[0] % x.rank, epsilon=float(operation.epsilon or 1e-7))


@layers("GroupNormalization")
def _group_norm(c: Reader, layer: Any, x: Moving) -> Any:
    axis = int(layer.axis) % x.rank
    groups = x.shape[axis] if layer.groups == -1 else int(layer.groups)
    tensors = [c.weight(layer.gamma), c.weight(layer.beta)]
    return c.group_norm(x, tensors, "", axis, groups=groups, epsilon=float(layer.epsilon))
