# SPDX-License-Identifier: Apache-2.0
"""Random graphs of one operator of the device each: what the sweep against the runtimes runs.

A new operator needs one entry of `CASES`. Every other scale is a power of two, whose products make exact ties.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from exactqat.deploy import Builder, Graph, Quantization, per_tensor
from exactqat.kit.device import ACTIVATIONS, OPERATORS, Tensor
from exactqat.kit.device.activation import FUNCTIONS
from exactqat.kit.device.conditions import COMPARISONS
from exactqat.kit.device.matrix import NARROW
from exactqat.kit.device.operator import BOOL, FLOAT, OWN_GRID
from exactqat.kit.device.operator import in_int16 as kinds_in_int16
from exactqat.kit.device.recurrent import PROJECTED
from exactqat.kit.device.tensor import CODE_RANGES, INDICES, INT4, INT4_MAX, INT4_MIN, RAW
from exactqat.kit.device.weighted import FULL_RANGE, SHORT_BIAS

Random = np.random.Generator
Case = Callable[[Random, Builder], str]


def random_zero_point(rng: Random) -> int:
    return int(rng.choice([-128, 127, 0, rng.integers(-128, 128)]))


def random_scale(rng: Random, low: float = -9, high: float = 3) -> np.float32:
    """Every other one a power of two, whose products make exact ties, and one of four a decimal number as 0.1 or 0.04,
    whose quotients with those make ties in float32 alone."""
    exponent, kind = rng.uniform(low, high), int(rng.integers(4))
    if kind == 3:
        fifth = 5.0 ** int(rng.integers(1, 4))
        places = np.log2(fifth)
        rounded = np.clip(np.round(exponent + places), np.ceil(low + places), np.floor(high + places))
        return np.float32(2.0**rounded / fifth)
    return np.float32(2.0 ** (exponent if kind == 2 else np.round(exponent)))


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
    if count > 1 and rng.integers(6) == 0:  # channels that training killed
        dead = rng.random(count) < rng.choice([0.1, 0.5])
        filter_scale = np.where(dead, np.float32(2.0) ** rng.uniform(-95, -20, count), filter_scale)
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
    groups = int(rng.choice([size for size in (1, 1, 2, 3, 4, 8, 11) if tensor.shape[3] % size == 0]))
    outputs = int(rng.choice([1, 3, 8, 16, 40] if groups == 1 else [groups, 3 * groups, 16 * groups]))
    shape = (outputs, *window.pop("filter_size"), tensor.shape[3] // groups)
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
    weights = random_weights(rng, shape, 0, quantization.scale[0])
    return builder.fully_connected("x", name="y", keep_axes=not leading or bool(rng.integers(2)), **weights)


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


def random_subtraction(rng: Random, builder: Builder) -> str:
    return random_sum(rng, builder, "SUB")


def random_extreme(rng: Random, builder: Builder, kind: str) -> str:
    tensor = builder.tensor(random_tensor(rng, builder) if rng.integers(2) else random_input(rng, builder))
    other = random_operand(rng, builder, tensor.shape, tensor.quantization)
    return builder.operator(kind, ["x", other][:: 1 if rng.integers(2) else -1], None, name="y")


def random_squared_difference(rng: Random, builder: Builder) -> str:
    tensor = builder.tensor(random_tensor(rng, builder) if rng.integers(2) else random_input(rng, builder))
    scales = tensor.quantization.scale[0] * np.array([1, random_scale(rng, -4, 4)])
    other = random_operand(rng, builder, tensor.shape, random_quantization(rng, scales[1]))
    scale = scales.max() ** 2 * random_scale(rng, 1, 12)
    return builder.squared_difference("x", other, random_quantization(rng, scale), name="y")


def random_absolute(rng: Random, builder: Builder) -> str:
    tensor = builder.tensor(random_tensor(rng, builder))
    scale = tensor.quantization.scale[0] * (1 if rng.integers(4) == 0 else random_scale(rng, -3, 3))
    return builder.abs("x", random_quantization(rng, scale), name="y")


def random_reduction(rng: Random, builder: Builder, kind: str) -> str:
    tensor = builder.tensor(random_tensor(rng, builder))
    axes, keep = random_axes(rng, tensor.shape), bool(rng.integers(2))
    count = np.prod([tensor.shape[axis] for axis in axes])
    output = None
    if kind == "SUM":
        spread = np.sqrt(count) * random_scale(rng, -2, 3)
        scale = tensor.quantization.scale[0] * (random_scale(rng, 0, 5) if rng.integers(2) else spread)
        output = random_quantization(rng, scale)
    return builder.operator(kind, ["x"], output, name="y", axes=axes, keep_dims=keep)


def random_product(rng: Random, builder: Builder) -> str:
    """Of a few factors, whose product float32 holds, on a grid that a part of the products reaches."""
    shape = (1, *(int(size) for size in rng.integers(1, 8, int(rng.integers(1, 5)))))
    tensor = builder.tensor(builder.input("x", shape, random_quantization(rng)))
    axes = random_axes(rng, shape)
    if np.prod([shape[axis] for axis in axes]) > 9:
        axes = axes[:1]
    count = int(np.prod([shape[axis] for axis in axes]))
    factor = float(tensor.quantization.scale[0] * random_scale(rng, 0, 6))
    scale = 2.0 ** np.clip(count * np.log2(factor) - rng.uniform(0, 8), -100, 100)
    output = random_quantization(rng, np.float32(scale))
    return builder.operator("REDUCE_PROD", ["x"], output, name="y", axes=axes, keep_dims=bool(rng.integers(2)))


def random_index(rng: Random, builder: Builder, kind: str) -> str:
    shape = builder.tensor(random_tensor(rng, builder)).shape
    axis, dtype = int(rng.integers(1, len(shape))), str(rng.choice(["int32", "int64"]))
    return getattr(builder, kind.lower())("x", axis, name="y", output_type=dtype)


def random_transpose_conv(rng: Random, builder: Builder) -> str:
    tensor = builder.tensor(random_input(rng, builder))
    window, strides = rng.integers(1, 6, 2), rng.integers(1, 4, 2)
    sizes = np.array(tensor.shape[1:3])
    padding = str(rng.choice(["SAME", "VALID"]))
    if padding == "SAME":
        window = np.maximum(window, strides)
        result = sizes * strides - rng.integers(0, strides)
    else:
        result = (sizes - 1) * strides + window + rng.integers(0, strides)
    shape = (int(rng.choice([1, 3, 8, 16])), *(int(side) for side in window), tensor.shape[3])
    weights = random_weights(rng, shape, 0, tensor.quantization.scale[0])
    return builder.transpose_conv("x", name="y", strides=strides, padding=padding, output_size=result, **weights)


def random_batch_matmul(rng: Random, builder: Builder) -> str:
    lead = [int(size) for size in rng.integers(1, 4, rng.integers(0, 3))]
    rows, depth, columns = (int(rng.choice([1, 2, 7, 16, 33])) for _ in range(3))
    adj_x, adj_y = bool(rng.integers(2)), bool(rng.integers(2))
    first, second = random_quantization(rng), random_quantization(rng)
    builder.input("x", (1, *lead, *((depth, rows) if adj_x else (rows, depth))), first)
    matrix = (columns, depth) if adj_y else (depth, columns)
    if rng.integers(2):
        kept = [size if rng.integers(2) else 1 for size in lead]
        builder.input("z", (1, *(lead if rng.integers(2) else kept), *matrix), second)
    else:
        constant = rng.integers(-128, 128, (*([1, *lead] if rng.integers(2) else []), *matrix)).astype(np.int8)
        builder.constant("z", constant, second)
    spread = float(first.scale[0] * second.scale[0]) * 5000 * np.sqrt(depth)
    exponent = np.log2(spread / 2 ** rng.uniform(4, 8))
    output = random_quantization(rng, random_scale(rng, exponent, exponent))
    return builder.batch_matmul("x", "z", output, name="y", adj_x=adj_x, adj_y=adj_y)


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
    shrunk = random_axes(rng, shape) if len(shape) > 2 and rng.integers(4) == 0 else ()
    shrunk = shrunk[: len(shape) - 2]
    for axis in shrunk:
        end[axis], steps[axis] = begin[axis] + 1, 1
    return builder.strided_slice("x", begin, end, steps, name="y", shrink_axes=shrunk)


def random_pad_v2(rng: Random, builder: Builder) -> str:
    tensor = builder.tensor(random_tensor(rng, builder))
    value = None if rng.integers(3) == 0 else float(tensor.quantization.scale[0] * rng.uniform(-300, 300))
    return builder.padv2("x", [(0, 0), *rng.integers(0, 3, (len(tensor.shape) - 1, 2))], value, name="y")


def random_mirror_pad(rng: Random, builder: Builder) -> str:
    shape = builder.tensor(random_tensor(rng, builder)).shape
    mode = str(rng.choice(["REFLECT", "SYMMETRIC"]))
    pairs = [rng.integers(0, min(size - (mode == "REFLECT"), 3) + 1, 2) for size in shape[1:]]
    return builder.mirror_pad("x", [(0, 0), *pairs], mode, name="y")


def random_space_to_depth(rng: Random, builder: Builder) -> str:
    block, (height, width) = int(rng.integers(2, 4)), (int(size) for size in rng.integers(1, 6, 2))
    channels = int(rng.choice([1, 3, 8, 17]))
    builder.input("x", (1, height * block, width * block, channels), random_quantization(rng))
    return builder.space_to_depth("x", block, name="y")


def random_depth_to_space(rng: Random, builder: Builder) -> str:
    block, (height, width) = int(rng.integers(2, 4)), (int(size) for size in rng.integers(1, 9, 2))
    channels = int(rng.choice([1, 3, 8, 17])) * block * block
    builder.input("x", (1, height, width, channels), random_quantization(rng))
    return builder.depth_to_space("x", block, name="y")


def random_gather(rng: Random, builder: Builder) -> str:
    shape = builder.tensor(random_tensor(rng, builder)).shape
    axis = int(rng.integers(1, len(shape)))
    return builder.gather("x", axis, rng.integers(0, shape[axis], rng.integers(1, 12)), name="y")


def random_embedding(rng: Random, builder: Builder) -> str:
    """Numbers of words, and a table whose rows are all asked for now and then."""
    sizes = [int(size) for size in rng.integers(1, 20, rng.integers(1, 3))]
    builder.input("x", (1, *sizes), INDICES)
    table = (int(rng.integers(1, 40)), int(rng.integers(1, 33)))
    builder.constant("table", rng.integers(-128, 128, table).astype(np.int8), random_quantization(rng))
    return builder.embedding("x", "table", name="y")


def random_coded_embedding(rng: Random, builder: Builder, dtype: str = "int8") -> str:
    """All codes of 8 bits or many of 16, and a table that ends before the last of them or after it."""
    sizes = [int(size) for size in rng.integers(1, 20, rng.integers(1, 3))]
    numbers = per_tensor(1.0, random_zero_point(rng)) if rng.integers(2) else per_tensor(1.0, 0, "int16")
    builder.input("x", (1, *sizes), numbers)
    table = (int(rng.choice([1, 2, 40, 127, 128, 256, 400])), int(rng.integers(1, 33)))
    lowest, highest = CODE_RANGES[dtype]
    codes = rng.integers(lowest, highest + 1, table).astype(dtype)
    zero_point = 0 if dtype == "int16" else random_zero_point(rng)
    builder.constant("table", codes, per_tensor(random_scale(rng), zero_point, dtype))
    return builder.coded_embedding("x", "table", name="y")


def random_quantize(rng: Random, builder: Builder) -> str:
    tensor = builder.tensor(random_input(rng, builder))
    output = random_quantization(rng, tensor.quantization.scale[0] * random_scale(rng, -6.99, 7.99))
    return builder.quantize("x", output, name="y")


# One line for each operator of the device.
def random_unary(rng: Random, builder: Builder, kind: str, **attributes: object) -> str:
    """All 256 codes; on a grid of its own unless the device fixes it."""
    # Of steps of 8 and more TFLite-Micro's sigmoid and tanh see the sign alone, and take 0 for negative.
    builder.input("x", (1, 16, 16), random_quantization(rng, random_scale(rng, high=2.4)))
    output = None if OPERATORS[kind].fixed_grid else random_quantization(rng)
    return builder.operator(kind, ["x"], output, name="y", **attributes)


def unary(kind: str) -> Case:
    return lambda rng, builder: random_unary(rng, builder, kind)


def random_gelu(rng: Random, builder: Builder) -> str:
    return random_unary(rng, builder, "GELU", approximate=bool(rng.integers(2)))


def random_leaky_relu(rng: Random, builder: Builder) -> str:
    slopes = [0, 1e-4, 0.01, 0.1, 0.2, 1 / 3, 1, 2, rng.uniform(0, 3)]
    return random_unary(rng, builder, "LEAKY_RELU", alpha=float(rng.choice(slopes)))


def random_hard_swish(rng: Random, builder: Builder) -> str:
    quantization = random_quantization(rng)
    builder.input("x", (1, 16, 16), quantization)
    scale = quantization.scale[0] * random_scale(rng, -6.4, 8.4)
    return builder.hard_swish("x", random_quantization(rng, scale), name="y")


# Functions of further arguments, with some.
PARAMETERS = {
    "clamp": [(-1.0, 2.0), (None, 1.0), (0.5,)],
    "composition": [
        (("gt", (0, 0.5), ()), ("sin", (0,), ()), ("where", (1, 2, -1.0), ())),
        (("abs", (0,), ()), ("le", (1, 1.0), ()), ("tanh", (0,), ()), ("div", (3, 0), ()), ("where", (2, 1.0, 4), ())),
    ],
    "elu": [(), (0.5,), (1.5, 1.05, 0.7)],
    "gelu": [(), (True,)],
    "hardshrink": [(), (0.2,)],
    "leaky_relu": [(0.1,), (-2.0,)],
    "pow": [(2,), (3.0,), (0.5,), (-1,), (-1.5,)],
    "rsqrt": [(), (1e-5,)],
    "softplus": [(), (2.0, 5.0)],
    "softshrink": [(), (0.2,)],
    "threshold": [(0.1, -1.0)],
}


def random_table(rng: Random, builder: Builder) -> str:
    function = str(rng.choice(list(FUNCTIONS)))
    sets = PARAMETERS.get(function, [()])
    return random_unary(rng, builder, "TABLE", function=function, parameters=sets[rng.integers(len(sets))])


def random_prelu(rng: Random, builder: Builder) -> str:
    tensor = builder.tensor(random_tensor(rng, builder))
    shape = tuple(size if rng.integers(2) else 1 for size in tensor.shape[1:])[-int(rng.integers(1, 4)) :]
    slopes = builder.constant("z", rng.integers(-127, 128, shape), per_tensor(random_scale(rng, -11, 0), 0))
    scale = tensor.quantization.scale[0] * random_scale(rng, -5, 5)
    return builder.prelu("x", slopes, random_quantization(rng, scale), name="y")


def random_rows(rng: Random, builder: Builder, longest: int) -> str:
    leading = [int(size) for size in rng.integers(1, 5, rng.integers(0, 3))]
    length = int(rng.choice([1, 2, 3, 5, 10, 16, 17, 33, 100, 257, longest]))
    return builder.input("x", (1, *leading, length), random_quantization(rng))


def random_softmax(rng: Random, builder: Builder) -> str:
    # Longer rows can end the process in the reference kernel.
    return builder.softmax(
        random_rows(rng, builder, 511), name="y", beta=float(rng.choice([1, 1, 0.5, rng.uniform(0.1, 4)]))
    )


def random_log_softmax(rng: Random, builder: Builder) -> str:
    return builder.log_softmax(random_rows(rng, builder, 1000), name="y")


def random_l2_normalization(rng: Random, builder: Builder) -> str:
    return builder.l2_normalization(random_rows(rng, builder, 1000), name="y")


def random_resize(rng: Random, builder: Builder, kind: str) -> str:
    corners, halves = bool(rng.integers(2)), bool(rng.integers(2))
    if kind == "RESIZE_BILINEAR":
        halves = halves and not corners
    if rng.integers(4) == 0 and (corners or halves or kind != "RESIZE_BILINEAR"):
        # Rounded positions add up along long rows; of bilinear ones the built-in kernel then reads past the end.
        builder.input("x", (1, 1, int(rng.integers(1, 400)), 2), random_quantization(rng))
        size = [int(rng.integers(1, 3)), int(rng.integers(1, 600))]
    else:
        shape = builder.tensor(random_input(rng, builder)).shape
        factors = rng.integers(1, 5, 2) if rng.integers(2) else rng.integers(1, 30, 2) / shape[1:3]
        size = [int(np.rint(length * factor)) for length, factor in zip(shape[1:3], factors, strict=True)]
    return builder.operator(kind, ["x"], name="y", size=size, align_corners=corners, half_pixel_centers=halves)


def random_resize_nearest_neighbor(rng: Random, builder: Builder) -> str:
    return random_resize(rng, builder, "RESIZE_NEAREST_NEIGHBOR")


def random_resize_bilinear(rng: Random, builder: Builder) -> str:
    return random_resize(rng, builder, "RESIZE_BILINEAR")


def random_lookup(rng: Random, builder: Builder) -> str:
    return random_unary(rng, builder, "LOOKUP", codes=rng.integers(-128, 128, 256))


def random_expand_dims(rng: Random, builder: Builder) -> str:
    rank = len(builder.tensor(random_tensor(rng, builder)).shape)
    return builder.expand_dims("x", int(rng.integers(1, rank + 1)), name="y")


def random_squeeze(rng: Random, builder: Builder) -> str:
    shape = [1, *(int(size) for size in rng.integers(1, 7, rng.integers(1, 4)))]
    for _ in range(int(rng.integers(1, 3))):
        shape.insert(int(rng.integers(1, len(shape) + 1)), 1)
    builder.input("x", shape, random_quantization(rng))
    ones = [axis for axis, size in enumerate(shape) if axis and size == 1]
    count = int(rng.integers(1, len(ones) + 1))
    return builder.squeeze("x", sorted(int(axis) for axis in rng.choice(ones, count, replace=False)), name="y")


def random_pack(rng: Random, builder: Builder) -> str:
    tensor = builder.tensor(random_tensor(rng, builder))
    builder.input("z", tensor.shape, tensor.quantization)
    operands = [str(name) for name in rng.choice(["x", "z"], rng.integers(1, 5))]
    return builder.pack(["x", *operands], int(rng.integers(1, len(tensor.shape) + 1)), name="y")


def random_tile(rng: Random, builder: Builder) -> str:
    shape = builder.tensor(random_tensor(rng, builder)).shape
    return builder.tile("x", [1, *(int(times) for times in rng.integers(1, 4, len(shape) - 1))], name="y")


def random_slice(rng: Random, builder: Builder) -> str:
    shape = builder.tensor(random_tensor(rng, builder)).shape
    begin = [int(rng.integers(size)) for size in shape[1:]]
    sizes = [int(rng.choice([-1, rng.integers(1, size - at + 1)])) for at, size in zip(begin, shape[1:], strict=True)]
    return builder.slice("x", [0, *begin], [-1, *sizes], name="y")


def random_split(rng: Random, builder: Builder) -> str:
    shape = builder.tensor(random_tensor(rng, builder)).shape
    axis = int(rng.integers(1, len(shape)))
    counts = [count for count in range(1, shape[axis] + 1) if shape[axis] % count == 0]
    return builder.split("x", int(rng.choice(counts)), axis, name="y")


def random_split_v(rng: Random, builder: Builder) -> str:
    shape = builder.tensor(random_tensor(rng, builder)).shape
    axis = int(rng.integers(1, len(shape)))
    cuts = rng.permutation(np.arange(1, shape[axis]))[: rng.integers(0, 4)]
    sizes = np.diff(sorted([0, *cuts, shape[axis]]))
    return builder.split_v("x", [int(size) for size in sizes], axis, name="y")


def random_unpack(rng: Random, builder: Builder) -> str:
    shape = builder.tensor(random_tensor(rng, builder)).shape
    return builder.unpack("x", int(rng.integers(1, len(shape))), name="y")


def random_dequantize(rng: Random, builder: Builder) -> str:
    random_tensor(rng, builder)
    return builder.dequantize("x", INDICES, name="y")


def random_cast(rng: Random, builder: Builder) -> str:
    """Of conditions, or of integers without a grid."""
    to = [FLOAT, "int32", BOOL]
    match int(rng.integers(3)):
        case 0:
            (source,) = random_conditions(rng, builder, 1)
        case 1:
            source = builder.input("x", (1, 16, 16), INDICES, "uint8")
        case 2:
            source = builder.input("x", (1, int(rng.integers(1, 300))), INDICES)
    return builder.cast(source, INDICES, to=str(rng.choice(to)), name="y")


def random_cast_long(rng: Random, builder: Builder) -> str:
    """From int64, or to it."""
    source, to = ("int64", str(rng.choice([FLOAT, "int32", BOOL]))) if rng.integers(2) else ("int32", "int64")
    builder.input("x", (1, int(rng.integers(1, 300))), INDICES, source)
    return builder.cast("x", INDICES, to=to, name="y")


def random_quantize_real(rng: Random, builder: Builder) -> str:
    """Of real numbers: `random_codes` draws some on the edges of codes."""
    builder.input("x", (1, int(rng.choice([256, rng.integers(1, 40)]))), None)
    if rng.integers(3) == 0:
        return builder.quantize("x", per_tensor(random_scale(rng, -14, 3), 0, "int16"), name="y")
    return builder.quantize("x", random_quantization(rng), name="y")


def random_of_positive(rng: Random, builder: Builder, kind: str) -> str:
    """A function that is defined of what is not negative alone: the codes begin at real 0."""
    source = random_scale(rng)
    builder.input("x", (1, 16, 16), per_tensor(source, -128))
    scale = random_scale(rng)
    if kind == "RSQRT":
        scale = np.float32(random_scale(rng, -19, 11) / np.sqrt(source))
    return builder.operator(kind, ["x"], random_quantization(rng, scale), name="y")


def random_of_magnitudes(rng: Random, builder: Builder, kind: str) -> str:
    """Likewise in int16, whose zero point is 0: of the magnitudes of all codes."""
    source = random_scale(rng, -17, -5)
    builder.input("x", (1, 256, 256), per_tensor(source, 0, "int16"))
    builder.abs("x", per_tensor(source, 0, "int16"), name="magnitude")
    low, high = (-15, -2) if kind == "RSQRT" else (-10, 2)
    root = np.sqrt(source) if kind == "SQRT" else 1 / np.sqrt(source)
    output = per_tensor(np.float32(root * random_scale(rng, low, high)), 0, "int16")
    return builder.operator(kind, ["magnitude"], output, name="y")


def random_of_fine_grid(rng: Random, builder: Builder, kind: str) -> str:
    """A function of all codes in int16, on a grid so fine that its largest results saturate: the last bits of the C
    library's float32 then show."""
    source = 2.0 ** rng.uniform(-16, -9)
    builder.input("x", (1, 256, 256), per_tensor(np.float32(source), 0, "int16"))
    top = source * 2**15
    largest = np.exp(min(top, 10.0)) if kind == "EXP" else max(1.0, abs(np.log(top)))
    scale = np.float32(largest / 2**15 * 2.0 ** rng.uniform(-12, 0))
    return builder.operator(kind, ["x"], per_tensor(scale, 0, "int16"), name="y")


