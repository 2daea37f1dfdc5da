# SPDX-License-Identifier: Apache-2.0
"""How a model's arguments and results nest, and what they are called."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ....kit.display import listed, shortened
from ..core.naming import words_of


class Tree:
    """How a model's arguments and results nest."""

    def __init__(self, signature: inspect.Signature, leaves: Sequence[Any], spec: Any) -> None:
        self.signature, self.spec = signature, spec
        self.tensors = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        # What the network was captured for: its values are fixed in it.
        self.others = {index: leaf for index, leaf in enumerate(leaves) if index not in self.tensors}
        self.results: tuple[Any, list[tuple[bool, Any]]] = (None, [])
        # The modules' training flags under which the model computes what the network does in training.
        self.flags: Mapping[str, bool] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Tree:
        return self  # nothing changes it

    @staticmethod
    def bind(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name; those left out by their defaults.

        Raises:
            TypeError: they are not what the model takes.
        """
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            takes = ", ".join(map(str, signature.parameters.values())) or "nothing"
            words = [f"{len(args)} argument{'s' * (len(args) != 1)} by position"] if args or not kwargs else []
            words += [f"by name {', '.join(map(shortened, kwargs))}"] if kwargs else []
            raise TypeError(f"{error}: the model takes ({takes}), got {' and '.join(words)}") from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def flatten(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """The tensors among a call's arguments, in the order of `Network.inputs`.

        Raises:
            TypeError: the arguments nest otherwise than the example's, or what is no tensor has another value.
        """
        leaves, spec = pytree.tree_flatten(self.bind(self.signature, args, kwargs))
        if spec != self.spec:
            wanted = self._names([None] * self.spec.num_leaves, self.spec)
            raise TypeError(
                "the arguments must nest as those of the example did: the same tensors, None where it had None; "
                f"the example had {listed(wanted)}, this call has {listed(self._names(leaves, spec))}"
            )
        for index in self.tensors:
            if not isinstance(leaves[index], torch.Tensor):
                kind = f"{type(leaves[index]).__module__}.{type(leaves[index]).__qualname__}".removeprefix("builtins.")
                how = "; torch.from_numpy makes one" if kind == "numpy.ndarray" else ""
                raise TypeError(
                    "the arguments must nest as those of the example did: "
                    f"'{self._names(leaves, spec)[index]}' must be a torch.Tensor, got {kind}{how}"
                )
        for index, value in self.others.items():
            if isinstance(leaves[index], torch.Tensor) or leaves[index] != value:
                word = "a tensor" if isinstance(leaves[index], torch.Tensor) else shortened(repr(leaves[index]))
                name = self._names(leaves, spec)[index]
                raise TypeError(f"the network was captured for {name} = {value!r}, got {word}")
        return [leaves[index] for index in self.tensors]

    @staticmethod
    def _names(leaves: Sequence[Any], spec: Any) -> list[str]:
        return [leaf_name(path) for path, _ in pytree.tree_flatten_with_path(pytree.tree_unflatten(leaves, spec))[0]]

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """The model's result from the values of `Network.outputs`."""
        spec, leaves = self.results
        return pytree.tree_unflatten([outputs[leaf] if is_output else leaf for is_output, leaf in leaves], spec)


def leaf_name(path: Sequence[Any]) -> str:
    """A name for a place in a tree: keys, attributes and positions."""
    return "_".join(words_of(path))
