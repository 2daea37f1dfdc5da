# SPDX-License-Identifier: Apache-2.0
"""The self-check's JAX side: runs the user's function or module, and the prepared network without quantization."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...capture.core.refusals import first_line
from ...capture.jax.converter import bound, jaxprs
from ...capture.jax.layers import context_of_its_own, replacing
from ...capture.proof import CannotRun, Evidence, Proof, Trial, cotangent, example_rows, nudged, prove, usual_trials
from ...planning.masks import hides
from ..core.arrays import Mode
from .models import UserModel
from .prepared import Prepared

# XLA compiles each of these runs once: compile time matters more than run time.
_COMPILING = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class _Sides:
    """A `proof.Subject`: the user's model, and what `prepare` made from it."""

    def __init__(self, model: UserModel, prepared: Prepared) -> None:
        self.model, self.prepared = model, prepared
        self.tree = prepared.plan.network.input_tree
        self.examples = int(self.tree.example[0].shape[0])
        self.leaves = {
            name: np.asarray(leaf, np.float32) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else leaf
            for name, leaf in model.leaves.items()
        }
        self.statistics = [name for name, leaf in self.leaves.items() if name not in model.trained and _is_float(leaf)]
        self.compiled: dict[Any, Callable[..., Any]] = {}

    def original(self, trial: Trial, nudge: int = 0, layers: bool = False) -> Evidence:
        leaves = {
            name: nudged(leaf, name, nudge) if isinstance(leaf, np.ndarray) else leaf
            for name, leaf in self.leaves.items()
        }

        def run(leaves: Mapping[str, Any], inputs: Sequence[Any], training: bool) -> tuple[Any, dict[str, Any]]:
            args, kwargs = self.tree.arguments(inputs)
            results, after = self.model.run(leaves, args, kwargs, training, jax.random.key(0))
            return results, {**leaves, **after}

        return self._evidence("original", run, leaves, trial, nudge, layers)

    def captured(self, trial: Trial, layers: bool = False) -> Evidence:
        params, state = self.prepared.init()
        seen: dict[str, Any] = {}

        def run(leaves: Mapping[str, Any], inputs: Sequence[Any], training: bool) -> tuple[Any, dict[str, Any]]:
            args, kwargs = self.tree.arguments(inputs)
            here = {**params, "model": self.model.tree(leaves)}
            variables = {name: jnp.asarray(leaves[name]) for name in state.variables}
            results, _, after = self.prepared._run(
                here,
                type(state)(variables, state.ranges),
                args,
                kwargs,
                Mode(training=training, quantizing=False),
                jax.random.key(0),
                seen,
            )
            return results, {**leaves, **after.variables}

        if not layers:
            return self._evidence("captured", run, self.leaves, trial)
        with _settled():
            run(self.leaves, self._inputs(trial, 0), trial.training)
        return Evidence(layers={name: np.asarray(value) for name, value in seen.items()})

    def _inputs(self, trial: Trial, nudge: int) -> list[Any]:
        found = []
        for at, (example, given) in enumerate(zip(self.tree.example, self.prepared.plan.inputs, strict=True)):
            array = np.asarray(example)
            if jnp.issubdtype(array.dtype, jnp.floating):
                array = array.astype(np.float32)
            rows = array.shape[0] // self.examples * trial.examples
            found.append(nudged(example_rows(array, str(at), rows, trial, given.rows), str(at), nudge))
        return found

    def _evidence(
        self,
        side: str,
        run: Callable[..., tuple[Any, dict[str, Any]]],
        leaves: Mapping[str, Any],
        trial: Trial,
        nudge: int = 0,
        layers: bool = False,
    ) -> Evidence:
        inputs = self._inputs(trial, nudge)
        trained = {name: leaf for name, leaf in leaves.items() if name in self.model.trained}
        others = {name: leaf for name, leaf in leaves.items() if name not in trained}
        # A mask reaches up to 0, where it shows all, and there a clip has no gradient; it is not trained.
        followed = {at: each for at, each in enumerate(inputs) if _is_float(each) and not hides(each)}
        fixed = {at: each for at, each in enumerate(inputs) if at not in followed}

        def loss(trained: Any, followed: Any, others: Any, fixed: Any) -> Any:
            here = {name: trained.get(name, others.get(name)) for name in leaves}
            arrays = [each for _, each in sorted({**followed, **fixed}.items())]
            results, after = run(here, arrays, trial.training)
            named = _results(results)
            total = sum(
                [(each * cotangent(name, each.shape)).sum() for name, each in named.items() if _is_float(each)],
                jnp.zeros(()),
            )
            state = {name: after[name] for name in self.statistics}
            if trial.training and self.statistics:
                later, _ = run({**here, **after}, arrays, False)
                named |= {f"{name} (evaluated after a step)": each for name, each in _results(later).items()}
            return total, (named, state)

        function = jax.value_and_grad(loss, (0, 1), has_aux=True) if trial.gradients else loss
        key = (side, trial.training, trial.examples, trial.gradients)
        try:
            with _settled():
                if layers:
                    return Evidence(layers=_layers(loss, trained, followed, others, fixed))
                if key not in self.compiled:
                    # Elsewhere these options are unknown.
                    on_cpu = jax.default_backend() == "cpu"
                    jitted = jax.jit(function, compiler_options=_COMPILING if on_cpu else None)
                    if side == "original":
                        _refuse_halves(jitted.trace(trained, followed, others, fixed).jaxpr)
                    self.compiled[key] = jitted
                made = self.compiled[key](trained, followed, others, fixed)
        except CannotRun:
            raise
        except Exception as error:
            raise CannotRun(f"{type(error).__name__}: {first_line(error)}") from error
        (_, (results, state)), gradients = made if trial.gradients else (made, ({}, {}))
        evidence = Evidence(_in_numpy(results), _in_numpy(gradients[0]), _in_numpy(state))
        evidence.gradients |= {f"input {at}": np.asarray(each) for at, each in gradients[1].items()}
        return evidence


def _in_numpy(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(each) for name, each in arrays.items()}


def _is_float(array: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(array), jnp.floating))


def _results(results: Any) -> dict[str, Any]:
    """A model's results by their places."""
    found = jax.tree_util.tree_flatten_with_path(results)[0]
    return {jax.tree_util.keystr(path) or "output": each for path, each in found}


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
    sides = _Sides(model, prepared)
    proof = prove(sides, _trials(sides, prepared))
    if proof.refusal and sides.tree.rules:
        proof.refusal += f". Gradient rules of the user's own are not read: those of {', '.join(sides.tree.rules)}"
    return proof


def _trials(sides: _Sides, prepared: Prepared) -> list[Trial]:
    """The usual trials with fewer shapes to compile."""
    functional = prepared._functional
    moves = bool(functional.random_steps or functional.statistics)
    # A function without random numbers and statistics is the same in training.
    size = sum(int(np.prod(each.shape)) for each in sides.tree.example) // sides.examples
    usual = usual_trials(sides.examples, size, training=sides.model.trains or not moves)
    if sides.model.trains or moves:
        second = next(trial.examples for trial in usual if not trial.training)
        return [trial if trial.training or not trial.gradients else replace(trial, examples=second) for trial in usual]
    return [trial for trial in usual if trial.training or not trial.gradients]
