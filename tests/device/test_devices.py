# SPDX-License-Identifier: Apache-2.0
"""Devices and what they take: emulated ARM64, TFLite-Micro's arena, Vela, C headers.

The campaigns are `python tests/campaigns/run_devices.py` over all networks, `python tests/campaigns/sweep.py` over all
operators.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
pytest.importorskip("torch", reason="needs exactqat[torch]")

from run_devices import MLPERF_TINY, graph_of
from sweep import sweep

from exactqat import tune
from exactqat.deploy import (
    Builder,
    Graph,
    c_array,
    footprint,
    npu_footprint,
    per_tensor,
    profiles_here,
    simulate,
    unclaimed,
    verify,
    write_c_array,
    write_tflite,
)
from exactqat.deploy.formats.tflite import tflite_bytes
from exactqat.deploy.runtimes import emulation
from exactqat.deploy.runtimes.trial import RuntimeRefusal
from exactqat.kit.device import OPERATORS, PROFILES, Refusal

needs_micro = pytest.mark.skipif("micro" not in profiles_here(), reason="needs exactqat[micro]")
needs_emulation = pytest.mark.skipif(not emulation.is_set_up(), reason=f"ARM64: {emulation.SET_UP} sets it up")


made = cache(graph_of)


def small_graph() -> Graph:
    rng = np.random.default_rng(0)
    builder = Builder()
    x = builder.input("x", (1, 6, 6, 2), per_tensor(0.02, 3))
    filter = rng.integers(-127, 128, (4, 3, 3, 2)).astype(np.int8)
    y = builder.conv_2d(x, filter, [0.01] * 4, np.zeros(4, int), per_tensor(0.1, -5), name="y", activation="RELU")
    return builder.graph([y])


# --- emulated processors ----------------------------------------------------------------------------------------------


def test_without_its_emulation_arm64_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXACTQAT_ARM64", str(tmp_path))
    graph = small_graph()
    codes = np.zeros((1, 6, 6, 2), np.int8)
    if "xnnpack-arm64" not in profiles_here():
        with pytest.raises(ValueError, match=re.escape(emulation.SET_UP)):
            verify(graph, write_tflite(graph, tmp_path / "model.tflite"), codes, "xnnpack-arm64")
    with pytest.raises(RuntimeError, match=re.escape(emulation.SET_UP)):
        emulation.EmulatedInterpreter(tflite_bytes(graph))
    with pytest.raises(ValueError, match="must be one of cortex-a53, .*got 'pentium'"):
        emulation.cpu_named("pentium")
    monkeypatch.setenv("EXACTQAT_ARM64_CPU", "sme")
    assert emulation.cpu_named(None) == "sme" and emulation.cpu_named("cortex-a53") == "cortex-a53"


@needs_emulation
@pytest.mark.parametrize("kind", ["CONV_2D", "MUL", "MEAN", "HARD_SWISH"])
def test_emulated_processors(kind: str, tmp_path: Path) -> None:
    outcome = sweep(kind, "xnnpack-arm64", 3, tmp_path)
    assert outcome.values and not outcome.differing and not outcome.refused


@needs_emulation
def test_what_does_not_fill_a_vector(tmp_path: Path) -> None:
    """Scales that are powers of two make ties, which vectors and the plain kernel round differently."""
    rng = np.random.default_rng(0)
    apart = 0
    for size in (7, 8, 9, 31, 256):
        for exponent in range(-3, 5):
            builder = Builder()
            x = builder.input("x", (1, size), per_tensor(2.0**-5, int(rng.integers(-128, 128))))
            output = per_tensor(2.0 ** (exponent - 5), 4)
            graph = builder.graph([builder.operator("HARD_SWISH", [x], output, name="y")])
            codes = np.resize(rng.permutation(np.arange(-128, 128)), (3, size)).astype(np.int8)
            report = verify(graph, write_tflite(graph, tmp_path / "model.tflite"), codes, "xnnpack-arm64")
            assert report.differing == 0, (size, exponent)
            results = [simulate(graph, codes, profile)["y"] for profile in ("xnnpack-arm64", "xnnpack-x86")]
            apart += int(np.count_nonzero(results[0] != results[1]))
    assert apart, "no tie was met"


@needs_emulation
def test_what_the_emulated_runtime_refuses_is_named() -> None:
    with pytest.raises(RuntimeError, match="Model|model"):
        emulation.EmulatedInterpreter(b"\0" * 64)


# --- what networks take -----------------------------------------------------------------------------------------------

RUN = """
import sys
from tflite_micro import runtime
with open(sys.argv[1], "rb") as file:
    runtime.Interpreter.from_bytes(file.read(), arena_size=int(sys.argv[2])).invoke()
