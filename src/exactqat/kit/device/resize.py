# SPDX-License-Identifier: Apache-2.0
"""Images of another height and width, on the same grid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from .contexts import NetworkContext, OnnxWriter
from .file_forms import InOperand, Option
from .operator import (
    REQUIRED,
    Attributes,
    Call,
    DeviceOperator,
    Operator,
    Refusal,
    Shape,
    need,
    register,
)
from .primitives import A, Array, RealPrimitives, ResultGrid
from .profile import REFERENCE, X86, Profile
from .stated_arithmetic import UNBOUNDED, Arithmetic, divided, rounded
from .tensor import INT8_MAX, INT8_MIN, Tensor, per_tensor

# XNNPACK's fractional bits of a position between two values, and those of LiteRT's own kernels.
XNNPACK_BITS = 11
BUILT_IN_BITS = 10


class Resize(DeviceOperator):
    """To `size`, one entry for each spatial axis.

    `align_corners`: the centers of the outermost values fall on each other; `half_pixel_centers`: the outer edges of
    the image do; neither: the first values do, as TensorFlow had it at first.

    Attributes:
        modes: (`align_corners`, `half_pixel_centers`) -> the mode of a network's step.
    """

    modes: ClassVar[Mapping[tuple[bool, bool], str]] = {}

    attributes = {"size": REQUIRED, "align_corners": False, "half_pixel_centers": False}
    in_file = {
        "size": InOperand(1),
        "align_corners": Option("alignCorners", bool),
        "half_pixel_centers": Option("halfPixelCenters", bool),
    }
    dtypes = ("int8", "int16")
    same_quantization = True
    floats = True
    spatial = True
    per_window_attributes = {"size": 1}
    version = 3
    wide_version = 4

    def check_attributes(self, attributes: Attributes) -> None:
        super().check_attributes(attributes)
        size = attributes["size"]
        fits = np.shape(size) == (2,) and all(1 <= entry < 2**24 for entry in size)
        need(fits, f"size must be two positive integers below 2**24, got {size}")

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,) = shapes
        need(len(first) == 4, f"input must be rank 4, got {first}")
        return (first[0], *attributes["size"], first[3])

    def real_attributes(self, inputs: Sequence[Tensor], attributes: Attributes) -> Attributes:
        return {**attributes, "channel_axis": 3}

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        (x,), (shape,), attributes = context.operands(operator), context.results(operator), operator.attributes
        same = tuple(x.shape[1:3]) == tuple(shape[1:3])
        mode = self.modes.get((bool(attributes["align_corners"]), bool(attributes["half_pixel_centers"])))
        need(same or mode is not None, f"no network has a step for {self.kind} with {dict(attributes)}")
        align = {"align_corners": bool(attributes["align_corners"]), "scales": None, "channel_axis": 3}
        size = tuple(attributes["size"])
        context.give(operator, x if same else context.step("resize", [x], shape, size=size, mode=mode, **align))

    @staticmethod
    def onnx_resize(writer: OnnxWriter, operator: Operator, output: Tensor, real: str, **attributes: object) -> str:
        name = output.name
        # Sizes of all axes: onnxruntime loses those of some (`axes`) where it moves the node in a larger graph.
        spatial = writer.constant(f"{name}/spatial", np.array(operator.attributes["size"], np.int64))
        others = writer.node("Shape", [real], f"{name}/others", start=0, end=2)
        sizes = writer.node("Concat", [others, spatial], f"{name}/sizes", axis=0)
        return str(writer.node("Resize", [real, "", "", sizes], f"{name}/resized", **attributes))


def spatial_sizes(x: Array, attributes: Attributes) -> list[tuple[int, int, int]]:
    """(axis, its size, the size wanted) in the user's order, for a plan's attributes."""
    axes = [axis for axis in range(1, len(x.shape)) if axis != attributes["channel_axis"]]
    return [(axis, int(x.shape[axis]), int(size)) for axis, size in zip(axes, attributes["size"], strict=True)]


def step_between(size: int, wanted: int, attributes: Attributes) -> np.float32:
    """Distance of two results' positions in the operand."""
    corners = int(bool(attributes["align_corners"]) and wanted > 1)
    return np.float32(size - corners) / np.float32(wanted - corners)


def exact_positions(size: int, wanted: int, attributes: Attributes) -> tuple[np.ndarray, int, int]:
    """Positions of results in fractions of a whole number, without what half pixels move them by; this number; and
    twice what they do, which is a step."""
    corners = int(bool(attributes["align_corners"]) and wanted > 1)
    common = math.gcd(wanted - corners, size - corners)
    step = 2 * (size - corners) // common
    return np.arange(wanted) * step, 2 * (wanted - corners) // common, step * bool(attributes["half_pixel_centers"])


