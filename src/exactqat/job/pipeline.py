# SPDX-License-Identifier: Apache-2.0
"""The job from data to verified files: train in float, quantize in every way, deploy, compare all integers, deliver."""

from __future__ import annotations

import functools
import glob
import importlib.util
import json
import platform
import re
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from .. import qat
from ..deploy.comparison import Comparison, Report
from ..deploy.footprint import Footprint, NpuFootprint, footprint, npu_footprint
from ..deploy.formats.c_array import MADE_BY, c_array, c_name
from ..deploy.formats.onnx import onnx_bytes
from ..deploy.formats.tflite import tflite_bytes, write_tflite
from ..deploy.graph import Graph
from ..deploy.lower import lower, lower_with_layouts
from ..deploy.runtimes import profile_here, profiles_here
from ..deploy.signature import input_codes as codes_of
from ..deploy.values import layer_values
from ..deploy.verify import verify
from ..device import DEFAULT_PROFILE, PROFILES, Refusal
from ..device.profile import DEFAULT_KERNELS
from ..train.torch.primitives import overruns_channels_last
from . import checkpoints, files, findings, retrained, training
from .beside import Beside, beside_training
from .data import Dataset, Split, load
from .devices import current_settings, device_named
from .luck import Paired, paired
from .models import builder, named_in, network
from .processes import ALONE, Processes
from .text import option_of, option_value, shell_word
from .weights import Fit, check, put, restored

# Bits of weights and of activations, if the user names none.
PRECISIONS = ((8, 8), (4, 4), (3, 4))
PRECISION = re.compile("w[2-8]a[2-8]")
JOB_FORMAT = 1
# What settings may be.
INTEGERS = {
    "seed": (0, 2**63 - 1),
    "epochs_float": (1, 2**31 - 1),
    "epochs_qat": (1, 2**31 - 1),
    "batch_size": (2, 2**31 - 1),
    "image_size": (1, 2**14),
}
# Of weights and of activations.
FEWEST_BITS, MOST_BITS = 2, 8
# Quantization-aware trainings start from the calibrated float network; this many images at a time are shown to it.
CALIBRATION_BATCH = 256
# Images whose values are kept for all layers at once.
LAYER_IMAGES = 128
# Test images on which delivered networks are compared with what every other device computes.
ELSEWHERE_IMAGES = 512


