# SPDX-License-Identifier: Apache-2.0
"""What all operators with a constant filter and bias have in common: their constants, their checks, their rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from .arithmetic import (
    Arrays,
    Tensors,
    bounds,
    finish,
    fixed_point,
    multiply_fixed_point,
    scale_of,
    zero_point_of,
)
from .operator import Attributes, DeviceOperator, is_xnnpack, need
from .tensor import INT8_MAX, INT8_MIN, Quantization, Tensor


class Weighted(DeviceOperator):
    """Operands: an activation, a filter (int8, narrow, symmetric, per channel or per tensor), a bias (int32).

    Attributes:
        filter_axis: the axis of the filter that holds the output channels.
    """

    operands = (3, 3)
    weights = (1, 2)
    filter_axis: ClassVar[int] = 0

    def build(self, builder: Any, *arguments: Any, name: str, **attributes: Any) -> str:
        """filter: int8 codes in the shape of the operator's filter; filter_scale: [1] or [channels]; bias: int32 codes
        [channels]; then the result's Quantization. The scale of the bias follows."""
        return self._build(builder, *arguments, name=name, **attributes)

    def _build(
        self,
        builder: Any,
        input: str,
        filter: np.ndarray,
        filter_scale: np.ndarray,
        bias: np.ndarray,
        output: Quantization | Sequence[Quantization],
        *,
        name: str,
        **attributes: Any,
    ) -> str:
        for what, codes, bound in (("filter", filter, 127), ("bias", bias, 2**31 - 1)):
            values = np.asarray(codes, np.float64)
            need(
                bool(np.all((np.abs(values) <= bound) & (values == np.rint(values)))),
                f"{self.kind} {name!r}: {what} codes must be integers within -{bound}..{bound}",
            )
        filter_scale = np.atleast_1d(np.asarray(filter_scale, np.float32))
        # One scale for all channels is stored per tensor: kernels then take it as such.
        axis = self.filter_axis if filter_scale.size > 1 else None
        bias_scale = builder.tensor(input).quantization.scale * filter_scale
        bias_quantization = Quantization(bias_scale, np.zeros(1), None if axis is None else 0)
        operands = [
            input,
            builder.constant(
                f"{name}/filter", np.asarray(filter, np.int8), Quantization(filter_scale, np.zeros(1), axis)
            ),
            builder.constant(f"{name}/bias", np.asarray(bias, np.int32), bias_quantization),
        ]
        return str(builder.operator(self.kind, operands, output, name=name, **attributes))

    def multiply_accumulates(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> int:
        return math.prod(output.shape[:-1]) * math.prod(inputs[1].shape)

    def check(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> None:
        input, filter, bias = inputs
        for tensor, dtype in ((filter, "int8"), (bias, "int32")):
            need(tensor.dtype == dtype, f"{tensor.name!r} must be a constant of dtype {dtype}")
        assert filter.data is not None and bias.data is not None
        no_shift = not np.any(filter.quantization.zero_point) and not np.any(bias.quantization.zero_point)
        need(no_shift, "weights and biases have zero point 0")
        need(int(filter.data.min()) >= -INT8_MAX, "weights must be within -127..127, got -128")
        axis = self.filter_axis
        fits = filter.quantization.axis in (None, axis)
        need(fits, f"filter channels must be on axis {axis}, got {filter.quantization.axis}")
        bias_scale = input.quantization.scale * filter.quantization.scale
        fits = np.array_equal(bias.quantization.scale, bias_scale)
        need(fits, "bias scale must be exactly float32(input scale * filter scale)")

        multiplier = (bias_scale / output.quantization.scale).astype(np.float64)
        fits = bool(np.all((multiplier >= 2.0**-32) & (multiplier < 256)))
        message = "input scale * filter scale / output scale must be in [2**-32, 256) for every channel"
        need(fits, f"{message}, got {multiplier.min():g}..{multiplier.max():g}")
        bound = filter_reach(filter.data, axis, input) + np.abs(bias.data.astype(np.int64))
        need(int(bound.max()) < 2**31, "the int32 accumulator can overflow; the bias or the filter is too large")

    def requantize(
        self,
        sums: np.ndarray,
        codes: Arrays,
        inputs: Tensors,
        output: Tensor,
        attributes: Attributes,
        profile: str,
    ) -> np.ndarray:
        """Codes of the result from the sums of products of *codes*: the input's zero point is still in them."""
        filter, bias = (code.astype(np.int64) for code in codes[1:])
        axes = tuple(axis for axis in range(filter.ndim) if axis != self.filter_axis)
        offset = bias - zero_point_of(inputs[0]) * filter.sum(axes)
        result = np.empty(sums.shape, np.int8)
        flat, into = sums.reshape(-1, sums.shape[-1]), result.reshape(-1, sums.shape[-1])
        largest = (filter_reach(filter, self.filter_axis, inputs[0]) + np.abs(bias)).max()
        exact = sums.dtype == np.float32 and largest < 2**24
        added = offset.astype(np.float32) if exact else offset
        input_scale, filter_scale = (tensor.quantization.scale for tensor in inputs[:2])
        multiplier = input_scale * filter_scale / scale_of(output)
        zero_point = np.float32(zero_point_of(output))
        lowest, highest = (np.float32(bound) for bound in bounds(output, attributes, profile))
        # Few enough values at a time to stay in the core's own cache from the first step to the last.
        rows = max(min(CACHED_VALUES // sums.shape[-1], len(flat)), 1)
        # Whole blocks of them: NumPy is three times slower on rows as short as there are channels.
        added, multiplier = (np.broadcast_to(each, (rows, sums.shape[-1])).copy() for each in (added, multiplier))
        for start in range(0, len(flat), rows):
            block = flat[start : start + rows]
            if not is_xnnpack(profile):
                steps = self.fixed_point_steps(block.astype(np.int64) + offset, inputs, output, profile)
                into[start : start + rows] = finish(steps, output, attributes, profile)
                continue
            whole = block if exact else block.astype(np.int64)
            real = (whole + added[: len(block)]).astype(np.float32, copy=False)
            real *= multiplier[: len(block)]
            np.rint(real, out=real)
            real += zero_point
            np.clip(real, lowest, highest, out=real)
            into[start : start + rows] = real
        return result

    def rounding(self, profile: str) -> str:
        """How sums become steps of the result: `requantize` in a word of `ROUNDINGS`, for those who sum elsewhere."""
        return "float32" if is_xnnpack(profile) else "fixed_point"

    def fixed_point_steps(self, accumulator: np.ndarray, inputs: Tensors, output: Tensor, profile: str) -> np.ndarray:
        """Steps from the zero point where multipliers are 32-bit fixed-point numbers."""
        return multiply_fixed_point(accumulator, *fixed_point(real_multiplier(inputs, output)))

    def onnx_weights(
        self, writer: Any, operator: Any, axes: Sequence[int], shape: Sequence[int], channel_axis: int = 0
    ) -> list[str]:
        """The constants as real numbers, the filter's axes in ONNX's order, its channels at `channel_axis`."""
        filter, bias = (writer.graph.tensors[name] for name in operator.inputs[1:])
        single = filter.quantization.axis is None
        return [
            writer.dequantized(filter, filter.data.transpose(axes).reshape(shape), None if single else channel_axis),
            writer.dequantized(bias, bias.data, None if single else 0),
        ]


# The sum times input scale * filter scale / output scale, rounded:
# - float32: all in float32, in this order; the product to the nearest integer, ties to even;
# - float64: all in float64; ties away from zero;
# - fixed_point: by TensorFlow Lite's 31-bit multiplier of the float64 quotient, see `arithmetic.multiply_fixed_point`.
ROUNDINGS = ("float32", "float64", "fixed_point")

# Of float32, what a core's second-level cache holds beside the other things.
CACHED_VALUES = 1 << 16


def sums_of_products(codes: np.ndarray, filter: np.ndarray) -> np.ndarray:
    """Codes [rows, k] times a filter [channels, k], summed exactly: float32 where it holds every sum, else float64.

    Products and sums of these integers are exact in either, in any order, and BLAS is the fast way to form them.
    """
    reach = int(np.abs(filter.astype(np.int64)).sum(1).max(initial=0)) * -INT8_MIN
    if reach < 2**24:
        return codes.astype(np.float32) @ filter.astype(np.float32).T
    # Halves of the sum are as fast as the whole in float32, and twice as fast as the whole in float64.
    half = filter.shape[1] // 2
    if half == 0 or reach >= 2**31:
        return codes.astype(np.float64) @ filter.astype(np.float64).T
    first = sums_of_products(codes[:, :half], filter[:, :half])
    total: np.ndarray = first.astype(np.float64)
    total += sums_of_products(codes[:, half:], filter[:, half:])
    return total


def filter_reach(filter: np.ndarray, axis: int, input: Tensor) -> np.ndarray:
    """The largest magnitude that each channel's sum of products can have."""
    zero_point = zero_point_of(input)
    reach = max(INT8_MAX - zero_point, zero_point - INT8_MIN)
    other_axes = tuple(i for i in range(filter.ndim) if i != axis)
    magnitudes: np.ndarray = np.abs(filter.astype(np.int64)).sum(other_axes) * reach
    return magnitudes


def real_multiplier(inputs: Tensors, output: Tensor) -> np.ndarray:
    """float64 input scale * filter scale / output scale, per channel."""
    input_scale, filter_scale = (tensor.quantization.scale.astype(np.float64) for tensor in inputs[:2])
    multiplier: np.ndarray = input_scale * filter_scale / float(scale_of(output))
    return multiplier


__all__ = ["CACHED_VALUES", "ROUNDINGS", "Weighted", "filter_reach", "real_multiplier", "sums_of_products"]
