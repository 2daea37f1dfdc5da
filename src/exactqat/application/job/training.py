# SPDX-License-Identifier: Apache-2.0
"""The training loops: float first, then quantization-aware. Plain PyTorch, deterministic for a given seed."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import qat
from ...kit.planning.plans import SMALLEST_WIDTH
from ...kit.train.core.steps import WeightedStep
from ..report.results import History, Images, Split
from .augmentation import augmented
from .checkpoints import CHECKPOINT_FORMAT, check_alike, first_line, load_checkpoint, save_checkpoint
from .judges import errors, threshold
from .manner import Manner, loss_of, optimizer_of, schedule_of
from .processes import ALONE, Processes

CPU = torch.device("cpu")
BATCH_SIZE = 64
EVALUATION_BATCH = 512
# Number of training examples that show how large a normal error is.
NORMAL_EXAMPLES = 1024
# Share at eight bits of the epochs at fewer bits; see `manner.FINE_TUNING_LEARNING_RATE`.
FINE_TUNING_SHARE = 1 / 4
# Share of quantization-aware epochs with batch norm and ranges frozen and biases on the int32 grid.
FROZEN_SHARE = 1 / 3

DEFAULT = Manner()

# Called with the number of training steps done since the last call.
Step = Callable[[int], None]


class TrainingDiverged(RuntimeError):
    """The loss is NaN or infinite. The message says where, and which checkpoint is still good."""


class RangeCollapsed(RuntimeError):
    """A quantization range has collapsed, so the network's answer is the same for all images."""


def accelerator_named(name: str, option: str = "--accelerator") -> torch.device:
    """What to train on, with deterministic algorithms if it is a GPU.

    Args:
        option: the one it was given by, for messages.

    Raises:
        ValueError: it is neither "cpu" nor "cuda" (or "cuda:1" and so on), or PyTorch does not see it.
    """
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise ValueError(f"{option} must be cpu, cuda, or a specific device such as cuda:1, got {name!r}")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        seen = ", ".join(["cpu", *(f"cuda:{number}" for number in range(count))])
        raise ValueError(f"{option} {name} is not available: PyTorch {torch.__version__} sees {seen}")
    # Read when cuBLAS starts; without it, its sums depend on what ran before.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device(name)


def _on_cpu(value: Any) -> Any:
    """A state dict of any depth with all tensors on the CPU: it can be read on any machine."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(entry) for key, entry in value.items()}
    return [_on_cpu(entry) for entry in value] if isinstance(value, list) else value


def batches(
    split: Split, batch_size: int, generator: torch.Generator, manner: Manner = DEFAULT
) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch of shuffled, augmented batches; a last batch of one image would have no variance and is left out."""
    for chosen in torch.randperm(len(split), generator=generator).split(batch_size):
        if len(chosen) > 1:
            images = augmented(split.images[chosen], manner.augment, generator, manner.limits)
            yield images, split.labels[chosen]


def steps_per_epoch(split: Split, batch_size: int = BATCH_SIZE) -> int:
    """Number of batches that `batches` yields."""
    full, rest = divmod(len(split), batch_size)
    return full + int(rest > 1)


@torch.no_grad()
def reconstruction_errors(model: nn.Module, images: Images) -> np.ndarray:
    """How badly a network reconstructs images, float64 [n]; see `judges.errors`."""
    model.eval()
    device = next(model.parameters()).device
    parts = [errors(model(part.to(device)).cpu().numpy(), part.numpy()) for part in images.split(EVALUATION_BATCH)]
    return np.concatenate(parts)


def normal_threshold(model: nn.Module, normal: Split) -> float:
    """The error above which an example is an anomaly for a network."""
    return threshold(reconstruction_errors(model, normal.images[:NORMAL_EXAMPLES]))


@torch.no_grad()
def predictions(model: nn.Module, split: Split, normal: Split | None = None) -> Tensor:
    """The most likely class of every image, [n]; with normal examples, 1 for anomalies and 0 for others."""
    if normal is not None:
        found = reconstruction_errors(model, split.images) > normal_threshold(model, normal)
        return torch.from_numpy(found.astype(np.int64))
    model.eval()
    return torch.cat([model(images).argmax(1) for images in split.images.split(EVALUATION_BATCH)])


def accuracy(model: nn.Module, split: Split, normal: Split | None = None) -> float:
    """Share of images classified correctly, 0..1."""
    return (predictions(model, split, normal) == split.labels).double().mean().item()


