# SPDX-License-Identifier: Apache-2.0
"""The training loop: float first, then quantization-aware. Plain PyTorch, deterministic for a given seed."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ... import qat
from ...kit.planning.plans import SMALLEST_WIDTH
from ...qat.train.core.steps import WeightedStep
from . import checkpoints
from .augmentation import augmented
from .files import Record, first_line
from .processes import ALONE, Processes
from .results import Dataset, History, Progress, Split
from .settings import Settings

CPU = torch.device("cpu")
EVALUATION_BATCH = 512
# Learning rates. Given weights already know something, which large steps would lose; eight bits are fine enough to keep
# what float training found, and fewer bits have to search again.
FLOAT_RATE, GIVEN_WEIGHTS_RATE = 4e-3, 1e-3
QAT_RATE, FINE_TUNING_RATE, RANGE_RATE = 1e-3, 3e-4, 3e-3
# Steps of plain gradients are smaller than Adam's at the same rate.
SGD_FACTOR = 10
# Share of quantization-aware epochs with batch norm and ranges frozen and biases on the int32 grid.
FROZEN_SHARE = 1 / 3
# What optimizers keep for each parameter.
MOMENTS = {"adam": ("step", "exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
MOMENTS["adamw"] = MOMENTS["adam"]


class TrainingFailed(RuntimeError):
    """The loss is NaN or infinite, or a range has collapsed, so that the network's answer is the same for all images.
    The message says where, and which checkpoint is still good."""


def accelerator_named(name: str) -> torch.device:
    """What to train on, with deterministic algorithms if it is a GPU."""
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,9})?", name):
        raise ValueError(f"--accelerator must be cpu, cuda, or a specific device such as cuda:1, got {name!r}")
    if name == "cpu":
        return CPU
    seen = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    if (name if ":" in name else f"{name}:0") not in seen:
        version = f"PyTorch {torch.__version__}"
        raise ValueError(f"--accelerator {name} is not available: {version} sees {', '.join(seen)}")
    # Read when cuBLAS starts; without it, its sums depend on what ran before.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device(name)


Groups = list[Record]


@dataclass(frozen=True)
class Manner:
    """How a training run goes.

    Attributes:
        limits: the smallest and the largest value of an image.
        class_weights: float32 [classes]; None: all count the same.
        teacher: the float network, whose answers are a share of the loss; None: only the labels count.
    """

    settings: Settings
    limits: tuple[float, float] = (0.0, 1.0)
    class_weights: Tensor | None = None
    teacher: qat.Distillation | None = None


def manner_of(settings: Settings, dataset: Dataset) -> Manner:
    """How a job's training runs go."""
    weights = None
    if settings.class_weights == "balanced":
        counts = torch.bincount(dataset.train.labels, minlength=len(dataset.class_names)).double()
        weights = 1 / counts.clamp(min=1)
        # Their mean over the training images is 1.
        weights = (weights * counts.sum() / (weights * counts).sum()).float()
    return Manner(settings, dataset.value_range, weights)


def rate_of(settings: Settings, chosen: float | None, usual: float) -> float:
    """A peak learning rate: the user's, or what is usual with Adam."""
    return usual * (SGD_FACTOR if settings.optimizer == "sgd" else 1) if chosen is None else chosen


def learning_rate_factor(schedule: str, step: int, steps: int) -> float:
    """The factor for learning rates after a step of all `steps`, by one of SCHEDULES."""
    done = step / steps
    if schedule == "constant":
        return 1.0
    if schedule == "step":
        return 1.0 if done < 0.5 else 0.1 if done < 0.75 else 0.01
    if schedule == "warm-up":
        rising = max(1, round(steps / 10))
        if step < rising:
            return (step + 1) / rising
        done = (step - rising) / max(1, steps - rising)
    return 0.5 * (1 + math.cos(math.pi * done))


def loss_of(outputs: Tensor, labels: Tensor, images: Tensor, manner: Manner) -> Tensor:
    """The loss, summed over the examples.

    Args:
        outputs: [n, classes] logits; labels: [n]; images: the inputs that gave the outputs.
    """
    losses = F.cross_entropy(outputs, labels, reduction="none")
    if manner.class_weights is not None:
        # Not divided by the weights' sum, which differs from batch to batch.
        losses = losses * manner.class_weights.to(outputs.device)[labels]
    if manner.teacher is None:
        return losses.sum()
    share = manner.settings.distill or 0.0
    return (1 - share) * losses.sum() + share * manner.teacher(outputs, images, "sum")


