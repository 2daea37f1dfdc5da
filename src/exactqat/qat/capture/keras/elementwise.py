# SPDX-License-Identifier: Apache-2.0
"""Operations value by value."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from ....kit.device.functions import named_by
from ..core import masks
from ..core.builder import Moving
from ..core.refusals import Refused
from ..core.sizes import broadcast
from .items import Fixed, Item, Result, numpy_of
from .reader import OPERATIONS, Reader, layers, operations

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
def _elementwise(c: Reader, operation: keras.Operation, *operands: Item) -> Result:
    name = type(operation).__name__
    moving = [operand for operand in operands if isinstance(operand, Moving)]
    shape = broadcast(*[operand.shape for operand in operands if isinstance(operand, Item)])
    if name in _HOW and (mask := masks.compared(c, _HOW[name], operands[0], operands[1], shape)) is not None:
        return mask
    if name == "Where" and masks.is_truth(c, condition := operands[0]):
        assert isinstance(condition, Moving)
        return masks.chosen(c, condition, operands[1], operands[2], shape)
    if (mask := masks.arithmetic(c, _KINDS.get(name, ""), operands, shape)) is not None:
        return mask

    def evaluate(*arrays: object) -> np.ndarray:
        tensors = [keras.ops.convert_to_tensor(np.asarray(array, np.float32)) for array in arrays]
        return numpy_of(operation.call(*tensors)).astype(np.float64)

    samples = c.sampled(operands, evaluate, vars(operation).values()) if moving[0].shape == shape else {}
    known = c.recognized(samples, moving, shape)
    if known is not None:
        return known
    if name in _COMPARISONS:
        return c.emit("unsupported", moving, shape, samples=samples, label=name)
    if name not in _KINDS:
        fields = {key: data for key, data in vars(operation).items() if isinstance(data, int | float) and key[0] != "_"}
        words = ", ".join(f"{key}={number}" for key, number in fields.items() if key != "built")
        raise Refused(f"with {words}" if words else "")
    read = [item.number if isinstance(item, Fixed) and item.number is not None else item for item in operands]
    return c.emit(_KINDS[name], read, shape, samples=samples)


@operations(*_LOGIC)
def _logic(c: Reader, operation: keras.Operation, *operands: Item) -> Result:
    shape = broadcast(*[operand.shape for operand in operands if isinstance(operand, Item)])
    mask = masks.combined(c, _LOGIC[type(operation).__name__], operands, shape)
    if mask is None:
        raise Refused("of truth values that the network computes; give masks as inputs of integers or truth values")
    return mask


def _glu(c: Reader, operation: keras.Operation, x: Moving) -> Result:
    axis = int(operation.axis) % x.rank
    one, two = c.sections(x, axis, [x.shape[axis] // 2] * 2)
    return c.emit("mul", [one, c.emit("sigmoid", [two], two.shape)], one.shape)


OPERATIONS.update(
    {
        "ZerosLike": lambda c, how, x: c.fixed_of(np.zeros(c.for_one(x.shape), np.float32)),
        "OnesLike": lambda c, how, x: c.fixed_of(np.ones(c.for_one(x.shape), np.float32)),
        "HardShrink": lambda c, how, x: c.emit("hardshrink", [x], x.shape, width=float(how.threshold)),
        "SoftShrink": lambda c, how, x: c.emit("softshrink", [x], x.shape, width=float(how.threshold)),
        "Threshold": lambda c, how, x: c.emit(
            "threshold", [x], x.shape, least=float(how.threshold), value=float(how.default_value)
        ),
        # What the network has no kind for, in kinds that it has.
        "TanhShrink": lambda c, how, x: c.emit("sub", [x, c.emit("tanh", [x], x.shape)], x.shape),
        "Log1p": lambda c, how, x: c.emit("log", [c.emit("add", [x, 1.0], x.shape)], x.shape),
        "Expm1": lambda c, how, x: c.emit("sub", [c.emit("exp", [x], x.shape), 1.0], x.shape),
        "Glu": _glu,
        "StopGradient": lambda c, how, x: c.emit("identity", [x], x.shape, expression=None, stop_gradient=True),
    }
)


@operations("Power")
def _power(c: Reader, operation: keras.Operation, x1: object, x2: object) -> Result:
    exponent = x2.number if isinstance(x2, Fixed) else x2
    if not isinstance(x1, Moving) or not isinstance(exponent, int | float):
        raise Refused("its exponent is no number")
    if exponent == 2:
        return c.emit("square", [x1], x1.shape)
    return c.emit("pow", [x1], x1.shape, exponent=float(exponent))


@operations("Softmax", "LogSoftmax")
@layers("Softmax")
def _softmax(c: Reader, how: Any, x: Moving, mask: Item | None = None) -> Result:
    """An operation, or a layer, which may have a mask."""
    axes = [how.axis] if isinstance(how.axis, int) else list(how.axis)
    if len(axes) != 1:
        raise Refused(f"with axis={how.axis}; it is computed over one axis")
    axis = axes[0] % x.rank
    if mask is None:
        return c.emit("log_softmax" if type(how).__name__ == "LogSoftmax" else "softmax", [x], x.shape, axis=axis)
    if isinstance(mask, Moving):
        factor: Any = c.truth_of(mask)
        hiding: Any = masks.hiding(c, factor)
    else:
        values = np.asarray(mask.data, np.float32) > 0.5
        hiding = c.fixed_of(np.where(values, 0.0, masks.HIDDEN).astype(np.float32))
        factor = c.fixed_of(values.astype(np.float32))
    scores = c.emit("add", [x, hiding], x.shape)
    # Where nothing is shown, nothing is chosen.
    return c.emit("mul", [c.emit("softmax", [scores], x.shape, axis=axis), factor], x.shape)


@operations("Cast", "Copy", "ConvertToTensor")
def _same(c: Reader, operation: keras.Operation, x: Moving) -> Result:
    word = str(getattr(operation, "dtype", None) or "float")
    if word == "bool":
        truth = masks.as_truth(c, x)
        if truth is None:
            raise Refused("truth values made of numbers that the network computes")
        return truth
    if "float" not in word and x.name not in c.whole_inputs | c.wholes | c.truths | c.counted:
        raise Refused("whole numbers made of real ones")
    return x


@layers("PReLU")
def _prelu(c: Reader, layer: keras.Layer, x: Moving) -> Result:
    alpha = c.weight(layer.alpha)
    if any(size != 1 for size in alpha.shape[:-1]):
        # A slope for each place, Keras' default: x + (slope - 1) * min(x, 0). Slopes begin at 0, which has no scale.
        below = c.emit("minimum", [x, 0.0], x.shape)
        less = c.then(alpha, alpha.shape, lambda array: array - 1.0)
        return c.emit("add", [x, c.emit("mul", [below, less], x.shape)], x.shape)
    slope = c.then(alpha, (alpha.shape[-1],), lambda array: array.reshape((-1,)))
    return c.emit("prelu", [x, slope], x.shape, module=c.module_of(alpha), channel_axis=x.rank - 1)


@layers("Rescaling", "Normalization")
def _linear(c: Reader, layer: keras.Layer, x: Moving) -> Result:
    """A factor and a sum for each value: (x - mean) / deviation, or the way back."""
    if isinstance(layer, keras.layers.Rescaling):
        scale, offset = np.asarray(layer.scale, np.float32), np.asarray(layer.offset, np.float32)
    else:
        mean, deviation = numpy_of(layer.mean), np.maximum(np.sqrt(numpy_of(layer.variance)), 1e-7)
        scale, offset = (deviation, mean) if layer.invert else (1 / deviation, -mean / deviation)
    product = c.emit("mul", [x, c.fixed_of(scale)], x.shape)
    return c.emit("add", [product, c.fixed_of(offset)], x.shape) if offset.any() else product
