# SPDX-License-Identifier: Apache-2.0
"""What operators should give, from their formulas: operation by operation where bits are promised, else exactly.

Shares nothing with the library and imports NumPy only, so that it can judge the library and TensorFlow alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from cases import Case

__all__ = [
    "ACCURATE",
    "Evaluated",
    "assert_is_plain_rounding",
    "convolution",
    "depthwise_evaluated",
    "depthwise_model",
    "elementwise_bound",
    "fake_quant_model",
    "fake_quant_sums",
    "flush",
]


class Evaluated(NamedTuple):
    """The value of a formula, and a first-order bound of a plain evaluation's error in units of its roundoff."""

    exact: np.ndarray
    rounding: np.ndarray
    # The same in half units, where what belongs to a channel is exact and only the steps from there on are rounded,
    # each coefficient among them (docs/decisions/batch-norm.md).
    elementwise: np.ndarray | None = None


def assert_is_plain_rounding(result: np.ndarray, evaluated: Evaluated, what: str) -> None:
    """Fails if a result differs from the formula's value by more than rounding explains: then it is another formula's.

    The bound is taken twice, because the evaluation may have as large an error where the result is float64 itself.
    """
    exact = evaluated.exact
    comparable = np.isfinite(exact) & np.isfinite(result)
    bound = evaluated.rounding * np.finfo(result.dtype).eps + np.finfo(result.dtype).tiny
    excess = np.where(comparable, np.abs(result - exact) / bound, 0)
    assert (excess <= 1).all(), f"{what}: {excess.max():.3g} times what rounding can explain"


def elementwise_bound(evaluated: Evaluated) -> np.ndarray:
    """What an element may err by in float32: its roundings, a little for their products, flushed denormals."""
    assert evaluated.elementwise is not None
    info = np.finfo(np.float32)
    return evaluated.elementwise * (float(info.eps) / 2) * (1 + 2.0**-16) + 8 * float(info.tiny)


def flush(values: np.ndarray) -> np.ndarray:
    """Denormals become zeros of their sign, as under flush-to-zero and denormals-are-zero."""
    return np.where(np.abs(values) < np.finfo(values.dtype).tiny, np.copysign(values.dtype.type(0), values), values)


def total(terms: np.ndarray, axis: Any = 0) -> np.ndarray:
    """A sum whose error does not show in float64, where the machine has a wider type."""
    return terms.sum(axis=axis, dtype=np.longdouble).astype(np.float64)


# FakeQuant


class Nudged(NamedTuple):
    low: np.ndarray
    high: np.ndarray
    scale: np.ndarray
    inverse: np.ndarray
    zero: np.ndarray
    is_empty: np.ndarray


def nudged_range(case: Case) -> Nudged:
    real = case.operands["inputs"].dtype.type
    source = case.operands if "min" in case.operands else case.attributes
    low, high = (flush(np.asarray(source[bound], real)) for bound in ("min", "max"))
    first, last = real(case.attributes["narrow_range"]), real(2 ** int(str(case.attributes["num_bits"])) - 1)
    width = flush(high - low)
    scale, inverse = flush(width / (last - first)), flush((last - first) / width)
    zero_point = flush(first - flush(low / scale))
    rounded = np.floor(zero_point) + (zero_point - np.floor(zero_point) >= real(0.5))
    clipped = np.where(zero_point < first, first, np.where(zero_point > last, last, rounded))
    whole = np.where(np.isnan(zero_point), real(0), clipped).astype(real)
    nudged_low, nudged_high = flush((first - whole) * scale), flush((last - whole) * scale)
    zero = np.floor(flush(-nudged_low * inverse) + real(0.5))
    is_empty = (low == 0) & (high == 0) & ("min" in case.operands)
    return Nudged(nudged_low, nudged_high, scale, inverse, zero, is_empty)


def fake_quant_model(case: Case) -> np.ndarray:
    """The output that is promised to the bit."""
    inputs, grid = flush(case.operands["inputs"]), nudged_range(case)
    if "gradients" in case.operands:
        gradients = case.operands["gradients"]
        inside = ((inputs >= grid.low) & (inputs <= grid.high)).astype(inputs.dtype)
        return np.where(grid.is_empty, gradients, flush(flush(gradients) * inside))
    clamped = np.where(grid.high < inputs, grid.high, inputs)
    clamped = np.where(clamped < grid.low, grid.low, clamped)
    shifted = flush(clamped - grid.low)
    steps = flush(shifted / grid.scale if case.op == "FakeQuantWithMinMaxVars" else shifted * grid.inverse)
    codes = np.floor(flush(steps - grid.zero) + inputs.dtype.type(0.5))
    return np.where(grid.is_empty, inputs.dtype.type(0), flush(codes * grid.scale))


