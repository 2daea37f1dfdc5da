# SPDX-License-Identifier: Apache-2.0
"""What the tensors of an export hold: contents, storages, views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .expression import Node

# In shapes and sizes, so many times the number of examples is so many times this number. It is a prime far above any
# size of a model's own, and small enough that PyTorch counts the values of a tensor.
BATCH = 2**24 - 3


@dataclass(frozen=True)
class Meta:
    """Shape (the batch as a multiple of `BATCH`) and dtype of a result.

    Attributes:
        mixed: a size follows the batch, but is not a multiple of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    mixed: bool = False


@dataclass(frozen=True, eq=False)
class Content:
    """What a tensor of the export holds at one moment: a value of the network by name, or a node of a program.

    Attributes:
        noise: the node draws random numbers.
        outer: of a value: its batch axis holds (outer, batch, rows / outer) in this order.
        broken: of a value: made after a step that mixes the examples of a batch; no more is said about its batch.
        formula: of truth values that depend on the input, and of what is made of them: a `composition.Formula`.
    """

    meta: Meta
    name: str = ""
    node: Node | None = None
    noise: bool = False
    outer: int = 1
    broken: bool = False
    formula: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.meta.shape

    @property
    def is_value(self) -> bool:
        return self.node is None


class Storage:
    """What views share: a content, and how often it was replaced."""

    def __init__(self, content: Content) -> None:
        self.content, self.version = content, 0


@dataclass(frozen=True, eq=False)
class ViewStep:
    """One operation that looks into a storage through its argument `source`; `index` picks from several results."""

    operator: Any
    source: str
    arguments: Mapping[str, Any]
    meta: Any
    index: int | None


class View:
    """A tensor of the export: a storage seen through a chain of operations."""

    def __init__(self, storage: Storage, chain: tuple[ViewStep, ...], content: Content) -> None:
        self.storage, self.chain = storage, chain
        self.content, self.version = content, storage.version
