# SPDX-License-Identifier: Apache-2.0
"""JAX's implementation of the functions in which a device operator says what it computes in real numbers.

`device.operator.DeviceOperator.real` names them, `functional` those of training. Axes are counted from 0 in the user's
order, padding is (before, after) for each axis. Arrays add, multiply and compare by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import exactqat as eq
from exactqat.operators.jax import declared, placed_like, replicas

from ..core import primitives as core
from ..core.primitives import HostFunction
from . import host

Pairs = Sequence[Sequence[int]]


# --- functions of JAX by the names of `Primitives`, which says what they do -------------------------------------------


abs, maximum, minimum, where = jnp.abs, jnp.maximum, jnp.minimum, jnp.where
exp, log, sqrt, rsqrt = jnp.exp, jnp.log, jnp.sqrt, lax.rsqrt
sin, cos, tanh, sigmoid, erf = jnp.sin, jnp.cos, jnp.tanh, jax.nn.sigmoid, lax.erf
floor, ceil, round, sign, square = jnp.floor, jnp.ceil, jnp.round, jnp.sign, jnp.square
expm1, log1p = jnp.expm1, jnp.log1p
stop_gradient = lax.stop_gradient
ones_like, zeros_like = jnp.ones_like, jnp.zeros_like
exact_sqrt = jnp.sqrt
mean, sum, amax, amin = core.over(jnp.mean), core.over(jnp.sum), core.over(jnp.max), core.over(jnp.min)
argmax, argmin = core.over(jnp.argmax), core.over(jnp.argmin)
softmax, log_softmax = jax.nn.softmax, jax.nn.log_softmax
reshape, transpose, moveaxis, matmul = jnp.reshape, jnp.transpose, jnp.moveaxis, jnp.matmul
stack, flip, from_numpy = jnp.stack, jnp.flip, jnp.asarray
to_float = partial(jnp.asarray, dtype=jnp.float32)


def array(values: Any, like: Array) -> Array:
    return jnp.asarray(values, like.dtype)


clip = core.clipped(jnp.where, jnp.asarray)
relu = partial(clip, low=0.0, high=math.inf)
relu6 = partial(clip, low=0.0, high=6.0)


def straight_through(value: Array, gradient_of: Array) -> Array:
    """The first one's value with the second one's gradient."""
    return lax.stop_gradient(value) + (gradient_of - lax.stop_gradient(gradient_of))


@jax.custom_jvp
def with_gradient_of(value: Array, gradient_of: Array) -> Array:
    """The first one's value with the second one's gradient, whatever the second one's value is."""
    return value


@with_gradient_of.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    # By the function itself: gradients of gradients follow this rule, too.
    return with_gradient_of(*primals), tangents[1]


def on_host(function: HostFunction, like: Array, first: Sequence[Array], second: Sequence[Array]) -> Array:
    """What a function of two lists of NumPy arrays returns, with the gradient of `like`, whose shape and type it
    has."""
    first, second = jax.tree.map(lax.stop_gradient, (list(first), list(second)))
    (result,) = host.call(function, [like], first, second)
    return with_gradient_of(placed_like(result, like), like)


def network_on_host(
    function: HostFunction, like: Callable[[], Sequence[Array]], first: Sequence[Array], second: Sequence[Array]
) -> list[Array]:
    """What a function of two lists of NumPy arrays returns: one array for each of `like()`, with its shape, its type
    and its gradient. XLA drops what only gradients need if none are requested, and outside traced functions none can
    be.
    """
    leaves = [*first, *second]
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    if not traced and max(len(leaf.devices()) for leaf in leaves if isinstance(leaf, Array)) == 1:
        place = next(iter(second[0].devices())) if isinstance(second[0], Array) else None
        lists = ([np.asarray(leaf) for leaf in arrays] for arrays in (first, second))
        return [jax.device_put(result, place) for result in function(*lists)]
    first, second = jax.tree.map(lax.stop_gradient, (list(first), list(second)))
    likes = list(like())
    results = host.call(function, likes, first, second)
    return [with_gradient_of(placed_like(result, other), other) for result, other in zip(results, likes, strict=True)]


# --- whole numbers ----------------------------------------------------------------------------------------------------

_round_sums = declared("rounded_sums_by_grid")


