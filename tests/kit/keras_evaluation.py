# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a frozen Keras model: the host is asked once for the whole network. See `test_keras_kit`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers
from keras_checks import run_checks

import exactqat.qat.keras
from exactqat import deploy, qat
from exactqat.qat.train.core.accumulators import LayerNumbers
from exactqat.qat.train.core.on_device import DeviceNetwork


def count(kind: Any, calls: list[str]) -> None:
    compute = kind.__call__

    def counted(self: Any, *arguments: Any) -> Any:
        calls.append(kind.__name__)
        return compute(self, *arguments)

    kind.__call__ = counted


def check_an_evaluation_asks_once() -> None:
    """With the bits that the network gives step by step."""
    x = np.random.default_rng(0).standard_normal((6, 12, 12, 3)).astype("f")
    given = keras.Input((12, 12, 3))
    y = layers.Conv2D(8, 3, activation="relu")(given)
    # No softmax: outside of the device XLA rounds as it fuses.
    y = layers.Dense(5)(layers.Flatten()(layers.DepthwiseConv2D(3)(y)))
    model = qat.keras.prepare(keras.Model(given, y), device="micro")
    qat.keras.calibrate(model, [x])
    qat.keras.freeze(model)
    model.compile(loss="mse")
    calls: list[str] = []
    count(DeviceNetwork, calls)
    count(LayerNumbers, calls)
    whole = model.predict(x, verbose=0)
    assert calls and set(calls) == {"DeviceNetwork"}, calls
    exactqat.qat.train.keras.primitives.network_on_host = lambda *arguments: None
    model.predict_function = None
    assert np.array_equal(model.predict(x, verbose=0), whole) and "LayerNumbers" in calls


def check_prepare_and_verify_compile_few_programs() -> None:
    """On JAX; op by op they were hundreds, and minutes."""
    if keras.backend.backend() != "jax":
        return
    import jax

    programs: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **rest: programs.append(event) if "backend_compile" in event else None
    )
    x = np.random.default_rng(0).standard_normal((6, 12, 12, 3)).astype("f")
    given = keras.Input((12, 12, 3))
    y = layers.BatchNormalization()(layers.Conv2D(8, 3, activation="relu")(given))
    model = qat.keras.prepare(keras.Model(given, layers.Dense(5)(layers.Flatten()(layers.DepthwiseConv2D(3)(y)))))
    assert programs and len(programs) < 60, len(programs)
    qat.keras.calibrate(model, [x])
    qat.keras.freeze(model)
    programs.clear()
    graph = deploy.lower(model)
    with tempfile.TemporaryDirectory() as folder:
        path = deploy.write_tflite(graph, Path(folder) / "network.tflite")
        assert deploy.verify(graph, path, model=model, data=x).equal
    assert len(programs) < 20, len(programs)


if __name__ == "__main__":
    run_checks(globals())
