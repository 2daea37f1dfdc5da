# SPDX-License-Identifier: Apache-2.0
"""Functions of one operand that only others' files hold: plans make tables of them, which round alike everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from . import fixed_point_functions as fixed
from .activation import Tabulated, Unary, rescaled, rounded
from .arithmetic import (
    Tensors,
    fixed_point,
    multiply_fixed_point,
    round_half_away,
    scale_of,
    zero_point_of,
)
from .interpolated import interpolation_table, look_up
from .operator import FLOAT, Attributes, Call, DeviceOperator, ScaleLimits, Shape, need, register
from .primitives import A, NumPyPrimitives, RealPrimitives
from .profile import Profile
from .tensor import INT16_MAX, Tensor, code_range, dequantize

PURPOSE = "files: a plan makes a table of 256 codes, which rounds alike on all devices"


class OfFiles(DeviceOperator):
    """In integers, and in float32."""

    floats = True
    purpose = PURPOSE

    def of_real(self, x: np.ndarray) -> np.ndarray:
        """The function in float32."""
        raise NotImplementedError

    def float_results(self, call: Call) -> np.ndarray:
        return np.asarray(self.of_real(call.codes[0]), np.float32)


@register
class InverseSquareRoot(OfFiles, Unary):
    """1 / sqrt(x) in fixed point; of 0 the largest code. LiteRT refuses to compute it of what is negative. For int16 it
    has straight lines between 513 values, which near 0 are far from the function."""

    kind = "RSQRT"
    float_kind = "rsqrt"
    dtypes = ("int8", "int16")
    refuses_negative = True
    version = 2
    wide_version = 3

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return primitives.rsqrt(primitives.maximum(operands[0], LEAST))

    def of_real(self, x: np.ndarray) -> np.ndarray:
        return NumPyPrimitives.rsqrt(x)

    def wide_results(self, codes: np.ndarray, call: Call) -> np.ndarray:
        if call.profile.fixed_point_functions:
            return super().wide_results(codes, call)
        scale, result_scale = (scale_of(tensor) for tensor in (call.inputs[0], call.output))

        def function(x: np.ndarray) -> np.ndarray:
            inverse = np.float32(1) / np.sqrt(np.maximum(x, np.float32(LEAST)))
            return np.where(x > 0, inverse, np.float32(INT16_MAX) * result_scale)

        return look_up(codes, interpolation_table(function, scale, result_scale))

    def of_codes(
        self, codes: np.ndarray, source: Tensor, output: Tensor, attributes: Attributes, profile: Profile
    ) -> np.ndarray:
        steps = np.maximum(codes - zero_point_of(source), 0)
        factor, exponent = fixed.inverse_square_root(steps)
        numbers = np.float64 if profile.scale_root_in_float64 else np.float32
        multiplier = 1 / float(np.sqrt(numbers(scale_of(source))) * numbers(scale_of(output)))
        significand, shift = fixed_point(multiplier)
        inverse = multiply_fixed_point(np.ones_like(steps), factor, FRACTION - exponent)
        result = multiply_fixed_point(inverse, significand, shift - FRACTION) + zero_point_of(output)
        return np.where(steps == 0, code_range(output)[1], result)

    def check(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> None:
        multiplier = 1 / float(np.sqrt(scale_of(inputs[0])) * scale_of(output))
        most = 30 if output.dtype == "int16" else FRACTION
        fits = 2.0**-12 <= multiplier < 2.0**most
        need(fits, f"1 / (sqrt(input scale) * output scale) must be in [2**-12, 2**{most}), got {multiplier:g}")


# Bits of the fraction of 1 / sqrt(x).
FRACTION = 20
# Where a function has a pole: what lies below has no gradient, and the code at the end.
LEAST = float(np.finfo(np.float32).tiny)
# The smallest code of any grid.
BELOW_ALL = -1e30


@register
class SquareRoot(OfFiles, Unary):
    """sqrt(x) in float32, rounded down."""

    kind = "SQRT"
    float_kind = "sqrt"
    dtypes = ("int8", "int16")
    refuses_negative = True

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return primitives.sqrt(primitives.maximum(operands[0], LEAST))

    def of_real(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(np.sqrt(x))

    def of_codes(
        self, codes: np.ndarray, source: Tensor, output: Tensor, attributes: Attributes, profile: Profile
    ) -> np.ndarray:
        x = np.maximum(dequantize(codes, source.quantization), 0)
        return np.floor(np.sqrt(x) / scale_of(output)) + zero_point_of(output)

    def check(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> None:
        super().check(inputs, output, attributes)
        if output.dtype != FLOAT:
            # Kernels make a whole number of 32 bits of it before they saturate.
            lowest, highest = code_range(output)
            largest = float(np.sqrt((highest - lowest) * float(scale_of(inputs[0]))) / float(scale_of(output)))
            need(largest < 2.0**30, f"the largest root is {largest:g} output scales, which must be below 2**30")


@register
class Logarithm(OfFiles, Tabulated):
    """log(x), of a table; of 0 and below the smallest code."""

    kind = "LOG"
    float_kind = "log"
    dtypes = ("int8", "int16")

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        (x,) = operands
        return primitives.where(x > 0, primitives.log(primitives.maximum(x, LEAST)), BELOW_ALL)

    def of_real(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(x))

    def function(self, x: np.ndarray, output: Tensor, attributes: Attributes, profile: Profile) -> np.ndarray:
        lowest = np.float32(code_range(output)[0] - zero_point_of(output)) * scale_of(output)
        return np.where(x > 0, rounded(np.log, np.maximum(x, np.float32(LEAST))), lowest)


@register
class ExponentialLinear(OfFiles, Tabulated):
    """x, or exp(x) - 1 where x is negative, of a table."""

    kind = "ELU"
    float_kind = "elu"
    version = 1
    delegated = True

    def scale_limits(self, dtypes: Sequence[str], attributes: Attributes) -> ScaleLimits:
        # TFLite-Micro's kernel makes a whole number of 32 bits of the result before it saturates.
        return ScaleLimits("each", highest=2.0**22)

    def float_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        return {"alpha": 1.0, "scale": 1.0, "input_scale": 1.0}

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        (x,) = operands
        return primitives.where(x < 0, primitives.expm1(primitives.minimum(x, 0.0)), x)

    def of_real(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(np.where(x < 0, rounded(np.expm1, np.minimum(x, 0)), x))

    def function(self, x: np.ndarray, output: Tensor, attributes: Attributes, profile: Profile) -> np.ndarray:
        return self.of_real(x).astype(np.float32)


class Bounded(OfFiles, Unary):
    """Within two real bounds, on a grid of its own.

    Attributes:
        bounds: lowest, highest.
    """

    bounds: ClassVar[tuple[float, float]]
    float_kind = "clamp"

    def check(self, inputs: Sequence[Tensor], output: Tensor, attributes: Attributes) -> None:
        super().check(inputs, output, attributes)
        if output.dtype != FLOAT:
            # Kernels bring the bounds onto it in 32 bits.
            least, scale = max(map(abs, self.bounds)) * 2.0**-30, scale_of(output)
            need(bool(scale >= least), f"output scale must be at least {least:g}, got {scale:g}")

    def scale_limits(self, dtypes: Sequence[str], attributes: Attributes) -> ScaleLimits:
        return ScaleLimits("each", highest=2.0**31)

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return primitives.clip(operands[0], *self.bounds)

    def float_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        return {"min": self.bounds[0], "max": self.bounds[1]}

    def float_results(self, call: Call) -> np.ndarray:
        lowest, highest = map(np.float32, self.bounds)
        return np.asarray(np.clip(call.codes[0], lowest, highest))

    def of_codes(
        self, codes: np.ndarray, source: Tensor, output: Tensor, attributes: Attributes, profile: Profile
    ) -> np.ndarray:
        zero_point, scale = zero_point_of(output), scale_of(output)
        lowest, highest = (zero_point + int(round_half_away(np.float32(bound) / scale)) for bound in self.bounds)
        steps = rescaled(codes - zero_point_of(source), scale_of(source) / scale)
        return np.clip(steps + zero_point, lowest, highest)


@register
class Relu6(Bounded):
    """Between 0 and 6. TFLite-Micro's kernel ignores the grid of the result."""

    kind = "RELU6"
    dtypes = ("int8", "int16")
    version = 2
    wide_version = 3
    bounds = (0.0, 6.0)

    def of_codes(
        self, codes: np.ndarray, source: Tensor, output: Tensor, attributes: Attributes, profile: Profile
    ) -> np.ndarray:
        if not profile.relu6_keeps_codes:
            return super().of_codes(codes, source, output, attributes, profile)
        lowest, scale = zero_point_of(source), scale_of(source)
        # The kernel brings 6 onto the operand's grid in 32 bits.
        need(
            bool(scale >= 6 * 2.0**-30), f"input scale must be at least {6 * 2.0**-30:g} on this device, got {scale:g}"
        )
        highest = lowest + int(round_half_away(np.float32(6) / scale))
        return np.clip(codes, lowest, highest)


@register
class Negate(OfFiles):
    """The opposite of every code, whatever the grids; the lowest code has none, and stays."""

    kind = "NEG"
    float_kind = "neg"
    dtypes = ("int8", "int16")
    plain = ("int32", "int64")
    pointwise = True
    options = "NegOptions"

    def of_real(self, x: np.ndarray) -> np.ndarray:
        return -x

    def integers(self, call: Call) -> np.ndarray:
        return -call.codes[0]

    def plain_integers(self, call: Call) -> np.ndarray:
        return -call.codes[0]


@register
class ReluN1To1(Bounded):
    """Between -1 and 1."""

    kind = "RELU_N1_TO_1"
    bounds = (-1.0, 1.0)


@register
class Relu0To1(Bounded):
    """Between 0 and 1."""

    kind = "RELU_0_TO_1"
    bounds = (0.0, 1.0)
