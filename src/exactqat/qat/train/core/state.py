# SPDX-License-Identifier: Apache-2.0
"""The numbers of a network while it runs: the user's tensors, the grids with their ranges, batch norms' statistics.

A `State` reads and moves the arrays of one run of pure functions. PyTorch's is bound to modules and stays
(`train.torch.state`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import numpy as np

from ....kit.planning.fitting import constant_limits, constant_step
from ....kit.planning.plans import BatchNorm, Derived, PlanStep, Weights
from . import primitives_numpy
from .arrays import ENDS, Arrays, Mode, weights_of
from .primitives import Array, Ends, FunctionalPrimitives, NumberPrimitives
from .ranges import (
    FOLLOWING,
    above_zero,
    below_zero,
    grid_steps,
    learned_start,
    nudged,
    observed,
    rank_of_ends,
    usable,
    with_zero,
)
from .training_plan import TrainingPlan
from .weights import (
    NormArrays,
    constant_rule,
    extremes,
    factor_and_offset,
    folded_weight,
    folds,
    per_channel,
    step_width,
    weight_ends,
)


class StoredGrid:
    """A grid with its current range. Calling it with a tensor shows the tensor to the range, and quantizes it.

    Attributes:
        rule, bits: of the tensors on it.
        indices: integers pass unchanged.
    """

    def __init__(self, state: State, name: str) -> None:
        grid = state.functional.grids[name]
        self.state, self.name, self.declared = state, name, grid
        self.rule, self.bits, self.indices = grid.rule, grid.bits, bool(grid.indices)
        self.writers = state.functional.writers[name]

    @property
    def quantizing(self) -> bool:
        """Off for the float network."""
        return self.state.mode.quantizing

    @property
    def observes(self) -> bool:
        """Whether the next tensor moves the range."""
        mode = self.state.mode
        follows = mode.training and mode.quantizing and not mode.frozen
        return mode.observing or (follows and self.rule.ranges in FOLLOWING)

    def __call__(self, x: Array, /) -> Array:
        if self.observes:
            self.observe(x)
        return self.quantize(x) if self.state.mode.quantizing and not self.indices else x

    def quantize(self, x: Array) -> Array:
        """The values on the current grid."""
        low, high = self.ends()
        return self.state.primitives.fake_quantize(x, low, high, self.bits, False)

    def end(self, end: str) -> Array:
        """One end, which training may have moved beyond zero."""
        state, p = self.state, self.state.primitives
        if end not in state.learned.get(self.name, {}):
            return p.stop_gradient(state.ranges[self.name][end])
        value = state.learned[self.name][end]
        value = p.stop_gradient(value) if state.mode.frozen else value
        return below_zero(p, value) if end == "minimum" else above_zero(p, value)

    def ends(self) -> Ends:
        """(min, max) as fake quantization takes them, rank 0: wide enough to have a scale."""
        return usable(self.state.primitives, self.end("minimum"), self.end("maximum"), self.rule.is_int16)

    def scale(self) -> Array:
        """The width of one step, rank 0."""
        return step_width(self.ends(), self.bits, False)

    def so_far(self) -> tuple[Array, Array]:
        """The width of a step, without gradients, and whether the range has seen data, without which it means
        nothing."""
        known = self.state.mode.frozen or self.rule.ranges == "fixed"
        seen = True if known else self.state.ranges[self.name]["batches"] > 0
        ends = usable(self.state.primitives, self.end("minimum"), self.end("maximum"), self.rule.is_int16)
        return self.state.primitives.stop_gradient(step_width(ends, self.bits, False)), seen

    def scale_and_zero_point(self) -> tuple[np.float32, int]:
        """The nudged grid: real = scale * (code - zero_point), codes 0..2**bits - 1, in TensorFlow's float32 steps."""
        return nudged(*self.ends(), self.bits)

    def observe(self, x: Array) -> None:
        """Takes a stored tensor into account; see `observed`."""
        p = self.state.primitives
        if self.rule.ranges == "fixed":
            return
        low, high = p.extremes_of_replicas(*self.asked(p.stop_gradient(x)))
        finite = None
        # Calibration refuses NaN, which the largest value does not reveal: XLA's maximum skips it on a CPU.
        if self.state.mode.observing:
            finite = p.amin(p.where(abs(x) < math.inf, 1.0, 0.0), tuple(range(len(x.shape))))
            finite = p.extremes_of_replicas(finite, finite)[0] > 0
        self.take(low, high, finite)

    def take(self, low: Array, high: Array, finite: Array = None) -> None:
        """Moves the range by what one tensor asks for: low <= 0 <= high."""
        state, rule, p, name = self.state, self.rule, self.state.primitives, self.name
        shown = state.shown.setdefault(name, [])
        shown.append((low, high))
        before = tuple(p.stop_gradient(state.arrays.end(name, end)) for end in ENDS)
        batches = state.arrays.ranges[name]["batches"]
        moved = observed(p, rule.ranges, rule.ema_decay, shown, self.writers, before, batches, finite)
        if len(shown) == self.writers:
            del state.shown[name]
        self.keep(moved)

    def keep(self, moved: Sequence[Array]) -> None:
        """From here on the range has this minimum, maximum and number of batches."""
        for end, value in zip((*ENDS, "batches"), moved, strict=True):
            self.state.after.holder(self.name, end)[end] = value

    def asked(self, x: Array) -> Ends:
        """What one tensor of one batch asks for: low <= 0 <= high."""
        p, nonnegative = self.state.primitives, self.declared.nonnegative
        low, high = with_zero(p, *self.extremes(x), nonnegative)
        if self.rule.ranges != "learned":
            return low, high
        return learned_start(p, x, low, high, self.bits, self.rule.is_int16)

    def extremes(self, x: Array) -> Ends:
        """The smallest and the largest value; under "percentile" without those beyond it."""
        p, axes = self.state.primitives, tuple(range(len(x.shape)))
        if self.rule.ranges == "percentile":
            values = p.sorted_values(x)
            size = int(values.shape[0])
            rank = rank_of_ends(self.rule.percentile, size)
            return values[rank - 1], values[size - rank]
        high = p.amax(x, axes)
        return (high if self.declared.nonnegative else p.amin(x, axes)), high