def fake_quant_sums(case: Case) -> dict[str, Evaluated]:
    inputs, grid = flush(case.operands["inputs"]), nudged_range(case)
    gradients = flush(case.operands["gradients"])
    shape = case.operands["min"].shape
    channels = case.operands["min"].size
    sums = {}
    for output, side in (("backprop_wrt_min", inputs < grid.low), ("backprop_wrt_max", inputs > grid.high)):
        terms = np.where(grid.is_empty, 0, gradients * side.astype(gradients.dtype)).astype(np.float64)
        columns = terms.reshape(-1, channels).T if channels else np.zeros((0, 0))
        exact = np.array([math.fsum(c) if np.isfinite(c).all() else c.sum() for c in columns]).reshape(shape)
        exact[np.abs(exact) < np.finfo(inputs.dtype).tiny] = 0
        sums[output] = Evaluated(exact, (np.abs(columns).sum(axis=1) * columns.shape[1]).reshape(shape))
    return sums


# DepthwiseConv2dNative


class Tap(NamedTuple):
    """One position in the filter, and the matching positions in output and input, as index grids for NHWC arrays."""

    row: int
    column: int
    outputs: tuple[Any, ...]
    inputs: tuple[Any, ...]


class Convolution(NamedTuple):
    """A depthwise case with its arrays as NHWC; the one of the three that is the result is zeros."""

    image: np.ndarray
    weights: np.ndarray
    output: np.ndarray
    taps: list[Tap]
    channels_first: bool

    def as_given(self, array: np.ndarray) -> np.ndarray:
        return np.moveaxis(array, -1, 1) if self.channels_first else array


