# SPDX-License-Identifier: Apache-2.0
"""Data for the job: scikit-learn's digits, rendered letters, an .npz file, a folder of class folders, or any iterable
of (x, y).

How images become numbers, whatever their source:

- Unsigned integers of 8 and 16 bits are divided by 255 and 65535; all other numbers are used as they are.
- Gray images among colored ones become colored. Transparent pixels become black, in proportion. EXIF rotation is
  applied, palettes are resolved, and only the first frame of an animation is used.
- `image_size` crops the largest square in the middle of every image and scales it. Without it all images must have the
  same size.
- Unreadable images are skipped and listed in `Dataset.skipped`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..deploy.examples import NAMES, PART_NAMES, numbered
from ..display import on_one_line
from ..report.results import Dataset, Split
from .files import check_file
from .glyphs import rendered

# The split belongs to the data, not to a run: every seed is judged on the same test images.
SPLIT_SEED = 0
TEST_SHARE, VALIDATION_SHARE = 0.2, 0.15


def load(name: str, image_size: int | None = None, split: str | None = None, reconstructs: bool = False) -> Dataset:
    """The data set of that name.

    Args:
        name: "digits", "glyphs", the path of an .npz file (see `from_npz`) or of a folder (see `from_folder`).
        image_size: height and width to which images are scaled, in pixels.
        split: parts of training, validation and test, and a seed, as `options.split` writes them; for data that is not
            yet divided.

    Raises:
        ValueError: there is none, or it cannot be used; the message says why.
    """
    if name == "digits":
        return digits(image_size, split)
    if name == "glyphs":
        return glyphs(image_size, split)
    path = Path(name)
    if path.suffix == ".npz":
        return from_npz(path, image_size, split)
    if name and path.is_dir():  # without a name it is the working directory
        return from_folder(path, image_size, split)
    raise ValueError(
        f"data must be 'digits', 'glyphs', an .npz file or a folder with one folder of images per class, got {name!r}"
    )


def digits(image_size: int | None = None, split: str | None = None) -> Dataset:
    """scikit-learn's handwritten digits: 1797 images of 8x8 pixels with values 0..16, scaled to 0..1."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = _fitted((bunch.images / 16.0).astype(np.float32)[:, None], image_size)
    return _dataset("digits", {"": (images, bunch.target)}, (0.0, 1.0), split=split)


def glyphs(image_size: int | None = None, split: str | None = None) -> Dataset:
    """2,496 images of letters, 16x16 pixels, rendered here; see `rendered`. The test images are other renderings in the
    same fonts."""
    images, letters = rendered(SPLIT_SEED)
    images = _fitted(_channels_first(images, "glyphs"), image_size)
    return _dataset("glyphs", {"": (images, letters)}, (0.0, 1.0), split=split)


def from_npz(path: Path, image_size: int | None = None, split: str | None = None) -> Dataset:
    """Arrays ``x`` and ``y``, or ``x_train``, ``y_train``, ``x_test``, ``y_test`` and, if given, ``x_val``, ``y_val``.

    x: [n, height, width] or [n, height, width, channels] or [n, channels, height, width] with 1 to 4 channels;
    y: [n], integers or strings; ``classes``, if given, names the integers, or the strings in their order. Images that
    contain NaN or infinity are skipped.

    Raises:
        ValueError: the file or its arrays cannot be used; the message says why.
    """
    names = {part: [f"_{name}" for name in endings] for part, endings in PART_NAMES.items()} | {"": [""]}
    held, arrays = arrays_of(
        path, {NAMES, *(f"{axis}{ending}" for endings in names.values() for ending in endings for axis in "xy")}
    )
    classes = [str(name) for name in arrays.get(NAMES, ())]
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for part in ("", *PART_NAMES):
        for ending in names[part]:
            if f"x{ending}" in arrays and f"y{ending}" in arrays:
                found[part] = (arrays[f"x{ending}"], numbered(path, arrays[f"y{ending}"], classes))
    if "" in found:
        found = {"": found[""]}
    elif not {"train", "test"} <= set(found):
        raise ValueError(
            f"{path} must contain arrays named x and y, or x_train, y_train, x_test and y_test; it contains "
            f"{', '.join(held) or 'nothing'}"
        )
    skipped: list[str] = []
    parts = {}
    for part, (x, y) in found.items():
        where = f"{path}, {part or 'x and y'}"
        check_labels(y, len(x) if x.ndim else 0, where)
        images = _channels_first(x, where)
        finite = np.isfinite(images).all((1, 2, 3))
        skipped += [f"{where}, image {position}: contains NaN or infinity" for position in np.nonzero(~finite)[0]]
        parts[part] = (_fitted(images[finite], image_size), y[finite])
    limits = range_of([images for images, _ in parts.values()])
    dataset = _dataset(path.name, parts, limits, skipped, str(path), split=split)
    if not classes:
        return dataset
    return replace(dataset, class_names=tuple(classes[int(label)] for label in dataset.class_names))


