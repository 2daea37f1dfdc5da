# SPDX-License-Identifier: Apache-2.0
"""Random models in JAX, prepared and compared with themselves: results, gradients and statistics for three batches.

python tests/campaigns/fuzz_meaning_jax.py --count 1000 --seed 0    prints what was kept, refused (why), differing, died

Plain functions, Linen and NNX modules with custom gradients, stopped gradients, tied weights, statistics, branches on
training and on the size of the batch (one size, a window, a table), small epsilons. A model is either refused or trains
as it is; `differing` and `died` must be 0.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import _tests_folder  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from meaning_jax import QUICK, ROUNDING, SIZES, float_network, gradients

from exactqat import qat
from exactqat.qat.jax import Prepared, prepare

try:
    import flax.linen as nn
    from flax import nnx
except ImportError:
    nn = nnx = None

WIDTH = 6
STEPS = 3
# (training, numbers of examples) in which modules are compared.
MODES = ((True, SIZES), (False, SIZES[1:2]))


def modes(words: Iterable[str]) -> Any:
    """A batch norm makes its own offset of a single example, whatever that is: what follows it then depends on nothing
    but the epsilons of norms."""
    return ((True, [size for size in SIZES if size > 1]), MODES[1]) if "norm" in words else MODES


def kept(key: Any, p: Any = 0.5, shape: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`jax.random.bernoulli` without chance."""
    return jnp.broadcast_to(jnp.asarray(p) > 0, jnp.shape(p) if shape is None else shape)


# --- functions with gradients of their own --------------------------------------------------------------------------


def vjp_of(forward: Callable[[Any], Any], factor: float, nonlinear: bool) -> Callable[[Any], Any]:
    function = jax.custom_vjp(forward)

    def backward(x: Any, g: Any) -> Any:
        g = g * factor * (1 + 0.1 * x)
        return (g / (1e-3 + jnp.abs(g).max()),) if nonlinear else (g,)

    function.defvjp(lambda x: (forward(x), x), backward)
    return function


def jvp_of(forward: Callable[[Any], Any], factor: float) -> Callable[[Any], Any]:
    function = jax.custom_jvp(forward)
    function.defjvp(lambda primals, tangents: (function(primals[0]), factor * tangents[0] * jnp.cos(primals[0])))
    return function


@jax.custom_vjp
def product(x: Any, w: Any) -> Any:
    return x @ w


product.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda kept, g: (-(g @ kept[1].T), 0.5 * kept[0].reshape(-1, kept[0].shape[-1]).T @ g.reshape(-1, g.shape[-1])),
)


def reversed_gradient(factor: float) -> Callable[[Any], Any]:
    return jax.custom_gradient(lambda x: (x, lambda g: -factor * g))


FORWARD = (jnp.tanh, lambda x: x, lambda x: jnp.maximum(x, 0.0), lambda x: 2 * x + 1, jax.nn.sigmoid)
ACTIVATIONS = (jax.nn.relu, jnp.tanh, jax.nn.gelu, jax.nn.silu, jax.nn.sigmoid, jax.nn.relu6, jax.nn.softmax)

# What a model may do without being refused, as it was decided (docs/decisions/one-front.md): a dictionary and `type`
# put no question to a size. `one` counts a model that differs with one of them as decided.
WITHOUT_QUESTION = ("in a dictionary", "of its class")
asked: set[str] = set()  # what the steps of the model at hand ask of the size of the batch

# --- steps ------------------------------------------------------------------------------------------------------------

Step = Callable[[Any, Any], Any]  # of the parameters and a value [batch, ..., WIDTH]


def weights(rng: Any, name: str) -> Callable[[Any], Any]:
    """How a step reads a square weight."""
    scale = float(rng.uniform(0.5, 2))
    straight = vjp_of(jnp.sign, 1.0, bool(rng.integers(2)))
    forms: list[Callable[[Any], Any]] = [
        lambda p: p[name],
        lambda p: p[name],
        lambda p: p[name].T,
        lambda p: lax.stop_gradient(p[name]),
        lambda p: p[name] + scale * lax.stop_gradient(p["w0"]),
        lambda p: straight(p[name]) * 0.3,
        lambda p: p[name] * lax.stop_gradient(jnp.abs(p[name]).mean()),
        lambda p: jnp.where(p[name] > 0, p[name], 0.0),
    ]
    return forms[rng.integers(len(forms))]


