# SPDX-License-Identifier: Apache-2.0
"""Functions of whole rows: softmax, its logarithm, division by the length. A row is the last axis on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from . import as_onnx, interpolated
from . import fixed_point_functions as fixed
from .arithmetic import (
    centered,
    fixed_point,
    multiply_fixed_point,
    round_half_away,
    rounding_shift,
    scale_of,
    zero_point_of,
)
from .contexts import NetworkContext, OnnxWriter
from .file_forms import Option
from .operator import (
    Attributes,
    Call,
    DeviceOperator,
    FileOperator,
    Operator,
    Refusal,
    ScaleLimits,
    Shape,
    need,
    register,
)
from .primitives import A, RealPrimitives
from .profile import Profile
from .tensor import INT8_MAX, INT8_MIN, Tensor

# Sums of exponentials are held with this many integer bits, exponents themselves with five.
SUM_BITS = 12
EXPONENT_BITS = 5


class AlongAxis(DeviceOperator):
    """Along one axis, which a plan names `axis` and which comes last on the device."""

    mechanisms = {
        "optimized": "float32 or fixed point: LiteRT's optimized kernel sums exponentials in float32, the others have "
        "them in fixed point",
    }
    floats = True
    version = 2

    def trailing(self, rank: int, attributes: Attributes) -> tuple[int, ...]:
        return (attributes["axis"],)

    def real_attributes(self, inputs: Sequence[Tensor], attributes: Attributes) -> Attributes:
        return {**attributes, "axis": len(inputs[0].shape) - 1}

    def step_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        return {**super().step_attributes(shapes, attributes), "axis": len(shapes[0]) - 1}

    def check(self, inputs: Sequence[Tensor], output: Tensor, attributes: Attributes) -> None:
        super().check(inputs, output, attributes)
        need(len(output.shape) >= 2, f"the operand must have an axis beside the batch, got {output.shape}")

    def float_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        return {"axis": len(shapes[0]) - 1}

    @staticmethod
    def onnx_row(
        writer: OnnxWriter, operator: Operator, output: Tensor, kind: str, computed: str, **attributes: object
    ) -> None:
        """A node over the device's last axis."""
        rank = len(output.shape)
        axis = writer.axis(rank - 1, rank)
        writer.computed(operator, output, kind, [computed], axis=axis, **attributes)


def scaled_exponents(codes: np.ndarray, source: Tensor, beta: float) -> tuple[np.ndarray, np.ndarray, int, int]:
    """beta * (x - largest of the row) in Q5.26 as the reference kernels see it, which count, multiplier and shift."""
    real = min(beta * float(scale_of(source)) * 2.0 ** (31 - EXPONENT_BITS), 2.0**31 - 1)
    significand, shift = (int(part) for part in fixed_point(real))
    radius = math.floor((2**EXPONENT_BITS - 1) * 2.0 ** (31 - EXPONENT_BITS) / 2.0**shift)
    steps = codes.astype(np.int64)
    steps = steps - steps.max(-1, keepdims=True)
    near = steps >= -radius
    return fixed.high_multiply(np.where(near, steps, 0) << shift, significand), near, significand, shift


