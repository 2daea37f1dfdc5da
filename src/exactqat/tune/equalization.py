# SPDX-License-Identifier: Apache-2.0
"""Cross-layer equalization and smoothing: channels of one layer, or of a normalization, are scaled to similar ranges,
and the weights of what reads them by the inverse. In real numbers the network stays the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..kit.device import OPERATORS
from ..kit.planning.plans import PlanStep
from .network import Candidate, real_weights
from .observing import Observer

# Larger factors do not mean channels of different size, but dead ones.
LARGEST_FACTOR = 2.0**10


@dataclass(frozen=True)
class Group:
    """A step whose channels may be scaled, and the steps with weights that are its only readers.

    Attributes:
        scales: whether the first step only scales and shifts each channel, like the end of a normalization.
    """

    first: PlanStep
    readers: tuple[PlanStep, ...]
    scales: bool


def groups(candidate: Candidate) -> list[Group]:
    """Steps with weights that are read only by other steps with weights, with at most a ReLU between."""
    plan, found = candidate.plan, []
    readers: dict[str, list[PlanStep]] = {}
    weight_users: Counter[str] = Counter()
    for step in plan.steps:
        for name in step.operands:
            readers.setdefault(name, []).append(step)
        if step.weights is not None:
            weight_users[candidate.users_name(step.weights.weight)] += 1
    for first in plan.steps:
        following = tuple(readers.get(first.path, []))
        if first.weights is None or not following or first.path in (*plan.outputs, *plan.device_outputs):
            continue
        if any(step.weights is None or step.operands[0] != first.path for step in following):
            continue
        if plan.grids[first.grid].writers != 1 or len({id(step) for step in following}) != len(following):
            continue
        weights, norm = first.weights, first.weights.batch_norm
        own = [weights.bias, *([norm.weight, norm.bias] if norm else [weights.weight])]
        of_readers = [step.weights.weight for step in following if step.weights is not None]
        scaled = all(name is None or candidate.may_scale(name) for name in own)
        scaled = scaled and all(map(candidate.may_change, of_readers))
        alone = all(weight_users[candidate.users_name(name)] == 1 for name in (weights.weight, *of_readers))
        by_rules = weights.rule.fold_batch_norm or first.bounds is not None or first.activation == "RELU6"
        if scaled and alone and not by_rules and not (norm and (norm.weight is None or norm.bias is None)):
            size = candidate.tensors[weights.weight].shape[weights.channel_axis]
            found.append(Group(first, following, candidate.tensors[weights.weight].size == size))
    return found


def equalized(
    candidate: Candidate, observer: Observer, chosen: Sequence[Group], strength: float = 0.5
) -> tuple[Candidate, int]:
    """The candidate with its groups equalized, and the number of groups. Ranges have to be chosen again.

    Args:
        strength: how much of the differences between channels goes into the readers' weights: 1 leaves none in what is
            stored, 0 moves none into the weights.
    """
    tensors, count = dict(candidate.tensors), 0
    for group in chosen:
        first, values = group.first, observer.fine.get(group.first.path)
        assert first.weights is not None
        weight, _ = real_weights(candidate.run(), first)
        channels = weight.shape[first.weights.channel_axis]
        axes = [_axis_of_inputs(step, tensors, channels) for step in group.readers]
        if values is None or values.shape[-1] != channels or None in axes:
            continue
        reach = np.abs(values.reshape(-1, channels)).max(0)
        needs = np.max([_needs(step, tensors, axis) for step, axis in zip(group.readers, axes, strict=True)], 0)
        alive = (reach > 0) & (needs > 0)
        if not alive.any():
            continue
        factor = np.ones(channels, np.float32)
        ratio = reach[alive] ** strength / needs[alive] ** (1 - strength)
        ratio = ratio / np.exp(np.log(ratio).mean())
        # Powers of two: scaling and its inverse cancel exactly.
        factor[alive] = 2.0 ** np.rint(np.log2(np.clip(ratio, 1 / LARGEST_FACTOR, LARGEST_FACTOR)))
        if np.all(factor == 1):
            continue
        _divide(tensors, first, factor)
        for step, axis in zip(group.readers, axes, strict=True):
            assert step.weights is not None and axis is not None
            following = np.asarray(tensors[step.weights.weight], np.float32)
            tensors[step.weights.weight] = following * _along(factor, axis, following.ndim)
        count += 1
    return replace(candidate, tensors=tensors), count


def _needs(step: PlanStep, tensors: Mapping[str, np.ndarray], axis: int | None) -> np.ndarray:
    """The largest weight that meets each channel."""
    assert step.weights is not None
    weight = np.abs(np.asarray(tensors[step.weights.weight], np.float32))
    return np.asarray(weight.max(tuple(each for each in range(weight.ndim) if each != axis)))


def _along(values: np.ndarray, axis: int, rank: int) -> np.ndarray:
    return values.reshape([-1 if at == axis else 1 for at in range(rank)])


def _axis_of_inputs(second: PlanStep, tensors: Mapping[str, np.ndarray], channels: int) -> int | None:
    """The weight's axis that belongs to the input's channels; None if it is unclear."""
    assert second.weights is not None
    weight = tensors[second.weights.weight]
    if OPERATORS[second.kind].filter_axis is None:
        return None
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
    tensors[weights.weight] = weight / _along(factor, weights.channel_axis, weight.ndim)
    if weights.bias is not None:
        tensors[weights.bias] = np.asarray(tensors[weights.bias], np.float32) / factor


__all__ = ["Group", "equalized", "groups"]
