# SPDX-License-Identifier: Apache-2.0
"""User-supplied names, and tables of them, made safe to display: on a terminal, in a page, in a notebook."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence

# Controls but the line's end, other ends of lines, surrogates, and marks that change the direction of what follows.
UNPRINTABLE = re.compile(
    "[\\x00-\\x09\\x0b-\\x1f\\x7f-\\x9f\\u2028\\u2029\\ud800-\\udfff\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]"
)
# Characters of a name in a repr or a cell, and rows of a notebook's table.
NAME_LENGTH, ROWS = 60, 200


def printable(text: object) -> str:
    """The text with escapes for anything that would control a terminal, hide existing text, or cannot be encoded.

    The latter are surrogates: bytes of a file name that are not UTF-8.
    """
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def on_one_line(text: object) -> str:
    """`printable`, with an escape for the line's end too."""
    return printable(text).replace("\n", "\\n")


def shortened(text: object, length: int = NAME_LENGTH) -> str:
    """On one line, with an ellipsis after the first `length` characters."""
    line = on_one_line(text)
    return line if len(line) <= length else line[: length - 1] + "…"


def listed(texts: Sequence[str], most: int = 3, length: int = NAME_LENGTH) -> str:
    """The first of them, each on one line of at most `length` characters, and how many more there are."""
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(shortened(text, length) for text in texts[:most]) + more


class Finding:
    """A result that people read: `str` is its text, `repr` says it in one line.

    It is true where it found what was asked for; a class whose results are neither good nor bad is no condition.
    """

    def text(self) -> str:
        """All of it in words."""
        raise NotImplementedError

    def in_short(self) -> str:
        """The most important of it, on one line."""
        return " ".join(self.text().split("\n", 1)[0].split())

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_short()})"

    def __bool__(self) -> bool:
        raise TypeError(f"a {type(self).__name__} is neither true nor false: ask for one of its attributes")


def aligned(rows: Iterable[Sequence[object]], texts: Collection[int]) -> list[str]:
    """A table's lines for a terminal, its columns as wide as necessary. texts: numbers of the columns that hold text;
    the others hold numbers."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    places = [str.ljust if column in texts else str.rjust for column in range(len(widths))]
    return [
        "  ".join(place(cell, width) for place, cell, width in zip(places, row, widths, strict=True)).rstrip()
        for row in cells
    ]


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]], texts: int) -> str:
    """HTML for a notebook, in its own colors, light or dark; everything is escaped.

    Args:
        texts: how many columns, the first ones, hold text; the others hold numbers. None is shown as a dash.
    """
    rows = list(rows)

    def line(cells: Sequence[object], tag: str) -> str:
        return "".join(
            f"<{tag} style='text-align:{'left' if column < texts else 'right'}'>"
            f"{'–' if cell is None else html.escape(shortened(cell))}</{tag}>"
            for column, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(cells, 'td')}</tr>" for cells in rows[:ROWS])
    more = f"<p>… and {len(rows) - ROWS:,} more</p>" if len(rows) > ROWS else ""
    return (
        f"<div style='overflow-x:auto'><p><b>{html.escape(printable(title))}</b></p><table><thead><tr>"
        f"{line(header, 'th')}</tr></thead><tbody>{body}</tbody></table>{more}</div>"
    )


def table_of(title: str, rows: Sequence[Mapping[str, object]], texts: int) -> str:
    """As `table`, of rows by column; columns without a value are left out."""
    names = [name for name in (rows[0] if rows else ()) if any(row[name] is not None for row in rows)]
    cells = [[_figure(row[name]) for name in names] for row in rows]
    return table(title, [name.replace("_", " ") for name in names], cells, texts)


def _figure(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else value


def shell_word(text: object) -> str:
    """One word for a POSIX shell or bash, which reads it as exactly this text and not as an option."""
    word = f"./{text}" if str(text).startswith("-") else str(text)
    if "\n" not in word and not UNPRINTABLE.search(word):
        return shlex.quote(word)
    # Bytes that no terminal shows: bash's and zsh's own notation. Surrogates stand for bytes of a file's name.
    own_bytes = all("\udc80" <= letter <= "\udcff" for letter in word if "\ud800" <= letter <= "\udfff")
    escaped = "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}"
        for byte in word.encode("utf-8", "surrogateescape" if own_bytes else "surrogatepass")
    )
    return f"$'{escaped}'"
