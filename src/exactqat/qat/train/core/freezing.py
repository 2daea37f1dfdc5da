# SPDX-License-Identifier: Apache-2.0
"""What `freeze` does to ranges, and what it warns about."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from ....kit.display import listed, shortened
from ....kit.planning.callers import users_line
from ....kit.planning.fitting import RangesMovedWarning, constant_limits, fitting_ranges, moved_sentence
from ....kit.planning.moved import warn_of_moved_weights
from ....kit.planning.plans import SMALLEST_WIDTH, branch_range, require_finite
from .arrays import ENDS, Arrays
from .state import ConstantOperand, in_numpy
from .steps import WeightedStep
from .training_plan import TrainingPlan
from .weights import step_width

# From this share of their initial values on, running statistics count as unsettled. Slightly wrong deviations are wrong
# in every layer, and what one layer passes on is the next one's input.
_UNSETTLED = 0.2


class UnsettledStatisticsWarning(UserWarning):
    """A network was frozen whose batch norms have seen too few training batches for their momentum: their running
    statistics, used from then on, are far from those of the batches that ranges were measured with."""


def fresh_norms(functional: TrainingPlan, tensors: Mapping[str, Any]) -> frozenset[str]:
    """Paths of layers whose batch norms' running statistics are initial.

    tensors: the network's parameters and variables, by name; arrays of any framework.
    """
    return frozenset(
        path
        for path, norm in functional.norms.items()
        if norm.training
        and {norm.mean, norm.variance} <= tensors.keys()  # computed ones do not begin at anything
        and are_initial(tensors[norm.mean], tensors[norm.variance])
    )


def are_initial(mean: Any, variance: Any) -> bool:
    """Whether running statistics are the 0 and 1 that they begin with; arrays of any framework."""
    return not bool((mean != 0).any()) and bool((variance == 1).all())


def frozen(functional: TrainingPlan, arrays: Arrays) -> Arrays:
    """A network's arrays, in NumPy, with the ranges that it is frozen with; see `settled`.

    Raises:
        ValueError: a range or a batch norm's statistics are not finite.
        MissingData: ranges have seen no data.
    """
    for tree in (arrays.ranges, arrays.learned):
        for name, ends in tree.items():
            require_finite(f"the range of '{name}'", *(ends[end] for end in ENDS if end in ends))
    for path, norm in functional.norms.items():
        # Statistics that are written as numbers are no state.
        statistics = [arrays.tensors[name] for name in (norm.mean, norm.variance) if name in arrays.tensors]
        require_finite(f"the statistics of '{path}'", *statistics)
    functional.require_data(arrays.ranges)
    _warn_of_unsettled(functional, arrays)
    functional.parts.warn()
    warn_of_moved_weights(functional.plan, arrays.tensors)
    return settled(functional, arrays)


def _warn_of_unsettled(functional: TrainingPlan, arrays: Arrays) -> None:
    """Warns of batch norms whose running statistics are still largely their initial 0 and 1.

    Not if no batch was trained since `prepare`: ranges were then measured with these same statistics.
    """
    unsettled = []
    for path, norm in functional.norms.items():
        if not norm.training or path not in functional.fresh_norms:
            continue
        trained = int(arrays.ranges[functional.grid_of[path]]["trained"])
        batches = int(arrays.tensors[norm.counter]) if norm.counter else trained
        # None: they are the mean of all batches.
        left = 0.0 if not norm.momentum else (1 - norm.momentum) ** batches
        # A variance of 1 leaves that much of itself; smaller ones were loaded by a program that keeps no count.
        if trained > 0 and left > _UNSETTLED and bool((arrays.tensors[norm.variance] >= 0.99 * left).all()):
            unsettled.append((left, batches, path, norm.momentum))
    if not unsettled:
        return
    left, batches, path, momentum = max(unsettled)
    warnings.warn(
        f"the running statistics of {len(unsettled)} of the network's batch norms are still, to up to {left:.0%}, the "
        f"0 and 1 they began with ('{shortened(path)}' has seen {batches} training batches at momentum {momentum:g}). "
        "From here on the network computes with them, while its ranges were measured with the batches' own "
        "statistics, so expect few codes to be used (low SQNR). Train more batches before freeze; if that is not "
        "possible, calibrate(..., restart=True) right before freeze makes the ranges fit",
        UnsettledStatisticsWarning,
        stacklevel=users_line(),
    )


def settled(functional: TrainingPlan, arrays: Arrays) -> Arrays:
    """A network's arrays, in NumPy, without ranges that would leave a branch without codes (`branch_range`), or that
    the device's operators cannot take together (`fitting_ranges`).

    Warns (`RangesMovedWarning`) of the latter, and of values too small for any range.
    """
    plan, after = functional.plan, arrays.taking_over({}, {}, {})

    def move(name: str, ends: tuple[float, float]) -> None:
        for end, value in zip(ENDS, ends, strict=True):
            after.holder(name, end)[end] = np.asarray(value, np.float32)

    # The last training step may have moved a learned end beyond zero.
    known = {
        name: (min(float(arrays.end(name, "minimum")), 0.0), max(float(arrays.end(name, "maximum")), 0.0))
        for name in functional.grids
    }
    for branch, total in plan.branches:
        if branch in known and total in known:
            before, whole = (np.array(known[name], np.float32) for name in (branch, total))
            grids = plan.grids[branch], plan.grids[total]
            low, high = branch_range((before[0], before[1]), (whole[0], whole[1]), grids, np.where)
            if (low, high) != tuple(before):
                known[branch] = (float(low), float(high))
                move(branch, known[branch])
    for name, grid in functional.grids.items():
        if grid.rule.ranges != "fixed" and not arrays.ranges[name]["batches"] > 0:
            del known[name]  # it means nothing yet
    tiny = [repr(shortened(name)) for name, (low, high) in known.items() if 0 < high - low < SMALLEST_WIDTH]
    if tiny:
        warnings.warn(
            f"all values of {listed(tiny)} are below {SMALLEST_WIDTH:.1g}, which no range holds, and count as zero: "
            "multiply what they are computed from, such as the input, by a constant",
            RangesMovedWarning,
            stacklevel=users_line(),
        )
    if not plan.has_a_device:
        return after
    fitting = fitting_ranges(plan, known, _wanted_scales(functional, after))
    for name, ends in fitting.items():
        move(name, ends)
    words = moved_sentence(fitting, known)
    if words:
        warnings.warn(words, RangesMovedWarning, stacklevel=users_line())
    return after


def _wanted_scales(functional: TrainingPlan, arrays: Arrays) -> dict[tuple[str, int], float]:
    """The scales that constants and weights ask for, as `fitting_ranges` takes them."""
    state, scales = in_numpy(functional, arrays), {}
    for step in functional.plan.steps:
        if step.weights is not None:
            with np.errstate(divide="ignore", invalid="ignore"):
                grid = WeightedStep(state, step).grid()
            alive = np.asarray(grid.weight_scale)[np.asarray(grid.factor) != 0]  # channels that are not constant
            if alive.size:
                scales[(step.path, len(step.operands))] = float(alive.max())
        for position, name in enumerate(step.operands):
            if name in functional.grid_of or constant_limits(functional.plan, step, position) is None:
                continue
            operand = ConstantOperand(state, step, position)
            ends = operand.bounds(np.asarray(operand.source(), np.float32), within_limits=False)
            scales[(step.path, position)] = float(step_width(ends, operand.bits, operand.rule.narrow_range))
    return scales
