# SPDX-License-Identifier: Apache-2.0
"""Attention, and recurrent layers unrolled over their fixed length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from .activations import logistic
from .elementwise import SURELY_MASKED, as_operand
from .maker import Maker
from .network import Step
from .planner import Planner, Stored, handles
from .plans import Weights
from .refusals import Refused, word
from .weights import product

MOST_TIME_STEPS = 512


@handles("attention")
def attention(planner: Planner, step: Step) -> Stored:
    # What is learned may ask, or be asked, in place of the input: pooling by attention, memories.
    query, key, value = (planner.read(each) for each in step.inputs[:3])
    attributes = step.attributes
    maker = Maker(planner, step, "attention")
    if isinstance(query, float) or isinstance(key, float) or isinstance(value, float):
        raise Refused(f"{word(step)} with a number")
    if not isinstance(query, Stored) and not isinstance(key, Stored):
        raise Refused(f"{word(step)} with weights that do not depend on the input; compute them beforehand")
    scale = attributes.get("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    mask = step.inputs[3] if len(step.inputs) > 3 else None
    beta = 1.0
    if mask is None and not attributes.get("causal"):
        beta = scale
    elif scale != 1:
        # Before the product: one value for each feature instead of one for each pair.
        if isinstance(query, Stored):
            query = maker.affine(query, scale, 0.0, "query")
        else:
            assert isinstance(key, Stored)
            key = maker.affine(key, scale, 0.0, "key")
    scores = product(maker, as_operand(maker, query), as_operand(maker, key), "scores", adj_y=True)
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
    dropout = float(step.attributes.get("dropout") or 0.0)
    weights = maker.unary(
        "SOFTMAX", scores, "weights", attributes={"axis": scores.rank - 1, "beta": beta}, nonnegative=True
    )
    if dropout:
        weights = maker.only_in_training(weights, "dropout", dropout=dropout)
    return product(maker, weights, as_operand(maker, value))


@dataclass
class _Cell:
    """One layer of one direction, unrolled over the axis of time, which all tensors keep.

    What is stored again at every step has one grid for all of them.

    Attributes:
        x: [batch, time, gates * hidden] (or time first): what the input adds to every gate.
        update_first: whether a GRU's gates stand as Keras has them: update, reset, new (PyTorch: reset, update, new).
    """

    maker: Maker
    x: Stored
    time: int
    hidden: int
    state_weight: str
    state_bias: str | None
    prefix: str
    update_first: bool = False
    first: dict[str, Stored] = field(default_factory=dict)

    def kept(self, role: str, stored: Stored) -> Stored:
        """The result of one step, on the grid of the earlier ones."""
        earlier = self.first.setdefault(role, stored)
        earlier.grid.join(stored.grid)
        return stored

    def part(self, at: int, word_: str) -> str:
        return f"{self.prefix}_{at}_{word_}"

    def gates(self, x: Stored, at: int, word_: str, first: int, count: int = 1) -> Stored:
        """Some neighboring gates of those concatenated in `x`."""
        return self.maker.slice(x, [(2, first * self.hidden, (first + count) * self.hidden, 1)], self.part(at, word_))

    def input(self, at: int) -> Stored:
        """What the input adds at one time."""
        if self.x.shape[self.time] == 1:
            return self.x
        return self.maker.slice(self.x, [(self.time, at, at + 1, 1)], self.part(at, "input"))

    def product(self, state: Stored, at: int) -> Stored:
        """What the state adds."""
        return self.kept(
            "state_product", dense(self.maker, state, self.state_weight, self.state_bias, self.part(at, "state"))
        )


def dense(maker: Maker, x: Stored, weight: str, bias: str | None, part: str) -> Stored:
    """A product with a weight [out, in] over the last axis."""
    rule = maker.rule(f"{maker.path}_{part}")
    shape = (*x.shape[:-1], maker.planner.constants[weight].shape[0])
    weights = Weights(weight, bias, None, rule)
    return maker.store("FULLY_CONNECTED", [x], shape, part, channels=x.rank - 1, rule=rule, weights=weights)


def _lstm_step(cell: _Cell, at: int, state: Stored | None, memory: Stored | None) -> tuple[Stored, Stored]:
    """Gates in the order of PyTorch and Keras: input, forget, new, output."""
    maker = cell.maker
    total = cell.input(at)
    if state is not None:
        total = cell.kept("sum", maker.add(total, cell.product(state, at), cell.part(at, "sum")))
    new = maker.unary("TANH", cell.gates(total, at, "new_sum", 2), cell.part(at, "new"))
    out = logistic(maker, cell.gates(total, at, "out_sum", 3), cell.part(at, "out"))
    into = logistic(maker, cell.gates(total, at, "in_sum", 0), cell.part(at, "in"))
    if memory is None:
        memory = cell.kept("memory", maker.multiply(into, new, cell.part(at, "memory")))
    else:
        forget = logistic(maker, cell.gates(total, at, "forget_sum", 1), cell.part(at, "forget"))
        held = cell.kept("held", maker.multiply(memory, forget, cell.part(at, "held")))
        entering = cell.kept("entering", maker.multiply(into, new, cell.part(at, "entering")))
        memory = cell.kept("memory", maker.add(held, entering, cell.part(at, "memory")))
    bounded = maker.unary("TANH", memory, cell.part(at, "bounded"))
    return cell.kept("state", maker.multiply(bounded, out, f"{cell.prefix}_{at}")), memory


def _gru_step(cell: _Cell, at: int, state: Stored | None, memory: Stored | None) -> tuple[Stored, None]:
    maker, hidden = cell.maker, cell.hidden
    reset_at, update_at = (1, 0) if cell.update_first else (0, 1)
    given = cell.input(at)
    entering = cell.gates(given, at, "new_input", 2)
    if state is None:
        # The state is zero, and what comes of it its bias.
        bias = cell.state_bias
        both = cell.gates(given, at, "gates_input", 0, 2)
        if bias is not None:
            rows = maker.derived(f"{cell.prefix}_bias", (2 * hidden,), lambda array: array[: 2 * hidden], bias)
            both = maker.add(both, rows, cell.part(at, "gates_sum"))
        gates = logistic(maker, both, cell.part(at, "gates"))
        if bias is not None:
            reset = cell.gates(gates, at, "reset", reset_at)
            rest = maker.derived(f"{cell.prefix}_new_bias", (hidden,), lambda array: array[2 * hidden :], bias)
            entering = maker.add(
                entering, maker.multiply(reset, rest, cell.part(at, "new_state")), cell.part(at, "new_sum")
            )
        new = maker.unary("TANH", entering, cell.part(at, "new"))
        update = cell.gates(gates, at, "update", update_at)
        share = maker.affine(update, -1.0, 1.0, cell.part(at, "share"), bounds=(0.0, 1.0))
        return cell.kept("state", maker.multiply(new, share, f"{cell.prefix}_{at}")), None
    returned = cell.product(state, at)
    both = maker.add(
        cell.gates(given, at, "gates_input", 0, 2),
        cell.gates(returned, at, "gates_state", 0, 2),
        cell.part(at, "gates_sum"),
    )
    gates = logistic(maker, cell.kept("gates_sum", both), cell.part(at, "gates"))
    reset, update = cell.gates(gates, at, "reset", reset_at), cell.gates(gates, at, "update", update_at)
    again = maker.multiply(cell.gates(returned, at, "new_returned", 2), reset, cell.part(at, "new_state"))
    total = maker.add(entering, cell.kept("new_state", again), cell.part(at, "new_sum"))
    new = maker.unary("TANH", cell.kept("new_sum", total), cell.part(at, "new"))
    # (1 - z) * n + z * h = n + z * (h - n)
    difference = cell.kept("difference", maker.subtract(state, new, cell.part(at, "difference")))
    change = cell.kept("change", maker.multiply(difference, update, cell.part(at, "change")))
    return cell.kept("state", maker.add(new, change, f"{cell.prefix}_{at}")), None


_STEPS: dict[str, Callable[[_Cell, int, Stored | None, Stored | None], tuple[Stored, Stored | None]]] = {
    "lstm": _lstm_step,
    "gru": _gru_step,
}


@dataclass
class _Unrolled:
    """The tensors of a recurrent layer: the last layer's by time, and the last ones of every layer and direction."""

    maker: Maker
    time: int
    sequence: list[Stored]
    states: list[Stored]
    memories: list[Stored]


