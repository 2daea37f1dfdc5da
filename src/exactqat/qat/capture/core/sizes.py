# SPDX-License-Identifier: Apache-2.0
"""Sizes that follow the batch: exactly so many times the number of examples, whatever that is."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from .refusals import MIXES, SIZE_OF_BATCH, Refused


def _refused(reason: str) -> Any:
    def refuse(*operands: object) -> NoReturn:
        raise Refused(reason)

    return refuse


@dataclass(frozen=True)
class Batch:
    """`multiple` times the number of examples. Products and exact quotients are such sizes, too, or plain numbers.

    Raises:
        Refused: something else is computed of it.
    """

    multiple: int = 1

    def __mul__(self, factor: Any) -> Any:
        if isinstance(factor, Batch):
            raise Refused(SIZE_OF_BATCH)
        return Batch(self.multiple * operator.index(factor)) if factor else 0

    __rmul__ = __mul__

    def __floordiv__(self, divisor: Any) -> Any:
        if self % divisor:
            raise Refused(MIXES)
        if isinstance(divisor, Batch):
            return self.multiple // divisor.multiple
        return Batch(self.multiple // operator.index(divisor))

    def __mod__(self, divisor: Any) -> int:
        """0: all other remainders depend on the number of examples."""
        if self.multiple % (divisor.multiple if isinstance(divisor, Batch) else operator.index(divisor)):
            raise Refused(MIXES)
        return 0

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "batch" if self.multiple == 1 else f"{self.multiple} * batch"

    __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = _refused(MIXES)
    __lt__ = __le__ = __gt__ = __ge__ = __rmod__ = __rfloordiv__ = _refused(SIZE_OF_BATCH)
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __int__ = __float__ = __index__ = _refused(SIZE_OF_BATCH)


# An integer, or a `Batch`; most readers know which axis is the batch, and use all others as integers.
Size = Any
Shape = tuple[Size, ...]


def exact(sizes: Iterable[Any]) -> Shape:
    """A shape of Python's integers, and of sizes that follow the batch."""
    return tuple(Batch(size.multiple) if isinstance(size, Batch) else int(size) for size in sizes)


def for_examples(value: object, examples: int) -> Any:
    """A value, a tuple or a dictionary with numbers in place of the sizes that follow the batch."""
    if isinstance(value, Batch):
        return value.multiple * examples
    if isinstance(value, dict):
        return {key: for_examples(entry, examples) for key, entry in value.items()}
    return tuple(for_examples(entry, examples) for entry in value) if type(value) is tuple else value


def broadcast(*shapes: Shape) -> Shape:
    """The shape of a result of operands with these shapes.

    Raises:
        ValueError: they do not fit.
    """
    rank = max(map(len, shapes))
    columns = zip(*((1,) * (rank - len(shape)) + tuple(shape) for shape in shapes), strict=True)
    wide = [{size for size in column if size != 1} or {1} for column in columns]
    if any(len(sizes) > 1 for sizes in wide):
        raise ValueError(f"shapes {', '.join(map(str, shapes))} do not fit")
    return tuple(sizes.pop() for sizes in wide)
