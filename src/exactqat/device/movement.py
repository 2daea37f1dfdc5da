# SPDX-License-Identifier: Apache-2.0
"""Operators that move codes and compute nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .arithmetic import Arrays, Tensors, zero_point_of
from .operator import REQUIRED, Attributes, DeviceOperator, Shape, need, register
from .tensor import Quantization, Tensor


class Movement(DeviceOperator):
    """What moves lies on the grid of its operand."""

    same_quantization = True


@register
class Pad(Movement):
    """Real 0 around the tensor; paddings: (before, after) per axis, (0, 0) for the batch."""

    kind = "PAD"
    attributes = {"paddings": REQUIRED}
    per_axis_attributes = {"paddings": (0, 0)}
    version = 2
    options = "PadOptions"

    def build(self, builder: Any, *arguments: Any, name: str, **attributes: Any) -> str:
        input, paddings = (*arguments, *attributes.values())
        pairs = tuple((int(before), int(after)) for before, after in paddings)
        return str(builder.operator(self.kind, [input], None, name=name, paddings=pairs))

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        return padded_shape(shapes[0], attributes["paddings"])

    def real(self, primitives: Any, operands: Sequence[Any], attributes: Attributes) -> Any:
        return primitives.pad(operands[0], attributes["paddings"], 0.0)

    def integers(
        self, codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str
    ) -> np.ndarray:
        return np.pad(codes[0], attributes["paddings"], constant_values=zero_point_of(output))

    def tflite_operands(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Sequence[tuple[str, Any]]:
        return (("paddings", attributes["paddings"]),)

    def onnx(self, writer: Any, operator: Any, output: Tensor) -> None:
        amounts = onnx_paddings(writer, operator, output)
        writer.result(
            operator, output, writer.node("Pad", [*writer.operands(operator), amounts], f"{output.name}/computed")
        )


def padded_shape(shape: Shape, paddings: Sequence[Sequence[int]]) -> Shape:
    """The shape of a tensor that is padded."""
    need(len(paddings) == len(shape), f"paddings must have one pair per axis of {shape}, got {paddings}")
    need(tuple(paddings[0]) == (0, 0), f"the batch cannot be padded, got {paddings[0]}")
    need(min(min(pair) for pair in paddings) >= 0, f"paddings must not be negative, got {paddings}")
    return tuple(size + before + after for size, (before, after) in zip(shape, paddings, strict=True))


def onnx_paddings(writer: Any, operator: Any, output: Tensor) -> str:
    """The paddings as ONNX's operand."""
    pairs = writer.in_order(operator.attributes["paddings"])
    amounts = [before for before, _ in pairs] + [after for _, after in pairs]
    return str(writer.constant(f"{output.name}/paddings", np.array(amounts, np.int64)))


@register
class Concatenation(Movement):
    """Joins along `axis`."""

    kind = "CONCATENATION"
    attributes = {"axis": 3}
    axis_attributes = ("axis",)
    operands = (1, None)
    version = 2
    options = "ConcatenationOptions"

    def build(self, builder: Any, *arguments: Any, name: str, **attributes: Any) -> str:
        """inputs: names; output: where the result is stored.

        An operand in another quantization than the result's gets a QUANTIZE in front. With two placements every operand
        is requantized into the first and shifted into the second, so that it is clamped like any other tensor.
        """
        return self._build(builder, *arguments, name=name, **attributes)

    def _build(
        self,
        builder: Any,
        inputs: Sequence[str],
        output: Quantization | Sequence[Quantization],
        *,
        name: str,
        axis: int = 3,
    ) -> str:
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

    def real(self, primitives: Any, operands: Sequence[Any], attributes: Attributes) -> Any:
        return primitives.concatenate(list(operands), attributes["axis"])

    def integers(
        self, codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str
    ) -> np.ndarray:
        return np.concatenate(codes, attributes["axis"])

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> dict[str, Any]:
        return {"axis": attributes["axis"]}

    def onnx(self, writer: Any, operator: Any, output: Tensor) -> None:
        axis = writer.axis(operator.attributes["axis"], len(output.shape))
        computed = writer.node("Concat", writer.operands(operator), f"{output.name}/computed", axis=axis)
        writer.result(operator, output, computed)


