# SPDX-License-Identifier: Apache-2.0
"""A trained network, from any framework, as numbers that can be varied, and the graph they make."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..deploy.graph import Graph, Operator
from ..deploy.lower import Lowering
from ..kit.device import DEFAULT_PROFILE
from ..kit.planning.fitting import RangesMovedWarning
from ..kit.planning.plans import Derived, Numbers, Plan, PlanStep
from ..qat.train.core import primitives_numpy
from ..qat.train.core.arrays import ENDS, Arrays, weights_of
from ..qat.train.core.engine import Functional
from ..qat.train.core.freezing import settled
from ..qat.train.core.integers import all_numbers, nudged_grids, numbers_of
from ..qat.train.core.state import State, in_numpy
from ..qat.train.core.trained import TrainedNetwork
from ..qat.train.core.weights import extremes, per_channel

# Steps of a finely quantized weight in one of its int8 steps.
FINE_STEPS = 254
# Codes of -127..127, as weights have: positions are written with such digits.
DIGITS, LARGEST_DIGIT = 255, 127

Ends = tuple[float, float]


@dataclass(frozen=True)
class FineWeights:
    """The real weights of an operator in the device's order of axes, as int16 codes.

    Attributes:
        codes: int16, in the shape of the operator's filter.
        scale: float32 [1] or [channels].
        bias: float64 [channels], real numbers.
    """

    codes: np.ndarray
    scale: np.ndarray
    bias: np.ndarray


@dataclass(frozen=True)
class Places:
    """Where the weights of an operator of the graph are in the plan.

    Attributes:
        step: of the plan.
        weights: int64 in the filter's shape, positions in the flattened weight of the plan; -1: a zero that lowering
            has added.
        channels: int64 [channels], positions among the plan's output channels.
    """

    step: PlanStep
    weights: np.ndarray
    channels: np.ndarray

    @property
    def weight(self) -> str:
        """The name of the step's weight."""
        assert self.step.weights is not None
        return self.step.weights.weight

    def of(self, weight: np.ndarray) -> np.ndarray:
        """A weight of the plan as the filter has it."""
        return np.where(self.weights < 0, 0, weight.reshape(-1)[self.weights])


@dataclass(frozen=True, eq=False)
class Origin:
    """What a constant is made from.

    Attributes:
        name: of the user's tensor.
        positions: int64, in the constant's shape: where each element is in the flattened tensor. None: it is the tensor
            itself.
        factor: by which all elements are multiplied.
    """

    name: str
    positions: np.ndarray | None
    factor: float

    @property
    def exact(self) -> bool:
        """Whether dividing by the factor, a power of two, rounds nothing."""
        return math.frexp(self.factor)[0] == 0.5


