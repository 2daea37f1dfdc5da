# SPDX-License-Identifier: Apache-2.0
"""Writes a Graph as a .tflite file.

The schema classes come from the module inside ai-edge-litert (`schema_py_generated`), which every user of this room has
installed anyway to run the file: writer and runtime then speak the same version of the format, and no generated code
lives in this repository. flatbuffers and ai-edge-litert are imported on first use: `pip install exactqat[deploy]`.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from .graph import Graph, Operator, Quantization, Tensor

# Lowest versions that carry the int8 form of each operator.
VERSIONS = {
    "CONV_2D": 3,
    "DEPTHWISE_CONV_2D": 3,
    "FULLY_CONNECTED": 4,
    "ADD": 2,
    "MUL": 2,
    "MEAN": 2,
    "AVERAGE_POOL_2D": 2,
    "MAX_POOL_2D": 2,
    "PAD": 2,
    "CONCATENATION": 2,
    "RESHAPE": 1,
    "QUANTIZE": 2,
}
IDENTIFIER = b"TFL3"


def write_tflite(graph: Graph, path: str | os.PathLike[str], description: str = "") -> Path:
    """Validates `graph` and writes it to `path`; the same graph always gives the same bytes.

    The batch is 1 in the file; `interpreter.resize_tensor_input` takes any other. The file appears whole or not at all.
    """
    return write_whole(Path(path), tflite_bytes(graph, description))


def write_whole(path: Path, content: bytes) -> Path:
    """Writes a file that appears whole or not at all, and gives its path."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        # mkstemp makes private files; a model is as readable as any file the user creates.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def tflite_bytes(graph: Graph, description: str = "") -> bytes:
    """The content of the .tflite file of `graph`."""
    graph.validate()
    return _Writer(graph).finish("; ".join(filter(None, ("exactqat", description))))


