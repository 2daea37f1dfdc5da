# SPDX-License-Identifier: Apache-2.0
"""Compile the GPU kernels for cards that need not be there: `python tests/operators/ptx.py 90 float32`.

Prints, as JSON, one entry for each kernel as it is launched by typical calls: its name, the PTX or the error. Runs in a
process of its own, because Triton either compiles or interprets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import MockTensor

from exactqat.operators import OPERATORS
from exactqat.operators import triton as room
from exactqat.operators.declarations.specification import TensorSpec, wide
from exactqat.operators.triton.launch import Launch


class Driver:
    """As much of a driver as it takes to compile for a card."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launch(launch: Launch, arrays: list[TensorSpec], **options: Any) -> str:
    """The PTX of one launch, made as a launch makes it, up to loading it."""
    pointers = [MockTensor(getattr(tl, arrays[index].dtype)) for index in launch.arrays]
    compiled = launch.kernel.warmup(*pointers, *launch.numbers, grid=launch.grid, **launch.options | options)
    return compiled.asm["ptx"]


def calls(dtype: str) -> Iterator[tuple[str, tuple[TensorSpec, ...], dict[str, Any]]]:
    """Typical calls, by shapes: every kernel, both layouts, sums long enough for every level of the tree."""

    def spec(*shape: int) -> TensorSpec:
        return TensorSpec(shape, dtype)

    def range_(*shape: int) -> TensorSpec:
        return TensorSpec(shape, wide(dtype))

    image, weights = spec(64, 112, 112, 32), spec(3, 3, 32, 1)
    bits: dict[str, Any] = {"num_bits": 8, "narrow_range": False}
    yield "fake_quant_with_min_max_args", (image,), bits
    yield "fake_quant_with_min_max_args_gradient", (image, image), bits
    yield "fake_quant_with_min_max_vars", (image, range_(), range_()), bits
    yield "fake_quant_with_min_max_vars_gradient", (image, image, range_(), range_()), bits
    for small in (spec(1), spec(3, 5)):  # an argument that is 1 becomes a constant
        last = range_(small.shape[-1])
        yield "fake_quant_with_min_max_vars", (small, range_(), range_()), bits
        yield "fake_quant_with_min_max_vars_per_channel", (small, last, last), bits
        yield "fake_quant_with_min_max_vars_gradient", (small, small, range_(), range_()), bits
        yield "fake_quant_with_min_max_vars_per_channel_gradient", (small, small, last, last), bits
        for axis in range(-1, small.rank):
            bound = range_() if axis < 0 else range_(small.shape[axis])
            yield "quantize_and_dequantize_v2", (small, bound, bound), {"axis": axis}
            yield "quantize_and_dequantize_v4_grad", (small, small, bound, bound), {"axis": axis}
    huge = spec(2**27 + 1, 32)  # sizes that take 64 bits
    yield "fake_quant_with_min_max_vars", (huge, range_(), range_()), bits
    yield "fake_quant_with_min_max_vars_gradient", (huge, huge, range_(), range_()), bits
    yield "quantize_and_dequantize_v2", (huge, range_(), range_()), {"range_given": False}
    yield "fake_quant_with_min_max_vars_per_channel", (weights, range_(1), range_(1)), bits
    channels = range_(32)
    mask = TensorSpec((image.size // 4,), "uint8")
    yield "fake_quant_with_min_max_args_training", (image,), bits
    yield "fake_quant_with_min_max_args_gradient_from_mask", (image, mask), {}
    yield "fake_quant_with_min_max_vars_training", (image, range_(), range_()), bits
    yield "fake_quant_with_min_max_vars_gradient_from_mask", (image, mask, range_(), range_()), bits
    yield "fake_quant_with_min_max_vars_per_channel_training", (image, channels, channels), bits
    yield "fake_quant_with_min_max_vars_per_channel_training", (spec(9, 5), range_(5), range_(5)), bits
    of_channels = (image, mask, channels, channels)
    yield "fake_quant_with_min_max_vars_per_channel_gradient_from_mask", of_channels, bits
    from_mask = (image, channels, channels, mask, channels, channels)
    yield "fake_quant_with_min_max_vars_gradient_from_mask_transpose", from_mask, bits
    yield "fake_quant_with_min_max_vars_per_channel", (image, channels, channels), bits
    yield "fake_quant_with_min_max_vars_per_channel_gradient", (image, image, channels, channels), bits
    transposed = (image, channels, channels, image, channels, channels)
    yield "fake_quant_with_min_max_vars_gradient_transpose", transposed, bits
    for axis in (-1, 1, 3):
        bound = range_() if axis < 0 else range_(image.shape[axis])
        for flag in (True, False):
            attributes = {"range_given": flag, "axis": axis}
            yield "quantize_and_dequantize_v2", (image, bound, bound), attributes
        yield "quantize_and_dequantize_v4_grad", (image, image, bound, bound), {"axis": axis}
    yield "quantize_and_dequantize_v2", (image, range_(), range_()), {"round_mode": "HALF_UP"}
    yield "quantize_and_dequantize", (image,), {"range_given": True, "input_min": -1.0, "input_max": 2.0}
    for data_format in ("NHWC", "NCHW"):
        x = image if data_format == "NHWC" else spec(64, 32, 112, 112)
        layout: dict[str, Any] = {"data_format": data_format}
        yield "channel_sum", (x,), layout
        for training in (True, False):
            attributes = layout | {"is_training": training}
            yield "fused_batch_norm_v3", (x, *[channels] * 4), attributes
            yield "fused_batch_norm_grad_v3", (x, x, *[channels] * 3, range_()), attributes
        stride = 2 if data_format == "NHWC" and dtype == "float32" else 1
        strides = (1, stride, stride, 1) if data_format == "NHWC" else (1, 1, stride, stride)
        convolution = layout | {"strides": strides, "padding": "SAME"}
        size = 112 // stride
        out = spec(64, size, size, 32) if data_format == "NHWC" else spec(64, 32, size, size)
        yield "depthwise_conv2d_native", (x, weights), convolution
        yield "depthwise_conv2d_native_backprop_input", (weights, out), convolution | {"input_sizes": x.shape}
        filter_sizes = {"filter_sizes": weights.shape}
        yield "depthwise_conv2d_native_backprop_filter", (x, out), convolution | filter_sizes


def launches(dtype: str) -> Iterator[tuple[Launch, list[TensorSpec]]]:
    """Each launch of the calls once."""
    seen = set()
    for name, operands, attributes in calls(dtype):
        op = OPERATORS[name]
        complete = {key: attributes.get(key, op.defaults.get(key)) for key in op.attributes}
        lowered = op.lower(operands, tuple(complete.items()))
        plan = room.plan(operands, lowered)
        arrays = [*operands, *lowered.results, *plan.scratch]
        for launch in plan.launches:
            dtypes = [arrays[index].dtype for index in launch.arrays]
            numbers = [(number == 1, number % 16 == 0, number >= 2**31) for number in launch.numbers]
            key = str((launch.kernel.__name__, dtypes, numbers, launch.options))
            if key not in seen:
                seen.add(key)
                yield launch, arrays


def compiled(launch: Launch, arrays: list[TensorSpec], **options: Any) -> dict[str, str]:
    try:
        return {"ptx": compile_launch(launch, arrays, **options), "error": ""}
    except Exception as error:  # any kind; the test shows it
        return {"ptx": "", "error": f"{type(error).__name__}: {error}"}


def main(capability: int, dtype: str) -> None:
    triton.runtime.driver.set_active(Driver(capability))
    programs = []
    for launch, arrays in launches(dtype):
        family = launch.kernel.__module__.rpartition(".")[2]
        programs.append({"kernel": f"{family}.{launch.kernel.__name__}"} | compiled(launch, arrays))
    launch, arrays = next(launches(dtype))
    programs.append({"kernel": "fused"} | compiled(launch, arrays, enable_fp_fusion=True))
    json.dump(programs, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
