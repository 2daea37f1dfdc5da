# SPDX-License-Identifier: Apache-2.0
"""Convolutions and products of matrices."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..core.builder import Moving
from ..core.products import of_two, with_weight
from ..core.refusals import Refused
from ..core.windows import windows
from .converter import Converter, Operation, handles
from .items import Fixed, Item


@handles("conv_general_dilated")
def _convolution(c: Converter, operation: Operation, x: Moving, kernel: Item) -> Item:
    params = operation.params
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
    out_batch, out_channels, *out_spatial = (int(axis) for axis in numbers.out_spec)
    places = {0: out_batch, channel_axis: out_channels, **dict(zip(spatial, out_spatial, strict=True))}
    shape = [operation.shape[places[axis]] for axis in range(x.rank)]
    weight = kernel.then(lambda array: jnp.transpose(array, tuple(map(int, numbers.rhs_spec))))
    groups, kind = int(params["feature_group_count"]), "conv"
    how = windows(params["window_strides"], params["padding"], params["rhs_dilation"])
    if any(dilation != 1 for dilation in params["lhs_dilation"]):
        # Zeros between the values of the operand: a transposed convolution with the kernel turned round.
        if any(stride != 1 for stride in params["window_strides"]):
            raise Refused("with strides and with zeros between the values")
        outputs, inputs, *window = weight.shape
        reach = [(side - 1) * dilation for side, dilation in zip(window, how["dilations"], strict=True)]
        cut = [(side - before, side - after) for side, (before, after) in zip(reach, how["padding"], strict=True)]
        if any(before < 0 for before, _ in cut):
            raise Refused(f"with padding {how['padding']} wider than its window")

        def turned(array: jax.Array) -> jax.Array:
            flipped = jnp.flip(array, tuple(range(2, array.ndim))).reshape(groups, outputs // groups, inputs, *window)
            return jnp.swapaxes(flipped, 1, 2).reshape(groups * inputs, outputs // groups, *window)

        kind, weight = "conv_transpose", weight.then(turned)
        how = windows(params["lhs_dilation"], [(before, max(after, 0)) for before, after in cut], how["dilations"])
        how["output_padding"] = tuple(max(-after, 0) for _, after in cut)
    result = c.emit(kind, [x, weight, None], shape, module=module, **how, groups=groups, channel_axis=channel_axis)
    return c.permute(result, sorted(places, key=places.__getitem__))


@handles("dot_general")
def _product(c: Converter, operation: Operation, *operands: Item) -> Item:
    contracted, batched = operation.params["dimension_numbers"]
    for x, weight, x_axes, weight_axes in zip(operands, operands[::-1], contracted, contracted[::-1], strict=True):
        if isinstance(weight, Fixed) and isinstance(x, Moving) and not batched[0]:
            product = with_weight(c, x, [int(axis) for axis in x_axes], weight, weight_axes, c.module_of(weight))
            if x is operands[0]:
                return product
            count = x.rank - len(x_axes)
            return c.permute(product, (*range(count, product.rank), *range(count)))
    first, second = operands
    return of_two(c, first, second, batched, contracted)
