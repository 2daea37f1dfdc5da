# SPDX-License-Identifier: Apache-2.0
"""The layers of a prepared network, each one operator of the device with the tensor it stores.

They hold what a step works with; `train.core.steps` says what it computes. A frozen layer's device integers come from
`frozen`; `compose` is the same in real numbers and fake quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.steps import Step, WeightedStep
from . import primitives as primitives_torch
from .modules import FakeQuantize, LayerBatchNorm, WeightFakeQuantize
from .owners import BEFORE
from .straight_through import is_differentiated, straight_through

# A tensor that does not depend on the input, at its current value.
Source = Callable[[], Tensor]


class ModuleTensor:
    """The parameter or buffer that a module holds under a name."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        self.owner = owner
        self.name = name

    def __call__(self) -> Tensor:
        return self.tensor()

    def tensor(self) -> Tensor:
        """The held tensor itself."""
        held: Tensor | None = self.owner._parameters.get(self.name)
        if held is None:
            held = self.owner._buffers.get(self.name)
        if held is None:
            raise RuntimeError(
                f"'{self.name}' of the prepared model's {type(self.owner).__name__} was taken away: {BEFORE}"
            )
        return held


class Computed:
    """What a function computes from other such tensors, recomputed at every call so that gradients reach them."""

    def __init__(self, function: Callable[..., Tensor], sources: Sequence[Source]) -> None:
        self.function = function
        self.sources = tuple(sources)

    def __call__(self) -> Tensor:
        return self.function(*(source() for source in self.sources))


class ConstantOperand(nn.Module):
    """An operand that does not depend on the input, on its own grid: symmetric, narrow, one scale."""

    def __init__(self, source: Source, quantizer: WeightFakeQuantize, output_quantizer: FakeQuantize) -> None:
        super().__init__()
        self.source = source
        self.quantizer = quantizer
        # In a tuple, so that the quantizer is not registered as a child a second time.
        self._quantizers = (output_quantizer,)

    def forward(self) -> Tensor:
        return cast(Tensor, self.quantizer(self.source()))


class SharedConstant(nn.Module):
    """An operand that does not depend on the input, of an operator that moves codes: it is on the result's grid."""

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
        """Whether it can compute what is currently wanted."""
        raise NotImplementedError

    def layer(self, path: str, layer: QuantizedLayer, features: Sequence[Tensor]) -> Tensor:
        """A layer's result from real numbers on the grids of its operands."""
        raise NotImplementedError


class QuantizedLayer(Step, nn.Module):
    """A layer without weights: an operator of the device, its constant operands and the quantizer of its result; see
    `Step`."""

    primitives = primitives_torch

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
            source: the quantizer of the first tensor it reads; None for an input.
            constants: by their position among the operands.
        """
        nn.Module.__init__(self)
        self.kind = kind
        self.attributes = dict(attributes)
        self.activation = activation
        self.bounds = bounds
        self.high = high
        self.frozen = False
        self.constants = dict(constants or {})
        for position, constant in (constants or {}).items():
            self.add_module(f"operand_{position}", constant)
        # In a tuple, as only one of the layers that share a quantizer has it as its child.
        self._quantizers = (output_quantizer, source)
        self._integers: tuple[Integers, str] | None = None

    @property
    def output_quantizer(self) -> FakeQuantize:
        return self._quantizers[0]

    @property
    def source(self) -> FakeQuantize:
        return cast(FakeQuantize, self._quantizers[1])

    def compute_with(self, integers: Integers, path: str) -> None:
        """Lets a frozen layer compute the device's integers; `path`: its own in the plan."""
        self._integers = (integers, path)

    def forward(self, *features: Tensor) -> Tensor:
        if self.frozen and self._integers is not None and self._integers[0].ready():
            integers, path = self._integers
            return integers.layer(path, self, features)
        return self.compose(*features)

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


class WeightedLayer(WeightedStep, QuantizedLayer):
    """A layer with weights; see `WeightedStep`. The weight and the bias are elsewhere in the model, under the user's
    names, and may serve several layers.

    Attributes:
        of_all_processes: whether statistics must be those of all processes; off if each one runs on the same data.
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
        QuantizedLayer.__init__(self, kind, attributes, output_quantizer, **rest)
        self.weight_source = weight
        self.bias_source = bias
        self.batch_norm = batch_norm
        self.folded = folded
        self._weight_quantizers = (weight_quantizer,)

    @property
    def weight_quantizer(self) -> WeightFakeQuantize:
        return self._weight_quantizers[0]

    def statistics(self, raw: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
        if self.of_all_processes and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                "Rule.fold_batch_norm needs the statistics of all processes: train inside qat.distributed.synchronized"
            )
        # Under autocast `raw` may have 16 bits, too few for statistics.
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
        variance, mean = torch.var_mean(raw, list(axes), unbiased=False)
        return mean, variance


class TrainingOnly(nn.Module):
    """What exists in training alone, such as dropout; what is stored stays stored."""

    def __init__(
        self,
        expression: Callable[..., Tensor] | None = None,
        sources: Sequence[Source] = (),
        dropout: float = 0.0,
        stop_gradient: bool = False,
    ) -> None:
        """
        Args:
            expression: computes what training continues with, from `sources` and the tensor itself.
            dropout: share of dropped values.
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
    """An unchanged tensor, with the gradient of the user's own rule; whatever computed its value passes none."""

    def __init__(self, expression: Callable[..., Tensor], sources: Sequence[Source]) -> None:
        """
        Args:
            expression: the user's function of `sources` and further operands.
        """
        super().__init__()
        self.expression = expression
        self._sources = tuple(sources)

    def gradient_of(self, operands: Sequence[Tensor]) -> Tensor | None:
        """The tensor that provides the gradient; None if none is needed."""
        given = [*(source() for source in self._sources), *operands]
        return self.expression(*given) if any(map(is_differentiated, given)) else None

    def forward(self, value: Tensor, *operands: Tensor) -> Tensor:
        gradient_of = self.gradient_of(operands)
        value = value.detach()
        return value if gradient_of is None else straight_through(gradient_of, value)


class Outside(nn.Module):
    """A final function of the device's results: computed in training, left to the program that runs the device."""

    def __init__(self, kind: str, attributes: Mapping[str, Any]) -> None:
        super().__init__()
        self.kind = kind
        self.attributes = dict(attributes)

    def forward(self, features: Tensor) -> Tensor:
        return primitives_torch.FUNCTIONS[self.kind](features, **self.attributes)

    def extra_repr(self) -> str:
        return self.kind
