# SPDX-License-Identifier: Apache-2.0
"""Convolutions and matrix products with weights, with the batch norm and the activation that follow."""

from __future__ import annotations

import numpy as np

from ..device.attribute import Attributes
from .maker import Coefficient, Maker
from .movement import in_all_axes, own_padding, padded, pads_itself
from .network import Constant, Step
from .planner import Planner, fused_activation, handles
from .plans import BatchNorm, Weights
from .refusals import Refused, need_separate, word
from .stored import Stored

# Transposed convolutions in groups take one weight with zeros between the groups, up to this many values.
LARGEST_DENSE_WEIGHT = 2**22


def batch_norm_of(planner: Planner, step: Step) -> BatchNorm:
    """The batch norm of a step.

    Raises:
        Refused: it has no running statistics.
    """
    if len(step.inputs) < 5 or step.inputs[3] is None or step.inputs[4] is None:
        raise Refused("batch norm without running statistics; the device needs them")
    attributes = step.attributes
    return BatchNorm(
        planner.optional(step, 1),
        planner.optional(step, 2),
        planner.constant(step, 3),
        planner.constant(step, 4),
        attributes.get("counter") or None,
        float(attributes["epsilon"]),
        attributes.get("momentum"),
        bool(attributes.get("training", True)),
        bool(attributes.get("biased", False)),
    )


def take_batch_norm(planner: Planner, channel_axis: int) -> BatchNorm | None:
    """Absorbs the batch norm that follows, if there is one over the same channels."""
    step = planner.following()
    if step is None or step.kind != "batch_norm" or step.attributes.get("channel_axis") != channel_axis:
        return None
    try:
        norm = batch_norm_of(planner, step)
    except Refused:
        return None
    planner.absorb(step)
    return norm


def take_after_reshape(planner: Planner, x_shape: tuple[int, ...], channel_axis: int) -> tuple[BatchNorm | None, str]:
    """The batch norm, and the activation after it, of a result where only the leading axes were joined or split.

    The reshape stays and reads what is already normalized.
    """
    reshape = planner.following()
    if reshape is None or reshape.kind != "reshape" or channel_axis != len(x_shape) - 1:
        return None, "NONE"
    shape = planner.shape(reshape)
    step = planner.only_reader(reshape)
    fits = step is not None and step.kind == "batch_norm" and step.attributes.get("channel_axis") == len(shape) - 1
    if step is None or not fits or shape[-1] != x_shape[-1]:
        return None, "NONE"
    try:
        norm = batch_norm_of(planner, step)
    except Refused:
        return None, "NONE"
    planner.done_before.add(step.output)
    reader = planner.only_reader(step)
    activation = "NONE" if reader is None else fused_activation(reader)
    if reader is not None and activation != "NONE":
        planner.done_before.add(reader.output)
    return norm, activation


def put(
    maker: Maker,
    kind: str,
    x: Stored,
    weight: str,
    bias: str | None,
    attributes: Attributes,
    channel_axis: int,
    weight_axis: int = 0,
) -> Stored:
    """An operator with weights, and what is fused into it."""
    planner, step = maker.planner, maker.step
    norm = take_batch_norm(planner, channel_axis)
    activation = planner.take_activation()
    if norm is None and activation == "NONE":
        norm, activation = take_after_reshape(planner, planner.shape(step), channel_axis)
    rule = maker.rule(maker.path)
    return maker.store(
        kind,
        [x],
        planner.shape(step),
        attributes=attributes,
        batch_axis=planner.batch_axis(step),
        channels=channel_axis,
        activation=activation,
        rule=rule,
        weights=Weights(weight, bias, norm, rule, weight_axis),
    )


def passes_on(planner: Planner, x: Stored, weight: float | Coefficient, bias: float | Coefficient) -> bool:
    """Whether ``weight * x + bias`` of an input, which normalizes it, becomes part of the weights that read it.

    Padding surrounds the line with zeros. x has them at -bias / weight, which must be one number within its range.
    """
    first = reader = planner.following()
    if first is None or reader is None or not any(x is planner.stored[name] for name in planner.network.inputs):
        return False
    pads = first.kind == "pad" and first.attributes.get("mode", "constant") == "constant"
    if pads:
        reader, value = planner.only_reader(first), float(first.attributes.get("value") or 0.0)
        if reader is None or not pads_itself(reader, x, first.attributes["padding"], value):
            return False
    attributes = reader.attributes
    if reader.kind == "conv":
        pads = pads or any(map(any, attributes["padding"]))
        fits = attributes["groups"] == 1 and attributes.get("padding_mode", "zeros") == "zeros"
        fits = fits and attributes["channel_axis"] == x.channels
    else:
        fits = reader.kind == "linear" and x.channels == x.rank - 1
    zero, ends = 0.0, x.grid.now.rule.fixed_range
    if fits and pads and bias != 0:
        if isinstance(weight, Coefficient) or isinstance(bias, Coefficient) or not weight or ends is None:
            return False
        zero = -bias / weight
        fits = ends[0] <= zero <= ends[1]
    if fits:
        planner.lines[str(first.inputs[0])] = weight, bias, zero
    return fits


