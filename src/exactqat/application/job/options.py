# SPDX-License-Identifier: Apache-2.0
"""The user's options for a job, each declared once: its default, what is allowed, how the command line takes it, and
the text that help and the pages show.

`Settings` inherits the fields; `cli/train_options.py` makes the options of `exactqat train` from them. Imports nothing
heavy, so that help responds at once.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

# Bits of weights and of activations.
FEWEST_BITS, MOST_BITS = 2, 8
# The name of the precision given by rules.
MIXED = "mixed"
# A pattern for the names of precisions, and of the delivered folders.
PRECISION = rf"w[2-8]a[2-8]|{MIXED}"

OPTIMIZERS = {
    "adam": "Adam",
    "adamw": "Adam with decoupled weight decay of 0.01",
    "sgd": "stochastic gradient descent with Nesterov momentum of 0.9",
}
SCHEDULES = {
    "constant": "stays the same",
    "cosine": "falls to zero as a cosine",
    "step": "falls to a tenth after half of the epochs and to a hundredth after three quarters",
    "warm-up": "rises over the first tenth of the steps, then falls to zero as a cosine",
}
# The augmentations of training images, applied in this order each time they are drawn.
AUGMENTATIONS = {
    "shift": "moved by up to an eighth of their size, at least a pixel, along each axis",
    "time-shift": "moved by up to an eighth along their first axis, the time of a spectrogram",
    "flip": "mirrored left to right, every second one",
    "brightness": "made brighter or darker by up to a fifth of the range",
    "contrast": "changed in contrast by a factor from 0.75 to 1.25",
    "noise": "overlaid with noise of up to a twentieth of the range",
    "erase": "erased in a square of a quarter of their height and width",
}
BALANCED = "balanced"
TEMPERATURE = 4.0


def one_of(allowed: Mapping[str, str] | Sequence[str]) -> Callable[[Any], str]:
    """A check that accepts only these names."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}, got {value!r}")
        return value

    return check


def whole(low: int, high: int) -> Callable[[Any], int]:
    """A check that accepts whole numbers between these."""

    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"must be an integer, got {value!r}")
        if not low <= value <= high:
            raise ValueError(f"must be {f'from {low} to {high}' if value > high else f'at least {low}'}, got {value}")
        return value

    return check


def integer_in(text: str) -> int:
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,20}\s*", text, re.ASCII):
        raise ValueError(f"must be an integer, got {text!r}")
    return int(text)


def number(value: Any) -> float:
    """The finite number that a text or a number gives.

    Raises:
        ValueError: it is none.
    """
    try:
        found = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"must be a number, got {value!r}")
    return found


def rate(value: Any) -> float:
    """A learning rate."""
    found = number(value)
    if not 0 < found <= 100:
        raise ValueError(f"must be above 0 and at most 100, got {value!r}")
    return found


def widths(given: Any) -> int | tuple[int, ...]:
    """How many bits, the most first: one number, or several."""
    widths = given if isinstance(given, list | tuple) else [given]
    if not widths:
        raise ValueError("must be an integer or several, got none")
    for width in widths:
        if not isinstance(width, int) or isinstance(width, bool):
            raise ValueError(f"must be an integer or several, got {given!r}")
        if not FEWEST_BITS <= width <= MOST_BITS:
            raise ValueError(f"must be from {FEWEST_BITS} to {MOST_BITS}, got {width}")
    several = tuple(sorted(set(widths), reverse=True))
    return several if len(several) > 1 else several[0]


def widths_in(text: str) -> list[int]:
    """Bits separated by commas."""
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*(,\s*[0-9]{1,9}\s*)*", text, re.ASCII):
        raise ValueError(f"must be a number from 2 to 8, or several such as 8,6,4, got {text!r}")
    return [int(each) for each in text.split(",")]


def pairs(given: Any) -> tuple[str, ...]:
    """Bits of weights and activations, such as ("8x8", "4x4"), the most first."""
    words = re.split(r"[\s,]+", given.strip()) if isinstance(given, str) else given
    fits = isinstance(words, list | tuple) and words and all(isinstance(word, str) for word in words)
    if not fits or not all(re.fullmatch(rf"[{FEWEST_BITS}-{MOST_BITS}]x[{FEWEST_BITS}-{MOST_BITS}]", w) for w in words):
        raise ValueError(f"must be pairs of {FEWEST_BITS} to {MOST_BITS} bits such as 8x8 4x4, got {given!r}")
    return tuple(sorted(set(words), reverse=True))


