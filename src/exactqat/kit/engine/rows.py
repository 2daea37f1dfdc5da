# SPDX-License-Identifier: Apache-2.0
"""Products of two activations, softmax over rows, images of another size."""

from __future__ import annotations

import math

import numpy as np

from ..device import Tensor
from ..device import fixed_point_functions as fixed
from ..device.arithmetic import fixed_point, reduced, rounding_shift, scale_of, zero_point_of
from ..device.interpolated import softmax_multiplier, softmax_tables
from ..device.matrix import in_float32, product_multiplier, stays_in_32_bits
from ..device.normalization import EXPONENT_BITS, SUM_BITS, scaled_exponents
from ..device.operator import Attributes, DeviceOperator, Refusal
from ..device.profile import REFERENCE, Profile
from ..device.resize import BUILT_IN_BITS, XNNPACK_BITS, ResizeBilinear
from .elementwise import CODES, LARGEST_EXPONENT, Numbers, clamp_numbers, fixed_point_numbers, leaves_it, part
from .forms import RESULT, Form, KernelCall, Part, Tensors, form_of, in_one_dtype, is_int8, may_use_dot_products
from .weighted import COLUMNS, STEPS, padded

# The longest row of int16, whose exponentials would otherwise add up to more than 32 bits.
LONGEST_ROW = 2**16
# The depth of a product of two activations beyond which sums may not fit into 32 bits.
DEEPEST = 2**31 // 255**2
# Likewise for int16, whose sums are multiplied by 15 bits.
DEEPEST_WIDE = 2**17