def random_step(rng: Any) -> Step:
    name = f"w{rng.integers(3)}"
    weight = weights(rng, name)
    factor = float(rng.uniform(0.3, 3))
    activation = ACTIVATIONS[rng.integers(len(ACTIVATIONS))]
    forward = FORWARD[rng.integers(len(FORWARD))]
    own = [
        vjp_of(forward, factor, False),
        vjp_of(forward, factor, True),
        jvp_of(forward, factor),
        reversed_gradient(factor),
    ][rng.integers(4)]
    inner: list[Step] = [lambda p, x: own(x), lambda p, x: activation(x @ weight(p)), lambda p, x: own(x @ weight(p))]
    chosen = inner[rng.integers(len(inner))]
    usual: list[Step] = [
        lambda p, x: x @ weight(p),
        lambda p, x: activation(x),
        lambda p, x: activation(x @ weight(p)) + x,
        lambda p, x: product(x, weight(p)),
        lambda p, x: own(x),
        lambda p, x: own(x @ weight(p)) + p["b"],
        lambda p, x: lax.stop_gradient(x) + own(x),
        lambda p, x: x * lax.stop_gradient(activation(x)),
        lambda p, x: x * p["b"] + lax.stop_gradient(p["b"]),
        lambda p, x: x - x.mean(-1, keepdims=True),
        lambda p, x: x / lax.stop_gradient(1.0 + jnp.abs(x).sum(-1, keepdims=True)),
        lambda p, x: jax.vmap(lambda one: own(one))(x),
        lambda p, x: jax.jit(chosen)(p, x),
        lambda p, x: jax.checkpoint(chosen)(p, x),
        lambda p, x: lax.scan(lambda c, _: (activation(c @ weight(p)), None), x, None, length=2)[0],
        lambda p, x: jnp.concatenate([x[..., : WIDTH // 2], own(x)[..., WIDTH // 2 :]], -1),
        lambda p, x: x + jnp.zeros((x.shape[0], *x.shape[1:])),
        lambda p, x: x.reshape(x.shape[0] * 2, *x.shape[1:-1], WIDTH // 2).reshape(x.shape),
        lambda p, x: x + jnp.broadcast_to(jnp.arange(float(WIDTH)), x.shape) / WIDTH,
        lambda p, x: x * 1009 / 2018,
        lambda p, x: qat.jax.dropout(x, 0.0),
    ]
    small = float(10.0 ** -rng.integers(0, 5))
    epsilons: list[Step] = [
        lambda p, x: (x * small) * lax.rsqrt(jnp.mean(jnp.square(x * small), -1, keepdims=True) + 1e-6),
        lambda p, x: (x * small) / (jnp.linalg.norm(x * small, axis=-1, keepdims=True) + 1e-7),
        lambda p, x: jnp.log(jnp.maximum(x * small, 1e-6)) / 10,
        lambda p, x: jnp.log(jax.nn.relu(x * small) + 1e-5) / 10,
        lambda p, x: jnp.sqrt(jnp.square(x * small) + 1e-6),
    ]
    size = int(rng.choice(SIZES[1:]))
    question, asks = [
        ("equal", lambda n: n == size),
        ("one of two", lambda n: n in (size, 40)),
        ("in a window", lambda n: size - 2 < n < size + 3),
        ("in a dictionary", lambda n: {size: True}.get(n, False)),
        ("divided", lambda n: n % size == 0),
        ("larger", lambda n: n > 40 or n == size),
        ("its half", lambda n: 0.5 * n == size / 2),
        ("its root", lambda n: np.sqrt(n) == np.sqrt(size)),
        ("of its class", lambda n: type(n) is int and n == size),
    ][rng.integers(9)]
    asking: list[Step] = [
        lambda p, x: x * 2 if asks(x.shape[0]) else x,
        lambda p, x: x @ weight(p) if asks(len(x)) else x,
        lambda p, x: x * (1.0 if asks(x.shape[0]) else 1.0),
        lambda p, x: jax.jit(lambda y: activation(y) if asks(y.shape[0]) else y)(x),
    ]
    rare: list[Step] = [
        lambda p, x: x / x.shape[0],
        lambda p, x: x * len(x) ** -0.5,
        lambda p, x: x * jnp.arange(x.shape[0]).reshape(-1, *[1] * (x.ndim - 1)),
        lambda p, x: x * 2 if x.shape[0] > 100 else x,
        lambda p, x: x * 2 if x.shape[0] % 2 == 0 else x,
        lambda p, x: x * 3 if x.shape[0] == 1 else x,
        lambda p, x: x - x.mean(0),
        lambda p, x: x * jnp.ones((x.shape[0], 1)).sum(),
        lambda p, x: x[::-1],
        lambda p, x: jnp.sort(x, -1),
    ]
    draw = rng.random()
    steps = rare if draw < 0.05 else asking if draw < 0.1 else epsilons if draw < 0.2 else usual
    if steps is asking:
        asked.add(question)
    return steps[rng.integers(len(steps))]


# --- models -----------------------------------------------------------------------------------------------------------


class Model:
    """A model, and how its original runs: (trained, statistics, inputs, training) -> (results, statistics)."""

    def __init__(
        self, prepare: Callable[[bool], Prepared], run: Any, trained: Any, statistics: Any, modes: Any
    ) -> None:
        self.prepare, self.run, self.trained, self.statistics, self.modes = prepare, run, trained, statistics, modes


def inputs_of(rng: Any) -> list[np.ndarray]:
    shape = [(WIDTH,), (4, WIDTH), (3, 4, WIDTH)][rng.integers(3)]
    return [rng.standard_normal((8, *shape)).astype(np.float32)]


def parameters(rng: Any) -> dict[str, Any]:
    matrices = {f"w{at}": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) * 0.5 for at in range(3)}
    return {**matrices, "b": rng.standard_normal(WIDTH).astype(np.float32)}


def plain(rng: Any, inputs: Sequence[np.ndarray]) -> Model:
    steps = [random_step(rng) for _ in range(rng.integers(1, STEPS + 1))]
    ending = rng.integers(5)

    def function(p: Any, x: Any) -> Any:
        values = [x]
        for step in steps:
            values.append(step(p, values[-1]))
        if ending == 0 and len(values) > 2:
            return {"last": values[-1], "before": values[-2] * 2}
        if ending == 1:
            return values[-1], values[-1]
        return values[-1] @ p["w0"]

    params = parameters(rng)
    return Model(
        lambda check: prepare(function, params, inputs[0][:2], check=check),
        lambda p, statistics, xs, training: (function(p, *xs), statistics),
        params,
        {},
        ((True, SIZES),),
    )


def module_step(rng: Any) -> tuple[str, Any]:
    word = ["dense", "dense", "norm", "dropout", "layer_norm", "own", "tied", "attention", "activation"][
        rng.integers(9)
    ]
    rare = ["branch", "statistic", "frozen_norm", "noise"]
    word = rare[rng.integers(len(rare))] if rng.random() < 0.08 else word
    return word, (random_step(rng) if word == "own" else ACTIVATIONS[rng.integers(len(ACTIVATIONS))])


def linen(rng: Any, inputs: Sequence[np.ndarray]) -> Model:
    steps = [module_step(rng) for _ in range(rng.integers(1, STEPS + 1))]
    initial = parameters(rng)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool = True) -> Any:
            p = {name: self.param(name, lambda key, name=name: jnp.asarray(initial[name])) for name in initial}
            tied = nn.Dense(WIDTH)
            for word, extra in steps:
                if word == "dense":
                    x = nn.Dense(WIDTH)(x)
                elif word == "norm":
                    x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(WIDTH)(x))
                elif word == "frozen_norm":
                    x = nn.BatchNorm(use_running_average=True)(nn.Dense(WIDTH)(x))
                elif word == "dropout":
                    x = nn.Dropout(0.3, deterministic=not train)(x)
                elif word == "layer_norm":
                    x = nn.LayerNorm()(x)
                elif word == "own":
                    x = extra(p, x)
                elif word == "tied":
                    x = extra(tied(extra(tied(x))))
                elif word == "attention" and x.ndim == 3:
                    x = nn.MultiHeadDotProductAttention(2, dropout_rate=0.2, deterministic=not train)(x, x)
                elif word == "branch":
                    x = x * 2 if train else x
                elif word == "noise" and train:
                    x = x + jax.random.normal(self.make_rng("dropout"), x.shape)
                elif word == "statistic":
                    mean = self.variable("own", f"mean{len(self.variables)}", lambda: jnp.zeros(WIDTH))
                    if train:
                        mean.value = 0.9 * mean.value + 0.1 * x.reshape(-1, WIDTH).mean(0)
                    x = x - mean.value
                else:
                    x = extra(x)
            return x @ p["w1"]

    net, key = Net(), jax.random.key(0)
    variables = net.init({"params": key, "dropout": key}, inputs[0], train=False)
    others = {name: collection for name, collection in variables.items() if name != "params"}

    def run(trained: Any, statistics: Any, xs: Any, training: bool) -> Any:
        tree = {"params": trained, **statistics}
        mutable = list(others) if training else []
        results, changed = net.apply(tree, *xs, train=training, mutable=mutable, rngs={"dropout": key})
        return results, {**statistics, **changed}

    return Model(
        lambda check: prepare(net, variables, inputs[0][:2], check=check),
        run,
        variables["params"],
        others,
        modes(word for word, _ in steps),
    )


def nnx_module(rng: Any, inputs: Sequence[np.ndarray]) -> Model:
    steps = [module_step(rng) for _ in range(rng.integers(1, STEPS + 1))]
    rngs = nnx.Rngs(0)
    initial = parameters(rng)

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.p = nnx.Dict({name: nnx.Param(jnp.asarray(array)) for name, array in initial.items()})
            self.tied = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.mean = nnx.Variable(jnp.zeros(WIDTH))
            self.training = False
            layers: list[Any] = []
            for word, _ in steps:
                if word in ("norm", "frozen_norm"):
                    layers.append(nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs))
                elif word == "dropout":
                    layers.append(nnx.Dropout(0.3, rngs=rngs))
                elif word == "layer_norm":
                    layers.append(nnx.LayerNorm(WIDTH, rngs=rngs))
                elif word == "attention":
                    layers.append(nnx.MultiHeadAttention(2, WIDTH, dropout_rate=0.2, decode=False, rngs=rngs))
                else:
                    layers.append(nnx.Linear(WIDTH, WIDTH, rngs=rngs))
            self.made = nnx.List(layers)

        def __call__(self, x: Any, train: bool = False) -> Any:
            p = {name: parameter[...] for name, parameter in self.p.items()}
            for (word, extra), layer in zip(steps, self.made, strict=True):
                if word in ("dense", "norm", "dropout", "layer_norm") or (word == "attention" and x.ndim == 3):
                    x = layer(x)
                elif word == "frozen_norm":
                    x = layer(x, use_running_average=True)
                elif word == "own":
                    x = extra(p, x)
                elif word == "tied":
                    x = extra(self.tied(extra(self.tied(x))))
                elif word == "branch":
                    x = x * 2 if train else x
                elif word == "noise" and train:
                    x = x + 0.1
                elif word == "statistic":
                    if train:
                        self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.reshape(-1, WIDTH).mean(0)
                    x = x - self.mean[...]
                else:
                    x = extra(x)
            return x @ p["w1"]

    net = Net()
    definition, trained, others = nnx.split(net, nnx.Param, ...)
    trained = nnx.to_pure_dict(trained)
    is_statistic = lambda path, value: isinstance(value, nnx.BatchStat) or path == ("mean",)  # noqa: E731

    def run(params: Any, statistics: Any, xs: Any, training: bool) -> Any:
        module = nnx.clone(net)
        nnx.update(module, nnx.State(nnx.state(module, nnx.Param)) if params is None else state_of(module, params))
        for path, value in statistics.items():
            holder = module
            for word in path[:-1]:
                holder = holder[word] if isinstance(word, int) else getattr(holder, word)
            getattr(holder, path[-1])[...] = value
        module.train() if training else module.eval()
        results = module(*xs, train=training)
        leaves = dict(nnx.to_flat_state(nnx.state(module)))
        return results, {path: variable[...] for path, variable in leaves.items() if is_statistic(path, variable)}

    def state_of(module: Any, params: Any) -> Any:
        state = nnx.state(module, nnx.Param)
        nnx.replace_by_pure_dict(state, params)
        return state

    flat = dict(nnx.to_flat_state(nnx.state(net)))
    statistics = {path: variable[...] for path, variable in flat.items() if is_statistic(path, variable)}
    of_words = modes(word for word, _ in steps)
    return Model(lambda check: prepare(net, inputs[0][:2], check=check), run, trained, statistics, of_words)