def random_comparison(rng: Random, builder: Builder, kind: str) -> str:
    """Every other time on one grid."""
    tensor = builder.tensor(random_tensor(rng, builder, highest=4))
    if tensor.quantization.scale[0] >= 1:
        builder = renewed(builder)
        tensor = builder.tensor(builder.input("x", tensor.shape, random_quantization(rng, random_scale(rng, high=-1))))
    grid = tensor.quantization if rng.integers(2) else random_quantization(rng, random_scale(rng, high=-1))
    other = random_operand(rng, builder, tensor.shape, grid)
    return builder.operator(kind, ["x", other][:: 1 if rng.integers(2) else -1], INDICES, name="y")


def renewed(builder: Builder) -> Builder:
    """Without what was made."""
    builder.__init__()  # type: ignore[misc]
    return builder


def random_conditions(rng: Random, builder: Builder, count: int) -> list[str]:
    """Comparisons of inputs of one shape."""
    rank = int(rng.integers(2, 5))
    shape = (1, *(int(size) for size in rng.integers(1, 10, rank - 1)))
    grid = per_tensor(0.125, 0)
    for name in ("x", "z"):
        builder.input(name, shape, grid)
    kinds = [str(kind) for kind in rng.choice(["GREATER", "EQUAL", "LESS_EQUAL"], count)]
    return [builder.operator(kind, ["x", "z"], INDICES, name=f"c{at}") for at, kind in enumerate(kinds)]


