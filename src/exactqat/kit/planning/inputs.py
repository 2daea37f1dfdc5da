# SPDX-License-Identifier: Apache-2.0
"""Checks that a network's inputs are what it was prepared for, with messages in the user's own sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .plans import PlanInput

Shape = tuple[Any, ...]


def require_input(port: PlanInput, shape: Shape, dtype: object, real: bool) -> None:
    """Raises if an array is not a batch of what a network was prepared for: any number of examples, all else equal.

    It runs at each call of a prepared model, and on a tracer's shape.

    Args:
        shape: None is a size not yet known.
        dtype: the array's, for the message.
        real: whether it holds real numbers.

    Raises:
        ValueError: the shape differs.
        TypeError: it does not hold real numbers; a network traced in float32 would compute something else.
    """
    wanted, axis = port.shape, port.batch_axis
    if shape[axis + 1 :] != wanted[axis + 1 :] or shape[:axis] != wanted[:axis] or len(shape) != len(wanted):
        known = tuple(own if size is None else size for size, own in zip(shape, wanted, strict=False))
        if len(shape) != len(wanted) or known[:axis] != wanted[:axis] or known[axis + 1 :] != wanted[axis + 1 :]:
            raise ValueError(_misfit(port, shape))
    elif wanted[axis] != 1 and shape[axis] is not None and shape[axis] % wanted[axis]:
        raise ValueError(_misfit(port, shape))
    if real and port.rows:
        raise TypeError(f"{port.name or port.path} must contain integers, which choose rows of a table, got {dtype}")
    if not real and port.floating and not port.rows:
        raise TypeError(
            f"{port.name or port.path} must contain real numbers, like the example, got {dtype}; convert it to float32"
        )


def require_examples(port: PlanInput, shape: Shape) -> None:
    """Raises ValueError if a batch holds nothing for ranges or statistics to follow."""
    if shape[port.batch_axis] == 0:
        raise ValueError(
            f"{port.name or port.path} has no examples, got shape {list(shape)}; ranges and statistics need at least "
            "one in training and calibration: leave this batch out"
        )


def require_rows(port: PlanInput, lowest: int, highest: int) -> None:
    """Raises ValueError if indices are outside their table.

    Args:
        lowest, highest: of the given indices.
    """
    if lowest < 0 or highest >= port.rows:
        outside = lowest if lowest < 0 else highest
        raise ValueError(
            f"{port.name or port.path} must contain integers in 0..{port.rows - 1}, the rows of the table that they "
            f"choose from, got {outside}"
        )


def _misfit(port: PlanInput, shape: Shape) -> str:
    wanted, axis = port.shape, port.batch_axis
    rows = "batch" if wanted[axis] == 1 else f"{wanted[axis]} * batch"
    words = ", ".join(rows if at == axis else str(size) for at, size in enumerate(wanted))
    examples = wanted[:axis] + wanted[axis + 1 :]
    orders = {tuple(shape[at] for at in order): order for order in _orders(len(shape))}
    # The shape that has the wanted sizes and the given number of examples.
    turned = (shape[0], *wanted[1:]) if axis == 0 and len(shape) == len(wanted) else None
    if shape == examples:
        remedy = "it has no batch axis: pass one example as a batch of one"
    elif turned in orders:
        remedy = f"its axes are in another order: transpose it with {list(orders[turned])}"
    else:
        remedy = "sizes are fixed on a device: prepare the model again with an example of that size"
    what = f"{port.name or port.path} must have shape [{words}], as the network was prepared for"
    return f"{what}, got {list(shape)}; {remedy}"


def _orders(rank: int) -> list[tuple[int, ...]]:
    """To channels first and to channels last."""
    return [(0, rank - 1, *range(1, rank - 1)), (0, *range(2, rank), 1)] if rank > 2 else []


def misfit_of_example(
    text: str, shapes: Mapping[str, Shape], accepts: Callable[[Callable[[Shape], Shape]], bool]
) -> str | None:
    """What is wrong with the example of a model that could not be traced, and how to fix it; None if nothing is wrong.

    Args:
        text: what the model says, in the example's sizes.
        shapes: the example's, by argument.
        accepts: whether the model takes the example with its shapes changed this way.
    """
    if accepts(lambda shape: (shape[0] + 1000, *shape[1:])):
        return None  # whatever it was, shapes are not to blame
    arguments = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
    what = f"the model does not accept the example, {arguments}"
    if accepts(lambda shape: (1, *shape)):
        return f"{what}: it has no batch axis, which comes first; pass a batch of one"
    if accepts(lambda shape: shape):
        return None
    for number, words in enumerate(("first, after the batch", "last")):
        if accepts(lambda shape, at=number: _moved(shape, at)):  # type: ignore[misc]
            return f"{what}: it expects its channels {words}; transpose it"
    return f"{what}: {text}; pass a batch of the shape that the model accepts"


def _moved(shape: Shape, at: int) -> Shape:
    orders = _orders(len(shape))
    return tuple(shape[axis] for axis in orders[at]) if orders else shape
