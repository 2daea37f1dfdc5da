# SPDX-License-Identifier: Apache-2.0
"""Data as users have it, some examples at a time: arrays, loaders, generators and files, with or without targets."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..kit.display import on_one_line, shortened

# Arrays of any framework, nested in tuples, lists and dictionaries, and loaders of these.
Data = Any
# In a file: what the examples are, what they belong to, and what the targets are called.
INPUTS, TARGETS, NAMES = "x", "y", "classes"
# What the parts may be called, as folders and, after a bar, at the end of an array's name.
PART_NAMES = {"train": ("train", "training"), "validation": ("val", "valid", "validation"), "test": ("test",)}
# Parts that are taken where a file lacks the one asked for, the nearest first.
INSTEAD = {"test": ("test", "validation"), "validation": ("validation", "train"), "train": ("train",)}


class StoredArrays(Mapping[str, np.ndarray]):
    """The arrays of an .npz file by name, or that of an .npy file as ``x``.

    Each is read when it is asked for, and stays on disk: packed ones in a temporary file, in the folder EXACTQAT_CACHE
    if that is set. They need not be aligned in memory; `numpy.require` copies them if they must be.

    Raises:
        OSError: the file cannot be read. ValueError: it is not such a file, or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._single: np.ndarray | None = None
        self._members: dict[str, zipfile.ZipInfo] = {}
        with self._reading():
            if self.path.exists() and not self.path.is_file():  # a pipe may never end
                raise ValueError("it is not a regular file")
            with self.path.open("rb") as file:
                start = file.read(6)
            if start == np.lib.format.MAGIC_PREFIX:
                self._single = np.load(self.path, "c", allow_pickle=False)
            elif start and not start.startswith(b"PK"):  # numpy.load would take it for a pickle, whose code runs
                raise ValueError("it is not an archive of arrays such as numpy.savez writes")
            else:
                with zipfile.ZipFile(self.path) as archive:
                    self._members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}

    def __getitem__(self, name: str) -> np.ndarray:
        if self._single is not None and name == INPUTS:
            return self._single
        info = self._members[name]
        with self._reading(), zipfile.ZipFile(self.path) as archive, archive.open(info) as member:
            try:
                version = np.lib.format.read_magic(member)
                first = version == (1, 0)
                header = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
                shape, in_fortran, dtype = header(member)
            except ValueError as error:
                raise ValueError(f"{name} is not an array ({error})") from error
            if dtype.hasobject:
                raise ValueError(f"{name} contains Python objects; save numbers or strings, such as {name}.astype(str)")
            size, begin = dtype.itemsize * int(np.prod(shape, dtype=np.int64)), member.tell()
            if info.file_size - begin != size:
                raise ValueError(f"{name} is not as long as it says")
            order: Literal["F", "C"] = "F" if in_fortran else "C"
            if not size:
                return np.empty(shape, dtype, order)
            if info.compress_type == zipfile.ZIP_STORED:
                while member.read(1 << 20):  # for its checksum
                    pass
                return np.memmap(self.path, dtype, "c", self._place(info) + begin, shape, order)
            with tempfile.TemporaryFile(dir=os.environ.get("EXACTQAT_CACHE")) as file:
                shutil.copyfileobj(member, file, 1 << 20)
                return np.memmap(file, dtype, "c", 0, shape, order)

    def __iter__(self) -> Iterator[str]:
        return iter([INPUTS] if self._single is not None else self._members)

    def __len__(self) -> int:
        return 1 if self._single is not None else len(self._members)

    def _place(self, info: zipfile.ZipInfo) -> int:
        """Where the content of a member begins: after its header, which ends with a name and extra fields."""
        with self.path.open("rb") as file:
            file.seek(info.header_offset + 26)
            name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
        return info.header_offset + 30 + name + extra

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - damaged archives and headers of arrays raise nearly anything
            reason = on_one_line(str(error) or type(error).__name__)
            raise ValueError(f"{shortened(self.path)} cannot be read as an .npz file: {reason}") from error


def endings_in(arrays: Iterable[str]) -> dict[str, str]:
    """By part of the examples, how the names of its arrays end: ``{"train": "_train", "test": "_test"}``;
    ``{"": ""}`` if they are not divided."""
    names = set(arrays)
    if INPUTS in names:
        return {"": ""}
    suffixes: dict[str, str] = {}
    for part, endings in PART_NAMES.items():
        for ending in endings:
            if f"{INPUTS}_{ending}" in names:
                suffixes.setdefault(part, f"_{ending}")
    return suffixes


