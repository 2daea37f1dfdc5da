# SPDX-License-Identifier: Apache-2.0
"""Made-up files on which devices disagree: why is found from the file alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from device_cases import NAMES, fully_connected_ties, random_codes, random_graph
from test_read_tflite import changed

from exactqat.deploy import PROFILES, Builder, Graph, per_tensor, profiles_here, simulate, write_tflite
from exactqat.deploy.formats.tflite import tflite_bytes, with_outputs
from exactqat.deploy.inspect import inspect
from exactqat.deploy.mechanism import mechanism_of
from exactqat.deploy.runtimes import open_runtime
from exactqat.kit.device.profile import MECHANISMS

Random = np.random.Generator


def convolution(rng: Random, scale: float) -> Graph:
    """Two layers that all devices compute alike, then a convolution onto a grid of that scale."""
    builder = Builder()
    builder.input("x", (1, 8, 8, 4), per_tensor(0.5, 0))
    builder.pad("x", [(0, 0), (1, 1), (1, 1), (0, 0)], name="padded")
    builder.max_pool_2d("padded", name="pooled", filter_size=(2, 2), strides=(1, 1))
    filter, bias = rng.integers(-1, 2, (6, 2, 2, 4)), rng.integers(-9, 10, 6)
    builder.conv_2d("pooled", filter, [0.25], bias, per_tensor(scale, 3), name="first", padding="VALID")
    return builder.graph([builder.mean("first", per_tensor(2 * scale, 0), name="y", axes=(1, 2))])


def ties(rng: Random) -> Graph:
    return convolution(rng, 0.25)


def no_ties(rng: Random) -> Graph:
    return convolution(rng, 25.3)


def mean(rng: Random) -> Graph:
    builder = Builder()
    builder.input("x", (1, 3, 2, 64), per_tensor(0.16432562, 70))
    return builder.graph([builder.mean("x", per_tensor(0.16432562, 12), name="y", axes=(1, 2))])


def product(rng: Random) -> Graph:
    builder = Builder()
    for name in ("x", "z"):
        builder.input(name, (1, 20, 20), per_tensor(0.25, 1))
    return builder.graph([builder.mul("x", "z", per_tensor(4, 2), name="y")])


def dense(rng: Random) -> Graph:
    builder = Builder()
    return builder.graph([fully_connected_ties(np.random.default_rng(1), builder)])


def sigmoid(rng: Random) -> Graph:
    builder = Builder()
    builder.input("x", (1, 256), per_tensor(5.1629415, -30))
    return builder.graph([builder.logistic("x", name="y")])


Case = tuple[Callable[[Random], Graph], tuple[str, str], tuple[str, ...], str]
CASES: dict[str, Case] = {
    "half to even or away": (ties, ("xnnpack-x86", "reference"), ("delegates",), "half to even or away from zero"),
    "two roundings": (no_ties, ("xnnpack-x86", "reference"), ("delegates",), "two roundings"),
    "fused": (mean, ("xnnpack-x86", "xnnpack-arm64"), ("fuses_multiply_add",), "fused multiply-add"),
    "half up": (product, ("xnnpack-x86", "xnnpack-arm64"), ("rounds_products_half_up",), "half up or to even"),
    "dense": (dense, ("reference", "micro"), ("fully_connected_in_float64",), "two roundings: TFLite-Micro"),
    "fixed point": (sigmoid, ("reference", "micro"), ("fixed_point_functions",), "a function in fixed point"),
}


def made(name: str) -> tuple[Graph, dict[str, np.ndarray]]:
    """The graph, and codes at which its devices part."""
    rng = np.random.default_rng(3)
    graph = CASES[name][0](rng)
    codes = {}
    for source in graph.inputs:
        tensor = graph.tensors[source]
        reach = 12 if name == "half to even or away" else 128
        values = rng.integers(-reach, reach, (6, *tensor.shape[1:])) + (0 if reach == 128 else 3)
        codes[source] = np.zeros_like(values) if name == "dense" else values
        if name == "fixed point":
            codes[source] = np.arange(-128, 128)[None]
    return graph, {source: values.astype(np.int8) for source, values in codes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_mechanism_is_found_from_the_file(name: str, tmp_path: Path) -> None:
    graph, codes = made(name)
    _, pair, properties, words = CASES[name]
    inspection = inspect(write_tflite(graph, tmp_path / "model.tflite"), codes, devices=["reference"])
    finding = next(finding for finding in inspection.disagreements if finding.profiles == pair)
    assert finding.layer == ("first" if len(graph.operators) > 1 else "y")
    assert finding.mechanism.properties == properties
    assert words in finding.mechanism.sentence
    if name in ("half to even or away", "half up"):
        assert finding.mechanism.ties == finding.mechanism.differing
    if name == "two roundings":
        assert finding.mechanism.ties == 0
    text = " ".join(inspection.text().split())
    assert f"{words[0].upper()}{words[1:]}" in text


def test_xnnpack_leaves_constants_of_subnormal_scale_to_other_kernels() -> None:
    """Why such files are refused: LiteRT then rounds this layer as its own kernels do."""
    if "xnnpack-x86" not in profiles_here():
        pytest.skip("another processor")
    graph, codes = made("half to even or away")

    def subnormal(model: Any) -> None:
        names = [tensor.name.decode() for tensor in model.subgraphs[0].tensors]
        grid = model.subgraphs[0].tensors[names.index("first/bias")].quantization
        grid.scale = np.full_like(grid.scale, 1e-39)

    content = tflite_bytes(graph)
    built_in = replace(PROFILES["xnnpack-x86"], delegates=False)
    for file, profile, other in (
        (content, PROFILES["xnnpack-x86"], built_in),
        (changed(content, subnormal), built_in, PROFILES["xnnpack-x86"]),
    ):
        parts = []
        for example in range(len(codes["x"])):
            runtime = open_runtime(with_outputs(file, ("first",)), graph.inputs, ("first",), "xnnpack-x86", True)
            parts.append(runtime.run({"x": codes["x"][example : example + 1]})["first"])
        results = np.concatenate(parts)
        np.testing.assert_array_equal(results, simulate(graph, codes, profile, ["first"])["first"])
        assert np.any(results != simulate(graph, codes, other, ["first"])["first"])


@pytest.mark.slow
def test_every_difference_of_the_sweep_has_a_mechanism() -> None:
    """In random graphs of every operator, some set of properties explains all codes that differ."""
    rng = np.random.default_rng(0)
    explained = set()
    for kind in NAMES:
        for _ in range(3):
            graph = random_graph(rng, kind)
            codes = random_codes(rng, graph)
            if len(graph.operators) > 1:
                continue
            codes |= graph.initial_state(len(next(iter(codes.values()))))
            for first in PROFILES:
                for second in PROFILES:
                    try:
                        reason = mechanism_of(graph, graph.operators[-1], codes, first, second)
                    except ValueError:  # codes at which a runtime dies
                        continue
                    if reason is not None:
                        assert reason.properties and set(reason.properties) <= set(MECHANISMS), (kind, first, second)
                        explained.update(reason.properties)
    assert len(explained) >= 6
