# SPDX-License-Identifier: Apache-2.0
"""A prepared network in JAX: pure functions of parameters and state.

    prepared = qat.jax.prepare(apply, params, example)
    params, state = prepared.init()
    params, state = prepared.calibrate(params, state, batches)
    y, state = prepared.apply(params, state, x, train=True)
    params, state = prepared.freeze(params, state)
    graph = prepared.lower(params, state)

`params` and `state` are trees of arrays: `jax.jit`, `jax.grad`, `jax.lax.scan` and Optax take them as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....kit.display import table
from ....kit.planning.inputs import require_input, require_rows
from ....kit.planning.plans import ROW_HEADER, PlanInput
from ...capture.proof import Proof
from ..core import batches as loading
from ..core.arrays import Arrays, Mode
from ..core.arrays import Tree as Ranges
from ..core.engine import Functional
from ..core.freezing import frozen
from ..core.trained import TrainedNetwork
from .models import FLAGS, Tree, UserModel

if TYPE_CHECKING:
    from ....deploy import Graph

Params = dict[str, Tree]


@dataclass(frozen=True)
class State:
    """What training moves without gradients; a tree of arrays.

    Attributes:
        variables: the user's arrays that are not trained (batch statistics), by path.
        ranges: by the path of the layer that stores on it: ``minimum`` and ``maximum``, if they are not learned, and
            ``batches``, the number of batches seen; with a batch norm, ``trained``: those it has seen in training.
        frozen: whether the last phase of training has begun. It is not an array: a jitted function is compiled once for
            each phase.
        calibrated: likewise, whether `calibrate` has run.
        phase: an array ``"frozen"`` in a frozen state, nothing before. Array checkpoints keep neither `frozen` nor
            `calibrated`; so the arrays of a frozen state do not fit into an unfrozen one, which would go on as if it
            had never been frozen.
    """

    variables: dict[str, Array]
    ranges: Ranges
    frozen: bool = False
    calibrated: bool = False
    phase: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.frozen != ("frozen" in self.phase):
            object.__setattr__(self, "phase", {"frozen": np.ones((), np.int32)} if self.frozen else {})


jax.tree_util.register_dataclass(
    State, data_fields=["variables", "ranges", "phase"], meta_fields=["frozen", "calibrated"]
)


@cache
def _register_with_flax() -> None:
    """Lets `flax.serialization` handle states, which record whether they are frozen."""
    try:
        from flax import serialization
    except ImportError:
        return

    words = ["variables", "ranges", "frozen", "calibrated"]

    def to_dict(state: State) -> dict[str, Tree]:
        return {word: serialization.to_state_dict(getattr(state, word)) for word in words}

    def from_dict(state: State, saved: dict[str, Tree]) -> State:
        if missing := sorted({*words} - {*saved}):
            raise ValueError(f"a state's dictionary must have {words}, got none of {missing}")
        return State(*(serialization.from_state_dict(getattr(state, word), saved[word]) for word in words))

    serialization.register_serialization_state(State, to_dict, from_dict)


class Prepared:
    """A model under the device's arithmetic, as pure functions of parameters and state.

    Attributes:
        plan: what the device runs.
        unused_rules: one sentence for every rule that has no effect.
        proof: what `prepare` compared with the user's model; None if it was not asked to.
    """

    def __init__(self, model: UserModel, functional: Functional) -> None:
        self.plan = functional.plan
        self.unused_rules = list(functional.plan.unused_rules)
        self.proof: Proof | None = None
        self._model = model
        self._functional = functional

    def init(self) -> tuple[Params, State]:
        """Parameters and state to begin with.

        Returns:
            params: ``{"model": the user's tree of trained parameters, "range_parameters": the learned ranges}``; give
                ``"range_parameters"`` its own learning rate with `optax.multi_transform`.
            state: all else.
        """
        leaves = {name: _float32(leaf) for name, leaf in self._model.leaves.items()}
        with jax.ensure_compile_time_eval():  # within `jit`, too
            arrays = self._functional.initial({name: np.asarray(leaf) for name, leaf in leaves.items()})
        learned, ranges = jax.tree.map(jnp.asarray, (arrays.learned, arrays.ranges))
        if sys.modules.get("flax") is not None:
            _register_with_flax()
        others = {name: leaf for name, leaf in leaves.items() if name not in self._model.trained}
        return {"model": self._model.tree(leaves), "range_parameters": learned}, State(others, ranges)

    def apply(
        self, params: Params, state: State, *args: Tree, train: bool = False, key: Array | None = None, **kwargs: Tree
    ) -> tuple[Tree, State]:
        """What the model returns for a batch, and the next state.

        Args:
            params, state: as `init` gives them.
            args, kwargs: the model's own; any number of examples.
            train: batch norm uses the batch's statistics and moves the running ones, ranges follow the data, dropout
                drops. Otherwise the state stays as it is.
            key: a `jax.random` key, for networks with dropout in training.

        Raises:
            ValueError: a learned range was not calibrated, or there is no key for dropout.
            TypeError: the arguments nest differently than the example's.
        """
        mode = Mode(training=train, frozen=_checked_state(state).frozen)
        outputs, _, new = self._run(params, state, args, kwargs, mode, key)
        return outputs, new

    def calibrate(
        self, params: Params, state: State, batches: Iterable[Tree], restart: bool = False
    ) -> tuple[Params, State]:
        """Sets all activation ranges from data, with the float network in evaluation; see `exactqat.qat.calibrate`."""
        is_array = isinstance(batches, jax.Array | np.ndarray)
        batches = loading.checked(batches, is_array, _checked_state(state).frozen)
        if restart:
            params, state = self._trees(params, state, self._functional.forgotten(self._arrays(params, state)))
        mode = Mode(quantizing=False, observing=True)
        parts = self._functional.parts
        observe = jax.jit(lambda p, s, args, kwargs: (*self._run(p, s, args, kwargs, mode)[1:], parts.last))
        _require_values("calibrate", params, state)
        places = loading.places(self._model.signature, FLAGS)

        def see(batch: Tree) -> None:
            nonlocal params, state
            args, kwargs = loading.fitting(batch, self.plan.network.input_tree, places)
            params, state, parts.last = observe(params, state, args, kwargs)
            _require_values("calibrate", state)

        loading.show(batches, see, lambda: self._functional.batches_seen(state.ranges), parts)
        return params, replace(state, calibrated=True)

    def freeze(self, params: Params, state: State) -> tuple[Params, State]:
        """Starts the last phase of training, in which the network computes the device's integers, in training and in
        evaluation; see `exactqat.qat.freeze`.

        Raises:
            TypeError: it is called within `jax.jit`, `jax.grad` or `jax.vmap`.
        """
        _require_values("freeze", params, state)
        arrays = self._arrays(params, _checked_state(state)).map(np.asarray)
        params, state = self._trees(params, state, frozen(self._functional, arrays))
        return params, replace(state, frozen=True)

    def variables(self, params: Params, state: State) -> Tree:
        """What was passed to `prepare`, with the trained values: a tree of parameters, Linen's variables, an NNX
        module."""
        return self._model.restore(self._tensors(params, state))

    def trained(self, params: Params, state: State) -> TrainedNetwork:
        """The network with its numbers, for `exactqat.deploy.lower` and its companions."""
        _require_values("lower", params, state)

        def computed(batch: Tree, quantizing: bool) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
            args, kwargs = loading.arguments(batch)
            seen: dict[str, Array] = {}
            self._run(params, state, args, kwargs, Mode(frozen=state.frozen, quantizing=quantizing), seen=seen)
            inputs = zip(self.plan.network.input_tree.flatten(*args, **kwargs), self.plan.inputs, strict=True)
            in_numpy = [np.asarray(x, np.int32 if wanted.rows else np.float32) for x, wanted in inputs]
            return in_numpy, {path: np.asarray(value) for path, value in seen.items()}

        arrays = self._arrays(params, state).map(np.asarray)
        return TrainedNetwork(self._functional, arrays, state.frozen, computed)

    def take_over(
        self,
        params: Params,
        state: State,
        tensors: Mapping[str, np.ndarray],
        ranges: Mapping[str, tuple[float, float]],
        learned: Mapping[str, dict[str, np.ndarray]],
    ) -> tuple[Params, State]:
        """Parameters and state with other arrays, by the user's names, other ranges of grids, by the grids' names, and
        other learned ranges of weights, as `Arrays.learned` has them.

        Raises:
            ValueError: the state is frozen, or there is no such array.
        """
        if _checked_state(state).frozen:
            raise ValueError("a frozen network takes over no ranges: do it before freeze")
        arrays = self._arrays(params, state).taking_over(tensors, ranges, dict(learned)).map(jnp.asarray)
        params, state = self._trees(params, state, arrays)
        variables = {name: arrays.tensors[name] for name in state.variables}
        return {**params, "model": self._model.tree(arrays.tensors)}, replace(state, variables=variables)

    def lower(self, params: Params, state: State) -> Graph:
        """The integer graph of a frozen network, for `exactqat.deploy`.

        Raises:
            ValueError: the state is not frozen, a layer does not fit the device's integers, or a range or weight is not
                finite.
            RuntimeError: a range has seen no data.
        """
        from ....deploy.lower import lower

        if not _checked_state(state).frozen:
            raise ValueError("the state must be frozen before it is lowered: call freeze and train its last phase")
        return lower(self.trained(params, state))

    def __repr__(self) -> str:
        count, layers = len(self._functional.stored_paths()), len(self._functional.weight_owner)
        return f"Prepared({count} stored tensors, {layers} layers with weights{self.plan.precisions()})"

    def _repr_html_(self) -> str:
        return table(repr(self), ROW_HEADER, [row.cells() for row in self.plan.rows()], 4)

    # --- how trees and arrays by name belong together ---------------------------------------------------------------

    def _tensors(self, params: Params, state: State) -> dict[str, Array]:
        try:
            trained = zip(self._model.trained, jax.tree.leaves(params["model"]), strict=True)
            return {**state.variables, **dict(trained)}
        except (KeyError, TypeError, ValueError) as error:
            raise TypeError(
                "params must be what init gives, a dictionary of 'model' and 'range_parameters', got "
                f"{type(params).__name__}"
            ) from error

    def _arrays(self, params: Params, state: State) -> Arrays:
        tensors = {name: _float32(leaf) for name, leaf in self._tensors(params, state).items()}
        return Arrays(tensors, params["range_parameters"], state.ranges)

    def _trees(self, params: Params, state: State, arrays: Arrays) -> tuple[Params, State]:
        """Parameters and state with the ranges of these arrays."""
        learned, ranges = jax.tree.map(jnp.asarray, (arrays.learned, arrays.ranges))
        return {**params, "range_parameters": learned}, replace(state, ranges=ranges)

    def _run(
        self,
        params: Params,
        state: State,
        args: Sequence[Tree],
        kwargs: Mapping[str, Tree],
        mode: Mode,
        key: Array | None = None,
        seen: dict[str, Array] | None = None,
    ) -> tuple[Tree, Params, State]:
        functional, arrays = self._functional, self._arrays(params, state)
        tree = self.plan.network.input_tree
        arguments = zip(tree.flatten(*args, **kwargs), self.plan.inputs, strict=True)
        inputs = [_checked(x, wanted) for x, wanted in arguments]
        if mode.quantizing and not state.calibrated:
            functional.require_calibration()
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state.ranges))
        if mode.quantizing and not mode.training and not traced:
            functional.require_data(state.ranges)
        if mode.training and functional.random_steps and key is None:
            raise ValueError(f"'{functional.random_steps[0]}' drops values in training: give key=jax.random.key(...)")
        keys = None if key is None else partial(jax.random.fold_in, key)
        outputs, after = functional.run(arrays, inputs, mode, keys, seen)
        if mode.training or mode.observing:
            params, state = self._trees(params, state, after)
            state = replace(state, variables={name: after.tensors[name] for name in state.variables})
        return tree.unflatten(outputs), params, state


def _checked_state(state: object) -> State:
    if not isinstance(state, State):
        raise TypeError(f"state must be the State that init gives, got {type(state).__name__}")
    return state


def _require_values(method: str, *trees: Tree) -> None:
    """Raises TypeError within `jit`, `grad` or `vmap`, where arrays have no values yet."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees)):
        raise TypeError(
            f"{method} reads the values of params, state and data, which they do not have within jax.jit, jax.grad or "
            "jax.vmap: call it outside; only apply can be transformed"
        )


def _float32(leaf: jax.typing.ArrayLike) -> Array:
    array = jnp.asarray(leaf)
    return array.astype(jnp.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _checked(x: jax.typing.ArrayLike, plan_input: PlanInput) -> Array:
    """An input in float32, with the shape that the network was captured for."""
    array = _float32(x)
    require_input(plan_input, tuple(array.shape), array.dtype, jnp.issubdtype(array.dtype, jnp.floating))
    if not plan_input.rows:
        return array.astype(jnp.float32)
    if array.size and not isinstance(array, jax.core.Tracer):
        require_rows(plan_input, int(array.min()), int(array.max()))
    return array
