# SPDX-License-Identifier: Apache-2.0
"""Sizes of windows over spatial axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def each(value: Any, count: int) -> tuple[int, ...]:
    """One integer for each spatial axis."""
    values = [value] if isinstance(value, int) else list(value)
    return tuple(int(one) for one in (values * count if len(values) == 1 else values))


def windows(strides: Any, padding: Any, dilations: Any) -> dict[str, Any]:
    """The attributes that steps with windows have in common."""
    pairs = tuple((int(before), int(after)) for before, after in padding)
    return {"strides": tuple(map(int, strides)), "padding": pairs, "dilations": tuple(map(int, dilations))}


def padding_in_numbers(
    word: str, sizes: Sequence[int], window: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Padding "valid", "causal" or "same", which is TensorFlow's: as many windows as strides."""
    pairs = []
    for size, side, stride, dilation in zip(sizes, window, strides, dilations, strict=True):
        reach = (side - 1) * dilation
        if word == "valid":
            pairs.append((0, 0))
        elif word == "causal":
            pairs.append((reach, 0))
        else:
            total = max((-(-size // stride) - 1) * stride + reach + 1 - size, 0)
            pairs.append((total // 2, total - total // 2))
    return tuple(pairs)
