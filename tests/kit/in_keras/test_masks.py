# SPDX-License-Identifier: Apache-2.0
"""Masks in Keras: given, made by an embedding, taken on by attention, means and recurrent layers.

`prepare` compares each with the original; the file is compared with the runtimes. On JAX they take two minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from exactqat import deploy, qat

pytestmark = pytest.mark.slow
pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

WORDS, LENGTH, FEATURES = 20, 6, 8
RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, LENGTH + 1, 8)
SENTENCES = (RNG.integers(1, WORDS, (8, LENGTH)) * (np.arange(LENGTH) < LENGTHS[:, None])).astype(np.int32)
MASK = (SENTENCES != 0).astype(np.int32)


def through_the_device(model: Any, inputs: np.ndarray | Sequence[np.ndarray]) -> Any:
    """The model, prepared, frozen and compared with every runtime."""
    prepared = qat.keras.prepare(model, rules=[qat.Rule()], example=inputs)
    qat.keras.calibrate(prepared, [inputs])
    qat.keras.freeze(prepared)
    graph = deploy.lower(prepared)
    data = tuple(inputs) if isinstance(inputs, list) else inputs
    path = deploy.write_tflite(graph, "network.tflite")
    for device in ("xnnpack", "reference", "micro"):
        if device in ("xnnpack", *deploy.profiles_here()):
            report = deploy.verify(graph, path, data=data, device=device)
            assert all(operator.exact and not operator.differing for operator in report.operators), report
    assert deploy.verify(graph, path, data=data, model=prepared).equal
    return prepared


@pytest.mark.parametrize(("dtype", "how"), [("int32", ""), ("bool", "scores"), ("bool", "causal")])
def test_attention_masks(dtype: str, how: str) -> None:
    """Of integers; of truth values with dropout of scores; and the order of words."""
    words = keras.Input((LENGTH,), dtype="int32", name="words")
    mask = keras.Input((LENGTH,), dtype=dtype, name="mask")
    x = layers.Embedding(WORDS, FEATURES)(words)
    layer = layers.MultiHeadAttention(2, 4, dropout=0.1 if how == "scores" else 0.0)
    x = layer(x, x, attention_mask=mask[:, None, :], use_causal_mask=how == "causal")
    x = layers.GlobalAveragePooling1D()(x * ops.cast(mask, "float32")[..., None])
    through_the_device(keras.Model([words, mask], layers.Dense(3)(x)), [SENTENCES, MASK.astype(dtype)])


def after_an_embedding(*rest: Any) -> Any:
    x = words = keras.Input((LENGTH,), dtype="int32", name="words")
    x = layers.Embedding(WORDS, FEATURES, mask_zero=True)(x)
    for layer in rest:
        x = layer(x, x) if isinstance(layer, layers.MultiHeadAttention) else layer(x)
    return through_the_device(keras.Model(words, layers.Dense(3)(x)), SENTENCES)


def test_the_mask_of_an_embedding_in_a_mean() -> None:
    prepared = after_an_embedding(layers.Dense(FEATURES, "relu"), layers.GlobalAveragePooling1D())
    assert sum(step.kind == "EMBEDDING" for step in prepared.plan.steps) == 2


def test_the_mask_of_an_embedding_in_attention() -> None:
    after_an_embedding(layers.MultiHeadAttention(2, 4), layers.GlobalAveragePooling1D())


@pytest.mark.parametrize("kind", ["LSTM", "GRU and SimpleRNN", "both directions"])
def test_the_mask_of_an_embedding_in_recurrent_layers(kind: str) -> None:
    if kind == "LSTM":
        after_an_embedding(layers.LSTM(4))
    elif kind == "GRU and SimpleRNN":
        after_an_embedding(layers.GRU(4, return_sequences=True), layers.SimpleRNN(4))
    else:
        both = layers.Bidirectional(layers.LSTM(3, return_sequences=True, zero_output_for_mask=True))
        after_an_embedding(both, layers.Flatten())


def test_a_model_of_the_users_own() -> None:
    class Reader(keras.Model):
        def __init__(self):
            super().__init__()
            self.words, self.scores = layers.Embedding(WORDS, FEATURES), layers.Dense(3)
            self.attention = layers.MultiHeadAttention(2, 4)

        def call(self, inputs):
            words, lengths = inputs
            # JAX' own arrays on the left refuse Keras' symbolic tensors.
            mask = ops.less(ops.arange(LENGTH)[None], lengths)
            x = self.words(words)
            x = self.attention(x, x, attention_mask=ops.logical_and(mask, words != 3)[:, None, :])
            return self.scores(ops.sum(ops.where(mask[..., None], x, 0.0), axis=1))

    sentences = np.maximum(SENTENCES, 4 * (SENTENCES == 3))
    through_the_device(Reader(), [sentences, LENGTHS[:, None].astype(np.int32)])


def test_a_decoder_as_keras_hub_writes_it() -> None:
    """Attention whose `call` takes more than its class says and gives no cache, a mask made for every example, one
    table for words and scores."""

    class Cached(layers.MultiHeadAttention):
        def call(self, query, value, attention_mask=None, cache=None, training=None):
            query, key, value = self._query_dense(query), self._key_dense(value), self._value_dense(value)
            result, _ = self._compute_attention(query, key, value, attention_mask, training=training)
            return self._output_dense(result), cache

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
            y, _ = self.attention(x, x, attention_mask=mask, cache=None, training=training)
            return ops.moveaxis(ops.moveaxis(x + y, 1, -1) * 0.5, 2, 1)

    words, mask = (keras.Input((LENGTH,), dtype="int32", name=name) for name in ("words", "mask"))
    table = layers.ReversibleEmbedding(WORDS, FEATURES, logit_soft_cap=2.0)
    scores = table(Decoder()(table(words), mask), reverse=True)
    prepared = through_the_device(keras.Model([words, mask], scores), [SENTENCES, MASK])
    tables = [variable for variable in prepared.trainable_variables if variable.shape == (WORDS, FEATURES)]
    assert len(tables) == 1, "one table for both"
