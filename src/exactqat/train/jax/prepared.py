# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training for JAX: `prepare` a function, a Flax Linen or an NNX module, train by pure functions.

    prepared = qat.jax.prepare(apply, params, example)
    params, state = prepared.init()
    params, state = prepared.calibrate(params, state, batches)
    y, state = prepared.apply(params, state, x, train=True)
    params, state = prepared.freeze(params, state)
    graph = prepared.lower(params, state)

`params` and `state` are trees of arrays: `jax.jit`, `jax.grad`, `jax.lax.scan` and Optax take them as they are.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise ImportError("JAX is needed here: pip install 'exactqat[jax]'") from error
import numpy as np

from ...capture.core.progress import at_work
from ...capture.core.refusals import CaptureError
from ...capture.core.safeguards import SAFEGUARDS
from ...capture.jax.layers import batch_norm as _captured_batch_norm
from ...capture.jax.layers import capturing, layer
from ...capture.jax.model import capture, named_leaves
from ...capture.proof import Proof, accept
from ...device import DEFAULT_PROFILE
from ...display import table
from ...planning import UnsupportedOperator, plan, warn_of_plan
from ...planning.inputs import require_input, require_rows
from ...planning.masks import with_examples
from ...planning.plans import ROW_HEADER, require_data
from ...planning.rules import Rule, checked_rules
from ..core import batches as loading
from ..core.arrays import Arrays, Mode
from ..core.frameworks import elsewhere, framework_of
from ..core.functional import Functional
from ..core.trained import TrainedNetwork
from . import primitives as primitives_jax
from .moving_averages import MovingAverages

if TYPE_CHECKING:
    from ...deploy import Graph

__all__ = ["Prepared", "State", "batch_norm", "dropout", "prepare"]

Params = dict[str, Any]


@dataclass(frozen=True)
class State:
    """What training moves without gradients; a tree of arrays.

    Attributes:
        variables: the user's arrays that are not trained (batch statistics), by path.
        ranges: by the path of the layer that stores on it: ``minimum`` and ``maximum``, where they are not learned, and
            ``batches``, the number of batches seen; where there is a batch norm, ``trained``: by it, in training.
        frozen: whether the last phase of training has begun. It is no array: a jitted function is compiled once for
            each phase.
        calibrated: likewise, whether `calibrate` has run.
        phase: an array ``"frozen"`` of a frozen state, nothing before. Stores of arrays keep neither `frozen` nor
            `calibrated`; so the arrays of a frozen state do not fit into a state that is not, where it would go on as
            if it had never been frozen.
    """

    variables: dict[str, Any]
    ranges: dict[str, dict[str, Any]]
    frozen: bool = False
    calibrated: bool = False
    phase: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.frozen != ("frozen" in self.phase):
            object.__setattr__(self, "phase", {"frozen": np.ones((), np.int32)} if self.frozen else {})


jax.tree_util.register_dataclass(
    State, data_fields=["variables", "ranges", "phase"], meta_fields=["frozen", "calibrated"]
)


@cache
def _register_with_flax() -> None:
    """Lets `flax.serialization` take states, which say whether they are frozen."""
    try:
        from flax import serialization
    except ImportError:
        return

    words = ["variables", "ranges", "frozen", "calibrated"]

    def to_dict(state: State) -> dict[str, Any]:
        return {word: serialization.to_state_dict(getattr(state, word)) for word in words}

    def from_dict(state: State, given: dict[str, Any]) -> State:
        missing = sorted(set(words) - set(given))
        if missing:
            raise ValueError(f"a state's dictionary must have {words}, got none of {missing}")
        variables, ranges = (
            serialization.from_state_dict(getattr(state, word), given[word]) for word in ("variables", "ranges")
        )
        return State(variables, ranges, bool(given["frozen"]), bool(given["calibrated"]))

    serialization.register_serialization_state(State, to_dict, from_dict)


@dataclass(frozen=True)
class _Model:
    """A model of the user's as a function of a tree, and the way back.

    Attributes:
        function: of (leaves by name in `names`' order, arguments).
        names: of the leaves.
        leaves: their values.
        trained: names of those that are trained.
        tree: makes the user's tree of trained leaves from a mapping of all of them.
        names_of_tree: the other way round: a tree of trained leaves by name.
        restore: what the user gave, with other values.
        run: the user's model itself, of (leaves in `names`' order, args, kwargs, training, key): its results and all
            leaves after it, by name.
        trains: whether `run` knows training from evaluation.
        words: arguments that tell training by a word, such as "mode='train'".
    """

    function: Callable[..., Any]
    names: list[str]
    leaves: list[Any]
    trained: frozenset[str]
    tree: Callable[[Mapping[str, Any]], Any]
    names_of_tree: Callable[[Any], dict[str, Any]]
    restore: Callable[[Mapping[str, Any]], Any]
    run: Callable[[Sequence[Any], Sequence[Any], Mapping[str, Any], bool, Any], tuple[Any, dict[str, Any]]]
    trains: bool
    signature: inspect.Signature | None = None
    words: str = ""


