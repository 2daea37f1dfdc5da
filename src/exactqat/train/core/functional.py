# SPDX-License-Identifier: Apache-2.0
"""Trains a plan by pure functions: parameters and state go in, results and the next state come out.

It knows no framework. It computes with a framework's `primitives`; what an operator computes is said by the device's
declarations. Where a framework keeps parameters and state, its own file says.
Integers are made in NumPy, so equal numbers give equal integers in all frameworks.

What a plan means in training is said by `train.core`, which PyTorch's modules call as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np

from ...device import DEFAULT_PROFILE, OPERATORS, DeviceOperator, profile_named
from ...planning.fitting import constant_limits
from ...planning.plans import (
    BatchNorm,
    Derived,
    Grid,
    Numbers,
    Plan,
    PlanStep,
    WeightNumbers,
    Weights,
    refuse_batch,
    require_data,
    require_finite,
)
from ...planning.rules import Rule
from . import primitives_numpy
from .freezing import Settling, move_ranges, warn_of_unsettled
from .frozen import DeviceNetwork, DeviceStep
from .primitives import FunctionalPrimitives, NumberPrimitives
from .ranges import (
    CALIBRATED,
    FOLLOWING,
    above_zero,
    below_zero,
    codes_of,
    device_grid,
    grid_steps,
    learned_start,
    nudged,
    observed,
    rank_of_ends,
    usable,
    with_zero,
)
from .weights import (
    ChannelGrid,
    channel_grid,
    constant_rule,
    correction_and_shift,
    extremes,
    factor_and_offset,
    folds,
    learned_ends,
    limited_magnitude,
    per_channel,
    shared_range,
    step_width,
    weight_ends,
    weight_numbers,
)

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
        tensors: the user's parameters and buffers, and constants that somebody else has computed.
        learned: by grid, or by step for weights ("weights of <path>"): ``minimum`` and ``maximum`` where they are
            trained.
        ranges: by grid: ``minimum``, ``maximum`` (those that are not trained), ``batches``, and of layers whose batch
            norm follows the batches ``trained``, the number of those.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    learned: Tree = field(default_factory=dict)
    ranges: Tree = field(default_factory=dict)


class Functional:
    """A plan as functions of `Arrays`.

    Attributes:
        plan: what the device runs.
        grids: by name, with fixed ranges where the device fixes them.
        writers: how many tensors are stored on each grid.
        profile: whose integers a frozen network computes, by the names of `deploy.PROFILES`; None: it stays fake
            quantization, as under rules that no device knows.
    """

    def __init__(
        self, plan: Plan, primitives: FunctionalPrimitives | None = None, profile: str | None = DEFAULT_PROFILE
    ) -> None:
        """primitives: None where only integers are made of what has been trained."""
        self.plan = plan
        self.primitives = primitives
        profile = None if profile is None else profile_named(profile).name
        self.profile = profile if plan.has_a_device else None
        self._device_steps: dict[str, DeviceStep] = {}
        self._device_network: DeviceNetwork | None = None
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
                self.weight_owner[step.path] = owners.setdefault(shared_range(step.weights), step.path)

    @property
    def needs_calibration(self) -> list[str]:
        """Grids whose ranges training alone does not set."""
        return [name for name, grid in self.grids.items() if grid.rule.ranges in CALIBRATED]

    def frozen_ranges(self, ranges: Tree, learned: Tree, tensors: Mapping[str, Any]) -> tuple[Tree, Tree]:
        """Ranges and learned ranges as freezing makes them, in NumPy where they change; see `move_ranges`.

        Warns, with the stack level of the caller's `warnings.warn`, of ranges that it moves and of batch norms whose
        statistics are not settled.

        Args:
            ranges, learned: arrays that NumPy reads.
            tensors: the network's parameters and variables in NumPy.
        """
        warn_of_unsettled(self._settling(ranges, tensors))
        kept, trained = ({name: dict(ends) for name, ends in each.items()} for each in (ranges, learned))

        def at(name: str) -> tuple[float, float]:
            low, high = (float({**kept[name], **trained.get(name, {})}[end]) for end in _ENDS)
            return low, high

        def move(name: str, ends: tuple[float, float]) -> None:
            for end, value in zip(_ENDS, ends, strict=True):
                (trained if end in trained.get(name, {}) else kept)[name][end] = np.asarray(value, np.float32)

        seen = {name for name, grid in self.grids.items() if grid.rule.ranges == "fixed" or kept[name]["batches"] > 0}
        ends = {name: at(name) for name in self.grids}
        move_ranges(self.plan, ends, seen, move, lambda: self._wanted_scales(kept, trained, tensors))
        return kept, trained

    def _settling(self, ranges: Tree, tensors: Mapping[str, Any]) -> Iterator[Settling]:
        for step in self.plan.steps:
            norm = None if step.weights is None else step.weights.batch_norm
            if norm is not None and norm.training:
                trained = int(ranges[step.grid]["trained"])
                batches = int(tensors[norm.counter]) if norm.counter else trained
                yield Settling(step.path, norm.momentum, batches, trained, np.asarray(tensors[norm.variance]))

    def _wanted_scales(self, ranges: Tree, learned: Tree, tensors: Mapping[str, Any]) -> dict[tuple[str, int], float]:
        """The scales that constants and weights ask for."""
        learned, ranges = (
            {name: {end: np.asarray(value) for end, value in ends.items()} for name, ends in tree.items()}
            for tree in (learned, ranges)
        )
        run = Run(self, Arrays(dict(tensors), learned, ranges), Mode(frozen=True), primitives=primitives_numpy)
        found = {}
        for step in self.plan.steps:
            largest = None if step.weights is None else run.largest_weight_scale(step)
            if largest is not None:
                found[(step.path, len(step.operands))] = largest
            for position, name in enumerate(step.operands):
                if name in self.grid_of or constant_limits(self.plan, step, position) is None:
                    continue
                value = np.asarray(run.constant(name), np.float32)
                low, high, rule = run.constant_bounds(step, position, value, within_limits=False)
                bits = self.plan.grids[step.grid].constant_bits
                found[(step.path, position)] = float(step_width((low, high), bits, rule.narrow_range))
        return found

    def require_finite_state(self, ranges: Tree, learned: Tree, tensors: Mapping[str, Any]) -> None:
        """Raises ValueError if what is fixed from `freeze` on, ranges and statistics of batch norm, holds NaN or
        infinity."""
        for tree in (ranges, learned):
            for name, ends in tree.items():
                require_finite(f"the range of '{name}'", *(np.asarray(ends[end]) for end in _ENDS if end in ends))
        for step in self.plan.steps:
            norm = step.weights.batch_norm if step.weights is not None else None
            held = [tensors[name] for name in (norm.mean, norm.variance)] if norm else []
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

        def visit(name: str) -> None:
            constant = self.plan.constants.get(name)
            if constant is None:
                found[name] = None
            elif constant.parameter:
                found[constant.name] = None
            elif isinstance(constant.expression, Derived):
                for operand in constant.expression.operands:
                    visit(operand)
            else:
                found.update(dict.fromkeys(constant.sources))

        for step in self.plan.steps if steps is None else steps:
            for name in self.tensors_read(step):
                visit(name)
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
        for step in self.plan.steps:
            norm = None if step.weights is None else step.weights.batch_norm
            if norm is not None and norm.training:
                arrays.ranges[step.grid]["trained"] = np.asarray(0, np.int32)
        run = Run(self, arrays, Mode(), primitives=primitives_numpy)
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
            key: gives what `primitives.dropout` draws from, by a step's number.
            seen: is filled with every tensor that a step makes.
        """
        return Run(self, arrays, mode, key).forward(inputs, seen)

    def numbers(self, arrays: Arrays) -> Numbers:
        """What training ends with, for `deploy.lower`. arrays: in NumPy.

        Raises:
            MissingData: a range has seen no data.
        """
        return Run(self, arrays, Mode(frozen=True), primitives=primitives_numpy).numbers()

    def numbers_of(self, step: PlanStep, arrays: Arrays, grids: dict[str, tuple[np.float32, int]]) -> Numbers:
        """Those of one step. arrays: in NumPy; grids: all of them."""
        return Run(self, arrays, Mode(frozen=True), primitives=primitives_numpy).numbers_of([step], grids)

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
        learned = arrays.learned.get(weights_of(self.weight_owner.get(step.path, "")), {})
        ends_of_weight = [learned[end] for end in _ENDS if end in learned]
        return [ends, *(arrays.tensors[name] for name in self._tensors_of([step])), *ends_of_weight]

    def device_network(self, learned: Mapping[str, Any]) -> DeviceNetwork:
        """What the device makes of a whole frozen network; its `trained` is what `network_source` gives."""
        if self._device_network is None:
            assert self.profile is not None
            numbers = partial(self._numbers_of_network, self._ends_of_weights(learned))
            self._device_network = DeviceNetwork(self.plan, self.profile, numbers)
        return self._device_network

    def network_source(self, arrays: Arrays, ends: Any) -> list[Any]:
        """All that the integers of the network depend on, as a list of arrays. ends: what `ends_of` gives."""
        ends_of_weights = [arrays.learned[name][end] for name, end in self._ends_of_weights(arrays.learned)]
        return [ends, *(arrays.tensors[name] for name in self._tensors_of()), *ends_of_weights]

    def _ends_of_weights(self, learned: Mapping[str, Any]) -> list[tuple[str, str]]:
        """What is learned of weights' ranges, in a fixed order."""
        owners = dict.fromkeys(map(weights_of, self.weight_owner.values()))
        return [(name, end) for name in owners if name in learned for end in _ENDS if end in learned[name]]

    def _numbers_of_network(self, ends_of_weights: list[tuple[str, str]], source: Sequence[np.ndarray]) -> Numbers:
        names = self._tensors_of()
        arrays = self._with_ends(Arrays(dict(zip(names, source[1:], strict=False))), source[0])
        for (name, end), value in zip(ends_of_weights, source[1 + len(names) :], strict=True):
            arrays.learned.setdefault(name, {})[end] = value
        run = Run(self, arrays, Mode(frozen=True), primitives=primitives_numpy)
        return run.numbers_of(self.plan.steps, {name: run.nudged(name) for name in self.grids})

    def ends_of(self, arrays: Arrays) -> list[Any]:
        """Both ends of all grids' ranges, one after the other."""
        return [
            arrays.learned[name][end] if end in arrays.learned.get(name, {}) else arrays.ranges[name][end]
            for name in self.grids
            for end in _ENDS
        ]

    def _numbers_of_step(self, step: PlanStep, source: Sequence[np.ndarray]) -> Numbers:
        ends, names = source[0], self._tensors_of([step])
        arrays = self._with_ends(Arrays(dict(zip(names, source[1:], strict=False))), ends)
        ends_of_weight = source[1 + len(names) :]
        if ends_of_weight:
            words = _ENDS[-len(ends_of_weight) :]
            arrays.learned[weights_of(self.weight_owner[step.path])] = dict(zip(words, ends_of_weight, strict=True))
        run = Run(self, arrays, Mode(frozen=True), primitives=primitives_numpy)
        known = self._nudged
        if known is None or known[0] != ends.tobytes():
            known = (ends.tobytes(), {name: run.nudged(name) for name in self.grids})
            self._nudged = known
        return run.numbers_of([step], known[1])

    def _with_ends(self, arrays: Arrays, ends: np.ndarray) -> Arrays:
        """The arrays with both ends of all grids' ranges; the inverse of `ends_of`."""
        for number, (name, grid) in enumerate(self.grids.items()):
            for end, value in zip(_ENDS, ends[2 * number : 2 * number + 2], strict=True):
                tree = arrays.learned if _is_learned(grid, end) else arrays.ranges
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


