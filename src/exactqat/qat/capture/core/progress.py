# SPDX-License-Identifier: Apache-2.0
"""A line from time to time where something takes long.

It goes to the logger "exactqat" as information where a program has set up logging, otherwise to standard error if that
is a terminal.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds until the first line, and between lines.
AFTER, EVERY = 10.0, 30.0
_LOGGER = logging.getLogger("exactqat")


@contextmanager
def at_work(what: str) -> Iterator[None]:
    """While it lasts, says that `what` goes on, unless it is over soon."""
    # Standard error of now: who captures a model keeps frameworks from writing to it.
    finished, stream, began = threading.Event(), sys.stderr, time.monotonic()

    def speak() -> None:
        pause = AFTER
        while not finished.wait(pause):
            pause = EVERY
            line = f"{what}: {time.monotonic() - began:.0f} s so far"
            if _LOGGER.hasHandlers():
                _LOGGER.info(line)
            elif stream is not None and stream.isatty():
                print(f"exactqat: {line}", file=stream, flush=True)

    thread = threading.Thread(target=speak, daemon=True, name="exactqat progress")
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
