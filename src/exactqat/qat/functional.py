# SPDX-License-Identifier: Apache-2.0
"""Trains a plan by pure functions: parameters and state go in, results and the next state come out.

It knows no framework. What it computes with is handed over as `primitives`, a framework's `primitives_*` file; what an
operator computes is said by the device's declarations. Where a framework keeps parameters and state, its own file says.
Integers are made in NumPy, so equal numbers give equal integers in all frameworks.

It does step by step what `layers` does in PyTorch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..device import DEFAULT_PROFILE, OPERATORS, DeviceOperator, profile_named
from ..planning.fitting import RangesMovedWarning, constant_limits, constant_step, fitting_ranges, told
from ..planning.plans import (
    SMALLEST_WIDTH,
    BatchNorm,
    Derived,
    Grid,
    Numbers,
    Plan,
    PlanStep,
    WeightNumbers,
    Weights,
    branch_range,
    refuse_batch,
    require_data,
    require_finite,
)
from ..planning.rules import Rule
from . import primitives_numpy
from .frozen_numpy import DeviceStep

LARGEST_BIAS_CODE = 2.0**30
# Of a bias in int64, behind int16 activations.
LARGEST_WIDE_BIAS_CODE = 2.0**40
SMALLEST_MULTIPLIER = 2.0**-31
_CLIPPING_CANDIDATES = 24
_ENDS = ("minimum", "maximum")

Tree = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Mode:
    """What a run does.

    Attributes:
        training: batch norms normalize with the batch's statistics, ranges follow it, dropout drops.
        frozen: the last phase of training: what the device computes, bit by bit in biases and factors.
        quantizing: off for the float network.
        observing: ranges look at what passes (calibration).
    """

    training: bool = False
    frozen: bool = False
    quantizing: bool = True
    observing: bool = False


@dataclass
class Arrays:
    """The numbers of a network; arrays of the framework's, by name.

    Attributes:
        tensors: the user's parameters and buffers.
        learned: by grid, or by step for weights ("weights of <path>"): ``minimum`` and ``maximum`` where they are
            trained.
        ranges: by grid: ``minimum``, ``maximum`` (those that are not trained) and ``batches``.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    learned: Tree = field(default_factory=dict)
    ranges: Tree = field(default_factory=dict)


class ChannelGrid(NamedTuple):
    """How a layer stands on the device, per output channel; see `layers.ChannelGrid`."""

    factor: Any
    weight_scale: Any
    bias_code: Any
    bias: Any


class DeviceGrid(NamedTuple):
    """A result's grid as the device knows it, for operators that round in its codes."""

    scale: Any
    zero_point: Any


def grid_steps(bits: int, narrow_range: bool) -> int:
    """Steps between the lowest and the highest code."""
    return 2**bits - 1 - int(narrow_range)


def per_channel(primitives: Any, vector: Any, rank: int, axis: int) -> Any:
    """A vector [channels] that broadcasts along all axes of an array but `axis`."""
    return primitives.reshape(vector, tuple(-1 if at == axis else 1 for at in range(rank)))


