# SPDX-License-Identifier: Apache-2.0
"""Ways to choose a range from the values that a tensor holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..kit.planning.plans import Plan
from ..qat.train.core import primitives_numpy
from ..qat.train.core.ranges import least_error_fraction
from .network import Candidate, Ends
from .variants import Observer, Seen

BINS = 2048
# From the cheapest to the most expensive.
WAYS = ("min_max", "percentile 99.99", "percentile 99.9", "percentile 99", "least squares", "entropy")


def open_grids(candidate: Candidate) -> tuple[str, ...]:
    """The grids whose ranges may be chosen: not fixed by the device, a rule or a clamp of the network's."""
    plan = candidate.plan
    bounded = {step.grid for step in plan.steps if step.bounds is not None}
    return tuple(
        name
        for name, grid in plan.grids.items()
        if grid.fixed is None and grid.rule.ranges != "fixed" and grid.bits <= 8 and name not in bounded
    )


def chosen(way: str, seen: Seen, plan: Plan, grid: str) -> Ends:
    """A range for a grid, chosen by one of `WAYS`.

    Raises:
        ValueError: there is no such way.
    """
    if way == "min_max":
        return seen.least, seen.most
    if way.startswith("percentile "):
        share = float(way.removeprefix("percentile ")) / 100
        low, high = np.quantile(seen.sample, [1 - share, share])
        return max(min(0.0, float(low)), seen.least), max(0.0, float(high))
    bits = plan.grids[grid].bits
    low, high = np.float32(seen.least), np.float32(seen.most)
    if high - low <= 0:
        return seen.least, seen.most
    if way == "least squares":
        fraction = float(least_error_fraction(primitives_numpy, seen.sample, low, high, bits, False))
    elif way == "entropy":
        fraction = _entropy_fraction(np.abs(seen.sample), max(-float(low), float(high)), bits)
    else:
        raise ValueError(f"a range is chosen by one of {', '.join(WAYS)}, got {way!r}")
    return seen.least * fraction, seen.most * fraction


def _entropy_fraction(magnitudes: np.ndarray, largest: float, bits: int) -> float:
    """The fraction of a range whose clipped and quantized values differ least from the values, by the Kullback-Leibler
    divergence of their histograms."""
    counts, _ = np.histogram(magnitudes, BINS, (0, largest))
    levels = 2 ** (bits - 1)
    best, fraction = np.inf, 1.0
    counts = counts.astype(np.float64)
    for stop in range(max(levels, BINS // 8), BINS + 1, BINS // 64):
        kept = counts[:stop].copy()
        kept[-1] += counts[stop:].sum()
        # Each level spreads the values of its bins evenly over the non-empty ones.
        level = np.arange(stop) * levels // stop
        total = np.bincount(level, counts[:stop], levels)
        filled = np.bincount(level, counts[:stop] > 0, levels)
        spread = np.where(counts[:stop] > 0, (total / np.maximum(filled, 1))[level], 0)
        if not spread.sum():
            continue
        p, q = kept / kept.sum(), spread / spread.sum()
        there = p > 0
        divergence = float((p[there] * np.log(p[there] / np.maximum(q[there], 1e-9))).sum())
        if divergence < best:
            best, fraction = divergence, stop / BINS
    return fraction


def ranges_of_all(candidate: Candidate, observer: Observer) -> list[tuple[str, Candidate]]:
    """The candidate with the ranges of all open grids chosen the same way, for each way."""
    seen, plan = observer.seen(), candidate.plan
    tried = []
    for way in WAYS:
        ranges = {name: chosen(way, seen[name], plan, name) for name in open_grids(candidate) if name in seen}
        tried.append((way, replace(candidate, ranges={**candidate.ranges, **ranges})))
    return tried
