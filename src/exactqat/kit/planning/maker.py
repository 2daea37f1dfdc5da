# SPDX-License-Identifier: Apache-2.0
"""How handlers add device operators: one method for each thing that several handlers need."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike

from ..device import OPERATORS
from ..device.attribute import Attributes
from ..device.primitives import Array
from . import masks
from .network import Step
from .planner import Planner
from .plans import BatchNorm, Grid, PlanStep, Weights
from .refusals import Refused, need_separate, word
from .rules import Rule
from .stored import SharedGrid, Stored


@dataclass(frozen=True)
class Coefficient:
    """A number for each channel (or one for all) computed from constants."""

    names: tuple[str, ...]
    value: Callable[..., Array]

    @staticmethod
    def of(name: str) -> Coefficient:
        """The constant itself."""
        return Coefficient((name,), lambda array: array.reshape(-1))

    def combined(self, other: float | Coefficient, function: Callable[[Array, Array | float], Array]) -> Coefficient:
        """``function(self, other)``"""
        if not isinstance(other, Coefficient):
            return Coefficient(self.names, lambda *arrays: function(self.value(*arrays), other))
        count = len(self.names)
        return Coefficient(
            self.names + other.names,
            lambda *arrays: function(self.value(*arrays[:count]), other.value(*arrays[count:])),
        )

    def __mul__(self, other: float | Coefficient) -> Coefficient:
        return self.combined(other, lambda a, b: a * b)

    def __add__(self, other: float | Coefficient) -> Coefficient:
        return self.combined(other, lambda a, b: a + b)

    __rmul__, __radd__ = __mul__, __add__

    def __neg__(self) -> Coefficient:
        return self * -1.0

    def __rtruediv__(self, other: float) -> Coefficient:
        return self.combined(other, lambda a, b: b / a)


class How(TypedDict, total=False):
    """How a result is stored; see `Maker.store`."""

    activation: str
    bounds: tuple[float, float] | None
    rule: Rule | None
    nonnegative: bool


class Maker:
    """Adds the operators that one float step becomes. The last one has the step's own path.

    Every method takes `part`: the word for an intermediate result, or None for the step's own.
    """

    def __init__(self, planner: Planner, step: Step, name: str) -> None:
        """
        Args:
            name: what rules call a step without a module.
        """
        self.planner = planner
        self.step = step
        self.path = planner.path(step, name)
        known = step.module and step.module not in planner.network.input_names
        self.owner = step.module if known else self.path

    def within(self, part: str) -> Maker:
        """A maker whose own result is a part of this one's."""
        inner = copy.copy(self)
        inner.path = self.planner.free(f"{self.path}_{part}")
        return inner

    def store(
        self,
        kind: str,
        operands: Sequence[Stored | str],
        shape: Sequence[int],
        part: str | None = None,
        *,
        attributes: Attributes | None = None,
        batch_axis: int | None = None,
        channels: int | None = None,
        activation: str = "NONE",
        bounds: tuple[float, float] | None = None,
        rule: Rule | None = None,
        weights: Weights | None = None,
        nonnegative: bool = False,
    ) -> Stored:
        """One operator of the device.

        Args:
            operands: tensors and names of constants.
            channels: the axis of the result that holds channels, where it is known.
            rule: of the result, if it is not that of its path.
        """
        operator = OPERATORS[kind]
        path = self.name(part)
        tensors = [operand for operand in operands if isinstance(operand, Stored)]
        if any(tensor.grid.now.indices for tensor in tensors):
            raise Refused(
                f"{word(self.step)} of an input of integers by which rows are looked up; the device looks them up as "
                "they are given: do this before the network, or with what is looked up"
            )
        if operator.same_quantization:
            if len(tensors) > 1:
                operands = tensors = self._on_one_grid(tensors, path)
            if tensors[0].grid.is_int16 and "int16" not in operator.dtypes:
                self._need_dtype(kind, self.rule(path))
                operands = tensors = [self._converted(tensor, self.rule(path)) for tensor in tensors]
            grid, high = tensors[0].grid, all(tensor.high for tensor in tensors)
        else:
            rule = rule or self.rule(path)
            self._need_dtype(kind, rule)
            if not operator.changes_dtype:
                operands = [self._converted(node, rule) if isinstance(node, Stored) else node for node in operands]
            if bounds is not None:
                rule = replace(rule, ranges="fixed", fixed_range=bounds)
                activation = self._by_saturation(rule, bounds, activation)
            high = activation != "NONE"
            positive = nonnegative or high or (bounds is not None and bounds[0] == 0)
            fixed = operator.grid_fixed_in("int16" if rule.is_int16 else "int8")
            grid = SharedGrid(Grid(path, rule, positive, fixed=fixed))
        self._need_on_device(kind, [grid, *(operand.grid for operand in operands if isinstance(operand, Stored))], path)
        if batch_axis is None:
            batch_axis = tensors[0].batch_axis
        stored = Stored(path, tuple(shape), batch_axis, grid, channels, high)
        return self._draft(stored, kind, operands, attributes, activation=activation, bounds=bounds, weights=weights)

    def _draft(
        self,
        stored: Stored,
        kind: str,
        operands: Sequence[Stored | str],
        attributes: Attributes | None = None,
        **how: Any,
    ) -> Stored:
        """The step that stores a tensor; its grid's name is known at the end only."""
        paths = tuple(operand if isinstance(operand, str) else operand.path for operand in operands)
        how |= {"batch_axis": stored.batch_axis, "place": self.step.place}
        self.planner.drafts.append(
            (stored, PlanStep(stored.path, kind, paths, dict(attributes or {}), "", stored.shape, **how))
        )
        return stored

    def is_int16(self, part: str | None = None) -> bool:
        """Whether the rules want the result in 16 bits."""
        return self.rule(self.path if part is None else f"{self.path}_{part}").is_int16

    def is_absent(self, kind: str, dtype: str = "int8", operands: int = 1) -> str:
        """Why the device's runtime does not run an operator; "": it does, or no device is named."""
        device = self.planner.device
        name = kind if dtype == "int8" else f"{kind}:{dtype}"
        return "" if device is None else OPERATORS[kind].absent_from(device, name, operands)

    def _need_on_device(self, kind: str, grids: Sequence[SharedGrid], path: str) -> None:
        """Refuses the step if the device's runtime does not run it."""
        wide = any(grid.is_int16 for grid in grids)
        reason = self.is_absent(kind, "int16" if wide else "int8", len(grids) - 1)
        if not reason or not self.planner.deployable:
            return
        in_eight = wide and not self.is_absent(kind, "int8", len(grids) - 1)
        remedy = f"give it 8 bits: Rule({path!r}, activation_bits=8)" if in_eight else "write it another way"
        raise Refused(f"{word(self.step)}: {reason}; {remedy}, or prepare it for another device")

    def _need_dtype(self, kind: str, rule: Rule) -> None:
        """Refuses the step in 16 bits if the operator is not declared for them."""
        if rule.is_int16 and self.planner.deployable and "int16" not in OPERATORS[kind].dtypes:
            self.planner.refused_in_int16 = True
            raise Refused(
                f"{word(self.step)} in 16 bits (rule match={rule.match!r}): {kind} is not simulated in int16; give it "
                "an 8-bit rule"
            )

    def _converted(self, x: Stored, rule: Rule) -> Stored:
        """The tensor in the dtype in which the device stores tensors under `rule`: itself, or stored again as int8 or
        int16.

        Its range is determined like that of the tensor itself.
        """
        if x.grid.is_int16 == rule.is_int16:
            return x
        grid = x.grid.now
        own = replace(grid.rule, match=rule.match, activation_bits=rule.activation_bits)
        if grid.fixed is not None:
            own = replace(own, ranges="fixed", fixed_range=grid.fixed_range)
        return self._stored_again(x, own)

    def _stored_again(self, x: Stored, rule: Rule) -> Stored:
        """The tensor on its own grid under `rule`; once for all readers that want this."""
        key = (x.path, replace(rule, match="*"))
        if key not in self.planner.converted:
            path = self.planner.free(f"{x.path}_in_{rule.activation_bits}_bits")
            grid = SharedGrid(Grid(path, rule, x.nonnegative))
            stored = Stored(path, x.shape, x.batch_axis, grid, x.channels)
            self.planner.converted[key] = self._draft(stored, "QUANTIZE", [x])
        return self.planner.converted[key]

    def _by_saturation(self, rule: Rule, bounds: tuple[float, float], activation: str) -> str:
        """The activation that makes the ends of a grid those of `bounds`."""
        low, high = bounds
        if not rule.is_int16 or low == -high:
            return activation
        if low == 0:
            return "RELU" if activation == "NONE" else activation
        raise Refused(
            f"{word(self.step)} between {low:g} and {high:g} in 16 bits, whose ranges are symmetric; give it an "
            "8-bit rule, or a lower bound of 0"
        )

    def look_up(
        self, indices: Stored, table: str, fixed_row: int | None = None, bounds: tuple[float, float] | None = None
    ) -> Stored:
        """Rows of a constant table, which is on the result's grid.

        Args:
            indices: an input of integers, or on a grid of scale 1.
            bounds: the ends of the result's grid, of 8 bits.
        """
        path = self.name(None)
        rule = self.rule(path)
        if bounds is not None:
            rule = replace(rule, activation_bits=8, ranges="fixed", fixed_range=bounds)
        as_given = bool(indices.grid.now.indices)
        kind = "EMBEDDING" if as_given else "CODED_EMBEDDING"
        self._need_dtype(kind, rule)
        source, features = self.planner.given(indices) if as_given else indices, self.shape_of(table)[1]
        shape = (*source.shape, features)
        stored = Stored(path, shape, source.batch_axis, SharedGrid(Grid(path, rule)), len(shape) - 1)
        attributes = {} if fixed_row is None else {"fixed_row": fixed_row}
        looked_up = self._draft(stored, kind, [source, table], attributes)
        if indices.shape == source.shape:
            return looked_up
        return self.reshape(looked_up, (*indices.shape, features), indices.batch_axis, "reshaped")

    def leave(self, x: Stored, device_kind: str = "") -> Stored:
        """The step itself, for the program that runs the device; see `PlanStep.device_kind`."""
        shape, batch_axis = self.planner.shape(self.step), self.planner.batch_axis(self.step)
        stored = Stored(self.path, shape, batch_axis, x.grid, x.channels if len(shape) == x.rank else None, x.high)
        attributes = self.step.attributes
        return self._draft(stored, self.step.kind, [x], attributes, outside=True, device_kind=device_kind)

    def only_in_training(
        self,
        x: Stored,
        part: str | None = None,
        expression: object = None,
        **attributes: object,
    ) -> Stored:
        """What training computes from a tensor that the device leaves as it is.

        Args:
            attributes: instead of an expression: `dropout`, a probability, or `stop_gradient`.
        """
        return self._draft(replace(x, path=self.name(part)), "", [x], attributes, expression=expression)

    def name(self, part: str | None) -> str:
        return self.path if part is None else self.planner.free(f"{self.path}_{part}")

    def rule(self, path: str) -> Rule:
        rule, ends = self.planner.rule(path, self.owner), self.planner.whole.get(self.planner.end)
        if ends is None:
            return rule
        return masks.on_whole_grid(rule, ends if path == self.path else (-masks.LARGEST, masks.LARGEST))

    def _on_one_grid(self, tensors: list[Stored], path: str) -> list[Stored]:
        """The tensors on one grid, joined if their rules allow it, else stored again."""
        if len({id(tensor.grid.root()) for tensor in tensors}) == 1:
            return tensors
        rule = self.rule(path)
        fixed = tensors[0].grid.now.fixed
        if fixed is None or not all(tensor.grid.accepts(rule, fixed) for tensor in tensors):
            fixed = None
        result = []
        for index, tensor in enumerate(tensors):
            if tensor.grid.is_int16 != rule.is_int16:
                tensor = self._stored_again(tensor, rule)
            elif not tensor.grid.accepts(rule, fixed):
                # A tensor whose rule gives it another kind of range is stored again, under the result's rule.
                tensor = self.affine(tensor, 1.0, 0.0, f"operand_{index}", rule=rule)
            result.append(tensor)
        for tensor in result[1:]:
            result[0].grid.join(tensor.grid)
        return result

    # --- constants --------------------------------------------------------------------------------------------------

    def array(self, values: ArrayLike, name: str) -> str:
        """A constant with these values."""
        data = np.asarray(values, np.float32)
        return self.planner.add_constant(f"{self.path}/{name}", data.shape, data=data)

    def derived(self, name: str, shape: Sequence[int], function: Callable[..., Array], *operands: str) -> str:
        """A constant computed from others."""
        return self.planner.derive(f"{self.path}/{name}", shape, function, *operands)

    def reshaped(self, constant: str, shape: Sequence[int]) -> str:
        """A constant in another shape."""
        shape = tuple(shape)
        if self.planner.constants[constant].shape == shape:
            return constant
        return self.derived(f"{_word(constant)}_reshaped", shape, lambda array: array.reshape(shape), constant)

    # --- value by value ---------------------------------------------------------------------------------------------

    def affine(
        self,
        x: Stored,
        weight: float | Coefficient,
        bias: float | Coefficient,
        part: str | None = None,
        *,
        activation: str = "NONE",
        bounds: tuple[float, float] | None = None,
        batch_norm: BatchNorm | None = None,
        channel_axis: int | None = None,
        rule: Rule | None = None,
        nonnegative: bool = False,
    ) -> Stored:
        """``activation(weight * x + bias)``, value by value, with batch norm in between if one is given.

        If the channel axis is known, a 1x1 depthwise convolution: the runtimes have their own operators for some of
        these, with coarser arithmetic or outside the fast kernels; a convolution has neither drawback, and it takes any
        range and number of bits. Otherwise a product and a sum with constants.
        """
        axis = channel_axis if channel_axis is not None else x.channels
        last: How = {"activation": activation, "bounds": bounds, "rule": rule, "nonnegative": nonnegative}
        if axis is not None and x.rank in (2, 3, 4) and axis != x.batch_axis:
            path = self.path if part is None else f"{self.path}_{part}"
            count, spatial = x.shape[axis], x.rank - 2
            last["rule"] = rule = rule or self.rule(path)
            constant = replace(rule, ranges="ema", fixed_range=None, fold_batch_norm=False)
            start = "" if part is None else f"{part}/"
            filter_ = self.of_channels(weight, (count, *[1] * (x.rank - 1)), f"{start}weight")
            offset = None if bias == 0 else self.of_channels(bias, (count,), f"{start}bias")
            attributes = {
                "strides": (1,) * spatial,
                "padding": ((0, 0),) * spatial,
                "dilations": (1,) * spatial,
                "groups": count,
                "channel_axis": axis,
            }
            weights = Weights(filter_, offset, batch_norm, constant)
            return self.store(
                "DEPTHWISE_CONV_2D",
                [x],
                x.shape,
                part,
                attributes=attributes,
                channels=axis,
                weights=weights,
                **last,
            )
        if batch_norm is not None:
            raise Refused(f"batch norm on a tensor of shape {list(x.shape)}; use it on at most two spatial axes")
        if isinstance(weight, Coefficient) or isinstance(bias, Coefficient):
            raise AssertionError("per-channel coefficients need a channel axis")
        if not bias:
            return self.multiply(x, self.array(weight, "factor"), part, **last)
        if weight != 1:
            x = self.multiply(x, self.array(weight, "factor"), f"{part}_scaled" if part else "scaled")
        return self.add(x, self.array(bias, "offset"), part, **last)

    def of_channels(self, value: float | Coefficient, shape: tuple[int, ...], name: str) -> str:
        """A constant with one number for each channel, [channels, 1, ...]."""
        if not isinstance(value, Coefficient):
            return self.array(np.full(shape, value), name)
        ones = self.array(np.ones(shape[0]), f"{name}/ones")
        count = len(value.names)
        return self.derived(
            name,
            shape,
            lambda *arrays: (value.value(*arrays[:count]) * arrays[count]).reshape(shape),
            *value.names,
            ones,
        )

    def linear(
        self, x: Stored, weight: str, bias: str | None = None, part: str | None = None, fixed: bool = False
    ) -> Stored:
        """A product with a weight [out, in] over the last axis; fixed: it has nothing to learn."""
        rule = self.rule(self.path if part is None else f"{self.path}_{part}")
        own = replace(rule, ranges="ema", fixed_range=None, fold_batch_norm=False) if fixed else rule
        shape, weights = (*x.shape[:-1], self.shape_of(weight)[0]), Weights(weight, bias, None, own)
        return self.store("FULLY_CONNECTED", [x], shape, part, channels=x.rank - 1, rule=rule, weights=weights)

    def binary(
        self, kind: str, first: Stored | str, second: Stored | str, part: str | None = None, **how: Unpack[How]
    ) -> Stored:
        """An operator on two operands that broadcast."""
        shapes = [self.shape_of(side) for side in (first, second)]
        shape = np.broadcast_shapes(*shapes)
        stored = [side for side in (first, second) if isinstance(side, Stored)]
        main = max(stored, key=lambda tensor: (tensor.rank, math.prod(tensor.shape)))
        batch_axis = main.batch_axis + len(shape) - main.rank
        operands = [
            self.aligned(side, len(shape), batch_axis) if isinstance(side, Stored) else side for side in (first, second)
        ]
        channels = main.channels if main.rank == len(shape) else None
        return self.store(kind, operands, shape, part, batch_axis=batch_axis, channels=channels, **how)

    def add(self, first: Stored | str, second: Stored | str, part: str | None = None, **how: Unpack[How]) -> Stored:
        return self.binary("ADD", first, second, part, **how)

    def multiply(
        self, first: Stored | str, second: Stored | str, part: str | None = None, **how: Unpack[How]
    ) -> Stored:
        if isinstance(first, Stored) and math.prod(first.shape) < math.prod(self.shape_of(second)):
            # The runtimes are fastest if the second operand is the repeated one.
            first, second = second, first
        if isinstance(first, str):
            first, second = second, first
        if first is second:
            how["nonnegative"] = True
        return self.binary("MUL", first, second, part, **how)

    def subtract(
        self, first: Stored | str, second: Stored | str, part: str | None = None, **how: Unpack[How]
    ) -> Stored:
        return self.binary("SUB", first, second, part, **how)

    def unary(
        self,
        kind: str,
        x: Stored,
        part: str | None = None,
        attributes: Attributes | None = None,
        **how: Unpack[How],
    ) -> Stored:
        """An operator that keeps the shape of its operand."""
        return self.store(kind, [x], x.shape, part, attributes=attributes, channels=x.channels, **how)

    def function(
        self, name: str, x: Stored, part: str | None = None, parameters: Sequence[object] = (), **how: Unpack[How]
    ) -> Stored:
        """A function of one value that the device looks up in a table; `name` is the kind of a network step."""
        return self.unary("TABLE", x, part, {"function": name, "parameters": tuple(parameters)}, **how)

    def shape_of(self, operand: Stored | str) -> tuple[int, ...]:
        """Shape of a tensor or of a constant by its name."""
        return operand.shape if isinstance(operand, Stored) else self.planner.constants[operand].shape

    def aligned(self, x: Stored, rank: int, batch_axis: int) -> Stored:
        """The operand with as many axes as the result."""
        missing = rank - x.rank
        if x.batch_axis + missing != batch_axis:
            raise Refused(
                f"an operand with the batch on axis {x.batch_axis} of {x.rank}, where the result has it on axis "
                f"{batch_axis} of {rank}; give both operands the same axes"
            )
        return self.reshape(x, (1,) * missing + x.shape, batch_axis, "aligned") if missing else x

    # --- movement ---------------------------------------------------------------------------------------------------

    def reshape(self, x: Stored, shape: Sequence[int], batch_axis: int, part: str | None = None) -> Stored:
        shape = tuple(shape)
        if math.prod(shape[:batch_axis]) != math.prod(x.shape[: x.batch_axis]):
            raise Refused(
                f"{list(x.shape)} reshaped to {list(shape)}, which merges an axis in front of the batch with it; "
                "put the batch first"
            )
        channels = _channels_after_reshape(x, shape)
        attributes = {"new_shape": shape}
        return self.store("RESHAPE", [x], shape, part, attributes=attributes, batch_axis=batch_axis, channels=channels)

    def transpose(self, x: Stored, axes: Sequence[int], part: str | None = None) -> Stored:
        axes = tuple(axes)
        return self.store(
            "TRANSPOSE",
            [x],
            [x.shape[axis] for axis in axes],
            part,
            attributes={"permutation": axes},
            batch_axis=axes.index(x.batch_axis),
            channels=axes.index(x.channels) if x.channels is not None else None,
        )

    def slice(self, x: Stored, cuts: Sequence[tuple[int, int, int, int]], part: str | None = None) -> Stored:
        """cuts: (axis, start, stop, step) for every axis that is cut."""
        shape, begin, steps = list(x.shape), [0] * x.rank, [1] * x.rank
        end: list[int | None] = [None] * x.rank
        for axis, start, stop, step in cuts:
            shape[axis] = len(range(start, stop, step))
            begin[axis], end[axis], steps[axis] = start, None if stop == x.shape[axis] else stop, step
        attributes = {"begin": tuple(begin), "end": tuple(end), "steps": tuple(steps)}
        return self.store("STRIDED_SLICE", [x], shape, part, attributes=attributes, channels=x.channels)

    def concatenate(self, tensors: Sequence[Stored], axis: int, part: str | None = None) -> Stored:
        shape = list(tensors[0].shape)
        shape[axis] = sum(tensor.shape[axis] for tensor in tensors)
        channels = tensors[0].channels
        return self.store("CONCATENATION", tensors, shape, part, attributes={"axis": axis}, channels=channels)

    def pad(
        self, x: Stored, paddings: Sequence[tuple[int, int]], part: str | None = None, value: float | None = 0.0
    ) -> Stored:
        """A number within the tensor's range around it, None: its lowest; paddings: (before, after) per axis."""
        paddings = tuple((int(before), int(after)) for before, after in paddings)
        shape = [size + before + after for size, (before, after) in zip(x.shape, paddings, strict=True)]
        kind, more = ("PAD", {}) if value == 0 else ("PADV2", {"value": value})
        return self.store(kind, [x], shape, part, attributes={"paddings": paddings, **more}, channels=x.channels)

    def reduce(
        self,
        kind: str,
        x: Stored,
        axes: Sequence[int],
        keep_dims: bool,
        part: str | None = None,
        **how: Unpack[How],
    ) -> Stored:
        axes = tuple(sorted(axes))
        need_separate(self.step, x.batch_axis not in axes, "over")
        attributes = {"axes": axes, "keep_dims": keep_dims}
        if keep_dims:
            shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
            return self.store(kind, [x], shape, part, attributes=attributes, channels=x.channels, **how)
        shape = [size for axis, size in enumerate(x.shape) if axis not in axes]

        def moved(axis: int | None) -> int | None:
            return None if axis is None or axis in axes else axis - sum(gone < axis for gone in axes)

        channels = moved(x.channels)
        if channels is None and len(shape) == 2:
            channels = 1
        batch_axis = moved(x.batch_axis)
        return self.store(
            kind, [x], shape, part, attributes=attributes, batch_axis=batch_axis, channels=channels, **how
        )


def _word(constant: str) -> str:
    return constant.replace("/", ".").rsplit(".", 1)[-1]


def _channels_after_reshape(x: Stored, shape: tuple[int, ...]) -> int | None:
    """The channel axis after a reshape, if it still exists."""
    if len(shape) == 2:
        return 1
    axis = x.channels
    if axis is None:
        return None
    if shape[: axis + 1] == x.shape[: axis + 1]:
        return axis
    trailing = x.rank - axis
    if trailing <= len(shape) and shape[-trailing:] == x.shape[-trailing:]:
        return len(shape) - trailing
    return None
