# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's operators: declarations, reference, kernels for CPU and GPU, and a frontend for each framework."""

from exactqat.operators.declarations import OPERATORS, Operator

__all__ = ["OPERATORS", "Operator"]
