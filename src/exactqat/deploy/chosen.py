# SPDX-License-Identifier: Apache-2.0
"""Inputs that show where devices differ, in place of as many random ones.

Devices differ where a sum lies halfway between two codes, or beyond the last one. Which inputs bring sums there is not
known in advance; but simulating many is cheap, beside running them. So examples of several kinds are drawn, those that
bring something new are changed a little and tried again, and those that brought the most are run: another result in
which two devices differ, or codes that no result had before.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from ..kit.device import OPERATORS
from ..kit.device.operator import FLOAT
from ..kit.device.tensor import CODE_RANGES
from .graph import Graph
from .simulate import simulate

Codes = Mapping[str, np.ndarray]

# Examples at a time; draws without anything new after which the search ends; the most draws, and seconds of processor.
AT_ONCE, PATIENCE, MOST_DRAWS, SECONDS = 16, 4, 64, 10.0
# What one draw of random codes takes: they are drawn in 64 bits.
DRAWN_AT_ONCE = 1 << 20


def random_codes(graph: Graph, examples: int, seed: int) -> dict[str, np.ndarray]:
    """Every other example stays near the zero points, where little saturates."""
    rng, codes = np.random.default_rng(seed), {}
    for name in graph.inputs:
        tensor = graph.tensors[name]
        if tensor.dtype == FLOAT:
            codes[name] = rng.normal(size=(examples, *tensor.shape[1:])).astype(np.float32)
            continue
        lowest, highest = graph.limits(name)
        codes[name] = np.empty((examples, *tensor.shape[1:]), tensor.dtype)
        for number, example in enumerate(codes[name].reshape(examples, -1)):
            # Some at a time.
            for start in range(0, example.size, DRAWN_AT_ONCE):
                values = rng.integers(lowest, highest + 1, example[start : start + DRAWN_AT_ONCE].shape)
                if number % 2:
                    values = np.clip(values // 8 + tensor.quantization.zero_point[0], lowest, highest)
                example[start : start + DRAWN_AT_ONCE] = values
    return codes


def chosen_codes(
    graph: Graph, examples: int, profiles: Sequence[str], seed: int, most_bytes: int
) -> dict[str, np.ndarray]:
    """The examples that show the most, as many as are wanted; random ones for a network with variables, whose examples
    are calls of one stream.

    Args:
        profiles: the devices to tell apart.
        most_bytes: of one device's results, for the examples simulated at a time.
    """
    start = random_codes(graph, examples, seed)
    tensors = {name: graph.tensors[name] for name in graph.results() if graph.tensors[name].dtype in CODE_RANGES}
    one = sum(math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize for tensor in tensors.values())
    together = min(AT_ONCE, most_bytes // max(one, 1))
    alone = graph.variables or not all(OPERATORS[operator.kind].any_batch for operator in graph.operators)
    if not tensors or alone or together < 2:
        return start
    rng, began, quiet = np.random.default_rng(seed), time.process_time(), 0
    reached = {name: np.zeros(256, bool) for name in tensors}
    differing: set[tuple[str, str, str]] = set()
    best: list[tuple[tuple[int, int], Codes]] = []
    for _ in range(MOST_DRAWS):
        if quiet == PATIENCE or time.process_time() - began > SECONDS:
            break
        batch, quiet = _drawn(graph, rng, together, [codes for _, codes in best]), quiet + 1
        values: dict[str, Codes] = {}
        for profile in profiles:
            with contextlib.suppress(ValueError):  # it has no such operator, or would not survive these codes
                results = simulate(graph, batch, profile, tuple(tensors), together, progress=False)
                values[profile] = {name: codes.reshape(together, -1) for name, codes in results.items()}
        for at in range(together if values else 0):
            places = {
                (first, second, name)
                for first, second in combinations(values, 2)
                for name in tensors
                if np.any(values[first][name][at] != values[second][name][at])
            }
            fresh = 0
            for name, codes in next(iter(values.values())).items():
                # Of 16 bits, the upper eight.
                bins = np.unique((codes[at] >> (8 * codes.itemsize - 8)).astype(np.int64) + 128)
                fresh += int(np.count_nonzero(~reached[name][bins]))
                reached[name][bins] = True
            brought = len(places - differing), fresh
            differing |= places
            if any(brought):
                quiet = 0
                best.append((brought, {name: codes[at : at + 1] for name, codes in batch.items()}))
        best = sorted(best, key=lambda entry: entry[0], reverse=True)[: max(examples, AT_ONCE)]
    kept = [codes for _, codes in best[:examples]]
    kept += [{name: codes[at : at + 1] for name, codes in start.items()} for at in range(examples - len(kept))]
    return {name: np.concatenate([codes[name] for codes in kept]) for name in graph.inputs}


def _drawn(graph: Graph, rng: np.random.Generator, count: int, best: Sequence[Codes]) -> dict[str, np.ndarray]:
    """Of every four examples one is random, one near the zero points, one has one code for each channel, or only the
    ends of its range, and one changes a stretch of what brought something."""
    codes = random_codes(graph, count, int(rng.integers(2**32)))
    for name, drawn in codes.items():
        tensor = graph.tensors[name]
        if tensor.dtype not in CODE_RANGES:
            continue
        lowest, highest = graph.limits(name)
        for at in range(2, count, 4):
            ends = [lowest, highest, int(tensor.quantization.zero_point[0])]
            even = rng.integers(lowest, highest + 1, tensor.shape[-1:])
            drawn[at] = rng.choice(ends, tensor.shape[1:]) if rng.integers(2) else even
        for at in range(3, count, 4) if best else ():
            whole = best[rng.integers(len(best))][name].reshape(-1).copy()
            start, end = np.sort(rng.integers(0, whole.size + 1, 2))
            whole[start:end] = drawn[at].reshape(-1)[start:end]
            drawn[at] = whole.reshape(drawn[at].shape)
    return codes
