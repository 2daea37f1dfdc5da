# SPDX-License-Identifier: Apache-2.0
"""Channels first or last, in memory of their own or in that of an operand: batch normalization has one set of bits.

The order of sums does not depend on the layout, but the loops do: planes smaller than a line of the cache, small ones
that are gathered or read image by image, large ones; rows that meet in the same places of a cache; images that
are near the core, far from it, and results that go past the cache.
"""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits
from conftest import DEVICES, ON_CPU

from exactqat.operators import OPERATORS, reference

# Images, channels, height, width.
SHAPES = [
    (1, 70, 3, 3),
    (5, 70, 3, 3),
    (9, 33, 2, 5),
    (6, 130, 3, 3),
    (33, 17, 1, 2),
    (8, 37, 7, 7),
    (3, 100, 6, 6),
    (11, 21, 4, 4),
    (4, 9, 15, 17),
    (3, 5, 33, 31),
    (3, 256, 5, 9),
    (2, 384, 7, 7),
    (40, 480, 14, 14),
    (17, 1280, 7, 7),
    (87, 999, 7, 7),
    (263, 1030, 4, 4),
    (23, 530, 9, 11),
    (4, 1301, 15, 17),
    (37, 150, 28, 28),
    (5, 70, 112, 111),
]


def channels_last(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(x, 1, 3))


def channels_first(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(x, 3, 1))


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_layouts_have_the_same_bits(shape: tuple[int, ...], training: bool) -> None:
    random = np.random.Generator(np.random.PCG64(shape))
    x, g = (random.standard_normal(shape, np.float32) for _ in range(2))
    scale, offset, mean, variance = (random.random(shape[1], np.float32) + np.float32(0.5) for _ in range(4))
    attributes = {"epsilon": 1e-3, "is_training": training}
    forward, gradient = OPERATORS["fused_batch_norm_v3"], OPERATORS["fused_batch_norm_grad_v3"]

    first = forward(x, scale, offset, mean, variance, **attributes, data_format="NCHW")
    last = forward(channels_last(x), scale, offset, mean, variance, **attributes, data_format="NHWC")
    for name, a, b in zip(("y", "mean", "variance"), first, (channels_first(last[0]), *last[1:]), strict=False):
        assert_same_bits(a, b, what=name)

    def gradients(g: np.ndarray, x: np.ndarray, data_format: str, **out: object) -> tuple[np.ndarray, ...]:
        reserves = mean, variance, variance[:0]
        return gradient(g, x, scale, *reserves, **attributes, data_format=data_format, **out)

    first = gradients(g, x, "NCHW")
    last = gradients(channels_last(g), channels_last(x), "NHWC")
    last = channels_first(last[0]), *last[1:3]
    for name, a, b in zip(("x_backprop", "scale", "offset"), first, last, strict=False):
        assert_same_bits(a, b, what=name)

    # The gradient in the place of the gradient it is made from.
    place = g.copy()
    rest = tuple(np.empty_like(np.asarray(part)) for part in first[1:])
    gradients(place, x, "NCHW", out=(place, *rest))
    assert_same_bits(place, first[0], what="x_backprop in place")


# Rows, channels. Lengths of a row that let lines of a block meet in the same places of the cache or do not, blocks and
# vectors that are not full, near the core and far from it.
ROWS = [(70, 128), (9, 256), (131, 192), (65, 1024), (70, 1000), (133, 37), (1100, 1024), (1100, 1003)]


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", ROWS, ids=lambda shape: "x".join(map(str, shape)))
def test_rows_of_any_length_equal_the_reference(shape: tuple[int, int], dtype: str, device: str) -> None:
    random = np.random.Generator(np.random.PCG64(shape))
    g, x = (random.standard_normal((1, 1, *shape)).astype(dtype) for _ in range(2))
    scale, offset, mean, variance = ((random.random(shape[1]) + 0.5).astype(dtype) for _ in range(4))
    attributes = {"epsilon": 1e-3, "is_training": True, "data_format": "NHWC"}
    for name, operands in [
        ("fused_batch_norm", [x, scale, offset, mean[:0], mean[:0]]),
        ("fused_batch_norm_grad", [g, x, scale, mean, variance]),
    ]:
        op = OPERATORS[name]
        expected = reference.call(op, dict(zip(op.operands, operands, strict=True)), attributes)
        arrays, checked = op.bind(tuple(operands), attributes)
        results = DEVICES[device](op, arrays, checked)
        for field, result, wanted in zip(op.results, results, expected, strict=True):
            assert_same_bits(result, wanted, what=f"{name} {field}")
