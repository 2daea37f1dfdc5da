# SPDX-License-Identifier: Apache-2.0
"""Symbolic tensors with which a model is called while it is read: every operation of Keras becomes a step as it is
called, and gives the symbols of its results.

Keras records operations on its own symbolic tensors, but neither the sizes that follow the batch nor what is computed
of weights before they meet an input: a `Symbol` holds an item of the network, whose shape has a `Batch`, and while a
model is read its layers hold symbols in place of their variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import keras
from keras import tree

from ..core.refusals import SIZE_OF_BATCH, Refused
from ..core.sizes import Batch


class Examples(Batch):
    """The size of the batch as a layer's code gets it: whatever it decides by it is refused.

    An array that is made for all examples is made for one, and the same for all.
    """

    def _refused(self, *operands: object) -> NoReturn:
        raise Refused(SIZE_OF_BATCH)

    def __eq__(self, other: object) -> bool:
        return self._refused() if isinstance(other, int | float) else isinstance(other, Batch) and (
            self.multiple == other.multiple
        )  # fmt: skip

    def __mod__(self, divisor: Any) -> int:
        return self._refused() if self.multiple % getattr(divisor, "multiple", divisor) else 0

    __hash__ = __array__ = __round__ = _refused
    __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = _refused

    def __index__(self) -> int:
        return self.multiple

    def __mul__(self, factor: object) -> Any:
        return shown(super().__mul__(factor))

    __rmul__ = __mul__

    def __floordiv__(self, divisor: object) -> Any:
        return shown(super().__floordiv__(divisor))


def shown(size: object) -> Any:
    """A size as a layer's code gets it."""
    return Examples(size.multiple) if isinstance(size, Batch) else size


class Symbol(keras.KerasTensor):
    """An item of the network in what a layer computes.

    Attributes:
        item: a value of the network, or something fixed.
    """

    def __init__(self, item: Any, dtype: str = "float32") -> None:
        super().__init__([None if isinstance(size, Batch) else size for size in item.shape], dtype)
        self.item = item
        self._sizes = tuple(map(shown, item.shape))

    # An array of JAX on the left asks for it, and raises Keras' error; without it Python asks the symbol.
    __jax_array__ = None

    @property
    def shape(self) -> tuple[Any, ...]:
        return self._sizes

    def __getitem__(self, key: object) -> Any:
        return super().__getitem__((key,) if isinstance(key, slice) else key)


class WeightSymbol(Symbol):
    """A variable of the model in what a layer computes."""

    def __init__(self, item: Any, variable: Any) -> None:
        super().__init__(item, variable.dtype)
        self.variable = variable
        self.path, self.trainable, self.name = variable.path, variable.trainable, variable.name

    @property
    def value(self) -> WeightSymbol:
        return self

    def assign(self, *args: object, **kwargs: object) -> NoReturn:
        raise Refused(f"it changes its weight '{self.name}' when it is called")

    assign_add = assign_sub = assign


def has_symbols(values: object) -> bool:
    """Whether some of nested values are symbolic tensors."""
    return any(isinstance(value, keras.KerasTensor) for value in tree.flatten(values))


class Weights:
    """The variables that layers hold, and the symbols that they hold in their place while the model is read."""

    def __init__(self, layers: Sequence[Any], symbol: Callable[[Any], WeightSymbol | None]) -> None:
        """symbol: of a variable; None where the layer keeps the variable."""
        self._held: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._symbol = symbol
        for layer in layers:
            attributes = vars(layer)
            for name, value in attributes.items():
                if name in _VARIABLE_LISTS or not isinstance(value, keras.Variable | list | tuple | dict):
                    continue
                other = self._replaced(value)
                if other is not value:
                    self._held.append((attributes, name, value, other))

    def _replaced(self, value: object) -> Any:
        """The same with symbols in place of variables; the value itself where it holds none."""
        if isinstance(value, keras.Variable):
            symbol = self._symbol(value)
            return value if symbol is None else symbol
        if isinstance(value, dict):
            parts = {key: self._replaced(part) for key, part in value.items()}
            return parts if any(parts[key] is not value[key] for key in value) else value
        if isinstance(value, list | tuple) and type(value).__name__ in ("list", "tuple", "TrackedList"):
            several = [self._replaced(part) for part in value]
            if all(one is other for one, other in zip(several, value, strict=True)):
                return value
            return tuple(several) if isinstance(value, tuple) else several
        return value

    @contextmanager
    def held(self, symbols: bool) -> Iterator[None]:
        """Layers hold symbols, or their variables again."""
        before = [(attributes, name, attributes[name]) for attributes, name, *_ in self._held]
        for attributes, name, *values in self._held:
            attributes[name] = values[symbols]
        try:
            yield
        finally:
            for attributes, name, value in before:
                attributes[name] = value


# Where Keras itself keeps what a layer holds.
_VARIABLE_LISTS = ("_trainable_variables", "_non_trainable_variables", "_layers", "_metrics", "_losses", "_tracker")
