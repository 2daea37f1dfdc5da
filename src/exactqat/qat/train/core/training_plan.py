# SPDX-License-Identifier: Apache-2.0
"""A plan with what training looks up in it: grids, their writers, the owners of weights, the names of tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ....kit.device import DEFAULT_PROFILE, OPERATORS, profile_named
from ....kit.planning.parts import ObservedParts
from ....kit.planning.plans import Derived, Grid, Numbers, Plan, PlanStep, require_data
from .arrays import ENDS, Arrays, Tree, is_learned, weights_of
from .primitives import Array, FunctionalPrimitives
from .ranges import CALIBRATED, codes_of
from .weights import shared_range


class TrainingPlan:
    """A plan as training reads it.

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
        # Constants that are the user's arrays, perhaps transposed; known once `initial` has seen these.
        self.moved: frozenset[str] = frozenset()
        # Layers whose batch norms had seen nothing when the network was prepared.
        self.fresh_norms: frozenset[str] = frozenset()
        self.parts = ObservedParts(plan)
        self.grids = {name: _with_fixed_ends(grid) for name, grid in plan.grids.items()}
        self.grid_of = {step.path: step.grid for step in plan.inputs} | {step.path: step.grid for step in plan.steps}
        # By the paths of their steps.
        norms = {step.path: step.weights.batch_norm for step in plan.steps if step.weights is not None}
        self.norms = {path: norm for path, norm in norms.items() if norm is not None}
        self.writers = dict.fromkeys(plan.grids, 0)
        # Steps with the same weight under the same rule share its learned range; the first one's path.
        self.weight_owner: dict[str, str] = {}
        owners: dict[Hashable, str] = {}
        for plan_input in plan.inputs:
            self.writers[plan_input.grid] += 1
        for step in plan.steps:
            if not step.kind or step.outside or step.expression is not None:
                continue
            moves = OPERATORS[step.kind].same_quantization
            self.writers[step.grid] += sum(name not in self.grid_of for name in step.operands) if moves else 1
            if step.weights is not None:
                self.weight_owner[step.path] = owners.setdefault(shared_range(step.weights), step.path)

    def forgotten(self, arrays: Arrays) -> Arrays:
        """The arrays, in NumPy where they change, with ranges that have seen nothing; fixed ones stay."""
        grids = [name for name, grid in self.grids.items() if grid.rule.ranges != "fixed"]
        after = arrays.taking_over({}, dict.fromkeys(grids, (np.float32(0), np.float32(0))), {})
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
        return self.tensors_of(self.plan.steps)

    def tensors_of(self, steps: Sequence[PlanStep]) -> list[str]:
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
    def statistics(self) -> list[str]:
        """Names of the user's tensors that training moves without gradients."""
        held = [(norm.mean, norm.variance, norm.counter) for norm in self.norms.values() if norm.training]
        return list(dict.fromkeys(name for names in held for name in names if name))

    def _ends_of_weights(self, steps: Sequence[PlanStep]) -> list[tuple[str, str]]:
        """The learned ends of weights' ranges, by the names that `Arrays.learned` has."""
        ends: dict[tuple[str, str], None] = {}
        for step in steps:
            if step.weights is not None and step.weights.rule.ranges == "learned":
                name = weights_of(self.weight_owner[step.path])
                ends |= {(name, end): None for end in (ENDS[1:] if step.weights.rule.symmetric else ENDS)}
        return list(ends)

    def ends_of(self, arrays: Arrays) -> list[Array]:
        """Both ends of all grids' ranges, one after the other."""
        return [arrays.end(name, end) for name in self.grids for end in ENDS]

    def all_ends(self, steps: Sequence[PlanStep], arrays: Arrays, ends: Array) -> list[Array]:
        """What `ends_of` returns, as one array, and the learned ends of the steps' weights."""
        return [ends, *(arrays.learned[name][end] for name, end in self._ends_of_weights(steps))]

    def with_ends(self, steps: Sequence[PlanStep], source: Iterator[np.ndarray]) -> Arrays:
        """Arrays without tensors, from the beginning of a list: the inverse of `all_ends`."""
        arrays, ends = Arrays(), next(source)
        for number, (name, grid) in enumerate(self.grids.items()):
            for end, value in zip(ENDS, ends[2 * number : 2 * number + 2], strict=True):
                (arrays.learned if is_learned(grid, end) else arrays.ranges).setdefault(name, {})[end] = value
        for name, end in self._ends_of_weights(steps):
            arrays.learned.setdefault(name, {})[end] = next(source)
        return arrays

    def stored_paths(self) -> list[str]:
        """Paths of the tensors that the device stores under these names."""
        steps = [
            step.path
            for step in self.plan.steps
            if step.kind and not step.outside and step.expression is None and not OPERATORS[step.kind].moves_axes
        ]
        return [plan_input.path for plan_input in self.plan.inputs] + steps

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
