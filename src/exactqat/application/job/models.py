# SPDX-License-Identifier: Apache-2.0
"""The job's networks: ordinary PyTorch modules that know nothing of quantization.

`NETWORKS` names them; `network` builds one of them, or any other that an importable function builds. Their structures
are those of the papers named with them; paddings are TensorFlow's, so that devices need no separate operator for
padding. The last layer is always called ``classifier``.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...kit.display import shell_word
from ...qat import Conv2d, DepthwiseConv2d
from ...qat.train.torch.primitives import overruns_channels_last

Shape = Sequence[int]


def convolution(
    inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, activation: type[nn.Module] = nn.ReLU6
) -> nn.Sequential:
    """Convolution, batch norm, activation."""
    return nn.Sequential(Conv2d(inputs, outputs, kernel, stride, bias=False), nn.BatchNorm2d(outputs), activation())


def depthwise(channels: int, stride: int = 1) -> nn.Sequential:
    """Depthwise convolution, batch norm, activation."""
    return nn.Sequential(DepthwiseConv2d(channels, 3, stride, bias=False), nn.BatchNorm2d(channels), nn.ReLU6())


def separable(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """MobileNet's block: every channel filtered separately, then channels mixed point by point."""
    parts = {"depthwise": depthwise(inputs, stride), "pointwise": convolution(inputs, outputs, 1)}
    return nn.Sequential(OrderedDict(parts))


class InvertedResidual(nn.Module):
    """MobileNetV2's block: widen, filter, narrow without an activation, and add the input if it fits."""

    def __init__(self, inputs: int, wide: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.expand = convolution(inputs, wide, 1) if wide != inputs else nn.Identity()
        self.depthwise = depthwise(wide, stride)
        self.project = nn.Sequential(Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, features: Tensor) -> Tensor:
        narrow = self.project(self.depthwise(self.expand(features)))
        return features + narrow if self.residual else narrow


class ImageClassifier(nn.Module):
    """Features, their mean over the image, and one linear layer."""

    def __init__(self, features: nn.Module, channels: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = features
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.classifier = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.dropout(self.pool(self.features(images)).flatten(1)))


class SmallMobileNet(nn.Module):
    """About nine thousand parameters; for images from 8x8 up."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = convolution(channels, 16, 3)
        self.block1 = separable(16, 24, stride=2)
        self.block2 = InvertedResidual(24, 96, 24)
        self.block3 = separable(24, 48, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(48, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.block3(self.block2(self.block1(self.stem(images))))
        return self.classifier(self.pool(features).flatten(1))


def small_mobilenet(shape: Shape, classes: int) -> nn.Module:
    """`SmallMobileNet` for images of that shape."""
    return SmallMobileNet(shape[0], classes)


def dscnn(shape: Shape, classes: int, width: int = 64) -> nn.Module:
    """Keyword spotting on spectrograms (arXiv:1711.07128); shape (1, 49, 10) in MLPerf Tiny."""
    blocks = [separable(width, width, stride=1) for _ in range(4)]
    return ImageClassifier(nn.Sequential(convolution(shape[0], width, (10, 4), 2), *blocks), width, classes, 0.4)


class FrequenciesAsChannels(nn.Module):
    """Spectrograms [n, 1, frames, frequencies] as [n, frequencies, frames, 1]."""

    def forward(self, spectrograms: Tensor) -> Tensor:
        return spectrograms.permute(0, 3, 2, 1)


def dscnn_1d(shape: Shape, classes: int) -> nn.Module:
    """The streaming wake word of MLPerf Tiny, convolutions along time without padding; shape (1, 30, 40)."""
    layers, inputs = list[nn.Module](), shape[2]
    for kernel, outputs in ((3, 128), (5, 128), (10, 128), (15, 32)):
        along_time = nn.Conv2d(inputs, inputs, (kernel, 1), groups=inputs, bias=False)
        layers += [along_time, convolution(inputs, outputs, 1, activation=nn.ReLU), nn.Dropout(0.2)]
        inputs = outputs
    classifier = nn.Linear(inputs * (shape[1] - 29), classes)
    parts = {"channels": FrequenciesAsChannels(), "features": nn.Sequential(*layers), "flatten": nn.Flatten()}
    return nn.Sequential(OrderedDict(parts, classifier=classifier))


def mobilenet_v1(shape: Shape, classes: int, width: float = 0.25) -> nn.Module:
    """arXiv:1704.04861; shape (3, 96, 96) with width 0.25 is visual wake words of MLPerf Tiny."""

    def scaled(channels: int) -> int:
        return max(8, int(channels * width))

    blocks: list[nn.Module] = [convolution(shape[0], scaled(32), 3, 2)]
    inputs = 32
    for outputs, stride in [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2)]:
        blocks.append(separable(scaled(inputs), scaled(outputs), stride))
        inputs = outputs
    blocks.append(separable(scaled(1024), scaled(1024), 1))
    return ImageClassifier(nn.Sequential(*blocks), scaled(1024), classes)


class ResidualBlock(nn.Module):
    """Two convolutions in parallel with the input, or with its 1x1 convolution if size or channels change."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(inputs, outputs, 3, stride, nn.ReLU)
        self.second = nn.Sequential(Conv2d(outputs, outputs, 3, bias=False), nn.BatchNorm2d(outputs))
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else Conv2d(inputs, outputs, 1, stride)
        self.relu = nn.ReLU()

    def forward(self, features: Tensor) -> Tensor:
        return self.relu(self.shortcut(features) + self.second(self.first(features)))


def resnet8(shape: Shape, classes: int) -> nn.Module:
    """The smallest residual network of arXiv:1512.03385's kind; shape (3, 32, 32) in MLPerf Tiny."""
    blocks = [ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2), ResidualBlock(32, 64, 2)]
    return ImageClassifier(nn.Sequential(convolution(shape[0], 16, 3, 1, nn.ReLU), *blocks), 64, classes)


