# SPDX-License-Identifier: Apache-2.0
"""Whole networks, trained for a few steps, against the runtime: no integer of any layer may differ.

First the job's networks, then networks in plain PyTorch that hold what goes wrong elsewhere.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
import plain_networks  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from agreement import assert_exact, trained  # noqa: E402
from torch import nn  # noqa: E402

import exactqat  # noqa: E402
from exactqat import qat  # noqa: E402
from exactqat.application.job import models  # noqa: E402
from exactqat.qat.train.torch.prepared import without_quantization  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def images(count: int, channels: int, height: int, width: int | None = None) -> torch.Tensor:
    return torch.randn(count, channels, height, width or height)


SHAPES = {
    "small_mobilenet": (1, 9, 9),
    "dscnn": (1, 25, 10),
    "mobilenet_v1": (3, 48, 48),
    "resnet8": (3, 16, 16),
    "dscnn_1d": (1, 30, 40),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", models.NETWORKS)
def test_the_jobs_networks(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    model = models.network(name, shape, 5)
    batch = torch.randn(4, *shape)
    graph = assert_exact(trained(model, batch), batch, tmp_path)
    assert graph.tensors[graph.outputs[0]].shape == (1, 5)
    assert graph.outputs[0] == "classifier"


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        # The figures of the papers and of MLPerf Tiny's float networks.
        ("mobilenet_v1", (3, 96, 96), 470_072),
    ],
)
def test_the_networks_are_those_of_the_papers(name: str, shape: tuple[int, ...], parameters: int) -> None:
    model = models.network(name, shape, 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_networks_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ModuleType("mine")
    mine.linear = lambda shape, classes: nn.Linear(shape[0], classes)  # type: ignore[attr-defined]
    mine.broken = lambda shape: None  # type: ignore[attr-defined]
    mine.nothing = lambda shape, classes: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", mine)
    model = models.network("mine:linear", [7], 3)
    assert isinstance(model, nn.Linear) and (model.in_features, model.out_features) == (7, 3)
    for name, message in (
        ("vgg", "model must be one of small_mobilenet, dscnn, .* or 'package.module:function', got 'vgg'"),
        ("mine:gone", "'mine:gone' cannot be loaded: .*gone"),
        ("no.such.module:f", "cannot be loaded: ModuleNotFoundError: No module named 'no'"),
        ("mine:broken", r"'mine:broken' failed when called with \(7,\), 3: TypeError: .*positional argument"),
        ("mine:nothing", "must return a torch.nn.Module, got NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            models.network(name, [7], 3)


class Plain(nn.Module):
    """What follows differs in its layers and its forward only."""

    def __init__(self, forward: Callable[[Plain, torch.Tensor], torch.Tensor], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.compute = forward

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.compute(self, batch)


def first_layer_depthwise() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, groups=3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU6(),
        nn.Conv2d(6, 12, 3, stride=2, padding=1, groups=6),
        nn.ReLU(),
        nn.Conv2d(12, 4, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Softmax(1),
    ), images(6, 3, 11)


def odd_sizes_with_strides() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 8, 5, stride=2, padding=2, groups=8),
        nn.ReLU6(),
        nn.Conv2d(8, 8, 3, stride=3, padding=1),
        nn.AvgPool2d(2, 2),
        nn.Flatten(),
        nn.Linear(8, 3),
    ), images(5, 2, 37, 43)


def even_sizes_with_strides() -> tuple[nn.Module, torch.Tensor]:
    model, _ = odd_sizes_with_strides()
    return model, images(5, 2, 42, 38)


def concatenation() -> tuple[nn.Module, torch.Tensor]:
    """Dense connections: ranges shared across two concatenations, batch norm and ReLU of their own."""

    def forward(self: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        first = F.relu(self.one(batch))
        second = torch.cat([first, self.two(first)], dim=1)
        third = torch.cat([second, 30 * batch, self.three(F.relu(self.norm(second)))], 1)
        return self.head(F.max_pool2d(torch.relu(third), 2)).mean([2, 3])

    layers = {
        "one": nn.Conv2d(3, 8, 3, padding=1),
        "two": nn.Conv2d(8, 5, 3, padding=1),
        "norm": nn.BatchNorm2d(13),
        "three": nn.Conv2d(13, 4, 1),
        "head": nn.Conv2d(20, 6, 1),
    }
    return Plain(forward, **layers), images(4, 3, 8)


def residual_with_different_scales() -> tuple[nn.Module, torch.Tensor]:
    def forward(self: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        large, small = self.large(batch), self.small(batch)
        return F.relu6((large + small) + self.tiny(batch)).mean((2, 3))

    layers = {name: nn.Conv2d(3, 7, 3, padding=1) for name in ("large", "small", "tiny")}
    with torch.no_grad():
        layers["large"].weight *= 50
        layers["small"].weight *= 0.02
        layers["tiny"].weight *= 1e-5
        layers["tiny"].bias *= 1e-5
    return Plain(forward, **layers), images(4, 3, 9)


def gates() -> tuple[nn.Module, torch.Tensor]:
    """Squeeze-and-excite with the operands in either order, hard swish as module and written out, in two ranks."""

    def forward(self: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        features = self.swish(self.wide(batch))
        gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(features, 1)))))
        features = gate * features
        features = features * F.relu6(features + 3) / 6
        flat = self.flat(features.mean((2, 3)))
        return self.head(F.hardswish(flat) * flat)

    layers = {
        "wide": nn.Conv2d(3, 16, 3, stride=2, padding=1),
        "swish": nn.Hardswish(),
        "squeeze": nn.Conv2d(16, 4, 1),
        "excite": nn.Conv2d(4, 16, 1),
        "flat": nn.Linear(16, 12),
        "head": nn.Linear(12, 4),
    }
    return Plain(forward, **layers), images(6, 3, 13)


def pools() -> tuple[nn.Module, torch.Tensor]:
    """Averages of four values are often exactly between two codes."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.AvgPool2d(2),
        nn.Conv2d(8, 8, 1),
        nn.ReLU(),
        nn.AvgPool2d(3, 1, 1, count_include_pad=False),
        nn.AvgPool2d(3, 1, 1),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.AdaptiveAvgPool2d(2),
    ), images(6, 3, 16)


