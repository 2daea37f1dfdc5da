# SPDX-License-Identifier: Apache-2.0
"""The self-check's JAX side: runs the user's function or module, and the prepared network without quantization."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, Primitive

from ...capture.jax.converter import jaxprs
from ...capture.jax.layers import context_of_its_own, replacing
from ...capture.proof import (
    CannotRun,
    Differentiated,
    FunctionalSubject,
    Named,
    Proof,
    Side,
    Summed,
    Trial,
    nudged,
    prove,
)
from ..core.arrays import Mode
from . import primitives
from .models import UserModel
from .prepared import Prepared


class _Sides(FunctionalSubject[Array]):
    """The user's model, and what `prepare` made from it."""

    compiles = True
    remedy = (
        "let it compute in training what it computes in evaluation (then a batch norm keeps its statistics), or write "
        "batch norms with Flax or exactqat.qat.jax.batch_norm, which train"
    )
    primitives = primitives

    def __init__(self, model: UserModel, prepared: Prepared) -> None:
        self.model, self.prepared = model, prepared
        self.tree = prepared.plan.network.input_tree
        inputs = [_single(np.asarray(example)) for example in self.tree.example]
        functional = prepared._functional
        # A function without random numbers and statistics is the same in training.
        trains = model.trains or not (functional.random_steps or functional.statistics)
        super().__init__(prepared.plan.network, inputs, [source.rows for source in prepared.plan.inputs], trains)
        self.values = {
            name: _single(np.asarray(leaf)) if _is_float(leaf) else leaf for name, leaf in model.leaves.items()
        }
        self.statistics = [name for name, leaf in self.values.items() if name not in model.trained and _is_float(leaf)]
        self.evaluates_after = bool(self.statistics)
        self.rules = self.tree.rules
        self.places = {step.path: step.place for step in prepared.plan.steps}

    def side(self, original: bool, nudge: int = 0) -> Side[Array]:
        params, state = self.prepared.init()

        def run(
            leaves: Named[Array], arrays: Sequence[Array], training: bool, seen: dict[str, Array] | None = None
        ) -> tuple[dict[str, Array], Named[Array]]:
            args, kwargs = self.tree.arguments(arrays)
            known, key = {name: leaves[name] for name in self.values}, jax.random.key(0)
            if original:
                results, after = self.model.run(known, args, kwargs, training, key)
            else:
                here = {**params, "model": self.model.tree(known)}
                before = type(state)({name: jnp.asarray(leaves[name]) for name in state.variables}, state.ranges)
                mode = Mode(training=training, quantizing=False)
                results, _, later = self.prepared._run(here, before, args, kwargs, mode, key, seen)
                after = later.variables
            paths = jax.tree_util.tree_flatten_with_path(results)[0]
            return {jax.tree_util.keystr(path) or "output": value for path, value in paths}, after

        values = {
            name: nudged(value, name, nudge) if isinstance(value, np.ndarray) else value
            for name, value in self.values.items()
        }
        return Side(run, values, self.model.trained, self.statistics)

    def program(self, side: str, trial: Trial, step: Summed[Array]) -> Differentiated[Array]:
        program = super().program(side, trial, step)
        if side == "captured":
            return program

        def run(leaves: Named[Array], others: Named[Array]) -> tuple[Named[Array], Any]:
            _refuse_halves(cast(Any, program).trace(leaves, others).jaxpr)
            return program(leaves, others)

        return run

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Dropout keeps all values, on both sides."""

        def all_kept(key: Array, p: float | Array = 0.5, shape: Sequence[int] | None = None, **rest: object) -> Array:
            return jnp.broadcast_to(jnp.asarray(p) > 0, jnp.shape(p) if shape is None else shape)

        with context_of_its_own(), replacing(jax.random, "bernoulli", all_kept):
            yield

    @contextmanager
    def recorded(self, seen: dict[str, Array]) -> Iterator[None]:
        bind = Primitive.bind

        def recording(primitive: Primitive, *args: Any, **parameters: Any) -> Any:
            results = bind(primitive, *args, **parameters)
            for x in results if primitive.multiple_results else [results]:
                if isinstance(x, Array) and not isinstance(x, jax.core.Tracer) and _is_float(x):
                    seen[f"{primitive.name} {len(seen)}"] = x
            return results

        with jax.disable_jit(), mock.patch.object(Primitive, "bind", recording):
            yield

    def array(self, value: Array) -> np.ndarray:
        return np.asarray(value)


def _single(array: np.ndarray) -> np.ndarray:
    """Real numbers in float32."""
    return array.astype(np.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _is_float(array: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(array), jnp.floating))


def _refuse_halves(jaxpr: ClosedJaxpr) -> None:
    """A model that computes in half precision rounds differently than its network, which trains in float32."""
    for inner in jaxprs(jaxpr.jaxpr):
        for equation in inner.eqns:
            for variable in equation.outvars:
                dtype = getattr(variable.aval, "dtype", None)
                if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
                    raise CannotRun(f"nothing but computes in {dtype}, and its network in float32")


def compare_with_original(model: UserModel, prepared: Prepared) -> Proof:
    """Runs the user's model alongside the prepared one; see `proof`."""
    return prove(_Sides(model, prepared))
