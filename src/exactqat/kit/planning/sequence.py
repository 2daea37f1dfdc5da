# SPDX-License-Identifier: Apache-2.0
"""Attention, and recurrent layers unrolled over their fixed length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from . import masks
from .activations import logistic
from .elementwise import SURELY_MASKED, as_operand
from .maker import Maker
from .network import Step
from .planner import Planner, handles
from .refusals import Refused, word
from .stored import Stored
from .weights import product

MOST_TIME_STEPS = 512
T = TypeVar("T")


@handles("attention")
def attention(planner: Planner, step: Step) -> Stored:
    # Learned tensors may be queries, or keys, instead of the input: attention pooling, memories.
    query, key, value = (planner.read(source) for source in step.inputs[:3])
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
            if masks.is_hiding(operand):
                operand = maker.affine(operand, 1.0, 0.0, "mask", bounds=masks.HIDING)
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


class Cell(Protocol[T]):
    """What one step of a recurrent layer is made of: tensors of the plan, or of a network being captured.

    role: what a result is; the plan names it accordingly.

    Attributes:
        reset_after: a GRU's reset gate multiplies the product with the state; else the state.
        update_first: a GRU's gates are update, reset, new, as in Keras; else reset, update, new, as in PyTorch.
        bias: what a GRU's product with a state of zero is; None: zero.
    """

    reset_after: bool
    update_first: bool
    bias: Any

    def combine(self, kind: str, one: T | float, other: T, role: str) -> T:
        """The sum ("add"), difference ("sub") or product ("mul") of two tensors, or of a number and a tensor."""
        raise NotImplementedError

    def part(self, x: T, first: int, count: int, role: str) -> T:
        """Some neighbouring gates along the last axis."""
        raise NotImplementedError

    def product(self, state: T, first: int, count: int) -> T:
        """What the state contributes to some neighbouring gates."""
        raise NotImplementedError

    def function(self, x: T, role: str) -> T:
        """The activation of new values."""
        raise NotImplementedError

    def gate(self, x: T, role: str) -> T:
        """The activation of gates."""
        raise NotImplementedError


def _lstm(cell: Cell[T], entry: T, state: T | None, memory: T | None) -> tuple[T, T | None]:
    """Gates in the order of PyTorch and Keras: input, forget, new, output."""
    total = entry if state is None else cell.combine("add", entry, cell.product(state, 0, 4), "sum")
    new = cell.function(cell.part(total, 2, 1, "new_sum"), "new")
    out = cell.gate(cell.part(total, 3, 1, "out_sum"), "out")
    into = cell.gate(cell.part(total, 0, 1, "in_sum"), "in")
    if memory is None:
        memory = cell.combine("mul", into, new, "memory")
    else:
        forget = cell.gate(cell.part(total, 1, 1, "forget_sum"), "forget")
        held = cell.combine("mul", memory, forget, "held")
        memory = cell.combine("add", held, cell.combine("mul", into, new, "entering"), "memory")
    return cell.combine("mul", cell.function(memory, "bounded"), out, "state"), memory


def _gru(cell: Cell[T], entry: T, state: T | None, memory: T | None) -> tuple[T, T | None]:
    reset_at, update_at = (1, 0) if cell.update_first else (0, 1)
    total = cell.part(entry, 2, 1, "new_input")
    returned = cell.bias if state is None else cell.product(state, 0, 3 if cell.reset_after else 2)
    both = cell.part(entry, 0, 2, "gates_input")
    if returned is not None:
        both = cell.combine("add", both, cell.part(returned, 0, 2, "gates_state"), "gates_sum")
    gates = cell.gate(both, "gates")
    if returned is not None:
        reset = cell.part(gates, reset_at, 1, "reset")
        update = cell.part(gates, update_at, 1, "update")
        if cell.reset_after:
            again = cell.combine("mul", cell.part(returned, 2, 1, "new_returned"), reset, "new_state")
        else:
            assert state is not None  # without one, nothing is returned
            again = cell.product(cell.combine("mul", state, reset, "kept_state"), 2, 1)
        total = cell.combine("add", total, again, "new_sum")
    else:
        update = cell.part(gates, update_at, 1, "update")
    new = cell.function(total, "new")
    if state is None:
        return cell.combine("mul", new, cell.combine("sub", 1.0, update, "share"), "state"), None
    # (1 - z) * n + z * h = n + z * (h - n)
    difference = cell.combine("sub", state, new, "difference")
    return cell.combine("add", new, cell.combine("mul", difference, update, "change"), "state"), None


def _rnn(cell: Cell[T], entry: T, state: T | None, memory: T | None) -> tuple[T, T | None]:
    total = entry if state is None else cell.combine("add", entry, cell.product(state, 0, 1), "sum")
    return cell.function(total, "state"), None


# From the input's contribution to all gates, the state and the memory (None: zero): the next state and memory.
CELLS: dict[str, Callable[..., tuple[Any, Any]]] = {"lstm": _lstm, "gru": _gru, "rnn": _rnn}


def over_time(
    kind: str,
    cell: Cell[T],
    entry: Callable[[int, bool], T],
    count: int,
    backwards: bool,
    state: T | None = None,
    kept: Callable[[int, T, T | None], T] | None = None,
) -> tuple[list[T], T, T | None]:
    """The states in time order, the last one, and the last memory.

    entry: a function of a time, and whether it is the first without a state: the input's contribution to all gates
    there. kept: a function of a time, the new value and the one before (None: zero): the value that is carried on.
    """
    step: Callable[[Cell[T], T, T | None, T | None], tuple[T, T | None]] = CELLS[kind]
    memory: T | None = None
    states: dict[int, T] = {}
    for at in range(count)[::-1] if backwards else range(count):
        before = state, memory
        new, memory = step(cell, entry(at, state is None), state, memory)
        if kept is not None:
            new = kept(at, new, before[0])
            memory = None if memory is None else kept(at, memory, before[1])
        states[at] = state = new
    return [states[at] for at in range(count)], cast(T, state), memory


@dataclass
class _PlannedCell:
    """One layer in one direction, unrolled over the time axis, which all tensors keep.

    Tensors stored at every step share one grid over all steps.

    Attributes:
        x: [batch, time, gates * hidden] (or time first): the input's contribution to every gate.
        bias: the name of the bias of the state's product, or None.
    """

    maker: Maker
    x: Stored
    time: int
    hidden: int
    state_weight: str
    bias: str | None
    prefix: str
    update_first: bool
    reset_after: bool = True
    at: int = 0
    starts: bool = True
    stored: dict[str, Stored] = field(default_factory=dict)

    def named(self, role: str) -> str:
        return f"{self.prefix}_{self.at}" if role == "state" else f"{self.prefix}_{self.at}_{role}"

    def entry(self, at: int, starts: bool) -> Stored:
        """The input's contribution at one time."""
        self.at, self.starts = at, starts
        if self.x.shape[self.time] == 1:
            return self.x
        return self.maker.slice(self.x, [(self.time, at, at + 1, 1)], self.named("input"))

    def _kept(self, role: str, stored: Stored) -> Stored:
        """The result of one step, on the grid of the earlier ones; a first step may compute it differently."""
        if not self.starts or role in ("state", "memory"):
            self.stored.setdefault(role, stored).grid.join(stored.grid)
        return stored

    def combine(self, kind: str, one: Stored | float, other: Stored, role: str) -> Stored:
        if isinstance(one, float):  # 1: the rest of a share
            return self.maker.affine(other, -1.0, 1.0, self.named(role), bounds=(0.0, 1.0))
        function = {"add": self.maker.add, "sub": self.maker.subtract, "mul": self.maker.multiply}[kind]
        return self._kept(role, function(one, other, self.named(role)))

    def part(self, x: Any, first: int, count: int, role: str) -> Any:
        """x: also the name of the bias."""
        start, stop = first * self.hidden, (first + count) * self.hidden
        if isinstance(x, str):
            name = f"{self.prefix}_bias" if first == 0 else f"{self.prefix}_new_bias"
            return self.maker.derived(name, (stop - start,), lambda array: array[start:stop], x)
        return self.maker.slice(x, [(2, start, stop, 1)], self.named(role))

    def product(self, state: Stored, first: int, count: int) -> Stored:
        result = self.maker.linear(state, self.state_weight, self.bias, f"{self.prefix}_{self.at}_state")
        return self._kept("state_product", result)

    def function(self, x: Stored, role: str) -> Stored:
        return self.maker.unary("TANH", x, self.named(role))

    def gate(self, x: Stored, role: str) -> Stored:
        return logistic(self.maker, x, self.named(role))


