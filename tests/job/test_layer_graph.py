# SPDX-License-Identifier: Apache-2.0
"""The picture of a lowered network says what its graph says, whatever its branches and its length."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from exactqat.application.report import layer_graph  # noqa: E402
from exactqat.deploy import Builder, Graph, per_tensor  # noqa: E402

GRID = per_tensor(0.05, 3)


def network(blocks: int, module: str = "blocks.{}.") -> Graph:
    """A chain of residual blocks, each a convolution and a sum with what went into it."""
    builder = Builder()
    x = builder.input("input", (1, 6, 6, 4), GRID)
    rng = np.random.default_rng(0)
    for number in range(blocks):
        path = module.format(number)
        codes = rng.integers(-127, 128, (4, 3, 3, 4)).astype(np.int8)
        y = builder.conv_2d(
            x, codes, np.full(4, 0.01, np.float32), np.zeros(4, np.int32), GRID, name=f"{path}conv", activation="RELU6"
        )
        x = builder.add(x, y, GRID, name=f"{path}add")
    return builder.graph([x])


def test_every_operator_is_a_box_with_what_it_reads_and_its_share() -> None:
    graph = network(2)
    drawn = layer_graph.rows(graph, {"blocks.0.conv": "W4 A4"})
    assert [row.title for row in drawn] == ["input", "CONV_2D 3x3 + RELU6", "ADD", "CONV_2D 3x3 + RELU6", "ADD"]
    assert [row.sources for row in drawn] == [(), (0,), (0, 1), (2,), (2, 3)]
    assert [row.name for row in drawn[1:3]] == ["blocks.0.conv", "blocks.0.add"]
    assert drawn[1].bits == "W4 A4" and drawn[3].bits == "" and drawn[1].shape == "6x6x4"
    assert sum(row.work or 0 for row in drawn) == sum(map(graph.multiply_accumulates, graph.operators)) > 0
    picture = layer_graph.picture(graph, "all of it", {"blocks.0.conv": "W4 A4"})
    for said in ("CONV_2D 3x3 + RELU6", "W4 A4", "6x6x4 · 50.0%", "6x6x4 → output"):
        assert said in picture
    width, height = map(float, re.findall(r'viewBox="0 0 (\d+) (\d+)"', picture)[0])
    boxes = [[float(size) for size in box] for box in re.findall(
        r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', picture)]  # fmt: skip
    assert len(boxes) > 10 and all(x + wide <= width and y + high <= height for x, y, wide, high in boxes)


@pytest.mark.parametrize("sources", [[(), (0,), (0, 1), (2,), (2, 3)], [(), (0,), (0,), (0,), (1, 2, 3), (0, 4)]])
def test_no_tensor_runs_through_another_ones_box(sources: Sequence[tuple[int, ...]]) -> None:
    drawn = [layer_graph.Row("", str(n), "", "", 0, "#1f5fa8", read) for n, read in enumerate(sources)]
    places = layer_graph.ways(drawn)
    for number, row in enumerate(drawn):
        for source in row.sources:
            between = range(source + 1, number)
            assert places[source] not in [places[other] for other in between], (source, number, places)


@pytest.mark.parametrize(
    ("blocks", "module"), [(100, "blocks.{}."), (100, ""), (30, "a.{}.b."), (300, "stage.{}.deep.er.")]
)
def test_long_networks_become_modules_and_lose_nothing(blocks: int, module: str) -> None:
    graph = network(blocks, module or "layer{}_")
    drawn = layer_graph.rows(graph)
    assert len(drawn) <= layer_graph.MOST_ROWS + 1
    assert [name for row in drawn for name in row.operators] == list(graph.results())
    assert sum(row.work or 0 for row in drawn) == sum(map(graph.multiply_accumulates, graph.operators))
    assert all(source < number for number, row in enumerate(drawn) for source in row.sources)
    figure = layer_graph.picture(graph, "all of it")
    assert f"All {len(graph.operators):,} operators" in figure and figure.count("<svg") == 2


def test_modules_are_named() -> None:
    row = layer_graph.rows(network(25))[1]
    assert (row.title, row.name, row.sources) == ("2 operators: CONV_2D, ADD", "blocks.0", (0,))


def test_names_are_text() -> None:
    graph = network(1, "<script>&'\"\u202e" + "long" * 40 + ".")
    picture = layer_graph.picture(graph, "all of it")
    assert "<script>" not in picture and "\u202e" not in picture
    ElementTree.fromstring(picture)
