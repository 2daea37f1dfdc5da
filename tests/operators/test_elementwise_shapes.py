# SPDX-License-Identifier: Apache-2.0
"""Elementwise kernels at the shapes where their loops change, with numbers of every kind: equal to the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
from bits import assert_same_bits
from conftest import DEVICES, ON_CPU

import exactqat as eq
from exactqat.operators import OPERATORS, reference

# Rows and channels: one of each, fewer than a vector, parts of vectors, rows taken together, rows too long
# for that, blocks of blocks, and a second task.
SHAPES = [(1, 1), (1, 7), (7, 1), (3, 16), (17, 24), (9, 255), (49, 320), (5, 1100), (700, 5), (4200, 3), (1100, 64)]


def numbers(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Columns of ordinary numbers, but every fifth is special, as far as there are so many."""
    random = np.random.Generator(np.random.PCG64(seed))
    array = random.standard_normal(shape).astype(dtype)
    tiny = np.finfo(dtype).tiny / 4
    last = array[-1]  # where the special ones are not the first that is met
    array[:, 1::40], array[:, 6::40] = 0.0, -0.0
    array[:, 11::40] = np.where(random.random(array[:, 11::40].shape) < 0.5, -0.0, -tiny)
    array[:, 16::40], last[16::40] = -0.0, tiny
    last[21::40], last[26::40], last[31::40] = np.nan, np.inf, -np.inf
    array[:, 36::40] = -np.abs(array[:, 36::40])
    return array


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ranges_from_data(shape: tuple[int, int], axis: int, dtype: str, device: str) -> None:
    array = numbers(shape, dtype, sum(shape))
    if axis == -1:
        array = array[:, 2::5] if shape[1] > 2 else array
    array = np.ascontiguousarray(array)
    slices = () if axis == -1 else (array.shape[axis],)
    operands = [
        array,
        np.full(slices, -1.5, dtype),
        np.linspace(0.5, 2, math.prod(slices), dtype=dtype).reshape(slices),
    ]
    op = OPERATORS["quantize_and_dequantize_v2"]
    for signed_input, range_given in ((True, False), (False, False), (True, True)):
        attributes = {"signed_input": signed_input, "range_given": range_given, "axis": axis}
        expected = reference.call(op, dict(zip(op.operands, operands, strict=True)), attributes)
        (result,) = DEVICES[device](op, *op.bind(tuple(operands), attributes))
        assert_same_bits(result, expected, what=f"{op.name} on {device}")


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(5, 7), (300, 33), (700, 96)], ids=str)
def test_ranges_from_data_in_place(shape: tuple[int, int], axis: int) -> None:
    array = numbers(shape, "float32", 3)
    expected = eq.raw_ops.QuantizeAndDequantizeV2(input=array, input_min=0, input_max=0, axis=axis)
    result = array.copy()
    eq.raw_ops.QuantizeAndDequantizeV2(input=result, input_min=0, input_max=0, axis=axis, out=result)
    assert_same_bits(result, expected, what="in place")


# Rows and channels with so many blocks of rows that a task folds its own: of one channel a task is whole groups of
# blocks; of five the pieces of a task would cross from group to group; and a last group of few rows.
MANY = [(262_144, 1), (300_007, 1), (262_145, 5)]


def gradients_of_many_rows(shape: tuple[int, int]) -> tuple[list[np.ndarray], tuple[np.ndarray, ...]]:
    """Operands and the reference's results. Of several channels the last one meets an infinite gradient."""
    random = np.random.Generator(np.random.PCG64(sum(shape)))
    gradients, inputs = (random.standard_normal(shape).astype(np.float32) for _ in range(2))
    if shape[1] > 1:
        gradients[shape[0] // 2, -1] = np.inf
    low, high = np.linspace(-1.5, -0.5, shape[1], dtype="f4"), np.linspace(0.4, 1, shape[1], dtype="f4")
    operands = [gradients, inputs, low, high]
    op = OPERATORS["fake_quant_with_min_max_vars_per_channel_gradient"]
    return operands, reference.call(op, dict(zip(op.operands, operands, strict=True)), {})


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("shape", MANY, ids=str)
def test_gradients_of_many_rows(shape: tuple[int, int], device: str) -> None:
    operands, expected = gradients_of_many_rows(shape)
    op = OPERATORS["fake_quant_with_min_max_vars_per_channel_gradient"]
    results = DEVICES[device](op, *op.bind(tuple(operands), {}))
    for result, wanted in zip(results, expected, strict=True):
        assert_same_bits(result, wanted, what=f"{op.name} on {device}")


@pytest.mark.parametrize("shape", MANY, ids=str)
def test_gradients_of_many_rows_in_place(shape: tuple[int, int]) -> None:
    operands, expected = gradients_of_many_rows(shape)
    results = (operands[0], np.empty(shape[1], np.float32), np.empty(shape[1], np.float32))
    eq.fake_quant_with_min_max_vars_per_channel_gradient(*operands, out=results)
    for result, wanted in zip(results, expected, strict=True):
        assert_same_bits(result, wanted, what="in place")
