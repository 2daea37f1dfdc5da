# SPDX-License-Identifier: Apache-2.0
"""`exactqat gate` and `exactqat tune`, as scripts use them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("typer")

from test_gate import DATA, calibrated, one_that_fails_on_micro  # noqa: E402

from exactqat import cli, deploy, qat  # noqa: E402


def exactqat(*arguments: object) -> tuple[int, str]:
    """Status and output."""
    output = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["exactqat", *map(str, arguments)]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            cli.main()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
    return status, output.getvalue()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A network that is right on x86 and wrong with TFLite-Micro's roundings, and such examples."""
    folder = tmp_path_factory.mktemp("gate")
    model, (inputs, classes) = one_that_fails_on_micro()
    np.savez(folder / "examples.npz", x=inputs, y=classes)
    return deploy.write_tflite(deploy.lower(model), folder / "model.tflite"), folder / "examples.npz"


@pytest.mark.slow
def test_a_shell_script_is_stopped_by_the_gate(files: tuple[Path, Path], tmp_path: Path) -> None:
    path, data = files
    script = tmp_path / "deploy.sh"
    gate = f"{sys.executable} -m exactqat gate {path} --data {data} --min-accuracy 0.95"
    script.write_text(f"set -e\n{gate} --device xnnpack-x86\necho first\n{gate} --device micro\necho second\n")
    done = subprocess.run(["sh", str(script)], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "first" in done.stdout and "second" not in done.stdout
    assert "passes" in done.stdout and "\n  micro: 0 is below 0.95\n" in done.stdout


ACTION = Path(__file__).parents[2] / "integrations" / "github-action"


@pytest.mark.slow
def test_the_github_action_is_red_or_green(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Its script in a shell, as the runner starts it."""
    path, data = files
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "exactqat"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m exactqat "$@"\n')
    command.chmod(0o755)
    inputs = {"NETWORK": path, "DATA": data, "DEVICES": "xnnpack-x86", "MIN_ACCURACY": 0.95, "FOLDER": tmp_path / "out"}
    output, summary = tmp_path / "output", tmp_path / "summary"
    runner = {"GITHUB_OUTPUT": output, "GITHUB_STEP_SUMMARY": summary}
    for devices, status, word in (("xnnpack-x86", 0, "passes"), ("xnnpack-x86 micro", 1, "fails")):
        environment = {**os.environ, **{key: str(value) for key, value in (inputs | runner).items()}}
        environment |= {"DEVICES": devices, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(["bash", str(ACTION / "gate.sh")], env=environment, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
        assert summary.read_text().splitlines()[0] == f"### exactqat gate: {word}"
        assert output.read_text() == f"passes={str(status == 0).lower()}\nfolder={tmp_path / 'out'}\n"
        suite = ElementTree.parse(tmp_path / "out" / "junit.xml").getroot()[0]
        assert (suite.get("tests"), suite.get("failures")) == (str(len(devices.split())), str(status))
        badge = json.loads((tmp_path / "out" / "badge.json").read_text())
        assert badge["message"].startswith(word) and badge["schemaVersion"] == 1
        output.unlink()
        summary.unlink()


def test_the_github_action_names_what_its_script_reads() -> None:
    yaml = pytest.importorskip("yaml")
    action = yaml.safe_load((ACTION / "action.yml").read_text())
    step = action["runs"]["steps"][-1]
    script = (ACTION / "gate.sh").read_text()
    assert all(f"${{{name}" in script for name in step["env"]), "an input is not read"
    asked = {words.split("inputs.")[1].split(" ")[0] for words in step["env"].values()}
    assert asked == set(action["inputs"]) - {"install"}


def test_verdicts_as_files(files: tuple[Path, Path], tmp_path: Path) -> None:
    path, data = files
    junit, table, badge = (tmp_path / name for name in ("junit.xml", "gate.md", "badge.json"))
    written = ["--junit", junit, "--markdown", table, "--badge", badge]
    status, said = exactqat("gate", path, "--data", data, "--device", "micro", "--device", "xnnpack-x86", "--run",
                            "--min-accuracy", 0.95, *written)  # fmt: skip
    assert status == 1, said
    (suite,) = ElementTree.parse(junit).getroot()
    assert suite.attrib == {"name": "model.tflite", "tests": "2", "failures": "1", "errors": "0"}
    failing, passing = suite
    assert failing.get("name") == "micro" and failing[0].get("message") == "micro: 0 is below 0.95"
    assert passing.get("name") == "xnnpack-x86" and [part.tag for part in passing] == ["system-out"]
    lines = table.read_text().splitlines()
    assert lines[0] == "### exactqat gate: fails" and lines[-1] == "- model.tflite: micro: 0 is below 0.95"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[4:6]]
    assert [(row[1], row[5]) for row in rows] == [("micro", "fails"), ("xnnpack-x86", "passes")]
    assert json.loads(badge.read_text())["color"] == "red"
    status, said = exactqat("gate", path, "--data", data, "--min-accuracy", 0.95, "--junit", tmp_path / "no" / "x")
    assert status == 2


def test_exit_statuses(files: tuple[Path, Path], tmp_path: Path) -> None:
    path, data = files
    status, said = exactqat("gate", path, "--data", data, "--device", "micro", "--beside", "xnnpack-x86",
                            "--max-differ", 0, "--json")  # fmt: skip
    assert status == 1
    verdict = json.loads(said)["model.tflite"]
    assert not verdict["passes"] and verdict["devices"]["micro"]["differing"] > 0
    assert exactqat("gate", path, "--data", data, "--device", "xnnpack-x86", "--run")[0] == 0
    both = ("--device", "xnnpack-x86", "--device", "micro", "--max-flips")
    assert exactqat("gate", path, "--data", data, *both, 10**6)[0] == 0
    status, said = exactqat("gate", path, "--data", data, *both, 0, "--json")
    (verdict,) = json.loads(said).values()
    assert status == 1 and len(verdict["flips"]) > 5 and "examples flip" in verdict["failures"][0]
    np.savez(tmp_path / "words.npz", x=np.asarray(["a", "b"]), y=np.zeros(2, int))
    np.savez(tmp_path / "short.npz", x=np.zeros((2, 4)), y=np.zeros(1, int))
    for arguments, message in (
        (["gate", path, "--data", data], "nothing is asked"),
        (["gate", path, "--min-accuracy", "0.5"], "give --data FILE.npz with the inputs and y"),
        (["gate", tmp_path / "none.tflite", "--data", data, "--min-accuracy", "0.5"], "none.tflite"),
        (["gate", path, "--data", data, "--device", "toaster", "--min-accuracy", "0.5"], "device must be one of"),
        (["gate", path, "--data", data, "--max-differ", 0, "--beside", "toaster"], "beside must be one of"),
        (["gate", path, "--data", path, "--min-accuracy", "0.5"], "cannot be read as an .npz file"),
        (["gate", path, "--data", tmp_path / "words.npz", "--min-accuracy", "0.5"], "x must hold numbers"),
        (["gate", path, "--data", tmp_path / "short.npz", "--min-accuracy", "0.5"], "x has 2 examples and y 1"),
        (["gate", path, "--data", data, "--min-accuracy", "0.5", "--precision", "w8a8"], "--precision is for the dir"),
        (["tune", path, "--data", data, "--picture", tmp_path / "no" / "p.svg"], "there is no folder"),
    ):
        status, said = exactqat(*arguments)
        assert status == 2 and message in " ".join(said.split()), said


def test_other_metrics_than_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that is no classifier: noise needs no targets, and a function of the user's is imported from here."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 1, 1)).eval()
    images = torch.randn(64, 1, 8, 8)
    with torch.no_grad():
        wanted = model(images).numpy()
    prepared = calibrated(model, images)
    qat.freeze(prepared)
    path = deploy.write_tflite(deploy.lower(prepared), tmp_path / "model.tflite")
    # In the user's axes.
    inputs = {port.name: images.numpy() for port in deploy.read_tflite(path).signature.inputs}
    np.savez(tmp_path / "plain.npz", **inputs)
    np.savez(tmp_path / "all.npz", y=wanted, **inputs)
    (tmp_path / "measures_of_mine.py").write_text(
        "import numpy as np\ndef error(outputs, targets):\n    return float(np.square(outputs - targets).mean())\n"
        "def fails(outputs, targets):\n    return {}['nothing']\ndef nothing(outputs, targets):\n    pass\n"
    )
    (tmp_path / "no_python.py").write_text("def (:")
    monkeypatch.chdir(tmp_path)
    status, said = exactqat("tune", path, "--data", "plain.npz", "--metric", "noise", "--json")
    assert status == 0, said
    analysis = json.loads(said)
    assert analysis["reference"] is None and all(part["decibels"] > 20 for part in analysis["parts"])
    mine = ["--data", "all.npz", "--metric", "measures_of_mine:error"]
    status, said = exactqat("tune", path, *mine, "--lower-is-better", "--json")
    assert status == 0 and 0 < json.loads(said)["reference"] < json.loads(said)["device_metric"], said
    assert exactqat("gate", path, *mine, "--max-score", 0.1)[0] == 0
    status, said = exactqat("gate", path, *mine, "--max-score", 1e-9)
    assert status == 1 and "measures_of_mine:error" in said and "is above" in said, said
    for arguments, message in (
        (["tune", path, "--data", "plain.npz"], "must be an .npz file of the inputs and the classes y"),
        (["tune", path, "--data", "all.npz", "--metric", "noisy"], "accuracy, noise or a function as module:function"),
        (["tune", path, "--data", "all.npz", "--metric", "measures_of_mine:none"], "cannot be loaded"),
        (["tune", path, "--data", "all.npz", "--metric", "no_such_module:none"], "cannot be loaded"),
        (["tune", path, "--data", "all.npz", "--metric", "measures_of_mine:np"], "must be a function of outputs and"),
        (["gate", path, *mine[:3], "no_python:error", "--min-score", 1], "cannot be loaded: SyntaxError"),
        (["gate", path, *mine[:3], "measures_of_mine:fails", "--min-score", 1], "fails: KeyError: 'nothing'"),
        (
            ["gate", path, *mine[:3], "measures_of_mine:nothing", "--min-score", 1],
            "measures_of_mine:nothing fails: TypeError",
        ),
        (["gate", path, "--data", "all.npz", "--metric", "noise", "--min-score", 1], "has no value that could pass"),
        (["gate", path, *mine, "--min-accuracy", 0.5], "--min-accuracy bounds the accuracy"),
    ):
        status, said = exactqat(*arguments)
        assert status == 2 and message in " ".join(said.split()), said


def test_layers_of_a_file_are_ranked(tmp_path: Path) -> None:
    from networks import trained

    model = calibrated(trained(), torch.from_numpy(DATA[0]))
    qat.freeze(model)
    path = deploy.write_tflite(deploy.lower(model), tmp_path / "m.tflite")
    np.savez(tmp_path / "examples.npz", x=DATA[0], y=DATA[1])
    status, said = exactqat("tune", path, "--data", tmp_path / "examples.npz", "--examples", 64,
                            "--picture", tmp_path / "p.svg")  # fmt: skip
    assert status == 0 and "64 examples" in said and "What costs most:" in said, said
    assert (tmp_path / "p.svg").read_bytes()[:5] == b"<?xml"
    status, said = exactqat("tune", path, "--data", tmp_path / "examples.npz", "--search", tmp_path / "s.tflite")
    assert status == 2 and "--search needs the directory of a job" in said


def test_the_command_that_repeats_a_job_names_the_search(tmp_path: Path) -> None:
    from exactqat.application.job.settings import Settings

    command = Settings(tmp_path, ptq=True).commands()[0]
    assert command.endswith(" --ptq") and "--ptq" not in Settings(tmp_path).commands()[0]
    with pytest.raises(ValueError, match="ptq must be True or False, got 'yes'"):
        Settings(tmp_path, ptq="yes")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_networks_of_a_job(tmp_path: Path) -> None:
    out = tmp_path / "job"
    status, said = exactqat("train", "--out", out, "--epochs-float", 4, "--epochs-qat", 1, "--weight-bits", 4,
                            "--activation-bits", 4, "--ptq", "--quiet")  # fmt: skip
    assert status == 0 and "PTQ, searched" in said, said
    networks = json.loads((out / "metrics.json").read_text())["networks"]["w4a4"]
    losses = {name: networks[name]["validation_loss"] for name in ("qat_ema", "qat_learned", "ptq_searched")}
    assert networks["chosen"] == min(losses, key=lambda name: losses[name])
    searched, plain = networks["ptq_searched"], networks["ptq_min_max"]
    assert searched["validation_loss"] < plain["validation_loss"]
    assert searched["values_differing"] == searched["training_differing"] == 0
    status, said = exactqat("gate", out, "--min-accuracy", 0.2, "--max-differ", 0, "--run")
    assert status == 0 and "w4a4, accuracy: passes" in said and "xnnpack-x86" in said, said
    assert exactqat("gate", out, "--min-accuracy", 1)[0] == 1
    assert exactqat("gate", out, "--min-accuracy", 0.1, "--precision", "w8a8")[0] == 2
    path = tmp_path / "searched.tflite"
    status, said = exactqat(
        "tune", out, "--examples", 64, "--search", path, "--budget", 12, "--methods", "ranges,rounding"
    )
    assert status == 0 and "held out" in said and path.exists(), said
    rules = tmp_path / "rules.txt"
    status, said = exactqat("tune", out, "--examples", 64, "--plan", rules, "--max-drop", "5%", "--flash", "1M")
    assert status == 0 and "It keeps to the budgets" in " ".join(said.split()), said
    assert qat.load_rules(rules)[-1].match == "*"
    other = tmp_path / "rules-even.txt"
    assert ("Train this one too" in said) == (str(other.name) in said.replace("\n", "")) == other.exists(), said
    status, said = exactqat("tune", out, "--examples", 64, "--plan", rules, "--flash", "1k")
    assert status == 1 and "this is the nearest" in " ".join(said.split()), said
    for drop, message in (("0.5", "for 0.5 points say 0.5%"), ("5k", "the units are %")):
        status, said = exactqat("tune", out, "--plan", rules, "--max-drop", drop)
        assert status == 2 and message in " ".join(said.split()), said


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_post_training_quantization_is_delivered_where_it_is_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from exactqat.application.job import settings, training

    kept = tuple(method for method in settings.METHODS if method.name in ("ptq_min_max", "qat_ema"))
    monkeypatch.setattr(settings, "METHODS", kept)
    # Training that does harm.
    monkeypatch.setattr(training, "QAT_RATE", 0.3)
    out = tmp_path / "job"
    status, said = exactqat("train", "--out", out, "--epochs-float", 4, "--epochs-qat", 1, "--weight-bits", 4,
                            "--ptq", "--quiet")  # fmt: skip
    assert status == 0, said
    networks = json.loads((out / "metrics.json").read_text())["networks"]["w4a8"]
    # Which of the two depends on the last bits of the float training, and so on the processor.
    losses = {name: networks[name]["validation_loss"] for name in ("ptq_min_max", "ptq_searched", "qat_ema")}
    assert networks["chosen"] == min(losses, key=lambda name: losses[name]) != "qat_ema"
    status, said = exactqat("verify", out, "--quiet")
    assert status == 0, said
    status, said = exactqat("gate", out, "--min-accuracy", 0.5, "--run")
    assert status == 0, said


def test_a_plan_needs_a_job_and_budgets_need_a_plan(files: tuple[Path, Path], tmp_path: Path) -> None:
    path, data = files
    for arguments, message in (
        (["--flash", "20k"], "--flash is a budget of a plan: add --plan FILE"),
        (["--plan", tmp_path / "rules.txt", "--flash", "20k"], "--plan needs the directory of a job"),
    ):
        status, said = exactqat("tune", path, "--data", data, *arguments)
        assert status == 2 and message in " ".join(said.split()), said
