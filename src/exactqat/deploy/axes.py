# SPDX-License-Identifier: Apache-2.0
"""The order of axes: how the user's order becomes the device's, and what a permutation or a reshape keeps together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..kit.device.operator import Layout

# A factor that no size has, for the batch axis: sizes alone do not distinguish it.
_BATCH = 1_000_003


def on_device(values: np.ndarray, layout: Layout) -> np.ndarray:
    """Converts an array from the user's axis order to the device's."""
    present = [axis for axis in layout.axes if axis >= 0]
    turned = np.transpose(values, present)
    units = tuple(position for position, axis in enumerate(layout.axes) if axis < 0)
    expanded = np.expand_dims(turned, units)
    return expanded if layout.order is None else expanded[..., list(layout.order)]


def neighbours_grouped(permutation: Sequence[int]) -> list[list[int]]:
    """The axes in their new order, neighbours that stay neighbours in one group; the batch by itself."""
    groups: list[list[int]] = []
    for place, axis in enumerate(permutation):
        if place > 1 and axis == permutation[place - 1] + 1 and axis > 1:
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return groups


def split_at(axes: Sequence[int], rank: int) -> list[list[int]]:
    """All axes in order, those between `axes` in one group; the batch, of any number of rows, by itself."""
    groups: list[list[int]] = []
    for axis in range(rank):
        if axis > 1 and axis not in axes and axis - 1 not in axes:
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return groups


def without_units(axes: Sequence[int], shape: Sequence[int], batch_axis: int = -1) -> list[int]:
    return [axis for axis in axes if axis >= 0 and (shape[axis] != 1 or axis == batch_axis)]


def without(layout: Layout, removed: Sequence[int]) -> Layout:
    """The layout of a result that lacks some of the operand's axes."""
    kept = [axis for axis in layout.axes if axis not in removed]
    return Layout(tuple(axis - sum(gone < axis for gone in removed) for axis in kept))


def restricted(layout: Layout, rank: int, own_rank: int) -> Layout:
    """A result's layout for an operand with fewer axes, which are the result's last ones."""
    shift = rank - own_rank
    return Layout(tuple(axis - shift if axis >= shift else -1 for axis in layout.axes))


def with_last(layout: Layout, rank: int, last: tuple[int, ...]) -> Layout:
    """The layout with some axes moved to its end, and without axes that the user does not have."""
    rest = [axis for axis in layout.axes if axis >= 0 and axis not in last]
    missing = [axis for axis in range(rank) if axis not in rest and axis not in last]
    return Layout((*rest, *missing, *last))


def reshape_groups(
    before: Sequence[int], batch_before: int, after: Sequence[int], batch_after: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The smallest runs of neighbouring axes that a reshape maps to each other; axes of size 1 are left out."""

    def sizes(shape: Sequence[int], batch: int) -> list[tuple[int, int]]:
        marked = [(axis, size * _BATCH if axis == batch else size) for axis, size in enumerate(shape)]
        return [(axis, size) for axis, size in marked if size != 1]

    old, new = sizes(before, batch_before), sizes(after, batch_after)
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        first, second = [old[i]], [new[j]]
        i, j = i + 1, j + 1
        left, right = first[0][1], second[0][1]
        while left != right:
            if left < right:
                first.append(old[i])
                left, i = left * old[i][1], i + 1
            else:
                second.append(new[j])
                right, j = right * new[j][1], j + 1
        groups.append((tuple(axis for axis, _ in first), tuple(axis for axis, _ in second)))
    return groups
