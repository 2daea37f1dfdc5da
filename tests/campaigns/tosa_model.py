# SPDX-License-Identifier: Apache-2.0
"""Runs .tflite files on the TOSA reference model, which Arm's `tosa-tools` brings: what `device="tosa"` was found from.

    python -m venv ENVIRONMENT && ENVIRONMENT/bin/pip install tosa-tools==2026.8.0
    python tests/campaigns/identify.py --devices tosa --tosa ENVIRONMENT --write src/exactqat/kit/device/tosa.json

The package pins NumPy, so it has an environment of its own. TOSA has no operators with scales: an operator of
TensorFlow Lite becomes several of TOSA's, in the manner of TensorFlow's own passes from `tfl` to `tosa`: sums of
products in int32, then RESCALE with double rounding, or of int16 in int48, then RESCALE by 16 bits; operands of ADD are
brought to 20 bits more (15 of int16) with single rounding; functions are TABLEs, of int16 with straight lines; SOFTMAX
is a table and Newton's iteration. What these passes leave alone, and what has no room in TOSA's integers, is rejected.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _tests_folder  # noqa: F401
import numpy as np

from exactqat.deploy import Graph, RuntimeRefusal, Tensor
from exactqat.deploy.formats.read_tflite import read_content
from exactqat.deploy.runtimes import emulated_runtime
from exactqat.kit.device.arithmetic import bounds, same_padding

INT8, INT16, INT32, INT48, BOOL = "int8", "int16", "int32", "int48", "bool"
# What holds them in NumPy.
HELD = {INT48: "int64"}
SINGLE, DOUBLE = 1, 3  # RoundingMode
PROPAGATE = 1  # NanPropagationMode
NEAREST, BILINEAR = 1, 2  # ResizeMode
ACCUMULATORS = {INT8: (INT32, 5), INT16: (INT48, 6)}  # with DType's number
EXTRA_BITS = {INT8: 20, INT16: 15}  # of operands of ADD
Numbers = Sequence[int]
Attributes = Mapping[str, Any]


@dataclass
class Writer:
    """A TOSA graph, operation by operation; see `tosa_process`."""

    graph: Graph
    tensors: dict[str, tuple[list[int], str]] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    shapes: dict[str, list[int]] = field(default_factory=dict)
    operations: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in self.graph.inputs:
            tensor = self.graph.tensors[name]
            self.tensors[name] = list(tensor.shape), tensor.dtype

    def add(self, kind: str, inputs: Sequence[str], shape: Numbers, *attributes: Any, dtype: str = "",
            name: str = "") -> str:  # fmt: skip
        """By default the result has the first operand's dtype."""
        name = name or f"tosa/{len(self.operations)}"
        self.tensors[name] = [int(size) for size in shape], dtype or self.tensors[inputs[0]][1]
        self.operations.append([kind, list(inputs), name, list(attributes)])
        return name

    def alike(self, kind: str, *inputs: str, attributes: Sequence[Any] = (), dtype: str = "") -> str:
        """Of operands that broadcast."""
        shape = np.broadcast_shapes(*(self.tensors[name][0] for name in inputs))
        return self.add(kind, inputs, shape, *attributes, dtype=dtype)

    def constant(self, values: Any, dtype: str) -> str:
        array, name = np.asarray(values, HELD.get(dtype, dtype)), f"tosa/constant/{len(self.constants)}"
        array = array.reshape(array.shape or (1,))
        self.constants[name], self.tensors[name] = array, (list(array.shape), dtype)
        return name

    def number(self, value: int, like: str) -> str:
        """One for all of an int32 tensor."""
        return self.constant(np.full([1] * len(self.tensors[like][0]), value), INT32)

    def sizes(self, numbers: Numbers) -> str:
        name = f"tosa/shape/{len(self.shapes)}"
        self.shapes[name] = [int(number) for number in numbers]
        return name

    def operand(self, tensor: Tensor, rank: int | None = None) -> str:
        """The tensor, with as many axes in front as make up the rank."""
        name = tensor.name if tensor.data is None else self.constant(tensor.data, tensor.dtype)
        if rank in (None, len(tensor.shape)):
            return name
        return self.reshape(name, [*[1] * (rank - len(tensor.shape)), *tensor.shape])

    def reshape(self, name: str, shape: Numbers) -> str:
        return self.add("RESHAPE", [name, self.sizes(shape)], shape)

    def rescale(
        self, name: str, factors: Any, zero_points: tuple[int, int], dtype: str, rounding: int, bits: int = 31
    ) -> str:
        """Codes times a factor, or one for each channel, of so many bits: 31 or 15."""
        (shape, source), per_channel = self.tensors[name], np.ndim(factors) > 0
        fractions, exponents = np.frexp(np.atleast_1d(np.asarray(factors, np.float64)))
        significands = np.floor(fractions * 2.0**bits + 0.5).astype(np.int64)
        carry = significands == 1 << bits
        significands, shifts = np.where(carry, significands >> 1, significands), bits - exponents - carry
        over = np.minimum(np.maximum(shifts - 62, 0), 31)
        if min(shifts) < 2 or max(shifts - over) > 62:
            raise RuntimeRefusal("a factor that no shift is left for")
        operands = [
            name,
            self.constant(significands >> over, INT32 if bits == 31 else INT16),
            self.constant(shifts - over, INT8),
            *(self.constant([zero], side) for zero, side in zip(zero_points, (source, dtype), strict=True)),
        ]
        return self.add("RESCALE", operands, shape, bits == 31, rounding, per_channel, False, False, dtype=dtype)

    def steps(self, x: Tensor, rank: int | None = None, factor: float = 1.0) -> str:
        """int32: how far codes are from real 0, times a factor."""
        return self.rescale(self.operand(x, rank), factor, (zero(x), 0), INT32, SINGLE)

    def codes(self, name: str, factor: float, y: Tensor, rounding: int = DOUBLE) -> str:
        """Of an int32 tensor."""
        return self.rescale(name, factor, (0, zero(y)), y.dtype, rounding)

    def windowed(self, x: Tensor, window: Numbers, attributes: Attributes) -> tuple[str, list[int]]:
        """The operand of a sliding window and its padding. TOSA's windows meet the operand's end, so what TensorFlow
        Lite's leave out there is cut off."""
        pads, sizes, name = [], list(x.shape), self.operand(x)
        dilations = attributes.get("dilations", (1, 1))
        for axis, (size, stride, gap) in enumerate(zip(window, attributes["strides"], dilations, strict=True), 1):
            before, after = (0, 0)
            if attributes["padding"] == "SAME":
                before, after = same_padding(x.shape[axis], size, stride, gap)
            rest = (x.shape[axis] + before + after - (size - 1) * gap - 1) % stride
            sizes[axis] -= max(rest - after, 0)
            pads += [before, max(after - rest, 0)]
        if sizes != list(x.shape):
            name = self.add("SLICE", [name, self.sizes([0] * 4), self.sizes(sizes)], sizes)
        return name, pads

    def finish(self, name: str, output: Tensor, attributes: Attributes) -> None:
        """Clamps as a fused activation does, and calls it as the graph does."""
        shape, ends = self.tensors[name][0], {INT8: (-128, 127), INT16: (-(2**15), 2**15 - 1)}.get(output.dtype)
        low, high = bounds(output, attributes, PLAIN) if ends else (0, 0)
        if ends in ((low, high), None):
            self.add("IDENTITY", [name], shape, name=output.name)
        else:
            self.add("CLAMP", [name], shape, low, high, name=output.name)


