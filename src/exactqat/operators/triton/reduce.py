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

   A channel's rows are those of `[outer, channels, inner]`, `outer * inner` of them. Several sums of the same rows
   share the items, `[blocks, sums, channels]`: each has its number.
2. `folded` plans the levels of the tree above until at most 512 items are left.
3. A kernel of the operator's takes `total` of them; `totals` is the launch of one that just rounds and stores it.

The plan's side of 1. is `sum_tiles`. FLUSH is for float64 operands: what is made of float32 ones has no denormals. No
step adds more than two values at a time except along a lane, so nothing is left to the compiler's reductions.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from exactqat.operators.declarations.specification import TensorSpec
from exactqat.operators.triton.arithmetic import flush, narrow
from exactqat.operators.triton.launch import Launch, launch

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
    blocks = max(-(-rows // BLOCK), 1)
    rows_padded = triton.next_power_of_2(blocks)
    # 512 elements in each of the 8 steps are 16 bytes for each thread; fewer where a card would not be filled. Runs of
    # memory go along the channels where these come last, else along the rows.
    wide = min(triton.next_power_of_2(max(channels, 1)), 64 if inner == 1 else max(64 // rows_padded, 1))
    while wide > 16 and -(-channels // wide) * wide > -(-channels // 16) * 16 * 9 // 8:
        wide //= 2
    together = min(64 // wide, rows_padded)
    while together * wide > 16 and -(-blocks // together) * -(-channels // wide) < 512:
        if wide == 1 or (inner == 1 and together > 1):
            together //= 2
        else:
            wide //= 2
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
def kept(v, FLUSH: tl.constexpr):
    """A float64 result, flushed if that can make a difference."""
    if FLUSH:
        return flush(v)
    else:
        return v


@triton.jit
def add_rows(lanes, values, valid, FLUSH: tl.constexpr):
    """One more row in each lane. Adding -0 changes nothing, not even -0."""
    return kept(lanes + tl.where(valid, values, -0.0), FLUSH)


@triton.jit
def fold_lanes(lanes, FLUSH: tl.constexpr):
    """[BLOCKS, 8, CHANNELS] -> [BLOCKS, CHANNELS]: lane i + lane i + 4, then i + 2, then i + 1."""
    BLOCKS: tl.constexpr = lanes.shape[0]
    CHANNELS: tl.constexpr = lanes.shape[2]
    fours = kept(tl.sum(tl.reshape(lanes, [BLOCKS, 2, 4, CHANNELS]), axis=1), FLUSH)
    twos = kept(tl.sum(tl.reshape(fours, [BLOCKS, 2, 2, CHANNELS]), axis=1), FLUSH)
    return kept(tl.sum(twos, axis=1), FLUSH)


@triton.jit
def store_sums(
    items_ptr,
    lanes,
    NUMBER: tl.constexpr,
    SUMS: tl.constexpr,
    first_block,
    channel,
    rows,
    channels,
    FLUSH: tl.constexpr,
):
    """The blocks' sums, as sum NUMBER of SUMS, into items `[blocks, SUMS, channels]`."""
    BLOCKS: tl.constexpr = lanes.shape[0]
    block = (first_block + tl.arange(0, BLOCKS))[:, None]
    column = channel[None, :]
    mask = ((block * _BLOCK < rows) | (block == 0)) & (column < channels)  # nothing has a sum too
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
def fold_block(items, FLUSH: tl.constexpr):
    """The sum of a whole block that is already in registers: [64, CHANNELS] -> [CHANNELS]. Absent items are -0."""
    CHANNELS: tl.constexpr = items.shape[1]
    # [lane, channel] of each of the steps 4 * high + 2 * middle + low
    steps = tl.permute(tl.reshape(items, [2, 2, 2, LANES, CHANNELS]), (3, 4, 0, 1, 2))
    even, odd = tl.split(steps)
    step_0_4, step_2_6 = tl.split(even)
    step_1_5, step_3_7 = tl.split(odd)
    step_0, step_4 = tl.split(step_0_4)
    step_1, step_5 = tl.split(step_1_5)
    step_2, step_6 = tl.split(step_2_6)
    step_3, step_7 = tl.split(step_3_7)
    lanes = kept(kept(step_0 + 0.0, FLUSH) + step_1, FLUSH)
    lanes = kept(kept(lanes + step_2, FLUSH) + step_3, FLUSH)
    lanes = kept(kept(lanes + step_4, FLUSH) + step_5, FLUSH)
    lanes = kept(kept(lanes + step_6, FLUSH) + step_7, FLUSH)
    return tl.reshape(fold_lanes(tl.reshape(lanes, [1, LANES, CHANNELS]), FLUSH), [CHANNELS])


@triton.jit
def total(items_ptr, count, width, column, known, FLUSH: tl.constexpr, BLOCKS: tl.constexpr = 8):
    """The sum of the items that `folded` left, at most 64 * BLOCKS, in each of some columns: float64, like `column`,
    int64 [COLUMNS]."""
    COLUMNS: tl.constexpr = column.shape[0]
    lanes = no_lanes(BLOCKS, COLUMNS)
    for step in tl.static_range(STEPS):
        item = rows_of(0, step, BLOCKS)
        valid = (item < count) & known[None, None, :]
        items = tl.load(items_ptr + item.to(tl.int64) * width + column[None, None, :], valid, other=0.0)
        lanes = add_rows(lanes, items, valid, FLUSH)
    # The blocks' sums are the lanes of the last level. Lanes beyond them, or a level above a single block, would add
    # zeros, and no sum is -0.
    sums = fold_lanes(lanes, FLUSH)
    if BLOCKS == 8:
        sums = kept(tl.sum(tl.reshape(sums, [2, 4, COLUMNS]), axis=0), FLUSH)
    if BLOCKS >= 4:
        sums = kept(tl.sum(tl.reshape(sums, [2, 2, COLUMNS]), axis=0), FLUSH)
    if BLOCKS >= 2:
        return kept(tl.sum(tl.reshape(sums, [2, COLUMNS]), axis=0), FLUSH)
    else:
        return tl.reshape(sums, [COLUMNS])


@triton.jit
def _totals(
    items_ptr,  # [count, width] float64
    sums_ptr,  # [width]
    count,
    width,
    FLUSH: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < width
    sums = narrow(total(items_ptr, count, width, column, known, FLUSH, BLOCKS), tl.float64 if FLUSH else tl.float32)
    tl.store(sums_ptr + column, sums.to(sums_ptr.dtype.element_ty), known)


class Folded(NamedTuple):
    """From blocks' sums to the few items that `total` takes."""

    launches: tuple[Launch, ...]
    scratch: tuple[TensorSpec, ...]  # the blocks' sums, then each further level
    items: int  # the array that holds the items left
    count: int  # type: ignore[assignment]  # how many they are
    blocks: int  # what `total` wants to know: for how many blocks of them there must be room

    def columns(self) -> int:
        """How many columns at once are a tile of 1024 items."""
        return 128 // self.blocks


def folded(first: int, blocks: int, width: int, flush: bool) -> Folded:
    """The tree above blocks' sums `[blocks, width]`, which are array number `first`; further levels follow it."""
    launches, scratch, items, count = [], [TensorSpec((blocks, width), "float64")], first, blocks
    while count > _FEW:
        cut = sum_tiles(count, width)
        numbers = (count, width, cut.channel_blocks)
        launches.append(launch(_fold, cut.programs, (items, items + 1), numbers, FLUSH=flush, **cut.constexprs))
        items, count = items + 1, math.ceil(count / BLOCK)
        scratch.append(TensorSpec((count, width), "float64"))
    return Folded(tuple(launches), tuple(scratch), items, count, triton.next_power_of_2(max(-(-count // BLOCK), 1)))


def totals(tree: Folded, sums: int, width: int, flush: bool) -> Launch:
    """The last level, each total rounded into array number `sums`, [width]."""
    columns = tree.columns()
    return launch(
        _totals,
        -(-width // columns),
        (tree.items, sums),
        (tree.count, width),
        FLUSH=flush,
        BLOCKS=tree.blocks,
        COLUMNS=columns,
    )
