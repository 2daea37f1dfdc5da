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
    multiply_wide,
    reduced,
    scale_of,
    zero_point_of,
)
from .operator import Attributes, DeviceOperator, is_xnnpack, need
from .tensor import INT8_MAX, INT8_MIN, Quantization, Tensor, code_range

# The largest code of a bias; of int64, what kernels' sums of 48 bits hold.
LARGEST_BIAS = {"int32": 2**31 - 1, "int64": 2**47}


def bias_dtype(input: Tensor) -> str:
    """What the bias is stored in, by what the input is."""
    return "int64" if input.dtype == "int16" else "int32"


class Weighted(DeviceOperator):
    """Operands: an activation, a filter (int8, narrow, symmetric, per channel or per tensor), a bias (int32; behind an
    int16 activation int64).

    Attributes:
        filter_axis: the axis of the filter that holds the output channels.
    """

    operands = (3, 3)
    dtypes = ("int8", "int16")
    weights = (1, 2)
    filter_axis: ClassVar[int] = 0

    def build(self, builder: Any, *arguments: Any, name: str, **attributes: Any) -> str:
        """filter: int8 codes in the shape of the operator's filter; filter_scale: [1] or [channels]; bias: integers
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
        dtype = bias_dtype(builder.tensor(input))
        for what, codes, bound in (("filter", filter, 127), ("bias", bias, LARGEST_BIAS[dtype])):
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
            builder.bias(f"{name}/bias", np.asarray(bias, dtype), bias_quantization),
        ]
        return str(builder.operator(self.kind, operands, output, name=name, **attributes))

    def multiply_accumulates(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> int:
        return math.prod(output.shape[:-1]) * math.prod(inputs[1].shape)

    def check(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> None:
        input, filter, bias = inputs
        for tensor, dtype in ((filter, "int8"), (bias, bias_dtype(input))):
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
        # Behind int16, kernels multiply 64-bit sums by 15 bits.
        bits, word = (31, "int32") if input.dtype == "int8" else (47, "48-bit")
        fits = int(bound.max()) < 2**bits
        need(fits, f"the {word} accumulator can overflow; the bias or the filter is too large")

    def wide_integers(
        self, codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str
    ) -> np.ndarray:
        sums = self.wide_sums(codes[0].astype(np.float64), codes[1].astype(np.float64), output, attributes)
        # Whole numbers below 2**53, which float64 adds in any order.
        steps = self.wide_steps(sums.astype(np.int64) + codes[2], inputs, output, profile)
        return np.clip(steps, *bounds(output, attributes, profile)).astype(output.dtype)

    def wide_steps(self, accumulator: np.ndarray, inputs: Tensors, output: Tensor, profile: str) -> np.ndarray:
        """Steps of the result from 64-bit sums."""
        return multiply_wide(accumulator, *fixed_point(real_multiplier(inputs, output)))

    def multiplier_kept(self, multiplier: np.ndarray) -> np.ndarray:
        """What kernels for int16 make of real multipliers, float64: training follows them there."""
        significand, exponent = fixed_point(multiplier)
        return np.asarray(reduced(significand) * 2.0 ** (exponent - 15))

    def wide_sums(self, x: np.ndarray, filter: np.ndarray, output: Tensor, attributes: Attributes) -> np.ndarray:
        """Sums of products of an input and a filter, [..., channels]; the zero point of int16 is 0."""
        raise NotImplementedError(f"{self.kind} has no int16 form")

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
    lowest, highest = code_range(input)
    reach = max(highest - zero_point, zero_point - lowest)
    other_axes = tuple(i for i in range(filter.ndim) if i != axis)
    magnitudes: np.ndarray = np.abs(filter.astype(np.int64)).sum(other_axes) * reach
    return magnitudes


def real_multiplier(inputs: Tensors, output: Tensor) -> np.ndarray:
    """float64 input scale * filter scale / output scale, per channel."""
    input_scale, filter_scale = (tensor.quantization.scale.astype(np.float64) for tensor in inputs[:2])
    multiplier: np.ndarray = input_scale * filter_scale / float(scale_of(output))
    return multiplier


__all__ = ["CACHED_VALUES", "Weighted", "filter_reach", "real_multiplier", "sums_of_products"]
