# SPDX-License-Identifier: Apache-2.0
"""Networks with variables: what lasts from call to call is what the runtimes keep."""

from __future__ import annotations

import copy
import importlib
import sys
from dataclasses import replace
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
from exactqat.deploy.formats.tflite import tflite_bytes
from exactqat.deploy.runtimes import open_runtime
from exactqat.kit.device import Refusal

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


def echo(dtype: str = "int8") -> Graph:
    """A sum with what it was before, and what the input was two calls ago."""
    grid, other = (per_tensor(0.05, 3), per_tensor(0.1, -7)) if dtype == "int8" else [per_tensor(0.004, 0, dtype)] * 2
    begun = np.random.default_rng(3).integers(-100, 100, (1, 2, 5)).astype(dtype)
    builder = Builder()
    x = builder.input("x", (1, 2, 5), grid)
    before = builder.variable("before", (1, 2, 5), other, successor="sum", initial=begun)
    builder.variable("last", (1, 2, 5), grid, successor="x")
    older = builder.variable("older", (1, 2, 5), grid, successor="last")
    y = builder.add(builder.add(x, before, other, name="with_before"), older, other, name="sum")
    return builder.graph([builder.add(y, "last", per_tensor(0.2, 5, dtype) if dtype == "int8" else other, name="y")])


@pytest.mark.parametrize("profile", profiles_here())
@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_variables_with_successors_are_the_runtimes(dtype: str, profile: str, tmp_path: Path) -> None:
    graph = echo(dtype)
    path = write_tflite(graph, tmp_path / "echo.tflite")
    again = read_tflite(path)
    assert tflite_bytes(again) == path.read_bytes() and again.variables == graph.variables
    codes = np.random.default_rng(8).integers(-128, 128, (9, 1, 2, 5)).astype(dtype)
    report = verify(again, path, codes[:, 0], profile)
    assert report.values == 9 * 30 + 9 * 10 and report.differing == 0
    runtime = open_runtime(path.read_bytes(), graph.inputs, graph.outputs, profile)
    state: dict[str, np.ndarray] = {}
    sums = []
    for number, frame in enumerate(codes):
        expected = runtime.run({"x": frame})["y"]
        np.testing.assert_array_equal(simulate(again, frame, profile, state=state)["y"], expected)
        sums.append(state["before"])
        np.testing.assert_array_equal(state["last"], frame)
        if number:
            np.testing.assert_array_equal(state["older"], codes[number - 1])
    assert len({total.tobytes() for total in sums}) == len(sums)


def test_streams_side_by_side_keep_variables_of_their_own() -> None:
    graph = echo()
    codes = frames(graph, 20, 3)
    state: dict[str, np.ndarray] = {}
    together = [simulate(graph, frame, state=state, batch_size=2)["y"] for frame in codes]
    for stream in range(3):
        alone: dict[str, np.ndarray] = {}
        for number, frame in enumerate(codes):
            result = simulate(graph, frame[stream : stream + 1], state=alone)["y"]
            np.testing.assert_array_equal(result[0], together[number][stream])
    # What is wanted of a call changes nothing in what is kept.
    other: dict[str, np.ndarray] = {}
    for frame in codes:
        simulate(graph, frame, tensors=["with_before"], state=other)
    assert all(np.array_equal(other[name], state[name]) for name in graph.variables)
    assert np.array_equal(simulate(graph, codes[0])["y"], together[0])


def changed_file(graph: Graph, change: Any) -> bytes:
    """A graph's file with something else in it."""
    schema = importlib.import_module("ai_edge_litert.schema_py_generated")
    model = schema.ModelT.InitFromPackedBuf(tflite_bytes(graph))
    codes = {code.builtinCode: number for number, code in enumerate(model.operatorCodes)}

    def operators(subgraph: Any, word: str) -> list[Any]:
        number = codes[getattr(schema.BuiltinOperator, word)]
        return [operator for operator in subgraph.operators if operator.opcodeIndex == number]

    change(model, operators)
    builder = importlib.import_module("flatbuffers").Builder(1 << 16)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def without_first_values(model: Any, operators: Any) -> None:
    model.subgraphs[1].operators = model.subgraphs[1].operators[2:]


def uncalled(model: Any, operators: Any) -> None:
    model.subgraphs[0].operators.remove(operators(model.subgraphs[0], "CALL_ONCE")[0])


