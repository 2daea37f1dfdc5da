# SPDX-License-Identifier: Apache-2.0
"""How a job's networks are trained: optimizers, schedules, learning rates, losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import qat
from ..report.results import Dataset, Split
from . import augmentation
from .options import BALANCED, OPTIMIZERS, SCHEDULES, Options, distillation_parts

FLOAT_LEARNING_RATE = 4e-3
# Given weights already know something, which large steps would lose.
GIVEN_WEIGHTS_LEARNING_RATE = 1e-3
# Eight bits are fine enough to keep what float training found, and many large steps would lose it; fewer bits have to
# search again.
FINE_TUNING_LEARNING_RATE = 3e-4
QAT_LEARNING_RATE = 1e-3
RANGE_LEARNING_RATE = 3e-3
# Steps of plain gradients are smaller than Adam's at the same rate.
SGD_FACTOR = 10


@dataclass(frozen=True)
class Teacher:
    """The float network, whose answers are also learned.

    Attributes:
        share: of the loss.
    """

    distillation: qat.Distillation
    share: float


@dataclass(frozen=True)
class Manner:
    """How a training run goes.

    Attributes:
        optimizer, schedule: names of OPTIMIZERS and SCHEDULES.
        augment: names of AUGMENTATIONS.
        limits: the smallest and the largest value of an image.
        class_weights: float32 [classes]; None: all count the same.
        patience: epochs without a lower validation loss after which training ends; None: it does not end early.
        teacher: None: only the labels count.
        mixed_precision: bfloat16 where PyTorch's autocast has it.
        normal: examples that the network is to reproduce; the first of them show how large a normal error is. None: it
            classifies.
        resting: modules that stay in evaluation mode, such as batch norms of a frozen base.
    """

    optimizer: str = "adam"
    schedule: str = "cosine"
    augment: tuple[str, ...] = ("shift",)
    limits: tuple[float, float] = (0.0, 1.0)
    class_weights: Tensor | None = None
    patience: int | None = None
    teacher: Teacher | None = None
    mixed_precision: bool = False
    normal: Split | None = None
    resting: tuple[nn.Module, ...] = ()


def optimizer_of(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """One of OPTIMIZERS."""
    if name == "sgd":
        return torch.optim.SGD(groups, momentum=0.9, nesterov=True)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](groups)


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


def schedule_of(name: str, steps: int) -> Callable[[int], float]:
    """The factor for learning rates after a number of all `steps`; one of SCHEDULES."""

    def factor(step: int) -> float:
        done = step / steps
        if name == "constant":
            return 1.0
        if name == "step":
            return 1.0 if done < 0.5 else 0.1 if done < 0.75 else 0.01
        rising = max(1, round(steps / 10)) if name == "warm-up" else 0
        if step < rising:
            return (step + 1) / rising
        return _cosine((step - rising) / max(1, steps - rising)) if rising else _cosine(done)

    return factor


def loss_of(outputs: Tensor, labels: Tensor, images: Tensor, manner: Manner) -> Tensor:
    """The loss, summed over the examples.

    Args:
        outputs: [n, classes] logits; labels: [n]; images: the inputs that gave the outputs.
    """
    if manner.normal is not None:
        return F.mse_loss(outputs, images.flatten(1), reduction="none").mean(1).sum()
    weights = None if manner.class_weights is None else manner.class_weights.to(outputs.device)
    if weights is None:
        loss = F.cross_entropy(outputs, labels, reduction="sum")
    else:
        # Not by the weights' sum, which differs from batch to batch.
        loss = (F.cross_entropy(outputs, labels, reduction="none") * weights[labels]).sum()
    if manner.teacher is None:
        return loss
    of_teacher = manner.teacher.distillation(outputs, images, "sum")
    return (1 - manner.teacher.share) * loss + manner.teacher.share * of_teacher


def class_weights_of(given: str | Mapping[str, float] | None, dataset: Dataset) -> Tensor | None:
    """The weight of each class in the loss, float32 [classes]; their mean over the training images is 1.

    Args:
        given: see `Settings.class_weights`.

    Raises:
        ValueError: a class has no weight, or there is no such class.
    """
    if given is None:
        return None
    counts = torch.bincount(dataset.train.labels, minlength=len(dataset.class_names)).double()
    if given == BALANCED:
        weights = 1 / counts.clamp(min=1)
    else:
        assert isinstance(given, Mapping)
        for name in dataset.class_names:
            if name not in given:
                raise ValueError(f"--class-weights has no weight for class {name!r} of --data {dataset.name}")
        strangers = [name for name in given if name not in dataset.class_names]
        if strangers:
            raise ValueError(
                f"--class-weights has a weight for {strangers[0]!r}, which is no class of --data {dataset.name}; its "
                f"classes are {', '.join(dataset.class_names[:20])}"
            )
        weights = torch.tensor([given[name] for name in dataset.class_names], dtype=torch.float64)
    return (weights * counts.sum() / (weights * counts).sum()).float()


def manner_of(options: Options, dataset: Dataset) -> Manner:
    """How a job's training runs go."""
    return Manner(
        options.optimizer,
        options.schedule,
        options.augment,
        dataset.value_range,
        class_weights_of(options.class_weights, dataset),
        options.early_stopping,
        normal=dataset.train if dataset.reconstructs else None,
    )


