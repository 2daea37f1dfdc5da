# SPDX-License-Identifier: Apache-2.0
"""Finished jobs side by side, from their job.json and metrics.json alone: no data is read, no network is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..display import listed
from . import files
from .devices import current_settings
from .luck import NOTE, paired
from .page import cards, escape, page, section, table
from .text import option_of, option_value, shortened

WRITTEN_LENGTH = 120
# What a chosen network's figures are called in metrics.json, in a table, and whether they are whole numbers.
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
class Job:
    """What is known of a finished job.

    Attributes:
        name: its directory, as it was given.
        settings: of job.json.
        images: fingerprint of its data.
        test_images: how many there are.
        float_accuracy: of its float network, on the test images.
        networks: delivered ones by precision, each with "method", and the FIGURES, None where one is not known.
        device: that it was trained for.
        right: whether each test image was right, by precision, "float32" among them; none where the answers are not
            known.
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


def read(directory: Path) -> Job:
    """The finished job in a directory.

    Raises:
        FileNotFoundError, NotADirectoryError: there is none.
        ValueError: it is unfinished, or its files are damaged; the message says which.
    """
    files.check_there(directory)
    if not (directory / "job.json").exists():
        raise FileNotFoundError(f"{directory} contains no job.json, so it is not a job; `exactqat train` writes one")
    job = files.read_json(directory / "job.json")
    path = directory / "metrics.json"
    if not path.exists():
        raise ValueError(f"{directory} contains an unfinished job, which has no figures to compare: continue it first")
    metrics = files.read_json(path)
    settings, images = job.get("settings"), job.get("images")
    if not isinstance(settings, dict) or not isinstance(images, str):
        raise ValueError(f"{directory / 'job.json'} must contain settings (an object) and images (a string)")
    try:
        settings = current_settings(settings)
    except ValueError as error:
        raise ValueError(f"{directory / 'job.json'}: {error}") from error
    data, float_network, networks = (_object(metrics, name, path) for name in ("data", "float", "networks"))
    delivered = {}
    answers = {"float32": float_network.get("answers")}
    for precision, methods in networks.items():
        where = f"{path}: networks.{shortened(precision, 20)}"
        if not re.fullmatch(r"w\da\d+", precision):
            raise ValueError(f"{where} is not a precision such as w8a8")
        if not isinstance(methods, dict) or not isinstance(methods.get("chosen"), str):
            raise ValueError(f"{where} must say which network was chosen")
        chosen = _object(methods, methods["chosen"], path)
        known = {**(chosen["footprint"] if isinstance(chosen.get("footprint"), dict) else {}), **chosen}
        if not isinstance(chosen.get("title"), str):
            raise ValueError(f"{path}: networks.{shortened(precision, 20)} must have a title")
        figures = {name: _number(known, name, path, name in LATER, whole) for name, (_, whole) in FIGURES.items()}
        delivered[precision] = {"method": chosen["title"], **figures}
        answers[precision] = chosen.get("answers")
    test_images = _number(data, "test", path, whole=True)
    accuracy, seconds = _number(float_network, "test_accuracy", path), _number(metrics, "seconds", path)
    assert test_images is not None and accuracy is not None and seconds is not None
    if test_images < 1:
        raise ValueError(f"{path}: test must be at least 1, got {test_images}")
    right = _right(metrics.get("labels"), answers, int(test_images), path)
    device = shortened(settings["device"], 40)
    return Job(str(directory), settings, images, int(test_images), accuracy, seconds, delivered, device, right)


def _right(labels: Any, answers: Mapping[str, Any], images: int, path: Path) -> dict[str, np.ndarray]:
    """Whether each test image was right, by network; nothing of a job of before answers were kept.

    Raises:
        ValueError: answers or labels are no list of so many whole numbers.
    """
    if labels is None:
        return {}
    arrays = {}
    for name, given in {"labels": labels, **answers}.items():
        if given is None:
            continue
        if not isinstance(given, list) or len(given) != images or not all(type(each) is int for each in given):
            raise ValueError(
                f"{path}: answers and labels must be {images:,} whole numbers each, those of {name} are not"
            )
        arrays[name] = np.array(given, dtype=object)
    truth = arrays.pop("labels")
    return {name: (given == truth).astype(bool) for name, given in arrays.items()}


