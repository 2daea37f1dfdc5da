# SPDX-License-Identifier: Apache-2.0
"""What the tensors of an export hold: values of the network or what is computed without the input; storages, views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..core.builder import Moving
from ..core.sizes import Shape
from .expression import Node
from .operators import Bound, Operator


class Meta(NamedTuple):
    """Shape (sizes that follow the batch are `Batch`) and dtype of a result; of real numbers there is but one."""

    shape: Shape
    dtype: torch.dtype


Metas = Meta | list[Meta]


@dataclass(eq=False)
class Traced(Moving):
    """A value of the network.

    Attributes:
        outer: its batch axis holds (outer, batch, rows / outer) in this order.
        lost: made by a step that mixes the examples of a batch; nothing that reads it is said any more.
    """

    dtype: torch.dtype = torch.float32
    outer: int = 1
    lost: bool = False


@dataclass(eq=False)
class Fixed:
    """Something that does not depend on the input. noise: it draws random numbers."""

    node: Node
    shape: Shape
    dtype: torch.dtype
    noise: bool = False


Item = Moving | Fixed


class Storage:
    """What views share: an item, and how often it was replaced."""

    def __init__(self, item: Item) -> None:
        self.item, self.version = item, 0


@dataclass(frozen=True, eq=False)
class ViewStep:
    """One operation that looks into a storage through its argument `source`; `index` picks from several results."""

    operator: Operator
    source: str
    arguments: Bound
    meta: Any
    index: int | None


class View:
    """A tensor of the export: a storage seen through a chain of operations."""

    def __init__(self, storage: Storage, chain: tuple[ViewStep, ...], item: Item) -> None:
        self.storage, self.chain = storage, chain
        self.item, self.version = item, storage.version