def dead_channels() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8, bias=False),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 4, 1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 1),
        nn.AdaptiveAvgPool2d(1),
    )
    with torch.no_grad():
        model[1].weight[:3] = torch.tensor([0.0, -1.0, 1e-30])
        model[1].bias[3] = -1000.0
        model[3].weight[4] = 0.0
        model[4].weight[5] = 0.0
        model[5].weight[1] = 0.0
        model[5].bias.fill_(-1000.0)  # nothing passes the ReLU after it
    return model, images(6, 3, 8)


def dense() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(
        nn.Linear(20, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.BatchNorm1d(16),
        nn.Dropout(0.1),
        nn.Linear(16, 3),
        nn.LogSoftmax(dim=1),
    ), torch.randn(16, 20)


def joined_features() -> tuple[nn.Module, torch.Tensor]:
    def forward(self: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        both = torch.cat((self.left(batch), F.relu(self.right(batch)), batch), -1)
        return self.classifier(F.hardsigmoid(both) + F.relu6(both))

    layers = {"left": nn.Linear(9, 4), "right": nn.Linear(9, 6), "classifier": nn.Linear(19, 3)}
    return Plain(forward, **layers), torch.randn(12, 9)


def seen_as_features() -> tuple[nn.Module, torch.Tensor]:
    def forward(self: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        features = F.relu(self.conv(batch))
        return self.classifier(features.view(features.size(0), -1))

    return Plain(forward, conv=nn.Conv2d(1, 3, 2), classifier=nn.Linear(3 * 4 * 5, 4)), images(5, 1, 5, 6)


def one_pixel() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Conv2d(5, 9, 1), nn.ReLU6(), nn.Conv2d(9, 2, 1)), images(7, 5, 1)


class ConvBnRelu(nn.Sequential):
    """Blocks as model collections write them, from here on: subclasses, in-place activations, functional calls."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> None:
        padding = (kernel - 1) // 2
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(inplace=True),
        )


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, widening: int) -> None:
        super().__init__()
        wide = inputs * widening
        self.use_res_connect = stride == 1 and inputs == outputs
        layers: list[nn.Module] = [] if widening == 1 else [ConvBnRelu(inputs, wide, 1)]
        layers += [
            ConvBnRelu(wide, wide, 3, stride, wide),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        ]
        self.conv = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x) if self.use_res_connect else self.conv(x)


def mobilenet_v2_of_a_collection() -> tuple[nn.Module, torch.Tensor]:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.adaptive_avg_pool2d(self.features(x), (1, 1))
        return self.classifier(torch.flatten(x, 1))

    features = nn.Sequential(
        ConvBnRelu(3, 8, 3, 2),
        InvertedResidual(8, 8, 1, 1),
        InvertedResidual(8, 12, 2, 6),
        InvertedResidual(12, 12, 1, 6),
        ConvBnRelu(12, 24, 1),
    )
    classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(24, 5))
    return Plain(forward, features=features, classifier=classifier), images(4, 3, 24)


def efficientnet_lite_of_a_collection() -> tuple[nn.Module, torch.Tensor]:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = F.relu6(self.bn1(self.conv_stem(x)), inplace=True)
        x = self.blocks(x)
        x = self.act2(self.bn2(self.conv_head(x)))
        return self.classifier(self.drop(x.mean([2, 3])))

    blocks = nn.Sequential(
        nn.Sequential(ConvBnRelu(8, 8, 3, 1, 8), nn.Conv2d(8, 6, 1, bias=False), nn.BatchNorm2d(6)),
        InvertedResidual(6, 10, 2, 4),
        InvertedResidual(10, 10, 1, 4),
        nn.Identity(),
    )
    layers = {
        "conv_stem": nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        "bn1": nn.BatchNorm2d(8, eps=1e-3, momentum=0.01),
        "blocks": blocks,
        "conv_head": nn.Conv2d(10, 20, 1, bias=False),
        "bn2": nn.BatchNorm2d(20),
        "act2": nn.ReLU6(inplace=True),
        "drop": nn.Dropout(0.2),
        "classifier": nn.Linear(20, 4),
    }
    return Plain(forward, **layers), images(4, 3, 21)


class SqueezeExcitation(nn.Module):
    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)
        self.activation = nn.ReLU()
        self.scale_activation = nn.Hardsigmoid()

    def _scale(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale_activation(self.fc2(self.activation(self.fc1(self.avgpool(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._scale(x) * x


def mobilenet_v3_of_a_collection() -> tuple[nn.Module, torch.Tensor]:
    def block(inputs: int, wide: int, outputs: int, activation: type[nn.Module]) -> nn.Sequential:
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide, 1e-3), activation(inplace=True)),
            nn.Sequential(
                nn.Conv2d(wide, wide, 5, 1, 2, groups=wide, bias=False),
                nn.BatchNorm2d(wide, 1e-3),
                activation(inplace=True),
            ),
            SqueezeExcitation(wide, 8),
            nn.Sequential(nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs, 1e-3)),
        )

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        result = self.first(x)
        result += x
        x = self.avgpool(self.second(result))
        return self.classifier(torch.flatten(x, 1))

    layers = {
        "stem": nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish(inplace=True)),
        "first": block(8, 16, 8, nn.ReLU),
        "second": block(8, 24, 12, nn.Hardswish),
        "avgpool": nn.AdaptiveAvgPool2d(1),
        "classifier": nn.Sequential(
            nn.Linear(12, 20), nn.Hardswish(inplace=True), nn.Dropout(p=0.2, inplace=True), nn.Linear(20, 4)
        ),
    }
    return Plain(forward, **layers), images(4, 3, 18)


class BasicBlock(nn.Module):
    """One ReLU module for two places."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if stride != 1
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


def resnet_of_a_collection() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 12, 2)),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(1),
        nn.Linear(12, 5),
    ), images(4, 3, 32)


