# SPDX-License-Identifier: Apache-2.0
"""What people do with a model of Keras; each once went wrong without a word, or in the middle of `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from exactqat import qat
from exactqat.deploy.lower import lower

pytestmark = pytest.mark.slow

rng = np.random.default_rng(0)
x = rng.standard_normal((16, 6)).astype("f")
images = rng.standard_normal((8, 8, 8, 3)).astype("f")


def prepared_by(model, data, *rules, **more):
    prepared = qat.keras.prepare(model, rules=rules or [qat.Rule()], **more)
    qat.keras.calibrate(prepared, [data])
    return prepared


def line():
    """A model of one number."""
    return prepared_by(keras.Sequential([keras.Input((1,)), layers.Dense(2)]), np.ones((4, 1), "f"))


def learned_head():
    return prepared_by(head(name="one"), x, qat.Rule(ranges="learned"))


def head(**more):
    return keras.Sequential([keras.Input((6,)), layers.Dense(4, **more)])


def predict(model, data=x):
    return model.predict(data, verbose=0)


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, position):
        return images[:4], np.zeros((4, 2))


class Convolve(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(3, 3, shape[-1], 4), name="kernel")

    def call(self, x):
        return ops.conv(x, self.kernel, strides=2, padding="same")


def test_regularizers_and_constraints() -> None:
    """Regularizers and constraints of weights train as they did; a warning says that losses of results are left out."""
    regular = prepared_by(head(kernel_regularizer="l2", kernel_constraint=keras.constraints.NonNeg()), x)
    assert len(regular.losses) == 1
    regular.compile("sgd", "mse")
    regular.fit(x, np.zeros((16, 4)), verbose=0)
    assert ops.convert_to_numpy(regular.trainable_variables[0]).min() >= 0
    with pytest.warns(UserWarning, match="left out: .*dense"):
        adding = head(activity_regularizer="l2")
        qat.keras.prepare(adding)
    assert adding.losses == []  # nothing symbolic stays in the user's layers


def test_mixed_precision() -> None:
    """Mixed precision is a policy of the float model; the device's arithmetic is emulated in float32."""
    keras.config.set_dtype_policy("mixed_float16")  # until the session is cleared
    half = prepared_by(keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(4)]), x)
    half.compile("adam", "mse")
    losses = half.fit(x, np.zeros((16, 4)), verbose=0).history["loss"]
    assert np.isfinite(losses).all() and predict(half).dtype == "float32"


def test_inputs() -> None:
    """Inputs by name, as Keras takes them; others are refused, and so are other sizes."""
    first, second = keras.Input((6,), name="b"), keras.Input((6,), name="a")
    network = layers.Concatenate()([layers.Dense(3)(first), layers.Dense(2)(second)])
    for inputs in ([first, second], {"b": first, "a": second}):
        two = keras.Model(inputs, network)
        named = {"b": x, "a": 5 * x}
        prepared = prepared_by(two, named)
        wanted = predict(two, named)
        assert np.abs(predict(prepared, {**named, "more": x}) - wanted).max() < 0.05 * np.abs(wanted).max()
        with pytest.raises(TypeError, match="called"):
            prepared({"b": x, "other": x})
    one = prepared_by(
        keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(2, 3), layers.GlobalMaxPooling2D()]), images
    )
    with pytest.raises(ValueError, match="must have shape .batch, 8, 8, 3., .*got .8, 8, 7, 3."):
        one(images[:, :, 1:])
    with pytest.raises(TypeError, match="got an array"):
        qat.keras.calibrate(one, images)
    assert predict(line(), np.ones(4, "f")).shape == (4, 2)  # Keras adds the last axis

    qat.keras.calibrate(one, Data())


