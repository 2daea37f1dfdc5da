# SPDX-License-Identifier: Apache-2.0
"""FusedBatchNorm* and its gradient: the same arithmetic as reference/fused_batch_norm.py.

Each operator is the sums over the rows of every channel (reduce.py), one small kernel that turns them, in float64, into
the result's vectors and into coefficients, and one pass over the image with these, in its own dtype. FLUSH marks
float64 operands: what is made in float64 of float32 ones never comes near the denormals of float64.
"""

import triton
import triton.language as tl

from exactqat.operators.declarations.specification import TensorSpec
from exactqat.operators.triton.arithmetic import add, flush, multiply, narrow, subtract, widened
from exactqat.operators.triton.launch import Launch, Plan, bits_of, launch, plan, real, tile, tiles
from exactqat.operators.triton.reduce import (
    BLOCK,
    LANES,
    STEPS,
    Folded,
    SumTiles,
    add_rows,
    folded,
    kept,
    no_lanes,
    store_sums,
    sum_tile,
    sum_tiles,
    total,
    totals,
)

# Where the rows of a channel lie: next to the other channels, or in planes, with 8 rows from a multiple of 8 on always
# in one plane or not.
_CHANNELS_LAST, _PLANES, _PLANES_OF_EIGHTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_BLOCK = tl.constexpr(BLOCK)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _places(
    first_block, STEP: tl.constexpr, channel, known, rows, channels, inner, LAYOUT: tl.constexpr, BLOCKS: tl.constexpr
):
    """Offsets into `[outer, channels, inner]` of the rows that the lanes add in a step, and which of them there are:
    [BLOCKS, LANES, CHANNELS]."""
    lane = tl.arange(0, LANES)[None, :, None]
    start = (tl.arange(0, BLOCKS) * _BLOCK + STEP * LANES)[:, None, None]
    first = first_block * _BLOCK
    row = first + start + lane
    column = channel[None, None, :]
    valid = (row < rows) & known[None, None, :]
    if LAYOUT == _CHANNELS_LAST:
        return row * channels + column, valid
    else:
        # One division of 64 bits for the program, then 32 bits are enough for all but enormous planes.
        image = first // inner
        position = first - image * inner
        if LAYOUT == _PLANES:
            start += lane
        if inner.dtype == tl.int64:
            ahead = position + start
            images, positions = ahead // inner, ahead % inner
        else:
            ahead = position.to(tl.uint32) + start.to(tl.uint32)
            images, positions = ahead // inner.to(tl.uint32), ahead % inner.to(tl.uint32)
        plane = (image + images.to(tl.int64)) * channels + column
        offset = plane * inner + positions.to(tl.int64)
        if LAYOUT == _PLANES_OF_EIGHTS:
            offset = tl.multiple_of(offset + lane, [1, 8, 1])
        return offset, valid


@triton.jit
def _exactly(v):
    return flush(widened(v)).to(tl.float64)


@triton.jit
def _rounded(v, FLUSH: tl.constexpr):
    """A float64 number of a channel in the dtype that its elements are computed in."""
    return narrow(v, tl.float64 if FLUSH else tl.float32)


@triton.jit
def _vector(pointer, channel, known):
    return _exactly(tl.load(pointer + channel, known, other=0.0))


@triton.jit
def _first_of(x_ptr, channel, known, inner):
    """The first value of each channel, if it is finite: what batch statistics are shifted by."""
    first = _exactly(tl.load(x_ptr + channel * inner, known, other=0.0))
    return tl.where(tl.abs(first) < _INFINITY, first, 0.0)


