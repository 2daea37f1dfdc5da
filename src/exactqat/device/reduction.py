# SPDX-License-Identifier: Apache-2.0
"""One value from many: means, sums, extremes over whole axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from .arithmetic import (
    Arrays,
    Tensors,
    centered,
    finish,
    fixed_point,
    fused_multiply_add,
    multiply_fixed_point,
    scale_of,
    zero_point_of,
)
from .operator import Attributes, DeviceOperator, Shape, is_xnnpack, need, register
from .tensor import INT8_MAX, INT8_MIN, Tensor


class Reduction(DeviceOperator):
    """Over `axes`, which are left out of the result unless `keep_dims`."""

    attributes = {"axes": (1, 2), "keep_dims": False}
    axis_attributes = ("axes",)
    version = 2
    options = "ReducerOptions"
    onnx_kind: ClassVar[str]

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,) = shapes
        axes = attributes["axes"]
        fits = len(set(axes)) == len(axes) > 0 and all(1 <= axis < len(first) for axis in axes)
        need(fits, f"axes must be different ones in 1..{len(first) - 1}, got {axes}")
        if attributes["keep_dims"]:
            return tuple(1 if axis in axes else size for axis, size in enumerate(first))
        return tuple(size for axis, size in enumerate(first) if axis not in axes)

    def removed_axes(self, attributes: Attributes) -> Shape:
        return () if attributes["keep_dims"] else tuple(attributes["axes"])

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> dict[str, Any]:
        return {"keepDims": bool(attributes["keep_dims"])}

    def tflite_operands(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Sequence[tuple[str, Any]]:
        return (("axes", list(attributes["axes"])),)

    def onnx(self, writer: Any, operator: Any, output: Tensor) -> None:
        (real,) = writer.operands(operator)
        before, name = len(writer.graph.tensors[operator.inputs[0]].shape), output.name
        attributes = operator.attributes
        # Axes that are left out may bring others where ONNX's order is another one.
        stay = tuple(sorted(attributes["axes"])) == (1, 2) or (before != 4 and len(output.shape) != 4)
        plain = attributes["keep_dims"] or stay
        if not plain:
            real = writer.channels_last(real, before, f"{name}/channels_last")
        axes = [writer.axis(axis, before) if plain else axis for axis in attributes["axes"]]
        operands = [real, writer.constant(f"{name}/axes", np.array(axes))]
        computed = writer.node(self.onnx_kind, operands, f"{name}/computed", keepdims=int(attributes["keep_dims"]))
        if not plain:
            computed = writer.channels_first(computed, len(output.shape), f"{name}/channels_first")
        writer.result(operator, output, computed)


def reduced_count(tensor: Tensor, attributes: Attributes) -> int:
    """How many values make one of the result."""
    return math.prod(tensor.shape[axis] for axis in attributes["axes"])


@register
class Mean(Reduction):
    """The average."""

    kind = "MEAN"
    onnx_kind = "ReduceMean"

    def real(self, primitives: Any, operands: Sequence[Any], attributes: Attributes) -> Any:
        return primitives.mean(operands[0], attributes["axes"], attributes["keep_dims"])

    def integers(
        self, codes: Arrays, inputs: Tensors, output: Tensor, attributes: Attributes, profile: str
    ) -> np.ndarray:
        count = reduced_count(inputs[0], attributes)
        axes, keep = tuple(attributes["axes"]), bool(attributes["keep_dims"])
        if is_xnnpack(profile):
            # The zero points join the float32 sum before it is rounded, so ties are even in codes, not in steps.
            multiplier = (scale_of(inputs[0]) / scale_of(output)) * (np.float32(1) / np.float32(count))
            input_zero_point, zero_point = (np.float32(zero_point_of(tensor)) for tensor in (inputs[0], output))
            offset = -(input_zero_point * np.float32(count))
            total = codes[0].sum(axes, dtype=np.int64, keepdims=keep).astype(np.float32)
            if profile == "xnnpack-arm64":  # compilers fuse there
                bias = fused_multiply_add(offset, multiplier, zero_point)
                result = fused_multiply_add(total, multiplier, bias)
            else:
                result = total * multiplier + (zero_point + offset * multiplier)
            return np.clip(np.rint(result), INT8_MIN, INT8_MAX).astype(np.int8)
        # The division by the count is folded into the multiplier, where its remainder is cut off.
        significand, exponent = fixed_point(float(scale_of(inputs[0])) / float(scale_of(output)))
        shift = min(count.bit_length() - 1, 31 + int(exponent))
        total = centered(codes[0], inputs[0]).sum(axes, keepdims=keep)
        steps = multiply_fixed_point(total, (significand << shift) // count, exponent - shift)
        return finish(steps, output, attributes, profile)
