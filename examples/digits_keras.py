# SPDX-License-Identifier: Apache-2.0
"""Digits in Keras 3 with `fit`, to LiteRT (pip install 'exactqat[keras,deploy]' scikit-learn, and a backend)."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

from exactqat import deploy, qat

keras.utils.set_random_seed(0)
digits = load_digits()
images, labels = (digits.images[..., None] / 16).astype(np.float32), digits.target
train, test = slice(0, 1408), slice(1408, None)

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", use_bias=False),
        layers.BatchNormalization(momentum=0.9),
        layers.ReLU(),
        layers.DepthwiseConv2D(3, strides=2, padding="same", activation="relu"),
        layers.Flatten(),
        layers.Dropout(0.1),
        layers.Dense(10),
    ]
)
prepared = qat.keras.prepare(model)
qat.keras.calibrate(prepared, [images[:256]])
prepared.compile(
    keras.optimizers.Adam(5e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
)
prepared.fit(images[train], labels[train], batch_size=64, epochs=6, verbose=2)
qat.keras.freeze(prepared)  # the last phase: what the device computes, to the bit
prepared.fit(images[train], labels[train], batch_size=64, epochs=2, verbose=2)
prepared.save("digits.keras")

loaded = keras.saving.load_model("digits.keras")
graph = deploy.lower(loaded)
codes = deploy.input_codes(graph, images[test])
scores = deploy.simulate(graph, codes)[graph.outputs[0]]
assert np.array_equal(scores.argmax(1), loaded.predict(images[test], verbose=0).argmax(1))
report = deploy.verify(graph, deploy.write_tflite(graph, "digits.tflite"), model=loaded, data=images[test])
print(f"accuracy {(scores.argmax(1) == labels[test]).mean():.3f}; {report.values} integers, {report.differing} differ")
assert report.equal
