# SPDX-License-Identifier: Apache-2.0
"""The layer that was broken by hand is found first, in five ways of breaking it: PyTorch, JAX, Keras, files."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from broken import Layer, breakings, made, require_found_first

from exactqat import deploy, qat
from exactqat.tune.network import Candidate


def of_pytorch(layers: Sequence[Layer], inputs: np.ndarray) -> Candidate:
    torch = pytest.importorskip("torch")
    modules: list[Any] = []
    for weight, bias in layers:
        module = torch.nn.Linear(*weight.shape)
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(weight.T.copy()))
            module.bias.copy_(torch.from_numpy(bias))
        modules += [module, torch.nn.ReLU()]
    prepared = qat.prepare(torch.nn.Sequential(*modules[:-1]), torch.from_numpy(inputs[:2]))
    qat.calibrate(prepared, [torch.from_numpy(inputs)])
    return Candidate.of(prepared)


def of_jax(layers: Sequence[Layer], inputs: np.ndarray) -> Candidate:
    jax = pytest.importorskip("jax")

    def apply(params: Any, x: Any) -> Any:
        for number in range(len(layers)):
            x = x @ params[f"weight{number}"] + params[f"bias{number}"]
            x = jax.nn.relu(x) if number + 1 < len(layers) else x
        return x

    variables = {
        f"{name}{at}": array
        for at, pair in enumerate(layers)
        for name, array in zip(("weight", "bias"), pair, strict=True)
    }
    prepared = qat.prepare(apply, inputs[:2], variables=variables)
    params, state = prepared.calibrate(*prepared.init(), [inputs])
    return Candidate.of((prepared, params, state))


@pytest.mark.parametrize("way", list(breakings()))
def test_pytorch_finds_it_first(way: str) -> None:
    broken = breakings()[way]
    require_found_first(made(of_pytorch, broken), broken)


@pytest.mark.parametrize("way", list(breakings()))
def test_jax_finds_it_first(way: str) -> None:
    broken = breakings()[way]
    require_found_first(made(of_jax, broken), broken)


@pytest.mark.parametrize("way", [way for way, broken in breakings().items() if broken.in_files])
def test_it_is_found_first_in_a_file(way: str, tmp_path: Path) -> None:
    broken = breakings()[way]
    path = deploy.write_tflite(made(of_pytorch, broken).graph(), tmp_path / "model.tflite")
    require_found_first(deploy.read_tflite(path), broken, device="xnnpack-x86")


PROGRAM = """
import keras
from broken import require_all_found_first
from exactqat import qat
from exactqat.tune.network import Candidate

def build(layers, inputs):
    dense = [keras.layers.Dense(weight.shape[1], activation="relu" if at + 1 < len(layers) else None)
             for at, (weight, _) in enumerate(layers)]
    model = keras.Sequential([keras.Input(inputs.shape[1:]), *dense])
    for made, given in zip(dense, layers):
        made.set_weights(list(given))
    prepared = qat.prepare(model)
    qat.calibrate(prepared, [inputs])
    return Candidate.of(prepared)

require_all_found_first(build)
"""


@pytest.mark.campaign
@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs exactqat[keras]")
def test_keras_finds_it_first() -> None:
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_five_ways_are_those_of_the_page() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "tune.md").read_text("utf-8")
    listed = page.split("The reasons are")[1].split("The metric is any")[0]
    assert listed.count("\n- *") == len(breakings()) == 5
