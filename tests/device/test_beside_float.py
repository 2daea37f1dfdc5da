# SPDX-License-Identifier: Apache-2.0
"""A quantized file beside its float network, from the same converter and from elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from test_read_tflite import FILES

from exactqat import cli
from exactqat.deploy import Builder, Graph, per_tensor, write_tflite
from exactqat.deploy.beside_float import beside_float, collapse
from exactqat.deploy.formats.read_tflite import read_content
from exactqat.kit.device.operator import Refusal
from exactqat.kit.device.tensor import quantize


def test_the_converter_s_two_files() -> None:
    graph = read_content((FILES / "convolutions.float_ends.tflite").read_bytes()).graph
    real = np.random.default_rng(0).normal(size=(6, 10, 10, 3)).astype(np.float32)
    codes = {graph.inputs[0]: quantize(real, graph.tensors[graph.inputs[0]].quantization)}
    rows = beside_float(graph, codes, FILES / "convolutions.float32.tflite", "reference", 60)
    assert len(rows) == 6 and all(row.of for row in rows) and collapse(rows) is None
    for row in rows:
        assert row.cumulative is not None and row.own is not None and row.clipped is not None
        assert 30 < row.cumulative < 60 and 30 < row.own < 60 and row.clipped < 0.01 and 0 < row.wasted < 1
    # From float operands a layer has no noise of the layers before it.
    assert rows[1].own > rows[1].cumulative


def quantized(scale: float) -> tuple[Graph, np.ndarray]:
    """A convolution with a channel that is dead and one that is not, onto a grid of that scale; its weights."""
    builder = Builder()
    builder.input("x", (1, 6, 6, 2), per_tensor(1 / 32, 0))
    filter = np.zeros((2, 1, 1, 2), np.int64)
    filter[0] = 100, -60
    return builder.graph(
        [builder.conv_2d("x", filter, [0.01], [0, -900], per_tensor(scale, -128), name="y", activation="RELU")]
    ), filter * 0.01


def onnx_file(path: Path, weights: np.ndarray) -> Path:
    """The same in float32, with channels first."""
    onnx: Any = pytest.importorskip("onnx")
    helper, real = onnx.helper, onnx.TensorProto.FLOAT
    constants = [
        onnx.numpy_helper.from_array(weights.transpose(0, 3, 1, 2).astype(np.float32), "w"),
        onnx.numpy_helper.from_array(np.array([0, -900 * 0.01 / 32], np.float32), "b"),
    ]
    nodes = [helper.make_node("Conv", ["image", "w", "b"], ["c"]), helper.make_node("Relu", ["c"], ["other"])]
    ends = [[helper.make_tensor_value_info(name, real, [1, 2, 6, 6])] for name in ("image", "other")]
    model = helper.make_model(
        helper.make_graph(nodes, "g", *ends, constants), opset_imports=[helper.make_opsetid("", 17)]
    )
    model.ir_version = 8
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.slow
def test_a_network_of_another_framework(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    codes = {"x": np.random.default_rng(0).integers(-128, 128, (4, 6, 6, 2)).astype(np.int8)}
    good, weights = quantized(1 / 32)
    (row,) = beside_float(good, codes, onnx_file(tmp_path / "m.onnx", weights), "reference", 60)
    assert row.of == "other" and row.cumulative is not None and row.cumulative > 30
    assert (row.dead_channels, row.channels) == (1, 2) and row.clipped == 0
    coarse, _ = quantized(4.0)
    (row,) = rows = beside_float(coarse, codes, tmp_path / "m.onnx", "reference", 60)
    assert collapse(rows) == row and row.wasted > 0.9
    narrow, _ = quantized(1 / 512)
    (row,) = beside_float(narrow, codes, tmp_path / "m.onnx", "reference", 60)
    assert row.clipped is not None and row.clipped > 0.2


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    graph, weights = quantized(4.0)
    path = write_tflite(graph, tmp_path / "model.tflite")
    common = ["exactqat", "inspect", str(path), "--device", "reference", "--float"]
    monkeypatch.setattr(sys, "argv", [*common, str(onnx_file(tmp_path / "m.onnx", weights))])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    output = " ".join(capsys.readouterr().out.split())
    assert "The first layer below 10 dB beside the float network is CONV_2D 'y'" in output
    assert "dB so far" in output and "1 of 2" in output
    (tmp_path / "none.tflite").write_bytes(b"nothing")
    for other, words in ((path, "it must take 1 inputs in float32"), (tmp_path / "none.tflite", "not a .tflite file")):
        with pytest.raises(Refusal, match=words):
            beside_float(graph, {"x": np.zeros((1, 6, 6, 2), np.int8)}, other, "reference", 60)
