# SPDX-License-Identifier: Apache-2.0
"""The job from data to verified files: train in float, quantize in every way, deploy, compare all integers, deliver."""

from __future__ import annotations

import functools
import tempfile
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ... import qat, tune
from ...deploy.footprint import footprint
from ...deploy.formats.tflite import tflite_bytes, write_tflite
from ...deploy.lower import lower, lower_with_layouts
from ...deploy.runtimes import profile_here
from ...deploy.values import layer_values
from ...deploy.verify import verify
from ...kit.device import Refusal
from ...kit.device.profile import DEFAULT_KERNELS, that_run
from ...kit.train.torch.prepare import prepare_again
from ..report import findings
from ..report.results import Dataset, History, Method, Outcome, Results, Split
from . import checkpoints, data, files, recipes, retrained, training
from .beside import LAYER_IMAGES, about, beside_training, input_codes, run_on_device, runs_here, users_own
from .judges import Judge
from .logs import Logs, check_tensorboard
from .manner import Manner, class_weights_of, float_manner, float_rate, manner_of, quantized_groups, quantized_manner
from .models import check_name
from .planned import last_layer, make_rules, untrained_network
from .processes import ALONE, Processes
from .progress import Progress
from .restored import describe_checkpoint, describe_network
from .settings import SEARCHED, Settings
from .store import float_state, quantized_before, read_job, start, stored_settings, unfinished
from .weights import Fit, check, put, training_what_is_new

# Quantization-aware training starts from the calibrated float network, which is shown this many images at a time.
CALIBRATION_BATCH = 256
# Training images on which a search tries what it finds, and the most networks it evaluates.
SEARCH_IMAGES, SEARCH_BUDGET = 1024, 200
# Test images on which delivered networks are compared with what every other device computes.
ELSEWHERE_IMAGES = 512


def total_steps(settings: Settings, dataset: Dataset) -> int:
    """Training steps of the whole job, for the time left."""
    trainings = sum(method.trained for method in settings.methods)
    epochs = settings.epochs_float + trainings * sum(map(settings.epochs_of, settings.precisions.values()))
    return training.steps_per_epoch(dataset.train, settings.batch_size) * epochs


def run(
    settings: Settings,
    progress: Progress | None = None,
    dataset: Dataset | None = None,
    processes: Processes = ALONE,
    resume: bool = False,
    restart: bool = False,
    accelerator: torch.device = training.CPU,
    hold: ExitStack | None = None,
    keep_going: bool = False,
    tensorboard: bool = False,
) -> Results:
    """The whole job except metrics.json and the report. Writes checkpoints and .tflite files under `settings.out`.

    Args:
        dataset: instead of what `settings.data` names, such as from `data.from_pairs`.
        processes: those that work on the job together; all but the first only train.
        resume, restart: see `start`.
        accelerator: where networks train; everything else, including ranges and the device's integers, runs on the CPU.
        hold: takes the lock on the directory, for a caller that continues writing there; by default it ends with the
            call.
        keep_going: quantize even a float network that is no better than guessing.
        tensorboard: also write TensorBoard's files.

    Raises:
        NothingLearned: the float network is no better than guessing.
        ValueError: another process is at work in the directory.
    """
    progress = progress or Progress()
    check_before_data(settings, resume)
    if tensorboard:
        check_tensorboard()
    dataset = dataset or load_for(settings)
    check_data(settings, dataset, progress.say)
    # Before anything is written: whether there is such a network, and whether the device can run it.
    untrained, last = untrained_network(settings, dataset)
    fit = None
    if settings.weights is not None and not (resume and float_state(settings).exists()):
        fit = put(untrained, Path(settings.weights))
    ended = False
    with ExitStack() as own:

        def begin() -> bool:
            try:
                settings.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise files.cannot_write(settings.out / "job.json", error) from error
            (own if hold is None else hold).enter_context(files.locked(settings.out))
            nonlocal ended
            continued = start(settings, dataset, resume, restart, progress.say, fit)
            ended = continued and (settings.out / "metrics.json").exists()
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
        # A finished job is only evaluated again.
        logs = Logs(settings.out, tensorboard, not ended, processes.count) if processes.writes else None
        if logs is not None and not ended and logs.processes_before not in (None, processes.count):
            progress.say(
                f"The job was trained by {logs.processes_before} processes and goes on with {processes.count}: its "
                "bits will not be those of an uninterrupted job, as sums are added in another order"
            )
        work = Work(settings, dataset, progress, processes, resumed, accelerator, manner_of(settings, dataset), logs)
        return _run(work, untrained, last, fit, keep_going or ended)