@dataclass(frozen=True)
class Method:
    """One way to quantize: with training or without, and where activation ranges come from."""

    name: str
    title: str
    ranges: qat.RangePolicy
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

    Attributes:
        out: the directory that holds everything the job writes.
        data: as in `data.load`.
        model: as in `models.network`.
        weight_bits, activation_bits: 2..8, or several, each of weights with each of activations; if either is given,
            these precisions alone, the other with 8 unless given too. Kept the most bits first, one alone as a number.
        epochs_qat: of each quantization-aware training with fewer than eight bits; see `epochs_of`.
        batch_size: images in a training step, over all processes.
        image_size: height and width to which images are scaled; None leaves them.
        device: whose integers training computes in its last phase, as `qat.prepare` has them; see `devices`.
        weights: path of weights that float training starts from, as in `weights.put`; None: a new network's.
        from_job: directory of a finished job, trained for another device, whose networks are trained on for this one;
            see `retrained`.

    Raises:
        ValueError: a value outside of what is allowed, or of another type.
    """

    out: Path
    seed: int = 0
    epochs_float: int = 60
    epochs_qat: int = 80
    data: str = "digits"
    model: str = "small_mobilenet"
    weight_bits: int | Sequence[int] | None = None
    activation_bits: int | Sequence[int] | None = None
    batch_size: int = training.BATCH_SIZE
    image_size: int | None = None
    device: str = DEFAULT_PROFILE
    weights: str | None = None
    from_job: str | None = None

    def __post_init__(self) -> None:
        for name in ("weight_bits", "activation_bits"):
            object.__setattr__(self, name, _bits(name, getattr(self, name)))
        for name, (low, high) in INTEGERS.items():
            value = getattr(self, name)
            if value is None and name == "image_size":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name} must be an integer, got {value!r}")
            if not low <= value <= high:
                allowed = f"from {low} to {high}" if value > high else f"at least {low}"
                raise ValueError(f"{name} must be {allowed}, got {value}")
        for name in ("data", "model", "device"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a string, got {getattr(self, name)!r}")
        for name in ("weights", "from_job"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"{name} must be a string, got {getattr(self, name)!r}")
        device_named(self.device)

    @property
    def precisions(self) -> dict[str, tuple[int, int]]:
        """Bits of weights and activations by name, such as ``{"w4a4": (4, 4)}``; the most bits first."""
        pairs: Sequence[tuple[int, int]] = PRECISIONS
        if self.weight_bits is not None or self.activation_bits is not None:
            of_weights, of_activations = (
                (bits,) if isinstance(bits, int) else bits
                for bits in (self.weight_bits or MOST_BITS, self.activation_bits or MOST_BITS)
            )
            pairs = [(weights, activations) for weights in of_weights for activations in of_activations]
        return {f"w{weights}a{activations}": (weights, activations) for weights, activations in pairs}

    def epochs_of(self, bits: tuple[int, int]) -> int:
        """Epochs of a quantization-aware training; with eight bits, which only fine-tunes, a quarter."""
        share = training.FINE_TUNING_SHARE if min(bits) >= 8 else 1
        return max(1, round(self.epochs_qat * share))

    @property
    def trainings(self) -> list[str]:
        """Names of all quantization-aware trainings, in their order."""
        return [f"{precision}-{method.name}" for precision in self.precisions for method in METHODS if method.trained]

    def stored(self) -> dict[str, Any]:
        """All of them but the directory, for job.json."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "out"}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _bits(name: str, given: Any) -> int | tuple[int, ...] | None:
    """How many bits, the most first: one number, several, or None."""
    if given is None:
        return None
    widths = given if isinstance(given, list | tuple) else [given]
    if not widths:
        raise ValueError(f"{name} must be an integer or several, got none")
    for bits in widths:
        if not isinstance(bits, int) or isinstance(bits, bool):
            raise ValueError(f"{name} must be an integer or several, got {given!r}")
        if not FEWEST_BITS <= bits <= MOST_BITS:
            raise ValueError(f"{name} must be from {FEWEST_BITS} to {MOST_BITS}, got {bits}")
    several = tuple(sorted(set(widths), reverse=True))
    return several if len(several) > 1 else several[0]


@dataclass
class Outcome:
    """One quantized network and what was found out about it.

    device_predictions: the class that the device it was trained for gives every test image: by its runtime where that
        is this machine's default, else by its exact simulation.
    footprint: what it takes on a microcontroller, of those that are delivered.
    compressed_bytes: of its file, deflated as downloads are.
    report: the file on a runtime, and the device that it was trained for beside training, over all test images.
    elsewhere: of those that are delivered every device beside training, over the first test images; or why it could not
        be simulated.
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
    compressed_bytes: int = 0
    report: Report | None = None
    footprint: Footprint | None = None
    elsewhere: dict[str, Beside | str] = field(default_factory=dict)


@dataclass
class Results:
    """Everything the report and the table tell. fit: what float training took from the weights it was given, if any."""

    settings: Settings
    dataset: Dataset
    float_model: nn.Module
    float_history: training.History
    float_validation_accuracy: float
    float_test_accuracy: float
    float_bytes: int
    outcomes: list[Outcome]
    seconds: float = 0.0
    resumed: bool = False
    fit: Fit | None = None

    @functools.cached_property
    def last_layer(self) -> str:
        """The path of the layer that stores the logits."""
        return last_layer(self.float_model, self.dataset.train.images[:2])

    @functools.cached_property
    def float_predictions(self) -> np.ndarray:
        """The float network's answer to every test image, [n]."""
        return training.predictions(self.float_model, self.dataset.test).numpy()

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

    @property
    def training_values(self) -> int:
        """Integers of the device that was trained for, compared with training's, over all networks."""
        return sum(outcome.report.training_values for outcome in self.outcomes if outcome.report)

    @property
    def training_differing(self) -> int:
        """How many of them differ."""
        return sum(outcome.report.training_differing for outcome in self.outcomes if outcome.report)

    @property
    def predictions(self) -> tuple[int, int]:
        """How many integers of the files, fed with the user's images, are not the models' own, and how many were
        compared; 0 of none where the runtime is not that of the device."""
        rows = [row for outcome in self.outcomes if outcome.report for row in outcome.report.predictions]
        return sum(row.differing for row in rows), sum(row.values for row in rows)

    @property
    def equal(self) -> bool:
        """Whether every file runs as simulated, and the device computes what was trained."""
        return all(outcome.report.equal for outcome in self.outcomes if outcome.report)

    @property
    def ran_as(self) -> str:
        """The profile whose runtime ran the files: the device's own where this machine has it."""
        report = self.outcomes[0].report
        assert report is not None
        return report.ran_as or report.profile

    def beside_float(self, answers: np.ndarray) -> Paired:
        """A network's answers to the test images beside the float network's, image by image."""
        labels = self.dataset.test.labels.numpy()
        return paired(answers == labels, self.float_predictions == labels)


