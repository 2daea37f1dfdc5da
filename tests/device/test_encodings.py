# SPDX-License-Identifier: Apache-2.0
"""Our grids in other tools' files: ONNX Runtime's own quantizer takes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from exactqat import deploy
from exactqat.deploy import Builder, Graph, per_tensor

SCALES = [0.01, 0.02, 0.005, 0.0125]


@pytest.fixture
def graph() -> Graph:
    builder = Builder()
    builder.input("x", (1, 8, 8, 3), per_tensor(0.02, 3))
    weights = np.random.default_rng(0).integers(-127, 128, (4, 3, 3, 3))
    builder.conv_2d("x", weights, SCALES, [0] * 4, per_tensor(0.05, -128), name="y")
    return builder.graph(["y"])


def test_aimet_counts_codes_from_zero(graph: Graph) -> None:
    encodings = deploy.aimet_encodings(graph, {"x": "image", "y/filter": "conv.weight"})
    assert json.loads(json.dumps(encodings)) == encodings
    (image,) = encodings["activation_encodings"]["image"]
    scale = float(np.float32(0.02))
    assert (image["bitwidth"], image["dtype"], image["is_symmetric"]) == (8, "int", "False")
    assert (image["scale"], image["offset"]) == (scale, -131)
    assert image["min"] == pytest.approx(-131 * scale) and image["max"] == pytest.approx(124 * scale)
    # The real number of code 0 to 255 is (code + offset) * scale.
    assert image["max"] == pytest.approx((255 + image["offset"]) * image["scale"])
    assert set(encodings["activation_encodings"]) == {"image"}
    rows = encodings["param_encodings"]["conv.weight"]
    assert [row["scale"] for row in rows] == [float(np.float32(scale)) for scale in SCALES]
    assert {(row["offset"], row["is_symmetric"]) for row in rows} == {(-128, "True")}


def test_onnx_runtime_quantizes_with_them(graph: Graph, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    quantization = pytest.importorskip("onnxruntime.quantization")
    runner = pytest.importorskip("onnxruntime.quantization.static_quantize_runner")
    helper, real = onnx.helper, np.random.default_rng(1).normal(0, 0.3, (4, 3, 3, 3)).astype(np.float32)
    nodes = [helper.make_node("Conv", ["image", "conv.weight"], ["result"])]
    ends = [helper.make_tensor_value_info(name, 1, shape) for name, shape in
            (("image", [1, 3, 8, 8]), ("result", [1, 4, 6, 6]))]  # fmt: skip
    weights = onnx.numpy_helper.from_array(real, "conv.weight")
    model = helper.make_model(
        helper.make_graph(nodes, "net", ends[:1], ends[1:], [weights]), opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )  # fmt: skip
    names = {"x": "image", "y": "result", "y/filter": "conv.weight"}
    (tmp_path / "overrides.json").write_text(json.dumps(deploy.onnxruntime_overrides(graph, names)))

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        left = 2

        def get_next(self) -> dict[str, np.ndarray] | None:
            self.left -= 1
            return {"image": np.ones((1, 3, 8, 8), np.float32)} if self.left >= 0 else None

    overrides = runner.get_tensor_quant_overrides(str(tmp_path / "overrides.json"))
    quantization.quantize_static(
        model, str(tmp_path / "q.onnx"), Reader(), per_channel=True, activation_type=quantization.QuantType.QUInt8,
        extra_options={"TensorQuantOverrides": overrides},
    )  # fmt: skip
    known = {
        entry.name: onnx.numpy_helper.to_array(entry) for entry in onnx.load(tmp_path / "q.onnx").graph.initializer
    }
    assert known["image_scale"] == np.float32(0.02) and known["image_zero_point"] == 131
    assert known["result_scale"] == np.float32(0.05) and known["result_zero_point"] == 0
    assert known["image_zero_point"].dtype == known["result_zero_point"].dtype == np.uint8
    np.testing.assert_array_equal(known["conv.weight_scale"], np.float32(SCALES))
    assert known["conv.weight_quantized"].dtype == np.int8