class Fire(nn.Module):
    def __init__(self, inputs: int, squeezed: int, outputs: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.squeeze_activation = nn.ReLU(inplace=True)
        self.expand1x1 = nn.Conv2d(squeezed, outputs, 1)
        self.expand1x1_activation = nn.ReLU(inplace=True)
        self.expand3x3 = nn.Conv2d(squeezed, outputs, 3, padding=1)
        self.expand3x3_activation = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.squeeze_activation(self.squeeze(x))
        return torch.cat(
            [self.expand1x1_activation(self.expand1x1(x)), self.expand3x3_activation(self.expand3x3(x))], 1
        )


def squeezenet_of_a_collection(size: int = 30) -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2, ceil_mode=True),
        Fire(8, 4, 6),
        Fire(12, 4, 8),
        nn.MaxPool2d(kernel_size=3, stride=2, ceil_mode=True),
        nn.Dropout(p=0.5),
        nn.Conv2d(16, 5, 1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(),
    ), images(4, 3, size)


def squeezenet_on_other_sizes() -> tuple[nn.Module, torch.Tensor]:
    """Where the windows fit in one place and reach over the edge in the other."""
    return squeezenet_of_a_collection(33)


def windows_over_the_edge() -> tuple[nn.Module, torch.Tensor]:
    """ceil_mode: SAME on even sizes, zeros after a ReLU elsewhere, nothing where the windows fit."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(8, 8, 1),
        nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(8, 8, 1),
        nn.ReLU(),
        nn.MaxPool2d(5, 2, ceil_mode=True),
        nn.MaxPool2d(2, 1, padding=1, ceil_mode=True),
    ), images(4, 3, 24)


def ways_to_write_a_head() -> tuple[nn.Module, torch.Tensor]:
    """Sizes asked for, contiguous, squeeze, in-place functions."""

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = F.relu_(self.conv(x.contiguous()))
        x = F.avg_pool2d(x, kernel_size=x.size()[2:])
        first = self.first(x.squeeze(3).squeeze(2)).clamp(0, 6)
        second = torch.clamp(self.second(x[:, :, 0, 0]), min=0.0)
        return self.last(first + second)

    layers = {
        "conv": nn.Conv2d(3, 8, 3),
        "first": nn.Linear(8, 6),
        "second": nn.Linear(8, 6),
        "last": nn.Sequential(nn.Linear(6, 9), nn.Hardtanh(0, 6), nn.Linear(9, 3)),
    }
    return Plain(forward, **layers), images(5, 3, 7)


def dense_layers() -> tuple[nn.Module, torch.Tensor]:
    """Linear layers with the activation as module and as function; a feature map flattened in front of them."""

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = torch.flatten(x, start_dim=1)
        return self.fc2(self.drop(F.relu(self.norm(self.fc1(x)))))

    layers = {
        "conv1": nn.Conv2d(1, 4, 5),
        "conv2": nn.Conv2d(4, 6, 3),
        "pool": nn.MaxPool2d(2),
        "fc1": nn.Linear(6 * 3 * 3, 10),
        "norm": nn.BatchNorm1d(10),
        "drop": nn.Dropout(0.25),
        "fc2": nn.Linear(10, 3),
    }
    return Plain(forward, **layers), images(5, 1, 20)


def in_place_before_a_shortcut() -> tuple[nn.Module, torch.Tensor]:
    """The shortcut sees what the in-place ReLU left, as it does in PyTorch."""

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        early = self.side(x)
        out = self.second(self.relu(x))
        out += x
        return torch.cat([out + early, F.relu(out, inplace=True), out], 1)

    layers = {name: nn.Conv2d(4, 4, 3, padding=1) for name in ("first", "side", "second")}
    return Plain(forward, **layers, relu=nn.ReLU(inplace=True)), images(4, 4, 6)


def shuffled_channels() -> tuple[nn.Module, torch.Tensor]:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=1)
        return self.last(shuffle(torch.cat((first, self.branch(second)), dim=1)))

    return Plain(forward, branch=ConvBnRelu(4, 4), last=nn.Conv2d(8, 2, 1)), images(2, 8, 6)


def shuffle(x: torch.Tensor) -> torch.Tensor:
    n, c, h, w = x.size()
    x = x.view(n, 2, c // 2, h, w)
    return torch.transpose(x, 1, 2).contiguous().view(n, -1, h, w)


def shuffled_groups() -> tuple[nn.Module, torch.Tensor]:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.last(shuffle(self.first(x)))

    return Plain(forward, first=ConvBnRelu(3, 8), last=nn.Conv2d(8, 2, 1)), images(2, 3, 6)


def up_and_down(up: nn.Module) -> tuple[nn.Module, torch.Tensor]:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        wide = self.encode(x)
        return self.last(torch.cat([wide, self.up(self.middle(self.down(wide)))], 1))

    layers = {
        "encode": ConvBnRelu(3, 4),
        "down": nn.MaxPool2d(2),
        "middle": ConvBnRelu(4, 4),
        "up": up,
        "last": nn.Conv2d(8, 2, 1),
    }
    return Plain(forward, **layers), images(2, 3, 8)


def upsampled() -> tuple[nn.Module, torch.Tensor]:
    return up_and_down(nn.Upsample(scale_factor=2))


def transposed() -> tuple[nn.Module, torch.Tensor]:
    return up_and_down(nn.ConvTranspose2d(4, 4, 2, 2))


def spread_apart() -> tuple[nn.Module, torch.Tensor]:
    """Transposed convolutions whose windows leave gaps, in one direction or both."""
    layers = [nn.ConvTranspose2d(3, 6, 2, 3), nn.ReLU(), nn.ConvTranspose2d(6, 6, (1, 3), (2, 3), groups=2)]
    return nn.Sequential(*layers), images(2, 3, 6)


def resized() -> tuple[nn.Module, torch.Tensor]:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(self.conv(x), scale_factor=2.0, mode="nearest")

    return Plain(forward, conv=nn.Conv2d(3, 3, 1)), images(2, 3, 8)


def grouped() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(ConvBnRelu(3, 8), nn.Sequential(ConvBnRelu(8, 8, groups=4))), images(2, 3, 8)


def norm_shared_by_two_convolutions() -> tuple[nn.Module, torch.Tensor]:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.one(x)) + self.norm(self.two(x))

    return Plain(forward, one=nn.Conv2d(3, 4, 1), two=nn.Conv2d(3, 4, 1), norm=nn.BatchNorm2d(4)), images(2, 3, 8)


def convolution_called_twice() -> tuple[nn.Module, torch.Tensor]:
    shared = nn.Conv2d(3, 3, 3, padding=1)
    return nn.Sequential(shared, nn.ReLU(), shared), images(2, 3, 8)


def tied_weights() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    return model, torch.randn(4, 6)


def smooth_activations() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.SiLU(), nn.Conv2d(4, 4, 1), nn.LeakyReLU(0.1)), images(2, 3, 8)


def dropout_as_a_function() -> tuple[nn.Module, torch.Tensor]:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.conv(x), 0.5, training=self.training)

    return Plain(forward, conv=nn.Conv2d(3, 4, 1)), images(2, 3, 8)


def several_results() -> tuple[nn.Module, torch.Tensor]:
    def forward(self: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.conv(x), x

    return Plain(forward, conv=nn.Conv2d(3, 4, 1)), images(2, 3, 8)


PLAIN = [
    first_layer_depthwise,
    odd_sizes_with_strides,
    even_sizes_with_strides,
    concatenation,
    residual_with_different_scales,
    gates,
    pools,
    dead_channels,
    dense,
    joined_features,
    seen_as_features,
    one_pixel,
    mobilenet_v2_of_a_collection,
    efficientnet_lite_of_a_collection,
    mobilenet_v3_of_a_collection,
    resnet_of_a_collection,
    squeezenet_of_a_collection,
    squeezenet_on_other_sizes,
    windows_over_the_edge,
    ways_to_write_a_head,
    dense_layers,
    in_place_before_a_shortcut,
    shuffled_channels,
    shuffled_groups,
    upsampled,
    transposed,
    spread_apart,
    resized,
    grouped,
    norm_shared_by_two_convolutions,
    convolution_called_twice,
    tied_weights,
    smooth_activations,
    dropout_as_a_function,
    several_results,
]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("build", PLAIN, ids=lambda build: build.__name__)
def test_plain_networks(build: Callable[[], tuple[nn.Module, torch.Tensor]], bits: int, tmp_path: Path) -> None:
    model, batch = build()
    assert_exact(trained(model, batch, qat.Rule(weight_bits=bits, activation_bits=bits)), batch, tmp_path)


@pytest.mark.parametrize("build", PLAIN, ids=lambda build: build.__name__)
def test_calibration_runs_the_float_network(build: Callable[[], tuple[nn.Module, torch.Tensor]]) -> None:
    model, batch = build()
    batch = 3 * batch  # far into every clamp
    prepared = qat.prepare(model.eval(), batch)
    seen: list[torch.Tensor] = []
    prepared.register_forward_hook(lambda module, inputs, result: seen.append(result))
    qat.calibrate(prepared, [batch])
    with torch.no_grad():
        torch.testing.assert_close(seen[0], model(batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranges", ["ema", "last_batch", "percentile", "min_max", "learned"])
def test_shared_ranges_under_every_policy(ranges: str, tmp_path: Path) -> None:
    model, batch = concatenation()
    rules = [qat.Rule("input", ranges="fixed", fixed_range=(-2.0, 2.0)), qat.Rule(ranges=ranges)]
    prepared = trained(model, batch, *rules)
    graph = assert_exact(prepared, batch, tmp_path)
    # The input's range is fixed by its rule: nothing else may move it, and nothing had to be requantized but it.
    assert [operator.kind for operator in graph.operators].count("QUANTIZE") == 0
    one, two = (graph.tensors[name].quantization for name in ("one", "two"))
    assert one.equals(two)
    again = qat.prepare(concatenation()[0], batch, rules)
    again.load_state_dict(prepared.state_dict())
    assert torch.equal(again.eval()(batch), prepared(batch))


def test_a_concatenation_covers_the_widest_of_its_operands() -> None:
    def forward(self: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.narrow(batch), self.wide(batch)], 1)

    layers = {name: nn.Conv2d(2, 2, 1, bias=False) for name in ("narrow", "wide")}
    with torch.no_grad():
        layers["narrow"].weight.fill_(0.1)
        layers["wide"].weight.fill_(5.0)
    batches = [torch.rand(2, 2, 3, 3) for _ in range(4)]
    prepared = qat.prepare(Plain(forward, **layers), batches[0])
    prepared.train()
    for batch in batches:
        prepared(batch)
    quantizer = dict(prepared.layers())["narrow"].output_quantizer
    assert quantizer is dict(prepared.layers())["wide"].output_quantizer
    maxima = [10.0 * batch.mean(1).amax().item() for batch in batches]
    assert int(quantizer.batches) == len(batches)
    assert quantizer.ends()[1].item() == pytest.approx(np.mean(maxima), rel=0.02)
    assert quantizer.ends()[0].item() == 0.0


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_page_on_own_models_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "bring-your-model.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == 4
    # The page goes on with what it has begun.
    subprocess.run([sys.executable, "-c", "\n".join(blocks)], check=True, cwd=tmp_path)
    assert (tmp_path / "model.tflite").read_bytes()[4:8] == b"TFL3"


@pytest.mark.parametrize("page", ["bring-your-model.md", "from-tfmot.md"])
def test_pages_name_what_exists(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    rooms = {"qat": qat, "deploy": exactqat.deploy, "eq": exactqat}
    matches = re.findall(r"`(qat|deploy|eq)((?:\.\w+)+)", text)
    assert len(matches) > 2
    for room, path in matches:
        owner = rooms[room]
        for name in path[1:].split("."):
            try:
                assert hasattr(owner, name), f"{page} names {room}{path}"
            except ImportError as error:  # it is there; its framework, or the backend that Keras takes, is not
                assert "exactqat[" in str(error), error
                break
            owner = getattr(owner, name)
    for call in re.findall(r"Rule\(([^)]*)\)", text):
        fields = re.findall(r"(\w+)=", call)
        assert set(fields) <= set(qat.Rule.__dataclass_fields__), call


class Packed(nn.Module):
    """Queries, keys and values of one matrix, as transformers have them: slices and transposes of many axes."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.last = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = x.view(x.shape[0], 2, 2, 2, 3, 8).permute(0, 1, 3, 2, 4, 5).reshape(x.shape[0] * 4, 6, 8)
        query, key, value = self.all(windows).reshape(-1, 6, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        context = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape[0], 4, 6, 8)
        return self.last(context)


