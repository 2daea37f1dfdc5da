# SPDX-License-Identifier: Apache-2.0
"""The self-check's Keras side: runs the user's model, and the prepared one without quantization, on any backend.

Both run as functions of their variables, so neither changes. The values of the variables are moved a little beforehand,
the same on both sides: a weight that became a constant in the captured network is exposed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from ...capture.keras.known import path_of
from ...capture.keras.model import first_line, is_seed, variable_names
from ...capture.proof import (
    CannotRun,
    Evidence,
    Proof,
    Trial,
    cotangent,
    example_rows,
    nudged,
    prove,
    usual_trials,
)
from ...planning.masks import is_mask
from ..core.arrays import Arrays, Mode
from .prepared import PreparedModel

# The value of random numbers while both sides run.
_CONSTANT = 0.25
# Examples in a trial if the user has given none.
_EXAMPLES = 4


class _Sides:
    """A `proof.Subject`: the user's model, and what `prepare` made from it.

    Attributes:
        losing: paths of layers that added a loss of what they computed while the model ran.
    """

    def __init__(self, model: Any, prepared: PreparedModel, example: Any) -> None:
        self.model, self.prepared = model, prepared
        self.network = prepared.plan.network
        self.names = variable_names(model)
        self.losing: dict[str, None] = {}
        functional = getattr(model, "_functional", None) or model
        inputs = getattr(functional, "_inputs", None) or []
        dtypes = [str(each.dtype) for each in inputs] or ["float32"] * len(self.network.inputs)
        if example is None:
            values = [self.network.values[name] for name in self.network.inputs]
            self.examples = _EXAMPLES
            masks = [is_mask(self.network, name) for name in self.network.inputs]
            self.given = [
                np.zeros((_EXAMPLES, *value.shape[1:]), np.int32)
                if each.rows
                else np.ones((_EXAMPLES, *value.shape[1:]), dtype)
                if mask
                else _whole_numbers((_EXAMPLES, *value.shape[1:]), dtype)
                if "int" in dtype
                else np.zeros((_EXAMPLES, *value.shape[1:]), np.float32)
                for value, dtype, each, mask in zip(values, dtypes, prepared.plan.inputs, masks, strict=True)
            ]
        else:
            self.given = [_array(each) for each in self.network.input_tree.flatten(example)]
            self.examples = len(self.given[0])
        self.dtypes = dtypes

    def original(self, trial: Trial, nudge: int = 0, layers: bool = False) -> Evidence:
        model = self.model
        variables = {self.names[id(each)]: each for each in model.variables}
        values = {name: self._value(each, nudge) for name, each in variables.items()}
        trained = [self.names[id(each)] for each in model.trainable_variables]
        others = [self.names[id(each)] for each in model.non_trainable_variables]
        seen: dict[str, np.ndarray] = {}

        def run(tensors: Mapping[str, Any], inputs: Sequence[Any], training: bool) -> tuple[list[Any], dict[str, Any]]:
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
            evidence = self._evidence(run, values, trained, trial, nudge)
        moves = {name for name, value in evidence.state.items() if not np.array_equal(value, values[name])}
        used = set(self.prepared._held.tensors) | moves
        seeds = {self.names[id(each)] for each in model.variables if is_seed(each)}
        evidence.state = {name: value for name, value in evidence.state.items() if name in used - seeds}
        evidence.layers = seen
        return evidence

    def captured(self, trial: Trial, layers: bool = False) -> Evidence:
        held = self.prepared._held
        variables = {self.names[id(each)]: each for each in self.model.variables}
        values = {name: self._value(variables[name], 0) for name in held.tensors}
        trained = [name for name in held.tensors if variables[name].trainable]
        state = self.prepared._arrays(lambda variable: ops.stop_gradient(variable.value))
        seen: dict[str, Any] = {}

        def run(tensors: Mapping[str, Any], inputs: Sequence[Any], training: bool) -> tuple[list[Any], dict[str, Any]]:
            given = [
                self.prepared._as_prepared(wanted, each)
                for wanted, each in zip(self.prepared.plan.inputs, inputs, strict=True)
            ]
            results, after = held.functional.run(
                Arrays(dict(tensors), state.learned, state.ranges),
                given,
                Mode(training=training, quantizing=False),
                lambda number: held.seeds,
                seen if layers else None,
            )
            return results, {name: after.tensors[name] for name in tensors if name not in trained}

        evidence = self._evidence(run, values, trained, trial, 0)
        evidence.layers = {path: _array(value) for path, value in seen.items()}
        return evidence

    def _value(self, variable: Any, nudge: int) -> np.ndarray:
        value, name = np.asarray(ops.convert_to_numpy(variable.value)), self.names[id(variable)]
        if value.dtype.kind != "f" or is_seed(variable):
            return value
        # Upwards only: variances stay positive.
        shares = np.random.default_rng(zlib.crc32(name.encode())).random((2, *value.shape)).astype(np.float32)
        return nudged(np.asarray(value * (1 + shares[0] / 8) + shares[1] / 16, np.float32), name, nudge)

    def _evidence(
        self,
        run: Callable[..., tuple[list[Any], dict[str, Any]]],
        values: Mapping[str, np.ndarray],
        trained: Sequence[str],
        trial: Trial,
        nudge: int,
    ) -> Evidence:
        inputs = []
        for index, (each, wanted) in enumerate(zip(self.given, self.prepared.plan.inputs, strict=True)):
            rows = len(each) // self.examples * trial.examples
            inputs.append(nudged(example_rows(each, str(index), rows, trial, wanted.rows), str(index), nudge))
        names = [self.network.input_names[at] for at, each in enumerate(inputs) if each.dtype.kind == "f"]
        evidence = Evidence()

        def named(results: Sequence[Any]) -> dict[str, Any]:
            return dict(zip(self.network.output_names, results, strict=True))

        def step(leaves: Sequence[Any]) -> tuple[Any, Any]:
            tensors = dict(zip(trained, leaves, strict=False))
            tensors |= {name: ops.convert_to_tensor(each) for name, each in values.items() if name not in tensors}
            moved = iter(leaves[len(trained) :])
            given = [next(moved) if each.dtype.kind == "f" else ops.convert_to_tensor(each) for each in inputs]
            results, state = run(tensors, given, trial.training)
            total = 0.0
            for name, each in named(results).items():
                if "float" in keras.backend.standardize_dtype(each.dtype):
                    weights = cotangent(name, tuple(each.shape))
                    total = total + ops.sum(ops.cast(each, "float32") * ops.convert_to_tensor(weights))
            return total, (results, state)

        leaves = [values[name] for name in trained] + [each for each in inputs if each.dtype.kind == "f"]
        try:
            with _settled():
                gradients, (results, state) = _differentiated(step, leaves, trial.gradients)
                evidence.results = {name: _array(each) for name, each in named(results).items()}
                evidence.state = {name: _array(each) for name, each in state.items()}
                words = [*trained, *(f"input {name}" for name in names)]
                found = zip(words, gradients, strict=True) if trial.gradients else ()
                evidence.gradients = {name: _array(each) for name, each in found if each is not None}
                if trial.training:
                    tensors = {**values, **evidence.state}
                    tensors = {name: ops.convert_to_tensor(each) for name, each in tensors.items()}
                    after, _ = run(tensors, [ops.convert_to_tensor(each) for each in inputs], False)
                    for name, each in named(after).items():
                        evidence.results[f"{name} (evaluated after a step)"] = _array(each)
        except CannotRun:
            raise
        except Exception as error:
            raise CannotRun(f"{type(error).__name__}: {first_line(error)}") from error
        return evidence


def _differentiated(
    step: Callable[[Sequence[Any]], tuple[Any, Any]], leaves: Sequence[np.ndarray], gradients: bool
) -> tuple[list[Any], Any]:
    """Gradients of the first result of `step`, computed by the backend, and the second result."""
    tensors = [ops.convert_to_tensor(each) for each in leaves]
    if not gradients:
        return [], step(tensors)[1]
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        found, results = jax.grad(step, has_aux=True)(tensors)
        return list(found), results
    if backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(tensors)
            total, results = step(tensors)
        return list(tape.gradient(total, tensors)), results
    import torch

    with torch.enable_grad():
        tensors = [each.detach().clone().requires_grad_() for each in tensors]
        # The model may write into its inputs.
        total, results = step([each.clone() for each in tensors])
        if not isinstance(total, torch.Tensor) or not total.requires_grad:
            return [None] * len(tensors), results
        return list(torch.autograd.grad(total, tensors, allow_unused=True)), results


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
        proof = prove(sides, usual_trials(sides.examples))
        halves = {str(each.compute_dtype) for each in model._flatten_layers() if "16" in str(each.compute_dtype)}
        proof.halves = " and ".join(sorted(halves))
        losses = prepared._held.losses_left_out
        losses += [path for path in sides.losing if path not in losses]
        return proof
    finally:
        for each, value in before:
            each.assign(value)
