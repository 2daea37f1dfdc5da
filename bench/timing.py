# SPDX-License-Identifier: Apache-2.0
"""How a call is timed: turns of one contestant, pauses between them, and what is made of the samples.

A turn is untimed calls for about a millisecond and then timed ones for as long; its sample is their median. So every
contestant is measured in the state it is in when it is called again and again: its operands as near in the caches as
they fit (they are the same for every call), its threads awake, the memory of the last result free again. One untimed
call is not enough for that: of a gradient of three tensors of 2.4 MB the first calls after another contestant's took
634, 307, 197 and 178 us, and all later ones 177. Contestants take turns, so that what else happens on the machine meets
all of them.

Threads of a framework may spin for some milliseconds after a call, waiting for more, and would take a core from whoever
is next: PyTorch's do so for almost ten. `spinning` measures for how long, and when all contestants of a process have
had their turns in a round, a pause of that length follows. With it, two-threaded calls of exactqat took the same time
beside PyTorch as alone. What other programs do is watched by others.py.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

BURST_SECONDS, BURST_CALLS = 0.001, 20
# A call of this length neither gains from a warm start nor needs one, so its first call counts.
LONG = 0.02
# The turns a contestant gets, and when it has had enough of them.
TURNS, FEWEST_TURNS, ENOUGH_SECONDS = 7, 3, 0.1


def turn(call: Callable[[], Any]) -> float:
    """Seconds of a call: one sample."""
    warming = _burst(call)
    return warming[0] if warming[0] >= LONG else statistics.median(_burst(call))


def _burst(call: Callable[[], Any]) -> list[float]:
    """Seconds of each of the calls that fit into a burst; at least one."""
    samples: list[float] = []
    begun = time.perf_counter()
    while True:
        start = time.perf_counter()
        call()
        end = time.perf_counter()
        samples.append(end - start)
        if len(samples) == BURST_CALLS or end - begun >= BURST_SECONDS:
            return samples


def spinning(call: Callable[[], Any], longest: float = 0.1) -> float:
    """Seconds of processor time that this process still burns after a call, while nobody asks it to."""
    burned = []
    for _ in range(5):
        call()
        before = time.process_time()
        time.sleep(longest)
        burned.append(time.process_time() - before)
    return min(statistics.median(burned), longest)


class Statistics(NamedTuple):
    """Of the samples of one contestant, in seconds."""

    median: float
    low: float
    high: float
    samples: int

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a fraction of the median."""
        return (self.high - self.low) / 2 / self.median


def summarize(samples: Sequence[float]) -> Statistics:
    if len(samples) < 2:
        return Statistics(samples[0], samples[0], samples[0], len(samples))
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Statistics(median, low, high, len(samples))


Turns = dict[str, Callable[[], float]]


def race(groups: Sequence[tuple[Turns, float]], turns: int = TURNS) -> list[dict[str, Statistics]]:
    """Statistics of every contestant's turns, group by group.

    Args:
        groups: the contestants of each process, functions that take one turn and return its sample, and the seconds of
            the pause that follows them.
    """
    samples: list[dict[str, list[float]]] = [{name: [] for name in contestants} for contestants, _ in groups]
    spent = [dict.fromkeys(contestants, 0.0) for contestants, _ in groups]
    for number in range(turns):
        for (contestants, pause), taken, used in zip(groups, samples, spent, strict=True):
            due = [name for name in contestants if number < FEWEST_TURNS or used[name] < ENOUGH_SECONDS]
            for name in due:
                start = time.perf_counter()
                taken[name].append(contestants[name]())
                used[name] += time.perf_counter() - start
            if due:
                time.sleep(pause)
    return [{name: summarize(times) for name, times in taken.items()} for taken in samples]


def geometric_mean(ratios: Iterable[float]) -> float:
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(math.fsum(logarithms) / len(logarithms))
