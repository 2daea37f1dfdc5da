# SPDX-License-Identifier: Apache-2.0
"""The self-check's Keras side: runs the user's model, and the prepared one without quantization, on any backend.

Both run as functions of their variables, so neither changes. The values of the variables are moved a little beforehand,
the same on both sides: a weight that became a constant in the captured network is exposed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras import ops, tree

from ....kit.planning.masks import is_mask
from ....kit.planning.network import Network
from ...capture.keras.items import first_line, is_seed, path_of
from ...capture.keras.model import variable_names
from ...capture.proof import FunctionalSubject, Named, Proof, Side, nudged, prove
from ..core.arrays import Arrays, Mode
from . import primitives
from .prepared import PreparedModel, values_of

# The value of random numbers while both sides run.
_CONSTANT = 0.25
# Examples in a trial if the user has given none.
_EXAMPLES = 4


class _Sides(FunctionalSubject[Any]):
    """The user's model, and what `prepare` made from it.

    Attributes:
        losing: paths of layers that added a loss of what they computed while the model ran.
    """

    primitives = primitives
    compiles = keras.backend.backend() == "jax"
    first_line = staticmethod(first_line)
    remedy = "let it compute in training what it computes in evaluation, which is what the device runs"
    own_gradients = "Gradients of the model's own, as of keras.ops.custom_gradient, are not kept"

    def __init__(self, model: keras.Model, prepared: PreparedModel, example: Any) -> None:
        self.losing: dict[str, None] = {}
        self.model, self.prepared = model, prepared
        network, wanted = prepared.plan.network, prepared.plan.inputs
        self.names = variable_names(model)
        self.variables = {self.names[id(variable)]: variable for variable in model.variables}
        functional = getattr(model, "_functional", None) or model
        declared = getattr(functional, "_inputs", None) or []
        self.dtypes = [str(tensor.dtype) for tensor in declared] or ["float32"] * len(network.inputs)
        inputs = (
            [
                _of_none(network, name, dtype, plan_input.rows)
                for name, dtype, plan_input in zip(network.inputs, self.dtypes, wanted, strict=True)
            ]
            if example is None
            else [self.array(leaf) for leaf in network.input_tree.flatten(example)]
        )
        super().__init__(network, inputs, [plan_input.rows for plan_input in wanted])
        halves = {str(layer.compute_dtype) for layer in model._flatten_layers() if "16" in str(layer.compute_dtype)}
        self.halves = " and ".join(sorted(halves))

    def side(self, original: bool, nudge: int = 0) -> Side[Any]:
        variables = (
            self.variables
            if original
            else {name: self.variables[name] for name in self.prepared._held.variables.tensors}
        )
        values = {name: self._value(name, variable, nudge) for name, variable in variables.items()}
        trained = [name for name, variable in variables.items() if variable.trainable]
        others = [name for name in variables if name not in trained and not is_seed(variables[name])]
        return Side(self._run_original if original else self._run_captured, values, trained, others)

    def _run_original(
        self, tensors: Named[Any], inputs: Sequence[Any], training: bool, seen: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        arguments = tree.pack_sequence_as(
            self.network.input_tree.inputs,
            [ops.cast(x, dtype) for x, dtype in zip(inputs, self.dtypes, strict=True)],
        )
        # `stateless_call` does not pass `training` to the layers inside; `fit` on PyTorch and TensorFlow does.
        held = [(variable, tensors[name]) for name, variable in self.variables.items()]
        with keras.StatelessScope(held, collect_losses=True) as scope:
            results = self.model(arguments, training=training)
            losses = set(map(id, scope.losses))
            for layer in (layer for layer in self.model._flatten_layers() if layer._loss_ids & losses):
                self.losing[path_of(layer)] = None
                layer._loss_ids -= losses
        after = {name: scope.get_current_value(variable) for name, variable in self.variables.items()}
        return self._named(tree.flatten(results)), {name: x for name, x in after.items() if x is not None}

    def _run_captured(
        self, tensors: Named[Any], inputs: Sequence[Any], training: bool, seen: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        held = self.prepared._held
        state = self.prepared._arrays().map(ops.stop_gradient)
        with keras.StatelessScope():
            results, after = held.functional.run(
                Arrays(dict(tensors), state.learned, state.ranges),
                [self.prepared._as_prepared(*pair) for pair in zip(self.prepared.plan.inputs, inputs, strict=True)],
                Mode(training=training, quantizing=False),
                lambda number: held.seeds,
                seen,
            )
        return self._named(results), after.tensors

    def _named(self, results: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.network.output_names, results, strict=True))

    @staticmethod
    def _value(name: str, variable: keras.Variable, nudge: int) -> np.ndarray:
        value = np.asarray(ops.convert_to_numpy(variable.value))
        if value.dtype.kind != "f" or is_seed(variable):
            return value
        # Upwards only: variances stay positive.
        shares = np.random.default_rng(zlib.crc32(name.encode())).random((2, *value.shape)).astype(np.float32)
        return nudged(np.asarray(value * (1 + shares[0] / 8) + shares[1] / 16, np.float32), name, nudge)

    def settled(self) -> AbstractContextManager[None]:
        """Randomness that does not depend on the order it is drawn in: dropout keeps all values, numbers are
        constant."""
        from keras.src.backend import random

        def dropout(inputs: Any, rate: float, noise_shape: object = None, seed: object = None) -> Any:
            return inputs / (1.0 - rate)

        def constant(shape: Sequence[int], *args: object, dtype: str | None = None, **kwargs: object) -> Any:
            return ops.cast(ops.full(tuple(shape), _CONSTANT), dtype or keras.config.floatx())

        def whole(shape: Sequence[int], minval: int, maxval: int, dtype: str = "int32", seed: object = None) -> Any:
            return ops.cast(ops.full(tuple(shape), minval), dtype)

        def kept(x: Any, axis: int = 0, seed: object = None) -> Any:
            return x

        names = ("normal", "uniform", "truncated_normal", "gamma", "beta", "binomial")
        replacements: dict[str, Any] = dict.fromkeys(names, constant)
        return mock.patch.multiple(random, **replacements, dropout=dropout, randint=whole, shuffle=kept)

    @contextmanager
    def recorded(self, seen: dict[str, Any]) -> Iterator[None]:
        original = keras.Layer.__call__

        def call(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
            results = original(layer, *args, **kwargs)
            for x in tree.flatten([args, results]):
                if ops.is_tensor(x) and values_of(x) is not None:  # within a transformation there are none
                    seen[f"{layer.name} {len(seen)}"] = x
            return results

        with mock.patch.object(keras.Layer, "__call__", call):
            yield

    def array(self, value: Any) -> np.ndarray:
        array = np.asarray(ops.convert_to_numpy(value))
        return array.astype(np.float32) if array.dtype.kind == "f" or array.dtype.name == "bfloat16" else array


def _of_none(network: Network, name: str, dtype: str, rows: int) -> np.ndarray:
    """An input for a user who gave no example."""
    shape = (_EXAMPLES, *network.values[name].shape[1:])
    if rows:
        return np.zeros(shape, np.int32)
    if is_mask(network, name):
        return np.ones(shape, dtype)
    if "int" not in dtype:
        return np.zeros(shape, np.float32)
    return np.random.default_rng(0).integers(0, 128 if dtype == "int8" else 256, shape).astype(dtype)


@contextmanager
def _in_float32(model: Any) -> Iterator[None]:
    """Layers that were made under another policy (`mixed_float16`) compute in float32, as the prepared model does."""
    policy = keras.DTypePolicy("float32")
    changed = [layer for layer in model._flatten_layers() if "16" in str(getattr(layer, "compute_dtype", ""))]
    before = [(layer, layer._dtype_policy) for layer in changed]
    for layer in changed:
        layer._dtype_policy = policy
    try:
        yield
    finally:
        for layer, own in before:
            layer._dtype_policy = own


def compare_with_original(model: Any, prepared: PreparedModel, example: Any) -> Proof:
    """Runs the user's model alongside the prepared one; see `proof`. example: a batch, or None."""
    sides = _Sides(model, prepared, example)
    seeds = [variable for variable in (*model.variables, *prepared.variables) if is_seed(variable)]
    before = [(seed, ops.convert_to_numpy(seed.value)) for seed in seeds]
    try:
        with _in_float32(model):
            proof = prove(sides)
        losses = prepared.losses_left_out
        losses += [path for path in sides.losing if path not in losses]
        return proof
    finally:
        for seed, value in before:
            seed.assign(value)
