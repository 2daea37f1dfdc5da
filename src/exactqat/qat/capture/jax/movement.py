# SPDX-License-Identifier: Apache-2.0
"""Primitives that move values, repeat them or put others beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.builder import Moving
from ..core.refusals import Refused
from ..core.sizes import Shape, Size
from .converter import HANDLERS, LONGEST_LOOP, Converter, Operation, handles
from .items import Fixed, Item, Result

# What is one call of the builder.
HANDLERS.update(
    {
        "reshape": lambda c, operation, x, *sizes: c.reshape(x, operation.shape),
        "split": lambda c, operation, x: c.sections(x, operation.params["axis"], operation.params["sizes"]),
        **dict.fromkeys(
            ("squeeze", "expand_dims"), lambda c, operation, x, *sizes: _with_kept_axes(c, x, operation.shape)
        ),
        "transpose": lambda c, operation, x: c.permute(x, operation.params["permutation"]),
        "rev": lambda c, operation, x: c.flip(x, tuple(map(int, operation.params["dimensions"]))),
        "concatenate": lambda c, operation, *items: c.join(items, int(operation.params["dimension"])),
        "stack": lambda c, operation, *items: c.stacked(items, int(operation.params["axis"])),
    }
)


def _with_kept_axes(c: Converter, x: Item, shape: Shape) -> Item:
    """A reshape; one that only puts axes of size 1 back where a reduction dropped them is the reduction's own."""
    for kind in ("sum", "amax", "amin", "mean"):
        reduction = c.made_from(x, kind)
        if reduction is None or reduction[0].attributes["keep_dims"]:
            continue
        step, source = reduction
        kept = tuple(1 if axis in step.attributes["axes"] else size for axis, size in enumerate(source.shape))
        if kept == shape:
            return c.emit(kind, [source], shape, axes=step.attributes["axes"], keep_dims=True)
    return c.reshape(x, shape)


@handles("broadcast_in_dim")
def _broadcast(c: Converter, operation: Operation, x: Moving, *sizes_given: Item) -> Item:
    shape, places = operation.shape, operation.params["broadcast_dimensions"]
    if x.comparison is not None:
        if x.shape != shape:
            raise Refused("truth values repeated")
        return x
    sizes = [1] * len(shape)
    for at, axis in enumerate(places):
        sizes[axis] = x.shape[at]
    wide = _with_kept_axes(c, x, tuple(sizes))
    return wide if tuple(sizes) == shape else c.emit("expand", [wide], shape, x.dtype, shape=c.for_one(shape))


@handles("slice")
def _slice(c: Converter, operation: Operation, x: Moving) -> Item:
    params = operation.params
    strides = params["strides"] or (1,) * x.rank
    for axis, bounds in enumerate(zip(params["start_indices"], params["limit_indices"], strides, strict=True)):
        x = c.cut(x, axis, *bounds)
    return x


@handles("dynamic_slice")
def _dynamic_slice(c: Converter, operation: Operation, x: Moving, *starts: Item) -> Item:
    if not isinstance(x, Moving):
        raise Refused("where it cuts depends on the input")
    numbers = [start.values if isinstance(start, Fixed) else None for start in starts]
    sizes = operation.params["slice_sizes"]
    if any(
        start is None and size != x.shape[axis] for axis, (start, size) in enumerate(zip(numbers, sizes, strict=True))
    ):
        raise Refused("where it cuts is not fixed")
    return _part(c, x, [0 if start is None else start for start in numbers], sizes)


def _part(c: Converter, x: Moving, starts: Sequence[Any], sizes: Sequence[Size]) -> Moving:
    """So much of each axis, from these places on; places too far along are moved back, as JAX does."""
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if size != x.shape[axis]:
            if axis == c.batch_axis(x.shape):
                raise Refused("it takes examples out of the batch")
            first = min(max(int(start), 0), x.shape[axis] - size)
            x = c.cut(x, axis, first, first + size)
    return x


