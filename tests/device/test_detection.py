# SPDX-License-Identifier: Apache-2.0
"""What detectors of others' files end with, beside the runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from test_read_tflite import changed

from exactqat.deploy import Builder, Graph, per_tensor, profiles_here, simulate, write_c_array
from exactqat.deploy.formats.read_tflite import read_content
from exactqat.deploy.formats.tflite import tflite_bytes
from exactqat.deploy.inspect import inspect
from exactqat.deploy.runtimes import open_runtime
from exactqat.kit.device import Refusal
from exactqat.kit.device.tensor import INDICES

ANCHORS, CLASSES, MOST = 40, 3, 8
PLAIN: dict[str, Any] = {
    "most": MOST,
    "classes_of_a_box": 1,
    "classes": CLASSES,
    "scores_from": 0.3,
    "overlap_below": 0.5,
    "scales": (10.0, 10.0, 5.0, 5.0),
}


def head(background: int = 0, integers: bool = False, **attributes: Any) -> Graph:
    """Boxes and scores, in real numbers or from a grid, and the best of them."""
    rng, builder = np.random.default_rng(1), Builder()
    names = []
    for name, width, grid in (
        ("boxes", 4, per_tensor(0.03, 2)),
        ("scores", CLASSES + background, per_tensor(1 / 256, -128)),
    ):
        builder.input(name, (1, ANCHORS, width), grid if integers else None)
        names.append(builder.dequantize(name, INDICES, name=f"{name}/real") if integers else name)
    anchors = np.concatenate([rng.uniform(0.1, 0.9, (ANCHORS, 2)), rng.uniform(0.1, 0.4, (ANCHORS, 2))], 1)
    names.append(builder.bias("anchors", anchors.astype(np.float32), INDICES))
    builder.operator("DETECTION_POSTPROCESS", names, INDICES, name="found", **{**PLAIN, **attributes})
    return builder.graph(builder.results("found"))


CASES: list[dict[str, Any]] = [
    {},
    {"background": 1},
    {"classes_of_a_box": 2},
    {"classes_of_a_box": 2, "background": 1, "scores_from": 0.9},
    {"each_class": True, "most_of_a_class": 2},
    {"each_class": True, "background": 1},
    {"each_class": True, "scores_from": 0.95},
    {"scores_from": 0.95},
    {"overlap_below": 0.01},
    {"scores_from": 2.0},
]


@pytest.mark.parametrize("profile", profiles_here())
@pytest.mark.parametrize("case", CASES)
def test_detections_are_the_runtimes(case: dict[str, Any], profile: str) -> None:
    graph = head(**case)
    content = tflite_bytes(graph)
    assert tflite_bytes(read_content(content).graph) == content
    several = case.get("classes_of_a_box", 1)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        inputs = {
            "boxes": rng.normal(size=(1, ANCHORS, 4)).astype(np.float32),
            "scores": rng.uniform(size=graph.tensors["scores"].shape).astype(np.float32),
        }
        if profile == "micro" and several > 1:
            with pytest.raises(Refusal, match="beyond the end of its results"):
                simulate(graph, inputs, profile)
            continue
        device = open_runtime(content, graph.inputs, graph.outputs, profile).run(inputs)
        results = simulate(graph, inputs, profile)
        count = int(results["found:3"][0])
        assert device["found:3"].tolist() == [count]
        # What lies beyond these is not written.
        for name in graph.outputs[:3]:
            ours, theirs = (arrays[name][:, : count * several] for arrays in (results, device))
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6, err_msg=name)
        assert count == MOST or case


@pytest.mark.slow
def test_a_detector_is_inspected_up_to_its_tail(tmp_path: Path) -> None:
    path = tmp_path / "detector.tflite"
    path.write_bytes(tflite_bytes(head(integers=True)))
    report = inspect(path, examples=2, devices=["reference"])
    (device,) = (device for device in report.devices if device.values)
    assert report.equal and "4 operators" not in report.text() and "1 operator computes in float32" in report.text()
    assert {row.kind for row in device.operators if row.values} == {"DEQUANTIZE"}
    with pytest.raises(ValueError, match="must take and return integers, 'found' is float32"):
        write_c_array(head(integers=True), tmp_path / "detector.h")


def test_a_file_without_shapes_or_options() -> None:
    content = tflite_bytes(head())

    def no_shapes(model: Any) -> None:
        for at in model.subgraphs[0].outputs:
            model.subgraphs[0].tensors[at].shape = model.subgraphs[0].tensors[at].shapeSignature = None

    def no_options(model: Any) -> None:
        model.subgraphs[0].operators[0].customOptions = None

    def damaged_options(model: Any) -> None:
        model.subgraphs[0].operators[0].customOptions = np.full(40, 255, np.uint8)

    graph = read_content(changed(content, no_shapes)).graph
    assert [graph.tensors[name].shape for name in graph.outputs] == [(1, MOST, 4), (1, MOST), (1, MOST), (1,)]
    with pytest.raises(Refusal, match="DETECTION_POSTPROCESS: DETECTION_POSTPROCESS without its options"):
        read_content(changed(content, no_options))
    with pytest.raises(Refusal, match="cannot be read"):
        read_content(changed(content, damaged_options))
    for attributes, message in (
        ({"most": 0}, "most must be 1 or more"),
        ({"overlap_below": 0.0}, "overlap_below must be above 0 and at most 1"),
        ({"scales": (1.0, 1.0, 1.0)}, "scales must be four positive numbers"),
        ({"most": 1 << 20}, "the results must be 1 to 65536"),
        ({"classes": 5}, r"scores must be \[1, 40, 5\] or one more"),
    ):
        with pytest.raises(Refusal, match=message):
            head(**attributes)
