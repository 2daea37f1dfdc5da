# SPDX-License-Identifier: Apache-2.0
"""The gate: what passes, what fails, and that the best network on the device is kept."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from networks import examples, trained  # noqa: E402

from exactqat import deploy, qat, tune  # noqa: E402
from exactqat.tune.gate import OnDevice, Verdict, _rank  # noqa: E402
from exactqat.tune.network import Candidate  # noqa: E402

DATA = examples(256, 1)


def calibrated(model: Any, images: Any, rules: Any = None) -> Any:
    prepared = qat.prepare(model, images[:2], rules or [qat.Rule()])
    qat.calibrate(prepared, [images])
    return prepared


def one_that_fails_on_micro() -> tuple[Any, Any]:
    """A network and examples that it has right on x86 and wrong with TFLite-Micro's roundings."""
    torch.manual_seed(0)
    inputs = torch.randn(20000, 8)
    layers = [torch.nn.Linear(8, 16), torch.nn.Sigmoid(), torch.nn.Linear(16, 16), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(16, 8))
    # So coarse that two classes often have the same code.
    prepared = calibrated(model, inputs, [qat.Rule("4", ranges="fixed", fixed_range=(-20.0, 20.0)), qat.Rule()])
    qat.freeze(prepared)
    graph = deploy.lower(prepared)
    codes = deploy.input_codes(graph, inputs.numpy())
    classes = {
        name: next(iter(deploy.simulate(graph, codes, name).values())).argmax(1) for name in ("xnnpack-x86", "micro")
    }
    differ = np.flatnonzero(classes["xnnpack-x86"] != classes["micro"])
    assert len(differ) > 5
    return prepared, (inputs.numpy()[differ], classes["xnnpack-x86"][differ])


def test_what_passes_on_x86_and_fails_on_micro_is_caught(tmp_path: Path) -> None:
    model, data = one_that_fails_on_micro()
    on_x86 = tune.gate(model, data, minimum=0.95)
    assert on_x86.passes and [device.device for device in on_x86.devices] == ["xnnpack-x86"] and on_x86.score == 1
    on_micro = tune.gate(model, data, devices=["micro"], minimum=0.95)
    assert not on_micro.passes and on_micro.score == 0
    assert on_micro.failures == ("micro: 0 is below 0.95",)
    both = tune.gate(model, data, devices=["xnnpack-x86", "micro"], minimum=0.95)
    assert not both.passes and both.score == 0 and "fails" in str(both)
    differing = tune.gate(model, data, devices=["micro"], max_differ=0)
    assert not differing.passes and "outputs differ from xnnpack-x86, 0 may" in differing.failures[0]
    assert tune.gate(model, data, devices=["micro"], max_differ=10**6).passes
    count = len(data[1])
    for devices in (["xnnpack-x86", "micro"], ["micro"]):  # alone it is compared with the one that was prepared for
        flipping = tune.gate(model, data, devices=devices, max_flips=count - 1)
        assert not flipping.passes and flipping.flips == tuple(range(count))
        assert f"{count} examples flip (numbers 0, 1, 2" in flipping.failures[0]
    assert tune.gate(model, data, devices=["xnnpack-x86", "micro"], max_flips=count).passes
    assert json.loads(flipping.as_json())["flips"] == list(range(count))
    assert on_x86.flips is None and tune.gate(model, data, devices=["micro", "micro"], max_differ=0).flips
    path = deploy.write_tflite(deploy.lower(model), tmp_path / "m.tflite")
    assert tune.gate(path, data, devices="micro", minimum=0).score == 0


def test_scores_are_those_of_the_file(tmp_path: Path) -> None:
    model = calibrated(trained(), torch.from_numpy(DATA[0]))
    verdict = tune.gate(model, DATA, devices=["xnnpack-x86"], minimum=0)
    qat.freeze(model)
    graph = deploy.lower(model)
    outputs = deploy.simulate(graph, deploy.input_codes(graph, DATA[0]), "xnnpack-x86")
    (values,) = deploy.output_values(graph, outputs).values()
    assert verdict.score == tune.accuracy(values, DATA[1])
    # An unfrozen network is scored as the frozen one.
    assert tune.gate(model, DATA, devices=["xnnpack-x86"], minimum=0).score == verdict.score


