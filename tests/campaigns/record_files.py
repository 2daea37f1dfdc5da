# SPDX-License-Identifier: Apache-2.0
"""Records .tflite files that TensorFlow's converter writes, for tests of `deploy.read_tflite` and `deploy.inspect`.

    python tests/campaigns/record_files.py                 # the small ones of tests/goldens/files
    python tests/campaigns/record_files.py --all FOLDER    # all models in all ways, keras.applications among them

Needs TensorFlow, like record_goldens.py, and tf_keras. The models are untrained; what counts is what the converter
makes of them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import flatbuffers
import keras
import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow.lite.python import schema_py_generated as schema_fb

FOLDER = Path(__file__).resolve().parents[1] / "goldens" / "files"
Model = keras.Model
# (model, way) of the files in tests/goldens/files.
GOLDENS = (
    ("convolutions", "int8"),
    ("convolutions", "float_ends"),
    ("convolutions", "uint8"),
    ("convolutions", "int16"),
    ("convolutions", "per_tensor"),
    ("convolutions", "dynamic_range"),
    ("convolutions", "fixed_batch"),
    ("branches", "int8"),
    ("sequence", "int8"),
    ("enlarged", "int8"),
    ("enlarged", "fixed_batch"),
    ("two_ends", "int8"),
    ("float_island", "int8"),
    ("pieces", "int8"),
    ("streamed", "fixed_batch"),
    ("streamed", "float_ends"),
    ("loop", "int8"),
    ("dilated", "int8"),
    ("functions", "int8"),
    ("convolutions", "float16"),
    ("sloped", "fixed_float16"),
    ("convolutions", "float32"),
    ("enlarged", "float32"),
    ("pooled", "float32"),
    ("reals", "float32"),
    ("embedded", "int8"),
    ("one_hot", "int8"),
    ("scores", "float_ends"),
    ("with_token", "fixed_batch"),
    ("stacked", "int8"),
    ("stacked", "fixed_batch"),
    ("sequences", "int8"),
    ("sequences", "fixed_batch"),
    ("excited", "fixed_batch"),
    ("lstm", "int8"),
    ("lstm_sequences", "float_ends"),
)
WAYS = ("int8", "float_ends", "uint8", "int16", "per_tensor", "dynamic_range", "float16", "float_fallback",
        "fixed_batch", "float32")  # fmt: skip


class Pieces(layers.Layer):  # type: ignore[misc]
    """Splits, stacks, slices."""

    def call(self, x: Any) -> Any:
        first, second = tf.split(x, 2, axis=-1)
        stacked = tf.unstack(tf.stack([first, second], 1), axis=1)
        return tf.concat([stacked[0] - stacked[1], x[:, 1:3, :4], tf.abs(second)], 1)


class Padded(layers.Layer):  # type: ignore[misc]
    """A number around an image."""

    def call(self, x: Any) -> Any:
        return tf.pad(x, [[0, 0], [1, 2], [0, 1], [0, 0]], constant_values=0.7)


class Reals(layers.Layer):  # type: ignore[misc]
    """What converters leave in float32."""

    def call(self, x: Any) -> Any:
        positive = tf.abs(x) + 0.1
        parts = [tf.nn.elu(x), tf.math.log(positive), tf.sqrt(positive), tf.math.rsqrt(positive), tf.square(x), -x,
                 tf.sin(x), tf.cos(x), tf.sign(x), tf.floor(3 * x), tf.math.ceil(3 * x), tf.round(3 * x),
                 tf.nn.relu6(3 * x), tf.pow(positive, 1.5), x / positive, tf.math.floordiv(x, positive),
                 tf.math.floormod(x, positive), tf.exp(x), tf.tanh(x), tf.sigmoid(x), tf.nn.gelu(x), tf.nn.relu(x),
                 tf.nn.leaky_relu(x, 0.3), tf.minimum(x, 0.2), tf.maximum(x, 0.1),
                 tf.math.squared_difference(x, positive), tf.nn.log_softmax(x), tf.nn.softmax(2 * x)]  # fmt: skip
        stacked = tf.stack(parts, 1)
        product = tf.matmul(stacked, stacked, transpose_b=True)
        return tf.concat([stacked, product[:, :, :4]], -1), tf.reduce_max(product, 2), tf.reduce_sum(stacked, 1)


class Streamed(layers.Layer):  # type: ignore[misc]
    """A convolution over time that keeps what it needs of earlier calls, as wake words do."""

    def __init__(self, convolution: Any) -> None:
        super().__init__()
        self.convolution = convolution

    def build(self, shape: Any) -> None:
        kept = self.convolution.kernel_size[0] - self.convolution.strides[0]
        self.kept = self.add_weight(shape=(1, kept, *shape[2:]), initializer="zeros", trainable=False)
        self.convolution.build((1, kept + shape[1], *shape[2:]))

    def call(self, x: Any) -> Any:
        whole = tf.concat([self.kept.value, x], 1)
        self.kept.assign(whole[:, -self.kept.shape[1] :])
        return self.convolution(whole)


class Loop(layers.Layer):  # type: ignore[misc]
    """A loop, which becomes subgraphs."""

    def call(self, x: Any) -> Any:
        free = [tf.TensorShape([]), tf.TensorShape([None, *x.shape[1:]])]
        start = [tf.constant(0), x]
        return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.tanh(y)), start, shape_invariants=free)[1]


class Made(layers.Layer):  # type: ignore[misc]
    """One function of TensorFlow as a layer."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def call(self, x: Any) -> Any:
        return self.function(x)


