# SPDX-License-Identifier: Apache-2.0
"""Delivered networks and other people's files, with the examples they are judged on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...deploy.examples import TARGETS, read_examples
from ...deploy.formats.read_tflite import read_tflite
from ...deploy.graph import Graph
from ..report.results import Split
from .restored import data_of, restore
from .store import delivered


@dataclass(frozen=True)
class Judged:
    """A network and examples.

    Attributes:
        name: of its folder in a job, or of the file.
        path: of the .tflite file.
        graph: what the file holds.
        model: the prepared model, frozen; None for a file.
        data: inputs and classes; None in place of these if there are none and none are needed.
    """

    name: str
    path: Path
    graph: Graph
    model: Any
    data: tuple[Any, np.ndarray | None]


def networks_of(
    path: Path,
    data: Path | None,
    model: str | None,
    part: str = "test",
    precision: str | None = None,
    classes: bool = True,
) -> list[Judged]:
    """The networks of a job's directory, or of a .tflite file.

    Args:
        data: a file of examples (`deploy.examples.read_examples`); by default a part of the job's own data. A .tflite
            file has none.
        model: see `restore`.
        part: of the job's data: train, validation or test.
        precision: the only folder to look at, such as w8a8.
        classes: whether they are needed.

    Raises:
        FileNotFoundError: there is no such job, file, or folder.
        ValueError: a file cannot be read, or examples are missing.
    """
    given = None
    if data is not None:
        held = read_examples(data, part, classes)
        given = held.inputs, held.targets
    if not path.is_dir():
        chosen = {"--precision": precision, "--model": model}
        for option in (name for name, value in chosen.items() if value is not None):
            raise ValueError(f"{option} is for the directory of a job; {path} is none")
        if given is None:
            raise ValueError(f"{path} says nothing of examples: give --data FILE.npz with the inputs and {TARGETS}")
        return [Judged(path.name, path, read_tflite(path), None, given)]
    found = []
    for folder in delivered(path, "checkpoint.pt", "model.tflite"):
        if precision is not None and folder.name != precision:
            continue
        restored, checkpoint = restore(folder / "checkpoint.pt", model)
        if classes and "threshold" in checkpoint:
            raise ValueError(
                f"{folder} gives its input back and has no classes to be judged by; `exactqat report {path}` "
                "evaluates it"
            )
        graph = replace(read_tflite(folder / "model.tflite"), trained_for=restored.profile or "")
        if given is None:
            split: Split = getattr(data_of(checkpoint), part)
            given = split.images.numpy(), split.labels.numpy()
        found.append(Judged(folder.name, folder / "model.tflite", graph, restored, given))
    if not found:
        raise FileNotFoundError(f"{path} has no network {precision}")
    return found


__all__ = ["Judged", "networks_of"]
