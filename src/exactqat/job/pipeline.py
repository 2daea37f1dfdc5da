# SPDX-License-Identifier: Apache-2.0
"""The job from data to proof: train in float, quantize in every way, deploy, compare all integers, deliver."""

from __future__ import annotations

import json
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import qat
from ..deploy.graph import Graph
from ..deploy.lower import device_codes, lower
from ..deploy.simulate import quantize, simulate
from ..deploy.tflite import write_tflite
from ..deploy.verify import Report, verify
from . import training
from .data import Dataset, load
from .models import SmallMobileNet

# Directory name, bits of weights, bits of activations.
PRECISIONS = {"w8a8": (8, 8), "w4a4": (4, 4)}
CHECKPOINT_FORMAT = 1
# Quantization-aware trainings start from the calibrated float network; this many images at a time are shown to it.
CALIBRATION_BATCH = 256


@dataclass(frozen=True)
class Method:
    """One way to quantize: with training or without, and where activation ranges come from."""

    name: str
    title: str
    ranges: str
    trained: bool


METHODS = (
    Method("ptq_min_max", "PTQ, min/max ranges", "min_max", trained=False),
    Method("ptq_least_error", "PTQ, least-error ranges", "learned", trained=False),
    Method("qat_ema", "QAT, EMA ranges", "ema", trained=True),
    Method("qat_learned", "QAT, learned ranges", "learned", trained=True),
)


