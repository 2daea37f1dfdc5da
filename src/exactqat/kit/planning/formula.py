# SPDX-License-Identifier: Apache-2.0
"""Functions of arrays as data, which plans hold: they can be copied and pickled with a model."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple


class _Operand(NamedTuple):
    number: int


class _Applied(NamedTuple):
    word: str
    args: tuple[Any, ...]


def _transposed(array: Any) -> Any:
    return array.T


def _reshaped(array: Any, *shape: Any) -> Any:
    return array.reshape(*shape)


def _clipped(array: Any, low: float) -> Any:
    return array.clip(min=low)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "negative": operator.neg,
    "item": operator.getitem,
    "transposed": _transposed,
    "reshaped": _reshaped,
    "clipped": _clipped,
}


class _Symbol:
    """In place of an array while a formula is recorded; has what all frameworks' arrays have in common."""

    def __init__(self, node: Any) -> None:
        self.node = node

    def _applied(self, word: str, *args: Any) -> _Symbol:
        return _Symbol(_Applied(word, tuple(each.node if isinstance(each, _Symbol) else each for each in args)))

    def __add__(self, other: Any) -> _Symbol:
        return self._applied("add", self, other)

    def __radd__(self, other: Any) -> _Symbol:
        return self._applied("add", other, self)

    def __sub__(self, other: Any) -> _Symbol:
        return self._applied("subtract", self, other)

    def __mul__(self, other: Any) -> _Symbol:
        return self._applied("multiply", self, other)

    def __rmul__(self, other: Any) -> _Symbol:
        return self._applied("multiply", other, self)

    def __truediv__(self, other: Any) -> _Symbol:
        return self._applied("divide", self, other)

    def __rtruediv__(self, other: Any) -> _Symbol:
        return self._applied("divide", other, self)

    def __neg__(self) -> _Symbol:
        return self._applied("negative", self)

    def __getitem__(self, index: Any) -> _Symbol:
        return self._applied("item", self, index)

    @property
    def T(self) -> _Symbol:
        return self._applied("transposed", self)

    def reshape(self, *shape: Any) -> _Symbol:
        return self._applied("reshaped", self, *shape)

    def clip(self, *, min: float) -> _Symbol:
        return self._applied("clipped", self, min)


class Formula:
    """What a function computes from `count` arrays, in the same order. Calling it with arrays computes it."""

    def __init__(self, function: Callable[..., Any], count: int) -> None:
        """
        Args:
            function: uses what `planning.plans.Derived` allows.
        """
        self.result = function(*(_Symbol(_Operand(number)) for number in range(count))).node

    def __call__(self, *arrays: Any) -> Any:
        known: dict[int, Any] = {}

        def value(node: Any) -> Any:
            if isinstance(node, _Operand):
                return arrays[node.number]
            if not isinstance(node, _Applied):
                return node
            if id(node) not in known:
                known[id(node)] = _FUNCTIONS[node.word](*map(value, node.args))
            return known[id(node)]

        return value(self.result)


__all__ = ["Formula"]
