# SPDX-License-Identifier: Apache-2.0
"""Products over any axes, as `dot_general` and `einsum` write them, from steps over the last ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from .builder import Either, Fixed, HasShape, ItemBuilder, Moving
from .refusals import MIXES, Refused

_OVER_THE_BATCH = "over the batch; every example is computed by itself"


def with_weight(
    c: ItemBuilder[Fixed],
    x: Moving,
    axes: Sequence[int],
    weight: Any,
    weight_axes: Sequence[int],
    module: str,
    bias: Fixed | None = None,
) -> Moving:
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
    product = c.emit("linear", [rows, matrix, bias], [*lead, shape[0]], module=module)
    return c.reshape(product, [*lead, *sizes])


def along(c: ItemBuilder[Fixed], x: Moving, axis: int, matrix: np.ndarray) -> Moving:
    """A product of fixed numbers [results, size] with an axis, which stays where it is."""
    product = with_weight(c, x, [axis], c.fixed_of(matrix.astype(np.float32)), [1], "")
    return c.permute(product, [*range(axis), x.rank - 1, *range(axis, x.rank - 1)])


def cumulative_sum(c: ItemBuilder[Fixed], x: Moving, axis: int, reverse: bool = False) -> Moving:
    """Sums along an axis up to each value, or from each value on, as a product with a triangle of ones."""
    if axis == c.batch_axis(x.shape):
        raise Refused(MIXES)
    ones = np.ones((x.shape[axis], x.shape[axis]))
    summed = along(c, x, axis, np.triu(ones) if reverse else np.tril(ones))
    if x.name in c.truths | c.wholes | c.counted:
        c.counted.add(summed.name)
    return summed


def of_two(
    c: ItemBuilder[Fixed],
    first: HasShape,
    second: HasShape,
    batched: tuple[Sequence[int], Sequence[int]],
    contracted: tuple[Sequence[int], Sequence[int]],
) -> Moving:
    """[axes of both, what is left of the first, what is left of the second]."""
    a, rows = _matrix(c, first, batched[0], contracted[0], last=True)
    b, columns = _matrix(c, second, batched[1], contracted[1], last=False)
    # The sizes as traced are those of a value.
    whole, axes = (first, batched[0]) if isinstance(first, Moving) else (second, batched[1])
    lead = [whole.shape[axis] for axis in axes]
    product = c.emit("matmul", [a, b], [*lead, math.prod(rows), math.prod(columns)])
    return c.reshape(product, [*lead, *rows, *columns])


def _matrix(
    c: ItemBuilder[Fixed], item: HasShape, batched: Sequence[int], contracted: Sequence[int], last: bool
) -> tuple[HasShape, list[int]]:
    """[batched, free, contracted] or [batched, contracted, free], and the sizes of the free axes."""
    batched, contracted = [int(axis) for axis in batched], [int(axis) for axis in contracted]
    if isinstance(item, Moving) and c.batch_axis(item.shape) not in batched:
        raise Refused(_OVER_THE_BATCH)
    free = [axis for axis in range(len(item.shape)) if axis not in (*batched, *contracted)]
    parts = (free, contracted) if last else (contracted, free)
    sizes = [math.prod(item.shape[axis] for axis in part) for part in parts]
    turned = c.permute(item, [*batched, *parts[0], *parts[1]])
    return c.reshape(turned, [*(item.shape[axis] for axis in batched), *sizes]), [item.shape[axis] for axis in free]


def einsum(
    c: ItemBuilder[Fixed],
    equation: str,
    operands: Sequence[Moving | Fixed],
    module_of: Callable[[Fixed], str] = lambda weight: "",
) -> Moving:
    """A product over letters, two operands after the other. module_of: the module of a weight."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    free = "".join(letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter not in equation)
    terms = []
    for term, item in zip(left.split(","), operands, strict=True):
        dots = len(item.shape) - len(term.replace("...", ""))
        terms.append(term.replace("...", free[len(free) - dots :]))
    letters = "".join(terms)
    lead = "".join(letter for letter in free if letter in letters)
    once = "".join(letter for letter in sorted(set(letters)) if letters.count(letter) == 1 and letter not in lead)
    result = result.replace("...", lead) if arrow else lead + once
    if any(len(set(term)) != len(term) for term in terms):
        raise Refused.argument("equation", equation, "each letter is allowed once in an operand (no diagonals)")
    # What depends on the input first.
    pairs = sorted(zip(operands, terms, strict=True), key=lambda pair: not isinstance(pair[0], Moving))
    (first, xs), *others = pairs
    x = cast(Moving, first)
    for at, (y, ys) in enumerate(others, 1):
        needed = set(result).union(*(term for _, term in pairs[at + 1 :]))
        x, xs = _contracted(
            c, *_summed(c, x, xs, needed | set(ys)), *_summed(c, y, ys, needed | set(xs)), needed, module_of
        )
    x, xs = _summed(c, x, xs, set(result))
    return c.permute(x, [xs.index(letter) for letter in result])


def _summed(c: ItemBuilder[Fixed], x: Either, letters: str, kept: set[str]) -> tuple[Either, str]:
    """Over all axes but these."""
    axes = tuple(axis for axis, letter in enumerate(letters) if letter not in kept)
    shape = [size for axis, size in enumerate(x.shape) if axis not in axes]
    if axes and not isinstance(x, Moving):
        x = cast(Either, c.then(cast(Fixed, x), shape, lambda array: array.sum(axes)))
    elif axes:
        x = cast(Either, c.emit("sum", [x], shape, axes=axes, keep_dims=False))
    return x, "".join(letter for letter in letters if letter in kept)


def _contracted(
    c: ItemBuilder[Fixed],
    x: Moving,
    xs: str,
    y: Moving | Fixed,
    ys: str,
    needed: set[str],
    module_of: Callable[[Fixed], str],
) -> tuple[Moving, str]:
    """What both have and somebody needs leads; what nobody needs is summed over."""
    both = [letter for letter in xs if letter in ys and letter in needed]
    if both and not isinstance(y, Moving) and (batch := xs[c.batch_axis(x.shape)]) not in ys:
        # The same for all examples.
        y, ys, both = c.reshape(y, (1, *y.shape)), batch + ys, [batch, *both]
    summed = [letter for letter in xs if letter in ys and letter not in both]
    names = [*both, *(letter for letter in xs + ys if (letter in xs) != (letter in ys))]
    axes, other_axes = ([term.index(letter) for letter in summed] for term in (xs, ys))
    if not both and not isinstance(y, Moving):
        return with_weight(c, x, axes, y, other_axes, module_of(y)), "".join(names)
    leads = [[term.index(letter) for letter in both] for term in (xs, ys)]
    return of_two(c, x, y, (leads[0], leads[1]), (axes, other_axes)), "".join(names)
