# SPDX-License-Identifier: Apache-2.0
"""Compares what devices compute with what was trained: integer by integer, and answer by answer.

The trained network's own codes are compared with the exact simulation of a device, which needs no runtime. The
simulation in turn is compared with the runtime, if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
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
from .judges import Judge

CLASSES = Judge()
# How many images' values are kept for all layers at once.
LAYER_IMAGES = 128
# How many images are computed at a time.
IMAGES_AT_A_TIME = 128


def beside_training(
    model: qat.PreparedModel,
    graph: Graph,
    split: Split,
    codes: np.ndarray,
    devices: Sequence[str],
    lowered: Lowered | None = None,
    judge: Judge = CLASSES,
) -> dict[str, Beside]:
    """Compares several devices with training.

    Args:
        model: frozen, in evaluation mode.
        graph: lowered from it.
        split: images and labels; codes: the images as the device takes them.
        lowered: see `deploy.device_codes`.
        judge: turns outputs into answers.
    """
    lowered = lowered or lower_with_layouts(model)
    (output,) = graph.outputs
    tallies: dict[str, dict[str, Tally]] = {device: {} for device in devices}
    answers: Mapping[str, list[np.ndarray]] = {name: [] for name in ("", *devices)}
    scores: Mapping[str, list[np.ndarray]] = {name: [] for name in devices}
    for start in range(0, len(codes), IMAGES_AT_A_TIME):
        images = slice(start, start + IMAGES_AT_A_TIME)
        trained = device_codes(model, split.images[images], lowered=lowered)
        shown = split.images[images].numpy()
        answers[""].append(judge.answers(graph, trained[output], shown))
        for device in devices:
            integers = simulate(graph, codes[images], device, tensors=list(trained), progress=False)
            answers[device].append(judge.answers(graph, integers[output], shown))
            scores[device].append(judge.scores(graph, integers[output], shown))
            for name, own in trained.items():
                tallies[device].setdefault(name, Tally()).add(integers[name], own, "training")
    kinds = {operator.outputs[0]: operator.kind for operator in graph.operators}
    trained_answers, labels = np.concatenate(answers[""]), split.labels.numpy()[: len(codes)]
    found = {}
    for device, tally in tallies.items():
        same = device == graph.trained_for
        rows = {name: each.comparison(name, kinds.get(name, "input"), same) for name, each in tally.items()}
        device_answers = np.concatenate(answers[device])
        device_scores = np.concatenate(scores[device])
        found[device] = Beside(
            tuple(rows.values()), rows[output], trained_answers, device_answers, labels, device_scores
        )
    return found


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


def run_on_device(graph: Graph, path: Path, codes: np.ndarray) -> np.ndarray:
    """The plain file on the runtime: int8 codes of the logits, [n, classes]."""
    from ai_edge_litert.interpreter import Interpreter

    # Not by its path, which need not be UTF-8.
    interpreter = Interpreter(model_content=path.read_bytes(), num_threads=1)
    (entry,), (exit_,) = interpreter.get_input_details(), interpreter.get_output_details()
    results = []
    for start in range(0, len(codes), IMAGES_AT_A_TIME):
        block = codes[start : start + IMAGES_AT_A_TIME]
        interpreter.resize_tensor_input(entry["index"], block.shape)
        interpreter.allocate_tensors()
        interpreter.set_tensor(entry["index"], block)
        interpreter.invoke()
        results.append(np.array(interpreter.get_tensor(exit_["index"])))
    return np.concatenate(results)
