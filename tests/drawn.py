# SPDX-License-Identifier: Apache-2.0
"""Small tasks with data drawn on the spot: segmentation, detection and keyword spotting, and a network for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Outputs = Any


@dataclass(frozen=True)
class Task:
    """A network, its data, what it is trained for and how it is judged (0..1, from its outputs on the test data)."""

    build: Callable[[], nn.Module]
    data: Callable[[np.random.Generator, int], tuple[Tensor, Any]]
    loss: Callable[[Outputs, Any], Tensor]
    score: Callable[[Outputs, Any], float]
    batches: int
    tuning: int
    rate: float


def shapes(rng: np.random.Generator, count: int, size: int, most: int) -> tuple[Tensor, Tensor, list[list[tuple]]]:
    """Noisy images [count, 1, size, size] of discs (1) and squares (2), pixels' classes, and (class, y, x, radius)."""
    images = rng.normal(0, 0.1, (count, 1, size, size)).astype(np.float32)
    labels = np.zeros((count, size, size), np.int64)
    rows, columns = np.mgrid[:size, :size]
    boxes: list[list[tuple]] = []
    for image, label in zip(images, labels, strict=True):
        figures = []
        taken = np.zeros((size, size), bool)
        for _ in range(int(rng.integers(1, most + 1))):
            radius = rng.uniform(size / 12, size / 4)
            y, x = rng.uniform(radius, size - radius, 2)
            kind = int(rng.integers(1, 3))
            far = np.hypot(rows - y, columns - x) if kind == 1 else np.maximum(abs(rows - y), abs(columns - x))
            inside = far <= radius
            if (taken & (np.maximum(abs(rows - y), abs(columns - x)) <= radius + 2)).any() or not inside.any():
                continue
            taken |= inside
            image[0][inside] += rng.uniform(0.6, 1.2) * (1 if kind == 1 else -1) ** int(rng.integers(2))
            label[inside] = kind
            figures.append((kind - 1, y, x, radius))
        boxes.append(figures)
    return torch.from_numpy(images), torch.from_numpy(labels), boxes


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    """Three levels; up by a transposed convolution and by bilinear interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([DoubleConv(1, 8), DoubleConv(8, 16), DoubleConv(16, 32)])
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.join = nn.ModuleList([DoubleConv(32, 16), DoubleConv(24, 8)])
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](F.max_pool2d(first, 2))
        third = self.down[2](F.max_pool2d(second, 2))
        second = self.join[0](torch.cat([self.up(third), second], dim=1))
        larger = F.interpolate(second, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.join[1](torch.cat([larger, first], dim=1)))


def segmentation_data(rng: np.random.Generator, count: int) -> tuple[Tensor, Tensor]:
    images, labels, _ = shapes(rng, count, 32, 3)
    return images, labels


def intersection_over_union(outputs: Tensor, labels: Tensor) -> float:
    predicted = outputs.argmax(1)
    scores = []
    for kind in range(3):
        both = ((predicted == kind) & (labels == kind)).sum()
        scores.append(float(both / ((predicted == kind) | (labels == kind)).sum().clamp(min=1)))
    return float(np.mean(scores))


class C2f(nn.Module):
    """YOLOv8's block: a part of the channels goes through a bottleneck, all parts are joined."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels), nn.SiLU())
        half = channels // 2
        self.bottleneck = nn.Sequential(
            nn.Conv2d(half, half, 3, padding=1, bias=False), nn.BatchNorm2d(half), nn.SiLU()
        )
        self.after = nn.Sequential(
            nn.Conv2d(channels + half, channels, 1, bias=False), nn.BatchNorm2d(channels), nn.SiLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.before(x).chunk(2, 1))
        parts.append(parts[-1] + self.bottleneck(parts[-1]))
        return self.after(torch.cat(parts, 1))


def stem(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.SiLU()
    )


