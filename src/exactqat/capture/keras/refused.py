# SPDX-License-Identifier: Apache-2.0
"""Layers that have no place in a network, and what to do instead."""

from __future__ import annotations

from typing import Any

from ..core.refusals import Refused
from .converter import Converter, layers

_IN_FRONT = "it prepares data; do it in front of the model"
_DATA = (
    *("STFTSpectrogram", "MelSpectrogram", "Discretization", "CategoryEncoding", "Hashing", "HashedCrossing"),
    *("StringLookup", "IntegerLookup", "TextVectorization"),
)
REFUSED: dict[str, str] = {
    **dict.fromkeys(_DATA, _IN_FRONT),
    "Masking": "its mask depends on the input; give sequences of one length, without it",
    "SpectralNormalization": "it divides its layer's kernel again in training; give the layer inside, which holds the "
    "divided kernel",
    **dict.fromkeys(("Conv3D", "Conv3DTranspose"), "with windows over three axes, {0.kernel_size}"),
}


def _reason(layer: Any) -> str:
    return next(REFUSED[each.__name__] for each in type(layer).__mro__ if each.__name__ in REFUSED).format(layer)


@layers(*REFUSED)
def _refused(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    raise Refused(_reason(layer))
