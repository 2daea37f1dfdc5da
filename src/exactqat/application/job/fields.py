# SPDX-License-Identifier: Apache-2.0
"""Fields of files that anyone may have written: checked one by one, and named if they are not what they should be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..report.text import shortened

# What a field must be, in words, and whether a value is that.
Kind = tuple[str, Callable[[Any], bool]]


def _number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 2**63


TEXT: Kind = ("a string", lambda value: type(value) is str)
OBJECT: Kind = ("an object", lambda value: isinstance(value, dict))
NUMBER: Kind = ("a number of at least 0", _number)
WHOLE: Kind = ("a whole number of at least 0", lambda value: type(value) is int and _number(value))
SHARE: Kind = ("a number from 0 to 1", lambda value: _number(value) and value <= 1)
FLAG: Kind = ("True or False", lambda value: type(value) is bool)
FLOAT: Kind = ("a number", lambda value: type(value) is float)
TEXTS: Kind = ("a list of strings", lambda value: isinstance(value, list) and all(type(text) is str for text in value))


def whole_to(low: int, high: int) -> Kind:
    return f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high


def optional(kind: Kind) -> Kind:
    """The same, or nothing."""
    return kind[0], lambda value: value is None or kind[1](value)


def check_fields(holder: Any, where: object, kinds: Mapping[str, Kind]) -> Mapping[str, Any]:
    """The object, if it has these fields; one that may be nothing may be missing.

    Args:
        where: it is, for messages.

    Raises:
        ValueError: names the field, what it must be, and what it holds.
    """
    if not isinstance(holder, Mapping):
        raise ValueError(f"{where} must be an object, got {shortened(repr(holder), 100)}")
    for name, (words, fits) in kinds.items():
        if name not in holder and not fits(None):
            raise ValueError(f"{where} has no field {name!r}")
        if not fits(holder.get(name)):
            raise ValueError(f"{where}: {name} must be {words}, got {shortened(repr(holder.get(name)), 100)}")
    return holder