class Detector(nn.Module):
    """A YOLO-like detector with outputs at strides 4, 8 and 16: objectness, two classes and four numbers of the box."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(stem(1, 8), stem(8, 16), C2f(16))
        self.middle = nn.Sequential(stem(16, 24), C2f(24))
        self.deep = nn.Sequential(stem(24, 32), C2f(32))
        self.lateral = nn.Conv2d(32, 24, 1)
        self.join = C2f(48)
        self.heads = nn.ModuleList([nn.Conv2d(channels, 7, 1) for channels in (16, 48, 32)])

    def forward(self, x: Tensor) -> list[Tensor]:
        small = self.stem(x)
        middle = self.middle(small)
        deep = self.deep(middle)
        up = F.interpolate(self.lateral(deep), scale_factor=2, mode="nearest")
        middle = self.join(torch.cat([up, middle], 1))
        return [head(features) for head, features in zip(self.heads, (small, middle, deep), strict=True)]


STRIDES, SIZE = (4, 8, 16), 48
REACH = (5.0, 8.0, 99.0)  # the largest radius of each level


def detection_data(rng: np.random.Generator, count: int) -> tuple[Tensor, list[Tensor]]:
    images, _, boxes = shapes(rng, count, SIZE, 1)
    targets = [torch.zeros(count, 7, SIZE // stride, SIZE // stride) for stride in STRIDES]
    for index, figures in enumerate(boxes):
        for kind, y, x, radius in figures:
            level = next(level for level, reach in enumerate(REACH) if radius <= reach)
            stride = STRIDES[level]
            row, column = int(y / stride), int(x / stride)
            box = [y / stride - row, x / stride - column, np.log(radius / stride), 1.0]
            target = [1.0, float(kind == 0), float(kind == 1), *box]
            targets[level][index, :, row, column] = torch.tensor(target, dtype=torch.float32)
    return images, targets


def detection_loss(outputs: list[Tensor], targets: list[Tensor]) -> Tensor:
    total = outputs[0].new_zeros(())
    for output, target in zip(outputs, targets, strict=True):
        there = target[:, :1]
        weight = 1 + 4 * there
        total = total + F.binary_cross_entropy_with_logits(output[:, :1], there, weight=weight) * 10
        errors = F.binary_cross_entropy_with_logits(output[:, 1:3], target[:, 1:3], reduction="none")
        distances = F.smooth_l1_loss(output[:, 3:6], target[:, 3:6], reduction="none")
        total = total + ((errors.sum(1, keepdim=True) + 2 * distances.sum(1, keepdim=True)) * there).sum() / (
            there.sum().clamp(min=1)
        )
    return total


def best_boxes(levels: list[Tensor]) -> Tensor:
    """Class, centre and radius in pixels of the most probable shape of each image, [count, 4]."""
    columns = []
    for level, stride in zip(levels, STRIDES, strict=True):
        rows, across = torch.meshgrid(*[torch.arange(size) for size in level.shape[2:]], indexing="ij")
        kind = level[:, 1:3].argmax(1).float()
        y, x = (level[:, 3] + rows) * stride, (level[:, 4] + across) * stride
        radius = level[:, 5].clamp(-3, 3).exp() * stride
        columns.append(torch.stack([level[:, 0], kind, y, x, radius], 1).flatten(2))
    every = torch.cat(columns, 2)
    best = every[:, 0].argmax(1)
    return every[torch.arange(len(every)), 1:, best]


def detection_score(outputs: list[Tensor], targets: list[Tensor]) -> float:
    """Share of the images whose best box has the right class and overlaps the shape's by half of both together."""
    boxes, there = best_boxes(outputs), best_boxes(targets)
    overlap = torch.ones(len(boxes))
    for axis in (1, 2):
        low = torch.maximum(boxes[:, axis] - boxes[:, 3], there[:, axis] - there[:, 3])
        high = torch.minimum(boxes[:, axis] + boxes[:, 3], there[:, axis] + there[:, 3])
        overlap = overlap * (high - low).clamp(min=0)
    union = 4 * boxes[:, 3] ** 2 + 4 * there[:, 3] ** 2 - overlap
    return float(((boxes[:, 0] == there[:, 0]) & (overlap / union > 0.5)).float().mean())


class Spotter(nn.Module):
    """Keywords from [batch, channels, time]: Conv1d with strides, residual blocks, the mean over time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(1, 16, 32, stride=8, bias=False), nn.BatchNorm1d(16), nn.ReLU())
        self.pool = nn.MaxPool1d(2)
        self.second = nn.Sequential(nn.Conv1d(16, 24, 9, padding=4, bias=False), nn.BatchNorm1d(24), nn.ReLU())
        self.third = nn.Sequential(
            nn.Conv1d(24, 24, 9, padding=4, groups=24, bias=False), nn.BatchNorm1d(24), nn.ReLU(),
            nn.Conv1d(24, 24, 1, bias=False), nn.BatchNorm1d(24),
        )  # fmt: skip
        self.last = nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.pool(self.first(x)))
        y = F.relu(y + self.third(y))
        return self.last(y.mean(dim=2))


def tones(rng: np.random.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Six words of noise and gliding tones: three starting pitches, up or down."""
    words = rng.integers(0, 6, count)
    time = np.arange(1024) / 1024
    pitch = np.array([20.0, 40.0, 70.0])[words % 3] * rng.uniform(0.9, 1.1, count)
    glide = np.where(words < 3, 1, -1) * 0.7 * pitch
    start = rng.uniform(0, 2 * np.pi, count)[:, None]
    phase = 2 * np.pi * (pitch[:, None] * time + glide[:, None] * time**2 / 2) + start
    loud = rng.uniform(0.4, 1, count)[:, None]
    signal = loud * np.sin(phase) + rng.normal(0, 0.5, phase.shape)
    return torch.from_numpy(signal[:, None].astype(np.float32)), torch.from_numpy(words)


def accuracy(outputs: Tensor, labels: Tensor) -> float:
    return float((outputs.argmax(1) == labels).float().mean())


TASKS = {
    "segmentation": Task(UNet, segmentation_data, F.cross_entropy, intersection_over_union, 150, 60, 4e-3),
    "detection": Task(Detector, detection_data, detection_loss, detection_score, 400, 120, 1e-2),
    "keywords": Task(Spotter, tones, F.cross_entropy, accuracy, 200, 60, 4e-3),
}


def train(model: nn.Module, task: Task, batches: int, rate: float, seed: int, parameters: Any = None) -> None:
    """Adam with a rate that falls to nothing, on data that never repeats."""
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.Adam(parameters or model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=batches)
    model.train()
    for _ in range(batches):
        images, targets = task.data(rng, 32)
        optimizer.zero_grad()
        task.loss(model(images), targets).backward()
        optimizer.step()
        schedule.step()