def chain(shape: tuple[int, ...], *parts: Any, dtype: str = "float32") -> Model:
    x = start = keras.Input(shape, dtype=dtype)
    for part in parts:
        x = part(x)
    return Model(start, x)


def branches() -> Model:
    start = keras.Input((8, 8, 4))
    plain, wide = layers.Conv2D(8, 1)(start), layers.Conv2D(8, 3, padding="same", activation="relu")(start)
    x = layers.ReLU()(layers.Add()([plain, wide]))
    x = layers.ZeroPadding2D(1)(layers.Concatenate()([x, plain]))
    x = layers.Conv2D(6, 3, strides=2)(x)
    return Model(start, layers.Dense(4, activation="tanh")(layers.Flatten()(layers.Multiply()([x, x]))))


def two_ends() -> Model:
    first, second = keras.Input((6, 6, 4), name="first"), keras.Input((6, 6, 4), name="second")
    x = layers.Maximum()([layers.Subtract()([layers.Conv2D(4, 1)(first), second]), first])
    x = layers.Permute((2, 1, 3))(layers.Average()([x, second]))
    return Model([first, second], [layers.Conv2D(2, 1)(x), layers.GlobalAveragePooling2D()(x)])


def attention() -> Model:
    start = keras.Input((10, 8))
    x = layers.LayerNormalization()(start)
    x = layers.Add()([start, layers.MultiHeadAttention(2, 4)(x, x)])
    return Model(start, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def residual() -> Model:
    """The image classification of MLPerf Tiny, smaller."""
    x = start = keras.Input((16, 16, 3))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(x)))
    for filters, strides in ((8, 1), (12, 2)):
        y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(filters, 3, strides, padding="same")(x)))
        y = layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same")(y))
        x = layers.Conv2D(filters, 1, strides)(x) if strides > 1 else x
        x = layers.ReLU()(layers.Add()([x, y]))
    return Model(start, layers.Dense(10, activation="softmax")(layers.Flatten()(layers.AveragePooling2D(8)(x))))


def u_net() -> Model:
    start = keras.Input((16, 16, 2))
    first = layers.Conv2D(6, 3, padding="same", activation="relu")(start)
    inner = layers.Conv2D(8, 3, padding="same", activation="relu")(layers.MaxPooling2D()(first))
    back = layers.Conv2DTranspose(6, 2, strides=2)(inner)
    return Model(start, layers.Conv2D(3, 1, activation="sigmoid")(layers.Concatenate()([first, back])))


def scores() -> Model:
    """Its second result is computed from the first one, off its grid."""
    start = keras.Input((8,))
    y = layers.Dense(5)(start)
    return Model(start, [y, Made(lambda x: tf.argmax(x, -1, output_type=tf.int32))(y)])


def inception() -> Model:
    start = keras.Input((10, 10, 6))
    parts = [layers.Conv2D(4, 1, activation="relu")(start), layers.Conv2D(4, 5, padding="same")(start),
             layers.AveragePooling2D(3, 1, padding="same")(start), layers.MaxPooling2D(3, 1, padding="same")(start),
             layers.Conv2D(4, (1, 7), padding="same")(start)]  # fmt: skip
    return Model(start, layers.Dense(3)(layers.GlobalMaxPooling2D()(layers.Concatenate()(parts))))


