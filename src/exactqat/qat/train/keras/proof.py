# SPDX-License-Identifier: Apache-2.0
"""The self-check's Keras side: runs the user's model, and the prepared one without quantization, on any backend.

Both run as functions of their variables, so neither changes. The values of the variables are moved a little beforehand,
the same on both sides: a weight that became a constant in the captured network is exposed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from ....kit.planning.masks import is_mask
from ....kit.planning.network import Network
from ...capture.keras.known import path_of
from ...capture.keras.model import first_line, is_seed, variable_names
from ...capture.proof import Evidence, FunctionalSubject, Proof, Trial, cotangent, nudged, prove
from ..core.arrays import Arrays, Mode
from .prepared import PreparedModel
from .primitives import backend

# The value of random numbers while both sides run.
_CONSTANT = 0.25
# Examples in a trial if the user has given none.
_EXAMPLES = 4


class _Sides(FunctionalSubject[Any]):
    """The user's model, and what `prepare` made from it.

    Attributes:
        losing: paths of layers that added a loss of what they computed while the model ran.
        programs: by what `differentiated` calls a key.
    """

    compiles = keras.backend.backend() == "jax"
    first_line = staticmethod(first_line)
    remedy = "let it compute in training what it computes in evaluation, which is what the device runs"
    own_gradients = "Gradients of the model's own, as of keras.ops.custom_gradient, are not kept"

    def __init__(self, model: Any, prepared: PreparedModel, example: Any) -> None:
        self.losing: dict[str, None] = {}
        self.programs: dict[tuple[object, ...], Any] = {}
        self.model, self.prepared = model, prepared
        network, wanted = prepared.plan.network, prepared.plan.inputs
        self.names = variable_names(model)
        self.variables = {self.names[id(each)]: each for each in model.variables}
        functional = getattr(model, "_functional", None) or model
        declared = getattr(functional, "_inputs", None) or []
        self.dtypes = [str(each.dtype) for each in declared] or ["float32"] * len(network.inputs)
        given = (
            [
                _of_none(network, name, dtype, each.rows)
                for name, dtype, each in zip(network.inputs, self.dtypes, wanted, strict=True)
            ]
            if example is None
            else [_array(each) for each in network.input_tree.flatten(example)]
        )
        super().__init__(network, given, [each.rows for each in wanted])
        halves = {str(each.compute_dtype) for each in model._flatten_layers() if "16" in str(each.compute_dtype)}
        self.halves = " and ".join(sorted(halves))

    def original(self, trial: Trial, inputs: Sequence[np.ndarray], nudge: int, layers: bool) -> Evidence:
        model, variables = self.model, self.variables
        values = {name: self._value(variable, nudge) for name, variable in variables.items()}
        trained = [self.names[id(each)] for each in model.trainable_variables]
        others = [self.names[id(each)] for each in model.non_trainable_variables]
        seen: dict[str, np.ndarray] = {}

        def run(tensors: Mapping[str, Any], inputs: Sequence[Any], training: bool) -> tuple[Any, dict[str, Any]]:
            given = tree.pack_sequence_as(
                self.network.input_tree.inputs,
                [ops.cast(each, dtype) for each, dtype in zip(inputs, self.dtypes, strict=True)],
            )
            # `stateless_call` does not pass `training` to the layers inside; `fit` on PyTorch and TensorFlow does.
            held = [(variable, tensors[name]) for name, variable in variables.items()]
            with keras.StatelessScope(held, collect_losses=True) as scope:
                results = model(given, training=training)
                losses = set(map(id, scope.losses))
                for layer in (layer for layer in model._flatten_layers() if layer._loss_ids & losses):
                    self.losing[path_of(layer)] = None
                    layer._loss_ids -= losses
            after = {name: scope.get_current_value(variables[name]) for name in others}
            return tree.flatten(results), {name: tensors[name] if x is None else x for name, x in after.items()}

        with _in_float32(model), _recorded(seen if layers else None):
            if layers:
                with _settled():
                    run(_tensors(values), list(_tensors(dict(enumerate(inputs))).values()), trial.training)
                return Evidence(layers=seen)
            evidence = self.evidence("original", run, values, trained, others, trial, inputs)
        moves = {name for name, value in evidence.state.items() if not np.array_equal(value, values[name])}
        used = set(self.prepared._held.variables.tensors) | moves
        seeds = {self.names[id(each)] for each in model.variables if is_seed(each)}
        evidence.state = {name: value for name, value in evidence.state.items() if name in used - seeds}
        return evidence

    def captured(self, trial: Trial, inputs: Sequence[np.ndarray], layers: bool) -> Evidence:
        held, wanted = self.prepared._held, self.prepared.plan.inputs
        values = {name: self._value(self.variables[name], 0) for name in held.variables.tensors}
        trained = [name for name in held.variables.tensors if self.variables[name].trainable]
        state = self.prepared._arrays().map(ops.stop_gradient)
        seen: dict[str, Any] = {}

        def run(tensors: Mapping[str, Any], inputs: Sequence[Any], training: bool) -> tuple[Any, dict[str, Any]]:
            with keras.StatelessScope():
                results, after = held.functional.run(
                    Arrays(dict(tensors), state.learned, state.ranges),
                    [self.prepared._as_prepared(kind, each) for kind, each in zip(wanted, inputs, strict=True)],
                    Mode(training=training, quantizing=False),
                    lambda number: held.seeds,
                    seen if layers else None,
                )
            return results, after.tensors

        if layers:
            with _settled():
                run(_tensors(values), list(_tensors(dict(enumerate(inputs))).values()), trial.training)
            return Evidence(layers={path: _array(value) for path, value in seen.items()})
        others = [name for name in values if name not in trained]
        return self.evidence("captured", run, values, trained, others, trial, inputs)

    def named(self, results: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.network.output_names, results, strict=True))

    def weighted_sum(self, results: Mapping[str, Any]) -> Any:
        total: Any = 0.0
        for name, x in results.items():
            if "float" in keras.backend.standardize_dtype(x.dtype):
                weights = ops.convert_to_tensor(cotangent(name, tuple(x.shape)))
                total = total + ops.sum(ops.cast(x, "float32") * weights)
        return total

    def array(self, value: Any) -> np.ndarray:
        return _array(value)

    def differentiated(
        self,
        key: tuple[object, ...],
        step: Callable[..., Any],
        leaves: Mapping[str, np.ndarray],
        others: Mapping[str, Any],
        trial: Trial,
    ) -> tuple[Mapping[str, Any], Any]:
        if key not in self.programs:
            function = partial(backend.differentiated, step) if trial.gradients else _plain(step)
            self.programs[key] = backend.program(function)
        with _settled():
            gradients, results = self.programs[key](_tensors(leaves), _tensors(others))
        return gradients, results

    def _value(self, variable: Any, nudge: int) -> np.ndarray:
        value, name = np.asarray(ops.convert_to_numpy(variable.value)), self.names[id(variable)]
        if value.dtype.kind != "f" or is_seed(variable):
            return value
        # Upwards only: variances stay positive.
        shares = np.random.default_rng(zlib.crc32(name.encode())).random((2, *value.shape)).astype(np.float32)
        return nudged(np.asarray(value * (1 + shares[0] / 8) + shares[1] / 16, np.float32), name, nudge)


def _of_none(network: Network, name: str, dtype: str, rows: int) -> np.ndarray:
    """An input for a user who gave no example."""
    shape = (_EXAMPLES, *network.values[name].shape[1:])
    if rows:
        return np.zeros(shape, np.int32)
    if is_mask(network, name):
        return np.ones(shape, dtype)
    return _whole_numbers(shape, dtype) if "int" in dtype else np.zeros(shape, np.float32)


def _tensors(values: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name: ops.convert_to_tensor(array) for name, array in values.items()}


def _plain(step: Callable[..., Any]) -> Callable[..., Any]:
    """What `differentiated` returns, without gradients."""

    def function(leaves: Mapping[str, Any], others: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        return {}, step(leaves, others)[1]

    return function


@contextmanager
def _settled() -> Iterator[None]:
    """Randomness that does not depend on the order it is drawn in: dropout keeps all values, numbers are constant."""
    from keras.src.backend import random as drawing

    def dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
        return inputs / (1.0 - rate)

    def constant(shape: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        return ops.cast(ops.full(tuple(shape), _CONSTANT), dtype or keras.config.floatx())

    def whole(shape: Any, minval: Any, maxval: Any, dtype: Any = "int32", seed: Any = None) -> Any:
        return ops.cast(ops.full(tuple(shape), minval), dtype)

    def kept(x: Any, axis: int = 0, seed: Any = None) -> Any:
        return x

    replacements: dict[str, Any] = {
        name: constant for name in ("normal", "uniform", "truncated_normal", "gamma", "beta")
    }
    replacements |= {"binomial": constant, "dropout": dropout, "randint": whole, "shuffle": kept}
    with ExitStack() as stack:
        for name, function in replacements.items():
            stack.callback(setattr, drawing, name, vars(drawing)[name])
            setattr(drawing, name, function)
        yield


@contextmanager
def _in_float32(model: Any) -> Iterator[None]:
    """Layers that were made under another policy (`mixed_float16`) compute in float32, as the prepared model does."""
    policy = keras.DTypePolicy("float32")
    changed = [each for each in model._flatten_layers() if "16" in str(getattr(each, "compute_dtype", ""))]
    before = [(each, each._dtype_policy) for each in changed]
    for each in changed:
        each._dtype_policy = policy
    try:
        yield
    finally:
        for each, own in before:
            each._dtype_policy = own


@contextmanager
def _recorded(seen: dict[str, np.ndarray] | None) -> Iterator[None]:
    """Keeps what every layer takes and returns, each time it is called."""
    if seen is None:
        yield
        return
    original = keras.Layer.__call__

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        results = original(layer, *args, **kwargs)
        for each in tree.flatten([args, results]):
            if ops.is_tensor(each):
                try:
                    seen[f"{layer.name} {len(seen)}"] = _array(each)
                except Exception:  # a value within a transformation of the backend has no numbers
                    continue
        return results

    keras.Layer.__call__ = call
    try:
        yield
    finally:
        keras.Layer.__call__ = original


def _whole_numbers(shape: Sequence[int], dtype: str) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 128 if dtype == "int8" else 256, tuple(shape)).astype(dtype)


def _array(value: Any) -> np.ndarray:
    array = np.asarray(ops.convert_to_numpy(value))
    return array.astype(np.float32) if array.dtype.kind == "f" or array.dtype.name == "bfloat16" else array


def compare_with_original(model: Any, prepared: PreparedModel, example: Any) -> Proof:
    """Runs the user's model alongside the prepared one; see `proof`. example: a batch, or None."""
    sides = _Sides(model, prepared, example)
    seeds = [each for each in (*model.variables, *prepared.variables) if is_seed(each)]
    before = [(each, ops.convert_to_numpy(each.value)) for each in seeds]
    try:
        proof = prove(sides)
        losses = prepared._held.losses_left_out
        losses += [path for path in sides.losing if path not in losses]
        return proof
    finally:
        for each, value in before:
            each.assign(value)
