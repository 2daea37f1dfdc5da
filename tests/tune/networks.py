# SPDX-License-Identifier: Apache-2.0
"""A small trained network and its data, for the tests of this folder."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import nn


def examples(count: int, seed: int, noise: float = 1.5) -> tuple[np.ndarray, np.ndarray]:
    """Images [count, 1, 8, 8] with one brighter quarter, and which one it is."""
    rng = np.random.default_rng(seed)
    classes = rng.integers(0, 4, count)
    images = rng.normal(0, noise, (count, 1, 8, 8)).astype(np.float32)
    for image, number in zip(images, classes, strict=True):
        row, column = divmod(int(number), 2)
        image[0, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4] += 1
    return images, classes


class Small(nn.Module):
    """Layers first, second and last."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = nn.ReLU6()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.last = nn.Linear(192, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(self.limit(x + 2) - 2)))
        x = torch.relu(self.second(x))
        return self.last(x.flatten(1))


@functools.cache
def _trained() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Small()
    images, classes = (torch.from_numpy(array) for array in examples(512, 0))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), classes).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def trained() -> Small:
    """A new copy in evaluation mode."""
    model = Small()
    model.load_state_dict(_trained())
    return model.eval()
