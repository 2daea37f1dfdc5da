# SPDX-License-Identifier: Apache-2.0
"""Models in files that Keras 2 wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import keras

# What Keras 2 wrote for every layer of a kind, and Keras 3 does not know: nothing else was possible.
_SAYING_NOTHING = {"groups": 1, "time_major": False}
_LAYERS = (
    "DepthwiseConv1D", "DepthwiseConv2D", "SeparableConv1D", "SeparableConv2D", "Conv1DTranspose", "Conv2DTranspose",
    "Conv3DTranspose", "SimpleRNN", "LSTM", "GRU", "RNN",
)  # fmt: skip


def load_h5(path: str | os.PathLike[str], custom_objects: Mapping[str, Any] | None = None) -> keras.Model:
    """The float model in a .h5 file of Keras 2 or Keras 3, for `prepare`.

    Keras 3 refuses many files of Keras 2, such as those with a DepthwiseConv2D, because of settings that layers have no
    longer ("Unrecognized keyword arguments passed to DepthwiseConv2D: {'groups': 1}"). These are left out here; layers
    and weights are those of the file. The model is not compiled: the optimizer's state stays in the file.

    Args:
        custom_objects: your own layers and functions by name, as for `keras.models.load_model`.

    Raises:
        OSError: there is no such file, or it is not HDF5.
        ValueError: the file holds no model, only weights, or a layer has settings that Keras 3 cannot compute.
    """
    known = {name: _lenient(getattr(keras.layers, name)) for name in _LAYERS if hasattr(keras.layers, name)}
    return keras.models.load_model(os.fspath(path), {**known, **(custom_objects or {})}, compile=False)


def _lenient(layer: type[keras.layers.Layer]) -> type[keras.layers.Layer]:
    """A class that makes a layer of Keras' own from a configuration of Keras 2."""

    def from_config(_: type[keras.layers.Layer], config: dict[str, Any]) -> keras.layers.Layer:
        nothing = {name for name, value in _SAYING_NOTHING.items() if config.get(name) == value}
        try:
            return layer.from_config(dict(config))
        except (TypeError, ValueError):
            if not nothing:
                raise
            return layer.from_config({name: value for name, value in config.items() if name not in nothing})

    return type(layer.__name__, (layer,), {"from_config": classmethod(from_config)})
