# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers, and layers for each time."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import keras
import numpy as np

from ..core import masks
from ..core.builder import Moving
from ..core.recurrent import ComposedCell, unrolled
from ..core.refusals import Refused
from .items import Fixed, Item, Result, path_of
from .products import linear
from .reader import Reader, layers


@layers("RNN", "Bidirectional")
def _recurrent(c: Reader, layer: keras.Layer, x: Moving, mask: Item | None = None, **others: object) -> Result:
    """The sequence or its last entry, as the layer says, and its states where it gives them."""
    if others:
        raise Refused(f"called with {', '.join(others)}; it takes a sequence, and a mask, and starts from zero")
    if not isinstance(layer, keras.layers.Bidirectional):
        sequence, *states = _run_of_time(c, layer, x, mask)
        if layer.return_sequences and layer.go_backwards:  # Keras gives it in the order in which it was made
            sequence = c.emit("flip", [sequence], sequence.shape, axes=(1,))
        first = sequence if layer.return_sequences else states[0]
        return [first, *states] if layer.return_state else first
    both = [_run_of_time(c, direction, x, mask) for direction in (layer.forward_layer, layer.backward_layer)]
    one, two = (run[0] if layer.return_sequences else run[1] for run in both)
    states = [*both[0][1:], *both[1][1:]] if layer.return_state else []
    if layer.merge_mode is None:
        return [one, two, *states]
    if layer.merge_mode == "concat":
        merged = c.emit("concat", [one, two], (*one.shape[:-1], one.shape[-1] + two.shape[-1]), axis=one.rank - 1)
    else:
        merged = c.emit("mul" if layer.merge_mode == "mul" else "add", [one, two], one.shape)
        if layer.merge_mode == "ave":
            merged = c.emit("mul", [merged, 0.5], merged.shape)
    return [merged, *states] if states else merged


@layers("TimeDistributed")
def _time_distributed(c: Reader, layer: keras.Layer, x: Moving, mask: Item | None = None) -> Result:
    """All times at once, as further examples; with batch norm inside time by time, each by statistics of its own."""
    inner, (batch, times) = layer.layer, x.shape[:2]
    if mask is not None and "mask" in inspect.signature(inner.call).parameters:
        raise Refused("called with mask; it takes a sequence alone")
    if not any(isinstance(sublayer, keras.layers.BatchNormalization) for sublayer in inner._flatten_layers()):
        result = c.called(inner, c.reshape(x, (batch * times, *x.shape[2:])))
        return c.reshape(result, (batch, times, *result.shape[1:]))
    every = [c.called(inner, c.reshape(c.cut(x, 1, at, at + 1), (batch, *x.shape[2:]))) for at in range(times)]
    rest = every[0].shape[1:]
    return c.emit("concat", [c.reshape(entry, (batch, 1, *rest)) for entry in every], (batch, times, *rest), axis=1)


_CELLS = {keras.layers.LSTMCell: "lstm", keras.layers.GRUCell: "gru", keras.layers.SimpleRNNCell: "rnn"}


