# SPDX-License-Identifier: Apache-2.0
"""Convolutions of images with constant filters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import raw_ops
from .arithmetic import (
    Tensors,
    activate,
    fixed_point,
    multiply_fixed_point,
    multiply_half_up,
    same_padding,
    window_shape,
    windows_of,
    zero_point_of,
)
from .blocks import repeated, rows_of_block, scratch, share
from .contexts import LoweringContext, OnnxWriter, PlannedStep
from .file_forms import Unreadable
from .operator import (
    REQUIRED,
    Attributes,
    Call,
    Fields,
    FileConstant,
    FileOperator,
    LoweredTensor,
    Operator,
    Shape,
    need,
    register,
)
from .primitives import A, RealPrimitives
from .profile import Profile
from .tensor import Tensor
from .weighted import Requantization, Weighted, bias_option, filter_reach, real_multiplier


class Convolution(Weighted):
    """A filter that slides over height and width."""

    attributes = {"strides": (1, 1), "padding": "SAME", "dilations": (1, 1), "activation": "NONE"}
    spatial = True
    per_window_attributes = {"strides": 1, "dilations": 1}
    version = 3
    float_kind = "conv"

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        """attributes: strides, padding in pairs, dilations, groups, channel_axis; weight [out, in / groups, ...]."""
        x, weight, bias = operands
        names = ("strides", "padding", "dilations", "groups", "channel_axis")
        result = primitives.conv(x, weight, bias, **{name: attributes[name] for name in names})
        return activate(primitives, result, attributes)

    def float_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        return self.step_attributes(shapes, attributes)

    def groups(self, inputs: int, filter: Shape) -> int:
        """Of a filter on the device."""
        return inputs // filter[3]

    def step_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        first, filter = shapes[:2]
        base = dict(super().step_attributes(shapes, attributes))
        pads: tuple[tuple[int, int], ...] = ((0, 0), (0, 0))
        if attributes["padding"] == "SAME":
            axes = zip(first[1:3], filter[1:3], attributes["strides"], attributes["dilations"], strict=True)
            pads = tuple(same_padding(*axis) for axis in axes)
        return {**base, "padding": pads, "groups": self.groups(first[3], filter)}

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Fields:
        options = {**window_options(attributes), "fusedActivationFunction": activation_option(attributes)}
        return {**options, **(bias_option(inputs) if self.names_bias_dtype else {})}

    def read_attributes(self, read: FileOperator) -> Attributes:
        dilations = (read.option("dilationHFactor"), read.option("dilationWFactor"))
        return {**read_window(read), "dilations": dilations, "activation": read.activation()}

    def convolve_in_onnx(
        self, writer: OnnxWriter, operator: Operator, output: Tensor, weights: list[str], groups: int
    ) -> None:
        filter_size = writer.graph.tensors[operator.inputs[1]].shape[1:3]
        input_shape = writer.graph.tensors[operator.inputs[0]].shape
        window = onnx_window(input_shape, filter_size, operator.attributes)
        operands = [*writer.operands(operator), *weights]
        writer.computed(operator, output, "Conv", operands, group=groups, **window)


@register
class Conv2D(Convolution):
    """filter [out, height, width, in / groups]; groups follow from its shape."""

    kind = "CONV_2D"
    as_in_onnx = True
    wide_version = 4
    options = "Conv2DOptions"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        first, filter, bias = shapes
        need(len(first) == 4 and len(filter) == 4, f"input and filter must be rank 4, got {[first, filter]}")
        fits = first[3] % filter[3] == 0 and filter[0] % (first[3] // filter[3]) == 0
        need(fits, f"filter {filter} does not fit {first[3]} input channels")
        need(bias == (filter[0],), f"bias must have shape ({filter[0]},), got {bias}")
        return (*window_shape(first, filter[1:3], attributes), filter[0])

    def integers(self, call: Call) -> np.ndarray:
        x, filter, size = call.codes[0], call.codes[1], call.codes[1].shape[3]
        result = np.empty((x.shape[0], *call.output.shape[1:]), call.output.dtype)
        met, into = x[:, :, :, None, None], result
        if filter.shape[1:3] != (1, 1) or tuple(call.attributes["strides"]) != (1, 1):
            met = windows_of(x, filter.shape[1:3], call.attributes, zero_point_of(call.inputs[0]))
        elif size == x.shape[3]:  # neighbours in a line do not matter
            met, into = (array.reshape(-1, 1, 1, array.shape[3]) for array in (x, result))
        groups = x.shape[3] // size
        outputs = filter.shape[0] // groups
        for group in range(groups):
            part = met[..., group * size : (group + 1) * size]
            channels = slice(group * outputs, (group + 1) * outputs)
            self.store_products(
                part, into[..., channels], call.codes, call.inputs, call.output, call.attributes, call.profile, channels
            )
        return result

    def device_filter(self, codes: np.ndarray) -> np.ndarray:
        return codes.transpose(0, 2, 3, 1)

    def plan_filter(self, codes: np.ndarray) -> np.ndarray:
        return codes.transpose(0, 3, 1, 2)

    def wide_sums(self, x: np.ndarray, filter: np.ndarray, output: Tensor, attributes: Attributes) -> np.ndarray:
        size = filter.shape[3]
        groups = x.shape[3] // size
        places = (x.shape[0], *output.shape[1:3])
        sums = np.empty((math.prod(places), groups, filter.shape[0] // groups), np.result_type(x, filter))
        filter = filter.reshape(groups, -1, *filter.shape[1:])
        met = windows_of(x, filter.shape[2:4], attributes, 0)
        for i, j in np.ndindex(filter.shape[2:4]):
            for group in range(groups):
                values = met[:, :, :, i, j, group * size : (group + 1) * size].reshape(-1, size)
                if (i, j) == (0, 0):
                    np.matmul(values, filter[group, :, i, j].T, out=sums[:, group])
                else:
                    sums[:, group] += values @ filter[group, :, i, j].T
        return sums.reshape(*places, filter.shape[0] * filter.shape[1])

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        outputs, height, width, inputs = writer.graph.tensors[operator.inputs[1]].shape
        weights = self.onnx_weights(writer, operator, (0, 3, 1, 2), (outputs, inputs, height, width))
        groups = writer.graph.tensors[operator.inputs[0]].shape[3] // inputs
        self.convolve_in_onnx(writer, operator, output, weights, groups)


@register
class DepthwiseConv2D(Convolution):
    """filter [1, height, width, in * multiplier], input channel major."""

    kind = "DEPTHWISE_CONV_2D"
    as_in_onnx = True
    wide_version = 5
    reads_long_biases = True
    options = "DepthwiseConv2DOptions"
    names_bias_dtype = False
    filter_axis = 3

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        first, filter, bias = shapes
        need(len(first) == 4 and len(filter) == 4, f"input and filter must be rank 4, got {[first, filter]}")
        fits = filter[0] == 1 and filter[3] % first[3] == 0
        need(fits, f"filter {filter} must be [1, height, width, {first[3]} * multiplier]")
        need(bias == (filter[3],), f"bias must have shape ({filter[3]},), got {bias}")
        return (*window_shape(first, filter[1:3], attributes), filter[3])

    def integers(self, call: Call) -> np.ndarray:
        x, filter = call.codes[0], call.codes[1]
        exact = int((filter_reach(filter, 3, call.inputs[0]) + np.abs(call.codes[2].astype(np.int64))).max()) < 2**24
        dtype = np.float32 if exact else np.float64
        taps = filter.reshape(*filter.shape[1:3], x.shape[3], -1).astype(dtype)
        result = np.empty((x.shape[0], *call.output.shape[1:]), call.output.dtype)
        per_image = math.prod(x.shape[1:])
        # Few enough images at a time to stay in the cache, and enough for a call to be worth it.
        together = rows_of_block(per_image, max(x.shape[0], 1))
        rows = rows_of_block(filter.shape[3], max(math.prod(result.shape[:3]), 1))
        requantization = Requantization(self, call.inputs, call.output, call.attributes, call.profile, rows)
        bias = repeated("bias", call.codes[2], rows, dtype)
        steps = scratch("steps", (together, *x.shape[1:]), dtype)
        sums = scratch("sums", (together, *call.output.shape[1:]), dtype)
        for image in range(0, x.shape[0], together):
            stored = result[image : image + together]
            count = len(stored)
            np.subtract(x[image : image + count], dtype(zero_point_of(call.inputs[0])), out=steps[:count], dtype=dtype)
            depthwise(steps[:count], taps, call.attributes, sums[:count])
            places, flat = (array.reshape(-1, filter.shape[3]) for array in (stored, sums[:count]))

            def store(todo: Sequence[int], flat: np.ndarray = flat, places: np.ndarray = places) -> None:
                for start in todo:
                    part = flat[start : start + rows]
                    part += bias[: len(part)]
                    requantization.store(part, places[start : start + rows])

            share(store, range(0, len(flat), rows))
        return result

    def device_filter(self, codes: np.ndarray) -> np.ndarray:
        return codes.transpose(1, 2, 3, 0)

    def plan_filter(self, codes: np.ndarray) -> np.ndarray:
        return codes.transpose(3, 0, 1, 2)

    def groups(self, inputs: int, filter: Shape) -> int:
        return inputs

    def wide_sums(self, x: np.ndarray, filter: np.ndarray, output: Tensor, attributes: Attributes) -> np.ndarray:
        taps = filter[0].reshape(*filter.shape[1:3], x.shape[3], -1)
        sums = np.empty((x.shape[0], *output.shape[1:3], filter.shape[3]), np.result_type(x, filter))
        depthwise(x.astype(sums.dtype, copy=False), taps.astype(sums.dtype, copy=False), attributes, sums)
        return sums

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Fields:
        options = super().tflite_options(inputs, output, attributes)
        return {**options, "depthMultiplier": inputs[1].shape[3] // inputs[0].shape[3]}

    def read_attributes(self, read: FileOperator) -> Attributes:
        """Some runtimes take the multiplier of the options, others that of the shapes."""
        multiplier, (input, filter) = read.option("depthMultiplier"), (read.operand(0), read.operand(1))
        channels = [tensor.shape[3] for tensor in (input, filter) if len(tensor.shape) == 4]
        if multiplier is not None and len(channels) == 2 and multiplier * channels[0] != channels[1]:
            raise Unreadable(
                f"a depth multiplier of {multiplier} with {channels[0]} channels and {channels[1]} filters"
            )
        return super().read_attributes(read)

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        _, height, width, outputs = writer.graph.tensors[operator.inputs[1]].shape
        weights = self.onnx_weights(writer, operator, (3, 0, 1, 2), (outputs, 1, height, width))
        groups = writer.graph.tensors[operator.inputs[0]].shape[3]
        self.convolve_in_onnx(writer, operator, output, weights, groups)


@register
class TransposeConv(Weighted):
    """Every value of the image spreads over a window of the result: filter [out, height, width, in].

    output_size: height and width of the result. With VALID they are at least (size - 1) * stride + filter size; with
    SAME, what lies beyond them is cut off as TensorFlow's SAME would pad the convolution the other way round.
    """

    kind = "TRANSPOSE_CONV"
    attributes = {"strides": (1, 1), "padding": "VALID", "output_size": REQUIRED, "activation": "NONE"}
    spatial = True
    per_window_attributes = {"strides": 1}
    version = 4
    wide_version = 4
    reads_long_biases = True
    options = "TransposeConvOptions"
    any_batch = False
    order = (3, 1, 0, 2)
    plan_axis = 1
    float_kind = "conv_transpose"

    def float_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        return {**self.step_attributes(shapes, attributes), "dilations": (1, 1), "groups": 1}

    def step_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        """A plan crops a number of rows and columns, or adds some."""
        first, filter = shapes[:2]
        base = dict(super().step_attributes(shapes, attributes))
        beyond = [
            (size - 1) * stride + window - result
            for size, result, window, stride in zip(
                first[1:3], base.pop("output_size"), filter[1:3], attributes["strides"], strict=True
            )
        ]
        cut = [max(count, 0) for count in beyond]
        pads = tuple((count // 2, count - count // 2) for count in cut)
        return {**base, "padding": pads, "output_padding": tuple(max(-count, 0) for count in beyond)}

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        first, filter, bias = shapes
        need(len(first) == 4 and len(filter) == 4, f"input and filter must be rank 4, got {[first, filter]}")
        need(filter[3] == first[3], f"filter {filter} does not fit {first[3]} input channels")
        need(bias == (filter[0],), f"bias must have shape ({filter[0]},), got {bias}")
        sizes = tuple(attributes["output_size"])
        need(len(sizes) == 2 and min(sizes) >= 1, f"output_size must be two positive integers, got {sizes}")
        for size, result, window, stride in zip(first[1:3], sizes, filter[1:3], attributes["strides"], strict=True):
            whole = (size - 1) * stride + window
            if attributes["padding"] == "VALID":
                fits = whole <= result < whole + stride
                allowed = f"{whole}..{whole + stride - 1}"
            else:
                fits = -(-result // stride) == size
                allowed = f"{(size - 1) * stride + 1}..{size * stride}"
            word = attributes["padding"]
            need(fits, f"output_size of an axis of {size} must be in {allowed} with {word}, got {result}")
            # XNNPACK leaves it to a kernel that rounds otherwise, and VALID says the same.
            need(whole >= result or word == "VALID", f"output_size {result} is beyond all windows: use VALID")
            gaps = f"strides of {stride} leave gaps between windows of {window}: use VALID"
            need(window >= stride or word == "VALID", gaps)
        return (first[0], *sizes, filter[0])

    def multiply_accumulates(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> int:
        return math.prod(inputs[0].shape[:-1]) * math.prod(inputs[1].shape)

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        """attributes: strides, padding in pairs, output_padding, channel_axis; weight [in, out, *window]."""
        x, weight, bias = operands
        strides, dilations = attributes["strides"], (1,) * len(attributes["strides"])
        padding, output_padding = attributes["padding"], attributes["output_padding"]
        axis = attributes["channel_axis"]
        result = primitives.conv_transpose(x, weight, bias, strides, padding, output_padding, dilations, 1, axis)
        return activate(primitives, result, attributes)

    def integers(self, call: Call) -> np.ndarray:
        x, filter = call.codes[0], call.codes[1]
        # Beyond the image there is nothing, not even the zero point that sums of codes would have to be rid of.
        offset = zero_point_of(call.inputs[0]) * filter.astype(np.int64).sum(3)
        rows, height, width, _ = x.shape
        (down, right), window = call.attributes["strides"], filter.shape[1:3]
        whole = [
            (size - 1) * stride + side
            for size, stride, side in zip((height, width), (down, right), window, strict=True)
        ]
        spread = np.zeros((rows, *whole, filter.shape[0]))
        flat = x.reshape(-1, x.shape[3]).astype(np.float64)
        for i in range(window[0]):
            for j in range(window[1]):
                place = spread[:, i : i + (height - 1) * down + 1 : down, j : j + (width - 1) * right + 1 : right]
                place += (flat @ filter[:, i, j].T).reshape(place.shape) - offset[:, i, j]
        sums = np.zeros((rows, *call.output.shape[1:]))
        cut = [max(before - after, 0) // 2 for before, after in zip(whole, call.output.shape[1:3], strict=True)]
        kept = spread[:, cut[0] : cut[0] + call.output.shape[1], cut[1] : cut[1] + call.output.shape[2]]
        sums[:, : kept.shape[1], : kept.shape[2]] = kept + offset.sum((1, 2))
        sums[:, kept.shape[1] :] = sums[:, :, kept.shape[2] :] = offset.sum((1, 2))
        return self.requantize(sums, call.codes, call.inputs, call.output, call.attributes, call.profile)

    def wide_sums(self, x: np.ndarray, filter: np.ndarray, output: Tensor, attributes: Attributes) -> np.ndarray:
        rows, height, width, _ = x.shape
        (down, right), window, sizes = attributes["strides"], filter.shape[1:3], output.shape[1:3]
        whole = ((height - 1) * down + window[0], (width - 1) * right + window[1])
        cut = [max(before - after, 0) // 2 for before, after in zip(whole, sizes, strict=True)]
        # Large enough for the windows and for what lies beyond all of them.
        spread = np.zeros((rows, *(max(pair) + 1 for pair in zip(whole, sizes, strict=True)), filter.shape[0]))
        for i, j in np.ndindex(window):
            place = spread[:, i : i + (height - 1) * down + 1 : down, j : j + (width - 1) * right + 1 : right]
            place += x @ filter[:, i, j].T
        return spread[:, cut[0] : cut[0] + sizes[0], cut[1] : cut[1] + sizes[1]]

    def short_steps(self, accumulator: np.ndarray, inputs: Tensors, output: Tensor, profile: Profile) -> np.ndarray:
        """LiteRT's optimized kernel rounds eight channels at a time, half up, and those that are left half away."""
        significand, exponent = fixed_point(real_multiplier(inputs, output))
        steps = multiply_fixed_point(accumulator, significand, exponent)
        if profile.optimized:
            whole = slice(accumulator.shape[-1] // 8 * 8)
            steps[..., whole] = multiply_half_up(accumulator[..., whole], significand[whole], exponent[whole])
        return steps

    def lower(self, context: LoweringContext, step: PlannedStep) -> LoweredTensor | None:
        """A plan crops as SAME does, or with a slice after VALID."""
        path, axis = step.operands[0], step.attributes["channel_axis"]
        codes = context.numbers.weights[step.path].codes
        spatial = [a for a in range(len(step.shape)) if a not in (step.batch_axis, axis)]
        unit = [1] * (2 - len(spatial))
        strides = (*unit, *step.attributes["strides"])
        results = (*unit, *(step.shape[a] for a in spatial))
        cut = (*[0] * len(unit), *(before for before, _ in step.attributes["padding"]))
        sizes = (*unit, *(context.shape(path)[a] for a in spatial))
        windows = (*unit, *codes.shape[2:])
        whole = tuple((n - 1) * s + w for n, s, w in zip(sizes, strides, windows, strict=True))
        # SAME is refused where windows leave gaps.
        if all(window >= stride for window, stride in zip(windows, strides, strict=True)) and all(
            -(-result // stride) == size and full >= result and (full - result) // 2 == before
            for result, stride, size, full, before in zip(results, strides, sizes, whole, cut, strict=True)
        ):
            return context.weighted(self, step, {"strides": strides, "padding": "SAME", "output_size": results})
        reached = tuple(max(full, before + result) for full, before, result in zip(whole, cut, results, strict=True))
        attributes = {"strides": strides, "padding": "VALID", "output_size": reached}
        if reached == results:
            return context.weighted(self, step, attributes)
        stored = context.weighted(self, step, attributes, f"{step.path}/whole")
        end = (before + result for before, result in zip(cut, results, strict=True))
        name = context.builder.strided_slice(
            stored.name, name=context.name(step.path), begin=(0, *cut, 0), end=(None, *end, None), steps=(1,) * 4
        )
        return LoweredTensor(str(name), stored.layout)

    def device_filter(self, codes: np.ndarray) -> np.ndarray:
        return codes.transpose(0, 2, 3, 1)

    def plan_filter(self, codes: np.ndarray) -> np.ndarray:
        return codes.transpose(0, 3, 1, 2)

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Fields:
        options = {**window_options(attributes), "fusedActivationFunction": activation_option(attributes)}
        return {**options, **bias_option(inputs)}

    def tflite_operands(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Sequence[FileConstant]:
        return (("output_shape", list(output.shape)),)

    def read_attributes(self, read: FileOperator) -> Attributes:
        size = read.integers(3)
        return {**read_window(read), "output_size": size[1:3], "activation": read.activation()}

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        outputs, height, width, inputs = writer.graph.tensors[operator.inputs[1]].shape
        filter, bias = self.onnx_weights(writer, operator, (3, 0, 1, 2), (inputs, outputs, height, width), 1)
        source, strides = writer.graph.tensors[operator.inputs[0]].shape, operator.attributes["strides"]
        pads, more = [], []
        for size, result, window, stride in zip(source[1:3], output.shape[1:3], (height, width), strides, strict=True):
            total = (size - 1) * stride + window - result
            pads.append((max(total, 0) // 2, max(total, 0) - max(total, 0) // 2))
            more.append(max(-total, 0))
        words = {
            "kernel_shape": [height, width],
            "strides": list(strides),
            "pads": [before for before, _ in pads] + [after for _, after in pads],
            "output_padding": more,
        }
        operands = [*writer.operands(operator), filter, bias]
        writer.computed(operator, output, "ConvTranspose", operands, **words)


def depthwise(steps: np.ndarray, taps: np.ndarray, attributes: Attributes, out: np.ndarray) -> None:
    """Each channel of steps [batch, height, width, channels] convolved with its own taps [height, width, channels,
    multiplier], by the library's own operator: beyond the image there are zeros."""
    strides, dilations = ((1, *attributes[name], 1) for name in ("strides", "dilations"))
    raw_ops.DepthwiseConv2dNative(
        input=steps, filter=taps, strides=strides, padding=attributes["padding"], dilations=dilations, out=out
    )


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


def read_window(read: FileOperator) -> dict[str, Any]:
    """Strides and padding from an options table."""
    return {"strides": (read.option("strideH"), read.option("strideW")), "padding": read.word("padding", "Padding")}


def onnx_window(input_shape: Shape, filter_size: Sequence[int], attributes: Attributes) -> dict[str, Any]:
    """ONNX's attributes for filter size, strides, dilations and padding."""
    dilations = attributes.get("dilations", (1, 1))
    window: dict[str, Any] = {"kernel_shape": list(filter_size), "strides": list(attributes["strides"])}
    axes = list(zip(input_shape[1:3], filter_size, attributes["strides"], dilations, strict=True))
    # In numbers: runtimes refuse the word beside dilations, and where a stride is larger than the window.
    if tuple(dilations) == (1, 1) and all(stride <= side for _, side, stride, _ in axes):
        window["auto_pad"] = "SAME_UPPER" if attributes["padding"] == "SAME" else "VALID"
        return window
    if max(dilations) > 1:
        window["dilations"] = list(dilations)
    if attributes["padding"] == "SAME":
        pads = [same_padding(*axis) for axis in axes]
        window["pads"] = [before for before, _ in pads] + [after for _, after in pads]
    return window
