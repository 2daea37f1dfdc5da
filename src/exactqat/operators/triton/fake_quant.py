# SPDX-License-Identifier: Apache-2.0
"""FakeQuantWithMinMax*: the same arithmetic as reference/fake_quant.py."""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from exactqat.operators.declarations.specification import TensorSpec
from exactqat.operators.triton.arithmetic import (
    clamp,
    divide,
    flush,
    masked,
    multiply,
    narrow,
    quotient,
    subtract,
    widened,
)
from exactqat.operators.triton.launch import Plan, bits_of, launch, packed_tiles_of, plan, real, tile, tiles, tiles_of
from exactqat.operators.triton.reduce import (
    STEPS,
    add_rows,
    folded,
    no_lanes,
    rows_of,
    store_sums,
    sum_tile,
    sum_tiles,
    total,
)


@triton.jit
def _nudge(min, max, QUANT_MIN: tl.constexpr, QUANT_MAX: tl.constexpr):
    """TensorFlow's `Nudge`; min and max are flushed."""
    zeros = tl.zeros_like(min)
    steps = zeros + (QUANT_MAX - QUANT_MIN)
    width = subtract(max, min)
    scale = divide(width, steps)
    inverse = divide(steps, width)
    zero_point_from_min = flush(QUANT_MIN - divide(min, scale))
    # Half away from zero; the zero point is never negative here. floor + comparison avoids the rounding of "+ 0.5".
    whole = tl.floor(zero_point_from_min)
    zero_point = tl.where(zero_point_from_min - whole >= 0.5, whole + 1.0, whole)
    zero_point = tl.where(zero_point_from_min > QUANT_MAX, zeros + QUANT_MAX, zero_point)
    zero_point = tl.where(zero_point_from_min < QUANT_MIN, zeros + QUANT_MIN, zero_point)
    zero_point = tl.where(zero_point_from_min != zero_point_from_min, zeros, zero_point)
    nudged_min = multiply(QUANT_MIN - zero_point, scale)
    nudged_max = multiply(QUANT_MAX - zero_point, scale)
    return nudged_min, nudged_max, scale, inverse


@triton.jit
def _range_of(min_ptr, max_ptr, fixed_min, fixed_max, index, known, DTYPE: tl.constexpr, FIXED: tl.constexpr):
    """The range, flushed: attributes, or loaded."""
    if FIXED:
        nothing = tl.zeros([1, 1], DTYPE)
        return nothing + real(fixed_min, DTYPE), nothing + real(fixed_max, DTYPE)
    else:
        return flush(tl.load(min_ptr + index, known, other=0.0)), flush(tl.load(max_ptr + index, known, other=0.0))


# A training form leaves a mask for the gradient: 2 bits for each element, 3 inside the nudged range, 1 above, 2 below,
# 0 neither; in a reversed range 3 is above and below.


@triton.jit
def _store_packed(mask_ptr, codes, rows, columns, column_blocks, channels, PARAMETERS: tl.constexpr):
    """Four elements of a row in each byte, the first in the lowest bits; `codes` beyond the end are 0."""
    BLOCK_ROWS: tl.constexpr = codes.shape[0]
    BYTES: tl.constexpr = codes.shape[1] // 4
    shifted = tl.reshape(codes, [BLOCK_ROWS, BYTES, 4]) << (2 * tl.arange(0, 4))[None, None, :]
    width = (columns + 3) // 4
    offset, mask, _, _ = tile(rows, width, column_blocks, channels, PARAMETERS, BLOCK_ROWS, BYTES)
    tl.store(mask_ptr + offset, tl.sum(shifted, axis=2).to(tl.uint8), mask)


