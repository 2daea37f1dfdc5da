# SPDX-License-Identifier: Apache-2.0
"""Distillation and learning rates of single ranges, in loops of any kind."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from exactqat import qat  # noqa: E402


def test_the_distillation_loss_is_the_divergence_of_softened_answers() -> None:
    generator = np.random.default_rng(0)
    own, taught = (generator.normal(size=(5, 4)) for _ in range(2))
    temperature = 3.0

    def softened(logits: np.ndarray) -> np.ndarray:
        powers = np.exp(logits / temperature)
        return powers / powers.sum(1, keepdims=True)

    expected = temperature**2 * (softened(taught) * np.log(softened(taught) / softened(own))).sum(1)
    tensors = torch.from_numpy(own).requires_grad_(), torch.from_numpy(taught).requires_grad_()
    losses = qat.distillation_loss(*tensors, temperature, "none")
    np.testing.assert_allclose(losses.detach().numpy(), expected, rtol=1e-12)
    assert qat.distillation_loss(*tensors, temperature, "sum").item() == pytest.approx(expected.sum())
    loss = qat.distillation_loss(*tensors, temperature)
    assert loss.item() == pytest.approx(expected.mean())
    loss.backward()
    assert tensors[0].grad is not None and tensors[1].grad is None
    # The gradient of T^2 KL is T (softened own - softened teacher), whatever the temperature.
    gradient = temperature * (softened(own) - softened(taught)) / len(own)
    np.testing.assert_allclose(tensors[0].grad.numpy(), gradient, rtol=1e-10)
    assert qat.distillation_loss(tensors[1], tensors[1]).item() == 0


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((2, 3), (2, 4)), {}, "must have one shape [n, classes], got [2, 3] and [2, 4]"),
        (((2,), (2,)), {}, "must have one shape [n, classes], got [2] and [2]"),
        (((2, 3), (2, 3)), {"temperature": 0}, "temperature must be a number above 0, got 0"),
        (((2, 3), (2, 3)), {"temperature": math.nan}, "temperature must be a number above 0, got nan"),
        (((2, 3), (2, 3)), {"reduction": "all"}, "reduction must be mean, sum or none, got 'all'"),
    ],
)
def test_bad_arguments_of_the_distillation_loss(shapes: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        qat.distillation_loss(*(torch.zeros(shape) for shape in shapes), **options)


class Two(torch.nn.Module):
    """Two layers; the path of the first is the beginning of the second's."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.part2 = torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)

    def forward(self, x: Any) -> Any:
        return self.part2(torch.relu(self.part(x)))


def test_ranges_of_layers_have_rates_of_their_own() -> None:
    torch.manual_seed(0)
    images = torch.rand(16, 4)
    model = qat.prepare(Two(), images, [qat.Rule(ranges="learned", weight_bits=3, activation_bits=3)])
    qat.calibrate(model, [images])
    groups = qat.parameter_groups(model, 0.0, range_lr=0.0, range_lrs={"part2": 0.1})
    assert [group["lr"] for group in groups] == [0.0, 0.0, 0.1]
    kept = {id(parameter) for group in groups for parameter in group["params"]}
    assert kept == {id(parameter) for parameter in model.parameters()}
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(groups, weight_decay=0.5)
    model.train()(images).square().sum().backward()
    optimizer.step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved and all(name.startswith("quantization.part2.") for name in moved)
    # Those of weights at a fifth, or at a rate of their own; a pattern is for both.
    assert sorted(group["lr"] for group in qat.parameter_groups(model, 1e-3, 5e-3)) == [1e-3, 1e-3, 5e-3]
    for grouping, rate in ((qat.parameter_groups(model, 0.0, 1.0, weight_range_lr=0.5), 0.5),
                           (qat.parameter_groups(model, 0.0, 1.0, {"part": 0.0}), 0.2)):  # fmt: skip
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        slower = [names[id(end)] for group in grouping if group["lr"] == rate for end in group["params"]]
        assert slower and all("weight_quantizer" in name for name in slower)
    assert not any("part." in name for name in slower)
    # All ranges at one rate, and a model without learned ranges: two groups, as the kit's own loops have them.
    assert [group["lr"] for group in qat.parameter_groups(model, 1e-3, weight_range_lr=3e-3)] == [1e-3, 3e-3]
    fixed = qat.prepare(Two(), images)
    assert qat.parameter_groups(fixed, 1e-3)[1]["params"] == []
    with pytest.raises(
        ValueError, match=re.escape("range_lrs['conv'] matches no layer with a learned range; those are:")
    ):
        qat.parameter_groups(model, 1e-3, range_lrs={"conv": 1e-3})
    with pytest.raises(ValueError, match=re.escape("range_lrs['part'] must be a number of at least 0, got -1")):
        qat.parameter_groups(model, 1e-3, range_lrs={"part": -1})
    with pytest.raises(ValueError, match="weight_range_lr must be a number of at least 0, got inf"):
        qat.parameter_groups(model, 1e-3, weight_range_lr=float("inf"))
    with pytest.raises(TypeError, match="model must come from exactqat.qat.prepare, got Two, which was not"):
        qat.parameter_groups(Two(), 1e-3)  # type: ignore[arg-type]


def test_weights_that_oscillate_are_counted_and_held() -> None:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    model = qat.prepare(network, torch.rand(2, 4), [qat.Rule(weight_bits=3)])
    qat.calibrate(model, [torch.rand(8, 4)])
    weight = next(parameter for name, parameter in model.named_parameters() if name == "0.weight")
    with torch.no_grad():
        weight.fill_(0.3)
        weight[0, 0], weight[1, 0] = 0.0, 0.0
        weight[:, 1] = 0.6  # the end of each channel's range: steps of 0.2
    counted, holding = qat.Oscillations(model, hold_above=None), qat.Oscillations(model, hold_above=0.1, momentum=0.1)
    for step in range(8):
        with torch.no_grad():
            weight[0, 0] = 0.09 if step % 2 else 0.11  # around the middle between two codes
            weight[1, 0] = 0.01 * step  # does not reach it
        counted.step()
        holding.step()
    assert counted.held() == {"0": 0.0, "2": 0.0}
    assert holding.held() == {"0": 1 / 16, "2": 0.0} and set(holding.flips().values()) == {0.0}
    kept = weight[0, 0].item()
    assert kept in (0.0, pytest.approx(0.2)) and weight[1, 0].item() == pytest.approx(0.07)
    assert "0           16    0.00%   6.25%" in str(holding)
    again = qat.Oscillations(model, hold_above=0.1)
    again.load_state_dict(holding.state_dict())
    with torch.no_grad():
        weight[0, 0] = 0.11
    again.step()
    assert weight[0, 0].item() == kept
    with pytest.raises(ValueError, match="hold_above must be a number above 0 and below 1, got 2"):
        qat.Oscillations(model, hold_above=2)
    with pytest.raises(TypeError, match="prepare"):
        qat.Oscillations(network)
