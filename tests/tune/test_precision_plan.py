# SPDX-License-Identifier: Apache-2.0
"""The precision plan: the only one that keeps to the budgets is found, its file is as promised, and its rules train to
the same plan."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from networks import examples  # noqa: E402

from exactqat import deploy, qat, tune  # noqa: E402
from exactqat.deploy.formats.tflite import tflite_bytes  # noqa: E402
from exactqat.kit.planning.rule_text import parse_rules, rules_text  # noqa: E402
from exactqat.tune.budgets import Budgets  # noqa: E402

IMAGES, CLASSES = examples(512, 0)
DATA = examples(256, 1)
CANDIDATES = 24


class Uneven(torch.nn.Module):
    """`first` stores values beside one that is far larger, which `mix` drops: both need 16 bits. `spread` stores most,
    `bulk` has most of the weights. Beside the largest weight of `last`, in 4 bits none is left of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(1, 8, 3, padding=1)
        self.mix = torch.nn.Conv2d(8, 8, 1)
        self.spread = torch.nn.Conv2d(8, 96, 1)
        self.pool = torch.nn.AvgPool2d(4)
        self.bulk = torch.nn.Conv2d(96, 16, 2)
        self.last = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.mix(torch.relu(self.first(x))))
        x = torch.relu(self.bulk(self.pool(torch.relu(self.spread(x)))))
        return self.last(x.flatten(1))


@functools.cache
def _weights() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Uneven()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        with torch.no_grad():
            model.mix.weight[:, 7] = 0
            model.bulk.weight[15], model.bulk.bias[15] = 0, 1
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(torch.from_numpy(IMAGES)), torch.from_numpy(CLASSES)).backward()
        optimizer.step()
    with torch.no_grad():
        model.mix.weight[:, 7] = 0
        model.bulk.weight[15], model.bulk.bias[15] = 0, 1
        model.first.weight[7], model.first.bias[7] = 0, 6000
        # What the result that is always 1 adds, the bias takes away.
        large = 30 * model.last.weight.abs().max()
        model.last.bias.sub_(large - model.last.weight[:, 15])
        model.last.weight[:, 15] = large
    return model.state_dict()


def uneven() -> Uneven:
    model = Uneven()
    model.load_state_dict(_weights())
    return model.eval()


def calibrated(*rules: qat.Rule, device: str = "reference", model: Any = None) -> Any:
    example = torch.from_numpy(IMAGES[:2])
    prepared = qat.prepare(uneven() if model is None else model, example, list(rules) or [qat.Rule()], device=device)
    qat.calibrate(prepared, [torch.from_numpy(IMAGES)])
    return prepared


@pytest.fixture(scope="module")
def found() -> tune.PrecisionPlan:
    return tune.plan(calibrated(), DATA, max_drop="4%", flash=11000, arena="12k", candidates=CANDIDATES)


def bits_of(plan: Any) -> dict[str, tuple[int | None, int | None]]:
    """Of a prepared model's plan, by layer."""
    return {row.path: (row.weight_bits, row.bits) for row in plan.rows() if row.weight_bits is not None}


# --- a budget that only a mixed plan meets ------------------------------------------------------------------------


