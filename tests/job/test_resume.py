# SPDX-License-Identifier: Apache-2.0
"""A job survives: killed at any moment and resumed it ends with the same bits; what goes wrong is said.

    python tests/job/test_resume.py --moments 20

kills a small job at that many random moments, resumes each and compares every file with those of an uninterrupted job.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ai_edge_litert")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from exactqat import cli, qat  # noqa: E402
from exactqat.application.job import checkpoints, data, files, models, pipeline, restored, store, training  # noqa: E402
from exactqat.application.job import settings as settings_of_jobs  # noqa: E402
from exactqat.application.job.results import Progress  # noqa: E402
from exactqat.application.job.settings import (  # noqa: E402
    METHODS,
    Settings,
    option_value,  # noqa: E402
)

# One network is quantized without training and one with it.
FEWER = tuple(each for each in METHODS if each.name in ("ptq_min_max", "qat_ema"))
GIVEN = {"epochs_float": 8, "epochs_qat": 8, "weight_bits": 4, "activation_bits": 4, "batch_size": 16}
BITS = ("--weight-bits", 4, "--activation-bits", 4, "--batch-size", 16)


def patterns(count: int = 90) -> tuple[np.ndarray, np.ndarray]:
    """Images of 8x8 with a bright row, column or diagonal in noise."""
    generator = np.random.default_rng(0)
    x, y = generator.uniform(0, 0.5, (count, 8, 8)).astype(np.float32), np.arange(count) % 3
    for image, label in zip(x, y, strict=True):
        where = generator.integers(8)
        line = (where, slice(None)) if label == 0 else (slice(None), where) if label == 1 else (range(8), range(8))
        image[line] += 0.5
    return x, y


def train_command(out: Path, *options: object) -> None:
    sys.argv = ["exactqat", "train", "--quiet", "--out", str(out), *map(str, options)]
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code


def written(out: Path) -> dict[str, bytes | dict[str, Any]]:
    """All files of a job that must not depend on how often it was stopped."""
    files: dict[str, bytes | dict[str, Any]] = {
        str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.suffix in (".pt", ".tflite")
    }
    metrics = json.loads((out / "metrics.json").read_text())
    files["metrics.json"] = {key: value for key, value in metrics.items() if key not in ("seconds", "resumed", "runs")}
    return files


def in_a_child(work: Callable[[], Any]) -> int:
    """Runs `work` in a forked process and gives its id; exit status 0 if nothing was raised."""
    child = os.fork()
    if child == 0:
        status = 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def interrupt(moments: int, seed: int) -> None:
    """Kills a job at random moments, `moments` times a new one, and asserts that each ends as if nothing had been."""
    import matplotlib.figure  # noqa: F401  so that children need not
    from ai_edge_litert import interpreter  # noqa: F401

    choose = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        x, y = patterns()
        np.savez(folder / "data.npz", x=x, y=y)
        given = ["--data", folder / "data.npz", "--epochs-float", 8, "--epochs-qat", 8, *BITS, "--keep-going"]

        def start(out: Path) -> int:
            return in_a_child(lambda: train_command(out, "--resume", *given))

        began = time.monotonic()
        assert os.waitpid(start(folder / "whole"), 0)[1] == 0
        duration = time.monotonic() - began
        expected = written(folder / "whole")
        for trial in range(moments):
            out = folder / f"trial{trial}"
            killed = []
            while True:
                child = start(out)
                # Some trials are killed again while they resume.
                if not killed or (len(killed) < 3 and choose.random() < 0.3):
                    moment = choose.uniform(0, duration)
                    time.sleep(moment)
                    os.kill(child, signal.SIGKILL)
                status = os.waitpid(child, 0)[1]
                if status == 0 and killed:
                    break
                if status == 0:  # it was faster than the moment: another moment
                    shutil.rmtree(out)
                    continue
                assert os.WIFSIGNALED(status), f"the job failed by itself, status {status}"
                killed.append(moment)
                states = sorted(path.name for path in out.glob("training/*.pt"))
                print(f"trial {trial}: killed after {moment:.2f} of {duration:.2f} s with {states}", flush=True)
            found = written(out)
            assert sorted(found) == sorted(expected)
            for name, content in expected.items():
                assert found[name] == content, f"trial {trial}, killed after {killed} seconds: {name} differs"
    print(f"{moments} jobs killed and resumed: all {len(expected)} files of each are equal to the uninterrupted job's")


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_the_bits_are_the_same() -> None:
    command = [sys.executable, __file__, "--moments", "1", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed after") >= 1


@pytest.fixture(scope="module")
def dataset() -> data.Dataset:
    x, y = patterns()
    return data.from_arrays({"": (x, y)}, "patterns")


def train(dataset: data.Dataset, path: Path, quantized: bool, on_step: Callable[[int], None], resume: bool) -> Any:
    """Three epochs of the job's network; the last one frozen if quantized."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = models.new_model("small_mobilenet", (1, 8, 8), 3)
    groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "lr": 1e-3}]
    if quantized:
        prepared = qat.prepare(model, dataset.train.images[:2], [qat.Rule(ranges="learned")])
        qat.calibrate(prepared, [dataset.train.images[:]])
        groups = [
            {"params": prepared.other_parameters(), "lr": 1e-3},
            {"params": prepared.range_parameters(), "lr": 1e-3},
        ]
        model = prepared
    training.train(
        model, groups, dataset.train, dataset.validation, 3, "test", path,
        training.Manner(Settings(path, batch_size=16)), 2 if quantized else None, resume=resume,
        progress=Progress(advance=on_step),
    )  # fmt: skip
    return model


