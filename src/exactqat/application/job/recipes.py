# SPDX-License-Identifier: Apache-2.0
"""Benchmarks by name, in `recipes.toml`: their networks, sizes, training and pass marks, for a user's copy of the data.

MLPerf Tiny requires an accuracy on its test images, for the network as the device computes it. Its rules leave training
free, so the schedules are close to those of its reference networks where they matter and simple elsewhere.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """A benchmark. shape: of one input; data: what its inputs are; noun: what an example is called; least: the lowest
    accuracy on the test data with which a device passes; most: if it counts instead, of how many examples of others the
    device may say the first class, and how many of the first class it may miss."""

    title: str
    settings: Mapping[str, Any]
    shape: tuple[int, int, int]
    classes: int
    data: str
    noun: str
    least: float = 0.0
    most: int | None = None


RECIPES = {
    name: Recipe(**{**recipe, "shape": tuple(recipe["shape"])})
    for name, recipe in tomllib.loads((files(__package__) / "recipes.toml").read_text("utf-8")).items()
}


def recipe_named(name: str) -> Recipe:
    """The recipe."""
    if name not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {name!r}")
    return RECIPES[name]


def chosen(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings, completed with those of the recipe among them."""
    recipe = settings.get("recipe")
    return dict(settings) if recipe is None else {**recipe_named(recipe).settings, **settings}


def check_data(name: str, data: str, shape: tuple[int, ...], classes: int) -> str:
    """What a user should know about data for a recipe, by name, shape of an input and classes; empty: nothing."""
    recipe = recipe_named(name)
    if shape != recipe.shape:
        raise ValueError(
            f"recipe {name} takes {recipe.data}: channels, height and width {list(recipe.shape)}; --data "
            f"{data} has {list(shape)}"
        )
    if classes == recipe.classes:
        return ""
    return (
        f"The benchmark of recipe {name} has {recipe.classes} classes, these data have {classes}: what it takes to "
        "pass is not made for them"
    )
