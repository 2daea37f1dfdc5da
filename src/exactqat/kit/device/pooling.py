# SPDX-License-Identifier: Apache-2.0
"""Means and maxima over windows of an image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from . import as_onnx
from .arithmetic import Tensors, centered, finish, same_padding, scale_of, window_shape, windows, zero_point_of
from .contexts import OnnxWriter
from .convolution import onnx_window, read_window, window_options
from .operator import REQUIRED, Attributes, Call, DeviceOperator, Fields, FileOperator, Operator, Shape, need, register
from .primitives import A, Array, RealPrimitives, ResultGrid
from .stated_arithmetic import Arithmetic
from .tensor import INT16_MIN, Tensor, per_tensor


class Pool(DeviceOperator):
    """A window that slides over height and width; what it gives lies on the grid of its operand."""

    attributes = {"filter_size": REQUIRED, "strides": REQUIRED, "padding": "VALID"}
    dtypes: ClassVar[tuple[str, ...]] = ("int8", "int16")
    same_quantization = True
    floats = True
    spatial = True
    per_window_attributes = {"filter_size": 1, "strides": 1}
    version = 2
    wide_version = 3
    options = "Pool2DOptions"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,) = shapes
        need(len(first) == 4, f"input must be rank 4, got {first}")
        return (*window_shape(first, attributes["filter_size"], attributes), first[3])

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Fields:
        height, width = attributes["filter_size"]
        return {**window_options(attributes), "filterHeight": height, "filterWidth": width}

    def float_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        window, strides = attributes["filter_size"], attributes["strides"]
        padding: tuple[tuple[int, int], ...] = ((0, 0), (0, 0))
        if attributes["padding"] == "SAME":
            padding = tuple(same_padding(*axis) for axis in zip(shapes[0][1:3], window, strides, strict=True))
        return {"window": window, "strides": strides, "padding": padding, "channel_axis": 3}

    def read_attributes(self, read: FileOperator) -> Attributes:
        read.need_no_activation()
        return {**read_window(read), "filter_size": (read.option("filterHeight"), read.option("filterWidth"))}


def spatial_axes(x: Array, attributes: Attributes) -> list[int]:
    """The axes over which a window slides, in the user's order."""
    return [axis for axis in range(1, len(x.shape)) if axis != attributes["channel_axis"]]


def window_arguments(x: Array, attributes: Attributes) -> tuple[Any, ...]:
    """window, strides, padding in pairs and channel axis, as the primitives take them."""
    window, strides, padding = (attributes[name] for name in ("filter_size", "strides", "padding"))
    if padding == "SAME":
        sizes = [int(x.shape[axis]) for axis in spatial_axes(x, attributes)]
        padding = tuple(same_padding(*axis) for axis in zip(sizes, window, strides, strict=True))
    elif padding == "VALID":
        padding = ((0, 0),) * len(window)
    return window, strides, padding, attributes["channel_axis"]


