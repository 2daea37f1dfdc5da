# SPDX-License-Identifier: Apache-2.0
"""Weights to start from: a state dict or safetensors from any source, loaded into a network as far as they match.

Files are read as `checkpoints` reads its own: no code in them is run, and their contents are checked before they are
used. Tensors are matched by name and shape; the result says what matched and what did not.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..report.text import printable, shortened
from .checkpoints import DTYPES, read_archive, reason
from .fields import SHARE, TEXT, TEXTS, WHOLE, check_fields
from .files import check_file

# Names under which programs keep a state dict among other things; the first that holds tensors counts.
WRAPPERS = ("state_dict", "model_state_dict", "best", "state", "model", "module", "network", "net", "weights", "params")
# How many names of a kind are printed; metrics.json has all.
SHOWN = 5
NAME_LENGTH = 80
SAFETENSORS_HEADER = 8


@dataclass(frozen=True)
class Fit:
    """What a network took from a file of weights.

    Attributes:
        digest: of the file, SHA-256.
        fitted: how many of the network's tensors were taken over.
        share: of the network's numbers that these hold, 0..1.
        prefix: what was removed from the front of the file's names.
        missing: the network's tensors that the file lacks. They stay as in a new network.
        unexpected: the file's tensors that the network lacks.
        other_shapes: tensor, the network's shape, the file's shape; these also stay as in a new network.
    """

    digest: str
    fitted: int
    share: float
    prefix: str = ""
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    other_shapes: tuple[tuple[str, str, str], ...] = ()

    @property
    def whole(self) -> bool:
        """Whether all of the network's numbers come from the file."""
        return not self.missing and not self.other_shapes

    def stored(self) -> dict[str, Any]:
        """For JSON; `restored` is its counterpart."""
        return asdict(self)

    def sentences(self, path: str) -> list[str]:
        """What a user should know about it."""
        total = self.fitted + len(self.missing) + len(self.other_shapes)
        without = f", their names without {shortened(self.prefix, NAME_LENGTH)!r}" if self.prefix else ""
        lines = [
            f"Weights from {path}: {self.fitted:,} of the network's {total:,} tensors match ({_percent(self.share)} of "
            f"its numbers{without})"
        ]
        if self.missing:
            lines.append(f"  missing from the file, initialized as in a new network: {_names(self.missing)}")
        if self.other_shapes:
            shapes = [f"{name} ({here} in the network, {there} in the file)" for name, here, there in self.other_shapes]
            lines.append(f"  with other shapes, initialized as in a new network: {_names(shapes)}")
        if self.unexpected:
            lines.append(f"  not in this network, ignored: {_names(self.unexpected)}")
        return lines


def restored(stored: Any) -> Fit:
    """The inverse of `Fit.stored`.

    Raises:
        ValueError: it is not such a value.
    """
    shapes = ("rows", lambda rows: isinstance(rows, list) and all(TEXTS[1](row) and len(row) == 3 for row in rows))
    kinds = {"digest": TEXT, "fitted": WHOLE, "share": SHARE, "prefix": TEXT, "missing": TEXTS, "unexpected": TEXTS}
    try:
        held = check_fields(stored, "weights", kinds | {"other_shapes": shapes})
        fit = Fit(**held)
    except (TypeError, ValueError) as error:
        raise ValueError(f"weights must say what matched: {error}") from error
    rows = tuple((name, here, there) for name, here, there in fit.other_shapes)
    return replace(fit, missing=tuple(fit.missing), unexpected=tuple(fit.unexpected), other_shapes=rows)


def put(model: nn.Module, path: Path) -> Fit:
    """Loads the weights from a file into a network, as far as their names and shapes agree.

    Args:
        path: of a state dict that `torch.save` wrote, alone or as part of a checkpoint (see WRAPPERS), or of
            safetensors. An additional prefix of all matching names, such as "module.", is removed.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, holds something other than weights, none that fit, or some that are not finite. The
            network then stays as it was.
        ModuleNotFoundError: safetensors is not installed.
    """
    content, found = _read(path)
    own = {name: entry for name, entry in model.state_dict().items() if isinstance(entry, Tensor)}
    prefix = _prefix(found, own)
    if prefix:
        found = {name.removeprefix(prefix): entry for name, entry in found.items() if name.startswith(prefix)} | {
            name: entry for name, entry in found.items() if not name.startswith(prefix)
        }
    fitting: dict[str, Tensor] = {}
    other_shapes = []
    for name in own.keys() & found.keys():
        if _fits(found[name], own[name]):
            fitting[name] = _checked(found[name], own[name], name, path)
        else:
            other_shapes.append((name, _what(own[name]), _what(found[name])))
    missing = [name for name in own if name not in found]
    # Batch counts alone, which fit any batch norm with that name, are not weights.
    if not any(entry.is_floating_point() for entry in fitting.values()):
        theirs, ours = (
            _names([f"{name} {_what(entry)}" for name, entry in tensors.items()]) for tensors in (found, own)
        )
        raise ValueError(
            f"{path} contains no weights of this network: its tensors are {theirs}; the network's are {ours}"
        )
    with torch.no_grad():
        for name, entry in fitting.items():
            own[name].copy_(entry)
    numbers = sum(entry.numel() for entry in own.values())
    order = {name: position for position, name in enumerate(own)}
    return Fit(
        hashlib.sha256(content).hexdigest(),
        len(fitting),
        sum(entry.numel() for entry in fitting.values()) / numbers,
        prefix,
        tuple(missing),
        tuple(name for name in found if name not in own),
        tuple(sorted(other_shapes, key=lambda row: order[row[0]])),
    )


