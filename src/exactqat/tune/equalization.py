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
from ..qat.train.core import primitives_numpy
from ..qat.train.core.weights import per_channel
from .network import Candidate, real_weights
from .ranges import ranges_of_all
from .variants import Observer

# What was done in words, the network, and what is observed of it.
Scaled = tuple[str, Candidate, Observer]
# How much of the differences between a normalization's channels goes into the weights of what reads it.
STRENGTHS = (0.5, 0.75, 1.0)
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


def equalizations(candidate: Candidate, observer: Observer) -> list[Scaled]:
    """The candidate with its layers equalized, with ranges chosen in each way."""
    return _scaled(candidate, observer, [group for group in groups(candidate) if not group.scales], (0.5,))


def smoothings(candidate: Candidate, observer: Observer) -> list[Scaled]:
    """The candidate with its normalizations smoothed, at each strength and with ranges chosen in each way."""
    return _scaled(candidate, observer, [group for group in groups(candidate) if group.scales], STRENGTHS)


def _scaled(
    candidate: Candidate, observer: Observer, chosen: Sequence[Group], strengths: Sequence[float]
) -> list[Scaled]:
    tried = []
    for strength in strengths if chosen else ():
        changed, factors = equalized(candidate, observer, chosen, strength)
        count, scaled = len(factors), observer.scaled(changed, factors)
        what = f"{count} layers" if len(strengths) == 1 else f"{count} layers, {strength:.0%}"
        tried += [(f"{what}, {way}", ranged, scaled) for way, ranged in ranges_of_all(changed, scaled) if count]
    return tried


def groups(candidate: Candidate) -> list[Group]:
    """Steps with weights that are read only by other steps with weights, with at most a ReLU between."""
    plan, matches = candidate.plan, []
    readers: dict[str, list[PlanStep]] = {}
    weight_users: Counter[str] = Counter()

    def users_name(name: str) -> str:
        origin = candidate.origin(name)
        return name if origin is None else origin.name

    for step in plan.steps:
        for name in step.operands:
            readers.setdefault(name, []).append(step)
        if step.weights is not None:
            weight_users[users_name(step.weights.weight)] += 1
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
        scaled = all(name is None or candidate.origin(name) is not None for name in own)
        scaled = scaled and all(map(candidate.may_change, of_readers))
        alone = all(weight_users[users_name(name)] == 1 for name in (weights.weight, *of_readers))
        by_rules = weights.rule.fold_batch_norm or first.bounds is not None or first.activation == "RELU6"
        if scaled and alone and not by_rules and not (norm and (norm.weight is None or norm.bias is None)):
            size = candidate.tensors[weights.weight].shape[weights.channel_axis]
            matches.append(Group(first, following, candidate.tensors[weights.weight].size == size))
    return matches


def equalized(
    candidate: Candidate, observer: Observer, chosen: Sequence[Group], strength: float = 0.5
) -> tuple[Candidate, dict[str, np.ndarray]]:
    """The candidate with its groups equalized, and by what the channels of each group's result are multiplied. Ranges
    have to be chosen again.

    Args:
        strength: how much of the differences between channels goes into the readers' weights: 1 leaves none in what is
            stored, 0 moves none into the weights.
    """
    tensors, factors = dict(candidate.tensors), {}
    for group in chosen:
        first = group.first
        assert first.weights is not None
        weight, _ = real_weights(candidate.run(), first)
        channels = weight.shape[first.weights.channel_axis]
        # The weights that read it, and their axis of its channels.
        readers = [step.weights.weight for step in group.readers if step.weights is not None]
        axes = [_axis_of_inputs(step, tensors, channels) for step in group.readers]
        if first.path not in observer.values or None in axes or (reach := observer.reach(first.path)).size != channels:
            continue
        following = {
            name: (np.asarray(tensors[name], np.float32), axis)
            for name, axis in zip(readers, axes, strict=True)
            if axis is not None
        }
        needs = np.max(
            [np.abs(np.moveaxis(array, axis, -1)).reshape(-1, channels).max(0) for array, axis in following.values()], 0
        )
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
        scaled = {name: (array, axis, factor) for name, (array, axis) in following.items()}
        norm = first.weights.batch_norm
        divided = (first.weights.weight, first.weights.bias) if norm is None else (norm.weight, norm.bias)
        # Channels of the step's own result are divided: powers of two have exact inverses.
        for name in filter(None, divided):
            axis = first.weights.channel_axis if name == first.weights.weight else 0
            scaled[name] = np.asarray(tensors[name], np.float32), axis, np.reciprocal(factor)
        for name, (array, axis, by) in scaled.items():
            tensors[name] = array * per_channel(primitives_numpy, by, array.ndim, axis)
        factors[first.path] = np.reciprocal(factor)
    return replace(candidate, tensors=tensors), factors


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
