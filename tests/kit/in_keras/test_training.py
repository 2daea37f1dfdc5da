# SPDX-License-Identifier: Apache-2.0
"""What training a prepared Keras model changes, what is refused, and how the user's own layers are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras_networks import ds_cnn

from exactqat import deploy, qat

pytestmark = pytest.mark.slow


class Squared(layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), name="w")

    def call(self, x):
        return x * ops.square(self.w)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = layers.Dense(4), layers.BatchNormalization()

    def call(self, x, training=False):
        return ops.relu(self.norm(self.dense(x), training=training))


def numbers_of_ranges(prepared: Any) -> list[float]:
    return [float(variable.numpy()) for variable in prepared.range_parameters() if variable.value.ndim == 0]


def test_what_is_fused_and_trained() -> None:
    x = np.random.default_rng(0).standard_normal((8, 25, 10, 1)).astype("f")
    model = ds_cnn()
    nodes = [len(layer._inbound_nodes) for layer in model.layers]
    prepared = qat.keras.prepare(model, rules=[qat.Rule(ranges="learned")])
    assert [len(layer._inbound_nodes) for layer in model.layers] == nodes  # the user's graph is as it was
    steps = {step.path: step for step in prepared.plan.steps}
    assert steps["conv2d"].activation == "RELU" and steps["conv2d"].weights.batch_norm is not None
    assert any(step.expression is not None for step in prepared.plan.steps)  # dropout trains
    with pytest.raises(ValueError, match="call calibrate first"):
        prepared(x)
    broken = x.copy()
    broken[1, 2, 3] = np.nan
    with pytest.raises(ValueError, match="batch 2 of batches gives NaN or infinity in 'input'"):
        qat.keras.calibrate(prepared, [x, broken], restart=True)
    qat.keras.calibrate(prepared, [x])
    before = numbers_of_ranges(prepared)
    assert before and any(before)
    qat.keras.calibrate(prepared, [x * 100])
    other = numbers_of_ranges(prepared)
    with pytest.raises(ValueError, match="batches is empty"):
        qat.keras.calibrate(prepared, [], restart=True)
    assert other == numbers_of_ranges(prepared) != before
    qat.keras.calibrate(prepared, [x], restart=True)
    assert before == numbers_of_ranges(prepared)
    prepared.compile("adam", "mse")
    prepared.fit(x, np.zeros((8, 4), "f"), verbose=0)
    after = numbers_of_ranges(prepared)
    assert before != after  # ranges are trained
    mean = next(v for v in prepared.non_trainable_variables if "moving_mean" in v.name)
    assert np.abs(mean.numpy()).max() > 0  # statistics follow
    qat.keras.freeze(prepared)
    kept = mean.numpy().copy()
    prepared.fit(x, np.zeros((8, 4), "f"), verbose=0)
    assert np.array_equal(mean.numpy(), kept)
    assert numbers_of_ranges(prepared) == after
    prepared.save("model.keras")
    loaded = keras.saving.load_model("model.keras")
    assert loaded.frozen and np.array_equal(loaded.predict(x, verbose=0), prepared.predict(x, verbose=0))
    assert len(loaded.trainable_variables) == len(prepared.trainable_variables)
    with pytest.raises(ValueError, match="before freeze"):
        qat.keras.calibrate(prepared, [x])


def test_a_frozen_step_after_a_pad_of_minus_infinity() -> None:
    inputs = keras.Input((8, 8, 3))
    y = ops.pad(layers.Conv2D(4, 3)(inputs), [[0, 0], [1, 1], [1, 1], [0, 0]], "constant", constant_values=-np.inf)
    own = keras.Model(inputs, layers.Conv2D(2, 1)(layers.BatchNormalization()(layers.MaxPooling2D(3, 2)(y))))
    x = np.random.default_rng(0).random((4, 8, 8, 3), np.float32)
    prepared = qat.keras.prepare(own, example=x)
    qat.keras.calibrate(prepared, [x])
    qat.keras.freeze(prepared)
    evaluated = keras.models.clone_model(own)
    evaluated.set_weights(own.get_weights())
    evaluated.layers[-2].trainable = False  # as a frozen batch norm
    changes = []
    for model in (evaluated, prepared):
        model.compile(keras.optimizers.SGD(1e-2), "mse")
        kernel = model.trainable_variables[0]
        before = np.array(kernel.numpy())
        model.fit(x, np.zeros((4, 3, 3, 2), np.float32), batch_size=4, epochs=1, verbose=0)
        assert all(np.isfinite(variable.numpy()).all() for variable in model.trainable_variables)
        changes.append((kernel.numpy() - before).ravel())
    expected, change = changes
    assert expected @ change > 0.98 * np.linalg.norm(expected) * np.linalg.norm(change) > 0


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a keras.Model"):
        qat.keras.prepare(3)
    any_size = keras.Sequential([keras.Input((None, None, 3)), layers.Conv2D(4, 3)])
    with pytest.raises(ValueError, match="give example"):
        qat.keras.prepare(any_size)
    with pytest.raises(TypeError, match=r"example must be an array.*, got Rule; give rules by their name"):
        qat.keras.prepare(any_size, example=[qat.Rule()])
    assert qat.keras.prepare(any_size, example=np.zeros((1, 8, 8, 3), "f")).plan.inputs[0].shape == (1, 8, 8, 3)
    words = keras.Sequential([keras.Input((8, 4)), layers.Lambda(lambda x: ops.sort(x, axis=-1))])
    with pytest.raises(qat.UnsupportedOperator, match="Sort has no int8 operator"):
        qat.keras.prepare(words)


def test_layers_of_ones_own() -> None:
    squared = qat.keras.prepare(keras.Sequential([keras.Input((4, 4)), Squared()]))
    assert squared.proof is not None and len(squared.trainable_variables) == 1

    subclassed = qat.keras.prepare(Subclassed(), example=np.zeros((2, 6), "f"))
    assert [(step.kind, step.activation) for step in subclassed.plan.steps] == [("FULLY_CONNECTED", "RELU")]


@pytest.mark.parametrize(
    ("parts", "kinds"),
    [
        ([layers.Normalization(mean=[120, 110, 100], variance=[3e3, 3.1e3, 3.2e3]), layers.Conv2D(4, 3)], ["CONV_2D"]),
        ([layers.Rescaling(1 / 127.5, -1), layers.Conv2D(4, 3, 2, padding="same")], ["PADV2", "CONV_2D"]),
        ([layers.Rescaling(1 / 128, -127 / 128), layers.ZeroPadding2D(((0, 1), (0, 1))), layers.Conv2D(4, 3, 2)],
         ["PADV2", "CONV_2D"]),
    ],
)  # fmt: skip
def test_what_normalizes_images_is_part_of_the_first_layer(parts: Any, kinds: list[str], tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3)).astype("f")
    rules = [qat.Rule("input", ranges="fixed", fixed_range=(0.0, 255.0)), qat.Rule()]
    prepared = qat.keras.prepare(keras.Sequential([keras.Input((8, 8, 3)), *parts]), rules=rules)
    assert [step.kind for step in prepared.plan.steps] == kinds
    qat.keras.calibrate(prepared, [x])
    qat.keras.freeze(prepared)
    graph = deploy.lower(prepared)
    report = deploy.verify(graph, deploy.write_tflite(graph, tmp_path / "network.tflite"), data=x)
    assert report.values > 0 and report.differing == 0


@pytest.mark.parametrize(("word", "kinds"), [("hard_swish", ["HARD_SWISH", "DEPTHWISE_CONV_2D"]), ("mish", ["TABLE"])])
def test_activations_that_leave_keras_ops_before_they_compute(word: str, kinds: list[str]) -> None:
    for parts in ([layers.Dense(4), layers.Activation(word)], [layers.Dense(4, activation=word)]):
        steps = qat.keras.prepare(keras.Sequential([keras.Input((6,)), *parts])).plan.steps
        assert steps[0].kind == "FULLY_CONNECTED" and steps[1].kind in kinds, steps
