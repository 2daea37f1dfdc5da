# SPDX-License-Identifier: Apache-2.0
"""Files of a job are data, whoever wrote them; names are names; and whatever fails says so, with nothing lost.

The long campaign on damaged and hostile folders is `python tests/campaigns/fuzz_jobs.py`.
"""

from __future__ import annotations

import html
import importlib
import io
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ai_edge_litert")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")

import fuzz_jobs  # noqa: E402
from deadly import deadly  # noqa: E402

from exactqat import cli  # noqa: E402
from exactqat.application.job import checkpoints, files, models, processes, restored, training  # noqa: E402
from exactqat.application.job.results import Progress  # noqa: E402
from exactqat.application.job.settings import METHODS, Settings  # noqa: E402
from exactqat.application.report import job_page as report  # noqa: E402
from exactqat.cli import terminal  # noqa: E402
from exactqat.deploy.formats.tflite import write_tflite  # noqa: E402
from exactqat.kit.display import printable, shell_word  # noqa: E402

RUN = [sys.executable, "-m", "exactqat.cli"]
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished job, its data, and a module that writes a canary when it is imported."""
    folder = tmp_path_factory.mktemp("original")
    torch.set_num_threads(1)
    fuzz_jobs.make_job(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, and the working directory."""
    shutil.copytree(original, tmp_path / "folder")
    monkeypatch.chdir(tmp_path / "folder")
    return tmp_path / "folder"


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    """Runs the command line here: (status, output, errors)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["exactqat", *arguments])
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
        status: Any = 0
        try:
            cli.main()
        except SystemExit as error:
            status = error.code or 0
        captured = capfd.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return status, captured.out, captured.err

    yield run


@pytest.fixture
def fewer_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One network is quantized without training and one with it, for tests of what is around them."""
    kept = ("ptq_min_max", "qat_ema")
    monkeypatch.setattr(
        "exactqat.application.job.settings.METHODS", tuple(method for method in METHODS if method.name in kept)
    )


def changed(folder: Path, **fields: Any) -> Path:
    """The delivered checkpoint with other fields."""
    path = folder / "job" / "w4a4" / "checkpoint.pt"
    checkpoints.save_checkpoint(path, torch.load(path, weights_only=True) | fields)
    return path


# Foreign code


@pytest.mark.slow
@pytest.mark.parametrize("command", ["verify", "export"])
@pytest.mark.parametrize(
    "network", ["subprocess:call", "canary_module:build", "os:system", "exactqat.application.job.models:dscnn"]
)
def test_a_checkpoint_runs_nothing(folder: Path, call: Call, command: str, network: str) -> None:
    changed(folder, network=network)
    status, _, errors = call(command, "job")
    assert status == 2
    assert "Code that a file names is not run" in errors and f"--model {network}" in errors
    # The oldest trick gave the shape too.
    changed(folder, input_shape=["touch", str(folder / "canary")])
    assert call(command, "job")[0] == 2
    status, _, errors = call(command, "job", "--model", network)
    assert status == 2 and "input_shape must be 1 or 3 positive integers" in errors
    assert not (folder / "canary").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", [["report", "job"], ["train", "--out", "job", "--resume"]])
def test_a_job_runs_nothing_from_the_working_directory(folder: Path, call: Call, command: list[str]) -> None:
    job = json.loads((folder / "job" / "job.json").read_text())
    job["settings"]["model"] = "canary_module:build"
    (folder / "job" / "job.json").write_text(json.dumps(job))
    before = fuzz_jobs.contents(folder)
    status, _, errors = call(*command)
    assert status == 2 and "job.json names the network 'canary_module:build'" in errors
    assert fuzz_jobs.contents(folder) == before


@pytest.mark.slow
@pytest.mark.usefixtures("fewer_networks", "no_pictures")
def test_the_users_word_runs_the_users_network(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "users_network.py").write_text(
        "from exactqat.application.job import models\n"
        "def build(shape, classes): return models.small_mobilenet(shape, classes)\n"
    )
    x, y = fuzz_jobs.patterns()
    np.savez("data.npz", x=x, y=y)
    word = ["--model", "users_network:build"]
    train = ["train", "--out", "job", "--data", "data.npz", "--quiet", *fuzz_jobs.SETTINGS]
    assert call(*train, *word)[0] == 0
    page = html.unescape((tmp_path / "job" / "report.html").read_text())
    assert "exactqat verify job --model users_network:build" in page
    for command in (["verify", "job"], ["export", "job"], ["report", "job"], ["train", "--out", "job", "--resume"]):
        status, _, errors = call(*command)
        assert status == 2 and "--model users_network:build" in errors, command
        assert call(*command, *word)[0] == 0, command
        status, _, errors = call(*command, "--model", "dscnn")
        assert status == 2 and "which is not --model dscnn" in errors, command


