# SPDX-License-Identifier: Apache-2.0
"""Operators that move codes and compute nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from .arithmetic import Tensors, scale_of, zero_point_of
from .contexts import GraphBuilder, LoweringContext, NetworkContext, OnnxWriter, PlannedStep
from .file_forms import InOperand, Option
from .operator import (
    FLOAT,
    REQUIRED,
    Attributes,
    Call,
    DeviceOperator,
    Fields,
    FileConstant,
    FileOperator,
    FileStep,
    LoweredTensor,
    Operator,
    Refusal,
    Shape,
    Unreadable,
    are_steps,
    need,
    register,
)
from .primitives import A, RealPrimitives
from .profile import Profile
from .tensor import INDICES, Quantization, Tensor, code_range


class Movement(DeviceOperator):
    """What moves lies on the grid of its operand."""

    same_quantization = True
    dtypes: ClassVar[tuple[str, ...]] = ("int8", "int16")
    floats = True
    moves_codes = True


@register
class Pad(Movement):
    """Real 0 around the tensor; paddings: (before, after) per axis, (0, 0) for the batch."""

    kind = "PAD"
    as_in_onnx = True
    most_axes = 5
    attributes = {"paddings": REQUIRED}
    in_file = {"paddings": InOperand(1, FileOperator.pairs)}
    float_kind = "pad"
    per_axis_attributes = {"paddings": (0, 0)}
    version = 2
    wide_version = 3
    options = "PadOptions"

    def build(self, builder: GraphBuilder, *arguments: Any, name: str, **attributes: Any) -> str:
        input, paddings = (*arguments, *attributes.values())
        pairs = tuple((int(before), int(after)) for before, after in paddings)
        return str(builder.operator(self.kind, [input], None, name=name, paddings=pairs))

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        return padded_shape(shapes[0], attributes["paddings"])

    def float_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        return {"padding": attributes["paddings"], "mode": "constant", "value": 0.0}

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return primitives.pad(operands[0], attributes["paddings"], 0.0)

    def integers(self, call: Call) -> np.ndarray:
        return np.pad(call.codes[0], call.attributes["paddings"], constant_values=zero_point_of(call.output))

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        amounts = onnx_paddings(writer, operator, output)
        writer.computed(operator, output, "Pad", [*writer.operands(operator), amounts])


def padded_shape(shape: Shape, paddings: Sequence[Sequence[int]]) -> Shape:
    """The shape of a tensor that is padded."""
    need(len(paddings) == len(shape), f"paddings must have one pair per axis of {shape}, got {paddings}")
    need(tuple(paddings[0]) == (0, 0), f"the batch cannot be padded, got {paddings[0]}")
    need(min(min(pair) for pair in paddings) >= 0, f"paddings must not be negative, got {paddings}")
    return tuple(size + before + after for size, (before, after) in zip(shape, paddings, strict=True))


def onnx_paddings(writer: OnnxWriter, operator: Operator, output: Tensor) -> str:
    """The paddings as ONNX's operand."""
    pairs = writer.in_order(operator.attributes["paddings"])
    amounts = [before for before, _ in pairs] + [after for _, after in pairs]
    return str(writer.constant(f"{output.name}/paddings", np.array(amounts, np.int64)))