class TrainedNetwork:
    """A network with the numbers that training ended with: what `exactqat.deploy` takes.

    Attributes:
        plan: what the device runs.
        frozen: whether its last phase of training has begun; only then it is lowered.
        profile: whose integers it computes then; None: it stays fake quantized.
        functional: the plan as functions, of `arrays`.
        arrays: in NumPy.
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
        self.functional = functional
        self.arrays = arrays
        self._run = run
        self._called = called
        self._numbers: Numbers | None = None

    def numbers(self) -> Numbers:
        """The integers of weights and the grids."""
        if self._numbers is None:
            self._numbers = self.functional.numbers(self.arrays)
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
            path: self.functional.codes(path, values[path], self.numbers()) for path in self.functional.stored_paths()
        }

    def layer_values(self, *inputs: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """What the float and the fake-quantized network store, by layer path, in the user's order of axes."""
        plain, trained = (self._run(inputs, quantizing) for quantizing in (False, True))
        paths = self.functional.stored_paths()
        return {path: plain[path] for path in paths}, {path: trained[path] for path in paths}


class Run:
    """One run of a network, or what is computed for it."""

    def __init__(
        self,
        functional: Functional,
        arrays: Arrays,
        mode: Mode,
        key: Callable[[int], Any] | None = None,
        primitives: NumberPrimitives | None = None,
    ) -> None:
        self.functional = functional
        self.plan = functional.plan
        # NumPy's few, a `NumberPrimitives`, do where only integers are made.
        self.primitives = cast(FunctionalPrimitives, functional.primitives if primitives is None else primitives)
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
        if name in self.tensors:
            return self.tensors[name]
        constant = self.plan.constants[name]
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
        return below_zero(p, value) if end == "minimum" else above_zero(p, value)

    def bounds(self, grid: str) -> tuple[Any, Any]:
        """(min, max) of a grid, wide enough to have a scale."""
        ends = self.end(grid, "minimum"), self.end(grid, "maximum")
        return usable(self.primitives, *ends, self.functional.grids[grid].rule.wide)

    def scale(self, grid: str) -> Any:
        return step_width(self.bounds(grid), self.functional.grids[grid].bits, False)

    def observes(self, grid: Grid) -> bool:
        follows = self.mode.training and not self.mode.frozen and grid.rule.ranges in FOLLOWING
        return self.mode.observing or follows

    def observe(self, name: str, grid: Grid, x: Any) -> None:
        """Takes a stored tensor into account; see `observed`."""
        rule, p = grid.rule, self.primitives
        if rule.ranges == "fixed":
            return
        shown = self.shown.setdefault(name, [])
        shown.append(p.extremes_of_replicas(*self._ends(grid, p.stop_gradient(x))))
        finite = None
        # Calibration tells of what the largest value does not show: XLA's passes over NaN on a CPU.
        if self.mode.observing:
            finite = p.amin(p.where(abs(x) < math.inf, 1.0, 0.0), tuple(range(len(x.shape))))
            finite = p.extremes_of_replicas(finite, finite)[0] > 0
        trees = [self.learned if _is_learned(grid, end) else self.ranges for end in _ENDS]
        before = [getattr(self.arrays, "learned" if tree is self.learned else "ranges")[name] for tree in trees]
        low, high = (p.stop_gradient(each[end]) for each, end in zip(before, _ENDS, strict=True))
        count = self.arrays.ranges[name]["batches"]
        writers = self.functional.writers[name]
        *ends, batches = observed(p, rule.ranges, rule.ema_decay, shown, writers, (low, high), count, finite)
        for tree, end, value in zip(trees, _ENDS, ends, strict=True):
            tree[name][end] = value
        if batches is not count:
            self.ranges[name]["batches"] = batches

    def _ends(self, grid: Grid, x: Any) -> tuple[Any, Any]:
        """What one tensor of one batch asks for: low <= 0 <= high."""
        p, rule = self.primitives, grid.rule
        if rule.ranges == "percentile":
            values = p.sorted_values(x)
            size = int(values.shape[0])
            rank = rank_of_ends(rule.percentile, size)
            low, high = values[rank - 1], values[size - rank]
        else:
            axes = tuple(range(len(x.shape)))
            high = p.amax(x, axes)
            low = high if grid.nonnegative else p.amin(x, axes)
        low, high = with_zero(p, low, high, grid.nonnegative)
        if rule.ranges != "learned":
            return low, high
        return learned_start(p, x, low, high, rule.activation_bits, rule.wide)

    def store(self, name: str, x: Any) -> Any:
        """A tensor on its grid."""
        grid = self.functional.grids[name]
        if self.observes(grid):
            self.observe(name, grid, x)
        if not self.mode.quantizing or grid.indices:
            return x
        low, high = self.bounds(name)
        return self.primitives.fake_quantize(x, low, high, grid.bits, False)

    # --- weights ------------------------------------------------------------------------------------------------------

    def stored_weight(self, weights: Weights) -> Any:
        """What is quantized: the weight, under `Rule.fold_batch_norm` times batch norm's factor."""
        weight = self.constant(weights.weight)
        if not folds(weights):
            return weight
        assert weights.batch_norm is not None
        factor, _ = self.factor_and_offset(weights.batch_norm)
        return weight * per_channel(self.primitives, factor, len(weight.shape), weights.channel_axis)

    def quantized_weight(self, path: str, weights: Weights) -> tuple[Any, Any]:
        """The weight on its grid, and the width of a step for each output channel."""
        p, rule = self.primitives, weights.rule
        weight = self.stored_weight(weights)
        channels_last = p.moveaxis(weight, weights.channel_axis, -1)
        learned = self.learned.get(weights_of(self.functional.weight_owner[path]))
        if learned is not None and self.mode.frozen:
            learned = {end: p.stop_gradient(value) for end, value in learned.items()}
        low, high = weight_ends(p, rule, channels_last, learned)
        scale = step_width((low, high), rule.weight_bits, rule.narrow_range)
        scale = scale * p.array(np.ones(weight.shape[weights.channel_axis], np.float32), weight)
        if not self.mode.quantizing:
            return weight, scale
        quantized = p.fake_quantize(channels_last, low, high, rule.weight_bits, rule.narrow_range)
        return p.moveaxis(quantized, -1, weights.channel_axis), scale

    def factor_and_offset(self, norm: BatchNorm) -> tuple[Any, Any]:
        """Batch norm in inference as ``factor * x + offset``, both [channels]."""
        weight, bias = self.optional(norm.weight), self.optional(norm.bias)
        mean, variance = (self.primitives.stop_gradient(self.constant(name)) for name in (norm.mean, norm.variance))
        return factor_and_offset(self.primitives, weight, bias, mean, variance, norm.epsilon)

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
        if folds(weights):
            factor = raw_scale * 0.0 + 1.0
        source = next(self.functional.grid_of[name] for name in step.operands if name in self.functional.grid_of)
        input_scale, output_scale = (p.stop_gradient(self.scale(name)) for name in (source, step.grid))
        wide = self.functional.grids[source].rule.wide
        return channel_grid(p, factor, bias, p.stop_gradient(raw_scale), input_scale, output_scale, wide)

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

        def step_by_step() -> dict[str, Any]:
            for number, step in enumerate(self.plan.steps):
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
        return outputs, Arrays(self.tensors, self.learned, self.ranges)

    def _whole(
        self, inputs: dict[str, Any], ends: Any, step_by_step: Callable[[], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """What `step_by_step` gives for the network's outputs, by one call of the host; its gradients are those of
        `step_by_step`, whose values are then computed too. None where a framework does not do that."""
        network = self.functional.device_network(self.arrays.learned)
        source = self.functional.network_source(self.arrays, ends)

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
        attributes = attributes_of(step)
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
        grid = self.plan.grid_of_constant(step, position)
        if grid:
            return self.store(grid, value)
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
        rule = constant_rule(self.plan.grids[step.grid].rule)
        low, high = extremes(p, rule, p.stop_gradient(value))
        limited = constant_limits(self.plan, step, position)
        if limited is None or not (within_limits and rule.symmetric):
            return low, high, rule
        limits, other = limited
        scales = p.stop_gradient(self.scale(other)), p.stop_gradient(self.scale(step.grid))
        steps = grid_steps(self.plan.grids[step.grid].constant_bits, rule.narrow_range)
        high = limited_magnitude(p, high, steps, limits, scales, self._seen(other) & self._seen(step.grid))
        return -high, high, rule

    def _seen(self, name: str) -> Any:
        """Whether a range has seen data."""
        known = self.mode.frozen or self.functional.grids[name].rule.ranges == "fixed"
        return True if known else self.ranges[name]["batches"] > 0

    def _moved(
        self, step: PlanStep, operator: DeviceOperator, operands: Sequence[Any], attributes: Mapping[str, Any], x: Any
    ) -> Any:
        """The result of an operator that stores on the grid of its operands; some round in its codes."""
        if not self.mode.quantizing or type(operator).real_on_grid is DeviceOperator.real_on_grid:
            return x
        p, bits = self.primitives, self.functional.grids[step.grid].bits
        low, _ = self.bounds(step.grid)
        scale = p.stop_gradient(self.scale(step.grid))
        wide = self.functional.grids[step.grid].rule.wide
        grid = device_grid(p, p.stop_gradient(low), scale, bits, wide, step.high)
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
        if folds(weights):
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
        self.ranges[step.grid]["trained"] = self.arrays.ranges[step.grid]["trained"] + 1
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
        running = p.stop_gradient(self.constant(norm.variance))
        beta = self.optional(norm.bias)
        raw = compute(self.constant(weights.weight), bias)
        axis = self._channel_axis(step, len(raw.shape))
        others = [at for at in range(len(raw.shape)) if at != axis]
        mean = p.mean_of_replicas(p.mean(raw, others))
        deviations = p.square(raw - per_channel(p, mean, len(raw.shape), axis))
        variance = p.mean_of_replicas(p.mean(deviations, others))
        correction, shift = correction_and_shift(p, factor, beta, bias, running, mean, variance, norm.epsilon)
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
        return nudged(*self.bounds(name), self.functional.grids[name].bits)

    def _constant_numbers(
        self, step: PlanStep, position: int, grids: Mapping[str, tuple[np.float32, int]]
    ) -> tuple[np.ndarray, np.float32]:
        value = np.asarray(self.constant(step.operands[position]), np.float32)
        grid = self.plan.grid_of_constant(step, position)
        if grid:
            scale, zero_point = grids[grid]
            low, high = self.bounds(grid)
            bits = self.functional.grids[grid].bits
            stored = primitives_numpy.fake_quantize(value, low, high, bits, False)
            return codes_of(stored, scale, zero_point) - zero_point, scale
        low, high, rule = self.constant_bounds(step, position, value)
        bits = self.plan.grids[step.grid].constant_bits
        scale = np.float32(step_width((low, high), bits, rule.narrow_range))
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
        with np.errstate(divide="ignore", invalid="ignore"):
            grid = self.channel_grid(step, raw_scale)
        return weight_numbers(quantized, raw_scale, grid, weights.channel_axis, weights.rule.per_channel)


def attributes_of(step: PlanStep) -> dict[str, Any]:
    """What an operator computes by in real numbers: without the fused activation, and for any number of examples."""
    attributes = {name: value for name, value in step.attributes.items() if name != "activation"}
    if "new_shape" in attributes:
        follows = {step.batch_axis: -1}
        attributes["new_shape"] = tuple(follows.get(axis, size) for axis, size in enumerate(step.shape))
    return attributes


def _is_learned(grid: Grid, end: str) -> bool:
    return grid.trained and not (end == "minimum" and grid.nonnegative)


def weights_of(path: str) -> str:
    """The name of a weight's learned range; path: of the first step that has it."""
    return f"weights of {path}"


def _with_fixed_ends(grid: Grid) -> Grid:
    if grid.fixed is None:
        return grid
    return replace(
        grid, rule=replace(grid.rule, ranges="fixed", fixed_range=grid.fixed_range, activation_bits=grid.bits)
    )