@pytest.mark.slow
def test_the_working_directory_is_no_place_for_libraries(folder: Path) -> None:
    """Where an optional library is missing, a file of its name in the folder at hand must not be taken for it."""
    (folder / "onnx.py").write_text((folder / "canary_module.py").read_text())
    program = folder.parent / "exactqat"
    program.write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'onnx' and '' not in sys.path: raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import importlib.util\n"
        "whole = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'onnx' and '' not in sys.path else whole(name)\n"
        "from exactqat import cli\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, str(program), "export", "job"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "exactqat[onnx]" in done.stdout, done.stdout + done.stderr
    assert not (folder / "canary").exists() and not list(folder.rglob("*.onnx"))


@pytest.mark.parametrize("failure", ["raise SystemExit(1)", "1 / 0", "syntax error", "raise KeyboardInterrupt"])
def test_a_users_network_that_fails_is_named(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"failing_{abs(hash(failure))}"
    (tmp_path / f"{name}.py").write_text(failure + "\n")
    status, _, errors = call("train", "--out", "job", "--model", f"{name}:build")
    if "Keyboard" in failure:
        assert status == 130
    else:
        assert status == 2 and f"model '{name}:build' cannot be loaded" in errors
    assert not (tmp_path / "job").exists()


def stored(**parts: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in parts.items():
            archive.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def saved(content: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def packed(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return buffer.getvalue()


def flipped(content: bytes, where: bytes) -> bytes:
    position = content.index(where)
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


WEIGHTS = torch.arange(100.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda canary: b"", "File is not a zip file"),
        (lambda canary: b"PK\x03\x04", "File is not a zip file"),
        (lambda canary: stored(), "cannot be read"),
        (lambda canary: saved(fuzz_jobs.Touch(canary)), "cannot be read"),
        (lambda canary: saved(fuzz_jobs.Touch(canary), _use_new_zipfile_serialization=False), "not a zip file"),
        (lambda canary: saved({"format": 2, "state": fuzz_jobs.Touch(canary)}), "cannot be read"),
        (lambda canary: flipped(saved({"format": 2, "w": WEIGHTS}), WEIGHTS.numpy().tobytes()[40:80]), "is damaged"),
        (lambda canary: packed(saved({"format": 2, "w": WEIGHTS})), "is compressed"),
        (lambda canary: saved({"format": 2, "w": torch.zeros(1).expand(10**12)}), r"it\['w'\] shows more numbers"),
        (lambda canary: saved({"format": 2, "w": WEIGHTS.to_sparse()}), r"it\['w'\] is not a dense tensor"),
        (lambda canary: saved({"format": 2, "w": WEIGHTS.to(torch.complex64)}), r"it\['w'\] is not a dense tensor"),
        (lambda canary: saved({"format": 2, "w": WEIGHTS.to("meta")}), r"it\['w'\] is not a dense tensor"),
        (lambda canary: saved({"format": 2, "w": [{1: torch.float32}]}), r"it\['w'\]\[0\]\[1\] is of type dtype"),
        (lambda canary: saved({"format": 2, "w": {(1, 2): 1}}), "a key of type tuple"),
        (lambda canary: saved({"format": 2, "w": nested(50)}), "nested too deeply"),
        (lambda canary: saved([1, 2]), "not a checkpoint of format 2"),
        (lambda canary: saved({"format": 1}), "not a checkpoint of format 2"),
    ],
)
def test_checkpoints_are_plain_data(tmp_path: Path, content: Callable[[Path], bytes], message: str) -> None:
    path, canary = tmp_path / "state.pt", tmp_path / "canary"
    path.write_bytes(content(canary))
    with pytest.raises(ValueError, match=rf"state\.pt.*{message}"):
        checkpoints.load_checkpoint(path)
    assert not canary.exists()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is not a regular file"):
        checkpoints.load_checkpoint(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"network": 5}, "network must be a string, got 5"),
        ({"network": "resnet9"}, "names the network 'resnet9'"),
        ({"network": "dscnn"}, "does not contain the state of this network"),
        ({"input_shape": [10**6, 10**6, 1]}, "whose product is at most"),
        ({"input_shape": [True, 8, 8]}, "input_shape must be"),
        ({"input_shape": [1, 0, 8]}, "input_shape must be"),
        ({"input_shape": None}, "input_shape must be"),
        ({"input_shape": [3, 8, 8]}, "does not contain the state of this network"),
        ({"image_size": 9}, "image_size must be None or the height and width"),
        ({"class_names": []}, "class_names must be a list of strings"),
        ({"class_names": ["x"] * 10**5}, "has 100,000 class names, but only"),
        ({"class_names": ["x"] * 4}, "does not contain the state of this network"),
        ({"rules": 5}, "rules must be a list of rules"),
        ({"rules": [{"bits": 8}]}, "cannot be prepared by its rules"),
        ({"rules": [{"weight_bits": "8"}]}, "cannot be prepared by its rules"),
        ({"rules": [{"ema_decay": "x"}]}, "cannot be prepared by its rules"),
        ({"rules": [{"ranges": "fixed", "fixed_range": [1]}]}, "cannot be prepared by its rules"),
        ({"rules": []}, "cannot be prepared by its rules"),
        ({"state": {}}, "has 3 class names, but only 0 weights"),
        ({"state": {"x": torch.zeros(9)}}, "does not contain the state of this network"),
        ({"state": {"x": 1, "y": torch.zeros(9)}}, "does not contain the state of this network"),
        ({"state": []}, "state must be a state dict"),
        ({"data": ["x"]}, "data must be a string"),
        ({"data": "nowhere.npz"}, "nowhere.npz cannot be read"),
        ({"method": None}, "method must be a string"),
    ],
)
def test_fields_of_a_checkpoint_are_checked(folder: Path, call: Call, fields: dict[str, Any], message: str) -> None:
    changed(folder, **fields)
    status, _, errors = call("verify", "job")
    assert status == 2 and message in errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": 7}, "epoch must be a whole number from 1 to 3, got 7"),
        ({"epoch": "1"}, "epoch must be a whole number from 1 to 3, got '1'"),
        ({"history": {"loss": [1.0]}}, "its history has no field"),
        ({"history": {"loss": [None], "validation_accuracy": [0.5]}}, "its history: loss must be a list of 1 numbers"),
        ({"history": []}, "history must be an object"),
        ({"best_loss": None}, "best_loss must be a number"),
        ({"model": {}}, "does not contain the state of this network"),
        ({"moments": {0: {}}}, "does not contain the state of this training"),
        ({"moments": {9: {}}}, "does not contain the state of this training"),
        ({"generator": torch.zeros(3)}, "does not contain the state of this training"),
    ],
)
def test_fields_of_a_trainings_state_are_checked(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "state.pt"
    x, y = fuzz_jobs.patterns(30)
    split = training.Split(torch.from_numpy(x)[:, None], torch.from_numpy(y))

    def train(resume: bool, stop: bool = False) -> None:
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
        groups = [{"params": list(model.parameters()), "lr": 1e-3}]
        steps = 0

        def on_step(count: int) -> None:
            nonlocal steps
            steps += count
            if stop and steps > 1:
                raise KeyboardInterrupt

        manner, progress = training.Manner(Settings(path, batch_size=32)), Progress(advance=on_step)
        training.train(model, groups, split, split, 3, "test", path, manner, resume=resume, progress=progress)

    with pytest.raises(KeyboardInterrupt):
        train(resume=False, stop=True)
    state = checkpoints.load_checkpoint(path)
    checkpoints.save_checkpoint(path, state | change)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=re.escape(message)):
        train(resume=True)
    assert path.read_bytes() == before
    shapes = state["moments"]
    shapes[0]["exp_avg"] = torch.zeros(2)
    checkpoints.save_checkpoint(path, state)
    with pytest.raises(ValueError, match="what the optimizer keeps for parameter 0 must have the shapes"):
        train(resume=True)


