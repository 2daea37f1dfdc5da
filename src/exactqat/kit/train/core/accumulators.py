# SPDX-License-Identifier: Apache-2.0
"""A frozen network's layers with weights in a framework's own float32: the device's accumulators, integer for integer.

Training differentiates a single convolution: that of steps from real 0 with weight codes. float32 holds every sum below
2**24, so it gives the accumulators themselves; a kernel rounds them as the device's profile does, another computes the
gradient. NumPy computes the numbers for this once for the whole network, as it does for the device's files. What
float32 cannot hold is computed on the host, layer by layer (`DeviceStep`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...device import INT8_MAX, INT8_MIN, OPERATORS, profile_named
from ...planning.plans import PlanStep, Weights, require_finite
from .arrays import Arrays
from .integers import nudged_grids
from .on_device import DeviceSteps
from .primitives import Primitives
from .state import State
from .steps import WeightedStep
from .weights import per_channel

if TYPE_CHECKING:
    from .engine import Functional

# Below this, float32 holds every sum of whole numbers. A little less, as the bounds are themselves summed in float32.
EXACT = 2.0**24 * (1 - 2.0**-12)
# What `LayerNumbers` returns for a layer besides its vectors: those of the operator `rounded_sums_by_grid`, and the
# ends of the input's steps.
ROUNDED_BY = 6


class LayerNumbers:
    """The numbers for forming and rounding the accumulators of a frozen network's layers: a function of NumPy arrays,
    which programs call on the host. May be called from several threads.

    Attributes:
        steps: the layers that it serves, by path: those in eight bits whose weights are what is trained.
    """

    def __init__(self, functional: Functional, ends_of_weights: list[tuple[str, str]]) -> None:
        """ends_of_weights: names and ends of the learned ranges of weights."""
        self.functional = functional
        self.ends_of_weights = ends_of_weights
        self.steps = {step.path: step for step in functional.plan.steps if _serves(functional, step)}
        self._known: tuple[bytes, DeviceSteps] | None = None

    def source(self, run: State, ends: Any) -> tuple[list[Any], list[Any]]:
        """All its arguments, as a list of arrays, and arrays with the shapes of its results.

        ends: what `Functional.ends_of` returns, as one array.
        """
        p = run.primitives
        arrays = [ends, *(run.arrays.learned[name][end] for name, end in self.ends_of_weights)]
        likes: list[Any] = []
        for step in self.steps.values():
            weights = step.weights
            assert weights is not None
            outline = _outline(p, run.constant(weights.weight), weights.channel_axis)
            arrays += [outline, *(run.constant(name) for name in _vectors(weights))]
            largest = p.amax(outline, _others(outline, weights.channel_axis))
            likes += [p.stack([largest] * 3, 0), p.stack([p.reshape(ends, (-1,))[0]] * (ROUNDED_BY + 2), 0)]
        return arrays, likes

    def __call__(self, trained: Sequence[np.ndarray], features: Sequence[np.ndarray]) -> list[np.ndarray]:
        """For every layer, batch norm's factor, the weight's scale and the bias code, [3, channels]; and input scale,
        result scale, lowest and highest result, the ends between which gradients pass, and the input's ends, [8];
        float32.

        Raises:
            ValueError: a weight, bias or statistic is not finite.
        """
        rest = iter(trained)
        ends = next(rest)
        arrays = self.functional.with_ends(Arrays({}), ends)
        for name, end in self.ends_of_weights:
            arrays.learned.setdefault(name, {})[end] = next(rest)
        run = self.functional.in_numpy(arrays)
        device_steps, found = self._device_steps(run, ends), []
        for step in self.steps.values():
            weights = step.weights
            assert weights is not None
            own = {name: next(rest) for name in (weights.weight, *_vectors(weights))}
            require_finite(f"the layer '{step.path}'", *own.values())
            run.tensors.update(own)
            with np.errstate(divide="ignore", invalid="ignore"):
                grid = WeightedStep(run, step).grid()
            vectors = np.stack([np.asarray(each) for each in (grid.factor, grid.weight_scale, grid.bias_code)])
            found += [vectors.astype(np.float32), _rounded_by(device_steps, step)]
        return found

    def _device_steps(self, run: State, ends: np.ndarray) -> DeviceSteps:
        known = self._known
        if known is None or known[0] != ends.tobytes():
            grids = nudged_grids(run)
            assert self.functional.profile is not None
            known = (ends.tobytes(), DeviceSteps(self.functional.plan, grids, self.functional.profile))
            self._known = known
        return known[1]


def _rounded_by(steps: DeviceSteps, step: PlanStep) -> np.ndarray:
    (operand,) = (name for name in step.operands if steps.plan.is_stored(name))
    clamp, zero_point = steps.clamp(step.path), steps.zero_point(operand)
    ends = (clamp.lowest, clamp.highest, clamp.low, clamp.high, INT8_MIN - zero_point, INT8_MAX - zero_point)
    return np.array([steps.placement(operand).scale[0], clamp.scale, *ends], np.float32)


def _serves(functional: Functional, step: PlanStep) -> bool:
    weights, plan = step.weights, functional.plan
    if weights is None or not step.kind or step.outside or step.expression is not None:
        return False
    computed = [name for name in step.operands if plan.is_stored(name)]
    names = (weights.weight, *_vectors(weights))
    made = any(name not in functional.moved for name in names)
    bits = [weights.rule.weight_bits, *(_bits(functional, path) for path in (step.path, *computed))]
    return len(computed) == 1 and not made and max(bits) <= 8


def moved_constants(functional: Functional, tensors: Mapping[str, np.ndarray]) -> frozenset[str]:
    """Names of the layers' constants that are the user's arrays, perhaps with their values in other places: a compiled
    program computes these without rounding; for anything else its rounding may differ from NumPy's.

    tensors: the user's arrays; only their shapes matter.
    """
    random = np.random.default_rng(0)
    given = {name: random.standard_normal(np.shape(each)).astype(np.float32) for name, each in tensors.items()}
    run = functional.in_numpy(Arrays(given), frozen=False)
    found = set()
    for step in functional.plan.steps:
        for name in () if step.weights is None else (step.weights.weight, *_vectors(step.weights)):
            constant = functional.plan.constants.get(name)
            sources = [name] if constant is None or constant.parameter else _sources(functional, name)
            if name in found or any(source not in given for source in sources) or not sources:
                continue
            of_sources = np.concatenate([given[source].ravel() for source in sources])
            if _same_values(np.asarray(run.constant(name), np.float32).ravel(), of_sources):
                found.add(name)
    return frozenset(found)


def _sources(functional: Functional, name: str) -> list[str]:
    """Names of the user's arrays that a constant is made from."""
    constant = functional.plan.constants.get(name)
    if constant is None or constant.parameter:
        return [name if constant is None else constant.name]
    operands = getattr(constant.expression, "operands", constant.sources)
    return [source for operand in operands for source in _sources(functional, operand)]