def called_too_late(model: Any, operators: Any) -> None:
    call = operators(model.subgraphs[0], "CALL_ONCE")[0]
    model.subgraphs[0].operators.remove(call)
    model.subgraphs[0].operators.append(call)


def computing(model: Any, operators: Any) -> None:
    add = copy.copy(operators(model.subgraphs[0], "ADD")[0])
    model.subgraphs[1].tensors.append(copy.copy(model.subgraphs[0].tensors[add.outputs[0]]))
    add.inputs, add.outputs = [1, 1], [len(model.subgraphs[1].tensors) - 1]
    model.subgraphs[1].operators.append(add)


def on_another_grid(model: Any, operators: Any) -> None:
    index = operators(model.subgraphs[0], "READ_VARIABLE")[0].outputs[0]
    model.subgraphs[0].tensors[index].quantization.scale = [0.3]


def no_handle(model: Any, operators: Any) -> None:
    operators(model.subgraphs[0], "READ_VARIABLE")[0].inputs = [0]


def read_too_late(model: Any, operators: Any) -> None:
    main = model.subgraphs[0]
    read = operators(main, "READ_VARIABLE")[0]
    main.operators.remove(read)
    main.operators.append(read)


def assigned_too_early(model: Any, operators: Any) -> None:
    main = model.subgraphs[0]
    assign = operators(main, "ASSIGN_VARIABLE")[0]
    main.operators.remove(assign)
    main.operators.insert(main.operators.index(operators(main, "ADD")[0]), assign)


def read_into_one(model: Any, operators: Any) -> None:
    first, second, *_ = operators(model.subgraphs[0], "READ_VARIABLE")
    second.outputs = first.outputs


def read_as_an_output(model: Any, operators: Any) -> None:
    main = model.subgraphs[0]
    main.outputs = [*main.outputs, operators(main, "READ_VARIABLE")[0].outputs[0]]


def of_a_constant(model: Any, operators: Any) -> None:
    main = model.subgraphs[0]
    from_x = [operator for operator in operators(main, "ASSIGN_VARIABLE") if operator.inputs[1] == main.inputs[0]]
    main.operators.remove(from_x[0])  # then 'last' stays what it begins with


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_first_values, "variable 'before' is read before it is assigned"),
        (uncalled, "variable 'before' is read before it is assigned"),
        (called_too_late, "it uses variables before the subgraph runs that assigns their first values"),
        (computing, "its subgraph 'first_values', which runs once, has ADD"),
        (on_another_grid, "variable 'before' is read as .* and assigned"),
        (no_handle, "'x' is no variable"),
        (read_too_late, "tensor 'before' is read before it is computed"),
        (assigned_too_early, "tensor 'sum' is read before it is computed"),
        (read_into_one, "tensor 'before' is written twice"),
        (read_as_an_output, "output 'before' is what a variable holds"),
        (of_a_constant, "variable 'older' is assigned a constant in every call"),
    ],
)
def test_a_files_variables_that_a_graph_cannot_have_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "changed.tflite"
    path.write_bytes(changed_file(echo(), change))
    with pytest.raises(Refusal, match=message):
        read_tflite(path)


@pytest.mark.parametrize("profile", profiles_here())
def test_a_variable_that_is_read_again_after_it_is_assigned(profile: str, tmp_path: Path) -> None:
    """The second value is the new one; and a variable that nobody assigns is a constant."""

    def change(model: Any, operators: Any) -> None:
        main = model.subgraphs[0]
        first = operators(main, "READ_VARIABLE")[0]
        second, tensor = copy.copy(first), copy.copy(main.tensors[first.outputs[0]])
        tensor.name = b"again"
        main.tensors.append(tensor)
        second.outputs = [len(main.tensors) - 1]
        last = next(step for step in operators(main, "ADD") if step.outputs[0] == main.outputs[0])
        last.inputs = [len(main.tensors) - 1, last.inputs[1]]
        assign = next(step for step in operators(main, "ASSIGN_VARIABLE") if step.inputs[0] == first.inputs[0])
        others = [step for step in main.operators if step is not last and step is not assign]
        names = [tensor.name for tensor in main.tensors]
        older = next(step for step in operators(main, "ASSIGN_VARIABLE") if step.inputs[1] == names.index(b"last"))
        main.operators = [step for step in (*others, assign, second, last) if step is not older]

    path = tmp_path / "again.tflite"
    path.write_bytes(changed_file(echo(), change))
    graph = read_tflite(path)
    assert set(graph.variables) == {"before", "last"} and graph.tensors["older"].data is not None
    runtime = open_runtime(path.read_bytes(), graph.inputs, graph.outputs, profile)
    state: dict[str, np.ndarray] = {}
    for frame in frames(graph, 6):
        np.testing.assert_array_equal(simulate(graph, frame, profile, state=state)["y"], runtime.run({"x": frame})["y"])


