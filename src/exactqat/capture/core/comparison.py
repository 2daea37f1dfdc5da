# SPDX-License-Identifier: Apache-2.0
"""Two networks of one model side by side: of two sizes of the batch, or of training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any

from ...planning.network import Constant, Network, Step


class NotComparedWarning(UserWarning):
    """The self-check of `prepare` could not run the user's model in training or in evaluation."""


@dataclass(frozen=True)
class Difference:
    """Where two networks differ first: steps of each, None where it has none there; both None: in their results."""

    one: Step | None
    other: Step | None


def first_difference(
    one: Network,
    other: Network,
    same: Callable[[Any, Any], bool],
    same_constant: Callable[[Constant, Constant], bool],
    ignored: Container[str] = (),
    dropout: bool = True,
) -> Difference | None:
    """Where one network computes otherwise than another one, whatever their values are called; None: nowhere.

    Args:
        same: of two attributes or numbers.
        ignored: attributes that may differ.
        dropout: whether steps of training alone count.
    """
    renamed: dict[Any, Any] = dict(zip(one.inputs, other.inputs, strict=True))

    def same_operand(a: Any, b: Any) -> bool:
        if not isinstance(a, str) or not isinstance(b, str):
            return same(a, b)
        if a in one.values:
            return renamed.get(a) == b
        return b in other.constants and same_constant(one.constants[a], other.constants[b])

    def same_attributes(a: Step, b: Step) -> bool:
        first, second = ({k: v for k, v in step.attributes.items() if k not in ignored} for step in (a, b))
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)

    ours, our_source = _steps(one, dropout)
    theirs, their_source = _steps(other, dropout)
    for first, second in zip(ours, theirs, strict=False):
        alike = first.kind == second.kind and len(first.inputs) == len(second.inputs)
        alike = alike and one.values[first.output].shape == other.values[second.output].shape
        alike = alike and same_attributes(first, second)
        if not alike or not all(map(same_operand, first.inputs, second.inputs)):
            return Difference(first, second)
        renamed[first.output] = second.output
    if len(ours) != len(theirs):
        count = min(len(ours), len(theirs))
        return Difference(*(steps[count] if len(steps) > count else None for steps in (ours, theirs)))
    ends = [renamed.get(our_source.get(name, name)) for name in one.outputs]
    return None if ends == [their_source.get(name, name) for name in other.outputs] else Difference(None, None)


def _steps(network: Network, dropout: bool) -> tuple[list[Step], dict[str, str]]:
    """The steps that count, and what those that do not are given."""
    source: dict[str, str] = {}
    steps = []
    for step in network.steps:
        inputs = tuple(source.get(name, name) if isinstance(name, str) else name for name in step.inputs)
        if step.kind == "dropout" and not dropout:
            source[step.output] = str(inputs[0])
        else:
            steps.append(replace(step, inputs=inputs))
    return steps, source
