# SPDX-License-Identifier: Apache-2.0
"""Fake quantization of rows in symmetric ranges: the per-channel operators, turned."""

from exactqat.operators.reference import fake_quant
from exactqat.operators.reference.arithmetic import subtract
from exactqat.operators.reference.arrays import namespace


def _turned(rows):
    """Channels last."""
    return rows.reshape(rows.shape[0], -1).T if rows.size else rows.reshape(0, rows.shape[0])


def _columns(inputs):
    """Channels last, and their range."""
    columns = _turned(inputs)
    magnitude = namespace(inputs).abs(columns).max(0, initial=0)
    return columns, -magnitude, magnitude


def fake_quant_rows(inputs, *, num_bits, narrow_range):
    outputs = fake_quant.fake_quant_with_min_max_vars_per_channel(
        *_columns(inputs), num_bits=num_bits, narrow_range=narrow_range
    )
    return outputs.T.reshape(inputs.shape)


def fake_quant_rows_gradient(gradients, inputs, *, num_bits, narrow_range):
    backprops, _, _ = fake_quant.fake_quant_with_min_max_vars_per_channel_gradient(
        _turned(gradients), *_columns(inputs), num_bits=num_bits, narrow_range=narrow_range
    )
    return backprops.T.reshape(inputs.shape)


def fake_quant_rows_within(inputs, magnitudes, *, num_bits, narrow_range):
    outputs = fake_quant.fake_quant_with_min_max_vars_per_channel(
        _turned(inputs), -magnitudes, magnitudes, num_bits=num_bits, narrow_range=narrow_range
    )
    return outputs.T.reshape(inputs.shape)


def fake_quant_rows_within_gradient(gradients, inputs, magnitudes, *, num_bits, narrow_range):
    backprops, to_min, to_max = fake_quant.fake_quant_with_min_max_vars_per_channel_gradient(
        _turned(gradients), _turned(inputs), -magnitudes, magnitudes, num_bits=num_bits, narrow_range=narrow_range
    )
    return backprops.T.reshape(inputs.shape), subtract(to_max, to_min)
