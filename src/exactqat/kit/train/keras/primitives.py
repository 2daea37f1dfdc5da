# SPDX-License-Identifier: Apache-2.0
"""Keras 3's implementation of the functions in which a device operator says what it computes in real numbers.

With `keras.ops`, so on any backend. Fake quantization is this library's operator; on TensorFlow, TensorFlow's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

import exactqat

from ..core.primitives import HostFunction

Pairs = Sequence[Sequence[int]]


# --- value by value ---------------------------------------------------------------------------------------------------

abs = ops.abs
exp, log, sqrt, rsqrt = ops.exp, ops.log, ops.sqrt, ops.rsqrt
sin, cos, tanh, sigmoid, erf = ops.sin, ops.cos, ops.tanh, ops.sigmoid, ops.erf
floor, ceil, round, sign, square = ops.floor, ops.ceil, ops.round, ops.sign, ops.square
expm1, log1p, reciprocal, negative = ops.expm1, ops.log1p, ops.reciprocal, ops.negative
stop_gradient = ops.stop_gradient
ones_like, zeros_like = ops.ones_like, ops.zeros_like
exact_sqrt = ops.sqrt
maximum, minimum, where = ops.maximum, ops.minimum, ops.where


def array(values: Any, like: Any) -> Any:
    """NumPy values as a tensor of float32."""
    return ops.convert_to_tensor(np.asarray(values, np.float32))


def from_numpy(values: np.ndarray) -> Any:
    """NumPy values as a tensor."""
    return ops.convert_to_tensor(values)


def to_float(x: Any) -> Any:
    """A whole number, or any other, as float32."""
    return ops.cast(x, "float32")


def clip(x: Any, low: float, high: float) -> Any:
    """Nothing below `low` or above `high`; either may be infinite. No gradient at the ends, as ReLU has none at 0. NaN
    stays NaN: failed training has to show."""
    if low != -math.inf:
        x = ops.where(x <= low, ops.cast(low, x.dtype), x)
    if high != math.inf:
        x = ops.where(x >= high, ops.cast(high, x.dtype), x)
    return x


def relu(x: Any) -> Any:
    """Nothing below 0."""
    return clip(x, 0.0, math.inf)


def relu6(x: Any) -> Any:
    """Nothing below 0 or above 6."""
    return clip(x, 0.0, 6.0)


def straight_through(value: Any, gradient_of: Any) -> Any:
    """The first one's value with the second one's gradient."""
    return stop_gradient(value) + (gradient_of - stop_gradient(gradient_of))


def with_gradient_of(value: Any, gradient_of: Any) -> Any:
    """The first one's value with the second one's gradient, also where that is infinite: a pad before a pool."""
    return straight_through(value, ops.where(ops.isinf(gradient_of), 0.0, gradient_of))


def on_host(function: HostFunction, like: Any, first: Sequence[Any], second: Sequence[Any]) -> Any:
    """What a function of two lists of NumPy arrays returns, with the gradient of `like`, whose shape and type it
    has."""
    backend = keras.backend.backend()
    if backend == "jax":
        from ..jax import primitives as primitives_jax

        return primitives_jax.on_host(function, like, first, second)
    count = len(first)
    given = [stop_gradient(each) for each in (*first, *second)]
    if backend == "tensorflow":
        import tensorflow as tf

        def called(*arrays: Any) -> np.ndarray:
            return np.asarray(function(list(arrays[:count]), list(arrays[count:])), np.float32)

        made = tf.numpy_function(called, given, tf.float32, stateful=False)
        made.set_shape(like.shape)
    else:
        arrays = [ops.convert_to_numpy(each) for each in given]
        made = ops.convert_to_tensor(function(arrays[:count], arrays[count:]))
    return with_gradient_of(made, like)


def network_on_host(
    function: HostFunction,
    like: Callable[[], Sequence[Any]],
    first: Sequence[Any],
    second: Sequence[Any],
) -> list[Any] | None:
    """What a function of two lists of NumPy arrays returns: one tensor for each of `like()`, with its shape, its type
    and its gradient, which is computed only on demand. None if that cannot be known."""
    backend = keras.backend.backend()
    if backend == "jax":
        from ..jax import primitives as primitives_jax

        return primitives_jax.network_on_host(function, like, list(map(_value, first)), list(map(_value, second)))
    if backend == "torch":
        import torch

        if not torch.is_grad_enabled():
            lists = ([ops.convert_to_numpy(each) for each in arrays] for arrays in (first, second))
            return [ops.convert_to_tensor(each) for each in function(*lists)]
    return None


def _value(x: Any) -> Any:
    """What a variable holds."""
    return x.value if isinstance(x, keras.Variable) else x


# --- whole numbers ----------------------------------------------------------------------------------------------------


def sums_are_exact() -> bool:
    """Whether `linear` and `conv` sum whole numbers without rounding, as long as float32 holds every sum of any of the
    products, and `rounded_sums` is available: on JAX's and PyTorch's CPUs. TensorFlow has no such operator."""
    backend = keras.backend.backend()
    if backend == "jax":
        from ..jax import primitives as primitives_jax

        return primitives_jax.sums_are_exact()
    if backend == "torch":
        import torch

        # Without oneDNN PyTorch may transform before it sums, which rounds.
        accelerated = torch.accelerator.is_available() if hasattr(torch, "accelerator") else torch.cuda.is_available()
        return not accelerated and bool(torch._C._get_mkldnn_enabled()) and torch.backends.mkldnn.is_available()
    return False


def numbers_on_host(function: HostFunction, likes: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """What a function of NumPy arrays, without a second list, returns; constants with the shapes of `likes`."""
    if keras.backend.backend() == "jax":
        from ..jax import primitives as primitives_jax

        return primitives_jax.numbers_on_host(function, likes, list(map(_value, arrays)))
    made = function([ops.convert_to_numpy(stop_gradient(each)) for each in arrays], [])
    return [ops.convert_to_tensor(each) for each in made]


def rounded_sums(sums: Any, scale: Any, grid: Any, rounding: str, exact: Any, otherwise: Callable[[], Any]) -> Any:
    """Sums of whole numbers, channels last, as a device rounds them, with the gradient of what is rounded."""
    if keras.backend.backend() == "jax":
        from ..jax import primitives as primitives_jax

        return primitives_jax.rounded_sums(sums, scale, grid, rounding, exact, otherwise)
    from exactqat.operators.torch import fused

    steps = fused("rounded_sums_by_grid")(sums, scale, grid, rounding=rounding)
    return steps if exact else straight_through(otherwise(), steps)


# --- over axes --------------------------------------------------------------------------------------------------------


def _axes(axes: int | Sequence[int]) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else tuple(axes)


def mean(x: Any, axes: int | Sequence[int], keep_dims: bool = False) -> Any:
    """The mean over some axes."""
    return ops.mean(x, _axes(axes), keepdims=keep_dims)


def sum(x: Any, axes: int | Sequence[int], keep_dims: bool = False) -> Any:
    """The sum over some axes."""
    return ops.sum(x, _axes(axes), keepdims=keep_dims)


def amax(x: Any, axes: int | Sequence[int], keep_dims: bool = False) -> Any:
    """The largest value over some axes."""
    return ops.max(x, _axes(axes), keepdims=keep_dims) if _axes(axes) else x


def amin(x: Any, axes: int | Sequence[int], keep_dims: bool = False) -> Any:
    """The smallest value over some axes."""
    return ops.min(x, _axes(axes), keepdims=keep_dims) if _axes(axes) else x


def argmax(x: Any, axis: int, keep_dims: bool = False) -> Any:
    """Where the largest value is, the first one of equal ones."""
    return ops.argmax(x, axis, keepdims=keep_dims)


def argmin(x: Any, axis: int, keep_dims: bool = False) -> Any:
    """Where the smallest value is, the first one of equal ones."""
    return ops.argmin(x, axis, keepdims=keep_dims)


def softmax(x: Any, axis: int) -> Any:
    """Shares that add up to 1 along an axis."""
    return ops.softmax(x, axis)


def log_softmax(x: Any, axis: int) -> Any:
    """The logarithm of `softmax`."""
    return ops.log_softmax(x, axis)


def sorted_values(x: Any) -> Any:
    """All values of a tensor in ascending order, flat."""
    return ops.sort(ops.reshape(x, (-1,)))


def extremes_of_replicas(low: Any, high: Any) -> tuple[Any, Any]:
    """What is given: Keras's own distribution shows each operation the whole batch."""
    return low, high


