# SPDX-License-Identifier: Apache-2.0
"""Sensitivities: the layer that was broken by hand is found first, with the reason."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from networks import examples, trained  # noqa: E402

import exactqat as eq  # noqa: E402
from exactqat import deploy, qat, tune  # noqa: E402
from exactqat.tune.metrics import Data, decibels  # noqa: E402
from exactqat.tune.network import Candidate  # noqa: E402
from exactqat.tune.precisions import Precisions  # noqa: E402
from exactqat.tune.sensitivity import PartSensitivity, Sensitivity  # noqa: E402
from exactqat.tune.variants import Variants  # noqa: E402

DATA = examples(256, 1)
RULES = (qat.Rule(),)
IMAGES = torch.from_numpy(examples(256, 2)[0])


def calibrated(model: Any, images: Any = IMAGES, rules: Any = RULES) -> Any:
    prepared = qat.prepare(model, images[:2], rules)
    qat.calibrate(prepared, [images])
    return prepared


def widened(candidate: Candidate, grid: str, factor: float) -> Candidate:
    low, high = candidate.ranges[grid]
    return replace(candidate, ranges={**candidate.ranges, grid: (low * factor, high * factor)})


def first_of(analysis: tune.Sensitivity) -> tuple[str, str, str]:
    worst = analysis.ranked()[0]
    return worst.layer, worst.kind, worst.reasons[0] if worst.reasons else ""


def test_ends_are_the_device_and_the_float_network() -> None:
    model, (images, classes) = trained(), DATA
    prepared = calibrated(model)
    analysis = tune.sensitivity(prepared, DATA)
    graph = deploy.lower(prepared) if prepared.frozen else Candidate.of(prepared).graph()
    outputs = deploy.output_values(graph, deploy.simulate(graph, deploy.input_codes(graph, images), "xnnpack-x86"))
    assert analysis.device_metric == tune.accuracy(next(iter(outputs.values())), classes)
    with torch.no_grad():
        plain = model(torch.from_numpy(images)).numpy()
    assert analysis.reference == pytest.approx(tune.accuracy(plain, classes), abs=1 / 256)
    # The last part's cumulative run is the device, and the first one's is that part alone.
    assert analysis.parts[-1].cumulative == analysis.device_metric
    assert analysis.parts[0].cumulative == analysis.parts[0].alone
    assert [(part.layer, part.kind) for part in analysis.parts if part.layer != "input"][:2] != []
    assert analysis.evaluations == 2 + 3 * len(analysis.parts)


def fine_and_device(network: Any, model: torch.nn.Module, images: np.ndarray) -> tuple[float, float]:
    """Signal to noise beside the float network, with everything in 16 bits and on the device."""
    variants = Variants(Precisions(network), Data(images, False))
    outputs = variants.outputs([])
    with torch.no_grad():
        plain = {name: model(torch.from_numpy(images)).numpy() for name in outputs[variants.fine]}
    return decibels(plain, outputs[variants.fine]), decibels(plain, outputs[variants.coarse])


# Ranges that are much too wide or too narrow do not matter to it, even where the device's codes are all 0.
@pytest.mark.parametrize("factor", [1, 30, 1 / 30, 1e5, 1e9])
def test_everything_in_16_bits_is_the_float_network(factor: float) -> None:
    model = trained()
    candidate = Candidate.of(calibrated(model))
    for grid in ("second", "add"):
        candidate = widened(candidate, grid, factor)
    fine, on_device = fine_and_device(candidate, model, DATA[0])
    assert fine > 60 and on_device < 50


class Gated(torch.nn.Module):
    """The gate's offset is much larger than what it adds to."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Conv2d(1, 6, 3, bias=False), torch.nn.Linear(6, 3, bias=False)
        with torch.no_grad():
            self.first.weight *= size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.nn.functional.hardswish(self.first(x)).mean((2, 3)))


@pytest.mark.parametrize("size", [1, 1e-3, 1e-6, 1e-9])
def test_small_values_with_large_offsets_are_the_float_network_s(size: float) -> None:
    torch.manual_seed(0)
    model = Gated(size).eval()
    fine, on_device = fine_and_device(calibrated(model), model, DATA[0][:64])
    assert fine > 60 and on_device < 50


