# SPDX-License-Identifier: Apache-2.0
"""Masks in Keras: given, made by an embedding, taken on by attention, means and recurrent layers.

test_masks.py runs it. `prepare` compares each with the original; the file is compared with the runtimes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np
from keras import layers, ops
from keras_checks import run_checks

from exactqat import deploy, qat

WORDS, LENGTH, FEATURES = 20, 6, 8
rng = np.random.default_rng(0)
lengths = rng.integers(1, LENGTH + 1, 8)
words = (rng.integers(1, WORDS, (8, LENGTH)) * (np.arange(LENGTH) < lengths[:, None])).astype(np.int32)
shown = (words != 0).astype(np.int32)


def goes_to_the_device(model, given):
    prepared = qat.keras.prepare(model, [qat.Rule()], example=given)
    qat.keras.calibrate(prepared, [given])
    qat.keras.freeze(prepared)
    graph = deploy.lower(prepared)
    data = tuple(given) if isinstance(given, list) else given
    with tempfile.TemporaryDirectory() as folder:
        path = deploy.write_tflite(graph, Path(folder) / "network.tflite")
        for device in ("xnnpack", "reference", "micro"):
            if device in ("xnnpack", *deploy.profiles_here()):
                report = deploy.verify(graph, path, data=data, device=device)
                assert all(each.exact and not each.differing for each in report.operators), report
        assert deploy.verify(graph, path, data=data, model=prepared).equal
    return prepared


def attention(dtype, how):
    given = keras.Input((LENGTH,), dtype="int32", name="words")
    mask = keras.Input((LENGTH,), dtype=dtype, name="mask")
    x = layers.Embedding(WORDS, FEATURES)(given)
    layer = layers.MultiHeadAttention(2, 4, dropout=0.1 if how == "scores" else 0.0)
    x = layer(x, x, attention_mask=mask[:, None, :], use_causal_mask=how == "causal")
    x = layers.GlobalAveragePooling1D()(x * ops.cast(mask, "float32")[..., None])
    return keras.Model([given, mask], layers.Dense(3)(x)), [words, shown.astype(dtype)]


def check_attention_masks_of_integers():
    goes_to_the_device(*attention("int32", ""))


def check_attention_masks_of_truth_values_on_scores():
    goes_to_the_device(*attention("bool", "scores"))


def check_attention_masks_and_order():
    goes_to_the_device(*attention("bool", "causal"))


def of_words(*after):
    x = given = keras.Input((LENGTH,), dtype="int32", name="words")
    x = layers.Embedding(WORDS, FEATURES, mask_zero=True)(x)
    for layer in after:
        x = layer(x, x) if isinstance(layer, layers.MultiHeadAttention) else layer(x)
    return goes_to_the_device(keras.Model(given, layers.Dense(3)(x)), words)


def check_the_mask_of_an_embedding_in_a_mean():
    prepared = of_words(layers.Dense(FEATURES, "relu"), layers.GlobalAveragePooling1D())
    assert sum(step.kind == "EMBEDDING" for step in prepared.plan.steps) == 2


def check_the_mask_of_an_embedding_in_attention():
    of_words(layers.MultiHeadAttention(2, 4), layers.GlobalAveragePooling1D())


def check_the_mask_of_an_embedding_in_recurrent_layers():
    of_words(layers.LSTM(4))
    of_words(layers.GRU(4, return_sequences=True), layers.SimpleRNN(4))
    of_words(layers.Bidirectional(layers.LSTM(3, return_sequences=True, zero_output_for_mask=True)), layers.Flatten())


def check_a_model_of_the_users_own():
    class Reader(keras.Model):
        def __init__(self):
            super().__init__()
            self.words, self.scores = layers.Embedding(WORDS, FEATURES), layers.Dense(3)
            self.attention = layers.MultiHeadAttention(2, 4)

        def call(self, inputs):
            given, lengths = inputs
            # JAX' own arrays on the left refuse Keras' symbolic tensors.
            mask = ops.less(ops.arange(LENGTH)[None], lengths)
            x = self.words(given)
            x = self.attention(x, x, attention_mask=ops.logical_and(mask, given != 3)[:, None, :])
            return self.scores(ops.sum(ops.where(mask[..., None], x, 0.0), axis=1))

    given = [np.maximum(words, 4 * (words == 3)), lengths[:, None].astype(np.int32)]
    goes_to_the_device(Reader(), given)


def check_a_decoder_as_keras_hub_writes_it():
    """Attention whose `call` takes more than its class says and gives no cache, a mask made for every example, one
    table for words and scores."""

    class Cached(layers.MultiHeadAttention):
        def call(self, query, value, attention_mask=None, cache=None, training=None):
            query, key, value = self._query_dense(query), self._key_dense(value), self._value_dense(value)
            made, _ = self._compute_attention(query, key, value, attention_mask, training=training)
            return self._output_dense(made), cache

    class Decoder(layers.Layer):
        def __init__(self):
            super().__init__()
            self.attention = Cached(2, 4, dropout=0.1)

        def build(self, shape, *_):
            self.attention.build(shape, shape)

        def call(self, x, mask, training=None):
            count = ops.shape(x)[1]
            earlier = ops.expand_dims(ops.arange(count)[:, None] >= ops.arange(count), 0)
            earlier = ops.broadcast_to(earlier, (ops.shape(x)[0], count, count))
            mask = ops.minimum(ops.cast(mask[:, None], "int32"), ops.cast(earlier, "int32"))
            made, _ = self.attention(x, x, attention_mask=mask, cache=None, training=training)
            return ops.moveaxis(ops.moveaxis(x + made, 1, -1) * 0.5, 2, 1)

    given, mask = (keras.Input((LENGTH,), dtype="int32", name=name) for name in ("words", "mask"))
    table = layers.ReversibleEmbedding(WORDS, FEATURES, logit_soft_cap=2.0)
    scores = table(Decoder()(table(given), mask), reverse=True)
    prepared = goes_to_the_device(keras.Model([given, mask], scores), [words, shown])
    tables = [each for each in prepared.trainable_variables if each.shape == (WORDS, FEATURES)]
    assert len(tables) == 1, "one table for both"


if __name__ == "__main__":
    run_checks(globals())
