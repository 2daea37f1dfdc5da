# SPDX-License-Identifier: Apache-2.0
"""Random inputs, and those of many at which devices differ: simulating many is cheap beside running them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from ..kit.device.operator import FLOAT, OPERATORS
from .graph import Graph
from .simulate import simulate

# The most examples that are tried, and for how many seconds.
MOST_TRIED, MOST_SECONDS = 4096, 10.0


def random_codes(graph: Graph, numbers: Sequence[int], seed: int) -> dict[str, np.ndarray]:
    """The random examples of these numbers. Those of odd numbers stay near the zero points, where little saturates.
    None is negative where an operator that reads it refuses that."""
    refused = {step.inputs[0] for step in graph.operators if OPERATORS[step.kind].refuses_negative}
    tensors = {name: graph.tensors[name] for name in graph.inputs}
    codes = {name: np.empty((len(numbers), *tensor.shape[1:]), tensor.dtype) for name, tensor in tensors.items()}
    for at, number in enumerate(numbers):
        rng = np.random.default_rng((seed, number))
        for name, tensor in tensors.items():
            example = codes[name][at : at + 1]
            if tensor.dtype == FLOAT:
                example[:] = rng.normal(size=example.shape)
                continue
            ends = np.array(graph.limits(name))
            ends[0] = tensor.quantization.zero_point[0] if name in refused else ends[0]
            if number % 2:
                ends = np.clip(ends // 8 + tensor.quantization.zero_point[0], *ends)
            example[:] = rng.integers(ends[0], ends[1], example.shape, example.dtype, endpoint=True)
    return codes


def differing_examples(
    graph: Graph, examples: int, profiles: Sequence[str], seed: int, together: int
) -> tuple[list[int], int]:
    """Numbers of the random examples to run, and how many examples were simulated to choose them: 4,096, or fewer if
    these take ten seconds, but as many as are wanted.

    Three of four are those at which two devices differ in most results, beyond those in which they differ at the ones
    before; the others are the first ones.

    Args:
        profiles: the devices.
        together: how many examples are simulated at a time.
    """
    names = [name for name in graph.results() if graph.tensors[name].dtype != FLOAT]
    differences: list[set[tuple[str, str, str]]] = []
    tried, began = 0, time.monotonic()
    while tried < examples or (tried < MOST_TRIED and time.monotonic() - began < MOST_SECONDS):
        count = min(together, max(MOST_TRIED, examples) - tried)
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
        tried += count
    kept: list[int] = []
    shown: set[tuple[str, str, str]] = set()
    while len(kept) < examples - examples // 4:
        best = max(range(tried), key=lambda number: len(differences[number] - shown))
        if differences[best] <= shown:
            break
        kept.append(best)
        shown |= differences[best]
    first = [number for number in range(tried) if number not in kept]
    return kept + first[: examples - len(kept)], tried
