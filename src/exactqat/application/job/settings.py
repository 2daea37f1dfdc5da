# SPDX-License-Identifier: Apache-2.0
"""The user's settings for a job, each declared once: its default, what is allowed, and what help says of it.

Options, help, job.json and the report follow from the fields of `Settings`, and help from its docstring. Imports
nothing heavy, so that help responds at once.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ...kit.device.profile import PACKAGED, PROFILES, formerly, profile_named, that_run, with_alias
from ...kit.display import shell_word
from . import recipes

if TYPE_CHECKING:
    from ...qat import RangePolicy, Rule

# Bits of weights and of activations, and those if the user gives none.
FEWEST_BITS, MOST_BITS = 2, 8
PRECISIONS = ((8, 8), (4, 4), (3, 4))
# The name of the precision given by rules, and a pattern for all names of precisions.
MIXED = "mixed"
PRECISION = rf"w[2-8]a[2-8]|{MIXED}"
# Share at eight bits of the epochs at fewer bits: eight bits are fine enough to keep what float training found.
FINE_TUNING_SHARE = 1 / 4

OPTIMIZERS = ("adam", "adamw", "sgd")
SCHEDULES = ("constant", "cosine", "step", "warm-up")
# The augmentations of training images, applied in this order each time they are drawn.
AUGMENTATIONS = ("shift", "time-shift", "flip", "brightness", "contrast", "noise")


@dataclass(frozen=True)
class Method:
    """One way to quantize: with training or without, and where activation ranges come from.

    searched: by `tune.search`, which starts from such ranges.
    """

    name: str
    title: str
    ranges: RangePolicy
    trained: bool
    searched: bool = False


METHODS = (
    Method("ptq_min_max", "PTQ, min/max ranges", "min_max", trained=False),
    Method("ptq_least_error", "PTQ, least-error ranges", "learned", trained=False),
    Method("qat_ema", "QAT, EMA ranges", "ema", trained=True),
    Method("qat_learned", "QAT, learned ranges", "learned", trained=True),
)
# Under `Settings.ptq`.
SEARCHED = Method("ptq_searched", "PTQ, searched", "min_max", trained=False, searched=True)


# Each check returns a setting as it is kept, from a text of the command line or a value of job.json, or raises
# ValueError with what follows the setting's name.
def refuse(allowed: str, value: object) -> NoReturn:
    raise ValueError(f"must be {allowed}, got {value!r}")


def text(value: object) -> str:
    return value if isinstance(value, str) else refuse("a string", value)


def path(value: object) -> str:
    """Not empty, as from an unset variable: for pathlib that is the working directory."""
    if text(value):
        return text(value)
    raise ValueError("must not be empty")


def switch(value: object) -> bool:
    return value if isinstance(value, bool) else refuse("True or False", value)


def one_of(allowed: Iterable[str]) -> Callable[[object], str]:
    return lambda value: str(value) if value in tuple(allowed) else refuse(f"one of {', '.join(allowed)}", value)


def whole(low: int, high: int = 2**31 - 1) -> Callable[[object], int]:
    def check(value: object) -> int:
        digits = isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,20}\s*", value, re.ASCII)
        number = int(str(value)) if digits else value
        if type(number) is not int:
            refuse("an integer", value)
        limits = f"from {low} to {high}" if high < 2**31 - 1 or number > high else f"at least {low}"
        return number if low <= number <= high else refuse(limits, number)

    return check


def real(high: float) -> Callable[[object], float]:
    def check(value: object) -> float:
        try:
            number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            refuse("a number", value)
        return number if 0 < number <= high else refuse(f"above 0 and at most {high:g}", value)

    return check


def widths(value: object) -> tuple[int, ...]:
    """Numbers of bits, the most first."""
    words = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    if not words:
        raise ValueError("must be a number of bits or several, such as 8,6,4, got none")
    return tuple(sorted(set(map(whole(FEWEST_BITS, MOST_BITS), words)), reverse=True))


def pairs(value: object) -> tuple[str, ...]:
    """Bits of weights and activations, such as ("8x8", "4x4"), the most first."""
    words = re.split(r"[\s,]+", value.strip()) if isinstance(value, str) else value
    pair = f"[{FEWEST_BITS}-{MOST_BITS}]x[{FEWEST_BITS}-{MOST_BITS}]"
    if isinstance(words, list | tuple) and words and all(re.fullmatch(pair, str(word)) for word in words):
        return tuple(sorted(set(words), reverse=True))
    return refuse(f"pairs of {FEWEST_BITS} to {MOST_BITS} bits such as 8x8 4x4", value)


def augmentations(value: object) -> tuple[str, ...]:
    """Names from AUGMENTATIONS, in that order; "none" if there are none."""
    words = value.split(",") if isinstance(value, str) else value
    names = [str(word).strip() for word in words] if isinstance(words, list | tuple) else []
    if names == ["none"]:
        return ("none",)
    if not names or not set(names) <= set(AUGMENTATIONS):
        refuse(f"none alone, or some of {', '.join(AUGMENTATIONS)}", value)
    return tuple(name for name in AUGMENTATIONS if name in names)


def split(value: object) -> str:
    """Parts of training, validation and test, and a seed, as "70/15/15:0"."""
    matched = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})/([0-9]{1,9})(?::([0-9]{1,9}))?", str(value), re.ASCII)
    parts = [] if matched is None else [int(part or 0) for part in matched.groups()]
    if not parts or not all(parts[:3]):
        refuse("three parts above 0 of training, validation and test, such as 70/15/15, or 70/15/15:1 with seed", value)
    return "/".join(map(str, parts[:3])) + f":{parts[3]}"


def rules(value: object) -> str:
    """Rules for the bits of layers in one line, separated by semicolons."""
    from ...kit.planning.rule_text import parse_rules, rules_text

    try:
        parsed = parse_rules(text(value).replace(";", "\n"), "rules")
        lines = [line for line in rules_text(parsed).splitlines() if not line.startswith("#")]
    except ValueError as error:
        raise ValueError(f"must be rules such as 'stem W8A16; * W4A8': {error}") from error
    return "; ".join(" ".join(rule.split()) for rule in lines)


def rules_in(value: str) -> str:
    """The rules in a file, or the text itself, which holds rules separated by semicolons."""
    from ...kit.planning.rule_text import load_rules, rules_text

    if value and Path(value).is_file():
        return rules_text(load_rules(Path(value)))
    if len(value.split()) < 2:
        raise ValueError(f"must be a file of rules, such as exactqat tune --plan writes; there is no file {value!r}")
    return value


def device_named(name: object) -> str:
    """A device that a job can be trained for; of a file, or what one says, the name of the device that it declares."""
    name = text(name)
    if name.endswith(".json") or name.startswith("{") or name in PACKAGED:
        try:
            name = profile_named(name).name
        except OSError as error:
            raise ValueError(f"{name} cannot be read: {error.strerror}") from error
    if name in that_run(".tflite"):
        return name
    advice = f"; it is now called {formerly(name)}" if formerly(name) else ""
    if alike := [profile.name for profile in with_alias(name)]:
        advice = f"; it rounds differently on different processors: use {' or '.join(alike)}"
    elif re.fullmatch(r"cpu|cuda(:\d+)?", name):
        advice = f"; to choose where networks train, use --accelerator {name}"
    known = dict.fromkeys((*that_run(".tflite"), *PACKAGED))
    raise ValueError(f"must be one of {', '.join(known)}, or a device's file, got {name!r}{advice}")


def setting(group: str, default: Any, check: Callable[[object], object], metavar: str = "", *names: str) -> Any:
    """A field.

    Args:
        group: of options in the help.
        check: see above; None is allowed if it is the default.
        metavar: what help shows for the value.
        names: on the command line, if not the field's own.
    """
    return field(default=default, metadata={"group": group, "check": check, "metavar": metavar, "names": names})


_DATA, _NETWORK, _BITS = (functools.partial(setting, group) for group in ("Data", "Network", "Bits"))
_TRAINING, _RATES = (functools.partial(setting, group) for group in ("Training", "Learning rates and losses"))
_DEVICE = functools.partial(setting, "Device and search")


@dataclass(frozen=True)
class Settings:
    """The user's settings; `out` is the directory that holds everything the job writes. What follows is the help.

    Attributes:
        data: digits (scikit-learn's, needs no download), an .npz file with x and y, or a folder with one folder of
            images per class (or with train, val and test folders that contain them).
        split: Parts of the images for training, validation and test, and a seed that decides which; for data that are
            not divided yet. By default 65/15/20:0.
        recipe: Network, sizes, training and pass mark of a benchmark, for your --data: mlperf-tiny/kws, sww, vww
            or ic. Other options replace what it says. Status 1 if the mark is missed.
        model: small_mobilenet, dscnn, dscnn_1d, mobilenet_v1 or resnet8; timm/NAME or torchvision/NAME, if that package
            is installed; or module:function that builds a network.
        weights: Weights to start float training from: a state dict written by torch.save, or safetensors; also another
            job's float/checkpoint.pt. Tensors that match by name and shape are used, the rest is reported.
        weight_bits: Quantize weights to 2 to 8 bits, or to several widths in turn, such as 8,6,4; instead of W8A8,
            W4A4 and W3A4.
        activation_bits: Likewise for activations (8 if only weights are given); each width is combined with each of
            the weights'.
        bits: Bits of weights and of activations in pairs, such as 8x8 4x4 3x4, which is the default; a network for
            each.
        rules: A text file with the bits of each layer, as exactqat tune --plan writes it; instead of W8A8, W4A4 and
            W3A4. What it says of ranges counts too; where it says nothing, they are each method's.
        image_size: Height and width to which images are scaled, in pixels.
        augment: How training images are changed at random each time they are drawn: none, or some of shift,
            time-shift, flip, brightness, contrast, noise.
        class_weights: balanced: rare classes count more in the loss, so that all count the same.
        batch_size: Images per training step, over all processes.
        epochs_float: Epochs of float training; with 0, the network is that of --weights.
        epochs_qat: Epochs of each quantization-aware training, the last third of them frozen; at 8 bits a quarter of
            that, for fine-tuning.
        early_stopping: End a training after so many epochs without a lower validation loss. In quantization-aware
            training frozen epochs count alone, whose validation loss is that of the device's integers.
        mixed_precision: Float training computes in bfloat16 where PyTorch's autocast does. Quantization-aware training
            stays in float32, where alone it computes what the device does.
        optimizer: adam, adamw, sgd: what trains the weights.
        lr: Learning rate of float training. By default 0.004, or 0.001 from given --weights; with sgd ten times that.
        lr_qat: Learning rate of quantization-aware training. By default 0.001, or 0.0003 at 8 bits; with sgd ten times
            that.
        lr_ranges: Learning rate of learned ranges, of weights a fifth. By default 0.003, whatever the optimizer.
        schedule: constant, cosine, step, warm-up: how learning rates change over a training.
        distill: Quantization-aware training also learns the float network's answers: their share of the loss, above 0
            and at most 1.
        device: Device to train for; the frozen epochs compute its integers: xnnpack-x86, xnnpack-arm64 (LiteRT with
            XNNPACK), reference (LiteRT's reference kernels), micro (TFLite-Micro), tosa (TOSA's
            reference model), or a device's file DEVICE.json.
        ptq: Also search the best post-training quantization on the device's integers.
        seed: Seed for weights, order and changes of the images. The same seed gives the same bits.
    """

    out: Path
    data: str = _DATA("digits", text)
    split: str | None = _DATA(None, split, "TRAIN/VALIDATION/TEST[:SEED]")
    recipe: str | None = _NETWORK(None, text)
    model: str = _NETWORK("small_mobilenet", text)
    weights: str | None = _NETWORK(None, path, "FILE")
    weight_bits: tuple[int, ...] | None = _BITS(None, widths, "BITS[,BITS...]", "--weight-bits", "-w")
    activation_bits: tuple[int, ...] | None = _BITS(None, widths, "BITS[,BITS...]", "--activation-bits", "-a")
    bits: tuple[str, ...] | None = _BITS(None, pairs, "WxA [WxA...]", "--bits", "-b")
    rules: str | None = _BITS(None, rules, "FILE")
    image_size: int | None = _DATA(None, whole(1, 2**14), "INTEGER")
    augment: tuple[str, ...] = _DATA(("shift",), augmentations, "NAME[,NAME...]")
    class_weights: str | None = _RATES(None, one_of(["balanced"]), "balanced")
    batch_size: int = _TRAINING(64, whole(2), "INTEGER")
    epochs_float: int = _TRAINING(60, whole(0), "INTEGER")
    epochs_qat: int = _TRAINING(80, whole(1), "INTEGER")
    early_stopping: int | None = _TRAINING(None, whole(1), "EPOCHS")
    mixed_precision: bool = _TRAINING(False, switch)
    optimizer: str = _RATES("adam", one_of(OPTIMIZERS))
    lr: float | None = _RATES(None, real(100), "RATE")
    lr_qat: float | None = _RATES(None, real(100), "RATE")
    lr_ranges: float | None = _RATES(None, real(100), "RATE")
    schedule: str = _RATES("cosine", one_of(SCHEDULES))
    distill: float | None = _RATES(None, real(1), "SHARE")
    device: str = _DEVICE("xnnpack-x86", device_named)
    ptq: bool = _DEVICE(False, switch)
    seed: int = _TRAINING(0, whole(0, 2**63 - 1), "INTEGER")

    def __post_init__(self) -> None:
        for entry in declared():
            value = getattr(self, entry.name)
            if value is None and entry.default is None:
                continue
            try:
                object.__setattr__(self, entry.name, entry.metadata["check"](value))
            except ValueError as error:
                raise ValueError(f"{entry.name} {error}") from error
        ways = [name for name in ("rules", "bits", "weight_bits", "activation_bits") if getattr(self, name) is not None]
        if len(ways) > 1 and ways != ["weight_bits", "activation_bits"]:
            raise ValueError(f"{ways[0]} cannot be combined with {ways[1]}: both say the bits")
        if self.epochs_float == 0 and self.weights is None:
            raise ValueError("epochs_float must be at least 1 without weights, got 0")
        if self.recipe is not None:
            recipes.recipe_named(self.recipe)

    @property
    def layer_rules(self) -> tuple[Rule, ...]:
        """The rules that set the bits of each layer; none: `precisions` do."""
        from ...kit.planning.rule_text import parse_rules

        return () if self.rules is None else parse_rules(self.rules.replace(";", "\n"))

    @property
    def precisions(self) -> dict[str, tuple[int, int]]:
        """Bits of weights and activations by name, such as ``{"w4a4": (4, 4)}``; the most bits first. For rules, the
        fewest."""
        if self.rules is not None:
            bits = [(rule.weight_bits, rule.activation_bits) for rule in self.layer_rules]
            of_weights, of_activations = zip(*bits, strict=True)
            return {MIXED: (min(of_weights), min(of_activations))}
        chosen: Iterable[tuple[int, int]] = PRECISIONS
        if self.bits is not None:
            chosen = [(int(pair[0]), int(pair[2])) for pair in self.bits]
        elif self.weight_bits is not None or self.activation_bits is not None:
            of_weights, of_activations = (bits or (MOST_BITS,) for bits in (self.weight_bits, self.activation_bits))
            chosen = [(weights, activations) for weights in of_weights for activations in of_activations]
        return {f"w{weights}a{activations}": (weights, activations) for weights, activations in chosen}

    def epochs_of(self, bits: tuple[int, int]) -> int:
        """Epochs of quantization-aware training; a quarter with eight bits, which only fine-tunes."""
        return max(1, round(self.epochs_qat * (FINE_TUNING_SHARE if min(bits) >= 8 else 1)))

    @property
    def methods(self) -> tuple[Method, ...]:
        """How each precision is quantized, in this order."""
        return (*METHODS, SEARCHED) if self.ptq else METHODS

    @property
    def trainings(self) -> list[str]:
        """Names of all trainings, in order."""
        quantized = [f"{bits}-{method.name}" for bits in self.precisions for method in self.methods if method.trained]
        return (["float"] if self.epochs_float else []) + quantized

    @property
    def noun(self) -> str:
        """What an example of the data is called."""
        return "image" if self.recipe is None else recipes.recipe_named(self.recipe).noun

    def stored(self) -> dict[str, Any]:
        """All settings but the directory, for job.json."""
        values = {entry.name: getattr(self, entry.name) for entry in declared()}
        values["device"] = PROFILES[self.device].stored
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def options(self) -> str:
        """What a command line says of these settings: all that are neither defaults nor the recipe's."""
        device = f"{self.device}.json" if PROFILES[self.device].data else self.device
        defaults = Settings(self.out, **recipes.chosen({"recipe": self.recipe})).stored() | {"recipe": None}
        return "".join(
            f" {option_of(name)}" + ("" if value is True else f" {shell_word(option_value(value))}")
            for name, value in (self.stored() | {"device": device}).items()
            if value != defaults[name]
        )

    def commands(self) -> tuple[str, ...]:
        """The commands that repeat the job and verify its files again."""
        from .models import is_known

        # The user vouches for a network that is not one of exactqat's own.
        model = "" if is_known(self.model) else f" --model {shell_word(self.model)}"
        out = shell_word(self.out)
        return f"exactqat train --restart --out {out}{self.options()}", f"exactqat verify {out}{model}"


def declared() -> list[Field[Any]]:
    """The settings, in the order of the command line."""
    return [entry for entry in fields(Settings) if entry.metadata]


def documented(thing: object) -> Mapping[str, str]:
    """What the docstring says of each argument or attribute: the help of its option."""
    section = re.search(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)+)", inspect.getdoc(thing) or "", re.MULTILINE)
    matches = re.findall(r"^    (\w+): ((?:.*\n?(?:        .*\n?)*))", section[1] if section else "", re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in matches}


def option_value(value: object) -> str:
    """A setting as its option takes it: several are separated by commas."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def option_of(name: str) -> str:
    """The option of `exactqat train` that decides a setting."""
    return "--" + name.replace("_", "-")
