# SPDX-License-Identifier: Apache-2.0
"""Operators on two tensors, value by value, with NumPy's broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from . import as_onnx
from . import fixed_point_functions as fixed
from .arithmetic import (
    Arrays,
    Broadcasting,
    Tensors,
    activate,
    centered,
    checked_log2,
    divides_plainly,
    finish,
    fixed_point,
    multiply_fixed_point,
    multiply_round_half_up,
    need_quotients,
    rounding_shift,
    scale_of,
    scales_for,
    stated_codes,
    zero_point_of,
)
from .contexts import NetworkContext, OnnxWriter
from .file_forms import ACTIVATION
from .operator import (
    Attributes,
    Call,
    DeviceOperator,
    Fields,
    FileOperator,
    Operator,
    Refusal,
    ScaleLimits,
    Unreadable,
    need,
    register,
)
from .primitives import A, RealPrimitives
from .profile import REFERENCE, Profile
from .stated_arithmetic import Arithmetic
from .tensor import Tensor

# Values that LiteRT's default kernels for int16 add at a time.
VECTOR = 16


def shifted_once(codes: np.ndarray, significand: np.ndarray, exponent: np.ndarray, bits: int) -> np.ndarray:
    """Codes times a multiplier and 2**bits, both shifts in one before the only rounding."""
    shift = bits + int(exponent)
    shifted = codes << shift if shift >= 0 else codes >> -shift
    return (shifted * significand + 2**30) >> 31


class Binary(Broadcasting):
    """Two operands that broadcast; one may be a constant of the same or a lower rank.

    Attributes:
        onnx_kind: ONNX's name for it.
    """

    operands = (2, 2)
    dtypes: ClassVar[tuple[str, ...]] = ("int8", "int16")
    pointwise = True
    onnx_kind: ClassVar[str]

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        operands = writer.aligned(operator, len(output.shape))
        writer.computed(operator, output, self.onnx_kind, operands)


class FusedBinary(Binary):
    """Followed by an activation.

    Attributes:
        of_plain: what it computes of integers without a grid.
    """

    attributes = {"activation": "NONE"}
    in_file = {"activation": ACTIVATION}
    version = 2
    plain: ClassVar[tuple[str, ...]] = ("int32", "int64")
    of_plain: ClassVar[staticmethod[..., Any]]

    def check(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> None:
        super().check(inputs, output, attributes)
        plain = output.dtype in self.plain and attributes["activation"] != "NONE"
        need(not plain, f"a fused {attributes['activation']} of {output.dtype}, which TFLite-Micro leaves out")

    def plain_integers(self, call: Call) -> np.ndarray:
        return np.asarray(type(self).of_plain(*call.codes))


@register
class Add(FusedBinary):
    """The sum; scales may differ."""

    kind = "ADD"
    as_in_onnx = True
    floats = True
    wide_version = 3
    options = "AddOptions"
    float_kind = "add"
    onnx_kind = "Add"
    adds = True
    mechanisms = {
        "delegates": "one rounding or three: XNNPACK adds the operands times whole numbers and rounds the sum; the "
        "built-in kernels round each operand and then their sum",
    }
    of_plain = staticmethod(np.add)
    sign: ClassVar[int] = 1
    asks = (("rounding", "addition"), ("multiplier",))
    # Whether LiteRT has a kernel of vectors.
    in_vectors: ClassVar[bool] = True

    def scale_limits(self, dtypes: Sequence[str], attributes: Attributes) -> ScaleLimits:
        # LiteRT's vectors hold a sum in 16 bits, and wrap beyond.
        return ScaleLimits("each", highest=64 if self.in_vectors and dtypes[-1] == "int8" else 256)

    def check(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> None:
        super().check(inputs, output, attributes)
        # Kernels form 2**20 times this scale in float32, and end the process if nothing is left of its inverse.
        scale = scale_of(output)
        need(bool(scale < 2.0**108), f"output scale must be below 2**108, got {scale:g}")

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        first, second = operands
        return activate(primitives, first + second if self.sign > 0 else first - second, attributes)

    def integers(self, call: Call) -> np.ndarray:
        if call.profile.rounds_as_onnx:
            return self.as_onnx(call)
        scales = [scale_of(tensor) for tensor in call.inputs]
        ratios = [float(scale / scale_of(call.output)) for scale in scales]
        if call.profile.delegates and min(ratios) >= 2**-10:
            # The larger multiplier gets 21 significant bits, the other one as many as that shift leaves it: what is
            # shifted back is below 2**31.
            shift = 21 - int(np.frexp(max(ratios))[1])
            multipliers = [int(np.rint(np.ldexp(ratio, shift))) for ratio in ratios]
            multipliers[1] *= self.sign
            shifts = sum(m * zero_point_of(tensor) for m, tensor in zip(multipliers, call.inputs, strict=True))
            first, second = (
                code.astype(np.int32) * np.int32(m) for code, m in zip(call.codes, multipliers, strict=True)
            )
            steps = first + second
            steps += np.int32((1 << (shift - 1)) - shifts)
            return finish(steps >> shift, call.output, call.attributes, call.profile)
        # XNNPACK leaves smaller ratios to the built-in kernel.
        steps = self.built_in([centered(code, tensor) for code, tensor in zip(call.codes, call.inputs, strict=True)],
                              scales, scale_of(call.output), 20, call.profile)  # fmt: skip
        return finish(steps, call.output, call.attributes, REFERENCE)

    def built_in(
        self, operands: Arrays, scales: Sequence[np.floating], scale: np.floating, bits: int, profile: Profile
    ) -> np.ndarray:
        """Steps of the result by LiteRT's own kernels: operands shifted by so many bits, and each rounded."""
        twice_larger = 2 * float(max(scales))
        multipliers = [fixed_point(float(input_scale) / twice_larger) for input_scale in scales]
        terms = [
            multiply_fixed_point(operand.astype(np.int64) << bits, *multiplier)
            for operand, multiplier in zip(operands, multipliers, strict=True)
        ]
        if self.in_vectors and profile.optimized and operands[0].shape == operands[1].shape:
            # Vectors of 16 values shift once, to the left or, cutting off, to the right; the rest is computed as above.
            count = operands[0].size // VECTOR * VECTOR
            for term, operand, multiplier in zip(terms, operands, multipliers, strict=True):
                shifted = shifted_once(operand.reshape(-1)[:count].astype(np.int64), *multiplier, bits)
                term.reshape(-1)[:count] = shifted
        last = fixed_point(twice_larger / (2**bits * float(scale)))
        return multiply_fixed_point(terms[0] + self.sign * terms[1], *last)

    def stated(self, call: Call, arithmetic: Arithmetic) -> np.ndarray:
        first, second = (centered(code, tensor) for code, tensor in zip(call.codes, call.inputs, strict=True))
        scales, scale, zero_point = (
            [scale_of(t) for t in call.inputs],
            scale_of(call.output),
            zero_point_of(call.output),
        )
        if arithmetic.addition == "once":
            factors = [arithmetic.factor([each], scale) for each in scales]
            steps = arithmetic.combine([first, self.sign * second], factors, zero_point)
        else:  # on a grid of twice the larger scale with so many bits more, and from there on the result's
            bits, twice_larger = 20 if call.output.dtype == "int8" else 15, 2 * max(scales)
            once = replace(arithmetic, roundings=arithmetic.roundings[:1])
            of_operands = once if arithmetic.addition == "operands_once" else arithmetic
            first, second = (
                of_operands.rescale(operand << bits, arithmetic.factor([each], twice_larger))
                for operand, each in zip((first, second), scales, strict=True)
            )
            factor = arithmetic.factor([twice_larger], scale, 2**bits)
            steps = arithmetic.rescale(first + self.sign * second, factor, zero_point)
        return finish(steps, call.output, call.attributes, call.profile)

    def as_onnx(self, call: Call) -> np.ndarray:
        """By a kernel of onnxruntime's own; it has none for the difference."""
        if self.sign > 0:
            return as_onnx.added(call.codes, call.inputs, call.output, call.attributes)
        first, second = as_onnx.operands(call.codes, call.inputs)
        return as_onnx.quantized(first - second, call.output, call.attributes)

    def exact_steps(self, call: Call) -> np.ndarray | None:
        first, second = (
            centered(code, tensor) * (float(scale_of(tensor)) / float(scale_of(call.output)))
            for code, tensor in zip(call.codes, call.inputs, strict=True)
        )
        return np.asarray(first + self.sign * second)

    def wide_integers(self, call: Call) -> np.ndarray:
        # As the built-in kernel for int8, but that only 15 bits are left to shift by.
        steps = self.built_in(
            call.codes, [scale_of(tensor) for tensor in call.inputs], scale_of(call.output), 15, call.profile
        )
        return finish(steps, call.output, call.attributes, call.profile)

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Fields:
        # The schema's default asks for kernels that take powers of two only.
        return {**super().tflite_options(inputs, output, attributes), "potScaleInt16": output.dtype != "int16"}

    def read_attributes(self, read: FileOperator) -> Attributes:
        # Where one of the grids is no power of two, kernels do not follow the option.
        tensors = (read.operand(0), read.operand(1), read.output)
        powers = all(checked_log2(scale_of(tensor)) is not None for tensor in tensors)
        if read.output.dtype == "int16" and read.option("potScaleInt16") and powers:
            raise Unreadable("int16 on grids of powers of two is not supported")
        return super().read_attributes(read)


