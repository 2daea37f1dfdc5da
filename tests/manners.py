# SPDX-License-Identifier: Apache-2.0
"""The forms in which people hand over arguments: each argument of each raw operator in each of them.

`manners()` is the table. `tests/goldens/manners.json` holds what TensorFlow makes of every row, "beside NumPy arrays,
beside its own tensors": "same" (as the plain call), "other" (another result) or "refused". Written by

    python tests/campaigns/record_goldens.py --only manners
"""

from __future__ import annotations

import array
import decimal
import fractions
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

ToArray = Callable[[np.ndarray], Any]  # makes an array of a framework


@dataclass(frozen=True)
class Manner:
    """One argument of a plain call in another form."""

    op: str
    argument: str
    form: str
    plain: dict[str, Any]  # the plain call that means the same; arrays are NumPy's
    make: Callable[[ToArray], Any]

    @property
    def name(self) -> str:
        return f"{self.op}/{self.argument}/{self.form}"


def _counted(*shape: int) -> np.ndarray:
    """Small integers, so that every dtype holds them."""
    return (np.arange(np.prod(shape)) % 13 - 6).astype(np.float32).reshape(shape)


def _vector(value: float) -> np.ndarray:
    return np.full(3, value, np.float32)


def _scalar(value: float) -> np.ndarray:
    return np.array(value, np.float32)


_BITS = {"num_bits": 8, "narrow_range": False}
_WINDOW = {"strides": (1, 1, 1, 1), "padding": "SAME", "data_format": "NHWC", "dilations": (1, 1, 1, 1)}
_GRADIENTS = {"gradients": _counted(4, 3)}
_STATISTICS = {"mean": _vector(1), "variance": _vector(4)}
_NORM = {"x": _counted(1, 3, 2, 3), "scale": _vector(2), "offset": _vector(1), **_STATISTICS}
_NORM_GRADIENT = {"y_backprop": _counted(1, 3, 2, 3), "x": _counted(1, 3, 2, 3) + 1, "scale": _vector(2)}
_RESERVES = {"reserve_space_1": _vector(1), "reserve_space_2": _vector(4)}

PLAIN: dict[str, dict[str, Any]] = {}
for _kind, _range in (
    ("Args", {"min": -2.0, "max": 2.0}),
    ("Vars", {"min": _scalar(-1), "max": _scalar(1)}),
    ("VarsPerChannel", {"min": _vector(-1), "max": _vector(1)}),
):
    PLAIN[f"FakeQuantWithMinMax{_kind}"] = {"inputs": _counted(4, 3), **_range, **_BITS}
    PLAIN[f"FakeQuantWithMinMax{_kind}Gradient"] = {**_GRADIENTS, "inputs": _counted(4, 3), **_range, **_BITS}
_DATA = {"input": _counted(4, 3)}
_BOUNDS = {"input_min": _scalar(-1), "input_max": _scalar(1)}
_QUANTIZED = {"signed_input": True, "num_bits": 8, "range_given": True, "narrow_range": False}
for _version in ("V2", "V4"):
    PLAIN[f"QuantizeAndDequantize{_version}"] = {
        **_DATA,
        **_BOUNDS,
        **_QUANTIZED,
        "round_mode": "HALF_UP",
        "axis": -1,
    }
PLAIN["QuantizeAndDequantizeV3"] = {
    **_DATA,
    "input_min": _vector(-1),
    "input_max": _vector(1),
    **_QUANTIZED,
    "axis": 1,
}
PLAIN["QuantizeAndDequantizeV4Grad"] = {**_GRADIENTS, **_DATA, **_BOUNDS, "axis": -1}
for _version in ("", "V2", "V3"):
    PLAIN[f"FusedBatchNorm{_version}"] = {
        **_NORM,
        "epsilon": 1.0,
        "exponential_avg_factor": 0.5,
        "data_format": "NHWC",
        "is_training": True,
    }
    PLAIN[f"FusedBatchNormGrad{_version}"] = {
        **_NORM_GRADIENT,
        **_RESERVES,
        **({"reserve_space_3": np.zeros(0, np.float32)} if _version == "V3" else {}),
        "epsilon": 1.0,
        "data_format": "NHWC",
        "is_training": True,
    }
PLAIN["DepthwiseConv2dNative"] = {"input": _counted(2, 5, 4, 3), "filter": _counted(3, 3, 3, 2), **_WINDOW}
PLAIN["DepthwiseConv2dNativeBackpropInput"] = {
    "input_sizes": (2, 5, 4, 3),
    "filter": _counted(3, 3, 3, 2),
    "out_backprop": _counted(2, 5, 4, 6),
    **_WINDOW,
}
PLAIN["DepthwiseConv2dNativeBackpropFilter"] = {
    "input": _counted(2, 5, 4, 3),
    "filter_sizes": (3, 3, 3, 2),
    "out_backprop": _counted(2, 5, 4, 6),
    **_WINDOW,
}

# Attributes without a default.
REQUIRED = ("input_sizes", "filter_sizes", "strides", "padding")
REQUIRED_OF_ONE = ("QuantizeAndDequantizeV3", "num_bits")
# Ranges of several values without an axis end TensorFlow's process.
DEADLY_DEFAULT = ("QuantizeAndDequantizeV3", "axis")
DTYPES = ("float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")


