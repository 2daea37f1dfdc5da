# SPDX-License-Identifier: Apache-2.0
"""Comparisons of results by their bits, and of sums by their distance from the exact sum.

Equality here is stricter than ``==``: +0 and -0 differ, dtypes and shapes must agree. Only NaNs are interchangeable,
because neither TensorFlow nor IEEE 754 promises their payload or sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["assert_same_bits", "assert_within_ulp", "differing"]


def differing(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Boolean array: where two arrays of one dtype and shape differ in bits, any NaN being equal to any NaN."""
    different = _unsigned(actual) != _unsigned(expected)
    if actual.dtype.kind in "iub":
        return different
    return different & ~(np.isnan(actual) & np.isnan(expected))


def assert_same_bits(
    actual: np.ndarray,
    expected: np.ndarray,
    *,
    what: str,
    operands: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Fails unless the two arrays agree in dtype, shape and every bit (NaNs apart).

    ``what`` names the result in the message. ``operands`` are shown at the first differing index as far as their
    shapes say which of their elements belongs to it: equal shape, rank 0, or one value per last-axis position.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    different = differing(actual, expected)
    if not different.any():
        return
    index = tuple(int(i) for i in np.argwhere(different)[0])
    lines = [
        f"{what}: {int(different.sum())} of {actual.size} values differ, first at {index}",
        f"  expected {_show(expected[index])}",
        f"  got      {_show(actual[index])}",
    ]
    for name, operand in (operands or {}).items():
        operand = np.asarray(operand)
        if operand.shape == actual.shape:
            lines.append(f"  {name} there is {_show(operand[index])}")
        elif operand.ndim == 0:
            lines.append(f"  {name} is {_show(operand[()])}")
        elif operand.ndim == 1 and actual.ndim > 0 and operand.shape[0] == actual.shape[-1]:
            lines.append(f"  {name} there is {_show(operand[index[-1]])}")
    raise AssertionError("\n".join(lines))


def assert_within_ulp(actual: np.ndarray, exact: np.ndarray, ulp: float = 1, *, what: str = "result") -> None:
    """Fails unless each value of ``actual`` lies within ``ulp`` units in the last place of ``exact``.

    ``exact`` is float64; the unit is the spacing of ``actual``'s dtype at the exact value. NaN must meet NaN. An exact
    value that lies beyond the dtype's range may come out as the infinity of its sign or as a value within ``ulp``.
    """
    actual, exact = np.asarray(actual), np.asarray(exact, np.float64)
    assert actual.shape == exact.shape, f"{what}: shape {actual.shape}, expected {exact.shape}"
    limits = np.finfo(actual.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        exponent = np.frexp(exact)[1] - 1
        unit = np.ldexp(1.0, np.maximum(exponent, limits.minexp) - limits.nmant)
        distance = np.abs(actual.astype(np.float64) - exact)
        close = distance <= ulp * unit
        rounded = exact.astype(actual.dtype)
    good = close | (np.isinf(rounded) & (actual == rounded)) | (np.isnan(actual) & np.isnan(exact))
    if good.all():
        return
    index = tuple(int(i) for i in np.argwhere(~good)[0])
    raise AssertionError(
        f"{what}: {int((~good).sum())} of {actual.size} values are more than {ulp} ulp off, first at {index}\n"
        f"  exact {exact[index]!r}, rounded {_show(rounded[index])}\n"
        f"  got   {_show(actual[index])}, {distance[index] / unit[index]:.3f} ulp away"
    )


def _unsigned(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(array.shape).view(f"u{array.dtype.itemsize}")


def _show(scalar: Any) -> str:
    value = np.asarray(scalar)
    digits = 2 * value.dtype.itemsize
    return f"{value.item()!r} (0x{int(_unsigned(value)):0{digits}x})"
