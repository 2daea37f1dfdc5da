# SPDX-License-Identifier: Apache-2.0
"""The job from data to verified files: train in float, quantize in every way, deploy, compare all integers, deliver."""

from __future__ import annotations

import glob
import tempfile
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ... import qat, tune
from ...deploy.footprint import footprint
from ...deploy.formats.tflite import tflite_bytes
from ...deploy.lower import lower
from ...kit.device import Refusal
from ...kit.device.profile import that_run
from ...qat.train.torch.prepare import prepare_again
from . import checkpoints, data, files, recipes, training, weights
from .beside import beside_training, compared
from .models import maker, new_model
from .processes import ALONE, Processes
from .restored import describe_network
from .results import Dataset, History, Method, Outcome, Progress, Results, Split
from .settings import Settings
from .store import Logs, check_free, read_job, start

# Quantization-aware training starts from the calibrated float network, which is shown this many images at a time.
CALIBRATION_BATCH = 256
# Training images on which a search tries what it finds, and the most networks it evaluates.
SEARCH_IMAGES, SEARCH_BUDGET = 1024, 200
# Test images on which delivered networks are compared with what every other device computes.
ELSEWHERE_IMAGES = 512
# By how many standard deviations an accuracy has to exceed that of a guess to count: one guess in a hundred does.
BEYOND_LUCK = 2.33


def make_rules(
    settings: Settings, bits: tuple[int, int], ranges: qat.RangePolicy, value_range: tuple[float, float],
    prepared: qat.PreparedModel,
) -> list[qat.Rule]:  # fmt: skip
    """Input and logits stay at 8 bits: the input is the data itself, and the logits' order is the answer. The user's
    rules decide this themselves; the input's range is that of the data whatever they say.

    Args:
        bits: of weights and activations.
        ranges: where the user's rules leave them at the default.
        prepared: the network, whose last layer stores the logits.
    """
    weight_bits, activation_bits = bits
    rules = settings.layer_rules or (
        qat.Rule(glob.escape(list(prepared.layers())[-1][0]), weight_bits=weight_bits, activation_bits=8),
        qat.Rule("*", weight_bits=weight_bits, activation_bits=activation_bits),
    )
    of_input = next((rule for rule in rules if rule.match == "input"), qat.Rule())
    others = [rule for rule in rules if rule.match != "input"] or [qat.Rule()]
    return [
        qat.Rule("input", activation_bits=of_input.activation_bits, ranges="fixed", fixed_range=value_range),
        *(replace(rule, ranges=ranges) if rule.ranges == qat.Rule().ranges else rule for rule in others),
    ]


def untrained_network(settings: Settings, dataset: Dataset) -> nn.Module:
    """A new network, after making sure that the device can run it by the rules of the job."""
    torch.manual_seed(settings.seed)
    shape = dataset.train.images.shape[1:]
    model = new_model(settings.model, shape, len(dataset.class_names))
    try:
        prepared = qat.prepare(model, dataset.train.images[:2], keep_final_activation=False)
    except RuntimeError as error:
        raise ValueError(f"model {settings.model} does not fit {dataset.noun}s {list(shape)}: {error}") from error
    if settings.rules is not None:
        (bits,) = settings.precisions.values()
        try:
            rules = make_rules(settings, bits, "ema", dataset.value_range, prepared)
            prepare_again(prepared, rules, device=settings.device)
        except ValueError as error:
            raise ValueError(f"rules do not fit model {settings.model}: {error}") from error
    return model


def to_try(noun: str) -> str:
    """What to do about a network that has learned nothing."""
    larger = ", larger ones (--image-size)" if noun == "image" else ""
    return (
        f"Try more epochs (--epochs-float), another learning rate (--lr), more {noun}s of every class{larger}, another "
        f"network (--model), pretrained weights (--weights); and check some {noun}s and their labels"
    )


def chance(part: Split) -> dict[str, float]:
    """The share of images in the most frequent class, which a network gets right by always naming it; and the accuracy
    above which it is more than chance. Above 1 if there are too few images to tell."""
    labels = part.labels.numpy()
    share = float(np.bincount(labels, minlength=1).max() / len(labels))
    # With a single class there is nothing to learn; a guess that is always right shows no more.
    spread = float(np.sqrt(share * (1 - share) / len(labels)))
    return {"accuracy": share, "needed": share + BEYOND_LUCK * spread + 0.5 / len(labels)}


def total_steps(settings: Settings, dataset: Dataset) -> int:
    """Training steps of the whole job, for the time left."""
    trainings = sum(method.trained for method in settings.methods)
    epochs = settings.epochs_float + trainings * sum(map(settings.epochs_of, settings.precisions.values()))
    return training.steps_per_epoch(dataset.train, settings.batch_size) * epochs


