# SPDX-License-Identifier: Apache-2.0
"""What cannot be captured. Planning lists all refused steps at once, with their places and what is supported."""

from __future__ import annotations

import re

from ....kit.planning.refusals import Refused as Refused
from ....kit.planning.refusals import UnsupportedOperator

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


# The model cannot be represented as a network; the message says why, where, and what to do.
CaptureError = UnsupportedOperator
