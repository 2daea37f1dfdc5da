# SPDX-License-Identifier: Apache-2.0
"""What a variable of a jaxpr is: something computed without the input, or a value of the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    leak: where a number that follows the size of the batch comes in; empty for all else.
    """

    path: str = ""
    data: Any = None
    function: Callable[..., Any] | None = None
    inputs: tuple[Node, ...] = ()
    index: int = 0
    random: str = ""
    by_rows: bool = False
    leak: str = ""


@dataclass(eq=False)
class Fixed:
    """Something that does not depend on the input. shape: for a batch of one."""

    node: Node
    shape: tuple[int, ...]
    dtype: Any

    def __post_init__(self) -> None:
        self._number: float | None = None
        self._looked = False

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
            if any(each.by_rows for each in nodes(self.node)):
                return None
            raise

    @property
    def number(self) -> float | None:
        """Its only value, if it has but one and depends on no parameter."""
        if not self._looked:
            values = self.values
            if values is not None and values.size and np.all(values == values.flat[0]):
                self._number = float(values.flat[0])
            self._looked = True
        return self._number

    def then(self, function: Callable[..., Any], *others: Fixed) -> Fixed:
        """What a function of its array, and of others', gives."""
        node = Node(function=lambda *arrays: [function(*arrays)], inputs=(self.node, *(other.node for other in others)))
        parts = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (self, *others)]
        made = jax.eval_shape(function, *parts)
        return Fixed(node, tuple(made.shape), made.dtype)


Item = Fixed | Moving


def nodes(node: Node) -> Iterator[Node]:
    """A node and all that it is computed from, each once."""
    seen: set[int] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if id(current) not in seen:
            seen.add(id(current))
            yield current
            stack.extend(reversed(current.inputs))


def sources(node: Node) -> tuple[str, ...]:
    """Paths of the parameters that a node is computed from."""
    return tuple(dict.fromkeys(each.path for each in nodes(node) if each.path))


class Expression:
    """A node as a function of the arrays of its `sources`."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.sources = sources(node)

    def __call__(self, *arrays: Any, rows: int = 1) -> Any:
        """rows: examples, of what follows their number."""
        given = dict(zip(self.sources, arrays, strict=True))
        made: dict[int, Any] = {}
        stack = [(self.node, False)]
        while stack:
            node, ready = stack.pop()
            if id(node) in made:
                continue
            if node.path:
                made[id(node)] = given[node.path]
            elif node.function is None:
                made[id(node)] = node.data
            elif ready:
                more = {"rows": rows} if node.by_rows else {}
                made[id(node)] = node.function(*(made[id(each)] for each in node.inputs), **more)[node.index]
            else:
                stack.append((node, True))
                stack.extend((each, False) for each in node.inputs)
        return made[id(self.node)]
