# SPDX-License-Identifier: Apache-2.0
"""What does not depend on the input: weights, functions of them, numbers; and what training does by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import tree

from ...planning.network import Constant
from ..core.builder import Moving
from ..core.refusals import text_of
from .symbols import CustomGradientOperation


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
    lines = [line for line in text_of(error).splitlines() if line.strip() and "Exception encountered" not in line]
    line = lines[0] if lines else type(error).__name__
    return line.split(". ")[0].rstrip(".")


class OverBatch(keras.Operation):
    """A weight in another shape, the same for every example."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def call(self, x: Any) -> Any:
        return keras.ops.broadcast_to(x, self.shape)

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(self.shape)


class Computed:
    """A function of weights: a result of an operation of `keras.ops`.

    It takes and gives NumPy arrays, or what training holds Keras' tensors in, each as its attribute `tensor`.
    """

    def __init__(self, operation: Any, args: Any, kwargs: Any, names: Sequence[str], index: int) -> None:
        self.operation, self.args, self.kwargs = operation, args, kwargs
        self.names = tuple(names)
        self.index = index

    def __call__(self, *arrays: Any) -> Any:
        held = hasattr(arrays[0], "tensor")
        tensors = [each.tensor if held else keras.ops.convert_to_tensor(each) for each in arrays]
        result = self.result(dict(zip(self.names, tensors, strict=True)))
        return type(arrays[0])(result) if held else numpy_of(result)

    def result(self, tensors: Mapping[str, Any]) -> Any:
        def value(item: Any) -> Any:
            if not isinstance(item, Fixed):
                return item
            return tensors[item.name] if item.name in tensors else keras.ops.convert_to_tensor(item.data)

        args, kwargs = tree.map_structure(value, self.args), tree.map_structure(value, self.kwargs)
        return tree.flatten(self.operation.call(*args, **kwargs))[self.index]

    def same(self, other: Any) -> bool:
        """Whether it is the same function."""
        if not isinstance(other, Computed) or type(self.operation) is not type(other.operation):
            return False
        first, second = (
            {key: repr(each) for key, each in vars(one.operation).items() if key != "name" and key[0] != "_"}
            for one in (self, other)
        )
        given = [tree.flatten([each.args, each.kwargs]) for each in (self, other)]
        return (
            self.index == other.index
            and (first == second or isinstance(self.operation, CustomGradientOperation))
            and len(given[0]) == len(given[1])
            and all(map(same_argument, *given))
        )


Constants = Mapping[str, Constant]


def same_constant(one: str, other: str, first: Constants, second: Constants) -> bool:
    """Whether two constants, each of its own network, hold the same numbers."""
    if one not in first or other not in second:
        return one == other and one not in first and other not in second
    a, b = first[one], second[other]
    if a.shape != b.shape or a.parameter != b.parameter or (a.expression is None) != (b.expression is None):
        return False
    if a.parameter:
        return a.name == b.name
    if a.expression is None:
        return np.array_equal(a.data, b.data)
    operands = zip(a.expression.operands, b.expression.operands, strict=False)
    return (
        _same_function(a.expression.function, b.expression.function)
        and len(a.expression.operands) == len(b.expression.operands)
        and all(same_constant(*pair, first, second) for pair in operands)
    )


def _same_function(one: Any, other: Any) -> bool:
    if isinstance(one, Computed):
        return one.same(other)
    if isinstance(other, Computed) or one.__code__ is not other.__code__ or one.__defaults__ != other.__defaults__:
        return False
    cells = [[each.cell_contents for each in function.__closure__ or ()] for function in (one, other)]
    return len(cells[0]) == len(cells[1]) and all(repr(a) == repr(b) for a, b in zip(*cells, strict=True))


class InTraining:
    """The expression of a step that training alone has: what a layer of Keras does then, by its own random numbers."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.sources: tuple[str, ...] = ()

    def __call__(self, primitives: Any, x: Any, key: Any) -> Any:
        return self.layer(x, training=True)
