# SPDX-License-Identifier: Apache-2.0
"""What follows the size of the batch: two traces of a model, for two numbers of examples, side by side.

Sizes of arrays may follow it. A number that does, or what is computed, must not: a network computes every example by
itself, so the size that a model was traced with would be fixed in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Parameters of equations that are numbers, not sizes.
_NUMBERS = {("integer_pow", "y"), ("scan", "length")}
# Those that count operands, keys among them.
_COUNTS = {("scan", "linear"), ("scan", "num_consts")}


class Sizes:
    """Two jaxprs of one model side by side.

    Attributes:
        leaking: ids of equations, literals and arrays in the first one that hold a number that follows the batch.
        holding: ids of equations that hold such equations.
        fixed: ids of equations of layers that, in the second one, do not train.
        own: whole numbers that do not, though they look like a batch of the first one.
        differs: whether they compute otherwise, not only with other numbers.
        different: the first equation (of either) where they do either.
    """

    def __init__(self, first: Any, second: Any, examples: tuple[int, int]) -> None:
        self.examples = examples
        self.leaking: set[int] = set()
        self.holding: set[int] = set()
        self.fixed: set[int] = set()
        self.own: set[int] = set()
        self.different: Any = None
        self.differs = False
        # Ids are those of living objects.
        self.kept = (first, second)
        self._closed(first, second)

    def _closed(self, first: Any, second: Any) -> bool:
        """Whether a number in them follows the batch."""
        found = False
        for a, b in zip(getattr(first, "consts", ()), getattr(second, "consts", ()), strict=False):
            found |= self._array(a, b)
        return self._jaxpr(getattr(first, "jaxpr", first), getattr(second, "jaxpr", second)) or found

    def _jaxpr(self, first: Any, second: Any) -> bool:
        found = False
        ours, theirs = live(first), live(second)
        for a, b in zip(ours, theirs, strict=False):
            if a.primitive.name != b.primitive.name or len(_operands(a)) != len(_operands(b)):
                self._mark(a)
                return True
            found |= self._equation(a, b)
        if len(ours) != len(theirs):
            longer = max(ours, theirs, key=len)
            self._mark(longer[min(len(ours), len(theirs))])
            return True
        for a, b in zip(first.outvars, second.outvars, strict=False):
            if hasattr(a, "val") and hasattr(b, "val"):
                found |= self._array(a.val, b.val, a)
        return found

    def _mark(self, equation: Any) -> None:
        if not self.differs:
            self.differs, self.different = True, equation

    def _equation(self, first: Any, second: Any) -> bool:
        inside = False
        for a, b in zip(_operands(first), _operands(second), strict=True):
            if hasattr(a, "val") or hasattr(b, "val"):
                inside |= self._array(getattr(a, "val", None), getattr(b, "val", None), a)
        leaks = any(
            self._value(a.aval.shape, b.aval.shape) for a, b in zip(first.outvars, second.outvars, strict=False)
        )
        for key, a in first.params.items():
            b = second.params.get(key)
            if key == "trains":
                # What training and evaluation may say otherwise.
                self.fixed.update([] if b else [id(first)])
                continue
            if (first.primitive.name, key) in _COUNTS:
                continue
            if (first.primitive.name, key) in _NUMBERS:
                leaks |= a != b
            elif _holds_jaxprs(a):
                inside |= any([self._closed(*each) for each in zip(_many(a), _many(b), strict=False)])
            else:
                leaks |= self._value(a, b)
        if leaks or inside:
            self.different = self.different or first
        if leaks:
            self.leaking.add(id(first))
        elif inside:
            self.holding.add(id(first))
        return bool(leaks or inside)

    def _value(self, a: Any, b: Any) -> bool:
        """Whether a parameter follows the batch otherwise than as a size."""
        if isinstance(a, tuple | list) and isinstance(b, tuple | list):
            return len(a) != len(b) or any([self._value(*each) for each in zip(a, b, strict=True)])
        if isinstance(a, bool | str | float | np.floating) or a is None:
            return type(a) is type(b) and a != b and not (a != a and b != b)
        if isinstance(a, int | np.integer) and isinstance(b, int | np.integer):
            return not self._follows(int(a), int(b))
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            return self._array(a, b)
        return False

    def _follows(self, a: int, b: int) -> bool:
        """Whether two whole numbers are one of the user's own, or sizes of batches."""
        one, two = self.examples
        if a == b:
            if a and a % one == 0:
                self.own.add(a)
            return True
        return a % one == 0 and b % two == 0 and a // one == b // two

    def _array(self, a: Any, b: Any, holder: Any = None) -> bool:
        """Whether the values of constants follow the batch."""
        try:
            x, y = np.asarray(a), np.asarray(b)
        except TypeError:  # keys
            return False
        if x.dtype == object or y.dtype == object:
            return False
        if x.shape == y.shape:
            self._value(x.shape, y.shape)
            leaks = not np.array_equal(x, y, equal_nan=x.dtype.kind == "f" and y.dtype.kind == "f")
        else:
            # Rows of a batch: they must be alike, which whoever reads them checks.
            leaks = self._value(x.shape, y.shape)
        if leaks:
            self.leaking.add(id(a) if holder is None else id(holder))
        return leaks


def _many(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)


def _holds_jaxprs(value: Any) -> bool:
    return any(hasattr(each, "eqns") for each in _many(value)) and bool(_many(value))


def _operands(equation: Any) -> list[Any]:
    """Without random keys: only training hands them on, also to what draws nothing with them."""
    return [each for each in equation.invars if not jnp.issubdtype(each.aval.dtype, jax.dtypes.prng_key)]


def live(jaxpr: Any) -> list[Any]:
    """The equations that a jaxpr's results depend on, but for those that make keys alone."""
    needed = {variable for variable in jaxpr.outvars if not hasattr(variable, "val")}
    found = []
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars) or equation.effects:
            needed.update(variable for variable in _operands(equation) if not hasattr(variable, "val"))
            found.append(equation)
    return found[::-1]
