# SPDX-License-Identifier: Apache-2.0
"""Functions of one value, known by what they compute.

`x * sigmoid(x)`, a clip, `jnp.where(x > 0, x, 0.1 * x)`: however a function is written, it is known by its values
at many points, not by its name or the order of its operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...device.functions import FUNCTIONS, NumPyPrimitives

_FAR = np.array([9.5, 12.0, 20.0, 50.0, 100.0, 1e3, 1e4])
_SMALL = np.array([1e-4, 1e-5, 1e-6, 1e-7, 1e-8])
# Corners of the known functions among them.
POINTS = np.concatenate([np.linspace(-8, 8, 513), _FAR, -_FAR, _SMALL, -_SMALL])
TOLERANCE = 2e-6
_LEFT, _RIGHT = int(np.argmin(POINTS)), int(np.argmax(POINTS))
_ONE, _MINUS_ONE = int(np.argmin(np.abs(POINTS - 1))), int(np.argmin(np.abs(POINTS + 1)))


# Near zero, functions must agree to a tenth of their values: an epsilon that is added there is all that a root, a
# logarithm or a quotient of it sees. `_ROUNDED` of the tolerance is what rounding leaves of it in between.
_NEAR = 1e-4
_ROUNDED = 5e-3
# Where a function is smaller than `_ZERO`, another one is the same only if it is smaller than `_VANISHING`.
_ZERO, _VANISHING = 1e-20, 1e-13


def same(first: np.ndarray, second: np.ndarray, tolerance: float = TOLERANCE, points: np.ndarray = POINTS) -> bool:
    """Whether two functions agree at all of these points."""
    if not np.isfinite(first).all():
        return False
    difference, size = np.abs(first - second), np.abs(second)
    near, zero = np.abs(points) <= _NEAR, size <= _ZERO
    return bool(
        np.all(difference <= tolerance * (1 + size))
        and np.all(difference[near] <= 0.1 * size[near] + _ROUNDED * tolerance)
        and np.all(np.abs(first[zero]) <= _VANISHING)
    )


def _known() -> list[tuple[str, dict[str, Any], np.ndarray]]:
    with np.errstate(all="ignore"):
        found: list[tuple[str, dict[str, Any], np.ndarray]] = []
        for function in FUNCTIONS.values():
            for attributes in function.recognized:
                parameters = function.of_step(attributes).values()
                found.append((function.name, dict(attributes), function(NumPyPrimitives, POINTS, *parameters)))
    return found


_KNOWN = _known()


def identify(samples: np.ndarray, tolerance: float = TOLERANCE) -> tuple[str, Mapping[str, Any]] | None:
    """The kind of step (and its attributes) that computes this; "" for the operand itself."""
    if not np.isfinite(samples).all():
        return None
    if same(samples, POINTS, tolerance):
        return "", {}
    for kind, attributes, values in _KNOWN:
        if same(samples, values, tolerance):
            return kind, attributes
    return _with_parameters(samples, tolerance)


def _with_parameters(samples: np.ndarray, tolerance: float) -> tuple[str, Mapping[str, Any]] | None:
    low, high = float(samples[_LEFT]), float(samples[_RIGHT])
    if low < high and (low > POINTS[_LEFT] or high < POINTS[_RIGHT]):
        bounds = (low if low > POINTS[_LEFT] else -np.inf, high if high < POINTS[_RIGHT] else np.inf)
        if same(samples, np.clip(POINTS, *bounds), tolerance):
            return "clamp", {
                "min": None if bounds[0] == -np.inf else bounds[0],
                "max": None if bounds[1] == np.inf else bounds[1],
            }
    if not same(samples[POINTS >= 0], POINTS[POINTS >= 0], tolerance, POINTS[POINTS >= 0]):
        return None
    slope = -float(samples[_MINUS_ONE])
    if same(samples, np.where(POINTS >= 0, POINTS, slope * POINTS), tolerance):
        return "leaky_relu", {"slope": slope}
    alpha = -low
    for input_scale in (1.0, 1.0 / alpha if alpha > 0 else 1.0):
        if same(
            samples, np.where(POINTS > 0, POINTS, alpha * np.expm1(np.minimum(POINTS, 0) * input_scale)), tolerance
        ):
            return "elu", {"alpha": alpha, "scale": 1.0, "input_scale": input_scale}
    return None