def test_weights_move() -> None:
    """Weights move between prepared models, learned ranges too, whichever of them are trained."""
    learned = learned_head()
    learned.save_weights("learned.weights.h5")
    other = head(name="two")
    other.layers[0].trainable = False
    again = qat.keras.prepare(other, rules=[qat.Rule(ranges="learned")])
    again.load_weights("learned.weights.h5")
    assert np.array_equal(predict(again), predict(learned))
    fresh = qat.keras.prepare(head(), rules=[qat.Rule(ranges="learned")])
    fresh.set_weights(learned.get_weights())
    assert np.array_equal(predict(fresh), predict(learned))
    with pytest.raises(ValueError, match="the same network by the same rules"):
        qat.keras.prepare(head(activation="sigmoid")).load_weights("learned.weights.h5")

    # Trainable or not is kept; a frozen range is not trained again.
    learned.trainable = False
    assert learned.trainable_variables == []
    before = learned.get_weights()
    learned(100 * x, training=True)
    assert all(map(np.array_equal, before, learned.get_weights()))
    learned.save("still.keras")
    assert keras.saving.load_model("still.keras").trainable_variables == []
    qat.keras.freeze(again)
    again.trainable = True
    assert not [variable for variable in again.trainable_variables if "ranges" in variable.name]


def test_without_data_nothing_is_predicted() -> None:
    inputs = keras.Input((6,))
    fresh = qat.keras.prepare(keras.Model([inputs], layers.Dense(4)(inputs)))
    fresh.compile("sgd", "mse")
    for evaluate in (fresh, predict, lambda model: model.evaluate(x, x[:, :4], verbose=0)):
        with pytest.raises(RuntimeError, match="ranges have seen no data"):
            evaluate(x if evaluate is fresh else fresh)
    fresh.fit(x, x[:, :4], verbose=0)
    assert np.abs(predict(fresh)).max() > 0


def test_what_adapt_measures_is_kept_in_files() -> None:
    normal = layers.Normalization()
    normal.adapt(3 * x + 2)
    adapted = prepared_by(keras.Sequential([keras.Input((6,)), normal, layers.Dense(3)]), 3 * x + 2)
    adapted.save("adapted.keras")
    assert np.array_equal(predict(keras.saving.load_model("adapted.keras")), predict(adapted))


def test_random_layers() -> None:
    """Random layers do in training what Keras' do, with random numbers of their own, and nothing on the device."""
    some = [layers.RandomFlip(), layers.GaussianNoise(0.5), layers.Dropout(0.5, noise_shape=(None, 1, 1, 3))]
    random = prepared_by(
        keras.Sequential([keras.Input((8, 8, 3)), *some, layers.Conv2D(2, 3), layers.Flatten()]), images
    )
    assert np.array_equal(predict(random, images), predict(random, images))
    random.compile("sgd", "mse")
    random.fit(images, np.zeros((8, 72)), verbose=0)
    first, second = (ops.convert_to_numpy(random(images, training=True)) for _ in range(2))
    assert np.abs(first - second).max() > 0.1
    qat.keras.freeze(random)
    assert [operator.kind for operator in lower(random).operators] == ["CONV_2D", "RESHAPE"]


