# SPDX-License-Identifier: Apache-2.0
"""Trains a plan by pure functions: parameters and state go in, results and the next state come out.

It knows no framework. It computes with a framework's `primitives`; the device's declarations say what an operator
computes. Each framework's own file says where it keeps parameters and state. Integers are computed in NumPy, so equal
numbers give equal integers in all frameworks.

PyTorch binds the same steps to its modules once (`train.torch.prepared`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ....kit.device import DEFAULT_PROFILE, OPERATORS, profile_named
from ....kit.planning.inputs import require_examples
from ....kit.planning.plans import (
    BatchNorm,
    Derived,
    Grid,
    Numbers,
    Plan,
    PlanStep,
    require_data,
)
from . import primitives_numpy
from .accumulators import Accumulators, LayerNumbers, moved_constants
from .arrays import ENDS, Arrays, Mode, Tree, is_learned, weights_of
from .freezing import fresh_norms
from .integers import all_numbers, nudged_grids, numbers_of
from .on_device import DeviceNetwork, DeviceStep
from .primitives import FunctionalPrimitives
from .ranges import CALIBRATED, codes_of
from .state import State
from .steps import Step, WeightedStep
from .weights import learned_ends, shared_range


class Functional:
    """A plan as functions of `Arrays`.

    Attributes:
        plan: what the device runs.
        grids: by name, with fixed ranges where the device fixes them.
        writers: how many tensors are stored on each grid.
        profile: whose integers a frozen network computes, by the names of `deploy.PROFILES`; None: it stays fake
            quantization, as under rules that no device supports.
    """

    def __init__(
        self, plan: Plan, primitives: FunctionalPrimitives | None = None, profile: str | None = DEFAULT_PROFILE
    ) -> None:
        """primitives: None if only integers are computed from what has been trained."""
        self.plan = plan
        self.primitives = primitives
        profile = None if profile is None else profile_named(profile).name
        self.profile = profile if plan.has_a_device else None
        # By the names of running means: epsilons of batch norms that are others now than the plan's.
        self.epsilons: dict[str, float] = {}
        self._device_steps: dict[str, DeviceStep] = {}
        self._device_network: DeviceNetwork | None = None
        self._layer_numbers: LayerNumbers | None = None
        # Constants that are the user's arrays, perhaps transposed; known once `initial` has seen these.
        self.moved: frozenset[str] = frozenset()
        # Layers whose batch norms had seen nothing when the network was prepared.
        self.fresh_norms: frozenset[str] = frozenset()
        self._nudged: tuple[bytes, dict[str, tuple[np.float32, int]]] | None = None
        self.grids = {name: _with_fixed_ends(grid) for name, grid in plan.grids.items()}
        self.grid_of = {each.path: each.grid for each in plan.inputs} | {step.path: step.grid for step in plan.steps}
        self.writers = dict.fromkeys(plan.grids, 0)
        # Steps with the same weight under the same rule share its learned range; the first one's path.
        self.weight_owner: dict[str, str] = {}
        owners: dict[Any, str] = {}
        for given in plan.inputs:
            self.writers[given.grid] += 1
        for step in plan.steps:
            if not step.kind or step.outside or step.expression is not None:
                continue
            operator = OPERATORS[step.kind]
            constants = [name for name in step.operands if name not in self.grid_of]
            if not operator.same_quantization:
                self.writers[step.grid] += 1
            else:
                self.writers[step.grid] += len(constants)
            if step.weights is not None:
                self.weight_owner[step.path] = owners.setdefault(shared_range(step.weights), step.path)

    def forgotten(self, arrays: Arrays) -> Arrays:
        """The arrays, in NumPy where they change, with ranges that have seen nothing; fixed ones stay."""
        grids = [name for name, grid in self.grids.items() if grid.rule.ranges != "fixed"]
        after = arrays.taking_over({}, dict.fromkeys(grids, (np.float32(0), np.float32(0))))
        for name in grids:
            after.ranges[name]["batches"] = np.int32(0)
        return after

    def require_calibration(self) -> None:
        """Raises ValueError if ranges are set from data before training; the caller knows that they were not."""
        for name, grid in self.grids.items():
            if grid.rule.ranges in CALIBRATED:
                raise ValueError(f"the range of '{name}' is set from data before training: call calibrate first")

    def batches_seen(self, ranges: Tree) -> dict[str, int]:
        """By grid, how many batches have moved its range."""
        return {name: int(ranges[name]["batches"]) for name, grid in self.grids.items() if grid.rule.ranges != "fixed"}

    def require_data(self, ranges: Tree) -> None:
        """Raises RuntimeError, naming the first one, if ranges have seen no data. ranges: not traced."""
        require_data(name for name, batches in self.batches_seen(ranges).items() if batches == 0)

    def tensors_read(self, step: PlanStep) -> list[str]:
        """Names of the parameters, buffers and constants that a step reads."""
        weights, names = step.weights, [name for name in step.operands if name not in self.grid_of]
        if weights is not None:
            norm = weights.batch_norm
            own = (norm.weight, norm.bias, norm.mean, norm.variance, norm.counter) if norm else ()
            names += [name for name in (weights.weight, weights.bias, *own) if name]
        return names

    @property
    def random_steps(self) -> list[str]:
        """Steps that need random numbers in training."""
        return [step.path for step in self.plan.steps if step.expression is not None or "dropout" in step.attributes]

    @property
    def tensors(self) -> list[str]:
        """Names of the user's tensors that the plan works with."""
        return self._tensors_of(self.plan.steps)

    def _tensors_of(self, steps: Sequence[PlanStep]) -> list[str]:
        names: dict[str, None] = {}

        def visit(name: str) -> None:
            constant = self.plan.constants.get(name)
            if constant is None:
                names[name] = None
            elif constant.parameter:
                names[constant.name] = None
            elif isinstance(constant.expression, Derived):
                for operand in constant.expression.operands:
                    visit(operand)
            else:
                names.update(dict.fromkeys(constant.sources))

        for step in steps:
            for name in self.tensors_read(step):
                visit(name)
        return list(names)

    @property
    def _trained_norms(self) -> list[BatchNorm]:
        norms = [step.weights.batch_norm for step in self.plan.steps if step.weights is not None]
        return [norm for norm in norms if norm is not None and norm.training]

    @property
    def statistics(self) -> list[str]:
        """Names of the user's tensors that training moves without gradients."""
        held = [(norm.mean, norm.variance, norm.counter) for norm in self._trained_norms]
        return list(dict.fromkeys(name for names in held for name in names if name))

    @property
    def decays(self) -> dict[str, float]:
        """How much of a running mean stays at each batch, by its name, if it began at 0 and is debiased."""
        return {norm.mean: 1.0 - norm.momentum for norm in self._trained_norms if norm.debiased and norm.momentum}

    def initial(self, tensors: Mapping[str, Any]) -> Arrays:
        """NumPy arrays to begin with; `tensors` are the user's."""
        arrays = Arrays(dict(tensors))
        self.moved = moved_constants(self, tensors)
        self.fresh_norms = fresh_norms(self.plan, tensors)
        for name, grid in self.grids.items():
            rule = grid.rule
            low, high = rule.fixed_range if rule.fixed_range is not None else (0.0, 0.0)
            ends: dict[str, Any] = {"minimum": np.asarray(low, np.float32), "maximum": np.asarray(high, np.float32)}
            learned = {end: value for end, value in ends.items() if is_learned(grid, end)}
            if learned:
                arrays.learned[name] = learned
            others = {end: value for end, value in ends.items() if end not in learned}
            arrays.ranges[name] = {**others, "batches": np.asarray(0, np.int32)}
        for step in self.plan.steps:
            norm = None if step.weights is None else step.weights.batch_norm
            if norm is not None and norm.training:
                arrays.ranges[step.grid]["trained"] = np.asarray(0, np.int32)
        run = self.in_numpy(arrays, frozen=False)
        for step in self.plan.steps:
            weights = step.weights
            if weights is None or weights.rule.ranges != "learned" or self.weight_owner[step.path] != step.path:
                continue
            moved = np.moveaxis(run.stored_weight(weights), weights.channel_axis, -1)
            ends = learned_ends(primitives_numpy, weights.rule, moved, weights.range_end)
            arrays.learned[weights_of(step.path)] = {end: np.asarray(each, np.float32) for end, each in ends.items()}
        return arrays

    def run(
        self,
        arrays: Arrays,
        inputs: Sequence[Any],
        mode: Mode,
        key: Callable[[int], Any] | None = None,
        seen: dict[str, Any] | None = None,
    ) -> tuple[list[Any], Arrays]:
        """The network's outputs, flattened, and the arrays after this run.

        Args:
            inputs: one array for each of the plan's.
            key: returns what `primitives.dropout` draws from, by a step's number.
            seen: filled with every tensor that a step computes.
        """
        return Run(self, arrays, mode, key).forward(inputs, seen)

    def in_numpy(self, arrays: Arrays, frozen: bool = True) -> State:
        """What integers are computed from. arrays: in NumPy."""
        return State(self, arrays, Mode(frozen=frozen), primitives_numpy)

    def numbers(self, arrays: Arrays) -> Numbers:
        """The numbers that training ended with, for `deploy.lower`. arrays: in NumPy.

        Raises:
            MissingData: a range has seen no data.
        """
        return all_numbers(self.in_numpy(arrays))

    def numbers_of(self, step: PlanStep, arrays: Arrays, grids: dict[str, tuple[np.float32, int]]) -> Numbers:
        """Those of one step. arrays: in NumPy; grids: all of them."""
        return numbers_of(self.in_numpy(arrays), [step], grids)

    # --- what the device makes of a step ------------------------------------------------------------------------------

    def device_step(self, step: PlanStep) -> DeviceStep:
        """What the device computes in a step of a frozen network; its `trained` is what `numbers_source` returns."""
        if step.path not in self._device_steps:
            assert self.profile is not None
            numbers = partial(self._numbers_from, [step])
            self._device_steps[step.path] = DeviceStep(self.plan, step, self.profile, numbers)
        return self._device_steps[step.path]

    def device_network(self) -> DeviceNetwork:
        """What the device computes in a whole frozen network; its `trained` is what `numbers_source` returns."""
        if self._device_network is None:
            assert self.profile is not None
            numbers = partial(self._numbers_from, self.plan.steps)
            self._device_network = DeviceNetwork(self.plan, self.profile, numbers)
        return self._device_network

    def layer_numbers(self) -> LayerNumbers:
        """The numbers for rounding the accumulators of a frozen network's layers."""
        if self._layer_numbers is None:
            self._layer_numbers = LayerNumbers(self, self._ends_of_weights(self.plan.steps))
        return self._layer_numbers

    def numbers_source(self, steps: Sequence[PlanStep], arrays: Arrays, ends: Any) -> list[Any]:
        """All that the integers of some steps depend on, as a list of arrays. ends: what `ends_of` returns."""
        tensors = [arrays.tensors[name] for name in self._tensors_of(steps)]
        return [ends, *tensors, *(arrays.learned[name][end] for name, end in self._ends_of_weights(steps))]

    def _numbers_from(self, steps: Sequence[PlanStep], source: Sequence[np.ndarray]) -> Numbers:
        """The integers of some steps, from what `numbers_source` returns."""
        ends, rest = source[0], iter(source[1:])
        arrays = self.with_ends(Arrays({name: next(rest) for name in self._tensors_of(steps)}), ends)
        for name, end in self._ends_of_weights(steps):
            arrays.learned.setdefault(name, {})[end] = next(rest)
        state, nudged = self.in_numpy(arrays), self._nudged
        if nudged is None or nudged[0] != ends.tobytes():
            nudged = self._nudged = (ends.tobytes(), nudged_grids(state))
        return numbers_of(state, steps, nudged[1])

    def _ends_of_weights(self, steps: Sequence[PlanStep]) -> list[tuple[str, str]]:
        """The learned ends of weights' ranges, by the names that `Arrays.learned` has."""
        ends: dict[tuple[str, str], None] = {}
        for step in steps:
            if step.weights is not None and step.weights.rule.ranges == "learned":
                name = weights_of(self.weight_owner[step.path])
                ends |= {(name, end): None for end in (ENDS[1:] if step.weights.rule.symmetric else ENDS)}
        return list(ends)

    def ends_of(self, arrays: Arrays) -> list[Any]:
        """Both ends of all grids' ranges, one after the other."""
        return [arrays.end(name, end) for name in self.grids for end in ENDS]

    def with_ends(self, arrays: Arrays, ends: np.ndarray) -> Arrays:
        """The arrays with both ends of all grids' ranges; the inverse of `ends_of`."""
        for number, (name, grid) in enumerate(self.grids.items()):
            for end, value in zip(ENDS, ends[2 * number : 2 * number + 2], strict=True):
                tree = arrays.learned if is_learned(grid, end) else arrays.ranges
                tree.setdefault(name, {})[end] = value
        return arrays

    def stored_paths(self) -> list[str]:
        """Paths of the tensors that the device stores under these names."""
        steps = [
            step.path
            for step in self.plan.steps
            if step.kind and not step.outside and step.expression is None and not OPERATORS[step.kind].moves_axes
        ]
        return [each.path for each in self.plan.inputs] + steps

    def codes(self, path: str, values: np.ndarray, numbers: Numbers) -> np.ndarray:
        """Codes 0..2**bits - 1 of a tensor that a run has stored, int64."""
        scale, zero_point = numbers.grids[self.plan.stored(path).grid]
        return codes_of(values, scale, zero_point)


