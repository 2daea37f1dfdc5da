# SPDX-License-Identifier: Apache-2.0
"""What inputs and results are called, by their ways through the trees of a framework."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def words_of(way: Iterable[Any]) -> list[str]:
    """The keys, positions and attributes of a way through a tree (PyTorch's or JAX')."""
    return [str(getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry)))) for entry in way]


def input_names(ways: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """By which rules know inputs."""
    return ("input",) if len(ways) == 1 else tuple("_".join(words) for words in ways)


def result_name(way: Iterable[Any]) -> str:
    """ "logits", "output_0", or "output" of a single result."""
    name = "_".join(words_of(way))
    return f"output_{name}".rstrip("_") if not name or name[0].isdigit() else name
