# SPDX-License-Identifier: Apache-2.0
"""Fake quantization of weights by rows: equal to the reference, and to the per-channel operators with a range."""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits
from conftest import DEVICES, ON_CPU

import exactqat as eq
from exactqat.operators import OPERATORS, reference
from exactqat.operators.declarations.kit import fake_quant_rows

SHAPES = [(1,), (5, 1), (7, 3), (3, 0), (0, 3), (64, 3, 3, 5), (33, 96, 1, 1), (2, 9000)]


def operands_of(shape: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    random = np.random.Generator(np.random.PCG64(len(shape) + sum(shape)))
    inputs, gradients = (random.standard_normal(shape).astype(dtype) for _ in range(2))
    if len(shape) > 1 and shape[0] > 4 and inputs.size:
        inputs[0] = 0
        inputs[1] = -0.0
        inputs[2] = 1e-42
        inputs[3].reshape(-1)[-1] = np.nan
        inputs[4].reshape(-1)[0] = -np.inf
        gradients.reshape(-1)[:3] = np.nan, np.inf, 1e-42
    magnitudes = np.abs(random.standard_normal(shape[0])).astype(dtype)
    magnitudes[1:6] = [0.0, 1e-42, np.nan, np.inf, -1.0][: len(magnitudes[1:6])]
    return [gradients, inputs, magnitudes]


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_equal_the_reference(shape: tuple[int, ...], dtype: str, device: str) -> None:
    operands = operands_of(shape, dtype)
    for attributes in ({"num_bits": 8, "narrow_range": True}, {"num_bits": 4, "narrow_range": False}):
        for name, arrays in (
            ("fake_quant_rows", operands[1:2]),
            ("fake_quant_rows_gradient", operands[:2]),
            ("fake_quant_rows_within", operands[1:]),
            ("fake_quant_rows_within_gradient", operands),
        ):
            op = OPERATORS[name]
            expected = reference.call(op, dict(zip(op.operands, arrays, strict=True)), attributes)
            expected = expected if isinstance(expected, tuple) else (expected,)
            results = DEVICES[device](op, *op.bind(tuple(arrays), attributes))
            for part, result, wanted in zip(op.results, results, expected, strict=True):
                assert_same_bits(result, wanted, what=f"{part} of {name} on {device}")


@pytest.mark.parametrize("narrow_range", [False, True])
def test_equals_the_operators_with_a_range(narrow_range: bool) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.randn(40, 5, 3, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    magnitude = weight.detach().abs().amax((1, 2, 3))
    outputs = fake_quant_rows.fake_quant_rows(weight, 8, narrow_range)
    wanted = eq.quantization.fake_quant_with_min_max_vars_per_channel(
        weight.movedim(0, -1), -magnitude, magnitude, num_bits=8, narrow_range=narrow_range
    ).movedim(-1, 0)
    assert_same_bits(outputs.detach().numpy(), wanted.detach().numpy(), what="outputs")
    for result, expected in zip(
        torch.autograd.grad(outputs, weight, gradient), torch.autograd.grad(wanted, weight, gradient), strict=True
    ):
        assert_same_bits(result.numpy(), expected.numpy(), what="gradient")
    assert torch.autograd.gradcheck(
        lambda g: torch.autograd.grad(
            fake_quant_rows.fake_quant_rows(weight.double(), 8, narrow_range), weight, g, create_graph=True
        )[0].double(),
        [gradient.double().requires_grad_()],
        eps=1e-2,
        atol=1e-4,
    )


@pytest.mark.parametrize("narrow_range", [False, True])
def test_within_equals_the_operators_with_a_range(narrow_range: bool) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.randn(40, 5, 3, 9, generator=torch.Generator().manual_seed(0)).requires_grad_()
    gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    magnitudes = torch.linspace(0, 3, 40).requires_grad_()
    outputs = fake_quant_rows.fake_quant_rows_within(weight, magnitudes, 8, narrow_range)
    wanted = eq.quantization.fake_quant_with_min_max_vars_per_channel(
        weight.movedim(0, -1), -magnitudes, magnitudes, num_bits=8, narrow_range=narrow_range
    ).movedim(-1, 0)
    assert_same_bits(outputs.detach().numpy(), wanted.detach().numpy(), what="outputs")
    operands = (weight, magnitudes)
    first = [torch.autograd.grad(tensor, operands, gradient, create_graph=True) for tensor in (outputs, wanted)]
    for result, expected in zip(*first, strict=True):
        assert_same_bits(result.detach().numpy(), expected.detach().numpy(), what="gradient")


def test_the_gradient_of_within_has_one() -> None:
    torch = pytest.importorskip("torch")
    weight, gradient = torch.randn(2, 6, 4, 2, generator=torch.Generator().manual_seed(0)).double()
    magnitudes = torch.linspace(0, 1.5, 6).double().requires_grad_()
    weight.requires_grad_()

    def gradients(upstream):
        outputs = fake_quant_rows.fake_quant_rows_within(weight, magnitudes)
        return torch.autograd.grad(outputs, (weight, magnitudes), upstream, create_graph=True)

    assert torch.autograd.gradcheck(gradients, [gradient.requires_grad_()])
