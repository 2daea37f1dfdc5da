# SPDX-License-Identifier: Apache-2.0
"""The user's model as a function of a tree of arrays: a plain function, a Flax Linen or an NNX module."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from ...capture.core.refusals import CaptureError
from ...capture.jax.model import named_leaves

if TYPE_CHECKING:
    from flax import linen, nnx

# Arguments that switch between training and evaluation, and their values in evaluation.
FLAGS = {
    **dict.fromkeys(("train", "training", "is_train", "is_training"), False),
    **dict.fromkeys(
        ("deterministic", "use_running_average", "eval_mode", "is_eval", "inference", "is_inference"), True
    ),
}
# Arguments that switch with a string, and the strings; the first of each is set if the default is the other.
_PHASES = ("mode", "phase")
_TRAINING = ("train", "training")
_EVALUATION = ("eval", "evaluation", "test", "inference", "predict")

# A tree of arrays, nested as a user likes.
Tree = Any
Args = Sequence[Tree]
Kwargs = Mapping[str, Tree]
Leaves = Mapping[str, Array]
# By name, the values of an argument or a field in evaluation and in training.
Flags = dict[str, tuple[bool | str, bool | str]]


class Run(Protocol):
    """The user's model itself: its results, and all leaves after the call. key: None in evaluation that draws
    nothing."""

    def __call__(
        self, leaves: Leaves, args: Args, kwargs: Kwargs, training: bool, key: Array | None, /
    ) -> tuple[Tree, dict[str, Array]]: ...


@dataclass(frozen=True)
class UserModel:
    """A user's model as a function of a tree, and the way back.

    Attributes:
        leaves: by name.
        trained: names of those that are trained, in the order of their tree.
        structure: of the user's tree of trained leaves.
        restore: what the user passed, with other values by name.
        trains: whether `run` distinguishes training from evaluation.
        words: arguments that select training with a string, such as "mode='train'".
    """

    leaves: Leaves
    trained: tuple[str, ...]
    structure: jax.tree_util.PyTreeDef
    restore: Callable[[Leaves], Tree]
    run: Run
    trains: bool = False
    signature: inspect.Signature | None = None
    words: str = ""

    def function(self, leaves: Sequence[Array], *args: Tree, **kwargs: Tree) -> Tree:
        """What the model returns in evaluation. leaves: in the order of `leaves`."""
        return self.run(dict(zip(self.leaves, leaves, strict=True)), args, kwargs, False, None)[0]

    def in_training(self, leaves: Sequence[Array], *args: Tree, **kwargs: Tree) -> Tree:
        """As `function`, in training."""
        return self.run(dict(zip(self.leaves, leaves, strict=True)), args, kwargs, True, jax.random.key(0))[0]

    def tree(self, leaves: Leaves) -> Tree:
        """The user's tree of trained leaves, from all leaves by name."""
        return jax.tree.unflatten(self.structure, [leaves[name] for name in self.trained])


def is_linen(model: object) -> bool:
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(model, linen.Module)


def is_nnx(model: object) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(model, nnx.Module)


def _flags_of(defaults: Mapping[str, object]) -> Flags:
    """Those of some arguments or fields, by their defaults, that select training or evaluation."""
    flags: Flags = {name: (FLAGS[name], not FLAGS[name]) for name in defaults if name in FLAGS}
    for name in _PHASES:
        word = defaults.get(name)
        if isinstance(word, str) and word in _TRAINING:
            flags[name] = _EVALUATION[0], word
        elif isinstance(word, str) and word in _EVALUATION:
            flags[name] = word, _TRAINING[0]
    return flags


def _unused_flags(signature: inspect.Signature | None, args: Args, kwargs: Kwargs) -> Flags:
    """Flags that a call does not pass."""
    parameters = {} if signature is None else signature.parameters
    passed = {*list(parameters)[: len(args)], *kwargs}
    return _flags_of({name: parameter.default for name, parameter in parameters.items() if name not in passed})


def _in_mode(flags: Flags, training: bool) -> dict[str, Any]:
    return {name: values[training] for name, values in flags.items()}


def _words(flags: Flags) -> str:
    """Flags that are strings, as in training, for messages."""
    return ", ".join(f"{name}={values[1]!r}" for name, values in flags.items() if isinstance(values[1], str))


def function_model(
    function: Callable[..., Tree],
    params: Tree,
    args: Args,
    kwargs: Kwargs,
    statistics: frozenset[str] = frozenset(),
) -> UserModel:
    """
    Args:
        statistics: leaves that training moves without gradients.
    """
    pairs = named_leaves(params)
    definition = jax.tree.structure(params)
    if not pairs:
        raise TypeError("variables must be a tree of arrays, got one without a leaf")
    leaves = dict(pairs)
    statistics |= _statistics(params)
    real = [name for name, leaf in leaves.items() if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]
    trained = tuple(name for name in real if name not in statistics)
    structure = jax.tree.structure(
        jax.tree.unflatten(definition, [leaf if name in trained else None for name, leaf in pairs])
    )
    signature = _without_first(function)
    flags = _unused_flags(signature, args, kwargs)

    def restore(leaves: Leaves) -> Tree:
        return jax.tree.unflatten(definition, [leaves[name] for name, _ in pairs])

    def run(
        leaves: Leaves, args: Args, kwargs: Kwargs, training: bool, key: Array | None
    ) -> tuple[Tree, dict[str, Array]]:
        return function(restore(leaves), *args, **_in_mode(flags, training), **kwargs), dict(leaves)

    return UserModel(leaves, trained, structure, restore, run, bool(flags), signature, _words(flags))


