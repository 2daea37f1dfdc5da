# SPDX-License-Identifier: Apache-2.0
"""What training does otherwise than evaluation: batch norms, dropout, noise, images changed at random."""

from __future__ import annotations

from typing import Any

from keras import tree

from ..core.refusals import Refused
from .items import InTraining
from .reader import Reader, layers, operations
from .reduction import channel_axis_of


@layers("BatchNormalization")
def _batch_norm(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    axis = layer.axis if isinstance(layer.axis, int) else layer.axis[0]
    tensors = [layer.gamma, layer.beta, layer.moving_mean, layer.moving_variance]
    return c.emit(
        "batch_norm",
        [x, *(c.optional(each) for each in tensors)],
        x.shape,
        module=c.layer_path(layer.moving_mean),
        epsilon=float(layer.epsilon),
        momentum=1.0 - float(layer.momentum),
        channel_axis=axis % x.rank,
        training=bool(layer.trainable) and c.trains,
        counter="",
    )


@operations("StopGradient")
def _stop(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return c.emit("identity", [args[0]], args[0].shape, expression=None, stop_gradient=True)


@layers("Dropout", "SpatialDropout1D", "SpatialDropout2D")
def _dropout(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, shape = args[0], getattr(layer, "noise_shape", None)
    if type(layer).__name__.startswith("Spatial"):
        channels = channel_axis_of(getattr(layer, "data_format", None), x.rank)
        shape = [size if axis in (0, channels) else 1 for axis, size in enumerate(x.shape)]
    return c.dropout(x, layer.rate, shape)


@layers("Attention")
def _attention(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """It drops shares by itself, without a layer."""
    symbols = tree.map_structure(c.symbol, [args, kwargs])
    return c.expand(layer, symbols[0], symbols[1], draws=bool(layer.dropout) and c.trains)


@layers("GaussianNoise", "GaussianDropout", "AlphaDropout", "StochasticDepth")
def _noise(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    return c.emit("dropout", [x], x.shape, expression=InTraining(layer)) if c.trains else x


@layers("ActivityRegularization")
def _nothing(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return args[0]


@layers("BaseImagePreprocessingLayer")
def _image(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    name = type(layer).__name__
    if name == "RandomCrop" or not (name.startswith("Rand") or name in ("MixUp", "CutMix", "AugMix")):
        raise Refused("it prepares images; do it to the data, in front of the model")
    return _noise(c, layer, args, kwargs)


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
    **dict.fromkeys(("Conv3D", "Conv3DTranspose"), "with windows over three axes, {0.kernel_size}"),
}


@layers(*_REFUSED)
def _refused(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Layers that have no place in a network, and what to do instead."""
    name = next(kind.__name__ for kind in type(layer).__mro__ if kind.__name__ in _REFUSED)
    raise Refused(_REFUSED[name].format(layer))
