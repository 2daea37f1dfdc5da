# SPDX-License-Identifier: Apache-2.0
"""The job's directory: its job.json, what may be continued or moved aside, which networks are delivered there, and what
is written after every epoch for other programs to read."""

from __future__ import annotations

import csv
import io
import json
import re
import time
from dataclasses import asdict
from pathlib import Path

from ...kit.display import shell_word
from . import files
from .checkpoints import NUMBER, OBJECT, TEXT, TEXTS, WHOLE, check_fields
from .files import Record
from .models import named_in
from .results import Dataset, History
from .settings import PRECISION, Settings, option_of, option_value
from .weights import Fit

JOB_FORMAT = 1
CURVES = ("learning_rate", "loss", "validation_loss", "validation_accuracy")


def check_free(out: Path, resume: bool, restart: bool = False) -> None:
    """Refuses a directory with files that a new job would overwrite."""
    taken = files.entries(out)
    if taken and "job.json" not in taken:
        raise ValueError(
            f"{out} contains {', '.join(taken)} but no job.json, so another program wrote that and a job would "
            "overwrite it. Use another directory"
        )
    if taken and not resume and not restart:
        finished = "metrics.json" in taken
        raise ValueError(
            f"{out} contains {'a finished' if finished else 'an unfinished'} job: "
            + ("use another directory" if finished else "continue it with --resume")
            + ", or move it aside and start over with --restart"
        )


def start(settings: Settings, dataset: Dataset, resume: bool = False, fit: Fit | None = None) -> bool:
    """Prepares `settings.out`: records the settings in job.json, or compares them with those of the job to continue.

    Args:
        resume: continue the job in the directory, if there is one.
        fit: what the network took from `settings.weights`, if they were read.

    Returns:
        Whether there is something to continue.
    """
    out, job = settings.out, settings.out / "job.json"
    check_free(out, resume)
    fingerprint = dataset.fingerprint()
    if not job.exists():
        content = {"format": JOB_FORMAT, "settings": settings.stored(), "images": fingerprint}
        content |= {} if fit is None else {"weights": asdict(fit)}
        files.write_atomically(job, (json.dumps(content, indent=2) + "\n").encode())
        return False
    before, before_fingerprint, before_fit = read_job(out)
    stored = Settings(out, **before).stored()
    for name, value in settings.stored().items():
        if stored[name] != value:
            option = option_of(name)
            raise ValueError(
                f"{out} contains a job with {option} {option_value(stored[name])}, it cannot be continued with "
                f"{option} {option_value(value)}"
            )
    if before_fingerprint != fingerprint:
        raise ValueError(f"the {settings.noun}s in {settings.data} differ from those the job in {out} started with")
    if fit is not None and before_fit is not None and fit.digest != before_fit.digest:
        raise ValueError(f"--weights {settings.weights} is not the file the job in {out} started from")
    for half in out.rglob(f"{files.HALF}*"):
        half.unlink()
    return True


def read_job(out: Path) -> tuple[Record, str, Fit | None]:
    """The settings, the fingerprint of the images, and which of the weights fitted."""
    check_there(out)
    path = out / "job.json"
    if not path.exists():
        raise FileNotFoundError(f"{out} contains no job.json; run `exactqat train` first")
    content = check_fields(files.read_json(path), path, {"settings": OBJECT, "images": TEXT})
    if content.get("format") != JOB_FORMAT:
        raise ValueError(f"{path} has format {content.get('format')!r}; this version reads {JOB_FORMAT}")
    fit = None
    if "weights" in content:
        held = check_fields(content["weights"], f"{path}: weights", {"digest": TEXT, "sentences": TEXTS})
        fit = Fit(held["digest"], held["sentences"])
    return content["settings"], content["images"], fit


def stored_settings(out: Path, model: str | None = None) -> Settings:
    """The settings of the job in a directory.

    Args:
        model: the network as the user names it; needed if it is not one of exactqat's own, see `models.named_in`.
    """
    stored, *_ = read_job(out)
    try:
        settings = Settings(out, **stored)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{out / 'job.json'} cannot be read: {error}") from error
    named_in(out / "job.json", settings.model, model)
    return settings


def check_there(out: Path) -> None:
    """Refuses anything but a directory, before looking for a job in it."""
    if not out.exists():
        raise FileNotFoundError(f"{out} does not exist; run `exactqat train` first")
    if not out.is_dir():
        raise NotADirectoryError(f"{out} is a file, not a job's directory")


def delivered(out: Path, *names: str) -> list[Path]:
    """The folders below `out` that hold all of these files, finest precision first."""
    check_there(out)
    folders = [
        out / name
        for name in files.entries(out)
        if re.fullmatch(PRECISION, name) and all((out / name / file).exists() for file in names)
    ]
    if not folders:
        beside = " beside it" if len(names) > 1 else ""
        missing = f"no {' with a '.join(names)}{beside} in a folder such as {out / 'w8a8'}"
        sentence = unfinished(out)
        raise FileNotFoundError(
            f"{sentence}. It has not delivered a network yet" if sentence else f"{missing}; run `exactqat train` first"
        )
    return sorted(folders, reverse=True)


def unfinished(out: Path) -> str:
    """A sentence on a job that is not finished, or on what it has not delivered yet; empty: it is finished, or there is
    no job.json to say so."""
    if not (out / "job.json").exists() or (out / "metrics.json").exists():
        return ""
    return f"{out} contains an unfinished job: continue it with `exactqat train --resume --out {shell_word(out)}`"


class Logs:
    """A table of epochs for each training run, and how long the job has taken.

    Attributes:
        records: whether anything is written; not for a finished job that is evaluated again.
        runs: how often the job was started.
        processes_before: how many trained it last; None: none yet.
    """

    def __init__(self, out: Path, processes: int = 1, records: bool = True) -> None:
        self.records, self._processes, self._started = records, processes, time.perf_counter()
        self._path = out / "training" / "elapsed.json"
        before: Record = {"seconds": 0.0, "runs": 0, "processes": None}
        if self._path.exists():
            kinds = {"seconds": NUMBER, "runs": WHOLE, "processes": WHOLE}
            before = dict(check_fields(files.read_json(self._path), self._path, kinds))
        self._before, self.processes_before = before["seconds"], before["processes"]
        self.runs = before["runs"] + records

    def epoch(self, name: str, history: History) -> None:
        """Records a training so far; name: of its file below training/."""
        if not self.records:
            return
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["epoch", *CURVES, "frozen"])
        for epoch, row in enumerate(zip(*(getattr(history, curve) for curve in CURVES), strict=True), 1):
            writer.writerow([epoch, *row, int(history.frozen_from is not None and epoch > history.frozen_from)])
        files.write_atomically(self._path.with_name(f"{name}.csv"), text.getvalue().encode())
        self.close()

    def close(self) -> float:
        """At the end of the job, and after every epoch; returns the seconds that it has taken, over all its runs."""
        if not self.records:
            return self._before
        seconds = round(self._before + time.perf_counter() - self._started, 2)
        content = {"seconds": seconds, "runs": self.runs, "processes": self._processes}
        files.write_atomically(self._path, (json.dumps(content) + "\n").encode())
        return seconds
