# SPDX-License-Identifier: Apache-2.0
"""Integer arithmetic that several operators share: fixed-point multipliers, roundings, sliding windows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .operator import Attributes, Call, DeviceOperator, Refusal, Shape, need
from .primitives import A, RealPrimitives
from .profile import Profile
from .stated_arithmetic import Arithmetic
from .tensor import Tensor, code_range

Arrays = Sequence[np.ndarray]
Tensors = Sequence[Tensor]


def finish(steps: np.ndarray, output: Tensor, attributes: Attributes, profile: Profile) -> np.ndarray:
    """Adds the zero point and applies the fused activation and the dtype's saturation."""
    lowest, highest = bounds(output, attributes, profile)
    return np.clip(steps + zero_point_of(output), lowest, highest).astype(output.dtype)


def stated_codes(call: Call, arithmetic: Arithmetic, whole: np.ndarray, count: int = 1) -> np.ndarray:
    """Codes from whole numbers in the product of the operands' scales, divided by a count, as a device states it."""
    factor = arithmetic.factor([scale_of(tensor) for tensor in call.inputs], scale_of(call.output), count)
    steps = arithmetic.rescale(whole, factor, zero_point_of(call.output))
    return finish(steps, call.output, call.attributes, call.profile)


def bounds(output: Tensor, attributes: Attributes, profile: Profile) -> tuple[int, int]:
    """The lowest and highest code that the fused activation and the dtype let through."""
    zero_point, scale = zero_point_of(output), scale_of(output)
    if profile.arithmetic is not None:
        scale = np.float32(profile.arithmetic.scale(scale))
    lowest, highest = code_range(output)
    if attributes.get("activation", "NONE") != "NONE":
        lowest = max(lowest, zero_point)
    if attributes.get("activation") == "RELU6":
        steps_of_six = np.float32(6) / scale
        if profile.scales_sums_in_float32 and output.dtype == "int8":  # rounds to even after adding the zero point
            shifted = profile.unsigned and not profile.rounds_as_onnx
            above = 128 if shifted else 0  # by what the codes lie above a graph's
            highest = min(highest, int(np.rint(steps_of_six + np.float32(zero_point + above))) - above)
        else:
            highest = min(highest, zero_point + int(round_half_away(steps_of_six)))
    return lowest, highest


def round_half_away(x: Any) -> Any:
    """Rounded to the nearest integer, ties away from zero, as C's round.

    Not by adding a half: of the largest number below it, the sum would be rounded to 1.
    """
    whole = np.trunc(x)
    with np.errstate(invalid="ignore"):  # infinity less itself
        away = np.abs(x - whole) >= 0.5
    return whole + np.copysign(np.asarray(away, whole.dtype), x)


def fixed_point(multiplier: Any) -> tuple[np.ndarray, np.ndarray]:
    """(significand in Q31, exponent) of real multipliers: TensorFlow Lite's QuantizeMultiplier."""
    fraction, exponent = np.frexp(np.asarray(multiplier, np.float64))
    significand = round_half_away(fraction * 2.0**31).astype(np.int64)
    carry = significand == 2**31
    significand, exponent = np.where(carry, 2**30, significand), np.where(carry, exponent + 1, exponent)
    return np.where(exponent < -31, 0, significand), np.where(exponent < -31, 0, exponent)


def multiply_fixed_point(accumulator: np.ndarray, significand: Any, exponent: Any) -> np.ndarray:
    """TensorFlow Lite's MultiplyByQuantizedMultiplier: doubling high multiply with rounding, then a rounding shift."""
    # The kernels shift left in int32 and wrap, which matters for multipliers of 1 and more only.
    exponent = np.asarray(exponent)
    left = accumulator << np.maximum(exponent, 0) if np.any(exponent > 0) else accumulator
    # Their nudge of 2**30, or 1 - 2**30 with division towards zero, comes down to rounding half up.
    high = np.multiply(left.astype(np.int32), significand, dtype=np.int64) + 2**30
    return rounding_shift(high >> 31, np.maximum(-exponent, 0))


def multiply_half_up(accumulator: np.ndarray, significand: Any, exponent: Any) -> np.ndarray:
    """As `multiply_fixed_point`, but the shift rounds halves up."""
    exponent = np.asarray(exponent)
    left = (accumulator << np.maximum(exponent, 0)).astype(np.int32)
    high = (np.multiply(left, significand, dtype=np.int64) + 2**30) >> 31
    shift = np.maximum(-exponent, 0)
    return (high + ((np.int64(1) << shift) >> 1)) >> shift


