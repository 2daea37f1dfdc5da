# SPDX-License-Identifier: Apache-2.0
"""Networks of files in Keras, beside LiteRT on the original file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from test_from_file import FILES, on_litert, on_the_grid

from exactqat import deploy, qat
from exactqat.kit.device import profile

pytestmark = pytest.mark.slow


def arrays(results: Any) -> list[np.ndarray]:
    """In the file's order, which Keras' own flattening of dictionaries is not."""
    tensors = list(results.values()) if isinstance(results, dict) else [results]
    return [keras.ops.convert_to_numpy(tensor) for tensor in tensors]


@pytest.mark.parametrize("name", ["convolutions.int8", "branches.int8", "two_ends.int8"])
def test_integers_are_the_files_before_the_first_step(name: str) -> None:
    path = FILES / f"{name}.tflite"
    model = qat.keras.prepare_file(deploy.read_tflite(path))
    reals = on_the_grid(model.plan)
    qat.keras.freeze(model)
    results = model(reals if len(reals) > 1 else reals[0])
    for result, expected in zip(arrays(results), on_litert(path, reals, "xnnpack-x86"), strict=True):
        assert np.array_equal(result, expected)


def test_what_is_saved_comes_back_and_trains_on() -> None:
    model = qat.keras.prepare_file(deploy.read_tflite(FILES / "convolutions.int8.tflite"))
    (reals,) = on_the_grid(model.plan)
    before = arrays(model(reals))[0]
    model.compile(optimizer=keras.optimizers.SGD(1.0), loss="mse")
    model.fit(reals, np.zeros_like(before), verbose=0)
    qat.keras.freeze(model)
    model.fit(reals, np.zeros_like(before), verbose=0)
    after = arrays(model(reals))[0]
    assert not np.array_equal(before, after)
    model.save("model.keras")
    loaded = keras.models.load_model("model.keras")
    assert loaded.frozen and np.array_equal(arrays(loaded(reals))[0], after)
    written = deploy.write_tflite(deploy.lower(loaded), "trained.tflite")
    assert np.array_equal(on_litert(written, [reals], "xnnpack-x86")[0], after)


def test_a_float_file_is_quantized_by_rules() -> None:
    model = qat.keras.prepare_file(deploy.read_tflite(FILES / "convolutions.float32.tflite"), rules=[qat.Rule()])
    images = np.random.default_rng(0).standard_normal((4, *model.plan.inputs[0].shape[1:])).astype(np.float32)
    qat.keras.calibrate(model, [images])
    qat.keras.freeze(model)
    graph = deploy.lower(model)
    (name,) = graph.inputs
    codes = deploy.quantize(images, graph.tensors[name].quantization)
    path = deploy.write_tflite(graph, "trained.tflite")
    assert deploy.verify(graph, path, codes, "xnnpack-x86").differing == 0


def test_a_device_of_a_file_is_saved(tmp_path: Path) -> None:
    coarse = {"arithmetic": {"multiplier_bits": 4, "multiplier_rounding": "floor"}}
    said = {"exactqat_device": 1, "name": "coarse", "operators": {"FULLY_CONNECTED": coarse}}
    (tmp_path / "coarse.json").write_text(json.dumps(said))
    x = np.random.default_rng(0).random((16, 12)).astype(np.float32)
    try:
        model = qat.keras.prepare(
            keras.Sequential([keras.Input((12,)), keras.layers.Dense(5)]), device=tmp_path / "coarse.json"
        )
        qat.keras.calibrate(model, [x])
        qat.keras.freeze(model)
        before, graph = arrays(model(x))[0], deploy.lower(model)
        assert graph.trained_for == model.profile == "coarse"
        own = deploy.simulate(graph, deploy.input_codes(graph, x), "coarse")
        assert np.array_equal(before, *deploy.output_values(graph, own).values())
        model.save(tmp_path / "model.keras")
        del profile._PROFILES["coarse"]  # as in a new process
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert loaded.profile == "coarse" and np.array_equal(arrays(loaded(x))[0], before)
    finally:
        profile._PROFILES.pop("coarse", None)
