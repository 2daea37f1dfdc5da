# SPDX-License-Identifier: Apache-2.0
"""Islands of real numbers in others' files: what leaves a grid, and operators that only compute in float32.

Converters leave in float32 what they have no integers for. A graph computes it in NumPy: near what runtimes compute,
whose exponentials and order of sums are their own, so no equality is claimed. What the islands begin and end with,
DEQUANTIZE and QUANTIZE, is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from .arithmetic import Arrays, Tensors, activate, broadcast_shape
from .functions import NumPyPrimitives
from .operator import FLOAT, OPERATORS, Attributes, DeviceOperator, FileOperator, Shape, register
from .profile import Profile
from .real import real_numbers
from .tensor import Tensor

ISLAND = "files: what converters leave in float32"


@register
class Dequantize(DeviceOperator):
    """Codes as the real numbers that they stand for."""

    kind = "DEQUANTIZE"
    dtypes = ("int8", "int16")
    changes_dtype = True
    version = 2
    wide_version = 3
    options = "DequantizeOptions"
    purpose = ISLAND

    def dtype(self, attributes: Attributes, stored: str = "int8") -> str:
        return FLOAT

    def results(
        self, codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
    ) -> np.ndarray:
        return real_numbers(codes[0], inputs[0])


class Floating(DeviceOperator):
    """An operator that is computed in float32 alone."""

    dtypes = ()
    floats = True
    purpose = ISLAND


class FloatUnary(Floating):
    """A function of one operand, value by value."""

    function: ClassVar[Callable[[np.ndarray], np.ndarray]]

    def float_results(
        self, codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
    ) -> np.ndarray:
        return np.asarray(type(self).function(codes[0]), np.float32)


class FloatBinary(Floating):
    """A function of two operands that broadcast, value by value."""

    operands = (2, 2)
    constants = True
    function: ClassVar[Callable[[np.ndarray, np.ndarray], np.ndarray]]

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        return broadcast_shape(shapes)

    def float_results(
        self, codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
    ) -> np.ndarray:
        return np.asarray(type(self).function(*codes), np.float32)


def clipped(lowest: float, highest: float) -> Callable[[np.ndarray], np.ndarray]:
    """Within bounds."""
    return lambda x: np.clip(x, np.float32(lowest), np.float32(highest))


def elu(x: np.ndarray) -> np.ndarray:
    """x, or exp(x) - 1 where x is negative."""
    return np.asarray(np.where(x < 0, np.expm1(np.minimum(x, 0)), x))


# Kind, what it computes, and the name of its options table.
UNARY: tuple[tuple[str, Callable[[np.ndarray], np.ndarray], str], ...] = (
    ("ELU", elu, ""),
    ("LOG", np.log, ""),
    ("SQRT", np.sqrt, ""),
    ("RSQRT", NumPyPrimitives.rsqrt, ""),
    ("SQUARE", np.square, "SquareOptions"),
    ("NEG", np.negative, "NegOptions"),
    ("SIN", np.sin, ""),
    ("COS", np.cos, "CosOptions"),
    ("SIGN", np.sign, "SignOptions"),
    ("FLOOR", np.floor, ""),
    ("CEIL", np.ceil, ""),
    ("ROUND", np.rint, ""),
    ("RELU6", clipped(0, 6), ""),
    ("RELU_N1_TO_1", clipped(-1, 1), ""),
    ("RELU_0_TO_1", clipped(0, 1), ""),
)
BINARY: tuple[tuple[str, Callable[[np.ndarray, np.ndarray], np.ndarray], str], ...] = (
    ("POW", np.power, "PowOptions"),
    ("FLOOR_DIV", np.floor_divide, "FloorDivOptions"),
    ("FLOOR_MOD", np.mod, "FloorModOptions"),
)


def _declare_functions() -> None:
    for base, rows in ((FloatUnary, UNARY), (FloatBinary, BINARY)):
        for kind, function, options in rows:
            members = {"kind": kind, "function": staticmethod(function), "options": options, "__module__": __name__}
            register(type(f"Float{kind.title().replace('_', '')}", (base,), members))


_declare_functions()


@register
class Divide(FloatBinary):
    """The quotient, followed by an activation."""

    kind = "DIV"
    attributes = {"activation": "NONE"}
    options = "DivOptions"

    def float_results(
        self, codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
    ) -> np.ndarray:
        return np.asarray(activate(NumPyPrimitives, codes[0] / codes[1], attributes), np.float32)

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> dict[str, Any]:
        return {"fusedActivationFunction": ("ActivationFunctionType", attributes["activation"])}

    def read_attributes(self, read: FileOperator) -> dict[str, Any]:
        return {"activation": read.activation()}


# Kinds that have no form in integers.
FLOATING = tuple(kind for kind, operator in OPERATORS.items() if not operator.dtypes)

__all__ = ["FLOATING", "Dequantize", "Divide", "FloatBinary", "FloatUnary"]
