# SPDX-License-Identifier: Apache-2.0
"""Weights to start from: a state dict or safetensors from any source, loaded into a network as far as they match.

Files are read as `checkpoints` reads its own: no code in them is run, and their contents are checked before they are
used. Tensors are matched by name and shape; the result says what matched and what did not.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ...kit.display import listed, shortened
from .checkpoints import DTYPES, read_archive, reason
from .files import check_file

# How many names of a kind are shown, and how long.
SHOWN, NAME_LENGTH = 5, 80
_names = functools.partial(listed, most=SHOWN, length=NAME_LENGTH)


@dataclass(frozen=True)
class Fit:
    """What a network took from a file of weights.

    Attributes:
        digest: of the file, SHA-256.
        sentences: what a user should know about it.
    """

    digest: str
    sentences: Sequence[str]


def put(model: nn.Module, path: Path) -> Fit:
    """Loads the weights from a file into a network, as far as their names and shapes agree.

    Args:
        path: of a state dict that `torch.save` wrote, alone or as part of a checkpoint, or of safetensors. An
            additional prefix of all matching names, such as "module.", is removed.
    """
    content, tensors = read(path)
    own = {name: entry for name, entry in model.state_dict().items() if isinstance(entry, Tensor)}
    prefix = _prefix(tensors, own)
    tensors = {name.removeprefix(prefix): entry for name, entry in tensors.items()}
    fitting: dict[str, Tensor] = {}
    other_shapes = []
    for name in [name for name in own if name in tensors]:
        entry, expected = tensors[name], own[name]
        same_kind = entry.is_floating_point() == expected.is_floating_point()
        if entry.dtype not in DTYPES or entry.shape != expected.shape or not same_kind:
            other_shapes.append(f"{name} ({_what(expected)} in the network, {_what(entry)} in the file)")
            continue
        fitting[name] = entry.detach().to(expected.dtype)
        where = f"{path}: {shortened(name, NAME_LENGTH)}"
        if not torch.isfinite(fitting[name]).all():
            raise ValueError(f"{where} contains NaN or infinity")
        if name.endswith("running_var") and (fitting[name] < 0).any():
            raise ValueError(f"{where} contains negative variances")
    # Batch counts alone, which fit any batch norm with that name, are not weights.
    if not any(entry.is_floating_point() for entry in fitting.values()):
        theirs, ours = (_names([f"{name} {_what(entry)}" for name, entry in held.items()]) for held in (tensors, own))
        raise ValueError(
            f"{path} contains no weights of this network: its tensors are {theirs}; the network's are {ours}"
        )
    with torch.no_grad():
        for name, entry in fitting.items():
            own[name].copy_(entry)
    share = sum(entry.numel() for entry in fitting.values()) / sum(entry.numel() for entry in own.values())
    # Only all of it is 100 %.
    percent = "100%" if share == 1 else f"{min(share, 0.999):.1%}"
    without = f", their names without {shortened(prefix, NAME_LENGTH)!r}" if prefix else ""
    matching = f"{len(fitting):,} of the network's {len(own):,} tensors match ({percent} of its numbers{without})"
    others = {
        "missing from the file, initialized as in a new network": [name for name in own if name not in tensors],
        "with other shapes, initialized as in a new network": other_shapes,
        "not in this network, ignored": [name for name in tensors if name not in own],
    }
    sentences = [f"  {words}: {_names(names)}" for words, names in others.items() if names]
    return Fit(hashlib.sha256(content).hexdigest(), [f"Weights from {path}: {matching}", *sentences])


def read(path: Path) -> tuple[bytes, dict[str, Tensor]]:
    """A file's content, and its tensors by name; raises what `put` raises for any network."""
    if not path.exists():
        raise FileNotFoundError(f"--weights {path} does not exist")
    check_file(path)
    content = path.read_bytes()
    try:
        if content[:4] == b"PK\x03\x04":
            tensors = _state_dict(read_archive(content))
        elif content[8:9] == b"{" and int.from_bytes(content[:8], "little") <= len(content):
            from safetensors.torch import load

            tensors = dict(load(content))
        else:
            raise ValueError("it is neither a state dict written by torch.save (since PyTorch 1.6) nor safetensors")
    except ModuleNotFoundError:
        raise
    except Exception as error:  # noqa: BLE001 - readers of pickles and archives raise nearly anything for damaged files
        raise ValueError(f"{path} cannot be read as weights: {reason(error)}") from error
    for name, entry in tensors.items():
        if entry.layout != torch.strided or entry.device.type != "cpu" or entry.is_nested:
            raise ValueError(f"{path}: {shortened(name, NAME_LENGTH)} is not a dense tensor of numbers")
    return content, tensors


def _state_dict(content: object) -> dict[str, Tensor]:
    """The largest state dict in a checkpoint: all of it, or one of its entries."""
    if not isinstance(content, Mapping):
        raise ValueError(f"it contains a {type(content).__name__} where a state dict is expected")
    held = [
        {name: entry for name, entry in part.items() if type(name) is str and isinstance(entry, Tensor)}
        for part in (content, *content.values())
        if isinstance(part, Mapping)
    ]
    largest = max(held, key=len)
    if not largest:
        raise ValueError(f"it contains no named tensors; it has {_names(list(map(str, content))) or 'nothing'}")
    return largest


def _prefix(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """The prefix without which most names are the network's; wrappers such as DistributedDataParallel add one."""
    counts = Counter({"": 0})
    for name in tensors:
        parts = name.split(".")
        for place in range(len(parts)):
            counts["".join(f"{part}." for part in parts[:place])] += ".".join(parts[place:]) in own
    return max(counts, key=lambda prefix: (counts[prefix], -len(prefix)))


def _what(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
