# SPDX-License-Identifier: Apache-2.0
"""What a job works on and finds out, as its pages, its tables and metrics.json show it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from .settings import Method, Settings

if TYPE_CHECKING:
    from torch import nn

    from ...deploy.comparison import Report
    from ...deploy.footprint import Footprint
    from ...deploy.graph import Graph
    from ...qat import PreparedModel, Rule
    from .images import Images
    from .weights import Fit


@dataclass(frozen=True)
class Progress:
    """How a job reports what it does. total(n): all its training steps; begin(text): a new piece of work; advance(n): n
    more training steps are done; skip(n): n steps were done in an earlier run, or are skipped, so they take no time;
    epoch(training, history, n): one more of a training's n epochs is done, or those done earlier; say(text): a sentence
    that the user should read; compared(n, m): n of m files are read, or comparisons of a file done; read(dataset)."""

    total: Callable[[int], object] = lambda steps: None
    begin: Callable[[str], object] = lambda text: None
    advance: Callable[[int], object] = lambda steps: None
    skip: Callable[[int], object] = lambda steps: None
    epoch: Callable[[str, History, int], object] = lambda name, history, epochs: None
    say: Callable[[str], object] = lambda text: None
    compared: Callable[[int, int], None] = lambda done, all: None
    read: Callable[[Dataset], object] = lambda dataset: None


@dataclass(frozen=True)
class Split:
    """images: float32 [n, channels, height, width]; labels: int64 [n]; names: of the images' files, below the data's
    folder, if they have any."""

    images: Images | torch.Tensor
    labels: torch.Tensor
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
            images = part.images
            for content in [images.numpy().tobytes()] if isinstance(images, torch.Tensor) else images.content():
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
        report: what the device stores against what training stored, tensor by tensor; and a file on the device's
            runtime, where it was run.
        trained_answers, device_answers: the class that each gives, by the device's exact simulation, [n].
        labels: the class that an image shows, [n].
        not_run: why the file was not run, if it should have been.
    """

    report: Report
    trained_answers: np.ndarray
    device_answers: np.ndarray
    labels: np.ndarray
    not_run: str = ""

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
        if not self.report.training_differing:
            return "what was trained"
        share = 100 * self.report.training_differing / self.report.training_values
        accuracies = f"{100 * self.device_accuracy:.1f} instead of {100 * self.trained_accuracy:.1f} % right"
        return f"{share:.2g} % of codes differ; {accuracies}"

    def accuracies(self) -> str:
        """A clause on the answers."""
        count, changed = f"{len(self.labels):,}", self.answers_differing
        changes = f"{changed:,} of {count} answers change" if changed else "no answer changes"
        accuracy = f"{self.device_accuracy:.1%}, in training {self.trained_accuracy:.1%}"
        return f"accuracy on {count} test examples {accuracy}, {changes}"

    def stored(self) -> dict[str, Any]:
        """For metrics.json."""
        logits_differing, logits = self.report.outputs_beside_training
        return {
            "images": len(self.labels),
            "values": self.report.training_values,
            "differing": self.report.training_differing,
            "logits": logits,
            "logits_differing": logits_differing,
            "answers_differing": self.answers_differing,
            "accuracy": self.device_accuracy,
            "trained_accuracy": self.trained_accuracy,
        }


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
    report: Report
    device_accuracy: float
    device_predictions: np.ndarray
    file_bytes: int
    compressed_bytes: int
    footprint: Footprint | None = None
    elsewhere: dict[str, Beside | str] = field(default_factory=dict)


class Compared(NamedTuple):
    """How many integers were compared, and how many of them differ."""

    values: int
    differing: int


@dataclass
class Results:
    """Everything that the report and the table show.

    seconds: the job's total time, over all its runs; runs: how often it was started.
    fit: what float training took from the given weights, if any. float_predictions: the float network's answer to
    every test image, [n].
    """

    settings: Settings
    dataset: Dataset
    float_model: nn.Module
    float_history: History
    float_validation_accuracy: float
    float_test_accuracy: float
    float_bytes: int
    float_predictions: np.ndarray
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    runs: int = 1
    fit: Fit | None = None

    def of(self, precision: str) -> list[Outcome]:
        """The outcomes of one precision, in the order of METHODS."""
        return [outcome for outcome in self.outcomes if outcome.precision == precision]

    def chosen(self, precision: str) -> Outcome:
        """The delivered network, trained or not: the one with the lowest validation loss."""
        return min(self.of(precision), key=lambda outcome: outcome.validation_loss)

    @property
    def delivered(self) -> list[Outcome]:
        return [self.chosen(precision) for precision in self.settings.precisions]

    def _total(self, of: str = "") -> Compared:
        """Over all networks."""
        counts = [[getattr(outcome.report, of + name) for name in Compared._fields] for outcome in self.outcomes]
        return Compared(*map(sum, zip(*counts, strict=True)))

    @property
    def simulation(self) -> Compared:
        """The files on the runtime with their simulation."""
        return self._total()

    @property
    def training(self) -> Compared:
        """The device that was trained for with training."""
        return self._total("training_")

    @property
    def predictions(self) -> Compared:
        """The files, fed with the user's images, with the models' own; nothing if the runtime is not the device's."""
        return self._total("predictions_")

    @property
    def equal(self) -> bool:
        """Whether every file runs as simulated, and the device computes what was trained."""
        return all(outcome.report.equal for outcome in self.outcomes)

    @property
    def ran_as(self) -> str:
        """The profile whose runtime ran the files: the device's own if this machine has it."""
        report = self.outcomes[0].report
        return report.ran_as or report.profile
