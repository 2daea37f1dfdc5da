# SPDX-License-Identifier: Apache-2.0
"""What `qat.jax.prepare` trains is the user's own model, or it is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from meaning_jax import ROUNDING, difference, error, float_network, gradients  # noqa: E402

from exactqat import qat  # noqa: E402
from exactqat.qat.jax import prepare  # noqa: E402
from exactqat.qat.train.core.arrays import Mode  # noqa: E402

RNG = np.random.default_rng(0)
PARAMS = {
    "a": RNG.standard_normal((6, 5)).astype(np.float32),
    "b": RNG.standard_normal((5, 4)).astype(np.float32),
}
X = RNG.standard_normal((8, 6)).astype(np.float32)


# --- gradients of the user's own -------------------------------------------------------------------------------------


@jax.custom_vjp
def reversed_product(x: Any, w: Any) -> Any:
    return x @ w


reversed_product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (-g @ kept[1].T, -2 * kept[0].T @ g))


@jax.custom_jvp
def steep(x: Any) -> Any:
    return jnp.tanh(x)


steep.defjvp(lambda primals, tangents: (steep(primals[0]), 2 * tangents[0]))


@jax.custom_gradient
def normalized_gradient(x: Any) -> Any:
    return x, lambda g: -g / jnp.linalg.norm(g)


@jax.custom_vjp
def two_results(x: Any) -> Any:
    return x * 2, x + 1


two_results.defvjp(lambda x: (two_results(x), None), lambda _, g: (g[0] / (1 + jnp.abs(g[1])),))


@jax.custom_vjp
def straight_through_sign(w: Any) -> Any:
    return jnp.sign(w)


straight_through_sign.defvjp(lambda w: (jnp.sign(w), None), lambda _, g: (g,))


def both(x: Any) -> Any:
    first, second = two_results(x)
    return first * second


sign_of_jax = jax.custom_vjp(jnp.sign)
sign_of_jax.defvjp(lambda w: (jnp.sign(w), None), lambda _, g: (g,))
tanh_of_jax = jax.custom_jvp(jnp.tanh)
tanh_of_jax.defjvps(lambda t, y, x: 3 * t)
relu_of_jax = jax.custom_vjp(jax.nn.relu)
relu_of_jax.defvjp(lambda x: (jax.nn.relu(x), x), lambda x, g: (jnp.clip(g, -0.1, 0.1),))


# Rules of functions of values are not read; those of functions of parameters alone JAX keeps.
CUSTOM = {
    "defjvps for a function of JAX's": lambda p, x: tanh_of_jax(x @ p["a"]) @ p["b"],
    "a rule around jax.nn.relu": lambda p, x: relu_of_jax(x @ p["a"]) @ p["b"],
    "custom_vjp of two operands": lambda p, x: reversed_product(x, p["a"]) @ p["b"],
    "custom_jvp": lambda p, x: steep(x @ p["a"]) @ p["b"],
    "custom_gradient over the whole batch": lambda p, x: normalized_gradient(x @ p["a"]) @ p["b"],
    "custom_gradient for each example": lambda p, x: jax.vmap(normalized_gradient)(x @ p["a"]) @ p["b"],
    "two results in one rule": lambda p, x: both(x @ p["a"]) @ p["b"],
    "inside of jit and remat": lambda p, x: jax.jit(jax.checkpoint(lambda y: steep(y) * 2))(x @ p["a"]) @ p["b"],
    "at the end": lambda p, x: steep(x @ p["a"]),
    "at the input": lambda p, x: normalized_gradient(x) @ p["a"],
}
OF_PARAMETERS = {
    "a rule for a function of JAX's, of a parameter": lambda p, x: x @ sign_of_jax(p["a"]) @ p["b"],
    "straight through, of a parameter": lambda p, x: x @ straight_through_sign(p["a"]) @ p["b"],
}
STOPPED = {
    "a parameter": lambda p, x: x @ lax.stop_gradient(p["a"]) @ p["b"],
    "a part of a weight": lambda p, x: x @ (p["a"] + 2 * lax.stop_gradient(p["a"])) @ p["b"],
    "a bias": lambda p, x: x @ p["a"] @ p["b"] + lax.stop_gradient(p["b"][0]),
    "a value": lambda p, x: lax.stop_gradient(jax.nn.relu(x @ p["a"])) @ p["b"],
    "a divisor": lambda p, x: (lambda y: y / lax.stop_gradient(y.sum(1, keepdims=True)))(jax.nn.sigmoid(x @ p["a"])),
    "a sum that becomes a mean": lambda p, x: lax.stop_gradient((x @ p["a"]).sum(1, keepdims=True)) / 5 + x @ p["a"],
    "the gate of silu": lambda p, x: (lambda y: y * lax.stop_gradient(jax.nn.sigmoid(y)))(x @ p["a"]),
    "one of two uses": lambda p, x: x @ p["a"] + jnp.tanh(x @ lax.stop_gradient(p["a"])),
}
LIBRARY = {
    "relu": lambda p, x: jax.nn.relu(x @ p["a"]),
    "relu6, silu, gelu": lambda p, x: jax.nn.gelu(jax.nn.silu(jax.nn.relu6(x @ p["a"]))),
    "softmax": lambda p, x: jax.nn.softmax(x @ p["a"]) @ p["b"],
    "log_softmax, logsumexp": lambda p, x: jax.nn.log_softmax(x @ p["a"]),
    "softmax by hand": lambda p, x: (lambda e: e / e.sum(1, keepdims=True))(
        jnp.exp(x @ p["a"] - (x @ p["a"]).max(1, keepdims=True))
    ),
}


ROWS = {
    # As `hk.BatchApply` does: examples and times are one axis.
    "a bias of examples and times": lambda p, x: (
        jnp.broadcast_to(p["b"][0], (x.shape[0] * 3, p["b"].shape[1])) + (x.reshape(-1, 2) @ p["b"][:2])
    ),
    "sums along an axis": lambda p, x: jnp.cumsum(x @ p["a"], 1) @ p["b"],
    "sums from the end": lambda p, x: lax.cumsum(x @ p["a"], 1, reverse=True) @ p["b"],
}


@pytest.mark.parametrize("name", [*OF_PARAMETERS, *STOPPED, *LIBRARY, *ROWS])
def test_gradients_are_the_users(name: str) -> None:
    function = {**OF_PARAMETERS, **STOPPED, **LIBRARY, **ROWS}[name]
    prepared = prepare(function, PARAMS, X[:2])
    assert difference(function, prepared, PARAMS, [X]) < ROUNDING


def test_rows_of_an_example_that_differ_are_refused_where_examples_and_rows_are_one_axis() -> None:
    def function(p: Any, x: Any) -> Any:
        return x.reshape(-1, 2) + jnp.tile(p["b"][:3, :2], (x.shape[0], 1))

    with pytest.raises(qat.UnsupportedOperator, match="before the axes are joined"):
        prepare(function, PARAMS, X[:2])


@pytest.mark.parametrize("name", list(LIBRARY))
def test_jaxs_own_rules_are_no_steps(name: str) -> None:
    prepared = prepare(LIBRARY[name], PARAMS, X[:2])
    assert all(step.kind for step in prepared.plan.steps if not step.attributes.get("stop_gradient"))


@pytest.mark.parametrize("name", list(CUSTOM))
def test_a_gradient_rule_of_the_users_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(qat.UnsupportedOperator, match=r"gradients by rules of its own .*test_meaning_jax\.py, line"):
        prepare(CUSTOM[name], PARAMS, X[:2])
    prepare(CUSTOM[name], PARAMS, X[:2], check=False)


# --- the size of the batch -------------------------------------------------------------------------------------------

LEAKS = {
    "/ x.shape[0]": lambda p, x: x @ p["a"] / x.shape[0],
    "* len(x)": lambda p, x: x @ p["a"] * len(x),
    "/ math.sqrt(x.shape[0])": lambda p, x: x @ p["a"] / math.sqrt(x.shape[0]),
    "jnp.arange(x.shape[0])": lambda p, x: x @ p["a"] * jnp.arange(x.shape[0])[:, None],
    "np.arange(x.shape[0])": lambda p, x: x @ p["a"] * np.arange(x.shape[0], dtype=np.float32)[:, None],
    "a sum over the batch": lambda p, x: x @ p["a"] * jnp.ones((x.shape[0], 1)).sum(),
    "counts along the batch": lambda p, x: x @ p["a"] * jnp.ones((x.shape[0], 1)).cumsum(0),
    "% 2": lambda p, x: x @ p["a"] * 2 if x.shape[0] % 2 == 0 else x @ p["a"],
    "a weight": lambda p, x: x @ (p["a"] / x.shape[0]),
    "a power": lambda p, x: (x @ p["a"]) ** x.shape[0],
    "a clip": lambda p, x: jnp.clip(x @ p["a"], 0, x.shape[0]),
    "through a jitted function": lambda p, x: jax.jit(lambda y: y * (1 + y.shape[0]))(x @ p["a"]),
    "in a loop": lambda p, x: lax.scan(lambda c, _: (c + 1.0 / x.shape[0], None), x @ p["a"], None, length=3)[0],
    "NumPy's ones for the batch": lambda p, x: x @ p["a"] * np.ones((x.shape[0], 1), np.float32),
    "a multiple of 7": lambda p, x: x @ p["a"] * (2 if x.shape[0] % 7 == 0 else 1),
}
SIZES_OF_THEIR_OWN = {
    "* 1009": lambda p, x: (x @ p["a"]) * 1009,
    "1009 features": lambda p, x: (
        jnp.concatenate([x, jnp.zeros((x.shape[0], 1003))], 1) @ (jnp.ones((1009, 3)) * p["b"][0, 0])
    ),
    "2018 rows of a constant": lambda p, x: x @ p["a"] * jnp.asarray(np.arange(2018.0).reshape(1009, 2).sum() * 1e-6),
    "zeros for the batch": lambda p, x: x @ p["a"] + jnp.zeros((x.shape[0], 5)),
    "positions for the batch": lambda p, x: x @ p["a"] + jnp.broadcast_to(jnp.arange(5.0), (x.shape[0], 5)),
    "reshaped with the batch": lambda p, x: x.reshape(x.shape[0] * 2, 3).reshape(x.shape[0], 6) @ p["a"],
}


def strictly(size: int) -> int:
    if type(size) is not int:
        raise TypeError("a number, please")
    return size


ASKED = {
    "one size": lambda x: x.shape[0] == 16,
    "its length": lambda x: len(x) == 16,
    "a shape": lambda x: x.shape == (16, 6),
    "by jnp.shape": lambda x: jnp.shape(x)[0] == 16,
    "by np.shape": lambda x: np.shape(x)[0] == 16,
    "a window": lambda x: 10 < x.shape[0] < 20,
    "two sizes": lambda x: x.shape[0] in (5, 16),
    "nines": lambda x: x.shape[0] % 9 == 0,
    "more than 9000": lambda x: x.shape[0] > 9000,
    "three at once": lambda x: x.shape[0] % 5 == 3 and x.shape[0] > 20 and x.shape[0] < 30,
    "first a large one": lambda x: x.shape[0] <= 50 and x.shape[0] == 19,
    "numbers in it": lambda x: x.size == 96,
    "half of it": lambda x: 0.5 * x.shape[0] == 8,
    "its root": lambda x: math.sqrt(x.shape[0]) == 4,
    "nothing but plain numbers": lambda x: strictly(x.shape[0]) == 16,
}
WITHIN = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
}


@pytest.mark.parametrize("name", list(ASKED))
def test_a_branch_on_the_size_of_the_batch_is_refused(name: str) -> None:
    asks = ASKED[name]
    with pytest.raises(qat.UnsupportedOperator, match="the size of the batch") as refusal:
        prepare(lambda p, x: x @ p["a"] * (2.0 if asks(x) else 1.0), PARAMS, X[:2], check=False)
    assert "test_meaning_jax.py" in str(refusal.value)


@pytest.mark.parametrize("name", list(WITHIN))
def test_such_a_branch_within_a_function_of_jax_is_refused_each_time(name: str) -> None:
    inner = WITHIN[name](lambda x: jnp.tanh(x) if x.shape[0] == 24 else x)
    for _ in range(2):
        with pytest.raises(qat.UnsupportedOperator, match="the size of the batch"):
            prepare(lambda p, x: inner(x) @ p["a"], PARAMS, X[:2], check=False)


@pytest.mark.parametrize("name", list(LEAKS))
def test_the_size_of_the_batch_is_no_number(name: str) -> None:
    with pytest.raises(qat.UnsupportedOperator, match="the size of the batch") as refusal:
        prepare(LEAKS[name], PARAMS, X[:2], check=False)
    assert "test_meaning_jax.py" in str(refusal.value)


@pytest.mark.parametrize("name", list(SIZES_OF_THEIR_OWN))
def test_sizes_of_the_users_own_are_kept(name: str) -> None:
    function = SIZES_OF_THEIR_OWN[name]
    prepared = prepare(function, PARAMS, X[:2])
    assert difference(function, prepared, PARAMS, [X]) < ROUNDING


# Each as far below the last digits of most values as epsilons are; a root, a quotient and a logarithm see them alone.
EPSILONS = {
    "under a root": lambda p, x: (y := x @ p["a"]) * lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-6),
    "under a quotient": lambda p, x: (y := x @ p["a"]) / (jnp.linalg.norm(y, axis=-1, keepdims=True) + 1e-7),
    "a floor": lambda p, x: jnp.log(jnp.maximum(x @ p["a"], 1e-6)),
    "beside relu": lambda p, x: jnp.log(jax.nn.relu(x @ p["a"]) + 1e-6),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(EPSILONS))
def test_an_epsilon_is_no_rounding(name: str) -> None:
    prepared = prepare(EPSILONS[name], PARAMS, X[:2])
    for scale in (1, 1e-2, 1e-4):
        assert difference(EPSILONS[name], prepared, PARAMS, [np.float32(scale) * X]) <= ROUNDING, scale


@pytest.mark.slow
def test_a_length_that_looks_like_a_batch() -> None:
    params = {"w": RNG.standard_normal((3, 2, 4)).astype(np.float32)}
    x = RNG.standard_normal((8, 1009, 2)).astype(np.float32)

    def function(p: Any, x: Any) -> Any:
        return lax.conv_general_dilated(x, p["w"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")).mean(1)

    assert difference(function, prepare(function, params, x[:2]), params, [x]) < ROUNDING


# --- the self-check ---------------------------------------------------------------------------------------------------


# What they read is refused; what reads them finds other axes than it expects.
OVER_THE_BATCH = {
    "roll": lambda p, x: jnp.roll(x @ p["a"], 1, 0) @ p["b"],
    "halves": lambda p, x: jnp.concatenate([(y := x @ p["a"])[: len(x) // 2] * 2, y[len(x) // 2 :]]) @ p["b"],
    "similarity": lambda p, x: jax.nn.softmax((y := x @ p["a"]) @ y.T) @ y,
    "spacing": lambda p, x: x @ p["a"] + jnp.linspace(0, 1, len(x))[:, None],
}


@pytest.mark.parametrize("name", list(OVER_THE_BATCH))
def test_what_goes_over_the_batch_is_refused_in_words(name: str) -> None:
    with pytest.raises(qat.UnsupportedOperator, match="the batch") as refusal:
        prepare(OVER_THE_BATCH[name], PARAMS, X[:2])
    assert "test_meaning_jax.py" in str(refusal.value)


def test_the_check_says_what_it_compared() -> None:
    prepared = prepare(LIBRARY["relu"], PARAMS, X[:2])
    assert prepared.proof is not None and prepared.proof.seconds > 0
    assert {trial.training for trial in prepared.proof.trials} == {True, False}
    assert {trial.examples for trial in prepared.proof.trials} >= {1, 2, 3}
    assert prepare(LIBRARY["relu"], PARAMS, X[:2], check=False).proof is None


# --- modules ----------------------------------------------------------------------------------------------------------


def all_kept(key: Any, p: Any = 0.5, shape: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`jax.random.bernoulli` without chance: dropout scales only."""
    return jnp.broadcast_to(jnp.asarray(p) > 0, jnp.shape(p) if shape is None else shape)


