# SPDX-License-Identifier: Apache-2.0
"""Rows of a table by numbers that the network is given: word and position embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .arithmetic import Arrays, Tensors
from .operator import Attributes, DeviceOperator, FileOperator, FileStep, Shape, need, register
from .profile import Profile
from .tensor import INDICES, Tensor


@register
class Embedding(DeviceOperator):
    """Rows of a constant table [rows, features], in files GATHER: of indices [batch, ...] the result is
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
    other_forms = (("GATHER",),)
    float_kind = "embedding"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        indices, table = shapes
        need(len(table) == 2, f"the table must be [rows, features], got {list(table)}")
        return (*indices, table[1])

    def rows(self, inputs: Tensors) -> int:
        return inputs[1].shape[0]

    def real(self, primitives: Any, operands: Sequence[Any], attributes: Attributes) -> Any:
        """attributes: fixed_row: the row that training leaves as it is, if there is one."""
        indices, table = operands
        return primitives.embedding(indices, table, attributes.get("fixed_row"))

    def integers(
        self, codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
    ) -> np.ndarray:
        indices, table = codes
        return table[indices]

    def lower(self, context: Any, step: Any) -> Any:
        return context.looked_up(self, step)

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> dict[str, Any]:
        return {"axis": 0}

    def tflite_steps(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Sequence[FileStep]:
        (step,) = super().tflite_steps(inputs, output, attributes)
        return (replace(step, kind="GATHER"),)

    def read_steps(self, steps: Sequence[FileOperator]) -> tuple[tuple[Tensor, ...], dict[str, Any]] | None:
        (gather,) = steps
        table, indices = gather.operand(0), gather.operand(1)
        if table.data is None or indices.data is not None or indices.name in gather.known:
            return None
        if gather.option("axis") or gather.option("batchDims") or not indices.quantization.equals(INDICES):
            return None
        return (indices, table), {}

    def onnx(self, writer: Any, operator: Any, output: Tensor) -> None:
        table = writer.graph.tensors[operator.inputs[1]]
        operands = [writer.dequantized(table, table.data, None), *writer.operands(operator)]
        computed = writer.node("Gather", operands, f"{output.name}/computed", axis=0)
        writer.result_in_graph_order(operator, output, computed)
