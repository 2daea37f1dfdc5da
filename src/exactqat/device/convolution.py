# SPDX-License-Identifier: Apache-2.0
"""Convolutions of images with constant filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .arithmetic import Arrays, Tensors, activate, centered, same_padding, window_shape, windows
from .operator import Attributes, Shape, need, register
from .tensor import Tensor
from .weighted import Weighted


class Convolution(Weighted):
    """A filter that slides over height and width."""

    attributes = {"strides": (1, 1), "padding": "SAME", "dilations": (1, 1), "activation": "NONE"}
    spatial = True
    per_window_attributes = {"strides": 1, "dilations": 1}
    version = 3

    def real(self, primitives: Any, operands: Sequence[Any], attributes: Attributes) -> Any:
        """attributes: strides, padding in pairs, dilations, groups, channel_axis; weight [out, in / groups, ...]."""
        x, weight, bias = operands
        names = ("strides", "padding", "dilations", "groups", "channel_axis")
        result = primitives.conv(x, weight, bias, **{name: attributes[name] for name in names})
        return activate(primitives, result, attributes)

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> dict[str, Any]:
        return {**window_options(attributes), "fusedActivationFunction": activation_option(attributes)}

    def convolve_in_onnx(self, writer: Any, operator: Any, output: Tensor, weights: list[str], groups: int) -> None:
        filter_size = writer.graph.tensors[operator.inputs[1]].shape[1:3]
        input_shape = writer.graph.tensors[operator.inputs[0]].shape
        window = onnx_window(input_shape, filter_size, operator.attributes)
        operands = [*writer.operands(operator), *weights]
        writer.result(
            operator, output, writer.node("Conv", operands, f"{output.name}/computed", group=groups, **window)
        )


@register
class Conv2D(Convolution):
    """filter [out, height, width, in / groups]; groups follow from its shape."""

    kind = "CONV_2D"
    options = "Conv2DOptions"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        first, filter, bias = shapes
        need(len(first) == 4 and len(filter) == 4, f"input and filter must be rank 4, got {[first, filter]}")
        fits = first[3] % filter[3] == 0 and filter[0] % (first[3] // filter[3]) == 0
        need(fits, f"filter {filter} does not fit {first[3]} input channels")
        need(bias == (filter[0],), f"bias must have shape ({filter[0]},), got {bias}")
        return (*window_shape(first, filter[1:3], attributes), filter[0])

    def integers(
        self, codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str
    ) -> np.ndarray:
        # float64 products and sums of these integers are exact, and BLAS is the fast way to form them.
        x, filter = centered(codes[0], inputs[0]).astype(np.float64), codes[1].astype(np.float64)
        accumulator = np.zeros((x.shape[0], *output.shape[1:]))
        size = filter.shape[3]
        groups = x.shape[3] // size
        outputs = filter.shape[0] // groups
        for i, j, values in windows(x, output, filter.shape[1:3], attributes, 0):
            for group in range(groups):
                sources, results = (
                    slice(group * size, (group + 1) * size),
                    slice(group * outputs, (group + 1) * outputs),
                )
                accumulator[..., results] += values[..., sources] @ filter[results, i, j, :].T
        return self.requantize(accumulator, codes[2], inputs, output, attributes, profile)

    def device_filter(self, codes: np.ndarray) -> np.ndarray:
        return codes.transpose(0, 2, 3, 1)

    def onnx(self, writer: Any, operator: Any, output: Tensor) -> None:
        outputs, height, width, inputs = writer.graph.tensors[operator.inputs[1]].shape
        weights = self.onnx_weights(writer, operator, (0, 3, 1, 2), (outputs, inputs, height, width))
        groups = writer.graph.tensors[operator.inputs[0]].shape[3] // inputs
        self.convolve_in_onnx(writer, operator, output, weights, groups)


@register
class DepthwiseConv2D(Convolution):
    """filter [1, height, width, in * multiplier], input channel major."""

    kind = "DEPTHWISE_CONV_2D"
    options = "DepthwiseConv2DOptions"
    filter_axis = 3

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        first, filter, bias = shapes
        need(len(first) == 4 and len(filter) == 4, f"input and filter must be rank 4, got {[first, filter]}")
        fits = filter[0] == 1 and filter[3] % first[3] == 0
        need(fits, f"filter {filter} must be [1, height, width, {first[3]} * multiplier]")
        need(bias == (filter[3],), f"bias must have shape ({filter[3]},), got {bias}")
        return (*window_shape(first, filter[1:3], attributes), filter[3])

    def integers(
        self, codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str
    ) -> np.ndarray:
        x, filter = centered(codes[0], inputs[0]).astype(np.float64), codes[1].astype(np.float64)
        x = np.repeat(x, filter.shape[3] // x.shape[3], axis=3)
        accumulator = np.zeros((x.shape[0], *output.shape[1:]))
        for i, j, values in windows(x, output, filter.shape[1:3], attributes, 0):
            accumulator += values * filter[0, i, j]
        return self.requantize(accumulator, codes[2], inputs, output, attributes, profile)

    def device_filter(self, codes: np.ndarray) -> np.ndarray:
        return codes.transpose(1, 2, 3, 0)

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> dict[str, Any]:
        options = super().tflite_options(inputs, output, attributes)
        return {**options, "depthMultiplier": inputs[1].shape[3] // inputs[0].shape[3]}

    def onnx(self, writer: Any, operator: Any, output: Tensor) -> None:
        _, height, width, outputs = writer.graph.tensors[operator.inputs[1]].shape
        weights = self.onnx_weights(writer, operator, (3, 0, 1, 2), (outputs, 1, height, width))
        groups = writer.graph.tensors[operator.inputs[0]].shape[3]
        self.convolve_in_onnx(writer, operator, output, weights, groups)


def activation_option(attributes: Attributes) -> tuple[str, str]:
    """The fused activation for an options table."""
    return "ActivationFunctionType", attributes["activation"]


def window_options(attributes: Attributes) -> dict[str, Any]:
    """Padding, strides and dilations for an options table."""
    options = {"padding": ("Padding", attributes["padding"])}
    options["strideH"], options["strideW"] = attributes["strides"]
    if "dilations" in attributes:
        options["dilationHFactor"], options["dilationWFactor"] = attributes["dilations"]
    return options


def onnx_window(input_shape: Shape, filter_size: Sequence[int], attributes: Attributes) -> dict[str, Any]:
    """ONNX's attributes for filter size, strides, dilations and padding."""
    dilations = attributes.get("dilations", (1, 1))
    window: dict[str, Any] = {"kernel_shape": list(filter_size), "strides": list(attributes["strides"])}
    if tuple(dilations) == (1, 1):
        window["auto_pad"] = "SAME_UPPER" if attributes["padding"] == "SAME" else "VALID"
        return window
    window["dilations"] = list(dilations)
    if attributes["padding"] == "SAME":  # in numbers: runtimes refuse the word beside dilations
        axes = zip(input_shape[1:3], filter_size, attributes["strides"], dilations, strict=True)
        pads = [same_padding(*axis) for axis in axes]
        window["pads"] = [before for before, _ in pads] + [after for _, after in pads]
    return window
