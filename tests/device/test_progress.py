# SPDX-License-Identifier: Apache-2.0
"""Evaluations of many images say how far they are, and take the memory of a few."""

from __future__ import annotations

import dataclasses
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from exactqat import deploy
from exactqat.deploy import Builder, Graph, per_tensor
from exactqat.kit import progress

GRID = per_tensor(1 / 16, 3)
# Of an image and of what a network of this width stores of it.
SIZE, CHANNELS = 32, 16


def network() -> Graph:
    """Three convolutions, and one number for each channel."""
    rng, builder = np.random.default_rng(0), Builder()
    layer, inputs = builder.input("x", (1, SIZE, SIZE, 3), GRID), 3
    for number in range(3):
        filter = rng.integers(-127, 128, (CHANNELS, 3, 3, inputs)).astype(np.int8)
        scale, bias = np.full(CHANNELS, 1 / 500, np.float32), np.zeros(CHANNELS, np.int32)
        layer = builder.conv_2d(layer, filter, scale, bias, GRID, name=f"conv{number}")
        inputs = CHANNELS
    return builder.graph([builder.mean(layer, GRID, name="y", axes=(1, 2))])


def images(count: int) -> np.ndarray:
    return np.random.default_rng(1).integers(-128, 128, (count, SIZE, SIZE, 3)).astype(np.int8)


def peak(call: Callable[[], object]) -> int:
    """Bytes that a call has at a time."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_simulation_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    graph, seen = network(), []
    deploy.simulate(graph, images(20), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(8, 20), (16, 20), (20, 20)]
    deploy.simulate(graph, images(3))
    deploy.simulate(graph, images(3), progress=False)
    assert capsys.readouterr().err == ""
    deploy.simulate(graph, images(3), progress=True)
    assert capsys.readouterr().err.startswith("\rsimulating xnnpack-")
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    deploy.simulate(graph, images(3))
    assert capsys.readouterr().err == ""  # it took a moment only
    monkeypatch.setattr(progress, "AWHILE", 0.0)
    deploy.simulate(graph, images(3))
    assert f"[{'#' * progress.BAR}]" in capsys.readouterr().err


def test_a_log_has_whole_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    deploy.simulate(network(), images(20))
    assert capsys.readouterr().err == ""  # it took a moment only
    monkeypatch.setattr(progress, "LOG_PAUSE", 0.0)
    monkeypatch.setattr(progress, "AWHILE", 0.0)
    deploy.simulate(network(), images(20))
    lines = capsys.readouterr().err
    assert re.fullmatch(r"(simulating \S+: \d+%, \d+ s left, \d+ s so far\n){3}", lines) and "100%" in lines


def test_a_simulation_of_many_images_takes_the_memory_of_a_few() -> None:
    graph = network()
    deploy.simulate(graph, images(16))  # what is packed stays
    few, many = images(16), images(160)
    small, large = (peak(lambda x=x: deploy.simulate(graph, x)) for x in (few, many))
    assert large - small < 144 * SIZE * SIZE  # less than a tenth of what one layer stores of them


def test_verifying_many_images_takes_the_memory_of_a_few(tmp_path: Path) -> None:
    """Also where each is compared with what was trained for another device, all layers of it."""
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    graph = dataclasses.replace(network(), trained_for="reference")
    path = deploy.write_tflite(graph, tmp_path / "model.tflite")
    report = deploy.verify(graph, path, images(16), "xnnpack", progress=False)
    assert report.training and sum(row.values for row in report.training) == 16 * (3 * SIZE * SIZE + 1) * CHANNELS
    small, large = (peak(lambda x=x: deploy.verify(graph, path, x, "xnnpack")) for x in (images(64), images(144)))
    assert large - small < 80 * SIZE * SIZE * CHANNELS
