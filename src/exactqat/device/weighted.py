# SPDX-License-Identifier: Apache-2.0
"""What all operators with a constant filter and bias have in common: their constants, their checks, their rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from .arithmetic import Arrays, Tensors, finish, fixed_point, multiply_fixed_point, scale_of, zero_point_of
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
        accumulator: np.ndarray,
        bias: np.ndarray,
        inputs: Tensors,
        output: Tensor,
        attributes: Attributes,
        profile: str,
    ) -> np.ndarray:
        """Sum of products plus bias -> codes of the result."""
        accumulator = accumulator.astype(np.int64) + bias
        if is_xnnpack(profile):
            input_scale, filter_scale = (tensor.quantization.scale for tensor in inputs[:2])
            multiplier = input_scale * filter_scale / scale_of(output)
            steps = np.rint(accumulator.astype(np.float32) * multiplier).astype(np.int64)
        else:
            steps = multiply_fixed_point(accumulator, *fixed_point(real_multiplier(inputs, output)))
        return finish(steps, output, attributes, profile)

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


__all__ = ["Arrays", "Weighted", "filter_reach", "real_multiplier"]