# Bad files


@pytest.mark.parametrize(
    ("name", "content", "commands", "message"),
    [
        ("w4a4/checkpoint.pt", b"", "verify export", "checkpoint.pt cannot be read as a checkpoint"),
        ("training/float.pt", b"", "report resume", "float.pt cannot be read as a checkpoint"),
        ("job.json", b"", "report resume", "job.json cannot be read"),
        ("job.json", b"[1]", "report resume", "it contains a list where an object is expected"),
        ("job.json", b'{"format": 1}', "report resume", "job.json has no field 'settings'"),
        ("job.json", b'{"format": 1, "settings": 5, "images": ""}', "report resume", "settings must be an object"),
        (
            "job.json",
            b'{"format": 1, "settings": {"x": 5}, "images": ""}',
            "report resume",
            "unexpected keyword argument",
        ),
        (
            "job.json",
            b'{"format": 9, "settings": {}, "images": ""}',
            "report resume",
            "has format 9; this version reads 1",
        ),
        ("w4a4/model.tflite", b"", "verify", "model.tflite cannot be compared"),
        ("w4a4/model.tflite", b"\x1c\0\0\0TFL3" + bytes(2000), "verify", "model.tflite cannot be compared"),
    ],
)
def test_damaged_files_are_named(
    folder: Path, call: Call, name: str, content: bytes, commands: str, message: str
) -> None:
    (folder / "job" / name).write_bytes(content)
    before = fuzz_jobs.contents(folder)
    for command in commands.split():
        arguments = ["train", "--out", "job", "--resume"] if command == "resume" else [command, "job"]
        status, _, errors = call(*arguments)
        assert status == 2 and message in errors, command
        after = fuzz_jobs.contents(folder)
        assert set(after) == set(before) and after[f"job/{name}"] == content


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("seed", "x", "seed must be an integer, got 'x'"),
        ("seed", True, "seed must be an integer, got True"),
        ("seed", 10**30, "seed must be from 0 to"),
        ("epochs_float", 1.5, "epochs_float must be an integer, got 1.5"),
        ("batch_size", None, "batch_size must be an integer, got None"),
        ("image_size", 10**6, "image_size must be from 1 to 16384, got 1000000"),
        ("weight_bits", ["x"], "weight_bits must be an integer, got 'x'"),
        ("weight_bits", {"4": 4}, "weight_bits must be an integer, got {'4': 4}"),
        ("activation_bits", [], "activation_bits must be a number of bits or several, such as 8,6,4, got none"),
        ("data", 5, "data must be a string, got 5"),
        ("data", None, "data must be a string, got None"),
        ("model", {"a": 1}, "model must be a string, got {'a': 1}"),
    ],
)
def test_types_of_settings_are_checked(folder: Path, call: Call, setting: str, value: Any, message: str) -> None:
    job = json.loads((folder / "job" / "job.json").read_text())
    job["settings"][setting] = value
    (folder / "job" / "job.json").write_text(json.dumps(job))
    for arguments in (["report", "job"], ["train", "--out", "job", "--resume"]):
        status, _, errors = call(*arguments)
        assert status == 2 and "job.json cannot be read: " + message in errors


