# SPDX-License-Identifier: Apache-2.0
"""A network's numbers, and what a run does with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ....kit.planning.plans import Grid
from .primitives import Array

ENDS = ("minimum", "maximum")

Tree = dict[str, dict[str, Array]]


@dataclass(frozen=True)
class Mode:
    """What a run does.

    Attributes:
        training: batch norms normalize with the batch's statistics, ranges follow the batch, dropout drops.
        frozen: the last phase of training: what the device computes, bit for bit in biases and factors.
        quantizing: off for the float network.
        observing: ranges watch the tensors that pass (calibration).
    """

    training: bool = False
    frozen: bool = False
    quantizing: bool = True
    observing: bool = False


@dataclass
class Arrays:
    """The numbers of a network; arrays of the framework's, by name.

    Attributes:
        tensors: the user's parameters and buffers, and constants computed elsewhere.
        learned: by grid, or by step for weights ("weights of <path>"): ``minimum`` and ``maximum`` if they are trained.
        ranges: by grid: ``minimum``, ``maximum`` (those that are not trained), ``batches``, and, for layers whose batch
            norm follows the batches, ``trained``, the number of those.
    """

    tensors: dict[str, Array] = field(default_factory=dict)
    learned: Tree = field(default_factory=dict)
    ranges: Tree = field(default_factory=dict)

    def map(self, function: Callable[[Array], Array]) -> Arrays:
        """What a function makes of every array."""
        learned, ranges = (
            {name: {end: function(array) for end, array in ends.items()} for name, ends in tree.items()}
            for tree in (self.learned, self.ranges)
        )
        return Arrays({name: function(array) for name, array in self.tensors.items()}, learned, ranges)

    def leaves(self) -> list[Array]:
        """All arrays, in a fixed order."""
        trees = (self.learned, self.ranges)
        return [*self.tensors.values(), *(array for tree in trees for ends in tree.values() for array in ends.values())]

    def taking_over(
        self, tensors: Mapping[str, Array], ranges: Mapping[str, tuple[Array, Array]], learned: Tree
    ) -> Arrays:
        """With other tensors, by name, other ranges of grids, and other learned ranges of weights.

        Raises:
            ValueError: there is no such tensor.
        """
        unknown = [name for name in tensors if name not in self.tensors]
        if unknown:
            raise ValueError(f"the network has no array {unknown[0]!r}")
        arrays = Arrays({**self.tensors, **tensors}, {**self.learned, **learned}, self.ranges).map(lambda array: array)
        for name, ends in ranges.items():
            for end, value in zip(ENDS, ends, strict=True):
                arrays.holder(name, end)[end] = value
        return arrays

    def holder(self, name: str, end: str) -> dict[str, Array]:
        """Where an end of a grid's range is: among the learned or the other ones."""
        learned = self.learned.get(name, {})
        return learned if end in learned else self.ranges[name]

    def end(self, name: str, end: str) -> Array:
        """An end of a grid's range."""
        return self.holder(name, end)[end]


def is_learned(grid: Grid, end: str) -> bool:
    """Whether an end of a range is trained, by gradients."""
    return grid.trained and not (end == "minimum" and grid.nonnegative)


def weights_of(path: str) -> str:
    """The name of a weight's learned range; path: of the first step that has it."""
    return f"weights of {path}"