@register
class ResizeNearestNeighbor(Resize):
    """The value whose place is next, as it is."""

    kind = "RESIZE_NEAREST_NEIGHBOR"
    asks = (("place",),)
    as_in_onnx = True
    modes = {(False, False): "nearest", (False, True): "nearest_exact"}
    options = "ResizeNearestNeighborOptions"

    def check(self, inputs: Sequence[Tensor], output: Tensor, attributes: Attributes) -> None:
        height, width = inputs[0].shape[1:3]
        # Beyond, positions in 1 / 2**16 do not fit into 32 bits.
        need(max(height, width) < 2**15, f"height and width must be below 2**15, got {height} x {width}")

    @staticmethod
    def indices(size: int, wanted: int, attributes: Attributes, profile: Profile = X86) -> np.ndarray:
        """Of the operand's values that the results take."""
        if profile.arithmetic is not None and profile.arithmetic.position_bits == UNBOUNDED:
            place, one, step = exact_positions(size, wanted, attributes)
            return np.minimum((place + step // 2 + (one // 2 if attributes["align_corners"] else 0)) // one, size - 1)
        plain = not attributes["align_corners"] and not attributes["half_pixel_centers"]
        if plain and (profile.optimized or profile.rounds_as_onnx):
            # LiteRT's own kernel, to which XNNPACK leaves it, counts in 1 / 2**16: another index beyond 256 results.
            nearest = np.arange(wanted) * ((size << 16) // wanted + 1) >> 16
            return np.minimum(nearest, size - 1)
        offset = np.float32(0.5 if attributes["half_pixel_centers"] else 0)
        position = (np.arange(wanted).astype(np.float32) + offset) * step_between(size, wanted, attributes)
        nearest = np.floor(position.astype(np.float64) + (0.5 if attributes["align_corners"] else 0))
        return np.clip(nearest, 0, size - 1).astype(np.int64)

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        (x,) = operands
        attributes = {**self.attributes, **attributes}
        for axis, size, wanted in spatial_sizes(x, attributes):
            x = primitives.gather(x, self.indices(size, wanted, attributes), axis)
        return x

    def integers(self, call: Call) -> np.ndarray:
        height, width = call.attributes["size"]
        rows = self.indices(call.inputs[0].shape[1], height, call.attributes, call.profile)
        columns = self.indices(call.inputs[0].shape[2], width, call.attributes, call.profile)
        return call.codes[0][:, rows[:, None], columns]

    def stated(self, call: Call, arithmetic: Arithmetic) -> np.ndarray | None:
        return self.integers(call) if arithmetic.position_bits == UNBOUNDED else None

    def wide_integers(self, call: Call) -> np.ndarray:
        return self.integers(replace(call, profile=REFERENCE))

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        # ONNX places its half pixels half a pixel further up, and rounds where TensorFlow cuts off.
        attributes = operator.attributes
        source = writer.graph.tensors[operator.inputs[0]]
        repeated = all(output.shape[axis] % source.shape[axis] == 0 for axis in (1, 2))
        if attributes["align_corners"] or not repeated:
            # Runtimes round positions in ways of their own, so the places are a constant.
            (real,) = writer.operands(operator)
            shape = source.shape
            for axis, word in ((1, "rows"), (2, "columns")):
                indices = self.indices(shape[axis], output.shape[axis], attributes)
                constant = writer.constant(f"{output.name}/{word}", indices)
                real = writer.node("Gather", [real, constant], f"{output.name}/taken_{word}", axis=axis + 1)
            writer.result(operator, output, real)
            return
        mode, rounding = "asymmetric", "floor"
        if attributes["half_pixel_centers"]:
            mode, rounding = "half_pixel", "round_prefer_ceil"
        words = {"mode": "nearest", "coordinate_transformation_mode": mode, "nearest_mode": rounding}
        (real,) = writer.operands(operator)
        writer.result(operator, output, self.onnx_resize(writer, operator, output, real, **words))


@register
class ResizeBilinear(Resize):
    """Between the four values around a place, in proportion to their distance."""

    kind = "RESIZE_BILINEAR"
    real_in_onnx = True
    asks = (("position",),)
    modes = {(False, True): "bilinear", (True, False): "bilinear"}
    options = "ResizeBilinearOptions"

    def check_attributes(self, attributes: Attributes) -> None:
        super().check_attributes(attributes)
        both = attributes["align_corners"] and attributes["half_pixel_centers"]
        need(not both, "align_corners and half_pixel_centers cannot be combined")

    @staticmethod
    def positions(size: int, wanted: int, attributes: Attributes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(index of the value before, of the one after, share of the latter), of results along an axis."""
        step = step_between(size, wanted, attributes)
        position = np.arange(wanted).astype(np.float32) * step
        if attributes["half_pixel_centers"]:
            position = position + (np.float32(0.5) * step - np.float32(0.5))
        position = np.clip(position, np.float32(0), np.float32(size - 1))
        before = position.astype(np.int64)
        return before, np.minimum(before + 1, size - 1), position - before.astype(np.float32)

    @classmethod
    def neighbors(cls, size: int, wanted: int, attributes: Attributes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Likewise, the share in 1 / 2**11, as XNNPACK rounds it."""
        before, after, share = cls.positions(size, wanted, attributes)
        return before, after, np.rint(share * np.float32(2**XNNPACK_BITS)).astype(np.int64)

    @staticmethod
    def built_in_neighbors(size: int, wanted: int, attributes: Attributes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Likewise in 1 / 2**10, as LiteRT's integer kernel forms them: the step itself is rounded."""
        one = 2**BUILT_IN_BITS
        corners = int(bool(attributes["align_corners"]) and wanted > 1)
        step = (one * (size - corners) + (wanted - corners) // 2) // (wanted - corners)
        position = np.arange(wanted) * step + (step // 2 - one // 2 if attributes["half_pixel_centers"] else 0)
        # The rounded steps add up, and the kernel does not look at this end.
        need(int(position.max()) < one * size, f"the built-in kernel reads past {size} values for {wanted} results")
        before = np.maximum(position // one, 0)
        after = np.clip(-(-position // one), 0, size - 1)
        return before, after, position - one * before

    def may_end_the_process(self, inputs: Sequence[Tensor], attributes: Attributes, profile: Profile) -> bool:
        if (profile.delegates or profile.rounds_as_onnx) and inputs[0].dtype == "int8":
            return False
        try:
            for size, wanted in zip(inputs[0].shape[1:3], attributes["size"], strict=True):
                self.built_in_neighbors(size, wanted, attributes)
        except Refusal:
            return True
        return False

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        (x,) = operands
        return self.between(primitives, x, attributes, self.positions)

    def real_on_grid(
        self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes, grid: ResultGrid[A]
    ) -> A | None:
        # Results of doubled images are often exactly between two codes, so another rounding would show.
        (x,) = operands
        codes = primitives.round(x / grid.scale)
        return primitives.floor(self.between(primitives, codes, attributes, self.neighbors) + 0.5) * grid.scale

    def between(self, primitives: RealPrimitives[A], x: A, attributes: Attributes, neighbors: Any) -> A:
        """Along one spatial axis after the other, the last one first, as XNNPACK does it."""
        attributes = {**self.attributes, **attributes}
        for axis, size, wanted in reversed(spatial_sizes(x, attributes)):
            before, after, share = neighbors(size, wanted, attributes)
            share = share / 2**XNNPACK_BITS if share.dtype.kind == "i" else share
            shape = [wanted if position == axis else 1 for position in range(len(x.shape))]
            share = primitives.array(share.astype(np.float32).reshape(shape), x)
            first = primitives.gather(x, before, axis)
            x = first + (primitives.gather(x, after, axis) - first) * share
        return x

    def integers(self, call: Call) -> np.ndarray:
        if call.profile.rounds_as_onnx and call.output.dtype == "int8":
            if call.profile.unsigned:  # of others' QOperator files, and cut off
                codes = self.in_float32(replace(call, codes=[call.codes[0].astype(np.float32) - INT8_MIN]))
                return (np.floor(codes) + INT8_MIN).astype(np.int8)
            steps = np.rint(self.in_float32(call) * np.float32(1 + 2**-20))
            return np.clip(steps, INT8_MIN, INT8_MAX).astype(np.int8)
        bits = XNNPACK_BITS if call.profile.delegates else BUILT_IN_BITS
        neighbors = self.neighbors if call.profile.delegates else self.built_in_neighbors
        x = call.codes[0].astype(np.int64)
        for axis in (2, 1):
            before, after, share = neighbors(x.shape[axis], call.output.shape[axis], call.attributes)
            share = share.reshape([-1 if position == axis else 1 for position in range(4)])
            x = x.take(before, axis) * (2**bits - share) + x.take(after, axis) * share
        if call.profile.delegates:
            return ((x + 2 ** (2 * bits - 1)) >> 2 * bits).astype(np.int8)
        magnitude = (np.abs(x) + 2 ** (2 * bits - 1)) >> 2 * bits
        return np.where(x > 0, magnitude, -magnitude).astype(call.output.dtype)

    def stated(self, call: Call, arithmetic: Arithmetic) -> np.ndarray:
        bits, zero = arithmetic.position_bits, int(call.output.quantization.zero_point[0])
        zero = zero if arithmetic.zero_point == "after" else 0
        x: np.ndarray = call.codes[0].astype(np.int64) - zero
        x, ones = x if bits else x.astype(np.float32), 1
        for axis in (2, 1):
            size, wanted, one = x.shape[axis], call.output.shape[axis], 2**bits
            if bits == UNBOUNDED:
                place, one, step = exact_positions(size, wanted, call.attributes)
                place = place + (step // 2 - one // 2 if step else 0)
                before, share = np.divmod(np.clip(place, 0, one * (size - 1)), one)
                after = np.minimum(before + 1, size - 1)
            else:
                before, after, share = self.positions(size, wanted, call.attributes)
                share = share if not bits else rounded(share.astype(np.float64) * one, "half_even").astype(np.int64)
            share = share.reshape([-1 if position == axis else 1 for position in range(4)])
            x, ones = x.take(before, axis) * (x.dtype.type(one) - share) + x.take(after, axis) * share, ones * one
        if bits == UNBOUNDED:
            whole = arithmetic.rescale(x, 1 / ones)
        else:
            rounding = arithmetic.roundings[-1]
            whole = divided(x, ones, rounding) if bits else rounded(x.astype(np.float64), rounding)
        return (whole + zero).astype(call.output.dtype)

    def float_results(self, call: Call) -> np.ndarray:
        return self.in_float32(call) if call.profile.rounds_as_onnx else super().float_results(call)

    def in_float32(self, call: Call) -> np.ndarray:
        """As onnxruntime does, of codes or real numbers: four products, added one after the other."""
        x, total = call.codes[0].astype(np.float32), np.zeros((), np.float32)
        axes = [self.distances(x.shape[axis], call.output.shape[axis], call.attributes) for axis in (1, 2)]
        (top, bottom, to_top, to_bottom), (left, right, to_left, to_right) = axes
        to_top, to_bottom = to_top[:, None, None], to_bottom[:, None, None]
        to_left, to_right = to_left[:, None], to_right[:, None]
        for rows, columns, share in (
            (top, left, to_right * to_bottom),
            (top, right, to_left * to_bottom),
            (bottom, left, to_right * to_top),
            (bottom, right, to_left * to_top),
        ):
            total = total + share * x[:, rows[:, None], columns]
        return np.asarray(total)

    @staticmethod
    def distances(size: int, wanted: int, attributes: Attributes) -> tuple[np.ndarray, ...]:
        """(index of the value before, of the one after, distance to either), of results along an axis."""
        scale = np.float32(wanted) / np.float32(size)
        place = np.arange(wanted).astype(np.float32)
        if attributes["align_corners"]:
            position = place * np.float32(size - 1) / np.float32(wanted - 1) if wanted > 1 else place * 0
        elif attributes["half_pixel_centers"]:
            position = (place + np.float32(0.5)) / scale - np.float32(0.5)
        else:
            position = place / scale
        position = np.clip(position.astype(np.float32), np.float32(0), np.float32(size - 1))
        before = np.minimum(position.astype(np.int64), size - 1)
        after = np.minimum(before + 1, size - 1)
        to_before, to_after = (np.abs(position - index.astype(np.float32)) for index in (before, after))
        half = np.float32(0.5)
        return before, after, np.where(before == after, half, to_before), np.where(before == after, half, to_after)

    def wide_integers(self, call: Call) -> np.ndarray:
        return self.integers(replace(call, profile=REFERENCE))

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        attributes = operator.attributes
        mode = "align_corners" if attributes["align_corners"] else "asymmetric"
        mode = "half_pixel" if attributes["half_pixel_centers"] else mode
        # The codes themselves, and a factor after it: onnxruntime's kernel for integers does not round but cuts off.
        grid = per_tensor(1.0, 0, output.dtype)
        codes = writer.dequantize(f"{operator.inputs[0]}/codes", grid, f"{output.name}/counted")
        words = {"mode": "linear", "coordinate_transformation_mode": mode}
        resized = self.onnx_resize(writer, operator, output, codes, **words)
        above_one = writer.constant("above_one", np.float32(1 + 2**-20))
        computed = writer.node("Mul", [resized, above_one], f"{output.name}/computed")
        parameters = writer.parameters(f"{output.name}/counted", grid)
        codes = writer.node("QuantizeLinear", [computed, *parameters], f"{output.name}/codes")
        writer.dequantize(codes, output.quantization, output.name)