def convolution(case: Case) -> Convolution:
    attributes: dict[str, Any] = dict(case.attributes)
    channels_first = attributes["data_format"] == "NCHW"
    rows_at = 2 if channels_first else 1

    def channels_last(array: np.ndarray) -> np.ndarray:
        return np.moveaxis(array, 1, -1) if channels_first else array

    dtype = next(iter(case.operands.values())).dtype
    image = channels_last(case.operands.get("input", np.zeros(attributes.get("input_sizes", ()), dtype)))
    weights = case.operands.get("filter", np.zeros(attributes.get("filter_sizes", ()), dtype))
    positions = []
    for axis in range(2):
        size, kernel = image.shape[1 + axis], weights.shape[axis]
        stride, dilation = attributes["strides"][rows_at + axis], attributes["dilations"][rows_at + axis]
        extent = (kernel - 1) * dilation + 1
        if attributes["padding"] == "SAME":
            count = math.ceil(size / stride)
            before = max((count - 1) * stride + extent - size, 0) // 2
        else:
            pairs = attributes["explicit_paddings"] or [0] * 8
            before, after = pairs[2 * (rows_at + axis)], pairs[2 * (rows_at + axis) + 1]
            count = max((before + size + after - extent) // stride + 1, 0)
        pairs_of = [[(o, o * stride + k * dilation - before) for o in range(count)] for k in range(kernel)]
        positions.append((count, pairs_of))
    (rows, row_pairs), (columns, column_pairs) = positions
    taps = []
    for i in range(weights.shape[0]):
        for j in range(weights.shape[1]):
            matching_rows = [pair for pair in row_pairs[i] if 0 <= pair[1] < image.shape[1]]
            matching_columns = [pair for pair in column_pairs[j] if 0 <= pair[1] < image.shape[2]]
            if matching_rows and matching_columns:
                (out_rows, in_rows), (out_columns, in_columns) = zip(*matching_rows), zip(*matching_columns)  # noqa: B905
                taps.append(Tap(i, j, np.ix_(out_rows, out_columns), np.ix_(in_rows, in_columns)))
    _, _, channels, multiplier = weights.shape
    shape = (image.shape[0], rows, columns, channels, multiplier)
    output = np.zeros(shape, dtype)
    if "out_backprop" in case.operands:
        output = channels_last(case.operands["out_backprop"]).reshape(shape)
    return Convolution(image, weights, output, taps, channels_first)


def fused_multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c rounded once, denormals being zeros."""
    if c.dtype == np.float64:
        exactly = np.frompyfunc(lambda a, b, c: float(Fraction(a) * Fraction(b) + Fraction(c)), 3, 1)
        return flush(np.asarray(exactly(flush(a), flush(b), flush(c)), np.float64))
    product = flush(a).astype(np.float64) * flush(b)  # 48 bits, so exact
    total = np.ascontiguousarray(product + flush(c))
    of_product = total - flush(c)
    lost = (product - of_product) + (flush(c) - (total - of_product))
    # An even float64 that is not exact moves to its odd neighbour on the exact value's side: rounding that to float32
    # is the same as rounding the exact value (rounding to odd).
    bits = total.view(np.int64)
    away = np.where((lost > 0) == (total > 0), 1, -1)
    bits = np.where(np.isfinite(lost) & (lost != 0) & (bits % 2 == 0), bits + away, bits)
    return flush(bits.view(np.float64).astype(np.float32))


def depthwise_model(case: Case) -> np.ndarray:
    """One fused multiply-add for each tap that meets the image, in row-major order, the multipliers within a tap."""
    image, weights, output, taps, _ = arrays = convolution(case)
    if case.op == "DepthwiseConv2dNative":
        for tap in taps:
            o, i = (slice(None), *tap.outputs), (slice(None), *tap.inputs)
            output[o] = fused_multiply_add(image[i][..., None], weights[tap.row, tap.column], output[o])
        return arrays.as_given(output.reshape(*output.shape[:3], output.shape[3] * output.shape[4]))
    for tap in taps:
        o, i = (slice(None), *tap.outputs), (slice(None), *tap.inputs)
        for q in range(weights.shape[3]):
            image[i] = fused_multiply_add(output[o][..., q], weights[tap.row, tap.column, :, q], image[i])
    return arrays.as_given(image)


def depthwise_evaluated(case: Case) -> Evaluated:
    """The result in float64."""

    def evaluate(absolute: bool) -> tuple[np.ndarray, int]:
        arrays = convolution(case)
        image, weights, output = (
            np.abs(array) if absolute else array
            for array in (flush(a).astype(np.float64) for a in (arrays.image, arrays.weights, arrays.output))
        )
        for tap in arrays.taps:
            o, i = (slice(None), *tap.outputs), (slice(None), *tap.inputs)
            if case.op == "DepthwiseConv2dNative":
                output[o] += image[i][..., None] * weights[tap.row, tap.column]
            elif case.op == "DepthwiseConv2dNativeBackpropInput":
                image[i] += (output[o] * weights[tap.row, tap.column]).sum(axis=-1)
            else:
                weights[tap.row, tap.column] = total(image[i][..., None] * output[o], axis=(0, 1, 2))
        count = len(arrays.taps)
        if case.op == "DepthwiseConv2dNative":
            return arrays.as_given(output.reshape(*output.shape[:3], -1)), count
        if case.op == "DepthwiseConv2dNativeBackpropInput":
            return arrays.as_given(image), count * weights.shape[3]
        return weights, output.shape[0] * output.shape[1] * output.shape[2]

    exact, terms = evaluate(absolute=False)
    magnitude, _ = evaluate(absolute=True)
    return Evaluated(exact, (terms + 1) * magnitude)


# FusedBatchNorm


class Rows(NamedTuple):
    """Images as float64 rows, channels last, and the way back."""

    arrays: list[np.ndarray]
    length: int
    back: Any


def as_rows(case: Case, *names: str) -> Rows:
    axis = 1 if str(case.attributes["data_format"]).startswith("NC") else -1
    moved = [np.moveaxis(case.operands[name], axis, -1) for name in names]
    count, channels = math.prod(moved[0].shape[:-1]), moved[0].shape[-1]
    arrays = [array.reshape(count, channels).astype(np.float64) for array in moved]
    return Rows(arrays, count, lambda rows: np.moveaxis(rows.reshape(moved[0].shape), -1, axis))


def attribute(case: Case, name: str) -> float:
    """A number as TensorFlow's kernels see it."""
    dtype = case.operands["x"].dtype
    return float(dtype.type(case.attributes[name]))


def batch_norm_evaluated(case: Case) -> dict[str, Evaluated]:
    (x,), count, back = as_rows(case, "x")
    scale, offset, given_mean, given_variance = (
        case.operands[name].astype(np.float64) for name in ("scale", "offset", "mean", "variance")
    )
    epsilon, factor = attribute(case, "epsilon"), attribute(case, "exponential_avg_factor")
    channels = x.shape[1]
    unchanged = np.zeros(channels)
    if x.size == 0:
        nan, zeros = Evaluated(np.full(channels, np.nan), unchanged), Evaluated(unchanged, unchanged)
        statistics = {"batch_mean": nan, "batch_variance": nan, "reserve_space_1": zeros, "reserve_space_2": zeros}
        return {"y": Evaluated(back(x), back(x)), **statistics}
    roundoff = np.finfo(case.operands["x"].dtype).eps
    if case.attributes["is_training"]:
        mean = Evaluated(total(x) / count, (count + 1) * np.abs(x).mean(axis=0))
        exact = total((x - mean.exact) ** 2) / count
        variance = Evaluated(exact, (count + 6) * exact + roundoff * mean.rounding**2)
        unbiased = count / max(count - 1, 1)
        if factor == 1:
            batch_mean = mean
            batch_variance = Evaluated(variance.exact * unbiased, variance.rounding * unbiased + 4 * variance.exact)
        else:
            old, new = (1 - factor) * given_mean, factor * mean.exact
            batch_mean = Evaluated(old + new, factor * mean.rounding + 4 * (np.abs(old) + np.abs(new)))
            old, new = (1 - factor) * given_variance, factor * unbiased * variance.exact
            rounding = factor * unbiased * variance.rounding + 4 * (np.abs(old) + np.abs(new))
            batch_variance = Evaluated(old + new, rounding)
    else:
        mean = batch_mean = Evaluated(given_mean, unchanged)
        variance = batch_variance = Evaluated(given_variance, unchanged)
    centered, factor_of_x = x - mean.exact, scale / np.sqrt(variance.exact + epsilon)
    relative = variance.rounding / (2 * (variance.exact + epsilon)) + 5
    magnitude = np.abs(centered * factor_of_x)
    y = centered * factor_of_x + offset
    rounding = np.abs(factor_of_x) * mean.rounding + magnitude * (relative + 2) + np.abs(y)
    # x - mean, the factor and their product; the offset with what rounding the mean leaves out; the sum.
    elementwise = 3 * magnitude + np.abs(offset) + np.abs(factor_of_x * mean.exact) * roundoff + np.abs(y)
    return {
        "y": Evaluated(back(y), back(rounding), back(elementwise)),
        "batch_mean": batch_mean,
        "batch_variance": batch_variance,
        "reserve_space_1": mean,
        "reserve_space_2": variance,
    }


def batch_norm_gradient_evaluated(case: Case) -> dict[str, Evaluated]:
    (dy, x), count, back = as_rows(case, "y_backprop", "x")
    scale, mean, variance = (
        case.operands[name].astype(np.float64) for name in ("scale", "reserve_space_1", "reserve_space_2")
    )
    inverse = 1 / np.sqrt(variance + attribute(case, "epsilon"))
    centered = x - mean
    product, size_of_product = total(dy * centered), np.abs(dy * centered).sum(axis=0)
    sum_of_dy, size_of_sum = total(dy), np.abs(dy).sum(axis=0)
    if case.attributes["is_training"] and count:
        slope = inverse**2 / count
        dx = scale * inverse * (dy - sum_of_dy / count - centered * slope * product)
        sums = (count + 20) * (size_of_sum / count + np.abs(centered) * slope * size_of_product)
        rounding = np.abs(scale * inverse) * (20 * np.abs(dy) + sums)
        # The mean of dy and what it is taken from; x - mean, the slope and their product; the difference; the factor
        # and the last product.
        shifted, projected = dy - sum_of_dy / count, centered * slope * product
        elementwise = np.abs(sum_of_dy / count) + np.abs(shifted) + 3 * np.abs(projected) + np.abs(shifted - projected)
        elementwise = np.abs(scale * inverse) * elementwise + 2 * np.abs(dx)
    else:
        dx = scale * inverse * dy
        rounding = 8 * np.abs(dx)
        elementwise = 2 * np.abs(dx)
    return {
        "x_backprop": Evaluated(back(dx), back(rounding), back(elementwise)),
        "scale_backprop": Evaluated(product * inverse, (count + 10) * size_of_product * inverse),
        "offset_backprop": Evaluated(sum_of_dy, (count + 1) * size_of_sum),
    }


ACCURATE: dict[str, Callable[[Case], dict[str, Evaluated]]] = {
    **{f"FusedBatchNorm{version}": batch_norm_evaluated for version in ("", "V2", "V3")},
    **{f"FusedBatchNormGrad{version}": batch_norm_gradient_evaluated for version in ("", "V2", "V3")},
    "DepthwiseConv2dNativeBackpropFilter": lambda case: {"output": depthwise_evaluated(case)},
}
