# SPDX-License-Identifier: Apache-2.0
"""What is timed: each operation, its operands for a layer, and the bytes and multiply-adds its declaration implies.

Operands are descriptions, not arrays: every contestant's process makes them for itself from the same recipe (`make`),
so nothing large travels and all compute with the same values. Nothing here imports a framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

# Numbers that repeat with this period; a prime, so that no channel sees the same ones again and again.
PERIOD = 4_194_301

Description = dict[str, Any]
Call = tuple[dict[str, Description], dict[str, Any]]  # operands by name, attributes


def values(shape: tuple[int, ...], seed: int, channels_first: bool = False) -> Description:
    """Numbers about 0, spread as a normalized activation. `shape` is NHWC; stored as NCHW if asked."""
    return {"kind": "values", "shape": list(shape), "seed": seed, "channels_first": channels_first}


def ramp(first: float, last: float, count: int | None) -> Description:
    """`count` numbers from first to last, or the first alone as a scalar."""
    return {"kind": "ramp", "shape": [] if count is None else [count], "first": first, "last": last}


def of_case(name: str, operand: str, shape: tuple[int, ...]) -> Description:
    """An operand of a case of tests/cases.py."""
    return {"kind": "case", "name": name, "operand": operand, "shape": list(shape)}


def stored_shape(description: Description) -> tuple[int, ...]:
    shape = description["shape"]
    return (shape[0], shape[3], shape[1], shape[2]) if description.get("channels_first") else tuple(shape)


@lru_cache(maxsize=4)
def _numbers(seed: int) -> np.ndarray:
    # Sums of PCG64's raw 16-bit pieces: the same on every machine and with every NumPy.
    pieces = np.random.PCG64(seed).random_raw(PERIOD).view(np.uint16).reshape(PERIOD, 4)
    return ((pieces.sum(1, dtype=np.int64) - 131070) * 2.0**-15 * 0.85).astype(np.float32)


def make(description: Description) -> np.ndarray:
    """The array of a description."""
    shape = tuple(description["shape"])
    if description["kind"] == "ramp":
        first, last = description["first"], description["last"]
        return np.array(first, np.float32) if not shape else np.linspace(first, last, shape[0], dtype=np.float32)
    if description["kind"] == "case":
        from cases import cases, family_of  # of tests/

        family = family_of(description["name"].partition("/")[0])
        case = next(case for case in cases(family) if case.name == description["name"])
        return np.array(case.operands[description["operand"]])
    array = np.resize(_numbers(description["seed"]), shape)
    return np.ascontiguousarray(array.transpose(0, 3, 1, 2)) if description["channels_first"] else array


class Operation(NamedTuple):
    """One operation. `calls` makes its call for a layer, a batch and one of `formats`."""

    key: str
    title: str
    raw: str
    group: str  # what its goals are: "whole tensor", "per channel", "batch norm" or "depthwise"
    formats: tuple[str, ...]
    call: Callable[[Any, int, str], Call]
    like: Mapping[str, Any]  # attributes by which its test cases are found


def _images(layer: Any, batch: int) -> tuple[int, ...]:
    return (batch, *layer.size)


QUANTIZATION = {"num_bits": 8, "narrow_range": False}


def _args(layer: Any, batch: int, data_format: str) -> Call:
    return {"inputs": values(_images(layer, batch), 1)}, {"min": -1.5, "max": 2.0, **QUANTIZATION}


def _range(channels: int | None, prefix: str = "") -> dict[str, Description]:
    return {f"{prefix}min": ramp(-1.5, -0.5, channels), f"{prefix}max": ramp(2.0, 1.0, channels)}


def _vars(layer: Any, batch: int, data_format: str) -> Call:
    return {"inputs": values(_images(layer, batch), 1), **_range(None)}, dict(QUANTIZATION)


def _per_channel(layer: Any, batch: int, data_format: str) -> Call:
    return {"inputs": values(_images(layer, batch), 1), **_range(layer.size[2])}, dict(QUANTIZATION)


def _with_gradient(forward: Callable[[Any, int, str], Call]) -> Callable[[Any, int, str], Call]:
    def call(layer: Any, batch: int, data_format: str) -> Call:
        operands, attributes = forward(layer, batch, data_format)
        return {"gradients": values(_images(layer, batch), 2), **operands}, attributes

    return call


def _dequantize(range_given: bool, axis: int) -> Callable[[Any, int, str], Call]:
    def call(layer: Any, batch: int, data_format: str) -> Call:
        bounds = _range(None, "input_")  # TensorFlow takes no vectors: with an axis the ranges come from the data
        attributes = {"signed_input": True, "num_bits": 8, "range_given": range_given, "round_mode": "HALF_TO_EVEN"}
        attributes |= {"narrow_range": False, "axis": axis}
        return {"input": values(_images(layer, batch), 1), **bounds}, attributes

    return call


def _dequantize_gradient(layer: Any, batch: int, data_format: str) -> Call:
    images = _images(layer, batch)
    return {"gradients": values(images, 2), "input": values(images, 1), **_range(None, "input_")}, {"axis": -1}


def _batch_norm(layer: Any, batch: int, data_format: str) -> Call:
    first, channels = data_format == "NCHW", layer.size[2]
    vectors = {"scale": ramp(0.5, 1.5, channels), "offset": ramp(-1.0, 1.0, channels)}
    nothing = {"mean": ramp(0.0, 0.0, 0), "variance": ramp(0.0, 0.0, 0)}
    attributes = {"epsilon": 0.001, "exponential_avg_factor": 1.0, "data_format": data_format, "is_training": True}
    return {"x": values(_images(layer, batch), 1, first), **vectors, **nothing}, attributes


def _batch_norm_gradient(layer: Any, batch: int, data_format: str) -> Call:
    first, channels = data_format == "NCHW", layer.size[2]
    operands = {
        "y_backprop": values(_images(layer, batch), 2, first),
        "x": values(_images(layer, batch), 1, first),
        "scale": ramp(0.5, 1.5, channels),
        "reserve_space_1": ramp(0.0, 0.0, channels),
        "reserve_space_2": ramp(1.0, 1.0, channels),
        "reserve_space_3": ramp(0.0, 0.0, 0),
    }
    return operands, {"epsilon": 0.001, "data_format": data_format, "is_training": True}


def _depthwise(operation: str) -> Callable[[Any, int, str], Call]:
    def call(layer: Any, batch: int, data_format: str) -> Call:
        first, (height, width, channels) = data_format == "NCHW", layer.size
        images, filter = (batch, height, width, channels), (*layer.kernel, channels, 1)
        output = (batch, -(-height // layer.stride), -(-width // layer.stride), channels)
        steps = (1, 1, layer.stride, layer.stride) if first else (1, layer.stride, layer.stride, 1)
        attributes: dict[str, Any] = {"strides": list(steps), "padding": "SAME", "data_format": data_format}
        operands = {
            "input": values(images, 1, first),
            "filter": values(filter, 3),
            "out_backprop": values(output, 2, first),
        }
        if operation == "forward":
            del operands["out_backprop"]
        elif operation == "input":
            attributes["input_sizes"] = list(stored_shape(operands.pop("input")))
        else:
            attributes["filter_sizes"] = list(stored_shape(operands.pop("filter")))
        return operands, attributes

    return call


_LAYOUTS = ("NHWC", "NCHW")
_ANY = ("",)
_GIVEN, _FROM_DATA = {"range_given": True, "axis": -1}, {"range_given": False, "axis": -1}
OPERATIONS = [
    Operation("args", "fake quant, fixed range", "FakeQuantWithMinMaxArgs", "whole tensor", _ANY, _args, {}),
    Operation("args_gradient", "fake quant, fixed range, gradient", "FakeQuantWithMinMaxArgsGradient", "whole tensor",
              _ANY, _with_gradient(_args), {}),
    Operation("vars", "fake quant, one range", "FakeQuantWithMinMaxVars", "whole tensor", _ANY, _vars, {}),
    Operation("vars_gradient", "fake quant, one range, gradient", "FakeQuantWithMinMaxVarsGradient", "whole tensor",
              _ANY, _with_gradient(_vars), {}),
    Operation("per_channel", "fake quant, per channel", "FakeQuantWithMinMaxVarsPerChannel", "per channel", _ANY,
              _per_channel, {}),
    Operation("per_channel_gradient", "fake quant, per channel, gradient", "FakeQuantWithMinMaxVarsPerChannelGradient",
              "per channel", _ANY, _with_gradient(_per_channel), {}),
    Operation("dequantize", "quantize and dequantize, range given", "QuantizeAndDequantizeV2", "whole tensor", _ANY,
              _dequantize(True, -1), _GIVEN),
    Operation("dequantize_from_data", "quantize and dequantize, range from data", "QuantizeAndDequantizeV2",
              "whole tensor", _ANY, _dequantize(False, -1), _FROM_DATA),
    Operation("dequantize_axis", "quantize and dequantize, range per channel", "QuantizeAndDequantizeV2", "per channel",
              _ANY, _dequantize(False, 3), {"range_given": False, "axis": 1}),
    Operation("dequantize_gradient", "quantize and dequantize, gradient", "QuantizeAndDequantizeV4Grad", "whole tensor",
              _ANY, _dequantize_gradient, {"axis": -1}),
    Operation("batch_norm", "batch norm, training", "FusedBatchNormV3", "batch norm", _LAYOUTS, _batch_norm,
              {"is_training": True}),
    Operation("batch_norm_gradient", "batch norm, training, gradient", "FusedBatchNormGradV3", "batch norm", _LAYOUTS,
              _batch_norm_gradient, {"is_training": True}),
    Operation("depthwise", "depthwise", "DepthwiseConv2dNative", "depthwise", _LAYOUTS, _depthwise("forward"), {}),
    Operation("depthwise_input", "depthwise, gradient of input", "DepthwiseConv2dNativeBackpropInput", "depthwise",
              _LAYOUTS, _depthwise("input"), {}),
    Operation("depthwise_filter", "depthwise, gradient of filter", "DepthwiseConv2dNativeBackpropFilter", "depthwise",
              _LAYOUTS, _depthwise("filter"), {}),
]  # fmt: skip
BY_KEY = {operation.key: operation for operation in OPERATIONS}


class Work(NamedTuple):
    """What a call must do, by its declaration: bytes of operands and results, and multiply-adds that meet the image."""

    bytes: int
    multiply_adds: int


SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def lowered(raw: str, operands: dict[str, Description], attributes: dict[str, Any], dtype: str = "float32") -> Any:
    """The specifications of a call's operands and its checked declaration."""
    from exactqat.operators import OPERATORS
    from exactqat.operators.declarations.specification import TensorSpec

    declared = next(op for op in OPERATORS.values() if op.raw_name == raw)
    specs = {name: TensorSpec(stored_shape(description), dtype) for name, description in operands.items()}
    # Any number will do in the places of operands.
    _, checked = declared.bind((), {**dict.fromkeys(specs, 0.0), **attributes})
    arrays = [specs[name] for name in declared.operands]
    return arrays, declared.lower(tuple(arrays), tuple(checked.items()))


