# SPDX-License-Identifier: Apache-2.0
"""Where arrays are computed: the meaning of a kernel is that of NumPy. As it keeps to what the array API standard has,
it may also be given arrays of another library that follows the standard, one that compiles included."""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import numpy as np


class Compiler(NamedTuple):
    """What a library that compiles is needed for beside the standard."""

    fold: Callable[[Any, Any, Any], Any]  # (step, start, arrays whose first axis is folded) -> the last state
    opaque: Callable[[Any], Any]  # a constant, so that nothing is made of it before the program runs


COMPILERS: dict[Any, Compiler] = {}  # by namespace


def namespace(*values):
    """The library that the values belong to: that of the first that is not NumPy's, if there is one."""
    for value in values:
        if not isinstance(value, np.ndarray | np.generic) and hasattr(value, "__array_namespace__"):
            return value.__array_namespace__()
    return np


def fold(step, start, arrays):
    """`step(state, item of each array)` over the first axis of the arrays, one item after the other."""
    compiler = COMPILERS.get(namespace(*arrays))
    if compiler is not None:
        return compiler.fold(step, start, arrays)
    return reduce(lambda state, items: step(state, *items), zip(*arrays, strict=True), start)


def divisor(value, dividend):
    """`value`; if it is a constant, compilers would turn it into a factor."""
    compiler = COMPILERS.get(namespace(dividend))
    return value if compiler is None else compiler.opaque(value)


def zeros(xp, shape, dtype):
    """Zeros that something is added to: compilers leave them out, and with them the sign of +0 + -0."""
    compiler = COMPILERS.get(xp)
    zero = np.zeros((), dtype)
    return xp.full(shape, zero if compiler is None else compiler.opaque(zero), dtype=dtype)
