# SPDX-License-Identifier: Apache-2.0
"""How far a long computation has come, and what is left."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

# Called with what has been done, all there is to do, and the seconds that are left.
Progress = Callable[[float, float, float], None]
BAR, PAUSE = 24, 0.2
# Seconds until the first line in a log, which is no terminal, and between lines there.
LOG_PAUSE = 30.0
# Seconds after which what usually takes a moment says how far it is.
AWHILE = 2.0


class Clock:
    """Counts work, and says what is left at the pace so far.

    Work is counted in steps of any unit, such as multiply-adds.
    """

    def __init__(self, title: str, total: float, progress: Progress | bool | None, after: float = 0.0) -> None:
        """progress: who is informed; True: a line on standard error that is written over; None: likewise on a terminal,
        and in a log a line from time to time. after: seconds without that line."""
        self._in_log = progress is None and not (sys.stderr is not None and sys.stderr.isatty())
        if progress is None:
            progress, after = sys.stderr is not None, max(after, LOG_PAUSE if self._in_log else 0.0)
        self._title, self._total, self._done = title, max(total, 1e-12), 0.0
        self._began, self._shown, self._after = time.monotonic(), 0.0, after
        self._tell: Progress | None = (self._line if progress else None) if isinstance(progress, bool) else progress

    @classmethod
    def counting(cls, title: str, progress: bool | None) -> Callable[[int, int], None]:
        """What takes how many of how many parts are done (0: unknown); what usually takes a moment is shown if
        it takes longer."""
        clock = cls(title, 1, progress, AWHILE if progress is None else 0.0)

        def at(done: int, total: int) -> None:
            clock._total = total or math.inf
            clock.did(done - clock._done)

        return at

    def did(self, work: float, left: float | None = None) -> None:
        """So much more is done. left: how much is still to do, as far as that is known by now."""
        self._done += work
        if left is not None:
            self._total = max(self._done + left, 1e-12)
        if self._tell is not None:
            spent = time.monotonic() - self._began
            self._tell(self._done, self._total, spent / max(self._done, 1e-12) * max(self._total - self._done, 0))

    def _line(self, done: float, total: float, left: float) -> None:
        now, finished = time.monotonic(), done >= total * (1 - 1e-9)
        pause = LOG_PAUSE if self._in_log else PAUSE
        if now - self._shown < pause and not finished or now - self._began < self._after:
            return
        self._shown = now
        if self._in_log:
            share = f"{done:,.0f} done" if total == math.inf else f"{done / total:.0%}, {_duration(left)} left"
            print(f"{self._title}: {share}, {_duration(now - self._began)} so far", file=sys.stderr, flush=True)
            return
        if total == math.inf:
            print(f"\r{self._title}: {done:,.0f} done, {now - self._began:.0f} s", end="", file=sys.stderr, flush=True)
            return
        full = min(BAR, int(BAR * done / total))
        words = f"{now - self._began:.0f} s" if finished else f"{_duration(left)} left"
        end = "\n" if finished else ""
        print(f"\r{self._title} [{'#' * full}{'.' * (BAR - full)}] {words:<12}", end=end, file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
