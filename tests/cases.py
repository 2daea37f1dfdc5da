# SPDX-License-Identifier: Apache-2.0
"""The one list of operator calls that drives the tests of correctness, gradients and frontends, and the benchmarks.

A case is a call of a raw TensorFlow operator: arrays by operand name, everything else by attribute name. The data are
made of exact arithmetic on PCG64's raw output, so they are the same with every NumPy and on every machine, and each
case's data depend on its own name only. Nothing is generated before it is asked for.

Tags:
    edge                special values or degenerate ranges and shapes
    empty               some result has no elements, or all its terms are missing
    sum                 long or awkward sums
    float64             operands are float64
    dilated, NCHW       depthwise with dilations, channels before the spatial dimensions
    tolerance           TensorFlow computes this case in another order or without fused multiply-add, so its bits are
                        not what is promised (depthwise only)
    onednn              only TensorFlow's oneDNN kernels accept this call
    eigen               TensorFlow's oneDNN kernels get this call wrong; its Eigen kernels do not
    deviation           `expected` holds documented results that differ from TensorFlow's
    beyond_tensorflow   TensorFlow has no answer at all
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

__all__ = ["BITWISE", "FAMILIES", "RESULTS", "BadCall", "Case", "bad_calls", "cases", "family_of"]

# Every output of every operator, in TensorFlow's order, with the kind of promise that is made about it:
#   bitwise      TensorFlow's bits
#   sum          within 1 ulp of the exact sum, and NaN or infinite where the formula is
#   accuracy     an error against exact arithmetic that is at most TensorFlow's, or half an ulp of the largest result
#   elements     an error that is at most that of the roundings of its formula from exact coefficients on, and over all
#                recorded calls mean and largest errors below TensorFlow's
#   placeholder  carries nothing on a CPU: the zero or the empty array that TensorFlow's Eigen kernels return
RESULTS: dict[str, dict[str, str]] = {
    "FakeQuantWithMinMaxArgs": {"outputs": "bitwise"},
    "FakeQuantWithMinMaxArgsGradient": {"backprops": "bitwise"},
    "FakeQuantWithMinMaxVars": {"outputs": "bitwise"},
    "FakeQuantWithMinMaxVarsGradient": {
        "backprops_wrt_input": "bitwise",
        "backprop_wrt_min": "sum",
        "backprop_wrt_max": "sum",
    },
    "FakeQuantWithMinMaxVarsPerChannel": {"outputs": "bitwise"},
    "FakeQuantWithMinMaxVarsPerChannelGradient": {
        "backprops_wrt_input": "bitwise",
        "backprop_wrt_min": "sum",
        "backprop_wrt_max": "sum",
    },
    "QuantizeAndDequantize": {"output": "bitwise"},
    "QuantizeAndDequantizeV2": {"output": "bitwise"},
    "QuantizeAndDequantizeV3": {"output": "bitwise"},
    "QuantizeAndDequantizeV4": {"output": "bitwise"},
    "QuantizeAndDequantizeV4Grad": {
        "input_backprop": "bitwise",
        "input_min_backprop": "bitwise",
        "input_max_backprop": "bitwise",
    },
    **{
        f"FusedBatchNorm{version}": {
            "y": "elements",
            "batch_mean": "accuracy",
            "batch_variance": "accuracy",
            "reserve_space_1": "accuracy",
            "reserve_space_2": "accuracy",
            **({"reserve_space_3": "placeholder"} if version == "V3" else {}),
        }
        for version in ("", "V2", "V3")
    },
    **{
        f"FusedBatchNormGrad{version}": {
            "x_backprop": "elements",
            "scale_backprop": "accuracy",
            "offset_backprop": "accuracy",
            **dict.fromkeys(
                ("reserve_space_4", "reserve_space_5") if version == "V3" else ("reserve_space_3", "reserve_space_4"),
                "placeholder",
            ),
        }
        for version in ("", "V2", "V3")
    },
    "DepthwiseConv2dNative": {"output": "bitwise"},
    "DepthwiseConv2dNativeBackpropInput": {"output": "bitwise"},
    "DepthwiseConv2dNativeBackpropFilter": {"output": "accuracy"},
}

BITWISE: dict[str, tuple[str, ...]] = {
    op: tuple(output for output, promise in results.items() if promise == "bitwise") for op, results in RESULTS.items()
}

FAMILIES: dict[str, tuple[str, ...]] = {
    "fake_quant": tuple(op for op in RESULTS if op.startswith("FakeQuant")),
    "quantize_and_dequantize": tuple(op for op in RESULTS if op.startswith("QuantizeAndDequantize")),
    "fused_batch_norm": tuple(op for op in RESULTS if op.startswith("FusedBatchNorm")),
    "depthwise_conv2d": tuple(op for op in RESULTS if op.startswith("DepthwiseConv2d")),
}


@dataclass(frozen=True, eq=False)
class Case:
    """One call. `expected` holds the documented value of each output that knowingly differs from TensorFlow's."""

    name: str
    op: str
    operands: Mapping[str, np.ndarray]
    attributes: Mapping[str, Any]
    tags: frozenset[str] = frozenset()
    expected: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class BadCall:
    """A call that must be refused before anything is computed.

    `aborts`: TensorFlow does not refuse it but ends the process (or reads out of bounds), so it is not run there.
    `accepted`: TensorFlow takes it without complaint; why exactqat does not.
    """

    name: str
    op: str
    operands: Mapping[str, np.ndarray]
    attributes: Mapping[str, Any]
    error: type[Exception] = ValueError
    aborts: bool = False
    accepted: str = ""

    def __repr__(self) -> str:
        return self.name


def family_of(op: str) -> str:
    """The family of a raw operator name; it names the golden file and the file of the operator in every room."""
    return next(family for family, ops in FAMILIES.items() if op in ops)


def cases(
    op: str | None = None, tags: str | Collection[str] | None = None, without: str | Collection[str] | None = None
) -> list[Case]:
    """The cases of a raw operator or a family (all if None) that carry all of `tags` and none of `without`."""
    if op is not None and op not in RESULTS and op not in FAMILIES:
        raise ValueError(f"op must be a raw operator or one of {', '.join(FAMILIES)}, got {op!r}")
    wanted, unwanted = _set(tags), _set(without)
    families = [op] if op in FAMILIES else list(FAMILIES) if op is None else [family_of(op)]
    return [
        case
        for family in families
        for case in _family(family)
        if (op in FAMILIES or op in (None, case.op)) and wanted <= case.tags and not unwanted & case.tags
    ]


def bad_calls(op: str | None = None) -> list[BadCall]:
    """The calls of a raw operator (all if None) that must raise."""
    return [call for call in _bad_calls() if op in (None, call.op)]


def _set(tags: str | Collection[str] | None) -> frozenset[str]:
    return frozenset([tags] if isinstance(tags, str) else tags or ())


@lru_cache
def _family(family: str) -> tuple[Case, ...]:
    generators: dict[str, Callable[[], Iterator[Case]]] = {
        "fake_quant": _fake_quant,
        "quantize_and_dequantize": _quantize_and_dequantize,
        "fused_batch_norm": _fused_batch_norm,
        "depthwise_conv2d": _depthwise_conv2d,
    }
    generated = tuple(generators[family]())
    names = [case.name for case in generated]
    duplicates = {name for name in names if names.count(name) > 1}
    if duplicates:
        raise ValueError(f"case names must be unique, repeated: {sorted(duplicates)}")
    return generated


def _case(
    op: str,
    description: str,
    operands: dict[str, np.ndarray],
    attributes: dict[str, Any],
    tags: str = "",
    expected: dict[str, np.ndarray] | None = None,
) -> Case:
    labels = set(tags.split())
    if expected and "beyond_tensorflow" not in labels:
        labels.add("deviation")
    for array in operands.values():
        array.flags.writeable = False
    return Case(f"{op}/{description}", op, operands, attributes, frozenset(labels), expected or {})


# Data