def rounding_shift(x: np.ndarray, shift: Any) -> np.ndarray:
    """x / 2**shift, rounded half away from zero."""
    half = (np.int64(1) << shift) >> 1
    return (x + half - ((x < 0) & (half > 0))) >> shift


def multiply_wide(accumulator: np.ndarray, significand: object, exponent: object) -> np.ndarray:
    """MultiplyByQuantizedMultiplier of 64-bit sums, as all kernels with int16 activations have it.

    The multiplier keeps 15 bits of its significand; the product is rounded once, half up.
    """
    shift = 15 - np.asarray(exponent)
    return (accumulator * reduced(significand) + (np.int64(1) << (shift - 1))) >> shift


def reduced(significand: Any) -> np.ndarray:
    """The 15 bits that are kept of a significand in Q31."""
    significand = np.asarray(significand)
    return np.where(significand < 0x7FFF0000, (significand + (1 << 15)) >> 16, 0x7FFF)


def multiply_round_half_up(product: np.ndarray, factor: np.floating) -> np.ndarray:
    """product times a float32 factor, exactly, rounded once, half up: XNNPACK's `rndnu` on ARM."""
    fraction, exponent = np.frexp(np.float64(factor))
    significand, shift = int(fraction * 2**24), 24 - int(exponent)
    return (product * significand + (1 << (shift - 1))) >> shift


def fused_multiply_add(a: object, b: object, c: object) -> np.ndarray:
    """float32 a * b + c, rounded once."""
    a, b, c = (np.asarray(value, np.float32).astype(np.float64) for value in (a, b, c))
    product = a * b  # exact: 24 + 24 bits
    total = np.atleast_1d(product + c)
    # The error of the float64 sum decides its last bit (round to odd), so that rounding to float32 is the only one.
    part = total - product
    error = np.broadcast_to((product - (total - part)) + (c - part), total.shape)
    bits = total.view(np.int64).copy()
    odd = (error != 0) & (bits & 1 == 0)
    bits += np.where(odd, np.where((error > 0) == (total > 0), 1, -1), 0)
    return bits.view(np.float64).reshape(np.shape(product + c)).astype(np.float32)


def centered(codes: np.ndarray, tensor: Tensor) -> np.ndarray:
    """int64 steps from real 0."""
    return codes.astype(np.int64) - tensor.quantization.zero_point[0]


def scale_of(tensor: Tensor) -> np.float32:
    """The scale of a tensor that has one."""
    return np.float32(tensor.quantization.scale[0])


def scales_for(profile: Profile, *tensors: Tensor) -> list[np.floating]:
    """The scales of tensors that have one, in the dtype in which a device's kernels multiply and divide them.

    It decides results where a quotient of float32 is a short fraction, which ties, and the scales' own is not: of 1/128
    and 0.1, for example.
    """
    return [profile.multiplier_dtype(scale_of(tensor)) for tensor in tensors]


def checked_log2(scale: np.floating) -> int | None:
    """log2 of a scale that is a power of two, or nearer than 1 / 1000 (LiteRT's CheckedLog2); else None."""
    # The kernels' float32 decides where a scale is about that near.
    log2 = np.float32(np.log(np.float64(scale))) * (np.float32(1) / np.float32(np.log(2)))
    return round(log2) if abs(log2 - np.rint(log2)) < np.float32(1e-3) else None


def zero_point_of(tensor: Tensor) -> int:
    """The zero point of a tensor that has one."""
    return int(tensor.quantization.zero_point[0])


