# SPDX-License-Identifier: Apache-2.0
"""What makes a calibrated network more accurate on the device without training and without targets."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def reestimate(model: object, data: object) -> Any:
    """Batch norms re-estimated on the device's arithmetic: gamma and beta are set so that each layer's sums have the
    means and deviations on the device that they have in the float network with the same weights, one layer after the
    other.

    Args:
        model: a prepared and calibrated PyTorch or Keras model, not frozen, which is changed in place; for JAX
            ``(prepared, params, state)``.
        data: inputs [examples, ...], at most some hundreds of them, or ``(inputs, targets)`` or a loader of such pairs,
            whose targets are left out; several inputs as a dictionary by name.

    Returns:
        The model; for JAX the new ``(params, state)``.

    Raises:
        ValueError: the model is frozen, it has no layer for this, or its parameters do not express the result.
        TypeError: the model is not prepared, or data is something else.
        MissingData: it is not calibrated.
    """
    return _adjusted(model, data, "batch_norm")


def correct_biases(model: object, data: object) -> Any:
    """Biases corrected: as `reestimate`, with the means alone, in all layers that have a bias or a batch norm.

    Args, Returns, Raises: see `reestimate`.
    """
    return _adjusted(model, data, "bias")


def round_weights(model: object, data: object) -> Any:
    """Weights rounded up or down in view of one another, so that the sums of each layer change least for the codes that
    it gets on the device; below 8 bits with ranges that clip. Biases are corrected on the way.

    Args, Returns, Raises: see `reestimate`. The weights of the result are those that its codes stand for.
    """
    return _adjusted(model, data, "rounding")


def equalize(model: object, data: object) -> Any:
    """Cross-layer equalization: channels of layers are scaled by powers of two to similar ranges, and the weights of
    what reads them by the inverse; the float network stays the same. All ranges become the extremes that data shows.

    Args, Returns, Raises: see `reestimate`.
    """
    return _adjusted(model, data, "equalization")


def _adjusted(model: object, data: object, method: str) -> Any:
    # By name: the search, which has these, uses this wing.
    return import_module("exactqat.tune.search").adjusted(model, data, method)
