# SPDX-License-Identifier: Apache-2.0
"""Islands of real numbers in others' files: what leaves a grid, and operators that only compute in float32.

Converters leave in float32 what they have no integers for. A graph computes it in NumPy: near what runtimes compute,
whose exponentials and order of sums are their own, so no equality is claimed. What the islands begin and end with,
DEQUANTIZE and QUANTIZE, is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from .arithmetic import Arrays, Tensors, broadcast_shape
from .operator import FLOAT, OPERATORS, Attributes, DeviceOperator, Shape, register
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


# Kind, what it computes, and the name of its options table.
UNARY: tuple[tuple[str, Callable[[np.ndarray], np.ndarray], str], ...] = (
    ("SQUARE", np.square, "SquareOptions"),
    ("NEG", np.negative, "NegOptions"),
    ("SIN", np.sin, ""),
    ("COS", np.cos, "CosOptions"),
    ("SIGN", np.sign, "SignOptions"),
    ("FLOOR", np.floor, ""),
    ("CEIL", np.ceil, ""),
    ("ROUND", np.rint, ""),
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


# Kinds that have no form in integers.
FLOATING = tuple(kind for kind, operator in OPERATORS.items() if not operator.dtypes)

__all__ = ["FLOATING", "Dequantize", "FloatBinary", "FloatUnary"]
