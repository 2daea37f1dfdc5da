# SPDX-License-Identifier: Apache-2.0
"""Fake quantization of rows by their largest magnitude: the per-channel operators, turned."""

from exactqat.reference import fake_quant
from exactqat.reference.arrays import namespace


def _columns(inputs):
    """Channels last, and their range."""
    columns = inputs.reshape(inputs.shape[0], -1).T if inputs.size else inputs.reshape(0, inputs.shape[0])
    magnitude = namespace(inputs).abs(columns).max(0, initial=0)
    return columns, -magnitude, magnitude


def fake_quant_rows(inputs, *, num_bits, narrow_range):
    outputs = fake_quant.fake_quant_with_min_max_vars_per_channel(
        *_columns(inputs), num_bits=num_bits, narrow_range=narrow_range
    )
    return outputs.T.reshape(inputs.shape)


def fake_quant_rows_gradient(gradients, inputs, *, num_bits, narrow_range):
    backprops, _, _ = fake_quant.fake_quant_with_min_max_vars_per_channel_gradient(
        _columns(gradients)[0], *_columns(inputs), num_bits=num_bits, narrow_range=narrow_range
    )
    return backprops.T.reshape(inputs.shape)