def test_report_trains_nothing_even_if_a_training_is_not_at_its_end(folder: Path, call: Call) -> None:
    path = folder / "job" / "training" / "float.pt"
    state = checkpoints.load_checkpoint(path)
    checkpoints.save_checkpoint(path, state | {"epochs": 2})
    before = fuzz_jobs.contents(folder)
    status, _, errors = call("report", "job")
    assert status == 2 and "an unfinished training" in errors
    assert fuzz_jobs.contents(folder) == before


def test_regions_of_zeros_in_a_model_are_refused_or_harmless(original: Path) -> None:
    content = (original / "job" / "w4a4" / "model.tflite").read_bytes()
    graph, _ = restored.restore_graph(original / "job" / "w4a4" / "checkpoint.pt")
    refused = 0
    for start in range(0, len(content), 192):
        damaged = content[:start] + bytes(len(content[start : start + 64])) + content[start + 64 :]
        try:
            importlib.import_module("exactqat.deploy.formats.tflite").with_outputs(damaged, graph.results())
        except ValueError:
            refused += 1
    assert 3 < refused < len(content) // 192


def test_a_model_that_is_the_runtimes_death_is_named(folder: Path, call: Call) -> None:
    path = folder / "job" / "w4a4" / "model.tflite"
    path.write_bytes(deadly(path.read_bytes()))
    status, _, errors = call("verify", "job")
    assert status == 2 and "job/w4a4/model.tflite cannot be compared: the runtime crashed on it (SIGSEGV)" in errors


