# SPDX-License-Identifier: Apache-2.0
"""Convolutions and products of matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .converter import Converter, handles
from .items import Fixed, Item, Moving, Refused


@handles("conv_general_dilated")
def _convolution(c: Converter, equation: Any, operands: list[Any]) -> Item:
    x, kernel = operands
    params = equation.params
    numbers = params["dimension_numbers"]
    if not isinstance(kernel, Fixed) or not isinstance(x, Moving):
        raise Refused("its kernel depends on the input; the device's weights are fixed")
    if params["batch_group_count"] != 1:
        raise Refused("with groups of examples")
    module = c.module_of(kernel)
    batch, channel_axis, *spatial = (int(axis) for axis in numbers.lhs_spec)
    if batch != 0 or spatial != sorted(spatial):
        order = [batch, channel_axis, *spatial]
        x, channel_axis, spatial = c.permute(x, order), 1, list(range(2, len(order)))
        assert isinstance(x, Moving)
    if c.batch_axis(x.shape) != 0:
        raise Refused("over the batch")
    rhs = tuple(int(axis) for axis in numbers.rhs_spec)
    out_batch, out_channels, *out_spatial = (int(axis) for axis in numbers.out_spec)
    traced = equation.outvars[0].aval.shape
    shape = [0] * len(traced)
    shape[0], shape[channel_axis] = traced[out_batch], traced[out_channels]
    for here, there in zip(spatial, out_spatial, strict=True):
        shape[here] = traced[there]
    weight = kernel.then(lambda array: jnp.transpose(array, rhs))
    groups = int(params["feature_group_count"])
    padding = tuple((int(before), int(after)) for before, after in params["padding"])
    if any(each != 1 for each in params["lhs_dilation"]):
        made = _transposed(c, params, x, weight, groups, padding, channel_axis, shape, module)
    else:
        made = c.emit(
            "conv",
            [x, weight, None],
            shape,
            module=module,
            strides=tuple(int(each) for each in params["window_strides"]),
            padding=padding,
            dilations=tuple(int(each) for each in params["rhs_dilation"]),
            groups=groups,
            channel_axis=channel_axis,
            padding_mode="zeros",
        )
    back = [0] * len(traced)
    back[out_batch], back[out_channels] = 0, channel_axis
    for here, there in zip(spatial, out_spatial, strict=True):
        back[there] = here
    return c.permute(made, back)


def _transposed(
    c: Converter,
    params: Any,
    x: Moving,
    weight: Fixed,
    groups: int,
    padding: Sequence[tuple[int, int]],
    channel_axis: int,
    shape: Sequence[int],
    module: str,
) -> Moving:
    """Zeros between the values of the operand: a transposed convolution with the kernel turned round."""
    if any(each != 1 for each in params["window_strides"]):
        raise Refused("with strides and with zeros between the values")
    outputs, inputs, *window = weight.shape
    dilations = tuple(int(each) for each in params["rhs_dilation"])
    reach = [(side - 1) * dilation for side, dilation in zip(window, dilations, strict=True)]
    cut = [(side - before, side - after) for side, (before, after) in zip(reach, padding, strict=True)]
    if any(before < 0 for before, _ in cut):
        raise Refused(f"with padding {tuple(padding)} wider than its window")

    def turned(array: Any) -> Any:
        flipped = jnp.flip(array, tuple(range(2, array.ndim))).reshape(groups, outputs // groups, inputs, *window)
        return jnp.swapaxes(flipped, 1, 2).reshape(groups * inputs, outputs // groups, *window)

    return c.emit(
        "conv_transpose",
        [x, weight.then(turned), None],
        shape,
        module=module,
        strides=tuple(int(each) for each in params["lhs_dilation"]),
        padding=tuple((before, max(after, 0)) for before, after in cut),
        output_padding=tuple(max(-after, 0) for _, after in cut),
        dilations=dilations,
        groups=groups,
        channel_axis=channel_axis,
    )


@handles("dot_general")
def _product(c: Converter, equation: Any, operands: list[Any]) -> Item:
    (contracted, batched), shape = equation.params["dimension_numbers"], equation.outvars[0].aval.shape
    first, second = operands
    (first_axes, second_axes), (first_batch, second_batch) = contracted, batched
    if isinstance(second, Fixed) and not first_batch:
        return _linear(c, first, first_axes, second, second_axes, shape, weight_first=False)
    if isinstance(first, Fixed) and not first_batch:
        return _linear(c, second, second_axes, first, first_axes, shape, weight_first=True)
    a, free_a = _matrix(c, first, first_batch, first_axes, last=True)
    b, free_b = _matrix(c, second, second_batch, second_axes, last=False)
    lead = [item.shape[axis] for item, axis in _leading(first, first_batch, second, second_batch)]
    made: Item = c.emit("matmul", [a, b], [*lead, math.prod(free_a), math.prod(free_b)])
    return c.reshape(made, shape)


def _leading(first: Item, first_batch: Any, second: Item, second_batch: Any) -> list[tuple[Item, int]]:
    """The operand that tells the traced size of each leading axis."""
    if isinstance(first, Moving):
        return [(first, int(axis)) for axis in first_batch]
    return [(second, int(axis)) for axis in second_batch]


def _linear(
    c: Converter,
    x: Moving,
    axes: Sequence[int],
    weight: Fixed,
    weight_axes: Sequence[int],
    shape: Sequence[int],
    weight_first: bool,
) -> Item:
    """A product with a weight, over any axes of a value."""
    module = c.module_of(weight)
    if c.batch_axis(x.shape) in axes:
        raise Refused("over the batch; every example is computed by itself")
    kept = [axis for axis in range(x.rank) if axis not in axes]
    outputs = [axis for axis in range(len(weight.shape)) if axis not in weight_axes]
    sizes = [weight.shape[axis] for axis in outputs]
    inputs = math.prod(x.shape[axis] for axis in axes)
    order = (*outputs, *(int(axis) for axis in weight_axes))
    matrix = weight.then(lambda array: jnp.transpose(array, order).reshape(math.prod(sizes), inputs))
    lead = [x.shape[axis] for axis in kept]
    rows = c.reshape(c.permute(x, (*kept, *(int(axis) for axis in axes))), (*lead, inputs))
    made: Item = c.emit("linear", [rows, matrix, None], [*lead, math.prod(sizes)], module=module)
    made = c.reshape(made, [*lead, *sizes])
    if weight_first:
        made = c.permute(made, (*range(len(lead), len(lead) + len(sizes)), *range(len(lead))))
    return made


def _matrix(c: Converter, item: Item, batch: Sequence[int], contracted: Sequence[int], last: bool) -> Any:
    """[batch, free, contracted] or [batch, contracted, free], and the sizes of the free axes."""
    batch, contracted = tuple(map(int, batch)), tuple(map(int, contracted))
    free = [axis for axis in range(len(item.shape)) if axis not in (*batch, *contracted)]
    parts = (free, list(contracted)) if last else (list(contracted), free)
    order = [*batch, *parts[0], *parts[1]]
    lead = [item.shape[axis] for axis in batch]
    sizes = [math.prod(item.shape[axis] for axis in part) for part in parts]
    free_sizes = [item.shape[axis] for axis in free]
    if isinstance(item, Moving) and c.batch_axis(item.shape) not in batch:
        raise Refused("over the batch; every example is computed by itself")
    return c.reshape(c.permute(item, order), [*lead, *sizes]), free_sizes
