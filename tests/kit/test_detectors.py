# SPDX-License-Identifier: Apache-2.0
"""Detectors that decode their boxes inside: anchors made of the maps' shapes, distributions of distances (DFL)."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from network_interpreter import differences  # noqa: E402
from torch import nn  # noqa: E402

from exactqat.qat.capture.torch.expression import Expression  # noqa: E402
from exactqat.qat.capture.torch.model import CaptureError, capture  # noqa: E402

BINS, CLASSES = 8, 3


def anchors(maps: list[torch.Tensor], strides: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The centres of all cells, and their strides; of the maps only the shapes and the dtype are read."""
    points, sizes = [], []
    for x, stride in zip(maps, strides, strict=True):
        height, width = x.shape[2:]
        across = torch.arange(width).type_as(x) + 0.5
        down = torch.arange(end=height, device=x.device, dtype=x.dtype) + 0.5
        down, across = torch.meshgrid(down, across, indexing="ij")
        points.append(torch.stack((across, down), -1).view(-1, 2))
        sizes.append(torch.full((height * width, 1), 1.0).type_as(x) * stride)
    return torch.cat(points).transpose(0, 1), torch.cat(sizes).transpose(0, 1)


class Distances(nn.Module):
    """The expected value of a distribution over bins, as a fixed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(BINS, 1, 1, bias=False).requires_grad_(False)
        self.conv.weight.data[:] = torch.arange(BINS, dtype=torch.float).view(1, BINS, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, _, cells = x.shape
        return self.conv(x.view(batch, 4, BINS, cells).transpose(2, 1).softmax(1)).view(batch, 4, cells)


class Detector(nn.Module):
    """Two maps, each through a head of its own.

    Args:
        form: "raw" returns the maps in training and boxes beside them in evaluation, "export" the boxes alone,
            divided by the image's size.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.BatchNorm2d(8), nn.SiLU())
        self.deep = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.SiLU())
        self.boxes = nn.ModuleList(nn.Conv2d(channels, 4 * BINS, 1) for channels in (8, 16))
        self.classes = nn.ModuleList(nn.Conv2d(channels, CLASSES, 1) for channels in (8, 16))
        self.distances = Distances()
        self.strides = torch.tensor([4.0, 8.0])
        self.shape: tuple[int, ...] | None = None

    def forward(self, x: torch.Tensor):
        first = self.stem(x)
        maps = [first, self.deep(first)]
        raw = [torch.cat((box(m), kind(m)), 1) for m, box, kind in zip(maps, self.boxes, self.classes, strict=True)]
        if self.training and self.form == "raw":
            return raw
        flat = torch.cat([m.view(x.shape[0], 4 * BINS + CLASSES, -1) for m in raw], 2)
        if self.shape != x.shape:
            self.points, self.sizes = anchors(raw, self.strides)
            self.shape = x.shape
        distributions, scores = flat.split((4 * BINS, CLASSES), 1)
        near, far = self.distances(distributions).chunk(2, 1)
        points = self.points.unsqueeze(0).expand_as(near)
        low, high = points - near, points + far
        boxes = torch.cat(((low + high) / 2, high - low), 1) * self.sizes
        if self.form == "export":
            return torch.cat((boxes / x.shape[2], scores.sigmoid()), 1)
        return torch.cat((boxes, scores.sigmoid()), 1), raw


@pytest.mark.parametrize("form", ["raw", "export"])
def test_a_detector_is_captured(form: str) -> None:
    model, images = Detector(form), torch.rand(2, 3, 32, 32)
    network = capture(model.eval(), (images,))  # training gives the raw maps alone
    assert not [step.label for step in network.steps if step.kind == "unsupported"]
    assert differences(network, model, (torch.cat([images, images.flip(0)]),), False) <= 1e-5