def count_of_replicas() -> int:
    """Likewise."""
    return 1


def mean_of_replicas(x: Any) -> Any:
    """Likewise."""
    return x


# --- movement ---------------------------------------------------------------------------------------------------------


def reshape(x: Any, shape: Sequence[int]) -> Any:
    """The same elements in another shape; one size may be -1."""
    return ops.reshape(x, tuple(shape))


def transpose(x: Any, permutation: Sequence[int]) -> Any:
    """Result axis k is the tensor's axis permutation[k]."""
    return ops.transpose(x, tuple(permutation))


def moveaxis(x: Any, source: int, destination: int) -> Any:
    """One axis moved elsewhere."""
    return ops.moveaxis(x, source, destination)


def concatenate(arrays: Sequence[Any], axis: int) -> Any:
    """Joined along `axis`; where others differ, sizes of 1 are repeated (a constant next to a batch)."""
    whole = max(arrays, key=lambda each: int(np.prod([size or 1 << 20 for size in each.shape])))
    made = []
    for each in arrays:
        others = [at for at in range(len(each.shape)) if at != axis and each.shape[at] == 1 != whole.shape[at]]
        if others:
            one = ops.take(whole, [0], axis)
            each = each + 0.0 * (one if each.shape[axis] == 1 else ops.repeat(one, each.shape[axis], axis))
        made.append(each)
    return ops.concatenate(made, axis)


