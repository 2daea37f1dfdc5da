# SPDX-License-Identifier: Apache-2.0
"""Sums as the integers of TensorFlow Lite's kernels: equal to the reference, and to its integers."""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits
from conftest import DEVICES, ON_CPU

from exactqat import reference
from exactqat.device.arithmetic import fixed_point, multiply_fixed_point
from exactqat.operators import OPERATORS

ROUNDED_SUMS = OPERATORS["rounded_sums"]
SHAPES = [(1,), (7,), (5, 1), (3, 0), (0, 3), (64, 3), (33, 7, 5, 16), (9000, 2), (3, 9000), (2, 300, 31)]


def rounded(device: str, *arguments: object) -> np.ndarray:
    (result,) = DEVICES[device](ROUNDED_SUMS, *ROUNDED_SUMS.bind(arguments, {}))
    return result


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("away_from_zero", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_equal_the_reference(shape: tuple[int, ...], away_from_zero: bool, device: str) -> None:
    random = np.random.Generator(np.random.PCG64(sum(shape)))
    sums = random.integers(-(2**20), 2**20, shape).astype(np.float32)
    # Ties of both signs, zeros, and what is no number.
    factor = random.choice([2.0**-1, 2.0**-5, 0.0123, 1.0, 0.0], shape[-1])
    nudge = random.choice([0.0, 2.0**-3, 2.0**-2], shape[-1])
    flat = sums.reshape(-1)
    flat[: min(7, flat.size)] = [0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, -1.0][: flat.size]
    operands = {"sums": sums, "factor": factor, "nudge": nudge}
    for lowest, highest in ((-128.0, 127.0), (0.0, 255.0), (-np.inf, np.inf)):
        attributes = {"lowest": lowest, "highest": highest, "away_from_zero": away_from_zero}
        expected = reference.call(ROUNDED_SUMS, operands, attributes)
        assert_same_bits(rounded(device, *operands.values(), *attributes.values()), expected, what=device)


@pytest.mark.parametrize("device", ON_CPU)
def test_equals_the_fixed_point_multiplier(device: str) -> None:
    random = np.random.Generator(np.random.PCG64(1))
    factor = np.exp2(random.uniform(-11.9, -0.01, 64))
    significand, exponent = fixed_point(factor)
    sums = random.integers(-(2**23), 2**23, (4000, 64))
    # Those next to a tie of the product.
    ties = np.rint((random.integers(-127, 128, (4000, 64)) + 0.5) / factor).astype(np.int64)
    sums = np.concatenate([sums, np.clip(ties, 1 - 2**24, 2**24 - 1)])
    wanted = np.clip(multiply_fixed_point(sums, significand, exponent), -128, 127)
    given = rounded(
        device,
        sums.astype(np.float32),
        np.ldexp(significand.astype(np.float64), exponent - 31),
        np.where(exponent < 0, np.ldexp(1.0, exponent - 1), 0.0),
        -128.0,
        127.0,
    )
    np.testing.assert_array_equal(given, wanted)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"sums": np.zeros((2, 3))}, TypeError, "sums must be float32, got float64"),
        ({"factor": np.zeros(3, np.float32)}, TypeError, "factor must be float64, got float32"),
        ({"nudge": np.zeros(2)}, ValueError, "nudge"),
        ({"sums": np.zeros((), np.float32)}, ValueError, "sums must be at least rank 1"),
    ],
)
def test_bad_operands(changed: dict[str, np.ndarray], error: type[Exception], message: str) -> None:
    operands = {"sums": np.zeros((2, 3), np.float32), "factor": np.zeros(3), "nudge": np.zeros(3)} | changed
    with pytest.raises(error, match=message):
        ROUNDED_SUMS(*operands.values(), -128.0, 127.0)