@pytest.mark.parametrize("form", ["raw", "export"])
def test_a_detector_computes_the_devices_integers(form: str, tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    pytest.importorskip("onnxruntime", reason="needs exactqat[onnx]")
    from run_zoo import end_to_end

    row = end_to_end(Detector(form), (torch.rand(2, 3, 32, 32),), tmp_path, training=False)
    assert row["values"] > 0 and row["differing"] == 0 and not row["unclaimed"]


class Queries(nn.Module):
    """DETR in small: learned queries read an image through PyTorch's own decoder."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4, 4)
        layer = nn.TransformerDecoderLayer(16, 2, 32, dropout, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.queries = nn.Embedding(5, 16)
        self.boxes = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.stem(x).flatten(2).transpose(1, 2)
        queries = self.queries.weight.unsqueeze(0).repeat(x.shape[0], 1, 1)
        return self.boxes(self.decoder(queries, memory))


def test_learned_queries_are_not_random() -> None:
    model, images = Queries(0.1), torch.rand(2, 3, 16, 16)
    network = capture(model.train(), (images,))
    assert not [step.label for step in network.steps if step.kind == "unsupported"]
    model.eval()
    assert differences(network, model, (torch.cat([images, images.flip(0)]),), False) <= 1e-5


@pytest.mark.slow
def test_a_prepared_decoder_trains_its_queries_with_their_dropout() -> None:
    from exactqat import qat

    model, images = Queries(0.5), torch.rand(2, 3, 16, 16)
    prepared = qat.prepare(model.train(), images)
    prepared(images).square().mean().backward()
    gradient = dict(prepared.named_parameters())["queries.weight"].grad
    assert gradient is not None and gradient.abs().sum() > 0
    modules = [module for module in prepared.modules() if isinstance(module, Expression)]
    expressions = [module for module in modules if "operand" not in [name for name, *_ in module.instructions]]
    assert expressions and all(module.training for module in expressions)
    pairs = [[module(*given(prepared, module)) for _ in range(2)] for module in expressions]
    assert any(not torch.equal(first, second) for first, second in pairs)
    prepared.eval()
    assert torch.equal(prepared(images), prepared(images))


def given(prepared: nn.Module, expression: nn.Module) -> list[torch.Tensor]:
    """The parameters that an expression reads."""
    tensors = dict(prepared.named_parameters())
    return [tensors[path] for path in expression.sources]


class Guarded(nn.Module):
    """Branches on whether numbers are finite, as DETR's encoder does."""

    def __init__(self, guard) -> None:
        super().__init__()
        self.guard, self.layer = guard, nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if self.guard(x):
            x = x.clamp(-1.0, 1.0).sin()
        return x.relu()


GUARDS = [
    lambda x: not torch.isfinite(x).all(),
    lambda x: torch.isinf(x).any() or torch.isnan(x).any(),
    lambda x: torch.isinf(x).any() | x.isnan().any(),
    lambda x: (~torch.isfinite(x)).any(),
]


@pytest.mark.parametrize("guard", GUARDS)
def test_guards_against_infinity_are_those_of_finite_numbers(guard) -> None:
    model, x = Guarded(guard), torch.randn(3, 6)
    network = capture(model.train(), (x,))
    assert [step.kind for step in network.steps] == ["linear", "relu"]
    assert differences(network, model, (torch.cat([x, x * 2]),), True) <= 1e-6


@pytest.mark.parametrize("guard", [lambda x: (x > 0).all(), lambda x: torch.isfinite(x).sum() > 3])
def test_other_branches_on_numbers_are_refused(guard) -> None:
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(Guarded(guard), (torch.randn(3, 6),))


class Keypoints(nn.Module):
    """Collects the places of each example's largest values, as DISK and SuperPoint do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        scores, heats = [], self.layer(x).squeeze(1)
        for example in range(len(heats)):
            heat = heats[example]
            places = torch.nonzero(heat > 0).flip((1,))
            scores.append(heat[places[:, 1], places[:, 0]] * 2)
        return scores


def test_a_loop_over_the_examples_places_is_not_taken_for_a_wrong_shape() -> None:
    with pytest.raises(CaptureError, match="one by one") as caught:
        capture(Keypoints(), (torch.randn(2, 3, 16, 16),))
    assert "does not accept the example" not in str(caught.value)
