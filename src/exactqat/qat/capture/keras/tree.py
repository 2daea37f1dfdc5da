# SPDX-License-Identifier: Apache-2.0
"""How a model's inputs and outputs nest, and what the user calls them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from keras import tree

from ....kit.planning.files import distinct


class Tree:
    """How a model's inputs and outputs nest."""

    def __init__(self, inputs: Any, outputs: Any, names: Sequence[str] = ()) -> None:
        self.inputs = tree.map_structure(lambda _: 0, inputs)
        self.outputs = tree.map_structure(lambda _: 0, outputs)
        self.names = tuple(names)  # of the model's input tensors, by which Keras takes them from a dict

    def flatten(self, inputs: Any) -> list[Any]:
        """The tensors of a call, in the order of `Network.inputs`.

        Raises:
            TypeError: they nest otherwise than the model's inputs, so that one could be taken for another.
        """
        wanted = self.inputs
        if isinstance(wanted, Mapping):
            if isinstance(inputs, Mapping):
                if missing := [key for key in wanted if key not in inputs]:
                    raise TypeError(f"the model takes inputs called {sorted(wanted)}, got none called {missing}")
                inputs = {key: inputs[key] for key in wanted}
            elif list(wanted) != sorted(wanted):
                raise TypeError(f"the model takes a dict of inputs called {list(wanted)}, got {type(inputs).__name__}")
        elif isinstance(inputs, Mapping):
            if not self.names or any(name not in inputs for name in self.names):
                raise TypeError(
                    f"the model takes inputs called {list(self.names) or 'nothing'}, got a dict of {sorted(inputs)}"
                )
            inputs = [inputs[name] for name in self.names]
        given = tree.flatten(inputs)
        if len(given) != len(tree.flatten(wanted)):
            raise TypeError(f"the model has {len(tree.flatten(wanted))} inputs, got {len(given)}")
        return given

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        return tree.pack_sequence_as(self.outputs, list(outputs))


def input_words(model: Any, shapes: Any, functional: Any, count: int) -> list[str]:
    """What the user calls the inputs: keys of a dictionary, else names of the input layers, else `call`'s argument."""
    if isinstance(shapes, Mapping) and all(_is_shape(each) for each in shapes.values()):
        return [str(key) for key in sorted(shapes)]
    words = [str(each._keras_history.operation.name) for each in getattr(functional, "_inputs", None) or []]
    if len(words) != count:
        word = next(iter(inspect.signature(model.call).parameters), "input")
        words = [word] if count == 1 else [f"{word}_{at}" for at in range(count)]
    return list(distinct(words))


def output_words(results: Any, functional: Any, count: int) -> list[str]:
    """Likewise of the results: keys, else the names that Keras gives a functional model's outputs: its last layers'."""
    if isinstance(results, Mapping) and len(results) == count:
        return [str(key) for key in sorted(results)]
    words = [str(each) for each in getattr(functional, "output_names", None) or []]
    if len(words) != count:
        words = ["output"] if count == 1 else [f"output_{at}" for at in range(count)]
    return list(distinct(words))


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(each is None or isinstance(each, int) for each in value)


def flat_shapes(shapes: Any) -> list[tuple[Any, ...]]:
    if _is_shape(shapes):
        return [tuple(shapes)]
    values = [shapes[key] for key in sorted(shapes)] if isinstance(shapes, Mapping) else shapes
    return [shape for each in values for shape in flat_shapes(each)]


def packed(shapes: Any, symbols: list[Any]) -> Any:
    remaining = iter(symbols)

    def one(each: Any) -> Any:
        if _is_shape(each):
            return next(remaining)
        if isinstance(each, Mapping):
            made = {key: one(each[key]) for key in sorted(each)}
            return {key: made[key] for key in each}
        return type(each)(one(part) for part in each)

    return one(shapes)