def float_manner(options: Options, manner: Manner, resting: Sequence[nn.Module] = ()) -> Manner:
    """How float training goes."""
    return replace(manner, mixed_precision=options.mixed_precision, resting=tuple(resting))


def quantized_manner(options: Options, manner: Manner, float_model: nn.Module, model: qat.PreparedModel) -> Manner:
    """How quantization-aware training of a model goes."""
    if options.distill is None:
        return manner
    share, temperature, layers = distillation_parts(options.distill)
    return replace(manner, teacher=Teacher(qat.Distillation(model, float_model, layers, temperature), share))


def float_rate(options: Options) -> float:
    """The peak learning rate of float training."""
    if options.lr is not None:
        return options.lr
    rate = FLOAT_LEARNING_RATE if options.weights is None else GIVEN_WEIGHTS_LEARNING_RATE
    return rate * (SGD_FACTOR if options.optimizer == "sgd" else 1)


def quantized_groups(model: qat.PreparedModel, options: Options, fine: bool) -> list[dict[str, Any]]:
    """The optimizer's groups for quantization-aware training.

    fine: it only fine-tunes.
    """
    rate = options.lr_qat
    if rate is None:
        rate = FINE_TUNING_LEARNING_RATE if fine else QAT_LEARNING_RATE
        rate *= SGD_FACTOR if options.optimizer == "sgd" else 1
    of_ranges = RANGE_LEARNING_RATE if options.lr_ranges is None else options.lr_ranges
    return qat.parameter_groups(model, rate, of_ranges)


def sentences(options: Options, noun: str = "image") -> list[str]:
    """How the networks are trained, for readers: augmentation always, the rest if it is not the default."""
    said = [augmentation.sentence(options.augment, noun)]
    if options.optimizer != "adam" or options.schedule != "cosine":
        said.append(f"Optimizer: {OPTIMIZERS[options.optimizer]}; the learning rate {SCHEDULES[options.schedule]}.")
    rates = {"in float training": options.lr, "in quantization-aware training": options.lr_qat}
    rates["of ranges"] = options.lr_ranges
    chosen = [f"{rate:g} {what}" for what, rate in rates.items() if rate is not None]
    if chosen:
        said.append(f"Learning rate: {', '.join(chosen)}.")
    if options.class_weights is not None:
        what = (
            "so that each counts the same"
            if options.class_weights == BALANCED
            else ", ".join(f"{name} {weight:g}" for name, weight in list(options.class_weights.items())[:20])
        )
        said.append(f"Classes are weighted in the loss of training and validation: {what}.")
    if options.freeze_base:
        said.append("Float training leaves what the given weights hold as it is, and trains the rest.")
    if options.distill is not None:
        share, temperature, layers = distillation_parts(options.distill)
        what = (
            "answers too: they are" if not layers else f"answers and what its layers {', '.join(layers)} store: it is"
        )
        said.append(
            f"Quantization-aware training learns the float network's {what} {share:.0%} of the loss, at temperature "
            f"{temperature:g}."
        )
    if options.from_search:
        said.append("Quantization-aware training starts from what a search on the device's integers found.")
    if options.rules is not None:
        said.append(f"Layers have the bits of these rules, the first that matches: {options.rules}.")
    if options.mixed_precision:
        said.append(
            "Float training computes in bfloat16 where PyTorch's autocast does; quantization-aware training stays in "
            "float32, where alone it computes what the device does."
        )
    if options.early_stopping is not None:
        said.append(
            f"A training ends after {options.early_stopping} epochs without a lower validation loss; after freezing, "
            "that is the loss of the device's integers."
        )
    return said
