# SPDX-License-Identifier: Apache-2.0
"""Results about the smallest normal number: denormals are zeros, and whether a result is one is decided after rounding.

That is x86's rule and TensorFlow's. ARM flushes before it rounds, so what lies below the smallest normal number and
rounds up to it is where instruction sets would part (docs/decisions/arm64.md). The reference's arithmetic is checked
against exact fractions in test_arithmetic.py; here the kernels are checked against the reference, operator by operator,
on operands whose products, quotients, chains and conversions end there.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from bits import assert_same_bits
from conftest import DEVICES, ON_CPU

from exactqat.operators import OPERATORS, reference

FLOATS = ("float32", "float64")


def smallest(dtype: str) -> float:
    return float(np.finfo(dtype).tiny)


def compare(name: str, operands: list[np.ndarray], attributes: dict, device: str) -> list[np.ndarray]:
    op = OPERATORS[name]
    expected = reference.call(op, dict(zip(op.operands, operands, strict=True)), attributes)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for result, wanted in zip(DEVICES[device](op, operands, attributes), expected, strict=True):
        assert_same_bits(result, wanted, what=f"{name} on {device}")
    return list(expected)


def pairs(dtype: str, seed: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Factors whose products lie within a few steps of the smallest normal number, on both sides, of both signs."""
    random = np.random.Generator(np.random.PCG64(seed))
    exponent = int(np.finfo(dtype).minexp)
    step = np.finfo(dtype).eps / 2
    split = random.integers(exponent, 1, size)
    a = np.ldexp(1 + step * random.integers(-6, 7, size), split)
    b = np.ldexp(1 + step * random.integers(-6, 7, size), exponent - split)
    assert np.isfinite(a).all() and np.isfinite(b).all()
    signs = random.choice([-1.0, 1.0], (2, size))
    return (a * signs[0]).astype(dtype), (b * signs[1]).astype(dtype)


def has_border(results: np.ndarray) -> bool:
    """Whether there are smallest normal numbers and zeros: without both the operands would test nothing."""
    return bool((np.abs(results) == smallest(results.dtype.name)).any() and (results == 0).any())


