# SPDX-License-Identifier: Apache-2.0
"""The user's settings for a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...kit.planning.rule_text import parse_rules
from ...kit.planning.rules import Rule
from ..report.results import Mark, Method
from ..report.text import option_of, option_value, shell_word
from . import manner, training
from .devices import device_named
from .models import is_known
from .options import MIXED, MOST_BITS, Options, declared, stored
from .recipes import chosen, recipe_named

# Bits of weights and of activations, if the user gives none.
PRECISIONS = ((8, 8), (4, 4), (3, 4))


METHODS = (
    Method("ptq_min_max", "PTQ, min/max ranges", "min_max", trained=False),
    Method("ptq_least_error", "PTQ, least-error ranges", "learned", trained=False),
    Method("qat_ema", "QAT, EMA ranges", "ema", trained=True),
    Method("qat_learned", "QAT, learned ranges", "learned", trained=True),
)

# Under `Settings.ptq`.
SEARCHED = Method("ptq_searched", "PTQ, searched", "min_max", trained=False, searched=True)


@dataclass(frozen=True)
class Settings(Options):
    """The user's settings. `options.py` declares all but the directory; more about some of them here.

    Attributes:
        out: the directory that holds everything the job writes.
        data: as in `data.load`.
        recipe: a name in `recipes.RECIPES`, whose pass mark is required; the other settings are as given, see
            `recipes.chosen`.
        model: as in `models.network`.
        weight_bits, activation_bits: 2..8, or several, each weight width with each activation width; if either is
            given, only these precisions, the other with 8 unless also given. Stored with the most bits first, a single
            one as a number.
        rules: bits of each layer in one line, such as "stem W8A16; * W4A8"; see `qat.load_rules`.
        epochs_qat: of each quantization-aware training with fewer than eight bits; see `epochs_of`.
        batch_size: images in a training step, over all processes.
        image_size: height and width to which images are scaled; None leaves them unscaled.
        class_weights: "balanced", or a weight for each class by its name.
        device: whose integers training computes in its last phase, as in `qat.prepare`; see `devices`.
        weights: path of the weights from which float training starts, as in `weights.put`; None: a new network's.
        ptq: also search for the best post-training quantization (`tune.search`), which may be what is delivered.
        from_search: start all quantization-aware training from what such a search found.
        from_job: directory of a finished job, trained for another device, whose networks continue training for this
            one; see `retrained`.

    Raises:
        ValueError: a value is not allowed, or has the wrong type.
    """

    out: Path

    def __post_init__(self) -> None:
        super().__post_init__()
        device_named(self.device)
        if self.recipe is not None:
            recipe_named(self.recipe)
        if self.reconstructs:
            for name in ("distill", "class_weights", "split", "image_size", "rules"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} cannot be combined with recipe {self.recipe}, which has no classes of images"
                    )
            for name in ("ptq", "from_search"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} cannot be combined with recipe {self.recipe}, which has no classes of images"
                    )

    @property
    def layer_rules(self) -> tuple[Rule, ...]:
        """The rules that set the bits of each layer; none: `precisions` do."""
        return () if self.rules is None else parse_rules("\n".join(self.rules.split(";")))

    @property
    def precisions(self) -> dict[str, tuple[int, int]]:
        """Bits of weights and activations by name, such as ``{"w4a4": (4, 4)}``; the most bits first. For rules, the
        fewest."""
        if self.rules is not None:
            of_weights, of_activations = zip(*self.widths, strict=True)
            return {MIXED: (min(of_weights), min(of_activations))}
        pairs: Sequence[tuple[int, int]] = PRECISIONS
        if self.bits is not None:
            pairs = [(int(pair[0]), int(pair[2])) for pair in self.bits]
        if self.weight_bits is not None or self.activation_bits is not None:
            of_weights, of_activations = (
                (bits,) if isinstance(bits, int) else bits
                for bits in (self.weight_bits or MOST_BITS, self.activation_bits or MOST_BITS)
            )
            pairs = [(weights, activations) for weights in of_weights for activations in of_activations]
        return {f"w{weights}a{activations}": (weights, activations) for weights, activations in pairs}

    @property
    def widths(self) -> list[tuple[int, int]]:
        """All bits of weights and activations that occur."""
        if self.rules is not None:
            return [(rule.weight_bits, rule.activation_bits) for rule in self.layer_rules]
        return list(self.precisions.values())

    def epochs_of(self, bits: tuple[int, int]) -> int:
        """Epochs of quantization-aware training; a quarter with eight bits, which only fine-tunes."""
        share = training.FINE_TUNING_SHARE if min(bits) >= 8 else 1
        return max(1, round(self.epochs_qat * share))

    @property
    def methods(self) -> tuple[Method, ...]:
        """How each precision is quantized, in this order."""
        return (*METHODS, SEARCHED) if self.ptq else METHODS

    @property
    def trainings(self) -> list[str]:
        """Names of all quantization-aware training runs, in order."""
        return [f"{bits}-{method.name}" for bits in self.precisions for method in self.methods if method.trained]

    @property
    def mark(self) -> Mark | None:
        """What the recipe requires of the device."""
        return None if self.recipe is None else recipe_named(self.recipe).mark

    @property
    def reconstructs(self) -> bool:
        """Whether the network is to reconstruct its input, and finds anomalies by what it cannot reconstruct."""
        return self.recipe is not None and recipe_named(self.recipe).reconstructs

    @property
    def noun(self) -> str:
        """What an example of the data is called."""
        return "image" if self.recipe is None else recipe_named(self.recipe).noun

    def training_sentences(self) -> list[str]:
        """How the networks are trained, for readers."""
        task = (
            f"The network learns to give normal {self.noun}s back; one that it gives back worse than 95% of the "
            f"training {self.noun}s counts as an anomaly."
        )
        return [task] * self.reconstructs + manner.sentences(self, self.noun)

    def stored(self) -> dict[str, Any]:
        """All settings but the directory, for job.json."""
        return {entry.name: stored(getattr(self, entry.name)) for entry in declared()}

    def commands(self) -> tuple[str, ...]:
        """The commands that repeat the job and verify its files again."""
        out = shell_word(self.out)
        defaults = Settings(self.out, **chosen({"recipe": self.recipe})).stored() | {"recipe": None}
        # If a job continues training another job's networks, the other settings are that job's.
        shown = self.stored()
        if self.from_job is not None:
            shown = {key: shown[key] for key in ("from_job", "device", "epochs_qat")}
        options = "".join(
            f" {option_of(key)}" + ("" if value is True else f" {shell_word(option_value(value))}")
            for key, value in shown.items()
            if self.from_job is not None or value != defaults[key]
        )
        # The user vouches for a network that is not one of exactqat's own.
        model = "" if is_known(self.model) else f" --model {shell_word(self.model)}"
        if self.from_job is not None:
            options += model
        return f"exactqat train --restart --out {out}{options}", f"exactqat verify {out}{model}"
