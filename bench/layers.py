# SPDX-License-Identifier: Apache-2.0
"""The layers of the networks whose tensors are timed, as data: what each layer reads, filters and writes.

A table is made from the stages as the papers print them. Paddings are TensorFlow's "SAME" everywhere, so a layer's
output is its input divided by the stride, rounded up. `parameters` and `multiply_adds` exist to check the tables
against the published numbers of the networks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

BATCHES = {"cpu": (1, 8, 32), "cuda": (32, 128, 256)}


class Layer(NamedTuple):
    """One layer; sizes in pixels. `kind` is "conv", "depthwise" or "dense"; `normalized`: no bias, batch norm."""

    kind: str
    kernel: tuple[int, int]
    stride: int
    height: int
    width: int
    inputs: int
    outputs: int
    normalized: bool = True

    @property
    def input(self) -> tuple[int, int, int]:
        return self.height, self.width, self.inputs

    @property
    def output(self) -> tuple[int, int, int]:
        return -(-self.height // self.stride), -(-self.width // self.stride), self.outputs

    @property
    def weights(self) -> int:
        taps = self.kernel[0] * self.kernel[1]
        return taps * self.outputs if self.kind == "depthwise" else taps * self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        """Weights and bias, or weights and batch norm's scale and offset."""
        return self.weights + self.outputs * (2 if self.normalized else 1)

    @property
    def multiply_adds(self) -> int:
        """For one image, as papers count them: the padding too."""
        return self.weights * self.output[0] * self.output[1]


class _Table:
    """Layers one after the other, each reading what the one before wrote."""

    def __init__(self, height: int, width: int, channels: int) -> None:
        self.layers: list[Layer] = []
        self.size = height, width, channels

    def add(self, kind: str, outputs: int, kernel: int | tuple[int, int] = 1, stride: int = 1, **options: bool) -> None:
        kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
        self.layers.append(Layer(kind, kernel, stride, *self.size, outputs, **options))
        self.size = self.layers[-1].output

    def depthwise(self, kernel: int = 3, stride: int = 1) -> None:
        self.add("depthwise", self.size[2], kernel, stride)

    def beside(self, size: tuple[int, int, int], outputs: int, stride: int = 1) -> None:
        """A pointwise layer off the main road, which reads a tensor of its own."""
        self.layers.append(Layer("conv", (1, 1), stride, *size, outputs, normalized=False))

    def inverted_residual(self, wide: int, outputs: int, kernel: int, stride: int, squeezed: int = 0) -> None:
        if wide != self.size[2]:
            self.add("conv", wide)
        self.depthwise(kernel, stride)
        if squeezed:
            self.beside((1, 1, wide), squeezed)
            self.beside((1, 1, squeezed), wide)
        self.add("conv", outputs)

    def dense(self, outputs: int) -> None:
        self.size = 1, 1, self.size[2]
        self.add("dense", outputs, normalized=False)


def _divisible(channels: float, divisor: int = 8) -> int:
    rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * channels else rounded


def mobilenet_v1(width: float = 1.0, size: int = 224) -> list[Layer]:
    """arXiv:1704.04861, table 1."""
    table = _Table(size, size, 3)
    table.add("conv", int(32 * width), 3, 2)
    for outputs, stride in [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2)]:
        table.depthwise(3, stride)
        table.add("conv", int(outputs * width))
    table.depthwise()
    table.add("conv", int(1024 * width))
    table.dense(1000)
    return table.layers


def mobilenet_v2() -> list[Layer]:
    """arXiv:1801.04381, table 2."""
    table = _Table(224, 224, 3)
    table.add("conv", 32, 3, 2)
    stages = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    for widening, outputs, repeats, stride in stages:
        for repeat in range(repeats):
            table.inverted_residual(table.size[2] * widening, outputs, 3, 1 if repeat else stride)
    table.add("conv", 1280)
    table.dense(1000)
    return table.layers


def mobilenet_v3_large() -> list[Layer]:
    """arXiv:1905.02244, table 1."""
    table = _Table(224, 224, 3)
    table.add("conv", 16, 3, 2)
    for kernel, wide, outputs, excited, stride in [
        (3, 16, 16, False, 1),
        (3, 64, 24, False, 2),
        (3, 72, 24, False, 1),
        (5, 72, 40, True, 2),
        (5, 120, 40, True, 1),
        (5, 120, 40, True, 1),
        (3, 240, 80, False, 2),
        (3, 200, 80, False, 1),
        (3, 184, 80, False, 1),
        (3, 184, 80, False, 1),
        (3, 480, 112, True, 1),
        (3, 672, 112, True, 1),
        (5, 672, 160, True, 2),
        (5, 960, 160, True, 1),
        (5, 960, 160, True, 1),
    ]:
        table.inverted_residual(wide, outputs, kernel, stride, _divisible(wide / 4) if excited else 0)
    table.add("conv", 960)
    table.dense(1280)
    table.dense(1000)
    return table.layers