def _with_fixed_ends(grid: Grid) -> Grid:
    if grid.fixed is None:
        return grid
    return replace(
        grid, rule=replace(grid.rule, ranges="fixed", fixed_range=grid.fixed_range, activation_bits=grid.bits)
    )


class Run(State):
    """One run of a network with pure functions."""

    def __init__(self, functional: Functional, arrays: Arrays, mode: Mode, key: Callable[[int], Any] | None) -> None:
        super().__init__(functional, arrays, mode)
        self.key = key

    def forward(self, inputs: Sequence[Any], seen: dict[str, Any] | None = None) -> tuple[list[Any], Arrays]:
        values: dict[str, Any] = {}
        follows = self.mode.observing or (self.mode.training and not self.mode.frozen)
        for given, x in zip(self.plan.inputs, inputs, strict=True):
            if follows:
                require_examples(given, tuple(x.shape))
            values[given.path] = self.grid(given.grid)(x)
        as_device = self.mode.frozen and self.mode.quantizing and self.functional.profile is not None
        on_grid, ends = set(values), None
        if as_device:
            p = self.primitives
            ends = p.stack([p.stop_gradient(end) for end in self.functional.ends_of(self.arrays)], 0)

        def step_by_step() -> dict[str, Any]:
            sums = None
            if as_device and self.primitives.sums_are_exact():
                sums = Accumulators(self, ends)
                for given, x in zip(self.plan.inputs, inputs, strict=True):
                    if not given.rows:
                        sums.look_for_nan(given.path, x)
            for number, step in enumerate(self.plan.steps):
                if sums is not None:
                    sums.spread(step)
                    if step.path in sums.of and all(name in on_grid for name in step.operands if name in values):
                        on_grid.add(step.path)
                        values[step.path] = sums.layer(step, values)
                        continue
                value = self.step(number, step, values)
                values[step.path] = self._as_device(step, value, values, on_grid, ends) if as_device else value
            return values

        whole = None
        if as_device and seen is None and not self.mode.training:
            whole = self._whole(dict(values), ends, step_by_step)
        found = step_by_step() if whole is None else whole
        if seen is not None:
            seen.update(found)
        outputs = [found[path] for path in self.plan.outputs]
        return outputs, self.after

    def _whole(
        self, inputs: dict[str, Any], ends: Any, step_by_step: Callable[[], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """What `step_by_step` returns for the network's outputs, with one host call; its gradients are those of
        `step_by_step`, whose values are then computed too. None if a framework does not support that."""
        network = self.functional.device_network()
        source = self.functional.numbers_source(self.plan.steps, self.arrays, ends)

        def like() -> list[Any]:
            values = step_by_step()
            return [values[path] for path in network.wanted]

        found = self.primitives.network_on_host(network, like, source, list(inputs.values()))
        if found is None:
            return None
        values = {**inputs, **dict(zip(network.wanted, found, strict=True))}
        for number, step in enumerate(self.plan.steps):
            if step.path in network.after:
                values[step.path] = self.step(number, step, values)
        return values

    def _as_device(self, step: PlanStep, x: Any, values: Mapping[str, Any], on_grid: set[str], ends: Any) -> Any:
        """What the device computes from a step's operands, with the gradient of what is computed here.

        on_grid: paths of tensors that a device can hold: dropout in training leaves the grid, the next stored tensor is
        on one again.
        """
        if step.outside:
            return x
        operands = [name for name in step.operands if name in values]
        kept = all(name in on_grid for name in operands)
        if step.expression is not None or not step.kind:
            same_value = step.attributes.get("stop_gradient") or not self.mode.training
            if step.operands[0] in on_grid and same_value:
                on_grid.add(step.path)
            return x
        operator = OPERATORS[step.kind]
        if kept or not operator.same_quantization:
            on_grid.add(step.path)
        if not kept or operator.moves_codes:
            return x
        source = self.functional.numbers_source([step], self.arrays, ends)
        features = [values[name] for name in operands]
        return self.primitives.on_host(self.functional.device_step(step), x, source, features)

    def step(self, number: int, step: PlanStep, values: Mapping[str, Any]) -> Any:
        """The tensor that a step computes from earlier ones."""
        p = self.primitives
        features = [values[name] for name in step.operands if name in values]
        if step.expression is not None or not step.kind:
            return self._only_in_training(number, step, features[0])
        if step.outside:
            return getattr(p, step.kind)(features[0], **step.attributes)
        return (Step if step.weights is None else WeightedStep)(self, step).compose(*features)

    def _only_in_training(self, number: int, step: PlanStep, x: Any) -> Any:
        if step.attributes.get("stop_gradient"):
            return self.primitives.stop_gradient(x)
        if not self.mode.training:
            return x
        assert self.key is not None
        if step.expression is not None:
            return step.expression(self.primitives, x, self.key(number))
        return self.primitives.dropout(x, step.attributes["dropout"], self.key(number))
