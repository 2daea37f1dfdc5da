# SPDX-License-Identifier: Apache-2.0
"""Attributes of float steps: what each may be, and what it is where a step does not name it."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

REQUIRED: Any = object()
# By name; what the attributes of a kind hold, its declaration says.
Attributes = Mapping[str, Any]


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_)


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool | np.bool_)


def _are_integers(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is_integer, value))


TYPES: dict[str, Callable[[Any], bool]] = {
    "a number": _is_number,
    "an integer": _is_integer,
    "a boolean": lambda value: isinstance(value, bool | np.bool_),
    "a word": lambda value: isinstance(value, str),
    "integers": _are_integers,
    "pairs of integers": lambda value: all(_are_integers(pair) and len(pair) == 2 for pair in value),
    "numbers": lambda value: isinstance(value, Sequence) and all(map(_is_number, value)),
    "a sequence": lambda value: isinstance(value, Sequence) and not isinstance(value, str),
    "anything": lambda value: True,
}


@dataclass(frozen=True)
class Attribute:
    """What an attribute may be.

    Attributes:
        type: a key of `TYPES`.
        default: what it is where a step does not name it; `REQUIRED` where every step does.
        optional: it may be None.
        words: all that "a word" may be; empty: any.
    """

    type: str
    default: Any = REQUIRED
    optional: bool = False
    words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            raise ValueError(f"type must be one of {', '.join(TYPES)}, got {self.type!r}")

    def allows(self, value: object) -> bool:
        """Whether a step may have this value."""
        if value is None:
            return self.optional or self.type == "anything"
        try:
            return TYPES[self.type](value) and (not self.words or value in self.words)
        except TypeError:
            return False

    def __str__(self) -> str:
        allowed = f"one of {', '.join(self.words)}" if self.words else self.type
        return f"{allowed} or None" if self.optional else allowed


NUMBER = Attribute("a number")