def layouts(image: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    yield "NHWC", image
    yield "NCHW", np.ascontiguousarray(np.moveaxis(image, 3, 1))


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("multiplier", [1, 2])
def test_depthwise_products(multiplier: int, dtype: str, device: str) -> None:
    """One tap: each result is a product that rounds up to the smallest normal number, or does not."""
    channels = 67
    values, weights = pairs(dtype, 1, channels)
    filter = np.repeat(weights, multiplier).reshape(1, 1, channels, multiplier)
    border = False
    for (data_format, image), (_, gradient) in zip(
        layouts(np.tile(values, 3).reshape(1, 3, 1, channels)),
        layouts(np.tile(np.repeat(values, multiplier), 3).reshape(1, 3, 1, channels * multiplier)),
        strict=True,
    ):
        attributes = {"strides": (1, 1, 1, 1), "padding": "VALID", "data_format": data_format}
        (forward,) = compare("depthwise_conv2d_native", [image, filter], attributes, device)
        border |= has_border(forward)
        settings = {"input_sizes": image.shape, **attributes}
        compare("depthwise_conv2d_native_backprop_input", [filter, gradient], settings, device)
    assert border


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("multiplier", [1, 3])
@pytest.mark.parametrize("size", [3, 5])
def test_depthwise_chains(size: int, multiplier: int, dtype: str, device: str) -> None:
    """Chains of taps that come to the smallest normal number, leave it again and cancel; ordinary channels between."""
    random = np.random.Generator(np.random.PCG64([size, multiplier]))
    half = int(np.finfo(dtype).minexp) // 2
    step = np.finfo(dtype).eps

    def drawn(shape: tuple[int, ...]) -> np.ndarray:
        values = np.ldexp(1 + step * random.integers(-3, 4, shape), half + random.integers(-2, 2, shape))
        values *= random.choice([-1.0, 0.0, 1.0], shape, p=[0.4, 0.2, 0.4])
        return np.where(random.random(shape) < 0.02, random.standard_normal(shape), values).astype(dtype)

    for stride in (1, 2):
        for data_format, image in layouts(drawn((2, 9, 7, 13))):
            filter = drawn((size, size, 13, multiplier))
            strides = (1, stride, stride, 1) if data_format == "NHWC" else (1, 1, stride, stride)
            attributes = {"strides": strides, "padding": "SAME", "data_format": data_format}
            (forward,) = compare("depthwise_conv2d_native", [image, filter], attributes, device)
            assert has_border(forward)
            gradient = drawn(forward.shape)
            settings = {"input_sizes": image.shape, **attributes}
            compare("depthwise_conv2d_native_backprop_input", [filter, gradient], settings, device)
            settings = {"filter_sizes": filter.shape, **attributes}
            compare("depthwise_conv2d_native_backprop_filter", [image, gradient], settings, device)


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("dtype", FLOATS)
def test_filter_gradients(dtype: str, device: str) -> None:
    """Sums of one product: in float64 the product ends there, in float32 the conversion from float64."""
    values, gradients = (array.reshape(1, 1, 1, -1) for array in pairs(dtype, 2, 301))
    border = False
    for data_format, image in layouts(values):
        gradient = gradients if data_format == "NHWC" else np.ascontiguousarray(np.moveaxis(gradients, 3, 1))
        attributes = {"strides": (1, 1, 1, 1), "padding": "VALID", "data_format": data_format}
        settings = {"filter_sizes": (1, 1, 301, 1), **attributes}
        (result,) = compare("depthwise_conv2d_native_backprop_filter", [image, gradient], settings, device)
        border |= has_border(result)
    assert border


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_bits,narrow", [(2, True), (2, False), (3, False), (8, True), (8, False), (16, False)])
def test_ranges_whose_steps_are_the_smallest_normal_number(
    num_bits: int, narrow: bool, dtype: str, device: str
) -> None:
    steps = 2**num_bits - 1 - narrow
    tiny, unit = smallest(dtype), np.finfo(dtype).eps / 2
    # Quotients (max - min) / steps, and, for few steps, steps / (max - min), about the smallest normal number.
    widths = [tiny * steps * (1 + k * unit) for k in range(-6, 7)]
    widths += [steps / tiny * (1 + k * unit) for k in range(-6, 7) if steps < 4]
    border = False
    for width in widths:
        for share in (0.0, 0.25, 0.5, 1.0):
            low, high = np.array(-share * width, dtype), np.array((1 - share) * width, dtype)
            if not np.isfinite(high - low) or not low < high:
                continue
            x = np.concatenate([np.linspace(-1.2, 1.2, 41) * width, [0.0, tiny, -tiny, tiny / 2]])
            x = np.clip(x, np.finfo(dtype).min, np.finfo(dtype).max).astype(dtype)
            attributes = {"num_bits": num_bits, "narrow_range": narrow}
            (result,) = compare("fake_quant_with_min_max_vars", [x, low, high], attributes, device)
            border |= has_border(result)
            ends = [np.array([end, end], dtype) for end in (low, high)]
            pairs_of_x = np.stack([x, -x], 1)
            compare("fake_quant_with_min_max_vars_per_channel", [pairs_of_x, *ends], attributes, device)
            gradients = np.ones_like(pairs_of_x)
            name = "fake_quant_with_min_max_vars_per_channel_gradient"
            compare(name, [gradients, pairs_of_x, *ends], attributes, device)
            if dtype == "float32" and (low <= -tiny or high >= tiny):
                settings = {"min": float(low), "max": float(high), **attributes}
                compare("fake_quant_with_min_max_args", [x], settings, device)
    assert border


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_bits", [2, 3, 8])
def test_quantization_to_the_smallest_normal_scale(num_bits: int, dtype: str, device: str) -> None:
    tiny, unit = smallest(dtype), np.finfo(dtype).eps / 2
    border = False
    for whole in {2 ** (num_bits - 1) - 1, 2 ** (num_bits - 1), 2**num_bits - 1}:
        bounds = [tiny * whole * (1 + k * unit) for k in range(-4, 5)]
        bounds += [whole / tiny * (1 + k * unit) for k in range(-4, 5) if whole < 4]
        for bound in bounds:
            if bound > np.finfo(dtype).max:
                continue
            x = np.concatenate([np.linspace(-1.1, 1.1, 37) * bound, [tiny, -tiny, bound / whole, -bound / whole]])
            x = np.clip(x, np.finfo(dtype).min, np.finfo(dtype).max).astype(dtype)
            for flag in (True, False):
                for signed in (True, False):
                    low = np.array(-bound if signed else 0, dtype)
                    attributes = {"signed_input": signed, "num_bits": num_bits, "range_given": flag}
                    operands = [np.abs(x) if not signed else x, low, np.array(bound, dtype)]
                    (result,) = compare("quantize_and_dequantize_v4", operands, attributes, device)
                    border |= bool((np.abs(result) == tiny).any())
    assert border


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_batch_norm(training: bool, dtype: str, device: str) -> None:
    """In float32 the conversion from float64 ends there; in float64 products and quotients do, of the sums too."""
    random = np.random.Generator(np.random.PCG64(3))
    tiny, unit = smallest(dtype), np.finfo(dtype).eps / 2
    border = False
    for channels in (1, 2, 5, 18):
        # Inverse deviations a little off 1, by less than a step of float32.
        variance = np.full(channels, 1, dtype)
        scale, offset = np.ones(channels, dtype), np.zeros(channels, dtype)
        mean = np.zeros(channels, dtype)
        for epsilon in (0.0, 2.0**-25, 2.0**-24, 2.0**-23):
            x = tiny * (1 + unit * random.integers(-3, 8, (3, 4, 5, channels)))
            x = (x * random.choice([-1.0, 1.0], x.shape)).astype(dtype)
            if training:  # half of the values so small, the others about what makes a variance of 1
                x[0] = random.choice([-1.0, 1.0], x[0].shape).astype(dtype)
            if training and dtype == "float64":
                x *= 2.0**-511  # squares end at the smallest normal number
            for data_format, image in layouts(x):
                attributes = {"epsilon": epsilon, "is_training": training, "data_format": data_format}
                operands = [image, scale, offset, mean, variance]
                y, *_ = compare("fused_batch_norm_v3", operands, attributes, device)
                border |= training or has_border(y) or epsilon == 0
                gradient = np.array(image[::-1], order="C")
                operands = [gradient, image, scale, mean, variance, mean]
                compare("fused_batch_norm_grad_v3", operands, attributes, device)
    assert border


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("dtype", FLOATS)
def test_batch_norm_factors(dtype: str, device: str) -> None:
    """Scales, statistics and their updates whose products end there."""
    a, b = pairs(dtype, 4, 53)
    tiny = smallest(dtype)
    ordinary = np.ones(53, dtype)
    for data_format, image in layouts(np.broadcast_to(a, (2, 1, 3, 53)).copy()):
        attributes = {"epsilon": 0.0, "data_format": data_format}
        (y, *_) = compare(
            "fused_batch_norm_v3",
            [image, b, 0 * b, 0 * b, ordinary],
            {**attributes, "is_training": False},
            device,
        )
        assert has_border(y)
        gradient = image
        compare(
            "fused_batch_norm_grad_v3",
            [gradient, np.ones_like(image), b, 0 * b, ordinary, ordinary],
            {**attributes, "is_training": False},
            device,
        )
        for factor in (0.5, 2.0**-20, 0.9):
            statistics = [np.ldexp(np.abs(ordinary * tiny), k).astype(dtype) for k in (1, 20)]
            compare(
                "fused_batch_norm_v3",
                [image, ordinary, 0 * b, *statistics],
                {**attributes, "is_training": True, "exponential_avg_factor": factor},
                device,
            )


@pytest.mark.parametrize("device", ON_CPU)
def test_status_and_mode_of_the_processor_are_given_back(device: str) -> None:
    """Denormals are flushed inside the kernels only."""
    denormal = np.array([1e-40, -1e-40], np.float32)
    compare(
        "fake_quant_with_min_max_vars", [denormal, np.float32(-1).reshape(()), np.float32(1).reshape(())], {}, device
    )
    assert (denormal * np.float32(1) != 0).all()
    assert np.float32(2.0**-126) * np.float32(0.5) == np.float32(2.0**-127) != 0