@register
class Concatenation(Movement):
    """Joins along `axis`."""

    kind = "CONCATENATION"
    as_in_onnx = True
    constants = True
    attributes = {"axis": 3}
    in_file = {"axis": Option("axis", read=FileOperator.axis)}
    axis_attributes = ("axis",)
    float_kind = "concat"

    def float_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        return {"axis": attributes["axis"]}

    def absent_from(self, profile: Profile, name: str, operands: int) -> str:
        most = profile.most_joined
        if most is not None and operands > most:
            return f"{profile.title} joins at most {most} tensors, got {operands}"
        return super().absent_from(profile, name, operands)

    operands = (1, None)
    version = 2
    wide_version = 3
    options = "ConcatenationOptions"

    def build(  # type: ignore[override]
        self,
        builder: GraphBuilder,
        inputs: Sequence[str],
        output: Quantization | Sequence[Quantization],
        *,
        name: str,
        axis: int = 3,
    ) -> str:
        """inputs: names; output: where the result is stored.

        An operand in another quantization than the result's gets a QUANTIZE in front. With two placements every operand
        is requantized into the first and shifted into the second, so that it is clamped like any other tensor.
        """
        placements = (output,) if isinstance(output, Quantization) else tuple(output)
        operands = []
        for index, operand in enumerate(inputs):
            if len(placements) > 1 or not builder.tensor(operand).quantization.equals(placements[-1]):
                operand = builder.quantize(operand, placements, name=f"{name}/requantized_{index}")
            operands.append(operand)
        return str(builder.operator(self.kind, operands, placements[-1], name=name, axis=axis))

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        first, axis = shapes[0], attributes["axis"]
        need(1 <= axis < len(first), f"axis must be in 1..{len(first) - 1}, got {axis}")
        others = {shape[:axis] + shape[axis + 1 :] for shape in shapes}
        need(len(others) == 1, f"operands differ outside axis {axis}: {list(shapes)}")
        return (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return primitives.concatenate(list(operands), attributes["axis"])

    def integers(self, call: Call) -> np.ndarray:
        examples = max(len(code) // tensor.shape[0] for code, tensor in zip(call.codes, call.inputs, strict=True))
        parts = [
            np.tile(code, (examples, *[1] * (code.ndim - 1))) if tensor.data is not None else code
            for code, tensor in zip(call.codes, call.inputs, strict=True)
        ]
        return np.concatenate(parts, call.attributes["axis"])

    def read_attributes(self, read: FileOperator) -> Attributes:
        read.need_no_activation()
        return super().read_attributes(read)

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        axis = writer.axis(operator.attributes["axis"], len(output.shape))
        writer.computed(operator, output, "Concat", writer.operands(operator), axis=axis)


@register
class Reshape(Movement):
    """new_shape: for one example, its rows first."""

    kind = "RESHAPE"
    as_in_onnx = True
    most_axes = 8
    attributes = {"new_shape": REQUIRED}
    moves_axes = True
    options = "ReshapeOptions"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        new_shape = tuple(int(size) for size in attributes["new_shape"])
        fits = len(new_shape) > 0 and min(new_shape) > 0 and math.prod(new_shape) == math.prod(shapes[0])
        need(fits, f"new_shape {new_shape} must keep the number of elements of {shapes[0]}")
        return new_shape

    def lower(self, context: LoweringContext, step: PlannedStep) -> LoweredTensor | None:
        return context.reshape(step)

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        (x,), (shape,) = context.operands(operator), context.results(operator)
        context.give(operator, context.reshaped(x, shape))

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        """attributes: new_shape with -1 for the batch's axis."""
        return primitives.reshape(operands[0], attributes["new_shape"])

    def integers(self, call: Call) -> np.ndarray:
        examples = call.codes[0].shape[0] // call.inputs[0].shape[0]
        return call.codes[0].reshape(examples * call.output.shape[0], *call.output.shape[1:])

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Fields:
        return {"newShape": [-1, *output.shape[1:]]}

    def tflite_operands(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Sequence[FileConstant]:
        return (("new_shape", [-1, *output.shape[1:]]),)

    def read_attributes(self, read: FileOperator) -> Attributes:
        pair = len(read.inputs) > 1 and read.inputs[1] is not None
        return {"new_shape": whole_shape(read.integers(1) if pair else read.option("newShape"), read.operand(0).shape)}

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        # The graph's order of elements is that of channels last.
        name = output.name
        codes = writer.codes_in_graph_order(operator.inputs[0], f"{name}/channels_last")
        shape = writer.constant(f"{name}/shape", np.array([-1, *output.shape[1:]], np.int64))
        writer.codes_to_result(output, writer.node("Reshape", [codes, shape], f"{name}/reshaped"))


def whole_shape(sizes: Sequence[int] | None, shape: Shape) -> Shape:
    """The sizes, with what is left of the shape's elements in place of a -1."""
    if sizes is None or list(sizes).count(-1) > 1:
        raise Unreadable(f"the new shape must be known, got {sizes}")
    others = math.prod(size for size in sizes if size != -1)
    left = math.prod(shape) // others if others > 0 else 0
    return tuple(left if size == -1 else int(size) for size in sizes)


@register
class Transpose(Movement):
    """Result axis k is the operand's axis permutation[k]; the batch stays first."""

    kind = "TRANSPOSE"
    as_in_onnx = True
    attributes = {"permutation": REQUIRED}
    in_file = {"permutation": InOperand(1, FileOperator.axes)}
    moves_axes = True
    version = 2
    wide_version = 5
    options = "TransposeOptions"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,) = shapes
        permutation = tuple(attributes["permutation"])
        fits = sorted(permutation) == list(range(len(first))) and permutation[0] == 0
        need(fits, f"permutation must hold the axes of {first}, 0 first, got {permutation}")
        return tuple(first[axis] for axis in permutation)

    def lower(self, context: LoweringContext, step: PlannedStep) -> LoweredTensor | None:
        return context.rename_axes(step, step.attributes["permutation"])

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        (x,) = context.operands(operator)
        context.give(operator, context.permute(x, operator.attributes["permutation"]))

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return primitives.transpose(operands[0], attributes["permutation"])

    def integers(self, call: Call) -> np.ndarray:
        return np.ascontiguousarray(call.codes[0].transpose(call.attributes["permutation"]))

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        order = writer.order(len(output.shape))
        # ONNX's axis k is the graph's axis order[k].
        permutation = [order.index(operator.attributes["permutation"][axis]) for axis in order]
        codes = writer.node("Transpose", [f"{operator.inputs[0]}/codes"], f"{output.name}/codes", perm=permutation)
        writer.node("DequantizeLinear", [codes, *writer.parameters(output.name, output.quantization)], output.name)


@register
class StridedSlice(Movement):
    """begin, end, steps: for every axis; an end of None is the axis's own. The batch stays whole: 0, None, 1.

    shrink_axes: of one entry each, which the result does not have; others' files have them.
    """

    kind = "STRIDED_SLICE"
    as_in_onnx = True
    attributes = {"begin": REQUIRED, "end": REQUIRED, "steps": REQUIRED, "shrink_axes": ()}
    per_axis_attributes = {"begin": 0, "end": None, "steps": 1}
    version = 2
    options = "StridedSliceOptions"
    # TFLite-Micro's kernel takes no more; LiteRT's takes one more.
    axes_everywhere: ClassVar[int] = 4

    def lower(self, context: LoweringContext, step: PlannedStep) -> LoweredTensor | None:
        if len(step.shape) <= self.axes_everywhere:
            return context.lower_described(self, step)
        return context.lower_joined(self, step, self.axes_everywhere)

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,) = shapes
        columns = [tuple(attributes[name]) for name in ("begin", "end", "steps")]
        fits = all(len(column) == len(first) for column in columns) and next(zip(*columns, strict=True)) == (0, None, 1)
        need(fits, f"begin, end, steps must have one entry per axis of {first}, 0, None, 1 first, got {columns}")
        sizes = []
        for axis, (size, begin, end, step) in enumerate(zip(first, *columns, strict=True)):
            end = size if end is None else end
            fits = 0 <= begin < end <= size and step >= 1
            need(fits, f"slice {begin}:{end}:{step} of axis {axis} must lie in 0..{size} with a step of 1 or more")
            sizes.append(len(range(begin, end, step)))
        shrunk = tuple(attributes["shrink_axes"])
        fits = len(set(shrunk)) == len(shrunk) and all(1 <= axis < len(sizes) and sizes[axis] == 1 for axis in shrunk)
        need(fits, f"shrink_axes must be axes of {sizes} with one entry beside the batch, got {shrunk}")
        return tuple(size for axis, size in enumerate(sizes) if axis not in shrunk)

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        (x,), (shape,) = context.operands(operator), context.results(operator)
        columns = (operator.attributes[name] for name in ("begin", "end", "steps"))
        context.give(operator, context.reshaped(context.sliced(x, list(zip(*columns, strict=True))), shape))

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        (x,) = operands
        columns = [attributes[name] for name in ("begin", "end", "steps")]
        for axis, (begin, end, step) in enumerate(zip(*columns, strict=True)):
            if (begin, end, step) != (0, None, 1):
                x = primitives.slice(x, axis, begin, x.shape[axis] if end is None else end, step)
        shrunk = attributes.get("shrink_axes", ())
        if shrunk:
            kept = [int(size) for axis, size in enumerate(x.shape) if axis not in shrunk]
            x = primitives.reshape(x, (-1, *kept[1:]))
        return x

    def integers(self, call: Call) -> np.ndarray:
        columns = [call.attributes[name] for name in ("begin", "end", "steps")]
        taken = call.codes[0][tuple(slice(*entry) for entry in zip(*columns, strict=True))]
        return taken.reshape(len(taken), *call.output.shape[1:]).copy()

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Fields:
        # The whole batch, whatever it is.
        return {"beginMask": 1, "endMask": 1, "shrinkAxisMask": sum(1 << axis for axis in attributes["shrink_axes"])}

    def tflite_operands(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Sequence[FileConstant]:
        sizes = zip(inputs[0].shape, attributes["end"], strict=True)
        end = [size if end is None else end for size, end in sizes]
        return ("begin", list(attributes["begin"])), ("end", end), ("strides", list(attributes["steps"]))

    def read_attributes(self, read: FileOperator) -> Attributes:
        for name in ("ellipsisMask", "newAxisMask", "offset"):
            if read.option(name):
                raise Unreadable(f"{name} is not supported")
        shape, columns = read.operand(0).shape, [read.integers(position) for position in (1, 2, 3)]
        if any(len(column) != len(shape) for column in columns):
            raise Unreadable(f"begin, end and strides must have one entry for each axis of {shape}")
        shrunk = read.option("shrinkAxisMask") or 0
        masks = read.option("beginMask") or 0, read.option("endMask") or 0
        rows = []
        for axis, (size, begin, end, step) in enumerate(zip(shape, *columns, strict=True)):
            if step < 1:
                raise Unreadable(f"strides must be positive, got {step}")
            if shrunk >> axis & 1:
                if not -size <= begin < size or masks[0] >> axis & 1:
                    raise Unreadable(f"an axis that is dropped needs an index within its {size} entries, got {begin}")
                rows.append((begin % max(size, 1), begin % max(size, 1) + 1, 1))
                continue
            places = (None if mask >> axis & 1 else place for mask, place in zip(masks, (begin, end), strict=True))
            first, last = places
            first, last, step = slice(first, last, step).indices(size)
            whole = axis == 0 and (first, last, step) == (0, size, 1)
            rows.append((first, None if whole else last, step))
        axes = tuple(axis for axis in range(len(shape)) if shrunk >> axis & 1)
        return {**dict(zip(("begin", "end", "steps"), zip(*rows, strict=True), strict=True)), "shrink_axes": axes}

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        attributes, source = operator.attributes, writer.graph.tensors[operator.inputs[0]]
        need(not attributes["shrink_axes"], f"{self.kind} without axes has no form in ONNX here")
        ends = [size if end is None else end for size, end in zip(source.shape, attributes["end"], strict=True)]
        values = {"starts": attributes["begin"][1:], "ends": ends[1:]}
        values["axes"] = [writer.axis(axis, len(output.shape)) for axis in range(1, len(output.shape))]
        values["steps"] = attributes["steps"][1:]
        constants = [writer.constant(f"{output.name}/{name}", np.array(value)) for name, value in values.items()]
        operands = [*writer.operands(operator), *constants]
        writer.computed(operator, output, "Slice", operands)


@register
class PadV2(Movement):
    """A constant around the tensor: the real number `value`, or None for the grid's smallest; stored on the grid."""

    kind = "PADV2"
    moves_codes = False
    most_axes = 5
    attributes = {"paddings": REQUIRED, "value": None}
    float_kind = "pad"
    per_axis_attributes = {"paddings": (0, 0)}
    version = 2
    wide_version = 3
    options = "PadV2Options"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        return padded_shape(shapes[0], attributes["paddings"])

    def float_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        return {"padding": attributes["paddings"], "mode": "constant", "value": self.value(attributes)}

    @staticmethod
    def value(attributes: Attributes) -> float:
        """Of real numbers."""
        return -math.inf if attributes["value"] is None else float(attributes["value"])

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return primitives.pad(operands[0], attributes["paddings"], self.value(attributes))

    def integers(self, call: Call) -> np.ndarray:
        return np.pad(
            call.codes[0], call.attributes["paddings"], constant_values=self.code(call.output, call.attributes)
        )

    def float_results(self, call: Call) -> np.ndarray:
        return np.pad(
            call.codes[0], call.attributes["paddings"], constant_values=np.float32(self.value(call.attributes))
        )

    @staticmethod
    def code(output: Tensor, attributes: Attributes) -> int:
        """The code of `value`: the nearest, half up as FakeQuant rounds."""
        lowest, highest = code_range(output)
        if attributes["value"] is None:
            return lowest
        steps = math.floor(np.float32(attributes["value"]) / scale_of(output) + np.float32(0.5))
        return min(max(steps + zero_point_of(output), lowest), highest)

    def tflite_operands(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Sequence[Any]:
        in_reals = output.dtype == FLOAT
        code = np.array([self.value(attributes) if in_reals else self.code(output, attributes)], output.dtype)
        return ("paddings", attributes["paddings"]), Tensor("value", (1,), output.dtype, output.quantization, code)

    def read_attributes(self, read: FileOperator) -> Attributes:
        value, grid = read.operand(2), read.output.quantization
        if read.output.dtype == FLOAT:
            if value.data is None or value.data.size != 1:
                raise Unreadable("operand 2 must be a constant of one value")
            number = float(value.data.reshape(-1)[0])
            if math.isnan(number):
                raise Unreadable("the constant around the tensor must be a number, got NaN")
            return {"paddings": read.pairs(1), "value": None if number == -math.inf else number}
        (code,) = read.integers(2)
        if not value.quantization.equals(grid) or value.dtype != read.output.dtype:
            raise Unreadable("the constant around the tensor must be on the tensor's grid")
        lowest, _ = code_range(read.output)
        real = None if code == lowest else float(np.float32(code - zero_point_of(read.output)) * grid.scale[0])
        return {"paddings": read.pairs(1), "value": real}

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        amounts = onnx_paddings(writer, operator, output)
        real = np.float32(self.code(output, operator.attributes) - zero_point_of(output)) * scale_of(output)
        operands = [*writer.operands(operator), amounts, writer.constant(f"{output.name}/value", real)]
        writer.computed(operator, output, "Pad", operands)


@register
class MirrorPad(Movement):
    """The tensor's own values around it; mode REFLECT leaves out the edge, SYMMETRIC repeats it."""

    kind = "MIRROR_PAD"
    attributes = {"paddings": REQUIRED, "mode": "REFLECT"}
    in_file = {"paddings": InOperand(1, FileOperator.pairs), "mode": Option("mode", enumeration="MirrorPadMode")}
    per_axis_attributes = {"paddings": (0, 0)}
    version = 2
    wide_version = 3
    options = "MirrorPadOptions"

    def check_attributes(self, attributes: Attributes) -> None:
        super().check_attributes(attributes)
        mode = attributes["mode"]
        need(mode in ("REFLECT", "SYMMETRIC"), f"mode must be REFLECT or SYMMETRIC, got {mode!r}")

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,) = shapes
        padded = padded_shape(first, attributes["paddings"])
        for size, pair in zip(first, attributes["paddings"], strict=True):
            most = size - (attributes["mode"] == "REFLECT")
            need(max(pair) <= most, f"an axis of {size} can be mirrored by {most} at most, got {pair}")
        return padded

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        (x,), attributes = context.operands(operator), operator.attributes
        shape = list(x.shape)
        for axis, pair in enumerate(attributes["paddings"]):
            if any(pair):
                indices = mirrored(np.arange(x.shape[axis]), [pair], attributes["mode"])
                shape[axis] = len(indices)
                x = context.step("gather", [x], context.for_one(shape), axis=axis, indices=tuple(indices.tolist()))
        context.give(operator, x)

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return primitives.pad_reflect(operands[0], attributes["paddings"], attributes["mode"])

    def integers(self, call: Call) -> np.ndarray:
        return mirrored(call.codes[0], call.attributes["paddings"], call.attributes["mode"])

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        # ONNX has no SYMMETRIC: rows are gathered, which serves both.
        real, name, source = writer.operands(operator)[0], output.name, writer.graph.tensors[operator.inputs[0]]
        mode = operator.attributes["mode"]
        for axis, pair in enumerate(operator.attributes["paddings"]):
            if any(pair):
                indices = mirrored(np.arange(source.shape[axis]), [pair], mode)
                places = writer.constant(f"{name}/places_{axis}", indices)
                at = writer.axis(axis, len(output.shape))
                real = writer.node("Gather", [real, places], f"{name}/mirrored_{axis}", axis=at)
        writer.result(operator, output, real)


def mirrored(x: np.ndarray, paddings: Sequence[Sequence[int]], mode: str) -> np.ndarray:
    """An array with its own values around it."""
    return np.pad(x, paddings, mode="reflect" if mode == "REFLECT" else "symmetric")


# Of five axes the middle ones but one, which any reshape to or from images leaves where they are.
SWAPPED = Tensor("swapped", (5,), "int32", INDICES, np.array([0, 1, 3, 2, 4], np.int32))


def reshape_step(operand: int | str, shape: Shape, name: str = "", dtype: str = "") -> FileStep:
    """A RESHAPE of the file, for any batch."""
    sizes = [-1, *shape[1:]]
    constant = Tensor(f"{name or 'joined'}_shape", (len(sizes),), "int32", INDICES, np.array(sizes, np.int32))
    fields = {"newShape": sizes}
    return FileStep("RESHAPE", (operand, constant), 1, "ReshapeOptions", fields, name, dtype, tuple(shape))


class Blocks(Movement):
    """Squares of block_size * block_size values between the channels and the image, NHWC."""

    attributes = {"block_size": REQUIRED}
    in_file = {"block_size": Option("blockSize")}
    spatial = True
    other_forms = (("RESHAPE", "TRANSPOSE", "RESHAPE"),)

    # In ONNX.
    onnx_kind: ClassVar[str]
    onnx_words: ClassVar[Mapping[str, str]] = {}

    def split(self, shape: Shape, block: int) -> Shape:
        """The operand's shape with the rows and the columns of a block as axes of their own, after what they split:
        these and the axis between them change places."""
        raise NotImplementedError

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        (x,), (source,), (shape,) = context.operands(operator), context.shapes(operator), context.results(operator)
        split = context.reshaped(x, self.split(source, operator.attributes["block_size"]))
        context.give(operator, context.reshaped(context.permute(split, (0, 1, 3, 2, 4, 5)), shape))

    def integers(self, call: Call) -> np.ndarray:
        split = call.codes[0].reshape(self.split(call.codes[0].shape, call.attributes["block_size"]))
        return split.transpose(0, 1, 3, 2, 4, 5).reshape(len(split), *call.output.shape[1:])

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        words = {"blocksize": operator.attributes["block_size"], **self.onnx_words}
        writer.computed(operator, output, self.onnx_kind, writer.operands(operator), **words)

    def moved(self, primitives: RealPrimitives[A], x: A, block: int) -> A:
        """The result for images [batch, channels, height, width]."""
        raise NotImplementedError

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        """attributes: block_size, channel_axis: 1, or 3 of images [batch, height, width, channels]."""
        (x,), block = operands, attributes["block_size"]
        if attributes.get("channel_axis", 1) == 1:
            return self.moved(primitives, x, block)
        turned = self.moved(primitives, primitives.transpose(x, (0, 3, 1, 2)), block)
        return primitives.transpose(turned, (0, 2, 3, 1))

    def read_steps(self, steps: Sequence[FileOperator]) -> tuple[tuple[Tensor, ...], Attributes] | None:
        source, output = steps[0].operand(0), steps[-1].output
        if source.dtype != "int16" or len(source.shape) != 4 or len(output.shape) != 4:
            return None
        small, large = sorted((source.shape, output.shape), key=lambda shape: shape[1])
        attributes = {"block_size": large[1] // small[1]}
        try:
            fits = self.checked_shapes([source.shape], attributes) == (output.shape,)
        except Refusal:
            return None
        written = self.tflite_steps([source], output, attributes)
        return ((source,), attributes) if fits and are_steps(steps, written) else None

    def tflite_steps(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Sequence[FileStep]:
        if output.dtype == "int8":
            return super().tflite_steps(inputs, output, attributes)
        # No runtime has it in int16. Rows of a block and their images change places; columns stay with the channels.
        small = min((inputs[0], output), key=lambda tensor: tensor.shape[1]).shape
        large = max((inputs[0], output), key=lambda tensor: tensor.shape[1]).shape
        block, beside = attributes["block_size"], large[2] // small[2] * large[3]
        by_rows = (small[0], small[1], block, small[2], beside)
        by_places = (small[0], small[1], small[2], block, beside)
        before, after = (by_rows, by_places) if inputs[0].shape[1] == large[1] else (by_places, by_rows)
        return (
            reshape_step(0, before, "split", output.dtype),
            FileStep("TRANSPOSE", ("split", SWAPPED), 5, "TransposeOptions", {}, "turned", output.dtype, after),
            reshape_step("turned", output.shape),
        )


@register
class SpaceToDepth(Blocks):
    """Channel (row, column, c) of the result is channel c of that place in the block."""

    kind = "SPACE_TO_DEPTH"
    onnx_kind = "SpaceToDepth"
    version = 2
    options = "SpaceToDepthOptions"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,), block = shapes, attributes["block_size"]
        fits = len(first) == 4 and block >= 2 and not first[1] % block and not first[2] % block
        need(fits, f"height and width of {first} must be multiples of a block_size of 2 or more, got {block}")
        return first[0], first[1] // block, first[2] // block, first[3] * block * block

    def split(self, shape: Shape, block: int) -> Shape:
        rows, height, width, channels = shape
        return rows, height // block, block, width // block, block, channels

    def moved(self, primitives: RealPrimitives[A], x: A, block: int) -> A:
        _, channels, height, width = x.shape
        split = primitives.reshape(x, (-1, channels, height // block, block, width // block, block))
        turned = primitives.transpose(split, (0, 3, 5, 1, 2, 4))
        return primitives.reshape(turned, (-1, channels * block * block, height // block, width // block))


@register
class DepthToSpace(Blocks):
    """The other way round; the place in the block is the slower part of a channel's number."""

    kind = "DEPTH_TO_SPACE"
    onnx_kind = "DepthToSpace"
    onnx_words = {"mode": "DCR"}
    options = "DepthToSpaceOptions"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,), block = shapes, attributes["block_size"]
        fits = len(first) == 4 and block >= 2 and first[3] % (block * block) == 0
        need(fits, f"channels of {first} must be a multiple of the square of a block_size of 2 or more, got {block}")
        return first[0], first[1] * block, first[2] * block, first[3] // (block * block)

    def split(self, shape: Shape, block: int) -> Shape:
        rows, height, width, channels = shape
        return rows, height, width, block, block, channels // (block * block)

    def moved(self, primitives: RealPrimitives[A], x: A, block: int) -> A:
        _, channels, height, width = x.shape
        kept = channels // (block * block)
        split = primitives.reshape(x, (-1, block, block, kept, height, width))
        turned = primitives.transpose(split, (0, 3, 4, 1, 5, 2))
        return primitives.reshape(turned, (-1, kept, height * block, width * block))


@register
class Gather(Movement):
    """Slices of `axis` in the order of the constant `indices`."""

    kind = "GATHER"
    attributes = {"axis": REQUIRED, "indices": REQUIRED}
    in_file = {"axis": Option("axis", read=FileOperator.axis), "indices": InOperand(1)}
    float_kind = "gather"
    axis_attributes = ("axis",)
    version = 2
    wide_version = 4
    options = "GatherOptions"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,), axis, indices = shapes, attributes["axis"], attributes["indices"]
        need(1 <= axis < len(first), f"axis must be in 1..{len(first) - 1}, got {axis}")
        fits = len(indices) > 0 and min(indices) >= 0 and max(indices) < first[axis]
        need(fits, f"indices must lie in 0..{first[axis] - 1}, got {indices[:8]}")
        return (*first[:axis], len(indices), *first[axis + 1 :])

    def float_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        return {"axis": attributes["axis"], "indices": tuple(attributes["indices"])}

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return primitives.gather(operands[0], attributes["indices"], attributes["axis"])

    def integers(self, call: Call) -> np.ndarray:
        return call.codes[0].take(call.attributes["indices"], call.attributes["axis"])

    def read_attributes(self, read: FileOperator) -> Attributes:
        if read.option("batchDims") or len(read.operand(1).shape) != 1:
            raise Unreadable("indices must be one row, the same for all examples")
        return super().read_attributes(read)

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        places = writer.constant(f"{output.name}/places", np.array(operator.attributes["indices"], np.int64))
        axis = writer.axis(operator.attributes["axis"], len(output.shape))
        operands = [*writer.operands(operator), places]
        writer.computed(operator, output, "Gather", operands, axis=axis)
