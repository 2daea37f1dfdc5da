# SPDX-License-Identifier: Apache-2.0
"""Sums, extremes and windows."""

from __future__ import annotations

from ..core.builder import Moving
from ..core.products import cumulative_sum
from ..core.refusals import Refused
from ..core.windows import windows
from .converter import HANDLERS, Converter, Operation, handles
from .items import Item

_REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "amax", "reduce_min": "amin", "reduce_prod": "prod"}


@handles(*_REDUCTIONS)
def _reduce(c: Converter, operation: Operation, x: Moving) -> Item:
    axes = tuple(int(axis) for axis in operation.params["axes"])
    if not axes:
        return x
    if c.batch_axis(x.shape) in axes:
        raise Refused("it mixes the examples of a batch; batch norm needs its form for evaluation")
    shape = operation.shape
    return c.emit(_REDUCTIONS[operation.name], [x], shape, axes=axes, keep_dims=False)


HANDLERS["cumsum"] = lambda c, operation, x: cumulative_sum(
    c, x, int(operation.params["axis"]), bool(operation.params["reverse"])
)


HANDLERS["argmax"] = lambda c, how, x: c.emit(
    "argmax", [x], how.shape, how.params["index_dtype"], axis=int(how.params["axes"][0]), keep_dims=False
)

_WINDOWS = ("window_dimensions", "window_strides", "padding", "window_dilation")


@handles("reduce_window_max", "reduce_window_sum")
def _pool(c: Converter, operation: Operation, x: Moving) -> Item:
    """A largest value, or a mean whose divisor is 1: the division that mostly follows makes it a plain mean.

    Axes of size 1 that a window leaves alone are no axes of the pool: Equinox pools one example with one more.
    """
    params, result = operation.params, operation.shape
    if any(factor != 1 for factor in params["base_dilation"]):
        raise Refused("with values in between")
    single = [at for at in range(1, x.rank) if x.shape[at] == result[at] == params["window_dimensions"][at] == 1]
    kept = [at for at in range(x.rank) if at not in single[: max(0, x.rank - 4)]]
    sides, strides, padding, dilations = ([params[name][at] for at in kept] for name in _WINDOWS)
    x, shape = c.reshape(x, [x.shape[at] for at in kept]), [result[at] for at in kept]
    batch = c.batch_axis(x.shape)
    still = [at for at in range(x.rank) if at != batch and sides[at] == strides[at] == 1 and not any(padding[at])]
    if batch != 0 or (sides[0], strides[0]) != (1, 1) or not still:
        raise Refused("over the batch, or over all axes: one must hold channels")
    channel_axis = x.rank - 1 if x.rank - 1 in still else still[0]
    spatial = [at for at in range(1, x.rank) if at != channel_axis]
    how = windows(*([values[at] for at in spatial] for values in (strides, padding, dilations)))
    how |= {"window": tuple(int(sides[at]) for at in spatial), "channel_axis": channel_axis}
    if operation.name == "reduce_window_max":
        return c.reshape(c.emit("max_pool", [x], shape, **how), result)
    if any(dilation != 1 for dilation in how.pop("dilations")):
        raise Refused("with dilation")
    how |= {"over": (0,) * len(spatial), "count_include_pad": True, "divisor": 1}
    return c.reshape(c.emit("avg_pool", [x], shape, **how), result)
