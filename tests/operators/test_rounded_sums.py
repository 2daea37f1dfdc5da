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

ROUNDED_SUMS, GRADIENT = OPERATORS["rounded_sums"], OPERATORS["rounded_sums_gradient"]
SHAPES = [(1,), (7,), (5, 1), (3, 0), (0, 3), (64, 3), (33, 7, 5, 16), (9000, 2), (3, 9000), (2, 300, 31)]


def rounded(device: str, *arguments: object) -> np.ndarray:
    (result,) = DEVICES[device](ROUNDED_SUMS, *ROUNDED_SUMS.bind(arguments, {}))
    return result


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("way", ["nudged", "away", "32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_equal_the_reference(shape: tuple[int, ...], way: str, device: str) -> None:
    random = np.random.Generator(np.random.PCG64(sum(shape)))
    sums = random.integers(-(2**20), 2**20, shape).astype(np.float32)
    # Ties of both signs, zeros, and what is no number.
    factor = random.choice([2.0**-1, 2.0**-5, 0.0123, 1.0, 0.0], shape[-1])
    nudge = random.choice([0.0, 2.0**-3, 2.0**-2], shape[-1])
    flat = sums.reshape(-1)
    flat[: min(7, flat.size)] = [0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, -1.0][: flat.size]
    operands = {"sums": sums, "factor": factor, "nudge": nudge}
    for lowest, highest in ((-128.0, 127.0), (0.0, 255.0), (-np.inf, np.inf)):
        attributes = {"lowest": lowest, "highest": highest, "away_from_zero": way == "away", "in_float32": way == "32"}
        expected = reference.call(ROUNDED_SUMS, operands, attributes)
        assert_same_bits(rounded(device, *operands.values(), *attributes.values()), expected, what=device)


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_equal_the_reference(shape: tuple[int, ...], device: str) -> None:
    random = np.random.Generator(np.random.PCG64(sum(shape)))
    sums = random.integers(-(2**12), 2**12, shape).astype(np.float32)
    gradients = random.standard_normal(shape).astype(np.float32)
    flat = sums.reshape(-1)
    # On the ends, which let nothing through, and what is no number.
    flat[: min(7, flat.size)] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 128.0, -4.0][: flat.size]
    gradients.reshape(-1)[-3:] = [np.nan, -np.inf, -0.0][: gradients.size]
    operands = {"gradients": gradients, "sums": sums, "factor": random.choice([1.0, 0.5, 0.0625, 0.75], shape[-1])}
    for low, high in ((-128.5, 127.5), (0.0, 128.0), (-4.0, 1e9)):
        expected = reference.call(GRADIENT, operands, {"low": low, "high": high})
        (found,) = DEVICES[device](GRADIENT, *GRADIENT.bind([*operands.values(), low, high], {}))
        assert_same_bits(found, expected, what=device)


def test_gradients_are_those_of_pytorchs_operators() -> None:
    torch = pytest.importorskip("torch")
    random = torch.Generator().manual_seed(0)
    sums = torch.randint(-300, 300, (900, 7), generator=random).float().requires_grad_()
    factor = torch.rand(7, generator=random)
    gradients = torch.randn(900, 7, generator=random)
    clipped = torch.nn.functional.hardtanh(sums * factor, -60.25, 61.5)
    (expected,) = torch.autograd.grad(clipped, sums, gradients)
    found = GRADIENT(gradients, sums.detach(), factor.double(), -60.25, 61.5)
    assert torch.equal(found, expected) and 0 < int((found == 0).sum()) < found.numel()


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


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"gradients": np.zeros((2, 3))}, TypeError, "gradients must be float32, got float64"),
        ({"gradients": np.zeros((3, 2), np.float32)}, ValueError, "gradients must have the shape of sums"),
        ({"factor": np.zeros(2)}, ValueError, "factor"),
    ],
)
def test_bad_operands_of_the_gradient(changed: dict[str, np.ndarray], error: type[Exception], message: str) -> None:
    operands = {"gradients": np.zeros((2, 3), np.float32), "sums": np.zeros((2, 3), np.float32), "factor": np.zeros(3)}
    with pytest.raises(error, match=message):
        GRADIENT(*(operands | changed).values(), -1.0, 1.0)