def load_for(settings: Settings) -> Dataset:
    """The data of a job."""
    dataset = data.load(settings.data, settings.image_size, settings.split, settings.reconstructs)
    return replace(dataset, noun=settings.noun)


def check_data(settings: Settings, dataset: Dataset, say: Callable[[str], None]) -> None:
    """Refuses data that does not fit the settings.

    Raises:
        ValueError: classes and weights do not match, or the recipe is for other data.
    """
    class_weights_of(settings.class_weights, dataset)
    if settings.recipe is not None:
        for sentence in recipes.check_data(settings.recipe, dataset):
            say(sentence)


def check_before_data(settings: Settings, resume: bool = False) -> None:
    """Refuses what is known to be wrong before all images are read: a missing network, unreadable weights.

    Raises:
        FileNotFoundError, ValueError: see `models.check_name` and `weights.check`.
    """
    check_name(settings.model)
    if settings.weights is not None and not (resume and float_state(settings).exists()):
        check(Path(settings.weights))


@dataclass(frozen=True)
class Work:
    """What all steps of a job need.

    Attributes:
        resumed: whether an interrupted job continues.
        manner: how its training runs go.
        logs: None in processes that do not write.
    """

    settings: Settings
    dataset: Dataset
    progress: Progress
    processes: Processes
    resumed: bool
    accelerator: torch.device
    manner: Manner
    logs: Logs | None

    def train(
        self,
        model: nn.Module,
        groups: list[dict[str, Any]],
        epochs: int,
        title: str,
        name: str,
        manner: Manner,
        freeze_at: int | None = None,
        resume: bool = False,
    ) -> History:
        """Trains a network; see `training.train`.

        Args:
            title: of the training, for users; name: of its files.
        """
        settings = self.settings

        def on_epoch(history: History) -> None:
            if self.logs is not None and history.loss:
                self.logs.epoch(name, history)
            self.progress.epoch(title, history, epochs)

        history = training.train(
            model, groups, self.dataset.train, self.dataset.validation, epochs, settings.seed, title,
            self.progress.advance, settings.out / "training" / f"{name}.pt", settings.batch_size, freeze_at,
            self.processes, self.resumed or resume, self.accelerator, on_epoch, manner, self.progress.skip,
        )  # fmt: skip
        if len(history.loss) < epochs:
            self.progress.say(
                f"{title}: ended after epoch {len(history.loss)} of {epochs}, as the validation loss has not fallen "
                f"for {settings.early_stopping}"
            )
        return history


def _run(work: Work, untrained: nn.Module, last: str, fit: Fit | None, keep_going: bool) -> Results:
    settings, dataset, progress = work.settings, work.dataset, work.progress
    results = _float_network(work, untrained, last, fit)
    results.fit = fit
    if not keep_going:
        # If a run continued past this before, it has answered the question.
        work.processes.first_does(lambda: None if quantized_before(settings) else check_learned(results))
    # The captured network was compared with the user's before any training.
    prepared = qat.prepare(results.float_model, dataset.train.images[:2], check=False, keep_final_activation=False)
    for precision in settings.precisions:
        searched = functools.cache(functools.partial(_search, work, prepared, precision))
        for method in settings.methods:
            progress.begin(f"{precision.upper()} {method.title}")
            if method.trained or work.processes.writes:
                results.outcomes.append(_quantized_network(work, results, prepared, precision, method, searched))
        if not work.processes.writes:
            continue
        progress.begin(f"{precision.upper()} on the runtime, every integer compared")
        for outcome in results.of(precision):
            with tempfile.TemporaryDirectory() as scratch:
                _deploy(outcome, dataset, Path(scratch) / "model.tflite")
        _deliver(settings, results, precision)
    if work.logs is not None:
        work.logs.close()
        results.seconds, results.runs = work.logs.total, work.logs.runs
    return results


