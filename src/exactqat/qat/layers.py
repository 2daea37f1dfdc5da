# SPDX-License-Identifier: Apache-2.0
"""The layers of a prepared network, each one operator of the device with the tensor that it stores.

`prepare` builds them. Until `frozen`, batch norm runs on the batch's statistics; once frozen, a layer computes what the
device computes: batch norm folded into the weights, the bias on the int32 grid of ``input scale * weight scale``.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .modules import Conv2d, FakeQuantize, FusedBatchNorm2d, WeightFakeQuantize, same_padding

Pads = tuple[tuple[int, int], tuple[int, int]]
LARGEST_BIAS_CODE = 2.0**30
# Sums are below 2**31; twice the smallest multiplier that the device takes.
SMALLEST_MULTIPLIER = 2.0**-31


class ChannelGrid(NamedTuple):
    """How a layer stands on the device, per output channel; all [out_channels].

    factor: what the quantized weight is multiplied by (batch norm's scale; 0 for a constant channel).
    weight_scale: positive; the device's scale of the weight codes.
    bias_code: the bias as a whole number of ``input scale * weight_scale``, float32.
    bias: what those codes stand for, with the gradient of the bias.
    """

    factor: Tensor
    weight_scale: Tensor
    bias_code: Tensor
    bias: Tensor


def channel_grid(
    factor: Tensor, bias: Tensor, raw_scale: Tensor, input_scale: Tensor, output_scale: Tensor
) -> ChannelGrid:
    """Folds batch norm's `factor` into the weight's `raw_scale` and puts the bias on the accumulator's grid.

    The integer weight codes stay what they are, except that a negative factor turns their signs. A channel is constant
    if its factor or its weights are zero, or if they are so small that they cannot matter: the largest possible sum
    would move the result by less than a step, or the bias is more than 2**30 steps of its own grid. It keeps only its
    bias, on a grid 256 times finer than that of the result.
    """
    scale = raw_scale * factor.abs()
    step = scale * input_scale
    alive = (step > SMALLEST_MULTIPLIER * output_scale) & (bias.abs() <= LARGEST_BIAS_CODE * step)
    scale = torch.where(alive, scale, output_scale / input_scale / 256)
    step = input_scale * scale
    code = (bias / step).detach().round()
    # Straight through: the value is exactly the grid's (the bracket is 0), the gradient is that of the bias.
    on_grid = (code * step).detach() + (bias - bias.detach())
    return ChannelGrid(torch.where(alive, factor, 0.0), scale, code, on_grid)


def fold(weight: Tensor, batch_norm: FusedBatchNorm2d) -> Tensor:
    """The weight times batch norm's factor for each output channel."""
    factor, _ = batch_norm.factor_and_offset()
    return weight * factor.reshape(-1, *[1] * (weight.dim() - 1))


def activate(features: Tensor, activation: str) -> Tensor:
    """Applies NONE, RELU or RELU6."""
    if activation == "RELU6":
        return F.relu6(features)
    return F.relu(features) if activation == "RELU" else features


class QuantizedLayer(nn.Module):
    """What all layers share: the name of their activation and the quantizer of the stored result.

    Attributes:
        bounds: what the function itself is clamped to, as a hard sigmoid is to (0, 1). The stored range is the same, so
            the device needs no operator for it; the float network that `calibrate` runs does.
    """

    def __init__(self, output_quantizer: FakeQuantize, activation: str = "NONE") -> None:
        super().__init__()
        self.output_quantizer = output_quantizer
        self.activation = activation
        self.bounds: tuple[float, float] | None = None
        self.frozen = False

    def replace_quantizers(self, old: list[FakeQuantize], new: FakeQuantize) -> None:
        """Takes `new` wherever the layer now has one of `old`."""
        if self.output_quantizer in old:
            self.output_quantizer = new

    def store(self, features: Tensor) -> Tensor:
        """Activation, then the grid of the stored tensor."""
        features = activate(features, self.activation)
        return self.output_quantizer(features if self.bounds is None else features.clamp(*self.bounds))


class QuantizedInput(QuantizedLayer):
    """The network's input as the device gets it."""

    def forward(self, features: Tensor) -> Tensor:
        if features.dim() == 4:
            features = features.contiguous(memory_format=torch.channels_last)
        return self.store(features)


class WeightedLayer(QuantizedLayer):
    """A layer with weights."""

    def __init__(
        self,
        operation: Conv2d | nn.Linear,
        weight_quantizer: WeightFakeQuantize,
        output_quantizer: FakeQuantize,
        activation: str,
        source: FakeQuantize,
        batch_norm: FusedBatchNorm2d | None = None,
    ) -> None:
        """
        Args:
            source: the quantizer of the tensor this layer reads; it stays another layer's child.
        """
        super().__init__(output_quantizer, activation)
        self.operation = operation
        self.weight_quantizer = weight_quantizer
        self.batch_norm = batch_norm
        self.folded = batch_norm is not None and weight_quantizer.rule.fold_batch_norm
        # In a tuple, so that the quantizer is not registered as a child a second time.
        self._source = (source,)

    def replace_quantizers(self, old: list[FakeQuantize], new: FakeQuantize) -> None:
        super().replace_quantizers(old, new)
        if self.source in old:
            self._source = (new,)

    @property
    def source(self) -> FakeQuantize:
        """The quantizer of the tensor this layer reads."""
        return self._source[0]

    def stored_weight(self) -> Tensor:
        """What is quantized: the weight, under `Rule.fold_batch_norm` times batch norm's factor."""
        weight = self.operation.weight
        return fold(weight, self.batch_norm) if self.folded and self.batch_norm is not None else weight

    def grid(self) -> ChannelGrid:
        """The layer on the device, from the weights, ranges and statistics of this moment."""
        weight = self.stored_weight()
        bias = self.operation.bias if self.operation.bias is not None else weight.new_zeros(weight.shape[0])
        factor = torch.ones_like(bias)
        if self.batch_norm is not None:
            factor, offset = self.batch_norm.factor_and_offset()
            bias = bias * factor + offset
        if self.folded:
            factor = torch.ones_like(bias)
        scales = (self.weight_quantizer.scale(weight), self.source.scale(), self.output_quantizer.scale())
        return channel_grid(factor, bias, *(scale.detach() for scale in scales))

    def compute(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The linear operation with a given weight and bias."""
        if not isinstance(self.operation, Conv2d):
            return F.linear(features, weight, bias)
        if features.dim() == 2:
            return self.operation.convolve(features[:, :, None, None], weight, bias)[:, :, 0, 0]
        return self.operation.convolve(features, weight, bias)

    def normalize(self, features: Tensor) -> Tensor:
        """Batch norm, if the layer has one."""
        if self.batch_norm is None:
            return features
        if features.dim() == 2:
            return self.batch_norm(features[:, :, None, None])[:, :, 0, 0]
        return self.batch_norm(features)

    def statistics(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of each channel of a batch, for a folded batch norm."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                "Rule.fold_batch_norm needs the statistics of all processes: train inside qat.distributed.synchronized"
            )
        variance, mean = torch.var_mean(raw, [axis for axis in range(raw.dim()) if axis != 1], unbiased=False)
        return mean, variance

    def compute_folded(self, features: Tensor, weight: Tensor, batch_norm: FusedBatchNorm2d) -> Tensor:
        """Convolution and batch norm in one, before `freeze`: TensorFlow's fold with correction.

        The quantized weight holds the running deviation, which is steady; in training the result is brought to the
        batch's own.
        """
        factor, offset = batch_norm.factor_and_offset()
        bias = self.operation.bias
        if not self.training:
            return self.compute(features, weight, offset if bias is None else bias * factor + offset)
        raw = self.compute(features, self.operation.weight, bias)
        mean, variance = self.statistics(raw)
        running = torch.sqrt(cast(Tensor, batch_norm.running_var) + batch_norm.eps)
        correction = running / torch.sqrt(variance + batch_norm.eps)
        beta = batch_norm.bias if batch_norm.affine else torch.zeros_like(mean)
        # A bias of the convolution is part of the mean, and batch norm takes it away.
        shift = beta - factor * correction * (mean if bias is None else mean - bias)
        shape = (1, -1, *[1] * (raw.dim() - 2))
        result = self.compute(features, weight, None) * correction.reshape(shape) + shift.reshape(shape)
        # Last, so that all of the above has seen the statistics of before.
        with torch.no_grad():
            self.normalize(raw)
        return result

    def forward(self, features: Tensor) -> Tensor:
        weight = self.weight_quantizer(self.stored_weight())
        if self.frozen:
            grid = self.grid()
            shape = (-1, *[1] * (weight.dim() - 1))
            return self.store(self.compute(features, weight * grid.factor.reshape(shape), grid.bias))
        if self.folded and self.batch_norm is not None:
            return self.store(self.compute_folded(features, weight, self.batch_norm))
        computed = self.compute(features, weight, self.operation.bias)
        if (
            self.batch_norm is not None
            and self.bounds is None
            and self.batch_norm.can_forward_quantized(computed, self.output_quantizer)
        ):
            return self.batch_norm.forward_quantized(computed, self.activation, self.output_quantizer)
        return self.store(self.normalize(computed))


class QuantizedAdd(QuantizedLayer):
    """The sum of two stored tensors."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.store(first + second)


class QuantizedMultiply(QuantizedLayer):
    """The product of two stored tensors; the second may be [batch, channels, 1, 1]."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.store(first * second)


class QuantizedConcatenation(QuantizedLayer):
    """Stored tensors joined along the channels. They share one quantizer, so that the device copies codes."""

    def forward(self, *features: Tensor) -> Tensor:
        return torch.cat(features, 1)


class QuantizedPool(QuantizedLayer):
    """What pooling layers share: they keep the quantizer of the tensor they read.

    Attributes:
        window, strides: (rows, columns).
        pads: zeros (before, after) the rows and the columns that the layer itself puts round its input.
    """

    def __init__(
        self,
        output_quantizer: FakeQuantize,
        window: tuple[int, int],
        strides: tuple[int, int],
        padding: str | Pads,
    ) -> None:
        """
        Args:
            padding: ``"VALID"``, ``"SAME"`` (only real values take part; the surplus goes after), or the zeros to put
                round the input.
        """
        super().__init__(output_quantizer)
        self.window = window
        self.strides = strides
        self.padding = padding

    def pads(self, features: Tensor) -> Pads:
        """Positions (before, after) the rows and the columns that the windows reach beyond `features`."""
        if not isinstance(self.padding, str):
            return self.padding
        if self.padding == "VALID":
            return (0, 0), (0, 0)
        rows, columns = (
            same_padding(size, window, stride, 1)
            for size, window, stride in zip(features.shape[2:], self.window, self.strides, strict=True)
        )
        return rows, columns

    def pad(self, features: Tensor, value: float) -> Tensor:
        """`features` with `value` wherever the windows reach beyond it."""
        rows, columns = self.pads(features)
        return F.pad(features, (*columns, *rows), value=value) if any(rows + columns) else features


class QuantizedMaxPool(QuantizedPool):
    """The largest value of every window: always one of the stored values, so nothing is rounded."""

    def forward(self, features: Tensor) -> Tensor:
        fill = -torch.inf if self.padding == "SAME" else 0.0
        return F.max_pool2d(self.pad(features, fill), self.window, self.strides)


class QuantizedAveragePool(QuantizedPool):
    """The mean of every window, rounded as the device rounds it: half away from zero in int8 codes.

    Averages of small windows are often exactly between two codes, so another rounding would show.
    """

    def __init__(
        self,
        output_quantizer: FakeQuantize,
        window: tuple[int, int],
        strides: tuple[int, int],
        padding: str | Pads,
        stored_high: bool,
    ) -> None:
        """
        Args:
            stored_high: codes of fewer than eight bits stand at the top of int8, not at its bottom.
        """
        super().__init__(output_quantizer, window, strides, padding)
        self.stored_high = stored_high

    def sums(self, features: Tensor) -> Tensor:
        """The sum of every window; what is beyond the features counts as 0."""
        return F.avg_pool2d(self.pad(features, 0.0), self.window, self.strides, divisor_override=1)

    def forward(self, features: Tensor) -> Tensor:
        # Zeros that are really put there are values as good as any other.
        counted = features.new_ones((1, 1, *features.shape[2:]))
        count = self.sums(counted) if self.padding == "SAME" else float(self.window[0] * self.window[1])
        mean = self.sums(features) / count
        quantizer = self.output_quantizer
        if not quantizer.quantizing:
            return mean
        with torch.no_grad():
            scale = quantizer.scale()
            zero_point = quantizer.scale_and_zero_point()[1] - 128 + self.stored_high * (256 - 2**quantizer.bits)
            steps = self.sums(torch.round(features / scale))
            # Sums of fewer than 2**16 codes: every number below is a whole one that float32 holds.
            total = steps + zero_point * count
            half = torch.floor(count / 2) if isinstance(count, Tensor) else count // 2
            codes = total.sign() * torch.div(total.abs() + half, count, rounding_mode="floor")
            on_grid = (codes - zero_point) * scale
        return on_grid + (mean - mean.detach())


class QuantizedMean(QuantizedLayer):
    """The mean over height and width."""

    def __init__(self, output_quantizer: FakeQuantize, keep_dims: bool) -> None:
        super().__init__(output_quantizer)
        self.keep_dims = keep_dims

    def forward(self, features: Tensor) -> Tensor:
        return self.store(features.mean((2, 3), keepdim=self.keep_dims))
