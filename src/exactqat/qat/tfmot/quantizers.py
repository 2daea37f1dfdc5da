# SPDX-License-Identifier: Apache-2.0
"""Quantizers under tfmot's names and arguments. They hold settings; what trains is the `Rule` that they stand for."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["AllValuesQuantizer", "FixedQuantizer", "LastValueQuantizer", "MovingAverageQuantizer", "Quantizer"]


@dataclass(unsafe_hash=True)
class Quantizer:
    """What a `QuantizeConfig` gives for a tensor. Your own, with a `__call__`, has no integers on a device."""

    def get_config(self) -> dict[str, float]:
        """The arguments it was made with."""
        return asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, float]) -> Quantizer:
        return cls(**config)


@dataclass(unsafe_hash=True)
class _FromData(Quantizer):
    """
    Attributes:
        num_bits: bits of a code.
        per_axis: one range for each channel; for weights.
        symmetric: the range is ``[-a, a]``.
        narrow_range: the lowest code is left out.
    """

    num_bits: int
    per_axis: bool
    symmetric: bool
    narrow_range: bool


class LastValueQuantizer(_FromData):
    """The range of the last batch: for a weight its own, for an activation `Rule(ranges="last_batch")`."""


class MovingAverageQuantizer(_FromData):
    """Activations: `Rule(ranges="ema", ema_decay=0.999)`."""


class AllValuesQuantizer(_FromData):
    """Activations: `Rule(ranges="min_max")`, over all batches given to `qat.keras.calibrate`."""


@dataclass(unsafe_hash=True)
class FixedQuantizer(Quantizer):
    """Activations: `Rule(ranges="fixed", fixed_range=(init_min, init_max))`."""

    num_bits: int
    init_min: float
    init_max: float
    narrow_range: bool
