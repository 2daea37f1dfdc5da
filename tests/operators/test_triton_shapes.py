# SPDX-License-Identifier: Apache-2.0
"""What the cases are too small or too tame for: deep trees of sums, rows across planes, filters of many taps, values on
both sides of the smallest normal number, and tiles of every size. GPU kernels in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bits import assert_same_bits
from conftest import DEVICES

from exactqat.operators import OPERATORS, reference

if "triton-interpreter" not in DEVICES:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from exactqat.operators.triton import depthwise_conv2d, fused_batch_norm, reduce  # noqa: E402


def random(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def run(name: str, operands: list[np.ndarray], attributes: dict[str, Any]) -> list[np.ndarray]:
    op = OPERATORS[name]
    return DEVICES["triton-interpreter"](
        op, *op.bind((), {**dict(zip(op.operands, operands, strict=True)), **attributes})
    )


def compare(name: str, operands: list[np.ndarray], attributes: dict[str, Any]) -> None:
    op = OPERATORS[name]
    results = run(name, operands, attributes)
    expected = reference.call(op, dict(zip(op.operands, operands, strict=True)), attributes)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for what, result, wanted in zip(op.results, results, expected, strict=True):
        assert_same_bits(result, wanted, what=f"{name} {what}")


@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_sums_over_more_blocks_than_one_kernel_takes(data_format: str) -> None:
    shape = (1, 165, 200, 1) if data_format == "NHWC" else (1, 1, 165, 200)
    x = random(1).standard_normal(shape) * 10.0 ** random(2).integers(-8, 8, shape)
    assert x.size > 64 * 512
    compare("channel_sum", [x.astype(np.float32)], {"data_format": data_format})


@pytest.mark.parametrize("plane", [(5, 8), (7, 7), (3, 1), (9, 16)])
def test_blocks_of_rows_that_span_planes(plane: tuple[int, int]) -> None:
    x = random(3).standard_normal((6, 5, *plane)).astype(np.float32)
    g, vector = random(4).standard_normal(x.shape).astype(np.float32), np.linspace(0.5, 2, 5, dtype=np.float32)
    compare("fused_batch_norm_v3", [x, vector, vector, vector, vector], {"data_format": "NCHW"})
    compare(
        "fused_batch_norm_grad_v3", [g, x, vector, vector, vector, np.zeros((), np.float32)], {"data_format": "NCHW"}
    )


@pytest.mark.parametrize(("blocks", "channels"), [(1, 1), (2, 8), (16, 4)])
def test_tiles_change_no_sum(blocks: int, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def sum_tiles(rows: int, columns: int, inner: int = 1) -> reduce.SumTiles:
        count, across = -(-rows // reduce.BLOCK), -(-columns // channels)
        cut = {"BLOCKS": blocks, "CHANNELS": channels}
        return reduce.SumTiles(-(-count // blocks) * across, count, across, cut)

    monkeypatch.setattr(fused_batch_norm, "sum_tiles", sum_tiles)
    x = random(5).standard_normal((2, 11, 13, 7)).astype(np.float32)
    for data_format in ("NHWC", "NCHW"):
        compare("channel_sum", [x], {"data_format": data_format})


GEOMETRIES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "taps_in_groups": ((2, 7, 9, 3), (5, 6, 3, 2), {"strides": (1, 2, 1, 1), "padding": "SAME"}),
    "too_many_taps_to_unroll": ((1, 8, 10, 2), (9, 8, 2, 1), {"strides": (1, 1, 2, 1), "padding": "SAME"}),
    "stride_beyond_the_filter": ((1, 9, 11, 3), (2, 2, 3, 1), {"strides": (1, 5, 4, 1), "padding": "VALID"}),
    "one_row_of_many": ((1, 1, 70, 2), (1, 3, 2, 1), {"strides": (1, 1, 1, 1), "padding": "SAME"}),
    "more_rows_than_a_block": ((3, 30, 2, 5), (3, 3, 5, 1), {"strides": (1, 1, 1, 1), "padding": "SAME"}),
    "channels_first": (
        (2, 3, 9, 10),
        (3, 3, 3, 2),
        {"strides": (1, 1, 2, 2), "padding": "SAME", "data_format": "NCHW", "dilations": (1, 1, 1, 2)},
    ),
}


def convolutions(name: str, values: Any) -> list[tuple[str, list[np.ndarray], dict[str, Any]]]:
    """The three operators' calls of a geometry; `values` makes an array of a shape."""
    shape, filter_shape, attributes = GEOMETRIES[name]
    x, weights = values(shape), values(filter_shape)
    output = run("depthwise_conv2d_native", [x, weights], attributes)[0]
    g = values(output.shape)
    return [
        ("depthwise_conv2d_native", [x, weights], attributes),
        ("depthwise_conv2d_native_backprop_input", [weights, g], attributes | {"input_sizes": shape}),
        ("depthwise_conv2d_native_backprop_filter", [x, g], attributes | {"filter_sizes": filter_shape}),
    ]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometries(name: str, dtype: Any) -> None:
    generator = random(7)
    for call in convolutions(name, lambda shape: generator.standard_normal(shape).astype(dtype)):
        compare(*call)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("spread", [2, 30, 70])