class NothingLearned(ValueError):
    """The float network is no better than guessing, so there is nothing for quantization to preserve."""


def check_learned(results: Results) -> None:
    """Refuses to quantize a float network that learned nothing.

    Raises:
        NothingLearned: says what to try.
    """
    part, accuracy = results.dataset.validation, results.float_validation_accuracy
    if findings.better_than_guessing(part, accuracy):
        return
    share = findings.chance(part)["accuracy"]
    raise NothingLearned(
        f"the float network has learned nothing: {accuracy:.1%} of {len(part):,} validation "
        f"{results.dataset.noun}s are right, and always naming the most frequent class gives {share:.1%}. "
        f"{findings.to_try(results.dataset.noun)}. Continue this job as it is with "
        "--resume --keep-going"
    )


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
    seconds, resumed, runs = metrics.get("seconds"), metrics.get("resumed"), metrics.get("runs", 1)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not isinstance(resumed, bool):
        raise ValueError(f"{out / 'metrics.json'} must contain seconds (a number) and resumed (true or false)")
    for name in ("float", *settings.trainings):
        path = out / "training" / f"{name}.pt"
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing; without it the report cannot be written again")
        if not training.finished(path):
            raise ValueError(f"{path} belongs to an unfinished training, in a job that is marked finished")
    results = run(settings, progress, dataset, resume=True, hold=hold, keep_going=True)
    results.seconds, results.resumed, results.runs = seconds, resumed, runs if type(runs) is int else 1
    return results


def _float_network(work: Work, model: nn.Module, last: str, fit: Fit | None) -> Results:
    settings, dataset, processes, normal = work.settings, work.dataset, work.processes, work.manner.normal
    work.progress.begin("float training")
    frozen = fit if settings.freeze_base else None
    with training_what_is_new(model, frozen, last) as (parameters, resting):
        history = work.train(
            model,
            [{"params": parameters, "lr": float_rate(settings)}],
            settings.epochs_float,
            "float training",
            "float",
            float_manner(settings, work.manner, resting),
            # If a job continues training another job's networks, the finished training was copied.
            resume=settings.from_job is not None,
        )
    if processes.writes:
        description = describe_network(settings, dataset) | {"state": model.state_dict()}
        checkpoints.save_checkpoint(settings.out / "float" / "checkpoint.pt", description)
    return Results(
        settings,
        dataset,
        model,
        history,
        training.accuracy(model, dataset.validation, normal) if processes.writes else 0.0,
        training.accuracy(model, dataset.test, normal) if processes.writes else 0.0,
        4 * sum(parameter.numel() for parameter in model.parameters()),
        [],
        resumed=work.resumed,
        formerly=retrained.formerly(settings.out) if settings.from_job is not None else "",
        float_predictions=training.predictions(model, dataset.test, normal).numpy()
        if processes.writes
        else np.zeros(0, np.int64),
    )


def _calibrate(model: qat.PreparedModel, dataset: Dataset, title: str) -> None:
    # In each process over all images: the ranges are then the same bits everywhere.
    qat.calibrate(model, dataset.train.images.split(CALIBRATION_BATCH))
    training.check_ranges(model, f"{title}, after calibration")


