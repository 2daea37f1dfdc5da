# SPDX-License-Identifier: Apache-2.0
"""Networks of Flax, Linen and NNX, as its examples write them, with random weights; and what is done with each.

model = networks()["haiku MobileNetV1"]()
row = end_to_end(model, folder)

Each is compared with the user's own training step first: results and gradients of the user's function beside those of
the prepared one without quantization, for several numbers of examples.
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _tests_folder  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
from meaning_jax import QUICK, ROUNDING, error, float_network, weighted

PROFILES = ("xnnpack-x86", "reference")
FOUND: dict[str, Callable[[], Made]] = {}
KEY = jax.random.key(0)


@dataclass(frozen=True)
class Made:
    """
    Attributes:
        given: what `prepare` gets: the model and, for all but NNX, its parameters.
        inputs: a batch.
        own: the user's function of (trained parameters, *inputs) in training; None: evaluation is the same.
        evaluated: the same in evaluation.
        statistics: of (trained parameters, *inputs): what training leaves in the running statistics, by the names of
            `State.variables`; None: there are none.
    """

    given: tuple[Any, ...]
    inputs: tuple[Any, ...]
    evaluated: Callable[..., Any]
    own: Callable[..., Any] | None = None
    statistics: Callable[..., dict[str, Any]] | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape, np.float32)


def words(*shape: int, of: int = 50) -> np.ndarray:
    return np.random.default_rng(0).integers(1, of, shape).astype(np.int32)


def entry(name: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def enter(build: Callable[[], Made]) -> Callable[[], Made]:
        FOUND[name] = build
        return build

    return enter


# --- Flax -------------------------------------------------------------------------------------------------------------


def linen(module: Any, *inputs: Any, trains: dict[str, Any] | None = None, **example: Any) -> Made:
    """trains: the arguments that make it train; their opposites evaluate."""
    evaluates = {name: not value for name, value in (trains or {}).items()}
    variables = module.init({"params": KEY, "dropout": KEY}, *inputs, **evaluates)
    others = {name: collection for name, collection in variables.items() if name != "params"}

    def evaluated(params: Any, *xs: Any) -> Any:
        return module.apply({"params": params, **others}, *xs, **evaluates)

    def own(params: Any, *xs: Any) -> Any:
        return module.apply({"params": params, **others}, *xs, **(trains or {}), mutable=list(others))[0]

    def statistics(params: Any, *xs: Any) -> dict[str, Any]:
        after = module.apply({"params": params, **others}, *xs, **(trains or {}), mutable=list(others))[1]
        leaves = jax.tree_util.tree_flatten_with_path(after["batch_stats"])[0]
        return {".".join(str(word.key) for word in path): leaf for path, leaf in leaves}

    arguments = (module, variables)
    return Made(arguments, inputs, evaluated, own if trains else None, statistics if "batch_stats" in others else None)


@entry("flax MNIST's CNN")
def mnist() -> Made:
    nn = importlib.import_module("flax.linen")

    class CNN(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.avg_pool(nn.relu(nn.Conv(8, (3, 3))(x)), (2, 2), (2, 2))
            x = nn.avg_pool(nn.relu(nn.Conv(16, (3, 3))(x)), (2, 2), (2, 2))
            return nn.Dense(10)(nn.relu(nn.Dense(32)(x.reshape((x.shape[0], -1)))))

    return linen(CNN(), images(2, 12, 12, 1))


@entry("flax ImageNet's ResNet")
def resnet() -> Made:
    nn = importlib.import_module("flax.linen")
    partial = importlib.import_module("functools").partial

    class Block(nn.Module):
        filters: int
        conv: Any
        norm: Any
        strides: tuple[int, int] = (1, 1)

        @nn.compact
        def __call__(self, x):
            residual = x
            y = nn.relu(self.norm()(self.conv(self.filters, (1, 1))(x)))
            y = nn.relu(self.norm()(self.conv(self.filters, (3, 3), self.strides)(y)))
            y = self.norm(scale_init=nn.initializers.zeros_init())(self.conv(self.filters * 4, (1, 1))(y))
            if residual.shape != y.shape:
                residual = self.conv(self.filters * 4, (1, 1), self.strides, name="conv_proj")(residual)
                residual = self.norm(name="norm_proj")(residual)
            return nn.relu(residual + y)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool = True):
            conv = partial(nn.Conv, use_bias=False)
            norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5)
            x = nn.relu(norm(name="bn_init")(conv(8, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], name="conv_init")(x)))
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
            for i in range(2):
                x = Block(8 * 2**i, conv=conv, norm=norm, strides=(2, 2) if i else (1, 1))(x)
            return nn.Dense(10)(jnp.mean(x, axis=(1, 2)))

    return linen(ResNet(), images(2, 32, 32, 3), trains={"train": True})


@entry("flax SST-2's LSTM")
def sst2() -> Made:
    nn = importlib.import_module("flax.linen")

    class Classifier(nn.Module):
        @nn.compact
        def __call__(self, tokens, mask, deterministic: bool = True):
            x = nn.Dropout(0.0, broadcast_dims=(-2,))(nn.Embed(50, 16)(tokens), deterministic=deterministic)
            x = nn.Bidirectional(nn.RNN(nn.LSTMCell(8)), nn.RNN(nn.LSTMCell(8)))(x)
            scores = nn.Dense(1)(nn.tanh(nn.Dense(8)(x)))[..., 0]
            scores = jnp.where(mask, scores, -1e9)
            x = (nn.softmax(scores)[..., None] * x).sum(1)
            return nn.Dense(2)(nn.tanh(nn.Dense(8)(x)))

    mask = np.ones((2, 8), bool)
    mask[1, 5:] = False
    return linen(Classifier(), words(2, 8), mask)


@entry("flax WMT's encoder, shared embedding")
def wmt() -> Made:
    nn = importlib.import_module("flax.linen")

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, mask, deterministic):
            y = nn.LayerNorm()(x)
            y = nn.MultiHeadDotProductAttention(2, qkv_features=16, dropout_rate=0.0)(
                y, mask=mask, deterministic=deterministic
            )
            x = x + y
            y = nn.Dense(16)(nn.relu(nn.Dense(32)(nn.LayerNorm()(x))))
            return x + y

    class Language(nn.Module):
        @nn.compact
        def __call__(self, tokens, train: bool = False):
            table = nn.Embed(50, 16)
            mask = nn.combine_masks(nn.make_causal_mask(tokens), nn.make_attention_mask(tokens > 0, tokens > 0))
            x = table(tokens) + self.param("positions", nn.initializers.normal(0.1), (1, 8, 16))
            for _ in range(2):
                x = Layer()(x, mask, not train)
            return table.attend(nn.LayerNorm()(x))

    return linen(Language(), words(2, 8), trains={"train": True})


@entry("flax VAE's two halves, dictionaries")
def vae() -> Made:
    nn = importlib.import_module("flax.linen")

    class Halves(nn.Module):
        def setup(self):
            self.fc1, self.mean, self.logvar = nn.Dense(16), nn.Dense(4), nn.Dense(4)
            self.up = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(24), nn.sigmoid])

        def __call__(self, batch):
            x = nn.relu(self.fc1(batch["image"]))
            mean = self.mean(x)
            return {"mean": mean, "logvar": self.logvar(x), "image": self.up(mean)}

    return linen(Halves(), {"image": images(2, 24)})


@entry("flax PPO's actor and critic")
def ppo() -> Made:
    nn = importlib.import_module("flax.linen")

    class ActorCritic(nn.Module):
        num_outputs: int

        @nn.compact
        def __call__(self, x):
            x = x.astype(jnp.float32) / 255.0
            x = nn.relu(nn.Conv(8, (8, 8), (4, 4), name="conv1")(x))
            x = nn.relu(nn.Conv(16, (4, 4), (2, 2), name="conv2")(x))
            x = nn.relu(nn.Dense(32, name="hidden")(x.reshape((x.shape[0], -1))))
            return nn.log_softmax(nn.Dense(self.num_outputs, name="logits")(x)), nn.Dense(1, name="value")(x)

    return linen(ActorCritic(4), 255 * images(2, 20, 20, 4))


@entry("flax ViT, mixed types")
def vit() -> Made:
    nn = importlib.import_module("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, deterministic):
            y = nn.LayerNorm(dtype=jnp.float32)(x)
            x = x + nn.MultiHeadDotProductAttention(2, deterministic=deterministic, dropout_rate=0.0)(y, y)
            y = nn.Dense(32)(nn.LayerNorm()(x))
            return x + nn.Dense(16)(nn.gelu(y))

    class ViT(nn.Module):
        @nn.compact
        def __call__(self, x, *, train: bool):
            x = nn.Conv(16, (8, 8), (8, 8), padding="VALID", name="embedding")(x)
            n, h, w, c = x.shape
            x = x.reshape(n, h * w, c)
            token = self.param("cls", nn.initializers.normal(0.1), (1, 1, c))
            x = jnp.concatenate([jnp.tile(token, [n, 1, 1]), x], axis=1)
            x = x + self.param("pos_embedding", nn.initializers.normal(0.02), (1, x.shape[1], c))
            for _ in range(2):
                x = Block()(x, not train)
            return nn.Dense(5)(nn.LayerNorm(name="encoder_norm")(x)[:, 0])

    return linen(ViT(), images(2, 32, 32, 3), trains={"train": True})


@entry("flax U-Net, GroupNorm, weight standardization")
def unet() -> Made:
    nn = importlib.import_module("flax.linen")

    class Down(nn.Module):
        features: int

        @nn.compact
        def __call__(self, x):
            x = nn.WeightNorm(nn.Conv(self.features, (3, 3)))(x)
            return nn.swish(nn.GroupNorm(num_groups=4)(x))

    class UNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            a = Down(8)(x)
            b = Down(16)(nn.max_pool(a, (2, 2), (2, 2)))
            up = nn.ConvTranspose(8, (2, 2), (2, 2))(b)
            return nn.Conv(2, (1, 1))(Down(8)(jnp.concatenate([a, up], -1)))

    return linen(UNet(), images(2, 16, 16, 3))


def nnx(module: Any, *inputs: Any) -> Made:
    library = importlib.import_module("flax.nnx")
    definition, params, others = library.split(module, library.Param, ...)

    def called(training: bool) -> Callable[..., Any]:
        def run(trained: Any, *xs: Any) -> Any:
            here = library.State(trained) if not isinstance(trained, library.State) else trained
            state = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(here))
            # Statistics that this trace may move.
            model = library.merge(definition, state, jax.tree.map(jnp.asarray, others))
            model.train() if training else model.eval()
            return model(*xs)

        return run

    return Made((module,), inputs, called(False), called(True))


@entry("flax NNX CNN with batch norm and dropout")
def nnx_cnn() -> Made:
    from flax import nnx as library

    class CNN(library.Module):
        def __init__(self, rngs):
            self.conv1, self.conv2 = library.Conv(1, 8, (3, 3), rngs=rngs), library.Conv(8, 16, (3, 3), rngs=rngs)
            self.batch_norm1 = library.BatchNorm(8, rngs=rngs)
            self.dropout1 = library.Dropout(0.0, rngs=rngs)
            self.linear1, self.linear2 = library.Linear(144, 32, rngs=rngs), library.Linear(32, 10, rngs=rngs)

        def __call__(self, x):
            x = library.avg_pool(library.relu(self.batch_norm1(self.dropout1(self.conv1(x)))), (2, 2), (2, 2))
            x = library.avg_pool(library.relu(self.conv2(x)), (2, 2), (2, 2))
            return self.linear2(library.relu(self.linear1(x.reshape(x.shape[0], -1))))

    return nnx(CNN(library.Rngs(0)), images(2, 12, 12, 1))


@entry("flax NNX Gemma's block: RMSNorm, rotation, gated")
def gemma() -> Made:
    from flax import nnx as library

    class Block(library.Module):
        def __init__(self, rngs):
            self.q, self.kv = library.Linear(16, 16, rngs=rngs), library.Linear(16, 16, rngs=rngs)
            self.o = library.Einsum("bthd,hde->bte", (2, 8, 16), rngs=rngs)
            self.norm, self.post = library.RMSNorm(16, rngs=rngs), library.RMSNorm(16, rngs=rngs)
            self.gate, self.up, self.down = (
                library.Linear(*sizes, use_bias=False, rngs=rngs) for sizes in ((16, 32), (16, 32), (32, 16))
            )

        def turned(self, x):
            angles = jnp.arange(x.shape[1])[:, None] / 10000 ** (jnp.arange(4) / 4)
            sin, cos = jnp.sin(angles)[None, :, None], jnp.cos(angles)[None, :, None]
            first, second = jnp.split(x, 2, -1)
            return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

        def __call__(self, x):
            y = self.norm(x)
            b, t, _ = x.shape
            q = self.turned(self.q(y).reshape(b, t, 2, 8))
            k, v = jnp.split(self.kv(y), 2, -1)
            k = self.turned(k[:, :, None])[:, :, 0]
            scores = jnp.einsum("bthd,bsd->bhts", q * 8**-0.5, k)
            scores = jnp.tanh(scores / 50.0) * 50.0
            scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -2.3819763e38)
            x = x + self.o(jnp.einsum("bhts,bsd->bthd", jax.nn.softmax(scores), v))
            y = self.post(x)
            return x + self.down(jax.nn.gelu(self.gate(y)) * self.up(y))

    class Gemma(library.Module):
        def __init__(self, rngs):
            self.table = library.Embed(50, 16, rngs=rngs)
            self.blocks = library.List([Block(rngs) for _ in range(2)])
            self.final = library.RMSNorm(16, rngs=rngs)

        def __call__(self, tokens):
            x = self.table(tokens) * jnp.sqrt(16.0)
            for block in self.blocks:
                x = block(x)
            return jnp.tanh(self.table.attend(self.final(x)) / 30.0) * 30.0

    return nnx(Gemma(library.Rngs(0)), words(2, 8))


@entry("flax NNX attention, kwargs")
def nnx_attention() -> Made:
    from flax import nnx as library

    class Encoder(library.Module):
        def __init__(self, rngs):
            self.attention = library.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
            self.norm, self.head = library.LayerNorm(16, rngs=rngs), library.LoRALinear(16, 3, lora_rank=2, rngs=rngs)

        def __call__(self, x):
            return self.head(self.norm(x + self.attention(x)).mean(1))

    return nnx(Encoder(library.Rngs(0)), images(2, 6, 16))


# --- what is done with each -------------------------------------------------------------------------------------------


def beside_the_user(model: Made, prepared: Any) -> None:
    """
    Raises:
        AssertionError: what is prepared, without quantization, trains otherwise than the user's own function.
    """
    trained = prepared.init()[0]["model"]
    batch = [np.resize(leaf, (3, *leaf.shape[1:])) for leaf in jax.tree.leaves(model.inputs)]
    inputs = jax.tree.unflatten(jax.tree.structure(model.inputs), batch)
    users, mode = (model.evaluated, "evaluation") if model.own is None else (model.own, "training")

    network = float_network(prepared, model.own is not None)

    def ours(params: Any, *xs: Any) -> Any:
        return network(params, *xs)[0]

    def gradients(function: Callable[..., Any], dtype: Any = np.float32) -> Any:
        """Of the parameters and the inputs, and the results."""

        def in_dtype(leaf: Any) -> Any:
            return np.asarray(leaf, dtype) if np.asarray(leaf).dtype == np.float32 else leaf

        def run(params: Any, xs: Any) -> Any:
            reals = iter(xs)
            every = [next(reals) if leaf.dtype.kind == "f" else leaf for leaf in batch]
            results = function(params, *jax.tree.unflatten(jax.tree.structure(inputs), every))
            return weighted(results), results

        made_of = jax.jit(jax.grad(run, (0, 1), has_aux=True), compiler_options=QUICK)
        return made_of(*jax.tree.map(in_dtype, (trained, [leaf for leaf in batch if leaf.dtype.kind == "f"])))

    theirs, own = gradients(users), gradients(ours)
    worst = error(*_but_for_rounding(theirs, own))
    if worst >= ROUNDING:
        # Where the user's own float32 is no better, float64 says what is right.
        with jax.enable_x64(True):
            exact = gradients(users, np.float64)
        allowed = max(ROUNDING, error(*_but_for_rounding(exact, theirs)))
        worst = error(*_but_for_rounding(exact, own))
        assert worst < allowed, (
            f"in {mode} it differs by {worst:.2g} from the user's function in float64, that in float32 by {allowed:.2g}"
        )
    if model.statistics is not None:
        ours = float_network(prepared, True)(trained, *model.inputs)[1].variables
        theirs = model.statistics(trained, *model.inputs)
        assert ours.keys() == theirs.keys()
        worst = error({name: theirs[name] for name in ours}, dict(ours))
        assert worst < ROUNDING, f"running statistics differ by {worst:.2g} from the user's"


def _but_for_rounding(*both: Any) -> list[Any]:
    """Without the gradients that are 0 but for float32's rounding in both, as those of the bias of an attention's keys:
    in the last places of the largest one."""
    kept: list[list[Any]] = [[], []]
    smallest = 2.0**-20 * max(float(np.abs(leaf).max(initial=0)) for leaf in jax.tree.leaves(both[0]))
    for leaves in zip(*map(jax.tree.leaves, both), strict=True):
        if any(np.abs(leaf).max(initial=0) >= smallest for leaf in leaves):
            for side, leaf in zip(kept, leaves, strict=True):
                side.append(leaf)
    return kept


def end_to_end(model: Made, folder: Path, images: int = 2) -> dict[str, Any]:
    """As `run_zoo.end_to_end`. Refusals raise `UnsupportedOperator`."""
    from exactqat import deploy, qat
    from exactqat.deploy.lower import lower_with_layouts
    from exactqat.deploy.simulate import EXACT

    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = qat.jax.prepare(*model.given, model.inputs, **model.settings)
    row: dict[str, Any] = {"prepare_seconds": round(time.process_time() - began, 1), "values": 0, "differing": 0}
    beside_the_user(model, prepared)
    params, state = prepared.init()
    params, state = prepared.calibrate(params, state, [model.inputs])

    def step(params: Any, state: Any) -> tuple[Any, Any]:
        def loss(params: Any) -> Any:
            results, after = prepared.apply(params, state, *model.inputs, train=True, key=KEY)
            return sum(jnp.square(leaf).mean() for leaf in jax.tree.leaves(results)), after

        gradients, after = jax.grad(loss, has_aux=True)(params)
        size = jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(gradients)))
        return jax.tree.map(lambda p, g: p - 1e-4 * g / (1 + size), params, gradients), after

    for number in range(3):
        if number == 2:
            params, state = prepared.freeze(params, state)
        params, state = jax.jit(step, compiler_options=QUICK)(params, state)
    graph, _ = lower_with_layouts(prepared.trained(params, state))
    rng = np.random.default_rng(0)
    codes = {}
    for name in graph.inputs:
        tensor = graph.tensors[name]
        lowest, highest = graph.limits(name)
        drawn = rng.integers(lowest, highest + 1, (images * tensor.shape[0], *tensor.shape[1:]))
        codes[name] = drawn.astype(tensor.dtype)
    path = deploy.write_tflite(graph, folder / "model.tflite")
    for profile in PROFILES:
        for operator in deploy.verify(graph, path, codes, profile, batch_size=images).operators:
            row["values"] += operator.values
            row["differing"] += operator.differing if (operator.kind, profile) in EXACT else 0
    trained = deploy.verify(graph, path, model=prepared.trained(params, state), data=_alone(model.inputs))
    assert trained.equal, f"the frozen network is not the file: {trained}"
    return row


def _alone(inputs: Sequence[Any]) -> Any:
    """A dictionary alone would be arguments by their names."""
    return inputs[0] if len(inputs) == 1 and not isinstance(inputs[0], dict) else tuple(inputs)


def networks() -> dict[str, Callable[[], Made]]:
    """By package and name."""
    importlib.import_module("packages_jax_others")  # enters Equinox' and Haiku's
    return FOUND