@form_of("BATCH_MATMUL")
def batch_matmul(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """Products of matrices; the second is packed for each."""
    depth = inputs[0].shape[-2 if attributes["adj_x"] else -1]
    if in_one_dtype(inputs, output) and output.dtype == "int16":
        fits = depth < DEEPEST_WIDE and stays_in_32_bits(inputs, output, depth)
        return wide_batch_matmul(inputs, output, attributes, profile) if fits else None
    if not is_int8(inputs, output) or depth > DEEPEST:
        return None
    columns = padded(output.shape[-1], COLUMNS)
    numbers: Numbers = {**clamp_numbers(output, attributes, profile), "dot": may_use_dot_products()}
    for name in ("adj_x", "adj_y"):
        numbers[name] = int(attributes[name])
    for axis, tensor in zip("xy", inputs, strict=True):
        numbers[f"zero_point_{axis}"] = zero_point_of(tensor)
    first, second, result = (scale_of(tensor) for tensor in (*inputs, output))
    if in_float32(inputs, profile):
        numbers["steps"] = STEPS["float32"]
        factors = np.full(columns, first * second / result, np.float32)
    else:
        numbers["steps"] = STEPS["fixed_point"]
        pair = fixed_point(product_multiplier(inputs, output, profile))
        factors = np.stack([np.full(columns, int(number), np.int32) for number in pair])
    operands: tuple[Part | np.ndarray, ...] = (*matrices(inputs, output), factors)
    return (KernelCall("integer_batch_matmul", operands, part(RESULT, output), numbers),)


def matrices(inputs: Tensors, output: Tensor) -> list[Part]:
    """Both operands with as many axes as the result."""
    rank, operands = len(output.shape), []
    for position, tensor in enumerate(inputs):
        shape = part(position, tensor).shape
        operands.append(Part(position, (*(1,) * (rank - len(shape)), *shape)))
    return operands


def wide_batch_matmul(inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile) -> Form:
    """Likewise for int16."""
    significand, exponent = fixed_point(product_multiplier(inputs, output, profile))
    numbers: Numbers = {**clamp_numbers(output, attributes, profile), "significand": int(reduced(significand))}
    numbers |= {"shift": 15 - int(exponent), **{name: int(attributes[name]) for name in ("adj_x", "adj_y")}}
    operands = tuple(matrices(inputs, output))
    return (KernelCall("integer_batch_matmul_wide", operands, part(RESULT, output), numbers),)


@form_of("SOFTMAX")
def softmax(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """Exponentials from a table, by how far a code is below the largest one."""
    (source,) = inputs
    if in_one_dtype(inputs, output) and output.dtype == "int16":
        return wide_softmax(source, float(np.float32(attributes["beta"])), profile)
    # The reference kernel may crash the process, which the declaration reports as an error.
    if not is_int8(inputs, output) or leaves_it(output, profile):
        return None
    if declaration.may_end_the_process(inputs, attributes, profile):
        return None
    beta = float(np.float32(attributes["beta"]))
    rows = (-1, source.shape[-1])
    if profile.delegates:
        factor = -scale_of(source) * np.float32(beta)
        table = np.exp((factor * np.arange(256, dtype=np.float32)).astype(np.float64)).astype(np.float32)
        numbers: Numbers = {"scale": float(scale_of(output)), "zero_point": zero_point_of(output)}
        return (KernelCall("integer_softmax", (Part(0, rows), table), Part(RESULT, rows), numbers),)
    x, near, _, _ = scaled_exponents(CODES, source, beta)
    powers = np.where(near, fixed.exp_on_negative_values(x, EXPONENT_BITS), 0)
    terms = np.where(near, rounding_shift(powers, SUM_BITS), 0)
    tables = np.ascontiguousarray(np.stack([terms, powers])[:, ::-1].astype(np.int32))
    return (KernelCall("integer_softmax_fixed", (Part(0, rows), tables), Part(RESULT, rows)),)


@form_of("LOG_SOFTMAX")
def log_softmax(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """Likewise."""
    (source,) = inputs
    if not is_int8(inputs, output):
        return None
    rows = (-1, source.shape[-1])
    numbers: Numbers = {"zero_point": zero_point_of(output)}
    if profile.optimized:
        table = np.exp((-scale_of(source) * np.arange(256, dtype=np.float32)).astype(np.float64)).astype(np.float32)
        numbers |= {"scale": float(scale_of(source)), "result_scale": float(scale_of(output))}
        return (KernelCall("integer_log_softmax", (Part(0, rows), table), Part(RESULT, rows), numbers),)
    x, near, significand, shift = scaled_exponents(CODES, source, 1.0)
    powers = np.where(near, rounding_shift(fixed.exp_on_negative_values(x, EXPONENT_BITS), SUM_BITS), 0)
    tables = np.ascontiguousarray(np.stack([x, powers])[:, ::-1].astype(np.int32))
    numbers["radius"] = int(near.sum()) - 1
    numbers |= fixed_point_numbers(2.0 ** (31 - shift) / significand)
    return (KernelCall("integer_log_softmax_fixed", (Part(0, rows), tables), Part(RESULT, rows), numbers),)


@form_of("L2_NORMALIZATION")
def l2_normalization(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """Times the inverse square root of the sum of squares."""
    if not is_int8(inputs, output) or leaves_it(output, profile):
        return None
    rows = (-1, inputs[0].shape[-1])
    numbers: Numbers = {"zero_point": zero_point_of(inputs[0])}
    return (KernelCall("integer_l2_normalization", (Part(0, rows),), Part(RESULT, rows), numbers),)


def wide_softmax(source: Tensor, beta: float, profile: Profile) -> Form | None:
    """Interpolates between the entries of two tables, as `device.interpolated.softmax`."""
    numbers = fixed_point_numbers(softmax_multiplier(scale_of(source), beta, profile))
    if numbers["exponent"] > LARGEST_EXPONENT or source.shape[-1] >= LONGEST_ROW:
        return None
    rows = (-1, source.shape[-1])
    operands = (Part(0, rows), np.stack(softmax_tables(profile)).astype(np.int32))
    return (KernelCall("integer_softmax_wide", operands, Part(RESULT, rows), numbers),)


@form_of("RESIZE_BILINEAR")
def resize_bilinear(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """Interpolates between the four values around a position."""
    assert isinstance(declaration, ResizeBilinear)
    if not in_one_dtype(inputs, output) or math.prod(output.shape) == 0 or leaves_it(output, profile):
        return None
    if output.dtype == "int16":
        profile = REFERENCE
    neighbors = declaration.neighbors if profile.delegates else declaration.built_in_neighbors
    try:
        axes = [
            np.stack(neighbors(inputs[0].shape[axis], output.shape[axis], attributes)).astype(np.int32)
            for axis in (1, 2)
        ]
    except Refusal:
        return None
    numbers: Numbers = {
        "bits": XNNPACK_BITS if profile.delegates else BUILT_IN_BITS,
        "half_up": int(profile.delegates),
    }
    return (KernelCall("integer_resize_bilinear", (part(0, inputs[0]), *axes), part(RESULT, output), numbers),)
