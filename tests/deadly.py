# SPDX-License-Identifier: Apache-2.0
"""A .tflite file that the runtime does not survive."""

from __future__ import annotations

import flatbuffers
from ai_edge_litert import schema_py_generated as schema


def deadly(content: bytes) -> bytes:
    """The same model with SPLIT, whose kernel trusts that its options are there, for FULLY_CONNECTED."""
    model = schema.ModelT.InitFromPackedBuf(content)
    (code,) = (code for code in model.operatorCodes if code.builtinCode == schema.BuiltinOperator.FULLY_CONNECTED)
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.SPLIT
    builder = flatbuffers.Builder(len(content))
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())
