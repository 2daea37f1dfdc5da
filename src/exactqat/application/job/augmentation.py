# SPDX-License-Identifier: Apache-2.0
"""How training images are changed at random, each time they are drawn; `settings.AUGMENTATIONS` names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Range = tuple[float, float]


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


def _uniform(count: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    """A number for each image, [n, 1, 1, 1]."""
    return torch.empty(count, 1, 1, 1).uniform_(low, high, generator=generator)


def _flipped(images: Tensor, generator: torch.Generator, limits: Range) -> Tensor:
    turned = torch.randint(0, 2, (len(images), 1, 1, 1), generator=generator).bool()
    return torch.where(turned, images.flip(3), images)


def _brightened(images: Tensor, generator: torch.Generator, limits: Range) -> Tensor:
    spread = (limits[1] - limits[0]) / 5
    return (images + _uniform(len(images), -spread, spread, generator)).clamp(*limits)


def _contrasted(images: Tensor, generator: torch.Generator, limits: Range) -> Tensor:
    mean = images.mean((1, 2, 3), keepdim=True)
    return (mean + (images - mean) * _uniform(len(images), 0.75, 1.25, generator)).clamp(*limits)


def _noisy(images: Tensor, generator: torch.Generator, limits: Range) -> Tensor:
    spread = (limits[1] - limits[0]) / 20
    return (images + torch.empty_like(images).uniform_(-spread, spread, generator=generator)).clamp(*limits)


def _erased(images: Tensor, generator: torch.Generator, limits: Range) -> Tensor:
    count, _, height, width = images.shape

    def inside(length: int) -> Tensor:
        """[n, length]: whether a position is in the square."""
        side = max(1, length // 4)
        start = torch.randint(0, length - side + 1, (count, 1), generator=generator)
        place = torch.arange(length)
        return (place >= start) & (place < start + side)

    gone = inside(height)[:, None, :, None] & inside(width)[:, None, None, :]
    return images.masked_fill(gone, 0.0)


_DONE: dict[str, Callable[[Tensor, torch.Generator, Range], Tensor]] = {
    "shift": lambda images, generator, limits: shifted(images, generator),
    "time-shift": lambda images, generator, limits: shifted(images, generator, across=False),
    "flip": _flipped,
    "brightness": _brightened,
    "contrast": _contrasted,
    "noise": _noisy,
    "erase": _erased,
}


def augmented(images: Tensor, names: Sequence[str], generator: torch.Generator, limits: Range) -> Tensor:
    """Images changed at random.

    Args:
        images: float32 [n, channels, height, width].
        names: from `settings.AUGMENTATIONS`, in that order, or just "none".
        limits: the smallest and the largest value that an image may have.

    Returns:
        The same shape and dtype, within the limits; zeros where nothing is left.
    """
    for name in names:
        if name != "none":
            images = _DONE[name](images, generator, limits)
    return images
