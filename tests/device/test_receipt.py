# SPDX-License-Identifier: Apache-2.0
"""Receipts: a short C routine names the first layer that a board computes otherwise."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from device_cases import with_sigmoid  # noqa: E402

from exactqat import deploy  # noqa: E402
from exactqat.deploy import Builder, Graph, per_tensor  # noqa: E402
from exactqat.deploy.formats.tflite import tflite_bytes  # noqa: E402

# A compiler, and what runs its programs here.
MACHINES = {"here": (["gcc"], []), "aarch64": (["aarch64-linux-gnu-gcc", "-static"], ["qemu-aarch64"])}
LARGEST_CODE = 2048
STRICT = ["-std=c99", "-Os", "-Wall", "-Wextra", "-pedantic", "-Werror"]
PROGRAM = """
#include <stdio.h>
#include <stdlib.h>
#include "tiny_receipt.h"
int main(void) {
  uint32_t digests[TINY_RECEIPT_ROWS] = {0}, about[2];
  while (fread(about, 4, 2, stdin) == 2) {
    void* data = malloc(about[1]);
    if (fread(data, 1, about[1], stdin) != about[1]) return 1;
    tiny_receipt_add(digests, (int32_t)about[0], data, about[1]);
    free(data);
  }
  const char* wrong = tiny_receipt_first_wrong(digests);
  printf("%d examples of %d bytes: %s", TINY_RECEIPT_EXAMPLES, TINY_RECEIPT_INPUT_0_BYTES, wrong ? wrong : "all right");
  return tiny_receipt_input_0[0] != FIRST;
}
"""


@pytest.fixture(scope="module")
def graph() -> Graph:
    """A convolution, a sigmoid, which LiteRT and TFLite-Micro compute otherwise, and a dense layer."""
    return with_sigmoid('a "sigmoid"')


def inputs_of(given: deploy.Receipt, graph: Graph) -> np.ndarray:
    shape = graph.tensors["x"].shape
    return given.inputs["x"].view(np.int8).reshape(given.examples, *shape[1:])


def on_micro(content: bytes, given: deploy.Receipt, graph: Graph) -> Iterator[tuple[int, bytes]]:
    """What TFLite-Micro holds in each tensor, example by example."""
    runtime = pytest.importorskip("tflite_micro", reason="needs exactqat[micro]").runtime
    keep = runtime.InterpreterConfig.kPreserveAllTensors
    interpreter = runtime.Interpreter.from_bytes(content, arena_size=1 << 20, intrepreter_config=keep)
    for example in inputs_of(given, graph):
        interpreter.set_input(example[None], 0)
        interpreter.invoke()
        for row in reversed(given.rows[1:]):  # the order does not matter
            yield row.tensor, bytes(np.asarray(interpreter.GetTensor(row.tensor, 0)["tensor_data"]).tobytes())


def on_another(device: str, given: deploy.Receipt, graph: Graph, broken: str = "") -> Iterator[tuple[int, bytes]]:
    """What another device holds; one code of one tensor is off by one."""
    names = [row.name for row in given.rows[2:]]
    for example in inputs_of(given, graph):
        results = {"x": example[None], **deploy.simulate(graph, example[None], device, names, progress=False)}
        if broken:
            results[broken].reshape(-1)[-1] ^= 1
        yield from ((row.tensor, results[row.name].tobytes()) for row in given.rows[1:])


def compiled(folder: Path, machine: str, first: int) -> list[str]:
    """The command of the program for the receipt that lies in the folder."""
    compiler, runner = MACHINES[machine]
    if shutil.which(compiler[0]) is None or (runner and shutil.which(runner[0]) is None):
        pytest.skip(f"needs {' and '.join([compiler[0], *runner])}")
    (folder / "main.c").write_text(PROGRAM)
    subprocess.run([*compiler, *STRICT, f"-DFIRST={first}", "main.c", "-o", machine], cwd=folder, check=True)
    return [*runner, f"./{machine}"]


@pytest.mark.parametrize("machine", MACHINES)
def test_a_board_names_the_first_wrong_layer(machine: str, graph: Graph, tmp_path: Path) -> None:
    given, content = deploy.receipt(graph, device="micro"), tflite_bytes(graph)
    (tmp_path / "tiny_receipt.h").write_text(given.c_source("tiny"))
    command = compiled(tmp_path, machine, int(given.inputs["x"][0]))

    def said(held: Iterator[tuple[int, bytes]], file: bytes = content) -> str:
        messages = [(-1, file), (99, b"a tensor that is none of the rows"), *held]
        text = b"".join(struct.pack("<iI", tensor, len(data)) + data for tensor, data in messages)
        return subprocess.run(command, cwd=tmp_path, input=text, capture_output=True, check=True).stdout.decode()

    assert said(on_micro(content, given, graph)) == "4 examples of 243 bytes: all right"
    # One broken layer; another device, from the first layer on; another file; another example.
    assert said(on_another("micro", given, graph, 'a "sigmoid"')) == '4 examples of 243 bytes: a "sigmoid"'
    assert said(on_another("xnnpack-x86", given, graph)).endswith(": y")
    assert said(on_another("micro", given, graph), content[:-1]).endswith("model")
    assert said(iter(list(on_another("micro", given, graph))[5:])).endswith("x")


@pytest.mark.parametrize("machine", MACHINES)
def test_the_routine_is_small(machine: str, graph: Graph, tmp_path: Path) -> None:
    (tmp_path / "tiny_receipt.h").write_text(deploy.receipt(graph).c_source("tiny"))
    compiler = MACHINES[machine][0][0]
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    source = '#include "tiny_receipt.h"\nvoid* used[] = {(void*)tiny_receipt_add, (void*)tiny_receipt_first_wrong};\n'
    (tmp_path / "used.c").write_text(source)
    subprocess.run([compiler, "-Os", "-c", "used.c"], cwd=tmp_path, check=True)
    tool = compiler.replace("gcc", "size")
    sections = subprocess.run([tool, "-A", "used.o"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    sizes = [int(size) for size in re.findall(r"^\.text\S*\s+(\d+)", sections, re.M)]
    assert 0 < sum(sizes) <= LARGEST_CODE


def test_what_a_receipt_says(graph: Graph, tmp_path: Path) -> None:
    x = np.arange(2 * 9 * 9 * 3, dtype=np.int32).astype(np.int8).reshape(2, 9, 9, 3)
    given = deploy.receipt(graph, x, "micro", accuracy=0.9375)
    file = deploy.write_tflite(graph, tmp_path / "model.tflite").read_bytes()
    content = json.loads(given.write(tmp_path / "receipt.json").read_text())
    assert content["exactqat_receipt"] == 1 and content["sha256"] == hashlib.sha256(file).hexdigest()
    assert (content["device"], content["examples"], content["accuracy"]) == ("micro", 2, 0.9375)
    assert content["compared_on"].startswith("tflite-micro ") and content["unclaimed"] == []
    assert [row["kind"] for row in content["rows"]] == ["file", "input", *(step.kind for step in graph.operators)]
    assert all(re.fullmatch("[0-9a-f]{8}", row["digest"]) for row in content["rows"])
    assert "93.75% right" in str(given)
    with pytest.raises(ValueError, match="C identifier"):
        given.c_source("1st")
    with pytest.raises(ValueError, match="no examples"):
        deploy.receipt(graph, x[:0])
    with pytest.raises(ValueError, match="has no tensors"):
        deploy.receipt(graph, x, content=tflite_bytes(graph.with_outputs(["y"])).replace(b"flat", b"flot"))


def test_a_receipt_of_a_network_with_memory() -> None:
    builder = Builder()
    x = builder.input("x", (1, 4), per_tensor(0.5, 0))
    before = builder.variable("before", (1, 4), per_tensor(0.5, 0), successor="x")
    graph = builder.graph([builder.add(x, before, per_tensor(1.0, 0), name="sum")])
    codes = np.random.default_rng(0).integers(-128, 128, (3, 4)).astype(np.int8)
    rows = {row.name: row.digest for row in deploy.receipt(graph, codes).rows}
    parts, state = [], dict[str, np.ndarray]()
    for code in codes:
        parts.append(deploy.simulate(graph, code[None], state=state, progress=False)["sum"].tobytes())
    assert rows["sum"] == zlib.crc32(b"".join(parts))
