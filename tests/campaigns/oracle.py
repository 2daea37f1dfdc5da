# SPDX-License-Identifier: Apache-2.0
"""Puts random calls to TensorFlow itself and to exactqat, and compares: `make oracle`.

    python tests/campaigns/oracle.py [--values 20000000] [--seed N] [--op NAME ...] [--call K] [--json PATH]
                                     [--tensorflow PYTHON]

Outputs that are promised to the bit must agree in every bit; sums and batch normalization's vectors must be at least as
near to the exact value as TensorFlow's, element for element, and its tensors within their own few roundings. Each run
draws a new seed and prints it first; with the seed, the operator and the number of the call a difference can be
repeated alone. Exit status 1 if there is one.

TensorFlow runs in processes of its own, in an environment that is made on the first run, once with its oneDNN kernels
and once without: which of the two has the bits is written in tests/campaigns/record_goldens.py.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import _tests_folder  # noqa: F401
import numpy as np
from bits import assert_same_bits, differing
from cases import RANGES, RESULTS, Case
from evaluations import ACCURATE, convolution, elementwise_bound, fake_quant_sums
from record_goldens import QUIET, ask, needs_onednn, question

TENSORFLOW = "2.21.0"
ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-tensorflow"

# How much of --values an operator gets. Where the exact value has to be found too, fewer say as much.
SHARES = {op: 1.0 if "accuracy" not in promises.values() else 0.2 for op, promises in RESULTS.items()}
SHARES |= dict.fromkeys(("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormGrad", "FusedBatchNormGradV2"), 0.05)
SHARES["QuantizeAndDequantize"] = 0.1  # TensorFlow answers as its version 2

CALLS_PER_BATCH = 48  # one large, a few of middle size, the others small


# Operands


Shape = tuple[int, ...]
Call = tuple[dict[str, np.ndarray], dict[str, Any], str]  # operands, attributes, tags as in tests/cases.py


def draw(rng: np.random.Generator, *choices: Any) -> Any:
    return choices[rng.integers(len(choices))]


def flag(rng: np.random.Generator, probability: float = 0.5) -> bool:
    return bool(rng.random() < probability)


def magnitude(rng: np.random.Generator, lowest: float, highest: float) -> float:
    """Uniform in the logarithm; both ends are powers of ten."""
    return float(10 ** rng.uniform(lowest, highest))


def draw_shape(rng: np.random.Generator, size: int, smallest_rank: int = 0) -> Shape:
    """About `size` elements; small tensors may also be empty."""
    rank = int(rng.integers(smallest_rank, 6))
    if size < 1000:
        return tuple(int(draw(rng, 1, 2, 3, 4, 5, 7, 8, 9, 17) if flag(rng, 0.98) else 0) for _ in range(rank))
    shape = []
    for _ in range(max(rank, 1) - 1):
        shape.append(int(min(draw(rng, 1, 2, 3, 7, 16, 33, 100, 257, 768), max(size, 1))))
        size //= shape[-1]
    shape.append(max(size, 1))
    return tuple(int(n) for n in rng.permutation(shape))


def random_floats(rng: np.random.Generator, count: int, dtype: Any) -> np.ndarray:
    """Any bit patterns: of every exponent, NaN and infinity among them."""
    return rng.integers(0, 2 ** (8 * dtype().itemsize), count, dtype=f"u{dtype().itemsize}").view(dtype)


def draw_range(rng: np.random.Generator, dtype: Any) -> tuple[float, float]:
    unit, a, b = magnitude(rng, -6, 6), rng.uniform(0.01, 1), rng.uniform(0.01, 1)
    kind = rng.integers(16)
    if kind < 6:
        return -unit * a, unit * b
    if kind < 8:
        return unit * a, unit * (a + b)
    if kind < 10:
        return -unit * (a + b), -unit * a
    if kind == 10:
        return draw(rng, (0.0, unit), (-unit, 0.0), (-0.0, unit))
    if kind == 11:
        tiny = magnitude(rng, -46, -30)
        return -tiny * a, tiny * b
    if kind == 12:
        huge = magnitude(rng, 30, 38.5)
        return -huge * a, huge * b
    if kind == 13:
        return draw(rng, (unit * a, unit * a), (unit, unit * a), (unit, -unit), (-unit * a, -unit))
    if kind == 14:
        low, high = (float(value) for value in random_floats(rng, 2, dtype))
        return low, high
    return draw(rng, *RANGES.values())


def draw_ranges(
    rng: np.random.Generator, count: int | None, dtype: Any, wanted: Callable[[Any, Any], bool]
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds that fit `wanted`: scalars, or vectors of `count`. Beyond 64 channels the ranges repeat."""
    ranges: list[tuple[Any, Any]] = []
    with np.errstate(over="ignore"):
        while len(ranges) < min(1 if count is None else count, 64):
            low, high = (dtype(bound) for bound in draw_range(rng, dtype))
            if wanted(low, high):
                ranges.append((low, high))
    bounds = np.array(ranges, dtype).reshape(-1, 2).T
    if count is None:
        return np.array(bounds[0, 0]), np.array(bounds[1, 0])
    return np.resize(bounds[0], count), np.resize(bounds[1], count)


