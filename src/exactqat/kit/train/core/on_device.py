# SPDX-License-Identifier: Apache-2.0
"""What a frozen plan computes on the device, in NumPy.

`DeviceSteps` knows, on given grids, where results are placed and clamped, and asks the declarations for single steps.
`DeviceStep` and `DeviceNetwork` are functions for kits whose own arithmetic rounds differently. Their compiled programs
call the host for these: in training step by step, where gradients stay those of the step in real numbers, straight
through all roundings (`docs/decisions/frozen.md`); in evaluation once for the whole network.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np

from ....deploy.graph import Graph
from ....deploy.lower import LoweredStep, Lowering, Stored, lower_step, on_device
from ....deploy.simulate import Compiled, compile, simulate_operator
from ....deploy.values import in_users_order
from ...device import INT8_MAX, INT8_MIN, OPERATORS, Quantization, Tensor, profile_named
from ...device.arithmetic import bounds, zero_point_of
from ...device.operator import Layout
from ...device.tensor import CODE_RANGES
from ...engine import dequantized, quantized
from ...planning.inputs import require_rows
from ...planning.plans import Numbers, Plan, PlanStep

# In steps: how close still counts as the end of a grid, for gradients.
SLACK = 2.0**-14

# By position among a step's operands: codes less the zero point, and their scale.
Constants = Mapping[int, tuple[np.ndarray, np.float32]]


@dataclass(frozen=True)
class Clamp:
    """How the device stores what a step computes, in the result's steps from real 0.

    Attributes:
        scale: of the result.
        lowest, highest: what activation, placement and container let through.
        low, high: gradients pass between them (exclusive), before rounding.
    """

    scale: np.float32
    lowest: float
    highest: float
    low: float
    high: float


class DeviceSteps:
    """The steps of a plan on given grids. Caches what follows from these alone, and from the last constants.

    Attributes:
        grids: (scale, zero point) by name; codes are 0..2**bits - 1.
        profile: whose integers.
    """

    def __init__(self, plan: Plan, grids: dict[str, tuple[np.float32, int]], profile: str) -> None:
        self.plan = plan
        self.grids = grids
        self.profile = profile
        self._lowering = Lowering(plan, Numbers(grids, {}))
        self._placements: dict[str, Quantization] = {}
        self._clamps: dict[str, Clamp] = {}
        self._lowered: dict[str, tuple[Any, LoweredStep]] = {}
        self._tables: dict[str, tuple[Any, np.ndarray, np.ndarray | None]] = {}

    def bits(self, path: str) -> int:
        """The bits of what a step stores or passes on."""
        grid = self.plan.stored(path).grid
        if not grid:  # training's own steps store nothing
            return self.bits(cast(PlanStep, self.plan.stored(path)).operands[0])
        return self.plan.grids[grid].bits

    def placement(self, path: str) -> Quantization:
        """The grid of a stored tensor as the device places its codes."""
        if path not in self._placements:
            self._placements[path] = self._lowering.placement(path)
        return self._placements[path]

    def zero_point(self, path: str) -> int:
        """The code of real 0, on the device."""
        return int(self.placement(path).zero_point[0])

    def clamp(self, path: str) -> Clamp:
        """How a step's result in int8 is stored."""
        if path not in self._clamps:
            self._clamps[path] = self._clamp(cast(PlanStep, self.plan.stored(path)))
        return self._clamps[path]

    def _clamp(self, step: PlanStep) -> Clamp:
        placements = self._lowering.placements(step)
        scale = placements[0].scale[0]
        fused = {"activation": step.activation if "activation" in OPERATORS[step.kind].attributes else "NONE"}
        tensor = Tensor(step.path, (1,), "int8", placements[0])
        ends = [np.array(bounds(tensor, fused, profile_named(self.profile))) - zero_point_of(tensor)]
        ends += [np.array((INT8_MIN, INT8_MAX)) - int(each.zero_point[0]) for each in placements[1:]]
        lowest, highest = max(low for low, _ in ends), min(high for _, high in ends)
        _, zero = self.grids[step.grid]
        low, high = float(-zero), float(2 ** self.plan.grids[step.grid].bits - 1 - zero)
        if step.bounds is not None:
            low, high = max(low, step.bounds[0] / float(scale)), min(high, step.bounds[1] / float(scale))
        # Fake quantization passes gradients at its ends, activations do not.
        low, high = low - SLACK, high + SLACK
        if step.activation != "NONE":
            low = max(low, 0.0)
        if step.activation == "RELU6":
            high = min(high, 6 / float(scale))
        return Clamp(scale, float(lowest), float(highest), low, high)

    # --- by the declarations ------------------------------------------------------------------------------------------

    def results(
        self, step: PlanStep, operands: Sequence[np.ndarray], constants: Constants, weights: Mapping[str, Any]
    ) -> np.ndarray:
        """A step's result in steps from real 0, float32, its axes in the user's order.

        Args:
            operands: the computed ones, likewise.
            weights: of the step, as in `Numbers`.
        """
        lowered = self._lowered_step(step, constants, weights)
        values = {}
        for path, steps in zip(self._computed(step), operands, strict=True):
            tensor = lowered.graph.tensors[path]
            codes = (steps + np.float32(zero_point_of(tensor))).astype(tensor.dtype)
            values[path] = np.ascontiguousarray(on_device(codes, lowered.layouts[path]))
        results = self._simulated(lowered.graph, values)[lowered.stored.name]
        steps = results.astype(np.float32) - np.float32(zero_point_of(lowered.graph.tensors[lowered.stored.name]))
        return in_users_order(steps, lowered.stored.layout)

    def table(self, step: PlanStep, constants: Constants) -> tuple[np.ndarray, np.ndarray | None]:
        """For a pointwise step in int8: steps of the result for the codes of the first operand (rows) and of the
        second, or the constant's distinct codes (columns); and the column of every value of the constant. The same
        arrays as long as constants stay the same."""
        key = [(position, codes.tobytes(), scale) for position, (codes, scale) in constants.items()]
        known = self._tables.get(step.path)
        if known is not None and known[0] == key:
            return known[1], known[2]
        lowered = self._lowered_step(step, constants, {})
        every = np.arange(INT8_MIN, INT8_MAX + 1).astype(np.int8)
        different = dict.fromkeys(self._computed(step))
        values = {name: every.reshape((-1, 1) if number == 0 else (1, -1)) for number, name in enumerate(different)}
        tensors, columns = dict(lowered.graph.tensors), None
        for name, tensor in lowered.graph.tensors.items():
            if tensor.data is not None:
                (codes, _), *_ = constants.values()
                kept, places = np.unique(codes, return_inverse=True)
                columns = places.reshape(codes.shape).astype(np.int32)
                values[name] = (kept.reshape(1, -1) + zero_point_of(tensor)).astype(np.int8)
                tensors[name] = replace(tensor, data=None)
        # Positions mean nothing here, so operators that move codes are left out.
        results = self._simulated(replace(lowered.graph, tensors=tensors), values, moved=False)[lowered.stored.name]
        table = results.astype(np.float32) - zero_point_of(tensors[lowered.stored.name])
        self._tables[step.path] = (key, table, columns)
        return table, columns

    def _computed(self, step: PlanStep) -> list[str]:
        return [name for name in step.operands if self.plan.is_stored(name)]

    def _simulated(self, graph: Graph, values: dict[str, np.ndarray], moved: bool = True) -> dict[str, np.ndarray]:
        """All results by name. moved: whether to run operators that move codes."""
        for operator in graph.operators:
            if moved or not OPERATORS[operator.kind].moves_codes:
                values[operator.outputs[0]] = simulate_operator(graph, operator, values, self.profile)
            else:
                values[operator.outputs[0]] = values[operator.inputs[0]]
        return values

    def _lowered_step(self, step: PlanStep, constants: Constants, weights: Mapping[str, Any]) -> LoweredStep:
        key = [(codes.tobytes(), scale) for codes, scale in constants.values()]
        known = self._lowered.get(step.path)
        if known is not None and known[0] == key and not weights:
            return known[1]
        numbers = {(step.path, position): each for position, each in constants.items()}
        lowered = lower_step(self.plan, step, Numbers(self.grids, weights, numbers))
        self._lowered[step.path] = (key, lowered)
        return lowered


