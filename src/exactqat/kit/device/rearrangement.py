# SPDX-License-Identifier: Apache-2.0
"""Operators of others' files that rearrange codes; plans make RESHAPE, STRIDED_SLICE and CONCATENATION of these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .arithmetic import Tensors, zero_point_of
from .contexts import GraphBuilder, NetworkContext, OnnxWriter, PlanContext
from .file_forms import InOperand, Option
from .movement import Movement, Reshape
from .operator import (
    OPERATORS,
    REQUIRED,
    Attributes,
    Call,
    Fields,
    FileConstant,
    FileOperator,
    Operator,
    Shape,
    Unreadable,
    need,
    register,
)
from .primitives import A, RealPrimitives
from .tensor import Tensor

PURPOSE = "files: a plan makes {} of such steps"


class Reshaped(Movement):
    """The same codes in the same order under another shape."""

    moves_axes = True
    purpose = PURPOSE.format("a RESHAPE")

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        (x,) = operands
        return primitives.reshape(x, (-1, *self.shape([tuple(map(int, x.shape))], attributes)[1:]))

    def integers(self, call: Call) -> np.ndarray:
        return call.codes[0].reshape(call.codes[0].shape[0], *call.output.shape[1:])

    def restore(self, context: PlanContext, operator: Operator) -> None:
        context.step(operator, {"new_shape": context.results(operator)[0]}, kind="RESHAPE")

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        Reshape().float_steps(context, operator)

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        Reshape().onnx(writer, operator, output)


@register
class ExpandDims(Reshaped):
    """A new axis of size 1 at `axis` of the result."""

    kind = "EXPAND_DIMS"
    attributes = {"axis": REQUIRED}
    in_file = {"axis": InOperand(1, lambda read, at: read.axis(read.integer(at), len(read.operand(0).shape) + 1))}
    options = "ExpandDimsOptions"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,), axis = shapes, attributes["axis"]
        need(1 <= axis <= len(first), f"axis must be in 1..{len(first)}, got {axis}")
        return (*first[:axis], 1, *first[axis:])


@register
class Squeeze(Reshaped):
    """Without `axes`, whose size is 1."""

    kind = "SQUEEZE"
    attributes = {"axes": REQUIRED}
    options = "SqueezeOptions"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,), axes = shapes, attributes["axes"]
        fits = len(set(axes)) == len(axes) > 0 and all(1 <= axis < len(first) and first[axis] == 1 for axis in axes)
        need(fits, f"axes must be different ones of size 1 of {first}, not the batch's, got {axes}")
        return tuple(size for axis, size in enumerate(first) if axis not in axes)

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Fields:
        return {"squeezeDims": list(attributes["axes"])}

    def read_attributes(self, read: FileOperator) -> Attributes:
        axes = read.option("squeezeDims")
        if not axes:
            raise Unreadable("the axes must be named, as the batch's would be removed too")
        return {"axes": tuple(read.axis(axis) for axis in axes)}


@register
class Pack(Movement):
    """Tensors of one shape side by side along a new axis."""

    kind = "PACK"
    attributes = {"axis": REQUIRED}
    operands = (1, None)
    moves_axes = True
    version = 2
    options = "PackOptions"
    other_forms = (("PACK", "TRANSPOSE"), ("PACK", "RESHAPE"))
    purpose = PURPOSE.format("RESHAPE and CONCATENATION")

    def build(self, builder: GraphBuilder, *arguments: Any, name: str, **attributes: Any) -> str:
        """inputs: names, all on one grid."""
        inputs, axis = (*arguments, *attributes.values())
        return str(builder.operator(self.kind, inputs, None, name=name, axis=axis))

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        first, axis = shapes[0], attributes["axis"]
        need(len(set(shapes)) == 1, f"operands must have one shape, got {list(shapes)}")
        need(1 <= axis <= len(first), f"axis must be in 1..{len(first)}, got {axis}")
        return (*first[:axis], len(shapes), *first[axis:])

    def restore(self, context: PlanContext, operator: Operator) -> None:
        """The operands get the axis, and are joined along it."""
        (result,), axis = context.results(operator), operator.attributes["axis"]
        shape = tuple(1 if at == axis else size for at, size in enumerate(result))
        parts = [
            context.part(operator, "RESHAPE", operand, {"new_shape": shape}, shape)
            for operand in context.operands(operator)
        ]
        context.step(operator, {"axis": axis}, kind="CONCATENATION", operands=parts)

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        context.give(operator, context.stacked(context.operands(operator), operator.attributes["axis"]))

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        axis = attributes["axis"]
        sizes = [(-1, *map(int, x.shape[1:axis]), 1, *map(int, x.shape[axis:])) for x in operands]
        parts = [primitives.reshape(x, shape) for x, shape in zip(operands, sizes, strict=True)]
        return primitives.concatenate(parts, axis)

    def integers(self, call: Call) -> np.ndarray:
        return np.stack(call.codes, call.attributes["axis"])

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Fields:
        return {"axis": attributes["axis"], "valuesCount": len(inputs)}

    def read_attributes(self, read: FileOperator) -> Attributes:
        read.need_count("valuesCount", len(read.inputs))
        return {"axis": read.axis(read.option("axis") or 0, len(read.operand(0).shape) + 1)}

    def read_steps(self, steps: Sequence[FileOperator]) -> tuple[tuple[Tensor, ...], Attributes] | None:
        packed, turned = steps
        axis = moved_after_the_batch(turned)
        return (
            (self.read_operands(packed), {"axis": axis}) if axis and not self.read_attributes(packed)["axis"] else None
        )

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        name, parts = output.name, []
        axis = writer.constant(f"{name}/axis", np.array([operator.attributes["axis"]], np.int64))
        for position, source in enumerate(operator.inputs):
            codes = writer.codes_in_graph_order(source, f"{name}/operand_{position}")
            parts.append(writer.node("Unsqueeze", [codes, axis], f"{name}/part_{position}"))
        joined = writer.node("Concat", parts, f"{name}/joined", axis=operator.attributes["axis"])
        writer.codes_to_result(output, joined)


@register
class Tile(Movement):
    """The tensor `multiples` times along each axis, once along the batch."""

    kind = "TILE"
    attributes = {"multiples": REQUIRED}
    in_file = {"multiples": InOperand(1)}
    version = 2
    options = "TileOptions"
    purpose = PURPOSE.format("CONCATENATION")

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,), multiples = shapes, attributes["multiples"]
        fits = len(multiples) == len(first) and multiples[0] == 1 and min(multiples) >= 1
        need(fits, f"multiples must have one entry of 1 or more for each axis of {first}, 1 first, got {multiples}")
        return tuple(size * times for size, times in zip(first, multiples, strict=True))

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        (x,) = context.operands(operator)
        for axis, times in enumerate(operator.attributes["multiples"]):
            x = context.join([x] * times, axis)
        context.give(operator, x)

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return _repeated(primitives, operands[0], attributes["multiples"])

    def integers(self, call: Call) -> np.ndarray:
        return np.tile(call.codes[0], call.attributes["multiples"])

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        codes = writer.codes_in_graph_order(operator.inputs[0], f"{output.name}/channels_last")
        times = writer.constant(f"{output.name}/times", np.array(operator.attributes["multiples"], np.int64))
        writer.codes_to_result(output, writer.node("Tile", [codes, times], f"{output.name}/tiled"))


@register
class Slice(Movement):
    """`size` values from `begin` on along each axis; -1: all that follow. The batch stays whole: 0, -1."""

    kind = "SLICE"
    attributes = {"begin": REQUIRED, "size": REQUIRED}
    in_file = {"begin": InOperand(1), "size": InOperand(2)}
    most_axes = 5
    version = 2
    wide_version = 4
    options = "SliceOptions"
    purpose = PURPOSE.format("a STRIDED_SLICE")

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,), columns = shapes, [tuple(attributes[name]) for name in ("begin", "size")]
        fits = all(len(column) == len(first) for column in columns) and next(zip(*columns, strict=True)) == (0, -1)
        need(fits, f"begin and size must have one entry for each axis of {first}, 0 and -1 first, got {columns}")
        result = []
        for axis, (whole, begin, size) in enumerate(zip(first, *columns, strict=True)):
            size = whole - begin if size == -1 else size
            fits = 0 <= begin < begin + size <= whole
            need(fits, f"a slice of {size} from {begin} on must lie in axis {axis} of {whole}")
            result.append(size)
        return tuple(result)

    def slices(self, shape: Shape, attributes: Attributes) -> tuple[slice, ...]:
        """Python's slices, the batch whole."""
        sizes = self.shape([shape], attributes)
        ends = [slice(begin, begin + size) for begin, size in zip(attributes["begin"], sizes, strict=True)]
        return (slice(None), *ends[1:])

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        (x,), (shape,) = context.operands(operator), context.shapes(operator)
        parts = [(part.start or 0, part.stop, 1) for part in self.slices(shape, operator.attributes)]
        context.give(operator, context.sliced(x, parts))

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        (x,) = operands
        for axis, part in enumerate(self.slices(tuple(map(int, x.shape)), attributes)):
            if axis:
                x = primitives.slice(x, axis, part.start, part.stop, 1)
        return x

    def integers(self, call: Call) -> np.ndarray:
        return call.codes[0][self.slices(call.inputs[0].shape, call.attributes)].copy()

    def read_attributes(self, read: FileOperator) -> Attributes:
        begin, size, shape = read.integers(1), read.integers(2), read.operand(0).shape
        if not begin or not size:
            raise Unreadable("begin and size are empty")
        whole = begin[0] == 0 and size[0] in (-1, shape[0])
        return {"begin": begin, "size": (-1 if whole else size[0], *size[1:])}

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        source = writer.graph.tensors[operator.inputs[0]]
        parts = self.slices(source.shape, operator.attributes)[1:]
        values = {
            "starts": [part.start for part in parts],
            "ends": [part.stop for part in parts],
            "axes": [writer.axis(axis, len(output.shape)) for axis in range(1, len(output.shape))],
        }
        constants = [writer.constant(f"{output.name}/{name}", np.array(value)) for name, value in values.items()]
        operands = [*writer.operands(operator), *constants]
        writer.computed(operator, output, "Slice", operands)


