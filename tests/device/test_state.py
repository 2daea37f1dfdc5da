# SPDX-License-Identifier: Apache-2.0
"""Networks with variables: what lasts from call to call is what the runtimes keep."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from exactqat import deploy
from exactqat.deploy import (
    PROFILES,
    Builder,
    Graph,
    inspect,
    per_tensor,
    profiles_here,
    read_tflite,
    reduce,
    simulate,
    verify,
    write_tflite,
)
from exactqat.deploy.runtimes import open_runtime
from exactqat.device import Refusal

FILES = Path(__file__).parents[1] / "goldens" / "files"
GATES = ("input", "forget", "cell", "output")


def lstm(builder: Builder, x: str, units: int, name: str, seed: int = 0) -> str:
    """One LSTM, whatever the length of the sequence."""
    rng, tensor = np.random.default_rng(seed), builder.tensor(x)
    grid, operands = per_tensor(2.0**-7, 3), [x]
    for what, width in (("x", tensor.shape[2]), ("hidden", units)):
        for gate in GATES:
            codes = rng.integers(-127, 128, (units, width)).astype(np.int8)
            operands.append(builder.constant(f"{name}/{what}/{gate}", codes, per_tensor(0.02, 0)))
    for gate in GATES:
        bias = rng.integers(-900, 900, units).astype(np.int32)
        scale = tensor.quantization.scale[0] * np.float32(0.02)
        operands.append(builder.bias(f"{name}/bias/{gate}", bias, per_tensor(scale, 0)))
    operands.append(builder.variable(f"{name}/hidden", (1, units), grid))
    operands.append(builder.variable(f"{name}/cell", (1, units), per_tensor(2.0**-12, 0, "int16")))
    hidden = {"hidden_scale": 2.0**-7, "hidden_zero_point": 3}
    return builder.operator("UNIDIRECTIONAL_SEQUENCE_LSTM", operands, grid, name=name, **hidden)


def sequence(moments: int) -> Graph:
    """Two LSTMs and a layer after them, over so many moments."""
    builder = Builder()
    x = builder.input("x", (1, moments, 6), per_tensor(0.03, -4))
    y = lstm(builder, lstm(builder, x, 8, "first"), 5, "second", 1)
    weights = np.random.default_rng(2).integers(-127, 128, (3, 5))
    return builder.graph([builder.fully_connected(y, weights, [0.01], [5, -6, 7], per_tensor(0.02, 1), name="y")])


def wake_word() -> Graph:
    """A layer, two SVDFs, a layer: a frame at a time."""
    rng, builder = np.random.default_rng(3), Builder()
    x = builder.input("x", (1, 10), per_tensor(0.05, -3))
    y = builder.fully_connected(x, rng.integers(-127, 128, (8, 10)), [0.01], [0] * 8, per_tensor(0.06, -128), name="f")
    for number, (filters, rank, memory) in enumerate([(12, 2, 5), (8, 1, 8)]):
        width = builder.tensor(y).shape[1]
        grid = builder.tensor(y).quantization
        operands = [
            y,
            builder.constant(f"{number}/features", rng.integers(-127, 128, (filters, width)).astype(np.int8),
                             per_tensor(0.01, 0)),
            builder.constant(f"{number}/time", rng.integers(-3000, 3000, (filters, memory)).astype(np.int16),
                             per_tensor(2.0**-13, 0, "int16")),
            builder.bias(f"{number}/bias", rng.integers(-90, 90, filters // rank).astype(np.int32),
                         per_tensor(np.float32(grid.scale[0] * 0.004 * 2.0**-13), 0)),
            builder.variable(f"{number}/state", (1, filters * memory),
                             per_tensor(np.float32(grid.scale[0] * 0.004), 0, "int16")),
        ]  # fmt: skip
        y = builder.operator("SVDF", operands, per_tensor(0.05, -128), name=f"svdf_{number}", rank=rank)
    weights = rng.integers(-127, 128, (3, 8))
    return builder.graph([builder.fully_connected(y, weights, [0.01], [0, 1, 2], per_tensor(0.1, 0), name="y")])


def frames(graph: Graph, count: int, streams: int = 1) -> np.ndarray:
    shape = graph.tensors[graph.inputs[0]].shape[1:]
    return np.random.default_rng(7).integers(-128, 128, (count, streams, *shape)).astype(np.int8)


@pytest.mark.parametrize("profile", profiles_here())
@pytest.mark.parametrize("make", [wake_word, lambda: sequence(1), lambda: sequence(4)])
def test_calls_in_sequence_are_the_runtimes(make: Any, profile: str, tmp_path: Path) -> None:
    graph = make()
    path = write_tflite(graph, tmp_path / "stream.tflite")
    codes = frames(graph, 12)
    report = verify(graph, path, codes[:, 0], profile)
    assert report.values > 0 and report.differing == 0
    runtime = open_runtime(path.read_bytes(), graph.inputs, graph.outputs, profile)
    state: dict[str, np.ndarray] = {}
    for frame in codes:
        expected = runtime.run({"x": frame})["y"]
        np.testing.assert_array_equal(simulate(graph, frame, profile, state=state)["y"], expected)
    assert set(state) == set(graph.variables)


@pytest.mark.parametrize("profile", PROFILES)
def test_frames_of_a_stream_are_the_whole_sequence(profile: str) -> None:
    whole, single = sequence(9), sequence(1)
    codes = frames(whole, 1, 3)[0]
    state: dict[str, np.ndarray] = {}
    parts = [simulate(single, codes[:, at : at + 1], profile, state=state)["y"] for at in range(9)]
    np.testing.assert_array_equal(np.concatenate(parts, 1), simulate(whole, codes, profile)["y"])
    # Three streams side by side are three by themselves.
    for stream in range(3):
        alone = simulate(whole, codes[stream : stream + 1], profile)["y"]
        np.testing.assert_array_equal(alone[0], np.concatenate(parts, 1)[stream])


def test_without_a_state_every_call_is_the_first() -> None:
    graph = wake_word()
    first, second = frames(graph, 2)
    state: dict[str, np.ndarray] = {}
    begun = simulate(graph, first, state=state)["y"]
    kept = {name: array.copy() for name, array in state.items()}
    later = simulate(graph, second, state=state)["y"]
    np.testing.assert_array_equal(simulate(graph, first)["y"], begun)
    assert not np.array_equal(simulate(graph, second)["y"], later)
    np.testing.assert_array_equal(simulate(graph, second, state=kept)["y"], later)
    assert all(np.array_equal(array, graph.initial_state()[name]) is False for name, array in state.items())


def test_a_state_that_does_not_fit_is_refused() -> None:
    graph = wake_word()
    (frame,) = frames(graph, 1)
    with pytest.raises(ValueError, match=r"state names \['y'\], which are no variables of the graph"):
        simulate(graph, frame, state={"y": frame})
    with pytest.raises(ValueError, match=r"the state of '0/state' must be int16 \[1, 60\], got int16 \[2, 60\]"):
        simulate(graph, frame, state=graph.initial_state(2))
    with pytest.raises(ValueError, match="codes names '0/state', which is no activation of the graph"):
        deploy.compile(graph).run({"x": frame, "0/state": graph.initial_state()["0/state"]})


def test_a_variable_has_its_place() -> None:
    builder = Builder()
    builder.input("x", (1, 4), per_tensor(0.1, 0))
    builder.variable("kept", (1, 4), per_tensor(0.1, 0))
    with pytest.raises(Refusal, match="'kept' must not be a variable"):
        builder.graph([builder.add("x", "kept", per_tensor(0.2, 0), name="y")])
    builder = Builder()
    builder.input("x", (1, 4), per_tensor(0.1, 0))
    builder.variable("kept", (1, 4), per_tensor(0.1, 0))
    with pytest.raises(Refusal, match="variable 'kept': must be one operand of one operator, got 0"):
        builder.graph([builder.reshape("x", (1, 4), name="y")])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm.int8", "lstm_sequences.float_ends"])
def test_kerass_lstm_from_tensorflows_converter(name: str) -> None:
    """In the second one a cell is so small that LiteRT leaves its tanh out."""
    graph = read_tflite(FILES / f"{name}.tflite")
    assert any(operator.kind == "UNIDIRECTIONAL_SEQUENCE_LSTM" for operator in graph.operators)
    found = inspect(FILES / f"{name}.tflite", examples=3)
    assert set(found.ran_on) == set(profiles_here()) and found.equal
    assert all(device.differing == 0 for device in found.devices)


@pytest.mark.slow
def test_a_network_with_variables_is_not_reduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["exactqat.deploy.reduce"], "_sought", lambda found: object())
    path = write_tflite(wake_word(), tmp_path / "stream.tflite")
    with pytest.raises(Refusal, match="a network with variables cannot be reduced"):
        reduce(path, tmp_path / "reduced", examples=1)
