# SPDX-License-Identifier: Apache-2.0
"""A Keras 3 model as a `Network`, on any of Keras' backends: `capture` calls it once, in evaluation, on symbols.

Layers that Keras knows are steps, unless a part of them is the user's own; others are called in turn, until nothing
but operations of `keras.ops` is left. The batch is a size of its own: where layers compute with it, they are refused.
What training does otherwise (batch norm, dropout, noise) are markers; see `markers`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
from keras import tree

from ....kit.planning.files import distinct
from ....kit.planning.inputs import misfit_of_example
from ....kit.planning.network import Constant, Network, Step
from ..core.builder import free_name
from ..core.refusals import CaptureError, Refused, text_of
from ..core.sizes import Batch
from ..passes.affine import BiasAndAffine

# Their handlers enter themselves into the reader's tables.
from . import elementwise, markers, movement, products, reduction, sequence  # noqa: F401
from .items import Item, path_of
from .reader import Reader

# Of inputs that are masks, numbers of words or the like; other integers are images.
_WHOLE = ("bool", "int32", "int64")


class Tree:
    """How a model's inputs and outputs nest."""

    def __init__(self, inputs: Any, outputs: Any, names: Sequence[str] = ()) -> None:
        self.inputs = tree.map_structure(lambda _: 0, inputs)
        self.outputs = tree.map_structure(lambda _: 0, outputs)
        self.names = tuple(names)  # of the model's input tensors, by which Keras takes them from a dict

    def flatten(self, inputs: object) -> list[Any]:
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
        tensors = tree.flatten(inputs)
        if len(tensors) != len(tree.flatten(wanted)):
            raise TypeError(f"the model has {len(tree.flatten(wanted))} inputs, got {len(tensors)}")
        return tensors

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        return tree.pack_sequence_as(self.outputs, list(outputs))


def variable_names(model: keras.Model) -> dict[int, str]:
    """Names of a model's variables by identity: their paths, with dots."""
    names: dict[int, str] = {}
    for variable in {id(variable): variable for variable in model.variables}.values():
        own = variable.path.replace("/", ".").removeprefix(f"{model.name}.")
        names[id(variable)] = free_name(own, names.values())
    return names


def capture(
    model: keras.Model,
    shapes: object,
    names: Mapping[int, str],
    losses: list[str] | None = None,
    dtypes: Sequence[str] = (),
) -> Network:
    """The network that a built model computes in evaluation, for a batch of any size.

    Args:
        shapes: a tuple for each input, nested as the model takes them, the batch in front (its size does not matter).
        dtypes: of a model that does not say of what its inputs are: of each input, in the order of `shapes`.
        names: of variables; see `variable_names`.
        losses: gets the paths of layers that add a loss of what they compute, which no network holds.

    Raises:
        CaptureError: the model cannot be called on symbolic tensors, or it computes with the size of the batch.
    """
    reader, flat = Reader(model, names), _flat_shapes(shapes)
    paths = [f"argument_{at}" for at in range(len(flat))]
    functional = getattr(model, "_functional", None) or model
    known = getattr(functional, "_inputs", None) or []
    words = [str(tensor.dtype) for tensor in known] or list(dtypes) or ["float32"] * len(flat)
    inputs = [
        reader.input(path, (Batch(), *shape[1:]), word if word in _WHOLE else "float32")
        for path, shape, word in zip(paths, flat, words, strict=True)
    ]
    reader.whole_inputs = {path for path, word in zip(paths, words, strict=True) if "int" in word}
    arguments = _packed(shapes, inputs)
    before = [(layer, list(layer._losses), set(layer._loss_ids)) for layer in model._flatten_layers()]
    try:
        results = reader.read(model, arguments)
    except CaptureError:
        raise
    except Exception as raised:
        error = raised.__cause__ if isinstance(raised, Refused) else raised
        if error is None:
            raise CaptureError(f"the model cannot be prepared: {raised}") from raised
        misfit = _misfit(model, shapes, text_of(error), paths)
        raise CaptureError(misfit or f"the model cannot be called on symbolic tensors: {text_of(error)}") from error
    finally:
        for layer, own, ids in before:
            layer._losses[:], layer._loss_ids = own, ids
    if losses is not None:
        losing = set(map(id, reader.losing))
        losses += [
            path_of(layer)
            for layer, *_ in before
            if id(layer) in losing or getattr(layer, "activity_regularizer", None) is not None
        ]
    items = tree.flatten(results)
    outputs = [reader.operand(item) if isinstance(item, Item) else str(item) for item in items]
    steps = BiasAndAffine(reader, outputs).run()
    names_of_inputs = _input_words(model, shapes, functional, len(paths))
    ends = _output_words(results, functional, len(outputs))
    whole = Tree(arguments, results, [tensor.name for tensor in known])
    return Network(
        tuple(paths),
        tuple(outputs),
        reader.values,
        used(reader.constants, steps, outputs),
        as_needed(steps, outputs),
        ("input",) if len(paths) == 1 else tuple(name.replace("/", ".") for name in names_of_inputs),
        tuple(ends),
        whole,
        whole,
        tuple(names_of_inputs),
        channels_first=False,
    )


