# SPDX-License-Identifier: Apache-2.0
"""Tensors of a frozen network: whole numbers on a grid, or real numbers off all of them."""

from __future__ import annotations

import numpy as np
from torch import Tensor


class OnGrid:
    """A stored tensor.

    Attributes:
        steps: whole numbers in float32, 0 for real 0; indices in int64.
        scale: the size of one step.
    """

    __slots__ = ("_real", "scale", "steps")

    def __init__(self, steps: Tensor, scale: np.float32) -> None:
        self.steps = steps
        self.scale = scale
        self._real: Tensor | None = None

    def real(self) -> Tensor:
        """The real numbers, in float32."""
        if self._real is None:
            self._real = self.steps * float(self.scale) if self.steps.is_floating_point() else self.steps
        return self._real


Value = OnGrid | Tensor  # a plain tensor is off all grids: training's noise, or NaN


def real(value: Value) -> Tensor:
    """Real numbers of a tensor on a grid or off all of them."""
    return value.real() if isinstance(value, OnGrid) else value


def taken(table: Tensor, index: Tensor) -> Tensor:
    """table[index], in the memory order of the index: as a vector it is many times faster."""
    order = sorted(range(index.dim()), key=lambda axis: (-index.stride()[axis], axis))
    turned = index.permute(order)
    return table.index_select(0, turned.reshape(-1)).reshape(turned.shape).permute(list(np.argsort(order)))


__all__ = ["OnGrid", "Value", "real", "taken"]
