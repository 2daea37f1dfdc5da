# SPDX-License-Identifier: Apache-2.0
"""What a job writes after every epoch for other programs to read: a table for each training run, TensorBoard files if
requested, and how long the job has taken."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path
from typing import Any

from ..report.results import History
from . import files
from .fields import NUMBER, WHOLE, check_fields, optional

HEADER = ("epoch", "learning_rate", "loss", "validation_loss", "validation_accuracy", "frozen")
ELAPSED = "elapsed.json"


def table(history: History) -> str:
    """A row for each epoch, as HEADER names its cells; empty where something was not recorded."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    for number, row in enumerate(rows(history), 1):
        writer.writerow([number, *("" if each is None else each for each in row), int(_frozen(history, number))])
    return text.getvalue()


def rows(history: History) -> list[tuple[float | None, ...]]:
    """Learning rate, loss, validation loss and accuracy of each epoch."""
    curves = (history.learning_rate, history.loss, history.validation_loss, history.validation_accuracy)
    return list(zip(*curves, strict=True))


def _frozen(history: History, epoch: int) -> bool:
    return history.frozen_from is not None and epoch > history.frozen_from


def check_tensorboard() -> None:
    """Refuses to continue without the package.

    Raises:
        ValueError: says how to get it.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"--tensorboard needs the package tensorboard: pip install 'exactqat[tensorboard]' ({error})"
        ) from error


class Logs:
    """The logs of a job.

    Attributes:
        runs: how often the job was started.
        processes_before: how many trained it last; None: not known.
    """

    def __init__(self, out: Path, tensorboard: bool = False, records: bool = True, processes: int = 1) -> None:
        """records: False for a finished job that is evaluated again; nothing is written then. processes: that train."""
        self._out, self._tensorboard, self._records = out, tensorboard, records
        self._started, self._writers = time.perf_counter(), dict[str, Any]()
        self._shown = dict[str, int]()
        self._before, runs, self.processes_before = _elapsed(out)
        self._processes, self.runs = processes, runs + records

    @property
    def total(self) -> float:
        """Seconds that the job has taken so far, over all its runs."""
        return self._before + (time.perf_counter() - self._started if self._records else 0.0)

    def epoch(self, name: str, history: History) -> None:
        """Records a training so far.

        Args:
            name: of its file below training/.
        """
        if not self._records:
            return
        files.write_atomically(self._out / "training" / f"{name}.csv", table(history).encode())
        self._time()
        if self._tensorboard:
            self._show(name, history)

    def close(self) -> None:
        """At the end of the job."""
        if self._records:
            self._time()
        for writer in self._writers.values():
            writer.close()

    def _time(self) -> None:
        content = {"seconds": round(self.total, 2), "runs": self.runs, "processes": self._processes}
        files.write_atomically(self._out / "training" / ELAPSED, (json.dumps(content) + "\n").encode())

    def _show(self, name: str, history: History) -> None:
        """In TensorBoard, a run for each training; epochs before an interruption are included, and shown once."""
        from torch.utils.tensorboard import SummaryWriter

        if name not in self._writers:
            self._writers[name] = SummaryWriter(str(self._out / "tensorboard" / name))
        writer, start = self._writers[name], self._shown.get(name, 0)
        for number, row in list(enumerate(rows(history), 1))[start:]:
            for what, value in zip(HEADER[1:5], row, strict=True):
                if value is not None:
                    writer.add_scalar(what, value, number)
        writer.flush()
        self._shown[name] = len(history.loss)


def _elapsed(out: Path) -> tuple[float, int, int | None]:
    """Seconds and number of the previous runs (0 for a new job), and the number of processes of the last one.

    Raises:
        ValueError: the file is damaged.
    """
    path = out / "training" / ELAPSED
    if not path.exists():
        return 0.0, 0, None
    kinds = {"seconds": NUMBER, "runs": WHOLE, "processes": optional(WHOLE)}
    elapsed = check_fields(files.read_json(path), path, kinds)
    return float(elapsed["seconds"]), elapsed["runs"], elapsed.get("processes")