def linen_classifier(frozen: bool = False) -> Any:
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool = True) -> Any:
            x = nn.BatchNorm(use_running_average=frozen or not train, momentum=0.8)(nn.Dense(5)(x))
            x = nn.Dropout(0.5, deterministic=not train)(nn.relu(x))
            return nn.Dense(3)(x)

    return Net()


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("size", [3, 8])
def test_linens_training_is_the_users(frozen: bool, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.random, "bernoulli", all_kept)
    net = linen_classifier(frozen)
    variables = net.init(jax.random.key(0), X, train=False)
    prepared = prepare(net, variables, X[:2])
    assert prepared.proof is not None and not prepared.proof.not_run

    def original(params: Any, x: Any) -> Any:
        return net.apply(
            {**variables, "params": params}, x, train=True, mutable=["batch_stats"], rngs={"dropout": jax.random.key(1)}
        )

    network = float_network(prepared, train=True, key=jax.random.key(1))
    expected, changed = original(variables["params"], X[:size])
    result, after = network(variables["params"], X[:size])
    assert error(expected, result) < ROUNDING
    ours = gradients(lambda p, x: network(p, x)[0], variables["params"], X[:size])
    assert error(gradients(lambda p, x: original(p, x)[0], variables["params"], X[:size])[1], ours[1]) < ROUNDING
    statistics = changed["batch_stats"]["BatchNorm_0"]
    assert error(statistics["mean"], after.variables["BatchNorm_0.mean"]) < ROUNDING
    # The variance is the biased one, as Flax's.
    assert error(statistics["var"], after.variables["BatchNorm_0.var"]) < ROUNDING
    assert frozen == (error(variables["batch_stats"]["BatchNorm_0"]["var"], statistics["var"]) == 0)


