# SPDX-License-Identifier: Apache-2.0
"""What Keras leaves out of the graph that it records of a symbolic call, written down while a model is captured.

Weights that a layer computes with before they meet the input, custom gradients, dropout by `keras.random`, and weights
that a layer changes when it is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import keras
from keras import tree

from ..core.refusals import first_line


class ChangesWeight(Exception):
    """A layer assigns to a variable when it is called; the message says to which."""


class DrawsNumbers(Exception):
    """A layer draws random numbers that no step of a network holds."""


class WeightSymbol(keras.KerasTensor):
    """A variable of the model's in what a layer computes."""

    def __init__(self, variable: Any) -> None:
        super().__init__(tuple(variable.shape), variable.dtype)
        self.variable = variable
        self.path, self.trainable, self.name = variable.path, variable.trainable, variable.name

    @property
    def value(self) -> WeightSymbol:
        return self

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__((key,) if isinstance(key, slice) else key)

    def assign(self, *args: Any, **kwargs: Any) -> Any:
        raise ChangesWeight(f"it changes its weight '{self.name}' when it is called")

    assign_add = assign_sub = assign


class CustomGradientOperation(keras.Operation):
    """A function with a gradient of the user's own.

    Attributes:
        results: its forward computation on the same symbolic tensors; None where they cannot be computed with, and
            `failure` says why.
    """

    def __init__(self, function: Callable[..., Any], forward: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.forward = function, forward
        self.results: list[Any] | None = None
        self.failure = ""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def results_of(self, *args: Any) -> list[Any]:
        """All results of the user's function."""
        return list(tree.flatten(self.call(*args)))

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        try:
            made = self.forward(*args, **kwargs)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            if len(args) != 1 or kwargs:
                raise
            self.failure = first_line(error)
            return keras.KerasTensor(args[0].shape, args[0].dtype)
        self.results = tree.flatten(made)
        return tree.map_structure(lambda each: keras.KerasTensor(each.shape, each.dtype), made)


class DropoutOperation(keras.Operation):
    """`keras.random.dropout`."""

    def __init__(self, rate: float, noise_shape: Any) -> None:
        super().__init__()
        self.rate, self.noise_shape = rate, noise_shape

    def call(self, x: Any) -> Any:
        raise NotImplementedError

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape, x.dtype)


def has_symbols(values: Any) -> bool:
    """Whether some of nested values are symbolic tensors."""
    return any(isinstance(each, keras.KerasTensor) for each in tree.flatten(values))


def _sizes_missing(values: Any) -> bool:
    return any(isinstance(each, keras.KerasTensor) and None in each.shape for each in tree.flatten(values))


def _phase() -> bool | None:
    """Whether the layer that is called is in training, as Keras keeps it for the layers inside."""
    from keras.src.backend.common import global_state

    context = global_state.get_global_attribute("current_call_ctx")
    found: bool | None = None if context is None else context.get_value("training")
    return found


@contextmanager
def in_phase(layer: Any, training: bool) -> Iterator[None]:
    """As if Keras called the layer, in training or in evaluation: the layers inside inherit it."""
    from keras.src.backend.common import global_state
    from keras.src.layers.layer import CallContext

    before, context = global_state.get_global_attribute("current_call_ctx"), CallContext(entry_layer=layer)
    context.set_value("training", training)
    global_state.set_global_attribute("current_call_ctx", context)
    try:
        yield
    finally:
        global_state.set_global_attribute("current_call_ctx", before)


