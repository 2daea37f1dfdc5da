# SPDX-License-Identifier: Apache-2.0
"""The training kit's own operators, which TensorFlow does not have: several of a layer's steps in one pass."""

from exactqat.operators.declarations.kit import fake_quant_rows, quantized_batch_norm, rounded_sums

__all__ = ["fake_quant_rows", "quantized_batch_norm", "rounded_sums"]
