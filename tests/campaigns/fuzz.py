# SPDX-License-Identifier: Apache-2.0
"""Random calls of every declared operator: kernels against the reference, bit for bit; bad calls must be refused.

Operators, attributes and dtypes come from the declarations; only what relates the shapes of operands is written down
here, once for each family (`SHAPES`). The same generators serve two drivers: hypothesis in test_fuzz.py, which is
reproducible and shrinks what it finds, and the campaign below, which is fast and new each time:

    python tests/campaigns/fuzz.py --cases 100000

It prints its seed; `--seed S --case N` runs one of its cases again, here and now, so that a debugger sees it.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import _tests_folder  # noqa: F401
import ml_dtypes
import numpy as np
from bits import assert_same_bits
from cases import RANGES
from conftest import ANSWERS_NAN, WIDE, unwritten
from conftest import DEVICES as ALL_DEVICES

from exactqat.operators import OPERATORS, Operator, cpu, reference
from exactqat.operators.declarations.plain_numbers import rounded
from exactqat.operators.declarations.specification import FLOATS, Lowering, TensorSpec

DEVICES = {name: run for name, run in ALL_DEVICES.items() if name not in ANSWERS_NAN}

# What is drawn from. A new dtype, size or layout is one more entry.
DTYPES: tuple[str, ...] = FLOATS
# Left out: what takes the float64 statistics and the masks of other operators, tested in test_quantized_batch_norm.py,
# and sums of whole numbers, in test_rounded_sums.py.
TIED = ("batch_norm_statistics", "quantized_batch_norm", "rounded_sums")
FUZZED = {name: op for name, op in OPERATORS.items() if not name.startswith(TIED)}
EDGES = (8, 64, 512, 4096)  # lanes, rows in a block, blocks of a tree, and blocks of blocks: where loops change
THREADS = (1, 2, 3, 5)
LARGEST = 2**20  # extents and results above this are legal but are not computed here

T = TypeVar("T")


class Source(Protocol):
    """Where choices come from. `numbers` fills arrays; what decides about a call is an `integer`, which can shrink."""

    numbers: np.random.Generator

    def integer(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, both included."""


class Random:
    """Choices of one case of the campaign."""

    def __init__(self, seed: int, case: int):
        self.numbers = np.random.default_rng([seed, case])

    def integer(self, low: int, high: int) -> int:
        return int(self.numbers.integers(low, high + 1))


def choose(source: Source, options: Sequence[T]) -> T:
    return options[source.integer(0, len(options) - 1)]


def chance(source: Source, percent: int) -> bool:
    """True in about `percent` of 100 cases; False is the simpler answer."""
    return source.integer(0, 99) >= 100 - percent


@dataclass
class Call:
    """One call as a user would write it.

    `out`: where the results go: "" for new arrays, "given" for given ones, or the operand whose place the first takes.
    `flaw`: what was done to the call; `refused`: that it must be refused for that.
    """

    op: Operator
    operands: dict[str, Any]
    attributes: dict[str, Any]
    layouts: dict[str, str]
    threads: int
    out: str = ""
    flaw: str = ""
    refused: bool = False

    def __str__(self) -> str:
        lines = [f"{self.op.name} on {self.threads} threads"]
        lines += [f"  {what}: {text}" for what, text in (("out", self.out), ("flaw", self.flaw)) if text]
        for name, value in self.operands.items():
            layout = self.layouts.get(name, "")
            if isinstance(value, np.ndarray):
                text = np.array2string(value.reshape(-1), threshold=8, edgeitems=4, max_line_width=10**6)
                lines.append(f"  {name}: {value.dtype} {list(value.shape)} {layout} {text}")
            else:
                lines.append(f"  {name}: {str(value)[:100]!r} {layout}")
        lines += [f"  {name} = {value!r}" for name, value in self.attributes.items()]
        return "\n".join(lines)


# Values


def specials(dtype: np.dtype) -> np.ndarray:
    limits = ml_dtypes.finfo(dtype)
    ends = [np.inf, limits.max, limits.tiny, limits.smallest_subnormal]
    ordinary = [0.5, 1.0, 1.5, 2.5, 127.5]
    with np.errstate(all="ignore"):
        below = np.nextafter(np.array(ends + ordinary, dtype), dtype.type(0))
        values = np.concatenate([np.array([np.nan, 0.0, limits.eps, *ends, *ordinary], dtype), below])
        return np.concatenate([values, -values])


def _bits(numbers: np.random.Generator, size: int, dtype: np.dtype) -> np.ndarray:
    width = 8 * dtype.itemsize
    return numbers.integers(0, 2**width, size, dtype=f"u{dtype.itemsize}", endpoint=False).view(dtype)


def _special(numbers: np.random.Generator, size: int, dtype: np.dtype) -> np.ndarray:
    return numbers.choice(specials(dtype), size)


def _spoiled(numbers: np.random.Generator, size: int, dtype: np.dtype) -> np.ndarray:
    values = numbers.standard_normal(size).astype(dtype)
    return np.where(numbers.random(size) < 0.1, _special(numbers, size, dtype), values)


