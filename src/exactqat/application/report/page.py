# SPDX-License-Identifier: Apache-2.0
"""Tables for pages and terminals, and single-file pages from the templates in `templates/`, light or dark by the
reader's preference, from a phone's screen up. Names from others are escaped."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...kit.display import printable, shortened

if TYPE_CHECKING:
    from jinja2 import Environment

# The colors of pages and charts, and what replaces each on a dark screen.
DARK = {
    "#1c2430": "#e8ebf0",  # ink
    "#5a6675": "#9aa7b6",  # side remarks
    "#e3e7ec": "#333c48",  # lines
    "#f6f7f9": "#12161c",  # the page's background
    "#ffffff": "#1b2129",  # paper
    "#eef4fb": "#1d3049",  # what is delivered
    "#fff6e5": "#3b2f14",  # warnings
    "#146c43": "#5fc795",
    "#b02a37": "#ff8a93",
    "#6b7280": "#a3acb9",
    "#f2b77c": "#c98f52",
    "#e08a3c": "#f0a356",
    "#6fa8dc": "#4f86b8",
    "#1f5fa8": "#7cb4f2",
}
INK, NOTE, LINE, BACKGROUND, PAPER, DELIVERED, WARNING, GOOD, BAD = list(DARK)[:9]
TICK, CROSS = "✓", "✗"


@dataclass(frozen=True)
class Cell:
    """A text of a table.

    Attributes:
        hover: what is shown next to the pointer.
        tone: "good" or "bad"; empty: neither.
        short: the text on a terminal, where columns are few; empty: the same.
    """

    text: str
    hover: str = ""
    tone: str = ""
    short: str = ""


@dataclass
class Table:
    """A table of a page or a terminal.

    Attributes:
        caption: what it shows.
        texts: how many of the first columns hold text; the others hold numbers.
        kind: a class of `style.css`: "dense" or "wrap".
        rows: whether a row is marked, and its cells.
    """

    caption: str
    header: Sequence[str]
    texts: int
    kind: str = ""
    rows: list[tuple[bool, list[Cell]]] = field(default_factory=list)

    def add(self, *cells: str | float | Cell | None, marked: bool = False) -> None:
        """A row: of texts, counts, shares (as percentages), and None for what there is not."""
        self.rows.append((marked, [cell if isinstance(cell, Cell) else Cell(_written(cell)) for cell in cells]))


def _written(value: str | float | None) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.1%}"


def differing(count: int | None, values: int | None) -> Cell:
    """How many of the compared integers differ, with a tick if none does; a dash if none was compared."""
    if count is None or not values:
        return Cell("–")
    text = f"{CROSS if count else TICK} {count:,} of {values:,}"
    return Cell(text, tone="bad" if count else "good", short=f"{count:,}")


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("exactqat.application.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Not what is HTML already.
        finalize=lambda value: printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )
    environment.filters |= {"percent": "{:.1%}".format, "count": "{:,}".format, "shortened": shortened}
    environment.globals |= {"palette": DARK, "TICK": TICK, "CROSS": CROSS}
    return environment


def render(template: str, **content: object) -> str:
    """A page.

    Args:
        template: a file in `templates/`.
        content: what it names. Strings are escaped; `markupsafe.Markup` is HTML.
    """
    return _environment().get_template(template).render(content)