class Data:
    """A stream of numbers that depends on a name only. Every value is made exactly, then rounded once to the dtype."""

    def __init__(self, name: str):
        self._generator = np.random.PCG64(zlib.crc32(name.encode()))

    def fractions(self, size: int) -> np.ndarray:
        """float64 multiples of 2**-30 in [0, 1)."""
        return (self._generator.random_raw(size) >> np.uint64(34)).astype(np.float64) * 2.0**-30

    def uniform(self, shape: tuple[int, ...], low: float, high: float, dtype: Any = np.float32) -> np.ndarray:
        return (low + (high - low) * self.fractions(_size(shape))).astype(dtype).reshape(shape)

    def normal(
        self, shape: tuple[int, ...], mean: float = 0, deviation: float = 1, dtype: Any = np.float32
    ) -> np.ndarray:
        """Nearly normal: the sum of twelve uniform numbers."""
        total = self.fractions(12 * _size(shape)).reshape(12, -1).sum(axis=0) - 6
        return (mean + deviation * total).astype(dtype).reshape(shape)

    def wide(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """Signed numbers of twelve bits over twenty binary orders of magnitude: hard to add, easy to store."""
        size = _size(shape)
        mantissa = np.floor(self.fractions(size) * 8192) - 4096
        exponent = np.floor(self.fractions(size) * 20).astype(np.int64) - 22
        return np.ldexp(mantissa, exponent).astype(dtype).reshape(shape)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _scalar(value: float, dtype: Any = np.float32) -> np.ndarray:
    return np.array(value, dtype)


def _around(points: np.ndarray) -> np.ndarray:
    """Each point with the floats just below and just above it."""
    limit = points.dtype.type(np.inf)
    return np.stack([np.nextafter(points, -limit), points, np.nextafter(points, limit)], axis=-1).reshape(-1)


def _special(dtype: Any = np.float32) -> np.ndarray:
    """Values that kernels get wrong: not finite, zeros of both signs, denormals, the extreme normals, ties."""
    limits = np.finfo(dtype)
    tiny, largest = float(limits.tiny), float(limits.max)
    smallest = float(limits.smallest_subnormal)
    positive = [np.inf, 0.0, smallest, tiny / 2, tiny, largest, 0.5, 1.0, 1.5, 2.5, 127.0, 128.0]
    return np.array([np.nan, *positive, *(-value for value in positive)], dtype)


# FakeQuant

# Ranges by what they are; those with `min < max` (denormals being zero) serve FakeQuantWithMinMaxArgs too.
RANGES: dict[str, tuple[float, float]] = {
    "straddling": (-1.0, 1.0),
    "lopsided": (-0.001, 1000.0),
    "half_integer_zero_point": (-0.5, 2.5),
    "from_zero": (0.0, 6.0),
    "from_negative_zero": (-0.0, 6.0),
    "to_zero": (-6.0, 0.0),
    "positive": (0.5, 1.0),
    "positive_far": (1000.0, 1001.0),
    "negative": (-1.0, -0.5),
    "negative_far": (-1001.0, -1000.0),
    "one_ulp_wide": (1.0, 1.0000001192092896),
    "nearly_from_zero": (-1e-10, 1.0),
    "tiny": (-1e-30, 2e-30),
    "tiny_step": (-1e-37, 1.2e-37),
    "smallest_normal": (0.0, 1.1754943508222875e-38),
    "huge": (-1e38, 1.5e38),
    "huge_positive": (1e38, 3e38),
    "overflowing": (-3e38, 3e38),
    "infinite_min": (-np.inf, 1.0),
    "infinite_max": (-1.0, np.inf),
    "infinite": (-np.inf, np.inf),
    "zero": (0.0, 0.0),
    "negative_zero": (-0.0, -0.0),
    "denormal": (-1e-40, 1e-40),
    "denormal_max": (0.0, 1e-40),
    "point": (1.5, 1.5),
    "negative_point": (-2.0, -2.0),
    "infinite_point": (np.inf, np.inf),
    "reversed": (1.0, -1.0),
    "reversed_positive": (2.0, 1.0),
    "reversed_negative": (-1.0, -2.0),
    "nan_min": (np.nan, 1.0),
    "nan_max": (-1.0, np.nan),
    "nan": (np.nan, np.nan),
    "nan_max_and_zero": (0.0, np.nan),
}

_TINY = float(np.finfo(np.float32).tiny)


def _flushed(value: float) -> float:
    return value if abs(value) >= _TINY or np.isnan(value) else 0.0


def _grid_probes(low: float, high: float, num_bits: int, narrow_range: bool, dtype: Any = np.float32) -> np.ndarray:
    """Grid points of the quantizer, the middles between them, the bounds, and the floats next to all of these.

    Degenerate ranges have no grid: what is not finite is left out.
    """
    lowest, highest = int(narrow_range), 2**num_bits - 1
    with np.errstate(all="ignore"):
        scale = np.float64((dtype(high) - dtype(low)) / dtype(highest - lowest))
        zero_point = np.clip(np.round(lowest - np.float64(low) / scale), lowest, highest)
        steps = [lowest, lowest + 1, highest - 1, highest, zero_point - 1, zero_point, zero_point + 1]
        steps += [lowest + (highest - lowest) * k // 5 for k in range(1, 5)]
        codes = np.unique(np.array(steps, np.float64))
        middles = (codes + 0.5 - zero_point) * scale
        grid = np.concatenate([(codes - zero_point) * scale, middles, [low, high]]).astype(dtype)
        probes = _around(grid[np.isfinite(grid)])
    return np.unique(probes[np.isfinite(probes)])


def _probes(
    data: Data, low: float, high: float, num_bits: int, narrow_range: bool, dtype: Any = np.float32
) -> np.ndarray:
    """Grid points and halves, special values, and values spread over the range and a quarter beyond it."""
    edges = _special(dtype)
    finite = [bound for bound in (low, high) if np.isfinite(bound)] or [1.0]
    width = max(min(max(finite) - min(finite), 1e38), abs(finite[0]) / 1e6)
    spread = data.uniform((24,), min(finite) - width / 4, max(finite) + width / 4, dtype)
    return np.concatenate([_grid_probes(low, high, num_bits, narrow_range, dtype), edges, spread])


def _incoming_gradients(data: Data, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Finite gradients with some zeros of both signs and denormals among them."""
    gradients = data.normal(shape, dtype=dtype).reshape(-1)
    denormal = float(np.finfo(dtype).tiny) / 4
    for start, value in enumerate((0.0, -0.0, denormal, -denormal)):
        gradients[start::17] = value
    return gradients.reshape(shape)


def _with_nonfinite(gradients: np.ndarray, *values: float) -> np.ndarray:
    spoiled = gradients.copy()
    for start, value in enumerate(values):
        spoiled.reshape(-1)[start :: max(len(values) * 7, 1)] = value
    return spoiled


def _random_range(data: Data, kind: int) -> tuple[float, float]:
    """Float32 bounds of several magnitudes: by `kind` modulo 4 straddling zero, above, below, or reaching it."""
    a, b, c = (float(v) for v in data.fractions(3))
    unit = 2.0 ** (int(c * 12) - 6)
    low, high = [
        (-unit * (a + 0.05), unit * (b + 0.05)),
        (unit * (a + 0.05), unit * (a + b + 0.1)),
        (-unit * (a + b + 0.1), -unit * (a + 0.05)),
        (-unit * a, 0.0),
    ][kind % 4]
    return float(np.float32(low)), float(np.float32(high))


def _fake_quant() -> Iterator[Case]:
    yield from _fake_quant_args()
    yield from _fake_quant_vars()
    yield from _fake_quant_per_channel()
    yield from _fake_quant_float64()


def _both_args(
    name: str,
    inputs: np.ndarray,
    low: float,
    high: float,
    num_bits: int = 8,
    narrow_range: bool = False,
    tags: str = "",
    gradients: np.ndarray | None = None,
    forward: bool = True,
    backward: bool = True,
) -> Iterator[Case]:
    attributes: dict[str, Any] = {"min": low, "max": high, "num_bits": num_bits, "narrow_range": narrow_range}
    if forward:
        yield _case("FakeQuantWithMinMaxArgs", name, {"inputs": inputs}, attributes, tags)
    if backward:
        if gradients is None:
            gradients = _incoming_gradients(Data(f"args gradients {name}"), inputs.shape, inputs.dtype.type)
        operands = {"gradients": gradients, "inputs": inputs}
        yield _case("FakeQuantWithMinMaxArgsGradient", name, operands, attributes, tags)


def _both_vars(
    name: str,
    inputs: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    num_bits: int = 8,
    narrow_range: bool = False,
    tags: str = "",
    gradients: np.ndarray | None = None,
    forward: bool = True,
    backward: bool = True,
) -> Iterator[Case]:
    """FakeQuantWithMinMaxVars and its gradient; per channel if the bounds are vectors."""
    op = "FakeQuantWithMinMaxVars" + ("PerChannel" if low.ndim else "")
    attributes: dict[str, Any] = {"num_bits": num_bits, "narrow_range": narrow_range}
    if forward:
        yield _case(op, name, {"inputs": inputs, "min": low, "max": high}, attributes, tags)
    if backward:
        if gradients is None:
            gradients = _incoming_gradients(Data(f"{op} gradients {name}"), inputs.shape, inputs.dtype.type)
        operands = {"gradients": gradients, "inputs": inputs, "min": low, "max": high}
        yield _case(f"{op}Gradient", name, operands, attributes, tags)


def _fake_quant_args() -> Iterator[Case]:
    for num_bits in range(2, 17):
        for narrow_range in (False, True):
            name = f"bits_{num_bits}{'_narrow' * narrow_range}"
            data = Data(f"args {name}")
            low, high = (-6.0, 6.0) if num_bits % 2 else _random_range(data, num_bits // 2 + narrow_range)
            inputs = _probes(data, low, high, num_bits, narrow_range)
            yield from _both_args(name, inputs, low, high, num_bits, narrow_range, backward=num_bits in (2, 3, 8, 16))
    for range_name, (low, high) in RANGES.items():
        if _flushed(low) < _flushed(high):
            inputs = _probes(Data(f"args {range_name}"), low, high, 8, False)
            yield from _both_args(f"range_{range_name}", inputs, low, high, tags="edge")
            inputs = _grid_probes(low, high, 4, True)
            yield from _both_args(
                f"range_{range_name}_bits_4_narrow", inputs, low, high, 4, True, "edge", backward=False
            )
    tenths = np.arange(-65, 66).astype(np.float32) / np.float32(10)
    yield from _both_args("tenths", tenths, -6.0, 6.0, backward=False)
    # A range that is no float32 number: attributes are rounded to float32 first.
    yield from _both_args("inexact_bounds", Data("args inexact").uniform((40,), -0.3, 0.4), -0.1, 0.3)
    for shape in [(), (5,), (2, 3), (2, 3, 4), (2, 1, 3, 2), (2, 1, 3, 1, 2), (0,), (3, 0, 2)]:
        inputs = Data(f"args {shape}").uniform(shape, -7, 7)
        yield from _both_args(f"shape_{_name(shape)}", inputs, -6.0, 6.0, tags="empty" if 0 in shape else "")
    inputs = Data("args nonfinite").uniform((90,), -8, 8)
    gradients = _with_nonfinite(Data("args nonfinite gradients").normal((90,)), np.nan, np.inf, -np.inf)
    yield from _both_args("nonfinite_gradients", inputs, -6.0, 6.0, tags="edge", gradients=gradients, forward=False)


def _name(shape: tuple[int, ...]) -> str:
    return "x".join(str(length) for length in shape) if shape else "scalar"


def _fake_quant_vars() -> Iterator[Case]:
    for num_bits in range(2, 17):
        for narrow_range in (False, True):
            name = f"bits_{num_bits}{'_narrow' * narrow_range}"
            data = Data(f"vars {name}")
            low, high = (-6.0, 6.0) if num_bits % 2 else _random_range(data, num_bits // 2 + narrow_range)
            inputs = _probes(data, low, high, num_bits, narrow_range)
            bounds = _scalar(low), _scalar(high)
            yield from _both_vars(name, inputs, *bounds, num_bits, narrow_range, backward=num_bits in (2, 3, 8, 16))
    for range_name, (low, high) in RANGES.items():
        bounds = _scalar(low), _scalar(high)
        inputs = _probes(Data(f"vars {range_name}"), low, high, 8, False)
        yield from _both_vars(f"range_{range_name}", inputs, *bounds, tags="edge")
        inputs = np.concatenate([_grid_probes(low, high, 4, True), _special()[:5]])
        yield from _both_vars(f"range_{range_name}_bits_4_narrow", inputs, *bounds, 4, True, "edge", backward=False)
    tenths = np.arange(-65, 66).astype(np.float32) / np.float32(10)
    yield from _both_vars("tenths", tenths, _scalar(-6), _scalar(6), backward=False)
    for shape in [(), (5,), (2, 3), (2, 3, 4), (2, 1, 3, 2), (2, 1, 3, 1, 2), (0,), (3, 0, 2)]:
        inputs = Data(f"vars {shape}").uniform(shape, -7, 7)
        tags = "empty" if 0 in shape else ""
        yield from _both_vars(f"shape_{_name(shape)}", inputs, _scalar(-6), _scalar(6), tags=tags)
    for size in (7, 8, 9, 31, 32, 33, 63, 64, 65, 511, 512, 513, 4095, 4096, 4097):
        # Three quarters of the inputs lie outside the range, so that there is something to add on both sides.
        data = Data(f"vars size {size}")
        inputs = np.round(data.uniform((size,), -24, 24) * 8) / np.float32(8)
        bounds = _scalar(-6), _scalar(6)
        yield from _both_vars(
            f"size_{size}", inputs, *bounds, tags="sum", gradients=data.wide((size,)), forward=size < 600
        )
    for value_name, values in NONFINITE_GRADIENTS.items():
        data = Data(f"vars {value_name}")
        inputs = data.uniform((90,), -8, 8)
        gradients = _with_nonfinite(data.normal((90,)), *values)
        bounds = _scalar(-6), _scalar(6)
        yield from _both_vars(
            f"gradients_{value_name}", inputs, *bounds, tags="edge", gradients=gradients, forward=False
        )
    # One gradient that is not finite, on each side of the range and in it.
    for place, spot in {"below": -9.0, "inside": 0.0, "above": 9.0}.items():
        inputs = np.array([-8, spot, 8, 1], np.float32)
        for value_name, values in NONFINITE_GRADIENTS.items():
            gradients = np.array([1, values[0], 2, 3], np.float32)
            name = f"one_{value_name}_{place}"
            bounds = _scalar(-6), _scalar(6)
            yield from _both_vars(name, inputs, *bounds, tags="edge", gradients=gradients, forward=False)
    gradients = _with_nonfinite(_incoming_gradients(Data("vars zero range"), (60,)), np.nan, np.inf)
    inputs = np.resize(_special(), 60)
    name = "nonfinite_gradients_zero_range"
    yield from _both_vars(name, inputs, _scalar(0), _scalar(-0.0), tags="edge", gradients=gradients, forward=False)
    huge = np.array([3e38, 3e38, -2e38, 1e38], np.float32)
    inputs = np.array([-9, -9, 9, 0], np.float32)
    yield from _both_vars(
        "sum_overflows", inputs, _scalar(-6), _scalar(6), tags="edge sum", gradients=huge, forward=False
    )
    data = Data("vars long sum")
    inputs = np.round(data.uniform((50_000,), -4, 4) * 4) / np.float32(4)
    gradients = data.wide((50_000,))
    yield from _both_vars("long_sum", inputs, _scalar(-1), _scalar(1), tags="sum", gradients=gradients, forward=False)


NONFINITE_GRADIENTS: dict[str, tuple[float, ...]] = {
    "nan": (np.nan,),
    "infinity": (np.inf,),
    "negative_infinity": (-np.inf,),
    "infinities": (np.inf, -np.inf),
}


def _columns(data: Data, ranges: list[tuple[float, float]], num_bits: int, narrow_range: bool, rows: int) -> np.ndarray:
    """A `[rows, len(ranges)]` array whose columns hold the probes of their own range."""
    columns = []
    for low, high in ranges:
        probes = _probes(data, low, high, num_bits, narrow_range)
        start = int(data.fractions(1)[0] * len(probes))
        columns.append(np.resize(np.roll(probes, -start), rows))
    return np.stack(columns, axis=1)


def _fake_quant_per_channel() -> Iterator[Case]:
    def bounds(ranges: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
        return tuple(np.array(ranges, np.float32).reshape(-1, 2).T.copy())  # type: ignore[return-value]

    for num_bits in range(2, 17):
        for narrow_range in (False, True):
            name = f"bits_{num_bits}{'_narrow' * narrow_range}"
            data = Data(f"per channel {name}")
            ranges = [(-6.0, 6.0), *(_random_range(data, kind) for kind in range(4))]
            inputs = _columns(data, ranges, num_bits, narrow_range, 60)
            backward = num_bits in (2, 3, 8, 16)
            yield from _both_vars(name, inputs, *bounds(ranges), num_bits, narrow_range, backward=backward)
    ranges = list(RANGES.values())
    for num_bits, narrow_range in ((8, False), (4, True), (16, False)):
        inputs = _columns(Data(f"per channel ranges {num_bits}"), ranges, num_bits, narrow_range, 64)
        name = f"every_range_bits_{num_bits}{'_narrow' * narrow_range}"
        yield from _both_vars(name, inputs, *bounds(ranges), num_bits, narrow_range, tags="edge")
    for channels in (1, 3, 7, 8, 17, 33):
        data = Data(f"per channel {channels} channels")
        ranges = [_random_range(data, kind) for kind in range(channels)]
        inputs = _columns(data, ranges, 8, False, 23)
        yield from _both_vars(f"channels_{channels}", inputs, *bounds(ranges))
    for shape in [
        (5,),
        (2, 3),
        (2, 3, 4),
        (2, 2, 3, 7),
        (2, 1, 3, 1, 2),
        (2, 1, 2, 1, 2, 3),
        (0, 3),
        (2, 0, 3),
        (4, 0),
    ]:
        data = Data(f"per channel {shape}")
        ranges = [_random_range(data, 0) for _ in range(shape[-1])]
        inputs = data.uniform(shape, -4, 4)
        tags = "empty" if 0 in shape else ""
        yield from _both_vars(f"shape_{_name(shape)}", inputs, *bounds(ranges), tags=tags)
    for shape in [(64, 1), (65, 3), (513, 7), (130, 33), (9, 512)]:
        data = Data(f"per channel sums {shape}")
        ranges = [(-float(k % 5), float(k % 3) + 1.0) for k in range(shape[-1])]
        inputs = np.round(data.uniform(shape, -12, 12) * 8) / np.float32(8)
        gradients = data.wide(shape)
        name = f"size_{_name(shape)}"
        yield from _both_vars(name, inputs, *bounds(ranges), tags="sum", gradients=gradients, forward=False)
    for value_name, values in NONFINITE_GRADIENTS.items():
        data = Data(f"per channel {value_name}")
        inputs = data.uniform((20, 5), -8, 8)
        ranges = [(-6.0, 6.0), (-1.0, 1.0), (0.0, 0.0), (2.0, 4.0), (1.0, -1.0)]
        gradients = _with_nonfinite(data.normal((20, 5)), *values)
        name = f"gradients_{value_name}"
        yield from _both_vars(name, inputs, *bounds(ranges), tags="edge", gradients=gradients, forward=False)
    # One spoilt gradient per column, each column another side of the range: the other columns keep their sums.
    inputs = np.resize(np.array([-8, 8, 0], np.float32), (9, 4)).copy()
    gradients = np.ones((9, 4), np.float32)
    gradients[[0, 1, 2], [0, 1, 2]] = np.inf
    ranges = [(-6.0, 6.0)] * 4
    yield from _both_vars(
        "infinity_per_column", inputs, *bounds(ranges), tags="edge", gradients=gradients, forward=False
    )


def _fake_quant_float64() -> Iterator[Case]:
    """The same formulas in float64, which TensorFlow has no kernel for."""
    tags = "beyond_tensorflow float64"
    for num_bits, narrow_range in ((8, False), (4, True), (16, False)):
        data = Data(f"float64 {num_bits}")
        low, high = (-6.0, 6.0) if num_bits == 8 else _random_range(data, num_bits)
        inputs = _probes(data, low, high, num_bits, narrow_range, np.float64)
        name = f"float64_bits_{num_bits}{'_narrow' * narrow_range}"
        yield from _both_args(name, inputs, low, high, num_bits, narrow_range, tags)
        yield from _both_vars(
            name, inputs, _scalar(low, np.float64), _scalar(high, np.float64), num_bits, narrow_range, tags
        )
        inputs = np.stack([inputs, inputs / 3], axis=1)
        bounds = np.array([low, low / 3], np.float64), np.array([high, high / 2], np.float64)
        yield from _both_vars(name, inputs, *bounds, num_bits, narrow_range, tags)


# QuantizeAndDequantize


def _halves(low: float, high: float, num_bits: int, signed: bool, dtype: Any) -> np.ndarray:
    """Points on and halfway between the quantizer's steps for a range, with their neighbours."""
    lowest, highest = (-(2 ** (num_bits - 1)), 2 ** (num_bits - 1) - 1) if signed else (0, 2**num_bits - 1)
    bound = max(abs(low), abs(high)) or 1.0
    step = np.float64(bound) / max(abs(lowest), highest)
    codes = np.unique(np.array([lowest, lowest + 1, -2, -1, 0, 1, 2, highest // 2, highest - 1, highest], np.float64))
    points = np.concatenate([codes * step, (codes + 0.5) * step]).astype(dtype)
    return _around(points[np.isfinite(points)])


def _quantize_and_dequantize() -> Iterator[Case]:
    for dtype in (np.float32, np.float64):
        yield from _quantize_and_dequantize_v2(dtype)
        yield from _quantize_and_dequantize_v3(dtype)
        yield from _quantize_and_dequantize_v4(dtype)
        yield from _quantize_and_dequantize_v4_grad(dtype)
    yield from _quantize_and_dequantize_v1()
    yield from _quantize_and_dequantize_deviations()
    yield from _quantize_and_dequantize_beyond()


def _dtype_suffix(dtype: Any) -> tuple[str, str]:
    """What a dtype other than float32 adds to a case's name and tags."""
    name = np.dtype(dtype).name
    return ("", "") if dtype is np.float32 else (f"_{name}", name)


def _v2(
    name: str,
    data: np.ndarray,
    bounds: tuple[float, float] | tuple[list[float], list[float]] | None,
    op: str = "QuantizeAndDequantizeV2",
    tags: str = "",
    expected: np.ndarray | None = None,
    **attributes: Any,
) -> Case:
    """A case of V2, V3 or V4. `bounds` None takes the range from the data."""
    dtype = data.dtype.type
    suffix, dtype_tag = _dtype_suffix(dtype)
    axis = attributes.get("axis", -1)
    unused = np.zeros(() if axis == -1 else data.shape[axis], dtype)  # type: ignore[index]
    low, high = (np.array(b, dtype) for b in bounds) if bounds is not None else (unused, unused.copy())
    full: dict[str, Any] = {"signed_input": True, "num_bits": 8, "range_given": bounds is not None}
    if op != "QuantizeAndDequantizeV3":
        full["round_mode"] = "HALF_TO_EVEN"
    full |= {"narrow_range": False, "axis": -1} | attributes
    operands = {"input": data, "input_min": low, "input_max": high}
    results = None if expected is None else {"output": expected}
    return _case(op, name + suffix, operands, full, f"{tags} {dtype_tag}", results)


def _quantize_and_dequantize_v2(dtype: Any) -> Iterator[Case]:
    widths = (1, 2, 3, 4, 8, 16, 24, 31, 32, 40, 53, 60) if dtype is np.float32 else (2, 8, 24, 31, 53, 54, 60)
    for num_bits in widths:
        for signed in (True, False):
            for explicit in (True, False):
                combinations = [(bool(num_bits % 2), "HALF_UP" if num_bits % 3 else "HALF_TO_EVEN")]
                if num_bits in (4, 8):
                    combinations = [(narrow, mode) for narrow in (False, True) for mode in ("HALF_TO_EVEN", "HALF_UP")]
                for narrow, mode in combinations:
                    name = (
                        f"bits_{num_bits}{'' if signed else '_unsigned'}{'_given' if explicit else '_auto'}"
                        f"{'_narrow' * narrow}{'_half_up' * (mode == 'HALF_UP')}"
                    )
                    data = Data(f"v2 {name}")
                    low, high = _random_range(data, num_bits)
                    if explicit and num_bits == 8:
                        low, high = (-128.0, 127.0) if signed else (0.0, 255.0)
                    probes = _halves(low, high, num_bits, signed, dtype)
                    if not explicit:
                        probes = probes[(probes >= dtype(low)) & (probes <= dtype(high))]
                    spread = (low, high) if not explicit else (low - (high - low) / 4, high + (high - low) / 4)
                    specials = _special(dtype) if explicit else np.array([0.0, -0.0, np.finfo(dtype).tiny / 2], dtype)
                    probes = np.concatenate([probes, specials, data.uniform((12,), *spread, dtype)])
                    yield _v2(
                        name,
                        probes,
                        (low, high) if explicit else None,
                        signed_input=signed,
                        num_bits=num_bits,
                        narrow_range=narrow,
                        round_mode=mode,
                    )
    specials = _special(dtype)
    for range_name, (low, high) in RANGES.items():
        if low <= high:
            probes = np.concatenate([specials, _around(np.array([low, high, (low + high) / 2], dtype))])
            for signed in (True, False):
                name = f"given_{range_name}{'' if signed else '_unsigned'}"
                yield _v2(name, probes, (low, high), tags="edge", signed_input=signed)
                yield _v2(
                    f"{name}_half_up", probes, (low, high), tags="edge", signed_input=signed, round_mode="HALF_UP"
                )
    autos = {
        "zeros": [0.0, 0.0, 0.0],
        "negative_zeros": [-0.0, -0.0, -0.0],
        "infinity": [1.0, np.inf, -2.0],
        "negative_infinity": [1.0, -np.inf, -2.0],
        "constant": [1.5, 1.5, 1.5],
        "negative_constant": [-1.5, -1.5, -1.5],
        "positive": [0.25, 1.0, 3.0, 100.0],
        "negative": [-5.0, -1.0, -0.25],
        "mixed": [-5.0, -1.0, 3.0],
        "negative_to_zero": [-5.0, -1.0, 0.0],
        "negative_to_negative_zero": [-5.0, -1.0, -0.0],
        "tiny": [-1e-30, 3e-31, 2e-30, 1e-37, -0.0],
        "smallest_normal": [1.1754943508222875e-38, -1.2e-38, 0.0],
        "largest": [3e38, -3.4e38, 1e38, 0.0],
        "one_element": [0.7],
    }
    for range_name, values in autos.items():
        for signed in (True, False):
            name = f"auto_{range_name}{'' if signed else '_unsigned'}"
            yield _v2(name, np.array(values, dtype), None, tags="edge", signed_input=signed)
    for num_bits, narrow in ((1, False), (1, True), (2, True)):
        # One signed bit has no positive code, and no code at all in the narrow range: TensorFlow's infinities and NaNs.
        name = f"degenerate_bits_{num_bits}{'_narrow' * narrow}"
        values = np.array([-2.0, -0.5, 0.0, 0.5, 2.0], dtype)
        yield _v2(f"{name}_auto", values, None, tags="edge", num_bits=num_bits, narrow_range=narrow)
        yield _v2(f"{name}_positive", np.abs(values), None, tags="edge", num_bits=num_bits, narrow_range=narrow)
        yield _v2(f"{name}_given", values, (-1.0, 1.0), tags="edge", num_bits=num_bits, narrow_range=narrow)
    for shape in [(), (5,), (2, 3), (2, 1, 3, 2), (2, 1, 3, 1, 2), (0,), (2, 0, 3)]:
        data = Data(f"v2 {shape}")
        tags = "empty" if 0 in shape else ""
        yield _v2(f"shape_{_name(shape)}_given", data.uniform(shape, -3, 3, dtype), (-1.0, 2.0), tags=tags)
        yield _v2(f"shape_{_name(shape)}_auto", data.uniform(shape, -3, 3, dtype), None, tags=tags)
    for size in (7, 9, 33, 513):
        yield _v2(f"size_{size}_auto", Data(f"v2 size {size}").uniform((size,), -3, 5, dtype), None)
    for axis in range(3):
        for signed, mode in ((True, "HALF_TO_EVEN"), (False, "HALF_UP")):
            data = Data(f"v2 axis {axis}").normal((3, 4, 5), 0.5, 2, dtype)
            name = f"axis_{axis}_auto{'' if signed else '_unsigned_half_up'}"
            yield _v2(name, data, None, axis=axis, signed_input=signed, round_mode=mode, num_bits=4 + axis)
    yield _v2("axis_1_empty", np.zeros((0, 3), dtype), None, axis=1, tags="empty")
    scalar = np.zeros((), dtype)
    suffix, dtype_tag = _dtype_suffix(dtype)
    yield _case(
        "QuantizeAndDequantizeV2",
        f"axis_1_auto_scalar_bounds{suffix}",
        {
            "input": Data("v2 scalar bounds").normal((4, 3), dtype=dtype),
            "input_min": scalar,
            "input_max": scalar.copy(),
        },
        {
            "signed_input": True,
            "num_bits": 8,
            "range_given": False,
            "round_mode": "HALF_TO_EVEN",
            "narrow_range": False,
            "axis": 1,
        },
        dtype_tag,
    )


def _quantize_and_dequantize_v3(dtype: Any) -> Iterator[Case]:
    op = "QuantizeAndDequantizeV3"
    for num_bits in (2, 4, 8, 16, 31, 53):
        for signed in (True, False):
            narrow = num_bits in (4, 16)
            name = f"bits_{num_bits}{'' if signed else '_unsigned'}{'_narrow' * narrow}"
            data = Data(f"v3 {name}")
            low, high = _random_range(data, num_bits + signed)
            attributes = {"signed_input": signed, "num_bits": num_bits, "narrow_range": narrow}
            probes = np.concatenate([_halves(low, high, num_bits, signed, dtype), _special(dtype)])
            yield _v2(f"{name}_given", probes, (low, high), op, **attributes)
            yield _v2(f"{name}_auto", data.uniform((40,), low, high, dtype), None, op, **attributes)
    for shape in [(5,), (3, 4), (3, 4, 5), (2, 3, 2, 3), (2, 1, 3, 1, 2)]:
        for axis in range(len(shape)):
            for signed in (True, False):
                name = f"shape_{_name(shape)}_axis_{axis}{'' if signed else '_unsigned'}"
                data = Data(f"v3 {name}")
                ranges = [_random_range(data, kind + axis) for kind in range(shape[axis])]
                bounds = [low for low, _ in ranges], [high for _, high in ranges]
                attributes = {"signed_input": signed, "num_bits": 3 + axis, "narrow_range": axis % 2 == 0, "axis": axis}
                values = data.normal(shape, 0, 2, dtype)
                yield _v2(f"{name}_given", values, bounds, op, **attributes)
                yield _v2(f"{name}_auto", values.copy(), None, op, **attributes)
    ordered = [bounds for bounds in RANGES.values() if bounds[0] <= bounds[1]]
    reversed_or_nan = [bounds for bounds in RANGES.values() if not bounds[0] <= bounds[1]]
    for range_name, ranges in (("ordered", ordered), ("reversed_or_nan", reversed_or_nan)):
        for signed in (True, False):
            rows = np.concatenate([_special(dtype), Data("v3 ranges").uniform((7,), -2, 2, dtype)])
            values = np.repeat(rows[:, None], len(ranges), axis=1)
            bounds = [low for low, _ in ranges], [high for _, high in ranges]
            name = f"axis_1_given_{range_name}_ranges{'' if signed else '_unsigned'}"
            yield _v2(name, values, bounds, op, tags="edge", axis=1, signed_input=signed)
    yield _v2("empty", np.zeros((0,), dtype), (-1.0, 1.0), op, tags="empty")
    yield _v2("axis_0_empty", np.zeros((2, 0), dtype), None, op, tags="empty", axis=0)
    one = np.array([1.5], dtype)
    suffix, dtype_tag = _dtype_suffix(dtype)
    yield _case(
        op,
        f"one_element_bounds{suffix}",
        {"input": Data("v3 one element").normal((9,), dtype=dtype), "input_min": -one, "input_max": one},
        {"num_bits": 8, "signed_input": True, "range_given": True, "narrow_range": False, "axis": -1},
        dtype_tag,
    )


def _quantize_and_dequantize_v4(dtype: Any) -> Iterator[Case]:
    op = "QuantizeAndDequantizeV4"
    for num_bits, signed, narrow, mode in (
        (8, True, False, "HALF_TO_EVEN"),
        (8, True, True, "HALF_UP"),
        (4, False, False, "HALF_UP"),
        (3, True, False, "HALF_UP"),
        (24, True, True, "HALF_TO_EVEN"),
    ):
        name = f"bits_{num_bits}{'' if signed else '_unsigned'}{'_narrow' * narrow}{'_half_up' * (mode == 'HALF_UP')}"
        data = Data(f"v4 {name}")
        low, high = _random_range(data, 0)
        attributes = {"signed_input": signed, "num_bits": num_bits, "narrow_range": narrow, "round_mode": mode}
        probes = np.concatenate([_halves(low, high, num_bits, signed, dtype), _special(dtype)])
        yield _v2(f"{name}_given", probes, (low, high), op, **attributes)
        yield _v2(f"{name}_auto", data.uniform((40,), low, high, dtype), None, op, **attributes)
    for axis in range(2):
        yield _v2(f"axis_{axis}_auto", Data(f"v4 axis {axis}").normal((4, 7), dtype=dtype), None, op, axis=axis)


def _quantize_and_dequantize_v4_grad(dtype: Any) -> Iterator[Case]:
    op = "QuantizeAndDequantizeV4Grad"
    suffix, dtype_tag = _dtype_suffix(dtype)

    def case(
        name: str, gradients: np.ndarray, values: np.ndarray, low: object, high: object, axis: int, tags: str
    ) -> Case:
        operands = {
            "gradients": gradients,
            "input": values,
            "input_min": np.array(low, dtype),
            "input_max": np.array(high, dtype),
        }
        return _case(op, name + suffix, operands, {"axis": axis}, f"{tags} {dtype_tag}")

    for range_name, (low, high) in RANGES.items():
        values = np.concatenate([_special(dtype), _around(np.array([low, high], dtype))])
        gradients = _incoming_gradients(Data(f"v4 grad {range_name}"), values.shape, dtype)
        yield case(f"range_{range_name}", gradients, values, low, high, -1, "edge")
    values = Data("v4 grad values").uniform((60,), -2, 2, dtype)
    gradients = Data("v4 grad gradients").normal((60,), dtype=dtype)
    yield case("nonfinite_gradients", _with_nonfinite(gradients, np.nan, np.inf, -np.inf), values, -1, 1, -1, "edge")
    for shape in [(), (3,), (3, 4), (2, 3, 5), (2, 1, 3, 1, 2), (0,), (2, 0)]:
        data = Data(f"v4 grad {shape}")
        tags = "empty" if 0 in shape else ""
        values, gradients = data.uniform(shape, -2, 2, dtype), _incoming_gradients(data, shape, dtype)
        yield case(f"shape_{_name(shape)}", gradients, values, -1, 0.5, -1, tags)
        for axis, length in enumerate(shape):
            low, high = -data.fractions(length) * 2, data.fractions(length) * 2
            yield case(f"shape_{_name(shape)}_axis_{axis}", gradients.copy(), values.copy(), low, high, axis, tags)


def _quantize_and_dequantize_v1() -> Iterator[Case]:
    """TensorFlow can no longer call version 1; it equals version 2 with the same bounds, half to even, one range."""
    op = "QuantizeAndDequantize"
    combinations = ((8, True, True), (8, False, True), (4, True, False), (8, False, False), (16, True, True))
    for num_bits, signed, explicit in combinations:
        name = f"bits_{num_bits}{'' if signed else '_unsigned'}{'_given' if explicit else '_auto'}"
        data = Data(f"v1 {name}")
        values = np.concatenate([_halves(-0.1, 0.3, num_bits, signed, np.float32), data.uniform((12,), -0.2, 0.4)])
        bounds = {"input_min": -0.1, "input_max": 0.3} if explicit else {"input_min": 0.0, "input_max": 0.0}
        yield _case(
            op,
            name,
            {"input": values},
            {"signed_input": signed, "num_bits": num_bits, "range_given": explicit, **bounds},
        )


def _quantize_and_dequantize_deviations() -> Iterator[Case]:
    """Where TensorFlow's answer depends on where in the data a value is."""
    for dtype in (np.float32, np.float64):
        for place in range(3):
            values = np.array([1.0, 2.0, -3.0], dtype)
            values[place] = np.nan
            nan = np.full((3,), np.nan, dtype)
            yield _v2(f"auto_nan_at_{place}", values, None, tags="edge", expected=nan)
            yield _v2(f"auto_nan_at_{place}", values.copy(), None, "QuantizeAndDequantizeV3", "edge", nan)
            yield _v2(f"auto_nan_at_{place}", values.copy(), None, "QuantizeAndDequantizeV4", "edge", nan)
        # With a range per slice only the slice that holds the NaN is lost; its neighbour keeps the result it has alone.
        values = np.array([[1.0, np.nan, 2.0], [127.0, -1.0, 0.5]], dtype)
        expected = np.array([[np.nan] * 3, [127.0, -1.0, 0.0]], dtype)
        yield _v2("auto_nan_axis_0", values, None, tags="edge", expected=expected, axis=0)
        # The largest of zeros is +0 if there is one, wherever it is; so is the inverse scale, and signs are kept.
        zeros = np.array([-0.0, 0.0, -0.0, 0.0, -0.0], dtype)
        yield _v2("auto_zeros_of_both_signs", zeros, None, tags="edge", expected=zeros)
        # Denormals count as zeros: the range is 0, the inverse scale is 0 of the range's sign, and so are the products.
        denormal = np.finfo(dtype).tiny / 2
        positive = np.array([denormal, denormal / 2, denormal / 4], dtype)
        zeros = np.zeros((3,), dtype)
        yield _v2("auto_denormals", positive, None, tags="edge", expected=zeros)
        yield _v2("auto_negative_denormals", -positive, None, tags="edge", expected=zeros)


def _quantize_and_dequantize_beyond() -> Iterator[Case]:
    """Given ranges along an axis, which versions 2 and 4 document and refuse. Half to even must be as in version 3."""
    for op in ("QuantizeAndDequantizeV2", "QuantizeAndDequantizeV4"):
        for axis in range(3):
            shape = (3, 4, 5)
            for mode in ("HALF_TO_EVEN", "HALF_UP"):
                name = f"axis_{axis}_given{'_half_up' * (mode == 'HALF_UP')}"
                data = Data(f"{op} {name}")
                ranges = [_random_range(data, kind) for kind in range(shape[axis])]
                bounds = [low for low, _ in ranges], [high for _, high in ranges]
                attributes = {"axis": axis, "num_bits": 4 + axis, "round_mode": mode, "narrow_range": axis == 1}
                values = data.normal(shape, 0, 2)
                yield _v2(name, values, bounds, op, "beyond_tensorflow", **attributes)


# FusedBatchNorm


def _channels_first(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(array, -1, 1))


def _fused_batch_norm() -> Iterator[Case]:
    layouts = {"NHWC": (2, 3, 4), "NCHW": (2, 3, 4), "NDHWC": (2, 2, 3, 2), "NCDHW": (2, 2, 3, 2)}
    for data_format, leading in layouts.items():
        for training in (True, False):
            for channels in (1, 5, 16, 33):
                name = f"{data_format}_{'training' if training else 'inference'}_channels_{channels}"
                yield from _batch_norm(name, (*leading, channels), training, data_format=data_format)
    for factor in (0.1, 0.9, 0.0):
        name = f"factor_{str(factor).replace('.', '_')}"
        yield from _batch_norm(name, (2, 3, 4, 9), True, factor=factor, backward=False)
    yield from _batch_norm("factor_ignored_in_inference", (2, 3, 4, 9), False, factor=0.1, backward=False)
    for version in ("", "V2"):
        for training in (True, False):
            name = "training" if training else "inference"
            yield from _batch_norm(name, (2, 3, 4, 17), training, version=version)
        yield from _batch_norm("factor_0_1", (2, 3, 4, 17), True, version=version, factor=0.1, backward=False)
    yield from _batch_norm("NCHW_training", (2, 3, 4, 17), True, version="V2", data_format="NCHW")
    for mean in (100.0, 1000.0, -30000.0):
        yield from _batch_norm(f"mean_{int(mean)}", (4, 5, 5, 7), True, mean=mean)
        yield from _batch_norm(f"mean_{int(mean)}_inference", (4, 5, 5, 7), False, mean=mean)
    for epsilon in (1e-6, 1e-3, 0.1):
        yield from _batch_norm(f"epsilon_{epsilon:g}", (2, 3, 4, 9), True, epsilon=epsilon)
    for channels in (1, 5, 16):
        yield from _batch_norm(f"one_row_channels_{channels}", (1, 1, 1, channels), True)
        yield from _batch_norm(f"two_rows_channels_{channels}", (1, 2, 1, channels), True)
    yield from _batch_norm("one_row_factor_0_1", (1, 1, 1, 5), True, factor=0.1)
    yield from _batch_norm("long_rows", (4, 25, 20, 3), True, mean=3.0)
    yield from _batch_norm("long_rows_inference", (4, 25, 20, 3), False, mean=3.0)
    yield from _batch_norm_edges()
    for data_format, training in (("NHWC", True), ("NHWC", False), ("NCHW", True), ("NCHW", False)):
        name = f"float64_{data_format}_{'training' if training else 'inference'}"
        yield from _batch_norm(name, (2, 3, 4, 5), training, data_format=data_format, dtype=np.float64, mean=10.0)


def _batch_norm(
    name: str,
    shape: tuple[int, ...],
    training: bool,
    *,
    version: str = "V3",
    data_format: str = "NHWC",
    factor: float = 1.0,
    epsilon: float = 1e-3,
    mean: float = 0.5,
    dtype: Any = np.float32,
    backward: bool = True,
) -> Iterator[Case]:
    """FusedBatchNorm of a channels-last `shape`, and its gradient with the operands that the former would save."""
    data = Data(f"batch norm {version} {name}")
    channels = shape[-1]
    reorder = _channels_first if data_format.startswith("NC") else np.ascontiguousarray
    # Every channel has its own mean and spread.
    x = mean + (data.uniform((channels,), -1, 1) + data.uniform((channels,), 0.5, 2) * data.normal(shape)).astype(dtype)
    x = x.astype(dtype)
    scale, offset = data.normal((channels,), 1, 0.5, dtype), data.normal((channels,), dtype=dtype)
    running_mean = (mean + data.uniform((channels,), -1, 1)).astype(dtype)
    running_variance = data.uniform((channels,), 0.25, 4, dtype)
    tags = ("float64 beyond_tensorflow" if dtype is np.float64 else "") + (" NCHW" if data_format == "NCHW" else "")
    common: dict[str, Any] = {"epsilon": epsilon, "data_format": data_format, "is_training": training}
    unused = training and factor == 1.0 and channels % 2 == 1
    forward_operands = {
        "x": reorder(x),
        "scale": scale,
        "offset": offset,
        "mean": np.zeros((0,), dtype) if unused else running_mean,
        "variance": np.zeros((0,), dtype) if unused else running_variance,
    }
    attributes = common | {"exponential_avg_factor": factor}
    # TensorFlow leaves the reserve spaces unset in inference; here they are what the gradient then needs.
    reserved = {} if training else {"reserve_space_1": running_mean, "reserve_space_2": running_variance}
    yield _case(f"FusedBatchNorm{version}", name, forward_operands, attributes, tags, reserved)
    if not backward:
        return
    if training:
        exact = x.astype(np.float64).reshape(-1, channels)
        running_mean, running_variance = exact.mean(axis=0).astype(dtype), exact.var(axis=0).astype(dtype)
    operands = {
        "y_backprop": reorder(data.normal(shape, 0.1, 1, dtype)),
        "x": reorder(x),
        "scale": scale,
        "reserve_space_1": running_mean,
        "reserve_space_2": running_variance,
    }
    if version == "V3":
        operands["reserve_space_3"] = np.zeros((0,), dtype)
    expected = {}
    if not training and data_format == "NCHW":
        # TensorFlow's Eigen kernel refuses this; its oneDNN kernel returns other placeholders than that does.
        tags += " onednn"
        expected = {output: np.zeros((0,), dtype) for output in ("reserve_space_4", "reserve_space_5")}
    if not training and data_format == "NCDHW":
        tags += " beyond_tensorflow"
    yield _case(f"FusedBatchNormGrad{version}", name, operands, common, tags, expected)


def _batch_norm_edges() -> Iterator[Case]:
    def forward(
        name: str, x: np.ndarray, training: bool, tags: str, expected: dict[str, np.ndarray], **attributes: Any
    ) -> Case:
        channels = x.shape[-1]
        operands = {
            "x": x,
            "scale": np.linspace(1, 2, channels, dtype=np.float32),
            "offset": np.linspace(-1, 1, channels, dtype=np.float32),
            "mean": np.linspace(0, 1, channels, dtype=np.float32),
            "variance": np.linspace(1, 3, channels, dtype=np.float32),
        }
        if not training:
            expected = {"reserve_space_1": operands["mean"], "reserve_space_2": operands["variance"]} | expected
        full = {
            "epsilon": 1e-3,
            "exponential_avg_factor": 1.0,
            "data_format": "NHWC",
            "is_training": training,
        } | attributes
        return _case("FusedBatchNormV3", name, operands, full, tags, expected)

    def backward(name: str, x: np.ndarray, y_backprop: np.ndarray, training: bool, tags: str) -> Case:
        channels = x.shape[-1]
        operands = {
            "y_backprop": y_backprop,
            "x": x.copy(),
            "scale": np.linspace(1, 2, channels, dtype=np.float32),
            "reserve_space_1": np.linspace(0, 1, channels, dtype=np.float32),
            "reserve_space_2": np.linspace(1, 3, channels, dtype=np.float32),
            "reserve_space_3": np.zeros((0,), np.float32),
        }
        attributes = {"epsilon": 1e-3, "data_format": "NHWC", "is_training": training}
        return _case("FusedBatchNormGradV3", name, operands, attributes, tags)

    x = Data("batch norm edges").normal((2, 3, 3, 9))
    spoilt = x.copy()
    spoilt[0, 1, 1, 2], spoilt[1, 0, 0, 4], spoilt[0, 0, 0, 8] = np.nan, np.inf, -np.inf
    y_backprop = Data("batch norm edges gradients").normal((2, 3, 3, 9))
    for training in (True, False):
        mode = "training" if training else "inference"
        yield forward(f"nonfinite_{mode}", spoilt, training, "edge", {})
        yield backward(f"nonfinite_{mode}", spoilt, y_backprop, training, "edge")
        yield backward(
            f"nonfinite_gradients_{mode}", x, np.where(np.isfinite(spoilt), y_backprop, spoilt), training, "edge"
        )
        # Reserve spaces that are not the statistics of x are taken as they are.
        yield backward(f"given_statistics_{mode}", x, y_backprop.copy(), training, "")
        for shape in ((0, 3, 3, 4), (2, 0, 3, 4)):
            empty = np.zeros(shape, np.float32)
            zeros = np.zeros((4,), np.float32)
            reserved = {"reserve_space_1": zeros, "reserve_space_2": zeros}
            yield forward(f"empty_{_name(shape)}_{mode}", empty, training, "edge empty", reserved)
            yield backward(f"empty_{_name(shape)}_{mode}", empty, empty.copy(), training, "edge empty")
    empty = np.zeros((2, 3, 3, 0), np.float32)
    yield forward("no_channels_training", empty, True, "edge empty", {})
    constant = np.full((2, 3, 3, 3), 2.5, np.float32)
    yield forward("constant_without_epsilon", constant, True, "edge", {}, epsilon=0.0)
    yield forward("constant", constant.copy(), True, "edge", {})
    negative = forward("negative_variance", x.copy(), False, "edge", {})
    operands = dict(negative.operands)
    operands["variance"] = np.linspace(-2, 2, 9, dtype=np.float32)
    expected = {"reserve_space_1": operands["mean"], "reserve_space_2": operands["variance"]}
    yield _case("FusedBatchNormV3", "negative_variance", operands, dict(negative.attributes), "edge", expected)


# DepthwiseConv2dNative


def _depthwise_conv2d() -> Iterator[Case]:
    for channels in (1, 2, 3, 5, 16, 17, 33):
        for multiplier in (1, 2, 3):
            if channels * multiplier <= 51:
                yield from _depthwise(f"channels_{channels}x{multiplier}", channels=channels, multiplier=multiplier)
    for kernel in ((1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (1, 3), (3, 2), (5, 1)):
        for padding in ("SAME", "VALID"):
            for stride in (1, 2, 3):
                if stride == 1 or kernel in ((2, 2), (3, 3), (5, 5), (3, 2)):
                    yield from _depthwise(
                        f"kernel_{_name(kernel)}_stride_{stride}_{padding}",
                        size=(7, 9),
                        channels=3,
                        multiplier=1 + (kernel[0] + stride) % 2,
                        kernel=kernel,
                        strides=(stride, stride),
                        padding=padding,
                    )
    for padding in ("SAME", "VALID"):
        for strides in ((1, 2), (3, 1), (2, 3)):
            name = f"strides_{_name(strides)}_{padding}"
            yield from _depthwise(
                name, size=(8, 7), channels=5, multiplier=2, strides=strides, padding=padding, tags="onednn"
            )
    for explicit in (((1, 2), (0, 1)), ((0, 0), (3, 3)), ((2, 0), (1, 0))):
        for stride in (1, 2):
            name = f"explicit_{'_'.join(str(n) for pair in explicit for n in pair)}_stride_{stride}"
            yield from _depthwise(
                name, size=(6, 5), channels=5, multiplier=2, strides=(stride, stride), padding=explicit
            )
    for padding in ("SAME", "VALID"):
        for stride in (1, 2):
            for channels, multiplier in ((3, 1), (3, 2), (17, 1)):
                name = f"NCHW_channels_{channels}x{multiplier}_stride_{stride}_{padding}"
                yield from _depthwise(
                    name,
                    size=(6, 7),
                    channels=channels,
                    multiplier=multiplier,
                    strides=(stride, stride),
                    padding=padding,
                    data_format="NCHW",
                    tags="onednn",
                )
    for padding in ("SAME", "VALID"):
        for dilations in ((2, 2), (1, 3), (3, 2)):
            for strides in ((1, 1), (2, 2), (1, 2)):
                name = f"dilated_{_name(dilations)}_strides_{_name(strides)}_{padding}"
                yield from _depthwise(
                    name,
                    size=(9, 8),
                    channels=3,
                    multiplier=2,
                    kernel=(3, 2),
                    strides=strides,
                    padding=padding,
                    dilations=dilations,
                )
    explicit = ((2, 1), (1, 3))
    yield from _depthwise(
        "dilated_explicit", size=(7, 6), padding=explicit, dilations=(2, 2), strides=(2, 1), tags="beyond_tensorflow"
    )
    yield from _depthwise(
        "dilated_explicit_NCHW",
        size=(7, 6),
        padding=explicit,
        dilations=(2, 1),
        strides=(1, 2),
        data_format="NCHW",
        tags="beyond_tensorflow",
    )
    for padding in ("SAME", "VALID"):
        yield from _depthwise(f"float64_{padding}", channels=3, multiplier=2, padding=padding, dtype=np.float64)
        yield from _depthwise(
            f"float64_stride_2_{padding}", channels=2, strides=(2, 2), padding=padding, dtype=np.float64
        )
    yield from _depthwise_edges()


def _output_size(size: int, kernel: int, stride: int, dilation: int, padding: str | tuple[int, int]) -> int:
    extent = (kernel - 1) * dilation + 1
    if padding == "SAME":
        return -(-size // stride)
    before_and_after = 0 if isinstance(padding, str) else sum(padding)
    return max((size + before_and_after - extent + stride) // stride, 0)


def _depthwise(
    name: str,
    *,
    batch: int = 2,
    size: tuple[int, int] = (6, 5),
    channels: int = 3,
    multiplier: int = 1,
    kernel: tuple[int, int] = (3, 3),
    strides: tuple[int, int] = (1, 1),
    padding: str | tuple[tuple[int, int], tuple[int, int]] = "SAME",
    data_format: str = "NHWC",
    dilations: tuple[int, int] = (1, 1),
    dtype: Any = np.float32,
    tags: str = "",
    change: Callable[[np.ndarray, np.ndarray, np.ndarray], None] | None = None,
    expected: Mapping[str, Mapping[str, np.ndarray]] | None = None,
) -> Iterator[Case]:
    """The convolution and both its gradients. `change` edits input, filter and out_backprop (channels last) in place.

    Which of TensorFlow's two builds computes what, in its version 2.21 on a CPU with AVX-512: by default oneDNN, which
    fuses multiply and add, except in float64 and in the gradients of explicit padding. With one channel it takes its
    path for ordinary convolutions, whose order of operations is another; so it does if the padding is as wide as the
    filter. Its gradients know no dilation.
    """
    data = Data(f"depthwise {name}")
    per_side: tuple[str, str] | tuple[tuple[int, int], tuple[int, int]]
    per_side = (padding, padding) if isinstance(padding, str) else padding
    rows, columns = (
        _output_size(*measures) for measures in zip(size, kernel, strides, dilations, per_side, strict=True)
    )
    x = data.normal((batch, *size, channels), dtype=dtype)
    weights = data.normal((*kernel, channels, multiplier), dtype=dtype)
    out_backprop = data.normal((batch, rows, columns, channels * multiplier), dtype=dtype)
    if change is not None:
        change(x, weights, out_backprop)
    reorder = _channels_first if data_format == "NCHW" else np.ascontiguousarray
    x, out_backprop = reorder(x), reorder(out_backprop)

    def spatial(pair: tuple[int, int]) -> tuple[int, ...]:
        return (1, 1, *pair) if data_format == "NCHW" else (1, *pair, 1)

    explicit: tuple[int, ...] = ()
    if not isinstance(padding, str):
        pairs = [n for pair in padding for n in pair]
        explicit = (0, 0, 0, 0, *pairs) if data_format == "NCHW" else (0, 0, *pairs, 0, 0)
    attributes: dict[str, Any] = {
        "strides": spatial(strides),
        "padding": padding if isinstance(padding, str) else "EXPLICIT",
        "explicit_paddings": explicit,
        "data_format": data_format,
        "dilations": spatial(dilations),
    }
    dilated = dilations != (1, 1)
    tags += " NCHW" * (data_format == "NCHW") + " dilated" * dilated + " float64" * (dtype is np.float64)
    beyond_filter = not isinstance(padding, str) and any(
        max(pair) >= k for pair, k in zip(padding, kernel, strict=True)
    )
    unfused = dtype is np.float64 or channels == 1 or beyond_filter
    forward_tags = tags + " onednn" * dilated + " tolerance" * unfused
    backward_tags = tags + " beyond_tensorflow" * dilated + " tolerance" * (unfused or not isinstance(padding, str))
    documented = expected or {}

    def case(op: str, tags: str, operands: dict[str, np.ndarray], **sizes: tuple[int, ...]) -> Case:
        return _case(op, name, operands, {**sizes, **attributes}, tags, dict(documented.get(op, {})))

    yield case("DepthwiseConv2dNative", forward_tags, {"input": x, "filter": weights})
    operands = {"filter": weights.copy(), "out_backprop": out_backprop}
    yield case("DepthwiseConv2dNativeBackpropInput", backward_tags, operands, input_sizes=x.shape)
    operands = {"input": x.copy(), "out_backprop": out_backprop.copy()}
    tags = " ".join(set(backward_tags.split()) - {"tolerance"})  # no bits are promised of it anyway
    yield case("DepthwiseConv2dNativeBackpropFilter", tags, operands, filter_sizes=weights.shape)


def _depthwise_edges() -> Iterator[Case]:
    def nonfinite(x: np.ndarray, weights: np.ndarray, out_backprop: np.ndarray) -> None:
        x[0, 2, 2, 0], x[1, 0, 0, 1] = np.nan, np.inf
        out_backprop[0, 2, 2, 0], out_backprop[1, 0, 0, 1] = np.nan, -np.inf

    def infinite_corner(x: np.ndarray, weights: np.ndarray, out_backprop: np.ndarray) -> None:
        # Taps that fall on padding are skipped, so they spoil no border.
        weights[0, 0, 0, 0], weights[-1, -1, 1, 0] = np.inf, np.nan

    def denormal(x: np.ndarray, weights: np.ndarray, out_backprop: np.ndarray) -> None:
        x *= np.float32(2.0**-80)
        weights *= np.float32(2.0**-47)
        out_backprop *= np.float32(2.0**-80)
        x[0, 1], out_backprop[0, 1] = np.float32(1e-40), np.float32(-1e-40)

    def negative_zeros(x: np.ndarray, weights: np.ndarray, out_backprop: np.ndarray) -> None:
        x[...], out_backprop[...] = -0.0, -0.0

    def double_rounding(x: np.ndarray, weights: np.ndarray, out_backprop: np.ndarray) -> None:
        # Sums that lie so close to the middle of two floats that rounding them to float64 first puts them there. The
        # product of the second channel is 2**-24 * (1 + 4688 * 2**-46), of the first 2**-24 * (1 - 2**-46).
        step = 2.0**-23
        first = np.array([1 + step, 1, -1 - step, -1])
        second = np.array([1 + step, 1 + 2896 * step, -1 - step, -1 - 2896 * step]) * 2.0**-24
        weights[0, 0, :, 0] = 1
        weights[0, 1, :, 0] = [1 - step, 1 - 2895 * step, 1 - step, 1 - 2895 * step]
        x[:, 0, 0], x[:, 0, 1], x[:, 0, 2] = first, second, 0
        out_backprop[:, 0, 1], out_backprop[:, 0, 0] = first, second

    yield from _depthwise("nonfinite_values", change=nonfinite, tags="edge")
    yield from _depthwise(
        "double_rounding",
        size=(1, 3),
        channels=4,
        kernel=(1, 2),
        padding="VALID",
        change=double_rounding,
        tags="edge",
    )
    yield from _depthwise("nonfinite_filter", change=infinite_corner, tags="edge")
    yield from _depthwise("products_near_the_smallest_normal", change=denormal, tags="edge")
    yield from _depthwise("signed_zeros", change=negative_zeros, tags="edge")
    yield from _depthwise("one_pixel", size=(1, 1), tags="edge")
    yield from _depthwise("one_row_stride_2", size=(1, 8), strides=(2, 2), tags="edge")
    op = "DepthwiseConv2dNativeBackpropFilter"
    zeros = {op: {"output": np.zeros((3, 3, 3, 1), np.float32)}}
    yield from _depthwise("empty_batch", batch=0, tags="edge empty eigen", expected=zeros)
    zeros = {op: {"output": np.zeros((5, 5, 3, 1), np.float32)}}
    yield from _depthwise(
        "filter_larger_than_input", size=(4, 6), kernel=(5, 5), padding="VALID", tags="edge empty eigen", expected=zeros
    )
    zeros = {"DepthwiseConv2dNativeBackpropInput": {"output": np.zeros((2, 6, 5, 3), np.float32)}}
    yield from _depthwise("multiplier_0", multiplier=0, tags="edge empty eigen", expected=zeros)


# Calls that must be refused


@lru_cache
def _bad_calls() -> tuple[BadCall, ...]:
    calls = tuple(
        [*_bad_fake_quant(), *_bad_quantize_and_dequantize(), *_bad_fused_batch_norm(), *_bad_depthwise_conv2d()]
    )
    names = [call.name for call in calls]
    duplicates = {name for name in names if names.count(name) > 1}
    if duplicates:
        raise ValueError(f"names of bad calls must be unique, repeated: {sorted(duplicates)}")
    return calls


def _ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


class _Bad:
    """Bad calls of one operator: each is a good call with something changed."""

    def __init__(self, op: str, operands: dict[str, np.ndarray], attributes: dict[str, Any]):
        self.op, self.operands, self.attributes = op, operands, attributes

    def __call__(
        self,
        name: str,
        error: type[Exception] = ValueError,
        *,
        aborts: bool = False,
        accepted: str = "",
        **changes: Any,
    ) -> BadCall:
        unknown = set(changes) - set(self.operands) - set(self.attributes)
        if unknown:
            raise ValueError(f"{self.op} has no {sorted(unknown)}")
        operands = {k: np.asarray(changes.get(k, v)) for k, v in self.operands.items()}
        attributes = {k: changes.get(k, v) for k, v in self.attributes.items()}
        return BadCall(f"{self.op}/{name}", self.op, operands, attributes, error, aborts, accepted)


def _bad_fake_quant() -> Iterator[BadCall]:
    quantization: dict[str, Any] = {"num_bits": 8, "narrow_range": False}
    for op, arrays in (
        ("FakeQuantWithMinMaxArgs", {"inputs": _ones(3)}),
        ("FakeQuantWithMinMaxArgsGradient", {"gradients": _ones(3), "inputs": _ones(3)}),
    ):
        bad = _Bad(op, arrays, {"min": -1.0, "max": 1.0} | quantization)
        yield bad("bits_1", num_bits=1)
        yield bad("bits_17", num_bits=17)
        yield bad("point", min=1.0, max=1.0)
        yield bad("reversed", min=1.0, max=-1.0)
        yield bad("denormal_range", min=0.0, max=1e-40)
        yield bad("nan_min", min=np.nan)
        yield bad("nan_max", max=np.nan)
        yield bad("integers", TypeError, **{key: _ones(3, dtype=np.int32) for key in arrays})
        if "gradients" in arrays:
            yield bad("shapes_differ", gradients=_ones(2))
            yield bad("dtypes_differ", TypeError, gradients=_ones(3, dtype=np.float64))
    for gradient in (False, True):
        arrays = ({"gradients": _ones(4, 3)} if gradient else {}) | {"inputs": _ones(4, 3)}
        bad = _Bad(
            f"FakeQuantWithMinMaxVars{'Gradient' * gradient}",
            arrays | {"min": _ones() * 0, "max": _ones()},
            quantization,
        )
        yield bad("bits_1", num_bits=1)
        yield bad("bits_17", num_bits=17)
        yield bad("min_rank_1", min=_ones(1))
        yield bad("max_rank_1", max=_ones(1))
        yield bad("bounds_rank_2", min=_ones(2, 2), max=_ones(2, 2))
        yield bad("dtypes_differ", TypeError, min=_ones(dtype=np.float64))
        if gradient:
            yield bad("shapes_differ", gradients=_ones(3, 4))
        bad = _Bad(
            f"FakeQuantWithMinMaxVarsPerChannel{'Gradient' * gradient}",
            arrays | {"min": _ones(3) * 0, "max": _ones(3)},
            quantization,
        )
        yield bad("bits_1", num_bits=1)
        yield bad("bits_17", num_bits=17)
        yield bad("scalar_inputs", aborts=True, **{key: _ones() for key in arrays})
        yield bad("min_too_short", min=_ones(2))
        yield bad("max_too_long", max=_ones(4))
        yield bad("scalar_min", min=_ones())
        yield bad("bounds_rank_2", min=_ones(1, 3), max=_ones(1, 3))
        yield bad("min_rank_3_empty", min=_ones(4, 0, 0))
        yield bad("dtypes_differ", TypeError, max=_ones(3, dtype=np.float64))
        if gradient:
            yield bad("shapes_differ", gradients=_ones(4, 4))


def _bad_quantize_and_dequantize() -> Iterator[BadCall]:
    arrays = {"input": _ones(2, 3), "input_min": -_ones(), "input_max": _ones()}
    for version in ("V2", "V3", "V4"):
        attributes: dict[str, Any] = {"signed_input": True, "num_bits": 8, "range_given": True}
        attributes |= ({} if version == "V3" else {"round_mode": "HALF_TO_EVEN"}) | {"narrow_range": False, "axis": -1}
        bad = _Bad(f"QuantizeAndDequantize{version}", arrays, attributes)
        yield bad("bits_0", num_bits=0)
        yield bad("bits_62", num_bits=62)
        yield bad("bits_63_unsigned", num_bits=63, signed_input=False)
        yield bad("axis_below_minus_1", axis=-2, aborts=version == "V3")
        yield bad("axis_minus_100", axis=-100, aborts=version == "V3")
        yield bad("axis_is_rank", axis=2, range_given=False)
        yield bad("axis_10", axis=10, range_given=False)
        yield bad("axis_largest", axis=2**31 - 1, range_given=False)
        yield bad("vector_bounds_without_axis", aborts=version == "V3", input_min=-_ones(3), input_max=_ones(3))
        yield bad("scalar_bounds_with_axis", axis=1)
        yield bad("bounds_too_short", axis=1, input_min=-_ones(2), input_max=_ones(2))
        yield bad("reversed", input_min=2 * _ones())
        yield bad("nan_min", input_min=np.nan * _ones())
        yield bad("dtypes_differ", TypeError, input_min=-_ones(dtype=np.float64))
        yield bad("integers", TypeError, **{key: value.astype(np.int32) for key, value in arrays.items()})
        if version != "V3":
            yield bad("round_mode", round_mode="HALF_DOWN")
    bad = _Bad("QuantizeAndDequantizeV4Grad", {"gradients": _ones(2, 3)} | arrays, {"axis": -1})
    yield bad("axis_below_minus_1", axis=-2)
    yield bad("axis_minus_100", axis=-100)
    yield bad("axis_is_rank", axis=2)
    yield bad("axis_largest", axis=2**31 - 1)
    yield bad("bounds_rank_2", input_min=_ones(2, 2), input_max=_ones(2, 2))
    yield bad("empty_bounds", input_min=_ones(0), input_max=_ones(0))
    yield bad("bounds_too_short", axis=1, input_min=_ones(1), input_max=_ones(1))
    yield bad("shapes_differ", gradients=_ones(3, 2))
    yield bad("dtypes_differ", TypeError, gradients=_ones(2, 3, dtype=np.float64))


def _bad_fused_batch_norm() -> Iterator[BadCall]:
    vectors = {key: _ones(3) for key in ("scale", "offset", "mean", "variance")}
    attributes: dict[str, Any] = {
        "epsilon": 1e-3,
        "exponential_avg_factor": 1.0,
        "data_format": "NHWC",
        "is_training": True,
    }
    bad = _Bad("FusedBatchNormV3", {"x": _ones(2, 2, 2, 3)} | vectors, attributes)
    yield bad("x_rank_3", x=_ones(2, 2, 3))
    yield bad("x_rank_6", x=_ones(1, 1, 1, 2, 2, 3))
    for key in ("scale", "offset"):
        yield bad(f"{key}_too_short", **{key: _ones(2)})
        yield bad(f"{key}_rank_2", **{key: _ones(3, 1)})
        yield bad(f"{key}_length_1", **{key: _ones(1)})
    for key in ("mean", "variance"):
        yield bad(f"{key}_too_short_inference", is_training=False, **{key: _ones(2)})
        yield bad(f"{key}_empty_inference", is_training=False, **{key: _ones(0)})
        yield bad(f"{key}_empty_with_factor", exponential_avg_factor=0.5, **{key: _ones(0)})
        yield bad(f"{key}_rank_2", **{key: _ones(3, 1)})
    yield bad("data_format", data_format="NCWH")
    yield bad("scale_dtype", TypeError, scale=_ones(3, dtype=np.int32))
    attributes = {"epsilon": 1e-3, "data_format": "NHWC", "is_training": True}
    vectors = {key: _ones(3) for key in ("scale", "reserve_space_1", "reserve_space_2")}
    bad = _Bad(
        "FusedBatchNormGradV3",
        {"y_backprop": _ones(2, 2, 2, 3), "x": _ones(2, 2, 2, 3)} | vectors | {"reserve_space_3": _ones(0)},
        attributes,
    )
    yield bad("shapes_differ", y_backprop=_ones(2, 2, 3, 3))
    yield bad("channels_differ", y_backprop=_ones(1, 1, 3, 3), x=_ones(1, 1, 1, 2))
    yield bad("rank_3", y_backprop=_ones(2, 2, 3), x=_ones(2, 2, 3))
    for key in vectors:
        yield bad(f"{key}_too_short", **{key: _ones(2)})
        yield bad(f"{key}_rank_2", **{key: _ones(3, 1)})
    yield bad("data_format", data_format="NCWH")


def _bad_depthwise_conv2d() -> Iterator[BadCall]:
    attributes: dict[str, Any] = {
        "strides": (1, 1, 1, 1),
        "padding": "SAME",
        "explicit_paddings": (),
        "data_format": "NHWC",
        "dilations": (1, 1, 1, 1),
    }
    x, weights, out_backprop = _ones(2, 6, 5, 3), _ones(3, 3, 3, 2), _ones(2, 6, 5, 6)
    forward = _Bad("DepthwiseConv2dNative", {"input": x, "filter": weights}, attributes)
    backprop_input = _Bad(
        "DepthwiseConv2dNativeBackpropInput",
        {"filter": weights, "out_backprop": out_backprop},
        {"input_sizes": x.shape} | attributes,
    )
    backprop_filter = _Bad(
        "DepthwiseConv2dNativeBackpropFilter",
        {"input": x, "out_backprop": out_backprop},
        {"filter_sizes": weights.shape} | attributes,
    )
    for bad in (forward, backprop_input, backprop_filter):
        yield bad("stride_in_batch", strides=(2, 1, 1, 1))
        yield bad("stride_in_depth", strides=(1, 1, 1, 2))
        yield bad("stride_0", strides=(1, 0, 0, 1))
        yield bad("stride_negative", strides=(1, -1, -1, 1))
        yield bad("strides_short", strides=(1, 1))
        yield bad("strides_empty", strides=())
        ignored = "the gradients' kernels do not look at the dilations"
        yield bad("dilation_0", dilations=(1, 0, 0, 1), accepted="" if bad is forward else ignored)
        yield bad("dilations_short", dilations=(1, 1, 1), accepted="the kernels only look for values other than 1")
        yield bad("padding_name", padding="FULL")
        yield bad("explicit_without_numbers", padding="EXPLICIT")
        yield bad("explicit_with_same", explicit_paddings=(0, 0, 1, 1, 1, 1, 0, 0))
        yield bad("explicit_in_batch", padding="EXPLICIT", explicit_paddings=(1, 0, 1, 1, 1, 1, 0, 0))
        yield bad("explicit_negative", padding="EXPLICIT", explicit_paddings=(0, 0, -1, 1, 1, 1, 0, 0))
        yield bad("explicit_short", padding="EXPLICIT", explicit_paddings=(1, 1, 1, 1))
        yield bad("data_format", data_format="NHCW")
    yield forward("input_rank_3", input=_ones(6, 5, 3))
    yield forward("filter_rank_3", filter=_ones(3, 3, 3))
    yield forward("depths_differ", filter=_ones(3, 3, 2, 2))
    yield forward(
        "integers", TypeError, input=_ones(2, 6, 5, 3, dtype=np.int32), filter=_ones(3, 3, 3, 2, dtype=np.int32)
    )
    yield forward("dtypes_differ", TypeError, filter=_ones(3, 3, 3, 2, dtype=np.float64))
    yield backprop_input("input_sizes_short", input_sizes=(2, 6, 5))
    yield backprop_input("input_sizes_negative", input_sizes=(2, -6, 5, 3))
    yield backprop_input("filter_rank_3", filter=_ones(3, 3, 3))
    yield backprop_filter("filter_sizes_short", filter_sizes=(3, 3, 3))
    yield backprop_filter("filter_sizes_negative", filter_sizes=(3, -3, 3, 2))
    yield backprop_filter("input_rank_3", input=_ones(6, 5, 3))
    for bad in (backprop_input, backprop_filter):
        yield bad("rows_differ", out_backprop=_ones(2, 5, 5, 6))
        yield bad("columns_differ", out_backprop=_ones(2, 6, 4, 6))
        yield bad("batches_differ", out_backprop=_ones(1, 6, 5, 6))
        yield bad("channels_differ", out_backprop=_ones(2, 6, 5, 3))
        yield bad("out_backprop_rank_3", out_backprop=_ones(6, 5, 6))
