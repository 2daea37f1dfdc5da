# SPDX-License-Identifier: Apache-2.0
"""Lowers a trained plan to the graph of integer operators that the device runs.

Nothing is decided here that training did not see: weight codes, scales and bias codes are those of training. Only the
order of axes is decided. A plan counts axes in the user's order; on the device the batch comes first and convolutions
need their channels last. Every tensor carries its `Layout`, so a permutation costs nothing by itself, and a TRANSPOSE
is added only where an operator needs axes in another order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..kit.device import OPERATORS
from ..kit.device.arithmetic import same_padding
from ..kit.device.operator import Attributes, DeviceOperator, Layout, LoweredTensor
from ..kit.device.tensor import INDICES
from ..kit.planning.parts import warn_of
from ..kit.planning.plans import Numbers, Plan, PlanInput, PlanStep
from .axes import neighbours_grouped, on_device, reshape_groups, restricted, split_at, with_last, without, without_units
from .graph import INT8_MIN, Builder, Graph, Quantization, per_tensor, place_codes
from .signature import Port, Signature
from .unequal import unequal_parts

# The most axes that TFLite-Micro's kernel moves; LiteRT's moves one more.
TRANSPOSED_AXES = 5


@dataclass
class _Result:
    """What one step stores, in all forms requested by readers."""

    shape: tuple[int, ...]
    batch_axis: int
    first: LoweredTensor | None = None
    forms: dict[tuple[int, ...], str] = field(default_factory=dict)
    # Pure reshapes are made when a reader asks for them: some take their features in the device's order.
    pending: PlanStep | None = None


def lower(model: Any) -> Graph:
    """The integer graph of a frozen model.

    Args:
        model: prepared and frozen.

    Returns:
        The graph. Every layer's stored tensor is named by the layer's path, the network's input is named "input".

    Raises:
        TypeError: the model was not prepared.
        ValueError: the model is not frozen, a layer does not fit the device's integers, or a range or weight is not
            finite (the message names it).
    """
    graph, _ = lower_with_layouts(model)
    warn_of(unequal_parts(graph))
    return graph


def lower_with_layouts(model: Any) -> tuple[Graph, dict[str, Layout]]:
    """As `lower`; also returns the axis order of each stored tensor, by path of the plan."""
    plan = getattr(model, "plan", None)
    if not isinstance(plan, Plan):
        raise TypeError(
            f"model must come from exactqat.qat.prepare (or that of qat.jax, qat.keras), got {type(model).__name__}"
        )
    if not hasattr(model, "frozen"):
        raise TypeError(
            f"this {type(model).__name__} from JAX contains no parameters: call its own lower(params, state) instead"
        )
    if not model.frozen:
        raise ValueError("model must be frozen before it is lowered: call exactqat.qat.freeze and train its last phase")
    lowering = Lowering(plan, model.numbers())
    graph = replace(lowering.run(), trained_for=getattr(model, "profile", None) or "")
    return graph, lowering.layouts()


@dataclass(frozen=True)
class LoweredStep:
    """A single step of a plan: the operators from the tensors it reads, which are the graph's inputs, to the one it
    stores.

    Attributes:
        graph: not validated as a network, since inputs may have any number of rows.
        layouts: the axis order of the tensors it reads, by path.
        stored: the graph's output.
    """

    graph: Graph
    layouts: Mapping[str, Layout]
    stored: LoweredTensor


def lower_step(plan: Plan, step: PlanStep, numbers: Numbers) -> LoweredStep:
    """Lowers one step of a plan; `numbers` only needs what concerns this step, and the grids.

    Axes may be ordered differently than in the whole network; no integer depends on it.

    Raises:
        ValueError: the device does not support this step.
    """
    whole = Lowering(plan, numbers)
    read = [plan.stored(path) for path in dict.fromkeys(step.operands) if plan.is_stored(path)]
    inputs = tuple(PlanInput(source.path, source.grid, source.shape, source.batch_axis) for source in read)
    part = replace(plan, inputs=inputs, steps=(step,), outputs=(step.path,), device_outputs=(), results=())
    lowering = Lowering(part, numbers, {source.path: whole.placement(source.path) for source in read})
    graph = lowering.run(validated=False)
    layouts = {source.path: lowering.layout(source.path) for source in inputs}
    return LoweredStep(graph, layouts, lowering.stored(step.path))


class Lowering:
    """One walk over the plan. Declarations with their own `lower` use the methods without underscore."""

    def __init__(self, plan: Plan, numbers: Numbers, placements: Mapping[str, Quantization] | None = None) -> None:
        """placements: how inputs are stored if they are another plan's results."""
        self.plan = plan
        self.numbers = numbers
        self.given = dict(placements or {})
        self.builder = Builder()
        self.results: dict[str, _Result] = {}
        self._names: set[str] = set()
        self._reshapes: dict[tuple[str, tuple[int, ...]], str] = {}
        self._reshaped_from: dict[str, str] = {}

    def run(self, validated: bool = True) -> Graph:
        for source in self.plan.inputs:
            self._input(source)
        for step in self.plan.steps:
            if step.left_out:
                continue
            if step.device_kind:
                self._enter(step.path, step.shape, int(step.batch_axis or 0), self._indices(step))
            elif step.expression is not None or not step.kind:
                self.results[step.path] = self.results[step.operands[0]]
            elif step.batch_axis is not None:
                stored = OPERATORS[step.kind].lower(self, step)
                if stored is not None:
                    self._enter(step.path, step.shape, step.batch_axis, stored)
        if not self.plan.results:
            parts = dict.fromkeys(self._output(path) for path in self.plan.device_outputs)
            return self.builder.graph(list(parts), validated)
        pairs = zip(self.plan.device_outputs, self.plan.results, strict=True)
        outputs = [self.operand(path, Layout(result.axes)) for path, result in pairs]
        # Results that are one tensor are one output; the signature says which result is which.
        return self.builder.graph(list(dict.fromkeys(outputs)), validated, self._signature(outputs))

    def layouts(self) -> dict[str, Layout]:
        """The layouts of all tensors named by their path."""
        layouts = {}
        for path, result in self.results.items():
            if result.first is not None and result.first.name == path:
                layouts[path] = result.first.layout
        return layouts

    def stored(self, path: str) -> LoweredTensor:
        """The tensor of the graph that holds a result, once it is lowered."""
        result = self.results[path]
        if result.first is None:
            assert result.pending is not None
            result.first = self._reshaped(result, result.pending)
            result.forms[result.first.layout.axes] = result.first.name
        return result.first

    # --- what a step reads ------------------------------------------------------------------------------------------

    def layout(self, path: str) -> Layout:
        """The layout of a stored tensor."""
        return self.stored(path).layout

    def shape(self, path: str) -> tuple[int, ...]:
        """The user's shape of a stored tensor, for a batch of one."""
        return self.results[path].shape

    def operand(self, path: str, layout: Layout) -> str:
        """Name of the tensor with its axes in the requested order; transposes it if necessary."""
        result = self.results[path]
        first = self.stored(path)
        name = result.forms.get(layout.axes)
        if name is None:
            name = self._move(result, first, layout)
            result.forms[layout.axes] = name
        return name

    def features(self, path: str) -> tuple[str, np.ndarray | None, Layout]:
        """A tensor with its features last, in any order, and that order (None: the user's).

        A flattened tensor need not be moved for a reader whose weights can follow the device's order.
        """
        result = self.results[path]
        rank = len(result.shape)
        if result.pending is not None:
            origin = result.pending.operands[0]
            source, stored = self.results[origin], self.stored(origin)
            *groups, (joined, axes) = reshape_groups(source.shape, source.batch_axis, result.shape, result.batch_axis)
            now = without_units(stored.layout.axes, source.shape, source.batch_axis)
            head = [axis for group, _ in groups for axis in group]
            if axes == (rank - 1,) and result.batch_axis == 0 and now[: len(head)] == head and len(joined) > 1:
                sizes = [source.shape[axis] for axis in joined]
                order = np.arange(math.prod(sizes)).reshape(sizes)
                order = order.transpose([joined.index(axis) for axis in now[len(head) :]]).reshape(-1)
                name = self._reshape(stored.name, result.shape, f"{stored.name}/{_last(result.pending.path)}")
                return name, order, Layout(tuple(range(rank)))
        layout = with_last(self.stored(path).layout, rank, (rank - 1,))
        return self.operand(path, layout), None, layout

    def channels_last(self, path: str, channel_axis: int) -> Layout:
        """[batch, height, width, channels] of a user's tensor; absent spatial axes have size 1."""
        result = self.results[path]
        rank = len(result.shape)
        if rank > 4:
            raise ValueError(f"{path!r} has {rank - 2} spatial axes; device operators support at most 2")
        return _channels_last(rank, result.batch_axis, channel_axis)

    # --- what a step stores -----------------------------------------------------------------------------------------

    def placements(self, step: PlanStep | PlanInput) -> tuple[Quantization, ...]:
        """Where the codes of a tensor are placed; the last placement is how readers see it."""
        if step.path in self.given:
            return (self.given[step.path],)
        grid = self.plan.grids[step.grid]
        if grid.indices:
            return (INDICES,)
        if grid.fixed is not None:
            return (per_tensor(*grid.fixed, grid.dtype),)
        scale, zero_point = self.numbers.grids[step.grid]
        return place_codes(scale, zero_point, grid.bits, getattr(step, "activation", "NONE"))

    def stored_placement(self, step: PlanStep) -> Quantization:
        """The placement of a tensor that takes over codes of its operands."""
        grid = self.plan.grids[step.grid]
        if grid.fixed is not None:
            return per_tensor(*grid.fixed, grid.dtype)
        scale, zero_point = self.numbers.grids[step.grid]
        return place_codes(scale, zero_point, grid.bits, "RELU" if step.high else "NONE")[-1]

    def placement(self, path: str) -> Quantization:
        """How readers see the codes of a stored tensor, lowered or not."""
        step = self.plan.stored(path)
        if isinstance(step, PlanInput):
            return self.placements(step)[-1]
        operator = OPERATORS.get(step.kind)
        if operator is None or operator.moves_axes or step.expression is not None:
            return self.placement(step.operands[0])
        return self.stored_placement(step) if operator.same_quantization else self.placements(step)[-1]

    def lower_described(self, operator: DeviceOperator, step: PlanStep) -> LoweredTensor:
        """Lowers as the attributes of a declaration say: see `DeviceOperator`."""
        if step.weights is not None:
            return self.weighted(operator, step)
        if not operator.spatial:
            return self._alike(operator, step)
        path = step.operands[0]
        layout = self.channels_last(path, step.attributes["channel_axis"])
        source = self.operand(path, layout)
        attributes = self._device_attributes(operator, step, layout)
        if "padding" in attributes:
            source, attributes["padding"] = self._padding(source, step, attributes)
        return LoweredTensor(self.emit(operator, step, [source], attributes), layout)

    def looked_up(self, operator: DeviceOperator, step: PlanStep) -> LoweredTensor:
        """Rows of a constant table: the axes of the indices, then the table's own."""
        path = step.operands[0]
        layout = Layout(tuple(axis for axis in self.layout(path).axes if axis >= 0))
        operands = self.operand(path, layout), self.constant(step, 1, Layout((0, 1)), 2)
        name = self.name(step.path)
        result = self.builder.operator(operator.kind, operands, self.stored_placement(step), name=name)
        return LoweredTensor(str(result), Layout((*layout.axes, len(self.shape(path)))))

    def name(self, wanted: str) -> str:
        """A free name for a tensor."""
        number, name = 1, wanted
        while name in self._names:
            number += 1
            name = f"{wanted}_{number}"
        self._names.add(name)
        return name

    def emit(self, operator: DeviceOperator, step: PlanStep, operands: Sequence[str], attributes: Attributes) -> str:
        """Adds the operator of a step; its result is stored as the plan says."""
        if operator.same_quantization:
            target = self.stored_placement(step)
            operands = [self.on_grid(name, target, f"{step.path}/requantized_{i}") for i, name in enumerate(operands)]
            output: Quantization | tuple[Quantization, ...] = target
        else:
            output = self.placements(step)
        if "activation" in operator.attributes:
            attributes = {**attributes, "activation": step.activation}
        name = self.name(step.path)
        return str(self.builder.operator(operator.kind, tuple(operands), output, name=name, **attributes))

    def on_grid(self, name: str, quantization: Quantization, wanted_name: str) -> str:
        """The tensor with its codes placed differently, shifted if necessary; constants and equal placements stay."""
        tensor = self.builder.tensor(name)
        if tensor.data is not None or tensor.quantization.equals(quantization):
            return name
        return str(self.builder.quantize(name, quantization, name=self.name(wanted_name)))

    def constant(self, step: PlanStep, position: int, layout: Layout, rank: int) -> str:
        """A constant operand with its axes aligned to those of the result."""
        codes, scale = self.numbers.constants[(step.path, position)]
        codes = codes.reshape((1,) * (rank - codes.ndim) + codes.shape)
        quantization = per_tensor(scale, 0, self.plan.grids[step.grid].dtype)
        if step.operands[position] in self.plan.grids:
            grid = self.plan.grids[step.operands[position]]
            assert grid.fixed is not None
            quantization = per_tensor(*grid.fixed, grid.dtype)
        elif OPERATORS[step.kind].same_quantization:
            quantization = self.stored_placement(step)
        codes = codes + int(quantization.zero_point[0])
        name = self.name(f"{step.path}/{step.operands[position]}")
        return self.builder.constant(name, on_device(codes, layout).astype(quantization.dtype), quantization)

    # --- the ways of describing an operator -------------------------------------------------------------------------

    def lower_joined(self, operator: DeviceOperator, step: PlanStep, most: int) -> LoweredTensor:
        """As `lower_described`, for an operator with one operand that leaves most axes as they are: those are merged,
        so that at most `most` remain; if that is not enough, one axis is changed after the other."""
        path = step.operands[0]
        layout = self.layout(path)
        attributes = self._device_attributes(operator, step, layout)
        units, target = operator.per_axis_attributes, self.stored_placement(step)
        name = self.on_grid(self.operand(path, layout), target, f"{step.path}/requantized_0")
        changed = [
            axis for axis in range(len(layout.axes)) if any(attributes[key][axis] != units[key] for key in units)
        ]
        rounds = [changed] if len(split_at(changed, len(layout.axes))) <= most else [[axis] for axis in changed]
        for axes in rounds:
            shape = self.builder.tensor(name).shape
            groups = split_at(axes, len(shape))
            sizes = tuple(math.prod(shape[axis] for axis in group) for group in groups)
            name = self._reshape(name, sizes)
            joined: dict[str, Any] = {
                key: tuple(attributes[key][group[0]] if group[0] in axes else units[key] for group in groups)
                for key in units
            }
            free = self.name(f"{step.path}/joined")
            name = str(self.builder.operator(operator.kind, (name,), target, name=free, **joined))
            whole = self.builder.tensor(name).shape
            shape = tuple(whole[groups.index([axis])] if axis in axes else size for axis, size in enumerate(shape))
            last = axes is rounds[-1]
            name = self._reshape(name, shape, step.path if last else "")
        return LoweredTensor(name, layout)

    def _alike(self, operator: DeviceOperator, step: PlanStep) -> LoweredTensor:
        """Operands broadcast, or have the same layout; axes are in the attributes."""
        computed = [path for path in step.operands if path in self.results]
        rank = max(
            len(self.shape(path)) if path in self.results else self.numbers.constants[(step.path, position)][0].ndim
            for position, path in enumerate(step.operands)
        )
        main = max(computed, key=lambda path: (len(self.shape(path)) == rank, math.prod(self.shape(path))))
        layout = self._whole(self.layout(main), self.results[main], rank)
        trailing = operator.trailing(rank, step.attributes)
        if trailing:
            layout = with_last(layout, rank, trailing)
        names = []
        for position, path in enumerate(step.operands):
            if path in self.results:
                names.append(self.operand(path, restricted(layout, rank, len(self.shape(path)))))
            else:
                names.append(self.constant(step, position, layout, rank))
        attributes = self._device_attributes(operator, step, layout)
        name = self.emit(operator, step, names, attributes)
        return LoweredTensor(name, without(layout, operator.removed_axes(step.attributes)))

    def _whole(self, layout: Layout, result: _Result, rank: int) -> Layout:
        """The layout in terms of the axes of a result of `rank` axes, to which the operand's are aligned at the end."""
        shift = rank - len(result.shape)
        if not shift:
            return layout
        axes = [axis + shift if axis >= 0 else -1 for axis in layout.axes]
        return Layout((axes[0], *range(shift), *axes[1:]))

    def weighted(
        self,
        operator: DeviceOperator,
        step: PlanStep,
        attributes: Attributes | None = None,
        name: str | None = None,
    ) -> LoweredTensor:
        """A step with weights.

        Args:
            attributes: those on the device, if the operator derives them from the step's in its own way.
            name: of the result, if it is not yet what the step stores.
        """
        weights = self.numbers.weights[step.path]
        assert step.weights is not None
        codes, scale, bias = np.moveaxis(weights.codes, step.weights.channel_axis, 0), weights.scale, weights.bias
        path = step.operands[0]
        if operator.weights_follow_features:
            source, order, layout = self.features(path)
            codes = codes if order is None else codes[:, order]
            rows = self._order_of_reader(step)
            if rows is not None:
                layout = Layout(layout.axes, tuple(map(int, rows)))
                codes, bias, scale = codes[rows], bias[rows], scale[rows] if scale.size > 1 else scale
        else:
            layout = self.channels_last(path, step.attributes["channel_axis"])
            source = self.operand(path, layout)
            window = codes.shape[2:]
            codes = codes.reshape(*codes.shape[:2], *[1] * (2 - len(window)), *window)
        if attributes is None:
            device_attributes = self._device_attributes(operator, step, layout)
            if "padding" in operator.attributes:
                source, device_attributes["padding"] = self._padding(source, step, device_attributes, codes.shape[2:])
            attributes = device_attributes
        result = operator.build(
            self.builder,
            source,
            operator.device_filter(codes),
            scale,
            bias,
            self.placements(step),
            name=self.name(name or step.path),
            **attributes,
            zero_point=weights.zero_point,
            **({"activation": step.activation} if "activation" in operator.attributes else {}),
        )
        return LoweredTensor(result, layout)

    def _device_attributes(self, operator: DeviceOperator, step: PlanStep, layout: Layout) -> dict[str, Any]:
        """The attributes of a step with axes as on the device."""
        attributes: dict[str, Any] = {}
        for key in operator.attributes:
            if key not in step.attributes or key == "activation":
                continue
            value = step.attributes[key]
            if key in operator.axis_attributes:
                several = isinstance(value, Sequence)
                places = tuple(layout.axes.index(axis) for axis in (value if several else (value,)))
                value = tuple(sorted(places)) if several else places[0]
            elif key in operator.per_axis_attributes:
                unit = operator.per_axis_attributes[key]
                value = tuple(value[axis] if axis >= 0 else unit for axis in layout.axes)
            elif key in operator.per_window_attributes and not isinstance(value, str):
                unit = operator.per_window_attributes[key]
                value = (*[unit] * (2 - len(value)), *value)
            attributes[key] = value
        return attributes

    def _padding(
        self, source: str, step: PlanStep, attributes: Attributes, window: Sequence[int] | None = None
    ) -> tuple[str, str]:
        """The operand (padded if necessary) and the device's name for the padding that a step asks for.

        With the `window` of a filter, SAME is equivalent to zeros; without one these zeros are values like any other.
        """
        padding = attributes["padding"]
        if isinstance(padding, str):
            return source, padding
        pads = (*[(0, 0)] * (2 - len(padding)), *((int(before), int(after)) for before, after in padding))
        if not any(before or after for before, after in pads):
            return source, "VALID"
        if window is not None:
            sizes = self.builder.tensor(source).shape[1:3]
            axes = zip(sizes, window, attributes["strides"], attributes.get("dilations", (1, 1)), strict=True)
            if pads == tuple(same_padding(*axis) for axis in axes):
                return source, "SAME"
        return self.builder.pad(source, ((0, 0), *pads, (0, 0)), name=self.name(f"{step.path}/padded")), "VALID"

    # --- moving axes ------------------------------------------------------------------------------------------------

    def rename_axes(self, step: PlanStep, axes: Sequence[int]) -> LoweredTensor:
        """A permutation: nothing moves, the user only numbers the axes of the same tensor differently."""
        first = self.stored(step.operands[0])
        moved = tuple(axes.index(axis) if axis >= 0 else -1 for axis in first.layout.axes)
        return LoweredTensor(first.name, Layout(moved))

    def reshape(self, step: PlanStep) -> LoweredTensor | None:
        """Another shape of the same elements, made when it is read."""
        source = self.results[step.operands[0]].first
        if source is not None and source.layout.order is not None:  # made for this reader
            layout = self._asked_layout(step)
            assert layout is not None
            shape = tuple(step.shape[axis] if axis >= 0 else 1 for axis in layout.axes)
            return LoweredTensor(self._reshape(source.name, shape, f"{source.name}/{_last(step.path)}"), layout)
        self.results[step.path] = _Result(step.shape, step.batch_axis, pending=step)
        return None

    def _order_of_reader(self, step: PlanStep) -> np.ndarray | None:
        """The features [rows] of a matrix product in the order wanted by its only reader, which turns them into an
        image; None for the user's."""
        readers = [reader for reader in self.plan.steps if step.path in reader.operands]
        if len(readers) != 1 or step.path in self.plan.device_outputs or (len(step.shape), step.batch_axis) != (2, 0):
            return None
        (reader,) = readers
        operator = OPERATORS.get(reader.kind)
        layout = self._asked_layout(reader)
        if operator is None or not operator.moves_axes or "new_shape" not in operator.attributes or layout is None:
            return None
        # One example may have several rows.
        if reader.batch_axis != 0 or step.shape[0] != 1 or reader.path in self.plan.device_outputs:
            return None
        order = np.arange(step.shape[1])
        wanted = on_device(order.reshape(reader.shape), layout).reshape(-1)
        return None if np.array_equal(wanted, order) else wanted

    def _asked_layout(self, step: PlanStep) -> Layout | None:
        """Channels last, if the first reader that cares wants them there."""
        rank = len(step.shape)
        axis = self._asked_channel_axis(step.path, rank)
        if axis is None or rank not in (3, 4):
            return None
        return _channels_last(rank, int(step.batch_axis or 0), axis)

    def _reshaped(self, result: _Result, pending: PlanStep) -> LoweredTensor:
        path = pending.operands[0]
        source, stored = self.results[path], self.stored(path)
        groups = reshape_groups(source.shape, source.batch_axis, result.shape, result.batch_axis)
        for taken, result_axes in groups:
            if source.batch_axis in taken and (taken[0], result_axes[0]) != (source.batch_axis, result.batch_axis):
                raise ValueError(
                    f"{pending.path!r} merges other axes in front of the batch axis, which must come first"
                )
        place = {axis: position for position, axis in enumerate(stored.layout.axes) if axis >= 0}
        # Axes that are split or joined must be neighbours in the user's order; the groups stay where they are.
        ordered = sorted(groups, key=lambda g: (source.batch_axis not in g[0], min(place[axis] for axis in g[0])))
        wanted = [axis for group in ordered for axis in group[0]]
        now = without_units(stored.layout.axes, source.shape, source.batch_axis)
        name = stored.name
        if now != wanted:
            name = self.operand(path, Layout(tuple(wanted)))
        axes = [axis for group in ordered for axis in group[1]]
        for axis in range(len(result.shape)):
            if axis not in axes:  # of size 1: before the axis that follows it
                following = [position for position, other in enumerate(axes) if other > axis and position > 0]
                axes.insert(min(following, default=len(axes)), axis)
        layout = Layout(tuple(axes))
        shape = tuple(result.shape[axis] for axis in axes)
        return LoweredTensor(self._reshape(name, shape, f"{name}/{_last(pending.path)}"), layout)

    def _move(self, result: _Result, first: LoweredTensor, layout: Layout) -> str:
        """TRANSPOSE if axes with more than one element change places, RESHAPE if only others do."""

        def sizes(axes: Sequence[int]) -> tuple[int, ...]:
            return tuple(result.shape[axis] if axis >= 0 else 1 for axis in axes)

        now = without_units(first.layout.axes, result.shape, result.batch_axis)
        wanted = without_units(layout.axes, result.shape, result.batch_axis)
        name = first.name
        if now != wanted:
            if sorted(first.layout.axes) == sorted(layout.axes) and len(set(layout.axes)) == len(layout.axes):
                return self._transpose(name, [first.layout.axes.index(axis) for axis in layout.axes])
            name = self._reshape(name, sizes(now))
            name = self._transpose(name, [now.index(axis) for axis in wanted])
        return self._reshape(name, sizes(layout.axes))

    def _transpose(self, name: str, permutation: Sequence[int]) -> str:
        if len(permutation) <= TRANSPOSED_AXES:
            return str(self.builder.transpose(name, tuple(permutation), name=self.name(f"{name}/transposed")))
        shape = self.builder.tensor(name).shape
        target = tuple(shape[axis] for axis in permutation)
        # Axes that stay together move as one; if that leaves too many, they move one after the other.
        moves, order = [list(permutation)], list(range(len(shape)))
        if len(neighbours_grouped(permutation)) > TRANSPOSED_AXES:
            moves = []
            for place, axis in enumerate(permutation):
                if (now := order.index(axis)) != place:
                    moves.append([*range(place), now, *range(place, now), *range(now + 1, len(shape))])
                    order.insert(place, order.pop(now))
        for move in moves:
            groups = neighbours_grouped(move)
            places = sorted(groups)
            sizes = tuple(math.prod(shape[axis] for axis in group) for group in places)
            name = self._reshape(name, sizes)
            joined = tuple(places.index(group) for group in groups)
            name = str(self.builder.transpose(name, joined, name=self.name(f"{name}/transposed")))
            shape = tuple(shape[axis] for axis in move)
        return self._reshape(name, target)

    def _reshape(self, name: str, shape: tuple[int, ...], wanted: str = "") -> str:
        """wanted: the result's name; by default it says the shape."""
        wanted = wanted or f"{name}/as_{'x'.join(map(str, shape))}"
        # A reshape of a pure reshape replaces it.
        name = name if self.builder.tensor(name).shape == shape else self._reshaped_from.get(name, name)
        if self.builder.tensor(name).shape == shape:
            return name
        result = self._reshapes.get((name, shape))
        if result is None:
            result = str(self.builder.reshape(name, shape, name=self.name(wanted)))
            self._reshapes[(name, shape)] = result
            self._reshaped_from[result] = name
        return result

    # --- inputs and outputs -----------------------------------------------------------------------------------------

    def _signature(self, outputs: Sequence[str]) -> Signature:
        inputs, results = [], []
        for source in self.plan.inputs:
            grid, stored = self.plan.grids[source.grid], self.stored(source.path)
            limits = (INT8_MIN, INT8_MIN + 2**grid.bits - 1) if grid.bits < 8 and not grid.indices else None
            inputs.append(Port(source.name or source.path, stored.name, stored.layout.axes, (), limits))
        for result, name in zip(self.plan.results, outputs, strict=True):
            # What the model performs and the device does not: "softmax over axis 1".
            left = [step for step in map(self.plan.stored, result.outside) if isinstance(step, PlanStep)]
            axes = [step.attributes.get("axis") for step in left]
            words = (
                step.kind if axis is None else f"{step.kind} over axis {axis}"
                for step, axis in zip(left, axes, strict=True)
            )
            results.append(Port(result.name, name, result.axes, tuple(words)))
        return Signature(tuple(inputs), tuple(results))

    def _indices(self, step: PlanStep) -> LoweredTensor:
        """The device's last operator, if its results are integers without a grid."""
        operator, (path,) = OPERATORS[step.device_kind], step.operands
        layout = self.layout(path)
        attributes = self._device_attributes(operator, step, layout)
        attributes["output_type"] = "int32"  # TFLite-Micro knows no other
        name = operator.build(self.builder, self.operand(path, layout), name=self.name(step.path), **attributes)
        return LoweredTensor(name, without(layout, operator.removed_axes(step.attributes)))

    def _input(self, source: PlanInput) -> None:
        layout = self._input_layout(source)
        shape = tuple(source.shape[axis] if axis >= 0 else 1 for axis in layout.axes)
        name = self.builder.input(self.name(source.path), shape, self.placements(source)[-1])
        self._enter(source.path, source.shape, source.batch_axis, LoweredTensor(name, layout))

    def _input_layout(self, source: PlanInput) -> Layout:
        """The contract's (`planning.files`). For part of a network: channels last if the first operator that cares
        wants them there, and for images; else the user's order."""
        if source.axes:
            return Layout(source.axes)
        rank = len(source.shape)
        channel_axis = self._asked_channel_axis(source.path, rank)
        if channel_axis is None and rank == 4 and source.batch_axis == 0:
            channel_axis = 1
        if channel_axis is None or rank not in (3, 4):
            return _batch_first(rank, source.batch_axis)
        layout = _channels_last(rank, source.batch_axis, channel_axis)
        return Layout(tuple(axis for axis in layout.axes if axis >= 0))

    def _asked_channel_axis(self, path: str, rank: int) -> int | None:
        reached = {path}
        for step in self.plan.steps:
            if step.left_out or not reached.intersection(step.operands):
                continue
            operator = OPERATORS.get(step.kind)
            if operator is not None and operator.spatial:
                axis = step.attributes.get("channel_axis")
                return axis if isinstance(axis, int) else None
            if len(step.shape) == rank and (operator is None or not operator.moves_axes):
                reached.add(step.path)
        return None

    def _output(self, path: str) -> str:
        """For part of a network: as its user sees it; feature maps keep their channels last."""
        result, layout = self.results[path], self.layout(path)
        if len(result.shape) != 4 or result.batch_axis != 0 or layout.axes != (0, 2, 3, 1):
            layout = _batch_first(len(result.shape), result.batch_axis)
        return self.operand(path, layout)

    def _enter(self, path: str, shape: tuple[int, ...], batch_axis: int, stored: LoweredTensor) -> None:
        result = _Result(shape, batch_axis, stored)
        result.forms[stored.layout.axes] = stored.name
        self.results[path] = result


def _batch_first(rank: int, batch_axis: int) -> Layout:
    return Layout((batch_axis, *[axis for axis in range(rank) if axis != batch_axis]))


def _channels_last(rank: int, batch_axis: int, channel_axis: int) -> Layout:
    """[batch, height, width, channels]; absent spatial axes have size 1."""
    spatial = [axis for axis in range(rank) if axis not in (batch_axis, channel_axis)]
    return Layout((batch_axis, *[-1] * (2 - len(spatial)), *spatial, channel_axis))


def _last(path: str) -> str:
    return path.rsplit(".", 1)[-1]
