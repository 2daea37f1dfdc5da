# SPDX-License-Identifier: Apache-2.0
"""Quantizers under tfmot's names and arguments. They hold settings; what trains is the `Rule` that they stand for."""

from __future__ import annotations

from typing import Any

__all__ = ["AllValuesQuantizer", "FixedQuantizer", "LastValueQuantizer", "MovingAverageQuantizer", "Quantizer"]


class Quantizer:
    """What a `QuantizeConfig` gives for a tensor. Your own, with a `__call__`, has no integers on a device."""

    _names: tuple[str, ...] = ()

    def get_config(self) -> dict[str, Any]:
        """The arguments it was made with."""
        return {name: getattr(self, name) for name in self._names}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Quantizer:
        return cls(**config)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Quantizer) and self.get_config() == other.get_config()

    def __hash__(self) -> int:
        return hash((type(self), *sorted(self.get_config().items())))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.get_config().items())})"


class _FromData(Quantizer):
    _names = ("num_bits", "per_axis", "symmetric", "narrow_range")

    def __init__(self, num_bits: int, per_axis: bool, symmetric: bool, narrow_range: bool) -> None:
        """
        Args:
            num_bits: bits of a code.
            per_axis: one range for each channel; for weights.
            symmetric: the range is ``[-a, a]``.
            narrow_range: the lowest code is left out.
        """
        self.num_bits = num_bits
        self.per_axis = per_axis
        self.symmetric = symmetric
        self.narrow_range = narrow_range


class LastValueQuantizer(_FromData):
    """The range of the last batch: for a weight its own, for an activation `Rule(ranges="last_batch")`."""


class MovingAverageQuantizer(_FromData):
    """Activations: `Rule(ranges="ema", ema_decay=0.999)`."""


class AllValuesQuantizer(_FromData):
    """Activations: `Rule(ranges="min_max")`, over all batches given to `qat.keras.calibrate`."""


class FixedQuantizer(Quantizer):
    """Activations: `Rule(ranges="fixed", fixed_range=(init_min, init_max))`."""

    _names = ("num_bits", "init_min", "init_max", "narrow_range")

    def __init__(self, num_bits: int, init_min: float, init_max: float, narrow_range: bool) -> None:
        self.num_bits = num_bits
        self.init_min = init_min
        self.init_max = init_max
        self.narrow_range = narrow_range