def linen_lifted(way: str, noise: bool = False) -> Any:
    """Layers that Flax repeats by a scan, or computes again in the backward pass."""
    nn = pytest.importorskip("flax.linen")

    class Layer(nn.Module):
        train: bool

        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            x = nn.Dense(5)(x)
            if way == "remat":
                x = nn.BatchNorm(use_running_average=not self.train, momentum=0.8)(x)
            if noise and self.train:
                x = x + jax.random.normal(self.make_rng("dropout"), x.shape)
            return nn.Dropout(0.5, deterministic=not self.train)(nn.relu(x)), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool = True) -> Any:
            x = nn.Dense(5)(x)
            if way == "remat":
                x = nn.remat(Layer)(train)(x, None)[0]
            else:
                keys = {"params": True, "dropout": True}
                x = nn.scan(Layer, variable_axes={"params": 0}, split_rngs=keys, length=3)(train)(x, None)[0]
            return nn.Dense(3)(x)

    return Net()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["remat", "scan"])
def test_lifted_layers_of_linen_train_as_the_users(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.random, "bernoulli", all_kept)
    net = linen_lifted(way)
    variables = net.init(jax.random.key(0), X, train=False)
    prepared = prepare(net, variables, X[:2])
    assert prepared.proof is not None and any(trial.training for trial in prepared.proof.trials)

    def original(params: Any, x: Any) -> Any:
        keys = {"dropout": jax.random.key(1)}
        return net.apply({**variables, "params": params}, x, train=True, mutable=["batch_stats"], rngs=keys)[0]

    network = float_network(prepared, train=True, key=jax.random.key(1))
    assert error(original(variables["params"], X), network(variables["params"], X)[0]) < ROUNDING
    ours = gradients(lambda p, x: network(p, x)[0], variables["params"], X)
    assert error(gradients(original, variables["params"], X)[1], ours[1]) < ROUNDING


