# SPDX-License-Identifier: Apache-2.0
"""The training loops: float first, then quantization-aware. Plain PyTorch, deterministic for a given seed."""

from __future__ import annotations

import io
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import qat
from .data import Split

BATCH_SIZE = 64
FLOAT_LEARNING_RATE = 4e-3
QAT_LEARNING_RATE = 1e-3
RANGE_LEARNING_RATE = 3e-3
# Share of quantization-aware epochs with batch norm and ranges frozen and biases on the int32 grid.
FROZEN_SHARE = 1 / 3

Step = Callable[[], None]


class TrainingDiverged(RuntimeError):
    """The loss is no longer a number. The message says where, and which checkpoint is still good."""


@dataclass
class History:
    """One entry per epoch."""

    loss: list[float] = field(default_factory=list)
    validation_accuracy: list[float] = field(default_factory=list)
    frozen_from: int | None = None


def write_atomically(path: Path, content: bytes) -> None:
    """The file appears whole or not at all, also through a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def save_checkpoint(path: Path, checkpoint: dict[str, Any]) -> None:
    """Writes what `torch.load(path, weights_only=True)` gives back; equal content gives equal bytes."""
    # Through memory: torch.save would put the temporary file's random name into the archive.
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    write_atomically(path, buffer.getvalue())


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Every image moved by up to one pixel in each direction; zeros come in at the edge."""
    count, _, height, width = images.shape
    offsets = torch.randint(0, 3, (2, count, 1), generator=generator)
    rows = torch.arange(height) + offsets[0]
    columns = torch.arange(width) + offsets[1]
    padded = F.pad(images, (1, 1, 1, 1))
    everyone = torch.arange(count)[:, None, None]
    return padded.movedim(1, 3)[everyone, rows[:, :, None], columns[:, None, :]].movedim(3, 1)


def batches(split: Split, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch of shuffled, shifted batches; a last batch of one image would have no variance and is left out."""
    for chosen in torch.randperm(len(split), generator=generator).split(BATCH_SIZE):
        if len(chosen) > 1:
            yield shifted(split.images[chosen], generator), split.labels[chosen]


def steps_per_epoch(split: Split) -> int:
    """Number of batches that `batches` gives."""
    full, rest = divmod(len(split), BATCH_SIZE)
    return full + int(rest > 1)


@torch.no_grad()
def predictions(model: nn.Module, split: Split) -> Tensor:
    """The most likely class of every image, [n]."""
    model.eval()
    return torch.cat([model(images).argmax(1) for images in split.images.split(512)])


def accuracy(model: nn.Module, split: Split) -> float:
    """Share of images classified rightly, 0..1."""
    return (predictions(model, split) == split.labels).double().mean().item()


@torch.no_grad()
def accuracy_and_loss(model: nn.Module, split: Split) -> tuple[float, float]:
    """Share of images classified rightly, and the mean cross entropy."""
    model.eval()
    logits = torch.cat([model(images) for images in split.images.split(512)])
    share = (logits.argmax(1) == split.labels).double().mean().item()
    return share, F.cross_entropy(logits, split.labels).item()


def train(
    model: nn.Module,
    groups: list[dict[str, Any]],
    training: Split,
    validation: Split,
    epochs: int,
    seed: int,
    name: str,
    on_step: Step,
    checkpoint_path: Path,
    describe: Callable[[], dict[str, Any]],
    freeze_at: int | None = None,
) -> History:
    """Trains `model` in place and leaves it in its best state, which is also what the checkpoint holds.

    Args:
        groups: the optimizer's parameter groups, each with its learning rate at the start; rates fall to zero as a
            cosine.
        seed: of the order and the shifts of the images.
        name: of this training, for error messages.
        describe: the checkpoint's content, taken whenever the validation loss is the lowest so far.
        freeze_at: epoch with which the model, a `PreparedModel`, is frozen. Only later states count as the best then.

    Raises:
        TrainingDiverged: the loss became NaN or infinite.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(groups)
    total_steps = max(1, epochs * steps_per_epoch(training))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / total_steps))
    )
    history = History(frozen_from=freeze_at)
    best_loss = math.inf
    best_state: dict[str, Any] = {}
    for epoch in range(epochs):
        if epoch == freeze_at:
            assert isinstance(model, qat.PreparedModel)
            qat.freeze(model)
        model.train()
        losses = []
        for images, labels in batches(training, generator):
            loss = F.cross_entropy(model(images), labels)
            value = loss.item()
            if not math.isfinite(value):
                kept = (
                    f"the best state so far is kept in {checkpoint_path}"
                    if best_state
                    else "no checkpoint was written yet"
                )
                raise TrainingDiverged(f"{name}: the loss became {value} in epoch {epoch + 1} of {epochs}; {kept}")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(value)
            on_step()
        history.loss.append(sum(losses) / len(losses))
        validation_accuracy, validation_loss = accuracy_and_loss(model, validation)
        history.validation_accuracy.append(validation_accuracy)
        # The loss, not the accuracy, picks the best state: on a few hundred images it is far less a matter of luck.
        if (freeze_at is None or epoch >= freeze_at) and validation_loss < best_loss:
            best_loss = validation_loss
            best_state = {
                key: entry.clone() if isinstance(entry, Tensor) else entry for key, entry in model.state_dict().items()
            }
            save_checkpoint(checkpoint_path, describe())
    model.load_state_dict(best_state)
    model.eval()
    return history


def frozen_epochs(epochs: int) -> int:
    """How many of the quantization-aware epochs belong to the last phase: at least one."""
    return max(1, round(epochs * FROZEN_SHARE))
