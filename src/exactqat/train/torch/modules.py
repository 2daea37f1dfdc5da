# SPDX-License-Identifier: Apache-2.0
"""PyTorch modules over the operators, all usable on their own: fake quantization, convolutions with TensorFlow's
padding, depthwise convolution and fused batch norm.

They take and return PyTorch's [batch, channels, height, width]. Inside, the operators see [batch, height, width,
channels]: for a tensor in ``torch.channels_last`` that is the same memory under another view, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import exactqat as eq
from exactqat.torch import fused

from ...planning.rules import Rule
from ..core.ranges import codes_of, nudged
from ..core.weights import factor_and_offset, step_width, weight_codes
from . import primitives as primitives_torch
from .primitives import (
    as_in_autocast,
    channels_first_view,
    channels_last_view,
    fake_quantize,
    is_exporting,
    strides_first,
)
from .ranges import ActivationRange, WeightRange

Pair = int | tuple[int, int]

_fake_quant_rows = fused("fake_quant_rows")
_fake_quant_rows_within = fused("fake_quant_rows_within")
_batch_norm_statistics = fused("batch_norm_statistics")
_quantized_batch_norm = fused("quantized_batch_norm")


def same_padding(size: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    """TensorFlow's SAME along one axis: zeros (before, after) so that the result has ceil(size / stride) positions."""
    total = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
    return total // 2, total - total // 2


def is_recomputing() -> bool:
    """Whether this runs as part of a backward pass, such as when `torch.utils.checkpoint` recomputes."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class FakeQuantize(nn.Module):
    """Rounds an activation to the grid its device tensor will have; gradients as in TensorFlow's operators.

    `observing` is set only by calibration. `quantizing` is off while calibrating. `frozen` fixes the range for good.
    """

    def __init__(self, rule: Rule, nonnegative: bool = False, trained: bool = True) -> None:
        super().__init__()
        self.rule = rule
        self.bits = rule.activation_bits
        self.range = ActivationRange(rule, nonnegative, trained)
        self.observing = False
        self.quantizing = True
        self.frozen = False
        # Integers pass unchanged: indices into a table.
        self.indices = False

    @property
    def observes(self) -> bool:
        """Whether the next tensor moves the range; one recomputed by a checkpoint already has."""
        follows = self.training and not self.frozen and self.range.follows_training_data
        return self.observing or (follows and not is_recomputing())

    def forward(self, activation: Tensor) -> Tensor:
        if self.observes:
            self.range.observe(activation)
        return self.quantize(activation) if self.quantizing and not self.indices else activation

    def quantize(self, activation: Tensor) -> Tensor:
        """The values on the current grid."""
        minimum, maximum = self.range()
        # Images stay in channels_last; what an operator left in the user's order is not permuted for this.
        if activation.dim() == 4 and not (
            activation.is_contiguous() and not activation.is_contiguous(memory_format=torch.channels_last)
        ):
            quantized = fake_quantize(channels_last_view(activation), minimum, maximum, self.bits, narrow_range=False)
            return channels_first_view(quantized)
        return fake_quantize(activation, minimum, maximum, self.bits, narrow_range=False)

    def ends(self) -> tuple[Tensor, Tensor]:
        """The current (min, max), rank 0."""
        ends: tuple[Tensor, Tensor] = self.range()
        return ends

    def scale(self) -> Tensor:
        """The width of one step, rank 0."""
        return step_width(self.range(), self.bits, False)

    def scale_and_zero_point(self) -> tuple[np.float32, int]:
        """The nudged grid: real = scale * (code - zero_point), codes 0..2**bits - 1, in TensorFlow's float32 steps."""
        low, high = (bound.item() for bound in self.range())
        return nudged(low, high, self.bits)

    def codes(self, quantized: Tensor) -> np.ndarray:
        """Codes 0..2**bits - 1 of what `forward` returned, int64, same shape."""
        return codes_of(quantized.detach().cpu().numpy(), *self.scale_and_zero_point())

    def extra_repr(self) -> str:
        return f"bits={self.bits}"


