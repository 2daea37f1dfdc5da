# SPDX-License-Identifier: Apache-2.0
"""Where in the user's program a call came from, and which files are this package's."""

from __future__ import annotations

import os
import sys

# The folder of this package, whose files are nobody's model.
PACKAGE = os.path.join(os.path.dirname(os.path.abspath(sys.modules["exactqat"].__file__ or "")), "")


def users_line() -> int:
    """The `stacklevel` with which a warning names the user's line, however many of this package's functions are in
    between."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