def random_logic(rng: Random, builder: Builder, kind: str) -> str:
    names = random_conditions(rng, builder, OPERATORS[kind].operands[0])
    return builder.operator(kind, names, INDICES, name="y")


def random_choice(rng: Random, builder: Builder, kind: str) -> str:
    (condition,) = random_conditions(rng, builder, 1)
    return builder.operator(kind, [condition, *["x", "z"][:: 1 if rng.integers(2) else -1]], None, name="y")


def random_div_wide(rng: Random, builder: Builder) -> str:
    """Likewise in int16."""
    first, second = (per_tensor(random_scale(rng, -17, -5), 0, "int16") for _ in range(2))
    shape = builder.tensor(builder.input("x", (1, int(rng.integers(1, 30)), 64), first)).shape
    held = shape[int(rng.integers(3)) :]
    codes = rng.choice([-1, 1], held) * rng.integers(1, rng.choice([4, 300, 2**15]), held)
    builder.constant("z", codes.astype(np.int16), second)
    scale = np.float32(first.scale[0] / second.scale[0] * random_scale(rng, -14, 4))
    activation = str(rng.choice(ACTIVATIONS))
    return builder.div("x", "z", per_tensor(scale, 0, "int16"), name="y", activation=activation)


def random_division(rng: Random, builder: Builder, kind: str) -> str:
    """Of integers without a grid, by a constant without 0."""
    shape = (1, int(rng.integers(1, 30)), int(rng.integers(1, 30)))
    builder.input("x", shape, INDICES)
    codes = rng.choice([-1, 1], shape[1:]) * rng.integers(1, rng.choice([4, 300, 2**31]), shape[1:])
    builder.bias("z", codes.astype(np.int32), INDICES)
    return builder.operator(kind, ["x", "z"], INDICES, name="y")


