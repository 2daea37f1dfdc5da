# SPDX-License-Identifier: Apache-2.0
"""The layers of a prepared network, each one operator of the device with the tensor that it stores.

What an operator computes is said by its declaration (`exactqat.device`); here stand the grids: of the result, of
weights, of constants. Until `frozen`, batch norm runs on the batch's statistics; once frozen, a layer computes what the
device computes: batch norm folded into the weights, the bias on the int32 grid of ``input scale * weight scale``. The
device's own integers come from `frozen_torch`; `compose` is the same in real numbers and fake quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ...capture.torch.custom import is_differentiated, straight_through
from ...device import OPERATORS, DeviceOperator
from ..core.weights import ChannelGrid, channel_grid, correction_and_shift
from . import primitives as primitives_torch
from .modules import FakeQuantize, LayerBatchNorm, WeightFakeQuantize
from .owners import BEFORE
from .primitives import per_channel

# A tensor that does not depend on the input, as it is at this moment.
Source = Callable[[], Tensor]


class Held:
    """The parameter or buffer that a module holds under a name.

    Attributes:
        moves: steps of training write into it, so that what is computed of it needs a copy for its backward pass.
    """

    def __init__(self, owner: nn.Module, name: str) -> None:
        self.owner = owner
        self.name = name
        self.moves = False

    def __call__(self) -> Tensor:
        held = self.tensor()
        return held.clone() if self.moves and torch.is_grad_enabled() else held

    def tensor(self) -> Tensor:
        """What is held itself."""
        held: Tensor | None = self.owner._parameters.get(self.name)
        if held is None:
            held = self.owner._buffers.get(self.name)
        if held is None:
            raise RuntimeError(
                f"'{self.name}' of the prepared model's {type(self.owner).__name__} was taken away: {BEFORE}"
            )
        return held


class Computed:
    """What a function computes from other such tensors, again at every call, so that gradients reach them."""

    def __init__(self, function: Callable[..., Tensor], sources: Sequence[Source]) -> None:
        self.function = function
        self.sources = tuple(sources)

    def __call__(self) -> Tensor:
        return self.function(*(source() for source in self.sources))


def fold(weight: Tensor, batch_norm: LayerBatchNorm, channel_axis: int = 0) -> Tensor:
    """The weight times batch norm's factor for each output channel."""
    factor, _ = batch_norm.factor_and_offset()
    return weight * per_channel(factor, weight.dim(), channel_axis)


def activate(features: Tensor, activation: str) -> Tensor:
    """Applies NONE, RELU or RELU6."""
    if activation == "RELU6":
        return F.relu6(features)
    return F.relu(features) if activation == "RELU" else features


class ConstantOperand(nn.Module):
    """An operand that does not depend on the input, on a grid of its own: symmetric, narrow, one scale."""

    def __init__(self, source: Source, quantizer: WeightFakeQuantize, output_quantizer: FakeQuantize) -> None:
        super().__init__()
        self.source = source
        self.quantizer = quantizer
        # In a tuple, so that the quantizer is not registered as a child a second time.
        self._quantizers = (output_quantizer,)

    def forward(self) -> Tensor:
        return cast(Tensor, self.quantizer(self.source()))


class SharedConstant(nn.Module):
    """An operand that does not depend on the input, of an operator that moves codes: it lies on the result's grid."""

    def __init__(self, source: Source, output_quantizer: FakeQuantize) -> None:
        super().__init__()
        self.source = source
        # In a tuple, so that the quantizer is not registered as a child a second time.
        self._quantizers = (output_quantizer,)

    def forward(self) -> Tensor:
        return cast(Tensor, self._quantizers[0](self.source()))


class Integers(Protocol):
    """What computes a frozen network as the device does: `frozen.Device`."""

    def ready(self) -> bool:
        """Whether it computes what is asked for just now."""
        raise NotImplementedError

    def layer(self, path: str, layer: QuantizedLayer, features: Sequence[Tensor]) -> Tensor:
        """A layer's result from real numbers on the grids of its operands."""
        raise NotImplementedError


