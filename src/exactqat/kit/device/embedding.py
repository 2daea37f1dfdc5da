# SPDX-License-Identifier: Apache-2.0
"""Rows of a table by numbers that the network is given: word and position embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from .arithmetic import Tensors, scale_of, zero_point_of
from .contexts import LoweringContext, OnnxWriter, PlannedStep
from .operator import (
    Attributes,
    Call,
    DeviceOperator,
    Fields,
    FileOperator,
    FileStep,
    LoweredTensor,
    Operator,
    Shape,
    are_steps,
    need,
    register,
)
from .primitives import A, RealPrimitives
from .tensor import INDICES, Tensor

# Classes of ONE_HOT, whose table has as many rows and columns.
MOST_DEPTH = 4096


@register
class Embedding(DeviceOperator):
    """Rows of a constant table [rows, features], in files GATHER or
    EMBEDDING_LOOKUP: of indices [batch, ...] the result is
    [batch, ..., features].

    Indices are int32. The table lies on the result's grid, so nothing is rounded here. TFLite-Micro's GATHER takes no
    int16 table.
    """

    kind = "EMBEDDING"
    operands = (2, 2)
    index_operands = (0,)
    weights = (1,)
    same_quantization = True
    moves_codes = True
    dtypes = ("int8", "int16")
    most_axes = 5
    version = 2
    wide_version = 4
    options = "GatherOptions"
    order = (1, 0)
    other_forms: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("RESHAPE", "EMBEDDING_LOOKUP", "RESHAPE"),
        ("RESHAPE", "GATHER", "RESHAPE"),
        ("EMBEDDING_LOOKUP",),
        ("ONE_HOT",),
        ("GATHER",),
    )
    float_kind = "embedding"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        indices, table = shapes
        need(len(table) == 2, f"the table must be [rows, features], got {list(table)}")
        return (*indices, table[1])

    def rows(self, inputs: Tensors) -> int:
        return inputs[1].shape[0]

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        """attributes: fixed_row: the row that training leaves as it is, if there is one."""
        indices, table = operands
        return primitives.embedding(indices, table, attributes.get("fixed_row"))

    def integers(self, call: Call) -> np.ndarray:
        indices, table = call.codes
        outside = indices[(indices < 0) | (indices >= len(table))]
        if outside.size:  # computed ones; kernels end the run
            raise ValueError(f"{self.kind}: index {outside[0]} is outside of the table's {len(table)} rows")
        return table[indices]

    def lower(self, context: LoweringContext, step: PlannedStep) -> LoweredTensor | None:
        return context.looked_up(self, step)

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Fields:
        return {"axis": 0}

    def tflite_steps(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Sequence[FileStep]:
        (step,) = super().tflite_steps(inputs, output, attributes)
        return (replace(step, kind="GATHER"),)

    def read_steps(self, steps: Sequence[FileOperator]) -> tuple[tuple[Tensor, ...], Attributes] | None:
        lookup, first = steps[len(steps) // 2], steps[0].operand(0)
        if len(lookup.inputs) == 4:
            return _one_hot(lookup)
        one, other = lookup.operand(0), lookup.operand(1)
        indices, table = (one, other) if one.dtype == "int32" else (other, one)
        constant = table.data is not None and len(table.shape) == 2
        if not constant or indices.data is not None or indices.name in lookup.known:
            return None
        if indices is one:
            if other.dtype != lookup.output.dtype:
                return None  # real numbers of a table of codes
        elif lookup.option("axis") or lookup.option("batchDims"):
            return None
        if len(steps) > 1:
            # In files EMBEDDING_LOOKUP takes a row of indices, and the batch is one example.
            if steps[-1].output.shape != (*first.shape, *table.shape[1:]):
                return None
            indices = first
        return ((indices, table), {}) if indices.quantization.equals(INDICES) else None

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        table = writer.graph.tensors[operator.inputs[1]]
        assert table.data is not None
        operands = [writer.dequantized(table, table.data, None), *writer.operands(operator)]
        computed = writer.node("Gather", operands, f"{output.name}/computed", axis=0)
        writer.result_in_graph_order(operator, output, computed)


@register
class CodedEmbedding(Embedding):
    """Rows of a constant table [rows, features] by whole numbers that the network computes, on a grid of scale 1: of x
    [batch, ...] the result is [batch, ..., features]. Numbers beyond the table choose its first or last row.

    In the file it is CAST, ADD, MAXIMUM, MINIMUM and GATHER, all but the last on int32.
    """

    kind = "CODED_EMBEDDING"
    index_dtypes = ("int8", "int16")
    other_forms = (("CAST", "ADD", "MAXIMUM", "MINIMUM", "GATHER"),)
    float_kind = ""

    def measured_as(self, inputs: Tensors, output: Tensor) -> str:
        return super().measured_as((), output)

    def check(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> None:
        scale = float(scale_of(inputs[0]))
        need(scale == 1, f"{inputs[0].name!r} must be whole numbers on a grid of scale 1, got scale {scale:g}")

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        x, table = operands
        index = primitives.clip(primitives.round(primitives.stop_gradient(x)), 0.0, float(table.shape[0] - 1))
        return super().real(primitives, (index, table), attributes)

    def integers(self, call: Call) -> np.ndarray:
        x, table = call.codes
        return table[np.clip(x.astype(np.int32) - zero_point_of(call.inputs[0]), 0, len(table) - 1)]

    def tflite_steps(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Sequence[FileStep]:
        x, table = inputs
        (gather,) = super().tflite_steps(inputs, output, attributes)

        def whole(name: str, value: int) -> Tensor:
            return Tensor(name, (), "int32", INDICES, np.array(value, np.int32))

        types = {"inDataType": ("TensorType", x.dtype.upper()), "outDataType": ("TensorType", "INT32")}
        shift, last = whole("shift", -zero_point_of(x)), whole("last_row", table.shape[0] - 1)
        limits = "MaximumMinimumOptions"
        return (
            FileStep("CAST", (0,), 1, "CastOptions", types, "cast", "int32", x.shape),
            FileStep("ADD", ("cast", shift), 1, "AddOptions", {}, "number", "int32", x.shape),
            FileStep("MAXIMUM", ("number", whole("first_row", 0)), 1, limits, {}, "not_before", "int32", x.shape),
            FileStep("MINIMUM", ("not_before", last), 1, limits, {}, "row", "int32", x.shape),
            replace(gather, operands=(1, "row"), version=2 if output.dtype == "int8" else self.wide_version),
        )

    def read_steps(self, steps: Sequence[FileOperator]) -> tuple[tuple[Tensor, ...], Attributes] | None:
        x, gather = steps[0].operand(0), steps[-1]
        table, output = gather.operand(0), gather.output
        if x.dtype not in self.index_dtypes or table.data is None or len(table.shape) != 2:
            return None
        fits = float(scale_of(x)) == 1 and table.dtype == output.dtype and not gather.option("axis")
        written = self.tflite_steps((x, table), output, {})
        return ((x, table), {}) if fits and are_steps(steps, written) else None

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        name, table = output.name, writer.graph.tensors[operator.inputs[1]]
        real = writer.in_graph_order(operator.inputs[0], f"{name}/numbers")
        ends = {"first_row": 0, "last_row": table.shape[0] - 1}
        limits = [writer.constant(f"{name}/{word}", np.float32(end)) for word, end in ends.items()]
        row = writer.node("Clip", [real, *limits], f"{name}/row")
        row = writer.node("Cast", [row], f"{name}/index", to=writer.onnx.TensorProto.INT64)
        assert table.data is not None
        operands = [writer.dequantized(table, table.data, None), row]
        computed = writer.node("Gather", operands, f"{name}/computed", axis=0)
        writer.result_in_graph_order(operator, output, computed)


def _one_hot(read: FileOperator) -> tuple[tuple[Tensor, ...], Attributes] | None:
    """ONE_HOT along a new last axis: rows of a square table."""
    indices, axis = read.operand(0), read.option("axis")
    if indices.data is not None or indices.dtype != "int32" or axis not in (-1, len(indices.shape)):
        return None
    (depth,), (on,), (off,) = (read.values(at).reshape(-1) for at in (1, 2, 3))
    need(1 <= depth <= MOST_DEPTH, f"ONE_HOT: depth must be in 1..{MOST_DEPTH}, got {depth}")
    table = np.where(np.eye(depth, dtype=bool), on, off)
    output = read.output
    return (indices, Tensor(f"{output.name}/table", table.shape, str(table.dtype), output.quantization, table)), {}
