# SPDX-License-Identifier: Apache-2.0
"""The job from data to verified files: train in float, quantize in every way, deploy, compare all integers, deliver."""

from __future__ import annotations

import functools
import glob
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
from ...deploy.values import layer_values
from ...deploy.verify import verify
from ...kit.device import Refusal
from ...kit.device.profile import that_run
from ...qat.train.torch.prepare import prepare_again
from ..report import findings
from ..report.results import Dataset, History, Method, Outcome, Results, Split
from . import checkpoints, data, files, recipes, training, weights
from .beside import LAYER_IMAGES, about, beside_training, input_codes, runs_here, users_own
from .fields import FLAG, NUMBER, WHOLE, check_fields
from .logs import Logs
from .models import check_name, new_model
from .processes import ALONE, Processes
from .progress import Progress
from .restored import describe_checkpoint, describe_network
from .settings import SEARCHED, Settings
from .store import check_free, float_state, quantized_before, read_job, start, stored_settings, unfinished

# Quantization-aware training starts from the calibrated float network, which is shown this many images at a time.
CALIBRATION_BATCH = 256
# Training images on which a search tries what it finds, and the most networks it evaluates.
SEARCH_IMAGES, SEARCH_BUDGET = 1024, 200
# Test images on which delivered networks are compared with what every other device computes.
ELSEWHERE_IMAGES = 512


class NothingLearned(ValueError):
    """The float network is no better than guessing, so there is nothing for quantization to preserve."""


def total_steps(settings: Settings, dataset: Dataset) -> int:
    """Training steps of the whole job, for the time left."""
    trainings = sum(method.trained for method in settings.methods)
    epochs = settings.epochs_float + trainings * sum(map(settings.epochs_of, settings.precisions.values()))
    return training.steps_per_epoch(dataset.train, settings.batch_size) * epochs


def load_for(settings: Settings) -> Dataset:
    """The data of a job."""
    return replace(data.load(settings.data, settings.image_size, settings.split), noun=settings.noun)


def check_before_data(settings: Settings, resume: bool = False) -> None:
    """Refuses what is known to be wrong before all images are read: a missing network, unreadable weights.

    Raises:
        FileNotFoundError, ValueError: see `models.check_name` and `weights.check`.
    """
    check_name(settings.model)
    if _reads_weights(settings, resume):
        weights.check(Path(cast(str, settings.weights)))


def _reads_weights(settings: Settings, resume: bool) -> bool:
    return settings.weights is not None and not (resume and float_state(settings).exists())


def make_rules(
    settings: Settings, bits: tuple[int, int], ranges: qat.RangePolicy, value_range: tuple[float, float], last: str
) -> list[qat.Rule]:
    """Input and logits stay at 8 bits: the input is the data itself, and the logits' order is the answer. The user's
    rules decide this themselves; the input's range is that of the data whatever they say.

    Args:
        bits: of weights and activations.
        ranges: where the user's rules leave them at the default.
        last: path of the layer that stores the logits.
    """
    weight_bits, activation_bits = bits
    given = settings.layer_rules or (
        qat.Rule(glob.escape(last), weight_bits=weight_bits, activation_bits=8),
        qat.Rule("*", weight_bits=weight_bits, activation_bits=activation_bits),
    )
    of_input = next((rule for rule in given if rule.match == "input"), qat.Rule())
    others = [rule for rule in given if rule.match != "input"] or [qat.Rule()]
    return [
        qat.Rule("input", activation_bits=of_input.activation_bits, ranges="fixed", fixed_range=value_range),
        *(replace(rule, ranges=ranges) if rule.ranges == qat.Rule().ranges else rule for rule in others),
    ]


def last_layer(prepared: qat.PreparedModel) -> str:
    """The path of the layer that stores the logits."""
    return list(prepared.layers())[-1][0]