def sums_are_exact() -> bool:
    """Whether `linear` and `conv` sum whole numbers without rounding, as long as float32 holds every sum of any of the
    products, and programs have `rounded_sums`: those for CPUs. Accelerators multiply in fewer bits."""
    return host.is_custom_call()


def numbers_on_host(function: HostFunction, likes: Sequence[Array], arrays: Sequence[Array]) -> list[Array]:
    """What a function of NumPy arrays, without a second list, returns; constants with the shapes of `likes`."""
    leaves = [lax.stop_gradient(jnp.asarray(operand)) for operand in arrays]
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return [jnp.asarray(result) for result in function([np.asarray(leaf) for leaf in leaves], [])]
    likes = [lax.stop_gradient(like) for like in likes]
    return [placed_like(value, like) for value, like in zip(host.call(function, likes, leaves, []), likes, strict=True)]


def rounded_sums(
    sums: Array, scale: Array, grid: Array, rounding: str, exact: Array, otherwise: Callable[[], Array]
) -> Array:
    """Sums of whole numbers, channels last, as a device rounds them, with the gradient of what is rounded; a program
    computes only one of the two ways."""
    held = lax.stop_gradient(sums)

    def here() -> Array:
        return cast(Array, _round_sums(held, scale, grid, rounding=rounding))

    if isinstance(exact, jax.core.Tracer):
        steps = lax.cond(exact, here, lambda: placed_like(otherwise(), held))
    else:
        steps = here() if exact else otherwise()
    return _with_gradient_of_rounding(steps, sums, scale, grid, rounding)


@partial(jax.custom_jvp, nondiff_argnums=(4,))
def _with_gradient_of_rounding(steps: Array, sums: Array, scale: Array, grid: Array, rounding: str) -> Array:
    return steps


