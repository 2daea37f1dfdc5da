# SPDX-License-Identifier: Apache-2.0
"""Networks of Equinox and Haiku for `packages_jax.networks`, as their examples write them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from packages_jax import KEY, Made, entry, images, words

# --- Equinox ----------------------------------------------------------------------------------------------------------


def equinox(build: Callable[[Any, Any], Any], *inputs: Any) -> Made:
    """build: of the library and a key: a model of one example."""
    eqx = importlib.import_module("equinox")
    model = build(eqx, KEY)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def apply(p: Any, *xs: Any) -> Any:
        return jax.vmap(eqx.combine(p, static))(*xs)

    return Made((apply, params), inputs, apply)


@entry("equinox MLP")
def eqx_mlp() -> Made:
    return equinox(lambda eqx, key: eqx.nn.MLP(8, 3, 16, 2, key=key), images(2, 8))


@entry("equinox CNN")
def eqx_cnn() -> Made:
    def build(eqx: Any, key: Any) -> Any:
        nn, keys = eqx.nn, jax.random.split(key, 4)
        return nn.Sequential([
            nn.Conv2d(1, 3, 4, key=keys[0]), nn.MaxPool2d(2), nn.Lambda(jax.nn.relu), nn.Lambda(jnp.ravel),
            nn.Linear(300, 32, key=keys[1]), nn.Lambda(jax.nn.sigmoid), nn.Linear(32, 10, key=keys[2]),
            nn.Lambda(jax.nn.log_softmax),
        ])  # fmt: skip

    return equinox(build, images(2, 1, 14, 14))


@entry("equinox GRU over a scan")
def eqx_rnn() -> Made:
    def build(eqx: Any, key: Any) -> Any:
        class RNN(eqx.Module):
            cell: Any
            linear: Any
            bias: Any

            def __init__(self, key: Any) -> None:
                one, two = jax.random.split(key)
                self.cell, self.linear = eqx.nn.GRUCell(4, 8, key=one), eqx.nn.Linear(8, 1, use_bias=False, key=two)
                self.bias = jnp.zeros(1)

            def __call__(self, x: Any) -> Any:
                out, _ = jax.lax.scan(lambda h, at: (self.cell(at, h), None), jnp.zeros(8), x)
                return jax.nn.sigmoid(self.linear(out) + self.bias)

        return RNN(key)

    return equinox(build, images(2, 7, 4))


@entry("equinox ViT")
def eqx_vit() -> Made:
    def build(eqx: Any, key: Any) -> Any:
        class Attention(eqx.Module):
            one: Any
            two: Any
            attention: Any
            mlp: list[Any]

            def __init__(self, key: Any) -> None:
                keys = jax.random.split(key, 3)
                self.one, self.two = eqx.nn.LayerNorm(16), eqx.nn.LayerNorm(16)
                self.attention = eqx.nn.MultiheadAttention(2, 16, key=keys[0])
                self.mlp = [eqx.nn.Linear(16, 32, key=keys[1]), eqx.nn.Linear(32, 16, key=keys[2])]

            def __call__(self, x: Any) -> Any:
                y = jax.vmap(self.one)(x)
                x = x + self.attention(y, y, y)
                y = jax.vmap(self.mlp[0])(jax.vmap(self.two)(x))
                return x + jax.vmap(self.mlp[1])(jax.nn.gelu(y))

        class ViT(eqx.Module):
            patches: Any
            cls: Any
            places: Any
            blocks: list[Any]
            head: Any

            def __init__(self, key: Any) -> None:
                keys = jax.random.split(key, 6)
                self.patches = eqx.nn.Linear(48, 16, key=keys[0])
                self.cls, self.places = jax.random.normal(keys[1], (1, 16)), jax.random.normal(keys[2], (17, 16))
                self.blocks = [Attention(keys[3]), Attention(keys[4])]
                self.head = eqx.nn.Linear(16, 5, key=keys[5])

            def __call__(self, x: Any) -> Any:
                c, h, w = x.shape
                x = x.reshape(c, h // 4, 4, w // 4, 4).transpose(1, 3, 0, 2, 4).reshape(-1, 16 * c)
                x = jnp.concatenate([self.cls, jax.vmap(self.patches)(x)]) + self.places
                for block in self.blocks:
                    x = block(x)
                return self.head(x[0])

        return ViT(key)

    return equinox(build, images(2, 3, 16, 16))


@entry("equinox MLP-Mixer")
def eqx_mixer() -> Made:
    def build(eqx: Any, key: Any) -> Any:
        class Mixer(eqx.Module):
            conv_in: Any
            conv_out: Any
            mixers: list[Any]
            norm: Any

            def __init__(self, key: Any) -> None:
                keys = jax.random.split(key, 4)
                self.conv_in = eqx.nn.Conv2d(2, 8, 4, stride=4, key=keys[0])
                self.conv_out = eqx.nn.ConvTranspose2d(8, 1, 4, stride=4, key=keys[1])
                self.mixers = [eqx.nn.MLP(16, 16, 24, 1, key=keys[2]), eqx.nn.MLP(8, 8, 24, 1, key=keys[3])]
                self.norm = eqx.nn.LayerNorm((8, 16))

            def __call__(self, x: Any) -> Any:
                y = self.conv_in(x)
                c, h, w = y.shape
                y = y.reshape(c, h * w)
                y = y + jax.vmap(self.mixers[0])(self.norm(y))
                y = y.T
                y = y + jax.vmap(self.mixers[1])(self.norm(y.T).T)
                return self.conv_out(y.T.reshape(c, h, w))

        return Mixer(key)

    return equinox(build, images(2, 2, 16, 16))


@entry("equinox BERT's encoder")
def eqx_bert() -> Made:
    def build(eqx: Any, key: Any) -> Any:
        class Encoder(eqx.Module):
            table: Any
            places: Any
            norm: Any
            attention: Any
            dense: Any
            pooler: Any

            def __init__(self, key: Any) -> None:
                keys = jax.random.split(key, 5)
                self.table, self.places = (eqx.nn.Embedding(n, 16, key=k) for n, k in ((50, keys[0]), (8, keys[1])))
                self.norm = eqx.nn.LayerNorm(16)
                self.attention = eqx.nn.MultiheadAttention(2, 16, use_query_bias=True, key=keys[2])
                self.dense, self.pooler = eqx.nn.MLP(16, 16, 32, 1, key=keys[3]), eqx.nn.Linear(16, 16, key=keys[4])

            def __call__(self, tokens: Any) -> Any:
                x = jax.vmap(self.table)(tokens) + jax.vmap(self.places)(jnp.arange(tokens.shape[-1]))
                x = jax.vmap(self.norm)(x)
                mask = jnp.ones((8, 8)) * (tokens != 0)[None]
                x = jax.vmap(self.norm)(x + self.attention(x, x, x, mask=mask == 1))
                x = jax.vmap(self.norm)(x + jax.vmap(self.dense)(x))
                return {"embeddings": x, "pooled": jnp.tanh(self.pooler(x[0]))}

        return Encoder(key)

    return equinox(build, words(2, 8))


@entry("equinox weight norm, GroupNorm, dropout in inference")
def eqx_norms() -> Made:
    def build(eqx: Any, key: Any) -> Any:
        nn, keys = eqx.nn, jax.random.split(key, 4)
        return nn.inference_mode(nn.Sequential([
            nn.WeightNorm(nn.Conv2d(3, 8, 3, padding=1, key=keys[0])), nn.GroupNorm(2, 8), nn.Lambda(jax.nn.leaky_relu),
            nn.Dropout(0.5), nn.AvgPool2d(2, 2), nn.Conv2d(8, 8, 3, groups=8, key=keys[1]), nn.AdaptiveAvgPool2d(1),
            nn.Lambda(jnp.ravel), nn.Linear(8, 4, key=keys[2]),
        ]))  # fmt: skip

    return equinox(build, images(2, 3, 12, 12))


# --- Haiku ------------------------------------------------------------------------------------------------------------


def haiku(function: Callable[[Any], Callable[..., Any]], *inputs: Any, stated: bool = False) -> Made:
    """function: of the library: a function to transform. stated: it keeps statistics and takes `is_training`, which
    is False here: Haiku's own batch norms are not trained, so they keep the statistics that they have."""
    hk = importlib.import_module("haiku")
    called = function(hk)
    if not stated:
        transformed = hk.without_apply_rng(hk.transform(called))
        params = transformed.init(jax.random.PRNGKey(0), *inputs)
        return Made((transformed.apply, params), inputs, transformed.apply)
    transformed = hk.without_apply_rng(hk.transform_with_state(called))
    params, state = transformed.init(jax.random.PRNGKey(0), *inputs, is_training=True)

    def apply(params: Any, *xs: Any) -> Any:
        return transformed.apply(params, state, *xs, is_training=False)[0]

    return Made((apply, params), inputs, apply)


