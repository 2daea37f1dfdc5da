# SPDX-License-Identifier: Apache-2.0
"""Trains a plan by pure functions: parameters and state go in, results and the next state come out.

It knows no framework. It computes with a framework's `primitives`; the device's declarations say what an operator
computes. Each framework's own file says where it keeps parameters and state. Integers are computed in NumPy, so equal
numbers give equal integers in all frameworks.

PyTorch binds the same steps to its modules once (`train.torch.prepared`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

import numpy as np

from ....kit.device import DEFAULT_PROFILE, OPERATORS
from ....kit.planning.inputs import require_examples
from ....kit.planning.moved import warn_of_moved_weights
from ....kit.planning.plans import Numbers, Plan, PlanStep
from . import primitives_numpy
from .accumulators import Accumulators, LayerNumbers, moved_constants
from .arrays import Arrays, Mode, is_learned, weights_of
from .freezing import fresh_norms
from .integers import all_numbers, nudged_grids, numbers_of
from .on_device import DeviceNetwork, DeviceStep
from .primitives import Array, FunctionalPrimitives
from .state import State, in_numpy
from .steps import Step, WeightedStep
from .training_plan import TrainingPlan
from .weights import learned_ends

# What a step draws random numbers from, by its number.
Key = Callable[[int], Array]


class Functional(TrainingPlan):
    """A plan as functions of `Arrays`."""

    def __init__(
        self, plan: Plan, primitives: FunctionalPrimitives | None = None, profile: str | None = DEFAULT_PROFILE
    ) -> None:
        super().__init__(plan, primitives, profile)
        self._device_steps: dict[str, DeviceStep] = {}
        self._nudged: tuple[bytes, dict[str, tuple[np.float32, int]]] | None = None

    def initial(self, tensors: Mapping[str, Array]) -> Arrays:
        """NumPy arrays to begin with; `tensors` are the user's."""
        arrays = Arrays(dict(tensors))
        self.moved = moved_constants(self, tensors)
        self.fresh_norms = fresh_norms(self, tensors)
        for name, grid in self.grids.items():
            rule = grid.rule
            low, high = rule.fixed_range if rule.fixed_range is not None else (0.0, 0.0)
            ends = {"minimum": np.asarray(low, np.float32), "maximum": np.asarray(high, np.float32)}
            learned = {end: value for end, value in ends.items() if is_learned(grid, end)}
            if learned:
                arrays.learned[name] = learned
            others = {end: value for end, value in ends.items() if end not in learned}
            arrays.ranges[name] = {**others, "batches": np.asarray(0, np.int32)}
        for path, norm in self.norms.items():
            if norm.training:
                arrays.ranges[self.grid_of[path]]["trained"] = np.asarray(0, np.int32)
        run = in_numpy(self, arrays, frozen=False)
        for step in self.plan.steps:
            weights = step.weights
            if weights is None or weights.rule.ranges != "learned" or self.weight_owner[step.path] != step.path:
                continue
            moved = np.moveaxis(run.stored_weight(weights), weights.channel_axis, -1)
            ends = learned_ends(primitives_numpy, weights.rule, moved, weights.range_end)
            arrays.learned[weights_of(step.path)] = {end: np.asarray(value, np.float32) for end, value in ends.items()}
        return arrays

    def run(
        self,
        arrays: Arrays,
        inputs: Sequence[Array],
        mode: Mode,
        key: Key | None = None,
        seen: dict[str, Array] | None = None,
    ) -> tuple[list[Array], Arrays]:
        """The network's outputs, flattened, and the arrays after this run.

        Args:
            inputs: one array for each of the plan's.
            key: returns what `primitives.dropout` draws from, by a step's number.
            seen: filled with every tensor that a step computes.
        """
        return Run(self, arrays, mode, key).forward(inputs, seen)

    def numbers(self, arrays: Arrays) -> Numbers:
        """The numbers that training ended with, for `deploy.lower`. arrays: in NumPy.

        Raises:
            MissingData: a range has seen no data.
        """
        warn_of_moved_weights(self.plan, arrays.tensors)
        return all_numbers(in_numpy(self, arrays))

    def compute_as(self, profile: str | None) -> None:
        """A frozen network computes as another device does from here on."""
        self.profile = profile if self.plan.has_a_device else None
        self._device_steps = {}
        for name in ("device_network", "layer_numbers"):
            vars(self).pop(name, None)

    # --- what the device makes of a step ------------------------------------------------------------------------------

    def device_step(self, step: PlanStep) -> DeviceStep:
        """What the device computes in a step of a frozen network; its `trained` is what `numbers_source` returns."""
        if step.path not in self._device_steps:
            assert self.profile is not None
            numbers = partial(self._numbers_from, [step])
            self._device_steps[step.path] = DeviceStep(self.plan, step, self.profile, numbers)
        return self._device_steps[step.path]

    @cached_property
    def device_network(self) -> DeviceNetwork:
        """What the device computes in a whole frozen network; its `trained` is what `numbers_source` returns."""
        assert self.profile is not None
        return DeviceNetwork(self.plan, self.profile, partial(self._numbers_from, self.plan.steps))

    @cached_property
    def layer_numbers(self) -> LayerNumbers:
        """The numbers for rounding the accumulators of a frozen network's layers."""
        return LayerNumbers(self)

    def numbers_source(self, steps: Sequence[PlanStep], arrays: Arrays, ends: Array) -> list[Array]:
        """All that the integers of some steps depend on, as a list of arrays. ends: what `ends_of` returns."""
        return [*self.all_ends(steps, arrays, ends), *(arrays.tensors[name] for name in self.tensors_of(steps))]

    def _numbers_from(self, steps: Sequence[PlanStep], source: Sequence[np.ndarray]) -> Numbers:
        """The integers of some steps, from what `numbers_source` returns."""
        rest = iter(source)
        arrays = self.with_ends(steps, rest)
        arrays.tensors = dict(zip(self.tensors_of(steps), rest, strict=False))
        state, nudged = in_numpy(self, arrays), self._nudged
        if nudged is None or nudged[0] != source[0].tobytes():
            nudged = self._nudged = (source[0].tobytes(), nudged_grids(state))
        return numbers_of(state, steps, nudged[1])