@triton.jit
def _sides(source_ptr, offset, valid, nudged_min, nudged_max, FROM_MASK: tl.constexpr):
    """Which elements lie inside (ends included), below and above the nudged range, by the inputs or by their mask."""
    if FROM_MASK:
        codes = tl.load(source_ptr + offset // 4, valid, other=0).to(tl.int32) >> (2 * (offset % 4)).to(tl.int32) & 3
        reversed = nudged_min > nudged_max
        both = (codes == 3) & reversed
        return (codes == 3) & (nudged_min <= nudged_max), (codes == 2) | both, (codes == 1) | both
    else:
        inputs = flush(widened(tl.load(source_ptr + offset, valid, other=0.0)))
        return (inputs >= nudged_min) & (inputs <= nudged_max), inputs < nudged_min, inputs > nudged_max


@triton.jit
def _fake_quant(
    inputs_ptr,  # [rows, columns]
    min_ptr,  # [channels], or anything if FIXED
    max_ptr,
    outputs_ptr,  # [rows, columns]
    mask_ptr,  # [ceil(rows * columns / 4)] uint8, or anything if not TRAINING
    rows,
    columns,
    column_blocks,
    channels,
    fixed_min,  # bits
    fixed_max,
    QUANT_MIN: tl.constexpr,
    QUANT_MAX: tl.constexpr,
    BY_DIVISION: tl.constexpr,
    FIXED: tl.constexpr,
    TRAINING: tl.constexpr,
    PARAMETERS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    offset, mask, index, known = tile(rows, columns, column_blocks, channels, PARAMETERS, BLOCK_ROWS, BLOCK_COLUMNS)
    inputs = flush(widened(tl.load(inputs_ptr + offset, mask, other=0.0)))
    min, max = _range_of(min_ptr, max_ptr, fixed_min, fixed_max, index, known, inputs.dtype, FIXED)
    nudged_min, nudged_max, scale, inverse = _nudge(min, max, QUANT_MIN, QUANT_MAX)
    quant_zero = tl.floor(multiply(-nudged_min, inverse) + 0.5)
    shifted = subtract(clamp(inputs, nudged_min, nudged_max), nudged_min)
    # From here on denormals need no care: one added to a half, or beside a whole number, is a zero, and the last
    # product is 0 or at least one normal step.
    steps = quotient(shifted, scale) if BY_DIVISION else shifted * inverse
    outputs = tl.floor((steps - quant_zero) + 0.5) * scale
    if not FIXED:
        outputs = tl.where((min == 0.0) & (max == 0.0), 0.0, outputs)
    tl.store(outputs_ptr + offset, outputs.to(outputs_ptr.dtype.element_ty), mask)
    if TRAINING:
        inside = (inputs >= nudged_min) & (inputs <= nudged_max)
        codes = (inside | (inputs > nudged_max)).to(tl.int32) + 2 * (inside | (inputs < nudged_min)).to(tl.int32)
        _store_packed(mask_ptr, tl.where(mask, codes, 0), rows, columns, column_blocks, channels, PARAMETERS)


@triton.jit
def _fixed_gradient(
    gradients_ptr,  # [rows, columns]
    source_ptr,  # the inputs, or their mask
    backprops_ptr,
    rows,
    columns,
    column_blocks,
    channels,
    fixed_min,  # bits
    fixed_max,
    QUANT_MIN: tl.constexpr,
    QUANT_MAX: tl.constexpr,
    FROM_MASK: tl.constexpr,
    PARAMETERS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    offset, mask, index, known = tile(rows, columns, column_blocks, channels, PARAMETERS, BLOCK_ROWS, BLOCK_COLUMNS)
    gradients = flush(widened(tl.load(gradients_ptr + offset, mask, other=0.0)))
    min, max = _range_of(gradients_ptr, gradients_ptr, fixed_min, fixed_max, index, known, gradients.dtype, True)
    nudged_min, nudged_max, _, _ = _nudge(min, max, QUANT_MIN, QUANT_MAX)
    inside, _, _ = _sides(source_ptr, offset, mask, nudged_min, nudged_max, FROM_MASK)
    backprops = masked(gradients, inside)
    tl.store(backprops_ptr + offset, backprops.to(backprops_ptr.dtype.element_ty), mask)


@triton.jit
def _gradient(
    gradients_ptr,  # [rows, channels]
    source_ptr,  # the inputs, or their mask
    min_ptr,  # [channels]
    max_ptr,
    backprops_ptr,  # [rows, channels]
    items_ptr,  # [blocks, 2, channels] float64: the blocks' sums below and above the range
    rows,
    channels,
    channel_blocks,
    QUANT_MIN: tl.constexpr,
    QUANT_MAX: tl.constexpr,
    FROM_MASK: tl.constexpr,
    FLUSH: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    first_block, channel, known = sum_tile(channels, channel_blocks, BLOCKS, CHANNELS)
    min = flush(tl.load(min_ptr + channel, known, other=0.0))
    max = flush(tl.load(max_ptr + channel, known, other=0.0))
    nudged_min, nudged_max, _, _ = _nudge(min, max, QUANT_MIN, QUANT_MAX)
    nudged_min, nudged_max = nudged_min[None, None, :], nudged_max[None, None, :]
    no_range = ((min == 0.0) & (max == 0.0))[None, None, :]
    lanes_below = no_lanes(BLOCKS, CHANNELS)
    lanes_above = no_lanes(BLOCKS, CHANNELS)
    for step in tl.static_range(STEPS):
        row = rows_of(first_block, step, BLOCKS)
        valid = (row < rows) & known[None, None, :]
        offset = row * channels + channel[None, None, :]
        inside, below, above = _sides(source_ptr, offset, valid, nudged_min, nudged_max, FROM_MASK)
        operand = widened(tl.load(gradients_ptr + offset, valid, other=0.0))
        gradients = flush(operand)
        backprops = tl.where(no_range, operand, masked(gradients, inside))
        tl.store(backprops_ptr + offset, backprops.to(backprops_ptr.dtype.element_ty), valid)
        lanes_below = add_rows(lanes_below, masked(gradients, below).to(tl.float64), valid, FLUSH)
        lanes_above = add_rows(lanes_above, masked(gradients, above).to(tl.float64), valid, FLUSH)
    store_sums(items_ptr, lanes_below, 0, 2, first_block, channel, rows, channels, FLUSH)
    store_sums(items_ptr, lanes_above, 1, 2, first_block, channel, rows, channels, FLUSH)


@triton.jit
def _range_gradients(
    items_ptr,  # [count, 2, channels] float64
    min_ptr,  # [channels]
    max_ptr,
    backprop_min_ptr,
    backprop_max_ptr,
    count,
    channels,
    FLUSH: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    channel = tl.program_id(0).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    below = total(items_ptr, count, 2 * channels, channel, known, FLUSH, BLOCKS)
    above = total(items_ptr, count, 2 * channels, channels + channel, known, FLUSH, BLOCKS)
    min = flush(tl.load(min_ptr + channel, known, other=0.0))
    max = flush(tl.load(max_ptr + channel, known, other=0.0))
    no_range = (min == 0.0) & (max == 0.0)
    tl.store(backprop_min_ptr + channel, tl.where(no_range, 0.0, narrow(below, min.dtype)), known)
    tl.store(backprop_max_ptr + channel, tl.where(no_range, 0.0, narrow(above, min.dtype)), known)


@triton.jit
def _gradient_transpose(
    input_cotangent_ptr,  # [rows, columns]
    min_cotangent_ptr,  # [channels]
    max_cotangent_ptr,
    source_ptr,  # the inputs, or their mask
    min_ptr,  # [channels]
    max_ptr,
    gradients_ptr,  # [rows, columns]
    rows,
    columns,
    column_blocks,
    channels,
    QUANT_MIN: tl.constexpr,
    QUANT_MAX: tl.constexpr,
    FROM_MASK: tl.constexpr,
    PARAMETERS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    offset, mask, index, known = tile(rows, columns, column_blocks, channels, PARAMETERS, BLOCK_ROWS, BLOCK_COLUMNS)
    input_cotangent = widened(tl.load(input_cotangent_ptr + offset, mask, other=0.0))
    min_cotangent = tl.load(min_cotangent_ptr + index, known, other=0.0)
    max_cotangent = tl.load(max_cotangent_ptr + index, known, other=0.0)
    min = flush(tl.load(min_ptr + index, known, other=0.0))
    max = flush(tl.load(max_ptr + index, known, other=0.0))
    nudged_min, nudged_max, _, _ = _nudge(min, max, QUANT_MIN, QUANT_MAX)
    inside, below, above = _sides(source_ptr, offset, mask, nudged_min, nudged_max, FROM_MASK)
    outside = tl.where(below, min_cotangent, tl.where(above, max_cotangent, 0.0))
    gradients = tl.where(inside | ((min == 0.0) & (max == 0.0)), input_cotangent, outside)
    tl.store(gradients_ptr + offset, gradients.to(gradients_ptr.dtype.element_ty), mask)


def _quantization(numbers: Mapping[str, int | float]) -> dict[str, Any]:
    return {"QUANT_MIN": float(numbers["narrow_range"]), "QUANT_MAX": float(2 ** numbers["num_bits"] - 1)}


def _bounds(operand: TensorSpec, numbers: Mapping[str, int | float]) -> tuple[int, int]:
    return bits_of(operand.dtype, numbers["min"]), bits_of(operand.dtype, numbers["max"])


# Each plan serves two kernels: with the mask of a training form as one more result or in place of the inputs.


def _fixed(operands: tuple[TensorSpec, ...], numbers: Mapping[str, int | float], training: bool) -> Plan:
    cut = tiles(1, 1, operands[0].size)
    options = _quantization(numbers) | cut.constexprs
    arrays = (0, 0, 0, 1, 2 if training else 1)  # the range is not read
    integers = (*cut.numbers, *_bounds(operands[0], numbers))
    chosen = {"BY_DIVISION": False, "FIXED": True, "TRAINING": training}
    return Plan((launch(_fake_quant, cut.programs, arrays, integers, **chosen, **options),))


@plan
def fake_quant_with_min_max_args(operands, results, numbers):
    return _fixed(operands, numbers, training=False)


@plan
def fake_quant_with_min_max_args_training(operands, results, numbers):
    return _fixed(operands, numbers, training=True)


def _fixed_gradients(operands: tuple[TensorSpec, ...], numbers: Mapping[str, int | float], from_mask: bool) -> Plan:
    cut = tiles(1, 1, operands[0].size)
    options = _quantization(numbers) | cut.constexprs
    integers = (*cut.numbers, *_bounds(operands[0], numbers))
    return Plan((launch(_fixed_gradient, cut.programs, (0, 1, 2), integers, FROM_MASK=from_mask, **options),))


@plan
def fake_quant_with_min_max_args_gradient(operands, results, numbers):
    return _fixed_gradients(operands, numbers, from_mask=False)


@plan
def fake_quant_with_min_max_args_gradient_from_mask(operands, results, numbers):
    # The mask says it all; any range that is not reversed will do.
    any_range = {"min": -1.0, "max": 1.0, "num_bits": 8, "narrow_range": 0}
    return _fixed_gradients(operands, any_range, from_mask=True)


def _forward(
    operands: tuple[TensorSpec, ...], numbers: Mapping[str, int | float], by_division: bool, training: bool
) -> Plan:
    cut = (packed_tiles_of if training else tiles_of)(operands[0], operands[1])
    options = _quantization(numbers) | cut.constexprs
    arrays, integers = (0, 1, 2, 3, 4 if training else 3), (*cut.numbers, 0, 0)
    chosen = {"BY_DIVISION": by_division, "FIXED": False, "TRAINING": training}
    return Plan((launch(_fake_quant, cut.programs, arrays, integers, **chosen, **options),))


@plan
def fake_quant_with_min_max_vars(operands, results, numbers):
    return _forward(operands, numbers, by_division=True, training=False)


@plan
def fake_quant_with_min_max_vars_training(operands, results, numbers):
    return _forward(operands, numbers, by_division=True, training=True)


@plan
def fake_quant_with_min_max_vars_per_channel(operands, results, numbers):
    return _forward(operands, numbers, by_division=False, training=False)


@plan
def fake_quant_with_min_max_vars_per_channel_training(operands, results, numbers):
    return _forward(operands, numbers, by_division=False, training=True)


def _gradients(operands: tuple[TensorSpec, ...], numbers: Mapping[str, int | float], from_mask: bool) -> Plan:
    gradients, channels = operands[0], operands[2].size  # the whole tensor is rows of one channel
    rows = gradients.size // channels if channels else 0
    flush_sums = gradients.dtype == "float64"
    cut = sum_tiles(rows, channels)
    tree = folded(7, cut.blocks, 2 * channels, flush_sums)
    of_blocks = launch(
        _gradient,
        cut.programs,
        (0, 1, 2, 3, 4, 7),
        (rows, channels, cut.channel_blocks),
        FROM_MASK=from_mask,
        FLUSH=flush_sums,
        **_quantization(numbers),
        **cut.constexprs,
    )
    together = min(tree.columns(), triton.next_power_of_2(max(channels, 1)))
    of_ranges = launch(
        _range_gradients,
        -(-channels // together),
        (tree.items, 2, 3, 5, 6),
        (tree.count if rows else 0, channels),
        FLUSH=flush_sums,
        BLOCKS=tree.blocks,
        CHANNELS=together,
    )
    return Plan((of_blocks, *tree.launches, of_ranges), tree.scratch)


@plan
def fake_quant_with_min_max_vars_gradient(operands, results, numbers):
    return _gradients(operands, numbers, from_mask=False)


@plan
def fake_quant_with_min_max_vars_gradient_from_mask(operands, results, numbers):
    return _gradients(operands, numbers, from_mask=True)


@plan
def fake_quant_with_min_max_vars_per_channel_gradient(operands, results, numbers):
    return _gradients(operands, numbers, from_mask=False)


@plan
def fake_quant_with_min_max_vars_per_channel_gradient_from_mask(operands, results, numbers):
    return _gradients(operands, numbers, from_mask=True)


def _transposed(operands: tuple[TensorSpec, ...], numbers: Mapping[str, int | float], from_mask: bool) -> Plan:
    cut = tiles_of(operands[0], operands[4])
    options = _quantization(numbers) | cut.constexprs
    arrays = (0, 1, 2, 3, 4, 5, 6)
    return Plan((launch(_gradient_transpose, cut.programs, arrays, cut.numbers, FROM_MASK=from_mask, **options),))


@plan
def fake_quant_with_min_max_vars_gradient_transpose(operands, results, numbers):
    return _transposed(operands, numbers, from_mask=False)


@plan
def fake_quant_with_min_max_vars_gradient_from_mask_transpose(operands, results, numbers):
    return _transposed(operands, numbers, from_mask=True)
