# SPDX-License-Identifier: Apache-2.0
"""Layers whose training is another computation, and layers that have no place in a network."""

from __future__ import annotations

from typing import Any

from ..core.builder import Moving
from ..core.refusals import Refused
from .items import InTraining
from .reader import Reader, layers, operations


@operations("StopGradient")
def _stop(c: Reader, operation: Any, x: Moving) -> Any:
    return c.emit("identity", [x], x.shape, expression=None, stop_gradient=True)


@layers("BaseImagePreprocessingLayer")
def _image(c: Reader, layer: Any, x: Moving) -> Any:
    """Images changed at random in training; other layers of noise do nothing in evaluation, so they are known."""
    name = type(layer).__name__
    if name == "RandomCrop" or not (name.startswith("Rand") or name in ("MixUp", "CutMix", "AugMix")):
        raise Refused("it prepares images; do it to the data, in front of the model")
    return c.emit("dropout", [x], x.shape, expression=InTraining(layer)) if c.trains else x


_IN_FRONT = "it prepares data; do it in front of the model"
_DATA = (
    *("STFTSpectrogram", "MelSpectrogram", "Discretization", "CategoryEncoding", "Hashing", "HashedCrossing"),
    *("StringLookup", "IntegerLookup", "TextVectorization"),
)
_REFUSED: dict[str, str] = {
    **dict.fromkeys(_DATA, _IN_FRONT),
    "Masking": "its mask depends on the input; give sequences of one length, without it",
    "SpectralNormalization": "it divides its layer's kernel again in training; give the layer inside, which holds the "
    "divided kernel",
}


@layers(*_REFUSED)
def _refused(c: Reader, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Layers that have no place in a network, and what to do instead."""
    raise Refused(next(_REFUSED[kind.__name__] for kind in type(layer).__mro__ if kind.__name__ in _REFUSED))