@pytest.mark.slow
def test_only_a_mixed_plan_keeps_to_the_budgets_and_is_found(found: tune.PrecisionPlan, tmp_path: Path) -> None:
    pytest.importorskip("tflite_micro")
    assert found and found.budgets == Budgets(0.04, 11000, 12 * 1024)
    layers = {"first": (8, 16), "mix": (8, 16), "spread": (4, 8), "bulk": (4, 8), "last": (8, 8)}
    assert bits_of(found.candidate.plan) == layers
    # No plan with the same bits everywhere does.
    for weights in (4, 8):
        for result in (8, 16):
            prepared = calibrated(qat.Rule(weight_bits=weights, activation_bits=result))
            qat.freeze(prepared)
            graph = deploy.packed(deploy.lower(prepared))
            score, footprint = tune.gate(graph, DATA, minimum=0).score, deploy.footprint(graph)
            costs = {"flash": footprint.flash_bytes, "arena": footprint.arena_bytes}
            assert found.budgets.excess(costs, found.reference - score)
    assert found.even is None and found.to_train == (found.chosen,)
    # What is promised is so: on the file.
    path = deploy.write_tflite(found.graph, tmp_path / "model.tflite")
    measured = deploy.footprint(found.graph, path.read_bytes())
    assert path.stat().st_size == measured.flash_bytes == found.chosen.flash <= 11000
    assert measured.arena_bytes == found.chosen.arena <= 12 * 1024
    report = deploy.verify(found.graph, path, data=DATA[0][:64])
    assert report.values > 0 and not report.differing
    assert tune.gate(found.graph, DATA, minimum=0).score == found.chosen.metric >= found.reference - 0.04


