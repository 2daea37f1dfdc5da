# SPDX-License-Identifier: Apache-2.0
"""Functions of one value, known by what they compute.

`x * sigmoid(x)`, a clip, `jnp.where(x > 0, x, 0.1 * x)`: however a function is written, it is known by its values, not
by its name or the order of its operations.

Values at fixed points alone are blind between and beyond them: `clip(x, -20000, 20000)` is x at all smaller ones. So a
`Curve` keeps the operations that it is computed by. What agrees with a known function at `POINTS` is compared again
where these operations may turn (`Curve.corners`: where an operand passes another one, 0 or a number of the model's), on
both sides of each such place, between them and far beyond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ....kit.device.functions import FUNCTIONS
from ....kit.device.primitives import NUMPY

_FAR = np.array([9.5, 12.0, 20.0, 50.0, 100.0, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8])
_SMALL = np.array([1e-4, 1e-5, 1e-6, 1e-7, 1e-8])
# Corners of the known functions among them.
POINTS = np.concatenate([np.linspace(-8, 8, 513), _FAR, -_FAR, _SMALL, -_SMALL])
TOLERANCE = 2e-6
_LEFT, _RIGHT = int(np.argmin(POINTS)), int(np.argmax(POINTS))
_MINUS_ONE = int(np.argmin(np.abs(POINTS + 1)))

# Where functions of `FUNCTIONS` turn that have no numbers of their own: ReLU6, hard sigmoid, signs.
_TURNS = (-3.0, -1.0, 0.0, 1.0, 3.0, 6.0)
# Between neighbours of these, an operand passes a number once at most: operands are sums and products of few factors.
_MAGNITUDES = np.concatenate([np.geomspace(1e-30, 1e-8, 45), np.geomspace(1e-8, 1e8, 801), np.geomspace(1e8, 1e30, 45)])
_EVERYWHERE = np.unique(np.concatenate([POINTS, _MAGNITUDES, -_MAGNITUDES]).astype(np.float32)).astype(np.float64)
# A corner between two points is looked for in so many parts, so many times: to 1e-6 of its value.
_PARTS, _ROUNDS = 16, 5
# Values so far from a corner, relative to it, are looked at.
_ASIDE = np.array([-1e-1, -1e-2, -1e-3, -1e-5, 0.0, 1e-5, 1e-3, 1e-2, 1e-1])
# More corners are those of waves and steps.
_MANY = 64

# Near zero, functions must agree to a tenth of their values: an epsilon that is added there is all that a root, a
# logarithm or a quotient of it sees. `_ROUNDED` of the tolerance is what rounding leaves of it in between.
_NEAR = 1e-4
_ROUNDED = 5e-3
# Where a function is smaller than `_ZERO`, another one is the same only if it is smaller than `_VANISHING`.
_ZERO, _VANISHING = 1e-20, 1e-13
# The device's exp ends at 80, so what is divided by it does not vanish altogether.
_EXP_ENDS = 1e-30
# What float32 holds.
_LARGEST = 3e38


class Curve:
    """A function of one earlier value, as operations compute it.

    Attributes:
        operation: of the operands' values, in NumPy; None: the earlier value itself.
        operands: curves of the same earlier value, and numbers.
        turns: numbers at which the operation itself may turn, such as the bounds of a clip.
        values: at `POINTS`.
    """

    def __init__(
        self,
        operation: Callable[..., np.ndarray] | None,
        operands: Sequence[Curve | float] = (),
        turns: Sequence[float] = (),
    ) -> None:
        self.operation, self.operands = operation, tuple(operands)
        numbers = [operand for operand in operands if not isinstance(operand, Curve)]
        self.turns = sorted({*_TURNS, *(float(number) for number in (*turns, *numbers) if np.isfinite(number))})
        self.values: np.ndarray = self._computed(
            POINTS, [c.values if isinstance(c, Curve) else c for c in self.operands]
        )

    def _computed(self, points: np.ndarray, operands: Sequence[np.ndarray | float]) -> np.ndarray:
        if self.operation is None:
            return points
        with np.errstate(all="ignore"):
            return np.broadcast_to(np.asarray(self.operation(*operands)), points.shape)

    def __call__(self, points: np.ndarray) -> np.ndarray:
        """The values at other points."""
        return self._all_values(points)[self]

    def _all_values(self, points: np.ndarray) -> dict[Curve, np.ndarray]:
        """The values of all curves that this one is computed from, and its own."""
        values: dict[Curve, np.ndarray] = {}
        for curve in self.parts():
            operands = [values[operand] if isinstance(operand, Curve) else operand for operand in curve.operands]
            values[curve] = curve._computed(points, operands)
        return values

    def parts(self, seen: dict[Curve, None] | None = None) -> Iterator[Curve]:
        """The curves that it is computed from, each after its operands, and itself."""
        seen = {} if seen is None else seen
        if self not in seen:
            seen[self] = None
            for operand in self.operands:
                if isinstance(operand, Curve):
                    yield from operand.parts(seen)
            yield self

    def _differences(self, points: np.ndarray) -> Iterator[np.ndarray]:
        """What is zero where an operation may turn: operands less one another and less the numbers beside them."""
        values = self._all_values(points)
        for curve in values:
            moving = [values[operand] for operand in curve.operands if isinstance(operand, Curve)]
            for place, one in enumerate(moving):
                if one.dtype != bool:
                    yield from (one - number for number in curve.turns)
                    yield from (one - other for other in moving[place + 1 :] if other.dtype != bool)

    def corners(self) -> np.ndarray:
        """Where operations may turn, in order; of waves and stairs, which have many, roughly."""
        grid = np.stack([_EVERYWHERE[:-1], _EVERYWHERE[1:]])
        for _ in range(_ROUNDS):
            grid = self._passed(grid)
            if grid.shape[1] > _MANY:
                break
            grid = np.linspace(grid[0], grid[1], _PARTS + 1)
        return np.unique(self._passed(grid).mean(0))

    def _passed(self, grid: np.ndarray) -> np.ndarray:
        """[points, intervals] -> [2, n]: the parts in which an operation may turn."""
        passed = np.zeros((grid.shape[0] - 1, grid.shape[1]), bool)
        with np.errstate(all="ignore"):
            for difference in self._differences(grid.reshape(-1)):
                signs = np.sign(difference).reshape(grid.shape)
                passed |= (signs[1:] != signs[:-1]) & np.isfinite(signs[1:]) & np.isfinite(signs[:-1])
        rows, columns = np.nonzero(passed)
        return np.stack([grid[rows, columns], grid[rows + 1, columns]])

    def points(self) -> np.ndarray:
        """Where it shows all that it does: at its corners, beside and between them, and everywhere else."""
        corners = self.corners()
        numbers = {number for curve in self.parts() for number in curve.turns}
        beside = np.outer(corners, 1 + _ASIDE).reshape(-1)
        points = np.concatenate([_EVERYWHERE, beside, (corners[1:] + corners[:-1]) / 2, sorted(numbers)])
        with np.errstate(all="ignore"):
            single = np.unique(points.astype(np.float32)).astype(np.float64)
        return single[np.isfinite(single)]


# The earlier value itself.
ITSELF = Curve(None)
Known = Callable[[np.ndarray], np.ndarray]


def same(first: np.ndarray, second: np.ndarray, tolerance: float = TOLERANCE, points: np.ndarray = POINTS) -> bool:
    """Whether two functions agree at all of these points. tolerance: of values up to 1, of the largest if that is less,
    and relative."""
    if not np.isfinite(first).all():
        return False
    difference, size = np.abs(first - second), np.abs(second)
    near, zero = np.abs(points) <= _NEAR, size <= _ZERO
    least = min(1.0, float(size.max(initial=0.0)))
    ends = _EXP_ENDS * np.abs(points)
    return bool(
        np.all(difference <= tolerance * (least + size) + ends)
        and np.all(difference[near] <= 0.1 * size[near] + _ROUNDED * tolerance)
        and np.all((np.abs(first) <= _VANISHING + ends)[zero])
    )


def agree(curve: Curve, known: Known, tolerance: float = TOLERANCE) -> bool:
    """Whether a curve is a function wherever float32 holds what it computes. Both agree at `POINTS`."""
    points = curve.points()
    with np.errstate(all="ignore"):
        values, others = np.asarray(curve(points), np.float64), np.asarray(known(points), np.float64)
        held = np.abs(values) <= _LARGEST
    return same(values[held], others[held], tolerance, points[held])


def identify(curve: Curve, tolerance: float = TOLERANCE) -> tuple[str, Mapping[str, Any]] | None:
    """The kind of step (and its attributes) that computes this; "" for the operand itself."""
    if curve.values.dtype == bool or not np.isfinite(curve.values).all():
        return None
    for kind, attributes, known, values in _candidates(curve.values):
        if same(curve.values, values, tolerance) and agree(curve, known, tolerance):
            return kind, attributes
    return None


Candidate = tuple[str, Mapping[str, Any], Known, np.ndarray]


def _known(kind: str, attributes: Mapping[str, Any]) -> Candidate:
    function = FUNCTIONS[kind]
    parameters = function.of_step(attributes).values()

    def values(points: np.ndarray) -> np.ndarray:
        return np.asarray(function(NUMPY, points, *parameters))

    with np.errstate(all="ignore"):
        return kind, attributes, values, values(POINTS)


_KNOWN: list[Candidate] = [
    ("", {}, ITSELF, POINTS),
    *(_known(function.name, dict(attributes)) for function in FUNCTIONS.values() for attributes in function.recognized),
]


def _candidates(samples: np.ndarray) -> Iterator[Candidate]:
    """Functions that these may be values of, those with parameters last."""
    yield from _KNOWN
    low, high = float(samples[_LEFT]), float(samples[_RIGHT])
    if low < high and (low > POINTS[_LEFT] or high < POINTS[_RIGHT]):
        bounds = {"min": low if low > POINTS[_LEFT] else None, "max": high if high < POINTS[_RIGHT] else None}
        yield _known("clamp", bounds)
    slope, alpha = -float(samples[_MINUS_ONE]), -low
    yield _known("leaky_relu", {"slope": slope})
    for input_scale in (1.0, 1.0 / alpha) if alpha > 0 else (1.0,):
        yield _known("elu", {"alpha": alpha, "scale": 1.0, "input_scale": input_scale})
