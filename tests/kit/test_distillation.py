# SPDX-License-Identifier: Apache-2.0
"""Distillation from the float network's answers and from chosen layers of it."""

from __future__ import annotations

import copy
import io
import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from exactqat import qat  # noqa: E402


class Net(nn.Module):
    """A convolution with batch norm and ReLU, a residual sum, and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.last = nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, 3)

    def features(self, x: Any) -> tuple[Any, Any]:
        first = torch.relu(self.norm(self.first(x)))
        return first, first + torch.relu(self.second(first))

    def forward(self, x: Any) -> Any:
        return self.last(self.features(x)[1].mean((2, 3)))


def networks(**rule: Any) -> tuple[Any, Any, Any]:
    """The float network, which has seen data, a prepared one, and images."""
    torch.manual_seed(0)
    images, model = torch.randn(32, 1, 6, 6), Net()
    for _ in range(20):
        model(images)
    model.eval()
    prepared = qat.prepare(copy.deepcopy(model).train(), images[:2], [qat.Rule(**rule)])
    qat.calibrate(prepared, [images])
    return model, prepared.train(), images


def test_layers_are_compared_with_the_users_own() -> None:
    model, prepared, images = networks(weight_bits=3, activation_bits=4)
    distillation = qat.Distillation(prepared, model, ["first", "add"], temperature=2.0)
    assert distillation.layers == ("first", "add")
    # What the layers of the student store, seen in another way.
    seen = {path: value for path, (_, value) in copy.deepcopy(prepared).stored_tensors(images).items()}
    outputs = prepared(images)
    losses = distillation(outputs, images, "none")
    with torch.no_grad():
        taught = model.features(images)
        expected = qat.distillation_loss(outputs, model(images), 2.0, "none").detach()
    for layer, values in zip(("first", "add"), taught, strict=True):
        error = (seen[layer].detach() - values).square().flatten(1).mean(1)
        expected = expected + error / values.square().mean() / 2
    torch.testing.assert_close(losses.detach(), expected, rtol=1e-4, atol=1e-6)
    # Gradients reach what lies before the layers, and the teacher gets none.
    losses.mean().backward()
    assert prepared.first.weight.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_layer_teaches_what_the_answers_do_not() -> None:
    model, prepared, images = networks(weight_bits=2, activation_bits=4)

    def far(layers: list[str]) -> float:
        student = copy.deepcopy(prepared)
        distillation = qat.Distillation(student, model, layers)
        optimizer = torch.optim.Adam(student.parameters(), 1e-2)
        for _ in range(60):
            optimizer.zero_grad()
            distillation(student(images), images).backward()
            optimizer.step()
        student.eval()
        values = student.stored_tensors(images)["first"][1]
        taught = model.features(images)[0]
        return float(((values - taught).square().mean() / taught.square().mean()).detach())

    assert far(["first"]) < 0.8 * far([])


def test_the_frozen_network_learns_from_layers_too() -> None:
    model, prepared, images = networks()
    distillation = qat.Distillation(prepared, model, ["*"])
    qat.freeze(prepared)
    loss = distillation(prepared.train()(images), images)
    assert 0 < loss.item() < 0.01
    loss.backward()
    assert prepared.second.weight.grad.abs().sum() > 0
    # Made after freezing it is the same teacher.
    other = qat.Distillation(prepared, model, ["*"])
    assert torch.equal(other(prepared(images), images), loss)


def test_values_are_kept_for_one_loss_and_belong_to_no_file() -> None:
    model, prepared, images = networks()
    distillation = qat.Distillation(prepared, model, ["first"])
    outputs = prepared(images)
    assert not copy.deepcopy(prepared).watched()
    stored = io.BytesIO()
    torch.save(prepared.state_dict(), stored)
    distillation(outputs, images)
    with pytest.raises(RuntimeError, match="call the model in training mode first"):
        distillation(outputs, images)
    prepared.eval()(images)
    assert not prepared.watched()


def test_outputs_that_are_no_classes() -> None:
    model, prepared, images = networks()
    distillation = qat.Distillation(prepared, model, temperature=None)
    with torch.no_grad():
        taught = model(images)
    outputs = prepared(images)
    expected = (outputs - taught).square().mean(1) / taught.square().mean()
    torch.testing.assert_close(distillation(outputs, images, "none"), expected)
    # Without layers, any network that gives such outputs.
    other = qat.Distillation(prepared, nn.Sequential(nn.Flatten(), nn.Linear(36, 3)))
    assert float(other(outputs, images)) > 0


def test_bad_arguments_of_distillation() -> None:
    model, prepared, images = networks()
    with pytest.raises(
        ValueError, match=re.escape("layers: 'third' matches no layer; those are: first, second, add, mean")
    ):
        qat.Distillation(prepared, model, ["third"])
    with pytest.raises(TypeError, match="layers must be a list of paths or patterns, got 'first'"):
        qat.Distillation(prepared, model, "first")
    with pytest.raises(TypeError, match="model must come from exactqat.qat.prepare, got Net, which was not"):
        qat.Distillation(model, model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="teacher must be the float torch.nn.Module, got PreparedModel"):
        qat.Distillation(prepared, prepared)
    with pytest.raises(ValueError, match="teacher is another network than the one"):
        qat.Distillation(prepared, nn.Linear(3, 3), ["first"])

    class Other(Net):
        def forward(self, x: Any) -> Any:
            return 2 * super().forward(x)

    other = Other().eval()
    other.load_state_dict(model.state_dict())
    distillation = qat.Distillation(prepared, other, ["first"])
    with pytest.raises(ValueError, match="teacher is another network than the one"):
        distillation(prepared(images), images)
    with pytest.raises(ValueError, match="reduction must be mean, sum or none, got 'all'"):
        distillation(prepared(images), images, "all")