@pytest.mark.parametrize("last", [torch.nn.LogSoftmax(1), torch.nn.Softmax(1), torch.nn.Sigmoid(), torch.nn.Tanh()])
def test_results_whose_grids_devices_fix_are_the_float_network_s(last: torch.nn.Module) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), last).eval()
    prepared = qat.prepare(model, IMAGES[:2], keep_final_activation=True)
    qat.calibrate(prepared, [IMAGES])
    fine, on_device = fine_and_device(prepared, model, DATA[0])
    assert fine > on_device and fine > 40


@pytest.mark.parametrize("function", ["gelu", "hardswish", "elu", "silu", "exp", "leaky_relu", "softplus"])
def test_functions_without_an_int16_form_are_the_float_network_s(function: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(64, 16), torch.nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x.flatten(1))
            return self.last(torch.exp(x) if function == "exp" else getattr(torch.nn.functional, function)(x))

    model = Model().eval()
    fine, on_device = fine_and_device(calibrated(model), model, DATA[0])
    assert fine > 60 and on_device < 50


def test_examples_after_the_first_may_be_larger() -> None:
    model, images = (
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.Linear(8, 3)),
        DATA[0].copy(),
    )
    images[64:] *= 8
    fine, on_device = fine_and_device(calibrated(model, torch.from_numpy(images)), model, images)
    assert fine > 60 and on_device < 50


def test_outliers_are_found() -> None:
    rng = np.random.default_rng(0)
    images, classes = DATA
    images = images.copy()
    # ReLU6 takes them away again, and the network is none the worse for them.
    images[rng.choice(256, 8, replace=False), 0, 0, 0] = 3000
    model = calibrated(trained(), torch.from_numpy(images))
    analysis = tune.sensitivity(model, (images, classes))
    layer, kind, reason = first_of(analysis)
    assert (layer, kind) in (("input", "input"), ("add", "result")) and "few outliers" in reason, analysis
    assert analysis.ranked()[0].loss > 0.3


def test_unequal_channels_are_found() -> None:
    model = trained()
    with torch.no_grad():
        model.second.weight[:, 0] = 0
        plain = calibrated(model)
        for parameter in (model.norm.weight, model.norm.bias):
            parameter[0] = 400.0
    assert tune.sensitivity(plain, DATA).ranked()[0].loss < 0.1
    analysis = tune.sensitivity(calibrated(model), DATA)
    layer, kind, reason = first_of(analysis)
    assert (layer, kind) == ("first", "result") and "channels of very different size" in reason, analysis


@pytest.mark.parametrize(("factor", "reason"), [(1 / 100, "saturates"), (300, "too few codes")])
def test_ranges_that_do_not_fit_are_found(factor: float, reason: str) -> None:
    analysis = tune.sensitivity(widened(Candidate.of(calibrated(trained())), "second", factor), DATA)
    layer, kind, said = first_of(analysis)
    assert (layer, kind) == ("second", "result") and reason in said, analysis
    kept = next(part for part in analysis.parts if (part.layer, part.kind) == ("second", "result"))
    assert kept.gain is not None and kept.gain == max(part.gain or 0 for part in analysis.parts) > 0.05


@pytest.mark.parametrize(
    ("rule", "kind"), [({"weight_bits": 2}, "weights"), ({"activation_bits": 2}, "result")], ids=["weights", "result"]
)
def test_few_bits_are_found(rule: dict[str, Any], kind: str) -> None:
    rules = [qat.Rule("second", **rule), qat.Rule()]
    analysis = tune.sensitivity(calibrated(trained(), rules=rules), DATA)
    noisiest = min(analysis.parts, key=lambda part: part.decibels)
    assert (noisiest.layer, noisiest.kind) == ("second", kind) and "too few codes" in noisiest.reasons[0], analysis


def test_a_bias_beyond_its_grid_is_found() -> None:
    classes = np.arange(64) % 4
    inputs = np.repeat(np.eye(4, dtype=np.float32)[classes], 1024, axis=1)
    layer = torch.nn.Linear(4096, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(np.repeat(np.eye(4, dtype=np.float32), 1024, axis=1)))
        layer.bias.fill_(1.2 * 2**30 / 255 / 127)
    analysis = tune.sensitivity(calibrated(layer, torch.from_numpy(inputs)), (inputs, classes))
    name, kind, reason = first_of(analysis)
    assert kind == "weights" and "bias beyond its grid: 4 of 4" in reason, analysis
    assert analysis.reference == 1 and analysis.device_metric == 0.25