PLAIN: Any = SimpleNamespace(arithmetic=None, scales_sums_in_float32=False)


def zero(tensor: Tensor) -> int:
    return int(tensor.quantization.zero_point[0])


def scale(tensor: Tensor) -> float:
    return float(tensor.quantization.scale[0])


# --- sums of products -------------------------------------------------------------------------------------------------


def rescaled_sums(writer: Writer, sums: str, x: Tensor, filter: Tensor, y: Tensor) -> str:
    scales = filter.quantization.scale.astype(np.float64)
    factors = scale(x) * (scales if len(scales) > 1 else scales[0]) / scale(y)
    if y.dtype == INT16:
        return writer.rescale(sums, factors, (0, 0), INT16, SINGLE, 15)
    return writer.rescale(sums, factors, (0, zero(y)), INT8, DOUBLE)


def weighted(writer: Writer, kind: str, name: str, tensors: Sequence[Tensor], weights: np.ndarray, y: Tensor,
             shape: Numbers, *attributes: Any) -> str:  # fmt: skip
    x, filter, bias = tensors
    assert bias.data is not None
    held, number = ACCUMULATORS[x.dtype]
    operands = [name, writer.constant(weights, INT8), writer.constant(bias.data, held),
                writer.constant([zero(x)], x.dtype), writer.constant([0], INT8)]  # fmt: skip
    sums = writer.add(kind, operands, shape, *attributes, False, number, dtype=held)
    return rescaled_sums(writer, sums, x, filter, y)


