# SPDX-License-Identifier: Apache-2.0
"""The state of Haiku's batch norms, by the names of its leaves: what training moves in it, and what follows from that.

A mean and a variance are moving averages that begin at 0, of shape [1, ..., channels, ...]: "hidden", the raw average,
"counter", how many batches it has seen, and "average", the debiased one. Training moves the two averages, as vectors,
and one counter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

_ENDS = tuple(f"/~/{which}_ema.{leaf}" for which in ("mean", "var") for leaf in ("average", "hidden", "counter"))


class MovingAverages:
    """The moving averages of a tree.

    Attributes:
        averages: names of the averages, which are statistics.
        names: of the leaves that training sees, in the tree's order.
    """

    def __init__(self, leaves: Sequence[tuple[str, Any]], decays: Mapping[str, float]) -> None:
        """
        Args:
            leaves: of the whole tree.
            decays: by the name of a mean that training moves, how much of it stays.
        """
        self._given = dict(leaves)
        begins = [name.removesuffix(_ENDS[0]) for name in self._given if name.endswith(_ENDS[0])]
        self._norms = [begin for begin in begins if all(begin + end in self._given for end in _ENDS)]
        self._decays = decays
        self.averages = frozenset(norm + _ENDS[at] for norm in self._norms for at in (0, 3))
        following = {norm + _ENDS[at] for norm in self._norms for at in (1, 4, 5)}
        self.names = [name for name in self._given if name not in following]

    def seen(self, name: str) -> Any:
        """A leaf as training sees it."""
        return self._given[name].reshape(-1) if name in self.averages else self._given[name]

    def tree_leaves(self, leaves: Mapping[str, Any], shaped: bool = True) -> list[Any]:
        """All leaves of the tree, from those that training sees. shaped: averages get Haiku's shape."""
        whole = {**self._given, **leaves}
        for norm in self._norms:
            mean, _, counter, variance, _, other = (norm + end for end in _ENDS)
            if mean in self._decays:
                whole[other] = whole[counter]
                kept = 1.0 - jnp.float32(self._decays[mean]) ** whole[counter]
                for name in (mean, variance):
                    whole[name.replace(".average", ".hidden")] = whole[name] * kept
            for at in (0, 1, 3, 4) if shaped else ():
                whole[norm + _ENDS[at]] = whole[norm + _ENDS[at]].reshape(self._given[norm + _ENDS[at]].shape)
        return [whole[name] for name in self._given]


__all__ = ["MovingAverages"]
