# SPDX-License-Identifier: Apache-2.0
"""The self-check of `prepare`: what it refuses, what it lets pass, and that it leaves everything as it was."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from exactqat.kit.planning.network import Network
from exactqat.qat.capture import proof
from exactqat.qat.capture.proof import Evidence, Subject, Trial, example_rows, nudged, prove, relative_error

torch = pytest.importorskip("torch")
nn = torch.nn
qat = pytest.importorskip("exactqat.qat")


# --- the core, without a framework ------------------------------------------------------------------------------------


class Sides(Subject):
    """An original y = w * x and a captured network that is wrong in one thing."""

    def __init__(self, wrong: str = "", noise: float = 0.0, fails: str = "", trains: bool = True) -> None:
        network = Network((), (), {}, {}, ())
        super().__init__(network, [np.ones((2, 5), np.float32)], [0], trains)
        self.wrong, self.noise, self.fails = wrong, noise, fails
        self.weight = np.linspace(1, 2, 5, dtype=np.float32)

    def evidence(self, trial: Trial, x: np.ndarray, weight: np.ndarray, wrong: str) -> Evidence:
        y = x * weight
        if wrong == "far":
            y = np.clip(y, -1e4, 1e4)
        if wrong == "batch":
            y = y * (1 + (trial.examples == 3))
        if wrong == "one":
            y = y + (trial.examples == 1)
        if wrong == "small":
            y = y * (1 + 1e-3 * (trial.scale < 1))
        gradient = (x * proof.cotangent("y", y.shape)).sum(0)
        state = {"mean": y.mean(0) if trial.training and wrong != "state" else np.zeros(5, np.float32)}
        if wrong == "some inputs" and trial.draw == 0:
            gradient = gradient * 1.01
        if wrong == "nan":
            y[0, 0] = np.nan
        gradients = {"w": gradient * (-1 if wrong == "gradient" else 1)} if wrong != "no gradient" else {}
        return Evidence({"y": y}, gradients if trial.gradients else {}, state)

    def original(self, trial: Trial, inputs: Sequence[np.ndarray], nudge: int) -> Evidence:
        if self.fails == "original" or self.fails == "original's training" and trial.training:
            raise ValueError("no")
        weight = nudged(self.weight, "w", nudge) + np.float32(self.noise * nudge)
        return self.evidence(trial, inputs[0], weight, "")

    def captured(self, trial: Trial, inputs: Sequence[np.ndarray]) -> Evidence:
        if self.fails == "captured":
            raise RuntimeError("no")
        return self.evidence(trial, inputs[0], self.weight * np.float32(1 + self.noise), self.wrong)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("batch", "3 examples"),
        ("one", "evaluation, 1 example,"),
        ("small", "inputs 0.015625 times as large"),
        ("state", "buffer 'mean'"),
        ("gradient", "gradient of 'w' differs by 2 "),
        ("no gradient", "gradient of 'w' differs by 1 "),
        ("nan", "result 'y' is not the same"),
        ("far", "inputs 1e+06 times as large"),
    ],
)
def test_what_differs_is_refused(wrong: str, words: str) -> None:
    assert words in prove(Sides(wrong)).refusal


def test_what_is_equal_passes_and_is_counted() -> None:
    verdict = prove(Sides())
    assert not verdict.refusal and not verdict.missing and not verdict.undecided
    assert len(verdict.trials) == 8 and verdict.tensors == 17 and verdict.largest == (0, "")
    assert str(verdict).startswith("17 results, gradients and buffers of 8 runs equal to float32 rounding; 0.")


def test_what_the_original_does_by_itself_is_rounding() -> None:
    assert not prove(Sides(noise=1e-3)).refusal
    assert prove(Sides("gradient", noise=1e-3)).refusal


def test_what_becomes_of_denormal_numbers_is_rounding() -> None:
    class Tiny(Sides):
        def evidence(self, trial: Trial, x: np.ndarray, weight: np.ndarray, wrong: str) -> Evidence:
            y = np.full(5, 6e-36, np.float32) + np.float32(6e-39 if wrong else 0)
            return Evidence({"y": y})

    verdict = prove(Tiny("flushed"))
    assert not verdict.refusal and "too small for float32" in verdict.undecided[0]


def test_what_differs_for_one_input_only_is_rounding() -> None:
    assert not prove(Sides("some inputs")).refusal


def test_inputs_that_do_not_run_excuse_nothing() -> None:
    class Picky(Sides):
        def original(self, trial: Trial, inputs: Sequence[np.ndarray], nudge: int) -> Evidence:
            if trial.draw:
                raise ValueError("not these")
            return super().original(trial, inputs, nudge)

    assert prove(Picky("gradient")).refusal
    assert not prove(Picky()).refusal


def test_sides_that_do_not_run() -> None:
    assert "RuntimeError: no" in prove(Sides(fails="captured")).refusal
    assert "original raises ValueError" in prove(Sides(fails="original")).missing
    assert prove(Sides(fails="original's training")).missing
    assert not prove(Sides(trains=False)).missing


def test_relative_errors() -> None:
    a = np.array([1.0, 2.0, np.nan, np.inf], np.float32)
    assert relative_error(a, a) == 0
    assert relative_error(a, a[::-1].copy()) == np.inf
    assert relative_error(a, a[:2]) == np.inf
    assert relative_error(np.zeros(2), np.zeros(2)) == 0
    assert relative_error(np.zeros(2), np.full(2, 1e-9)) == np.inf
    assert relative_error(np.zeros(2), np.full(2, 1e-9), tiny=1) == pytest.approx(1e-9)
    assert relative_error(np.array([2, 3]), np.array([2, 4])) == pytest.approx(1 / 3)


def test_inputs_are_the_examples_own_but_vary() -> None:
    trial = Trial(True, 4)
    example = np.array([[3.0, 4.0], [5.0, 6.0]], np.float32)
    rows = example_rows(example, "x", 4, trial)
    assert rows.shape == (4, 2) and 1 < rows.mean() < 8 and len(np.unique(rows)) == 8
    assert example_rows(np.zeros((1, 3), np.float32), "x", 4, trial).std() > 0.5
    assert (example_rows(np.array([[1], [2]]), "x", 3, trial) == [[1], [2], [1]]).all()
    masked = example_rows(np.array([[0.0, -np.inf]], np.float32), "x", 2, trial)
    assert np.isneginf(masked).sum() == 2 or np.isfinite(masked).all()
    assert example_rows(np.zeros((0, 3), np.float32), "x", 2, trial).shape == (2, 3)
    assert (np.abs(example_rows(example, "x", 4, Trial(True, 4, scale=0.5))) <= np.abs(rows)).all()


# --- PyTorch ----------------------------------------------------------------------------------------------------------


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, bias=False), nn.Linear(4, 3)
        self.norm, self.drop = nn.BatchNorm2d(4), nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return self.second(self.drop(torch.relu(self.norm(self.first(x)))).mean((2, 3)))


def test_the_model_and_everything_else_stay_as_they_were() -> None:
    torch.manual_seed(3)
    model = Body()
    calls = []
    model.first.weight.register_hook(lambda gradient: calls.append(1))
    model.second.weight.grad = torch.ones_like(model.second.weight)
    before = copy.deepcopy(model.state_dict())
    flags = [module.training for module in model.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    x = torch.randn(2, 2, 8, 8)
    states = torch.get_rng_state(), *states[1:]
    kept = x.clone()
    prepared = qat.prepare(model, x)
    assert prepared.proof.trials and not prepared.proof.missing
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert flags == [module.training for module in model.modules()] and prepared.training
    assert model.first.weight.grad is None and torch.equal(model.second.weight.grad, torch.ones(3, 4))
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert (states[2] == np.random.get_state()[1]).all() and torch.equal(x, kept)
    assert all(parameter.grad is None for parameter in prepared.parameters())
    other = qat.prepare(model, x, check=False)
    assert other.proof is None
    ours, theirs = prepared.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if isinstance(ours[name], torch.Tensor))
    assert [module.training for module in prepared.modules()] == [module.training for module in other.modules()]


def test_layers_of_ours_count_no_batches_in_prepare() -> None:
    """Their kernels do not run without values, so the model is looked at in another way."""
    model = nn.Sequential(qat.DepthwiseConv2d(2, 3, padding="SAME"), qat.FusedBatchNorm2d(2), nn.ReLU())
    before = copy.deepcopy(model.state_dict())
    qat.prepare(model, torch.randn(2, 2, 8, 8))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("examples", [1, 2, 3, 40])
def test_ordinary_networks_pass(training: bool, examples: int) -> None:
    prepared = qat.prepare(Body().train(training), torch.zeros(examples, 2, 8, 8))
    assert len([trial for trial in prepared.proof.trials if not trial.results_only]) == 5
    assert prepared.proof.seconds > 0


def test_other_dtypes() -> None:
    assert qat.prepare(Body().double(), torch.randn(2, 2, 8, 8, dtype=torch.float64)).proof.trials
    assert qat.prepare(Body().to(torch.bfloat16), torch.randn(2, 2, 8, 8).to(torch.bfloat16)).proof.trials


def test_a_model_that_does_not_run_is_named() -> None:
    class Particular(Body):
        def forward(self, x: Any) -> Any:
            if type(x) is torch.Tensor and not torch.compiler.is_exporting():
                raise ValueError("not today")
            return super().forward(x)

    with pytest.warns(qat.NotComparedWarning, match="ValueError: not today"):
        qat.prepare(Particular(), torch.randn(2, 2, 8, 8))


def test_the_first_layer_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect put into one layer of the prepared network."""
    from exactqat.qat.train.torch import proof as proof_torch

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(2, 4)
    prepared = qat.prepare(model, x)
    layer = prepared.step("2")
    monkeypatch.setattr(layer, "bias_source", None)
    verdict = proof_torch.compare_with_original(model, prepared, (x,), {})
    assert "the first layer that differs is '2', after '0'" in verdict.refusal
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not proof_torch.compare_with_original(model, qat.prepare(model, x), (x,), {}).refusal


