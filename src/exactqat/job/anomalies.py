# SPDX-License-Identifier: Apache-2.0
"""Data for anomaly detection: normal examples to learn from, and a test part with both kinds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ..report.results import Dataset, Split
from . import data
from .data import SPLIT_SEED, VALIDATION_SHARE, arrays_of, check_labels, range_of


def load(name: str, image_size: int | None, split: str | None, reconstructs: bool) -> Dataset:
    """The data of a job.

    Args:
        name, image_size, split: see `data.load`.
        reconstructs: the data is normal examples and anomalies, see `from_anomalies`.

    Raises:
        ValueError: there is none, or it cannot be used; the message says why.
    """
    if not reconstructs:
        return data.load(name, image_size, split)
    if Path(name).suffix != ".npz":
        raise ValueError(f"data must be an .npz file of normal examples and anomalies, got {name!r}")
    return from_anomalies(Path(name))


def from_anomalies(path: Path) -> Dataset:
    """Arrays ``x_train`` of normal examples, ``x_test`` and ``y_test`` (0: normal, 1: anomaly) and, if given, ``x_val``
    of normal ones; otherwise a share of the training examples is used for it.

    x: [n, features] or [n, height, width], numbers, used as they are.

    Raises:
        ValueError: the file or its arrays cannot be used; the message says why.
    """
    held, arrays = arrays_of(path, {"x_train", "x_val", "x_test", "y_test"})
    missing = {"x_train", "x_test", "y_test"} - set(arrays)
    if missing:
        raise ValueError(
            f"{path} must contain x_train (normal examples), x_test and y_test (0: normal, 1: anomaly), and may "
            f"contain x_val; it contains {', '.join(held) or 'nothing'}"
        )
    parts: dict[str, np.ndarray] = {}
    for name in ("x_train", "x_val", "x_test"):
        if name not in arrays:
            continue
        x = arrays[name]
        if x.ndim not in (2, 3) or 0 in x.shape or x.dtype.kind not in "biuf" or not np.isfinite(x).all():
            raise ValueError(
                f"{path}: {name} must be finite numbers [n, features] or [n, height, width], got {x.dtype} "
                f"{list(x.shape)}"
            )
        shape = (len(x), 1, *x.shape[1:]) if x.ndim == 3 else (len(x), 1, 1, x.shape[1])
        parts[name] = np.ascontiguousarray(x.reshape(shape), np.float32)
    shapes = {name: list(x.shape[2:]) for name, x in parts.items()}
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        raise ValueError(f"{path}: the parts differ in the shape of their examples: {shapes}")
    labels = arrays["y_test"]
    check_labels(labels, len(parts["x_test"]), f"{path}, y_test")
    if set(np.unique(labels).tolist()) != {0, 1}:
        raise ValueError(f"{path}: y_test must hold 0 for normal examples and 1 for anomalies, both of them")
    if "x_val" not in parts:
        order = np.random.default_rng(SPLIT_SEED).permutation(len(parts["x_train"]))
        taken = max(1, round(VALIDATION_SHARE * len(order)))
        if len(order) < 4:
            raise ValueError(f"{path}: x_train has {len(order)} examples, at least 4 are needed")
        parts["x_val"], parts["x_train"] = parts["x_train"][order[:taken]], parts["x_train"][order[taken:]]

    def part(name: str, y: np.ndarray | None = None) -> Split:
        x = torch.from_numpy(parts[name])
        return Split(x, torch.zeros(len(x), dtype=torch.int64) if y is None else torch.from_numpy(y.astype(np.int64)))

    limits = range_of(list(parts.values()))
    splits = part("x_train"), part("x_val"), part("x_test", labels)
    return Dataset(path.name, ("normal", "anomaly"), limits, *splits, reconstructs=True)