def random_power(rng: Random, builder: Builder) -> str:
    """Of integers without a grid between -7 and 8, to constant powers that keep 32 bits."""
    shape = (1, int(rng.integers(1, 30)), int(rng.integers(1, 30)))
    builder.input("i", shape, INDICES)
    ends = [builder.bias(name, np.array([end], np.int32), INDICES) for name, end in (("low", -7), ("high", 8))]
    builder.operator("MINIMUM", [builder.operator("MAXIMUM", ["i", ends[0]], name="m"), ends[1]], name="x")
    builder.bias("z", rng.integers(0, 11, shape[1:]).astype(np.int32), INDICES)
    return builder.operator("POW", ["x", "z"], INDICES, name="y")


def random_running_sum(rng: Random, builder: Builder, dtype: str) -> str:
    shape = (1, *(int(size) for size in rng.integers(1, 10, int(rng.integers(1, 4)))))
    builder.input("x", shape, INDICES, dtype)
    exclusive, reverse = (bool(rng.integers(2)) for _ in range(2))
    axis = int(rng.integers(1, len(shape)))
    return builder.cumsum("x", INDICES, axis=axis, exclusive=exclusive, reverse=reverse, name="y")


def random_sum_of_all(rng: Random, builder: Builder) -> str:
    shape = (1, *(int(size) for size in rng.integers(1, 10, int(rng.integers(1, 4)))))
    names = [builder.input(f"x{at}", shape, INDICES) for at in range(int(rng.integers(2, 5)))]
    return builder.operator("ADD_N", names, INDICES, name="y")


def random_scatter(rng: Random, builder: Builder) -> str:
    whole = (1, *(int(size) for size in rng.integers(1, 10, int(rng.integers(1, 4)))))
    axes, sizes = int(rng.integers(1, len(whole) + 1)), rng.integers(1, 6, int(rng.integers(1, 3)))
    indices = rng.integers(0, whole[:axes], (1, *sizes, axes))
    builder.input("x", (*indices.shape[:-1], *whole[axes:]), INDICES)
    return builder.operator("SCATTER_ND", ["x"], INDICES, indices=indices, new_shape=whole, name="y")


def random_update_slice(rng: Random, builder: Builder) -> str:
    tensor = builder.tensor(random_tensor(rng, builder))
    sizes = [int(rng.integers(1, size + 1)) for size in tensor.shape]
    builder.input("z", sizes, tensor.quantization)
    builder.input("i", (1, len(sizes)), INDICES)
    starts = builder.reshape("i", (len(sizes),), name="starts")
    return builder.operator("DYNAMIC_UPDATE_SLICE", ["x", "z", starts], tensor.quantization, name="y")


def random_of_conditions(rng: Random, builder: Builder, kind: str) -> str:
    (condition,) = random_conditions(rng, builder, 1)
    axes = random_axes(rng, builder.tensor(condition).shape)
    return builder.operator(kind, [condition], INDICES, axes=axes, keep_dims=bool(rng.integers(2)), name="y")


