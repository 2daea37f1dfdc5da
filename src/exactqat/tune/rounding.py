# SPDX-License-Identifier: Apache-2.0
"""Weights rounded so that a layer's sums change least: each weight in view of the others and of the codes that the
layer gets on the device, rather than to nearest; of few bits, with ranges that clip."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from ..deploy.graph import Operator
from ..qat.train.core import primitives_numpy
from ..qat.train.core.weights import folds, per_channel, weight_codes
from .correction import corrected_layer
from .network import Candidate, Places
from .variants import Observer, rows_of

# The most inputs of one output: the cost of learning grows with their square.
MOST_INPUTS = 2304
SWEEPS = 8
# Share of the mean diagonal that is added to it.
DAMPING = 0.01
# How much of what earlier layers changed a layer's weights make up for.
MADE_UP = 0.5
# Codes that are moved before the others' slopes follow.
TOGETHER = 64
# Shares of a weight's range that are tried where it has fewer than 8 bits.
CLIPPED = 1 - np.arange(13, dtype=np.float32) / 24


def rounded(candidate: Candidate, observer: Observer) -> list[tuple[str, Candidate]]:
    """The candidate with all layers' weights rounded, one layer after the other."""
    users = Counter(step.weights.weight for step in candidate.plan.steps if step.weights is not None)
    candidate, count = candidate.settled(), 0
    for operator, places in observer.layers(candidate):
        weights = places.step.weights
        assert weights is not None
        learned = any(places.step.path in name for name in candidate.learned)
        if folds(weights) or learned or users[weights.weight] > 1 or not candidate.may_change(weights.weight):
            continue
        rows = rows_of(operator, observer.precisions.graph)
        if rows is not None and rows.shape[2] <= MOST_INPUTS:
            candidate = with_learned_rounding(observer, operator, places, rows, candidate)
            candidate, count = corrected_layer(candidate, observer, operator, places, False), count + 1
    return [(f"of {count} layers", replace(candidate))] if count else []


def with_learned_rounding(
    observer: Observer, operator: Operator, places: Places, rows: np.ndarray, candidate: Candidate
) -> Candidate:
    """The candidate with the weights of one layer rounded. rows: positions in the filter, [groups, outputs, inputs]."""
    weights = places.step.weights
    assert weights is not None
    run, axis, bits = candidate.run(), weights.channel_axis, weights.rule.weight_bits
    highest = 2 ** (bits - 1) - 1
    weight = np.asarray(run.constant(weights.weight), np.float32)
    wanted = np.asarray(observer.reference.run().constant(weights.weight), np.float32)
    grid = run.weight_grid(places.step.path, weights)
    quantized, raw_scale = np.asarray(grid(weight)), np.asarray(grid.scale(weight))
    positions = places.weights.reshape(-1)[rows]

    def placed(values: np.ndarray) -> np.ndarray:
        return np.broadcast_to(values, weight.shape).reshape(-1)[positions].astype(np.float32)

    fine, device = observer.operands(operator, candidate.graph(), rows)
    # What a constant adds is the bias's.
    for met in (fine, device):
        met -= met.mean(1, keepdims=True)
    moments, mixed = (met.transpose(0, 2, 1) @ device / max(device.shape[1], 1) for met in (device, fine))
    scale = placed(per_channel(primitives_numpy, np.where(raw_scale > 0, raw_scale, 1), weight.ndim, axis))
    real, target = placed(weight), placed(wanted)
    codes = placed(weight_codes(quantized, raw_scale, axis))
    if bits < 8 and weights.rule.symmetric:
        scale, codes = _clipped(real, scale, highest, moments, not weights.rule.per_channel)
    # The largest weight of a channel keeps its code, so that the scale stays what it is.
    ends = np.abs(real) >= np.abs(real).max(-1 if weights.rule.per_channel else None, keepdims=True)
    new = _learned(codes, target / scale, moments, mixed, highest, ends)
    inside = np.clip(real, -highest * scale, highest * scale)
    values = np.where(new == np.rint(inside / scale), inside, new * scale)
    result = weight.copy().reshape(-1)
    result[positions] = values.astype(np.float32)
    return candidate.with_layer(operator, places, {weights.weight: result.reshape(weight.shape)})


def _clipped(
    real: np.ndarray, scale: np.ndarray, highest: int, moments: np.ndarray, together: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The scale and the codes of each output whose ranges clip so much that the sums change least.

    real, scale: [groups, outputs, inputs]; moments: [groups, inputs, inputs]; together: all outputs have one scale.
    """
    power = np.diagonal(moments, axis1=1, axis2=2)[:, None]
    best_scale, best = scale, np.full(scale.shape[:2], np.inf)
    for share in CLIPPED:
        tried = scale * share
        off = np.clip(np.rint(real / tried), -highest, highest) * tried - real
        error = (off * off * power).sum(-1)
        error = np.full_like(error, error.sum()) if together else error
        better = error < best
        best, best_scale = np.where(better, error, best), np.where(better[..., None], tried, best_scale)
    return best_scale, np.clip(np.rint(real / best_scale), -highest, highest)


def _learned(
    codes: np.ndarray, target: np.ndarray, moments: np.ndarray, mixed: np.ndarray, highest: int, fixed: np.ndarray
) -> np.ndarray:
    """Coordinate descent: moves single codes to where they lower the error of the sums most.

    Args:
        codes, target: [groups, outputs, inputs], integers, and what they stand for in the float network, in steps.
        moments: [groups, inputs, inputs], of the device's operands; mixed: of the float network's with the device's.
        highest: the largest code.
        fixed: codes that stay.
    """
    codes = codes.copy()
    size = moments.shape[1]
    damping = DAMPING * np.trace(moments, axis1=1, axis2=2)[:, None, None] / size + np.float32(1e-12)
    second = moments + damping * np.eye(size, dtype=np.float32)
    # Half the gradient of the error by the codes.
    slope = (codes - target) @ second + MADE_UP * (target @ (moments - mixed))
    diagonal = np.diagonal(second, axis1=1, axis2=2)[:, None]
    for _ in range(SWEEPS):
        before = codes.copy()
        for start in range(0, size, TOGETHER):
            block = slice(start, start + TOGETHER)
            here, near, known = codes[..., block], slope[..., block].copy(), codes[..., block].copy()
            for place in range(here.shape[2]):
                at = start + place
                new = np.clip(np.rint(here[..., place] - near[..., place] / diagonal[..., at]), -highest, highest)
                step = np.where(fixed[..., at], 0, new - here[..., place])
                here[..., place] += step
                near += step[..., None] * second[:, None, at, block]
            slope += (here - known) @ second[:, block]
        if np.array_equal(codes, before):
            break
    return codes
