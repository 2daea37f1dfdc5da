# SPDX-License-Identifier: Apache-2.0
"""Finished jobs side by side, from their job.json and metrics.json: no data is read, no network is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...kit.display import shortened
from ..job import files
from ..job.settings import option_of, option_value
from ..job.store import read_job
from .luck import paired
from .page import Table


def table(directories: Sequence[Path]) -> Table:
    """A column for each job; a row for each setting that differs, then for each figure of the delivered networks."""
    jobs: list[dict[str, str]] = []
    answers: list[dict[str, np.ndarray]] = []
    for directory in directories:
        settings, images, _ = read_job(directory)
        path = directory / "metrics.json"
        if not path.exists():
            raise ValueError(f"{directory} contains an unfinished job, which has no figures to compare")
        values = {option_of(name): "–" if value is None else option_value(value) for name, value in settings.items()}
        figures, right = {"images": images[:12]}, dict[str, np.ndarray]()
        metrics = files.read_json(path)
        try:
            figures["FLOAT32 accuracy"] = f"{metrics['float']['test_accuracy']:.1%}"
            for precision, methods in metrics["networks"].items():
                name, network = precision.upper(), methods[methods["chosen"]]
                figures[f"{name} accuracy"] = f"{network['device_accuracy']:.1%}"
                right[name] = np.array(network["answers"]) == np.array(metrics["labels"])
                same = jobs and jobs[0]["images"] == figures["images"] and name in answers[0]
                figures[f"{name} to the first"] = paired(right[name], answers[0][name]).in_short() if same else "–"
                figures[f"{name} file bytes"] = f"{network['file_bytes']:,}"
                figures[f"{name} not as simulated"] = f"{network['values_differing']:,}"
                figures[f"{name} not as trained"] = f"{network['training_differing']:,}"
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"{path} is not that of a finished job: {type(error).__name__}: {error}") from error
        jobs.append(values | figures)
        answers.append(right)
    compared = Table("Settings that differ, and the delivered networks on the device", ["", *map(str, directories)], 1)
    for name in dict.fromkeys(name for job in jobs for name in job):
        row = [shortened(job.get(name, "–"), 120) for job in jobs]
        if len(set(row)) > 1 or " " in name:
            compared.add(shortened(name, 40), *row)
    return compared