def _run_of_time(c: Reader, layer: keras.Layer, x: Moving, mask: Item | None = None) -> list[Any]:
    """The sequence of results in the order of time, and the last states. mask: where it is 0, nothing happens."""
    cell: Any = getattr(layer, "cell", None)
    if type(cell) not in _CELLS or not isinstance(layer, keras.layers.RNN) or x.rank != 3:
        raise Refused(
            "only LSTM, GRU and SimpleRNN over a sequence of vectors are unrolled; use one of them, or Conv1D over time"
        )
    if cell.recurrent_dropout:
        raise Refused(f"with recurrent_dropout={cell.recurrent_dropout}; it is unrolled with recurrent_dropout=0.0")
    if layer.stateful:
        raise Refused("with stateful=True; the state starts from zero at every call, which is stateful=False")
    x = c.dropout(x, cell.dropout, (None, 1, None))  # one mask for all times
    kind = _CELLS[type(cell)]
    # What a step of the network says: PyTorch's LSTM and GRU.
    usual = cell.activation is keras.activations.tanh and kind != "rnn"
    usual = usual and cell.recurrent_activation is keras.activations.sigmoid
    shown = None if mask is None else c.truth_of(mask)
    if shown is not None or not (usual and getattr(cell, "reset_after", True)):
        return _by_steps(c, layer, kind, x, shown)
    units, kernels = int(cell.units), (c.weight(cell.kernel), c.weight(cell.recurrent_kernel))
    weights = [c.then(kernel, kernel.shape[::-1], lambda array: array.transpose((1, 0))) for kernel in kernels]
    if cell.use_bias:
        bias, count = c.weight(cell.bias), weights[0].shape[0]
        both = [bias, c.fixed_of(np.zeros(count, np.float32))]
        weights += both if kind == "lstm" else [c.then(bias, (count,), lambda a, at=at: a[at]) for at in (0, 1)]
    how: dict[str, Any] = {"module": path_of(layer), "layers": 1, "bidirectional": False, "batch_first": True}
    how |= {"has_bias": bool(cell.use_bias), "backwards": bool(layer.go_backwards), "update_first": kind == "gru"}
    (batch, times), ends = x.shape[:2], (1, 2) if kind == "lstm" else (1,)
    sequence = c.emit(kind, [x, *weights], (batch, times, units), output=0, **how)
    states = [c.emit(kind, [x, *weights], (1, batch, units), output=at, **how) for at in ends]
    return [sequence, *(c.reshape(state, (batch, units)) for state in states)]


def _by_steps(c: Reader, layer: keras.Layer, kind: str, x: Moving, mask: Moving | None) -> list[Any]:
    """As `_run_of_time`, from products, sums and functions: other activations, a reset before the product, no gates,
    states that a mask keeps.

    The first state is zero, so there is no product with it.
    """
    cell, (batch, count) = layer.cell, x.shape[:2]
    units, kernel = int(cell.units), c.weight(cell.kernel)
    back, bias, path = c.weight(cell.recurrent_kernel), c.weight(cell.bias), c.module_of(kernel)
    back_bias: Fixed | None = None
    if bias is not None and len(bias.shape) == 2:  # of the input, and of the product with the state
        both, width = bias, bias.shape[1]
        bias, back_bias = (c.then(both, (width,), lambda a, at=at: a[at]) for at in (0, 1))

    def product(state: Moving, first: int, many: int) -> Moving:
        return linear(c, state, *columns[first, many], path)

    def gate(x: Moving) -> Any:
        function, began = getattr(cell, "recurrent_activation", None), len(c.steps)
        result = c.apply(function, x)
        if x.shape[-1] == units or x.name in result.samples:
            return result
        # It is no function value by value: each gate by itself, as Keras has it.
        c.forget(began)
        return c.join([c.apply(function, parts.part(x, at, 1)) for at in range(x.shape[-1] // units)], x.rank - 1)

    def entry(at: int) -> Any:
        return c.entry(products, 1, at)

    after = bool(getattr(cell, "reset_after", False))
    uses = {"lstm": [(0, 4)], "gru": [(0, 3)] if after else [(0, 2), (2, 1)], "rnn": [(0, 1)]}
    activation = partial(c.apply, cell.activation)
    parts = ComposedCell(c, units, product, activation, gate, after, update_first=True, bias=back_bias)
    # Once for all times, which so have the same weights.
    columns = {
        use: (parts.part(back, *use), None if back_bias is None else parts.part(back_bias, *use)) for use in uses[kind]
    }
    products = linear(c, x, kernel, bias, path)

    def shown(at: int) -> Moving:
        assert mask is not None
        return c.reshape(c.cut(mask, 1, at, at + 1), (batch, 1))

    def kept(at: int, new: Moving, old: Moving | None) -> Any:
        return masks.chosen(c, shown(at), new, 0.0 if old is None else old, new.shape)

    keeping = None if mask is None else kept
    states, state, memory = unrolled(kind, parts, entry, count, layer.go_backwards, kept=keeping)
    if mask is not None and layer.zero_output_for_mask:
        states = [masks.chosen(c, shown(at), output, 0.0, output.shape) for at, output in enumerate(states)]
    sequence = c.join([c.reshape(output, (batch, 1, units)) for output in states], 1)
    return [sequence, *(tensor for tensor in (state, memory) if tensor is not None)]
