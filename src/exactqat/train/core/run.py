# SPDX-License-Identifier: Apache-2.0
"""One run of a network with pure functions: what steps compute, with numbers that come in and go out as `Arrays`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...device import OPERATORS
from ...planning.fitting import constant_limits
from ...planning.inputs import require_examples
from ...planning.plans import (
    BatchNorm,
    Derived,
    Grid,
    Numbers,
    PlanStep,
    WeightNumbers,
    Weights,
    require_data,
    require_finite,
)
from ...planning.rules import Rule
from . import primitives_numpy
from .accumulators import Accumulators
from .arrays import ENDS, Arrays, Mode, is_learned
from .primitives import FunctionalPrimitives, NumberPrimitives
from .ranges import (
    FOLLOWING,
    above_zero,
    below_zero,
    codes_of,
    grid_steps,
    learned_start,
    nudged,
    observed,
    rank_of_ends,
    usable,
    with_zero,
)
from .run_steps import RunStep, RunWeightedStep, RunWeightGrid
from .steps import folded_weight
from .weights import (
    constant_rule,
    extremes,
    factor_and_offset,
    folds,
    limited_magnitude,
    step_width,
    weight_numbers,
)

if TYPE_CHECKING:
    from .functional import Functional


class Run:
    """One run of a network, or of the numbers for it."""

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
        # NumPy's few, a `NumberPrimitives`, suffice if only integers are computed.
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
        """A parameter, a buffer or what is computed from them."""
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
                assert constant.data is not None, f"{name!r} is a tensor of the user's that was not given"
                value = np.asarray(constant.data, np.float32)
            in_numpy = self.primitives is primitives_numpy
            self.constants[name] = np.asarray(value) if in_numpy else self.as_array(value)
        return self.constants[name]

    def _computed(self, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """A function of arrays with NumPy's methods, which not all frameworks' arrays have by themselves."""
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
        return usable(self.primitives, *ends, self.functional.grids[grid].rule.is_int16)

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
        # Calibration refuses NaN, which the largest value does not reveal: XLA's maximum skips it on a CPU.
        if self.mode.observing:
            finite = p.amin(p.where(abs(x) < math.inf, 1.0, 0.0), tuple(range(len(x.shape))))
            finite = p.extremes_of_replicas(finite, finite)[0] > 0
        trees = [self.learned if is_learned(grid, end) else self.ranges for end in ENDS]
        before = [getattr(self.arrays, "learned" if tree is self.learned else "ranges")[name] for tree in trees]
        low, high = (p.stop_gradient(each[end]) for each, end in zip(before, ENDS, strict=True))
        count = self.arrays.ranges[name]["batches"]
        writers = self.functional.writers[name]
        *ends, batches = observed(p, rule.ranges, rule.ema_decay, shown, writers, (low, high), count, finite)
        for tree, end, value in zip(trees, ENDS, ends, strict=True):
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
        return learned_start(p, x, low, high, rule.activation_bits, rule.is_int16)

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
        weight, norm = self.constant(weights.weight), weights.batch_norm
        if norm is None or not folds(weights):
            return weight
        return folded_weight(self.primitives, weight, self.factor_and_offset(norm), weights.channel_axis)

    def quantized_weight(self, path: str, weights: Weights) -> tuple[Any, Any]:
        """The weight on its grid, and the step width for each output channel. path: of a step that has it."""
        grid, weight = RunWeightGrid(self, path, weights), self.stored_weight(weights)
        return grid(weight), grid.scale(weight)

    def factor_and_offset(self, norm: BatchNorm) -> tuple[Any, Any]:
        """Batch norm in inference as ``factor * x + offset``, both [channels]."""
        weight, bias = self.optional(norm.weight), self.optional(norm.bias)
        mean, variance = (self.primitives.stop_gradient(self.constant(name)) for name in (norm.mean, norm.variance))
        return factor_and_offset(self.primitives, weight, bias, mean, variance, norm.epsilon)

    # --- steps --------------------------------------------------------------------------------------------------------

    def forward(self, inputs: Sequence[Any], seen: dict[str, Any] | None = None) -> tuple[list[Any], Arrays]:
        values: dict[str, Any] = {}
        follows = self.mode.observing or (self.mode.training and not self.mode.frozen)
        for given, x in zip(self.plan.inputs, inputs, strict=True):
            if follows:
                require_examples(given, tuple(x.shape))
            values[given.path] = self.store(given.grid, x)
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
        return outputs, Arrays(self.tensors, self.learned, self.ranges)

    def _whole(
        self, inputs: dict[str, Any], ends: Any, step_by_step: Callable[[], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """What `step_by_step` returns for the network's outputs, with one host call; its gradients are those of
        `step_by_step`, whose values are then computed too. None if a framework does not support that."""
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
        """What the device computes from a step's operands, with the gradient of what is computed here.

        on_grid: paths of tensors that a device can hold: dropout in training leaves the grid, the next stored tensor is
        on one again.
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
        """The tensor that a step computes from earlier ones."""
        p = self.primitives
        features = [values[name] for name in step.operands if name in values]
        if step.expression is not None or not step.kind:
            if step.attributes.get("custom_gradient"):
                return self._with_custom_gradient(step, values)
            return self._only_in_training(number, step, features[0])
        if step.outside:
            return p.FUNCTIONS[step.kind](features[0], **step.attributes)
        return (RunStep if step.weights is None else RunWeightedStep)(self, step).compose(*features)

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

    def constant_operand(self, step: PlanStep, position: int) -> Any:
        """An operand that is not computed, on its grid."""
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
        """Its largest magnitude, whatever rules say about ranges: they concern what is stored.

        within_limits: as far as the operator accepts its scale, given those of the other operand and of the result.
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
            # All zero: the result's own scale, which is never too large for an operator.
            scale, _ = grids[step.grid]
        return np.rint(quantized / scale).astype(np.int64), scale

    def largest_weight_scale(self, step: PlanStep) -> float | None:
        """The largest scale of the channels that are not constant, if there are any."""
        with np.errstate(divide="ignore", invalid="ignore"):
            grid = RunWeightedStep(self, step).grid()
        alive = np.asarray(grid.weight_scale)[np.asarray(grid.factor) != 0]
        return float(alive.max()) if alive.size else None

    def _weight_numbers(self, step: PlanStep, weights: Weights) -> WeightNumbers:
        """A layer's weights on the device; a negative batch norm factor has flipped the signs of its channel."""
        norm = weights.batch_norm
        names = [weights.weight, weights.bias, *((norm.weight, norm.bias, norm.mean, norm.variance) if norm else ())]
        held = [self.constant(name) for name in names if name is not None]
        require_finite(f"the layer '{step.path}'", *map(np.asarray, held))
        layer = RunWeightedStep(self, step)
        stored = layer.stored_weight()
        quantized, raw_scale = layer.weight_quantizer(stored), layer.weight_quantizer.scale(stored)
        with np.errstate(divide="ignore", invalid="ignore"):
            grid = layer.grid(stored)
        return weight_numbers(quantized, raw_scale, grid, weights.channel_axis, weights.rule.per_channel)