def excited() -> Model:
    start = keras.Input((8, 8, 6))
    x = layers.DepthwiseConv2D(5, padding="same")(layers.Conv2D(12, 1, activation="hard_silu")(start))
    y = layers.Dense(4, activation="relu")(layers.GlobalAveragePooling2D()(x))
    y = layers.Reshape((1, 1, 12))(layers.Dense(12, activation="hard_sigmoid")(y))
    x = layers.Conv2D(6, 1)(layers.Multiply()([x, y]))
    return Model(start, layers.GlobalAveragePooling2D()(layers.Add()([x, start])))


def detector() -> Model:
    x = start = keras.Input((16, 16, 3))
    heads: dict[str, list[Any]] = {"boxes": [], "classes": []}
    for filters in (8, 12):
        x = layers.ReLU(6.0)(layers.SeparableConv2D(filters, 3, 2, padding="same")(x))
        for name, values in (("boxes", 4), ("classes", 3)):
            heads[name].append(layers.Reshape((-1, values))(layers.Conv2D(2 * values, 3, padding="same")(x)))
    boxes, classes = (layers.Concatenate(axis=1)(head) for head in heads.values())
    return Model(start, [boxes, layers.Activation("sigmoid")(classes)])


def encoder() -> Model:
    """Patches and one block of a transformer."""
    start = keras.Input((16, 16, 3))
    x = layers.Reshape((16, 12))(layers.Conv2D(12, 4, strides=4)(start))
    y = layers.LayerNormalization()(x)
    x = layers.Add()([x, layers.MultiHeadAttention(3, 4)(y, y)])
    y = layers.Dense(12)(layers.Dense(24, activation="gelu")(layers.LayerNormalization()(x)))
    return Model(start, layers.Dense(4)(layers.GlobalAveragePooling1D()(layers.Add()([x, y]))))


def reductions(x: Any) -> Any:
    parts = [tf.reduce_max(x, 1), tf.reduce_min(x, 1), tf.reduce_sum(x, 1), tf.reduce_mean(x, 1)]
    return tf.concat([*parts, tf.reduce_prod(x[:, :2], 1)], -1)


def chosen(x: Any) -> Any:
    smaller = tf.where(x > 0.3, x, 0.5 * x)
    return tf.where(tf.logical_and(x < 0.5, x >= -0.5), smaller, tf.minimum(tf.maximum(x, -1.0), 1.0))


def gathered(x: Any) -> Any:
    best, _ = tf.math.top_k(x, 3)
    return tf.concat([tf.gather(x, [3, 0, 3], axis=-1), tf.gather(x, [1], axis=2), best, tf.reverse(best, [-1])], -1)


def filled(x: Any) -> Any:
    """A constant as large as the batch says."""
    ones = tf.fill(tf.stack([tf.shape(x)[0], 2]), 0.5)
    return tf.concat([x, ones, tf.broadcast_to(x[:, :1], tf.stack([tf.shape(x)[0], 3]))], -1)


