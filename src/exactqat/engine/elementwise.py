# SPDX-License-Identifier: Apache-2.0
"""Operators of codes that multiply no matrices: tables, pairs of tensors, windows, reductions."""

from __future__ import annotations

import math

import numpy as np

from ..device import Tensor
from ..device.arithmetic import (
    bounds,
    centered,
    fixed_point,
    fused_multiply_add,
    multiply_fixed_point,
    scale_of,
    zero_point_of,
)
from ..device.elementwise import Add
from ..device.operator import Attributes, DeviceOperator
from ..device.profile import REFERENCE, Profile
from ..device.tensor import INT8_MAX, INT8_MIN
from .forms import RESULT, Form, KernelCall, Part, Tensors, fallback_form, form_of, is_int8
from .weighted import window_numbers

CODES = np.arange(INT8_MIN, INT8_MAX + 1).astype(np.int8)

Numbers = dict[str, int | float]


def part(position: int, tensor: Tensor) -> Part:
    """A tensor as it is, of any number of examples where it is an activation."""
    return Part(position, (-1, *tensor.shape[1:]) if tensor.data is None else tensor.shape)


def clamp_numbers(output: Tensor, attributes: Attributes, profile: Profile) -> Numbers:
    """Zero point and bounds of the result."""
    lowest, highest = bounds(output, attributes, profile)
    return {"zero_point": zero_point_of(output), "lowest": int(lowest), "highest": int(highest)}


def fixed_point_numbers(multiplier: float | np.floating) -> Numbers:
    """A multiplier in Q31 and its exponent."""
    significand, exponent = fixed_point(multiplier)
    return {"significand": int(significand), "exponent": int(exponent)}


def pair(kernel: str, inputs: Tensors, output: Tensor, numbers: Numbers, *constants: np.ndarray) -> Form:
    """One kernel of two operands that broadcast."""
    operands = [part(position, tensor) for position, tensor in enumerate(inputs)]
    return (KernelCall(kernel, (*operands, *constants), part(RESULT, output), numbers),)


