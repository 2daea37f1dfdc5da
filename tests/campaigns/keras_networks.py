# SPDX-License-Identifier: Apache-2.0
"""Networks in Keras 3, from `fit` to the runtime, on the backend that KERAS_BACKEND names.

KERAS_BACKEND=jax python tests/campaigns/keras_networks.py [--learned] [names]      (seed 0; SEED=7 for another)
KERAS_BACKEND=jax python tests/campaigns/keras_networks.py --applications ResNet50 ...      (minutes each)
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from exactqat import deploy, qat
from exactqat.deploy.lower import lower_with_layouts
from exactqat.deploy.runtimes.trial import RuntimeRefusal
from exactqat.deploy.values import device_codes


@keras.saving.register_keras_serializable(package="tests")
class LayerScale(layers.Layer):
    def build(self, shape):
        self.gamma = self.add_weight(shape=(shape[-1],), name="gamma", initializer="ones")

    def call(self, x):
        return x * self.gamma


def ds_cnn() -> Any:
    return keras.Sequential(
        [
            keras.Input((25, 10, 1)),
            layers.Conv2D(8, (10, 4), 2, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.DepthwiseConv2D(3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.Conv2D(8, 1),
            layers.BatchNormalization(),
            layers.ReLU(6.0),
            layers.Dropout(0.2),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4, activation="softmax"),
        ]
    )


def functional() -> Any:
    images = keras.Input((12, 12, 3))
    x = a = layers.Conv2D(8, 3, padding="same", activation="swish")(layers.Rescaling(0.5, -0.1)(images))
    x = layers.SeparableConv2D(12, 3, padding="same")(layers.MaxPooling2D()(x))
    x = layers.LeakyReLU(negative_slope=0.2)(layers.BatchNormalization()(x))
    x = layers.Concatenate()([layers.Conv2DTranspose(8, 3, 2, padding="same")(x), a])
    x = layers.Conv2D(8, 3, 2, padding="same", groups=2)(x)
    gate = layers.Conv2D(8, 1, activation="hard_sigmoid")(layers.GlobalAveragePooling2D(keepdims=True)(x))
    x = layers.AveragePooling2D(3, 2, padding="same")(layers.Multiply()([x, gate]))
    x = layers.Cropping2D(1)(layers.ZeroPadding2D(1)(layers.UpSampling2D()(x)))
    x = layers.Flatten()(LayerScale()(ops.relu(x + 1) * 0.5))
    return keras.Model(images, {"class": layers.Dense(3)(x), "place": layers.Dense(2, activation="tanh")(x)})


def nested() -> Any:
    words = keras.Input((8, 6))
    x = layers.Dense(8)(words)
    y = layers.LayerNormalization()(x)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 4)(y, y)])
    inner = keras.Sequential([keras.Input((8, 8)), layers.Dense(16, activation="gelu"), layers.Dense(8)])
    return keras.Model(words, layers.Dense(3)((x + inner(x))[:, 0]))


def recurrent() -> Any:
    sound = keras.Input((5, 6))
    x = layers.UnitNormalization()(layers.TimeDistributed(layers.Dense(6))(sound))
    x = layers.Bidirectional(layers.GRU(4, return_sequences=True))(x)
    x = layers.PReLU()(layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True))
    x = layers.GRU(4, reset_after=False, return_sequences=True)(x)
    return keras.Model(sound, layers.LSTM(3)(x))


# The smallest images that these take.
SIDES = {"Xception": 71, "InceptionV3": 75, "InceptionResNetV2": 75}
NETWORKS: dict[str, Callable[[], Any]] = {"ds_cnn": ds_cnn, "functional": functional, "nested": nested}
NETWORKS["recurrent"] = recurrent


def to_the_device(model: Any, folder: Path, rules: tuple[qat.Rule, ...] = (qat.Rule(),)) -> int:
    """Prepared, fitted, frozen, fitted, saved and loaded, lowered, verified: how many integers were compared."""
    (source,) = model.inputs
    x = np.random.default_rng(0).standard_normal((8, *source.shape[1:])).astype(np.float32)
    prepared = qat.keras.prepare(model, rules=rules)
    qat.keras.calibrate(prepared, [x])
    wanted = model.predict(x, verbose=0)
    trained = prepared.predict(x, verbose=0)
    for ours, theirs in zip(keras.tree.flatten(trained), keras.tree.flatten(wanted), strict=True):
        assert np.abs(ours - theirs).max() <= 0.2 * np.abs(theirs).max() + 0.02
    targets = keras.tree.map_structure(lambda y: np.full_like(y, 0.1), wanted)
    prepared.compile(keras.optimizers.SGD(1e-3, clipnorm=1.0), "mse")
    losses = prepared.fit(x, targets, batch_size=4, epochs=1, verbose=0).history["loss"]
    qat.keras.freeze(prepared)
    losses += prepared.fit(x, targets, batch_size=4, epochs=1, verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    prepared.save(folder / "model.keras")
    loaded = keras.saving.load_model(folder / "model.keras")
    assert loaded.frozen
    for ours, theirs in zip(
        keras.tree.flatten(loaded.predict(x, verbose=0)),
        keras.tree.flatten(prepared.predict(x, verbose=0)),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)
    lowered = lower_with_layouts(loaded)
    graph = lowered[0]
    codes = device_codes(loaded, x, lowered=lowered)
    path = deploy.write_tflite(graph, folder / "model.tflite")
    values = 0
    for profile in deploy.profiles_here():
        try:
            report = deploy.verify(graph, path, {name: codes[name] for name in graph.inputs}, profile)
        except RuntimeRefusal:
            assert profile == "micro"  # TFLite-Micro lacks GELU and others
            continue
        # LiteRT's own arithmetic is known for all operators on x86, for nearly all on ARM64.
        claimed = not deploy.unclaimed(graph, profile)
        assert claimed or profile in ("xnnpack-arm64", "micro")
        assert not claimed or report.differing == 0, (profile, [row for row in report.table() if row["differing"]])
        values += report.values
    integers = deploy.simulate(graph, {name: codes[name] for name in graph.inputs}, tensors=list(codes))
    # The frozen network is the device, in all that it stores.
    for name, trained in codes.items():
        np.testing.assert_array_equal(trained, integers[name], name)
    return values


if __name__ == "__main__":
    rules_ = (qat.Rule(ranges="learned"),) if "--learned" in sys.argv else (qat.Rule(),)
    names = [word for word in sys.argv[1:] if word != "--learned"] or list(NETWORKS)
    if names[0] == "--applications":
        NETWORKS = {
            name: lambda name=name: getattr(keras.applications, name)(
                weights=None, input_shape=(*[SIDES.get(name, 64)] * 2, 3), classes=5
            )
            for name in names[1:]
        }
        names = names[1:]
    for name in names:
        keras.utils.set_random_seed(int(os.environ.get("SEED", "0")))
        with tempfile.TemporaryDirectory() as folder_:
            count = to_the_device(NETWORKS[name](), Path(folder_), rules_)
        print(f"{keras.backend.backend()} {name}: {count} integers compared, 0 differ", flush=True)
