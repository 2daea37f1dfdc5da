# SPDX-License-Identifier: Apache-2.0
"""ONNX's recurrent operators as steps of a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.refusals import Refused
from .onnx_nodes import handles
from .reader import Fixed

# Gates as networks have them, by their places in ONNX: input, output, forget, cell; those of a GRU lie as they do here.
_LSTM = (0, 2, 3, 1)
_GRU = (0, 1, 2)
_ACTIVATIONS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"]}


def _in_order(array: np.ndarray, gates: Sequence[int]) -> np.ndarray:
    """Rows of the gates, in another order."""
    parts = np.split(array, len(gates), 0)
    return np.concatenate([parts[gate] for gate in gates])


def _refuse_others(c: Any, node: Any, given: dict[str, Any], directions: int) -> None:
    states = range(5, 7 if node.op_type == "LSTM" else 6)
    for position in states:
        begins = c.operand_numbers(node, position)
        if begins is not None and np.any(begins):
            raise Refused("it begins with a state other than 0")
    wanted = _ACTIVATIONS[node.op_type] * directions
    activations = [each.decode() if isinstance(each, bytes) else each for each in given.get("activations") or wanted]
    if activations != wanted or given.get("clip") or given.get("input_forget"):
        raise Refused("its activations, clip or coupled gates are others than usual")
    if c.item(node, 4) is not None or c.item(node, 7) is not None:
        raise Refused("its sequences end at different places, or it has peepholes")
    if node.op_type == "GRU" and not given.get("linear_before_reset"):
        raise Refused("linear_before_reset=0 resets in front of the product; export it with 1")


@handles("LSTM", "GRU")
def _recurrent(c: Any, node: Any) -> Any:
    x, given = c.item(node, 0), c.attributes(node)
    direction = given.get("direction", "forward")
    directions, layout = 2 if direction == "bidirectional" else 1, bool(given.get("layout"))
    _refuse_others(c, node, given, directions)
    weight, memory, bias = (c.operand_numbers(node, position) for position in (1, 2, 3))
    assert weight is not None and memory is not None
    gates, weights = _LSTM if node.op_type == "LSTM" else _GRU, []
    for at in range(directions):
        parts = [weight[at], memory[at]]
        parts += [] if bias is None else np.split(bias[at], 2)
        weights += [
            Fixed(f"{node.input[1 + min(number, 2)]}_{at}_{number}", _in_order(part, gates))
            for number, part in enumerate(parts)
        ]
    hidden, how = memory.shape[-1], {"layers": 1, "bidirectional": directions == 2, "has_bias": bias is not None}
    more: dict[str, Any] = {"batch_first": layout, "backwards": direction == "reverse"}
    if node.op_type == "GRU":
        more["update_first"] = True
    first, second = x.shape[:2]
    batch = first if layout else second

    def made(number: int, shape: Sequence[int]) -> Any:
        return c.step(node.op_type.lower(), [x, *weights], shape, output=number, **how, **more)

    results: list[Any] = []
    for number, name in enumerate(node.output):
        if not name:
            results.append(None)
        elif number:
            state = made(number, (directions, batch, hidden))
            results.append(c.permute(state, (1, 0, 2)) if layout else state)
        else:
            sequence = made(0, (first, second, directions * hidden))
            apart = c.reshape(sequence, (first, second, directions, hidden))
            results.append(apart if layout else c.permute(apart, (0, 2, 1, 3)))
    return results
