# SPDX-License-Identifier: Apache-2.0
"""The training kit: devices, planning, capture, training, and the integer engine."""
