# SPDX-License-Identifier: Apache-2.0
"""Tensors of 16 bits: what the float32 kernel makes of the same numbers, rounded once. For every number there is, at
the sizes where loops and pieces end, in both layouts, in place, past the caches, and without float32 copies of tensors.

The float32 kernels are compared with the reference elsewhere; rounding here is NumPy's.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bits import assert_same_bits
from conftest import DEVICES, ON_CPU, WIDE

import exactqat as eq
from exactqat.operators import OPERATORS
from exactqat.operators.cpu import kernels

ml_dtypes = pytest.importorskip("ml_dtypes")
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

Call = tuple[str, list[np.ndarray], dict[str, Any]]


def compare(device: str, dtype: str, call: Call) -> list[np.ndarray]:
    """Runs a call, whose operands are float32, in 16 bits and in float32."""
    name, operands, attributes = call
    op, half = OPERATORS[name], DTYPES[dtype]
    wide = WIDE | {"min_cotangent", "max_cotangent"}
    with np.errstate(all="ignore"):
        rounded = [
            a.astype(half) if a.dtype == np.float32 and n not in wide else a
            for n, a in zip(op.operands, operands, strict=True)
        ]
        widened = [a.astype(np.float32) if a.dtype == half else a for a in rounded]
    results = DEVICES[device](op, *op.bind(tuple(rounded), attributes))
    expected = DEVICES[device](op, *op.bind(tuple(widened), attributes))
    for field, result, wanted in zip(op.results, results, expected, strict=True):
        with np.errstate(all="ignore"):
            assert_same_bits(result, wanted.astype(result.dtype), what=f"{name} {field} of {rounded[0].shape}")
    return results


def elementwise(g: np.ndarray, x: np.ndarray) -> Iterator[Call]:
    """Calls of gradients and inputs, [rows, channels]."""
    channels = x.shape[-1]
    one = np.float32(1)
    low, high = np.linspace(-1.5, -0.5, channels, dtype=np.float32), np.linspace(2, 1, channels, dtype=np.float32)
    mask = np.random.Generator(np.random.PCG64(1)).integers(0, 256, (x.size + 3) // 4, np.uint8)
    if x.size % 4:
        mask[-1] &= (1 << 2 * (x.size % 4)) - 1
    fake = "fake_quant_with_min_max_"
    for attributes in ({}, {"min": 0.0, "max": 6.0, "num_bits": 4}):
        yield f"{fake}args", [x], attributes
        yield f"{fake}args_training", [x], attributes
        yield f"{fake}args_gradient", [g, x], attributes
    yield f"{fake}args_gradient_from_mask", [g, mask], {}
    for form, ends in (("vars", [-one, one]), ("vars_per_channel", [low, high])):
        yield f"{fake}{form}", [x, *ends], {}
        yield f"{fake}{form}_training", [x, *ends], {}
        yield f"{fake}{form}_gradient", [g, x, *ends], {}
        yield f"{fake}{form}_gradient_from_mask", [g, mask, *ends], {}
    yield f"{fake}vars_gradient_transpose", [g, one, one, x, -one, one], {}
    yield f"{fake}vars_gradient_transpose", [g, low, high, x, low, high], {}
    yield f"{fake}vars_gradient_from_mask_transpose", [g, low, high, mask, low, high], {}
    yield "fake_quant_rows", [x], {}
    yield "fake_quant_rows_gradient", [g, x], {}
    magnitudes = np.linspace(0, 2, len(x), dtype=np.float32)
    yield "fake_quant_rows_within", [x, magnitudes], {}
    yield "fake_quant_rows_within_gradient", [g, x, magnitudes], {}
    dequantize = "quantize_and_dequantize_v"
    yield f"{dequantize}2", [x, -one, one], {"range_given": True}
    yield f"{dequantize}2", [x, -one, one], {"range_given": False}
    yield f"{dequantize}2", [x, low, high], {"range_given": False, "axis": 1}
    yield f"{dequantize}2", [x, low[:1].repeat(len(x)), high[:1].repeat(len(x))], {"range_given": False, "axis": 0}
    yield f"{dequantize}4_grad", [g, x, -one, one], {}
    yield f"{dequantize}4_grad", [g, x, low, high], {"axis": 1}
    yield "quantized_batch_norm_states", [mask, x], {}


def batch_norm(g: np.ndarray, x: np.ndarray, data_format: str, scale: float = 1.0) -> Iterator[Call]:
    channels = x.shape[data_format.index("C")]
    vector = np.linspace(0.5, 1.5, channels, dtype=np.float32)
    nothing = vector[:0]
    for training in (False, True):
        attributes = {"is_training": training, "data_format": data_format}
        statistics = [nothing, nothing] if training else [-vector, vector]
        yield "fused_batch_norm_v3", [x, scale * vector, scale * vector, *statistics], attributes
        yield "fused_batch_norm_grad_v3", [g, x, scale * vector, -vector, vector, nothing], attributes
    yield "channel_sum", [x], {"data_format": data_format}


def quantized_batch_norm(g: np.ndarray, x: np.ndarray) -> Iterator[Call]:
    vector = np.linspace(0.5, 1.5, x.shape[-1], dtype=np.float32)
    mean, variance = -vector.astype(np.float64), vector.astype(np.float64)
    one = np.float32(1)
    yield "batch_norm_statistics", [x, vector, vector, vector, vector], {}
    for activation in ("NONE", "RELU", "RELU6"):
        call = [x, vector, vector, mean, variance, -one, 3 * one], {"activation": activation}
        yield "quantized_batch_norm", *call
        yield "quantized_batch_norm_training", *call
    mask = np.random.Generator(np.random.PCG64(1)).integers(0, 256, (x.size + 3) // 4, np.uint8)
    if x.size % 4:
        mask[-1] &= (1 << 2 * (x.size % 4)) - 1
    yield "quantized_batch_norm_gradient", [g, x, vector, mean, variance, mask], {}


def numbers(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.Generator(np.random.PCG64(shape))
    return random.standard_normal(shape, np.float32), random.standard_normal(shape, np.float32)


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number(dtype: str, device: str) -> None:
    every = np.arange(65536, dtype=np.uint16).view(DTYPES[dtype]).astype(np.float32).reshape(512, 128)
    others = np.roll(every, 12345)
    for call in elementwise(others, every):
        compare(device, dtype, call)
    # Results of every size there is, denormals and those that overflow among them.
    for scale in (1.0, 1e-7, 2.0**-17, 3e4, 1e-38):
        for name, operands, attributes in batch_norm(others[None, None], every[None, None], "NHWC", scale):
            if not attributes.get("is_training", True):
                compare(device, dtype, (name, operands, attributes))
    for call in quantized_batch_norm(others, every):
        compare(device, dtype, call)


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_about_vectors_and_pieces(dtype: str, device: str) -> None:
    shapes = [(1, n) for n in (*range(1, 35), 63, 64, 65, 127, 129)]
    shapes += [(4097, 1), (4095, 3), (130, 255), (513, 64), (65, 1100), (3, 4099), (37, 1000)]
    for shape in shapes:
        for call in itertools.chain(elementwise(*numbers(*shape)), quantized_batch_norm(*numbers(*shape))):
            compare(device, dtype, call)


# Images, channels, height, width: planes of less than a line, that are gathered, in pieces, and of more than a piece.
IMAGES = [(1, 7, 3, 3), (5, 70, 3, 3), (33, 17, 1, 2), (8, 37, 7, 7), (3, 100, 6, 6), (40, 20, 14, 14), (3, 5, 33, 31)]
IMAGES += [(2, 3, 66, 65), (700, 1, 10, 10), (300, 2, 17, 16), (1, 1, 1, 1), (2, 33, 16, 16)]


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_batch_norm(data_format: str, dtype: str, device: str) -> None:
    for shape in IMAGES:
        g, x = numbers(*shape)
        if data_format == "NHWC":
            g, x = (np.ascontiguousarray(np.moveaxis(a, 1, 3)) for a in (g, x))
        for call in batch_norm(g, x, data_format):
            compare(device, dtype, call)


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_depthwise(data_format: str, dtype: str, device: str) -> None:
    """Few images and many, which are widened a few at a time."""
    for number, (batch, side, channels) in enumerate([(1, 5, 3), (3, 9, 17), (37, 14, 40), (9, 33, 64)]):
        for stride, multiplier in ((1, 1), (2, 1), (1, 2)):
            images = numbers(batch, side, side, channels)[0]
            output = numbers(batch, -(-side // stride), -(-side // stride), channels * multiplier)[0]
            strides = (1, stride, stride, 1)
            if data_format == "NCHW":
                images, output = (np.ascontiguousarray(np.moveaxis(a, 3, 1)) for a in (images, output))
                strides = (1, 1, stride, stride)
            filter = numbers(3, 3, channels, multiplier)[0]
            attributes = {"strides": strides, "padding": "SAME", "data_format": data_format}
            calls: list[Call] = [
                ("depthwise_conv2d_native", [images, filter], attributes),
                ("depthwise_conv2d_native_backprop_input", [filter, output], {"input_sizes": images.shape}),
                ("depthwise_conv2d_native_backprop_filter", [images, output], {"filter_sizes": filter.shape}),
            ]
            for name, operands, sizes in calls:
                sizes = {} if sizes is attributes else sizes
                if number and multiplier == 2 and name.endswith("filter"):
                    continue
                compare_depthwise(device, dtype, name, operands, {**attributes, **sizes})


def compare_depthwise(
    device: str, dtype: str, name: str, operands: list[np.ndarray], attributes: dict[str, Any]
) -> None:
    op, half = OPERATORS[name], DTYPES[dtype]
    sizes = [key for key in ("input_sizes", "filter_sizes") if key in attributes]
    results = []
    rounded = [a.astype(half) for a in operands]
    for arrays in (rounded, [a.astype(np.float32) for a in rounded]):
        arguments = {**dict(zip(op.operands, arrays, strict=True)), **attributes}
        for key in sizes:
            arguments[key] = np.array(arguments[key], np.int32)
        (result,) = DEVICES[device](op, *op.bind((), arguments))
        results.append(result)
    assert_same_bits(results[0], results[1].astype(half), what=f"{name} of {operands[0].shape}")


@pytest.mark.parametrize("device", ON_CPU)
@pytest.mark.parametrize("dtype", DTYPES)
def test_past_the_caches(dtype: str, device: str) -> None:
    """Results that begin between lines are stored past the caches too. On a machine whose last cache is larger than
    twice these tensors this is the ordinary way."""
    g, x = (np.resize(a, (140_001, 72)) for a in numbers(5003, 72))
    chosen = {
        "fake_quant_with_min_max_vars_training", "fake_quant_with_min_max_vars_per_channel",
        "fake_quant_with_min_max_args_gradient", "fused_batch_norm_v3",
    }  # fmt: skip
    image = batch_norm(g.reshape(3, 46_667, 1, 72), x.reshape(3, 46_667, 1, 72), "NHWC")
    planes = batch_norm(g.reshape(3, 72, 46_667, 1), x.reshape(3, 72, 46_667, 1), "NCHW")
    for call in itertools.chain(elementwise(g, x), itertools.islice(image, 1), itertools.islice(planes, 1)):
        if call[0] in chosen and not call[2].get("num_bits"):
            compare(device, dtype, call)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_in_place(data_format: str, dtype: str) -> None:
    for shape in ((5, 70, 3, 3), (3, 5, 66, 65), (9, 40, 14, 14)):
        g, x = (a.astype(DTYPES[dtype]) for a in numbers(*shape))
        vector = np.linspace(0.5, 1.5, shape[data_format.index("C")], dtype=np.float32)
        low = np.linspace(-1.5, -0.5, shape[-1], dtype=np.float32)
        raw = eq.raw_ops
        for training in (False, True):
            common = {"scale": vector, "data_format": data_format, "is_training": training}
            statistics = {"mean": vector[:0] if training else vector, "variance": vector[:0] if training else vector}
            call = {"offset": vector, **statistics, **common}
            expected = raw.FusedBatchNormV3(x=x, **call)
            place = x.copy()
            raw.FusedBatchNormV3(x=place, **call, out=(place, *(np.empty_like(part) for part in expected[1:])))
            assert_same_bits(place, expected[0], what="batch norm in place")
            reserves = {"reserve_space_1": vector, "reserve_space_2": vector, "reserve_space_3": vector[:0]}
            expected = raw.FusedBatchNormGradV3(y_backprop=g, x=x, **reserves, **common)
            for place, operands in ((g.copy(), ("y_backprop", "x")), (x.copy(), ("x", "y_backprop"))):
                arguments = {operands[0]: place, operands[1]: x if operands[1] == "x" else g}
                out = (place, *(np.empty_like(part) for part in expected[1:]))
                raw.FusedBatchNormGradV3(**arguments, **reserves, **common, out=out)
                assert_same_bits(place, expected[0], what=f"the gradient in the place of {operands[0]}")
        place = x.copy()
        expected = eq.fake_quant_with_min_max_vars_per_channel(x, low, -low)
        eq.fake_quant_with_min_max_vars_per_channel(place, low, -low, out=place)
        assert_same_bits(place, expected, what="fake quantization in place")


MEMORY = """
import sys
from pathlib import Path
import ml_dtypes
import numpy as np
import exactqat as eq

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))