def untrained_network(settings: Settings, dataset: Dataset) -> nn.Module:
    """A new network, after making sure that the device can run it by the rules of the job.

    Raises:
        ValueError: it does not fit the images, or the rules do not fit it.
        qat.UnsupportedOperator: the device cannot run it; better known before training than after.
    """
    torch.manual_seed(settings.seed)
    shape = dataset.train.images.shape[1:]
    model = new_model(settings.model, shape, len(dataset.class_names))
    try:
        prepared = qat.prepare(model, dataset.train.images[:2], keep_final_activation=False)
    except RuntimeError as error:
        raise ValueError(f"model {settings.model} does not fit images of shape {list(shape)}: {error}") from error
    if settings.rules is not None:
        (bits,) = settings.precisions.values()
        try:
            rules = make_rules(settings, bits, "ema", dataset.value_range, last_layer(prepared))
            prepare_again(prepared, rules, device=settings.device)
        except (ValueError, qat.UnsupportedOperator) as error:
            raise ValueError(f"rules do not fit model {settings.model}: {error}") from error
    return model


def check_learned(results: Results) -> None:
    """Refuses to quantize a float network that learned nothing.

    Raises:
        NothingLearned: says what to try.
    """
    part, accuracy, noun = results.dataset.validation, results.float_validation_accuracy, results.dataset.noun
    if not findings.better_than_guessing(part, accuracy):
        raise NothingLearned(
            f"the float network has learned nothing: {accuracy:.1%} of {len(part):,} validation {noun}s are right, and "
            f"always naming the most frequent class gives {findings.chance(part)['accuracy']:.1%}. "
            f"{findings.to_try(noun)}. Continue this job as it is with --resume --keep-going"
        )


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
) -> Results:
    """The whole job except metrics.json and the report. Writes checkpoints and .tflite files under `settings.out`.

    Args:
        dataset: instead of what `settings.data` names.
        processes: those that work on the job together; all but the first only train.
        resume: continue the job in the directory, if there is one; restart: move it aside, finished or not.
        accelerator: where networks train; everything else, including ranges and the device's integers, runs on the CPU.
        hold: takes the lock on the directory, for a caller that continues writing there; by default it ends with the
            call.
        keep_going: quantize even a float network that is no better than guessing.

    Raises:
        NothingLearned: the float network is no better than guessing.
        ValueError: another process is at work in the directory.
    """
    progress = progress or Progress()
    check_before_data(settings, resume)
    dataset = dataset or load_for(settings)
    if settings.recipe is not None:
        for sentence in recipes.check_data(settings.recipe, dataset):
            progress.say(sentence)
    # Before anything is written: whether there is such a network, and whether the device can run it.
    model = untrained_network(settings, dataset)
    fit = weights.put(model, Path(cast(str, settings.weights))) if _reads_weights(settings, resume) else None
    out = settings.out
    with ExitStack() as own:

        def begin() -> bool:
            check_free(out, resume, restart)
            if restart and (out / "job.json").exists():
                progress.say(f"The previous job in {out} is now in {files.move_aside(out)}")
            try:
                out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise files.cannot_write(out / "job.json", error) from error
            (own if hold is None else hold).enter_context(files.locked(out))
            return start(settings, dataset, resume, fit)

        resumed = processes.first_does(begin)
        if fit is not None:
            for sentence in fit.sentences:
                progress.say(sentence)
        elif settings.weights is not None:
            *_, fit = read_job(out)
        # A finished job is only evaluated again.
        ended = (out / "metrics.json").exists()
        logs = Logs(out, processes.count, records=processes.writes and not ended)
        if logs.records and logs.processes_before not in (None, processes.count):
            progress.say(
                f"The job was trained by {logs.processes_before} processes and goes on with {processes.count}: its "
                "bits will not be those of an uninterrupted job, as sums are added in another order"
            )
        manner = training.manner_of(settings, dataset)
        job = Job(settings, dataset, progress, processes, resumed, accelerator, manner, logs)
        results = job.run(model, keep_going or ended)
        results.fit, results.seconds, results.runs = fit, logs.total, logs.runs
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
    path = out / "metrics.json"
    metrics = check_fields(files.read_json(path), path, {"seconds": NUMBER, "resumed": FLAG, "runs": WHOLE})
    for name in settings.trainings:
        state = out / "training" / f"{name}.pt"
        if not state.exists():
            raise FileNotFoundError(f"{state} is missing; without it the report cannot be written again")
        if not training.finished(state):
            raise ValueError(f"{state} belongs to an unfinished training, in a job that is marked finished")
    results = run(settings, progress, dataset, resume=True, hold=hold)
    results.seconds, results.resumed, results.runs = metrics["seconds"], metrics["resumed"], metrics["runs"]
    return results


