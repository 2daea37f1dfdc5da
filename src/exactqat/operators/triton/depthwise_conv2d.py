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

from exactqat.operators.triton.arithmetic import flush, fused_multiply_add, widened
from exactqat.operators.triton.launch import Plan, launch, plan
from exactqat.operators.triton.reduce import BLOCK, fold_block, folded, totals

_BLOCK = tl.constexpr(BLOCK)
_ELEMENTS = 2048  # results of a program: 8 for each thread, so that all taps can be loaded before the first is used
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
def _weight_exponent(
    filter_ptr, channel, known, channels, PARTS: tl.constexpr, WEIGHTS: tl.constexpr, PADDED: tl.constexpr
):
    """The smallest biased exponent of the weights of a tile's channels, or 0 if they are not for the quick way."""
    weight = tl.arange(0, PADDED)[:, None]
    place = ((weight // PARTS).to(tl.int64) * channels + channel[None, :]) * PARTS + weight % PARTS
    weights = widened(tl.load(filter_ptr + place, (weight < WEIGHTS) & known[None, :], other=0.0))
    smallest = tl.min(tl.min(_key(weights), axis=1), axis=0)
    largest = tl.max(tl.max(_key(tl.where(weights == 0.0, 1.0, weights)), axis=1), axis=0)
    return tl.where(largest >= _INFINITE, 0, (smallest >> 24).to(tl.int32))


@triton.jit
def _unsafe(smallest, weight_exponent):
    """Whether the quick way may differ, from the smallest keys of the values that a tile has read.

    24-bit values of exponent e are multiples of 2**(e - 23). Exponents that add up to at least -80 make all products,
    so all sums, multiples of 2**-126.
    """
    exponent = (smallest >> 24).to(tl.int32)
    unsafe = (exponent < 1) | (weight_exponent < 1) | (exponent + weight_exponent < 2 * 127 - 80)
    return tl.max(tl.max(unsafe.to(tl.int32), axis=1), axis=0) > 0


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
    """This program's image, rows and columns [ROWS * COLUMNS] and channels [CHANNELS]; image and channels are int64."""
    program = tl.program_id(0)
    channel = (program % channel_blocks).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
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
    tap = tl.cast(di * FILTER_WIDTH + dj, tl.int64)
    weights = tl.load(filter_ptr + tap * outputs + channel, known, other=0.0)
    return widened(values), widened(weights)[None, :], valid


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
    PADDED: tl.constexpr,
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
    image_ptr = _image(input_ptr, image, channel // MULTIPLIER, input_height, input_width, channels, CHANNELS_FIRST)
    sums = tl.zeros([PIXELS, CHANNELS], REAL)
    unsafe = True
    if QUICK:
        TAPS: tl.constexpr = FILTER_HEIGHT * FILTER_WIDTH
        weight_exponent = _weight_exponent(filter_ptr, channel, known, outputs, 1, TAPS, PADDED)
        smallest = tl.full([PIXELS, CHANNELS], _NOTHING, tl.uint32)
        for di in tl.static_range(FILTER_HEIGHT):
            for dj in tl.static_range(FILTER_WIDTH):
                values, weights, valid = _forward_tap(
                    image_ptr, filter_ptr, row, column, channel, known, di, dj, input_height, input_width, channels,
                    outputs, FILTER_WIDTH, STRIDE_HEIGHT, STRIDE_WIDTH, DILATION_HEIGHT, DILATION_WIDTH, PAD_TOP,
                    PAD_LEFT, CHANNELS_FIRST,
                )  # fmt: skip
                sums = tl.fma(values, tl.broadcast_to(weights, [PIXELS, CHANNELS]), sums)
                smallest = tl.minimum(smallest, _key(values))
        unsafe = _unsafe(smallest, weight_exponent)
    if unsafe:
        sums = tl.zeros([PIXELS, CHANNELS], REAL)
        for filter_row in range(FILTER_HEIGHT):
            for filter_column in range(FILTER_WIDTH):
                values, weights, valid = _forward_tap(
                    image_ptr, filter_ptr, row, column, channel, known, filter_row, filter_column, input_height,
                    input_width, channels, outputs, FILTER_WIDTH, STRIDE_HEIGHT, STRIDE_WIDTH, DILATION_HEIGHT,
                    DILATION_WIDTH, PAD_TOP, PAD_LEFT, CHANNELS_FIRST,
                )  # fmt: skip
                added = fused_multiply_add(flush(values), tl.broadcast_to(flush(weights), [PIXELS, CHANNELS]), sums)
                sums = tl.where(valid, added, sums)
    written = ((row < output_height) & (column < output_width))[:, None] & known[None, :]
    output_ptrs = _image(output_ptr, image, channel, output_height, output_width, outputs, CHANNELS_FIRST)
    output_ptrs += _pixels(row, column, output_width, outputs, CHANNELS_FIRST)
    tl.store(output_ptrs, sums.to(output_ptr.dtype.element_ty), written)


@triton.jit
def _backward_tap(
    gradient_ptrs,
    filter_ptr,
    row,
    column,
    channel,
    known,
    tap,
    up,
    left,
    q,
    meets,
    output_height,
    output_width,
    channels,
    MULTIPLIER: tl.constexpr,
    CHANNELS_FIRST: tl.constexpr,
):
    """What arrives through a tap from the output `up` rows further down and `left` columns further right: gradients and
    mask [PIXELS, CHANNELS], weights [1, CHANNELS]."""
    i, j = row + up, column + left
    meets = meets & ((i >= 0) & (i < output_height)) & ((j >= 0) & (j < output_width))
    valid = meets[:, None] & known[None, :]
    offset = _pixels(i, j, output_width, channels * MULTIPLIER, CHANNELS_FIRST)
    if CHANNELS_FIRST:
        offset += tl.cast(output_height, tl.int64) * output_width * q
    else:
        offset += q
    values = tl.load(gradient_ptrs + offset, valid, other=0.0)
    first = (tl.cast(tap, tl.int64) * channels + channel) * MULTIPLIER
    weights = tl.load(filter_ptr + first + q, known, other=0.0)
    return widened(values), widened(weights)[None, :], valid


@triton.jit
def _backprop_input_cells(
    filter_ptr,
    gradient_ptrs,
    output_ptrs,
    row,
    column,
    channel,
    known,
    weight_exponent,
    from_row,
    from_column,
    input_height,
    input_width,
    channels,
    output_height,
    output_width,
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
):
    """The input's pixels (row * stride + from_row, column * stride + from_column), which all meet the same taps."""
    REAL: tl.constexpr = tl.float64 if filter_ptr.dtype.element_ty == tl.float64 else tl.float32
    PIXELS: tl.constexpr = row.shape[0]
    CHANNELS: tl.constexpr = channel.shape[0]
    sums = tl.zeros([PIXELS, CHANNELS], REAL)
    everywhere = row >= 0
    unsafe = True
    if QUICK:
        smallest = tl.full([PIXELS, CHANNELS], _NOTHING, tl.uint32)
        for di in tl.static_range(FILTER_HEIGHT):
            for dj in tl.static_range(FILTER_WIDTH):
                # Spelled out, because what is assigned is no constant for the compiler.
                if (from_row + PAD_TOP - di * DILATION_HEIGHT) % STRIDE_HEIGHT == 0 and (
                    from_column + PAD_LEFT - dj * DILATION_WIDTH
                ) % STRIDE_WIDTH == 0:
                    for q in tl.static_range(MULTIPLIER):
                        values, weights, valid = _backward_tap(
                            gradient_ptrs, filter_ptr, row, column, channel, known, di * FILTER_WIDTH + dj,
                            (from_row + PAD_TOP - di * DILATION_HEIGHT) // STRIDE_HEIGHT,
                            (from_column + PAD_LEFT - dj * DILATION_WIDTH) // STRIDE_WIDTH, q, everywhere,
                            output_height, output_width, channels, MULTIPLIER, CHANNELS_FIRST,
                        )  # fmt: skip
                        sums = tl.fma(values, tl.broadcast_to(weights, [PIXELS, CHANNELS]), sums)
                        smallest = tl.minimum(smallest, _key(values))
        unsafe = _unsafe(smallest, weight_exponent)
    if unsafe:
        sums = tl.zeros([PIXELS, CHANNELS], REAL)
        zero = tl.zeros([1], row.dtype)
        # Kept positive, because a remainder has the sign of its dividend.
        SPAN: tl.constexpr = FILTER_HEIGHT * DILATION_HEIGHT + FILTER_WIDTH * DILATION_WIDTH
        for filter_row in range(FILTER_HEIGHT):
            for filter_column in range(FILTER_WIDTH):
                above = zero + (SPAN * STRIDE_HEIGHT + from_row + PAD_TOP - filter_row * DILATION_HEIGHT)
                before = zero + (SPAN * STRIDE_WIDTH + from_column + PAD_LEFT - filter_column * DILATION_WIDTH)
                meets = everywhere & (above % STRIDE_HEIGHT == 0) & (before % STRIDE_WIDTH == 0)
                for part in range(MULTIPLIER):
                    values, weights, valid = _backward_tap(
                        gradient_ptrs, filter_ptr, row, column, channel, known,
                        filter_row * FILTER_WIDTH + filter_column, above // STRIDE_HEIGHT - SPAN,
                        before // STRIDE_WIDTH - SPAN, part, meets, output_height,
                        output_width, channels, MULTIPLIER, CHANNELS_FIRST,
                    )  # fmt: skip
                    added = fused_multiply_add(flush(values), tl.broadcast_to(flush(weights), [PIXELS, CHANNELS]), sums)
                    sums = tl.where(valid, added, sums)
    i, j = row * STRIDE_HEIGHT + from_row, column * STRIDE_WIDTH + from_column
    written = ((i < input_height) & (j < input_width))[:, None] & known[None, :]
    output_ptrs += _pixels(i, j, input_width, channels, CHANNELS_FIRST)
    tl.store(output_ptrs, sums.to(output_ptrs.dtype.element_ty), written)


@triton.jit
def _backprop_input(
    filter_ptr,  # [filter_height, filter_width, channels, multiplier]
    out_backprop_ptr,
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
    PADDED: tl.constexpr,
    LARGE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    image, row, column, channel = _tile(row_blocks, column_blocks, channel_blocks, ROWS, COLUMNS, CHANNELS, LARGE)
    known = channel < channels
    outputs = channels * MULTIPLIER
    gradient_ptrs = _image(
        out_backprop_ptr, image, channel * MULTIPLIER, output_height, output_width, outputs, CHANNELS_FIRST
    )
    output_ptrs = _image(output_ptr, image, channel, input_height, input_width, channels, CHANNELS_FIRST)
    if QUICK:
        WEIGHTS: tl.constexpr = FILTER_HEIGHT * FILTER_WIDTH * MULTIPLIER
        weight_exponent = _weight_exponent(filter_ptr, channel, known, channels, MULTIPLIER, WEIGHTS, PADDED)
        for from_row in tl.static_range(STRIDE_HEIGHT):
            for from_column in tl.static_range(STRIDE_WIDTH):
                _backprop_input_cells(
                    filter_ptr, gradient_ptrs, output_ptrs, row, column, channel, known, weight_exponent,
                    from_row, from_column, input_height, input_width, channels, output_height, output_width, MULTIPLIER,
                    FILTER_HEIGHT, FILTER_WIDTH, STRIDE_HEIGHT, STRIDE_WIDTH, DILATION_HEIGHT, DILATION_WIDTH, PAD_TOP,
                    PAD_LEFT, CHANNELS_FIRST, True,
                )  # fmt: skip
    else:
        for from_row in range(STRIDE_HEIGHT):
            for from_column in range(STRIDE_WIDTH):
                _backprop_input_cells(
                    filter_ptr, gradient_ptrs, output_ptrs, row, column, channel, known, 0,
                    from_row, from_column, input_height, input_width, channels, output_height, output_width, MULTIPLIER,
                    FILTER_HEIGHT, FILTER_WIDTH, STRIDE_HEIGHT, STRIDE_WIDTH, DILATION_HEIGHT, DILATION_WIDTH, PAD_TOP,
                    PAD_LEFT, CHANNELS_FIRST, False,
                )  # fmt: skip


@triton.jit
def _filter_sums(
    input_ptr,
    out_backprop_ptr,
    items_ptr,  # [blocks, taps, channels * multiplier]
    rows,  # output rows of all images: the items of the sums
    input_height,
    input_width,
    channels,
    output_height,
    output_width,
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
    TAPS: tl.constexpr,
    FLUSH: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    ALL_TAPS: tl.constexpr = FILTER_HEIGHT * FILTER_WIDTH
    outputs = channels * MULTIPLIER
    program = tl.program_id(0)
    channel = (program % channel_blocks).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    program = program // channel_blocks
    if TAPS == ALL_TAPS:
        first_tap = 0
        block = program
    else:
        GROUPS: tl.constexpr = (ALL_TAPS + TAPS - 1) // TAPS
        first_tap = (program % GROUPS) * TAPS
        block = program // GROUPS
    row = tl.cast(block, tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    image, output_row = (row // output_height)[:, None], row % output_height
    known = (row < rows)[:, None] & (channel < outputs)[None, :]
    input_channel = (channel // MULTIPLIER)[None, :]
    output_channel = channel[None, :]
    if CHANNELS_FIRST:
        input_ptrs = input_ptr + (image * channels + input_channel) * input_height * input_width
        gradient_ptrs = out_backprop_ptr + (image * outputs + output_channel) * output_height * output_width
        gradient_ptrs += output_row[:, None] * output_width
        INPUT_STEP, GRADIENT_STEP = 1, 1
    else:
        input_ptrs = input_ptr + image * input_height * input_width * channels + input_channel
        gradient_ptrs = out_backprop_ptr + (row * output_width * outputs)[:, None] + output_channel
        INPUT_STEP, GRADIENT_STEP = channels, outputs
    sums = ()
    for _ in tl.static_range(TAPS):
        sums = sums + (tl.zeros([_BLOCK, CHANNELS], tl.float64),)  # type: ignore[assignment]
    for step in range(output_width):
        output_column = tl.zeros([1], tl.int64) + step
        gradients = tl.load(gradient_ptrs, known, other=0.0)
        gradients = flush(widened(gradients)).to(tl.float64)
        gradient_ptrs += GRADIENT_STEP
        added = ()
        for t in tl.static_range(TAPS):
            tap = first_tap + t
            i = output_row * STRIDE_HEIGHT + ((tap // FILTER_WIDTH) * DILATION_HEIGHT - PAD_TOP)
            j = output_column * STRIDE_WIDTH + ((tap % FILTER_WIDTH) * DILATION_WIDTH - PAD_LEFT)
            meets = (i >= 0) & (i < input_height) & (j >= 0) & (j < input_width)
            valid = known & meets[:, None]
            offset = (i * input_width + j) * INPUT_STEP
            values = tl.load(input_ptrs + offset[:, None], valid, other=0.0)
            values = flush(widened(values)).to(tl.float64)
            more = fused_multiply_add(values, gradients, sums[t]) if FLUSH else tl.fma(values, gradients, sums[t])
            added = added + (tl.where(valid, more, sums[t]),)  # type: ignore[assignment]
        sums = added
    for t in tl.static_range(TAPS):
        tap = first_tap + t
        # Rows beyond the last are -0, which changes no sum.
        total = fold_block(tl.where((row < rows)[:, None], sums[t], -0.0), FLUSH)
        position = tl.cast(tap, tl.int64) * outputs + channel
        stored = (channel < outputs) & (position < ALL_TAPS * outputs)
        tl.store(items_ptr + tl.cast(block, tl.int64) * ALL_TAPS * outputs + position, total, stored)


_GEOMETRY = (
    "multiplier",
    "filter_height",
    "filter_width",
    "stride_height",
    "stride_width",
    "dilation_height",
    "dilation_width",
    "pad_top",
    "pad_left",
)


def _geometry(numbers) -> dict[str, int]:
    """What kernels are compiled for. A filter is slid in few ways; the sizes of images are plain numbers."""
    return {key.upper(): numbers[key] for key in _GEOMETRY} | {"CHANNELS_FIRST": bool(numbers["channels_first"])}


def _sizes(numbers) -> tuple[int, ...]:
    keys = ("input_height", "input_width", "channels", "output_height", "output_width")
    return tuple(numbers[key] for key in keys)


def _power_of_2(size: int) -> int:
    return triton.next_power_of_2(max(size, 1))


def _channel_tile(channels: int, most: int) -> int:
    """How many channels make a tile: a run of memory, few of them wasted."""
    wide = min(_power_of_2(channels), most)
    while wide > 16 and -(-channels // wide) * wide > -(-channels // 16) * 16 * 9 // 8:
        wide //= 2
    return wide


def _tiles(numbers, height: int, width: int, channels: int, step_height: int, step_width: int):
    """Tiles of pixels and channels, and how many there are along rows, columns and channels.

    Neighbouring results share most of what they read, in a square tile best, but a tile must also fit the image.
    """
    images, first = numbers["batch"], numbers["channels_first"]
    elements = _ELEMENTS
    while elements > 1024 and images * height * width * channels < 512 * elements:
        elements //= 2
    tallest, widest = _power_of_2(height), _power_of_2(width)
    planes = min(max(elements // (tallest * widest), 1), _power_of_2(channels))
    wide = planes if first else _channel_tile(channels, 32)

    def cost(rows: int, columns: int) -> int:
        """What all tiles read and compute, in elements, with something for the start of each."""
        down = (rows - 1) * step_height + (numbers["filter_height"] - 1) * numbers["dilation_height"] + 1
        across = (columns - 1) * step_width + (numbers["filter_width"] - 1) * numbers["dilation_width"] + 1
        # A load brings 32 bytes at least, which channels that come first leave to the columns.
        across = max(across, 8) if first else across
        return -(-height // rows) * -(-width // columns) * (wide * (down * across + rows * columns) + 512)

    most = max(elements // wide, 1)
    sides = [2**k for k in range(13)]
    fitting = [(r, c) for r in sides for c in sides if r <= tallest and c <= widest and r * c <= most]
    rows, columns = min(fitting, key=lambda tile: cost(*tile))
    blocks = (-(-height // rows), -(-width // columns), -(-channels // wide))
    warps = min(max(rows * columns * wide // 256, 1), 8)
    return blocks, {"ROWS": rows, "COLUMNS": columns, "CHANNELS": wide, "num_warps": warps}


def _large(numbers) -> bool:
    """Whether positions, with all that is added to them, need more than 32 bits."""
    reach = [
        (max(numbers[f"input_{side}"], numbers[f"output_{side}"]) + 2**13) * numbers[f"stride_{side}"]
        + (numbers[f"filter_{side}"] * numbers[f"dilation_{side}"]) * (1 + numbers[f"stride_{side}"])
        + numbers[f"pad_{pad}"]
        for side, pad in (("height", "top"), ("width", "left"))
    ]
    return max(reach) >= 2**30


def _quick(weights: int, operand) -> bool:
    return operand.dtype != "float64" and 0 < weights <= _UNROLLED


def _options(numbers, operand, parts: int, tile: dict[str, int]) -> dict[str, int]:
    """`parts`: weights of a channel for each tap."""
    weights = numbers["filter_height"] * numbers["filter_width"] * parts
    quick = _quick(weights, operand) and numbers["stride_height"] * numbers["stride_width"] <= 16
    options = {"QUICK": quick, "PADDED": _power_of_2(weights), "LARGE": _large(numbers)}
    return _geometry(numbers) | options | tile


@plan
def depthwise_conv2d_native(operands, results, numbers):
    outputs = numbers["channels"] * numbers["multiplier"]
    steps = (numbers["stride_height"], numbers["stride_width"])
    blocks, tile = _tiles(numbers, numbers["output_height"], numbers["output_width"], outputs, *steps)
    programs = numbers["batch"] * blocks[0] * blocks[1] * blocks[2]
    options = _options(numbers, operands[0], 1, tile)
    return Plan((launch(_depthwise, programs, (0, 1, 2), (*_sizes(numbers), *blocks), **options),))


@plan
def depthwise_conv2d_native_backprop_input(operands, results, numbers):
    # A cell is as many rows and columns of the input as a stride: each of its pixels meets taps of its own.
    height = -(-numbers["input_height"] // numbers["stride_height"])
    width = -(-numbers["input_width"] // numbers["stride_width"])
    blocks, tile = _tiles(numbers, height, width, numbers["channels"], 1, 1)
    programs = numbers["batch"] * blocks[0] * blocks[1] * blocks[2]
    options = _options(numbers, operands[0], numbers["multiplier"], tile)
    return Plan((launch(_backprop_input, programs, (0, 1, 2), (*_sizes(numbers), *blocks), **options),))


@plan
def depthwise_conv2d_native_backprop_filter(operands, results, numbers):
    rows, outputs = numbers["batch"] * numbers["output_height"], numbers["channels"] * numbers["multiplier"]
    all_taps = numbers["filter_height"] * numbers["filter_width"]
    taps = all_taps if all_taps <= _MOST_TAPS else 16
    wide = _channel_tile(outputs, 8 if operands[0].dtype in ("float32", "float64") else 16)
    channel_blocks = -(-outputs // wide)
    blocks, width = max(-(-rows // BLOCK), 1), all_taps * outputs
    float64 = operands[0].dtype == "float64"
    sums = launch(
        _filter_sums,
        blocks * -(-all_taps // max(taps, 1)) * channel_blocks,
        (0, 1, 3),
        (rows, *_sizes(numbers), channel_blocks),
        num_warps=4 if taps <= 9 else 8,
        TAPS=taps,
        FLUSH=float64,
        CHANNELS=wide,
        **_geometry(numbers),
    )
    tree = folded(3, blocks, width, float64)
    return Plan((sums, *tree.launches, totals(tree, 2, width, float64)), tree.scratch)