def _same_values(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two vectors hold the same values, in any order; by sums of their bits."""
    sums = []
    for each in (first, second):
        bits = np.ascontiguousarray(each).view(np.uint32).astype(np.uint64)
        sums.append((bits.size, int(bits.sum()), int((bits * bits).sum())))
    return sums[0] == sums[1]


def _bits(functional: Functional, path: str) -> int:
    """The bits of what a step stores or passes on."""
    stored = functional.plan.stored(path)
    if stored.grid:
        return functional.grids[stored.grid].bits
    assert isinstance(stored, PlanStep)
    return _bits(functional, stored.operands[0])


def _vectors(weights: Weights) -> list[str]:
    """Names of a layer's constants with one number for each output channel."""
    norm = weights.batch_norm
    names = [weights.bias, *((norm.weight, norm.bias, norm.mean, norm.variance) if norm else ())]
    return [name for name in names if name]


def _others(weight: Any, channel_axis: int) -> tuple[int, ...]:
    rank = len(weight.shape)
    return tuple(axis for axis in range(rank) if axis != channel_axis % rank)


def _outline(p: Primitives, weight: Any, channel_axis: int) -> Any:
    """A weight of the same rank with only the smallest and the largest value of each output channel: it has the same
    ranges."""
    others, weight = _others(weight, channel_axis), p.stop_gradient(weight)
    rank = len(weight.shape)
    axis = channel_axis % rank
    shape = [1] * rank
    shape[axis], shape[0 if axis else 1] = weight.shape[axis], 2
    return p.reshape(p.stack([p.amin(weight, others), p.amax(weight, others)], 0 if axis else 1), shape)


class Accumulators:
    """The layers of one run.

    Attributes:
        of: what `LayerNumbers` returns, by path.
    """

    def __init__(self, run: State, ends: Any) -> None:
        """ends: what `Functional.ends_of` returns, as one array."""
        self.run, self.ends = run, ends
        numbers = run.functional.layer_numbers()
        arrays, likes = numbers.source(run, ends)
        made = run.primitives.numbers_on_host(numbers, likes, arrays) if likes else []
        self.of = dict(zip(numbers.steps, zip(made[::2], made[1::2], strict=True), strict=True))
        # Whole numbers by path, and by path what makes examples with a NaN all NaN.
        self._steps: dict[str, Any] = {}
        self._broken: dict[str, Any] = {}

    def look_for_nan(self, path: str, x: Any) -> None:
        """NaN has no step: an example with one in this input gets NaN for all its results.

        x: float32, as the user gave it.
        """
        p, stored = self.run.primitives, self.run.plan.stored(path)
        axis, rank = stored.batch_axis, len(stored.shape)
        x = p.stop_gradient(x)
        others = [at for at in range(rank) if at != axis]
        found = p.where(x == x, 0.0, 1.0)
        found = p.amax(found, others) if others else found
        if stored.shape[axis] != 1:
            found = p.amax(p.reshape(found, (-1, stored.shape[axis])), (1,))
        self._broken[path] = found

    def spread(self, step: PlanStep) -> None:
        """Whatever is computed from an example with NaN is NaN too."""
        found = [self._broken[name] for name in step.operands if name in self._broken]
        for each in found:
            known = self._broken.get(step.path)
            self._broken[step.path] = each if known is None else self.run.primitives.maximum(known, each)

    def layer(self, step: PlanStep, values: Mapping[str, Any]) -> Any:
        """The stored tensor in real numbers, float32, with the gradient of the layer."""
        run, p, weights = self.run, self.run.primitives, step.weights
        assert weights is not None and run.functional.profile is not None
        (name,) = (each for each in step.operands if each in values)
        vectors, numbers = self.of[step.path]
        factor, scale, bias_code = (vectors[number] for number in range(3))
        layer, x = WeightedStep(run, step), self._steps_of(name, values[name], numbers[0])
        stored = layer.stored_weight()
        weight, own = layer.weight_quantizer(stored), layer.grid(stored)
        # One product: the folded weight in steps of its own.
        multiplier = p.straight_through(factor, own.factor) / scale
        steps = weight * per_channel(p, multiplier, len(weight.shape), layer.weight_axis)
        codes = p.straight_through(p.round(p.stop_gradient(steps)), steps)
        sums = layer.compute(x, codes, p.straight_through(bias_code, own.bias / (scale * numbers[0])))
        axis, rank = layer.channel_axis % len(sums.shape), len(sums.shape)
        profile = profile_named(run.functional.profile)
        rounding = OPERATORS[step.kind].rounding(profile)  # type: ignore[attr-defined]

        def on_host() -> Any:
            source = run.functional.numbers_source([step], run.arrays, self.ends)
            features = [p.stop_gradient(x) * numbers[0]]
            made = p.on_host(run.functional.device_step(step), p.stop_gradient(sums), source, features)
            return p.moveaxis(p.round(made / numbers[1]), axis, rank - 1)

        exact = _fits(p, p.stop_gradient(codes), bias_code, layer.weight_axis, numbers)
        dense = p.moveaxis(sums, axis, rank - 1)
        rounded = p.rounded_sums(dense, scale, numbers[:ROUNDED_BY], rounding, exact, on_host)
        self._steps[step.path] = p.moveaxis(rounded, rank - 1, axis)
        return self._real(step, self._steps[step.path] * numbers[1])

    def _real(self, step: PlanStep, values: Any) -> Any:
        """With NaN everywhere in a broken example, so that its gradients are NaN too."""
        p, rank = self.run.primitives, len(values.shape)
        if step.path not in self._broken:
            return values
        rows, axis = step.shape[step.batch_axis], step.batch_axis
        broken = self._broken[step.path]
        if rows != 1:
            broken = p.reshape(p.stack([broken] * rows, 1), (-1,))
        return values * per_channel(p, p.where(broken > 0, math.nan, 1.0), rank, axis)

    def _steps_of(self, path: str, values: Any, scale: Any) -> Any:
        """Steps from real 0 of a tensor on its grid, zeros for NaN."""
        if path not in self._steps:
            p = self.run.primitives
            steps = p.where(values == values, values, p.zeros_like(values)) / scale
            self._steps[path] = p.straight_through(p.round(p.stop_gradient(steps)), steps)
        return self._steps[path]


def _fits(p: Primitives, codes: Any, bias: Any, channel_axis: int, numbers: Any) -> Any:
    """Whether float32 holds every sum of any of a layer's products, with its bias; bool, rank 0. False for NaN.

    Such sums stay between the sum of the negative products and that of the positive ones.
    """
    others = _others(codes, channel_axis)
    above, below = (p.sum(p.maximum(each, 0.0), others) for each in (codes, -codes))
    lowest, highest = numbers[ROUNDED_BY], numbers[ROUNDED_BY + 1]
    reach = p.maximum(above * highest - below * lowest, below * highest - above * lowest) + p.abs(bias)
    return p.amax(reach, (0,)) < EXACT
