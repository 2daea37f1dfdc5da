# SPDX-License-Identifier: Apache-2.0
"""The declarations of all operators: TensorFlow's families, and in `kit` the training kit's own."""

from exactqat.operators.declarations import (
    depthwise_conv2d,
    fake_quant,
    fused_batch_norm,
    in_tensorflow,
    kit,
    quantize_and_dequantize,
)
from exactqat.operators.declarations.op import OPERATORS, Operator

__all__ = [
    "OPERATORS",
    "Operator",
    "depthwise_conv2d",
    "fake_quant",
    "fused_batch_norm",
    "in_tensorflow",
    "kit",
    "quantize_and_dequantize",
]
