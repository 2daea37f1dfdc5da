# SPDX-License-Identifier: Apache-2.0
"""Layers whose training is another computation, batch norm among them, and layers that have no place in a network."""

from __future__ import annotations

import keras

from ..core.builder import Moving
from ..core.refusals import Refused
from .items import InTraining, Item, Result
from .reader import Reader, layers


@layers("BatchNormalization")
def _batch_norm(c: Reader, layer: keras.Layer, x: Moving, mask: Item | None = None) -> Result:
    axis = layer.axis if isinstance(layer.axis, int) else layer.axis[0]
    mean = c.weight(layer.moving_mean)
    return c.emit(
        "batch_norm",
        [x, c.weight(layer.gamma), c.weight(layer.beta), mean, c.weight(layer.moving_variance)],
        x.shape,
        module=c.module_of(mean),
        epsilon=float(layer.epsilon),
        momentum=1.0 - float(layer.momentum),
        channel_axis=axis % x.rank,
        training=bool(layer.trainable) and c.trains,
        counter="",
    )


@layers("BaseImagePreprocessingLayer")
def _image(c: Reader, layer: keras.Layer, x: Moving) -> Result:
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
def _refused(c: Reader, layer: keras.Layer, *args: object, **kwargs: object) -> Result:
    """Layers that have no place in a network, and what to do instead."""
    raise Refused(next(_REFUSED[kind.__name__] for kind in type(layer).__mro__ if kind.__name__ in _REFUSED))
