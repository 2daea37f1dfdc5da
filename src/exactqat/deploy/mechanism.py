# SPDX-License-Identifier: Apache-2.0
"""Why two devices compute different codes from the same operands.

A device is declared by the properties in which devices differ (`device.Profile`). So the mechanism is found, not
guessed: one device is given properties of the other, as few as make it compute the other's codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

import numpy as np

from ..kit.device import OPERATORS, Profile
from ..kit.device.operator import Call, is_wide
from ..kit.device.profile import MECHANISMS, profile_named
from .graph import Graph, Operator

# A result is halfway between two codes if it is closer to the midpoint than this share of itself; float64 holds 2**-53.
TIE = 2.0**-40


@dataclass(frozen=True)
class Mechanism:
    """What makes two devices differ in one operator.

    Attributes:
        properties: of `Profile`, in which they differ and which explain all codes; empty: none do.
        differing: how many codes were examined.
        ties: how many of them are exactly halfway between two codes before rounding; None: not known.
        sentence: all of it in words.
    """

    properties: tuple[str, ...]
    differing: int
    ties: int | None
    sentence: str


def mechanism_of(
    graph: Graph,
    operator: Operator,
    values: Mapping[str, np.ndarray],
    first: str | Profile,
    second: str | Profile,
) -> Mechanism | None:
    """Why the operator's results differ on two devices that have the same operands; None if they do not.

    Args:
        values: codes of the operands by tensor name.
    """
    declaration = OPERATORS[operator.kind]
    inputs, outputs = ([graph.tensors[name] for name in names] for names in (operator.inputs, operator.outputs))
    wide = is_wide(inputs, outputs[0])
    first, second = (profile_named(device).of(operator.kind, wide) for device in (first, second))
    codes = [values[tensor.name] if tensor.data is None else tensor.data for tensor in inputs]

    def computed(profile: Profile) -> tuple[np.ndarray, ...]:
        return declaration.all_results(Call(codes, inputs, outputs, operator.attributes, profile))

    ours, theirs = computed(first), computed(second)
    where = [one != other for one, other in zip(ours, theirs, strict=True)]
    differing = sum(int(np.count_nonzero(mask)) for mask in where)
    if not differing:
        return None

    def explains(names: Sequence[str]) -> bool:
        try:
            mixed = computed(replace(first, **{name: getattr(second, name) for name in names}))
            return all(map(np.array_equal, mixed, theirs))
        except ValueError:  # no device is so
            return False

    # The fewest properties of the second device with which the first computes the same as the second.
    parted = [name for name in MECHANISMS if getattr(first, name) != getattr(second, name)]
    choices = chain.from_iterable(combinations(parted, count) for count in range(1, len(parted) + 1))
    properties = next(filter(explains, choices), ())
    ties = None
    steps = declaration.exact_steps(Call(codes, inputs, outputs, operator.attributes, first))
    if steps is not None:
        exact = np.abs(steps[where[0]])
        ties = int(np.count_nonzero(np.abs(exact % 1 - 0.5) <= TIE * np.maximum(exact, 1)))
    reasons = {**MECHANISMS, **declaration.mechanisms}
    words = []
    for name in properties:
        halves = f"{name}:ties"
        words.append(reasons[halves] if ties == differing and halves in reasons else reasons[name])
    text = "; and ".join(words) or "a mechanism that is not declared"
    if ties and ties < differing:
        text += f" ({ties:,} of {differing:,} lie exactly half way between two codes)"
    return Mechanism(properties, differing, ties, text)
