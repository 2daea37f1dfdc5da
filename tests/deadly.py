# SPDX-License-Identifier: Apache-2.0
""".tflite files that the runtime, or a reader that unpacks them, does not survive."""

from __future__ import annotations

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema


def deadly(content: bytes) -> bytes:
    """The same model with SPLIT, whose kernel trusts that its options are there, for FULLY_CONNECTED."""
    model = schema.ModelT.InitFromPackedBuf(content)
    (code,) = (code for code in model.operatorCodes if code.builtinCode == schema.BuiltinOperator.FULLY_CONNECTED)
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.SPLIT
    builder = flatbuffers.Builder(len(content))
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def crowded(content: bytes, count: int) -> bytes:
    """The same model with `count` more subgraphs, all one table, whose `count` operators are one table with `count`
    inputs: unpacked it is the cube of what it is as a file."""
    model, builder = schema.ModelT.InitFromPackedBuf(content), flatbuffers.Builder(1024)

    def vector(tables: list[int]) -> int:
        builder.StartVector(4, len(tables), 4)
        for table in reversed(tables):
            builder.PrependUOffsetTRelative(table)
        return int(builder.EndVector())

    inputs = builder.CreateNumpyVector(np.zeros(count, np.int32))
    schema.OperatorStart(builder)
    schema.OperatorAddInputs(builder, inputs)
    operators = vector([schema.OperatorEnd(builder)] * count)
    schema.SubGraphStart(builder)
    schema.SubGraphAddOperators(builder, operators)
    crowd = [schema.SubGraphEnd(builder)] * count
    subgraphs = vector([model.subgraphs[0].Pack(builder), *crowd])
    buffers = vector([buffer.Pack(builder) for buffer in model.buffers])
    codes = vector([code.Pack(builder) for code in model.operatorCodes])
    schema.ModelStart(builder)
    schema.ModelAddVersion(builder, 3)
    schema.ModelAddSubgraphs(builder, subgraphs)
    schema.ModelAddBuffers(builder, buffers)
    schema.ModelAddOperatorCodes(builder, codes)
    builder.Finish(schema.ModelEnd(builder), b"TFL3")
    return bytes(builder.Output())
