# SPDX-License-Identifier: Apache-2.0
"""How a call runs on a GPU, as data: which kernels, on what grid, with which arrays. Frontends allocate and run it.

A kernel's parameters are pointers (`_ptr`), then numbers, then constexprs (upper case). A plan is a function named like
the reference's, `(operands, results, numbers) -> Plan`; it depends on shapes, dtypes and attributes only, so the same
call launches the same programs on every card. Nothing is tuned at run time.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from exactqat.operators.declarations.plain_numbers import rounded
from exactqat.operators.declarations.specification import TensorSpec


class Launch(NamedTuple):
    """One kernel on a grid of programs. Made by `launch`."""

    kernel: Any
    grid: tuple[int]
    arrays: tuple[int, ...]  # the pointers, as indices into operands + results + scratch
    numbers: tuple[int, ...]
    options: dict[str, object]  # constexprs and the compiler's options


class Plan(NamedTuple):
    """Launches in their order. Results and scratch hold anything before the first one."""

    launches: tuple[Launch, ...]
    scratch: tuple[TensorSpec, ...] = ()


PlanFunction = Callable[[tuple[TensorSpec, ...], tuple[TensorSpec, ...], Mapping[str, int | float]], Plan]
PLANS: dict[str, PlanFunction] = {}


def plan(function: PlanFunction) -> PlanFunction:
    """Enter a plan under its name, the kernel's in the other rooms."""
    PLANS[function.__name__] = function
    return function


def launch(
    kernel: Any,
    programs: int,
    arrays: tuple[int, ...],
    numbers: tuple[int, ...] = (),
    *,
    num_warps: int = 4,
    **constexprs: object,
) -> Launch:
    """`programs` instances of a kernel. The compiler must not fuse a product and a sum that the reference rounds
    twice; where the reference fuses, kernels say so."""
    return Launch(
        kernel, (programs,), arrays, numbers, constexprs | {"num_warps": num_warps, "enable_fp_fusion": False}
    )


def run(planned: Plan, arrays: Sequence[object]) -> None:
    """Launch on the current device and stream. `arrays`: operands, results, scratch, dense and row-major."""
    for kernel, grid, indices, numbers, options in planned.launches:
        kernel[grid](*[arrays[i] for i in indices], *numbers, **options)


def bits_of(dtype: str, value: float) -> int:
    """A real attribute as the integer that carries its bits to a kernel, which reads it with `real`.

    Triton has float32 arguments only, and a constexpr would compile once for each value.
    """
    value = rounded(dtype, value)
    return struct.unpack("q", struct.pack("d", value))[0] if dtype == "float64" else _int32(value)


def _int32(value: float) -> int:
    return struct.unpack("i", struct.pack("f", value))[0]


@triton.jit
def real(bits, DTYPE: tl.constexpr):
    if tl.float64 == DTYPE:
        return tl.cast(bits, tl.int64).to(tl.float64, bitcast=True)
    else:
        return tl.cast(bits, tl.int32).to(tl.float32, bitcast=True)


# Elementwise kernels work on tiles of a matrix whose parameters (a range, a scale) belong to the whole matrix, to its
# columns or to its rows. SCATTERED: to its elements in turn, for bytes that hold several elements across rows.
WHOLE, COLUMNS, ROWS, SCATTERED = 0, 1, 2, 3
_TILE = 4096  # elements: 32 for each thread of 4 warps


class Tiles(NamedTuple):
    """A matrix cut into tiles: as many programs, with these numbers and constexprs."""

    programs: int
    numbers: tuple[int, int, int, int]  # rows, columns, column_blocks, channels
    constexprs: dict[str, int]  # PARAMETERS, BLOCK_ROWS, BLOCK_COLUMNS


def tiles(outer: int, channels: int, inner: int, elements: int = _TILE) -> Tiles:
    """`[outer, channels, inner]` with one parameter for each channel."""
    if outer * channels * inner == 0:
        return Tiles(0, (0, 0, 0, 0), {"PARAMETERS": WHOLE, "BLOCK_ROWS": 1, "BLOCK_COLUMNS": 1})
    if channels == 1:
        mode, rows, columns = WHOLE, 1, outer * inner
        block_rows, block_columns = 1, elements
    elif inner == 1:
        mode, rows, columns = COLUMNS, outer, channels
        # 16 columns are a run of memory that a GPU reads in one piece; wider blocks where few lanes are wasted.
        fitting = [b for b in (16, 32, 64, 128) if _padded(columns, b) <= _padded(columns, 16) * 9 // 8]
        block_columns = min(max(fitting), triton.next_power_of_2(columns))
        block_rows = elements // block_columns
    else:
        mode, rows, columns = ROWS, outer * channels, inner
        block_columns = min(triton.next_power_of_2(columns), elements // 2)
        block_rows = elements // block_columns
    column_blocks = -(-columns // block_columns)
    return Tiles(
        -(-rows // block_rows) * column_blocks,
        (rows, columns, column_blocks, channels),
        {"PARAMETERS": mode, "BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns},
    )


def _padded(size: int, block: int) -> int:
    return -(-size // block) * block


def tiles_of(operand: TensorSpec, parameter: TensorSpec) -> Tiles:
    """A tensor whose last dimension are channels, or, with a parameter of rank 0, with one parameter for all."""
    if parameter.rank == 0:
        return tiles(1, 1, operand.size)
    channels = parameter.size
    return tiles(operand.size // max(channels, 1), channels, 1)


def packed_tiles_of(operand: TensorSpec, parameter: TensorSpec) -> Tiles:
    """`tiles_of` with 4 elements of a row in each byte of a mask, whose tiles have a fourth of the columns."""
    if parameter.size == 1 or parameter.size % 4 == 0:
        return tiles_of(operand, parameter)
    whole = tiles(1, 1, operand.size)
    numbers = (*whole.numbers[:3], parameter.size)
    return whole._replace(numbers=numbers, constexprs=whole.constexprs | {"PARAMETERS": SCATTERED})


@triton.jit
def tile(
    rows,
    columns,
    column_blocks,
    channels,
    PARAMETERS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """This program's tile: int64 offsets and mask [BLOCK_ROWS, BLOCK_COLUMNS], index and mask of its parameters."""
    program = tl.program_id(0)
    if PARAMETERS == 0 or PARAMETERS == 3:
        column = program.to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
        mask = column < columns
        if PARAMETERS == 3:
            return column, mask, column % channels, mask
        else:
            index = tl.zeros([1, 1], tl.int64)
            return column, mask, index, index == 0
    else:
        row = (program // column_blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        column = (program % column_blocks).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
        offset = row * columns + column
        mask = (row < rows) & (column < columns)
        if PARAMETERS == 1:
            return offset, mask, column, column < columns
        else:
            return offset, mask, row % channels, row < rows
