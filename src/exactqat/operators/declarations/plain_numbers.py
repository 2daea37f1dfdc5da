# SPDX-License-Identifier: Apache-2.0
"""Numbers and texts that users give, of whatever library, as plain Python; and as kernels and people see them."""

import operator as python_operator
import struct
import sys
from typing import Any, TypeVar

from exactqat.operators.declarations.dispatch import compiling

T = TypeVar("T")


def integer(value: Any) -> Any:
    """`value` as an int if it is one of any kind, else None; JAX's symbolic sizes stay what they are."""
    if isinstance(value, int):  # before anything that torch.compile cannot ask of a number that it holds symbolically
        return int(value)
    if hasattr(value, "dimension_as_value"):
        return value
    try:
        return python_operator.index(value)
    except Exception:  # arrays, tracers and tensors each refuse in their own way
        pass
    if isinstance(value, str | bytes | bytearray) or getattr(value, "shape", ()) != ():
        return None
    try:
        whole = int(value)
        return whole if whole == value else None
    except Exception:
        return None


def text(value: T) -> T | str:
    """Decodes `value` if it is bytes; other values are returned unchanged."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def written(value: Any) -> str:
    """A number as people write it: no more digits than its dtype (or float32, if it came from there) distinguishes."""
    if compiling():
        return str(value)
    number = float(value.reshape(()) if hasattr(value, "reshape") else value)
    text = repr(number)
    try:
        of_float32 = struct.unpack("f", struct.pack("f", number))[0] == number
    except OverflowError:
        return text
    if not of_float32 or (isinstance(value, float) and len(text) <= 12):
        return text
    shorter = (f"{number:.{digits}g}" for digits in range(1, 10))
    return next(short for short in shorter if struct.unpack("f", struct.pack("f", float(short)))[0] == number)


FLOAT32_LIMIT = 2.0**128 - 2.0**103  # from here on float32 rounds to infinity


def rounded(dtype: str, value: float) -> float:
    """A number as the kernels see it: rounded to the dtype they compute in, with denormals flushed to 0.

    A compiler's symbol stays as it is; the kernel's call checks the number.
    """
    if dtype != "float64" and not compiling() and isinstance(value, float | int):
        value = struct.unpack("f", struct.pack("f", value))[0]
    smallest_normal = sys.float_info.min if dtype == "float64" else 2.0**-126
    return 0.0 if abs(value) < smallest_normal else value
