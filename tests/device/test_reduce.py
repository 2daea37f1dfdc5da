# SPDX-License-Identifier: Apache-2.0
"""Files on which devices disagree, reduced to what still shows it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from test_mechanisms import CASES, made

from exactqat import cli
from exactqat.deploy import Builder, per_tensor, read_tflite, simulate, write_tflite
from exactqat.deploy.reduce import cut_out, difference, reduce, shrink
from exactqat.kit.device import PROFILES
from exactqat.kit.device.operator import Refusal

# Values that are left, weights included, and of what: a result needs no more than one value of each operand.
LEFT = {
    "half to even or away": ("CONV_2D", 6),
    "two roundings": ("CONV_2D", 24),
    "fused": ("MEAN", 6),
    "half up": ("MUL", 2),
    "dense": ("FULLY_CONNECTED", 3),
    "fixed point": ("LOGISTIC", 1),
}


@pytest.mark.parametrize("name", CASES)
def test_a_difference_is_reduced(name: str, tmp_path: Path) -> None:
    graph, codes = made(name)
    pair = CASES[name][1]
    kind, most = LEFT[name]
    number = next(at for at, operator in enumerate(graph.operators) if operator.kind == kind)
    values = {**codes, **simulate(graph, codes, pair[0], graph.results())}
    differs = difference(*pair)
    for example in range(len(codes[graph.inputs[0]])):
        part = cut_out(graph, number)
        inputs = {source: values[source][example : example + 1] for source in part.inputs}
        if differs(part, inputs):
            break
    small, left = shrink(part, inputs, differs)
    small.validate()
    assert differs(small, left)
    size = sum(array.size for array in left.values())
    size += sum(tensor.data.size for tensor in small.tensors.values() if tensor.data is not None)
    assert size <= most and [operator.kind for operator in small.operators] == [kind]


@pytest.mark.slow
def test_what_is_written_shows_the_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, codes = made("half to even or away")
    path = write_tflite(graph, tmp_path / "model.tflite")
    np.savez(tmp_path / "x.npz", **codes)
    arguments = [str(path), "--data", str(tmp_path / "x.npz"), "--device", "reference", "--reduce"]
    monkeypatch.setattr(sys, "argv", ["exactqat", "inspect", *arguments, str(tmp_path / "small")])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    errors = " ".join(capsys.readouterr().err.split())
    assert "small.npz: CONV_2D of" in errors and "half to even or away from zero" in errors
    small = read_tflite(tmp_path / "small.tflite")
    with np.load(tmp_path / "small.npz") as arrays:
        inputs = {name: arrays[name] for name in small.inputs}
        results = [{name: arrays[f"{side}/{name}"] for name in small.outputs} for side in ("xnnpack-x86", "reference")]
    for side, expected in zip(("xnnpack-x86", "reference"), results, strict=True):
        for name, codes_of in simulate(small, inputs, side).items():
            np.testing.assert_array_equal(codes_of, expected[name])
    assert any(not np.array_equal(results[0][name], results[1][name]) for name in small.outputs)


def test_a_runtime_that_is_not_as_simulated() -> None:
    """The reference kernels beside a simulation that takes them for XNNPACK."""
    graph, codes = made("half to even or away")
    wrong = replace(PROFILES["reference"], delegates=True)
    differs = difference(wrong, wrong)
    part = cut_out(graph, 2)
    values = simulate(graph, codes, "reference", part.inputs)
    inputs = next(
        operands
        for example in range(len(codes["x"]))
        if differs(part, operands := {name: array[example : example + 1] for name, array in values.items()})
    )
    small, left = shrink(part, inputs, differs)
    assert sum(array.size for array in left.values()) <= 4 and differs(small, left)
    assert not difference("reference", "reference")(small, left)


@pytest.mark.slow
def test_nothing_to_reduce(tmp_path: Path) -> None:
    builder = Builder()
    builder.input("x", (1, 4), per_tensor(0.1, 0))
    graph = builder.graph([builder.reshape("x", (1, 2, 2), name="y")])
    path = write_tflite(graph, tmp_path / "model.tflite")
    assert reduce(path, tmp_path / "small", devices=["reference"]) is None
    (tmp_path / "damaged.tflite").write_bytes(path.read_bytes()[:100])
    with pytest.raises(Refusal, match="damaged"):
        reduce(tmp_path / "damaged.tflite", tmp_path / "small")
    assert not list(tmp_path.glob("small*"))