def _quantized_network(
    work: Work,
    results: Results,
    prepared: qat.PreparedModel,
    precision: str,
    method: Method,
    searched: Callable[[], tune.Search],
) -> Outcome:
    """One row of the report.

    Args:
        prepared: made from the trained float network.
        searched: what a search finds for this precision.
    """
    settings, dataset, normal = work.settings, work.dataset, work.manner.normal
    bits = settings.precisions[precision]
    rules = make_rules(bits, method.ranges, dataset.value_range, last_layer(prepared), settings.layer_rules)
    model = prepare_again(prepared, rules, device=settings.device)
    title, name = f"{precision.upper()} {method.title}", f"{precision}-{method.name}"
    trained_on = settings.from_job is not None and method.trained
    # The state of an interrupted training holds what it started from.
    begun = work.resumed and (settings.out / "training" / f"{name}.pt").exists()
    if trained_on:
        start = retrained.taken_over([name])[f"{name}.pt"]
        retrained.begin_with(model, settings.out / "training" / start, settings.device)
    else:
        _calibrate(model, dataset, title)
        if method.searched or (settings.from_search and method.trained and not begun):
            searched().apply(model)
    history = None
    if method.trained:
        epochs = settings.epochs_of(bits)
        history = work.train(
            model,
            quantized_groups(model, settings, fine=min(bits) >= 8 or trained_on),
            epochs,
            title,
            name,
            quantized_manner(settings, work.manner, results.float_model, model),
            0 if trained_on else epochs - training.frozen_epochs(epochs),
        )
    else:
        qat.freeze(model)
    validation_accuracy, validation_loss = training.accuracy_and_loss(model, dataset.validation, manner=work.manner)
    return Outcome(
        method,
        precision,
        model,
        rules,
        lower(model),
        history,
        validation_accuracy,
        validation_loss,
        training.accuracy(model, dataset.test, normal),
        threshold=None if normal is None else training.normal_threshold(model, normal),
    )


def _search(work: Work, prepared: qat.PreparedModel, precision: str) -> tune.Search:
    """What a search finds on training images for a calibrated network; the validation images judge it afterwards."""
    settings, dataset = work.settings, work.dataset
    bits = settings.precisions[precision]
    rules = make_rules(bits, SEARCHED.ranges, dataset.value_range, last_layer(prepared), settings.layer_rules)
    model = prepare_again(prepared, rules, device=settings.device)
    _calibrate(model, dataset, f"{precision.upper()} {SEARCHED.title}")
    order = np.random.default_rng(settings.seed).permutation(len(dataset.train))[:SEARCH_IMAGES]
    part = dataset.train.images[order].numpy(), dataset.train.labels[order].numpy()
    return tune.search(model, part, seed=settings.seed, budget=SEARCH_BUDGET, progress=False)


def _deploy(outcome: Outcome, dataset: Dataset, path: Path) -> None:
    """Writes the network, runs it on all test images and compares all integers."""
    graph = outcome.graph
    write_tflite(graph, path, f"{outcome.precision} {outcome.method.name}")
    content = path.read_bytes()
    outcome.file_bytes, outcome.compressed_bytes = len(content), len(zlib.compress(content, 9))
    codes = input_codes(graph, dataset)
    lowered, judge = lower_with_layouts(outcome.model), Judge(outcome.threshold)
    float_values, trained_values = layer_values(outcome.model, dataset.test.images[:LAYER_IMAGES], lowered=lowered)
    device = cast(str, outcome.model.profile)
    ran = verify(
        graph, path, codes, runs_here(device, graph), float_values=float_values, trained_values=trained_values,
        trained_codes={}, **users_own(outcome.model, dataset, runs_here(device, graph)),
    )  # fmt: skip
    beside = beside_training(outcome.model, graph, dataset.test, codes, [device], lowered, judge)[device]
    outcome.report = about(ran, device, beside)
    outcome.device_predictions, outcome.device_scores = beside.device_answers, beside.device_scores
    if device == profile_here(DEFAULT_KERNELS):
        returned = run_on_device(graph, path, codes)
        shown = np.zeros(0) if outcome.threshold is None else dataset.test.images.numpy()
        outcome.device_predictions = judge.answers(graph, returned, shown)
        outcome.device_scores = judge.scores(graph, returned, shown)
    outcome.device_accuracy = float((outcome.device_predictions == dataset.test.labels.numpy()).mean())


def _deliver(settings: Settings, results: Results, precision: str) -> None:
    """Puts the better network of a precision in its place: checkpoint.pt and model.tflite. Then every device is
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
    for device in that_run(".tflite"):
        try:
            outcome.elsewhere |= beside_training(
                outcome.model, outcome.graph, part, codes, [device], judge=Judge(outcome.threshold)
            )
        except Refusal as error:
            outcome.elsewhere[device] = str(error)
