# SPDX-License-Identifier: Apache-2.0
"""Attention and recurrences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch

from ....kit.planning.sequence import CELLS
from ..core import masks
from ..core.builder import Moving
from ..core.recurrent import ComposedCell, unrolled
from ..core.refusals import Refused
from .converter import Converter, handles, require_fixed
from .elementwise import is_mask
from .items import Item, Meta, Traced
from .operators import base_name

aten = torch.ops.aten


@handles("scaled_dot_product_attention")
def _attention(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    for operand in (a.query, a.key, a.value):
        c.keep_batch(operand, [len(operand.shape) - 2, len(operand.shape) - 1])
    if a.dropout_p and not c.noise_is_training:
        raise Refused.argument("dropout_p", a.dropout_p, "in evaluation too; 0 is allowed there")
    query, key, value, mask = a.query, a.key, a.value, a.attn_mask
    if getattr(a, "enable_gqa", False) and key.shape[-3] != query.shape[-3]:
        count = query.shape[-3] // key.shape[-3]
        key = c.call(aten.repeat_interleave.self_int, key, count, -3)
        value = c.call(aten.repeat_interleave.self_int, value, count, -3)
    if mask is not None and is_mask(c, mask):
        mask = masks.hiding(c, mask)
    elif mask is not None and mask.dtype == torch.bool:
        require_fixed(mask, "mask")
        nothing = c.call(aten.zeros.default, list(mask.shape), dtype=query.dtype)
        mask = c.call(aten.masked_fill.Scalar, nothing, c.call(aten.logical_not.default, mask), -math.inf)
    scale = a.scale if a.scale is not None else 1 / math.sqrt(a.query.shape[-1])
    how = {"causal": bool(a.is_causal), "scale": scale, "dropout": a.dropout_p}
    return c.emit("attention", [query, key, value, mask], *meta, **how)


def _require_batch(c: Converter, a: SimpleNamespace) -> None:
    axis, rank = 0 if a.batch_first else 1, len(a.input.shape)
    if rank != 3 or c.batch_of(a.input) not in (None, axis):
        allowed = f"which reads the batch from axis {axis} of three; it must be there (x has {rank})"
        raise Refused.argument("batch_first", bool(a.batch_first), allowed)


@handles("lstm.input", "gru.input")
def _recurrent(c: Converter, a: SimpleNamespace, meta: list[Meta]) -> list[Item]:
    kind = base_name(c.applied)
    _require_batch(c, a)
    states = a.hx if isinstance(a.hx, (list, tuple)) else [a.hx]
    if any(isinstance(state, Traced) or c.data(state).any() for state in states):
        raise Refused("its initial state is not zero")
    directions = 2 if a.bidirectional else 1
    if len(a.params) != a.num_layers * directions * (4 if a.has_biases else 2):
        raise Refused.argument(
            "proj_size", a.params[4].shape[0] if a.has_biases else a.params[2].shape[0], "0 is allowed"
        )
    operands = [a.input, *a.params]
    return [
        c.emit(
            kind,
            operands,
            *one,
            layers=a.num_layers,
            bidirectional=a.bidirectional,
            batch_first=a.batch_first,
            has_bias=a.has_biases,
            output=index,
            dropout=a.dropout if a.train else 0.0,
        )
        for index, one in enumerate(meta)
    ]


def _cell(c: Converter, weights: Sequence[Item | None], function: Any = aten.tanh.default) -> ComposedCell:
    """weights: of the input, of the state, and perhaps their biases."""
    back, bias = weights[1], weights[3] if len(weights) > 3 else None
    assert back is not None
    return ComposedCell(
        c,
        back.shape[1],
        lambda state, first, count: c.call(aten.linear.default, state, back, bias),
        partial(c.call, function),
        partial(c.call, aten.sigmoid.default),
    )


def _given(c: Converter, x: Item, weights: Sequence[Item | None]) -> Item:
    """What the input adds to all gates."""
    product: Item = c.call(aten.linear.default, x, weights[0], weights[2] if len(weights) > 2 else None)
    return product


@handles("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def _recurrent_cell(c: Converter, a: SimpleNamespace, meta: object) -> Any:
    name, weights = base_name(c.applied), [a.w_ih, a.w_hh, a.b_ih, a.b_hh]
    state, memory = a.hx if name == "lstm_cell" else (a.hx, None)
    function = aten.relu.default if "relu" in name else aten.tanh.default
    cell = _cell(c, weights, function)
    states = CELLS[name.partition("_")[0]](cell, _given(c, a.input, weights), state, memory)
    return list(states) if name == "lstm_cell" else states[0]


@handles("rnn_tanh.input", "rnn_relu.input")
def _rnn(c: Converter, a: SimpleNamespace, meta: list[Meta]) -> list[Item]:
    """Unrolled: no kind says a plain recurrence."""
    if a.dropout and a.train and a.num_layers > 1:
        raise Refused.argument("dropout", a.dropout, "0 is allowed for nn.RNN (LSTM and GRU take any)")
    _require_batch(c, a)
    function = aten.tanh.default if "tanh" in base_name(c.applied) else aten.relu.default
    axis, count = int(a.batch_first), 4 if a.has_biases else 2
    steps = c.call(aten.unbind.int, a.input, axis)
    states = c.call(aten.unbind.int, a.hx, 0)
    last: list[Item] = []
    for _ in range(a.num_layers):
        directions = []
        for backwards in (False, True)[: 2 if a.bidirectional else 1]:
            number = len(last)
            weights = a.params[number * count : (number + 1) * count]

            def entry(at: int, steps: Sequence[Item] = steps, weights: Sequence[Item] = weights) -> Moving:
                return cast(Moving, _given(c, steps[at], weights))

            cell = _cell(c, weights, function)
            sequence, state, _ = unrolled("rnn", cell, entry, len(steps), backwards, states[number])
            last.append(state)
            directions.append(sequence)
        steps = (
            directions[0]
            if len(directions) == 1
            else [c.call(aten.cat.default, list(both), 1) for both in zip(*directions, strict=True)]
        )
    return [c.call(aten.stack.default, steps, axis), c.call(aten.stack.default, last, 0)]
