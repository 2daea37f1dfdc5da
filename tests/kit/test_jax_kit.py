# SPDX-License-Identifier: Apache-2.0
"""The kit for JAX: what a jaxpr becomes, training under JAX's transformations, and the way to the device."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import virtual_devices

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax import export  # noqa: E402
from jax_networks import NETWORKS, Batch, assert_exact, conv, norm, normalized, numbers, trained, weights  # noqa: E402

import exactqat  # noqa: E402
from exactqat import deploy, qat  # noqa: E402
from exactqat.qat.jax import Prepared, dropout, prepare  # noqa: E402
from exactqat.qat.train.core.arrays import Mode  # noqa: E402

SPREAD = Path(__file__).parent / "jax_spread.py"
LINEAR = weights(w=(8, 8))
X = numbers(4, 6, 8)


@cache
def shared(name: str) -> tuple[Prepared, Batch]:
    """A prepared network and its batch; a prepared function keeps no state, so tests share it."""
    return NETWORKS[name]()


@cache
def frozen(name: str) -> tuple[Any, Any]:
    """The parameters and the state with which it is frozen, after calibration alone."""
    prepared, batch = shared(name)
    return prepared.freeze(*prepared.calibrate(*prepared.init(), [batch]))


def kinds(function: Any, params: Any = LINEAR, example: Any = X) -> list[str]:
    """The float steps that a function becomes."""
    return [step.kind for step in prepare(function, params, example).plan.network.steps]


# --- capture ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "kind", "attributes"),
    [
        (jax.nn.relu, "relu", {}),
        (lambda x: jnp.where(x > 0, x, 0), "relu", {}),
        (lambda x: (x + jnp.abs(x)) / 2, "relu", {}),
        (jax.nn.relu6, "relu6", {}),
        (lambda x: jnp.clip(x, 0, 6), "relu6", {}),
        (lambda x: jnp.clip(x, -0.5, 2), "clamp", {"min": -0.5, "max": 2.0}),
        (jax.nn.hard_tanh, "clamp", {"min": -1.0, "max": 1.0}),
        (jax.nn.silu, "silu", {}),
        (lambda x: x / (1 + jnp.exp(-x)), "silu", {}),
        (jax.nn.hard_swish, "hardswish", {}),
        (jax.nn.hard_sigmoid, "hardsigmoid", {}),
        (jax.nn.gelu, "gelu", {"approximate": "tanh"}),
        (lambda x: jax.nn.gelu(x, approximate=False), "gelu", {"approximate": "none"}),
        (lambda x: 0.5 * x * (1 + jax.lax.erf(x / np.sqrt(2))), "gelu", {"approximate": "none"}),
        (jax.nn.leaky_relu, "leaky_relu", {"slope": pytest.approx(0.01)}),
        (jax.nn.elu, "elu", {"alpha": 1.0, "scale": 1.0, "input_scale": 1.0}),
        (lambda x: jax.nn.celu(x, 0.5), "elu", {"alpha": 0.5, "scale": 1.0, "input_scale": 2.0}),
        (jax.nn.selu, "selu", {}),
        (jax.nn.softplus, "softplus", {"beta": 1.0, "threshold": 20.0}),
        (jax.nn.mish, "mish", {}),
        (jax.nn.log_sigmoid, "log_sigmoid", {}),
        (jax.nn.soft_sign, "softsign", {}),
        (jnp.arcsinh, "asinh", {}),
        (jnp.cosh, "cosh", {}),
        (lambda x: 0.5 * (jnp.exp(x) + jnp.exp(-x)), "cosh", {}),
        (lambda x: 1 / (1 + jnp.exp(-x)), "sigmoid", {}),
        (jax.nn.softmax, "softmax", {"axis": 2}),
        (lambda x: jnp.exp(x) / jnp.exp(x).sum(1, keepdims=True), "softmax", {"axis": 1}),
        (jax.nn.log_softmax, "log_softmax", {"axis": 2}),
        (lambda x: x.mean(1), "mean", {"axes": (1,), "keep_dims": False}),
        (lambda x: x.mean(1, keepdims=True), "mean", {"axes": (1,), "keep_dims": True}),
    ],
)
def test_functions_are_known_by_what_they_compute(function: Any, kind: str, attributes: dict[str, Any]) -> None:
    (_, step) = prepare(lambda p, x: function(x @ p["w"]), LINEAR, X).plan.network.steps
    assert step.kind == kind
    assert {key: step.attributes[key] for key in attributes} == attributes


@pytest.mark.slow
def test_a_function_that_only_resembles_is_none_of_them() -> None:
    assert kinds(lambda p, x: x * jax.nn.sigmoid(1.7 * x)) == ["mul", "sigmoid", "mul"]
    assert kinds(lambda p, x: jnp.clip(x, -2000, 2000)) == ["clamp"]
    # What reads a clipped tensor again does not read what it was clipped from.
    twice = prepare(lambda p, x: (lambda y: jax.nn.relu(y) * y)(jax.nn.relu(x @ p["w"])), LINEAR, X)
    assert [step.kind for step in twice.plan.network.steps] == ["linear", "relu", "square"]
    assert [step.kind for step in twice.plan.steps] == ["FULLY_CONNECTED", "MUL"]


@pytest.mark.slow
def test_biases_and_norms_of_plain_functions_become_part_of_the_layer() -> None:
    params = {**weights(kernel=(3, 3, 4, 6), b=(6,), head=(6, 2), c=(2,)), "norm": norm(6)}

    def function(p, x):
        y = conv(x, p["kernel"]) + p["b"]
        y = (y - p["norm"]["mean"]) / jnp.sqrt(p["norm"]["var"] + 1e-3) * p["norm"]["scale"] + p["norm"]["bias"]
        return jax.nn.relu(y).mean((1, 2)) @ p["head"] + p["c"]

    prepared = prepare(function, params, numbers(2, 8, 8, 4))
    first, mean, last = prepared.plan.steps
    assert (first.path, first.activation, mean.kind, last.path) == ("kernel", "RELU", "MEAN", "head")
    assert first.weights is not None and first.weights.bias is not None and first.weights.batch_norm is not None
    assert not first.weights.batch_norm.training
    assert last.weights is not None and last.weights.bias is not None


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["VALID", "SAME"])
def test_what_normalizes_images_is_part_of_the_first_layer(padding: str, tmp_path: Path) -> None:
    mean, deviation = np.array([0.485, 0.456, 0.406], "f"), np.array([0.229, 0.224, 0.225], "f")

    def function(p, x):
        x = (x / 255 - mean) / deviation if padding == "VALID" else x / 127.5 - 1
        y = jax.lax.conv_general_dilated(x, p["kernel"], (2, 2), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(y).mean((1, 2)) @ p["head"]

    x = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3)).astype("f")
    rules = [qat.Rule("input", ranges="fixed", fixed_range=(0.0, 255.0)), qat.Rule()]
    prepared = prepare(function, weights(kernel=(3, 3, 3, 4), head=(4, 2)), x, rules=rules)
    kinds = [step.kind for step in prepared.plan.steps]
    assert kinds == [*([] if padding == "VALID" else ["PADV2"]), "CONV_2D", "MEAN", "FULLY_CONNECTED"]
    graph = prepared.lower(*prepared.freeze(*prepared.calibrate(*prepared.init(), [x])))
    report = deploy.verify(graph, deploy.write_tflite(graph, tmp_path / "network.tflite"), data=x)
    assert report.values > 0 and report.differing == 0


@pytest.mark.slow
def test_constants_of_zeros_beside_small_values(tmp_path: Path) -> None:
    params = {"place": np.zeros((1, 5, 6), np.float32), **weights(head=(6, 2))}
    x = numbers(4, 5, 6)
    prepared = prepare(lambda p, x: (0.001 * x + p["place"]) @ p["head"], params, x)
    tuned, state = prepared.init()
    tuned, state = prepared.calibrate(tuned, state, [x])
    assert_exact(prepared, *prepared.freeze(tuned, state), (x,), tmp_path)


@pytest.mark.parametrize("policy", ["ema", "min_max", "learned"])
def test_calibration_from_the_start_forgets(policy: str) -> None:
    prepared = prepare(lambda p, x: x @ p["w"], LINEAR, X, [qat.Rule("input", ranges="fixed", fixed_range=(-9.0, 9.0)),
                                                            qat.Rule(ranges=policy)])  # fmt: skip
    once = prepared.calibrate(*prepared.init(), [X])
    other = prepared.calibrate(*prepared.init(), [X * 100])
    averaged, again = prepared.calibrate(*other, [X]), prepared.calibrate(*other, [X], restart=True)
    assert jax.tree.all(jax.tree.map(lambda one, two: bool((one == two).all()), once, again))
    assert not jax.tree.all(jax.tree.map(lambda one, two: bool((one == two).all()), once, averaged))


@pytest.mark.slow
def test_ranges_that_do_not_fit_one_another_are_moved(tmp_path: Path) -> None:
    """A difference of nearly equal values, a layer after values that vanish, a constant a few steps from zero."""
    params = {
        "gate": np.full(6, 3e-9, np.float32),
        "shift": np.full(6, 2e-6, np.float32),
        **weights(a=(6, 6), b=(6, 2)),
    }

    def forward(p, x):
        y = x @ p["a"]
        vanishing = jax.nn.relu(1e-9 * y - 1e-6) @ p["a"] + p["shift"]
        both = jnp.concatenate([y - (y + 1e-4 * x), jax.nn.sigmoid(y) * p["gate"], vanishing], -2)
        return both @ p["b"]

    x = numbers(4, 5, 6)
    # What is left of such gradients is rounding.
    prepared = prepare(forward, params, x, check=False)
    params, state = prepared.init()
    params, state = prepared.calibrate(params, state, [x])
    with pytest.warns(qat.RangesMovedWarning, match="freeze has changed that of 'sub'"):
        params, state = prepared.freeze(params, state)
    assert_exact(prepared, params, state, (x,), tmp_path)


def test_layers_tell_what_they_are() -> None:
    params = {**weights(kernel=(3, 3, 4, 6)), "norm": norm(6)}
    prepared = prepare(
        lambda p, x: dropout(jax.nn.relu(normalized(conv(x, p["kernel"]), p["norm"])), 0.5), params, numbers(2, 8, 8, 4)
    )
    layer, noise = prepared.plan.steps
    assert layer.weights is not None and layer.weights.batch_norm is not None and layer.weights.batch_norm.training
    assert noise.expression is not None
    params_, state = prepared.init()
    # Statistics are moved by training, not by gradients.
    assert params_["model"]["norm"]["mean"] is None and sorted(state.variables) == ["norm.mean", "norm.var"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda p, x: x - x.mean(0), "mixes the examples of a batch"),
        (lambda p, x: jnp.sort(x @ p["w"], -1), "sort .*leave it to the program"),
        (lambda p, x: jnp.cumprod(x, -1), "cumprod has no int8 operator"),
        (lambda p, x: jnp.cumsum(x, 0), "mixes the examples of a batch"),
        (lambda p, x: x if x.sum() > 0 else -x, "decides by the values of its input"),
        (lambda p, x: x > 0, "truth values"),
        (lambda p, x: p["w"], "does not depend on its input"),
        (lambda p, x: x * jax.random.normal(jax.random.key(0), (8,)), "draws random numbers"),
        (lambda p, x: jnp.where(x > x.mean(-1, keepdims=True), x, 0.0), "where has no int8 operator"),
        (lambda p, x: jnp.einsum("btd,ctd->bc", x, x), "over the batch"),
        (lambda p, x: jax.lax.while_loop(lambda c: c.sum() < 1, lambda c: c + 1, x), "rounds are not counted"),
        (lambda p, x: x.astype(int) * 2, "whole numbers"),
    ],
)
def test_refusals_name_the_place_and_the_way_out(function: Any, message: str) -> None:
    with pytest.raises(qat.UnsupportedOperator, match=message) as refusal:
        prepare(function, LINEAR, X)
    if "has no" in message:
        assert Path(__file__).name in str(refusal.value)


def test_arguments_that_are_none() -> None:
    def function(p: Any, x: Any) -> Any:
        return x @ p["w"]

    with pytest.raises(TypeError, match="variables"):
        prepare(function, example=X)
    with pytest.raises(TypeError, match="example"):
        prepare(function, LINEAR)
    with pytest.raises(TypeError, match="model must be"):
        prepare(3, LINEAR, X)
    with pytest.raises(qat.UnsupportedOperator, match="array with a batch"):
        prepare(lambda p: p["w"], LINEAR, ())
    prepared = prepare(function, LINEAR, X)
    params, state = prepared.init()
    with pytest.raises(RuntimeError, match="seen no data"):
        prepared.apply(params, state, X)
    with pytest.raises(ValueError, match=r"x must have shape \[batch, 6, 8\], .*got \[4, 8\]"):
        prepared.apply(params, state, X[:, 0], train=True)
    with pytest.raises(TypeError, match="must nest"):
        prepared.apply(params, state, X, X, train=True)
    with pytest.raises(TypeError, match="params must be"):
        prepared.apply(LINEAR, state, X, train=True)
    with pytest.raises(TypeError, match="state must be"):
        prepared.apply(params, {}, X, train=True)
    with pytest.raises(ValueError, match="batches is empty"):
        prepared.calibrate(params, state, [])
    with pytest.raises(TypeError, match=r"iterable of batches, got an array of shape \[4, 6, 8\]"):
        prepared.calibrate(params, state, X)
    with pytest.raises(ValueError, match="frozen before it is lowered"):
        prepared.lower(params, state)
    with pytest.raises(RuntimeError, match="seen no data"):
        prepared.lower(*prepared.freeze(params, state))
    with pytest.raises(ValueError, match="before freeze"):
        prepared.calibrate(*prepared.freeze(*prepared.calibrate(params, state, [X])), [X])
    learned = prepare(function, LINEAR, X, [qat.Rule(ranges="learned")])
    with pytest.raises(ValueError, match="call calibrate first"):
        learned.apply(*learned.init(), X, train=True)
    noisy = prepare(lambda p, x: dropout(x @ p["w"], 0.5), LINEAR, X)
    with pytest.raises(ValueError, match="give key"):
        noisy.apply(*noisy.init(), X, train=True)
    with pytest.warns(qat.UnusedRuleWarning, match="matches no layer"):
        prepare(function, LINEAR, X, [qat.Rule(match="nothing"), qat.Rule()])


# --- training ---------------------------------------------------------------------------------------------------------

RULES = {
    "ema": {},
    "learned": {"ranges": "learned"},
    "percentile": {"ranges": "percentile", "percentile": 99.0},
    "min_max": {"ranges": "min_max"},
    "last_batch": {"ranges": "last_batch"},
    "folded": {"fold_batch_norm": True, "per_channel": False},
    "few_bits": {"weight_bits": 4, "activation_bits": 6},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["learned", "folded"])
def test_rules(name: str, tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    made, batch = shared("ds_cnn")
    model = made._model
    prepared = prepare(
        lambda leaves, x: model.function([leaves[name] for name in model.leaves], x),
        model.leaves,
        batch,
        [qat.Rule(**RULES[name])],
    )
    assert assert_exact(prepared, *trained(prepared, batch), batch, tmp_path) > 0


@pytest.mark.slow
@pytest.mark.parametrize("ranges", ["ema", "min_max", "percentile", "learned"])
def test_what_is_not_finite_moves_no_range_and_is_named(ranges: str) -> None:
    prepared = prepare(lambda p, x: jax.nn.relu(x @ p["w"]), LINEAR, X, [qat.Rule(ranges=ranges)])
    params, state = prepared.calibrate(*prepared.init(), [X])
    for odd in (np.nan, np.inf):
        broken = np.array(X)
        broken[1, 2, 3] = odd
        with pytest.raises(ValueError, match="batch 2 of batches gives NaN or infinity in 'input'"):
            prepared.calibrate(params, state, [X, broken])
        _, after = prepared.apply(params, state, broken, train=True)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((after.ranges, params["range_parameters"])))
        assert ranges == "learned" or int(after.ranges["input"]["batches"]) == 1
    _, frozen = prepared.freeze(params, state)
    prepared.lower(params, frozen)
    spoilt = {**params, "model": {"w": params["model"]["w"].at[0, 0].set(np.nan)}}
    with pytest.raises(ValueError, match="the layer .* contains NaN or infinity"):
        prepared.lower(spoilt, frozen)


def test_training_is_a_scan_and_gives_what_single_steps_give() -> None:
    prepared = prepare(lambda p, x: jax.nn.relu(x @ p["w"]), LINEAR, X, [qat.Rule(ranges="learned")])
    params, state = prepared.calibrate(*prepared.init(), [X])
    batches = jnp.stack([X, X * 1.1, X * 0.9])

    def step(carry, x):
        params, state = carry

        def loss(params):
            y, after = prepared.apply(params, state, x, train=True)
            return jnp.mean(jnp.square(y - 1)), after

        (value, after), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), after), value

    scanned, losses = jax.jit(lambda carry: jax.lax.scan(step, carry, batches))((params, state))
    carry = (params, state)
    for at in range(3):
        carry, value = jax.jit(step)(carry, batches[at])
        np.testing.assert_allclose(value, losses[at], rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(scanned), jax.tree.leaves(carry), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    moved = scanned[0]["range_parameters"]["w"]["maximum"] - params["range_parameters"]["w"]["maximum"]
    assert abs(float(moved)) > 0 and float(losses[2]) < float(losses[0])


def test_a_moving_average_follows_training_and_stops_when_frozen() -> None:
    prepared = prepare(lambda p, x: x @ p["w"], LINEAR, X)
    params, state = prepared.init()
    apply = jax.jit(lambda state, x: prepared.apply(params, state, x, train=True)[1])
    for _ in range(2):
        state = apply(state, X)
    state = apply(state, 3 * X)
    # The first batches count alike.
    np.testing.assert_allclose(state.ranges["input"]["maximum"], X.max() * (1 + 1 + 3) / 3, rtol=1e-6)
    assert int(state.ranges["input"]["batches"]) == 3
    _, frozen = prepared.freeze(params, state)
    after = apply(frozen, 9 * X)
    assert after.frozen and float(after.ranges["input"]["maximum"]) == float(state.ranges["input"]["maximum"])
    # Evaluation moves nothing.
    assert prepared.apply(params, state, 9 * X)[1] is state


def test_statistics_follow_the_batches() -> None:
    params = {"w": np.eye(3, dtype=np.float32), "norm": norm(3)}

    def function(p, x):
        n = p["norm"]
        return exactqat.qat.jax.batch_norm(
            x @ p["w"], n["scale"], n["bias"], n["mean"], n["var"], momentum=0.5, epsilon=1e-3
        )

    prepared = prepare(function, params, numbers(4, 3))
    x = numbers(64, 3, seed=3) * 2 + 1
    params_, state = prepared.init()
    y, state = prepared.apply(params_, state, x, train=True)
    # The weights are an identity that eight bits hold; what is left is the input's grid.
    np.testing.assert_allclose(state.variables["norm.mean"], x.mean(0) / 2, atol=0.03)
    np.testing.assert_allclose(state.variables["norm.var"], (1 + x.var(0, ddof=1)) / 2, rtol=0.03)
    np.testing.assert_allclose(y, (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-3), atol=0.06)
    back = prepared.variables(params_, state)
    np.testing.assert_array_equal(back["norm"]["mean"], state.variables["norm.mean"])


@pytest.mark.slow
def test_dropout_drops_in_training_only() -> None:
    prepared = prepare(lambda p, x: dropout(x, 0.5), {"unused": np.zeros(1, np.float32)}, X)
    params, state = prepared.init()
    x = np.full((64, 6, 8), 1.0, np.float32)
    y, state = prepared.apply(params, state, x, train=True, key=jax.random.key(1))
    assert set(np.unique(np.round(np.asarray(y), 2))) == {0.0, 2.0} and 0.4 < float((y == 0).mean()) < 0.6
    y, _ = prepared.apply(params, state, x)
    np.testing.assert_allclose(y, x, atol=0.01)


@pytest.mark.slow
def test_the_float_network_is_the_users_function() -> None:
    for name in ("squeeze_and_excite", "attention", "mixture"):
        prepared, batch = shared(name)
        params, state = frozen(name)
        floating = jax.jit(lambda p, *x, of=prepared, s=state: of._run(p, s, x, {}, Mode(quantizing=False))[0])
        wanted = prepared._model.function(list(prepared._tensors(params, state).values()), *batch)
        outputs = floating(params, *batch)
        for ours, theirs in zip(jax.tree.leaves(outputs), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_sharded_batches() -> None:
    """On one device or several: the batch's sharding changes nothing."""
    prepared, batch = shared("perceptron")
    params, state = prepared.calibrate(*prepared.init(), [batch])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("batch",))
    sharded = jax.device_put(batch[0], jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch")))
    apply = jax.jit(lambda x: prepared.apply(params, state, x, train=True)[0])
    np.testing.assert_array_equal(apply(sharded), apply(batch[0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["perceptron", "squeeze_and_excite", "attention", "mixture"])
def test_an_evaluation_asks_the_host_once(name: str) -> None:
    """For the whole network, with the bits that it gives step by step, and its gradients."""
    prepared, batch = shared(name)
    params, state = frozen(name)

    def total(params: Any, *batch: Any) -> Any:
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(prepared.apply(params, state, *batch)[0]))

    evaluate = jax.jit(lambda params, *batch: prepared.apply(params, state, *batch)[0])
    stepwise: dict[str, Any] = {}
    prepared._run(params, state, batch, {}, Mode(frozen=True), seen=stepwise)
    expected = [np.asarray(stepwise[path]) for path in prepared.plan.outputs]
    for run in (evaluate, lambda *given: prepared.apply(given[0], state, *given[1:])[0]):
        found = jax.tree.leaves(run(params, *batch))
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    text = evaluate.lower(params, *batch).compile().as_text()
    assert len([line for line in text.splitlines() if "custom-call(" in line and "exactqat_host" in line]) == 1
    compiled = jax.jit(jax.grad(total))(params, *batch)
    assert any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(compiled))
    if name in ("perceptron", "mixture"):  # outside jit every operation of a gradient is compiled on its own
        gradients = jax.grad(total)(params, *batch)
        for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(compiled), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_nan_in_an_evaluation() -> None:
    prepared, batch = shared("perceptron")
    params, state = prepared.calibrate(*prepared.init(), [batch])
    params, state = prepared.freeze(params, state)
    x = np.array(batch[0])
    expected = np.asarray(jax.jit(prepared.apply)(params, state, x)[0])
    x[1] = np.nan
    found = np.asarray(jax.jit(prepared.apply)(params, state, x)[0])
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(np.delete(found, 1, 0), np.delete(expected, 1, 0))


@pytest.mark.slow
def test_a_frozen_network_on_several_devices() -> None:
    """Each computes the integers of its own examples, in evaluation and in training."""
    environment = os.environ | virtual_devices.environment(4)
    finished = subprocess.run([sys.executable, str(SPREAD)], env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


ACCELERATORS = """
import warnings
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from exactqat import qat
from exactqat.qat.train.jax import host

host.is_custom_call = lambda: False  # as on GPUs
rng = np.random.default_rng(0)
params = {"w": rng.standard_normal((6, 16)).astype("f"), "v": rng.standard_normal((16, 4)).astype("f")}
x = rng.standard_normal((8, 6)).astype("f")
def network(p, x):
    return jax.nn.relu(x @ p["w"]) @ p["v"]
def results(device, step, *arrays):
    prepared = qat.prepare(network, x, variables=params, device=device)
    params_, state = prepared.freeze(*prepared.calibrate(*prepared.init(), [x]))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        y = step(lambda p, x: prepared.apply(p, state, x, train=True)[0])(params_, *arrays)
    return np.asarray(y), sum("stays fake quantization" in str(warning.message) for warning in seen)
mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.KIND,))
whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("d"))
def step(function):
    return jax.jit(function, in_shardings=(whole, rows)) if "KIND" == "Auto" else jax.jit(function)
expected, warned = results(None, step, jax.device_put(x, rows))
assert not warned
found, warned = results("reference", step, jax.device_put(x, rows))
assert warned
np.testing.assert_array_equal(found, expected)
assert not results("reference", jax.jit, x)[1]
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_program_for_several_accelerators_calls_no_host(kind: str) -> None:
    """It computes fake quantization and says so, whoever names the devices: `in_shardings` or the arrays' types."""
    environment = os.environ | virtual_devices.environment(4)
    script = ACCELERATORS.replace("KIND", kind)
    finished = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def frozen_network(x: np.ndarray) -> tuple[Any, Any, Any]:
    prepared = prepare(lambda p, x: jax.nn.relu(x @ p["w"]), weights(w=(6, 3)), x, device="reference")
    return prepared, *prepared.freeze(*prepared.calibrate(*prepared.init(), [x]))


def test_a_frozen_network_is_a_custom_call() -> None:
    """Nothing asks JAX for a callback; vmap computes example by example; what is exported would miss the host."""
    x = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    prepared, params, state = frozen_network(x)
    evaluate = jax.jit(lambda p, x: prepared.apply(p, state, x)[0])
    text = evaluate.lower(params, x).as_text()
    assert "@exactqat_host" in text and "callback" not in text
    expected = prepared.apply(params, state, x)[0]
    np.testing.assert_array_equal(evaluate(params, x), expected)
    np.testing.assert_array_equal(jax.vmap(evaluate, (None, 0))(params, x[:, None])[:, 0], expected)
    with pytest.raises(NotImplementedError, match=r"device=None"):
        export.export(evaluate)(params, x)


@pytest.mark.parametrize("train", [False, True])
def test_gradients_of_gradients_of_a_frozen_network_keep_the_curvature(train: bool) -> None:
    x = np.random.default_rng(0).standard_normal((16, 6)).astype(np.float32)
    held = weights(w=(6, 8), b=(8,), v=(8, 3))

    def network(p: Any, x: Any) -> Any:
        return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]

    prepared = prepare(network, held, x)
    params, state = prepared.freeze(*prepared.calibrate(*prepared.init(), [x]))

    def penalty(function: Any, p: Any) -> Any:
        return jnp.square(jax.grad(lambda x: function(p, x).sum())(jnp.asarray(x))).sum()

    found = jax.grad(lambda p: penalty(lambda q, x: prepared.apply(q, state, x, train=train)[0], p))(params)["model"]
    expected = jax.grad(lambda p: penalty(network, p))(held)
    for name, theirs in expected.items():
        ours, theirs = np.asarray(found[name]).ravel(), np.asarray(theirs).ravel()
        assert ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs) > 0.98, name
        assert 0.9 < np.linalg.norm(ours) / np.linalg.norm(theirs) < 1.1, name


