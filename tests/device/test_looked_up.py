# SPDX-License-Identifier: Apache-2.0
"""Every form in which files look rows of a table up, beside the runtimes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from device_cases import random_quantization

from exactqat.deploy import EXACT, Builder, profiles_here, simulate
from exactqat.deploy.formats.read_tflite import read_content
from exactqat.deploy.formats.tflite import tflite_bytes
from exactqat.deploy.runtimes import open_runtime
from exactqat.deploy.runtimes.trial import RuntimeRefusal
from exactqat.kit.device import OPERATORS, Tensor
from exactqat.kit.device.operator import FileStep
from exactqat.kit.device.tensor import INDICES

COUNT = 12 * int(os.environ.get("EXACTQAT_SWEEP", "1"))
Make = Callable[[Tensor, Tensor, Tensor], Sequence[FileStep]]


def constant(name: str, values: Any, dtype: Any = np.int32) -> Tensor:
    data = np.asarray(values, dtype)
    return Tensor(name, data.shape or (1,), str(data.dtype), INDICES, data.reshape(data.shape or (1,)))


def by_rows(kind: str, options: str) -> Make:
    """As one row of indices, whose result is brought into shape."""

    def make(indices: Tensor, table: Tensor, output: Tensor) -> Sequence[FileStep]:
        count = int(np.prod(indices.shape))
        into, back = constant("row", [count]), constant("back", output.shape)
        operands: tuple[Any, ...] = (1, "flat") if kind == "GATHER" else ("flat", 1)
        return (
            FileStep("RESHAPE", (0, into), 1, "ReshapeOptions", name="flat", dtype="int32", shape=(count,)),
            FileStep(kind, operands, 2, options, name="rows", dtype="int8", shape=(count, *table.shape[1:])),
            FileStep("RESHAPE", ("rows", back), 1, "ReshapeOptions"),
        )

    return make


def plainly(kind: str, operands: tuple[int, ...], options: str) -> Make:
    return lambda indices, table, output: (FileStep(kind, operands, 2, options),)


def one_hot(indices: Tensor, table: Tensor, output: Tensor) -> Sequence[FileStep]:
    assert table.data is not None
    on, off = int(table.data[0, 0]), int(table.data[0, -1])
    depth = Tensor("depth", (1,), "int32", INDICES, np.array([len(table.data)], np.int32))
    codes = [Tensor(name, (1,), "int8", output.quantization, np.array([value], np.int8))
             for name, value in (("on", on), ("off", off))]  # fmt: skip
    return (FileStep("ONE_HOT", (0, depth, *codes), 1, "OneHotOptions", {"axis": -1}),)


# Form -> how it is written, and whether its indices are one row.
FORMS: dict[tuple[str, ...], tuple[Make, bool]] = {
    ("GATHER",): (plainly("GATHER", (1, 0), "GatherOptions"), False),
    ("EMBEDDING_LOOKUP",): (plainly("EMBEDDING_LOOKUP", (0, 1), ""), True),
    ("ONE_HOT",): (one_hot, False),
    ("RESHAPE", "EMBEDDING_LOOKUP", "RESHAPE"): (by_rows("EMBEDDING_LOOKUP", ""), False),
    ("RESHAPE", "GATHER", "RESHAPE"): (by_rows("GATHER", "GatherOptions"), False),
}


def test_every_form_is_here() -> None:
    assert set(FORMS) == set(OPERATORS["EMBEDDING"].other_forms)


@pytest.mark.parametrize("profile", profiles_here())
@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_a_form_is_the_runtimes(form: tuple[str, ...], profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, one_row = FORMS[form]
    declaration = OPERATORS["EMBEDDING"]
    monkeypatch.setattr(declaration, "tflite_steps", lambda inputs, output, attributes: make(*inputs, output))
    rng, compared = np.random.default_rng(len(form)), 0
    for _ in range(COUNT):
        builder = Builder()
        sizes = [] if one_row else [int(size) for size in rng.integers(1, 9, rng.integers(1, 3))]
        builder.input("x", (1, *sizes), INDICES)
        rows, features = (int(size) for size in rng.integers(2, 30, 2))
        codes = rng.integers(-128, 128, (rows, features)).astype(np.int8)
        if form == ("ONE_HOT",):
            codes = np.where(np.eye(rows, dtype=bool), codes[0, 0], codes[0, 1]).astype(np.int8)
        builder.constant("table", codes, random_quantization(rng))
        content = tflite_bytes(builder.graph([builder.embedding("x", "table", name="y")]))
        graph = read_content(content).graph
        assert [operator.kind for operator in graph.operators] == ["EMBEDDING"]
        indices = rng.integers(0, rows, (1, *sizes)).astype(np.int32)
        (result,) = simulate(graph, {"x": indices}, profile).values()
        np.testing.assert_array_equal(result, codes[indices])
        try:
            device = open_runtime(content, graph.inputs, graph.outputs, profile).run({"x": indices})
        except RuntimeRefusal:
            assert profile == "micro"  # which lacks some of these
            continue
        np.testing.assert_array_equal(device["y"], result)
        compared += result.size
    assert compared > 100 or profile == "micro"
    assert ("EMBEDDING", profile) in EXACT
