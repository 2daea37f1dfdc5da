# SPDX-License-Identifier: Apache-2.0
"""Weights rounded so that a layer's sums, from the codes it gets on the device, change least: up or down, each weight
in view of the others, rather than to nearest."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from ..deploy.graph import Graph, Operator
from ..kit.device import OPERATORS
from ..kit.device.arithmetic import windows_of
from ..qat.train.core import primitives_numpy
from ..qat.train.core.weights import folds, per_channel, weight_codes
from .network import Candidate, Places
from .variants import Observer

# The most inputs of one output: the cost of learning grows with their square.
MOST_INPUTS = 2304
# Rows of operands that are looked at.
ROWS = 2**15
SWEEPS = 4
# Share of the mean diagonal that is added to it.
DAMPING = 0.01


def rounded(candidate: Candidate, observer: Observer) -> Iterator[tuple[str, Callable[[Candidate], Candidate]]]:
    """For each layer whose rounding can be learned, its path and a function that applies it to a candidate.

    Apply a change to the candidate at that time, as earlier layers change what the layer reads.
    """
    users = Counter(step.weights.weight for step in candidate.plan.steps if step.weights is not None)
    for operator, places in observer.layers(candidate):
        weights = places.step.weights
        assert weights is not None
        learned = any(places.step.path in name for name in candidate.learned)
        if folds(weights) or learned or users[weights.weight] > 1 or not candidate.may_change(weights.weight):
            continue
        rows = _rows(operator, observer.precisions.graph)
        if rows is not None:
            yield places.step.path, functools.partial(_with_learned_rounding, observer, operator, places, rows)


def _with_learned_rounding(
    observer: Observer, operator: Operator, places: Places, rows: np.ndarray, candidate: Candidate
) -> Candidate:
    """rows: positions in the filter, [groups, outputs, inputs]."""
    weights = places.step.weights
    assert weights is not None
    run = candidate.run()
    grid, weight = run.weight_grid(places.step.path, weights), np.asarray(run.constant(weights.weight), np.float32)
    quantized, raw_scale = np.asarray(grid(weight)), np.asarray(grid.scale(weight))
    axis = weights.channel_axis
    codes = weight_codes(quantized, raw_scale, axis)
    scale = per_channel(primitives_numpy, np.where(raw_scale > 0, raw_scale, 1), weight.ndim, axis)
    positions = places.weights.reshape(-1)[rows]
    # How far each code is from the weight, in steps.
    off = (codes - weight.astype(np.float64) / scale).reshape(-1)[positions]
    change = np.zeros(weight.size)
    change[positions] = _learned(off, _moments(operator, candidate.graph(), observer, rows)) - off
    new = codes + np.rint(change).reshape(codes.shape)
    highest = 2 ** (weights.rule.weight_bits - 1) - 1
    new = np.clip(new, -highest, highest)
    # The largest weight of a channel keeps its code, so that the scale stays what it is.
    new = np.where(np.abs(codes) >= highest, codes, new)
    values = np.where(new == codes, weight, (new * scale).astype(np.float32))
    return replace(candidate, tensors={**candidate.tensors, weights.weight: values.astype(np.float32)})


def _learned(off: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """Coordinate descent: flips single codes to the other side of their weight where that lowers off' moments off.

    Args:
        off: [groups, outputs, inputs], steps from the weight to its code, in -0.5..0.5.
        moments: [groups, inputs, inputs], of the operands.
    """
    result = off.copy()
    for group, second in enumerate(moments):
        second = second + np.eye(len(second)) * (DAMPING * np.trace(second) / len(second) + 1e-12)
        here = result[group]
        slope = here @ second
        diagonal = np.diag(second)
        for _ in range(SWEEPS):
            flipped = 0
            for place in range(here.shape[1]):
                # A code that equals its weight exactly has no other side.
                step = -np.sign(here[:, place])
                gain = 2 * step * slope[:, place] + diagonal[place]
                rows = np.flatnonzero((gain < 0) & (step != 0))
                if rows.size:
                    here[rows, place] += step[rows]
                    slope[rows] += step[rows, None] * second[place]
                    flipped += rows.size
            if not flipped:
                break
    return result


def _rows(operator: Operator, graph: Graph) -> np.ndarray | None:
    """Positions in the flattened filter, int64 [groups, outputs, inputs]; None: its rounding cannot be learned."""
    shape, axis = graph.tensors[operator.inputs[1]].shape, OPERATORS[operator.kind].filter_axis
    positions = np.arange(math.prod(shape)).reshape(shape)
    if len(shape) == 2 and axis == 0:
        rows = positions[None]
    elif len(shape) != 4 or not {"dilations", "padding", "strides"} <= set(operator.attributes):
        return None
    elif axis == 0:
        groups = graph.tensors[operator.inputs[0]].shape[3] // shape[3]
        rows = positions.reshape(groups, shape[0] // groups, -1)
    else:
        groups = graph.tensors[operator.inputs[0]].shape[3]
        rows = positions.reshape(shape[1] * shape[2], groups, -1).transpose(1, 2, 0)
    return rows if rows.shape[2] <= MOST_INPUTS else None


def _moments(operator: Operator, graph: Graph, observer: Observer, rows: np.ndarray) -> np.ndarray:
    """The second moments [groups, inputs, inputs] of the codes that meet the filter on the device.

    rows: positions in the filter, [groups, outputs, inputs].
    """
    input, filter = (graph.tensors[name] for name in operator.inputs[:2])
    values = observer.codes(graph, [input.name])[input.name].astype(np.int32) - int(input.quantization.zero_point[0])
    if len(filter.shape) == 4:
        values = windows_of(values, filter.shape[1:3], operator.attributes, 0)
    moments = []
    for group in np.split(values, len(rows), -1):
        met = group.reshape(-1, rows.shape[2])
        met = met[:: -(-len(met) // ROWS)].astype(np.float64)
        moments.append(met.T @ met / max(len(met), 1))
    return np.stack(moments)
