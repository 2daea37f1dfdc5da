# SPDX-License-Identifier: Apache-2.0
"""DepthwiseConv2dNative and its two gradients: the same chains of fused multiply-adds as
reference/depthwise_conv2d.py, in both layouts.

The forward operator and the input gradient compute a tile of pixels and channels for each program. They have two ways
to go through the taps. The exact one does what the reference does: it flushes denormals before and after every step and
leaves out taps that miss the image. The quick one is a bare chain in which a tap that misses adds 0. Both give the same
bits if no value can become denormal and no 0 can meet an infinite or NaN factor; that is seen from the exponents of
what the tile has read, at a cost of two integer operations for each tap, and a tile for which it is not so is computed
again the exact way.
"""

import triton
import triton.language as tl

from exactqat.triton.arithmetic import flush, fused_multiply_add, widened
from exactqat.triton.launch import Plan, launch, plan
from exactqat.triton.reduce import BLOCK, fold_block, folded, totals

_BLOCK = tl.constexpr(BLOCK)
_ELEMENTS = 4096  # results of a program, 32 for each thread of 4 warps
_UNROLLED = 64  # taps up to which the quick way is compiled
_MOST_TAPS = 25  # sums that a program of the filter gradient holds in registers
_NOTHING = tl.constexpr(0xFFFFFFFF)
_INFINITE = tl.constexpr(0xFEFFFFFF)  # the key of infinity; NaN has larger ones


@triton.jit
def _key(v):
    """A float32's order among magnitudes, zero last: twice its bits, which drops the sign, minus 1. The 8 highest bits
    are the biased exponent, or 1 less for a power of two, and 255 for zero."""
    bits = v.to(tl.uint32, bitcast=True)
    return bits + bits - 1


@triton.jit
def _unsafe(values, weights, largest_weight):
    """Whether the quick way may differ, from the smallest keys of what was read and the largest one of the weights.

    24-bit values of exponent e are multiples of 2**(e - 23). Exponents that add up to at least -80 make all products,
    so all sums, multiples of 2**-126.
    """
    values, weights = values >> 24, weights >> 24
    return (values < 1) | (values + weights < 2 * 127 - 80) | (largest_weight >= _INFINITE)