# Of a file's operator; more than any network has, and few enough to list.
MOST_PARTS = 4096


class Parts(Movement):
    """The tensor in several pieces along an axis, each a result."""

    def ranges(self, shape: Shape, attributes: Attributes) -> list[tuple[int, int]]:
        """Where each piece begins and ends along `axis`."""
        raise NotImplementedError

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        return self.shapes(shapes, attributes)[0]

    def shapes(self, shapes: Sequence[Shape], attributes: Attributes) -> tuple[Shape, ...]:
        (first,), axis = shapes, attributes["axis"]
        need(1 <= axis < len(first), f"axis must be in 1..{len(first) - 1}, got {axis}")
        ranges = self.ranges(first, attributes)
        return tuple((*first[:axis], end - begin, *first[axis + 1 :]) for begin, end in ranges)

    def integers(self, call: Call) -> np.ndarray:
        return self.all_results(call)[0]

    def all_results(self, call: Call) -> tuple[np.ndarray, ...]:
        axis = call.attributes["axis"]
        ranges = self.ranges(call.inputs[0].shape, call.attributes)
        return tuple(call.codes[0].take(np.arange(begin, end), axis) for begin, end in ranges)

    def restore(self, context: PlanContext, operator: Operator) -> None:
        """One slice for each result."""
        for number, attributes in enumerate(self.slices(context.shapes(operator)[0], operator.attributes)):
            context.step(operator, attributes, kind="STRIDED_SLICE", result=number)

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        """One slice for each result; of `Unpack` it loses the axis."""
        (x,), (shape,) = context.operands(operator), context.shapes(operator)
        for number, cut in enumerate(self.slices(shape, operator.attributes)):
            part = context.sliced(x, list(zip(*cut.values(), strict=True)))
            context.give(operator, context.reshaped(part, context.results(operator)[number]), number)

    def slices(self, shape: Shape, attributes: Attributes) -> list[dict[str, Any]]:
        """The pieces as STRIDED_SLICE cuts them out."""
        axis, rank = attributes["axis"], len(shape)
        return [
            {
                "begin": tuple(begin if at == axis else 0 for at in range(rank)),
                "end": tuple(end if at == axis else None for at in range(rank)),
                "steps": (1,) * rank,
            }
            for begin, end in self.ranges(shape, attributes)
        ]


