# SPDX-License-Identifier: Apache-2.0
"""Images that stay on disk: arrays and files are read when they are asked for, so memory does not grow with the data.

Image files are decoded once into a temporary file (in `EXACTQAT_CACHE`, or the system's folder for temporary files),
from which every epoch reads. They keep the bits they came with: 8, or 16.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from ...kit.display import on_one_line

# Images that are read at once where all are looked at.
AT_ONCE = 256
Index = int | slice | Tensor | np.ndarray | Sequence[int]


def scale_of(dtype: np.dtype) -> int:
    """What the number 1 is in images of a dtype."""
    return {"uint8": 255, "uint16": 65535}.get(dtype.name, 1)


def fitted(images: np.ndarray, size: int | None) -> np.ndarray:
    """The middle square of images [n, channels, height, width], scaled to `size`; None: as they are."""
    height, width = images.shape[2:]
    if size is None or (height, width) == (size, size):
        return images
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = torch.from_numpy(np.ascontiguousarray(images[:, :, top : top + side, left : left + side]))
    return F.interpolate(square, (size, size), mode="bilinear", antialias=True, align_corners=False).numpy()


class Images:
    """Images as float32 [n, channels, height, width], read from rows when they are asked for.

    Used like a tensor: `shape`, `len`, indices of images, `split`. Unsigned integers of 8 and 16 bits are divided by
    255 and 65535; all other numbers are used as they are.
    """

    def __init__(self, rows: np.ndarray, numbers: np.ndarray, size: int | None = None) -> None:
        """numbers: of the rows that these images are; size: see `fitted`."""
        self._rows, self._numbers, self._size = rows, numbers, size
        first = self._read(numbers[:1]) if len(numbers) else np.zeros((0, *rows.shape[3:], *rows.shape[1:3]))
        self.shape = torch.Size((len(numbers), *first.shape[1:]))

    def _read(self, numbers: np.ndarray) -> np.ndarray:
        rows = np.asarray(self._rows[numbers])
        images = np.ascontiguousarray(rows.transpose(0, 3, 1, 2), np.float32) / np.float32(scale_of(rows.dtype))
        return fitted(images, self._size)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Index) -> Tensor:
        """The images of a slice, of several numbers, or of one number."""
        if isinstance(index, int | np.integer):
            return self[[int(index)]][0]
        chosen = index.numpy() if isinstance(index, Tensor) else index
        return torch.from_numpy(self._read(self._numbers[chosen]))

    def split(self, size: int) -> Iterator[Tensor]:
        for start in range(0, len(self), size):
            yield self[start : start + size]

    def part(self, index: np.ndarray) -> Images:
        """Some of the images, not yet read."""
        return Images(self._rows, self._numbers[index], self._size)

    def numpy(self) -> np.ndarray:
        """All of them."""
        return self._read(self._numbers)


def temporary_array(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array in a file without a name, which ends with the process."""
    folder = os.environ.get("EXACTQAT_CACHE") or tempfile.gettempdir()
    size = math.prod(shape) * dtype.itemsize
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ValueError(
            f"{shape[0]:,} images take {size / 2**30:,.1f} GiB in {folder}, which has {free / 2**30:,.1f} GiB left; "
            "choose another folder in EXACTQAT_CACHE, or use a smaller image_size (--image-size)"
        )
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(max(size, 1))
        return np.memmap(file, dtype, "r+", shape=shape)


def pixels(image: Image.Image, size: int | None = None) -> np.ndarray:
    """A Pillow image as [height, width] or [height, width, 3], uint8 or uint16.

    EXIF rotation is applied, palettes are resolved, transparent pixels become black, in proportion. The largest square
    in the middle is scaled to `size`.
    """
    image = ImageOps.exif_transpose(image)
    mode = image.mode
    if mode == "F":
        raise ValueError("its pixels are floating-point numbers without a known range; use an .npz file for such data")
    if mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError("its pixels have more than 16 bits")
        wide = Image.fromarray(values.astype(np.float32))
        return np.rint(np.asarray(_scaled(wide, size))).astype(np.uint16)
    gray = "L" if mode in ("1", "L", "LA", "La") else "RGB"
    if mode in ("LA", "La", "RGBA", "RGBa", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.composite(image.convert(gray), Image.new(gray, image.size), image.getchannel("A"))
    return np.asarray(_scaled(image.convert(gray), size))


def _scaled(image: Image.Image, size: int | None) -> Image.Image:
    if size is None or image.size == (size, size):
        return image
    return ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)


def reason(error: Exception) -> str:
    """Why a file cannot be read."""
    return on_one_line(getattr(error, "strerror", None) or str(error) or type(error).__name__)