@pytest.mark.parametrize("name", ["more_rows_than_a_block", "channels_first"])
def test_convolutions_near_the_smallest_normal_number(name: str, spread: int, dtype: Any) -> None:
    """Products, and what is left of them after cancellation, on both sides of it."""
    generator = random(8)
    middle = np.finfo(dtype).minexp // 2
    drawn: list[np.ndarray] = []

    def values(shape: tuple[int, ...]) -> np.ndarray:
        # Few bits, so that sums cancel. The interpreter rounds a float64 product before it adds: only one bit there.
        mantissa = generator.integers(-8, 9, shape) if dtype == np.float32 else generator.integers(-1, 2, shape)
        exponents = generator.integers(middle - 3 - spread // 2, middle + 1 + spread // 2, shape)
        numbers = np.ldexp(mantissa, exponents).astype(dtype)
        if dtype == np.float64 and not drawn:  # products that are rounded up, one number of each with all its bits
            numbers *= 1 - generator.integers(0, 2, shape) * np.finfo(dtype).epsneg
        drawn.append(numbers)
        return numbers

    for call in convolutions(name, values):
        compare(*call)


@pytest.mark.slow
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e-40, -0.0, 0.0])
def test_a_weight_or_value_that_needs_the_exact_way(poison: float) -> None:
    for where in range(2):
        for call in convolutions("channels_first", lambda shape: random(9).standard_normal(shape).astype(np.float32)):
            call[1][where].reshape(-1)[::17] = poison
            compare(*call)


@pytest.mark.slow
def test_both_ways_through_the_taps_and_all_tiles_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random(10)
    calls = convolutions("channels_first", lambda shape: generator.standard_normal(shape).astype(np.float32))
    wanted = [run(*call)[0] for call in calls]
    changes: list[tuple[str, Any]] = [
        ("_quick", lambda *_: False),
        ("_large", lambda _: True),
        ("_ELEMENTS", 256),
        ("_MOST_TAPS", 4),
        ("_channel_tile", lambda channels, most: 4),
    ]
    for attribute, value in changes:
        with monkeypatch.context() as changed:
            changed.setattr(depthwise_conv2d, attribute, value)
            for call, expected in zip(calls, wanted, strict=True):
                assert_same_bits(run(*call)[0], expected, what=f"{call[0]} with another {attribute}")


def test_the_exact_way_is_taken_only_when_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images and weights as networks have them, zeros among them, never need it."""
    generator = random(11)

    def relu(shape: tuple[int, ...]) -> np.ndarray:
        return np.maximum(generator.standard_normal(shape), 0).astype(np.float32)

    calls = convolutions("channels_first", relu)[:2]

    def refuse(*_: Any) -> None:
        raise AssertionError("the exact way was taken")

    monkeypatch.setattr(depthwise_conv2d, "fused_multiply_add", refuse)
    for call, values in zip(calls, (0, 1), strict=True):
        run(*call)
        call[1][values].reshape(-1)[1] = 1e-40
        with pytest.raises(Exception, match="the exact way was taken"):
            run(*call)
