# SPDX-License-Identifier: Apache-2.0
"""Random graphs of one operator of the device each: what the sweep against the runtimes runs.

A new operator needs one entry of `CASES`. Every other scale is a power of two, whose products make exact ties.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from exactqat.deploy import Builder, Graph, Quantization, per_tensor
from exactqat.device import ACTIVATIONS

Random = np.random.Generator
Case = Callable[[Random, Builder], str]


def random_zero_point(rng: Random) -> int:
    return int(rng.choice([-128, 127, 0, rng.integers(-128, 128)]))


def random_scale(rng: Random, low: float = -9, high: float = 3) -> np.float32:
    """Every other one a power of two, whose products make exact ties."""
    exponent = rng.uniform(low, high)
    return np.float32(2.0 ** (np.round(exponent) if rng.integers(2) else exponent))


def random_quantization(rng: Random, scale: np.floating | None = None) -> Quantization:
    return per_tensor(random_scale(rng) if scale is None else scale, random_zero_point(rng))


def random_input(rng: Random, builder: Builder, name: str = "x") -> str:
    """An image."""
    height, width = (1, 1) if rng.integers(8) == 0 else rng.integers(1, 14, 2)
    channels = rng.choice([1, 2, 3, 8, 16, 17, 33])
    return builder.input(name, (1, int(height), int(width), int(channels)), random_quantization(rng))


def random_tensor(rng: Random, builder: Builder, lowest: int = 2, highest: int = 5, name: str = "x") -> str:
    """A tensor of any rank."""
    rank = int(rng.integers(lowest, highest + 1))
    sizes = [int(size) for size in rng.integers(1, {2: 200, 3: 30}.get(rank, 10), rank - 1)]
    return builder.input(name, (1, *sizes), random_quantization(rng))


def random_axes(rng: Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """One axis or several, never the batch."""
    count = int(rng.integers(1, len(shape)))
    return tuple(sorted(int(axis) for axis in rng.choice(np.arange(1, len(shape)), count, replace=False)))


def random_operand(rng: Random, builder: Builder, shape: tuple[int, ...], quantization: Quantization) -> str:
    """A second operand that broadcasts to `shape`, or to which `shape` does: a tensor or a constant."""
    kept = [size if rng.integers(2) else 1 for size in shape[1:]]
    second = (1, *(shape[1:] if rng.integers(2) else kept))
    if rng.integers(2):
        return builder.input("z", second, quantization)
    if rng.integers(2):
        second = second[int(rng.integers(1, len(second))) :]
    return builder.constant("z", rng.integers(-128, 128, second).astype(np.int8), quantization)


def random_window(rng: Random, shape: tuple[int, ...]) -> dict[str, object]:
    sizes = [int(rng.integers(1, min(size, 5) + 1)) for size in shape[1:3]]
    strides = tuple(int(stride) for stride in rng.integers(1, 4, 2))
    return {"filter_size": tuple(sizes), "strides": strides, "padding": str(rng.choice(["SAME", "VALID"]))}


def random_weights(rng: Random, shape: tuple[int, ...], axis: int, input_scale: np.floating) -> dict[str, object]:
    """filter, filter_scale, bias, output and activation such that the results spread over int8."""
    channels, activation = shape[axis], str(rng.choice(ACTIVATIONS))
    filter = rng.integers(-127, 128, shape)
    if channels > 1 and rng.integers(3) == 0:
        np.moveaxis(filter, axis, 0)[0] = 0
    count = 1 if rng.integers(6) == 0 else channels
    filter_scale = np.array([random_scale(rng, -11, -6) for _ in range(count)], np.float32)
    spread = float(input_scale) * float(np.median(filter_scale)) * 73 * 74 * np.sqrt(filter.size / channels)
    exponent = np.log2(spread / 2 ** rng.uniform(4, 8))
    scale = random_scale(rng, exponent, exponent)
    if activation == "RELU6" and rng.integers(2):
        scale = np.float32(6 / (rng.integers(10, 256) + 0.5))  # the upper clamp is a tie
    return {
        "filter": filter,
        "filter_scale": filter_scale,
        "bias": rng.integers(-20000, 20000, channels),
        "output": random_quantization(rng, scale),
        "activation": activation,
    }


def random_conv_2d(rng: Random, builder: Builder) -> str:
    tensor = builder.tensor(random_input(rng, builder))
    window = random_window(rng, tensor.shape)
    shape = (int(rng.choice([1, 3, 8, 16, 40])), *window.pop("filter_size"), tensor.shape[3])
    if rng.integers(5) == 0:
        window = {"dilations": (1, 2), "padding": "SAME"}
    return builder.conv_2d("x", name="y", **window, **random_weights(rng, shape, 0, tensor.quantization.scale[0]))


def random_depthwise_conv_2d(rng: Random, builder: Builder) -> str:
    tensor = builder.tensor(random_input(rng, builder))
    window = random_window(rng, tensor.shape)
    shape = (1, *window.pop("filter_size"), tensor.shape[3] * int(rng.choice([1, 1, 2, 3])))
    if rng.integers(5) == 0:
        window = {"dilations": (2, 1), "padding": "SAME"}
    weights = random_weights(rng, shape, 3, tensor.quantization.scale[0])
    return builder.depthwise_conv_2d("x", name="y", **window, **weights)


def random_fully_connected(rng: Random, builder: Builder) -> str:
    if rng.integers(4) == 0:
        return fully_connected_ties(rng, builder)
    shape = (int(rng.choice([1, 10, 33])), int(rng.choice([1, 8, 200])))
    quantization = random_quantization(rng)
    leading = [int(size) for size in rng.integers(1, 5, rng.choice([0, 0, 1, 2]))]
    builder.input("x", (1, *leading, shape[1]), quantization)
    return builder.fully_connected("x", name="y", **random_weights(rng, shape, 0, quantization.scale[0]))


def fully_connected_ties(rng: Random, builder: Builder) -> str:
    """Biases at odd multiples of half a step, where kernels that round once and twice part."""
    count, steps = 64, int(rng.integers(1, 400))
    input_scale, filter_scale = np.float32(2.0 ** rng.uniform(-7, 0)), np.float32(2.0 ** rng.uniform(-9, -3))
    scales = [filter_scale] * (1 if rng.integers(2) else count)
    output = per_tensor(np.float32(float(input_scale) * float(filter_scale) * 2 * steps), 0)
    builder.input("x", (1, 1), per_tensor(input_scale, 0))
    bias = steps * (2 * rng.integers(-120, 120, count) + 1)
    return builder.fully_connected("x", np.ones((count, 1)), scales, bias, output, name="y")


def random_sum(rng: Random, builder: Builder, kind: str) -> str:
    tensor = builder.tensor(random_tensor(rng, builder) if rng.integers(2) else random_input(rng, builder))
    # From equal scales down to a branch so small that XNNPACK leaves the operator to another kernel.
    scales = tensor.quantization.scale[0] * np.array([1, random_scale(rng, -14, 6)])
    other = random_operand(rng, builder, tensor.shape, random_quantization(rng, scales[1]))
    activation, scale = str(rng.choice(ACTIVATIONS)), scales.max() * random_scale(rng, -2, 2)
    if activation == "RELU6" and 0.01 < scale < 1:
        scale = np.float32(6 / (np.round(6 / scale) + 0.5))  # the upper clamp is a tie
    pair = ["x", other][:: 1 if rng.integers(2) else -1]
    return builder.operator(kind, pair, random_quantization(rng, scale), name="y", activation=activation)


def random_add(rng: Random, builder: Builder) -> str:
    return random_sum(rng, builder, "ADD")


def random_mul(rng: Random, builder: Builder) -> str:
    tensor = builder.tensor(random_tensor(rng, builder) if rng.integers(2) else random_input(rng, builder))
    quantization = random_quantization(rng)
    other = random_operand(rng, builder, tensor.shape, quantization)
    activation = str(rng.choice(ACTIVATIONS))
    product = tensor.quantization.scale[0] * quantization.scale[0]
    scale = product * random_scale(rng, -2, 12)
    if activation == "RELU6" and 0.01 < scale < 1:
        scale = np.float32(6 / (np.round(6 / scale) + 0.5))  # the upper clamp is a tie
    pair = ["x", other][:: 1 if rng.integers(2) else -1]
    return builder.mul(*pair, random_quantization(rng, scale), name="y", activation=activation)


def random_mean(rng: Random, builder: Builder) -> str:
    if rng.integers(2):
        tensor, axes = builder.tensor(random_input(rng, builder)), (1, 2)
    else:
        tensor = builder.tensor(random_tensor(rng, builder))
        axes = random_axes(rng, tensor.shape)
    scale = tensor.quantization.scale[0] * random_scale(rng, -2, 3)
    if rng.integers(2):  # the division by the number of values then meets exact ties
        scale = np.float32(scale / np.prod([tensor.shape[axis] for axis in axes]))
    return builder.mean("x", random_quantization(rng, scale), name="y", axes=axes, keep_dims=bool(rng.integers(2)))


def random_average_pool_2d(rng: Random, builder: Builder) -> str:
    shape = builder.tensor(random_input(rng, builder)).shape
    return builder.average_pool_2d("x", name="y", **random_window(rng, shape))


def random_max_pool_2d(rng: Random, builder: Builder) -> str:
    shape = builder.tensor(random_input(rng, builder)).shape
    return builder.max_pool_2d("x", name="y", **random_window(rng, shape))


def random_pad(rng: Random, builder: Builder) -> str:
    shape = builder.tensor(random_tensor(rng, builder)).shape
    return builder.pad("x", [(0, 0), *rng.integers(0, 3, (len(shape) - 1, 2))], name="y")


def random_concatenation(rng: Random, builder: Builder) -> str:
    tensor = builder.tensor(random_tensor(rng, builder))
    axis = int(rng.integers(1, len(tensor.shape)))
    other = random_quantization(rng, tensor.quantization.scale[0] * random_scale(rng, -3, 3))
    builder.input("z", (*tensor.shape[:axis], int(rng.integers(1, 9)), *tensor.shape[axis + 1 :]), other)
    return builder.concatenation(["x", "z", "x"], tensor.quantization, name="y", axis=axis)


def random_reshape(rng: Random, builder: Builder) -> str:
    """The batch alone, or with rows folded into it."""
    shape = builder.tensor(random_tensor(rng, builder, 3)).shape
    if rng.integers(2):
        return builder.reshape("x", (1, int(np.prod(shape))), name="y")
    rows = builder.reshape("x", (shape[1], *shape[2:]), name="rows")
    return builder.reshape(rows, shape, name="y")


def random_transpose(rng: Random, builder: Builder) -> str:
    shape = builder.tensor(random_tensor(rng, builder, 2, 6)).shape
    return builder.transpose("x", (0, *(1 + rng.permutation(len(shape) - 1))), name="y")


def random_strided_slice(rng: Random, builder: Builder) -> str:
    shape = builder.tensor(random_tensor(rng, builder)).shape
    begin = [0, *(int(rng.integers(size)) for size in shape[1:])]
    end = [None, *(int(rng.integers(b, size)) + 1 for b, size in zip(begin[1:], shape[1:], strict=True))]
    steps = [1, *(int(step) for step in rng.choice([1, 1, 2, 3], len(shape) - 1))]
    return builder.strided_slice("x", begin, end, steps, name="y")


def random_quantize(rng: Random, builder: Builder) -> str:
    tensor = builder.tensor(random_input(rng, builder))
    output = random_quantization(rng, tensor.quantization.scale[0] * random_scale(rng, -6.99, 7.99))
    return builder.quantize("x", output, name="y")


# One line for each operator of the device.
CASES: dict[str, Case] = {
    "CONV_2D": random_conv_2d,
    "DEPTHWISE_CONV_2D": random_depthwise_conv_2d,
    "FULLY_CONNECTED": random_fully_connected,
    "ADD": random_add,
    "MUL": random_mul,
    "AVERAGE_POOL_2D": random_average_pool_2d,
    "MAX_POOL_2D": random_max_pool_2d,
    "MEAN": random_mean,
    "PAD": random_pad,
    "CONCATENATION": random_concatenation,
    "RESHAPE": random_reshape,
    "TRANSPOSE": random_transpose,
    "STRIDED_SLICE": random_strided_slice,
    "QUANTIZE": random_quantize,
}


def random_codes(rng: Random, graph: Graph) -> dict[str, np.ndarray]:
    """A batch of 1..4; half of the batches stay near the zero points, where little saturates."""
    batch, near = int(rng.integers(1, 5)), rng.integers(2)
    codes = {}
    for name in graph.inputs:
        tensor = graph.tensors[name]
        values = rng.integers(-128, 128, (batch, *tensor.shape[1:]))
        if near:
            values = values // 8 + tensor.quantization.zero_point[0]
        codes[name] = np.clip(values, -128, 127).astype(np.int8)
    return codes
