# SPDX-License-Identifier: Apache-2.0
"""What a peer's adapter gets and gives. Adapters run in an environment of their own, as processes:
`python peer_NAME.py [--quick] [--untrained] FOLDER,PRECISION,SEED,OUT.npz...`, one case after the other.

FOLDER holds task.json (the network's name), weights.pt and data.npz. OUT.npz gets, for each method, the outputs on the
validation and the test examples: as the peer predicts them, and as its file gives them on the runtime; or why there are
none.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from networks import TASKS, Parts, Task, fit, judged, outputs_of, qat_rates, resettled, restored, teacher

Computes = Callable[[np.ndarray], np.ndarray]


class NotOffered(Exception):
    """The peer has nothing for this precision or network; the message says why."""


@dataclass
class Case:
    """One network to be quantized.

    Attributes:
        name: of the network; task: what it is; model: in float, in evaluation.
        parts: inputs and targets to train on, to decide by, to judge by.
        weights, activations: bits.
        folder: for files.
        quick: leave out what takes long.
        seed: of the order of examples in training.
        untrained: leave out quantization-aware training.
        held: the network's own folder.
    """

    name: str
    task: Task
    model: torch.nn.Module
    parts: Parts
    weights: int
    activations: int
    folder: Path
    quick: bool
    seed: int = 0
    untrained: bool = False
    held: Path = Path()

    @property
    def calibration(self) -> np.ndarray:
        return np.asarray(self.parts[0][0][: self.task.calibration])

    def need_eight(self) -> None:
        if (self.weights, self.activations) != (8, 8):
            raise NotOffered("it quantizes convolutions and matrix products to 8 bits only")

    def onnx(self) -> Path:
        """The float network as an ONNX file, with any number of examples."""
        path = self.folder / "float.onnx"
        if not path.exists():
            names: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"]}
            example = torch.from_numpy(self.calibration[:2])
            axes = {"x": {0: "n"}, "y": {0: "n"}}
            torch.onnx.export(self.model, (example,), str(path), dynamo=False, dynamic_axes=axes, **names)
        return path

    @property
    def rates(self) -> tuple[float, ...]:
        """Of quantization-aware training, to be tried one after the other."""
        return () if self.untrained else qat_rates(self.task, self.weights, self.activations)

    @property
    def taught(self) -> bool:
        """Whether the best of the rates is tried with the loss of the float network, too."""
        return self.task.taught and min(self.weights, self.activations) < 8 and not self.untrained

    def tuned(self, model: torch.nn.Module, rate: float, taught: bool = False) -> None:
        """Trains a fake-quantized network with the task's loss; `taught`: with half of it, and half of `teacher`'s."""
        tutor = teacher(self.task, self.held, self.model, self.parts) if taught else None
        epochs = 2 if self.quick else self.task.qat_epochs
        torch.manual_seed(self.seed)
        fit(self.task, model, *self.parts[0], epochs, rate, warm_up=True, teacher=tutor)

    def score(self, outputs: np.ndarray) -> tuple[float, float]:
        """Of outputs on the validation examples, as `networks.judged` has it."""
        return judged(self.task, outputs, self.parts[1][1])

    def resettled(self, model: torch.nn.Module) -> torch.nn.Module | None:
        """See `networks.resettled`."""
        return resettled(self.task, model, self.parts[0][0])


@dataclass
class Offer:
    """What a method of a peer gives; None: it does not."""

    method: str
    predicted: Computes | None
    runtime: Computes | None


def session(path: str | Path, optimized: bool) -> Computes:
    """An ONNX file in ONNX Runtime: operator by operator in float with fake quantization, or as it is run: in integers.

    Args:
        optimized: whether its graph is fused to integer kernels.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    model = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = model.get_inputs()[0].name
    return lambda x: np.concatenate([model.run(None, {name: part})[0] for part in np.array_split(x, -(-len(x) // 250))])


def of_module(model: Callable[[torch.Tensor], torch.Tensor]) -> Computes:
    return lambda x: outputs_of(model, x)


def main(offers: Callable[[Case], Sequence[Offer]]) -> None:
    """Runs an adapter."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="+", metavar="FOLDER,PRECISION,SEED,OUT")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--untrained", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for words in options.cases:
        folder, precision, seed, out = words.split(",")
        arrays: dict[str, Any] = {}
        try:
            arrays = _answered(offers, Path(folder), precision, int(seed), options)
        except NotOffered as why:
            arrays["not offered"] = str(why)
        except Exception as error:  # noqa: BLE001 - what a peer cannot do is a result
            arrays["fails"] = f"{type(error).__name__}: {error}"[:500]
        np.savez(f"{out}.part.npz", **arrays)
        os.replace(f"{out}.part.npz", out)


def _answered(
    offers: Callable[[Case], Sequence[Offer]], folder: Path, precision: str, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    torch.manual_seed(0)
    name = json.loads((folder / "task.json").read_text())["name"]
    with np.load(folder / "data.npz") as held:
        parts = [(held[f"x{at}"], held[f"y{at}"]) for at in range(3)]
    weights = torch.load(folder / "weights.pt", weights_only=True)
    bits = [int(digits) for digits in precision.removeprefix("w").split("a")]
    model = restored(name, weights, parts[0][0])
    arrays: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        left_out = options.quick, seed, options.untrained
        case = Case(name, TASKS[name], model, parts, bits[0], bits[1], Path(place), *left_out, held=folder)
        for offer in offers(case):
            for how, computes in (("predicted", offer.predicted), ("runtime", offer.runtime)):
                for at, part in ((1, "validation"), (2, "test")) if computes is not None else ():
                    assert computes is not None
                    arrays[f"{offer.method}/{how}/{part}"] = np.asarray(computes(parts[at][0]), np.float32)
    return arrays


__all__ = ["Case", "Computes", "NotOffered", "Offer", "main", "of_module", "session"]