@fallback_form
def table(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """What the declaration makes of all codes."""
    by_value = declaration.pointwise and declaration.operands == (1, 1)
    if not by_value or not is_int8(inputs, output) or inputs[0].data is not None:
        return None
    return looked_up(declaration, inputs, output, attributes, profile)


@form_of("HARD_SWISH")
def hard_swish(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """A table, unless it matters which values share a vector."""
    if profile.vectors_of_eight or not is_int8(inputs, output):
        return None
    return looked_up(declaration, inputs, output, attributes, profile)


def looked_up(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form:
    """A table of 256 results."""
    results = np.ascontiguousarray(declaration.results([CODES], inputs, output, attributes, profile))
    return (KernelCall("integer_table", (part(0, inputs[0]), results), part(RESULT, output)),)


@form_of("ADD")
@form_of("SUB")
def add(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """Both operands times a whole number each, or the value of each code."""
    assert isinstance(declaration, Add)
    if not is_int8(inputs, output):
        return None
    scales = [scale_of(tensor) for tensor in inputs]
    ratios = [float(scale / scale_of(output)) for scale in scales]
    if profile.delegates and min(ratios) >= 2**-10:
        shift = 21 - int(np.frexp(max(ratios))[1])
        multipliers = [int(np.rint(np.ldexp(ratio, shift))) for ratio in ratios]
        multipliers[1] *= declaration.sign
        shifts = sum(m * zero_point_of(tensor) for m, tensor in zip(multipliers, inputs, strict=True))
        numbers = {**clamp_numbers(output, attributes, profile), "first": multipliers[0], "second": multipliers[1]}
        return pair(
            "integer_add_shifted", inputs, output, {**numbers, "added": (1 << (shift - 1)) - shifts, "shift": shift}
        )
    twice_larger = 2 * float(max(scales))
    terms = [
        multiply_fixed_point(centered(CODES, tensor) << 20, *fixed_point(float(scale) / twice_larger))
        for tensor, scale in zip(inputs, scales, strict=True)
    ]
    terms[1] = declaration.sign * terms[1]
    numbers = {
        **clamp_numbers(output, attributes, REFERENCE),
        **fixed_point_numbers(twice_larger / (2**20 * float(scale_of(output)))),
    }
    return pair("integer_add_terms", inputs, output, {**numbers, "squared": 0}, np.stack(terms).astype(np.int32))


@form_of("SQUARED_DIFFERENCE")
def squared_difference(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """By the value of each code."""
    if not is_int8(inputs, output):
        return None
    scales = [float(scale_of(tensor)) for tensor in inputs]
    twice_larger = 2 * max(scales)
    terms = [
        multiply_fixed_point(centered(CODES, tensor) << 7, *fixed_point(scale / twice_larger))
        for tensor, scale in zip(inputs, scales, strict=True)
    ]
    multiplier = (twice_larger * twice_larger) / ((1 << 14) * float(scale_of(output)))
    numbers = {**clamp_numbers(output, attributes, REFERENCE), **fixed_point_numbers(multiplier), "squared": 1}
    return pair("integer_add_terms", inputs, output, numbers, np.stack(terms).astype(np.int32))


@form_of("MUL")
def multiply(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """Products of whole numbers, rounded as the device does."""
    if not is_int8(inputs, output):
        return None
    first, second, result = (scale_of(tensor) for tensor in (*inputs, output))
    factor = first * second / result
    numbers: Numbers = {
        **clamp_numbers(output, attributes, profile),
        "first_zero_point": zero_point_of(inputs[0]),
        "second_zero_point": zero_point_of(inputs[1]),
        "factor": float(factor),
    }
    if not profile.delegates:
        first, second, result = (profile.multiplier_dtype(scale_of(tensor)) for tensor in (*inputs, output))
        numbers |= {"steps": 1, **fixed_point_numbers(first * second / result)}
    elif profile.rounds_products_half_up:
        fraction, exponent = np.frexp(np.float64(factor))
        numbers |= {"steps": 2, "significand": int(fraction * 2**24), "exponent": 24 - int(exponent)}
    else:
        numbers |= {"steps": 0, "significand": 0, "exponent": 0}
    return pair("integer_multiply", inputs, output, numbers)


@form_of("MAXIMUM")
@form_of("MINIMUM")
def extreme(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """One of both codes."""
    if not is_int8(inputs, output):
        return None
    return pair("integer_extreme", inputs, output, {"largest": int(declaration.kind == "MAXIMUM")})


@form_of("AVERAGE_POOL_2D")
@form_of("MAX_POOL_2D")
def pool(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """Over every window."""
    if not is_int8(inputs, output):
        return None
    numbers = window_numbers(attributes["filter_size"], inputs[0].shape, attributes)
    clamp = clamp_numbers(output, attributes, profile)
    largest = int(declaration.kind == "MAX_POOL_2D")
    call = KernelCall(
        "integer_pool", (part(0, inputs[0]),), part(RESULT, output), {**numbers, **clamp, "largest": largest}
    )
    return (call,)


@form_of("MEAN")
@form_of("SUM")
def reduction(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """Over axes that follow each other."""
    shape, axes = inputs[0].shape, sorted(attributes["axes"])
    mean = declaration.kind == "MEAN"
    if not is_int8(inputs, output) or axes != list(range(axes[0], axes[-1] + 1)):
        return None
    if profile.sums_as_unsigned and not mean:
        return None
    count, inner = math.prod(shape[axis] for axis in axes), math.prod(shape[axes[-1] + 1 :])
    numbers: Numbers = clamp_numbers(output, attributes, profile)
    numbers |= {"significand": 0, "exponent": 0, "offset": 0, "factor": 0.0, "added": 0.0}
    ratio = scale_of(inputs[0]) / scale_of(output)
    if profile.delegates:
        factor = ratio * (np.float32(1) / np.float32(count)) if mean else ratio
        input_zero_point, zero_point = (np.float32(zero_point_of(tensor)) for tensor in (inputs[0], output))
        offset = -(input_zero_point * np.float32(count))
        fused = profile.fuses_multiply_add
        added = fused_multiply_add(offset, factor, zero_point) if fused else zero_point + offset * factor
        numbers |= {"steps": 2 if fused else 0, "factor": float(factor), "added": float(added)}
        numbers |= {"lowest": INT8_MIN, "highest": INT8_MAX}
    else:
        significand, exponent = map(int, fixed_point(float(scale_of(inputs[0])) / float(scale_of(output))))
        if mean:
            shift = min(count.bit_length() - 1, 31 + exponent)
            significand, exponent = (significand << shift) // count, exponent - shift
        numbers |= {"steps": 1, "significand": significand, "exponent": exponent}
        numbers["offset"] = zero_point_of(inputs[0]) * count
    return (KernelCall("integer_sum", (Part(0, (-1, count, inner)),), Part(RESULT, (-1, inner)), numbers),)
