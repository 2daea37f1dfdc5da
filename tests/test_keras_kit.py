# SPDX-License-Identifier: Apache-2.0
"""The kit for Keras 3. A process has one backend, so every backend has processes of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs exactqat[keras]")


def run(backend: str, *arguments: str) -> str:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"needs {backend}")
    paths = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(("backend", "name"), [("jax", "functional"), ("torch", "ds_cnn"), ("tensorflow", "ds_cnn")])
def test_a_network_goes_to_the_device(backend: str, name: str) -> None:
    """Prepared, fitted, frozen, saved, loaded, verified; the others: `python tests/keras_networks.py`."""
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    assert run(backend, str(TESTS / "keras_networks.py"), name).endswith("integers compared, 0 differ\n")


CHECKS = """
import keras
import numpy as np
import pytest
from keras import layers, ops
from keras_networks import ds_cnn

from exactqat import qat

x = np.random.default_rng(0).standard_normal((8, 25, 10, 1)).astype("f")
model = ds_cnn()
nodes = [len(layer._inbound_nodes) for layer in model.layers]
prepared = qat.keras.prepare(model, [qat.Rule(ranges="learned")])
assert [len(layer._inbound_nodes) for layer in model.layers] == nodes  # the user's graph is as it was
steps = {step.path: step for step in prepared.plan.steps}
assert steps["conv2d"].activation == "RELU" and steps["conv2d"].weights.batch_norm is not None
assert any(step.expression is not None for step in prepared.plan.steps)  # dropout trains
with pytest.raises(ValueError, match="call calibrate first"):
    prepared(x)
qat.keras.calibrate(prepared, [x])
before = [float(variable.numpy()) for variable in prepared.range_variables() if variable.value.ndim == 0]
assert before and any(before)
prepared.compile("adam", "mse")
prepared.fit(x, np.zeros((8, 4), "f"), verbose=0)
after = [float(variable.numpy()) for variable in prepared.range_variables() if variable.value.ndim == 0]
assert before != after  # ranges are trained
mean = next(v for v in prepared.non_trainable_variables if "moving_mean" in v.name)
assert np.abs(mean.numpy()).max() > 0  # statistics follow
qat.keras.freeze(prepared)
kept = mean.numpy().copy()
prepared.fit(x, np.zeros((8, 4), "f"), verbose=0)
assert np.array_equal(mean.numpy(), kept)
assert [float(v.numpy()) for v in prepared.range_variables() if v.value.ndim == 0] == after
prepared.save("model.keras")
loaded = keras.saving.load_model("model.keras")
assert loaded.frozen and np.array_equal(loaded.predict(x, verbose=0), prepared.predict(x, verbose=0))
assert len(loaded.trainable_variables) == len(prepared.trainable_variables)
with pytest.raises(ValueError, match="before freeze"):
    qat.keras.calibrate(prepared, [x])
with pytest.raises(TypeError, match="must be a keras.Model"):
    qat.keras.prepare(3)
any_size = keras.Sequential([keras.Input((None, None, 3)), layers.Conv2D(4, 3)])
with pytest.raises(ValueError, match="give example"):
    qat.keras.prepare(any_size)
assert qat.keras.prepare(any_size, example=np.zeros((1, 8, 8, 3), "f")).plan.inputs[0].shape == (1, 8, 8, 3)
words = keras.Sequential([keras.Input((8, 4)), layers.Lambda(lambda x: ops.sort(x, axis=-1))])
with pytest.raises(qat.UnsupportedOperator, match="Sort has no int8 operator"):
    qat.keras.prepare(words)


class Squared(layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), name="w")

    def call(self, x):
        return x * ops.square(self.w)


with pytest.raises(qat.UnsupportedOperator, match="before that meets the input"):
    qat.keras.prepare(keras.Sequential([keras.Input((4, 4)), Squared()]))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = layers.Dense(4), layers.BatchNormalization()

    def call(self, x, training=False):
        return ops.relu(self.norm(self.dense(x), training=training))


subclassed = Subclassed()
made = qat.keras.prepare(subclassed, example=np.zeros((2, 6), "f"))
assert [(step.kind, step.activation) for step in made.plan.steps] == [("FULLY_CONNECTED", "RELU")]

# Activations that leave keras.ops before they compute.
for word, kinds in (("hard_swish", ["HARD_SWISH", "DEPTHWISE_CONV_2D"]), ("mish", ["TABLE"])):
    for ones in ([layers.Dense(4), layers.Activation(word)], [layers.Dense(4, activation=word)]):
        steps = qat.keras.prepare(keras.Sequential([keras.Input((6,)), *ones])).plan.steps
        assert steps[0].kind == "FULLY_CONNECTED" and steps[1].kind in kinds, (word, steps)
"""


def test_training_and_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("jax", "-c", CHECKS)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", (TESTS.parent / "docs" / "keras-kit.md").read_text(), re.S)
    run("jax", "-c", program)
