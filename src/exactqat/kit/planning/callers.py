# SPDX-License-Identifier: Apache-2.0
"""Finds where in the user's program a call came from."""

from __future__ import annotations

import os
import sys

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


def users_line() -> int:
    """The `stacklevel` with which a warning names the user's line, however many of this package's functions are in
    between."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level


__all__ = ["users_line"]
