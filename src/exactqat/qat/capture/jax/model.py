# SPDX-License-Identifier: Apache-2.0
"""A function of JAX arrays as a `Network`: `capture` reads its jaxpr.

The function is traced once, as in evaluation, with JAX's symbol for the size of the batch: whoever computes or decides
with it is refused. Batch norms and dropouts tell what they are (`layers`), so they train all the same. What depends on
the parameters alone stays opaque: such a constant is computed by JAX from the parameters at every step.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from ....kit.planning.files import short_names
from ....kit.planning.inputs import misfit_of_example
from ....kit.planning.network import Network, Place
from ..core.builder import Moving
from ..core.naming import input_names, result_name, words_of
from ..core.refusals import SIZE_OF_BATCH, CaptureError, first_line
from ..core.sizes import Batch, Shape
from ..passes.affine import BiasAndAffine

# Their handlers enter themselves into the converter's table.
from . import elementwise, movement, reduction, weights  # noqa: F401
from .converter import Converter, is_library, jaxprs, place_in
from .items import Fixed, Node
from .layers import replacing, telling

_SYMBOLS = (
    "while a model is read, the size of its batch is a symbol: x.shape[0] instead of len(x), jax.numpy instead of numpy"
)


class Tree:
    """How a function's arguments and results nest."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.definition: Any
        leaves, self.definition = jax.tree.flatten((tuple(args), dict(kwargs)))
        self.arrays = tuple(at for at, leaf in enumerate(leaves) if hasattr(leaf, "dtype") and len(leaf.shape) > 0)
        # What the network was captured for: its values are fixed in it.
        self.others = {index: leaf for index, leaf in enumerate(leaves) if index not in self.arrays}
        self.example = [leaves[index] for index in self.arrays]
        self.results: Any = None
        # Functions that the network computes without their own gradient rules.
        self.rules: list[str] = []

    def flatten(self, *args: object, **kwargs: object) -> list[Any]:
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


