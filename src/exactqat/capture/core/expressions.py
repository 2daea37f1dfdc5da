# SPDX-License-Identifier: Apache-2.0
"""Expressions of steps that training alone has. Training calls them with the primitives of its framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class CustomGradient:
    """The value of `y`, with the gradient of result `index` of the user's function at the same operands."""

    def __init__(self, results: Callable[..., Sequence[Any]], index: int) -> None:
        """results: of the operands, all results of the function; it is called once for all of them."""
        self.results = results
        self.index = index
        self.sources: tuple[str, ...] = ()

    def __call__(self, primitives: Any, y: Any, *operands: Any, shared: dict[Any, Any]) -> Any:
        if self.results not in shared:
            shared[self.results] = self.results(*operands)
        return primitives.with_gradient_of(y, shared[self.results][self.index])
