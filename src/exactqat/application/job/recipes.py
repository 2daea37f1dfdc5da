# SPDX-License-Identifier: Apache-2.0
"""Benchmarks by name: their networks, sizes, training and pass marks, for a user's own copy of the data.

MLPerf Tiny (arXiv:2106.07597) requires an accuracy on its test images, for the network as the device computes it. Its
rules leave training free, so the schedules here are close to those of its reference networks where they matter and
simple elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..report.results import Mark

if TYPE_CHECKING:
    from ..report.results import Dataset


@dataclass(frozen=True)
class Recipe:
    """A benchmark.

    Attributes:
        mark: what the device has to reach.
        settings: of the job.
        shape: of one input: channels, height, width.
        classes: how many the benchmark has.
        data: what its inputs are.
        noun: what an example is called.
    """

    mark: Mark
    settings: Mapping[str, Any]
    shape: tuple[int, int, int]
    classes: int
    data: str
    noun: str = "image"


# int8, like the benchmark's own files. At 8 bits a quarter of `epochs_qat` is trained.
_COMMON = {"weight_bits": 8, "activation_bits": 8}
RECIPES = {
    "mlperf-tiny/kws": Recipe(
        Mark("MLPerf Tiny, keyword spotting", 0.90),
        {
            **_COMMON, "model": "dscnn", "batch_size": 100, "epochs_float": 36, "epochs_qat": 40, "lr": 5e-4,
            "schedule": "step", "augment": ("time-shift",),
        },
        (1, 49, 10),
        12,
        "10 MFCC features of 49 frames, [n, 49, 10]",
        noun="sound",
    ),
    "mlperf-tiny/vww": Recipe(
        Mark("MLPerf Tiny, visual wake words", 0.80),
        {
            **_COMMON, "model": "mobilenet_v1", "image_size": 96, "batch_size": 50, "epochs_float": 50,
            "epochs_qat": 40, "lr": 1e-3, "schedule": "step", "augment": ("shift", "flip"),
        },
        (3, 96, 96),
        2,
        "images in color, scaled to 96x96",
    ),
    "mlperf-tiny/ic": Recipe(
        Mark("MLPerf Tiny, image classification", 0.85),
        {
            **_COMMON, "model": "resnet8", "image_size": 32, "batch_size": 32, "epochs_float": 200, "epochs_qat": 80,
            "lr": 1e-3, "schedule": "cosine", "augment": ("shift", "flip"),
        },
        (3, 32, 32),
        10,
        "images in color, scaled to 32x32",
    ),
}  # fmt: skip


def recipe_named(name: str) -> Recipe:
    """The recipe.

    Raises:
        ValueError: there is none with that name.
    """
    if name not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {name!r}")
    return RECIPES[name]


def chosen(given: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings, completed with those of the recipe among them.

    Raises:
        ValueError: there is no such recipe.
    """
    recipe = given.get("recipe")
    return dict(given) if recipe is None else {**recipe_named(recipe).settings, **given}


def check_data(name: str, dataset: Dataset) -> list[str]:
    """What a user should know about data for a recipe.

    Raises:
        ValueError: the data has another shape.
    """
    recipe = recipe_named(name)
    shape, classes = tuple(dataset.train.images.shape[1:]), len(dataset.class_names)
    if shape != recipe.shape:
        raise ValueError(
            f"recipe {name} takes {recipe.data}: channels, height and width {list(recipe.shape)}; --data "
            f"{dataset.name} has {list(shape)}"
        )
    if classes != recipe.classes:
        return [
            f"The benchmark of recipe {name} has {recipe.classes} classes, these data have {classes}: what it takes to "
            "pass is not made for them"
        ]
    return []
