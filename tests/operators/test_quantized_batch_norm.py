# SPDX-License-Identifier: Apache-2.0
"""Batch norm, activation and fake quantization in one operator: equal to the reference, and to the three one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from bits import assert_same_bits
from conftest import DEVICES, ON_CPU

import exactqat as eq
from exactqat.operators import OPERATORS, reference
from exactqat.operators.declarations.kit import quantized_batch_norm

torch = pytest.importorskip("torch")

SHAPES = [
    (1, 7),
    (3, 1),
    (5, 3, 3, 2),
    (70, 5),
    (2, 9, 11, 16),
    (131, 40),
    (4, 7, 7, 96),
    (65, 130),
    (3, 31, 33, 24),
    (9, 1001),
    (531, 24),
    (70, 2, 48),
]
ACTIVATIONS = ["NONE", "RELU", "RELU6"]
RANGES = [(0.0, 6.0), (-1.5, 2.25), (0.0, 0.0), (-1e-3, 1e-3), (0.5, 0.5), (-np.inf, np.inf)]


def operands_of(shape: tuple[int, ...], dtype: str = "float32", nasty: bool = False) -> list[np.ndarray]:
    random = np.random.Generator(np.random.PCG64(sum(shape)))
    channels = shape[-1]
    x = (random.standard_normal(shape) * 3 + random.standard_normal(channels)).astype(dtype)
    scale, offset, mean = (random.standard_normal(channels).astype(dtype) for _ in range(3))
    if channels > 2:
        scale[1] = 0
    if nasty:
        flat = x.reshape(-1, channels)
        flat[0, 0] = np.nan
        flat[:, -1] = 1e-42
        flat[-1, channels // 2] = np.inf
        scale[channels // 3] = 1e-41
    return [x, scale, offset, mean, random.random(channels).astype(dtype)]


def run_and_compare(name: str, operands: list[np.ndarray], attributes: dict, device: str) -> list[np.ndarray]:
    op = OPERATORS[name]
    expected = reference.call(op, dict(zip(op.operands, operands, strict=True)), attributes)
    expected = expected if isinstance(expected, tuple) else (expected,)
    arrays, checked = op.bind(tuple(operands), attributes)
    results = DEVICES[device](op, arrays, checked)
    for field, result, wanted in zip(op.results, results, expected, strict=True):
        if field in ("low", "high"):  # the sign of a zero is left open
            result, wanted = result + 0.0, wanted + 0.0
        assert_same_bits(result, wanted, what=f"{name} {field} on {device}")
    return list(expected)


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["float32", "float64", "nasty"])
def test_kernels_equal_the_reference(shape: tuple[int, ...], kind: str, device: str) -> None:
    operands = operands_of(shape, "float64" if kind == "float64" else "float32", kind == "nasty")
    real = operands[0].dtype
    gradients = np.random.Generator(np.random.PCG64(4)).standard_normal(shape).astype(real)
    for activation, (low, high) in itertools.product(ACTIVATIONS, RANGES):
        common = {"epsilon": 1e-3, "activation": activation}
        statistics = run_and_compare(
            "batch_norm_statistics", operands, common | {"exponential_avg_factor": 0.1}, device
        )
        arguments = [*operands[:3], *statistics[2:4], np.array(low, real), np.array(high, real)]
        for bits, narrow in ((8, False), (4, True)):
            numbers = common | {"num_bits": bits, "narrow_range": narrow}
            (outputs,) = run_and_compare("quantized_batch_norm", arguments, numbers, device)
            same, mask = run_and_compare("quantized_batch_norm_training", arguments, numbers, device)
            assert_same_bits(same, outputs, what="the training form's outputs")
            run_and_compare("quantized_batch_norm_states", [mask, operands[0]], {}, device)
            for range_gradients in (False, True):
                run_and_compare(
                    "quantized_batch_norm_gradient",
                    [gradients, operands[0], operands[1], *statistics[2:4], mask],
                    {"epsilon": 1e-3, "range_gradients": range_gradients},
                    device,
                )


def composed(x, scale, offset, low, high, activation, bits, narrow):
    """The three operators one by one, in PyTorch."""
    image = x.reshape(-1, 1, 1, x.shape[-1])
    nothing = scale[:0].detach()
    y = eq.raw_ops.FusedBatchNormV3(x=image, scale=scale, offset=offset, mean=nothing, variance=nothing, epsilon=1e-3).y
    y = {"NONE": lambda t: t, "RELU": torch.relu, "RELU6": torch.nn.functional.relu6}[activation](y)
    quantized = eq.quantization.fake_quant_with_min_max_vars(y, low, high, num_bits=bits, narrow_range=narrow)
    return y.reshape(x.shape), quantized.reshape(x.shape)


def fused(x, scale, offset, low, high, activation, bits, narrow):
    zeros = torch.zeros_like(scale)
    statistics = quantized_batch_norm.batch_norm_statistics(
        x.detach(), scale.detach(), offset.detach(), zeros, zeros, 1e-3, 1.0, activation
    )
    return statistics, quantized_batch_norm.quantized_batch_norm(
        x, scale, offset, statistics.precise_mean, statistics.precise_variance, low, high,
        1e-3, activation, bits, narrow,
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("ends", RANGES[:4], ids=str)
def test_equals_the_three_operators(shape: tuple[int, ...], activation: str, ends: tuple[float, float]) -> None:
    x, scale, offset = (torch.from_numpy(array) for array in operands_of(shape)[:3])
    ends_tensors = [torch.tensor(end) for end in ends]
    gradients = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    results = []
    for form in (composed, fused):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, scale, offset, *ends_tensors)]
        first, outputs = form(*leaves, activation, 8, False)
        results.append((first, outputs.detach(), torch.autograd.grad(outputs, leaves, gradients)))
    (activated, wanted, wanted_gradients), (statistics, outputs, given_gradients) = results
    assert_same_bits(outputs.numpy(), wanted.numpy(), what="outputs")
    assert float(statistics.low) == float(activated.detach().min())
    assert float(statistics.high) == float(activated.detach().max())
    for name, result, gradient in zip(
        ["x", "scale", "offset", "min", "max"], given_gradients, wanted_gradients, strict=True
    ):
        assert_same_bits((result + 0.0).numpy(), (gradient + 0.0).numpy(), what=f"gradient of {name}")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_second_order_gradients_are_those_of_the_three_operators(activation: str) -> None:
    torch.manual_seed(0)
    x, scale, offset = torch.randn(40, 3).double() * 2, torch.rand(3).double() + 0.5, torch.randn(3).double()
    ends = [torch.tensor(-1.5).double(), torch.tensor(2.5).double()]
    answers = []
    for form in (composed, fused):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, scale, offset, *ends)]
        gradients = torch.linspace(-1, 1, x.numel()).double().reshape(x.shape).requires_grad_()
        outputs = form(*leaves, activation, 8, False)[1]
        first = torch.autograd.grad(outputs, leaves, gradients, create_graph=True)
        total = sum((tensor * torch.linspace(0.5, 2, tensor.numel()).reshape(tensor.shape)).sum() for tensor in first)
        answers.append(torch.autograd.grad(total, [gradients, *leaves[:2]]))
    for result, wanted in zip(*reversed(answers), strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-9, atol=1e-12)
    assert answers[0][1].abs().max() > 0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    x, scale, offset, *_ = operands_of((3, 61, 67, 19))
    low, high = np.float32(-1), np.float32(2)
    gradients = np.random.Generator(np.random.PCG64(4)).standard_normal(x.shape).astype(np.float32)
    before = eq.get_num_threads()
    results = []
    try:
        for count in (1, threads):
            eq.set_num_threads(count)
            statistics = quantized_batch_norm.batch_norm_statistics(x, scale, offset, scale, scale)
            precise = statistics.precise_mean, statistics.precise_variance
            outputs, mask = quantized_batch_norm.quantized_batch_norm_training(x, scale, offset, *precise, low, high)
            backward = quantized_batch_norm.quantized_batch_norm_gradient(gradients, x, scale, *precise, mask)
            results.append([*statistics, outputs, mask, *backward])
    finally:
        eq.set_num_threads(before)
    for result, wanted in zip(*results, strict=True):
        assert_same_bits(np.asarray(result), np.asarray(wanted), what=f"a result with {threads} threads")


def test_refusals() -> None:
    x, scale, offset, mean, variance = operands_of((4, 3))
    with pytest.raises(ValueError, match="empty"):
        quantized_batch_norm.batch_norm_statistics(x[:0], scale, offset, mean, variance)
    low, high = np.float32(1), np.float32(-1)
    wide = mean.astype(np.float64), variance.astype(np.float64)
    with pytest.raises(ValueError, match="min must not be greater than max"):
        quantized_batch_norm.quantized_batch_norm(x, scale, offset, *wide, low, high)
    with pytest.raises(TypeError, match="mean must be float64"):
        quantized_batch_norm.quantized_batch_norm(x, scale, offset, mean, variance, high, low)
    with pytest.raises(ValueError, match="mask must be uint8 of shape"):
        quantized_batch_norm.quantized_batch_norm_gradient(x, x, scale, *wide, np.zeros(2, np.uint8))
