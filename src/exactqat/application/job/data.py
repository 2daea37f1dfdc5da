# SPDX-License-Identifier: Apache-2.0
"""Data for the job: scikit-learn's digits, an .npz file, or a folder of class folders.

How images become numbers, whatever their source:

- Unsigned integers of 8 and 16 bits are divided by 255 and 65535; all other numbers are used as they are. Image files
  have 8 bits.
- Gray images among colored ones become colored. Transparent pixels become black, in proportion. EXIF rotation is
  applied, palettes are resolved, and only the first frame of an animation is used.
- `image_size` crops the largest square in the middle of every image and scales it; files of 8 bits keep 8 bits. Without
  it all images must have the same size.
- Unreadable images are skipped and listed in `Dataset.skipped`; of more than MOST_CHECKED files, a sample is read.

Arrays and files stay on disk and are read when they are needed (`images.py`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ...deploy.examples import NAMES, PART_NAMES, StoredArrays, endings_in, numbered
from ...kit.display import on_one_line
from .files import first_line
from .images import AT_ONCE, Files, Images, let_go, scale_of
from .results import Dataset, Progress, Split

# The split belongs to the data, not to a run: every seed is judged on the same test images.
SPLIT, SPLIT_SEED = "65/15/20:0", 0
# The share of validation images where only training and test images are divided.
VALIDATION_SHARE = 0.15
# The most files that are all read before training; of more files so many are read, evenly.
MOST_CHECKED, SAMPLE = 100_000, 2_000
# Images of a part, read or not, and their labels.
Part = tuple[Images, np.ndarray]
Tell = Callable[[int, int], object]


def load(name: str, image_size: int | None = None, split: str | None = None, tell: Tell = Progress.compared) -> Dataset:
    """The data set of that name.

    Args:
        name: "digits", scikit-learn's handwritten digits: 1797 images of 8x8 pixels with values 0..16, scaled to 0..1;
            the path of an .npz file (see `from_npz`) or of a folder (see `from_folder`).
        image_size: height and width to which images are scaled, in pixels.
        split: parts of training, validation and test, and a seed, as `settings.split` writes them; for data that is not
            yet divided.
        tell: takes how many of how many files were read.
    """
    path = Path(name)
    if name == "digits":
        from sklearn.datasets import load_digits

        bunch = load_digits()
        return from_arrays({"": ((bunch.images / 16.0).astype(np.float32), bunch.target)}, name, image_size, split)
    if path.suffix == ".npz":
        return from_npz(path, image_size, split)
    if name and path.is_dir():  # without a name it is the working directory
        return from_folder(path, image_size, split, tell)
    raise ValueError(
        f"data must be 'digits', an .npz file or a folder with one folder of images per class, got {name!r}"
    )


def from_npz(path: Path, image_size: int | None = None, split: str | None = None) -> Dataset:
    """Arrays ``x`` and ``y``, or ``x_train``, ``y_train``, ``x_test``, ``y_test`` and, if given, ``x_val``, ``y_val``;
    see `from_arrays`. ``classes``, if given, names the integers, or the strings in their order."""
    try:
        stored = StoredArrays(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read as an .npz file: {first_line(error)}") from error
    classes = [str(name) for name in stored.get(NAMES, ())]
    pairs = {
        part: (stored[f"x{ending}"], numbered(path, stored[f"y{ending}"], classes))
        for part, ending in endings_in(stored).items()
        if f"y{ending}" in stored
    }
    if "" not in pairs and not {"train", "test"} <= pairs.keys():
        raise ValueError(
            f"{path} must contain arrays named x and y, or x_train, y_train, x_test and y_test; it contains "
            f"{', '.join(stored) or 'nothing'}"
        )
    dataset = from_arrays(pairs, path.name, image_size, split, str(path))
    names = (classes[int(label)] if classes else label for label in dataset.class_names)
    return replace(dataset, class_names=tuple(names))


def from_arrays(
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]], name: str = "data", image_size: int | None = None,
    split: str | None = None, where: str = "",
) -> Dataset:  # fmt: skip
    """Arrays by part, or all under "", which are then divided.

    Args:
        pairs: x [n, height, width] or [n, height, width, channels] or [n, channels, height, width] with 1 to 4
            channels; y [n], integers or strings.
    """
    parts: dict[str, Part] = {}
    low, high = 0.0, 0.0
    for part, (x, y) in pairs.items():
        place = f"{where or name}, {part or 'x and y'}"
        if y.shape != (len(x) if x.ndim else 0,):
            raise ValueError(f"{place}: y must have one label for each of {len(x)} examples, got shape {list(y.shape)}")
        if y.dtype.kind not in "biuU":
            raise ValueError(f"{place}: y must contain integers or strings, got dtype {y.dtype}")
        rows = _channels_last(x, place)
        for start in range(0, len(rows), AT_ONCE):
            block, scale = rows[start : start + AT_ONCE], scale_of(rows.dtype)
            low, high = min(low, float(block.min(initial=0)) / scale), max(high, float(block.max(initial=0)) / scale)
            if not np.isfinite(block.sum(dtype=np.float64)):
                strange = start + int(np.argmin(np.isfinite(block).all((1, 2, 3))))
                raise ValueError(f"{place}, example {strange}: contains NaN or infinity; leave it out")
            let_go(rows)
        parts[part] = (Images(rows, np.arange(len(rows)), image_size), y)
    # 0..1 if the images keep to it, otherwise their extremes with zero.
    limits = (0.0, 1.0) if low == 0 and high <= 1 else (float(np.float32(low)), float(np.float32(high)))
    return _dataset(name, parts, limits, where=where, split=split)


def from_folder(
    path: Path, image_size: int | None = None, split: str | None = None, tell: Tell = Progress.compared
) -> Dataset:
    """One folder of images for each class, named like the class, read with Pillow.

    With subfolders ``train`` and ``test``, and ``val`` if there is one (in capitals too), each of those holds the class
    folders; otherwise the images are divided here, always in the same way. Names that begin with a dot are not part of
    the data.
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
    listed: dict[str, dict[str, list[str]]] = {}
    for part, folder in divided.items():
        listed[part] = {label: _files_below(place, skipped) for label, place in _subfolders(folder).items()}
        if not listed[part]:
            raise ValueError(f"{folder} must contain one folder of images per class, but contains no folder")
    files = [(part, label, name) for part in listed for label, names in listed[part].items() for name in names]
    rows, usable = _read_files([name for *_, name in files], image_size, skipped, tell)
    counts = Counter(file[:2] for file, good in zip(files, usable, strict=True) if good)
    first = next(iter(listed))
    parts: dict[str, Part] = {}
    photos: dict[str, list[str]] = {}
    for part, folder in divided.items():
        for label in listed[part]:
            if label not in listed[first]:
                raise ValueError(f"{folder} holds class '{label}', which {divided[first]} lacks")
            if not counts[part, label]:
                place = on_one_line(folder / label)
                why = next((sentence for sentence in reversed(skipped) if sentence.startswith(place)), "it is empty")
                raise ValueError(f"class '{on_one_line(label)}' has no image that can be read in {place}: {why}")
        numbers = np.array([number for number, file in enumerate(files) if usable[number] and file[0] == part])
        parts[part] = (Images(rows, numbers), np.array([files[number][1] for number in numbers]))
        photos[part] = [on_one_line(files[number][2].removeprefix(f"{path}/")) for number in numbers]
    return _dataset(path.name, parts, (0.0, 1.0), skipped, str(path), photos, split)