def same_padding(size: int, filter_size: int, stride: int, dilation: int = 1) -> tuple[int, int]:
    """(before, after) zero padding of TensorFlow's SAME along one axis."""
    total = max((-(-size // stride) - 1) * stride + (filter_size - 1) * dilation + 1 - size, 0)
    return total // 2, total - total // 2


def window_shape(input_shape: Shape, filter_size: Sequence[int], attributes: Attributes) -> Shape:
    """[batch, height, width] of what a sliding window gives."""
    sizes = []
    dilations = attributes.get("dilations", (1, 1))
    for size, window, stride, dilation in zip(
        input_shape[1:3], filter_size, attributes["strides"], dilations, strict=True
    ):
        reach = (window - 1) * dilation + 1
        if attributes["padding"] == "VALID":
            need(size >= reach, f"a window of {reach} does not fit into {size} with VALID padding")
            sizes.append((size - reach) // stride + 1)
        else:
            sizes.append(-(-size // stride))
    return (input_shape[0], *sizes)


def padded_for_window(x: np.ndarray, filter_size: Sequence[int], attributes: Attributes, fill: float) -> np.ndarray:
    """[batch, height, width, channels] with what SAME puts around it."""
    if attributes["padding"] != "SAME":
        return x
    dilations = attributes.get("dilations", (1, 1))
    axes = zip(x.shape[1:3], filter_size, attributes["strides"], dilations, strict=True)
    pads = [same_padding(*axis) for axis in axes]
    return np.pad(x, [(0, 0), *pads, (0, 0)], constant_values=fill) if np.any(pads) else x


def windows(
    x: np.ndarray, output: Tensor, filter_size: Sequence[int], attributes: Attributes, fill: float
) -> Iterator[tuple[int, int, np.ndarray]]:
    """For every tap (i, j) of a sliding window the values [batch, out height, out width, channels] it meets."""
    strides, dilations = attributes["strides"], attributes.get("dilations", (1, 1))
    x = padded_for_window(x, filter_size, attributes, fill)
    height, width = output.shape[1:3]
    for i in range(filter_size[0]):
        for j in range(filter_size[1]):
            top, left = i * dilations[0], j * dilations[1]
            rows = slice(top, top + (height - 1) * strides[0] + 1, strides[0])
            columns = slice(left, left + (width - 1) * strides[1] + 1, strides[1])
            yield i, j, x[:, rows, columns]


def windows_of(x: np.ndarray, filter_size: Sequence[int], attributes: Attributes, fill: int) -> np.ndarray:
    """A view [batch, out height, out width, window height, window width, channels] of what every window meets."""
    (height, width), (down, right) = filter_size, attributes["strides"]
    between, beside = attributes.get("dilations", (1, 1))
    x = padded_for_window(x, filter_size, attributes, fill)
    reach = ((height - 1) * between + 1, (width - 1) * beside + 1)
    met = np.lib.stride_tricks.sliding_window_view(x, reach, (1, 2))
    return met[:, ::down, ::right, :, ::between, ::beside].transpose(0, 1, 2, 4, 5, 3)


def broadcast_shape(shapes: Sequence[Shape]) -> Shape:
    """The shape to which all broadcast, as NumPy does it."""
    try:
        return tuple(np.broadcast_shapes(*shapes))
    except ValueError:
        raise Refusal(f"operands must broadcast to one shape, got {' and '.join(map(str, shapes))}") from None


def need_rows(inputs: Tensors, output: Tensor) -> None:
    """Refuses what would broadcast along the batch."""
    rank, rows = len(output.shape), output.shape[0]
    for tensor in inputs:
        if tensor.data is None:
            # Of an axis that is missing, or 1 here, the runtime would make the batch something else.
            fits = len(tensor.shape) == rank and tensor.shape[0] == rows
            need(fits, f"{tensor.name!r} {tensor.shape} must have rank {rank} and {rows} rows, as the result has")
        else:
            fits = len(tensor.shape) < rank or tensor.shape[0] == 1
            need(fits, f"{tensor.name!r} {tensor.shape} is a constant, which cannot differ along the batch")


class Broadcasting(DeviceOperator):
    """Operands that broadcast, but not along the batch; constants of the same or a lower rank among them."""

    constants = True

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        return broadcast_shape(shapes)

    def check(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> None:
        need_rows(inputs, output)
        super().check(inputs, output, attributes)


def divides_plainly(inputs: Tensors) -> bool:
    """Whether integers without a grid may be divided by what ends the process (see `need_quotients`)."""
    divisor = inputs[1]
    return divisor.dtype in ("int32", "int64") and (divisor.data is None or bool(np.isin(divisor.data, (0, -1)).any()))


def need_quotients(dividend: np.ndarray, divisor: np.ndarray) -> None:
    """Refuses divisions of integers that processors do not survive."""
    need(bool(np.all(divisor != 0)), "a division by 0, which runtimes do not define")
    beyond = (dividend == np.iinfo(dividend.dtype).min) & (divisor == -1)
    need(not np.any(beyond), "a division of the lowest integer by -1, which ends the process")


def activate(primitives: RealPrimitives[A], x: A, attributes: Attributes) -> A:
    """The fused activation in real numbers."""
    activation = attributes.get("activation", "NONE")
    if activation == "NONE":
        return x
    return primitives.clip(x, 0.0, 6.0 if activation == "RELU6" else math.inf)
