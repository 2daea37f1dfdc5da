# SPDX-License-Identifier: Apache-2.0
"""Files whose first axis is not a batch of one: what they compute is compared with the runtimes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from device_cases import random_graph

from exactqat.deploy import Builder, Graph, per_tensor, profiles_here, read_tflite, simulate
from exactqat.deploy.formats.read_tflite import read_content, to_file
from exactqat.deploy.formats.tflite import tflite_bytes
from exactqat.deploy.inspect import inspect
from exactqat.deploy.runtimes import open_runtime
from exactqat.deploy.runtimes.trial import RuntimeRefusal
from exactqat.kit.device import OPERATORS, Refusal

schema: Any = importlib.import_module("ai_edge_litert.schema_py_generated")
flatbuffers: Any = importlib.import_module("flatbuffers")

# Which constants of an operator say something of axes, and what they say without the first one.
AXES = {
    **{kind: {1: lambda values: values - 1} for kind in ("MEAN", "SUM", "REDUCE_MAX", "REDUCE_MIN", "REVERSE_V2",
                                                         "ARG_MAX", "ARG_MIN", "EXPAND_DIMS")},
    "SPLIT": {0: lambda values: values - 1},
    "SPLIT_V": {2: lambda values: values - 1},
    "TRANSPOSE": {1: lambda values: values[1:] - 1},
    **{kind: {1: lambda values: values[1:]} for kind in ("PAD", "PADV2", "MIRROR_PAD", "TILE", "RESHAPE",
                                                         "BROADCAST_TO")},
    "SLICE": {at: lambda values: values[1:] for at in (1, 2)},
    "STRIDED_SLICE": {at: lambda values: values[1:] for at in (1, 2, 3)},
}  # fmt: skip
OPTIONS: dict[str, dict[str, Callable[[Any], Any]]] = {
    **{kind: {"axis": lambda axis: axis - 1} for kind in ("CONCATENATION", "PACK", "UNPACK", "GATHER")},
    "SQUEEZE": {"squeezeDims": lambda axes: [axis - 1 for axis in axes]},
    "RESHAPE": {"newShape": lambda shape: shape[1:]},
    "STRIDED_SLICE": {name: lambda mask: mask >> 1 for name in ("beginMask", "endMask", "shrinkAxisMask")},
}
KINDS = sorted(
    {*AXES, *OPTIONS, "ADD", "MUL", "MAXIMUM", "RELU", "LOGISTIC", "ABS", "QUANTIZE", "PRELU", "TOPK_V2"} - {"RESHAPE"}
)


def names() -> dict[int, str]:
    return {value: name for name, value in vars(schema.BuiltinOperator).items() if isinstance(value, int)}


def packed(model: Any) -> bytes:
    builder = flatbuffers.Builder(0)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def without_batch(graph: Graph) -> bytes:
    """A file of the same network whose tensors lack their first axis."""
    model, words = schema.ModelT.InitFromPackedBuf(tflite_bytes(graph), 0), names()
    (main,) = model.subgraphs
    for tensor in main.tensors:
        if model.buffers[tensor.buffer].data is None:
            tensor.shape, tensor.shapeSignature = list(tensor.shape[1:]), None
    for operator in main.operators:
        code = model.operatorCodes[operator.opcodeIndex]
        word = words[code.builtinCode]
        for position, change in AXES.get(word, {}).items():
            tensor = main.tensors[operator.inputs[position]]
            values = change(
                np.asarray(model.buffers[tensor.buffer].data, np.uint8).view(np.int32).reshape(tensor.shape)
            )
            model.buffers.append(schema.BufferT())
            model.buffers[-1].data = list(np.ascontiguousarray(values, np.int32).reshape(-1).view(np.uint8))
            tensor.shape, tensor.buffer = list(values.shape), len(model.buffers) - 1
        for name, change in OPTIONS.get(word, {}).items():
            value = getattr(operator.builtinOptions, name)
            if value is not None:
                setattr(operator.builtinOptions, name, change(value))
    return packed(model)


def with_rows(graph: Graph, rows: int) -> bytes:
    """A file of the same network with a fixed batch."""
    model = schema.ModelT.InitFromPackedBuf(tflite_bytes(graph), 0)
    for tensor in model.subgraphs[0].tensors:
        if tensor.shapeSignature is not None:
            tensor.shape, tensor.shapeSignature = [rows * tensor.shape[0], *tensor.shape[1:]], None
    return packed(model)


def compare(content: bytes, graph: Graph) -> Graph:
    """What the runtimes compute is what is simulated, and that is what the other graph says; returns the file's."""
    file = read_content(content)
    read, rng, ran = file.graph, np.random.default_rng(0), 0
    codes = {name: rng.integers(-128, 128, read.tensors[name].shape).astype(np.int8) for name in read.inputs}
    ends = [tuple(end.name for end in side) for side in (file.inputs, file.outputs)]
    for profile in profiles_here():
        try:
            runtime = open_runtime(file.content, *ends, profile, True)
            results = runtime.run({end.name: to_file(read, codes[end.tensor], end) for end in file.inputs})
        except RuntimeRefusal:
            continue
        ran += 1
        expected = simulate(read, codes, profile)
        for end in file.outputs:
            np.testing.assert_array_equal(results[end.name].reshape(-1), expected[end.tensor].reshape(-1), profile)
    assert ran > 1
    rows = {
        ours: codes[theirs].reshape(-1, *graph.tensors[ours].shape[1:])
        for ours, theirs in zip(graph.inputs, read.inputs, strict=True)
    }
    whole = simulate(graph, rows, "reference")
    again = simulate(read, {name: np.concatenate([array, array]) for name, array in codes.items()}, "reference")
    for ours, theirs in zip(graph.outputs, read.outputs, strict=True):
        twice = np.concatenate([whole[ours].reshape(-1)] * 2)
        np.testing.assert_array_equal(again[theirs].reshape(-1), twice)
    return read


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_without_a_batch(kind: str) -> None:
    rng, compared = np.random.default_rng(3), 0
    while compared < 3:
        graph = random_graph(rng, kind)
        ranks = [len(graph.tensors[name].shape) for name in (*graph.inputs, *graph.results())]
        if min(ranks) > 1 and max(ranks) < 5:
            compared += 1
            compare(without_batch(graph), graph)