def after(steps: int, act: Callable[[], None]) -> Callable[[int], None]:
    """Acts once, when that many steps are done."""
    done = 0

    def on_step(count: int) -> None:
        nonlocal done
        if done < steps <= done + count:
            act()
        done += count

    return on_step


@pytest.mark.slow
def test_a_full_disk_is_named_and_the_job_goes_on_from_the_last_epoch(dataset: data.Dataset, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    steps = training.steps_per_epoch(dataset.train, 16)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        full = after(steps + 1, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard)))
        with pytest.raises(OSError, match=r"state\.pt cannot be written: File too large; .* is intact.*--resume"):
            train(dataset, path, True, full, resume=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.pt"]
    assert checkpoints.load_checkpoint(path)["epoch"] == 1
    resumed = train(dataset, path, True, lambda steps: None, resume=True)
    whole = train(dataset, tmp_path / "whole.pt", True, lambda steps: None, resume=False)
    assert path.read_bytes() == (tmp_path / "whole.pt").read_bytes()
    for name, entry in whole.state_dict().items():
        other = resumed.state_dict()[name]
        assert torch.equal(entry, other) if isinstance(entry, torch.Tensor) else entry == other, name


@pytest.mark.slow
def test_a_full_disk_ends_the_command_with_one_message(tmp_path: Path) -> None:
    x, y = patterns()
    np.savez(tmp_path / "data.npz", x=x, y=y)
    done = subprocess.run(
        [sys.executable, "-m", "exactqat.cli", "train", "--out", "out", "--data", "data.npz", "--epochs-float", "1"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "training/float.pt cannot be written: File too large" in done.stderr.replace("\n", "")
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_loss_that_is_no_number_is_named_and_the_checkpoint_before_it_kept(
    dataset: data.Dataset, tmp_path: Path
) -> None:
    path = tmp_path / "state.pt"
    steps = training.steps_per_epoch(dataset.train, 16)
    # In the middle of an epoch the training loss tells, after its last step only the validation loss can.
    for moment, message in ((steps + 1, r"the loss became nan"), (2 * steps, r"validation loss became nan")):
        model: list[Any] = []

        def poison() -> None:
            with torch.no_grad():
                next(model[0].parameters()).fill_(np.nan)  # noqa: B023

        original = training.torch.optim.Adam

        class Adam(original):  # type: ignore[misc, valid-type]
            """Gives the test a hand on the parameters."""

            def __init__(self, groups: Any) -> None:
                super().__init__(groups)
                holder = torch.nn.Module()
                holder.weight = self.param_groups[0]["params"][0]
                model.append(holder)  # noqa: B023

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training.torch.optim, "Adam", Adam)
            with pytest.raises(
                training.TrainingFailed, match=f"epoch 2 of 3: .*{message}.*last good checkpoint is kept"
            ):
                train(dataset, path, False, after(moment, poison), resume=False)
        state = checkpoints.load_checkpoint(path)
        assert state["epoch"] == 1
        assert all(torch.isfinite(entry).all() for entry in state["model"].values())
        path.unlink()


@pytest.mark.slow
def test_a_range_that_collapses_is_named(dataset: data.Dataset, tmp_path: Path) -> None:
    epochs: list[int] = []
    original = training.collapsed

    def check(model: Any) -> str:
        epochs.append(len(epochs) + 1)
        if epochs[-1] == 2:
            with torch.no_grad():
                dict(model.layers())["block1.pointwise.0"].output_quantizer.range.maximum.fill_(0.0)
        return original(model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "collapsed", check)
        with pytest.raises(
            training.TrainingFailed,
            match=r"test, epoch 2 of 3: the range of what 'block1.pointwise.0' stores collapsed to \[0, 0\].* kept in",
        ):
            train(dataset, tmp_path / "state.pt", True, lambda steps: None, resume=False)
    assert checkpoints.load_checkpoint(tmp_path / "state.pt")["epoch"] == 1


@pytest.mark.slow
def test_weights_that_are_all_zero_count_as_a_collapsed_range(dataset: data.Dataset) -> None:
    model = models.new_model("small_mobilenet", (1, 8, 8), 3)
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.fill_(1.0)
    prepared = qat.prepare(model, dataset.train.images[:2], [qat.Rule()])
    qat.calibrate(prepared, [dataset.train.images[:]])
    assert training.collapsed(prepared).startswith("the range of the weights of 'classifier' collapsed")


def test_a_damaged_or_foreign_checkpoint_is_refused(dataset: data.Dataset, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    train(dataset, path, False, lambda steps: None, resume=False)
    content = path.read_bytes()
    with pytest.raises(ValueError, match=r"state\.pt belongs to the training 'test' of 3 epochs, not to 'other' of 3"):
        training._stored_state(path, "other", 3)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"state\.pt cannot be read as a checkpoint"):
        train(dataset, path, False, lambda steps: None, resume=True)
    torch.save({"weights": torch.ones(1)}, path)
    with pytest.raises(ValueError, match=r"state\.pt is not a checkpoint of format"):
        train(dataset, path, False, lambda steps: None, resume=True)


def test_resume_refuses_other_settings_and_names_them(dataset: data.Dataset, tmp_path: Path) -> None:
    settings = Settings(tmp_path, **GIVEN)
    assert store.start(settings, dataset, resume=True) is False
    assert store.start(settings, dataset, resume=True) is True
    assert store.stored_settings(tmp_path) == settings
    others = {
        "seed": 1, "epochs_float": 4, "epochs_qat": 4, "data": "else", "weight_bits": (5,), "activation_bits": (6,),
        "batch_size": 17, "image_size": 9,
    }  # fmt: skip
    for name, value in others.items():
        option = "--" + name.replace("_", "-")
        shown = option_value(getattr(settings, name))
        expected = f"a job with {option} {shown}, it cannot be continued with {option} {option_value(value)}"
        with pytest.raises(ValueError, match=re.escape(expected)):
            store.start(replace(settings, **{name: value}), dataset, resume=True)
    several = replace(settings, weight_bits=(8, 4))
    for given in (several, replace(settings, weight_bits=[4, 8, 4])):
        assert given == several
    expected = "a job with --weight-bits 4, it cannot be continued with --weight-bits 8,4"
    with pytest.raises(ValueError, match=re.escape(expected)):
        store.start(several, dataset, resume=True)
    images = data.Split(dataset.train.images[:].flip(0), dataset.train.labels)
    with pytest.raises(ValueError, match="the images in digits differ from those the job in"):
        store.start(settings, replace(dataset, train=images), resume=True)
    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(ValueError, match=r"job\.json has no field 'settings'"):
        store.start(settings, dataset, resume=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


JOB_FILES = ("metrics.json", "report.html", "w4a4/model.tflite", "w4a4/checkpoint.pt", "training/float.pt")


def test_a_job_is_not_replaced_by_accident_and_nothing_is_ever_deleted(dataset: data.Dataset, tmp_path: Path) -> None:
    out = tmp_path / "job"
    settings = Settings(out, **GIVEN)
    out.mkdir()
    store.start(settings, dataset)
    state, half, other = out / "training" / "float.pt", out / "training" / f"{files.HALF}ab12.tmp", out / "notes.tmp"
    checkpoints.save_checkpoint(state, {"format": checkpoints.CHECKPOINT_FORMAT})
    half.touch()
    other.touch()
    before = contents(out)
    with pytest.raises(ValueError, match="an unfinished job: continue it with --resume, or move it aside .* --restart"):
        store.start(settings, dataset)
    assert contents(out) == before
    assert files.move_aside(out) == tmp_path / "job.1"
    assert contents(tmp_path / "job.1") == before and not contents(out)
    assert store.start(settings, dataset) is False
    # Halves of files are worth nothing.
    half.parent.mkdir()
    half.touch()
    assert store.start(settings, dataset, resume=True) and not half.exists()
    # A finished job too stays what it is, and beside is room for as many as there are.
    for name in JOB_FILES:
        files.write_atomically(out / name, name.encode())
    before = contents(out)
    with pytest.raises(ValueError, match="contains a finished job: use another directory, or move it aside"):
        store.start(settings, dataset)
    assert files.move_aside(out) == tmp_path / "job.2" and contents(tmp_path / "job.2") == before
    assert store.start(settings, dataset) is False
    assert "contains an unfinished job" in store.unfinished(out)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*JOB_FILES, "w2a8/mine.txt", "training/photo.png", "float", "report.html/mine.txt"])
@pytest.mark.parametrize("options", [{}, {"resume": True}, {"restart": True}])
def test_what_others_wrote_is_not_touched(
    dataset: data.Dataset, tmp_path: Path, name: str, options: dict[str, bool]
) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"mine")
    (tmp_path / ".exactqat-ab12.tmp").write_bytes(b"mine too")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=f"contains {name.split('/')[0]} but no job.json"):
        pipeline.run(Settings(tmp_path, **GIVEN), dataset=dataset, **options)  # type: ignore[arg-type]
    assert contents(tmp_path) == before