@pytest.mark.parametrize("profile", profiles_here())
def test_variables_whose_first_axis_is_no_batch(profile: str, tmp_path: Path) -> None:
    def change(model: Any, operators: Any) -> None:
        for tensor in (tensor for subgraph in model.subgraphs for tensor in subgraph.tensors):
            if tensor.shape is not None and len(tensor.shape) == 3:
                tensor.shape, tensor.shapeSignature = tensor.shape[1:], None

    path = tmp_path / "without.tflite"
    path.write_bytes(changed_file(echo(), change))
    graph = read_tflite(path)
    assert set(graph.variables) == {"before", "last", "older"}
    runtime = open_runtime(path.read_bytes(), graph.inputs, graph.outputs, profile)
    state: dict[str, np.ndarray] = {}
    for frame in frames(graph, 6):
        result = runtime.run({"x": frame[0]})["y"]
        np.testing.assert_array_equal(simulate(graph, frame, profile, state=state)["y"][0], result)


@pytest.mark.parametrize("change", [
    {"shape": (1, 5)}, {"quantization": per_tensor(0.3, 1)}, {"successor": "nothing"}, {"initial": np.zeros((1, 2, 5))},
])  # fmt: skip
def test_a_successor_that_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    graph = echo()
    tensors = {**graph.tensors, "before": replace(graph.tensors["before"], **change)}
    with pytest.raises(ValueError, match="'before'"):
        replace(graph, tensors=tensors).validate()


def test_what_has_no_variables_says_so(tmp_path: Path) -> None:
    graph = echo()
    with pytest.raises(Refusal, match="ONNX has no variables, and the graph keeps before, last, older"):
        deploy.write_onnx(graph, tmp_path / "echo.onnx")
    with pytest.raises(Refusal, match="the network is a stream already: it keeps before, last, older"):
        deploy.stream(graph)


@pytest.mark.parametrize("name", ["fixed_batch", "float_ends"])
def test_a_wake_word_of_tensorflows_converter(name: str) -> None:
    """Its variables hold codes, or real numbers, and begin with others than 0."""
    graph = read_tflite(FILES / f"streamed.{name}.tflite")
    begun = [graph.tensors[variable] for variable in graph.variables]
    assert len(begun) == 3 and all(np.ptp(tensor.initial) > 0 for tensor in begun)
    assert {tensor.dtype for tensor in begun} == {"int8" if name == "fixed_batch" else "float32"}
    report = inspect(FILES / f"streamed.{name}.tflite", examples=6)
    assert set(report.ran_on) == set(profiles_here()) and report.equal
    counts = [(device.values, device.differing) for device in report.devices if device.values]
    assert len(counts) == len(report.ran_on) and all(values > 1000 and not differing for values, differing in counts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm.int8", "lstm_sequences.float_ends"])
def test_kerass_lstm_from_tensorflows_converter(name: str) -> None:
    """In the second one a cell is so small that LiteRT leaves its tanh out."""
    graph = read_tflite(FILES / f"{name}.tflite")
    assert any(operator.kind == "UNIDIRECTIONAL_SEQUENCE_LSTM" for operator in graph.operators)
    inspection = inspect(FILES / f"{name}.tflite", examples=3)
    assert set(inspection.ran_on) == set(profiles_here()) and inspection.equal
    assert all(device.differing == 0 for device in inspection.devices)


@pytest.mark.slow
def test_a_network_with_variables_is_not_reduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["exactqat.deploy.reduce"], "_sought", lambda inspection: object())
    path = write_tflite(wake_word(), tmp_path / "stream.tflite")
    with pytest.raises(Refusal, match="a network with variables cannot be reduced"):
        reduce(path, tmp_path / "reduced", examples=1)
