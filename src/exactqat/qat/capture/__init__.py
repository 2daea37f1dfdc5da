# SPDX-License-Identifier: Apache-2.0
"""From a model to a `planning` network: `torch`, `jax` and `keras` say what each framework's operations are."""
