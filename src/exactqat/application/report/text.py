# SPDX-License-Identifier: Apache-2.0
"""Names chosen by others, such as paths and classes, in a form safe to show: on a terminal, in a page, in a command."""

from __future__ import annotations

import json
import os
import shlex

from ...kit.display import UNPRINTABLE, printable, shortened

__all__ = ["UNPRINTABLE", "option_of", "option_value", "printable", "shell_word", "shortened"]


def shell_word(text: object) -> str:
    """One word for a POSIX shell or bash, which reads it as exactly this text and not as an option."""
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


def option_value(value: object) -> str:
    """A setting as its option takes it: several are separated by commas, weights by name are JSON."""
    if isinstance(value, dict):
        return json.dumps(value)
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def option_of(setting: str) -> str:
    """The option of `exactqat train` that decides a setting."""
    return "--" + {"from_job": "from"}.get(setting, setting.replace("_", "-"))


def _from_bytes(word: str) -> bool:
    """Whether all surrogates stand for bytes of a file name."""
    return all("\udc80" <= character <= "\udcff" for character in word if "\ud800" <= character <= "\udfff")
