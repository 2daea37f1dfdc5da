# SPDX-License-Identifier: Apache-2.0
"""What a network may cost: numbers with units, and by how much costs exceed them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

_NUMBER = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z%]*)\s*")
# For memory a k is 1,024, as in data sheets; for counts it is 1,000.
_BYTES = {
    "": 1,
    "B": 1,
    **dict.fromkeys(("k", "K", "kB", "KB", "KiB"), 2**10),
    **dict.fromkeys(("M", "MB", "MiB"), 2**20),
}
_COUNTS = {"": 1, **dict.fromkeys(("k", "K"), 10**3), "M": 10**6, "G": 10**9}
_UNITS = {"flash": _BYTES, "arena": _BYTES, "multiply_adds": _COUNTS, "cycles": _COUNTS}
_HINTS = {
    "flash": "bytes, such as 256k or 262144",
    "arena": "bytes, such as 64k or 65536",
    "multiply_adds": "a count, such as 10M",
    "cycles": "a count, such as 500k",
    "max_drop": "in the metric's own unit, such as 0.005, or in points of a hundred, such as 0.5%",
}
WORDS = {
    "drop": "drop of the metric",
    "flash": "flash bytes",
    "arena": "arena bytes",
    "multiply_adds": "multiply-adds",
    "cycles": "cycles",
}


@dataclass(frozen=True)
class Budgets:
    """The most that a network may cost; None: no limit.

    Attributes:
        max_drop: of the metric from the float network's, in the metric's unit.
        flash, arena: bytes.
        multiply_adds: for one example, in units of 8 by 8 bits.
        cycles: for one example, as estimated by Vela.
    """

    max_drop: float | None = None
    flash: int | None = None
    arena: int | None = None
    multiply_adds: int | None = None
    cycles: int | None = None

    @staticmethod
    def of(**given: Any) -> Budgets:
        """From numbers, or texts with units such as ``256k`` and ``0.5%``.

        Raises:
            ValueError: none is given, or one is not such a number.
        """
        made: dict[str, Any] = {name: None if value is None else _read(name, value) for name, value in given.items()}
        if all(value is None for value in made.values()):
            raise ValueError(
                f"nothing is asked: give at least one of {', '.join(each.name for each in fields(Budgets))}"
            )
        return Budgets(**made)

    @property
    def of_resources(self) -> dict[str, int]:
        """The budgets for resources, by name."""
        return {name: getattr(self, name) for name in _UNITS if getattr(self, name) is not None}

    def excess(self, costs: Mapping[str, float | None], drop: float | None) -> dict[str, float]:
        """By how much costs exceed the budgets; costs within them are left out. A cost of None exceeds any budget."""
        found = {}
        for name, limit in self.of_resources.items():
            cost = costs.get(name)
            if cost is None or cost > limit:
                found[name] = float("inf") if cost is None else cost - limit
        if self.max_drop is not None and (drop is None or drop > self.max_drop + 1e-12):
            found["drop"] = float("inf") if drop is None else drop - self.max_drop
        return found

    def text(self) -> str:
        """All of them in words."""
        said = [f"{WORDS[name]} at most {limit:,}" for name, limit in self.of_resources.items()]
        return ", ".join(([f"{WORDS['drop']} at most {self.max_drop:g}"] if self.max_drop is not None else []) + said)


def _read(name: str, value: Any) -> float | int:
    wrong = ValueError(f"{name} must be {_HINTS[name]}, got {value!r}{_why(name, value)}")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise wrong
    unit = ""
    if isinstance(value, str):
        found = _NUMBER.fullmatch(value)
        if found is None:
            raise wrong
        number, unit = float(found[1].replace(",", "").replace("_", "")), found[2]
    else:
        number = float(value)
    if name == "max_drop":
        if unit not in ("", "%") or not 0 <= number < float("inf"):
            raise wrong
        return number / 100 if unit == "%" else number
    if unit not in _UNITS[name]:
        raise wrong
    number *= _UNITS[name][unit]
    if not (1 <= number < 2**63) or number != int(number):
        raise wrong
    return int(number)


def _why(name: str, value: Any) -> str:
    """What is probably meant, in words."""
    found = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return ""
    unit = found[2]
    if name in ("flash", "arena") and unit in ("kb", "Kb", "mb", "Mb", "b", "kbit", "Mbit"):
        return f" ({unit} may be bits: write k or M for bytes)"
    if unit == "%" and name != "max_drop":
        return " (no share of anything)"
    if name in ("multiply_adds", "cycles") and unit in _BYTES:
        return " (they are counted, not measured in bytes)"
    if name == "max_drop":
        return f" (the metric has no {unit})" if unit else ""
    return f" (the units are {', '.join(filter(None, _UNITS[name]))})" if unit else ""


__all__ = ["WORDS", "Budgets"]
