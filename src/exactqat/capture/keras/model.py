# SPDX-License-Identifier: Apache-2.0
"""A Keras 3 model as a `Network`: `capture` reads the graph that Keras itself records, on any of its backends.

The model is called on symbolic tensors in training; what Keras writes down are layers and operations. Layers with
weights that Keras knows are steps, unless a part of them is the user's own; others are called in turn, until nothing
but operations of `keras.ops` is left, and once more in evaluation, which must give the same but for what is dropped at
random. Two sizes of batch stand in for all: where they give two networks, the model computes with the batch's size.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras import tree

from ...device.functions import named_by
from ...planning.elementwise import SURELY_MASKED
from ...planning.files import distinct
from ...planning.inputs import misfit_of_example, with_own_sizes
from ...planning.network import Constant, Network, Place, Step, Value
from ...planning.plans import Derived
from ...planning.sequence import MOST_TIME_STEPS
from ...train.core.functional import Dropout
from ...train.keras import primitives as primitives_keras
from ..core.functions import POINTS, identify, same
from .symbols import (
    ChangesWeight,
    CustomGradientOperation,
    DrawsNumbers,
    DropoutOperation,
    WeightSymbol,
    has_symbols,
    in_phase,
    with_symbols,
)

# Sizes of batch that stand in for all: large primes, and small ones with many divisors.
_STAND_INS = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 2003, 2011)
_OTHER_STAND_INS = (84, 90, 60, 72, 96, 66, 78, 54, 70, 42)
# Functions are evaluated in float32 by Keras' own operations.
_CLOSE = 2e-5


class CaptureError(Exception):
    """The model cannot be told as a network; the message says why."""


class Refused(Exception):
    """One operation is not understood; it becomes a step of the kind "unsupported"."""


class Moving:
    """A value of the network: its name, its traced shape, and what it is as a function of earlier values."""

    def __init__(self, name: str, shape: Sequence[int], samples: Mapping[str, np.ndarray]) -> None:
        self.name = name
        self.shape = tuple(int(size) for size in shape)
        self.samples = dict(list(samples.items())[-15:]) | {name: POINTS}

    @property
    def rank(self) -> int:
        return len(self.shape)


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
Handler = Callable[["Converter", Any, list[Any], dict[str, Any]], Any]
# By the name of Keras' class, for layers and for operations.
LAYERS: dict[str, Handler] = {}
OPERATIONS: dict[str, Handler] = {}


def layers(*names: str) -> Callable[[Handler], Handler]:
    def enter(handler: Handler) -> Handler:
        LAYERS.update(dict.fromkeys(names, handler))
        return handler

    return enter


def operations(*names: str) -> Callable[[Handler], Handler]:
    def enter(handler: Handler) -> Handler:
        OPERATIONS.update(dict.fromkeys(names, handler))
        return handler

    return enter


class Converter:
    """A network under construction."""

    def __init__(self, prime: int, names: Mapping[int, str]) -> None:
        self.prime = prime
        self.training = True  # what is traced
        self.drew = False  # whether random numbers were drawn that no step holds
        self._substituted: list[Callable[[bool], None]] = []
        self.names = names  # of variables, by identity
        self.steps: list[Step] = []
        self.values: dict[str, Value] = {}
        self.constants: dict[str, Constant] = {}
        self.items: dict[str, Moving] = {}
        self.read: set[int] = set()
        self.whole_inputs: set[str] = set()  # that the model takes as integers: images of uint8
        self._known: dict[int, Any] = {}
        self._alive: list[Any] = []
        self._numbers = itertools.count(1)
        self._made: dict[Any, Moving] = {}
        self._layer = ""

    # --- steps --------------------------------------------------------------------------------------------------------

    def batch_axis(self, shape: Sequence[int]) -> int:
        found = [axis for axis, size in enumerate(shape) if size and size % self.prime == 0]
        if len(found) != 1:
            raise Refused("it mixes the examples of a batch")
        return found[0]

    def for_one(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(int(size // self.prime if size and size % self.prime == 0 else size) for size in shape)

    def input(self, name: str, shape: Sequence[int], dtype: str) -> Moving:
        known = "float32" if "float" in dtype else "int64"
        self.values[name] = Value(name, self.for_one(shape), self.batch_axis(shape), known)
        self.items[name] = Moving(name, shape, {})
        return self.items[name]

    def emit(
        self,
        kind: str,
        operands: Sequence[Any],
        shape: Sequence[int],
        /,
        samples: Mapping[str, np.ndarray] | None = None,
        module: str = "",
        label: str = "",
        **attributes: Any,
    ) -> Moving:
        """One float step; shape: as traced."""
        axis = self.batch_axis(shape)
        inputs = tuple(self.operand(each) for each in operands)
        same_ = (kind, inputs, tuple(shape), repr(sorted(attributes.items())))
        if kind != "unsupported" and same_ in self._made:
            return self._made[same_]
        output = f"v{next(self._numbers)}"
        self.steps.append(Step(kind, inputs, output, attributes, Place(self._layer), module, label or kind))
        self.values[output] = Value(output, self.for_one(shape), axis, "int64" if kind == "argmax" else "float32")
        self.items[output] = self._made[same_] = Moving(output, shape, samples or {})
        return self.items[output]

    def operand(self, item: Any) -> Any:
        if item is None or isinstance(item, int | float):
            return item
        if isinstance(item, Moving):
            return item.name
        if item.name:
            return item.name
        if item.number is not None and item.shape == ():
            return item.number
        name = self._free("constant")
        self.constants[name] = Constant(name, item.shape, parameter=False, data=item.data)
        item.name = name
        return name

    def _free(self, name: str) -> str:
        taken = {*self.constants, *self.names.values()}
        return next(
            each for each in itertools.chain([name], (f"{name}_{n}" for n in itertools.count(2))) if each not in taken
        )

    def optional(self, variable: Any) -> Fixed | None:
        """A variable that a layer may be without."""
        return None if variable is None else self.weight(variable)

    def weight(self, variable: Any) -> Fixed:
        """A variable of the model's."""
        self.read.add(id(variable))
        name = self.names.get(id(variable))
        if name is None:
            raise Refused("it has a weight that is not the model's")
        shape = tuple(variable.shape)
        self.constants.setdefault(name, Constant(name, shape, parameter=True, trainable=bool(variable.trainable)))
        return Fixed(name, shape=shape)

    def then(self, item: Fixed, shape: Sequence[int], function: Callable[..., Any]) -> Fixed:
        """What a function of its array, by NumPy's methods, makes of numbers."""
        if item.data is not None:
            return Fixed(data=np.asarray(function(item.data)), shape=shape)
        base = self.constants[item.name]
        name = self._free(f"{item.name}/computed")
        sources = (item.name,) if base.parameter else base.sources
        self.constants[name] = Constant(
            name,
            tuple(shape),
            parameter=False,
            trainable=base.trainable,
            sources=sources,
            expression=Derived(function, (item.name,)),
        )
        return Fixed(name, shape=shape)

    def layer_path(self, variable: Any) -> str:
        return self.names[id(variable)].rpartition(".")[0] or self.names[id(variable)]

    # --- movement -----------------------------------------------------------------------------------------------------

    def permute(self, x: Item, axes: Sequence[int]) -> Item:
        axes = tuple(int(axis) for axis in axes)
        if axes == tuple(range(len(axes))):
            return x
        shape = [x.shape[axis] for axis in axes]
        if isinstance(x, Fixed):
            return self.then(x, shape, lambda array: array.transpose(axes))
        return self.emit("permute", [x], shape, axes=axes)

    def reshape(self, x: Item, shape: Sequence[int]) -> Item:
        shape = tuple(int(size) for size in shape)
        if shape == x.shape:
            return x
        if isinstance(x, Fixed):
            return self.then(x, shape, lambda array: array.reshape(shape))
        return self.emit("reshape", [x], shape, shape=self.for_one(shape))

    def cut(self, x: Moving, axis: int, start: int, stop: int, step: int = 1) -> Moving:
        if (start, stop, step) == (0, x.shape[axis], 1):
            return x
        if axis == self.batch_axis(x.shape):
            raise Refused("it takes examples out of the batch")
        shape = list(x.shape)
        shape[axis] = -(-(stop - start) // step)
        return self.emit("slice", [x], shape, axis=axis, start=int(start), stop=int(stop), step=int(step))

    # --- the walk -----------------------------------------------------------------------------------------------------

    def item(self, value: Any) -> Any:
        """What an argument of a layer or an operation stands for."""
        if isinstance(value, WeightSymbol):
            value = value.variable
        if isinstance(value, keras.KerasTensor):
            return self.evaluate(value)
        if isinstance(value, keras.Variable):
            return self.weight(value) if id(value) in self.names else Fixed(data=_numpy(value), shape=value.shape)
        if keras.ops.is_tensor(value) or isinstance(value, np.ndarray | np.generic):
            return Fixed(data=_numpy(value), shape=np.shape(_numpy(value)))
        return value

    def evaluate(self, tensor: Any) -> Any:
        """The item of a symbolic tensor; the graph it ends is walked without recursion."""
        stack = [tensor]
        while stack:
            current = stack[-1]
            if id(current) in self._known:
                stack.pop()
                continue
            operation, index, _ = current._keras_history
            if operation is None:
                raise Refused("it computes with a symbolic tensor that is no input")
            node = operation._inbound_nodes[index]
            missing = [
                each
                for each in node.arguments.keras_tensors
                if id(each) not in self._known and not isinstance(each, WeightSymbol)
            ]
            if missing:
                stack += missing
                continue
            args = [tree.map_structure(self.item, each) for each in node.arguments.args]
            kwargs = {key: tree.map_structure(self.item, each) for key, each in node.arguments.kwargs.items()}
            results = tree.flatten(self._call(operation, args, kwargs, node))
            for output, result in zip(node.outputs, results, strict=True):
                self._known[id(output)] = result
                self._alive.append(output)
            stack.pop()
        return self._known[id(tensor)]

    def bind(self, tensor: Any, item: Any) -> None:
        self._known[id(tensor)] = item
        self._alive.append(tensor)

    def symbol(self, item: Any) -> Any:
        """A symbolic tensor for an item; what is no tensor stays as it is."""
        if isinstance(item, Fixed) and not item.name:
            return item.data
        if not isinstance(item, Item):
            return item
        tensor = keras.KerasTensor(item.shape)
        self.bind(tensor, item)
        return tensor

    def _call(self, operation: Any, args: list[Any], kwargs: dict[str, Any], node: Any) -> Any:
        layer = isinstance(operation, keras.Layer)
        if not any(isinstance(each, Moving) for each in tree.flatten([args, kwargs])):
            if layer:
                raise Refused(f"'{_path(operation)}' gets nothing that depends on the input")
            return self.computed(operation, args, kwargs, node)
        outer, outer_training = self._layer, self.training
        if layer and not isinstance(operation, keras.Model):
            self._layer = _path(operation)
        if layer and (reason := _changed_kernel(operation)):
            return self._unsupported(operation, args, kwargs, node, reason)
        if layer:
            given = kwargs.get("training")
            given = getattr(node, "training", None) if given is None else given
            kwargs = {key: each for key, each in kwargs.items() if key != "training" and each is not None}
            if given is not None and bool(given) and not self.training:
                raise Refused(f"'{_path(operation)}' is called with training=True in evaluation, too")
            self.training = self.training if given is None else bool(given)
        try:
            handler = _handler(operation)
            if handler is not None:
                return handler(self, operation, args, kwargs)
            if not layer:
                raise Refused("")
            return self.expand(operation, args, kwargs)
        except Refused as refused:
            return self._unsupported(operation, args, kwargs, node, str(refused))
        finally:
            self._layer, self.training = outer, outer_training

    def computed(self, operation: Any, args: list[Any], kwargs: dict[str, Any], node: Any) -> list[Fixed]:
        """What an operation makes of weights and data alone."""
        fixed = [each for each in tree.flatten([args, kwargs]) if isinstance(each, Fixed)]
        names = list(dict.fromkeys(each.name for each in fixed if each.name))
        if isinstance(operation, DropoutOperation):
            raise Refused("it drops parts of a weight at random")
        operation = self._for_any_batch(operation, fixed)
        bases = [self.constants[name] for name in names]
        results = []
        for index, output in enumerate(node.outputs):
            computed = Computed(operation, args, kwargs, names, index)
            if not names:
                data = _numpy(computed.result({}))
                results.append(Fixed(data=data, shape=data.shape))
                continue
            shape = [1 if isinstance(operation, _OverBatch) and size == self.prime else size for size in output.shape]
            if any(size and size % self.prime == 0 for size in shape):
                raise Refused("it computes with the size of the batch")
            name = self._free(f"{names[0]}/{type(operation).__name__.lower().strip('_')}")
            sources = dict.fromkeys(
                each for base in bases for each in ((base.name,) if base.parameter else base.sources)
            )
            self.constants[name] = Constant(
                name,
                tuple(shape),
                parameter=False,
                trainable=any(base.trainable for base in bases),
                sources=tuple(sources),
                expression=Derived(computed, tuple(names)),
            )
            results.append(Fixed(name, shape=shape))
        return results

    def _for_any_batch(self, operation: Any, fixed: Sequence[Fixed]) -> Any:
        """A weight repeated for every example is the weight itself, with a batch of one."""
        if len(fixed) != 1:
            return operation
        word, x = type(operation).__name__, fixed[0]
        if word == "BroadcastTo" and (len(x.shape) < len(operation.shape) or x.shape[:1] == (1,)):
            shape = tuple(operation.shape)
            if shape[0] == self.prime and self.prime not in shape[1:]:
                return _OverBatch((1, *shape[1:]))
        if word == "Tile" and tuple(tree.flatten(operation.repeats)) == (self.prime, *[1] * (len(x.shape) - 1)):
            return _OverBatch(x.shape) if x.shape[0] == 1 else operation
        if word == "Repeat" and operation.repeats == self.prime and operation.axis == 0 and x.shape[:1] == (1,):
            return _OverBatch(x.shape)
        return operation

    def _unsupported(self, operation: Any, args: Any, kwargs: Any, node: Any, reason: str) -> Any:
        read = [each for each in tree.flatten([args, kwargs]) if isinstance(each, Moving)]
        if not self.training:
            raise Refused(reason or f"{type(operation).__name__} has no int8 operator in this library")
        attributes: dict[str, Any] = {"reason": reason} if reason else {}
        results = []
        for output in node.outputs:
            shape = tuple(self.prime if size is None else int(size) for size in output.shape)
            if sum(size % self.prime == 0 for size in shape if size) != 1:
                shape = (self.prime, *[size for size in shape if not size or size % self.prime])
            label = type(operation).__name__
            results.append(self.emit("unsupported", read, shape, label=label, **attributes))
        return results

    def expand(self, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What a layer's `call` does, on symbolic tensors of its own; in training, and the same in evaluation."""
        if not self.training or _is_container(layer):
            return self._traced(layer, args, kwargs, self.training)
        drew, self.drew = self.drew, False
        began = len(self.steps)
        results: Any = None
        failure: Refused | None = None
        try:
            results = self._traced(layer, args, kwargs, True)
        except Refused as refused:
            failure = refused
        branches = "training" in inspect.signature(layer.call).parameters or self.drew
        branches = branches and not any(step.kind == "unsupported" for step in self.steps[began:])
        self.drew = drew
        if not branches or not compares_phases():
            if failure is not None:
                raise failure
            return results
        made = len(self.steps)
        self.training = False
        try:
            evaluated = self._traced(layer, args, kwargs, False)
            same_ = failure is None and self._same_but_for_dropout(results, evaluated)
        finally:
            self.training = True
            self.drew = drew
            if failure is not None:
                self._roll_back(began)
        if not same_ and not layer.trainable_variables and not _own_state(layer):
            (first, *others) = [each for each in tree.flatten(args) if isinstance(each, Moving)]
            if evaluated is first and not others and not kwargs:
                self._roll_back(began)
                return self.emit("dropout", [first], first.shape, expression=InTraining(layer))
        if failure is not None:
            raise Refused(f"in training, {failure}")
        if not same_:
            raise Refused("it computes something else in training than in evaluation")
        self._roll_back(made)
        return results

    def _roll_back(self, count: int) -> None:
        """Forgets all steps but the first ones."""
        gone = {step.output for step in self.steps[count:]}
        del self.steps[count:]
        for name in gone:
            del self.values[name], self.items[name]
        self._made = {key: each for key, each in self._made.items() if each.name not in gone}

    def _same_but_for_dropout(self, trained: Any, evaluated: Any) -> bool:
        """Whether items are the same functions of the input, but for what is dropped in training."""
        made = {step.output: step for step in self.steps}

        def source(name: Any) -> Any:
            while name in made and made[name].kind == "dropout":
                name = made[name].inputs[0]
            return name

        def attributes(step: Step) -> list[tuple[str, str]]:
            hidden = ("expression", "training")
            return sorted((key, repr(each)) for key, each in step.attributes.items() if key not in hidden)

        first, second = (tree.flatten(each) for each in (trained, evaluated))
        if len(first) != len(second):
            return False
        pending: list[tuple[Any, Any]] = []
        seen = set[tuple[Any, Any]]()
        for one, other in zip(first, second, strict=True):
            if isinstance(one, Moving) and isinstance(other, Moving):
                pending.append((one.name, other.name))
            elif not _same_argument(one, other):
                return False
        while pending:
            pair = one, other = tuple(source(each) for each in pending.pop())
            if one == other or pair in seen:
                continue
            seen.add(pair)
            step, twin = made.get(one), made.get(other)
            if step is None or twin is None:
                if step is not twin or not isinstance(one, str) or not isinstance(other, str):
                    return False
                if not _same_constant(one, other, self.constants, self.constants):
                    return False
                continue
            if step.kind != twin.kind or attributes(step) != attributes(twin) or len(step.inputs) != len(twin.inputs):
                return False
            if self.values[one].shape != self.values[other].shape:
                return False
            pending += zip(step.inputs, twin.inputs, strict=True)
        return True

    def _traced(self, layer: Any, args: list[Any], kwargs: dict[str, Any], training: bool) -> Any:
        args, kwargs = tree.map_structure(self.symbol, args), tree.map_structure(self.symbol, kwargs)
        if "training" in inspect.signature(layer.call).parameters:
            kwargs["training"] = training
        before = self.read
        self.read = set()
        try:
            try:
                with self._weights_as_symbols(layer), self._built_in_call(layer), in_phase(layer, training):
                    symbols = layer.call(*args, **kwargs)
                results = tree.map_structure(self.item, symbols)
            except (ChangesWeight, DrawsNumbers) as reason:
                self.drew = self.drew or isinstance(reason, DrawsNumbers)
                raise Refused(str(reason)) from reason
            except (TypeError, ValueError, AttributeError, RuntimeError, NotImplementedError, IndexError) as error:
                given = [self.item(each) for each in args if isinstance(each, keras.KerasTensor)]
                known = self.by_values(layer.call, given[0]) if len(given) == 1 and not layer.variables else None
                if known is not None:
                    return known
                raise Refused(f"it computes by other means than keras.ops ({first_line(error)})") from error
            unread = [each for each in layer._trainable_variables if id(each) not in self.read]
            if unread and not isinstance(layer, keras.Model):
                raise Refused(
                    f"its weight '{unread[0].name}' does not reach its result, or by other means than keras.ops, "
                    "which would fix it"
                )
        finally:
            self.read |= before
        return results

    @contextmanager
    def _weights_as_symbols(self, layer: Any) -> Iterator[None]:
        """A layer's attributes hold symbols for its variables, so that what is computed of them is written down."""
        if _is_container(layer) or not follows_weights():
            yield
            return
        symbols: dict[int, WeightSymbol] = {}
        changed: list[tuple[dict[str, Any], str, Any, Any]] = []

        def replaced(value: Any) -> Any:
            if isinstance(value, keras.Variable):
                if id(value) not in self.names or is_seed(value):
                    return value
                return symbols.setdefault(id(value), WeightSymbol(value))
            if isinstance(value, dict):
                made = {key: replaced(each) for key, each in value.items()}
                return made if any(made[key] is not value[key] for key in value) else value
            if isinstance(value, list | tuple) and type(value).__name__ in ("list", "tuple", "TrackedList"):
                several = [replaced(each) for each in value]
                kept = all(one is other for one, other in zip(several, value, strict=True))
                return value if kept else tuple(several) if isinstance(value, tuple) else several
            return value

        for each in layer._flatten_layers():
            held = vars(each)
            for name, value in list(held.items()):
                if name in _VARIABLE_LISTS or not isinstance(value, keras.Variable | list | tuple | dict):
                    continue
                other = replaced(value)
                if other is not value:
                    changed.append((held, name, value, other))

        def switch(on: bool) -> None:
            for held, name, value, other in changed:
                held[name] = other if on else value

        switch(True)
        self._substituted.append(switch)
        try:
            yield
        finally:
            self._substituted.pop()
            switch(False)

    @contextmanager
    def with_weights(self) -> Iterator[None]:
        """Layers hold their variables again."""
        hidden, self._substituted = self._substituted, []
        for switch in hidden[::-1]:
            switch(False)
        try:
            yield
        finally:
            self._substituted = hidden
            for switch in hidden:
                switch(True)

    @contextmanager
    def _built_in_call(self, layer: Any) -> Iterator[None]:
        """What `super().call(...)` of a layer is, where that is a layer of Keras that is a step."""
        known, handler = _known_class(layer), _table_entry(layer)
        if handler is None or known is None or _changed(layer, known) != {"call"} or "call" in vars(layer):
            yield
            return
        defining: Any = next(each for each in known.__mro__ if "call" in vars(each))
        original = vars(defining)["call"]

        def call(called: Any, *args: Any, **kwargs: Any) -> Any:
            if called is not layer or not has_symbols((args, kwargs)):
                return original(called, *args, **kwargs)
            given = kwargs.pop("training", None)
            kwargs = {key: each for key, each in kwargs.items() if each is not None}
            outer, self.training = self.training, self.training if given is None else bool(given)
            try:
                items, more = tree.map_structure(self.item, list(args)), tree.map_structure(self.item, kwargs)
                with self.with_weights():
                    return tree.map_structure(self.symbol, handler(self, layer, items, more))
            finally:
                self.training = outer

        defining.call = call
        try:
            yield
        finally:
            defining.call = original

    def apply(self, function: Any, x: Any) -> Any:
        """A function such as a layer's activation."""
        if function is None:
            return x
        try:
            return self.called(function, x)
        except (TypeError, ValueError, AttributeError) as error:
            known = self.by_values(function, x)
            if known is None:
                raise Refused(f"its activation computes by other means than keras.ops ({first_line(error)})") from error
            return known

    def called(self, function: Callable[[Any], Any], x: Item) -> Any:
        """What a layer or a function gives for a symbolic tensor."""
        tensor = keras.KerasTensor(x.shape)
        self.bind(tensor, x)
        return self.item(function(tensor))

    def by_values(self, function: Callable[[Any], Any], x: Moving) -> Any | None:
        """The result of a known function of one value, told by what it makes of numbers; None if it is none.

        Some of Keras' own activations (`hard_swish`, `mish`) leave `keras.ops` before they compute.
        """
        samples: dict[str, np.ndarray] = {}
        for root, points in x.samples.items():
            given = np.asarray(points, np.float32)
            try:
                straight, turned = (
                    _numpy(function(keras.ops.convert_to_tensor(each)))
                    for each in (given, np.ascontiguousarray(given[::-1]))
                )
            except Exception:  # whatever the user's function does not like about a vector of numbers
                return None
            if straight.shape != given.shape or not same(straight, turned[::-1], _CLOSE):
                return None
            samples[root] = straight.astype(np.float64)
        return self.told_by(samples, [x], x.shape)

    def told_by(self, samples: dict[str, np.ndarray], moving: Sequence[Moving], shape: Sequence[int]) -> Any | None:
        """What makes these samples: one of the operands, or a known function of what they came from."""
        for root, values in samples.items():
            for each in moving:
                if root in each.samples and same(values, each.samples[root], _CLOSE):
                    return each
        for root, values in samples.items():
            known, origin = identify(values, _CLOSE), self.items[root]
            if known is not None and origin.shape == shape:
                return self.emit(known[0], [origin], shape, samples=samples, **known[1]) if known[0] else origin
        return None


class _OverBatch(keras.Operation):
    """A weight in another shape, the same for every example."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def call(self, x: Any) -> Any:
        return keras.ops.broadcast_to(x, self.shape)

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(self.shape)


class Computed:
    """A function of weights: a result of an operation of `keras.ops`. Gets and gives NumPy arrays, or `WithMethods`."""

    def __init__(self, operation: Any, args: Any, kwargs: Any, names: Sequence[str], index: int) -> None:
        self.operation, self.args, self.kwargs = operation, args, kwargs
        self.names = tuple(names)
        self.index = index

    def __call__(self, *arrays: Any) -> Any:
        wrapped = isinstance(arrays[0], primitives_keras.WithMethods)
        tensors = [each.tensor if wrapped else keras.ops.convert_to_tensor(each) for each in arrays]
        result = self.result(dict(zip(self.names, tensors, strict=True)))
        return primitives_keras.WithMethods(result) if wrapped else _numpy(result)

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
            and all(map(_same_argument, *given))
        )


def _same_argument(one: Any, other: Any) -> bool:
    """Whether two arguments are the same; weights are compared by those who know them."""
    if isinstance(one, Fixed) and isinstance(other, Fixed):
        if one.name or other.name:
            return bool(one.name) == bool(other.name)
        return np.array_equal(one.data, other.data)
    return not isinstance(one, Item) and not isinstance(other, Item) and bool(one == other)


Constants = Mapping[str, Constant]


def _same_constant(one: str, other: str, first: Constants, second: Constants) -> bool:
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
        and all(_same_constant(*pair, first, second) for pair in operands)
    )


def _same_function(one: Any, other: Any) -> bool:
    if isinstance(one, Computed):
        return one.same(other)
    if isinstance(other, Computed) or one.__code__ is not other.__code__ or one.__defaults__ != other.__defaults__:
        return False
    cells = [[each.cell_contents for each in function.__closure__ or ()] for function in (one, other)]
    return len(cells[0]) == len(cells[1]) and all(repr(a) == repr(b) for a, b in zip(*cells, strict=True))


# What a class of the user's may say otherwise without changing what a layer computes.
_HARMLESS = {
    "__init__", "__module__", "__doc__", "__qualname__", "__firstlineno__", "__static_attributes__",
    "__annotations__", "__call__", "__repr__", "__str__", "__orig_bases__", "__parameters__", "__abstractmethods__",
    "_abc_impl", "__slots__", "__dict__", "__weakref__", "__annotate__", "__annotate_func__", "__new__",
    "__init_subclass__", "__del__", "__annotations_cache__", "get_config", "from_config", "build", "quantize",
    "compute_output_shape", "compute_output_spec", "compute_mask", "count_params", "get_build_config",
    "build_from_config", "get_compile_config", "compile_from_config", "save_own_variables", "load_own_variables",
    "save_assets", "load_assets", "add_weight", "add_loss", "stateless_call", "supports_masking", "name", "path",
    "summary", "train_step", "test_step", "predict_step", "compute_loss", "compute_metrics", "compile", "fit",
    "evaluate", "predict", "metrics", "make_train_function", "make_test_function", "make_predict_function",
    "train_on_batch", "test_on_batch", "predict_on_batch",
}  # fmt: skip
# Where Keras itself keeps what a layer holds.
_VARIABLE_LISTS = ("_trainable_variables", "_non_trainable_variables", "_layers", "_metrics", "_losses", "_tracker")


def compares_phases() -> bool:
    """Whether a layer's training is compared with its evaluation."""
    return True


def follows_weights() -> bool:
    """Whether what layers compute of their weights is written down."""
    return True


def finds_changes() -> bool:
    """Whether parts of Keras' layers that the user has changed are looked for."""
    return True


def _changed(operation: Any, known: type) -> set[str]:
    """The methods and properties of a class of Keras that a class of the user's, or the object, has its own of."""
    classes = itertools.takewhile(lambda each: each is not known, type(operation).__mro__)
    names = {name for each in classes for name in vars(each) if hasattr(known, name)}
    names |= {name for name, value in vars(operation).items() if callable(value) and hasattr(known, name)}
    return names - _HARMLESS


def _known_class(operation: Any) -> type | None:
    """The class of Keras, or of this library, that it is one of."""
    ours = ("keras.", "exactqat.")
    return next((each for each in type(operation).__mro__ if each.__module__.startswith(ours)), None)


def _table_entry(operation: Any) -> Handler | None:
    table = LAYERS if isinstance(operation, keras.Layer) else OPERATIONS
    for known in type(operation).__mro__:
        if known.__module__.startswith(("keras.", "exactqat.")) and known.__name__ in table:
            return table[known.__name__]
    return None


def _handler(operation: Any) -> Handler | None:
    """The handler of the class that says what the operation does; none where a part of it is the user's own."""
    known = _known_class(operation)
    if known is None:
        return None
    changed = _changed(operation, known)
    if changed and (finds_changes() or "call" in changed - vars(operation).keys()):
        return None
    return _table_entry(operation)


def _is_container(layer: Any) -> bool:
    """Whether a model does nothing but call its layers."""
    return (
        isinstance(layer, keras.Model)
        and "call" not in vars(layer)
        and type(layer).call.__module__.startswith("keras.")
    )


def is_seed(variable: Any) -> bool:
    return "seed_generator" in variable.path


def _own_state(layer: Any) -> list[Any]:
    """Variables that are no weights and no state of random numbers."""
    return [each for each in layer.non_trainable_variables if not is_seed(each)]


def _changed_kernel(layer: Any) -> str:
    """Why a layer's kernel is not what it computes with; empty where it is."""
    if getattr(layer, "quantization_mode", None):
        return f"quantized by Keras (quantize({layer.quantization_mode!r})); give the float model, before quantize"
    if getattr(layer, "lora_enabled", False):
        return "with enable_lora, its kernel is a sum; save the model and load it, which stores the sum as the kernel"
    return ""


def first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip() and "Exception encountered" not in line]
    line = lines[0] if lines else type(error).__name__
    return line.split(". ")[0].rstrip(".")


def _path(layer: Any) -> str:
    return str(getattr(layer, "path", None) or layer.name).replace("/", ".")


def _numpy(value: Any) -> np.ndarray:
    array = keras.ops.convert_to_numpy(value)
    return array.astype(np.float32) if array.dtype.kind == "f" else np.asarray(array)


# --- value by value ---------------------------------------------------------------------------------------------------

_KINDS = {
    **named_by("keras"),
    **{"Add": "add", "Subtract": "sub", "Multiply": "mul", "Divide": "div", "TrueDivide": "div"},
    **{"Maximum": "maximum", "Minimum": "minimum"},
}
# Of which there is no kind, but which may be a known function, or a part of one.
_FUNCTIONS = ("LeakyRelu", "Elu", "Gelu", "Celu", "Softplus", "HardTanh", "ReLU", "Clip")


# Of numbers that only a choice is made by; the function that the choice is part of may be a known one.
_COMPARISONS = ("Greater", "GreaterEqual", "Less", "LessEqual", "Where")


@operations(*_KINDS, *_FUNCTIONS, *_COMPARISONS)
def _elementwise(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    operands = [*args, *kwargs.values()]
    name = type(operation).__name__
    moving = [each for each in operands if isinstance(each, Moving)]
    shape = np.broadcast_shapes(*[each.shape for each in operands if isinstance(each, Item)])
    samples: dict[str, np.ndarray] = {}
    numbers = [each.number if isinstance(each, Fixed) else each for each in operands]
    plain = all(isinstance(each, Moving | int | float) for each in numbers)
    if plain and all(each.shape == shape for each in moving):
        for root in moving[0].samples:
            if all(root in each.samples for each in moving):
                given = [
                    np.asarray(each.samples[root] if isinstance(each, Moving) else each, np.float32) for each in numbers
                ]
                samples[root] = _numpy(operation.call(*map(keras.ops.convert_to_tensor, given))).astype(np.float64)
    told = c.told_by(samples, moving, shape)
    if told is not None:
        return told
    if name in _COMPARISONS:
        return c.emit("unsupported", moving, shape, samples=samples, label=name)
    if name not in _KINDS:
        told_ = {key: each for key, each in vars(operation).items() if isinstance(each, int | float) and key[0] != "_"}
        words = ", ".join(f"{key}={each}" for key, each in told_.items() if key != "built")
        raise Refused(f"with {words}" if words else "")
    operands = [
        each if isinstance(each, Moving) or number is None else number
        for each, number in zip(operands, numbers, strict=True)
    ]
    return c.emit(_KINDS[name], operands, shape, samples=samples)


@operations("HardShrink", "SoftShrink", "Threshold")
def _shrink(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    name = type(operation).__name__
    if name == "Threshold":
        return c.emit("threshold", [x], x.shape, least=float(operation.threshold), value=float(operation.default_value))
    return c.emit(name.lower(), [x], x.shape, width=float(operation.threshold))


@operations("TanhShrink")
def _tanh_shrink(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    return c.emit("sub", [x, c.emit("tanh", [x], x.shape)], x.shape)


@operations("Log1p", "Expm1")
def _beside_one(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    if type(operation).__name__ == "Log1p":
        return c.emit("log", [c.emit("add", [x, 1.0], x.shape)], x.shape)
    return c.emit("sub", [c.emit("exp", [x], x.shape), 1.0], x.shape)


@operations("Glu")
def _glu(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axis = int(operation.axis) % x.rank
    half = x.shape[axis] // 2
    one, two = c.cut(x, axis, 0, half), c.cut(x, axis, half, 2 * half)
    return c.emit("mul", [one, c.emit("sigmoid", [two], two.shape)], one.shape)


@operations("Power")
def _power(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, exponent = args
    exponent = exponent.number if isinstance(exponent, Fixed) else exponent
    if not isinstance(x, Moving) or not isinstance(exponent, int | float):
        raise Refused("its exponent is no number")
    return c.emit("square", [x], x.shape) if exponent == 2 else c.emit("pow", [x], x.shape, exponent=float(exponent))


@operations("Softmax", "LogSoftmax")
def _softmax(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    if not isinstance(operation.axis, int):
        raise Refused(f"with axis={operation.axis}; it is computed over one axis")
    kind = "softmax" if type(operation).__name__ == "Softmax" else "log_softmax"
    return c.emit(kind, [x], x.shape, axis=operation.axis % x.rank)


@layers("Softmax")
def _softmax_layer(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if not isinstance(layer.axis, int) and len(layer.axis) > 1:
        raise Refused(f"with axis={layer.axis}; it is computed over one axis")
    return c.expand(layer, args, kwargs)


@operations("Cast", "Copy", "ConvertToTensor")
def _same(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    dtype = getattr(operation, "dtype", None)
    whole = isinstance(args[0], Moving) and args[0].name in c.whole_inputs
    if dtype is not None and "float" not in str(dtype) and not whole:
        raise Refused("whole numbers made of real ones")
    return args[0]


@operations("CustomGradientOperation")
def _custom_gradient(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The forward computation, and a step that keeps the user's gradient."""
    if operation.results is None:
        (x,) = args
        known = c.by_values(lambda given: operation.forward(given), x)
        if known is None:
            raise Refused(f"it has a custom gradient, and computes by other means than keras.ops ({operation.failure})")
        results = [known]
    else:
        results = [c.item(each) for each in operation.results]
    if not keeps_custom_gradients():
        return results
    if kwargs or not all(isinstance(each, Item) for each in args):
        raise Refused("a function with a custom gradient is called with other arguments than tensors")
    made = []
    for index, result in enumerate(results):
        if not isinstance(result, Moving):
            raise Refused("it has a custom gradient and a result that does not depend on the input")
        expression = CustomGradient(operation, index)
        made.append(
            c.emit("custom_gradient", [result, *args], result.shape, label="custom_gradient", expression=expression)
        )
    return made


def keeps_custom_gradients() -> bool:
    """Whether gradients of the user's own are kept."""
    return True


class CustomGradient:
    """The expression of a step "custom_gradient": the value of `y`, and the gradient of the user's function."""

    def __init__(self, operation: Any, index: int) -> None:
        self.operation = operation
        self.index = index
        self.sources: tuple[str, ...] = ()

    def __call__(self, primitives: Any, y: Any, *operands: Any, shared: dict[Any, Any]) -> Any:
        if self.operation not in shared:
            shared[self.operation] = tree.flatten(self.operation.call(*operands))
        return primitives.straight_through(y, shared[self.operation][self.index])


@operations("DropoutOperation")
def _dropout_operation(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not c.training:
        raise Refused("it drops values in evaluation, too")
    if not operation.rate:
        return x
    shape = operation.noise_shape
    kept = () if shape is None else tuple(at for at, size in enumerate(shape) if size == 1 and x.shape[at] != 1)
    c.drew = True
    return c.emit("dropout", [x], x.shape, expression=Dropout(float(operation.rate), kept))


@operations("StopGradient")
def _stop(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return c.emit("identity", [args[0]], args[0].shape, expression=None, stop_gradient=True)


# --- over axes --------------------------------------------------------------------------------------------------------


@operations("Mean", "Sum", "Max", "Min", "Amax", "Amin", "Var", "Std")
def _reduce(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axis = operation.axis
    axes = (
        tuple(range(x.rank)) if axis is None else tuple(a % x.rank for a in ([axis] if isinstance(axis, int) else axis))
    )
    if c.batch_axis(x.shape) in axes:
        raise Refused("it mixes the examples of a batch")
    if getattr(operation, "initial", None) is not None:
        raise Refused(f"with initial={operation.initial}; leave it out, and take keras.ops.maximum or minimum of both")
    keep = bool(operation.keepdims)
    name = type(operation).__name__.lower()
    kind = {"max": "amax", "min": "amin"}.get(name, name)
    shape = [1 if at in axes else size for at, size in enumerate(x.shape) if keep or at not in axes]
    more: dict[str, Any] = {"correction": 0} if kind in ("var", "std") else {}
    return c.emit(kind, [x], shape, axes=tuple(sorted(axes)), keep_dims=keep, **more)


@operations("Norm")
def _length(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axes = tuple(sorted(int(axis) % x.rank for axis in operation.axis or ()))
    order = 2 if operation.ord is None else operation.ord
    if len(axes) != 1 or order not in (1, 2) or c.batch_axis(x.shape) in axes:
        raise Refused(f"with ord={operation.ord}, axis={operation.axis}; it is computed with ord=1 or 2 over one axis")
    keep = bool(operation.keepdims)
    shape = [1 if at in axes else size for at, size in enumerate(x.shape) if keep or at not in axes]
    return c.emit("norm", [x], shape, axes=axes, keep_dims=keep, order=order)


@operations("Argmax")
def _argmax(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axis = int(operation.axis) % x.rank
    keep = bool(operation.keepdims)
    shape = [1 if at == axis else size for at, size in enumerate(x.shape) if keep or at != axis]
    return c.emit("argmax", [x], shape, axis=axis, keep_dims=keep)


def _channel_axis(data_format: str | None, rank: int) -> int:
    return 1 if (data_format or keras.config.image_data_format()) == "channels_first" else rank - 1


def _each(value: Any, count: int) -> tuple[int, ...]:
    return (int(value),) * count if isinstance(value, int) else tuple(int(each) for each in value)


def _padding(
    word: str, sizes: Sequence[int], window: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Keras' word in numbers: its "same" is TensorFlow's."""
    pairs = []
    for size, side, stride, dilation in zip(sizes, window, strides, dilations, strict=True):
        reach = (side - 1) * dilation
        if word == "valid":
            pairs.append((0, 0))
        elif word == "causal":
            pairs.append((reach, 0))
        else:
            total = max((-(-size // stride) - 1) * stride + reach + 1 - size, 0)
            pairs.append((total // 2, total - total // 2))
    return tuple(pairs)


def _windowed(
    x: Moving, axis: int, window: Any, strides: Any, padding: Any, dilations: Any, channels: int
) -> list[int]:
    """Shape of what windows give."""
    spatial = iter(zip(window, strides, padding, dilations, strict=True))
    shape = []
    for at, size in enumerate(x.shape):
        if at in (0, axis):
            shape.append(size if at == 0 else channels)
            continue
        side, stride, (before, after), dilation = next(spatial)
        shape.append((size + before + after - (side - 1) * dilation - 1) // stride + 1)
    return shape


@operations("MaxPool", "AveragePool")
def _pool(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axis, count = _channel_axis(operation.data_format, x.rank), x.rank - 2
    window = _each(operation.pool_size, count)
    strides = window if operation.strides is None else _each(operation.strides, count)
    sizes = [size for at, size in enumerate(x.shape) if at not in (0, axis)]
    ones = (1,) * count
    padding = _padding(operation.padding, sizes, window, strides, ones)
    uneven = any(before != after for before, after in padding)
    if uneven and type(operation).__name__ == "AveragePool" and keras.backend.backend() == "torch":
        # There Keras repeats the edge and counts it, where the padding is not the same on both sides.
        spatial = iter(padding)
        pairs = tuple((0, 0) if at in (0, axis) else next(spatial) for at in range(x.rank))
        wide = [size + before + after for size, (before, after) in zip(x.shape, pairs, strict=True)]
        x = c.emit("pad", [x], wide, padding=pairs, mode="replicate", value=0.0)
        padding = ((0, 0),) * count
    shape = _windowed(x, axis, window, strides, padding, ones, x.shape[axis])
    common: dict[str, Any] = {"window": window, "strides": strides, "padding": padding, "channel_axis": axis}
    if type(operation).__name__ == "MaxPool":
        return c.emit("max_pool", [x], shape, dilations=ones, **common)
    return c.emit(
        "avg_pool", [x], shape, over=(0,) * count, count_include_pad=not any(map(any, padding)), divisor=None, **common
    )


@operations("AdaptiveAveragePool", "AdaptiveMaxPool")
def _adaptive_pool(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axis = _channel_axis(operation.data_format, x.rank)
    size = _each(operation.output_size, x.rank - 2)
    spatial = iter(size)
    shape = [each if at in (0, axis) else next(spatial) for at, each in enumerate(x.shape)]
    kind = "adaptive_avg_pool" if type(operation).__name__ == "AdaptiveAveragePool" else "adaptive_max_pool"
    return c.emit(kind, [x], shape, size=size, channel_axis=axis)


# --- movement ---------------------------------------------------------------------------------------------------------


@operations("Reshape")
def _reshape(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    sizes = [int(size) for size in tree.flatten(operation.newshape)]
    if -1 in sizes:
        known = -math.prod(sizes)
        sizes[sizes.index(-1)] = math.prod(x.shape) // known
    return c.reshape(x, sizes)


@operations("Squeeze", "ExpandDims")
def _units(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, axis = args[0], operation.axis
    shape = list(x.shape)
    if type(operation).__name__ == "ExpandDims":
        for each in sorted(a % (x.rank + 1) for a in ([axis] if isinstance(axis, int) else axis)):
            shape.insert(each, 1)
    else:
        axes = (
            [at for at, size in enumerate(shape) if size == 1]
            if axis is None
            else [axis]
            if isinstance(axis, int)
            else axis
        )
        gone = [each % x.rank for each in axes]
        shape = [size for at, size in enumerate(shape) if at not in gone]
    return c.reshape(x, shape)


@operations("Transpose")
def _transpose(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    axes = range(x.rank)[::-1] if operation.axes is None else operation.axes
    return c.permute(x, [axis % x.rank for axis in axes])


@operations("Swapaxes")
def _swap(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    order = list(range(x.rank))
    first, second = operation.axis1 % x.rank, operation.axis2 % x.rank
    order[first], order[second] = second, first
    return c.permute(x, order)


@operations("DepthToSpace", "SpaceToDepth")
def _blocks(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, side = args[0], int(operation.block_size)
    first = _channel_axis(operation.data_format, x.rank) == 1
    batch, *sizes = x.shape
    channels, height, width = sizes if first else (sizes[2], sizes[0], sizes[1])
    if type(operation).__name__ == "DepthToSpace":
        parts = (batch, channels // side**2, side, side, height, width) if first else (
            batch, height, width, side, side, channels // side**2)  # fmt: skip
        order = (0, 1, 4, 2, 5, 3) if first else (0, 1, 3, 2, 4, 5)
        made = (channels // side**2, height * side, width * side)
    else:
        parts = (batch, channels, height // side, side, width // side, side) if first else (
            batch, height // side, side, width // side, side, channels)  # fmt: skip
        order = (0, 1, 3, 5, 2, 4) if first else (0, 1, 3, 2, 4, 5)
        made = (channels * side**2, height // side, width // side)
    turned = c.permute(c.reshape(x, parts), order)
    return c.reshape(turned, (batch, *(made if first else (*made[1:], made[0]))))


@operations("GetItem")
def _get(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, key = args[0], args[1] if len(args) > 1 else kwargs["key"]
    keys = list(key) if isinstance(key, tuple | list) else [key]
    if any(isinstance(each, Item) for each in keys):
        raise Refused("its indices depend on the input")
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        given = sum(each is not None for each in keys) - 1
        keys[at : at + 1] = [slice(None)] * (x.rank - given)
    keys += [slice(None)] * (x.rank - sum(each is not None for each in keys))
    shape: list[int] = []
    axis = 0
    for each in keys:
        if each is None:
            shape.append(1)
            continue
        size = x.shape[axis]
        if isinstance(each, slice):
            start, stop, step = each.indices(size)
            if step < 1:
                raise Refused("backwards; use a flip")
            x = c.cut(x, axis, start, stop, step)
            shape.append(x.shape[axis])
        else:
            at = int(each) % size
            x = c.cut(x, axis, at, at + 1)
        axis += 1
    return c.reshape(x, shape)


@operations("Concatenate")
def _concatenate(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    items = tree.flatten(args)
    first = next(each for each in items if isinstance(each, Moving))
    axis = int(operation.axis) % first.rank
    shape = list(first.shape)
    shape[axis] = sum(each.shape[axis] for each in items)
    return c.emit("concat", items, shape, axis=axis)


@operations("Stack")
def _stack(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    items = tree.flatten(args)
    axis = int(operation.axis) % (items[0].rank + 1)
    wide = [c.reshape(each, (*each.shape[:axis], 1, *each.shape[axis:])) for each in items]
    shape = list(wide[0].shape)
    shape[axis] = len(items)
    return c.emit("concat", wide, shape, axis=axis)


@operations("Split")
def _split(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, axis = args[0], int(operation.axis) % args[0].rank
    given = operation.indices_or_sections
    ends = (
        [x.shape[axis] // given * (at + 1) for at in range(given)]
        if isinstance(given, int)
        else [*given, x.shape[axis]]
    )
    starts = [0, *ends[:-1]]
    return [c.cut(x, axis, start, end) for start, end in zip(starts, ends, strict=True)]


@operations("Pad")
def _pad(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, *rest = args
    value = rest[0] if rest else kwargs.get("constant_values")
    value = value.number if isinstance(value, Fixed) else value
    pairs = tuple((int(before), int(after)) for before, after in operation.pad_width)
    pairs = pairs * x.rank if len(pairs) == 1 else pairs
    mode = {"constant": "constant", "reflect": "reflect"}.get(operation.mode)
    if mode is None:
        raise Refused(f"with mode {operation.mode}")
    shape = [size + before + after for size, (before, after) in zip(x.shape, pairs, strict=True)]
    return c.emit("pad", [x], shape, padding=pairs, mode=mode, value=float(value or 0.0))


@operations("Flip")
def _flip(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, axis = args[0], operation.axis
    axes = (
        tuple(range(x.rank)) if axis is None else tuple(a % x.rank for a in ([axis] if isinstance(axis, int) else axis))
    )
    if c.batch_axis(x.shape) in axes:
        raise Refused("it turns the batch round")
    return c.emit("flip", [x], x.shape, axes=axes)


@operations("Repeat")
def _repeat(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, count = args[0], operation.repeats
    if not isinstance(count, int) or operation.axis is None:
        raise Refused("with a count for each entry")
    axis = int(operation.axis) % x.rank
    shape = list(x.shape)
    shape[axis] *= count
    indices = tuple(np.repeat(np.arange(x.shape[axis]), count).tolist())
    if axis == c.batch_axis(x.shape):
        raise Refused("it repeats the batch")
    return c.emit("gather", [x], shape, axis=axis, indices=indices)


@operations("BroadcastTo")
def _broadcast(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    shape = tuple(int(size) for size in operation.shape)
    return c.emit("expand", [args[0]], shape, shape=c.for_one(shape))


@operations("Resize")
def _resize(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    if operation.crop_to_aspect_ratio or operation.pad_to_aspect_ratio or operation.antialias:
        raise _aspect(operation)
    return _resized(c, x, _channel_axis(operation.data_format, x.rank), operation.size, operation.interpolation)


def _aspect(resizing: Any) -> Refused:
    given = [name for name in ("crop_to_aspect_ratio", "pad_to_aspect_ratio", "antialias") if getattr(resizing, name)]
    return Refused(f"with {', '.join(f'{name}=True' for name in given)}; it is computed with False")


def _resized(c: Converter, x: Moving, axis: int, size: Sequence[int], word: str) -> Moving:
    spatial = [at for at in range(x.rank) if at not in (0, axis)]
    factors = [new / x.shape[at] for new, at in zip(size, spatial, strict=True)]
    whole = all(factor == int(factor) for factor in factors)
    if word not in ("nearest", "bilinear") or (word == "nearest" and not whole):
        shown = ", ".join(f"{factor:.4g}" for factor in factors)
        raise Refused(
            f"with interpolation={word!r} by {shown}; it is computed by 'nearest' by whole factors or 'bilinear'"
        )
    shape = list(x.shape)
    for at, new in zip(spatial, size, strict=True):
        shape[at] = int(new)
    return c.emit(
        "resize",
        [x],
        shape,
        size=tuple(int(new) for new in size),
        mode=word,
        align_corners=False,
        scales=None,
        channel_axis=axis,
    )


@layers("UpSampling2D")
def _up_sampling(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axis = _channel_axis(layer.data_format, x.rank)
    sizes = [size for at, size in enumerate(x.shape) if at not in (0, axis)]
    return _resized(c, x, axis, [size * by for size, by in zip(sizes, layer.size, strict=True)], layer.interpolation)


# --- weights ----------------------------------------------------------------------------------------------------------


def _convolve(
    c: Converter,
    x: Moving,
    weight: Fixed,
    bias: Fixed | None,
    strides: Any,
    word: str,
    dilations: Any,
    groups: int,
    axis: int,
    module: str,
) -> Moving:
    """weight: [out, in / groups, *window]"""
    count = x.rank - 2
    strides, dilations, window = _each(strides, count), _each(dilations, count), weight.shape[2:]
    sizes = [size for at, size in enumerate(x.shape) if at not in (0, axis)]
    padding = _padding(word, sizes, window, strides, dilations)
    shape = _windowed(x, axis, window, strides, padding, dilations, weight.shape[0])
    return c.emit(
        "conv",
        [x, weight, bias],
        shape,
        module=module,
        strides=strides,
        padding=padding,
        dilations=dilations,
        groups=groups,
        channel_axis=axis,
        padding_mode="zeros",
    )


def _kernel(c: Converter, kernel: Fixed) -> Fixed:
    """[*window, in / groups, out] as [out, in / groups, *window]."""
    rank = len(kernel.shape)
    order = (rank - 1, rank - 2, *range(rank - 2))
    return c.then(kernel, [kernel.shape[at] for at in order], lambda array: array.transpose(order))


def _depthwise_kernel(c: Converter, kernel: Fixed) -> Fixed:
    """[*window, channels, multiplier] as [channels * multiplier, 1, *window]."""
    rank = len(kernel.shape)
    window, outputs = kernel.shape[:-2], kernel.shape[-2] * kernel.shape[-1]
    order = (rank - 2, rank - 1, *range(rank - 2))
    return c.then(kernel, (outputs, 1, *window), lambda array: array.transpose(order).reshape((outputs, 1, *window)))


@layers("Conv1D", "Conv2D")
def _conv(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axis = _channel_axis(layer.data_format, x.rank)
    weight, bias = (
        _kernel(c, c.weight(layer._kernel if hasattr(layer, "_kernel") else layer.kernel)),
        c.optional(layer.bias),
    )
    path = c.layer_path(layer._kernel if hasattr(layer, "_kernel") else layer.kernel)
    made = _convolve(
        c, x, weight, bias, layer.strides, layer.padding, layer.dilation_rate, int(layer.groups), axis, path
    )
    return c.apply(layer.activation, made)


@layers("Conv3D", "Conv3DTranspose")
def _volume(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    raise Refused(f"with windows over three axes, {tuple(layer.kernel_size)}")


@layers("DepthwiseConv1D", "DepthwiseConv2D")
def _depthwise(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axis = _channel_axis(layer.data_format, x.rank)
    weight = _depthwise_kernel(c, c.weight(layer.kernel))
    path = c.layer_path(layer.kernel)
    made = _convolve(
        c,
        x,
        weight,
        c.optional(layer.bias),
        layer.strides,
        layer.padding,
        layer.dilation_rate,
        x.shape[axis],
        axis,
        path,
    )
    return c.apply(layer.activation, made)


@layers("SeparableConv1D", "SeparableConv2D")
def _separable(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axis, path = _channel_axis(layer.data_format, x.rank), c.layer_path(layer.depthwise_kernel)
    first = _depthwise_kernel(c, c.weight(layer.depthwise_kernel))
    second = _kernel(c, c.weight(layer.pointwise_kernel))
    rate = layer.dilation_rate
    y = _convolve(c, x, first, None, layer.strides, layer.padding, rate, x.shape[axis], axis, f"{path}.depthwise")
    made = _convolve(c, y, second, c.optional(layer.bias), 1, "valid", 1, 1, axis, path)
    return c.apply(layer.activation, made)


@layers("Conv1DTranspose", "Conv2DTranspose")
def _conv_transpose(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    axis, count = _channel_axis(layer.data_format, x.rank), x.rank - 2
    kernel = c.weight(layer.kernel)
    *window, outputs, inputs = kernel.shape
    order = (count + 1, count, *range(count))
    weight = c.then(kernel, (inputs, outputs, *window), lambda array: array.transpose(order))
    strides, dilations = _each(layer.strides, count), _each(layer.dilation_rate, count)
    shape = [int(size) for size in layer.compute_output_shape(x.shape)]
    sizes = [size for at, size in enumerate(x.shape) if at not in (0, axis)]
    results = [size for at, size in enumerate(shape) if at not in (0, axis)]
    cut, extra = [], []
    for size, result, side, stride, dilation in zip(sizes, results, window, strides, dilations, strict=True):
        whole = (size - 1) * stride + (side - 1) * dilation + 1
        # As the gradient of a convolution with that padding.
        before = 0 if layer.padding == "valid" else max((size - 1) * stride + side - result, 0) // 2
        after = whole - before - result
        cut.append((before, max(after, 0)))
        extra.append(max(-after, 0))
    made = c.emit(
        "conv_transpose",
        [x, weight, c.optional(layer.bias)],
        shape,
        module=c.layer_path(layer.kernel),
        strides=strides,
        padding=tuple(cut),
        output_padding=tuple(extra),
        dilations=dilations,
        groups=1,
        channel_axis=axis,
    )
    return c.apply(layer.activation, made)


@operations("Conv", "DepthwiseConv")
def _conv_operation(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """`keras.ops.conv` with a weight, in a layer of the user's."""
    x, kernel = args
    if not isinstance(x, Moving) or not isinstance(kernel, Fixed) or not kernel.name:
        raise Refused("its kernel is no weight")
    axis, path = _channel_axis(operation.data_format, x.rank), kernel.name.rpartition(".")[0]
    depthwise = type(operation).__name__ == "DepthwiseConv"
    weight = _depthwise_kernel(c, kernel) if depthwise else _kernel(c, kernel)
    groups = x.shape[axis] // weight.shape[1]
    rate, strides = operation.dilation_rate, operation.strides
    return _convolve(c, x, weight, None, strides, operation.padding, rate, groups, axis, path)


def _linear(c: Converter, x: Any, kernel: Fixed, bias: Fixed | None, module: str) -> Moving:
    """kernel: [in, out]"""
    weight = c.then(kernel, kernel.shape[::-1], lambda array: array.transpose((1, 0)))
    return c.emit("linear", [x, weight, bias], (*x.shape[:-1], kernel.shape[1]), module=module)


@layers("Dense")
def _dense(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    kernel = getattr(layer, "_kernel", None)
    kernel = layer.kernel if kernel is None else kernel
    return c.apply(layer.activation, _linear(c, x, c.weight(kernel), c.optional(layer.bias), c.layer_path(kernel)))


@layers("EinsumDense")
def _einsum_dense(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    kernel = getattr(layer, "_kernel", None)
    kernel = layer.kernel if kernel is None else kernel
    made = _contract(c, layer.equation, x, c.weight(kernel), c.optional(layer.bias), c.layer_path(kernel))
    return c.apply(layer.activation, made)


def _contract(c: Converter, equation: str, x: Moving, kernel: Fixed, bias: Fixed | None, module: str) -> Item:
    """An einsum of a value with a weight."""
    left, result = equation.replace(" ", "").split("->")
    first, second = left.split(",")
    if first.startswith("..."):
        free = "".join(each for each in "ABCDEFGH" if each not in equation)[: x.rank - len(first) + 3]
        first, result = first.replace("...", free), result.replace("...", free)
    summed = [each for each in first if each not in result]
    kept, made = [each for each in first if each in result], [each for each in second if each not in first]
    if any(each in kept for each in second) or len(first) != x.rank:
        raise Refused(f"with the equation {equation}")
    inputs = math.prod(x.shape[first.index(each)] for each in summed)
    order = [second.index(each) for each in (*summed, *made)]
    sizes = [kernel.shape[second.index(each)] for each in made]
    matrix = c.then(
        kernel, (inputs, math.prod(sizes)), lambda a: a.transpose(order).reshape((inputs, math.prod(sizes)))
    )
    rows = c.permute(x, [first.index(each) for each in (*kept, *summed)])
    lead = [x.shape[first.index(each)] for each in kept]
    flat = None
    if bias is not None:
        wanted = [kernel.shape[second.index(each)] if each in made else 1 for each in result]
        shape = (1,) * (len(wanted) - len(bias.shape)) + bias.shape
        if list(shape) != wanted or [each for each in result if each in made] != made:
            raise Refused("with a bias over other axes than its own")
        flat = c.then(bias, (math.prod(sizes),), lambda array: array.reshape((math.prod(sizes),)))
    product = _linear(c, c.reshape(rows, (*lead, inputs)), matrix, flat, module)
    names = [*kept, *made]
    return c.permute(c.reshape(product, (*lead, *sizes)), [names.index(each) for each in result])


@operations("Einsum")
def _einsum(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    equation, (first, second) = operation.subscripts, args
    if isinstance(second, Fixed) and isinstance(first, Moving):
        return _contract(c, equation, first, second, None, "")
    if not isinstance(first, Moving) or not isinstance(second, Moving) or "." in equation:
        raise Refused(f"with the equation {equation}")
    left, result = equation.replace(" ", "").split("->")
    a, b = left.split(",")
    shared = [each for each in a if each in b]
    lead = [each for each in shared if each in result]
    summed = [each for each in shared if each not in result]
    rows, columns = [each for each in a if each not in b], [each for each in b if each not in a]
    sizes = dict(zip(a, first.shape, strict=True)) | dict(zip(b, second.shape, strict=True))

    def product(names: Sequence[str]) -> int:
        return math.prod(sizes[each] for each in names)

    one = c.reshape(
        c.permute(first, [a.index(each) for each in (*lead, *rows, *summed)]),
        [*[sizes[each] for each in lead], product(rows), product(summed)],
    )
    two = c.reshape(
        c.permute(second, [b.index(each) for each in (*lead, *summed, *columns)]),
        [*[sizes[each] for each in lead], product(summed), product(columns)],
    )
    made: Item = c.emit("matmul", [one, two], [*[sizes[each] for each in lead], product(rows), product(columns)])
    names = [*lead, *rows, *columns]
    return c.permute(c.reshape(made, [sizes[each] for each in names]), [names.index(each) for each in result])


@operations("Matmul")
def _matmul(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    first, second = args
    if isinstance(first, Moving) and isinstance(second, Fixed) and len(second.shape) == 2 and second.name:
        return _linear(c, first, second, None, second.name.rpartition(".")[0])
    shape = (*np.broadcast_shapes(first.shape[:-2], second.shape[:-2]), first.shape[-2], second.shape[-1])
    return c.emit("matmul", [first, second], shape)


@operations("DotProductAttention")
def _attention(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """[batch, time, heads, size]"""
    given = inspect.signature(operation.call).bind(*args, **kwargs).arguments
    query, key, value = (given[name] for name in ("query", "key", "value"))
    mask, bias = given.get("mask"), given.get("bias")
    if getattr(operation, "attn_logits_soft_cap", None):
        raise Refused(f"with attn_logits_soft_cap={operation.attn_logits_soft_cap}; it is computed without, None")
    for name, each in (("mask", mask), ("bias", bias)):
        if isinstance(each, Moving):
            raise Refused(
                f"with {name}, which depends on the input; it is computed with one that is fixed, or use_causal_mask"
            )
    if mask is not None and bias is not None:
        raise Refused("with mask and bias; give one of them")
    if mask is not None:
        bias = Fixed(data=np.where(mask.data, 0.0, SURELY_MASKED).astype(np.float32), shape=mask.shape)
    query, key, value = (c.permute(each, (0, 2, 1, 3)) for each in (query, key, value))
    scale = given.get("scale")
    made = c.emit(
        "attention",
        [query, key, value, bias],
        (*query.shape[:3], value.shape[3]),
        causal=bool(operation.is_causal),
        scale=float(1 / math.sqrt(query.shape[-1]) if scale is None else scale),
    )
    return c.permute(made, (0, 2, 1, 3))


# --- recurrent layers -------------------------------------------------------------------------------------------------


@layers("RNN", "Bidirectional")
def _recurrent(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The sequence or its last entry, as the layer says, and its states where it gives them."""
    if len(args) > 1 or kwargs:
        raise Refused(
            f"called with {', '.join(sorted(kwargs) or ['a state'])}; it takes a sequence and starts from zero"
        )
    (x,) = args
    if not isinstance(layer, keras.layers.Bidirectional):
        sequence, *states = _run_of_time(c, layer, x)
        if layer.return_sequences and layer.go_backwards:  # Keras gives it in the order in which it was made
            sequence = c.emit("flip", [sequence], sequence.shape, axes=(1,))
        first = sequence if layer.return_sequences else states[0]
        return [first, *states] if layer.return_state else first
    both = [_run_of_time(c, each, x) for each in (layer.forward_layer, layer.backward_layer)]
    one, two = (made[0] if layer.return_sequences else made[1] for made in both)
    states = [*both[0][1:], *both[1][1:]] if layer.return_state else []
    if layer.merge_mode is None:
        return [one, two, *states]
    if layer.merge_mode == "concat":
        merged = c.emit("concat", [one, two], (*one.shape[:-1], one.shape[-1] + two.shape[-1]), axis=one.rank - 1)
    else:
        merged = c.emit("mul" if layer.merge_mode == "mul" else "add", [one, two], one.shape)
        if layer.merge_mode == "ave":
            merged = c.emit("mul", [merged, 0.5], merged.shape)
    return [merged, *states] if states else merged


@layers("TimeDistributed")
def _time_distributed(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """All times at once, as further examples; with batch norm inside time by time, each by statistics of its own."""
    x, inner = args[0], layer.layer
    if kwargs:
        raise Refused(f"called with {', '.join(sorted(kwargs))}; it takes a sequence alone")
    batch, times = x.shape[:2]
    if not any(isinstance(each, keras.layers.BatchNormalization) for each in inner._flatten_layers()):
        made = c.called(inner, c.reshape(x, (batch * times, *x.shape[2:])))
        return c.reshape(made, (batch, times, *made.shape[1:]))
    every = [c.called(inner, c.reshape(c.cut(x, 1, at, at + 1), (batch, *x.shape[2:]))) for at in range(times)]
    rest = every[0].shape[1:]
    return c.emit("concat", [c.reshape(each, (batch, 1, *rest)) for each in every], (batch, times, *rest), axis=1)


_CELLS = {keras.layers.LSTMCell: "lstm", keras.layers.GRUCell: "gru", keras.layers.SimpleRNNCell: "rnn"}


def _run_of_time(c: Converter, layer: Any, x: Moving) -> list[Any]:
    """The sequence of results in the order of time, and the last states."""
    cell: Any = getattr(layer, "cell", None)
    if type(cell) not in _CELLS or not isinstance(layer, keras.layers.RNN) or x.rank != 3:
        raise Refused(
            "only LSTM, GRU and SimpleRNN over a sequence of vectors are unrolled; use one of them, or Conv1D over time"
        )
    if cell.recurrent_dropout:
        raise Refused(f"with recurrent_dropout={cell.recurrent_dropout}; it is unrolled with recurrent_dropout=0.0")
    if layer.stateful:
        raise Refused("with stateful=True; the state starts from zero at every call, which is stateful=False")
    if cell.dropout and c.training:
        # One mask for all times.
        x = c.emit("dropout", [x], x.shape, expression=Dropout(float(cell.dropout), (1,)))
    kind = _CELLS[type(cell)]
    # What a step of the network says: PyTorch's LSTM and GRU.
    usual = cell.activation is keras.activations.tanh and kind != "rnn"
    usual = usual and cell.recurrent_activation is keras.activations.sigmoid
    if not (usual and getattr(cell, "reset_after", True)):
        return _by_steps(c, layer, kind, x)
    units = int(cell.units)
    gates = 4 if kind == "lstm" else 3
    kernel, back = (c.weight(each) for each in (cell.kernel, cell.recurrent_kernel))
    weights = [c.then(each, each.shape[::-1], lambda array: array.transpose((1, 0))) for each in (kernel, back)]
    if cell.use_bias:
        bias = c.weight(cell.bias)
        if kind == "lstm":
            weights += [bias, Fixed(data=np.zeros(gates * units, np.float32), shape=(gates * units,))]
        else:
            weights += [c.then(bias, (gates * units,), lambda a, at=at: a[at]) for at in (0, 1)]
    shape = (*x.shape[:2], units)
    last = (1, x.shape[0], units)
    results = [
        c.emit(
            kind,
            [x, *weights],
            last if output else shape,
            module=_path(layer),
            layers=1,
            bidirectional=False,
            batch_first=True,
            has_bias=bool(cell.use_bias),
            backwards=bool(layer.go_backwards),
            update_first=kind == "gru",
            output=output,
        )
        for output in range(3 if kind == "lstm" else 2)
    ]
    return [results[0], *(c.reshape(each, (x.shape[0], units)) for each in results[1:])]


def _by_steps(c: Converter, layer: Any, kind: str, x: Moving) -> list[Any]:
    """As `_run_of_time`, from products, sums and functions: other activations, a reset before the product, no gates.

    The first state is zero, so there is no product with it.
    """
    cell, (batch, count) = layer.cell, x.shape[:2]
    if count > MOST_TIME_STEPS:
        raise Refused(f"over {count} steps of time; at most {MOST_TIME_STEPS} are unrolled")
    units, path = int(cell.units), c.layer_path(cell.kernel)
    back, bias = c.weight(cell.recurrent_kernel), c.optional(cell.bias)
    back_bias: Fixed | None = None
    if bias is not None and len(bias.shape) == 2:  # of the input, and behind the product with the state
        both, width = bias, bias.shape[1]
        bias, back_bias = (c.then(both, (width,), lambda a, at=at: a[at]) for at in (0, 1))
    function, gate = cell.activation, getattr(cell, "recurrent_activation", None)

    def part(item: Any, first: int, many: int = 1) -> Any:
        """Some neighbouring gates along the last axis."""
        start, stop = first * units, (first + many) * units
        if isinstance(item, Fixed):
            return c.then(item, (*item.shape[:-1], stop - start), lambda a: a[..., start:stop])
        return c.cut(item, 1, start, stop)

    def combine(word: str, one: Any, other: Any) -> Moving:
        return c.emit(word, [one, other], one.shape)

    def product(state: Moving, first: int, many: int) -> Moving:
        return _linear(c, state, *columns[first, many], path)

    def lstm(given: Moving, state: Moving | None, memory: Moving | None) -> tuple[Moving, Moving]:
        total = given if state is None else combine("add", given, product(state, 0, 4))
        into, forget, out = (c.apply(gate, part(total, at)) for at in (0, 1, 3))
        entering = combine("mul", into, c.apply(function, part(total, 2)))
        memory = entering if memory is None else combine("add", combine("mul", forget, memory), entering)
        return combine("mul", out, c.apply(function, memory)), memory

    def gru(given: Moving, state: Moving | None, memory: Moving | None) -> tuple[Moving, None]:
        gates, new = part(given, 0, 2), part(given, 2)
        if cell.reset_after:
            returned: Any = back_bias if state is None else product(state, 0, 3)
            if returned is not None:
                gates = combine("add", gates, part(returned, 0, 2))
                new = combine("add", new, combine("mul", c.apply(gate, part(gates, 1)), part(returned, 2)))
        elif state is not None:
            gates = combine("add", gates, product(state, 0, 2))
            kept = combine("mul", c.apply(gate, part(gates, 1)), state)
            new = combine("add", new, product(kept, 2, 1))
        update, new = c.apply(gate, part(gates, 0)), c.apply(function, new)
        if state is None:
            return combine("sub", new, combine("mul", update, new)), None
        return combine("add", new, combine("mul", update, combine("sub", state, new))), None

    def rnn(given: Moving, state: Moving | None, memory: Moving | None) -> tuple[Moving, None]:
        total = given if state is None else combine("add", given, product(state, 0, 1))
        return c.apply(function, total), None

    step = {"lstm": lstm, "gru": gru, "rnn": rnn}[kind]
    uses = {
        "lstm": [(0, 4)],
        "gru": [(0, 3)] if getattr(cell, "reset_after", False) else [(0, 2), (2, 1)],
        "rnn": [(0, 1)],
    }
    # Once for all times, which so have the same weights.
    columns = {use: (part(back, *use), None if back_bias is None else part(back_bias, *use)) for use in uses[kind]}
    products = _linear(c, x, c.weight(cell.kernel), bias, path)
    state: Moving | None = None
    memory: Moving | None = None
    made: dict[int, Moving] = {}
    for at in reversed(range(count)) if layer.go_backwards else range(count):
        given = c.reshape(c.cut(products, 1, at, at + 1), (batch, products.shape[2]))
        assert isinstance(given, Moving)
        state, memory = step(given, state, memory)
        made[at] = state
    rows = [c.reshape(made[at], (batch, 1, units)) for at in range(count)]
    sequence = rows[0] if count == 1 else c.emit("concat", rows, (batch, count, units), axis=1)
    return [sequence, *(each for each in (state, memory) if each is not None)]


# --- norms and noise --------------------------------------------------------------------------------------------------


@layers("BatchNormalization")
def _batch_norm(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    axis = layer.axis if isinstance(layer.axis, int) else layer.axis[0]
    tensors = [layer.gamma, layer.beta, layer.moving_mean, layer.moving_variance]
    return c.emit(
        "batch_norm",
        [x, *(c.optional(each) for each in tensors)],
        x.shape,
        module=c.layer_path(layer.moving_mean),
        epsilon=float(layer.epsilon),
        momentum=1.0 - float(layer.momentum),
        channel_axis=axis % x.rank,
        training=bool(layer.trainable) and c.training,
        counter="",
    )


@layers("LayerNormalization")
def _layer_norm(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if getattr(layer, "rms_scaling", False):
        raise Refused("with rms_scaling=True; use RMSNormalization")
    axes = _last_axes(layer.axis, x.rank)
    tensors = [c.optional(each) for each in (layer.gamma, layer.beta)]
    return c.emit("layer_norm", [x, *tensors], x.shape, module=_path(layer), axes=axes, epsilon=float(layer.epsilon))


def _last_axes(axis: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """The axes that a norm is over."""
    axes = tuple(sorted(int(each) % rank for each in ([axis] if isinstance(axis, int) else axis)))
    if axes != tuple(range(rank - len(axes), rank)) or 0 in axes:
        raise Refused(f"with axis={axis} of {rank} axes; it is computed over the last ones, such as axis=-1")
    return axes


@layers("RMSNormalization")
def _rms_norm(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, axes = args[0], _last_axes(layer.axis, args[0].rank)
    weight = c.weight(layer.scale)
    return c.emit("rms_norm", [x, weight], x.shape, module=_path(layer), axes=axes, epsilon=float(layer.epsilon))


@operations("LayerNorm", "RMSNorm")
def _norm_operation(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """`keras.ops.layer_normalization` and `rms_normalization`, in a layer of the user's."""
    x, *weights = [*args, *kwargs.values()]
    if not isinstance(x, Moving) or getattr(operation, "rms_scaling", False):
        raise Refused("with rms_scaling; use rms_normalization")
    kind, count = ("layer_norm", 2) if type(operation).__name__ == "LayerNorm" else ("rms_norm", 1)
    epsilon = keras.config.epsilon() if operation.epsilon is None else operation.epsilon
    weights = (weights + [None, None])[:count]
    return c.emit(kind, [x, *weights], x.shape, axes=_last_axes(operation.axis, x.rank), epsilon=float(epsilon))


@operations("Normalize")
def _normalize(c: Converter, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    axis = operation.axis if isinstance(operation.axis, int) else [*(operation.axis or ())]
    if isinstance(axis, list) and len(axis) == 1:
        (axis,) = axis
    if not isinstance(axis, int) or operation.order != 2:
        raise Refused(
            f"with axis={operation.axis}, order={operation.order}; it is computed over one axis, with order=2"
        )
    return c.emit("normalize", [x], x.shape, axis=axis % x.rank, epsilon=float(operation.epsilon or 1e-7))


@layers("SpectralNormalization")
def _spectral_norm(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    raise Refused(
        "it divides its layer's kernel anew in training; give the layer inside, which holds the divided kernel"
    )


@layers("GroupNormalization")
def _group_norm(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, axis = args[0], int(layer.axis) % args[0].rank
    groups = x.shape[axis] if layer.groups == -1 else int(layer.groups)
    order = [0, axis, *(at for at in range(1, x.rank) if at != axis)]
    first = c.permute(x, order)
    tensors = [c.optional(each) for each in (layer.gamma, layer.beta)]
    made = c.emit(
        "group_norm", [first, *tensors], first.shape, groups=groups, epsilon=float(layer.epsilon), channel_axis=1
    )
    return c.permute(made, [order.index(at) for at in range(x.rank)])


@layers("Dropout", "SpatialDropout1D", "SpatialDropout2D")
def _dropout(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not layer.rate or not c.training:
        return x
    kept: tuple[int, ...] = ()
    if type(layer).__name__.startswith("Spatial"):
        axis = _channel_axis(getattr(layer, "data_format", None), x.rank)
        kept = tuple(at for at in range(1, x.rank) if at != axis)
    elif layer.noise_shape is not None:
        kept = tuple(at for at, size in enumerate(layer.noise_shape) if size == 1 and x.shape[at] != 1)
    return c.emit("dropout", [x], x.shape, expression=Dropout(float(layer.rate), kept))


class InTraining:
    """The expression of a step that training alone has: what a layer of Keras does then, by its own random numbers."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.sources: tuple[str, ...] = ()

    def __call__(self, primitives: Any, x: Any, key: Any) -> Any:
        return self.layer(x, training=True)


@layers("GaussianNoise", "GaussianDropout", "AlphaDropout", "StochasticDepth")
def _noise(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if not c.training:
        return args[0]
    return c.emit("dropout", [args[0]], args[0].shape, expression=InTraining(layer))


@layers("ActivityRegularization")
def _nothing(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return args[0]


@layers("BaseImagePreprocessingLayer")
def _image(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, name = args[0], type(layer).__name__
    if name == "RandomCrop" or not (name.startswith("Rand") or name in ("MixUp", "CutMix", "AugMix")):
        raise Refused("it prepares images; do it to the data, in front of the model")
    if not c.training:
        return x
    return c.emit("dropout", [x], x.shape, expression=InTraining(layer))


@layers("Masking")
def _masking(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    raise Refused("its mask depends on the input; give sequences of one length, without it")


@layers(
    "STFTSpectrogram", "MelSpectrogram", "Discretization", "CategoryEncoding", "Hashing", "HashedCrossing",
    "StringLookup", "IntegerLookup", "TextVectorization",
)  # fmt: skip
def _data(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    raise Refused("it prepares data; do it in front of the model")


@layers("CenterCrop")
def _center_crop(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, axis = args[0], _channel_axis(layer.data_format, args[0].rank)
    spatial = [at for at in range(1, x.rank) if at != axis]
    for at, size in zip(spatial, (layer.height, layer.width), strict=True):
        if size > x.shape[at]:
            raise Refused("of images that are smaller than the crop")
        start = (x.shape[at] - size) // 2
        x = c.cut(x, at, start, start + size)
    return x


@layers("Resizing")
def _resizing(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if layer.crop_to_aspect_ratio or layer.pad_to_aspect_ratio or layer.antialias:
        raise _aspect(layer)
    x = args[0]
    return _resized(c, x, _channel_axis(layer.data_format, x.rank), (layer.height, layer.width), layer.interpolation)


@layers("Embedding")
def _embedding(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    raise Refused("")


@layers("Rescaling")
def _rescaling(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    scale, offset = (np.asarray(each, np.float32) for each in (layer.scale, layer.offset))
    scaled = c.emit("mul", [x, Fixed(data=scale, shape=scale.shape)], x.shape)
    return c.emit("add", [scaled, Fixed(data=offset, shape=offset.shape)], x.shape) if offset.any() else scaled


@layers("Normalization")
def _normalization(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    mean, deviation = _numpy(layer.mean), np.maximum(np.sqrt(_numpy(layer.variance)), 1e-7)
    # (x - mean) / deviation, or the way back.
    scale, offset = (deviation, mean) if layer.invert else (1 / deviation, -mean / deviation)
    scaled = c.emit("mul", [x, Fixed(data=scale, shape=scale.shape)], x.shape)
    return c.emit("add", [scaled, Fixed(data=offset, shape=offset.shape)], x.shape)


@layers("PReLU")
def _prelu(c: Converter, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, alpha = args[0], c.weight(layer.alpha)
    if any(size != 1 for size in alpha.shape[:-1]):
        # A slope for each place, Keras' default: x + (slope - 1) * min(x, 0). Slopes begin at 0, which has no scale.
        below = c.emit("minimum", [x, 0.0], x.shape)
        less = c.then(alpha, alpha.shape, lambda array: array - 1.0)
        return c.emit("add", [x, c.emit("mul", [below, less], x.shape)], x.shape)
    slope = c.then(alpha, (alpha.shape[-1],), lambda array: array.reshape((-1,)))
    return c.emit("prelu", [x, slope], x.shape, module=c.layer_path(layer.alpha), channel_axis=x.rank - 1)


# --- models -----------------------------------------------------------------------------------------------------------


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


def variable_names(model: Any) -> dict[int, str]:
    """Names of a model's variables by identity: their paths, with dots."""
    names: dict[int, str] = {}
    taken: set[str] = set()
    for variable in model.variables:
        if id(variable) in names:
            continue
        path = variable.path.replace("/", ".")
        own = path.removeprefix(f"{model.name}.")
        name = next(
            each for each in itertools.chain([own], (f"{own}_{n}" for n in itertools.count(2))) if each not in taken
        )
        names[id(variable)] = name
        taken.add(name)
    return names


def capture(model: Any, shapes: Any, names: Mapping[int, str], losses: list[str] | None = None) -> Network:
    """The network that a built model computes in evaluation, for a batch of any size.

    Args:
        shapes: a tuple for each input, nested as the model takes them, the batch in front (its size does not matter).
        names: of variables; see `variable_names`.
        losses: gets the paths of layers that add a loss of what they compute, which no network holds.

    Raises:
        CaptureError: the model cannot be called on symbolic tensors.
    """
    known = [size for shape in _flat_shapes(shapes) for size in shape[1:]]
    known += [size for each in model.variables for size in each.shape]

    def fitting(stand_ins: Sequence[int]) -> list[int]:
        return [each for each in stand_ins if all(not size or size % each for size in known)]

    large, small = fitting(_STAND_INS), fitting(_OTHER_STAND_INS)
    if not compares_batches():
        return _captured(model, shapes, names, losses, large[0])
    sizes = {"large": large, "small": small or large[2:]}
    made: dict[str, Network | CaptureError] = {}
    words = ["large", "small"]
    for attempt in range(3):
        for word in words:
            if attempt >= len(sizes[word]):
                continue
            try:
                kept = losses if not made else None
                made[word] = _captured(model, shapes, names, kept, sizes[word][attempt])
            except CaptureError as error:
                made[word] = error
        first, second = made["large"], made["small"]
        if isinstance(first, CaptureError) and isinstance(second, CaptureError):
            raise first
        place = None
        if isinstance(first, Network) and isinstance(second, Network):
            place = _first_difference(first, second)
            if place is None:
                return first
        # A size of the model's own may happen to be a multiple of a stand-in: then something is refused.
        words = [word for word, each in made.items() if isinstance(each, CaptureError) or _refuses(each)]
        if not words:
            break
    raise CaptureError(f"{place or 'the model'} computes with the size of the batch, which is another in use")


def _refuses(network: Network) -> bool:
    return any(step.kind == "unsupported" for step in network.steps)


def compares_batches() -> bool:
    """Whether the model is traced with several sizes of batch."""
    return True


def _first_difference(one: Network, other: Network) -> Place | None:
    """Where two networks of one model differ first."""

    def attributes(step: Step) -> list[tuple[str, str]]:
        return sorted((key, repr(each)) for key, each in step.attributes.items() if key != "expression")

    for step, twin in zip(one.steps, other.steps, strict=False):
        same_step = (step.kind, step.inputs, step.output) == (twin.kind, twin.inputs, twin.output)
        if (
            not same_step
            or attributes(step) != attributes(twin)
            or one.values[step.output] != other.values[step.output]
        ):
            return step.place
        names = [name for name in step.inputs if isinstance(name, str)]
        if not all(_same_constant(name, name, one.constants, other.constants) for name in names):
            return step.place
    same_ends = one.outputs == other.outputs and len(one.steps) == len(other.steps)
    return None if same_ends else Place(path="the model")


def _captured(model: Any, shapes: Any, names: Mapping[int, str], losses: list[str] | None, prime: int) -> Network:
    """The network for a batch that `prime` stands in for."""
    c = Converter(prime, names)
    flat = _flat_shapes(shapes)
    paths = [f"argument_{at}" for at in range(len(flat))]
    given_ = [c.input(path, (prime, *shape[1:]), "float32") for path, shape in zip(paths, flat, strict=True)]
    functional = getattr(model, "_functional", None) or model
    inputs_ = getattr(functional, "_inputs", None) or []
    c.whole_inputs = {path for path, each in zip(paths, inputs_, strict=False) if "int" in str(each.dtype)}
    given = _pack(shapes, given_)
    seeds = [(each, keras.ops.convert_to_numpy(each.value)) for each in model.variables if is_seed(each)]

    def own(variable: Any) -> bool:
        return id(variable) in names and not is_seed(variable)

    with _unchanged(model, losses if losses is not None else []), with_symbols(c.with_weights, own):
        try:
            results = c.expand(model, [given], {})
        except Refused as refused:
            error = refused.__cause__
            if error is None or isinstance(error, ChangesWeight | DrawsNumbers):
                raise CaptureError(f"the model cannot be prepared: {refused}") from refused
            text = with_own_sizes(str(error), prime, next((size for size, *_ in flat if size), 1))
            more = {"training": False} if "training" in inspect.signature(model.call).parameters else {}

            def takes(changed: Callable[[tuple[int, ...]], tuple[int, ...]]) -> bool:
                try:
                    model.call(_pack(shapes, [keras.KerasTensor(changed(shape)) for shape in flat]), **more)
                except Exception:  # noqa: BLE001 - the user's model may raise anything
                    return False
                return True

            words = ["input"] if len(paths) == 1 else paths
            misfit = misfit_of_example(text, dict(zip(words, flat, strict=True)), takes)
            raise CaptureError(misfit or f"the model cannot be called on symbolic tensors: {text}") from error
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(f"the model cannot be called on symbolic tensors: {first_line(error)}") from error
    for variable, value in seeds:
        variable.assign(value)
    items = tree.flatten(results)
    outputs = [c.operand(each) if isinstance(each, Item) else str(each) for each in items]
    words = _input_words(model, shapes, functional, len(paths))
    inputs = ["input"] if len(paths) == 1 else [each.replace("/", ".") for each in words]
    ends = _output_words(results, functional, len(outputs))
    whole = Tree(given, results, [each.name for each in inputs_])
    return Network(
        tuple(paths),
        tuple(outputs),
        c.values,
        c.constants,
        tuple(c.steps),
        tuple(inputs),
        tuple(ends),
        whole,
        whole,
        tuple(words),
        channels_first=False,
    )


def _input_words(model: Any, shapes: Any, functional: Any, count: int) -> list[str]:
    """What the user calls the inputs: keys of a dictionary, else names of the input layers, else `call`'s argument."""
    if isinstance(shapes, Mapping) and all(_is_shape(each) for each in shapes.values()):
        return [str(key) for key in sorted(shapes)]
    words = [str(each._keras_history.operation.name) for each in getattr(functional, "_inputs", None) or []]
    if len(words) != count:
        word = next(iter(inspect.signature(model.call).parameters), "input")
        words = [word] if count == 1 else [f"{word}_{at}" for at in range(count)]
    return list(distinct(words))


def _output_words(results: Any, functional: Any, count: int) -> list[str]:
    """Likewise of the results: keys, else the names that Keras gives a functional model's outputs: its last layers'."""
    if isinstance(results, Mapping) and len(results) == count:
        return [str(key) for key in sorted(results)]
    words = [str(each) for each in getattr(functional, "output_names", None) or []]
    if len(words) != count:
        words = ["output"] if count == 1 else [f"output_{at}" for at in range(count)]
    return list(distinct(words))


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(each is None or isinstance(each, int) for each in value)


def _flat_shapes(shapes: Any) -> list[tuple[Any, ...]]:
    if _is_shape(shapes):
        return [tuple(shapes)]
    values = [shapes[key] for key in sorted(shapes)] if isinstance(shapes, Mapping) else shapes
    return [shape for each in values for shape in _flat_shapes(each)]


def _pack(shapes: Any, symbols: list[Any]) -> Any:
    remaining = iter(symbols)

    def packed(each: Any) -> Any:
        if _is_shape(each):
            return next(remaining)
        if isinstance(each, Mapping):
            made = {key: packed(each[key]) for key in sorted(each)}
            return {key: made[key] for key in each}
        return type(each)(packed(part) for part in each)

    return packed(shapes)


@contextmanager
def _unchanged(model: Any, losses: list[str]) -> Iterator[None]:
    """Keras writes down symbolic calls in the layers, and the losses that they add; afterwards they are as before."""
    layers_ = list(model._flatten_layers())
    kept = [
        (layer, len(layer._inbound_nodes), len(layer._outbound_nodes), list(layer._losses), set(layer._loss_ids))
        for layer in layers_
    ]
    try:
        yield
    finally:
        for layer, inbound, outbound, own, ids in kept:
            added = [each for each in layer._losses if not any(each is one for one in own)]
            if added or getattr(layer, "activity_regularizer", None) is not None:
                losses.append(_path(layer))
            layer._losses[:], layer._loss_ids = own, ids
            del layer._inbound_nodes[inbound:]
            del layer._outbound_nodes[outbound:]
