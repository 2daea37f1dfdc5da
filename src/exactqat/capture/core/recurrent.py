# SPDX-License-Identifier: Apache-2.0
"""Cells of recurrent layers and their run over time, from products, sums and functions.

A whole LSTM or GRU as most use it is a step of its own, which planning unrolls (`planning.sequence`); here are single
cells, plain recurrences, other activations and other forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...planning.sequence import MOST_TIME_STEPS
from .refusals import Refused

# Of what the input adds to all gates, the state and the memory (None: zero): the new state and memory.
CellStep = Callable[["Cell", Any, Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Cell:
    """What the steps of a cell are made of, in a framework's own tensors.

    Attributes:
        combine: of "add", "sub" or "mul" and two tensors.
        part: of a tensor, the first gate and a number of gates: these neighbouring gates along the last axis.
        product: of the state, the first gate and a number of gates: what the state adds to these gates.
        function, gate: the activation of new values, and that of gates.
        reset_after: a GRU's reset gate multiplies the product with the state; else the state.
        update_first: a GRU's gates are update, reset, new, as in Keras; else reset, update, new, as in PyTorch.
        bias: what a GRU's product with a state of zero is; None: zero.
    """

    combine: Callable[[str, Any, Any], Any]
    part: Callable[[Any, int, int], Any]
    product: Callable[[Any, int, int], Any]
    function: Callable[[Any], Any]
    gate: Callable[[Any], Any]
    reset_after: bool = True
    update_first: bool = False
    bias: Any = None


def lstm(cell: Cell, given: Any, state: Any, memory: Any) -> tuple[Any, Any]:
    """Gates in the order input, forget, new, output."""
    total = given if state is None else cell.combine("add", given, cell.product(state, 0, 4))
    into, forget, out = (cell.gate(cell.part(total, at, 1)) for at in (0, 1, 3))
    entering = cell.combine("mul", into, cell.function(cell.part(total, 2, 1)))
    memory = entering if memory is None else cell.combine("add", cell.combine("mul", forget, memory), entering)
    return cell.combine("mul", out, cell.function(memory)), memory


def gru(cell: Cell, given: Any, state: Any, memory: Any) -> tuple[Any, None]:
    reset_at, update_at = (1, 0) if cell.update_first else (0, 1)
    gates, new = cell.part(given, 0, 2), cell.part(given, 2, 1)
    if cell.reset_after:
        returned = cell.bias if state is None else cell.product(state, 0, 3)
        if returned is not None:
            gates = cell.combine("add", gates, cell.part(returned, 0, 2))
            kept = cell.combine("mul", cell.gate(cell.part(gates, reset_at, 1)), cell.part(returned, 2, 1))
            new = cell.combine("add", new, kept)
    elif state is not None:
        gates = cell.combine("add", gates, cell.product(state, 0, 2))
        kept = cell.combine("mul", cell.gate(cell.part(gates, reset_at, 1)), state)
        new = cell.combine("add", new, cell.product(kept, 2, 1))
    update, new = cell.gate(cell.part(gates, update_at, 1)), cell.function(new)
    if state is None:
        return cell.combine("sub", new, cell.combine("mul", update, new)), None
    return cell.combine("add", new, cell.combine("mul", update, cell.combine("sub", state, new))), None


def plain(cell: Cell, given: Any, state: Any, memory: Any) -> tuple[Any, None]:
    total = given if state is None else cell.combine("add", given, cell.product(state, 0, 1))
    return cell.function(total), None


CELLS: dict[str, CellStep] = {"lstm": lstm, "gru": gru, "rnn": plain}


def over_time(
    kind: str, cell: Cell, entries: Sequence[Callable[[], Any]], backwards: bool, state: Any = None
) -> tuple[list[Any], Any, Any]:
    """The states in the order of time, the last one, and the last memory.

    entries: each makes what the input adds to the gates at one time.
    """
    count = len(entries)
    if count > MOST_TIME_STEPS:
        raise Refused(f"over {count} steps of time; at most {MOST_TIME_STEPS} are unrolled")
    memory: Any = None
    made: dict[int, Any] = {}
    for at in reversed(range(count)) if backwards else range(count):
        state, memory = CELLS[kind](cell, entries[at](), state, memory)
        made[at] = state
    return [made[at] for at in range(count)], state, memory