@triton.jit
def _moment_sums(
    x_ptr,  # [outer, channels, inner]
    items_ptr,  # [blocks, 2, channels]
    rows,
    channels,
    inner,
    channel_blocks,
    LAYOUT: tl.constexpr,
    FLUSH: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    first_block, channel, known = sum_tile(channels, channel_blocks, BLOCKS, CHANNELS)
    first = _first_of(x_ptr, channel, known, inner)[None, None, :]
    sums, squares = no_lanes(BLOCKS, CHANNELS), no_lanes(BLOCKS, CHANNELS)
    for step in tl.static_range(STEPS):
        offset, valid = _places(first_block, step, channel, known, rows, channels, inner, LAYOUT, BLOCKS)
        shifted = kept(_exactly(tl.load(x_ptr + offset, valid, other=0.0)) - first, FLUSH)
        sums = add_rows(sums, shifted, valid, FLUSH)
        squares = add_rows(squares, kept(shifted * shifted, FLUSH), valid, FLUSH)
    store_sums(items_ptr, sums, 0, 2, first_block, channel, rows, channels, FLUSH)
    store_sums(items_ptr, squares, 1, 2, first_block, channel, rows, channels, FLUSH)


@triton.jit
def _normalization(
    x_ptr,  # [outer, channels, inner]
    scale_ptr,  # [channels]
    offset_ptr,
    mean_ptr,  # [channels], or anything if not read
    variance_ptr,
    items_ptr,  # [count, 2, channels] if TRAINING
    batch_mean_ptr,  # [channels]
    batch_variance_ptr,
    reserve_space_1_ptr,
    reserve_space_2_ptr,
    reserve_space_3_ptr,  # [] if V3
    coefficients_ptr,  # [3, channels]: mean, factor, offset
    count,
    rows,
    channels,
    inner,
    epsilon,  # bits
    exponential_avg_factor,  # bits
    TRAINING: tl.constexpr,
    KEEPS_OLD: tl.constexpr,
    EMPTY: tl.constexpr,
    V3: tl.constexpr,
    FLUSH: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    REAL: tl.constexpr = batch_mean_ptr.dtype.element_ty
    channel = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    known = channel < channels
    if V3:
        # Every program writes the same zero.
        tl.store(reserve_space_3_ptr, 0.0)
    if EMPTY:
        zeros = tl.zeros([COLUMNS], REAL)
        tl.store(batch_mean_ptr + channel, tl.full([COLUMNS], float("nan"), REAL), known)
        tl.store(batch_variance_ptr + channel, tl.full([COLUMNS], float("nan"), REAL), known)
        tl.store(reserve_space_1_ptr + channel, zeros, known)
        tl.store(reserve_space_2_ptr + channel, zeros, known)
    else:
        if TRAINING:
            items = tl.cast(rows, tl.float64)
            first = _first_of(x_ptr, channel, known, inner)
            sums = total(items_ptr, count, 2 * channels, channel, known, FLUSH, BLOCKS)
            squares = total(items_ptr, count, 2 * channels, channels + channel, known, FLUSH, BLOCKS)
            mean = kept(first + kept(sums / items, FLUSH), FLUSH)
            square_of_sum = kept(kept(sums * sums, FLUSH) / items, FLUSH)
            variance = kept(kept(squares - square_of_sum, FLUSH) / items, FLUSH)
            variance = tl.where(variance < 0.0, 0.0, variance)
            running_mean = mean
            running_variance = kept(variance * (items / tl.maximum(items - 1.0, 1.0)), FLUSH)
            if KEEPS_OLD:
                new = real(exponential_avg_factor, REAL).to(tl.float64)
                old = 1.0 - new
                old_mean, old_variance = _vector(mean_ptr, channel, known), _vector(variance_ptr, channel, known)
                running_mean = kept(kept(old * old_mean, FLUSH) + kept(new * running_mean, FLUSH), FLUSH)
                running_variance = kept(kept(old * old_variance, FLUSH) + kept(new * running_variance, FLUSH), FLUSH)
        else:
            mean, variance = _vector(mean_ptr, channel, known), _vector(variance_ptr, channel, known)
            running_mean, running_variance = mean, variance
        epsilon_exactly = real(epsilon, REAL).to(tl.float64)
        factor = kept(1.0 / tl.sqrt(kept(variance + epsilon_exactly, FLUSH)), FLUSH)
        factor = kept(factor * _vector(scale_ptr, channel, known), FLUSH)
        rounded = _rounded(mean, FLUSH)
        left_out = kept(rounded.to(tl.float64) - mean, FLUSH)
        offset = _vector(offset_ptr, channel, known)
        # Where nothing is left out nothing is added, not even nothing times infinity.
        offset = tl.where(left_out == 0.0, offset, kept(offset + kept(left_out * factor, FLUSH), FLUSH))
        tl.store(coefficients_ptr + channel, rounded, known)
        tl.store(coefficients_ptr + channels + channel, _rounded(factor, FLUSH), known)
        tl.store(coefficients_ptr + 2 * channels + channel, _rounded(offset, FLUSH), known)
        tl.store(batch_mean_ptr + channel, narrow(running_mean, REAL), known)
        tl.store(batch_variance_ptr + channel, narrow(running_variance, REAL), known)
        tl.store(reserve_space_1_ptr + channel, narrow(mean, REAL), known)
        tl.store(reserve_space_2_ptr + channel, narrow(variance, REAL), known)


@triton.jit
def _normalize(
    x_ptr,  # [rows, columns]
    coefficients_ptr,  # [3, channels]: mean, factor, offset
    y_ptr,  # [rows, columns]
    rows,
    columns,
    column_blocks,
    channels,
    PARAMETERS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    offset, mask, index, known = tile(rows, columns, column_blocks, channels, PARAMETERS, BLOCK_ROWS, BLOCK_COLUMNS)
    mean = tl.load(coefficients_ptr + index, known, other=0.0)
    factor = tl.load(coefficients_ptr + channels + index, known, other=0.0)
    shift = tl.load(coefficients_ptr + 2 * channels + index, known, other=0.0)
    x = flush(widened(tl.load(x_ptr + offset, mask, other=0.0)))
    y = add(multiply(subtract(x, mean), factor), shift)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def _gradient_sums(
    y_backprop_ptr,  # [outer, channels, inner]
    x_ptr,
    mean_ptr,  # [channels]
    items_ptr,  # [blocks, 2, channels]
    rows,
    channels,
    inner,
    channel_blocks,
    LAYOUT: tl.constexpr,
    FLUSH: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    first_block, channel, known = sum_tile(channels, channel_blocks, BLOCKS, CHANNELS)
    mean = _vector(mean_ptr, channel, known)[None, None, :]
    sums, products = no_lanes(BLOCKS, CHANNELS), no_lanes(BLOCKS, CHANNELS)
    for step in tl.static_range(STEPS):
        offset, valid = _places(first_block, step, channel, known, rows, channels, inner, LAYOUT, BLOCKS)
        gradients = _exactly(tl.load(y_backprop_ptr + offset, valid, other=0.0))
        centered = kept(_exactly(tl.load(x_ptr + offset, valid, other=0.0)) - mean, FLUSH)
        sums = add_rows(sums, gradients, valid, FLUSH)
        products = add_rows(products, kept(gradients * centered, FLUSH), valid, FLUSH)
    store_sums(items_ptr, sums, 0, 2, first_block, channel, rows, channels, FLUSH)
    store_sums(items_ptr, products, 1, 2, first_block, channel, rows, channels, FLUSH)


@triton.jit
def _gradient_coefficients(
    scale_ptr,  # [channels]
    mean_ptr,
    variance_ptr,
    items_ptr,  # [count, 2, channels] unless EMPTY
    scale_backprop_ptr,  # [channels]
    offset_backprop_ptr,
    coefficients_ptr,  # [4, channels]: factor, gradient_mean, mean, slope
    count,
    rows,
    channels,
    epsilon,  # bits
    EMPTY: tl.constexpr,
    FLUSH: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    REAL: tl.constexpr = scale_backprop_ptr.dtype.element_ty
    channel = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    known = channel < channels
    if EMPTY:
        zeros = tl.zeros([COLUMNS], REAL)
        tl.store(scale_backprop_ptr + channel, zeros, known)
        tl.store(offset_backprop_ptr + channel, zeros, known)
    else:
        items = tl.cast(rows, tl.float64)
        sums = total(items_ptr, count, 2 * channels, channel, known, FLUSH, BLOCKS)
        products = total(items_ptr, count, 2 * channels, channels + channel, known, FLUSH, BLOCKS)
        variance = _vector(variance_ptr, channel, known)
        inverse = kept(1.0 / tl.sqrt(kept(variance + real(epsilon, REAL).to(tl.float64), FLUSH)), FLUSH)
        factor = kept(_vector(scale_ptr, channel, known) * inverse, FLUSH)
        slope = kept(kept(inverse * inverse, FLUSH) * kept(products / items, FLUSH), FLUSH)
        mean = _vector(mean_ptr, channel, known)
        tl.store(coefficients_ptr + channel, _rounded(factor, FLUSH), known)
        tl.store(coefficients_ptr + channels + channel, _rounded(kept(sums / items, FLUSH), FLUSH), known)
        tl.store(coefficients_ptr + 2 * channels + channel, _rounded(mean, FLUSH), known)
        tl.store(coefficients_ptr + 3 * channels + channel, _rounded(slope, FLUSH), known)
        tl.store(scale_backprop_ptr + channel, narrow(kept(products * inverse, FLUSH), REAL), known)
        tl.store(offset_backprop_ptr + channel, narrow(sums, REAL), known)


@triton.jit
def _x_backprop(
    y_backprop_ptr,  # [rows, columns]
    x_ptr,  # read if TRAINING
    coefficients_ptr,  # [4, channels]: factor, gradient_mean, mean, slope
    x_backprop_ptr,  # [rows, columns]
    rows,
    columns,
    column_blocks,
    channels,
    TRAINING: tl.constexpr,
    PARAMETERS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    offset, mask, index, known = tile(rows, columns, column_blocks, channels, PARAMETERS, BLOCK_ROWS, BLOCK_COLUMNS)
    factor = tl.load(coefficients_ptr + index, known, other=0.0)
    gradients = flush(widened(tl.load(y_backprop_ptr + offset, mask, other=0.0)))
    if TRAINING:
        gradient_mean = tl.load(coefficients_ptr + channels + index, known, other=0.0)
        mean = tl.load(coefficients_ptr + 2 * channels + index, known, other=0.0)
        slope = tl.load(coefficients_ptr + 3 * channels + index, known, other=0.0)
        centered = subtract(flush(widened(tl.load(x_ptr + offset, mask, other=0.0))), mean)
        gradients = subtract(subtract(gradients, gradient_mean), multiply(centered, slope))
    tl.store(x_backprop_ptr + offset, multiply(factor, gradients).to(x_backprop_ptr.dtype.element_ty), mask)


@triton.jit
def _row_sums(
    x_ptr,  # [outer, channels, inner]
    items_ptr,  # [blocks, channels]
    rows,
    channels,
    inner,
    channel_blocks,
    LAYOUT: tl.constexpr,
    FLUSH: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    first_block, channel, known = sum_tile(channels, channel_blocks, BLOCKS, CHANNELS)
    sums = no_lanes(BLOCKS, CHANNELS)
    for step in tl.static_range(STEPS):
        offset, valid = _places(first_block, step, channel, known, rows, channels, inner, LAYOUT, BLOCKS)
        sums = add_rows(sums, _exactly(tl.load(x_ptr + offset, valid, other=0.0)), valid, FLUSH)
    store_sums(items_ptr, sums, 0, 1, first_block, channel, rows, channels, FLUSH)


def _layout(inner: int) -> int:
    if inner == 1:
        return _CHANNELS_LAST.value
    return _PLANES.value if inner % 8 else _PLANES_OF_EIGHTS.value


class _Shape:
    """What all the plans need of `[outer, channels, inner]`."""

    def __init__(self, operands: tuple[TensorSpec, ...], numbers, sums: int, first: int):
        self.outer, self.channels, self.inner = (int(numbers[key]) for key in ("outer", "channels", "inner"))
        self.rows = self.outer * self.inner
        self.empty = self.rows * self.channels == 0
        self.flush = operands[0].dtype == "float64"
        self.cut: SumTiles = sum_tiles(self.rows, self.channels, self.inner)
        self.tree: Folded = folded(first, self.cut.blocks, sums * self.channels, self.flush)
        # Half of a tile: two sums are taken.
        self.columns = max(self.tree.columns() // 2, 1)
        self.vector_programs = max(-(-self.channels // self.columns), 1)

    def summed(self, kernel, *arrays: int) -> tuple[Launch, ...]:
        """The sums over rows and the tree above them."""
        if self.empty:
            return ()
        numbers = (self.rows, self.channels, self.inner, self.cut.channel_blocks)
        sums = launch(
            kernel,
            self.cut.programs,
            arrays,
            numbers,
            LAYOUT=_layout(self.inner),
            FLUSH=self.flush,
            **self.cut.constexprs,
        )
        return (sums, *self.tree.launches)

    def elementwise(self, kernel, *arrays: int, **constexprs) -> tuple[Launch, ...]:
        if self.empty:
            return ()
        cut = tiles(self.outer, self.channels, self.inner)
        return (launch(kernel, cut.programs, arrays, cut.numbers, **constexprs, **cut.constexprs),)

    def coefficients(self, how_many: int) -> TensorSpec:
        return TensorSpec((how_many, self.channels), "float64" if self.flush else "float32")


@plan
def fused_batch_norm(operands, results, numbers):
    training, v3 = bool(numbers["is_training"]), len(results) > 5
    first = len(operands) + len(results)
    # Scratch: the coefficients, then the blocks' sums.
    shape = _Shape(operands, numbers, 2, first + 1)
    dtype = results[1].dtype
    x, scale, offset, mean, variance, y, *vectors = range(first)
    sums = shape.summed(_moment_sums, x, first + 1) if training else ()
    items = shape.tree.items if sums else first
    coefficients = launch(
        _normalization,
        shape.vector_programs,
        (x, scale, offset, mean, variance, items, *vectors[:4], vectors[4] if v3 else vectors[0], first),
        (
            shape.tree.count,
            shape.rows,
            shape.channels,
            shape.inner,
            bits_of(dtype, numbers["epsilon"]),
            bits_of(dtype, numbers["exponential_avg_factor"]),
        ),
        TRAINING=training,
        KEEPS_OLD=numbers["exponential_avg_factor"] != 1.0,
        EMPTY=shape.empty,
        V3=v3,
        FLUSH=shape.flush,
        BLOCKS=shape.tree.blocks,
        COLUMNS=shape.columns,
    )
    launches = (*sums, coefficients, *shape.elementwise(_normalize, x, first, y))
    return Plan(launches, (shape.coefficients(3), *(shape.tree.scratch if sums else ())))


@plan
def fused_batch_norm_grad(operands, results, numbers):
    y_backprop, x, scale, mean, variance = range(5)
    x_backprop, scale_backprop, offset_backprop = range(len(operands), len(operands) + 3)
    first = len(operands) + len(results)
    shape = _Shape(operands, numbers, 2, first + 1)
    sums = shape.summed(_gradient_sums, y_backprop, x, mean, first + 1)
    coefficients = launch(
        _gradient_coefficients,
        shape.vector_programs,
        (scale, mean, variance, shape.tree.items, scale_backprop, offset_backprop, first),
        (shape.tree.count, shape.rows, shape.channels, bits_of(results[1].dtype, numbers["epsilon"])),
        EMPTY=shape.empty,
        FLUSH=shape.flush,
        BLOCKS=shape.tree.blocks,
        COLUMNS=shape.columns,
    )
    training = bool(numbers["is_training"])
    rest = shape.elementwise(_x_backprop, y_backprop, x, first, x_backprop, TRAINING=training)
    return Plan((*sums, coefficients, *rest), (shape.coefficients(4), *shape.tree.scratch))


@plan
def channel_sum(operands, results, numbers):
    shape = _Shape(operands, numbers, 1, 2)
    sums = launch(
        _row_sums,
        shape.cut.programs,
        (0, 2),
        (shape.rows, shape.channels, shape.inner, shape.cut.channel_blocks),
        LAYOUT=_layout(shape.inner),
        FLUSH=shape.flush,
        **shape.cut.constexprs,
    )
    last = totals(shape.tree, 1, shape.channels, shape.flush)
    return Plan((sums, *shape.tree.launches, last), shape.tree.scratch)
