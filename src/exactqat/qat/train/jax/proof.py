# SPDX-License-Identifier: Apache-2.0
"""The self-check's JAX side: runs the user's function or module, and the prepared network without quantization."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...capture.jax.converter import bound, jaxprs
from ...capture.jax.layers import context_of_its_own, replacing
from ...capture.proof import CannotRun, Evidence, FunctionalSubject, Proof, Trial, cotangent, nudged, prove
from ..core.arrays import Mode
from .models import UserModel
from .prepared import Prepared
from .programs import program


class _Sides(FunctionalSubject[Any]):
    """The user's model, and what `prepare` made from it."""

    compiles = True

    def __init__(self, model: UserModel, prepared: Prepared) -> None:
        self.model, self.prepared = model, prepared
        self.tree = prepared.plan.network.input_tree
        inputs = [_single(np.asarray(example)) for example in self.tree.example]
        functional = prepared._functional
        # A function without random numbers and statistics is the same in training.
        trains = model.trains or not (functional.random_steps or functional.statistics)
        super().__init__(prepared.plan.network, inputs, [each.rows for each in prepared.plan.inputs], trains)
        self.values = {
            name: _single(np.asarray(leaf)) if _is_float(leaf) else leaf for name, leaf in model.leaves.items()
        }
        self.statistics = [name for name, leaf in self.values.items() if name not in model.trained and _is_float(leaf)]
        self.evaluates_after = bool(self.statistics)
        self.rules = self.tree.rules
        self.compiled: dict[Any, Any] = {}

    def original(self, trial: Trial, inputs: Sequence[np.ndarray], nudge: int, layers: bool) -> Evidence:
        values = {
            name: nudged(value, name, nudge) if isinstance(value, np.ndarray) else value
            for name, value in self.values.items()
        }

        def run(leaves: Mapping[str, Any], arrays: Sequence[Any], training: bool) -> tuple[Any, dict[str, Any]]:
            args, kwargs = self.tree.arguments(arrays)
            known = {name: leaves[name] for name in self.values}
            results, after = self.model.run(known, args, kwargs, training, jax.random.key(0))
            return results, {**leaves, **after}

        if layers:
            with _settled():
                return Evidence(layers=_layers(lambda *arrays: run(values, arrays, trial.training)[0], *inputs))
        return self.evidence("original", run, values, self.model.trained, self.statistics, trial, inputs)

    def captured(self, trial: Trial, inputs: Sequence[np.ndarray], layers: bool) -> Evidence:
        params, state = self.prepared.init()
        seen: dict[str, Any] = {}

        def run(leaves: Mapping[str, Any], arrays: Sequence[Any], training: bool) -> tuple[Any, dict[str, Any]]:
            args, kwargs = self.tree.arguments(arrays)
            here = {**params, "model": self.model.tree({name: leaves[name] for name in self.values})}
            variables = {name: jnp.asarray(leaves[name]) for name in state.variables}
            mode, key = Mode(training=training, quantizing=False), jax.random.key(0)
            before = type(state)(variables, state.ranges)
            results, _, after = self.prepared._run(here, before, args, kwargs, mode, key, seen)
            return results, {**leaves, **after.variables}

        if layers:
            with _settled():
                run(self.values, inputs, trial.training)
            return Evidence(layers={name: np.asarray(value) for name, value in seen.items()})
        return self.evidence("captured", run, self.values, self.model.trained, self.statistics, trial, inputs)

    def named(self, results: Any) -> dict[str, Any]:
        found = jax.tree_util.tree_flatten_with_path(results)[0]
        return {jax.tree_util.keystr(path) or "output": value for path, value in found}

    def weighted_sum(self, results: Mapping[str, Any]) -> Any:
        products = [(x * cotangent(name, x.shape)).sum() for name, x in results.items() if _is_float(x)]
        return sum(products, jnp.zeros(()))

    def array(self, value: Any) -> np.ndarray:
        return np.asarray(value)

    def differentiated(
        self,
        key: tuple[object, ...],
        step: Callable[..., Any],
        leaves: Mapping[str, np.ndarray],
        others: Mapping[str, Any],
        trial: Trial,
    ) -> tuple[Mapping[str, Any], Any]:
        with _settled():
            if key not in self.compiled:
                self.compiled[key] = program(jax.value_and_grad(step, has_aux=True) if trial.gradients else step)
                if key[0] == "original":
                    _refuse_halves(self.compiled[key].trace(leaves, others).jaxpr)
            made = self.compiled[key](leaves, others)
        return (made[1], made[0][1]) if trial.gradients else ({}, made[1])


def _single(array: np.ndarray) -> np.ndarray:
    """Real numbers in float32."""
    return array.astype(np.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _is_float(array: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(array), jnp.floating))


def _refuse_halves(jaxpr: Any) -> None:
    """A model that computes in half precision rounds differently than its network, which trains in float32."""
    for inner in jaxprs(jaxpr.jaxpr):
        for equation in inner.eqns:
            for variable in equation.outvars:
                dtype = getattr(variable.aval, "dtype", None)
                if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
                    raise CannotRun(f"nothing but computes in {dtype}, and its network in float32")


def _layers(function: Callable[..., Any], *args: Any) -> dict[str, np.ndarray]:
    """The results of a function's equations, in order."""
    closed = jax.make_jaxpr(function)(*args)
    found: dict[str, np.ndarray] = {}

    def run(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        known = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, arguments, strict=True))

        def read(variable: Any) -> Any:
            return variable.val if hasattr(variable, "val") else known[variable]

        for equation in jaxpr.eqns:
            given = [read(each) for each in equation.invars]
            inner = next((equation.params[key] for key in ("jaxpr", "call_jaxpr") if key in equation.params), None)
            if equation.primitive.name in ("scan", "while", "cond") or inner is None:
                results = bound(equation.primitive, equation.params, given)
            else:
                results = run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), given)
            known.update(zip(equation.outvars, results, strict=True))
            for each in results:
                if hasattr(each, "dtype") and _is_float(each):
                    found[f"{equation.primitive.name} {len(found)}"] = np.asarray(each)
        return [read(each) for each in jaxpr.outvars]

    run(closed.jaxpr, closed.consts, jax.tree.leaves(args))
    return found


def _all_kept(key: Any, p: Any = 0.5, shape: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`jax.random.bernoulli` without randomness."""
    return jnp.broadcast_to(jnp.asarray(p) > 0, jnp.shape(p) if shape is None else shape)


@contextmanager
def _settled() -> Iterator[None]:
    """Dropout keeps all values, on both sides."""
    with context_of_its_own(), replacing(jax.random, "bernoulli", _all_kept):
        yield


def compare_with_original(
    model: UserModel, prepared: Prepared, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Proof:
    """Runs the user's model alongside the prepared one; see `proof`."""
    return prove(_Sides(model, prepared))
