# SPDX-License-Identifier: Apache-2.0
"""A device is one declaration: a fifth one, declared here, is trained for, simulated and reported without more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from exactqat import deploy
from exactqat.application.job.settings import device_named
from exactqat.deploy import Builder, Graph, per_tensor, simulate, unclaimed, verify, write_tflite
from exactqat.deploy.runtimes import profile_here
from exactqat.kit.device import PROFILES, Profile, declare, profile, profile_named
from exactqat.kit.device.profile import that_run

NPU = replace(PROFILES["reference"], name="npu", title="the NPU", runtime="")


@pytest.fixture
def npu() -> Iterator[Profile]:
    """A device that computes as LiteRT's reference kernels do, and that no computer runs."""
    yield declare(NPU)
    del profile._PROFILES["npu"]


def small() -> tuple[Graph, np.ndarray]:
    """Operators on which the devices differ, QUANTIZE among them; and codes for their input."""
    rng, builder = np.random.default_rng(0), Builder()
    x = builder.input("x", (1, 40), per_tensor(0.05, -3))
    rows = builder.fully_connected(
        x, rng.integers(-127, 128, (64, 40)), [0.01], rng.integers(-900, 900, 64), per_tensor(0.02, 4), name="rows"
    )
    gate = builder.logistic(builder.quantize(rows, per_tensor(0.0217, -9), name="coarse"), name="gate")
    builder.mul(rows, gate, per_tensor(0.017, 4), name="y")
    return builder.graph(["y"]), rng.integers(-128, 128, (64, 40)).astype(np.int8)


def test_a_fifth_device_is_simulated_and_claims_nothing(npu: Profile) -> None:
    graph, codes = small()
    results = {name: simulate(graph, codes, name, graph.results()) for name in PROFILES}
    assert list(results) == ["xnnpack-x86", "xnnpack-arm64", "reference", "micro", "onnxruntime-x86", "npu"]
    assert all(np.array_equal(results["npu"][name], results["reference"][name]) for name in graph.results())
    assert not np.array_equal(results["npu"]["coarse"], results["xnnpack-x86"]["coarse"])
    assert np.array_equal(simulate(graph, codes, npu)["y"], results["npu"]["y"])
    assert unclaimed(graph, "npu") == ("FULLY_CONNECTED", "QUANTIZE", "LOGISTIC", "MUL") and not unclaimed(
        graph, "reference"
    )


def test_measured_results_are_its_claims(npu: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = small()
    monkeypatch.setitem(deploy.EXACT, ("MUL", "npu"), 384_000)
    assert unclaimed(graph, "npu") == ("FULLY_CONNECTED", "QUANTIZE", "LOGISTIC")


def test_a_fifth_device_is_trained_for(npu: Profile, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("ai_edge_litert")
    from exactqat import qat

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.SiLU(), torch.nn.Linear(64, 10))
    x = torch.rand(32, 40)
    prepared = qat.prepare(model, x, device="npu")
    qat.calibrate(prepared, [x])
    qat.freeze(prepared)
    prepared.train()(x).square().mean().backward()
    prepared.eval()
    graph = deploy.lower(prepared)
    assert prepared.profile == graph.trained_for == "npu"
    path, codes = write_tflite(graph, tmp_path / "model.tflite"), deploy.input_codes(graph, x.numpy())
    trained = deploy.device_codes(prepared, x)
    # No runtime is the device itself; the kernels that it computes as are here.
    report = verify(graph, path, codes, "reference", trained_codes=trained)
    assert report.differing == report.training_differing == 0 < report.training_values
    assert report.sentences()[2] == "It was trained for npu, and not for reference"
    of_the_npu = replace(report, profile="npu", ran_as="reference")
    assert of_the_npu.equal
    ran, computes, for_which = of_the_npu.sentences()
    assert ran.startswith("On LiteRT with its reference kernels (the NPU was not run here) the file runs as simulated")
    assert computes.startswith("the NPU computes what was trained: none of") and "this device" in for_which
    with pytest.raises(ValueError, match="profile 'npu' has no runtime that can run here; available here: "):
        verify(graph, path, codes, "npu")
    assert device_named("npu") == "npu"


def test_a_runtime_proves_it(tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    declare(replace(NPU, name="npu", runtime="ai-edge-litert", aliases=("accelerator",)))
    try:
        graph, codes = small()
        assert "npu" in deploy.profiles_here() and profile_here("accelerator") == "npu"
        report = verify(graph, write_tflite(graph, tmp_path / "model.tflite"), codes, "accelerator")
        assert report.profile == "npu" and report.values and not report.differing
        assert not any(row.exact for row in report.operators)
    finally:
        del profile._PROFILES["npu"]


def test_names_and_refusals(npu: Profile) -> None:
    assert profile_named("xnnpack").name == "xnnpack-x86" and profile_named(npu) is npu
    known = (
        "device must be one of xnnpack-x86, xnnpack-arm64, reference, micro, onnxruntime-x86, npu, xnnpack, tosa, got"
    )
    with pytest.raises(ValueError, match=f"^{known} 'x86'; it is called 'xnnpack-x86' now$"):
        profile_named("x86")
    with pytest.raises(ValueError, match=f"^{known} None$"):
        profile_named(None)  # type: ignore[arg-type]
    for name in ("npu", "xnnpack"):
        with pytest.raises(ValueError, match=f"^profile '{name}' is declared already$"):
            declare(replace(npu, name=name))
    with pytest.raises(ValueError, match="it rounds differently on different processors: use xnnpack-x86 or xnnpack-"):
        device_named("xnnpack")
    with pytest.raises(ValueError, match="^must be one of .*, got 'onnxruntime-x86'"):
        device_named("onnxruntime-x86")


@pytest.mark.parametrize("command", ["train", "verify"])
def test_the_command_line_names_every_device(command: str) -> None:
    pytest.importorskip("typer")
    from typer.main import get_command

    from exactqat.cli import application

    commands = get_command(application.command_line()).commands  # type: ignore[attr-defined]
    (option,) = (parameter for parameter in commands[command].params if parameter.name == "device")
    assert all(name in option.help for name in that_run(".tflite"))
