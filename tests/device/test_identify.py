# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of devices that say nothing about it: found from outside, operator by operator, and written as a file
that is taken where a device is named."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from device_cases import random_codes, random_graph
from made_up_devices import DEVICES, MadeUp, Noisy

from exactqat import deploy
from exactqat.deploy import (
    Builder,
    Graph,
    identify,
    per_tensor,
    profiles_here,
    simulate,
    unclaimed,
    verify,
    write_tflite,
)
from exactqat.deploy.formats.tflite import tflite_bytes
from exactqat.deploy.identify import CommandRunner, _Question, names
from exactqat.deploy.runtimes import open_runtime
from exactqat.kit.device import OPERATORS, PROFILES, Profile, Refusal, declare, profile, profile_named
from exactqat.kit.device.arithmetic import fixed_point, multiply_fixed_point, multiply_wide
from exactqat.kit.device.hypotheses import GROUPS, Hypothesis, answering
from exactqat.kit.device.probes import PROBES, probe
from exactqat.kit.device.profile import profile_of_data, read_profile
from exactqat.kit.device.stated_arithmetic import ROUNDINGS, Arithmetic, divided, rounded

# Codes of an operator in these tests; a campaign compares five times as many.
CODES = 20_000
NPU = {"exactqat_device": 1, "name": "my-npu"}


def exactly(value: Fraction, rounding: str) -> int:
    """A fraction rounded, by the words alone."""
    below = math.floor(value)
    rest = value - below
    if rounding in ("floor", "toward_zero"):
        return below if rounding == "floor" else math.trunc(value)
    if rest != Fraction(1, 2):
        return below + (rest > Fraction(1, 2))
    up = {"half_up": True, "half_down": False, "half_away": value > 0, "half_toward_zero": value < 0}
    return below + up.get(rounding, below % 2 == 1)


# --- what can be stated ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_roundings_are_what_they_are_called(rounding: str) -> None:
    whole = np.arange(-40, 41)
    for divisor in (2, 3, 4, 9):
        expected = [exactly(Fraction(int(x), divisor), rounding) for x in whole]
        assert divided(whole, divisor, rounding).tolist() == expected
    quarters = whole / 4
    assert rounded(quarters, rounding).tolist() == [exactly(Fraction(x), rounding) for x in quarters.tolist()]


@pytest.mark.parametrize("bits", [1, 8, 15, 31])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_product_is_rounded_once_whatever_its_size(rounding: str, bits: int) -> None:
    rng, arithmetic = np.random.default_rng(bits), Arithmetic(multiplier_bits=bits, roundings=(rounding,))
    for size in (2**10, 2**31, 2**46):
        x, factor = rng.integers(-size, size, 40), float(2.0 ** rng.uniform(-25, 2))
        significand, shift = round(math.frexp(factor)[0] * 2**bits), bits - math.frexp(factor)[1]
        expected = [exactly(Fraction(int(value)) * significand / Fraction(2) ** shift, rounding) for value in x]
        assert arithmetic.rescale(x, factor).tolist() == expected


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_factor_below_all_shifts_is_rounded_too(rounding: str) -> None:
    x, factor = np.array([-(2**30), -1, 0, 1, 2**30]), 2.0**-100
    steps = Arithmetic(roundings=(rounding,)).rescale(x, factor)
    assert steps.tolist() == [exactly(Fraction(int(value)) / 2**100, rounding) for value in x]
    assert not Arithmetic(roundings=(rounding,)).rescale(x, 0.0).any()


def test_the_declared_multipliers_can_be_stated() -> None:
    rng = np.random.default_rng(0)
    two, wide = Arithmetic(roundings=("half_up", "half_away")), Arithmetic(multiplier_bits=15)
    for _ in range(50):
        factor = 2.0 ** rng.uniform(-20, 0.9, 7)
        x = rng.integers(-(2**20), 2**20, (100, 7))
        assert np.array_equal(two.rescale(x, factor), multiply_fixed_point(x, *fixed_point(factor)))
        x = rng.integers(-(2**34), 2**34, (100, 7))
        assert np.array_equal(wide.rescale(x, factor), multiply_wide(x, *fixed_point(factor)))


