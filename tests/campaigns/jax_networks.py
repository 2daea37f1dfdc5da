# SPDX-License-Identifier: Apache-2.0
"""Networks in JAX the way people write them: plain functions, Flax Linen, Flax NNX. NETWORKS gives (prepared, batch).

python tests/campaigns/jax_networks.py [names]      takes all of them, or these, to the runtime and prints what differs
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from exactqat import deploy
from exactqat.deploy.axes import on_device
from exactqat.deploy.lower import lower_with_layouts
from exactqat.deploy.runtimes.trial import RuntimeRefusal
from exactqat.deploy.values import device_codes, in_users_order
from exactqat.kit.device import OPERATORS
from exactqat.qat.jax import Prepared, State, batch_norm, dropout, prepare
from exactqat.qat.train.core.arrays import Mode
from exactqat.qat.train.core.engine import Run

try:
    import flax.linen as nn
    from flax import nnx
except ImportError:
    nn = nnx = None

Batch = tuple[np.ndarray, ...]
NETWORKS: dict[str, Callable[[], tuple[Prepared, Batch]]] = {}
OFF_BY_ONE = 0.005
TIE = 0.01


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def plain(params: dict[str, Any], *shapes: tuple[int, ...]) -> Callable[[Any], Any]:
    """Registers a pure function."""

    def register(function: Any) -> Any:
        batch = tuple(numbers(4, *shape, seed=at) for at, shape in enumerate(shapes))
        NETWORKS[function.__name__] = lambda: (prepare(function, params, batch), batch)
        return function

    return register


def linen(*shapes: tuple[int, ...], **fields: Any) -> Callable[[Any], Any]:
    """Registers a module of Linen."""

    def register(module: Any) -> Any:
        def made() -> tuple[Prepared, Batch]:
            batch = tuple(numbers(4, *shape, seed=at) for at, shape in enumerate(shapes))
            flags = {"train": False, "deterministic": True}
            options = {key: flags[key] for key in flags if key in inspect.signature(module.__call__).parameters}
            variables = module(**fields).init(jax.random.key(0), *batch, **options)
            return prepare(module(**fields), variables, batch), batch

        NETWORKS[module.__name__] = made
        return module

    return register


def weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: numbers(*shape, seed=at, scale=0.4) for at, (name, shape) in enumerate(shapes.items())}


def norm(channels: int) -> dict[str, np.ndarray]:
    ones = np.ones(channels, np.float32)
    return {"scale": ones, "bias": 0 * ones, "mean": 0 * ones, "var": ones}


def conv(x: Any, kernel: Any, strides: int = 1, groups: int = 1) -> Any:
    order = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (strides, strides), "SAME", dimension_numbers=order, feature_group_count=groups
    )


def normalized(x: Any, p: Any) -> Any:
    return batch_norm(x, p["scale"], p["bias"], p["mean"], p["var"])


# --- plain functions --------------------------------------------------------------------------------------------------


@plain({"layers": [weights(w=(6, 16), b=(16,)), weights(w=(16, 16), b=(16,)), weights(w=(16, 3), b=(3,))]}, (6,))
def perceptron(p, x):
    for layer in p["layers"][:-1]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return jax.nn.softmax(x @ p["layers"][-1]["w"] + p["layers"][-1]["b"])


@plain(
    {
        **weights(stem=(10, 4, 1, 8), depthwise=(3, 3, 1, 8), pointwise=(1, 1, 8, 8), head=(8, 4), bias=(4,)),
        "norms": [norm(8) for _ in range(3)],
    },
    (25, 10, 1),
)
def ds_cnn(p, x):
    x = jax.nn.relu(normalized(conv(x, p["stem"], 2), p["norms"][0]))
    x = jax.nn.relu(normalized(conv(x, p["depthwise"], groups=8), p["norms"][1]))
    x = jax.nn.relu(normalized(conv(x, p["pointwise"]), p["norms"][2]))
    return dropout(x.mean((1, 2)), 0.1) @ p["head"] + p["bias"]


@plain(weights(a=(3, 3, 3, 8), expand=(1, 1, 8, 24), squeeze=(24, 8), excite=(8, 24), project=(1, 1, 24, 8)), (9, 9, 3))
def squeeze_and_excite(p, x):
    x = jax.nn.hard_swish(conv(x, p["a"], 2))
    y = jax.nn.hard_swish(conv(x, p["expand"]))
    gate = jax.nn.hard_sigmoid(jax.nn.relu(y.mean((1, 2)) @ p["squeeze"]) @ p["excite"])
    return x + conv(y * gate[:, None, None, :], p["project"])


@plain(weights(a=(3, 3, 2, 8), b=(3, 3, 8, 8), up=(2, 2, 8, 8), c=(3, 3, 16, 4)), (8, 8, 2))
def u_net(p, x):
    a = jax.nn.relu(conv(x, p["a"]))
    pooled = jax.lax.reduce_window(a, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    b = jax.nn.silu(conv(pooled, p["b"]))
    up = jax.lax.conv_transpose(b, p["up"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    wide = jax.image.resize(b, (b.shape[0], 8, 8, 8), "bilinear")
    return conv(jnp.concatenate([a, up + wide], -1), p["c"])


@plain({**weights(q=(8, 8), k=(8, 8), v=(8, 8), o=(8, 8), place=(6, 8)), "g": np.ones(8, np.float32)}, (6, 8))
def attention(p, x):
    x = x + p["place"]
    centered = x - x.mean(-1, keepdims=True)
    h = centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5) * p["g"]
    q, k, v = (jnp.einsum("btd,de->bte", h, p[name]).reshape(x.shape[0], 6, 2, 4) for name in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / 2.0
    scores = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), scores, -1e30)
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(x.shape[0], 6, 8)
    return (x + jax.checkpoint(lambda a: a @ p["o"])(mixed))[:, -1]


@plain(weights(w=(6, 8), u=(8, 8), head=(8, 3)), (5, 6))
def recurrent(p, x):
    def cell(h, at):
        h = jnp.tanh(at @ p["w"] + h @ p["u"])
        return h, h

    last, states = jax.lax.scan(cell, jnp.zeros((x.shape[0], 8)), jnp.swapaxes(x, 0, 1))
    return {"class": last @ p["head"], "states": jnp.swapaxes(states, 0, 1)}


@plain(weights(kernel=(8, 3, 3, 3), bias=(8,), head=(3, 512)), (3, 8, 8))
def by_example(p, x):
    """As Equinox does it: channels first, one example, vmapped."""

    def one(x):
        y = jax.lax.conv_general_dilated(x[None], p["kernel"], (1, 1), "SAME")[0] + p["bias"][:, None, None]
        return p["head"] @ jnp.ravel(jax.nn.leaky_relu(y, 0.2))

    return jax.vmap(one)(x)


@plain(weights(scale=(4,), slope=(4,)), (9, 9, 4), (4,))
def mixture(p, x, y):
    a = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME") / 9
    d = x[:, ::2, ::2] * p["scale"]
    d = jnp.where(d >= 0, d, d * p["slope"])
    e = jax.nn.elu(a) + jax.nn.softplus(d) - jnp.minimum(d, 0.5) * y[:, None, None, :]
    e = jnp.flip(jnp.pad(e, ((0, 0), (1, 1), (0, 2), (0, 0))), 1)
    first, second = jnp.split(jnp.take(e, np.array([3, 0, 2, 1]), axis=-1), 2, axis=-1)
    return jnp.max(jnp.clip(first * jax.nn.sigmoid(second), -1, 1), axis=(1, 2)) / jnp.sqrt(jnp.square(y[:, :2]) + 1)


# --- Flax -------------------------------------------------------------------------------------------------------------

if nn is not None:

    class Residual(nn.Module):
        features: int
        strides: int = 1

        @nn.compact
        def __call__(self, x, train):
            y = nn.Conv(self.features, (3, 3), self.strides, use_bias=False)(x)
            y = nn.relu(nn.BatchNorm(use_running_average=not train)(y))
            y = nn.Conv(self.features, (3, 3), use_bias=False)(y)
            y = nn.BatchNorm(use_running_average=not train)(y)
            if x.shape != y.shape:
                x = nn.Conv(self.features, (1, 1), self.strides, name="projection")(x)
            return nn.relu(x + y)

    @linen((12, 12, 3))
    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(8, (5, 5), 2, use_bias=False)(x)))
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
            x = Residual(8)(x, train)
            x = Residual(12, 2)(x, train)
            return nn.Dense(5)(nn.Dropout(0.2, deterministic=not train)(x.mean((1, 2))))

    @linen((16, 16, 3))
    class MobileNetV3(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            def block(x, features, window=(1, 1), groups=1):
                x = nn.Conv(features, window, feature_group_count=groups, use_bias=False)(x)
                return nn.BatchNorm(use_running_average=not train)(x)

            x = nn.hard_swish(block(x, 8, (3, 3)))
            y = nn.hard_swish(block(nn.hard_swish(block(x, 24)), 24, (5, 5), 24))
            gate = nn.relu(nn.Conv(8, (1, 1))(y.mean((1, 2), keepdims=True)))
            x = x + block(y * nn.hard_sigmoid(nn.Conv(24, (1, 1))(gate)), 8)
            return nn.log_softmax(nn.Dense(4)(nn.avg_pool(x, (16, 16)).reshape(x.shape[0], -1)))

    @linen((8, 8, 3))
    class VisionTransformer(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Conv(16, (4, 4), (4, 4), "VALID")(x).reshape(x.shape[0], -1, 16)
            token = self.param("token", nn.initializers.normal(1.0), (1, 1, 16))
            x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)), x], 1)
            x = x + self.param("places", nn.initializers.normal(1.0), (1, 5, 16))
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=not train)(y, y)
            x = x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)), approximate=False))
            return nn.Dense(4)(nn.RMSNorm()(x)[:, 0])

    @linen((8, 8, 4))
    class ConvNext(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm()(nn.Conv(4, (7, 7), feature_group_count=4)(x))
            y = nn.Dense(4)(nn.gelu(nn.Dense(16)(y)))
            x = x + y * self.param("gamma", nn.initializers.constant(0.1), (4,))
            return nn.Dense(3)((x + nn.swish(nn.GroupNorm(2)(x))).mean((1, 2)))

    @linen((5, 6))
    class Lstm(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(nn.RNN(nn.LSTMCell(6))(x)[:, -1])

    @linen((12, 4))
    class OneDimension(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.max_pool(nn.relu6(nn.Conv(8, (3,))(x)), (2,), (2,))
            x = nn.tanh(nn.Conv(8, (3,), 2, feature_group_count=8)(x))
            return nn.Dense(3)(nn.avg_pool(x, (2,), (1,)).mean(1))

    class Separable(nnx.Module):
        def __init__(self, channels: int, rngs: nnx.Rngs) -> None:
            window = {"kernel_size": (3, 3), "feature_group_count": channels, "use_bias": False}
            self.depthwise = nnx.Conv(channels, channels, **window, rngs=rngs)
            self.first = nnx.BatchNorm(channels, rngs=rngs)
            self.pointwise = nnx.Conv(channels, channels, (1, 1), rngs=rngs)
            self.second = nnx.BatchNorm(channels, rngs=rngs)

        def __call__(self, x):
            return nnx.relu6(self.second(self.pointwise(nnx.relu6(self.first(self.depthwise(x))))))

    class MobileNet(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.stem = nnx.Conv(1, 8, (3, 3), strides=2, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.blocks = nnx.List([Separable(8, rngs) for _ in range(2)])
            self.dropout = nnx.Dropout(0.2, rngs=rngs)
            self.head = nnx.Linear(8, 10, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.norm(self.stem(x)))
            for block in self.blocks:
                x = block(x)
            return self.head(self.dropout(x.mean((1, 2))))

    def mobile_net() -> tuple[Prepared, Batch]:
        x = numbers(4, 8, 8, 1)
        return prepare(MobileNet(nnx.Rngs(0)), x), (x,)

    NETWORKS["MobileNet"] = mobile_net


# --- to the device ----------------------------------------------------------------------------------------------------


def trained(prepared: Prepared, batch: Batch, steps: int = 2) -> tuple[Any, State]:
    """A few steps towards a number, the last of them frozen."""
    params, state = prepared.calibrate(*prepared.init(), [batch])
    key = jax.random.key(0)

    @jax.jit
    def step(params, state):
        def loss(params):
            y, after = prepared.apply(params, state, *batch, train=True, key=key)
            return sum(jnp.mean(jnp.square(leaf - 0.3)) for leaf in jax.tree.leaves(y)), after

        (value, after), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 1e-3 * jnp.clip(g, -1, 1), params, gradients), after, value

    for at in range(steps):
        params, state = prepared.freeze(params, state) if at == steps - 1 else (params, state)
        params, state, value = step(params, state)
        assert np.isfinite(value)
    return params, state


def assert_exact(prepared: Prepared, params: Any, state: State, batch: Batch, folder: Path) -> int:
    """Writes the network, runs it under every profile, compares every operator, and training with the integers."""
    network = prepared.trained(params, state)
    graph, layouts = lower_with_layouts(network)
    stored = network.stored_codes(*batch)
    codes = {}
    for source in prepared.plan.inputs:
        shift = int(graph.tensors[source.path].quantization.zero_point[0]) - network.numbers().grids[source.grid][1]
        codes[source.path] = on_device(stored[source.path] + shift, layouts[source.path]).astype(np.int8)
    path = deploy.write_tflite(graph, folder / "model.tflite")
    values = 0
    for profile in deploy.profiles_here():
        try:
            report = deploy.verify(graph, path, codes, profile)
        except RuntimeRefusal:
            assert profile == "micro"  # TFLite-Micro lacks GELU and others
            continue
        # LiteRT's own arithmetic is known for all operators on x86, for nearly all on ARM64.
        claimed = not deploy.unclaimed(graph, profile)
        assert claimed or profile in ("xnnpack-arm64", "micro")
        assert not claimed or report.differing == 0, (profile, [row for row in report.table() if row["differing"]])
        values += report.values
    trained_codes = device_codes(network, *batch, lowered=(graph, layouts))
    integers = deploy.simulate(graph, codes, tensors=list(trained_codes))
    for name, own in trained_codes.items():
        np.testing.assert_array_equal(own, integers[name], name)
    _assert_training_computed_it(prepared, params, state, graph, layouts, codes)
    return values


def _assert_training_computed_it(
    prepared: Prepared, params: Any, state: State, graph: deploy.Graph, layouts: Any, codes: dict[str, np.ndarray]
) -> None:
    """Every step of the trained network, fed with the device's own operands, gives the device's codes."""
    functional, numbers_ = prepared._functional, prepared.trained(params, state).numbers()
    run = Run(functional, prepared._arrays(params, state), Mode(frozen=True), None)
    paths = [path for path in functional.stored_paths() if path in layouts]
    integers = deploy.simulate(graph, codes, tensors=paths)
    real: dict[str, Any] = {}
    for number, step in enumerate((*prepared.plan.inputs, *prepared.plan.steps)):
        path = step.path
        is_input = path in graph.inputs
        computed = None if is_input else run.step(number, step, real)
        if path not in paths:
            real[path] = computed
            continue
        quantization = graph.tensors[path].quantization
        zero_point = int(quantization.zero_point[0])
        if not is_input:
            shift = zero_point - numbers_.grids[step.grid][1]
            own = on_device(functional.codes(path, np.asarray(computed), numbers_), layouts[path]) + shift
            difference = np.abs(own - integers[path])
            share = np.count_nonzero(difference) / difference.size
            what = f"{step.kind} {path}: {share:.2%} of {difference.size} differ, by up to {difference.max()}"
            assert difference.max() <= 1, what
            differ = difference > 0
            if differ.any() and not OPERATORS[step.kind].same_quantization:
                off = _before_rounding(run, number, step, real, layouts[path]) / quantization.scale[0] + zero_point
                differ &= np.abs(off - integers[path]) > 0.5 + TIE
            assert np.count_nonzero(differ) <= max(1, OFF_BY_ONE * differ.size), what
        steps = in_users_order(integers[path], layouts[path]).astype(np.float32)
        real[path] = jnp.asarray((steps - np.float32(zero_point)) * quantization.scale[0])


def _before_rounding(run: Run, number: int, step: Any, real: dict[str, Any], layout: Any) -> np.ndarray:
    """A step's result before it is quantized to its grid."""
    grid = run.grid(step.grid)
    kept, grid.quantize = grid.quantize, lambda x: x
    try:
        return on_device(np.asarray(run.step(number, step, real)), layout)
    finally:
        grid.quantize = kept


if __name__ == "__main__":
    for name in sys.argv[1:] or NETWORKS:
        made, given_batch = NETWORKS[name]()
        with tempfile.TemporaryDirectory() as folder:
            count = assert_exact(made, *trained(made, given_batch), given_batch, Path(folder))
        print(f"{name}: {count} integers of the runtimes compared, 0 differ", flush=True)
