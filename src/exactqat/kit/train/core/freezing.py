# SPDX-License-Identifier: Apache-2.0
"""What `freeze` does to ranges, and what it warns about."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...display import listed, shortened
from ...planning.callers import users_line
from ...planning.fitting import Ends, RangesMovedWarning, fitting_ranges, moved_sentence
from ...planning.plans import SMALLEST_WIDTH, Plan, branch_range

# From this share of their initial values on, running statistics count as unsettled. Slightly wrong deviations are wrong
# in every layer, and what one layer passes on is the next one's input.
_UNSETTLED = 0.2


class UnsettledStatisticsWarning(UserWarning):
    """A network was frozen whose batch norms have seen too few training batches for their momentum: their running
    statistics, used from then on, are far from those of the batches that ranges were measured with."""


class Settling(NamedTuple):
    """How far a batch norm's running statistics have come.

    Attributes:
        path: of the layer.
        momentum: share of a new batch in them; None: they are the mean of all batches.
        batches: how many they have seen; trained: how many of them since `prepare`.
        variance: the running one.
    """

    path: str
    momentum: float | None
    batches: int
    trained: int
    variance: np.ndarray


def fresh_norms(plan: Plan, tensors: Mapping[str, Any]) -> frozenset[str]:
    """Paths of layers whose batch norms' running statistics are the 0 and 1 that they begin with (Haiku's: 0 and 0).

    tensors: the network's parameters and variables, by name; arrays of any framework.
    """
    norms = {step.path: step.weights.batch_norm for step in plan.steps if step.weights is not None}
    return frozenset(
        path
        for path, norm in norms.items()
        if norm is not None
        and norm.training
        and {norm.mean, norm.variance} <= tensors.keys()  # computed ones do not begin at anything
        and not bool((tensors[norm.mean] != 0).any())
        and bool((tensors[norm.variance] == (0.0 if norm.debiased else 1.0)).all())
    )


def warn_of_unsettled(norms: Iterable[Settling]) -> None:
    """Warns of batch norms whose running statistics are still largely their initial 0 and 1.

    Not if no batch was trained since `prepare`: ranges were then measured with these same statistics.
    """
    found = []
    for norm in norms:
        left = 0.0 if not norm.momentum else (1 - norm.momentum) ** norm.batches
        # A variance of 1 leaves that much of itself; smaller ones were loaded by a program that keeps no count.
        if norm.trained > 0 and left > _UNSETTLED and bool((norm.variance >= 0.99 * left).all()):
            found.append((left, norm.batches, norm.path, norm.momentum))
    if not found:
        return
    left, batches, path, momentum = max(found)
    warnings.warn(
        f"the running statistics of {len(found)} of the network's batch norms are still, to up to {left:.0%}, the 0 "
        f"and 1 they began with ('{shortened(path)}' has seen {batches} training batches at momentum {momentum:g}). "
        "From here on the network computes with them, while its ranges were measured with the batches' own "
        "statistics, so expect few codes to be used (low SQNR). Train more batches before freeze; if that is not "
        "possible, calibrate(..., restart=True) right before freeze makes the ranges fit",
        UnsettledStatisticsWarning,
        stacklevel=users_line(),
    )


def move_ranges(
    plan: Plan,
    ends: Mapping[str, Ends],
    seen: Collection[str],
    move: Callable[[str, Ends], None],
    wanted: Callable[[], Mapping[tuple[str, int], float]],
) -> None:
    """Moves ranges that would leave a branch without codes (`branch_range`), or that the device's operators cannot take
    together (`fitting_ranges`); warns of the latter, and of values too small for any range (`RangesMovedWarning`).

    Args:
        ends: (min, max) of every grid whose range is known. Trained ones may be beyond zero.
        seen: grids whose ranges have seen data or are given; others mean nothing yet.
        move: called with each range that changes.
        wanted: the scales that constants and weights ask for, as `fitting_ranges` takes them, given the current ranges.
    """
    known = {name: (min(low, 0.0), max(high, 0.0)) for name, (low, high) in ends.items()}
    for branch, total in plan.branches:
        if branch in known and total in known:
            given, whole = (np.array(known[name], np.float32) for name in (branch, total))
            grids = plan.grids[branch], plan.grids[total]
            low, high = branch_range((given[0], given[1]), (whole[0], whole[1]), grids, np.where)
            if (low, high) != tuple(given):
                known[branch] = (float(low), float(high))
                move(branch, known[branch])
    known = {name: each for name, each in known.items() if name in seen}
    tiny = [repr(shortened(name)) for name, (low, high) in known.items() if 0 < high - low < SMALLEST_WIDTH]
    if tiny:
        warnings.warn(
            f"all values of {listed(tiny)} are below {SMALLEST_WIDTH:.1g}, which no range holds, and count as zero: "
            "multiply what they are computed from, such as the input, by a constant",
            RangesMovedWarning,
            stacklevel=users_line(),
        )
    if not plan.has_a_device:
        return
    moved = fitting_ranges(plan, known, wanted())
    for name, each in moved.items():
        move(name, each)
    words = moved_sentence(moved, known)
    if words:
        warnings.warn(words, RangesMovedWarning, stacklevel=users_line())