@pytest.mark.slow
def test_linens_attention_keeps_its_dropout() -> None:
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any, deterministic: bool = False) -> Any:
            return nn.MultiHeadDotProductAttention(2, dropout_rate=0.5)(x, x, deterministic=deterministic)

    x = RNG.standard_normal((4, 5, 8)).astype(np.float32)
    net = Net()
    variables = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    prepared = prepare(net, variables, x)
    assert prepared.proof is not None and any(trial.training for trial in prepared.proof.trials)
    one, other = (
        float_network(prepared, train=True, key=jax.random.key(seed))(variables["params"], x)[0] for seed in (0, 1)
    )
    assert error(one, other) > 0.01


def linen_branch() -> tuple[Any, Any]:
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool = True) -> Any:
            x = nn.Dense(5)(x)
            return x * 2 if train else x

    net = Net()
    return net, (net.init(jax.random.key(0), X),)


def linen_statistic() -> tuple[Any, Any]:
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool = True) -> Any:
            mean = self.variable("own", "mean", lambda: jnp.zeros(6))
            if train:
                mean.value = 0.9 * mean.value + 0.1 * x.mean(0)
            return nn.Dense(5)(x - mean.value)

    net = Net()
    return net, (net.init(jax.random.key(0), X, train=False),)


