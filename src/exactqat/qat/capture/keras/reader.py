# SPDX-License-Identifier: Apache-2.0
"""Reads a model as Keras calls it: every operation and every layer that Keras knows enters its steps."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
from keras import tree

from ....kit.planning.network import Constant, Place
from ....kit.planning.plans import Derived
from ..core import masks
from ..core.builder import ItemBuilder, Moving, entering, free_name
from ..core.expressions import Dropout
from ..core.functions import same
from ..core.refusals import SIZE_OF_BATCH, Refused
from ..core.sizes import Batch, Shape, Size
from .items import Computed, Fixed, InTraining, Item, Result, first_line, for_one_example, is_seed, numpy_of, path_of
from .symbols import Symbol, Weights, WeightSymbol, has_symbols

# By the name of Keras' class, of operations and of layers that are more than their operations. A handler takes the
# reader, the operation or the layer, and the items of its call; it gives those of its results.
Handler = Callable[..., Result]
OPERATIONS: dict[str, Handler] = {}
LAYERS: dict[str, Handler] = {}
layers = entering(LAYERS)
operations = entering(OPERATIONS)


# What a layer's code raises on symbols that it does not take.
_FAILURES = (TypeError, ValueError, AttributeError, RuntimeError, NotImplementedError, IndexError)


class _Phase(int):
    """The evaluation that a layer inherits from the model, beside one that the user's code asks for by False."""


INHERITED = _Phase(0)


