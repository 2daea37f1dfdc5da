# SPDX-License-Identifier: Apache-2.0
"""What operators do along an axis that is time, so that a network can run on a few frames at a time.

`in_time` says it of any operator, by its declaration: which frames of an operand make a frame of the result, and with
which attributes the operator computes the same frames of a piece of the sequence. `deploy.stream` builds on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

from .activation import HardSwish, PRelu, Unary
from .arithmetic import Tensors, same_padding, zero_point_of
from .conditions import Choice, Condition
from .convolution import Convolution
from .elementwise import VECTOR, Add, Binary, OfOneOperand
from .embedding import Embedding
from .floating import Dequantize, FloatBinary, FloatUnary
from .matrix import BatchMatrixMultiply, FullyConnected
from .movement import Concatenation, Gather, MirrorPad, Pad, PadV2, Reshape, StridedSlice, Transpose
from .normalization import AlongAxis
from .operator import Attributes, DeviceOperator, Refusal, Shape, is_wide, need
from .pooling import MaxPool2D, Pool
from .quantize import Quantize
from .rearrangement import Parts, Reshaped, Slice
from .recurrent import UnidirectionalSequenceLstm
from .reduction import ArgMax, OverAxes
from .tensor import Tensor, code_range

# Values that HARD_SWISH takes at a time on ARM.
HARD_SWISH_VECTOR = 8
# The axis of time of each operand; None: it has none.
Axes = Sequence[int | None]


@dataclass(frozen=True)
class InTime:
    """What an operator does along time: frame t of its result is made of `reach` frames of its operand, from frame
    t * stride - before on.

    Attributes:
        axis: of the results, that is time; None: one result is made of all frames.
        reach, stride, before: as above.
        fill: the code of the frames in front of the first one; None: no result reads them.
        piece: the attributes for a part of the sequence, of the operand's number of frames and the result's. In front
            of it and after it nothing is padded.
        around: (before, after) for every axis, which the operator does by itself on the whole sequence and no longer in
            a piece: real 0, or what is below all values.
        below_all: the latter.
        only: the first frame and the one after the last that a result of all frames reads.
        pads: frames are padded, and nothing else is done along time.
        keeps_zero: a frame of real 0 becomes a frame of real 0.
        broadcasts: operands without time have one value along it.
        joins: the operands follow each other along time.
        remembers: variables hold what the operator knows of earlier frames.
    """

    axis: int | None
    reach: int = 1
    stride: int = 1
    before: int = 0
    fill: int | None = None
    piece: Callable[[int, int], Attributes] | None = None
    around: tuple[tuple[int, int], ...] = ()
    below_all: bool = False
    only: tuple[int, int] | None = None
    pads: bool = False
    keeps_zero: bool = False
    broadcasts: bool = False
    joins: bool = False
    remembers: bool = False

    def attributes(self, whole: Attributes, frames: int, results: int) -> Attributes:
        """Those for a piece of so many frames, which make so many of the result."""
        return whole if self.piece is None else self.piece(frames, results)


@singledispatch
def in_time(operator: DeviceOperator, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes) -> InTime:
    """What an operator does along time.

    Args:
        operator: its declaration.
        inputs, outputs, attributes: of the whole sequence.
        axes: the axis of time of each operand; None: it has none.

    Raises:
        Refusal: it is not computed frame by frame.
    """
    raise Refusal("it is not computed frame by frame")


def time_of(axes: Axes) -> int:
    """The axis of time, which all operands that have time share."""
    candidates = {axis for axis in axes if axis is not None}
    need(len(candidates) == 1, f"its operands have time along different axes: {sorted(candidates)}")
    return candidates.pop()


def others_than(touched: Sequence[int], axis: int, what: str) -> None:
    """Refuses what happens along time."""
    need(axis not in touched, f"it {what} along time, so that a frame depends on later ones")


def replaced(values: Sequence[Any], axis: int, value: object) -> tuple[Any, ...]:
    """The values with another one at an axis."""
    return tuple(value if at == axis else entry for at, entry in enumerate(values))


def frame_size(tensor: Tensor, axis: int) -> int:
    """How many values a frame has."""
    return math.prod(tensor.shape) // tensor.shape[axis]


# --- value by value -------------------------------------------------------------------------------------------------


@in_time.register(Unary)
@in_time.register(OfOneOperand)
@in_time.register(Binary)
@in_time.register(PRelu)
@in_time.register(Condition)
@in_time.register(Choice)
@in_time.register(FloatUnary)
@in_time.register(FloatBinary)
def _(operator: DeviceOperator, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes) -> InTime:
    return InTime(time_of(axes), broadcasts=True)


def need_whole_vectors(output: Tensor, axis: int, vector: int, who: str) -> None:
    """Refuses frames with values that would be rounded otherwise than in the whole sequence."""
    size = frame_size(output, axis)
    message = f"{who} at a time and rounds what is left otherwise, so a frame must have a multiple of {vector} values"
    need(size % vector == 0, f"{message}, not {size}")


@in_time.register
def _(operator: Add, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes) -> InTime:
    axis = time_of(axes)
    if operator.in_vectors and is_wide(inputs, outputs[0]):
        need_whole_vectors(outputs[0], axis, VECTOR, f"LiteRT adds {VECTOR} values of int16")
    return InTime(axis, broadcasts=True)


@in_time.register
def _(operator: HardSwish, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes) -> InTime:
    axis = time_of(axes)
    need_whole_vectors(outputs[0], axis, HARD_SWISH_VECTOR, f"ARM takes {HARD_SWISH_VECTOR} values")
    return InTime(axis)


@in_time.register(Quantize)
@in_time.register(Dequantize)
def _(operator: DeviceOperator, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes) -> InTime:
    return InTime(time_of(axes), keeps_zero=True)


@in_time.register
def _(operator: Embedding, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes) -> InTime:
    return InTime(time_of(axes))


# --- movement -------------------------------------------------------------------------------------------------------


@in_time.register(Pad)
@in_time.register(PadV2)
def _(operator: Pad | PadV2, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes) -> InTime:
    axis, paddings = time_of(axes), attributes["paddings"]
    fill = operator.code(outputs[0], attributes) if isinstance(operator, PadV2) else zero_point_of(outputs[0])

    def piece(frames: int, results: int) -> Attributes:
        return {**attributes, "paddings": replaced(paddings, axis, (0, 0))}

    before, after = paddings[axis]
    zero = fill == zero_point_of(outputs[0])
    return InTime(axis, before=before, fill=fill, piece=piece, pads=before + after > 0, keeps_zero=zero)


@in_time.register
def _(operator: MirrorPad, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes) -> InTime:
    axis = time_of(axes)
    others_than([at for at, pair in enumerate(attributes["paddings"]) if any(pair)], axis, "mirrors frames")
    return InTime(axis)


@in_time.register
def _(operator: Concatenation, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes) -> InTime:
    axis = time_of(axes)
    return InTime(axis, joins=attributes["axis"] == axis)


@in_time.register(Reshape)
@in_time.register(Reshaped)
def _(operator: DeviceOperator, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes) -> InTime:
    axis, before, after = time_of(axes), inputs[0].shape, outputs[0].shape
    place = axis_after_reshape(before, axis, after)
    if place is None:
        sizes = [[size for size in shape if size != 1] for shape in (before, after)]
        joined = len(sizes[1]) < len(sizes[0]) or len(sizes[0]) <= 1
        need(joined, f"it cuts frames into pieces: {list(before)} becomes {list(after)}, and axis {axis} is time")
        return InTime(None)
    together = before[axis] // after[place]

    def piece(frames: int, results: int) -> Attributes:
        if "new_shape" not in attributes:
            return attributes
        return {**attributes, "new_shape": replaced(after, place, results)}

    return InTime(place, reach=together, stride=together, piece=piece, keeps_zero=together == 1)


def axis_after_reshape(before: Shape, axis: int, after: Shape) -> int | None:
    """The axis of the result that is time; several frames may become one. None: time is joined with other axes."""
    ahead, size = math.prod(before[:axis]), before[axis]
    places = [at for at in range(len(after)) if math.prod(after[:at]) == ahead]
    same = [at for at in places if after[at] == size and (at > 0 or axis == 0 or size > 1)]
    if same:
        return same[0]
    # The frames that follow each other in one must still be apart from the other axes' values.
    fewer = [at for at in places if 1 < after[at] < size and size % after[at] == 0]
    return fewer[0] if fewer else None


@in_time.register
def _(operator: Transpose, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes) -> InTime:
    return InTime(tuple(attributes["permutation"]).index(time_of(axes)), keeps_zero=True)


@in_time.register
def _(operator: StridedSlice, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes) -> InTime:
    axis = time_of(axes)
    begin, end, step = (attributes[name][axis] for name in ("begin", "end", "steps"))
    shrunk = attributes["shrink_axes"]
    if axis in shrunk:

        def single(frames: int, results: int) -> Attributes:
            columns = (("begin", 0), ("end", 1))
            return {**attributes, **{name: replaced(attributes[name], axis, value) for name, value in columns}}

        return InTime(None, only=(begin, begin + 1), piece=single)
    result = axis - sum(gone < axis for gone in shrunk)
    if (begin, step) == (0, 1) and end in (None, inputs[0].shape[axis]):
        return InTime(
            result, piece=lambda frames, _: {**attributes, "end": replaced(attributes["end"], axis, frames)},
            keeps_zero=True,
        )  # fmt: skip

    def piece(frames: int, results: int) -> Attributes:
        columns = (("begin", 0), ("end", frames))
        return {**attributes, **{name: replaced(attributes[name], axis, value) for name, value in columns}}

    return InTime(result, stride=step, before=-begin, piece=piece)


@in_time.register
def _(operator: Slice, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes) -> InTime:
    axis = time_of(axes)

    def piece(frames: int, results: int) -> Attributes:
        return {
            "begin": replaced(attributes["begin"], axis, 0),
            "size": replaced(attributes["size"], axis, -1),
        }

    begin = attributes["begin"][axis]
    whole = begin == 0 and outputs[0].shape[axis] == inputs[0].shape[axis]
    return InTime(axis, before=-begin, piece=piece, keeps_zero=whole)


@in_time.register
def _(operator: Gather, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes) -> InTime:
    axis = time_of(axes)
    others_than([attributes["axis"]], axis, "gathers frames")
    return InTime(axis, keeps_zero=True)


@in_time.register
def _(operator: Parts, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes) -> InTime:
    axis, along = time_of(axes), attributes["axis"]
    others_than([along], axis, "is split")
    gone = len(outputs[0].shape) < len(inputs[0].shape)
    return InTime(axis - (gone and along < axis), keeps_zero=True)


# --- windows --------------------------------------------------------------------------------------------------------


def window_in_time(
    size: Sequence[int], inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes, fill: int
) -> InTime:
    """A window of that height and width that slides over images [batch, height, width, channels].

    fill: the code that is around an image.
    """
    axis = time_of(axes)
    need(axis != 3, "it sums over time as over channels; is time another axis of the input (axis=)?")
    if axis == 0:
        return InTime(0)
    at = axis - 1
    strides, dilations = attributes["strides"], attributes.get("dilations", (1, 1))
    reach = (size[at] - 1) * dilations[at] + 1
    pads = [(0, 0), (0, 0)]
    if attributes["padding"] == "SAME":
        pads = [same_padding(*sizes) for sizes in zip(inputs[0].shape[1:3], size, strides, dilations, strict=True)]
    if not any(pads[at]):  # SAME pads no piece either
        return InTime(axis, reach=reach, stride=strides[at])
    beside = replaced(pads, at, (0, 0))
    around = ((0, 0), *beside, (0, 0)) if any(map(any, beside)) else ()
    return InTime(
        axis, reach=reach, stride=strides[at], before=pads[at][0], fill=fill,
        piece=lambda frames, results: {**attributes, "padding": "VALID"}, around=around,
    )  # fmt: skip


@in_time.register
def _(operator: Convolution, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes) -> InTime:
    size = inputs[1].shape[1:3]
    return window_in_time(size, inputs, outputs, attributes, axes, zero_point_of(inputs[0]))


@in_time.register
def _(operator: Pool, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes) -> InTime:
    lowest, _ = code_range(inputs[0]) if inputs[0].dtype in ("int8", "int16") else (0, 0)
    window = window_in_time(attributes["filter_size"], inputs, outputs, attributes, axes, lowest)
    if isinstance(operator, MaxPool2D):
        return replace(window, below_all=True)
    need(
        window.fill is None, "it does not count what it pads, so the first frames are means of fewer values: pad before"
    )
    return window


# --- along one axis, or all of it -----------------------------------------------------------------------------------


@in_time.register
def _(operator: AlongAxis, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes) -> InTime:
    axis = time_of(axes)
    others_than([len(inputs[0].shape) - 1], axis, "weighs frames against each other")
    return InTime(axis)


@in_time.register(OverAxes)
@in_time.register(ArgMax)
def _(operator: DeviceOperator, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes) -> InTime:
    axis = time_of(axes)
    touched: Sequence[int] = attributes["axes"] if "axes" in attributes else (attributes["axis"],)
    if axis in touched:
        return InTime(None)
    return InTime(axis - sum(gone < axis for gone in operator.removed_axes(attributes)))


@in_time.register
def _(operator: FullyConnected, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes) -> InTime:
    axis, shape = time_of(axes), inputs[0].shape
    if axis == len(shape) - 1:
        return InTime(None)
    if attributes["keep_axes"]:
        return InTime(axis)
    rows = shape[:axis] + shape[axis + 1 : -1]
    if shape[-1] == inputs[1].shape[1] and all(size == 1 for size in rows):
        return InTime(0)
    need(outputs[0].shape[0] == 1, "its rows are made of parts of several frames")
    return InTime(None)


@in_time.register
def _(operator: BatchMatrixMultiply, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes) -> InTime:
    rank = len(outputs[0].shape)
    # Of each operand: the axes of its rows or columns in the result, and of what is summed.
    own = [(rank - 1, rank - 2) if attributes[name] else (rank - 2, rank - 1) for name in ("adj_x", "adj_y")]
    own[1] = own[1][::-1]
    if all(axis is not None for axis in axes):
        axis = time_of(axes) if axes[0] == axes[1] else rank
        need(axis < rank - 2, "it multiplies frames with frames, as attention does, so a frame depends on later ones")
        return InTime(axis)
    position = 0 if axes[1] is None else 1
    kept, summed = own[position]
    axis = time_of(axes)
    if axis == summed:
        return InTime(None)
    return InTime((rank - 2 + position) if axis == kept else axis)


@in_time.register
def _(
    operator: UnidirectionalSequenceLstm, inputs: Tensors, outputs: Tensors, attributes: Attributes, axes: Axes
) -> InTime:
    axis = time_of(axes)
    need(axis == 1, f"its sequence is along axis 1, and time along {axis}")
    return InTime(1, remembers=True)


def time_axis_sizes(tensor: Tensor, axis: int, rank: int) -> tuple[int, int]:
    """Of an operand that broadcasts to `rank` axes: its own axis for an axis of the result, and its size there, 1 where
    it has none."""
    own = axis - (rank - len(tensor.shape))
    return own, tensor.shape[own] if own >= 0 else 1
