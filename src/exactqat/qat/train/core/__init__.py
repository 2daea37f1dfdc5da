# SPDX-License-Identifier: Apache-2.0
"""What a plan means in training: how ranges move, the grids of weights, constants and biases, batch norm folded into
weights, what `freeze` changes and what it warns about.

Pure functions. `p` is a framework's primitives (see `primitives`), so that each rule is stated once for PyTorch, JAX
and Keras; integers are always made in NumPy, so that equal numbers give equal integers.
"""
