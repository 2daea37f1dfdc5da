# SPDX-License-Identifier: Apache-2.0
"""What does not depend on the input: weights of the model, functions of them, and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from ..core.builder import Moving


class Fixed:
    """Numbers that do not depend on the input: a weight of the model, a function of one, or data."""

    def __init__(self, name: str = "", data: Any = None, shape: Sequence[int] = ()) -> None:
        self.name = name
        self.data = data
        self.shape = tuple(int(size) for size in shape)

    @property
    def number(self) -> float | None:
        if self.data is None or self.data.size == 0 or not np.all(self.data == self.data.flat[0]):
            return None
        return float(self.data.flat[0])


Item = Moving | Fixed


def same_argument(one: Any, other: Any) -> bool:
    """Whether two arguments are the same; weights are compared by those who know them."""
    if isinstance(one, Fixed) and isinstance(other, Fixed):
        if one.name or other.name:
            return bool(one.name) == bool(other.name)
        return np.array_equal(one.data, other.data)
    return not isinstance(one, Item) and not isinstance(other, Item) and bool(one == other)


def numpy_of(value: Any) -> np.ndarray:
    array = keras.ops.convert_to_numpy(value)
    return array.astype(np.float32) if array.dtype.kind == "f" else np.asarray(array)


def first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip() and "Exception encountered" not in line]
    line = lines[0] if lines else type(error).__name__
    return line.split(". ")[0].rstrip(".")
