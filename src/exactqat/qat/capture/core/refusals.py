# SPDX-License-Identifier: Apache-2.0
"""What cannot be captured. Planning lists all refused steps at once, with their places and what is supported."""

from __future__ import annotations

import re

# What colors text on a terminal.
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
MIXES = "it mixes the examples of a batch"
SIZE_OF_BATCH = (
    "it computes with the size of the batch, or with an example's place in it; take a number of your own, or compute "
    "it outside of the model"
)


def text_of(error: BaseException) -> str:
    """What an error of others says, for a message of ours."""
    return _COLORS.sub("", str(error)).strip()


def first_line(error: BaseException) -> str:
    return text_of(error).partition("\n")[0].rstrip()


class CaptureError(ValueError):
    """The model cannot be represented as a network; the message says why, where, and what to do."""


class Refused(Exception):
    """No kind of step says what one operation does; it becomes a step "unsupported" with this reason."""

    @staticmethod
    def argument(name: str, given: object, allowed: str) -> Refused:
        """An operation that is known, but not with this argument."""
        return Refused(f"{name}={given!r} is given, {allowed}")