def test_a_job_begins_beside_what_does_not_concern_it(dataset: data.Dataset, tmp_path: Path) -> None:
    (tmp_path / "wallpapers").mkdir()
    (tmp_path / "wallpapers" / "model.tflite").write_bytes(b"mine")
    (tmp_path / "notes.txt").write_bytes(b"mine")
    assert store.start(Settings(tmp_path, **GIVEN), dataset) is False
    assert sorted(contents(tmp_path)) == ["job.json", "notes.txt", "wallpapers/model.tflite"]


def test_what_cannot_be_moved_aside_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "job"
    for name in (*JOB_FILES, "job.json"):
        files.write_atomically(out / name, b"content")
    before = contents(out)

    def fail(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "rename", fail)
    with pytest.raises(OSError, match="cannot be moved aside to .*: No space left on device"):
        files.move_aside(out)
    assert contents(out) == before and [path.name for path in tmp_path.iterdir()] == ["job"]


@pytest.mark.slow
def test_a_directory_belongs_to_one_process_at_a_time(dataset: data.Dataset, tmp_path: Path) -> None:
    settings = Settings(tmp_path / "job", **GIVEN)
    read, write = os.pipe()

    def hold() -> None:
        with files.locked(tmp_path / "job"):
            os.write(write, b"held")
            time.sleep(600)

    (tmp_path / "job").mkdir()
    child = in_a_child(hold)
    try:
        assert os.read(read, 4) == b"held"
        for options in ({}, {"resume": True}, {"restart": True}):
            with pytest.raises(ValueError, match="another process is using .*job: wait until it has finished"):
                pipeline.run(settings, dataset=dataset, **options)  # type: ignore[arg-type]
        assert contents(tmp_path) == {}
        (tmp_path / "job" / "w4a4").mkdir()
        for name in ("checkpoint.pt", "model.tflite"):
            (tmp_path / "job" / "w4a4" / name).touch()
        for command in (restored.verify_directory, restored.export_directory):
            with pytest.raises(ValueError, match="another process is using .*job: wait until it has finished"):
                command(tmp_path / "job")
    finally:
        # However the process ends, its lock ends too.
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with files.locked(tmp_path / "job", writes=False), files.locked(tmp_path / "job", writes=False):
        pass
    with files.locked(tmp_path / "job"), pytest.raises(ValueError, match="another process"):
        files.locked(tmp_path / "job").__enter__()


