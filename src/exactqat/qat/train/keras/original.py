# SPDX-License-Identifier: Apache-2.0
"""What a prepared model has to know of the user's Keras model: its inputs, its own training, what `adapt` found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from keras import ops


def _inputs_of(model: object) -> Any:
    """The symbolic inputs of a model, nested as it takes them; None of a subclass, which does not know them."""
    return getattr(getattr(model, "_functional", None) or model, "_inputs_struct", None)


def as_nested(model: Any, shapes: Any) -> Any:
    """One shape alone, of a model whose only input is in a list (as files of Keras 2 have it), in a list."""
    alone = isinstance(shapes, tuple) and isinstance(_inputs_of(model), list | tuple)
    return [shapes] if alone and all(size is None or isinstance(size, int) for size in shapes) else shapes


def shapes_of(model: object) -> Any:
    """Shapes of a model's inputs, nested as it takes them."""
    inputs = _inputs_of(model)
    if inputs is None:
        raise ValueError("the model does not know its inputs: give example, a batch of them")
    shapes = keras.tree.map_structure(lambda tensor: tuple(tensor.shape), inputs)
    if isinstance(shapes, list) and len(shapes) == 1:
        shapes = shapes[0]
    flat = keras.tree.flatten(inputs)
    if any(size is None for tensor in flat for size in tensor.shape[1:]):
        raise ValueError(
            f"the model takes inputs of shape {[tuple(tensor.shape) for tensor in flat]}; a device's network has fixed "
            "sizes: give example, a batch of the size that is to be deployed"
        )
    return shapes


# How a model trains, evaluates and predicts; a class may define its own.
_STEPS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics", "make_train_function", "fit")


def own_steps(model: object) -> list[str]:
    """Those of `_STEPS` that the user has written."""
    classes = [base for base in type(model).__mro__ if not base.__module__.startswith("keras.")]
    return [name for name in _STEPS if name in vars(model) or any(name in vars(base) for base in classes)]


def _adapted(model: Any) -> list[Any]:
    """Layers that compute with what `adapt` has shown them: numbers of the network, but not variables."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Normalization)]


def statistics_of(model: object, names: Mapping[int, str]) -> dict[str, Any]:
    """What `adapt` has found; a model's configuration does not hold it."""
    variables = [variable for layer in _adapted(model) for variable in layer.variables]
    return {names[id(variable)]: ops.convert_to_numpy(variable.value).tolist() for variable in variables}


def give_statistics(model: object, names: Mapping[int, str], statistics: Mapping[str, Any]) -> None:
    for layer in _adapted(model):
        for variable in layer.variables:
            variable.assign(np.asarray(statistics[names[id(variable)]], variable.dtype))
        layer.finalize_state()


def as_tuples(shapes: Any) -> Any:
    """Shapes as they were before they were written down as JSON."""
    if isinstance(shapes, Mapping):
        return {key: as_tuples(shape) for key, shape in shapes.items()}
    if all(size is None or isinstance(size, int) for size in shapes):
        return tuple(shapes)
    return type(shapes)(as_tuples(shape) for shape in shapes)
