# SPDX-License-Identifier: Apache-2.0
"""A frozen network's layers with weights in a framework's own float32: the device's accumulators, integer for integer.

Training differentiates a single convolution: that of steps from real 0 with weight codes. float32 holds every sum below
2**24, so it gives the accumulators themselves; a kernel rounds them as the device's profile does, another computes the
gradient. NumPy computes the numbers for this once for the whole network, as it does for the device's files. What
float32 cannot hold is computed on the host, layer by layer (`DeviceStep`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ....kit.device import profile_named
from ....kit.planning.plans import PlanStep, Weights, require_finite
from .arrays import Arrays
from .integers import nudged_grids
from .on_device import ROUNDED_BY, DeviceSteps, bits_of
from .primitives import Array, Primitives
from .state import State, in_numpy
from .steps import WeightedStep
from .training_plan import TrainingPlan
from .weights import ChannelGrid, per_channel

# Below this, float32 holds every sum of whole numbers. A little less, as the bounds are themselves summed in float32.
EXACT = 2.0**24 * (1 - 2.0**-12)


class LayerNumbers:
    """The numbers for forming and rounding the accumulators of a frozen network's layers: a function of NumPy arrays,
    which programs call on the host. May be called from several threads.

    Attributes:
        steps: the layers that it serves, by path: those in eight bits whose weights are what is trained.
    """

    def __init__(self, functional: TrainingPlan) -> None:
        self.functional = functional
        self.steps = {step.path: step for step in functional.plan.steps if _serves(functional, step)}
        self._known: tuple[bytes, DeviceSteps] | None = None

    def source(self, run: State, ends: Array) -> tuple[list[Array], list[Array]]:
        """All its arguments, as a list of arrays, and arrays with the shapes of its results.

        ends: what `TrainingPlan.ends_of` returns, as one array.
        """
        p = run.primitives
        arrays = self.functional.all_ends(self.functional.plan.steps, run.arrays, ends)
        likes: list[Array] = []
        for step in self.steps.values():
            weights = step.weights
            assert weights is not None
            outline = _outline(p, run.constant(weights.weight), weights.channel_axis)
            arrays += [outline, *(run.constant(name) for name in _vectors(weights))]
            largest = p.amax(outline, _others(outline, weights.channel_axis))
            likes += [p.stack([largest] * 3, 0), p.stack([p.reshape(ends, (-1,))[0]] * (ROUNDED_BY + 2), 0)]
        return arrays, likes

    def __call__(self, trained: Sequence[np.ndarray], features: Sequence[np.ndarray]) -> list[np.ndarray]:
        """For every layer, batch norm's factor, the weight's scale and the bias code, [3, channels], float32; and what
        `DeviceSteps.rounded_by` returns.

        Raises:
            ValueError: a weight, bias or statistic is not finite.
        """
        rest = iter(trained)
        run = in_numpy(self.functional, self.functional.with_ends(self.functional.plan.steps, rest))
        device_steps, numbers = self._device_steps(run, trained[0]), list[np.ndarray]()
        for step in self.steps.values():
            weights = step.weights
            assert weights is not None
            own = {name: next(rest) for name in (weights.weight, *_vectors(weights))}
            require_finite(f"the layer '{step.path}'", *own.values())
            run.tensors.update(own)
            with np.errstate(divide="ignore", invalid="ignore"):
                grid = WeightedStep(run, step).grid()
            vectors = np.stack([np.asarray(vector) for vector in (grid.factor, grid.weight_scale, grid.bias_code)])
            numbers += [vectors.astype(np.float32), device_steps.rounded_by(step)]
        return numbers

    def _device_steps(self, run: State, ends: np.ndarray) -> DeviceSteps:
        known = self._known
        if known is None or known[0] != ends.tobytes():
            grids = nudged_grids(run)
            assert self.functional.profile is not None
            known = (ends.tobytes(), DeviceSteps(self.functional.plan, grids, self.functional.profile))
            self._known = known
        return known[1]


def _serves(functional: TrainingPlan, step: PlanStep) -> bool:
    weights, plan = step.weights, functional.plan
    if weights is None or not step.kind or step.outside or step.expression is not None:
        return False
    computed = [name for name in step.operands if plan.is_stored(name)]
    names = (weights.weight, *_vectors(weights))
    is_derived = any(name not in functional.moved for name in names)
    bits = [weights.rule.weight_bits, *(bits_of(plan, path) for path in (step.path, *computed))]
    return len(computed) == 1 and not is_derived and max(bits) <= 8


def moved_constants(functional: TrainingPlan, tensors: Mapping[str, np.ndarray]) -> frozenset[str]:
    """Names of the layers' constants that are the user's arrays, perhaps with their values in other places: a compiled
    program computes these without rounding; for anything else its rounding may differ from NumPy's.

    tensors: the user's arrays; only their shapes matter.
    """
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal(np.shape(tensor)).astype(np.float32) for name, tensor in tensors.items()}
    run = in_numpy(functional, Arrays(arrays), frozen=False)
    moved = set()
    for step in functional.plan.steps:
        for name in () if step.weights is None else (step.weights.weight, *_vectors(step.weights)):
            sources = _sources(functional, name)
            if sources and all(source in arrays for source in sources):
                values = np.asarray(run.constant(name), np.float32).ravel()
                of_sources = np.concatenate([arrays[source].ravel() for source in sources])
                if np.array_equal(np.sort(values), np.sort(of_sources)):
                    moved.add(name)
    return frozenset(moved)


def _sources(functional: TrainingPlan, name: str) -> list[str]:
    """Names of the user's arrays that a constant is made from."""
    constant = functional.plan.constants.get(name)
    if constant is None or constant.parameter:
        return [name if constant is None else constant.name]
    operands = getattr(constant.expression, "operands", constant.sources)
    return [source for operand in operands for source in _sources(functional, operand)]


