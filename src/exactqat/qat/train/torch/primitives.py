# SPDX-License-Identifier: Apache-2.0
"""PyTorch's implementation of the functions in which a device operator says what it computes in real numbers.

`device.operator.DeviceOperator.real` names them; other frameworks provide the same ones. Axes are counted from 0 in the
user's order, padding is (before, after) for each axis. Arrays add, multiply and compare by themselves.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor
from torch.autograd import forward_ad

import exactqat as eq
from exactqat.operators.torch import declared, is_plain

from ..core import primitives as core

Pairs = Sequence[Sequence[int]]
_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_round_sums = declared("rounded_sums_by_grid")


# --- layouts, and what PyTorch's own convolutions ask for ------------------------------------------------------------


def channels_last_view(tensor: Tensor) -> Tensor:
    """[n, c, h, w] as contiguous [n, h, w, c]; a view if the tensor is in ``torch.channels_last``."""
    return tensor.permute(0, 2, 3, 1).contiguous()


def channels_first_view(tensor: Tensor) -> Tensor:
    """[n, h, w, c] as [n, c, h, w], without a copy."""
    return tensor.permute(0, 3, 1, 2)


def as_in_autocast(features: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Operands of a convolution in the dtype that ``torch.autocast`` uses for PyTorch's own, if it is on."""
    device = features.device.type
    # PyTorch raises an error for "meta", whose tensors have no values.
    if features.is_meta or not torch.is_autocast_enabled(device) or features.dtype == torch.float64:
        return (features, *others)
    dtype = torch.get_autocast_dtype(device)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in (features, *others))


# oneDNN processes a block of channels at a time: 8 with AVX2, 16 with AVX-512.
_LARGEST_CHANNEL_BLOCK = 16


def is_exporting() -> bool:
    """Whether `torch.export` runs; before PyTorch 2.12 its own function also says so in `torch.compile`."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def overruns_channels_last(weight: Tensor, strides: Sequence[int], padding: Sequence[int]) -> bool:
    """Whether oneDNN's weight gradient of this convolution writes past its workspace when channels are last.

    It does for a window of one position with strides and fewer channels than its block (its issue 6035; seen with
    PyTorch 2.13): the process crashes, or the gradient is wrong.
    """
    few = weight.shape[1] < _LARGEST_CHANNEL_BLOCK
    return few and not any(padding) and max(weight.shape[2:]) == 1 and any(stride > 1 for stride in strides)


def strides_first(
    features: Tensor, weight: Tensor, strides: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, tuple[int, ...]]:
    """What a convolution reads, and its strides: where `overruns_channels_last`, only the positions that it reads."""
    strides = tuple(strides)
    if not overruns_channels_last(weight, strides, padding):
        return features, strides
    for axis, stride in enumerate(strides, 2):
        if stride > 1:
            features = features[(builtins.slice(None),) * axis + (builtins.slice(None, None, stride),)]
    return features, (1,) * len(strides)


# --- functions of PyTorch by the names of `Primitives`, which says what they do ---------------------------------------

abs = torch.abs
exp, log, sqrt, rsqrt = torch.exp, torch.log, torch.sqrt, torch.rsqrt
sin, cos, tanh, sigmoid, erf = torch.sin, torch.cos, torch.tanh, torch.sigmoid, torch.erf
floor, ceil, round, sign, square = torch.floor, torch.ceil, torch.round, torch.sign, torch.square
expm1, log1p, reciprocal, negative = torch.expm1, torch.log1p, torch.reciprocal, torch.neg
moveaxis, ones_like, zeros_like = torch.movedim, torch.ones_like, torch.zeros_like
relu, relu6, stop_gradient = F.relu, F.relu6, Tensor.detach
argmin, cumsum = torch.argmin, torch.cumsum
softmax, log_softmax = torch.softmax, torch.log_softmax
transpose, broadcast_to, stack = torch.permute, torch.broadcast_to, torch.stack
linear, matmul = F.linear, torch.matmul
mean, sum, amax, amin, reshape, where = (
    cast(Callable[..., Tensor], function)
    for function in (torch.mean, torch.sum, torch.amax, torch.amin, torch.reshape, torch.where)
)


def argmax(x: Tensor, axis: int, keep_dims: bool = False) -> Tensor:
    # As a step outside of the device calls it, by names.
    return torch.argmax(x, axis, keep_dims)


def exact_sqrt(x: Tensor) -> Tensor:
    """The square root, via float64: PyTorch's float32 square root is not always the nearest number."""
    return torch.sqrt(x.double()).to(x.dtype)


