# SPDX-License-Identifier: Apache-2.0
"""A prepared network under `torch.compile`: one graph while it trains, and the bits of the step without it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from exactqat import qat  # noqa: E402

IMAGES = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Branches(nn.Module):
    """Layers with and without batch norm, a grid with two writers, a mean that rounds in codes, and a depthwise one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.depthwise = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8))
        self.one, self.other = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)
        self.pool = nn.AvgPool2d(2)
        self.last = nn.Linear(8, 5)

    def forward(self, images: Any) -> Any:
        x = self.first(images)
        x = x + self.depthwise(x)
        x = self.pool(torch.cat([self.one(x), self.other(x)], 1))
        return self.last(x.mean((2, 3)))


def prepared(**rule: Any) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return qat.prepare(Branches().train(), IMAGES, [qat.Rule(**rule)])


def trained(model: Any, call: Any, steps: int) -> tuple[list[float], Any]:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = call(IMAGES).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        return losses, call(IMAGES)


@pytest.mark.slow
@pytest.mark.parametrize(("ranges", "backend"), [("ema", "aot_eager"), ("learned", "eager")])
def test_one_graph_with_the_same_bits(ranges: str, backend: str) -> None:
    plain, compiled = prepared(ranges=ranges), prepared(ranges=ranges)
    if ranges == "learned":
        for model in (plain, compiled):
            qat.calibrate(model, [IMAGES])
    torch.compiler.reset()
    losses, result = trained(plain, plain, 3)
    assert len(set(losses)) == 3
    compiled_losses, compiled_result = trained(compiled, torch.compile(compiled, backend=backend, fullgraph=True), 3)
    assert compiled_losses == losses and torch.equal(compiled_result, result)
    for name, value in plain.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, compiled.state_dict()[name]), name


@pytest.mark.slow
def test_layers_of_several_sizes_one_after_the_other() -> None:
    torch.compiler.reset()
    for size in (8, 12):
        layers = nn.Sequential(qat.DepthwiseConv2d(3, 3, stride=2), qat.FusedBatchNorm2d(3)).train()
        images = torch.rand(4, 3, size, size)
        # From the second size on the compiler hands sizes over that are not plain integers.
        torch.compile(layers, backend="eager", fullgraph=True)(images).sum().backward()
        layers.eval()
        assert torch.equal(torch.compile(layers, backend="eager", fullgraph=True)(images), layers(images))


@pytest.mark.slow
def test_the_frozen_phase_stays_outside() -> None:
    plain, compiled = prepared(ranges="ema"), prepared(ranges="ema")
    for model in (plain, compiled):
        qat.calibrate(model, [IMAGES])
        qat.freeze(model)
    torch.compiler.reset()
    losses, result = trained(plain, plain, 1)
    compiled_losses, compiled_result = trained(compiled, torch.compile(compiled, backend="eager"), 1)
    assert compiled_losses == losses and torch.equal(compiled_result, result)


@pytest.mark.slow
def test_a_range_without_data_is_noticed_in_a_graph() -> None:
    model = prepared(ranges="ema").eval()
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="has seen no data"):
        torch.compile(model, backend="eager", fullgraph=True)(IMAGES)
