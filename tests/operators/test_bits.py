# SPDX-License-Identifier: Apache-2.0
"""The comparisons the other tests rely on accept what they should and reject what they should."""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits, assert_within_ulp, differing

ONE = np.float32(1)
ABOVE_ONE = np.nextafter(ONE, np.float32(2))
ULP_AT_ONE = float(ABOVE_ONE) - 1.0


def float32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_equal_arrays_pass():
    values = float32(0.0, -0.0, 1.5, np.inf, -np.inf, np.nan, 1e-45)
    assert_same_bits(values, values.copy(), what="copy")
    assert_same_bits(values[::-1], values[::-1].copy(), what="strided view")
    assert_same_bits(np.float32(3), np.array(3, np.float32), what="rank 0")
    assert_same_bits(np.zeros((0, 3)), np.zeros((0, 3)), what="empty")
    assert_same_bits(np.arange(3), np.arange(3), what="integers")


def test_nans_of_any_payload_and_sign_are_equal():
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert_same_bits(nans, nans[::-1].copy(), what="NaN")


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (float32(0.0), float32(-0.0)),
        (float32(ONE), float32(ABOVE_ONE)),
        (float32(np.nan), float32(1.0)),
        (float32(1.0), float32(np.nan)),
        (float32(np.inf), float32(-np.inf)),
        (float32(0.0), float32(1e-45)),
        (np.array([1], np.int32), np.array([2], np.int32)),
        (float32(1.0), np.array([1.0], np.float64)),
        (float32(1.0), float32(1.0, 1.0)),
        (float32(1.0), np.array(1.0, np.float32)),
        (np.zeros((0, 3), np.float32), np.zeros((3, 0), np.float32)),
    ],
)
def test_any_difference_fails(actual, expected):
    with pytest.raises(AssertionError):
        assert_same_bits(actual, expected, what="pair")


def test_float16_and_float64_are_compared_too():
    for dtype in (np.float16, np.float64):
        values = np.array([1.0, np.nan], dtype)
        assert_same_bits(values, values.copy(), what=str(dtype))
        with pytest.raises(AssertionError):
            assert_same_bits(values, np.nextafter(values, dtype(2)), what=str(dtype))


def test_message_says_where_and_what():
    inputs = np.arange(6, dtype=np.float32).reshape(2, 3)
    expected = inputs.copy()
    actual = inputs.copy()
    actual[1, 0] = 7
    actual[1, 2] = -0.0
    operands = {
        "inputs": inputs,
        "min": float32(10, 20, 30),
        "scale": np.array(0.5, np.float32),
        "unrelated": float32(1, 2, 3, 4),
    }
    with pytest.raises(AssertionError) as caught:
        assert_same_bits(actual, expected, what="outputs of a case", operands=operands)
    message = str(caught.value)
    assert "outputs of a case: 2 of 6 values differ, first at (1, 0)" in message
    assert "expected 3.0 (0x40400000)" in message
    assert "got      7.0 (0x40e00000)" in message
    assert "inputs there is 3.0 (0x40400000)" in message
    assert "min there is 10.0" in message
    assert "scale is 0.5" in message
    assert "unrelated" not in message


def test_differing_marks_each_place():
    places = differing(float32(0.0, 1.0, np.nan, 2.0), float32(-0.0, 1.0, -np.nan, 3.0))
    assert places.tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("actual", "exact"),
    [
        (ONE, 1.0),
        (ONE, 1.0 + ULP_AT_ONE),
        (ONE, 1.0 + ULP_AT_ONE / 2),
        (np.float32(0), 0.0),
        (np.float32(-0.0), 0.0),
        (np.float32(1e-45), 0.0),
        (np.float32(np.nan), np.nan),
        (np.float32(np.inf), np.inf),
        (np.float32(np.inf), 6e38),
        (np.float32(-np.inf), -6e38),
        (np.finfo(np.float32).max, float(np.finfo(np.float32).max) + 2.0**103),
    ],
)
def test_within_one_ulp_passes(actual, exact):
    assert_within_ulp(np.asarray(actual), np.float64(exact))


@pytest.mark.parametrize(
    ("actual", "exact"),
    [
        (ONE, 1.0 + 1.01 * ULP_AT_ONE),
        (ONE, 1.0 - 1.02 * ULP_AT_ONE),
        (np.float32(0), 1e-44),
        (np.float32(np.nan), 1.0),
        (ONE, np.nan),
        (np.float32(np.inf), 1e38),
        (np.float32(-np.inf), 6e38),
        (np.float32(1), np.inf),
        (np.float32(np.inf), -np.inf),
    ],
)
def test_beyond_one_ulp_fails(actual, exact):
    with pytest.raises(AssertionError, match="ulp"):
        assert_within_ulp(np.asarray(actual), np.float64(exact))


def test_ulp_is_that_of_the_exact_value_and_of_the_dtype():
    below_one = np.nextafter(ONE, np.float32(0))
    assert_within_ulp(np.asarray(below_one), np.float64(1.0), 0.5)
    with pytest.raises(AssertionError):
        assert_within_ulp(np.asarray(ABOVE_ONE), np.float64(1.0), 0.5)
    with pytest.raises(AssertionError):
        assert_within_ulp(np.float64(1) + 1e-15, np.float64(1.0))
    with pytest.raises(AssertionError):
        assert_within_ulp(float32(1, 2, 3), np.array([1.0, 2.0]))