ROWS = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "ADD", "MEAN", "AVERAGE_POOL_2D", "SOFTMAX", "PAD",
        "CONCATENATION", "TRANSPOSE", "BATCH_MATMUL", "RESIZE_BILINEAR", "LOGISTIC", "L2_NORMALIZATION")  # fmt: skip


@pytest.mark.parametrize("kind", ROWS)
def test_a_fixed_batch(kind: str) -> None:
    rng = np.random.default_rng(4)
    for _ in range(3):
        graph = random_graph(rng, kind)
        compare(with_rows(graph, int(rng.integers(2, 5))), graph)


def test_a_scalar_and_a_sum_over_the_first_axis() -> None:
    builder = Builder()
    grid = per_tensor(0.1, 3)
    builder.input("x", (1, 7), grid)
    builder.mean("x", per_tensor(0.05, -2), name="y", axes=(1,), keep_dims=False)
    graph = builder.graph(["y"])
    read = compare(without_batch(graph), graph)
    assert read.tensors[read.outputs[0]].shape == (1,) and read.tensors[read.inputs[0]].shape == (1, 7)


def test_signatures_are_chosen_by_name(tmp_path: Path) -> None:
    """Two networks in one file; interpreters run the first."""
    builder = Builder()
    builder.input("x", (1, 5), per_tensor(0.1, 3))
    builder.relu("x", per_tensor(0.05, -2), name="y")
    graph = builder.graph(["y"])
    model = schema.ModelT.InitFromPackedBuf(tflite_bytes(graph), 0)
    other = schema.ModelT.InitFromPackedBuf(tflite_bytes(graph), 0).subgraphs[0]
    other.operators[0].opcodeIndex = len(model.operatorCodes)
    other.operators[0].builtinOptions = None
    other.operators[0].builtinOptionsType = 0
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.ABS
    model.operatorCodes.append(code)
    model.subgraphs.append(other)
    model.signatureDefs = []
    for number, name in enumerate(("relu", "absolute")):
        signature = schema.SignatureDefT()
        signature.signatureKey, signature.subgraphIndex = name, number
        signature.inputs, signature.outputs = [], []
        for side, at in ((signature.inputs, 0), (signature.outputs, 1)):
            entry = schema.TensorMapT()
            entry.name, entry.tensorIndex = f"{name}_{at}", at
            side.append(entry)
        model.signatureDefs.append(signature)
    path = tmp_path / "model.tflite"
    path.write_bytes(packed(model))
    assert [operator.kind for operator in read_tflite(path).operators] == ["RELU"]
    read = read_tflite(path, "absolute")
    assert [operator.kind for operator in read.operators] == ["ABS"] and read.signature.inputs[0].name == "absolute_0"
    for signature, kind in (("", "RELU"), ("absolute", "ABS")):
        inspection = inspect(path, signature=signature)
        assert inspection.equal and [layer.kind for layer in inspection.layers] == [kind] and inspection.ran_on
    with pytest.raises(Refusal, match="it has no signature 'third'; it has relu, absolute"):
        read_tflite(path, "third")


def test_every_kind_is_declared() -> None:
    assert {*AXES, *OPTIONS} <= set(OPERATORS)