def to_float(x: Any) -> Any:
    """Whole numbers as float32; numbers, which PyTorch's operators round to their tensors' type, as they are."""
    return x.float() if isinstance(x, Tensor) else x


def array(values: ArrayLike, like: Tensor) -> Tensor:
    """NumPy values as an array with the type and on the device of another one."""
    return _constant(np.asarray(values), like.device, like.dtype)


def _constant(values: np.ndarray, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Values on a tensor's device. A copy to a GPU waits for it, and ends a CUDA graph: small ones stay there."""
    # What is created in a mode, such as that of fake tensors, belongs to it.
    in_mode = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    if device.type != "cuda" or values.nbytes > _LARGEST_KEPT or in_mode:
        return torch.as_tensor(values).to(device, dtype)
    values = np.ascontiguousarray(values)
    kept = _on_gpu(values.tobytes(), values.dtype.str, values.shape, device, dtype)
    if _IN_USE is not None:
        _IN_USE.append(kept)
    return kept


# Bytes.
_LARGEST_KEPT = 1 << 20


@lru_cache(maxsize=256)
def _on_gpu(content: bytes, kind: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.as_tensor(np.frombuffer(content, kind).reshape(shape).copy()).to(device, dtype)


_IN_USE: list[Tensor] | None = None


@contextmanager
def constants_in_use() -> Iterator[list[Tensor]]:
    """The constants on a GPU that are used within the context. A CUDA graph reads their memory: keep them to replay
    it."""
    global _IN_USE
    before, _IN_USE = _IN_USE, []
    try:
        yield _IN_USE
    finally:
        _IN_USE = before


def maximum(first: Tensor | float, second: Tensor | float) -> Tensor:
    """The larger of two arrays, or of an array and a number."""
    return torch.maximum(*_both(first, second))


def minimum(first: Tensor | float, second: Tensor | float) -> Tensor:
    """The smaller of two arrays, or of an array and a number."""
    return torch.minimum(*_both(first, second))


def clip(x: Tensor, low: float, high: float) -> Tensor:
    """Nothing below `low` or above `high`; either may be infinite."""
    return x.clamp(None if low == -math.inf else low, None if high == math.inf else high)


def straight_through(value: Tensor, gradient_of: Tensor) -> Tensor:
    """The first one's value with the second one's gradient."""
    return value.detach() + (gradient_of - gradient_of.detach())


def with_gradient_of(value: Tensor, gradient_of: Tensor) -> Tensor:
    """The same, whatever the second one's value is: infinity, as beside a padded pool, has no difference to itself."""
    # A fraction of the time of what follows, and of its gradient; a GPU would have to be waited for.
    if gradient_of.device.type == "cpu" and gradient_of.detach().sum().isfinite():
        return straight_through(value, gradient_of)
    return value.detach() + (gradient_of - gradient_of.detach()).nan_to_num(0.0)


def _both(first: Tensor | float, second: Tensor | float) -> tuple[Tensor, Tensor]:
    if not isinstance(first, Tensor):
        other = cast(Tensor, second)
        return _number(first, other), other
    if not isinstance(second, Tensor):
        return first, _number(second, first)
    return first, second


def _number(value: float, like: Tensor) -> Tensor:
    """A number for use with a tensor. Created on its device: a copy from the CPU waits for a GPU, and ends a CUDA
    graph."""
    if like.device.type == "cpu":
        return torch.as_tensor(value, dtype=like.dtype)
    return torch.full((), value, dtype=like.dtype, device=like.device)


# --- movement ---------------------------------------------------------------------------------------------------------


def concatenate(arrays: Sequence[Tensor], axis: int) -> Tensor:
    """Joined along `axis`; where others differ, sizes of 1 are repeated (a constant next to a batch)."""
    shapes = [[*tensor.shape[:axis], *tensor.shape[axis + 1 :]] for tensor in arrays]
    if any(shape != shapes[0] for shape in shapes):
        common = [max(sizes) for sizes in zip(*shapes, strict=True)]
        arrays = [tensor.expand(*common[:axis], tensor.shape[axis], *common[axis:]) for tensor in arrays]
    return torch.cat(list(arrays), axis)


def slice(x: Tensor, axis: int, start: int, stop: int, step: int = 1) -> Tensor:
    """Every `step`-th position from `start` up to, but without, `stop`."""
    return x[(builtins.slice(None),) * axis + (builtins.slice(start, stop, step),)]


def gather(x: Tensor, indices: Sequence[int] | np.ndarray, axis: int) -> Tensor:
    """The positions with these indices along an axis."""
    return x.index_select(axis, _constant(np.asarray(indices, np.int64), x.device, torch.int64))


def embedding(indices: Tensor, table: Tensor, fixed_row: int | None = None) -> Tensor:
    """Rows of a table by integers of any dtype; the fixed row gets no gradient."""
    return F.embedding(indices.long(), table, fixed_row)


def flip(x: Tensor, axes: int | Sequence[int]) -> Tensor:
    """Reversed along some axes."""
    return x.flip((axes,) if isinstance(axes, int) else tuple(axes))


def pad(x: Tensor, pairs: Pairs, value: float = 0.0) -> Tensor:
    """`value` around the array; one pair for every axis."""
    flat = _innermost_first(pairs)
    return F.pad(x, flat, value=value) if any(flat) else x


def pad_reflect(x: Tensor, pairs: Pairs, mode: str) -> Tensor:
    """The array's own values around it, from its edge outwards: "SYMMETRIC" with the edge itself, "REFLECT" without."""
    for axis, (before, after) in enumerate(pairs):
        if before or after:
            positions = np.pad(np.arange(x.shape[axis]), (before, after), mode=cast(Any, mode.lower()))
            x = gather(x, cast(Any, positions), axis)
    return x


def _innermost_first(pairs: Pairs) -> list[int]:
    """Padding in the order of `torch.nn.functional.pad`."""
    return [int(amount) for before, after in reversed(list(pairs)) for amount in (before, after)]


# --- products of matrices, convolutions, windows ----------------------------------------------------------------------


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    strides: Sequence[int],
    padding: Pairs,
    dilations: Sequence[int],
    groups: int = 1,
    channel_axis: int = 1,
) -> Tensor:
    """weight [out, in / groups, *window]; without spatial axes: x [batch, in], weight [out, in / groups]."""
    if channel_axis != 1:
        x = x.movedim(channel_axis, 1)
        return conv(x, weight, bias, strides, padding, dilations, groups, 1).movedim(1, channel_axis)
    if weight.dim() == 2:
        return conv(x[:, :, None], weight[:, :, None], bias, (1,), ((0, 0),), (1,), groups)[:, :, 0]
    pairs = [(int(before), int(after)) for before, after in padding]
    if groups == x.shape[1] > 1 and weight.dim() in (3, 4):
        return depthwise(x, weight, bias, strides, pairs, dilations)
    x, strides, amounts = arranged(x, weight, strides, pairs)
    convolve = cast(Any, _CONVOLUTIONS[len(pairs)])
    return cast(Tensor, convolve(x, weight, bias, strides, amounts, tuple(dilations), groups))


def arranged(
    x: Tensor, weight: Tensor, strides: Sequence[int], pairs: Sequence[tuple[int, int]]
) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """What PyTorch's own convolution reads, its strides, and how many zeros it adds on both sides of each axis."""
    if x.dim() == 4 and x.shape[1] == 1 and all(map(operator.le, strides, weight.shape[2:])):
        # One channel is in both layouts at once. PyTorch would treat it as channels first, and so would all layers
        # after it; kernels here want channels last. Not with longer strides, see `conv_transpose`.
        x = x[:, 0, :, :, None].movedim(-1, 1)
    if all(before == after for before, after in pairs):
        amounts = tuple(before for before, _ in pairs)
    else:
        x = F.pad(x, _innermost_first(pairs))
        amounts = (0,) * len(pairs)
    x, strides = strides_first(x, weight, strides, amounts)
    return x, strides, amounts


def depthwise(
    x: Tensor, weight: Tensor, bias: Tensor | None, strides: Sequence[int], pairs: Pairs, dilations: Sequence[int]
) -> Tensor:
    """Every channel convolved on its own, through this library's operator."""
    if weight.dim() == 3:
        image = depthwise(x[:, :, None], weight[:, :, None], bias, (1, *strides), ((0, 0), *pairs), (1, *dilations))
        return image[:, :, 0]
    x, weight, bias = as_in_autocast(x, weight, bias)
    convolved = eq.nn.depthwise_conv2d(
        channels_last_view(x),
        depthwise_filter(weight, x.shape[1]),
        strides=[1, *strides, 1],
        padding=[[0, 0], *map(list, pairs), [0, 0]],
        dilations=list(dilations),
    )
    if bias is not None:
        # A compiler must not see `is_plain`.
        transformed = torch.compiler.is_compiling() or forward_ad._current_level >= 0
        in_place = not transformed and convolved.dtype == bias.dtype and is_plain(convolved) and is_plain(bias)
        convolved = cast(Tensor, _AddedInPlace.apply(convolved, bias)) if in_place else convolved + bias
    return channels_first_view(convolved)


def depthwise_filter(weight: Tensor, channels: int) -> Tensor:
    """A weight [channels * multiplier, 1, height, width] as the operator takes it, [height, width, channels,
    multiplier]."""
    multiplier = weight.shape[0] // channels
    return weight.permute(2, 3, 1, 0).reshape(*weight.shape[2:], channels, multiplier).contiguous()


class _AddedInPlace(torch.autograd.Function):
    """Sums and a bias along their last axis, in the memory of the sums, which nothing else reads: new memory costs more
    than the addition."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, bias: Tensor) -> Tensor:
        return sums.detach().add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient, gradient.sum(tuple(range(gradient.dim() - 1))) if ctx.needs_input_grad[1] else None


def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    strides: Sequence[int],
    padding: Pairs,
    output_padding: Sequence[int],
    dilations: Sequence[int],
    groups: int = 1,
    channel_axis: int = 1,
) -> Tensor:
    """weight [in, out / groups, *window]; padding: what is cropped from the result before and after."""
    if channel_axis != 1:
        x = x.movedim(channel_axis, 1)
        moved = conv_transpose(x, weight, bias, strides, padding, output_padding, dilations, groups, 1)
        return moved.movedim(1, channel_axis)
    pairs = [(int(before), int(after)) for before, after in padding]
    extra = tuple(output_padding)
    if weight.shape[1] == 1 and any(stride > size for stride, size in zip(strides, weight.shape[2:], strict=True)):
        # With channels last, oneDNN's gradient of `x` reads or writes past the rows (PyTorch 2.13, AVX-512; seen with a
        # window of 1 x 2 or wider and strides of 3 rows or more): the process crashes.
        x, weight = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (x, weight))
    convolve = cast(Any, _TRANSPOSED[len(pairs)])
    if all(before == after for before, after in pairs):
        amounts = tuple(before for before, _ in pairs)
        return cast(Tensor, convolve(x, weight, bias, tuple(strides), amounts, extra, groups, tuple(dilations)))
    whole = convolve(x, weight, bias, tuple(strides), 0, extra, groups, tuple(dilations))
    for axis, (before, after) in enumerate(pairs, 2):
        whole = whole.narrow(axis, before, whole.shape[axis] - before - after)
    return cast(Tensor, whole)


def max_pool(x: Tensor, window: Sequence[int], strides: Sequence[int], padding: Pairs, channel_axis: int = 1) -> Tensor:
    """The largest value of every window; padding is below all values."""
    image, restore = _image(x, padding, channel_axis, -math.inf)
    return restore(F.max_pool2d(image, _two(window, 1), _two(strides, 1)))


def sum_pool(x: Tensor, window: Sequence[int], strides: Sequence[int], padding: Pairs, channel_axis: int = 1) -> Tensor:
    """The sum of every window; padding is 0."""
    image, restore = _image(x, padding, channel_axis, 0.0)
    return restore(F.avg_pool2d(image, _two(window, 1), _two(strides, 1), divisor_override=1))


def _two(entries: Sequence[Any], missing: Any) -> tuple[Any, ...]:
    """One entry for the rows and one for the columns."""
    return (*[missing] * (2 - len(entries)), *entries)


def _image(x: Tensor, padding: Pairs, channel_axis: int, value: float) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """As [batch, channels, height, width] with `value` around it, and the way back."""
    moved = x if channel_axis == 1 else x.movedim(channel_axis, 1)
    flat = moved.dim() == 3

    def restore(result: Tensor) -> Tensor:
        result = result[:, :, 0] if flat else result
        return result if channel_axis == 1 else result.movedim(1, channel_axis)

    return pad(moved[:, :, None] if flat else moved, _two(padding, (0, 0)), value), restore


def unwrapped(tensor: Tensor) -> Tensor:
    """Transforms such as torch.func.grad wrap tensors in others that have no memory."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def whole(x: Tensor) -> Tensor:
    """A tensor with all of its values: one that ``fully_shard`` has divided among processes is brought together."""
    return cast(Any, x).full_tensor() if hasattr(x, "full_tensor") else x


def to_numpy(x: Tensor) -> np.ndarray:
    """A tensor's values without gradients, also those of one that `torch.func` has wrapped."""
    x = unwrapped(x)
    with torch._C._DisableFuncTorch():
        x = x.detach().cpu()
        # Among processes `fully_shard` may free a parameter's memory, which it cannot once NumPy has it.
        return (x.clone() if dist.is_available() and dist.is_initialized() else x).numpy()


# --- training ---------------------------------------------------------------------------------------------------------

fake_quantize = core.fake_quantize


def rounded_sums(
    sums: Tensor, scale: Tensor, grid: Tensor, rounding: str, exact: Tensor, otherwise: Callable[[], Tensor]
) -> Tensor:
    """Sums of whole numbers, channels last, as a device rounds them, with the gradient of what is rounded; grid: on the
    CPU."""
    steps = _round_sums(sums, scale, grid, rounding=rounding) if sums.is_cpu else _rounded(sums, scale, grid, rounding)
    return cast(Tensor, steps) if exact else straight_through(otherwise(), steps)


def _rounded(sums: Tensor, scale: Tensor, grid: Tensor, rounding: str) -> Tensor:
    """On a GPU, for which the operator has no kernel; other roundings than float32's go by way of the CPU."""
    input_scale, result_scale, lowest, highest, low, high = grid.tolist()
    # Not a division by a number, which GPUs replace with multiplication by its inverse.
    scaled = sums * ((scale * input_scale) / torch.full_like(scale, result_scale))
    with torch.no_grad():
        if rounding == "float32":
            steps = scaled.round().clamp_(lowest, highest)
        else:
            steps = _round_sums(sums.cpu(), scale.cpu(), grid, rounding=rounding).to(sums.device)
    return straight_through(steps, F.hardtanh(scaled, low, high))
