# SPDX-License-Identifier: Apache-2.0
"""What a network may cost: numbers with units, and by how much costs exceed them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NUMBER = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z%]*)\s*")
# For memory a k is 1,024, as in data sheets; for counts it is 1,000.
_BYTES: dict[str, float] = {
    "": 1,
    "B": 1,
    **dict.fromkeys(("k", "K", "kB", "KB", "KiB"), 2**10),
    **dict.fromkeys(("M", "MB", "MiB"), 2**20),
}
_COUNTS: dict[str, float] = {"": 1, **dict.fromkeys(("k", "K"), 10**3), "M": 10**6, "G": 10**9}
# The resources come first.
_UNITS: dict[str, dict[str, float]] = {
    "flash": _BYTES,
    "arena": _BYTES,
    "multiply_adds": _COUNTS,
    "max_drop": {"": 1, "%": 0.01},
}
_HINTS = {
    "flash": "bytes, such as 256k or 262144",
    "arena": "bytes, such as 64k or 65536",
    "multiply_adds": "a count, such as 10M",
    "max_drop": "in the metric's own unit, such as 0.005, or in points of a hundred, such as 0.5%",
}
WORDS = {
    "drop": "drop of the metric",
    "flash": "flash bytes",
    "arena": "arena bytes",
    "multiply_adds": "multiply-adds",
}


@dataclass(frozen=True)
class Budgets:
    """The most that a network may cost; None: no limit.

    Attributes:
        max_drop: of the metric from the float network's, in the metric's unit.
        flash, arena: bytes.
        multiply_adds: for one example, in units of 8 by 8 bits.
    """

    max_drop: float | None = None
    flash: int | None = None
    arena: int | None = None
    multiply_adds: int | None = None

    @staticmethod
    def of(**limits: float | str | None) -> Budgets:
        """From numbers, or texts with units such as ``256k`` and ``0.5%``.

        Raises:
            ValueError: none is given, or one is not such a number.
        """
        asked: dict[str, Any] = {name: _read(name, value) for name, value in limits.items() if value is not None}
        if not asked:
            raise ValueError(f"nothing is asked: give at least one of {', '.join(limits)}")
        return Budgets(**asked)

    @property
    def of_resources(self) -> dict[str, int]:
        """The budgets for resources, by name."""
        return {name: getattr(self, name) for name in [*_UNITS][:3] if getattr(self, name) is not None}

    def excess(self, costs: Mapping[str, float | None], drop: float | None) -> dict[str, float]:
        """By how much costs exceed the budgets; costs within them are left out. A cost of None exceeds any budget."""
        excesses = {}
        for name, limit in self.of_resources.items():
            cost = costs.get(name)
            if cost is None or cost > limit:
                excesses[name] = float("inf") if cost is None else cost - limit
        if self.max_drop is not None and (drop is None or drop > self.max_drop + 1e-12):
            excesses["drop"] = float("inf") if drop is None else drop - self.max_drop
        return excesses

    def text(self) -> str:
        """All of them in words."""
        said = [f"{WORDS[name]} at most {limit:,}" for name, limit in self.of_resources.items()]
        return ", ".join(([f"{WORDS['drop']} at most {self.max_drop:g}"] if self.max_drop is not None else []) + said)


def _read(name: str, value: float | str) -> float:
    number, unit, units = -1.0, "", _UNITS[name]
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if match is not None:
        number, unit = float(match[1].replace(",", "").replace("_", "")), match[2]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    amount = number * units.get(unit, -1)
    if name == "max_drop" and 0 <= amount < float("inf"):
        return amount
    if name != "max_drop" and 1 <= amount < 2**63 and amount == int(amount):
        return int(amount)
    known = "" if unit in units else f" (the units are {', '.join(filter(None, units))})"
    raise ValueError(f"{name} must be {_HINTS[name]}, got {value!r}{known}")