class QuantizedLayer(nn.Module):
    """A layer without weights: an operator of the device, its constant operands and the quantizer of its result.

    Attributes:
        kind: the operator.
        attributes: the operator's, with axes in the user's order; -1 for sizes that follow from the batch.
        activation: NONE, RELU or RELU6.
        bounds: what the function itself is clamped to, as a hard sigmoid is to (0, 1). The stored range is the same, so
            the device needs no operator for it; the float network that `calibrate` runs does.
        output_quantizer: of the stored result. Several layers may share one.
        source: the quantizer of the first tensor that it reads; None for an input.
        frozen: whether the last phase of training has begun.
    """

    def __init__(
        self,
        kind: str,
        attributes: Mapping[str, Any],
        output_quantizer: FakeQuantize,
        *,
        source: FakeQuantize | None = None,
        activation: str = "NONE",
        bounds: tuple[float, float] | None = None,
        high: bool = False,
        constants: Mapping[int, ConstantOperand | SharedConstant] | None = None,
    ) -> None:
        """
        Args:
            high: codes of fewer than eight bits stand at the top of int8, not at its bottom.
            constants: by their position among the operands.
        """
        super().__init__()
        self.kind = kind
        self.attributes = dict(attributes)
        self.activation = activation
        self.bounds = bounds
        self.high = high
        self.frozen = False
        self.constants = dict(constants or {})
        for position, constant in self.constants.items():
            self.add_module(f"operand_{position}", constant)
        # In a tuple, as only one of the layers that share a quantizer has it as its child.
        self._output_quantizers = (output_quantizer,)
        self._input_quantizers = (source,)
        self._integers: tuple[Integers, str] | None = None

    @property
    def output_quantizer(self) -> FakeQuantize:
        return self._output_quantizers[0]

    @property
    def source(self) -> FakeQuantize:
        return cast(FakeQuantize, self._input_quantizers[0])

    @property
    def operator(self) -> DeviceOperator:
        """What the device knows of it; an input has none."""
        if not self.kind:
            raise AttributeError("an input has no operator")
        return OPERATORS[self.kind]

    def compute_with(self, integers: Integers, path: str) -> None:
        """Lets a frozen layer compute the device's integers; `path`: its own in the plan."""
        self._integers = (integers, path)

    def clamped(self, features: Tensor) -> Tensor:
        """Activation, and what the function itself is clamped to."""
        features = activate(features, self.activation)
        # On a symmetric grid of 16 bits saturation clamps, one code below the lower bound.
        by_saturation = self.output_quantizer.rule.wide and self.output_quantizer.quantizing
        return features if self.bounds is None or by_saturation else features.clamp(*self.bounds)

    def store(self, features: Tensor) -> Tensor:
        """Activation, then the grid of the stored tensor."""
        return cast(Tensor, self.output_quantizer(self.clamped(features)))

    def operands(self, features: Sequence[Tensor]) -> list[Tensor]:
        """What the operator gets: the constants in their places among the computed operands."""
        operands = list(features)
        for position in sorted(self.constants):
            operands.insert(position, cast(Tensor, self.constants[position]()))
        return operands

    def forward(self, *features: Tensor) -> Tensor:
        if self.frozen and self._integers is not None and self._integers[0].ready():
            integers, path = self._integers
            return integers.layer(path, self, features)
        return self.compose(*features)

    def compose(self, *features: Tensor) -> Tensor:
        """The layer in real numbers, its result fake-quantized."""
        operands = self.operands(features) if self.constants else features
        result = self.compute_real(operands)
        return self.moved(operands, result) if self.operator.same_quantization else self.store(result)

    def compute_real(self, operands: Sequence[Tensor]) -> Tensor:
        """What the operator computes in real numbers, before it is stored; operands with constants among them."""
        attributes = self.attributes
        if self.operator.uses_operand_scale and self.source.quantizing:
            attributes = {**attributes, "operand_scale": self.source.scale().detach()}
        return cast(Tensor, self.operator.real(primitives_torch, operands, attributes))

    def moved(self, operands: Sequence[Tensor], result: Tensor) -> Tensor:
        """The result of an operator that stores on the grid of its operands; some round in its codes."""
        quantizer = self.output_quantizer
        if not quantizer.quantizing or type(self.operator).real_on_grid is DeviceOperator.real_on_grid:
            return result
        with torch.no_grad():
            grid = quantizer.device_grid(self.high)
            rounded = self.operator.real_on_grid(primitives_torch, operands, self.attributes, grid)
        return result if rounded is None else rounded + (result - result.detach())

    def extra_repr(self) -> str:
        return self.kind + (f", {self.activation}" if self.activation != "NONE" else "")