def linen_noise() -> tuple[Any, Any]:
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool = True) -> Any:
            x = nn.Dense(5)(x)
            return x + jax.random.normal(self.make_rng("dropout"), x.shape) if train else x

    net = Net()
    return net, (net.init(jax.random.key(0), X, train=False),)


def linen_scanned_noise() -> tuple[Any, Any]:
    net = linen_lifted("scan", noise=True)
    return net, (net.init(jax.random.key(0), X, train=False),)


def nnx_branch() -> tuple[Any, Any]:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.layer = nnx.Linear(6, 5, rngs=nnx.Rngs(0))

        def __call__(self, x: Any, train: bool = False) -> Any:
            return self.layer(x) * 2 if train else self.layer(x)

    return Net(), ()


def nnx_statistic() -> tuple[Any, Any]:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.layer = nnx.Linear(6, 5, rngs=nnx.Rngs(0))
            self.mean = nnx.Variable(jnp.zeros(5))

        def __call__(self, x: Any) -> Any:
            y = self.layer(x)
            centred = y - self.mean[...]
            self.mean[...] = 0.9 * self.mean[...] + 0.1 * y.mean(0)
            return centred

    return Net(), ()


BRANCHES = {
    "a branch of Linen's": (linen_branch, "is not the model: in training"),
    "a statistic of Linen's": (linen_statistic, "is not the model: in training"),
    "noise in Linen": (linen_noise, "is not the model: in training"),
    "noise in a scan of Linen's": (linen_scanned_noise, "is not the model: in training"),
    "a branch of NNX's": (nnx_branch, "is not the model: in training"),
    "a statistic of NNX's": (nnx_statistic, "is not the model: in training"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BRANCHES))
