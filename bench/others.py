# SPDX-License-Identifier: Apache-2.0
"""Was anybody else computing? The cores' busy time, less that of the benchmark's own processes (Linux's /proc).

It matters more than noise usually does: frameworks whose threads wait for each other in a busy loop lose a whole time
slice of the scheduler in every call when somebody else has one of their cores, others hardly anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")


def _busy() -> float:
    """Seconds of all cores, what the hypervisor took away among them."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _, _, interrupts, soft, steal = fields
    return (user + nice + system + interrupts + soft + steal) / TICK


def _own(processes: Sequence[int]) -> float:
    # After the name, which may hold anything but ends with the last parenthesis, come fields 3 and on; 14 is utime.
    texts = [Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split() for process in processes]
    return sum(int(fields[11]) + int(fields[12]) for fields in texts) / TICK


class Watch:
    """From its making on; `share` is the number of cores that others kept busy, on average."""

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = [os.getpid(), *processes]
        self._start = time.monotonic(), _busy() - _own(self._processes)

    def share(self) -> float:
        elapsed = time.monotonic() - self._start[0]
        # Both counts go in ticks, so the difference may be off by some.
        return max(0.0, _busy() - _own(self._processes) - self._start[1] - 3 / TICK) / elapsed
