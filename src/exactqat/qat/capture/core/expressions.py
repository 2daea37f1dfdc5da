# SPDX-License-Identifier: Apache-2.0
"""Expressions of steps that training alone has. Training calls them with the primitives of its framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Dropout:
    """Each value dropped with a probability.

    What is dropped is the same along `kept_axes`.
    """

    def __init__(self, rate: float, kept_axes: Sequence[int] = ()) -> None:
        self.rate = rate
        self.kept_axes = tuple(kept_axes)
        self.sources: tuple[str, ...] = ()

    def __call__(self, primitives: Any, x: Any, key: Any) -> Any:
        return primitives.dropout(x, self.rate, key, self.kept_axes)
