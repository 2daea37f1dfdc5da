# SPDX-License-Identifier: Apache-2.0
"""What the user decides about a job."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..device import DEFAULT_PROFILE
from ..report.results import Method
from ..report.text import option_of, option_value, shell_word
from . import training
from .devices import device_named
from .models import NETWORKS

# Bits of weights and of activations, if the user names none.
PRECISIONS = ((8, 8), (4, 4), (3, 4))
PRECISION = re.compile("w[2-8]a[2-8]")


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
    def methods(self) -> tuple[Method, ...]:
        """How each precision is quantized, in this order."""
        return METHODS

    @property
    def trainings(self) -> list[str]:
        """Names of all quantization-aware trainings, in their order."""
        return [f"{bits}-{method.name}" for bits in self.precisions for method in self.methods if method.trained]

    def stored(self) -> dict[str, Any]:
        """All of them but the directory, for job.json."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "out"}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def commands(self) -> tuple[str, ...]:
        """What repeats the job, and what verifies its files again."""
        out, defaults = shell_word(self.out), Settings(self.out).stored()
        # Of a job that trains another's networks on, the other settings are that one's.
        shown = self.stored()
        if self.from_job is not None:
            shown = {key: shown[key] for key in ("from_job", "device", "epochs_qat")}
        options = "".join(
            f" {option_of(key)} {shell_word(option_value(value))}"
            for key, value in shown.items()
            if self.from_job is not None or value != defaults[key]
        )
        # The user vouches for a network that is not one of exactqat's own.
        model = "" if self.model in NETWORKS else f" --model {shell_word(self.model)}"
        if self.from_job is not None:
            options += model
        return f"exactqat train --restart --out {out}{options}", f"exactqat verify {out}{model}"


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
