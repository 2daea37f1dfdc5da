# SPDX-License-Identifier: Apache-2.0
"""Reads the graph that Keras records, node by node."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras import tree

from ...planning.network import Constant, Place, Step
from ...planning.plans import Derived
from ..core import masks
from ..core.builder import ItemBuilder, Moving, entering, free_name
from ..core.functions import same
from ..core.refusals import SIZE_OF_BATCH, Refused
from ..core.safeguards import SAFEGUARDS
from .items import Computed, Fixed, InTraining, Item, OverBatch, first_line, numpy_of, same_argument, same_constant
from .known import VARIABLE_LISTS, changed_kernel, changed_of, is_container, is_seed, known_class, own_state, path_of
from .symbols import ChangesWeight, DrawsNumbers, DropoutOperation, WeightSymbol, has_symbols, in_phase

Handler = Callable[["Converter", Any, list[Any], dict[str, Any]], Any]
# By the name of Keras' class, for layers and for operations.
LAYERS: dict[str, Handler] = {}
OPERATIONS: dict[str, Handler] = {}


layers = entering(LAYERS)
operations = entering(OPERATIONS)


class Converter(ItemBuilder[Fixed]):
    """Reads a model's graph.

    Attributes:
        training: what is being read.
        drew: whether random numbers were drawn that no step holds.
        whole_inputs: inputs that the model takes as integers: images of uint8.
    """

    # Functions are evaluated in float32 by Keras' own operations.
    tolerance = 2e-5

    def __init__(self, prime: int, names: Mapping[int, str]) -> None:
        """names: of variables, by identity."""
        super().__init__(prime)
        self.names = names
        self.training = True
        self.drew = False
        self.whole_inputs: set[str] = set()
        self.read: set[int] = set()
        self._known: dict[int, Any] = {}
        self._alive: list[Any] = []
        self._substituted: list[Callable[[bool], None]] = []
        self._layer = ""
        # Of values, by name: the symbolic tensor that Keras keeps with them.
        self._masks: dict[str, Any] = {}

    # --- operands -----------------------------------------------------------------------------------------------------

    def place(self) -> Place:
        return Place(self._layer)

    def operand(self, item: Any) -> Any:
        if item is None or isinstance(item, int | float):
            return item
        if isinstance(item, Moving):
            return item.name
        if item.name:
            return item.name
        if item.number is not None and item.shape == ():
            return item.number
        name = free_name("constant", self.constants, self.names.values())
        self.constants[name] = Constant(name, item.shape, parameter=False, data=item.data)
        item.name = name
        return name

    def numbers(self, item: Any) -> np.ndarray | None:
        if isinstance(item, Fixed):
            return None if item.data is None else np.asarray(item.data)
        return np.asarray(item, np.float32) if isinstance(item, int | float) else None

    def fixed_of(self, values: np.ndarray) -> Fixed:
        return Fixed(data=values, shape=values.shape)

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
        return self._constant("computed", shape, [item.name], function)

    def _constant(self, word: str, shape: Sequence[int], names: Sequence[str], function: Callable[..., Any]) -> Fixed:
        """What a function makes of constants."""
        bases = [self.constants[name] for name in names]
        name = free_name(f"{names[0]}/{word}", self.constants, self.names.values())
        self.constants[name] = Constant(
            name,
            tuple(shape),
            parameter=False,
            trainable=any(base.trainable for base in bases),
            sources=tuple(dict.fromkeys(each for base in bases for each in _sources(base))),
            expression=Derived(function, tuple(names)),
        )
        return Fixed(name, shape=shape)

    def layer_path(self, variable: Any) -> str:
        return self.names[id(variable)].rpartition(".")[0] or self.names[id(variable)]

    # --- the walk -----------------------------------------------------------------------------------------------------

    def item(self, value: Any) -> Any:
        """What an argument of a layer or an operation is."""
        if isinstance(value, WeightSymbol):
            value = value.variable
        if isinstance(value, keras.KerasTensor):
            return self.evaluate(value)
        if isinstance(value, keras.Variable):
            return self.weight(value) if id(value) in self.names else Fixed(data=numpy_of(value), shape=value.shape)
        if keras.ops.is_tensor(value) or isinstance(value, np.ndarray | np.generic):
            data = numpy_of(value)
            if data.shape[:1] == (self.prime,) and self.prime not in data.shape[1:] and (data == data[:1]).all():
                data = data[:1]  # the same for every example
            return Fixed(data=data, shape=data.shape)
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
            results = [each for each in tree.flatten(self._call(operation, args, kwargs, node)) if each is not None]
            for output, result in zip(node.outputs, results, strict=True):
                self._known[id(output)] = result
                self._alive.append(output)
                self._note_mask(output, result)
            stack.pop()
        return self._known[id(tensor)]

    def bind(self, tensor: Any, item: Any) -> None:
        self._known[id(tensor)] = item
        self._alive.append(tensor)
        mask = self._masks.get(item.name) if isinstance(item, Moving) else None
        if mask is not None:
            tensor._keras_mask = mask

    def _note_mask(self, tensor: Any, item: Any) -> None:
        """Keras' layers leave the mask of what they give with it."""
        mask = getattr(tensor, "_keras_mask", None)
        if isinstance(item, Moving) and isinstance(mask, keras.KerasTensor):
            self._masks[item.name] = mask

    def symbol(self, item: Any) -> Any:
        """A symbolic tensor for an item; what is no tensor stays as it is."""
        if isinstance(item, Fixed) and not item.name:
            return item.data
        if not isinstance(item, Item):
            return item
        word = "bool" if masks.is_truth(self, item) else "int32" if masks.is_given(self, item) else "float32"
        tensor = keras.KerasTensor(item.shape, word)
        self.bind(tensor, item)
        return tensor

    def _call(self, operation: Any, args: list[Any], kwargs: dict[str, Any], node: Any) -> Any:
        layer = isinstance(operation, keras.Layer)
        moving = any(isinstance(each, Moving) for each in tree.flatten([args, kwargs]))
        if not moving and not layer:
            return self.computed(operation, args, kwargs, node)
        outer, outer_training = self._layer, self.training
        if layer and not isinstance(operation, keras.Model):
            self._layer = path_of(operation)
        if layer and (reason := changed_kernel(operation)):
            return self._refused(operation, args, kwargs, node, reason)
        if layer:
            given = kwargs.get("training")
            given = getattr(node, "training", None) if given is None else given
            kwargs = {key: each for key, each in kwargs.items() if key != "training" and each is not None}
            if given is not None and bool(given) and not self.training:
                raise Refused(f"'{path_of(operation)}' is called with training=True in evaluation, too")
            self.training = self.training if given is None else bool(given)
        try:
            # What a layer makes of weights and data alone is a constant, which its operations compute.
            handler = _handler(operation) if moving else None
            if handler is not None:
                return handler(self, operation, args, kwargs)
            if not layer:
                raise Refused("")
            return self.expand(operation, args, kwargs)
        except Refused as refused:
            return self._refused(operation, args, kwargs, node, str(refused))
        finally:
            self._layer, self.training = outer, outer_training

    def computed(self, operation: Any, args: list[Any], kwargs: dict[str, Any], node: Any) -> list[Fixed]:
        """What an operation makes of weights and data alone."""
        fixed = [each for each in tree.flatten([args, kwargs]) if isinstance(each, Fixed)]
        names = list(dict.fromkeys(each.name for each in fixed if each.name))
        if isinstance(operation, DropoutOperation):
            raise Refused("it drops parts of a weight at random")
        operation = self._for_any_batch(operation, fixed)
        results = []
        for index, output in enumerate(node.outputs):
            computed = Computed(operation, args, kwargs, names, index)
            if not names:
                data = numpy_of(computed.result({}))
                results.append(Fixed(data=data, shape=data.shape))
                continue
            shape = [1 if isinstance(operation, OverBatch) and size == self.prime else size for size in output.shape]
            if any(size and size % self.prime == 0 for size in shape):
                raise Refused(SIZE_OF_BATCH)
            results.append(self._constant(type(operation).__name__.lower(), shape, names, computed))
        return results

    def _for_any_batch(self, operation: Any, fixed: Sequence[Fixed]) -> Any:
        """A weight repeated for every example is the weight itself, with a batch of one."""
        if len(fixed) != 1:
            return operation
        word, x = type(operation).__name__, fixed[0]
        if word == "BroadcastTo" and (len(x.shape) < len(operation.shape) or x.shape[:1] == (1,)):
            shape = tuple(operation.shape)
            if shape[0] == self.prime and self.prime not in shape[1:]:
                return OverBatch((1, *shape[1:]))
        if word == "Tile" and tuple(tree.flatten(operation.repeats)) == (self.prime, *[1] * (len(x.shape) - 1)):
            return OverBatch(x.shape) if x.shape[0] == 1 else operation
        if word == "Repeat" and operation.repeats == self.prime and operation.axis == 0 and x.shape[:1] == (1,):
            return OverBatch(x.shape)
        return operation

    def _refused(self, operation: Any, args: Any, kwargs: Any, node: Any, reason: str) -> Any:
        word = type(operation).__name__
        if not self.training:
            raise Refused(reason or f"{word} has no int8 operator in this library")
        read = [each for each in tree.flatten([args, kwargs]) if isinstance(each, Moving)]
        shapes = [tuple(self.prime if size is None else int(size) for size in each.shape) for each in node.outputs]
        return self.unsupported(word, read, shapes, reason)

    def expand(self, layer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What a layer's `call` does, on symbolic tensors of its own; in training, and the same in evaluation."""
        if not self.training or is_container(layer):
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
        if not branches or not SAFEGUARDS.training:
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
                self.forget(began)
        given = [each for each in tree.flatten(args) if isinstance(each, Moving)]
        if given and not same_ and not layer.trainable_variables and not own_state(layer):
            (first, *others) = given
            if evaluated is first and not others and not kwargs:
                self.forget(began)
                return self.emit("dropout", [first], first.shape, expression=InTraining(layer))
        if failure is not None:
            raise Refused(f"in training, {failure}")
        if not same_:
            raise Refused("it computes something else in training than in evaluation")
        self.forget(made)
        return results

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
            elif not same_argument(one, other):
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
                if not same_constant(one, other, self.constants, self.constants):
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
        before, began = self.read, len(self.steps)
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
                # What replaces something refused may have other axes than what reads it expects.
                refused = next((step for step in self.steps[began:] if step.attributes.get("reason")), None)
                if refused is not None:
                    raise Refused(f"{refused.label}: {refused.attributes['reason']}") from error
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
        if is_container(layer) or not SAFEGUARDS.computed_weights:
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
                if name in VARIABLE_LISTS or not isinstance(value, keras.Variable | list | tuple | dict):
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
        known, handler = known_class(layer), _table_entry(layer)
        if handler is None or known is None or changed_of(layer, known) != {"call"} or "call" in vars(layer):
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
        """The result of a known function of one value, known by what it makes of numbers; None if it is none.

        Some of Keras' own activations (`hard_swish`, `mish`) leave `keras.ops` before they compute.
        """

        def evaluate(points: np.ndarray) -> np.ndarray:
            tensor = keras.ops.convert_to_tensor(np.ascontiguousarray(points, np.float32))
            return numpy_of(function(tensor)).astype(np.float64)

        for points in (curve.values for curve in x.samples.values()):
            try:
                straight, turned = evaluate(points), evaluate(points[::-1])
            except Exception:  # whatever the user's function does not like about a vector of numbers
                return None
            if straight.shape != points.shape or not same(straight, turned[::-1], self.tolerance):
                return None
        return self.recognized(self.sampled([x], evaluate), [x], x.shape)


def _sources(constant: Constant) -> tuple[str, ...]:
    return (constant.name,) if constant.parameter else constant.sources


def _table_entry(operation: Any) -> Handler | None:
    table = LAYERS if isinstance(operation, keras.Layer) else OPERATIONS
    for known in type(operation).__mro__:
        if known.__module__.startswith(("keras.", "exactqat.")) and known.__name__ in table:
            return table[known.__name__]
    return None


def _handler(operation: Any) -> Handler | None:
    """The handler of the class that says what the operation does; none where a part of it is the user's own."""
    known = known_class(operation)
    if known is None:
        return None
    changed = changed_of(operation, known)
    if changed and (SAFEGUARDS.changed_layers or "call" in changed - vars(operation).keys()):
        return None
    return _table_entry(operation)