class WeightGrid:
    """The grid of a weight, with one scale per output channel (or a single one, by the rule). Calling it with the
    weight quantizes it.

    Attributes:
        channel_axis: the weight's axis of output channels.
    """

    def __init__(self, state: State, path: str, weights: Weights) -> None:
        """path: of the first step that has the weight."""
        self.state, self.rule, self.channel_axis = state, weights.rule, weights.channel_axis
        self.owner = weights_of(path)

    def learned(self) -> Array:
        """The learned ends; None if the range is the weight's largest magnitude."""
        learned = self.state.learned.get(self.owner)
        if learned is not None and self.state.mode.frozen:
            return {end: self.state.primitives.stop_gradient(value) for end, value in learned.items()}
        return learned

    def __call__(self, weight: Array, /) -> Array:
        if not self.state.mode.quantizing:
            return weight
        p, rule = self.state.primitives, self.rule
        channels_last = p.moveaxis(weight, self.channel_axis, -1)
        low, high = weight_ends(p, rule, channels_last, self.learned())
        quantized = p.fake_quantize(channels_last, low, high, rule.weight_bits, rule.narrow_range)
        return p.moveaxis(quantized, -1, self.channel_axis)

    def scale(self, weight: Array, /) -> Array:
        """The step width for every output channel, [channels]; 0 for a channel whose range is zero."""
        ones = np.ones(weight.shape[self.channel_axis], np.float32)
        return self._width(weight) * self.state.primitives.array(ones, weight)

    def _width(self, weight: Array) -> Array:
        """The step width, [channels] or rank 0."""
        p, rule = self.state.primitives, self.rule
        ends = weight_ends(p, rule, p.moveaxis(weight, self.channel_axis, -1), self.learned())
        return step_width(ends, rule.weight_bits, rule.narrow_range)