def convolution(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Attributes) -> str:
    x, filter, _ = tensors
    weights, shape = filter.data, list(y.shape)
    assert weights is not None
    strides, dilations = list(attributes["strides"]), list(attributes["dilations"])
    kind, window = "CONV2D", weights.shape[1:3]
    if "depth_multiplier" in attributes or weights.shape[0] == 1 != shape[3]:
        kind, weights = "DEPTHWISE_CONV2D", weights[0].reshape(*window, x.shape[3], -1)
    elif weights.shape[3] != x.shape[3]:
        raise RuntimeRefusal("groups")
    name, pads = writer.windowed(x, window, attributes)
    return weighted(writer, kind, name, tensors, weights, y, shape, pads, strides, dilations)


def transposed(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Attributes) -> str:
    x, filter, _ = tensors
    assert filter.data is not None
    strides, cut = list(attributes["strides"]), []
    for axis, stride in enumerate(strides, 1):
        whole = (x.shape[axis] - 1) * stride + filter.shape[axis] - y.shape[axis]
        before = max(whole, 0) // 2
        cut += [-before, before - whole]
    return weighted(writer, "TRANSPOSE_CONV2D", writer.operand(x), tensors, filter.data, y, y.shape, cut, strides)


def fully_connected(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Attributes) -> str:
    x, filter, _ = tensors
    assert filter.data is not None
    outputs, inputs = filter.shape
    rows = math.prod(x.shape) // inputs
    name, weights = writer.reshape(writer.operand(x), [rows, 1, 1, inputs]), filter.data[:, None, None]
    shape = [rows, 1, 1, outputs]
    return writer.reshape(
        weighted(writer, "CONV2D", name, tensors, weights, y, shape, [0] * 4, [1, 1], [1, 1]), y.shape
    )


def matrices(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Attributes) -> str:
    names = []
    for x, turned in zip(tensors, (attributes["adj_x"], attributes["adj_y"]), strict=True):
        if x.dtype != y.dtype or list(x.shape[:-2]) != list(y.shape[:-2]):
            raise RuntimeRefusal("matrices of two dtypes, or that broadcast")
        shape = [math.prod(x.shape[:-2]), *x.shape[-2:]]
        names.append(writer.reshape(writer.operand(x), shape))
        if turned:
            names[-1] = writer.add("TRANSPOSE", names[-1:], [shape[0], shape[2], shape[1]], [0, 2, 1])
    zeros = [writer.constant([zero(x)], x.dtype) for x in tensors]
    shape = [math.prod(y.shape[:-2]), *y.shape[-2:]]
    sums = writer.add("MATMUL", [*names, *zeros], shape, dtype=ACCUMULATORS[y.dtype][0])
    return writer.reshape(rescaled_sums(writer, sums, *tensors, y), y.shape)


# --- value by value ---------------------------------------------------------------------------------------------------


def added(writer: Writer, tensors: list[Tensor], y: Tensor, kind: str) -> str:
    twice, one = 2 * max(map(scale, tensors)), 2.0 ** EXTRA_BITS[y.dtype]
    terms = [writer.steps(x, len(y.shape), scale(x) * one / twice) for x in tensors]
    return writer.codes(writer.add(kind, terms, y.shape), twice / (scale(y) * one), y)


def multiplied(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Attributes) -> str:
    terms = [writer.steps(x, len(y.shape)) for x in tensors]
    product = writer.add("MUL", [*terms, writer.constant([0], INT8)], y.shape)
    return writer.codes(product, scale(tensors[0]) * scale(tensors[1]) / scale(y), y)


