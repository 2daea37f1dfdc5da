# SPDX-License-Identifier: Apache-2.0
"""What a frozen plan computes on the device, in NumPy.

`DeviceSteps` knows, on given grids, where results are placed and clamped. Every framework calls `DeviceStep` and
`DeviceNetwork` on the host: in training step by step, where gradients stay those of the step in real numbers, straight
through all roundings (`docs/decisions/frozen.md`); in evaluation once for the whole network.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ....deploy.graph import Graph
from ....deploy.lower import LoweredTensor, Lowering, lower_step, on_device
from ....deploy.simulate import compile, simulate_operator
from ....deploy.values import in_users_order
from ....kit.device import INT8_MAX, INT8_MIN, OPERATORS, Tensor, profile_named
from ....kit.device.arithmetic import bounds, zero_point_of
from ....kit.device.operator import Layout
from ....kit.device.tensor import CODE_RANGES
from ....kit.engine import dequantized, quantized
from ....kit.planning.inputs import require_rows
from ....kit.planning.plans import Numbers, Plan, PlanInput, PlanStep

# In steps: how close still counts as the end of a grid, for gradients.
SLACK = 2.0**-14


# What `DeviceSteps.rounded_by` returns for the operator `rounded_sums_by_grid`, before the ends of the input's steps.
ROUNDED_BY = 6


def bits_of(plan: Plan, path: str) -> int:
    """The bits of what a step stores or passes on."""
    stored = plan.stored(path)
    if stored.grid:
        return plan.grids[stored.grid].bits
    assert isinstance(stored, PlanStep)  # training's own steps store nothing
    return bits_of(plan, stored.operands[0])


class DeviceSteps:
    """Where the steps of a plan are placed on given grids.

    Attributes:
        grids: (scale, zero point) by name; codes are 0..2**bits - 1.
        profile: whose integers.
    """

    def __init__(self, plan: Plan, grids: dict[str, tuple[np.float32, int]], profile: str) -> None:
        self.plan = plan
        self.grids = grids
        self.profile = profile
        self._lowering = Lowering(plan, Numbers(grids, {}))
        self._scales: dict[str, np.float32] = {}
        self._rounded_by: dict[str, np.ndarray] = {}

    def scale(self, path: str) -> np.float32:
        """The scale of a stored tensor as the device places its codes."""
        if path not in self._scales:
            self._scales[path] = self._lowering.placement(path).scale[0]
        return self._scales[path]

    def rounded_by(self, step: PlanStep) -> np.ndarray:
        """How a layer with weights in eight bits is rounded: input scale, result scale, lowest and highest result, the
        ends between which gradients pass (exclusive), and the input's ends; float32 [8], all ends in steps from real
        0."""
        if step.path in self._rounded_by:
            return self._rounded_by[step.path]
        (operand,) = (name for name in step.operands if self.plan.is_stored(name))
        operand_placement, placements = self._lowering.placement(operand), self._lowering.placements(step)
        scale = placements[0].scale[0]
        fused = {"activation": step.activation if "activation" in OPERATORS[step.kind].attributes else "NONE"}
        tensor = Tensor(step.path, (1,), "int8", placements[0])
        # What activation, placement and container let through.
        profile = profile_named(self.profile).of(step.kind)
        ends = [np.array(bounds(tensor, fused, profile)) - zero_point_of(tensor)]
        ends += [np.array((INT8_MIN, INT8_MAX)) - int(placement.zero_point[0]) for placement in placements[1:]]
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
        of_operand = (end - int(operand_placement.zero_point[0]) for end in (INT8_MIN, INT8_MAX))
        numbers = np.array([operand_placement.scale[0], scale, lowest, highest, low, high, *of_operand], np.float32)
        return self._rounded_by.setdefault(step.path, numbers)


# --- functions of the host ----------------------------------------------------------------------------------------

NumbersOf = Callable[[Sequence[np.ndarray]], Numbers]


class Integers(NamedTuple):
    """A part of a network, lowered.

    Attributes:
        graph: its integers.
        layouts: of what it reads, by path.
        stored: what it gives, in the order in which it is wanted.
        run: from codes by name, those of the wanted ones.
    """

    graph: Graph
    layouts: Mapping[str, Layout]
    stored: Sequence[LoweredTensor]
    run: Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]


class DevicePart:
    """A part of a frozen network as the device computes it: a function of NumPy arrays. May be called from several
    threads.

    Attributes:
        read, wanted: paths of the tensors that it reads and gives.
    """

    def __init__(
        self,
        plan: Plan,
        profile: str,
        numbers_of: NumbersOf,
        read: Sequence[str],
        wanted: Mapping[str, Collection[str]],
    ) -> None:
        """
        Args:
            profile: whose integers, by the names of `deploy.PROFILES`.
            numbers_of: the numbers of the part, from the arrays that training has changed.
            wanted: with what they depend on, of `read`.
        """
        self.plan, self.profile, self.numbers_of = plan, profile, numbers_of
        self.read, self.wanted = tuple(read), tuple(wanted)
        self._depends_on = wanted
        self._lock = threading.Lock()
        self._seen: list[np.ndarray] | None = None
        self._known: Integers | None = None

    def knows(self, trained: Sequence[np.ndarray]) -> bool:
        """Whether the last call, of this function or of the part, was with the same values: preparing a whole network
        then pays off. Arrays with NaN are never the same."""
        with self._lock:
            return self._is_known(trained)

    def _is_known(self, trained: Sequence[np.ndarray]) -> bool:
        if self._seen is not None and all(np.array_equal(*pair) for pair in zip(self._seen, trained, strict=True)):
            return True
        # The arrays may be a program's own memory, which it reuses.
        self._seen = [array.copy() for array in trained]
        self._known = None
        return False

    def integers(self, trained: Sequence[np.ndarray]) -> Integers:
        """The part for what was trained.

        Raises:
            ValueError: that has no graph.
        """
        with self._lock:
            if not self._is_known(trained) or self._known is None:
                assert self._seen is not None
                self._known = self._lowered(self.numbers_of(self._seen))
            return self._known

    def __call__(self, trained: Sequence[np.ndarray], features: Sequence[np.ndarray]) -> Any:
        """The wanted tensors in real numbers, float32, their axes in the user's order; where a tensor that they depend
        on has NaN, for which there is no code, the whole example is NaN.

        Args:
            trained: what `numbers_of` takes.
            features: real numbers on the grids of what is read.

        Raises:
            ValueError: what was trained has no graph, or the graph lacks some of what is wanted.
        """
        graph, layouts, stored, run = self.integers(trained)
        codes, broken = {}, {}
        for path, feature in zip(self.read, features, strict=True):
            step, tensor = self.plan.stored(path), graph.tensors[path]
            if isinstance(step, PlanInput) and step.rows and feature.size:
                require_rows(step, int(feature.min()), int(feature.max()))
            # First of all: what lies as on the device is not copied.
            arranged = np.ascontiguousarray(on_device(feature, layouts[path]))
            if tensor.dtype in CODE_RANGES:
                codes[path], missing = quantized(arranged, tensor)
                if missing.any():
                    broken[path] = self._examples_with_nan(feature, step)
            else:
                codes[path] = arranged.astype(tensor.dtype)
        computed, results = run(codes), []
        for path, output in zip(self.wanted, stored, strict=True):
            result = in_users_order(dequantized(computed[output.name], graph.tensors[output.name]), output.layout)
            step = self.plan.stored(path)
            for examples in (broken[name] for name in broken if name in self._depends_on[path]):
                rows = np.repeat(examples, step.shape[step.batch_axis])
                np.moveaxis(result, step.batch_axis, 0)[rows] = np.nan
            results.append(result)
        return results

    @staticmethod
    def _examples_with_nan(feature: np.ndarray, stored: PlanInput | PlanStep) -> np.ndarray:
        # One example after the other, each with all of its rows.
        examples = feature.shape[stored.batch_axis] // stored.shape[stored.batch_axis]
        return np.isnan(np.moveaxis(feature, stored.batch_axis, 0)).reshape(examples, -1).any(1)

    def _lowered(self, numbers: Numbers) -> Integers:
        raise NotImplementedError


class DeviceStep(DevicePart):
    """One step as the device computes it."""

    def __init__(self, plan: Plan, step: PlanStep, profile: str, numbers_of: NumbersOf) -> None:
        operands = [name for name in step.operands if plan.is_stored(name)]
        super().__init__(plan, profile, numbers_of, operands, {step.path: operands})
        self.step = step

    def __call__(self, trained: Sequence[np.ndarray], features: Sequence[np.ndarray]) -> np.ndarray:
        """The one that is wanted."""
        return super().__call__(trained, features)[0]

    def _lowered(self, numbers: Numbers) -> Integers:
        lowered = lower_step(self.plan, self.step, numbers)
        lowered.graph.check_operators()

        def run(codes: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
            for operator in lowered.graph.operators:
                codes[operator.outputs[0]] = simulate_operator(lowered.graph, operator, codes, self.profile)
            return codes

        return Integers(lowered.graph, lowered.layouts, [lowered.stored], run)


class DeviceNetwork(DevicePart):
    """What a frozen network returns on the device, all steps at once, by its compiled graph: what `DeviceStep` returns
    step by step.

    Attributes:
        wanted: paths of the network's outputs, before final steps that are not on the device.
        after: paths of those final steps.
    """

    def __init__(self, plan: Plan, profile: str, numbers_of: NumbersOf) -> None:
        after: dict[str, None] = {}
        wanted = dict.fromkeys(plan.outputs)
        reached = {plan_input.path: {plan_input.path} for plan_input in plan.inputs}
        for step in plan.steps:
            operands = [name for name in step.operands if plan.is_stored(name)]
            reached[step.path] = set().union(*(reached[name] for name in operands))
            if step.outside or any(name in after for name in operands):
                after[step.path] = None
                wanted |= dict.fromkeys(operands)
        self.after = tuple(after)
        depends_on = {path: reached[path] for path in wanted if path not in after}
        super().__init__(plan, profile, numbers_of, [plan_input.path for plan_input in plan.inputs], depends_on)

    def _lowered(self, numbers: Numbers) -> Integers:
        lowering = Lowering(self.plan, numbers)
        graph = lowering.run()
        wanted = [lowering.stored(path) for path in self.wanted]
        missing = [stored.name for stored in wanted if stored.name not in graph.tensors]
        if missing:
            raise ValueError(f"the graph does not compute {missing}")
        compiled, names = compile(graph, self.profile), [stored.name for stored in wanted]
        layouts = {path: lowering.layout(path) for path in self.read}
        return Integers(graph, layouts, wanted, lambda codes: compiled.run(codes, names))
