# SPDX-License-Identifier: Apache-2.0
"""Rules as text that people read and edit: one line for each rule, the first that matches a layer decides it.

    # layer         bits    settings
    stem.conv       W8A16
    blocks.*        W4A8    ranges=learned
    *               W8A8

W8A16: 8-bit weights, 16-bit activations. Settings are `Rule`'s by name, if they are not its defaults. A name with
spaces is written in quotes; what follows # is a comment.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from .rules import Rule, checked_rules

_BITS = re.compile(r"W(\d+)A(\d+)", re.IGNORECASE | re.ASCII)
_NAMED = ("match", "weight_bits", "activation_bits")
# The settings by name with their defaults, whose types determine how they are parsed.
_SETTINGS = {field.name: field.default for field in fields(Rule) if field.name not in _NAMED}
_TRUTHS = {"true": True, "false": False}


def rules_text(rules: Rule | Iterable[Rule], comment: str = "") -> str:
    """The text of rules, which `parse_rules` can read.

    Args:
        comment: lines written above them.
    """
    rows = [("# layer", "bits", "")]
    for rule in checked_rules(rules):
        settings = [
            f"{name}={_written(getattr(rule, name))}"
            for name, default in _SETTINGS.items()
            if getattr(rule, name) != default
        ]
        rows.append((shlex.quote(rule.match) if _needs_quotes(rule.match) else rule.match,
                     f"W{rule.weight_bits}A{rule.activation_bits}", " ".join(settings)))  # fmt: skip
    widths = [max(len(row[at]) for row in rows) for at in (0, 1)]
    lines = [f"{layer:<{widths[0]}}  {bits:<{widths[1]}}  {settings}".rstrip() for layer, bits, settings in rows]
    return "\n".join([*(f"# {line}".rstrip() for line in comment.splitlines()), *lines]) + "\n"


def parse_rules(text: str, where: str = "rules") -> tuple[Rule, ...]:
    """The rules of a text such as `rules_text` writes.

    Args:
        where: what errors call the text.

    Raises:
        ValueError: a line is not a rule; it is named by its number.
    """
    rules = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
            if words:
                rules.append(_rule(words))
        except ValueError as error:
            raise ValueError(f"{where}, line {number}: {error}") from error
    if not rules:
        raise ValueError(f"{where}: there is no rule in it; a line is such as: * W8A8")
    return tuple(rules)


def save_rules(rules: Rule | Iterable[Rule], path: str | Path, comment: str = "") -> Path:
    """Writes rules to a text file; see `rules_text`."""
    path = Path(path)
    path.write_text(rules_text(rules, comment), encoding="utf-8")
    return path


def load_rules(path: str | Path) -> tuple[Rule, ...]:
    """Reads rules from a text file that `save_rules`, `tune.plan` or a person has written.

    Raises:
        OSError: there is no such file.
        ValueError: a line is not a rule; it is named by its number.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8") from error
    return parse_rules(text, str(path))


def _needs_quotes(name: str) -> bool:
    return not name or bool(re.search(r"[\s\"'\\#]", name))


def _rule(words: list[str]) -> Rule:
    layer, *rest = words
    bits = _BITS.fullmatch(rest[0]) if rest else None
    if bits is None:
        text = repr(rest[0]) if rest else "nothing"
        raise ValueError(f"the bits of {layer!r} must be such as W8A8 or W4A16, got {text}")
    settings: dict[str, Any] = {}
    for word in rest[1:]:
        name, equals, value = word.partition("=")
        if not equals or name not in _SETTINGS:
            raise ValueError(f"a setting must be NAME=VALUE with one of {', '.join(_SETTINGS)}, got {word!r}")
        settings[name] = _read(name, value)
    return Rule(layer, int(bits[1]), int(bits[2]), **settings)


def _written(value: object) -> str:
    return ",".join(map(repr, value)) if isinstance(value, tuple) else str(value)


def _read(name: str, value: str) -> Any:
    default = _SETTINGS[name]
    if isinstance(default, str):
        return value
    if isinstance(default, bool):
        if value.lower() not in _TRUTHS:
            raise ValueError(f"{name} must be true or false, got {value!r}")
        return _TRUTHS[value.lower()]
    try:
        numbers = tuple(float(number) for number in value.split(","))
    except ValueError:
        numbers = ()
    wanted = 2 if name == "fixed_range" else 1
    if len(numbers) != wanted:
        raise ValueError(f"{name} must be {'MIN,MAX' if wanted == 2 else 'a number'}, got {value!r}")
    return numbers if wanted == 2 else numbers[0]