@pytest.mark.parametrize("bias", ["first", "last"])
@pytest.mark.parametrize("overflow", ["saturate", "wrap"])
@pytest.mark.parametrize("kind", ["CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV"])
def test_accumulators_overflow_product_by_product(kind: str, overflow: str, bias: str) -> None:
    arithmetic = Arithmetic(accumulator_bits=18, overflow=overflow, overflow_at="each", bias=bias)
    rng, builder = np.random.default_rng(3), Builder()
    codes = probe(kind, rng, builder, "accumulator")
    graph = builder.graph(["y"])
    result = predicted(graph, codes, Hypothesis("reference", arithmetic))
    x, (filter, added) = codes["x"].astype(int), (graph.tensors[name] for name in graph.operators[0].inputs[1:])
    scales = [float(graph.tensors[name].quantization.scale[0]) for name in ("x", filter.name, "y")]
    zero_point = int(graph.tensors["y"].quantization.zero_point[0])
    assert filter.data is not None and added.data is not None
    weights = np.moveaxis(filter.data, OPERATORS[kind].filter_axis or 0, 0).reshape(64, -1).astype(int)

    def held(total: int) -> int:
        return max(-(2**17), min(2**17 - 1, total)) if overflow == "saturate" else (total + 2**17) % 2**18 - 2**17

    for channel in range(0, 64, 7):
        row = x[0, : weights.shape[1], 0, channel] if kind == "DEPTHWISE_CONV_2D" else x[0, 0].reshape(-1)
        total = held(int(added.data[channel])) if bias == "first" else 0
        for value, weight in zip(row, weights[channel], strict=True):
            total = held(total + int(value * weight))
        total = total if bias == "first" else held(total + int(added.data[channel]))
        expected = math.floor(total * scales[0] * scales[1] / scales[2] + 0.5) + zero_point
        assert result[0, 0].reshape(-1)[channel] == np.clip(expected, -128, 127)


def predicted(graph: Graph, codes: Mapping[str, np.ndarray], hypothesis: Hypothesis) -> np.ndarray:
    return simulate(graph, codes, hypothesis.profile, progress=False)["y"]


def test_what_is_stated_is_checked() -> None:
    for words, message in (
        ({"roundings": ("half_odd",)}, "roundings must be one or two of half_up"),
        ({"multiplier": "int"}, "multiplier must be one of fixed_point, float32, float64, got 'int'"),
        ({"multiplier_bits": 0}, r"multiplier_bits must be an integer in 1\.\.32, got 0"),
        ({"accumulator_bits": True}, "accumulator_bits must be an integer"),
        ({"table_segments": 48}, "table_segments must divide 256"),
    ):
        with pytest.raises(ValueError, match=message):
            Arithmetic(**words)  # type: ignore[arg-type]
    for stated in (Arithmetic(), Arithmetic(roundings=("half_up", "floor"), table_segments=64)):
        assert Arithmetic.from_data(json.loads(json.dumps(stated.as_data()))) == stated


def test_every_answer_is_an_arithmetic_of_its_own() -> None:
    for name in GROUPS:
        entries = answering([Hypothesis("reference", Arithmetic())], [name])
        assert len(set(entries)) == len(entries) > 1
    for kind in PROBES:
        assert {group for groups in OPERATORS[kind].asks for group in groups} <= set(GROUPS)


# --- a device's file -------------------------------------------------------------------------------------------------


@pytest.fixture
def known() -> Iterator[None]:
    """Devices that a test reads are forgotten after it."""
    before = list(PROFILES)
    yield
    for name in set(PROFILES) - set(before):
        del profile._PROFILES[name]


STATED = {
    **NPU,
    "title": "the NPU",
    "like": "micro",
    "operators": {"MUL": {"arithmetic": {"roundings": ["floor"]}}, "ADD": {"like": "xnnpack-x86"}},
    "absent": ["GELU"],
    "compared": {"MUL": 100_000},
}