class Scattered(nn.Module):
    """Moves more axes than any runtime does at once, and cuts several of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        apart = self.first(x).view(-1, 2, 3, 2, 2, 3, 2).permute(0, 6, 3, 1, 5, 4, 2)
        return apart[:, :, 1, :, 1:, :, ::2].relu().flatten(2).unsqueeze(-1) * 2


class Overlapping(nn.Module):
    """Windows taken apart and put together again, beside one another and one over the other."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.frame = nn.Linear(18, 18), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> Any:
        windows = F.unfold(x, 3, padding=1, stride=2).transpose(1, 2)
        added = F.fold(self.mix(windows).transpose(1, 2), (6, 6), 3, padding=1, stride=2)
        beside = F.fold(F.unfold(added, (2, 3), stride=(2, 3)), (6, 6), (2, 3), stride=(2, 3))
        return beside, self.frame(added.mean(1).unfold(1, 3, 1).unfold(2, 2, 2).flatten(3))


@pytest.mark.parametrize(("kind", "shape"), [(Packed, (24, 8)), (Scattered, (12, 6)), (Overlapping, (2, 6, 6))])
def test_microcontrollers_take_many_axes(kind: type[nn.Module], shape: tuple[int, ...], tmp_path: Path) -> None:
    from exactqat import deploy
    from exactqat.deploy.values import device_codes

    if "micro" not in deploy.profiles_here():
        pytest.skip("needs TFLite-Micro")
    batch = torch.randn(2, *shape)
    model = trained(kind(), batch)
    graph = assert_exact(model, batch, tmp_path)
    input_codes = {name: codes for name, codes in device_codes(model, batch).items() if name in graph.inputs}
    # `assert_exact` lets microcontrollers refuse a file.
    report = deploy.verify(graph, tmp_path / "model.tflite", input_codes, "micro")
    assert report.differing == 0 < report.values
    for operator in graph.operators:
        if operator.kind in ("TRANSPOSE", "STRIDED_SLICE"):
            assert len(graph.tensors[operator.inputs[0]].shape) <= 5 - (operator.kind == "STRIDED_SLICE")