@pytest.mark.slow
def test_its_rules_train_to_the_same_plan(found: tune.PrecisionPlan, tmp_path: Path) -> None:
    rules = qat.load_rules(found.save_rules(tmp_path / "rules.txt"))
    assert rules == found.rules
    prepared = calibrated(*rules)
    assert bits_of(prepared.plan) == bits_of(found.candidate.plan)
    optimizer = torch.optim.Adam(prepared.parameters(), 1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        logits = prepared(torch.from_numpy(IMAGES))
        torch.nn.functional.cross_entropy(logits, torch.from_numpy(CLASSES)).backward()
        optimizer.step()
    qat.freeze(prepared)
    content = tflite_bytes(deploy.packed(deploy.lower(prepared)))
    assert len(content) == found.chosen.flash


@pytest.mark.slow
def test_the_answer_is_the_same_again_and_with_an_executor(found: tune.PrecisionPlan) -> None:
    with ThreadPoolExecutor(2) as threads:
        again = tune.plan(
            calibrated(), DATA, max_drop="4%", flash=11000, arena="12k", candidates=CANDIDATES, executor=threads
        )
    assert again.points == found.points and again.chosen == found.chosen


@pytest.mark.slow
def test_what_was_found_is_shown(found: tune.PrecisionPlan) -> None:
    text = found.text()
    assert max(map(len, text.splitlines())) <= 80 and "bulk" in text and "10,904 bytes of flash" in text
    assert parse_rules(rules_text(found.rules)) == found.rules
    content = json.loads(found.as_json())
    assert content["met"] and parse_rules(content["chosen"]["rules"]) == found.rules
    assert found.chosen in found.front and "<table" in found._repr_html_()


@pytest.mark.slow
def test_the_smallest_that_loses_little() -> None:
    """Without a budget of memory: as few bits as the metric allows, and no more 16 bits than needed."""
    plan = tune.plan(calibrated(), DATA, max_drop=0.04, candidates=40)
    assert plan and plan.drop <= 0.04
    bits = bits_of(plan.candidate.plan)
    assert bits["last"] == (8, 8) and bits["first"][1] == bits["mix"][1] == 16 and bits["spread"][1] == 8


@pytest.mark.slow
def test_budgets_that_cannot_be_met_say_what_is_nearest() -> None:
    plan = tune.plan(calibrated(), DATA, flash="4k", candidates=8)
    assert not plan and set(plan.missed) == {"flash"}
    assert plan.missed["flash"] == plan.chosen.flash - 4096 == min(point.flash for point in plan.points) - 4096
    assert "No plan that was found keeps to the budgets (flash bytes at most 4,096)" in plan.sentence()
    assert f"{plan.chosen.flash - 4096:,} flash bytes too many" in plan.text().replace("\n", " ")


@pytest.mark.slow
def test_multiply_adds() -> None:
    plain = tune.plan(calibrated(), DATA, multiply_adds="1G", candidates=1)
    assert plain and plain.chosen.metric > plain.reference - 0.05
    plan = tune.plan(calibrated(), DATA, multiply_adds=40_000, keep=["input", "last"], candidates=12)
    assert plan and plan.chosen.multiply_adds <= 40_000
    assert bits_of(plan.candidate.plan)["last"] == (8, 8)


@pytest.mark.slow
def test_the_same_bits_everywhere_are_trained_too_where_they_keep_to_the_budgets() -> None:
    prepared = calibrated(qat.Rule(weight_bits=4))
    work = tune.plan(prepared, DATA, multiply_adds="1G", weight_bits=[4], activation_bits=[8], candidates=1).chosen
    plan = tune.plan(calibrated(), DATA, multiply_adds=work.multiply_adds, activation_bits=[4, 8], candidates=12)
    assert plan and plan.even is not None and plan.to_train == (plan.chosen, plan.even)
    assert set(bits_of(calibrated(*plan.even.rules).plan).values()) == {(4, 8)} != bits_of(plan.candidate.plan)
    qat.freeze(prepared)
    graph = deploy.packed(deploy.lower(prepared))
    assert (tune.gate(graph, DATA, minimum=0).score, len(tflite_bytes(graph))) == (plan.even.metric, plan.even.flash)
    text = plan.text()
    assert "Train this one too" in text and rules_text(plan.even.rules) in text
    assert parse_rules(json.loads(plan.as_json())["even"]["rules"]) == plan.even.rules
    # Where the smallest is wanted, it is the only one.
    assert tune.plan(calibrated(), DATA, max_drop=0.5, candidates=6).to_train[1:] == ()


@pytest.mark.slow
def test_a_result_keeps_its_bits_and_its_layer_s_weights_do_not() -> None:
    rules = qat.Rule("last", activation_bits=16), qat.Rule()
    settings: dict[str, Any] = {"weight_bits": [4], "activation_bits": [8], "flash": "1M", "candidates": 1}
    for keep, bits in (("last (result)", (4, 16)), ("last (weights)", (8, 8)), ("last", (8, 16))):
        plan = tune.plan(calibrated(*rules), DATA, keep=[keep], **settings)
        assert bits_of(plan.candidate.plan)["last"] == bits
    with pytest.raises(ValueError, match=r"keep names 'last \(bias\)', which matches no layer; there are input, first"):
        tune.plan(calibrated(), DATA, keep=["last (bias)"], **settings)


# --- budgets and bits in words --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "budgets"),
    [
        ({"flash": "256k"}, Budgets(flash=262144)),
        ({"flash": "1.5 KiB", "arena": 2048}, Budgets(flash=1536, arena=2048)),
        ({"max_drop": "0.5%"}, Budgets(max_drop=0.005)),
        ({"max_drop": 0.1, "multiply_adds": "2.5M"}, Budgets(max_drop=0.1, multiply_adds=2_500_000)),
    ],
)
def test_budgets_have_units(settings: dict[str, Any], budgets: Budgets) -> None:
    assert Budgets.of(**settings) == budgets


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "nothing is asked: give at least one of max_drop, flash"),
        ({"flash": "256kb"}, r"flash must be bytes, such as 256k or 262144, got '256kb' \(the units are B, k"),
        ({"flash": "10%"}, "flash must be bytes.*got '10%'"),
        ({"arena": "64 parsecs"}, r"arena must be bytes.*the units are B, k, K, kB, KB, KiB, M, MB, MiB\)"),
        ({"arena": 0}, "arena must be bytes, such as 64k or 65536, got 0"),
        ({"arena": True}, "arena must be bytes, such as 64k or 65536, got True"),
        ({"flash": 0.25}, "flash must be bytes, such as 256k or 262144, got 0.25"),
        ({"multiply_adds": "2MB"}, "multiply_adds must be a count, such as 10M, got '2MB' .the units are k, K, M, G"),
        ({"multiply_adds": "lots"}, "multiply_adds must be a count, such as 10M, got 'lots'"),
        ({"max_drop": "2k"}, r"max_drop must be in the metric's own unit.*got '2k' \(the units are %\)"),
        ({"max_drop": -1}, "max_drop must be in the metric's own unit"),
    ],
)
def test_wrong_units_are_refused_in_words(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune.plan(None, None, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight_bits": [16]}, "weight_bits must be bits from 2 to 8, as no file holds weights of more, got .16."),
        ({"activation_bits": [12]}, "activation_bits must be bits from 2 to 8, or 16, got .12."),
        ({"weight_bits": []}, "weight_bits must be bits"),
        ({"candidates": 0}, "candidates must be a number of plans, 1 or more, got 0"),
    ],
)
def test_bits_that_no_device_has_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune.plan(None, None, flash=1, **settings)