def random_div(rng: Random, builder: Builder) -> str:
    """By a constant without 0."""
    tensor = builder.tensor(random_tensor(rng, builder, highest=4))
    grid = random_quantization(rng)
    codes = rng.integers(-128, 128, tensor.shape)
    codes = np.where(codes == grid.zero_point[0], codes ^ 1, codes)
    builder.constant("z", codes, grid)
    scale = tensor.quantization.scale[0] / grid.scale[0] * random_scale(rng, -8, 4)
    activation = str(rng.choice(ACTIVATIONS))
    return builder.div("x", "z", random_quantization(rng, scale), name="y", activation=activation)


def random_space_to_batch(rng: Random, builder: Builder) -> str:
    count = int(rng.integers(1, 3))
    blocks = [int(block) for block in rng.integers(1, 4, count)]
    shape = [1, *(int(size) for size in rng.integers(1, 10, count)), int(rng.integers(1, 9))]
    pairs = []
    for size, block in zip(shape[1:], blocks, strict=False):
        before = int(rng.integers(0, 3))
        pairs.append((before, -(size + before) % block))
    builder.input("x", shape, random_quantization(rng))
    return builder.space_to_batch_nd("x", blocks, pairs, name="y")


def random_batch_to_space(rng: Random, builder: Builder) -> str:
    """Of what a SPACE_TO_BATCH_ND makes, as inputs have one row."""
    sizes = builder.tensor(random_space_to_batch(rng, builder)).shape
    blocks = builder.graph(["y"]).operators[0].attributes["block_shape"]
    crops = [tuple(int(cut) for cut in rng.integers(0, 2, 2)) for _ in blocks]
    crops = [
        cut if size * block > sum(cut) else (0, 0) for cut, size, block in zip(crops, sizes[1:], blocks, strict=False)
    ]
    return builder.batch_to_space_nd("y", blocks, crops, name="back")


def random_reverse(rng: Random, builder: Builder) -> str:
    shape = builder.tensor(random_tensor(rng, builder)).shape
    first, last = sorted(int(axis) for axis in rng.integers(1, len(shape), 2))
    return builder.reverse_v2("x", list(range(first, last + 1)), name="y")


def random_broadcast_to(rng: Random, builder: Builder) -> str:
    whole = builder.tensor(random_tensor(rng, builder)).shape
    shape = (1, *(size if rng.integers(2) else 1 for size in whole[1:]))
    builder = renewed(builder)
    builder.input("x", shape, random_quantization(rng))
    return builder.broadcast_to("x", whole, name="y")


def random_svdf(rng: Random, builder: Builder) -> str:
    features, memory, rank = int(rng.choice([1, 3, 8, 40])), int(rng.integers(1, 11)), int(rng.integers(1, 4))
    units = int(rng.choice([1, 4, 17]))
    filters, first = rank * units, random_scale(rng, -11, -6)
    x = random_quantization(rng)
    state = random_scale(rng, *[np.log2(float(x.scale[0] * first) * 73 * 74 * features / 2 ** rng.uniform(9, 15))] * 2)
    weights = min(32767, 60000 // (memory * rank))  # whose sums fit into 32 bits
    time = random_scale(rng, -16, -12)
    spread = float(state * time) * 0.3 * 2**12 * weights * np.sqrt(memory * rank) / 2 ** rng.uniform(4, 8)
    builder.input("x", (1, features), x)
    builder.constant("features", rng.integers(-127, 128, (filters, features)).astype(np.int8), per_tensor(first, 0))
    codes = rng.integers(-weights, weights + 1, (filters, memory))
    builder.constant("time", codes.astype(np.int16), per_tensor(time, 0, "int16"))
    builder.bias("bias", rng.integers(-20000, 20000, units).astype(np.int32), per_tensor(state * time, 0))
    builder.variable("state", (1, filters * memory), per_tensor(state, 0, "int16"))
    output = random_quantization(rng, np.float32(spread))
    operands = ["x", "features", "time", "bias", "state"]
    # LiteRT takes no other activation, and applies none.
    return builder.operator("SVDF", operands, output, name="y", rank=rank, activation="RELU")


def random_projected_lstm(rng: Random, builder: Builder) -> str:
    return random_lstm(rng, builder, int(rng.choice([1, 3, 7])))


def random_lstm(rng: Random, builder: Builder, out: int | None = None) -> str:
    """out: of a projection, how wide it is."""
    inputs, units, moments = int(rng.choice([1, 3, 16])), int(rng.choice([1, 4, 10])), int(rng.integers(1, 6))
    x, hidden = random_quantization(rng), random_quantization(rng, random_scale(rng, -9, -6))
    cell = per_tensor(2.0 ** int(rng.integers(-17, -8)), 0, "int16")
    operands = [builder.input("x", (1, moments, inputs), x)]
    # From sums that saturate to such as stay small.
    reach = rng.uniform(-2, 4)
    for name, width, grid in (("x", inputs, x), ("hidden", out or units, hidden)):
        for gate in ("input", "forget", "cell", "output"):
            scale = np.float32(2 ** (reach + rng.uniform(-1, 1)) / (float(grid.scale[0]) * 73 * 74 * np.sqrt(width)))
            codes = rng.integers(-127, 128, (units, width)).astype(np.int8)
            scale = min(scale, np.float32(0.05 / grid.scale[0]))
            operands.append(builder.constant(f"{name}_{gate}", codes, per_tensor(scale, 0)))
    for gate in range(4):
        scale = builder.tensor(operands[1 + gate]).quantization.scale[0] * x.scale[0]
        most = int(min(2 / float(scale), 2**28)) + 1
        codes = rng.integers(-most, most + 1, units).astype(np.int32)
        operands.append(builder.bias(f"bias_{gate}", codes, per_tensor(scale, 0)))
    operands += [builder.variable("hidden", (1, out or units), hidden), builder.variable("cell", (1, units), cell)]
    clip = float(rng.choice([0.0, 0.0, 1.0, 10.0]))
    grid = {"hidden_scale": float(hidden.scale[0]), "hidden_zero_point": int(hidden.zero_point[0])}
    if out is not None:
        shown, scale = random_quantization(rng, random_scale(rng, -9, -6)), random_scale(rng, -10, -5)
        codes = rng.integers(-127, 128, (out, units)).astype(np.int8)
        operands.append(builder.constant("projection", codes, per_tensor(scale, 0)))
        bias = rng.integers(-3000, 3001, out).astype(np.int32)
        operands.append(builder.bias("projection_bias", bias, per_tensor(scale * shown.scale[0], 0)))
        grid = {"hidden_scale": float(shown.scale[0]), "hidden_zero_point": int(shown.zero_point[0])}
        grid["projection_clip"] = float(rng.choice([0.0, 0.0, 0.3, 1.0]))
    return builder.operator("UNIDIRECTIONAL_SEQUENCE_LSTM", operands, hidden, name="y", cell_clip=clip, **grid)


def random_top_k(rng: Random, builder: Builder) -> str:
    shape = builder.tensor(random_tensor(rng, builder)).shape
    return builder.topk_v2("x", int(rng.integers(1, shape[-1] + 1)), name="y")


def random_gather_nd(rng: Random, builder: Builder) -> str:
    shape = builder.tensor(random_tensor(rng, builder, 2, 4)).shape
    axes = int(rng.integers(1, len(shape) + 1))
    sizes = [1, *(int(size) for size in rng.integers(1, 5, rng.integers(0, 3)))]
    indices = rng.integers(0, shape[:axes], (*sizes, axes))
    return builder.gather_nd("x", indices, name="y")


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
    "SUB": random_subtraction,
    "MAXIMUM": partial(random_extreme, kind="MAXIMUM"),
    "MINIMUM": partial(random_extreme, kind="MINIMUM"),
    "SQUARED_DIFFERENCE": random_squared_difference,
    "ABS": random_absolute,
    "SUM": partial(random_reduction, kind="SUM"),
    "REDUCE_MAX": partial(random_reduction, kind="REDUCE_MAX"),
    "REDUCE_MIN": partial(random_reduction, kind="REDUCE_MIN"),
    "REDUCE_PROD": random_product,
    "ARG_MAX": partial(random_index, kind="ARG_MAX"),
    "ARG_MIN": partial(random_index, kind="ARG_MIN"),
    "TRANSPOSE_CONV": random_transpose_conv,
    "BATCH_MATMUL": random_batch_matmul,
    "PADV2": random_pad_v2,
    "MIRROR_PAD": random_mirror_pad,
    "SPACE_TO_DEPTH": random_space_to_depth,
    "DEPTH_TO_SPACE": random_depth_to_space,
    "GATHER": random_gather,
    "EMBEDDING": random_embedding,
    "CODED_EMBEDDING": random_coded_embedding,
    "LOGISTIC": unary("LOGISTIC"),
    "TANH": unary("TANH"),
    "GELU": random_gelu,
    "EXP": unary("EXP"),
    "TABLE": random_table,
    "RELU": unary("RELU"),
    "LEAKY_RELU": random_leaky_relu,
    "PRELU": random_prelu,
    "HARD_SWISH": random_hard_swish,
    "SOFTMAX": random_softmax,
    "LOG_SOFTMAX": random_log_softmax,
    "L2_NORMALIZATION": random_l2_normalization,
    "RESIZE_NEAREST_NEIGHBOR": random_resize_nearest_neighbor,
    "RESIZE_BILINEAR": random_resize_bilinear,
    "LOOKUP": random_lookup,
    "EXPAND_DIMS": random_expand_dims,
    "SQUEEZE": random_squeeze,
    "PACK": random_pack,
    "TILE": random_tile,
    "SLICE": random_slice,
    "SPLIT": random_split,
    "SPLIT_V": random_split_v,
    "UNPACK": random_unpack,
    "DEQUANTIZE": random_dequantize,
    "CAST": random_cast,
    **{kind: partial(random_comparison, kind=kind) for kind, *_ in COMPARISONS},
    **{kind: partial(random_logic, kind=kind) for kind in ("LOGICAL_AND", "LOGICAL_OR", "LOGICAL_NOT")},
    **{kind: partial(random_choice, kind=kind) for kind in ("SELECT_V2", "SELECT")},
    "TOPK_V2": random_top_k,
    "GATHER_ND": random_gather_nd,
    "SVDF": random_svdf,
    "UNIDIRECTIONAL_SEQUENCE_LSTM": random_lstm,
    "SPACE_TO_BATCH_ND": random_space_to_batch,
    "BATCH_TO_SPACE_ND": random_batch_to_space,
    "REVERSE_V2": random_reverse,
    "BROADCAST_TO": random_broadcast_to,
    "DYNAMIC_UPDATE_SLICE": random_update_slice,
    **{kind: partial(random_of_conditions, kind=kind) for kind in ("REDUCE_ALL", "REDUCE_ANY")},
    "DIV": random_div,
    "NEG": unary("NEG"),
    "RSQRT": partial(random_of_positive, kind="RSQRT"),
    "SQRT": partial(random_of_positive, kind="SQRT"),
    "LOG": partial(random_of_positive, kind="LOG"),
    "ELU": unary("ELU"),
    "RELU6": unary("RELU6"),
    "RELU_N1_TO_1": unary("RELU_N1_TO_1"),
    "RELU_0_TO_1": unary("RELU_0_TO_1"),
}


