# SPDX-License-Identifier: Apache-2.0
"""Finished jobs side by side, from just their job.json and metrics.json: no data is read, no network is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...kit.display import listed
from .luck import NOTE, paired
from .page import Table, render
from .text import option_of, option_value, shortened

WRITTEN_LENGTH = 120
# The names of a chosen network's figures in metrics.json and in a table, and whether they are whole numbers.
FIGURES = {
    "device_accuracy": ("accuracy", False),
    "file_bytes": ("bytes", True),
    "arena_bytes": ("arena", True),
    "multiply_accumulates": ("multiply-adds", True),
    "values_differing": ("not as simulated", True),
    "training_differing": ("not as trained", True),
}
# Figures that jobs of earlier versions do not have.
LATER = ("arena_bytes", "training_differing")


@dataclass(frozen=True)
class FinishedJob:
    """What is known about a finished job.

    Attributes:
        name: its directory, as given.
        settings: from job.json.
        images: fingerprint of its data.
        test_images: how many there are.
        float_accuracy: of its float network, on the test images.
        networks: delivered ones by precision, each with "method" and the FIGURES, None if one is not known.
        device: the one it was trained for.
        right: whether each test image was right, by precision, "float32" among them; none if the answers are not known.
    """

    name: str
    settings: Mapping[str, Any]
    images: str
    test_images: int
    float_accuracy: float
    seconds: float
    networks: Mapping[str, Mapping[str, Any]]
    device: str = ""
    right: Mapping[str, np.ndarray] = field(default_factory=dict)


def differing_settings(jobs: Sequence[FinishedJob]) -> list[list[str]]:
    """A row for each setting in which they differ: its option, then each job's value."""
    names = dict.fromkeys(name for job in jobs for name in job.settings)
    rows = []
    for name in names:
        values = [job.settings.get(name) for job in jobs]
        if any(value != values[0] for value in values):
            option = shortened(option_of(name), 40)
            written = ("–" if value is None else shortened(option_value(value), WRITTEN_LENGTH) for value in values)
            rows.append([option, *written])
    return rows


HEADER = (
    "network", "job", "trained for", "method", "accuracy", "to the first", "difference",
    *(title for title, _ in list(FIGURES.values())[1:]),
)  # fmt: skip
# How many of the cells hold text.
TEXTS = 4


def rows(jobs: Sequence[FinishedJob]) -> list[list[str]]:
    """A row for each network of each job, as HEADER names its cells; the same network from all jobs together."""
    found: list[list[str]] = []
    blank = ["–"] * (len(FIGURES) - 1)
    for job in jobs:
        difference = _difference(job, jobs[0], "float32", job.float_accuracy, jobs[0].float_accuracy)
        found.append(["float32", job.name, "–", "float training", f"{job.float_accuracy:.1%}", *difference, *blank])
    for precision in dict.fromkeys(precision for job in jobs for precision in job.networks):
        first = next(job for job in jobs if precision in job.networks)
        for job in jobs:
            if precision not in job.networks:
                continue
            network = job.networks[precision]
            accuracy = network["device_accuracy"]
            difference = _difference(job, first, precision, accuracy, first.networks[precision]["device_accuracy"])
            figures = ["–" if network[name] is None else f"{network[name]:,}" for name in list(FIGURES)[1:]]
            shown = [job.name, job.device, network["method"], f"{accuracy:.1%}"]
            found.append([precision.upper(), *shown, *difference, *figures])
    return found


# What of that fits a terminal of 80 columns.
SHORT_HEADER = ("network", "job", "accuracy", "to the first", "bytes", "simulation", "training")


def short_rows(jobs: Sequence[FinishedJob]) -> list[list[str]]:
    """`rows` for a terminal, as SHORT_HEADER names their cells; the last two are integers that differ."""
    short = []
    for network, job, _, _, accuracy, points, verdict, bytes_, _, _, simulated, trained in rows(jobs):
        difference = points if points == "–" else f"{points.partition(' ')[0]}, {verdict.rpartition(', ')[2]}"
        short.append([network, job, accuracy, difference, bytes_, simulated, trained])
    return short


def _difference(job: FinishedJob, first: FinishedJob, network: str, accuracy: float, other: float) -> tuple[str, str]:
    """A job's network compared with the first job's, in percentage points, and whether that may be chance; only on the
    same images."""
    if job is first:
        return "–", "–"
    if job.images == first.images and network in job.right and network in first.right:
        compared = paired(job.right[network], first.right[network])
        return compared.points(), compared.verdict()
    return f"{100 * (accuracy - other):+.1f}", "not known"


def sentences(jobs: Sequence[FinishedJob]) -> list[str]:
    """What readers must know before comparing the figures."""
    found = []
    if len({job.images for job in jobs}) > 1:
        found.append(
            "The jobs have different images, so their accuracies come from different tests: a difference need not be "
            "due to the networks"
        )
    old = [job for job in jobs if not job.right]
    if old:
        found.append(
            f"{listed([job.name for job in old])} {'keep' if len(old) > 1 else 'keeps'} no answers to single images, "
            "so whether a difference may be chance is unknown: `exactqat report DIR` writes them"
        )
    if any(job.right for job in jobs):
        found.append(f"To the first: {NOTE.removesuffix('.')}")
    for job in jobs:
        wrong = [name.upper() for name, each in job.networks.items() if each["training_differing"]]
        if wrong:
            found.append(f"{job.name}: {job.device} does not compute what was trained, in {', '.join(wrong)}")
    return found


def written(jobs: Sequence[FinishedJob]) -> str:
    """The page."""
    names = [shortened(job.name, WRITTEN_LENGTH) for job in jobs]
    accuracies = {job.name: max((n["device_accuracy"] for n in job.networks.values()), default=0.0) for job in jobs}
    best = max(accuracies, key=lambda name: accuracies[name])
    networks = []
    for row in rows(jobs):
        # The best of each precision, equals included.
        shares = [
            network["device_accuracy"]
            for job in jobs
            for name, network in job.networks.items()
            if name.upper() == row[0]
        ]
        marked = len(shares) > 1 and row[4] == f"{max(shares):.1%}"
        networks.append((marked, [shortened(cell, WRITTEN_LENGTH) for cell in row]))
    changed = [(False, row) for row in differing_settings(jobs)]
    return render(
        "comparison.html",
        title="exactqat: jobs compared",
        names=names,
        figures=[
            (str(len(jobs)), "jobs"),
            (f"{accuracies[best]:.1%}", f"the best on a device, of {shortened(best, 40)}"),
        ],
        settings=Table("Settings that differ, by job", ["setting", *names], changed, 1 + len(jobs))
        if changed
        else None,
        networks=Table(
            "Delivered networks; the best of each precision is marked", HEADER, networks, TEXTS, "stack wrap"
        ),
        notes=[sentence[0].upper() + sentence[1:] for sentence in sentences(jobs)],
    )