def _of_line(
    maker: Maker, x: Stored, weight: str, bias: str | None, padding: tuple[tuple[int, int], ...] = (), axis: int = -1
) -> tuple[Stored, str, str | None, tuple[tuple[int, int], ...]]:
    """What a layer reads, its weight [out, in, ...], bias and padding where it is given a line of x, but reads x."""
    planner = maker.planner
    line = planner.lines.get(str(maker.step.inputs[0]))
    if line is None:
        return x, weight, bias, padding
    outputs, inputs, *window = planner.constants[weight].shape
    factor, offset = (
        maker.of_channels(value, (inputs, *[1] * len(window)), name)
        for value, name in zip(line[:2], ("input_factor", "input_offset"), strict=True)
    )
    if line[1] != 0:
        operands = [weight, offset, *([] if bias is None else [bias])]
        bias = maker.derived(
            "bias",
            (outputs,),
            lambda array, offset, *own: sum(own, (array * offset).reshape((outputs, -1)).sum(-1)),
            *operands,
        )
        if any(map(any, padding)):
            x = maker.pad(x, in_all_axes(x, axis, padding), "padded", line[2])
            padding = ((0, 0),) * len(padding)
    weight = maker.derived("weight", (outputs, inputs, *window), lambda array, factor: array * factor, weight, factor)
    return x, weight, bias, padding


@handles("conv")
def convolution(planner: Planner, step: Step) -> Stored:
    x, weight, bias = planner.tensor(step), planner.constant(step, 1), planner.optional(step, 2)
    attributes = step.attributes
    axis, groups = int(attributes["channel_axis"]), int(attributes["groups"])
    _need_two_spatial_axes(step, x)
    maker = Maker(planner, step, "conv")
    padding = own_padding(planner, step, x)
    mode = attributes.get("padding_mode", "zeros")
    if mode != "zeros" and any(map(any, attributes["padding"])):
        x = padded(maker.within("padded"), x, in_all_axes(x, axis, padding), mode, 0.0)
        padding = ((0, 0),) * len(padding)
    depthwise = groups > 1 and groups == x.shape[axis]
    if any(low < 0 for pair in padding for low in pair):
        raise Refused(f"{word(step)} with negative padding {padding}; crop the image with a slice")
    x, weight, bias, padding = _of_line(maker, x, weight, bias, padding, axis)
    window = {
        "strides": tuple(attributes["strides"]),
        "padding": padding,
        "dilations": tuple(attributes["dilations"]),
        "groups": groups,
        "channel_axis": axis,
    }
    return put(maker, "DEPTHWISE_CONV_2D" if depthwise else "CONV_2D", x, weight, bias, window, axis)


def _need_two_spatial_axes(step: Step, x: Stored) -> None:
    if x.rank > 4:
        raise Refused(f"{word(step)} over {x.rank - 2} axes; the device's convolutions support at most two")
    if x.rank < 3:
        raise Refused(f"{word(step)} on a tensor of shape {list(x.shape)}, which lacks a batch axis or a spatial axis")


@handles("conv_transpose")
def transposed_convolution(planner: Planner, step: Step) -> Stored:
    x, weight, bias = planner.tensor(step), planner.constant(step, 1), planner.optional(step, 2)
    attributes = step.attributes
    axis, groups = int(attributes["channel_axis"]), int(attributes.get("groups", 1))
    _need_two_spatial_axes(step, x)
    if any(size != 1 for size in attributes.get("dilations", ())):
        raise Refused(f"{word(step)} with dilation {tuple(attributes['dilations'])}; use no dilation")
    if groups > 1:
        weight = _dense(planner, step, weight, groups)
    spatial = x.rank - 2
    window = {
        "strides": tuple(attributes["strides"]),
        "padding": tuple((int(before), int(after)) for before, after in attributes["padding"]),
        "output_padding": tuple(attributes.get("output_padding", (0,) * spatial)),
        "channel_axis": axis,
    }
    return put(Maker(planner, step, "conv_transpose"), "TRANSPOSE_CONV", x, weight, bias, window, axis, weight_axis=1)


