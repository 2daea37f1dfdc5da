# SPDX-License-Identifier: Apache-2.0
"""The job from data to verified files: train in float, quantize in every way, deploy, compare all integers, deliver."""

from __future__ import annotations

import glob
import tempfile
import time
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from .. import qat, tune
from ..deploy.footprint import footprint
from ..deploy.formats.tflite import tflite_bytes, write_tflite
from ..deploy.lower import lower, lower_with_layouts
from ..deploy.runtimes import profile_here
from ..deploy.values import layer_values
from ..deploy.verify import verify
from ..device import PROFILES, Refusal
from ..device.profile import DEFAULT_KERNELS
from ..report.results import Dataset, Method, Outcome, Results, Split
from . import checkpoints, files, retrained, training
from .beside import LAYER_IMAGES, about, beside_training, input_codes, run_on_device, runs_here, users_own
from .data import load
from .models import builder, new_model
from .processes import ALONE, Processes
from .progress import Progress
from .restored import describe_checkpoint, describe_network
from .settings import Settings
from .store import float_state, read_job, start, stored_settings, unfinished
from .weights import Fit, check, put

# Quantization-aware trainings start from the calibrated float network; this many images at a time are shown to it.
CALIBRATION_BATCH = 256
# Training images on which a search tries what it finds, and how many networks it evaluates at most.
SEARCH_IMAGES, SEARCH_BUDGET = 1024, 200
# Test images on which delivered networks are compared with what every other device computes.
ELSEWHERE_IMAGES = 512


def total_steps(settings: Settings, dataset: Dataset) -> int:
    """Training steps of the whole job, for the time left."""
    trainings = sum(method.trained for method in settings.methods)
    epochs = settings.epochs_float + trainings * sum(map(settings.epochs_of, settings.precisions.values()))
    return training.steps_per_epoch(dataset.train, settings.batch_size) * epochs


def make_rules(
    bits: tuple[int, int], ranges: qat.RangePolicy, value_range: tuple[float, float], last: str
) -> list[qat.Rule]:
    """Input and logits stay at 8 bits: the input is the data itself, and the logits' order is the answer.

    Args:
        bits: of weights and activations.
        last: path of the layer that stores the logits.
    """
    weight_bits, activation_bits = bits
    return [
        qat.Rule("input", ranges="fixed", fixed_range=value_range),
        qat.Rule(glob.escape(last), weight_bits=weight_bits, activation_bits=8, ranges=ranges),
        qat.Rule("*", weight_bits=weight_bits, activation_bits=activation_bits, ranges=ranges),
    ]


def last_layer(model: nn.Module, example: Tensor) -> str:
    """The path of the layer that stores the logits.

    Raises:
        qat.UnsupportedOperator: the device cannot run the network; better known before training than after.
    """
    return list(qat.prepare(model, example, keep_final_activation=False).layers())[-1][0]


def run(
    settings: Settings,
    progress: Progress | None = None,
    dataset: Dataset | None = None,
    processes: Processes = ALONE,
    resume: bool = False,
    restart: bool = False,
    accelerator: torch.device = training.CPU,
    hold: ExitStack | None = None,
) -> Results:
    """The whole job except metrics.json and the report. Writes checkpoints and .tflite files under `settings.out`.

    Args:
        dataset: instead of what `settings.data` names, such as from `data.from_pairs`.
        processes: those that work on the job together; all but the first only train.
        resume, restart: see `start`.
        accelerator: where networks train; everything else, ranges and the device's integers included, is the CPU's.
        hold: takes the lock on the directory, for a caller who goes on writing there; by default it ends with the call.

    Raises:
        ValueError: several processes on a GPU; another process is at work in the directory.
    """
    if accelerator.type != "cpu" and processes.count > 1:
        raise ValueError(
            f"--accelerator {accelerator}: several processes can only train on the CPU; omit torchrun or --accelerator"
        )
    progress = progress or Progress()
    check_before_data(settings, resume)
    dataset = dataset or load(settings.data, settings.image_size)
    # Before anything is written: whether there is such a network, and whether the device can run it.
    untrained = _untrained(settings, dataset)
    fit = None
    if settings.weights is not None and not (resume and float_state(settings).exists()):
        fit = put(untrained, Path(settings.weights))
    with ExitStack() as own:

        def begin() -> bool:
            try:
                settings.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise files.cannot_write(settings.out / "job.json", error) from error
            (own if hold is None else hold).enter_context(files.locked(settings.out))
            continued = start(settings, dataset, resume, restart, progress.say, fit)
            if settings.from_job is not None:
                retrained.take_over(Path(settings.from_job), settings.out, settings.trainings)
            return continued

        resumed = processes.first_does(begin)
        if settings.weights is not None:
            if fit is None:
                *_, fit = read_job(settings.out)
            else:
                for sentence in fit.sentences(settings.weights):
                    progress.say(sentence)
        return _run(settings, progress, dataset, untrained, processes, resumed, accelerator, fit)


