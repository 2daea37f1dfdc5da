# SPDX-License-Identifier: Apache-2.0
"""Layers that have no place in a network, and what to do instead."""

from __future__ import annotations

from typing import Any

from ..core.refusals import Refused
from .converter import Converter, layers


@layers("Masking")
def _masking(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    raise Refused("its mask depends on the input; give sequences of one length, without it")


@layers(
    "STFTSpectrogram", "MelSpectrogram", "Discretization", "CategoryEncoding", "Hashing", "HashedCrossing",
    "StringLookup", "IntegerLookup", "TextVectorization",
)  # fmt: skip
def _data(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    raise Refused("it prepares data; do it in front of the model")