def arrays_of(path: Path, wanted: set[str]) -> tuple[list[str], dict[str, np.ndarray]]:
    """The names of all arrays in an .npz file, and the wanted arrays.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        check_file(path)
        with path.open("rb") as file:
            start = file.read(6)
        if start == b"\x93NUMPY":
            raise ValueError("it contains a single array, not an archive of x and y")
        if start and not start.startswith(b"PK"):  # np.load would treat it as a pickle, and say how to run its code
            raise ValueError("it is not an archive of arrays such as numpy.savez writes")
        with np.load(path, allow_pickle=False) as archive:
            held = sorted(archive.files)
            arrays = {key: _array(archive, key) for key in held if key in wanted}
    except Exception as error:  # noqa: BLE001 - archives and headers of arrays that are damaged raise nearly anything
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ValueError(f"{path} cannot be read as an .npz file: {reason}") from error
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{path} cannot be read as an .npz file: {key} is not an array")
    return held, arrays


def _array(archive: np.lib.npyio.NpzFile, key: str) -> Any:
    try:
        return archive[key]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise ValueError(
            f"{key} contains Python objects; save numbers or strings, such as {key}.astype(str)"
        ) from error


def from_folder(path: Path, image_size: int | None = None, split: str | None = None) -> Dataset:
    """One folder of images for each class, named like the class, read with Pillow.

    With subfolders ``train`` and ``test``, and ``val`` if there is one (in capitals too), each of those holds the class
    folders; otherwise the images are divided here, always in the same way. Names that begin with a dot are not part of
    the data.

    Raises:
        ValueError: a class without a usable image, fewer than two classes, images of different sizes without
            `image_size`.
    """
    folders = _subfolders(path)
    divided: dict[str, Path] = {}
    for part, names in PART_NAMES.items():
        held = [folder for name, folder in folders.items() if name.lower() in names]
        if len(held) == 1:
            divided[part] = held[0]
        elif held:
            raise ValueError(f"{path} holds {' and '.join(folder.name for folder in held)}, which are the same part")
    if not {"train", "test"} <= set(divided):
        # Otherwise a network would learn to distinguish the parts.
        if "train" in divided and len(divided) == len(folders):
            raise ValueError(
                f"{path} holds {' and '.join(folders)}, but no folder test; without one, put the class folders "
                f"directly into {path} to have them split automatically"
            )
        divided = {"": path}
    skipped: list[str] = []
    collected = {part: _read_classes(folder, image_size, skipped) for part, folder in divided.items()}
    first = next(iter(collected.values()))
    for part, (images, labels) in collected.items():
        strangers = sorted(set(labels) - set(first[1]))
        if strangers:
            raise ValueError(
                f"{divided[part]} holds class '{strangers[0]}', which {next(iter(divided.values()))} lacks"
            )
        if not images:
            raise ValueError(f"{divided[part]} contains no image")
    stacked = _stacked([images for images, _ in collected.values()])
    parts = {
        part: (images, np.array(labels)) for (part, (_, labels)), images in zip(collected.items(), stacked, strict=True)
    }
    photos = {
        part: [os.path.relpath(name, on_one_line(path)) for name, _ in images]
        for part, (images, _) in collected.items()
    }
    return _dataset(path.name, parts, (0.0, 1.0), skipped, str(path), photos, split)


def from_pairs(pairs: Iterable[tuple[Any, Any]], name: str = "data", image_size: int | None = None) -> Dataset:
    """Any iterable of (x, y), such as a torch `Dataset`; it is read once and divided here.

    Args:
        pairs: x is a Pillow image, an array or a tensor: [height, width], [height, width, channels] or [channels,
            height, width] with 1 to 4 channels; y an integer or a string.
        name: for the report.
        image_size: see the module.

    Raises:
        ValueError: as `from_folder`; or an x of another shape, a y that is neither.
    """
    from PIL import Image

    images: list[_Named] = []
    labels: list[Any] = []
    skipped: list[str] = []
    for position, (x, y) in enumerate(pairs):
        where = f"{name}, image {position}"
        if isinstance(x, Image.Image):
            image = _pixels(x)
        else:
            array = np.asarray(x)
            if array.ndim not in (2, 3):
                raise ValueError(f"{where}: x must have 2 or 3 dimensions, got shape {list(array.shape)}")
            image = _channels_first(array[None], where)[0]
        if not np.isfinite(image).all():
            skipped.append(f"{where}: contains NaN or infinity")
            continue
        images.append((where, _fitted(image[None], image_size)[0]))
        labels.append(y.item() if hasattr(y, "item") else y)
    if not images:
        raise ValueError(f"{name} contains no usable image")
    y = np.array(labels)
    check_labels(y, len(images), name)
    (stacked,) = _stacked([images])
    return _dataset(name, {"": (stacked, y)}, range_of([stacked]), skipped)


# An image [channels, height, width] and how messages call it.
_Named = tuple[str, np.ndarray]


def _subfolders(path: Path) -> dict[str, Path]:
    found = {entry.name: entry for entry in sorted(path.iterdir()) if entry.is_dir() and not entry.name.startswith(".")}
    for folder in found.values():
        # Otherwise all images would be one more class.
        if folder.is_symlink() and path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(
                f"{on_one_line(folder)} is a link to a folder that contains it; remove it, it is not a class"
            )
    return found


def _files(folder: Path, skipped: list[str]) -> list[Path]:
    """All files below a class folder, in order; `skipped` gets what cannot be opened, or is neither a file nor a
    folder."""
    files: list[Path] = []

    def unread(error: OSError) -> None:
        skipped.append(f"{on_one_line(error.filename)}: its images cannot be read: {error.strerror}")

    for place, folders, names in os.walk(folder, onerror=unread):
        for name in [name for name in folders if name.startswith(".")]:
            folders.remove(name)
        for path in (Path(place, name) for name in (*folders, *names) if not name.startswith(".")):
            # As in os.path: what must not be looked at is neither.
            if os.path.isfile(path):
                files.append(path)
            elif not os.path.isdir(path):
                what = "not a readable file" if os.path.exists(path) else "a link to nothing"
                skipped.append(f"{on_one_line(path)}: {what}")
            elif os.path.islink(path):
                skipped.append(f"{on_one_line(path)}: a link to a folder, which is not followed below a class")
    return sorted(files)


def _read_classes(path: Path, image_size: int | None, skipped: list[str]) -> tuple[list[_Named], list[str]]:
    """All images below the class folders of `path`, and their classes."""
    from PIL import Image

    folders = _subfolders(path)
    if not folders:
        raise ValueError(f"{path} must contain one folder of images per class, but contains no folder")
    images: list[_Named] = []
    labels: list[str] = []
    held = 0
    for label, folder in folders.items():
        before, skipped_before = len(images), len(skipped)
        files = _files(folder, skipped)
        for file in files:
            try:
                with Image.open(file) as image:
                    pixels = _pixels(image)
            except Exception as error:  # noqa: BLE001 - Pillow's decoders raise nearly anything for damaged files
                why = getattr(error, "strerror", None) or str(error) or type(error).__name__
                skipped.append(f"{on_one_line(file)}: {on_one_line(why)}")
                continue
            images.append((on_one_line(file), _fitted(pixels[None], image_size)[0]))
            labels.append(label)
            held += images[-1][1].nbytes
            _check_memory(held, f"{len(images):,} images of {on_one_line(path)}")
        if len(images) == before:
            why = (
                f"none of its {len(files)} files can be read as an image, such as {skipped[-1]}"
                if files
                else "it is empty"
            )
            if not files and len(skipped) > skipped_before:
                why = skipped[-1]
            raise ValueError(f"class '{on_one_line(label)}' has no image in {on_one_line(folder)}: {why}")
    return images, labels


def _pixels(image: Any) -> np.ndarray:
    """A Pillow image as float32 [channels, height, width], 1 channel or 3, values 0..1."""
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    mode = image.mode
    if mode == "F":
        raise ValueError("its pixels are floating-point numbers without a known range; use an .npz file for such data")
    if mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError("its pixels have more than 16 bits")
        return values.astype(np.float32)[None] / np.float32(65535)
    grey = mode in ("1", "L", "LA", "La")
    transparent = mode in ("LA", "La", "RGBA", "RGBa", "PA") or "transparency" in image.info
    if not transparent:
        array = np.asarray(image.convert("L" if grey else "RGB"), np.float32) / np.float32(255)
        return array[None] if grey else array.transpose(2, 0, 1)
    array = np.asarray(image.convert("RGBA"), np.float32).transpose(2, 0, 1) / np.float32(255)
    return array[: 1 if grey else 3] * array[3:]


def _channels_first(x: np.ndarray, where: str) -> np.ndarray:
    """A batch of images as float32 [n, channels, height, width]."""
    if x.dtype.kind not in "biuf":
        raise ValueError(f"{where}: x must contain numbers, got dtype {x.dtype}")
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and 1 <= x.shape[3] <= 4:
        x = x.transpose(0, 3, 1, 2)
    elif x.ndim != 4 or not 1 <= x.shape[1] <= 4:
        raise ValueError(
            f"{where}: x must be [n, height, width], [n, height, width, channels] or [n, channels, height, width] with "
            f"1 to 4 channels, got shape {list(x.shape)}"
        )
    if 0 in x.shape:
        raise ValueError(f"{where}: x is empty, its shape is {list(x.shape)}")
    scale = {"uint8": 255, "uint16": 65535}.get(x.dtype.name, 1)
    return np.ascontiguousarray(x, np.float32) / np.float32(scale)


def check_labels(y: np.ndarray, count: int, where: str) -> None:
    if y.shape != (count,):
        raise ValueError(f"{where}: y must have one label for each of {count} images, got shape {list(y.shape)}")
    if y.dtype.kind not in "biuU":
        raise ValueError(f"{where}: y must contain integers or strings, got dtype {y.dtype}")


def range_of(parts: Sequence[np.ndarray]) -> tuple[float, float]:
    """0..1 if the images keep to it, otherwise their extremes with zero."""
    low = min(float(images.min(initial=0.0)) for images in parts)
    high = max(float(images.max(initial=0.0)) for images in parts)
    if low == 0 and high <= 1:
        return 0.0, 1.0
    return low, high


def _check_memory(size: int, what: str) -> None:
    """Refuses images of more bytes than half of this machine's memory, before the system kills the process: dividing
    them takes a second copy."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return  # not on Windows
    if size > memory // 2:
        raise ValueError(
            f"{what} take {size / 2**30:,.1f} GiB as numbers, more than half of this machine's memory of "
            f"{memory / 2**30:,.1f} GiB; use a smaller image_size (--image-size), or fewer images"
        )


