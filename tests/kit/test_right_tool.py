# SPDX-License-Identifier: Apache-2.0
"""What users hold of the kit goes to the right tool, or is refused in a sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from exactqat import deploy, qat  # noqa: E402

X = np.random.default_rng(0).random((8, 6), np.float32)


def test_what_errors_and_reports_are_made_of_is_exported() -> None:
    for name in ("Comparison", "MissingData", "Refusal", "RuntimeRefusal", "device_codes"):
        assert name in deploy.__all__
        assert getattr(deploy, name).__doc__
    assert qat.MissingData is deploy.MissingData
    model = qat.prepare(torch.nn.Linear(6, 3), torch.from_numpy(X))
    with pytest.raises(qat.MissingData, match="seen no data"):
        qat.freeze(model)


def test_methods_that_read_values_are_refused_within_transformations_of_jax() -> None:
    jax = pytest.importorskip("jax")
    prepared = qat.prepare(lambda params, x: x @ params["w"], X, variables={"w": np.ones((6, 3), np.float32)})
    begun = prepared.init()
    ready = prepared.calibrate(*begun, [X])
    frozen = prepared.freeze(*ready)
    with pytest.raises(TypeError, match="calibrate reads the values .* call it outside"):
        jax.jit(lambda params, state: prepared.calibrate(params, state, [X]))(*begun)
    with pytest.raises(TypeError, match="calibrate reads the values .* call it outside"):
        jax.jit(lambda batch: prepared.calibrate(*begun, [batch]))(X)
    with pytest.raises(TypeError, match="freeze reads the values .* call it outside"):
        jax.jit(prepared.freeze)(*ready)
    with pytest.raises(TypeError, match="freeze reads the values .* call it outside"):
        jax.vmap(prepared.freeze)(*jax.tree.map(lambda leaf: np.stack([leaf, leaf]), ready))
    with pytest.raises(TypeError, match="lower reads the values .* call it outside"):
        jax.jit(prepared.lower)(*frozen)


def test_functions_for_jax_need_their_parameters_by_name() -> None:
    jax = pytest.importorskip("jax")
    weights = {"w": np.ones((6, 3), np.float32)}

    def apply(params: Any, x: Any) -> Any:
        return jax.nn.relu(x @ params["w"])

    for arguments in ((X,), (weights, X)):
        with pytest.raises(TypeError, match=r"qat.prepare\(model, example, variables=params\)"):
            qat.prepare(apply, *arguments)
    prepared = qat.jax.prepare(apply, weights, X)
    for again in (lambda: qat.prepare(prepared, X), lambda: qat.jax.prepare(prepared, X)):
        with pytest.raises(ValueError, match="model is prepared already"):
            again()


def test_states_travel_by_flax_and_networks_by_jax_export() -> None:
    jax = pytest.importorskip("jax")
    serialization = pytest.importorskip("flax.serialization")
    from jax import export

    weights = {"w": np.linspace(-1, 1, 18, dtype=np.float32).reshape(6, 3)}
    prepared = qat.prepare(lambda params, x: x @ params["w"], X, variables=weights, device=None)
    ready = prepared.calibrate(*prepared.init(), [X])
    for params, state in (ready, prepared.freeze(*ready)):
        again = serialization.from_bytes((params, state), serialization.to_bytes((params, state)))
        assert again[1].frozen == state.frozen and again[1].calibrated
        run = jax.jit(lambda params, x, state=state: prepared.apply(params, state, x)[0])
        allowed = [export.DisabledSafetyCheck.custom_call("exactqat")]
        restored = export.deserialize(export.export(run, disabled_checks=allowed)(params, X).serialize())
        assert np.array_equal(restored.call(params, X), run(again[0], X))
