# SPDX-License-Identifier: Apache-2.0
"""Arguments of layers: what is prepared computes, in float and in training, what Keras does.

test_keras_kit.py runs it.
"""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops
from keras_checks import run_checks

from exactqat import qat
from exactqat.qat.train.core.arrays import Mode

rng = np.random.default_rng(0)
words, images = (8, 6), (8, 9, 4)
mask = np.tril(np.ones((1, 8, 8), bool))
CASES = (
    (words, lambda x: layers.LSTM(5, return_sequences=True, return_state=True)(x)),
    (words, lambda x: layers.LSTM(5, go_backwards=True, return_sequences=True, use_bias=False)(x)),
    (words, lambda x: layers.RNN(layers.GRUCell(5))(x)),
    (words, lambda x: layers.Bidirectional(layers.GRU(5, return_state=True), merge_mode=None)(x)),
    (words, lambda x: layers.Bidirectional(layers.GRU(5, return_sequences=True), merge_mode="ave")(x)),
    (words, lambda x: layers.Bidirectional(layers.GRU(5), backward_layer=layers.LSTM(5, go_backwards=True))(x)),
    (words, lambda x: layers.SimpleRNN(4)(x)),
    (words, lambda x: layers.SimpleRNN(4, "relu", go_backwards=True, return_sequences=True, use_bias=False)(x)),
    (words, lambda x: layers.Bidirectional(layers.SimpleRNN(3, return_sequences=True))(x)),
    (words, lambda x: layers.GRU(4, reset_after=False, return_sequences=True)(x)),
    (words, lambda x: layers.GRU(4, recurrent_activation="hard_sigmoid")(x)),
    (words, lambda x: layers.GRU(4, "relu", reset_after=False, use_bias=False, go_backwards=True)(x)),
    (words, lambda x: layers.LSTM(4, "softsign", recurrent_activation="hard_sigmoid", return_state=True)(x)),
    (words, lambda x: layers.TimeDistributed(layers.Dense(3, "relu"))(x)),
    ((3, *images), lambda x: layers.TimeDistributed(layers.BatchNormalization())(x)),
    ((3, *images), lambda x: layers.TimeDistributed(layers.Conv2D(3, 3))(x)),
    (words, lambda x: layers.MultiHeadAttention(2, 3)(x, x, use_causal_mask=True)),
    (words, lambda x: layers.MultiHeadAttention(2, 3)(x, x, attention_mask=mask)),
    (words, lambda x: layers.Dot(axes=2, normalize=True)([x, layers.Dense(6)(x)])),
    (images, lambda x: layers.PReLU()(x)),
    (images, lambda x: layers.LayerNormalization(axis=[1, 2, 3], epsilon=0.1)(x)),
    (images, lambda x: layers.RMSNormalization(epsilon=0.1)(x)),
    (images, lambda x: layers.UnitNormalization(axis=1)(x)),
    (images, lambda x: layers.AdaptiveAveragePooling2D((3, 4))(x)),
    (images, lambda x: layers.Conv2DTranspose(3, 4, 2, padding="valid", output_padding=1)(x)),
    (images, lambda x: layers.DepthwiseConv2D((3, 2), dilation_rate=2, depth_multiplier=2, padding="same")(x)),
    (images, lambda x: layers.Activation("hard_shrink")(layers.Dense(4, "soft_shrink")(x))),
    (images, lambda x: layers.Dense(4, "glu")(layers.Dense(4, "tanh_shrink")(x))),
    (images, lambda x: keras.activations.threshold(x, 0.3, 0.1)),
    (images, lambda x: ops.where(x >= 0, x, 0.3 * x) + ops.log1p(ops.relu(x))),
    (images, lambda x: ops.arcsinh(2 * x)),
    (images, lambda x: ops.depth_to_space(x, 2)),
    ((8, 6, 2), lambda x: ops.space_to_depth(x, 2)),
)


def check_no_argument_is_left_out() -> None:
    for shape, function in CASES:
        inputs = keras.Input(shape)
        model = keras.Model(inputs, function(inputs))
        for variable in model.trainable_variables:
            variable.assign(rng.uniform(0.1, 0.6, variable.shape) * rng.choice([-1, 1], variable.shape))
        x = rng.standard_normal((4, *shape)).astype("f")
        prepared = qat.keras.prepare(model)
        for training in (False, True):
            made = prepared._run(x, Mode(training=training, quantizing=False))
            for ours, theirs in zip(
                keras.tree.flatten(made), keras.tree.flatten(model(x, training=training)), strict=True
            ):
                own, wanted = map(ops.convert_to_numpy, (ours, theirs))
                np.testing.assert_allclose(own, wanted, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    run_checks(globals())
