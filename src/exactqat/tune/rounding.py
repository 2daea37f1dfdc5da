# SPDX-License-Identifier: Apache-2.0
"""Weights rounded so that a layer's sums, from the codes it gets on the device, change least: up or down, each weight
in view of the others, rather than to nearest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from ..deploy.graph import Graph, Operator
from ..kit.device import OPERATORS
from ..kit.device.arithmetic import windows_of
from ..kit.planning.plans import PlanStep
from ..kit.train.core import primitives_numpy
from ..kit.train.core.weights import folds, per_channel, weight_codes
from .network import Candidate
from .observing import Observer, Places, places_of

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
    steps = {step.path: step for step in candidate.plan.steps}
    users: dict[str, int] = {}
    for step in candidate.plan.steps:
        if step.weights is not None:
            users[step.weights.weight] = users.get(step.weights.weight, 0) + 1
    places = places_of(candidate)
    for operator in observer.precisions.graph.operators:
        known = places.get(operator.inputs[1]) if len(operator.inputs) == 3 else None
        if known is None:
            continue
        weights = steps[known.path].weights
        assert weights is not None
        learned = any(known.path in name for name in candidate.learned)
        if folds(weights) or learned or users[weights.weight] > 1 or not candidate.may_change(weights.weight):
            continue
        if _operands(operator, observer.precisions.graph, np.zeros(1, np.int32)) is None:
            continue

        def change(now: Candidate, operator: Operator = operator, known: Places = known) -> Candidate:
            return _with_learned_rounding(now, observer, operator, known, steps[known.path])

        yield known.path, change


def _with_learned_rounding(
    candidate: Candidate, observer: Observer, operator: Operator, known: Places, step: PlanStep
) -> Candidate:
    graph = candidate.graph()
    weights = step.weights
    assert weights is not None
    run = candidate.run()
    quantized, raw_scale = (np.asarray(each) for each in run.quantized_weight(step.path, weights))
    weight = np.asarray(run.constant(weights.weight), np.float32)
    axis = weights.channel_axis
    codes = weight_codes(quantized, raw_scale, axis)
    scale = per_channel(primitives_numpy, np.where(raw_scale > 0, raw_scale, 1), weight.ndim, axis)
    # How far each code is from the weight, in steps, as the operator's filter has them.
    off = (codes - weight.astype(np.float64) / scale).reshape(-1)[known.weights]
    found = _operands(operator, graph, observer.device_operand(operator, graph))
    assert found is not None
    moments, rows_of = found
    steps = rows_of(_learned(rows_of(off), moments), known.weights.shape)
    change = np.zeros(weight.size)
    change[known.weights.reshape(-1)] = steps.reshape(-1) - off.reshape(-1)
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


Rows = Callable[..., np.ndarray]


def _operands(operator: Operator, graph: Graph, values: np.ndarray) -> tuple[np.ndarray, Rows] | None:
    """The second moments [groups, inputs, inputs] of what meets the filter, and a function that brings an array of the
    filter's shape into [groups, outputs, inputs], and back if given the shape. None: it is not such an operator.

    values: of the operand, integers with zero at 0; of rank 1 if only the answer None matters.
    """
    filter, attributes = graph.tensors[operator.inputs[1]].shape, operator.attributes
    axis = OPERATORS[operator.kind].filter_axis
    if len(filter) == 2 and axis == 0:
        if filter[1] > MOST_INPUTS:
            return None

        def of_matrix(array: np.ndarray, shape: tuple[int, ...] | None = None) -> np.ndarray:
            return array[None] if shape is None else array.reshape(shape)

        return _moments([values.reshape(-1, values.shape[-1])]), of_matrix
    if len(filter) != 4 or not {"dilations", "padding", "strides"} <= set(attributes):
        return None
    window = filter[1:3]
    channels = graph.tensors[operator.inputs[0]].shape[3]
    groups = channels // filter[3] if axis == 0 else channels
    if window[0] * window[1] * channels // groups > MOST_INPUTS:
        return None
    outputs = filter[axis or 0] // groups

    def of_window(array: np.ndarray, shape: tuple[int, ...] | None = None) -> np.ndarray:
        if shape is not None:
            if axis == 0:
                return array.reshape(shape)
            return array.reshape(groups, outputs, *window).transpose(2, 3, 0, 1).reshape(shape)
        if axis == 0:
            return array.reshape(groups, outputs, -1)
        return array.reshape(*window, groups, outputs).transpose(2, 3, 0, 1).reshape(groups, outputs, -1)

    if values.ndim == 1:
        return np.zeros((0, 0, 0)), of_window
    met = windows_of(values, window, attributes, 0)
    size = channels // groups
    parts = [met[..., group * size : (group + 1) * size] for group in range(groups)]
    rows = [part.reshape(-1, window[0] * window[1] * size) for part in parts]
    return _moments(rows), of_window


def _moments(rows: list[np.ndarray]) -> np.ndarray:
    found = []
    for each in rows:
        part = each[:: -(-len(each) // ROWS)].astype(np.float64)
        found.append(part.T @ part / max(len(part), 1))
    return np.stack(found)


__all__ = ["rounded"]