MODELS: dict[str, Callable[[], Model]] = {
    "convolutions": lambda: chain(
        (10, 10, 3),
        layers.Conv2D(8, 3, activation="relu"),
        layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2, use_bias=False),
        layers.BatchNormalization(),
        layers.ReLU(6.0),
        layers.MaxPooling2D(2),
        layers.GlobalAveragePooling2D(),
        layers.Dense(5, activation="softmax"),
    ),
    "pooled": lambda: chain(
        (12, 12, 2),
        layers.Conv2D(4, 3),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.AveragePooling2D(2),
        layers.Flatten(),
        layers.Dense(10, activation="relu"),
        layers.Dense(3),
    ),
    "separable": lambda: chain(
        (16, 16, 4),
        layers.SeparableConv2D(12, 3, strides=2),
        layers.GlobalMaxPooling2D(),
        layers.Dense(4, activation="sigmoid"),
    ),
    "branches": branches,
    "sequence": lambda: chain(
        (20, 3),
        layers.Conv1D(6, 5, activation="relu"),
        layers.MaxPooling1D(),
        layers.Conv1D(6, 3, padding="causal"),
        layers.GlobalAveragePooling1D(),
        layers.Dense(2),
    ),
    "enlarged": lambda: chain(
        (5, 5, 3),
        layers.Conv2D(4, 3, padding="same"),
        layers.UpSampling2D(),
        layers.Conv2DTranspose(4, 3, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Conv2D(1, 1),
    ),
    "bilinear": lambda: chain(
        (8, 8, 3),
        layers.Conv2D(4, 3, padding="same"),
        layers.UpSampling2D(interpolation="bilinear"),
        layers.PReLU(shared_axes=[1, 2]),
        layers.Cropping2D(2),
    ),
    "two_ends": two_ends,
    "gates": lambda: chain(
        (12, 12, 3),
        layers.Conv2D(8, 3),
        layers.Activation("hard_silu"),
        layers.Conv2D(8, 3, activation="hard_sigmoid"),
        layers.GlobalAveragePooling2D(keepdims=True),
        layers.Reshape((8,)),
        layers.Dense(16, activation="gelu"),
        layers.Dense(16, activation="swish"),
        layers.Dense(2),
    ),
    "dilated": lambda: chain((12, 12, 3), layers.Conv2D(8, 3, dilation_rate=2), layers.GlobalAveragePooling2D()),
    "grouped": lambda: chain(
        (8, 8, 8),
        layers.Conv2D(16, 3, groups=4, use_bias=False),
        layers.BatchNormalization(),
        layers.Flatten(),
        layers.Dense(3, use_bias=False),
    ),
    "attention": attention,
    "float_island": lambda: chain((12,), layers.Dense(8, activation="elu"), layers.Dense(3)),
    "functions": lambda: chain(
        (16,),
        layers.Dense(8, activation="softplus"),
        layers.Dense(8, activation="exponential"),
        layers.Dense(8, activation="selu"),
        layers.UnitNormalization(),
        layers.Dense(2),
    ),
    "reals": lambda: chain((6,), Reals()),
    "pieces": lambda: chain((6, 8), layers.Dense(8), Pieces(), layers.Dense(3)),
    "sloped": lambda: chain(
        (6, 7, 3),
        layers.Conv2D(4, 3),
        layers.PReLU("uniform", shared_axes=[1, 2]),
        Padded(),
        layers.Conv2D(2, 2),
    ),
    "streamed": lambda: chain(
        (4, 1, 6),
        Streamed(layers.Conv2D(8, (3, 1), activation="relu")),
        Streamed(layers.DepthwiseConv2D((5, 1), padding="valid")),
        layers.Conv2D(6, 1, activation="relu"),
        Streamed(layers.Conv2D(5, (6, 1), strides=(2, 1))),
        layers.Flatten(),
        layers.Dense(3),
    ),
    "recurrent": lambda: chain((4, 3), layers.LSTM(4, unroll=True), layers.Dense(2)),
    "loop": lambda: chain((3,), layers.Dense(3), Loop(), layers.Dense(2)),
    "perceptron": lambda: chain(
        (20,), layers.Dense(16, activation="relu"), layers.Dropout(0.2), layers.Dense(4, activation="softmax")
    ),
    "keywords": lambda: chain(
        (25, 10, 1),
        layers.Conv2D(8, (10, 4), strides=2, padding="same"),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.DepthwiseConv2D(3, padding="same"),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.Conv2D(8, 1, activation="relu"),
        layers.AveragePooling2D((13, 5)),
        layers.Flatten(),
        layers.Dense(12, activation="softmax"),
    ),
    "autoencoder": lambda: chain(
        (40,),
        *(part for n in (16, 4, 16) for part in (layers.Dense(n), layers.BatchNormalization(), layers.ReLU())),
        layers.Dense(40),
    ),
    "residual": residual,
    "u_net": u_net,
    "inception": inception,
    "excited": excited,
    "detector": detector,
    "encoder": encoder,
    "causal": lambda: chain(
        (24, 4),
        layers.Conv1D(6, 3, padding="causal", dilation_rate=2, activation="relu"),
        layers.Conv1D(6, 3, padding="causal", dilation_rate=4, activation="relu"),
        layers.GlobalMaxPooling1D(),
        layers.Dense(2),
    ),
    "groups_normalized": lambda: chain((8, 8, 8), layers.Conv2D(8, 3), layers.GroupNormalization(2), layers.ReLU()),
    "gated": lambda: chain((4, 3), layers.GRU(4, unroll=True), layers.Dense(2)),
    "simple_recurrent": lambda: chain((5, 3), layers.SimpleRNN(4, unroll=True), layers.Dense(2)),
    "both_ways": lambda: chain((4, 3), layers.Bidirectional(layers.LSTM(3, unroll=True)), layers.Dense(2)),
    "stacked": lambda: chain(
        (4, 3), layers.LSTM(4, unroll=True, return_sequences=True), layers.LSTM(3, unroll=True), layers.Dense(2)
    ),
    "sequences": lambda: chain((4, 3), layers.GRU(4, unroll=True, return_sequences=True), layers.Dense(2)),
    "embedded": lambda: chain(
        (6,), layers.Embedding(20, 8), layers.GlobalAveragePooling1D(), layers.Dense(3), dtype="int32"
    ),
    "one_hot": lambda: chain((6,), Made(lambda x: tf.one_hot(x, 5)), layers.Flatten(), layers.Dense(3), dtype="int32"),
    "larger_1d": lambda: chain((8, 4), layers.Conv1DTranspose(6, 3, strides=2, padding="same"), layers.Dense(2)),
    "mirrored": lambda: chain(
        (8, 8, 3), Made(lambda x: tf.pad(x, [[0, 0], [1, 1], [2, 1], [0, 0]], "REFLECT")), layers.Conv2D(4, 3)
    ),
    "reduced": lambda: chain((5, 6), layers.Dense(4), Made(reductions), layers.Dense(2)),
    "chosen": lambda: chain((6,), layers.Dense(8), Made(chosen), layers.Dense(2)),
    "gathered": lambda: chain((4, 6), layers.Dense(8), Made(gathered), layers.Dense(2)),
    "filled": lambda: chain((6,), layers.Dense(8), Made(filled), layers.Dense(2)),
    "resized": lambda: chain(
        (7, 7, 3),
        layers.Conv2D(4, 1),
        Made(lambda x: tf.image.resize(x, (10, 9))),
        layers.Conv2D(4, 1),
        Made(lambda x: tf.compat.v1.image.resize_nearest_neighbor(x, (5, 5), align_corners=True)),
    ),
    "shuffled": lambda: chain(
        (4, 4, 3),
        layers.Conv2D(12, 3, padding="same"),
        Made(lambda x: tf.nn.depth_to_space(x, 2)),
        layers.Conv2D(4, 3),
        Made(lambda x: tf.nn.space_to_depth(x, 2)),
    ),
    "products": lambda: chain((4, 6), layers.Dense(6), Made(lambda x: tf.matmul(x, x, transpose_b=True))),
    "rescaled": lambda: chain(
        (8, 8, 3), layers.Rescaling(1 / 127.5, -1), layers.Conv2D(4, 3, activation="relu6"), layers.Flatten()
    ),
    "spatial": lambda: chain(
        (4, 8, 8, 2), layers.Conv3D(4, 3), layers.MaxPooling3D((1, 2, 2)), layers.Flatten(), layers.Dense(2)
    ),
    "scores": scores,
    "with_token": lambda: chain(
        (5, 6), layers.Dense(6), Made(lambda x: tf.concat([0.1 * tf.ones((1, 1, 6)), x], 1)), layers.Dense(2)
    ),
    "largest": lambda: chain((16,), layers.Dense(8), layers.Lambda(lambda x: tf.argmax(x, -1))),
}
APPLICATIONS: dict[str, dict[str, Any]] = {
    "MobileNet": {"alpha": 0.25},
    "MobileNetV2": {"alpha": 0.35},
    "MobileNetV3Small": {},
    "MobileNetV3Large": {"minimalistic": True},
    "EfficientNetB0": {},
    "EfficientNetV2B0": {},
    "NASNetMobile": {},
    "DenseNet121": {},
    "ResNet50": {},
    "ResNet50V2": {},
    "InceptionV3": {},
    "Xception": {},
    "VGG16": {},
    "VGG19": {},
    "ConvNeXtTiny": {},
    "EfficientNetB1": {},
    "EfficientNetB2": {},
    "EfficientNetV2B1": {},
    "EfficientNetV2B2": {},
    "EfficientNetV2S": {},
    "DenseNet169": {},
    "DenseNet201": {},
    "ResNet101": {},
    "ResNet101V2": {},
    "InceptionResNetV2": {},
}


