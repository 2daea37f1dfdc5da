# SPDX-License-Identifier: Apache-2.0
"""What a step of a plan computes in training: an operator of the device in real numbers, its result on a grid.

The operator's declaration (`exactqat.kit.device`) says what it computes; the grids are here: of the result, of weights,
of constants. Until the network is frozen, batch norm uses the batch's statistics; then a step computes what the device
computes: batch norm folded into the weights, the bias on the grid of ``input scale * weight scale``.

A step is bound to a `State`, which has the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....kit.device import OPERATORS, DeviceOperator
from ....kit.planning.masks import MaskRange
from ....kit.planning.plans import PlanInput, PlanStep
from .primitives import Array
from .ranges import device_grid
from .state import ConstantOperand, Normalization, State
from .weights import ChannelGrid, LayerArrays, folded_weight, folds, grid_of, per_channel, step_width


def attributes_of(step: PlanStep) -> dict[str, Array]:
    """The attributes an operator computes with in real numbers: without the fused activation, and for any number of
    examples."""
    attributes = {name: value for name, value in step.attributes.items() if name != "activation"}
    if "new_shape" in attributes:
        follows = {step.batch_axis: -1}
        attributes["new_shape"] = tuple(follows.get(axis, size) for axis, size in enumerate(step.shape))
    return attributes


class Step:
    """An operator without weights, its constant operands and the grid of its result.

    Attributes:
        primitives: of the framework.
        kind: the operator.
        attributes: the operator's, with axes in the user's order; -1 for sizes that follow from the batch.
        activation: NONE, RELU or RELU6.
        bounds: what the function itself is clamped to, like a hard sigmoid to (0, 1). The stored range is the same, so
            the device needs no operator for it; the float network that `calibrate` runs does.
        high: codes of fewer than eight bits are at the top of int8, not at its bottom.
        output_quantizer: of the stored result. Several steps may share one.
        source: the grid of the first tensor it reads; None for an input.
        constants: by position, functions that return the constant operands on their grids.
    """

    operator: DeviceOperator
    output_quantizer: Array
    source: Array

    def __init__(self, state: State, step: PlanStep) -> None:
        grid_of = state.functional.grid_of
        self.state, self.primitives = state, state.primitives
        self.path, self.kind, self.attributes = step.path, step.kind, attributes_of(step)
        self.operator = OPERATORS[step.kind]
        self.activation, self.bounds, self.high = step.activation, step.bounds, step.high
        self.output_quantizer = state.grid(step.grid)
        self.source = state.grid(next(grid_of[name] for name in step.operands if name in grid_of))
        constants = [position for position, name in enumerate(step.operands) if name not in grid_of]
        self.constants = {position: ConstantOperand(state, step, position) for position in constants}

    @property
    def frozen(self) -> bool:
        """Whether it computes what the device does; the float network does not."""
        return self.state.mode.frozen and self.state.mode.quantizing

    def compose(self, *features: Array) -> Array:
        """What is stored, from the computed operands: the operator in real numbers, fake-quantized."""
        operands = self.operands(features) if self.constants else features
        result = self.compute_real(operands)
        if self.state.mode.observing:
            self.state.functional.parts.see(self.path, self.primitives, (result, *features))
        return self.moved(operands, result) if self.operator.same_quantization else self.store(result)

    def operands(self, features: Sequence[Array]) -> list[Array]:
        """What the operator gets: the constants in their positions among the computed operands."""
        operands = list(features)
        for position in sorted(self.constants):
            operands.insert(position, self.constants[position]())
        return operands

    def compute_real(self, operands: Sequence[Array]) -> Array:
        """What the operator computes in real numbers, before it is stored; operands include constants."""
        attributes = self.attributes
        if self.operator.uses_operand_scale and self.source.quantizing:
            scale = self.primitives.stop_gradient(self.source.scale())
            attributes = {**attributes, "operand_scale": scale}
        return self.operator.real(self.primitives, operands, attributes)

    def moved(self, operands: Sequence[Array], result: Array) -> Array:
        """The result of an operator that stores on the grid of its operands; some round in its codes."""
        quantizer, p = self.output_quantizer, self.primitives
        if not quantizer.quantizing or type(self.operator).real_on_grid is DeviceOperator.real_on_grid:
            return result
        low, high = map(p.stop_gradient, quantizer.ends())
        scale = step_width((low, high), quantizer.bits, False)
        grid = device_grid(p, low, scale, quantizer.bits, quantizer.rule.is_int16, self.high)
        arrays = [p.stop_gradient(operand) for operand in operands]
        rounded = self.operator.real_on_grid(p, arrays, self.attributes, grid)
        return result if rounded is None else p.straight_through(rounded, result)

    def clamped(self, x: Array) -> Array:
        """Applies the activation, and the clamp of the function itself."""
        p = self.primitives
        if self.activation != "NONE":
            x = p.relu6(x) if self.activation == "RELU6" else p.relu(x)
        if self.bounds is None:
            return x
        # On a symmetric grid of 16 bits saturation clamps, one code below the lower bound.
        by_saturation = self.output_quantizer.rule.is_int16 and self.output_quantizer.quantizing
        if by_saturation:
            return x
        low, high = self.bounds
        if isinstance(self.bounds, MaskRange):
            return p.where(x < low, low, p.where(x > high, high, x))
        return p.clip(x, low, high)

    def store(self, x: Array) -> Array:
        """Activation, then the grid of the stored tensor."""
        return self.output_quantizer(self.clamped(x))


class Input(Step):
    """An input of the network as the device gets it; it has no operator."""

    def __init__(self, state: State, plan_input: PlanInput) -> None:
        self.state, self.primitives, self.kind, self.attributes = state, state.primitives, "", {}
        self.activation, self.bounds, self.high, self.constants = "NONE", None, False, {}
        self.output_quantizer = state.grid(plan_input.grid)

    def compose(self, *features: Array) -> Array:
        return self.output_quantizer(features[0])


class WeightedStep(Step):
    """An operator with weights.

    Attributes:
        weight_source, bias_source: return the current weight and bias; there may be no bias.
        weight_quantizer: steps with the same weight share one.
        batch_norm: what is folded into the weights, or None.
        folded: whether the weight is quantized with batch norm in it (`Rule.fold_batch_norm`).
    """

    weight_quantizer: Array
    batch_norm: Array

    def __init__(self, state: State, step: PlanStep) -> None:
        super().__init__(state, step)
        weights = step.weights
        assert weights is not None
        norm, self.folded = weights.batch_norm, folds(weights)
        self.weight_source = state.source(weights.weight)
        self.bias_source = state.source(weights.bias) if weights.bias else None
        self.weight_quantizer = state.weight_grid(step.path, weights)
        self.batch_norm = None if norm is None else state.normalization(step, norm)

    @property
    def weight_axis(self) -> int:
        """The weight's axis of output channels."""
        return int(self.weight_quantizer.channel_axis)

    @property
    def channel_axis(self) -> int:
        """The result's axis of output channels."""
        return int(self.attributes.get("channel_axis", -1))

    def compose(self, *features: Array) -> Array:
        (feature,) = features
        if self.frozen:
            return self.store(self.compute_frozen(feature))
        weight = self.weight_quantizer(self.stored_weight())
        batch_norm = self.batch_norm
        if self.folded and batch_norm is not None:
            return self.store(self.compute_folded(feature, weight, batch_norm))
        computed = self.compute(feature, weight, self.bias())
        if batch_norm is None:
            return self.store(computed)
        if self.bounds is None:
            stored = batch_norm.stored(computed, self.activation, self.output_quantizer, self.channel_axis)
            if stored is not None:
                return stored
        return self.store(batch_norm(computed, self.channel_axis))

    def bias(self) -> Array:
        """The bias, [out_channels], without batch norm; or None."""
        return None if self.bias_source is None else self.bias_source()

    def stored_weight(self) -> Array:
        """What is quantized: the weight, under `Rule.fold_batch_norm` times batch norm's factor."""
        weight = self.weight_source()
        if not self.folded or self.batch_norm is None:
            return weight
        return folded_weight(self.primitives, weight, self.batch_norm.factor_and_offset()[0], self.weight_axis)

    def compute(self, x: Array, weight: Array, bias: Array) -> Array:
        """The linear operation with a given weight and bias."""
        return self.operator.real(self.primitives, (x, weight, bias), self.attributes)

    def scales(self) -> tuple[Array, Array]:
        """Of operand and result."""
        stop = self.primitives.stop_gradient
        return stop(self.source.scale()), stop(self.output_quantizer.scale())

    def arrays(self, weight: Array = None, raw_scale: Array = None) -> LayerArrays:
        """What its grid follows from; weight: `stored_weight`, raw_scale: the weight's, if the caller has them."""
        if raw_scale is None:
            raw_scale = self.weight_quantizer.scale(self.stored_weight() if weight is None else weight)
        norm = None if self.batch_norm is None else self.batch_norm.in_evaluation()
        is_int16 = self.source.rule.is_int16
        return LayerArrays(self.primitives.stop_gradient(raw_scale), self.bias(), norm, self.folded, is_int16)

    def grid(self, weight: Array = None) -> ChannelGrid:
        """The step on the device, from the current weights, ranges and statistics; weight: as `arrays` takes it."""
        return grid_of(self.primitives, self.arrays(weight), *self.scales())

    def compute_frozen(self, x: Array) -> Array:
        """The operator once batch norm is folded, in real numbers, before its result is stored."""
        stored = self.stored_weight()
        weight, grid = self.weight_quantizer(stored), self.grid(stored)
        factor = per_channel(self.primitives, grid.factor, len(weight.shape), self.weight_axis)
        return self.compute(x, weight * factor, grid.bias)

    def compute_folded(self, x: Array, weight: Array, batch_norm: Normalization) -> Array:
        """Convolution and batch norm in one, before `freeze`: TensorFlow's fold with correction.

        The quantized weight holds the running deviation, which is steady; in training the result is corrected to the
        batch's own.
        """
        p, bias, norm = self.primitives, self.bias(), batch_norm.norm
        factor, offset = batch_norm.factor_and_offset()
        if not batch_norm.training:
            return self.compute(x, weight, offset if bias is None else bias * factor + offset)
        raw = self.compute(x, self.weight_source(), bias)
        rank = len(raw.shape)
        axes = [axis for axis in range(rank) if axis != self.channel_axis % rank]
        mean, variance = self.state.statistics(raw, axes, self.channel_axis)
        beta, running = self.state.optional(norm.bias), p.stop_gradient(self.state.constant(norm.variance))
        correction = p.sqrt(running + batch_norm.epsilon) / p.sqrt(variance + batch_norm.epsilon)
        # A bias of the convolution is part of the mean, and batch norm removes it.
        shift = factor * correction * (mean if bias is None else mean - bias)
        shift = -shift if beta is None else beta - shift
        correction, shift = (per_channel(p, vector, rank, self.channel_axis) for vector in (correction, shift))
        result = self.compute(x, weight, None) * correction + shift
        # Last, so that all of the above has seen the previous statistics.
        batch_norm(p.stop_gradient(raw), self.channel_axis)
        return result
