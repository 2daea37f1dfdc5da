# SPDX-License-Identifier: Apache-2.0
"""The main job, in small: files, figures, determinism, failures, and the command line."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("ai_edge_litert")
pytest.importorskip("matplotlib")

from exactqat.job import data, pipeline, report, training  # noqa: E402

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
    for precision in ("w8a8", "w4a4"):
        assert sorted(path.name for path in (out / precision).iterdir()) == ["checkpoint.pt", "model.tflite"]
        assert (out / precision / "model.tflite").read_bytes()[4:8] == b"TFL3"
    page = (out / "report.html").read_text()
    assert len(re.findall(r"src='data:image/png;base64,iVBOR", page)) == 5
    assert "http" not in page
    assert not list(out.rglob("*.tmp"))
    assert "every single one is equal" in page
    output = " ".join(done.stdout.split())
    assert "integers (every layer's output of 8 networks on all 360 test images)" in output
    assert "QAT, learned" in output and "PTQ, min/max" in output and "PTQ, least-error" in output


def test_metrics_hold_the_whole_result(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    metrics = json.loads((finished[0] / "metrics.json").read_text())
    assert metrics["settings"] == {"seed": 3, "epochs_float": 1, "epochs_qat": 1}
    assert metrics["data"]["train"] + metrics["data"]["validation"] + metrics["data"]["test"] == 1797
    assert metrics["values_differing"] == 0
    compared = 0
    for precision in ("w8a8", "w4a4"):
        networks = metrics["networks"][precision]
        assert networks["chosen"] in ("qat_ema", "qat_learned")
        for method in ("ptq_min_max", "ptq_least_error", "qat_ema", "qat_learned"):
            network = networks[method]
            assert 0 <= network["device_accuracy"] <= 1
            assert network["values_differing"] == 0
            assert all(layer["differing"] == 0 for layer in network["layers"])
            assert network["values_compared"] == sum(layer["values"] for layer in network["layers"])
            assert network["fake_quant_differing"] <= network["fake_quant_values"] * 0.005
            compared += network["values_compared"]
        kinds = {layer["operator"] for layer in networks[networks["chosen"]]["layers"]}
        assert {"CONV_2D", "DEPTHWISE_CONV_2D", "ADD", "MEAN", "FULLY_CONNECTED"} <= kinds
    assert metrics["values_compared"] == compared > 1_000_000


def test_the_same_seed_gives_the_same_bits(
    finished: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    pipeline.run(pipeline.Settings(tmp_path, seed=3, epochs_float=1, epochs_qat=1))
    for precision in ("w8a8", "w4a4"):
        for name in ("checkpoint.pt", "model.tflite"):
            first, second = finished[0] / precision / name, tmp_path / precision / name
            assert first.read_bytes() == second.read_bytes(), f"{precision}/{name}"


def test_verify_accepts_the_result_and_notices_a_changed_file(
    finished: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    reports = pipeline.verify_directory(finished[0])
    assert sorted(reports) == ["w4a4", "w8a8"]
    assert all(report.differing == 0 and report.values > 100_000 for report in reports.values())
    (tmp_path / "w8a8").mkdir()
    for name in ("checkpoint.pt", "model.tflite"):
        (tmp_path / "w8a8" / name).write_bytes((finished[0] / "w8a8" / name).read_bytes())
    model, dataset, _ = pipeline.restore(tmp_path / "w8a8" / "checkpoint.pt")
    graph = pipeline.lower(model, dataset.test.images[:2])
    weight = graph.tensors["classifier/filter"].data
    assert weight is not None
    weight[0, 0] = weight[0, 0] - 9 if weight[0, 0] > 0 else weight[0, 0] + 9
    pipeline.write_tflite(graph, tmp_path / "w8a8" / "model.tflite")
    done = subprocess.run([*RUN, "verify", str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "differ" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--out", "x", "--data", "faces"], "data must be one of digits, got 'faces'"),
        (["train", "--out", "x", "--epochs-qat", "0"], "--epochs-qat"),
        (["train"], "--out"),
        (["verify", "nowhere"], "run `exactqat train` first"),
    ],
)
def test_errors_are_one_clear_message(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = subprocess.run([*RUN, *arguments], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
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


def test_a_diverging_loss_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    dataset = data.load("digits")
    model = pipeline.new_model(dataset)
    path = tmp_path / "checkpoint.pt"
    steps = training.steps_per_epoch(dataset.train)
    count = 0

    def poison() -> None:
        nonlocal count
        count += 1
        if count == steps + 2:
            with torch.no_grad():
                next(model.parameters()).fill_(math.nan)

    with pytest.raises(
        training.TrainingDiverged, match=r"loss became nan in epoch 2 of 3; the best state so far is kept in"
    ):
        training.train(
            model,
            [{"params": list(model.parameters()), "lr": 1e-3}],
            dataset.train,
            dataset.validation,
            3,
            0,
            "test",
            poison,
            path,
            lambda: {"state": model.state_dict()},
        )
    state = torch.load(path, weights_only=True)["state"]
    assert all(torch.isfinite(entry).all() for entry in state.values())


def test_the_split_is_fixed_disjoint_and_complete() -> None:
    first, second = data.load("digits"), data.load("digits")
    assert torch.equal(first.test.images, second.test.images)
    parts = [first.train, first.validation, first.test]
    assert sum(map(len, parts)) == 1797
    for part in parts:
        assert part.images.dtype == torch.float32 and part.images.shape[1:] == (1, 8, 8)
        assert part.images.min() >= 0 and part.images.max() <= 1
        shares = torch.bincount(part.labels, minlength=10) / len(part)
        assert shares.min() > 0.08 and shares.max() < 0.12


def test_shifts_move_whole_images_by_at_most_one_pixel() -> None:
    images = torch.rand(50, 2, 8, 8)
    moved = training.shifted(images, torch.Generator().manual_seed(0))
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
    training.write_atomically(path, b"first")

    def fail(handle: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(training.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        training.write_atomically(path, b"second")
    assert path.read_bytes() == b"first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_the_report_names_differences_as_what_they_are() -> None:
    class Results:
        outcomes = [object()] * 2
        dataset = data.load("digits")
        values_compared, values_differing = 1000, 7

    assert "7 of them differ" in report.closing_sentence(Results())  # type: ignore[arg-type]