@pytest.mark.slow
def test_two_commands_with_one_directory_do_not_mix(tmp_path: Path) -> None:
    x, y = patterns()
    np.savez(tmp_path / "data.npz", x=x, y=y)
    command = [
        sys.executable, "-m", "exactqat.cli", "train", "--out", "out", "--data", "data.npz", "--quiet",
        "--epochs-float", "60", "--epochs-qat", "1", "--weight-bits", "4", "--activation-bits", "4",
    ]  # fmt: skip
    both = [
        subprocess.Popen([*command, "--seed", seed], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for seed in ("1", "2")
    ]
    answers = [process.communicate(timeout=600) for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], answers
    refused = next(position for position, process in enumerate(both) if process.returncode == 2)
    assert (
        b"another process is using out" in answers[refused][1] or b"contains an unfinished job" in answers[refused][1]
    )
    winner = str(2 - refused)
    for name in ("job.json", "metrics.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["settings"]["seed"] == int(winner)


@pytest.mark.slow
def test_a_finished_job_is_shown_again_without_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(settings_of_jobs, "METHODS", FEWER)
    x, y = patterns()
    np.savez(tmp_path / "data.npz", x=x, y=y)
    out = tmp_path / "out"

    def call(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["exactqat", *map(str, arguments)])
        try:
            cli.main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    given = ["--epochs-float", 1, "--epochs-qat", 1, "-w", 4, "-a", 4, "--batch-size", 16]
    train = ["train", "--out", out, "--quiet"]
    assert call(*train, "--data", tmp_path / "data.npz", *given, "--keep-going") == 0
    files, page = written(out), (out / "report.html").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "batches", lambda *arguments: pytest.fail("it trained"))
        (out / "report.html").unlink()
        assert call("report", out) == 0
        assert (out / "report.html").read_bytes() == page
        # Settings that are not given are those of the job.
        assert call(*train, "--resume") == 0
        assert call(*train, "--resume", "--seed", 4) == 2
    assert "a job with --seed 0, it cannot be continued with --seed 4" in " ".join(capfd.readouterr().err.split())
    assert written(out) == files
    (out / "training" / "w4a4-qat_ema.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"w4a4-qat_ema\.pt is missing"):
        pipeline.run(store.stored_settings(out), resume=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=20, help="how many jobs are killed")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--quick", action="store_true", help="one network with training and one without")
    arguments = parser.parse_args()
    if arguments.quick:
        settings_of_jobs.METHODS = FEWER
    interrupt(arguments.moments, arguments.seed)
