# SPDX-License-Identifier: Apache-2.0
"""Biases and batch norms that undo the shifts of quantization on the device: layer by layer, each with the earlier ones
corrected."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .network import Candidate
from .observing import Observer, places_of

# A channel's deviation is scaled by at most this.
LARGEST_SCALE = 1.5


def corrected(candidate: Candidate, observer: Observer, with_scale: bool) -> tuple[Candidate, int]:
    """The candidate with means, or means and deviations, as in the fine network; and the number of layers corrected.

    Args:
        with_scale: re-estimate batch norms: deviations too. Otherwise biases alone.
    """
    steps = {step.path: step for step in candidate.plan.steps}
    places, count = places_of(candidate), 0
    for operator in observer.precisions.graph.operators:
        known = places.get(operator.inputs[1]) if len(operator.inputs) == 3 else None
        if known is None or operator.inputs[0] not in observer.fine:
            continue
        weights = steps[known.path].weights
        assert weights is not None
        norm = weights.batch_norm
        bias = norm.bias if norm is not None else weights.bias
        if bias is None or not candidate.may_change(bias) or (with_scale and (norm is None or norm.weight is None)):
            continue
        fine, device = observer.before_activation(operator, candidate.graph())
        order = np.argsort(known.channels)
        (fine_mean, device_mean), (fine_deviation, deviation) = (
            [measure(each)[order] for each in (fine, device)] for measure in (_mean, _deviation)
        )
        tensors = dict(candidate.tensors)
        ratio = np.ones_like(fine_mean)
        held = np.asarray(tensors[bias], np.float64)
        if with_scale:
            assert norm is not None and norm.weight is not None
            usable = (deviation > 0) & (fine_deviation > 0)
            ratio[usable] = np.clip(fine_deviation[usable] / deviation[usable], 1 / LARGEST_SCALE, LARGEST_SCALE)
            run = candidate.run()
            factor, offset = (np.asarray(each, np.float64) for each in run.factor_and_offset(norm))
            mean = np.asarray(run.constant(norm.mean), np.float64)
            own = np.zeros_like(offset) if not weights.bias else np.asarray(run.constant(weights.bias), np.float64)
            whole = own * factor + offset
            wanted = (whole - device_mean) * ratio + fine_mean
            tensors[bias] = (wanted - (own - mean) * factor * ratio).astype(np.float32)
            tensors[norm.weight] = (np.asarray(tensors[norm.weight], np.float64) * ratio).astype(np.float32)
        else:
            tensors[bias] = (held - (device_mean - fine_mean)).astype(np.float32)
        candidate, count = replace(candidate, tensors=tensors), count + 1
    return candidate, count


def _mean(values: np.ndarray) -> np.ndarray:
    return values.mean(0)


def _deviation(values: np.ndarray) -> np.ndarray:
    return values.std(0)


__all__ = ["corrected"]
