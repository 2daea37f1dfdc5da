# SPDX-License-Identifier: Apache-2.0
"""Networks of files in Keras, beside LiteRT on the original file. test_float_files.py runs it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np
from keras_checks import run_checks
from test_from_file import FILES, on_litert, on_the_grid

from exactqat import deploy, qat


def flat(results):
    """In the file's order, which Keras' own flattening of dictionaries is not."""
    each = list(results.values()) if isinstance(results, dict) else [results]
    return [keras.ops.convert_to_numpy(one) for one in each]


def check_integers_are_the_files_before_the_first_step():
    for name in ("convolutions.int8", "branches.int8", "two_ends.int8"):
        path = FILES / f"{name}.tflite"
        model = qat.keras.prepare_file(deploy.read_tflite(path))
        reals = on_the_grid(model.plan)
        qat.keras.freeze(model)
        found = model(reals if len(reals) > 1 else reals[0])
        for ours, theirs in zip(flat(found), on_litert(path, reals, "xnnpack-x86"), strict=True):
            assert np.array_equal(ours, theirs), name


def check_what_is_saved_comes_back_and_trains_on():
    model = qat.keras.prepare_file(deploy.read_tflite(FILES / "convolutions.int8.tflite"))
    (reals,) = on_the_grid(model.plan)
    before = flat(model(reals))[0]
    model.compile(optimizer=keras.optimizers.SGD(1.0), loss="mse")
    model.fit(reals, np.zeros_like(before), verbose=0)
    qat.keras.freeze(model)
    model.fit(reals, np.zeros_like(before), verbose=0)
    after = flat(model(reals))[0]
    assert not np.array_equal(before, after)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        loaded = keras.models.load_model(path)
        assert loaded.frozen and np.array_equal(flat(loaded(reals))[0], after)
        written = deploy.write_tflite(deploy.lower(loaded), Path(folder) / "trained.tflite")
        assert np.array_equal(on_litert(written, [reals], "xnnpack-x86")[0], after)


def check_a_float_file_is_quantized_by_rules():
    model = qat.keras.prepare_file(deploy.read_tflite(FILES / "convolutions.float32.tflite"), rules=[qat.Rule()])
    images = np.random.default_rng(0).standard_normal((4, *model.plan.inputs[0].shape[1:])).astype(np.float32)
    qat.keras.calibrate(model, [images])
    qat.keras.freeze(model)
    graph = deploy.lower(model)
    (name,) = graph.inputs
    codes = deploy.quantize(images, graph.tensors[name].quantization)
    with tempfile.TemporaryDirectory() as folder:
        path = deploy.write_tflite(graph, Path(folder) / "trained.tflite")
        assert deploy.verify(graph, path, codes, "xnnpack-x86").differing == 0


if __name__ == "__main__":
    run_checks(globals())
