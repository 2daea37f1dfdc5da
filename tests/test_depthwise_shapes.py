# SPDX-License-Identifier: Apache-2.0
"""Depthwise convolution on shapes at which its CPU kernels change their way: widths about a vector, few rows, many
images, channels that collide in the cache. Each is compared with the reference, bit for bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from bits import assert_same_bits
from conftest import DEVICES, ON_CPU

from exactqat import reference
from exactqat.spec import OPERATORS

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


def check(
    device: str, shape: tuple[int, ...], kernel: int, stride: int, padding: str, data_format: str, seed: int
) -> None:
    """`shape` is NHWC. Some elements are what comparisons and products treat in a way of their own."""
    random = np.random.Generator(np.random.PCG64(seed))
    batch, height, width, channels = shape
    starts = [side - kernel + 1 if padding == "VALID" else side for side in (height, width)]
    sides = [-(-places // stride) for places in starts]
    if min(sides) < 1:
        return

    def image(*sizes: int) -> np.ndarray:
        array = random.standard_normal(sizes).astype(np.float32)
        flat = array.reshape(-1)
        for value in (-0.0, np.inf, 1e-42):
            flat[random.integers(flat.size)] = value
        return array if data_format == "NHWC" else np.ascontiguousarray(array.transpose(0, 3, 1, 2))

    filter = random.standard_normal((kernel, kernel, channels, 1)).astype(np.float32)
    strides = (1, stride, stride, 1) if data_format == "NHWC" else (1, 1, stride, stride)
    attributes = {"strides": strides, "padding": padding, "data_format": data_format}
    calls = convolutions(image(*shape), filter, image(batch, *sides, channels), attributes)
    for name, operands, given in calls:
        op = OPERATORS[name]
        arrays, checked = op.bind((), dict(zip(op.operands, operands, strict=True)) | given)
        expected = reference.call(op, dict(zip(op.operands, arrays, strict=True)), checked)
        (result,) = DEVICES[device](op, arrays, checked)
        assert_same_bits(
            result, expected, what=f"{name} of {data_format} {shape}, {kernel}x{kernel}/{stride}, {padding}"
        )


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
@pytest.mark.parametrize("channels", [1, 15, 17, 512, 1024])
def test_channels(channels: int, data_format: str, device: str) -> None:
    for number, (side, stride) in enumerate(itertools.product((1, 3, 7, 14), (1, 2))):
        check(device, (2, side, side, channels), 3, stride, "SAME", data_format, seed=number)


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_many_images(data_format: str, device: str) -> None:
    """More tasks than threads, with a last one that is smaller."""
    check(device, (37, 14, 14, 40), 3, 1, "SAME", data_format, seed=1)
    check(device, (37, 7, 7, 72), 3, 2, "SAME", data_format, seed=2)