# --- functions of the host ----------------------------------------------------------------------------------------

NumbersOf = Callable[[Sequence[np.ndarray]], Numbers]


def codes_of(
    feature: np.ndarray, tensor: Tensor, layout: Layout, stored: StoredTensor
) -> tuple[np.ndarray, np.ndarray | None]:
    """Codes, in the device's order of axes, for real numbers on a tensor's grid; and which examples have NaN, bool
    [examples], if any do. NaN gets the code of 0."""
    if tensor.dtype not in CODE_RANGES:
        return np.ascontiguousarray(on_device(feature.astype(tensor.dtype), layout)), None
    codes, rows = quantized(feature, tensor)
    codes = np.ascontiguousarray(on_device(codes, layout))
    if not rows.any():
        return codes, None
    # One example after the other, each with all of its rows.
    examples = feature.shape[stored.batch_axis] // stored.shape[stored.batch_axis]
    return codes, np.isnan(np.moveaxis(feature, stored.batch_axis, 0)).reshape(examples, -1).any(1)


def real_numbers(codes: np.ndarray, tensor: Tensor, layout: Layout) -> np.ndarray:
    """The real numbers that a tensor's codes represent, float32, in the user's order of axes."""
    return in_users_order(dequantized(codes, tensor), layout)


class StoredTensor(Protocol):
    """Where the batch is in a tensor of a plan."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def batch_axis(self) -> int: ...


def have_same_values(known: Sequence[np.ndarray], given: Sequence[np.ndarray]) -> bool:
    """Whether all arrays are equal; arrays with NaN never are."""
    return all(np.array_equal(*pair) for pair in zip(known, given, strict=True))


def with_nan(result: np.ndarray, examples: np.ndarray, stored: StoredTensor) -> None:
    """Makes all rows of these examples NaN."""
    rows = np.repeat(examples, stored.shape[stored.batch_axis])
    np.moveaxis(result, stored.batch_axis, 0)[rows] = np.nan


class DeviceStep:
    """One step as the device computes it: a function of NumPy arrays. May be called from several threads."""

    def __init__(self, plan: Plan, step: PlanStep, profile: str, numbers_of: NumbersOf) -> None:
        """
        Args:
            profile: whose integers, by the names of `deploy.PROFILES`.
            numbers_of: the numbers of this step, from the arrays that training has changed.
        """
        self.plan = plan
        self.step = step
        self.profile = profile
        self.numbers_of = numbers_of
        self.operands = tuple(name for name in step.operands if plan.is_stored(name))
        self._lock = threading.Lock()
        self._known: tuple[list[np.ndarray], LoweredStep] | None = None

    def __call__(self, trained: Sequence[np.ndarray], features: Sequence[np.ndarray]) -> np.ndarray:
        """The stored tensor in real numbers, float32, its axes in the user's order; where an operand has NaN, for which
        there is no code, the whole example is NaN.

        Args:
            trained: what `numbers_of` takes.
            features: real numbers on the grids of the operands.
        """
        lowered = self._lowered(trained)
        graph, values = lowered.graph, {}
        broken: np.ndarray | None = None
        for name, feature in zip(self.operands, features, strict=True):
            given = codes_of(feature, graph.tensors[name], lowered.layouts[name], self.plan.stored(name))
            values[name], missing = given
            if missing is not None:
                broken = missing if broken is None else broken | missing
        for operator in graph.operators:
            values[operator.outputs[0]] = simulate_operator(graph, operator, values, self.profile)
        name = lowered.stored.name
        result = real_numbers(values[name], graph.tensors[name], lowered.stored.layout)
        if broken is not None:
            with_nan(result, broken, self.step)
        return result

    def _lowered(self, trained: Sequence[np.ndarray]) -> LoweredStep:
        with self._lock:
            if self._known is None or not have_same_values(self._known[0], trained):
                # The arrays may be a program's own memory, which it reuses.
                own = [array.copy() for array in trained]
                self._known = (own, lower_step(self.plan, self.step, self.numbers_of(own)))
            return self._known[1]


class DeviceNetwork:
    """What a frozen network returns on the device, all steps at once, by its compiled graph: a function of NumPy
    arrays, which returns what `DeviceStep` returns step by step. May be called from several threads.

    Attributes:
        wanted: paths of the tensors it returns: the network's outputs, before final steps that are not on the device.
        after: paths of those final steps.
    """

    def __init__(self, plan: Plan, profile: str, numbers_of: NumbersOf) -> None:
        """
        Args:
            profile: whose integers, by the names of `deploy.PROFILES`.
            numbers_of: the numbers of all steps, from the arrays that training has changed.
        """
        self.plan = plan
        self.profile = profile
        self.numbers_of = numbers_of
        after: dict[str, None] = {}
        wanted = dict.fromkeys(plan.outputs)
        self._reached = {each.path: {each.path} for each in plan.inputs}
        for step in plan.steps:
            operands = [name for name in step.operands if plan.is_stored(name)]
            self._reached[step.path] = set().union(*(self._reached[name] for name in operands))
            if step.outside or any(name in after for name in operands):
                after[step.path] = None
                wanted |= dict.fromkeys(operands)
        self.after = tuple(after)
        self.wanted = tuple(path for path in wanted if path not in after)
        self._lock = threading.Lock()
        self._seen: list[np.ndarray] | None = None
        self._known: tuple[Compiled, dict[str, Layout], list[tuple[Tensor, Stored]]] | None = None

    def knows(self, trained: Sequence[np.ndarray]) -> bool:
        """Whether the last call, of this function or of the network, was with the same values: preparing the whole
        network then pays off."""
        with self._lock:
            return self._is_known(trained)

    def _is_known(self, trained: Sequence[np.ndarray]) -> bool:
        if self._seen is not None and have_same_values(self._seen, trained):
            return True
        self._seen = [array.copy() for array in trained]
        self._known = None
        return False

    def __call__(self, trained: Sequence[np.ndarray], features: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The wanted tensors in real numbers, float32, their axes in the user's order; where an input that they depend
        on has NaN, the whole example is NaN.

        Args:
            trained: what `numbers_of` takes.
            features: real numbers on the grids of the plan's inputs.

        Raises:
            ValueError: what was trained has no graph, or the graph lacks some of what is wanted.
        """
        with self._lock:
            if not self._is_known(trained) or self._known is None:
                assert self._seen is not None
                self._known = self._prepared(self._seen)
            compiled, layouts, wanted = self._known
        codes, broken = {}, {}
        for each, feature in zip(self.plan.inputs, features, strict=True):
            if each.rows and feature.size:
                require_rows(each, int(feature.min()), int(feature.max()))
            tensor, layout = compiled.tensor(each.path), layouts[each.path]
            codes[each.path], broken[each.path] = codes_of(feature, tensor, layout, self.plan.stored(each.path))
        found = compiled.run(codes, [stored.name for _, stored in wanted])
        results = [real_numbers(found[stored.name], tensor, stored.layout) for tensor, stored in wanted]
        for path, examples in broken.items():
            for name, result in zip(self.wanted, results, strict=True):
                if examples is not None and path in self._reached[name]:
                    with_nan(result, examples, self.plan.stored(name))
        return results

    def _prepared(
        self, trained: Sequence[np.ndarray]
    ) -> tuple[Compiled, dict[str, Layout], list[tuple[Tensor, Stored]]]:
        lowering = Lowering(self.plan, self.numbers_of(trained))
        graph = lowering.run()
        wanted = [lowering.stored(path) for path in self.wanted]
        missing = [stored.name for stored in wanted if stored.name not in graph.tensors]
        if missing:
            raise ValueError(f"the graph does not compute {missing}")
        layouts = {each.path: lowering.layout(each.path) for each in self.plan.inputs}
        return compile(graph, self.profile), layouts, [(graph.tensors[stored.name], stored) for stored in wanted]
