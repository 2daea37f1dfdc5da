# SPDX-License-Identifier: Apache-2.0
"""Compares what devices compute with what was trained: integer by integer, and answer by answer.

The trained network's own codes are compared with the exact simulation of a device, which needs no runtime. The
simulation in turn is compared with the runtime, if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ... import qat
from ...deploy.codes import input_codes as codes_of
from ...deploy.comparison import Report, Tally
from ...deploy.graph import Graph
from ...deploy.lower import lower_with_layouts
from ...deploy.packing import packed
from ...deploy.runtimes import profile_here, profiles_here
from ...deploy.simulate import simulate
from ...deploy.values import Lowered, device_codes
from ...kit.device.profile import DEFAULT_KERNELS, REFERENCE
from ..report.results import Beside, Dataset, Split

# How many images' values are kept for all layers at once, and how many are computed at a time.
LAYER_IMAGES = IMAGES_AT_A_TIME = 128


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
        graph: lowered from it.
        split: images and labels; codes: the images as the device takes them.
        lowered: see `deploy.device_codes`.
    """
    lowered = lowered or lower_with_layouts(model)
    (output,) = graph.outputs
    tallies: dict[str, dict[str, Tally]] = {device: {} for device in devices}
    answers: dict[str, list[np.ndarray]] = {name: [] for name in ("training", *devices)}
    for start in range(0, len(codes), IMAGES_AT_A_TIME):
        block = slice(start, start + IMAGES_AT_A_TIME)
        trained = device_codes(model, split.images[block], lowered=lowered)
        answers["training"].append(trained[output].argmax(1))
        for device in devices:
            integers = simulate(graph, codes[block], device, tensors=list(trained), progress=False)
            answers[device].append(integers[output].argmax(1))
            for name, own in trained.items():
                tallies[device].setdefault(name, Tally()).add(integers[name], own, "training")
    kinds = {operator.outputs[0]: operator.kind for operator in graph.operators}
    classes = {name: np.concatenate(blocks) for name, blocks in answers.items()}
    compared = {}
    for device, tally in tallies.items():
        same = device == graph.trained_for
        rows = {name: entry.comparison(name, kinds.get(name, "input"), same) for name, entry in tally.items()}
        labels = split.labels.numpy()[: len(codes)]
        compared[device] = Beside(tuple(rows.values()), rows[output], classes["training"], classes[device], labels)
    return compared


def about(ran: Report, device: str, beside: Beside) -> Report:
    """The findings about a device: the file on a runtime, its own if possible, and what it computes compared with
    training."""
    return replace(ran, profile=device, training=beside.tensors, ran_as="" if ran.profile == device else ran.profile)


def runs_here(profile: str, graph: Graph) -> str:
    """The profile itself if this machine has its runtime, else LiteRT's default kernels, or its reference kernels for
    weights of four bits, which the others compute otherwise."""
    if profile in profiles_here():
        return profile
    return DEFAULT_KERNELS if packed(graph) is graph else REFERENCE.name


def input_codes(graph: Graph, dataset: Dataset) -> np.ndarray:
    """All test images as the device takes them, int8, with the axes of the graph's signature."""
    blocks = dataset.test.images.split(IMAGES_AT_A_TIME)
    return np.concatenate([codes_of(graph, block.numpy())[graph.inputs[0]] for block in blocks])


def users_own(model: qat.PreparedModel, dataset: Dataset, runs: str) -> dict[str, Any]:
    """Images as the user has them, for `verify` to feed to the file and compare with the model; nothing if the runtime
    is not that of the model's device."""
    if profile_here(runs) != model.profile:
        return {}
    return {"model": model, "data": dataset.test.images[:LAYER_IMAGES]}
