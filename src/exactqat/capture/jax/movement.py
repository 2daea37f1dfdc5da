# SPDX-License-Identifier: Apache-2.0
"""Primitives that move values, repeat them or put others beside them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core.builder import Moving
from ..core.refusals import Refused
from .converter import LONGEST_LOOP, Converter, handles
from .items import Fixed, Item


@handles("reshape")
def _reshape(c: Converter, equation: Any, operands: list[Any]) -> Item:
    return c.reshape(operands[0], equation.outvars[0].aval.shape)


@handles("squeeze", "expand_dims")
def _squeeze(c: Converter, equation: Any, operands: list[Any]) -> Item:
    return _with_kept_axes(c, operands[0], tuple(equation.outvars[0].aval.shape))


def _with_kept_axes(c: Converter, x: Item, shape: tuple[int, ...]) -> Item:
    """A reshape; one that only puts axes of size 1 back where a reduction dropped them is the reduction's own."""
    for kind in ("sum", "amax", "amin", "mean"):
        made = c.made_from(x, kind)
        if made is None or made[0].attributes["keep_dims"]:
            continue
        step, source = made
        kept = tuple(1 if axis in step.attributes["axes"] else size for axis, size in enumerate(source.shape))
        if kept == shape:
            return c.emit(kind, [source], shape, axes=step.attributes["axes"], keep_dims=True)
    return c.reshape(x, shape)


@handles("broadcast_in_dim")
def _broadcast(c: Converter, equation: Any, operands: list[Any]) -> Item:
    x, shape = operands[0], tuple(equation.outvars[0].aval.shape)
    places = equation.params["broadcast_dimensions"]
    if x.comparison is not None:
        return x if x.shape == shape else _refuse("truth values repeated")
    sizes = [1] * len(shape)
    for at, axis in enumerate(places):
        sizes[axis] = x.shape[at]
    x = _with_kept_axes(c, x, tuple(sizes))
    if tuple(sizes) == shape:
        return x
    return c.emit("expand", [x], shape, x.dtype, shape=c.for_one(shape))


def _refuse(reason: str) -> Any:
    raise Refused(reason)


@handles("transpose")
def _transpose(c: Converter, equation: Any, operands: list[Any]) -> Item:
    return c.permute(operands[0], equation.params["permutation"])


@handles("rev")
def _reverse(c: Converter, equation: Any, operands: list[Any]) -> Item:
    (x,) = operands
    return c.flip(x, [int(axis) for axis in equation.params["dimensions"]])


@handles("slice")
def _slice(c: Converter, equation: Any, operands: list[Any]) -> Item:
    (x,), params = operands, equation.params
    strides = params["strides"] or (1,) * x.rank
    for axis, bounds in enumerate(zip(params["start_indices"], params["limit_indices"], strides, strict=True)):
        x = c.cut(x, axis, *bounds)
    return x


@handles("dynamic_slice")
def _dynamic_slice(c: Converter, equation: Any, operands: list[Any]) -> Item:
    x, *starts = operands
    if not isinstance(x, Moving):
        raise Refused("where it cuts depends on the input")
    for axis, (start, size) in enumerate(zip(starts, equation.params["slice_sizes"], strict=True)):
        if size == x.shape[axis]:
            continue
        values = start.values if isinstance(start, Fixed) else None
        if values is None:
            raise Refused("where it cuts is not fixed")
        first = min(max(int(values), 0), x.shape[axis] - size)
        x = c.cut(x, axis, first, first + size)
    return x


@handles("split")
def _split(c: Converter, equation: Any, operands: list[Any]) -> Any:
    (x,), axis, start, parts = operands, int(equation.params["axis"]), 0, []
    for size in equation.params["sizes"]:
        parts.append(c.cut(x, axis, start, start + int(size)))
        start += int(size)
    return parts


@handles("concatenate")
def _concatenate(c: Converter, equation: Any, operands: list[Any]) -> Item:
    return c.join(operands, int(equation.params["dimension"]))


@handles("stack")
def _stack(c: Converter, equation: Any, operands: list[Any]) -> Item:
    return c.stacked(operands, int(equation.params["axis"]))


@handles("tile")
def _tile(c: Converter, equation: Any, operands: list[Any]) -> Item:
    (x,) = operands
    for axis, count in enumerate(equation.params["reps"]):
        if count != 1:
            x = c.join([x] * count, axis)
    return x


@handles("pad")
def _pad(c: Converter, equation: Any, operands: list[Any]) -> Item:
    x, value = operands
    if not isinstance(x, Moving) or not isinstance(value, Fixed) or value.number is None:
        raise Refused("what it pads with is no number")
    config = [tuple(map(int, entry)) for entry in equation.params["padding_config"]]
    if any(inner for *_, inner in config):
        raise Refused("with values in between; use a transposed convolution")
    padding = tuple((before, after) for before, after, _ in config)
    if any(padding[c.batch_axis(x.shape)]):
        raise Refused("it adds examples to the batch")
    shape = equation.outvars[0].aval.shape
    return c.emit("pad", [x], shape, x.dtype, padding=padding, mode="constant", value=value.number)