def test_the_best_network_on_the_device_is_kept(tmp_path: Path) -> None:
    model = calibrated(trained(), torch.from_numpy(DATA[0]))
    gate = tune.Gate(DATA, keep=tmp_path / "kept")
    weight = dict(model.named_parameters())["last.weight"]
    kept = weight.detach().clone()
    verdicts = []
    for step, noise in enumerate((3.0, 1.0, 0.0, 5.0)):
        torch.manual_seed(step)
        with torch.no_grad():
            weight.copy_(kept + noise * kept.std() * torch.randn_like(kept))
        verdicts.append(gate(model, step))
    scores = [verdict.score for verdict in verdicts]
    seen = [verdict.step for verdict in verdicts if verdict.best]
    assert gate.best is not None and gate.best.step == 2 and gate.best.score == max(scores) > scores[0]
    assert seen == [step for step in range(3) if scores[step] > max([-1.0, *scores[:step]])]
    written = json.loads((tmp_path / "kept" / "best.json").read_text())
    assert written["step"] == 2 and written["score"] == max(scores)
    kept_file = tmp_path / "kept" / "best.tflite"
    assert tune.gate(kept_file, DATA, devices=["xnnpack-x86"], minimum=0).score == max(scores)


def test_errors_are_better_when_lower() -> None:
    model = calibrated(trained(), torch.from_numpy(DATA[0]))

    def error(outputs: Any, targets: Any) -> float:
        return 1 - tune.accuracy(outputs, targets)

    gate = tune.Gate(DATA, error, maximum=0.5, higher_is_better=False)
    first = gate(model)
    assert first.passes and first.best and first.score < 0.2
    with torch.no_grad():
        dict(model.named_parameters())["last.weight"].zero_()
    worse = gate(model)
    assert not worse.passes and not worse.best and "is above 0.5" in worse.failures[0]


def test_an_example_that_flips_counts_as_wrong() -> None:
    devices = (OnDevice("xnnpack-arm64", 0.95, None, 10), OnDevice("micro", 0.94, None, 10))
    agreeing, flipping = Verdict(devices, (), 100, flips=()), Verdict(devices, (), 100, flips=(5, 17))
    better = Verdict((OnDevice("micro", 0.97, None, 10),), (), 100, flips=(1, 2))
    assert _rank(agreeing) > _rank(flipping) and _rank(better) > _rank(agreeing)
    assert "2 examples flip (numbers 5, 17)" in str(flipping) and "flip" not in str(agreeing)
    with pytest.raises(ValueError, match="max_flips compares devices, and xnnpack-x86 is the only one"):
        tune.gate(calibrated(trained(), torch.from_numpy(DATA[0])), DATA, max_flips=0)


def test_bad_settings_are_refused() -> None:
    for settings, message in (
        ({"minimum": float("nan")}, "minimum must be a finite number, got nan"),
        ({"max_differ": -1}, "max_differ must be a number of integers, 0 or more, got -1"),
        ({"max_flips": True}, "max_flips must be a number of examples, 0 or more, got True"),
        ({"max_flips": 0, "metric": lambda outputs, targets: 1.0}, "max_flips counts classes .* give max_differ"),
        ({"devices": []}, "devices is empty"),
        ({"devices": ["toaster"]}, "device must be one of .*, got 'toaster'"),
    ):
        with pytest.raises(ValueError, match=message):
            tune.Gate(DATA, **settings)
    with pytest.raises(TypeError, match="model must come from exactqat.qat.prepare"):
        tune.gate(trained(), DATA, minimum=0.5)
    graph = Candidate.of(calibrated(trained(), torch.from_numpy(DATA[0]))).graph()
    assert isinstance(graph, deploy.Graph)
    verdict = tune.gate(graph, DATA, devices=["micro"])
    assert 0 <= verdict.score <= 1
    with pytest.raises(ValueError, match="give minimum, maximum, max_differ or max_flips"):
        bool(verdict)


def test_bounds_that_nothing_reaches_and_other_inputs_are_named() -> None:
    model = calibrated(trained(), torch.from_numpy(DATA[0]))
    for settings, said in (
        ({"minimum": 95}, r"minimum is one of accuracy, a share from 0 to 1, got 95; 95 % is 0\.95"),
        ({"minimum": 0.9, "maximum": 0.1}, "no metric is at least minimum=0.9 and at most maximum=0.1"),
        ({"keep": ""}, "keep is empty; name a folder"),
    ):
        with pytest.raises(ValueError, match=said):
            tune.gate(model, DATA, **{"minimum": 0.0, **settings})  # type: ignore[arg-type]
    assert tune.gate(model, DATA, lambda outputs, targets: 96.0, minimum=95).passes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tune.gate(model, DATA, minimum=0)
    not_divided = (DATA[0] * 255, DATA[1])
    with pytest.warns(UserWarning, match="lie far beyond its range on the device"):
        tune.gate(model, not_divided, minimum=0)
    with pytest.warns(UserWarning, match="divided by 255"):
        tune.search(model, not_divided, budget=1, progress=False)