"""


@pytest.mark.slow
@needs_micro
@pytest.mark.parametrize("name", ["dscnn", "autoencoder"])
def test_the_arena_is_the_smallest_that_does(name: str, tmp_path: Path) -> None:
    graph = made(name)
    path = write_tflite(graph, tmp_path / "model.tflite")
    cost = footprint(graph)
    assert cost.flash_bytes == path.stat().st_size and cost.arena_bytes is not None and not cost.why_not
    assert cost.operators["FULLY_CONNECTED"] == (10 if name == "autoencoder" else 1)
    for size, runs in ((cost.arena_bytes, True), (cost.arena_bytes - 16, False)):
        command = [sys.executable, "-P", "-c", RUN, str(path), str(size)]
        assert (subprocess.run(command, capture_output=True).returncode == 0) == runs


@needs_micro
def test_what_tflite_micro_lacks_is_named(tmp_path: Path) -> None:
    builder = Builder()
    x = builder.input("x", (1, 8), per_tensor(0.05, 0))
    graph = builder.graph([builder.operator("GELU", [x], per_tensor(0.05, 0), name="y", approximate=False)])
    cost = footprint(graph)
    assert cost.arena_bytes is None and "GELU" in cost.why_not
    codes = np.zeros((2, 8), np.int8)
    with pytest.raises(RuntimeRefusal, match="TFLite-Micro rejects the file: .*GELU"):
        verify(graph, write_tflite(graph, tmp_path / "model.tflite"), codes, device="micro")


def test_without_tflite_micro_the_arena_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    cost = footprint(small_graph())
    assert cost.arena_bytes is None and "pip install 'exactqat[micro]'" in cost.why_not
    with pytest.raises(ImportError, match=re.escape("pip install 'exactqat[npu]'")):
        npu_footprint(small_graph())


@pytest.mark.slow
@pytest.mark.parametrize("name", MLPERF_TINY)
def test_vela_leaves_nothing_to_the_processor(name: str) -> None:
    pytest.importorskip("ethosu", reason="needs exactqat[npu]")
    cost = npu_footprint(made(name))
    assert not cost.operators_on_cpu
    assert 0 < cost.sram_bytes < cost.flash_bytes and cost.cycles > 0


def test_what_vela_leaves_is_named() -> None:
    pytest.importorskip("ethosu", reason="needs exactqat[npu]")
    builder = Builder()
    x = builder.input("x", (1, 8, 8, 4), per_tensor(0.05, 0))
    y = builder.operator("SQUARED_DIFFERENCE", [x, x], per_tensor(0.1, 0), name="y")
    cost = npu_footprint(builder.graph([builder.operator("LOG_SOFTMAX", [y], name="z")]), "ethos-u55-256")
    assert cost.operators_on_cpu == {"LOG_SOFTMAX": 1}
    with pytest.raises(ValueError, match="accelerator must be one of ethos-u55-32, .* got 'ethos'"):
        npu_footprint(small_graph(), "ethos")


def test_claims() -> None:
    assert not any(unclaimed(small_graph(), profile) for profile in ("xnnpack-x86", "reference", "micro"))
    builder = Builder()
    x = builder.input("x", (1, 8), per_tensor(0.05, 0))
    graph = builder.graph([builder.operator("GELU", [x], per_tensor(0.05, 0), name="y", approximate=False)])
    assert unclaimed(graph, "micro") == ("GELU",)
    assert set(PROFILES) and set(OPERATORS)


# --- the C header -----------------------------------------------------------------------------------------------------

PROGRAM = """
#include "net.h"
#include <cstdio>
struct Resolver { int added = 0; void AddConv2D() { ++added; } };
int main() {
  Resolver resolver;
  NET_ADD_OPERATORS(resolver);
  if (resolver.added != NET_OPERATOR_COUNT || sizeof net_data != NET_SIZE) return 1;
  if (sizeof net_recorded_input_0 != NET_INPUT_0_SIZE || sizeof net_recorded_output_0 != NET_OUTPUT_0_SIZE) return 2;
  if (reinterpret_cast<unsigned long>(net_data) % 16) return 3;
  std::printf("%a %d %a %d\\n", NET_INPUT_0_SCALE, NET_INPUT_0_ZERO_POINT, NET_OUTPUT_0_SCALE, NET_OUTPUT_0_ZERO_POINT);
  for (unsigned char byte : net_data) std::printf("%02x", byte);
  for (signed char code : net_recorded_input_0) std::printf(" %d", code);
  for (signed char code : net_recorded_output_0) std::printf(" %d", code);
}
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_header_holds_the_network(tmp_path: Path) -> None:
    graph = small_graph()
    codes = np.random.default_rng(1).integers(-128, 128, (1, 6, 6, 2)).astype(np.int8)
    # What a description holds must not get out of the comment.
    text = write_c_array(graph, tmp_path / "net.h", codes, "net", "a */ b \\").read_text()
    (tmp_path / "main.cpp").write_text(PROGRAM)
    (tmp_path / "main.c").write_text('#include "net.h"\nint main(void) { return sizeof net_data != NET_SIZE; }\n')
    options = ["-Wall", "-Wextra", "-pedantic", "-Werror", "-Wno-unused-variable"]
    subprocess.run(["g++", "-std=c++17", *options, "main.cpp", "-o", "program"], cwd=tmp_path, check=True)
    subprocess.run(["gcc", "-std=c99", *options, "main.c", "-o", "plain"], cwd=tmp_path, check=True)
    subprocess.run([tmp_path / "plain"], check=True)
    run = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True)
    first, rest = run.stdout.split("\n")
    scales = [float.fromhex(word) for word in first.split()[::2]]
    assert scales == [np.float32(0.02), np.float32(0.1)] and first.split()[1::2] == ["3", "-5"]
    data, *recorded = rest.split()
    assert bytes.fromhex(data) == tflite_bytes(graph, "a */ b \\")
    expected = [*codes.ravel().tolist(), *simulate(graph, codes, "micro")["y"].ravel().tolist()]
    assert [int(word) for word in recorded] == expected
    assert max(map(len, text.splitlines())) <= 120 and "TFLite-Micro returns these outputs for these inputs" in text
    # Without an example it records one of its own.
    assert f"net_recorded_input_0[{6 * 6 * 2}]" in c_array(graph, name="net")


