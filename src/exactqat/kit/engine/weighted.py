# SPDX-License-Identifier: Apache-2.0
"""Operators with constant weights: convolutions and fully connected layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..device import Tensor
from ..device.arithmetic import bounds, fixed_point, reduced, same_padding, scale_of, zero_point_of
from ..device.operator import Attributes, DeviceOperator
from ..device.profile import Profile
from ..device.weighted import Weighted, has_short_bias, real_multiplier
from .forms import RESULT, Form, KernelCall, Part, Tensors, form_of, in_one_dtype, may_use_dot_products, run

# From integer_rounding.h: the columns to pad to, those of a panel, and the numbers of roundings.
COLUMNS, PANEL = 64, 16
STEPS = {"float32": 0, "fixed_point": 1, "float64": 2, "wide": 3}
# Limit for a depthwise convolution of int16, whose sums have 32 bits.
MOST_WIDE_TAPS = 2 * 248


def padded(size: int, of: int) -> int:
    """The next multiple."""
    return -(-size // of) * of


def rounding(declaration: Weighted, output: Tensor, profile: Profile) -> str:
    """A name in `device.weighted.ROUNDINGS`, or "wide": `arithmetic.multiply_wide`."""
    if output.dtype == "int8":
        return declaration.rounding(profile)
    in_float64 = declaration.kind == "FULLY_CONNECTED" and profile.fully_connected_in_float64
    return "float64" if in_float64 else "wide"


def factors(rounding: str, inputs: Tensors, output: Tensor) -> np.ndarray:
    """What sums are multiplied by, [channels]; for fixed_point and wide [2, channels]."""
    if rounding == "float32":
        input_scale, filter_scale = (tensor.quantization.scale for tensor in inputs[:2])
        return np.broadcast_to(input_scale * filter_scale / scale_of(output), inputs[2].shape)
    multiplier = real_multiplier(inputs, output)
    if rounding == "float64":
        return multiplier
    significand, exponent = fixed_point(multiplier)
    if rounding == "wide":
        return np.stack([reduced(significand), 15 - exponent]).astype(np.int64)
    return np.stack([significand, exponent]).astype(np.int32)


def in_groups(values: np.ndarray, groups: int) -> np.ndarray:
    """Values [..., channels] as [groups, ..., channels of a group and zeros up to COLUMNS]."""
    columns = values.shape[-1] // groups
    split = np.moveaxis(values.reshape(*values.shape[:-1], groups, columns), -2, 0)
    return np.ascontiguousarray(np.pad(split, [(0, 0)] * (split.ndim - 1) + [(0, padded(columns, COLUMNS) - columns)]))


def rounding_numbers(
    declaration: Weighted, output: Tensor, attributes: Attributes, profile: Profile
) -> dict[str, int | float]:
    """How kernels store sums, by the names of integer_rounding.h."""
    lowest, highest = bounds(output, attributes, profile)
    steps = STEPS[rounding(declaration, output, profile)]
    return {"steps": steps, "zero_point": zero_point_of(output), "lowest": lowest, "highest": highest}


def shifted_bias(filter: np.ndarray, bias: np.ndarray, zero_point: int) -> np.ndarray:
    """int32 [channels]: the bias for sums of codes without the zero point subtracted; filter [channels, ...]."""
    sums = filter.reshape(len(filter), -1).sum(1, dtype=np.int64)
    return np.asarray((bias.astype(np.int64) - zero_point * sums).astype(np.int32))


def serves(inputs: Tensors, output: Tensor) -> bool:
    """An activation and a result of one dtype, int8 weights and a bias, both constant. 16-bit weights, which no file
    has, are left to the declarations."""
    constant = inputs[1].data is not None and inputs[2].data is not None
    plain = constant and inputs[1].dtype == "int8" and not has_short_bias(inputs)
    return plain and in_one_dtype(inputs[:1], output)


def packed(filter: np.ndarray, bias: np.ndarray, groups: int, dot: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights [channels, depth] and what is added to their sums [channels], in the form products take.

    dot: whether codes are multiplied four at a time, where the processor can.
    """
    columns, depth = len(filter) // groups, filter.shape[1]
    weights = np.empty((groups, padded(depth, 4) * padded(columns, PANEL) * 2), np.uint8)
    added = np.empty((groups, padded(columns, COLUMNS)), np.int32)
    operands = [filter.reshape(groups, columns, depth), bias.reshape(groups, columns)]
    run("integer_pack", [np.ascontiguousarray(operand) for operand in operands], [weights, added], dot=dot)
    return weights, added


def window_numbers(window: tuple[int, int], image: tuple[int, ...], attributes: Attributes) -> dict[str, int | float]:
    """A sliding window of an image [batch, height, width, channels], by the kernels' names."""
    strides, dilations = (tuple(attributes.get(name, (1, 1))) for name in ("strides", "dilations"))
    before = [0, 0]
    if attributes.get("padding") == "SAME":
        axes = zip(image[1:3], window, strides, dilations, strict=True)
        before = [same_padding(*axis)[0] for axis in axes]
    pairs = {"window": window, "stride": strides, "dilation": dilations}
    numbers: dict[str, int | float] = {
        f"{name}_{axis}": int(size) for name, pair in pairs.items() for axis, size in zip("yx", pair, strict=True)
    }
    return {**numbers, "top": int(before[0]), "left": int(before[1])}