def efficientnet_lite0() -> list[Layer]:
    """EfficientNet-B0 (arXiv:1905.11946, table 1) without squeeze-and-excite, as TensorFlow's model garden has it."""
    table = _Table(224, 224, 3)
    table.add("conv", 32, 3, 2)
    stages = [
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 40, 2, 2, 5),
        (6, 80, 3, 2, 3),
        (6, 112, 3, 1, 5),
        (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    ]
    for widening, outputs, repeats, stride, kernel in stages:
        for repeat in range(repeats):
            table.inverted_residual(table.size[2] * widening, outputs, kernel, 1 if repeat else stride)
    table.add("conv", 1280)
    table.dense(1000)
    return table.layers


def ds_cnn() -> list[Layer]:
    """Keyword spotting of MLPerf Tiny (arXiv:1711.07128): 49 spectra of 10 coefficients, 12 classes."""
    table = _Table(49, 10, 1)
    table.add("conv", 64, (10, 4), 2)
    for _ in range(4):
        table.depthwise()
        table.add("conv", 64)
    table.dense(12)
    return table.layers


def resnet8() -> list[Layer]:
    """Image classification of MLPerf Tiny: images of 32 x 32, 10 classes."""
    table = _Table(32, 32, 3)
    table.add("conv", 16, 3)
    for outputs, stride in [(16, 1), (32, 2), (64, 2)]:
        read = table.size
        table.add("conv", outputs, 3, stride)
        table.add("conv", outputs, 3)
        if stride != 1:
            table.beside(read, outputs, stride)
    table.dense(10)
    return table.layers


NETWORKS: dict[str, Callable[[], list[Layer]]] = {
    # The size of MLPerf Tiny's visual wake words; the paper's has 224.
    "MobileNetV1 0.25": lambda: mobilenet_v1(0.25, 96),
    "MobileNetV1 1.0": mobilenet_v1,
    "MobileNetV2": mobilenet_v2,
    "MobileNetV3-Large": mobilenet_v3_large,
    "EfficientNet-Lite0": efficientnet_lite0,
    "DS-CNN": ds_cnn,
    "ResNet-8": resnet8,
}


class Depthwise(NamedTuple):
    """What makes a depthwise layer another one for a kernel; `size` is the input's height, width, channels."""

    size: tuple[int, int, int]
    kernel: tuple[int, int]
    stride: int

    def __str__(self) -> str:
        rows, columns = self.kernel
        return f"{'x'.join(map(str, self.size))} k{rows if rows == columns else f'{rows}x{columns}'} s{self.stride}"


class Activation(NamedTuple):
    """The output of a layer with batch norm: what is normalized, and quantized after it. Height, width, channels."""

    size: tuple[int, int, int]

    def __str__(self) -> str:
        return "x".join(map(str, self.size))


def depthwise_layers() -> dict[Depthwise, list[str]]:
    """Every distinct depthwise layer and the networks that have it."""
    return _distinct(lambda layer: Depthwise(layer.input, layer.kernel, layer.stride), lambda x: x.kind == "depthwise")


def activations() -> dict[Activation, list[str]]:
    """Every distinct activation and the networks that have it."""
    return _distinct(lambda layer: Activation(layer.output), lambda layer: layer.normalized)


def repeats(network: str) -> dict[str, Counter[str]]:
    """How often a network has each of its tensors: by group of operations, then by the tensor's name."""
    table = NETWORKS[network]()
    return {
        "batch norm": Counter(str(Activation(layer.output)) for layer in table if layer.normalized),
        "depthwise": Counter(
            str(Depthwise(layer.input, layer.kernel, layer.stride)) for layer in table if layer.kind == "depthwise"
        ),
    }


def _distinct(key: Callable[[Layer], tuple], wanted: Callable[[Layer], bool]) -> dict:
    groups: dict[tuple, list[str]] = {}
    for network, table in NETWORKS.items():
        for layer in filter(wanted, table()):
            networks = groups.setdefault(key(layer), [])
            if network not in networks:
                networks.append(network)
    return groups


def by_elements(sizes: dict[Activation, list[str]]) -> dict[Activation, list[str]]:
    """One activation for each number of elements, all that an operator on whole tensors sees, and all its networks."""
    merged: dict[int, tuple[Activation, list[str]]] = {}
    for activation, networks in sizes.items():
        first, together = merged.setdefault(math.prod(activation.size), (activation, []))
        together += [network for network in networks if network not in together]
    return dict(merged.values())


def spread(layers: Iterable, count: int) -> list:
    """`count` of them from the largest input to the smallest, evenly; all of them if there are no more."""
    ordered = sorted(layers, key=lambda layer: (-math.prod(layer.size), layer))
    if count >= len(ordered):
        return ordered
    if count == 1:
        return [ordered[len(ordered) // 2]]
    return [ordered[round(i * (len(ordered) - 1) / (count - 1))] for i in range(count)]
