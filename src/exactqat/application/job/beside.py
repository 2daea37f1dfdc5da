# SPDX-License-Identifier: Apache-2.0
"""Compares files with their simulation, and what devices compute with what was trained: integer by integer, and answer
by answer.

The trained network's own codes are compared with the exact simulation of a device, which needs no runtime. The
simulation in turn is compared with the runtime, if there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ... import qat
from ...deploy.codes import input_codes
from ...deploy.comparison import Comparison, Report
from ...deploy.graph import Graph
from ...deploy.lower import lower_with_layouts
from ...deploy.runtimes import profile_here
from ...deploy.simulate import simulate
from ...deploy.values import Lowered, device_codes, layer_values
from ...deploy.verify import verify
from ...kit.device.profile import DEFAULT_KERNELS
from .results import Beside, Dataset, Split

# How many images' values are kept for all layers at once, and how many are computed at a time.
LAYER_IMAGES = IMAGES_AT_A_TIME = 128


def beside_training(
    model: qat.PreparedModel, graph: Graph, split: Split, device: str, lowered: Lowered | None = None
) -> Beside:
    """Compares a device with training.

    Args:
        model: frozen, in evaluation mode.
        graph: lowered from it.
        lowered: see `deploy.device_codes`.
    """
    lowered = lowered or lower_with_layouts(model)
    (output,) = graph.outputs
    kinds = {operator.outputs[0]: operator.kind for operator in graph.operators}
    rows: dict[str, Comparison] = {}
    trained_answers, device_answers = [], []
    for images in split.images.split(IMAGES_AT_A_TIME):
        trained = device_codes(model, images, lowered=lowered)
        integers = simulate(graph, input_codes(graph, images), device, tensors=list(trained), progress=False)
        trained_answers.append(trained[output].argmax(1))
        device_answers.append(integers[output].argmax(1))
        for name, own in trained.items():
            new = Comparison(name, kinds.get(name, "input"), exact=device == graph.trained_for)
            rows[name] = rows.get(name, new).counting(integers[name], own, "training")
    outputs = (Comparison(output, "whole graph"),)
    report = Report(device, (), outputs, graph.trained_for, tuple(rows.values()))
    return Beside(report, np.concatenate(trained_answers), np.concatenate(device_answers), split.labels.numpy())


def compared(
    model: qat.PreparedModel, graph: Graph, path: Path, dataset: Dataset, device: str = "", noise: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Beside:  # fmt: skip
    """The file at `path` on a runtime beside its simulation, and the device beside training, over all test images.

    Args:
        device: by default the one that the network was trained for. Its file then runs as `deploy.verify` says if this
            machine does not have that device's runtime; a file for another device is then not run.
        noise: also compare the first images' values with those of the float network.
    """
    images: Any = dataset.test.images
    first, lowered = images[:LAYER_IMAGES], lower_with_layouts(model)
    beside = beside_training(model, graph, dataset.test, device or str(model.profile), lowered)
    try:
        profile_here(device or DEFAULT_KERNELS)
    except (ValueError, ImportError) as error:
        return replace(beside, not_run=str(error))
    values = layer_values(model, first, lowered=lowered) if noise else (None, None)
    report = verify(
        graph, path, None, device or None, float_values=values[0], trained_values=values[1], trained_codes={},
        progress=progress, model=model if device in ("", model.profile) else None,
        data=DataLoader(images, IMAGES_AT_A_TIME, generator=torch.Generator()),
    )  # fmt: skip
    return replace(beside, report=replace(report, training=beside.report.training))