@register
class Multiply(FusedBinary):
    """The product."""

    kind = "MUL"
    floats = True
    wide_version = 4
    options = "MulOptions"
    of_plain = staticmethod(np.multiply)
    float_kind = "mul"
    onnx_kind = "Mul"
    mechanisms = {
        "delegates": "two roundings: XNNPACK multiplies the product by a float32 scale and rounds once; the built-in "
        "kernels multiply by a 31-bit integer and shift, and round each time",
        "delegates:ties": "half to even or away from zero: the products lie exactly half way between two codes",
        "rounds_products_half_up:ties": "half up or to even: the products lie exactly half way between two codes, "
        "where XNNPACK rounds up on ARM, and to the even code on x86",
    }

    asks = (("rounding",), ("multiplier",))

    def stated(self, call: Call, arithmetic: Arithmetic) -> np.ndarray:
        product = centered(call.codes[0], call.inputs[0]) * centered(call.codes[1], call.inputs[1])
        return stated_codes(call, arithmetic, product)

    def scale_limits(self, dtypes: Sequence[str], attributes: Attributes) -> ScaleLimits:
        return ScaleLimits("product", 2.0**-31, 1) if dtypes[-1] == "int16" else ScaleLimits("product", 2.0**-16, 256)

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return activate(primitives, operands[0] * operands[1], attributes)

    def integers(self, call: Call) -> np.ndarray:
        product = centered(call.codes[0], call.inputs[0]) * centered(call.codes[1], call.inputs[1])
        if call.profile.rounds_as_onnx:
            return as_onnx.multiplied(
                product, scale_of(call.inputs[0]) * scale_of(call.inputs[1]), call.output, call.attributes
            )
        if not call.profile.delegates:
            return self.in_fixed_point(product, call.inputs, call.output, call.attributes, call.profile)
        multiplier = scale_of(call.inputs[0]) * scale_of(call.inputs[1]) / scale_of(call.output)
        if call.profile.rounds_products_half_up:
            steps = multiply_round_half_up(product, multiplier)
        else:
            steps = np.rint(product.astype(np.float32) * multiplier).astype(np.int64)
        return finish(steps, call.output, call.attributes, call.profile)

    def exact_steps(self, call: Call) -> np.ndarray | None:
        product = centered(call.codes[0], call.inputs[0]) * centered(call.codes[1], call.inputs[1])
        first, second, result = (float(scale_of(tensor)) for tensor in (*call.inputs, call.output))
        return np.asarray(product * (first * second / result))

    def wide_integers(self, call: Call) -> np.ndarray:
        product = centered(call.codes[0], call.inputs[0]) * centered(call.codes[1], call.inputs[1])
        return self.in_fixed_point(product, call.inputs, call.output, call.attributes, call.profile)

    @staticmethod
    def in_fixed_point(
        product: np.ndarray, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
    ) -> np.ndarray:
        """As the runtimes' own kernels multiply; LiteRT's form the multiplier in float32, unlike its convolutions."""
        first, second, result = scales_for(profile, *inputs, output)
        steps = multiply_fixed_point(product, *fixed_point(first * second / result))
        return finish(steps, output, attributes, profile)


