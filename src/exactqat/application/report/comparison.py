# SPDX-License-Identifier: Apache-2.0
"""Finished jobs side by side, from just their job.json and metrics.json: no data is read, no network is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...kit.display import shortened
from ..job import files
from ..job.checkpoints import OBJECT, SHARE, TEXT, WHOLE, check_fields, list_of
from ..job.settings import PRECISION
from ..job.store import read_job
from ..job.text import option_of, option_value
from .luck import NOTE, paired
from .page import Table


@dataclass(frozen=True)
class FinishedJob:
    """What is known about a finished job.

    Attributes:
        name: its directory, as given.
        settings: from job.json; images: fingerprint of its data.
        accuracies: of the float network and of the delivered ones on their device, by precision.
        right: whether each test image was, likewise.
        figures: bytes of the files, and the integers that differ from the simulation and from training, likewise.
    """

    name: str
    settings: Mapping[str, Any]
    images: str
    accuracies: dict[str, float]
    right: dict[str, np.ndarray]
    figures: dict[str, Sequence[int]]


def read(directory: Path) -> FinishedJob:
    """The finished job in a directory."""
    settings, images, _ = read_job(directory)
    path = directory / "metrics.json"
    if not path.exists():
        raise ValueError(f"{directory} contains an unfinished job, which has no figures to compare: continue it first")
    content = check_fields(files.read_json(path), path, {"float": OBJECT, "networks": OBJECT})
    labels = content.get("labels")
    if not isinstance(labels, list) or not labels or any(type(label) is not int for label in labels):
        raise ValueError(f"{path}: labels must be a list of whole numbers, at least one")
    job = FinishedJob(str(directory), settings, images, {}, {}, {})

    def add(name: str, network: object, where: str, accuracy: str, *figures: str) -> None:
        kinds = {accuracy: SHARE, "answers": list_of(len(labels), "whole numbers", int)} | dict.fromkeys(figures, WHOLE)
        held = check_fields(network, where, kinds)
        job.accuracies[name] = held[accuracy]
        job.right[name] = np.array(held["answers"], dtype=object) == np.array(labels, dtype=object)
        job.figures[name] = [held[figure] for figure in figures]

    add("float32", content["float"], f"{path}: float", "test_accuracy")
    for precision, methods in content["networks"].items():
        where = f"{path}: networks.{shortened(precision, 20)}"
        if not re.fullmatch(PRECISION, precision):
            raise ValueError(f"{where} is not a precision such as w8a8")
        name = check_fields(methods, where, {"chosen": TEXT})["chosen"]
        figures = ("file_bytes", "values_differing", "training_differing")
        add(precision, methods.get(name), where, "device_accuracy", *figures)
    return job


def settings_table(jobs: Sequence[FinishedJob]) -> Table:
    """A row for each setting in which they differ: its option, then each job's value."""
    table = Table("Settings that differ", ["setting", *(job.name for job in jobs)], 1)
    for name in dict.fromkeys(name for job in jobs for name in job.settings):
        values = [job.settings.get(name) for job in jobs]
        if any(value != values[0] for value in values):
            written = ["–" if value is None else shortened(option_value(value), 120) for value in values]
            table.add(shortened(option_of(name), 40), *written)
    return table


def network_table(jobs: Sequence[FinishedJob]) -> Table:
    """A row for each network of each job; the same network from all jobs together. The last two columns are integers
    that differ."""
    header = ("network", "job", "accuracy", "to the first", "bytes", "simulation", "training")
    table = Table("Delivered networks, on the device", header, 2)
    for name in dict.fromkeys(name for job in jobs for name in job.accuracies):
        first, *others = [job for job in jobs if name in job.accuracies]
        for job in (first, *others):
            difference = "–"
            if job is not first and job.images == first.images:
                difference = paired(job.right[name], first.right[name]).in_short()
            elif job is not first:
                difference = f"{100 * (job.accuracies[name] - first.accuracies[name]):+.1f}, not known"
            figures = [f"{figure:,}" for figure in job.figures[name]] or ["–"] * 3
            shown = name if name == "float32" else name.upper()
            table.add(shown, job.name, f"{job.accuracies[name]:.1%}", difference, *figures)
    return table


def sentences(jobs: Sequence[FinishedJob]) -> list[str]:
    """What readers must know before comparing the figures."""
    said = [f"To the first: {NOTE.removesuffix('.')}"]
    if len({job.images for job in jobs}) > 1:
        said.append(
            "The jobs have different images, so their accuracies come from different tests: a difference need not be "
            "due to the networks"
        )
    for job in jobs:
        wrong = [name.upper() for name, figures in job.figures.items() if figures and figures[2]]
        if wrong:
            device = shortened(job.settings.get("device"), 40)
            said.append(f"{job.name}: {device} does not compute what was trained, in {', '.join(wrong)}")
    return said