class Column:
    """An object of another library that NumPy makes an array of."""

    def __init__(self, values: np.ndarray):
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self.values, dtype)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _of_operand(v: np.ndarray) -> Iterator[tuple[str, np.ndarray, Callable[[ToArray], Any]]]:
    yield "list", v, lambda to: v.tolist()
    yield "tuple", v, lambda to: _tuples(v.tolist())
    yield "list_of_integers", v, lambda to: v.astype(int).tolist()
    yield "numpy", v, lambda to: v
    yield "numpy_reversed_strides", v, lambda to: v[::-1].copy()[::-1] if v.ndim else v
    yield "numpy_big_endian", v, lambda to: v.astype(">f4")
    yield "array", v, lambda to: to(v)
    yield "column", v, lambda to: Column(v)
    yield "text", v, lambda to: "1"
    for dtype in DTYPES:
        held = abs(v) if dtype == "uint8" else v.astype(dtype)
        yield dtype, held.astype(np.float32), lambda to, held=held, dtype=dtype: held.astype(dtype)
    if v.ndim:
        yield "tuple_of_arrays", v, lambda to: tuple([to(row) for row in v])
        yield "list_of_arrays", v, lambda to: [to(row) for row in v]
        yield "tuple_of_numpy", v, lambda to: tuple(v)
        yield "arrays_and_lists", v, lambda to: [to(v[0]), *v[1:].tolist()] if len(v) else []
    if v.ndim == 1:
        yield "standard_array", v, lambda to: array.array("f", v)
        yield "list_of_scalars", v, lambda to: [to(np.array(x)) for x in v]
    if v.ndim == 0:
        for form in (float, int, np.float64, np.float32, np.float16, np.int64):
            yield form.__name__, v, lambda to, form=form: form(v)


def _of_attribute(v: Any) -> Iterator[tuple[str, Callable[[ToArray], Any]]]:
    if isinstance(v, bool):
        yield "text", lambda to: str(v)
        yield "int", lambda to: int(v)
        yield "array", lambda to: to(np.array(v))
        yield "numpy_bool", lambda to: np.bool_(v)
    elif isinstance(v, int):
        for form in (float, np.float32, np.float64, np.int64, np.int8, fractions.Fraction, decimal.Decimal, np.array):
            yield form.__name__, lambda to, form=form: form(v)
        yield "array_of_float", lambda to: np.array(float(v))
        yield "array", lambda to: to(np.array(v))
        yield "array_of_one", lambda to: np.array([v])
        yield "half", lambda to: v + 0.5
        yield "text", lambda to: str(v)
        yield "bytes", lambda to: str(v).encode()
        yield "uint8", lambda to: np.uint8(abs(v))
        yield "int32", lambda to: np.int32(v)
        yield "complex", lambda to: complex(v)
        if v in (0, 1):
            yield "bool", lambda to: bool(v)
            yield "numpy_bool", lambda to: np.bool_(v)
    elif isinstance(v, float):
        for form in (np.float32, np.float64, np.float16, fractions.Fraction, *((int, np.int64) if v == int(v) else ())):
            yield form.__name__, lambda to, form=form: form(v)
        yield "array", lambda to: to(np.array(v, np.float32))
        yield "text", lambda to: str(v)
    elif isinstance(v, str):
        yield "bytes", lambda to: v.encode()
        yield "bytes_", lambda to: np.bytes_(v.encode())
        yield "str_", lambda to: np.str_(v)
        yield "lower_case", lambda to: v.lower()
        yield "lower_case_bytes", lambda to: v.lower().encode()
    else:
        yield "list", lambda to: list(v)
        yield "floats", lambda to: [float(x) for x in v]
        yield "halves", lambda to: [x + 0.5 for x in v]
        yield "numpy_integers", lambda to: [np.int64(x) for x in v]
        yield "numpy_floats", lambda to: [np.float32(x) for x in v]
        yield "arrays", lambda to: [np.array(x) for x in v]
        yield "numpy", lambda to: np.array(v)
        yield "numpy_of_floats", lambda to: np.array(v, np.float32)
        yield "texts", lambda to: [str(x) for x in v]
        yield "generator", lambda to: (x for x in v)
        yield "array", lambda to: to(np.array(v))
        if all(x in (0, 1) for x in v):
            yield "bools", lambda to: [bool(x) for x in v]


def manners(op: str) -> Iterator[Manner]:
    """Each argument of an operator in each form."""
    for argument, value in PLAIN[op].items():
        if isinstance(value, np.ndarray):
            for form, held, make in _of_operand(value):
                yield Manner(op, argument, form, PLAIN[op] | {argument: held}, make)
        else:
            for form, make in _of_attribute(value):
                yield Manner(op, argument, form, PLAIN[op], make)
            without = {name: PLAIN[op][name] for name in PLAIN[op] if name != argument}
            required = argument in REQUIRED or (op, argument) == REQUIRED_OF_ONE
            if (op, argument) != DEADLY_DEFAULT:
                yield Manner(op, argument, "none", PLAIN[op] if required else without, lambda to: None)


def arguments(manner: Manner, to_array: ToArray) -> dict[str, Any]:
    """Those of the call: all other operands are arrays of the framework."""
    plain = {k: to_array(v) if isinstance(v, np.ndarray) else v for k, v in manner.plain.items()}
    return plain | {manner.argument: manner.make(to_array)}


def outcome(call: Callable[[], list[np.ndarray]], expected: list[np.ndarray], refused: tuple[type, ...]) -> str:
    """What comes of a call whose results should be `expected`."""
    try:
        results = call()
    except refused:
        return "refused"
    same = all(a.dtype == b.dtype and a.shape == b.shape for a, b in zip(results, expected, strict=True))
    return (
        "same" if same and all(a.tobytes() == b.tobytes() for a, b in zip(results, expected, strict=True)) else "other"
    )
