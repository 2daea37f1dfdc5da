# SPDX-License-Identifier: Apache-2.0
"""Compares files with their simulation, and what devices compute with what was trained: integer by integer, and answer
by answer.

The trained network's own codes are compared with the exact simulation of a device, which needs no runtime. The
simulation in turn is compared with the runtime, if there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ... import qat
from ...deploy.codes import input_codes as codes_of
from ...deploy.comparison import Comparison, Report
from ...deploy.graph import Graph
from ...deploy.lower import lower_with_layouts
from ...deploy.packing import packed
from ...deploy.runtimes import profile_here, profiles_here
from ...deploy.simulate import simulate
from ...deploy.values import Lowered, device_codes, layer_values
from ...deploy.verify import verify
from ...kit.device.profile import DEFAULT_KERNELS, REFERENCE
from .results import Beside, Dataset, Split

# How many images' values are kept for all layers at once, and how many are computed at a time.
LAYER_IMAGES = IMAGES_AT_A_TIME = 128


@dataclass(frozen=True)
class Verified:
    """A delivered file on a device, and the device compared with what was trained.

    Attributes:
        report: of the file and the integers.
        beside: of the answers to the test images, by the device's exact simulation.
        not_run: why the file was not run; empty: it was.
    """

    report: Report
    beside: Beside
    not_run: str = ""

    @property
    def differing(self) -> int:
        """Integers that differ, between the file and its simulation, between the device and training, or between the
        file fed with the user's images and the model."""
        return self.report.differing + self.report.training_differing + self.report.predictions_differing


def beside_training(
    model: qat.PreparedModel, graph: Graph, split: Split, codes: np.ndarray, device: str, lowered: Lowered | None = None
) -> Beside:
    """Compares a device with training.

    Args:
        model: frozen, in evaluation mode.
        graph: lowered from it.
        split: images and labels; codes: the images as the device takes them.
        lowered: see `deploy.device_codes`.
    """
    lowered = lowered or lower_with_layouts(model)
    (output,) = graph.outputs
    kinds = {operator.outputs[0]: operator.kind for operator in graph.operators}
    rows: dict[str, Comparison] = {}
    trained_answers, device_answers = [], []
    for start in range(0, len(codes), IMAGES_AT_A_TIME):
        block = slice(start, start + IMAGES_AT_A_TIME)
        trained = device_codes(model, split.images[block], lowered=lowered)
        integers = simulate(graph, codes[block], device, tensors=list(trained), progress=False)
        trained_answers.append(trained[output].argmax(1))
        device_answers.append(integers[output].argmax(1))
        for name, own in trained.items():
            new = Comparison(name, kinds.get(name, "input"), exact=device == graph.trained_for)
            rows[name] = rows.get(name, new).counting(integers[name], own, "training")
    answers = np.concatenate(trained_answers), np.concatenate(device_answers)
    return Beside(tuple(rows.values()), rows[output], *answers, split.labels.numpy()[: len(codes)])


def compared(
    model: qat.PreparedModel, graph: Graph, path: Path, dataset: Dataset, device: str = "", noise: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Verified:  # fmt: skip
    """The file at `path` on a runtime beside its simulation, and the device beside training, over all test images.

    Args:
        device: by default the one that the network was trained for. Its file then runs on LiteRT's default kernels,
            or its reference kernels for weights of four bits, if this machine does not have that device's runtime.
        noise: also compare the first images' values with those of the float network.
    """
    wanted, runs, not_run = device or str(model.profile), device, ""
    if not device:
        here = DEFAULT_KERNELS if packed(graph) is graph else REFERENCE.name
        runs = wanted if wanted in profiles_here() else here
    try:
        runs = profile_here(runs)
    except (ValueError, ImportError) as error:
        runs, not_run = "", str(error)
    codes, lowered = input_codes(graph, dataset), lower_with_layouts(model)
    beside = beside_training(model, graph, dataset.test, codes, wanted, lowered)
    first = dataset.test.images[:LAYER_IMAGES]
    if runs:
        values = layer_values(model, first, lowered=lowered) if noise else (None, None)
        # Images as the user has them, if the runtime is that of the model's device.
        own = (model, first) if runs == model.profile else (None, None)
        report = verify(
            graph, path, codes, runs, float_values=values[0], trained_values=values[1], trained_codes={},
            progress=progress, model=own[0], data=own[1],
        )  # fmt: skip
    else:
        nothing = tuple(Comparison(name, "whole graph", 0, 0, 0, False) for name in graph.outputs)
        report = Report(wanted, (), nothing, graph.trained_for)
    ran_as = "" if report.profile == wanted else report.profile
    return Verified(replace(report, profile=wanted, training=beside.tensors, ran_as=ran_as), beside, not_run)


def input_codes(graph: Graph, dataset: Dataset) -> np.ndarray:
    """All test images as the device takes them, int8, with the axes of the graph's signature."""
    blocks = dataset.test.images.split(IMAGES_AT_A_TIME)
    return np.concatenate([codes_of(graph, block.numpy())[graph.inputs[0]] for block in blocks])
