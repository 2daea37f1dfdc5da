# SPDX-License-Identifier: Apache-2.0
"""The steps of a run with pure functions: `steps`, with the numbers of a `Run`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...planning.plans import BatchNorm, PlanStep, Weights
from .arrays import weights_of
from .steps import Step, WeightedStep
from .weights import folds, per_channel, step_width, weight_ends

if TYPE_CHECKING:
    from .run import Run


class RunGrid:
    """A `StoredGrid` of a run."""

    def __init__(self, run: Run, name: str) -> None:
        grid = run.functional.grids[name]
        self.run, self.name = run, name
        self.rule, self.bits, self.quantizing = grid.rule, grid.bits, run.mode.quantizing

    def __call__(self, x: Any, /) -> Any:
        return self.run.store(self.name, x)

    def ends(self) -> tuple[Any, Any]:
        return self.run.bounds(self.name)


class RunWeightGrid:
    """A `WeightGrid` of a run."""

    def __init__(self, run: Run, path: str, weights: Weights) -> None:
        p, self.run, self.rule, self.channel_axis = run.primitives, run, weights.rule, weights.channel_axis
        learned = run.learned.get(weights_of(run.functional.weight_owner[path]))
        if learned is not None and run.mode.frozen:
            learned = {end: p.stop_gradient(value) for end, value in learned.items()}
        self.learned = learned

    def __call__(self, weight: Any, /) -> Any:
        if not self.run.mode.quantizing:
            return weight
        p, rule = self.run.primitives, self.rule
        channels_last = p.moveaxis(weight, self.channel_axis, -1)
        low, high = weight_ends(p, rule, channels_last, self.learned)
        quantized = p.fake_quantize(channels_last, low, high, rule.weight_bits, rule.narrow_range)
        return p.moveaxis(quantized, -1, self.channel_axis)

    def scale(self, weight: Any, /) -> Any:
        p, rule = self.run.primitives, self.rule
        ends = weight_ends(p, rule, p.moveaxis(weight, self.channel_axis, -1), self.learned)
        width = step_width(ends, rule.weight_bits, rule.narrow_range)
        return width * p.array(np.ones(weight.shape[self.channel_axis], np.float32), weight)


class RunNormalization:
    """A `Normalization` of a run."""

    def __init__(self, run: Run, step: PlanStep, norm: BatchNorm) -> None:
        self.run, self.step, self.norm, self.epsilon = run, step, norm, norm.epsilon
        self.training = run.mode.training and norm.training and not run.mode.frozen

    def __call__(self, x: Any, channel_axis: int, /) -> Any:
        run, norm, p = self.run, self.norm, self.run.primitives
        rank = len(x.shape)
        axis = channel_axis % rank
        if not self.training:
            factor, offset = (per_channel(p, vector, rank, axis) for vector in self.factor_and_offset())
            return x * factor + offset
        grid = self.step.grid
        run.ranges[grid]["trained"] = run.arrays.ranges[grid]["trained"] + 1
        mean, variance = (p.stop_gradient(run.constant(name)) for name in (norm.mean, norm.variance))
        weight, bias = run.optional(norm.weight), run.optional(norm.bias)
        weight = p.ones_like(mean) if weight is None else weight
        bias = p.zeros_like(mean) if bias is None else bias
        share, counted = norm.momentum, None
        if norm.counter:
            count = run.tensors[norm.counter] + 1
            run.tensors[norm.counter] = count
            if share is None:
                counted = 1.0 / count
            elif norm.debiased:
                counted = share / (1.0 - (1.0 - share) ** p.to_float(count))
        # A share that follows the count is not a number the operator can take: it returns the batch's own statistics.
        share = share if counted is None else 1.0
        y, new_mean, new = p.batch_norm(x, weight, bias, mean, variance, norm.epsilon, share, axis)
        if norm.biased and share is not None:
            rows = math.prod(size for at, size in enumerate(x.shape) if at != axis) * p.count_of_replicas()
            kept = variance * (1.0 - share)
            new = kept + (new - kept) * ((rows - 1) / rows if rows > 1 else 1.0)
        if counted is not None:
            new_mean, new = mean + (new_mean - mean) * counted, variance + (new - variance) * counted
        run.tensors[norm.mean], run.tensors[norm.variance] = new_mean, new
        return y

    def factor_and_offset(self) -> tuple[Any, Any]:
        return self.run.factor_and_offset(self.norm)

    def beta_and_variance(self) -> tuple[Any, Any]:
        return self.run.optional(self.norm.bias), self.run.primitives.stop_gradient(
            self.run.constant(self.norm.variance)
        )

    def stored(self, x: Any, activation: str, grid: Any, channel_axis: int, /) -> Any:
        return None


class RunStep(Step):
    """A step in a run."""

    def __init__(self, run: Run, step: PlanStep) -> None:
        grid_of = run.functional.grid_of
        self.primitives, self.kind, self.attributes = run.primitives, step.kind, attributes_of(step)
        self.activation, self.bounds, self.high = step.activation, step.bounds, step.high
        self.frozen = run.mode.frozen and run.mode.quantizing
        self.output_quantizer = RunGrid(run, step.grid)
        self.source = RunGrid(run, next(grid_of[name] for name in step.operands if name in grid_of))
        constants = [position for position, name in enumerate(step.operands) if name not in grid_of]
        self.constants = {position: partial(run.constant_operand, step, position) for position in constants}


class RunWeightedStep(WeightedStep, RunStep):
    """A step with weights in a run."""

    def __init__(self, run: Run, step: PlanStep) -> None:
        super().__init__(run, step)
        weights = step.weights
        assert weights is not None
        norm, self.folded = weights.batch_norm, folds(weights)
        self.weight_source = partial(run.constant, weights.weight)
        self.bias_source = partial(run.constant, weights.bias) if weights.bias else None
        self.weight_quantizer = RunWeightGrid(run, step.path, weights)
        self.batch_norm = None if norm is None else RunNormalization(run, step, norm)
        self.functional_primitives = run.primitives

    def statistics(self, raw: Any, axes: Sequence[int]) -> tuple[Any, Any]:
        p, rank = self.functional_primitives, len(raw.shape)
        mean = p.mean_of_replicas(p.mean(raw, axes))
        deviations = p.square(raw - per_channel(p, mean, rank, self.channel_axis % rank))
        return mean, p.mean_of_replicas(p.mean(deviations, axes))


def attributes_of(step: PlanStep) -> dict[str, Any]:
    """The attributes an operator computes with in real numbers: without the fused activation, and for any number of
    examples."""
    attributes = {name: value for name, value in step.attributes.items() if name != "activation"}
    if "new_shape" in attributes:
        follows = {step.batch_axis: -1}
        attributes["new_shape"] = tuple(follows.get(axis, size) for axis, size in enumerate(step.shape))
    return attributes
