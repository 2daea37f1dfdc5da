# SPDX-License-Identifier: Apache-2.0
"""Masks that a network is given: truth values, or integers, with which it computes as with numbers.

Of frameworks whose operations are read as functions of items; which values hold nothing but 0 and 1, and which are
integers as they were given, the builder keeps (`truths`, `wholes`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....kit.planning.kinds import COMPARISONS
from ....kit.planning.masks import HIDES
from .builder import Fixed, ItemBuilder, Moving
from .refusals import Refused
from .sizes import Size

# What is added to a score that a mask hides, where the model adds minus infinity, or nearly so.
HIDDEN = -1e9
# The same comparison from the other side.
MIRRORED = {"eq": "eq", "ne": "ne", "gt": "lt", "ge": "le", "lt": "gt", "le": "ge"}


def is_truth(c: ItemBuilder[Fixed], item: object) -> bool:
    """Whether a value holds nothing but 0 and 1, as given or computed of what is given."""
    return isinstance(item, Moving) and item.name in c.truths


def is_given(c: ItemBuilder[Fixed], item: object) -> bool:
    """Whether it is integers that the network is given."""
    return isinstance(item, Moving) and item.name in c.wholes


def as_truth(c: ItemBuilder[Fixed], x: Moving) -> Moving | None:
    """1 where an integer is not 0, else 0; None if it is neither an integer nor a truth value."""
    if is_truth(c, x):
        return x
    return compared(c, "ne", x, 0.0, x.shape) if is_given(c, x) else None


def opposite(c: ItemBuilder[Fixed], x: Moving) -> Moving:
    return c.emit("sub", [1.0, x], x.shape, bool)


def compared(c: ItemBuilder[Fixed], how: str, left: object, right: object, shape: Sequence[Size]) -> Moving | None:
    """A comparison of what is given with numbers; None if it is another one."""
    if not isinstance(left, Moving):
        left, right, how = right, left, MIRRORED[how]
    numbers = c.numbers(right)
    if numbers is None or not isinstance(left, Moving) or not (is_truth(c, left) or is_given(c, left)):
        return None
    number = float(numbers.flat[0]) if numbers.size and (numbers == numbers.flat[0]).all() else None
    if is_truth(c, left):
        if number is None:
            return None
        of_zero, of_one = (bool(COMPARISONS[how](bit, number)) for bit in (0.0, 1.0))
        return None if of_zero == of_one else left if of_one else opposite(c, left)
    if number is not None:
        return c.emit("compare", [left, number], left.shape, bool, how=how)
    return c.emit("compare", [before_repeated(c, left), right], shape, bool, how=how)


def combined(c: ItemBuilder[Fixed], word: str, operands: Sequence[object], shape: Sequence[Size]) -> Moving | None:
    """Logic ("and", "or", "not") of masks, and of masks with fixed truth values; None if something else is among
    them."""
    moving = [as_truth(c, operand) for operand in operands if isinstance(operand, Moving)]
    fixed = [c.numbers(operand) for operand in operands if not isinstance(operand, Moving)]
    masks = [mask for mask in moving if mask is not None]
    if not masks or len(masks) < len(moving) or any(bits is None for bits in fixed) or word not in ("and", "or", "not"):
        return None
    if word == "not":
        return opposite(c, masks[0])
    truths = [(bits != 0).astype(np.float32) for bits in fixed if bits is not None]
    if word == "or":  # not (not a and not b)
        inverse = [*(opposite(c, mask) for mask in masks), *(c.fixed_of(1 - truth) for truth in truths)]
        both = combined(c, "and", inverse, shape)
        return None if both is None else opposite(c, both)
    if not truths:
        return c.emit("mul", masks, shape, bool)
    if truths[0].all():
        return spread(c, masks[0], shape)
    return c.emit("mul", [masks[0], c.fixed_of(truths[0])], shape, bool)


def arithmetic(c: ItemBuilder[Fixed], kind: str, operands: Sequence[object], shape: Sequence[Size]) -> Moving | None:
    """Products of masks, the least and the largest of them, which are logic; None if it is something else.

    Integers that are given beside a mask are one, too, in the least alone: masks are not negative.
    """
    word = {"mul": "and", "minimum": "and", "maximum": "or"}.get(kind)
    fixed = [None if isinstance(operand, Moving) else c.numbers(operand) for operand in operands]
    bits = [values is not None and bool(((values == 0) | (values == 1)).all()) for values in fixed]
    masks = [is_truth(c, operand) or held for operand, held in zip(operands, bits, strict=True)]
    wholes = [kind == "minimum" and is_given(c, operand) for operand in operands]
    if word is None or not any(masks) or not all(one or other for one, other in zip(masks, wholes, strict=True)):
        return None
    return combined(c, word, operands, shape)


def spread(c: ItemBuilder[Fixed], x: Moving, shape: Sequence[Size]) -> Moving:
    """A value repeated along axes, up to a shape (as traced)."""
    if x.shape == tuple(shape):
        return x
    x = c.reshape(x, (*[1] * (len(shape) - len(x.shape)), *x.shape))
    return x if x.shape == tuple(shape) else c.emit("expand", [x], shape, x.dtype, shape=c.for_one(shape))


def before_repeated(c: ItemBuilder[Fixed], x: Moving) -> Moving:
    """A mask before it was repeated along axes: what reads it repeats it as well."""
    step = c.made_by.get(x.name)
    if step is None or step.kind != "expand":
        return x
    source = c.items[str(step.inputs[0])]
    return before_repeated(c, source) if source.rank == x.rank else x


def hiding(c: ItemBuilder[Fixed], mask: Moving, number: float = HIDDEN) -> Moving:
    """`number`, which hides a score, where the mask is 0, and 0 elsewhere."""
    shown = before_repeated(c, mask)
    return c.emit("mul", [c.emit("sub", [1.0, shown], shown.shape), max(float(number), HIDDEN)], shown.shape)


def chosen(c: ItemBuilder[Fixed], mask: Moving, on: object, off: object, shape: Sequence[Size]) -> Moving:
    """`on` where the mask is 1, else `off`: items and numbers; of truth values it is one.

    shape: of the result, as traced.
    """
    if (number := _hides(c, on)) is not None:
        mask, on, off = opposite(c, mask), off, on
    number = _hides(c, off)
    if number is not None:
        added, shown = hiding(c, mask, number), before_repeated(c, mask)
        if _is_zero(c, on):
            return spread(c, added, shape)
        if shown.rank > 1 and shown.shape[-2] != 1:
            # A row may have nothing to show: then all of it is the number, not the scores less the number.
            on = c.emit("mul", [on, shown], shape)
        return c.emit("add", [on, added], shape)
    truths = all(is_truth(c, side) or _is_zero(c, side) for side in (on, off))
    parts = []
    for operand, opposed in ((on, False), (off, True)):
        if not _is_zero(c, operand):
            weight = c.emit("sub", [1.0, mask], mask.shape) if opposed else mask
            one = c.numbers(operand)
            parts.append(weight if one is not None and (one == 1).all() else c.emit("mul", [weight, operand], shape))
    if not parts:
        raise Refused("it chooses between 0 and 0")
    choice = spread(c, parts[0], shape) if len(parts) == 1 else c.emit("add", parts, shape)
    if truths:
        c.truths.add(choice.name)
    return choice


def _hides(c: ItemBuilder[Fixed], operand: object) -> float | None:
    """The number, so far below 0 that a score to which it is added counts no more; None if it is none."""
    values = c.numbers(operand)
    if values is None or not values.size or (values != values.flat[0]).any() or not values.flat[0] <= HIDES:
        return None
    return float(values.flat[0])


def _is_zero(c: ItemBuilder[Fixed], operand: object) -> bool:
    values = c.numbers(operand)
    return values is not None and not values.any()