def branch(model: Any, x: Any) -> Any:
    return model.second(model.features(x)) * (2 if model.training else 1)


def auxiliary_head(model: Any, x: Any) -> Any:
    features = model.features(x)
    return (model.second(features), model.aux(features)) if model.training else model.second(features)


def logits_in_training(model: Any, x: Any) -> Any:
    y = model.second(model.features(x))
    return y if model.training else y.softmax(1)


def scaled_by_the_batch_in_training(model: Any, x: Any) -> Any:
    y = model.features(x)
    return model.second(y / y.detach().std(0, keepdim=True).clamp(min=0.1) if model.training else y)


MODES = [branch, auxiliary_head, logits_in_training, scaled_by_the_batch_in_training]


@pytest.mark.parametrize("function", MODES)
def test_what_training_alone_computes_is_refused_and_evaluation_is_trained(function: Any) -> None:
    class Moody(Body):
        def __init__(self) -> None:
            super().__init__()
            self.aux = nn.Linear(4, 2)

        def features(self, x: Any) -> Any:
            return self.drop(torch.relu(self.norm(self.first(x)))).mean((2, 3))

        def forward(self, x: Any) -> Any:
            return function(self, x)

    model, x = Moody(), torch.randn(4, 2, 8, 8)
    with pytest.raises(qat.UnsupportedOperator, match=r"model\.eval\(\) before prepare|mixes the examples"):
        qat.prepare(model, x)
    prepared = qat.prepare(model.eval(), x, keep_final_activation=False)
    assert not prepared.proof.refusal and {trial.training for trial in prepared.proof.trials} == {True, False}
    kinds = [step.kind for step in prepared.plan.network.steps]
    assert "batch_norm" in kinds and "dropout" in kinds
    prepared.train()
    before = prepared.state_dict()["norm.running_mean"].clone()
    prepared(x)
    assert not torch.equal(before, prepared.state_dict()["norm.running_mean"])


