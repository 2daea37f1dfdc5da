# SPDX-License-Identifier: Apache-2.0
"""A frozen layer as one operation of autograd has the bits of its parts one by one; so has what goes to the host in
codes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from test_fused_layers import assert_same, network, nodes, trained  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from exactqat import qat  # noqa: E402
from exactqat.operators.torch import row_magnitudes  # noqa: E402
from exactqat.qat.train.torch import frozen, image_layers  # noqa: E402


class Residual(nn.Module):
    """Layers of all kinds, a sum, and products of so many numbers that only the codes tell whether float32 holds their
    sums."""

    def __init__(self, activation: type[nn.Module] = nn.ReLU6) -> None:
        super().__init__()
        self.features = network(activation)[:-3]
        self.beside = nn.Conv2d(8, 8, 3, 1, 1)
        self.wide = nn.Sequential(nn.Conv2d(8, 600, 1), nn.ReLU(), nn.Conv2d(600, 8, 1))
        self.last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = x + self.beside(x)
        return self.last(self.wide(x) + x)


def prepared(rule: qat.Rule | None = None, last: bool = True, profile: str = "xnnpack-x86") -> tuple[nn.Module, Tensor]:
    """Frozen and in training, and images. last: channels are."""
    images = torch.randn(4, 3, 17, 14, generator=torch.Generator().manual_seed(1))
    model = Residual().to(memory_format=torch.channels_last) if last else Residual()
    model = qat.prepare(model, images[:2], [rule or qat.Rule()])
    model.profile = profile
    qat.calibrate(model, [images])
    model.train()(images)
    qat.freeze(model)
    return model, images


def by_parts(monkeypatch: pytest.MonkeyPatch, function: Callable[[], list[Any]]) -> list[Any]:
    with monkeypatch.context() as patch:
        patch.setattr(frozen, "is_unwatched", lambda: False)
        return function()


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("profile", ["xnnpack-x86", "reference", "micro"])
@pytest.mark.parametrize("ranges", ["ema", "learned"])
def test_the_same_bits(ranges: str, profile: str, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = prepared(qat.Rule(ranges=ranges), last, profile)
    names = [*nodes(model(images))]
    assert names.count("_FrozenLayerBackward") == 9 and names.count("_WithGradientBackward") >= 2
    parts = by_parts(monkeypatch, lambda: trained(copy.deepcopy(model), images))
    assert_same(trained(copy.deepcopy(model), images), parts)


def test_partly_frozen_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = prepared()
    for name in ("features.0.weight", "features.7.weight", "features.10.bias", "beside.bias", "wide.0.weight"):
        model.get_parameter(name).requires_grad_(False)
    parts = by_parts(monkeypatch, lambda: trained(copy.deepcopy(model), images))
    assert_same(trained(copy.deepcopy(model), images), parts)


def test_channels_of_many_magnitudes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Denormal, zero, and not finite ones, too: those are not in one operation."""
    model, images = prepared()
    with torch.no_grad():
        weight = model.get_parameter("features.9.weight")
        weight *= torch.logspace(-3, 3, len(weight))[:, None, None, None]
        weight[2], weight[5, 3:] = 0.0, 1e-41
    parts = by_parts(monkeypatch, lambda: trained(copy.deepcopy(model), images))
    assert_same(trained(copy.deepcopy(model), images), parts)
    with torch.no_grad():
        weight[7, 1] = torch.nan
    both = [trained(copy.deepcopy(model), images), by_parts(monkeypatch, lambda: trained(copy.deepcopy(model), images))]
    assert both[0][0].isnan().any()
    assert_same(*([tensor.nan_to_num(7.0) for tensor in tensors] for tensors in both))


def test_gradients_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = prepared()

    def second() -> tuple[list[Tensor], list[Tensor]]:
        x = images.clone().requires_grad_()
        parameters = [tensor for tensor in model.parameters() if tensor.requires_grad]
        first = torch.autograd.grad(model(x).square().sum(), [x, *parameters], create_graph=True)
        loss = sum((gradient * gradient).sum() for gradient in first)
        again = torch.autograd.grad(loss, [x, *parameters])
        return [gradient.detach() for gradient in first], [*again]

    (first, again), (first_by_parts, again_by_parts) = second(), by_parts(monkeypatch, lambda: [*second()])
    assert_same(first, first_by_parts)
    # Their terms are added in another order.
    torch.testing.assert_close(again, again_by_parts, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("piece", [1, 3 * 4 * 12 * 9 * 7, 1 << 20])
def test_large_results_come_in_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN may sum in another order for another number of images: whole numbers stay, gradients are close."""
    model, images = prepared()
    whole = trained(copy.deepcopy(model), images)[:2]
    monkeypatch.setattr(image_layers, "_MOST_KEPT", 0)
    monkeypatch.setattr(image_layers, "_PIECE", piece)
    result, gradient = trained(copy.deepcopy(model), images)[:2]
    assert torch.equal(result, whole[0])
    torch.testing.assert_close(gradient, whole[1], rtol=1e-4, atol=1e-5)


def test_magnitudes_of_several_weights() -> None:
    weights = [torch.randn(5, 3, 3, 3), torch.randn(1, 200_000), torch.randn(0, 4), torch.randn(300, 7)]
    weights[0][1, 2, 0, 0], weights[0][3], weights[3][4, 2] = torch.nan, -0.0, -torch.inf
    expected = torch.cat([weight.reshape(len(weight), -1).abs().amax(1) for weight in weights if len(weight)])
    assert torch.equal(row_magnitudes(weights).nan_to_num(-1.0), expected.nan_to_num(-1.0))
