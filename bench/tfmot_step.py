# SPDX-License-Identifier: Apache-2.0
"""A training step of TensorFlow and of its Model Optimization toolkit, on request: the other end of `bench/step.py`.

Runs in an environment of its own (TensorFlow, tf_keras, tensorflow-model-optimization); nothing of this library is
imported here, nor this file by it. Lines of JSON: first the task comes in and the networks' numbers of parameters go
out; then each line names a network; one step of it is made, and the answer is its seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

FLOAT, QAT = "TensorFlow float", "tfmot QAT"


def keras_network(keras: Any, description: list[dict[str, Any]]) -> Any:
    """The Keras model of a list of layers as `bench/step.py` describes them: name, kind, inputs, settings."""
    tensors: dict[str, Any] = {}
    result = None
    for entry in description:
        operands = [tensors[name] for name in entry["inputs"]]
        kind, settings = entry["kind"], entry["settings"]
        if kind == "Input":
            result = first = keras.layers.Input(**settings)
        else:
            layer = getattr(keras.layers, kind)(**settings)
            result = layer(operands if len(operands) > 1 else operands[0])
        tensors[entry["name"]] = result
    return keras.Model(first, result)


def step(tf: Any, keras: Any, model: Any, images: Any, labels: Any) -> Callable[[], Any]:
    """One compiled training step, to be called again and again."""
    optimizer = keras.optimizers.SGD(1e-3)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def run() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_function(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return lambda: run().numpy()


def main() -> None:
    # TensorFlow prints as it likes; the answers have a channel of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    task = json.loads(sys.stdin.readline())
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

    import tensorflow as tf
    import tensorflow_model_optimization as tfmot
    import tf_keras as keras

    tf.config.threading.set_intra_op_parallelism_threads(task["threads"])
    tf.config.threading.set_inter_op_parallelism_threads(1)
    height, width, channels = task["image"]
    images = tf.random.normal((task["batch"], height, width, channels))
    labels = tf.random.uniform((task["batch"],), 0, task["classes"], tf.int32)
    plain = keras_network(keras, task["layers"])
    networks = {FLOAT: plain, QAT: tfmot.quantization.keras.quantize_model(keras_network(keras, task["layers"]))}
    steps = {name: step(tf, keras, model, images, labels) for name, model in networks.items()}
    versions = {"tensorflow": tf.__version__, "tensorflow-model-optimization": tfmot.__version__}
    print(json.dumps({"versions": versions, "parameters": plain.count_params()}), file=answers)
    for line in sys.stdin:
        start = time.perf_counter()
        loss = float(steps[line.strip()]())
        print(json.dumps({"seconds": time.perf_counter() - start, "loss": loss}), file=answers)


if __name__ == "__main__":
    main()
