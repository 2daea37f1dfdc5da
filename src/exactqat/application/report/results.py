# SPDX-License-Identifier: Apache-2.0
"""A job's findings, as pages and tables show them and as metrics.json records them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .luck import Paired, paired

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ...deploy.comparison import Comparison, Report
    from ...deploy.footprint import Footprint
    from ...deploy.graph import Graph
    from ...qat import PreparedModel, RangePolicy, Rule

# Images whose content is hashed at a time.
FINGERPRINT_BATCH = 256


@dataclass(frozen=True)
class Mark:
    """What a benchmark requires of a network on its device.

    Attributes:
        title: of the benchmark.
        least: the lowest accuracy on the test images.
    """

    title: str
    least: float


class Asked(Protocol):
    """What a page shows of a job's settings; `exactqat.application.job.Settings` is one."""

    @property
    def out(self) -> Path: ...
    @property
    def seed(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def precisions(self) -> Mapping[str, tuple[int, int]]: ...
    @property
    def widths(self) -> Sequence[tuple[int, int]]: ...
    @property
    def mark(self) -> Mark | None: ...
    def training_sentences(self) -> list[str]: ...
    def commands(self) -> tuple[str, ...]: ...
    def stored(self) -> dict[str, Any]: ...


class Fit(Protocol):
    """What a network took from a file of weights; `exactqat.application.job.weights.Fit` is one."""

    @property
    def digest(self) -> str: ...
    @property
    def sentences(self) -> Sequence[str]: ...


class Images(Protocol):
    """Images, float32 [n, channels, height, width]: a tensor, or what reads them from disk when they are indexed."""

    @property
    def shape(self) -> torch.Size: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Tensor: ...
    def split(self, size: int, /) -> Iterable[Tensor]: ...
    def numpy(self) -> np.ndarray: ...


@dataclass(frozen=True)
class Split:
    """images: float32 [n, channels, height, width]; labels: int64 [n]; names: of the images' files, below the data's
    folder, if they have any."""

    images: Images
    labels: Tensor
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    """Images and labels in three disjoint parts, and what is known about them.

    Attributes:
        value_range: (min, max) that any image may take; it becomes the input's fixed quantization range.
        skipped: one sentence for each image that could not be used.
        noun: what an example is called, such as image or sound.
    """

    name: str
    class_names: tuple[str, ...]
    value_range: tuple[float, float]
    train: Split
    validation: Split
    test: Split
    skipped: tuple[str, ...] = ()
    noun: str = "image"

    def fingerprint(self) -> str:
        """A hash of everything that a training sees."""
        digest = hashlib.sha256(repr((self.class_names, self.value_range)).encode())
        for part in (self.train, self.validation, self.test):
            digest.update(repr(tuple(part.images.shape)).encode())
            # Of files that were not read yet, their names and sizes.
            unread: Iterable[bytes] = getattr(part.images, "unread", tuple)()
            for content in unread or (block.numpy().tobytes() for block in part.images.split(FINGERPRINT_BATCH)):
                digest.update(content)
            digest.update(part.labels.numpy().tobytes())
        return digest.hexdigest()


@dataclass
class History:
    """One entry per epoch. frozen_from: the epoch with which the network is frozen; learning_rate: of the weights."""

    loss: list[float] = field(default_factory=list)
    validation_accuracy: list[float] = field(default_factory=list)
    frozen_from: int | None = None
    validation_loss: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Beside:
    """A device compared with training, over some images.

    Attributes:
        tensors: what the device stores against what training stored, tensor by tensor, including the outputs.
        logits: the same, for the outputs alone.
        trained_answers, device_answers: the class that each gives, [n].
        labels: the class that an image shows, [n].
    """

    tensors: tuple[Comparison, ...]
    logits: Comparison
    trained_answers: np.ndarray
    device_answers: np.ndarray
    labels: np.ndarray

    @property
    def differing(self) -> int:
        """Stored integers that differ from training's."""
        return sum(each.differing for each in self.tensors)

    @property
    def values(self) -> int:
        """Stored integers compared."""
        return sum(each.values for each in self.tensors)

    @property
    def trained_accuracy(self) -> float:
        return float((self.trained_answers == self.labels).mean())

    @property
    def device_accuracy(self) -> float:
        return float((self.device_answers == self.labels).mean())

    @property
    def answers_differing(self) -> int:
        """Images that the device classifies differently than the trained network."""
        return int((self.trained_answers != self.device_answers).sum())

    def in_words(self) -> str:
        """What the device computes, for a table."""
        if not self.differing:
            return "what was trained"
        share = 100 * self.differing / self.values
        accuracies = f"{100 * self.device_accuracy:.1f} instead of {100 * self.trained_accuracy:.1f} % right"
        return f"{share:.2g} % of codes differ; {accuracies}"

    def accuracies(self) -> str:
        """A clause on the answers."""
        images = len(self.labels)
        changed = (
            f"{self.answers_differing:,} of {images:,} answers change"
            if self.answers_differing
            else "no answer changes"
        )
        return (
            f"accuracy on {images:,} test images {self.device_accuracy:.1%}, in training {self.trained_accuracy:.1%}, "
            f"{changed}"
        )

    def stored(self) -> dict[str, Any]:
        """For metrics.json."""
        return {
            "images": len(self.labels),
            "values": self.values,
            "differing": self.differing,
            "logits": self.logits.values,
            "logits_differing": self.logits.differing,
            "answers_differing": self.answers_differing,
            "accuracy": self.device_accuracy,
            "trained_accuracy": self.trained_accuracy,
        }


@dataclass(frozen=True)
class Method:
    """One way to quantize: with training or without, and where activation ranges come from.

    searched: by `tune.search`, which starts from such ranges.
    """

    name: str
    title: str
    ranges: RangePolicy
    trained: bool
    searched: bool = False

    @property
    def delivered(self) -> bool:
        """Whether a network made this way can be delivered; others are baselines."""
        return self.trained or self.searched


@dataclass
class Outcome:
    """One quantized network and what was found out about it.

    device_predictions: the class that the device it was trained for gives every test image, by its exact simulation.
    footprint: what it needs on a microcontroller, for delivered networks.
    compressed_bytes: of its file, deflated as downloads are.
    report: the file on a runtime, and the device it was trained for compared with training, over all test images.
    elsewhere: for delivered networks, every device compared with training, over the first test images; or why it could
        not be simulated.
    """

    method: Method
    precision: str
    model: PreparedModel
    rules: list[Rule]
    graph: Graph
    history: History | None
    validation_accuracy: float
    validation_loss: float
    test_accuracy: float
    device_accuracy: float = 0.0
    device_predictions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    file_bytes: int = 0
    compressed_bytes: int = 0
    report: Report | None = None
    footprint: Footprint | None = None
    elsewhere: dict[str, Beside | str] = field(default_factory=dict)


@dataclass
class Results:
    """Everything that the report and the table show.

    seconds: the job's total time, over all its runs; runs: how often it was started.
    fit: what float training took from the given weights, if any. float_predictions: the float network's answer to
    every test image, [n].
    """

    settings: Asked
    dataset: Dataset
    float_model: nn.Module
    float_history: History
    float_validation_accuracy: float
    float_test_accuracy: float
    float_bytes: int
    outcomes: list[Outcome]
    seconds: float = 0.0
    resumed: bool = False
    runs: int = 1
    fit: Fit | None = None
    float_predictions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def of(self, precision: str) -> list[Outcome]:
        """The outcomes of one precision, in the order of METHODS."""
        return [outcome for outcome in self.outcomes if outcome.precision == precision]

    def chosen(self, precision: str) -> Outcome:
        """The delivered network: the one with the lowest validation loss among the trained and the searched ones."""
        return min((o for o in self.of(precision) if o.method.delivered), key=lambda outcome: outcome.validation_loss)

    @property
    def reports(self) -> list[Report]:
        """Of all networks that were compared."""
        return [outcome.report for outcome in self.outcomes if outcome.report is not None]

    @property
    def values_compared(self) -> int:
        """Integers compared between simulation and runtime, over all networks."""
        return sum(report.values for report in self.reports)

    @property
    def values_differing(self) -> int:
        """How many of them differ."""
        return sum(report.differing for report in self.reports)

    @property
    def training_values(self) -> int:
        """Integers of the device that was trained for, compared with training's, over all networks."""
        return sum(report.training_values for report in self.reports)

    @property
    def training_differing(self) -> int:
        """How many of them differ."""
        return sum(report.training_differing for report in self.reports)

    @property
    def predictions(self) -> tuple[int, int]:
        """How many integers of the files, fed with the user's images, differ from the models' own, and how many were
        compared; 0 of 0 if the runtime is not that of the device."""
        rows = [row for report in self.reports for row in report.predictions]
        return sum(row.differing for row in rows), sum(row.values for row in rows)

    @property
    def equal(self) -> bool:
        """Whether every file runs as simulated, and the device computes what was trained."""
        return all(report.equal for report in self.reports)

    @property
    def ran_as(self) -> str:
        """The profile whose runtime ran the files: the device's own if this machine has it."""
        return self.reports[0].ran_as or self.reports[0].profile

    def beside_float(self, answers: np.ndarray) -> Paired:
        """A network's answers to the test images compared with the float network's, image by image."""
        labels = self.dataset.test.labels.numpy()
        return paired(answers == labels, self.float_predictions == labels)