def test_a_file_declares_a_device(tmp_path: Path, known: None) -> None:
    path = tmp_path / "any.json"
    path.write_text(json.dumps(STATED))
    device = profile_named(str(path))
    assert (device.name, device.title, device.runtime, device.file) == ("my-npu", "the NPU", "", ".tflite")
    assert profile_named("my-npu") is device is read_profile(path)
    assert device.of("MUL").arithmetic == Arithmetic(roundings=("floor",)) and device.of("MUL").name == "my-npu"
    assert device.of("ADD").delegates and not device.of("SUB").delegates and device.of("MUL", wide=True) is device
    rng = np.random.default_rng(0)
    for kind, like in (("ADD", "xnnpack-x86"), ("SUB", "micro"), ("FULLY_CONNECTED", "micro")):
        for _ in range(5):
            graph = random_graph(rng, kind)
            codes = random_codes(rng, graph)
            results = [simulate(graph, codes, name, progress=False)["y"] for name in ("my-npu", like)]
            assert np.array_equal(*results)
    graph = random_graph(rng, "MUL")
    codes = random_codes(rng, graph)
    assert unclaimed(graph, "my-npu") == () and unclaimed(random_graph(rng, "ADD"), "my-npu") == ("ADD",)
    below = predicted(graph, codes, Hypothesis("reference", Arithmetic(roundings=("floor",))))
    assert np.array_equal(simulate(graph, codes, path, progress=False)["y"], below)  # type: ignore[arg-type]
    assert (
        "my-npu" in random_graph(rng, "GELU").absent_from("my-npu")[0]
        or "the NPU has no GELU" in random_graph(rng, "GELU").absent_from("my-npu")[0]
    )
    path.write_text(json.dumps({**STATED, "like": "reference"}))
    with pytest.raises(ValueError, match="profile 'my-npu' is declared already"):
        read_profile(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exactqat_device": 2}, "exactqat_device must be 1"),
        ({"name": ""}, "name must be a word"),
        ({"name": "a\ud800"}, "name must be a word"),
        ({"name": "tosa"}, "name must not be that of a declared device, got 'tosa'"),
        ({"title": "two\nlines"}, "title and description must be text"),
        ({"arithmetic": {"roundings": [["floor"]]}}, "roundings must be one or two of"),
        ({"operators": {"CONV2D": {}}}, "there is no operator CONV2D; names are such as CONV_2D"),
        ({"absent": ["GELU", "FOO:int16"]}, "there is no operator FOO:int16"),
        ({"like": "toaster"}, "like must be one of xnnpack-x86, .*, got 'toaster'"),
        ({"colour": "red"}, "the file has colour; known are exactqat_device, name"),
        ({"properties": {"delegates": 1}}, "delegates must be true or false, got 1"),
        ({"properties": {"machines": []}}, "properties has machines; known are"),
        ({"arithmetic": {"roundings": "floor"}}, "the file: roundings must be one or two"),
        ({"operators": {"ADD": {"arithmetic": {"bits": 3}}}}, "operators: ADD: arithmetic has bits; known are scales"),
        ({"operators": []}, "operators must hold names of operators"),
        ({"compared": {"ADD": 0}}, "compared must hold numbers of codes"),
        ({"file": ".h5"}, "file .tflite or .onnx"),
    ],
)
def test_a_file_says_what_is_wrong_with_it(change: dict[str, Any], message: str, tmp_path: Path, known: None) -> None:
    path = tmp_path / "npu.json"
    path.write_text(json.dumps({**NPU, **change}))
    with pytest.raises(ValueError, match=f"npu.json does not declare a device: .*{message}"):
        profile_named(path)
    path.write_text("[1, 2")
    with pytest.raises(ValueError, match="does not declare a device"):
        profile_named(path)


# --- what is found ---------------------------------------------------------------------------------------------------