CHOICES = {
    "sine and cosine": lambda x: torch.where(x > 0.3, x.sin(), x.cos()),
    "window": lambda x: torch.where((x > -1) & (x < 1), x**3, x.sign()),
    "steps": lambda x: torch.where(x > 0.5, 1.0, 0.0) * 2 + x.exp() * (x <= 0) - 0.5,
    "sign with a gradient": lambda x: (x > 0).float() - x.sigmoid().detach() + x.sigmoid(),
    "quotient": lambda x: torch.where(x.abs() > 1e-3, x.tanh() / x, 1.0),
    "poles": lambda x: torch.where(x > 0.1, 1 / x, x.abs().log()),
    "shrink": lambda x: x.masked_fill(x.abs() < 0.2, 0.0),
    "rectified": lambda x: x * (x > 0),
    "leaky": lambda x: torch.where(x > 0, x, 0.1 * x),
}


@pytest.mark.parametrize("bits", [8, 4, 16])
@pytest.mark.parametrize("name", CHOICES)
def test_functions_that_compare_their_value(name: str, bits: int, tmp_path: Path) -> None:
    """One table on the device; before there are grids, PyTorch's values and gradients."""
    layers = {"first": nn.Conv2d(3, 6, 3, padding=1), "last": nn.Conv2d(6, 4, 1)}
    model = Plain(lambda self, x: self.last(CHOICES[name](self.first(x))), **layers)
    batch = images(3, 3, 6)
    rule = qat.Rule(weight_bits=min(bits, 8), activation_bits=bits)
    prepared = qat.prepare(model, batch, [rule])
    with without_quantization(prepared):
        ours, theirs = (
            torch.autograd.grad(network(batch).square().sum(), [*network.parameters()]) for network in (prepared, model)
        )
    assert len(ours) == 4
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)
    graph = assert_exact(trained(model, batch, rule), batch, tmp_path)
    tables = [operator.kind for operator in graph.operators].count("TABLE")
    assert tables == (name not in ("rectified", "leaky"))