class Functional:
    """A plan as functions of `Arrays`.

    Attributes:
        plan: what the device runs.
        grids: by name, with fixed ranges where the device fixes them.
        writers: how many tensors are stored on each grid.
        profile: whose integers a frozen network computes, by the names of `deploy.PROFILES`; None: it stays fake
            quantization, as under rules that no device knows.
    """

    def __init__(self, plan: Plan, primitives: Any, profile: str | None = DEFAULT_PROFILE) -> None:
        self.plan = plan
        self.primitives = primitives
        profile = None if profile is None else profile_named(profile).name
        self.profile = profile if plan.has_a_device else None
        self._device_steps: dict[str, DeviceStep] = {}
        self._nudged: tuple[bytes, dict[str, tuple[np.float32, int]]] | None = None
        self.grids = {name: _with_fixed_ends(grid) for name, grid in plan.grids.items()}
        self.grid_of = {each.path: each.grid for each in plan.inputs} | {step.path: step.grid for step in plan.steps}
        self.writers = dict.fromkeys(plan.grids, 0)
        # Steps with the same weight under the same rule share what is learned of its range; the first one's path.
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
                key = (
                    step.weights.weight,
                    step.weights.channel_axis,
                    replace(step.weights.rule, match="*"),
                    step.weights.batch_norm if _folded(step.weights) else None,
                )
                self.weight_owner[step.path] = owners.setdefault(key, step.path)

    @property
    def needs_calibration(self) -> list[str]:
        """Grids whose ranges training alone does not set."""
        return [name for name, grid in self.grids.items() if grid.rule.ranges in ("learned", "min_max")]

    def frozen_ranges(self, ranges: Tree, learned: Tree, tensors: Mapping[str, Any]) -> tuple[Tree, Tree]:
        """What freezing makes of the ranges, in NumPy where they change; see `branch_range` and `fitting_ranges`.

        Warns (`RangesMovedWarning`) where ranges had to be moved, as the device's operators cannot take them beside one
        another.

        Args:
            ranges, learned: arrays that NumPy reads; either may lack some.
            tensors: the network's parameters and variables in NumPy, as far as they are known.
        """
        kept, trained = ({name: dict(ends) for name, ends in each.items()} for each in (ranges, learned))

        def at(name: str) -> tuple[Any, Any]:
            found = [trained.get(name, {}).get(end, kept.get(name, {}).get(end)) for end in _ENDS]
            low, high = (None if end is None else np.asarray(end, np.float32) for end in found)
            return low, high

        def put(name: str, ends: Sequence[Any]) -> None:
            for end, value in zip(_ENDS, ends, strict=True):
                (trained if end in trained.get(name, {}) else kept)[name][end] = np.asarray(value, np.float32)

        for branch, total in self.plan.branches:
            if any(end is None for end in (*at(branch), *at(total))):
                continue
            put(branch, branch_range(at(branch), at(total), (self.grids[branch], self.grids[total]), np.where))
        if self.plan.has_a_device:
            # A range without data says nothing yet.
            known = {
                name: at(name)
                for name, grid in self.grids.items()
                if grid.rule.ranges == "fixed" or kept.get(name, {}).get("batches", 0) > 0
            }
            found = {
                name: (float(low), float(high))
                for name, (low, high) in known.items()
                if low is not None and high is not None
            }
            moved = fitting_ranges(self.plan, found, self._wanted_scales(kept, trained, tensors))
            for name, each in moved.items():
                put(name, each)
            words = told(moved, found)
            if words:
                warnings.warn(words, RangesMovedWarning, stacklevel=3)
        return kept, trained

    def _wanted_scales(self, ranges: Tree, learned: Tree, tensors: Mapping[str, Any]) -> dict[tuple[str, int], float]:
        """The scales that constants and weights ask for, of those whose values are known."""
        learned, ranges = (
            {name: {end: np.asarray(value) for end, value in ends.items()} for name, ends in tree.items()}
            for tree in (learned, ranges)
        )
        run = Run(self, Arrays(dict(tensors), learned, ranges), Mode(frozen=True), primitives=primitives_numpy)
        found = {}
        for step in self.plan.steps:
            try:
                largest = None if step.weights is None else run.largest_weight_scale(step)
            except KeyError:
                largest = None
            if largest is not None:
                found[(step.path, len(step.operands))] = largest
            for position, name in enumerate(step.operands):
                if name in self.grid_of or constant_limits(self.plan, step, position) is None:
                    continue
                try:
                    value = np.asarray(run.constant(name), np.float32)
                except KeyError:
                    continue
                low, high, rule = run.constant_bounds(step, position, value, within_limits=False)
                steps = grid_steps(self.plan.grids[step.grid].constant_bits, rule.narrow_range)
                found[(step.path, position)] = float(high - low) / steps
        return found

    def require_finite_state(self, ranges: Tree, learned: Tree, tensors: Mapping[str, Any]) -> None:
        """Raises ValueError if what is fixed from `freeze` on, ranges and statistics of batch norm, holds NaN or
        infinity. Each may lack some."""
        for tree in (ranges, learned):
            for name, ends in tree.items():
                require_finite(f"the range of '{name}'", *(np.asarray(ends[end]) for end in _ENDS if end in ends))
        for step in self.plan.steps:
            norm = step.weights.batch_norm if step.weights is not None else None
            held = [tensors[name] for name in (norm.mean, norm.variance) if name in tensors] if norm else []
            require_finite(f"the statistics of '{step.path}'", *map(np.asarray, held))

    def batches_seen(self, ranges: Tree) -> dict[str, int]:
        """By grid, how many batches have moved its range."""
        return {name: int(ranges[name]["batches"]) for name, grid in self.grids.items() if grid.rule.ranges != "fixed"}

    def require_data(self, ranges: Tree) -> None:
        """Raises RuntimeError, naming the first of them, where ranges have seen no data. ranges: not traced."""
        require_data(name for name, batches in self.batches_seen(ranges).items() if batches == 0)

    def refuse_batch(self, count: int, before: Mapping[str, int], after: Mapping[str, int]) -> None:
        """Raises ValueError for the `count`-th batch of a calibration if it moved less than all ranges, as values that
        are not finite do. before, after: `batches_seen`."""
        refuse_batch(count, (name for name, batches in after.items() if batches == before[name]))

    @property
    def random_steps(self) -> list[str]:
        """Steps that need random numbers in training."""
        return [
            step.path
            for step in self.plan.steps
            if (step.expression is not None and not step.attributes.get("custom_gradient"))
            or "dropout" in step.attributes
        ]

    @property
    def tensors(self) -> list[str]:
        """Names of the user's tensors that the plan works with."""
        return self._tensors_of()

    def _tensors_of(self, steps: Sequence[PlanStep] | None = None) -> list[str]:
        found: dict[str, None] = {}

        def visit(name: str | None) -> None:
            constant = None if name is None else self.plan.constants.get(name)
            if constant is None:
                if name is not None:
                    found[name] = None
                return
            if constant.parameter:
                found[constant.name] = None
            elif isinstance(constant.expression, Derived):
                for operand in constant.expression.operands:
                    visit(operand)
            else:
                found.update(dict.fromkeys(constant.sources))

        for step in self.plan.steps if steps is None else steps:
            for name in step.operands:
                if name not in self.grid_of:
                    visit(name)
            if step.weights is not None:
                visit(step.weights.weight)
                visit(step.weights.bias)
                norm = step.weights.batch_norm
                if norm is not None:
                    for each in (norm.weight, norm.bias, norm.mean, norm.variance, norm.counter):
                        visit(each or None)
        return list(found)

    @property
    def statistics(self) -> list[str]:
        """Names of the user's tensors that training moves without gradients."""
        norms = [step.weights.batch_norm for step in self.plan.steps if step.weights is not None]
        names = [
            name
            for norm in norms
            if norm is not None and norm.training
            for name in (norm.mean, norm.variance, norm.counter)
            if name
        ]
        return list(dict.fromkeys(names))

    def initial(self, tensors: Mapping[str, Any]) -> Arrays:
        """NumPy arrays to begin with; `tensors` are the user's."""
        arrays = Arrays(dict(tensors))
        for name, grid in self.grids.items():
            rule = grid.rule
            low, high = rule.fixed_range if rule.fixed_range is not None else (0.0, 0.0)
            ends: dict[str, Any] = {"minimum": np.asarray(low, np.float32), "maximum": np.asarray(high, np.float32)}
            learned = {end: value for end, value in ends.items() if _is_learned(grid, end)}
            if learned:
                arrays.learned[name] = learned
            others = {end: value for end, value in ends.items() if end not in learned}
            arrays.ranges[name] = {**others, "batches": np.asarray(0, np.int32)}
        run = Run(self, arrays, Mode(), primitives=primitives_numpy)
        for step in self.plan.steps:
            weights = step.weights
            if weights is None or weights.rule.ranges != "learned" or self.weight_owner[step.path] != step.path:
                continue
            moved = np.moveaxis(run.stored_weight(weights), weights.channel_axis, -1)
            low, high = _extremes(primitives_numpy, weights.rule, moved)
            fraction = least_error_fraction(
                primitives_numpy, moved, low, high, weights.rule.weight_bits, weights.rule.narrow_range
            )
            ends = {"maximum": np.asarray(high * fraction, np.float32)}
            if not weights.rule.symmetric:
                ends["minimum"] = np.asarray(low * fraction, np.float32)
            arrays.learned[_weights_of(step.path)] = ends
        return arrays

    def run(
        self,
        arrays: Arrays,
        inputs: Sequence[Any],
        mode: Mode,
        key: Callable[[int], Any] | None = None,
        seen: dict[str, Any] | None = None,
    ) -> tuple[list[Any], Arrays]:
        """The network's outputs, flattened, and the arrays behind this run.

        Args:
            inputs: one array for each of the plan's.
            key: gives what `primitives.dropout` draws from, by a step's number.
            seen: is filled with every tensor that a step makes.
        """
        return Run(self, arrays, mode, key).forward(inputs, seen)

    def numbers(self, arrays: Arrays) -> Numbers:
        """What training leaves behind, for `deploy.lower`. arrays: in NumPy.

        Raises:
            MissingData: a range has seen no data.
        """
        return Run(self, arrays, Mode(frozen=True), primitives=primitives_numpy).numbers()

    # --- what the device makes of a step ------------------------------------------------------------------------------

    def device_step(self, step: PlanStep) -> DeviceStep:
        """What the device makes of a step of a frozen network; its `trained` is what `numbers_source` gives."""
        if step.path not in self._device_steps:
            assert self.profile is not None
            numbers = partial(self._numbers_of_step, step)
            self._device_steps[step.path] = DeviceStep(self.plan, step, self.profile, numbers)
        return self._device_steps[step.path]

    def numbers_source(self, step: PlanStep, arrays: Arrays, ends: Any) -> list[Any]:
        """All that the integers of a step depend on, as a list of arrays. ends: what `ends_of` gives."""
        learned = arrays.learned.get(_weights_of(self.weight_owner.get(step.path, "")), {})
        ends_of_weight = [learned[end] for end in _ENDS if end in learned]
        return [ends, *(arrays.tensors[name] for name in self._tensors_of([step])), *ends_of_weight]

    def ends_of(self, arrays: Arrays) -> list[Any]:
        """Both ends of all grids' ranges, one after the other."""
        return [
            arrays.learned[name][end] if end in arrays.learned.get(name, {}) else arrays.ranges[name][end]
            for name in self.grids
            for end in _ENDS
        ]

    def _numbers_of_step(self, step: PlanStep, source: Sequence[np.ndarray]) -> Numbers:
        ends, names = source[0], self._tensors_of([step])
        arrays = Arrays(dict(zip(names, source[1:], strict=False)))
        for number, (name, grid) in enumerate(self.grids.items()):
            for end, value in zip(_ENDS, ends[2 * number : 2 * number + 2], strict=True):
                tree = arrays.learned if _is_learned(grid, end) else arrays.ranges
                tree.setdefault(name, {})[end] = value
        ends_of_weight = source[1 + len(names) :]
        if ends_of_weight:
            words = _ENDS[-len(ends_of_weight) :]
            arrays.learned[_weights_of(self.weight_owner[step.path])] = dict(zip(words, ends_of_weight, strict=True))
        run = Run(self, arrays, Mode(frozen=True), primitives=primitives_numpy)
        known = self._nudged
        if known is None or known[0] != ends.tobytes():
            known = (ends.tobytes(), {name: run.nudged(name) for name in self.grids})
            self._nudged = known
        return run.numbers_of([step], known[1])

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
        return _codes(values, scale, zero_point)


