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

from ...device.functions import COMBINATIONS, FUNCTIONS, NumPyPrimitives, instruction
from ..core.functions import ITSELF, POINTS, Curve, identify
from ..core.refusals import Refused
from .contents import Content, Meta

COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")


@dataclass(frozen=True, eq=False)
class Formula:
    """What a content is computed by: a name of `COMBINATIONS` or `FUNCTIONS`, contents and numbers, parameters."""

    name: str
    operands: tuple[Content | float, ...]
    parameters: tuple[Any, ...] = ()


class SeveralValues(Refused):
    """It is no function of one value."""


def is_truth(operand: Any) -> bool:
    """Whether it is a comparison of values of the network, or made of such."""
    return isinstance(operand, Content) and operand.formula is not None and not operand.meta.dtype.is_floating_point


def is_composed(operand: Any) -> bool:
    """Whether it is made of comparisons."""
    return isinstance(operand, Content) and operand.formula is not None


def uniform(c: Any, operand: Any) -> Any:
    """The number that a fixed tensor holds everywhere, if no parameter can change it; else the operand."""
    if not isinstance(operand, Content) or operand.is_value or operand.noise or c.sources(operand):
        return operand
    values = c.data(operand)
    if not values.numel() or not bool((values == values.reshape(-1)[0]).all()):
        return operand
    return float(values.reshape(-1)[0])


def composed(c: Any, name: str, operands: Sequence[Any], attributes: Mapping[str, Any], meta: Meta) -> Content:
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
        if made_by is None or latest.shape != meta.shape:
            raise SeveralValues(_several(c, [latest, *left.values()]))
        found.append((latest.name, made_by))
        left.update(_values(c, made_by))
    (root,) = left.values()
    if root.shape != meta.shape:
        raise SeveralValues(f"it repeats {_described(c, root)} of shape {list(c.for_one(root.shape))}")
    numbers = {root.name: 0}
    instructions = []
    for number, (value, part) in enumerate([*reversed(found), ("", target)], 1):
        indices = [numbers[each.name] if isinstance(each, Content) else float(each) for each in part.operands]
        instructions.append((part.name, tuple(indices), part.parameters))
        numbers[value] = number
    made = _known(c, root, tuple(instructions), meta)
    if made is not None:
        return made
    return replace(c.emit("composition", [root], meta, instructions=tuple(instructions)), formula=target)


def formula(c: Any, name: str, operands: Sequence[Any], attributes: Mapping[str, Any] | None = None) -> Formula:
    """Of the operands of a step, fixed tensors among them."""
    given = [uniform(c, each) for each in operands]
    given = [each if isinstance(each, Content) else float(c.number(each)) for each in given]
    if name == "div" and given[1] == 0:
        raise Refused("it divides by 0")
    infinite = [each for each in given if isinstance(each, float) and not math.isfinite(each)]
    if name not in COMPARISONS and infinite:
        raise Refused(f"it computes with {infinite[0]}; a number that the range of a tensor can hold is needed")
    return Formula(name, tuple(given), _parameters(attributes or {}))


def _values(c: Any, part: Formula) -> dict[str, Content]:
    """What a formula depends on, by name."""
    found = {each.name: each for each in part.operands if isinstance(each, Content)}
    fixed = next((each for each in part.operands if isinstance(each, Content) and not each.is_value), None)
    if fixed is not None:
        raise SeveralValues(f"it is no function of one value, but depends on {_described(c, fixed)} beside it")
    return found


def _formula_that_made(c: Any, value: Content) -> Formula | None:
    """What made a value, if that was value by value."""
    if value.name not in c.producers:
        return None
    step, operands = c.producers[value.name]
    if step.kind == "identity" and step.attributes.get("stop_gradient"):
        return formula(c, "stop_gradient", operands)
    known = step.kind in COMBINATIONS or step.kind in FUNCTIONS
    return formula(c, step.kind, operands, step.attributes) if known else None


def _parameters(attributes: Mapping[str, Any]) -> tuple[Any, ...]:
    """Attributes of a step as further arguments of its function: in the same order."""
    return tuple(value == "tanh" if isinstance(value, str) else value for value in attributes.values())


def _known(c: Any, root: Content, instructions: tuple[Any, ...], meta: Meta) -> Content | None:
    """The step of a function that the device knows better than by a table."""
    curves = [ITSELF]
    for name, operands, parameters in instructions:
        given = [curves[each] if isinstance(each, int) else each for each in operands]
        numbers = [each for each in parameters if isinstance(each, int | float)]
        curves.append(Curve(partial(_computed, name, parameters), given, numbers))
    known = identify(curves[-1])
    if known is None:
        return None
    kind, attributes = known
    return c.emit(kind, [root], meta, **attributes) if kind else replace(root, meta=meta)


def _computed(name: str, parameters: Sequence[Any], *given: np.ndarray | float) -> np.ndarray:
    """One instruction of a composition."""
    return np.asarray(instruction(NumPyPrimitives, name, given, parameters, POINTS))


def _several(c: Any, values: Sequence[Content]) -> str:
    named: dict[str, None] = {}
    pending = list(values)
    while pending:
        value = pending.pop(0)
        if value.formula is None:
            named[_described(c, value)] = None
        else:
            pending += [each for each in value.formula.operands if isinstance(each, Content)]
    return f"it is no function of one value, but depends on {' and on '.join(named)}"


def _described(c: Any, content: Content) -> str:
    """A tensor in the words of who wrote the model."""
    if not content.is_value:
        sources = c.sources(content)
        return repr(sources[0]) if sources else f"a constant of shape {list(c.for_one(content.shape))}"
    if content.name not in c.producers:
        return f"the input {content.name!r}"
    step = c.producers[content.name][0]
    return f"the result of {step.label}" + (f" in {step.place.path!r}" if step.place.path else "")