NETWORKS: dict[str, Callable[[Shape, int], nn.Module]] = {
    function.__name__: function for function in (small_mobilenet, dscnn, dscnn_1d, mobilenet_v1, resnet8)
}


# Packages whose models are used if they are named, and how each builds one, without its weights.
LIBRARIES: dict[str, Callable[[str, Shape, int], nn.Module]] = {
    "timm": lambda name, shape, classes: import_module("timm").create_model(
        name, in_chans=shape[0], num_classes=classes
    ),
    "torchvision": lambda name, shape, classes: import_module("torchvision.models").get_model(
        name, num_classes=classes
    ),
}


def is_known(name: str) -> bool:
    """Whether a network is one of NETWORKS or of LIBRARIES: building it runs no code of the user's or of a file's.

    Names of LIBRARIES are architectures; other names, with which timm would download a model, are not allowed.
    """
    package, _, architecture = name.partition("/")
    return name in NETWORKS or (package in LIBRARIES and re.fullmatch(r"[\w.]+", architecture, re.ASCII) is not None)


def maker(name: str) -> Any:
    """What builds the network of that name, or a user's network itself, whose module it imports."""
    package, _, architecture = name.partition("/")
    if ":" in name:
        return imported(name)
    if not is_known(name):
        allowed = ", ".join([*NETWORKS, *(f"{package}/NAME" for package in LIBRARIES)])
        raise ValueError(f"model must be one of {allowed} or 'package.module:function', got {name!r}")
    if package not in LIBRARIES:
        return NETWORKS[name]
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"model {name} needs the package {package}, which is not installed: pip install {package}")
    return functools.partial(LIBRARIES[package], architecture)


def imported(name: str, what: str = "model", must: str = "model must be 'package.module:function'") -> Any:
    """The object called ``"package.module:name"``; runs that module. what, must: for messages."""
    module, _, names = name.partition(":")
    if not module or not names:
        raise ValueError(f"{must}, got {name!r}")
    if "" not in sys.path:
        # Console scripts lack the working directory, where the user's module may be. Only here, and last: imports of
        # the libraries must not be found there.
        sys.path.append("")
    try:
        return functools.reduce(getattr, names.split("."), import_module(module))
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} {name!r} cannot be loaded: {type(error).__name__}: {error}") from error


def built(name: str, shape: Shape, classes: int) -> tuple[Any, Any]:
    """An untrained model and its variables, None if it holds them itself.

    Args:
        name: one of NETWORKS, a model of one of LIBRARIES such as ``"timm/mobilenetv3_small_100"``, or
            ``"package.module:name"`` of a model, or of a class or function that makes one: of two arguments, `shape`
            and `classes`, or of none. For JAX, it returns a pair, the model and its variables. That runs the module: a
            name from a file has to go through `named_in` first. Or a file of Keras', whose code does not run.
        shape: of one input, without the batch: (channels, height, width) or (features,).
        classes: number of outputs.
    """
    if name.endswith((".keras", ".h5")):
        import keras

        return keras.models.load_model(name, compile=False), None
    model = maker(name)
    if inspect.isclass(model) or inspect.isfunction(model) or isinstance(model, functools.partial):
        needed = [p for p in inspect.signature(model).parameters.values() if p.default is p.empty]
        takes = any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in needed)
        if takes and not shape:
            raise ValueError(f"model {name!r} is built for the shape of an input: --example SHAPE gives it")
        arguments = (tuple(shape), classes) if takes else ()
        try:
            model = model(*arguments)
        except (Exception, SystemExit) as error:
            called = ", ".join(map(str, arguments)) or "no arguments"
            failure = f"{type(error).__name__}: {error}"
            raise ValueError(f"model {name!r} failed when called with {called}: {failure}") from error
    return model if isinstance(model, tuple) and len(model) == 2 else (model, None)


def network(name: str, shape: Shape, classes: int) -> nn.Module:
    """The model that `built` makes, if it is one of PyTorch."""
    model, _ = built(name, shape, classes)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {name!r} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def named_in(file: Path, name: str, model: str | None) -> str:
    """The network that a file names, if it is known or the one that the user also named (`model`): a file must not
    decide what code runs."""
    if model not in (None, name):
        raise ValueError(f"{file} names the network {name!r}, which is not --model {model}")
    if model is None and not is_known(name):
        raise ValueError(
            f"{file} names the network {name!r}, which is not one of exactqat's own ({', '.join(NETWORKS)}). "
            f"Code that a file names is not run. If you trust it, name it yourself: "
            f"--model {shell_word(name)}"
        )
    return name


def new_model(name: str, shape: Shape, classes: int) -> nn.Module:
    """The untrained network of that name (see `network`), in the memory format without copies, if that is safe."""
    model = network(name, shape, classes)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            padding = (0,) if isinstance(layer.padding, str) else layer.padding
            if overruns_channels_last(layer.weight, layer.stride, padding):
                return model
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