def test_images() -> None:
    """Images as they come; layers that prepare them; layers that convolve by keras.ops."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 3)).astype("uint8")
    start = [keras.Input((8, 8, 3), dtype="uint8"), layers.Rescaling(1 / 127.5, -1), layers.CenterCrop(6, 6)]

    plain = keras.Sequential([*start, layers.Resizing(12, 12), Convolve()])
    prepared = prepared_by(plain, pixels)
    assert [step.kind for step in prepared.plan.steps][-2:] == ["RESIZE_BILINEAR", "CONV_2D"]
    assert (
        np.abs(predict(prepared, pixels) - predict(plain, pixels)).max() < 0.05 * np.abs(predict(plain, pixels)).max()
    )


# Layers, the shape of their input, and what the refusal names and says to do.
REFUSED: dict[str, tuple[Callable[[], Any], tuple[int, ...], str]] = {
    "stacked cells": (
        lambda: layers.RNN(layers.StackedRNNCells([layers.LSTMCell(4)])),
        (8, 6),
        "RNN: only LSTM, GRU and SimpleRNN",
    ),
    "recurrent dropout": (
        lambda: layers.LSTM(4, recurrent_dropout=0.5),
        (8, 6),
        "LSTM: with recurrent_dropout=0.5; .*=0.0",
    ),
    "Masking": (lambda: layers.Masking(), (8, 6), "Masking: its mask depends on the input"),
    "SpectralNormalization": (
        lambda: layers.SpectralNormalization(layers.Dense(4)),
        (6,),
        "SpectralNormalization: .*give the layer inside",
    ),
    "layer norm of the first axis": (
        lambda: layers.LayerNormalization(axis=1),
        (8, 6),
        "LayerNorm: with axis=.1. of 3 axes",
    ),
    "softmax of two axes": (lambda: layers.Softmax(axis=[1, 2]), (8, 6), "Softmax: with axis=.1, 2.; .*one axis"),
    "ReLU of three numbers": (
        lambda: layers.ReLU(2.0, 0.1, 0.5),
        (6,),
        "ReLU: with negative_slope=0.1, max_value=2.0, threshold=0.5",
    ),
    "a maximum from a number on": (
        lambda: layers.Lambda(lambda x: ops.max(x, axis=-1, initial=0.5)),
        (8, 6),
        "Max: with initial=0.5",
    ),
    "Resizing that crops": (
        lambda: layers.Resizing(4, 4, crop_to_aspect_ratio=True),
        (8, 8, 3),
        "Resizing: with crop_to_aspect_ratio=True",
    ),
    "MelSpectrogram": (lambda: layers.MelSpectrogram(), (4000,), "MelSpectrogram: it prepares data"),
    "RandomCrop": (
        lambda: layers.RandomCrop(4, 4),
        (8, 8, 3),
        "RandomCrop: it prepares images; do it to the data",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_layers(name: str) -> None:
    layer, shape, words = REFUSED[name]
    with pytest.raises(qat.UnsupportedOperator, match=words):
        qat.keras.prepare(keras.Sequential([keras.Input(shape), layer()]))


def test_refused_models() -> None:
    adapted, quantized = head(), head()
    adapted.layers[0].enable_lora(2)
    quantized.quantize("int8")
    for model, words in ((adapted, "save the model and load it"), (quantized, "give the float model")):
        with pytest.raises(qat.UnsupportedOperator, match=words):
            qat.keras.prepare(model)
    with pytest.raises(TypeError, match="prepared already"):
        qat.keras.prepare(line())
    with pytest.raises(NotImplementedError, match="freeze"):
        line().quantize("int8")


def test_callbacks_and_summaries() -> None:
    """Callbacks, weights of examples, a summary, a clone."""
    model, learned = line(), learned_head()
    words = []
    model.summary(print_fn=words.append)
    assert any("FULLY_CONNECTED" in word for word in words) and "2 stored tensors" in words[0]
    assert "1 W8A8" in words[0] and "<td style='text-align:left'>FULLY_CONNECTED</td>" in model._repr_html_()
    with pytest.raises(RuntimeError, match="ranges have seen no data"):  # a clone has seen none
        predict(keras.models.clone_model(learned), x)
    learned.compile("adam", "mse", metrics=["mae"])
    calls = [
        keras.callbacks.EarlyStopping("val_loss", patience=0, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(patience=0),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        keras.callbacks.ModelCheckpoint("best.keras", monitor="val_loss", save_best_only=True),
    ]
    history = learned.fit(
        x, x[:, :4], validation_data=(x, x[:, :4]), sample_weight=np.ones(16), epochs=2, verbose=0, callbacks=calls
    )
    assert {"loss", "mae", "val_loss"} <= set(history.history)
    best = keras.saving.load_model("best.keras")
    assert best.evaluate(x, x[:, :4], verbose=0)[0] <= history.history["val_loss"][0]
    learned.train_on_batch(x, x[:, :4], sample_weight=np.ones(16))