@register
class Subtract(Add):
    """The difference; scales may differ."""

    kind = "SUB"
    wide_version = 5
    options = "SubOptions"
    float_kind = "sub"
    onnx_kind = "Sub"
    as_in_onnx = False
    of_plain = staticmethod(np.subtract)
    sign = -1
    in_vectors = False


class Extreme(Binary):
    """The larger or the smaller of two codes on one grid."""

    pointwise = False  # it is, but nothing is faster than to compare
    same_quantization = True
    floats = True
    moves_codes = True
    version = 2
    wide_version = 4
    options = "MaximumMinimumOptions"
    largest: ClassVar[bool] = True

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return primitives.maximum(*operands) if self.largest else primitives.minimum(*operands)

    def integers(self, call: Call) -> np.ndarray:
        return (np.maximum if self.largest else np.minimum)(*call.codes)


@register
class Maximum(Extreme):
    """The larger."""

    kind = "MAXIMUM"
    float_kind = "maximum"
    onnx_kind = "Max"


@register
class Minimum(Extreme):
    """The smaller."""

    kind = "MINIMUM"
    float_kind = "minimum"
    largest = False
    onnx_kind = "Min"


@register
class SquaredDifference(Binary):
    """The square of the difference."""

    kind = "SQUARED_DIFFERENCE"
    floats = True
    purpose = "graphs built by hand: a plan subtracts and squares, as XNNPACK computes both and not this"
    dtypes = ("int8",)
    plain = ("int32",)
    version = 2
    options = "SquaredDifferenceOptions"
    onnx_kind = "Sub"

    def check(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> None:
        super().check(inputs, output, attributes)
        # Of a multiplier of 1 or more the kernels end the process.
        ratio = max(float(scale_of(tensor)) for tensor in inputs) ** 2 / float(scale_of(output))
        need(ratio < 2**12, f"the larger input scale ** 2 / output scale must be below 2**12, got {ratio:g}")

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        (shape,) = context.results(operator)
        difference = context.step("sub", context.operands(operator), shape)
        context.give(operator, context.step("square", [difference], shape))

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        difference = operands[0] - operands[1]
        return difference * difference

    def integers(self, call: Call) -> np.ndarray:
        if call.profile.rounds_as_onnx:
            first, second = as_onnx.operands(call.codes, call.inputs)
            return as_onnx.quantized((first - second) * (first - second), call.output, call.attributes)
        scales = [float(scale_of(tensor)) for tensor in call.inputs]
        twice_larger = 2 * max(scales)
        first, second = (
            multiply_fixed_point(centered(code, tensor) << 7, *fixed_point(scale / twice_larger))
            for code, tensor, scale in zip(call.codes, call.inputs, scales, strict=True)
        )
        square = (first - second) * (first - second)
        multiplier = (twice_larger * twice_larger) / ((1 << 14) * float(scale_of(call.output)))
        return finish(multiply_fixed_point(square, *fixed_point(multiplier)), call.output, call.attributes, REFERENCE)

    def plain_integers(self, call: Call) -> np.ndarray:
        return np.square(np.subtract(*call.codes))

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        operands = writer.aligned(operator, len(output.shape))
        difference = writer.node("Sub", operands, f"{output.name}/difference")
        writer.computed(operator, output, "Mul", [difference, difference])


class OfOneOperand(DeviceOperator):
    """One operand, its result on a grid of its own."""

    pointwise = True
    onnx_kind: ClassVar[str]

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        writer.computed(operator, output, self.onnx_kind, writer.operands(operator))


@register
class Absolute(OfOneOperand):
    """The magnitude."""

    kind = "ABS"
    floats = True
    purpose = "graphs built by hand: a plan makes a table of 256 codes, which rounds alike on all devices"
    dtypes = ("int8", "int16")
    plain = ("int32",)
    version = 2
    wide_version = 3
    options = "AbsOptions"
    float_kind = "abs"
    onnx_kind = "Abs"
    asks = (("rounding",), ("multiplier",))

    def stated(self, call: Call, arithmetic: Arithmetic) -> np.ndarray:
        return stated_codes(call, arithmetic, np.abs(centered(call.codes[0], call.inputs[0])))

    def scale_limits(self, dtypes: Sequence[str], attributes: Attributes) -> ScaleLimits:
        return ScaleLimits("each", highest=2.0**31)

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return primitives.abs(operands[0])

    def plain_integers(self, call: Call) -> np.ndarray:
        return np.abs(call.codes[0])

    def integers(self, call: Call) -> np.ndarray:
        if call.profile.rounds_as_onnx:
            return as_onnx.quantized(np.abs(as_onnx.operands(call.codes, call.inputs)[0]), call.output, call.attributes)
        magnitude = np.abs(centered(call.codes[0], call.inputs[0]))
        if scale_of(call.inputs[0]) == scale_of(call.output):
            return finish(magnitude, call.output, call.attributes, call.profile)
        scale, result = scales_for(call.profile, call.inputs[0], call.output)
        return finish(
            multiply_fixed_point(magnitude, *fixed_point(scale / result)), call.output, call.attributes, call.profile
        )

    def wide_integers(self, call: Call) -> np.ndarray:
        if scale_of(call.inputs[0]) == scale_of(call.output):
            return self.integers(call)
        scale, result = scales_for(call.profile, call.inputs[0], call.output)
        steps = multiply_fixed_point(np.abs(call.codes[0].astype(np.int64)), *fixed_point(scale / result))
        return finish(steps, call.output, call.attributes, call.profile)


@register
class Divide(FusedBinary):
    """The quotient in fixed point: the reciprocal of the second operand in 31 bits, times the first. LiteRT does not
    look whether it divides by 0."""

    kind = "DIV"
    dtypes = ("int8", "int16")
    plain = ("int32",)
    floats = True
    pointwise = False
    version = 2
    options = "DivOptions"
    float_kind = "div"
    purpose = "files: a plan multiplies by a table of reciprocals, which rounds alike on all devices"

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return activate(primitives, operands[0] / operands[1], attributes)

    def check(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> None:
        super().check(inputs, output, attributes)
        ratio = float(scale_of(inputs[0]) / (scale_of(inputs[1]) * scale_of(output)))
        need(2.0**-20 <= ratio < 2.0**15, "input scale / (input scale * output scale) must be in [2**-20, 2**15), got "
                                          f"{ratio:g}")  # fmt: skip

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        raise Refusal(f"{self.kind} has no form in ONNX here")

    def integers(self, call: Call) -> np.ndarray:
        first, second = (centered(code, tensor) for code, tensor in zip(call.codes, call.inputs, strict=True))
        need(bool(np.all(second != 0)), "a division by 0, which runtimes do not define")
        first = np.where(second < 0, -first, first)
        inverse, exponent = fixed.reciprocal(np.abs(second), 31)
        # As far to the left as int32 goes, before the first rounding.
        headroom = fixed.leading_zeros(np.where(first >= 0, first, 2 * -first - 1)) - (first >= 0)
        quotient = fixed.high_multiply(first << headroom, inverse)
        scales = scales_for(call.profile, *call.inputs, call.output)
        significand, shift = fixed_point(scales[0] / (scales[1] * scales[2]))
        steps = shifted_as_int32(fixed.high_multiply(quotient, significand), exponent + headroom - shift)
        return finish(steps, call.output, call.attributes, call.profile if not call.profile.delegates else REFERENCE)

    def may_end_the_process(self, inputs: Tensors, attributes: Attributes, profile: Profile) -> bool:
        return divides_plainly(inputs)

    def plain_integers(self, call: Call) -> np.ndarray:
        need_quotients(*call.codes)
        return np.trunc(call.codes[0] / call.codes[1]).astype(call.output.dtype)


def shifted_as_int32(x: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """x / 2**shift, rounded half away from zero, as processors do it in 32 bits.

    They look at five bits of the shift: a quotient too small for 32 bits comes out as if it had not been shifted.
    """
    return np.where(shift > 31, (x >> (shift & 31)) + (x >= 0), rounding_shift(x, np.clip(shift, 0, 31)))