class Normalization:
    """A step's batch norm. Calling it with a tensor and its channel axis normalizes; in training with the batch's
    statistics, which move the running ones."""

    def __init__(self, state: State, step: PlanStep, norm: BatchNorm) -> None:
        self.state, self.step, self.norm = state, step, norm

    @property
    def epsilon(self) -> float:
        """Added to the variance."""
        return self.norm.epsilon

    @property
    def training(self) -> bool:
        """Whether it uses the batch's statistics."""
        mode = self.state.mode
        return mode.training and self.norm.training and not mode.frozen

    def __call__(self, x: Array, channel_axis: int, /) -> Array:
        state, norm, p = self.state, self.norm, self.state.primitives
        rank = len(x.shape)
        axis = channel_axis % rank
        if not self.training:
            factor, offset = (per_channel(p, vector, rank, axis) for vector in self.factor_and_offset())
            return x * factor + offset
        grid = self.step.grid
        state.ranges[grid]["trained"] = state.arrays.ranges[grid]["trained"] + 1
        mean, variance = (p.stop_gradient(state.constant(name)) for name in (norm.mean, norm.variance))
        weight, bias = state.optional(norm.weight), state.optional(norm.bias)
        weight = p.ones_like(mean) if weight is None else weight
        bias = p.zeros_like(mean) if bias is None else bias
        share, counted = norm.momentum, None
        if norm.counter:
            count = state.tensors[norm.counter] + 1
            state.tensors[norm.counter] = count
            if share is None:
                counted = 1.0 / count
        # A share that follows the count is not a number the operator can take: it returns the batch's own statistics.
        share = share if counted is None else 1.0
        y, new_mean, new = p.batch_norm(x, weight, bias, mean, variance, norm.epsilon, share, axis)
        if norm.biased and share is not None:
            rows = math.prod(size for at, size in enumerate(x.shape) if at != axis) * p.count_of_replicas()
            kept = variance * (1.0 - share)
            new = kept + (new - kept) * ((rows - 1) / rows if rows > 1 else 1.0)
        if counted is not None:
            new_mean, new = mean + (new_mean - mean) * counted, variance + (new - variance) * counted
        state.tensors[norm.mean], state.tensors[norm.variance] = new_mean, new
        return y

    def factor_and_offset(self) -> tuple[Array, Array]:
        """Batch norm in evaluation as ``factor * x + offset``, both [channels]."""
        return factor_and_offset(self.state.primitives, *self.in_evaluation())

    def in_evaluation(self) -> NormArrays:
        """What its evaluation computes with."""
        return self.state.norm_in_evaluation(self.norm)

    def stored(self, x: Array, activation: str, grid: Array, channel_axis: int, /) -> Array:
        """Batch norm in training, the activation and the grid in one operator: the same bits as one by one. None if
        there is no such operator."""
        return None


class ConstantOperand:
    """An operand that is not computed, on its grid when it is called.

    Its range is its largest magnitude, whatever rules say about ranges: they concern what is stored.

    Attributes:
        shared: the grid of a tensor that it is stored on; None: it has a grid of its own, of `bits`.
    """

    def __init__(self, state: State, step: PlanStep, position: int) -> None:
        self.state, self.source = state, state.source(step.operands[position])
        shared = state.plan.grid_of_constant(step, position)
        self.shared = state.grid(shared) if shared else None
        grid = state.plan.grids[step.grid]
        self.rule, self.bits = constant_rule(grid.rule), grid.constant_bits
        self._limited = None if shared else constant_limits(state.plan, step, position)
        if self._limited is not None:
            self._others = state.grid(self._limited[1]), state.grid(step.grid)

    def __call__(self) -> Array:
        value = self.source()
        if self.shared is not None:
            return self.shared(value)
        if not self.state.mode.quantizing:
            return value
        return self.state.primitives.fake_quantize(value, *self.bounds(value), self.bits, self.rule.narrow_range)

    def bounds(self, value: Array, within_limits: bool = True) -> Ends:
        """Its range. within_limits: as far as the operator accepts its scale, given those of the other operand and of
        the result."""
        p = self.state.primitives
        low, high = extremes(p, self.rule, p.stop_gradient(value))
        if self._limited is None or not (within_limits and self.rule.symmetric):
            return low, high
        (other, other_seen), (result, result_seen) = (grid.so_far() for grid in self._others)
        steps = grid_steps(self.bits, self.rule.narrow_range)
        least, most = constant_step(self._limited[0], other, result)
        limited = p.minimum(p.maximum(high, least * (steps / 2)), most * (steps / 2))
        seen = other_seen & result_seen
        high = limited if seen is True else p.where(seen, limited, high)
        return -high, high