def test_what_training_alone_does_is_refused(name: str) -> None:
    make, message = BRANCHES[name]
    model, variables = make()
    with pytest.raises(qat.UnsupportedOperator, match=message):
        prepare(model, *variables, X[:2])


def function_with_a_flag() -> tuple[Any, Any]:
    def function(p: Any, x: Any, train: bool = False) -> Any:
        return x @ p["a"] * (2.0 if train else 1.0)

    return function, (PARAMS,)


def linen_field() -> tuple[Any, Any]:
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        train: bool = False

        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(5)(x) * (2.0 if self.train else 1.0)

    net = Net()
    return net, (net.init(jax.random.key(0), X),)


def linen_evaluating() -> tuple[Any, Any]:
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any, eval_mode: bool = True) -> Any:
            return nn.Dense(5)(x) * (1.0 if eval_mode else 2.0)

    net = Net()
    return net, (net.init(jax.random.key(0), X),)


@pytest.mark.parametrize("make", [function_with_a_flag, linen_field, linen_evaluating])
def test_flags_by_other_ways_and_names_tell_training(make: Callable[[], tuple[Any, Any]]) -> None:
    model, variables = make()
    with pytest.raises(qat.UnsupportedOperator, match="is not the model: in training"):
        prepare(model, *variables, X[:2])


