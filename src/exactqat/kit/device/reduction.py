# SPDX-License-Identifier: Apache-2.0
"""One value from many: means, sums, extremes over whole axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import mul
from typing import Any, ClassVar

import numpy as np

from . import as_onnx
from .arithmetic import (
    Tensors,
    centered,
    finish,
    fixed_point,
    fused_multiply_add,
    multiply_fixed_point,
    multiply_wide,
    round_half_away,
    scale_of,
    stated_codes,
    zero_point_of,
)
from .contexts import GraphBuilder, NetworkContext, OnnxWriter
from .file_forms import InOperand, Option
from .operator import (
    REQUIRED,
    Attributes,
    Call,
    DeviceOperator,
    Fields,
    FileConstant,
    FileOperator,
    Operator,
    ScaleLimits,
    Shape,
    Unreadable,
    need,
    register,
)
from .primitives import A, RealPrimitives
from .profile import MICRO, REFERENCE, Profile
from .stated_arithmetic import Arithmetic
from .tensor import INDICES, INT8_MAX, INT8_MIN, Tensor


class OverAxes(DeviceOperator):
    """Over `axes`, which are left out of the result unless `keep_dims`."""

    attributes = {"axes": (1, 2), "keep_dims": False}
    in_file = {"axes": InOperand(1, FileOperator.axes), "keep_dims": Option("keepDims", bool)}
    axis_attributes = ("axes",)
    version = 2
    options = "ReducerOptions"
    onnx_kind: ClassVar[str]
    mechanisms = {
        "delegates": "a delegate's own kernel: XNNPACK multiplies the float32 sum of the codes and rounds to even; the "
        "built-in kernels take the count into a 31-bit multiplier, whose remainder is cut off",
    }

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,) = shapes
        axes = attributes["axes"]
        fits = len(set(axes)) == len(axes) > 0 and all(1 <= axis < len(first) for axis in axes)
        need(fits, f"axes must be different ones in 1..{len(first) - 1}, got {axes}")
        if attributes["keep_dims"]:
            return tuple(1 if axis in axes else size for axis, size in enumerate(first))
        return tuple(size for axis, size in enumerate(first) if axis not in axes)

    def removed_axes(self, attributes: Attributes) -> Shape:
        return () if attributes["keep_dims"] else tuple(attributes["axes"])

    def float_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        return {"axes": tuple(sorted(attributes["axes"])), "keep_dims": bool(attributes["keep_dims"])}

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        before, name = len(writer.graph.tensors[operator.inputs[0]].shape), output.name
        attributes = operator.attributes
        # Axes that are left out may bring others where ONNX's order is another one.
        stay = tuple(sorted(attributes["axes"])) == (1, 2) or (before != 4 and len(output.shape) != 4)
        plain = attributes["keep_dims"] or stay
        source = operator.inputs[0]
        real = writer.real(source) if plain else writer.in_graph_order(source, f"{name}/channels_last")
        axes = [writer.axis(axis, before) if plain else axis for axis in attributes["axes"]]
        operands = [real, writer.constant(f"{name}/axes", np.array(axes))]
        computed = writer.node(self.onnx_kind, operands, f"{name}/computed", keepdims=int(attributes["keep_dims"]))
        (writer.result if plain else writer.result_in_graph_order)(operator, output, computed)


def stated_reduction(call: Call, arithmetic: Arithmetic, count: int) -> np.ndarray:
    """The sum of steps times the quotient of scales and count."""
    return stated_codes(call, arithmetic, centered(call.codes[0], call.inputs[0]).sum(**over(call.attributes)), count)


def over(attributes: Attributes) -> dict[str, Any]:
    """The axes as NumPy's reductions take them."""
    return {"axis": tuple(attributes["axes"]), "keepdims": bool(attributes["keep_dims"])}


def reduced_count(tensor: Tensor, attributes: Attributes) -> int:
    """How many values make one of the result."""
    return math.prod(tensor.shape[axis] for axis in attributes["axes"])


