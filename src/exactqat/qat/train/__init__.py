# SPDX-License-Identifier: Apache-2.0
"""Training a plan. `core` says what a plan means in training; `torch`, `jax` and `keras` keep parameters and state."""