FOUND = {
    ("saturating shifts", "FULLY_CONNECTED"): {
        "scales": "powers_of_two", "accumulator_bits": 20, "overflow_at": "each", "roundings": ("half_up",)},
    ("even shifts", "CONV_2D"): {"scales": "powers_of_two", "roundings": ("half_even",), "accumulator_bits": 64},
    ("even shifts", "ADD"): {"scales": "powers_of_two", "roundings": ("half_even",)},
    ("16-bit multiplier", "DEPTHWISE_CONV_2D"): {
        "multiplier_bits": 16, "multiplier_rounding": "floor", "roundings": ("half_away",)},
    ("16-bit multiplier", "MUL"): {"multiplier_bits": 16, "multiplier_rounding": "floor"},
    ("64 entries", "LOGISTIC"): {"table_segments": 64, "table_end": "beyond"},
    ("64 entries", "TANH"): {"table_segments": 64},
    ("truncation", "QUANTIZE"): {"roundings": ("floor",)},
    ("truncation", "MEAN"): {"roundings": ("floor",)},
    ("truncation", "TANH"): {"table_segments": 32, "roundings": ("floor",)},
    ("float32", "FULLY_CONNECTED"): {"multiplier": "float32", "roundings": ("half_even",), "zero_point": "before"},
    ("float32", "AVERAGE_POOL_2D"): {"roundings": ("half_even",), "zero_point": "before"},
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), list(FOUND))
def test_made_up_arithmetic_is_found(name: str, kind: str) -> None:
    found = identify(DEVICES[name], operators=[kind], codes=CODES)
    (row,) = found.operators
    chosen = found.chosen(row)
    assert found and row.explained and row.codes >= CODES and chosen is not None and chosen.arithmetic is not None
    assert {word: getattr(chosen.arithmetic, word) for word in FOUND[name, kind]} == FOUND[name, kind]
    # Of other graphs, whose shapes and strides no probe had, it says what the device computes.
    rng, device = np.random.default_rng(1), found.profile
    for _ in range(6):
        graph = random_graph(rng, kind)
        codes = {name: array[:1] for name, array in random_codes(rng, graph).items()}
        if graph.operators[0].attributes.get("dilations", (1, 1)) == (1, 1) and len(graph.operators) == 1:
            (expected,) = DEVICES[name](tflite_bytes(graph), codes).values()
            assert np.array_equal(simulate(graph, codes, device, progress=False)["y"], expected)


def test_noise_is_called_unexplained() -> None:
    found = identify(Noisy(DEVICES["float32"], 1e-3), operators=["FULLY_CONNECTED", "MAX_POOL_2D"], codes=CODES)
    assert not found and found.unexplained == found.operators
    for row in found.operators:
        assert 0 < row.differing < row.codes / 100 and row.places and row.reason.startswith("Asked the same twice")
        assert all(place.device != place.nearest for place in row.places)
    data = found.as_data()
    assert set(data["unexplained"]) == {"FULLY_CONNECTED", "MAX_POOL_2D"} and not data["compared"]
    assert "UNEXPLAINED" in found.text() and "0 of 2 operators explained" in repr(found)


