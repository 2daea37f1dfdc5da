# SPDX-License-Identifier: Apache-2.0
"""What a variable of a jaxpr is: something computed without the input, or a value of the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from ..core.builder import Moving


@dataclass(eq=False, frozen=True)
class Node:
    """A result in the graph of what is computed without the input: a leaf by `path`, `data`, or a function's result.

    function: of the arrays of `inputs`; gives a list of results; this is number `index`.
    random: where random numbers are drawn; empty for all else.
    by_rows: whether the function takes `rows`, the number of examples, too, as its result's shape follows it.
    leak: whether it is a number that follows the size of the batch.
    """

    path: str = ""
    data: Any = None
    function: Callable[..., list[jax.Array]] | None = None
    inputs: tuple[Node, ...] = ()
    index: int = 0
    random: str = ""
    by_rows: bool = False
    leak: bool = False


@dataclass(eq=False)
class Fixed:
    """Something that does not depend on the input. shape: for a batch of one."""

    node: Node
    shape: tuple[int, ...]
    dtype: Any

    @property
    def sources(self) -> tuple[str, ...]:
        return sources(self.node)

    @property
    def values(self) -> np.ndarray | None:
        """In NumPy, if it depends on no parameter, and there are such for a batch of one."""
        if self.sources:
            return None
        try:
            return np.asarray(Expression(self.node)())
        except (TypeError, ValueError):
            # It cannot be computed for one example, which is refused where it is read.
            if any(node.by_rows for node in nodes(self.node)):
                return None
            raise

    @cached_property
    def number(self) -> float | None:
        """Its only value, if it has but one and depends on no parameter."""
        values = self.values
        if values is None or not values.size or not np.all(values == values.flat[0]):
            return None
        return float(values.flat[0])

    def then(self, function: Callable[..., jax.Array], *others: Fixed) -> Fixed:
        """What a function of its array, and of others', gives."""
        node = Node(function=lambda *arrays: [function(*arrays)], inputs=(self.node, *(other.node for other in others)))
        parts = [jax.ShapeDtypeStruct(item.shape, item.dtype) for item in (self, *others)]
        result = jax.eval_shape(function, *parts)
        return Fixed(node, tuple(result.shape), result.dtype)


Item = Fixed | Moving
Result = Item | list[Item]


def nodes(node: Node) -> list[Node]:
    """All that a node is computed from, each once and after what it is computed from; the node itself is last."""
    ordered: dict[Node, None] = {}
    stack = [node]
    while stack:
        missing = [part for part in stack[-1].inputs if part not in ordered]
        if missing:
            stack.extend(reversed(missing))
        else:
            ordered.setdefault(stack.pop())
    return list(ordered)


def sources(node: Node) -> tuple[str, ...]:
    """Paths of the parameters that a node is computed from."""
    return tuple(dict.fromkeys(part.path for part in nodes(node) if part.path))


class Expression:
    """A node as a function of the arrays of its `sources`."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.sources = sources(node)

    def __call__(self, *arrays: jax.Array, rows: int = 1) -> jax.Array:
        """rows: examples, of what follows their number."""
        sources = dict(zip(self.sources, arrays, strict=True))
        results: dict[Node, jax.Array] = {}
        for node in nodes(self.node):
            if node.function is None:
                results[node] = sources[node.path] if node.path else node.data
            else:
                more = {"rows": rows} if node.by_rows else {}
                results[node] = node.function(*(results[part] for part in node.inputs), **more)[node.index]
        return results[self.node]
