# SPDX-License-Identifier: Apache-2.0
"""QuantizeAndDequantize*: the same arithmetic as reference/quantize_and_dequantize.py."""

import sys
from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from exactqat.operators.declarations.specification import TensorSpec
from exactqat.operators.triton.arithmetic import clamp, divide, flush, masked, multiply, widened
from exactqat.operators.triton.launch import COLUMNS, Launch, Plan, bits_of, launch, plan, real, tile, tiles

_LARGEST_FLOAT32 = tl.constexpr(2.0**128 - 2.0**104)
_LARGEST_FLOAT64 = tl.constexpr(sys.float_info.max)
_WHOLE_FROM_FLOAT32 = tl.constexpr(2.0**23)  # from here on all numbers are whole
_WHOLE_FROM_FLOAT64 = tl.constexpr(2.0**52)


@triton.jit
def _scales(minimum, maximum, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Scale, its inverse, and the range it covers; the lowest and highest integer are LOW and HIGH."""
    zeros = tl.zeros_like(minimum)
    low, high = zeros + LOW, zeros + HIGH
    largest = zeros + (_LARGEST_FLOAT64 if minimum.dtype == tl.float64 else _LARGEST_FLOAT32)
    from_min = tl.where(multiply(low, minimum) > 0.0, divide(low, minimum), largest)
    from_max = tl.where(multiply(high, maximum) > 0.0, divide(high, maximum), largest)
    min_side = from_min < from_max
    inverse = divide(tl.where(min_side, minimum, maximum), tl.where(min_side, low, high))
    return (
        tl.where(min_side, from_min, from_max),
        inverse,
        tl.where(min_side, minimum, multiply(low, inverse)),
        tl.where(min_side, multiply(high, inverse), maximum),
    )


@triton.jit
def _half_to_even(v):
    """The nearest whole number; zeros keep their sign."""
    whole_from = tl.zeros_like(v) + (_WHOLE_FROM_FLOAT64 if v.dtype == tl.float64 else _WHOLE_FROM_FLOAT32)
    # Beside so large a number the addition itself rounds to a whole one.
    shift = tl.where(v < 0.0, -whole_from, whole_from)
    rounded = (v + shift) - shift
    return tl.where(tl.abs(v) < whole_from, tl.where(rounded == 0.0, v * 0.0, rounded), v)


@triton.jit
def _quantized(values, scale, inverse, HALF_UP: tl.constexpr):
    # A denormal product rounds to the zero that replaces it, and the last one is 0 or at least a normal step.
    scaled = values * scale
    rounded = tl.floor(scaled + 0.5) if HALF_UP else _half_to_even(scaled)
    return rounded * inverse


@triton.jit
def _quantize_in_range(
    input_ptr,  # [rows, columns]
    input_min_ptr,  # [channels], or anything if FIXED
    input_max_ptr,
    output_ptr,  # [rows, columns]
    rows,
    columns,
    column_blocks,
    channels,
    fixed_min,  # bits
    fixed_max,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    HALF_UP: tl.constexpr,
    CHECK: tl.constexpr,
    FIXED: tl.constexpr,
    PARAMETERS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    offset, mask, index, known = tile(rows, columns, column_blocks, channels, PARAMETERS, BLOCK_ROWS, BLOCK_COLUMNS)
    values = flush(widened(tl.load(input_ptr + offset, mask, other=0.0)))
    if FIXED:
        minimum = tl.zeros([1, 1], values.dtype) + real(fixed_min, values.dtype)
        maximum = tl.zeros([1, 1], values.dtype) + real(fixed_max, values.dtype)
    else:
        minimum = flush(widened(tl.load(input_min_ptr + index, known, other=0.0)))
        maximum = flush(widened(tl.load(input_max_ptr + index, known, other=0.0)))
    scale, inverse, low, high = _scales(minimum, maximum, LOW, HIGH)
    output = _quantized(clamp(values, low, high), scale, inverse, HALF_UP)
    if CHECK:
        # Other devices raise an error. Here nobody could without waiting for the device.
        output = tl.where(minimum <= maximum, output, float("nan"))
    tl.store(output_ptr + offset, output.to(output_ptr.dtype.element_ty), mask)


# A range from the data. Minimum and maximum are taken of integers in the order of the numbers, with -0 before +0 and
# NaN at the end that wins, so that the order of evaluation cannot matter.


@triton.jit
def _ordered(v):
    """The bits of a number as an integer in the order of the numbers, and back."""
    if v.dtype == tl.float64:
        bits = v.to(tl.int64, bitcast=True)
        return tl.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)
    else:
        bits = v.to(tl.int32, bitcast=True)
        return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _number(ordered):
    if ordered.dtype == tl.int64:
        return tl.where(ordered < 0, ordered ^ 0x7FFFFFFFFFFFFFFF, ordered).to(tl.float64, bitcast=True)
    else:
        return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _lowest(ordered):
    """Zeros like `ordered` plus the integer before all others: a NaN on the minimum's side, nothing on the other."""
    if ordered.dtype == tl.int64:
        return tl.zeros_like(ordered) - 0x7FFFFFFFFFFFFFFF - 1
    else:
        return tl.zeros_like(ordered) - 0x7FFFFFFF - 1


@triton.jit
def _sides(v, mask):
    """What each number means for the minimum and for the maximum."""
    v = flush(widened(v))
    ordered = _ordered(v)
    lowest = _lowest(ordered)
    highest = -1 - lowest
    nan = v != v
    return (
        tl.where(mask, tl.where(nan, lowest, ordered), highest),
        tl.where(mask, tl.where(nan, highest, ordered), lowest),
    )


@triton.jit
def _extremes(
    input_ptr,  # [rows, columns]
    low_ptr,  # [parts, channels] integers
    high_ptr,
    rows,
    columns,
    channels,
    parts,
    steps,
    OVER_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Each program goes through `steps` tiles, one below the other or one beside the other. `parts` cover a column, or
    a row whose every `channels`-th element belongs to the same channel."""
    program = tl.program_id(0)
    part = (program % parts).to(tl.int64)
    row = tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
    column = tl.arange(0, BLOCK_COLUMNS)[None, :].to(tl.int64)
    if OVER_ROWS:
        row += part * steps * BLOCK_ROWS
        column += (program // parts).to(tl.int64) * BLOCK_COLUMNS
    else:
        row += (program // parts).to(tl.int64) * BLOCK_ROWS
        column += part * steps * BLOCK_COLUMNS
    mask = (row < rows) & (column < columns)
    low, high = _sides(tl.load(input_ptr + row * columns + column, mask, other=0.0), mask)
    for _ in range(1, steps):
        if OVER_ROWS:
            row += BLOCK_ROWS
        else:
            column += BLOCK_COLUMNS
        mask = (row < rows) & (column < columns)
        next_low, next_high = _sides(tl.load(input_ptr + row * columns + column, mask, other=0.0), mask)
        low, high = tl.minimum(low, next_low), tl.maximum(high, next_high)
    if OVER_ROWS:
        index, known = part * channels + column, column < columns
        low, high = tl.min(low, 0)[None, :], tl.max(high, 0)[None, :]
    else:
        index, known = (row // channels * parts + part) * channels + row % channels, row < rows
        low, high = tl.min(low, 1)[:, None], tl.max(high, 1)[:, None]
    tl.store(low_ptr + index, low, known)
    tl.store(high_ptr + index, high, known)


@triton.jit
def _scales_of_extremes(
    low_ptr,  # [parts, channels] integers
    high_ptr,
    scale_ptr,  # [channels]
    inverse_ptr,
    parts,
    channels,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    channel = tl.program_id(0).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    part = tl.arange(0, PARTS)[:, None].to(tl.int64)
    known = channel < channels
    nothing = tl.zeros([PARTS, CHANNELS], low_ptr.dtype.element_ty)
    low = -1 - _lowest(nothing)
    high = _lowest(nothing)
    for _ in range(0, parts, PARTS):
        mask = (part < parts) & known[None, :]
        offset = part * channels + channel[None, :]
        low = tl.minimum(low, tl.where(mask, tl.load(low_ptr + offset, mask, other=0), low))
        high = tl.maximum(high, tl.where(mask, tl.load(high_ptr + offset, mask, other=0), high))
        part += PARTS
    minimum, maximum = _number(tl.min(low, 0)), _number(tl.max(high, 0))
    minimum = tl.where(minimum == 0.0, 0.0, minimum)
    scale, inverse, _, _ = _scales(minimum, maximum, LOW, HIGH)
    tl.store(scale_ptr + channel, scale, known)
    tl.store(inverse_ptr + channel, inverse, known)


@triton.jit
def _quantize_by_scale(
    input_ptr,  # [rows, columns]
    scale_ptr,  # [channels]
    inverse_ptr,
    output_ptr,  # [rows, columns]
    rows,
    columns,
    column_blocks,
    channels,
    HALF_UP: tl.constexpr,
    PARAMETERS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    offset, mask, index, known = tile(rows, columns, column_blocks, channels, PARAMETERS, BLOCK_ROWS, BLOCK_COLUMNS)
    values = flush(widened(tl.load(input_ptr + offset, mask, other=0.0)))
    scale = tl.load(scale_ptr + index, known, other=0.0)
    inverse = tl.load(inverse_ptr + index, known, other=0.0)
    output = _quantized(values, scale, inverse, HALF_UP)
    tl.store(output_ptr + offset, output.to(output_ptr.dtype.element_ty), mask)


@triton.jit
def _gradient(
    gradients_ptr,  # [rows, columns]
    input_ptr,
    input_min_ptr,  # [channels]
    input_max_ptr,
    input_backprop_ptr,  # [rows, columns]
    rows,
    columns,
    column_blocks,
    channels,
    PARAMETERS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    offset, mask, index, known = tile(rows, columns, column_blocks, channels, PARAMETERS, BLOCK_ROWS, BLOCK_COLUMNS)
    gradients = flush(widened(tl.load(gradients_ptr + offset, mask, other=0.0)))
    values = flush(widened(tl.load(input_ptr + offset, mask, other=0.0)))
    minimum = flush(widened(tl.load(input_min_ptr + index, known, other=0.0)))
    maximum = flush(widened(tl.load(input_max_ptr + index, known, other=0.0)))
    backprop = masked(gradients, (values >= minimum) & (values <= maximum))
    tl.store(input_backprop_ptr + offset, backprop.to(input_backprop_ptr.dtype.element_ty), mask)


@triton.jit
def _zeros(input_min_backprop_ptr, input_max_backprop_ptr, channels, BLOCK: tl.constexpr):
    channel = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    nothing = tl.zeros([BLOCK], input_min_backprop_ptr.dtype.element_ty)
    tl.store(input_min_backprop_ptr + channel, nothing, channel < channels)
    tl.store(input_max_backprop_ptr + channel, nothing, channel < channels)


def _integers(numbers: Mapping[str, int | float]) -> dict[str, Any]:
    bits = numbers["num_bits"]
    if numbers["signed_input"]:
        return {"LOW": float(-(2 ** (bits - 1)) + numbers["narrow_range"]), "HIGH": float(2 ** (bits - 1) - 1)}
    return {"LOW": 0.0, "HIGH": float(2**bits - 1)}


@plan
def quantize_and_dequantize(operands, results, numbers):
    input = operands[0]
    shape = (numbers["outer"], numbers["slices"], numbers["inner"])
    cut = tiles(*shape)
    if numbers["range_given"]:
        fixed = len(operands) == 1  # version 1 has the range as attributes
        bounds = [bits_of(input.dtype, numbers[name]) if fixed else 0 for name in ("input_min", "input_max")]
        return Plan(
            (
                launch(
                    _quantize_in_range,
                    cut.programs,
                    (0, 0, 0, 1) if fixed else (0, 1, 2, 3),
                    (*cut.numbers, *bounds),
                    HALF_UP=bool(numbers["half_up"]),
                    CHECK=bool(numbers["check_range"]),
                    FIXED=fixed,
                    **_integers(numbers),
                    **cut.constexprs,
                ),
            )
        )
    output = len(operands)
    low, high, scale, inverse = range(output + 1, output + 5)
    extremes, parts = _extremes_of(*shape, cut.constexprs, low, high)
    real_dtype, ordered_dtype = ("float64", "int64") if input.dtype == "float64" else ("float32", "int32")
    channels = shape[1]
    together = 16 if channels > 1 else 1
    scales = launch(
        _scales_of_extremes,
        -(-channels // together) if cut.programs else 0,
        (low, high, scale, inverse),
        (parts, channels),
        PARTS=1024 // together,
        CHANNELS=together,
        **_integers(numbers),
    )
    quantized = launch(
        _quantize_by_scale,
        cut.programs,
        (0, scale, inverse, output),
        cut.numbers,
        HALF_UP=bool(numbers["half_up"]),
        **cut.constexprs,
    )
    scratch = [TensorSpec((parts, channels), ordered_dtype)] * 2 + [TensorSpec((channels,), real_dtype)] * 2
    return Plan((extremes, scales, quantized), tuple(scratch))


def _extremes_of(
    outer: int, channels: int, inner: int, block: Mapping[str, int], low: int, high: int
) -> tuple[Launch, int]:
    """Minimum and maximum of each channel, in as many parts as keep a GPU busy, and how many these are."""
    over_rows = block["PARAMETERS"] == COLUMNS
    rows, columns = (outer, channels) if over_rows else (outer * channels, inner)
    down, across = -(-rows // block["BLOCK_ROWS"]), -(-columns // block["BLOCK_COLUMNS"])
    steps = max(down * across // 2048, 1)
    parts = -(-(down if over_rows else across) // steps)
    of_parts = launch(
        _extremes,
        parts * (across if over_rows else down),
        (0, low, high),
        (rows, columns, channels, parts, steps),
        OVER_ROWS=over_rows,
        BLOCK_ROWS=block["BLOCK_ROWS"],
        BLOCK_COLUMNS=block["BLOCK_COLUMNS"],
    )
    return of_parts, parts if over_rows else parts * outer


@plan
def quantize_and_dequantize_v4_grad(operands, results, numbers):
    cut = tiles(numbers["outer"], numbers["slices"], numbers["inner"])
    channels = operands[2].size
    return Plan(
        (
            launch(_gradient, cut.programs, (0, 1, 2, 3, 4), cut.numbers, **cut.constexprs),
            launch(_zeros, -(-channels // 1024), (5, 6), (channels,), BLOCK=1024),
        )
    )