def test_inputs_far_beyond_the_example_and_at_the_models_numbers_are_compared() -> None:
    class Bounded(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.clamp(-20000, 300).sum(1, keepdim=True)

    prepared = qat.prepare(Bounded(), torch.randn(4, 3))
    trials = [trial for trial in prepared.proof.trials if trial.results_only]
    assert [trial.scale for trial in trials if not trial.corners] == [10, 1e3, 1e6]
    assert [trial.corners for trial in trials if trial.corners] == [(-20000.0, 300.0)]
    (clamp,) = (step for step in prepared.plan.network.steps if step.kind == "clamp")
    numbers = example_rows(np.zeros((2, 500), np.float32), "x", 2, Trial(False, 2, corners=(-20000.0, 300.0)))
    assert (numbers < -20000).any() and (np.abs(numbers) > 300).any() and (np.abs(numbers) < 300).any()


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return -gradient


reverse = Reverse.apply


def test_functions_kept_under_another_name() -> None:
    """People write `reverse = Reverse.apply` at the top of a file."""

    class Adversarial(Body):
        def forward(self, x: Any) -> Any:
            return super().forward(reverse(x) * 2)

    with pytest.raises(qat.UnsupportedOperator, match=r"gradients by rules of its own \(Reverse\)"):
        qat.prepare(Adversarial(), torch.randn(2, 2, 8, 8))


def test_a_model_whose_train_leaves_statistics_alone() -> None:
    class Frozen(Body):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.norm.eval()
            return self

    prepared = qat.prepare(Frozen(), torch.randn(2, 2, 8, 8))  # train() has not been called
    before = prepared.state_dict()["norm.running_mean"].clone()
    prepared.train()
    prepared(torch.randn(2, 2, 8, 8))
    assert torch.equal(before, prepared.state_dict()["norm.running_mean"])
