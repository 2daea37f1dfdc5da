# SPDX-License-Identifier: Apache-2.0
"""Haiku's batch norms keep their statistics; `make packages` has Haiku, the project does not need it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

hk = pytest.importorskip("haiku")
import jax  # noqa: E402

from exactqat import qat  # noqa: E402

IMAGES = np.random.default_rng(0).standard_normal((4, 6, 6, 3)).astype(np.float32)


def function(x: Any, is_training: bool) -> Any:
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(hk.Conv2D(4, 3)(x), is_training))
    x = hk.BatchNorm(False, True, 0.9, data_format="N...C")(hk.Conv2D(5, 3)(x), is_training)
    return hk.BatchNorm(True, False, 0.5)(hk.Linear(3)(x.mean((1, 2))), is_training)


def made() -> tuple[Any, Any]:
    """A function of the variables, the images and `is_training`, and variables that somebody trained before."""
    transformed = hk.without_apply_rng(hk.transform_with_state(function))
    params, state = transformed.init(jax.random.key(0), IMAGES, True)
    _, state = transformed.apply(params, state, IMAGES * 2 + 1, True)

    def apply(variables: Any, x: Any, is_training: bool = False) -> Any:
        return transformed.apply(variables["params"], variables["state"], x, is_training)[0]

    return apply, {"params": params, "state": state}


def test_training_is_refused_with_the_place_and_what_to_do() -> None:
    apply, variables = made()
    with pytest.raises(qat.UnsupportedOperator) as refused:
        qat.jax.prepare(apply, variables, IMAGES)
    for word in ("in training", "batch_norm.py, line", "keeps its statistics", "exactqat.qat.jax.batch_norm"):
        assert word in str(refused.value), str(refused.value)


def test_a_function_that_evaluates_is_read_and_its_statistics_stay() -> None:
    apply, variables = made()
    prepared = qat.jax.prepare(lambda variables, x: apply(variables, x), variables, IMAGES)
    params, state = prepared.init()
    y, state = prepared.apply(params, state, IMAGES, train=True)
    assert np.allclose(y, apply(variables, IMAGES), atol=0.2)
    jax.tree.map(np.testing.assert_array_equal, prepared.variables(params, state), variables)