@needs_micro
def test_the_recorded_example_is_what_tflite_micro_answers() -> None:
    from tflite_micro import runtime

    text = c_array(made("dscnn"), name="net")

    def recorded(name: str) -> list[int]:
        match = re.search(rf"{name}\[\d+\] = {{(.*?)}};", text, re.DOTALL)
        assert match is not None
        return [int(word) for word in match[1].replace(",", " ").split()]

    interpreter = runtime.Interpreter.from_bytes(bytes(recorded("net_data")))
    interpreter.set_input(np.array(recorded("net_recorded_input_0"), np.int8).reshape(1, 49, 10, 1), 0)
    interpreter.invoke()
    assert interpreter.get_output(0).ravel().tolist() == recorded("net_recorded_output_0")
    assert len(set(recorded("net_recorded_output_0"))) > 1


def test_names_of_headers() -> None:
    with pytest.raises(ValueError, match="name must be a C identifier .* got '1st'"):
        c_array(small_graph(), name="1st")
    with pytest.raises(ValueError, match="x must contain one example, got 2"):
        c_array(small_graph(), np.zeros((2, 6, 6, 2), np.int8))


# --- the command line -------------------------------------------------------------------------------------------------


def test_devices_by_name() -> None:
    pytest.importorskip("torch")
    from exactqat.application.job import settings

    for name in ("xnnpack-x86", "xnnpack-arm64", "reference", "micro"):
        assert settings.device_named(name) == name
    with pytest.raises(ValueError, match="^must be one of xnnpack-x86, .*, tosa, or a device's file, got 'toaster'$"):
        settings.device_named("toaster")


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ("arm64", "it is now called xnnpack-arm64"),
        ("x86", "it is now called xnnpack-x86"),
        ("cuda:1", "to choose where networks train, use --accelerator cuda:1"),
        ("cpu", "to choose where networks train, use --accelerator cpu"),
        ("xnnpack", "use xnnpack-x86 or xnnpack-arm64"),
    ],
)
def test_former_names_are_refused_with_the_new_one(former: str, now: str) -> None:
    pytest.importorskip("torch")
    from exactqat.application.job import settings

    with pytest.raises(ValueError, match=f"got '{former}'; .*{now}"):
        settings.device_named(former)


