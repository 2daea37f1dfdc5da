# SPDX-License-Identifier: Apache-2.0
"""The job's network: an ordinary PyTorch module that knows nothing of quantization."""

from __future__ import annotations

from torch import Tensor, nn

from ..qat import Conv2d, DepthwiseConv2d


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Convolution, batch norm, ReLU6."""
    return nn.Sequential(Conv2d(inputs, outputs, kernel, stride, bias=False), nn.BatchNorm2d(outputs), nn.ReLU6())


def depthwise(channels: int, stride: int = 1) -> nn.Sequential:
    """3x3 depthwise convolution, batch norm, ReLU6."""
    return nn.Sequential(DepthwiseConv2d(channels, 3, stride, bias=False), nn.BatchNorm2d(channels), nn.ReLU6())


class Separable(nn.Module):
    """MobileNet's block: every channel filtered on its own, then channels mixed point by point."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.depthwise = depthwise(inputs, stride)
        self.pointwise = convolution(inputs, outputs, 1)

    def forward(self, features: Tensor) -> Tensor:
        return self.pointwise(self.depthwise(features))


class InvertedResidual(nn.Module):
    """MobileNetV2's block: widen, filter, narrow without an activation (the linear bottleneck), add the input."""

    def __init__(self, channels: int, widening: int) -> None:
        super().__init__()
        wide = channels * widening
        self.expand = convolution(channels, wide, 1)
        self.depthwise = depthwise(wide)
        self.project = nn.Sequential(Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, features: Tensor) -> Tensor:
        return features + self.project(self.depthwise(self.expand(features)))


class SmallMobileNet(nn.Module):
    """About nine thousand parameters; for images from 8x8 up.

    Args:
        channels: of the images.
        classes: number of logits.
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = convolution(channels, 16, 3)
        self.block1 = Separable(16, 24, stride=2)
        self.block2 = InvertedResidual(24, widening=4)
        self.block3 = Separable(24, 48, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(48, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.block3(self.block2(self.block1(self.stem(images))))
        return self.classifier(self.pool(features).flatten(1))
