# SPDX-License-Identifier: Apache-2.0
"""Data for the job. A source is a function that gives a `Dataset`; `SOURCES` names them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# The split belongs to the data, not to a run: every seed is judged on the same test images.
SPLIT_SEED = 0
TEST_SHARE, VALIDATION_SHARE = 0.2, 0.15


@dataclass(frozen=True)
class Split:
    """images: float32 [n, channels, height, width]; labels: int64 [n]."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    """Images and labels in three disjoint parts, and what is known about them.

    value_range: (min, max) that any image may take; it becomes the input's fixed quantization range.
    """

    name: str
    class_names: tuple[str, ...]
    value_range: tuple[float, float]
    train: Split
    validation: Split
    test: Split


def digits() -> Dataset:
    """scikit-learn's handwritten digits: 1797 images of 8x8 pixels with values 0..16, scaled to 0..1."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = (bunch.images / 16.0).astype(np.float32)[:, None]
    return split("digits", images, bunch.target.astype(np.int64), tuple(map(str, range(10))), (0.0, 1.0))


def split(
    name: str, images: np.ndarray, labels: np.ndarray, class_names: tuple[str, ...], value_range: tuple[float, float]
) -> Dataset:
    """Divides images [n, channels, height, width], always the same way; every class has its share in each part."""
    from sklearn.model_selection import train_test_split

    everything = np.arange(len(labels))
    rest, test = train_test_split(everything, test_size=TEST_SHARE, stratify=labels, random_state=SPLIT_SEED)
    share = VALIDATION_SHARE / (1 - TEST_SHARE)
    train, validation = train_test_split(rest, test_size=share, stratify=labels[rest], random_state=SPLIT_SEED)
    parts = [Split(torch.from_numpy(images[i]), torch.from_numpy(labels[i])) for i in (train, validation, test)]
    return Dataset(name, class_names, value_range, *parts)


SOURCES: dict[str, Callable[[], Dataset]] = {"digits": digits}


def load(name: str) -> Dataset:
    """The data set of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in SOURCES:
        raise ValueError(f"data must be one of {', '.join(SOURCES)}, got {name!r}")
    return SOURCES[name]()