def run(
    settings: Settings, progress: Progress | None = None, dataset: Dataset | None = None, processes: Processes = ALONE,
    resume: bool = False, restart: bool = False, accelerator: torch.device = training.CPU, keep_going: bool = False,
    finish: Callable[[Results], object] = lambda results: None,
) -> Results:  # fmt: skip
    """The whole job except metrics.json and the report. Writes checkpoints and .tflite files under `settings.out`.

    Args:
        dataset: instead of what `settings.data` names.
        processes: those that work on the job together; all but the first only train.
        resume: continue the job in the directory, if there is one; restart: move it aside, finished or not.
        accelerator: where networks train; everything else, including ranges and the device's integers, runs on the CPU.
        keep_going: quantize even a float network that is no better than guessing.
        finish: writes more into the directory, while it is still locked.
    """
    out, progress = settings.out, progress or Progress()
    # What is known to be wrong, before all images are read: a missing network, unreadable weights, a directory in use.
    maker(settings.model)
    float_state = out / "training" / "float.pt"
    path = None if settings.weights is None or resume and float_state.exists() else Path(settings.weights)
    if path is not None:
        weights.read(path)
    processes.first_does(lambda: check_free(out, resume, restart))
    processes.first_does(lambda: files.check_writable(out, is_folder=True))
    if dataset is None:
        dataset = data.load(settings.data, settings.image_size, settings.split, progress.compared)
        dataset = replace(dataset, noun=settings.noun)
    progress.read(dataset)
    if settings.recipe is not None:
        shape, classes = tuple(dataset.train.images.shape[1:]), len(dataset.class_names)
        if sentence := recipes.check_data(settings.recipe, dataset.name, shape, classes):
            progress.say(sentence)
    # Before anything is written: whether there is such a network, and whether the device can run it.
    model = untrained_network(settings, dataset)
    fit = None if path is None else weights.put(model, path)
    with ExitStack() as hold:

        def begin() -> bool:
            if restart and (out / "job.json").exists():
                progress.say(f"The previous job in {out} is now in {files.move_aside(out)}")
            out.mkdir(parents=True, exist_ok=True)
            hold.enter_context(files.locked(out))
            return start(settings, dataset, resume, fit)

        resumed = processes.first_does(begin)
        for sentence in fit.sentences if fit is not None else ():
            progress.say(sentence)
        if fit is None and settings.weights is not None:
            *_, fit = read_job(out)
        # A finished job is only evaluated again.
        ended = (out / "metrics.json").exists()
        for name in settings.trainings if ended else ():
            training.check_finished(out / "training" / f"{name}.pt")
        logs = Logs(out, processes.count, records=processes.writes and not ended)
        if logs.records and logs.processes_before not in (None, processes.count):
            progress.say(
                f"The job was trained by {logs.processes_before} processes and goes on with {processes.count}: its "
                "bits will not be those of an uninterrupted job, as sums are added in another order"
            )
        manner = training.manner_of(settings, dataset)
        job = Job(settings, dataset, progress, processes, resumed, accelerator, manner, logs)
        progress.total(total_steps(settings, dataset))
        results = job.run(model, keep_going or ended)
        results.fit, results.seconds, results.runs = fit, logs.close(), logs.runs
        if processes.writes:
            finish(results)
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
        part, accuracy, noun = dataset.validation, results.float_validation_accuracy, dataset.noun

        def check_learned() -> None:
            # If a run continued past this before, it has answered the question.
            before = [path for path in (settings.out / "training").glob("*.pt") if path.name != "float.pt"]
            share, needed = chance(part).values()
            if not before and accuracy <= share and needed < 1:
                raise ValueError(
                    f"the float network has learned nothing: {accuracy:.1%} of {len(part):,} validation {noun}s are "
                    f"right, and always naming the most frequent class gives {share:.1%}. {to_try(noun)}. Continue "
                    "this job as it is with --resume --keep-going"
                )

        if not keep_going:
            self.processes.first_does(check_learned)
        # The captured network was compared with the user's before any training.
        prepared = qat.prepare(model, dataset.train.images[:2], check=False, keep_final_activation=False)
        for precision in settings.precisions:
            for method in settings.methods:
                self.progress.begin(f"{precision.upper()} {method.title}")
                if method.trained or writes:
                    network = self.quantized(model, prepared, precision, method)
                    if writes:
                        results.outcomes.append(self.judged(precision, method, *network))
            if writes:
                self.deliver(results.chosen(precision))
        return results

    def train(
        self, model: nn.Module, groups: training.Groups, epochs: int, title: str, name: str, manner: training.Manner,
        freeze_at: int | None = None,
    ) -> History:  # fmt: skip
        """Trains a network; see `training.train`.

        Args:
            title: of the training, for users; name: of its files.
        """

        def on_epoch(history: History) -> None:
            if history.loss:
                self.logs.epoch(name, history)
            self.progress.epoch(title, history, epochs)

        history = training.train(
            model, groups, self.dataset.train, self.dataset.validation, epochs, title,
            self.settings.out / "training" / f"{name}.pt", manner, freeze_at, self.processes, self.resumed,
            self.accelerator, self.progress, on_epoch,
        )  # fmt: skip
        if len(history.loss) < epochs:
            self.progress.say(
                f"{title}: ended after epoch {len(history.loss)} of {epochs}, as the validation loss has not fallen "
                f"for {self.settings.early_stopping}"
            )
        return history

    def float_network(self, model: nn.Module) -> Results:
        settings, dataset, history = self.settings, self.dataset, History()
        self.progress.begin("float training")
        if settings.epochs_float:
            usual = training.FLOAT_RATE if settings.weights is None else training.GIVEN_WEIGHTS_RATE
            rate = training.rate_of(settings, settings.lr, usual)
            groups = [{"params": list(model.parameters()), "lr": rate}]
            history = self.train(model, groups, settings.epochs_float, "float training", "float", self.manner)
        validation, test, answers = 0.0, 0.0, np.zeros(0, np.int64)
        if self.processes.writes:
            description = describe_network(settings, dataset) | {"state": model.state_dict()}
            checkpoints.save_checkpoint(settings.out / "float" / "checkpoint.pt", description)
            validation, _ = training.accuracy_and_loss(model, dataset.validation, self.manner)
            answers = training.predictions(model, dataset.test).numpy()
            test = float((answers == dataset.test.labels.numpy()).mean())
        size = 4 * sum(parameter.numel() for parameter in model.parameters())
        return Results(settings, dataset, model, history, validation, test, size, answers)

    def quantized(
        self, float_model: nn.Module, prepared: qat.PreparedModel, precision: str, method: Method
    ) -> tuple[qat.PreparedModel, list[qat.Rule], History | None]:
        """A network by one method, frozen, its rules, and how it was trained.

        Args:
            prepared: made from the trained float network.
        """
        settings, train, bits = self.settings, self.dataset.train, self.settings.precisions[precision]
        rules = make_rules(settings, bits, method.ranges, self.dataset.value_range, prepared)
        model = prepare_again(prepared, rules, device=settings.device)
        title = f"{precision.upper()} {method.title}"
        # In each process over all images: the ranges are then the same bits everywhere.
        qat.calibrate(model, train.images.split(CALIBRATION_BATCH))
        if failure := training.collapsed(model):
            raise training.TrainingFailed(f"{title}, after calibration: {failure}")
        if method.trained:
            epochs, usual = settings.epochs_of(bits), training.QAT_RATE if min(bits) < 8 else training.FINE_TUNING_RATE
            rate = training.rate_of(settings, settings.lr_qat, usual)
            groups = qat.parameter_groups(model, rate, settings.lr_ranges or training.RANGE_RATE)
            teacher = qat.Distillation(float_model) if settings.distill else None
            # In float32, the numbers of the device.
            manner = replace(self.manner, settings=replace(settings, mixed_precision=False), teacher=teacher)
            freeze_at = epochs - max(1, round(epochs * training.FROZEN_SHARE))
            history = self.train(model, groups, epochs, title, f"{precision}-{method.name}", manner, freeze_at)
            return model, rules, history
        if method.searched:
            # On training images; validation images judge what it finds.
            order = np.random.default_rng(settings.seed).permutation(len(train))[:SEARCH_IMAGES]
            part = train.images[order].numpy(), train.labels[order].numpy()
            tune.search(model, part, seed=settings.seed, budget=SEARCH_BUDGET, progress=False).apply(model)
        qat.freeze(model)
        return model, rules, None

    def judged(
        self, precision: str, method: Method, model: qat.PreparedModel, rules: list[qat.Rule], history: History | None
    ) -> Outcome:
        """One row of the report: writes the network, runs it on all test images and compares all integers."""
        dataset, graph = self.dataset, lower(model)
        accuracy, loss = training.accuracy_and_loss(model, dataset.validation, self.manner)
        test, _ = training.accuracy_and_loss(model, dataset.test, self.manner)
        self.progress.begin(f"{precision.upper()} on the runtime, every integer compared")
        content = tflite_bytes(graph, f"{precision} {method.name}")
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "model.tflite"
            path.write_bytes(content)
            beside = compared(model, graph, path, dataset, noise=True)
        return Outcome(
            method, precision, model, rules, graph, history, accuracy, loss, test, beside.report,
            beside.device_accuracy, beside.device_answers, len(content), len(zlib.compress(content, 9)),
        )  # fmt: skip

    def deliver(self, outcome: Outcome) -> None:
        """Puts the better network of a precision in its place: checkpoint.pt and model.tflite. Then every device is
        compared with its training."""
        settings, dataset, graph = self.settings, self.dataset, outcome.graph
        folder = settings.out / outcome.precision
        description = describe_network(settings, dataset) | {
            "precision": outcome.precision,
            "method": outcome.method.name,
            "rules": [asdict(rule) for rule in outcome.rules],
            "state": outcome.model.state_dict(),
        }
        checkpoints.save_checkpoint(folder / "checkpoint.pt", description)
        content = tflite_bytes(graph, f"{outcome.precision} {outcome.method.name}")
        outcome.footprint = footprint(graph, content)
        files.write_atomically(folder / "model.tflite", content)
        part = Split(dataset.test.images[:ELSEWHERE_IMAGES], dataset.test.labels[:ELSEWHERE_IMAGES])
        for device in that_run(".tflite"):
            try:
                outcome.elsewhere[device] = beside_training(outcome.model, graph, part, device)
            except Refusal as error:
                outcome.elsewhere[device] = str(error)
