# SPDX-License-Identifier: Apache-2.0
"""Products of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .arithmetic import Arrays, Tensors, activate, centered, finish, round_half_away
from .operator import Attributes, Shape, need, register
from .tensor import Tensor
from .weighted import Weighted, real_multiplier


@register
class FullyConnected(Weighted):
    """Over the last axis: input [..., in], filter [out, in]."""

    kind = "FULLY_CONNECTED"
    attributes = {"activation": "NONE"}
    weights_follow_features = True
    version = 4
    options = "FullyConnectedOptions"

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        first, filter, bias = shapes
        fits = len(first) >= 2 and len(filter) == 2 and first[-1] == filter[1]
        need(fits, f"input [1, in] and filter [out, in] do not fit: {first}, {filter}")
        need(bias == filter[:1], f"bias must have shape {filter[:1]}, got {bias}")
        return (*first[:-1], filter[0])

    def real(self, primitives: Any, operands: Sequence[Any], attributes: Attributes) -> Any:
        return activate(primitives, primitives.linear(*operands), attributes)

    def integers(
        self, codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str
    ) -> np.ndarray:
        accumulator = centered(codes[0], inputs[0]).astype(np.float64) @ codes[1].astype(np.float64).T
        if profile != "reference":
            return self.requantize(accumulator, codes[2], inputs, output, attributes, profile)
        # LiteRT's reference kernel multiplies in float64 and rounds once, unlike that of the convolutions.
        steps = round_half_away((accumulator + codes[2]) * real_multiplier(inputs, output)).astype(np.int64)
        return finish(steps, output, attributes, profile)

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> dict[str, Any]:
        options = {"fusedActivationFunction": ("ActivationFunctionType", attributes["activation"])}
        return {**options, "keepNumDims": True} if len(output.shape) > 2 else options

    def onnx(self, writer: Any, operator: Any, output: Tensor) -> None:
        outputs, inputs = writer.graph.tensors[operator.inputs[1]].shape
        name = output.name
        if len(output.shape) == 2:
            operands = [*writer.operands(operator), *self.onnx_weights(writer, operator, (0, 1), (outputs, inputs))]
            writer.result(operator, output, writer.node("Gemm", operands, f"{name}/computed", transB=1))
            return
        filter, bias = self.onnx_weights(writer, operator, (0, 1), (outputs, inputs))
        turned = writer.node("Transpose", [filter], f"{name}/filter_turned", perm=[1, 0])
        x = writer.channels_last(writer.operands(operator)[0], len(output.shape), f"{name}/channels_last")
        product = writer.node("MatMul", [x, turned], f"{name}/product")
        computed = writer.node("Add", [product, bias], f"{name}/computed")
        writer.result(operator, output, writer.channels_first(computed, len(output.shape), f"{name}/channels_first"))