@dataclass(frozen=True)
class Examples:
    """What a file holds.

    Attributes:
        inputs: an array, or several by name.
        targets: one for each example; None: the file has none.
    """

    inputs: Data
    targets: np.ndarray | None


def read_examples(
    path: str | os.PathLike[str], part: str = "test", targets_needed: bool = False, names: Collection[str] = ()
) -> Examples:
    """The examples of an .npz or .npy file, as `exactqat train --data` takes it and as docs/data.md describes
    it: inputs ``x``, or several by their own names, and targets ``y``; or ``x_train``, ``y_train``,
    ``x_test``, ``y_test`` and, if given, ``x_val``, ``y_val``.

    Args:
        part: which of them: train, validation or test; where it is missing, the nearest one.
        names: of the network's inputs; one of them may be called as targets usually are.

    Raises:
        OSError: it cannot be read. ValueError: it is not such a file, or its arrays are not examples.
    """
    stored = StoredArrays(path)

    def read(name: str) -> np.ndarray:
        return np.require(stored[name], requirements="A")

    if {TARGETS, NAMES} & set(names):
        return Examples({name: read(name) for name in stored if name in names}, None)
    endings, training = endings_in(stored), None
    classes = [str(name) for name in stored.get(NAMES, ())]
    held = [name for name in stored if name != NAMES]
    if endings and "" not in endings:
        ending = next((endings[wanted] for wanted in INSTEAD[part] if wanted in endings), None)
        if ending is None:
            raise ValueError(
                f"{path} has no examples of the part {part}: it needs {INPUTS}_{part}, and holds {_listed(held)}"
            )
        inputs, targets = {INPUTS: read(f"{INPUTS}{ending}")}, stored.get(f"{TARGETS}{ending}")
        training = stored.get(f"{TARGETS}{endings.get('train', '_train')}")
        held = [INPUTS] if targets is None else [INPUTS, TARGETS]
    else:
        inputs, targets = {name: read(name) for name in held if name != TARGETS}, stored.get(TARGETS)
    if not inputs or (targets_needed and targets is None):
        raise ValueError(
            f"{path} must be an .npz file of the inputs and the classes {TARGETS}; it holds {_listed(held)}"
        )
    _check(path, inputs, targets)
    if targets is not None and targets.ndim == 1:
        if training is not None and not classes and not np.issubdtype(training.dtype, np.floating):
            # As training numbers them.
            targets = numbered(path, targets.astype(str), [str(label) for label in np.unique(training)])
        elif classes or _are_texts(targets):
            targets = numbered(path, targets, classes or [str(label) for label in np.unique(targets)])
    return Examples(next(iter(inputs.values())) if len(inputs) == 1 else inputs, targets)


def _are_numbers(array: np.ndarray) -> bool:
    real = np.issubdtype(array.dtype, np.number) and not np.issubdtype(array.dtype, np.complexfloating)
    return real or array.dtype == np.bool_


def _are_texts(array: np.ndarray) -> bool:
    return np.issubdtype(array.dtype, np.character)


def _check(path: str | os.PathLike[str], inputs: Mapping[str, np.ndarray], targets: np.ndarray | None) -> None:
    for name, array in inputs.items():
        if array.ndim == 0 or not _are_numbers(array) or not len(array):
            raise ValueError(
                f"{path}: {name} must hold numbers, an example in each row, got {array.dtype} of shape "
                f"{list(array.shape)}"
            )
    counts = {name: len(array) for name, array in inputs.items()}
    if targets is not None:
        counts[TARGETS] = len(targets) if targets.ndim else 0
        if not (_are_numbers(targets) or _are_texts(targets)):
            raise ValueError(f"{path}: {TARGETS} must hold numbers or texts, got {targets.dtype}")
    if len(set(counts.values())) > 1:
        (first, count), *others = counts.items()
        said = " and ".join(f"{name} {other}" for name, other in others)
        raise ValueError(f"{path}: {first} has {count} examples and {said}; there must be as many of each")


