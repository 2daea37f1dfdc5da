# SPDX-License-Identifier: Apache-2.0
"""Layers for plain functions; they train by themselves once the function is prepared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ...capture.jax.layers import capturing, layer


def batch_norm(
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.99,
    axis: int = -1,
) -> Any:
    """Batch norm of a plain function: in evaluation here, in training with the batch's statistics once it is prepared.

    Args:
        x: any shape, channels along `axis`.
        scale, bias: [channels], or None.
        mean, variance: [channels], leaves of the parameters. Once prepared, they are part of the state and follow
            training.
        epsilon: added to the variance.
        momentum: as in Flax: how much of the running statistics stays at each batch.
    """
    if capturing():
        how = {"epsilon": float(epsilon), "momentum": 1.0 - float(momentum), "channel_axis": axis % x.ndim}
        return layer("batch_norm", x, scale, bias, mean, variance, **how)
    shape = [-1 if at == axis % x.ndim else 1 for at in range(x.ndim)]
    factor = jax.lax.rsqrt(variance + epsilon) * (1.0 if scale is None else scale)
    y = (x - mean.reshape(shape)) * factor.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def dropout(x: Any, rate: float, broadcast_axes: Sequence[int] = ()) -> Any:
    """Dropout of a plain function: does nothing here; once prepared, training drops values with a probability.

    Args:
        rate: in [0, 1).
        broadcast_axes: axes along which values are kept or dropped together.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"rate must be at least 0 and below 1, got {rate!r}")
    if not capturing() or rate == 0:
        return x
    return layer("dropout", x, rate=float(rate), kept_axes=tuple(axis % x.ndim for axis in broadcast_axes))
