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


def _summed(array: Any, axis: int) -> Any:
    return array.sum(axis)


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
    "summed": _summed,
    "clipped": _clipped,
}


def _operation(word: str, reflected: bool = False) -> Callable[..., _Symbol]:
    """A method that records a call of one of `_FUNCTIONS`."""

    def record(*args: object) -> _Symbol:
        nodes = tuple(argument.node if isinstance(argument, _Symbol) else argument for argument in args)
        return _Symbol(_Applied(word, nodes[::-1] if reflected else nodes))

    return record


class _Symbol:
    """In place of an array while a formula is recorded; has what all frameworks' arrays have in common."""

    def __init__(self, node: Any) -> None:
        self.node = node

    __add__, __radd__ = _operation("add"), _operation("add", reflected=True)
    __mul__, __rmul__ = _operation("multiply"), _operation("multiply", reflected=True)
    __truediv__, __rtruediv__ = _operation("divide"), _operation("divide", reflected=True)
    __sub__, __neg__ = _operation("subtract"), _operation("negative")
    __getitem__, reshape, T = _operation("item"), _operation("reshaped"), property(_operation("transposed"))
    sum = _operation("summed")

    def clip(self, *, min: float) -> _Symbol:
        return _operation("clipped")(self, min)


class Formula:
    """What a function computes from `count` arrays, in the same order. Calling it with arrays computes it."""

    def __init__(self, function: Callable[..., Any], count: int) -> None:
        """
        Args:
            function: uses what `planning.plans.Derived` allows.
        """
        self.result = function(*(_Symbol(_Operand(number)) for number in range(count))).node

    def __call__(self, *arrays: object) -> Any:
        known: dict[int, Any] = {}

        def value(node: object) -> Any:
            if isinstance(node, _Operand):
                return arrays[node.number]
            if not isinstance(node, _Applied):
                return node
            if id(node) not in known:
                known[id(node)] = _FUNCTIONS[node.word](*map(value, node.args))
            return known[id(node)]

        return value(self.result)
