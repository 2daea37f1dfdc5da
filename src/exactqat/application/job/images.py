# SPDX-License-Identifier: Apache-2.0
"""Images that stay on disk: arrays and files are read when they are asked for, so memory does not grow with the data.

Image files are decoded once, by threads, into a temporary file (in `EXACTQAT_CACHE`, or the system's folder for
temporary files), from which every later epoch reads, in 8 bits.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from ...kit.display import on_one_line
from .files import first_line

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

    def __init__(self, rows: np.ndarray | Files, numbers: np.ndarray, size: int | None = None) -> None:
        """rows: [n, height, width, channels]; numbers: of those that these images are; size: see `fitted`."""
        self._rows, self._numbers, self._size = rows, numbers, size
        first = self._read(numbers[:1]) if len(numbers) else np.zeros((0, *rows.shape[3:], *rows.shape[1:3]))
        self.shape = torch.Size((len(numbers), *first.shape[1:]))

    def _stored(self, numbers: np.ndarray) -> np.ndarray:
        rows = np.asarray(self._rows[numbers])
        let_go(self._rows)
        return rows

    def _read(self, numbers: np.ndarray) -> np.ndarray:
        rows = self._stored(numbers)
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

    def content(self) -> Iterator[bytes]:
        """What identifies the images: their stored bytes; of files that were not all read, names and sizes."""
        if isinstance(self._rows, Files) and not self._rows.ready[self._numbers].all():
            for path in (self._rows.paths[number] for number in self._numbers):
                yield f"{path} {os.path.getsize(path)}".encode()
            return
        for start in range(0, len(self), AT_ONCE):
            rows = self._stored(self._numbers[start : start + AT_ONCE])
            yield rows.dtype.str.encode() + rows.tobytes()


def let_go(rows: object) -> None:
    """Gives the memory of an array in a file back. What was read of it stays in the system's cache, or on disk."""
    mapped = getattr(getattr(rows, "pixels", rows), "_mmap", None)
    if isinstance(mapped, mmap.mmap) and hasattr(mapped, "madvise"):  # not on Windows
        mapped.madvise(mmap.MADV_DONTNEED)


def pixels(image: Image.Image, size: int | None = None) -> np.ndarray:
    """A Pillow image as [height, width] or [height, width, 3], uint8.

    EXIF rotation is applied, palettes are resolved, transparent pixels become black, in proportion.

    Args:
        size: the largest square in the middle is scaled to it.
    """
    image = ImageOps.exif_transpose(image)
    mode = image.mode
    if mode[0] in "FI":
        raise ValueError("its pixels have more than 8 bits, without a known range; use an .npz file for such data")
    gray = "L" if mode in ("1", "L", "LA", "La") else "RGB"
    if mode in ("LA", "La", "RGBA", "RGBa", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.composite(image.convert(gray), Image.new(gray, image.size), image.getchannel("A"))
    image = image.convert(gray)
    return np.asarray(ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR) if size else image)


class Files:
    """Image files as rows, decoded when they are asked for first.

    Args:
        paths: of the files; size: see `pixels`.
        shape: height, width and channels.
    """

    def __init__(self, paths: Sequence[str], shape: tuple[int, int, int], size: int | None) -> None:
        self.paths, self._size = paths, size
        self.shape: tuple[int, ...] = (len(paths), *shape)
        folder = os.environ.get("EXACTQAT_CACHE") or tempfile.gettempdir()
        held, free = math.prod(self.shape), shutil.disk_usage(folder).free
        if held > free:
            raise ValueError(
                f"{len(paths):,} images take {held / 2**30:,.1f} GiB in {folder}, which has {free / 2**30:,.1f} GiB "
                "left; choose another folder in EXACTQAT_CACHE, or use a smaller image_size (--image-size)"
            )
        with tempfile.TemporaryFile(dir=folder) as file:  # without a name, so it ends with the process
            file.truncate(max(held, 1))
            self.pixels: np.ndarray = np.memmap(file, np.uint8, "r+", shape=self.shape)
        self.ready = np.zeros(len(paths), bool)
        self._threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
        self._lock = threading.Lock()

    def _decode(self, number: int) -> str:
        """Reads one file; a sentence if that fails."""
        try:
            with Image.open(self.paths[number]) as image:
                decoded = pixels(image, self._size)
        except Exception as error:  # noqa: BLE001 - Pillow's decoders raise nearly anything for damaged files
            return first_line(error)
        if decoded.shape[:2] != self.shape[1:3]:
            height, width = decoded.shape[:2]
            return f"it has {width}x{height} pixels and others {self.shape[2]}x{self.shape[1]}"
        if decoded.ndim > 2 and self.shape[3] == 1:
            return "it has colors, and others have not"
        self.pixels[number] = decoded[:, :, None] if decoded.ndim == 2 else decoded
        self.ready[number] = True
        return ""

    def read(self, numbers: np.ndarray) -> dict[int, str]:
        """Decodes files, and returns why that failed for some."""
        with self._lock:
            missing = numbers[~self.ready[numbers]].tolist()
            failed = dict(zip(missing, self._threads.map(self._decode, missing), strict=True))
            let_go(self)
            return {number: why for number, why in failed.items() if why}

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        for number, why in self.read(numbers).items():
            raise ValueError(
                f"{on_one_line(self.paths[number])} cannot be read: {why}. Of so many files a sample is read before "
                "training: remove it, and start again"
            )
        return self.pixels[numbers]