def _subfolders(path: Path) -> dict[str, Path]:
    with os.scandir(path) as entries:
        folders = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    return {name: path / name for name in sorted(folders)}


def _files_below(folder: Path, skipped: list[str]) -> list[str]:
    """All files below a folder, in order; `skipped` gets what cannot be opened, or is neither a file nor a folder."""

    def unreadable(error: OSError) -> None:
        skipped.append(f"{on_one_line(error.filename)}: its images cannot be read: {error.strerror}")

    files: list[str] = []
    for place, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in [os.path.join(place, name) for name in (*names, *folders) if not name.startswith(".")]:
            if os.path.isfile(file):
                files.append(file)
            elif os.path.islink(file) or not os.path.isdir(file):
                skipped.append(f"{on_one_line(file)}: not a readable file, or a link to a folder below a class")
    return sorted(files, key=lambda name: name.split("/"))


def _read_files(
    names: Sequence[str], image_size: int | None, skipped: list[str], tell: Tell
) -> tuple[Files, np.ndarray]:
    """The files' images, and whether each can be used; `skipped` gets those that cannot."""
    every = len(names) <= MOST_CHECKED
    checked = np.arange(len(names)) if every else np.linspace(0, len(names) - 1, SAMPLE).astype(int)
    usable, failed = np.ones(len(names), bool), dict[int, str]()
    sizes: dict[tuple[int, int], str] = {}
    channels = 1
    for done, number in enumerate(checked.tolist()):
        if done % AT_ONCE == 0:
            tell(done, 2 * len(checked))  # first all headers, then all images
        try:
            with Image.open(names[number]) as image:
                turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
                sizes.setdefault(image.size[::-1] if turned else image.size, on_one_line(names[number]))
                channels = max(channels, 1 if image.mode[0] in "1LIF" else 3)
        except Exception as error:  # noqa: BLE001 - Pillow's decoders raise nearly anything for damaged files
            failed[number] = first_line(error)
    if image_size is None and len(sizes) > 1:
        two = " and ".join(f"{name} has {width}x{height} pixels" for (width, height), name in list(sizes.items())[:2])
        raise ValueError(f"images differ in size ({two}); set image_size (--image-size) to scale them all")
    width, height = (image_size, image_size) if image_size is not None else next(iter(sizes), (1, 1))
    rows = Files(names, (height, width, channels), image_size)
    left = np.setdiff1d(checked, list(failed)).astype(int)
    for start in range(0, len(left), AT_ONCE):
        failed |= rows.read(left[start : start + AT_ONCE])
        tell(len(checked) + min(start + AT_ONCE, len(left)), len(checked) + len(left))
    usable[list(failed)] = False
    skipped += [f"{on_one_line(names[number])}: {failed[number]}" for number in sorted(failed)]
    return rows, usable