@contextmanager
def with_symbols(on_call: Callable[[], Any], own: Callable[[Any], bool]) -> Iterator[None]:
    """Symbolic calls write down what Keras leaves out; a variable that is assigned to raises `ChangesWeight`.

    Args:
        on_call: gives a context in which layers are called.
        own: whether a variable is one of the model's weights.
    """
    from keras.src.backend import random as drawing
    from keras.src.backend.common.stateless_scope import in_stateless_scope

    with ExitStack() as stack:

        def replaced(holder: Any, name: str, make: Callable[[Any], Any]) -> None:
            original = vars(holder)[name]
            setattr(holder, name, make(original))
            stack.callback(setattr, holder, name, original)

        def assigning(original: Any) -> Any:
            def assign(variable: Any, value: Any) -> Any:
                if own(variable) and not in_stateless_scope():
                    raise ChangesWeight(f"it changes its weight '{variable.name}' when it is called")
                return original(variable, value)

            return assign

        def calling(original: Any) -> Any:
            def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
                phase, before = _phase(), len(layer._inbound_nodes)
                # One that is called with numbers alone (of positions) computes something of its weights.
                with on_call() if has_symbols((args, kwargs)) else nullcontext():
                    results = original(layer, *args, **kwargs)
                if id(layer) in without_tensors:
                    found = iter(results)
                    results = tree.map_structure(
                        lambda each: None if each is None else next(found), without_tensors.pop(id(layer))
                    )
                if len(layer._inbound_nodes) > before:
                    # What the layer inherits, unless it is called with another.
                    layer._inbound_nodes[-1].training = phase
                return results

            return call

        without_tensors: dict[int, Any] = {}

        def specified(original: Any) -> Any:
            def symbolic_call(layer: Any, *args: Any, **kwargs: Any) -> Any:
                by_itself = keras.Operation.compute_output_spec
                try:
                    inspect.signature(layer.compute_output_spec).bind(*args, **kwargs)
                except TypeError:  # of a class whose `call` takes fewer arguments
                    made = by_itself(layer, *args, **kwargs)
                else:
                    made = original(layer, *args, **kwargs)
                    if _sizes_missing(made) and not _sizes_missing((args, kwargs)):
                        made = by_itself(layer, *args, **kwargs)
                if None not in (found := tree.flatten(made)):
                    return made
                without_tensors[id(layer)] = made  # Keras writes down tensors alone
                return [each for each in found if each is not None]

            return symbolic_call

        def dropping(original: Any) -> Any:
            def dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
                if has_symbols(inputs):
                    return DropoutOperation(rate, noise_shape).symbolic_call(inputs)
                return original(inputs, rate, noise_shape, seed)

            return dropout

        def drawn(name: str) -> Callable[[Any], Any]:
            def made(original: Any) -> Any:
                def draw(*args: Any, **kwargs: Any) -> Any:
                    if not in_stateless_scope():
                        raise DrawsNumbers(f"it draws random numbers by keras.random.{name}")
                    return original(*args, **kwargs)

                return draw

            return made

        variables = next(each for each in keras.Variable.__mro__ if "assign" in vars(each))
        replaced(variables, "assign", assigning)
        replaced(keras.Layer, "__call__", calling)
        replaced(keras.Layer, "symbolic_call", specified)
        replaced(drawing, "dropout", dropping)
        for name in ("normal", "uniform", "truncated_normal", "randint", "gamma", "beta", "binomial"):
            replaced(drawing, name, drawn(name))
        for holder, name, forward in _custom_gradients():
            replaced(holder, name, _custom(forward))
        yield


def _custom(forward: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Any]:
    def made(original: Any) -> Any:
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            module = str(getattr(function, "__module__", ""))
            # What JAX' own functions bring says what their derivative is anyway.
            of_jax = module.startswith(("jax.", "jax._src")) and not module.endswith("custom_derivatives")
            if of_jax or not has_symbols((args, kwargs)):
                return original(function, *args, **kwargs)

            def called(*given: Any, **more: Any) -> Any:
                return original(function, *given, **more)

            operation = CustomGradientOperation(called, forward(function))
            if keras.backend.backend() == "torch":
                # Keras gives PyTorch the variable itself, which so gets no gradient.
                args = tuple(keras.ops.stop_gradient(each) if isinstance(each, WeightSymbol) else each for each in args)
            return operation.symbolic_call(*args, **kwargs)

        return call

    return made


def _custom_gradients() -> list[tuple[Any, str, Callable[[Any], Callable[..., Any]]]]:
    """Where a backend calls functions with a gradient of their own, and how their forward computation is had."""
    backend = keras.backend.backend()
    if backend == "torch":
        from keras.src.backend.torch.core import custom_gradient

        def value(function: Any) -> Callable[..., Any]:
            return lambda *args, **kwargs: function.forward_fn(*args, **kwargs)[0]

        return [(custom_gradient, "__call__", value)]
    if backend == "jax":
        import jax

        return [
            (jax.custom_vjp, "__call__", lambda function: function.fun),
            (jax.custom_jvp, "__call__", lambda f: f.fun),
        ]
    return []