@handles("tile")
def _tile(c: Converter, operation: Operation, x: Item) -> Item:
    for axis, count in enumerate(operation.params["reps"]):
        if count != 1:
            x = c.join([x] * count, axis)
    return x


@handles("pad")
def _pad(c: Converter, operation: Operation, x: Moving, value: Item) -> Item:
    if not isinstance(x, Moving) or not isinstance(value, Fixed) or value.number is None:
        raise Refused("what it pads with is no number")
    config = [tuple(map(int, entry)) for entry in operation.params["padding_config"]]
    if any(inner for *_, inner in config):
        raise Refused("with values in between; use a transposed convolution")
    padding = tuple((before, after) for before, after, _ in config)
    if any(padding[c.batch_axis(x.shape)]):
        raise Refused("it adds examples to the batch")
    shape = operation.shape
    return c.emit("pad", [x], shape, x.dtype, padding=padding, mode="constant", value=value.number)


@handles("gather")
def _gather(c: Converter, operation: Operation, x: Moving, indices: Item) -> Item:
    """Fixed places of one axis, as `x[:, indices]` and `jnp.take` ask for them."""
    numbers = operation.params["dimension_numbers"]
    if isinstance(x, Fixed) and isinstance(indices, Moving):
        return _looked_up(c, operation, x, indices)
    values = indices.values if isinstance(indices, Fixed) else None
    if not isinstance(x, Moving) or values is None:
        raise Refused("its indices depend on the input; look up rows of a fixed table")
    if numbers.operand_batching_dims:
        raise Refused(_SEVERAL_LISTS)
    sizes, shape = operation.params["slice_sizes"], operation.shape
    if values.ndim == 1:
        starts = dict(zip(numbers.start_index_map, values, strict=True))
        return c.reshape(_part(c, x, [starts.get(axis, 0) for axis in range(x.rank)], sizes), shape)
    wanted = [1 if axis in numbers.start_index_map else size for axis, size in enumerate(x.shape)]
    if list(sizes) != wanted or set(numbers.start_index_map) != set(numbers.collapsed_slice_dims):
        raise Refused("")
    return _taken(c, x, values, numbers, shape)


_SEVERAL_LISTS = "with several lists of indices; take them one after the other"


def _taken(c: Converter, x: Moving, places: np.ndarray, numbers: Any, shape: Shape) -> Item:
    """Places along some axes, each of one axis with each of the others. places: [*new axes, axes of x]."""
    owners: dict[int, int] = {}  # of the new axes: the axis of x whose places they hold
    for at, axis in enumerate(numbers.start_index_map):
        places_here = places[..., at]
        new_axes = [dim for dim, size in enumerate(places_here.shape) if size > 1]
        if places.shape[-1] > 1:
            new_axes = [dim for dim in new_axes if (places_here != places_here.take([0], dim)).any()]
        if owners.keys() & set(new_axes) or axis == c.batch_axis(x.shape):
            raise Refused(_SEVERAL_LISTS)
        owners |= dict.fromkeys(new_axes, int(axis))
        chosen = places_here[tuple(slice(None) if dim in new_axes else 0 for dim in range(places_here.ndim))]
        x = _along(c, x, int(axis), np.clip(chosen, 0, x.shape[axis] - 1).astype(int).reshape(-1))
    whole = iter([axis for axis in range(x.rank) if axis not in numbers.collapsed_slice_dims])
    new = iter(range(places.ndim - 1))
    order = [next(whole) if at in numbers.offset_dims else owners.get(next(new), -1) for at in range(len(shape))]
    # Several axes of places next to one another are one axis of x until it is reshaped.
    kept = [axis for at, axis in enumerate(order) if axis >= 0 and (at == 0 or order[at - 1] != axis)]
    alone = [axis for axis in range(x.rank) if axis not in kept]
    if len(set(kept)) < len(kept) or any(x.shape[axis] != 1 for axis in alone):
        raise Refused(_SEVERAL_LISTS)
    return c.reshape(c.permute(x, [*kept, *alone]), shape)