def named_leaves(tree: object) -> list[tuple[str, Any]]:
    """The leaves of a tree of parameters by their paths, as "encoder.layers.0.kernel"."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(".".join(words_of(path)) or "parameter", leaf) for path, leaf in leaves]


def capture(
    function: Callable[..., Any],
    leaves: Mapping[str, Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    trainable: Callable[[str], bool] = lambda name: True,
    signature: inspect.Signature | None = None,
    in_training: Callable[..., Any] | None = None,
) -> Network:
    """The network that ``function(list(leaves.values()), *args, **kwargs)`` computes, for a batch of any size.

    Args:
        function: as in evaluation; pure.
        leaves: arrays by the names that they have as the network's parameters.
        args, kwargs: the arguments. The first axis of every array is the batch; its size does not matter, values are
            not read. What is no array keeps its value.
        trainable: whether the parameter of that name is trained.
        signature: of the model, for the names of its inputs.
        in_training: `function` as in training, where that is known.

    Raises:
        CaptureError: the function does not do the same for every input, or has no array among its arguments.
    """
    tree = Tree(args, kwargs or {})
    if not tree.arrays:
        raise CaptureError("example must hold an array with a batch in front")
    ways = _input_paths(tree, signature)
    # Networks are traced in float32, whatever they are in; those that cast by hand may need their own types.
    of_own_types = False

    def struct(array: object, shape: Shape) -> jax.ShapeDtypeStruct:
        dtype = jnp.result_type(array)
        single = jnp.issubdtype(dtype, jnp.floating) and not of_own_types
        return jax.ShapeDtypeStruct(shape, np.float32 if single else dtype)

    def parameters() -> list[jax.ShapeDtypeStruct]:
        return [struct(leaf, np.shape(leaf)) for leaf in leaves.values()]

    def batches(changed: Callable[[Shape], Shape]) -> list[jax.ShapeDtypeStruct]:
        return [struct(array, changed(tuple(array.shape))) for array in tree.example]

    def called(function: Callable[..., Any]) -> Callable[..., Any]:
        def traced(leaves: Sequence[Any], arrays: Sequence[Any]) -> Any:
            args, kwargs = tree.arguments(arrays)
            return function(leaves, *args, **kwargs)

        return traced

    (batch,) = jax.export.symbolic_shape("batch")

    def trace(function: Callable[..., Any] = function) -> tuple[ClosedJaxpr, Any]:
        with telling(), _equality_is_a_question(batch):
            arrays = batches(lambda shape: (batch, *shape[1:]))
            return jax.make_jaxpr(called(function), return_shape=True)(parameters(), arrays)

    def failure(changed: Callable[[Shape], Shape]) -> Exception | None:
        """What the model raises for the example with its shapes changed this way."""
        try:
            jax.eval_shape(called(function), parameters(), batches(changed))
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything
            return error
        return None

    try:
        try:
            jaxpr, results = trace()
        except TypeError:
            of_own_types = True
            jaxpr, results = trace()
    except CaptureError:
        raise
    except Exception as error:
        own = failure(lambda shape: shape)
        if own is None:
            raise CaptureError(f"{place_in(error)}: {SIZE_OF_BATCH} ({first_line(error)}; {_SYMBOLS})") from error
        if isinstance(own, jax.errors.ConcretizationTypeError):
            raise CaptureError(
                "the model decides by the values of its input; a network that is deployed does the same for every "
                f"input: {first_line(own)}"
            ) from own
        shapes_given = {path: tuple(array.shape) for path, array in zip(input_names(ways), tree.example, strict=True)}
        misfit = misfit_of_example(first_line(own), shapes_given, lambda changed: failure(changed) is None)
        if misfit is None:
            raise own from None
        raise CaptureError(misfit) from own
    fixed: Set[int] = frozenset()
    if in_training is not None:
        try:
            fixed = _fixed_in_training(jaxpr, trace(in_training)[0])
        except CaptureError:
            raise
        except Exception:  # noqa: BLE001 - whatever the model raises: it has no training of its own
            fixed = frozenset()
    tree.results = jax.tree.structure(results)
    known, inputs = dict(zip(leaves, parameters(), strict=True)), batches(lambda shape: (1, *shape[1:]))
    c = Converter(batch, trainable, known, fixed)
    items_of_leaves = [
        Fixed(Node(path=name), leaf.shape, np.float32 if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype)
        for name, leaf in known.items()
    ]
    values = [c.input(f"argument_{at}", (Batch(), *array.shape[1:]), array.dtype) for at, array in enumerate(inputs)]
    try:
        items = c.run(*c.closed(jaxpr), [*items_of_leaves, *values])
    except (IndexError, TypeError, ValueError) as error:
        # What replaces something refused may have other axes than what reads it expects.
        refused = next((step for step in c.steps if step.attributes.get("reason")), None)
        if refused is None or isinstance(error, CaptureError):
            raise
        reason = f"{refused.label}: {refused.attributes['reason']}"
        raise CaptureError(f"{refused.place}: {reason}") from error
    tree.rules = list(dict.fromkeys(c.rules))
    outputs = []
    for item in items:
        if isinstance(item, Moving) and item.comparison is not None:
            raise CaptureError("the model returns truth values; return the numbers that they are computed from")
        outputs.append(item.name if isinstance(item, Moving) else c.constant(item))
    steps = BiasAndAffine(c, outputs).run()
    return Network(
        tuple(value.name for value in values),
        tuple(outputs),
        c.values,
        c.constants,
        tuple(steps),
        input_names(ways),
        tuple(result_name(way) for way, _ in jax.tree_util.tree_flatten_with_path(results)[0]),
        tree,
        tree,
        short_names(ways),
        channels_first=False,
    )


@contextmanager
def _equality_is_a_question(batch: object) -> Iterator[None]:
    """JAX raises an error for most questions about a symbol, but says that it equals no number, as hashing asks so."""
    kind: Any = type(batch)
    answer = kind.__eq__

    def equal(size: object, other: object) -> bool:
        frame = sys._getframe(1)
        if type(other) is int and not answer(size, other) and not is_library(frame.f_code.co_filename):
            place = Place("", frame.f_code.co_filename, frame.f_lineno)
            raise CaptureError(f"{place}: {SIZE_OF_BATCH} ({size} == {other})")
        return answer(size, other)

    with replacing(kind, "__eq__", equal):
        yield


def _fixed_in_training(evaluated: ClosedJaxpr, trained: ClosedJaxpr) -> Set[int]:
    """Ids of batch norms and dropouts that evaluate in training, too. Whatever else training does otherwise, the
    self-check finds."""
    ours, theirs = (
        [layer for inner in jaxprs(model.jaxpr) for layer in inner.eqns if layer.primitive.name == "exactqat_layer"]
        for model in (evaluated, trained)
    )
    if [layer.params["kind"] for layer in ours] != [layer.params["kind"] for layer in theirs]:
        return frozenset()
    return {id(one) for one, other in zip(ours, theirs, strict=True) if not other.params["trains"]}


def _input_paths(tree: Tree, signature: inspect.Signature | None) -> list[tuple[str, ...]]:
    """Where each array is among the arguments: the argument's name and the way through its tree."""
    args, kwargs = jax.tree.unflatten(tree.definition, list(range(tree.definition.num_leaves)))
    parameters = [] if signature is None else list(signature.parameters)
    named = {
        (parameters[at] if at < len(parameters) else f"input_{at}"): argument for at, argument in enumerate(args)
    } | dict(kwargs)
    by_index = {
        index: (name, *words_of(path))
        for name, argument in named.items()
        for path, index in jax.tree_util.tree_flatten_with_path(argument)[0]
    }
    return [by_index[index] for index in tree.arrays]