@handles("gather")
def _gather(c: Converter, equation: Any, operands: list[Any]) -> Item:
    """Fixed places of one axis, as `x[:, indices]` and `jnp.take` ask for them."""
    x, indices = operands
    numbers = equation.params["dimension_numbers"]
    if isinstance(x, Fixed) and isinstance(indices, Moving):
        return _looked_up(c, equation, x, indices)
    values = indices.values if isinstance(indices, Fixed) else None
    if not isinstance(x, Moving) or values is None:
        raise Refused("its indices depend on the input; look up rows of a fixed table")
    if len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
        raise Refused("with several lists of indices; take them one after the other")
    axis = int(numbers.start_index_map[0])
    sizes = tuple(equation.params["slice_sizes"])
    others = [size for at, size in enumerate(sizes) if at != axis]
    if others != [size for at, size in enumerate(x.shape) if at != axis] or axis == c.batch_axis(x.shape):
        raise Refused("")
    chosen = np.clip(values[..., 0], 0, x.shape[axis] - sizes[axis]).astype(int)
    shape = tuple(equation.outvars[0].aval.shape)
    if axis not in numbers.collapsed_slice_dims:
        if chosen.size != 1:
            raise Refused("")
        first = int(chosen.reshape(()))
        return c.reshape(c.cut(x, axis, first, first + sizes[axis]), shape)
    if sizes[axis] != 1:
        raise Refused("")
    wide = list(x.shape)
    wide[axis] = chosen.size
    flat = tuple(int(each) for each in chosen.reshape(-1))
    taken = c.emit("gather", [x], wide, x.dtype, axis=axis, indices=flat)
    # The axes of the indices stand where no axis of the slice does.
    places = [at for at in range(len(shape)) if at not in numbers.offset_dims]
    if places != list(range(axis, axis + chosen.ndim)):
        moved = [at for at in range(x.rank) if at != axis]
        moved.insert(places[0] if places else axis, axis)
        return c.reshape(c.permute(taken, moved), shape)
    return c.reshape(taken, shape)


def _looked_up(c: Converter, equation: Any, table: Fixed, indices: Moving) -> Item:
    """Rows of a table by integers that the network is given."""
    numbers, sizes = equation.params["dimension_numbers"], tuple(equation.params["slice_sizes"])
    alone = _rows_alone(c, indices)
    if alone is not None and sizes == (1, *table.shape[1:]) and not numbers.collapsed_slice_dims:
        # `jax.vmap` of one row.
        given, shape = c.before_reshape(alone, alone.shape[:-1]), tuple(equation.outvars[0].aval.shape)
        made = _embedded(c, table, given)
        return c.reshape(made, shape)
    rows = numbers.start_index_map == (0,) and numbers.collapsed_slice_dims == (0,) and sizes[1:] == table.shape[1:]
    places = tuple(range(indices.rank - 1, indices.rank - 1 + len(sizes) - 1))
    if not rows or sizes[0] != 1 or numbers.offset_dims != places or numbers.operand_batching_dims:
        raise Refused("its indices depend on the input and are not those of rows")
    shape = tuple(equation.outvars[0].aval.shape)
    made = _embedded(c, table, c.before_reshape(indices, indices.shape[:-1]))
    return c.reshape(made, shape)


def _embedded(c: Converter, table: Fixed, given: Moving) -> Moving:
    """[*given, features], the table's rows laid flat."""
    features = math.prod(table.shape[1:])
    flat = table if len(table.shape) == 2 else table.then(lambda array: array.reshape(-1, features))
    module = c.module_of(table)
    return c.emit("embedding", [given, flat], (*given.shape, features), module=module, fixed_row=None)


def _rows_alone(c: Converter, indices: Moving) -> Moving | None:
    """Of indices along all axes those of rows, if the others are 0."""
    step = c.step_of(indices)
    if step is None or step.kind != "concat" or step.attributes["axis"] != indices.rank - 1:
        return None
    first, *others = step.inputs
    fixed = all(isinstance(each, str) and each in c.constants and c.fixed_named(each).number == 0 for each in others)
    return c.items[str(first)] if fixed and str(first) in c.items else None


@handles("scan")
def _scan(c: Converter, equation: Any, operands: list[Any]) -> Any:
    """A loop of a fixed number of rounds, unrolled."""
    params = equation.params
    length, rounds = int(params["length"]), params["jaxpr"]
    constants, carried = int(params["num_consts"]), int(params["num_carry"])
    if not any(isinstance(each, Moving) for each in operands):
        return c._fixed(equation, operands, [variable.aval for variable in equation.outvars])
    if length > LONGEST_LOOP:
        raise Refused(f"over {length} rounds; at most {LONGEST_LOOP} are unrolled")
    fixed, carry = operands[:constants], list(operands[constants : constants + carried])
    sequences = operands[constants + carried :]
    order = range(length)
    made: list[list[Any]] = []
    for at in reversed(order) if params["reverse"] else order:
        entries = [_entry(c, each, at) for each in sequences]
        results = c.inline(rounds, [*fixed, *carry, *entries])
        carry = results[:carried]
        made.append(results[carried:])
    if params["reverse"]:
        made.reverse()
    return [*carry, *(c.stacked(list(column), 0) for column in zip(*made, strict=True))]


def _entry(c: Converter, item: Item, at: int) -> Item:
    if isinstance(item, Fixed):
        return item.then(lambda array: array[at])
    return c.reshape(c.cut(item, 0, at, at + 1), item.shape[1:])


@handles("while")
def _while(c: Converter, equation: Any, operands: list[Any]) -> Any:
    if not any(isinstance(each, Moving) for each in operands):
        return c._fixed(equation, operands, [variable.aval for variable in equation.outvars])
    raise Refused("a loop whose rounds are not counted; use jax.lax.scan")


@handles("cond")
def _cond(c: Converter, equation: Any, operands: list[Any]) -> Any:
    index, *arguments = operands
    values = index.values if isinstance(index, Fixed) else None
    if values is None:
        if not any(isinstance(each, Moving) for each in operands):
            return c._fixed(equation, operands, [variable.aval for variable in equation.outvars])
        raise Refused("which branch is taken is not fixed")
    branches = equation.params["branches"]
    return c.inline(branches[min(max(int(values), 0), len(branches) - 1)], arguments)
