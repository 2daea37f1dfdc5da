# SPDX-License-Identifier: Apache-2.0
"""Results of half the last cache and more are stored past it, in loops of their own: the same bits as piece by piece.

On a machine whose last cache is larger than twice these tensors, both sides take the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from bits import assert_same_bits

import exactqat as eq

ROWS, PIECE = 70_001, 1000
ONE = np.float32(1)


def calls(channels: int) -> dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]]:
    """Of gradients and inputs, [rows, channels]."""
    vector = np.linspace(0.5, 1.5, channels, dtype=np.float32)
    low, high = -vector, vector[::-1].copy()
    statistics = {"scale": vector, "epsilon": 1e-3, "is_training": False}

    def image(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(1, -1, 1, channels)

    raw = eq.raw_ops
    return {
        "one range": lambda g, x: raw.FakeQuantWithMinMaxVars(inputs=x, min=-ONE, max=ONE),
        "one range, gradient": lambda g, x: raw.FakeQuantWithMinMaxVarsGradient(
            gradients=g, inputs=x, min=-ONE, max=ONE
        )[0],
        "channels": lambda g, x: raw.FakeQuantWithMinMaxVarsPerChannel(inputs=x, min=low, max=high),
        "channels, gradient": lambda g, x: raw.FakeQuantWithMinMaxVarsPerChannelGradient(
            gradients=g, inputs=x, min=low, max=high
        )[0],
        "batch norm": lambda g, x: raw.FusedBatchNormV3(
            x=image(x), offset=low, mean=high, variance=vector, **statistics
        )[0].reshape(x.shape),
        "batch norm, gradient": lambda g, x: raw.FusedBatchNormGradV3(
            y_backprop=image(g), x=image(x), reserve_space_1=high, reserve_space_2=vector,
            reserve_space_3=vector[:0], **statistics,
        )[0].reshape(x.shape),
    }  # fmt: skip


@pytest.mark.parametrize("channels", [72, 133])
@pytest.mark.parametrize("name", calls(1))
def test_bits_are_those_of_pieces(name: str, channels: int) -> None:
    random = np.random.Generator(np.random.PCG64(channels))
    x, g = (random.standard_normal((ROWS, channels)).astype(np.float32) for _ in range(2))
    call = calls(channels)[name]
    pieces = [call(g[i : i + PIECE], x[i : i + PIECE]) for i in range(0, ROWS, PIECE)]
    assert_same_bits(call(g, x), np.concatenate(pieces), what=name)


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_a_result_that_begins_between_lines(offset: int) -> None:
    random = np.random.Generator(np.random.PCG64(offset))
    x = random.standard_normal((ROWS, 72)).astype(np.float32)
    low, high = -np.linspace(0.5, 1.5, 72, dtype=np.float32), np.linspace(0.5, 1.5, 72, dtype=np.float32)
    result = np.empty(x.size + offset, np.float32)[offset:].reshape(x.shape)
    eq.fake_quant_with_min_max_vars_per_channel(x, low, high, out=result)
    pieces = [eq.fake_quant_with_min_max_vars_per_channel(x[i : i + PIECE], low, high) for i in range(0, ROWS, PIECE)]
    assert_same_bits(result, np.concatenate(pieces), what=f"a result {offset} elements after a line")


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("channels", [72, 133])
def test_ranges_from_data_are_those_of_given_ones(channels: int, axis: int) -> None:
    random = np.random.Generator(np.random.PCG64(channels))
    x = random.standard_normal((ROWS, channels)).astype(np.float32)
    ranges = (
        {"input_min": x.min(0), "input_max": x.max(0)} if axis == 1 else {"input_min": x.min(), "input_max": x.max()}
    )

    def call(x: np.ndarray, range_given: bool) -> np.ndarray:
        return eq.raw_ops.QuantizeAndDequantizeV2(input=x, **ranges, range_given=range_given, axis=axis)

    pieces = [call(x[i : i + PIECE], True) for i in range(0, ROWS, PIECE)]
    assert_same_bits(call(x, False), np.concatenate(pieces), what=f"ranges along axis {axis}")