def _vectors(weights: Weights) -> list[str]:
    """Names of a layer's constants with one number for each output channel."""
    norm = weights.batch_norm
    names = [weights.bias, *((norm.weight, norm.bias, norm.mean, norm.variance) if norm else ())]
    return [name for name in names if name]


def _others(weight: Array, channel_axis: int) -> tuple[int, ...]:
    rank = len(weight.shape)
    return tuple(axis for axis in range(rank) if axis != channel_axis % rank)


def _outline(p: Primitives, weight: Array, channel_axis: int) -> Array:
    """A weight of the same rank with only the smallest and the largest value of each output channel: it has the same
    ranges."""
    others, weight = _others(weight, channel_axis), p.stop_gradient(weight)
    rank = len(weight.shape)
    axis = channel_axis % rank
    shape = [1] * rank
    shape[axis], shape[0 if axis else 1] = weight.shape[axis], 2
    return p.reshape(p.stack([p.amin(weight, others), p.amax(weight, others)], 0 if axis else 1), shape)


class BrokenExamples:
    """NaN has no step: an example with one in an input gets NaN for all its results."""

    def __init__(self, run: State) -> None:
        self.run = run
        # By path, 1 for each broken example and 0 for the others.
        self._broken: dict[str, Array] = {}

    def look_for_nan(self, path: str, x: Array) -> None:
        """x: an input, float32, as the user gave it."""
        p, stored = self.run.primitives, self.run.plan.stored(path)
        axis, rank = stored.batch_axis, len(stored.shape)
        x = p.stop_gradient(x)
        others = [at for at in range(rank) if at != axis]
        broken = p.where(x == x, 0.0, 1.0)
        broken = p.amax(broken, others) if others else broken
        if stored.shape[axis] != 1:
            broken = p.amax(p.reshape(broken, (-1, stored.shape[axis])), (1,))
        self._broken[path] = broken

    def spread(self, step: PlanStep) -> None:
        """Whatever is computed from an example with NaN is NaN too."""
        for broken in [self._broken[name] for name in step.operands if name in self._broken]:
            known = self._broken.get(step.path)
            self._broken[step.path] = broken if known is None else self.run.primitives.maximum(known, broken)

    def marked(self, path: str, values: Array) -> Array:
        """A result with NaN everywhere in a broken example, so that its gradients are NaN too."""
        if path not in self._broken:
            return values
        p, stored, broken = self.run.primitives, self.run.plan.stored(path), self._broken[path]
        axis = stored.batch_axis
        if stored.shape[axis] != 1:
            broken = p.reshape(p.stack([broken] * stored.shape[axis], 1), (-1,))
        return values * per_channel(p, p.where(broken > 0, math.nan, 1.0), len(values.shape), axis)


class Accumulators(BrokenExamples):
    """The layers of one run in a framework whose compiler does not round each operation by itself.

    Attributes:
        of: what `LayerNumbers` returns, by path.
    """

    def __init__(
        self,
        run: State,
        numbers: LayerNumbers,
        ends: Array,
        on_host: Callable[[PlanStep, Array, Sequence[Array]], Array],
    ) -> None:
        """
        Args:
            ends: what `TrainingPlan.ends_of` returns, as one array.
            on_host: what the device computes in a step, with the gradient of the second argument.
        """
        super().__init__(run)
        self._on_host = on_host
        arrays, likes = numbers.source(run, ends)
        results = run.primitives.numbers_on_host(numbers, likes, arrays) if likes else []
        self.of = dict(zip(numbers.steps, zip(results[::2], results[1::2], strict=True), strict=True))
        # Whole numbers by path.
        self._steps: dict[str, Array] = {}

    def layer(self, step: PlanStep, values: Mapping[str, Array]) -> Array:
        """The stored tensor in real numbers, float32, with the gradient of the layer."""
        run, p = self.run, self.run.primitives
        assert run.functional.profile is not None
        (name,) = (operand for operand in step.operands if operand in values)
        vectors, numbers = self.of[step.path]
        x = self._steps_of(name, values[name], numbers[0])

        def on_host(sums: Array) -> Array:
            return self._on_host(step, p.stop_gradient(sums), [p.stop_gradient(x) * numbers[0]])

        layer = WeightedStep(run, step)
        own = layer_vectors(p, layer.grid(), numbers[0], [vectors[number] for number in range(3)])
        steps = layer_steps(layer, own, x, numbers, run.functional.profile, on_host)
        self._steps[step.path] = steps
        return self.marked(step.path, steps * numbers[1])

    def _steps_of(self, path: str, values: Array, scale: Array) -> Array:
        """Steps from real 0 of a tensor on its grid, zeros for NaN."""
        if path not in self._steps:
            p = self.run.primitives
            steps = p.where(values == values, values, p.zeros_like(values)) / scale
            self._steps[path] = p.straight_through(p.round(p.stop_gradient(steps)), steps)
        return self._steps[path]


