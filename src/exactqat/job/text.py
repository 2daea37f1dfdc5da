# SPDX-License-Identifier: Apache-2.0
"""Names that others chose, such as paths and classes, as they may be shown: on a terminal, in a page, in a command."""

from __future__ import annotations

import os
import re
import shlex

# Controls but the line's end, other ends of lines, surrogates, and marks that change the direction of what follows.
UNPRINTABLE = re.compile(
    "[\\x00-\\x09\\x0b-\\x1f\\x7f-\\x9f\\u2028\\u2029\\ud800-\\udfff\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]"
)


def printable(text: object) -> str:
    """The text with escapes for what would command a terminal, hide what stands there, or cannot be encoded.

    The latter are surrogates: bytes of a file name that are no UTF-8.
    """
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def shortened(text: object, length: int) -> str:
    """On one line, with an ellipsis behind the first `length` characters."""
    line = printable(text).replace("\n", "\\n")
    return line if len(line) <= length else line[: length - 1] + "…"


def shell_word(text: object) -> str:
    """One word for a POSIX shell or bash, which reads it as exactly this text and as no option."""
    word = os.fspath(text) if isinstance(text, os.PathLike) else str(text)
    if word.startswith("-"):
        word = "./" + word
    if "\n" not in word and not UNPRINTABLE.search(word):
        return shlex.quote(word)
    # Bytes that no terminal shows: bash's and zsh's own notation.
    escaped = "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}"
        for byte in word.encode("utf-8", "surrogateescape" if _from_bytes(word) else "surrogatepass")
    )
    return f"$'{escaped}'"


def _from_bytes(word: str) -> bool:
    """Whether all surrogates stand for bytes of a file name."""
    return all("\udc80" <= character <= "\udcff" for character in word if "\ud800" <= character <= "\udfff")