def exponentials(codes: np.ndarray, source: Tensor, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """exp(beta * (x - largest)) in float32 from the built-in kernels' table, and the sum along the row, in order."""
    factor = -scale_of(source) * np.float32(beta)
    table = np.exp((factor * np.arange(256, dtype=np.float32)).astype(np.float64)).astype(np.float32)
    steps = codes.astype(np.int64)
    values = table[steps.max(-1, keepdims=True) - steps]
    # cumsum adds one value after the other, as the kernel does; sum would add pairs.
    return values, np.cumsum(values, -1, dtype=np.float32)[..., -1:]


@register
class Softmax(AlongAxis):
    """exp(beta * x), divided by the sum of the row. XNNPACK leaves it to the built-in kernel.

    That kernel is another one on ARM, with tables of 16 bits; it is not modelled here, so nothing is claimed there. The
    reference kernel crashes the process if the exponentials add up to 512 or more.
    """

    kind = "SOFTMAX"
    dtypes = ("int8", "int16")
    wide_version = 3
    attributes = {"beta": 1.0}
    in_file = {"beta": Option("beta", float, lambda _, beta: 0.0 if beta is None else beta)}
    fixed_grid = (1 / 256, -128)
    as_in_onnx = True
    free_in_onnx = True
    options = "SoftmaxOptions"
    float_kind = "softmax"

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        (x,), (shape,), beta = context.operands(operator), context.results(operator), operator.attributes["beta"]
        x = x if beta == 1 else context.step("mul", [x, float(beta)], shape)
        context.give(operator, context.step("softmax", [x], shape, axis=len(shape) - 1))

    def check_attributes(self, attributes: Attributes) -> None:
        super().check_attributes(attributes)
        beta = attributes["beta"]
        need(math.isfinite(beta) and beta > 0, f"beta must be positive and finite, got {beta}")

    def scale_limits(self, dtypes: Sequence[str], attributes: Attributes) -> ScaleLimits:
        # For int16, steps times scale * beta * 65535 / 10 have to fit the kernels' fixed point.
        highest = 2.0**31 * 10 / 65535 if dtypes[0] == "int16" else math.inf
        return ScaleLimits("operand", 2.0**-26 / attributes["beta"], highest / attributes["beta"])

    def check(self, inputs: Sequence[Tensor], output: Tensor, attributes: Attributes) -> None:
        super().check(inputs, output, attributes)
        product = float(scale_of(inputs[0])) * attributes["beta"]
        need(product > 2.0**-26, f"input scale * beta must be above 2**-26, got {product:g}")

    def may_end_the_process(self, inputs: Sequence[Tensor], attributes: Attributes, profile: Profile) -> bool:
        fixed = not profile.optimized and not profile.rounds_as_onnx
        return fixed and inputs[0].dtype == "int8" and inputs[0].shape[-1] >= 512

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return primitives.softmax(operands[0] * attributes.get("beta", 1.0), attributes["axis"])

    def integers(self, call: Call) -> np.ndarray:
        beta = float(np.float32(call.attributes["beta"]))
        if call.profile.rounds_as_onnx:
            return as_onnx.softmax(call.codes[0], call.inputs[0], beta, call.output)
        if call.profile.optimized:
            values, total = exponentials(call.codes[0], call.inputs[0], beta)
            shares = values * (np.float32(1) / (total * scale_of(call.output)))
            result = round_half_away(shares) + zero_point_of(call.output)
            return np.clip(result, INT8_MIN, INT8_MAX).astype(np.int8)
        x, near, _, _ = scaled_exponents(call.codes[0], call.inputs[0], beta)
        powers = fixed.exp_on_negative_values(x, EXPONENT_BITS)
        total = np.where(near, rounding_shift(powers, SUM_BITS), 0).sum(-1, keepdims=True)
        factor, exponent = fixed.reciprocal(total, SUM_BITS)
        if np.any(exponent > 8):
            raise Refusal(
                "SOFTMAX: the reference kernel crashes the process if a row's exponentials add up to 512 or more"
            )
        result = rounding_shift(fixed.high_multiply(factor, powers), exponent + 23) + INT8_MIN
        return np.where(near, np.clip(result, INT8_MIN, INT8_MAX), INT8_MIN).astype(np.int8)

    def wide_integers(self, call: Call) -> np.ndarray:
        beta = float(np.float32(call.attributes["beta"]))
        return interpolated.softmax(
            call.codes[0].astype(np.int64), scale_of(call.inputs[0]), beta, call.profile
        ).astype(np.int16)

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        (real,) = writer.operands(operator)
        if operator.attributes["beta"] != 1:
            # A part of the operand's scale, so that nothing lies between DequantizeLinear and Softmax.
            source = writer.graph.tensors[operator.inputs[0]]
            scale = source.quantization.scale * np.float32(operator.attributes["beta"])
            codes, scaled = f"{source.name}/codes", replace(source.quantization, scale=scale)
            real = writer.dequantize(codes, scaled, f"{output.name}/scaled")
        self.onnx_row(writer, operator, output, "Softmax", real)


@register
class LogSoftmax(AlongAxis):
    """The logarithm of softmax."""

    kind = "LOG_SOFTMAX"
    float_kind = "log_softmax"
    fixed_grid = (16 / 256, 127)
    options = "LogSoftmaxOptions"

    def scale_limits(self, dtypes: Sequence[str], attributes: Attributes) -> ScaleLimits:
        # Of much larger ones LiteRT's optimized kernel leaves float32.
        return ScaleLimits("operand", 2.0**-26, 2.0**100)

    def check(self, inputs: Sequence[Tensor], output: Tensor, attributes: Attributes) -> None:
        super().check(inputs, output, attributes)
        scale = float(scale_of(inputs[0]))
        need(scale > 2.0**-26, f"input scale must be above 2**-26, got {scale:g}")
        # The fixed-point sum of the reference kernel overflows there.
        need(output.shape[-1] < 2**SUM_BITS, f"a row must have fewer than {2**SUM_BITS} values, got {output.shape[-1]}")

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return primitives.log_softmax(operands[0], attributes["axis"])

    def integers(self, call: Call) -> np.ndarray:
        steps = call.codes[0].astype(np.int64)
        steps += 128 if call.profile.unsigned and call.profile.optimized else 0  # float32 of the codes as they are
        largest = steps.max(-1, keepdims=True)
        if call.profile.optimized:
            _, total = exponentials(call.codes[0], call.inputs[0], 1.0)
            log = np.log(total.astype(np.float64)).astype(np.float32)
            scale = scale_of(call.inputs[0])
            shift = (scale * largest.astype(np.float32) + log) / scale_of(call.output)
            result = np.rint((scale / scale_of(call.output)) * steps.astype(np.float32) - shift) + zero_point_of(
                call.output
            )
            return np.clip(result, INT8_MIN, INT8_MAX).astype(np.int8)
        x, near, significand, shift = scaled_exponents(call.codes[0], call.inputs[0], 1.0)
        powers = rounding_shift(fixed.exp_on_negative_values(x, EXPONENT_BITS), SUM_BITS)
        total = np.where(near, powers, 0).sum(-1, keepdims=True)
        log = fixed.log_of_one_and_more(total, SUM_BITS, EXPONENT_BITS)
        # Below this difference, x - log would be beyond Q5.26.
        lowest = multiply_fixed_point(log + fixed.INT32_MIN, *fixed_point(2.0 ** (31 - shift) / significand))
        radius = math.floor((2**EXPONENT_BITS - 1) * 2.0 ** (31 - EXPONENT_BITS) / 2.0**shift)
        inside = steps - largest > np.maximum(-radius - 1, lowest)
        result = rounding_shift(x - log, 31 - EXPONENT_BITS - 4) + zero_point_of(call.output)
        return np.where(inside, np.clip(result, INT8_MIN, INT8_MAX), INT8_MIN).astype(np.int8)

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        self.onnx_row(writer, operator, output, "LogSoftmax", writer.operands(operator)[0])


@register
class L2Normalization(AlongAxis):
    """x divided by the length of its row; a row of zeros stays one. The length of all codes is the same.

    A plan may name an `epsilon`, what is divided by at least. The device has none: it sees rows of zeros and of a step
    or more, so steps are at least as wide.
    """

    kind = "L2_NORMALIZATION"
    float_kind = "normalize"

    def float_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        # LiteRT divides by the root of the sum of squares, but by no less than this.
        return {**super().float_attributes(shapes, attributes), "epsilon": 1e-6}

    fixed_grid = (1 / 128, 0)
    options = "L2NormOptions"

    def read_attributes(self, read: FileOperator) -> Attributes:
        read.need_no_activation()
        return {}

    def scale_limits(self, dtypes: Sequence[str], attributes: Attributes) -> ScaleLimits | None:
        epsilon = attributes.get("epsilon", 0.0)
        return ScaleLimits("operand", epsilon) if epsilon else None

    def check(self, inputs: Sequence[Tensor], output: Tensor, attributes: Attributes) -> None:
        super().check(inputs, output, attributes)
        need(output.shape[-1] < 2**15, f"a row must have fewer than {2**15} values, got {output.shape[-1]}")

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        (x,) = operands
        least = max(attributes.get("epsilon", 0.0), 1e-12) ** 2
        return x * primitives.rsqrt(primitives.maximum(primitives.sum(x * x, (attributes["axis"],), True), least))

    def integers(self, call: Call) -> np.ndarray:
        if call.profile.rounds_as_onnx:
            return as_onnx.normalized(call.codes[0], call.inputs[0], call.output)
        steps = centered(call.codes[0], call.inputs[0])
        factor, exponent = fixed.inverse_square_root((steps * steps).sum(-1, keepdims=True))
        # Of uint8, the factor 128 is the codes', not the multiplier's, which is below 1.
        terms = (128 * steps, factor, -exponent) if call.profile.unsigned else (steps, factor, 7 - exponent)
        result = multiply_fixed_point(*terms)
        return np.clip(result, INT8_MIN, INT8_MAX).astype(np.int8)

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        self.onnx_row(writer, operator, output, "LpNormalization", writer.operands(operator)[0], p=2)