# --- comparison -------------------------------------------------------------------------------------------------------


def worst_error(model: Model, prepared: Prepared, inputs: Sequence[np.ndarray]) -> tuple[float, str]:
    """The largest error that rounding does not explain, and where it is."""
    worst, where = 0.0, ""
    for training, sizes in model.modes:
        for size in sizes:
            batch = [leaf[:size] for leaf in inputs]
            network = float_network(prepared, training, jax.random.key(0))

            def ours(p: Any, *xs: Any, network: Any = network) -> Any:
                return network(p, *xs)[0]

            def original(p: Any, *xs: Any, training: bool = training) -> Any:
                return model.run(p, model.statistics, xs, training)[0]

            def everything(function: Any, trained: Any, batch: Any) -> dict[str, Any]:
                results, of = function(trained, *batch), gradients(function, trained, *batch)
                return {"results": results, "gradients": of}

            def nudged(draw: int, training: bool, batch: Any) -> dict[str, Any]:
                """The original's, from numbers that are 2**-20 larger or smaller, to see what rounding does."""
                signs = np.random.default_rng(draw)

                def near(value: Any) -> Any:
                    factor = 1 + 2.0**-20 * signs.choice((-1, 1), np.shape(value))
                    return np.asarray(value) * factor.astype(np.float32)

                trained, there = jax.tree.map(near, model.trained), jax.tree.map(near, batch)
                results = everything(lambda p, *xs: model.run(p, model.statistics, xs, training)[0], trained, there)
                if training and model.statistics:
                    results["statistics"] = sorted_leaves(model.run(trained, model.statistics, there, True)[1])
                return results

            def in_float64(training: bool, batch: Any) -> dict[str, Any]:
                """The original's, with all of its real numbers in 64 bits: what its own rounding does, where numbers
                that are nudged round alike, such as the constant activations of a ReLU6."""

                def wider(tree: Any) -> Any:
                    return jax.tree.map(lambda array: jnp.asarray(array, "float64") if is_real(array) else array, tree)

                with jax.enable_x64(True):
                    trained, there, statistics = wider(model.trained), wider(batch), wider(model.statistics)
                    results = everything(lambda p, *xs: model.run(p, statistics, xs, training)[0], trained, there)
                    if training and model.statistics:
                        results["statistics"] = sorted_leaves(model.run(trained, statistics, there, True)[1])
                    return jax.tree.map(np.asarray, results)

            moves = training and bool(model.statistics)

            def both(p: Any, b: Any, moves: bool = moves, network: Any = network) -> Any:
                expected, results = everything(original, p, b), everything(ours, p, b)  # noqa: B023
                if moves:
                    expected["statistics"] = jax.tree.leaves(model.run(p, model.statistics, b, True)[1])
                    after = network(p, *b)[1].variables
                    results["statistics"] = [variable for variable in after.values() if is_real(variable)]
                return expected, results

            # Compiled at once: operator by operator takes twice as long.
            expected, results = jax.jit(both, compiler_options=QUICK)(model.trained, batch)
            moved: list[dict[str, Any]] = []
            if moves:
                expected["statistics"], results["statistics"] = (
                    sorted_leaves(side["statistics"]) for side in (expected, results)
                )
            for kind, there in expected.items():
                error = kind_error(there, results[kind])
                if error <= ROUNDING:
                    continue
                if not moved:
                    moved = [nudged(draw, training, batch) for draw in range(3)] + [in_float64(training, batch)]
                noise = max(kind_error(there, run[kind]) for run in moved)
                if error > 16 * noise and error > worst:
                    worst, where = error, f"{kind}, {size} examples, {'training' if training else 'evaluation'}"
    return worst, where