def xnnpack_reduction(
    codes: np.ndarray, input: Tensor, output: Tensor, attributes: Attributes, multiplier: np.float32, profile: Profile
) -> np.ndarray:
    """The sum of the codes times a float32 multiplier.

    The zero points join the float32 sum before it is rounded, so ties are even in codes, not in steps.
    """
    input_zero_point, zero_point = (np.float32(zero_point_of(tensor)) for tensor in (input, output))
    offset = -(input_zero_point * np.float32(reduced_count(input, attributes)))
    total = codes.sum(dtype=np.int64, **over(attributes)).astype(np.float32)
    if profile.fuses_multiply_add:
        bias = fused_multiply_add(offset, multiplier, zero_point)
        result = fused_multiply_add(total, multiplier, bias)
    else:
        result = total * multiplier + (zero_point + offset * multiplier)
    return np.clip(np.rint(result), INT8_MIN, INT8_MAX).astype(np.int8)


@register
class Mean(OverAxes):
    """The average."""

    kind = "MEAN"
    averages = True
    asks = (("rounding",), ("multiplier",))
    as_in_onnx = True
    float_kind = "mean"
    floats = True
    dtypes = ("int8", "int16")
    plain = ("int32", "int64")
    wide_version = 3
    onnx_kind = "ReduceMean"

    def scale_limits(self, dtypes: Sequence[str], attributes: Attributes) -> ScaleLimits:
        # Below this the largest mean is less than a step. onnxruntime ends below 2**-32 of the count.
        return ScaleLimits("each", 2.0**-16)

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return primitives.mean(operands[0], attributes["axes"], attributes["keep_dims"])

    def stated(self, call: Call, arithmetic: Arithmetic) -> np.ndarray:
        return stated_reduction(call, arithmetic, reduced_count(call.inputs[0], call.attributes))

    def integers(self, call: Call) -> np.ndarray:
        count = reduced_count(call.inputs[0], call.attributes)
        if call.profile.rounds_as_onnx:
            total = centered(call.codes[0], call.inputs[0]).sum(**over(call.attributes))
            return as_onnx.averaged(total, count, call.inputs[0], call.output, call.attributes)
        if call.profile.delegates:
            multiplier = (scale_of(call.inputs[0]) / scale_of(call.output)) * (np.float32(1) / np.float32(count))
            return xnnpack_reduction(
                call.codes[0], call.inputs[0], call.output, call.attributes, multiplier, call.profile
            )
        # The division by the count is folded into the multiplier, where its remainder is cut off.
        significand, exponent = fixed_point(float(scale_of(call.inputs[0])) / float(scale_of(call.output)))
        shift = min(count.bit_length() - 1, 31 + int(exponent))
        total = centered(call.codes[0], call.inputs[0]).sum(**over(call.attributes))
        steps = multiply_fixed_point(total, (significand << shift) // count, exponent - shift)
        return finish(steps, call.output, call.attributes, call.profile)

    def wide_integers(self, call: Call) -> np.ndarray:
        return self.integers(replace(call, profile=REFERENCE))

    def plain_integers(self, call: Call) -> np.ndarray:
        total, count = (
            call.codes[0].sum(dtype=np.int64, **over(call.attributes)),
            reduced_count(call.inputs[0], call.attributes),
        )
        return (np.sign(total) * (np.abs(total) // count)).astype(call.output.dtype)

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        # GlobalAveragePool has a kernel for integers, ReduceMean has none.
        if output.dtype != "int8":
            super().onnx(writer, operator, output)
            return
        source, name = writer.graph.tensors[operator.inputs[0]], output.name
        axes = sorted(operator.attributes["axes"])
        if len(source.shape) == 4 and axes == [1, 2]:
            real = writer.real(source.name)
        else:
            kept = [axis for axis in range(1, len(source.shape)) if axis not in axes]
            codes = writer.codes_in_graph_order(source.name, f"{name}/channels_last")
            codes = writer.transposed(codes, (0, *kept, *axes), f"{name}/reduced_last")
            sizes = [math.prod(source.shape[axis] for axis in group) for group in (kept, axes)]
            codes = writer.reshaped(codes, (-1, *sizes), f"{name}/rows")
            real = writer.dequantize(codes, source.quantization, f"{name}/real")
        pooled = writer.node("GlobalAveragePool", [real], f"{name}/computed")
        codes = writer.quantize(pooled, output, {}, f"{name}/pooled")
        writer.codes_to_result(output, writer.reshaped(codes, (-1, *output.shape[1:]), f"{name}/reshaped"))


@register
class Sum(OverAxes):
    """The sum. LiteRT's default kernel for int16 multiplies it in float32; what its reference kernel makes of int16 is
    in part what lies in memory, so nothing is claimed."""

    kind = "SUM"
    float_kind = "sum"
    dtypes = ("int8", "int16")
    plain = ("int32", "int64")
    asks = (("rounding",), ("multiplier",))
    floats = True
    purpose = "graphs built by hand: a plan makes a mean of it, as LiteRT's reference kernel is of no use"
    onnx_kind = "ReduceSum"

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return primitives.sum(operands[0], attributes["axes"], attributes["keep_dims"])

    def stated(self, call: Call, arithmetic: Arithmetic) -> np.ndarray:
        return stated_reduction(call, arithmetic, 1)

    def integers(self, call: Call) -> np.ndarray:
        if call.profile.delegates:
            multiplier = scale_of(call.inputs[0]) / scale_of(call.output)
            return xnnpack_reduction(
                call.codes[0], call.inputs[0], call.output, call.attributes, multiplier, call.profile
            )
        significand, exponent = fixed_point(float(scale_of(call.inputs[0])) / float(scale_of(call.output)))
        if call.profile.sums_as_unsigned:
            # What LiteRT's reference kernel makes of negative codes is of no use, but its own.
            count = reduced_count(call.inputs[0], call.attributes)
            total = call.codes[0].view(np.uint8).sum(dtype=np.int64, **over(call.attributes))
            steps = multiply_fixed_point(total - zero_point_of(call.inputs[0]) * count, significand, exponent)
            return np.clip(steps + zero_point_of(call.output), 0, 255).astype(np.uint8).view(np.int8)
        total = centered(call.codes[0], call.inputs[0]).sum(**over(call.attributes))
        return finish(multiply_fixed_point(total, significand, exponent), call.output, call.attributes, call.profile)

    def wide_integers(self, call: Call) -> np.ndarray:
        if not call.profile.optimized:
            return self.integers(replace(call, profile=MICRO))
        total = call.codes[0].sum(dtype=np.int64, **over(call.attributes)).astype(np.float32)
        steps = round_half_away(total * (scale_of(call.inputs[0]) / scale_of(call.output)))
        return finish(steps, call.output, call.attributes, call.profile)

    def plain_integers(self, call: Call) -> np.ndarray:
        return call.codes[0].sum(dtype=call.output.dtype, **over(call.attributes))


@register
class ReduceProd(OverAxes):
    """The product.

    The kernels scale after every factor, the first one as well, by a multiplier that the codes' scale and the root of
    the result's make, and keep 32 bits between them.
    """

    kind = "REDUCE_PROD"
    float_kind = "prod"
    floats = True
    dtypes = ("int8", "int16")
    plain = ("int32", "int64")
    wide_version = 2
    onnx_kind = "ReduceProd"

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        (x,) = operands
        for axis in attributes["axes"]:
            x = reduce(mul, (primitives.gather(x, [place], axis) for place in range(x.shape[axis])))
        # What is left of the axes has one value.
        return x if attributes["keep_dims"] else primitives.sum(x, attributes["axes"], False)

    def integers(self, call: Call) -> np.ndarray:
        axes, keep = tuple(sorted(call.attributes["axes"])), bool(call.attributes["keep_dims"])
        if call.profile.rounds_as_onnx:
            (real,) = as_onnx.operands(call.codes, call.inputs)
            return as_onnx.quantized(real.prod(axes, keepdims=keep), call.output, call.attributes)
        count = reduced_count(call.inputs[0], call.attributes)
        if count == 1 and call.profile.delegates:
            # LiteRT's default kernel takes axes of one value for none, and copies the codes whatever their scales.
            return call.codes[0] if keep else call.codes[0].squeeze(axes)
        root = float(scale_of(call.output)) ** (1.0 / count)
        significand, exponent = fixed_point(float(scale_of(call.inputs[0])) / root)
        steps = np.moveaxis(centered(call.codes[0], call.inputs[0]), axes, range(len(axes)))
        factors = steps.reshape(count, *steps.shape[len(axes) :])

        def scaled(product: np.ndarray) -> np.ndarray:
            return multiply_wide(product, significand, exponent).astype(np.int32).astype(np.int64)

        product = scaled(reduce(lambda product, factor: scaled(product * factor), factors))
        kept = np.expand_dims(product, axes) if keep else product
        return finish(kept, call.output, call.attributes, call.profile)

    def plain_integers(self, call: Call) -> np.ndarray:
        return call.codes[0].prod(dtype=call.output.dtype, **over(call.attributes))


class ReduceExtreme(OverAxes):
    """The largest or the smallest code."""

    same_quantization = True
    dtypes = ("int8", "int16")
    wide_version = 3
    floats = True
    moves_codes = True
    largest: ClassVar[bool] = True

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        (x,), axes, keep_dims = operands, attributes["axes"], attributes["keep_dims"]
        return primitives.amax(x, axes, keep_dims) if self.largest else primitives.amin(x, axes, keep_dims)

    def integers(self, call: Call) -> np.ndarray:
        return (np.amax if self.largest else np.amin)(call.codes[0], **over(call.attributes))


@register
class ReduceMax(ReduceExtreme):
    """The largest."""

    kind = "REDUCE_MAX"
    float_kind = "amax"
    onnx_kind = "ReduceMax"


@register
class ReduceMin(ReduceExtreme):
    """The smallest."""

    kind = "REDUCE_MIN"
    float_kind = "amin"
    largest = False
    onnx_kind = "ReduceMin"


@register
class ArgMax(DeviceOperator):
    """The index of the first largest value along `axis`, which is left out of the result."""

    kind = "ARG_MAX"
    float_kind = "argmax"
    floats = True
    plain = ("int32",)
    attributes = {"axis": REQUIRED, "output_type": "int64"}
    axis_attributes = ("axis",)
    version = 2
    options = "ArgMaxOptions"
    onnx_name: ClassVar[str] = "ArgMax"
    find = staticmethod(np.argmax)

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        need(bool(self.float_kind), f"no network has a step for {self.kind}")
        operands, (shape,) = context.operands(operator), context.results(operator)
        how = {"axis": operator.attributes["axis"], "keep_dims": False}
        context.give(operator, context.step(self.float_kind, operands, shape, dtype="int64", **how))

    def build(self, builder: GraphBuilder, *arguments: Any, name: str, **attributes: Any) -> str:
        """input; axis; output_type "int32" or "int64"."""
        (input, *rest) = arguments
        attributes |= dict(zip(self.attributes, rest, strict=False))
        return str(builder.operator(self.kind, [input], INDICES, name=name, **attributes))

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,) = shapes
        axis = attributes["axis"]
        need(1 <= axis < len(first), f"axis must be in 1..{len(first) - 1}, got {axis}")
        return first[:axis] + first[axis + 1 :]

    def dtype(self, attributes: Attributes, stored: str = "int8") -> str:
        return str(attributes["output_type"])

    def check_attributes(self, attributes: Attributes) -> None:
        super().check_attributes(attributes)
        dtype = attributes["output_type"]
        need(dtype in ("int32", "int64"), f"output_type must be int32 or int64, got {dtype!r}")

    def removed_axes(self, attributes: Attributes) -> Shape:
        return (int(attributes["axis"]),)

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return primitives.argmax(operands[0], attributes["axis"])

    def integers(self, call: Call) -> np.ndarray:
        return self.find(call.codes[0], call.attributes["axis"]).astype(call.output.dtype)

    float_results = plain_integers = integers

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Fields:
        return {"outputType": ("TensorType", str(attributes["output_type"]).upper())}

    def read_attributes(self, read: FileOperator) -> Attributes:
        axes = read.axes(1)
        if len(axes) != 1:
            raise Unreadable(f"one axis is supported, got {axes}")
        return {"axis": axes[0], "output_type": read.word("outputType", "TensorType").lower()}

    def tflite_operands(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Sequence[FileConstant]:
        return (("axis", np.array(attributes["axis"], np.int32)),)

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        real = writer.in_graph_order(operator.inputs[0], f"{output.name}/channels_last")
        axis = operator.attributes["axis"]
        computed = writer.node(self.onnx_name, [real], f"{output.name}/computed", axis=axis, keepdims=0)
        writer.store_indices(output, computed)


@register
class ArgMin(ArgMax):
    """The index of the first smallest value along `axis`, which is left out of the result."""

    kind = "ARG_MIN"
    float_kind = ""
    purpose = "graphs built by hand: a network holds argmax alone"
    options = "ArgMinOptions"
    onnx_name = "ArgMin"
    find = staticmethod(np.argmin)

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return primitives.argmin(operands[0], attributes["axis"])
