# SPDX-License-Identifier: Apache-2.0
"""Settings and names as a command line takes them."""

from __future__ import annotations

import shlex

from ...kit.display import UNPRINTABLE


def option_value(value: object) -> str:
    """A setting as its option takes it: several are separated by commas."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def option_of(name: str) -> str:
    """The option of `exactqat train` that decides a setting."""
    return "--" + name.replace("_", "-")


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