@handles("lstm", "gru")
def recurrent(planner: Planner, step: Step) -> Stored:
    """Unrolled once for all results of a call."""
    read = (*step.inputs, bool(step.attributes.get("backwards")))
    unrolled = planner.unrolled.get(read)
    if unrolled is None:
        unrolled = planner.unrolled[read] = _unroll(planner, step)
    maker, wanted = unrolled.maker, int(step.attributes.get("output", 0))
    if wanted == 0:
        tensors = unrolled.sequence
        return tensors[0] if len(tensors) == 1 else maker.concatenate(tensors, unrolled.time, "sequence")
    last, name = (unrolled.states, "h_n") if wanted == 1 else (unrolled.memories, "c_n")
    turned = []
    for at, tensor in enumerate(last):
        if unrolled.time == 1:  # [batch, 1, features] as [1, batch, features]
            tensor = maker.transpose(tensor, (1, 0, 2), f"{name}_{at}")
        turned.append(tensor)
    return turned[0] if len(turned) == 1 else maker.concatenate(turned, 0, name)


def _unroll(planner: Planner, step: Step) -> _Unrolled:
    attributes, x = step.attributes, planner.tensor(step)
    time = 1 if attributes.get("batch_first") else 0
    directions = 2 if attributes.get("bidirectional") else 1
    layers, has_bias = int(attributes.get("layers", 1)), bool(attributes.get("has_bias", True))
    names = [planner.constant(step, position) for position in range(1, len(step.inputs))]
    if x.rank != 3:
        raise Refused(f"{word(step)} on a tensor of shape {list(x.shape)}; it must have a batch axis")
    if len(names) != (4 if has_bias else 2) * layers * directions:
        raise Refused(f"{word(step)} with projections or an initial state; remove them")
    count = x.shape[time]
    if count > MOST_TIME_STEPS:
        raise Refused(f"{word(step)} over {count} time steps; at most {MOST_TIME_STEPS} are unrolled")
    maker = Maker(planner, step, step.kind)
    take_step = _STEPS[step.kind]
    states: list[Stored] = []
    memories: list[Stored] = []
    sequence: list[Stored] = []
    given = iter(names)
    for layer in range(layers):
        by_direction = []
        for direction in range(directions):
            prefix = f"layer_{layer}{'_reverse' * direction}"
            cell = _cell(maker, step.kind, x, time, given, has_bias, prefix)
            cell.update_first = bool(attributes.get("update_first"))
            order = range(count) if (direction == 0) != bool(attributes.get("backwards")) else range(count)[::-1]
            state: Stored | None = None
            memory: Stored | None = None
            made: dict[int, Stored] = {}
            for at in order:
                state, memory = take_step(cell, at, state, memory)
                made[at] = state
            states += [made[order[-1]]]
            memories += [] if memory is None else [memory]
            by_direction.append([made[at] for at in range(count)])
        sequence = by_direction[0]
        if directions == 2:
            pairs = zip(*by_direction, strict=True)
            sequence = [maker.concatenate(list(pair), 2, f"layer_{layer}_{at}_both") for at, pair in enumerate(pairs)]
        if layer + 1 < layers:
            x = sequence[0] if count == 1 else maker.concatenate(sequence, time, f"layer_{layer}")
            if attributes.get("dropout"):
                x = maker.only_in_training(x, f"dropout_{layer}", dropout=float(attributes["dropout"]))
    return _Unrolled(maker, time, sequence, states, memories)


def _cell(maker: Maker, kind: str, x: Stored, time: int, names: Iterator[str], has_bias: bool, prefix: str) -> _Cell:
    weight, back = next(names), next(names)
    bias, back_bias = (next(names), next(names)) if has_bias else (None, None)
    if kind == "lstm" and bias is not None and back_bias is not None:
        # Both are added to the same sum.
        shape = maker.planner.constants[bias].shape
        bias, back_bias = maker.derived(f"{prefix}_bias", shape, lambda a, b: a + b, bias, back_bias), None
    products = dense(maker, x, weight, bias, f"{prefix}_input")
    hidden = maker.planner.constants[back].shape[1]
    return _Cell(maker, products, time, hidden, back, back_bias, prefix)
