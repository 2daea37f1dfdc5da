# SPDX-License-Identifier: Apache-2.0
"""Operators on codes other than matrix products: tables, pairs of tensors, windows, reductions."""

from __future__ import annotations

import math

import numpy as np

from ..device import Tensor
from ..device.activation import HardSwish
from ..device.arithmetic import (
    bounds,
    fixed_point,
    fused_multiply_add,
    scale_of,
    scales_for,
    zero_point_of,
)
from ..device.elementwise import Add
from ..device.operator import Attributes, Call, DeviceOperator
from ..device.profile import REFERENCE, Profile
from ..device.tensor import CODE_RANGES, INT8_MAX, INT8_MIN
from .forms import RESULT, Form, KernelCall, Part, Tensors, fallback_form, form_of, in_one_dtype, is_int8
from .weighted import window_numbers

CODES = np.arange(INT8_MIN, INT8_MAX + 1).astype(np.int8)
# Kernels shift words of 32 bits to the left by a multiplier's exponent.
LARGEST_EXPONENT = 31
# The most values in an int16 window, whose sum has 32 bits.
MOST_VALUES = 2**16

Numbers = dict[str, int | float]


def part(position: int, tensor: Tensor) -> Part:
    """An unchanged tensor, with any number of examples if it is an activation."""
    return Part(position, (-1, *tensor.shape[1:]) if tensor.data is None else tensor.shape)


def clamp_numbers(output: Tensor, attributes: Attributes, profile: Profile) -> Numbers:
    """Zero point and bounds of the result."""
    lowest, highest = bounds(output, attributes, profile)
    return {"zero_point": zero_point_of(output), "lowest": int(lowest), "highest": int(highest)}


def fixed_point_numbers(multiplier: float | np.floating, name: str = "") -> Numbers:
    """A multiplier in Q31 and its exponent, by the names of a kernel's numbers."""
    significand, exponent = fixed_point(multiplier)
    return {f"{name}significand": int(significand), f"{name}exponent": int(exponent)}


def leaves_it(output: Tensor, profile: Profile) -> bool:
    """Whether the declaration computes it: in float32, with pairs of codes looked up."""
    return profile.rounds_as_onnx and output.dtype == "int8"


def zero_points(inputs: Tensors) -> Numbers:
    """The zero points of two operands."""
    return {"first_zero_point": zero_point_of(inputs[0]), "second_zero_point": zero_point_of(inputs[1])}


def pair(kernel: str, inputs: Tensors, output: Tensor, numbers: Numbers) -> Form:
    """One kernel of two operands that broadcast."""
    operands = tuple(part(position, tensor) for position, tensor in enumerate(inputs))
    return (KernelCall(kernel, operands, part(RESULT, output), numbers),)


