# SPDX-License-Identifier: Apache-2.0
"""Where arrays are computed: the meaning of a kernel is that of NumPy, and as it keeps to what the array API standard
has, other libraries' arrays that follow the standard may be given to it, too."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

# How a library folds without a Python loop: (step, start, arrays whose first axis is folded) -> the last state.
FOLDS: dict[Any, Callable[[Any, Any, Any], Any]] = {}


def namespace(*values):
    """The library that the values belong to: that of the first that is not NumPy's, if there is one."""
    for value in values:
        if not isinstance(value, np.ndarray | np.generic) and hasattr(value, "__array_namespace__"):
            return value.__array_namespace__()
    return np


def fold(step, start, arrays):
    """`step(state, item of each array)` over the first axis of the arrays, one item after the other."""
    xp = namespace(*arrays)
    if xp in FOLDS:
        return FOLDS[xp](step, start, arrays)
    return reduce(lambda state, items: step(state, *items), zip(*arrays, strict=True), start)
