# SPDX-License-Identifier: Apache-2.0
"""Functions of one value: sigmoid, tanh, the ReLUs, and any other as a table of 256 codes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from . import as_onnx, interpolated
from . import fixed_point_functions as fixed
from .arithmetic import (
    Tensors,
    broadcast_shape,
    centered,
    finish,
    fixed_point,
    multiply_fixed_point,
    round_half_away,
    rounding_shift,
    scale_of,
    scales_for,
    zero_point_of,
)
from .contexts import NetworkContext, OnnxWriter, PlanContext
from .file_forms import Option
from .functions import FUNCTIONS, TINY, off_the_pole
from .operator import (
    OPERATORS,
    REQUIRED,
    Attributes,
    Call,
    DeviceOperator,
    FileOperator,
    FileStep,
    Operator,
    Refusal,
    ScaleLimits,
    Shape,
    are_steps,
    need,
    register,
)
from .primitives import NUMPY, A, RealPrimitives, ResultGrid
from .profile import ONNXRUNTIME_X86, REFERENCE, Profile
from .stated_arithmetic import Arithmetic
from .tensor import INDICES, INT8_MAX, INT8_MIN, INT16_MAX, INT16_MIN, Tensor, code_range, dequantize, quantize

CODES = np.arange(INT8_MIN, INT8_MAX + 1).astype(np.int8)


class Unary(DeviceOperator):
    """One operand, value by value: what there is to know of it are the results of 256 codes."""

    pointwise = True

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return FUNCTIONS[self.float_kind](primitives, operands[0])

    def of_codes(
        self, codes: np.ndarray, source: Tensor, output: Tensor, attributes: Attributes, profile: Profile
    ) -> np.ndarray:
        """The results of int64 codes, before they saturate, where int8 and int16 are computed alike."""
        raise NotImplementedError(f"{self.kind} has no results of codes")

    def table(self, source: Tensor, output: Tensor, attributes: Attributes, profile: Profile) -> np.ndarray:
        """The results of the codes -128..127, in this order; int8 or wider."""
        return within_int8(self.of_codes(CODES.astype(np.int64), source, output, attributes, profile))

    def stated(self, call: Call, arithmetic: Arithmetic) -> np.ndarray | None:
        """By a table of the function itself."""
        if not arithmetic.table_segments or ("table",) not in self.asks:
            return None
        source, output = call.inputs[0], call.output
        (lowest, highest), (low, high) = code_range(source), code_range(output)
        width = (highest - lowest + 1) // min(arithmetic.table_segments, highest - lowest + 1)
        steps = np.arange(lowest, highest + 2, width) - zero_point_of(source)
        if arithmetic.table_end == "held":
            steps[-1] = steps[-2]
        with np.errstate(all="ignore"):
            x = steps * float(arithmetic.scale(scale_of(source)))
            real = np.asarray(self.real(NUMPY, [x], call.attributes)) / float(arithmetic.scale(scale_of(output)))
        entries = round_half_away(np.clip(real, -(2.0**20), 2.0**20)) + zero_point_of(output)
        entries = np.clip(entries, low, high).astype(np.int64)
        codes = arithmetic.look_up(call.codes[0].astype(np.int64), entries, lowest, width)
        return np.clip(codes, low, high).astype(output.dtype)

    def integers(self, call: Call) -> np.ndarray:
        compute = self.onnx_table if call.profile.rounds_as_onnx else self.table
        table = compute(call.inputs[0], call.output, call.attributes, call.profile)
        return table.astype(np.int8)[call.codes[0].astype(np.intp) - INT8_MIN]

    def onnx_table(self, source: Tensor, output: Tensor, attributes: Attributes, profile: Profile) -> np.ndarray:
        """Likewise of onnxruntime; by default the same one."""
        return self.table(source, output, attributes, profile)

    def wide_integers(self, call: Call) -> np.ndarray:
        results = self.wide_results(call.codes[0].astype(np.int64), call)
        return np.clip(results, INT16_MIN, INT16_MAX).astype(np.int16)

    def wide_results(self, codes: np.ndarray, call: Call) -> np.ndarray:
        """The results of int16 codes, given as int64, before they saturate. call: what they belong to."""
        return self.of_codes(codes, call.inputs[0], call.output, call.attributes, call.profile)


def within_int8(codes: np.ndarray) -> np.ndarray:
    """Saturated."""
    return np.clip(codes, INT8_MIN, INT8_MAX).astype(np.int8)


def onnx_lookup(writer: OnnxWriter, operator: Operator, output: Tensor, table: np.ndarray) -> None:
    """A table of all codes in ONNX: exact, because nothing in it is rounded."""
    name = output.name
    kind = {"to": writer.onnx.TensorProto.INT32}
    indices = writer.node("Cast", [f"{operator.inputs[0]}/codes"], f"{name}/cast", **kind)
    if output.dtype != "int8":  # whose codes begin at 0 in the file
        shift = writer.constant(f"table_shift_{output.dtype}", np.int32(len(table) // 2))
        indices = writer.node("Add", [indices, shift], f"{name}/indices")
    constant = writer.constant(f"{name}/table", writer.as_stored(table.astype(output.dtype)))
    codes = writer.node("Gather", [constant, indices], f"{name}/codes", axis=0)
    writer.dequantize(codes, output.quantization, name)


# --- tables that the runtimes make of a function ---------------------------------------------------------------------


class Tabulated(Unary):
    """LiteRT evaluates the function in float32 for all 256 codes before the first image and looks results up; of int16
    for every 128th code, with straight lines in between."""

    version = 2
    asks = (("table",),)
    # XNNPACK has a kernel of its own, which rounds to even after it has added the zero point.
    delegated: ClassVar[bool] = False

    def function(self, x: np.ndarray, output: Tensor, attributes: Attributes, profile: Profile) -> np.ndarray:
        """float32 to float32, as the kernel computes it."""
        raise NotImplementedError

    def table(self, source: Tensor, output: Tensor, attributes: Attributes, profile: Profile) -> np.ndarray:
        x = dequantize(CODES, source.quantization)
        with np.errstate(over="ignore"):
            real = self.function(x, output, attributes, profile)
        return self.stored(real, output, profile)

    def stored(self, real: np.ndarray, output: Tensor, profile: Profile) -> np.ndarray:
        """Codes of what `function` gives."""
        with np.errstate(over="ignore"):
            steps = real.astype(np.float32) * (np.float32(1) / scale_of(output))
        zero_point = zero_point_of(output)
        if self.delegated and profile.delegates:
            return within_int8(np.rint(steps + np.float32(zero_point)))
        return within_int8(round_half_away(steps.astype(np.float64)) + zero_point)

    def stated(self, call: Call, arithmetic: Arithmetic) -> np.ndarray | None:
        if call.output.dtype == "int16" and arithmetic.table_values == "balanced":
            return self.between_entries(call.codes[0].astype(np.int64), call, arithmetic).astype(np.int16)
        return super().stated(call, arithmetic)

    def wide_results(self, codes: np.ndarray, call: Call) -> np.ndarray:
        return self.between_entries(codes, call, Arithmetic())

    def between_entries(self, codes: np.ndarray, call: Call, arithmetic: Arithmetic) -> np.ndarray:
        def function(x: np.ndarray) -> np.ndarray:
            return self.function(x, call.output, call.attributes, call.profile)

        scale, result = (np.float32(arithmetic.scale(scale_of(tensor))) for tensor in (call.inputs[0], call.output))
        return interpolated.look_up(codes, interpolated.interpolation_table(function, scale, result))

    def onnx_steps(self, source: Tensor, output: Tensor, attributes: Attributes) -> tuple[np.ndarray, np.ndarray]:
        """Of all codes the results in float64 steps of the grid, and by how much onnxruntime's may differ."""
        x = dequantize(CODES, source.quantization).astype(np.float64)
        with np.errstate(over="ignore"):
            real = np.asarray(self.real(NUMPY, [x], attributes))
        scale = float(scale_of(output))
        return real / scale, as_onnx.DOUBT * self.onnx_magnitude(x, real) / scale

    def onnx_magnitude(self, x: np.ndarray, real: np.ndarray) -> np.ndarray:
        """What the last bits of a result in float32 belong to."""
        return np.maximum(np.abs(real), 1.0)

    def onnx_table(self, source: Tensor, output: Tensor, attributes: Attributes, profile: Profile) -> np.ndarray:
        if type(self).onnx is DeviceOperator.onnx:
            return self.table(source, output, attributes, profile)
        steps, _ = self.onnx_steps(source, output, attributes)
        return within_int8(np.rint(steps) + zero_point_of(output))

    def onnx_function(self, writer: OnnxWriter, operator: Operator, output: Tensor, kind: str, **words: object) -> None:
        """The function where all codes are sure, else a table."""
        source = writer.graph.tensors[operator.inputs[0]]
        if output.dtype == "int8" and not as_onnx.is_settled(*self.onnx_steps(source, output, operator.attributes)):
            table = self.onnx_table(source, output, operator.attributes, ONNXRUNTIME_X86)
            onnx_lookup(writer, operator, output, table)
            return
        writer.computed(operator, output, kind, writer.operands(operator), **words)


