# SPDX-License-Identifier: Apache-2.0
"""Delivered networks and other people's files, with the examples they are judged on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..deploy.formats.read_tflite import read_tflite
from ..deploy.graph import Graph
from ..deploy.inspect import read_arrays
from ..report.results import Split
from .restored import data_of, restore
from .store import delivered

# In a file of examples: the classes. Everything else is inputs.
CLASSES = "y"


@dataclass(frozen=True)
class Judged:
    """A network and examples.

    Attributes:
        name: of its folder in a job, or of the file.
        path: of the .tflite file.
        graph: what the file holds.
        model: the prepared model, frozen; None for a file.
        data: inputs and classes.
    """

    name: str
    path: Path
    graph: Graph
    model: Any
    data: tuple[Any, np.ndarray]


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
        data: an .npz file with the inputs, by any name for one input, and the classes ``y``; by default a part of the
            job's own data. A file has none.
        model: see `restore`.
        part: of the job's data: train, validation or test.
        precision: the only folder to look at, such as w8a8.
        classes: whether they are needed; otherwise they are 0 where there are none.

    Raises:
        FileNotFoundError: there is no such job, file, or folder.
        ValueError: a file cannot be read, or examples are missing.
    """
    given = None if data is None else examples_of(data, classes)
    if not path.is_dir():
        chosen = {"--precision": precision, "--model": model}
        for option in (name for name, value in chosen.items() if value is not None):
            raise ValueError(f"{option} is for the directory of a job; {path} is none")
        if given is None:
            raise ValueError(f"{path} says nothing of examples: give --data FILE.npz with the inputs and {CLASSES}")
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


def examples_of(path: Path, classes: bool = True) -> tuple[Any, np.ndarray]:
    """Inputs and classes of an .npz file; without the need for classes, zeros where there are none.

    Raises:
        ValueError: it is not such a file, or its arrays are not examples.
    """
    arrays = read_arrays(path)
    if not classes and isinstance(arrays, Mapping) and arrays and CLASSES not in arrays:
        arrays = {**arrays, CLASSES: np.zeros(np.shape(next(iter(arrays.values())))[:1], np.int64)}
    if not isinstance(arrays, Mapping) or CLASSES not in arrays or len(arrays) < 2:
        raise ValueError(f"{path} must be an .npz file of the inputs and the classes {CLASSES}")
    for name, array in arrays.items():
        if array.ndim == 0 or array.dtype.kind not in "biuf":
            raise ValueError(
                f"{path}: {name} must hold numbers, an example in each row, got {array.dtype} of shape "
                f"{list(array.shape)}"
            )
        if len(array) != len(arrays[CLASSES]) or not len(array):
            raise ValueError(
                f"{path}: {name} has {len(array)} examples and {CLASSES} {len(arrays[CLASSES])}; there must be as many "
                "of each, at least one"
            )
    inputs = {name: array for name, array in arrays.items() if name != CLASSES}
    return next(iter(inputs.values())) if len(inputs) == 1 else inputs, arrays[CLASSES]


__all__ = ["CLASSES", "Judged", "examples_of", "networks_of"]
