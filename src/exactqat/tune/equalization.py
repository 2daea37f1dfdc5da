# SPDX-License-Identifier: Apache-2.0
"""Cross-layer equalization: channels of one layer are scaled so that they have alike ranges, and the next one's
weights by the inverse. In real numbers the network stays the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..device import OPERATORS
from ..planning.plans import PlanStep
from .network import Candidate, real_weights
from .observing import Observer

# Factors beyond are no channels of different size, but dead ones.
LARGEST_FACTOR = 2.0**10


def pairs(candidate: Candidate) -> list[tuple[PlanStep, PlanStep]]:
    """Steps with weights that follow one another with nothing but a ReLU between, and nobody else reading."""
    plan, found = candidate.plan, []
    readers: dict[str, list[PlanStep]] = {}
    weight_users: dict[str, int] = {}
    for step in plan.steps:
        for name in step.operands:
            readers.setdefault(name, []).append(step)
        if step.weights is not None:
            weight_users[step.weights.weight] = weight_users.get(step.weights.weight, 0) + 1
    for first in plan.steps:
        following = readers.get(first.path, [])
        if first.weights is None or len(following) != 1 or first.path in (*plan.outputs, *plan.device_outputs):
            continue
        (second,) = following
        if second.weights is None or second.operands[0] != first.path or plan.grids[first.grid].writers != 1:
            continue
        weights = first.weights, second.weights
        names = [weights[0].weight, weights[1].weight, weights[0].bias]
        norm = weights[0].batch_norm
        names += [norm.weight, norm.bias] if norm else []
        scaled = all(name is None or candidate.may_change(name) for name in names)
        alone = all(weight_users[each.weight] == 1 for each in weights)
        by_rules = weights[0].rule.fold_batch_norm or first.bounds is not None or first.activation == "RELU6"
        if scaled and alone and not by_rules and not (norm and (norm.weight is None or norm.bias is None)):
            found.append((first, second))
    return found


def equalized(candidate: Candidate, observer: Observer) -> tuple[Candidate, int]:
    """The candidate with its pairs equalized, and how many there were. Ranges have to be chosen again."""
    tensors, count = dict(candidate.tensors), 0
    for first, second in pairs(candidate):
        values = observer.fine.get(first.path)
        assert first.weights is not None and second.weights is not None
        if values is None or OPERATORS[second.kind].filter_axis is None:
            continue
        weight, _ = real_weights(candidate.run(), first)
        channels = weight.shape[first.weights.channel_axis]
        following = np.asarray(tensors[second.weights.weight], np.float32)
        axis = _axis_of_inputs(second, following, channels)
        if axis is None or values.shape[-1] != channels:
            continue
        reach = np.abs(values.reshape(-1, channels)).max(0)
        others = tuple(each for each in range(following.ndim) if each != axis)
        needs = np.abs(following).max(others)
        alive = (reach > 0) & (needs > 0)
        if not alive.any():
            continue
        factor = np.ones(channels, np.float32)
        ratio = np.sqrt(reach[alive] / needs[alive])
        ratio = ratio / np.exp(np.log(ratio).mean())
        # Powers of two: scaling and its inverse cancel exactly.
        factor[alive] = 2.0 ** np.rint(np.log2(np.clip(ratio, 1 / LARGEST_FACTOR, LARGEST_FACTOR)))
        if np.all(factor == 1):
            continue
        _divide(tensors, first, factor)
        shape = [1] * following.ndim
        shape[axis] = -1
        tensors[second.weights.weight] = following * factor.reshape(shape)
        count += 1
    return replace(candidate, tensors=tensors), count


def _axis_of_inputs(second: PlanStep, weight: np.ndarray, channels: int) -> int | None:
    """The weight's axis that belongs to the input's channels; None where it is not plain."""
    assert second.weights is not None
    if int(second.attributes.get("groups", 1)) == 1 and weight.shape[1] == channels:
        return 1 if second.weights.channel_axis == 0 else None
    depthwise = weight.shape[1] == 1 and weight.shape[0] == channels == int(second.attributes.get("groups", 1))
    return 0 if depthwise and second.weights.channel_axis == 0 else None


def _divide(tensors: dict[str, np.ndarray], step: PlanStep, factor: np.ndarray) -> None:
    """Divides the channels of a step's result."""
    weights = step.weights
    assert weights is not None
    if weights.batch_norm is not None:
        for name in (weights.batch_norm.weight, weights.batch_norm.bias):
            assert name is not None
            tensors[name] = np.asarray(tensors[name], np.float32) / factor
        return
    weight = np.asarray(tensors[weights.weight], np.float32)
    shape = [1] * weight.ndim
    shape[weights.channel_axis] = -1
    tensors[weights.weight] = weight / factor.reshape(shape)
    if weights.bias is not None:
        tensors[weights.bias] = np.asarray(tensors[weights.bias], np.float32) / factor


__all__ = ["equalized", "pairs"]
