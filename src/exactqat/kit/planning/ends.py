# SPDX-License-Identifier: Apache-2.0
"""What a network from a file takes and returns, in the form of captured models' trees."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Mapping, Sequence
from typing import Any

from ..display import listed


class Ends:
    """How a file's inputs and outputs nest, in the form of a captured model's tree: inputs are arguments in the file's
    order, or by its names; several outputs are a dictionary by its names."""

    updates = ()
    updates_first = False

    def __init__(self, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.names, self.outputs = tuple(inputs), tuple(outputs)
        words = [name if name.isidentifier() and not keyword.iskeyword(name) else "" for name in self.names]
        words = [word or f"input_{number}" for number, word in enumerate(words)]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.signature = inspect.Signature([inspect.Parameter(word, kind) for word in words])

    def flatten(self, *args: object, **kwargs: object) -> list[Any]:
        """
        Raises:
            TypeError: the arguments are not the file's inputs.
        """
        if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
            return self.flatten(**args[0])
        if len(args) == 1 and not kwargs and isinstance(args[0], list | tuple) and len(self.names) > 1:
            return self.flatten(*args[0])
        words = tuple(self.signature.parameters)
        known = {**dict(zip(self.names, words, strict=True)), **{word: word for word in words}}
        unknown = [name for name in kwargs if name not in known]
        if unknown or len(args) + len(kwargs) != len(words):
            arguments = [*("positional" for _ in args), *kwargs]
            raise TypeError(f"the file's inputs are {', '.join(self.names)}; got {listed(arguments) or 'none'}")
        bound = self.signature.bind(*args, **{known[name]: value for name, value in kwargs.items()})
        return list(bound.arguments.values())

    def unflatten(self, results: Sequence[Any]) -> Any:
        return results[0] if len(results) == 1 else dict(zip(self.outputs, results, strict=True))