def check_before_data(settings: Settings, resume: bool = False) -> None:
    """Refuses what can be known to be wrong before all images are read: a network that is not there, weights that
    cannot be read.

    Raises:
        FileNotFoundError, ValueError: see `models.builder` and `weights.check`.
    """
    builder(settings.model)
    if settings.weights is not None and not (resume and float_state(settings).exists()):
        check(Path(settings.weights))


def _run(
    settings: Settings,
    progress: Progress,
    dataset: Dataset,
    untrained: nn.Module,
    processes: Processes,
    resumed: bool,
    accelerator: torch.device,
    fit: Fit | None,
) -> Results:
    started = time.perf_counter()
    results = _float_network(settings, dataset, untrained, progress, processes, resumed, accelerator)
    results.fit = fit
    last = last_layer(results.float_model, dataset.train.images[:2])
    for precision in settings.precisions:
        for method in settings.methods:
            progress.begin(f"{precision.upper()} {method.title}")
            if method.trained or processes.writes:
                results.outcomes.append(
                    _quantized_network(settings, results, last, precision, method, progress, processes, accelerator)
                )
        if not processes.writes:
            continue
        progress.begin(f"{precision.upper()} on the runtime, every integer compared")
        for outcome in results.of(precision):
            with tempfile.TemporaryDirectory() as scratch:
                _deploy(outcome, dataset, Path(scratch) / "model.tflite")
        _deliver(settings, results, precision)
    results.seconds = time.perf_counter() - started
    return results


def finished(
    out: Path,
    progress: Progress | None = None,
    dataset: Dataset | None = None,
    model: str | None = None,
    hold: ExitStack | None = None,
) -> Results:
    """The results of the finished job in a directory: its networks are loaded, evaluated and compared again.

    Args:
        model: see `stored_settings`.
        hold: see `run`.

    Raises:
        ValueError, FileNotFoundError: there is no job, or an unfinished one.
    """
    settings = stored_settings(out, model)
    if unfinished(out):
        raise ValueError(unfinished(out))
    metrics = files.read_json(out / "metrics.json")
    seconds, resumed = metrics.get("seconds"), metrics.get("resumed")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not isinstance(resumed, bool):
        raise ValueError(f"{out / 'metrics.json'} must contain seconds (a number) and resumed (true or false)")
    for name in ("float", *settings.trainings):
        path = out / "training" / f"{name}.pt"
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing; without it the report cannot be written again")
        if not training.finished(path):
            raise ValueError(f"{path} belongs to an unfinished training, in a job that is marked finished")
    results = run(settings, progress, dataset, resume=True, hold=hold)
    results.seconds, results.resumed = seconds, resumed
    return results


def _untrained(settings: Settings, dataset: Dataset) -> nn.Module:
    torch.manual_seed(settings.seed)
    model = new_model(settings.model, dataset.train.images.shape[1:], len(dataset.class_names))
    try:
        last_layer(model, dataset.train.images[:2])
    except RuntimeError as error:
        shape = list(dataset.train.images.shape[1:])
        raise ValueError(f"model {settings.model} does not fit images of shape {shape}: {error}") from error
    return model


def _float_network(
    settings: Settings,
    dataset: Dataset,
    model: nn.Module,
    progress: Progress,
    processes: Processes,
    resumed: bool,
    accelerator: torch.device,
) -> Results:
    progress.begin("float training")
    rate = training.FLOAT_LEARNING_RATE if settings.weights is None else training.GIVEN_WEIGHTS_LEARNING_RATE
    history = training.train(
        model,
        [{"params": list(model.parameters()), "lr": rate}],
        dataset.train,
        dataset.validation,
        settings.epochs_float,
        settings.seed,
        "float training",
        progress.advance,
        float_state(settings),
        settings.batch_size,
        processes=processes,
        # Of a job that trains another's networks on, the finished training was copied.
        resume=resumed or settings.from_job is not None,
        accelerator=accelerator,
        on_epoch=lambda history: progress.epoch("float training", history, settings.epochs_float),
    )
    if processes.writes:
        description = describe_network(settings, dataset) | {"state": model.state_dict()}
        checkpoints.save_checkpoint(settings.out / "float" / "checkpoint.pt", description)
    return Results(
        settings,
        dataset,
        model,
        history,
        training.accuracy(model, dataset.validation) if processes.writes else 0.0,
        training.accuracy(model, dataset.test) if processes.writes else 0.0,
        4 * sum(parameter.numel() for parameter in model.parameters()),
        [],
        resumed=resumed,
        formerly=retrained.formerly(settings.out) if settings.from_job is not None else "",
        float_predictions=training.predictions(model, dataset.test).numpy()
        if processes.writes
        else np.zeros(0, np.int64),
    )