@dataclass(frozen=True)
class Progress:
    """How the job tells what it does. begin(text): a new piece of work; advance(n): n more training steps are done;
    epoch(training, history, n): of the n epochs of a training one more is done, or those that were done before;
    say(text): a sentence that the user should read; compared(n, m): n of the m comparisons of a file are done."""

    begin: Callable[[str], None] = lambda text: None
    advance: Callable[[int], None] = lambda steps: None
    epoch: Callable[[str, training.History, int], None] = lambda name, history, epochs: None
    say: Callable[[str], None] = lambda text: None
    compared: Callable[[int, int], None] = lambda done, all: None


def total_steps(settings: Settings, dataset: Dataset) -> int:
    """Training steps of the whole job, for the time left."""
    trainings = sum(method.trained for method in METHODS)
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


def new_model(name: str, input_shape: Sequence[int], classes: int) -> nn.Module:
    """The untrained network of that name (see `models.network`), in the memory format that needs no copies, if that is
    safe.

    Args:
        input_shape: channels, height, width.
    """
    model = network(name, input_shape, classes)
    if any(isinstance(layer, nn.Conv2d) and _overruns(layer) for layer in model.modules()):
        return model
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _overruns(layer: nn.Conv2d) -> bool:
    padding = (0,) if isinstance(layer.padding, str) else layer.padding
    return overruns_channels_last(layer.weight, layer.stride, padding)


def check_free(out: Path, resume: bool, restart: bool) -> None:
    """Refuses a directory with files that a new job would overwrite.

    Raises:
        ValueError: it holds a job and neither option is given, or files of others that have the names of a job's.
    """
    taken = files.entries(out)
    if "job.json" not in taken:
        if taken:
            raise ValueError(
                f"{out} contains {', '.join(taken)} but no job.json, so another program wrote that and a job would "
                "overwrite it. Use another directory"
            )
        return
    if not resume and not restart:
        finished = "metrics.json" in taken
        raise ValueError(
            f"{out} contains {'a finished' if finished else 'an unfinished'} job: "
            + ("use another directory" if finished else "continue it with --resume")
            + ", or move it aside and start over with --restart"
        )


def start(
    settings: Settings,
    dataset: Dataset,
    resume: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
    fit: Fit | None = None,
) -> bool:
    """Makes `settings.out` ready: notes the settings in job.json, or compares them with those of the job to continue.

    Args:
        resume: continue the job in the directory, if there is one.
        restart: move a job that is there aside, finished or not; `progress` says where to.
        fit: what the network took from `settings.weights`, if they were read.

    Returns:
        Whether there is something to continue.

    Raises:
        ValueError: the directory is not free (see `check_free`), or holds a job with other settings. Nothing is changed
            then.
    """
    out, job = settings.out, settings.out / "job.json"
    check_free(out, resume, restart)
    fingerprint = dataset.fingerprint()
    if resume and job.exists():
        given, (stored, stored_fingerprint, stored_fit) = settings.stored(), _read_job(out)
        for name, value in given.items():
            if stored.get(name) != value:
                option = option_of(name)
                raise ValueError(
                    f"{out} contains a job with {option} {option_value(stored.get(name))}, it cannot be continued with "
                    f"{option} {option_value(value)}"
                )
        if stored_fingerprint != fingerprint:
            raise ValueError(f"the images in --data {settings.data} differ from those the job in {out} started with")
        if fit is not None and stored_fit is not None and fit.digest != stored_fit.digest:
            raise ValueError(f"--weights {settings.weights} is not the file the job in {out} started from")
        files.remove_halves(out)
        return True
    origin = {}
    if settings.from_job is not None:
        source = Path(settings.from_job)
        if out.resolve() == source.resolve():
            raise ValueError(
                f"--out and --from must be different directories, since the job in --from is kept; both are {out}"
            )
        origin = {"from": retrained.description(source, settings.trainings, fingerprint)}
    if job.exists():
        files.remove_halves(out)
        aside = files.move_aside(out)
        (progress or Progress()).say(f"The previous job in {out} is now in {aside}")
    content = {"format": JOB_FORMAT, "settings": settings.stored(), "images": fingerprint} | origin
    if fit is not None:
        content["weights"] = fit.stored()
    files.write_atomically(job, (json.dumps(content, indent=2) + "\n").encode())
    return False