@dataclass(frozen=True, eq=False)
class Candidate:
    """A network's numbers. Variants are made with `dataclasses.replace`; nothing is changed in place.

    Attributes:
        plan: what the device runs.
        tensors: the parameters, buffers and constants that steps read, or steps of other bits may read, float32, by
            name.
        ranges: (min, max) of every grid, by name.
        learned: learned ranges of weights, as `Arrays.learned` has them.
        device: whose integers.
        given: the user's tensors as they were, by name.
    """

    plan: Plan
    tensors: Mapping[str, np.ndarray]
    ranges: Mapping[str, Ends]
    learned: Mapping[str, Mapping[str, Any]]
    device: str
    given: Mapping[str, np.ndarray]

    @staticmethod
    def of(model: object, device: str | None = None) -> Candidate:
        """The numbers of a calibrated, trained or frozen model.

        Args:
            model: a prepared model of PyTorch or Keras; for JAX ``(prepared, params, state)`` or what
                ``prepared.trained(params, state)`` gives; or a candidate.
            device: by default the one it was prepared for.

        Raises:
            TypeError: it is none of these.
            MissingData: a range has seen no data.
        """
        if isinstance(model, Candidate):
            return model if device is None else replace(model, device=device)
        if isinstance(model, tuple) and len(model) == 3 and hasattr(model[0], "trained"):
            model = model[0].trained(*model[1:])
        if all(hasattr(model, name) for name in ("trained", "plan", "frozen")):
            model = model.trained()  # type: ignore[attr-defined]
        if not isinstance(model, TrainedNetwork):
            raise TypeError(
                "model must come from exactqat.qat.prepare, for JAX as (prepared, params, state), got "
                f"{type(model).__name__}"
            )
        plan, functional, arrays = model.plan, model.functional, model.arrays
        functional.require_data(arrays.ranges)
        run = in_numpy(functional, arrays)
        read = dict.fromkeys(name for step in plan.steps for name in functional.tensors_read(step))
        ranges = {}
        for name in plan.grids:
            low, high = (float(np.float32(run.grid(name).end(end))) for end in ("minimum", "maximum"))
            ranges[name] = (low, high)
        weights = {name: ends for name, ends in arrays.learned.items() if name not in plan.grids}
        known = device or model.profile or DEFAULT_PROFILE
        tensors = {name: np.asarray(run.constant(name)) for name in read}
        originals = {name: np.asarray(array) for name, array in arrays.tensors.items()}
        # What other plans of the network may read, too, and is none of the user's.
        computed = {name for name, constant in plan.constants.items() if not constant.parameter}
        for name in (computed & originals.keys()) - read.keys():
            tensors[name] = originals.pop(name)
        return Candidate(plan, tensors, ranges, weights, known, originals)

    def settled(self) -> Candidate:
        """The candidate with ranges that the device's operators can take together, moved as by `freeze`."""
        functional, arrays = self._functional()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RangesMovedWarning)
            moved = settled(functional, arrays).ranges
        ends = {name: (float(bounds["minimum"]), float(bounds["maximum"])) for name, bounds in moved.items()}
        return replace(self, ranges=ends)

    def graph(self) -> Graph:
        """The device's integers.

        Raises:
            ValueError: a layer does not fit the device's integers.
        """
        return self._graph

    @cached_property
    def _graph(self) -> Graph:
        return replace(Lowering(self.plan, self.numbers()).run(), trained_for=self.device)

    def with_layer(self, operator: Operator, places: Places, tensors: Mapping[str, np.ndarray]) -> Candidate:
        """The candidate with other tensors of one layer, and a graph in which only that layer's weights differ: all
        ranges stay where they are. Any further `replace` lowers the whole network again."""
        changed = replace(self, tensors={**self.tensors, **tensors})
        run, graph = changed.run(), self.graph()
        layer = numbers_of(run, [places.step], nudged_grids(run)).weights[places.step.path]
        input, filter, bias = (graph.tensors[name] for name in operator.inputs)
        scale = layer.scale[places.channels] if layer.scale.size > 1 else layer.scale
        grids = (scale, scale * input.quantization.scale)
        codes = (places.of(layer.codes), layer.bias[places.channels])
        renewed = {
            old.name: replace(old, quantization=replace(old.quantization, scale=grid), data=data.astype(old.dtype))
            for old, grid, data in zip((filter, bias), grids, codes, strict=True)
        }
        # Where `cached_property` looks.
        changed.__dict__["_graph"] = replace(graph, tensors={**graph.tensors, **renewed})
        return changed

    def places(self) -> dict[str, Places]:
        """Where the weights of the graph's operators are in the plan, by the name of their filter.

        The plan is lowered with digits of the positions in place of codes.
        """
        numbers, steps = self.numbers(), {step.path: step for step in self.plan.steps}
        left = {
            path: 1 + np.arange(layer.codes.size).reshape(layer.codes.shape) for path, layer in numbers.weights.items()
        }
        graphs: list[Graph] = []
        while not graphs or any(positions.any() for positions in left.values()):
            weights = {}
            for path, layer in numbers.weights.items():
                digits = (left[path] + LARGEST_DIGIT) % DIGITS - LARGEST_DIGIT
                left[path] = (left[path] - digits) // DIGITS
                weights[path] = replace(layer, codes=digits, bias=np.arange(len(layer.bias), dtype=np.float64))
            graphs.append(Lowering(self.plan, replace(numbers, weights=weights)).run(validated=False))
        places = {}
        paths = sorted(numbers.weights, key=len, reverse=True)
        for operator in graphs[0].operators:
            if len(operator.inputs) != 3 or not operator.inputs[1].endswith("/filter"):
                continue
            _, name, bias = operator.inputs
            path = next(prefix for prefix in paths if name.startswith(prefix))
            digits_of = [np.asarray(graph.tensors[name].data, np.int64) for graph in graphs]
            positions = np.sum([digit * DIGITS**place for place, digit in enumerate(digits_of)], 0) - 1
            places[name] = Places(steps[path], positions, np.asarray(graphs[0].tensors[bias].data, np.int64))
        return places

    def fine_weights(self) -> dict[str, FineWeights]:
        """The real weights of the graph's operators, by the name of their filter."""
        run, filters = self.settled().run(), {}
        numbers = all_numbers(run)
        for name, places in self.places().items():
            step = places.step
            assert step.weights is not None
            weight, bias = real_weights(run, step)
            axis, default = step.weights.channel_axis, numbers.weights[step.path].scale
            channels_last = np.abs(np.moveaxis(weight, axis, -1)).reshape(-1, weight.shape[axis])
            scale = (channels_last.max(0) if default.size > 1 else channels_last.max(keepdims=True)) / np.float32(127)
            scale = np.where(scale > 0, scale, default).astype(np.float32).reshape(-1)
            steps = weight.astype(np.float64) / per_channel(primitives_numpy, scale, weight.ndim, axis)
            filters[name] = FineWeights(
                places.of(np.rint(steps * FINE_STEPS)).astype(np.int16),
                (scale[places.channels] if scale.size > 1 else scale) / np.float32(FINE_STEPS),
                bias.astype(np.float64)[places.channels],
            )
        return filters

    def changed_from(self, other: Candidate) -> dict[str, np.ndarray]:
        """The user's tensors that differ from another candidate's of the same network, by the user's names.

        Raises:
            ValueError: one is computed from the user's in a way that cannot be inverted, or it is another network.
        """
        missing = [name for name in self.tensors if name not in other.tensors]
        if missing:
            raise ValueError(f"the model is not the one that was searched: it has no {missing[0]!r}")
        changes = {}
        for name, value in self.tensors.items():
            before = other.tensors[name]
            if value is before or np.array_equal(value, before):
                continue
            origin = self.origin(name)
            if origin is None or not (origin.exact or _of_powers(value, before)):
                raise ValueError(f"{name!r} is no parameter of the model and none with its elements moved or scaled")
            if origin.positions is None:
                changes[origin.name] = value
                continue
            was, at = other.given[origin.name], origin.positions.reshape(-1)
            users = np.empty(was.size, np.float32)
            # Powers of two pass through the product; dividing by another factor would round.
            users[at] = (value / np.float32(origin.factor) if origin.exact else _ratio(value, before)).reshape(-1)
            changes[origin.name] = (users if origin.exact else was.reshape(-1) * users).reshape(was.shape)
        return changes

    def given_to(self, network: Any) -> Any:
        """The model with the candidate's weights, biases and ranges, changed in place; for JAX its new parameters and
        state. network: the model that the candidate comes of.

        Raises:
            ValueError: the model is frozen, or they cannot be expressed in its own parameters.
        """
        before = Candidate.of(network)
        numbers = self.changed_from(before), dict(self.settled().ranges), self._started_again(before)
        if isinstance(network, tuple):
            prepared, params, state = network
            return prepared.take_over(params, state, *numbers)
        network.take_over(*numbers)
        return network

    def _started_again(self, before: Candidate) -> dict[str, dict[str, np.ndarray]]:
        """Learned ranges of weights that the candidate itself did not learn: those that its integers have."""
        run, learned = self.run(), dict[str, dict[str, np.ndarray]]()
        for step in before.plan.steps:
            weights, name = step.weights, weights_of(step.path)
            if weights is not None and name in before.learned and name not in self.learned:
                moved = np.moveaxis(np.asarray(run.stored_weight(weights)), weights.channel_axis, -1)
                ends = dict(zip(ENDS, extremes(primitives_numpy, weights.rule, moved), strict=True))
                learned[name] = {end: np.asarray(ends[end], np.float32) for end in before.learned[name]}
        return learned

    def may_change(self, name: str) -> bool:
        """Whether a tensor is one of the user's, or one of them with its elements moved or times a power of two."""
        origin = self.origin(name)
        return origin is not None and origin.exact

    def origin(self, name: str) -> Origin | None:
        """The user's tensor that this one is made from by moving elements and multiplying all by one number, so that
        elements may be multiplied by powers of two. None: there is none."""
        if name not in self.tensors:
            return None
        constant = self.plan.constants.get(name)
        if constant is None or constant.parameter:
            return Origin(name if constant is None else constant.name, None, 1.0)
        if isinstance(constant.expression, Derived):
            sources, function = constant.expression.operands, constant.expression.function
        else:
            sources, function = constant.sources, constant.expression
        users = [source for source in sources if self._fixed(source) is None]
        if len(users) != 1 or users[0] not in self.given or function is None:
            return None
        shape = self.given[users[0]].shape
        # Numbers that every framework's floats hold: only moving elements returns exactly these, and only moving and
        # multiplying returns their products.
        size = int(np.prod(shape))
        if not 0 < size < 2**24:
            return None
        numbers = np.arange(1, size + 1, dtype=np.float32).reshape(shape)
        try:
            moved = np.asarray(function(*(numbers if name == users[0] else self._fixed(name) for name in sources)))
        except (TypeError, ValueError, AttributeError):  # it takes arrays of its framework
            return None
        factor = np.float32(np.min(moved)) if moved.size == size else np.float32(0)
        if not 0 < factor < np.inf or not np.array_equal(np.sort(moved, axis=None), numbers.reshape(-1) * factor):
            return None
        return Origin(users[0], np.argsort(np.argsort(moved, axis=None)).reshape(moved.shape), float(factor))

    def _fixed(self, name: str) -> np.ndarray | None:
        """A constant of planning's own, which involves none of the user's tensors."""
        constant = self.plan.constants.get(name)
        if constant is None or constant.parameter or constant.expression is not None or constant.data is None:
            return None
        return np.asarray(constant.data)

    def numbers(self) -> Numbers:
        """The integers of weights and the grids, as they are lowered."""
        return all_numbers(self.settled().run())

    def run(self) -> State:
        """What computes the network's constants and weights, in NumPy."""
        functional, arrays = self._functional()
        return in_numpy(functional, arrays)

    def _functional(self) -> tuple[Functional, Arrays]:
        ranges = {
            name: dict(minimum=np.float32(low), maximum=np.float32(high), batches=np.int32(1), trained=np.int32(0))
            for name, (low, high) in self.ranges.items()
        }
        learned = {name: dict(ends) for name, ends in self.learned.items()}
        return Functional(self.plan, profile=self.device), Arrays(dict(self.tensors), learned, ranges)


def _ratio(value: np.ndarray, before: np.ndarray) -> np.ndarray:
    return np.asarray(np.divide(value, before, np.ones_like(value), where=before != 0))


def _of_powers(value: np.ndarray, before: np.ndarray) -> bool:
    """Whether each element was multiplied by a power of two."""
    mantissa, _ = np.frexp(_ratio(value, before))
    return bool(np.all(mantissa == 0.5) and np.array_equal(value[before == 0], before[before == 0]))


def real_weights(run: State, step: PlanStep) -> tuple[np.ndarray, np.ndarray]:
    """A step's weight and bias with batch norm folded in, in real numbers: float32 in the user's order of axes, and
    float32 [channels]."""
    assert step.weights is not None
    weights = step.weights
    weight = np.asarray(run.constant(weights.weight), np.float32)
    channels = weight.shape[weights.channel_axis]
    bias = np.zeros(channels, np.float32) if not weights.bias else np.asarray(run.constant(weights.bias), np.float32)
    if weights.batch_norm is None:
        return weight, bias
    factor, offset = run.factor_and_offset(weights.batch_norm)
    return weight * per_channel(primitives_numpy, factor, weight.ndim, weights.channel_axis), bias * factor + offset