@torch.no_grad()
def accuracy_and_loss(
    model: nn.Module, split: Split, processes: Processes = ALONE, manner: Manner = DEFAULT
) -> tuple[float, float]:
    """Share of images classified correctly, and the mean loss; each process computes its share of the images."""
    if manner.normal is not None:
        # Small networks: every process computes all.
        loss = float(reconstruction_errors(model, split.images).mean())
        return accuracy(model, split, manner.normal), loss
    model.eval()
    right = loss = 0.0
    device, weights = next(model.parameters()).device, manner.class_weights
    for chosen in processes.share(torch.arange(len(split))).split(EVALUATION_BATCH):
        logits, labels = model(split.images[chosen].to(device)), split.labels[chosen].to(device)
        right += (logits.argmax(1) == labels).sum().item()
        if weights is None:
            loss += F.cross_entropy(logits.double(), labels, reduction="sum").item()
        else:
            each = F.cross_entropy(logits.double(), labels, reduction="none")
            loss += (each * weights.to(device)[labels]).sum().item()
    right, loss = processes.sums([right, loss])
    return right / len(split), loss / len(split)


def check_ranges(model: nn.Module, when: str) -> None:
    """Refuses a prepared network with a range of zero width; other networks have no ranges.

    Raises:
        RangeCollapsed: names the layer, its range, and `when` it was.
    """
    if not isinstance(model, qat.PreparedModel):
        return
    for path, layer in model.layers():
        low, high = (end.item() for end in layer.output_quantizer.held()[:2])
        if not high - low >= SMALLEST_WIDTH:
            raise RangeCollapsed(
                f"{when}: the range of what '{path}' stores collapsed to [{low:g}, {high:g}]; "
                "all its values are zero or NaN"
            )
        if isinstance(layer, WeightedStep) and not (layer.weight_quantizer.scale(layer.weight_source()) > 0).any():
            raise RangeCollapsed(f"{when}: the range of the weights of '{path}' collapsed to zero for all channels")