def product(
    declaration: Any,
    inputs: Tensors,
    output: Tensor,
    attributes: Attributes,
    profile: Profile,
    filter: np.ndarray,
    image: tuple[int, ...],
    result: tuple[int, ...],
    numbers: dict[str, int | float],
    groups: int = 1,
) -> KernelCall:
    """A convolution: filter [channels, height, width, size], image and result [-1, height, width, channels]."""
    assert inputs[2].data is not None
    zero_point, bias = zero_point_of(inputs[0]), inputs[2].data
    codes = filter.reshape(len(filter), int(np.prod(filter.shape[1:])))
    if output.dtype == "int16":
        weights, _ = packed(codes, np.zeros(len(codes), np.int32), groups, dot=0)
        added = in_groups(bias.astype(np.int64), groups)
    else:
        weights, added = packed(codes, shifted_bias(codes, bias, zero_point), groups, may_use_dot_products())
    places = {"first_y": 0, "first_x": 0, "step_y": 1, "step_x": 1, "lines": result[1], "places": result[2]}
    return KernelCall(
        "integer_conv_2d",
        (
            Part(0, image),
            weights,
            added,
            in_groups(factors(rounding(declaration, output, profile), inputs, output), groups),
        ),
        Part(RESULT, result),
        {
            **rounding_numbers(declaration, output, attributes, profile),
            **places,
            "groups": groups,
            "fill": zero_point,
            "dot": may_use_dot_products(),
            **numbers,
        },
    )


@form_of("CONV_2D")
def conv_2d(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """One product of gathered windows."""
    filter = inputs[1].data
    if not serves(inputs, output) or filter is None:
        return None
    image, result = (-1, *inputs[0].shape[1:]), (-1, *output.shape[1:])
    numbers = window_numbers(filter.shape[1:3], inputs[0].shape, attributes)
    groups = inputs[0].shape[3] // filter.shape[3]
    return (
        product(declaration, inputs, output, attributes, profile, filter, image, result, numbers, groups),
    )  # fmt: skip


@form_of("FULLY_CONNECTED")
def fully_connected(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """The product itself."""
    filter = inputs[1].data
    if not serves(inputs, output) or filter is None:
        return None
    shapes = [(-1, 1, 1, size) for size in filter.shape[::-1]]
    numbers = window_numbers((1, 1), (1, 1, 1, 1), {})
    filter = filter[:, None, None]
    return (product(declaration, inputs, output, attributes, profile, filter, shapes[0], shapes[1], numbers),)


@form_of("TRANSPOSE_CONV")
def transpose_conv(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """One convolution for each position between strides, with the taps that meet it, in reverse direction.

    Position y of the result and tap i meet line (y + cut - i) / stride, if that is a whole number.
    """
    filter = inputs[1].data
    if not serves(inputs, output) or filter is None:
        return None
    image, result = (-1, *inputs[0].shape[1:]), (-1, *output.shape[1:])
    phases: list[list[tuple[np.ndarray, dict[str, int | float]]]] = []
    sizes = zip("yx", inputs[0].shape[1:3], output.shape[1:3], filter.shape[1:3], attributes["strides"], strict=True)
    for axis, size, wanted, window, stride in sizes:
        cut = max((size - 1) * stride + window - wanted, 0) // 2
        axis_phases = []
        for first in range(min(stride, wanted)):
            taps = np.arange((first + cut) % stride, window, stride)[::-1]
            count = -(-(wanted - first) // stride)
            before = 0 if not len(taps) else -(first + cut - int(taps[0])) // stride
            numbers: dict[str, int | float] = {
                f"window_{axis}": len(taps),
                f"first_{axis}": first,
                f"step_{axis}": stride,
                f"stride_{axis}": 1,
                f"dilation_{axis}": 1,
                "top" if axis == "y" else "left": before,
                "lines" if axis == "y" else "places": count,
            }
            axis_phases.append((taps, numbers))
        phases.append(axis_phases)
    return tuple(
        product(
            declaration,
            inputs,
            output,
            attributes,
            profile,
            np.ascontiguousarray(filter[:, rows][:, :, columns]),
            image,
            result,
            {**down, **right},
        )
        for rows, down in phases[0]
        for columns, right in phases[1]
    )


@form_of("DEPTHWISE_CONV_2D")
def depthwise_conv_2d(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """A sum over taps for each channel."""
    assert isinstance(declaration, Weighted)
    filter, bias = inputs[1].data, inputs[2].data
    if not serves(inputs, output) or filter is None or bias is None:
        return None
    is_int16, channels = output.dtype == "int16", filter.shape[3]
    taps = np.ascontiguousarray(filter.reshape(-1, channels))
    if is_int16 and len(taps) > MOST_WIDE_TAPS:
        return None
    columns = padded(channels, COLUMNS)
    weights = np.empty(2 * padded(len(taps), 2) * columns, np.uint8)
    added = np.empty(columns, np.int32)
    zero_point = zero_point_of(inputs[0])
    own = np.zeros(channels, np.int32) if is_int16 else shifted_bias(np.ascontiguousarray(taps.T), bias, zero_point)
    run("integer_depthwise_pack", [taps, own], [weights, added])
    scales = in_groups(factors(rounding(declaration, output, profile), inputs, output), 1)[0]
    constants = [weights, added, scales, *([in_groups(bias.astype(np.int64), 1)[0]] if is_int16 else [])]
    call = KernelCall(
        "integer_depthwise_conv_2d",
        (Part(0, (-1, *inputs[0].shape[1:])), *constants),
        Part(RESULT, (-1, *output.shape[1:])),
        {
            **rounding_numbers(declaration, output, attributes, profile),
            **window_numbers(filter.shape[1:3], inputs[0].shape, attributes),
            "fill": zero_point,
        },
    )
    return (call,)
