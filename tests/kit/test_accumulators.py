# SPDX-License-Identifier: Apache-2.0
"""Frozen training in JAX by the device's accumulators gives what it gives step by step on the host: the same bits of
all tensors and states, and the gradients of the same layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax_networks import conv, norm, normalized, numbers, weights  # noqa: E402

from exactqat import qat  # noqa: E402
from exactqat.qat.jax import prepare  # noqa: E402
from exactqat.qat.train.core.arrays import Mode  # noqa: E402
from exactqat.qat.train.jax import primitives  # noqa: E402

EIGHT, SIXTEEN = qat.Rule(), qat.Rule(activation_bits=16)


def perceptron(p: Any, x: Any) -> Any:
    return jax.nn.relu(x.reshape(x.shape[0], -1) @ p["a"] + p["b"]) @ p["c"]


def separable(p: Any, x: Any) -> Any:
    x = jax.nn.relu6(normalized(conv(x, p["stem"], 2), p["norm"]))
    x = jax.nn.relu(normalized(conv(x, p["depthwise"], groups=8), p["second"]))
    return conv(x, p["pointwise"]).mean((1, 2)) @ p["head"]


def residual(p: Any, x: Any) -> Any:
    first = jax.nn.relu(conv(x, p["a"]))
    up = jax.lax.conv_transpose(first, p["up"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    pooled = jax.lax.reduce_window(up, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return conv(jnp.pad(first + pooled, ((0, 0), (1, 1), (1, 1), (0, 0))), p["b"])


NETWORKS = {
    "perceptron": (perceptron, weights(a=(243, 16), b=(16,), c=(16, 5))),
    "separable": (
        separable,
        {
            **weights(stem=(3, 3, 3, 8), depthwise=(3, 3, 1, 8), pointwise=(1, 1, 8, 8), head=(8, 4)),
            "norm": norm(8),
            "second": norm(8),
        },
    ),
    "residual": (residual, weights(a=(3, 3, 3, 8), up=(3, 3, 8, 8), b=(3, 3, 8, 4))),
}
X = numbers(5, 9, 9, 3)


def frozen(name: str, rule: qat.Rule = EIGHT, device: str = "xnnpack-x86") -> Any:
    function, params = NETWORKS[name]
    prepared = prepare(function, params, X, [rule], device=device)
    params, state = prepared.calibrate(*prepared.init(), [X])
    _, state = prepared.apply(params, state, X, train=True)
    return prepared, *prepared.freeze(params, state)


def step(prepared: Any, params: Any, state: Any, x: Any) -> tuple[Any, Any, Any, Any]:
    """All tensors, the results and the next state of a compiled step, and gradients of parameters and input."""
    seen: dict[str, Any] = {}
    prepared._run(params, state, [x], {}, Mode(training=True, frozen=True), seen=seen)

    def loss(params: Any, x: Any) -> Any:
        y, after = prepared.apply(params, state, x, train=True)
        return jnp.mean(jnp.square(y - 0.3)), (y, after)

    (_, (y, after)), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)
    return seen, y, after, gradients


@pytest.mark.slow
@pytest.mark.parametrize("device", ["xnnpack-x86", "reference"])
@pytest.mark.parametrize("rule", [EIGHT, SIXTEEN], ids=["int8", "int16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_is_that_of_the_host(name: str, rule: qat.Rule, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = frozen(name, rule, device)
    served = network[0]._functional.layer_numbers.steps
    assert bool(served) == (rule is EIGHT)
    results = step(*network, X)
    monkeypatch.setattr(primitives, "sums_are_exact", lambda: False)
    expected = step(*network, X)
    for ours, theirs in zip(jax.tree.leaves(results[:3]), jax.tree.leaves(expected[:3]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    gradients = [jax.tree.leaves(outcome[3]) for outcome in (results, expected)]
    for ours, theirs in zip(*map(list, gradients), strict=True):
        if rule is SIXTEEN:
            np.testing.assert_array_equal(ours, theirs)
            continue
        # The products of whole numbers and of real ones are rounded in other places.
        size = np.linalg.norm(theirs)
        assert np.linalg.norm(ours - theirs) <= 1e-5 * size


def test_sums_that_float32_does_not_hold_are_the_hosts() -> None:
    """Of a program only one way is computed; here it is that of the host."""
    x = np.random.default_rng(0).uniform(0, 1, (6, 4000)).astype("f")
    params = {"w": np.random.default_rng(1).uniform(0.9, 1, (4000, 3)).astype("f")}
    prepared = prepare(lambda p, x: x @ p["w"], params, x, device="reference")
    params, state = prepared.freeze(*prepared.calibrate(*prepared.init(), [x]))
    expected = prepared.apply(params, state, x)[0]  # the whole network at once
    train = jax.jit(jax.value_and_grad(lambda p: (prepared.apply(p, state, x, train=True)[0] ** 2).mean()))
    value, gradients = train(params)
    np.testing.assert_allclose(value, np.square(np.asarray(expected)).mean(), rtol=1e-6)
    assert np.isfinite(gradients["model"]["w"]).all() and np.any(gradients["model"]["w"])
    assert list(prepared._functional.layer_numbers.steps) == ["w"]
    np.testing.assert_array_equal(jax.jit(lambda p: prepared.apply(p, state, x, train=True)[0])(params), expected)


@pytest.mark.slow
def test_nan_in_a_step() -> None:
    prepared, params, state = frozen("separable")
    broken = X.copy()
    broken[1, 0, 0, 0] = np.nan
    run = jax.jit(lambda p, x: prepared.apply(p, state, x, train=True)[0])
    results = np.asarray(run(params, broken))
    assert np.isnan(results[1]).all()
    np.testing.assert_array_equal(np.delete(results, 1, 0), np.delete(np.asarray(run(params, X)), 1, 0))
    gradients = jax.grad(lambda p: run(p, broken).sum())(params)
    assert all(np.isnan(leaf).any() for leaf in jax.tree.leaves(gradients["model"]))


@pytest.mark.slow
def test_no_layer_asks_the_host_in_a_step() -> None:
    """But once for the numbers of all, and for what has no sums."""
    prepared, params, state = frozen("perceptron")
    calls: list[str] = []
    kind = type(prepared._functional.device_step(prepared.plan.steps[-1]))
    compute, kind.__call__ = kind.__call__, lambda self, *inputs: calls.append(self.step.path) or compute(self, *inputs)
    try:
        value = jax.jit(jax.grad(lambda p: prepared.apply(p, state, X, train=True)[0].sum()))(params)
        jax.block_until_ready(value)
    finally:
        kind.__call__ = compute
    assert not calls
