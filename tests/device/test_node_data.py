# SPDX-License-Identifier: Apache-2.0
"""What Model Explorer gets: its own classes read it, and its adapter knows the names."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from exactqat import deploy  # noqa: E402
from exactqat.deploy import Builder, per_tensor  # noqa: E402
from exactqat.deploy.beside_float import LayerBesideFloat  # noqa: E402
from exactqat.deploy.inspect import Inspection  # noqa: E402
from exactqat.deploy.node_data import node_data, write_node_data  # noqa: E402


@pytest.fixture(scope="module")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Inspection]:
    """A network in which devices round differently."""
    random = np.random.default_rng(0)
    builder = Builder()
    builder.input("x", (1, 8, 8, 3), per_tensor(0.02, 3))
    builder.conv_2d("x", random.integers(-127, 128, (8, 3, 3, 3)), [0.01] * 8, random.integers(-90, 90, 8),
                    per_tensor(0.05, -128), name="first", activation="RELU")  # fmt: skip
    builder.mean("first", per_tensor(0.04, -3), name="pooled")
    weights = random.integers(-127, 128, (4, 8))
    graph = builder.graph(
        [builder.fully_connected("pooled", weights, [0.1], [3, -4, 0, 1], per_tensor(0.1, 0), name="y")]
    )
    path = deploy.write_tflite(graph, tmp_path_factory.mktemp("node_data") / "m.tflite")
    inspection = deploy.inspect(path)
    noise = tuple(LayerBesideFloat(layer.result, layer.kind, "", 30.0 - at, None, None, 0.0, 0, 1)
                  for at, layer in enumerate(inspection.layers))  # fmt: skip
    return path, dataclasses.replace(inspection, beside_float=noise)


def test_a_file_for_each_kind_of_finding(inspected: tuple[Path, Inspection], tmp_path: Path) -> None:
    _, inspection = inspected
    written = write_node_data(inspection, tmp_path / "found.json")
    assert [path.name for path in written] == ["found-devices.json", "found-runtimes.json", "found-decibels.json"]
    contents: dict[str, Any] = {path.stem: json.loads(path.read_text()) for path in written}
    results = contents["found-devices"]["results"]
    assert inspection.disagreements and list(results) == [layer.result for layer in inspection.layers]
    for pair in inspection.disagreements:
        assert f"{' and '.join(pair.profiles)} differ in {pair.differing:,}" in results[pair.layer]["value"]
    firsts = {pair.layer for pair in inspection.disagreements}
    assert all(row["value"] == "no difference begins here" for name, row in results.items() if name not in firsts)
    assert {row["value"] for row in contents["found-runtimes"]["results"].values()} == {0}
    assert [row["value"] for row in contents["found-decibels"]["results"].values()] == [30, 29, 28]


def test_model_explorer_reads_it(inspected: tuple[Path, Inspection]) -> None:
    builder = pytest.importorskip("model_explorer.node_data_builder")
    adapters = pytest.importorskip("model_explorer.builtin_tflite_flatbuffer_adapter")
    path, inspection = inspected
    collection = adapters.BuiltinTfliteFlatbufferAdapter().convert(str(path), {})["graphCollections"][0]
    names = {
        attribute["value"]
        for node in collection.graphs[0]["nodes"]
        for output in node.get("outputsMetadata", [])
        for attribute in output["attrs"]
        if attribute["key"] == "tensor_name"
    }
    for content in node_data(inspection).values():
        assert set(content["results"]) <= names
        results = {name: builder.NodeDataResult(**row) for name, row in content["results"].items()}
        gradient = [builder.GradientItem(**stop) for stop in content.get("gradient", [])]
        own = builder.GraphNodeData(results=results, name=content["name"], gradient=gradient)
        assert {key: value for key, value in json.loads(own.to_json_string()).items() if value} == content