name, data_format = sys.argv[1].split("|")
shape = (128, 64, 64, 64)
x, y = (np.ones(shape, ml_dtypes.bfloat16) for _ in range(2))
one, vector = np.float32(1), np.ones(64, np.float32)
few = [np.zeros(64, np.float32) for _ in range(4)]
window = {"strides": [1, 1, 1, 1], "padding": "SAME", "data_format": data_format}
filter = np.ones((3, 3, 64, 1), ml_dtypes.bfloat16)
form = {"data_format": data_format}
raw = eq.raw_ops
calls = {
    "fake quantization": lambda x, y: eq.fake_quant_with_min_max_vars(x, -one, one, out=y),
    "gradient": lambda x, y: eq.fake_quant_with_min_max_vars_per_channel_gradient(
        x, x, -vector, vector, out=(y, few[0], few[1])),
    "dequantize": lambda x, y: raw.QuantizeAndDequantizeV2(input=x, input_min=-one, input_max=one, out=y),
    "batch norm": lambda x, y: raw.FusedBatchNormV3(
        x=x, scale=vector, offset=vector, mean=vector[:0], variance=vector[:0], **form,
        out=(y, *few, np.zeros((), np.float32))),
    "batch norm gradient": lambda x, y: raw.FusedBatchNormGradV3(
        y_backprop=x, x=x, scale=vector, reserve_space_1=vector, reserve_space_2=vector, reserve_space_3=vector[:0],
        **form, out=(y, few[0], few[1], vector[:0].copy(), vector[:0].copy())),
    "depthwise": lambda x, y: raw.DepthwiseConv2dNative(input=x, filter=filter, **window, out=y),
    "depthwise input": lambda x, y: raw.DepthwiseConv2dNativeBackpropInput(
        input_sizes=x.shape, filter=filter, out_backprop=x, **window, out=y),
}
calls[name](x[:2], y[:2])
before = resident("VmRSS:")
calls[name](x, y)
print(resident("VmHWM:") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="tells no peak of memory")
@pytest.mark.parametrize(
    "call",
    ["fake quantization|NHWC", "gradient|NHWC", "dequantize|NHWC"]
    + [
        "|".join(pair)
        for pair in itertools.product(
            ("batch norm", "batch norm gradient", "depthwise", "depthwise input"), ("NHWC", "NCHW")
        )
    ],
)
def test_no_copies_of_tensors(call: str) -> None:
    """A tensor of 64 MiB; a float32 copy would take 128."""
    elementwise = call.startswith(("fake quantization", "gradient", "dequantize"))
    if elementwise and kernels.__name__.endswith("_baseline"):
        pytest.skip("baseline kernels make float32 copies there: docs/decisions/halves.md")
    command = [sys.executable, "-c", MEMORY, call]
    environment = {**os.environ, "EXACTQAT_NUM_THREADS": "2"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert float(done.stdout) < 24, f"{call} raised the peak by {done.stdout.strip()} MiB"
