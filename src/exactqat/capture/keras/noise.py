# SPDX-License-Identifier: Apache-2.0
"""What training does otherwise than evaluation, and gradients of the user's own."""

from __future__ import annotations

from typing import Any

from ..core.builder import Moving
from ..core.expressions import CustomGradient, Dropout
from ..core.refusals import Refused
from ..core.safeguards import SAFEGUARDS
from .converter import Converter, layers, operations
from .items import InTraining, Item
from .reduction import channel_axis_of


@operations("CustomGradientOperation")
def _custom_gradient(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The forward computation, and a step that keeps the user's gradient."""
    if operation.results is None:
        (x,) = args
        known = c.by_values(lambda given: operation.forward(given), x)
        if known is None:
            raise Refused(f"it has a custom gradient, and computes by other means than keras.ops ({operation.failure})")
        results = [known]
    else:
        results = [c.item(each) for each in operation.results]
    if not SAFEGUARDS.custom_gradients:
        return results
    if kwargs or not all(isinstance(each, Item) for each in args):
        raise Refused("a function with a custom gradient is called with other arguments than tensors")
    made = []
    for index, result in enumerate(results):
        if not isinstance(result, Moving):
            raise Refused("it has a custom gradient and a result that does not depend on the input")
        expression = CustomGradient(operation.results_of, index)
        made.append(
            c.emit("custom_gradient", [result, *args], result.shape, label="custom_gradient", expression=expression)
        )
    return made


@operations("StopGradient")
def _stop(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return c.emit("identity", [args[0]], args[0].shape, expression=None, stop_gradient=True)


@operations("DropoutOperation")
def _dropout_operation(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not c.training:
        raise Refused("it drops values in evaluation, too")
    if not operation.rate:
        return x
    shape = operation.noise_shape
    kept = () if shape is None else tuple(at for at, size in enumerate(shape) if size == 1 and x.shape[at] != 1)
    c.drew = True
    return c.emit("dropout", [x], x.shape, expression=Dropout(float(operation.rate), kept))


@layers("Dropout", "SpatialDropout1D", "SpatialDropout2D")
def _dropout(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not layer.rate or not c.training:
        return x
    kept: tuple[int, ...] = ()
    if type(layer).__name__.startswith("Spatial"):
        axis = channel_axis_of(getattr(layer, "data_format", None), x.rank)
        kept = tuple(at for at in range(1, x.rank) if at != axis)
    elif layer.noise_shape is not None:
        kept = tuple(at for at, size in enumerate(layer.noise_shape) if size == 1 and x.shape[at] != 1)
    return c.emit("dropout", [x], x.shape, expression=Dropout(float(layer.rate), kept))


@layers("GaussianNoise", "GaussianDropout", "AlphaDropout", "StochasticDepth")
def _noise(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if not c.training:
        return args[0]
    return c.emit("dropout", [args[0]], args[0].shape, expression=InTraining(layer))


@layers("ActivityRegularization")
def _nothing(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return args[0]


@layers("BaseImagePreprocessingLayer")
def _image(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, name = args[0], type(layer).__name__
    if name == "RandomCrop" or not (name.startswith("Rand") or name in ("MixUp", "CutMix", "AugMix")):
        raise Refused("it prepares images; do it to the data, in front of the model")
    if not c.training:
        return x
    return c.emit("dropout", [x], x.shape, expression=InTraining(layer))
