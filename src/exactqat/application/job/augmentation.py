# SPDX-License-Identifier: Apache-2.0
"""How training images are changed at random, each time they are drawn; `settings.AUGMENTATIONS` names them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def shifted(images: Tensor, generator: torch.Generator, across: bool = True) -> Tensor:
    """Every image moved by up to an eighth of its size, at least a pixel, along each axis; zeros fill the edge.

    across: False moves along the first axis only.
    """
    count, _, height, width = images.shape
    down, aside = max(1, height // 8), max(1, width // 8) if across else 0
    rows = torch.arange(height) + torch.randint(0, 2 * down + 1, (count, 1), generator=generator)
    columns = torch.arange(width) + torch.randint(0, 2 * aside + 1, (count, 1), generator=generator)
    padded = F.pad(images, (aside, aside, down, down))
    everyone = torch.arange(count)[:, None, None]
    return padded.movedim(1, 3)[everyone, rows[:, :, None], columns[:, None, :]].movedim(3, 1)


def augmented(images: Tensor, names: Sequence[str], generator: torch.Generator, limits: tuple[float, float]) -> Tensor:
    """Images changed at random.

    Args:
        images: float32 [n, channels, height, width].
        names: from `settings.AUGMENTATIONS`, in that order, or just "none".
        limits: the smallest and the largest value that an image may have.

    Returns:
        The same shape and dtype, within the limits; zeros where nothing is left.
    """
    count, extent = len(images), limits[1] - limits[0]

    def uniform(low: float, high: float) -> Tensor:
        """A number for each image."""
        return torch.empty(count, 1, 1, 1).uniform_(low, high, generator=generator)

    for name in names:
        if name in ("shift", "time-shift"):
            images = shifted(images, generator, across=name == "shift")
        elif name == "flip":
            turned = torch.randint(0, 2, (count, 1, 1, 1), generator=generator).bool()
            images = torch.where(turned, images.flip(3), images)
        elif name == "brightness":
            images = (images + uniform(-extent / 5, extent / 5)).clamp(*limits)
        elif name == "contrast":
            mean = images.mean((1, 2, 3), keepdim=True)
            images = (mean + (images - mean) * uniform(0.75, 1.25)).clamp(*limits)
        elif name == "noise":
            noise = torch.empty_like(images).uniform_(-extent / 20, extent / 20, generator=generator)
            images = (images + noise).clamp(*limits)
    return images
