# SPDX-License-Identifier: Apache-2.0
"""The deploy room against the real runtimes, under every profile that this machine can run, integer for integer.

Each operator by itself is in test_device.py.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from deadly import crowded, deadly
from device_cases import random_graph

from exactqat.deploy import (
    Builder,
    Graph,
    Operator,
    Quantization,
    Report,
    Tensor,
    dequantize,
    per_tensor,
    place_codes,
    profiles_here,
    quantize,
    simulate,
    verify,
    write_tflite,
)
from exactqat.deploy.formats import tflite
from exactqat.deploy.formats.read_tflite import read_content
from exactqat.deploy.formats.tflite import tflite_bytes
from exactqat.deploy.inspect import inspect
from exactqat.deploy.runtimes.trial import RuntimeRefusal
from exactqat.kit.device import ACTIVATIONS
from exactqat.kit.device.arithmetic import same_padding

HERE = profiles_here()
Random = np.random.Generator


def check(graph: Graph, codes: dict[str, np.ndarray], profile: str, path: Path) -> Report:
    report = verify(graph, write_tflite(graph, path), codes, profile)
    assert report.differing == 0, f"{profile}: {[row for row in report.table() if row['differing']]}, {graph.operators}"
    return report


def residual_network(rng: Random, bits: int) -> Graph:
    """First layer depthwise, then a residual block, a stride-2 layer, two pools, concatenation and a dense head."""
    builder = Builder()

    def weights(shape: tuple[int, ...], axis: int, activation: str = "NONE", zero_code: int = 0) -> dict[str, object]:
        scale = np.float32(6 / (2**bits - 1))
        filter_scale = rng.uniform(0.5, 2, shape[axis]) * 4 / np.sqrt(np.prod(shape) / shape[axis]) / 127
        return {
            "filter": rng.integers(-127, 128, shape),
            "filter_scale": filter_scale,
            "bias": rng.integers(-300, 300, shape[axis]),
            "output": place_codes(scale, zero_code, bits, activation),
            "activation": activation,
        }

    middle = 2 ** (bits - 1)
    x = builder.input("x", (1, 9, 11, 3), per_tensor(0.02, -5))
    first = builder.depthwise_conv_2d(x, name="first", **weights((1, 3, 3, 6), 3, "RELU6"))
    wide = builder.conv_2d(first, name="wide", **weights((16, 1, 1, 6), 0, "RELU"))
    narrow = builder.conv_2d(wide, name="narrow", **weights((6, 3, 3, 16), 0, "NONE", middle))
    add = builder.add(first, narrow, place_codes(9 / (2**bits - 1), middle, bits), name="add")
    down = builder.conv_2d(add, name="down", strides=(2, 2), **weights((8, 3, 3, 6), 0, "RELU6"))
    pooled = builder.max_pool_2d(add, name="pooled", filter_size=(2, 2), strides=(2, 2), padding="SAME")
    both = builder.concatenation([down, pooled], place_codes(9 / (2**bits - 1), middle, bits), name="both")
    average = builder.average_pool_2d(both, name="average", filter_size=(2, 2), strides=(1, 1))
    mean = builder.mean(average, place_codes(5 / (2**bits - 1), middle, bits), name="mean")
    flat = builder.reshape(average, (1, 4 * 5 * 14), name="flat")
    heads = [
        builder.fully_connected(mean, name="head", **weights((10, 14), 0, "NONE", middle)),
        builder.fully_connected(flat, name="other_head", **weights((7, 4 * 5 * 14), 0, "NONE", middle)),
    ]
    return builder.graph(heads)


@pytest.mark.parametrize("profile", HERE)
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_whole_networks_equal_the_runtime(bits: int, profile: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(bits)
    graph = residual_network(rng, bits)
    codes = rng.integers(-128, 128, (11, 9, 11, 3)).astype(np.int8)
    report = check(graph, {"x": codes}, profile, tmp_path / "model.tflite")
    assert [row.name for row in report.operators] == list(graph.results())
    assert {row.name for row in report.outputs} == set(graph.outputs)
    assert all(row.exact and row.values for row in (*report.operators, *report.outputs))
    for name in graph.results():
        codes_used = np.unique(simulate(graph, codes, profile, [name])[name])
        assert codes_used.size > 1, f"{name} is constant, so nothing was tested"
        if name in ("first", "wide", "down"):
            assert codes_used.min() >= 128 - 2**bits
        if name in ("narrow", "add", "both", "mean", "head"):
            assert codes_used.max() < -128 + 2**bits


@pytest.mark.parametrize("profile", HERE)
@pytest.mark.parametrize("bits", [2, 4, 7, 8])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_placed_codes_clamp_at_both_ends(bits: int, activation: str, profile: str, tmp_path: Path) -> None:
    highest = 2**bits - 1
    zero_code = 2 ** (bits - 1) if activation == "NONE" else 0
    scale = 0.25 if activation == "RELU6" else 0.5
    builder = Builder()
    x = builder.input("x", (1, 1, 1, 1), per_tensor(1.0, 0))
    output = place_codes(scale, zero_code, bits, activation)
    # Real values -127..128 in steps of one, far past both ends of the codes.
    y = builder.conv_2d(x, np.ones((1, 1, 1, 1)), [1.0], [0], output, name="y", activation=activation)
    graph = builder.graph([y])
    codes = np.arange(-128, 128, dtype=np.int8).reshape(-1, 1, 1, 1)
    check(graph, {"x": codes}, profile, tmp_path / "model.tflite")

    real = codes.astype(np.float64)
    if activation != "NONE":
        real = np.clip(real, 0, 6 if activation == "RELU6" else None)
    expected = np.clip(real / scale + zero_code, 0, highest)
    stored = simulate(graph, codes, profile)[y]
    zero_point = graph.tensors[y].quantization.zero_point[0]
    np.testing.assert_array_equal(stored - zero_point, expected - zero_code)


def test_place_codes() -> None:
    def zero_points(*arguments: object) -> list[int]:
        return [int(placement.zero_point[0]) for placement in place_codes(0.5, *arguments)]

    assert zero_points(0, 4, "RELU") == [112]
    assert zero_points(3, 4, "RELU6") == [115]
    assert zero_points(7, 4) == [119, -121]
    assert zero_points(100, 8) == [-28]
    assert zero_points(8, 4, "NONE", True) == [120, -121]
    for arguments, message in (
        ((0, 1), "num_bits must be in 2..8, or 16, got 1"),
        ((16, 4), "zero_point must be a code in 0..15, got 16"),
        ((0, 4, "NONE", True), "zero_point must be a code in 1..15, got 0"),
        ((0, 4, "TANH"), "activation must be one of NONE, RELU, RELU6, got 'TANH'"),
    ):
        with pytest.raises(ValueError, match=message):
            place_codes(0.5, *arguments)


def test_quantize_follows_fake_quant() -> None:
    # FakeQuantWithMinMaxVars on the range (-6, 6), 8 bits: 2.0 goes to 1.9764706, which is 42 steps of 12/255.
    quantization = per_tensor(np.float32(12) / np.float32(255), 0)
    np.testing.assert_array_equal(quantize(np.array([2.0, -100, 100, 0]), quantization), [42, -128, 127, 0])
    halves = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    np.testing.assert_array_equal(quantize(halves, per_tensor(1.0, 9)) - np.int8(9), [-2, -1, 0, 1, 2, 3])
    np.testing.assert_array_equal(quantize(np.array([-9.0, 0, 9]), per_tensor(0.5, 119), 112, 127), [112, 119, 127])
    codes = np.arange(-128, 128, dtype=np.int8)
    np.testing.assert_array_equal(quantize(dequantize(codes, quantization), quantization), codes)
    with pytest.raises(ValueError, match="NaN"):
        quantize(np.array([np.nan]), quantization)


def small_graph(rng: Random) -> Graph:
    builder = Builder()
    x = builder.input("x", (1, 5, 5, 3), per_tensor(0.02, 3))
    first = builder.conv_2d(
        x, rng.integers(-127, 128, (4, 3, 3, 3)), np.full(4, 0.01), np.arange(4), per_tensor(0.05, -9), name="first"
    )
    second = builder.conv_2d(
        first, rng.integers(-127, 128, (6, 1, 1, 4)), np.full(6, 0.01), np.arange(6), per_tensor(0.9, 4), name="second"
    )
    return builder.graph([second])


def with_tensor(graph: Graph, name: str, **changes: object) -> Graph:
    tensors = dict(graph.tensors)
    tensors[name] = dataclasses.replace(tensors[name], **changes)
    return dataclasses.replace(graph, tensors=tensors)


@pytest.mark.parametrize("profile", HERE)
def test_verify_finds_one_wrong_bias(profile: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    graph = small_graph(rng)
    codes = rng.integers(-128, 128, (400, 5, 5, 3)).astype(np.int8)
    bias = graph.tensors["first/bias"].data.copy()
    bias[2] += 1
    path = write_tflite(with_tensor(graph, "first/bias", data=bias), tmp_path / "model.tflite")
    report = verify(graph, path, codes, profile)
    first, second = report.operators
    assert 0 < first.differing < 100 and first.largest_difference == 1, "one step of the bias moves few codes by one"
    assert second.differing == 0, "the second operator computes rightly from what it is given"
    assert report.outputs[0].differing > 0
    assert report.differing == first.differing + report.outputs[0].differing
    assert report.table()[0]["differing"] == first.differing


def test_verify_refuses_another_graphs_file(tmp_path: Path) -> None:
    graph = small_graph(np.random.default_rng(0))
    builder = Builder()
    other = builder.graph([builder.pad(builder.input("x", (1, 5, 5, 3), per_tensor(0.02, 3)), [(0, 0)] * 4, name="y")])
    path = write_tflite(other, tmp_path / "model.tflite")
    with pytest.raises(ValueError, match="second"):
        verify(graph, path, np.zeros((1, 5, 5, 3), np.int8))


def small_network(rng: Random) -> Graph:
    builder = Builder()
    x = builder.input("x", (1, 4, 4, 3), per_tensor(0.1, 0))
    flat = builder.reshape(x, (1, 48), name="flat")
    filter, bias = rng.integers(-127, 128, (5, 48)), rng.integers(-90, 90, 5)
    return builder.graph([builder.fully_connected(flat, filter, [0.1], bias, per_tensor(5, 0), name="y")])


def test_the_process_outlives_a_file_that_the_runtime_does_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    graph, path = small_network(rng), tmp_path / "model.tflite"
    path.write_bytes(deadly(write_tflite(graph, path).read_bytes()))
    with pytest.raises(RuntimeRefusal, match=r"the runtime crashed on it \(SIGSEGV\)"):
        verify(graph, path, rng.integers(-128, 128, (3, 4, 4, 3)).astype(np.int8))


def test_a_file_that_is_small_until_it_is_unpacked_is_not_unpacked(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    graph, path = small_network(rng), tmp_path / "model.tflite"
    path.write_bytes(crowded(write_tflite(graph, path).read_bytes(), 200))
    tracemalloc.start()
    try:
        with pytest.raises(RuntimeRefusal, match=r"LiteRT rejects the file: .*(not a valid Flatbuffer|subgraph 1)"):
            verify(graph, path, rng.integers(-128, 128, (3, 4, 4, 3)).astype(np.int8))
        assert tracemalloc.get_traced_memory()[1] < 5 << 20  # unpacked 200 * 200 operators take ten times that
    finally:
        tracemalloc.stop()


def test_only_files_of_others_are_tried_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process costs a second; what write_tflite makes of the graph needs none, whatever its description."""
    tried = []
    monkeypatch.setattr(sys.modules["exactqat.deploy.verify"], "try_in_a_child", lambda *call: tried.append(call))
    rng = np.random.default_rng(0)
    graph, other, path = small_network(rng), small_network(rng), tmp_path / "model.tflite"
    codes = rng.integers(-128, 128, (3, 4, 4, 3)).astype(np.int8)
    for description in ("", "w8a8 mine; and more", "exactqat; exactqat; ü"):
        assert verify(graph, write_tflite(graph, path, description), codes).differing == 0
    assert not tried
    write_tflite(other, path)
    assert verify(graph, path, codes).differing and len(tried) == 1
    path.write_bytes(write_tflite(graph, path).read_bytes() + b" ")
    assert not verify(graph, path, codes).differing and len(tried) == 2


