# SPDX-License-Identifier: Apache-2.0
"""What the device computes, in exact integers: one function per operator kind, two profiles of rounding.

`xnnpack` is the runtime's default: the XNNPACK delegate, and the built-in kernels for what it leaves to them.
Convolutions multiply the int32 sum with one float32 factor and round half to even; ADD, QUANTIZE and MEAN have
arithmetic of their own. `reference` is the family of the reference kernels, shared by microcontroller runtimes: 32-bit
fixed-point multipliers, rounding half away from zero. EXACT says where equality was shown, and over how much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .graph import INT8_MAX, INT8_MIN, Graph, Operator, Quantization, Tensor, same_padding

Arrays = list[np.ndarray]
Tensors = list[Tensor]
Attributes = Mapping[str, Any]

PROFILES = ("xnnpack", "reference")

# (kind, profile) -> results compared with the runtime without one difference, by EXACTQAT_SWEEP=20 of
# tests/test_deploy.py on ai-edge-litert 2.3.0, x86-64 with AVX-512. A pair that is not here is not claimed to be exact.
EXACT: dict[tuple[str, str], int] = {
    ("CONV_2D", "xnnpack"): 1_914_618,
    ("CONV_2D", "reference"): 2_048_257,
    ("DEPTHWISE_CONV_2D", "xnnpack"): 2_721_129,
    ("DEPTHWISE_CONV_2D", "reference"): 3_018_435,
    ("FULLY_CONNECTED", "xnnpack"): 108_255,
    ("FULLY_CONNECTED", "reference"): 111_312,
    ("ADD", "xnnpack"): 3_494_149,
    ("ADD", "reference"): 3_618_424,
    ("MEAN", "xnnpack"): 85_226,
    ("MEAN", "reference"): 85_188,
    ("AVERAGE_POOL_2D", "xnnpack"): 1_187_024,
    ("AVERAGE_POOL_2D", "reference"): 1_144_002,
    ("MAX_POOL_2D", "xnnpack"): 1_160_588,
    ("MAX_POOL_2D", "reference"): 1_138_623,
    ("PAD", "xnnpack"): 7_066_911,
    ("PAD", "reference"): 7_026_556,
    ("CONCATENATION", "xnnpack"): 8_429_684,
    ("CONCATENATION", "reference"): 8_499_467,
    ("RESHAPE", "xnnpack"): 3_561_831,
    ("RESHAPE", "reference"): 3_731_468,
    ("QUANTIZE", "xnnpack"): 3_715_572,
    ("QUANTIZE", "reference"): 3_612_209,
    ("MUL", "xnnpack"): 3_568_828,
    ("MUL", "reference"): 3_573_704,
}


def quantize(x: np.ndarray, quantization: Quantization, lowest: int = INT8_MIN, highest: int = INT8_MAX) -> np.ndarray:
    """Real float32 values to int8 codes lowest..highest, in the steps and roundings of FakeQuantWithMinMaxVars.

    A tensor of fewer bits names the codes it was placed at, for example 112..127. NaN raises ValueError.
    """
    x = np.asarray(x, np.float32)
    if np.isnan(x).any():
        raise ValueError("x contains NaN, which has no code")
    scale, zero_point = quantization.scale[0], np.float32(quantization.zero_point[0])
    nudged_min = (np.float32(lowest) - zero_point) * scale
    nudged_max = (np.float32(highest) - zero_point) * scale
    steps = (np.clip(x, nudged_min, nudged_max) - nudged_min) / scale
    # FakeQuant rounds half up, in steps counted from real 0.
    zero_code = zero_point - np.float32(lowest)
    codes = np.floor((steps - zero_code) + np.float32(0.5)) + zero_point
    return np.clip(codes, lowest, highest).astype(np.int8)


def dequantize(codes: np.ndarray, quantization: Quantization) -> np.ndarray:
    """int8 codes of a per-tensor quantized tensor to real float32 values."""
    steps = np.asarray(codes, np.int32) - np.int32(quantization.zero_point[0])
    return steps.astype(np.float32) * quantization.scale[0]


def simulate(
    graph: Graph,
    x: np.ndarray | Mapping[str, np.ndarray],
    profile: str = "xnnpack",
    tensors: Sequence[str] | None = None,
    batch_size: int = 8,
) -> dict[str, np.ndarray]:
    """int8 codes of `tensors` (default: the graph's outputs) for a batch of int8 input codes.

    x: int8 [batch, ...] for a graph with one input, or one such array per input name. `batch_size` images are computed
    at a time, which bounds the memory and suits the caches. Every (operator, profile) pair named in EXACT is bit-exact.
    """
    if profile not in PROFILES:
        raise ValueError(f"profile must be one of {', '.join(PROFILES)}, got {profile!r}")
    inputs = check_inputs(graph, x)
    wanted = tuple(graph.outputs if tensors is None else tensors)
    unknown = [name for name in wanted if name not in (*graph.inputs, *graph.results())]
    if unknown:
        raise ValueError(f"tensors names {unknown}, which the graph does not compute")
    total = next(iter(inputs.values())).shape[0]
    parts: dict[str, list[np.ndarray]] = {name: [] for name in wanted}
    for start in range(0, total, batch_size):
        values = {name: codes[start : start + batch_size] for name, codes in inputs.items()}
        for operator in graph.operators:
            values[operator.outputs[0]] = simulate_operator(graph, operator, values, profile)
        for name in wanted:
            parts[name].append(values[name])
    return {
        name: np.concatenate(part) if part else np.zeros((0, *graph.tensors[name].shape[1:]), np.int8)
        for name, part in parts.items()
    }


def check_inputs(graph: Graph, x: np.ndarray | Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One int8 [batch, ...] array per input name, or an error that says what does not fit."""
    arrays = dict(x) if isinstance(x, Mapping) else {graph.inputs[0]: x}
    if set(arrays) != set(graph.inputs):
        raise ValueError(f"x must hold the inputs {list(graph.inputs)}, got {list(arrays)}")
    for name, array in arrays.items():
        expected = graph.tensors[name].shape
        if array.dtype != np.int8:
            raise TypeError(f"input {name!r} must be int8 codes, got {array.dtype}; `quantize` makes them")
        if array.ndim != len(expected) or array.shape[1:] != expected[1:]:
            sizes = ", ".join(map(str, expected[1:]))
            raise ValueError(f"input {name!r} must have shape [batch, {sizes}], got {array.shape}")
    if len({array.shape[0] for array in arrays.values()}) != 1:
        raise ValueError("all inputs must have the same batch")
    return arrays


def simulate_operator(graph: Graph, operator: Operator, values: Mapping[str, np.ndarray], profile: str) -> np.ndarray:
    """int8 codes of one operator's result from the codes of its operands, by tensor name."""
    tensors = [graph.tensors[name] for name in operator.inputs]
    codes = [values[tensor.name] if tensor.data is None else tensor.data for tensor in tensors]
    output = graph.tensors[operator.outputs[0]]
    return OPERATORS[operator.kind](codes, tensors, output, operator.attributes, profile)


def _finish(steps: np.ndarray, output: Tensor, attributes: Attributes, profile: str) -> np.ndarray:
    """Adds the zero point and applies the fused activation and int8 saturation."""
    zero_point, scale = int(output.quantization.zero_point[0]), output.quantization.scale[0]
    lowest, highest = INT8_MIN, INT8_MAX
    if attributes.get("activation", "NONE") != "NONE":
        lowest = max(lowest, zero_point)
    if attributes.get("activation") == "RELU6":
        steps_of_six = np.float32(6) / scale
        if profile == "xnnpack":  # rounds to even after adding the zero point
            highest = min(highest, int(np.rint(steps_of_six + np.float32(zero_point))))
        else:
            highest = min(highest, zero_point + int(_round_half_away(steps_of_six)))
    return np.clip(steps + zero_point, lowest, highest).astype(np.int8)


def _round_half_away(x: Any) -> Any:
    return np.trunc(x + np.copysign(0.5, x))


def _fixed_point(multiplier: Any) -> tuple[np.ndarray, np.ndarray]:
    """(significand in Q31, exponent) of real multipliers: TensorFlow Lite's QuantizeMultiplier."""
    fraction, exponent = np.frexp(np.asarray(multiplier, np.float64))
    significand = _round_half_away(fraction * 2.0**31).astype(np.int64)
    carry = significand == 2**31
    significand, exponent = np.where(carry, 2**30, significand), np.where(carry, exponent + 1, exponent)
    return np.where(exponent < -31, 0, significand), np.where(exponent < -31, 0, exponent)


def _multiply_fixed_point(accumulator: np.ndarray, significand: Any, exponent: Any) -> np.ndarray:
    """TensorFlow Lite's MultiplyByQuantizedMultiplier: doubling high multiply with rounding, then a rounding shift."""
    # The kernels shift left in int32 and wrap, which matters for multipliers of 1 and more only.
    shifted = (accumulator << np.maximum(exponent, 0)).astype(np.int32).astype(np.int64)
    product = shifted * significand
    nudged = product + np.where(product >= 0, 2**30, 1 - 2**30)
    high = np.where(nudged >= 0, nudged >> 31, -(-nudged >> 31))
    return _rounding_shift(high, np.maximum(-exponent, 0))


def _rounding_shift(x: np.ndarray, shift: Any) -> np.ndarray:
    """x / 2**shift, rounded half away from zero."""
    mask = (np.int64(1) << shift) - 1
    return (x >> shift) + ((x & mask) > (mask >> 1) + (x < 0))


def _windows(
    x: np.ndarray, output: Tensor, filter_size: Sequence[int], attributes: Attributes, fill: float
) -> Iterator[tuple[int, int, np.ndarray]]:
    """For every tap (i, j) of a sliding window the values [batch, out height, out width, channels] it meets."""
    strides, dilations = attributes["strides"], attributes.get("dilations", (1, 1))
    pads = [(0, 0)] * 4
    if attributes["padding"] == "SAME":
        for axis in (0, 1):
            pads[axis + 1] = same_padding(x.shape[axis + 1], filter_size[axis], strides[axis], dilations[axis])
    x = np.pad(x, pads, constant_values=fill)
    height, width = output.shape[1:3]
    for i in range(filter_size[0]):
        for j in range(filter_size[1]):
            top, left = i * dilations[0], j * dilations[1]
            rows = slice(top, top + (height - 1) * strides[0] + 1, strides[0])
            columns = slice(left, left + (width - 1) * strides[1] + 1, strides[1])
            yield i, j, x[:, rows, columns]


def _centered(codes: np.ndarray, tensor: Tensor) -> np.ndarray:
    return codes.astype(np.int64) - tensor.quantization.zero_point[0]


def _scale(tensor: Tensor) -> np.float32:
    return np.float32(tensor.quantization.scale[0])


# One function per operator kind: (codes of all inputs, their tensors, result's tensor, attributes, profile) -> codes.


def _conv_2d(codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str) -> np.ndarray:
    # float64 products and sums of these integers are exact, and BLAS is the fast way to form them.
    x, filter = _centered(codes[0], inputs[0]).astype(np.float64), codes[1].astype(np.float64)
    accumulator = np.zeros((x.shape[0], *output.shape[1:]))
    for i, j, values in _windows(x, output, filter.shape[1:3], attributes, 0):
        accumulator += values @ filter[:, i, j, :].T
    return _requantize(accumulator, codes[2], inputs, output, attributes, profile)


def _depthwise_conv_2d(
    codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str
) -> np.ndarray:
    x, filter = _centered(codes[0], inputs[0]).astype(np.float64), codes[1].astype(np.float64)
    x = np.repeat(x, filter.shape[3] // x.shape[3], axis=3)
    accumulator = np.zeros((x.shape[0], *output.shape[1:]))
    for i, j, values in _windows(x, output, filter.shape[1:3], attributes, 0):
        accumulator += values * filter[0, i, j]
    return _requantize(accumulator, codes[2], inputs, output, attributes, profile)


def _fully_connected(
    codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str
) -> np.ndarray:
    accumulator = _centered(codes[0], inputs[0]).astype(np.float64) @ codes[1].astype(np.float64).T
    if profile == "xnnpack":
        return _requantize(accumulator, codes[2], inputs, output, attributes, profile)
    # The reference kernel multiplies in 64 bits and rounds once, unlike that of the convolutions.
    significand, exponent = _fixed_point(_real_multiplier(inputs, output))
    product = (accumulator.astype(np.int64) + codes[2]) * significand
    return _finish(_rounding_shift(product, 31 - exponent), output, attributes, profile)


def _requantize(
    accumulator: np.ndarray,
    bias: np.ndarray,
    inputs: Tensors,
    output: Tensor,
    attributes: Attributes,
    profile: str,
) -> np.ndarray:
    """Sum of products plus bias -> codes of the result."""
    accumulator = accumulator.astype(np.int64) + bias
    if profile == "xnnpack":
        input_scale, filter_scale = (tensor.quantization.scale for tensor in inputs[:2])
        multiplier = input_scale * filter_scale / _scale(output)
        steps = np.rint(accumulator.astype(np.float32) * multiplier).astype(np.int64)
    else:
        steps = _multiply_fixed_point(accumulator, *_fixed_point(_real_multiplier(inputs, output)))
    return _finish(steps, output, attributes, profile)


def _real_multiplier(inputs: Tensors, output: Tensor) -> np.ndarray:
    """float64 input scale * filter scale / output scale, per channel."""
    input_scale, filter_scale = (tensor.quantization.scale.astype(np.float64) for tensor in inputs[:2])
    return input_scale * filter_scale / float(_scale(output))


def _add(codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str) -> np.ndarray:
    first, second = (_centered(code, tensor) for code, tensor in zip(codes, inputs, strict=True))
    scales = [_scale(tensor) for tensor in inputs]
    ratios = [float(scale / _scale(output)) for scale in scales]
    if profile == "xnnpack" and min(ratios) >= 2**-10:
        # The larger multiplier gets 21 significant bits, the other one as many as that shift leaves it.
        shift = 21 - int(np.frexp(max(ratios))[1])
        multipliers = [int(np.rint(np.ldexp(ratio, shift))) for ratio in ratios]
        steps = (first * multipliers[0] + second * multipliers[1] + (1 << (shift - 1))) >> shift
        return _finish(steps, output, attributes, profile)
    # XNNPACK leaves smaller ratios to the built-in kernel, which computes as the reference does.
    twice_larger = 2 * float(max(scales))
    first, second = (
        _multiply_fixed_point(steps << 20, *_fixed_point(float(scale) / twice_larger))
        for steps, scale in zip((first, second), scales, strict=True)
    )
    steps = _multiply_fixed_point(first + second, *_fixed_point(twice_larger / (2**20 * float(_scale(output)))))
    return _finish(steps, output, attributes, "reference")


def _mul(codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str) -> np.ndarray:
    product = _centered(codes[0], inputs[0]) * _centered(codes[1], inputs[1])
    # In float32 for the fixed-point multiplier too, unlike in the convolutions.
    multiplier = _scale(inputs[0]) * _scale(inputs[1]) / _scale(output)
    if profile == "xnnpack":
        steps = np.rint(product.astype(np.float32) * multiplier).astype(np.int64)
    else:
        steps = _multiply_fixed_point(product, *_fixed_point(multiplier))
    return _finish(steps, output, attributes, profile)


def _mean(codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str) -> np.ndarray:
    count = inputs[0].shape[1] * inputs[0].shape[2]
    keep = bool(attributes["keep_dims"])
    if profile == "xnnpack":
        # The zero points join the float32 sum before it is rounded, so ties are even in codes, not in steps.
        multiplier = (_scale(inputs[0]) / _scale(output)) * (np.float32(1) / np.float32(count))
        input_zero_point, zero_point = (np.float32(t.quantization.zero_point[0]) for t in (inputs[0], output))
        bias = zero_point - (input_zero_point * np.float32(count)) * multiplier
        total = codes[0].sum((1, 2), dtype=np.int64, keepdims=keep).astype(np.float32)
        return np.clip(np.rint(total * multiplier + bias), INT8_MIN, INT8_MAX).astype(np.int8)
    # The division by the count is folded into the multiplier, where its remainder is cut off.
    significand, exponent = _fixed_point(float(_scale(inputs[0])) / float(_scale(output)))
    shift = min(count.bit_length() - 1, 31 + int(exponent))
    total = _centered(codes[0], inputs[0]).sum((1, 2), keepdims=keep)
    steps = _multiply_fixed_point(total, (significand << shift) // count, exponent - shift)
    return _finish(steps, output, attributes, profile)


def _average_pool_2d(
    codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str
) -> np.ndarray:
    filter_size = attributes["filter_size"]
    x = codes[0].astype(np.int64)
    total = sum(values for _, _, values in _windows(x, output, filter_size, attributes, 0))
    count = sum(values for _, _, values in _windows(np.ones_like(x[:1]), output, filter_size, attributes, 0))
    magnitude = (np.abs(total) + count // 2) // count
    zero_point = output.quantization.zero_point[0]
    return _finish(np.sign(total) * magnitude - zero_point, output, attributes, profile)


def _max_pool_2d(codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str) -> np.ndarray:
    largest = np.full((codes[0].shape[0], *output.shape[1:]), INT8_MIN, np.int8)
    for _, _, values in _windows(codes[0], output, attributes["filter_size"], attributes, INT8_MIN):
        largest = np.maximum(largest, values)
    return _finish(_centered(largest, output), output, attributes, profile)


def _pad(codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str) -> np.ndarray:
    return np.pad(codes[0], attributes["paddings"], constant_values=output.quantization.zero_point[0])


def _concatenation(codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str) -> np.ndarray:
    return np.concatenate(codes, attributes["axis"])


def _reshape(codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str) -> np.ndarray:
    return codes[0].reshape(codes[0].shape[0], *output.shape[1:])


def _quantize(codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str) -> np.ndarray:
    x = _centered(codes[0], inputs[0])
    if profile == "xnnpack":
        # Eight fractional bits are all the multiplier has: coarse, but equal scales shift codes exactly.
        multiplier = int(np.rint(256 * (_scale(inputs[0]) / _scale(output))))
        return _finish((x * multiplier + 128) >> 8, output, attributes, profile)
    ratio = float(_scale(inputs[0])) / float(_scale(output))
    return _finish(_multiply_fixed_point(x, *_fixed_point(ratio)), output, attributes, profile)


OPERATORS: dict[str, Callable[..., np.ndarray]] = {
    "CONV_2D": _conv_2d,
    "DEPTHWISE_CONV_2D": _depthwise_conv_2d,
    "FULLY_CONNECTED": _fully_connected,
    "ADD": _add,
    "MUL": _mul,
    "MEAN": _mean,
    "AVERAGE_POOL_2D": _average_pool_2d,
    "MAX_POOL_2D": _max_pool_2d,
    "PAD": _pad,
    "CONCATENATION": _concatenation,
    "RESHAPE": _reshape,
    "QUANTIZE": _quantize,
}
