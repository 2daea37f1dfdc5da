# SPDX-License-Identifier: Apache-2.0
"""What a declaration says of one call: arrays as shapes and dtypes, the kernel and its numbers, how it may be cut."""

import math
import string
import types
from collections.abc import Mapping
from typing import Annotated, NamedTuple

# Of an operator's attribute, and those of a call in order.
Value = bool | int | float | str | tuple[int, ...]
Attributes = tuple[tuple[str, Value], ...]


class TensorSpec(NamedTuple):
    """An array as the declarations see it: its shape and the name of its dtype."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


# How a declaration marks an array parameter: what its rule sees of it is the specification.
Tensor = TensorSpec
# The same for ranges and statistics: a few numbers about the data, at least float32, which may be given as numbers of
# any kind.
Range = Annotated[TensorSpec, "range"]


class Lowering(NamedTuple):
    """A checked call: what it returns and which kernel computes it from which numbers."""

    results: tuple[TensorSpec, ...]
    kernel: str
    numbers: Mapping[str, int | float]


class Axes(NamedTuple):
    """How one call may be cut into calls on parts of its arrays, or several calls of one kind be made one.

    operands, results: a letter for each dimension of each array; dimensions of one letter are cut together. A leading
    "." means any number of further dimensions in front, which mean the same in all arrays that have it. "/" is a
    mask of 2 bits for each element, four to a byte, of an array with ".". "-" is a dimension of an operand that is
    ignored.
    sums: for each result the letters that it is a sum over: what the parts of a cut along one of them give is added up.
    Results without a letter that is not among them do not depend on anything along it.
    whole: letters along which nothing may be cut, or, with `Operator.by_parts`, not without the other parts' sums; "?"
    is one along which nothing is ever cut.
    sizes: attributes that hold sizes of dimensions, and the letters of these.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    sums: tuple[str, ...]
    whole: str = ""
    sizes: Mapping[str, str] = types.MappingProxyType({})


class InTensorFlow(NamedTuple):
    """How TensorFlow's own operator handles a checked call.

    gradients: whether those it has registered, of every order, are the declared ones.
    everywhere: whether every build of it takes the call; otherwise it has to be tried.
    unwritten: results it leaves uninitialized, and the operands whose values belong there.
    opaque: operands that it makes for itself, of whatever shape.
    nan_over: axes over which a NaN in the first operand makes the result NaN, which in TensorFlow depends on the NaN's
    position.
    """

    gradients: bool
    everywhere: bool = True
    unwritten: Mapping[str, str] = types.MappingProxyType({})
    opaque: tuple[str, ...] = ()
    nan_over: tuple[int, ...] = ()


FLOATS = ("float16", "bfloat16", "float32", "float64")
HALVES = ("float16", "bfloat16")
ITEM_SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}  # in bytes


def wide(dtype: str) -> str:
    """The dtype of ranges and statistics that goes with `dtype`: at least float32, since 16 bits are too few."""
    return "float32" if dtype in HALVES else dtype


_LETTERS = string.ascii_lowercase


def letters_of(spec: TensorSpec) -> str:
    """For `Axes`: a letter of its own for each dimension."""
    if spec.rank > len(_LETTERS):
        return ""  # nothing is said of so many
    return _LETTERS[: spec.rank]