@entry("haiku MLP")
def hk_mlp() -> Made:
    return haiku(lambda hk: lambda x: hk.nets.MLP([16, 16, 3])(x), images(2, 8))


@entry("haiku MobileNetV1, batch norm in evaluation")
def hk_mobilenet() -> Made:
    def function(hk: Any) -> Any:
        return lambda x, is_training: hk.nets.MobileNetV1((1, 2, 2), (8, 8, 8), 5)(x, is_training)

    return haiku(function, images(2, 32, 32, 3), stated=True)


@entry("haiku ResNet, batch norm in evaluation")
def hk_resnet() -> Made:
    def function(hk: Any) -> Any:
        return lambda x, is_training: hk.nets.ResNet([1, 1, 1, 1], 5, channels_per_group=(8, 8, 16, 16),
                                                     bottleneck=False)(x, is_training)  # fmt: skip

    return haiku(function, images(2, 32, 32, 3), stated=True)


@entry("haiku LSTM, unrolled")
def hk_lstm() -> Made:
    def function(hk: Any) -> Any:
        def run(x: Any) -> Any:
            core = hk.LSTM(8)
            out, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[0]), time_major=False)
            return hk.BatchApply(hk.Linear(3))(out)

        return run

    return haiku(function, images(2, 6, 4))