def used(constants: Mapping[str, Constant], steps: Sequence[Step], outputs: Sequence[str]) -> dict[str, Constant]:
    """The constants that steps read, and those that they are computed from."""
    read = (*outputs, *(name for step in steps for name in step.inputs))
    waiting = [name for name in read if isinstance(name, str) and name in constants]
    names: set[str] = set()
    while waiting:
        name = waiting.pop()
        names.add(name)
        waiting += [operand for operand in getattr(constants[name].expression, "operands", ()) if operand not in names]
        waiting += [source for source in constants[name].sources if source not in names]
    return {name: constant for name, constant in constants.items() if name in names}


def as_needed(steps: Sequence[Step], outputs: Sequence[str]) -> tuple[Step, ...]:
    """The steps in the order in which the outputs need them, as a forward function would be written.

    Keras runs a functional model by depth, which mixes the steps of its branches.
    """
    makers = {step.output: step for step in steps}
    ordered: dict[str, Step] = {}
    for output in (*outputs, *makers):
        waiting = [output] if output in makers else []
        while waiting:
            step = makers[waiting[-1]]
            missing = [str(operand) for operand in step.inputs if operand in makers and operand not in ordered]
            if missing:
                waiting += reversed(missing)
            else:
                ordered.setdefault(waiting.pop(), step)
    return tuple(ordered.values())


def _misfit(model: keras.Model, shapes: object, text: str, paths: Sequence[str]) -> str | None:
    """What is wrong with the example's shapes; None if nothing is."""
    flat = _flat_shapes(shapes)
    more = {"training": False} if "training" in inspect.signature(model.call).parameters else {}

    def takes(changed: Callable[[tuple[int, ...]], tuple[int, ...]]) -> bool:
        tensors = [keras.KerasTensor(changed(tuple(size or 1 for size in shape))) for shape in flat]
        try:
            model.call(_packed(shapes, tensors), **more)
        except Exception:  # noqa: BLE001 - the user's model may raise anything
            return False
        return True

    words = ["input"] if len(paths) == 1 else paths
    return misfit_of_example(text, dict(zip(words, flat, strict=True)), takes)


def _input_words(model: Any, shapes: Any, functional: Any, count: int) -> list[str]:
    """What the user calls the inputs: keys of a dictionary, else names of the input layers, else `call`'s argument."""
    if isinstance(shapes, Mapping) and all(_is_shape(shape) for shape in shapes.values()):
        return [str(key) for key in sorted(shapes)]
    words = [str(tensor._keras_history.operation.name) for tensor in getattr(functional, "_inputs", None) or []]
    if len(words) != count:
        word = next(iter(inspect.signature(model.call).parameters), "input")
        words = [word] if count == 1 else [f"{word}_{at}" for at in range(count)]
    return list(distinct(words))


def _output_words(results: object, functional: object, count: int) -> list[str]:
    """Likewise of the results: keys, else the names that Keras gives a functional model's outputs: its last layers'."""
    if isinstance(results, Mapping) and len(results) == count:
        return [str(key) for key in sorted(results)]
    words = [str(name) for name in getattr(functional, "output_names", None) or []]
    if len(words) != count:
        words = ["output"] if count == 1 else [f"output_{at}" for at in range(count)]
    return list(distinct(words))


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple | list) and all(size is None or isinstance(size, int) for size in value)


def _flat_shapes(shapes: Any) -> list[tuple[Any, ...]]:
    if _is_shape(shapes):
        return [tuple(shapes)]
    values = [shapes[key] for key in sorted(shapes)] if isinstance(shapes, Mapping) else shapes
    return [shape for part in values for shape in _flat_shapes(part)]


def _packed(shapes: Any, symbols: list[Any]) -> Any:
    remaining = iter(symbols)

    def one(branch: Any) -> Any:
        if _is_shape(branch):
            return next(remaining)
        if isinstance(branch, Mapping):
            parts = {key: one(branch[key]) for key in sorted(branch)}
            return {key: parts[key] for key in branch}
        return type(branch)(one(part) for part in branch)

    return one(shapes)
