# SPDX-License-Identifier: Apache-2.0
"""The declarations of all operators."""

from exactqat.operators import (
    depthwise_conv2d,
    fake_quant,
    fake_quant_rows,
    fused_batch_norm,
    in_tensorflow,
    quantize_and_dequantize,
    rounded_sums,
)
from exactqat.operators.op import OPERATORS, Operator

__all__ = [
    "OPERATORS",
    "Operator",
    "depthwise_conv2d",
    "fake_quant",
    "fake_quant_rows",
    "fused_batch_norm",
    "in_tensorflow",
    "quantize_and_dequantize",
    "rounded_sums",
]
