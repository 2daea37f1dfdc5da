# SPDX-License-Identifier: Apache-2.0
"""The benchmark of training steps runs, and compares networks that do the same."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("rich")

import exactqat as eq  # noqa: E402


@pytest.fixture(scope="module")
def step() -> Any:
    path = Path(__file__).parents[2] / "bench" / "step.py"
    spec = importlib.util.spec_from_file_location("step", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = torch.get_num_threads(), eq.get_num_threads()
    yield
    torch.set_num_threads(before[0])
    eq.set_num_threads(before[1])


@pytest.mark.slow
def test_one_repeat_of_a_tiny_network(step: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    results = json.loads(saved(step, tmp_path, "--networks", "small_mobilenet", "--repeats", "1"))
    shown = capsys.readouterr().out
    assert "TensorFlow float, tfmot QAT: left out, no --tfmot PYTHON given" in shown
    (result,) = results["results"]
    assert result["images"] == [16, 1, 8, 8] and results["settings"]["threads"] == 2
    names = [row["contestant"] for row in result["steps"]]
    assert names == list(step.CONTESTANTS)
    for row in result["steps"]:
        assert row["contestant"] in shown
        assert row["ms"] > 0 and row["ratios"].keys() < set(step.BASES)
        assert row["ratios"].get(row["contestant"], 1.0) == 1.0


@pytest.mark.slow
def test_memory_is_measured_in_processes_of_their_own(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    two = ("torch float", "exactqat QAT, ema")  # every one takes seconds
    monkeypatch.setattr(step, "CONTESTANTS", {name: step.CONTESTANTS[name] for name in two})
    figures = step.memory("small_mobilenet", SimpleNamespace(threads=1, device="cpu"))
    plain, quantized = (figures[name] for name in two)
    # Masks of two bits in place of activations can make it less than the float step's.
    assert plain["saved_bytes"] / 4 < quantized["saved_bytes"] < 4 * plain["saved_bytes"]
    assert min(plain["resident_peak_bytes"], quantized["resident_peak_bytes"]) > 0


def saved(step: Any, folder: Path, *arguments: str) -> str:
    """Runs the benchmark and gives the file that it saves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "RESULTS", folder)
        step.main([*arguments, "--save"])
    (path,) = folder.iterdir()
    assert path.name.endswith("-cores-step.json")
    return path.read_text()


class Twice(torch.nn.Module):
    """Keeps its exponential, which two functions need, once, and the input of the last one, that two views show."""

    def forward(self, features: Any) -> Any:
        exponential = features.exp()
        return (exponential * exponential).flatten(1)


def test_saved_memory_counts_every_storage_once(step: Any) -> None:
    images = torch.randn(4, 1, 2, 3, requires_grad=True)
    case = step.Task(Twice(), images, torch.zeros(4, dtype=torch.int64))
    numbers = 4 * 1 * 2 * 3
    # The exponential, the logarithms of softmax, the labels, and the number of labels that count.
    assert step.saved_bytes(case.model, case) == 4 * numbers + 4 * numbers + 8 * 4 + 4


def test_parameters_are_no_saved_memory(step: Any) -> None:
    case = step.Task(torch.nn.Linear(6, 6), torch.randn(4, 6), torch.zeros(4, dtype=torch.int64))
    # The images, the logarithms, the labels and their number; not the weight.
    assert step.saved_bytes(case.model, case) == 4 * 24 + 4 * 24 + 8 * 4 + 4


@pytest.mark.parametrize("network", ["small_mobilenet", "mobilenet_v2", "dscnn"])
def test_the_networks_compared_have_the_same_sizes(step: Any, network: str) -> None:
    case = step.task(network)
    plain = step.torch_float(case)
    assert not any(isinstance(module, step.qat.Conv2d) for module in plain.modules())
    assert not any(type(module) is torch.nn.BatchNorm2d for module in step.our_float(case).modules())
    sizes: list[list[Any]] = [[], []]
    for shapes, model in zip(sizes, (case.model.eval(), plain.eval()), strict=True):
        for module in model.modules():
            if isinstance(module, torch.nn.Conv2d):
                module.register_forward_hook(lambda module, x, y, shapes=shapes: shapes.append(tuple(y.shape)))
        model(case.images[:1])
    assert sizes[0] == sizes[1] and len(sizes[0]) > 5


@pytest.mark.parametrize("learned", [False, True])
def test_torch_fuses_and_quantizes_every_convolution(step: Any, learned: bool) -> None:
    pytest.importorskip("torch.ao.quantization")
    prepared = step.torch_qat(step.task("small_mobilenet"), learned)
    kinds = {type(module).__name__ for module in prepared.modules()}
    assert {"ConvBnReLU2d", "ConvBn2d"} <= kinds and "BatchNorm2d" in kinds
    assert not any(type(module) is torch.nn.Conv2d for module in prepared.modules())
    quantizers = [type(m).__name__ for m in prepared.modules() if "FakeQuantize" in type(m).__name__]
    assert set(quantizers) == ({"_LearnableFakeQuantize"} if learned else {"FusedMovingAvgObsFakeQuantize"})
    case = step.task("small_mobilenet")
    step.step(prepared, case)()
    scales = [parameter for name, parameter in prepared.named_parameters() if name.endswith(".scale")]
    assert all(scale.grad is not None for scale in scales) and bool(scales) == learned


def test_the_network_is_given_to_keras_as_it_is(step: Any) -> None:
    case = step.task("mobilenet_v2")
    layers = step.keras_layers(case.model, case.shape)
    kinds = [layer["kind"] for layer in layers]
    convolutions = [module for module in case.model.modules() if isinstance(module, torch.nn.Conv2d)]
    assert kinds.count("Conv2D") + kinds.count("DepthwiseConv2D") == len(convolutions) == 52
    assert kinds.count("DepthwiseConv2D") == 17 and kinds.count("Add") == 10
    assert layers[0]["settings"]["shape"] == [160, 160, 3] and layers[-1]["settings"] == {"units": 1000}
    known = set()
    for layer in layers:
        assert known.issuperset(layer["inputs"])
        known.add(layer["name"])
    for model in (torch.nn.Sequential(torch.nn.Tanh()), torch.nn.Sequential(step.qat.Conv2d(1, 1, 1, padding="VALID"))):
        with pytest.raises(ValueError, match="Keras"):
            step.keras_layers(model, (1, 8, 8))


def test_an_environment_without_tfmot_says_so(step: Any) -> None:
    if importlib.util.find_spec("tensorflow_model_optimization"):
        pytest.skip("this environment has tfmot")
    with (
        pytest.raises(RuntimeError, match=r"cannot run tfmot:(?s:.*)No module named 'tensorflow"),
        step.tensorflow_steps(sys.executable, "small_mobilenet", step.task("small_mobilenet"), 1),
    ):
        pass


@pytest.mark.skipif("EXACTQAT_TFMOT" not in os.environ, reason="EXACTQAT_TFMOT names no Python that has tfmot")
def test_tfmot_takes_part(step: Any, tmp_path: Path) -> None:
    text = saved(
        step, tmp_path, "--networks", "small_mobilenet", "--repeats", "1", "--tfmot", os.environ["EXACTQAT_TFMOT"]
    )
    results = json.loads(text)
    assert "tensorflow-model-optimization" in results["versions"]
    rows = {row["contestant"]: row for row in results["results"][0]["steps"]}
    assert rows["tfmot QAT"]["ms"] > 0 and rows["TensorFlow float"]["ms"] > 0
    assert rows["exactqat QAT, ema"]["ratios"]["tfmot QAT"] > 0
