# SPDX-License-Identifier: Apache-2.0
"""Distillation from the float network's answers."""

from __future__ import annotations

import copy
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


def test_the_answers_of_the_float_network_are_taught() -> None:
    model, prepared, images = networks(weight_bits=3, activation_bits=4)
    distillation = qat.Distillation(model.train(), temperature=2.0)
    outputs = prepared(images)
    losses = distillation(outputs, images, "none")
    assert not model.training
    with torch.no_grad():
        expected = qat.distillation_loss(outputs, model(images), 2.0, "none")
    assert torch.equal(losses.detach(), expected) and losses.shape == (32,)
    assert torch.equal(distillation(outputs, images), losses.mean())
    # The teacher gets no gradients.
    losses.mean().backward()
    assert prepared.first.weight.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_outputs_that_are_no_classes() -> None:
    model, prepared, images = networks()
    distillation = qat.Distillation(model, temperature=None)
    with torch.no_grad():
        taught = model(images)
    outputs = prepared(images)
    expected = (outputs - taught).square().mean(1) / taught.square().mean()
    torch.testing.assert_close(distillation(outputs, images, "none"), expected)
    # Any network that gives such outputs.
    other = qat.Distillation(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)))
    assert float(other(outputs, images)) > 0


def test_bad_arguments_of_distillation() -> None:
    model, prepared, images = networks()
    with pytest.raises(TypeError, match="teacher must be the float torch.nn.Module, got PreparedModel"):
        qat.Distillation(prepared)
    distillation = qat.Distillation(model, temperature=None)
    with pytest.raises(
        ValueError, match=re.escape("outputs must have the shape of the teacher's, [32, 3], got [32, 2]")
    ):
        distillation(prepared(images)[:, :2], images)
    for temperature in (None, 4.0):
        with pytest.raises(ValueError, match="reduction must be mean, sum or none, got 'all'"):
            qat.Distillation(model, temperature)(prepared(images), images, "all")
    with pytest.raises(ValueError, match="outputs must be one tensor, got list"):
        distillation([prepared(images)], images)