@dataclass(frozen=True)
class Job:
    """What all steps of a job need.

    Attributes:
        resumed: whether an interrupted job continues.
        manner: how its training runs go.
    """

    settings: Settings
    dataset: Dataset
    progress: Progress
    processes: Processes
    resumed: bool
    accelerator: torch.device
    manner: training.Manner
    logs: Logs

    def run(self, model: nn.Module, keep_going: bool) -> Results:
        """All of it, from the untrained network on."""
        settings, dataset, writes = self.settings, self.dataset, self.processes.writes
        results = self.float_network(model)
        if not keep_going:
            # If a run continued past this before, it has answered the question.
            self.processes.first_does(lambda: None if quantized_before(settings) else check_learned(results))
        # The captured network was compared with the user's before any training.
        prepared = qat.prepare(model, dataset.train.images[:2], check=False, keep_final_activation=False)
        for precision in settings.precisions:
            searched = functools.cache(functools.partial(self.search, prepared, precision))
            for method in settings.methods:
                self.progress.begin(f"{precision.upper()} {method.title}")
                if method.trained or writes:
                    results.outcomes.append(self.quantized_network(model, prepared, precision, method, searched))
            if writes:
                self.progress.begin(f"{precision.upper()} on the runtime, every integer compared")
                for outcome in results.of(precision):
                    deploy(outcome, dataset)
                deliver(settings, results, precision)
        self.logs.close()
        return results

    def train(
        self,
        model: nn.Module,
        groups: list[dict[str, Any]],
        epochs: int,
        title: str,
        name: str,
        manner: training.Manner,
        freeze_at: int | None = None,
    ) -> History:
        """Trains a network; see `training.train`.

        Args:
            title: of the training, for users; name: of its files.
        """
        settings = self.settings

        def on_epoch(history: History) -> None:
            if history.loss:
                self.logs.epoch(name, history)
            self.progress.epoch(title, history, epochs)

        history = training.train(
            model, groups, self.dataset.train, self.dataset.validation, epochs, settings.seed, title,
            self.progress.advance, settings.out / "training" / f"{name}.pt", settings.batch_size, freeze_at,
            self.processes, self.resumed, self.accelerator, on_epoch, manner, self.progress.skip,
        )  # fmt: skip
        if len(history.loss) < epochs:
            self.progress.say(
                f"{title}: ended after epoch {len(history.loss)} of {epochs}, as the validation loss has not fallen "
                f"for {settings.early_stopping}"
            )
        return history

    def float_network(self, model: nn.Module) -> Results:
        settings, dataset, history = self.settings, self.dataset, History()
        self.progress.begin("float training")
        if settings.epochs_float:
            groups = [{"params": list(model.parameters()), "lr": training.float_rate(settings)}]
            history = self.train(model, groups, settings.epochs_float, "float training", "float", self.manner)
        validation, test, answers = 0.0, 0.0, np.zeros(0, np.int64)
        if self.processes.writes:
            description = describe_network(settings, dataset) | {"state": model.state_dict()}
            checkpoints.save_checkpoint(settings.out / "float" / "checkpoint.pt", description)
            validation = training.accuracy(model, dataset.validation)
            answers = training.predictions(model, dataset.test).numpy()
            test = float((answers == dataset.test.labels.numpy()).mean())
        size = 4 * sum(parameter.numel() for parameter in model.parameters())
        return Results(
            settings, dataset, model, history, validation, test, size, [], resumed=self.resumed,
            float_predictions=answers,
        )  # fmt: skip

    def calibrated(self, prepared: qat.PreparedModel, precision: str, method: Method) -> qat.PreparedModel:
        settings, dataset = self.settings, self.dataset
        bits = settings.precisions[precision]
        rules = make_rules(settings, bits, method.ranges, dataset.value_range, last_layer(prepared))
        model = prepare_again(prepared, rules, device=settings.device)
        # In each process over all images: the ranges are then the same bits everywhere.
        qat.calibrate(model, dataset.train.images.split(CALIBRATION_BATCH))
        training.check_ranges(model, f"{precision.upper()} {method.title}, after calibration")
        return model

    def quantized_network(
        self,
        float_model: nn.Module,
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
        settings, dataset, bits = self.settings, self.dataset, self.settings.precisions[precision]
        model = self.calibrated(prepared, precision, method)
        history = None
        if method.trained:
            epochs, fine = settings.epochs_of(bits), min(bits) >= 8
            history = self.train(
                model,
                training.quantized_groups(model, settings, fine),
                epochs,
                f"{precision.upper()} {method.title}",
                f"{precision}-{method.name}",
                training.with_teacher(self.manner, settings, float_model, model),
                epochs - training.frozen_epochs(epochs),
            )
        else:
            if method.searched:
                searched().apply(model)
            qat.freeze(model)
        accuracy, loss = training.accuracy_and_loss(model, dataset.validation, manner=self.manner)
        rules = make_rules(settings, bits, method.ranges, dataset.value_range, last_layer(prepared))
        test = training.accuracy(model, dataset.test)
        return Outcome(method, precision, model, rules, lower(model), history, accuracy, loss, test)

    def search(self, prepared: qat.PreparedModel, precision: str) -> tune.Search:
        """What a search finds on training images for a calibrated network; validation images judge it afterwards."""
        model, train = self.calibrated(prepared, precision, SEARCHED), self.dataset.train
        order = np.random.default_rng(self.settings.seed).permutation(len(train))[:SEARCH_IMAGES]
        part = train.images[order].numpy(), train.labels[order].numpy()
        return tune.search(model, part, seed=self.settings.seed, budget=SEARCH_BUDGET, progress=False)


def deploy(outcome: Outcome, dataset: Dataset) -> None:
    """Writes the network, runs it on all test images and compares all integers."""
    graph, codes, lowered = outcome.graph, input_codes(outcome.graph, dataset), lower_with_layouts(outcome.model)
    device = cast(str, outcome.model.profile)
    runs = runs_here(device, graph)
    float_values, trained_values = layer_values(outcome.model, dataset.test.images[:LAYER_IMAGES], lowered=lowered)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.tflite"
        write_tflite(graph, path, f"{outcome.precision} {outcome.method.name}")
        content = path.read_bytes()
        ran = verify(
            graph, path, codes, runs, float_values=float_values, trained_values=trained_values, trained_codes={},
            **users_own(outcome.model, dataset, runs),
        )  # fmt: skip
    outcome.file_bytes, outcome.compressed_bytes = len(content), len(zlib.compress(content, 9))
    beside = beside_training(outcome.model, graph, dataset.test, codes, [device], lowered)[device]
    outcome.report = about(ran, device, beside)
    outcome.device_predictions, outcome.device_accuracy = beside.device_answers, beside.device_accuracy


def deliver(settings: Settings, results: Results, precision: str) -> None:
    """Puts the better network of a precision in its place: checkpoint.pt and model.tflite. Then every device is
    compared with its training."""
    outcome = results.chosen(precision)
    folder = settings.out / precision
    checkpoints.save_checkpoint(folder / "checkpoint.pt", describe_checkpoint(settings, results.dataset, outcome))
    content = tflite_bytes(outcome.graph, f"{precision} {outcome.method.name}")
    outcome.footprint = footprint(outcome.graph, content)
    files.write_atomically(folder / "model.tflite", content)
    test = results.dataset.test
    part = Split(test.images[:ELSEWHERE_IMAGES], test.labels[:ELSEWHERE_IMAGES])
    codes = input_codes(outcome.graph, results.dataset)[:ELSEWHERE_IMAGES]
    for device in that_run(".tflite"):
        try:
            outcome.elsewhere |= beside_training(outcome.model, outcome.graph, part, codes, [device])
        except Refusal as error:
            outcome.elsewhere[device] = str(error)