class OfTheLibrary(Tabulated):
    """LiteRT asks the C library, and the last bits of its float32 functions are its own affair.

    Where a code would depend on them, in about one table of 400, the file holds the table itself.

    Attributes:
        last_bits: how many units in the last place libraries may be off; glibc's erfc up to 3, its tanh 2, its exp 1.
    """

    dtypes = ("int8", "int16")
    last_bits: ClassVar[int] = 3

    def planned_in(self, dtype: str) -> bool:
        return dtype == "int8"  # a table of all codes is nearer to the function than straight lines

    def library(self, x: np.ndarray, attributes: Attributes) -> np.ndarray:
        """What the library is asked for: its results in float32, those of float64 rounded."""
        raise NotImplementedError

    def around(self, x: np.ndarray, values: np.ndarray, attributes: Attributes) -> np.ndarray:
        """The function from what the library gives."""
        raise NotImplementedError

    def function(self, x: np.ndarray, output: Tensor, attributes: Attributes, profile: Profile) -> np.ndarray:
        return self.around(x, self.library(x, attributes), attributes)

    def is_settled(self, source: Tensor, output: Tensor, attributes: Attributes) -> bool:
        """Whether all libraries give the same codes."""
        x = dequantize(CODES, source.quantization)
        with np.errstate(over="ignore", invalid="ignore"):
            values = self.library(x, attributes)
            ends = [values + np.spacing(values) * np.float32(bits) for bits in (-self.last_bits, self.last_bits)]
            low, high = (self.stored(self.around(x, end, attributes), output, REFERENCE) for end in ends)
        return np.array_equal(low, high)

    def tflite_steps(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Sequence[FileStep]:
        if output.dtype == "int16" or self.is_settled(inputs[0], output, attributes):
            return super().tflite_steps(inputs, output, attributes)
        return looked_up(self.table(inputs[0], output, attributes, REFERENCE), output)


def rounded(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """A float32 function of the C library, whose results are the float64 ones rounded, or next to them."""
    with np.errstate(over="ignore", divide="ignore"):
        return function(x.astype(np.float64)).astype(np.float32)


def looked_up(codes: np.ndarray, output: Tensor) -> tuple[FileStep, ...]:
    """A table in the file, as all runtimes take it: CAST, ADD and GATHER."""
    # GATHER takes no int8 indices; MICRO's CAST takes no uint8, and its GATHER no int16.
    types = {"inDataType": ("TensorType", output.dtype.upper()), "outDataType": ("TensorType", "INT32")}
    shift = Tensor("shift", (), "int32", INDICES, np.array(-code_range(output)[0], np.int32))
    table = Tensor("table", codes.shape, output.dtype, output.quantization, codes)
    version = 2 if output.dtype == "int8" else 4
    return (
        FileStep("CAST", (0,), 1, "CastOptions", types, "cast", "int32"),
        FileStep("ADD", ("cast", shift), 1, "AddOptions", {}, "indices", "int32"),
        FileStep("GATHER", (table, "indices"), version, "GatherOptions", {"axis": 0}),
    )


erfc = np.vectorize(math.erfc, otypes=[np.float64])

# Input scales of LOGISTIC and TANH at which the kernels' fixed point holds: TFLite-Micro's 31 bits of an int8 code, and
# for int16 the products of codes with 3 * 2**12 times the scale, which int32 has to hold.
SCALES_OF_CURVES = {
    "int8": ScaleLimits("operand", 2.0**-28, 2.0**34),
    "int16": ScaleLimits("operand", 2.0**-40, 2.0**4 / 3),
}


class OnFixedGrid(Tabulated):
    """A function whose grid the device fixes.

    Attributes:
        in_fixed_point: TFLite-Micro's, of a fixed-point number and its integer bits.
        in_lines: of int16 codes, their scale and the profile.
    """

    floats = True
    fixed_grid: ClassVar[tuple[float, int]]
    delegated = True
    dtypes = ("int8", "int16")
    wide_version = 3
    onnx_kind: ClassVar[str]
    in_fixed_point: ClassVar[staticmethod[[np.ndarray, int], np.ndarray]]
    in_lines: ClassVar[staticmethod[[np.ndarray, np.floating, Profile], np.ndarray]]

    def scale_limits(self, dtypes: Sequence[str], attributes: Attributes) -> ScaleLimits:
        return SCALES_OF_CURVES[dtypes[0]]

    def table(self, source: Tensor, output: Tensor, attributes: Attributes, profile: Profile) -> np.ndarray:
        if not profile.fixed_point_functions:
            return super().table(source, output, attributes, profile)
        scale, zero_point = self.fixed_grid
        return micro_table(source, type(self).in_fixed_point, round(-math.log2(scale)), zero_point)

    def wide_results(self, codes: np.ndarray, call: Call) -> np.ndarray:
        return type(self).in_lines(codes, scale_of(call.inputs[0]), call.profile)

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        self.onnx_function(writer, operator, output, self.onnx_kind)


@register
class Logistic(OnFixedGrid):
    """1 / (1 + exp(-x))."""

    kind = "LOGISTIC"
    float_kind = "sigmoid"
    fixed_grid = (1 / 256, -128)
    onnx_kind = "Sigmoid"
    in_fixed_point = staticmethod(fixed.logistic)
    in_lines = staticmethod(interpolated.logistic)

    def function(self, x: np.ndarray, output: Tensor, attributes: Attributes, profile: Profile) -> np.ndarray:
        power = rounded(np.exp, -x)
        if profile.delegates:  # in float64, rounded at the end
            with np.errstate(over="ignore"):
                return 1 / (1 + np.exp(-x.astype(np.float64)))
        return np.float32(1) / (np.float32(1) + power)


@register
class Tanh(OnFixedGrid):
    """The hyperbolic tangent."""

    kind = "TANH"
    float_kind = "tanh"
    fixed_grid = (1 / 128, 0)
    onnx_kind = "Tanh"
    in_fixed_point = staticmethod(fixed.tanh)
    in_lines = staticmethod(interpolated.tanh)

    def function(self, x: np.ndarray, output: Tensor, attributes: Attributes, profile: Profile) -> np.ndarray:
        return rounded(np.tanh, x)


def micro_table(
    source: Tensor, function: Callable[[np.ndarray, int], np.ndarray], fractional_bits: int, zero_point: int
) -> np.ndarray:
    """TFLite-Micro's LOGISTIC and TANH: in fixed point with four integer bits, inputs beyond them saturate."""
    fraction, exponent = np.frexp(float(scale_of(source)) * 2**27)
    significand, exponent = int(round_half_away(fraction * 2.0**31)), int(exponent)
    radius = math.floor(15 * 2**27 / 2.0**exponent)
    steps = centered(CODES, source)
    low, high = steps <= -radius, steps >= radius
    x = multiply_fixed_point(np.where(low | high, 0, steps), significand, exponent)
    codes = rounding_shift(function(x, 4), 31 - fractional_bits) + zero_point
    return within_int8(np.where(low, INT8_MIN, np.where(high, INT8_MAX, codes)))


@register
class Gelu(OfTheLibrary):
    """x times the normal distribution function of x, or the approximation of it by a tanh."""

    kind = "GELU"
    float_kind = "gelu"
    floats = True
    attributes = {"approximate": False}
    in_file = {"approximate": Option("approximate", bool)}
    options = "GeluOptions"

    def float_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        return {"approximate": "tanh" if attributes["approximate"] else "none"}

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return FUNCTIONS["gelu"](primitives, operands[0], attributes.get("approximate", False))

    def library(self, x: np.ndarray, attributes: Attributes) -> np.ndarray:
        if not attributes["approximate"]:
            return rounded(erfc, x * np.float32(-math.sqrt(0.5)))
        return rounded(np.tanh, np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x))

    def around(self, x: np.ndarray, values: np.ndarray, attributes: Attributes) -> np.ndarray:
        return np.float32(0.5) * x * (np.float32(1) + values if attributes["approximate"] else values)

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        words = {"approximate": "tanh" if operator.attributes["approximate"] else "none"}
        self.onnx_function(writer, operator, output, "Gelu", **words)

    def onnx_magnitude(self, x: np.ndarray, real: np.ndarray) -> np.ndarray:
        return np.abs(x)


@register
class Exp(OfTheLibrary):
    """The exponential."""

    kind = "EXP"
    float_kind = "exp"
    floats = True
    options = "ExpOptions"

    def library(self, x: np.ndarray, attributes: Attributes) -> np.ndarray:
        return rounded(np.exp, x)

    def around(self, x: np.ndarray, values: np.ndarray, attributes: Attributes) -> np.ndarray:
        return values

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        self.onnx_function(writer, operator, output, "Exp")

    def onnx_magnitude(self, x: np.ndarray, real: np.ndarray) -> np.ndarray:
        return np.abs(real)


# --- tables of our own -----------------------------------------------------------------------------------------------


@register
class TableOfCodes(Unary):
    """Any function of one operand: the results of all codes stand in the file, so that device and training round alike.

    In the file it is CAST, ADD and GATHER, the only way that all runtimes take; TensorFlow Lite has no word for it.
    `function` is a name of `FUNCTIONS`, `parameters` its further arguments.
    """

    kind = "TABLE"
    dtypes = ("int8", "int16")
    attributes = {"function": REQUIRED, "parameters": ()}
    uses_operand_scale = True

    def check_attributes(self, attributes: Attributes) -> None:
        super().check_attributes(attributes)
        known = attributes["function"] in FUNCTIONS
        need(known, f"function must be one of {', '.join(FUNCTIONS)}, got {attributes['function']!r}")
        try:
            with np.errstate(all="ignore"):
                FUNCTIONS[attributes["function"]](NUMPY, np.ones(1), *attributes["parameters"])
        except (TypeError, ValueError, LookupError):
            message = f"parameters do not fit the function {attributes['function']!r}: {attributes['parameters']}"
            raise Refusal(message) from None

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        """attributes: also `operand_scale`, where training knows it."""
        (x,), function, parameters = operands, attributes["function"], attributes.get("parameters", ())
        scale = attributes.get("operand_scale")
        x = off_the_pole(primitives, x, TINY if scale is None else scale * 0.5, function, parameters)
        return FUNCTIONS[function](primitives, x, *parameters)

    def table(self, source: Tensor, output: Tensor, attributes: Attributes, profile: Profile) -> np.ndarray:
        codes = np.arange(code_range(source)[0], code_range(source)[1] + 1)
        x = dequantize(codes, source.quantization).astype(np.float64)
        with np.errstate(over="ignore"):
            scaled = {**attributes, "operand_scale": float(scale_of(source))}
            return quantize(self.real(NUMPY, [x], scaled), output.quantization)

    def wide_results(self, codes: np.ndarray, call: Call) -> np.ndarray:
        return self.table(call.inputs[0], call.output, call.attributes, call.profile)[codes - INT16_MIN]

    def tflite_steps(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Sequence[FileStep]:
        return looked_up(self.table(inputs[0], output, attributes, REFERENCE), output)

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        source = writer.graph.tensors[operator.inputs[0]]
        onnx_lookup(writer, operator, output, self.table(source, output, operator.attributes, REFERENCE))


def on_any_grid(kind: str) -> tuple[str, Attributes] | None:
    """The operator, and its attributes, that looks up what one of a fixed grid computes; None: there is none."""
    declaration = OPERATORS[kind]
    fits = declaration.fixed_grid is not None and declaration.float_kind in FUNCTIONS
    return (TableOfCodes.kind, {"function": declaration.float_kind, "parameters": ()}) if fits else None


@register
class Lookup(Unary):
    """A table that a file holds, whatever function it was made of: the results of all codes, the lowest one's first.

    Training takes the slope of the function whose table on these grids has the same codes, if one of `FUNCTIONS` has
    without further parameters. Of any other table it is the difference between a 256th of all codes above and below, in
    int8 between the neighbours of a code: fewer codes of int16 would show rounding more than slope, and differences add
    up to what the table rises. A jump of the function, which is none of its slope, is one there.
    """

    kind = "LOOKUP"
    purpose = "files: what a table of one was made of is not in it"
    dtypes = ("int8", "int16")
    attributes = {"codes": REQUIRED}
    other_forms = (("CAST", "ADD", "GATHER"),)

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        """attributes: also `grids`, (scale, zero point) of the operand and of the result: those of the file."""
        (x,), ((step, zero_point), (scale, zero)) = operands, attributes["grids"]
        codes = np.asarray(attributes["codes"], np.int64)
        values = (codes - zero).astype(np.float32) * np.float32(scale)
        lowest, at, reach = -(codes.size // 2), np.arange(codes.size), codes.size // 256
        before, after = np.maximum(at - reach, 0), np.minimum(at + reach, codes.size - 1)
        slopes = (values[after] - values[before]) / (after - before).astype(np.float32)
        index = primitives.round(primitives.stop_gradient(x) / step) + float(zero_point - lowest)
        index = primitives.clip(index, 0.0, float(codes.size - 1))
        result, slope = (
            primitives.sum(primitives.embedding(index, primitives.array(table[:, None], x)), [-1])
            for table in (values, slopes / np.float32(step))
        )
        return primitives.straight_through(result, x * primitives.stop_gradient(slope))

    def restore(self, context: PlanContext, operator: Operator) -> None:
        (source,), (output,) = context.tensors(operator)
        name = self.made_of(source, output, operator.attributes)
        if name:
            context.step(operator, {"function": name}, kind=TableOfCodes.kind)
            return
        grids = tuple((float(scale_of(tensor)), zero_point_of(tensor)) for tensor in (source, output))
        context.step(operator, {**operator.attributes, "grids": grids})

    def made_of(self, source: Tensor, output: Tensor, attributes: Attributes) -> str:
        """The first function of `FUNCTIONS` whose table this is, of those that need no parameters; "": none."""
        declaration = OPERATORS[TableOfCodes.kind]
        assert isinstance(declaration, TableOfCodes)
        for name in FUNCTIONS:
            try:
                with np.errstate(all="ignore"):
                    candidate = {"function": name, "parameters": ()}
                    codes = declaration.table(source, output, candidate, REFERENCE)
            except (TypeError, LookupError):  # it needs some
                continue
            if np.array_equal(codes, attributes["codes"]):
                return name
        return ""

    def check(self, inputs: Sequence[Tensor], output: Tensor, attributes: Attributes) -> None:
        lowest, highest = code_range(output)
        codes = np.asarray(attributes["codes"])
        fits = codes.shape == (highest - lowest + 1,) and codes.min() >= lowest and codes.max() <= highest
        need(bool(fits), f"codes must be {highest - lowest + 1} integers in {lowest}..{highest}")

    def table(self, source: Tensor, output: Tensor, attributes: Attributes, profile: Profile) -> np.ndarray:
        return np.asarray(attributes["codes"])

    def wide_results(self, codes: np.ndarray, call: Call) -> np.ndarray:
        return np.asarray(call.attributes["codes"])[codes - INT16_MIN]

    def tflite_steps(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Sequence[FileStep]:
        return looked_up(np.asarray(attributes["codes"], output.dtype), output)

    def read_steps(self, steps: Sequence[FileOperator]) -> tuple[tuple[Tensor, ...], Attributes] | None:
        cast, _, gather = steps
        source, output, table = cast.operand(0), gather.output, gather.operand(0)
        if source.dtype not in self.dtypes or source.dtype != output.dtype or table.data is None:
            return None
        if table.dtype != output.dtype or not table.quantization.equals(output.quantization):
            return None
        written = looked_up(table.data, output)
        return ((source,), {"codes": tuple(table.data.tolist())}) if are_steps(steps, written) else None

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        onnx_lookup(writer, operator, output, np.asarray(operator.attributes["codes"], output.dtype))


# --- pieces of straight lines ----------------------------------------------------------------------------------------


def rescaled(steps: np.ndarray, factor: object) -> np.ndarray:
    """Times a real factor in Q31: how LiteRT's built-in kernels go from one grid to another."""
    return multiply_fixed_point(steps, *fixed_point(factor))


def ratio_of(source: Tensor, output: Tensor, profile: Profile, factor: float | np.floating = 1.0) -> float:
    """Input scale * factor / output scale, as a device's own kernels form it."""
    scale, result = scales_for(profile, source, output)
    return float(scale * profile.multiplier_dtype(factor) / result)


def stated_pieces(call: Call, arithmetic: Arithmetic, alpha: float) -> np.ndarray:
    """x, or alpha * x where x is negative."""
    steps, (low, high) = centered(call.codes[0], call.inputs[0]), code_range(call.output)
    scale, result, zero_point = scale_of(call.inputs[0]), scale_of(call.output), zero_point_of(call.output)
    above = arithmetic.rescale(steps, arithmetic.factor([scale], result), zero_point)
    below = arithmetic.rescale(steps, arithmetic.factor([scale, alpha], result), zero_point) if alpha else 0
    return np.clip(np.where(steps >= 0, above, below) + zero_point, low, high).astype(call.output.dtype)


@register
class Relu(Unary):
    """max(x, 0), where it cannot be fused into what computes x; the grid can change with it.

    XNNPACK leaves it to the built-in kernel. Plans make no RELU6, as TFLite-Micro's ignores the grid of the result: an
    upper bound is the upper end of a grid.
    """

    kind = "RELU"
    float_kind = "relu"
    floats = True
    asks = (("rounding",), ("multiplier",))
    dtypes = ("int8", "int16")
    version = 2
    wide_version = 3

    def scale_limits(self, dtypes: Sequence[str], attributes: Attributes) -> ScaleLimits:
        return ScaleLimits("each", highest=2.0**31)

    def of_codes(
        self, codes: np.ndarray, source: Tensor, output: Tensor, attributes: Attributes, profile: Profile
    ) -> np.ndarray:
        steps = rescaled(codes - zero_point_of(source), ratio_of(source, output, profile))
        return np.maximum(steps, 0) + zero_point_of(output)

    def stated(self, call: Call, arithmetic: Arithmetic) -> np.ndarray:
        return stated_pieces(call, arithmetic, 0.0)

    def onnx_table(self, source: Tensor, output: Tensor, attributes: Attributes, profile: Profile) -> np.ndarray:
        return as_onnx.moved(CODES, source, output, {"activation": "RELU"})

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        real = writer.operands(operator)[0]
        if output.dtype != "int8":
            writer.computed(operator, output, "Relu", [real])
            return
        writer.stored(output, writer.times_one(real, output), {"activation": "RELU"})


@register
class LeakyRelu(Unary):
    """x, or alpha * x where x is negative."""

    kind = "LEAKY_RELU"
    as_in_onnx = True
    float_kind = "leaky_relu"
    floats = True
    asks = (("rounding",), ("multiplier",))
    dtypes = ("int8", "int16")
    attributes = {"alpha": REQUIRED}
    in_file = {"alpha": Option("alpha", float)}
    uses_operand_scale = True
    version = 2
    options = "LeakyReluOptions"

    def check_attributes(self, attributes: Attributes) -> None:
        super().check_attributes(attributes)
        fits = math.isfinite(attributes["alpha"]) and attributes["alpha"] >= 0
        need(fits, f"alpha must be finite and not negative (TABLE takes any), got {attributes['alpha']}")

    def check(self, inputs: Sequence[Tensor], output: Tensor, attributes: Attributes) -> None:
        # A larger multiplier has no form in the kernels' fixed point, whose shift then leaves the word.
        positive = scale_of(inputs[0]) / scale_of(output)
        for what, factor in (("", positive), (" * alpha", positive * np.float32(attributes["alpha"]))):
            need(bool(factor < 2**31), f"input scale / output scale{what} must be below 2**31, got {factor:g}")

    def float_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        return {"slope": float(attributes["alpha"])}

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return FUNCTIONS["leaky_relu"](primitives, operands[0], attributes["alpha"])

    def real_on_grid(
        self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes, grid: ResultGrid[A]
    ) -> A | None:
        # The factors' eight fractional bits would show in one result of thirty. Every number here is a whole one that
        # float32 holds.
        if "operand_scale" not in attributes:
            return None
        (x,), scale = operands, attributes["operand_scale"]
        positive = scale / grid.scale
        negative = positive * attributes["alpha"]
        factors = [primitives.round(256 * factor) for factor in (positive, negative)]
        steps = primitives.round(x / scale)
        codes = primitives.floor((steps * primitives.where(steps < 0, factors[1], factors[0]) + 128) / 256)
        fits = (positive >= 2**-8) & (positive <= 2**7) & (negative >= 2**-8) & (negative <= 2**7)
        return primitives.where(fits, codes * grid.scale, self.real(primitives, operands, attributes))

    def stated(self, call: Call, arithmetic: Arithmetic) -> np.ndarray:
        return stated_pieces(call, arithmetic, float(call.attributes["alpha"]))

    def table(self, source: Tensor, output: Tensor, attributes: Attributes, profile: Profile) -> np.ndarray:
        steps, alpha = centered(CODES, source), np.float32(attributes["alpha"])
        positive = scale_of(source) / scale_of(output)
        negative = positive * alpha
        if profile.delegates and self.delegated(positive, negative):
            factors = np.rint(np.float32(256) * np.where(steps < 0, negative, positive)).astype(np.int64)
            return within_int8(((steps * factors + 128) >> 8) + zero_point_of(output))
        above, below = (rescaled(steps, ratio_of(source, output, profile, slope)) for slope in (1.0, alpha))
        codes = np.where(steps >= 0, above, below)
        return within_int8(codes + zero_point_of(output))

    def onnx_table(self, source: Tensor, output: Tensor, attributes: Attributes, profile: Profile) -> np.ndarray:
        (x,) = as_onnx.operands([CODES], [source])
        return as_onnx.quantized(np.where(x >= 0, x, np.float32(attributes["alpha"]) * x), output, {})

    def wide_results(self, codes: np.ndarray, call: Call) -> np.ndarray:
        factors = (1.0, np.float32(call.attributes["alpha"]))
        positive, negative = (ratio_of(call.inputs[0], call.output, call.profile, factor) for factor in factors)
        return np.where(codes >= 0, rescaled(codes, positive), rescaled(codes, negative))

    @staticmethod
    def delegated(positive: np.float32, negative: np.float32) -> bool:
        """Whether XNNPACK takes it: eight fractional bits have to do for both factors."""
        return bool(2**-8 <= positive <= 2**7 and 2**-8 <= negative <= 2**7)

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        slope = {"alpha": float(operator.attributes["alpha"])}
        writer.computed(operator, output, "LeakyRelu", writer.operands(operator), **slope)


@register
class PRelu(DeviceOperator):
    """x, or slope * x where x is negative; the slopes are a constant that broadcasts to x, in int8 also beside int16.
    XNNPACK leaves it alone."""

    kind = "PRELU"
    dtypes = ("int8", "int16")
    floats = True
    pointwise = True
    operands = (2, 2)
    weights = (1,)

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        need(broadcast_shape(shapes) == tuple(shapes[0]), f"slopes must broadcast to {shapes[0]}, got {shapes[1]}")
        return tuple(shapes[0])

    def check(self, inputs: Sequence[Tensor], output: Tensor, attributes: Attributes) -> None:
        slopes = inputs[1]
        fits = slopes.dtype == "int8" and slopes.quantization.axis is None
        why = ", which LiteRT takes for int8" if slopes.dtype == "int16" else ""
        need(fits, f"slopes must be int8 per tensor, got {slopes.dtype} {slopes.name!r}{why}")
        fits = len(slopes.shape) < len(output.shape) or slopes.shape[0] == 1
        need(fits, f"slopes must not differ along the batch, got {slopes.shape}")
        # Beyond these the kernels shift further than their 32 bits.
        for limits, among in ((ScaleLimits("each", highest=2.0**31), inputs[:1]),
                              (ScaleLimits("product", highest=2.0**31), inputs)):  # fmt: skip
            limits.need(among, output)

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        x, slope = context.operands(operator)
        single = slope.shape[-1:] if len(slope.shape) and math.prod(slope.shape) == slope.shape[-1] else ()
        need(bool(single), f"its slopes must be one for each channel, got {list(slope.shape)}")
        weight = context.weight(slope, lambda data: data.reshape(single))
        axis = len(x.shape) - 1
        context.give(operator, context.step("prelu", [x, weight], context.results(operator)[0], channel_axis=axis))

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        x, slope = operands
        return primitives.where(x >= 0, x, x * slope)

    def integers(self, call: Call) -> np.ndarray:
        if call.profile.rounds_as_onnx:
            x, slope = as_onnx.operands(call.codes, call.inputs)
            return as_onnx.quantized(np.where(x > 0, x, x * slope), call.output, call.attributes)
        steps, slopes = (centered(code, tensor) for code, tensor in zip(call.codes, call.inputs, strict=True))
        scale, slope_scale, result_scale = scales_for(call.profile, *call.inputs, call.output)
        positive, negative = scale / result_scale, scale * slope_scale / result_scale
        result = np.where(steps >= 0, rescaled(steps, positive), rescaled(steps * slopes, negative))
        return finish(result, call.output, call.attributes, call.profile)

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        operands = writer.aligned(operator, len(output.shape))
        writer.computed(operator, output, "PRelu", operands)


@register
class HardSwish(Unary):
    """x * min(max(x + 3, 0), 6) / 6, in 16-bit fixed point.

    ARM's vectors round ties up where the plain kernel rounds them away from zero. They hold eight values, and the
    values of a whole batch fill them one after the other, so the last seven at most are the plain kernel's.
    """

    kind = "HARD_SWISH"
    float_kind = "hardswish"
    floats = True
    purpose = "graphs built by hand: a plan multiplies by a gate, which the runtimes' fast kernels compute"
    asks = (("table",),)
    pointwise = False  # on ARM it matters which values share a vector
    options = "HardSwishOptions"

    def scale_limits(self, dtypes: Sequence[str], attributes: Attributes) -> ScaleLimits:
        return ScaleLimits("each", 2.0**-9, 2.0**7)

    def check(self, inputs: Sequence[Tensor], output: Tensor, attributes: Attributes) -> None:
        ratio = scale_of(inputs[0]) / scale_of(output)
        _, exponent = fixed_point(scale_of(inputs[0]) / np.float32(128) / scale_of(output))
        need(bool(-15 <= exponent <= 0), f"input scale / output scale must be in [2**-9, 2**7), got {ratio:g}")
        # Beyond these the kernels shift the gate's 16 bits further than they are wide.
        scale = scale_of(inputs[0])
        need(
            bool(3 * 2.0**-24 <= scale < 3 * 2.0**23), f"input scale must be in [3 * 2**-24, 3 * 2**23), got {scale:g}"
        )

    def integers(self, call: Call) -> np.ndarray:
        result = super().integers(call)
        left = result.size % 8
        if call.profile.vectors_of_eight and left:
            # What does not fill a vector is computed as elsewhere.
            last = call.codes[0].reshape(-1)[-left:]
            result.reshape(-1)[-left:] = super().integers(replace(call, codes=[last], profile=REFERENCE))
        return result

    def table(self, source: Tensor, output: Tensor, attributes: Attributes, profile: Profile) -> np.ndarray:
        vectors = profile.vectors_of_eight
        multiply, divide = (vector_high_multiply, half_up) if vectors else (short_high_multiply, rounding_shift)
        fine = np.float32(1 / 128) * scale_of(source)
        factor, exponent = short_fixed_point(fine / scale_of(output))
        gate_factor, gate_exponent = short_fixed_point(fine / np.float32(3 / 32768))
        x = centered(CODES, source) * 128
        scaled = multiply(x, factor)
        gate = x
        if gate_exponent > 0:
            gate = within_int16(gate << (gate_exponent - 1))
        gate = multiply(gate, gate_factor)
        if gate_exponent > 0:
            gate = within_int16(gate << 1)
        gate = divide(gate, max(-gate_exponent, 0))
        gate = (gate + 2**15) >> 1
        product = gate * scaled
        product = product >> 15 if vectors else np.where(product >= 0, product >> 15, -(-product >> 15))
        return within_int8(divide(product, -exponent) + zero_point_of(output))

    def onnx_table(self, source: Tensor, output: Tensor, attributes: Attributes, profile: Profile) -> np.ndarray:
        (x,) = as_onnx.operands([CODES], [source])
        gate = np.clip(x * np.float32(1 / 6) + np.float32(0.5), 0, 1).astype(np.float32)
        return as_onnx.quantized(x * gate, output, {})

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        writer.computed(operator, output, "HardSwish", writer.operands(operator))


def within_int16(x: np.ndarray) -> np.ndarray:
    """Saturated."""
    return np.clip(x, -(2**15), 2**15 - 1)


def short_fixed_point(multiplier: np.floating) -> tuple[int, int]:
    """(significand in Q15, exponent) of a real multiplier."""
    significand, exponent = (int(part) for part in fixed_point(multiplier))
    return (significand + 2**15) >> 16 if significand < 2**31 - 1 - 2**15 else 2**15 - 1, exponent


def short_high_multiply(x: np.ndarray, factor: int) -> np.ndarray:
    """The doubled product's upper 16 bits, rounded."""
    product = x * factor
    nudged = product + np.where(product >= 0, 2**14, 1 - 2**14)
    return np.where(nudged >= 0, nudged >> 15, -(-nudged >> 15))


def vector_high_multiply(x: np.ndarray, factor: int) -> np.ndarray:
    """As `short_high_multiply`, as ARM's vectors round it: half up."""
    return within_int16((x * factor + 2**14) >> 15)


def half_up(x: np.ndarray, shift: int) -> np.ndarray:
    """x / 2**shift, rounded half up."""
    return (x + ((1 << shift) >> 1)) >> shift
