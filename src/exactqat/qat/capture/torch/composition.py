# SPDX-License-Identifier: Apache-2.0
"""Functions of one value that compare it: `torch.where(x > c, f(x), g(x))`, `x * (x > 0)`, masks of x on x itself.

Truth values have no step. What is computed of them is followed back to the one value that all of it comes from; it is
one step of that value, under the name of a known function if it computes one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ....kit.device.functions import COMBINATIONS, FUNCTIONS, instruction
from ....kit.device.primitives import NUMPY
from ..core.functions import ITSELF, POINTS, Curve, identify
from ..core.refusals import Refused
from ..core.sizes import Shape
from .items import Fixed, Item, Traced

COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")


@dataclass(frozen=True, eq=False)
class Formula:
    """What an item is computed by: a name of `COMBINATIONS` or `FUNCTIONS`, items and numbers, parameters."""

    name: str
    operands: tuple[Item | float, ...]
    parameters: tuple[Any, ...] = ()


class SeveralValues(Refused):
    """It is not a function of one value."""


def is_truth(operand: Any) -> bool:
    """Whether it is a comparison of values of the network, or made of such."""
    return is_composed(operand) and not operand.dtype.is_floating_point


def is_composed(operand: Any) -> bool:
    """Whether it is made of comparisons."""
    return isinstance(operand, Traced) and operand.formula is not None


def composed(c: Any, name: str, operands: Sequence[Any], attributes: Mapping[str, Any], shape: Shape) -> Traced:
    """The one step that computes a function of operands, which follow from comparisons of one value.

    Raises:
        SeveralValues: it depends on several values, or on more than numbers beside them.
    """
    target = formula(c, name, operands, attributes)
    order = {value: number for number, value in enumerate(c.values)}
    left = _values(c, target)
    found: list[tuple[str, Formula]] = []
    # The latest value first: nothing that is still looked at is computed from it.
    while len(left) > 1 or any(is_composed(each) for each in left.values()):
        latest = left.pop(max(left, key=order.__getitem__))
        made_by = latest.formula or _formula_that_made(c, latest)
        if made_by is None or latest.shape != shape:
            raise SeveralValues(_several(c, [latest, *left.values()]))
        found.append((latest.name, made_by))
        left.update(_values(c, made_by))
    (root,) = left.values()
    if root.shape != shape:
        raise SeveralValues(f"it repeats {_described(c, root)} of shape {list(c.for_one(root.shape))}")
    places, curves, instructions = {root.name: 0}, [ITSELF], []
    for place, (value, part) in enumerate([*reversed(found), ("", target)], 1):
        indices = [places[each.name] if isinstance(each, Traced) else each for each in part.operands]
        instructions.append((part.name, tuple(indices), part.parameters))
        given: list[Any] = [curves[index] if isinstance(index, int) else index for index in indices]
        turns = [parameter for parameter in part.parameters if isinstance(parameter, int | float)]
        curves.append(Curve(partial(_computed, part.name, part.parameters), given, turns))
        places[value] = place
    if (known := identify(curves[-1])) is not None:
        # The device knows it better than by a table.
        kind, recognised = known
        return c.emit(kind, [root], shape, **recognised) if kind else root
    return replace(c.emit("composition", [root], shape, instructions=tuple(instructions)), formula=target)


def formula(c: Any, name: str, operands: Sequence[Any], attributes: Mapping[str, Any] | None = None) -> Formula:
    """Of the operands of a step, fixed tensors among them."""
    given: list[Any] = [c.uniform(each) for each in operands]
    given = [each if isinstance(each, Traced | Fixed) else float(c.operand(each)) for each in given]
    if name == "div" and given[1] == 0:
        raise Refused("it divides by 0")
    infinite = [each for each in given if isinstance(each, float) and not math.isfinite(each)]
    if name not in COMPARISONS and infinite:
        raise Refused(f"it computes with {infinite[0]}; a number that the range of a tensor can hold is needed")
    return Formula(name, tuple(given), _parameters(attributes or {}))


def _values(c: Any, part: Formula) -> dict[str, Traced]:
    """What a formula depends on, by name."""
    fixed = next((each for each in part.operands if isinstance(each, Fixed)), None)
    if fixed is not None:
        raise SeveralValues(f"it is not a function of one value, but depends on {_described(c, fixed)} beside it")
    return {each.name: each for each in part.operands if isinstance(each, Traced)}


def _formula_that_made(c: Any, value: Traced) -> Formula | None:
    """What made a value, if that was value by value."""
    step, operands = c.step_of(value), c.operands_of.get(value.name, ())
    if step is None:
        return None
    if step.kind == "identity" and step.attributes.get("stop_gradient"):
        return formula(c, "stop_gradient", operands)
    known = step.kind in COMBINATIONS or step.kind in FUNCTIONS
    return formula(c, step.kind, operands, step.attributes) if known else None


def _parameters(attributes: Mapping[str, Any]) -> tuple[Any, ...]:
    """Attributes of a step as further arguments of its function: in the same order."""
    return tuple(value == "tanh" if isinstance(value, str) else value for value in attributes.values())


def _computed(name: str, parameters: Sequence[Any], *given: np.ndarray | float) -> np.ndarray:
    """One instruction of a composition."""
    return np.asarray(instruction(NUMPY, name, given, parameters, POINTS))


def _several(c: Any, values: Sequence[Traced]) -> str:
    named: dict[str, None] = {}
    pending: list[Any] = list(values)
    while pending:
        value = pending.pop(0)
        if getattr(value, "formula", None) is None:
            named[_described(c, value)] = None
        else:
            pending += [each for each in value.formula.operands if isinstance(each, Traced | Fixed)]
    return f"it is not a function of one value, but depends on {' and on '.join(named)}"


def _described(c: Any, item: Item) -> str:
    """A tensor in the words of who wrote the model."""
    if isinstance(item, Fixed):
        sources = c.sources(item)
        return repr(sources[0]) if sources else f"a constant of shape {list(c.for_one(item.shape))}"
    step = c.step_of(item)
    if step is None:
        return f"the input {item.name!r}"
    return f"the result of {step.label}" + (f" in {step.place.path!r}" if step.place.path else "")