class QuantizedInput(QuantizedLayer):
    """An input of the network as the device gets it."""

    def __init__(self, output_quantizer: FakeQuantize) -> None:
        super().__init__("", {}, output_quantizer)

    def compose(self, *features: Tensor) -> Tensor:
        (given,) = features
        if given.dim() == 4:
            given = given.contiguous(memory_format=torch.channels_last)
        return self.store(given)


class WeightedLayer(QuantizedLayer):
    """A layer with weights.

    Attributes:
        weight_source, bias_source: give the weight and the bias of this moment; they stand elsewhere in the model,
            under the user's names, and may serve several layers.
        weight_axis: the weight's axis of output channels.
        weight_quantizer: layers with the same weight share one.
        batch_norm: what is folded into the weights, or None.
        folded: whether the weight is quantized with batch norm in it (`Rule.fold_batch_norm`).
        of_all_processes: whether statistics must be those of all processes; off where each one runs on the same data.
    """

    of_all_processes = True

    def __init__(
        self,
        kind: str,
        attributes: Mapping[str, Any],
        output_quantizer: FakeQuantize,
        *,
        weight: Source,
        bias: Source | None,
        weight_quantizer: WeightFakeQuantize,
        batch_norm: LayerBatchNorm | None = None,
        folded: bool = False,
        **rest: Any,
    ) -> None:
        super().__init__(kind, attributes, output_quantizer, **rest)
        self.weight_source = weight
        self.bias_source = bias
        self.batch_norm = batch_norm
        self.folded = folded
        self._weight_quantizers = (weight_quantizer,)

    @property
    def weight_quantizer(self) -> WeightFakeQuantize:
        return self._weight_quantizers[0]

    @property
    def weight_axis(self) -> int:
        return self.weight_quantizer.channel_axis

    @property
    def channel_axis(self) -> int:
        """The result's axis of output channels."""
        return int(self.attributes.get("channel_axis", -1))

    def bias(self) -> Tensor | None:
        """The bias, [out_channels], without batch norm."""
        return None if self.bias_source is None else self.bias_source()

    def stored_weight(self) -> Tensor:
        """What is quantized: the weight, under `Rule.fold_batch_norm` times batch norm's factor."""
        weight = self.weight_source()
        folded = self.folded and self.batch_norm is not None
        return fold(weight, cast(LayerBatchNorm, self.batch_norm), self.weight_axis) if folded else weight

    def grid(self, weight: Tensor | None = None) -> ChannelGrid:
        """The layer on the device, from the weights, ranges and statistics of this moment.

        weight: `stored_weight`, of callers that have it.
        """
        weight = self.stored_weight() if weight is None else weight
        bias = self.bias()
        bias = weight.new_zeros(weight.shape[self.weight_axis]) if bias is None else bias
        factor = torch.ones_like(bias)
        if self.batch_norm is not None:
            factor, offset = self.batch_norm.factor_and_offset()
            bias = bias * factor + offset
        if self.folded:
            factor = torch.ones_like(bias)
        scales = (self.weight_quantizer.scale(weight), self.source.scale(), self.output_quantizer.scale())
        raw_scale, input_scale, output_scale = (scale.detach() for scale in scales)
        wide = self.source.rule.wide
        return channel_grid(primitives_torch, factor, bias, raw_scale, input_scale, output_scale, wide)

    def compute(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The linear operation with a given weight and bias."""
        return cast(Tensor, self.operator.real(primitives_torch, (features, weight, bias), self.attributes))

    def normalize(self, features: Tensor) -> Tensor:
        """Batch norm, if the layer has one."""
        return features if self.batch_norm is None else self.batch_norm(features, self.channel_axis)

    def statistics(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of each channel of a batch, for a folded batch norm."""
        if self.of_all_processes and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                "Rule.fold_batch_norm needs the statistics of all processes: train inside qat.distributed.synchronized"
            )
        # Under autocast `raw` may have 16 bits, too few for statistics.
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
        variance, mean = torch.var_mean(raw, self.other_axes(raw), unbiased=False)
        return mean, variance

    def other_axes(self, raw: Tensor) -> list[int]:
        """All axes of a result but that of its channels."""
        return [axis for axis in range(raw.dim()) if axis != self.channel_axis % raw.dim()]

    def compute_folded(self, features: Tensor, weight: Tensor, batch_norm: LayerBatchNorm) -> Tensor:
        """Convolution and batch norm in one, before `freeze`: TensorFlow's fold with correction.

        The quantized weight holds the running deviation, which is steady; in training the result is brought to the
        batch's own.
        """
        factor, offset = batch_norm.factor_and_offset()
        bias = self.bias()
        if not batch_norm.training:
            return self.compute(features, weight, offset if bias is None else bias * factor + offset)
        raw = self.compute(features, self.weight_source(), bias)
        mean, variance = self.statistics(raw)
        _, beta, _, running_variance, _ = batch_norm.tensors()
        correction, shift = correction_and_shift(
            primitives_torch, factor, beta, bias, running_variance, mean, variance, batch_norm.eps
        )
        correction, shift = (per_channel(vector, raw.dim(), self.channel_axis) for vector in (correction, shift))
        result = self.compute(features, weight, None) * correction + shift
        # Last, so that all of the above has seen the statistics of before.
        with torch.no_grad():
            self.normalize(raw)
        return result

    def compute_frozen(self, features: Tensor) -> Tensor:
        """The operator once batch norm is folded, in real numbers, before its result is stored."""
        stored = self.stored_weight()
        weight = self.weight_quantizer(stored)
        grid = self.grid(stored)
        return self.compute(features, weight * per_channel(grid.factor, weight.dim(), self.weight_axis), grid.bias)

    def compose(self, *features: Tensor) -> Tensor:
        (given,) = features
        if self.frozen:
            return self.store(self.compute_frozen(given))
        weight = self.weight_quantizer(self.stored_weight())
        batch_norm = self.batch_norm
        if self.folded and batch_norm is not None:
            return self.store(self.compute_folded(given, weight, batch_norm))
        computed = self.compute(given, weight, self.bias())
        quantizer = self.output_quantizer
        if batch_norm is not None and self.bounds is None and batch_norm.can_forward_quantized(computed, quantizer):
            return batch_norm.forward_quantized(computed, self.activation, quantizer, self.channel_axis)
        return self.store(self.normalize(computed))