def is_real(array: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(array), jnp.floating))


def sorted_leaves(tree: Any) -> list[np.ndarray]:
    """Statistics without their names: both sides name them otherwise."""
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(tree) if is_real(leaf)]
    return sorted(arrays, key=lambda array: (array.shape, *np.round(array.ravel()[:2].astype(float), 3)))


def kind_error(expected: Any, own: Any) -> float:
    there, here = (
        [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree) if jnp.size(leaf)] for tree in (expected, own)
    )
    if [array.shape for array in there] != [array.shape for array in here]:
        return np.inf
    scale = max([np.abs(array).max() for array in there], default=0.0)
    errors = [np.abs(a - b).max() / max(np.abs(a).max(), 1e-4 * scale, 1e-12) for a, b in zip(there, here, strict=True)]
    return float(max(errors, default=0.0)) if np.isfinite(errors).all() else np.inf


def one(seed: int) -> tuple[str, str]:
    """(what became of the model of that seed, why)."""
    rng = np.random.default_rng(seed)
    asked.clear()
    inputs = inputs_of(rng)
    families = [plain, plain] if nn is None else [plain, plain, linen, nnx_module]
    family = families[rng.integers(len(families))]
    try:
        model = family(rng, inputs)
        model.run(model.trained, model.statistics, [array[:3] for array in inputs], False)
    except Exception as error:  # the model itself does not run
        return "no model", f"{type(error).__name__}: {error}"[:200]
    with warnings.catch_warnings(), mock.patch.object(jax.random, "bernoulli", kept):
        warnings.simplefilter("ignore")
        try:
            prepared = model.prepare(False)
        except qat.UnsupportedOperator as refusal:
            return "refused", reason(str(refusal))
        error, where = worst_error(model, prepared, inputs)
        if error <= ROUNDING:
            return "kept", family.__name__
        try:
            model.prepare(True)
        except qat.UnsupportedOperator as refusal:
            return "refused", f"by the self-check: {reason(str(refusal))}"
    what = "as decided" if asked.intersection(WITHOUT_QUESTION) else "differing"
    return what, f"{family.__name__}, {where}: {error:.2g}"