def test_files_have_no_other_weights(tmp_path: Path) -> None:
    model = calibrated(trained())
    qat.freeze(model)
    graph = deploy.lower(model)
    whole = tune.sensitivity(model, DATA, measure=["alone"])
    read = deploy.read_tflite(deploy.write_tflite(graph, tmp_path / "m.tflite"))
    analysis = tune.sensitivity(read, DATA, measure=["alone", "fine"], device="xnnpack-x86")
    assert not [part for part in analysis.parts if part.kind == "weights"]
    assert analysis.device_metric == whole.device_metric
    noise = {(part.layer, part.kind): part.decibels for part in whole.parts}
    for part in analysis.parts:
        if (part.layer, part.kind) in noise:
            assert part.decibels == pytest.approx(noise[part.layer, part.kind], abs=1.5)


class Clamped(torch.nn.Module):
    """A hard sigmoid and a hard tanh whose operands are far beyond their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (torch.nn.Conv2d(*channels, 3) for channels in ((1, 6), (6, 6), (6, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = 20 * self.first(x)
        x = x * torch.nn.functional.hardsigmoid(x)
        return self.last(torch.nn.functional.hardtanh(self.second(x))).mean((2, 3))


def test_files_clamp_where_their_grids_end_by_design(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Clamped().eval()
    prepared = calibrated(model, IMAGES)
    assert fine_and_device(prepared, model, DATA[0])[0] > 60
    qat.freeze(prepared)
    read = deploy.read_tflite(deploy.write_tflite(deploy.lower(prepared), tmp_path / "m.tflite"))
    fine, on_device = fine_and_device(read, model, DATA[0])
    # Its weights have 8 bits.
    assert fine > 35 and fine > on_device + 3


def test_results_are_shown(tmp_path: Path) -> None:
    seen = []
    analysis = tune.sensitivity(calibrated(trained()), DATA, progress=lambda *call: seen.append(call))
    assert seen[-1][0] == pytest.approx(seen[-1][1]) and seen[-1][2] == pytest.approx(0, abs=1e-6)
    assert [call[0] for call in seen] == sorted(call[0] for call in seen)
    text = analysis.text()
    assert max(map(len, text.splitlines())) <= 80 and "What costs most:" in text
    rows = text.split("What costs most:")[0]
    assert len(re.findall(r"^\S+ +(?:weights|result|input) ", rows, re.M)) == len(analysis.parts)
    assert len(json.loads(analysis.as_json())["parts"]) == len(analysis.parts)
    assert "<table>" in analysis._repr_html_()
    pytest.importorskip("matplotlib")
    assert b"<svg" in analysis.picture(tmp_path / "picture.svg").read_bytes()[:500]


def test_without_the_parts_alone_those_that_gain_most_come_first(tmp_path: Path) -> None:
    analysis = tune.sensitivity(widened(Candidate.of(calibrated(trained())), "second", 300), DATA, measure=["fine"])
    assert (analysis.worst()[0].layer, analysis.worst()[0].kind) == ("second", "result")
    assert analysis.worst()[0].gain == max(part.gain or 0 for part in analysis.parts) > 0.1
    assert "kept fine brings" in analysis.text() and "inf" not in analysis.text()
    assert analysis.picture(tmp_path / "gain.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="measure must include alone if there is no metric"):
        tune.sensitivity(calibrated(trained()), DATA, None, measure=["fine"])


def test_a_loss_is_better_when_lower() -> None:
    def error(outputs: Any, targets: Any) -> float:
        return 1 - tune.accuracy(outputs, targets)

    candidate = widened(Candidate.of(calibrated(trained())), "second", 100)
    higher, lower = tune.sensitivity(candidate, DATA), tune.sensitivity(candidate, DATA, error, higher_is_better=False)
    assert [part.loss for part in lower.parts] == pytest.approx([part.loss for part in higher.parts])
    assert first_of(lower) == first_of(higher)


def test_what_cannot_be_measured_is_refused() -> None:
    model = calibrated(trained())
    with pytest.raises(ValueError, match="measure must be some of alone, fine, cumulative, got .'alon'."):
        tune.sensitivity(model, DATA, measure=["alon"])
    with pytest.raises(TypeError, match=r"data must be \(inputs, targets\)"):
        tune.sensitivity(model, DATA[0])
    with pytest.raises(ValueError, match="targets must be one for each of the 256 examples, got 3"):
        tune.sensitivity(model, (DATA[0], [1, 2, 3]))
    with pytest.raises(TypeError, match="model must come from exactqat.qat.prepare"):
        tune.sensitivity(trained(), DATA)
    with pytest.raises(RuntimeError, match="seen no data"):
        tune.sensitivity(qat.prepare(trained(), IMAGES[:2]), DATA)
    with pytest.raises(ValueError, match="metric must return a finite number, got nan"):
        tune.sensitivity(model, DATA, lambda outputs, targets: float("nan"))
    assert eq.tune is tune
    analysis = tune.sensitivity(model, DATA[0], None)
    assert analysis.reference is None and analysis.parts[0].loss is None and analysis.parts[0].decibels > 10


def test_what_one_example_explains_is_no_cost() -> None:
    """Where costs are within chance, the layer with the lowest signal to noise comes first."""
    torch.manual_seed(0)
    layers = [layer for _ in range(7) for layer in (torch.nn.Linear(24, 24), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(24, 200)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 2
        x = torch.randn(100, 24)
        y, width = model(x).argmax(1).numpy(), float(model[:12](x).max())
    y = np.where(np.random.default_rng(0).random(100) < 0.25, (y + 1) % 200, y)
    rules = [qat.Rule("10", ranges="fixed", fixed_range=(0.0, 6 * width)), qat.Rule("*")]
    prepared = qat.prepare(model, x[:2], rules, device="micro", check=False)
    qat.calibrate(prepared, [x])
    analysis = tune.sensitivity(prepared, (x, y))
    assert all(part.chance >= 0.01 and part.fine_decibels is not None for part in analysis.parts)
    costly = [part for part in analysis.parts if part.cost]
    assert all(part.loss is not None and part.loss > part.chance for part in costly) and len(costly) < 3
    assert [*analysis.ranked()[: len(costly)]] == sorted(costly, key=lambda part: -(part.loss or 0))
    noisiest = min((part for part in analysis.parts if not part.cost), key=lambda part: part.decibels or 0)
    assert analysis.ranked()[len(costly)] == noisiest and (noisiest.layer, noisiest.kind) == ("10", "result")
    listed = analysis.text().split("What costs most:")[1]
    assert "10 (result), 35" in listed and "costs 0" not in listed and "points here, are not listed as costs" in listed


def test_only_what_costs_is_a_row_and_chance_is_always_said() -> None:
    def part(layer: str, loss: float, noise: float) -> PartSensitivity:
        return PartSensitivity(layer, "result", 0.9 - loss, None, None, noise, loss, None, (), chance=0.01)

    def text(*parts: PartSensitivity) -> str:
        return Sensitivity("micro", 100, 0.9, 0.8, 20.0, parts, 4, 1.0, in_points=True).text()

    listed = text(part("clear", 0.05, 30.0), part("noisy", 0.01, 20.0), part("exact", 0.0, math.inf))
    rows = [line for line in listed.split("What costs most:\n")[1].splitlines() if re.match(r"\d\. ", line)]
    assert rows == ["1. clear (result), costs 5 points alone: nothing unusual: its rounding",
                    "2. noisy (result), 20.0 dB alone: nothing unusual: its rounding"]  # fmt: skip
    assert "up to 1 points here" in " ".join(text(part("clear", 0.05, 30.0)).split())
    assert "Nothing costs anything." in text(part("exact", 0.0, math.inf))


def test_findings_are_no_conditions() -> None:
    analysis = tune.sensitivity(calibrated(trained()), DATA, measure=["alone"])
    assert "\n" not in repr(analysis) and len(repr(analysis)) < 400 and str(analysis) == analysis.text()
    with pytest.raises(TypeError, match="a Sensitivity is neither true nor false"):
        assert analysis
    scores = tune.Gate(DATA)(calibrated(trained()))
    with pytest.raises(ValueError, match="nothing is asked"):
        assert scores
    assert not tune.gate(calibrated(trained()), DATA, minimum=1.0) and tune.gate(calibrated(trained()), DATA, minimum=0)