# --- weights of four bits in a file ---------------------------------------------------------------------------------


class Slopes(torch.nn.Module):
    """In 16 bits a PReLU is other operators than in 8, with constants of their own, made of the user's in PyTorch."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.view, self.first, self.last = view, torch.nn.Conv2d(1, 6, 3), torch.nn.Conv2d(6, 4, 3)
        self.slopes = torch.nn.Parameter(torch.linspace(0.1, 0.6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.view:
            x = torch.where(x > 0, x, x * self.slopes.view(1, -1, 1, 1))
        else:
            x = torch.nn.functional.prelu(x, self.slopes)
        return self.last(x).mean((2, 3))


@pytest.mark.parametrize("view", [False, True])
def test_layers_that_are_other_operators_with_other_bits_are_planned(view: bool) -> None:
    torch.manual_seed(0)
    model, images = Slopes(view).eval(), torch.from_numpy(DATA[0])

    def with_rules(rules: Any) -> Any:
        prepared = qat.prepare(model, images[:2], rules)
        qat.calibrate(prepared, [images])
        return prepared

    prepared = with_rules([qat.Rule()])
    plan = tune.plan(prepared, DATA, flash="1M", candidates=8)
    assert not plan.left_out
    finest = max(plan.points, key=lambda point: sum(rule.activation_bits for rule in point.rules))
    again = with_rules(finest.rules)
    assert {"below", "scaled", "above"} <= {step.path.rpartition("_")[2] for step in again.plan.steps}
    qat.freeze(again)
    graph = deploy.packed(deploy.lower(again))
    outputs = deploy.output_values(graph, deploy.simulate(graph, deploy.input_codes(graph, DATA[0])))
    assert tune.accuracy(next(iter(outputs.values())), DATA[1]) == finest.metric
    tune.search(prepared, DATA, budget=30).apply(prepared)


def test_weights_of_four_bits_are_packed_where_devices_compute_the_same() -> None:
    prepared = calibrated(qat.Rule(weight_bits=4), device="reference")
    qat.freeze(prepared)
    graph = deploy.lower(prepared)

    def of_four_bits(network: deploy.Graph) -> set[str]:
        return {name.removesuffix("/filter") for name, tensor in network.tensors.items() if tensor.dtype == "int4"}

    assert of_four_bits(deploy.packed(graph)) == {"first", "mix", "spread", "bulk", "last"}
    # TFLite-Micro has FULLY_CONNECTED in four bits with one scale only.
    assert of_four_bits(deploy.packed(graph, "micro")) == {"first", "mix", "spread", "bulk"}
    assert deploy.packed(graph, "xnnpack-x86") is graph
    packed, plain = deploy.packed(graph), tflite_bytes(graph, packed=False)
    assert tflite_bytes(packed) == tflite_bytes(graph) and len(tflite_bytes(graph)) < len(plain) - 3400
    codes = deploy.input_codes(graph, DATA[0][:16])
    for device in ("reference", "micro"):
        one, other = (deploy.simulate(network, codes, device) for network in (graph, deploy.packed(graph, device)))
        assert all(np.array_equal(one[name], other[name]) for name in one)


# --- JAX and Keras --------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(0, 1, (256, 6)).astype(np.float32)
WEIGHTS = [RNG.normal(0, 1, (6, 64)).astype(np.float32), RNG.normal(0, 1, (64, 3)).astype(np.float32)]
LABELS = (np.maximum(INPUTS @ WEIGHTS[0], 0) @ WEIGHTS[1]).argmax(1)
ASKED = {"flash": 2600, "max_drop": 0.1}


def described(plan: tune.PrecisionPlan, trained: Any, flash: int) -> list[Any]:
    """What must be the same from each framework."""
    bits = list(bits_of(trained).values())
    assert bits == list(bits_of(plan.candidate.plan).values())
    return [bool(plan), plan.chosen.layers, plan.chosen.metric, [list(pair) for pair in bits], flash <= 2600]


@functools.cache
def in_pytorch() -> list[Any]:
    model = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    with torch.no_grad():
        for layer, weight in zip((model[0], model[2]), WEIGHTS, strict=True):
            layer.weight.copy_(torch.from_numpy(weight.T.copy()))
            layer.bias.zero_()
    inputs = torch.from_numpy(INPUTS)
    prepared = qat.prepare(model, inputs[:2], device="reference")
    qat.calibrate(prepared, [inputs])
    plan = tune.plan(prepared, (INPUTS, LABELS), **ASKED)
    trained = qat.prepare(model, inputs[:2], plan.rules, device="reference")
    qat.calibrate(trained, [inputs])
    qat.freeze(trained)
    return described(plan, trained.plan, len(tflite_bytes(deploy.packed(deploy.lower(trained)))))


@pytest.mark.campaign
def test_jax_finds_and_trains_the_same_plan() -> None:
    jax = pytest.importorskip("jax")

    def apply(params: Any, x: Any) -> Any:
        return jax.nn.relu(x @ params["first"]) @ params["last"]

    variables = {"first": WEIGHTS[0], "last": WEIGHTS[1]}
    prepared = qat.prepare(apply, INPUTS[:2], variables=variables, device="reference")
    params, state = prepared.calibrate(*prepared.init(), [INPUTS])
    plan = tune.plan((prepared, params, state), (INPUTS, LABELS), **ASKED)
    trained = qat.prepare(apply, INPUTS[:2], plan.rules, variables=variables, device="reference")
    params, state = trained.calibrate(*trained.init(), [INPUTS])

    def loss(params: Any, state: Any) -> tuple[Any, Any]:
        logits, state = trained.apply(params, state, INPUTS, train=True)
        return -jax.nn.log_softmax(logits)[np.arange(len(LABELS)), LABELS].mean(), state

    gradients, state = jax.grad(loss, has_aux=True)(params, state)
    params = jax.tree.map(lambda value, slope: value - 1e-3 * slope, params, gradients)
    graph = trained.lower(*trained.freeze(params, state))
    assert described(plan, trained.plan, len(tflite_bytes(deploy.packed(graph, "reference")))) == in_pytorch()


PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import keras, numpy as np
from test_precision_plan import ASKED, INPUTS, LABELS, WEIGHTS, described
from exactqat import deploy, qat, tune
from exactqat.deploy.formats.tflite import tflite_bytes

model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(3)])
for layer, weight in zip(model.layers, WEIGHTS):
    layer.set_weights([weight, np.zeros(weight.shape[1], "float32")])
prepared = qat.prepare(model, device="reference")
qat.calibrate(prepared, [INPUTS])
found = tune.plan(prepared, (INPUTS, LABELS), **ASKED)
trained = qat.prepare(model, rules=found.rules, device="reference")
qat.calibrate(trained, [INPUTS])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
trained.compile(keras.optimizers.SGD(1e-3), loss)
trained.fit(INPUTS, LABELS, epochs=1, verbose=0)
qat.freeze(trained)
print(json.dumps(described(found, trained.plan, len(tflite_bytes(deploy.packed(deploy.lower(trained)))))))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs exactqat[keras]")
def test_keras_finds_and_trains_the_same_plan() -> None:
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == in_pytorch()