@pytest.mark.slow
def test_a_linen_module_made_for_training_is_read_in_evaluation() -> None:
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        train: bool

        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.BatchNorm(use_running_average=not self.train)(nn.Dense(5)(x))
            return nn.Dropout(0.5, deterministic=not self.train)(x)

    variables = Net(False).init(jax.random.key(0), X)
    prepared = prepare(Net(True), variables, X[:2])
    assert prepared.proof is not None and not prepared.proof.not_run
    assert any(trial.training for trial in prepared.proof.trials)
    params, state = prepared.init()
    result = prepared._run(params, state, (X,), {}, Mode(quantizing=False))[0]
    assert error(Net(False).apply(variables, X), result) < ROUNDING


@pytest.mark.parametrize(("default", "word"), [("eval", "train"), ("train", "train"), ("eval", "fit")])
def test_a_word_tells_training(default: str, word: str) -> None:
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any, mode: str = default) -> Any:
            return nn.BatchNorm(use_running_average=mode != word)(nn.Dense(5)(x))

    net = Net()
    variables = net.init(jax.random.key(0), X)
    if word == "fit":  # a word that nobody knows
        with pytest.raises(qat.UnsupportedOperator, match="does not train with mode='train' either"):
            prepare(net, variables, X[:2])
        return
    prepared = prepare(net, variables, X[:2])
    expected, updates = net.apply(variables, X, mode=word, mutable=["batch_stats"])
    result, after = float_network(prepared, train=True)(variables["params"], X)
    assert error(expected, result) < ROUNDING
    statistics = updates["batch_stats"]["BatchNorm_0"]
    assert error(
        [statistics["mean"], statistics["var"]], [after.variables[f"BatchNorm_0.{w}"] for w in ("mean", "var")]
    ) < (ROUNDING)


def test_a_module_that_counts_its_calls_is_refused() -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Counted(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.layer, self.calls = nnx.Linear(6, 3, rngs=rngs), 0

        def __call__(self, x: Any) -> Any:
            self.calls += 1
            return self.layer(x) * self.calls

    with pytest.raises(qat.UnsupportedOperator, match="changes its attribute 'calls'"):
        prepare(Counted(nnx.Rngs(0)), X[:2])


def test_init_within_jit() -> None:
    nn = pytest.importorskip("flax.linen")
    prepared = prepare(nn.Dense(3), nn.Dense(3).init(jax.random.key(0), X), X[:2])
    for one, other in zip(*(jax.tree.leaves(init()) for init in (prepared.init, jax.jit(prepared.init))), strict=True):
        assert np.array_equal(one, other)


def test_a_branch_that_the_example_asks_for_is_the_network() -> None:
    net, _ = nnx_branch()
    prepared = prepare(net, (X[:2], True))
    params, state = prepared.init()
    result = prepared._run(params, state, (X, True), {}, Mode(quantizing=False))[0]
    assert error(net(X, train=True), result) < ROUNDING


# --- what people bring ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_keys_of_random_numbers_among_parameters() -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.loop = nnx.RNN(nnx.GRUCell(8, 4, rngs=nnx.Rngs(0)))
            self.head = nnx.Linear(4, 2, rngs=nnx.Rngs(1))

        def __call__(self, x: Any) -> Any:
            return self.head(self.loop(x))

    net, x = Net(), RNG.standard_normal((4, 5, 8)).astype(np.float32)
    prepared = prepare(net, x)
    params, _ = prepared.init()
    assert error(net(x), float_network(prepared)(params["model"], x)[0]) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["max", "mean"])
def test_pools_with_an_axis_more(operation: str) -> None:
    """As Equinox pools one example: channels last, and an axis of size 1 in front."""
    params = {"w": RNG.standard_normal((48, 4)).astype(np.float32)}
    images = RNG.standard_normal((8, 3, 8, 8)).astype(np.float32)
    start, word = (-jnp.inf, lax.max) if operation == "max" else (0.0, lax.add)

    def pool(image: Any) -> Any:
        x = jnp.moveaxis(image, 0, -1)[None]
        x = lax.reduce_window(x, start, word, (1, 2, 2, 1), (1, 2, 2, 1), ((0, 0),) * 4)
        return jnp.moveaxis(x[0], -1, 0) / (1 if operation == "max" else 4)

    def function(p: Any, x: Any) -> Any:
        return jax.vmap(pool)(x).reshape(x.shape[0], -1) @ p["w"]

    assert difference(function, prepare(function, params, images[:2]), params, [images]) < ROUNDING


