# SPDX-License-Identifier: Apache-2.0
"""Keras 3's implementation of the functions in which a device operator says what it computes in real numbers.

With `keras.ops`, so on any backend. Fake quantization is this library's operator; on TensorFlow, TensorFlow's own.
"""

from __future__ import annotations

import builtins
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib import import_module
from typing import Any

import keras
import numpy as np
from keras import ops

from ..core import primitives as core

Pairs = Sequence[Sequence[int]]
# Of the backend.
Tensor = Any

# --- functions of the backend -----------------------------------------------------------------------------------------

_IN_ROOM = {"jax": "..jax.primitives", "torch": ".on_torch", "tensorflow": ".on_tensorflow"}
_backend = import_module(_IN_ROOM[keras.backend.backend()], __package__)
fake_quantize, on_host, network_on_host = _backend.fake_quantize, _backend.on_host, _backend.network_on_host
sums_are_exact, numbers_on_host, rounded_sums = _backend.sums_are_exact, _backend.numbers_on_host, _backend.rounded_sums
differentiated = _backend.differentiated
# On JAX a compiled function; elsewhere the function itself.
program = getattr(_backend, "program", lambda function: function)


# --- functions of `keras.ops` by the names of `Primitives`, which says what they do -----------------------------------


abs, maximum, minimum, where = ops.abs, ops.maximum, ops.minimum, ops.where
exp, log, sqrt, rsqrt = ops.exp, ops.log, ops.sqrt, ops.rsqrt
sin, cos, tanh, sigmoid, erf = ops.sin, ops.cos, ops.tanh, ops.sigmoid, ops.erf
floor, ceil, round, sign, square = ops.floor, ops.ceil, ops.round, ops.sign, ops.square
expm1, log1p = ops.expm1, ops.log1p
stop_gradient = ops.stop_gradient
ones_like, zeros_like = ops.ones_like, ops.zeros_like
exact_sqrt = ops.sqrt
mean, sum, amax, amin = core.over(ops.mean), core.over(ops.sum), core.over(ops.max), core.over(ops.min)
argmax, argmin = core.over(ops.argmax), core.over(ops.argmin)
softmax, log_softmax = ops.softmax, ops.log_softmax
reshape, transpose, moveaxis, matmul = ops.reshape, ops.transpose, ops.moveaxis, ops.matmul
stack, flip, from_numpy = ops.stack, ops.flip, ops.convert_to_tensor
to_float = partial(ops.cast, dtype="float32")


def array(values: np.ndarray | float, like: Tensor) -> Tensor:
    return ops.convert_to_tensor(np.asarray(values, np.float32))


clip = core.clipped(ops.where, ops.cast)
relu = partial(clip, low=0.0, high=math.inf)
relu6 = partial(clip, low=0.0, high=6.0)


def straight_through(value: Tensor, gradient_of: Tensor) -> Tensor:
    """The first one's value with the second one's gradient."""
    return stop_gradient(value) + (gradient_of - stop_gradient(gradient_of))


def sorted_values(x: Tensor) -> Tensor:
    """All values of a tensor in ascending order, flat."""
    return ops.sort(ops.reshape(x, (-1,)))