def squared_difference(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Attributes) -> str:
    twice, one = 2 * max(map(scale, tensors)), 2.0**7
    terms = [writer.steps(x, len(y.shape), scale(x) * one / twice) for x in tensors]
    difference = writer.add("SUB", terms, y.shape)
    square = writer.add("MUL", [difference, difference, writer.constant([0], INT8)], y.shape)
    return writer.codes(square, twice * twice / (scale(y) * one * one), y)


def requantized(writer: Writer, tensors: list[Tensor], y: Tensor, rounding: int, factor: float = 1.0) -> str:
    (x,) = tensors
    return writer.rescale(writer.operand(x), factor * scale(x) / scale(y), (zero(x), zero(y)), y.dtype, rounding)


def rectified(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Attributes) -> str:
    highest = 127 if y.dtype == INT8 else 2**15 - 1
    return writer.add("CLAMP", [requantized(writer, tensors, y, SINGLE)], y.shape, zero(y), highest)


def leaky(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Attributes) -> str:
    sides = [requantized(writer, tensors, y, DOUBLE, factor) for factor in (1.0, float(attributes["alpha"]))]
    return chosen(writer, writer.steps(tensors[0]), *sides)


def sloping(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Attributes) -> str:
    x, alpha = tensors
    steps, slopes = writer.steps(x), writer.steps(alpha, len(x.shape))
    product = writer.add("MUL", [steps, slopes, writer.constant([0], INT8)], y.shape)
    above = requantized(writer, [x], y, DOUBLE)
    return chosen(writer, steps, above, writer.codes(product, scale(x) * scale(alpha) / scale(y), y))


def chosen(writer: Writer, steps: str, above: str, below: str) -> str:
    """The first where a number is not negative."""
    condition = writer.alike("GREATER_EQUAL", steps, writer.number(0, steps), dtype=BOOL)
    return writer.alike("SELECT", condition, above, below, dtype=writer.tensors[above][1])


def magnitude(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Attributes) -> str:
    (x,) = tensors
    return writer.codes(writer.alike("ABS", writer.steps(x)), scale(x) / scale(y), y)


# --- functions --------------------------------------------------------------------------------------------------------

Function = Callable[[Any], Any]


def away(x: Any) -> Any:
    """Rounded half away from zero."""
    return np.trunc(x + np.copysign(0.5, x))


def table_of_513(function: Function, low: Any, high: Any, factor: Any) -> np.ndarray:
    """Every value is moved by half of what a straight line misses in the middle of two."""
    real = type(low)
    step = (high - low) / real(512)
    at, following = (low + np.arange(first, first + 512).astype(real) * step for first in (0, 1))
    with np.errstate(over="ignore", invalid="ignore"):
        values = away(function(at) * factor)
        line = away((function(following) * factor + values) / real(2))
        middle = away(function(at + step / real(2)) * factor)
        entries = [*(values - away((line - middle) / real(2))), *away(function(np.array([high])) * factor)]
    return np.clip(np.nan_to_num(entries, posinf=2**15, neginf=-(2**15)), -(2**15), 2**15 - 1).astype(np.int16)