def numbered(path: str | os.PathLike[str], targets: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    """Classes as numbers: texts by their place among the names; without names, and where they are numbers within
    them, as they are.

    Raises:
        ValueError: a class is not among them.
    """
    if not classes:
        return targets
    texts = _are_texts(targets)
    places = {name if texts else place: place for place, name in enumerate(classes)}
    strangers = sorted({str(target) for target in targets.tolist() if target not in places})
    if strangers:
        raise ValueError(f"{path}: {TARGETS} holds the class {strangers[0]!r}, which is not one of {list(classes)}")
    return np.array([places[target] for target in targets.tolist()], np.int64)


def _listed(arrays: Iterable[str]) -> str:
    return ", ".join(map(shortened, arrays)) or "nothing"


# --- some examples at a time -----------------------------------------------------------------------------------------


def leaves_of(batch: Data) -> list[Data]:
    """The arrays in a batch, however it nests them."""
    if isinstance(batch, Mapping):
        return [leaf for branch in batch.values() for leaf in leaves_of(branch)]
    if isinstance(batch, tuple | list):
        return [leaf for branch in batch for leaf in leaves_of(branch)]
    return [batch] if getattr(batch, "ndim", 0) else []


def without_targets(batch: Data, inputs: int) -> Data:
    """What a network of so many inputs takes of a batch: loaders give targets too, and perhaps weights."""
    if not isinstance(batch, tuple | list) or not batch:
        return batch
    if len(leaves_of(batch)) == inputs and len(batch) <= inputs:
        return batch
    if len(leaves_of(batch[0])) == inputs:
        return batch[0]
    return batch[:inputs] if len(leaves_of(batch[:inputs])) == inputs else batch


def examples_in(data: Data, inputs: int) -> int | None:
    """How many examples data holds; None where only reading it tells."""
    if not _at_once(data, inputs):
        try:
            return len(data.dataset)
        except (AttributeError, TypeError):
            return None
    sizes = [len(leaf) for leaf in leaves_of(without_targets(data, inputs))]
    return sizes[0] if sizes else 0


def batches_of(data: Data, inputs: int, batch_size: int) -> Iterator[Data]:
    """Data for a network of so many inputs, at most `batch_size` examples at a time, without targets.

    Args:
        data: all examples, nested as the network takes them (an array, several in a tuple or by name), with targets in
            a tuple beside them or without; or a loader or another iterable of such batches, which is read once.

    Raises:
        TypeError: it is something else. ValueError: there are no examples, or not as many for every input.
    """
    empty = True
    for batch in (data,) if _at_once(data, inputs) else _loaded(data):
        features = without_targets(batch, inputs)
        sizes = [len(leaf) for leaf in leaves_of(features)]
        if len(set(sizes)) > 1:
            raise ValueError(f"data must contain the same number of examples for every input, got {sizes}")
        for start in range(0, sizes[0] if sizes else 0, batch_size):
            empty = False
            yield _rows(features, slice(start, start + batch_size))
    if empty:
        raise ValueError("data contains no examples, so there is nothing to compare")


def is_file(data: Data) -> bool:
    """Whether data is the path of a file of examples."""
    return isinstance(data, os.PathLike) or (isinstance(data, str) and data.endswith((".npz", ".npy")))


def unless_file(data: Data, names: Collection[str]) -> Data:
    """Data itself, or the inputs in the file that it names. names: of the network's inputs."""
    return read_examples(data, names=names).inputs if is_file(data) else data


def _at_once(data: Data, inputs: int) -> bool:
    """Whether data is all examples, and not batches of them."""
    if isinstance(data, list) and (any(isinstance(batch, tuple) for batch in data) or len(leaves_of(data)) != inputs):
        return False
    return isinstance(data, Mapping | tuple | list) or bool(getattr(data, "ndim", 0))


def _loaded(data: Data) -> Iterator[Data]:
    if isinstance(data, str | bytes) or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        raise TypeError(f"data must be arrays, or a loader of batches of them, got {type(data).__name__}")
    if hasattr(data, "__iter__"):
        return iter(data)
    return map(data.__getitem__, range(len(data)))  # such as keras.utils.PyDataset


def _rows(batch: Data, rows: slice) -> Data:
    if isinstance(batch, Mapping):
        return {key: _rows(value, rows) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [_rows(value, rows) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch[rows] if getattr(batch, "ndim", 0) else batch