def _fitted(images: np.ndarray, size: int | None) -> np.ndarray:
    """The middle square of images [n, channels, height, width], scaled to `size`."""
    height, width = images.shape[2:]
    if size is None or (height, width) == (size, size):
        return images
    _check_memory(4 * len(images) * images.shape[1] * size**2, f"{len(images):,} images of {size}x{size} pixels")
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = torch.from_numpy(np.ascontiguousarray(images[:, :, top : top + side, left : left + side]))
    return F.interpolate(square, (size, size), mode="bilinear", antialias=True, align_corners=False).numpy()


def _stacked(parts: Sequence[list[_Named]]) -> list[np.ndarray]:
    """Each part as one array; grey images get three equal channels if any image of any part has colors."""
    first_name, first = parts[0][0]
    channels = max(image.shape[0] for part in parts for _, image in part)
    for name, image in (named for part in parts for named in part):
        if image.shape[1:] != first.shape[1:]:
            sizes = " and ".join(
                f"{where} has {shape[1]}x{shape[0]} pixels"
                for where, shape in ((first_name, first.shape[1:]), (name, image.shape[1:]))
            )
            raise ValueError(f"images differ in size ({sizes}); set image_size (--image-size) to scale them all")
        if image.shape[0] not in (1, channels):
            raise ValueError(f"{name} has {image.shape[0]} channels, others have {channels}")
    return [
        np.stack([image if image.shape[0] == channels else np.repeat(image, channels, 0) for _, image in part])
        for part in parts
    ]