def looked_up(writer: Writer, tensors: list[Tensor], y: Tensor, function: Function, real: Any = np.float32) -> str:
    """function: of numbers in float64, whose results are rounded to `real`, as C's library has them."""
    (x,) = tensors

    def library(values: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(values.astype(np.float64)).astype(real)

    if y.dtype == INT16:
        one, other = real(scale(x)), real(scale(y))
        factor = real(2**16) / (other * real(2**15 - 1) - other * real(-(2**15)))
        table = table_of_513(library, one * real(-(2**15)), one * real(2**15 - 1), factor)
        lines = writer.add("TABLE", [writer.operand(x), writer.constant(table, INT16)], y.shape, dtype=INT32)
        return writer.codes(lines, 1 / 128, y, SINGLE)
    numbers = real(scale(x)) * np.arange(-128 - zero(x), 128 - zero(x)).astype(real)
    with np.errstate(all="ignore"):
        steps = library(numbers) * (real(1) / real(scale(y)))
        codes = np.nan_to_num(away(np.asarray(steps, np.float64)) + zero(y), posinf=127, neginf=-128)
    table = writer.constant(np.clip(codes, -128, 127).astype(np.int8), INT8)
    return writer.add("TABLE", [writer.operand(x), table], y.shape)


def hard_swish(x: Any) -> Any:
    return x * np.clip(x + 3, 0, 6) / 6


def gelu(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Attributes) -> str:
    def function(wide: Any) -> Any:
        x, real = wide.astype(np.float32), np.float32
        if attributes["approximate"]:
            inner = real(math.sqrt(2 / math.pi)) * (x + real(0.044715) * x * x * x)
            return real(0.5) * x * (real(1) + np.tanh(inner.astype(np.float64)).astype(real))
        inner = x * real(-math.sqrt(0.5))
        return real(0.5) * x * np.vectorize(math.erfc, otypes=[np.float64])(inner).astype(real)

    return looked_up(writer, tensors, y, function)


def softmax(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Attributes) -> str:
    """exp by a table, the reciprocal of the sum by Newton's iteration or, of int16, by a table too."""
    (x,) = tensors
    add, mul, last = partial(writer.alike, "ADD"), partial(writer.alike, "MUL"), len(x.shape) - 1

    def n(value: int) -> str:
        return writer.number(value, steps)

    def by(bits: int) -> str:
        return writer.constant([bits], INT8)

    def right(name: str, shift: str) -> str:
        return writer.alike("ARITHMETIC_RIGHT_SHIFT", name, shift, attributes=[True])

    def left(name: str, shift: str) -> str:
        return writer.alike("LOGICAL_LEFT_SHIFT", name, shift)

    def reduced(kind: str, name: str, *more: Any) -> str:
        return writer.add(kind, [name], [*x.shape[:-1], 1], last, *more)

    def table(name: str, entries: Any) -> str:
        shape = writer.tensors[name][0]
        return writer.add("TABLE", [name, writer.constant(entries, INT16)], shape, dtype=INT32)

    beta, steps = float(attributes.get("beta", 1.0)), writer.steps(x)
    below = writer.alike("SUB", steps, reduced("REDUCE_MAX", steps, PROPAGATE))
    if y.dtype == INT16:
        full = 65535.0
        at = writer.rescale(below, scale(x) * beta / (10.0 / full), (0, 0), INT32, DOUBLE)
        at = writer.rescale(add(at, n(2**15 - 1)), 1.0, (0, 0), INT16, SINGLE)
        powers = right(table(at, table_of_513(np.exp, np.float64(-10), np.float64(0), 2.0**15)), n(7))
        total = reduced("REDUCE_SUM", powers)
        zeros = writer.alike("CLZ", total)
        beyond = writer.alike("SUB", left(total, writer.alike("SUB", zeros, n(1))), n(1 << 30))
        place = writer.rescale(writer.alike("SUB", right(beyond, n(14)), n(1 << 15)), 1.0, (0, 0), INT16, SINGLE)
        entries = table_of_513(lambda v: 1 / (1 + v), np.float64(0), np.float64(1), 2.0**15)
        share = mul(powers, right(table(place, entries), n(7)), by(0))
        return writer.codes(right(share, writer.alike("SUB", n(31), zeros)), 1 / (scale(y) * 2**15), y, SINGLE)
    at = writer.rescale(below, 128.0, (0, 0), INT16, SINGLE)
    with np.errstate(over="ignore"):
        values = np.minimum(np.exp(beta * scale(x) * np.arange(-256, 257)), 1.0) * 2.0**31
    bits = np.minimum(away(values), 2**31 - 1).astype(np.int64)
    powers = right(table(at, bits & 255), n(7))
    for byte, shift in ((8, 1), (16, 9), (24, 17)):
        powers = add(powers, left(table(at, (bits >> byte) & 255), n(shift)))
    total = reduced("REDUCE_SUM", right(powers, n(12)))
    zeros = writer.alike("CLZ", total)
    half = left(total, writer.alike("SUB", zeros, n(1)))
    inverse = add(mul(half, n(-1010580540), by(31)), n(1515870810))
    for _ in range(3):
        error = writer.alike("SUB", n(1 << 29), mul(inverse, half, by(31)))
        inverse = add(inverse, mul(mul(inverse, error, by(31)), n(4), by(0)))
    share = right(mul(powers, inverse, by(30)), writer.alike("SUB", n(12 + 31 - 8), zeros))
    return writer.codes(share, 1.0, y, SINGLE)


# --- images and axes --------------------------------------------------------------------------------------------------


def pooled(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Attributes, average: bool) -> str:
    (x,) = tensors
    window, strides = list(attributes["filter_size"]), list(attributes["strides"])
    name, pad = writer.windowed(x, window, attributes)
    if not average:
        return writer.add("MAX_POOL2D", [name], y.shape, window, strides, pad, PROPAGATE)
    zeros = [writer.constant([zero(tensor)], x.dtype) for tensor in (x, y)]
    return writer.add("AVG_POOL2D", [name, *zeros], y.shape, window, strides, pad, ACCUMULATORS[INT8][1])


def reduced(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Attributes, mean: bool) -> str:
    (x,) = tensors
    name, shape, count = writer.steps(x), list(x.shape), 1
    for axis in sorted(attributes["axes"]):
        count, shape[axis] = count * shape[axis], 1
        name = writer.add("REDUCE_SUM", [name], shape, axis)
    return writer.reshape(writer.codes(name, scale(x) / (scale(y) * (count if mean else 1)), y, SINGLE), y.shape)


def resized(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Attributes, mode: int) -> str:
    """Places are fractions of whole numbers; a result between four values is their sum, rescaled."""
    (x,) = tensors
    halves, scales, offsets, borders = attributes["half_pixel_centers"], [], [], []
    for axis in (1, 2):
        size, wanted = x.shape[axis], y.shape[axis]
        corners = attributes["align_corners"] and wanted > 1
        above, under = wanted - corners, size - corners
        common = math.gcd(above, under)
        above, under = (2 * above // common, 2 * under // common) if size > 1 else (2 * wanted, 2)
        offset = under // 2 if halves else 0
        # A nearest neighbor is what TensorFlow Lite's place is cut off to, and TOSA's rounded.
        if halves if mode == BILINEAR else not attributes["align_corners"]:
            offset -= above // 2
        scales += [above, under]
        offsets.append(offset)
        borders.append(under * (wanted - 1) - above * (size - 1) + offset)
    dtype = x.dtype if mode == NEAREST else ACCUMULATORS[x.dtype][0]
    operands = [writer.operand(x), *(writer.sizes(numbers) for numbers in (scales, offsets, borders))]
    result = writer.add("RESIZE", operands, y.shape, mode, dtype=dtype)
    if mode == NEAREST:
        return result
    bits = 31 if x.dtype == INT8 else 15
    return writer.rescale(result, 1.0 / (scales[0] * scales[2]), (0, 0), x.dtype, SINGLE, bits)


def largest(writer: Writer, tensors: list[Tensor], y: Tensor, attributes: Attributes) -> str:
    (x,) = tensors
    return writer.add("ARGMAX", [writer.operand(x)], y.shape, attributes["axis"], PROPAGATE, dtype=INT32)


def moved(writer: Writer, tensors: list[Tensor], y: Tensor, kind: str, attributes: Attributes) -> str:
    names = [writer.operand(x) for x in tensors]
    if kind == "CONCAT":
        return writer.add(kind, names, y.shape, attributes["axis"] % len(y.shape))
    if kind == "PAD":
        sizes = writer.sizes([size for pair in attributes["paddings"] for size in pair])
        return writer.add(kind, [*names, sizes, writer.constant([zero(y)], y.dtype)], y.shape)
    if kind == "TRANSPOSE":
        return writer.add(kind, names, y.shape, list(attributes["permutation"]))
    if kind == "RESHAPE":
        return writer.reshape(names[0], y.shape)
    # In int8 there is none of the others.
    terms = [writer.steps(x, len(y.shape)) for x in tensors]
    return writer.codes(writer.add(kind, terms, y.shape, PROPAGATE), 1.0, y, SINGLE)


FUNCTIONS: dict[str, Function] = {
    "LOGISTIC": lambda x: np.float32(1) / (np.float32(1) + np.exp(-x).astype(np.float32)),
    "TANH": np.tanh,
    "EXP": np.exp,
    "ELU": lambda x: np.where(x < 0, np.expm1(x), x),
    "RSQRT": lambda x: np.float32(1) / np.sqrt(x).astype(np.float32),
    "SQRT": np.sqrt,
    "LOG": np.log,
}
# By TensorFlow Lite's name; what is missing the device rejects.
LOWERED: dict[str, Callable[..., str]] = {
    **dict.fromkeys(("CONV_2D", "DEPTHWISE_CONV_2D"), convolution),
    "TRANSPOSE_CONV": transposed,
    "FULLY_CONNECTED": fully_connected,
    "BATCH_MATMUL": matrices,
    "ADD": lambda w, x, y, a: added(w, x, y, "ADD"),
    "SUB": lambda w, x, y, a: added(w, x, y, "SUB"),
    "MUL": multiplied,
    "SQUARED_DIFFERENCE": squared_difference,
    "QUANTIZE": lambda w, x, y, a: requantized(w, x, y, DOUBLE),
    "RELU": rectified,
    "LEAKY_RELU": leaky,
    "PRELU": sloping,
    "ABS": magnitude,
    **{kind: (lambda w, x, y, a, f=function: looked_up(w, x, y, f)) for kind, function in FUNCTIONS.items()},
    "HARD_SWISH": lambda w, x, y, a: looked_up(w, x, y, hard_swish, np.float64),
    "GELU": gelu,
    "SOFTMAX": softmax,
    "AVERAGE_POOL_2D": lambda w, x, y, a: pooled(w, x, y, a, True),
    "MAX_POOL_2D": lambda w, x, y, a: pooled(w, x, y, a, False),
    "MEAN": lambda w, x, y, a: reduced(w, x, y, a, True),
    "SUM": lambda w, x, y, a: reduced(w, x, y, a, False),
    "RESIZE_BILINEAR": lambda w, x, y, a: resized(w, x, y, a, BILINEAR),
    "RESIZE_NEAREST_NEIGHBOR": lambda w, x, y, a: resized(w, x, y, a, NEAREST),
    "ARG_MAX": largest,
    **{kind: (lambda w, x, y, a, name=name: moved(w, x, y, name, a)) for kind, name in {
        "CONCATENATION": "CONCAT", "PAD": "PAD", "TRANSPOSE": "TRANSPOSE", "RESHAPE": "RESHAPE",
        "MAXIMUM": "MAXIMUM", "MINIMUM": "MINIMUM"}.items()},
}  # fmt: skip


def written(graph: Graph) -> Writer:
    """The graph in TOSA's operators."""
    writer = Writer(graph)
    for operator in graph.operators:
        tensors, (y,) = [graph.tensors[name] for name in operator.inputs], [graph.tensors[n] for n in operator.outputs]
        dtypes = {tensor.dtype for tensor in (tensors[0], y)} - ({INT32} if operator.kind == "ARG_MAX" else set())
        if operator.kind not in LOWERED or not dtypes <= {INT8, INT16}:
            raise RuntimeRefusal(f"no {operator.kind} of {y.dtype}")
        name = LOWERED[operator.kind](writer, tensors, y, operator.attributes)
        writer.finish(name, y, operator.attributes)
    return writer


class ReferenceModel:
    """A `Run`: from a .tflite file and codes by input to codes by output."""

    def __init__(self, environment: Path) -> None:
        here, messages = Path(__file__).parent, Path(emulated_runtime.__file__).parent
        self.command = [environment / "bin" / "python", here / "tosa_process.py", messages]
        self.start()

    def start(self) -> None:
        clean = {"PYTHONPATH": "", "PATH": ""}
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, env=clean)  # fmt: skip

    def __call__(self, content: bytes, codes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        graph = read_content(content).graph
        writer = written(graph)
        header = {
            "inputs": list(graph.inputs), "outputs": list(graph.outputs), "tensors": writer.tensors,
            "constants": list(writer.constants), "shapes": writer.shapes, "operations": writer.operations,
        }  # fmt: skip
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        try:
            emulated_runtime.write(stdin, header, [*writer.constants.values(), *(codes[name] for name in graph.inputs)])
            message = emulated_runtime.read(stdout)
        except BrokenPipeError:
            message = None
        if message is None:
            self.start()
            raise RuntimeRefusal("the reference model ends its process")
        answer, results = message
        if "error" in answer:
            raise RuntimeRefusal(answer["error"])
        return dict(zip(graph.outputs, results, strict=True))