def stack(arrays: Sequence[Any], axis: int) -> Any:
    """Joined along a new axis."""
    return ops.stack(list(arrays), axis)


def slice(x: Any, axis: int, start: int, stop: int, step: int = 1) -> Any:
    """Every `step`-th position from `start` up to, but without, `stop`."""
    import builtins

    return x[(builtins.slice(None),) * axis + (builtins.slice(start, stop, step),)]


def gather(x: Any, indices: Sequence[int], axis: int) -> Any:
    """The positions with these indices along an axis."""
    return ops.take(x, np.asarray(indices, np.int32), axis)


def embedding(indices: Any, table: Any, fixed_row: int | None = None) -> Any:
    """Rows of a table by integers of any dtype; the fixed row gets no gradient."""
    if fixed_row is not None:
        fixed = (np.arange(table.shape[0]) == fixed_row)[:, None]
        table = ops.where(fixed, ops.stop_gradient(table), table)
    return ops.take(table, ops.cast(indices, "int32"), 0)


def flip(x: Any, axes: int | Sequence[int]) -> Any:
    """Reversed along some axes."""
    return ops.flip(x, _axes(axes))


def pad(x: Any, pairs: Pairs, value: float = 0.0) -> Any:
    """`value` around the tensor; one pair for every axis."""
    widths = tuple((int(before), int(after)) for before, after in pairs)
    return ops.pad(x, widths, constant_values=value) if any(map(any, widths)) else x


def pad_reflect(x: Any, pairs: Pairs, mode: str) -> Any:
    """The tensor's own values around it: "SYMMETRIC" with the edge itself, "REFLECT" without."""
    return ops.pad(x, tuple((int(before), int(after)) for before, after in pairs), mode=mode.lower())


# --- products of matrices, convolutions, windows ----------------------------------------------------------------------


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """Over the last axis; weight [out, in]."""
    product = ops.matmul(x, ops.transpose(weight))
    return product if bias is None else product + bias


def matmul(first: Any, second: Any) -> Any:
    """The product over the last axis of the first and the second-to-last axis of the second."""
    return ops.matmul(first, second)