def train(
    model: nn.Module,
    groups: list[dict[str, Any]],
    training: Split,
    validation: Split,
    epochs: int,
    seed: int,
    name: str,
    on_step: Step,
    state_path: Path,
    batch_size: int = BATCH_SIZE,
    freeze_at: int | None = None,
    processes: Processes = ALONE,
    resume: bool = False,
    accelerator: torch.device = CPU,
    on_epoch: Callable[[History], None] = lambda history: None,
    manner: Manner = DEFAULT,
    on_skip: Step | None = None,
) -> History:
    """Trains `model` in place and leaves it in its best state, on the CPU.

    After every epoch `state_path` contains everything needed to continue: with `resume`, training that was interrupted
    at any moment ends with the same bits as if uninterrupted. After training it contains the best state and the
    history.

    Args:
        groups: the optimizer's parameter groups, each with its learning rate, which the manner's schedule changes.
        seed: for the order of the images, and their augmentation.
        name: of this training, for error messages.
        batch_size: over all processes.
        freeze_at: epoch with which the model, a `PreparedModel`, is frozen if it is not yet. Then only later states can
            be the best.
        processes: those that train together, all with the same arguments.
        resume: continue from `state_path` if it exists, whatever it was trained on.
        on_epoch: called with the history so far after every epoch, and after those that `state_path` held.
        accelerator: where the network trains. Images are drawn and augmented on the CPU, so they are the same
            everywhere.
        manner: how it goes: optimizer, schedule, losses, when it ends early.
        on_skip: as `on_step`, for steps that take no time now: those of an earlier run, or skipped ones.

    Raises:
        TrainingDiverged: the loss became NaN or infinite.
        RangeCollapsed: a quantization range lost its width.
        ValueError: `state_path` is damaged or belongs to another training.
    """
    model.to(accelerator)
    if manner.teacher is not None:
        manner.teacher.distillation.to(accelerator)
    generator = torch.Generator().manual_seed(seed)
    optimizer = optimizer_of(manner.optimizer, groups)
    steps = steps_per_epoch(training, batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule_of(manner.schedule, max(1, epochs * steps)))
    skip = on_skip or on_step
    history = History(frozen_from=freeze_at)
    best_loss = math.inf
    best_state: dict[str, Any] = {}
    first_epoch = 0
    state = processes.from_first(_stored_state(state_path, name, epochs) if resume and processes.writes else None)
    if state is not None:
        first_epoch, best_loss, best_state = state["epoch"], state["best_loss"], state["best"]
        history = state["history"]
        if state["stopped"]:
            epochs = first_epoch
        skip(state["epochs"] * steps if state["stopped"] else first_epoch * steps)
        on_epoch(history)
        if first_epoch < epochs:
            _continue(state, state_path, model, optimizer, schedule, generator)

    def kept() -> str:
        return f"the last good checkpoint is kept in {state_path}" if history.loss else "no checkpoint was written yet"

    with processes.synchronized(model):
        replica = processes.replica(model) if first_epoch < epochs else model
        called: nn.Module | None = None
        for epoch in range(first_epoch, epochs):
            when = f"{name}, epoch {epoch + 1} of {epochs}"
            if epoch == freeze_at and not (isinstance(model, qat.PreparedModel) and model.frozen):
                assert isinstance(model, qat.PreparedModel)
                with warnings.catch_warnings():
                    # Nothing is learned in this few steps, and the report says so.
                    warnings.simplefilter("ignore", qat.UnsettledStatisticsWarning)
                    qat.freeze(model)
                # Ranges have no gradients from here on, which DistributedDataParallel has to know.
                replica, called = processes.replica(model), None
            # For layers that draw random numbers, such as dropout: different in each process, and the same again after
            # a resume.
            torch.manual_seed(int(np.random.SeedSequence([seed, epoch, processes.rank]).generate_state(1)[0]))
            replica.train()
            for module in manner.resting:
                module.eval()
            losses, rate = [], float(optimizer.param_groups[0]["lr"])
            for images, labels in batches(training, batch_size, generator, manner):
                mine = processes.share(torch.arange(len(labels)))
                # Averaged over the processes, as their gradients will be, this is the mean over the whole batch, even
                # if shares differ in size.
                shown, truth = images[mine].to(accelerator), labels[mine].to(accelerator)
                with torch.autocast(accelerator.type, torch.bfloat16, enabled=manner.mixed_precision):
                    if called is None:
                        called = _in_graphs(replica, shown)
                    outputs = called(shown)
                summed = loss_of(outputs.float() if manner.mixed_precision else outputs, truth, shown, manner)
                loss = summed * (processes.count / len(labels))
                value = processes.sums([summed.item()])[0] / len(labels)
                if not math.isfinite(value):
                    raise TrainingDiverged(f"{when}: the loss became {value}; {kept()}")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                losses.append(value)
                on_step(1)
            validation_accuracy, validation_loss = accuracy_and_loss(model, validation, processes, manner)
            if not math.isfinite(validation_loss):
                raise TrainingDiverged(f"{when}: the validation loss became {validation_loss}; {kept()}")
            try:
                check_ranges(model, when)
            except RangeCollapsed as error:
                raise RangeCollapsed(f"{error}; {kept()}") from None
            history.loss.append(sum(losses) / len(losses))
            history.validation_accuracy.append(validation_accuracy)
            history.validation_loss.append(validation_loss)
            history.learning_rate.append(rate)
            # The loss, not the accuracy, picks the best state: on a few hundred images it depends far less on luck.
            if (freeze_at is None or epoch >= freeze_at) and validation_loss < best_loss:
                best_loss = validation_loss
                best_state = {
                    key: entry.clone() if isinstance(entry, Tensor) else entry
                    for key, entry in model.state_dict().items()
                }
            stopped = epoch + 1 < epochs and _stops(history, manner.patience)
            if processes.writes:
                finished = stopped or epoch + 1 == epochs
                checkpoint = {
                    "format": CHECKPOINT_FORMAT,
                    "training": name,
                    "epoch": epoch + 1,
                    "epochs": epochs,
                    "best": best_state,
                    "best_loss": best_loss,
                    "history": asdict(history),
                }
                if not finished:
                    checkpoint |= {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "schedule": schedule.state_dict(),
                        "generator": generator.get_state(),
                    }
                if stopped:
                    checkpoint["stopped"] = True
                save_checkpoint(state_path, _on_cpu(checkpoint))
            on_epoch(history)
            if stopped:
                skip((epochs - epoch - 1) * steps)
                break
    load_state(model, best_state, state_path)
    model.cpu().eval()
    if manner.teacher is not None:
        manner.teacher.distillation.to(CPU)
    return history


def _in_graphs(model: nn.Module, images: Tensor) -> nn.Module:
    """A module that computes the same with CUDA graphs, without Python's overhead; the model itself if that is
    impossible."""
    if not (images.is_cuda and isinstance(model, qat.PreparedModel) and model.keeps_nothing):
        return model
    try:
        return qat.graphed(model, images)
    except (RuntimeError, ValueError) as error:
        warnings.warn(f"training without CUDA graphs, which takes longer: {first_line(error)}", stacklevel=2)
        return model


