# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a frozen Keras model: the host is asked once for the whole network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import exactqat.qat.train.keras.primitives
from exactqat import deploy, qat
from exactqat.qat.train.core.accumulators import LayerNumbers
from exactqat.qat.train.core.on_device import DeviceNetwork


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((6, 12, 12, 3)).astype("f")


def counted(kind: Any, calls: list[str]) -> Any:
    """The class's call, which adds its name to `calls`."""
    compute = kind.__call__

    def call(self: Any, *arguments: Any) -> Any:
        calls.append(kind.__name__)
        return compute(self, *arguments)

    return call


def test_an_evaluation_asks_once(images: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits that the network gives step by step."""
    inputs = keras.Input((12, 12, 3))
    y = layers.Conv2D(8, 3, activation="relu")(inputs)
    # No softmax: outside of the device XLA rounds as it fuses.
    y = layers.Dense(5)(layers.Flatten()(layers.DepthwiseConv2D(3)(y)))
    model = qat.keras.prepare(keras.Model(inputs, y), device="micro")
    qat.keras.calibrate(model, [images])
    qat.keras.freeze(model)
    model.compile(loss="mse")
    calls: list[str] = []
    for kind in (DeviceNetwork, LayerNumbers):
        monkeypatch.setattr(kind, "__call__", counted(kind, calls))
    whole = model.predict(images, verbose=0)
    assert calls and set(calls) == {"DeviceNetwork"}, calls
    monkeypatch.setattr(exactqat.qat.train.keras.primitives, "network_on_host", lambda *arguments: None)
    model.predict_function = None
    assert np.array_equal(model.predict(images, verbose=0), whole) and "LayerNumbers" in calls


@pytest.fixture
def programs() -> Any:
    """What XLA compiles, one entry each."""
    if keras.backend.backend() != "jax":
        pytest.skip("only KERAS_BACKEND=jax compiles programs")
    import jax

    names: list[str] = []

    def listen(event: str, seconds: float, **rest: Any) -> None:
        if "backend_compile" in event:
            names.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def test_prepare_and_verify_compile_few_programs(images: np.ndarray, programs: list[str]) -> None:
    """Op by op they were hundreds, and minutes."""
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    inputs = keras.Input((12, 12, 3))
    y = layers.BatchNormalization()(layers.Conv2D(8, 3, activation="relu")(inputs))
    model = qat.keras.prepare(keras.Model(inputs, layers.Dense(5)(layers.Flatten()(layers.DepthwiseConv2D(3)(y)))))
    assert programs and len(programs) < 60, len(programs)
    qat.keras.calibrate(model, [images])
    qat.keras.freeze(model)
    programs.clear()
    graph = deploy.lower(model)
    path = deploy.write_tflite(graph, Path("network.tflite"))
    assert deploy.verify(graph, path, model=model, data=images).equal
    assert len(programs) < 20, len(programs)
