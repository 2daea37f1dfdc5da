# SPDX-License-Identifier: Apache-2.0
"""Attention, and recurrent layers unrolled over their fixed length."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..network import Step
from ..plan import Weights
from .activations import logistic
from .elementwise import SURELY_MASKED
from .planner import Maker, Planner, Stored, handles
from .refusals import Refused, word
from .weights import product

MOST_TIME_STEPS = 512


@handles("attention")
def attention(planner: Planner, step: Step) -> Stored:
    query, key, value = (planner.tensor(step, position) for position in range(3))
    attributes = step.attributes
    maker = Maker(planner, step, "attention")
    scale = attributes.get("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    # Scaled before the product: one value for each feature instead of one for each pair.
    query = maker.affine(query, scale, 0.0, "query") if scale != 1 else query
    scores = product(maker, query, key, "scores", adj_y=True)
    mask = step.inputs[3] if len(step.inputs) > 3 else None
    if attributes.get("causal"):
        rows, columns = query.shape[-2], key.shape[-2]
        allowed = np.tril(np.ones((rows, columns), bool))
        causal = maker.array(np.where(allowed, 0, SURELY_MASKED), "causal_mask")
        scores = maker.add(scores, causal, "masked_by_order")
    if mask is not None:
        operand = planner.read(mask)
        if isinstance(operand, Stored):
            scores = maker.add(scores, operand, "masked")
        elif not isinstance(operand, float):
            added = maker.derived("mask", operand.shape, lambda array: array.clip(min=SURELY_MASKED), operand.name)
            scores = maker.add(scores, added, "masked")
    weights = maker.unary("SOFTMAX", scores, "weights", attributes={"axis": scores.rank - 1}, nonnegative=True)
    return product(maker, weights, value)


class _Recurrent:
    """What LSTM and GRU have in common: layers, directions, and the steps of time."""

    gates: int

    def __init__(self, planner: Planner, step: Step) -> None:
        self.planner, self.step = planner, step
        attributes = step.attributes
        self.x = planner.tensor(step)
        self.layers = int(attributes.get("layers", 1))
        self.directions = 2 if attributes.get("bidirectional") else 1
        self.has_bias = bool(attributes.get("has_bias", True))
        self.wanted = int(attributes.get("output", 0))
        self.names = [planner.constant(step, position) for position in range(1, len(step.inputs))]
        self.time = 1 if attributes.get("batch_first") else 0
        each = 4 if self.has_bias else 2
        if len(self.names) != each * self.layers * self.directions:
            raise Refused(f"{word(step)} with projections or an initial state; leave them out")
        if self.x.rank != 3:
            raise Refused(f"{word(step)} on a tensor of shape {list(self.x.shape)}; it must have a batch")
        if self.x.shape[self.time] > MOST_TIME_STEPS:
            raise Refused(
                f"{word(step)} over {self.x.shape[self.time]} steps of time, at most {MOST_TIME_STEPS} are unrolled"
            )


_Cell = Callable[
    [Maker, Stored, "Stored | None", "Stored | None", dict[str, str], int, str], "tuple[Stored, Stored | None]"
]


def _run(planner: Planner, step: Step, cell: _Cell) -> Stored:
    """The unrolled layers, made once for all results of one call."""
    shared = planner.unrolled.get(tuple(step.inputs))
    wanted = int(step.attributes.get("output", 0))
    if shared is None:
        shared = _unroll(planner, step, cell)
        planner.unrolled[tuple(step.inputs)] = shared
    maker, sequence, states, memories = shared
    time = 1 if step.attributes.get("batch_first") else 0
    if wanted == 0:
        return _along(maker, sequence, time, planner.batch_axis(step), "sequence")
    chosen = states if wanted == 1 else memories
    return _along(maker, chosen, 0, 1, "h_n" if wanted == 1 else "c_n")


def _along(maker: Maker, tensors: list[Stored], axis: int, batch_axis: int, part: str) -> Stored:
    """[batch, features] each, joined along a new axis."""
    shaped = []
    for number, tensor in enumerate(tensors):
        shape = (*tensor.shape[:axis], 1, *tensor.shape[axis:])
        shaped.append(maker.reshape(tensor, shape, batch_axis, f"{part}_{number}"))
    result = shaped[0] if len(shaped) == 1 else maker.concatenate(shaped, axis, part)
    result.channels = 2
    return result


def _unroll(planner: Planner, step: Step, cell: _Cell) -> Any:
    given = _Recurrent(planner, step)
    maker = Maker(planner, step, step.kind)
    x, count = given.x, given.x.shape[given.time]
    features = x.shape[2]
    rows = x.shape[x.batch_axis]
    current = []
    for at in range(count):
        cut = maker.slice(x, [(given.time, at, at + 1, 1)], f"input_{at}") if count > 1 else x
        current.append(maker.reshape(cut, (rows, features), 0, f"step_{at}"))
    states, memories = [], []
    each = 4 if given.has_bias else 2
    for layer in range(given.layers):
        outputs = []
        for direction in range(given.directions):
            at = (layer * given.directions + direction) * each
            names = dict(zip(("input", "state", "input_bias", "state_bias"), given.names[at : at + each], strict=False))
            hidden = planner.constants[names["state"]].shape[1]
            order = range(count) if direction == 0 else range(count)[::-1]
            state: Stored | None = None
            memory: Stored | None = None
            made: dict[int, Stored] = {}
            for time in order:
                prefix = f"layer_{layer}{'_reverse' * direction}_{time}"
                state, memory = cell(maker, current[time], state, memory, names, hidden, prefix)
                made[time] = state
            assert state is not None
            states.append(state)
            memories.append(memory)
            outputs.append([made[time] for time in range(count)])
        if given.directions == 1:
            current = outputs[0]
        else:
            current = [
                maker.concatenate([outputs[0][time], outputs[1][time]], 1, f"layer_{layer}_{time}_both")
                for time in range(count)
            ]
    return maker, current, states, memories


def _dense(maker: Maker, x: Stored, weight: str, bias: str | None, part: str, **how: Any) -> Stored:
    rule = maker.rule(maker.path)
    shape = (x.shape[0], maker.planner.constants[weight].shape[0])
    return maker.store(
        "FULLY_CONNECTED", [x], shape, part, channels=1, rule=rule, weights=Weights(weight, bias, None, rule), **how
    )


def _rows(maker: Maker, constant: str, start: int, stop: int, name: str) -> str:
    """Some rows of a constant; one constant for all who ask for the same."""
    known = maker.planner.cut.get((constant, start, stop))
    if known is None:
        shape = (stop - start, *maker.planner.constants[constant].shape[1:])
        known = maker.derived(name, shape, lambda array: array[start:stop], constant)
        maker.planner.cut[(constant, start, stop)] = known
    return known


def _sum_of_biases(maker: Maker, names: dict[str, str], start: int, stop: int, gate: str) -> str | None:
    if "input_bias" not in names:
        return None
    both = (names["input_bias"], names["state_bias"])
    known = maker.planner.cut.get((both, start, stop))
    if known is None:
        known = maker.derived(f"{gate}_bias", (stop - start,), lambda a, b: a[start:stop] + b[start:stop], *both)
        maker.planner.cut[(both, start, stop)] = known
    return known


def _gate(
    maker: Maker, x: Stored, state: Stored | None, names: dict[str, str], gate: int, hidden: int, part: str
) -> Stored:
    """What one gate gets: both products and both biases."""
    start, stop = gate * hidden, (gate + 1) * hidden
    bias = _sum_of_biases(maker, names, start, stop, f"{_last(names['input'])}_gate_{gate}")
    own = _rows(maker, names["input"], start, stop, f"{_last(names['input'])}_gate_{gate}")
    if state is None:
        return _dense(maker, x, own, bias, part)
    back = _rows(maker, names["state"], start, stop, f"{_last(names['state'])}_gate_{gate}")
    return maker.add(
        _dense(maker, x, own, bias, f"{part}_input"), _dense(maker, state, back, None, f"{part}_state"), part
    )


def _last(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def _lstm_cell(
    maker: Maker,
    x: Stored,
    state: Stored | None,
    memory: Stored | None,
    names: dict[str, str],
    hidden: int,
    prefix: str,
) -> tuple[Stored, Stored | None]:
    gates = ("in", "forget", "new", "out")
    made = {
        word_: _gate(maker, x, state, names, number, hidden, f"{prefix}_{word_}_sum")
        for number, word_ in enumerate(gates)
        if not (word_ == "forget" and memory is None)
    }
    new = maker.unary("TANH", made["new"], f"{prefix}_new")
    entering = maker.multiply(logistic(maker, made["in"], f"{prefix}_in"), new, f"{prefix}_entering")
    if memory is None:
        memory = entering
    else:
        kept = maker.multiply(memory, logistic(maker, made["forget"], f"{prefix}_forget"), f"{prefix}_kept")
        memory = maker.add(kept, entering, f"{prefix}_memory")
    bounded = maker.unary("TANH", memory, f"{prefix}_bounded")
    return maker.multiply(bounded, logistic(maker, made["out"], f"{prefix}_out"), prefix), memory


def _gru_cell(
    maker: Maker,
    x: Stored,
    state: Stored | None,
    memory: Stored | None,
    names: dict[str, str],
    hidden: int,
    prefix: str,
) -> tuple[Stored, Stored | None]:
    update = logistic(maker, _gate(maker, x, state, names, 1, hidden, f"{prefix}_update_sum"), f"{prefix}_update")
    start, stop = 2 * hidden, 3 * hidden
    label = _last(names["input"])
    biases = [
        _rows(maker, names[which], start, stop, f"{label}_new_{which}") if which in names else None
        for which in ("input_bias", "state_bias")
    ]
    own = _dense(maker, x, _rows(maker, names["input"], start, stop, f"{label}_new"), biases[0], f"{prefix}_new_input")
    if state is None:
        # The state is zero: what comes of it is its bias, times the reset gate.
        if biases[1] is not None:
            reset = logistic(maker, _gate(maker, x, None, names, 0, hidden, f"{prefix}_reset_sum"), f"{prefix}_reset")
            own = maker.add(own, maker.multiply(reset, biases[1], f"{prefix}_new_state"), f"{prefix}_new_sum")
        new = maker.unary("TANH", own, f"{prefix}_new")
        return maker.multiply(
            new, maker.affine(update, -1.0, 1.0, f"{prefix}_entering", bounds=(0.0, 1.0)), prefix
        ), None
    reset = logistic(maker, _gate(maker, x, state, names, 0, hidden, f"{prefix}_reset_sum"), f"{prefix}_reset")
    back_weight = _rows(maker, names["state"], start, stop, f"{_last(names['state'])}_new")
    back = _dense(maker, state, back_weight, biases[1], f"{prefix}_new_back")
    entering = maker.add(own, maker.multiply(reset, back, f"{prefix}_new_state"), f"{prefix}_new_sum")
    new = maker.unary("TANH", entering, f"{prefix}_new")
    # (1 - z) * n + z * h = n + z * (h - n)
    change = maker.multiply(update, maker.subtract(state, new, f"{prefix}_difference"), f"{prefix}_change")
    return maker.add(new, change, prefix), None


@handles("lstm")
def lstm(planner: Planner, step: Step) -> Stored:
    return _run(planner, step, _lstm_cell)


@handles("gru")
def gru(planner: Planner, step: Step) -> Stored:
    return _run(planner, step, _gru_cell)