def _stops(history: History, patience: int | None) -> bool:
    """Whether to end training early. Only epochs whose states may be the best count: after freezing, the validation
    loss is that of the device's integers."""
    if patience is None:
        return False
    stopping, now = qat.EarlyStopping(patience), False
    for loss in history.validation_loss[history.frozen_from or 0 :]:
        now = stopping(math.nan if loss is None else loss)
    return now


def load_state(model: nn.Module, state: dict[str, Any], path: Path) -> None:
    """Loads a state dict from the file at `path` into the model.

    Raises:
        ValueError: it is not this model's.
    """
    try:
        model.load_state_dict(state)
    except (ValueError, RuntimeError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} does not contain the state of this network: {first_line(error)}") from error


def _continue(
    state: dict[str, Any],
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    generator: torch.Generator,
) -> None:
    """Restores everything as it was after an epoch."""
    load_state(model, state["model"], path)
    try:
        _check_optimizer(state["optimizer"], optimizer)
        optimizer.load_state_dict(state["optimizer"])
        # It accepts any attribute; only existing ones are its state.
        known = schedule.state_dict()
        found = {name: entry for name, entry in state["schedule"].items() if name in known}
        check_alike(found, {name: known[name] for name in found}, "its schedule")
        schedule.load_state_dict(found)
        generator.set_state(state["generator"])
    except (ValueError, RuntimeError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} does not contain the state of this training: {first_line(error)}") from error


def _check_optimizer(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Moments have the shapes of their parameters, which PyTorch only checks at the first step."""
    groups = optimizer.state_dict()["param_groups"]
    check_alike([group["params"] for group in state["param_groups"]], [group["params"] for group in groups], "params")
    for found, group in zip(state["param_groups"], groups, strict=True):
        known = {name: entry for name, entry in group.items() if name in found}
        check_alike({name: found[name] for name in known}, known, "its parameter groups")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for position, moments in state["state"].items():
        for name, moment in moments.items():
            shape = () if name == "step" else parameters[position].shape
            if not isinstance(moment, Tensor) or moment.shape != shape:
                raise ValueError(f"{name} of parameter {position} is not a tensor of shape {list(shape)}")


def _stored_state(path: Path, name: str, epochs: int) -> dict[str, Any] | None:
    if not path.exists():
        return None
    state = load_checkpoint(path)
    found = (state.get("training"), state.get("epochs"))
    if found != (name, epochs):
        raise ValueError(
            f"{path} belongs to the training {found[0]!r} of {found[1]} epochs, not to {name!r} of {epochs}"
        )
    epoch = state.get("epoch")
    if type(epoch) is not int or not 1 <= epoch <= epochs:
        raise ValueError(f"{path}: epoch must be from 1 to {epochs}, got {epoch!r}")
    state.setdefault("stopped", False)
    if type(state["stopped"]) is not bool:
        raise ValueError(f"{path}: stopped must be True or False, got {state['stopped']!r}")
    goes_on = epoch < epochs and not state["stopped"]
    whole = ("best", "best_loss", "history") + (("model", "optimizer", "schedule", "generator") if goes_on else ())
    lacking = [field for field in whole if field not in state]
    if lacking:
        raise ValueError(f"{path} has no field {lacking[0]!r}")
    try:
        state["history"] = _history(state["history"], epoch)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: its history cannot be read: {error}") from error
    if not isinstance(state["best"], dict) or type(state["best_loss"]) is not float:
        raise ValueError(f"{path}: best must be a state dict and best_loss a number")
    return state


def _history(stored: Any, epochs: int) -> History:
    history = History(**stored)
    for curve in (history.loss, history.validation_accuracy):
        check_alike(curve, [0.0] * epochs, "a curve")
    for name in ("validation_loss", "learning_rate"):
        if not getattr(history, name):
            # From a job of an earlier version.
            setattr(history, name, [None] * epochs)
        check_alike([0.0 if each is None else each for each in getattr(history, name)], [0.0] * epochs, name)
    if history.frozen_from is not None and type(history.frozen_from) is not int:
        raise ValueError(f"frozen_from must be an epoch, got {history.frozen_from!r}")
    return history


def finished(path: Path) -> bool:
    """Whether the file at `path` is that of a finished training.

    Raises:
        ValueError: the file is damaged.
    """
    state = load_checkpoint(path)
    return "epochs" in state and (state.get("epoch") == state["epochs"] or state.get("stopped") is True)


def frozen_epochs(epochs: int) -> int:
    """How many of the quantization-aware epochs belong to the last phase: at least one."""
    return max(1, round(epochs * FROZEN_SHARE))