def _statistics(params: Tree) -> frozenset[str]:
    """Leaves that Flax keeps apart from the trained ones, for functions that take Linen's variables."""
    if not isinstance(params, Mapping) or "params" not in params:
        return frozenset()
    return frozenset(name for name, _ in named_leaves(params) if not name.startswith("params."))


def _without_first(function: Callable[..., Tree]) -> inspect.Signature | None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def linen_model(module: linen.Module, variables: Tree, args: Args, kwargs: Kwargs) -> UserModel:
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise TypeError(
            "variables must be what the module's init gave, a dictionary with 'params', got "
            f"{sorted(variables) if isinstance(variables, Mapping) else type(variables).__name__}"
        )
    pairs = named_leaves(variables)
    definition = jax.tree.structure(variables)
    short = [name.partition(".")[2] for name, _ in pairs]
    # Without the collection's name, if names stay distinct.
    names = [
        name if short.count(brief) == 1 and brief else full
        for (full, _), brief, name in zip(pairs, short, short, strict=True)
    ]
    full_names = {full: name for (full, _), name in zip(pairs, names, strict=True)}
    trained = tuple(name for full, name in full_names.items() if full.startswith("params."))
    signature = _without_first(type(module).__call__)
    flags = _unused_flags(signature, args, kwargs)
    # Those that a user's module was made with (``train: bool = False``).
    held = {} if type(module).__module__.partition(".")[0] == "flax" else type(module).__dataclass_fields__
    fields = _flags_of({name: getattr(module, name) for name in held if isinstance(getattr(module, name), bool | str)})
    modules = {training: module.clone(**_in_mode(fields, training)) if fields else module for training in (False, True)}
    others = [collection for collection in variables if collection != "params"]

    def restore(leaves: Leaves) -> Tree:
        return jax.tree.unflatten(definition, [leaves[name] for name in names])

    def run(
        leaves: Leaves, args: Args, kwargs: Kwargs, training: bool, key: Array | None
    ) -> tuple[Tree, dict[str, Array]]:
        results, updates = modules[training].apply(
            restore(leaves),
            *args,
            **_in_mode(flags, training),
            **kwargs,
            mutable=others if training else [],
            # All other streams of random numbers are derived from that of the parameters.
            rngs=None if key is None else {"params": key, "dropout": jax.random.fold_in(key, 1)},
        )
        changed = {full_names[full]: leaf for full, leaf in named_leaves(dict(updates)) if full in full_names}
        return results, {**leaves, **changed}

    leaves = {name: leaf for name, (_, leaf) in zip(names, pairs, strict=True)}
    trains, words = bool(flags or fields or others), _words({**flags, **fields})
    return UserModel(leaves, trained, jax.tree.structure(variables["params"]), restore, run, trains, signature, words)


def nnx_model(module: nnx.Module) -> UserModel:
    from flax import nnx

    parts: Any = nnx.split(module, nnx.Param, ...)
    definition, params, others = parts
    flat_params, flat_others = (dict(nnx.to_flat_state(state)) for state in (params, others))
    paths = {".".join(map(str, path)): path for path in (*flat_params, *flat_others)}
    held = {name: {**flat_params, **flat_others}[path] for name, path in paths.items()}
    # Random keys and counters are not numbers of the network.
    leaves = {
        name: variable[...]
        for name, variable in held.items()
        if not jnp.issubdtype(jnp.result_type(variable[...]), jax.dtypes.prng_key)
    }
    structure = nnx.to_pure_dict(params)
    signature = _without_first(type(module).__call__)

    def restore(leaves: Leaves) -> nnx.Module:
        values = {paths[name]: variable.replace(leaves.get(name, variable[...])) for name, variable in held.items()}
        return nnx.merge(definition, nnx.from_flat_state(values))

    def numbers_of(model: nnx.Module) -> dict[str, int | float | str]:
        """Attributes that are plain numbers or strings, by their paths."""
        return {
            ".".join(map(str, (*path, name))): value
            for path, part in nnx.iter_modules(model)
            for name, value in vars(part).items()
            if isinstance(value, int | float | str)
        }

    def run(
        leaves: Leaves, args: Args, kwargs: Kwargs, training: bool, key: Array | None
    ) -> tuple[Tree, dict[str, Array]]:
        model = restore(leaves)
        model.train() if training else model.eval()
        before = numbers_of(model)
        results = model(*args, **_in_mode(_unused_flags(signature, args, kwargs), training), **kwargs)
        if changed := [name for name, value in numbers_of(model).items() if before.get(name, value) != value]:
            raise CaptureError(
                f"the model changes its attribute '{changed[0]}' when it is called; the device computes the same at "
                "every call: keep it outside of the model"
            )
        after = {".".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(nnx.state(model))}
        return results, {name: after[name] for name in leaves}

    trained = tuple(name for name, _ in named_leaves(structure))
    tree = jax.tree.structure(structure)
    return UserModel(leaves, trained, tree, restore, run, True, signature, _words(_unused_flags(signature, (), {})))
