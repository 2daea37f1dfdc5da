# SPDX-License-Identifier: Apache-2.0
"""One `prepare`, `calibrate` and `freeze` for the models of every framework."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from exactqat import deploy, qat  # noqa: E402

X = np.random.default_rng(0).random((8, 6), np.float32)
SETTINGS = ("rules", "device", "deployable", "keep_final_activation", "check")


def test_a_module_of_pytorch(tmp_path: Any) -> None:
    images = torch.from_numpy(X)
    model = qat.prepare(torch.nn.Linear(6, 3), images, device="micro")
    assert isinstance(model, qat.torch.PreparedModel) and model.profile == "micro"
    qat.calibrate(model, [images])
    qat.freeze(model)
    graph = deploy.lower(model.eval())
    path = deploy.write_tflite(graph, tmp_path / "m.tflite")
    assert deploy.verify(graph, path, device="micro", model=model, data=images).equal


def test_functions_and_modules_for_jax() -> None:
    jax = pytest.importorskip("jax")
    weights = {"w": np.ones((6, 3), np.float32)}

    def apply(params: Any, x: Any) -> Any:
        return jax.nn.relu(x @ params["w"])

    prepared = qat.prepare(apply, X, variables=weights)
    assert isinstance(prepared, qat.jax.Prepared)
    same = qat.jax.prepare(apply, weights, X)
    results = []
    for model in (prepared, same):
        params, state = model.calibrate(*model.init(), [X])
        params, state = model.freeze(params, state)
        results.append(np.asarray(model.apply(params, state, X)[0]))
    assert np.array_equal(*results)
    for function in (qat.calibrate, qat.freeze):
        with pytest.raises(
            TypeError, match="got Prepared, .*call its methods calibrate, freeze and lower with params and state"
        ):
            function(*((prepared, [X]) if function is qat.calibrate else (prepared,)))
    nnx = pytest.importorskip("flax.nnx")
    assert isinstance(qat.prepare(nnx.Linear(6, 3, rngs=nnx.Rngs(0)), X), qat.jax.Prepared)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs exactqat[keras]")
def test_a_model_of_keras() -> None:
    program = """
import keras, numpy as np
from exactqat import deploy, qat

x = np.random.default_rng(0).random((8, 6)).astype("float32")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
prepared = qat.prepare(model, rules=qat.Rule(weight_bits=4))
assert isinstance(prepared, qat.keras.PreparedModel)
qat.calibrate(prepared, [x])
qat.freeze(prepared)
codes = next(iter(deploy.simulate(graph := deploy.lower(prepared), deploy.input_codes(graph, x)).values()))
assert codes.shape == (8, 3)
"""
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: qat.prepare(5, X), "torch.nn.Module, a keras.Model, a Flax module or a function for JAX, got int"),
        (lambda: qat.prepare(torch.nn.Linear, X), "got the class Linear: give an instance"),
        (lambda: qat.prepare(torch.nn.Linear(6, 3)), r"prepare needs example.*qat.prepare\(model, images\[:2\]\)"),
        (lambda: qat.prepare(torch.nn.Linear(6, 3), X, variables={}), "variables are for functions of JAX"),
        (
            lambda: qat.prepare(lambda params, x: x, X),
            r"got function; for JAX give .*variables=params.*exactqat.qat.jax",
        ),
        (lambda: qat.calibrate(None, [X]), "got NoneType"),
        (lambda: qat.freeze(torch.nn.Linear(6, 3)), "must come from exactqat.qat.prepare, got Linear"),
    ],
)
def test_what_is_no_model_is_refused(call: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call()


def test_settings_have_the_same_names_and_defaults() -> None:
    """A setting that one framework calls otherwise is one that its users do not find."""
    kits = [qat.torch.prepare]
    if importlib.util.find_spec("jax"):
        kits.append(qat.jax.prepare)
    everywhere = inspect.signature(qat.prepare).parameters
    for kit in kits:
        own = inspect.signature(kit).parameters
        assert all(own[name].default == everywhere[name].default for name in SETTINGS), kit.__module__
        order = [name for name in own if name in SETTINGS]
        assert order == [name for name in everywhere if name in SETTINGS]
        assert all(own[name].kind is inspect.Parameter.KEYWORD_ONLY for name in SETTINGS[1:])


def test_warnings_name_the_users_line() -> None:
    """They pass through the surface and the kit, and the line in there helps nobody."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Softmax(-1))
    for prepare in (qat.prepare, qat.torch.prepare):
        with pytest.warns(qat.FinalActivationWarning) as caught:
            prepare(model, torch.from_numpy(X), [qat.Rule("nothing"), qat.Rule()])
        ours = [warning for warning in caught if issubclass(warning.category, UserWarning)]
        assert len(ours) >= 2 and {warning.filename for warning in ours} == {__file__}
