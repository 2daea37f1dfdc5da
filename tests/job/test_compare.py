# SPDX-License-Identifier: Apache-2.0
"""`exactqat compare`: finished jobs side by side, from files that anyone may have written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from exactqat import cli  # noqa: E402

Call = Callable[..., tuple[int, str, str]]


IMAGES = 359


def answers(accuracy: float) -> list[int]:
    """To images of one class: as many are right as the accuracy says, the last ones."""
    wrong = round((1 - accuracy) * IMAGES)
    return [1] * wrong + [0] * (IMAGES - wrong)


def network(accuracy: float, chosen: str = "qat_ema") -> dict[str, Any]:
    return {
        "chosen": chosen,
        chosen: {
            "title": "QAT, EMA ranges", "device_accuracy": accuracy, "file_bytes": 23064, "values_differing": 0,
            "training_differing": 0, "answers": answers(accuracy),
            "footprint": {"arena_bytes": 9664, "multiply_accumulates": 110832},
        },
    }  # fmt: skip


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two finished jobs, as far as they are compared."""
    monkeypatch.chdir(tmp_path)
    for name, seed, accuracy in (("one", 0, 0.9), ("two", 1, 0.935)):
        (tmp_path / name).mkdir()
        settings = {"seed": seed, "data": "digits", "epochs_qat": 80, "weight_bits": None, "device": "micro"}
        (tmp_path / name / "job.json").write_text(json.dumps({"format": 1, "settings": settings, "images": "abc"}))
        metrics = {
            "data": {"test": IMAGES}, "seconds": 1.5, "float": {"test_accuracy": 0.95, "answers": answers(0.95)},
            "labels": [0] * IMAGES,
            "networks": {"w8a8": network(0.95), "w4a4": network(accuracy)},
        }  # fmt: skip
        (tmp_path / name / "metrics.json").write_text(json.dumps(metrics))
    return tmp_path


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["exactqat", "compare", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        status: Any = 0
        try:
            cli.main()
        except SystemExit as error:
            status = error.code or 0
        captured = capfd.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return status, captured.out, captured.err

    yield run


def test_jobs_stand_side_by_side(jobs: Path, call: Call) -> None:
    status, output, _ = call("one", "two")
    assert status == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    assert ["--seed", "0", "1"] in rows and not any("--data" in row for row in rows)
    assert ["W4A4 accuracy", "90.0%", "93.5%"] in rows and ["W4A4 to the first", "–", "+3.6, p<0.001"] in rows
    assert ["W4A4 file bytes", "23,064", "23,064"] in rows and ["W4A4 not as trained", "0", "0"] in rows
    # Of a network that answers as the first job's does, nothing can be chance.
    assert ["W8A8 to the first", "–", "+0.0, p 1"] in rows
    assert max(map(len, output.splitlines()[1:12])) <= 80
    assert "McNemar's exact test" in output


def test_other_images_are_named(jobs: Path, call: Call) -> None:
    job = json.loads((jobs / "two" / "job.json").read_text())
    (jobs / "two" / "job.json").write_text(json.dumps(job | {"images": "def"}))
    output = call("one", "two")[1]
    assert "images" in output and "+3.6" not in output


def test_a_device_that_computes_something_else_is_named(jobs: Path, call: Call) -> None:
    path = jobs / "two" / "metrics.json"
    metrics = json.loads(path.read_text())
    metrics["networks"]["w4a4"]["qat_ema"]["training_differing"] = 7
    path.write_text(json.dumps(metrics))
    assert re.search(r"W4A4 not as trained +│ +0 +│ +7", call("one", "two")[1])


def test_three_and_more_jobs(jobs: Path, call: Call) -> None:
    shutil.copytree("two", "three")
    shutil.copytree("two", "four")
    status, output, _ = call("one", "two", "three", "four")
    assert status == 0 and output.count("+3.6, p<0.001") == 3
    assert call("one", "two", "three", "--html", "page.html")[0] == 2


@pytest.mark.parametrize(
    "command", ["train", "report", "export", "verify", "compare", "gate", "tune", "check", "inspect", "identify"]
)
def test_help_names_no_type_of_python(command: str) -> None:
    arguments = [sys.executable, "-m", "exactqat.cli", command, "--help"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=60)
    assert "Usage: " in done.stdout and not re.search(r"list\[|Path\b|None|typing|Any|<\w+", done.stdout)


def test_names_are_escaped(jobs: Path, call: Call) -> None:
    name = "<b>$x$ [red] \x1b[31m"
    (jobs / "two").rename(jobs / name)
    job = json.loads((jobs / name / "job.json").read_text())
    job["settings"] |= {"data": "<script>x</script>\u202e", "[red]<i>": 1}
    (jobs / name / "job.json").write_text(json.dumps(job))
    status, output, _ = call("one", name)
    assert status == 0 and "<b>$x$ [red] \\x1b[31m" in output and "\x1b" not in output
    assert "\u202e" not in output


def test_what_is_no_finished_job_is_refused(jobs: Path, call: Call) -> None:
    (jobs / "empty").mkdir()
    for arguments, message in (
        (["one"], "Missing argument 'DIR'"),
        (["one", "nowhere"], "nowhere does not exist"),
        (["one", "empty"], "empty contains no job.json"),
        (["one", "one/job.json"], "one/job.json is a file, not a job's directory"),
    ):
        status, output, errors = call(*arguments)
        assert status == 2 and message in errors and not output
    (jobs / "two" / "metrics.json").rename(jobs / "two" / "moved.json")
    assert "two contains an unfinished job, which has no figures to compare" in call("one", "two")[2]


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["0", "00", "", "1", "7", "40", "-3", "abc", "²", "99999999999999999999"])
def test_any_number_of_columns_shows_all(jobs: Path, columns: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"COLUMNS": columns}
    command = [sys.executable, "-m", "exactqat.cli", "compare", "one", "two"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    shown = re.sub(r"[│\s]", "", done.stdout)
    assert "McNemar" in shown and not done.stderr and (columns in ("1", "7", "40") or "93.5%" in done.stdout)
    lines = done.stdout.splitlines()
    assert columns != "40" or max(map(len, lines)) <= 40 or "McNemar" in max(lines, key=len)


WILD = [None, True, -1, 2.5, float("nan"), float("inf"), 10**30, "x", [], {}, [[1]], {"a": 1}]


@pytest.mark.slow
def test_damaged_figures_are_named(jobs: Path, call: Call) -> None:
    """Every value of both files exchanged for what nobody expects."""
    for file in ("job.json", "metrics.json"):
        path = jobs / "two" / file
        content = json.loads(path.read_text())

        def places(value: Any, way: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
            for name in value if isinstance(value, dict) else ():
                yield (*way, name)
                yield from places(value[name], (*way, name))

        for way in list(places(content)):
            for wild in WILD:
                changed = json.loads(json.dumps(content))
                holder = changed
                for name in way[:-1]:
                    holder = holder[name]
                holder[way[-1]] = wild
                path.write_text(json.dumps(changed))
                status, _, errors = call("one", "two")
                known = way[0] == "settings" and len(way) > 1
                assert status in (0, 2) and (status == 0 or f"two/{file}" in errors or "unfinished" in errors), way
                assert status == 0 or not known, (way, wild)
        for whole in (b"", b"[]", b"{}", b"[" * 100_000, b"\xff"):
            path.write_bytes(whole)
            status, _, errors = call("one", "two")
            assert status == 2 and f"two/{file}" in errors
        path.write_text(json.dumps(content))