def _nearly_denormal(numbers: np.random.Generator, size: int, dtype: np.dtype) -> np.ndarray:
    tiny = float(ml_dtypes.finfo(dtype).tiny)
    return (tiny * numbers.choice([0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3], size) * numbers.choice([-1, 1], size)).astype(
        dtype
    )


def _nearly_overflowing(numbers: np.random.Generator, size: int, dtype: np.dtype) -> np.ndarray:
    return (float(ml_dtypes.finfo(dtype).max) * numbers.uniform(-1, 1, size)).astype(dtype)


def _wide(numbers: np.random.Generator, size: int, dtype: np.dtype) -> np.ndarray:
    limits = ml_dtypes.finfo(dtype)
    return np.ldexp(numbers.uniform(-1, 1, size), numbers.integers(limits.minexp, limits.maxexp, size)).astype(dtype)


# Simplest first. Those of the second group reach the ends of the exponent range.
CALM: dict[str, Callable[[np.random.Generator, int, np.dtype], np.ndarray]] = {
    "halves": lambda numbers, size, dtype: (numbers.integers(-8, 9, size) / 2).astype(dtype),
    "normal": lambda numbers, size, dtype: (3 * numbers.standard_normal(size)).astype(dtype),
    "far from zero": lambda numbers, size, dtype: (1000 + numbers.random(size)).astype(dtype),
    "zeros and infinities": lambda numbers, size, dtype: numbers.choice([0.0, -0.0, 1.0, np.inf, -np.inf], size).astype(
        dtype
    ),
    "one NaN": lambda numbers, size, dtype: np.where(
        np.arange(size) == size // 2, np.nan, numbers.standard_normal(size)
    ).astype(dtype),
}
EXTREME: dict[str, Callable[[np.random.Generator, int, np.dtype], np.ndarray]] = {
    "spoiled": _spoiled,
    "special": _special,
    "bits": _bits,
    "nearly denormal": _nearly_denormal,
    "nearly overflowing": _nearly_overflowing,
    "wide": _wide,
}
PALETTES = CALM | EXTREME


def dtype_of(name: str, dtype: np.dtype) -> np.dtype:
    """The dtype of an operand beside tensors of `dtype`: ranges and statistics have no 16 bits, masks are bytes."""
    if name == "mask":
        return np.dtype("uint8")
    return np.dtype("float32") if dtype.itemsize == 2 and name in WIDE | {"min_cotangent", "max_cotangent"} else dtype


def family(op: Operator) -> str:
    return op.rule.__module__.rsplit(".", 1)[-1]


def palettes(op: Operator, dtype: np.dtype) -> list[str]:
    """The reference emulates float64's fused multiply-add, for which the exponent range needs room at both ends."""
    return list(CALM if family(op) == "depthwise_conv2d" and dtype == np.float64 else PALETTES)