def _channels_last(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a tensor with its channels last, for channels along any axis."""

    def called(x: Any, *arguments: Any, channel_axis: int = 1, **rest: Any) -> Any:
        last = len(x.shape) - 1
        if channel_axis == last:
            return function(x, *arguments, **rest)
        return ops.moveaxis(function(ops.moveaxis(x, channel_axis, last), *arguments, **rest), last, channel_axis)

    return called


def conv(
    x: Any,
    weight: Any,
    bias: Any,
    strides: Sequence[int],
    padding: Pairs,
    dilations: Sequence[int],
    groups: int = 1,
    channel_axis: int = 1,
) -> Any:
    """weight [out, in / groups, *window]; without spatial axes: x [batch, in], weight [out, in / groups]."""
    return _conv(x, weight, bias, strides, padding, dilations, groups, channel_axis=channel_axis)


@_channels_last
def _conv(
    x: Any, weight: Any, bias: Any, strides: Sequence[int], padding: Pairs, dilations: Sequence[int], groups: int
) -> Any:
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
        result = _strided(x, kernel, strides, dilations)
    elif groups == channels:
        kernel = ops.reshape(kernel, (*window, channels, outputs // channels))
        result = _depthwise(x, kernel, strides, dilations)
    else:
        parts = zip(ops.split(x, groups, -1), ops.split(kernel, groups, -1), strict=True)
        result = ops.concatenate([_strided(part, own, strides, dilations) for part, own in parts], -1)
    return result if bias is None else result + bias


def _strided(x: Any, kernel: Any, strides: tuple[int, ...], dilations: tuple[int, ...]) -> Any:
    # No backend supports both at once: what is between the strides is dropped afterwards.
    both = any(size > 1 for size in strides) and any(size > 1 for size in dilations)
    once = (1,) * len(strides) if both else strides
    result = ops.conv(x, kernel, once, "valid", "channels_last", dilations)
    return _every(result, strides) if both else result


def _depthwise(x: Any, kernel: Any, strides: tuple[int, ...], dilations: tuple[int, ...]) -> Any:
    # TensorFlow takes only one stride for both axes, and none with dilation.
    uneven = len(set(strides)) > 1 or (any(size > 1 for size in strides) and any(size > 1 for size in dilations))
    once = (1,) * len(strides) if uneven else strides
    result = ops.depthwise_conv(x, kernel, once, "valid", "channels_last", dilations)
    return _every(result, strides) if uneven else result


def _every(x: Any, strides: tuple[int, ...]) -> Any:
    for axis, step in enumerate(strides, 1):
        x = slice(x, axis, 0, x.shape[axis], step)
    return x


def conv_transpose(
    x: Any,
    weight: Any,
    bias: Any,
    strides: Sequence[int],
    padding: Pairs,
    output_padding: Sequence[int],
    dilations: Sequence[int],
    groups: int = 1,
    channel_axis: int = 1,
) -> Any:
    """weight [in, out / groups, *window]; padding: what is cropped from the result before and after."""
    return _conv_transpose(x, weight, bias, strides, padding, output_padding, channel_axis=channel_axis)


@_channels_last
def _conv_transpose(
    x: Any, weight: Any, bias: Any, strides: Sequence[int], padding: Pairs, output_padding: Sequence[int]
) -> Any:
    """Zeros between the values, then a convolution with the kernel flipped."""
    window = tuple(weight.shape[2:])
    for axis, stride in enumerate(strides, 1):
        if stride > 1:
            size = x.shape[axis]
            wide = ops.expand_dims(x, axis + 1)
            widths = [(0, 0)] * len(wide.shape)
            widths[axis + 1] = (0, stride - 1)
            sizes = [-1 if at == 0 else each for at, each in enumerate(x.shape)]
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


def max_pool(x: Any, window: Sequence[int], strides: Sequence[int], padding: Pairs, channel_axis: int = 1) -> Any:
    """The largest value of every window; padding is below all values."""
    return _max_pool(x, window, strides, padding, channel_axis=channel_axis)


@_channels_last
def _max_pool(x: Any, window: Sequence[int], strides: Sequence[int], padding: Pairs) -> Any:
    # The lowest float32 number: infinity would turn a gradient into NaN somewhere.
    x = pad(x, ((0, 0), *padding, (0, 0)), float(np.finfo(np.float32).min))
    return ops.max_pool(x, tuple(window), tuple(strides), "valid", "channels_last")


def sum_pool(x: Any, window: Sequence[int], strides: Sequence[int], padding: Pairs, channel_axis: int = 1) -> Any:
    """The sum of every window; padding is 0."""
    return _sum_pool(x, window, strides, padding, channel_axis=channel_axis)


@_channels_last
def _sum_pool(x: Any, window: Sequence[int], strides: Sequence[int], padding: Pairs) -> Any:
    """Window by window: sums of whole numbers are exact, which a mean times their count is not."""
    x = pad(x, ((0, 0), *padding, (0, 0)))
    total: Any = None
    places = np.ndindex(*map(int, window))
    sizes = [(x.shape[at + 1] - side) // step + 1 for at, (side, step) in enumerate(zip(window, strides, strict=True))]
    for place in places:
        part = x
        for axis, (start, step, size) in enumerate(zip(place, strides, sizes, strict=True), 1):
            part = slice(part, axis, start, start + (size - 1) * step + 1, step)
        total = part if total is None else total + part
    return total


# --- training ---------------------------------------------------------------------------------------------------------


def fake_quantize(x: Any, minimum: Any, maximum: Any, bits: int, narrow_range: bool) -> Any:
    """TensorFlow's fake quantization, per tensor for rank 0 bounds and per channel of the last axis for bounds [d]."""
    backend = keras.backend.backend()
    if backend == "jax":
        from ..jax import primitives as primitives_jax

        return primitives_jax.fake_quantize(x, minimum, maximum, bits, narrow_range)
    if backend == "tensorflow":
        whole = len(minimum.shape) == 0
        name = "fake_quant_with_min_max_vars" if whole else "fake_quant_with_min_max_vars_per_channel"
        return getattr(exactqat.quantization, name)(x, minimum, maximum, bits, narrow_range)
    from ..torch.primitives import fake_quantize as quantize

    return quantize(x.contiguous(), minimum, maximum, bits, narrow_range)


def batch_norm(
    x: Any, scale: Any, offset: Any, mean: Any, variance: Any, epsilon: float, share: float, axis: int
) -> tuple[Any, Any, Any]:
    """Batch norm with the batch's statistics, and the running ones after it, as Keras moves them."""
    others = [at for at in range(len(x.shape)) if at != axis]
    shape = [-1 if at == axis else 1 for at in range(len(x.shape))]
    batch_mean, batch_variance = ops.moments(x, others)
    factor = ops.rsqrt(batch_variance + epsilon) * scale
    y = x * ops.reshape(factor, shape) + ops.reshape(offset - batch_mean * factor, shape)
    batch_mean, batch_variance = stop_gradient(batch_mean), stop_gradient(batch_variance)
    return y, mean + (batch_mean - mean) * share, variance + (batch_variance - variance) * share


def dropout(x: Any, rate: float, key: Any, kept_axes: Sequence[int] = ()) -> Any:
    """Each value dropped with a probability, the others scaled up; the same along `kept_axes`. key: a generator."""
    shape = ops.shape(x)
    noise = tuple(1 if axis in kept_axes else size for axis, size in enumerate(shape)) if kept_axes else None
    return keras.random.dropout(x, rate, noise, seed=key)


class WithMethods:
    """A tensor with the methods of NumPy's arrays that constants are computed with."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def T(self) -> WithMethods:
        return WithMethods(ops.transpose(self.tensor))

    def reshape(self, *shape: Any) -> WithMethods:
        return WithMethods(ops.reshape(self.tensor, shape[0] if len(shape) == 1 else shape))

    def transpose(self, *axes: Any) -> WithMethods:
        return WithMethods(ops.transpose(self.tensor, axes[0] if len(axes) == 1 else axes))

    def clip(self, min: Any = None, max: Any = None) -> WithMethods:
        return WithMethods(clip(self.tensor, -math.inf if min is None else min, math.inf if max is None else max))

    def __getitem__(self, key: Any) -> WithMethods:
        return WithMethods(self.tensor[key])

    def __neg__(self) -> WithMethods:
        return WithMethods(-self.tensor)

    def __add__(self, other: Any) -> WithMethods:
        return WithMethods(self.tensor + _bare(other))

    def __radd__(self, other: Any) -> WithMethods:
        return WithMethods(_bare(other) + self.tensor)

    def __sub__(self, other: Any) -> WithMethods:
        return WithMethods(self.tensor - _bare(other))

    def __rsub__(self, other: Any) -> WithMethods:
        return WithMethods(_bare(other) - self.tensor)

    def __mul__(self, other: Any) -> WithMethods:
        return WithMethods(self.tensor * _bare(other))

    def __rmul__(self, other: Any) -> WithMethods:
        return WithMethods(_bare(other) * self.tensor)

    def __truediv__(self, other: Any) -> WithMethods:
        return WithMethods(self.tensor / _bare(other))

    def __rtruediv__(self, other: Any) -> WithMethods:
        return WithMethods(_bare(other) / self.tensor)


def _bare(value: Any) -> Any:
    return value.tensor if isinstance(value, WithMethods) else value


# Functions that a network may end with, by their kind in `network.KINDS`.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "softmax": softmax,
    "log_softmax": log_softmax,
    "sigmoid": sigmoid,
    "argmax": argmax,
}
