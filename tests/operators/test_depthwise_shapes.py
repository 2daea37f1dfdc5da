# SPDX-License-Identifier: Apache-2.0
"""Depthwise convolution on shapes at which its CPU kernels change their way: widths about a vector, few rows, many
images, channels that collide in the cache, padding of its own on each side. Each is compared with the reference, bit
for bit; and some arrays lie between pages that nobody may touch."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import sys

import numpy as np
import pytest
from bits import assert_same_bits
from conftest import DEVICES, ON_CPU, unwritten

import exactqat as eq
from exactqat.operators import OPERATORS, cpu, reference
from exactqat.operators.declarations.specification import TensorSpec

NAMES = (
    "depthwise_conv2d_native",
    "depthwise_conv2d_native_backprop_input",
    "depthwise_conv2d_native_backprop_filter",
)
WIDTHS = (6, 7, 8, 15, 16, 17, 18, 31, 32, 33, 50)


def convolutions(
    images: np.ndarray, filter: np.ndarray, output: np.ndarray, attributes: dict
) -> list[tuple[str, list, dict]]:
    input_sizes = np.array(images.shape, np.int32)
    filter_sizes = np.array(filter.shape, np.int32)
    return [
        (NAMES[0], [images, filter], attributes),
        (NAMES[1], [filter, output], attributes | {"input_sizes": input_sizes}),
        (NAMES[2], [images, output], attributes | {"filter_sizes": filter_sizes}),
    ]


Padding = str | tuple[tuple[int, int], tuple[int, int]]  # or rows above and below, columns left and right


def random_calls(
    shape: tuple[int, ...],
    kernel: int,
    stride: int,
    padding: Padding,
    data_format: str,
    seed: int,
    dilation: int = 1,
    multiplier: int = 1,
    dtype: type = np.float32,
) -> list[tuple[str, list, dict]]:
    """`shape` is NHWC. Some elements are what comparisons and products treat in a way of their own. No calls if the
    window is refused."""
    random = np.random.Generator(np.random.PCG64(seed))
    batch, *extents, channels = shape
    reach = (kernel - 1) * dilation
    pads = [(reach, 0)] * 2 if padding == "SAME" else [(0, 0)] * 2 if padding == "VALID" else padding
    sides = [-(-(side + sum(pad) - reach) // stride) for side, pad in zip(extents, pads, strict=True)]
    if min(sides) < (0 if padding == "VALID" else 1):
        return []

    def image(*sizes: int) -> np.ndarray:
        array = random.standard_normal(sizes).astype(dtype)
        flat = array.reshape(-1)
        for value in (-0.0, np.inf, np.finfo(dtype).tiny / 4):
            if flat.size:
                flat[random.integers(flat.size)] = value
        return array if data_format == "NHWC" else np.ascontiguousarray(array.transpose(0, 3, 1, 2))

    def by_format(rows: object, columns: object, other: object) -> tuple:
        return (other, rows, columns, other) if data_format == "NHWC" else (other, other, rows, columns)

    attributes = {
        "strides": by_format(stride, stride, 1),
        "dilations": by_format(dilation, dilation, 1),
        "padding": padding if isinstance(padding, str) else "EXPLICIT",
        "data_format": data_format,
    }
    if not isinstance(padding, str):
        attributes["explicit_paddings"] = [n for pair in by_format(*padding, (0, 0)) for n in pair]
    filter = random.standard_normal((kernel, kernel, channels, multiplier)).astype(dtype)
    return convolutions(image(*shape), filter, image(batch, *sides, channels * multiplier), attributes)


def check(device: str, *arguments: object, **more: object) -> None:
    for name, operands, attributes in random_calls(*arguments, **more):
        op = OPERATORS[name]
        arrays, checked = op.bind((), dict(zip(op.operands, operands, strict=True)) | attributes)
        expected = reference.call(op, dict(zip(op.operands, arrays, strict=True)), checked)
        (result,) = DEVICES[device](op, arrays, checked)
        assert_same_bits(result, expected, what=f"{name} of {arguments} {more}")


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_widths_about_a_vector(data_format: str, width: int, device: str) -> None:
    variants = itertools.product((1, 2, 3, 8), (1, 2), ("SAME", "VALID"))
    for number, (height, stride, padding) in enumerate(variants):
        check(device, (2, height, width, 3), 3, stride, padding, data_format, seed=number)
    check(device, (1, 5, width, 2), 5, 1, "SAME", data_format, seed=99)


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_windows_wider_than_the_image(data_format: str, device: str) -> None:
    for number, (kernel, side) in enumerate(itertools.product((2, 3, 5, 7), (9, 28))):
        check(device, (2, side, kernel - 2, 16), kernel, 2, "VALID", data_format, seed=number)
        check(device, (2, kernel - 1, side, 5), kernel, 2, "VALID", data_format, seed=number)
        check(device, (2, side, kernel - 1, 16), kernel, 2, "VALID", data_format, seed=number)


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
@pytest.mark.parametrize("channels", [1, 15, 17, 512, 1024])
def test_channels(channels: int, data_format: str, device: str) -> None:
    for number, (side, stride) in enumerate(itertools.product((1, 3, 7, 14), (1, 2))):
        check(device, (2, side, side, channels), 3, stride, "SAME", data_format, seed=number)


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("channels", [128, 144, 300, 512])
@pytest.mark.parametrize("offset", [0, 1, 4, 15])
def test_operands_that_begin_between_lines(offset: int, channels: int, device: str) -> None:
    for number, (kernel, stride, side) in enumerate(((3, 1, 5), (3, 2, 9), (5, 2, 8), (3, 3, 7))):
        calls = random_calls((2, side, side, channels), kernel, stride, "SAME", "NHWC", seed=number)
        for name, operands, attributes in calls[:2]:
            moved = []
            for operand in operands:
                memory = np.empty(operand.size + offset + 16, operand.dtype)
                line = -memory.ctypes.data % 64 // operand.itemsize
                copy = memory[line + offset :][: operand.size].reshape(operand.shape)
                copy[...] = operand
                moved.append(copy)
            op = OPERATORS[name]
            arrays, checked = op.bind((), dict(zip(op.operands, moved, strict=True)) | attributes)
            expected = reference.call(op, dict(zip(op.operands, arrays, strict=True)), checked)
            (result,) = DEVICES[device](op, arrays, checked)
            assert_same_bits(result, expected, what=f"{name}, {channels} channels, {offset} elements after a line")


@pytest.mark.parametrize("batch, channels", [(3, 160), (12, 152), (12, 160), (12, 256)])
@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("offset", [0, 4])
def test_images_that_are_many_give_what_each_gives(offset: int, kernel: int, batch: int, channels: int) -> None:
    """So large together that inputs are asked for early; and that results, where lines allow it, go past the caches."""
    random = np.random.Generator(np.random.PCG64(channels))
    shape = (batch, 57, 70, channels)
    images = random.standard_normal(math.prod(shape) + offset, dtype=np.float32)[offset:].reshape(shape)
    filter = random.standard_normal((kernel, kernel, channels, 1), dtype=np.float32)
    for stride in (1, 2):
        together = eq.nn.depthwise_conv2d(images, filter, [1, stride, stride, 1], "SAME")
        parts = [eq.nn.depthwise_conv2d(image[None], filter, [1, stride, stride, 1], "SAME") for image in images]
        assert_same_bits(together, np.concatenate(parts), what=f"{batch} images, {channels} channels, stride {stride}")


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_many_images(data_format: str, device: str) -> None:
    """More tasks than threads, with a last one that is smaller."""
    check(device, (37, 14, 14, 40), 3, 1, "SAME", data_format, seed=1)
    check(device, (37, 7, 7, 72), 3, 2, "SAME", data_format, seed=2)
    # Blocks of output rows that begin and end inside an image, with planes no wider than a vector.
    for number, (height, width) in enumerate(itertools.product((1, 2, 3, 7, 9), (1, 4, 8, 9, 16))):
        for stride in (1, 2):
            check(
                device, (11, height, width, 5), 3, stride, "SAME", data_format, seed=number, multiplier=1 + number % 2
            )
            check(device, (5, height, width, 3), 3, stride, "VALID", data_format, seed=number)
            check(device, (5, height, width, 3), 3, stride, ((1, 2), (2, 0)), data_format, seed=number)
            check(device, (5, height, width, 3), 3, stride, ((2, 0), (0, 2)), data_format, seed=number)
    # Blocks of rows so wide that they are worked on in parts.
    for number, (width, stride) in enumerate(itertools.product((17, 24, 25, 33, 57, 112), (1, 2))):
        check(device, (5, 15, width, 3), 3, stride, "SAME", data_format, seed=number)
        check(device, (4, 31, width, 2), 3, stride, ((0, 1), (1, 0)), data_format, seed=number, multiplier=2)


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("shape", [(11, 29, 27, 136), (3, 32, 23, 520), (5, 21, 20, 512)])
def test_operands_from_afar(shape: tuple[int, ...], device: str) -> None:
    """Large enough to be asked for early where the last cache holds 32 MiB or less; some channels are left over."""
    check(device, shape, 3, 2, "SAME", "NHWC", seed=1)


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("kernel, stride", [(3, 1), (3, 2), (5, 1), (5, 2)])
def test_every_width_channels_first(kernel: int, stride: int, device: str) -> None:
    for width in range(1, 41):
        check(device, (1, 1 + width % 7, width, 3), kernel, stride, "SAME", "NCHW", seed=width)


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
@pytest.mark.parametrize("stride", [1, 2])
def test_short_rows_with_every_edge(stride: int, data_format: str, device: str) -> None:
    """Vectors of channels that are two, one and a part; images that are enough for rows to be turned to columns."""
    edges = ((0, 0), (1, 1), (0, 1), (1, 0), (2, 1), (1, 2))
    for number, (width, columns) in enumerate(itertools.product(range(1, 9), edges)):
        shape = (5, 2 + number % 3, width, 43)
        check(device, shape, 3, stride, ((1, 1), columns), data_format, seed=number)


SIDES = ((0, 0), (1, 0), (0, 1), (2, 1), (1, 3))


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("kernel, stride, dilation", [(3, 1, 1), (3, 2, 1), (5, 1, 1), (5, 2, 1), (3, 3, 1), (3, 1, 2)])
def test_padding_of_its_own_on_each_side(kernel: int, stride: int, dilation: int, device: str) -> None:
    for number, (rows, columns) in enumerate(itertools.product(SIDES, SIDES)):
        if max(*rows, *columns) >= kernel:
            continue
        shape = (2, 5 + number % 4, (6, 8, 16, 19)[number % 4], 3)
        check(device, shape, kernel, stride, (rows, columns), "NCHW", seed=number, dilation=dilation)


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_multipliers_and_odd_counts_channels_first(dtype: type, device: str) -> None:
    for number, (channels, multiplier, width) in enumerate(itertools.product((1, 3, 16), (1, 2, 3), (4, 7, 20))):
        for kernel, stride in ((3, 1), (3, 2), (5, 1)):
            shape = (1 + number % 2, 4, width, channels)
            check(device, shape, kernel, stride, "SAME", "NCHW", seed=number, multiplier=multiplier, dtype=dtype)
    check(device, (0, 4, 7, 3), 3, 1, "SAME", "NCHW", seed=0, dtype=dtype)


def between_guards(array: np.ndarray, at_the_end: bool) -> np.ndarray:
    """A copy whose last (or first) element is followed (or preceded) by a page that nobody may touch."""
    page = mmap.PAGESIZE
    inside = -(-array.nbytes // page) * page
    memory = mmap.mmap(-1, inside + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for guard in (start, start + page + inside):
        assert libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0
    begin = page + (inside - array.nbytes if at_the_end else 0)
    copy = np.frombuffer(memory, array.dtype, array.size, begin).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are protected by Linux's means")
@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_nothing_beyond_an_array_is_touched(data_format: str, device: str) -> None:
    variants = itertools.product((3, 5), (1, 2), (1, 3, 4, 7, 8, 14, 16, 17, 28, 33), (True, False), (1, 2, 5))
    for number, (kernel, stride, width, at_the_end, batch) in enumerate(variants):
        shape = (batch, 2 + number % 3, width, (1, 3, 16, 18)[number % 4])
        for name, operands, attributes in random_calls(shape, kernel, stride, "SAME", data_format, number):
            op = OPERATORS[name]
            arrays, checked = op.bind((), dict(zip(op.operands, operands, strict=True)) | attributes)
            specs = tuple(TensorSpec(a.shape, a.dtype.name) for a in arrays)
            lowered = op.lower(specs, tuple(checked.items()))
            guarded = [between_guards(array, at_the_end) for array in (*arrays, *unwritten(lowered, arrays))]
            cpu.plan(cpu.load(device.removeprefix("cpu-")), specs, lowered)(*guarded)
            expected = reference.call(op, dict(zip(op.operands, arrays, strict=True)), checked)
            assert_same_bits(guarded[-1], expected, what=f"{name} of {shape} {kernel} {stride} {data_format}")