def extremes_of_replicas(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """What is given: Keras's own distribution shows each operation the whole batch."""
    return low, high


def count_of_replicas() -> int:
    """Likewise."""
    return 1


def mean_of_replicas(x: Tensor) -> Tensor:
    """Likewise."""
    return x


# --- movement ---------------------------------------------------------------------------------------------------------


def concatenate(arrays: Sequence[Tensor], axis: int) -> Tensor:
    """Joined along `axis`; where others differ, sizes of 1 are repeated (a constant next to a batch)."""
    whole = max(arrays, key=lambda tensor: int(np.prod([size or 1 << 20 for size in tensor.shape])))
    parts = []
    for tensor in arrays:
        others = [at for at in range(len(tensor.shape)) if at != axis and tensor.shape[at] == 1 != whole.shape[at]]
        if others:
            one = ops.take(whole, [0], axis)
            tensor = tensor + 0.0 * (one if tensor.shape[axis] == 1 else ops.repeat(one, tensor.shape[axis], axis))
        parts.append(tensor)
    return ops.concatenate(parts, axis)


def slice(x: Tensor, axis: int, start: int, stop: int, step: int = 1) -> Tensor:
    """Every `step`-th position from `start` up to, but without, `stop`."""
    return x[(builtins.slice(None),) * axis + (builtins.slice(start, stop, step),)]


def gather(x: Tensor, indices: Sequence[int] | np.ndarray, axis: int) -> Tensor:
    """The positions with these indices along an axis."""
    return ops.take(x, np.asarray(indices, np.int32), axis)


def embedding(indices: Tensor, table: Tensor, fixed_row: int | None = None) -> Tensor:
    """Rows of a table by integers of any dtype; the fixed row gets no gradient."""
    if fixed_row is not None:
        fixed = (np.arange(table.shape[0]) == fixed_row)[:, None]
        table = ops.where(fixed, ops.stop_gradient(table), table)
    return ops.take(table, ops.cast(indices, "int32"), 0)


def pad(x: Tensor, pairs: Pairs, value: float = 0.0) -> Tensor:
    """`value` around the tensor; one pair for every axis."""
    widths = tuple((int(before), int(after)) for before, after in pairs)
    return ops.pad(x, widths, constant_values=value) if any(map(any, widths)) else x


def pad_reflect(x: Tensor, pairs: Pairs, mode: str) -> Tensor:
    """The tensor's own values around it: "SYMMETRIC" with the edge itself, "REFLECT" without."""
    return ops.pad(x, tuple((int(before), int(after)) for before, after in pairs), mode=mode.lower())


# --- products of matrices, convolutions, windows ----------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Tensor = None) -> Tensor:
    """Over the last axis; weight [out, in]."""
    product = ops.matmul(x, ops.transpose(weight))
    return product if bias is None else product + bias


def _channels_last(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of a tensor with its channels last, for channels along any axis."""
    signature = inspect.signature(function)

    @wraps(function)
    def moving(*args: object, **kwargs: object) -> Tensor:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        x, axis = call.arguments["x"], call.arguments["channel_axis"]
        last = len(x.shape) - 1
        if axis == last:
            return function(*call.args)
        call.arguments["x"] = ops.moveaxis(x, axis, last)
        return ops.moveaxis(function(*call.args), last, axis)

    return moving


@_channels_last
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    strides: Sequence[int],
    padding: Pairs,
    dilations: Sequence[int],
    groups: int = 1,
    channel_axis: int = 1,
) -> Tensor:
    """weight [out, in / groups, *window]; without spatial axes: x [batch, in], weight [out, in / groups]."""
    channels, outputs, window = x.shape[-1], weight.shape[0], tuple(weight.shape[2:])
    if all(size == 1 for size in window) and groups == channels == outputs and all(size == 1 for size in strides):
        result = pad(x, ((0, 0), *padding, (0, 0))) * ops.reshape(weight, (outputs,))
        return result if bias is None else result + bias
    x = pad(x, ((0, 0), *padding, (0, 0)))
    kernel = ops.transpose(weight, (*range(2, len(weight.shape)), 1, 0))
    strides, dilations = tuple(strides), tuple(dilations)
    if all(size == 1 for size in window):
        # On PyTorch's backend as in `modules.strides_first`; for the others it makes no difference.
        x, strides = _every(x, strides), (1,) * len(strides)
    if groups == 1:
        result = _convolved(ops.conv, x, kernel, strides, dilations)
    elif groups == channels:
        kernel = ops.reshape(kernel, (*window, channels, outputs // channels))
        result = _convolved(ops.depthwise_conv, x, kernel, strides, dilations)
    else:
        parts = zip(ops.split(x, groups, -1), ops.split(kernel, groups, -1), strict=True)
        result = ops.concatenate([_convolved(ops.conv, part, own, strides, dilations) for part, own in parts], -1)
    return result if bias is None else result + bias


def _convolved(
    convolve: Callable[..., Tensor], x: Tensor, kernel: Tensor, strides: tuple[int, ...], dilations: tuple[int, ...]
) -> Tensor:
    # No backend takes strides beside dilations, nor TensorFlow two different strides of depthwise convolutions: what is
    # between the strides is dropped afterwards.
    both = any(size > 1 for size in strides) and any(size > 1 for size in dilations)
    if not both and (convolve is ops.conv or len(set(strides)) == 1):
        return convolve(x, kernel, strides, "valid", "channels_last", dilations)
    return _every(convolve(x, kernel, (1,) * len(strides), "valid", "channels_last", dilations), strides)


def _every(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    for axis, step in enumerate(strides, 1):
        x = slice(x, axis, 0, x.shape[axis], step)
    return x


@_channels_last
def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    strides: Sequence[int],
    padding: Pairs,
    output_padding: Sequence[int],
    dilations: Sequence[int],
    groups: int = 1,
    channel_axis: int = 1,
) -> Tensor:
    """weight [in, out / groups, *window]: zeros between the values, then a convolution with the kernel flipped."""
    window = tuple(weight.shape[2:])
    for axis, stride in enumerate(strides, 1):
        if stride > 1:
            size = x.shape[axis]
            wide = ops.expand_dims(x, axis + 1)
            widths = [(0, 0)] * len(wide.shape)
            widths[axis + 1] = (0, stride - 1)
            sizes = [-1 if at == 0 else length for at, length in enumerate(x.shape)]
            sizes[axis] = size * stride
            x = slice(ops.reshape(pad(wide, widths), sizes), axis, 0, (size - 1) * stride + 1)
    spatial = tuple(range(2, len(weight.shape)))
    turned = ops.transpose(ops.flip(weight, spatial), (*spatial, 0, 1))
    around = [
        (side - 1 - int(before), side - 1 - int(after) + int(extra))
        for side, (before, after), extra in zip(window, padding, output_padding, strict=True)
    ]
    for axis, (before, after) in enumerate(around, 1):
        if before < 0 or after < 0:
            x = slice(x, axis, max(-before, 0), x.shape[axis] - max(-after, 0))
    x = pad(x, ((0, 0), *((max(before, 0), max(after, 0)) for before, after in around), (0, 0)))
    result = ops.conv(x, turned, 1, "valid", "channels_last")
    return result if bias is None else result + bias


@_channels_last
def max_pool(x: Tensor, window: Sequence[int], strides: Sequence[int], padding: Pairs, channel_axis: int = 1) -> Tensor:
    """The largest value of every window; padding is below all values."""
    # The lowest float32 number: infinity would turn a gradient into NaN somewhere.
    x = pad(x, ((0, 0), *padding, (0, 0)), float(np.finfo(np.float32).min))
    return ops.max_pool(x, tuple(window), tuple(strides), "valid", "channels_last")


@_channels_last
def sum_pool(x: Tensor, window: Sequence[int], strides: Sequence[int], padding: Pairs, channel_axis: int = 1) -> Tensor:
    """The sum of every window; padding is 0. Window by window: sums of whole numbers are exact, which a mean times
    their count is not."""
    x = pad(x, ((0, 0), *padding, (0, 0)))
    total: Tensor = None
    places = np.ndindex(*map(int, window))
    sizes = [(x.shape[at + 1] - side) // step + 1 for at, (side, step) in enumerate(zip(window, strides, strict=True))]
    for place in places:
        part = x
        for axis, (start, step, size) in enumerate(zip(place, strides, sizes, strict=True), 1):
            part = slice(part, axis, start, start + (size - 1) * step + 1, step)
        total = part if total is None else total + part
    return total


# --- training ---------------------------------------------------------------------------------------------------------


def batch_norm(
    x: Tensor, scale: Tensor, offset: Tensor, mean: Tensor, variance: Tensor, epsilon: float, share: float, axis: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm with the batch's statistics, and the running ones after it, as Keras moves them."""
    others = [at for at in range(len(x.shape)) if at != axis]
    shape = [-1 if at == axis else 1 for at in range(len(x.shape))]
    batch_mean, batch_variance = ops.moments(x, others)
    factor = ops.rsqrt(batch_variance + epsilon) * scale
    y = x * ops.reshape(factor, shape) + ops.reshape(offset - batch_mean * factor, shape)
    batch_mean, batch_variance = stop_gradient(batch_mean), stop_gradient(batch_variance)
    return y, mean + (batch_mean - mean) * share, variance + (batch_variance - variance) * share


def dropout(x: Tensor, rate: float, key: keras.random.SeedGenerator, kept_axes: Sequence[int] = ()) -> Tensor:
    """Each value dropped with a probability, the others scaled up; the same along `kept_axes`. key: a generator."""
    shape = ops.shape(x)
    noise = tuple(1 if axis in kept_axes else size for axis, size in enumerate(shape)) if kept_axes else None
    return keras.random.dropout(x, rate, noise, seed=key)


def _method(function: Callable[..., Tensor]) -> Callable[..., WithMethods]:
    def method(*operands: object, **parameters: object) -> WithMethods:
        bare = [operand.tensor if isinstance(operand, WithMethods) else operand for operand in operands]
        return WithMethods(function(*bare, **parameters))

    return method


def _item(x: Any, place: Any) -> Any:
    if isinstance(place, tuple) and isinstance(place[-1], np.ndarray):  # which TensorFlow's tensors do not take
        return ops.take(x, place[-1], len(place) - 1)
    return x[place]


class WithMethods:
    """A tensor with the methods of NumPy's arrays that constants are computed with."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    __add__ = __radd__ = _method(operator.add)
    __mul__ = __rmul__ = _method(operator.mul)
    __sub__, __rsub__ = _method(operator.sub), _method(lambda x, other: other - x)
    __truediv__, __rtruediv__ = _method(operator.truediv), _method(lambda x, other: other / x)
    __neg__ = _method(operator.neg)
    __getitem__ = _method(_item)
    T = property(_method(ops.transpose))
    reshape = _method(lambda x, *shape: ops.reshape(x, shape[0] if len(shape) == 1 else shape))
    transpose = _method(lambda x, *axes: ops.transpose(x, axes[0] if len(axes) == 1 else axes))
    sum = _method(ops.sum)
    clip = _method(lambda x, min=-math.inf, max=math.inf: clip(x, min, max))