@entry("haiku transformer, tied words")
def hk_transformer() -> Made:
    def function(hk: Any) -> Any:
        def run(tokens: Any) -> Any:
            init = hk.initializers.VarianceScaling(0.5)
            table = hk.get_parameter("table", (50, 16), init=hk.initializers.TruncatedNormal(0.2))
            places = hk.get_parameter("places", (8, 16), init=hk.initializers.TruncatedNormal(0.2))
            x = table[tokens] + places
            mask = (tokens > 0)[:, None, None, :] * np.tril(np.ones((1, 1, 8, 8)))
            for _ in range(2):
                y = hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)
                x = x + hk.MultiHeadAttention(2, 8, w_init=init, model_size=16)(y, y, y, mask=mask)
                y = hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)
                x = x + hk.Linear(16, w_init=init)(jax.nn.gelu(hk.Linear(32, w_init=init)(y)))
            return x @ table.T

        return run

    return haiku(function, words(2, 8))


@entry("haiku CNN, LayerNorm over all axes, ConvTranspose")
def hk_cnn() -> Made:
    def function(hk: Any) -> Any:
        def run(x: Any) -> Any:
            x = jax.nn.silu(hk.LayerNorm(axis=[1, 2, 3], create_scale=True, create_offset=True)(hk.Conv2D(8, 3)(x)))
            x = hk.Sequential([hk.MaxPool(2, 2, "SAME"), hk.DepthwiseConv2D(1, 3), jax.nn.relu])(x)
            x = hk.GroupNorm(4)(hk.Conv2DTranspose(8, 3, 2)(x))
            return hk.Linear(3)(hk.Flatten()(hk.avg_pool(x, 4, 4, "VALID")))

        return run

    return haiku(function, images(2, 12, 12, 3))