def _read_job(out: Path) -> tuple[dict[str, Any], str, Fit | None]:
    """Settings, fingerprint of the images, and what fitted of the weights."""
    files.check_there(out)
    path = out / "job.json"
    if not path.exists():
        raise FileNotFoundError(f"{out} contains no job.json; run `exactqat train` first")
    content = files.read_json(path)
    try:
        if content["format"] != JOB_FORMAT:
            raise ValueError(f"it has format {content['format']!r}; this version reads {JOB_FORMAT}")
        if not isinstance(content["settings"], dict) or not isinstance(content["images"], str):
            raise ValueError("settings must be an object and images a string")
        settings = current_settings(content["settings"])
        return settings, content["images"], restored(content["weights"]) if "weights" in content else None
    except KeyError as error:
        raise ValueError(f"{path} cannot be read: it has no field {error}") from error
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def stored_settings(out: Path, model: str | None = None) -> Settings:
    """The settings of the job in a directory.

    Args:
        model: the network as the user names it; needed if it is not one of exactqat's own, see `models.named_in`.

    Raises:
        FileNotFoundError: there is no job.
        ValueError: job.json is damaged, or the network is not the user's.
    """
    stored, *_ = _read_job(out)
    try:
        settings = Settings(out, **stored)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{out / 'job.json'} cannot be read: {error}") from error
    named_in(out / "job.json", settings.model, model)
    return settings


def settings_from(source: Path, out: Path, given: Mapping[str, Any]) -> Settings:
    """The settings of a job in `out` that trains the networks of the finished job in `source` on for another device.

    Args:
        given: by the user; the other settings are the finished job's. `device` must be among them.

    Raises:
        FileNotFoundError: there is no job in `source`.
        ValueError: it is unfinished, or was trained for that device; or `given` holds what is the finished job's.
    """
    own = [option_of(name) for name in given if name not in retrained.GIVEN]
    if own:
        raise ValueError(f"--from takes {', '.join(own)} from the finished job: omit it")
    if "device" not in given:
        raise ValueError(f"--from needs --device, the device to train for: one of {', '.join(PROFILES)}")
    finished = stored_settings(source, given.get("model"))
    if unfinished(source):
        raise ValueError(unfinished(source))
    if device_named(given["device"]) == finished.device:
        raise ValueError(f"the job in {source} was already trained for {finished.device}")
    epochs = max(1, round(finished.epochs_qat * retrained.EPOCHS_SHARE))
    chosen = {"epochs_qat": epochs, **given, "weights": None, "from_job": str(source.resolve())}
    return replace(finished, out=out, **chosen)


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
    if settings.weights is not None and not (resume and _float_state(settings).exists()):
        fit = put(untrained, Path(settings.weights))
    with ExitStack() as own:

        def begin() -> bool:
            try:
                settings.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise files.cannot_write(settings.out / "job.json", error) from error
            (own if hold is None else hold).enter_context(files.locked(settings.out))
            continued = start(settings, dataset, resume, restart, progress, fit)
            if settings.from_job is not None:
                retrained.take_over(Path(settings.from_job), settings.out, settings.trainings)
            return continued

        resumed = processes.first_does(begin)
        if settings.weights is not None:
            if fit is None:
                *_, fit = _read_job(settings.out)
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
    if settings.weights is not None and not (resume and _float_state(settings).exists()):
        check(Path(settings.weights))


