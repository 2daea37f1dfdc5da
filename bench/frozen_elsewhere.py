# SPDX-License-Identifier: Apache-2.0
"""What bench/frozen.py times in JAX and in Keras: frozen networks of the layers that `step.keras_layers` lists."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Layers = Sequence[Mapping[str, Any]]
Runs = dict[str, Callable[[], None]]


def parameters(layers: Layers, channels: int) -> dict[str, dict[str, np.ndarray]]:
    """Random ones, by layer. channels: of an image."""
    random, sizes = np.random.default_rng(0), {}
    weights: dict[str, dict[str, np.ndarray]] = {}
    for layer in layers:
        name, kind, settings = layer["name"], layer["kind"], layer["settings"]
        depth = sizes[layer["inputs"][0]] if layer["inputs"] else channels
        size = settings.get("filters", settings.get("units", depth * settings.get("depth_multiplier", 1)))
        sizes[name] = size
        if kind == "BatchNormalization":
            ones = np.ones(size, np.float32)
            weights[name] = {"scale": ones, "bias": 0 * ones, "mean": 0 * ones, "variance": ones}
            continue
        shapes = {"Conv2D": (*settings.get("kernel_size", ()), depth, size), "Dense": (depth, size)}
        shapes["DepthwiseConv2D"] = (*settings.get("kernel_size", ()), 1, size)
        if kind in shapes:
            deviation = np.sqrt(2 / np.prod(shapes[kind][:-1]))
            weights[name] = {"kernel": (random.standard_normal(shapes[kind]) * deviation).astype(np.float32)}
            if settings.get("use_bias", True):
                weights[name]["bias"] = np.zeros(size, np.float32)
    return weights


def applied(layers: Layers) -> Callable[[Any, Any], Any]:
    """The network as a function of parameters and images."""
    import jax

    from exactqat.qat.jax import batch_norm

    def layer(node: Mapping[str, Any], p: Mapping[str, Any], x: Any, *others: Any) -> Any:
        kind, settings = node["kind"], node["settings"]
        if kind == "BatchNormalization":
            vectors = (p[name] for name in ("scale", "bias", "mean", "variance"))
            return batch_norm(x, *vectors, epsilon=settings["epsilon"], momentum=settings["momentum"])
        if kind in ("Conv2D", "DepthwiseConv2D"):
            groups = x.shape[3] if kind == "DepthwiseConv2D" else 1
            order = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(
                x, p["kernel"], settings["strides"], "SAME", dimension_numbers=order, feature_group_count=groups
            )
        elif kind == "Dense":
            x = x @ p["kernel"]
        elif kind == "ReLU":
            return jax.nn.relu6(x) if settings["max_value"] else jax.nn.relu(x)
        elif kind == "GlobalAveragePooling2D":
            return x.mean((1, 2))
        elif kind == "Add":
            return x + others[0]
        return x + p["bias"] if "bias" in p else x

    def network(p: Mapping[str, Any], x: Any) -> Any:
        tensors: dict[str, Any] = {}
        for node in layers:
            operands = [tensors[name] for name in node["inputs"]]
            tensors[node["name"]] = x if node["kind"] == "Input" else layer(node, p.get(node["name"], {}), *operands)
        return tensors[layers[-1]["name"]]

    return network


def in_jax(layers: Layers, images: np.ndarray, labels: np.ndarray, profile: str | None) -> Runs:
    """profile: None for fake quantization."""
    import jax

    from exactqat.qat.jax import prepare

    x, y = jax.device_put(images), jax.device_put(labels)
    prepared = prepare(applied(layers), parameters(layers, images.shape[3]), images, device=profile, check=False)
    params, state = prepared.freeze(*prepared.calibrate(*prepared.init(), [images]))

    @jax.jit
    def trained(params: Any) -> Any:
        def loss(params: Any) -> Any:
            scores = prepared.apply(params, state, x, train=True, key=jax.random.key(0))[0]
            return -jax.nn.log_softmax(scores)[np.arange(len(labels)), y].mean()

        return jax.tree.map(lambda p, g: p - 1e-6 * g, params, jax.grad(loss)(params))

    evaluated, held = jax.jit(lambda params, x: prepared.apply(params, state, x)[0]), [params]

    def step() -> None:
        held[0] = jax.block_until_ready(trained(held[0]))

    def evaluation() -> None:
        jax.block_until_ready(evaluated(held[0], x))

    return {"step": step, "evaluation": evaluation}


def in_keras(layers: Layers, images: np.ndarray, labels: np.ndarray, profile: str | None) -> Runs:
    """profile: None for fake quantization."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras
    from tfmot_step import keras_network

    from exactqat import qat

    model = qat.keras.prepare(keras_network(keras, list(layers)), device=profile, check=False)
    qat.keras.calibrate(model, [images])
    qat.keras.freeze(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(1e-6), loss=loss)

    def step() -> None:
        model.train_on_batch(images, labels)

    def evaluation() -> None:
        model.predict_on_batch(images)

    return {"step": step, "evaluation": evaluation}


KITS: dict[str, Callable[[Layers, np.ndarray, np.ndarray, str | None], Runs]] = {"jax": in_jax, "keras": in_keras}