@pytest.mark.slow
def test_a_program_outlives_the_model_it_computes() -> None:
    x = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)

    def program_alone() -> tuple[Any, ...]:
        prepared, params, state = frozen_network(x)
        program = jax.jit(lambda p, x: prepared.apply(p, state, x)[0]).lower(params, x).compile()
        return program, params, np.asarray(prepared.apply(params, state, x)[0])

    program, params, expected = program_alone()
    jax.clear_caches()
    gc.collect()
    np.testing.assert_array_equal(program(params, x), expected)


def test_weights_that_no_device_takes_are_named_from_within_a_program() -> None:
    x = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    prepared, params, state = frozen_network(x)
    evaluate = jax.jit(lambda p, x: prepared.apply(p, state, x)[0])
    params["model"]["w"] = params["model"]["w"] * np.nan
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: the layer 'w' contains NaN or infinity"):
        jax.block_until_ready(evaluate(params, x))


SYNCHRONIZED = """
import jax, numpy as np
import exactqat.operators.jax
from exactqat import qat
from jax.sharding import PartitionSpec as P

rng = np.random.default_rng(0)
params = {
    "w": rng.standard_normal((6, 5)), "v": rng.standard_normal((5, 3)), "scale": np.ones(5), "bias": np.zeros(5),
    "mean": np.zeros(5), "var": np.ones(5),
}
params = jax.tree.map(lambda each: each.astype("f"), params)
# No replica's batch is like another one's.
x = (rng.standard_normal((16, 6)) * np.linspace(0.1, 4, 16)[:, None] + np.linspace(-1, 2, 16)[:, None]).astype("f")

def network(p, x):
    y = qat.jax.batch_norm(x @ p["w"], p["scale"], p["bias"], p["mean"], p["var"], momentum=0.9, epsilon=1e-3)
    return jax.nn.relu(y) @ p["v"]

prepared = qat.jax.prepare(network, params, x, [RULE])
params, state = prepared.calibrate(*prepared.init(), [x[:5]])

def step(params, state, x, total=lambda value: value):
    def loss(params):
        results, after = prepared.apply(params, state, x, train=True)
        return total((results ** 2).sum()), (results, after)
    (value, (results, after)), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    return value, results, after, gradients

def replica(params, state, x):
    with exactqat.operators.jax.synchronized("batch"):
        return step(params, state, x, lambda value: jax.lax.psum(value, "batch"))

mesh = jax.make_mesh((4,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
shares = {"in_specs": (P(), P(), P("batch")), "out_specs": (P(), P("batch"), P(), P())}
together = jax.jit(jax.shard_map(replica, mesh=mesh, **shares))
alone = jax.jit(step)
for _ in range(2):
    ours, whole = together(params, state, x), alone(params, state, x)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.abs(b).max(), err_msg=str(path))
    moved = [not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(whole[2]), jax.tree.leaves(state), strict=True)]
    assert any(moved)
    state = whole[2]
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranges", ["ema", "percentile", "learned"])
@pytest.mark.parametrize("folded", [True, False])
def test_synchronized_replicas_are_one_device(ranges: str, folded: bool) -> None:
    """Two steps under `shard_map`: results, gradients, ranges and statistics are those of the whole batch."""
    script = SYNCHRONIZED.replace("RULE", f"qat.Rule(ranges={ranges!r}, fold_batch_norm={folded})")
    environment = os.environ | virtual_devices.environment(4)
    finished = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def test_a_frozen_network_without_a_profile_is_fake_quantization() -> None:
    x = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    for profile, asks in (("reference", True), (None, False)):
        prepared = prepare(lambda p, x: jax.nn.relu(x @ p["w"]), {"w": np.ones((6, 3), "f")}, x, device=profile)
        params, state = prepared.calibrate(*prepared.init(), [x])
        _, frozen = prepared.freeze(params, state)
        for phase, expected in ((state, False), (frozen, asks)):
            text = str(jax.make_jaxpr(prepared.apply)(params, phase, x))
            assert ("exactqat_host" in text) == expected


# --- the device -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("attention", marks=pytest.mark.slow),
        pytest.param("mixture", marks=pytest.mark.slow),
        pytest.param("MobileNet", marks=pytest.mark.slow),
    ],
)
def test_a_network_goes_to_the_device(name: str, tmp_path: Path) -> None:
    """More of them: `python tests/campaigns/jax_networks.py`."""
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    if name not in NETWORKS:
        pytest.skip("needs exactqat[flax]")
    prepared, batch = shared(name)
    assert assert_exact(prepared, *trained(prepared, batch), batch, tmp_path) > 0


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 1e-4])
def test_a_branch_that_is_nearly_nothing_goes_through(scale: float, tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    params = {**weights(w=(8, 8), u=(8, 8)), "scale": jnp.full(8, scale)}

    def network(params: Any, x: Any) -> Any:
        features = (x @ params["w"]) * 1e-4
        return features + jax.nn.relu(features @ params["u"]) * params["scale"]

    prepared = prepare(network, params, X)
    params, state = prepared.calibrate(*prepared.init(), [X])
    graph = prepared.lower(*prepared.freeze(params, state))
    path = deploy.write_tflite(graph, tmp_path / "model.tflite")
    codes = np.random.default_rng(0).integers(-128, 128, (8, 6, 8)).astype(np.int8)
    assert deploy.verify(graph, path, codes).differing == 0


@pytest.mark.slow
def test_weights_move_between_frameworks() -> None:
    """The same network with the same numbers is the same graph, integer for integer, trained by PyTorch or by JAX."""
    torch = pytest.importorskip("torch")
    from moving_weights import Network

    from exactqat.deploy.lower import lower

    torch.manual_seed(0)
    network = Network()
    images = torch.randn(8, 1, 25, 10)
    theirs = qat.prepare(network, images)
    qat.calibrate(theirs, [images])
    qat.freeze(theirs)

    def kernel(module: Any) -> dict[str, np.ndarray]:
        made = {"kernel": module.weight.detach().permute(2, 3, 1, 0).numpy()}
        return made if module.bias is None else made | {"bias": module.bias.detach().numpy()}

    def norm_of(module: Any) -> dict[str, np.ndarray]:
        tensors = {"scale": module.weight, "bias": module.bias, "mean": module.running_mean, "var": module.running_var}
        return {name: tensor.detach().numpy() for name, tensor in tensors.items()}

    params: dict[str, Any] = {}
    for name in ("stem", "depthwise", "pointwise"):
        params[name] = kernel(getattr(network, name))
        params[f"{name}_norm"] = norm_of(getattr(network, f"{name}_norm"))
    # Flattened in JAX's order of axes.
    matrix = network.head.weight.detach().reshape(4, 8, 12, 5).permute(2, 3, 1, 0).reshape(-1, 4)
    params["head"] = {"kernel": matrix.numpy(), "bias": network.head.bias.detach().numpy()}

    def function(p, x):
        for name, pads, strides, groups in (
            ("stem", ((4, 4), (1, 1)), 2, 1),
            ("depthwise", ((1, 1), (1, 1)), 1, 8),
            ("pointwise", ((0, 0), (0, 0)), 1, 1),
        ):
            x = jax.lax.conv_general_dilated(
                x,
                p[name]["kernel"],
                (strides, strides),
                pads,
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=groups,
            )
            x = x + p[name]["bias"] if "bias" in p[name] else x
            x = normalized(x, p[f"{name}_norm"])
            x = jax.nn.relu6(x) if name == "pointwise" else jax.nn.relu(x)
        return x.reshape(x.shape[0], -1) @ p["head"]["kernel"] + p["head"]["bias"]

    x = images.permute(0, 2, 3, 1).numpy()
    ours = prepare(function, params, x)
    ours_params, state = ours.calibrate(*ours.init(), [x])
    ranges = {path: layer.output_quantizer.range for path, layer in theirs.layers() if path in state.ranges}
    assert set(ranges) == set(state.ranges)
    for path, found in ranges.items():
        # Sums in another order: the same ranges but for the last bits, and from here on to the bit.
        for end in ("minimum", "maximum"):
            np.testing.assert_allclose(state.ranges[path][end], getattr(found, end).numpy(), rtol=1e-4, atol=1e-6)
            state.ranges[path][end] = jnp.asarray(getattr(found, end).numpy())
    first, second = lower(theirs), ours.lower(*ours.freeze(ours_params, state))
    assert [(o.kind, dict(o.attributes)) for o in first.operators] == [
        (o.kind, dict(o.attributes)) for o in second.operators
    ]
    for one, other in zip(first.operators, second.operators, strict=True):
        for a, b in zip((*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True):
            mine, yours = first.tensors[a], second.tensors[b]
            assert mine.shape == yours.shape and mine.dtype == yours.dtype
            assert mine.quantization.equals(yours.quantization), (a, b)
            assert (mine.data is None) == (yours.data is None)
            assert mine.data is None or np.array_equal(mine.data, yours.data), (a, b)


@pytest.mark.slow
def test_flax_is_asked_for_by_its_extra() -> None:
    """Whoever has no Flax is not asked for it: functions need JAX alone."""
    program = (
        "import sys; sys.modules['flax'] = None; sys.modules['torch'] = None\n"
        "import numpy as np\n"
        "from exactqat import qat\n"
        "prepared = qat.jax.prepare(lambda p, x: x @ p, np.eye(3, dtype='f'), np.ones((2, 3), 'f'))\n"
        "assert [step.kind for step in prepared.plan.steps] == ['FULLY_CONNECTED']"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    for needed in ("ai_edge_litert", "flax", "optax", "sklearn"):
        pytest.importorskip(needed)
    program = Path(__file__).resolve().parents[2] / "examples" / "digits_flax.py"
    run = subprocess.run([sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    accuracy = float(run.stdout.split()[1].rstrip(";"))
    assert accuracy > 0.9 and run.stdout.endswith(" 0 differ\n") and (tmp_path / "digits.tflite").exists()


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    page = Path(__file__).resolve().parents[2] / "docs" / "jax-kit.md"
    program = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)


def test_writing_and_verifying_take_what_lower_gives(tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    prepared, (x,) = shared("perceptron")
    params, state = prepared.calibrate(*prepared.init(), [x])
    graph = prepared.lower(*prepared.freeze(params, state))
    path = deploy.write_tflite(graph, tmp_path / "model.tflite")
    codes = deploy.quantize(x, graph.tensors["input"].quantization)
    report = deploy.verify(graph, path, codes)
    assert report.differing == 0 and report.values > 0