class Prepared:
    """A model under the device's arithmetic, as pure functions of parameters and state.

    Attributes:
        plan: what the device runs.
        unused_rules: one sentence for every rule that has no effect.
        proof: what `prepare` compared with the user's model; None if it was not asked to.
    """

    def __init__(self, model: _Model, functional: Functional) -> None:
        self.plan = functional.plan
        self.unused_rules = list(functional.plan.unused_rules)
        self.proof: Proof | None = None
        self._model = model
        self._functional = functional

    def init(self) -> tuple[Params, State]:
        """Parameters and state to begin with.

        Returns:
            params: ``{"model": the user's tree of trained parameters, "range_parameters": the learned ranges}``; give
                ``"range_parameters"`` a learning rate of its own by `optax.multi_transform`.
            state: all else.
        """
        leaves = {name: _float32(leaf) for name, leaf in zip(self._model.names, self._model.leaves, strict=True)}
        with jax.ensure_compile_time_eval():  # within `jit`, too
            arrays = self._functional.initial({name: np.asarray(leaf) for name, leaf in leaves.items()})
        learned, ranges = jax.tree.map(jnp.asarray, (arrays.learned, arrays.ranges))
        if sys.modules.get("flax") is not None:
            _register_with_flax()
        others = {name: leaf for name, leaf in leaves.items() if name not in self._model.trained}
        return {"model": self._model.tree(leaves), "range_parameters": learned}, State(others, ranges)

    def apply(
        self, params: Params, state: State, *args: Any, train: bool = False, key: Any = None, **kwargs: Any
    ) -> tuple[Any, State]:
        """What the model gives for a batch, and the next state.

        Args:
            params, state: as `init` gives them.
            args, kwargs: the model's own; any number of examples.
            train: batch norm uses the batch's statistics and moves the running ones, ranges follow the data, dropout
                drops. Otherwise the state stays as it is.
            key: a `jax.random` key, for networks with dropout in training.

        Raises:
            ValueError: a learned range was not calibrated, or there is no key for dropout.
            TypeError: the arguments nest otherwise than the example's.
        """
        mode = Mode(training=train, frozen=_checked_state(state).frozen)
        outputs, _, new = self._run(params, state, args, kwargs, mode, key)
        return outputs, new

    def calibrate(
        self, params: Params, state: State, batches: Iterable[Any], restart: bool = False
    ) -> tuple[Params, State]:
        """Sets all activation ranges from data, by the float network in evaluation.

        Args:
            batches: each an array, or a tuple of positional or a dictionary of keyword arguments. A loader of
                ``(x, y)`` will do for a model that takes one argument: `y` is left out.
            restart: forget what ranges have seen in training or calibration; otherwise that counts as earlier batches.
                Ranges that are learned begin again, too.

        Raises:
            ValueError: the state is frozen, there is no batch, or one gives values that are not finite.
            TypeError: batches is one array, or one of them is not what the model takes.
        """
        batches = loading.checked(batches, isinstance(batches, jax.Array | np.ndarray))
        if _checked_state(state).frozen:
            raise ValueError("calibrate before freeze: the ranges of a frozen network are fixed")
        if restart:
            grids = self._functional.grids
            forgotten = {
                name: ends
                if grids[name].rule.ranges == "fixed"
                else {end: each if end == "trained" else jnp.zeros_like(each) for end, each in ends.items()}
                for name, ends in state.ranges.items()
            }
            state = replace(state, ranges=forgotten)
        mode = Mode(quantizing=False, observing=True)
        observe = jax.jit(lambda params, state, args, kwargs: self._run(params, state, args, kwargs, mode)[1:])
        _require_values("calibrate", params, state)

        def see(batch: Any) -> None:
            nonlocal params, state
            args, kwargs = loading.arguments(batch, loading.places(self._model.signature, _FLAGS))
            try:
                self.plan.network.input_tree.flatten(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{error}; {loading.ALONE}") from None
            params, state = observe(params, state, args, kwargs)
            _require_values("calibrate", state)

        loading.show(batches, see, lambda: self._functional.batches_seen(state.ranges))
        return params, replace(state, calibrated=True)

    def freeze(self, params: Params, state: State) -> tuple[Params, State]:
        """Starts the last phase of training: statistics and ranges are fixed, biases are on the int32 grid.

        From here on the network computes the device's integers, in training and in evaluation (of the `device` given
        to `prepare`); weights, gamma, beta and biases may still be trained.

        Warns (`exactqat.qat.UnsettledStatisticsWarning`) of batch norms whose running statistics have seen too few
        training batches, and (`exactqat.qat.RangesMovedWarning`) where it had to move ranges, learned ones too, because
        the device's operators cannot take them beside one another.

        Args:
            params, state: as `init` gives them.

        Raises:
            ValueError: a range or a batch norm's statistics are not finite.
            RuntimeError: ranges have seen no data.
            TypeError: it is called within `jax.jit`, `jax.grad` or `jax.vmap`.
        """
        _require_values("freeze", params, state)
        learned, tensors = params["range_parameters"], self._tensors(params, _checked_state(state))
        tensors = {name: np.asarray(_float32(leaf)) for name, leaf in tensors.items()}
        self._functional.require_finite_state(state.ranges, learned, tensors)
        self._functional.require_data(state.ranges)
        moved = self._functional.frozen_ranges(state.ranges, learned, tensors)
        ranges, learned = jax.tree.map(jnp.asarray, moved)
        return {**params, "range_parameters": learned}, replace(state, ranges=ranges, frozen=True)

    def variables(self, params: Params, state: State) -> Any:
        """What `prepare` was given, with the trained values: a tree of parameters, Linen's variables, an NNX module."""
        return self._model.restore(self._tensors(params, state))

    def trained(self, params: Params, state: State) -> TrainedNetwork:
        """The network with its numbers, for `exactqat.deploy.lower` and its companions."""
        _require_values("lower", params, state)
        arrays = self._arrays(params, state)
        in_numpy = jax.tree.map(np.asarray, (arrays.tensors, arrays.learned, arrays.ranges))

        def run(inputs: tuple[Any, ...], quantizing: bool) -> dict[str, np.ndarray]:
            mode = Mode(frozen=state.frozen, quantizing=quantizing)
            seen: dict[str, Any] = {}
            self._run(params, state, inputs, {}, mode, seen=seen)
            return {path: np.asarray(value) for path, value in seen.items()}

        def called(batch: Any) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
            args, kwargs = loading.arguments(batch)
            seen: dict[str, Any] = {}
            self._run(params, state, args, kwargs, Mode(frozen=state.frozen), seen=seen)
            given = self.plan.network.input_tree.flatten(*args, **kwargs)
            inputs = [
                np.asarray(each, np.int32 if wanted.rows else np.float32)
                for each, wanted in zip(given, self.plan.inputs, strict=True)
            ]
            return inputs, {name: np.asarray(seen[name]) for name in seen}

        return TrainedNetwork(self._functional, Arrays(*in_numpy), state.frozen, run, called)

    def take_over(
        self,
        params: Params,
        state: State,
        tensors: Mapping[str, np.ndarray],
        ranges: Mapping[str, tuple[float, float]],
    ) -> tuple[Params, State]:
        """Parameters and state with other arrays, by the user's names, and other ranges of grids, by theirs.

        Raises:
            ValueError: the state is frozen, or there is no such array.
        """
        if _checked_state(state).frozen:
            raise ValueError("a frozen network takes over no ranges: do it before freeze")
        leaves = dict(self._model.names_of_tree(params["model"]))
        variables = dict(state.variables)
        learned = {name: dict(ends) for name, ends in params["range_parameters"].items()}
        moved = {name: dict(ends) for name, ends in state.ranges.items()}
        for name, value in tensors.items():
            if name not in leaves and name not in variables:
                raise ValueError(f"the network has no array {name!r}")
            (leaves if name in leaves else variables)[name] = jnp.asarray(value)
        for name, ends in ranges.items():
            for end, number in zip(("minimum", "maximum"), ends, strict=True):
                (learned if end in learned.get(name, {}) else moved)[name][end] = jnp.asarray(number, jnp.float32)
        changed = {"model": self._model.tree(leaves), "range_parameters": learned}
        return {**params, **changed}, replace(state, variables=variables, ranges=moved)

    def lower(self, params: Params, state: State) -> Graph:
        """The integer graph of a frozen network, for `exactqat.deploy`.

        Raises:
            ValueError: the state is not frozen, a layer does not fit the device's integers, or a range or weight is not
                finite.
            RuntimeError: a range has seen no data.
        """
        from ...deploy.lower import lower

        if not _checked_state(state).frozen:
            raise ValueError("the state must be frozen before it is lowered: call freeze and train its last phase")
        return lower(self.trained(params, state))

    def __repr__(self) -> str:
        count, layers = len(self._functional.stored_paths()), len(self._functional.weight_owner)
        return f"Prepared({count} stored tensors, {layers} layers with weights{self.plan.precisions()})"

    def _repr_html_(self) -> str:
        return table(repr(self), ROW_HEADER, [row.cells() for row in self.plan.rows()], 4)

    # --- how trees and arrays by name belong together ---------------------------------------------------------------

    def _tensors(self, params: Params, state: State) -> dict[str, Any]:
        try:
            return {**state.variables, **self._model.names_of_tree(params["model"])}
        except (KeyError, TypeError) as error:
            raise TypeError(
                "params must be what init gives, a dictionary of 'model' and 'range_parameters', got "
                f"{type(params).__name__}"
            ) from error

    def _arrays(self, params: Params, state: State) -> Arrays:
        tensors = {name: _float32(leaf) for name, leaf in self._tensors(params, state).items()}
        return Arrays(tensors, params["range_parameters"], state.ranges)

    def _run(
        self,
        params: Params,
        state: State,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        mode: Mode,
        key: Any = None,
        seen: dict[str, Any] | None = None,
    ) -> tuple[Any, Params, State]:
        functional, arrays = self._functional, self._arrays(params, state)
        tree = self.plan.network.input_tree
        inputs = [
            _checked(each, given) for each, given in zip(tree.flatten(*args, **kwargs), self.plan.inputs, strict=True)
        ]
        if mode.quantizing and not state.calibrated and functional.needs_calibration:
            first = functional.needs_calibration[0]
            raise ValueError(f"the range of '{first}' is set from data before training: call calibrate first")
        if mode.quantizing and not mode.training:
            self._need_data(arrays)
        if mode.training and functional.random_steps and key is None:
            raise ValueError(f"'{functional.random_steps[0]}' drops values in training: give key=jax.random.key(...)")

        def draw(number: int) -> Any:
            return jax.random.fold_in(key, number)

        outputs, new = functional.run(arrays, inputs, mode, draw, seen)
        variables = {name: new.tensors[name] for name in state.variables}
        trained = {"model": params["model"], "range_parameters": new.learned}
        if not (mode.training or mode.observing):
            return tree.unflatten(outputs), trained, state
        return tree.unflatten(outputs), trained, replace(state, variables=variables, ranges=new.ranges)

    def _need_data(self, arrays: Arrays) -> None:
        """Ranges whose counts are known here, outside of a traced function, must have seen something."""
        for name, grid in self._functional.grids.items():
            batches = arrays.ranges[name]["batches"]
            if grid.rule.ranges != "fixed" and not isinstance(batches, jax.core.Tracer) and int(batches) == 0:
                require_data([name])


def prepare(
    model: Any,
    *given: Any,
    example: Any = None,
    rules: Iterable[Rule] = (Rule(),),
    device: str | None = DEFAULT_PROFILE,
    deployable: bool = True,
    keep_final_activation: bool | None = None,
    check: bool = True,
) -> Prepared:
    """A model that trains under the device's arithmetic, in float32.

        prepare(apply, params, example)             # a function apply(params, x)
        prepare(linen_module, variables, example)   # what its init gave
        prepare(nnx_module, example)

    Args:
        model: a pure function of (params, *arguments), as in evaluation; or a module of Flax. Flags that tell training
            from evaluation (`train`, `training`, `is_train`, `is_training`, `deterministic`, `use_running_average`,
            `eval_mode`, `is_eval`, `inference`, `is_inference`) are set to evaluation where the example gives none,
            among the arguments of functions and of modules' methods and among the fields of a Linen module; so are
            `mode` and `phase` whose default is a word such as "train" or "eval". Batch norms and dropouts train
            nevertheless. A function says by `batch_norm` and `dropout` of this file where it has
            such layers.
        given: parameters (not for NNX), the example and, if need be, the rules.
        example: a batch as the model gets it: an array, or a tuple of positional or a dictionary of keyword arguments.
            Its values do not matter, nor does the number of examples. What is no array keeps its value.
        rules: settings by the paths of layers, which are those of their parameters; see `Rule`. The first match
            decides. The input is called ``"input"``.
        deployable: refuse rules that the device cannot run.
        device: whose integers the network computes once it is frozen, by the names of `deploy.PROFILES`. They are made
            on the host: on CPUs by a custom call, elsewhere by callbacks. None: it stays fake quantization, which
            rounds sums otherwise (up to some percent of a deep network's codes) and needs no host, on an accelerator
            for instance or for `jax.export`.
        keep_final_activation: whether a softmax, log-softmax, sigmoid or argmax that is the model's last step is a part
            of the device's network: then the file returns what the model does, in the device's integers (a softmax in
            steps of 1/256). If not, the model trains and predicts with it, and the file returns what it is computed
            from (logits). None: not, and a FinalActivationWarning says so.
        check: run the model beside the prepared one, quantization and randomness off, and compare results, gradients
            and statistics, in evaluation and, where the model is known in training, there, with several numbers of
            examples. `Prepared.proof` holds what was compared. Turn it off to save a few compilations and runs, for a
            model that has passed before.

    Raises:
        UnsupportedOperator: lists every operator the device cannot run, with its place and what to do; or the network
            that would be trained is not the model, with what differs first and by how much.
        ValueError: no rule matches a layer, or a rule cannot be deployed.
        TypeError: an argument is missing or of another kind.
    """
    if isinstance(model, Prepared):
        raise ValueError("model is prepared already: give the one that prepare was given")
    is_nnx, is_linen = _is_nnx(model), _is_linen(model)
    if not callable(model) or framework_of(model) in ("torch", "keras"):
        raise TypeError(
            f"model must be a function or a module of Flax, got {type(model).__name__}{elsewhere(model, 'jax')}"
        )
    words = ["example", "rules"] if is_nnx else ["variables", "example", "rules"]
    named = dict(zip(words, given, strict=False))
    if len(given) > len(words) or (example is not None and "example" in named):
        raise TypeError(f"prepare takes the model, {', '.join(words)}; got {len(given)} arguments after the model")
    example = named.get("example", example)
    if example is None or (not is_nnx and "variables" not in named):
        missing = "example" if example is None else "variables"
        raise TypeError(f"prepare needs {' and '.join(words[:-1])} after the model; {missing} is missing")
    rules = checked_rules(named.get("rules", rules))
    args, kwargs = loading.arguments(example)
    if is_nnx:
        known = _nnx_model(model)
    elif is_linen:
        known = _linen_model(model, named["variables"], args, kwargs)
    else:
        known = _function_model(model, named["variables"], args, kwargs)
    try:
        with at_work("prepare reads the model"):
            network = capture(
                known.function,
                known.leaves,
                args,
                kwargs,
                names=known.names,
                trainable=known.trained.__contains__,
                signature=known.signature,
                in_training=_in_training(known) if known.trains else None,
            )
    except CaptureError as error:
        raise UnsupportedOperator(str(error)) from error
    norms = [step for step in network.steps if "training" in step.attributes]
    if known.words and norms and not any(step.attributes["training"] for step in norms):
        raise UnsupportedOperator(
            f"{norms[0].place}: {norms[0].label} does not train with {known.words} either, which is taken for "
            "training: name the argument train, training, deterministic or use_running_average, and give truth values"
        )
    network = with_examples(network, network.input_tree.flatten(*args, **dict(kwargs or {})))
    planned = plan(network, rules, deployable, keep_final_activation)
    warn_of_plan(planned, keep_final_activation)
    functional = Functional(planned, primitives_jax, device)
    if not (is_nnx or is_linen):
        # Only now it is known which of its leaves are statistics, and whether it has layers that train by themselves,
        # which it does not do alone.
        statistics, decays = frozenset(functional.statistics), functional.decays
        known = _function_model(model, named["variables"], args, kwargs, statistics, decays)
        known = replace(known, trains=known.trains and not (functional.statistics or functional.random_steps))
    prepared = Prepared(known, functional)
    if check:
        from .proof import compare_with_original

        with at_work("prepare compares what it made with the model"):
            prepared.proof = accept(compare_with_original(known, prepared, args, kwargs))
    return prepared


def _in_training(known: _Model) -> Callable[..., Any]:
    """The model's function as in training; refuses what training changes but the statistics of batch norms."""

    def function(leaves: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        results, after = known.run(leaves, args, kwargs, True, jax.random.key(0))
        changed = [
            name
            for name, leaf in zip(known.names, leaves, strict=True)
            if after[name] is not leaf and not jnp.issubdtype(after[name].dtype, jnp.unsignedinteger)
        ]
        if changed and SAFEGUARDS.training:
            raise CaptureError(
                f"in training the model changes '{changed[0]}' by itself; of what is not trained only the statistics "
                "of batch norms (Flax's, of one axis of features, or exactqat.qat.jax.batch_norm) follow training: "
                "keep it outside of the model"
            )
        return results

    return function


def batch_norm(
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.99,
    axis: int = -1,
) -> Any:
    """Batch norm of a plain function: in evaluation here, in training on the batch's statistics once it is prepared.

    Args:
        x: any shape, channels along `axis`.
        scale, bias: [channels], or None.
        mean, variance: [channels], leaves of the parameters. Prepared, they are part of the state and follow training.
        epsilon: added to the variance.
        momentum: as in Flax: how much of the running statistics stays at each batch.
    """
    if capturing():
        return _captured_batch_norm(x, scale, bias, mean, variance, epsilon, momentum, axis)
    shape = [-1 if at == axis % x.ndim else 1 for at in range(x.ndim)]
    factor = jax.lax.rsqrt(variance + epsilon) * (1.0 if scale is None else scale)
    y = (x - mean.reshape(shape)) * factor.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def dropout(x: Any, rate: float, broadcast_axes: Sequence[int] = ()) -> Any:
    """Dropout of a plain function: nothing here; prepared, training drops values with a probability.

    Args:
        rate: in [0, 1).
        broadcast_axes: along which a value is kept or dropped as a whole.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"rate must be at least 0 and below 1, got {rate!r}")
    if not capturing() or rate == 0:
        return x
    return layer("dropout", x, rate=float(rate), kept_axes=tuple(axis % x.ndim for axis in broadcast_axes))


# --- the kinds of models ----------------------------------------------------------------------------------------------

# Arguments that tell training from evaluation, and what they are in evaluation.
_FLAGS = {
    **dict.fromkeys(("train", "training", "is_train", "is_training"), False),
    **dict.fromkeys(
        ("deterministic", "use_running_average", "eval_mode", "is_eval", "inference", "is_inference"), True
    ),
}
# Arguments that tell it by a word, and the words; the first of each where the default is the other.
_PHASES = ("mode", "phase")
_TRAINING = ("train", "training")
_EVALUATION = ("eval", "evaluation", "test", "inference", "predict")


def _is_linen(model: Any) -> bool:
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(model, linen.Module)


def takes_variables(model: Any) -> bool:
    """Whether its parameters are outside of it, and `prepare` needs them: a function, or a Linen module."""
    return not _is_nnx(model) and not isinstance(model, Prepared)


def _is_nnx(model: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(model, nnx.Module)


def _flag(name: str, value: Any) -> tuple[Any, Any] | None:
    """What an argument or a field of that default is in evaluation and in training; None if it tells neither."""
    if name in _FLAGS:
        return _FLAGS[name], not _FLAGS[name]
    if name in _PHASES and isinstance(value, str) and value in _TRAINING + _EVALUATION:
        return (_EVALUATION[0], value) if value in _TRAINING else (value, _TRAINING[0])
    return None


def _unused_flags(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Flags that a call does not give, in evaluation and in training."""
    given = set(list(signature.parameters)[: len(args)]) | set(kwargs)
    found = {name: _flag(name, each.default) for name, each in signature.parameters.items() if name not in given}
    return {name: each for name, each in found.items() if each is not None}


def _in_mode(flags: Mapping[str, tuple[Any, Any]], training: bool) -> dict[str, Any]:
    return {name: each[training] for name, each in flags.items()}


def _words(flags: Mapping[str, tuple[Any, Any]]) -> str:
    """Flags that are words, as in training, for messages."""
    return ", ".join(f"{name}={each[1]!r}" for name, each in flags.items() if isinstance(each[1], str))


def _function_model(
    function: Callable[..., Any],
    params: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    statistics: frozenset[str] = frozenset(),
    decays: Mapping[str, float] | None = None,
) -> _Model:
    """
    Args:
        statistics: leaves that training moves without gradients.
        decays: of moving averages; see `MovingAverages`.
    """
    found = named_leaves(params)
    definition = jax.tree.structure(params)
    if not found:
        raise TypeError("variables must be a tree of arrays, got one without a leaf")
    averages = MovingAverages(found, decays or {})
    names, leaves_seen = averages.names, [averages.seen(name) for name in averages.names]
    statistics |= _statistics(params) | averages.averages
    trained = frozenset(
        name
        for name, leaf in zip(names, leaves_seen, strict=True)
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) and name not in statistics
    )

    def tree(leaves: Mapping[str, Any]) -> Any:
        return jax.tree.unflatten(definition, [leaves[name] if name in trained else None for name, _ in found])

    def names_of_tree(tree: Any) -> dict[str, Any]:
        return {name: leaf for name, leaf in named_leaves(tree) if name in trained}

    def restore(leaves: Mapping[str, Any]) -> Any:
        return jax.tree.unflatten(definition, averages.tree_leaves(leaves))

    def given(leaves: Sequence[Any]) -> Any:
        # Where layers tell what they are, averages are vectors, as they are trained.
        shaped = not capturing()
        return jax.tree.unflatten(definition, averages.tree_leaves(dict(zip(names, leaves, strict=True)), shaped))

    signature = _without_first(function)
    flags = {} if signature is None else _unused_flags(signature, args, kwargs)

    def call(leaves: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        return function(given(leaves), *args, **_in_mode(flags, False), **kwargs)

    def run(
        leaves: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any], training: bool, key: Any
    ) -> tuple[Any, dict[str, Any]]:
        return function(given(leaves), *args, **_in_mode(flags, training), **kwargs), dict(
            zip(names, leaves, strict=True)
        )

    return _Model(
        call, names, leaves_seen, trained, tree, names_of_tree, restore, run, bool(flags), signature, _words(flags)
    )


def _statistics(params: Any) -> frozenset[str]:
    """Leaves that Flax keeps apart from the trained ones, for functions that get Linen's variables."""
    if not isinstance(params, Mapping) or "params" not in params:
        return frozenset()
    return frozenset(name for name, _ in named_leaves(params) if not name.startswith("params."))


def _without_first(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _flags_of_fields(module: Any) -> dict[str, tuple[Any, Any]]:
    """Flags that a Linen module of the user's own was made with (``train: bool = False``), in evaluation and in
    training."""
    if type(module).__module__.partition(".")[0] == "flax":
        return {}
    fields = type(module).__dataclass_fields__
    held = {name: getattr(module, name) for name in fields}
    found = {name: _flag(name, value) for name, value in held.items() if isinstance(value, bool | str)}
    return {name: each for name, each in found.items() if each is not None}


def _linen_model(module: Any, variables: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Model:
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise TypeError(
            "variables must be what the module's init gave, a dictionary with 'params', got "
            f"{sorted(variables) if isinstance(variables, Mapping) else type(variables).__name__}"
        )
    found = named_leaves(variables)
    definition = jax.tree.structure(variables)
    short = [name.partition(".")[2] for name, _ in found]
    # Without the collection's name, where that is enough to tell them apart.
    names = [
        name if short.count(brief) == 1 and brief else full
        for (full, _), brief, name in zip(found, short, short, strict=True)
    ]
    trained = frozenset(name for name, (full, _) in zip(names, found, strict=True) if full.startswith("params."))
    params_definition = jax.tree.structure(variables["params"])
    params_names = [name for name in names if name in trained]
    signature = inspect.signature(type(module).__call__)
    signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    flags = _unused_flags(signature, args, kwargs)

    fields = _flags_of_fields(module)
    modules = {training: module.clone(**_in_mode(fields, training)) if fields else module for training in (False, True)}

    def call(leaves: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        params = jax.tree.unflatten(definition, list(leaves))
        return modules[False].apply(params, *args, **_in_mode(flags, False), **kwargs)

    full_names = {full: name for (full, _), name in zip(found, names, strict=True)}
    others = [collection for collection in variables if collection != "params"]

    def run(
        leaves: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any], training: bool, key: Any
    ) -> tuple[Any, dict[str, Any]]:
        results, updates = modules[training].apply(
            jax.tree.unflatten(definition, list(leaves)),
            *args,
            **_in_mode(flags, training),
            **kwargs,
            mutable=others if training else [],
            # All other streams of random numbers follow that of the parameters.
            rngs={"params": key, "dropout": jax.random.fold_in(key, 1)},
        )
        changed = {full_names[full]: leaf for full, leaf in named_leaves(dict(updates)) if full in full_names}
        return results, {**dict(zip(names, leaves, strict=True)), **changed}

    def tree(leaves: Mapping[str, Any]) -> Any:
        return jax.tree.unflatten(params_definition, [leaves[name] for name in params_names])

    def names_of_tree(tree: Any) -> dict[str, Any]:
        return dict(zip(params_names, jax.tree.leaves(tree), strict=True))

    def restore(leaves: Mapping[str, Any]) -> Any:
        return jax.tree.unflatten(definition, [leaves[name] for name in names])

    leaves = [leaf for _, leaf in found]
    trains = bool(flags or fields or others)
    words = _words({**flags, **fields})
    return _Model(call, names, leaves, trained, tree, names_of_tree, restore, run, trains, signature, words)


def _nnx_model(module: Any) -> _Model:
    from flax import nnx

    parts: Any = nnx.split(module, nnx.Param, ...)
    definition, params, others = parts
    flat_params, flat_others = (dict(nnx.to_flat_state(state)) for state in (params, others))
    flat = {".".join(map(str, path)): held[...] for path, held in {**flat_params, **flat_others}.items()}
    # Keys and counters of random numbers are no numbers of the network.
    numbers = {
        name: leaf for name, leaf in flat.items() if not jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
    }
    names = list(numbers)
    trained = frozenset(".".join(map(str, path)) for path in flat_params)
    structure = nnx.to_pure_dict(params)
    structure_names = [name for name, _ in named_leaves(structure)]
    tree_definition = jax.tree.structure(structure)

    def restore(leaves: Mapping[str, Any]) -> Any:
        state = nnx.from_flat_state(
            {
                path: held.replace(leaves.get(".".join(map(str, path)), held[...]))
                for path, held in {**flat_params, **flat_others}.items()
            }
        )
        return nnx.merge(definition, state)

    signature = inspect.signature(type(module).__call__)
    signature = signature.replace(parameters=list(signature.parameters.values())[1:])

    def numbers_of(made: Any) -> dict[str, Any]:
        """Attributes that are plain numbers or words, by their paths."""
        return {
            ".".join(map(str, (*path, name))): value
            for path, each in nnx.iter_modules(made)
            for name, value in vars(each).items()
            if isinstance(value, int | float | str)
        }

    def run(
        leaves: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any], training: bool, key: Any
    ) -> tuple[Any, dict[str, Any]]:
        made = restore(dict(zip(names, leaves, strict=True)))
        made.train() if training else made.eval()
        before = numbers_of(made)
        results = made(*args, **_in_mode(_unused_flags(signature, args, kwargs), training), **kwargs)
        if changed := [name for name, value in numbers_of(made).items() if before.get(name, value) != value]:
            raise CaptureError(
                f"the model changes its attribute '{changed[0]}' when it is called; the device computes the same at "
                "every call: keep it outside of the model"
            )
        after = {".".join(map(str, path)): held[...] for path, held in nnx.to_flat_state(nnx.state(made))}
        return results, {name: after[name] for name in names}

    def call(leaves: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        return run(leaves, args, kwargs, False, None)[0]

    def tree(leaves: Mapping[str, Any]) -> Any:
        return jax.tree.unflatten(tree_definition, [leaves[name] for name in structure_names])

    def names_of_tree(tree: Any) -> dict[str, Any]:
        return dict(zip(structure_names, jax.tree.leaves(tree), strict=True))

    words = _words(_unused_flags(signature, (), {}))
    return _Model(
        call, names, list(numbers.values()), trained, tree, names_of_tree, restore, run, True, signature, words
    )


def _checked_state(state: Any) -> State:
    if not isinstance(state, State):
        raise TypeError(f"state must be the State that init gives, got {type(state).__name__}")
    return state


def _require_values(method: str, *trees: Any) -> None:
    """Raises TypeError within `jit`, `grad` or `vmap`, where arrays have no values yet."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees)):
        raise TypeError(
            f"{method} reads the values of params, state and data, which they do not have within jax.jit, jax.grad or "
            "jax.vmap: call it outside; only apply can be transformed"
        )


def _float32(leaf: Any) -> Any:
    array = jnp.asarray(leaf)
    return array.astype(jnp.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _checked(x: Any, given: Any) -> Any:
    """An input in float32, of the shape that the network was captured for."""
    array = _float32(x)
    require_input(given, tuple(array.shape), array.dtype, jnp.issubdtype(array.dtype, jnp.floating))
    if not given.rows:
        return array.astype(jnp.float32)
    if array.size and not isinstance(array, jax.core.Tracer):
        require_rows(given, int(array.min()), int(array.max()))
    return array