def in_int16(rng: Random, graph: Graph) -> Graph:
    """The same network with int16 activations, on grids 256 times finer."""
    kinds = [OPERATORS[operator.kind] for operator in graph.operators]
    fixed = {operator.outputs[0] for operator, kind in zip(graph.operators, kinds, strict=True) if kind.fixed_grid}
    # Filters and slopes stay int8; tables are of the result's dtype.
    pairs = zip(graph.operators, kinds, strict=True)
    filters = {layer.inputs[1] for layer, kind in pairs if kind.weights and not kind.same_quantization}
    clamped = {operator.outputs[0] for operator in graph.operators if operator.attributes.get("activation") == "RELU6"}
    tensors: dict[str, Tensor] = {}
    for name, tensor in graph.tensors.items():
        data, dtype, scale = tensor.data, "int16", tensor.quantization.scale[0] / 256
        if fixed and rng.integers(4) == 0:  # some kernels take what is near to these for a shift
            scale = np.float32(2.0 ** rng.integers(-12, -10) * rng.uniform(0.9985, 1.0015))
        if name == graph.operators[0].outputs[0] and kinds[0].kind == "BATCH_MATMUL" and rng.integers(4) == 0:
            scale = np.float32(scale / 2.0 ** rng.integers(8, 20))  # rescaled sums leave 32 bits
        if name in clamped and rng.integers(2):
            scale = np.float32(6 / (np.round(6 / scale) + 0.5))  # the upper clamp is a tie
        quantization = per_tensor(1 / 32768 if name in fixed else scale, 0, "int16")
        if data is not None and data.dtype == np.int32:
            data = data.astype(np.int64) * 256 + rng.integers(-128, 128, data.shape)
            scale = tensor.quantization.scale / 256
            dtype, quantization = "int64", replace(tensor.quantization, scale=scale)
        elif name in filters or tensor.dtype != "int8":
            dtype, quantization = tensor.dtype, tensor.quantization
        elif data is not None:
            data = (data.astype(np.int64) * 256 + rng.integers(0, 256, data.shape)).astype(np.int16)
        # All codes of a function of one operand.
        of_one = not kinds[0].same_quantization and not kinds[0].axis_attributes
        every = len(graph.tensors) == 2 and tensor.shape == (1, 16, 16) and of_one
        shape = (1, 256, 256) if every else tensor.shape
        tensors[name] = Tensor(name, shape, dtype, quantization, data)
    result = Graph(tensors, graph.operators, graph.inputs, graph.outputs)
    result.validate()
    return result


def with_full_range(rng: Random, graph: Graph) -> Graph:
    """The same network with weights down to -128, as many as half of them."""
    tensors = dict(graph.tensors)
    (operator,) = graph.operators
    filter = tensors[operator.inputs[1]]
    assert filter.data is not None
    codes = np.where(rng.random(filter.shape) < rng.choice([0.02, 0.5]), -128, filter.data).astype(np.int8)
    codes.reshape(-1)[0] = -128
    tensors[filter.name] = replace(filter, data=codes)
    result = replace(graph, tensors=tensors)
    result.validate()
    return result


