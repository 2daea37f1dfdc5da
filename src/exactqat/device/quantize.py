# SPDX-License-Identifier: Apache-2.0
"""From one grid to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .arithmetic import Arrays, Tensors, centered, finish, fixed_point, multiply_fixed_point, scale_of
from .operator import Attributes, DeviceOperator, is_xnnpack, need, register
from .tensor import Tensor


@register
class Quantize(DeviceOperator):
    """int8 to int8: the same real numbers on another grid."""

    kind = "QUANTIZE"
    value_by_value = True
    version = 2
    options = "QuantizeOptions"

    def check(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> None:
        ratio = float(scale_of(inputs[0]) / scale_of(output))
        need(2**-8 <= ratio <= 2**7, f"input scale / output scale must be in [2**-8, 2**7], got {ratio:g}")

    def real(self, primitives: Any, operands: Sequence[Any], attributes: Attributes) -> Any:
        return operands[0]

    def integers(
        self, codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str
    ) -> np.ndarray:
        x = centered(codes[0], inputs[0])
        if is_xnnpack(profile):
            # Eight fractional bits are all the multiplier has: coarse, but equal scales shift codes exactly.
            multiplier = int(np.rint(256 * (scale_of(inputs[0]) / scale_of(output))))
            return finish((x * multiplier + 128) >> 8, output, attributes, profile)
        ratio = float(scale_of(inputs[0])) / float(scale_of(output))
        return finish(multiply_fixed_point(x, *fixed_point(ratio)), output, attributes, profile)

    def onnx(self, writer: Any, operator: Any, output: Tensor) -> None:
        writer.result(operator, output, writer.operands(operator)[0])