def test_arithmetic_of_no_hypothesis_is_called_unexplained() -> None:
    def odd(content: bytes, codes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        (y,) = DEVICES["truncation"](content, codes).values()
        return {"y": np.where(y == 17, 18, y).astype(y.dtype)}

    (row,) = identify(odd, operators=["MUL"], codes=CODES).operators
    assert not row.explained and row.differing and not row.reason


def test_what_a_device_rejects_is_absent() -> None:
    found = identify(DEVICES["float32"], operators=["SOFTMAX", "ADD:int16"])
    assert not found and [row.hypothesis for row in found.operators] == [None, None]
    assert found.as_data()["absent"] == ["SOFTMAX", "ADD:int16"] and "absent: no SOFTMAX of int8" in found.text()
    with pytest.raises(ValueError, match="operators must be among CONV_2D, .*, got CONV_9D$"):
        identify(DEVICES["float32"], operators=["CONV_9D"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [("reference", "FULLY_CONNECTED"), ("xnnpack-x86", "MUL"), ("micro", "RESIZE_BILINEAR"), ("micro", "LOGISTIC")],
)
def test_runtimes_are_found_without_their_names(name: str, kind: str) -> None:
    if name not in profiles_here():
        pytest.skip(f"{name} does not run here")

    def run(content: bytes, codes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return open_runtime(content, list(codes), ["y"], name).run(codes)

    (row,) = identify(run, operators=[kind], codes=CODES).operators
    assert row.explained and Hypothesis(name) in (row.hypothesis, *row.rivals)


@pytest.fixture
def command(tmp_path: Path) -> str:
    """Runs files on a made-up device."""
    script, folder = tmp_path / "run.py", Path(__file__).resolve().parents[1]
    script.write_text(
        "import sys, numpy as np\n"
        f"sys.path.insert(0, {str(folder)!r})\n"
        "from made_up_devices import DEVICES\n"
        "content = open(sys.argv[2], 'rb').read()\n"
        "np.savez(sys.argv[4], **DEVICES[sys.argv[1]](content, dict(np.load(sys.argv[3]))))\n"
    )
    return shlex.join([sys.executable, str(script), "float32"])


def test_a_command_runs_files(command: str) -> None:
    found = identify(CommandRunner(command), operators=["GELU"], codes=1)
    (gelu,) = found.operators
    assert gelu.hypothesis is None and gelu.runs == 4 and "no GELU of int8" in gelu.reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("raise KeyError('no NPU')", "exit status 1: KeyError: 'no NPU'"),
        ("import os; os.kill(os.getpid(), 11)", "signal 11: no results"),
        ("import time; time.sleep(60)", "it takes longer than 2 seconds"),
        ("pass", "exit status 0: no results"),
        ("open(out, 'w').write('hello')", "what it writes is not an .npz of codes by name"),
        ("np.save(open(out, 'wb'), np.zeros(3))", "what it writes is not an .npz of codes by name"),
        ("np.savez(out, y=np.array([{}], object))", "what it writes is not an .npz of codes by name"),
        ("np.savez(out)", r"its result is float64 \[0\], not int8 \[1, 256\]"),
        ("np.savez(out, y=np.zeros((1, 256), np.float32))", r"its result is float32 \[1, 256\], not int8"),
    ],
)
def test_a_bad_command_is_said_in_a_sentence(line: str, reason: str) -> None:
    if "kill" in line and not hasattr(os, "killpg"):
        pytest.skip("no signals here")
    words = [sys.executable, "-c", f"import sys, numpy as np\nprint('loud')\nout = sys.argv[3]\n{line}"]
    run = CommandRunner(shlex.join(words), seconds=2 if "sleep" in line else 120)
    with pytest.raises(RuntimeError, match="loud" if "no results" in reason else reason):
        question(run, "RELU")


def question(run: Any, kind: str) -> None:
    """One file of an operator."""
    builder = Builder()
    codes = probe(kind, np.random.default_rng(0), builder, "rounding")
    _Question(builder.graph(["y"]), codes).answer(run, ".tflite")


def test_what_is_no_command_or_name_is_refused() -> None:
    for command, message in (
        ("", "runner must begin with a program that can be run here, got ''"),
        ("no-such-command x", "runner must begin with a program that can be run here"),
        ("python 'x", "runner .* cannot be split into words: No closing quotation"),
    ):
        with pytest.raises(ValueError, match=message):
            CommandRunner(command)
    for name, message in (
        ("micro", "name must not be that of a declared device .*, got 'micro'"),
        ("tosa", "name must not be that of a declared device"),
        (" ", "name must be a word that does not end with .json, got ' '"),
    ):
        with pytest.raises(ValueError, match=message):
            identify(DEVICES["float32"], name=name)
    with pytest.raises(ValueError, match=r"file must be .tflite or .onnx, got '.h5'"):
        identify(DEVICES["float32"], file=".h5")


@pytest.mark.parametrize("name", names())
def test_every_operator_has_graphs_for_all_questions(name: str) -> None:
    kind, _, dtype = name.partition(":")
    groups = [groups[0] for groups in OPERATORS[kind].asks if not (dtype and groups == ("accumulator",))]
    for group in ("", *groups):
        drawn = 0
        for seed in range(20):
            builder = Builder()
            try:
                codes = probe(kind, np.random.default_rng(seed), builder, group, dtype or "int8")
                graph = builder.graph(["y"])
            except Refusal:
                continue
            drawn += 1
            assert graph.operators[0].kind == kind and set(codes) == set(graph.inputs)
        assert drawn, group


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("kind", ["RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"])
def test_places_are_exact(kind: str, halves: bool, corners: bool) -> None:
    if kind == "RESIZE_BILINEAR" and halves and corners:
        pytest.skip("this operator has no such form")
    rng, exact = np.random.default_rng(0), Hypothesis("reference", Arithmetic(position_bits=64))
    for size, wanted in ((14, 46), (8, 47), (3, 7), (5, 1), (1, 4), (2, 41), (9, 4)):
        builder = Builder()
        builder.input("x", (1, size, 1, 1), per_tensor(0.1, 0))
        how = {"align_corners": corners, "half_pixel_centers": halves}
        builder.operator(kind, ["x"], None, name="y", size=(wanted, 1), **how)
        codes = rng.integers(-128, 128, (1, size, 1, 1)).astype(np.int8)
        y = predicted(builder.graph(["y"]), {"x": codes}, exact).reshape(-1)
        moves = int(corners and wanted > 1)
        for at in range(wanted):
            place = (at + Fraction(int(halves), 2)) * (size - moves) / (wanted - moves)
            if kind == "RESIZE_NEAREST_NEIGHBOR":
                expected = codes[0, min(math.floor(place + Fraction(int(corners), 2)), size - 1), 0, 0]
            else:
                place = min(max(place - Fraction(int(halves), 2), Fraction(0)), Fraction(size - 1))
                below = math.floor(place)
                pair = [int(codes[0, index, 0, 0]) for index in (below, min(below + 1, size - 1))]
                expected = math.floor(pair[0] + (place - below) * (pair[1] - pair[0]) + Fraction(1, 2))
            assert y[at] == expected, (size, wanted, at)


def test_the_command_line_writes_a_device(command: str, tmp_path: Path, known: None) -> None:
    pytest.importorskip("typer", reason="needs exactqat[job]")
    from typer.testing import CliRunner

    from exactqat.cli.application import command_line

    path = tmp_path / "board.json"
    words = ["identify", "--runner", command, "--out", str(path), "--operator", "MAX_POOL_2D", "--codes", "1"]
    done = CliRunner().invoke(command_line(), words)
    assert done.exit_code == 0 and "board: 1 of 1 operators explained" in done.output
    data = json.loads(path.read_bytes())
    assert data["name"] == "board" and set(data["compared"]) == {"MAX_POOL_2D"}
    assert profile_named(path).name == "board"
    nothing = CliRunner().invoke(command_line(), [*words[:2], "no-such-command", *words[3:]])
    assert nothing.exit_code == 2


# --- what is found is trained for ------------------------------------------------------------------------------------


def small(rng: np.random.Generator) -> tuple[Graph, dict[str, np.ndarray]]:
    builder = Builder()
    builder.input("x", (1, 8, 8, 3), per_tensor(0.03, -5))
    filter, bias = rng.integers(-127, 128, (6, 3, 3, 3)), rng.integers(-900, 900, 6)
    builder.conv_2d("x", filter, rng.uniform(0.004, 0.01, 6), bias, per_tensor(0.11, 4), name="first")
    builder.logistic("first", name="gate")
    builder.mul("first", "gate", per_tensor(0.1, 4), name="product")
    builder.average_pool_2d("product", name="pooled", filter_size=(3, 3), strides=(2, 2), padding="SAME")
    return builder.graph(["pooled"]), {"x": rng.integers(-128, 128, (3, 8, 8, 3)).astype(np.int8)}


class Whole:
    """A made-up device that runs networks, one operator after the other."""

    def __init__(self, device: MadeUp) -> None:
        self.device = device

    def __call__(self, content: bytes, codes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        graph = deploy.formats.read_tflite.read_content(content).graph
        values = dict(codes)
        for operator in graph.operators:
            one = Graph(graph.tensors, (operator,), tuple(n for n in operator.inputs if graph.tensors[n].data is None),
                        operator.outputs)  # fmt: skip
            feeds = {name: values[name] for name in one.inputs}
            values |= self.device(tflite_bytes(one), feeds)
        return {name: values[name] for name in graph.outputs}


@pytest.fixture
def board(tmp_path: Path, known: None) -> str:
    """The file of a made-up device."""
    kinds = ["CONV_2D", "LOGISTIC", "MUL", "AVERAGE_POOL_2D", "FULLY_CONNECTED", "MEAN"]
    found = identify(DEVICES["64 entries"], name="board", operators=kinds, codes=1)
    assert found
    return str(found.write(tmp_path / "board.json"))


@pytest.mark.slow
def test_a_file_is_taken_for_the_device(board: str, tmp_path: Path) -> None:
    graph, codes = small(np.random.default_rng(0))
    path = write_tflite(graph, tmp_path / "model.tflite")
    report = verify(graph, path, codes, board, run=Whole(DEVICES["64 entries"]))
    assert report.profile == "board" and report.values > 0 == report.differing and report.equal
    assert all(row.exact for row in report.operators) and not unclaimed(graph, board)
    other = simulate(graph, codes, "xnnpack-x86", graph.results(), progress=False)
    own = simulate(graph, codes, board, graph.results(), progress=False)
    assert not np.array_equal(own["gate"], other["gate"])
    wrong = verify(graph, path, codes, board, run=Whole(DEVICES["truncation"]))
    assert wrong.differing and not wrong.equal


@pytest.mark.slow
def test_a_network_is_trained_for_it(board: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from exactqat import qat, tune

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 24), torch.nn.SiLU(), torch.nn.Linear(24, 10))
    x = torch.rand(16, 40)
    prepared = qat.prepare(model, x, device=board)
    qat.calibrate(prepared, [x])
    qat.freeze(prepared)
    prepared.train()(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in prepared.parameters() if p.ndim == 2)
    prepared.eval()
    graph = deploy.lower(prepared)
    assert prepared.profile == graph.trained_for == "board"
    path, codes = write_tflite(graph, tmp_path / "model.tflite"), deploy.input_codes(graph, x.numpy())
    report = verify(
        graph, path, codes, run=Whole(DEVICES["64 entries"]), trained_codes=deploy.device_codes(prepared, x)
    )
    assert report.values > 0 == report.differing == report.training_differing < report.training_values
    labels = np.zeros(16, np.int64)
    verdict = tune.Gate((x.numpy(), labels), devices=[board], max_differ=0).verdict(graph)
    assert verdict.devices[0].device == "board" and not verdict.failures


def test_a_device_of_a_file_is_a_declared_one(known: None) -> None:
    device: Profile = declare(profile_of_data(STATED))
    assert device.of("MUL") in {device.of("MUL")} and hash(device) == hash(profile_of_data(STATED))


@pytest.fixture
def tosa(known: None) -> Iterator[Profile]:
    """As when it is named for the first time."""
    yield profile_named("tosa")


def test_tosa_is_declared_when_it_is_named(tosa: Profile) -> None:
    assert tosa is profile_named("tosa") is PROFILES["tosa"] and tosa.stored == "tosa" and tosa.runtime == ""
    claimed = dict(tosa.compared)
    assert {"CONV_2D", "ADD", "RESIZE_BILINEAR", "SOFTMAX:int16", "ARG_MAX", "CONV_2D:int16", "TANH:int16"} <= set(
        claimed
    )
    assert min(claimed.values()) > 10**5
    rng = np.random.default_rng(0)
    assert unclaimed(random_graph(rng, "CONV_2D"), tosa) == () != unclaimed(random_graph(rng, "SQRT"), tosa)


def test_tosa_rounds_operands_of_a_sum_once(tosa: Profile) -> None:
    builder = Builder()
    for name, mantissa, zero_point in (("z", "0x1.99999a0000000p-8", 127), ("x", "0x1p-8", 0)):
        builder.input(name, (1, 1), per_tensor(float.fromhex(mantissa), zero_point))
    builder.add("z", "x", per_tensor(float.fromhex("0x1.99999a0000000p-8"), 0), name="y")
    graph, codes = builder.graph(["y"]), {"z": np.int8([[72]]), "x": np.int8([[-116]])}
    # What the reference model computed.
    assert [int(simulate(graph, codes, name)["y"][0, 0]) for name in ("tosa", "reference")] == [-127, -128]


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.skipif("TOSA_TOOLS" not in os.environ, reason="needs an environment of tosa-tools, as TOSA_TOOLS")
def test_a_network_for_tosa_on_its_reference_model(bits: int, tosa: Profile, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from tosa_model import ReferenceModel

    from exactqat import qat

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.inner = torch.nn.Conv2d(3, 16, 3, 2, 1), torch.nn.Conv2d(16, 16, 3, 1, 1, groups=16)
            self.pool, self.head = torch.nn.AvgPool2d(3), torch.nn.Linear(16 * 49, 10)

        def forward(self, x: Any) -> Any:
            x = torch.relu(self.stem(x))
            x = x + torch.tanh(self.inner(x))
            x = torch.nn.functional.interpolate(x, size=(21, 21), mode="bilinear")
            scores = self.head(self.pool(x).flatten(1))
            return scores if bits == 8 else torch.softmax(scores, -1)  # that of int8 is not claimed

    torch.manual_seed(0)
    x = torch.rand(32, 3, 30, 30)
    prepared = qat.prepare(Network(), x, [qat.Rule("*", activation_bits=bits)], device="tosa")
    qat.calibrate(prepared, [x])
    qat.freeze(prepared)
    optimizer = torch.optim.SGD(prepared.parameters(), 0.01)
    for _ in range(3):
        prepared.train()(x).square().mean().backward()
        optimizer.step()
    prepared.eval()
    graph = deploy.lower(prepared)
    path = write_tflite(graph, tmp_path / "model.tflite")
    run = ReferenceModel(Path(os.environ["TOSA_TOOLS"]))
    report = verify(graph, path, device="tosa", data=x.numpy(), model=prepared, run=run)
    assert report and report.values > 300_000 and report.training_values > 300_000 and not unclaimed(graph, "tosa")


def stated_file(folder: Path) -> str:
    """A device whose sums are rounded to no other device's codes."""
    coarse = {"arithmetic": {"multiplier_bits": 4, "multiplier_rounding": "floor"}}
    path = folder / "coarse.json"
    path.write_text(json.dumps({**NPU, "name": "coarse", "operators": {"FULLY_CONNECTED": coarse}}))
    return str(path)


def forget(name: str) -> None:
    """As in a new process."""
    del profile._PROFILES[name]


def test_the_device_of_a_file_is_in_checkpoints(tmp_path: Path, known: None) -> None:
    torch = pytest.importorskip("torch")
    from exactqat import qat

    model, x = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5)), torch.rand(16, 12)
    prepared = qat.prepare(model, x, device=stated_file(tmp_path))
    qat.calibrate(prepared, [x])
    qat.freeze(prepared)
    prepared.eval()
    before, graph = prepared(x), deploy.lower(prepared)
    (own,) = deploy.output_values(graph, simulate(graph, deploy.input_codes(graph, x.numpy()), "coarse")).values()
    assert np.array_equal(before.detach().numpy(), own) and graph.trained_for == "coarse"
    (other,) = deploy.output_values(graph, simulate(graph, deploy.input_codes(graph, x.numpy()), "reference")).values()
    assert not np.array_equal(own, other)
    torch.save(prepared.state_dict(), tmp_path / "state.pt")
    again = qat.prepare(model, x)
    forget("coarse")
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
    again.eval()
    assert again.profile == "coarse" in PROFILES and torch.equal(again(x), before)


