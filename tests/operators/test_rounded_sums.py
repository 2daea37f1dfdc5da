# SPDX-License-Identifier: Apache-2.0
"""Sums as the integers of TensorFlow Lite's kernels: equal to the reference, and to its integers."""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits
from conftest import DEVICES, ON_CPU

from exactqat import reference
from exactqat.device.arithmetic import fixed_point, multiply_fixed_point, round_half_away
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


BY_GRID, GRADIENT_BY_GRID = OPERATORS["rounded_sums_by_grid"], OPERATORS["rounded_sums_by_grid_gradient"]
WORDS = ("float32", "float64", "fixed_point")


def drawn_grid(random: np.random.Generator, channels: int, largest: float) -> tuple[np.ndarray, np.ndarray]:
    """Scales whose multipliers lie below `largest`, some powers of two, and a grid."""
    multipliers = np.exp2(random.uniform(-11.9, 0, channels))
    multipliers[::3] = np.exp2(np.floor(np.log2(multipliers[::3])))
    grid = np.array([0.03125, 0.25, -3, 255, -3.25, 255.5], np.float32)
    return (multipliers * largest * grid[1] / grid[0]).astype(np.float32), grid


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("rounding", WORDS)
@pytest.mark.parametrize("largest", [1.0, 2.0**-15, 8.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_by_grid_equal_the_reference(
    shape: tuple[int, ...], largest: float, rounding: str, device: str
) -> None:
    random = np.random.Generator(np.random.PCG64(sum(shape)))
    scale, grid = drawn_grid(random, shape[-1], largest)
    sums = random.integers(-(2**11), 2**11, shape).astype(np.float32)
    flat = sums.reshape(-1)
    flat[: min(7, flat.size)] = [0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, -1.0][: flat.size]
    gradients = random.standard_normal(shape).astype(np.float32)
    operands = {"sums": sums, "scale": scale, "grid": grid}
    expected = reference.call(BY_GRID, operands, {"rounding": rounding})
    (found,) = DEVICES[device](BY_GRID, *BY_GRID.bind((*operands.values(), rounding), {}))
    assert_same_bits(found, expected, what=device)
    expected = reference.call(GRADIENT_BY_GRID, {"gradients": gradients, **operands}, {})
    (found,) = DEVICES[device](GRADIENT_BY_GRID, *GRADIENT_BY_GRID.bind((gradients, *operands.values()), {}))
    assert_same_bits(found, expected, what=device)


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("exponents", [(-12, 0), (-31, 0), (-3, 8)])
def test_by_grid_equals_the_declarations(exponents: tuple[int, int], device: str) -> None:
    """Each of the words of `device.weighted.ROUNDINGS`, next to ties too."""
    random = np.random.Generator(np.random.PCG64(2))
    scale = np.ldexp(random.uniform(0.5, 1, 64), random.integers(*exponents, 64, endpoint=True)).astype(np.float32)
    scale[::4] = np.ldexp(1.0, random.integers(*exponents, 16, endpoint=True))
    grid = np.array([1, 1, -128, 127, -128, 127], np.float32)
    factor = scale.astype(np.float64)
    sums = random.integers(-(2**23), 2**23, (3000, 64))
    sums[::3] = np.rint((random.integers(-300, 300, sums[::3].shape) + 0.5) / factor)
    sums = np.clip(sums, 1 - 2**24, 2**24 - 1)
    wanted = {
        "float32": np.rint(sums.astype(np.float32) * scale),
        "float64": round_half_away(sums * factor),
        "fixed_point": multiply_fixed_point(sums, *fixed_point(factor)),
    }
    for rounding, steps in wanted.items():
        operands = [sums.astype(np.float32), scale, grid]
        (found,) = DEVICES[device](BY_GRID, *BY_GRID.bind((*operands, rounding), {}))
        np.testing.assert_array_equal(found, np.clip(steps, -128, 127), rounding)


@pytest.mark.parametrize("rounding", WORDS)
def test_jax_differentiates_it_both_ways(rounding: str) -> None:
    jax = pytest.importorskip("jax")
    random = np.random.Generator(np.random.PCG64(3))
    scale, grid = drawn_grid(random, 7, 1.0)
    sums = random.integers(-300, 300, (40, 7)).astype(np.float32)
    moves, gradients = random.standard_normal((2, 40, 7)).astype(np.float32)
    steps, pushed = jax.jvp(lambda x: BY_GRID(x, scale, grid, rounding), (sums,), (moves,))
    operands = {"sums": sums, "scale": scale, "grid": grid}
    assert_same_bits(np.asarray(steps), reference.call(BY_GRID, operands, {"rounding": rounding}), what="steps")
    _, pull = jax.vjp(lambda x: BY_GRID(x, scale, grid, rounding), sums)
    for given, found in ((moves, pushed), (gradients, pull(gradients)[0])):
        expected = reference.call(GRADIENT_BY_GRID, {"gradients": given, **operands}, {})
        assert_same_bits(np.asarray(found), expected, what="gradients")


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"sums": np.zeros((2, 3))}, TypeError, "sums must be float32, got float64"),
        ({"scale": np.zeros(3)}, TypeError, "scale must be float32, got float64"),
        ({"scale": np.zeros(2, np.float32)}, ValueError, "scale"),
        ({"grid": np.zeros(5, np.float32)}, ValueError, r"grid must have shape \[6\], got \[5\]"),
        ({"grid": np.zeros(6)}, TypeError, "grid must be float32, got float64"),
    ],
)
def test_bad_operands_by_grid(changed: dict[str, np.ndarray], error: type[Exception], message: str) -> None:
    names = {"sums": (2, 3), "scale": (3,), "grid": (6,)}
    operands = {name: np.zeros(shape, np.float32) for name, shape in names.items()} | changed
    with pytest.raises(error, match=message):
        BY_GRID(*operands.values(), "float32")
