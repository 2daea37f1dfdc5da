# SPDX-License-Identifier: Apache-2.0
"""Layers with TensorFlow's arithmetic, usable in any network: convolutions with its padding, depthwise convolution and
fused batch norm.

They take and return PyTorch's [batch, channels, height, width]. Inside, the operators see [batch, height, width,
channels]: for a tensor in ``torch.channels_last`` that is the same memory under another view, and nothing is copied.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

import exactqat as eq

from ....kit.device.arithmetic import same_padding
from .primitives import channels_first_view, channels_last_view, depthwise, is_exporting, strides_first

Pair = int | tuple[int, int]


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
        if self.padding_rule != "SAME":
            rows, columns = cast(tuple[int, int], self.padding)
            return (rows, rows), (columns, columns)
        windows = zip((height, width), self.kernel_size, self.stride, self.dilation, strict=True)
        first, second = (same_padding(*window) for window in windows)
        return first, second

    def convolve(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution with a given weight and bias instead of the module's own."""
        rows, columns = self.pads(*features.shape[2:])
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
        results = channels * channel_multiplier
        super().__init__(channels, results, kernel_size, stride, padding, dilation, channels, bias, **factory)
        self.channel_multiplier = channel_multiplier

    def convolve(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if is_exporting():
            # Capturing reads what is computed; the operator does not matter there.
            return super().convolve(features, weight, bias)
        return depthwise(features, weight, bias, self.stride, self.pads(*features.shape[2:]), self.dilation)


class BatchNormTensors(NamedTuple):
    """What batch norm works with: all [channels], except `batches`, which counts training batches."""

    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    variance: Tensor
    batches: Tensor | None


def scale_and_offset(tensors: BatchNormTensors) -> tuple[Tensor, Tensor]:
    """Gamma and beta, or what they are where a batch norm has none."""
    weight, bias, mean, *_ = tensors
    return torch.ones_like(mean) if weight is None else weight, torch.zeros_like(mean) if bias is None else bias


def require_several(x: Tensor, tensors: BatchNormTensors) -> None:
    """Refuses a training batch with one value for each channel."""
    if x.numel() == tensors.mean.numel():
        raise ValueError(f"a training batch needs more than one value per channel, got shape {list(x.shape)}")


def share_of_batch(tensors: BatchNormTensors, momentum: float | None) -> float:
    """Counts a training batch; its share in the running statistics. momentum: None for the mean of all batches."""
    if tensors.batches is not None:
        tensors.batches.add_(1)
    if momentum is not None:
        return momentum
    # As in PyTorch: without a count, they stay.
    return 0.0 if tensors.batches is None else 1.0 / float(tensors.batches)


def normalized(
    x: Tensor, tensors: BatchNormTensors, epsilon: float, training: bool, share: float | None, channel_axis: int = 1
) -> Tensor:
    """Batch norm along `channel_axis` by TensorFlow's fused operator, for tensors of any rank.

    share: of this batch in the running statistics, which move in training; None: they stay.
    """
    scale, offset = scale_and_offset(tensors)
    mean, variance = tensors.mean, tensors.variance
    image = x.dim() == 4 and channel_axis == 1
    moved = x if image else x.movedim(channel_axis, -1)
    result = eq.raw_ops.FusedBatchNormV3(
        x=channels_last_view(x) if image else moved.reshape(-1, 1, 1, mean.numel()),
        scale=scale,
        offset=offset,
        # Copies in training: the operator keeps its operands for the backward pass, and the statistics change below.
        mean=mean.clone() if training else mean,
        variance=variance.clone() if training else variance,
        epsilon=epsilon,
        exponential_avg_factor=1.0 if share is None else share,
        is_training=training,
    )
    if training and share is not None:
        with torch.no_grad():
            mean.copy_(result.batch_mean)
            variance.copy_(result.batch_variance)
    return channels_first_view(result.y) if image else result.y.reshape(moved.shape).movedim(-1, channel_axis)


class FusedBatchNorm2d(nn.BatchNorm2d):
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

    def forward(self, features: Tensor) -> Tensor:
        self._check_input_dim(features)
        if is_exporting():  # as in `DepthwiseConv2d.convolve`
            return super().forward(features)
        tensors = batch_norm_tensors(self)
        if not self.training:
            return normalized(features, tensors, self.eps, False, None)
        require_several(features, tensors)
        return normalized(features, tensors, self.eps, True, share_of_batch(tensors, self.momentum))


def batch_norm_tensors(module: _NormBase) -> BatchNormTensors:
    """The tensors of a PyTorch batch norm."""
    mean, variance = cast(Tensor, module.running_mean), cast(Tensor, module.running_var)
    return BatchNormTensors(module.weight, module.bias, mean, variance, module.num_batches_tracked)