@fallback_form
def table(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """What the declaration returns for all codes."""
    by_value = declaration.pointwise and declaration.operands == (1, 1)
    if not by_value or inputs[0].data is not None or not {inputs[0].dtype, output.dtype} <= set(CODE_RANGES):
        return None
    return looked_up(declaration, inputs, output, attributes, profile)


@form_of("HARD_SWISH")
def hard_swish(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """A table, or two where it matters which values share a vector."""
    assert isinstance(declaration, HardSwish)
    if not is_int8(inputs, output):
        return None
    if not profile.vectors_of_eight:
        return looked_up(declaration, inputs, output, attributes, profile)
    tables = [declaration.table(inputs[0], output, attributes, device) for device in (profile, REFERENCE)]
    operands = (part(0, inputs[0]), np.stack(tables).astype(np.int8))
    return (KernelCall("integer_table_in_eights", operands, part(RESULT, output)),)


def looked_up(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form:
    """A table of the results of all codes."""
    lowest, highest = CODE_RANGES[inputs[0].dtype]
    codes = np.arange(lowest, highest + 1).astype(inputs[0].dtype)
    results = np.ascontiguousarray(declaration.results(Call([codes], inputs, (output,), attributes, profile)))
    return (KernelCall("integer_table", (part(0, inputs[0]), results), part(RESULT, output)),)


@form_of("ADD")
@form_of("SUB")
def add(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """Both operands times a whole number each, at once or rounded one after the other."""
    assert isinstance(declaration, Add)
    if not in_one_dtype(inputs, output) or leaves_it(output, profile):
        return None
    is_int16, scales = output.dtype == "int16", [scale_of(tensor) for tensor in inputs]
    ratios = [float(scale / scale_of(output)) for scale in scales]
    if not is_int16 and profile.delegates and min(ratios) >= 2**-10:
        shift = 21 - int(np.frexp(max(ratios))[1])
        multipliers = [int(np.rint(np.ldexp(ratio, shift))) for ratio in ratios]
        multipliers[1] *= declaration.sign
        shifts = sum(m * zero_point_of(tensor) for m, tensor in zip(multipliers, inputs, strict=True))
        numbers = {**clamp_numbers(output, attributes, profile), "first": multipliers[0], "second": multipliers[1]}
        return pair(
            "integer_add_shifted", inputs, output, {**numbers, "added": (1 << (shift - 1)) - shifts, "shift": shift}
        )
    in_vectors = declaration.in_vectors and profile.optimized
    if in_vectors and not is_int16:
        return None  # rare: XNNPACK takes all sums but those of scales far apart
    left, twice_larger = 15 if is_int16 else 20, 2 * float(max(scales))
    last = twice_larger / (2**left * float(scale_of(output)))
    numbers = clamp_numbers(output, attributes, profile if is_int16 else REFERENCE)
    kernel = "integer_add_vectors" if in_vectors else "integer_add_terms"
    return pair(kernel, inputs, output, numbers | term_numbers(inputs, left, last, declaration.sign))


def term_numbers(inputs: Tensors, left: int, last: float, sign: int = 1, squared: bool = False) -> Numbers:
    """Numbers for kernels that round both operands, and then their sum times `last`."""
    scales = [float(scale_of(tensor)) for tensor in inputs]
    numbers: Numbers = {"left": left, "sign": sign, "squared": int(squared), **zero_points(inputs)}
    for name, scale in zip(("first_", "second_"), scales, strict=True):
        numbers |= fixed_point_numbers(scale / (2 * max(scales)), name)
    return numbers | fixed_point_numbers(last)


@form_of("SQUARED_DIFFERENCE")
def squared_difference(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """Likewise, squared before it is rounded again."""
    if not is_int8(inputs, output) or leaves_it(output, profile):
        return None
    twice_larger = 2 * max(float(scale_of(tensor)) for tensor in inputs)
    last = (twice_larger * twice_larger) / ((1 << 14) * float(scale_of(output)))
    numbers = clamp_numbers(output, attributes, REFERENCE) | term_numbers(inputs, 7, last, squared=True)
    return pair("integer_add_terms", inputs, output, numbers)


@form_of("PRELU")
def prelu(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """Steps, or products with slopes, each rounded separately."""
    if not is_int8(inputs, output) or leaves_it(output, profile):
        return None
    scale, slope_scale, result = scales_for(profile, *inputs, output)
    positive, negative = scale / result, scale * slope_scale / result
    numbers: Numbers = {**fixed_point_numbers(positive, "positive_"), **fixed_point_numbers(negative, "negative_")}
    if max(numbers["positive_exponent"], numbers["negative_exponent"]) > LARGEST_EXPONENT:
        return None
    numbers |= {"zero_point": zero_point_of(output), "lowest": INT8_MIN, "highest": INT8_MAX}
    return pair("integer_prelu", inputs, output, numbers | zero_points(inputs))


@form_of("MUL")
def multiply(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """Products of whole numbers, rounded as the device does."""
    if not in_one_dtype(inputs, output) or leaves_it(output, profile):
        return None
    first, second, result = (scale_of(tensor) for tensor in (*inputs, output))
    factor = first * second / result
    numbers: Numbers = {
        **clamp_numbers(output, attributes, profile),
        **zero_points(inputs),
        "factor": float(factor),
    }
    if not profile.delegates or output.dtype == "int16":
        first, second, result = scales_for(profile, *inputs, output)
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
    """One of the two codes."""
    if not in_one_dtype(inputs, output):
        return None
    return pair("integer_extreme", inputs, output, {"largest": int(declaration.kind == "MAXIMUM")})


@form_of("AVERAGE_POOL_2D")
@form_of("MAX_POOL_2D")
def pool(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """Over every window."""
    if not in_one_dtype(inputs, output) or math.prod(attributes["filter_size"]) >= MOST_VALUES:
        return None
    numbers = window_numbers(attributes["filter_size"], inputs[0].shape, attributes)
    clamp = clamp_numbers(output, attributes, profile)
    largest = int(declaration.kind == "MAX_POOL_2D")
    call = KernelCall(
        "integer_pool", (part(0, inputs[0]),), part(RESULT, output), {**numbers, **clamp, "largest": largest}
    )
    return (call,)


def in_one_piece(shape: tuple[int, ...], axes: list[int]) -> tuple[int, int] | None:
    """How many values are along consecutive axes, and after them; else None."""
    axes = sorted(axes)
    if axes != list(range(axes[0], axes[-1] + 1)):
        return None
    return math.prod(shape[axis] for axis in axes), math.prod(shape[axes[-1] + 1 :])


@form_of("MEAN")
@form_of("SUM")
def reduction(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """Over consecutive axes."""
    sizes, mean = in_one_piece(inputs[0].shape, attributes["axes"]), declaration.kind == "MEAN"
    if not in_one_dtype(inputs, output) or sizes is None or (mean and leaves_it(output, profile)):
        return None
    if output.dtype == "int16":
        if not mean:
            return None
        profile = REFERENCE
    count, inner = sizes
    numbers: Numbers = clamp_numbers(output, attributes, profile)
    numbers |= {"significand": 0, "exponent": 0, "offset": 0, "factor": 0.0, "added": 0.0, "unsigned": 0}
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
        if profile.sums_as_unsigned and not mean:
            numbers |= {"unsigned": 1, "lowest": 0, "highest": 255}
    return (KernelCall("integer_sum", (Part(0, (-1, count, inner)),), Part(RESULT, (-1, inner)), numbers),)


@form_of("REDUCE_MAX")
@form_of("REDUCE_MIN")
def reduced_extreme(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """Likewise, one of the codes."""
    sizes = in_one_piece(inputs[0].shape, attributes["axes"])
    if not in_one_dtype(inputs, output) or sizes is None:
        return None
    numbers: Numbers = {"largest": int(declaration.kind == "REDUCE_MAX")}
    return (KernelCall("integer_reduce_extreme", (Part(0, (-1, *sizes)),), Part(RESULT, (-1, sizes[1])), numbers),)


@form_of("ARG_MAX")
@form_of("ARG_MIN")
def place_of_extreme(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """The index of one of the codes."""
    sizes = in_one_piece(inputs[0].shape, [attributes["axis"]])
    if inputs[0].dtype != "int8" or sizes is None:
        return None
    numbers: Numbers = {"largest": int(declaration.kind == "ARG_MAX")}
    return (KernelCall("integer_place_of_extreme", (Part(0, (-1, *sizes)),), Part(RESULT, (-1, sizes[1])), numbers),)
