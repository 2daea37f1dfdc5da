# SPDX-License-Identifier: Apache-2.0
"""`qat.explain` and `exactqat check`: whether a model will go, in every framework, without training it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from exactqat import deploy, qat


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU6(), nn.Flatten(), nn.Linear(512, 10))


@pytest.mark.slow
def test_what_is_explained_is_what_is_lowered() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(4, 3, 16, 16)
    report = qat.explain(model, torch.zeros(1, 3, 16, 16), device="micro")
    assert report and report.device == "micro" and not report.refusal
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    prepared = qat.prepare(model, x, device="micro")
    qat.calibrate(prepared, [x])
    qat.freeze(prepared)
    graph = deploy.lower(prepared)
    assert report.graph is not None
    shown = [(operator.kind, report.graph.tensors[operator.outputs[0]].shape) for operator in report.graph.operators]
    assert shown == [(operator.kind, graph.tensors[operator.outputs[0]].shape) for operator in graph.operators]
    size = deploy.footprint(graph)
    assert report.footprint is not None
    assert report.footprint.multiply_accumulates == size.multiply_accumulates
    assert report.footprint.arena_bytes == size.arena_bytes
    assert "4 operators: 1 PAD, 1 CONV_2D, 1 RESHAPE, 1 FULLY_CONNECTED" in str(report)
    assert "13,824" in str(report) and "13,824" in report._repr_html_()


def test_random_numbers_of_the_user_stay() -> None:
    model = network()
    torch.manual_seed(1)
    np.random.seed(1)
    wanted = torch.rand(1), np.random.rand()
    torch.manual_seed(1)
    np.random.seed(1)
    qat.explain(model, torch.zeros(1, 3, 16, 16))
    assert (torch.rand(1), np.random.rand()) == wanted


def test_a_model_that_will_not_go() -> None:
    report = qat.explain(nn.Sequential(nn.Conv3d(3, 8, 3)), torch.zeros(1, 3, 9, 9, 9))
    assert not report and report.graph is None and report.rows() == []
    assert "cannot run on xnnpack-x86" in str(report) and "Conv3d over 3 axes" in str(report)


@pytest.mark.slow
def test_warnings_are_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Softmax(1))
    (sentence,) = qat.explain(model, torch.zeros(1, 4)).warnings
    assert "ends with softmax" in sentence
    report = qat.explain(model, torch.zeros(1, 4), keep_final_activation=True)
    assert not report.warnings and [row[0] for row in report.rows()] == ["FULLY_CONNECTED", "SOFTMAX"]


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (nn.Linear, {}, "got the class Linear"),
        (3, {}, "got int"),
        (nn.Linear(4, 3), {}, "needs example"),
        (nn.Linear(4, 3), {"example": torch.zeros(1, 4), "variables": {}}, "theirs with them"),
    ],
    ids=str,
)
def test_bad_arguments(model: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        qat.explain(model, **options)
    with pytest.raises(ValueError, match="must be one of xnnpack-x86"):
        qat.explain(model, **options, device="toaster")


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs exactqat[jax]")
def test_jax() -> None:
    import jax.numpy as jnp

    report = qat.explain(lambda weight, x: x @ weight, jnp.zeros((2, 4)), variables=jnp.ones((4, 3)))
    assert [row[0] for row in report.rows()] == ["FULLY_CONNECTED"]
    with pytest.raises(TypeError, match="variables=params"):
        qat.explain(lambda weight, x: x @ weight, jnp.zeros((2, 4)))


MODELS = """
from torch import nn

def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))

def as_train(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))

refused = nn.Sequential(nn.Conv3d(3, 8, 3))

def for_jax():
    import jax.numpy as jnp
    return (lambda weight, x: x @ weight), jnp.ones((4, 3))

def for_keras():
    import keras
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ("some_models:network --example 1x3x2x2", 0, "as 2 operators: 1 RESHAPE, 1 FULLY_CONNECTED"),
        ("some_models:refused --example 1x3x9x9x9 --device micro", 1, "Conv3d over 3 axes"),
        ("some_models:as_train --example 1x3x2x2 --classes 4", 0, "as 2 operators: 1 RESHAPE, 1 FULLY_CONNECTED"),
        ("some_models:network", 2, "--example SHAPE"),
        ("some_models:network --example 3,4", 2, "must be a shape such as"),
        ("some_models:missing", 2, "has no attribute 'missing'"),
        ("some_models", 2, "or 'package.module:function', got 'some_models'"),
        ("some_models:for_jax --example 2x4", 0, "as 1 operator: 1 FULLY_CONNECTED"),
        ("some_models:for_keras --device reference", 0, "runs on reference as 1 operator: 1 FULLY_CONNECTED"),
    ],
)
def test_the_command(arguments: str, status: int, words: str, tmp_path: Path) -> None:
    for package in ("jax", "keras"):
        if f"for_{package}" in arguments and importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    (tmp_path / "some_models.py").write_text(MODELS)
    command = [sys.executable, "-m", "exactqat", "check", *arguments.split()]
    environment = {**os.environ, "KERAS_BACKEND": "torch", "COLUMNS": "200"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == status, done.stderr
    assert words in (done.stderr if status == 2 else done.stdout)
