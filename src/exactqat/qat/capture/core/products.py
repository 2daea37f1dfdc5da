# SPDX-License-Identifier: Apache-2.0
"""Products over any axes, as `dot_general` and `einsum` write them, from steps over the last ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .builder import ItemBuilder, Moving
from .refusals import MIXES, Refused

_OVER_THE_BATCH = "over the batch; every example is computed by itself"


def with_weight(
    c: ItemBuilder[Any],
    x: Moving,
    axes: Sequence[int],
    weight: Any,
    weight_axes: Sequence[int],
    module: str,
    bias: Any = None,
) -> Any:
    """[what is left of x, what is left of the weight]. bias: one number for each entry of the latter, or None."""
    if c.batch_axis(x.shape) in axes:
        raise Refused(_OVER_THE_BATCH)
    kept = [axis for axis in range(x.rank) if axis not in axes]
    outputs = [axis for axis in range(len(weight.shape)) if axis not in weight_axes]
    sizes, lead = [weight.shape[axis] for axis in outputs], [x.shape[axis] for axis in kept]
    inputs, order = math.prod(x.shape[axis] for axis in axes), (*outputs, *(int(axis) for axis in weight_axes))
    shape = (math.prod(sizes), inputs)
    matrix = c.then(weight, shape, lambda array: array.transpose(order).reshape(shape))
    rows = c.reshape(c.permute(x, (*kept, *axes)), (*lead, inputs))
    made = c.emit("linear", [rows, matrix, bias], [*lead, shape[0]], module=module)
    return c.reshape(made, [*lead, *sizes])


def along(c: ItemBuilder[Any], x: Moving, axis: int, matrix: np.ndarray) -> Any:
    """A product of fixed numbers [results, size] with an axis, which stays where it is."""
    made = with_weight(c, x, [axis], c.fixed_of(matrix.astype(np.float32)), [1], "")
    return c.permute(made, [*range(axis), x.rank - 1, *range(axis, x.rank - 1)])


def cumulative_sum(c: ItemBuilder[Any], x: Moving, axis: int, reverse: bool = False) -> Any:
    """Sums along an axis up to each value, or from each value on, as a product with a triangle of ones."""
    if axis == c.batch_axis(x.shape):
        raise Refused(MIXES)
    ones = np.ones((x.shape[axis], x.shape[axis]))
    summed = along(c, x, axis, np.triu(ones) if reverse else np.tril(ones))
    if x.name in c.truths | c.wholes | c.counted:
        c.counted.add(summed.name)
    return summed


def of_two(
    c: ItemBuilder[Any],
    first: Any,
    second: Any,
    batched: tuple[Sequence[int], Sequence[int]],
    contracted: tuple[Sequence[int], Sequence[int]],
) -> Any:
    """[axes of both, what is left of the first, what is left of the second]."""
    a, rows = _matrix(c, first, batched[0], contracted[0], last=True)
    b, columns = _matrix(c, second, batched[1], contracted[1], last=False)
    # The sizes as traced are those of a value.
    whole, axes = (first, batched[0]) if isinstance(first, Moving) else (second, batched[1])
    lead = [whole.shape[axis] for axis in axes]
    made = c.emit("matmul", [a, b], [*lead, math.prod(rows), math.prod(columns)])
    return c.reshape(made, [*lead, *rows, *columns])


def _matrix(
    c: ItemBuilder[Any], item: Any, batched: Sequence[int], contracted: Sequence[int], last: bool
) -> tuple[Any, list[int]]:
    """[batched, free, contracted] or [batched, contracted, free], and the sizes of the free axes."""
    batched, contracted = [int(axis) for axis in batched], [int(axis) for axis in contracted]
    if isinstance(item, Moving) and c.batch_axis(item.shape) not in batched:
        raise Refused(_OVER_THE_BATCH)
    free = [axis for axis in range(len(item.shape)) if axis not in (*batched, *contracted)]
    parts = (free, contracted) if last else (contracted, free)
    sizes = [math.prod(item.shape[axis] for axis in part) for part in parts]
    turned = c.permute(item, [*batched, *parts[0], *parts[1]])
    return c.reshape(turned, [*(item.shape[axis] for axis in batched), *sizes]), [item.shape[axis] for axis in free]
