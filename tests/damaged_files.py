# SPDX-License-Identifier: Apache-2.0
"""Damaged .tflite and .onnx files: bytes that changed, and sound tables that say what no converter would."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from device_cases import NAMES, random_graph

from exactqat.deploy import Refusal
from exactqat.deploy.formats.onnx import onnx_bytes
from exactqat.deploy.formats.tflite import IDENTIFIER, tflite_bytes

GOLDENS = Path(__file__).resolve().parent / "goldens" / "files"
WORDS = (0, 1, 2, 3, 8, 127, 128, 255, 2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 4)
SIZES = (-(2**31), -1, 0, 1, 2, 3, 7, 255, 2**10, 2**15, 2**16, 2**20, 2**24, 2**28, 2**30, 2**31 - 1)
NUMBERS = (-1, 0, 1, 2, 3, 4, 5, 8, 100, 2**16, 2**31 - 1, -(2**31))
SCALES = (float("nan"), float("inf"), -1.0, 0.0, -0.0, 1e-45, 1e-38, 2.0**-32, 1e-9, 0.1, 1.0, 255.0, 1e9, 3e38)
ZERO_POINTS = (-(2**63), -(2**31), -32769, -129, -128, -1, 0, 1, 127, 128, 255, 2**31, 2**63 - 1)


def sound_files(rng: np.random.Generator, count: int) -> list[bytes]:
    """Files of ours and of others."""
    names = [name for name in NAMES if ":int16" not in name]
    own = [tflite_bytes(random_graph(rng, str(name))) for name in rng.choice(names, count)]
    return [path.read_bytes() for path in sorted(GOLDENS.glob("*.tflite"))] + own


def with_other_bytes(rng: np.random.Generator, content: bytes) -> bytes:
    """The file with one to four kinds of damage."""
    data = bytearray(content)
    for _ in range(int(rng.integers(1, 5))):
        size = len(data)
        place = int(rng.integers(size // 4)) * 4
        match int(rng.integers(8)):
            case 0:  # bits
                for at in rng.integers(0, size, rng.integers(1, 9)):
                    data[at] ^= 1 << int(rng.integers(8))
            case 1:  # the end
                del data[int(rng.integers(size)) :]
            case 2 | 3:  # an offset, a size or a number
                struct.pack_into("<I", data, place, int(rng.choice(WORDS)))
            case 4:  # a small step
                (word,) = struct.unpack_from("<I", data, place)
                struct.pack_into("<I", data, place, (word + int(rng.integers(-64, 65))) % 2**32)
            case 5:  # swapped
                other = int(rng.integers(size // 4)) * 4
                data[place : place + 4], data[other : other + 4] = data[other : other + 4], data[place : place + 4]
            case 6:  # a stretch of another place
                length, other = int(rng.integers(1, 64)), int(rng.integers(size))
                data[place : place + length] = data[other : other + length]
            case 7:  # bytes that are missing, or too many
                if rng.integers(2):
                    del data[place : place + int(rng.integers(1, 16))]
                else:
                    data[place:place] = rng.integers(0, 256, int(rng.integers(1, 16)), np.uint8).tobytes()
        if len(data) < 8:
            break
    return bytes(data)


def with_other_fields(rng: np.random.Generator, content: bytes) -> bytes:
    """The file with one to three fields that say something else, packed as a sound file is."""
    model: Any = schema.ModelT.InitFromPackedBuf(content)
    for _ in range(int(rng.choice([1, 1, 2, 3]))):
        _change_one(rng, model)
    builder = flatbuffers.Builder(len(content))
    builder.Finish(model.Pack(builder), IDENTIFIER)
    return bytes(builder.Output())


def _pick(rng: np.random.Generator, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _change_one(rng: np.random.Generator, model: Any) -> None:
    subgraph = model.subgraphs[0]
    tensor, operator = _pick(rng, subgraph.tensors), _pick(rng, subgraph.operators)
    buffer = _pick(rng, model.buffers)
    some_tensor = _pick(rng, [-(2**31), -1, len(subgraph.tensors), 2**31 - 1, *range(len(subgraph.tensors))])
    match int(rng.integers(20)):
        case 0 | 1:  # one size of a shape
            if tensor.shape is not None and len(tensor.shape):
                tensor.shape = np.array(tensor.shape, np.int32)
                tensor.shape[int(rng.integers(len(tensor.shape)))] = _pick(rng, SIZES)
        case 2:  # a whole shape
            rank = int(rng.integers(0, 10))
            tensor.shape = np.array([_pick(rng, SIZES) for _ in range(rank)], np.int32)
        case 3:  # sizes that are left open, so that they follow from the operands
            for record in subgraph.tensors:
                if record.shape is not None:
                    record.shapeSignature = np.full(len(record.shape), -1, np.int32)
        case 4:
            tensor.type = int(rng.integers(0, 21))
        case 5:
            tensor.buffer = int(_pick(rng, [0, len(model.buffers), 2**32 - 1, *range(len(model.buffers))]))
        case 6 | 7:
            grid = tensor.quantization or schema.QuantizationParametersT()
            grid.scale = np.array([_pick(rng, SCALES) for _ in range(_pick(rng, (0, 1, 1, 1, 2, 9)))], np.float32)
            tensor.quantization = grid
        case 8:
            grid = tensor.quantization or schema.QuantizationParametersT()
            grid.zeroPoint = np.array([_pick(rng, ZERO_POINTS) for _ in range(_pick(rng, (0, 1, 1, 2)))], np.int64)
            tensor.quantization = grid
        case 9:
            grid = tensor.quantization or schema.QuantizationParametersT()
            grid.quantizedDimension = _pick(rng, SIZES)
            tensor.quantization = grid
        case 10 | 11:  # what an operator reads or writes: cycles, results that are written twice, nothing
            side = "inputs" if rng.integers(3) else "outputs"
            indices = list(() if getattr(operator, side) is None else getattr(operator, side))
            if indices and rng.integers(5):
                indices[int(rng.integers(len(indices)))] = some_tensor
            elif indices and rng.integers(2):
                del indices[-1]
            else:
                indices.append(some_tensor)
            setattr(operator, side, np.array(indices, np.int32))
        case 12:
            operator.opcodeIndex = int(
                _pick(rng, [*range(len(model.operatorCodes)), len(model.operatorCodes), 2**32 - 1])
            )
        case 13:  # another operator
            code = _pick(rng, model.operatorCodes)
            code.builtinCode = int(rng.integers(0, 210))
            code.deprecatedBuiltinCode = min(code.builtinCode, 127)
        case 14:  # one field of the options
            fields = list(vars(operator.builtinOptions)) if operator.builtinOptions is not None else []
            if fields:
                name = _pick(rng, fields)
                value = getattr(operator.builtinOptions, name)
                if isinstance(value, bool):
                    setattr(operator.builtinOptions, name, not value)
                elif isinstance(value, int):
                    allowed = NUMBERS if "ctivation" not in name and "adding" not in name else range(-1, 9)
                    setattr(operator.builtinOptions, name, int(_pick(rng, allowed)))
                elif isinstance(value, float):
                    setattr(operator.builtinOptions, name, _pick(rng, SCALES))
        case 15:  # options of another operator
            other = _pick(rng, subgraph.operators)
            operator.builtinOptions, operator.builtinOptionsType = other.builtinOptions, other.builtinOptionsType
        case 16 | 17:  # integers of a constant: shapes, axes, paddings, indices; or all values of a filter
            if buffer.data is not None and len(buffer.data):
                data = np.array(buffer.data, np.uint8)
                if len(data) % 4 == 0 and len(data) <= 64:
                    place = int(rng.integers(len(data) // 4)) * 4
                    data[place : place + 4] = np.frombuffer(np.int32(_pick(rng, SIZES)).tobytes(), np.uint8)
                else:
                    data[:] = int(rng.choice([0, 127, 128, 255]))
                buffer.data = data
        case 18:  # a constant that is cut off, or missing
            if buffer.data is not None:
                buffer.data = None if rng.integers(2) else np.array(buffer.data, np.uint8)[: int(rng.integers(9))]
        case 19:  # order, repetition, ends, variables
            match int(rng.integers(5)):
                case 0:
                    subgraph.operators.reverse()
                case 1:
                    subgraph.operators.append(operator)
                case 2:
                    subgraph.inputs = np.append(subgraph.inputs, some_tensor).astype(np.int32)
                case 3:
                    subgraph.outputs = np.append(subgraph.outputs, some_tensor).astype(np.int32)
                case 4:
                    tensor.isVariable = not tensor.isVariable


def cases(seed: int, count: int) -> Iterator[bytes]:
    """Damaged files, the same ones for a seed: half of them sound tables."""
    rng = np.random.default_rng(seed)
    files = sound_files(rng, 40)
    for _ in range(count):
        content = files[int(rng.integers(len(files)))]
        damage = with_other_fields if rng.integers(2) else with_other_bytes
        try:
            yield damage(rng, content)
        except (struct.error, OverflowError, TypeError, ValueError):  # what no file can say
            yield with_other_bytes(rng, content)


def onnx_cases(seed: int, count: int, others: Sequence[Path] = ()) -> Iterator[bytes]:
    """Damaged .onnx files, likewise. others: files of others, beside those of this library."""
    rng = np.random.default_rng(seed)
    files = [path.read_bytes() for path in others]
    while len(files) < len(others) + 40:
        try:
            files.append(onnx_bytes(random_graph(rng, str(_pick(rng, [name for name in NAMES if ":" not in name])))))
        except Refusal:  # it has no form in ONNX
            continue
    for _ in range(count):
        content = _pick(rng, files)
        try:
            yield (with_other_onnx_fields if rng.integers(2) else with_other_bytes)(rng, content)
        except Exception:  # noqa: BLE001 - what no file can say, in onnx' own errors
            yield with_other_bytes(rng, content)


def with_other_onnx_fields(rng: np.random.Generator, content: bytes) -> bytes:
    """The .onnx file with one to three fields that say something else."""
    import onnx

    model = onnx.load_model_from_string(content)
    for _ in range(int(rng.choice([1, 1, 2, 3]))):
        graph = model.graph
        node, held = _pick(rng, graph.node), _pick(rng, graph.initializer)
        names = [name for operation in graph.node for name in (*operation.input, *operation.output)]
        match int(rng.integers(13)):
            case 0:
                node.op_type = str(
                    _pick(rng, [*(operation.op_type for operation in graph.node), "Loop", "Scan", "Einsum", "Nothing"])
                )
            case 1 if node.input:
                node.input[int(rng.integers(len(node.input)))] = str(_pick(rng, names))
            case 2 if node.output:
                node.output[0] = str(_pick(rng, names))
            case 3:
                del graph.node[int(rng.integers(len(graph.node)))]
            case 4:
                graph.node.append(node)
            case 5:  # a shape that the data do not have, or of another size
                if held.dims:
                    held.dims[int(rng.integers(len(held.dims)))] = int(_pick(rng, SIZES))
            case 6:
                held.data_type = int(rng.integers(0, 25))
            case 7:  # scales, zero points, axes, shapes
                array = onnx.numpy_helper.to_array(held).copy()
                value = _pick(rng, SCALES) if array.dtype.kind == "f" else _pick(rng, NUMBERS)
                with np.errstate(all="ignore"):
                    array.reshape(-1)[: max(1, array.size // 3)] = np.asarray(value).astype(array.dtype)
                held.CopyFrom(onnx.numpy_helper.from_array(array, held.name))
            case 8 if node.attribute:
                attribute = _pick(rng, node.attribute)
                if attribute.ints:
                    attribute.ints[int(rng.integers(len(attribute.ints)))] = int(_pick(rng, SIZES))
                else:
                    attribute.i = int(_pick(rng, NUMBERS))
            case 9:
                end = _pick(rng, [*graph.input, *graph.output])
                dims = end.type.tensor_type.shape.dim
                if dims:
                    _pick(rng, dims).dim_value = int(_pick(rng, SIZES))
            case 10:
                _pick(rng, model.opset_import).version = int(rng.integers(0, 30))
            case 11:
                graph.output.add().name = str(_pick(rng, names))
            case 12:
                held.data_location = onnx.TensorProto.EXTERNAL
                held.external_data.add(key="location", value=str(_pick(rng, ["../x", "/etc/hostname", "data"])))
    return bytes(model.SerializeToString())