def drawn(*shape: int, scale: float = 0.4) -> Any:
    """A constant, which converters quantize as weights."""
    return tf.constant(np.random.default_rng(len(shape)).normal(0, scale, shape), tf.float32)


def dead_channels(x: Any) -> Any:
    """Weights of some channels as small as weight decay leaves them."""
    kernel = drawn(3, 3, 2, 6) * tf.constant([1, 1e-9, 1, 1e-30, 0, 1])
    return tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME") + drawn(6))


def last_axis_bias(x: Any) -> Any:
    return tf.nn.conv2d_transpose(x, drawn(2, 2, 5, 2), [1, 16, 16, 5], 2) + drawn(1, 1, 1, 5)


def scalar_ends(x: Any, y: Any) -> Any:
    return tf.reduce_sum(x * y) + tf.squeeze(x[:1] - y)


def after_argmax(x: Any) -> Any:
    """Arithmetic with integers that have no grid."""
    best = tf.argmax(x @ drawn(6, 5), -1, output_type=tf.int32)
    spread = tf.cumsum(tf.stack([best, 2 * best + 1, tf.maximum(best, 3) - best, best % 3], -1), -1)
    return tf.reduce_max(spread, -1), tf.cast(spread, tf.float32)


# Functions of TensorFlow by signature, of inputs of these shapes: what Keras' models do not have.
Functions = dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]]
PROGRAMS: dict[str, Functions] = {
    "dead_channels": {"serving_default": (dead_channels, ((1, 8, 8, 2),))},
    "several_examples": {"serving_default": (lambda x: tf.nn.conv2d(x, drawn(3, 3, 2, 4), 1, "SAME"), ((3, 8, 8, 2),))},
    "time_first": {"serving_default": (lambda x: tf.reduce_mean(tf.nn.relu(x @ drawn(3, 6)), 0), ((20, 3),))},
    "scalars": {"serving_default": (scalar_ends, ((6,), ()))},
    "lower_rank": {"serving_default": (lambda x, y: tf.concat([x * y, x - drawn(6)], 1), ((1, 4, 6), (6,)))},
    "named_twice": {"serving_default": (lambda x: dict.fromkeys("ab", tf.nn.relu(x @ drawn(6, 5))), ((1, 6),))},
    "after_argmax": {"serving_default": (after_argmax, ((1, 6),))},
    "signatures": {
        "first": (lambda x: tf.nn.relu(x @ drawn(6, 5)), ((1, 6),)),
        "second": (lambda x, y: tf.nn.softmax(x * y), ((1, 6), (1, 6))),
    },
    "batched_weights": {"serving_default": (lambda x: x @ drawn(2, 6, 4), ((2, 5, 6),))},
    "last_axis_bias": {"serving_default": (last_axis_bias, ((1, 8, 8, 2),))},
    "composite": {"serving_default": (lambda x: tf.nn.relu(x @ drawn(6, 5)) + drawn(5), ((1, 6),))},
    "any_integers": {"serving_default": (lambda x: tf.sqrt(tf.abs(x)) + tf.math.log(tf.exp(x) + 1.0), ((1, 6),))},
}
# Biases of 32 bits beside activations of 16, and uint8 as TensorFlow 1 has it.
PROGRAM_WAYS = ("int8", "float_ends", "int16", "int16_short_bias", "uint8_of_tensorflow_1", "float32")