def _channels_last(x: np.ndarray, where: str) -> np.ndarray:
    """A batch of images as [n, height, width, channels], without a copy."""
    if x.dtype.kind not in "biuf":
        raise ValueError(f"{where}: x must contain numbers, got dtype {x.dtype}")
    if x.ndim == 3:
        x = x[..., None]
    elif x.ndim == 4 and not 1 <= x.shape[3] <= 4 and 1 <= x.shape[1] <= 4:
        x = x.transpose(0, 2, 3, 1)
    elif x.ndim != 4 or not 1 <= x.shape[3] <= 4:
        raise ValueError(
            f"{where}: x must be [n, height, width], [n, height, width, channels] or [n, channels, height, width] with "
            f"1 to 4 channels, got shape {list(x.shape)}"
        )
    if 0 in x.shape:
        raise ValueError(f"{where}: x is empty, its shape is {list(x.shape)}")
    return x


def _dataset(
    name: str, parts: dict[str, Part], value_range: tuple[float, float], skipped: Sequence[str] = (), where: str = "",
    names: Mapping[str, Sequence[str]] | None = None, split: str | None = None,
) -> Dataset:  # fmt: skip
    """Assembles the parts; one part called "" is divided into three, and a missing validation part is split off.

    Args:
        where: the data is, for messages; its name if that says enough.
        names: of each part's images, if they have any.
        split: see `load`.
    """
    where = where or name
    # Strings in their order, integers in theirs.
    labels = np.unique(next(iter(parts.values()))[1])
    class_names = tuple(str(label) for label in labels)
    if len(labels) < 2:
        only = f"only class '{class_names[0]}'" if len(labels) else "none"
        raise ValueError(f"{where} must contain at least two classes, but contains {only}")
    shapes = {part: tuple(images.shape[1:]) for part, (images, _) in parts.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"{where}: the parts differ in the shape of their examples: {shapes}")
    splits = {}
    for part, (images, y) in parts.items():
        strangers = np.setdiff1d(y, labels)
        if len(strangers):
            raise ValueError(f"{where}: part '{part}' holds class '{strangers[0]}', which the training part lacks")
        codes = torch.from_numpy(np.searchsorted(labels, y).astype(np.int64))
        splits[part] = Split(images, codes, tuple(names[part]) if names else ())
    if split is not None and "" not in splits:
        raise ValueError(f"{where} is divided into {' and '.join(splits)} already: omit --split {split}")
    if "" in splits:
        shares, _, seed = (split or SPLIT).partition(":")
        sizes = [int(share) for share in shares.split("/")]
        of_validation, of_test = sizes[1] / sum(sizes), sizes[2] / sum(sizes)
        rest, splits["test"] = _divided(where, splits.pop(""), of_test, class_names, 3, int(seed))
        of_rest = of_validation / (1 - of_test)
        splits["train"], splits["validation"] = _divided(where, rest, of_rest, class_names, 2, int(seed))
    elif "validation" not in splits:
        divided = _divided(where, splits["train"], VALIDATION_SHARE, class_names, 2, SPLIT_SEED)
        splits["train"], splits["validation"] = divided
    train, validation, test = (splits[part] for part in PART_NAMES)
    return Dataset(name, class_names, value_range, train, validation, test, tuple(skipped))


def _divided(
    where: str, split: Split, share: float, class_names: tuple[str, ...], least: int, seed: int
) -> tuple[Split, Split]:
    """Divides a part into the rest and a share, always the same for a seed; every class has its share of both, at least
    one image."""
    generator = np.random.default_rng(seed)
    labels = split.labels.numpy()
    chosen = []
    for code, class_name in enumerate(class_names):
        members = generator.permutation(np.nonzero(labels == code)[0])
        if len(members) < least:
            raise ValueError(
                f"{where}: class '{class_name}' has {len(members)} examples to divide, at least {least} are needed"
            )
        # Something has to remain for the other parts.
        chosen.append(members[: min(len(members) - least + 1, max(1, round(share * len(members))))])
    smaller = np.sort(np.concatenate(chosen))
    larger = np.setdiff1d(np.arange(len(labels)), smaller)
    # Not in class order: batches without shuffling, as in calibration, should hold all classes.
    parts = []
    for indices in (generator.permutation(larger), generator.permutation(smaller)):
        names = tuple(split.names[index] for index in indices if split.names)
        images = split.images.part(indices)  # type: ignore[union-attr]
        parts.append(Split(images, split.labels[indices], names))
    return parts[0], parts[1]