@pytest.mark.slow
def test_half_precision_by_hand() -> None:
    params = {"kernel": jnp.asarray(RNG.standard_normal((3, 2, 4)), jnp.bfloat16)}
    x = RNG.standard_normal((8, 12, 2)).astype(np.float32)

    def function(p: Any, x: Any) -> Any:
        kernel = p["kernel"] * jax.nn.softplus(p["kernel"])
        numbers = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(x.astype(jnp.bfloat16), kernel, (1,), "SAME", dimension_numbers=numbers)

    with pytest.warns(qat.NotComparedWarning, match="could not be compared"):
        prepared = prepare(function, params, x[:2])
    result = float_network(prepared)(prepared.init()[0]["model"], x)[0]
    assert result.dtype == jnp.float32
    assert error(function(params, x).astype(jnp.float32), result) < 0.03


def test_flax_serializes_states() -> None:
    serialization = pytest.importorskip("flax.serialization")
    prepared = prepare(LIBRARY["relu"], PARAMS, X[:2], check=False)
    params, state = prepared.init()
    params, state = prepared.calibrate(params, state, [X])
    params, state = prepared.freeze(params, state)
    data = serialization.to_bytes((params, state))
    params_back, back = serialization.from_bytes(prepared.init(), data)
    assert back.frozen and back.calibrated
    expected = prepared.apply(params, state, X)[0]
    np.testing.assert_array_equal(prepared.apply(params_back, back, X)[0], expected)
    with pytest.raises(ValueError, match="a state's dictionary must have"):
        serialization.from_state_dict(state, {"ranges": {}})


def test_integer_inputs_are_called_what_they_are() -> None:
    def function(p: Any, x: Any, places: Any) -> Any:
        return x @ p["a"] + p["a"][places]

    prepared = prepare(function, PARAMS, (X[:2], np.zeros((2,), np.int32)))
    assert [(feature.name, feature.floating) for feature in prepared.plan.inputs] == [("x", True), ("places", False)]
    params, state = prepared.calibrate(*prepared.init(), [(X, np.arange(len(X), dtype=np.int32) % len(PARAMS["a"]))])
    with pytest.raises(ValueError, match="places"):
        prepared.apply(params, state, X, np.full(len(X), len(PARAMS["a"]), np.int32))


def test_places_in_a_folder_called_as_a_library(tmp_path: Any) -> None:
    folder = tmp_path / "jax"
    folder.mkdir()
    (folder / "mine.py").write_text("import jax.numpy as jnp\ndef function(p, x):\n    return jnp.sort(x @ p['a'])\n")
    names: dict[str, Any] = {}
    exec(compile((folder / "mine.py").read_text(), str(folder / "mine.py"), "exec"), names)
    with pytest.raises(qat.UnsupportedOperator, match=r"mine\.py, line 3"):
        prepare(names["function"], PARAMS, X[:2])


@pytest.mark.slow
def test_what_is_compiled_by_hand_stays_what_it_is() -> None:
    """The check's stand-in for randomness stays out of what JAX remembers of the user's compiled functions."""

    @jax.jit
    def noisy(x: Any) -> Any:
        return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0.0)

    def function(p: Any, x: Any) -> Any:
        return (noisy(x) * 0.0 + x) @ p["a"]

    with pytest.raises(qat.UnsupportedOperator):
        prepare(function, PARAMS, X[:2])
    assert 0 < float((noisy(X[:2]) == 0).mean()) < 1


# --- random models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_random_models(seed: int) -> None:
    from fuzz_meaning_jax import one

    what, why = one(10_000 + seed)
    assert what in ("kept", "refused", "no model"), why
