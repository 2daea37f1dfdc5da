# SPDX-License-Identifier: Apache-2.0
"""Random inputs, and those of many at which devices differ: simulating many is cheap beside running them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from itertools import combinations, islice

import numpy as np

from ..kit.device.operator import FLOAT, OPERATORS
from .graph import Graph
from .simulate import simulate

# The most codes that are drawn together.
MOST_TOGETHER = 1 << 20
# The most examples that are tried, and with how many multiply-accumulates of a device. What one in a thousand shows is
# missed three times in ten thousand by so many.
MOST_TRIED, MOST_WORK = 8192, 2_000_000_000


def random_codes(graph: Graph, numbers: Sequence[int], seed: int) -> dict[str, np.ndarray]:
    """The random examples of these numbers. Those of odd numbers stay near the zero points, where little saturates.
    None is negative where an operator that reads it refuses that."""
    refused = {step.inputs[0] for step in graph.operators if OPERATORS[step.kind].refuses_negative}
    tensors = {name: graph.tensors[name] for name in graph.inputs}
    size = max(1, sum(math.prod(tensor.shape) for tensor in tensors.values()))
    # Those of neighbouring numbers are drawn together, which is faster.
    together = max(1, min(64, MOST_TOGETHER // size))
    wanted = np.asarray(numbers, np.int64)
    codes = {name: np.empty((len(wanted), *tensor.shape[1:]), tensor.dtype) for name, tensor in tensors.items()}
    for group in np.unique(wanted // together):
        rng = np.random.default_rng((seed, int(group)))
        rows = np.flatnonzero(wanted // together == group)
        odd, places = wanted[rows] % 2 == 1, wanted[rows] % together
        for name, tensor in tensors.items():
            shape = (together, *tensor.shape[1:])
            if tensor.dtype == FLOAT:
                codes[name][rows] = rng.normal(size=shape)[places]
                continue
            low, high = graph.limits(name)
            zero_point = tensor.quantization.zero_point[0]
            low = zero_point if name in refused else low
            near = np.clip(np.array([low // 8, high // 8]) + zero_point, low, high)
            for ends, chosen in ((np.array([low, high]), ~odd), (near, odd)):
                drawn = rng.integers(ends[0], ends[1], shape, tensor.dtype, endpoint=True)
                codes[name][rows[chosen]] = drawn[places[chosen]]
    return codes


def tried_by_default(graph: Graph) -> int:
    """How many random examples are worth a second or so: 8,192, or as many as two billion multiply-accumulates of a
    device allow."""
    work = sum(graph.multiply_accumulates(operator) for operator in graph.operators)
    return max(1, min(MOST_TRIED, MOST_WORK // max(work, 1)))


def differing_examples(
    graph: Graph, examples: int, profiles: Sequence[str], seed: int, together: int, most: int, candidates: int
) -> list[int]:
    """Numbers of the random examples to run.

    First come those that show every result in which two devices differ, the ones with most of these first; then the
    first ones, to as many as are wanted.

    Args:
        examples: how many at least; one of four of them is not chosen, but among the first.
        profiles: the devices.
        together: how many examples are simulated at a time, at most.
        most: how many at most, whatever they show.
        candidates: how many are simulated to choose from, at least as many as examples.
    """
    names = [name for name in graph.results() if graph.tensors[name].dtype != FLOAT]
    differences: list[set[tuple[str, str, str]]] = []
    for tried in range(0, candidates, together):
        count = min(together, candidates - tried)
        batch, results = random_codes(graph, range(tried, tried + count), seed), {}
        differences += [set() for _ in range(count)]
        for profile in profiles:
            with contextlib.suppress(ValueError):  # it lacks an operator, or would not survive these codes
                results[profile] = simulate(graph, batch, profile, names, count, progress=False)
        for one, other in combinations(results, 2):
            for name in names:
                differ = (results[one][name] != results[other][name]).reshape(count, -1).any(axis=1)
                for at in np.flatnonzero(differ):
                    differences[tried + at].add((one, other, name))
    kept: list[int] = []
    missing = set().union(*differences)
    while missing and len(kept) < most:
        best = max(range(candidates), key=lambda number: len(differences[number] & missing))
        kept.append(best)
        missing -= differences[best]
    first = (number for number in range(candidates) if number not in kept)
    unchosen = min(most, max(examples, len(kept) + examples // 4)) - len(kept)
    return kept + [*islice(first, unchosen)]
