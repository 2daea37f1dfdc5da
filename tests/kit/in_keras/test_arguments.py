# SPDX-License-Identifier: Apache-2.0
"""Arguments of layers: what is prepared computes, in float and in training, what Keras does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from exactqat import qat
from exactqat.qat.train.core.arrays import Mode

pytestmark = pytest.mark.slow

WORDS, IMAGES = (8, 6), (8, 9, 4)
MASK = np.tril(np.ones((1, 8, 8), bool))
CASES: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "LSTM with states": (WORDS, lambda x: layers.LSTM(5, return_sequences=True, return_state=True)(x)),
    "LSTM backwards": (
        WORDS,
        lambda x: layers.LSTM(5, go_backwards=True, return_sequences=True, use_bias=False)(x),
    ),
    "LSTM of other functions": (
        WORDS,
        lambda x: layers.LSTM(4, "softsign", recurrent_activation="hard_sigmoid", return_state=True)(x),
    ),
    "RNN of a GRU's cell": (WORDS, lambda x: layers.RNN(layers.GRUCell(5))(x)),
    "both directions apart": (
        WORDS,
        lambda x: layers.Bidirectional(layers.GRU(5, return_state=True), merge_mode=None)(x),
    ),
    "both directions averaged": (
        WORDS,
        lambda x: layers.Bidirectional(layers.GRU(5, return_sequences=True), merge_mode="ave")(x),
    ),
    "another layer backwards": (
        WORDS,
        lambda x: layers.Bidirectional(layers.GRU(5), backward_layer=layers.LSTM(5, go_backwards=True))(x),
    ),
    "both directions of SimpleRNN": (
        WORDS,
        lambda x: layers.Bidirectional(layers.SimpleRNN(3, return_sequences=True))(x),
    ),
    "SimpleRNN": (WORDS, lambda x: layers.SimpleRNN(4)(x)),
    "SimpleRNN backwards": (
        WORDS,
        lambda x: layers.SimpleRNN(4, "relu", go_backwards=True, return_sequences=True, use_bias=False)(x),
    ),
    "GRU that resets first": (WORDS, lambda x: layers.GRU(4, reset_after=False, return_sequences=True)(x)),
    "GRU of another function": (WORDS, lambda x: layers.GRU(4, recurrent_activation="hard_sigmoid")(x)),
    "GRU backwards": (
        WORDS,
        lambda x: layers.GRU(4, "relu", reset_after=False, use_bias=False, go_backwards=True)(x),
    ),
    "Dense at every time": (WORDS, lambda x: layers.TimeDistributed(layers.Dense(3, "relu"))(x)),
    "batch norm at every time": ((3, *IMAGES), lambda x: layers.TimeDistributed(layers.BatchNormalization())(x)),
    "Conv2D at every time": ((3, *IMAGES), lambda x: layers.TimeDistributed(layers.Conv2D(3, 3))(x)),
    "causal attention": (WORDS, lambda x: layers.MultiHeadAttention(2, 3)(x, x, use_causal_mask=True)),
    "attention with a mask": (WORDS, lambda x: layers.MultiHeadAttention(2, 3)(x, x, attention_mask=MASK)),
    "normalized Dot": (WORDS, lambda x: layers.Dot(axes=2, normalize=True)([x, layers.Dense(6)(x)])),
    "PReLU": (IMAGES, lambda x: layers.PReLU()(x)),
    "layer norm of three axes": (IMAGES, lambda x: layers.LayerNormalization(axis=[1, 2, 3], epsilon=0.1)(x)),
    "RMS norm": (IMAGES, lambda x: layers.RMSNormalization(epsilon=0.1)(x)),
    "unit norm": (IMAGES, lambda x: layers.UnitNormalization(axis=1)(x)),
    "adaptive pool": (IMAGES, lambda x: layers.AdaptiveAveragePooling2D((3, 4))(x)),
    "Conv2DTranspose": (IMAGES, lambda x: layers.Conv2DTranspose(3, 4, 2, padding="valid", output_padding=1)(x)),
    "dilated DepthwiseConv2D": (
        IMAGES,
        lambda x: layers.DepthwiseConv2D((3, 2), dilation_rate=2, depth_multiplier=2, padding="same")(x),
    ),
    "shrinking": (IMAGES, lambda x: layers.Activation("hard_shrink")(layers.Dense(4, "soft_shrink")(x))),
    "GLU": (IMAGES, lambda x: layers.Dense(4, "glu")(layers.Dense(4, "tanh_shrink")(x))),
    "threshold": (IMAGES, lambda x: keras.activations.threshold(x, 0.3, 0.1)),
    "where": (IMAGES, lambda x: ops.where(x >= 0, x, 0.3 * x) + ops.log1p(ops.relu(x))),
    "arcsinh": (IMAGES, lambda x: ops.arcsinh(2 * x)),
    "depth to space": (IMAGES, lambda x: ops.depth_to_space(x, 2)),
    "space to depth": ((8, 6, 2), lambda x: ops.space_to_depth(x, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_no_argument_is_left_out(name: str) -> None:
    shape, function = CASES[name]
    rng = np.random.default_rng(0)
    inputs = keras.Input(shape)
    model = keras.Model(inputs, function(inputs))
    for variable in model.trainable_variables:
        variable.assign(rng.uniform(0.1, 0.6, variable.shape) * rng.choice([-1, 1], variable.shape))
    x = rng.standard_normal((4, *shape)).astype("f")
    prepared = qat.keras.prepare(model)
    for training in (False, True):
        results = prepared._run(x, Mode(training=training, quantizing=False))
        for result, expected in zip(
            keras.tree.flatten(results), keras.tree.flatten(model(x, training=training)), strict=True
        ):
            np.testing.assert_allclose(
                ops.convert_to_numpy(result), ops.convert_to_numpy(expected), rtol=1e-4, atol=1e-4
            )