class Run(State):
    """One run of a network with pure functions."""

    functional: Functional

    def __init__(self, functional: Functional, arrays: Arrays, mode: Mode, key: Key | None) -> None:
        super().__init__(functional, arrays, mode)
        self.key = key

    def forward(self, inputs: Sequence[Array], seen: dict[str, Array] | None = None) -> tuple[list[Array], Arrays]:
        values: dict[str, Array] = {}
        follows = self.mode.observing or (self.mode.training and not self.mode.frozen)
        for plan_input, x in zip(self.plan.inputs, inputs, strict=True):
            if follows:
                require_examples(plan_input, tuple(x.shape))
            values[plan_input.path] = self.grid(plan_input.grid)(x)
        as_device = self.mode.frozen and self.mode.quantizing and self.functional.profile is not None
        on_grid, ends = set(values), None
        if as_device:
            p = self.primitives
            ends = p.stack([p.stop_gradient(end) for end in self.functional.ends_of(self.arrays)], 0)

        def on_host(step: PlanStep, like: Array, features: Sequence[Array]) -> Array:
            source = self.functional.numbers_source([step], self.arrays, ends)
            return self.primitives.on_host(self.functional.device_step(step), like, source, features)

        def step_by_step() -> dict[str, Array]:
            sums = None
            if as_device and self.primitives.sums_are_exact():
                sums = Accumulators(self, self.functional.layer_numbers, ends, on_host)
                for plan_input, x in zip(self.plan.inputs, inputs, strict=True):
                    if not plan_input.rows:
                        sums.look_for_nan(plan_input.path, x)
            for number, step in enumerate(self.plan.steps):
                if sums is not None:
                    sums.spread(step)
                    if step.path in sums.of and all(name in on_grid for name in step.operands if name in values):
                        on_grid.add(step.path)
                        values[step.path] = sums.layer(step, values)
                        continue
                x = values[step.path] = self.step(number, step, values)
                if as_device and self._differs(step, values, on_grid):
                    features = [values[name] for name in step.operands if name in values]
                    values[step.path] = on_host(step, x, features)
            return values

        whole = None
        if as_device and seen is None and not self.mode.training:
            whole = self._whole(dict(values), ends, step_by_step)
        tensors = step_by_step() if whole is None else whole
        if seen is not None:
            seen.update(tensors)
        outputs = [tensors[path] for path in self.plan.outputs]
        return outputs, self.after

    def _whole(
        self, inputs: dict[str, Array], ends: Array, step_by_step: Callable[[], dict[str, Array]]
    ) -> dict[str, Array] | None:
        """What `step_by_step` returns for the network's outputs, with one host call; its gradients are those of
        `step_by_step`, whose values are then computed too. None if a framework does not support that."""
        network = self.functional.device_network
        source = self.functional.numbers_source(self.plan.steps, self.arrays, ends)

        def like() -> list[Array]:
            values = step_by_step()
            return [values[path] for path in network.wanted]

        results = self.primitives.network_on_host(network, like, source, list(inputs.values()))
        if results is None:
            return None
        values = {**inputs, **dict(zip(network.wanted, results, strict=True))}
        for number, step in enumerate(self.plan.steps):
            if step.path in network.after:
                values[step.path] = self.step(number, step, values)
        return values

    def _differs(self, step: PlanStep, values: Mapping[str, Array], on_grid: set[str]) -> bool:
        """Whether the device computes a step in a way of its own.

        on_grid: paths of tensors that a device can hold: dropout in training leaves the grid, the next stored tensor is
        on one again.
        """
        if step.outside:
            return False
        kept = all(name in on_grid for name in step.operands if name in values)
        if step.expression is not None or not step.kind:
            same_value = step.attributes.get("stop_gradient") or not self.mode.training
            if step.operands[0] in on_grid and same_value:
                on_grid.add(step.path)
            return False
        operator = OPERATORS[step.kind]
        if kept or not operator.same_quantization:
            on_grid.add(step.path)
        return kept and not operator.moves_codes

    def step(self, number: int, step: PlanStep, values: Mapping[str, Array]) -> Array:
        """The tensor that a step computes from earlier ones."""
        p = self.primitives
        features = [values[name] for name in step.operands if name in values]
        if step.expression is not None or not step.kind:
            return self._only_in_training(number, step, features[0])
        if step.outside:
            return getattr(p, step.kind)(features[0], **step.attributes)
        return (Step if step.weights is None else WeightedStep)(self, step).compose(*features)

    def _only_in_training(self, number: int, step: PlanStep, x: Array) -> Array:
        if step.attributes.get("stop_gradient"):
            return self.primitives.stop_gradient(x)
        if not self.mode.training:
            return x
        assert self.key is not None
        if step.expression is not None:
            return step.expression(self.primitives, x, self.key(number))
        return self.primitives.dropout(x, step.attributes["dropout"], self.key(number))
