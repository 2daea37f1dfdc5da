# SPDX-License-Identifier: Apache-2.0
"""Compares what `qat.jax.prepare` trains with the user's own model: results, gradients and statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from exactqat.qat.jax import Prepared
from exactqat.qat.train.core.arrays import Mode

SIZES = (1, 3, 8)
ROUNDING = 2e-4
# What is compiled once for one run.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def cotangent(shape: Sequence[int]) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def weighted(results: Any) -> Any:
    return sum(jnp.sum(leaf * cotangent(leaf.shape)) for leaf in jax.tree.leaves(results))


def float_network(
    prepared: Prepared, train: bool = False, key: Any = None, state: Any = None
) -> Callable[..., tuple[Any, Any]]:
    """(the user's trained leaves, *inputs) -> the results of the network without quantization, and the state."""
    params, initial = prepared.init()

    def run(trained: Any, *args: Any) -> tuple[Any, Any]:
        here = {**params, "model": trained}
        mode = Mode(training=train, quantizing=False)
        results, _, after = prepared._run(here, initial if state is None else state, args, {}, mode, key)
        return results, after

    return run


def error(expected: Any, result: Any) -> float:
    """The largest difference beside the largest value, over all leaves."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(result), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        largest = max(np.abs(a).max(initial=0), 1e-6)
        worst = max(worst, float(np.abs(a - b).max(initial=0)) / largest)
    return worst


def gradients(function: Callable[..., Any], trained: Any, *inputs: Any) -> Any:
    def loss(trained: Any, inputs: Any) -> Any:
        return weighted(function(trained, *inputs))

    return jax.grad(loss, (0, 1))(trained, inputs)


def difference(
    function: Callable[..., Any], prepared: Prepared, trained: Any, inputs: Sequence[np.ndarray], train: bool = False
) -> float:
    """The worst error of results and gradients over batches of all `SIZES`, against the user's own function."""
    network = float_network(prepared, train)
    original = jax.jit(lambda p, xs: (function(p, *xs), gradients(function, p, *xs)), compiler_options=QUICK)
    ours = jax.jit(
        lambda p, xs: (network(p, *xs)[0], gradients(lambda p, *xs: network(p, *xs)[0], p, *xs)), compiler_options=QUICK
    )
    worst = 0.0
    for size in SIZES:
        batch = [np.resize(array, (size, *array.shape[1:])) for array in inputs]
        worst = max(worst, error(original(trained, batch), ours(trained, batch)))
    return worst