def batches(split: Split, manner: Manner, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch of shuffled, augmented batches; a last batch of one image would have no variance and is left out."""
    for chosen in torch.randperm(len(split), generator=generator).split(manner.settings.batch_size):
        if len(chosen) > 1:
            images = augmented(split.images[chosen], manner.settings.augment, generator, manner.limits)
            yield images, split.labels[chosen]


def steps_per_epoch(split: Split, batch_size: int) -> int:
    """Number of batches that `batches` yields."""
    full, rest = divmod(len(split), batch_size)
    return full + int(rest > 1)


@torch.no_grad()
def predictions(model: nn.Module, split: Split) -> Tensor:
    """The most likely class of every image, [n]."""
    model.eval()
    return torch.cat([model(images).argmax(1) for images in split.images.split(EVALUATION_BATCH)])


@torch.no_grad()
def accuracy_and_loss(
    model: nn.Module, split: Split, manner: Manner, processes: Processes = ALONE
) -> tuple[float, float]:
    """Share of images classified correctly, and the mean loss; each process computes its share of the images."""
    model.eval()
    right = loss = 0.0
    device = next(model.parameters()).device
    for chosen in processes.share(torch.arange(len(split))).split(EVALUATION_BATCH):
        images, labels = split.images[chosen].to(device), split.labels[chosen].to(device)
        logits = model(images)
        right += (logits.argmax(1) == labels).sum().item()
        loss += loss_of(logits.double(), labels, images, replace(manner, teacher=None)).item()
    right, loss = processes.sums([right, loss])
    return right / len(split), loss / len(split)


def collapsed(model: nn.Module) -> str:
    """A sentence on a prepared network's first range of zero width, which names its layer; empty: there is none."""
    for path, layer in model.layers() if isinstance(model, qat.PreparedModel) else ():
        low, high = (end.item() for end in layer.output_quantizer.held()[:2])
        if not high - low >= SMALLEST_WIDTH:
            return f"the range of what '{path}' stores collapsed to [{low:g}, {high:g}]; all its values are zero or NaN"
        if isinstance(layer, WeightedStep) and not (layer.weight_quantizer.scale(layer.weight_source()) > 0).any():
            return f"the range of the weights of '{path}' collapsed to zero for all channels"
    return ""


def train(
    model: nn.Module, groups: Groups, training: Split, validation: Split, epochs: int, name: str, state_path: Path,
    manner: Manner, freeze_at: int | None = None, processes: Processes = ALONE, resume: bool = False,
    accelerator: torch.device = CPU, progress: Progress | None = None,
    on_epoch: Callable[[History], None] = lambda history: None,
) -> History:  # fmt: skip
    """Trains `model` in place and leaves it in its best state, on the CPU.

    After every epoch `state_path` contains everything needed to continue: with `resume`, training that was interrupted
    at any moment ends with the same bits as if uninterrupted. After training it contains the best state and the
    history.

    Args:
        groups: the optimizer's parameter groups, each with its learning rate, which the manner's schedule changes.
        name: of this training, for error messages.
        freeze_at: epoch with which the model, a `PreparedModel`, is frozen if it is not yet. Then only later states can
            be the best.
        processes: those that train together, all with the same arguments.
        resume: continue from `state_path` if it exists, whatever it was trained on.
        accelerator: where the network trains. Images are drawn and augmented on the CPU, so they are the same
            everywhere.
        on_epoch: called with the history so far after every epoch, and after those that `state_path` held.

    Raises:
        TrainingFailed: the loss became NaN or infinite, or a quantization range lost its width.
        ValueError: `state_path` is damaged or belongs to another training.
    """
    progress, settings = progress or Progress(), manner.settings
    model.to(accelerator)
    if manner.teacher is not None:
        manner.teacher.to(accelerator)
    generator = torch.Generator().manual_seed(settings.seed)
    optimizers: Mapping[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    options = {"momentum": 0.9, "nesterov": True} if settings.optimizer == "sgd" else {}
    optimizer: torch.optim.Optimizer = optimizers[settings.optimizer](groups, **options)
    rates, steps = [group["lr"] for group in groups], steps_per_epoch(training, settings.batch_size)
    history, first_epoch, best_loss, best_state = History(frozen_from=freeze_at), 0, math.inf, Record()
    state = processes.from_first(_stored_state(state_path, name, epochs) if resume and processes.writes else None)
    if state is not None:
        first_epoch, best_loss, best_state = state["epoch"], state["best_loss"], state["best"]
        history = state["history"]
        progress.skip((epochs if state["stopped"] else first_epoch) * steps)
        on_epoch(history)
        if state["stopped"]:
            first_epoch = epochs
        if first_epoch < epochs:
            _continue(state, state_path, model, optimizer, MOMENTS[settings.optimizer], generator)
    with processes.synchronized(model):
        replica = processes.replica(model) if first_epoch < epochs else model
        called: nn.Module | None = None
        for epoch in range(first_epoch, epochs):
            when = f"{name}, epoch {epoch + 1} of {epochs}"
            kept = f"the last good checkpoint is kept in {state_path}" if history.loss else "no checkpoint was written"
            if epoch == freeze_at and isinstance(model, qat.PreparedModel) and not model.frozen:
                with warnings.catch_warnings():
                    # Nothing is learned in this few steps, and the report says so.
                    warnings.simplefilter("ignore", qat.UnsettledStatisticsWarning)
                    qat.freeze(model)
                # Ranges have no gradients from here on, which DistributedDataParallel has to know.
                replica, called = processes.replica(model), None
            # For layers that draw random numbers, such as dropout: different in each process, and the same again after
            # a resume.
            seeds = np.random.SeedSequence([settings.seed, epoch, processes.rank])
            torch.manual_seed(int(seeds.generate_state(1)[0]))
            replica.train()
            losses: list[float] = []
            for step, (images, labels) in enumerate(batches(training, manner, generator), epoch * steps):
                factor = learning_rate_factor(settings.schedule, step, epochs * steps)
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * factor
                mine = processes.share(torch.arange(len(labels)))
                # Averaged over the processes, as their gradients will be, this is the mean over the whole batch, even
                # if shares differ in size.
                shown, truth = images[mine].to(accelerator), labels[mine].to(accelerator)
                if called is None:
                    called = _in_graphs(replica, shown)
                with torch.autocast(accelerator.type, torch.bfloat16, enabled=settings.mixed_precision):
                    outputs = called(shown)
                summed = loss_of(outputs.float() if settings.mixed_precision else outputs, truth, shown, manner)
                loss = summed * (processes.count / len(labels))
                losses.append(processes.sums([summed.item()])[0] / len(labels))
                if not math.isfinite(losses[-1]):
                    raise TrainingFailed(f"{when}: the loss became {losses[-1]}; {kept}")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                progress.advance(1)
            validation_accuracy, validation_loss = accuracy_and_loss(model, validation, manner, processes)
            finite = math.isfinite(validation_loss)
            if failure := collapsed(model) if finite else f"the validation loss became {validation_loss}":
                raise TrainingFailed(f"{when}: {failure}; {kept}")
            history.loss.append(sum(losses) / len(losses))
            history.validation_accuracy.append(validation_accuracy)
            history.validation_loss.append(validation_loss)
            first_factor = learning_rate_factor(settings.schedule, epoch * steps, max(1, epochs * steps))
            history.learning_rate.append(rates[0] * first_factor)
            # The loss, not the accuracy, picks the best state: on a few hundred images it depends far less on luck.
            if (freeze_at is None or epoch >= freeze_at) and validation_loss < best_loss:
                best_loss = validation_loss
                best_state = tree_map_only(Tensor, torch.clone, dict(model.state_dict()))
            stopped = epoch + 1 < epochs and _stops(history, settings.early_stopping)
            if processes.writes:
                checkpoint = {
                    "format": checkpoints.CHECKPOINT_FORMAT,
                    "training": name,
                    "epoch": epoch + 1,
                    "epochs": epochs,
                    "best": best_state,
                    "best_loss": best_loss,
                    "history": asdict(history),
                    "stopped": stopped,
                }
                if not stopped and epoch + 1 < epochs:
                    checkpoint |= {
                        "model": dict(model.state_dict()),
                        "moments": optimizer.state_dict()["state"],
                        "generator": generator.get_state(),
                    }
                # On the CPU they can be read on any machine.
                checkpoints.save_checkpoint(state_path, tree_map_only(Tensor, Tensor.cpu, checkpoint))
            on_epoch(history)
            if stopped:
                progress.skip((epochs - epoch - 1) * steps)
                break
    if best_state:
        load_state(model, best_state, state_path)
    model.cpu().eval()
    if manner.teacher is not None:
        manner.teacher.to(CPU)
    return history


def _in_graphs(model: nn.Module, images: Tensor) -> nn.Module:
    """A module that computes the same with CUDA graphs, without Python's overhead; the model itself if that is
    impossible."""
    if not (images.is_cuda and isinstance(model, qat.PreparedModel) and model.keeps_nothing):
        return model
    try:
        return qat.graphed(model, images)
    except (RuntimeError, ValueError) as error:
        warnings.warn(f"training takes longer, without CUDA graphs: {first_line(error)}", stacklevel=2)
        return model


def _stops(history: History, patience: int | None) -> bool:
    """Whether to end training early. Only epochs whose states may be the best count: after freezing, the validation
    loss is that of the device's integers."""
    losses = history.validation_loss[history.frozen_from or 0 :]
    best = min((loss for loss in losses if not math.isnan(loss)), default=None)
    waited = len(losses) if best is None else len(losses) - 1 - losses.index(best)
    return patience is not None and waited >= patience


def load_state(model: nn.Module, state: Record, path: Path) -> None:
    """Loads a state dict from the file at `path` into the model."""
    try:
        model.load_state_dict(state)
    except (ValueError, RuntimeError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} does not contain the state of this network: {first_line(error)}") from error


def _continue(
    state: Mapping[str, Any], path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, names: Sequence[str],
    generator: torch.Generator,
) -> None:  # fmt: skip
    """Restores everything as it was after an epoch; names: of what the optimizer keeps for each parameter."""
    load_state(model, state["model"], path)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    try:
        for position, moments in state["moments"].items():
            shapes = {name: () if name == "step" else parameters[position].shape for name in names}
            if {name: moment.shape for name, moment in moments.items()} != shapes:
                raise ValueError(f"what the optimizer keeps for parameter {position} must have the shapes {shapes}")
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state["moments"]})
        generator.set_state(state["generator"])
    except (ValueError, RuntimeError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} does not contain the state of this training: {first_line(error)}") from error


