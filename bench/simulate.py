# SPDX-License-Identifier: Apache-2.0
"""Times the integer simulation beside the LiteRT run that it is compared with; the two take turns.

    python bench/simulate.py [--networks mobilenet_v2 resnet50] [--batches 1 8] [--profiles xnnpack reference]
                             [--turns 7] [--verify]

The networks have their published shapes and random weights; neither side is faster or slower for what the integers are.
LiteRT runs with one thread, through XNNPACK or its reference kernels; the simulation takes the cores it gets (`taskset
-c 0` gives it one). The goal is 3 times LiteRT's time for a MobileNetV2 under XNNPACK. --verify also times
`deploy.verify` on eight images, end to end.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from layers import mobilenet_v2
from rich.console import Console
from rich.table import Table
from timing import summarize

from exactqat import deploy
from exactqat.deploy.runtimes import open_runtime, profile_here

# Of the tables, also where output goes into a file.
WIDTH = 120


class Random:
    """A graph that grows layer by layer, of random weights whose results spread over int8."""

    def __init__(self, channels: int = 3, size: int = 224) -> None:
        self.rng = np.random.default_rng(0)
        self.builder = deploy.Builder()
        self.builder.input("x", (1, size, size, channels), deploy.per_tensor(1 / 64, -5))
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"layer_{self.count}"

    def weighted(self, kind: str, source: str, filter: tuple[int, ...], activation: str, **attributes: object) -> str:
        """filter: the shape of the device's filter."""
        axis = 3 if kind == "depthwise_conv_2d" else 0
        channels, taps = filter[axis], math.prod(filter) // filter[axis]
        input_scale = float(self.builder.tensor(source).quantization.scale[0])
        filter_scale = self.rng.uniform(0.5, 1.5, channels).astype(np.float32) / np.float32(64 * math.sqrt(taps))
        bound = 2 * input_scale * 64
        quantization = deploy.per_tensor(bound / 255, -128 if activation == "RELU" else 3)
        return str(
            getattr(self.builder, kind)(
                source,
                self.rng.integers(-127, 128, filter),
                filter_scale,
                self.rng.integers(-2000, 2000, channels),
                quantization,
                name=self.name(),
                activation=activation,
                **attributes,
            )
        )

    def conv(self, source: str, outputs: int, kernel: int = 1, stride: int = 1, activation: str = "RELU") -> str:
        inputs = self.builder.tensor(source).shape[3]
        shape = (outputs, kernel, kernel, inputs)
        return self.weighted("conv_2d", source, shape, activation, strides=(stride, stride))

    def depthwise(self, source: str, kernel: int, stride: int) -> str:
        shape = (1, kernel, kernel, self.builder.tensor(source).shape[3])
        return self.weighted("depthwise_conv_2d", source, shape, "RELU", strides=(stride, stride))

    def add(self, first: str, second: str, activation: str = "NONE") -> str:
        scale = max(float(self.builder.tensor(name).quantization.scale[0]) for name in (first, second))
        zero_point = -128 if activation == "RELU" else 3
        output = deploy.per_tensor(1.5 * scale, zero_point)
        return str(self.builder.add(first, second, output, name=self.name(), activation=activation))

    def classified(self, source: str, classes: int = 1000) -> deploy.Graph:
        quantization = self.builder.tensor(source).quantization
        mean = self.builder.mean(source, quantization, name=self.name(), axes=(1, 2))
        channels = self.builder.tensor(mean).shape[1]
        return self.builder.graph([self.weighted("fully_connected", mean, (classes, channels), "NONE")])