class LayerVectors(NamedTuple):
    """A layer in whole steps, with the gradients of its parameters; or several layers, joined. All [out_channels].

    multiplier: of the quantized weight; gives its codes before rounding.
    scale: of the codes, without gradient.
    bias: in steps of the sums.
    """

    multiplier: Array
    scale: Array
    bias: Array


def layer_vectors(
    p: Primitives, own: ChannelGrid, input_scale: Array, numbers: Sequence[Array] | None = None
) -> LayerVectors:
    """numbers: factor, scale and bias code as `LayerNumbers` returns them; None: `own`, where each operation is rounded
    by itself."""
    if numbers is None:
        numbers = own.factor, p.stop_gradient(own.weight_scale), own.bias_code
    factor, scale, bias_code = numbers
    # One product: the folded weight in steps of its own.
    multiplier = p.straight_through(factor, own.factor) / scale
    return LayerVectors(multiplier, scale, p.straight_through(bias_code, own.bias / (scale * input_scale)))


def layer_steps(
    layer: WeightedStep,
    vectors: LayerVectors,
    x: Array,
    numbers: Array,
    profile: str,
    on_host: Callable[[Array], Array],
    fits: bool = False,
) -> Array:
    """What a layer stores on the device, in whole steps from real 0, with the gradient of the layer.

    Args:
        x: the operand's steps.
        numbers: as `DeviceSteps.rounded_by` returns them.
        on_host: from sums, whose shape it has, the result in real numbers, where float32 does not hold the sums.
        fits: whether float32 is known to hold every sum.
    """
    p, weight = layer.primitives, layer.weight_quantizer(layer.stored_weight())
    steps = weight * per_channel(p, vectors.multiplier, len(weight.shape), layer.weight_axis)
    codes = p.straight_through(p.round(p.stop_gradient(steps)), steps)
    sums = layer.compute(x, codes, vectors.bias)
    axis, last = layer.channel_axis % len(sums.shape), len(sums.shape) - 1

    def otherwise() -> Array:
        return p.moveaxis(p.round(on_host(sums) / numbers[1]), axis, last)

    bias = p.stop_gradient(vectors.bias)
    exact = fits or sums_fit(p, p.stop_gradient(codes), bias, layer.weight_axis, numbers)
    device = profile_named(profile).of(layer.operator.kind)
    exact = exact & (device.arithmetic is None)  # what a user's device states is computed on the host
    rounding = layer.operator.rounding(device)  # type: ignore[attr-defined]
    dense = p.moveaxis(sums, axis, last)
    return p.moveaxis(
        p.rounded_sums(dense, vectors.scale, numbers[:ROUNDED_BY], rounding, exact, otherwise), last, axis
    )


def most_bias(layer: WeightedStep, weight: Array, numbers: Array) -> float:
    """The magnitude of a bias code, exclusive, up to which float32 holds every sum, whatever the weight's codes are.

    numbers: as `DeviceSteps.rounded_by` returns them.
    """
    rule, products = layer.weight_quantizer.rule, math.prod(weight.shape) // weight.shape[layer.weight_axis]
    code = 2.0 ** (rule.weight_bits - 1 if rule.symmetric else rule.weight_bits)
    return float(EXACT - products * code * max(-numbers[ROUNDED_BY], numbers[ROUNDED_BY + 1]))


def sums_fit(p: Primitives, codes: Array, bias: Array, channel_axis: int, numbers: Array) -> Array:
    """Whether float32 holds every sum of any of a layer's products, with its bias; bool, rank 0. False for NaN.

    Such sums stay between the sum of the negative products and that of the positive ones.
    """
    others = _others(codes, channel_axis)
    above = p.sum(p.maximum(codes, 0.0), others)
    below = above - p.sum(codes, others)
    lowest, highest = numbers[ROUNDED_BY], numbers[ROUNDED_BY + 1]
    reach = p.maximum(above * highest - below * lowest, below * highest - above * lowest) + p.abs(bias)
    return p.amax(reach, (0,)) < EXACT
