# SPDX-License-Identifier: Apache-2.0
"""Islands of real numbers in others' files: what leaves a grid, and operators that only compute in float32.

Converters leave in float32 what they have no integers for. A graph computes it in NumPy: near what runtimes compute,
whose exponentials and order of sums are their own, so no equality is claimed. What the islands begin and end with,
DEQUANTIZE and QUANTIZE, is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from .arithmetic import Broadcasting, Tensors, divides_plainly, need_quotients
from .contexts import NetworkContext, OnnxWriter
from .file_forms import InOperand, Option
from .functions import FUNCTIONS
from .operator import (
    BOOL,
    FLOAT,
    REQUIRED,
    Attributes,
    Call,
    DeviceOperator,
    Fields,
    FileOperator,
    Operator,
    Shape,
    need,
    register,
)
from .profile import Profile
from .real import real_numbers
from .tensor import RAW, Tensor

ISLAND = "files: what converters leave in float32"


@register
class Dequantize(DeviceOperator):
    """Codes as the real numbers that they stand for."""

    kind = "DEQUANTIZE"
    as_in_onnx = True
    dtypes = ("int8", "int16")
    changes_dtype = True
    version = 2
    wide_version = 3
    options = "DequantizeOptions"
    purpose = ISLAND

    def dtype(self, attributes: Attributes, stored: str = "int8") -> str:
        return FLOAT

    def results(self, call: Call) -> np.ndarray:
        return real_numbers(call.codes[0], call.inputs[0])

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        source = writer.graph.tensors[operator.inputs[0]]
        writer.dequantize(f"{source.name}/codes", source.quantization, f"{output.name}/codes", source.name)
        writer.node("Identity", [f"{output.name}/codes"], output.name)


@register
class Cast(DeviceOperator):
    """The same numbers in another dtype: of conditions, of integers without a grid, or of real numbers, which are cut
    toward 0."""

    kind = "CAST"
    attributes = {"to": REQUIRED}
    dtypes = (BOOL, "int32", RAW)
    plain = ("int64",)
    changes_dtype = True
    floats = True
    options = "CastOptions"
    purpose = ISLAND

    def check_attributes(self, attributes: Attributes) -> None:
        super().check_attributes(attributes)
        allowed = (FLOAT, "int32", "int64", BOOL)
        need(attributes["to"] in allowed, f"to must be one of {', '.join(allowed)}, got {attributes['to']}")

    def dtype(self, attributes: Attributes, stored: str = "int8") -> str:
        return str(attributes["to"])

    def measured_as(self, inputs: Tensors, output: Tensor) -> str:
        wide = "int64" in (inputs[0].dtype, output.dtype)
        return f"{self.kind}:int64" if wide else super().measured_as(inputs, output)

    def results(self, call: Call) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return call.codes[0].astype(call.attributes["to"])

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Fields:
        types = (inputs[0].dtype, attributes["to"])
        names = ("inDataType", "outDataType")
        return {name: ("TensorType", dtype.upper()) for name, dtype in zip(names, types, strict=True)}

    def read_attributes(self, read: FileOperator) -> Attributes:
        return {"to": read.output.dtype}


class Floating(DeviceOperator):
    """An operator that is computed in float32 alone."""

    dtypes = ()
    floats = True
    purpose = ISLAND


class FloatUnary(Floating):
    """A function of one operand, value by value."""

    function: ClassVar[Callable[[np.ndarray], np.ndarray]]

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        # Networks have some of these under the same word.
        function = FUNCTIONS.get(self.kind.lower())
        need(function is not None and function.is_kind, f"no network has a step for {self.kind}")
        (shape,) = context.results(operator)
        context.give(operator, context.step(self.kind.lower(), context.operands(operator), shape))

    def float_results(self, call: Call) -> np.ndarray:
        return np.asarray(type(self).function(call.codes[0]), np.float32)


class FloatBinary(Broadcasting, Floating):
    """A function of two operands that broadcast, value by value."""

    operands = (2, 2)
    function: ClassVar[Callable[[np.ndarray, np.ndarray], np.ndarray]]

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        # Networks have one of these, as a function of the first operand.
        x, second = context.operands(operator)
        function, number = FUNCTIONS.get(self.kind.lower()), getattr(second, "number", None)
        need(function is not None and function.is_kind, f"no network has a step for {self.kind}")
        need(number is not None, "its second operand must be one number")
        assert function is not None
        (word,), (shape,) = function.attributes, context.results(operator)
        context.give(operator, context.step(function.name, [x], shape, **{word: number}))

    def float_results(self, call: Call) -> np.ndarray:
        return np.asarray(type(self).function(*call.codes), np.float32)


class Division(FloatBinary):
    """Of integers without a grid as well."""

    def may_end_the_process(self, inputs: Tensors, attributes: Attributes, profile: Profile) -> bool:
        return divides_plainly(inputs)

    def plain_integers(self, call: Call) -> np.ndarray:
        need_quotients(*call.codes)
        return np.asarray(type(self).function(*call.codes))


# Kind, what it computes, and the name of its options table.
UNARY: tuple[tuple[str, Callable[[np.ndarray], np.ndarray], str], ...] = (
    ("SQUARE", np.square, "SquareOptions"),
    ("SIN", np.sin, ""),
    ("COS", np.cos, "CosOptions"),
    ("SIGN", np.sign, "SignOptions"),
    ("FLOOR", np.floor, ""),
    ("CEIL", np.ceil, ""),
    ("ROUND", np.rint, ""),
)
BINARY: tuple[tuple[str, Callable[[np.ndarray, np.ndarray], np.ndarray], str], ...] = (
    ("ATAN2", np.arctan2, "ATan2Options"),
)
DIVISIONS: tuple[tuple[str, Callable[[np.ndarray, np.ndarray], np.ndarray], str], ...] = (
    ("FLOOR_DIV", np.floor_divide, "FloorDivOptions"),
    ("FLOOR_MOD", np.mod, "FloorModOptions"),
)
# The integers without a grid that they divide.
DIVIDED = {"FLOOR_DIV": ("int32",), "FLOOR_MOD": ("int32", "int64")}


def _declare_functions() -> None:
    for base, rows in ((FloatUnary, UNARY), (FloatBinary, BINARY), (Division, DIVISIONS)):
        for kind, function, options in rows:
            members = {"kind": kind, "function": staticmethod(function), "options": options, "__module__": __name__}
            members["plain"] = DIVIDED.get(kind, ())
            register(type(f"Float{kind.title().replace('_', '')}", (base,), members))


_declare_functions()


@register
class Power(FloatBinary):
    """The first operand to the power of the second. Of integers no more than 32 bits are defined, and no fractions."""

    kind = "POW"
    plain = ("int32",)
    options = "PowOptions"
    function: ClassVar[Callable[..., np.ndarray]] = staticmethod(np.power)

    def plain_integers(self, call: Call) -> np.ndarray:
        first, second = (code.astype(np.float64) for code in call.codes)
        need(bool(np.all(second >= 0)), f"a negative power of {call.output.dtype}, which LiteRT refuses")
        powers = np.power(first, second)
        need(bool(np.all(np.abs(powers) < 2.0**31)), "a power of more than 32 bits, which runtimes do not define")
        return powers.astype(call.output.dtype)


@register
class CumulativeSum(Floating):
    """Sums along `axis` up to each value, or `exclusive` of it; or from the other end, in `reverse`."""

    kind = "CUMSUM"
    attributes = {"axis": REQUIRED, "exclusive": False, "reverse": False}
    in_file = {
        "axis": InOperand(1, FileOperator.one_axis),
        "exclusive": Option("exclusive", bool),
        "reverse": Option("reverse", bool),
    }
    plain = ("int32", "int64")
    options = "CumsumOptions"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,), axis = shapes, attributes["axis"]
        need(1 <= axis < len(first), f"axis must be in 1..{len(first) - 1}, got {axis}")
        return first

    def float_results(self, call: Call) -> np.ndarray:
        axis = call.attributes["axis"]
        x = np.flip(call.codes[0], axis) if call.attributes["reverse"] else call.codes[0]
        sums = np.cumsum(x, axis, dtype=x.dtype)
        if call.attributes["exclusive"]:
            sums = sums - x
        return np.flip(sums, axis).copy() if call.attributes["reverse"] else sums

    plain_integers = float_results


@register
class AddN(Floating):
    """The sum of tensors of one shape."""

    kind = "ADD_N"
    operands = (1, None)
    constants = True
    plain = ("int32",)
    options = "AddNOptions"

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        first, *others = context.operands(operator)
        (shape,) = context.results(operator)
        for other in others:
            first = context.step("add", [first, other], shape)
        context.give(operator, first)

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        need(len(set(shapes)) == 1, f"operands must have one shape, got {list(shapes)}")
        return shapes[0]

    def float_results(self, call: Call) -> np.ndarray:
        return np.asarray(sum(call.codes[1:], call.codes[0]))

    plain_integers = float_results


@register
class LocalResponseNormalization(Floating):
    """x * (bias + alpha * the sum of squares of x within `radius` channels) ** -beta.

    LiteRT's reference kernel leaves out the last of these channels.
    """

    kind = "LOCAL_RESPONSE_NORMALIZATION"
    attributes = {"radius": REQUIRED, "bias": 1.0, "alpha": 1.0, "beta": 0.5}
    in_file = {name: Option(name) for name in attributes}
    options = "LocalResponseNormalizationOptions"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        need(len(shapes[0]) == 4, f"input must be rank 4, got {shapes[0]}")
        need(attributes["radius"] >= 0, f"radius must be 0 or more, got {attributes['radius']}")
        return shapes[0]

    def float_results(self, call: Call) -> np.ndarray:
        x, channels = call.codes[0], call.codes[0].shape[-1]
        after = call.attributes["radius"] if call.profile.optimized else call.attributes["radius"] - 1
        # Sums of all squares before each channel.
        sums = np.concatenate([np.zeros_like(x[..., :1]), np.cumsum(np.square(x), -1, dtype=np.float64)], -1)
        channel = np.arange(channels)
        first, end = (
            channel - call.attributes["radius"],
            np.maximum(channel + after + 1, channel - call.attributes["radius"]),
        )
        near = (sums[..., np.clip(end, 0, channels)] - sums[..., np.clip(first, 0, channels)]).astype(np.float32)
        whole = np.float32(call.attributes["bias"]) + np.float32(call.attributes["alpha"]) * near
        return np.asarray(x * np.power(whole, -np.float32(call.attributes["beta"])), np.float32)