@dataclass(frozen=True)
class Settings:
    """What the user decides.

    Raises:
        ValueError: an epoch count below 1, or a negative seed.
    """

    out: Path
    seed: int = 0
    epochs_float: int = 80
    epochs_qat: int = 80
    data: str = "digits"

    def __post_init__(self) -> None:
        for name in ("epochs_float", "epochs_qat"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")


@dataclass
class Outcome:
    """One quantized network and what was found out about it.

    fake_quant_differing / fake_quant_values: codes of stored tensors where the trained PyTorch model, which computes in
        float,
    differs from the integers, and how many were compared.
    """

    method: Method
    precision: str
    model: qat.PreparedModel
    rules: list[qat.Rule]
    graph: Graph
    history: training.History | None
    validation_accuracy: float
    validation_loss: float
    test_accuracy: float
    device_accuracy: float = 0.0
    device_predictions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    file_bytes: int = 0
    report: Report | None = None
    fake_quant_differing: int = 0
    fake_quant_values: int = 0


@dataclass
class Results:
    """Everything the report and the table tell."""

    settings: Settings
    dataset: Dataset
    float_model: nn.Module
    float_history: training.History
    float_validation_accuracy: float
    float_test_accuracy: float
    float_bytes: int
    outcomes: list[Outcome]
    seconds: float = 0.0

    def of(self, precision: str) -> list[Outcome]:
        """The outcomes of one precision, in the order of METHODS."""
        return [outcome for outcome in self.outcomes if outcome.precision == precision]

    def chosen(self, precision: str) -> Outcome:
        """The trained network that is delivered: the lower validation loss of the two kinds of ranges."""
        return min((o for o in self.of(precision) if o.method.trained), key=lambda outcome: outcome.validation_loss)

    @property
    def values_compared(self) -> int:
        """Integers compared between simulation and runtime, over all networks."""
        return sum(outcome.report.values for outcome in self.outcomes if outcome.report)

    @property
    def values_differing(self) -> int:
        """How many of them differ."""
        return sum(outcome.report.differing for outcome in self.outcomes if outcome.report)


@dataclass(frozen=True)
class Progress:
    """How the job tells what it does. begin(text): a new piece of work; advance(): one training step is done."""

    begin: Callable[[str], None] = lambda text: None
    advance: Callable[[], None] = lambda: None


def total_steps(settings: Settings, dataset: Dataset) -> int:
    """Training steps of the whole job, for the time left."""
    trainings = len(PRECISIONS) * sum(method.trained for method in METHODS)
    return training.steps_per_epoch(dataset.train) * (settings.epochs_float + trainings * settings.epochs_qat)


def make_rules(precision: str, ranges: str, value_range: tuple[float, float]) -> list[qat.Rule]:
    """Input and logits stay at 8 bits: the input is the data itself, and the logits' order is the answer."""
    weight_bits, activation_bits = PRECISIONS[precision]
    return [
        qat.Rule("input", ranges="fixed", fixed_range=value_range),
        qat.Rule("classifier", weight_bits=weight_bits, activation_bits=8, ranges=ranges),
        qat.Rule("*", weight_bits=weight_bits, activation_bits=activation_bits, ranges=ranges),
    ]


def new_model(dataset: Dataset) -> nn.Module:
    """The untrained network for a data set, in the memory format that the operators take without a copy."""
    channels = dataset.train.images.shape[1]
    model = SmallMobileNet(channels, len(dataset.class_names))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def run(settings: Settings, progress: Progress | None = None) -> Results:
    """The whole job except the report. Writes the checkpoints and .tflite files under `settings.out`."""
    progress = progress or Progress()
    started = time.perf_counter()
    dataset = load(settings.data)
    results = _float_network(settings, dataset, progress)
    for precision in PRECISIONS:
        for method in METHODS:
            progress.begin(f"{precision.upper()} {method.title}")
            results.outcomes.append(
                _quantized_network(settings, dataset, results.float_model, precision, method, progress)
            )
        progress.begin(f"{precision.upper()} on the runtime, every integer compared")
        for outcome in results.of(precision):
            with tempfile.TemporaryDirectory() as scratch:
                _deploy(outcome, dataset, Path(scratch) / "model.tflite")
        _deliver(results, precision)
    results.seconds = time.perf_counter() - started
    return results


def _float_network(settings: Settings, dataset: Dataset, progress: Progress) -> Results:
    progress.begin("float training")
    torch.manual_seed(settings.seed)
    model = new_model(dataset)
    path = settings.out / "float" / "checkpoint.pt"

    def describe() -> dict[str, Any]:
        return {"format": CHECKPOINT_FORMAT, "data": dataset.name, "seed": settings.seed, "state": model.state_dict()}

    history = training.train(
        model,
        [{"params": list(model.parameters()), "lr": training.FLOAT_LEARNING_RATE}],
        dataset.train,
        dataset.validation,
        settings.epochs_float,
        settings.seed,
        "float training",
        progress.advance,
        path,
        describe,
    )
    return Results(
        settings,
        dataset,
        model,
        history,
        training.accuracy(model, dataset.validation),
        training.accuracy(model, dataset.test),
        4 * sum(parameter.numel() for parameter in model.parameters()),
        [],
    )


def _quantized_network(
    settings: Settings, dataset: Dataset, float_model: nn.Module, precision: str, method: Method, progress: Progress
) -> Outcome:
    rules = make_rules(precision, method.ranges, dataset.value_range)
    example = dataset.train.images[:2]
    model = qat.prepare(float_model, example, rules)
    qat.calibrate(model, dataset.train.images.split(CALIBRATION_BATCH))
    history = None
    if method.trained:
        history = training.train(
            model,
            [
                {"params": model.other_parameters(), "lr": training.QAT_LEARNING_RATE},
                {"params": model.range_parameters(), "lr": training.RANGE_LEARNING_RATE},
            ],
            dataset.train,
            dataset.validation,
            settings.epochs_qat,
            settings.seed,
            f"{precision.upper()} {method.title}",
            progress.advance,
            settings.out / precision / f"{method.name}.pt",
            lambda: describe_checkpoint(settings, dataset, precision, method, rules, model),
            freeze_at=settings.epochs_qat - training.frozen_epochs(settings.epochs_qat),
        )
    else:
        qat.freeze(model)
    validation_accuracy, validation_loss = training.accuracy_and_loss(model, dataset.validation)
    return Outcome(
        method,
        precision,
        model,
        rules,
        lower(model, example),
        history,
        validation_accuracy,
        validation_loss,
        training.accuracy(model, dataset.test),
    )


def describe_checkpoint(
    settings: Settings,
    dataset: Dataset,
    precision: str,
    method: Method,
    rules: list[qat.Rule],
    model: qat.PreparedModel,
) -> dict[str, Any]:
    """A checkpoint's content; `restore` is its counterpart."""
    return {
        "format": CHECKPOINT_FORMAT,
        "data": dataset.name,
        "precision": precision,
        "method": method.name,
        "seed": settings.seed,
        "rules": [asdict(rule) for rule in rules],
        "state": model.state_dict(),
    }


def restore(path: Path) -> tuple[qat.PreparedModel, Dataset, dict[str, Any]]:
    """The network of a checkpoint, its data, and the checkpoint.

    Raises:
        ValueError: the file has another format.
    """
    checkpoint = torch.load(path, weights_only=True)
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != CHECKPOINT_FORMAT or "rules" not in checkpoint:
        raise ValueError(f"{path} is no checkpoint of a quantized network (format {CHECKPOINT_FORMAT})")
    dataset = load(checkpoint["data"])
    rules = [qat.Rule(**rule) for rule in checkpoint["rules"]]
    model = qat.prepare(new_model(dataset), dataset.train.images[:2], rules)
    model.load_state_dict(checkpoint["state"])
    model.eval()
    return model, dataset, checkpoint


def _deploy(outcome: Outcome, dataset: Dataset, path: Path) -> None:
    """Writes the network, runs it on all test images and compares all integers."""
    graph = outcome.graph
    write_tflite(graph, path, f"{outcome.precision} {outcome.method.name}")
    outcome.file_bytes = path.stat().st_size
    codes = input_codes(graph, dataset)
    outcome.report = verify(graph, path, codes)
    outcome.device_predictions = run_on_device(graph, path, codes).argmax(1)
    outcome.device_accuracy = float((outcome.device_predictions == dataset.test.labels.numpy()).mean())
    stored = outcome.model.stored_tensors(dataset.test.images)
    integers = simulate(graph, codes, tensors=list(stored))
    for name, (quantizer, values) in stored.items():
        trained = device_codes(quantizer, values, graph.tensors[name].quantization)
        outcome.fake_quant_values += trained.size
        outcome.fake_quant_differing += int(np.count_nonzero(trained != integers[name]))


def input_codes(graph: Graph, dataset: Dataset) -> np.ndarray:
    """All test images as the device takes them, int8 [n, height, width, channels]."""
    images = dataset.test.images.numpy().transpose(0, 2, 3, 1)
    return quantize(images, graph.tensors[graph.inputs[0]].quantization)


def run_on_device(graph: Graph, path: Path, codes: np.ndarray) -> np.ndarray:
    """The plain file on the runtime: int8 codes of the logits, [n, classes]."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(path), num_threads=1)
    (entry,), (exit_,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.resize_tensor_input(entry["index"], codes.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(entry["index"], codes)
    interpreter.invoke()
    return np.asarray(interpreter.get_tensor(exit_["index"]))


def _deliver(results: Results, precision: str) -> None:
    """Puts the better network of a precision at its place: checkpoint.pt and model.tflite."""
    outcome = results.chosen(precision)
    folder = results.settings.out / precision
    checkpoint = describe_checkpoint(
        results.settings, results.dataset, precision, outcome.method, outcome.rules, outcome.model
    )
    training.save_checkpoint(folder / "checkpoint.pt", checkpoint)
    write_tflite(outcome.graph, folder / "model.tflite", f"{precision} {outcome.method.name}")
    for method in METHODS:
        (folder / f"{method.name}.pt").unlink(missing_ok=True)


def verify_directory(out: Path, progress: Progress | None = None) -> dict[str, Report]:
    """Runs the delivered files again and compares them with the simulation of the networks in the checkpoints.

    Raises:
        FileNotFoundError: the directory holds no delivered network.
    """
    progress = progress or Progress()
    reports = {}
    for precision in PRECISIONS:
        checkpoint, file = out / precision / "checkpoint.pt", out / precision / "model.tflite"
        if not checkpoint.exists() or not file.exists():
            continue
        progress.begin(f"{precision.upper()} on the runtime")
        model, dataset, _ = restore(checkpoint)
        graph = lower(model, dataset.test.images[:2])
        reports[precision] = verify(graph, file, input_codes(graph, dataset))
    if not reports:
        folders = " or ".join(str(out / precision) for precision in PRECISIONS)
        raise FileNotFoundError(
            f"no checkpoint.pt with a model.tflite beside it in {folders}; run `exactqat train` first"
        )
    return reports


def metrics(results: Results) -> dict[str, Any]:
    """What DIR/metrics.json holds."""
    dataset, settings = results.dataset, results.settings
    return {
        "data": {
            "name": dataset.name,
            "train": len(dataset.train),
            "validation": len(dataset.validation),
            "test": len(dataset.test),
        },
        "settings": {
            "seed": settings.seed,
            "epochs_float": settings.epochs_float,
            "epochs_qat": settings.epochs_qat,
        },
        "seconds": round(results.seconds, 2),
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "numpy", "ai-edge-litert")},
        },
        "float": {
            "validation_accuracy": results.float_validation_accuracy,
            "test_accuracy": results.float_test_accuracy,
            "parameter_bytes": results.float_bytes,
            "history": asdict(results.float_history),
        },
        "networks": {
            precision: {
                "chosen": results.chosen(precision).method.name,
                **{outcome.method.name: _outcome_metrics(outcome) for outcome in results.of(precision)},
            }
            for precision in PRECISIONS
        },
        "values_compared": results.values_compared,
        "values_differing": results.values_differing,
    }


def _outcome_metrics(outcome: Outcome) -> dict[str, Any]:
    assert outcome.report is not None
    return {
        "title": outcome.method.title,
        "validation_accuracy": outcome.validation_accuracy,
        "validation_loss": outcome.validation_loss,
        "test_accuracy": outcome.test_accuracy,
        "device_accuracy": outcome.device_accuracy,
        "file_bytes": outcome.file_bytes,
        "values_compared": outcome.report.values,
        "values_differing": outcome.report.differing,
        "fake_quant_values": outcome.fake_quant_values,
        "fake_quant_differing": outcome.fake_quant_differing,
        "layers": outcome.report.table(),
        "history": asdict(outcome.history) if outcome.history else None,
    }


def write_metrics(results: Results) -> Path:
    """Writes DIR/metrics.json and gives its path."""
    path = results.settings.out / "metrics.json"
    training.write_atomically(path, (json.dumps(metrics(results), indent=2) + "\n").encode())
    return path