def test_a_mask_of_another_tensor_is_refused() -> None:
    layers = {"first": nn.Conv2d(3, 6, 1), "second": nn.Conv2d(3, 6, 1)}
    model = Plain(lambda self, x: torch.where(self.first(x) > 0, self.second(x), 0.0), **layers)
    message = r"torch.gt has no int8 operator in this library; multiply by a mask, or use ReLU"
    with pytest.raises(qat.UnsupportedOperator, match=message):
        qat.prepare(model, images(2, 3, 4))


def test_several_tensors_in_one_argument(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 4), nn.Linear(5, 4)

        def forward(self, pair: Any) -> Any:
            return [self.first(pair[0]) + self.second(pair[1])]

    model = Pair()
    batch = ([torch.randn(2, 6), torch.randn(2, 5)],)
    prepared = qat.prepare(model, batch)
    qat.calibrate(prepared, [batch])
    qat.freeze(prepared)
    assert [value.shape for value in prepared.eval()(*batch)] == [(2, 4)]
    with pytest.raises(ValueError, match="with a tensor among them, got tuple"):
        qat.prepare(model, ([1.0, 2.0],))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("name", ["sum", "difference", "maximum", "product"])
def test_constants_of_zeros_beside_small_values(name: str, bits: int, tmp_path: Path) -> None:
    """Position embeddings start as zeros; a scale of 1 for them was more than 256 times that of small results."""

    def forward(self: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = 0.001 * batch
        combine = {"sum": torch.add, "difference": torch.sub, "maximum": torch.maximum, "product": torch.mul}[name]
        return self.last(combine(x, self.place))

    model = Plain(forward, last=nn.Linear(6, 3))
    model.register_parameter("place", nn.Parameter(torch.zeros(1, 5, 6), requires_grad=False))
    batch = torch.randn(4, 5, 6)
    graph = assert_exact(trained(model, batch, qat.Rule(activation_bits=bits)), batch, tmp_path)
    zeros = [tensor for tensor in graph.tensors.values() if tensor.data is not None and tensor.shape[-2:] == (5, 6)]
    assert zeros and all(float(tensor.quantization.scale[0]) < 1 for tensor in zeros)


def test_frames_shifted_in_time(tmp_path: Path) -> None:
    model, examples = plain_networks.NETWORKS["temporal_shift"]()
    assert_exact(trained(model, examples), examples, tmp_path)


@dataclass
class Found:
    logits: torch.Tensor


def test_results_in_classes_that_pytorch_does_not_know() -> None:
    model = Plain(lambda self, batch: Found(self.last(batch)), last=nn.Linear(6, 3))
    with pytest.raises(
        qat.UnsupportedOperator, match=r"Found.* in output.*register the class \(torch\.export"
    ) as raised:
        qat.prepare(model, torch.randn(4, 6))
    assert "functorch" not in str(raised.value)
