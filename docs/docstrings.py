# SPDX-License-Identifier: Apache-2.0
"""Docstrings as Markdown: the sections Args, Returns, Raises and Source, with names of operators turned into links."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Source")


class Entry(NamedTuple):
    """One entry of a section: the names it is about (none for running text) and what is said."""

    names: tuple[str, ...]
    text: str


class Docstring(NamedTuple):
    """A parsed docstring. `text` is everything before the first section, with paragraphs separated by empty lines."""

    text: str
    sections: dict[str, list[Entry]]

    @property
    def summary(self) -> str:
        return self.text.split("\n\n")[0]


def parse(documented: Any) -> Docstring:
    """The parts of an object's docstring. Raises ValueError if it has none."""
    lines = (inspect.getdoc(documented) or "").splitlines()
    if not lines:
        raise ValueError(f"{documented} has no docstring")
    text: list[str] = []
    sections: dict[str, list[str]] = {}
    current = text
    for line in lines:
        heading = re.match(rf"({'|'.join(SECTIONS)}):(?: (.*))?$", line)
        if heading:
            current = sections[heading[1]] = [f"    {heading[2]}"] if heading[2] else []
        else:
            current.append(line)
    return Docstring(_paragraphs(text), {name: _entries(body) for name, body in sections.items()})


def _paragraphs(lines: list[str]) -> str:
    return "\n\n".join(" ".join(part.split()) for part in "\n".join(lines).strip().split("\n\n"))


def _entries(lines: list[str]) -> list[Entry]:
    """`names: text` opens an entry; deeper lines continue it; other lines are running text."""
    entries: list[Entry] = []
    for line in lines:
        named = re.match(r"    (\w+(?:, \w+)*): (.*)", line)
        if named:
            entries.append(Entry(tuple(named[1].split(", ")), named[2]))
        elif line.strip():
            deeper = line.startswith(" " * 8)
            if entries and (deeper or not entries[-1].names):
                names, text = entries.pop()
                entries.append(Entry(names, f"{text} {line.strip()}"))
            else:
                entries.append(Entry((), line.strip()))
    return entries


def markdown(text: str, link: Callable[[str], str | None] = lambda name: None) -> str:
    """Text of a docstring as Markdown. `link` gives the address for text in backticks or for the name of a file under
    docs/, or None."""

    def code(match: re.Match[str]) -> str:
        address = link(match[1].removeprefix("raw_ops."))
        return f"[`{match[1]}`]({address})" if address else f"`{match[1]}`"

    def plain(part: str) -> str:
        part = re.sub(r"([\\*_<>\[\]])", r"\\\1", part)
        return re.sub(r"docs/[\w/-]+\.md", lambda m: f"[{m[0]}]({link(m[0])})" if link(m[0]) else m[0], part)

    parts = re.split(r"(`+[^`]+`+)", text)
    rendered = [re.sub(r"^`+([^`]+)`+$", code, part) if part.startswith("`") else plain(part) for part in parts]
    return "".join(rendered)


def table(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