def test_profiles_of_python_say_what_a_former_name_is_called() -> None:
    with pytest.raises(
        ValueError, match="device must be one of xnnpack-x86, .*got 'arm64'; it is called 'xnnpack-arm64'"
    ):
        simulate(small_graph(), np.zeros((1, 6, 6, 2), np.int8), "arm64")


def test_what_a_devices_runtime_lacks_is_known_before_training() -> None:
    """TFLite-Micro has no GELU, no bilinear resizing in int16, and joins ten tensors."""
    torch = pytest.importorskip("torch")
    from exactqat import qat

    x = torch.randn(4, 3, 4, 4)
    prepared = qat.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()), x, device="micro", check=False)
    assert [step.kind for step in prepared.plan.steps] == ["FULLY_CONNECTED", "TABLE"]
    resized = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.UpsamplingBilinear2d(scale_factor=2))
    wide = [qat.Rule(activation_bits=16)]
    with pytest.raises(qat.UnsupportedOperator, match=r"has no RESIZE_BILINEAR in int16; give it 8 bits: Rule\('1'"):
        qat.prepare(resized, x, wide, device="micro", check=False)
    qat.prepare(resized, x, wide, device="xnnpack", check=False)

    class Joined(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.cat([x * float(factor) for factor in range(1, 12)], 1)

    with pytest.raises(qat.UnsupportedOperator, match="joins at most 10 tensors, got 11"):
        qat.prepare(Joined(), x, device="micro", check=False)


def test_a_graph_that_the_device_does_not_run_is_not_written_and_does_not_pass(tmp_path: Path) -> None:
    builder = Builder()
    builder.input("x", (1, 4), per_tensor(0.1, 0))
    builder.gelu("x", per_tensor(0.1, 0), name="y")
    graph = replace(builder.graph(["y"]), trained_for="micro")
    reason = "TFLite-Micro has no GELU in int8 (at y)"
    assert graph.absent_from("micro") == (reason,) and graph.absent_from("xnnpack-x86") == ()
    with pytest.raises(Refusal, match="micro does not run it: TFLite-Micro has no GELU"):
        write_tflite(graph, tmp_path / "model.tflite")
    codes = np.zeros((2, 4), np.float32)
    verdict = tune.gate(graph, (codes, codes), devices=["micro"], metric=lambda *_: 1.0, minimum=0.5)
    assert not verdict.passes and verdict.failures == (f"micro does not run it: {reason}",)
