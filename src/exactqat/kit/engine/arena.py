# SPDX-License-Identifier: Apache-2.0
"""Memory for the results of a network's operators, reused once nothing reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Bytes; a cache line.
LINE = 64


def lifetimes(steps: Sequence[tuple[Sequence[str], Sequence[str]]], kept: Sequence[str]) -> dict[str, tuple[int, int]]:
    """First and last step in which a tensor is needed: written, and read for the last time.

    steps: names of the operands and of the results of each. kept: read after the last step.
    """
    alive: dict[str, tuple[int, int]] = {}
    for number, (operands, results) in enumerate(steps):
        for name in operands:
            if name in alive:
                alive[name] = (alive[name][0], number)
        alive |= dict.fromkeys(results, (number, number))
    return {name: (first, len(steps) if name in kept else last) for name, (first, last) in alive.items()}


def places(sizes: Mapping[str, int], alive: Mapping[str, tuple[int, int]]) -> tuple[dict[str, int], int]:
    """Each tensor's offset, from its bytes, and the total bytes: the largest first, each in the lowest gap that fits it
    among those alive at the same time."""
    taken: list[tuple[int, int, str]] = []
    result: dict[str, int] = {}
    for name in sorted(sizes, key=lambda tensor: (-sizes[tensor], alive[tensor])):
        size = -(-sizes[name] // LINE) * LINE
        first, last = alive[name]
        offset = 0
        for start, end, other in sorted(taken):
            if alive[other][1] < first or alive[other][0] > last:
                continue
            if offset + size <= start:
                break
            offset = max(offset, end)
        result[name] = offset
        taken.append((offset, offset + size, name))
    return result, max((end for _, end, _ in taken), default=0)
