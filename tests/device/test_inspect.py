# SPDX-License-Identifier: Apache-2.0
"""Files of others, inspected: equal on the runtimes that are here, and a difference is found."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from ai_edge_litert import schema_py_generated as schema
from damaged_files import cases
from test_read_tflite import FILES, READ

from exactqat import cli
from exactqat.deploy import Builder, per_tensor, profiles_here, random_inputs, read_tflite, simulate
from exactqat.deploy.formats.read_tflite import UnsupportedFile
from exactqat.deploy.formats.tflite import IDENTIFIER, tflite_bytes
from exactqat.deploy.inspect import inspect, refused_as_json
from exactqat.deploy.random_inputs import differing_examples, random_codes
from exactqat.deploy.runtimes.trial import RuntimeRefusal, forking, try_in_a_child
from exactqat.kit.device import Refusal
from exactqat.kit.device.tensor import INDICES


@pytest.mark.parametrize("name", READ)
def test_files_of_others_run_as_simulated(name: str) -> None:
    inspection = inspect(FILES / f"{name}.tflite", examples=2)
    here = [device for device in inspection.devices if device.profile in profiles_here()]
    # TFLite-Micro and LiteRT's reference kernels lack the TILE of this version; TFLite-Micro also shapes' product, EXP
    # of codes, ONE_HOT, a choice between indices, and shapes and states that follow from an open batch.
    choice = "|TFLite-Micro fails to run the file: Interpreter invocation" if name.startswith("embedded") else ""
    lacking = re.compile(
        rf"Didn't find op for builtin opcode '(TILE|REDUCE_PROD|ONE_HOT)'|(exp|fill)\.cc|it takes \[1, 6, 6, 3\]"
        rf"{choice}"
    )
    assert all(lacking.search(device.not_run) for device in here if device.not_run)
    ran = [device for device in here if not device.not_run]
    assert ran and all(device.values and not device.differing for device in ran)
    assert inspection.equal and json.loads(inspection.as_json())["equal"]
    assert max(map(len, inspection.text(80).splitlines())) <= 80


@pytest.mark.slow
def test_data_are_codes_or_real_numbers() -> None:
    path = FILES / "convolutions.float_ends.tflite"
    real = np.random.default_rng(0).normal(size=(3, 10, 10, 3)).astype(np.float32)
    assert inspect(path, real, devices=["reference"]).examples == 3
    assert inspect(path, real.astype(np.int64), devices=["reference"]).examples == 3  # numbers, as docs/data.md says
    with pytest.raises(ValueError, match="the network's inputs are"):
        inspect(path, {"other": real})
    with pytest.raises(Refusal, match="control flow"):
        inspect(FILES / "loop.int8.tflite")


def test_what_would_take_all_memory_or_hours_is_refused(tmp_path: Path) -> None:
    """Small files."""
    builder = Builder()
    builder.input("x", (1, 4, 4, 1), per_tensor(0.1, 0))
    wide = builder.graph([builder.pad("x", ((0, 0), (0, 2**15), (0, 2**15), (0, 0)), name="y")])
    builder = Builder()
    builder.input("x", (1, 2**12, 2**12, 8), per_tensor(0.1, 0))
    filter = np.ones((8, 64, 64, 8), np.int8)
    grids = np.ones(8, np.float32), np.zeros(8, np.int32), per_tensor(100.0, 0)
    slow = builder.graph([builder.conv_2d("x", filter, *grids, name="y", padding="SAME")])
    for graph, message in ((wide, "has 1,074,004,000 bytes of results"), (slow, "multiply-accumulates")):
        path = tmp_path / "small.tflite"
        path.write_bytes(tflite_bytes(graph))
        assert path.stat().st_size < 500_000
        with pytest.raises(Refusal, match=message):
            inspect(path)


def _hang_with_a_child() -> None:
    if os.fork() == 0:
        time.sleep(60)
    time.sleep(60)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("way", [nullcontext, forking])
def test_what_a_process_started_ends_with_it(way: Callable[[], AbstractContextManager[None]]) -> None:
    start = time.monotonic()
    with way():
        with pytest.raises(RuntimeRefusal, match="longer than 1 seconds"):
            try_in_a_child(_hang_with_a_child, seconds=1)
        assert time.monotonic() - start < 30
        with pytest.raises(RuntimeRefusal, match="SIGKILL"):  # and others start after it
            try_in_a_child(signal.raise_signal, signal.SIGKILL)


@pytest.mark.slow
def test_damaged_files_are_refused_or_inspected(tmp_path: Path) -> None:
    """As tests/campaigns/fuzz_files.py does, a few of them."""
    path, answers = tmp_path / "damaged.tflite", []
    for content in cases(3, 20):
        path.write_bytes(content)
        try:
            inspection = inspect(path, examples=1, devices=["reference"], seconds=60)
            answers.append(inspection.text() + inspection.as_json())
        except (Refusal, RuntimeError) as error:
            answers.append(str(error))
    assert len(answers) == 20 and all(answers)


def test_examples_that_differ_show_what_the_first_ones_miss() -> None:
    graph = read_tflite(FILES / "convolutions.int8.tflite")
    devices = ("xnnpack-x86", "xnnpack-arm64", "reference", "micro")

    def differing(codes: dict[str, np.ndarray]) -> set[tuple[str, str]]:
        results = [simulate(graph, codes, device, graph.results(), progress=False) for device in devices]
        return {
            (devices[one], devices[other])
            for one, other in combinations(range(len(devices)), 2)
            if any(np.any(codes != results[other][name]) for name, codes in results[one].items())
        }

    numbers = differing_examples(graph, 8, devices, 0, 16, 100, 8192)
    assert len({*numbers}) == len(numbers) >= 8 and {0, 1} <= {*numbers}
    assert len(differing_examples(graph, 8, devices, 0, 16, 3, 8192)) == 3
    assert differing(random_codes(graph, numbers, 0)) == differing(random_codes(graph, range(8192), 0))
    assert differing(random_codes(graph, numbers, 0)) > differing(random_codes(graph, range(8), 0))


def test_how_many_examples_are_chosen_from(monkeypatch: pytest.MonkeyPatch) -> None:
    path = FILES / "branches.int8.tflite"
    inspection = inspect(path, examples=5, devices=[])
    assert inspection.tried == 8192 and f"{inspection.examples} examples, chosen from 8,192" in str(inspection)
    assert inspection.examples >= 5
    assert all(layer.reached and 0 < layer.reached <= 1 for layer in inspection.layers)
    graph = read_tflite(path)
    work = sum(graph.multiply_accumulates(operator) for operator in graph.operators)
    monkeypatch.setattr(random_inputs, "MOST_WORK", 30 * work)
    assert inspect(path, examples=5, devices=[]).tried == 30
    assert inspect(path, examples=5, devices=[], candidates=7).tried == 7
    assert inspect(path, examples=40, devices=[]).tried == 40  # as many as are wanted in any case
    assert {*differing_examples(graph, 20, ("reference", "micro"), 0, 16, 20, 32)} < {*range(32)}
    with pytest.raises(ValueError, match="candidates must be 1 or more, got 0"):
        inspect(path, candidates=0)


def test_a_random_example_is_the_same_beside_any_others() -> None:
    graph = read_tflite(FILES / "branches.int8.tflite")
    for name, codes in random_codes(graph, [700, 3], 5).items():
        np.testing.assert_array_equal(codes[1:], random_codes(graph, range(3, 4), 5)[name])
        assert np.any(codes[0] != codes[1])


def test_random_inputs_are_not_negative_where_runtimes_refuse_that() -> None:
    for kind, grid in (("RSQRT", per_tensor(1e-3, 0, "int16")), ("SQRT", per_tensor(0.1, 7))):
        builder = Builder()
        builder.input("x", (1, 50), grid)
        graph = builder.graph([builder.operator(kind, ["x"], grid, name="y")])
        codes = random_codes(graph, range(4), 0)["x"]
        assert codes.min() >= grid.zero_point[0] and codes.max() > 100


def test_every_reason_is_in_the_json(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="exactqat check .*model.keras") as keras:
        inspect(tmp_path / "model.keras")
    answer = json.loads(refused_as_json(tmp_path / "model.keras", keras.value))
    assert answer == {"schema": 1, "name": "model.keras", "refused": {str(keras.value): []}}
    unsupported = UnsupportedFile("a file", {"the operator ATAN2": ["one", "two"]})
    answer = json.loads(refused_as_json("model.tflite", unsupported))
    assert answer["refused"] == {"the operator ATAN2": ["one", "two"]}


def test_a_file_has_its_own_footprint() -> None:
    path = FILES / "branches.int8.tflite"
    graph = read_tflite(path)
    assert graph.file == path.read_bytes() and replace(graph, metadata={}).file is None


@pytest.mark.slow
def test_devices_that_disagree_are_named() -> None:
    """From the first layer on that they round otherwise."""
    inspection = inspect(FILES / "branches.int8.tflite", examples=4)
    pairs = {finding.profiles for finding in inspection.disagreements}
    assert ("xnnpack-x86", "reference") in pairs
    first = next(finding for finding in inspection.disagreements if finding.profiles == ("xnnpack-x86", "reference"))
    assert first.layer in {layer.result for layer in inspection.layers} and first.differing > 0


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """Status, output and errors of `exactqat inspect`."""
    monkeypatch.setattr(sys, "argv", ["exactqat", "inspect", *arguments])
    status = 0
    try:
        cli.main()
    except SystemExit as end:
        status = int(end.code or 0)
    output, errors = capsys.readouterr()
    return status, " ".join(output.split()), " ".join(errors.split())


@pytest.mark.slow
def test_the_exit_status_says_what_was_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = str(FILES / "convolutions.int8.tflite")
    few = ("--examples", "1", "--device", "reference")
    status, output, _ = run(capsys, monkeypatch, path, *few)
    assert status == 0 and "none differs where equality is claimed" in output
    status, output, _ = run(capsys, monkeypatch, path, *few, "--json")
    assert status == 0 and json.loads(output)["equal"]
    for refused in ("loop.int8", "no_such_file"):
        status, _, errors = run(capsys, monkeypatch, str(FILES / f"{refused}.tflite"), *few)
        assert status == 2 and refused in errors and "Traceback" not in errors
    # Its TILE is not known there: no integer is compared, which is not equality.
    status, output, errors = run(
        capsys, monkeypatch, str(FILES / "enlarged.fixed_batch.tflite"), "--examples", "1", "--device", "reference"
    )
    assert status == 2 and "nothing was compared" in output and "nothing was compared" in errors


def test_a_difference_is_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime computes the file, the simulation a network with one other weight."""
    module: Any = importlib.import_module("exactqat.deploy.inspect")
    path = FILES / "convolutions.int8.tflite"

    def changed(*arguments: Any) -> Any:
        file = read_content(*arguments)
        operator = next(operator for operator in file.graph.operators if operator.kind == "CONV_2D")
        filter = file.graph.tensors[operator.inputs[1]]
        data = filter.data.copy()
        data.flat[0] = 100 if data.flat[0] < 0 else -100
        tensors = {**file.graph.tensors, filter.name: replace(filter, data=data)}
        return replace(file, graph=replace(file.graph, tensors=tensors))

    read_content = module.read_content
    monkeypatch.setattr(module, "read_content", changed)
    inspection = inspect(path, examples=2, devices=["reference"])
    (device,) = (device for device in inspection.devices if device.values)
    wrong = [row.name for row in device.operators if row.differing]
    first = next(layer.result for layer in inspection.layers if layer.kind == "CONV_2D")
    assert not inspection.equal and wrong == [first] and device.differing_as_claimed > 0
    status, output, _ = run(capsys, monkeypatch, str(path), "--examples", "1", "--device", "reference")
    assert status == 1 and "does not run as simulated" in output


def test_sizes_that_the_file_leaves_open_and_states_too_small(tmp_path: Path) -> None:
    """LiteRT works them out; TFLite-Micro writes beyond the room that the file asks for."""
    pytest.importorskip("tflite_micro", reason="needs tflite-micro")
    builder = Builder()
    x = builder.input("x", (1, 9), INDICES)
    table = builder.constant("table", np.arange(56, dtype=np.int8).reshape(8, 7), per_tensor(0.1, 0))
    builder.embedding(x, table, name="y")
    model = schema.ModelT.InitFromPackedBuf(tflite_bytes(builder.graph(["y"])))
    result = model.subgraphs[0].tensors[int(model.subgraphs[0].outputs[0])]
    result.shape, result.shapeSignature = np.array([1, 7, 7], np.int32), np.full(3, -1, np.int32)
    packed = flatbuffers.Builder(1024)
    packed.Finish(model.Pack(packed), IDENTIFIER)
    path = tmp_path / "model.tflite"
    path.write_bytes(packed.Output())
    devices = {device.profile: device for device in inspect(path).devices}
    assert devices["reference"].values and not devices["reference"].differing
    assert "computes the shape [1, 9, 7] for 'y', for which the file has [1, 7, 7]" in devices["micro"].not_run
