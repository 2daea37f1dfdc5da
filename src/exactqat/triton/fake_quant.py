# SPDX-License-Identifier: Apache-2.0
"""FakeQuantWithMinMax*: the same arithmetic as reference/fake_quant.py."""

from typing import Any

import triton
import triton.language as tl

from exactqat.spec.op import TensorSpec
from exactqat.triton.arithmetic import clamp, divide, flush, masked, multiply, quotient, subtract, widened
from exactqat.triton.launch import Plan, bits_of, launch, plan, real, tile, tiles, tiles_of


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
def _fake_quant(
    inputs_ptr,  # [rows, columns]
    min_ptr,  # [channels], or anything if FIXED
    max_ptr,
    outputs_ptr,  # [rows, columns]
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
    PARAMETERS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    offset, mask, index, known = tile(rows, columns, column_blocks, channels, PARAMETERS, BLOCK_ROWS, BLOCK_COLUMNS)
    inputs = flush(widened(tl.load(inputs_ptr + offset, mask, other=0.0)))
    if FIXED:
        min = tl.zeros([1, 1], inputs.dtype) + real(fixed_min, inputs.dtype)
        max = tl.zeros([1, 1], inputs.dtype) + real(fixed_max, inputs.dtype)
    else:
        min = flush(tl.load(min_ptr + index, known, other=0.0))
        max = flush(tl.load(max_ptr + index, known, other=0.0))
    nudged_min, nudged_max, scale, inverse = _nudge(min, max, QUANT_MIN, QUANT_MAX)
    quant_zero = tl.floor(multiply(-nudged_min, inverse) + 0.5)
    shifted = subtract(clamp(inputs, nudged_min, nudged_max), nudged_min)
    # From here on denormals need no care: one added to a half, or beside a whole number, is a zero, and the last
    # product is 0 or at least one normal step.
    if BY_DIVISION:
        steps = quotient(shifted, scale)
    else:
        steps = shifted * inverse
    outputs = tl.floor((steps - quant_zero) + 0.5) * scale
    if not FIXED:
        outputs = tl.where((min == 0.0) & (max == 0.0), 0.0, outputs)
    tl.store(outputs_ptr + offset, outputs.to(outputs_ptr.dtype.element_ty), mask)


def _quantization(numbers: Any) -> dict[str, float]:
    return {"QUANT_MIN": float(numbers["narrow_range"]), "QUANT_MAX": float(2 ** numbers["num_bits"] - 1)}


@plan
def fake_quant_with_min_max_args(operands, results, numbers):
    inputs: TensorSpec = operands[0]
    cut = tiles(1, 1, inputs.size)
    bounds = (bits_of(inputs.dtype, numbers["min"]), bits_of(inputs.dtype, numbers["max"]))
    options = _quantization(numbers) | cut.constexprs
    # The pointers of the range are not read.
    return Plan(
        (
            launch(
                _fake_quant,
                cut.programs,
                (0, 0, 0, 1),
                (*cut.numbers, *bounds),
                BY_DIVISION=False,
                FIXED=True,
                **options,
            ),
        )
    )


def _with_ranges(operands: tuple[TensorSpec, ...], numbers: Any, by_division: bool) -> Plan:
    inputs, min, _ = operands
    cut = tiles_of(inputs, min)
    options = _quantization(numbers) | cut.constexprs
    return Plan(
        (
            launch(
                _fake_quant,
                cut.programs,
                (0, 1, 2, 3),
                (*cut.numbers, 0, 0),
                BY_DIVISION=by_division,
                FIXED=False,
                **options,
            ),
        )
    )


@plan
def fake_quant_with_min_max_vars(operands, results, numbers):
    return _with_ranges(operands, numbers, by_division=True)


@plan
def fake_quant_with_min_max_vars_per_channel(operands, results, numbers):
    return _with_ranges(operands, numbers, by_division=False)
