# SPDX-License-Identifier: Apache-2.0
"""What onnxruntime's CPU kernels on x86 make of the .onnx file: the arithmetic of profiles that round as ONNX.

The file holds codes as uint8, 128 above those of the graph, because only these reach onnxruntime's integer kernels on
x86. Kernels that add zero points in float32 see them so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .arithmetic import bounds, centered, fused_multiply_add, scale_of, zero_point_of
from .operator import Attributes
from .profile import ONNXRUNTIME_X86
from .real import real_numbers
from .tensor import INT8_MIN, Tensor

# From a code of the graph to that of the file.
SHIFT = -INT8_MIN
# By how much, of a function's results about 1, those in float64 and those of onnxruntime may differ.
DOUBT = 2.0**-21


def stored(steps: np.ndarray, output: Tensor, attributes: Attributes) -> np.ndarray:
    """Codes from whole steps, float or integer, within the fused activation."""
    lowest, highest = bounds(output, attributes, ONNXRUNTIME_X86)
    zero_point = zero_point_of(output)
    return (np.clip(steps, lowest - zero_point, highest - zero_point) + zero_point).astype(output.dtype)


def quantized(real: np.ndarray, output: Tensor, attributes: Attributes) -> np.ndarray:
    """Codes of real numbers in float32: QuantizeLinear."""
    with np.errstate(over="ignore"):
        return stored(np.rint(real.astype(np.float32) / scale_of(output)), output, attributes)


def with_zero_point(steps: np.ndarray, output: Tensor, attributes: Attributes) -> np.ndarray:
    """Codes of what the file's zero point has been added to in float32, before it is rounded."""
    return stored(np.rint(steps) - np.float32(zero_point_of(output) + SHIFT), output, attributes)


def operands(codes: Sequence[np.ndarray], inputs: Sequence[Tensor]) -> list[np.ndarray]:
    """Operands in float32: DequantizeLinear."""
    return [real_numbers(code, tensor) for code, tensor in zip(codes, inputs, strict=True)]


def added(codes: Sequence[np.ndarray], inputs: Sequence[Tensor], output: Tensor, attributes: Attributes) -> np.ndarray:
    """QLinearAdd: one operand after the other by a fused multiply-add, the second one first."""
    if is_one_value(inputs[0], inputs[1], len(output.shape)):
        codes, inputs = codes[::-1], inputs[::-1]
    ratios = [scale_of(tensor) / scale_of(output) for tensor in inputs]
    zero_points = [np.float32(zero_point_of(tensor) + SHIFT) for tensor in (*inputs, output)]
    shift = zero_points[2] - fused_multiply_add(ratios[0], zero_points[0], ratios[1] * zero_points[1])
    first, second = (code.astype(np.float32) + np.float32(SHIFT) for code in codes)
    steps = fused_multiply_add(first, ratios[0], fused_multiply_add(second, ratios[1], shift))
    return with_zero_point(steps, output, attributes)


def is_one_value(first: Tensor, second: Tensor, rank: int) -> bool:
    """Whether the first operand is one value where the second one runs along the file's innermost axis: then the kernel
    exchanges them."""

    def sizes(tensor: Tensor) -> list[int]:
        shape = [1] * (rank - len(tensor.shape)) + list(tensor.shape)
        if tensor.data is None:
            shape[0] = 2  # whatever the batch is
        return [shape[axis] for axis in ((0, 3, 1, 2) if rank == 4 else range(rank))]

    for one, other in zip(reversed(sizes(first)), reversed(sizes(second)), strict=True):
        if max(one, other) > 1:
            return one == 1
    return False


def multiplied(product: np.ndarray, scale: np.floating, output: Tensor, attributes: Attributes) -> np.ndarray:
    """QLinearMul: whole numbers times a float32 ratio of scales."""
    steps = product.astype(np.float32) * (scale / scale_of(output))
    return with_zero_point(steps + np.float32(zero_point_of(output) + SHIFT), output, attributes)


def moved(codes: np.ndarray, source: Tensor, output: Tensor, attributes: Attributes) -> np.ndarray:
    """From one grid to another, by a product with 1."""
    return multiplied(centered(codes, source), scale_of(source), output, attributes)


def averaged(total: np.ndarray, count: int, source: Tensor, output: Tensor, attributes: Attributes) -> np.ndarray:
    """QLinearGlobalAveragePool, of sums in steps from real 0."""
    factor = scale_of(source) / (scale_of(output) * np.float32(count))
    return stored(np.rint(total.astype(np.float32) * factor), output, attributes)


def softmax(codes: np.ndarray, source: Tensor, beta: float, output: Tensor) -> np.ndarray:
    """QLinearSoftmax over the last axis: exponentials from a table in float32, added one after the other."""
    scale, count = float(scale_of(source) * np.float32(beta)), codes.shape[-1]
    # As large as float32 allows for so many of them.
    room = float(np.log(np.finfo(np.float32).max / np.float32(count)))
    shift = max(room - 5, 0.0) / scale
    table = np.exp((np.arange(-255, 1) + shift) * scale).astype(np.float32)
    below = codes.astype(np.int64) - codes.max(-1, keepdims=True)
    values = table[below + 255]
    total = np.add.accumulate(values, -1, dtype=np.float32)[..., -1:]
    with np.errstate(over="ignore"):
        steps = np.rint(values * np.floor(np.float32(1) / scale_of(output)) / total)
    # Of a row of one value the product is infinite, which the kernel takes for 0.
    return stored(np.where(np.isfinite(steps), steps, 0), output, {})


def normalized(codes: np.ndarray, source: Tensor, output: Tensor) -> np.ndarray:
    """LpNormalization over the last axis in float32, squares added one after the other; a row of zeros stays one."""
    (x,) = operands([codes], [source])
    length = np.sqrt(np.add.accumulate(x * x, -1, dtype=np.float32)[..., -1:])
    return quantized(np.divide(x, length, out=np.zeros_like(x), where=length != 0), output, {})


def is_settled(steps: np.ndarray, doubt: np.ndarray) -> bool:
    """Whether results in float64 steps lie further than that from half way between two codes."""
    return bool(np.all(np.abs(steps - np.floor(steps) - 0.5) > doubt))