def _along(c: Converter, x: Moving, axis: int, chosen: np.ndarray) -> Moving:
    """These places of an axis."""
    steps = np.diff(chosen)
    if len(chosen) == 1 or (steps[0] > 0 and (steps == steps[0]).all()):
        step = int(steps[0]) if len(steps) else 1
        return c.cut(x, axis, int(chosen[0]), min(int(chosen[0]) + len(chosen) * step, x.shape[axis]), step)
    return c.take(x, axis, chosen)


def _looked_up(c: Converter, operation: Operation, table: Fixed, indices: Moving) -> Item:
    """Rows of a table by integers that the network is given."""
    numbers, sizes = operation.params["dimension_numbers"], tuple(operation.params["slice_sizes"])
    whole, lead = sizes == (1, *table.shape[1:]), indices.rank - 1
    alone = _rows_alone(c, indices) if whole and not numbers.collapsed_slice_dims else None
    usual = numbers.start_index_map == (0,) and numbers.collapsed_slice_dims == (0,)
    usual = usual and numbers.offset_dims == tuple(range(lead, lead + len(sizes) - 1))
    if alone is None and not (whole and usual and not numbers.operand_batching_dims):
        raise Refused("its indices depend on the input and are not those of rows")
    indices = indices if alone is None else alone
    rows, features = c.before_reshape(indices, indices.shape[:-1]), math.prod(table.shape[1:])
    flat = table if len(table.shape) == 2 else table.then(lambda array: array.reshape(-1, features))
    vectors = c.emit("embedding", [rows, flat], (*rows.shape, features), module=c.module_of(table), fixed_row=None)
    return c.reshape(vectors, operation.shape)


def _rows_alone(c: Converter, indices: Moving) -> Moving | None:
    """Of indices along all axes, as `jax.vmap` of one row has them, those of rows, if the others are 0."""
    step = c.step_of(indices)
    if step is None or step.kind != "concat" or step.attributes["axis"] != indices.rank - 1:
        return None
    first, *others = step.inputs
    fixed = all(isinstance(name, str) and name in c.constants and c.fixed_named(name).number == 0 for name in others)
    return c.items[str(first)] if fixed and str(first) in c.items else None


@handles("scan")
def _scan(c: Converter, operation: Operation, *operands: Item) -> Result:
    """A loop of a fixed number of rounds, unrolled."""
    params = operation.params
    length, rounds = int(params["length"]), params["jaxpr"]
    constants, carried = int(params["num_consts"]), int(params["num_carry"])
    if length > LONGEST_LOOP:
        raise Refused(f"over {length} rounds; at most {LONGEST_LOOP} are unrolled")
    fixed, carry = operands[:constants], list(operands[constants : constants + carried])
    sequences = operands[constants + carried :]
    order = range(length)
    outputs: dict[int, list[Any]] = {}
    for at in reversed(order) if params["reverse"] else order:
        entries = [c.entry(sequence, 0, at) for sequence in sequences]
        results = c.inline(rounds, [*fixed, *carry, *entries])
        carry, outputs[at] = results[:carried], results[carried:]
    return [*carry, *(c.stacked(list(column), 0) for column in zip(*(outputs[at] for at in order), strict=True))]


@handles("cond")
def _cond(c: Converter, operation: Operation, index: Item, *arguments: Item) -> Result:
    values = index.values if isinstance(index, Fixed) else None
    if values is None:
        if not any(isinstance(argument, Moving) for argument in (index, *arguments)):
            return c.fixed(operation, [index, *arguments])
        raise Refused("which branch is taken is not fixed")
    branches = operation.params["branches"]
    return c.inline(branches[min(max(int(values), 0), len(branches) - 1)], arguments)