def converted_program(name: str, way: str, examples: int = 8) -> bytes:
    """The file of some functions, one signature each."""
    functions, rng = PROGRAMS[name], np.random.default_rng(0)
    if way == "uint8_of_tensorflow_1":
        content = converted_by_tensorflow_1(functions)
        return as_composite(content) if name == "composite" else content
    module, signatures = tf.Module(), {}
    for word, (function, shapes) in functions.items():
        inputs = [tf.TensorSpec(shape, tf.float32, name=f"input_{at}") for at, shape in enumerate(shapes)]
        signatures[word] = tf.function(with_names(function), input_signature=inputs).get_concrete_function()

    def data() -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        for _ in range(examples):
            for word, (_, shapes) in functions.items():
                yield word, {f"input_{at}": rng.normal(size=shape).astype(np.float32)
                             for at, shape in enumerate(shapes)}  # fmt: skip

    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder, signatures)
        converter = tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=list(functions))
        if way != "float32":
            converter.optimizations, converter.representative_dataset = [tf.lite.Optimize.DEFAULT], data
            sets = tf.lite.OpsSet
            wide = sets.EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8
            known = wide if way.startswith("int16") else sets.TFLITE_BUILTINS_INT8
            converter.target_spec.supported_ops = [known, sets.TFLITE_BUILTINS]
        if way == "int16_short_bias":
            converter._experimental_full_integer_quantization_bias_type = tf.int32
        ends = {"int8": tf.int8, "int16": tf.int16, "int16_short_bias": tf.int16}.get(way)
        if ends is not None and name != "after_argmax":
            converter.inference_input_type = converter.inference_output_type = ends
        content = bytes(converter.convert())
    return as_composite(content) if name == "composite" else content


