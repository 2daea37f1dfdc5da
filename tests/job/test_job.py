# SPDX-License-Identifier: Apache-2.0
"""The main job, in small: files, figures, determinism, failures, and the command line."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import io
import itertools
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("ai_edge_litert")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from matplotlib.figure import Figure  # noqa: E402
from PIL import Image  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

from exactqat import cli, deploy  # noqa: E402
from exactqat.application.job import augmentation, data, files, pipeline, restored, training  # noqa: E402
from exactqat.application.job.models import NETWORKS  # noqa: E402
from exactqat.application.job.results import Compared  # noqa: E402
from exactqat.application.job.settings import METHODS, Settings  # noqa: E402
from exactqat.application.report import charts, findings, metrics  # noqa: E402
from exactqat.application.report import job_page as report  # noqa: E402
from exactqat.application.report.page import Cell, render  # noqa: E402
from exactqat.cli import terminal  # noqa: E402
from exactqat.deploy.formats.tflite import write_tflite  # noqa: E402
from exactqat.deploy.runtimes import open_runtime  # noqa: E402

PRECISIONS = ("w8a8", "w4a4", "w3a4")
RUN = [sys.executable, "-m", "exactqat.cli"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """One job with one epoch each, started as a user starts it."""
    out = tmp_path_factory.mktemp("job") / "digits"
    command = [*RUN, "train", "--out", str(out), "--epochs-float", "1", "--epochs-qat", "1", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done


def test_the_job_writes_everything_it_promises(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, done = finished
    for precision in PRECISIONS:
        assert sorted(path.name for path in (out / precision).iterdir()) == ["checkpoint.pt", "model.tflite"]
        assert (out / precision / "model.tflite").read_bytes()[4:8] == b"TFL3"
    page = (out / "report.html").read_text()
    # One of accuracies, two of sizes, one of noise, two of each training.
    assert len(re.findall(r"<figure[^>]*><svg viewBox=", page)) == 1 + 2 + 1 + 2 * 4
    assert page.count('class="matrix"') == 4 and page.count("<details>") == 3  # layers
    assert page.count('<details name="device"') == 4 and page.count('<details name="device" open>') == 1
    # Tables have captions and scopes, and whoever has no mouse can scroll them.
    tables = page.count("<table")
    assert tables == page.count("<caption>") == page.count('role="region" tabindex="0"') > 10
    assert page.count('<th scope="row"') > 100 and not re.search(r"<th[ >](?!scope=)", page)
    compared = json.loads((out / "metrics.json").read_text())["values_compared"]
    assert f"✓ 0 of {compared:,} integers differ between the files" in page
    # Values are shown next to the pointer.
    assert len(re.findall(r"<title>(W\dA\d|float)[^<]*: \d", page)) > 20
    assert "http" not in page and "<image" not in page
    assert not list(out.rglob("*.tmp"))
    assert "all are equal" in page
    assert len(re.findall(r"W\dA\d: the largest drop is in <code>[\w.]+</code>, by -?\d+\.\d dB", page)) == 3
    output = " ".join(done.stdout.split())
    assert "integers (every layer's output of 12 networks on all 359 test images)" in output
    assert "QAT, learned" in output and "PTQ, min/max" in output and "PTQ, least-error" in output


def test_metrics_hold_the_whole_result(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    metrics = json.loads((finished[0] / "metrics.json").read_text())
    assert metrics["settings"] == {
        "seed": 3, "epochs_float": 1, "epochs_qat": 1, "data": "digits", "model": "small_mobilenet",
        "weight_bits": None, "activation_bits": None, "batch_size": 64, "image_size": None, "device": "xnnpack-x86",
        "weights": None, "ptq": False, "split": None, "recipe": None,
        "augment": ["shift"], "class_weights": None, "early_stopping": None, "mixed_precision": False,
        "optimizer": "adam",
        "lr": None, "lr_qat": None, "lr_ranges": None, "schedule": "cosine", "distill": None,
        "rules": None, "bits": None,
    }  # fmt: skip
    assert metrics["weights"] is None
    assert metrics["resumed"] is False and metrics["data"]["skipped"] == []
    assert list(metrics["networks"]) == list(PRECISIONS)
    assert metrics["data"]["train"] + metrics["data"]["validation"] + metrics["data"]["test"] == 1797
    assert metrics["values_differing"] == 0
    compared = 0
    for precision in PRECISIONS:
        networks = metrics["networks"][precision]
        methods = ("ptq_min_max", "ptq_least_error", "qat_ema", "qat_learned")
        assert networks["chosen"] == min(methods, key=lambda method: networks[method]["validation_loss"])
        for method in methods:
            network = networks[method]
            assert 0 <= network["device_accuracy"] <= 1
            assert network["values_differing"] == 0
            assert all(layer["differing"] == 0 for layer in network["layers"])
            assert network["values_compared"] == sum(layer["values"] for layer in network["layers"])
            noises = [(layer["trained_sqnr"], layer["device_sqnr"]) for layer in network["layers"]]
            measured = [pair for pair in noises if None not in pair]
            assert len(measured) >= 10 and all(abs(trained - device) < 1.0 for trained, device in measured)
            assert network["training_differing"] == 0 < network["training_values"]
            assert network["test_accuracy"] == network["device_accuracy"]
            assert network["predictions_values"] == len(network["answers"]) * 10  # logits of all test images
            compared += network["values_compared"]
        kinds = {layer["operator"] for layer in networks[networks["chosen"]]["layers"]}
        assert {"CONV_2D", "DEPTHWISE_CONV_2D", "ADD", "MEAN", "FULLY_CONNECTED"} <= kinds
    assert metrics["values_compared"] == compared > 1_000_000


def test_the_report_shows_single_epochs_and_explains_dashes(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    page = (finished[0] / "report.html").read_text()
    for title in ("float", "W8A8", "W4A4", "W3A4"):
        (drawn,) = re.findall(rf"<figure>(<svg [^>]*aria-label='{title}: loss, by epoch\.'.*?</svg>)", page, re.S)
        # Points, which are what is used again and again from a definition.
        assert "<use " in drawn.split("epoch</text>")[-1]
        ticks = re.findall(r">(-?[\d.]+)</text>", drawn)
        assert len(ticks) == len(set(ticks)) and "1" in ticks
    for drawn in re.findall(r"<svg .*?</svg>", page, re.S):
        dashed = len(re.findall("stroke-dasharray", drawn))
        assert not dashed or re.search("float network's|frozen from here on", drawn)
    assert re.search(r"prefers-color-scheme:dark\)\{:root\{--c1c2430:#e8ebf0", page)
    assert not re.search(r"(fill|stroke): ?#", page)


@pytest.mark.slow
def test_the_report_shows_mistakes_classes_and_parts(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    out, _ = finished
    page, metrics = (out / "report.html").read_text(), json.loads((out / "metrics.json").read_text())
    labels = data.load("digits").test.labels.numpy()
    graph, _ = restored.restore_graph(out / "w8a8" / "checkpoint.pt")
    codes = deploy.input_codes(graph, data.load("digits").test.images.numpy())
    content = (out / "w8a8" / "model.tflite").read_bytes()
    runtime = open_runtime(content, graph.inputs, graph.outputs, "xnnpack-x86")
    answers = runtime.run(codes)[graph.outputs[0]].argmax(1)
    assert [row["images"] for row in metrics["classes"]] == np.bincount(labels).tolist()
    for code, row in enumerate(metrics["classes"]):
        assert row["class"] == str(code)
        assert row["w8a8"] == pytest.approx((answers[labels == code] == code).mean())
        cells = rf'<th scope="row" class="t">{code}</th><td [^>]*>{row["images"]}</td><td [^>]*>{row["float"]:.1%}</td>'
        assert re.search(cells, page)
    listed = metrics["mistakes"]["listed"]
    wrong = {entry["image"] for entry in listed if entry["answers"]["w8a8"] != entry["shows"]}
    assert metrics["mistakes"]["images"] == len(listed) and wrong == set(np.nonzero(answers != labels)[0].tolist())
    shown = re.findall(
        r'<img alt="test image (\d+), which shows (\d)" src="(data:image/png;base64,[^"]*)" class=small', page
    )
    assert len(shown) == min(len(listed), report.SHOWN_IMAGES) and shown[0][0] == str(listed[0]["image"])
    image = Image.open(io.BytesIO(base64.b64decode(shown[0][2].split(",")[1])))
    pixels = data.load("digits").test.images[int(shown[0][0])][0].numpy()
    assert np.array_equal(np.asarray(image), np.rint(pixels.astype(np.float64) * 255).astype(np.uint8))
    for precision in PRECISIONS:
        network = metrics["networks"][precision][metrics["networks"][precision]["chosen"]]
        parts, footprint = network["footprint"]["parts"], network["footprint"]
        assert sum(parts.values()) == footprint["flash_bytes"] == (out / precision / "model.tflite").stat().st_size
        graph, _ = restored.restore_graph(out / precision / "checkpoint.pt")
        constants = [tensor.data for tensor in graph.tensors.values() if tensor.data is not None]
        assert parts["weights"] >= sum(data.size for data in constants if data.dtype == np.int8) > 0
        assert min(parts.values()) > 0
        *layers, whole = network["layers"]
        assert whole["multiply_accumulates"] == sum(layer["multiply_accumulates"] for layer in layers)
        assert whole["multiply_accumulates"] == footprint["multiply_accumulates"] > 0
    guess = metrics["guessing"]
    assert guess["accuracy"] == np.bincount(labels).max() / len(labels) < guess["needed"] < 0.2


def guessed(accuracy: float, images: int, classes: int = 3) -> SimpleNamespace:
    """Results of a network that is right about the first images."""
    labels = np.arange(images) % classes
    answers = np.where(np.arange(images) < round(accuracy * images), labels, (labels + 1) % classes)
    split = SimpleNamespace(labels=torch.from_numpy(labels))
    test = type("Test", (SimpleNamespace,), {"__len__": lambda self: images})(**vars(split))
    dataset = SimpleNamespace(class_names=("a", "b", "c")[:classes], test=test, noun="image")
    outcome = SimpleNamespace(device_predictions=labels, device_accuracy=0.34)
    return SimpleNamespace(
        dataset=dataset, float_test_accuracy=accuracy, float_predictions=answers, chosen=lambda precision: outcome,
        settings=SimpleNamespace(precisions={"w4a4": (4, 4)}),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("accuracy", "images", "message"),
    [
        (
            1 / 3,
            300,
            "the float network has not learned to distinguish the classes: 33.3% of 300 test images are right",
        ),
        (0.36, 300, "always naming the most frequent class gives 33.3%. Try more epochs"),
        (0.1, 300, "has not learned"),
        (1.0, 3, "3 test images, 33.3% of them of one class, are too few to tell"),
        (0.9, 300, "the W4A4 network is no better than guessing: 34.0% of 300 test images are right, of float's 90.0%"),
    ],
)
def test_guessing_is_not_learning(accuracy: float, images: int, message: str) -> None:
    (warning,) = findings.warnings_on(guessed(accuracy, images))  # type: ignore[arg-type]
    assert message in warning
    assert findings.learned(guessed(accuracy, images).dataset, accuracy) == (accuracy == 0.9)


def check_ticks_are_apart(figure: Figure) -> None:
    """No label of a horizontal axis touches the next one."""
    figure.draw_without_rendering()
    for axes in figure.axes:
        low, high = sorted(axes.get_xlim())
        labels = [
            label
            for tick, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
            if low <= tick <= high and label.get_text()
        ]
        assert len(labels) >= 2
        boxes = [label.get_window_extent() for label in labels]
        for before, after in itertools.pairwise(boxes):
            assert before.x1 + 3 < after.x0, [label.get_text() for label in labels]


@pytest.mark.parametrize("lowest", [0.0, 0.1, 0.258, 0.333, 0.45, 0.5, 0.62, 0.7, 0.81, 0.9, 0.93, 0.955, 0.99, 1.0])
def test_ticks_below_the_bars_are_apart(lowest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(charts, "svg", lambda figure, _: drawn.append(figure) or "")
    for highest in {lowest, (2 * lowest + 1) / 3, (lowest + 1) / 2, 1.0}:
        outcomes = [
            SimpleNamespace(method=method, device_accuracy=lowest + (highest - lowest) * place / 3)
            for place, method in enumerate(METHODS)
        ]
        results = SimpleNamespace(
            float_test_accuracy=highest,
            settings=SimpleNamespace(precisions=["w8a8", "w4a16"]),
            of=lambda precision, outcomes=outcomes: outcomes,
        )
        with charts.drawing():
            charts.accuracies(results)  # type: ignore[arg-type]
            check_ticks_are_apart(drawn[-1])


def test_a_log_has_one_line_for_each_epoch(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, done = finished
    lines = [line for line in done.stdout.splitlines() if ": epoch 1/1, loss " in line]
    assert len(lines) == 1 + 2 * len(PRECISIONS)
    history = json.loads((out / "metrics.json").read_text())["float"]["history"]
    accuracy = f"{history['validation_accuracy'][0]:.1%} of the validation images right"
    assert lines[0] == f"float training: epoch 1/1, loss {history['loss'][0]:.4g}, {accuracy}"
    assert "W3A4 QAT, learned ranges: epoch 1/1" in lines[-1] and lines[-1].endswith("right, frozen")
    assert "\x1b" not in done.stdout and "\r" not in done.stdout


def on_a_terminal(columns: int, arguments: list[str]) -> str:
    """What a person sees there of a command, without colors; each state of a redrawn line counts."""
    child, screen = pty.fork()
    if child == 0:
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
        os.execve(sys.executable, [*RUN, *arguments], environment | {"TERM": "xterm-256color"})
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    seen = b""
    while True:
        try:
            part = os.read(screen, 1 << 16)
        except OSError:  # the other side is gone
            break
        seen += part
    os.waitpid(child, 0)
    os.close(screen)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode().replace("\r\n", "\n").replace("\r", "\n"))


@pytest.fixture
def one_network(finished: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> Path:
    """The job with one of its networks."""
    shutil.copytree(finished[0] / "w8a8", tmp_path / "w8a8")
    return tmp_path


@pytest.mark.slow
def test_forty_columns_are_enough(one_network: Path) -> None:
    shown = on_a_terminal(40, ["verify", str(one_network)])
    assert "computes what was trained: none of 3,590 integers" in " ".join(shown.split())
    paths = [line for line in shown.splitlines() if str(one_network) in line]
    words = [line for line in shown.splitlines() if line not in paths]
    assert "W8A8 on the runtime " in shown and max(map(len, words)) <= 40
    refused = on_a_terminal(40, ["verify", "nowhere"])
    assert "error: nowhere does not exist; run \n" in refused and max(map(len, refused.splitlines())) <= 40
    page = on_a_terminal(60, ["train", "-h"])
    assert max(map(len, page.splitlines())) <= 60 and "**" not in page
    assert all(f"─ {group} ─" in page for group in ("Data", "Network", "Bits", "Training", "Device and search"))


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 200])
def test_the_bar_fits_and_shows_loss_and_accuracy(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console = terminal.console_of(file=Screen(), width=columns, force_terminal=True, color_system=None)
    bars = terminal.bars_on(console, disable=False)
    task = bars.add_task("W4A4 QAT, learned ranges", total=100, figures="", epoch="")
    bars.advance(task, 45)
    for shown in ("", "loss 0.123, 93.1% right", "loss 1.23e+04, 100.0% right"):
        bars.update(task, figures=shown, epoch="epoch 12/80")
        with console.capture() as capture:
            console.print(bars.make_tasks_table(bars.tasks))
        (line,) = capture.get().splitlines()
        assert len(line) <= columns and "45%" in line and "W4A4" in line
        assert ("epoch 12/80" in line) == (columns >= terminal.WIDE)
        assert shown in line or columns < terminal.WIDE // 2
    assert terminal.bars_on(terminal.console_of(file=io.StringIO(), force_terminal=True), disable=False).disable


def test_help_names_the_networks() -> None:
    done = subprocess.run([*RUN, "train", "--help"], capture_output=True, text=True, timeout=600, check=True)
    shown = " ".join(done.stdout.split())
    assert all(name in shown for name in NETWORKS) and re.search("-w, --weight-bits|--weight-bits, -w", shown)
    groups = re.findall(r"^(\w.*):$", done.stdout, re.MULTILINE)
    assert groups[0] == "Options" and {"Data", "Network", "Bits", "Training", "Device and search"} <= set(groups)


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "no.tflite", "OUT"],
        ["inspect", "no.tflite", "--reduce", "OUT"],
        ["identify", "--runner", "no", "--out", "OUT"],
        ["tune", "no.tflite", "--picture", "OUT"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for out, why in (("no/out.file", f"there is no folder {tmp_path / 'no'}"), ("file/out.file", "Not a directory in")):
        words = [str(tmp_path / out) if word == "OUT" else word for word in arguments]
        monkeypatch.setattr(sys, "argv", ["exactqat", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        assert re.search(rf"out\.file\S* cannot be written: {why}", capsys.readouterr().err.replace("\n", " "))


@pytest.mark.slow
def test_a_shell_completes_commands() -> None:
    environment = os.environ | {"_EXACTQAT_COMPLETE": "complete_bash", "COMP_WORDS": "exactqat ver", "COMP_CWORD": "1"}
    program = "import sys; sys.argv = ['exactqat']; from exactqat.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.split() == ["verify"]


@pytest.mark.slow
def test_errors_in_pipes_are_lines() -> None:
    for arguments, message in (
        (["train", "--out", "x", "--weight-bits", "9"], "Error: Invalid value for '--weight-bits' / '-w': "),
        (["train"], "Error: Missing option '--out'."),
        (["verify", "nowhere/" + "x" * 200], "error: nowhere/xxx"),
    ):
        done = subprocess.run([*RUN, *arguments], capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 2
        assert any(line.startswith(message) for line in done.stderr.splitlines())
        assert not re.search("[│╭]", done.stderr)
    assert "x" * 200 + " does not exist; run `exactqat train` first\n" in done.stderr


@pytest.fixture
def fewer_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One network is quantized without training and one with it, for tests of what is around them."""
    kept = ("ptq_min_max", "qat_ema")
    monkeypatch.setattr(
        "exactqat.application.job.settings.METHODS", tuple(method for method in METHODS if method.name in kept)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("fewer_networks")
def test_a_job_for_another_device(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    given = {"epochs_float": 1, "epochs_qat": 1, "weight_bits": 4, "activation_bits": 8}
    results = pipeline.run(Settings(tmp_path, device="micro", **given), keep_going=True)
    for outcome in results.outcomes:
        assert outcome.model.profile == "micro" and outcome.report.trained_for == "micro"
        assert outcome.report.training_differing == 0 < outcome.report.training_values
        assert outcome.test_accuracy == pytest.approx(outcome.device_accuracy)
    network, _ = restored.restore(tmp_path / "w4a8" / "checkpoint.pt")
    assert network.profile == "micro"
    (tmp_path / "metrics.json").write_text(json.dumps(metrics.metrics(results)))
    assert "the device itself, here those of <code>micro</code>" in metrics.write_report(results).read_text()
    with pytest.raises(ValueError, match="device must be one of xnnpack-x86, .*, got 'npu'"):
        Settings(tmp_path, device="npu")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits(
    finished: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    pipeline.run(
        Settings(tmp_path, seed=3, epochs_float=1, epochs_qat=1, weight_bits=4, activation_bits=4), keep_going=True
    )
    for name in ("float/checkpoint.pt", "w4a4/checkpoint.pt", "w4a4/model.tflite"):
        assert (finished[0] / name).read_bytes() == (tmp_path / name).read_bytes(), name


@pytest.mark.slow
def test_verify_accepts_the_result_and_notices_a_changed_file(
    finished: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    reports = restored.verify_directory(finished[0])
    assert sorted(reports) == sorted(PRECISIONS)
    assert all(found.report.equal and found.report.values > 100_000 for found in reports.values())
    (tmp_path / "w8a8").mkdir()
    for name in ("checkpoint.pt", "model.tflite"):
        (tmp_path / "w8a8" / name).write_bytes((finished[0] / "w8a8" / name).read_bytes())
    graph, _ = restored.restore_graph(tmp_path / "w8a8" / "checkpoint.pt")
    weight = graph.tensors["classifier/filter"].data
    assert weight is not None
    weight[0, 0] = weight[0, 0] - 9 if weight[0, 0] > 0 else weight[0, 0] + 9
    write_tflite(graph, tmp_path / "w8a8" / "model.tflite")
    done = subprocess.run([*RUN, "verify", str(tmp_path)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "differ" in done.stdout


@pytest.mark.slow
def test_eight_bits_take_a_quarter_of_the_epochs(tmp_path: Path) -> None:
    settings = Settings(tmp_path, epochs_float=3, epochs_qat=40)
    assert [settings.epochs_of(bits) for bits in ((8, 8), (4, 8), (3, 4))] == [10, 40, 40]
    assert Settings(tmp_path, epochs_qat=1).epochs_of((8, 8)) == 1
    dataset = data.load("digits")
    steps = training.steps_per_epoch(dataset.train, 64)
    # Two ways to train for each of W8A8, W4A4 and W3A4.
    assert pipeline.total_steps(settings, dataset) == steps * (3 + 2 * (10 + 40 + 40))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--out", "x", "--data", "faces"], "one folder of images per class, got 'faces'"),
        (["train", "--out", "x", "--model", "resnet9"], "model must be one of small_mobilenet, dscnn"),
        (["train", "--out", "x", "--resume", "--restart"], "--resume and --restart cannot be combined"),
        (["train", "--out", "x", "--weight-bits", "9"], "--weight-bits"),
        (["train", "--out", "x", "--bits", "8x8", "4x9"], "bits must be pairs of 2 to 8 bits such as 8x8 4x4, got"),
        (["train", "--out", "x", "--bits", "8x8", "extra"], "unexpected: extra"),
        (["train", "--out", "x", "--epochs-qat", "0"], "--epochs-qat"),
        (["train"], "--out"),
        (["train", "--out", "/proc/x", "--epochs-float", "1"], "/proc/x"),
        (
            ["train", "--out", "x", "--accelerator", "tpu"],
            "--accelerator must be cpu, cuda, or a specific device such as cuda",
        ),
        (["train", "--out", "x", "--accelerator", "cuda:97"], "--accelerator cuda:97 is not available: PyTorch"),
        (["train", "--out", "x", "--data", "faces", "--model", "nn"], "model must be one of small_mobilenet, dscnn"),
        (["train", "--out", "x", "--data", "faces", "--weights", "nowhere.pt"], "nowhere.pt does not exist"),
        (["verify", "nowhere"], "run `exactqat train` first"),
        (["export", "nowhere"], "run `exactqat train` first"),
        (["report", "nowhere"], "nowhere does not exist; run `exactqat train` first"),
        (["verify", "."], "no checkpoint.pt with a model.tflite beside it in a folder such as w8a8; run"),
        (["export", "."], "no checkpoint.pt in a folder such as w8a8; run `exactqat train` first"),
        (["report", "."], "contains no job.json; run `exactqat train` first"),
    ],
)
def test_errors_are_one_clear_message(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["exactqat", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capfd.readouterr().err
    assert end.value.code == 2
    assert message in " ".join(said.split())
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_help_is_fast_because_it_imports_no_framework() -> None:
    code = (
        "import sys; sys.argv = ['exactqat', '--help']; from exactqat.cli import main\n"
        "try:\n    main()\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'matplotlib', 'sklearn', 'jax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.rstrip().endswith("[]")
    assert "train" in done.stdout and "verify" in done.stdout


def test_a_missing_library_is_named_with_the_command_that_gets_it() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['exactqat', 'train', '--out', 'x']\n"
        "from exactqat.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "torch is not installed" in done.stderr and "pip install" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_export_writes_the_files_again(finished: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    for precision in PRECISIONS:
        files.write_atomically(
            tmp_path / precision / "checkpoint.pt", (finished[0] / precision / "checkpoint.pt").read_bytes()
        )
    written = restored.export_directory(tmp_path)
    for precision in PRECISIONS:
        name = f"{precision}/model.tflite"
        assert (tmp_path / name).read_bytes() == (finished[0] / name).read_bytes()
        assert tmp_path / name in written
    for accuracy in (None, "device_accuracy"):
        written = restored.export_directory(tmp_path, name="keywords", receipts=True)
        for precision in PRECISIONS:
            file = (tmp_path / precision / "model.tflite").read_bytes()
            receipt = json.loads((tmp_path / precision / "receipt.json").read_text())
            assert receipt["sha256"] == hashlib.sha256(file).hexdigest() and receipt["device"] == "xnnpack-x86"
            assert tmp_path / precision / f"keywords_{precision}_receipt.h" in written and receipt["examples"] == 4
            methods = json.loads((finished[0] / "metrics.json").read_text())["networks"][precision]
            assert receipt["accuracy"] == (accuracy and methods[methods["chosen"]][accuracy])
        files.write_atomically(tmp_path / "metrics.json", (finished[0] / "metrics.json").read_bytes())
    written = restored.export_directory(tmp_path, name="net", firmware="zephyr")
    for precision in PRECISIONS:
        own = f"net_{precision}" if len(PRECISIONS) > 1 else "net"
        assert {tmp_path / precision / own / part for part in ("Kconfig", f"include/{own}.h")} <= set(written)


@pytest.mark.parametrize(
    ("settings", "precisions"),
    [
        ({}, {"w8a8": (8, 8), "w4a4": (4, 4), "w3a4": (3, 4)}),
        ({"weight_bits": 5}, {"w5a8": (5, 8)}),
        ({"activation_bits": 3}, {"w8a3": (8, 3)}),
        ({"weight_bits": 2, "activation_bits": 6}, {"w2a6": (2, 6)}),
        ({"weight_bits": (4,)}, {"w4a8": (4, 8)}),
        ({"weight_bits": [3, 8, 4, 8]}, {"w8a8": (8, 8), "w4a8": (4, 8), "w3a8": (3, 8)}),
        (
            {"weight_bits": (8, 4), "activation_bits": (4, 8)},
            {"w8a8": (8, 8), "w8a4": (8, 4), "w4a8": (4, 8), "w4a4": (4, 4)},
        ),
        ({"bits": "4x4 8x8"}, {"w8a8": (8, 8), "w4a4": (4, 4)}),
        ({"bits": ["4x8"]}, {"w4a8": (4, 8)}),
    ],
)
def test_precisions(settings: dict[str, Any], precisions: dict[str, tuple[int, int]]) -> None:
    found = Settings(Path("x"), **settings)
    assert list(found.precisions.items()) == list(precisions.items())
    again = Settings(Path("x"), **json.loads(json.dumps(found.stored())))
    assert again == found and again.precisions == precisions


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight_bits": 1}, "weight_bits must be from 2 to 8, got 1"),
        ({"activation_bits": 9}, "activation_bits must be from 2 to 8, got 9"),
        ({"weight_bits": [8, 16]}, "weight_bits must be from 2 to 8, got 16"),
        ({"weight_bits": []}, "weight_bits must be a number of bits or several, such as 8,6,4, got none"),
        ({"weight_bits": [8, [4]]}, re.escape("weight_bits must be an integer, got [4]")),
        ({"activation_bits": [8, True]}, re.escape("activation_bits must be an integer, got True")),
        ({"batch_size": 1}, "batch_size must be at least 2, got 1"),
        ({"image_size": 0}, "image_size must be from 1 to 16384, got 0"),
        ({"epochs_float": 0}, "epochs_float must be at least 1 without weights, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"bits": "8x8 9x4"}, re.escape("bits must be pairs of 2 to 8 bits such as 8x8 4x4, got '8x8 9x4'")),
        ({"bits": "8x8", "weight_bits": 4}, "bits cannot be combined with weight_bits: both say the bits"),
    ],
)
def test_settings_outside_of_what_is_allowed(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(Path("x"), **settings)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("9", "must be from 2 to 8, got 9"),
        ("8,1", "must be from 2 to 8, got 1"),
        ("8,,4", "must be an integer, got ''"),
        ("w8", "must be an integer, got 'w8'"),
        ("", "must be an integer, got ''"),
    ],
)
def test_bits_outside_of_what_is_allowed_are_refused(
    given: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--weight-bits", "--activation-bits"):
        monkeypatch.setattr(sys, "argv", ["exactqat", "train", "--out", str(tmp_path / "job"), option, given])
        with pytest.raises(SystemExit) as end:
            cli.main()
        errors = capsys.readouterr().err
        assert end.value.code == 2 and message in errors and option in errors
        assert not (tmp_path / "job").exists()


def test_a_file_is_no_directory_for_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(sys, "argv", ["exactqat", "train", "--out", str(tmp_path / "file")])
    with pytest.raises(SystemExit) as end:
        cli.main()
    errors = capsys.readouterr().err
    assert end.value.code == 2 and f"{tmp_path / 'file'} is a file; a job needs its own directory" in errors
    assert "Errno" not in errors and (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", ""], "Invalid value for '--out': must not be empty"),
        (["--out", "link"], "link is a link to nothing, which does not exist"),
        (["--out", "job", "--weights", ""], "Invalid value for '--weights': must not be empty"),
        (["--out", "job", "--data", ""], "one folder of images per class, got ''"),
    ],
)
def test_a_variable_that_is_not_set_is_not_the_working_directory(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "link").symlink_to("nothing")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(sys, "argv", ["exactqat", "train", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2 and message in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["link"]


@pytest.mark.slow
@pytest.mark.usefixtures("fewer_networks")
def test_one_job_for_several_widths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "job"
    generator = np.random.default_rng(0)
    x, y = generator.uniform(0, 1, (60, 8, 8)).astype(np.float32), np.arange(60) % 3
    np.savez(tmp_path / "data.npz", x=x, y=y)
    options = [
        "--data",
        str(tmp_path / "data.npz"),
        "--epochs-float",
        "1",
        "--epochs-qat",
        "1",
        "--weight-bits",
        "3, 8",
        "--keep-going",
    ]
    command = ["exactqat", "train", "--out", str(out), *options]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setenv("COLUMNS", "140")
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    said = capsys.readouterr().out
    metrics = json.loads((out / "metrics.json").read_text())
    networks = {name: methods[methods["chosen"]] for name, methods in metrics["networks"].items()}
    assert list(networks) == ["w8a8", "w3a8"]
    packed = [network["packed_parameter_bytes"] for network in networks.values()]
    packed = [metrics["float"]["parameter_bytes"], *packed]
    assert packed == sorted(packed, reverse=True) and len(set(packed)) == 3
    for name, network in networks.items():
        assert network["test_accuracy"] == network["device_accuracy"]
        content = (out / name / "model.tflite").read_bytes()
        assert network["file_bytes"] == len(content) == network["footprint"]["flash_bytes"]
        assert abs(network["compressed_file_bytes"] - len(zlib.compress(content, 9))) < 64  # its description differs
        # Every weight is a code of as many bits, in int8.
        assert max(map(abs, codes_of_weights(out / name))) == 2 ** (int(name[1]) - 1) - 1
    compressed = [network["compressed_file_bytes"] for network in networks.values()]
    assert compressed == sorted(compressed, reverse=True)
    assert metrics["values_differing"] == 0
    table = said[said.index("The delivered networks: accuracy") :]
    assert "W3A8" in table and f"{packed[-1]:,}" in table
    page = (out / "report.html").read_text()
    assert (
        page.count("Accuracy of the delivered networks on the device, against the compressed file") == 2
    )  # said and written
    assert "--weight-bits 8,3" in page and "W3A8</text>" in page
    # What is not given is as it was, and other bits are refused by name.
    finished_networks = {path: path.read_bytes() for path in out.rglob("*.tflite")}
    monkeypatch.setattr(sys, "argv", ["exactqat", "train", "--out", str(out), "--resume", "--weight-bits", "8,4"])
    with pytest.raises(SystemExit):
        cli.main()
    errors = " ".join(capsys.readouterr().err.split())
    assert "contains a job with --weight-bits 8,3, it cannot be continued with --weight-bits 8,4" in errors
    assert finished_networks == {path: path.read_bytes() for path in out.rglob("*.tflite")}


def codes_of_weights(folder: Path) -> set[int]:
    """All codes of weights in the network of a folder."""
    graph, _ = restored.restore_graph(folder / "checkpoint.pt")
    return {
        int(code)
        for tensor in graph.tensors.values()
        if tensor.data is not None and tensor.dtype == "int8"
        for code in np.unique(tensor.data)
    }


def test_the_split_is_fixed_disjoint_and_complete() -> None:
    first, second = data.load("digits"), data.load("digits")
    assert torch.equal(first.test.images[:], second.test.images[:])
    parts = [replace(part, images=part.images[:]) for part in (first.train, first.validation, first.test)]
    assert sum(map(len, parts)) == 1797
    for part in parts:
        assert part.images.dtype == torch.float32 and part.images.shape[1:] == (1, 8, 8)
        assert part.images.min() >= 0 and part.images.max() <= 1
        shares = torch.bincount(part.labels, minlength=10) / len(part)
        assert shares.min() > 0.08 and shares.max() < 0.12
    pixels = np.concatenate([part.images.numpy().reshape(-1, 64) for part in parts]) * 16
    labels = np.concatenate([part.labels.numpy() for part in parts])
    found = np.column_stack([pixels, labels])
    bunch = load_digits()
    expected = np.column_stack([bunch.data, bunch.target])
    assert np.array_equal(found[np.lexsort(found.T)], expected[np.lexsort(expected.T)])


def test_shifts_reach_an_eighth_of_the_image() -> None:
    images = torch.rand(400, 1, 16, 24)
    moved = augmentation.shifted(images, torch.Generator().manual_seed(0))
    rows, columns = (moved != 0).any(3).sum(2), (moved != 0).any(2).sum(2)
    assert rows.min() == 14 and columns.min() == 21


def test_shifts_move_whole_images_by_at_most_one_pixel() -> None:
    images = torch.rand(50, 2, 8, 8)
    moved = augmentation.shifted(images, torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(images, (1, 1, 1, 1))
    seen = set()
    for before, after in zip(padded, moved, strict=True):
        fits = [
            (row, column)
            for row in range(3)
            for column in range(3)
            if torch.equal(before[:, row : row + 8, column : column + 8], after)
        ]
        assert len(fits) == 1
        seen.update(fits)
    assert len(seen) == 9


def test_atomic_writing_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.write_atomically(path, b"first")

    def fail(handle: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="file cannot be written: disk full; the previous file is intact"):
        files.write_atomically(path, b"second")
    assert path.read_bytes() == b"first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_the_report_names_differences_as_what_they_are() -> None:
    class Results:
        settings = Settings(Path("x"), device="micro")
        outcomes = [object()] * 2
        dataset = data.load("digits")
        simulation, training = Compared(1000, 7), Compared(2000, 9)
        ran_as = "xnnpack-x86"
        predictions = Compared(10, 0)

    (ran, runs), (computes, trained), (there, device) = findings.closing_sentences(Results())  # type: ignore[arg-type]
    assert not ran and "(LiteRT with XNNPACK on x86): 7 of them differ" in runs
    assert not computes and "what TFLite-Micro computes: 9 of them differ" in trained
    assert not there and device.startswith("Trained for micro. The files were not run there")


@pytest.mark.parametrize(
    ("validated", "wrong", "size", "taken"),
    [
        ({"w8a8": 0.980, "w4a4": 0.975}, {}, {"w8a8": 900, "w4a4": 500}, "w4a4"),
        ({"w8a8": 0.980, "w4a4": 0.975}, {}, {"w8a8": 900, "w4a4": 950}, "w8a8"),  # fewer bits, more bytes
        ({"w8a8": 0.980, "w4a4": 0.975}, {"w4a4": 9}, {"w8a8": 900, "w4a4": 500}, "w8a8"),  # p 0.004
        ({"w8a8": 0.980, "w4a4": 0.975}, {"w4a4": 4}, {"w8a8": 900, "w4a4": 500}, "w4a4"),  # may be chance
        ({"w8a8": 0.980, "w4a4": 0.960}, {}, {"w8a8": 900, "w4a4": 500}, "w8a8"),  # a point and more below
        ({"w4a4": 0.500}, {}, {"w4a4": 500}, "w4a4"),
    ],
)
@pytest.mark.parametrize("untrained_wrong", [2, 60])
def test_the_smallest_network_that_is_good_enough_is_recommended(
    validated: dict[str, float], wrong: dict[str, int], size: dict[str, int], taken: str, untrained_wrong: int
) -> None:
    trained, untrained = METHODS[-1], METHODS[0]
    labels = np.arange(100)

    def outcome(precision: str, method: Any, accuracy: float, mistakes: int) -> SimpleNamespace:
        answers = np.where(labels < mistakes, -1, labels)
        return SimpleNamespace(
            precision=precision, method=method, validation_accuracy=accuracy, device_accuracy=1 - mistakes / 100,
            device_predictions=answers, file_bytes=size[precision], footprint=None,
        )  # fmt: skip

    good = {name: outcome(name, trained, accuracy, wrong.get(name, 0)) for name, accuracy in validated.items()}
    results = SimpleNamespace(
        settings=SimpleNamespace(precisions={name: (int(name[1]), int(name[3])) for name in validated}, device="micro"),
        dataset=SimpleNamespace(test=SimpleNamespace(labels=torch.from_numpy(labels))),
        float_test_accuracy=0.98,
        chosen=lambda precision: good[precision],
        delivered=list(good.values()),
        of=lambda precision: [outcome(precision, untrained, 0.3, untrained_wrong), good[precision]],
    )
    sentence = findings.recommendation(results)  # type: ignore[arg-type]
    assert sentence.startswith(f"Take {taken}/model.tflite (QAT, learned ranges), ")
    assert "PTQ, min/max ranges " in sentence and "trained for micro (TFLite-Micro" in sentence
    assert (f"{taken[1]}-bit PTQ is enough here" in sentence) == (untrained_wrong == 2)
    results.float_test_accuracy = 0.01
    assert findings.recommendation(results) == ""  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("costs", "taken"),
    [
        ({"w8a8": (900, 50, 7), "w4a8": (900, 40, 9)}, "w4a8"),
        ({"w8a8": (900, 50, 7), "w4a8": (900, 50, 9)}, "w8a8"),
        ({"w8a8": (900, 50, 7), "w4a8": (900, 50, 7)}, "w8a8"),  # the best on the validation images, whatever its bits
        ({"w8a8": (900, 50, 7), "w4a8": (800, 60, 9)}, "w4a8"),
    ],
)
def test_the_fewest_bytes_then_arena_then_work_are_recommended_trained_or_not(
    costs: dict[str, tuple[int, int, int]], taken: str
) -> None:
    labels = np.arange(100)
    delivered = [
        SimpleNamespace(
            precision=name, method=METHODS[0], validation_accuracy=accuracy, device_accuracy=1.0,
            device_predictions=labels, file_bytes=flash,
            footprint=SimpleNamespace(arena_bytes=arena, multiply_accumulates=work),
        )
        for accuracy, (name, (flash, arena, work)) in zip((0.98, 0.975), costs.items(), strict=True)
    ]  # fmt: skip
    results: Any = SimpleNamespace(
        settings=SimpleNamespace(precisions={name: (int(name[1]), int(name[3])) for name in costs}, device="micro"),
        dataset=SimpleNamespace(test=SimpleNamespace(labels=torch.from_numpy(labels))),
        float_test_accuracy=0.98,
        delivered=delivered,
        of=lambda precision: delivered,
    )
    sentence = findings.recommendation(results)
    assert sentence.startswith(f"Take {taken}/model.tflite (PTQ, min/max ranges), the smallest")
    assert f"{taken[1]}-bit PTQ is enough here: training gains nothing" in sentence


def test_mistakes_among_many_classes_are_a_table() -> None:
    names = tuple(f"class {number}" for number in range(report.MATRIX_CLASSES + 1))
    labels = torch.arange(len(names))
    answers = labels.numpy().copy()
    answers[3] = 5
    dataset = SimpleNamespace(class_names=names, test=SimpleNamespace(labels=labels))
    outcome = SimpleNamespace(device_predictions=answers)
    found = report.confusions(SimpleNamespace(dataset=dataset), [outcome, outcome])  # type: ignore[arg-type, list-item]
    assert found["table"].rows == [(False, [Cell("class 3"), Cell("class 5"), Cell("2")])] and not found["networks"]


def test_images_that_were_left_out_are_named_in_the_report() -> None:
    def shown(sentences: list[str]) -> str:
        return render("skipped.html", dataset=SimpleNamespace(skipped=sentences), noun="image").strip()

    assert shown([]) == ""
    page = shown([f"image <{number}>" for number in range(30)])
    assert "30" in page and "image &lt;19&gt;" in page and "image &lt;20&gt;" not in page and "metrics.json" in page