@pytest.fixture(params=["started", "forked"])
def trial(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The module, with both ways to make a process."""
    module = sys.modules["exactqat.deploy.runtimes.trial"]
    with module.forking() if request.param == "forked" else nullcontext():
        yield module


def test_what_a_child_does_is_not_shown(trial: ModuleType) -> None:
    """Refusals are left to this process, which says them better; only death counts, and what keeps a child from it."""
    trial.try_in_a_child(np.testing.assert_array_equal, 1, 2)
    with pytest.raises(RuntimeRefusal, match="SIGKILL"):
        trial.try_in_a_child(signal.raise_signal, signal.SIGKILL)
    if sys.platform == "linux":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        with pytest.raises(RuntimeRefusal, match="more than half of this machine's memory"):
            trial.try_in_a_child(bytearray, max(memory * 2 // 3, 5 << 30))
    with pytest.raises(RuntimeRefusal, match="could not be run in another process"):
        trial.try_in_a_child(sys.exit, "no")


@pytest.mark.parametrize("batch_size, batches", [(8, 1), (2, 2)])
def test_progress_of_a_comparison(batch_size: int, batches: int, tmp_path: Path) -> None:
    graph, reported = small_network(np.random.default_rng(0)), []
    codes = np.zeros((3, 4, 4, 3), np.int8)
    path = write_tflite(graph, tmp_path / "model.tflite")
    verify(graph, path, codes, batch_size=batch_size, progress=lambda *counts: reported.append(counts))
    assert reported == [(done, 2 * batches) for done in range(1, 2 * batches + 1)]


def test_written_files_are_deterministic_and_whole(tmp_path: Path) -> None:
    first = write_tflite(small_graph(np.random.default_rng(0)), tmp_path / "a.tflite").read_bytes()
    second = write_tflite(small_graph(np.random.default_rng(0)), tmp_path / "b.tflite").read_bytes()
    assert first == second
    assert first[4:8] == b"TFL3" and b"exactqat" in first
    named = write_tflite(small_graph(np.random.default_rng(0)), tmp_path / "c.tflite", "digits, 4 bits").read_bytes()
    assert b"exactqat; digits, 4 bits" in named
    broken = with_tensor(small_graph(np.random.default_rng(0)), "x", shape=(1, 6, 5, 3))
    with pytest.raises(ValueError, match="output must have shape"):
        write_tflite(broken, tmp_path / "a.tflite")
    assert (tmp_path / "a.tflite").read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tflite", "b.tflite", "c.tflite"]


def test_batches_do_not_change_results() -> None:
    rng = np.random.default_rng(0)
    graph = small_graph(rng)
    codes = rng.integers(-128, 128, (7, 5, 5, 3)).astype(np.int8)
    whole = simulate(graph, codes, tensors=["first", "second"], batch_size=7)
    parts = simulate(graph, codes, tensors=["first", "second"], batch_size=2)
    for name, expected in whole.items():
        np.testing.assert_array_equal(parts[name], expected)
    assert simulate(graph, codes[:0])["second"].shape == (0, 5, 5, 6)


def test_unfit_inputs_are_refused(tmp_path: Path) -> None:
    graph = small_graph(np.random.default_rng(0))
    path = write_tflite(graph, tmp_path / "model.tflite")
    good = np.zeros((1, 5, 5, 3), np.int8)
    for x, error, message in (
        (good.astype(np.float32), TypeError, "must be int8 codes, got float32"),
        (good[:, :4], ValueError, r"must have shape \[batch, 5, 5, 3\], got \(1, 4, 5, 3\)"),
        ({"z": good}, ValueError, "x must contain the inputs"),
    ):
        with pytest.raises(error, match=message):
            simulate(graph, x)
        with pytest.raises(error, match=message):
            verify(graph, path, x)
    with pytest.raises(
        ValueError,
        match="device must be one of xnnpack-x86, .*, micro, onnxruntime-x86, xnnpack, tosa, got 'ruy'",
    ):
        simulate(graph, good, "ruy")
    with pytest.raises(ValueError, match="no images"):
        verify(graph, path, good[:0])


def with_operator(graph: Graph, index: int, **changes: object) -> Graph:
    operators = list(graph.operators)
    operators[index] = dataclasses.replace(operators[index], **changes)
    return dataclasses.replace(graph, operators=tuple(operators))


def broken_graphs() -> list[tuple[str, Graph]]:
    graph = small_graph(np.random.default_rng(0))
    filter, bias = graph.tensors["first/filter"], graph.tensors["first/bias"]
    attributes = graph.operators[0].attributes
    scale = bias.quantization.scale
    return [
        ("unknown operator kind 'SOFTMIN'; known: .*CONV_2D", with_operator(graph, 0, kind="SOFTMIN")),
        (
            r"operator 1 \(CONV_2D -> second\): tensor 'gone' is missing",
            with_operator(graph, 1, outputs=("second",), inputs=("gone", "second/filter", "second/bias")),
        ),
        ("used before it is computed", dataclasses.replace(graph, operators=graph.operators[::-1])),
        ("attributes must be", with_operator(graph, 0, attributes={})),
        (
            "padding must be one of SAME, VALID, got 'FULL'",
            with_operator(graph, 0, attributes={**attributes, "padding": "FULL"}),
        ),
        (
            "strides must be two positive integers",
            with_operator(graph, 0, attributes={**attributes, "strides": (0, 1)}),
        ),
        (
            r"dilations must be two positive integers below 32768, got \(1, 32768\)",
            with_operator(graph, 0, attributes={**attributes, "dilations": (1, 2**15)}),
        ),
        ("takes 3 inputs", with_operator(graph, 0, inputs=("x", "first/filter"))),
        (
            "does not fit 3 input channels",
            with_tensor(graph, "first/filter", data=filter.data[..., :2], shape=(4, 3, 3, 2)),
        ),
        ("data must be int8, got int16", with_tensor(graph, "first/filter", data=filter.data.astype(np.int16))),
        ("float32 must have scale 1 and zero point 0", with_tensor(graph, "first", dtype="float32")),
        ("dtype must be one of .*, got 'float64'", with_tensor(graph, "first", dtype="float64")),
        ("inputs have batch 1 in the graph", with_tensor(graph, "x", shape=(2, 5, 5, 3))),
        (r"zero points must be in -128..127, got \[128\]", with_tensor(graph, "x", quantization=per_tensor(0.02, 128))),
        (
            "activations are quantized per tensor",
            with_tensor(graph, "x", quantization=Quantization(np.ones(3), np.zeros(3), 3)),
        ),
        (
            "filter channels must be on axis 0, got 3",
            with_tensor(graph, "first/filter", quantization=Quantization(np.ones(3), np.zeros(3), 3)),
        ),
        (
            r"bias scale must be input scale \* filter scale",
            with_tensor(graph, "first/bias", quantization=Quantization(scale * 3000, np.zeros(4), 0)),
        ),
        ("the int32 accumulator can overflow", with_tensor(graph, "first/bias", data=np.full(4, 2**31 - 1, np.int32))),
        (
            "the rescaled sum can leave 32 bits",  # on which kernels do not agree; a bias that training drove there
            with_tensor(
                with_tensor(graph, "first", quantization=per_tensor(float(scale.min()) / 8, 0)),
                "first/bias",
                data=np.full(4, 2**28, np.int32),
            ),
        ),
        ("scale must be below 256 for every channel", with_tensor(graph, "first", quantization=per_tensor(1e-7, 0))),
        ("output must have shape", with_tensor(graph, "second", shape=(1, 5, 5, 7))),
        ("graph output 'first/nothing'|'first/nothing' is not among", graph.with_outputs(["first/nothing"])),
    ]


@pytest.mark.parametrize(("message", "graph"), broken_graphs())
def test_broken_graphs_are_refused(message: str, graph: Graph) -> None:
    with pytest.raises(ValueError, match=message):
        graph.validate()


def test_a_bias_of_zeros_is_on_any_scale(tmp_path: Path) -> None:
    """Converters share one between layers, with the scale of the first of them."""
    graph = small_graph(np.random.default_rng(0))
    scale = graph.tensors["first/bias"].quantization.scale
    zeros = with_tensor(graph, "first/bias", data=np.zeros(4, np.int32))
    other = with_tensor(zeros, "first/bias", quantization=Quantization(scale * 3000, np.zeros(4), 0))
    inspection = inspect(write_tflite(other, tmp_path / "shared.tflite"), examples=2)
    assert inspection.equal and sum(device.values for device in inspection.devices) > 1000
    codes = np.random.default_rng(1).integers(-128, 128, (2, *graph.tensors["x"].shape[1:])).astype(np.int8)
    for name, expected in simulate(zeros, codes).items():
        assert np.array_equal(simulate(other, codes)[name], expected)


def test_pooled_and_joined_tensors_keep_their_quantization() -> None:
    tensors = {
        "x": Tensor("x", (1, 4, 4, 2), "int8", per_tensor(0.5, 0)),
        "y": Tensor("y", (1, 4, 4, 2), "int8", per_tensor(0.25, 0)),
    }
    graph = Graph(tensors, (Operator("CONCATENATION", ("x",), ("y",), {"axis": 3}),), ("x",), ("y",))
    with pytest.raises(ValueError, match="must have the output's quantization; insert a QUANTIZE before it"):
        graph.validate()


def test_builder_refuses_what_has_no_code() -> None:
    builder = Builder()
    builder.input("x", (1, 4, 4, 2), per_tensor(0.5, 0))
    ones, zeros = np.ones((3, 1, 1, 2)), np.zeros(3)
    output = per_tensor(1.0, 0)
    for filter, bias, message in (
        (128 * ones, zeros, "filter codes must be integers within -127..127"),
        (0.5 * ones, zeros, "filter codes must be integers"),
        (ones, zeros + 2.0**31, "bias codes must be integers"),
    ):
        with pytest.raises(ValueError, match=message):
            builder.conv_2d("x", filter, [1.0], bias, output, name="y")
    with pytest.raises(ValueError, match="input 'gone' does not exist"):
        builder.mean("gone", output, name="y")
    with pytest.raises(ValueError, match="'x' is used twice"):
        builder.input("x", (1, 4, 4, 2), output)
    with pytest.raises(ValueError, match="scale must be positive and finite"):
        per_tensor(0.0, 0)
    with pytest.raises(ValueError, match="must be below 64, got 500"):
        builder.graph([builder.add("x", "x", per_tensor(0.001, 0), name="z")])


def test_products_refuse_what_the_device_does_not_multiply() -> None:
    for shape, scale, message in (
        ((1, 4, 3, 2), 1.0, r"operands must broadcast to one shape, got \(1, 4, 4, 2\) and \(1, 4, 3, 2\)"),
        ((1, 2), 1.0, r"'z' \(1, 2\) must have rank 4 and 1 rows, as the result has"),
        ((1, 1, 1, 2), 0.00098, r"must be in \[2\*\*-16, 256\), got 510"),
        ((1, 4, 4, 2), 2**16.0, r"must be in \[2\*\*-16, 256\), got 7.6"),
    ):
        builder = Builder()
        builder.input("x", (1, 4, 4, 2), per_tensor(0.5, 0))
        builder.input("z", shape, per_tensor(1.0, 0))
        with pytest.raises(ValueError, match=message):
            builder.graph([builder.mul("x", "z", per_tensor(scale, 0), name="y")])


@pytest.mark.parametrize("ratio", [2**-8 * 0.999, 2**7 * 1.001])
def test_quantize_refuses_ratios_that_xnnpack_leaves(ratio: float) -> None:
    builder = Builder()
    builder.input("x", (1, 4, 4, 2), per_tensor(ratio, 0))
    with pytest.raises(ValueError, match=r"must be in \[2\*\*-8, 2\*\*7\]"):
        builder.graph([builder.quantize("x", per_tensor(1.0, 0), name="y")])


def test_same_padding_is_tensorflows() -> None:
    assert same_padding(5, 3, 2) == (1, 1)
    assert same_padding(6, 3, 2) == (0, 1)
    assert same_padding(1, 1, 3) == (0, 0)
    assert same_padding(7, 3, 1, dilation=2) == (2, 2)


def test_summary_counts_parameters_and_multiply_accumulates() -> None:
    first, second = small_graph(np.random.default_rng(0)).summary()
    assert first["parameters"] == 4 * 27 + 4 and first["multiply_accumulates"] == 25 * 4 * 27
    assert (second["kind"], second["output"], second["shape"]) == ("CONV_2D", "second", "1x5x5x6")


def test_importing_the_room_needs_numpy_only() -> None:
    code = (
        "import sys; import exactqat.deploy; "
        "print([name for name in ('torch', 'jax', 'flatbuffers', 'ai_edge_litert') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_missing_runtime_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ai_edge_litert.schema_py_generated", None)
    with pytest.raises(ImportError, match=r"pip install 'exactqat\[deploy\]'"):
        write_tflite(small_graph(np.random.default_rng(0)), tmp_path / "model.tflite")
    assert not list(tmp_path.iterdir())


def test_classes_of_older_schemas_take_no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ai-edge-litert 2.0."""
    graph = small_network(np.random.default_rng(0))
    expected = tflite.tflite_bytes(graph)
    known = tflite.import_deploy

    class Older:
        def __init__(self, schema: ModuleType) -> None:
            self.schema = schema

        def __getattr__(self, name: str) -> object:
            entry = getattr(self.schema, name)
            return (lambda: entry()) if name.endswith("T") else entry

    monkeypatch.setattr(
        tflite, "import_deploy", lambda name: Older(known(name)) if name.endswith("generated") else known(name)
    )
    assert tflite.tflite_bytes(graph) == expected


@pytest.mark.parametrize(("kind", "words"), [("SQRT", r"must be below 2\*\*30"), ("ELU", r"must be below 4.1943e\+06")])
@pytest.mark.parametrize("end", ["input", "output"])
def test_results_beyond_32_bits_are_refused(kind: str, words: str, end: str) -> None:
    """Kernels make a whole number of them before they saturate; a damaged file had such a scale."""
    graph = random_graph(np.random.default_rng(0), kind)
    (name,) = graph.inputs if end == "input" else graph.outputs
    held = graph.tensors[name]
    grid = dataclasses.replace(held.quantization, scale=np.float32([1e30 if end == "input" else 1e-30]))
    moved = dataclasses.replace(graph, tensors={**graph.tensors, name: dataclasses.replace(held, quantization=grid)})
    with pytest.raises(ValueError, match=words):
        read_content(tflite_bytes(moved))
