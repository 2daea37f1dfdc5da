# SPDX-License-Identifier: Apache-2.0
"""From one grid to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from . import as_onnx
from .arithmetic import (
    Tensors,
    centered,
    finish,
    fixed_point,
    multiply_fixed_point,
    round_half_away,
    scale_of,
    stated_codes,
    zero_point_of,
)
from .contexts import OnnxWriter
from .operator import Attributes, Call, DeviceOperator, Operator, ScaleLimits, need, register
from .primitives import A, RealPrimitives
from .profile import REFERENCE
from .stated_arithmetic import Arithmetic
from .tensor import Tensor, code_range

# Real numbers that LiteRT's default kernel brings into int16 at a time.
VECTOR = 8


def _exponents(source: str, result: str) -> tuple[int, int]:
    """XNNPACK's bounds of input scale / output scale for int8; with int16, what kernels shift codes by in 32 bits."""
    if "int16" not in (source, result):
        return -8, 7
    return -31, 22 if source == "int8" else 15


@register
class Quantize(DeviceOperator):
    """The same real numbers on another grid, of the same dtype or another one; in others' files also of float32."""

    kind = "QUANTIZE"
    pointwise = True
    version = 2
    as_in_onnx = True
    real_in_onnx = True
    options = "QuantizeOptions"
    dtypes = ("int8", "int16")
    changes_dtype = True
    floats = True
    mechanisms = {
        "delegates": "a delegate's own kernel: XNNPACK's multiplier has eight fractional bits, that of the built-in "
        "kernels 31",
        "optimized": "half to even or away from zero: LiteRT's default kernels multiply by the reciprocal of the scale "
        "and take the even code, the others divide and round away from zero",
    }

    asks = (("rounding",), ("multiplier",))

    def stated(self, call: Call, arithmetic: Arithmetic) -> np.ndarray:
        return stated_codes(call, arithmetic, centered(call.codes[0], call.inputs[0]))

    def scale_limits(self, dtypes: Sequence[str], attributes: Attributes) -> ScaleLimits:
        low, high = _exponents(*dtypes)
        return ScaleLimits("each", 2.0**low, 2.0**high)

    def result_dtypes(self, attributes: Attributes, stored: str, count: int) -> tuple[str, ...]:
        need(stored in self.dtypes, f"the result must be {' or '.join(self.dtypes)}, got {stored}")
        return super().result_dtypes(attributes, stored, count)

    def check(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> None:
        ratio = float(scale_of(inputs[0]) / scale_of(output))
        low, high = _exponents(inputs[0].dtype, output.dtype)
        fits = 2.0**low <= ratio <= 2.0**high
        need(fits, f"input scale / output scale must be in [2**{low}, 2**{high}], got {ratio:g}")

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        return operands[0]

    def integers(self, call: Call) -> np.ndarray:
        if call.profile.rounds_as_onnx:
            return as_onnx.moved(call.codes[0], call.inputs[0], call.output, call.attributes)
        x = centered(call.codes[0], call.inputs[0])
        if call.profile.delegates:
            # Eight fractional bits are all the multiplier has: coarse, but equal scales shift codes exactly.
            multiplier = int(np.rint(256 * (scale_of(call.inputs[0]) / scale_of(call.output))))
            return finish((x * multiplier + 128) >> 8, call.output, call.attributes, call.profile)
        ratio = float(scale_of(call.inputs[0])) / float(scale_of(call.output))
        return finish(multiply_fixed_point(x, *fixed_point(ratio)), call.output, call.attributes, call.profile)

    def wide_integers(self, call: Call) -> np.ndarray:
        return self.integers(replace(call, profile=REFERENCE))

    def float_results(self, call: Call) -> np.ndarray:
        if call.profile.rounds_as_onnx:
            return as_onnx.quantized(call.codes[0], call.output, call.attributes)
        x, scale = call.codes[0].astype(np.float32), scale_of(call.output)
        lowest, highest = code_range(call.output)
        if call.profile.optimized:
            steps = np.rint(np.clip(x * (np.float32(1) / scale), -(2.0**24), 2.0**24))
            if call.output.dtype == "int16" and x.size % VECTOR:
                # What fills no vector is divided, in float64, and rounded away from zero.
                rest = np.clip(x.reshape(-1)[-(x.size % VECTOR) :] / np.float64(scale), -(2.0**24), 2.0**24)
                steps.reshape(-1)[-rest.size :] = round_half_away(rest)
        else:
            steps = np.clip(round_half_away(x / scale), -(2.0**24), 2.0**24)
        return np.clip(np.nan_to_num(steps) + zero_point_of(call.output), lowest, highest).astype(call.output.dtype)

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        real = writer.operands(operator)[0]
        source = writer.graph.tensors[operator.inputs[0]]
        if source.dtype == output.dtype == "int8":
            real = writer.times_one(real, output)
        writer.result(operator, output, real)
