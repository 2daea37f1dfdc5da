# SPDX-License-Identifier: Apache-2.0
"""What a call costs before it computes anything: the time of one on eight values, in every framework."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

ROUNDS, SECONDS = 21, 0.01


def measure(calls: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Median and quartiles of each call's seconds; the calls take turns of about ten milliseconds."""
    counts = {}
    for name, call in calls.items():
        for _ in range(20):
            call()
        start = time.perf_counter()
        for _ in range(20):
            call()
        counts[name] = max(1, round(20 * SECONDS / (time.perf_counter() - start)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            repeats = range(counts[name])
            start = time.perf_counter()
            for _ in repeats:
                call()
            samples[name].append((time.perf_counter() - start) / counts[name])
    return {name: statistics.quantiles(taken, n=4, method="inclusive") for name, taken in samples.items()}