def import_deploy(name: str, extra: str = "deploy") -> Any:
    """Imports a module that only this room needs, or says which extra of the package brings it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} is needed here: pip install exactqat[{extra}]") from error


class _Writer:
    """Collects buffers, tensors and operator codes of one model in the order in which the graph names them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.schema: ModuleType = import_deploy("ai_edge_litert.schema_py_generated")
        self.buffers = [self.schema.BufferT()]  # by convention buffer 0 is the empty one
        self.tensors: list[Any] = []
        self.codes: dict[str, int] = {}
        self.indices = {name: self.add_tensor(tensor) for name, tensor in graph.tensors.items()}

    def finish(self, description: str) -> bytes:
        schema = self.schema
        operators = [self.operator(operator) for operator in self.graph.operators]
        subgraph = schema.SubGraphT(
            name="main",
            tensors=self.tensors,
            operators=operators,
            inputs=[self.indices[name] for name in self.graph.inputs],
            outputs=[self.indices[name] for name in self.graph.outputs],
        )
        model = schema.ModelT(
            version=3,
            description=description,
            subgraphs=[subgraph],
            buffers=self.buffers,
            operatorCodes=[self.operator_code(kind) for kind in self.codes],
        )
        builder = import_deploy("flatbuffers").Builder(1 << 16)
        builder.Finish(model.Pack(builder), IDENTIFIER)
        return bytes(builder.Output())

    def add_tensor(self, tensor: Tensor) -> int:
        schema = self.schema
        entry = schema.TensorT(
            name=tensor.name,
            shape=list(tensor.shape),
            type=getattr(schema.TensorType, tensor.dtype.upper()),
            quantization=self.quantization(tensor.quantization),
            hasRank=True,
        )
        if tensor.data is None:
            entry.shapeSignature = [-1, *tensor.shape[1:]]
        else:
            entry.buffer = self.add_buffer(tensor.data)
        return self.append(entry)

    def add_integers(self, name: str, values: Any) -> int:
        """An int32 constant that the graph holds as an attribute and the file as an operand."""
        data = np.asarray(values, np.int32)
        schema = self.schema
        entry = schema.TensorT(name=name, shape=list(data.shape), type=schema.TensorType.INT32, hasRank=True)
        entry.buffer = self.add_buffer(data)
        return self.append(entry)

    def append(self, entry: Any) -> int:
        self.tensors.append(entry)
        return len(self.tensors) - 1

    def add_buffer(self, data: np.ndarray) -> int:
        little_endian = data.astype(data.dtype.newbyteorder("<"))
        self.buffers.append(self.schema.BufferT(data=np.frombuffer(little_endian.tobytes(), np.uint8)))
        return len(self.buffers) - 1

    def quantization(self, quantization: Quantization) -> Any:
        return self.schema.QuantizationParametersT(
            scale=quantization.scale,
            zeroPoint=quantization.zero_point,
            quantizedDimension=quantization.axis or 0,
        )

    def operator_code(self, kind: str) -> Any:
        code = getattr(self.schema.BuiltinOperator, kind)
        # Readers from before the 32-bit field look at the deprecated byte, which stops at 127.
        return self.schema.OperatorCodeT(builtinCode=code, deprecatedBuiltinCode=min(code, 127), version=VERSIONS[kind])

    def operator(self, operator: Operator) -> Any:
        inputs = [self.indices[name] for name in operator.inputs]
        attributes, name = operator.attributes, operator.outputs[0]
        if operator.kind == "MEAN":
            inputs.append(self.add_integers(f"{name}/axes", [1, 2]))
        elif operator.kind == "PAD":
            inputs.append(self.add_integers(f"{name}/paddings", attributes["paddings"]))
        elif operator.kind == "RESHAPE":
            inputs.append(self.add_integers(f"{name}/new_shape", [-1, *attributes["new_shape"][1:]]))
        kind, options = self.options(operator)
        return self.schema.OperatorT(
            opcodeIndex=self.codes.setdefault(operator.kind, len(self.codes)),
            inputs=inputs,
            outputs=[self.indices[output] for output in operator.outputs],
            builtinOptionsType=getattr(self.schema.BuiltinOptions, kind),
            builtinOptions=options,
        )

    def options(self, operator: Operator) -> tuple[str, Any]:
        """Name of the options table and the table itself."""
        schema, attributes = self.schema, operator.attributes
        values: dict[str, Any] = {}
        if "activation" in attributes:
            values["fusedActivationFunction"] = getattr(schema.ActivationFunctionType, attributes["activation"])
        if "padding" in attributes:
            values["padding"] = getattr(schema.Padding, attributes["padding"])
            values["strideH"], values["strideW"] = attributes["strides"]
        if "dilations" in attributes:
            values["dilationHFactor"], values["dilationWFactor"] = attributes["dilations"]
        if "filter_size" in attributes:
            values["filterHeight"], values["filterWidth"] = attributes["filter_size"]
        if operator.kind == "DEPTHWISE_CONV_2D":
            channels = [self.graph.tensors[name].shape[3] for name in operator.inputs[:2]]
            values["depthMultiplier"] = channels[1] // channels[0]
        if operator.kind == "MEAN":
            values["keepDims"] = attributes["keep_dims"]
        if operator.kind == "CONCATENATION":
            values["axis"] = attributes["axis"]
        if operator.kind == "RESHAPE":
            values["newShape"] = [-1, *attributes["new_shape"][1:]]
        table = {
            "CONV_2D": "Conv2DOptions",
            "DEPTHWISE_CONV_2D": "DepthwiseConv2DOptions",
            "FULLY_CONNECTED": "FullyConnectedOptions",
            "ADD": "AddOptions",
            "MUL": "MulOptions",
            "MEAN": "ReducerOptions",
            "AVERAGE_POOL_2D": "Pool2DOptions",
            "MAX_POOL_2D": "Pool2DOptions",
            "PAD": "PadOptions",
            "CONCATENATION": "ConcatenationOptions",
            "RESHAPE": "ReshapeOptions",
            "QUANTIZE": "QuantizeOptions",
        }[operator.kind]
        return table, getattr(schema, f"{table}T")(**values)
