# SPDX-License-Identifier: Apache-2.0
"""QuantizeAndDequantize*: the same arithmetic as reference/quantize_and_dequantize.py."""