@_with_gradient_of_rounding.defjvp
def _(rounding: str, primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    _, sums, scale, grid = primals
    # The value is not computed again: nothing reads it.
    _, moved = jax.jvp(lambda primal: _round_sums(primal, scale, grid, rounding=rounding), (sums,), (tangents[1],))
    return _with_gradient_of_rounding(*primals, rounding), moved


# --- replicas, in `exactqat.operators.jax.synchronized` ---------------------------------------------------------------


def sorted_values(x: Array) -> Array:
    """All values of an array in ascending order, flat; inside `synchronized` those of all replicas."""
    names = replicas()
    return jnp.sort((x if names is None else lax.all_gather(x, names)).reshape(-1))


def extremes_of_replicas(low: Array, high: Array) -> tuple[Array, Array]:
    """The smallest and the largest of all replicas in `exactqat.operators.jax.synchronized`, else what is given."""
    names = replicas()
    return (low, high) if names is None else (lax.pmin(low, names), lax.pmax(high, names))


def count_of_replicas() -> int:
    """How many there are in `exactqat.operators.jax.synchronized`, else 1."""
    names = replicas()
    return 1 if names is None else int(lax.psum(1, names))


def mean_of_replicas(x: Array) -> Array:
    """The mean over all replicas in `exactqat.operators.jax.synchronized`, else what is given."""
    names = replicas()
    return x if names is None else lax.pmean(x, names)


# --- movement ---------------------------------------------------------------------------------------------------------


def concatenate(arrays: Sequence[Array], axis: int) -> Array:
    """Joined along `axis`; where others differ, sizes of 1 are repeated (a constant next to a batch)."""
    shapes = [[*part.shape[:axis], *part.shape[axis + 1 :]] for part in arrays]
    if any(shape != shapes[0] for shape in shapes):
        common = [max(sizes) for sizes in zip(*shapes, strict=True)]
        arrays = [jnp.broadcast_to(part, (*common[:axis], part.shape[axis], *common[axis:])) for part in arrays]
    return jnp.concatenate(list(arrays), axis)


def slice(x: Array, axis: int, start: int, stop: int, step: int = 1) -> Array:
    """Every `step`-th position from `start` up to, but without, `stop`."""
    return lax.slice_in_dim(x, start, min(stop, x.shape[axis]), step, axis)


def gather(x: Array, indices: Sequence[int] | np.ndarray, axis: int) -> Array:
    """The positions with these indices along an axis."""
    return jnp.take(x, np.asarray(indices, np.int32), axis, mode="clip")


def embedding(indices: Array, table: Array, fixed_row: int | None = None) -> Array:
    """Rows of a table by integers of any dtype; the fixed row gets no gradient. NaN where an index is out of range,
    which only a traced one can be."""
    if fixed_row is not None:
        fixed = (np.arange(table.shape[0]) == fixed_row)[:, None]
        table = jnp.where(fixed, lax.stop_gradient(table), table)
    indices = jnp.where(indices < 0, table.shape[0], indices).astype(jnp.int32)
    return jnp.take(table, indices, 0, mode="fill", fill_value=math.nan)


def pad(x: Array, pairs: Pairs, value: float = 0.0) -> Array:
    """`value` around the array; one pair for every axis."""
    return lax.pad(x, jnp.asarray(value, x.dtype), [(int(before), int(after), 0) for before, after in pairs])


def pad_reflect(x: Array, pairs: Pairs, mode: str) -> Array:
    """The array's own values around it, from its edge outwards: "SYMMETRIC" with the edge itself, "REFLECT" without."""
    return jnp.pad(x, [tuple(pair) for pair in pairs], mode=mode.lower())


# --- products of matrices, convolutions, windows ----------------------------------------------------------------------


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Over the last axis; weight [out, in]."""
    product = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    return product if bias is None else product + bias


def conv(
    x: Array,
    weight: Array,
    bias: Array | None,
    strides: Sequence[int],
    padding: Pairs,
    dilations: Sequence[int],
    groups: int = 1,
    channel_axis: int = 1,
) -> Array:
    """weight [out, in / groups, *window]; without spatial axes: x [batch, in], weight [out, in / groups]."""
    pairs = [(int(before), int(after)) for before, after in padding]
    channels = x.shape[channel_axis]
    if weight.ndim == 2 and groups == channels == weight.shape[0]:
        result = x * weight[:, 0]
    elif groups == channels > 1 and weight.ndim in (3, 4):
        result = _depthwise(x, weight, strides, pairs, dilations, channel_axis)
    else:
        result = lax.conv_general_dilated(
            x,
            weight,
            tuple(strides),
            pairs,
            rhs_dilation=tuple(dilations),
            dimension_numbers=_dimension_numbers(x.ndim, channel_axis),
            feature_group_count=groups,
        )
    return result if bias is None else result + _along(bias, x.ndim, channel_axis)


def _along(vector: Array, rank: int, axis: int) -> Array:
    return vector.reshape([-1 if at == axis else 1 for at in range(rank)])


def _dimension_numbers(rank: int, channel_axis: int) -> lax.ConvDimensionNumbers:
    spatial = [axis for axis in range(1, rank) if axis != channel_axis]
    image = (0, channel_axis, *spatial)
    return lax.ConvDimensionNumbers(image, tuple(range(rank)), image)


def _depthwise(
    x: Array, weight: Array, strides: Sequence[int], pairs: Pairs, dilations: Sequence[int], channel_axis: int
) -> Array:
    """Every channel convolved on its own, through this library's operator."""
    if weight.ndim == 3:
        image, axis = (x[:, None], 3) if channel_axis == 2 else (x[:, :, None], 1)
        result = _depthwise(image, weight[:, :, None], (1, *strides), ((0, 0), *pairs), (1, *dilations), axis)
        return result[:, 0] if axis == 3 else result[:, :, 0]
    moved = jnp.moveaxis(x, channel_axis, 3)
    filter_ = jnp.transpose(weight, (2, 3, 1, 0)).reshape(*weight.shape[2:], moved.shape[3], -1)
    result = eq.nn.depthwise_conv2d(
        moved,
        filter_,
        strides=[1, *strides, 1],
        padding=[[0, 0], *map(list, pairs), [0, 0]],
        dilations=list(dilations),
    )
    return jnp.moveaxis(result, 3, channel_axis)


def conv_transpose(
    x: Array,
    weight: Array,
    bias: Array | None,
    strides: Sequence[int],
    padding: Pairs,
    output_padding: Sequence[int],
    dilations: Sequence[int],
    groups: int = 1,
    channel_axis: int = 1,
) -> Array:
    """weight [in, out / groups, *window]; padding: what is cropped from the result before and after."""
    window = weight.shape[2:]
    inputs, outputs = weight.shape[:2]
    turned = jnp.flip(weight, tuple(range(2, weight.ndim))).reshape(groups, inputs // groups, outputs, *window)
    turned = jnp.moveaxis(turned, 2, 1).reshape(groups * outputs, inputs // groups, *window)
    reach = [(side - 1) * dilation for side, dilation in zip(window, dilations, strict=True)]
    around = [
        (side - int(before), side - int(after) + int(extra))
        for side, (before, after), extra in zip(reach, padding, output_padding, strict=True)
    ]
    result = lax.conv_general_dilated(
        x,
        turned,
        (1,) * len(window),
        around,
        lhs_dilation=tuple(strides),
        rhs_dilation=tuple(dilations),
        dimension_numbers=_dimension_numbers(x.ndim, channel_axis),
        feature_group_count=groups,
    )
    return result if bias is None else result + _along(bias, x.ndim, channel_axis)


def max_pool(x: Array, window: Sequence[int], strides: Sequence[int], padding: Pairs, channel_axis: int = 1) -> Array:
    """The largest value of every window; padding is below all values."""
    return lax.reduce_window(x, -jnp.inf, lax.max, *_windows(x, window, strides, padding, channel_axis))


def sum_pool(x: Array, window: Sequence[int], strides: Sequence[int], padding: Pairs, channel_axis: int = 1) -> Array:
    """The sum of every window; padding is 0."""
    return lax.reduce_window(x, 0.0, lax.add, *_windows(x, window, strides, padding, channel_axis))


def _windows(x: Array, window: Sequence[int], strides: Sequence[int], padding: Pairs, channel_axis: int) -> Any:
    """The same entries for all axes."""
    spatial = [axis for axis in range(1, x.ndim) if axis != channel_axis]
    sides, steps, pairs = [1] * x.ndim, [1] * x.ndim, [(0, 0)] * x.ndim
    for at, axis in enumerate(spatial):
        sides[axis], steps[axis] = int(window[at]), int(strides[at])
        pairs[axis] = (int(padding[at][0]), int(padding[at][1]))
    return tuple(sides), tuple(steps), tuple(pairs)


# --- training ---------------------------------------------------------------------------------------------------------

fake_quantize = core.fake_quantize


def batch_norm(
    x: Array, scale: Array, offset: Array, mean: Array, variance: Array, epsilon: float, share: float, axis: int
) -> tuple[Array, Array, Array]:
    """Batch norm with the batch's statistics, by TensorFlow's fused operator.

    Args:
        share: of this batch in the running statistics.

    Returns:
        The result, and the running mean and (unbiased) variance after this batch.
    """
    moved = jnp.moveaxis(x, axis, -1)
    channels = moved.shape[-1]
    rows = moved if x.ndim == 4 else moved.reshape(-1, 1, 1, channels)
    result = eq.raw_ops.FusedBatchNormV3(
        x=rows,
        scale=scale,
        offset=offset,
        mean=mean,
        variance=variance,
        epsilon=epsilon,
        exponential_avg_factor=share,
        is_training=True,
    )
    y = jnp.moveaxis(result.y.reshape(moved.shape), -1, axis)
    return y, lax.stop_gradient(result.batch_mean), lax.stop_gradient(result.batch_variance)


def dropout(x: Array, rate: float, key: Any, kept_axes: Sequence[int] = ()) -> Array:
    """Each value dropped with a probability, the others scaled up; the same along `kept_axes`."""
    shape = [1 if axis in kept_axes else size for axis, size in enumerate(x.shape)]
    kept = jax.random.bernoulli(key, 1.0 - rate, tuple(shape))
    return jnp.where(kept, x / (1.0 - rate), 0.0)


# --- programs that run once or a few times: compile time matters more than run time -----------------------------------

_COMPILING = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


def program(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled as a whole: each of its operations by itself takes longer."""
    return jax.jit(function, compiler_options=_compiler_options())


@cache
def _compiler_options() -> dict[str, bool | int] | None:
    """None where XLA does not know them: on accelerators, and in other versions."""
    try:
        jax.jit(lambda: 0, compiler_options=_COMPILING)()
    except jax.errors.JaxRuntimeError:
        return None
    return _COMPILING


def differentiated(
    step: Callable[..., tuple[Array, Any]], leaves: dict[str, Array], others: dict[str, Array]
) -> tuple[dict[str, Array], Any]:
    """Gradients of what ``step(leaves, others)`` returns first, by the names of leaves, and what it returns second."""
    return jax.grad(step, has_aux=True)(leaves, others)