def work(raw: str, operands: dict[str, Description], attributes: dict[str, Any]) -> Work:
    """From the declaration alone."""
    specs, plan = lowered(raw, operands, attributes)
    moved = sum(spec.size * SIZES[spec.dtype] for spec in (*specs, *plan.results))
    return Work(moved, _multiply_adds(plan.numbers) if "filter_height" in plan.numbers else 0)


def _multiply_adds(numbers: Mapping[str, Any]) -> int:
    """Taps on the padding are skipped, so they do not count."""

    def met(side: str, before: str, name: str) -> int:
        size, positions = numbers[f"input_{side}"], numbers[f"output_{side}"]
        stride, dilation = numbers[f"stride_{name}"], numbers[f"dilation_{name}"]
        starts = [position * stride - numbers[before] for position in range(positions)]
        return sum(0 <= start + tap * dilation < size for start in starts for tap in range(numbers[f"filter_{side}"]))

    channels = numbers["channels"] * numbers["multiplier"]
    return numbers["batch"] * channels * met("height", "pad_top", "height") * met("width", "pad_left", "width")


def of_largest_case(operation: Operation) -> tuple[str, Call] | None:
    """The name and the call of the operation's largest ordinary case of tests/cases.py."""
    from cases import cases

    ordinary = [
        case
        for case in cases(operation.raw, without=("edge", "empty", "float64", "beyond_tensorflow", "eigen", "onednn"))
        if all(case.attributes.get(key) == value for key, value in operation.like.items())
    ]
    if not ordinary:
        return None
    case = max(ordinary, key=lambda case: math.fsum(a.nbytes for a in case.operands.values()))
    operands = {name: of_case(case.name, name, array.shape) for name, array in case.operands.items()}
    return case.name.partition("/")[2], (operands, dict(case.attributes))
