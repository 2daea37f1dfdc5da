# SPDX-License-Identifier: Apache-2.0
"""A network with one layer made bad by hand in five ways, from any framework: sensitivities find it first, and say why.

Two layers with weights, of 6, 16 and 3 channels; for the bias, one layer of 4,096 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from exactqat import tune
from exactqat.tune.network import Candidate

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(0, 1, (256, 6)).astype(np.float32)
FIRST, SECOND = RNG.normal(0, 1, (6, 16)).astype(np.float32), RNG.normal(0, 1, (16, 3)).astype(np.float32)
# A layer's weights [in, out] and its bias.
Layer = tuple[np.ndarray, np.ndarray]
# Makes a calibrated candidate of layers, with a ReLU between them, and inputs.
Build = Callable[[Sequence[Layer], np.ndarray], Candidate]


@dataclass(frozen=True)
class Breaking:
    """One way of breaking a layer.

    Attributes:
        kinds: of parts; one of them must be found first. reason: what must be said of it.
        factor: what the range of the first layer's result is multiplied by.
        in_files: whether a file shows it: it does not say what its weights were.
    """

    kinds: tuple[str, ...]
    reason: str
    layers: tuple[Layer, ...]
    inputs: np.ndarray
    factor: float = 1.0
    in_files: bool = True


def layer(weight: np.ndarray, bias: float = 0.0) -> Layer:
    return weight.astype(np.float32), np.full(weight.shape[1], bias, np.float32)


def breakings() -> dict[str, Breaking]:
    plain = (layer(FIRST), layer(SECOND))
    # One value in some thousands.
    outlier = np.random.default_rng(1).normal(0, 1, (4096, 6)).astype(np.float32)
    outlier[0, 0] = 3000
    unequal, apart = FIRST.copy(), SECOND.copy()
    unequal[:, 0] *= 1000
    apart[0] = 0
    classes = np.arange(64) % 4
    wide = np.repeat(np.eye(4), 1024, axis=1)
    beyond = (layer(wide.T, 1.2 * 2**30 / 255 / 127),)
    return {
        "outliers": Breaking(("input", "result"), "few outliers", plain, outlier),
        "channels": Breaking(
            ("result",), "channels of very different size", (layer(unequal), layer(apart)), INPUTS
        ),
        "few codes": Breaking(("result",), "too few codes", plain, INPUTS, 300),
        "saturating": Breaking(("result",), "saturates", plain, INPUTS, 1 / 100),
        "bias": Breaking(("weights",), "bias beyond its grid: 4 of 4", beyond, wide[classes].astype(np.float32),
                         in_files=False),
    }  # fmt: skip


def made(build: Build, broken: Breaking) -> Candidate:
    candidate = build(broken.layers, broken.inputs)
    grid = candidate.plan.steps[0].grid
    low, high = candidate.ranges[grid]
    return replace(candidate, ranges={**candidate.ranges, grid: (low * broken.factor, high * broken.factor)})


def classes_of(broken: Breaking) -> np.ndarray:
    """What the float network answers."""
    values = broken.inputs.astype(np.float64)
    for number, (weight, bias) in enumerate(broken.layers):
        values = values @ weight + (0 if len(broken.layers) == 1 else bias)
        values = np.maximum(values, 0) if number + 1 < len(broken.layers) else values
    return np.asarray(values.argmax(1))


def require_found_first(model: Any, broken: Breaking, **settings: Any) -> None:
    """The broken layer is found first, with the reason, and costs much."""
    analysis = tune.sensitivity(model, (broken.inputs, classes_of(broken)), **settings)
    worst = analysis.ranked()[0]
    assert worst.kind in broken.kinds and worst.reasons and broken.reason in worst.reasons[0], analysis
    assert worst.loss is not None and worst.loss > 0.2, analysis


def require_all_found_first(build: Build) -> None:
    for broken in breakings().values():
        require_found_first(made(build, broken), broken)