def test_jax_trains_for_a_file(tmp_path: Path, known: None) -> None:
    jax = pytest.importorskip("jax")
    from exactqat import qat

    rng = np.random.default_rng(0)
    params = {"w": jax.numpy.asarray(rng.normal(size=(12, 5)), "float32")}
    x = jax.numpy.asarray(rng.random((16, 12)), "float32")
    prepared = qat.jax.prepare(lambda p, x: x @ p["w"], params, x, device=stated_file(tmp_path))
    params, state = prepared.freeze(*prepared.calibrate(*prepared.init(), [x]))
    graph = prepared.lower(params, state)
    y = prepared.apply(params, state, x)[0]
    (own,) = deploy.output_values(graph, simulate(graph, deploy.input_codes(graph, np.asarray(x)), "coarse")).values()
    assert graph.trained_for == "coarse" and np.array_equal(np.asarray(y), own)


def test_settings_of_a_job_hold_the_device_of_a_file(tmp_path: Path, known: None) -> None:
    pytest.importorskip("typer", reason="needs exactqat[job]")
    from exactqat.application.job.settings import Settings

    settings = Settings(tmp_path, device=stated_file(tmp_path))
    assert settings.device == "coarse" and "--device coarse.json" in settings.options()
    stored = json.loads(json.dumps(settings.stored()))
    forget("coarse")
    assert Settings(tmp_path, **stored) == settings and "coarse" in PROFILES
    for content, message in (("{}", "does not declare a device"), (None, "cannot be read: No such file")):
        path = tmp_path / "other.json"
        if content is not None:
            path.write_text(content)
        with pytest.raises(ValueError, match=message):
            Settings(tmp_path, device=str(path))
        path.unlink(missing_ok=True)
    path.write_text(json.dumps({**NPU, "name": "boxed", "file": ".onnx"}))
    with pytest.raises(ValueError, match="must be one of .*, got 'boxed'"):
        Settings(tmp_path, device=str(path))
