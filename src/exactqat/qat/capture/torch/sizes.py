# SPDX-License-Identifier: Apache-2.0
"""Sizes of an export for a batch of any size, and what PyTorch has assumed about that size."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._sympy.printers import PythonPrinter

from ..core.sizes import Batch

# Examples that the exported batch has: PyTorch asks questions about sizes with them, whose answers must hold for all.
EXAMPLES = 7
# Numbers of examples for which such an answer must hold: one example broadcasts, so the self-check looks at it.
_ANSWERED = (*range(2, 130), 240, 256, 360, 512, 840, 1000, 1024, 2520, 6720, 10007)
# More examples are not a batch: sizes above it are limits of memory, of integers and of cuDNN (65,535; 880,801), where
# PyTorch takes another kernel.
_LARGEST = 2**15
# The most elements of a tensor that kernels for GPUs count in 32 bits; beyond, PyTorch takes others.
_INDEXED = 2**31 - 1
# Numbers of examples by which a size is known as a multiple of theirs.
_MEASURED = (1, 2, 3, 4, 5, 7, 12, 36, 1009)


class FollowsTheBatch:
    """A number that follows the number of examples, but is not a multiple of it."""


FOLLOWS = FollowsTheBatch()


class Sizes:
    """What the symbols of an export are: each so many times the number of examples."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """tensors: the export's inputs, all with `EXAMPLES` times their rows on the first axis."""
        self.rows: dict[str, int] = {}
        for tensor in tensors:
            size = tensor.shape[0]
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                self.rows[str(size.node.expr)] = int(size.node.hint) // EXAMPLES
        self._known: dict[Any, Any] = {}

    @staticmethod
    def is_free(size: object) -> bool:
        """Whether a size is not one number."""
        return isinstance(size, torch.SymInt) and not size.node.expr.is_number

    def of(self, value: object) -> Any:
        """A number of the export: a size that is a multiple of the batch as a `Batch`.

        Returns:
            `FOLLOWS` of a number that depends on the batch otherwise; None of one that depends on values.
        """
        if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return value
        expression = value.node.expr
        if expression not in self._known:
            self._known[expression] = self._measured(expression)
        return self._known[expression]

    def _measured(self, expression: Any) -> Any:
        if any(str(symbol) not in self.rows for symbol in expression.free_symbols):
            return None
        function = self._function(expression)
        values = [function(examples) for examples in _MEASURED]
        if all(value == values[0] for value in values):
            return values[0]
        if all(isinstance(value, int) and value == values[0] * n for value, n in zip(values, _MEASURED, strict=True)):
            return Batch(values[0])
        return FOLLOWS

    def _function(self, expression: object) -> Callable[[int], Any]:
        """An expression as a function of the number of examples."""
        code = compile(PythonPrinter().doprint(expression), "<size>", "eval")
        known = {"math": math, "operator": operator, "torch": torch, "float": float, "int": int}
        return lambda examples: eval(  # noqa: S307 - PyTorch's own text of an expression
            code, known, {name: rows * examples for name, rows in self.rows.items()}
        )

    def branch(self, guards: Iterable[Any], tensors: Iterable[torch.Tensor]) -> tuple[Any, int] | None:
        """What PyTorch has assumed about the number of examples and a number for which it does not hold; None if all
        holds for any number.

        Args:
            tensors: all of the export, whose elements GPUs count.
        """
        elements = {math.prod(int(size) for size in tensor.shape[1:] if not self.is_free(size)) for tensor in tensors}
        counted = {_INDEXED, *(_INDEXED // number for number in elements if number)}
        for guard in guards:
            expression = guard.expr
            if any(str(symbol) not in self.rows for symbol in expression.free_symbols):
                continue
            numbers = {int(number) for number in expression.atoms() if number.is_Integer}
            near = {n // rows + d for n in numbers for rows in self.rows.values() for d in (-1, 0, 1)}
            if expression.func.__name__ in ("LessThan", "StrictLessThan") and numbers & counted:
                continue
            function = self._function(expression)
            for examples in sorted({*_ANSWERED, *(n for n in near if 2 <= n <= _LARGEST)}):
                if not function(examples):
                    return guard, examples
        return None