def _dense(planner: Planner, step: Step, weight: str, groups: int) -> str:
    """The weight [in, out / groups, *window] as one group's, [in, out, *window], with zeros between the groups."""
    inputs, outputs, *window = planner.constants[weight].shape
    size = inputs * outputs * groups * int(np.prod(window))
    if size > LARGEST_DENSE_WEIGHT:
        raise Refused(f"{word(step)} in {groups} groups needs a dense weight of {size} values; use fewer channels")
    ones = (1,) * len(window)
    diagonal = np.eye(groups, dtype=np.float32).reshape(groups, 1, groups, 1, *ones)
    own = planner.add_constant(f"{weight}/own_group", diagonal.shape, data=diagonal)

    def function(array: np.ndarray, own_group: np.ndarray) -> np.ndarray:
        by_group = array.reshape((groups, inputs // groups, 1, outputs, *window))
        return (by_group * own_group).reshape((inputs, groups * outputs, *window))

    return planner.derive(f"{weight}/dense", (inputs, groups * outputs, *window), function, weight, own)


@handles("linear")
def linear(planner: Planner, step: Step) -> Stored:
    x, bias = planner.tensor(step), planner.optional(step, 2)
    last = x.rank - 1
    need_separate(step, last != x.batch_axis, "over")
    maker = Maker(planner, step, "linear")
    x, weight, bias, _ = _of_line(maker, x, planner.constant(step, 1), bias)
    return put(maker, "FULLY_CONNECTED", x, weight, bias, {}, last)


@handles("matmul")
def matrix_product(planner: Planner, step: Step) -> Stored:
    first, second = (planner.read(operand) for operand in step.inputs)
    if isinstance(first, Stored) and isinstance(second, Constant) and _is_weight(second, first, -1):
        inputs, outputs = second.shape[-2:]
        maker = Maker(planner, step, "matmul")
        weight = maker.derived("weight", (outputs, inputs), lambda array: array.reshape(inputs, outputs).T, second.name)
        return put(maker, "FULLY_CONNECTED", first, weight, _take_bias(planner, outputs), {}, first.rank - 1)
    if (
        isinstance(second, Stored)
        and isinstance(first, Constant)
        and _is_weight(first, second, -2)
        and second.rank in (3, 4)
    ):
        return _over_rows(planner, step, first, second)
    if not isinstance(first, Stored) and not isinstance(second, Stored):
        raise Refused(f"{word(step)} of two operands that do not depend on the input; compute it beforehand")
    if isinstance(first, float) or isinstance(second, float):
        raise Refused(f"{word(step)} with a number; multiply by it")
    maker = Maker(planner, step, "matmul")
    a, b = (operand.name if isinstance(operand, Constant) else operand for operand in (first, second))
    return product(maker, a, b)


def _is_weight(constant: Constant, x: Stored, axis: int) -> bool:
    """Whether a constant is one matrix for all of x, over an axis that is not the batch's."""
    one = all(size == 1 for size in constant.shape[:-2])
    return len(constant.shape) <= x.rank and one and x.batch_axis < x.rank + axis


def _over_rows(planner: Planner, step: Step, constant: Constant, x: Stored) -> Stored:
    """A matrix [out, in] from the left: a 1x1 convolution whose channels are the second-to-last axis."""
    outputs, inputs = constant.shape[-2:]
    spatial = x.rank - 2
    maker = Maker(planner, step, "matmul")
    weight = maker.reshaped(constant.name, (outputs, inputs, *[1] * spatial))
    window = {
        "strides": (1,) * spatial,
        "padding": ((0, 0),) * spatial,
        "dilations": (1,) * spatial,
        "groups": 1,
        "channel_axis": x.rank - 2,
    }
    return put(maker, "CONV_2D", x, weight, None, window, x.rank - 2)


def _take_bias(planner: Planner, count: int) -> str | None:
    """Absorbs the sum with a constant of `count` values that follows, if there is one."""
    step = planner.following()
    other = step.inputs[1] if step is not None and step.kind == "add" else None
    if step is None or not isinstance(other, str) or other not in planner.constants:
        return None
    if planner.constants[other].shape != (count,):
        return None
    planner.absorb(step)
    return other


def product(
    maker: Maker,
    a: Stored | str,
    b: Stored | str,
    part: str | None = None,
    adj_y: bool = False,
    nonnegative: bool = False,
) -> Stored:
    """``a @ b``, over leading axes that broadcast; adj_y: the last two axes of b are swapped."""
    shapes = [side.shape if isinstance(side, Stored) else maker.planner.constants[side].shape for side in (a, b)]
    columns = shapes[1][-2] if adj_y else shapes[1][-1]
    lead = np.broadcast_shapes(shapes[0][:-2], shapes[1][:-2])
    rank = len(lead) + 2
    main = a if isinstance(a, Stored) else b
    assert isinstance(main, Stored)
    batch_axis = main.batch_axis + rank - main.rank
    need_separate(maker.step, batch_axis < rank - 2, "over")
    operands = [maker.aligned(side, rank, batch_axis) if isinstance(side, Stored) else side for side in (a, b)]
    shape = (*lead, shapes[0][-2], columns)
    attributes = {"adj_x": False, "adj_y": adj_y}
    return maker.store(
        "BATCH_MATMUL", operands, shape, part, attributes=attributes, batch_axis=batch_axis, channels=rank - 1,
        nonnegative=nonnegative,
    )  # fmt: skip


@handles("batch_norm")
def batch_norm(planner: Planner, step: Step) -> Stored:
    x = planner.tensor(step)
    norm = batch_norm_of(planner, step)
    activation = planner.take_activation()
    maker = Maker(planner, step, "batch_norm")
    axis = int(step.attributes["channel_axis"])
    return maker.affine(x, 1.0, 0.0, activation=activation, batch_norm=norm, channel_axis=axis)
