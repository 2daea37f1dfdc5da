# SPDX-License-Identifier: Apache-2.0
"""Comparisons, logic, and choices by their results: what others' files make of conditions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from .arithmetic import (
    Broadcasting,
    Tensors,
    centered,
    fixed_point,
    multiply_fixed_point,
    scale_of,
)
from .movement import Movement
from .operator import BOOL, Attributes, Call, Shape, need, register
from .reduction import OverAxes, over
from .tensor import Tensor

PURPOSE = "files: a plan makes tables and products of conditions"


class Condition(Broadcasting):
    """Operands that broadcast; true or false for each value."""

    floats = True
    operands = (2, 2)
    most_axes = 4
    purpose = PURPOSE
    function: ClassVar[Callable[..., np.ndarray]]

    def dtype(self, attributes: Attributes, stored: str = "int8") -> str:
        return BOOL

    def float_results(self, call: Call) -> np.ndarray:
        return type(self).function(*call.codes)


class Compare(Condition):
    """Of two tensors, each on a grid of its own, in fixed point. Which one is larger, LiteRT takes from codes of int16
    as they are; TFLite-Micro looks at multipliers that it does not set, so nothing is claimed."""

    dtypes = ("int8", "int16")
    plain = ("int32", "int64")

    def check(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> None:
        super().check(inputs, output, attributes)
        for tensor in inputs if inputs[0].dtype not in self.plain else ():
            scale = float(scale_of(tensor))
            need(2.0**-30 <= scale < 1, f"scales must be in [2**-30, 1), got {scale:g} of {tensor.name!r}")

    def integers(self, call: Call) -> np.ndarray:
        terms = [
            multiply_fixed_point(centered(code, tensor) << 8, *fixed_point(float(scale_of(tensor))))
            for code, tensor in zip(call.codes, call.inputs, strict=True)
        ]
        return type(self).function(*terms)

    def wide_integers(self, call: Call) -> np.ndarray:
        return (self.integers if self.kind in ("EQUAL", "NOT_EQUAL") else self.plain_integers)(call)

    plain_integers = Condition.float_results


class Logic(Condition):
    """Of conditions."""

    dtypes = (BOOL,)
    floats = False
    integers = Condition.float_results


# Kind, what it computes, the name of its options table, and the version of its int8 form.
COMPARISONS: tuple[tuple[str, Callable[..., np.ndarray], str], ...] = (
    ("EQUAL", np.equal, "EqualOptions"),
    ("NOT_EQUAL", np.not_equal, "NotEqualOptions"),
    ("GREATER", np.greater, "GreaterOptions"),
    ("GREATER_EQUAL", np.greater_equal, "GreaterEqualOptions"),
    ("LESS", np.less, "LessOptions"),
    ("LESS_EQUAL", np.less_equal, "LessEqualOptions"),
)
LOGIC: tuple[tuple[str, Callable[..., np.ndarray], str], ...] = (
    ("LOGICAL_AND", np.logical_and, "LogicalAndOptions"),
    ("LOGICAL_OR", np.logical_or, "LogicalOrOptions"),
)


def _declare() -> None:
    for base, rows, version in ((Compare, COMPARISONS, 2), (Logic, LOGIC, 1)):
        for kind, function, options in rows:
            members = {"kind": kind, "function": staticmethod(function), "options": options, "version": version}
            register(type(kind.title().replace("_", ""), (base,), {**members, "__module__": __name__}))


_declare()


@register
class LogicalNot(Logic):
    """The other one."""

    kind = "LOGICAL_NOT"
    operands = (1, 1)
    options = "LogicalNotOptions"
    function = staticmethod(np.logical_not)


class ReduceLogic(OverAxes):
    """Of the conditions along `axes`."""

    dtypes = (BOOL,)
    version = 1
    purpose = PURPOSE
    function: ClassVar[np.ufunc]

    def dtype(self, attributes: Attributes, stored: str = "int8") -> str:
        return BOOL

    def integers(self, call: Call) -> np.ndarray:
        return np.asarray(self.function.reduce(call.codes[0], **over(call.attributes)))


@register
class ReduceAll(ReduceLogic):
    """Whether all of them hold."""

    kind = "REDUCE_ALL"
    function = np.logical_and


@register
class ReduceAny(ReduceLogic):
    """Whether one of them holds."""

    kind = "REDUCE_ANY"
    function = np.logical_or


class Choice(Broadcasting, Movement):
    """Where a condition holds the first tensor's value, elsewhere the second's; both lie on the grid of the result."""

    operands = (3, 3)
    conditions = (0,)
    purpose = PURPOSE

    def integers(self, call: Call) -> np.ndarray:
        return np.where(*call.codes)


@register
class SelectV2(Choice):
    """Of operands that broadcast."""

    kind = "SELECT_V2"
    options = "SelectV2Options"
    most_axes = 4


@register
class Select(Choice):
    """Of operands of one shape."""

    kind = "SELECT"
    options = "SelectOptions"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        need(len(set(shapes)) == 1, f"operands must have one shape, got {list(shapes)}")
        return tuple(shapes[0])