def _quantized_network(
    settings: Settings,
    results: Results,
    last: str,
    precision: str,
    method: Method,
    progress: Progress,
    processes: Processes,
    accelerator: torch.device,
) -> Outcome:
    dataset = results.dataset
    example = dataset.train.images[:2]
    bits = settings.precisions[precision]
    rules = make_rules(bits, method.ranges, dataset.value_range, last)
    # That the captured network is the user's was checked before anything was trained.
    model = qat.prepare(
        results.float_model, example, rules, device=settings.device, check=False, keep_final_activation=False
    )
    title, name = f"{precision.upper()} {method.title}", f"{precision}-{method.name}"
    trained_on = settings.from_job is not None and method.trained
    if trained_on:
        start = retrained.taken_over([name])[f"{name}.pt"]
        retrained.begin_with(model, settings.out / "training" / start, settings.device)
    else:
        # In each process over all images: the ranges are then the same bits everywhere.
        qat.calibrate(model, dataset.train.images.split(CALIBRATION_BATCH))
        training.check_ranges(model, f"{title}, after calibration")
    history = None
    if method.trained:
        epochs = settings.epochs_of(bits)
        fine = min(bits) >= 8 or trained_on
        rate = training.FINE_TUNING_LEARNING_RATE if fine else training.QAT_LEARNING_RATE
        history = training.train(
            model,
            [
                {"params": model.other_parameters(), "lr": rate},
                {"params": model.range_parameters(), "lr": training.RANGE_LEARNING_RATE},
            ],
            dataset.train,
            dataset.validation,
            epochs,
            settings.seed,
            title,
            progress.advance,
            settings.out / "training" / f"{name}.pt",
            settings.batch_size,
            0 if trained_on else epochs - training.frozen_epochs(epochs),
            processes,
            results.resumed,
            accelerator,
            lambda history: progress.epoch(title, history, epochs),
        )
    else:
        if method.searched:
            _search(model, dataset, settings)
        qat.freeze(model)
    validation_accuracy, validation_loss = training.accuracy_and_loss(model, dataset.validation)
    return Outcome(
        method,
        precision,
        model,
        rules,
        lower(model),
        history,
        validation_accuracy,
        validation_loss,
        training.accuracy(model, dataset.test),
    )


def _search(model: qat.PreparedModel, dataset: Dataset, settings: Settings) -> None:
    """Gives a calibrated network what a search finds on training images; the validation images judge it afterwards."""
    order = np.random.default_rng(settings.seed).permutation(len(dataset.train))[:SEARCH_IMAGES]
    part = dataset.train.images[order].numpy(), dataset.train.labels[order].numpy()
    tune.search(model, part, seed=settings.seed, budget=SEARCH_BUDGET, progress=False).apply(model)


def _deploy(outcome: Outcome, dataset: Dataset, path: Path) -> None:
    """Writes the network, runs it on all test images and compares all integers."""
    graph = outcome.graph
    write_tflite(graph, path, f"{outcome.precision} {outcome.method.name}")
    content = path.read_bytes()
    outcome.file_bytes, outcome.compressed_bytes = len(content), len(zlib.compress(content, 9))
    codes = input_codes(graph, dataset)
    lowered = lower_with_layouts(outcome.model)
    float_values, trained_values = layer_values(outcome.model, dataset.test.images[:LAYER_IMAGES], lowered=lowered)
    device = cast(str, outcome.model.profile)
    ran = verify(
        graph, path, codes, runs_here(device), float_values=float_values, trained_values=trained_values,
        trained_codes={}, **users_own(outcome.model, dataset, runs_here(device)),
    )  # fmt: skip
    beside = beside_training(outcome.model, graph, dataset.test, codes, [device], lowered)[device]
    outcome.report = about(ran, device, beside)
    outcome.device_predictions = beside.device_answers
    if device == profile_here(DEFAULT_KERNELS):
        outcome.device_predictions = run_on_device(graph, path, codes).argmax(1)
    outcome.device_accuracy = float((outcome.device_predictions == dataset.test.labels.numpy()).mean())


def _deliver(settings: Settings, results: Results, precision: str) -> None:
    """Puts the better network of a precision at its place: checkpoint.pt and model.tflite. Then every device is
    compared with its training."""
    outcome = results.chosen(precision)
    checkpoint = describe_checkpoint(settings, results.dataset, outcome)
    folder = results.settings.out / precision
    checkpoints.save_checkpoint(folder / "checkpoint.pt", checkpoint)
    content = tflite_bytes(outcome.graph, f"{precision} {outcome.method.name}")
    outcome.footprint = footprint(outcome.graph, content)
    files.write_atomically(folder / "model.tflite", content)
    test = results.dataset.test
    part = Split(test.images[:ELSEWHERE_IMAGES], test.labels[:ELSEWHERE_IMAGES])
    codes = input_codes(outcome.graph, results.dataset)[:ELSEWHERE_IMAGES]
    for device in PROFILES:
        try:
            outcome.elsewhere |= beside_training(outcome.model, outcome.graph, part, codes, [device])
        except Refusal as error:
            outcome.elsewhere[device] = str(error)