def with_names(function: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Its results by name, as signatures have them."""

    def named(*operands: Any) -> dict[str, Any]:
        results = function(*operands)
        if isinstance(results, dict):
            return results
        results = results if isinstance(results, tuple) else (results,)
        return {f"output_{at}": result for at, result in enumerate(results)}

    return named


def converted_by_tensorflow_1(functions: Functions) -> bytes:
    """Trained with fake quantization and converted to uint8, weights with zero points."""
    ((function, shapes),) = functions.values()
    v1 = tf.compat.v1

    def fake(x: Any) -> Any:
        return tf.quantization.fake_quant_with_min_max_args(x, -3, 3)

    with tf.Graph().as_default(), v1.Session() as session:
        inputs = [v1.placeholder(tf.float32, shape, name=f"input_{at}") for at, shape in enumerate(shapes)]
        results = tf.nest.flatten(with_names(lambda *x: function(*x))(*map(fake, inputs)))
        converter = v1.lite.TFLiteConverter.from_session(session, inputs, [fake(x) for x in results])
        converter.inference_type = tf.uint8
        converter.quantized_input_stats = {f"input_{at}": (128, 42) for at in range(len(inputs))}
        converter.default_ranges_stats = (-3, 3)
        return bytes(converter.convert())


def as_composite(content: bytes) -> bytes:
    """The same network as the subgraph of one composite operator."""
    schema = schema_fb
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(content, 0))
    (whole,) = model.subgraphs
    ends = [*whole.inputs, *whole.outputs]
    code, options = schema.OperatorCodeT(), schema.StableHLOCompositeOptionsT()
    code.builtinCode, code.deprecatedBuiltinCode = schema.BuiltinOperator.STABLEHLO_COMPOSITE, 127
    options.name, options.decompositionSubgraphIndex = b"example.dense", 1
    step = schema.OperatorT()
    step.opcodeIndex, step.builtinOptions2 = len(model.operatorCodes), options
    step.builtinOptions2Type = schema.BuiltinOptions2.StableHLOCompositeOptions
    step.inputs, step.outputs = list(range(len(whole.inputs))), list(range(len(whole.inputs), len(ends)))
    outer = schema.SubGraphT()
    outer.tensors, outer.operators, outer.name = [whole.tensors[at] for at in ends], [step], b"main"
    outer.inputs, outer.outputs = step.inputs, step.outputs
    whole.name = b"decomposition"
    model.operatorCodes.append(code)
    model.subgraphs, model.signatureDefs = [outer, whole], []
    builder = flatbuffers.Builder(len(content))
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def spread(model: Model) -> Model:
    """Biases and statistics of batch normalization that are not all 0 and 1."""
    rng = np.random.default_rng(1)
    values = []
    for variable, value in zip(model.weights, model.get_weights(), strict=True):
        if value.dtype.kind == "f":
            noise = rng.normal(0, 0.05, value.shape)
            value = (np.abs(value + noise) if "variance" in variable.path else value + noise).astype(value.dtype)
        values.append(value)
    model.set_weights(values)
    return model


def converted(model: Model, way: str, examples: int = 16) -> bytes:
    """The file, calibrated with some random examples."""
    rng = np.random.default_rng(0)
    shapes = [tuple(port.shape[1:]) for port in model.inputs]
    whole = [port.dtype if isinstance(port.dtype, str) else port.dtype.name for port in model.inputs] == ["int32"]

    def data() -> Iterator[list[np.ndarray]]:
        for _ in range(examples):
            if whole:
                yield [rng.integers(0, 5, (1, *shape)).astype(np.int32) for shape in shapes]
            else:
                yield [rng.normal(size=(1, *shape)).astype(np.float32) for shape in shapes]

    if way in ("fixed_batch", "fixed_float16") or (way == "float32" and len(shapes) == 1):
        fixed = [keras.Input(batch_shape=(1, *shape), dtype="int32" if whole else None) for shape in shapes]
        model = Model(fixed, model(fixed if len(fixed) > 1 else fixed[0]))
    converter = tf.lite.TFLiteConverter.from_keras_model(model)
    if way == "float32":
        return bytes(converter.convert())
    # Those who convert wake words ask for it; without it, variables hold real numbers.
    streamed = any(isinstance(layer, Streamed) for layer in getattr(model, "_flatten_layers", list)())
    converter._experimental_variable_quantization = streamed and way != "float_ends"
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if way not in ("dynamic_range", "float16", "fixed_float16"):
        converter.representative_dataset = data
    sets = tf.lite.OpsSet
    if way in ("float16", "fixed_float16"):
        converter.target_spec.supported_types = [tf.float16]
    if way == "int16":
        converter.target_spec.supported_ops = [sets.EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8]
    elif way not in ("dynamic_range", "float16", "fixed_float16", "float_fallback"):
        converter.target_spec.supported_ops = [sets.TFLITE_BUILTINS_INT8]
    ends = {"int8": tf.int8, "per_tensor": tf.int8, "fixed_batch": tf.int8, "uint8": tf.uint8, "int16": tf.int16}
    if way in ends:
        converter.inference_input_type = converter.inference_output_type = ends[way]
    converter._experimental_disable_per_channel = way == "per_tensor"
    return bytes(converter.convert())


def with_lstm(shape: tuple[int, ...], *units: int, sequences: bool) -> Any:
    """Of Keras 2, whose LSTM the converter writes as one operator; Keras 3's is a loop."""
    import tf_keras

    layers = [tf_keras.layers.LSTM(size, return_sequences=sequences) for size in units]
    return tf_keras.Sequential([tf_keras.Input(shape, batch_size=1), *layers, tf_keras.layers.Dense(3)])


# With their state written as variables.
KERAS_2: dict[str, Callable[[], Any]] = {
    "lstm": lambda: with_lstm((5, 3), 4, sequences=False),
    "lstm_sequences": lambda: with_lstm((7, 6), 8, 5, sequences=True),
}


def made(name: str) -> Any:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    return KERAS_2[name]() if name in KERAS_2 else spread(MODELS[name]())


def record_all(folder: Path, ways: Sequence[str], only: Sequence[str]) -> None:
    """Every model in every way that is asked for, but those that are there; what the converter refuses is printed."""
    folder.mkdir(parents=True, exist_ok=True)

    def write(name: str, way: str, convert: Callable[[], bytes]) -> None:
        if (folder / f"{name}.{way}.tflite").exists():
            return
        try:
            content = convert()
        except Exception as error:  # noqa: BLE001 - the converter's own
            print(f"{name}.{way}: the converter refuses it: {' '.join(str(error).split())[:160]}", flush=True)
            return
        (folder / f"{name}.{way}.tflite").write_bytes(content)
        print(f"{name}.{way}: {len(content):,} bytes", flush=True)

    for name in (*MODELS, *KERAS_2):
        if only and name not in only:
            continue
        for way in WAYS[:-2] if name in KERAS_2 else WAYS:
            if way in ways:
                write(name, way, lambda name=name, way=way: converted(made(name), way))
    for name in PROGRAMS:
        if not only or name in only:
            for way in PROGRAM_WAYS:
                write(name, way, lambda name=name, way=way: converted_program(name, way))
    for name, arguments in APPLICATIONS.items():
        maker = getattr(keras.applications, name, None)
        if maker is None or (only and name not in only):
            continue
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        model = spread(maker(input_shape=(96, 96, 3), weights=None, classes=10, **arguments))
        for way in WAYS:
            if way in ways:
                write(name, way, lambda model=model, way=way: converted(model, way, examples=4))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", type=Path, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", default=(), metavar="MODEL", help="these models")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, help="of all models")
    arguments = parser.parse_args()
    if arguments.all is not None:
        record_all(arguments.all, arguments.ways, arguments.only)
        return 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, way in GOLDENS:
        if arguments.only and name not in arguments.only:
            continue
        content = converted(made(name), way)
        (FOLDER / f"{name}.{way}.tflite").write_bytes(content)
        print(f"{name}.{way}: {len(content):,} bytes", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