def mobilenet_v2_graph() -> deploy.Graph:
    """MobileNetV2 1.0 at 224x224: the layers of bench/layers.py, with the sums between them."""
    grown = Random()
    layer, before = "x", ""
    for entry in mobilenet_v2()[:-1]:
        source, pointwise = layer, entry.kind == "conv" and entry.kernel == (1, 1)
        if entry.kind == "depthwise":
            layer = grown.depthwise(layer, entry.kernel[0], entry.stride)
            continue
        # A pointwise layer behind a depthwise one is the end of a block, without an activation.
        ends = pointwise and entry.outputs < entry.inputs
        layer = grown.conv(source, entry.outputs, entry.kernel[0], entry.stride, "NONE" if ends else "RELU")
        if ends:
            same = before and grown.builder.tensor(before).shape == grown.builder.tensor(layer).shape
            before = layer = grown.add(before, layer) if same else layer
    return grown.classified(layer)


def resnet50_graph() -> deploy.Graph:
    """ResNet-50 (arXiv:1512.03385, table 1) at 224x224, its strides in the 3x3 convolutions."""
    grown = Random()
    layer = grown.conv("x", 64, 7, 2)
    layer = str(grown.builder.max_pool_2d(layer, (3, 3), (2, 2), "SAME", name=grown.name()))
    for width, blocks, stride in [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)]:
        for block in range(blocks):
            step = 1 if block else stride
            inner = grown.conv(grown.conv(layer, width), width, 3, step)
            inner = grown.conv(inner, 4 * width, activation="NONE")
            beside = layer if block else grown.conv(layer, 4 * width, 1, step, "NONE")
            layer = grown.add(beside, inner, "RELU")
    return grown.classified(layer)


NETWORKS: dict[str, Callable[[], deploy.Graph]] = {"mobilenet_v2": mobilenet_v2_graph, "resnet50": resnet50_graph}


def seconds(call: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def images(graph: deploy.Graph, count: int) -> dict[str, np.ndarray]:
    shape = (count, *graph.tensors["x"].shape[1:])
    return {"x": np.random.default_rng(1).integers(-128, 128, shape).astype(np.int8)}


def measured(graph: deploy.Graph, path: Path, profile: str, batch: int, turns: int) -> tuple[str, ...]:
    """Milliseconds of LiteRT and of the simulation, the median of their ratios and its spread."""
    runtime, codes = open_runtime(path.read_bytes(), graph.inputs, graph.outputs, profile), images(graph, batch)
    device, simulated = runtime.run(codes), deploy.simulate(graph, codes, profile)
    if any(not np.array_equal(device[name], simulated[name]) for name in device):
        raise SystemExit(f"{path.stem}: the simulation differs from LiteRT, so there is nothing to time")
    theirs, ours = [], []
    for _ in range(turns):
        theirs.append(seconds(runtime.run, codes))
        ours.append(seconds(deploy.simulate, graph, codes, profile))
    ratios = summarize([b / a for a, b in zip(theirs, ours, strict=True)])
    times = (f"{1000 * summarize(samples).median:.1f}" for samples in (theirs, ours))
    return (*times, f"{ratios.median:.2f}", f"{ratios.spread:.0%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--profiles", nargs="+", default=["xnnpack"])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--verify", action="store_true", help="also time deploy.verify on eight images")
    arguments = parser.parse_args()
    table = Table("network", "profile", "images", "LiteRT, ms", "simulation, ms", "times", "spread")
    lines = []
    for network in arguments.networks:
        graph = NETWORKS[network]()
        with tempfile.TemporaryDirectory() as folder:
            path = deploy.write_tflite(graph, Path(folder) / f"{network}.tflite")
            for named in arguments.profiles:
                profile = profile_here(named)
                for batch in arguments.batches:
                    row = measured(graph, path, profile, batch, arguments.turns)
                    table.add_row(network, profile, str(batch), *row)
                if arguments.verify:
                    took = seconds(deploy.verify, graph, path, images(graph, 8), profile)
                    lines.append(f"{network}, {profile}: deploy.verify of 8 images took {took:.1f} s")
    console = Console(width=WIDTH)
    console.print(table)
    for line in lines:
        console.print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