def with_four_bits(rng: Random, graph: Graph) -> Graph:
    """The same network with filters of four bits, all of their codes, on a grid that is as much coarser."""
    tensors = dict(graph.tensors)
    (operator,) = graph.operators
    filter, bias = (tensors[name] for name in operator.inputs[1:])
    assert filter.data is not None
    codes = rng.integers(INT4_MIN, INT4_MAX + 1, filter.shape).astype(np.int8)
    finer = [
        replace(tensor.quantization, scale=tensor.quantization.scale * np.float32(16)) for tensor in (filter, bias)
    ]
    tensors[filter.name] = replace(filter, data=codes, dtype=INT4, quantization=finer[0])
    tensors[bias.name] = replace(bias, data=bias.data // 16, quantization=finer[1])
    result = replace(graph, tensors=tensors)
    result.validate()
    return result


def in_uint8(rng: Random, graph: Graph) -> Graph:
    """The same network as TensorFlow 1 wrote it: in uint8, with one scale and any zero point for a filter."""
    tensors = dict(graph.tensors)
    operators = tuple(replace(operator, unsigned=True) for operator in graph.operators)
    for operator in operators:
        if len(OPERATORS[operator.kind].weights) == 2:
            filter, bias = (tensors[name] for name in operator.inputs[1:])
            assert filter.data is not None
            scale = np.float32(np.median(filter.quantization.scale))
            grid = per_tensor(scale, random_zero_point(rng) if rng.integers(2) else int(rng.integers(-20, 20)))
            codes = rng.integers(-128, 128, filter.shape).astype(np.int8)
            tensors[filter.name] = replace(filter, quantization=grid, data=codes)
            scale = tensors[operator.inputs[0]].quantization.scale[0] * scale
            tensors[bias.name] = replace(bias, quantization=per_tensor(scale, 0))
    result = Graph(tensors, operators, graph.inputs, graph.outputs)
    result.validate()
    return result


def on_own_grid(rng: Random, graph: Graph) -> Graph:
    """The same network as others' .onnx files have it: its result on any grid, and averages of real numbers."""
    (operator,) = graph.operators
    unsigned = OPERATORS[operator.kind].same_quantization
    source, output = (graph.tensors[side[0]] for side in (operator.inputs, operator.outputs))
    scale = rng.choice([1 / 255, 1 / 127, 0.003])
    if unsigned:  # 13 is no factor of the operand's
        scale = source.quantization.scale[0] * random_scale(rng, -3, 3) * 1.3
    grid = per_tensor(np.float32(scale), random_zero_point(rng) if rng.integers(2) else -128)
    tensors = {**graph.tensors, output.name: replace(output, quantization=grid)}
    result = replace(graph, tensors=tensors, operators=(replace(operator, unsigned=unsigned),))
    result.validate()
    return result


def with_short_bias(rng: Random, graph: Graph) -> Graph:
    """The same network in int16 whose bias is in int32."""
    tensors = dict(graph.tensors)
    (operator,) = graph.operators
    bias = tensors[operator.inputs[2]]
    assert bias.data is not None
    tensors[bias.name] = replace(bias, data=np.clip(bias.data, -(2**29), 2**29).astype(np.int32), dtype="int32")
    result = replace(graph, tensors=tensors)
    result.validate()
    return result


def with_int8_constant(rng: Random, graph: Graph) -> Graph:
    """The same product in int16, but of a constant in int8."""
    x, z, y = (graph.tensors[name] for name in "xzy")
    codes = rng.integers(-128, 128, z.shape).astype(np.int8)
    scale = z.quantization.scale[0] * np.float32(256)
    constant = Tensor("z", z.shape, "int8", per_tensor(scale, 0), codes)
    least = np.maximum(y.quantization.scale[0], x.quantization.scale[0] * scale / np.float32(128))
    result = replace(y, quantization=per_tensor(least, 0, "int16"))
    narrow = replace(graph, tensors={**graph.tensors, "z": constant, "y": result}, inputs=("x",))
    narrow.validate()
    return narrow


def in_int32(rng: Random, graph: Graph) -> Graph:
    """The same network of integers without a grid, and without fused activations."""
    tensors = {
        name: replace(tensor, dtype="int32", quantization=INDICES,
                      data=None if tensor.data is None else tensor.data.astype(np.int32) * 1_000_003)
        if tensor.dtype == "int8" else tensor
        for name, tensor in graph.tensors.items()
    }  # fmt: skip
    plain = [
        replace(operator, attributes={**operator.attributes, "activation": "NONE"})
        if "activation" in operator.attributes else operator
        for operator in graph.operators
    ]  # fmt: skip
    result = replace(graph, tensors=tensors, operators=tuple(plain))
    result.validate()
    return result


def random_lookup_wide(rng: Random, builder: Builder) -> str:
    builder.input("x", (1, 256, 256), per_tensor(random_scale(rng), 0, "int16"))
    codes = rng.integers(-(2**15), 2**15, 2**16)
    return builder.lookup("x", per_tensor(random_scale(rng), 0, "int16"), name="y", codes=codes)


def random_quantize_wide(rng: Random, builder: Builder) -> str:
    """Between int8 and int16, either way, or within int16."""
    source, target = [("int8", "int16"), ("int16", "int8"), ("int16", "int16")][rng.integers(3)]
    scale = random_scale(rng)
    ratio = random_scale(rng, -6.99, 6.99) * (256 if source == "int8" else 1) / (256 if target == "int8" else 1)
    if rng.integers(4) == 0:
        ratio = random_scale(rng, -30.9, 21.9 if source == "int8" else 14.9)
    places = [random_zero_point(rng) if dtype == "int8" else 0 for dtype in (source, target)]
    builder.input("x", (1, 256, 256), per_tensor(scale, places[0], source))
    return builder.quantize("x", per_tensor(scale / ratio, places[1], target), name="y")


# Those whose int16 form has cases of its own; others' are made of their int8 form.
WIDE_CASES: dict[str, Case] = {
    "QUANTIZE": random_quantize_wide,
    "LOOKUP": random_lookup_wide,
    "CODED_EMBEDDING": partial(random_coded_embedding, dtype="int16"),
    "DIV": random_div_wide,
    "RSQRT": partial(random_of_magnitudes, kind="RSQRT"),
    "SQRT": partial(random_of_magnitudes, kind="SQRT"),
    **{kind: partial(random_of_fine_grid, kind=kind) for kind in ("EXP", "LOG")},
}
# Likewise of integers without a grid.
PLAIN_CASES: dict[str, Case] = {
    **{kind: partial(random_division, kind=kind) for kind in ("DIV", "FLOOR_DIV", "FLOOR_MOD")},
    "CUMSUM": partial(random_running_sum, dtype="int32"),
    "ADD_N": random_sum_of_all,
    "POW": random_power,
    "SCATTER_ND": random_scatter,
}
LONG_CASES: dict[str, Case] = {"CAST": random_cast_long, "CUMSUM": partial(random_running_sum, dtype="int64")}
# Others are float32 throughout, and no equality is claimed.
REAL_CASES: dict[str, Case] = {"QUANTIZE": random_quantize_real}
PROJECTED_CASES: dict[str, Case] = {"UNIDIRECTIONAL_SEQUENCE_LSTM": random_projected_lstm}
# TRANSPOSE_CONV of no runtime takes filters of four bits.
FOUR_BIT_KINDS = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
# Of .onnx files alone.
NAMES_IN_ONNX = tuple(f"{kind}:{OWN_GRID}" for kind, operator in OPERATORS.items() if operator.free_in_onnx)
FULL_RANGE_KINDS = [kind for kind, operator in OPERATORS.items() if len(operator.weights) == 2]
# Under these names `EXACT` and `MEASURED` know operators: the kind, or the kind and the dtype or the weights' range.
# LiteRT has no kernel for the others in uint8, or one that computes otherwise; TFLite-Micro has hardly any.
UNSIGNED_KINDS = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "ADD", "MUL", "AVERAGE_POOL_2D", "MAX_POOL_2D",
                  "MEAN", "PAD", "CONCATENATION", "RESHAPE", "TRANSPOSE", "STRIDED_SLICE", "QUANTIZE", "SUB", "MAXIMUM",
                  "MINIMUM", "SUM", "REDUCE_MAX", "REDUCE_MIN", "ARG_MAX", "ARG_MIN", "TRANSPOSE_CONV", "PADV2",
                  "MIRROR_PAD", "SPACE_TO_DEPTH", "DEPTH_TO_SPACE", "GATHER", "EMBEDDING", "LOGISTIC", "TANH", "GELU",
                  "RELU", "LEAKY_RELU", "PRELU", "HARD_SWISH", "SOFTMAX", "LOG_SOFTMAX", "L2_NORMALIZATION",
                  "RESIZE_NEAREST_NEIGHBOR", "RESIZE_BILINEAR", "EXPAND_DIMS", "SQUEEZE", "PACK", "TILE", "SLICE",
                  "SPLIT", "SPLIT_V", "UNPACK", "EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL",
                  "TOPK_V2", "BATCH_TO_SPACE_ND", "REVERSE_V2", "DIV", "RELU6", "RELU_N1_TO_1", "RELU_0_TO_1",
                  "DEQUANTIZE")  # fmt: skip
