# SPDX-License-Identifier: Apache-2.0
"""Products of matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from .arithmetic import (
    Tensors,
    activate,
    broadcast_shape,
    centered,
    finish,
    fixed_point,
    multiply_fixed_point,
    multiply_half_up,
    multiply_wide,
    round_half_away,
    scale_of,
    scales_for,
    stated_codes,
    zero_point_of,
)
from .contexts import NetworkContext, OnnxWriter, PlanContext
from .file_forms import Option
from .operator import (
    Attributes,
    Call,
    DeviceOperator,
    Fields,
    FileOperator,
    Operator,
    ScaleLimits,
    Shape,
    Unreadable,
    need,
    register,
)
from .primitives import A, RealPrimitives
from .profile import Profile
from .stated_arithmetic import Arithmetic
from .tensor import Tensor
from .weighted import HIGHEST_MULTIPLIER, Weighted, bias_option, real_multiplier


@register
class FullyConnected(Weighted):
    """Over the last axis: input [..., in], filter [out, in].

    keep_axes: whether the result has the operand's axes; without, as others' files may say it, it is [rows, out], of
    all values in rows of `in`.
    """

    kind = "FULLY_CONNECTED"
    as_in_onnx = True
    attributes = {"activation": "NONE", "keep_axes": True}
    weights_follow_features = True
    float_kind = "linear"
    version = 4
    wide_version = 7
    options = "FullyConnectedOptions"
    mechanisms = {
        **Weighted.mechanisms,
        "delegates": "float32 or float64: XNNPACK multiplies by a float32 scale, LiteRT's own kernel in float64",
    }

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        first, filter, bias = shapes
        rows, rest = divmod(math.prod(first), max(filter[-1], 1))
        kept = attributes["keep_axes"]
        fits = len(first) >= 2 and len(filter) == 2 and (first[-1] == filter[1] if kept else rest == 0)
        need(fits, f"input [1, in] and filter [out, in] do not fit: {first}, {filter}")
        need(bias == filter[:1], f"bias must have shape {filter[:1]}, got {bias}")
        return (*first[:-1], filter[0]) if kept else (rows, filter[0])

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        x, weight, bias = context.operands(operator)
        (shape,) = context.results(operator)
        if not operator.attributes["keep_axes"]:
            x = context.reshaped(x, (*shape[:-1], weight.shape[1]))
        context.give(operator, context.step(self.float_kind, [x, context.weight(weight), bias], shape))

    def restore(self, context: PlanContext, operator: Operator) -> None:
        (shape,), (x, filter, _) = context.results(operator), context.shapes(operator)
        rows, operand = (*shape[:-1], filter[1]), context.paths.get(operator.inputs[0], "")
        if operand and rows != x and not operator.attributes["keep_axes"]:
            operand = context.part(operator, "RESHAPE", operand, {"new_shape": rows}, rows)
        context.weighted(operator, operand)

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        x, filter, bias = operands
        if not attributes.get("keep_axes", True):
            x = primitives.reshape(x, (-1, int(filter.shape[1])))
        return activate(primitives, primitives.linear(x, filter, bias), attributes)

    def integers(self, call: Call) -> np.ndarray:
        x = call.codes[0] if call.attributes["keep_axes"] else call.codes[0].reshape(-1, call.codes[1].shape[1])
        result = np.empty((*x.shape[:-1], len(call.codes[1])), call.output.dtype)
        rows, into = (array.reshape(-1, 1, 1, array.shape[-1]) for array in (x, result))
        self.store_products(rows, into, call.codes, call.inputs, call.output, call.attributes, call.profile)
        return result

    def takes_four_bits(self, filter: Tensor, profile: Profile) -> bool:
        return profile.four_bits_per_channel or filter.quantization.axis is None

    def rounding(self, profile: Profile) -> str:
        own = "float64" if profile.fully_connected_in_float64 else super().rounding(profile)
        return super().rounding(profile) if profile.scales_sums_in_float32 else own

    def fixed_point_steps(
        self, multiplier: np.ndarray, rows: int, profile: Profile
    ) -> Callable[[np.ndarray], np.ndarray]:
        if not profile.fully_connected_in_float64:
            return super().fixed_point_steps(multiplier, rows, profile)
        # Rounded once, unlike in LiteRT's convolutions.
        return lambda whole: round_half_away(whole * multiplier).astype(np.int64)

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Fields:
        options = {
            "fusedActivationFunction": ("ActivationFunctionType", attributes["activation"]),
            **bias_option(inputs),
        }
        kept = attributes["keep_axes"] and len(output.shape) > 2
        return {**options, "keepNumDims": True} if kept else options

    def read_attributes(self, read: FileOperator) -> Attributes:
        layout = read.word("weightsFormat", "FullyConnectedOptionsWeightsFormat")
        if layout != "DEFAULT":
            raise Unreadable(f"weights in the format {layout} are not supported")
        x, filter = read.operand(0).shape, read.operand(1).shape
        plain = len(x) == 2 and x[-1:] == filter[-1:]
        return {"activation": read.activation(), "keep_axes": plain or bool(read.option("keepNumDims"))}

    def wide_sums(self, x: np.ndarray, filter: np.ndarray, output: Tensor, attributes: Attributes) -> np.ndarray:
        sums: np.ndarray = (x if attributes["keep_axes"] else x.reshape(-1, filter.shape[1])) @ filter.T
        return sums

    def short_steps(self, accumulator: np.ndarray, inputs: Tensors, output: Tensor, profile: Profile) -> np.ndarray:
        if profile.fully_connected_in_float64 and not profile.optimized:
            return self.wide_steps(accumulator, inputs, output, profile)
        if profile.optimized and inputs[1].quantization.axis is None:
            # Of a filter with one scale, LiteRT multiplies the two scales in float32.
            product = (inputs[0].quantization.scale * inputs[1].quantization.scale).astype(np.float64)
            return multiply_half_up(accumulator, *fixed_point(product / float(scale_of(output))))
        return super().short_steps(accumulator, inputs, output, profile)

    def wide_steps(self, accumulator: np.ndarray, inputs: Tensors, output: Tensor, profile: Profile) -> np.ndarray:
        if not profile.fully_connected_in_float64:
            return super().wide_steps(accumulator, inputs, output, profile)
        return round_half_away(accumulator * real_multiplier(inputs, output)).astype(np.int64)

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        # Rows of any number of axes as the rows of one Gemm, which has a kernel for integers and a bias.
        outputs, inputs = writer.graph.tensors[operator.inputs[1]].shape
        source, name = writer.graph.tensors[operator.inputs[0]], output.name
        weights = self.onnx_weights(writer, operator, (0, 1), (outputs, inputs))
        if len(source.shape) == len(output.shape) == 2 and source.shape[1] == inputs:
            real = writer.real(source.name)
            writer.result(operator, output, writer.node("Gemm", [real, *weights], f"{name}/computed", transB=1))
            return
        codes = writer.codes_in_graph_order(source.name, f"{name}/channels_last")
        rows = writer.reshaped(codes, (-1, inputs), f"{name}/rows")
        real = writer.dequantize(rows, source.quantization, f"{name}/real")
        computed = writer.node("Gemm", [real, *weights], f"{name}/computed", transB=1)
        codes = writer.quantize(computed, output, operator.attributes, f"{name}/unshaped")
        writer.codes_to_result(output, writer.reshaped(codes, (-1, *output.shape[1:]), f"{name}/reshaped"))


def in_float32(inputs: Tensors, profile: Profile) -> bool:
    """Whether a product of two activations is multiplied by a float32 number and rounded to even.

    XNNPACK leaves a second operand with a zero point to the built-in kernel, which computes as the reference.
    """
    return profile.rounds_as_onnx or (profile.delegates and zero_point_of(inputs[1]) == 0)


def product_multiplier(inputs: Tensors, output: Tensor, profile: Profile) -> float:
    """float64 scale * scale / output scale of two activations; the product is rounded where the kernels do."""
    first, second = scales_for(profile, *inputs)
    return float(first * second) / float(scale_of(output))


# What products of int16 by constants in int8 are measured as, besides.
NARROW = "int8_constant"


def stays_in_32_bits(inputs: Tensors, output: Tensor, depth: int) -> bool:
    """Whether no sum of so many products of int16, rescaled, leaves 32 bits."""
    multiplier = math.prod(float(scale_of(tensor)) for tensor in inputs) / float(scale_of(output))
    return depth * 2.0**30 * multiplier < 2**31


@register
class BatchMatrixMultiply(DeviceOperator):
    """[..., rows, k] times [..., k, columns], leading axes broadcast; adj_x, adj_y: the last two axes stand swapped."""

    kind = "BATCH_MATMUL"
    asks = (("rounding",), ("multiplier",))
    floats = True
    dtypes = ("int8", "int16")
    most_axes = 5
    attributes = {"adj_x": False, "adj_y": False}
    in_file = {"adj_x": Option("adjX", bool), "adj_y": Option("adjY", bool)}
    narrow = (1,)
    operands = (2, 2)
    constants = True
    version = 2
    wide_version = 3
    options = "BatchMatMulOptions"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        turned = [
            (*shape[:-2], shape[-1], shape[-2]) if attributes[name] else shape
            for shape, name in zip(shapes, ("adj_x", "adj_y"), strict=True)
        ]
        first, second = turned
        fits = min(map(len, turned)) >= 2 and first[-1] == second[-2]
        need(fits, f"matrices do not fit: {shapes[0]}, {shapes[1]}")
        return (*broadcast_shape([first[:-2], second[:-2]]), first[-2], second[-1])

    def scale_limits(self, dtypes: Sequence[str], attributes: Attributes) -> ScaleLimits:
        """Those of int16 keep sums of up to 512 products, times what is bounded, within the 32 bits that kernels hold
        before they clamp them to 16."""
        return ScaleLimits("product", 2.0**-32, 2.0**-8 if dtypes[0] == "int16" else HIGHEST_MULTIPLIER)

    def check(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> None:
        rank, rows = len(output.shape), output.shape[0]
        need(rank >= 3, f"the batch must be among the leading axes, got a result of {output.shape}")
        for tensor in inputs:
            if tensor.data is None:
                fits = len(tensor.shape) == rank and tensor.shape[0] == rows
                need(fits, f"{tensor.name!r} {tensor.shape} must have rank {rank} and {rows} rows, as the result has")
            else:
                fits = len(tensor.shape) < rank or tensor.shape[0] == 1
                need(fits, f"{tensor.name!r} {tensor.shape} is a constant, which cannot differ along the batch")
        limits = self.scale_limits([tensor.dtype for tensor in (*inputs, output)], attributes)
        replace(limits, highest=HIGHEST_MULTIPLIER).need(inputs, output)
        if output.dtype == "int16":
            need(not any(map(zero_point_of, inputs)), "operands must have zero point 0 beside int16")

    def measured_as(self, inputs: Tensors, output: Tensor) -> str:
        name = super().measured_as(inputs, output)
        return f"{name}:{NARROW}" if (inputs[1].dtype, output.dtype) == ("int8", "int16") else name

    def multiply_accumulates(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> int:
        depth = inputs[0].shape[-2 if attributes["adj_x"] else -1]
        return math.prod(output.shape) * depth

    def trailing(self, rank: int, attributes: Attributes) -> Shape:
        return rank - 2, rank - 1

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        turned = []
        for x, name in zip(operands, ("adj_x", "adj_y"), strict=True):
            rank = len(x.shape)
            axes = [*range(rank - 2), rank - 1, rank - 2]
            turned.append(primitives.transpose(x, axes) if attributes[name] else x)
        return primitives.matmul(*turned)

    def integers(self, call: Call) -> np.ndarray:
        operands = [centered(code, tensor) for code, tensor in zip(call.codes, call.inputs, strict=True)]
        depth = operands[0].shape[-2 if call.attributes["adj_x"] else -1]
        reach = depth * math.prod(int(np.abs(operand).max(initial=0)) for operand in operands)
        dtype = np.float32 if reach < 2**24 else np.float64  # which holds all sums
        first, second = (
            np.swapaxes(x.astype(dtype), -1, -2) if call.attributes[name] else x.astype(dtype)
            for x, name in zip(operands, ("adj_x", "adj_y"), strict=True)
        )
        accumulator = np.matmul(first, second).astype(np.int64)
        if in_float32(call.inputs, call.profile):
            multiplier = scale_of(call.inputs[0]) * scale_of(call.inputs[1]) / scale_of(call.output)
            steps = np.rint(accumulator.astype(np.float32) * multiplier).astype(np.int64)
        else:
            steps = multiply_fixed_point(
                accumulator, *fixed_point(product_multiplier(call.inputs, call.output, call.profile))
            )
        return finish(steps, call.output, call.attributes, call.profile)

    def stated(self, call: Call, arithmetic: Arithmetic) -> np.ndarray:
        first, second = (
            np.swapaxes(centered(code, tensor), -1, -2) if call.attributes[name] else centered(code, tensor)
            for code, tensor, name in zip(call.codes, call.inputs, ("adj_x", "adj_y"), strict=True)
        )
        sums = (first.astype(np.float64) @ second.astype(np.float64)).astype(np.int64)
        return stated_codes(call, arithmetic, arithmetic.limited(sums))

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        operands = []
        for x, name in zip(context.operands(operator), ("adj_x", "adj_y"), strict=True):
            axes = list(range(len(x.shape)))
            axes[-2:] = axes[:-3:-1] if operator.attributes[name] else axes[-2:]
            operands.append(context.permute(x, axes))
        context.give(operator, context.step("matmul", operands, context.results(operator)[0]))

    def wide_integers(self, call: Call) -> np.ndarray:
        turned = [
            np.swapaxes(code, -1, -2) if call.attributes[name] else code
            for code, name in zip(call.codes, ("adj_x", "adj_y"), strict=True)
        ]
        first, second = (code.astype(np.float64) for code in turned)
        multiplier = fixed_point(product_multiplier(call.inputs, call.output, call.profile))
        # What does not fit into 32 bits wraps before it is clamped to 16.
        steps = multiply_wide((first @ second).astype(np.int64), *multiplier).astype(np.int32)
        return finish(steps, call.output, call.attributes, call.profile)

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        name, operands = output.name, []
        for position, source in enumerate(operator.inputs):
            tensor, label = writer.graph.tensors[source], f"{name}/operand_{position}"
            axes = list(range(len(tensor.shape)))
            if operator.attributes[("adj_x", "adj_y")[position]]:
                axes[-2:] = axes[:-3:-1]
            if tensor.data is not None:
                real = writer.dequantized(tensor, tensor.data.transpose(axes), None)
            elif axes == sorted(axes):
                real = writer.in_graph_order(source, label)
            else:
                codes = writer.codes_in_graph_order(source, f"{label}/unturned")
                codes = writer.node("Transpose", [codes], f"{label}/codes", perm=axes)
                real = writer.node("DequantizeLinear", [codes, *writer.parameters(source, tensor.quantization)], label)
            operands.append(real)
        product = writer.node("MatMul", operands, f"{name}/product")
        writer.result_in_graph_order(operator, output, product)