class Dropout:
    """The expression of a step that training alone has: each value dropped with a probability.

    What is dropped is the same along `kept_axes`.
    """

    def __init__(self, rate: float, kept_axes: Sequence[int] = ()) -> None:
        self.rate = rate
        self.kept_axes = tuple(kept_axes)
        self.sources: tuple[str, ...] = ()

    def __call__(self, primitives: Any, x: Any, key: Any) -> Any:
        return primitives.dropout(x, self.rate, key, self.kept_axes)


class TrainedNetwork:
    """A network with the numbers that training left behind: what `exactqat.deploy` takes.

    Attributes:
        plan: what the device runs.
        frozen: whether its last phase of training has begun; only then it is lowered.
        profile: whose integers it computes then; None: it stays fake quantized.
    """

    def __init__(
        self,
        functional: Functional,
        arrays: Arrays,
        frozen: bool,
        run: Callable[..., dict[str, np.ndarray]],
        called: Callable[[Any], tuple[list[np.ndarray], dict[str, np.ndarray]]],
    ) -> None:
        """
        Args:
            arrays: in NumPy.
            run: (inputs, quantizing) -> what every step makes, in NumPy, in evaluation.
            called: a batch, nested as the model takes it -> the inputs, and what every step makes, likewise.
        """
        self.plan = functional.plan
        self.profile = functional.profile
        self.frozen = frozen
        self._functional = functional
        self._arrays = arrays
        self._run = run
        self._called = called
        self._numbers: Numbers | None = None

    def numbers(self) -> Numbers:
        """The integers of weights and the grids."""
        if self._numbers is None:
            self._numbers = self._functional.numbers(self._arrays)
        return self._numbers

    def evaluated(self, batch: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The inputs and results of one call in evaluation, flat, for `deploy.verify`; without last steps that the
        device's network leaves out. batch: as the model takes it."""
        inputs, values = self._called(batch)
        return inputs, [values[path] for path in self.plan.device_outputs]

    def stored_codes(self, *inputs: Any) -> dict[str, np.ndarray]:
        """Codes of every tensor that the device stores, by layer path, in the user's order of axes."""
        values = self._run(inputs, True)
        return {
            path: self._functional.codes(path, values[path], self.numbers()) for path in self._functional.stored_paths()
        }

    def layer_values(self, *inputs: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """What the float and the fake-quantized network store, by layer path, in the user's order of axes."""
        plain, trained = (self._run(inputs, quantizing) for quantizing in (False, True))
        paths = self._functional.stored_paths()
        return {path: plain[path] for path in paths}, {path: trained[path] for path in paths}


class Run:
    """One run of a network, or what is computed for it."""

    def __init__(
        self,
        functional: Functional,
        arrays: Arrays,
        mode: Mode,
        key: Callable[[int], Any] | None = None,
        primitives: Any = None,
    ) -> None:
        self.functional = functional
        self.plan = functional.plan
        self.primitives = functional.primitives if primitives is None else primitives
        self.arrays = arrays
        self.mode = mode
        self.key = key
        self.tensors = dict(arrays.tensors)
        self.learned = {name: dict(ends) for name, ends in arrays.learned.items()}
        self.ranges = {name: dict(ends) for name, ends in arrays.ranges.items()}
        self.shown: dict[str, list[tuple[Any, Any]]] = {}
        self.constants: dict[str, Any] = {}
        # What custom gradients compute once for several steps.
        self.shared: dict[Any, Any] = {}

    # --- constants ----------------------------------------------------------------------------------------------------

    def constant(self, name: str) -> Any:
        """A parameter, a buffer or what is computed of them."""
        constant = self.plan.constants.get(name)
        if constant is None or constant.parameter:
            return self.tensors[name]
        if name not in self.constants:
            if isinstance(constant.expression, Derived):
                operands = [self.constant(operand) for operand in constant.expression.operands]
                value = self._computed(constant.expression.function, operands)
            elif constant.expression is not None:
                value = constant.expression(*(self.tensors[path] for path in constant.sources))
            else:
                value = np.asarray(constant.data, np.float32)
            in_numpy = self.primitives is primitives_numpy
            self.constants[name] = np.asarray(value) if in_numpy else self.as_array(value)
        return self.constants[name]

    def _computed(self, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """A function of arrays that have NumPy's methods, which not all frameworks' have by themselves."""
        wrapped = getattr(self.primitives, "WithMethods", None)
        return function(*operands) if wrapped is None else function(*map(wrapped, operands)).tensor

    def as_array(self, value: Any) -> Any:
        """NumPy values as the framework's."""
        return self.primitives.from_numpy(value) if isinstance(value, np.ndarray) else value

    def optional(self, name: str | None) -> Any:
        return None if not name else self.constant(name)

    # --- ranges -------------------------------------------------------------------------------------------------------

    def end(self, grid: str, end: str) -> Any:
        """One end of a range, which training may have moved beyond zero."""
        p = self.primitives
        if end not in self.learned.get(grid, {}):
            return p.stop_gradient(self.ranges[grid][end])
        value = self.learned[grid][end]
        value = p.stop_gradient(value) if self.mode.frozen else value
        inside = p.minimum(value, 0.0) if end == "minimum" else p.maximum(value, 0.0)
        return p.straight_through(inside, value)

    def bounds(self, grid: str) -> tuple[Any, Any]:
        """(min, max) of a grid, wide enough to have a scale."""
        where = self.primitives.where
        low, high = self.end(grid, "minimum"), self.end(grid, "maximum")
        collapsed = high - low < SMALLEST_WIDTH
        low, high = where(collapsed, low * 0.0, low), where(collapsed, low * 0.0 + 1.0, high)
        return self._symmetric(low, high) if self.functional.grids[grid].rule.wide else (low, high)

    def _symmetric(self, low: Any, high: Any) -> tuple[Any, Any]:
        """-32768 and 32767 steps from 0, so that 32767 steps reach the larger magnitude; see `ranges`."""
        step = self.primitives.maximum(-low, high) / (2**15 - 1)
        return step * -(2.0**15), step * (2**15 - 1)

    def scale(self, grid: str) -> Any:
        low, high = self.bounds(grid)
        return (high - low) / grid_steps(self.functional.grids[grid].bits, False)

    def observes(self, grid: Grid) -> bool:
        follows = grid.rule.ranges in ("ema", "last_batch", "percentile")
        return self.mode.observing or (self.mode.training and not self.mode.frozen and follows)

    def observe(self, name: str, grid: Grid, x: Any) -> None:
        """Takes a stored tensor into account; what is stored on one grid in one batch counts together.

        Values that are not finite say nothing about a range, and would never leave an average again: such a batch does
        not count.
        """
        rule, p = grid.rule, self.primitives
        if rule.ranges == "fixed":
            return
        shown = self.shown.setdefault(name, [])
        shown.append(p.extremes_of_replicas(*self._ends(grid, p.stop_gradient(x))))
        low, high = shown[0]
        for other_low, other_high in shown[1:]:
            low, high = p.minimum(low, other_low), p.maximum(high, other_high)
        takes = high - low < math.inf
        # Calibration tells of what the largest value does not show: XLA's passes over NaN on a CPU.
        if self.mode.observing:
            finite = p.amin(p.where(abs(x) < math.inf, 1.0, 0.0), tuple(range(len(x.shape))))
            takes = takes & (p.extremes_of_replicas(finite, finite)[0] > 0)
        count = self.arrays.ranges[name]["batches"]
        before = {
            end: p.stop_gradient(
                self.arrays.learned[name][end] if _is_learned(grid, end) else self.arrays.ranges[name][end]
            )
            for end in ("minimum", "maximum")
        }
        if rule.ranges == "min_max":
            low, high = p.minimum(low, before["minimum"]), p.maximum(high, before["maximum"])
        elif rule.ranges != "last_batch":
            counted = self._float(count)
            keep = p.minimum(counted / (counted + 1.0), rule.ema_decay)
            low = low + (before["minimum"] - low) * keep
            high = high + (before["maximum"] - high) * keep
        complete = len(shown) == self.functional.writers[name]
        moves = takes if complete else takes & (count == 0)
        for end, value in (("minimum", low), ("maximum", high)):
            (self.learned if _is_learned(grid, end) else self.ranges)[name][end] = p.where(moves, value, before[end])
        if complete:
            self.ranges[name]["batches"] = p.where(takes, count + 1, count)

    def _float(self, count: Any) -> Any:
        return self.primitives.to_float(count)

    def _ends(self, grid: Grid, x: Any) -> tuple[Any, Any]:
        """What one tensor of one batch asks for: low <= 0 <= high."""
        p, rule = self.primitives, grid.rule
        if rule.ranges == "percentile":
            values = p.sorted_values(x)
            size = int(values.shape[0])
            rank = size + 1 - math.ceil(rule.percentile / 100 * size)
            low, high = values[rank - 1], values[size - rank]
        else:
            axes = tuple(range(len(x.shape)))
            high = p.amax(x, axes)
            low = high * 0.0 if grid.nonnegative else p.amin(x, axes)
        low, high = p.minimum(low, 0.0), p.maximum(high, 0.0)
        if rule.ranges != "learned":
            return low, high
        # Gradients reach a bound only through values outside of it, so the start must already clip a little.
        collapsed = high - low < SMALLEST_WIDTH
        ends = (p.where(collapsed, low * 0.0, low), p.where(collapsed, low * 0.0 + 1.0, high))
        ends = self._symmetric(*ends) if rule.wide else ends
        fraction = least_error_fraction(p, x, *ends, rule.activation_bits, False)
        return low * fraction, high * fraction

    def store(self, name: str, x: Any) -> Any:
        """A tensor on its grid."""
        grid = self.functional.grids[name]
        if self.observes(grid):
            self.observe(name, grid, x)
        if not self.mode.quantizing:
            return x
        low, high = self.bounds(name)
        return self.primitives.fake_quantize(x, low, high, grid.bits, False)

    # --- weights ------------------------------------------------------------------------------------------------------

    def stored_weight(self, weights: Weights) -> Any:
        """What is quantized: the weight, under `Rule.fold_batch_norm` times batch norm's factor."""
        weight = self.constant(weights.weight)
        if not _folded(weights):
            return weight
        assert weights.batch_norm is not None
        factor, _ = self.factor_and_offset(weights.batch_norm)
        return weight * per_channel(self.primitives, factor, len(weight.shape), weights.channel_axis)

    def weight_bounds(self, path: str, weights: Weights, channels_last: Any) -> tuple[Any, Any]:
        """(min, max) of a weight, [out_channels] or rank 0."""
        p, rule = self.primitives, weights.rule
        learned = self.learned.get(_weights_of(self.functional.weight_owner[path]))
        if learned is None:
            return _extremes(p, rule, p.stop_gradient(channels_last))
        if self.mode.frozen:
            learned = {end: p.stop_gradient(value) for end, value in learned.items()}
        high = p.straight_through(p.maximum(learned["maximum"], 0.0), learned["maximum"])
        if rule.symmetric:
            return -high, high
        low = learned["minimum"]
        return p.straight_through(p.minimum(low, 0.0), low), high

    def quantized_weight(self, path: str, weights: Weights) -> tuple[Any, Any]:
        """The weight on its grid, and the width of a step for each output channel."""
        p, rule = self.primitives, weights.rule
        weight = self.stored_weight(weights)
        channels_last = p.moveaxis(weight, weights.channel_axis, -1)
        low, high = self.weight_bounds(path, weights, channels_last)
        scale = (high - low) / grid_steps(rule.weight_bits, rule.narrow_range)
        scale = scale * p.array(np.ones(weight.shape[weights.channel_axis], np.float32), weight)
        if not self.mode.quantizing:
            return weight, scale
        quantized = p.fake_quantize(channels_last, low, high, rule.weight_bits, rule.narrow_range)
        return p.moveaxis(quantized, -1, weights.channel_axis), scale

    def factor_and_offset(self, norm: BatchNorm) -> tuple[Any, Any]:
        """Batch norm in inference as ``factor * x + offset``, both [channels]."""
        weight, bias = self.optional(norm.weight), self.optional(norm.bias)
        mean, variance = (self.primitives.stop_gradient(self.constant(name)) for name in (norm.mean, norm.variance))
        deviation = self.primitives.sqrt(variance + norm.epsilon)
        factor = 1.0 / deviation if weight is None else weight / deviation
        return factor, (0.0 if bias is None else bias) - mean * factor

    def channel_grid(self, step: PlanStep, raw_scale: Any) -> ChannelGrid:
        """Folds batch norm into the weight's scale and puts the bias on the accumulator's grid; see `layers`."""
        p, weights = self.primitives, step.weights
        assert weights is not None
        bias = self.optional(weights.bias)
        bias = raw_scale * 0.0 if bias is None else bias
        factor = raw_scale * 0.0 + 1.0
        if weights.batch_norm is not None:
            factor, offset = self.factor_and_offset(weights.batch_norm)
            bias = bias * factor + offset
        if _folded(weights):
            factor = raw_scale * 0.0 + 1.0
        source = next(self.functional.grid_of[name] for name in step.operands if name in self.functional.grid_of)
        raw_scale, input_scale, output_scale = (
            p.stop_gradient(each) for each in (raw_scale, self.scale(source), self.scale(step.grid))
        )
        scale = raw_scale * abs(factor)
        unit = scale * input_scale
        largest = LARGEST_WIDE_BIAS_CODE if self.functional.grids[source].rule.wide else LARGEST_BIAS_CODE
        alive = (unit > SMALLEST_MULTIPLIER * output_scale) & (abs(bias) <= largest * unit)
        scale = p.where(alive, scale, output_scale / input_scale / 256)
        unit = input_scale * scale
        code = p.round(p.stop_gradient(bias / unit))
        on_grid = p.straight_through(code * unit, bias)
        return ChannelGrid(p.where(alive, factor, factor * 0.0), scale, code, on_grid)

    # --- steps --------------------------------------------------------------------------------------------------------

    def forward(self, inputs: Sequence[Any], seen: dict[str, Any] | None = None) -> tuple[list[Any], Arrays]:
        values: dict[str, Any] = {}
        for given, x in zip(self.plan.inputs, inputs, strict=True):
            values[given.path] = self.store(given.grid, x)
        as_device = self.mode.frozen and self.mode.quantizing and self.functional.profile is not None
        on_grid, ends = set(values), None
        if as_device:
            p = self.primitives
            ends = p.stack([p.stop_gradient(end) for end in self.functional.ends_of(self.arrays)], 0)
        for number, step in enumerate(self.plan.steps):
            value = self.step(number, step, values)
            values[step.path] = self._as_device(step, value, values, on_grid, ends) if as_device else value
        if seen is not None:
            seen.update(values)
        outputs = [values[path] for path in self.plan.outputs]
        return outputs, Arrays(self.tensors, self.learned, self.ranges)

    def _as_device(self, step: PlanStep, x: Any, values: Mapping[str, Any], on_grid: set[str], ends: Any) -> Any:
        """What the device makes of a step's operands, with the gradient of what is computed here.

        on_grid: paths of tensors that a device can hold: what training drops at random leaves the grid, the next
        stored tensor is on one again.
        """
        if step.outside:
            return x
        operands = [name for name in step.operands if name in values]
        kept = all(name in on_grid for name in operands)
        if step.expression is not None or not step.kind:
            same_value = step.attributes.get("stop_gradient") or step.attributes.get("custom_gradient")
            if step.operands[0] in on_grid and (same_value or not self.mode.training):
                on_grid.add(step.path)
            return x
        operator = OPERATORS[step.kind]
        if kept or not operator.same_quantization:
            on_grid.add(step.path)
        if not kept or operator.moves_codes:
            return x
        source = self.functional.numbers_source(step, self.arrays, ends)
        features = [values[name] for name in operands]
        return self.primitives.on_host(self.functional.device_step(step), x, source, features)

    def step(self, number: int, step: PlanStep, values: Mapping[str, Any]) -> Any:
        """The tensor that a step makes of earlier ones."""
        p = self.primitives
        features = [values[name] for name in step.operands if name in values]
        if step.expression is not None or not step.kind:
            if step.attributes.get("custom_gradient"):
                return self._with_custom_gradient(step, values)
            return self._only_in_training(number, step, features[0])
        if step.outside:
            return p.FUNCTIONS[step.kind](features[0], **step.attributes)
        operator = OPERATORS[step.kind]
        attributes = {name: value for name, value in step.attributes.items() if name != "activation"}
        if "new_shape" in attributes:
            follows = {step.batch_axis: -1}
            attributes["new_shape"] = tuple(follows.get(axis, size) for axis, size in enumerate(step.shape))
        if step.weights is not None:
            return self._weighted(step, step.weights, operator, attributes, features[0])
        operands = [
            values[name] if name in values else self._constant_operand(step, position, operator)
            for position, name in enumerate(step.operands)
        ]
        source = next(self.functional.grid_of[name] for name in step.operands if name in values)
        if operator.uses_operand_scale and self.mode.quantizing:
            attributes["operand_scale"] = p.stop_gradient(self.scale(source))
        result = operator.real(p, operands, attributes)
        if operator.same_quantization:
            return self._moved(step, operator, operands, attributes, result)
        return self._stored(step, result)

    def _stored(self, step: PlanStep, x: Any) -> Any:
        """Activation, then the grid of the stored tensor."""
        x = self._activated(x, step.activation)
        # On a symmetric grid of 16 bits saturation clamps, one code below the lower bound.
        by_saturation = self.functional.grids[step.grid].rule.wide and self.mode.quantizing
        if step.bounds is not None and not by_saturation:
            x = self.primitives.clip(x, *step.bounds)
        return self.store(step.grid, x)

    def _activated(self, x: Any, activation: str) -> Any:
        if activation == "NONE":
            return x
        return self.primitives.clip(x, 0.0, 6.0 if activation == "RELU6" else math.inf)

    def _only_in_training(self, number: int, step: PlanStep, x: Any) -> Any:
        if step.attributes.get("stop_gradient"):
            return self.primitives.stop_gradient(x)
        if not self.mode.training:
            return x
        assert self.key is not None
        if step.expression is not None:
            return step.expression(self.primitives, x, self.key(number))
        return self.primitives.dropout(x, step.attributes["dropout"], self.key(number))

    def _with_custom_gradient(self, step: PlanStep, values: Mapping[str, Any]) -> Any:
        """The first operand's value; its gradient is the user's rule at the others, constants as they are trained."""
        y, *operands = (values[name] if name in values else self.constant(name) for name in step.operands)
        return step.expression(self.primitives, y, *operands, shared=self.shared)

    def _constant_operand(self, step: PlanStep, position: int, operator: DeviceOperator) -> Any:
        value = self.constant(step.operands[position])
        if operator.same_quantization:
            return self.store(step.grid, value)
        if not self.mode.quantizing:
            return value
        low, high, rule = self.constant_bounds(step, position, value)
        bits = self.plan.grids[step.grid].constant_bits
        return self.primitives.fake_quantize(value, low, high, bits, rule.narrow_range)

    def constant_bounds(
        self, step: PlanStep, position: int, value: Any, within_limits: bool = True
    ) -> tuple[Any, Any, Rule]:
        """Its largest magnitude, whatever rules say of ranges: they are about what is stored.

        within_limits: as far as the operator takes its scale beside those of the other operand and of the result.
        """
        p = self.primitives
        rule = replace(self.plan.grids[step.grid].rule, ranges="ema", fixed_range=None, per_channel=False)
        low, high = _extremes(p, rule, p.stop_gradient(value))
        limited = constant_limits(self.plan, step, position)
        if limited is None or not (within_limits and rule.symmetric):
            return low, high, rule
        limits, other = limited
        least, most = constant_step(limits, *(p.stop_gradient(self.scale(name)) for name in (other, step.grid)))
        reach = grid_steps(self.plan.grids[step.grid].constant_bits, rule.narrow_range) / 2
        high = p.minimum(p.maximum(high, least * reach), most * reach)
        return -high, high, rule

    def _moved(
        self, step: PlanStep, operator: DeviceOperator, operands: Sequence[Any], attributes: Mapping[str, Any], x: Any
    ) -> Any:
        """The result of an operator that stores on the grid of its operands; some round in its codes."""
        if not self.mode.quantizing or type(operator).real_on_grid is DeviceOperator.real_on_grid:
            return x
        p, bits = self.primitives, self.functional.grids[step.grid].bits
        low, _ = self.bounds(step.grid)
        scale = p.stop_gradient(self.scale(step.grid))
        zero_point = p.floor(p.clip(p.stop_gradient(-low) / scale, 0.0, 2.0**bits - 1) + 0.5)
        wide = self.functional.grids[step.grid].rule.wide
        bottom = -(2**15) if wide else -128 + step.high * (256 - 2**bits)
        grid = DeviceGrid(scale, zero_point + float(bottom))
        rounded = operator.real_on_grid(p, [p.stop_gradient(each) for each in operands], attributes, grid)
        return x if rounded is None else p.straight_through(rounded, x)

    def _weighted(
        self, step: PlanStep, weights: Weights, operator: DeviceOperator, attributes: Mapping[str, Any], x: Any
    ) -> Any:
        weight, scale = self.quantized_weight(step.path, weights)
        norm = weights.batch_norm

        def compute(weight: Any, bias: Any) -> Any:
            return operator.real(self.primitives, (x, weight, bias), attributes)

        if self.mode.frozen and self.mode.quantizing:
            grid = self.channel_grid(step, scale)
            factor = per_channel(self.primitives, grid.factor, len(weight.shape), weights.channel_axis)
            return self._stored(step, compute(weight * factor, grid.bias))
        bias = self.optional(weights.bias)
        if norm is None:
            return self._stored(step, compute(weight, bias))
        if _folded(weights):
            return self._stored(step, self._folded(step, weights, norm, compute, weight, bias))
        return self._stored(step, self._normalized(step, norm, compute(weight, bias)))

    def _channel_axis(self, step: PlanStep, rank: int) -> int:
        return int(step.attributes.get("channel_axis", -1)) % rank

    def _normalized(self, step: PlanStep, norm: BatchNorm, x: Any) -> Any:
        """Batch norm; in training on the batch's statistics, which move the running ones."""
        p, axis = self.primitives, self._channel_axis(step, len(x.shape))
        if not (self.mode.training and norm.training and not self.mode.frozen):
            factor, offset = self.factor_and_offset(norm)
            return x * per_channel(p, factor, len(x.shape), axis) + per_channel(p, offset, len(x.shape), axis)
        mean, variance = (p.stop_gradient(self.constant(name)) for name in (norm.mean, norm.variance))
        weight, bias = self.optional(norm.weight), self.optional(norm.bias)
        weight = mean * 0.0 + 1.0 if weight is None else weight
        bias = mean * 0.0 if bias is None else bias
        share = norm.momentum
        if norm.counter:
            count = self.tensors[norm.counter] + 1
            self.tensors[norm.counter] = count
            share = share if share is not None else 1.0 / count
        y, mean, new = p.batch_norm(x, weight, bias, mean, variance, norm.epsilon, share, axis)
        if norm.biased and share is not None:
            rows = math.prod(size for at, size in enumerate(x.shape) if at != axis) * p.count_of_replicas()
            kept = variance * (1.0 - share)
            new = kept + (new - kept) * ((rows - 1) / rows if rows > 1 else 1.0)
        variance = new
        self.tensors[norm.mean], self.tensors[norm.variance] = mean, variance
        return y

    def _folded(
        self,
        step: PlanStep,
        weights: Weights,
        norm: BatchNorm,
        compute: Callable[[Any, Any], Any],
        weight: Any,
        bias: Any,
    ) -> Any:
        """Convolution and batch norm in one: TensorFlow's fold with correction, see `layers`."""
        p = self.primitives
        factor, offset = self.factor_and_offset(norm)
        if not (self.mode.training and norm.training):
            return compute(weight, offset if bias is None else bias * factor + offset)
        running = p.sqrt(p.stop_gradient(self.constant(norm.variance)) + norm.epsilon)
        beta = self.optional(norm.bias)
        raw = compute(self.constant(weights.weight), bias)
        axis = self._channel_axis(step, len(raw.shape))
        others = [at for at in range(len(raw.shape)) if at != axis]
        mean = p.mean_of_replicas(p.mean(raw, others))
        deviations = p.square(raw - per_channel(p, mean, len(raw.shape), axis))
        variance = p.mean_of_replicas(p.mean(deviations, others))
        correction = running / p.sqrt(variance + norm.epsilon)
        shift = factor * correction * (mean if bias is None else mean - bias)
        shift = -shift if beta is None else beta - shift
        correction, shift = (per_channel(p, vector, len(raw.shape), axis) for vector in (correction, shift))
        result = compute(weight, None) * correction + shift
        self._normalized(step, norm, p.stop_gradient(raw))
        return result

    # --- integers -----------------------------------------------------------------------------------------------------

    def numbers(self) -> Numbers:
        grids: dict[str, tuple[np.float32, int]] = {}
        for name, grid in self.functional.grids.items():
            if grid.rule.ranges != "fixed" and not self.ranges[name]["batches"] > 0:
                require_data([name])
            require_finite(f"the range of '{name}'", *self.bounds(name))
            grids[name] = self.nudged(name)
        return self.numbers_of(self.plan.steps, grids)

    def numbers_of(self, steps: Sequence[PlanStep], grids: dict[str, tuple[np.float32, int]]) -> Numbers:
        """The integers of some steps. grids: all of them."""
        weights: dict[str, WeightNumbers] = {}
        constants: dict[tuple[str, int], tuple[np.ndarray, np.float32]] = {}
        for step in steps:
            if not step.kind or step.outside or step.expression is not None:
                continue
            for position, name in enumerate(step.operands):
                if name not in self.functional.grid_of:
                    constants[(step.path, position)] = self._constant_numbers(step, position, grids)
            if step.weights is not None:
                weights[step.path] = self._weight_numbers(step, step.weights)
        return Numbers(grids, weights, constants)

    def nudged(self, name: str) -> tuple[np.float32, int]:
        """real = scale * (code - zero_point), in TensorFlow's float32 steps."""
        low, high = (np.float32(end) for end in self.bounds(name))
        steps = np.float32(grid_steps(self.functional.grids[name].bits, False))
        scale = np.float32((high - low) / steps)
        exact = np.float32(-(low / scale))
        return scale, int(np.floor(np.float64(min(max(exact, np.float32(0)), steps)) + 0.5))

    def _constant_numbers(
        self, step: PlanStep, position: int, grids: Mapping[str, tuple[np.float32, int]]
    ) -> tuple[np.ndarray, np.float32]:
        value = np.asarray(self.constant(step.operands[position]), np.float32)
        if OPERATORS[step.kind].same_quantization:
            scale, zero_point = grids[step.grid]
            low, high = self.bounds(step.grid)
            bits = self.functional.grids[step.grid].bits
            stored = primitives_numpy.fake_quantize(value, low, high, bits, False)
            return _codes(stored, scale, zero_point) - zero_point, scale
        low, high, rule = self.constant_bounds(step, position, value)
        bits = self.plan.grids[step.grid].constant_bits
        scale = np.float32((high - low) / grid_steps(bits, rule.narrow_range))
        require_finite(f"a constant of '{step.path}'", scale)
        quantized = primitives_numpy.fake_quantize(value, low, high, bits, rule.narrow_range)
        if scale == 0:
            # All zero: the result's own scale, which no operator finds too large beside it.
            scale, _ = grids[step.grid]
        return np.rint(quantized / scale).astype(np.int64), scale

    def largest_weight_scale(self, step: PlanStep) -> float | None:
        """Of the channels that are not constant, if there are any."""
        assert step.weights is not None
        _, raw_scale = self.quantized_weight(step.path, step.weights)
        with np.errstate(divide="ignore", invalid="ignore"):
            grid = self.channel_grid(step, raw_scale)
        alive = np.asarray(grid.weight_scale)[np.asarray(grid.factor) != 0]
        return float(alive.max()) if alive.size else None

    def _weight_numbers(self, step: PlanStep, weights: Weights) -> WeightNumbers:
        """A layer's weights on the device; a negative factor of batch norm has turned the signs of its channel."""
        norm = weights.batch_norm
        names = [weights.weight, weights.bias, *((norm.weight, norm.bias, norm.mean, norm.variance) if norm else ())]
        held = [self.constant(name) for name in names if name is not None]
        require_finite(f"the layer '{step.path}'", *map(np.asarray, held))
        quantized, raw_scale = self.quantized_weight(step.path, weights)
        safe = np.where(raw_scale > 0, raw_scale, np.float32(1))
        rank, axis = quantized.ndim, weights.channel_axis
        codes = np.rint(quantized / per_channel(primitives_numpy, safe, rank, axis)).astype(np.int64)
        with np.errstate(divide="ignore", invalid="ignore"):
            grid = self.channel_grid(step, raw_scale)
        signs = np.sign(np.asarray(grid.factor)).astype(np.int64)
        scales = np.asarray(grid.weight_scale)
        one_scale = not weights.rule.per_channel and bool(np.all(scales == scales[0]))
        bias = np.asarray(grid.bias_code).astype(np.float64)
        return WeightNumbers(
            codes * per_channel(primitives_numpy, signs, rank, axis), scales[:1] if one_scale else scales, bias
        )


def least_error_fraction(
    primitives: Any, channels_last: Any, minimum: Any, maximum: Any, bits: int, narrow: bool
) -> Any:
    """The fraction of a range, from 1 down to about a quarter, that quantizes a tensor with the least squared error."""
    p = primitives
    axes = tuple(range(len(channels_last.shape) - (1 if len(minimum.shape) else 0)))
    best = minimum * 0.0 + 1.0
    best_error: Any = None
    for step in range(_CLIPPING_CANDIDATES):
        fraction = 1.0 - step / 32
        quantized = p.fake_quantize(channels_last, minimum * fraction, maximum * fraction, bits, narrow)
        error = p.sum(p.square(quantized - channels_last), axes)
        if best_error is None:
            best_error = error
            continue
        better = error < best_error
        best_error = p.where(better, error, best_error)
        best = p.where(better, best * 0.0 + fraction, best)
    return best


def _extremes(primitives: Any, rule: Rule, channels_last: Any) -> tuple[Any, Any]:
    """The range that holds a weight, per channel of the last axis or rank 0."""
    p, rank = primitives, len(channels_last.shape)
    axes = tuple(range(rank - 1 if rule.per_channel and rank else rank))
    if rule.symmetric:
        magnitude = p.amax(abs(channels_last), axes)
        return -magnitude, magnitude
    return p.minimum(p.amin(channels_last, axes), 0.0), p.maximum(p.amax(channels_last, axes), 0.0)


def _codes(values: np.ndarray, scale: np.float32, zero_point: int) -> np.ndarray:
    # What pads a maximum is below all codes.
    return np.maximum(np.rint(values / scale), -zero_point).astype(np.int64) + zero_point


def _is_learned(grid: Grid, end: str) -> bool:
    return grid.trained and not (end == "minimum" and grid.nonnegative)


def _weights_of(path: str) -> str:
    return f"weights of {path}"


def _folded(weights: Weights) -> bool:
    return weights.batch_norm is not None and weights.rule.fold_batch_norm


def _with_fixed_ends(grid: Grid) -> Grid:
    if grid.fixed is None:
        return grid
    return replace(
        grid, rule=replace(grid.rule, ranges="fixed", fixed_range=grid.fixed_range, activation_bits=grid.bits)
    )
