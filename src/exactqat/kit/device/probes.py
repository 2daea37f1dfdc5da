# SPDX-License-Identifier: Apache-2.0
"""The smallest graphs and operands that show how a device computes an operator: what `deploy.identify` asks it.

A probe builds a graph of one operator, whose result is "y", for one group of questions (`hypotheses.GROUPS`):

- "rounding": scales are powers of two, so that every multiplier is exact and many results are ties, and sums are small;
- "channels": likewise, with a scale for each channel;
- "multiplier": results lie next to ties, as near as scales in float32 bring them;
- "accumulator": sums are as large as an accumulator of some bits, and products lead beyond it and back;
- "" and all others: any scales, all codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .contexts import GraphBuilder
from .operator import ACTIVATIONS, OPERATORS
from .tensor import CODE_RANGES, INDICES, Quantization, per_tensor

# Numbers that a scale next to a tie is chosen from, and results of graphs that split hypotheses or confirm them.
TRIES, FEW, MANY = 400, 2048, 16384
# Pairs of codes; those whose sums lie nearest to ties are taken.
PAIRS = 1 << 16


@dataclass
class Draw:
    """A graph of one operator of that kind with activations of a dtype, for a group of questions, and the codes of its
    inputs."""

    kind: str
    rng: np.random.Generator
    builder: GraphBuilder
    group: str
    dtype: str
    codes: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.declaration, self.wide = OPERATORS[self.kind], self.dtype == "int16"
        self.exact, self.near = self.group in ("rounding", "channels", "accumulator"), self.group == "multiplier"
        self.lowest, self.highest = CODE_RANGES[self.dtype]
        self.count = FEW if self.group else MANY

    def scale(self, low: float = -6, high: float = 0) -> np.float32:
        """A power of two where multipliers have to be exact."""
        exponent = self.rng.uniform(low, high)
        return np.float32(2.0 ** (np.round(exponent) if self.exact else exponent))

    def grid(self, scale: Any, ends: Sequence[int] = (0, 1, -3, 6), dtype: str = "") -> Quantization:
        """Its zero point is at the ends, in the middle or anywhere; one of `ends` where results lie next to ties, which
        must not saturate."""
        dtype, anywhere = dtype or self.dtype, (0, -128, 127, int(self.rng.integers(-128, 128)))
        return per_tensor(
            scale, 0 if dtype == "int16" else int(self.rng.choice(ends if self.near else anywhere)), dtype
        )

    def random(self, shape: Sequence[int]) -> np.ndarray:
        """Any codes, or in every other graph such as lie near the middle."""
        codes = self.rng.integers(self.lowest, self.highest + 1, shape)
        return (codes // int(self.rng.choice([1, 8]))).astype(self.dtype)

    def input(self, name: str, grid: Quantization, codes: np.ndarray) -> None:
        self.builder.input(name, codes.shape, grid)
        self.codes[name] = codes

    def result(self, operands: Sequence[str], grid: Quantization | None, **attributes: Any) -> None:
        if not self.group and "activation" in self.declaration.attributes:
            attributes["activation"] = str(self.rng.choice(ACTIVATIONS))
        self.builder.operator(self.kind, operands, grid, name="y", **attributes)

    def next_to_a_tie(
        self, totals: np.ndarray, about: float, by: float, dtype: str = "", multiplies: bool = False
    ) -> tuple[Any, Any]:
        """Result scales, [...], with which one of the positive real numbers [TRIES, ...] lies next to half way between
        two codes, and the places of these numbers. One in three is as near as scales in float32 allow; others are a
        share of 2**-7 to 2**-25 away on either side, where multipliers of as many bits part.

        Args:
            about, by: what the scales lie near to, and how many times larger or smaller they may be.
            dtype: of the result, if not that of the activations.
            multiplies: the scales are those of operands, by which the numbers are multiplied and not divided.
        """
        rng, columns = self.rng, totals.shape[1:]
        ties = rng.integers(0, CODE_RANGES[dtype or self.dtype][1] - 8, totals.shape) + 0.5
        offset = rng.choice([-1, 0, 1], columns) * 2.0 ** -rng.uniform(7, 25, columns)
        wanted = ties * (1 + offset)
        scales = (wanted / totals if multiplies else totals / wanted).astype(np.float32)
        exact = scales.astype(np.float64)
        away = np.abs((totals * exact if multiplies else totals / exact) - ties)
        fits = (away > 0) & (scales > about / by) & (scales < about * by)
        best = np.argmin(np.where(fits, np.where(offset == 0, away, rng.random(totals.shape)), np.inf), 0)
        return np.take_along_axis(scales, best[None], 0)[0], best

    def with_steps(self, codes: np.ndarray, grid: Quantization, steps: int) -> np.ndarray:
        """The first half of the codes replaced by those that are so many steps away from real 0, on either side."""
        half = codes.reshape(-1)[: codes.size // 2]
        half[:] = np.clip(grid.zero_point[0] + steps * self.rng.choice([-1, 1], half.size), self.lowest, self.highest)
        return codes


# --- sums of products ------------------------------------------------------------------------------------------------


def weighted(draw: Draw) -> None:
    rng, wide, channels, axis = draw.rng, draw.wide, 64, draw.declaration.filter_axis or 0
    depth = int(rng.choice([8, 64])) if draw.group == "accumulator" else 4
    shape, window, attributes = _window(draw, depth, channels)
    scale, result = draw.scale(), draw.scale()
    x_grid, y_grid, x = draw.grid(scale), draw.grid(result), draw.random(shape)
    ratio, filter, bias = (
        float(result) / float(scale),
        rng.integers(-15, 16, window),
        rng.integers(-2000, 2001, channels),
    )
    if draw.group in ("rounding", "channels"):
        shifts = rng.integers(5, 10, channels) if wide else rng.integers(1, 8, channels)
        filter_scale = ratio * 2.0 ** -(shifts if draw.group == "channels" else shifts[:1])
    elif draw.near:
        # Without products, sums are the bias: each channel's scale brings it next to a tie.
        draws = rng.integers(200, 2**22 if wide else 30000, (TRIES, channels)).astype(np.float64)
        filter_scale, best = draw.next_to_a_tie(draws / ratio, 1.0, np.inf, multiplies=True)
        bias = draws[best, np.arange(channels)] * rng.choice([-1, 1], channels)
        x[:, : shape[1] // 2 + depth] = x_grid.zero_point[0]
    elif draw.group == "accumulator":
        bits = int(rng.integers(16, 32))
        x_grid, filter_scale = per_tensor(scale, 0), np.array([ratio * 2.0 ** (7 - bits)])
        x[...] = rng.choice([127, 127, 126, -128], (1, shape[1], *[1] * (len(shape) - 2)))
        bias = np.clip(rng.uniform(-1.1, 1.1, channels) * 2.0 ** (bits - 1), -(2.0**31) + 2**24, 2.0**31 - 2**24)
        there_and_back = np.where(np.arange(depth) * 2 < depth, 127, -127)
        filter = np.where(rng.random((channels, 1)) < 0.3, 127, there_and_back) * rng.choice([-1, 1], (channels, 1))
        filter = (filter.T if axis else filter).reshape(window)
    else:
        filter, bias = rng.integers(-127, 128, window), rng.integers(-20000, 20001, channels) * (256 if wide else 1)
        filter_scale = 2.0 ** rng.uniform(-11, -6, channels if rng.integers(2) else 1)
        spread = float(scale * np.median(filter_scale)) * 73 * 74 * np.sqrt(filter.size / channels)
        y_grid, attributes["activation"] = draw.grid(spread * 2 ** rng.uniform(-8, -4)), str(rng.choice(ACTIVATIONS))
    draw.input("x", x_grid, x)
    draw.declaration.build(draw.builder, "x", filter, filter_scale, np.rint(bias), y_grid, name="y", **attributes)


def _window(draw: Draw, depth: int, channels: int) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    """Shapes of the operand and of the filter, and attributes: windows of one line or, of any operands, of nine."""
    rows, whole = draw.count // channels, not draw.group
    attributes: dict[str, Any] = {"padding": "SAME" if whole else "VALID"}
    if not draw.declaration.spatial:
        return (1, rows, depth), (channels, depth), {}
    if draw.declaration.filter_axis == 3:
        shape, window = (
            ((1, 16, 16, channels), (1, 3, 3, channels))
            if whole
            else ((1, rows + depth - 1, 1, channels), (1, depth, 1, channels))
        )
        return shape, window, attributes
    shape, window = ((1, 16, 16, 5), (channels, 3, 3, 5)) if whole else ((1, rows, 1, depth), (channels, 1, 1, depth))
    if "output_size" in draw.declaration.attributes:
        attributes = {"output_size": (18, 18) if whole else (rows, 1), "strides": (1, 1), "padding": "VALID"}
    return shape, window, attributes


def matrices(draw: Draw) -> None:
    rng, depth = draw.rng, 1 if draw.near else 4
    grids = [
        draw.grid(draw.scale()),
        per_tensor(draw.scale(), 0 if draw.wide else int(draw.rng.choice([0, 3])), draw.dtype),
    ]
    factor, steps = float(grids[0].scale[0]) * float(grids[1].scale[0]), rng.integers(1, draw.highest, (2, TRIES))
    result = np.float32(factor * 2.0 ** int(rng.integers(15, 19) if draw.wide else rng.integers(6, 11)))
    side = int(np.sqrt(draw.count))
    codes = [draw.random((1, side, depth)), draw.random((1, depth, side))]
    if draw.near:
        result, best = draw.next_to_a_tie(factor * steps[0] * steps[1], float(result), 32)
        codes = [draw.with_steps(*each) for each in zip(codes, grids, steps[:, best], strict=True)]
    for each in zip(("x", "z"), grids, codes, strict=True):
        draw.input(*each)
    draw.result(["x", "z"], draw.grid(result if draw.exact or draw.near else result * draw.scale(-1, 1)))


# --- two tensors, value by value -------------------------------------------------------------------------------------


def pairs(draw: Draw) -> None:
    steps, first = draw.rng.integers(1, draw.highest - 8, (2, TRIES)), draw.scale()
    second = np.float32(first * draw.scale(-3, 3))
    if draw.declaration.adds:
        result = np.float32(max(first, second) * draw.scale(-1, 3))
        totals = float(first) * steps[0] + float(second) * steps[1]
    else:
        most = (5, 10) if draw.declaration.asks else (3, 9)
        result = np.float32(first * second * draw.scale(*((15, 19) if draw.wide else most)))
        totals = float(first) * float(second) * steps[0] * steps[1]
    grids, codes = [draw.grid(first), draw.grid(second)], [draw.random((1, draw.count)) for _ in range(2)]
    if draw.near and draw.rng.integers(2):
        # Scales in short ratios: results are ties but for what float32 keeps of the scales, which the last bits decide.
        ratio, adds = float(draw.rng.integers(3, 16)) / 16, draw.declaration.adds
        if adds:
            grids[1] = draw.grid(np.float32(float(first) * ratio))
            result = np.float32(float(first) * 2.0 ** int(draw.rng.integers(0, 3)))
        else:
            about = float(first) * float(second)
            result = np.float32(about * ratio * 2.0 ** np.round(np.log2(float(result) / about)))
        drawn = draw.rng.integers(draw.lowest, draw.highest + 1, (2, PAIRS))
        one, other = (
            (side - grid.zero_point[0]) * float(grid.scale[0]) for side, grid in zip(drawn, grids, strict=True)
        )
        real = (one + other if adds else one * other) / float(result)
        nearest = np.argsort(np.abs(real % 1 - 0.5) + (np.abs(real) > draw.highest))[: draw.count]
        codes = [side[nearest][None].astype(draw.dtype) for side in drawn]
    elif draw.near:
        result, best = draw.next_to_a_tie(totals, float(result), 16)
        codes = [draw.with_steps(*each) for each in zip(codes, grids, steps[:, best], strict=True)]
    for each in zip(("x", "z"), grids, codes, strict=True):
        draw.input(*each)
    draw.result(["x", "z"], draw.grid(result))


def compared(draw: Draw) -> None:
    for name in ("x", "z"):
        draw.input(name, draw.grid(draw.scale(-9, -1)), draw.random((1, draw.count)))
    draw.result(["x", "z"], INDICES)


def alike(draw: Draw, **attributes: Any) -> None:
    """On one grid."""
    both = draw.grid(0.1)
    for name in ("x", "z"):
        draw.input(name, both, draw.random((1, draw.count)))
    draw.result(["x", "z"], None, **attributes)


def quotients(draw: Draw) -> None:
    first, second, codes = draw.grid(draw.scale()), draw.grid(draw.scale()), draw.random((1, draw.count))
    draw.input("x", first, draw.random((1, draw.count)))
    draw.builder.constant("z", np.where(codes == second.zero_point[0], codes ^ 1, codes), second)
    draw.result(["x", "z"], draw.grid(first.scale[0] / second.scale[0] * draw.scale(-6, 2)))


# --- one tensor ------------------------------------------------------------------------------------------------------


def values(draw: Draw, source: str = "", target: str = "") -> None:
    """All codes of `source`, or a sample of those of int16; the result is in `target`."""
    rng, declaration, (source, target) = draw.rng, draw.declaration, (source or draw.dtype, target or draw.dtype)
    lowest, highest = CODE_RANGES[source]
    codes, sampled = np.arange(lowest, highest + 1), source == "int16" and draw.group != ""
    codes = rng.choice(codes, FEW) if sampled else np.tile(codes, 1 if source == "int16" or draw.group else 64)
    scale = draw.scale(-9, (2 if draw.wide else 2.4) if declaration.fixed_grid else 0)
    attributes: dict[str, Any] = {}
    short = draw.near and bool(rng.integers(2))  # ratios, for ties but for what float32 keeps of them
    if "alpha" in declaration.attributes:
        attributes["alpha"] = int(rng.integers(1, 20)) / 20 if short else float(draw.scale(-4, -0.1))
    if "approximate" in declaration.attributes:
        attributes["approximate"] = bool(rng.integers(2))
    about = float(scale) * 2.0 ** (8 * ((source == "int16") - (target == "int16")))
    result = np.float32(about * draw.scale(1, 4) if draw.exact else about * draw.scale(-2, 3))
    if short:
        result = np.float32(about * 2.0 ** int(rng.integers(1, 5)) / int(rng.integers(3, 20)))
    elif draw.near:
        steps = rng.integers(1, highest if sampled else highest - lowest, TRIES)
        result, best = draw.next_to_a_tie(float(scale) * steps, about, 64, target)
        codes = np.where(rng.random(codes.size) < 0.1, rng.choice([-1, 1]) * steps[best], codes) if sampled else codes
    if ("table",) in declaration.asks:
        # Where a function is its operand, or a share of it as near 0, powers of two and tenths make ties.
        ties = bool(rng.integers(2))
        result = np.float32(2.0 ** int(rng.integers(-8, -1))) if ties else draw.scale(-8, -2)
        power = int(rng.integers(-9, -5)) if declaration.fixed_grid else np.round(np.log2(scale))
        scale = np.float32(2.0**power * rng.choice([1, 0.8])) if ties else scale
    draw.input("x", draw.grid(scale, (-128, -128, 0), source), codes.astype(source)[None])
    draw.result(["x"], None if declaration.fixed_grid else draw.grid(result, dtype=target), **attributes)


def moved_to_a_grid(draw: Draw) -> None:
    """Within int8 or, of int16, either way."""
    ways = [("int8", "int16"), ("int16", "int8"), ("int16", "int16")]
    values(draw, *(ways[draw.rng.integers(3)] if draw.wide else ("int8", "int8")))


def of_positive(draw: Draw, power: float = 0.0) -> None:
    scale, lowest = draw.scale(), 0 if draw.wide else draw.lowest
    codes = np.arange(lowest, draw.highest + 1).astype(draw.dtype)
    draw.input("x", per_tensor(scale, lowest, draw.dtype), np.tile(codes, 1 if draw.wide else 32)[None])
    draw.result(["x"], draw.grid(draw.scale(-8, -2) * float(scale) ** power))


def slopes(draw: Draw) -> None:
    scale, slope, ratio = draw.scale(), draw.scale(-9, -5), draw.scale(-1, 2)
    if draw.rng.integers(2):  # ties but for what float32 keeps of short ratios
        slope, ratio = np.float32(1 / int(draw.rng.integers(10, 200))), np.float32(int(draw.rng.integers(3, 20)) / 8)
    draw.input("x", draw.grid(scale), draw.random((1, 64, 128)))
    draw.builder.constant("z", draw.rng.integers(-127, 128, 128).astype(np.int8), per_tensor(slope, 0))
    draw.result(["x", "z"], draw.grid(scale * ratio))


def rows(draw: Draw) -> None:
    length = int(draw.rng.choice([2, 3, 10, 33, 100]))
    draw.input("x", draw.grid(draw.scale(-7, -1)), draw.random((1, draw.count // length, length)))
    draw.result(["x"], None)


# --- images ----------------------------------------------------------------------------------------------------------


def windows(draw: Draw) -> None:
    window = (2, 2) if draw.exact else tuple(int(side) for side in draw.rng.integers(1, 6, 2))
    padding = "VALID" if draw.exact else str(draw.rng.choice(["SAME", "VALID"]))
    draw.input("x", draw.grid(0.1), draw.random((1, 8, 8, draw.count // 64)))
    draw.result(["x"], None, filter_size=window, strides=(1, 1), padding=padding)


def reductions(draw: Draw) -> None:
    rng, mean, scale = draw.rng, draw.declaration.averages, draw.scale()
    sizes = [int(size) for size in (2 ** rng.integers(0, 3, 2) if draw.exact else rng.integers(1, 6, 2))]
    count, codes, grid = int(np.prod(sizes)), draw.random((1, *sizes, draw.count)), draw.grid(scale)
    about = float(scale) * (1 if mean or draw.exact else 2 * np.sqrt(count))
    result = np.float32(about * draw.scale(-2, 3))
    if draw.near:
        steps, half = rng.integers(1, draw.highest - 8, TRIES), draw.count // 2
        result, best = draw.next_to_a_tie(float(scale) * steps * (1 if mean else count), about, 16)
        codes[..., :half] = draw.with_steps(np.zeros(2 * half, draw.dtype), grid, steps[best])[:half]
    draw.input("x", grid, codes)
    draw.result(["x"], draw.grid(result), axes=(1, 2), keep_dims=bool(rng.integers(2)))


def products(draw: Draw) -> None:
    count, scale = int(draw.rng.integers(2, 5)), draw.scale(-7, -5)
    draw.input("x", draw.grid(scale), draw.random((1, count, FEW)))
    result = float(scale) ** count * 2.0 ** (count * draw.rng.uniform(4, 6) - 6) * (256.0 if draw.wide else 1)
    draw.result(["x"], draw.grid(result), axes=(1,))


def resized(draw: Draw) -> None:
    rng, nearest = draw.rng, draw.group == "place"
    if nearest:  # most of these pairs have places that float32 brings to the other side of a middle
        sizes, wanted = rng.choice([8, 14, 16], 2).tolist(), rng.choice([23, 24, 41, 45, 46, 47, 59], 2).tolist()
    else:
        sizes = rng.integers(2, 9, 2).tolist()
        wanted = [int(size * rng.integers(1, 4)) if rng.integers(2) else int(rng.integers(1, 24)) for size in sizes]
    corners, halves = [(False, False), (True, False), (False, True), (True, True)][rng.integers(4 if nearest else 3)]
    draw.input("x", draw.grid(0.1), draw.random((1, *sizes, 16)))
    draw.result(["x"], None, size=wanted, align_corners=corners, half_pixel_centers=halves)


# --- what only moves codes -------------------------------------------------------------------------------------------


def moves(draw: Draw, **attributes: Any) -> None:
    draw.input("x", draw.grid(draw.scale()), draw.random((1, 8, 12, 32)))
    draw.result(["x"], None, **attributes)


def largest(draw: Draw) -> None:
    draw.input("x", draw.grid(draw.scale()), draw.random((1, 64, 64, 8)))
    draw.result(["x"], INDICES, axis=3, output_type="int32")


# By kind, in the order in which they are asked.
PROBES: Mapping[str, Callable[[Draw], None]] = {
    **dict.fromkeys(("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV"), weighted),
    "BATCH_MATMUL": matrices,
    **dict.fromkeys(("ADD", "SUB", "MUL", "SQUARED_DIFFERENCE"), pairs),
    "DIV": quotients,
    "QUANTIZE": moved_to_a_grid,
    **dict.fromkeys(("RELU", "LEAKY_RELU", "ABS", "LOGISTIC", "TANH", "HARD_SWISH", "GELU", "EXP", "ELU"), values),
    "PRELU": slopes,
    "RSQRT": partial(of_positive, power=-0.5),
    **dict.fromkeys(("SQRT", "LOG"), of_positive),
    **dict.fromkeys(("SOFTMAX", "LOG_SOFTMAX", "L2_NORMALIZATION"), rows),
    **dict.fromkeys(("AVERAGE_POOL_2D", "MAX_POOL_2D"), windows),
    **dict.fromkeys(("MEAN", "SUM"), reductions),
    "REDUCE_PROD": products,
    **dict.fromkeys(("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"), resized),
    **dict.fromkeys(("EQUAL", "GREATER", "LESS"), compared),
    **dict.fromkeys(("MAXIMUM", "MINIMUM"), alike),
    "CONCATENATION": partial(alike, axis=1),
    "PAD": partial(moves, paddings=((0, 0), (1, 2), (0, 1), (0, 0))),
    "RESHAPE": partial(moves, new_shape=(1, 96, 32)),
    "TRANSPOSE": partial(moves, permutation=(0, 2, 3, 1)),
    "ARG_MAX": largest,
}


def probe(
    kind: str, rng: np.random.Generator, builder: GraphBuilder, group: str = "", dtype: str = "int8"
) -> dict[str, np.ndarray]:
    """Builds a graph of one operator, whose result is "y", and returns codes of its inputs.

    Args:
        group: of questions; "": none in particular.
        dtype: of the activations.

    Raises:
        Refusal: some device does not take it; another draw may do.
    """
    draw = Draw(kind, rng, builder, group, dtype)
    PROBES[kind](draw)
    return draw.codes


__all__ = ["PROBES", "probe"]