# The maker of a recurrent layer, its axis of time, the last layer's tensors by time, and the last states and memories
# of every layer and direction.
Unrolled = tuple[Maker, int, list[Stored], list[Stored], list[Stored]]


@handles("lstm", "gru")
def recurrent(planner: Planner, step: Step) -> Stored:
    """Unrolled once for all results of a call."""
    read = (*step.inputs, bool(step.attributes.get("backwards")))
    unrolled = planner.unrolled.get(read)
    if unrolled is None:
        unrolled = planner.unrolled[read] = _unroll(planner, step)
    (maker, time, *results), wanted = unrolled, int(step.attributes.get("output", 0))
    last = results[wanted]
    if wanted == 0:
        return last[0] if len(last) == 1 else maker.concatenate(last, time, "sequence")
    name = ("h_n", "c_n")[wanted - 1]
    turned = []
    for at, tensor in enumerate(last):
        if time == 1:  # [batch, 1, features] as [1, batch, features]
            tensor = maker.transpose(tensor, (1, 0, 2), f"{name}_{at}")
        turned.append(tensor)
    return turned[0] if len(turned) == 1 else maker.concatenate(turned, 0, name)


def _unroll(planner: Planner, step: Step) -> Unrolled:
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
    states: list[Stored] = []
    memories: list[Stored] = []
    sequence: list[Stored] = []
    weights = iter(names)
    for layer in range(layers):
        by_direction = []
        for direction in range(directions):
            prefix = f"layer_{layer}{'_reverse' * direction}"
            cell = _cell(maker, step, x, time, weights, has_bias, prefix)
            backwards = (direction == 1) != bool(attributes.get("backwards"))
            outputs, state, memory = over_time(step.kind, cell, cell.entry, count, backwards)
            states.append(state)
            memories += [] if memory is None else [memory]
            by_direction.append(outputs)
        sequence = by_direction[0]
        if directions == 2:
            pairs = zip(*by_direction, strict=True)
            sequence = [maker.concatenate(list(pair), 2, f"layer_{layer}_{at}_both") for at, pair in enumerate(pairs)]
        if layer + 1 < layers:
            x = sequence[0] if count == 1 else maker.concatenate(sequence, time, f"layer_{layer}")
            if attributes.get("dropout"):
                x = maker.only_in_training(x, f"dropout_{layer}", dropout=float(attributes["dropout"]))
    return maker, time, sequence, states, memories


def _cell(
    maker: Maker, step: Step, x: Stored, time: int, names: Iterator[str], has_bias: bool, prefix: str
) -> _PlannedCell:
    weight, back = next(names), next(names)
    bias, back_bias = (next(names), next(names)) if has_bias else (None, None)
    if step.kind == "lstm" and bias is not None and back_bias is not None:
        # Both are added to the same sum.
        shape = maker.planner.constants[bias].shape
        bias, back_bias = maker.derived(f"{prefix}_bias", shape, lambda a, b: a + b, bias, back_bias), None
    products = maker.linear(x, weight, bias, f"{prefix}_input")
    hidden = maker.planner.constants[back].shape[1]
    update_first = bool(step.attributes.get("update_first"))
    return _PlannedCell(maker, products, time, hidden, back, back_bias, prefix, update_first)
