# SPDX-License-Identifier: Apache-2.0
"""Masks that a network is given: zeros and ones that hide scores from a softmax, or that values are multiplied by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .network import Constant, Network
from .refusals import Refused

if TYPE_CHECKING:
    from .planner import Planner, Stored

# Beyond this, softmax gives less than half a step of its grid, whatever the other scores are.
SURELY_MASKED = -32.0
# What is added so far below hides a score, in whatever framework.
HIDES = -1e3
# The range of an input that is one.
TRUTH = (0.0, 1.0)
_MOVES = ("reshape", "permute", "expand", "identity", "gather", "slice")


def is_mask(network: Network, name: str) -> bool:
    """Whether an input holds zeros and ones: truth values, or integers that are made such or that hide scores."""
    dtype = network.values[name].dtype
    if dtype in ("bool", "float32"):
        return dtype == "bool"
    known = {name}
    for step in network.steps:
        if not known.intersection(each for each in step.inputs if isinstance(each, str)):
            continue
        if step.kind == "clamp" and (step.attributes["min"], step.attributes["max"]) == TRUTH:
            return True
        if step.kind == "mul" and any(not isinstance(each, str) and (each or 0) <= HIDES for each in step.inputs):
            return True
        if step.kind in (*_MOVES, "sub"):
            known.add(step.output)
    return False


def is_truth(x: Stored) -> bool:
    """Whether it is such an input, or made of such."""
    rule = x.grid.root().rule
    return rule.ranges == "fixed" and rule.fixed_range == TRUTH


def are_zeros_and_ones(constant: Constant) -> bool:
    """Whether a constant holds nothing else, whatever is trained."""
    values = None if constant.data is None else np.asarray(constant.data)
    return values is not None and bool(((values == 0) | (values == 1)).all())


def line_in_front_of_softmax(planner: Planner, x: Stored, weight: float, bias: float) -> tuple[float, float]:
    """``weight * x + bias`` of a mask in front of a softmax: no further below 0 than matters, so that the grid of the
    scores is not all mask.

    Raises:
        Refused: so large a number is computed of a mask and goes elsewhere, or of something else than a mask.
    """
    lowest = min(bias, weight + bias)
    if lowest > HIDES:
        return weight, bias
    if not is_truth(x):
        raise Refused(
            f"it adds {lowest:g} where something that is computed says so; give the mask as an input of integers or "
            "truth values, 1 where a value counts"
        )
    if not _hides_scores(planner, planner.end):
        raise Refused(f"it computes {lowest:g} of a mask, which goes elsewhere than in front of a softmax")
    factor = SURELY_MASKED / lowest
    return weight * factor, bias * factor


def _hides_scores(planner: Planner, name: str) -> bool:
    """Whether all that reads a value adds it to what a softmax reads."""
    readers = [step for step in planner.network.steps if name in step.inputs]
    return bool(readers) and all(
        step.kind == "softmax"
        or (step.kind == "attention" and step.inputs.index(name) == 3)
        or (step.kind in ("add", "sub", *_MOVES) and _hides_scores(planner, step.output))
        for step in readers
    )


__all__ = ["HIDES", "SURELY_MASKED", "TRUTH", "are_zeros_and_ones", "is_mask", "is_truth", "line_in_front_of_softmax"]
