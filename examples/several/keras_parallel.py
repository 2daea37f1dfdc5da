# SPDX-License-Identifier: Apache-2.0
"""Keras' DataParallel over a machine's devices, on the JAX backend: KERAS_BACKEND=jax python keras_parallel.py."""

import digits
import keras
from keras import distribution, layers

from exactqat import deploy, qat

keras.utils.set_random_seed(0)
distribution.set_distribution(distribution.DataParallel())
images, labels = digits.images[..., None], digits.labels
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", use_bias=False),
        layers.BatchNormalization(momentum=0.9),
        layers.ReLU(),
        layers.DepthwiseConv2D(3, strides=2, padding="same", activation="relu"),
        layers.Flatten(),
        layers.Dense(10),
    ]
)
prepared = qat.keras.prepare(model)
qat.keras.calibrate(prepared, [images[digits.train]])
prepared.compile(keras.optimizers.Adam(5e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
data, epochs = (images[digits.train], labels[digits.train]), digits.EPOCHS - digits.FROZEN
prepared.fit(*data, batch_size=digits.BATCH, epochs=epochs, verbose=0)
qat.keras.freeze(prepared)
prepared.fit(*data, batch_size=digits.BATCH, epochs=digits.FROZEN, verbose=0)
digits.deliver(deploy.lower(prepared), prepared, images[digits.test], 0)
