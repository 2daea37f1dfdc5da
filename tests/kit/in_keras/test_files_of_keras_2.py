# SPDX-License-Identifier: Apache-2.0
"""Files as Keras 2 wrote them, and what adjusts a prepared model without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from exactqat import qat

h5py = pytest.importorskip("h5py")

images = np.random.default_rng(0).standard_normal((32, 8, 8, 3)).astype("f")


def network() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.DepthwiseConv2D(3, name="depthwise"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2DTranspose(4, 3, name="transposed"),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )


def as_keras_2_writes(model: keras.Model, path: Path, **said: Any) -> None:
    """With `groups`, which Keras 2 said of these layers."""
    model.save(path)
    with h5py.File(path, "r+") as file:
        config = json.loads(file.attrs["model_config"])
        for layer in config["config"]["layers"]:
            if layer["class_name"] in ("DepthwiseConv2D", "Conv2DTranspose"):
                layer["config"] |= {"groups": 1, **said}
        file.attrs["model_config"] = json.dumps(config)


def test_a_file_of_keras_2_is_the_same_model() -> None:
    model = network()
    as_keras_2_writes(model, Path("old.h5"))
    loaded = qat.keras.load_h5("old.h5")
    assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in model.layers]
    assert np.array_equal(loaded.predict(images, verbose=0), model.predict(images, verbose=0))
    qat.keras.prepare(loaded, check=False)


def test_what_means_something_is_not_left_out() -> None:
    as_keras_2_writes(network(), Path("other.h5"), groups=3)
    with pytest.raises((TypeError, ValueError), match="groups"):
        qat.keras.load_h5("other.h5")
    with pytest.raises(OSError, match="nowhere"):
        qat.keras.load_h5("nowhere.h5")


def test_batch_norms_are_reestimated_in_keras() -> None:
    prepared = qat.keras.prepare(network(), rules=[qat.Rule(weight_bits=3)], check=False)
    qat.keras.calibrate(prepared, [images])
    before = [np.asarray(value) for value in prepared.get_weights()]
    assert qat.reestimate(prepared, images) is prepared
    after = prepared.get_weights()
    assert any(not np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    for adjust in (qat.round_weights, qat.correct_biases):
        adjust(prepared, images)
    qat.keras.freeze(prepared)
    prepared(images)