class TrainingOnly(nn.Module):
    """What there is in training alone, such as dropout; what is stored stays stored."""

    def __init__(
        self,
        expression: Callable[..., Tensor] | None = None,
        sources: Sequence[Source] = (),
        dropout: float = 0.0,
        stop_gradient: bool = False,
    ) -> None:
        """
        Args:
            expression: makes what training goes on with, of `sources` and the tensor itself.
            dropout: share of values that are dropped.
            stop_gradient: no gradient passes.
        """
        super().__init__()
        self.expression = expression
        self._sources = tuple(sources)
        self.dropout = dropout
        self.stop_gradient = stop_gradient

    def forward(self, features: Tensor) -> Tensor:
        if self.stop_gradient:
            return features.detach()
        if not self.training:
            return features
        if self.expression is not None:
            return self.expression(*(source() for source in self._sources), features)
        return F.dropout(features, self.dropout)


class CustomGradient(nn.Module):
    """A tensor as it is, with the gradient of the user's own rule; whatever computed its value passes none."""

    def __init__(self, expression: Callable[..., Tensor], sources: Sequence[Source]) -> None:
        """
        Args:
            expression: the user's function of `sources` and further operands.
        """
        super().__init__()
        self.expression = expression
        self._sources = tuple(sources)

    def gradient_of(self, operands: Sequence[Tensor]) -> Tensor | None:
        """What gives the gradient; None where nothing asks for one."""
        given = [*(source() for source in self._sources), *operands]
        return self.expression(*given) if any(map(is_differentiated, given)) else None

    def forward(self, value: Tensor, *operands: Tensor) -> Tensor:
        gradient_of = self.gradient_of(operands)
        value = value.detach()
        return value if gradient_of is None else straight_through(gradient_of, value)


class Outside(nn.Module):
    """A last function of the device's results: computed in training, left to the program that runs the device."""

    def __init__(self, kind: str, attributes: Mapping[str, Any]) -> None:
        super().__init__()
        self.kind = kind
        self.attributes = dict(attributes)

    def forward(self, features: Tensor) -> Tensor:
        return primitives_torch.FUNCTIONS[self.kind](features, **self.attributes)

    def extra_repr(self) -> str:
        return self.kind
