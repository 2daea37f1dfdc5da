# SPDX-License-Identifier: Apache-2.0
"""Operators that move codes to other positions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..device import Tensor
from ..device.arithmetic import zero_point_of
from ..device.movement import PadV2
from ..device.operator import Attributes, Call, DeviceOperator
from ..device.profile import Profile
from .elementwise import part
from .forms import RESULT, Form, KernelCall, Part, Tensors, form_of, in_one_dtype


def strides_of(shape: Sequence[int]) -> list[int]:
    """How far apart the entries of each axis are."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def move(
    position: int,
    source: Tensor,
    output: Tensor,
    sizes: Sequence[int],
    from_strides: Sequence[int],
    to_strides: Sequence[int],
    from_place: int = 0,
    to_place: int = 0,
    fill: int | None = None,
) -> KernelCall:
    """One block of each example, by all axes but the batch's."""
    plan = np.array([sizes, from_strides, to_strides], np.int64)
    numbers = {"from": int(from_place), "to": int(to_place), "fills": int(fill is not None), "fill": fill or 0}
    return KernelCall("integer_move", (part(position, source), plan), part(RESULT, output), numbers)


def serves(inputs: Tensors, output: Tensor) -> bool:
    """Activations with the batch on its own axis, and others."""
    own = all(tensor.shape[0] == 1 and len(tensor.shape) > 1 and tensor.data is None for tensor in (*inputs, output))
    return own and in_one_dtype(inputs, output)


# The most codes per example that a plan of pieces can hold in its 32 bits.
LARGEST_EXAMPLE = 2**31
# From here on numbers denote positions, below it 16-bit codes.
NUMBERS = 2**16


def rearranged(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """Any movement: running the declaration on numbers instead of codes shows where each code comes from."""
    sizes = [math.prod(tensor.shape) for tensor in inputs]
    if not in_one_dtype(inputs, output) or max(sum(sizes), math.prod(output.shape)) >= LARGEST_EXAMPLE:
        return None
    # A number below NUMBERS is a code with which the declaration fills positions.
    first = NUMBERS + np.cumsum([0, *sizes])
    numbered = [
        np.arange(begin, begin + size).reshape(tensor.shape)
        for begin, size, tensor in zip(first, sizes, inputs, strict=False)
    ]
    results = declaration.all_results(Call(numbered, inputs, [output], attributes, profile))
    calls: list[KernelCall] = []
    for number, result in enumerate(results):
        calls += pieces(result.ravel(), inputs, first, Part(RESULT - number, (-1, result.size)), output.dtype)
    return tuple(calls)


def pieces(source: np.ndarray, inputs: Tensors, first: np.ndarray, result: Part, dtype: str) -> list[KernelCall]:
    """What moves the codes of each operand to a result. source: its codes by their numbers."""
    operand = np.searchsorted(first, source, "right") - 1
    # A piece continues if the next code comes from the next position of the same operand.
    begins = np.flatnonzero(np.r_[True, (np.diff(source) != 1) | (np.diff(operand) != 0)])
    lengths = np.diff(np.r_[begins, source.size])
    calls = []
    for position in np.unique(operand):
        own = operand[begins] == position
        if position < 0:
            (code,) = np.unique(source[begins[own]])
            places = np.flatnonzero(operand < 0)
            plan = np.stack([np.zeros_like(places), places, np.ones_like(places)]).astype(np.int32)
            calls.append(KernelCall("integer_rearrange", (np.full((1, 1), code, dtype), plan), result))
            continue
        plan = np.stack([source[begins[own]] - first[position], begins[own], lengths[own]]).astype(np.int32)
        view = Part(int(position), (-1, math.prod(inputs[position].shape)))
        calls.append(KernelCall("integer_rearrange", (view, plan), result))
    return calls


for _kind in (
    "BATCH_TO_SPACE_ND",
    "BROADCAST_TO",
    "DEPTH_TO_SPACE",
    "GATHER",
    "MIRROR_PAD",
    "PACK",
    "RESIZE_NEAREST_NEIGHBOR",
    "REVERSE_V2",
    "SLICE",
    "SPACE_TO_BATCH_ND",
    "SPACE_TO_DEPTH",
    "SPLIT",
    "SPLIT_V",
    "TILE",
    "UNPACK",
):
    form_of(_kind)(rearranged)


@form_of("RESHAPE")
@form_of("EXPAND_DIMS")
@form_of("SQUEEZE")
def reshape(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """The same codes."""
    if not in_one_dtype(inputs, output):
        return None
    return (KernelCall("integer_copy", (Part(0, (-1,)),), Part(RESULT, (-1,))),)


@form_of("TRANSPOSE")
def transpose(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """Axes in another order."""
    if not serves(inputs, output):
        return rearranged(declaration, inputs, output, attributes, profile)
    strides = strides_of(inputs[0].shape)
    turned = [strides[axis] for axis in attributes["permutation"][1:]]
    return (move(0, inputs[0], output, output.shape[1:], turned, strides_of(output.shape)[1:]),)


@form_of("CONCATENATION")
def concatenation(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """Operands side by side."""
    if any(tensor.data is not None for tensor in inputs):
        return None
    if not serves(inputs, output):
        return rearranged(declaration, inputs, output, attributes, profile)
    axis, strides, calls, begin = attributes["axis"], strides_of(output.shape), [], 0
    for position, tensor in enumerate(inputs):
        own = strides_of(tensor.shape)
        # Axes from the joined one on are contiguous in both.
        sizes = [*tensor.shape[1:axis], math.prod(tensor.shape[axis:])]
        call = move(
            position, tensor, output, sizes, [*own[1:axis], 1], [*strides[1:axis], 1], to_place=begin * strides[axis]
        )
        calls.append(call)
        begin += tensor.shape[axis]
    return tuple(calls)


@form_of("STRIDED_SLICE")
def strided_slice(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """Some entries of each axis."""
    if not serves(inputs, output):
        return rearranged(declaration, inputs, output, attributes, profile)
    strides = strides_of(inputs[0].shape)
    columns = [attributes[name] for name in ("begin", "end", "steps")]
    slices = [slice(*entry).indices(size) for *entry, size in zip(*columns, inputs[0].shape, strict=True)]
    begin = sum(first * stride for (first, _, _), stride in zip(slices[1:], strides[1:], strict=True))
    stepped = [step * stride for (_, _, step), stride in zip(slices, strides, strict=True)]
    kept = [step for axis, step in enumerate(stepped) if axis not in attributes["shrink_axes"]]
    return (move(0, inputs[0], output, output.shape[1:], kept[1:], strides_of(output.shape)[1:], begin),)


@form_of("PAD")
@form_of("PADV2")
def pad(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form | None:
    """The operand inside a result filled with one code."""
    paddings = attributes["paddings"]
    if not serves(inputs, output) or any(paddings[0]):
        return None
    fill = declaration.code(output, attributes) if isinstance(declaration, PadV2) else zero_point_of(output)
    strides = strides_of(output.shape)
    begin = sum(before * stride for (before, _), stride in zip(paddings, strides, strict=True))
    own = strides_of(inputs[0].shape)[1:]
    return (move(0, inputs[0], output, inputs[0].shape[1:], own, strides[1:], to_place=begin, fill=int(fill)),)