@register
class EqualParts(Parts):
    """`count` equal pieces along `axis`."""

    kind = "SPLIT"
    attributes = {"count": REQUIRED, "axis": REQUIRED}
    in_file = {"count": Option("numSplits"), "axis": InOperand(1, FileOperator.one_axis)}
    version = 2
    wide_version = 4
    options = "SplitOptions"
    order = (1, 0)
    purpose = PURPOSE.format("STRIDED_SLICE")

    def ranges(self, shape: Shape, attributes: Attributes) -> list[tuple[int, int]]:
        count, whole = attributes["count"], shape[attributes["axis"]]
        need(1 <= count <= MOST_PARTS and whole % count == 0, f"count must divide {whole}, got {count}")
        size = whole // count
        return [(begin, begin + size) for begin in range(0, whole, size)]


@register
class SplitV(Parts):
    """Pieces of `sizes` along `axis`."""

    kind = "SPLIT_V"
    attributes = {"sizes": REQUIRED, "axis": REQUIRED}
    version = 2
    options = "SplitVOptions"
    purpose = PURPOSE.format("STRIDED_SLICE")

    def ranges(self, shape: Shape, attributes: Attributes) -> list[tuple[int, int]]:
        sizes, whole = attributes["sizes"], shape[attributes["axis"]]
        fits = 0 < len(sizes) <= MOST_PARTS and min(sizes) >= 1 and sum(sizes) == whole
        need(fits, f"sizes must be positive and add up to {whole}, got {sizes}")
        ends = [sum(sizes[: position + 1]) for position in range(len(sizes))]
        return list(zip([0, *ends], ends, strict=False))

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Fields:
        return {"numSplits": len(attributes["sizes"])}

    def tflite_operands(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Sequence[FileConstant]:
        return ("sizes", list(attributes["sizes"])), ("axis", np.array(attributes["axis"], np.int32))

    def read_attributes(self, read: FileOperator) -> Attributes:
        read.need_count("numSplits", len(read.outputs))
        axis = read.one_axis(2)
        return {"sizes": whole_sizes(read.integers(1), read.operand(0).shape[axis]), "axis": axis}


@register
class Unpack(Parts):
    """Every entry of `axis`, which the results do not have."""

    kind = "UNPACK"
    attributes = {"axis": REQUIRED}
    moves_axes = True
    version = 2
    wide_version = 4
    options = "UnpackOptions"
    # Keras' recurrent layers bring time to the front to take it apart, and back what they made of it.
    other_forms = (("TRANSPOSE", "UNPACK"), ("RESHAPE", "UNPACK"))
    purpose = PURPOSE.format("STRIDED_SLICE and RESHAPE")

    def ranges(self, shape: Shape, attributes: Attributes) -> list[tuple[int, int]]:
        whole = shape[attributes["axis"]]
        need(whole <= MOST_PARTS, f"at most {MOST_PARTS} results are supported, got {whole}")
        return [(entry, entry + 1) for entry in range(whole)]

    def shapes(self, shapes: Sequence[Shape], attributes: Attributes) -> tuple[Shape, ...]:
        axis = attributes["axis"]
        return tuple((*shape[:axis], *shape[axis + 1 :]) for shape in super().shapes(shapes, attributes))

    def all_results(self, call: Call) -> tuple[np.ndarray, ...]:
        axis = call.attributes["axis"]
        return tuple(call.codes[0].take(entry, axis) for entry in range(call.inputs[0].shape[axis]))

    def restore(self, context: PlanContext, operator: Operator) -> None:
        """One slice for each result, which loses the axis."""
        (operand,), (shape,) = context.operands(operator), context.shapes(operator)
        whole = tuple(1 if at == operator.attributes["axis"] else size for at, size in enumerate(shape))
        for number, attributes in enumerate(self.slices(shape, operator.attributes)):
            part = context.part(operator, "STRIDED_SLICE", operand, attributes, whole)
            shape_of_result = {"new_shape": context.results(operator)[number]}
            context.step(operator, shape_of_result, kind="RESHAPE", operands=[part], result=number)

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Fields:
        return {"num": inputs[0].shape[attributes["axis"]], "axis": attributes["axis"]}

    def read_attributes(self, read: FileOperator) -> Attributes:
        read.need_count("num", len(read.outputs))
        return {"axis": read.axis(read.option("axis") or 0)}

    def read_steps(self, steps: Sequence[FileOperator]) -> tuple[tuple[Tensor, ...], Attributes] | None:
        turned, unpacked = steps
        source, axis = turned.operand(0), moved_to_the_front(turned)
        return ((source,), {"axis": axis}) if axis and not self.read_attributes(unpacked)["axis"] else None


def moved_to_the_front(step: FileOperator) -> int:
    """The axis that a TRANSPOSE, or a RESHAPE of exactly one example, brings in front of the batch; 0 for others."""
    source, result = step.operand(0).shape, step.output.shape
    entries = sizes_or_order(step)
    if sorted(entries) == list(range(len(source))):
        return entries[0] if list(entries[1:]) == sorted(entries[1:]) else 0
    return int(source[:1] == (1,) and entries == result == (*source[1:2], 1, *source[2:]))


def moved_after_the_batch(step: FileOperator) -> int:
    """Where such an operator brings the axis in front of the batch; 0 for others."""
    source, result = step.operand(0).shape, step.output.shape
    entries = sizes_or_order(step)
    if sorted(entries) == list(range(len(source))):
        rest = [axis for axis in entries if axis]
        return entries.index(0) if rest == sorted(rest) else 0
    return int(source[1:2] == (1,) and entries == result == (1, *source[:1], *source[2:]))


def sizes_or_order(step: FileOperator) -> tuple[int, ...]:
    """What a RESHAPE or TRANSPOSE says in its second operand, if it is a constant."""
    said = step.inputs[1] if len(step.inputs) > 1 else None
    return step.integers(1) if said is not None and said.name in step.known else ()


def whole_sizes(sizes: Shape, whole: int) -> Shape:
    """The sizes, with what is left in place of a -1."""
    if sizes.count(-1) > 1:
        raise Unreadable(f"at most one size may be left open, got {list(sizes)}")
    left = whole - sum(size for size in sizes if size != -1)
    return tuple(left if size == -1 else size for size in sizes)


@register
class SpaceToBatch(Movement):
    """Every block of places becomes rows of the example: `block_shape` over the axes beside the batch, which `paddings`
    lengthen by real 0. The files of dilated convolutions have it."""

    kind = "SPACE_TO_BATCH_ND"
    attributes = {"block_shape": REQUIRED, "paddings": REQUIRED}
    in_file = {"block_shape": InOperand(1), "paddings": InOperand(2, FileOperator.pairs)}
    moves_axes = True
    moves_codes = False  # what it pads with depends on the device
    version = 2
    wide_version = 4
    options = "SpaceToBatchNDOptions"
    most_axes = 4
    any_batch = False
    purpose = PURPOSE.format("dilations")

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,), blocks, paddings = shapes, attributes["block_shape"], attributes["paddings"]
        need_blocks(first, blocks, paddings)
        sizes = [size + sum(pair) for size, pair in zip(first[1:], paddings, strict=False)]
        fits = all(size % block == 0 for size, block in zip(sizes, blocks, strict=True))
        need(fits, f"block_shape {blocks} must divide {sizes}")
        shorter = [size // block for size, block in zip(sizes, blocks, strict=True)]
        return (first[0] * math.prod(blocks), *shorter, *first[1 + len(blocks) :])

    def integers(self, call: Call) -> np.ndarray:
        blocks, count = call.attributes["block_shape"], len(call.attributes["block_shape"])
        pads = [(0, 0), *call.attributes["paddings"], *[(0, 0)] * (call.codes[0].ndim - 1 - count)]
        fill = 0 if call.profile.blocks_filled_with_code_zero else zero_point_of(call.output)
        x = np.pad(call.codes[0], pads, constant_values=fill)
        rest = x.shape[1 + count :]
        parts = [part for size, block in zip(x.shape[1:], blocks, strict=False) for part in (size // block, block)]
        # [example, row, place, place in its block, ..., rest]: the places in blocks come before the rows.
        x = x.reshape(-1, call.inputs[0].shape[0], *parts, *rest)
        inner, outer = range(3, 3 + 2 * count, 2), range(2, 2 + 2 * count, 2)
        x = x.transpose(0, *inner, 1, *outer, *range(2 + 2 * count, x.ndim))
        return np.ascontiguousarray(x).reshape(-1, *call.output.shape[1:])

    def float_results(self, call: Call) -> np.ndarray:
        return self.integers(call)

    def restore(self, context: PlanContext, operator: Operator) -> None:
        """A convolution between blocks, as files have dilated ones, is trained as one with dilations."""
        chain, convolution = _dilated(context, operator)
        last, (first, filter, *_) = chain[-1], context.shapes(convolution)
        blocks, is_sequence = operator.attributes["block_shape"], len(operator.attributes["block_shape"]) == 1
        source, result = context.shapes(operator)[0], context.results(last)[0]
        pads, windows = [], filter[1:3][-len(blocks) :]
        pairs = zip(blocks, windows, operator.attributes["paddings"], last.attributes["crops"], strict=True)
        for axis, (block, window, (padded, _), (cut, _)) in enumerate(pairs, 1):
            before = padded - cut
            pads.append((before, result[axis] + block * (window - 1) - source[axis] - before))
        need(min(map(min, pads)) >= 0, "BATCH_TO_SPACE_ND after it cuts off more than it pads")
        attributes = dict(OPERATORS[convolution.kind].step_attributes((first, filter), convolution.attributes))
        attributes["dilations"] = (1, *blocks) if is_sequence else tuple(blocks)
        attributes["padding"] = ((0, 0), *pads) if is_sequence else tuple(pads)
        (path,) = context.operands(operator)
        if is_sequence:  # an image of one row
            row = (source[0], 1, *source[1:])
            path = context.part(operator, Reshape.kind, path, {"new_shape": row}, row)
            context.weighted(convolution, path, attributes, shape=(result[0], 1, *result[1:]))
            stored = context.paths[convolution.outputs[0]]
            context.step(last, {"new_shape": result}, kind=Reshape.kind, operands=[stored])
        else:
            context.weighted(convolution, path, attributes, stores=last)
        for link in (operator, *chain[:-1]):
            context.absorbed(link, context.paths[last.outputs[0]])


def _dilated(context: Any, operator: Operator) -> tuple[list[Any], Any]:
    """The operators after SPACE_TO_BATCH_ND up to BATCH_TO_SPACE_ND, and the convolution among them. Around it
    sequences get an axis of size 1, and lose it."""
    chain: list[Any] = [operator]
    while chain[-1].kind != BatchToSpace.kind:
        readers = context.readers(chain[-1].outputs[0])
        need(len(readers) == 1 and len(chain) < 5, _ALONE)
        chain += readers
    others = [link for link in chain[1:-1] if not OPERATORS[link.kind].moves_axes]
    need(len(others) == 1 and others[0].inputs[0] in [link.outputs[0] for link in chain], _ALONE)
    (convolution,), blocks = others, operator.attributes["block_shape"]
    attributes = convolution.attributes
    need("dilations" in attributes and attributes["padding"] == "VALID", _ALONE)
    need(all(tuple(attributes[name]) == (1, 1) for name in ("strides", "dilations")), _ALONE)
    need(tuple(chain[-1].attributes["block_shape"]) == tuple(blocks), _ALONE)
    first, filter = context.shapes(convolution)[:2]
    around = [context.results(operator)[0], context.shapes(chain[-1])[0]]
    if len(blocks) == 1:
        need(filter[1] == 1 and all(len(shape) == 3 for shape in around), _ALONE)
        around = [(shape[0], 1, *shape[1:]) for shape in around]
    need([first, context.results(convolution)[0]] == around, _ALONE)
    return chain[1:], convolution


_ALONE = "it can be trained only before one convolution and BATCH_TO_SPACE_ND, which make one with dilations"


@register
class BatchToSpace(Movement):
    """The inverse of SPACE_TO_BATCH_ND; `crops` are cut off the axes that become longer."""

    kind = "BATCH_TO_SPACE_ND"
    attributes = {"block_shape": REQUIRED, "crops": REQUIRED}
    in_file = {"block_shape": InOperand(1), "crops": InOperand(2, FileOperator.pairs)}
    moves_axes = True
    version = 2
    wide_version = 4
    options = "BatchToSpaceNDOptions"
    most_axes = 4
    any_batch = False
    purpose = PURPOSE.format("dilations")

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,), blocks, crops = shapes, attributes["block_shape"], attributes["crops"]
        need_blocks(first, blocks, crops)
        whole = math.prod(blocks)
        need(first[0] % whole == 0, f"block_shape {blocks} must divide the {first[0]} rows of {first}")
        sizes = [size * block - sum(pair) for size, block, pair in zip(first[1:], blocks, crops, strict=False)]
        need(min(sizes) >= 1, f"crops {crops} leave nothing of {first}")
        return (first[0] // whole, *sizes, *first[1 + len(blocks) :])

    def integers(self, call: Call) -> np.ndarray:
        x, blocks, count = call.codes[0], call.attributes["block_shape"], len(call.attributes["block_shape"])
        sizes, rest = x.shape[1 : 1 + count], x.shape[1 + count :]
        x = x.reshape(-1, *blocks, call.output.shape[0], *sizes, *rest)
        order = [place for axis in range(count) for place in (2 + count + axis, 1 + axis)]
        x = x.transpose(0, 1 + count, *order, *range(2 + 2 * count, x.ndim))
        longer = [size * block for size, block in zip(sizes, blocks, strict=True)]
        x = x.reshape(-1, *longer, *rest)
        kept = [
            slice(before, size - after) for size, (before, after) in zip(longer, call.attributes["crops"], strict=True)
        ]
        return np.ascontiguousarray(x[(slice(None), *kept)])


def _repeated(primitives: RealPrimitives[A], x: A, multiples: Sequence[int]) -> A:
    for axis, times in enumerate(multiples):
        if times > 1:
            x = primitives.concatenate([x] * times, axis)
    return x


def need_blocks(shape: Shape, blocks: Sequence[int], pairs: Sequence[Sequence[int]]) -> None:
    """Refuses blocks that do not fit the axes beside the batch."""
    fits = 0 < len(blocks) < len(shape) and min(blocks) >= 1 and len(pairs) == len(blocks)
    fits = fits and all(len(pair) == 2 and min(pair) >= 0 for pair in pairs) and math.prod(blocks) <= MOST_PARTS
    need(fits, f"block_shape and its pairs must have one entry for each of the first axes of {shape}, of at most "
               f"{MOST_PARTS} together, got {blocks}, {pairs}")  # fmt: skip


@register
class Reverse(Movement):
    """The other way round along `axes`."""

    kind = "REVERSE_V2"
    attributes = {"axes": REQUIRED}
    in_file = {"axes": InOperand(1, FileOperator.axes)}
    float_kind = "flip"

    def float_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        return {"axes": tuple(attributes["axes"])}

    version = 1
    options = "ReverseV2Options"
    purpose = PURPOSE.format("GATHER")

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,), axes = shapes, attributes["axes"]
        fits = len(set(axes)) == len(axes) > 0 and all(1 <= axis < len(first) for axis in axes)
        need(fits, f"axes must be different ones in 1..{len(first) - 1}, got {axes}")
        # Runtimes take no others.
        need(max(axes) - min(axes) == len(axes) - 1, f"axes must follow each other, got {axes}")
        return tuple(first)

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return primitives.flip(operands[0], tuple(attributes["axes"]))

    def integers(self, call: Call) -> np.ndarray:
        return np.flip(call.codes[0], tuple(call.attributes["axes"])).copy()


@register
class BroadcastTo(Movement):
    """Axes of size 1 repeated up to `new_shape`, whose batch is the operand's."""

    kind = "BROADCAST_TO"
    most_axes = 8
    attributes = {"new_shape": REQUIRED}
    in_file = {"new_shape": InOperand(1)}
    float_kind = "expand"

    def float_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        return {"shape": tuple(attributes["new_shape"])}

    version = 2
    wide_version = 3
    options = "BroadcastToOptions"
    any_batch = False
    purpose = PURPOSE.format("CONCATENATION")

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,), wanted = shapes, tuple(attributes["new_shape"])
        fits = len(wanted) == len(first) and wanted[0] == first[0]
        fits = fits and all(size in (1, whole) for size, whole in zip(first, wanted, strict=False))
        need(
            fits and min(wanted) >= 1, f"new_shape must repeat axes of size 1 of {first} beside the batch, got {wanted}"
        )
        return wanted

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        (x,) = operands
        times = [whole // size for size, whole in zip(map(int, x.shape[1:]), attributes["new_shape"][1:], strict=True)]
        return _repeated(primitives, x, (1, *times))

    def integers(self, call: Call) -> np.ndarray:
        return np.broadcast_to(call.codes[0], (call.codes[0].shape[0], *call.attributes["new_shape"][1:])).copy()