def _object(holder: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    found = holder.get(name)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: {shortened(name, 40)} must be an object, got {shortened(repr(found), 40)}")
    return found


def _number(
    holder: Mapping[str, Any], name: str, path: Path, optional: bool = False, whole: bool = False
) -> float | None:
    found = holder.get(name)
    if found is None and optional:
        return None
    highest = 1 if name.endswith("accuracy") else 2**63
    fits = type(found) is int or (type(found) is float and not whole)
    if found is None or not fits or not 0 <= found <= highest:
        what = "a whole number" if whole else "a number"
        limits = "from 0 to 1" if highest == 1 else "of at least 0"
        raise ValueError(f"{path}: {name} must be {what} {limits}, got {shortened(repr(found), 40)}")
    return found


def differing_settings(jobs: Sequence[Job]) -> list[list[str]]:
    """A row for each setting in which they differ: its option, then what each job has."""
    names = dict.fromkeys(name for job in jobs for name in job.settings)
    rows = []
    for name in names:
        values = [job.settings.get(name) for job in jobs]
        if any(value != values[0] for value in values):
            option = shortened(option_of(name), 40)
            told = ("–" if value is None else shortened(option_value(value), WRITTEN_LENGTH) for value in values)
            rows.append([option, *told])
    return rows


HEADER = (
    "network", "job", "trained for", "method", "accuracy", "to the first", "difference",
    *(title for title, _ in list(FIGURES.values())[1:]),
)  # fmt: skip
# How many of the cells hold text.
TEXTS = 4


def rows(jobs: Sequence[Job]) -> list[list[str]]:
    """A row for each network of each job, as HEADER names its cells; the same network of all jobs together."""
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


def _difference(job: Job, first: Job, network: str, accuracy: float, other: float) -> tuple[str, str]:
    """A job's network compared with the first job's, in points, and whether that may be chance; only on the same
    images."""
    if job is first:
        return "–", "–"
    if job.images == first.images and network in job.right and network in first.right:
        compared = paired(job.right[network], first.right[network])
        return compared.points(), compared.verdict()
    return f"{100 * (accuracy - other):+.1f}", "not known"


def sentences(jobs: Sequence[Job]) -> list[str]:
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


def written(jobs: Sequence[Job]) -> str:
    """The page."""
    changed = differing_settings(jobs)
    names = [shortened(job.name, WRITTEN_LENGTH) for job in jobs]
    best = max(jobs, key=lambda job: max((n["device_accuracy"] for n in job.networks.values()), default=0.0))
    top = max((n["device_accuracy"] for n in best.networks.values()), default=0.0)
    settings = "<p>None: the jobs have the same settings.</p>"
    if changed:
        settings = table(["setting", *names], [(False, row) for row in changed], 1 + len(jobs))
    notes = "".join(
        f"<p class='note'>{escape(sentence[0].upper() + sentence[1:])}.</p>" for sentence in sentences(jobs)
    )
    marked = []
    for row in rows(jobs):
        # The best of each precision, equals included.
        shares = [
            job.networks[name]["device_accuracy"] for job in jobs for name in job.networks if name.upper() == row[0]
        ]
        top_of = f"{max(shares, default=2.0):.1%}"
        marked.append((len(shares) > 1 and row[4] == top_of, [shortened(cell, WRITTEN_LENGTH) for cell in row]))
    return page(
        "exactqat: jobs compared",
        "<h1>Jobs side by side</h1>"
        f"<p class='lead'>{escape(', '.join(names))}</p>"
        + cards([(str(len(jobs)), "jobs"), (f"{top:.1%}", f"the best on a device, of {shortened(best.name, 40)}")])
        + section("Settings that differ", settings)
        + section("Delivered networks", f"<div class='prose'>{table(HEADER, marked, TEXTS)}</div>{notes}"),
    )
