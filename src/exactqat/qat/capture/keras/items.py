# SPDX-License-Identifier: Apache-2.0
"""What does not depend on the input: weights, functions of them, numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import tree

from ..core.builder import Moving
from ..core.refusals import SIZE_OF_BATCH, Refused, text_of
from ..core.sizes import Batch, for_examples


class Fixed:
    """Numbers that do not depend on the input: a weight of the model, a function of one, or data.

    unshaped: what it was before it was only reshaped.
    """

    def __init__(
        self, name: str = "", data: Any = None, shape: Sequence[int] = (), unshaped: Fixed | None = None
    ) -> None:
        self.name = name
        self.data = data
        self.unshaped = unshaped
        self.shape = tuple(int(size) for size in shape)

    @property
    def number(self) -> float | None:
        if self.data is None or self.data.size == 0 or not np.all(self.data == self.data.flat[0]):
            return None
        return float(self.data.flat[0])


Item = Moving | Fixed
Result = Item | Sequence[Item]


def numpy_of(value: object) -> np.ndarray:
    array = keras.ops.convert_to_numpy(value)
    return array.astype(np.float32) if array.dtype.kind == "f" else np.asarray(array)


def first_line(error: BaseException) -> str:
    lines = [line for line in text_of(error).splitlines() if line.strip() and "Exception encountered" not in line]
    line = lines[0] if lines else type(error).__name__
    return line.split(". ")[0].rstrip(".")


def is_seed(variable: keras.Variable) -> bool:
    return "seed_generator" in variable.path


def path_of(layer: keras.Layer) -> str:
    return str(getattr(layer, "path", None) or layer.name).replace("/", ".")


def for_one_example(operation: keras.Operation) -> keras.Operation:
    """What an operation that repeats something fixed for every example makes of it: the same, with a batch of one."""

    def follows(value: object) -> bool:
        return any(isinstance(size, Batch) for size in (value if isinstance(value, tuple) else [value]))

    shapes = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(operation).items()}
    sizes = {name: value for name, value in shapes.items() if name[0] != "_" and follows(value)}
    if not sizes:
        return operation
    if type(operation).__name__ not in ("BroadcastTo", "Repeat", "Reshape", "Tile"):
        raise Refused(SIZE_OF_BATCH)
    of_one = object.__new__(type(operation))
    vars(of_one).update({**vars(operation), **{name: for_examples(value, 1) for name, value in sizes.items()}})
    return of_one


class Computed:
    """A function of weights: a result of an operation of `keras.ops`.

    It takes and gives NumPy arrays, or what training holds Keras' tensors in, each as its attribute `tensor`.
    """

    def __init__(self, operation: keras.Operation, args: Any, kwargs: Any, names: Sequence[str], index: int) -> None:
        self.operation, self.args, self.kwargs = operation, args, kwargs
        self.operands = tuple(names)
        self.index = index

    def __call__(self, *arrays: Any) -> Any:
        held = hasattr(arrays[0], "tensor")
        tensors = [array.tensor if held else keras.ops.convert_to_tensor(array) for array in arrays]
        result = self.result(dict(zip(self.operands, tensors, strict=True)))
        return type(arrays[0])(result) if held else numpy_of(result)

    def result(self, tensors: Mapping[str, Any]) -> Any:
        def value(item: object) -> Any:
            if not isinstance(item, Fixed):
                return item
            return tensors[item.name] if item.name in tensors else keras.ops.convert_to_tensor(item.data)

        args, kwargs = tree.map_structure(value, self.args), tree.map_structure(value, self.kwargs)
        return tree.flatten(self.operation.call(*args, **kwargs))[self.index]


class InTraining:
    """The expression of a step that training alone has: what a layer of Keras does then, by its own random numbers."""

    def __init__(self, layer: keras.Layer) -> None:
        self.layer = layer
        self.sources: tuple[str, ...] = ()

    def __call__(self, primitives: Any, x: Any, key: Any) -> Any:
        return self.layer(x, training=True)
