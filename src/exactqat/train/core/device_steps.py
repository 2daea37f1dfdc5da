# SPDX-License-Identifier: Apache-2.0
"""The steps of a frozen plan on the current grids, in NumPy: where their results are placed and clamped, and the
integers that the declarations compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from ...deploy.graph import Graph
from ...deploy.lower import LoweredStep, Lowering, lower_step, on_device
from ...deploy.simulate import simulate_operator
from ...deploy.values import in_users_order
from ...device import INT8_MAX, INT8_MIN, OPERATORS, Quantization, Tensor, profile_named
from ...device.arithmetic import bounds, zero_point_of
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
