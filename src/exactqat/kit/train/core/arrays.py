# SPDX-License-Identifier: Apache-2.0
"""A network's numbers, and what a run does with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...planning.plans import Grid

ENDS = ("minimum", "maximum")

Tree = dict[str, dict[str, Any]]


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

    tensors: dict[str, Any] = field(default_factory=dict)
    learned: Tree = field(default_factory=dict)
    ranges: Tree = field(default_factory=dict)


def is_learned(grid: Grid, end: str) -> bool:
    """Whether an end of a range is trained, by gradients."""
    return grid.trained and not (end == "minimum" and grid.nonnegative)


def weights_of(path: str) -> str:
    """The name of a weight's learned range; path: of the first step that has it."""
    return f"weights of {path}"