@contextmanager
def training_what_is_new(
    model: nn.Module, fit: Fit | None, last: str = ""
) -> Iterator[tuple[list[nn.Parameter], tuple[nn.Module, ...]]]:
    """The parameters to train, and modules that have to stay in evaluation meanwhile: batch norms that came from the
    file. All other parameters keep their values, and need no gradients in this context.

    Args:
        fit: what came from the file, which is frozen; None: everything is trained.
        last: the layer to train if everything came from the file.

    Raises:
        ValueError: that layer has no weights.
    """
    parameters = dict(model.named_parameters())
    if fit is None:
        yield list(parameters.values()), ()
        return
    new = set(fit.missing) | {name for name, *_ in fit.other_shapes}
    if not new & parameters.keys():
        new = {name for name in parameters if name.startswith(f"{last}.")}
        if not new:
            raise ValueError(
                f"--freeze-base: the file gave all weights, and the layer that stores the logits, {last!r}, has none "
                "that could be trained"
            )
    trained = {name: parameter for name, parameter in parameters.items() if name in new}
    needed = {name: parameter.requires_grad for name, parameter in parameters.items()}
    buffers = {name.rpartition(".")[0] for name, _ in model.named_buffers()}
    still = {name.rpartition(".")[0] for name in parameters if name not in new}
    resting = tuple(module for name, module in model.named_modules() if name in still & buffers)
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in new)
    try:
        yield list(trained.values()), resting
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(needed[name])


def check(path: Path) -> None:
    """Refuses a file that `put` would refuse for any network; raises the same errors."""
    _read(path)


def _read(path: Path) -> tuple[bytes, dict[str, Tensor]]:
    """A file's content, and its tensors by name."""
    if not path.exists():
        raise FileNotFoundError(f"--weights {path} does not exist")
    check_file(path)
    try:
        content = path.read_bytes()
    except MemoryError:
        raise ValueError(f"{path} is larger than this machine's memory") from None
    found = _tensors(content, path)
    for name, entry in found.items():
        if entry.layout != torch.strided or entry.device.type != "cpu" or entry.is_nested:
            raise ValueError(f"{path}: {shortened(name, NAME_LENGTH)} is not a dense tensor of numbers")
    return content, found


def _tensors(content: bytes, path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name."""
    try:
        if content[:4] == b"PK\x03\x04":
            return _state_dict(read_archive(content))
        if _is_safetensors(content):
            return _from_safetensors(content)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # noqa: BLE001 - readers of pickles and archives raise nearly anything for damaged files
        raise ValueError(f"{path} cannot be read as weights: {reason(error)}") from error
    if content[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise ValueError(
            f"{path} cannot be read as weights: it is a pickle, as PyTorch wrote them before 1.6, which may run any "
            "code. If you trust it, save it again: torch.save(torch.load(OLD, weights_only=True), NEW)"
        )
    raise ValueError(
        f"{path} cannot be read as weights: it is {'neither' if content else 'empty, neither'} a state dict written by "
        "torch.save nor safetensors"
    )


def _is_safetensors(content: bytes) -> bool:
    size = int.from_bytes(content[:SAFETENSORS_HEADER], "little")
    begins = content[SAFETENSORS_HEADER : SAFETENSORS_HEADER + 1] == b"{"
    return begins and size <= len(content)


def _from_safetensors(content: bytes) -> dict[str, Tensor]:
    from safetensors.torch import load

    return dict(load(content))


def _state_dict(content: Any) -> dict[str, Tensor]:
    """The state dict in a file, at any level."""
    if not isinstance(content, Mapping):
        raise ValueError(f"it contains a {type(content).__name__} where a state dict is expected")
    for name in WRAPPERS:
        held = content.get(name)
        if isinstance(held, Mapping) and _named(held):
            return _named(held)
    found = _named(content)
    if not found:
        raise ValueError(f"it contains no named tensors; it has {_names(list(map(str, content))) or 'nothing'}")
    return found


def _named(held: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {name: entry for name, entry in held.items() if type(name) is str and isinstance(entry, Tensor)}


def _prefix(found: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """A prefix without which more tensors fit; wrappers such as DistributedDataParallel add it to all names."""
    counts: Counter[str] = Counter()
    for name, entry in found.items():
        start = 0
        while True:
            if name[start:] in own and _fits(entry, own[name[start:]]):
                counts[name[:start]] += 1
            start = name.find(".", start) + 1
            if not start:
                break
    if not counts:
        return ""
    best, fitted = counts.most_common(1)[0]
    return best if fitted > counts[""] else ""


def _fits(given: Tensor, own: Tensor) -> bool:
    """Whether it has the same shape and kind of numbers."""
    kinds = given.is_floating_point() == own.is_floating_point() and (given.dtype == torch.bool) == (
        own.dtype == torch.bool
    )
    return given.dtype in DTYPES and given.shape == own.shape and kinds


def _checked(given: Tensor, own: Tensor, name: str, path: Path) -> Tensor:
    """Its numbers in the network's dtype."""
    where = f"{path}: {shortened(name, NAME_LENGTH)}"
    value = given.detach().to(own.dtype)
    if not torch.isfinite(value).all():
        raise ValueError(f"{where} contains NaN or infinity")
    if name.endswith("running_var") and (value < 0).any():
        raise ValueError(f"{where} contains negative variances")
    return value


def _what(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _percent(share: float) -> str:
    """Only all of it is 100 %."""
    text = f"{share:.1%}"
    return "99.9%" if text == "100.0%" and share < 1 else "100%" if share == 1 else text


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(shortened(printable(name), NAME_LENGTH) for name in names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else "")
