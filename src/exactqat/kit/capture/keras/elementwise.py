# SPDX-License-Identifier: Apache-2.0
"""Operations value by value."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from ...device.functions import named_by
from ..core import masks
from ..core.builder import Moving
from ..core.refusals import Refused
from ..core.sizes import broadcast
from .items import Fixed, Item, numpy_of
from .reader import Reader, layers, operations

_KINDS = {
    **named_by("keras"),
    **{"Add": "add", "Subtract": "sub", "Multiply": "mul", "Divide": "div", "TrueDivide": "div"},
    **{"Maximum": "maximum", "Minimum": "minimum"},
}
# They have no kind of their own, but may be a known function, or a part of one.
_FUNCTIONS = ("LeakyRelu", "Elu", "Gelu", "Celu", "Softplus", "HardTanh", "ReLU", "Clip")
# Of numbers that only a choice is made by; the function that the choice is part of may be a known one.
_HOW = {"Greater": "gt", "GreaterEqual": "ge", "Less": "lt", "LessEqual": "le", "Equal": "eq", "NotEqual": "ne"}
_COMPARISONS = (*_HOW, "Where")
_LOGIC = {"LogicalAnd": "and", "LogicalOr": "or", "LogicalNot": "not"}


@operations(*_KINDS, *_FUNCTIONS, *_COMPARISONS)
def _elementwise(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    operands = [*args, *kwargs.values()]
    name = type(operation).__name__
    moving = [each for each in operands if isinstance(each, Moving)]
    shape = broadcast(*[each.shape for each in operands if isinstance(each, Item)])
    if name in _HOW and (mask := masks.compared(c, _HOW[name], operands[0], operands[1], shape)) is not None:
        return mask
    if name == "Where" and masks.is_truth(c, operands[0]):
        return masks.chosen(c, operands[0], operands[1], operands[2], shape)
    if (mask := masks.arithmetic(c, _KINDS.get(name, ""), operands, shape)) is not None:
        return mask

    def evaluate(*given: Any) -> np.ndarray:
        tensors = [keras.ops.convert_to_tensor(np.asarray(each, np.float32)) for each in given]
        return numpy_of(operation.call(*tensors)).astype(np.float64)

    samples = c.sampled(operands, evaluate, vars(operation).values()) if moving[0].shape == shape else {}
    known = c.recognized(samples, moving, shape)
    if known is not None:
        return known
    if name in _COMPARISONS:
        return c.emit("unsupported", moving, shape, samples=samples, label=name)
    if name not in _KINDS:
        given = {key: each for key, each in vars(operation).items() if isinstance(each, int | float) and key[0] != "_"}
        words = ", ".join(f"{key}={each}" for key, each in given.items() if key != "built")
        raise Refused(f"with {words}" if words else "")
    operands = [each.number if isinstance(each, Fixed) and each.number is not None else each for each in operands]
    return c.emit(_KINDS[name], operands, shape, samples=samples)


@operations(*_LOGIC)
def _logic(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    operands = [*args, *kwargs.values()]
    shape = broadcast(*[each.shape for each in operands if isinstance(each, Item)])
    made = masks.combined(c, _LOGIC[type(operation).__name__], operands, shape)
    if made is None:
        raise Refused("of truth values that the network computes; give masks as inputs of integers or truth values")
    return made


@operations("ZerosLike", "OnesLike")
def _alike(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    made = np.zeros if type(operation).__name__ == "ZerosLike" else np.ones
    return c.fixed_of(made(c.for_one(args[0].shape), np.float32))


@operations("HardShrink", "SoftShrink", "Threshold")
def _shrink(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    name = type(operation).__name__
    if name == "Threshold":
        return c.emit("threshold", [x], x.shape, least=float(operation.threshold), value=float(operation.default_value))
    return c.emit(name.lower(), [x], x.shape, width=float(operation.threshold))


@operations("TanhShrink")
def _tanh_shrink(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    return c.emit("sub", [x, c.emit("tanh", [x], x.shape)], x.shape)


@operations("Log1p", "Expm1")
def _beside_one(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    if type(operation).__name__ == "Log1p":
        return c.emit("log", [c.emit("add", [x, 1.0], x.shape)], x.shape)
    return c.emit("sub", [c.emit("exp", [x], x.shape), 1.0], x.shape)


@operations("Glu")
def _glu(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axis = int(operation.axis) % x.rank
    half = x.shape[axis] // 2
    one, two = c.cut(x, axis, 0, half), c.cut(x, axis, half, 2 * half)
    return c.emit("mul", [one, c.emit("sigmoid", [two], two.shape)], one.shape)


@operations("Power")
def _power(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, exponent = args
    exponent = exponent.number if isinstance(exponent, Fixed) else exponent
    if not isinstance(x, Moving) or not isinstance(exponent, int | float):
        raise Refused("its exponent is no number")
    return c.emit("square", [x], x.shape) if exponent == 2 else c.emit("pow", [x], x.shape, exponent=float(exponent))


@operations("Softmax", "LogSoftmax")
def _softmax(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    if not isinstance(operation.axis, int):
        raise Refused(f"with axis={operation.axis}; it is computed over one axis")
    kind = "softmax" if type(operation).__name__ == "Softmax" else "log_softmax"
    return c.emit(kind, [x], x.shape, axis=operation.axis % x.rank)


@layers("Softmax")
def _softmax_layer(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if not isinstance(layer.axis, int) and len(layer.axis) > 1:
        raise Refused(f"with axis={layer.axis}; it is computed over one axis")
    x, mask = args[0], next((each for each in (*args[1:], *kwargs.values()) if each is not None), None)
    if not isinstance(x, Moving):
        return c.expand(layer, args, kwargs)
    (axis,) = [layer.axis] if isinstance(layer.axis, int) else layer.axis
    if mask is None:
        return c.emit("softmax", [x], x.shape, axis=axis % x.rank)
    shown = masks.as_truth(c, mask) if isinstance(mask, Moving) else None
    if isinstance(mask, Moving) and shown is None:
        raise Refused("with a mask that the network computes; give it as an input of integers or truth values")
    if shown is None:
        values = np.asarray(mask.data, np.float32) > 0.5
        hiding: Any = Fixed(data=np.where(values, 0.0, masks.HIDDEN).astype(np.float32), shape=values.shape)
        factor: Any = c.fixed_of(values.astype(np.float32))
    else:
        hiding, factor = masks.hiding(c, shown), shown
    scores = c.emit("add", [x, hiding], x.shape)
    # Where nothing is shown, nothing is chosen.
    return c.emit("mul", [c.emit("softmax", [scores], x.shape, axis=axis % x.rank), factor], x.shape)


@operations("Cast", "Copy", "ConvertToTensor")
def _same(c: Reader, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    dtype = getattr(operation, "dtype", None)
    if str(dtype) == "bool" and isinstance(args[0], Moving):
        truth = masks.as_truth(c, args[0])
        if truth is None:
            raise Refused("truth values made of numbers that the network computes")
        return truth
    whole = isinstance(args[0], Moving) and args[0].name in c.whole_inputs | c.wholes | c.truths | c.counted
    if dtype is not None and "float" not in str(dtype) and not whole:
        raise Refused("whole numbers made of real ones")
    return args[0]


@layers("PReLU")
def _prelu(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, alpha = args[0], c.weight(layer.alpha)
    if any(size != 1 for size in alpha.shape[:-1]):
        # A slope for each place, Keras' default: x + (slope - 1) * min(x, 0). Slopes begin at 0, which has no scale.
        below = c.emit("minimum", [x, 0.0], x.shape)
        less = c.then(alpha, alpha.shape, lambda array: array - 1.0)
        return c.emit("add", [x, c.emit("mul", [below, less], x.shape)], x.shape)
    slope = c.then(alpha, (alpha.shape[-1],), lambda array: array.reshape((-1,)))
    return c.emit("prelu", [x, slope], x.shape, module=c.layer_path(layer.alpha), channel_axis=x.rank - 1)


@layers("Rescaling")
def _rescaling(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    scale, offset = (np.asarray(each, np.float32) for each in (layer.scale, layer.offset))
    scaled = c.emit("mul", [x, Fixed(data=scale, shape=scale.shape)], x.shape)
    return c.emit("add", [scaled, Fixed(data=offset, shape=offset.shape)], x.shape) if offset.any() else scaled


@layers("Normalization")
def _normalization(c: Reader, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    mean, deviation = numpy_of(layer.mean), np.maximum(np.sqrt(numpy_of(layer.variance)), 1e-7)
    # (x - mean) / deviation, or the way back.
    scale, offset = (deviation, mean) if layer.invert else (1 / deviation, -mean / deviation)
    scaled = c.emit("mul", [x, Fixed(data=scale, shape=scale.shape)], x.shape)
    return c.emit("add", [scaled, Fixed(data=offset, shape=offset.shape)], x.shape)