def _float_state(settings: Settings) -> Path:
    return settings.out / "training" / "float.pt"


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
    for precision in settings.precisions:
        for method in METHODS:
            progress.begin(f"{precision.upper()} {method.title}")
            if method.trained or processes.writes:
                results.outcomes.append(
                    _quantized_network(results, precision, method, progress, processes, accelerator)
                )
        if not processes.writes:
            continue
        progress.begin(f"{precision.upper()} on the runtime, every integer compared")
        for outcome in results.of(precision):
            with tempfile.TemporaryDirectory() as scratch:
                _deploy(outcome, dataset, Path(scratch) / "model.tflite")
        _deliver(results, precision)
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
        _float_state(settings),
        settings.batch_size,
        processes=processes,
        # Of a job that trains another's networks on, the finished training was copied.
        resume=resumed or settings.from_job is not None,
        accelerator=accelerator,
        on_epoch=lambda history: progress.epoch("float training", history, settings.epochs_float),
    )
    if processes.writes:
        description = _describe_network(settings, dataset) | {"state": model.state_dict()}
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
    )


def _quantized_network(
    results: Results,
    precision: str,
    method: Method,
    progress: Progress,
    processes: Processes,
    accelerator: torch.device,
) -> Outcome:
    settings, dataset = results.settings, results.dataset
    example = dataset.train.images[:2]
    bits = settings.precisions[precision]
    rules = make_rules(bits, method.ranges, dataset.value_range, results.last_layer)
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


def _describe_network(settings: Settings, dataset: Dataset) -> dict[str, Any]:
    return {
        "format": checkpoints.CHECKPOINT_FORMAT,
        "data": settings.data,
        "image_size": settings.image_size,
        "network": settings.model,
        "seed": settings.seed,
        "input_shape": list(dataset.train.images.shape[1:]),
        "class_names": list(dataset.class_names),
    }


def describe_checkpoint(settings: Settings, dataset: Dataset, outcome: Outcome) -> dict[str, Any]:
    """A checkpoint's content; `restore` is its counterpart."""
    return _describe_network(settings, dataset) | {
        "precision": outcome.precision,
        "method": outcome.method.name,
        "rules": [asdict(rule) for rule in outcome.rules],
        "state": outcome.model.state_dict(),
    }


def restore(path: Path, model: str | None = None) -> tuple[qat.PreparedModel, dict[str, Any]]:
    """The network of a checkpoint, and the checkpoint with its `profile`. Needs no data, and runs no code that the file
    names.

    Args:
        model: the network as the user names it; needed if it is not one of exactqat's own, see `models.named_in`.

    Raises:
        ValueError: the file is damaged or of another format, or the network is not the user's.
    """
    checkpoint = checkpoints.load_checkpoint(path)
    checkpoints.check_network(checkpoint, path)
    shape = checkpoint["input_shape"]
    original = new_model(named_in(path, checkpoint["network"], model), shape, len(checkpoint["class_names"]))
    try:
        rules = [qat.Rule(**rule) for rule in checkpoint["rules"]]
        # What was captured was checked when it was trained; its state fits no other.
        restored = qat.prepare(original, torch.zeros(2, *shape), rules, check=False, keep_final_activation=False)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path}: its network cannot be prepared by its rules: {error}") from error
    training.load_state(restored, checkpoint["state"], path)
    restored.eval()
    return restored, checkpoint | {"profile": restored.profile}


def restore_graph(path: Path, model: str | None = None) -> tuple[Graph, dict[str, Any]]:
    """The integer network of a checkpoint, and the checkpoint; see `restore`."""
    restored, checkpoint = restore(path, model)
    return _lowered(restored, path), checkpoint


