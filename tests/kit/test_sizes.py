# SPDX-License-Identifier: Apache-2.0
"""Sizes that follow the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from exactqat.qat.capture.core.refusals import Refused
from exactqat.qat.capture.core.sizes import Batch, broadcast, exact, for_examples

BATCH = Batch()


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda size: size * 3, Batch(6)),
        (lambda size: 3 * size, Batch(6)),
        (lambda size: size * 0, 0),
        (lambda size: size // 2, BATCH),
        (lambda size: size // BATCH, 2),
        (lambda size: size % 2, 0),
        (lambda size: size % BATCH, 0),
        (lambda size: math.prod((4, size, 5)), Batch(40)),
        (lambda size: math.prod((4, size, 5)) // math.prod((size, 2)), 10),
    ],
)
def test_products_and_exact_quotients_are_sizes_or_numbers(compute: Callable[[Any], Any], expected: Any) -> None:
    result = compute(Batch(2))
    assert result == expected and type(result) is type(expected)


@pytest.mark.parametrize(
    "compute",
    [
        lambda size: size * size,
        lambda size: size * 0.5,
        lambda size: size // 4,
        lambda size: size % 4,
        lambda size: 12 // size,
        lambda size: 12 % size,
        lambda size: size + 1,
        lambda size: 1 - size,
        lambda size: sum([size, size]),
        lambda size: -size,
        lambda size: size / 2,
        lambda size: 1 / size,
        lambda size: size**2,
        lambda size: size > 16,
        lambda size: size <= 16,
        int,
        float,
        range,
        math.sqrt,
        lambda size: np.zeros(size),
        lambda size: [1, 2, 3][size],
    ],
)
def test_whatever_depends_on_the_number_of_examples_is_refused(compute: Callable[[Any], Any]) -> None:
    with pytest.raises((Refused, TypeError)):
        compute(Batch(2))


def test_a_size_that_follows_the_batch_is_no_number() -> None:
    assert Batch(2) != 2 and Batch(2) == Batch(2) and Batch(2) != BATCH
    assert {BATCH: "rows", 1: "one"}[Batch()] == "rows"
    assert str((Batch(), Batch(3), 4)) == "(batch, 3 * batch, 4)"


def test_shapes() -> None:
    assert exact([np.int64(3), BATCH]) == (3, BATCH)
    assert for_examples({"shape": (Batch(2), 5), "axis": 0}, 7) == {"shape": (14, 5), "axis": 0}
    assert broadcast((BATCH, 1, 4), (3, 1), (4,)) == (BATCH, 3, 4)
    with pytest.raises(ValueError, match="do not fit"):
        broadcast((BATCH, 4), (2, 4))


@pytest.mark.parametrize(("most", "passes"), [(880801, True), (65535, True), (2674, True), (2675, False), (64, False)])
def test_limits_of_kernels_are_not_questions_about_the_batch(most: int, passes: bool) -> None:
    """On a GPU PyTorch asks for limits of cuDNN, and counts elements in 32 bits: 2674 times 64x112x112."""
    sympy, torch = pytest.importorskip("sympy"), pytest.importorskip("torch")
    from exactqat.qat.capture.torch.sizes import Sizes

    sizes = Sizes([])
    sizes.rows["batch"] = 1
    guard = SimpleNamespace(expr=sympy.Le(sympy.Symbol("batch", integer=True), most))
    assert (sizes.branch([guard], [torch.empty(7, 64, 112, 112, device="meta")]) is None) == passes