def reason(refusal: str) -> str:
    known = (
        "size of the batch",
        "computes otherwise",
        "mixes the examples",
        "by itself",
        "sort",
        "is not the model",
        "out of the batch",
        "turns the batch",
        "random numbers",
        "custom gradient",
    )
    for phrase in known:
        if phrase in refusal:
            return phrase
    lines = [line for line in refusal.splitlines() if re.match(r" *\d+\.", line)] or [refusal]
    return lines[0].rpartition(": ")[2][:90]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    reasons: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for seed in range(options.seed, options.seed + options.count):
        try:
            what, why = one(seed)
        except Exception:
            what, why = "died", traceback.format_exc(limit=-6)
        counts[what] += 1
        reasons[what][why] += 1
        if what in ("differing", "died", "as decided"):
            print(f"seed {seed}: {what}: {why}", flush=True)
        if seed % 100 == 99:
            # What XLA has compiled is kept for good otherwise.
            jax.clear_caches()
        if seed % 20 == 19:
            print(f"... {dict(counts)}", flush=True)
    for what in ("kept", "refused", "no model", "as decided", "differing", "died"):
        print(f"{what}: {counts[what]}")
        for why, count in reasons[what].most_common():
            print(f"    {count:5} {why}")
    return int(bool(counts["differing"] or counts["died"]))


if __name__ == "__main__":
    sys.exit(main())