class WeightFakeQuantize(nn.Module):
    """Rounds a weight to its grid, with one scale per output channel (or a single one, by the rule)."""

    def __init__(
        self,
        rule: Rule,
        weight: Tensor,
        channel_axis: int = 0,
        bits: int | None = None,
        range_end: np.ndarray | None = None,
    ) -> None:
        """
        Args:
            weight: as `forward` will get it; learned ranges start from it.
            channel_axis: the weight's axis of output channels.
            bits: for a constant that is not a weight; for weights the rule says.
            range_end: see `planning.plans.Weights`.
        """
        super().__init__()
        self.rule = rule
        self.bits = rule.weight_bits if bits is None else bits
        self.channel_axis = channel_axis
        self.range = WeightRange(rule, self._channels_last(weight.detach()), range_end)
        self.quantizing = True

    def _channels_last(self, weight: Tensor) -> Tensor:
        return weight.movedim(self.channel_axis, -1) if weight.dim() else weight

    def forward(self, weight: Tensor) -> Tensor:
        """weight: with its output channels along `channel_axis`, [out_channels, ...] if that is 0."""
        if not self.quantizing:
            return weight
        if self._by_rows(weight):
            # Every dense weight has its output channels outermost: nothing is permuted, unlike in the general case.
            rows = weight.dim() == 4 and not weight.is_contiguous()
            dense = weight.permute(0, 2, 3, 1).contiguous() if rows else weight.contiguous()
            if self.range.learned:
                magnitudes = self.range.magnitudes()
                quantized = _fake_quant_rows_within(dense, magnitudes, self.bits, self.rule.narrow_range)
            else:
                quantized = _fake_quant_rows(dense, self.bits, self.rule.narrow_range)
            return channels_first_view(quantized) if rows else quantized
        channels_last = self._channels_last(weight).contiguous()
        low, high = self.range(channels_last)
        quantized = fake_quantize(channels_last, low, high, self.bits, self.rule.narrow_range)
        return quantized.movedim(-1, self.channel_axis) if weight.dim() else quantized

    def _by_rows(self, weight: Tensor) -> bool:
        """Whether there is a CPU operator: for ranges symmetric around zero, learned or each channel's largest
        magnitude."""
        range_ = self.range
        return (
            self.channel_axis == 0
            and weight.dim() > 0
            and weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and weight.numel() > 0
            and type(range_) is WeightRange
            and self.bits == self.rule.weight_bits
            and not (range_._forward_hooks or range_._forward_pre_hooks)
            and self.rule.symmetric
            and self.rule.per_channel
        )

    def scale(self, weight: Tensor) -> Tensor:
        """The step width for every output channel, [out_channels]; 0 for a channel whose range is zero."""
        scale = step_width(self.range(self._channels_last(weight)), self.bits, self.rule.narrow_range)
        return scale.expand(weight.shape[self.channel_axis] if weight.dim() else 1)

    @torch.no_grad()
    def codes(self, weight: Tensor) -> np.ndarray:
        """Integer codes around zero, int64, shape of `weight`; for symmetric narrow rules only."""
        quantized, scale = (each.cpu().numpy() for each in (self(weight), self.scale(weight)))
        return weight_codes(np.atleast_1d(quantized), scale, self.channel_axis).reshape(weight.shape)