def test_a_comparison_tells_how_far_it_is(folder: Path) -> None:
    reported: list[tuple[int, int]] = []
    progress = Progress(compared=lambda *counts: reported.append(counts))
    (found,) = restored.verify_directory(folder / "job", progress).values()
    assert [done for done, _ in reported] == list(range(1, reported[-1][1] + 1)) and found.report.equal
    assert len(reported) % len(found.report.operators) == 0 and {all for _, all in reported} == {len(reported)}


def test_status_1_means_that_integers_differ(folder: Path, call: Call) -> None:
    path = folder / "job" / "w4a4" / "model.tflite"
    graph, _ = restored.restore_graph(path.with_name("checkpoint.pt"))
    weight = graph.tensors["classifier/filter"].data
    assert weight is not None
    weight[:] = -weight
    write_tflite(graph, path)
    status, output, _ = call("verify", "job")
    assert status == 1 and "does not run as simulated" in output and "computes what was trained" in output


@pytest.mark.parametrize("ending", [SystemExit(1), SystemExit("text"), EOFError(), RecursionError(), MemoryError()])
def test_status_1_means_nothing_else(
    ending: BaseException, monkeypatch: pytest.MonkeyPatch, call: Call, capfd: pytest.CaptureFixture[str]
) -> None:
    def end(*given: Any) -> None:
        raise ending

    monkeypatch.setattr("exactqat.application.job.restored.export_directory", end)
    assert call("export", "job")[0] == 2


