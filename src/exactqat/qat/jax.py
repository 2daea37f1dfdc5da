# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training for JAX: `prepare` a function, a Flax Linen or an NNX module, train with pure functions.

    prepared = qat.jax.prepare(apply, params, example)
    params, state = prepared.init()
    params, state = prepared.calibrate(params, state, batches)
    y, state = prepared.apply(params, state, x, train=True)
    params, state = prepared.freeze(params, state)
    graph = prepared.lower(params, state)

`prepare_file` does the same for the `Graph` of a file.

`params` and `state` are trees of arrays: `jax.jit`, `jax.grad`, `jax.lax.scan` and Optax take them as they are.
"""

from .train.jax.layers import batch_norm, dropout
from .train.jax.prepare import prepare, prepare_file
from .train.jax.prepared import Prepared, State

__all__ = ["Prepared", "State", "batch_norm", "dropout", "prepare", "prepare_file"]