class Conv2d(nn.Conv2d):
    """`torch.nn.Conv2d` that also takes TensorFlow's padding for any stride; same parameters and state.

    Args:
        padding: ``"SAME"`` (result has ceil(size / stride) positions; surplus zeros go after), ``"VALID"`` (no padding)
            or torch's numbers (as many zeros on both sides). The rest as in `torch.nn.Conv2d`.

    Raises:
        ValueError: another padding word, or a padding mode other than zeros.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: str | Pair = "SAME",
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        **factory: Any,
    ) -> None:
        if isinstance(padding, str) and padding not in ("SAME", "VALID"):
            raise ValueError(f"padding must be 'SAME', 'VALID' or numbers, got {padding!r}")
        numbers = 0 if isinstance(padding, str) else padding
        super().__init__(in_channels, out_channels, kernel_size, stride, numbers, dilation, groups, bias, **factory)
        if self.padding_mode != "zeros":
            raise ValueError(f"padding_mode must be 'zeros', got {self.padding_mode!r}")
        self.padding_rule = padding if isinstance(padding, str) else "numbers"

    def pads(self, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Zeros (before, after) the rows and the columns of an input of that size."""
        first, second = (
            same_padding(size, kernel, stride, dilation) if self.padding_rule == "SAME" else (number, number)
            for size, kernel, stride, dilation, number in zip(
                (height, width),
                self.kernel_size,
                self.stride,
                self.dilation,
                cast(tuple[int, int], self.padding),
                strict=True,
            )
        )
        return first, second

    def convolve(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution with a given weight and bias instead of the module's own."""
        rows, columns = self.pads(features.shape[2], features.shape[3])
        if rows[0] == rows[1] and columns[0] == columns[1]:
            padding = (rows[0], columns[0])
        else:
            features = F.pad(features, (*columns, *rows))
            padding = (0, 0)
        features, strides = strides_first(features, weight, self.stride, padding)
        return F.conv2d(features, weight, bias, strides, padding, self.dilation, self.groups)

    def forward(self, features: Tensor) -> Tensor:
        return self.convolve(features, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, padding_rule={self.padding_rule}"


class DepthwiseConv2d(Conv2d):
    """Every channel convolved on its own, through this library's operator.

    State-dict compatible with ``torch.nn.Conv2d(channels, channels * channel_multiplier, groups=channels)``: the weight
    is [channels * channel_multiplier, 1, height, width].

    Args:
        channel_multiplier: results per input channel; results of the same input channel are neighbours.
        The rest as in `Conv2d`.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: str | Pair = "SAME",
        dilation: Pair = 1,
        channel_multiplier: int = 1,
        bias: bool = True,
        **factory: Any,
    ) -> None:
        super().__init__(
            channels,
            channels * channel_multiplier,
            kernel_size,
            stride,
            padding,
            dilation,
            groups=channels,
            bias=bias,
            **factory,
        )
        self.channel_multiplier = channel_multiplier

    def convolve(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if is_exporting():
            # Capturing reads what is computed; the operator does not matter there.
            return super().convolve(features, weight, bias)
        features, weight, bias = as_in_autocast(features, weight, bias)
        height, width = weight.shape[2:]
        filter_ = weight.permute(2, 3, 1, 0).reshape(height, width, self.in_channels, self.channel_multiplier)
        rows, columns = self.pads(features.shape[2], features.shape[3])
        convolved = eq.nn.depthwise_conv2d(
            channels_last_view(features),
            filter_.contiguous(),
            strides=[1, *self.stride, 1],
            padding=[[0, 0], list(rows), list(columns), [0, 0]],
            dilations=list(self.dilation),
        )
        if bias is not None:
            convolved = convolved + bias
        return channels_first_view(convolved)


class BatchNormTensors(NamedTuple):
    """What batch norm works with: all [channels], except `batches`, which counts training batches."""

    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    variance: Tensor
    batches: Tensor | None


class FusedBatchNorm(nn.Module):
    """Batch norm by TensorFlow's fused operator, for tensors of any rank; `tensors` says where its tensors are."""

    eps: float
    momentum: float | None

    def tensors(self) -> BatchNormTensors:
        """The current parameters and statistics."""
        raise NotImplementedError

    def _scale_and_offset(self, tensors: BatchNormTensors) -> tuple[Tensor, Tensor]:
        weight, bias, mean, *_ = tensors
        return torch.ones_like(mean) if weight is None else weight, torch.zeros_like(mean) if bias is None else bias

    def _count_batch(self, features: Tensor, tensors: BatchNormTensors) -> float:
        """The share of this training batch in the running statistics."""
        if features.numel() == tensors.mean.numel():
            raise ValueError(
                f"a training batch needs more than one value per channel, got shape {list(features.shape)}"
            )
        if tensors.batches is not None:
            tensors.batches.add_(1)
        return 1.0 / float(cast(Tensor, tensors.batches)) if self.momentum is None else self.momentum

    def normalize(self, features: Tensor, channel_axis: int = 1) -> Tensor:
        """Batch norm along `channel_axis`; moves the running statistics in training."""
        tensors = self.tensors()
        scale, offset = self._scale_and_offset(tensors)
        factor = self._count_batch(features, tensors) if self.training else 1.0
        mean, variance = tensors.mean, tensors.variance
        image = features.dim() == 4 and channel_axis == 1
        moved = features if image else features.movedim(channel_axis, -1)
        result = eq.raw_ops.FusedBatchNormV3(
            x=channels_last_view(features) if image else moved.reshape(-1, 1, 1, mean.numel()),
            scale=scale,
            offset=offset,
            # Copies in training: the operator keeps its operands for the backward pass, and the statistics change
            # below.
            mean=mean.clone() if self.training else mean,
            variance=variance.clone() if self.training else variance,
            epsilon=self.eps,
            exponential_avg_factor=factor,
            is_training=self.training,
        )
        if self.training:
            with torch.no_grad():
                mean.copy_(result.batch_mean)
                variance.copy_(result.batch_variance)
        return channels_first_view(result.y) if image else result.y.reshape(moved.shape).movedim(-1, channel_axis)

    def forward_quantized(
        self, features: Tensor, activation: str, quantizer: FakeQuantize, channel_axis: int = 1
    ) -> Tensor:
        """Batch norm in training, the activation and `quantizer` in two passes over memory instead of six.

        The same bits as one by one; requires `can_forward_quantized`.

        Args:
            features: channels along `channel_axis`.
            activation: NONE, RELU or RELU6.
        """
        tensors = self.tensors()
        mean, variance = tensors.mean, tensors.variance
        scale, offset = self._scale_and_offset(tensors)
        factor = self._count_batch(features, tensors)
        image = features.dim() == 4 and channel_axis == 1
        x = channels_last_view(features) if image else features.movedim(channel_axis, -1).contiguous()
        with torch.no_grad():
            new_mean, new_variance, precise_mean, precise_variance, low, high = _batch_norm_statistics(
                x, scale, offset, mean, variance, self.eps, factor, activation
            )
            mean.copy_(new_mean)
            variance.copy_(new_variance)
        range_ = quantizer.range
        if quantizer.observes:
            range_.observe_ends(low, high)
        minimum, maximum = range_.at_this_moment()
        outputs = _quantized_batch_norm(
            x,
            scale,
            offset,
            precise_mean,
            precise_variance,
            minimum,
            maximum,
            self.eps,
            activation,
            quantizer.bits,
            False,
            minimum.requires_grad or maximum.requires_grad,
        )
        return channels_first_view(outputs) if image else outputs.movedim(-1, channel_axis)

    def can_forward_quantized(self, features: Tensor, quantizer: FakeQuantize) -> bool:
        """Whether `forward_quantized` does what the modules would: in training on the CPU in float32, while nothing
        looks at what is between them."""
        range_ = quantizer.range
        return (
            self.training
            and features.device.type == "cpu"
            and features.dtype == torch.float32
            # Subclasses, such as those that share statistics between processes, do something else.
            and type(self) in (FusedBatchNorm2d, LayerBatchNorm)
            and (type(quantizer), type(range_)) == (FakeQuantize, ActivationRange)
            and quantizer.quantizing
            and not quantizer.observing
            # Percentiles do not follow from the extremes.
            and not (quantizer.observes and range_.policy == "percentile")
            and not (self._forward_hooks or self._forward_pre_hooks or self._backward_hooks)
            and not (quantizer._forward_hooks or quantizer._forward_pre_hooks or quantizer._backward_hooks)
            and not (range_._forward_hooks or range_._forward_pre_hooks)
        )

    def factor_and_offset(self) -> tuple[Tensor, Tensor]:
        """Inference as ``factor * x + offset`` for each channel, both [channels]; a gamma of 0 gives a factor of 0."""
        weight, bias, mean, variance, _ = self.tensors()
        # A copy in training, as the statistics change before the backward pass.
        mean = mean.clone() if self.training else mean
        return factor_and_offset(primitives_torch, weight, bias, mean, variance, self.eps)


class FusedBatchNorm2d(FusedBatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` computed by TensorFlow's fused batch norm; same parameters and state.

    As in both frameworks, a training batch is normalized with its biased variance and the running variance takes the
    unbiased one. `momentum` is PyTorch's: the share of the new batch (``None``: the mean of all batches), which is
    TensorFlow's ``exponential_avg_factor``.

    Raises:
        ValueError: `track_running_stats` is off; the device needs the statistics.
    """

    def __init__(self, num_features: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_features, *args, **kwargs)
        if not self.track_running_stats:
            raise ValueError("track_running_stats must be True: inference uses the running statistics")

    def tensors(self) -> BatchNormTensors:
        return batch_norm_tensors(self)

    def forward(self, features: Tensor) -> Tensor:
        self._check_input_dim(features)
        # As in `DepthwiseConv2d.convolve`.
        return nn.BatchNorm2d.forward(self, features) if is_exporting() else self.normalize(features)


def batch_norm_tensors(module: nn.BatchNorm1d | nn.BatchNorm2d) -> BatchNormTensors:
    """The tensors of a PyTorch batch norm."""
    mean, variance = cast(Tensor, module.running_mean), cast(Tensor, module.running_var)
    return BatchNormTensors(module.weight, module.bias, mean, variance, module.num_batches_tracked)


class LayerBatchNorm(FusedBatchNorm):
    """The batch norm of a layer. Its tensors are kept elsewhere, as those of the user's model, and may serve other
    layers.

    Args:
        weight, bias, mean, variance, batches: return the tensors of `BatchNormTensors`, or None.
        follows: whether the statistics follow training batches; otherwise the user has frozen them.
    """

    def __init__(
        self,
        weight: Callable[[], Tensor] | None,
        bias: Callable[[], Tensor] | None,
        mean: Callable[[], Tensor],
        variance: Callable[[], Tensor],
        batches: Callable[[], Tensor] | None,
        epsilon: float,
        momentum: float | None,
        follows: bool = True,
    ) -> None:
        super().__init__()
        self._sources = (weight, bias, mean, variance, batches)
        self.eps = epsilon
        self.momentum = momentum
        self.follows = follows

    def tensors(self) -> BatchNormTensors:
        return BatchNormTensors(*(None if source is None else source() for source in self._sources))  # type: ignore[arg-type]

    @property
    def epsilon(self) -> float:
        return self.eps

    def beta_and_variance(self) -> tuple[Tensor | None, Tensor]:
        """The trained offset, or None, and the running variance; [channels]."""
        _, beta, _, variance, _ = self.tensors()
        return beta, variance

    def stored(self, features: Tensor, activation: str, quantizer: FakeQuantize, channel_axis: int) -> Tensor | None:
        """Batch norm in training, the activation and `quantizer` in one, if there is an operator for it."""
        if not self.can_forward_quantized(features, quantizer):
            return None
        return self.forward_quantized(features, activation, quantizer, channel_axis)

    def train(self, mode: bool = True) -> LayerBatchNorm:
        return super().train(mode and self.follows)

    def forward(self, features: Tensor, channel_axis: int = 1) -> Tensor:
        return self.normalize(features, channel_axis)

    def extra_repr(self) -> str:
        return f"eps={self.eps}, momentum={self.momentum}"