def test_a_defect_keeps_its_traceback_and_has_status_2() -> None:
    code = (
        "import sys; sys.argv = ['exactqat', 'export', 'x']\nfrom exactqat import cli\n"
        "from exactqat.application.job import restored\ndef end(*given): raise AssertionError('a defect')\n"
        "restored.export_directory = end\ncli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" in done.stderr and "a defect" in done.stderr
    code = "import sys; sys.modules['typer'] = None\nfrom exactqat import cli\ncli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("exactqat: typer is not installed")


# Streams and disks


@pytest.fixture
def no_reader() -> Iterator[IO[str]]:
    """A pipe that nobody reads any more."""
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w")
    yield stream
    terminal.to_nobody(stream)
    stream.close()


@pytest.mark.slow
@pytest.mark.usefixtures("fewer_networks", "no_pictures")
def test_a_reader_that_goes_ends_no_training(
    folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch, no_reader: IO[str]
) -> None:
    """`exactqat train | head -1`: the training is worth more than its reader."""
    monkeypatch.setattr(sys, "stdout", no_reader)
    status, _, errors = call("train", "--out", "other", "--data", "data.npz", *fuzz_jobs.SETTINGS)
    assert status == 0, errors
    assert (folder / "other" / "report.html").exists() and (folder / "other" / "metrics.json").exists()


@pytest.mark.slow
def test_a_reader_that_goes_changes_no_status(folder: Path, no_reader: IO[str]) -> None:
    done = subprocess.run([*RUN, "verify", "nowhere"], cwd=folder, stdout=no_reader, stderr=no_reader, check=False)
    assert done.returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize(("redirection", "status"), [(">&- 2>&- <&-", 0), (">/dev/full", 2)])
def test_output_that_leads_nowhere(folder: Path, redirection: str, status: int) -> None:
    command = f"{shlex.join([*RUN, 'verify', 'job'])} {redirection}"
    done = subprocess.run(["/bin/sh", "-c", command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert status == 0 or "No space left on device" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("fewer_networks")
def test_a_disk_that_is_full_at_the_end_costs_the_pictures_only(folder: Path, call: Call) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        status, output, errors = call("train", "--out", "other", "--data", "data.npz", *fuzz_jobs.SETTINGS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert status == 2 and "all are equal" in " ".join(output.split()), errors
    assert "report.html could not be written" in errors and "run `exactqat report other` to try again" in errors
    assert not list((folder / "other").rglob("*.tmp"))
    metrics = json.loads((folder / "other" / "metrics.json").read_text())
    assert metrics["values_differing"] == 0
    assert call("report", "other")[0] == 0 and (folder / "other" / "report.html").exists()


@pytest.mark.skipif(os.getuid() == 0, reason="root may read and write everything")
@pytest.mark.parametrize("mode", [0o000, 0o555])
def test_folders_without_permission(folder: Path, call: Call, mode: int) -> None:
    (folder / "job" / "w4a4").chmod(mode)
    (folder / "job").chmod(mode)
    try:
        for arguments in (["export", "job"], ["report", "job"], ["train", "--out", "job", "--restart"]):
            status, _, errors = call(*arguments)
            assert status == 2 and "Permission denied" in errors
        assert call("verify", "job")[0] == (0 if mode else 2)
    finally:
        (folder / "job").chmod(0o755)
        (folder / "job" / "w4a4").chmod(0o755)


def test_a_folder_that_cannot_be_read_is_said(folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any, *given: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(files.os, "listdir", refuse)
    for arguments in (["verify", "job"], ["export", "job"], ["train", "--out", "job"]):
        status, _, errors = call(*arguments)
        assert status == 2 and "Permission denied: 'job'" in errors


def test_what_the_first_process_refuses_the_others_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(processes.Processes, "from_first", lambda self, value: sent.append(value) or sent[0])

    def refuse() -> bool:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        processes.Processes(0, 2).first_does(refuse)
    with pytest.raises(ValueError, match="the first process reports: no room"):
        processes.Processes(1, 2).first_does(refuse)


# Names

NAMES = (
    "$x_1$", "$\\frac{", "50% _a_ ^b^ \\", "<script>alert(1)</script>", "[red]x[/blue]", ":smile: a:b:c",
    "\x1b[31mred\x07", "not \udcff UTF-8", "👩\u200d🚀🇨🇭", "شبكة עברית", "\u202egnihtyna", "two\nlines\tand a tab",
    "x" * 3000, " ", "'\"`$(touch canary)",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("fewer_networks")
def test_names_are_names(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole job, for a directory and classes that are called anything."""
    monkeypatch.chdir(tmp_path)
    x, _ = fuzz_jobs.patterns(4 * len(NAMES))
    np.savez("[red]$x$ <b>:smile:.npz", x=x, y=np.array(NAMES * 4))
    out = "-it's $(touch canary) `touch canary` $x$ [red] :smile: <b> \x1b[31m \udcff"
    arguments = ["--data", "[red]$x$ <b>:smile:.npz", *fuzz_jobs.SETTINGS]
    status, output, errors = call("train", f"--out={out}", *arguments)
    assert status == 0, errors
    assert "\x1b[31m" not in output and "[red]$x$ <b>:smile:.npz" in output and "\\udcff" in output
    page = (tmp_path / out / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"<script|<b> |\x1b|\u202e", page) and "[red]$x$ &lt;b&gt;:smile:.npz" in page
    metrics = json.loads((tmp_path / out / "metrics.json").read_text())
    assert sorted(metrics["data"]["classes"]) == sorted(NAMES)
    # What is printed can be typed.
    (printed,) = re.findall(r"To compare again at any time: (.*)", output)
    train, verify = html.unescape(re.findall(r"<pre>(.*?)</pre>", page, re.S)[0]).splitlines()
    assert printed == verify and "--restart" in train
    for command in (verify, train):
        split = subprocess.run(
            ["bash", "-c", f"exactqat() {{ printf '%s\\0' \"$@\"; }}; {command}"], capture_output=True, check=True
        ).stdout.split(b"\0")
        assert os.fsencode(f"./{out}") in split
    assert not (tmp_path / "canary").exists()
    status, _, errors = call("verify", f"./{out}")
    assert status == 0, errors
    status, _, errors = call("report", f"./{out}")
    assert status == 0, errors
    status, _, errors = call("train", f"--out={out}")
    assert status == 2 and "contains a finished job" in errors and "[red] :smile: <b> \\x1b[31m \\udcff" in errors


def test_long_names_of_many_classes_are_shortened() -> None:
    names = tuple(f"{number} $" + "x" * 5000 for number in range(report.MATRIX_CLASSES + 1))
    labels = torch.arange(len(names))
    dataset = SimpleNamespace(class_names=names, test=SimpleNamespace(labels=labels))
    outcome = SimpleNamespace(device_predictions=labels.numpy()[::-1].copy())
    table = report.confusions(SimpleNamespace(dataset=dataset), [outcome])["table"]  # type: ignore[arg-type, list-item]
    assert table.rows and all(
        "…" in cell.text and len(cell.text) < 200 for _, cells in table.rows for cell in cells[:2]
    )


@pytest.mark.slow
def test_drawing_that_fails_loses_nothing(folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> str:
        raise ZeroDivisionError("a picture")

    monkeypatch.setattr(report, "written", fail)
    # Its trainings are done; it is as a job that was stopped before its end.
    (folder / "job" / "metrics.json").unlink()
    status, output, errors = call("train", "--out", "job", "--resume")
    assert status == 2 and "all are equal" in " ".join(output.split())
    assert (
        "report.html could not be written (ZeroDivisionError: a picture). All results are in job/metrics.json" in errors
    )
    assert json.loads((folder / "job" / "metrics.json").read_text())["values_differing"] == 0


@pytest.mark.parametrize("word", [*NAMES, "", "-n", "--out", "~", "*", "a b", "#x", "!x", "\\", "x\udce9", "\ud800"])
def test_words_for_the_shell_are_read_as_they_are(word: str) -> None:
    shown = shell_word(word)
    assert printable(shown) == shown
    done = subprocess.run(["bash", "-c", f"printf %s {shown}"], capture_output=True, check=True)
    expected = word.encode("utf-8", "surrogatepass" if word == "\ud800" else "surrogateescape")
    assert done.stdout == (b"./" if word.startswith("-") else b"") + expected


@pytest.mark.parametrize("name", ["nowhere[red]", "[/red]", "a:smile:b", "$x$", "\x1b[31m"])
def test_markup_is_no_markup(name: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("verify", "export", "report"):
        status, _, errors = call(command, name)
        assert status == 2 and name.replace("\x1b", "\\x1b") in errors


# What is kept


@pytest.mark.slow
@pytest.mark.usefixtures("fewer_networks", "no_pictures")
def test_the_command_says_where_the_old_job_is(folder: Path, call: Call) -> None:
    """As `make demo` does it, again and again."""
    before = fuzz_jobs.contents(folder / "job")
    arguments = ["train", "--out", "job", "--data", "data.npz", "--quiet", *fuzz_jobs.SETTINGS]
    status, _, errors = call(*arguments)
    assert status == 2 and "job contains a finished job: use another directory, or move it aside" in errors
    assert fuzz_jobs.contents(folder / "job") == before
    for number in (1, 2):
        status, output, _ = call(*arguments, "--restart")
        assert status == 0 and f"The previous job in job is now in {folder.resolve() / f'job.{number}'}" in output
    assert fuzz_jobs.contents(folder / "job.1") == before
    assert "notes.txt" in before and "notes.txt" not in fuzz_jobs.contents(folder / "job")


@pytest.mark.parametrize("member", ["x", "x.npy", "y.npy", "README.txt"])
def test_strange_members_of_data_are_named(folder: Path, call: Call, member: str) -> None:
    with zipfile.ZipFile(folder / "data.npz") as archive:
        arrays = {name: archive.read(name) for name in archive.namelist() if name != f"{member[0]}.npy"}
    with zipfile.ZipFile(folder / "data.npz", "w") as archive:
        for name, content in (arrays | {member: b"no array"}).items():
            archive.writestr(name, content)
    status, _, errors = call("verify", "job")
    assert (status, "data.npz cannot be read as an .npz file" in errors) == (
        (0, False) if member == "README.txt" else (2, True)
    )


def test_settings_are_kept_apart_from_the_users_word() -> None:
    assert models.named_in(Path("x"), "dscnn", None) == "dscnn"
    with pytest.raises(ValueError, match="--model"):
        models.named_in(Path("x"), "a:b", None)
    assert replace(Settings(Path("x")), model="a:b").model == "a:b"


@pytest.mark.slow
def test_damaged_and_hostile_folders() -> None:
    """A sample of the campaign."""
    command = [sys.executable, fuzz_jobs.__file__, "--cases", "6", "--seed", "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 cases of seed 20" in done.stdout and ": 0 failures" in done.stdout
