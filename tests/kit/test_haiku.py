# SPDX-License-Identifier: Apache-2.0
"""Haiku's batch norms, whose moving averages are its own; `make packages` has Haiku, the project does not need it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

hk = pytest.importorskip("haiku")
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from exactqat import qat  # noqa: E402

DECAY = 0.9
IMAGES = np.random.default_rng(0).standard_normal((4, 6, 6, 3)).astype(np.float32)


def function(x: Any, is_training: bool) -> Any:
    x = jax.nn.relu(hk.BatchNorm(True, True, DECAY)(hk.Conv2D(4, 3)(x), is_training))
    x = hk.BatchNorm(False, True, DECAY, data_format="N...C")(hk.Conv2D(5, 3)(x), is_training)
    return hk.BatchNorm(True, False, 0.5)(hk.Linear(3)(x.mean((1, 2))), is_training)


def made() -> tuple[Any, Any, Any]:
    transformed = hk.without_apply_rng(hk.transform_with_state(function))
    params, state = transformed.init(jax.random.key(0), IMAGES, True)
    # Statistics that somebody trained before.
    _, state = transformed.apply(params, state, IMAGES * 2 + 1, True)

    def apply(variables: Any, x: Any, is_training: bool = False) -> Any:
        return transformed.apply(variables["params"], variables["state"], x, is_training)[0]

    return transformed, apply, {"params": params, "state": state}


def test_training_moves_the_averages_as_haiku_does() -> None:
    transformed, apply, variables = made()
    prepared = qat.jax.prepare(apply, variables, IMAGES)
    params, state = prepared.init()
    ours, theirs = variables, variables["state"]
    from exactqat.qat.train.core.arrays import Mode

    for number in range(3):
        batch = IMAGES * (number + 1) - number
        _, _, state = prepared._run(params, state, (batch,), {}, Mode(training=True, quantizing=False), None)
        _, theirs = transformed.apply(variables["params"], theirs, batch, True)
        ours = prepared.variables(params, state)
        assert jax.tree.structure(ours["state"]) == jax.tree.structure(theirs)
        for path, leaf in jax.tree_util.tree_flatten_with_path(theirs)[0]:
            own = ours["state"][path[0].key][path[1].key]
            assert own.shape == leaf.shape and np.allclose(own, leaf, rtol=1e-4, atol=1e-5), path
    # What is handed back goes on in Haiku.
    assert np.allclose(apply(ours, IMAGES), apply({**variables, "state": theirs}, IMAGES), atol=1e-4)


def test_gradients_in_training_are_haikus() -> None:
    transformed, apply, variables = made()
    prepared = qat.jax.prepare(apply, variables, IMAGES)
    params, state = prepared.init()
    from exactqat.qat.train.core.arrays import Mode

    def loss(model: Any) -> Any:
        mode = Mode(training=True, quantizing=False)
        return jnp.square(prepared._run({**params, "model": model}, state, (IMAGES,), {}, mode, None)[0]).sum()

    ours = jax.grad(loss)(params["model"])["params"]
    theirs = jax.grad(lambda p: jnp.square(transformed.apply(p, variables["state"], IMAGES, True)[0]).sum())(
        variables["params"]
    )
    for (path, own), leaf in zip(jax.tree_util.tree_flatten_with_path(ours)[0], jax.tree.leaves(theirs), strict=True):
        assert np.allclose(own, leaf, rtol=1e-3, atol=1e-3 * max(1.0, float(np.abs(leaf).max()))), path
