# SPDX-License-Identifier: Apache-2.0
"""What a job writes after every epoch for other programs to read: a table for each training run, and how long the job
has taken."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path

from ..report.results import History
from . import files
from .fields import NUMBER, WHOLE, check_fields

HEADER = ("epoch", "learning_rate", "loss", "validation_loss", "validation_accuracy", "frozen")


def table(history: History) -> str:
    """A row for each epoch, as HEADER names its cells."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    curves = (history.learning_rate, history.loss, history.validation_loss, history.validation_accuracy)
    for epoch, row in enumerate(zip(*curves, strict=True), 1):
        writer.writerow([epoch, *row, int(history.frozen_from is not None and epoch > history.frozen_from)])
    return text.getvalue()


class Logs:
    """The logs of a job.

    Attributes:
        records: whether anything is written; not for a finished job that is evaluated again.
        runs: how often the job was started.
        processes_before: how many trained it last; None: none yet.
    """

    def __init__(self, out: Path, processes: int = 1, records: bool = True) -> None:
        """processes: that train.

        Raises:
            ValueError: a file is damaged.
        """
        self._out, self._processes, self._started = out, processes, time.perf_counter()
        self._path = out / "training" / "elapsed.json"
        self.records, self._before, self.runs, self.processes_before = records, 0.0, int(records), None
        if self._path.exists():
            kinds = {"seconds": NUMBER, "runs": WHOLE, "processes": WHOLE}
            before = check_fields(files.read_json(self._path), self._path, kinds)
            self._before, self.processes_before = float(before["seconds"]), before["processes"]
            self.runs += before["runs"]

    @property
    def total(self) -> float:
        """Seconds that the job has taken so far, over all its runs."""
        return self._before + (time.perf_counter() - self._started if self.records else 0.0)

    def epoch(self, name: str, history: History) -> None:
        """Records a training so far; name: of its file below training/."""
        if self.records:
            files.write_atomically(self._out / "training" / f"{name}.csv", table(history).encode())
            self.close()

    def close(self) -> None:
        """At the end of the job."""
        if not self.records:
            return
        content = {"seconds": round(self.total, 2), "runs": self.runs, "processes": self._processes}
        files.write_atomically(self._path, (json.dumps(content) + "\n").encode())