def _dataset(
    name: str,
    parts: dict[str, tuple[np.ndarray, np.ndarray]],
    value_range: tuple[float, float],
    skipped: Sequence[str] = (),
    where: str = "",
    names: Mapping[str, Sequence[str]] | None = None,
    split: str | None = None,
) -> Dataset:
    """Assembles the parts; one part called "" is divided into three, and a missing validation part is split off.

    Args:
        where: the data is, for messages; its name if that says enough.
        names: of each part's images, if they have any.
        split: see `load`.
    """
    where = where or name
    whole = next(iter(parts.values()))
    # Strings in their order, integers in theirs.
    labels = np.unique(whole[1])
    class_names = tuple(str(label) for label in labels)
    if len(labels) < 2:
        only = f"only class '{class_names[0]}'" if len(labels) else "none"
        raise ValueError(f"{where} must contain at least two classes, but contains {only}")
    shapes = {part: images.shape[1:] for part, (images, _) in parts.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"{where}: the parts differ in the shape of their images: {shapes}")
    codes = {}
    for part, (_, y) in parts.items():
        strangers = np.setdiff1d(y, labels)
        if len(strangers):
            raise ValueError(f"{where}: part '{part}' holds class '{strangers[0]}', which the training part lacks")
        codes[part] = np.searchsorted(labels, y).astype(np.int64)
    splits = {
        part: Split(
            torch.from_numpy(np.ascontiguousarray(images)),
            torch.from_numpy(codes[part]),
            tuple(names[part]) if names else (),
        )
        for part, (images, _) in parts.items()
    }
    if split is not None and "" not in splits:
        raise ValueError(f"{where} is divided into {' and '.join(splits)} already: omit --split {split}")
    if "" in splits:
        of_validation, of_test, seed = _shares(split)
        rest, test = _divided(where, splits.pop(""), of_test, class_names, 3, seed)
        train, validation = _divided(where, rest, of_validation / (1 - of_test), class_names, 2, seed)
        splits = {"train": train, "validation": validation, "test": test}
    elif "validation" not in splits:
        train, validation = _divided(where, splits["train"], VALIDATION_SHARE, class_names, least=2)
        splits |= {"train": train, "validation": validation}
    train, validation, test = (splits[part] for part in PART_NAMES)
    return Dataset(name, class_names, value_range, train, validation, test, tuple(skipped))


