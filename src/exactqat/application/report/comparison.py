# SPDX-License-Identifier: Apache-2.0
"""Finished jobs side by side, from just their job.json and metrics.json: no data is read, no network is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .luck import NOTE, paired
from .text import option_of, option_value, shortened

HEADER = ("network", "job", "accuracy", "to the first", "bytes", "simulation", "training")


@dataclass(frozen=True)
class Delivered:
    """A network of a finished job.

    Attributes:
        accuracy: on the device.
        right: whether each test image was.
        figures: bytes of the file, and the integers that differ from the simulation and from training; None for float.
    """

    accuracy: float
    right: np.ndarray
    figures: tuple[int | None, ...] = (None, None, None)


@dataclass(frozen=True)
class FinishedJob:
    """What is known about a finished job.

    Attributes:
        name: its directory, as given.
        settings: from job.json.
        images: fingerprint of its data.
        networks: delivered ones by precision, and "float32".
    """

    name: str
    settings: Mapping[str, Any]
    images: str
    networks: Mapping[str, Delivered]


def differing_settings(jobs: Sequence[FinishedJob]) -> list[list[str]]:
    """A row for each setting in which they differ: its option, then each job's value."""
    rows = []
    for name in dict.fromkeys(name for job in jobs for name in job.settings):
        values = [job.settings.get(name) for job in jobs]
        if any(value != values[0] for value in values):
            written = ["–" if value is None else shortened(option_value(value), 120) for value in values]
            rows.append([shortened(option_of(name), 40), *written])
    return rows


def rows(jobs: Sequence[FinishedJob]) -> list[list[str]]:
    """A row for each network of each job, as HEADER names its cells; the same network from all jobs together. The last
    two are integers that differ."""
    table = []
    for name in dict.fromkeys(name for job in jobs for name in job.networks):
        first = next(job for job in jobs if name in job.networks)
        for job in [job for job in jobs if name in job.networks]:
            network, other, difference = job.networks[name], first.networks[name], "–"
            if job is not first and job.images == first.images:
                difference = paired(network.right, other.right).in_short()
            elif job is not first:
                difference = f"{100 * (network.accuracy - other.accuracy):+.1f}, not known"
            figures = ["–" if figure is None else f"{figure:,}" for figure in network.figures]
            shown = name if name == "float32" else name.upper()
            table.append([shown, job.name, f"{network.accuracy:.1%}", difference, *figures])
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
        wrong = [name.upper() for name, network in job.networks.items() if network.figures[2]]
        if wrong:
            device = shortened(job.settings.get("device"), 40)
            said.append(f"{job.name}: {device} does not compute what was trained, in {', '.join(wrong)}")
    return said