# What moves integers without a grid, or computes with them: LiteRT has no kernel for the others.
PLAIN_KINDS = (
    "ADD",
    "SUB",
    "MUL",
    "SQUARED_DIFFERENCE",
    "ABS",
    "NEG",
    "SUM",
    "MEAN",
    "REDUCE_PROD",
    "ARG_MAX",
    "ARG_MIN",
    *PLAIN_CASES,
    *(kind for kind, *_ in COMPARISONS),
    "SELECT_V2",
    "SELECT",
    "PAD",
    "RESHAPE",
    "TRANSPOSE",
    "STRIDED_SLICE",
    "MAXIMUM",
    "MINIMUM",
    "REDUCE_MAX",
    "REDUCE_MIN",
    "MIRROR_PAD",
    "SPACE_TO_DEPTH",
    "GATHER",
    "EXPAND_DIMS",
    "SQUEEZE",
    "PACK",
    "TILE",
    "SLICE",
    "SPLIT",
    "SPLIT_V",
    "UNPACK",
    "TOPK_V2",
    "GATHER_ND",
    "REVERSE_V2",
    "BROADCAST_TO",
    "DYNAMIC_UPDATE_SLICE",
)
NAMES = (
    *CASES,
    *(f"{kind}:int16" for kind in kinds_in_int16()),
    *(f"{kind}:{FULL_RANGE}" for kind in FULL_RANGE_KINDS),
    *(f"{kind}:{FLOAT}" for kind in REAL_CASES),
    *(f"{kind}:{PROJECTED}" for kind in PROJECTED_CASES),
    *(f"{kind}:{INT4}" for kind in FOUR_BIT_KINDS),
    *(f"{kind}:{RAW}" for kind in UNSIGNED_KINDS),
    *(f"{kind}:int32" for kind in PLAIN_KINDS),
    *(f"{kind}:int64" for kind in LONG_CASES),
    *(f"{kind}:int16:{SHORT_BIAS}" for kind in FULL_RANGE_KINDS),
    f"BATCH_MATMUL:int16:{NARROW}",
)


def random_graph(rng: Random, name: str) -> Graph:
    """A graph of the operator of that name."""
    kind, _, dtype = name.partition(":")
    builder = Builder()
    own = {
        "int16": WIDE_CASES,
        "int32": PLAIN_CASES,
        "int64": LONG_CASES,
        FLOAT: REAL_CASES,
        PROJECTED: PROJECTED_CASES,
    }.get(dtype, {})
    graph = builder.graph(builder.results((own.get(kind) or CASES[kind])(rng, builder)))
    if dtype == OWN_GRID:
        return on_own_grid(rng, graph)
    if kind in own:
        return graph
    if dtype in (RAW, "int32"):
        return in_uint8(rng, graph) if dtype == RAW else in_int32(rng, graph)
    if dtype in (FULL_RANGE, INT4):
        return with_full_range(rng, graph) if dtype == FULL_RANGE else with_four_bits(rng, graph)
    if dtype.endswith(SHORT_BIAS):
        return with_short_bias(rng, in_int16(rng, graph))
    if dtype.endswith(NARROW):
        return with_int8_constant(rng, in_int16(rng, graph))
    return in_int16(rng, graph) if dtype == "int16" else graph


def random_codes(rng: Random, graph: Graph) -> dict[str, np.ndarray]:
    """A batch of 1..4; half of the batches stay near the zero points, where little saturates."""
    batch, near = int(rng.integers(1, 5)), rng.integers(2)
    codes = {}
    for name in graph.inputs:
        tensor = graph.tensors[name]
        if tensor.dtype == FLOAT:
            codes[name] = real_inputs(rng, graph, (batch, *tensor.shape[1:]))
            continue
        lowest, highest = graph.limits(name)
        values = rng.integers(lowest, highest + 1, (batch, *tensor.shape[1:]))
        # A function of one operand: all of its inputs.
        if len(graph.inputs) == 1 and tensor.shape in ((1, 16, 16), (1, 256, 256)) and highest < 2**16:
            every = np.resize(np.arange(lowest, highest + 1), tensor.shape)
            codes[name] = every.astype(tensor.dtype)
            continue
        if near and tensor.dtype in CODE_RANGES:
            values = values // 8 + tensor.quantization.zero_point[0]
        elif near and highest == 2**31 - 1:  # integers without a grid
            values = values % 9 - 4
        codes[name] = np.clip(values, lowest, highest).astype(tensor.dtype)
    return codes


def real_inputs(rng: Random, graph: Graph, shape: tuple[int, ...]) -> np.ndarray:
    """Real numbers in and about the range of the graph's first result, one in four half way between two codes."""
    grid = graph.tensors[graph.operators[0].outputs[0]].quantization
    lowest, highest = CODE_RANGES[grid.dtype]
    steps = rng.uniform(1.2 * lowest - 5, 1.2 * highest + 5, shape) - grid.zero_point[0]
    steps = np.where(rng.integers(4, size=shape) == 0, np.floor(steps) + 0.5, steps)
    return (steps * grid.scale[0]).astype(np.float32)


def with_sigmoid(name: str = "sigmoid") -> Graph:
    """A convolution, a sigmoid of that name, which LiteRT and TFLite-Micro compute otherwise, and a dense layer."""
    rng = np.random.default_rng(0)
    builder = Builder()
    x = builder.input("x", (1, 9, 9, 3), per_tensor(0.02, 3))
    filter = rng.integers(-127, 128, (8, 3, 3, 3)).astype(np.int8)
    y = builder.conv_2d(x, filter, [0.01] * 8, rng.integers(-99, 99, 8), per_tensor(0.07, -5), name="y")
    y = builder.operator("LOGISTIC", [y], per_tensor(1 / 256, -128), name=name)
    y = builder.reshape(y, (1, 9 * 9 * 8), name="flat")
    weights = rng.integers(-127, 128, (40, 9 * 9 * 8)).astype(np.int8)
    y = builder.fully_connected(y, weights, [0.003] * 40, rng.integers(-99, 99, 40), per_tensor(0.05, 2), name="z")
    return builder.graph([y])
