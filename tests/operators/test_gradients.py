# SPDX-License-Identifier: Apache-2.0
"""First, second and third order gradients against finite differences, in PyTorch and JAX, in float64.

The operators that quantize are stairs whose declared gradient is that of the ramp they follow. With 16 bits (or 40)
the stairs are so fine that finite differences over many steps see the ramp, which checks those gradients too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import exactqat as eq

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy
raw = eq.raw_ops


class Example(NamedTuple):
    """A function of float64 arrays; `step` for finite differences over stairs, 0 for a smooth function."""

    function: Callable[..., Any]
    arrays: list[np.ndarray]
    step: float = 0.0


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.Generator(np.random.PCG64(12))
    return [random.standard_normal(shape) for shape in shapes]


def away_from(values: np.ndarray, *corners: float) -> np.ndarray:
    """Moved so that no value is within 0.2 of a corner, where a difference sees two slopes."""
    for corner in corners:
        near = np.abs(values - corner) < 0.2
        values = np.where(near, corner + np.where(values >= corner, 0.3, -0.3), values)
    return values


def like(array: Any, value: np.ndarray) -> Any:
    """A constant of the framework of `array`; check_grads calls functions with NumPy arrays too."""
    if isinstance(array, torch.Tensor):
        return torch.from_numpy(value)
    return jnp.asarray(value) if isinstance(array, jax.Array) else value


def convolution(data_format: str, padding: Any, strides: tuple[int, int], dilations: tuple[int, int]) -> Example:
    shape = (2, 6, 5, 2) if data_format == "NHWC" else (2, 2, 6, 5)
    both = {"H": strides[0], "W": strides[1]}
    function = lambda x, w: eq.nn.depthwise_conv2d(  # noqa: E731
        x, w, [both.get(letter, 1) for letter in data_format], padding, data_format, dilations
    )
    return Example(function, arrays(shape, (3, 2, 2, 2)))


def batch_norm(shape: tuple[int, ...], data_format: str) -> Example:
    channels = shape[1] if data_format.startswith("NC") else shape[-1]

    def function(x: Any, scale: Any, offset: Any) -> Any:
        return raw.FusedBatchNormV3(
            x=x, scale=scale, offset=offset, mean=scale[:0], variance=scale[:0], data_format=data_format, epsilon=0.01
        ).y

    return Example(function, arrays(shape, (channels,), (channels,)))


def batch_norm_gradient(shape: tuple[int, ...], data_format: str, is_training: bool) -> Example:
    """The gradient operator as a function of what it is a function of; in training the statistics follow x."""
    channels = shape[1] if data_format.startswith("NC") else shape[-1]
    fixed = np.linspace(0.5, 1.5, channels)

    def function(gradient: Any, x: Any, scale: Any) -> Any:
        constant = like(x, fixed)
        options = {"data_format": data_format, "is_training": is_training, "epsilon": 0.01}
        forward = raw.FusedBatchNormV3(x=x, scale=scale, offset=constant, mean=constant, variance=constant, **options)
        reserves = {f"reserve_space_{i}": getattr(forward, f"reserve_space_{i}") for i in (1, 2, 3)}
        return tuple(raw.FusedBatchNormGradV3(y_backprop=gradient, x=x, scale=scale, **reserves, **options)[:3])

    return Example(function, arrays(shape, shape, (channels,)))


x, g = arrays((6, 3), (6, 3))
x = away_from(1.5 * x, -1.0, 1.0)
low, high = np.full(3, -1.0), np.full(3, 1.0)
conv = {"strides": [1, 1, 1, 1], "padding": "SAME"}
EXAMPLES = {
    "DepthwiseConv2dNative": convolution("NHWC", "SAME", (1, 1), (1, 1)),
    "DepthwiseConv2dNative NCHW, unequal strides": convolution("NCHW", "VALID", (1, 2), (1, 1)),
    "DepthwiseConv2dNative stride, dilation": convolution("NHWC", "SAME", (2, 1), (1, 2)),
    "DepthwiseConv2dNative explicit": convolution("NHWC", [(0, 0), (2, 0), (1, 3), (0, 0)], (2, 2), (2, 1)),
    "DepthwiseConv2dNativeBackpropInput": Example(
        lambda w, dy: raw.DepthwiseConv2dNativeBackpropInput(
            input_sizes=(2, 4, 3, 2), filter=w, out_backprop=dy, **conv
        ),
        arrays((2, 3, 2, 2), (2, 4, 3, 4)),
    ),
    "DepthwiseConv2dNativeBackpropFilter": Example(
        lambda a, dy: raw.DepthwiseConv2dNativeBackpropFilter(
            input=a, filter_sizes=(2, 3, 2, 2), out_backprop=dy, **conv
        ),
        arrays((2, 4, 3, 2), (2, 4, 3, 4)),
    ),
    "FusedBatchNormV3": batch_norm((2, 3, 2, 3), "NHWC"),
    "FusedBatchNormV3 NCHW": batch_norm((2, 3, 2, 2), "NCHW"),
    "FusedBatchNormV3 NDHWC": batch_norm((2, 2, 1, 2, 2), "NDHWC"),
    "FusedBatchNormV3 NCDHW": batch_norm((2, 2, 1, 2, 2), "NCDHW"),
    "FusedBatchNormV3 inference": Example(
        lambda a, s, o: (
            raw.FusedBatchNormV3(x=a, scale=s, offset=o, mean=o * 0 + 1, variance=o * 0 + 2, is_training=False).y
        ),
        arrays((2, 2, 2, 3), (3,), (3,)),
    ),
    "FusedBatchNormV3 inference, by its statistics": Example(
        lambda a, s, m, v: (
            raw.FusedBatchNormV3(x=a, scale=s, offset=s, mean=m, variance=v * v + 1, is_training=False, epsilon=0.01).y
        ),
        arrays((2, 2, 2, 3), (3,), (3,), (3,)),
    ),
    "FusedBatchNormGradV3": batch_norm_gradient((2, 3, 2, 2), "NHWC", True),
    "FusedBatchNormGradV3 NCHW": batch_norm_gradient((2, 2, 3, 2), "NCHW", True),
    "FusedBatchNormGradV3 inference": batch_norm_gradient((2, 2, 3, 2), "NCHW", False),
    "FakeQuantWithMinMaxArgs": Example(
        lambda a: raw.FakeQuantWithMinMaxArgs(inputs=a, min=-1, max=1, num_bits=16), [x], 0.05
    ),
    "FakeQuantWithMinMaxVars": Example(
        lambda a, lo, hi: raw.FakeQuantWithMinMaxVars(inputs=a, min=lo, max=hi, num_bits=16), [x, low[0], high[0]], 0.05
    ),
    "FakeQuantWithMinMaxVarsPerChannel": Example(
        lambda a, lo, hi: raw.FakeQuantWithMinMaxVarsPerChannel(inputs=a, min=lo, max=hi, num_bits=16),
        [x, low, high],
        0.05,
    ),
    "FakeQuantWithMinMaxArgsGradient": Example(
        lambda dy: raw.FakeQuantWithMinMaxArgsGradient(gradients=dy, inputs=like(dy, x), min=-1, max=1),
        [g],
    ),
    "FakeQuantWithMinMaxVarsGradient": Example(
        lambda dy, a: tuple(raw.FakeQuantWithMinMaxVarsGradient(gradients=dy, inputs=a, min=-1.0, max=1.0)), [g, x]
    ),
    "FakeQuantWithMinMaxVarsPerChannelGradient": Example(
        lambda dy, a, lo, hi: tuple(
            raw.FakeQuantWithMinMaxVarsPerChannelGradient(gradients=dy, inputs=a, min=lo, max=hi)
        ),
        [g, x, low, high],
    ),
    "QuantizeAndDequantizeV2": Example(
        lambda a: raw.QuantizeAndDequantizeV2(input=a, input_min=-9.0, input_max=9.0, range_given=True, num_bits=40),
        [x],
    ),
    "QuantizeAndDequantizeV3": Example(
        lambda a: raw.QuantizeAndDequantizeV3(input=a, input_min=-9.0, input_max=9.0, num_bits=40), [x]
    ),
    "QuantizeAndDequantizeV4": Example(
        lambda a: raw.QuantizeAndDequantizeV4(input=a, input_min=-1.0, input_max=1.0, range_given=True, num_bits=40),
        [x],
    ),
    "QuantizeAndDequantizeV4Grad": Example(
        lambda dy, a: raw.QuantizeAndDequantizeV4Grad(gradients=dy, input=a, input_min=-1.0, input_max=1.0)[0], [g, x]
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_torch(name: str) -> None:
    function, values, step = EXAMPLES[name]
    tensors = [torch.tensor(value, requires_grad=True) for value in values]
    assert torch.autograd.gradcheck(function, tensors, **({"eps": step, "atol": 2e-3} if step else {}))
    if not step:  # finite differences of a declared gradient that is itself a stair have nothing to say
        assert torch.autograd.gradgradcheck(function, tensors, atol=1e-4)


@pytest.mark.parametrize("name", EXAMPLES)
def test_jax(name: str) -> None:
    from jax.test_util import check_grads

    function, values, step = EXAMPLES[name]
    with jax.enable_x64(True):
        inputs = [jnp.asarray(value) for value in values]
        if step:
            check_grads(function, inputs, order=1, modes=["rev"], eps=step, atol=5e-3, rtol=5e-3)
        else:
            check_grads(function, inputs, order=2, modes=["rev"], atol=1e-4, rtol=1e-4)


def test_inference_gradients_of_the_statistics() -> None:
    """TensorFlow answers None; here they are the derivatives."""
    values = arrays((2, 3, 2, 3), (3,), (3,), (3,), (3,))

    def function(a: Any, s: Any, o: Any, m: Any, v: Any) -> Any:
        return raw.FusedBatchNormV3(x=a, scale=s, offset=o, mean=m, variance=v * v + 1, is_training=False).y

    assert torch.autograd.gradcheck(function, [torch.tensor(value, requires_grad=True) for value in values])


def test_third_order() -> None:
    """Where TensorFlow has it: batch normalization and the depthwise convolution."""
    (a, s, o) = (torch.tensor(value, requires_grad=True) for value in arrays((2, 2, 2, 2), (2,), (2,)))

    def second(a: Any, s: Any) -> Any:
        y = raw.FusedBatchNormV3(x=a, scale=s, offset=o, mean=s[:0], variance=s[:0], epsilon=0.01).y
        (first,) = torch.autograd.grad((y**3).sum(), a, create_graph=True)
        return torch.autograd.grad((first**2).sum(), (a, s), create_graph=True)

    assert torch.autograd.gradcheck(second, (a, s), atol=1e-3, rtol=1e-3)
    image, filter = (torch.tensor(value, requires_grad=True) for value in arrays((1, 3, 3, 2), (2, 2, 2, 1)))

    def third(image: Any, filter: Any) -> Any:
        y = eq.nn.depthwise_conv2d(image, filter, [1, 1, 1, 1], "SAME")
        (first,) = torch.autograd.grad((y**3).sum(), filter, create_graph=True)
        return torch.autograd.grad((first**2).sum(), image, create_graph=True)

    assert torch.autograd.gradcheck(third, (image, filter), atol=1e-3)


def test_second_derivative_of_fake_quantization() -> None:
    """TensorFlow has none. The gradient operators are linear in the gradient, so this is their transpose."""
    inputs = torch.tensor([-2.0, -0.3, 0.4, 2.0], dtype=torch.float64, requires_grad=True)
    lo = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    hi = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    gradient = torch.tensor([3.0, 5.0, 7.0, 11.0], dtype=torch.float64, requires_grad=True)
    y = eq.fake_quant_with_min_max_vars(inputs, lo, hi)
    to_inputs, to_low, to_high = torch.autograd.grad(y, (inputs, lo, hi), gradient, create_graph=True)
    assert (to_inputs.tolist(), to_low.item(), to_high.item()) == ([0, 5, 7, 0], 3, 11)
    (back,) = torch.autograd.grad((to_inputs * 2).sum() + to_low * 13 + to_high * 17, gradient)
    assert back.tolist() == [13, 2, 2, 17]