def special_values(dtype: Any) -> np.ndarray:
    limits = np.finfo(dtype)
    tiny, largest, denormal = float(limits.tiny), float(limits.max), float(limits.smallest_subnormal)
    positive = np.array([0.0, denormal, tiny / 2, tiny, largest, 0.5, 1.0, 1.5, 2.5, np.inf], dtype)
    return np.concatenate([positive, -positive, np.array([np.nan], dtype)])


def neighbours(rng: np.random.Generator, values: np.ndarray) -> np.ndarray:
    """A third of the values move to the next float below, a third to the one above."""
    if flag(rng, 0.3):
        return values
    infinity = values.dtype.type(np.inf)
    towards = np.array([-infinity, infinity], values.dtype)[rng.integers(0, 2, values.size)]
    return np.where(rng.random(values.size) < 2 / 3, np.nextafter(values, towards), values)


def probing_values(
    rng: np.random.Generator, low: np.ndarray, high: np.ndarray, codes: tuple[int, int], step: Any, offset: Any
) -> np.ndarray:
    """Values for a quantizer whose code k represents `(k - offset) * step`; all arguments of one size, flat.

    Half of them are grid points and the middles between these, with their neighbours; the others are spread over the
    range and beyond it, normally distributed, special, or arbitrary.
    """
    dtype, count = low.dtype.type, low.size
    starts = (
        np.sort(rng.integers(0, count + 1, 4))
        if flag(rng, 0.2)
        else (np.array([5, 8, 9, 9.5]) * count / 10).astype(int)
    )
    grid, spread, normal, special, arbitrary = np.split(np.arange(count), starts)
    values = np.empty(count, dtype)
    first, last = codes
    drawn = np.floor(rng.random(grid.size) * (last - first + 7)) + (first - 3) + rng.integers(0, 2, grid.size) / 2
    values[grid] = neighbours(rng, ((drawn - offset[grid]) * step[grid]).astype(dtype))
    width = high[spread].astype(np.float64) - low[spread]
    values[spread] = low[spread] + width * (rng.random(spread.size) * 1.5 - 0.25)
    values[normal] = (np.abs(low[normal].astype(np.float64)) + np.abs(high[normal])) * rng.standard_normal(normal.size)
    values[special] = rng.choice(special_values(dtype), special.size)
    values[arbitrary] = random_floats(rng, arbitrary.size, dtype)
    return np.roll(values, int(rng.integers(count + 1)))


