# SPDX-License-Identifier: Apache-2.0
"""`experimental.default_n_bit` under tfmot's names."""

from __future__ import annotations

from types import SimpleNamespace

from .rules import Scheme


class DefaultNBitQuantizeScheme(Scheme):
    """Any number of bits: 2 to 8 for weights, 2 to 8 or 16 for activations."""

    def __init__(self, disable_per_axis: bool = False, num_bits_weight: int = 8, num_bits_activation: int = 8) -> None:
        super().__init__(num_bits_weight, num_bits_activation, disable_per_axis)


default_n_bit = SimpleNamespace(DefaultNBitQuantizeScheme=DefaultNBitQuantizeScheme)
