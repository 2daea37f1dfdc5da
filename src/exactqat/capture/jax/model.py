# SPDX-License-Identifier: Apache-2.0
"""A function of JAX arrays as a `Network`: `capture` reads its jaxpr.

The function is traced with a large prime for the batch, so that every size that follows the batch is a multiple of that
prime and nothing else is; the network's shapes are for one example. A second trace, with another (and even) number of
examples, shows numbers that follow the batch and numbers of the user's own that look like it. What depends on the
parameters alone stays opaque: such a constant is computed by JAX from the parameters at every step.

It is traced as in evaluation. Batch norms and dropouts tell what they are (`layers`), so they train all
the same.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...planning.files import short_names
from ...planning.inputs import misfit_of_example, with_own_sizes
from ...planning.network import Network
from ..core.builder import Moving
from ..core.naming import input_names, result_name, words_of
from ..core.refusals import CaptureError, first_line
from ..core.safeguards import SAFEGUARDS
from ..core.stand_ins import MULTIPLE, PRIMES, fitting
from ..core.watched import Watch

# Their handlers enter themselves into the converter's table.
from . import elementwise, movement, reduction, weights  # noqa: F401
from .converter import Converter, place_of
from .custom import Traces
from .items import Fixed, Node
from .layers import telling
from .questions import watching
from .sizes import Sizes
from .tidy import Tidying


class Tree:
    """How a function's arguments and results nest."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.definition: Any
        leaves, self.definition = jax.tree.flatten((tuple(args), dict(kwargs)))
        self.arrays = tuple(index for index, leaf in enumerate(leaves) if is_batch(leaf))
        # What the network was captured for: its values are fixed in it.
        self.others = {index: leaf for index, leaf in enumerate(leaves) if index not in self.arrays}
        self.example = [leaves[index] for index in self.arrays]
        self.results: Any = None

    def flatten(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The arrays among a call's arguments, in the order of `Network.inputs`.

        Raises:
            TypeError: the arguments nest otherwise than the example's, or what is no array has another value.
        """
        leaves, definition = jax.tree.flatten((args, kwargs))
        if definition != self.definition:
            raise TypeError(f"the arguments must nest as those of the example did, {self.definition}, got {definition}")
        for index, value in self.others.items():
            if leaves[index] is not value and leaves[index] != value:
                raise TypeError(f"the network was captured for an argument {value!r}, got {leaves[index]!r}")
        return [leaves[index] for index in self.arrays]

    def arguments(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments from its arrays."""
        leaves = dict(zip(self.arrays, arrays, strict=True)) | self.others
        args, kwargs = jax.tree.unflatten(self.definition, [leaves[index] for index in range(len(leaves))])
        return args, kwargs

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """The function's result from the values of `Network.outputs`."""
        return jax.tree.unflatten(self.results, list(outputs))


def is_batch(leaf: Any) -> bool:
    """Whether an argument is an array with a batch."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and len(leaf.shape) > 0


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree of parameters by their paths, as "encoder.layers.0.kernel"."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(".".join(words_of(path)) or "parameter", leaf) for path, leaf in found]


def capture(
    function: Callable[..., Any],
    variables: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    names: Sequence[str] | None = None,
    trainable: Callable[[str], bool] = lambda name: True,
    signature: inspect.Signature | None = None,
    in_training: Callable[..., Any] | None = None,
) -> Network:
    """The network that ``function(variables, *args, **kwargs)`` computes, for a batch of any size.

    Args:
        function: as in evaluation; pure.
        variables: a tree of arrays; its leaves are the network's parameters, by their paths.
        args, kwargs: the arguments. The first axis of every array is the batch; its size does not matter, values are
            not read. What is no array keeps its value.
        names: of the leaves of `variables`, where they are not their paths.
        trainable: whether the parameter of that name is trained.
        signature: of the model, for the names of its inputs.
        in_training: `function` as in training, where that is known.

    Raises:
        CaptureError: the function does not do the same for every input, or has no array among its arguments.
    """
    tree = Tree(args, kwargs or {})
    if not tree.arrays:
        raise CaptureError("example must hold an array with a batch in front")
    leaves, definition = jax.tree.flatten(variables)
    names = [name for name, _ in named_leaves(variables)] if names is None else list(names)
    shapes = {name: tuple(np.shape(leaf)) for name, leaf in zip(names, leaves, strict=True)}
    # Networks are traced in float32, whatever they are in; those that cast by hand may need their own types.
    of_own_types = False

    def parameters_given() -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(shapes[name], jnp.result_type(leaf) if of_own_types else _traced(leaf))
            for name, leaf in zip(names, leaves, strict=True)
        ]

    def batches(examples: int) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct((examples, *each.shape[1:]), each.dtype if of_own_types else _traced(each))
            for each in tree.example
        ]

    def called(function: Callable[..., Any]) -> Callable[..., Any]:
        def traced(leaves: Sequence[Any], arrays: Sequence[Any]) -> Any:
            args, kwargs = tree.arguments(arrays)
            return function(jax.tree.unflatten(definition, leaves), *args, **kwargs)

        return traced

    stand_in = 0

    def trace(examples: int, function: Callable[..., Any] = function) -> tuple[Any, Any]:
        nonlocal stand_in
        stand_in = examples
        with telling():
            return jax.make_jaxpr(called(function), return_shape=True)(parameters_given(), batches(examples))

    numbers = [
        *(size for shape in shapes.values() for size in shape),
        *(s for each in tree.example for s in each.shape),
    ]
    try:
        try:
            prime, jaxpr, results, sizes = _traced_twice(trace, numbers)
        except TypeError:
            of_own_types = True
            prime, jaxpr, results, sizes = _traced_twice(trace, numbers)
    except jax.errors.ConcretizationTypeError as error:
        raise CaptureError(
            f"the model decides by the values of its input; a network that is deployed does the same for every input: "
            f"{first_line(error)}"
        ) from error
    except CaptureError:
        raise
    except Exception as error:
        examples = int(tree.example[0].shape[0])
        text = with_own_sizes(first_line(error), stand_in, examples)
        paths = input_names(_input_paths(tree, signature))
        given_shapes = {path: tuple(each.shape) for path, each in zip(paths, tree.example, strict=True)}

        def takes(changed: Callable[[tuple[int, ...]], tuple[int, ...]]) -> bool:
            arrays = [jax.ShapeDtypeStruct(changed(tuple(each.shape)), _traced(each)) for each in tree.example]
            try:
                jax.eval_shape(called(function), parameters_given(), arrays)
            except Exception:  # noqa: BLE001 - the user's function may raise anything
                return False
            return True

        misfit = misfit_of_example(text, given_shapes, takes)
        if misfit is None:
            raise
        raise CaptureError(misfit) from error
    _refuse_other_sizes(trace, jaxpr, sizes, prime, numbers)
    fixed: Set[int] = frozenset()
    if in_training is not None:
        try:
            trained = trace(prime, in_training)[0]
        except CaptureError:
            raise
        except Exception:  # whatever the model raises: it has no training of its own, which the self-check says
            trained = jaxpr
        fixed = _refuse_training_branches(jaxpr, trained, prime)
        if trained is not jaxpr:
            # Their training may ask for a size that evaluation does not ask for.
            known = Sizes(trained, trained, (prime, prime))
            _refuse_other_sizes(lambda examples: trace(examples, in_training), trained, known, prime, numbers)
    given, inputs = parameters_given(), batches(prime)
    tree.results = jax.tree.structure(results)
    traces = Traces(jaxpr.jaxpr, lambda examples: trace(examples)[0].jaxpr)
    c = Converter(prime, trainable, dict(zip(names, given, strict=True)), traces, sizes, fixed)
    paths = input_names(_input_paths(tree, signature))
    parameters = [
        Fixed(Node(path=name), shapes[name], np.float32 if jnp.issubdtype(each.dtype, jnp.floating) else each.dtype)
        for name, each in zip(names, given, strict=True)
    ]
    values = [c.input(f"argument_{at}", tuple(each.shape), each.dtype) for at, each in enumerate(inputs)]
    try:
        items = c.run(*c.closed(jaxpr), [*parameters, *values])
    except (IndexError, TypeError, ValueError) as error:
        # What replaces something refused may have other axes than what reads it expects.
        refused = next((step for step in c.steps if step.attributes.get("reason")), None)
        if refused is None or isinstance(error, CaptureError):
            raise
        reason = f"{refused.label}: {refused.attributes['reason']}"
        raise CaptureError(f"{refused.place}: {reason}") from error
    outputs = []
    for item in items:
        if isinstance(item, Moving) and item.comparison is not None:
            raise CaptureError("the model returns truth values; return the numbers that they are computed from")
        outputs.append(item.name if isinstance(item, Moving) else c.constant(item))
    steps = Tidying(c, outputs).run()
    return Network(
        tuple(each.name for each in values),
        tuple(outputs),
        c.values,
        c.constants,
        tuple(steps),
        paths,
        tuple(result_name(way) for way, _ in jax.tree_util.tree_flatten_with_path(results)[0]),
        tree,
        tree,
        short_names(_input_paths(tree, signature)),
        channels_first=False,
    )


def _traced_twice(trace: Callable[[int], tuple[Any, Any]], numbers: Sequence[int]) -> tuple[int, Any, Any, Sizes]:
    """(the stand-in for the size of the batch, what is traced with it, the results' shapes, what follows the batch).

    numbers: sizes that do not follow the batch, as far as they are known before.
    """
    free = fitting(PRIMES, numbers)
    second = None
    for prime in free:
        jaxpr, results = trace(prime)
        second = trace(MULTIPLE)[0] if second is None else second
        sizes = Sizes(jaxpr, second, (prime, MULTIPLE))
        if not any(number % prime == 0 for number in sizes.own):
            break
    if sizes.differs and SAFEGUARDS.batch:
        raise CaptureError(
            f"{place_of(sizes.different)}: from here on the model computes otherwise for {prime} examples than for "
            f"{MULTIPLE}; a network computes each example alike, in batches of any size"
        )
    return prime, jaxpr, results, sizes


def _refuse_other_sizes(
    trace: Callable[[int], tuple[Any, Any]], jaxpr: Any, sizes: Sizes, prime: int, own: Sequence[int]
) -> None:
    """Refuses a model that computes otherwise for a number of examples about which it asks.

    Args:
        jaxpr: for `prime` examples.
        sizes: what is known to follow the batch in it, and is refused where it is read.
        own: sizes of the model's own.
    """
    if not SAFEGUARDS.batch:
        return
    watch = Watch(own)

    def watched(examples: int) -> Any:
        """None where the model raises an error: there it computes nothing else."""
        plain = None
        try:
            # What JAX has traced it remembers: with plain numbers first, where these may give something else.
            plain = trace(examples)[0] if watch.strict else None
            with watching(watch, examples):
                found = trace(examples)[0]
            return plain or found
        except Exception as error:  # noqa: BLE001 - whatever the model raises
            watch.read_code(error)
        try:
            return plain or (trace(examples)[0] if watch.handed_out else None)
        except Exception:  # noqa: BLE001 - as above
            return None

    # What JAX remembers of one that it has traced it does not call again.
    watched(next(_UNUSED))
    for asked in watch.to_try((prime, MULTIPLE)):
        other = watched(asked.examples)
        if other is None:
            continue
        found = Sizes(jaxpr, other, (prime, asked.examples))
        if found.differs or found.leaking - sizes.leaking:
            raise CaptureError(
                f"{asked.place}: it asks for the number of examples, and {place_of(found.different)}, the model "
                f"computes otherwise for {asked.examples} than for {prime}; a network computes each example alike, in "
                "batches of any size"
            )


# Numbers of examples with which nothing was traced yet: primes beyond the stand-ins.
_UNUSED = itertools.cycle(n for n in range(5003, 8000, 2) if all(n % d for d in range(3, 90, 2)))


def _refuse_training_branches(evaluated: Any, trained: Any, examples: int) -> Set[int]:
    """Batch norms and dropouts train by themselves, except for those whose ids are returned; all else must be the
    same in training."""
    sizes = Sizes(evaluated, trained, (examples, examples))
    if not SAFEGUARDS.training or not (sizes.differs or sizes.leaking):
        return frozenset() if sizes.differs else sizes.fixed
    at = f"{place_of(sizes.different)}: " if sizes.different is not None else ""
    raise CaptureError(
        f"{at}in training the model computes otherwise than in evaluation. What trains is "
        "captured from evaluation; batch norms and dropouts of Flax or of exactqat.qat.jax are kept, a branch is not: "
        "write it with them, or outside of the model"
    )


def _traced(leaf: Any) -> Any:
    dtype = jnp.result_type(leaf)
    return np.dtype(np.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _input_paths(tree: Tree, signature: inspect.Signature | None) -> list[tuple[str, ...]]:
    """Where each array is among the arguments: the argument's name and the way through its tree."""
    args, kwargs = jax.tree.unflatten(tree.definition, list(range(tree.definition.num_leaves)))
    parameters = [] if signature is None else list(signature.parameters)
    named = {(parameters[at] if at < len(parameters) else f"input_{at}"): each for at, each in enumerate(args)} | dict(
        kwargs
    )
    by_index = {
        index: (name, *words_of(path))
        for name, each in named.items()
        for path, index in jax.tree_util.tree_flatten_with_path(each)[0]
    }
    return [by_index[index] for index in tree.arrays]
