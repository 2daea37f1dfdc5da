# SPDX-License-Identifier: Apache-2.0
"""Biases and batch norms that undo the shifts of quantization on the device: layer by layer, each with the earlier ones
corrected."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..deploy.graph import Operator
from .network import Candidate, Places
from .variants import Observer

# A channel's deviation is scaled by at most this.
LARGEST_SCALE = 1.5


def corrections(candidate: Candidate, observer: Observer, with_scale: bool) -> list[tuple[str, Candidate]]:
    """The candidate whose biases give the means of the fine network. with_scale: whose batch norms give its means and
    deviations."""
    changed, count = corrected(candidate, observer, with_scale)
    return [(f"of {count} layers", changed)] if count else []


def corrected(candidate: Candidate, observer: Observer, with_scale: bool) -> tuple[Candidate, int]:
    """The candidate with means, or means and deviations, as in the fine network; and the number of layers corrected.

    Args:
        with_scale: re-estimate batch norms: deviations too. Otherwise biases alone.
    """
    candidate, count = candidate.settled(), 0
    for operator, places in observer.layers(candidate):
        changed = corrected_layer(candidate, observer, operator, places, with_scale)
        candidate, count = changed, count + (changed is not candidate)
    return replace(candidate), count


def corrected_layer(
    candidate: Candidate, observer: Observer, operator: Operator, places: Places, with_scale: bool
) -> Candidate:
    """As `corrected`, of one layer; the candidate itself if the layer has nothing to be corrected."""
    weights = places.step.weights
    assert weights is not None
    norm = weights.batch_norm
    bias = norm.bias if norm is not None else weights.bias
    if bias is None or not candidate.may_change(bias):
        return candidate
    if with_scale and (norm is None or norm.weight is None):
        return candidate
    order, (fine, device) = np.argsort(places.channels), observer.sums(operator, candidate.graph())
    fine_mean, device_mean = (sums.mean(0, np.float64)[order] for sums in (fine, device))
    if not with_scale:
        moved = np.asarray(candidate.tensors[bias], np.float64) - (device_mean - fine_mean)
        return candidate.with_layer(operator, places, {bias: moved.astype(np.float32)})
    assert norm is not None and norm.weight is not None
    fine_deviation, deviation = (sums.std(0, np.float64)[order] for sums in (fine, device))
    ratio = np.ones_like(deviation)
    usable = (deviation > 0) & (fine_deviation > 0)
    ratio[usable] = np.clip(fine_deviation[usable] / deviation[usable], 1 / LARGEST_SCALE, LARGEST_SCALE)
    run = candidate.run()
    factor, offset = (np.asarray(array, np.float64) for array in run.factor_and_offset(norm))
    mean = np.asarray(run.constant(norm.mean), np.float64)
    own = np.zeros_like(offset) if not weights.bias else np.asarray(run.constant(weights.bias), np.float64)
    wanted = (own * factor + offset - device_mean) * ratio + fine_mean
    changes = {bias: wanted - (own - mean) * factor * ratio}
    changes[norm.weight] = np.asarray(candidate.tensors[norm.weight], np.float64) * ratio
    changes = {name: values.astype(np.float32) for name, values in changes.items()}
    return candidate.with_layer(operator, places, changes)
