# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what a training run or a network needs to continue, as data. Reading one never runs code it contains.

The format is PyTorch's archive, read with ``weights_only=True``; what comes out is checked before it is used: plain
numbers, strings, lists and dictionaries, and dense tensors that own what they show.
"""

from __future__ import annotations

import io
import math
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...kit.display import shortened
from .files import Record, check_file, first_line, write_atomically
from .settings import split

CHECKPOINT_FORMAT = 2
# Numbers in the largest image that a checkpoint may ask for: 4096 x 4096, grey.
LARGEST_IMAGE = 2**24
DEEPEST = 16
DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
}  # fmt: skip


# What a field must be, in words, and whether a value is that.
Kind = tuple[str, Callable[[object], bool]]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and 0 <= value <= 2**63


TEXT: Kind = ("a string", lambda value: type(value) is str)
OBJECT: Kind = ("an object", lambda value: isinstance(value, dict))
NUMBER: Kind = ("a number of at least 0", _number)
WHOLE: Kind = ("a whole number of at least 0", lambda value: type(value) is int and _number(value))
TEXTS: Kind = ("a list of strings", lambda value: isinstance(value, list) and all(type(text) is str for text in value))


def check_fields(holder: object, where: object, kinds: Mapping[str, Kind]) -> Mapping[str, Any]:
    """The object, if it has these fields; one that may be nothing may be missing.

    Args:
        where: it is, for messages.
    """
    if not isinstance(holder, Mapping):
        raise ValueError(f"{where} must be an object, got {shortened(repr(holder), 100)}")
    for name, (words, fits) in kinds.items():
        if name not in holder and not fits(None):
            raise ValueError(f"{where} has no field {name!r}")
        if not fits(holder.get(name)):
            raise ValueError(f"{where}: {name} must be {words}, got {shortened(repr(holder.get(name)), 100)}")
    return holder


def save_checkpoint(path: Path, checkpoint: Record) -> None:
    """Writes what `load_checkpoint` returns; equal content gives equal bytes."""
    # Through memory: torch.save would put the temporary file's random name into the archive.
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    write_atomically(path, buffer.getvalue())


def load_checkpoint(path: Path) -> Record:
    """What `save_checkpoint` wrote."""
    check_file(path)
    content = path.read_bytes()
    try:
        checkpoint = read_archive(content)
        _check_plain(checkpoint, "it", 0)
    except Exception as error:  # noqa: BLE001 - readers of pickles and archives raise nearly anything for damaged files
        raise ValueError(f"{path} cannot be read as a checkpoint: {reason(error)}") from error
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != CHECKPOINT_FORMAT:
        raise ValueError(
            f"{path} is not a checkpoint of format {CHECKPOINT_FORMAT}; it comes from another program or version"
        )
    return checkpoint


def read_archive(content: bytes) -> Any:
    """What `torch.save` wrote, as far as it is data. Raises nearly anything for damaged files."""
    _check_archive(content)
    with warnings.catch_warnings():
        # About pickles that PyTorch did not write: they are read or refused.
        warnings.simplefilter("ignore")
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def reason(error: Exception) -> str:
    """Why an archive was refused. PyTorch's own advice is to run what it contains; ours is not."""
    refused = re.search(r"unsupported (?:global|class)\W+(?:global )?([\w.]+)", str(error), re.IGNORECASE)
    if refused:
        return (
            f"it contains {refused[1]}, and code that a file names is not run; to save a network, save "
            "model.state_dict()"
        )
    if "eights only load failed" in str(error):
        return "it is not a state dict, or damaged"
    return first_line(error)


def _check_archive(content: bytes) -> None:
    """PyTorch's reader skips checksums, and unpacks even what was packed to fill all memory."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = archive.infolist()
        parts = {member.filename.partition("/")[2] for member in members}
        if {"constants.pkl", "data.pkl"} <= parts:
            raise ValueError("it is a TorchScript program; save its state_dict() with torch.save")
        if not {"data.pkl", "version"} <= parts:
            raise ValueError("it is an archive, but not one written by torch.save")
        packed = [member.filename for member in members if member.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise ValueError(f"its part {packed[0]} is compressed")
        if sum(member.file_size for member in members) > len(content):
            raise ValueError("its parts are larger than the file")
        damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"its part {damaged} is damaged")


def _check_plain(value: object, where: str, depth: int) -> None:
    if depth > DEEPEST:
        raise ValueError(f"{where} is nested too deeply")
    if isinstance(value, dict) and type(value) in (dict, OrderedDict):
        for key, entry in value.items():
            if type(key) not in (str, int):
                raise ValueError(f"{where} has a key of type {type(key).__name__}")
            _check_plain(entry, f"{where}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        for position, entry in enumerate(value):
            _check_plain(entry, f"{where}[{position}]", depth + 1)
    elif isinstance(value, Tensor) and type(value) is Tensor:
        if value.layout != torch.strided or value.device.type != "cpu" or value.dtype not in DTYPES or value.is_nested:
            raise ValueError(f"{where} is not a dense tensor of numbers")
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(f"{where} shows more numbers than it stores")
    elif type(value) not in (type(None), bool, int, float, str):
        raise ValueError(f"{where} is of type {type(value).__name__}")


def check_network(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Refuses a checkpoint that is not one of a quantized network, field by field."""
    if "rules" not in checkpoint:
        raise ValueError(f"{path} is not a checkpoint of a quantized network")

    def is_shape(value: object) -> bool:
        # Channels, height and width, or features.
        fits = isinstance(value, list) and len(value) in (1, 3) and all(type(n) is int and n > 0 for n in value)
        return fits and math.prod(value) <= LARGEST_IMAGE  # type: ignore[call-overload]

    def has_names(value: object) -> bool:
        return isinstance(value, dict) and all(type(name) is str for name in value)

    size = f"1 or 3 positive integers whose product is at most {LARGEST_IMAGE:,}"
    kinds: dict[str, Kind] = {
        "input_shape": (size, is_shape),
        "class_names": ("a list of strings", lambda value: TEXTS[1](value) and value != []),
        "rules": ("a list of rules", lambda value: isinstance(value, list) and all(map(has_names, value))),
        "state": ("a state dict", has_names),
    }
    check_fields(checkpoint, path, dict.fromkeys(("network", "data", "precision", "method"), TEXT) | kinds)
    side = checkpoint.get("image_size")
    if side is not None and (type(side) is not int or checkpoint["input_shape"][1:] != [side, side]):
        raise ValueError(f"{path}: image_size must be None or the height and width in input_shape, got {side!r:.100}")
    if checkpoint.get("split") is not None:
        try:
            split(checkpoint["split"])
        except ValueError as error:
            raise ValueError(f"{path}: split {error}") from error
    # A file of a few bytes must not be able to request a network that fills all memory.
    held = sum(entry.numel() for entry in checkpoint["state"].values() if isinstance(entry, Tensor))
    if len(checkpoint["class_names"]) > held:
        raise ValueError(f"{path} has {len(checkpoint['class_names']):,} class names, but only {held:,} weights")