@triton.jit
def _tile(
    row_blocks,
    column_blocks,
    channel_blocks,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    LARGE: tl.constexpr,
):
    """This program's image (int64), rows and columns [ROWS * COLUMNS] and channels [CHANNELS]."""
    program = tl.program_id(0)
    channel = (program % channel_blocks) * CHANNELS + tl.arange(0, CHANNELS)
    program = program // channel_blocks
    pixel = tl.arange(0, ROWS * COLUMNS)
    row, column = pixel // COLUMNS, pixel % COLUMNS
    column_block = program % column_blocks
    program = program // column_blocks
    row_block = program % row_blocks
    if LARGE:
        row, column = row.to(tl.int64), column.to(tl.int64)
        row_block, column_block = row_block.to(tl.int64), column_block.to(tl.int64)
    return (program // row_blocks).to(tl.int64), row_block * ROWS + row, column_block * COLUMNS + column, channel


@triton.jit
def _image(pointer, image, channel, height, width, channels, CHANNELS_FIRST: tl.constexpr):
    """Pointers to a pixel (0, 0) for each channel: [1, CHANNELS]."""
    if CHANNELS_FIRST:
        return pointer + (image * channels + channel[None, :]) * height * width
    else:
        return pointer + image * height * width * channels + channel[None, :]


@triton.jit
def _pixels(row, column, width, channels, CHANNELS_FIRST: tl.constexpr):
    """Offsets of pixels from (0, 0): [PIXELS, 1]."""
    offset = row.to(tl.int64) * width + column
    if CHANNELS_FIRST:
        return offset[:, None]
    else:
        return (offset * channels)[:, None]


@triton.jit
def _forward_tap(
    image_ptr,
    filter_ptr,
    row,
    column,
    channel,
    known,
    di,
    dj,
    input_height,
    input_width,
    channels,
    outputs,
    FILTER_WIDTH: tl.constexpr,
    STRIDE_HEIGHT: tl.constexpr,
    STRIDE_WIDTH: tl.constexpr,
    DILATION_HEIGHT: tl.constexpr,
    DILATION_WIDTH: tl.constexpr,
    PAD_TOP: tl.constexpr,
    PAD_LEFT: tl.constexpr,
    CHANNELS_FIRST: tl.constexpr,
):
    """What a tap of the filter meets: values and mask [PIXELS, CHANNELS], weights [1, CHANNELS]."""
    i = row * STRIDE_HEIGHT + (di * DILATION_HEIGHT - PAD_TOP)
    j = column * STRIDE_WIDTH + (dj * DILATION_WIDTH - PAD_LEFT)
    meets = ((i >= 0) & (i < input_height)) & ((j >= 0) & (j < input_width))
    valid = meets[:, None] & known[None, :]
    values = tl.load(image_ptr + _pixels(i, j, input_width, channels, CHANNELS_FIRST), valid, other=0.0)
    tap = (di * FILTER_WIDTH + dj) * outputs + channel
    weights = tl.load(filter_ptr + tap, known, other=0.0)
    return widened(values), flush(widened(weights))[None, :], valid


@triton.jit
def _depthwise(
    input_ptr,
    filter_ptr,  # [filter_height, filter_width, channels * multiplier]
    output_ptr,
    input_height,
    input_width,
    channels,
    output_height,
    output_width,
    row_blocks,
    column_blocks,
    channel_blocks,
    MULTIPLIER: tl.constexpr,
    FILTER_HEIGHT: tl.constexpr,
    FILTER_WIDTH: tl.constexpr,
    STRIDE_HEIGHT: tl.constexpr,
    STRIDE_WIDTH: tl.constexpr,
    DILATION_HEIGHT: tl.constexpr,
    DILATION_WIDTH: tl.constexpr,
    PAD_TOP: tl.constexpr,
    PAD_LEFT: tl.constexpr,
    CHANNELS_FIRST: tl.constexpr,
    QUICK: tl.constexpr,
    LARGE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    REAL: tl.constexpr = tl.float64 if input_ptr.dtype.element_ty == tl.float64 else tl.float32
    PIXELS: tl.constexpr = ROWS * COLUMNS
    outputs = channels * MULTIPLIER
    image, row, column, channel = _tile(row_blocks, column_blocks, channel_blocks, ROWS, COLUMNS, CHANNELS, LARGE)
    known = channel < outputs
    image_ptr = _image(
        input_ptr, image, channel // MULTIPLIER, input_height, input_width, channels, CHANNELS_FIRST
    )
    sums = tl.zeros([PIXELS, CHANNELS], REAL)
    unsafe = True
    if QUICK:
        smallest = tl.full([PIXELS, CHANNELS], _NOTHING, tl.uint32)
        smallest_weight = tl.full([1, CHANNELS], _NOTHING, tl.uint32)
        largest_weight = tl.zeros([1, CHANNELS], tl.uint32)
        for di in tl.static_range(FILTER_HEIGHT):
            for dj in tl.static_range(FILTER_WIDTH):
                values, weights, valid = _forward_tap(
                    image_ptr, filter_ptr, row, column, channel, known, di, dj, input_height, input_width, channels,
                    outputs, FILTER_WIDTH, STRIDE_HEIGHT, STRIDE_WIDTH, DILATION_HEIGHT, DILATION_WIDTH, PAD_TOP,
                    PAD_LEFT, CHANNELS_FIRST,
                )  # fmt: skip
                sums = tl.fma(values, tl.broadcast_to(weights, [PIXELS, CHANNELS]), sums)
                smallest = tl.minimum(smallest, _key(values))
                smallest_weight = tl.minimum(smallest_weight, _key(weights))
                largest_weight = tl.maximum(largest_weight, _key(tl.where(weights == 0.0, 1.0, weights)))
        unsafe = tl.max(tl.max(_unsafe(smallest, smallest_weight, largest_weight).to(tl.int32), axis=1), axis=0) > 0
    if unsafe:
        sums = tl.zeros([PIXELS, CHANNELS], REAL)
        for di in range(FILTER_HEIGHT):
            for dj in range(FILTER_WIDTH):
                values, weights, valid = _forward_tap(
                    image_ptr, filter_ptr, row, column, channel, known, di, dj, input_height, input_width, channels,
                    outputs, FILTER_WIDTH, STRIDE_HEIGHT, STRIDE_WIDTH, DILATION_HEIGHT, DILATION_WIDTH, PAD_TOP,
                    PAD_LEFT, CHANNELS_FIRST,
                )  # fmt: skip
                added = fused_multiply_add(flush(values), tl.broadcast_to(weights, [PIXELS, CHANNELS]), sums)
                sums = tl.where(valid, added, sums)
    written = ((row < output_height) & (column < output_width))[:, None] & known[None, :]
    output_ptrs = _image(output_ptr, image, channel, output_height, output_width, outputs, CHANNELS_FIRST)
    output_ptrs += _pixels(row, column, output_width, outputs, CHANNELS_FIRST)
    tl.store(output_ptrs, sums.to(output_ptr.dtype.element_ty), written)
