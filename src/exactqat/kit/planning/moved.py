# SPDX-License-Identifier: Apache-2.0
"""How far training has moved the integers that a file's network began with."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..display import listed, shortened
from .callers import users_line
from .plans import Plan

# The largest code of a filter, and how far all of a layer's may move, in units of their own size.
_LARGEST, _FARTHEST = 127, 0.5


class WeightsMovedWarning(UserWarning):
    """Training has replaced the integers of a file instead of adapting them."""


def warn_of_moved_weights(plan: Plan, tensors: Mapping[str, Any]) -> None:
    """Warns of layers of a file whose integers have moved by more than half of their size. tensors: the parameters by
    name, in NumPy."""
    moved = {}
    for step in plan.steps:
        weights = step.weights
        if weights is not None and weights.start is not None and weights.range_end is not None:
            arrays = (weights.start, tensors[weights.weight])
            start, now = (np.moveaxis(np.asarray(array, np.float32), weights.channel_axis, -1) for array in arrays)
            distance, size = (np.linalg.norm(at) for at in (now * (_LARGEST / weights.range_end) - start, start))
            if distance > _FARTHEST * size:
                moved[step.path] = float(distance) / max(float(size), 1.0)
    if moved:
        words = [f"{shortened(path)} by {by:.0%}" for path, by in moved.items()]
        warnings.warn(
            f"training has moved the integers of {len(moved)} of the file's layers by more than half of their size: "
            f"{listed(words, length=160)}. Little is left of the file there; if accuracy fell, begin again with a "
            "smaller learning rate (one of Adam's steps moves a code by up to 127 times the rate)",
            WeightsMovedWarning,
            stacklevel=users_line(),
        )
