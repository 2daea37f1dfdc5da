# SPDX-License-Identifier: Apache-2.0
"""The one order in which this library sums (docs/decisions/summation-order.md, reference/summation.py), on a GPU.

Three steps, in float64, whatever the sizes of the tiles, the grid or the card:

1. A kernel of the operator's own adds rows to lanes and stores the sum of each block of 64 rows:

       first_block, channel, known = sum_tile(channels, channel_blocks, BLOCKS, CHANNELS)
       lanes = no_lanes(BLOCKS, CHANNELS)
       for step in tl.static_range(STEPS):
           row = rows_of(first_block, step, BLOCKS)  # [BLOCKS, LANES, 1]
           valid = (row < rows) & known[None, None, :]
           ...
           lanes = add_rows(lanes, values, valid, FLUSH)
       store_sums(items_ptr, lanes, 0, 1, first_block, channel, rows, channels, FLUSH)

   A channel's rows are those of `[outer, channels, inner]`, `outer * inner` of them. Several sums of the same rows share
   the items, `[blocks, sums, channels]`: each has its number.
2. `folded` plans the levels of the tree above until at most 512 items are left.
3. The operator's last kernel takes `total` of them.

The plan's side of 1. is `sum_tiles`. FLUSH is for float64 operands: what is made of float32 ones has no denormals. No
step adds more than two values at a time except along a lane, so nothing is left to the compiler's reductions.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from exactqat.spec.op import TensorSpec
from exactqat.triton.arithmetic import flush
from exactqat.triton.launch import Launch, launch

BLOCK = 64
LANES = tl.constexpr(8)
STEPS = tl.constexpr(8)
_BLOCK = tl.constexpr(BLOCK)
_FEW = 512  # items: 8 blocks, two levels of the tree, one tile


class SumTiles(NamedTuple):
    """Rows cut into tiles of whole blocks: as many programs, with these constexprs."""

    programs: int
    blocks: int
    channel_blocks: int
    constexprs: dict[str, int]  # BLOCKS, CHANNELS


def sum_tiles(rows: int, channels: int, inner: int = 1) -> SumTiles:
    """How the sums over `rows` rows of each channel are spread over programs."""
    if inner == 1:
        wide = min(triton.next_power_of_2(max(channels, 1)), 64)
        while wide > 16 and -(-channels // wide) * wide > -(-channels // 16) * 16 * 9 // 8:
            wide //= 2
    else:
        wide = 1
    # 512 elements in each of the 8 steps are 16 bytes for each thread; fewer where a card would not be filled.
    blocks = max(-(-rows // BLOCK), 1)
    together = min(64 // wide, triton.next_power_of_2(blocks))
    while together * wide > 16 and -(-blocks // together) * -(-channels // wide) < 512:
        together, wide = (together // 2, wide) if together > 1 else (together, wide // 2)
    channel_blocks = -(-channels // wide)
    return SumTiles(
        -(-blocks // together) * channel_blocks, blocks, channel_blocks, {"BLOCKS": together, "CHANNELS": wide}
    )


@triton.jit
def sum_tile(channels, channel_blocks, BLOCKS: tl.constexpr, CHANNELS: tl.constexpr):
    """This program's first block (int64), its channels (int64 [CHANNELS]) and which of them there are."""
    program = tl.program_id(0)
    first_block = (program // channel_blocks).to(tl.int64) * BLOCKS
    channel = (program % channel_blocks).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    return first_block, channel, channel < channels


@triton.jit
def no_lanes(BLOCKS: tl.constexpr, CHANNELS: tl.constexpr):
    return tl.zeros([BLOCKS, LANES, CHANNELS], tl.float64)


@triton.jit
def rows_of(first_block, STEP: tl.constexpr, BLOCKS: tl.constexpr):
    """The rows that the lanes add in a step: int64 [BLOCKS, LANES, 1]."""
    local = (tl.arange(0, BLOCKS) * _BLOCK)[:, None, None] + (tl.arange(0, LANES) + STEP * LANES)[None, :, None]
    return first_block * _BLOCK + local


@triton.jit
def _kept(v, FLUSH: tl.constexpr):
    if FLUSH:
        return flush(v)
    else:
        return v


@triton.jit
def add_rows(lanes, values, valid, FLUSH: tl.constexpr):
    """One more row in each lane. Adding -0 changes nothing, not even -0."""
    return _kept(lanes + tl.where(valid, values, -0.0), FLUSH)


@triton.jit
def fold_lanes(lanes, FLUSH: tl.constexpr):
    """[BLOCKS, 8, CHANNELS] -> [BLOCKS, CHANNELS]: lane i + lane i + 4, then i + 2, then i + 1."""
    BLOCKS: tl.constexpr = lanes.shape[0]
    CHANNELS: tl.constexpr = lanes.shape[2]
    fours = _kept(tl.sum(tl.reshape(lanes, [BLOCKS, 2, 4, CHANNELS]), axis=1), FLUSH)
    twos = _kept(tl.sum(tl.reshape(fours, [BLOCKS, 2, 2, CHANNELS]), axis=1), FLUSH)
    return _kept(tl.sum(twos, axis=1), FLUSH)


@triton.jit
def store_sums(
    items_ptr, lanes, NUMBER: tl.constexpr, SUMS: tl.constexpr, first_block, channel, rows, channels, FLUSH: tl.constexpr
):
    """The blocks' sums, as sum NUMBER of SUMS, into items `[blocks, SUMS, channels]`."""
    BLOCKS: tl.constexpr = lanes.shape[0]
    block = (first_block + tl.arange(0, BLOCKS))[:, None]
    column = channel[None, :]
    mask = (block * _BLOCK < rows) & (column < channels)
    tl.store(items_ptr + (block * SUMS + NUMBER) * channels + column, fold_lanes(lanes, FLUSH), mask)


@triton.jit
def _fold(
    items_ptr,  # [count, width] float64
    sums_ptr,  # [ceil(count / 64), width] float64
    count,
    width,
    column_blocks,
    FLUSH: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    first_block, column, known = sum_tile(width, column_blocks, BLOCKS, CHANNELS)
    lanes = no_lanes(BLOCKS, CHANNELS)
    for step in tl.static_range(STEPS):
        item = rows_of(first_block, step, BLOCKS)
        valid = (item < count) & known[None, None, :]
        items = tl.load(items_ptr + item * width + column[None, None, :], valid, other=0.0)
        lanes = add_rows(lanes, items, valid, FLUSH)
    store_sums(sums_ptr, lanes, 0, 1, first_block, column, count, width, FLUSH)


@triton.jit
def total(items_ptr, count, width, column, known, FLUSH: tl.constexpr):
    """The sum of up to 512 items in each of some columns: float64, like `column`, int64 [COLUMNS]."""
    COLUMNS: tl.constexpr = column.shape[0]
    lanes = no_lanes(8, COLUMNS)
    for step in tl.static_range(STEPS):
        item = rows_of(0, step, 8)
        valid = (item < count) & known[None, None, :]
        items = tl.load(items_ptr + item.to(tl.int64) * width + column[None, None, :], valid, other=0.0)
        lanes = add_rows(lanes, items, valid, FLUSH)
    # The 8 blocks' sums are the lanes of the last level. Where there is one block only this adds zeros to its sum,
    # which is never -0.
    blocks = tl.reshape(fold_lanes(lanes, FLUSH), [1, 8, COLUMNS])
    return tl.reshape(fold_lanes(blocks, FLUSH), [COLUMNS])


class Folded(NamedTuple):
    """From blocks' sums to the few items that `total` takes."""

    launches: tuple[Launch, ...]
    scratch: tuple[TensorSpec, ...]  # the blocks' sums, then each further level
    items: int  # the array that holds the items left
    count: int  # how many they are


def folded(first: int, blocks: int, width: int, flush: bool) -> Folded:
    """The tree above blocks' sums `[blocks, width]`, which are array number `first`; further levels follow it."""
    launches, scratch, items, count = [], [TensorSpec((blocks, width), "float64")], first, blocks
    while count > _FEW:
        cut = sum_tiles(count, width)
        numbers = (count, width, cut.channel_blocks)
        launches.append(launch(_fold, cut.programs, (items, items + 1), numbers, FLUSH=flush, **cut.constexprs))
        items, count = items + 1, math.ceil(count / BLOCK)
        scratch.append(TensorSpec((count, width), "float64"))
    return Folded(tuple(launches), tuple(scratch), items, count)
