# SPDX-License-Identifier: Apache-2.0
"""Functions of one value that compare it: `torch.where(x > c, f(x), g(x))`, `x * (x > 0)`, masks of x on x itself.

Truth values have no step. What is computed of them is a curve of the one value that all of it comes from; it is one
step of that value, under the name of a known function if it computes one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from ....kit.device.functions import COMBINATIONS, FUNCTIONS, instruction
from ....kit.device.primitives import NUMPY
from ..core.functions import POINTS, Curve, identify
from ..core.refusals import Refused
from ..core.sizes import Shape
from .items import Fixed, Item, Traced

if TYPE_CHECKING:
    from .converter import Converter

COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")
Operand = Item | float


class SeveralValues(Refused):
    """It is not a function of one value."""


def is_truth(operand: object) -> TypeGuard[Traced]:
    """Whether it is a comparison of values of the network, or made of such."""
    return isinstance(operand, Traced) and operand.comparison is not None


def is_composed(c: Converter, operand: object) -> bool:
    """Whether it is made of comparisons."""
    step = c.step_of(operand)
    return is_truth(operand) or (step is not None and step.kind == "composition")


def curves(
    c: Converter, name: str, operands: Sequence[Operand], attributes: Mapping[str, object] | None = None
) -> dict[str, Curve]:
    """What a function of `FUNCTIONS` or `COMBINATIONS` makes, by the values that it is a function of."""
    if name == "composition" or (name not in FUNCTIONS and name not in COMBINATIONS):
        return {}
    # Further arguments of the function, in the same order.
    parameters = tuple(value == "tanh" if isinstance(value, str) else value for value in (attributes or {}).values())
    return c.sampled([c.uniform(operand) for operand in operands], partial(_computed, name, parameters), parameters)


def _computed(name: str, parameters: Sequence[Any], *operands: np.ndarray | float) -> np.ndarray:
    """One instruction of a composition."""
    return np.asarray(instruction(NUMPY, name, operands, parameters, POINTS))


def composed(
    c: Converter, name: str, operands: Sequence[Operand], attributes: Mapping[str, object], shape: Shape
) -> Traced:
    """The one step that computes a function of operands, which follow from comparisons of one value.

    Raises:
        SeveralValues: it depends on several values, or on more than numbers beside them.
    """
    numbers = [number for operand in operands if isinstance(number := c.uniform(operand), int | float)]
    if name == "div" and c.uniform(operands[1]) == 0:
        raise Refused("it divides by 0")
    if infinite := [number for number in numbers if not math.isfinite(number)]:
        raise Refused(f"it computes with {infinite[0]}; a number that the range of a tensor can hold is needed")
    samples = curves(c, name, operands, attributes)
    samples = {root: curve for root, curve in samples.items() if c.items[root].shape == shape}
    if not samples:
        raise SeveralValues(_several(c, operands))
    name, curve = list(samples.items())[-1]
    root = c.items[name]
    assert isinstance(root, Traced)
    if (known := identify(curve)) is not None:
        # The device knows it better than by a table.
        kind, recognised = known
        return c.emit(kind, [root], shape, **recognised) if kind else root
    places, instructions = dict[Curve, int](), list[tuple[str, tuple[int | float, ...], tuple[Any, ...]]]()
    for part in curve.parts():
        if isinstance(part.operation, partial):
            indices = tuple(places[operand] if isinstance(operand, Curve) else operand for operand in part.operands)
            word, parameters = part.operation.args
            instructions.append((word, indices, parameters))
        places[part] = len(instructions)
    return replace(c.emit("composition", [root], shape, instructions=tuple(instructions)), samples=samples)


def _several(c: Converter, operands: Sequence[Operand]) -> str:
    """Why it is not a function of one value."""
    roots, pending = set[str](), list(operands)
    while pending:
        item = pending.pop()
        if isinstance(item, Traced) and is_composed(c, item):
            pending += c.operands_of[item.name] if item.comparison is None else item.comparison[1:]
        elif isinstance(item, Fixed) and isinstance(c.uniform(item), Fixed):
            sources = c.sources(item)
            word = repr(sources[0]) if sources else f"a constant of shape {list(c.for_one(item.shape))}"
            return f"it is not a function of one value, but depends on {word} beside it"
        elif isinstance(item, Traced):
            roots.add(next(iter(item.samples)))
    words = []
    for name in sorted(roots, key=list(c.values).index, reverse=True):
        step = c.made_by.get(name)
        place = f" in {step.place.path!r}" if step is not None and step.place.path else ""
        words.append(f"the input {name!r}" if step is None else f"the result of {step.label}{place}")
    return f"it is not a function of one value, but depends on {' and on '.join(words)}"