class Reader(ItemBuilder[Fixed]):
    """Reads a model, once, in evaluation.

    Attributes:
        trains: whether the layer that is read trains when the model does.
        whole_inputs: inputs that the model takes as integers: images of uint8.
        losing: layers that add a loss of what they compute.
    """

    # Functions are evaluated in float32 by Keras' own operations.
    tolerance = 2e-5

    def __init__(self, model: keras.Model, names: Mapping[int, str]) -> None:
        """names: of variables, by identity."""
        super().__init__()
        self.names = names
        self.trains = True
        self.whole_inputs: set[str] = set()
        self.losing: list[keras.Layer] = []
        self._model = model
        self._layer = ""
        self._draws = False
        self._unshaped: dict[str, Fixed] = {}
        self._weights = Weights(model._flatten_layers(), self._symbol_of)

    def read(self, model: keras.Model, inputs: Any) -> Any:
        """The items of a model's results. inputs: items, nested as the model takes them."""
        with keras.StatelessScope() as scope, self._called_by_keras(), self._weights.held(symbols=True):
            results = model(tree.map_structure(self.symbol, inputs), training=INHERITED)
        for variable in (variable for variable in model.variables if id(variable) in self.names):
            if scope.get_current_value(variable) is not None and not is_seed(variable):
                raise Refused(f"it changes its weight '{variable.name}' when it is called")
        return tree.map_structure(self.item, results)

    # --- operands -----------------------------------------------------------------------------------------------------

    def place(self) -> Place:
        return Place(self._layer)

    def operand(self, item: Any) -> Any:
        if item is None or isinstance(item, int | float):
            return item
        if isinstance(item, Batch):
            raise Refused(SIZE_OF_BATCH)
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

    def numbers(self, item: object) -> np.ndarray | None:
        if isinstance(item, Fixed):
            return None if item.data is None else np.asarray(item.data)
        return np.asarray(item, np.float32) if isinstance(item, int | float) else None

    def fixed_of(self, values: np.ndarray) -> Fixed:
        return Fixed(data=values, shape=values.shape)

    def fixed_named(self, name: str) -> Fixed:
        return Fixed(name, self.constants[name].data, self.constants[name].shape, self._unshaped.get(name))

    def weight(self, variable: keras.Variable) -> Any:
        """A variable of the model, or the symbol in its place; None where a layer is without."""
        if variable is None:
            return None
        variable = getattr(variable, "variable", variable)
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

    def of_both(self, first: Fixed, second: Fixed, function: Callable[[Any, Any], Any]) -> Fixed:
        names = [str(self.operand(item)) for item in (first, second)]
        return self._constant("computed", first.shape, names, function)

    def reshape(self, item: Any, shape: Sequence[Size]) -> Any:
        """What is fixed is again what it was before it was only reshaped, if it had this shape."""
        if not isinstance(item, Fixed):
            return super().reshape(item, shape)
        source = item.unshaped or item
        if source.shape == tuple(shape):
            return source
        result = super().reshape(item, shape)
        result.unshaped = source
        self._unshaped[result.name] = source
        return result

    def _constant(self, word: str, shape: Sequence[int], names: Sequence[str], function: Callable[..., Any]) -> Fixed:
        """What a function makes of constants."""
        bases = [self.constants[name] for name in names]
        name = free_name(f"{names[0]}/{word}", self.constants, self.names.values())
        self.constants[name] = Constant(
            name,
            tuple(shape),
            parameter=False,
            trainable=any(base.trainable for base in bases),
            sources=tuple(
                dict.fromkeys(name for base in bases for name in ((base.name,) if base.parameter else base.sources))
            ),
            expression=Derived(function, tuple(names)),
        )
        return Fixed(name, shape=shape)

    def module_of(self, weight: Fixed) -> str:
        """The path of the layer that a weight belongs to."""
        return weight.name.rpartition(".")[0] or weight.name

    # --- symbols ------------------------------------------------------------------------------------------------------

    def item(self, value: Any) -> Any:
        """What an argument of a layer or an operation is."""
        if isinstance(value, WeightSymbol):
            return self.weight(value)
        if isinstance(value, Symbol):
            return value.item
        if isinstance(value, keras.KerasTensor):
            raise Refused("it computes with a symbolic tensor that is no input")
        if isinstance(value, keras.Variable):
            return self.weight(value) if id(value) in self.names else Fixed(data=numpy_of(value), shape=value.shape)
        if keras.ops.is_tensor(value) or isinstance(value, np.ndarray | np.generic):
            data = numpy_of(value)
            return Fixed(data=data, shape=data.shape)
        return value

    def symbol(self, item: Any) -> Any:
        """A symbolic tensor for an item; what is no tensor stays as it is, and numbers are a tensor of Keras'."""
        if isinstance(item, Fixed) and not item.name:
            return keras.ops.convert_to_tensor(item.data)
        return Symbol(item, self._dtype(item)) if isinstance(item, Item) else item

    def _dtype(self, item: Item) -> str:
        return "bool" if masks.is_truth(self, item) else "int32" if masks.is_given(self, item) else "float32"

    def _symbol_of(self, variable: keras.Variable) -> WeightSymbol | None:
        if id(variable) not in self.names or is_seed(variable):
            return None
        return WeightSymbol(Fixed(self.names[id(variable)], shape=variable.shape), variable)

    # --- what Keras calls ---------------------------------------------------------------------------------------------

    def _called(self, operation: keras.Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The symbols of an operation's results."""
        outer = self._layer, self.trains
        if isinstance(operation, keras.Layer):
            if not isinstance(operation, keras.Model):
                self._layer = path_of(operation)
            self.trains = kwargs["training"] is INHERITED if "training" in kwargs else self.trains
        began = len(self.steps)
        try:
            try:
                return tree.map_structure(self.symbol, self._results(operation, args, kwargs))
            except _FAILURES as error:
                # What replaces something refused may have other axes than what reads it expects.
                refused = next((step for step in self.steps[began:] if step.attributes.get("reason")), None)
                if refused is not None:
                    raise Refused(f"{refused.label}: {refused.attributes['reason']}") from error
                raise Refused(f"it computes by other means than keras.ops ({first_line(error)})") from error
        except Refused as refusal:
            if operation is self._model:
                raise
            return self._refused(operation, args, kwargs, refusal)
        finally:
            self._layer, self.trains = outer

    def _results(self, operation: keras.Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The items of an operation's results."""
        if isinstance(operation, keras.Layer):
            if mode := getattr(operation, "quantization_mode", None):
                raise Refused(f"quantized by Keras (quantize({mode!r})); give the float model, before quantize")
            if getattr(operation, "lora_enabled", False):
                raise Refused("with enable_lora, its kernel is a sum; save the model and load it, which stores the sum")
            if kwargs.get("training"):
                raise Refused("it is called with training=True in evaluation, too")
            return self.expand(operation, args, kwargs)
        items, more = tree.map_structure(self.item, list(args)), tree.map_structure(self.item, kwargs)
        if not any(isinstance(item, Moving) for item in tree.flatten([items, more])):
            return self._computed(operation, items, more)
        handler = _table_entry(operation, OPERATIONS)
        if handler is None:
            raise Refused("")
        return handler(self, operation, *items, **more)

    @contextmanager
    def _called_by_keras(self) -> Iterator[None]:
        """What Keras calls on symbols, it passes on, and writes nothing down."""
        from keras.src import backend
        from keras.src.backend import random as drawing
        from keras.src.layers import layer as layer_module

        draw, standardize = drawing.dropout, backend.standardize_shape

        def passed_on(operation: keras.Operation, *args: Any, **kwargs: Any) -> Any:
            return self._called(operation, args, kwargs)

        def dropout(x: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
            if not has_symbols(x):
                return draw(x, rate, noise_shape, seed)
            if not self._draws:
                raise Refused("it drops values in evaluation, too")
            return self.symbol(self.dropout(x.item, rate, noise_shape))

        def standardize_shape(shape: Sequence[Any]) -> Any:
            return standardize([None if isinstance(size, Batch) else size for size in shape])

        known = [getattr(keras.layers, name) for name in LAYERS if hasattr(keras.layers, name)]
        kinds = {next(base for base in kind.__mro__ if "call" in vars(base)) for kind in known}
        changes: list[tuple[Any, str, object]] = [
            *((kind, "call", self._handled(vars(kind)["call"])) for kind in kinds),
            (keras.Operation, "symbolic_call", passed_on),
            (keras.Layer, "symbolic_call", passed_on),
            (keras.Layer, "add_loss", lambda layer, loss: self.losing.append(layer)),
            (layer_module, "Node", lambda **arguments: None),
            (drawing, "dropout", dropout),
            (backend, "standardize_shape", standardize_shape),
        ]
        with ExitStack() as stack:
            # It words errors that pass through layers in its own way.
            if keras.config.is_traceback_filtering_enabled():
                keras.config.disable_traceback_filtering()
                stack.callback(keras.config.enable_traceback_filtering)
            for holder, name, replacement in changes:
                stack.callback(setattr, holder, name, vars(holder)[name])
                setattr(holder, name, replacement)
            yield

    def _handled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A class's `call`; classes of the user's that are made of it call it, too."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(layer, *args, **kwargs).arguments
            training, handler = arguments.pop("training", None), _table_entry(layer, LAYERS)
            _, x, *others = (tree.map_structure(self.item, value) for value in arguments.values())
            if handler is None or not any(isinstance(item, Moving) for item in tree.flatten([x, others])):
                return original(layer, *args, **kwargs)
            named = {name: item for name, item in zip(list(arguments)[2:], others, strict=True) if item is not None}
            outer = self.trains
            self.trains = outer if "training" not in signature.parameters else training is INHERITED
            try:
                return tree.map_structure(self.symbol, handler(self, layer, x, **named))
            finally:
                self.trains = outer

        return call

    def outputs(self, operation: keras.Operation, *args: Any, **kwargs: Any) -> Any:
        """The symbolic tensors that Keras gives as an operation's results. args, kwargs: items."""

        def plain(item: Any) -> Any:
            if not isinstance(item, Item):
                return item
            sizes = [None if isinstance(size, Batch) else size for size in item.shape]
            return keras.KerasTensor(sizes, self._dtype(item))

        args, kwargs = tree.map_structure(plain, args), tree.map_structure(plain, kwargs)
        return operation.compute_output_spec(*args, **kwargs)

    def shape_of(self, operation: keras.Operation, x: Moving, *others: Any) -> Shape:
        """The shape of an operation's result, as Keras says it; what it leaves open follows the batch as x does."""
        batch = x.shape[self.batch_axis(x.shape)]
        return tuple(batch if size is None else size for size in self.outputs(operation, x, *others).shape)

    def _computed(self, operation: keras.Operation, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What an operation makes of weights and data alone."""
        leaves = tree.flatten([args, kwargs])
        if any(isinstance(leaf, Batch) for leaf in leaves):
            raise Refused(SIZE_OF_BATCH)
        names = list(dict.fromkeys(leaf.name for leaf in leaves if isinstance(leaf, Fixed) and leaf.name))
        operation = for_one_example(operation)
        outputs = self.outputs(operation, *args, **kwargs)
        word = type(operation).__name__
        if word == "Reshape" and names:
            return self.reshape(args[0], outputs.shape)
        results = [
            self._constant(word.lower(), output.shape, names, Computed(operation, args, kwargs, names, index))
            for index, output in enumerate(tree.flatten(outputs))
        ]
        return tree.pack_sequence_as(outputs, results)

    def dropout(self, x: Moving, rate: float, noise_shape: Sequence[int | None] | None) -> Moving:
        """Values dropped in training; noise_shape: 1 where they are dropped together, along the whole axis."""
        if not rate or not self.trains:
            return x
        kept = () if noise_shape is None else (
            at for at, size in enumerate(noise_shape) if isinstance(size, int) and size == 1 != x.shape[at]
        )  # fmt: skip
        return self.emit("dropout", [x], x.shape, expression=Dropout(float(rate), tuple(kept)))

    def _refused(self, operation: keras.Operation, args: Any, kwargs: Any, refusal: Refused) -> Any:
        """Steps that the plan refuses, with the shapes that Keras gives an operation's results."""
        items, more = tree.map_structure(
            lambda value: value.item if isinstance(value, Symbol) else value, [list(args), kwargs]
        )
        moving = [item for item in tree.flatten([items, more]) if isinstance(item, Moving)]
        try:
            with self._weights.held(symbols=False):
                outputs = self.outputs(operation, *items, **more)
        except Exception:  # noqa: BLE001 - whatever the user's code does not like about other tensors
            raise refusal from None
        if not moving:
            raise refusal
        shapes = [[Batch() if size is None else size for size in output.shape] for output in tree.flatten(outputs)]
        steps = self.unsupported(type(operation).__name__, moving, shapes, str(refusal))
        return tree.pack_sequence_as(outputs, [self.symbol(step) for step in steps])

    def expand(self, layer: keras.Layer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The items that a layer's `call` gives. args, kwargs: symbols.

        Layers of Keras that do nothing else in training than to drop values are called as in training.
        """
        draws = type(layer) in _DROPPING and self.trains
        kwargs, outer, self._draws = {**kwargs, "training": True} if draws else kwargs, self._draws, draws
        activation = vars(layer).get("activation")
        if callable(activation):
            vars(layer)["activation"] = lambda x: (
                self.symbol(self.apply(activation, x.item)) if isinstance(x, Symbol) else activation(x)
            )
        try:
            results = tree.map_structure(self.item, layer.call(*args, **kwargs))
        finally:
            self._draws = outer
            if callable(activation):
                vars(layer)["activation"] = activation
        if draws or isinstance(layer, keras.Model) or has_symbols(kwargs) or layer.trainable_variables:
            return results
        own_state = any(not is_seed(variable) for variable in layer.non_trainable_variables)
        if own_state or _table_entry(layer, LAYERS) is not None or not self.trains:
            return results
        if results is self.item(args[0]) and "training" in inspect.signature(layer.call).parameters:
            # Nothing in evaluation: whatever it is, it is done in training.
            return self.emit("dropout", [results], results.shape, expression=InTraining(layer))
        return results

    def truth_of(self, mask: Item) -> Moving:
        """1 where a layer's mask is not 0, else 0."""
        shown = masks.as_truth(self, mask) if isinstance(mask, Moving) else None
        if shown is None:
            raise Refused("with a mask that is fixed or computed; give it as an input of integers or truth values")
        return shown

    # --- functions ----------------------------------------------------------------------------------------------------

    def apply(self, function: Callable[[Any], Any] | None, x: Moving) -> Any:
        """A function such as a layer's activation.

        Some of Keras' own (`hard_swish`, `mish`) leave `keras.ops` before they compute: what they make of numbers says
        which function they are.
        """
        if function is None:
            return x
        try:
            return self.called(function, x)
        except (TypeError, ValueError, AttributeError) as error:
            reason = f"its activation computes by other means than keras.ops ({first_line(error)})"

            def evaluate(points: np.ndarray) -> np.ndarray:
                tensor = keras.ops.convert_to_tensor(np.ascontiguousarray(points, np.float32))
                return numpy_of(function(tensor)).astype(np.float64)

            for points in (curve.values for curve in x.samples.values()):
                try:
                    straight, turned = evaluate(points), evaluate(points[::-1])
                except Exception:  # whatever the user's function does not like about a vector of numbers
                    raise Refused(reason) from error
                if straight.shape != points.shape or not same(straight, turned[::-1], self.tolerance):
                    raise Refused(reason) from error
            known = self.recognized(self.sampled([x], evaluate), [x], x.shape)
            if known is None:
                raise Refused(reason) from error
            return known

    def called(self, function: Callable[[Any], Any], x: Item) -> Any:
        """What a layer or a function gives for an item."""
        return self.item(function(self.symbol(x)))


# SpatialDropout is a Dropout.
_DROPPING = {
    kind
    for name in dir(keras.layers)
    if isinstance(kind := getattr(keras.layers, name), type)
    and issubclass(kind, keras.layers.Attention | keras.layers.Dropout)
}


def _table_entry(operation: keras.Operation, table: Mapping[str, Handler]) -> Handler | None:
    names = (kind.__name__ for kind in type(operation).__mro__ if kind.__module__.startswith(("keras.", "exactqat.")))
    return next((table[name] for name in names if name in table), None)
