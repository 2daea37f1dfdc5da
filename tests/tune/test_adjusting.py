# SPDX-License-Identifier: Apache-2.0
"""Batch norms re-estimated, biases corrected, weights rounded and channels equalized without a search."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from networks import examples, trained  # noqa: E402

from exactqat import deploy, qat, tune  # noqa: E402
from exactqat.tune.metrics import Data, decibels  # noqa: E402
from exactqat.tune.network import Candidate  # noqa: E402
from exactqat.tune.search import METHODS  # noqa: E402
from exactqat.tune.variants import Observer  # noqa: E402

IMAGES, CLASSES = examples(256, 0)
OTHERS = examples(256, 7)[0]
CALLS = [qat.reestimate, qat.correct_biases, qat.round_weights]


def calibrated(model: Any, **rule: Any) -> Any:
    prepared = qat.prepare(model, torch.from_numpy(IMAGES[:2]), [qat.Rule(**rule)])
    qat.calibrate(prepared, [torch.from_numpy(IMAGES)])
    return prepared


def signal(model: Any, prepared: Any) -> float:
    """Against the float network, of examples that nothing was chosen by, once frozen."""
    qat.freeze(prepared)
    graph = deploy.lower(prepared)
    codes = deploy.simulate(graph, deploy.input_codes(graph, OTHERS), "xnnpack")
    (values,) = deploy.output_values(graph, codes).values()
    with torch.no_grad():
        return decibels({"": model(torch.from_numpy(OTHERS)).numpy()}, {"": values})


@pytest.mark.parametrize("adjust", CALLS, ids=lambda call: call.__name__)
def test_the_model_takes_over_what_a_search_tries(adjust: Any) -> None:
    prepared = calibrated(trained(), weight_bits=3)
    start = Candidate.of(prepared).settled()
    before = {name: values.copy() for name, values in start.tensors.items()}
    _, method = METHODS[
        {"reestimate": "batch_norm", "correct_biases": "bias", "round_weights": "rounding"}[adjust.__name__]
    ]
    assert method is not None
    ((_, wanted, *_),) = method(start, Observer(start, Data(IMAGES, False)))
    assert adjust(prepared, IMAGES) is prepared
    found = Candidate.of(prepared)
    assert any(not np.array_equal(found.tensors[name], values) for name, values in before.items())
    for name, values in wanted.tensors.items():
        assert np.array_equal(found.tensors[name], values), name


@pytest.mark.parametrize("adjust", CALLS[1:], ids=lambda call: call.__name__)
def test_fewer_bits_cost_less_afterwards(adjust: Any) -> None:
    model = trained()
    before = signal(model, calibrated(model, weight_bits=3))
    assert signal(model, adjust(calibrated(model, weight_bits=3), IMAGES)) > before + 0.5


def test_they_follow_one_another_and_take_what_a_loader_gives() -> None:
    model = trained()
    prepared = calibrated(model, weight_bits=3)
    loader = [(torch.from_numpy(IMAGES[at : at + 64]), CLASSES[at : at + 64]) for at in range(0, 256, 64)]
    for adjust in CALLS:
        adjust(prepared, loader)
    # In decibels; training differs in its last bits between processors, and with it what there is to win.
    assert signal(model, prepared) > signal(model, calibrated(model, weight_bits=3)) + 1


def test_equalized_channels_are_alike() -> None:
    model = trained()
    factors = torch.tensor([1, 8, 0.25, 32, 1, 0.125, 4, 1.0])
    with torch.no_grad():
        model.norm.weight.mul_(factors)
        model.norm.bias.mul_(factors)
        model.second.weight.div_(factors[None, :, None, None])
    before = signal(model, calibrated(model))
    assert signal(model, qat.equalize(calibrated(model), IMAGES)) > before + 6


def test_what_cannot_be_adjusted_is_refused() -> None:
    prepared = calibrated(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(IMAGES[0].size, 4)))
    with pytest.raises(ValueError, match="the network has no layers for this .batch norms."):
        qat.reestimate(prepared, IMAGES)
    qat.freeze(prepared)
    with pytest.raises(ValueError, match="a frozen model takes over no ranges: do it before freeze"):
        qat.correct_biases(prepared, IMAGES)
    with pytest.raises(TypeError, match="model must come from exactqat.qat.prepare"):
        qat.reestimate(trained(), IMAGES)


def test_in_jax_parameters_and_state_are_returned() -> None:
    jax = pytest.importorskip("jax")
    generator = np.random.default_rng(0)
    x = generator.normal(0, 1, (256, 16)).astype(np.float32)
    params = {"w": generator.normal(0, 1, (16, 8)), "v": generator.normal(0, 1, (8, 4)), "scale": np.ones(8)}
    params |= {"bias": np.zeros(8), "mean": np.zeros(8), "var": np.full(8, 16.0)}
    params = {name: np.asarray(value, np.float32) for name, value in params.items()}

    def apply(p: Any, x: Any) -> Any:
        y = qat.jax.batch_norm(x @ p["w"], p["scale"], p["bias"], p["mean"], p["var"], momentum=0.9, epsilon=1e-3)
        return jax.nn.relu(y) @ p["v"]

    prepared = qat.jax.prepare(apply, params, x[:2], rules=[qat.Rule(weight_bits=3)])
    start = prepared.calibrate(*prepared.init(), [x])
    targets = np.zeros(len(x), int)

    def noise(params: Any, state: Any) -> float:
        return tune.search((prepared, params, state), (x, targets), budget=1).before.decibels

    for adjust in CALLS:
        new = adjust((prepared, *start), x)
        assert not np.array_equal(new[0]["model"]["bias"], start[0]["model"]["bias"]), adjust.__name__
        prepared.lower(*prepared.freeze(*new))
    # The last one rounds weights.
    assert noise(*new) > noise(*start) + 0.5