@register
class AveragePool2D(Pool):
    """The mean of every window; padding is not counted. Rounded half away from zero in codes."""

    kind = "AVERAGE_POOL_2D"
    float_kind = "avg_pool"
    averages = True
    as_in_onnx = True
    free_in_onnx = True
    asks = (("rounding", "division"), ("multiplier",))

    def float_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        counting = {"over": (0, 0), "count_include_pad": False, "divisor": None}
        return {**super().float_attributes(shapes, attributes), **counting}

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        """attributes: filter_size, strides, channel_axis, and padding: SAME, which is not counted, or pairs of zeros
        that are values like any other."""
        (x,) = operands
        return self.sums(primitives, x, attributes) / self.counts(primitives, x, attributes)

    def float_results(self, call: Call) -> np.ndarray:
        sums, counts = (
            sum(values for _, _, values in windows(x, call.output, call.attributes["filter_size"], call.attributes, 0))
            for x in (call.codes[0], np.ones((1, *call.inputs[0].shape[1:3], 1), np.float32))
        )
        return np.asarray(sums / counts, np.float32)

    def real_on_grid(
        self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes, grid: ResultGrid[A]
    ) -> A | None:
        # Averages of small windows are often exactly between two codes, so another rounding would show. Sums of fewer
        # than 2**16 codes: every number below is a whole one that float32 holds.
        (x,) = operands
        count = self.counts(primitives, x, attributes)
        steps = self.sums(primitives, primitives.round(x / grid.scale), attributes)
        half = count // 2 if isinstance(count, float) else primitives.floor(count / 2)
        total = steps + grid.zero_point * count
        magnitude = primitives.floor((primitives.abs(total) + half) / count)
        codes = primitives.where(total < 0, -magnitude, magnitude)
        return (codes - grid.zero_point) * grid.scale

    @staticmethod
    def sums(primitives: RealPrimitives[A], x: A, attributes: Attributes) -> A:
        """The sum of every window; what is beyond the image counts as 0."""
        return primitives.sum_pool(x, *window_arguments(x, attributes))

    def counts(self, primitives: RealPrimitives[A], x: A, attributes: Attributes) -> A | float:
        """How many values every window counts, with an axis of 1 for the batch and the channels."""
        window, strides, padding, _ = window_arguments(x, attributes)
        if attributes["padding"] != "SAME" or not any(map(any, padding)):
            return float(math.prod(window))
        result = np.ones((1,) * len(x.shape), np.float32)
        for axis, side, stride, (before, after) in zip(
            spatial_axes(x, attributes), window, strides, padding, strict=True
        ):
            size = int(x.shape[axis])
            first = np.arange(0, size + before + after - side + 1, stride) - before
            inside = np.minimum(first + side, size) - np.maximum(first, 0)
            result = result * inside.reshape([-1 if place == axis else 1 for place in range(len(x.shape))])
        return primitives.array(result.astype(np.float32), x)

    def stated(self, call: Call, arithmetic: Arithmetic) -> np.ndarray:
        (total, count), zero_point = self.totals(call), zero_point_of(call.output)
        steps = arithmetic.divide(total - zero_point * count, count, zero_point)
        return finish(steps, call.output, call.attributes, call.profile)

    @staticmethod
    def totals(call: Call) -> tuple[np.ndarray, np.ndarray]:
        """The sum of each window's codes, and how many there are."""
        filter_size, ones = call.attributes["filter_size"], np.ones_like(call.codes[0][:1, :, :, :1], np.int64)
        total, count = (
            sum(values for _, _, values in windows(x, call.output, filter_size, call.attributes, 0))
            for x in (call.codes[0].astype(np.int64), ones)
        )
        return np.asarray(total), np.asarray(count)

    def integers(self, call: Call) -> np.ndarray:
        if call.profile.unsigned and call.profile.rounds_as_onnx:
            source, size = call.inputs[0], call.inputs[0].shape[1:3]
            if tuple(call.attributes["filter_size"]) == size and call.output.shape[1:3] == (1, 1):
                total = centered(call.codes[0], source).sum((1, 2), np.int64, keepdims=True)
                return as_onnx.averaged(total, math.prod(size), source, call.output, call.attributes)
            means = self.float_results(replace(call, codes=as_onnx.operands(call.codes, call.inputs)))
            shift = np.float32(zero_point_of(call.output) + as_onnx.SHIFT)
            return as_onnx.with_zero_point(means / scale_of(call.output) + shift, call.output, call.attributes)
        total, count = self.totals(call)
        if call.profile.unsigned:  # codes from 0 on: halves are rounded up
            codes_of_means = (total + 128 * count + count // 2) // count - 128
            return finish(codes_of_means - zero_point_of(call.output), call.output, call.attributes, call.profile)
        magnitude = (np.abs(total) + count // 2) // count
        return finish(
            np.sign(total) * magnitude - zero_point_of(call.output), call.output, call.attributes, call.profile
        )

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        # The codes themselves are averaged: it is in codes that the device rounds away from zero. QuantizeLinear rounds
        # to even; a factor this much above 1 carries such averages over, and is too close to 1 to move an average of
        # fewer than 2**12 values.
        name, source = output.name, operator.inputs[0]
        window = onnx_window(
            writer.graph.tensors[source].shape, operator.attributes["filter_size"], operator.attributes
        )
        if operator.unsigned:
            writer.computed(operator, output, "AveragePool", writer.operands(operator), count_include_pad=0, **window)
            return
        grid = per_tensor(1.0, 0, output.dtype)
        counted = writer.dequantize(f"{source}/codes", grid, f"{name}/counted")
        averaged = writer.node("AveragePool", [counted], f"{name}/averaged", count_include_pad=0, **window)
        above_one = writer.constant("above_one", np.float32(1 + 2**-20))
        computed = writer.node("Mul", [averaged, above_one], f"{name}/computed")
        codes = writer.node("QuantizeLinear", [computed, *writer.parameters(f"{name}/counted", grid)], f"{name}/codes")
        writer.dequantize(codes, output.quantization, name)


@register
class L2Pool2D(Pool):
    """The root of the mean of every window's squares; in float32 alone."""

    kind = "L2_POOL_2D"
    dtypes = ()
    version = 1
    purpose = "files: what converters leave in float32"

    def float_results(self, call: Call) -> np.ndarray:
        size = call.attributes["filter_size"]
        total = sum(part for *_, part in windows(np.square(call.codes[0]), call.output, size, call.attributes, 0.0))
        count = sum(part for *_, part in windows(np.ones_like(call.codes[0]), call.output, size, call.attributes, 0.0))
        return np.asarray(np.sqrt(total / count), np.float32)


@register
class MaxPool2D(Pool):
    """The largest value of every window; padding is below all values."""

    kind = "MAX_POOL_2D"
    as_in_onnx = True
    float_kind = "max_pool"

    def float_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        return {**super().float_attributes(shapes, attributes), "dilations": (1, 1)}

    moves_codes = True

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        """attributes: filter_size, strides, channel_axis, and padding: SAME or pairs, below all values."""
        return primitives.max_pool(operands[0], *window_arguments(operands[0], attributes))

    def integers(self, call: Call) -> np.ndarray:
        lowest = -math.inf if call.codes[0].dtype.kind == "f" else np.iinfo(call.codes[0].dtype).min
        largest = np.full((call.codes[0].shape[0], *call.output.shape[1:]), lowest, call.codes[0].dtype)
        for _, _, values in windows(
            call.codes[0], call.output, call.attributes["filter_size"], call.attributes, lowest
        ):
            np.maximum(largest, values, out=largest)
        return largest

    def wide_integers(self, call: Call) -> np.ndarray:
        met = windows(call.codes[0], call.output, call.attributes["filter_size"], call.attributes, INT16_MIN)
        return np.maximum.reduce([values for _, _, values in met])

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        window = onnx_window(
            writer.graph.tensors[operator.inputs[0]].shape, operator.attributes["filter_size"], operator.attributes
        )
        writer.computed(operator, output, "MaxPool", writer.operands(operator), **window)