@register
class Reshape(Movement):
    """new_shape: for one example, its rows first."""

    kind = "RESHAPE"
    attributes = {"new_shape": REQUIRED}
    moves_axes = True
    options = "ReshapeOptions"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        new_shape = tuple(int(size) for size in attributes["new_shape"])
        fits = len(new_shape) > 0 and min(new_shape) > 0 and math.prod(new_shape) == math.prod(shapes[0])
        need(fits, f"new_shape {new_shape} must keep the number of elements of {shapes[0]}")
        return new_shape

    def lower(self, context: Any, step: Any) -> Any:
        return context.reshape(step)

    def real(self, primitives: Any, operands: Sequence[Any], attributes: Attributes) -> Any:
        """attributes: new_shape with -1 for the batch's axis."""
        return primitives.reshape(operands[0], attributes["new_shape"])

    def integers(
        self, codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str
    ) -> np.ndarray:
        examples = codes[0].shape[0] // inputs[0].shape[0]
        return codes[0].reshape(examples * output.shape[0], *output.shape[1:])

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> dict[str, Any]:
        return {"newShape": [-1, *output.shape[1:]]}

    def tflite_operands(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Sequence[tuple[str, Any]]:
        return (("new_shape", [-1, *output.shape[1:]]),)

    def onnx(self, writer: Any, operator: Any, output: Tensor) -> None:
        # The graph's order of elements is that of channels last.
        name, (real,) = output.name, writer.operands(operator)
        before, after = writer.graph.tensors[operator.inputs[0]].shape, output.shape
        if len(before) == 4 and before[1:3] != (1, 1):
            real = writer.channels_last(real, 4, f"{name}/channels_last")
        turned = len(after) == 4 and after[1:3] != (1, 1)
        shape = np.array([-1, *(after if turned else writer.in_order(after))[1:]], np.int64)
        real = writer.node("Reshape", [real, writer.constant(f"{name}/shape", shape)], f"{name}/computed")
        if turned:
            real = writer.channels_first(real, 4, f"{name}/channels_first")
        writer.result(operator, output, real)


@register
class Transpose(Movement):
    """Result axis k is the operand's axis permutation[k]; the batch stays first."""

    kind = "TRANSPOSE"
    attributes = {"permutation": REQUIRED}
    moves_axes = True
    version = 2
    options = "TransposeOptions"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,) = shapes
        permutation = tuple(attributes["permutation"])
        fits = sorted(permutation) == list(range(len(first))) and permutation[0] == 0
        need(fits, f"permutation must hold the axes of {first}, 0 first, got {permutation}")
        need(len(first) <= 6, f"at most 6 axes can be permuted, got {first}")
        return tuple(first[axis] for axis in permutation)

    def lower(self, context: Any, step: Any) -> Any:
        return context.rename_axes(step, step.attributes["permutation"])

    def real(self, primitives: Any, operands: Sequence[Any], attributes: Attributes) -> Any:
        return primitives.transpose(operands[0], attributes["permutation"])

    def integers(
        self, codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str
    ) -> np.ndarray:
        return np.ascontiguousarray(codes[0].transpose(attributes["permutation"]))

    def tflite_operands(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Sequence[tuple[str, Any]]:
        return (("permutation", list(attributes["permutation"])),)

    def onnx(self, writer: Any, operator: Any, output: Tensor) -> None:
        rank = len(output.shape)
        order = writer.order(rank)
        # ONNX's axis k is the graph's axis order[k].
        permutation = [order.index(operator.attributes["permutation"][axis]) for axis in order]
        computed = writer.node("Transpose", writer.operands(operator), f"{output.name}/computed", perm=permutation)
        writer.result(operator, output, computed)


@register
class StridedSlice(Movement):
    """begin, end, steps: for every axis; an end of None is the axis's own. The batch stays whole: 0, None, 1."""

    kind = "STRIDED_SLICE"
    attributes = {"begin": REQUIRED, "end": REQUIRED, "steps": REQUIRED}
    per_axis_attributes = {"begin": 0, "end": None, "steps": 1}
    version = 2
    options = "StridedSliceOptions"

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
        return tuple(sizes)

    def real(self, primitives: Any, operands: Sequence[Any], attributes: Attributes) -> Any:
        (x,) = operands
        columns = [attributes[name] for name in ("begin", "end", "steps")]
        for axis, (begin, end, step) in enumerate(zip(*columns, strict=True)):
            if (begin, end, step) != (0, None, 1):
                x = primitives.slice(x, axis, begin, x.shape[axis] if end is None else end, step)
        return x

    def integers(
        self, codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str
    ) -> np.ndarray:
        columns = [attributes[name] for name in ("begin", "end", "steps")]
        return codes[0][tuple(slice(*entry) for entry in zip(*columns, strict=True))].copy()

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> dict[str, Any]:
        return {"beginMask": 1, "endMask": 1}  # the whole batch, whatever it is

    def tflite_operands(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Sequence[tuple[str, Any]]:
        sizes = zip(inputs[0].shape, attributes["end"], strict=True)
        end = [size if end is None else end for size, end in sizes]
        return ("begin", list(attributes["begin"])), ("end", end), ("strides", list(attributes["steps"]))

    def onnx(self, writer: Any, operator: Any, output: Tensor) -> None:
        attributes, source = operator.attributes, writer.graph.tensors[operator.inputs[0]]
        ends = [size if end is None else end for size, end in zip(source.shape, attributes["end"], strict=True)]
        values = {"starts": attributes["begin"][1:], "ends": ends[1:]}
        values["axes"] = [writer.axis(axis, len(output.shape)) for axis in range(1, len(output.shape))]
        values["steps"] = attributes["steps"][1:]
        constants = [writer.constant(f"{output.name}/{name}", np.array(value)) for name, value in values.items()]
        operands = [*writer.operands(operator), *constants]
        writer.result(operator, output, writer.node("Slice", operands, f"{output.name}/computed"))