def _stored_state(path: Path, name: str, epochs: int) -> Record | None:
    if not path.exists():
        return None
    state = checkpoints.load_checkpoint(path)
    if (state.get("training"), state.get("epochs")) != (name, epochs):
        raise ValueError(
            f"{path} belongs to the training {state.get('training')!r} of {state.get('epochs')!r} epochs, not to "
            f"{name!r} of {epochs}"
        )
    kinds: dict[str, checkpoints.Kind] = {
        "best": checkpoints.OBJECT,
        "history": checkpoints.OBJECT,
        "best_loss": ("a number", lambda value: type(value) is float),
        "epoch": (f"a whole number from 1 to {epochs}", lambda value: type(value) is int and 1 <= value <= epochs),
        "stopped": ("True or False", lambda value: type(value) is bool),
    }
    epoch = checkpoints.check_fields(state, path, kinds)["epoch"]
    if epoch < epochs and not state["stopped"]:
        kinds = dict.fromkeys(("model", "moments"), checkpoints.OBJECT) | {"generator": ("a tensor", torch.is_tensor)}
        checkpoints.check_fields(state, path, kinds)

    def is_curve(value: object) -> bool:
        return isinstance(value, list) and len(value) == epoch and all(type(number) is float for number in value)

    kinds = {field.name: (f"a list of {epoch} numbers", is_curve) for field in fields(History)}
    kinds["frozen_from"] = (
        f"a whole number from 0 to {epochs}",
        lambda value: value is None or type(value) is int and 0 <= value <= epochs,
    )
    history = checkpoints.check_fields(state["history"], f"{path}: its history", kinds)
    return state | {"history": History(**{name: history.get(name) for name in kinds})}  # type: ignore[arg-type]


def check_finished(path: Path) -> None:
    """Refuses the file of a finished job's training that is missing, or where that training has not ended."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; without it the report cannot be written again")
    state = checkpoints.load_checkpoint(path)
    if "epochs" not in state or state.get("epoch") != state["epochs"] and state.get("stopped") is not True:
        raise ValueError(f"{path} belongs to an unfinished training, in a job that is marked finished")