class State:
    """The arrays of one run, and what steps read and move of them.

    Attributes:
        norms: batch norms by the paths of their steps.
    """

    stored_grid: type[StoredGrid] = StoredGrid
    grid_of_weight: type[WeightGrid] = WeightGrid
    norm_of_step: type[Normalization] = Normalization

    def __init__(
        self, functional: TrainingPlan, arrays: Arrays, mode: Mode, primitives: NumberPrimitives | None = None
    ) -> None:
        """primitives: others than `functional`'s. NumPy's few suffice if only integers are computed."""
        self.functional = functional
        self.plan = functional.plan
        self.primitives = cast(FunctionalPrimitives, functional.primitives if primitives is None else primitives)
        self.arrays = arrays
        self.mode = mode
        self.after = arrays.map(lambda array: array)
        self.tensors, self.learned, self.ranges = self.after.tensors, self.after.learned, self.after.ranges
        self.shown: dict[str, list[tuple[Array, Array]]] = {}
        self.constants: dict[str, Array] = {}
        self._grids: dict[str, Array] = {}
        self._weight_grids: dict[str, Array] = {}
        self.norms: dict[str, Array] = {}

    def grid(self, name: str) -> Array:
        """The grid of that name, a `StoredGrid`."""
        if name not in self._grids:
            self._grids[name] = self.stored_grid(self, name)
        return self._grids[name]

    def weight_grid(self, path: str, weights: Weights) -> Array:
        """The grid of a step's weight, a `WeightGrid`; steps with the same weight share one."""
        owner = self.functional.weight_owner[path]
        if owner not in self._weight_grids:
            self._weight_grids[owner] = self.grid_of_weight(self, owner, weights)
        return self._weight_grids[owner]

    def normalization(self, step: PlanStep, norm: BatchNorm) -> Array:
        """A step's batch norm, a `Normalization`."""
        if step.path not in self.norms:
            self.norms[step.path] = self.norm_of_step(self, step, norm)
        return self.norms[step.path]

    # --- constants ----------------------------------------------------------------------------------------------------

    def source(self, name: str) -> Callable[[], Array]:
        """What returns a constant at its current value."""
        return partial(self.constant, name)

    def constant(self, name: str) -> Array:
        """A parameter, a buffer or what is computed from them."""
        if name in self.tensors:
            return self.tensors[name]
        constant = self.plan.constants[name]
        if name not in self.constants:
            if isinstance(constant.expression, Derived):
                operands, function = map(self.constant, constant.expression.operands), constant.expression.function
                # NumPy's methods, which not all frameworks' arrays have by themselves.
                wrapped = getattr(self.primitives, "WithMethods", None)
                value = function(*operands) if wrapped is None else function(*map(wrapped, operands)).tensor
            elif constant.expression is not None:
                value = constant.expression(*(self.tensors[path] for path in constant.sources))
            else:
                assert constant.data is not None, f"{name!r} is a tensor of the user's that was not given"
                value = np.asarray(constant.data, np.float32)
            if self.primitives is primitives_numpy:
                value = np.asarray(value)
            elif isinstance(value, np.ndarray):
                value = self.primitives.from_numpy(value)
            self.constants[name] = value
        return self.constants[name]

    def optional(self, name: str | None) -> Array:
        return None if not name else self.constant(name)

    # --- weights ------------------------------------------------------------------------------------------------------

    def stored_weight(self, weights: Weights) -> Array:
        """What is quantized: the weight, under `Rule.fold_batch_norm` times batch norm's factor."""
        weight, norm = self.constant(weights.weight), weights.batch_norm
        if norm is None or not folds(weights):
            return weight
        return folded_weight(self.primitives, weight, self.factor_and_offset(norm)[0], weights.channel_axis)

    def factor_and_offset(self, norm: BatchNorm) -> tuple[Array, Array]:
        """Batch norm in inference as ``factor * x + offset``, both [channels]."""
        return factor_and_offset(self.primitives, *self.norm_in_evaluation(norm))

    def norm_in_evaluation(self, norm: BatchNorm) -> NormArrays:
        """What batch norm computes with in inference."""
        weight, bias = self.optional(norm.weight), self.optional(norm.bias)
        mean, variance = (self.primitives.stop_gradient(self.constant(name)) for name in (norm.mean, norm.variance))
        return NormArrays(weight, bias, mean, variance, self.functional.epsilons.get(norm.mean, norm.epsilon))

    def statistics(self, raw: Array, axes: Sequence[int], channel_axis: int) -> tuple[Array, Array]:
        """Mean and biased variance of each channel of a batch, over `axes` and all of its replicas."""
        p, rank = self.primitives, len(raw.shape)
        mean = p.mean_of_replicas(p.mean(raw, axes))
        deviations = p.square(raw - per_channel(p, mean, rank, channel_axis % rank))
        return mean, p.mean_of_replicas(p.mean(deviations, axes))


def in_numpy(functional: TrainingPlan, arrays: Arrays, frozen: bool = True) -> State:
    """What integers are computed from. arrays: in NumPy."""
    return State(functional, arrays, Mode(frozen=frozen), primitives_numpy)
