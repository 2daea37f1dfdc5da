# SPDX-License-Identifier: Apache-2.0
"""A function of JAX arrays as a `Network`: `capture` reads its jaxpr.

The function is traced with a large prime for the batch, so that every size that follows the batch is a multiple of that
prime and nothing else is; the network's shapes are for one example. What depends on the parameters alone stays opaque:
such a constant is computed by JAX from the parameters at every step.

It is traced as in evaluation. Batch norms and dropouts tell what they are (`capturing_jax.layers`), so they train all
the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..planning.network import Network
from .capturing_jax import CaptureError, Converter, Fixed, Moving, Node, Tidying
from .capturing_jax.layers import telling

_PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 2003, 2011)


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
    return [(".".join(_word(entry) for entry in path) or "parameter", leaf) for path, leaf in found]


def _word(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def capture(
    function: Callable[..., Any],
    variables: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    names: Sequence[str] | None = None,
    trainable: Callable[[str], bool] = lambda name: True,
    signature: inspect.Signature | None = None,
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

    Raises:
        CaptureError: the function does not do the same for every input, or has no array among its arguments.
    """
    tree = Tree(args, kwargs or {})
    if not tree.arrays:
        raise CaptureError("example must hold an array with a batch in front")
    leaves, definition = jax.tree.flatten(variables)
    names = [name for name, _ in named_leaves(variables)] if names is None else list(names)
    shapes = {name: tuple(np.shape(leaf)) for name, leaf in zip(names, leaves, strict=True)}
    sizes = [*(size for shape in shapes.values() for size in shape), *(s for each in tree.example for s in each.shape)]
    prime = next(each for each in _PRIMES if all(size == 0 or size % each for size in sizes))
    given = [jax.ShapeDtypeStruct(shapes[name], _traced(leaf)) for name, leaf in zip(names, leaves, strict=True)]
    inputs = [jax.ShapeDtypeStruct((prime, *each.shape[1:]), _traced(each)) for each in tree.example]

    def traced(leaves: Sequence[Any], arrays: Sequence[Any]) -> Any:
        args, kwargs = tree.arguments(arrays)
        return function(jax.tree.unflatten(definition, leaves), *args, **kwargs)

    try:
        with telling():
            jaxpr, results = jax.make_jaxpr(traced, return_shape=True)(given, inputs)
    except jax.errors.ConcretizationTypeError as error:
        raise CaptureError(
            f"the model decides by the values of its input; a network that is deployed does the same for every input: "
            f"{str(error).splitlines()[0]}"
        ) from error
    tree.results = jax.tree.structure(results)
    c = Converter(prime, trainable, shapes)
    paths = _input_names(tree, signature)
    parameters = [
        Fixed(Node(path=name), shapes[name], np.float32 if jnp.issubdtype(each.dtype, jnp.floating) else each.dtype)
        for name, each in zip(names, given, strict=True)
    ]
    values = [c.input(f"argument_{at}", tuple(each.shape), each.dtype) for at, each in enumerate(inputs)]
    items = c.run(jaxpr.jaxpr, [c.data(each) for each in jaxpr.consts], [*parameters, *values])
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
        tuple(paths),
        tuple(_output_names(results)),
        tree,
        tree,
    )


def _traced(leaf: Any) -> Any:
    """Networks are traced in float32, whatever they are in."""
    dtype = jnp.result_type(leaf)
    return np.dtype(np.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _input_names(tree: Tree, signature: inspect.Signature | None) -> list[str]:
    if len(tree.arrays) == 1:
        return ["input"]
    args, kwargs = jax.tree.unflatten(tree.definition, list(range(tree.definition.num_leaves)))
    parameters = [] if signature is None else list(signature.parameters)
    named = {(parameters[at] if at < len(parameters) else f"input_{at}"): each for at, each in enumerate(args)} | dict(
        kwargs
    )
    by_index = {
        index: "_".join((name, *(_word(entry) for entry in path)))
        for name, each in named.items()
        for path, index in jax.tree_util.tree_flatten_with_path(each)[0]
    }
    return [by_index[index] for index in tree.arrays]


def _output_names(results: Any) -> list[str]:
    found = jax.tree_util.tree_flatten_with_path(results)[0]
    words = ["_".join(_word(entry) for entry in path) for path, _ in found]
    return [f"output_{word}" if word.isdigit() else word or "output" for word in words]
