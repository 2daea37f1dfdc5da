# SPDX-License-Identifier: Apache-2.0
"""Sums as the integers of TensorFlow Lite's kernels: equal to the reference, and to its integers."""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits
from conftest import DEVICES, ON_CPU

from exactqat.kit.device.arithmetic import fixed_point, multiply_fixed_point, round_half_away
from exactqat.operators import OPERATORS, reference

BY_GRID, GRADIENT_BY_GRID = OPERATORS["rounded_sums_by_grid"], OPERATORS["rounded_sums_by_grid_gradient"]
SHAPES = [(1,), (7,), (5, 1), (3, 0), (0, 3), (64, 3), (33, 7, 5, 16), (9000, 2), (3, 9000), (2, 300, 31)]


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
def test_kernels_equal_the_reference(shape: tuple[int, ...], largest: float, rounding: str, device: str) -> None:
    random = np.random.Generator(np.random.PCG64(sum(shape)))
    scale, grid = drawn_grid(random, shape[-1], largest)
    sums = random.integers(-(2**11), 2**11, shape).astype(np.float32)
    flat = sums.reshape(-1)
    flat[: min(7, flat.size)] = [0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, -1.0][: flat.size]
    gradients = random.standard_normal(shape).astype(np.float32)
    operands = {"sums": sums, "scale": scale, "grid": grid}
    expected = reference.call(BY_GRID, operands, {"rounding": rounding})
    (result,) = DEVICES[device](BY_GRID, *BY_GRID.bind((*operands.values(), rounding), {}))
    assert_same_bits(result, expected, what=device)
    expected = reference.call(GRADIENT_BY_GRID, {"gradients": gradients, **operands}, {})
    (result,) = DEVICES[device](GRADIENT_BY_GRID, *GRADIENT_BY_GRID.bind((gradients, *operands.values()), {}))
    assert_same_bits(result, expected, what=device)


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("exponents", [(-12, 0), (-31, 0), (-3, 8)])
def test_equals_the_declarations(exponents: tuple[int, int], device: str) -> None:
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
        (result,) = DEVICES[device](BY_GRID, *BY_GRID.bind((*operands, rounding), {}))
        np.testing.assert_array_equal(result, np.clip(steps, -128, 127), rounding)


def test_gradients_are_those_of_pytorchs_operators() -> None:
    torch = pytest.importorskip("torch")
    random = torch.Generator().manual_seed(0)
    sums = torch.randint(-300, 300, (900, 7), generator=random).float().requires_grad_()
    scale = torch.rand(7, generator=random)
    gradients = torch.randn(900, 7, generator=random)
    clipped = torch.nn.functional.hardtanh(sums * scale, -60.25, 61.5)
    (expected,) = torch.autograd.grad(clipped, sums, gradients)
    grid = torch.tensor([1.0, 1.0, -128.0, 127.0, -60.25, 61.5])
    result = GRADIENT_BY_GRID(gradients, sums.detach(), scale, grid)
    assert torch.equal(result, expected) and 0 < int((result == 0).sum()) < result.numel()


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
    for vector, result in ((moves, pushed), (gradients, pull(gradients)[0])):
        expected = reference.call(GRADIENT_BY_GRID, {"gradients": vector, **operands}, {})
        assert_same_bits(np.asarray(result), expected, what="gradients")


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"sums": np.zeros((2, 3))}, TypeError, "sums must be float32, got float64"),
        ({"sums": np.zeros((), np.float32)}, ValueError, "sums must be at least rank 1"),
        ({"scale": np.zeros(3)}, TypeError, "scale must be float32, got float64"),
        ({"scale": np.zeros(2, np.float32)}, ValueError, "scale"),
        ({"grid": np.zeros(5, np.float32)}, ValueError, r"grid must have shape \[6\], got \[5\]"),
        ({"grid": np.zeros(6)}, TypeError, "grid must be float32, got float64"),
    ],
)
def test_bad_operands(changed: dict[str, np.ndarray], error: type[Exception], message: str) -> None:
    names = {"sums": (2, 3), "scale": (3,), "grid": (6,)}
    operands = {name: np.zeros(shape, np.float32) for name, shape in names.items()} | changed
    with pytest.raises(error, match=message):
        BY_GRID(*operands.values(), "float32")


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"gradients": np.zeros((2, 3))}, TypeError, "gradients must be float32, got float64"),
        ({"gradients": np.zeros((3, 2), np.float32)}, ValueError, "gradients must have the shape of sums"),
        ({"scale": np.zeros(2, np.float32)}, ValueError, "scale"),
    ],
)
def test_bad_operands_of_the_gradient(changed: dict[str, np.ndarray], error: type[Exception], message: str) -> None:
    names = {"gradients": (2, 3), "sums": (2, 3), "scale": (3,), "grid": (6,)}
    operands = {name: np.zeros(shape, np.float32) for name, shape in names.items()} | changed
    with pytest.raises(error, match=message):
        GRADIENT_BY_GRID(*operands.values())