def values(source: Source, shape: tuple[int, ...], dtype: np.dtype, palette: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return PALETTES[palette](source.numbers, math.prod(shape), dtype).reshape(shape)


def ranges(source: Source, shape: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Minima and maxima: ordinary ones, named ones that are degenerate in some way, or anything."""
    numbers, size = source.numbers, math.prod(shape)
    kind = choose(source, ("ordinary", "ordered", "some degenerate", "degenerate", "anything"))
    if kind == "anything":
        palette = choose(source, list(PALETTES))
        return values(source, shape, dtype, palette), values(source, shape, dtype, palette)
    low, high = -3 * numbers.random(size), 0.1 + 3 * numbers.random(size)
    if kind == "ordered":
        low, high = np.sort(numbers.standard_normal((2, size)), axis=0)
    if kind in ("some degenerate", "degenerate"):
        named = np.array(list(RANGES.values()))[numbers.integers(0, len(RANGES), size)].reshape(size, 2)
        spoiled = numbers.random(size) < (0.2 if kind == "some degenerate" else 1)
        low, high = np.where(spoiled, named[:, 0], low), np.where(spoiled, named[:, 1], high)
    with np.errstate(all="ignore"):
        return low.astype(dtype).reshape(shape), high.astype(dtype).reshape(shape)


def ties(
    source: Source, shape: tuple[int, ...], low: np.ndarray, high: np.ndarray, axis: int, num_bits: int, dtype: np.dtype
) -> np.ndarray:
    """Values on the steps of a quantizer, in the middle between them, and next to either."""
    steps = 2 ** min(num_bits, 30) - 1
    along = [-1 if i == axis % len(shape) else 1 for i in range(len(shape))] if low.ndim else []
    with np.errstate(all="ignore"):
        low, high = (bound.astype(np.float64).reshape(along) for bound in (low, high))
        points = np.asarray(
            low + source.numbers.integers(-2, 2 * steps + 3, shape) * 0.5 * ((high - low) / steps), dtype
        )
        towards = source.numbers.choice([-np.inf, np.inf], shape).astype(dtype)
        return np.asarray(np.nextafter(points, towards)) if chance(source, 50) else points


# Shapes


def extent(source: Source) -> int:
    kind = source.integer(0, 19)
    if kind < 14:
        return source.integer(1, 5)
    if kind == 19:
        return 0
    return max(choose(source, EDGES[: kind - 12]) + source.integer(-1, 1), 1)


def shape_of_rank(source: Source, rank: int) -> tuple[int, ...]:
    """Mostly tiny; now and then enough for several threads."""
    size = choose(source, (2000, 6000, 20000, 80000)) if chance(source, 10) else 300
    left, shape = size, []
    for _ in range(rank):
        shape.append(min(extent(source), max(left, 1)))
        left //= max(shape[-1], 1)
    if size > 300 and rank and left > 1:
        shape[0] = max(shape[0] * left - source.integer(0, 9), 1)
    for i in range(rank - 1, 0, -1):  # which axis is the long one
        j = source.integer(0, i)
        shape[i], shape[j] = shape[j], shape[i]
    return tuple(shape)


Shapes = dict[str, tuple[int, ...]]


def _fake_quant(source: Source, op: Operator, attributes: dict[str, Any]) -> Shapes:
    vectors = "per_channel" in op.name or ("min_cotangent" in op.operands and chance(source, 50))
    shape = shape_of_rank(source, source.integer(1 if vectors else 0, 6))
    bounds = shape[-1:] if vectors else ()
    shapes = {name: bounds if name.startswith(("min", "max")) else shape for name in op.operands}
    return shapes | {name: ((math.prod(shape) + 3) // 4,) for name in op.operands if name == "mask"}


def _fake_quant_rows(source: Source, op: Operator, attributes: dict[str, Any]) -> Shapes:
    shape = shape_of_rank(source, source.integer(1, 6))
    return {name: shape[:1] if name == "magnitudes" else shape for name in op.operands}


def _quantize_and_dequantize(source: Source, op: Operator, attributes: dict[str, Any]) -> Shapes:
    shape = shape_of_rank(source, source.integer(0, 6))
    axis = source.integer(-1, len(shape) - 1) if "axis" in attributes else -1
    bounds: tuple[int, ...] = () if axis == -1 else (shape[axis],)
    if not attributes.get("range_given", True) and chance(source, 30):
        bounds = shape_of_rank(source, source.integer(0, 2))  # then they are ignored
    elif op.name.endswith("v3") and axis == -1 and chance(source, 30):
        bounds = (1,) * source.integer(1, 3)
    if "axis" in attributes:
        attributes["axis"] = axis
    return {name: bounds if name in ("input_min", "input_max") else shape for name in op.operands}


def _fused_batch_norm(source: Source, op: Operator, attributes: dict[str, Any]) -> Shapes:
    shape = shape_of_rank(source, source.integer(4, 5))
    vector = (shape[1 if attributes["data_format"].startswith("NC") else -1],)
    shapes = {name: shape if name in ("x", "y_backprop") else vector for name in op.operands}
    if attributes.get("is_training") and attributes.get("exponential_avg_factor") == 1.0 and chance(source, 40):
        shapes |= {"mean": (source.integer(0, 3),), "variance": (source.integer(0, 3),)}  # ignored
    if "reserve_space_3" in op.operands:
        shapes["reserve_space_3"] = shape_of_rank(source, source.integer(0, 2))  # ignored
    return shapes


def _depthwise_conv2d(source: Source, op: Operator, attributes: dict[str, Any]) -> Shapes:
    layout = attributes["data_format"]

    def arranged(n: int, h: int, w: int, c: int) -> tuple[int, ...]:
        return tuple({"N": n, "H": h, "W": w, "C": c}[letter] for letter in layout)

    kernel = [source.integer(1, 4), source.integer(1, 4)]
    if chance(source, 5):
        kernel[source.integer(0, 1)] = 0
    strides, dilations = ([source.integer(1, 3) for _ in "hw"] for _ in range(2))
    sizes = [source.integer(1, 9) for _ in "hw"]
    if chance(source, 10):
        sizes[source.integer(0, 1)] = choose(source, (0, 63, 64, 65, 130))
    if attributes["padding"] == "VALID":  # else most such calls would be refused
        sizes = [max(size, (k - 1) * d + 1) for size, k, d in zip(sizes, kernel, dilations, strict=True)]
    channels = choose(
        source, (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 0, 31, 63, 64, 65) if chance(source, 30) else (1, 2, 3)
    )
    multiplier = choose(source, (1, 1, 1, 2, 3, 5, 0) if chance(source, 50) else (1,))
    batch = choose(source, (1, 2, 3, 0) if chance(source, 40) else (1,))
    if chance(source, 3):
        sizes = [source.integer(20, 60), source.integer(20, 60)]
    if math.prod((*sizes, *kernel, channels, multiplier, batch)) > 300_000:
        channels, multiplier = min(channels, 3), 1
    pads = {letter: (source.integer(0, 3), source.integer(0, 3)) for letter in "HW"}
    attributes["strides"] = arranged(1, *strides, 1)
    attributes["dilations"] = arranged(1, *dilations, 1)
    explicit = attributes["padding"] == "EXPLICIT"
    attributes["explicit_paddings"] = (
        tuple(pad for letter in layout for pad in pads.get(letter, (0, 0))) if explicit else ()
    )
    image, filter = arranged(batch, *sizes, channels), (*kernel, channels, multiplier)
    forward = OPERATORS["depthwise_conv2d_native"]
    geometry = tuple((k, v) for k, v in attributes.items() if k in forward.attributes)
    try:
        (output,) = forward.check((TensorSpec(image, "float32"), TensorSpec(filter, "float32")), geometry).results
        out_backprop = output.shape
    except ValueError:  # padding that leaves too little for the filter: every operator of the family refuses it
        out_backprop = (0, 0, 0, 0)
    for name, sizes_of in (("input_sizes", image), ("filter_sizes", filter)):
        if name in attributes:
            attributes[name] = sizes_of
    shapes = {"input": image, "filter": filter, "out_backprop": out_backprop}
    return {name: shapes[name] for name in op.operands}


SHAPES: dict[str, Callable[[Source, Operator, dict[str, Any]], Shapes]] = {
    "depthwise_conv2d": _depthwise_conv2d,
    "fake_quant": _fake_quant,
    "fake_quant_rows": _fake_quant_rows,
    "fused_batch_norm": _fused_batch_norm,
    "quantize_and_dequantize": _quantize_and_dequantize,
}


# Attributes


def _num_bits(source: Source, op: Operator, signed: bool) -> int:
    if family(op).startswith("fake_quant"):
        return source.integer(2, 16)
    return source.integer(2, 16) if chance(source, 70) else source.integer(1, 61 if signed else 62)


def attributes_of(source: Source, op: Operator, dtype: str) -> dict[str, Any]:
    """Values of all attributes, in order; those that depend on shapes are replaced by SHAPES."""
    attributes: dict[str, Any] = {}
    for name, kind in op.attributes.items():
        if name == "num_bits":
            attributes[name] = _num_bits(source, op, attributes.get("signed_input", False))
        elif kind == "bool":
            attributes[name] = chance(source, 50)
        elif kind == "choice":
            attributes[name] = choose(source, op.choices[name])
        elif name == "epsilon":
            attributes[name] = choose(source, (1e-3, 1e-4, 0.0, 1.001e-5, 1.0, 1e-40))
        elif name == "exponential_avg_factor":
            attributes[name] = choose(source, (1.0, 0.0, 0.5, 0.01, 0.999, 1e-40))
        else:
            attributes[name] = op.defaults.get(name)
    lowest, highest = ("min", "max") if "min" in op.attributes else ("input_min", "input_max")
    if lowest in op.attributes:
        low, high = (float(bound) for bound in ranges(source, (), np.dtype(dtype)))
        if rounded(dtype, low) < rounded(dtype, high):
            attributes[lowest], attributes[highest] = low, high
    if "signed_input" in attributes and "num_bits" in attributes:  # V3 has num_bits first
        attributes["num_bits"] = min(attributes["num_bits"], 61 if attributes["signed_input"] else 62)
    return attributes


# Layouts: the same values elsewhere in memory. Simplest first; only "broadcast" changes values.


def _strided(array: np.ndarray, source: Source) -> np.ndarray:
    buffer = np.zeros([2 * n for n in array.shape], array.dtype)
    view = buffer[(..., *(slice(source.integer(0, 1), None, 2) for _ in array.shape))]
    view[...] = array
    return view


def _reversed(array: np.ndarray, source: Source) -> np.ndarray:
    flip = (..., *(slice(None, None, -1 if chance(source, 70) else 1) for _ in array.shape))
    return np.array(array[flip], order="C")[flip]


def _transposed(array: np.ndarray, source: Source) -> np.ndarray:
    order = source.numbers.permutation(array.ndim)
    return np.array(array.transpose(order), order="C").transpose(np.argsort(order))


def _broadcast(array: np.ndarray, source: Source) -> np.ndarray:
    if array.size == 0 or array.ndim == 0:
        return array
    axis = source.integer(0, array.ndim - 1)
    return np.broadcast_to(array.take([0], axis), array.shape)


def _read_only(array: np.ndarray, source: Source) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


def _at(array: np.ndarray, offset: int) -> np.ndarray:
    buffer = np.zeros(array.nbytes + offset + 64, np.uint8)
    begin = -buffer.ctypes.data % 64 + offset
    view = buffer[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def _big_endian(array: np.ndarray, source: Source) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder(">")) if array.dtype.kind == "f" else array


def _numbers(array: np.ndarray, source: Source) -> Any:
    return array.tolist() if array.ndim < 2 else array


class _Subclass(np.ndarray):
    """Arrays that are not plain, as `np.memmap`."""


LAYOUTS: dict[str, Callable[[np.ndarray, Source], Any]] = {
    "dense": lambda array, source: array,
    "Fortran": lambda array, source: np.asfortranarray(array) if array.ndim else array,
    "transposed": _transposed,
    "strided": _strided,
    "reversed": _reversed,
    "broadcast": _broadcast,
    "read-only": _read_only,
    "offset": lambda array, source: _at(array, array.itemsize * source.integer(1, 15)),
    "misaligned": lambda array, source: _at(array, source.integer(1, array.itemsize - 1)),
    "big-endian": _big_endian,
    "subclass": lambda array, source: array.view(_Subclass),
    "numbers": _numbers,
}


# Calls


def generate(source: Source, op: Operator | None = None) -> Call:
    """A call of `op`, or of any operator: mostly a good one."""
    op = op or choose(source, list(FUZZED.values()))
    dtype_name = choose(source, DTYPES)
    dtype = np.dtype(dtype_name)
    attributes = attributes_of(source, op, dtype_name)
    shapes = SHAPES[family(op)](source, op, attributes)
    allowed = palettes(op, dtype)
    arrays: dict[str, np.ndarray] = {}
    for low, high in (("min", "max"), ("input_min", "input_max")):
        if low in shapes:
            arrays[low], arrays[high] = ranges(source, shapes[low], dtype_of(low, dtype))
    arguments: dict[str, Any] = attributes | arrays
    bounds = [np.asarray(arguments[name]) for name in ("min", "max", "input_min", "input_max") if name in arguments]
    axis = attributes.get("axis", -1)
    for name, shape in shapes.items():
        quantized = name in ("inputs", "input") and bounds and bounds[0].shape in ((), shape[axis:][:1])
        if quantized and chance(source, 30):
            low, high = bounds
            arrays[name] = ties(source, shape, low, high, axis, attributes.get("num_bits", 8), dtype)
        elif name == "mask":
            arrays[name] = source.numbers.integers(0, 256, shape, np.uint8)
        elif name not in arrays:
            arrays[name] = values(source, shape, dtype_of(name, dtype), choose(source, allowed))
            if name in ("variance", "reserve_space_2") and chance(source, 80):
                arrays[name] = np.asarray(np.abs(arrays[name]))
    layouts = {name: choose(source, list(LAYOUTS)) if chance(source, 40) else "dense" for name in op.operands}
    if layouts.get("mask") in ("misaligned", "big-endian", "numbers"):  # there is no such thing for bytes
        layouts["mask"] = "dense"
    first = op.operands[0]
    if layouts[first] == "numbers":  # its dtype decides about that of the numbers
        layouts[first] = "dense"
    operands = {name: LAYOUTS[layouts[name]](arrays[name], source) for name in op.operands}
    out = choose(source, ("given", *op.reuses)) if chance(source, 20) else ""
    call = Call(op, operands, attributes, layouts, choose(source, THREADS), out)
    if chance(source, 12):
        FLAWS[choose(source, list(FLAWS))](source, call)
    return call


# Flaws: what is done to a good call. Most make it a bad one; `refused` marks those that always do.

INTEGERS = (-1, 0, 1, 2, 3, 17, 62, 63, 64, -2, 2**31 - 1, 2**31, 2**32, 2**63, -(2**63), 2**70)
REALS = (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e39, 1e308, 5e-324, 10**400)
WRONG = {
    "bool": (1, "True", 1.5, [True]),
    "int": (1.5, "8", [8], True, np.float32(8.5), object()),
    "float": ("1", [1.0], True, 1j, object()),
    "choice": ("", "nhwc", 3, ["SAME"], object()),
    "integers": (1, 1.5, [1.5, 1, 1, 1], ["1", 1, 1, 1], [[1, 1], [1, 1]], object()),
}


def _attribute_of_the_wrong_type(source: Source, call: Call) -> None:
    name = choose(source, list(call.op.attributes)) if call.op.attributes else ""
    if name:
        call.attributes[name] = choose(source, WRONG[call.op.attributes[name]])
        call.flaw, call.refused = f"{name} of the wrong type", True


def _attribute_anywhere(source: Source, call: Call) -> None:
    names = [name for name, kind in call.op.attributes.items() if kind in ("int", "float", "integers")]
    if not names:
        return
    name = choose(source, names)
    kind = call.op.attributes[name]
    if kind == "integers":
        entries = list(call.attributes[name])
        if chance(source, 30):
            entries = entries[:-1] if chance(source, 50) else [*entries, 1]
        elif entries:
            entries[source.integer(0, len(entries) - 1)] = choose(source, INTEGERS)
        call.attributes[name] = tuple(entries)
    else:
        call.attributes[name] = choose(source, INTEGERS if kind == "int" else REALS)
    call.flaw = f"{name} from anywhere"


def _shape(source: Source, call: Call) -> None:
    name = choose(source, call.op.operands)
    array = np.array(call.operands[name])
    shape = list(array.shape)
    if shape and chance(source, 50):
        axis = source.integer(0, len(shape) - 1)
        shape[axis] = choose(source, (shape[axis] + 1, max(shape[axis] - 1, 0), 0, 2 * shape[axis]))
    elif shape and chance(source, 50):
        del shape[source.integer(0, len(shape) - 1)]
    else:
        shape.insert(source.integer(0, len(shape)), choose(source, (1, 0, 2)))
    call.operands[name] = np.resize(array, shape)
    call.flaw = f"{name} of another shape"


def _dtype(source: Source, call: Call) -> None:
    name = choose(source, call.op.operands)
    dtype = choose(source, ("int32", "bool", "complex64", "uint8", "U2", "object", "datetime64[s]", *DTYPES))
    array = np.array(call.operands[name])
    call.operands[name] = np.zeros(array.shape, dtype)
    call.flaw = f"{name} as {dtype}"
    call.refused = dtype in ("complex64", "U2", "object", "datetime64[s]") or (name == "mask" and dtype != "uint8")


def _not_an_array(source: Source, call: Call) -> None:
    name = choose(source, call.op.operands)
    call.operands[name] = choose(source, (None, object(), "text", b"bytes", {1.0: 2.0}, [[1.0], [2.0, 3.0]]))
    call.flaw, call.refused = f"{name} is not an array", True


def _argument_missing(source: Source, call: Call) -> None:
    del call.operands[choose(source, call.op.operands)]
    call.flaw, call.refused = "an operand is missing", True


def _argument_unknown(source: Source, call: Call) -> None:
    call.attributes["unknown"] = 1
    call.flaw, call.refused = "an unknown argument", True


def _out_does_not_fit(source: Source, call: Call) -> None:
    accepted = _lowered(call, _dense(call))
    if accepted is None:
        return
    out = unwritten(accepted[0], _dense(call).values())
    number = source.integer(0, len(out) - 1)
    array = out[number]
    what = choose(source, ("shape", "dtype", "read-only", "strided", "an operand", "list", "too many"))
    if what == "shape":
        out[number] = np.zeros((*array.shape, 2), array.dtype)
    elif what == "dtype":
        out[number] = np.zeros(array.shape, "int32")
    elif what == "read-only":
        array.flags.writeable = False
    elif what == "strided" and array.size > 1:
        out[number] = np.zeros((*array.shape, 2), array.dtype)[..., 0]
    elif what == "an operand":
        others = [k for k, layout in call.layouts.items() if layout == "dense" and np.size(call.operands[k])]
        others = [k for k in others if number or k not in call.op.reuses]
        if not others:
            return
        out[number] = call.operands[choose(source, others)]
    elif what == "list":
        out[number] = array.tolist()
    else:
        out.append(np.zeros(3))
    call.attributes["out"] = tuple(out)
    call.flaw, call.refused = f"out: {what}", True


FLAWS: dict[str, Callable[[Source, Call], None]] = {
    "shape": _shape,
    "attribute anywhere": _attribute_anywhere,
    "attribute of the wrong type": _attribute_of_the_wrong_type,
    "dtype": _dtype,
    "out does not fit": _out_does_not_fit,
    "not an array": _not_an_array,
    "argument missing": _argument_missing,
    "argument unknown": _argument_unknown,
}


# Checks


def _outcome(function: Callable[[], Any]) -> tuple[np.ndarray, ...] | ValueError | TypeError:
    """Results or the refusal; any other exception is a failure and passes through."""
    try:
        results = function()
    except (ValueError, TypeError) as error:
        return error
    return results if isinstance(results, tuple) else (results,)


def _dense(call: Call) -> dict[str, np.ndarray]:
    """The operands as the kernels get them."""
    leading = next(v.dtype for v in call.operands.values() if isinstance(v, np.ndarray)).newbyteorder("=")
    of_numbers = leading if leading.kind == "f" and leading.itemsize > 2 else np.dtype("float32")
    dense = {}
    for name, value in call.operands.items():
        native = value.dtype.newbyteorder("=") if isinstance(value, np.ndarray) else of_numbers
        dense[name] = np.array(value, native, order="C", subok=False)
    try:
        call.op.check(
            tuple(TensorSpec(a.shape, a.dtype.name) for a in dense.values()),
            tuple(call.op.bind((), {**dense, **call.attributes})[1].items()),
        )
    except TypeError:
        return _fitted(call, dense)
    except ValueError:
        pass
    return dense


def _fitted(call: Call, dense: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What arrays that do not fit together become where nothing is lost."""

    def is_float(dtype: np.dtype) -> bool:
        return dtype.name in DTYPES

    dtypes = {name: dense[name].dtype for name, value in call.operands.items() if isinstance(value, np.ndarray)}
    data = [dtype for name, dtype in dtypes.items() if name not in call.op.ranges and dtype.kind not in "biu"]
    first = next((dtype for dtype in dtypes.values() if is_float(dtype) and dtype.name != "bfloat16"), None)
    leading = data[0] if data else np.dtype("float64" if first == np.float64 else "float32")
    if not is_float(leading):
        return dense
    fitted = {}
    for name, array in dense.items():
        if name in call.op.ranges:
            takes = array.dtype.kind in "biu" or is_float(array.dtype)
            target = leading if leading.itemsize > 2 else np.dtype("float32")
        else:
            takes = name not in dtypes or (array.dtype.kind in "biu" and np.can_cast(array.dtype, leading, "safe"))
            target = leading
        with np.errstate(over="ignore"):
            fitted[name] = np.asarray(call.operands[name]).astype(target) if takes else array
    return fitted


def _lowered(call: Call, operands: dict[str, np.ndarray]) -> tuple[Lowering, dict[str, Any]] | None:
    """The declaration's answer and the checked attributes, None for a refusal."""
    try:
        _, attributes = call.op.bind((), {**operands, **call.attributes})
        specs = tuple(TensorSpec(a.shape, a.dtype.name) for a in operands.values())
        return call.op.check(specs, tuple(attributes.items())), attributes
    except (ValueError, TypeError):
        return None


def check(call: Call) -> tuple[bool, int]:
    """Run a call everywhere and compare. Returns whether it was refused and how many values were compared."""
    op, attributes = call.op, call.attributes
    if call.refused:
        refusal = _outcome(lambda: op(**call.operands, **attributes))
        assert isinstance(refusal, Exception), "a bad call was not refused"
        return True, 0

    dense = _dense(call)
    accepted = _lowered(call, dense)
    if accepted and max(n for spec in accepted[0].results for n in (spec.size, *spec.shape)) > LARGEST:
        return False, 0

    before = [array.tobytes() for array in dense.values()]
    expected = _outcome(lambda: reference.call(op, dense, attributes))
    for name in cpu.INSTRUCTION_SETS:
        cpu.load(name).set_thread_count(call.threads)
    got = _outcome(lambda: op(**call.operands, **attributes))
    for name, value, bytes_before in zip(dense, call.operands.values(), before, strict=True):
        assert np.array(value, dense[name].dtype, order="C").tobytes() == bytes_before, (
            f"{name} was changed by the call"
        )
    if isinstance(expected, Exception):
        assert isinstance(got, type(expected)), f"the reference answers {expected!r}, the call {got!r}"
    else:
        assert not isinstance(got, Exception), f"a good call was refused: {got!r}"
        _compare(op, got, expected, "the NumPy frontend", dense)
    if accepted and call.out:
        got = _outcome(lambda: _with_out(call, dense, unwritten(accepted[0], dense.values())))
        assert isinstance(got, Exception) == isinstance(expected, Exception), f"with out={call.out!r}: {got!r}"
        if not isinstance(expected, Exception):
            _compare(op, got, expected, f"the NumPy frontend, out={call.out!r}", dense)
    if accepted is None:
        assert isinstance(expected, Exception), "the declaration refuses what the reference takes"
        return True, 0

    offset = len(before[0]) % 16  # any place within a cache line, the same each time
    placed = [_at(array, array.itemsize * ((offset + i) % 16)) for i, array in enumerate(dense.values())]
    compared = 0
    for device, run in DEVICES.items():
        got = _outcome(lambda run=run: tuple(run(op, placed, accepted[1])))  # type: ignore[misc]
        if isinstance(expected, Exception):
            assert isinstance(got, type(expected)), f"the reference answers {expected!r}, {device} {got!r}"
        else:
            assert not isinstance(got, Exception), f"{device} refused a good call: {got!r}"
            compared += _compare(op, got, expected, device, dense)
    return isinstance(expected, Exception), compared


def _with_out(call: Call, dense: dict[str, np.ndarray], out: list[np.ndarray]) -> Any:
    operands = dict(call.operands)
    # Numbers have no memory to write over; an array in their place, or one of another dtype, may change what other
    # dtypes become.
    operand = operands.get(call.out)
    if isinstance(operand, np.ndarray) and operand.dtype.newbyteorder("=") == dense[call.out].dtype:
        operands[call.out] = out[0] = dense[call.out].copy()
    results = call.op(**operands, **call.attributes, out=tuple(out))
    returned = results if isinstance(results, tuple) else (results,)
    assert [id(result) for result in returned] == [id(array) for array in out], "other arrays than out are returned"
    return results


def _compare(op: Operator, got: Any, expected: Any, device: str, operands: dict[str, np.ndarray]) -> int:
    compared = 0
    for name, result, wanted in zip(op.results, got, expected, strict=True):
        assert type(result) is np.ndarray, f"{name} on {device} is {type(result)}"
        if result.dtype != wanted.dtype or result.shape != wanted.shape or result.tobytes() != wanted.tobytes():
            assert_same_bits(result, wanted, what=f"{name} on {device}", operands=operands)
        compared += wanted.size
    return compared


# The campaign

REPORT_EVERY = 50  # cases
STUCK_AFTER = 300.0  # seconds for as many


class Subject(Protocol):
    """What a campaign is about: a module that is a script as this one, which is the subject if none is named."""

    __file__: str

    def generate(self, source: Source) -> Any: ...

    def check(self, call: Any) -> tuple[bool, int]:
        """Whether the call was refused and how many values were compared; raises where they differ."""


def _this() -> Any:
    return sys.modules[__name__]


def run_cases(seed: int, begin: int, end: int, current: Path, subject: Subject | None = None) -> None:
    """A batch, in a process of its own. Before each case its number goes to the file `current`: a crash has a name."""
    subject = subject or _this()
    handle = os.open(current, os.O_WRONLY)
    report: dict[str, Any] = {}
    for case in range(begin, end):
        if not report:
            report = {"cases": 0, "refused": 0, "values": 0, "differences": []}
            faulthandler.dump_traceback_later(STUCK_AFTER, exit=True)
        os.pwrite(handle, b"%20d" % case, 0)
        call = subject.generate(Random(seed, case))
        try:
            refused, compared = subject.check(call)
            report["refused"] += refused
            report["values"] += compared
        except Exception as error:
            report["differences"].append(f"case {case}: {type(error).__name__}: {error}\n{call}")
        report["cases"] += 1
        if report["cases"] == REPORT_EVERY or case == end - 1:
            print(json.dumps(report), flush=True)
            report = {}
    faulthandler.cancel_dump_traceback_later()


class Totals:
    def __init__(self) -> None:
        self.counts = {"cases": 0, "refused": 0, "values": 0}
        self.differences: list[str] = []
        self.crashes: list[str] = []


def run_batch(
    seed: int, begin: int, end: int, totals: Totals, progress: Callable[[int], None], subject: Subject | None = None
) -> None:
    """Runs cases in child processes until all are done: one that kills its process is counted, and the next follows."""
    subject = subject or _this()
    flags = ["-S"] if sys.flags.no_site else []  # the children must import what this process imports
    parts = [(begin, end)]
    with tempfile.TemporaryDirectory() as folder:
        current, errors = Path(folder, "case"), Path(folder, "errors")
        while parts:
            begin, end = parts.pop()
            command = [sys.executable, *flags, subject.__file__, "--seed", str(seed)]
            command += ["--batch", str(begin), str(end), str(current)]
            current.write_bytes(b"%20d" % begin)
            with (
                errors.open("w") as stderr,
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as child,
            ):
                assert child.stdout is not None
                for line in child.stdout:
                    report = json.loads(line)
                    for key in totals.counts:
                        totals.counts[key] += report[key]
                    totals.differences += report["differences"]
                    begin += report["cases"]
                    progress(report["cases"])
            if child.returncode:
                case = int(current.read_bytes())
                call, said = subject.generate(Random(seed, case)), errors.read_text()[-6000:]
                totals.crashes.append(f"case {case}: exit status {child.returncode}\n{call}\n{said}")
                progress(1)
                parts += [part for part in ((case + 1, end), (begin, case)) if part[0] < part[1]]


def campaign(cases: int, seed: int, processes: int, subject: Subject) -> int:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(highlight=False)
    devices = ", ".join(DEVICES) if subject is _this() else Path(subject.__file__).stem
    console.print(f"fuzzing {len(FUZZED)} operators on {devices}: {cases} cases, seed {seed}")
    totals, started = Totals(), time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    batch = max(1, min(2000, -(-cases // (4 * processes))))
    with Progress(*columns, console=console) as bar, ThreadPoolExecutor(processes) as pool:
        task = bar.add_task("cases", total=cases)
        batches = [
            pool.submit(
                run_batch,
                seed,
                begin,
                min(begin + batch, cases),
                totals,
                lambda count: bar.advance(task, count),
                subject,
            )
            for begin in range(0, cases, batch)
        ]
        for done in batches:
            done.result()
    for title, failures in (("crash", totals.crashes), ("difference", totals.differences)):
        for failure in failures[:10]:
            console.print(f"\n{title}: {failure}", markup=False)
    counts = totals.counts
    console.print(
        f"\n{counts['cases'] + len(totals.crashes):,} cases in {time.monotonic() - started:.0f} s, "
        f"{counts['refused']:,} calls refused, {counts['values']:,} values compared, "
        f"{len(totals.crashes)} crashes, {len(totals.differences)} differences"
    )
    if totals.crashes or totals.differences:
        console.print(f"one case again: python {os.path.relpath(subject.__file__)} --seed {seed} --case NUMBER")
    return 1 if totals.crashes or totals.differences else 0


def main(subject: Any = None) -> int:
    subject = subject or _this()
    parser = argparse.ArgumentParser(description=(subject.__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, help="of an earlier campaign; a new one by default")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--case", type=int, help="run this one case of --seed in this process")
    parser.add_argument("--batch", nargs=3, help=argparse.SUPPRESS)  # how the campaign starts its processes
    arguments = parser.parse_args()
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    if arguments.batch:
        begin, end, current = arguments.batch
        run_cases(seed, int(begin), int(end), Path(current), subject)
        return 0
    if arguments.case is not None:
        call = subject.generate(Random(seed, arguments.case))
        print(call, flush=True)
        refused, compared = subject.check(call)
        print("refused, as it should be" if refused else f"{compared} values agree")
        return 0
    return campaign(arguments.cases, seed, arguments.processes, subject)


if __name__ == "__main__":
    sys.exit(main())