def _lowered(restored: qat.PreparedModel, path: Path) -> Graph:
    try:
        return lower(restored)
    except (ValueError, RuntimeError, ArithmeticError) as error:
        raise ValueError(f"{path}: its network cannot be lowered: {error}") from error


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
        graph, path, codes, _runs_here(device), float_values=float_values, trained_values=trained_values,
        trained_codes={}, **_users_own(outcome.model, dataset, _runs_here(device)),
    )  # fmt: skip
    beside = beside_training(outcome.model, graph, dataset.test, codes, [device], lowered)[device]
    outcome.report = _about(ran, device, beside)
    outcome.device_predictions = beside.device_answers
    if device == profile_here(DEFAULT_KERNELS):
        outcome.device_predictions = run_on_device(graph, path, codes).argmax(1)
    outcome.device_accuracy = float((outcome.device_predictions == dataset.test.labels.numpy()).mean())


def _about(ran: Report, device: str, beside: Beside) -> Report:
    """What was found out about a device: the file on a runtime, its own if possible, and what it computes beside
    training."""
    return replace(ran, profile=device, training=beside.tensors, ran_as="" if ran.profile == device else ran.profile)


def _runs_here(profile: str) -> str:
    """The profile itself where this machine has its runtime, else the runtime's default."""
    return profile if profile in profiles_here() else DEFAULT_KERNELS


def input_codes(graph: Graph, dataset: Dataset) -> np.ndarray:
    """All test images as the device takes them, int8, with the axes of the graph's signature."""
    return codes_of(graph, dataset.test.images.numpy())[graph.inputs[0]]


def _users_own(model: qat.PreparedModel, dataset: Dataset, runs: str) -> dict[str, Any]:
    """Images as the user has them, for `verify` to feed the file with and compare with the model; nothing where the
    runtime is not that of the model's device."""
    if profile_here(runs) != model.profile:
        return {}
    return {"model": model, "data": dataset.test.images[:LAYER_IMAGES]}