def _shares(split: str | None) -> tuple[float, float, int]:
    """The shares of validation and test, and a seed."""
    if split is None:
        return VALIDATION_SHARE, TEST_SHARE, SPLIT_SEED
    parts, _, seed = split.partition(":")
    train, validation, test = map(int, parts.split("/"))
    whole = train + validation + test
    return validation / whole, test / whole, int(seed)


def _divided(
    where: str, split: Split, share: float, class_names: tuple[str, ...], least: int, seed: int = SPLIT_SEED
) -> tuple[Split, Split]:
    """Divides a part into the rest and a share, always the same for a seed; every class has its share of both, at least
    one image."""
    generator = np.random.default_rng(seed)
    labels = split.labels.numpy()
    taken = []
    for code, class_name in enumerate(class_names):
        members = generator.permutation(np.nonzero(labels == code)[0])
        if len(members) < least:
            raise ValueError(
                f"{where}: class '{class_name}' has {len(members)} images to divide, at least {least} are needed"
            )
        # Something has to remain for the other parts.
        taken.append(members[: min(len(members) - least + 1, max(1, round(share * len(members))))])
    smaller = np.sort(np.concatenate(taken))
    larger = np.setdiff1d(np.arange(len(labels)), smaller)
    # Not in class order: batches without shuffling, as in calibration, should hold all classes.
    parts = [torch.from_numpy(generator.permutation(indices)) for indices in (larger, smaller)]
    first, second = (
        Split(split.images[part], split.labels[part], tuple(split.names[index] for index in part if split.names))
        for part in parts
    )
    return first, second
