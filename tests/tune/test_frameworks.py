# SPDX-License-Identifier: Apache-2.0
"""The same network from PyTorch, JAX and Keras has the same sensitivities."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from exactqat import deploy, qat, tune

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(0, 1, (128, 6)).astype(np.float32)
WEIGHTS = [RNG.normal(0, 1, (6, 16)).astype(np.float32), RNG.normal(0, 1, (16, 3)).astype(np.float32)]
CLASSES = (np.maximum(INPUTS @ WEIGHTS[0], 0) @ WEIGHTS[1]).argmax(1)


def numbers(analysis: tune.Sensitivity) -> list[list[float | None]]:
    return [[part.alone, part.fine, part.cumulative, round(part.decibels, 2)] for part in analysis.parts]


def in_pytorch() -> list[list[float | None]]:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    with torch.no_grad():
        for layer, weight in zip((model[0], model[2]), WEIGHTS, strict=True):
            layer.weight.copy_(torch.from_numpy(weight.T.copy()))
            layer.bias.zero_()
    prepared = qat.prepare(model, torch.from_numpy(INPUTS[:2]))
    qat.calibrate(prepared, [torch.from_numpy(INPUTS)])
    return numbers(tune.sensitivity(prepared, (INPUTS, CLASSES)))


def test_jax_finds_what_pytorch_finds() -> None:
    jax = pytest.importorskip("jax")

    def apply(params: Any, x: Any) -> Any:
        return jax.nn.relu(x @ params["first"]) @ params["last"]

    prepared = qat.prepare(apply, INPUTS[:2], variables={"first": WEIGHTS[0], "last": WEIGHTS[1]})
    params, state = prepared.calibrate(*prepared.init(), [INPUTS])
    rows = numbers(tune.sensitivity((prepared, params, state), (INPUTS, CLASSES)))
    assert len(rows) == 5
    alike(rows, in_pytorch())
    few = qat.prepare(apply, INPUTS[:2], [qat.Rule(weight_bits=4)], variables={"first": WEIGHTS[0], "last": WEIGHTS[1]})
    calibrated = few, *few.calibrate(*few.init(), [INPUTS])
    searched = tune.search(calibrated, (INPUTS, CLASSES), budget=40)
    assert searched.after.decibels > searched.before.decibels
    lowered = few.lower(*few.freeze(*searched.apply(calibrated)))
    for one, other in zip(lowered.tensors.values(), searched.graph.tensors.values(), strict=True):
        assert one.quantization.equals(other.quantization)
        assert one.data is other.data is None or np.array_equal(one.data, other.data)
    learning = qat.prepare(
        apply, INPUTS[:2], [qat.Rule(weight_bits=4, ranges="learned")],
        variables={"first": WEIGHTS[0], "last": WEIGHTS[1]},
    )  # fmt: skip
    started = searched.apply((learning, *learning.calibrate(*learning.init(), [INPUTS])))
    require_same_codes(learning.lower(*learning.freeze(*started)), searched.graph)
    params, state = prepared.freeze(params, state)
    assert numbers(tune.sensitivity(prepared.trained(params, state), (INPUTS, CLASSES))) == rows


def require_same_codes(graph: deploy.Graph, other: deploy.Graph) -> None:
    for one, same in zip(graph.tensors.values(), other.tensors.values(), strict=True):
        assert one.data is same.data is None or np.array_equal(one.data, same.data)


def alike(rows: list[list[float | None]], expected: list[list[float | None]]) -> None:
    """Equal metrics; noise within what the frameworks' own products differ by, which ranges were measured with."""
    assert [row[:3] for row in rows] == [row[:3] for row in expected]
    assert [row[3] for row in rows] == pytest.approx([row[3] for row in expected], abs=0.05)


PROGRAM = """
import json, sys
import keras, numpy as np
from exactqat import deploy, qat, tune

with np.load(sys.argv[1]) as given:
    inputs, classes, weights = given["inputs"], given["classes"], [given["first"], given["last"]]
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)])
for layer, weight in zip(model.layers, weights):
    layer.set_weights([weight, np.zeros(weight.shape[1], "float32")])
prepared = qat.prepare(model)
qat.calibrate(prepared, [inputs])
found = tune.sensitivity(prepared, (inputs, classes))
searched = tune.search(prepared, (inputs, classes), budget=40)
assert searched.after.decibels > searched.before.decibels
learning = qat.prepare(model, rules=[qat.Rule(ranges="learned")])
qat.calibrate(learning, [inputs])
for network in (prepared, learning):
    searched.apply(network)
    qat.freeze(network)
lowered, learned = deploy.lower(prepared), deploy.lower(learning)
for one, other in zip(learned.tensors.values(), searched.graph.tensors.values(), strict=True):
    assert one.data is other.data is None or np.array_equal(one.data, other.data)
for one, other in zip(lowered.tensors.values(), searched.graph.tensors.values(), strict=True):
    assert one.quantization.equals(other.quantization)
    assert one.data is other.data is None or np.array_equal(one.data, other.data)
print(json.dumps([[part.alone, part.fine, part.cumulative, round(part.decibels, 2)] for part in found.parts]))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs exactqat[keras]")
def test_keras_finds_what_pytorch_finds(tmp_path: Any) -> None:
    path = tmp_path / "given.npz"
    np.savez(path, inputs=INPUTS, classes=CLASSES, first=WEIGHTS[0], last=WEIGHTS[1])
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    command = [sys.executable, "-c", PROGRAM, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    alike(json.loads(done.stdout.splitlines()[-1]), in_pytorch())