def run_on_device(graph: Graph, path: Path, codes: np.ndarray) -> np.ndarray:
    """The plain file on the runtime: int8 codes of the logits, [n, classes]."""
    from ai_edge_litert.interpreter import Interpreter

    # Not by its path, which need not be UTF-8.
    interpreter = Interpreter(model_content=path.read_bytes(), num_threads=1)
    (entry,), (exit_,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.resize_tensor_input(entry["index"], codes.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(entry["index"], codes)
    interpreter.invoke()
    return np.asarray(interpreter.get_tensor(exit_["index"]))


def _deliver(results: Results, precision: str) -> None:
    """Puts the better network of a precision at its place: checkpoint.pt and model.tflite. Then every device is
    compared with its training."""
    outcome = results.chosen(precision)
    checkpoint = describe_checkpoint(results.settings, results.dataset, outcome)
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


def _delivered(out: Path, *names: str) -> list[Path]:
    """The folders below `out` that hold all of these files, finest precision first.

    Raises:
        FileNotFoundError, NotADirectoryError: there is none.
    """
    files.check_there(out)
    folders = [
        out / name
        for name in files.entries(out)
        if PRECISION.fullmatch(name) and all((out / name / file).exists() for file in names)
    ]
    if not folders and unfinished(out):
        raise FileNotFoundError(f"{unfinished(out)}. It has not delivered a network yet")
    if not folders:
        raise FileNotFoundError(
            f"no {' with a '.join(names)} beside it in a folder such as {out / 'w8a8'}; run `exactqat train` first"
            if len(names) > 1
            else f"no {names[0]} in a folder such as {out / 'w8a8'}; run `exactqat train` first"
        )
    return sorted(folders, reverse=True)


def export_directory(out: Path, model: str | None = None, headers: bool = False, name: str | None = None) -> list[Path]:
    """Writes the files of every delivered network again from its checkpoint, and gives their paths. Needs no data.

    model.tflite always, model.onnx if the package onnx is installed.

    Args:
        model: see `restore`.
        headers: write a C header for TFLite-Micro too, called like its names.
        name: what these names begin with; by default the directory's name and the precision, so that networks of
            several jobs can be part of one program. Of a job with several networks each gets its precision after it.

    Raises:
        FileNotFoundError: the directory holds no checkpoint of a delivered network.
        FileExistsError: there is a file called like a header that is none of exactqat's.
        ValueError: a checkpoint cannot be read, or `name` is no name in C. Nothing is written then.
    """
    contents: dict[Path, bytes] = {}
    folders = _delivered(out, "checkpoint.pt")
    with files.locked(out):
        for folder in folders:
            graph, checkpoint = restore_graph(folder / "checkpoint.pt", model)
            description = f"{checkpoint['precision']} {checkpoint['method']}"
            contents[folder / "model.tflite"] = tflite_bytes(graph, description)
            if importlib.util.find_spec("onnx"):
                contents[folder / "model.onnx"] = onnx_bytes(graph, description)
            if headers:
                own = f"{c_name(out.resolve().name) if name is None else name}_{folder.name}"
                own = name if name is not None and len(folders) == 1 else own
                text = c_array(graph, None, own, description, class_names=checkpoint["class_names"])
                header = folder / f"{own}.h"
                if header.exists() and not header.read_bytes().startswith(MADE_BY.encode()):
                    raise FileExistsError(
                        f"{header} already exists and was not written by exactqat: use another --name"
                    )
                contents[header] = text.encode()
        for path, content in contents.items():
            files.write_atomically(path, content)
    return list(contents)


@dataclass(frozen=True)
class Verified:
    """A delivered file on a device, and the device beside what was trained.

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


def verify_directory(
    out: Path,
    progress: Progress | None = None,
    dataset: Dataset | None = None,
    model: str | None = None,
    device: str = "",
) -> dict[str, Verified]:
    """Runs the delivered files again on a device, compares them with the simulation of the networks in the checkpoints,
    and what the device computes with what was trained.

    Args:
        model: see `restore`.
        device: a name of `devices`; by default the one that each network was trained for. Its file then runs on
            LiteRT's default kernels if this machine does not have that device's runtime.

    Raises:
        FileNotFoundError: the directory holds no delivered network.
        ValueError: a file cannot be compared.
    """
    progress = progress or Progress()
    found = {}
    folders = _delivered(out, "checkpoint.pt", "model.tflite")
    for folder in folders:
        files.check_file(folder / "model.tflite")
    with files.locked(out, writes=False):
        for folder in folders:
            progress.begin(f"{folder.name.upper()} on the runtime")
            restored, checkpoint = restore(folder / "checkpoint.pt", model)
            graph = _lowered(restored, folder / "checkpoint.pt")
            dataset = dataset or load(checkpoint["data"], checkpoint["image_size"])
            path, codes = folder / "model.tflite", input_codes(graph, dataset)
            wanted, not_run = device or cast(str, restored.profile), ""
            try:
                runs = profile_here(wanted if device else _runs_here(wanted))
            except (ValueError, ImportError) as error:
                runs, not_run = "", str(error)
            try:
                beside = beside_training(restored, graph, dataset.test, codes, [wanted])[wanted]
                if runs:
                    own = _users_own(restored, dataset, runs)
                    report = verify(graph, path, codes, runs, progress=progress.compared, trained_codes={}, **own)
                else:
                    nothing = tuple(Comparison(name, "whole graph", 0, 0, 0, False) for name in graph.outputs)
                    report = Report(wanted, (), nothing, graph.trained_for)
            except (ValueError, RuntimeError) as error:
                raise ValueError(f"{path} cannot be compared: {error}") from error
            found[folder.name] = Verified(_about(report, wanted, beside), beside, not_run)
    return found


def unfinished(out: Path) -> str:
    """A sentence on a job that has not come to its end, or on what it has not delivered yet; empty: it is finished, or
    there is no job.json to say so."""
    if not (out / "job.json").exists() or (out / "metrics.json").exists():
        return ""
    return f"{out} contains an unfinished job: continue it with `exactqat train --resume --out {shell_word(out)}`"


def npu_directory(out: Path, accelerator: str, model: str | None = None) -> dict[str, NpuFootprint]:
    """What Vela makes of every delivered network.

    Args:
        accelerator: see `deploy.npu_footprint`.
        model: see `restore`.

    Raises:
        FileNotFoundError: the directory holds no delivered network.
    """
    folders = _delivered(out, "checkpoint.pt")
    with files.locked(out, writes=False):
        return {
            folder.name: npu_footprint(restore_graph(folder / "checkpoint.pt", model)[0], accelerator)
            for folder in folders
        }


def metrics(results: Results) -> dict[str, Any]:
    """What DIR/metrics.json holds."""
    dataset, settings = results.dataset, results.settings
    return {
        "data": {
            "name": dataset.name,
            "train": len(dataset.train),
            "validation": len(dataset.validation),
            "test": len(dataset.test),
            "classes": list(dataset.class_names),
            "skipped": list(dataset.skipped),
        },
        "settings": settings.stored(),
        "device": settings.device,
        "formerly_trained_for": retrained.formerly(settings.out) if settings.from_job is not None else None,
        "ran_as": results.ran_as,
        "seconds": round(results.seconds, 2),
        "resumed": results.resumed,
        "weights": results.fit and results.fit.stored(),
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "numpy", "ai-edge-litert")},
        },
        "float": {
            "validation_accuracy": results.float_validation_accuracy,
            "test_accuracy": results.float_test_accuracy,
            "answers": results.float_predictions.tolist(),
            "parameter_bytes": results.float_bytes,
            "history": asdict(results.float_history),
        },
        "networks": {
            precision: {
                "chosen": results.chosen(precision).method.name,
                **{outcome.method.name: _outcome_metrics(results, outcome) for outcome in results.of(precision)},
            }
            for precision in settings.precisions
        },
        "widths": [asdict(width) for width in findings.widths(results)],
        "values_compared": results.values_compared,
        "values_differing": results.values_differing,
        "training_values": results.training_values,
        "training_differing": results.training_differing,
        "labels": dataset.test.labels.tolist(),
        "guessing": findings.guessing(dataset),
        "warnings": findings.warnings_on(results),
        "classes": findings.per_class(results),
        "mistakes": findings.mistakes(results),
    }


def _outcome_metrics(results: Results, outcome: Outcome) -> dict[str, Any]:
    assert outcome.report is not None
    taken: dict[str, Any] = {} if outcome.footprint is None else {"footprint": asdict(outcome.footprint)}
    beside = results.beside_float(outcome.device_predictions)
    logits_differing, logits = outcome.report.outputs_beside_training
    if outcome.elsewhere:
        taken["devices"] = {
            device: {"not_simulated": found} if isinstance(found, str) else found.stored()
            for device, found in outcome.elsewhere.items()
        }
    return taken | {
        "title": outcome.method.title,
        "validation_accuracy": outcome.validation_accuracy,
        "validation_loss": outcome.validation_loss,
        "test_accuracy": outcome.test_accuracy,
        "device_accuracy": outcome.device_accuracy,
        "file_bytes": outcome.file_bytes,
        "compressed_file_bytes": outcome.compressed_bytes,
        "values_compared": outcome.report.values,
        "values_differing": outcome.report.differing,
        "predictions_values": sum(row.values for row in outcome.report.predictions),
        "predictions_differing": outcome.report.predictions_differing,
        "training_values": outcome.report.training_values,
        "training_differing": outcome.report.training_differing,
        "training_logits": logits,
        "training_logits_differing": logits_differing,
        "beside_float": asdict(beside) | {"may_be_luck": beside.may_be_luck},
        "answers": outcome.device_predictions.tolist(),
        "packed_parameter_bytes": findings.packed_bytes(outcome),
        "layers": _layers(outcome),
        "history": asdict(outcome.history) if outcome.history else None,
    }


def _layers(outcome: Outcome) -> list[dict[str, Any]]:
    """A row for each operator and for the whole network, with its multiply-adds for one image."""
    assert outcome.report is not None
    work = [int(row["multiply_accumulates"]) for row in outcome.graph.summary()]
    counts = work + [sum(work)] * len(outcome.report.outputs)
    rows = [dict(row) for row in outcome.report.table()[: len(counts)]]
    for row, count in zip(rows, counts, strict=True):
        row["multiply_accumulates"] = count
    return rows


def write_metrics(results: Results) -> Path:
    """Writes DIR/metrics.json and gives its path."""
    path = results.settings.out / "metrics.json"
    text = json.dumps(metrics(results), indent=2)
    # Long lists of numbers, such as the answers, one to a line each would hide all else. Strings hold no ends of lines.
    text = re.sub(r"\[\n\s+-?\d+(,\n\s+-?\d+)*\n\s*\]", lambda found: re.sub(r"\n\s*", "", found[0]), text)
    files.write_atomically(path, (text + "\n").encode())
    return path