def augmentations(given: Any) -> tuple[str, ...]:
    """Names from AUGMENTATIONS, in that order; "none" if there are none."""
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not names:
        raise ValueError(f"must be none or some of {', '.join(AUGMENTATIONS)}, got {given!r}")
    names = [name.strip() if isinstance(name, str) else name for name in names]
    if names == ["none"]:
        return ("none",)
    for name in names:
        if not isinstance(name, str) or name not in AUGMENTATIONS:
            raise ValueError(f"must be none alone, or some of {', '.join(AUGMENTATIONS)}, got {given!r}")
    return tuple(name for name in AUGMENTATIONS if name in names)


def class_weights(given: Any) -> str | dict[str, float]:
    """ "balanced", or a weight for each class by its name."""
    if given == BALANCED:
        return BALANCED
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"must be {BALANCED} or a weight for each class by its name, got {given!r}")
    for name, weight in given.items():
        fits = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight < math.inf
        if not isinstance(name, str) or not fits:
            raise ValueError(f"must give each class a weight above 0, got {weight!r} for {name!r}")
    return {name: float(weight) for name, weight in given.items()}


def class_weights_in(text: str) -> Any:
    """Parses a command line's value: "balanced", a JSON object, or the path of a file that holds one."""
    if text == BALANCED:
        return text
    written = text
    if not text.lstrip().startswith("{"):
        path = Path(text)
        if not text or not path.is_file():
            raise ValueError(
                f'must be {BALANCED}, a JSON object such as {{"cat": 2, "dog": 1}}, or a file that contains one; '
                f"there is no file {text!r}"
            )
        written = path.read_text("utf-8", "replace")
    try:
        found = json.loads(written)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be {BALANCED} or a JSON object with a weight for each class: {error}") from error
    return found


def split(given: Any) -> str:
    """Parts of training, validation and test, and a seed, as "70/15/15:0"."""
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})/([0-9]{1,9})(?::([0-9]{1,9}))?", str(given), re.ASCII)
    if found is None or "0" in {part.lstrip("0") or "0" for part in found.groups()[:3]}:
        raise ValueError(
            f"must be three parts above 0 of training, validation and test, such as 70/15/15, and if you like a seed "
            f"as in 70/15/15:1, got {given!r}"
        )
    *parts, seed = found.groups()
    return "/".join(str(int(part)) for part in parts) + f":{int(seed or 0)}"


def distillation(given: Any) -> str:
    """The share of the float network's answers in the loss, a temperature, and layers to compare as well, as "0.5:4" or
    "0.5:4:stem,block.*"."""
    share, *rest = str(given).split(":", 2)
    try:
        numbers = number(share), number(rest[0] if rest else TEMPERATURE)
    except ValueError:
        numbers = math.nan, math.nan
    names = [name.strip() for name in rest[1].split(",")] if len(rest) > 1 else []
    if isinstance(given, bool) or not (0 < numbers[0] <= 1 and 0 < numbers[1] <= 100) or not all(names):
        raise ValueError(
            "must be a share above 0 and at most 1, and if you like a temperature above 0 and at most 100 after a "
            f"colon, and layers after another one, as in 0.5:4 or 0.5:4:stem,block.*, got {given!r}"
        )
    return ":".join([*(f"{each:g}" for each in numbers), *([",".join(names)] if names else [])])


def distillation_parts(text: str) -> tuple[float, float, tuple[str, ...]]:
    """The share, the temperature and the layers in what `distillation` returned."""
    share, temperature, *layers = text.split(":", 2)
    return float(share), float(temperature), tuple(layers[0].split(",")) if layers else ()


def rules(given: Any) -> str:
    """Rules for the bits of layers in one line, separated by semicolons."""
    from ...kit.planning.rule_text import parse_rules, rules_text

    if not isinstance(given, str):
        raise ValueError(f"must be a text of rules such as 'stem W8A16; * W4A8', got {given!r}")
    try:
        found = parse_rules("\n".join(given.split(";")), "rules")
        lines = [line for line in rules_text(found).splitlines() if not line.startswith("#")]
        line = "; ".join(" ".join(each.split()) for each in lines)
        again = parse_rules("\n".join(line.split(";")), "rules")
    except ValueError as error:
        raise ValueError(f"must be rules such as 'stem W8A16; * W4A8': {error}") from error
    if again != found:
        raise ValueError("must name layers without semicolons and doubled spaces")
    return line


def rules_in(text: str) -> str:
    """Parses a command line's value: the path of a file of rules, or the rules, separated by semicolons."""
    path = Path(text)
    if text and path.is_file():
        from ...kit.planning.rule_text import load_rules, rules_text

        return rules_text(load_rules(path))
    if len(text.split()) < 2:
        raise ValueError(f"must be a file of rules, such as exactqat tune --plan writes; there is no file {text!r}")
    return text


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a string, got {value!r}")
    return value


def switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be True or False, got {value!r}")
    return value


def _option(
    default: Any,
    check: Callable[[Any], Any],
    help: str,
    metavar: str | None = None,
    read: Callable[[str], Any] | None = None,
    names: Sequence[str] = (),
    path: bool = False,
    *,
    group: str,
) -> Any:
    """A field.

    Args:
        check: returns a value as it is kept, or raises ValueError with what follows the name; None is allowed if it is
            the default.
        help: for the command line and its page.
        metavar: what is shown for the value there.
        read: parses a text into a value; by default `check` takes the text.
        names: on the command line, if not the field's own.
        path: the value names a file or a folder.
        group: of options in the help.
    """
    return field(
        default=default,
        metadata={
            "check": check, "help": help, "metavar": metavar, "read": read, "names": tuple(names), "path": path,
            "group": group,
        },
    )  # fmt: skip


_DATA, _NETWORK, _BITS = (functools.partial(_option, group=name) for name in ("Data", "Network", "Bits"))
_TRAINING, _RATES = (functools.partial(_option, group=name) for name in ("Training", "Learning rates and losses"))
_DEVICE = functools.partial(_option, group="Device and search")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The decisions, as `exactqat train` takes them; `Settings` says more about some of them.

    Raises:
        ValueError: one is not allowed.
    """

    data: str = _DATA(
        "digits",
        text,
        "digits (scikit-learn's, needs no download), glyphs (rendered letters), an .npz file with x and y, or a folder "
        "with one folder of images per class (or with train, val and test folders that contain them).",
    )
    split: str | None = _DATA(
        None,
        split,
        "Parts of the images for training, validation and test, and a seed that decides which; for data that are not "
        "divided yet. By default 65/15/20:0.",
        "TRAIN/VALIDATION/TEST[:SEED]",
    )
    recipe: str | None = _NETWORK(
        None,
        text,
        "Network, sizes, training and pass mark of a benchmark, for your --data: mlperf-tiny/kws, mlperf-tiny/vww, "
        "mlperf-tiny/ic or mlperf-tiny/ad. Other options replace what it says. Status 1 if the mark is missed.",
    )
    model: str = _NETWORK(
        "small_mobilenet",
        text,
        "small_mobilenet, dscnn, mobilenet_v1, mobilenet_v2, mobilenet_v3_small, resnet8 or autoencoder; timm/NAME or "
        "torchvision/NAME, if that package is installed; or module:function that builds a network.",
    )
    weights: str | None = _NETWORK(
        None,
        text,
        "Weights to start float training from: a state dict written by torch.save, or safetensors. Tensors that match "
        "by name and shape are used, the rest is reported.",
        "FILE",
        path=True,
    )
    freeze_base: bool = _NETWORK(
        False,
        switch,
        "With --weights: float training leaves what the file gave as it is and trains the rest, such as a new last "
        "layer; the last layer alone if the file gave everything. Quantization-aware training then trains all of it.",
    )
    weight_bits: Any = _BITS(
        None,
        widths,
        "Quantize weights to 2 to 8 bits, or to several widths in turn, such as 8,6,4; instead of W8A8, W4A4 and W3A4.",
        "BITS[,BITS...]",
        widths_in,
        ("--weight-bits", "-w"),
    )
    activation_bits: Any = _BITS(
        None,
        widths,
        "Likewise for activations (8 if only weights are given); each width is combined with each of the weights'.",
        "BITS[,BITS...]",
        widths_in,
        ("--activation-bits", "-a"),
    )
    bits: tuple[str, ...] | None = _BITS(
        None,
        pairs,
        "Bits of weights and of activations in pairs, such as 8x8 4x4 3x4, which is the default; a network for each.",
        "WxA [WxA...]",
        names=("--bits", "-b"),
    )
    rules: str | None = _BITS(
        None,
        rules,
        "A text file with the bits of each layer, as exactqat tune --plan writes it; instead of W8A8, W4A4 and W3A4. "
        "What it says of ranges counts too; where it says nothing, they are each method's.",
        "FILE",
        rules_in,
        path=True,
    )
    image_size: int | None = _DATA(
        None, whole(1, 2**14), "Height and width to which images are scaled, in pixels.", read=integer_in
    )
    augment: tuple[str, ...] = _DATA(
        ("shift",),
        augmentations,
        "How training images are changed at random each time they are drawn: none, or some of "
        f"{', '.join(AUGMENTATIONS)}.",
        "NAME[,NAME...]",
    )
    class_weights: Any = _RATES(
        None,
        class_weights,
        "How much each class counts in the loss: balanced (rare ones more, so that all count the same), or a file of "
        'JSON such as {"cat": 2, "dog": 1}.',
        "balanced|FILE",
        class_weights_in,
    )
    batch_size: int = _TRAINING(
        64, whole(2, 2**31 - 1), "Images per training step, over all processes.", read=integer_in
    )
    epochs_float: int = _TRAINING(60, whole(1, 2**31 - 1), "Epochs of float training.", read=integer_in)
    epochs_qat: int = _TRAINING(
        80,
        whole(1, 2**31 - 1),
        "Epochs of each quantization-aware training, the last third of them frozen; at 8 bits a quarter of that, for "
        "fine-tuning.",
        read=integer_in,
    )
    early_stopping: int | None = _TRAINING(
        None,
        whole(1, 2**31 - 1),
        "End a training after so many epochs without a lower validation loss. In quantization-aware training frozen "
        "epochs count alone, whose validation loss is that of the device's integers.",
        "EPOCHS",
        integer_in,
    )
    optimizer: str = _RATES("adam", one_of(OPTIMIZERS), f"{', '.join(OPTIMIZERS)}: what trains the weights.")
    lr: float | None = _RATES(
        None,
        rate,
        "Learning rate of float training. By default 0.004, or 0.001 from given --weights; with sgd ten times that.",
        "RATE",
    )
    lr_qat: float | None = _RATES(
        None,
        rate,
        "Learning rate of quantization-aware training. By default 0.001, or 0.0003 at 8 bits; with sgd ten times that.",
        "RATE",
    )
    lr_ranges: float | None = _RATES(
        None,
        rate,
        "Learning rate of learned ranges, of weights a fifth. By default 0.003, whatever the optimizer.",
        "RATE",
    )
    schedule: str = _RATES(
        "cosine", one_of(SCHEDULES), f"{', '.join(SCHEDULES)}: how learning rates change over a training."
    )
    distill: str | None = _RATES(
        None,
        distillation,
        "Quantization-aware training also learns the float network's answers: their share of the loss, above 0 and at "
        f"most 1, a temperature, by default {TEMPERATURE:g}, and layers whose results are learned too, such as "
        "0.5:4:features.3,features.5.*.",
        "SHARE[:TEMPERATURE[:LAYERS]]",
    )
    mixed_precision: bool = _TRAINING(
        False,
        switch,
        "Float training computes in bfloat16 where PyTorch's autocast does. Quantization-aware training stays in "
        "float32, where alone it computes what the device does.",
    )
    device: str = _DEVICE(
        "xnnpack-x86",
        text,
        "Device to train for; the frozen epochs compute its integers: xnnpack-x86, xnnpack-arm64 (LiteRT with "
        "XNNPACK), reference (LiteRT's reference kernels) or micro (TFLite-Micro).",
    )
    ptq: bool = _DEVICE(
        False,
        switch,
        "Also search the best post-training quantization on the device's integers; it is delivered if its validation "
        "loss is the lowest.",
    )
    from_search: bool = _DEVICE(
        False,
        switch,
        "Start quantization-aware training from what such a search finds (ranges, equalized and corrected weights) "
        "instead of the calibrated network.",
    )
    from_job: str | None = _DEVICE(
        None,
        text,
        "A finished job whose networks are retrained for --device with the same settings, by default for an eighth of "
        "its --epochs-qat. That job is not changed.",
        "DIR",
        names=("--from",),
        path=True,
    )
    seed: int = _TRAINING(
        0,
        whole(0, 2**63 - 1),
        "Seed for weights, order and changes of the images. The same seed gives the same bits.",
        read=integer_in,
    )

    def __post_init__(self) -> None:
        for each in declared():
            value = getattr(self, each.name)
            if value is None and each.default is None:
                continue
            try:
                kept = each.metadata["check"](value)
            except ValueError as error:
                raise ValueError(f"{each.name} {error}") from error
            object.__setattr__(self, each.name, kept)
        ways = [name for name in ("rules", "bits", "weight_bits", "activation_bits") if getattr(self, name) is not None]
        if len(ways) > 1 and ways != ["weight_bits", "activation_bits"]:
            raise ValueError(f"{ways[0]} cannot be combined with {ways[1]}: both say the bits")
        if self.freeze_base and self.weights is None:
            raise ValueError("freeze_base needs weights: it freezes what the file of weights gave")


def declared() -> tuple[Field[Any], ...]:
    """The fields, in the order of the command line."""
    return fields(Options)


def stored(value: Any) -> Any:
    """A setting in JSON form."""
    return list(value) if isinstance(value, tuple) else value


def defaults() -> dict[str, Any]:
    """The defaults, in JSON form."""
    return {each.name: stored(each.default) for each in declared()}