def incoming_gradients(rng: np.random.Generator, shape: Shape, dtype: Any = np.float32) -> np.ndarray:
    """Normally distributed over several magnitudes, with zeros of both signs and denormals; some calls not finite."""
    size = int(np.prod(shape))
    gradients = (rng.standard_normal(size) * 2.0 ** rng.integers(-12, 12)).astype(dtype)
    tiny = float(np.finfo(dtype).tiny)
    gradients[: size // 16] = rng.choice(np.array([0.0, -0.0, tiny / 4, -tiny / 4, tiny], dtype), size // 16)
    if flag(rng, 0.1) and size:
        gradients[rng.integers(0, size, 1 + size // 50)] = draw(rng, np.nan, np.inf, -np.inf)
    rng.shuffle(gradients)
    return gradients.reshape(shape)


# Calls, one function for each family


def is_anything(low: Any, high: Any) -> bool:
    return True


def is_range(low: Any, high: Any) -> bool:
    """With denormals counting as zeros, as in the kernels."""
    tiny = np.finfo(low.dtype).tiny
    low, high = (bound if abs(bound) >= tiny else 0 * bound for bound in (low, high))
    return bool(low < high)


def is_ordered(low: Any, high: Any) -> bool:
    return bool(low <= high)


def fake_quant(rng: np.random.Generator, op: str, size: int) -> Call:
    # TensorFlow has no float64 kernel.
    per_channel, args = "PerChannel" in op, "Args" in op
    shape = draw_shape(rng, size, smallest_rank=int(per_channel))
    count = shape[-1] if per_channel else None
    low, high = draw_ranges(rng, count, np.float32, is_range if args else is_anything)
    num_bits, narrow_range = int(rng.integers(2, 17)) if flag(rng, 0.6) else 8, flag(rng)
    codes = int(narrow_range), 2**num_bits - 1
    flat = [np.broadcast_to(bound, shape).reshape(-1) for bound in (low, high)]
    width = flat[1].astype(np.float64) - flat[0]
    step = width / (codes[1] - codes[0])
    zero_point = np.clip(np.round(codes[0] - flat[0] / step), *codes)
    operands = {"inputs": probing_values(rng, *flat, codes, step, zero_point).reshape(shape)}
    if "Gradient" in op:
        operands = {"gradients": incoming_gradients(rng, shape)} | operands
    attributes: dict[str, Any] = {"num_bits": num_bits, "narrow_range": narrow_range}
    if args:
        return operands, {"min": float(low), "max": float(high)} | attributes, ""
    return operands | {"min": low, "max": high}, attributes, ""


def quantize_and_dequantize(rng: np.random.Generator, op: str, size: int) -> Call:
    dtype = np.float32 if op == "QuantizeAndDequantize" or flag(rng, 0.8) else np.float64
    # Version 3 refuses scalars, although its axis -1 means the whole tensor.
    shape = draw_shape(rng, size, smallest_rank=int(op == "QuantizeAndDequantizeV3"))
    gradient, has_range = op.endswith("Grad"), flag(rng)
    has_axis = op != "QuantizeAndDequantize" and len(shape) > 0 and flag(rng)
    axis = int(rng.integers(len(shape))) if has_axis else -1
    tags = ""
    round_mode = draw(rng, "HALF_TO_EVEN", "HALF_UP")
    if op in ("QuantizeAndDequantizeV2", "QuantizeAndDequantizeV4") and has_range and has_axis:
        # TensorFlow refuses what it documents; its version 3 has the numerics, but one round mode.
        tags, round_mode = "beyond_tensorflow", "HALF_TO_EVEN"
    # With axis -1 a range must be ordered. A range that is taken from the data is given to the data first.
    ordered = not gradient and not (has_range and has_axis)
    low, high = draw_ranges(rng, shape[axis] if has_axis else None, dtype, is_ordered if ordered else is_anything)
    signed = flag(rng)
    num_bits = 8 if flag(rng, 0.4) else int(rng.integers(1, 62 if signed else 63))
    narrow_range = flag(rng)
    codes = (-(2 ** (num_bits - 1)), 2 ** (num_bits - 1) - 1) if signed else (0, 2**num_bits - 1)
    spread = tuple(n if i == axis else 1 for i, n in enumerate(shape)) if has_axis else ()
    flat = [np.broadcast_to(bound.reshape(spread), shape).reshape(-1) for bound in (low, high)]
    limits = [np.abs(bound.astype(np.float64)) / max(abs(code), 1) for bound, code in zip(flat, codes, strict=True)]
    data = probing_values(rng, *flat, codes, np.maximum(*limits), np.zeros(flat[0].size)).reshape(shape)
    if not has_range and not gradient:
        data = within_range(rng, data, low.reshape(spread), high.reshape(spread), axis)
    operands = {"input": data, "input_min": low, "input_max": high}
    if gradient:
        return {"gradients": incoming_gradients(rng, shape, dtype)} | operands, {"axis": axis}, tags
    attributes: dict[str, Any] = {"signed_input": signed, "num_bits": num_bits, "range_given": has_range}
    if op == "QuantizeAndDequantize":
        attributes |= {"input_min": float(low), "input_max": float(high)}
        return {"input": data}, attributes, tags
    if op != "QuantizeAndDequantizeV3":
        attributes["round_mode"] = round_mode
    return operands, attributes | {"narrow_range": narrow_range, "axis": axis}, tags


def within_range(
    rng: np.random.Generator, data: np.ndarray, low: np.ndarray, high: np.ndarray, axis: int
) -> np.ndarray:
    """Data from which a range can be taken.

    Without NaN, because what TensorFlow makes of one depends on its place. Where an end of the range is zero or
    denormal it is +0, because else the sign of TensorFlow's zeros depends on the place of the zeros and denormals: it
    takes them for equal, and which of them becomes the minimum or maximum decides.
    """
    with np.errstate(invalid="ignore"):
        data = np.clip(np.nan_to_num(data, nan=0.0), np.nan_to_num(low, nan=0.0), np.nan_to_num(high, nan=1.0))
    if not flag(rng, 0.05):
        data = np.where(np.isinf(data), data.dtype.type(1), data)
    if data.size == 0:
        return data
    others = tuple(i for i in range(data.ndim) if i != axis) if axis >= 0 else None
    tiny = np.finfo(data.dtype).tiny
    one_sided = (data.min(axis=others, keepdims=True) > -tiny) | (data.max(axis=others, keepdims=True) < tiny)
    return np.where(one_sided & (np.abs(data) < tiny), data.dtype.type(0), data)


def batch_norm(rng: np.random.Generator, op: str, size: int) -> Call:
    gradient, newest, training = "Grad" in op, op.endswith("V3"), flag(rng, 0.7)
    data_format = draw(rng, *(("NHWC", "NCHW", "NDHWC", "NCDHW") if newest else ("NHWC", "NCHW")))
    if gradient and not training:
        data_format = draw(rng, "NHWC", "NDHWC") if newest else "NHWC"  # TensorFlow's kernel takes no other
    channels = int(rng.integers(1, 150)) if flag(rng, 0.9) else int(rng.integers(150, 1025))
    # Empty images are left out: TensorFlow's reserve spaces are uninitialised memory then.
    rank = len(data_format)
    leading = [int(rng.integers(1, 5)) for _ in range(rank - 2)]
    leading.append(max(min(size, 2_000_000) // (channels * int(np.prod(leading))), 1))
    shape = (*(int(n) for n in rng.permutation(leading)), channels)
    # Images far from zero lose digits; how far, and how spread, differs between the channels.
    centre = rng.choice([-1, 1], channels) * 10 ** rng.uniform(-3, 4 * rng.random(), channels)
    deviation = 10 ** rng.uniform(-3, 3, channels) if flag(rng) else np.ones(channels)
    x = (centre + deviation * rng.standard_normal(shape)).astype(np.float32)
    if flag(rng, 0.05):
        x.reshape(-1)[rng.integers(0, x.size, 1 + x.size // 5000)] = draw(rng, np.nan, np.inf, -np.inf)

    def vector(mean: float, spread: float) -> np.ndarray:
        return (mean + spread * rng.standard_normal(channels)).astype(np.float32)

    def as_images(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.moveaxis(array, -1, 1)) if data_format.startswith("NC") else array

    epsilon = magnitude(rng, -6, -1)
    given_mean = (centre + rng.standard_normal(channels)).astype(np.float32)
    given_variance = (deviation**2 * rng.uniform(0.2, 3, channels)).astype(np.float32)
    common: dict[str, Any] = {"epsilon": epsilon, "data_format": data_format, "is_training": training}
    if not gradient:
        factor = draw(rng, 1.0, 1.0, 0.1, 0.9, float(rng.random()))
        if training and factor == 1.0 and flag(rng):
            given_mean = given_variance = np.zeros((0,), np.float32)
        operands = {"x": as_images(x), "scale": vector(1, 0.5), "offset": vector(0, draw(rng, 0.1, 1, 10))}
        operands |= {"mean": given_mean, "variance": given_variance}
        return operands, common | {"exponential_avg_factor": factor}, ""
    if training and flag(rng, 0.8):
        exact = x.astype(np.float64).reshape(-1, channels)
        given_mean, given_variance = exact.mean(axis=0).astype(np.float32), exact.var(axis=0).astype(np.float32)
    y_backprop = (rng.standard_normal(shape) + draw(rng, 0, 1)).astype(np.float32)
    operands = {"y_backprop": as_images(y_backprop), "x": as_images(x), "scale": vector(1, 0.5)}
    operands |= {"reserve_space_1": given_mean, "reserve_space_2": given_variance}
    if newest:
        operands["reserve_space_3"] = np.zeros((0,), np.float32)
    return operands, common, ""


def depthwise(rng: np.random.Generator, op: str, size: int) -> Call:
    forward, filter_gradient = op == "DepthwiseConv2dNative", op.endswith("Filter")
    # One channel makes TensorFlow take its path for ordinary convolutions, whose order of operations is another.
    channels = int(rng.integers(1 if filter_gradient else 2, 70))
    multiplier = int(draw(rng, 1, 1, 1, 2, 3, 4, 8))
    kernel = (int(rng.integers(1, 6)), int(rng.integers(1, 6))) if flag(rng, 0.7) else (3, 3)
    strides = (int(rng.integers(1, 4)),) * 2
    dilations = (1, 1)
    data_format = "NHWC"
    if not filter_gradient:  # Only TensorFlow's oneDNN kernels take these; its gradients ignore dilations.
        strides = strides if flag(rng) else (int(rng.integers(1, 4)), int(rng.integers(1, 4)))
        data_format = draw(rng, "NHWC", "NCHW")
        if multiplier > 1 and not forward:
            # With several multipliers and a stride along the width oneDNN takes another path if the image is wide,
            # without fused multiply-add and in another order; where that begins is a matter of its heuristics.
            strides = (strides[0], 1)
        if forward and flag(rng, 0.3):
            dilations = (int(rng.integers(1, 4)), int(rng.integers(1, 4)))
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    batch = int(rng.integers(1, 5))
    positions = max(size // (batch * channels * multiplier), 1)
    # A filter larger than the image is left out: oneDNN answers with uninitialised memory.
    height = reach[0] + int(rng.integers(0, max(int(positions**0.5 * rng.uniform(0.5, 1.5)), 1) + 1))
    width = reach[1] + max(positions // height - reach[1], int(rng.integers(0, 4)))
    padding = draw(rng, "SAME", "VALID", "EXPLICIT")
    pairs = [0, 0, 0, 0]
    if padding == "EXPLICIT":
        pairs = [int(rng.integers(0, kernel[i // 2])) for i in range(4)]
        if op.endswith("Input"):
            padding, pairs = draw(rng, "SAME", "VALID"), [0, 0, 0, 0]  # oneDNN leaves explicit padding to Eigen here

    def positions_along(axis: int) -> int:
        size, stride = (height, width)[axis], strides[axis]
        return (
            -(-size // stride) if padding == "SAME" else (size + sum(pairs[2 * axis :][:2]) - reach[axis]) // stride + 1
        )

    # Without fused multiply-add oneDNN also computes what is padded at one side by more columns than the output has, or
    # (tests/cases.py) by as much as the filter is wide.
    added = max((positions_along(1) - 1) * strides[1] + reach[1] - width, 0)
    left = added // 2 if padding == "SAME" else pairs[2]
    if max(left, added - left) > positions_along(1):
        padding, pairs[2:] = "VALID" if padding == "SAME" else padding, (0, 0)
    rows, columns = positions_along(0), positions_along(1)
    explicit: tuple[int, ...] = ()
    if padding == "EXPLICIT":
        explicit = (0, 0, 0, 0, *pairs) if data_format == "NCHW" else (0, 0, *pairs, 0, 0)

    def ordered(n: Any, h: Any, w: Any, c: Any) -> tuple[Any, ...]:
        return (n, c, h, w) if data_format == "NCHW" else (n, h, w, c)

    attributes: dict[str, Any] = {
        "strides": ordered(1, *strides, 1),
        "padding": padding,
        "explicit_paddings": explicit,
        "data_format": data_format,
        "dilations": ordered(1, *dilations, 1),
    }
    spoilt = not filter_gradient and flag(rng, 0.05)

    def array(shape: tuple[Any, ...]) -> np.ndarray:
        values = (rng.standard_normal(shape) * magnitude(rng, -3, 3)).astype(np.float32)
        flat = values.reshape(-1)
        flat[rng.integers(0, flat.size, flat.size // 20)] = draw(rng, 0.0, -0.0, 1e-40, -1e-38)
        if spoilt:
            flat[rng.integers(0, flat.size)] = draw(rng, np.nan, np.inf, -np.inf)
        return values

    input_shape, filter_shape = ordered(batch, height, width, channels), (*kernel, channels, multiplier)
    output_shape = ordered(batch, rows, columns, channels * multiplier)
    if forward:
        return {"input": array(input_shape), "filter": array(filter_shape)}, attributes, ""
    if filter_gradient:
        operands = {"input": array(input_shape), "out_backprop": array(output_shape)}
        return operands, {"filter_sizes": filter_shape} | attributes, ""
    operands = {"filter": array(filter_shape), "out_backprop": array(output_shape)}
    return operands, {"input_sizes": input_shape} | attributes, ""


FAMILY_CALLS = {
    "FakeQuant": fake_quant,
    "QuantizeAndDequantize": quantize_and_dequantize,
    "FusedBatchNorm": batch_norm,
    "DepthwiseConv2d": depthwise,
}


def make_case(seed: int, op: str, number: int, largest: int) -> Case:
    """The `number`-th random call of an operator; depends on nothing but the arguments."""
    rng = np.random.default_rng([seed, list(RESULTS).index(op), number])
    place = number % CALLS_PER_BATCH
    size = int(magnitude(rng, 5, 6.3)) if place == 0 else int(magnitude(rng, 3, 4.7)) if place < 4 else 100
    family = next(make for prefix, make in FAMILY_CALLS.items() if op.startswith(prefix))
    with np.errstate(all="ignore"):
        operands, attributes, tags = family(rng, op, min(size, largest))
    return Case(f"{op}/{number}", op, operands, attributes, frozenset(tags.split()))


# TensorFlow


class TensorFlow:
    """A process that answers batches of calls; arrays travel in files of a temporary folder."""

    def __init__(self, python: Path, onednn: bool, folder: Path):
        self.folder = folder / ("onednn" if onednn else "eigen")
        self.folder.mkdir()
        self.waiting: list[Case] = []
        environment = {**os.environ, **QUIET, "TF_ENABLE_ONEDNN_OPTS": str(int(onednn))}
        command = [str(python), __file__, "--worker", str(self.folder)]
        with (self.folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        version = self._receive()
        if version != TENSORFLOW:
            raise SystemExit(f"TensorFlow must be {TENSORFLOW}, {python} has {version}")

    def send(self, batch: list[Case]) -> None:
        self.waiting = batch
        asked = [question(case) for case in batch]
        arrays = {}
        calls = []
        for i, (op, arguments) in enumerate(asked):  # type: ignore[misc]
            arrays |= {f"{i}/{k}": v for k, v in arguments.items() if isinstance(v, np.ndarray | np.generic)}
            calls.append([op, {k: v for k, v in arguments.items() if f"{i}/{k}" not in arrays}])
        np.savez(self.folder / "operands.npz", **arrays)  # type: ignore[arg-type]
        assert self.process.stdin
        self.process.stdin.write(json.dumps(calls) + "\n")
        self.process.stdin.flush()

    def answers(self) -> list[list[np.ndarray] | str]:
        """For each call of the batch its results, or the text of TensorFlow's refusal."""
        errors = self._receive()
        with np.load(self.folder / "results.npz") as file:
            answers: list[list[np.ndarray] | str] = []
            for i, (case, error) in enumerate(zip(self.waiting, errors, strict=True)):
                answers.append(error or [file[f"{i}/{k}"] for k in range(len(RESULTS[case.op]))])
            return answers

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()

    def _receive(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            names = ", ".join(case.name for case in self.waiting)
            log = (self.folder / "log").read_text()[-2000:]
            raise SystemExit(f"TensorFlow ended with status {self.process.wait()} at one of: {names or 'start'}\n{log}")
        return json.loads(line)


def work(folder: Path) -> None:
    """The other process."""
    import tensorflow

    tensorflow.config.threading.set_intra_op_parallelism_threads(1)
    print(json.dumps(tensorflow.__version__), flush=True)
    for line in sys.stdin:
        with np.load(folder / "operands.npz") as file:
            arrays = dict(file)
        results: dict[str, np.ndarray] = {}
        errors = []
        for i, (op, attributes) in enumerate(json.loads(line)):
            prefix = f"{i}/"
            operands = {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
            try:
                answer = ask(tensorflow, op, operands | attributes)
            except (ValueError, TypeError, tensorflow.errors.OpError) as error:
                errors.append(f"{type(error).__name__}: {error}")
                continue
            errors.append("")
            results |= {f"{i}/{k}": array for k, array in enumerate(answer)}
        np.savez(folder / "results.npz", **results)  # type: ignore[arg-type]
        print(json.dumps(errors), flush=True)


def environment(python: Path | None) -> Path:
    """The interpreter that has TensorFlow; makes its environment if there is none."""
    if python is not None:
        return python
    folder = ENVIRONMENT / ("Scripts" if os.name == "nt" else "bin")
    if not (ENVIRONMENT / ".installed").exists():
        print(f"installing tensorflow-cpu {TENSORFLOW} into {ENVIRONMENT.name}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        pip = [str(folder / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, f"tensorflow-cpu=={TENSORFLOW}"], check=True)
        (ENVIRONMENT / ".installed").touch()
    return folder / "python"


# Comparison


@dataclass
class Row:
    """What was found about an operator (its outputs that are promised to the bit) or one of its other outputs."""

    name: str
    promise: str
    calls: int = 0
    values: int = 0
    different: int = 0  # bits: values that differ; otherwise: values further off than promised
    largest_error: float = 0.0  # in units in the last place of the exact value
    tensorflow_error: float = 0.0
    worst_ratio: float = 0.0  # of a call's largest errors, exactqat's to TensorFlow's
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def ours(case: Case) -> list[np.ndarray] | str:
    import exactqat  # TensorFlow's environment, which runs this file too, does not have it

    try:
        results = getattr(exactqat.raw_ops, case.op)(**case.operands, **case.attributes)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return list(results) if isinstance(results, tuple) else [results]


def compare(case: Case, mine: list[np.ndarray] | str, theirs: list[np.ndarray] | str, rows: dict[str, Row]) -> None:
    """Adds one call to the rows of its operator."""
    if isinstance(mine, str) or isinstance(theirs, str):
        refusals = f"exactqat: {mine if isinstance(mine, str) else 'accepts'}\nTensorFlow: " + (
            theirs if isinstance(theirs, str) else "accepts"
        )
        fail(rows[case.op], case, refusals)
        return
    inexact: dict[str, Any] = {}
    with np.errstate(all="ignore"):
        if "accuracy" in RESULTS[case.op].values():
            inexact = ACCURATE[case.op](case)
        elif "sum" in RESULTS[case.op].values():
            inexact = fake_quant_sums(case)
    rows[case.op].calls += 1
    for (output, promise), my_result, their_result in zip(RESULTS[case.op].items(), mine, theirs, strict=True):
        if promise in ("bitwise", "placeholder"):
            compare_bits(case, output, my_result, their_result, rows[case.op])
        elif not case.attributes.get("is_training", True) and output.startswith("reserve_space"):
            # Uninitialised in TensorFlow; here copies of the statistics, as tests/operators/test_reference.py checks.
            continue
        else:
            row = rows.setdefault(f"{case.op}: {output}", Row(f"{case.op}: {output}", promise))
            compare_errors(case, my_result, their_result, inexact[output], row)


def compare_bits(case: Case, output: str, mine: np.ndarray, theirs: np.ndarray, row: Row) -> None:
    row.values += mine.size
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        fail(row, case, f"{output}: {mine.dtype}{mine.shape}, TensorFlow's is {theirs.dtype}{theirs.shape}")
        return
    different = differing(mine, theirs)
    if not different.any():
        return
    row.different += int(different.sum())
    try:
        assert_same_bits(mine, theirs, what=output, operands=case.operands)
    except AssertionError as error:
        fail(row, case, f"{error}{taps(case, tuple(np.argwhere(different)[0]))}", count=0)


def taps(case: Case, place: tuple[int, ...]) -> str:
    """For a depthwise convolution: the products that make the element at `place`, in order."""
    if not case.op.startswith("DepthwiseConv2d"):
        return ""
    layer = convolution(case)
    numbers = np.zeros(layer.as_given(layer.image).shape if case.op.endswith("Input") else ())
    lines = []
    if case.op == "DepthwiseConv2dNative":
        n, h, w, c = (place[0], place[2], place[3], place[1]) if layer.channels_first else place
        c, q = divmod(c, layer.weights.shape[3])
        for tap in layer.taps:
            for o_h, i_h in zip(tap.outputs[0].flat, tap.inputs[0].flat, strict=True):
                for o_w, i_w in zip(tap.outputs[1].flat, tap.inputs[1].flat, strict=True):
                    if (o_h, o_w) == (h, w):
                        lines.append((layer.image[n, i_h, i_w, c], layer.weights[tap.row, tap.column, c, q]))
    elif numbers.ndim:
        n, h, w, c = (place[0], place[2], place[3], place[1]) if layer.channels_first else place
        for tap in layer.taps:
            for o_h, i_h in zip(tap.outputs[0].flat, tap.inputs[0].flat, strict=True):
                for o_w, i_w in zip(tap.outputs[1].flat, tap.inputs[1].flat, strict=True):
                    if (i_h, i_w) == (h, w):
                        lines += zip(layer.output[n, o_h, o_w, c], layer.weights[tap.row, tap.column, c], strict=True)
    return "".join(
        f"\n  product {a!r} ({a.tobytes()[::-1].hex()}) * {b!r} ({b.tobytes()[::-1].hex()})" for a, b in lines
    )


def compare_errors(case: Case, mine: np.ndarray, theirs: np.ndarray, evaluated: Any, row: Row) -> None:
    """Element for element; what float64 itself may err by, in the evaluation and in exactqat, does not count."""
    exact = evaluated.exact
    row.calls += 1
    row.values += mine.size
    if (
        mine.shape != exact.shape
        or (np.isfinite(mine) != np.isfinite(exact)).any()
        or (np.isnan(mine) != np.isnan(exact)).any()
    ):
        fail(row, case, f"not finite, or of another shape, where the exact value is: {mine!r}\nexact: {exact!r}")
        return
    comparable = np.isfinite(exact) & np.isfinite(theirs)
    if not comparable.any():
        return
    exact, my_values, their_values = exact[comparable], mine[comparable], theirs[comparable]
    my_error, their_error = np.abs(my_values - exact), np.abs(their_values - exact)
    noise = evaluated.rounding[comparable] * np.finfo(np.float64).eps
    unit = np.spacing(np.maximum(np.abs(exact), np.finfo(np.float32).tiny).astype(np.float32)).astype(np.float64)
    if row.promise == "elements":
        worse = my_error > elementwise_bound(evaluated)[comparable]
    else:
        worse = my_error > their_error + noise
    row.largest_error = max(row.largest_error, float((my_error / unit).max()))
    row.tensorflow_error = max(row.tensorflow_error, float((their_error / unit).max()))
    if my_error.max() > 0:
        row.worst_ratio = max(row.worst_ratio, float(my_error.max() / max(their_error.max(), noise.min())))
    if worse.any():
        row.different += int(worse.sum())
        k = int(np.argmax(np.where(worse, my_error - their_error, 0)))
        text = (
            f"{int(worse.sum())} of {mine.size} further off than promised; exact {exact[k]!r}, got {my_values[k]!r}, "
        )
        fail(row, case, text + f"TensorFlow {their_values[k]!r}, float64 may err by {noise[k]:.3g}", count=0)


def fail(row: Row, case: Case, text: str, count: int = 1) -> None:
    row.different += count
    shapes = {name: f"{operand.dtype}{list(operand.shape)}" for name, operand in case.operands.items()}
    row.failures.append(f"{case.name} {dict(case.attributes)}\n  {shapes}\n  {text}")


# The run


def run(op: str, options: argparse.Namespace, tensorflow: dict[bool, TensorFlow]) -> list[Row]:
    """Calls of one operator until one of its results has come to as many values as it should."""
    rows = {op: Row(op, "bitwise")}
    started = time.monotonic()
    target = int(options.values * SHARES[op])
    number = 0 if options.call is None else options.call
    waiting: list[tuple[bool, list[Case]]] = []

    def collect() -> None:
        for onednn, cases in waiting:
            mine = [ours(case) for case in cases]  # while TensorFlow computes
            for case, my_results, their_results in zip(cases, mine, tensorflow[onednn].answers(), strict=True):
                compare(case, my_results, their_results, rows)
        waiting.clear()

    while max(row.values for row in rows.values()) < target:
        batch = [make_case(options.seed, op, number + i, target) for i in range(CALLS_PER_BATCH)]
        number += len(batch)
        if options.call is not None:
            del batch[1:]
        collect()
        for onednn in (False, True):
            cases = [case for case in batch if needs_onednn(case) == onednn]
            if cases:
                tensorflow[onednn].send(cases)
                waiting.append((onednn, cases))
        if options.call is not None:
            break
    collect()
    rows[op].seconds = time.monotonic() - started
    return list(rows.values())


HEADINGS = ("operator, output", "calls", "values", "different", "our ulp", "TF's ulp", "worst ratio", "s")


def cells(row: Row) -> list[str]:
    errors = ["", "", ""]
    if row.promise != "bitwise":
        errors = [f"{row.largest_error:.4g}", f"{row.tensorflow_error:.4g}", f"{row.worst_ratio:.4g}"]
    seconds = f"{row.seconds:.1f}" if row.seconds else ""
    name = row.name if row.promise == "bitwise" else f"  {row.name.split(': ')[1]}"
    return [name, f"{row.calls:,}", f"{row.values:,}", f"{row.different:,}", *errors, seconds]


def show(rows: list[Row]) -> None:
    lines = [cells(row) for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(HEADINGS, *lines, strict=True)]
        for line in (HEADINGS, *lines):
            first, *others = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            print(line[0].ljust(len(first)), *others, sep="  ")
        return
    table = Table(box=None, pad_edge=False)
    for k, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if k else "left", no_wrap=True)
    for row, line in zip(rows, lines, strict=True):
        table.add_row(*line, style="red" if row.different else None)
    Console(width=max(Console().width, 120)).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=20_000_000, help="values compared for each elementwise operator")
    parser.add_argument("--seed", type=int, help="repeats a run")
    parser.add_argument("--op", nargs="+", choices=list(RESULTS), default=list(RESULTS), metavar="NAME")
    parser.add_argument("--call", type=int, help="only this call of each operator")
    parser.add_argument("--json", type=Path, help="also writes the figures there")
    parser.add_argument("--tensorflow", type=Path, metavar="PYTHON", help="an interpreter that has TensorFlow")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return 0
    if options.values < 1:
        parser.error(f"--values must be at least 1, got {options.values}")
    options.seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"seed {options.seed}", flush=True)
    python = environment(options.tensorflow)
    started = time.monotonic()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        tensorflow = {onednn: TensorFlow(python, onednn, Path(folder)) for onednn in (False, True)}
        for op in options.op:
            rows += run(op, options, tensorflow)
        for process in tensorflow.values():
            process.close()
    seconds = time.monotonic() - started
    show(rows)
    failed = [row for row in rows if row.different or row.failures]
    for row in failed:
        print(f"\n{row.name}: {row.different} values of {len(row.failures)} calls; the first:")
        print("\n".join(row.failures[:3]))
        number = row.failures[0].split(" ", 1)[0].rsplit("/", 1)[1]
        op = row.name.split(":")[0]
        print(
            f"again: python tests/campaigns/oracle.py --seed {options.seed} --values {options.values} "
            f"--op {op} --call {number}"
        )
    total = sum(row.values for row in rows)
    print(f"\n{total:,} values in {seconds:.0f} s, seed {options.seed}: {'DIFFERENCES' if failed else 'no difference'}")
    if options.json:
        summary = {"seed": options.seed, "values": total, "seconds": seconds, "tensorflow": TENSORFLOW}
        options.json.write_text(json.dumps(summary | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
