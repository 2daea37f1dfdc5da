# SPDX-License-Identifier: Apache-2.0
"""What devices compute compared with what was trained: integer by integer, and answer by answer.

The trained network's own codes are compared with the exact simulation of a device, which needs no runtime. The
simulation in turn is compared with the runtime, where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import qat
from ..deploy.comparison import Comparison, Report, Tally
from ..deploy.graph import Graph
from ..deploy.lower import lower_with_layouts
from ..deploy.simulate import simulate
from ..deploy.values import Lowered, device_codes
from .data import Split

# Of whose values all layers are held at once.
IMAGES_AT_A_TIME = 128


@dataclass(frozen=True)
class Beside:
    """A device compared with training, over some images.

    Attributes:
        tensors: what the device stores against what training stored, tensor by tensor, the outputs among them.
        logits: the same, of the outputs alone.
        trained_answers, device_answers: the class that each names, [n].
        labels: the class that an image shows, [n].
    """

    tensors: tuple[Comparison, ...]
    logits: Comparison
    trained_answers: np.ndarray
    device_answers: np.ndarray
    labels: np.ndarray

    @property
    def differing(self) -> int:
        """Stored integers that are not training's."""
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
        """Images that the device calls something else than the trained network does."""
        return int((self.trained_answers != self.device_answers).sum())

    def in_report(self, report: Report) -> Report:
        """A report on the file, completed with it."""
        return replace(report, training=self.tensors)

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


def beside_training(
    model: qat.PreparedModel,
    graph: Graph,
    split: Split,
    codes: np.ndarray,
    devices: Sequence[str],
    lowered: Lowered | None = None,
) -> dict[str, Beside]:
    """Compares several devices with training.

    Args:
        model: frozen, in evaluation mode.
        graph: what was lowered from it.
        split: images and labels; codes: the images as the device takes them.
        lowered: see `deploy.device_codes`.
    """
    lowered = lowered or lower_with_layouts(model)
    (output,) = graph.outputs
    tallies: dict[str, dict[str, Tally]] = {device: {} for device in devices}
    answers: Mapping[str, list[np.ndarray]] = {name: [] for name in ("", *devices)}
    for start in range(0, len(codes), IMAGES_AT_A_TIME):
        images = slice(start, start + IMAGES_AT_A_TIME)
        trained = device_codes(model, split.images[images], lowered=lowered)
        answers[""].append(trained[output].argmax(1))
        for device in devices:
            integers = simulate(graph, codes[images], device, tensors=list(trained))
            answers[device].append(integers[output].argmax(1))
            for name, own in trained.items():
                tallies[device].setdefault(name, Tally()).add(integers[name], own, "training")
    kinds = {operator.outputs[0]: operator.kind for operator in graph.operators}
    trained_answers, labels = np.concatenate(answers[""]), split.labels.numpy()[: len(codes)]
    found = {}
    for device, tally in tallies.items():
        same = device == graph.trained_for
        rows = {name: each.comparison(name, kinds.get(name, "input"), same) for name, each in tally.items()}
        device_answers = np.concatenate(answers[device])
        found[device] = Beside(tuple(rows.values()), rows[output], trained_answers, device_answers, labels)
    return found
