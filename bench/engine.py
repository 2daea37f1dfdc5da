# SPDX-License-Identifier: Apache-2.0
"""Times the integers of every device profile next to LiteRT on the same file; the contestants take turns.

    python bench/engine.py [--networks mobilenet_v2 dscnn] [--dtypes int8 int16] [--batches 1 8] [--threads 1 2]
                           [--profiles ...] [--turns 15] [--peers] [--quick] [--save]
    python bench/engine.py --page

The networks have their published shapes and random weights; no contestant is faster or slower for what the integers
are. LiteRT runs its default kernels with as many threads; all profiles are compared with that time, since no runtime
computes another processor's integers. --peers also times what computes the reference's integers: LiteRT's reference
kernels and, where it is installed, TFLite-Micro, once each on one image. int16 means activations of 16 bits beside
weights of 8 (16x8), for which LiteRT has no fast kernels: it takes seconds for an image. --quick takes two small
networks and few turns. --save writes bench/results/<machine>-engine.json, and --page, alone, writes the table of
docs/performance.md from it.

A ratio is the one of the shortest times: turns that another process disturbs count for neither side.

Goals: at most 2.0 times LiteRT's time for 8 images, 3.0 times for one, and a geometric mean of at most 1.5.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ai_edge_litert
import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from report import with_table
from rich.console import Console
from rich.table import Table
from simulate import WIDTH, Random, images, mobilenet_v2_graph, resnet50_graph
from step import RESULTS, machine

import exactqat as eq
from exactqat import deploy
from exactqat.deploy.runtimes import open_runtime, profiles_here
from exactqat.kit.device import PROFILES
from exactqat.kit.device.profile import that_run

LIMITS = {1: 3.0, 8: 2.0}
QUICK = {"networks": ["dscnn", "mobilenet_v2"], "batches": [1, 8], "threads": [1], "turns": 5}
PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- bench/engine.py --page: begin -->", "<!-- bench/engine.py --page: end -->"
# Of codes of 8 bits, what codes of 16 are.
FINENESS = 256


def efficientnet_lite0_graph() -> deploy.Graph:
    """EfficientNet-Lite0 at 224x224: expansion, channels, repeats, stride and window of its blocks."""
    grown = Random()
    layer = grown.conv("x", 32, 3, 2)
    blocks = [(1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5),
              (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)]  # fmt: skip
    for expansion, channels, repeats, stride, window in blocks:
        for repeat in range(repeats):
            before, inputs = layer, grown.builder.tensor(layer).shape[3]
            inner = layer if expansion == 1 else grown.conv(layer, expansion * inputs)
            inner = grown.depthwise(inner, window, 1 if repeat else stride)
            layer = grown.conv(inner, channels, activation="NONE")
            layer = grown.add(before, layer) if repeat else layer
    return grown.classified(grown.conv(layer, 1280))


def dscnn_graph() -> deploy.Graph:
    """MLPerf Tiny's keyword spotting: 49 windows of 10 features."""
    grown = Random(1, 49)
    grown.builder = deploy.Builder()
    grown.builder.input("x", (1, 49, 10, 1), deploy.per_tensor(1 / 64, -5))
    layer = grown.weighted("conv_2d", "x", (64, 10, 4, 1), "RELU", strides=(2, 2))
    for _ in range(4):
        layer = grown.conv(grown.depthwise(layer, 3, 1), 64)
    return grown.classified(layer, 12)


def vit_graph(width: int = 192, heads: int = 3, depth: int = 12) -> deploy.Graph:
    """ViT-Tiny at 224x224 in patches of 16, without a token for the class: the tokens' mean is classified."""
    grown = Random()
    builder, grid, tokens, size = grown.builder, deploy.per_tensor(1 / 32, 3), 196, width // heads

    def linear(x: str, outputs: int) -> str:
        inputs = builder.tensor(x).shape[-1]
        return grown.weighted("fully_connected", x, (outputs, inputs), "NONE")

    def normalized(x: str) -> str:
        mean = builder.mean(x, grid, name=grown.name(), axes=(2,), keep_dims=True)
        centered = builder.sub(x, mean, grid, name=grown.name())
        square = builder.mul(centered, centered, deploy.per_tensor(1 / 16, -128), name=grown.name())
        variance = builder.mean(square, deploy.per_tensor(1 / 16, -128), name=grown.name(), axes=(2,), keep_dims=True)
        inverse = builder.table(variance, deploy.per_tensor(1 / 64, -128), name=grown.name(), function="rsqrt",
                                parameters=(1e-3,))  # fmt: skip
        scaled = builder.mul(centered, inverse, grid, name=grown.name())
        gamma = builder.constant(grown.name(), grown.rng.integers(50, 128, width), deploy.per_tensor(1 / 100, 0))
        return str(builder.mul(scaled, gamma, grid, name=grown.name()))

    patches = grown.weighted("conv_2d", "x", (width, 16, 16, 3), "NONE", strides=(16, 16), padding="VALID")
    x = builder.reshape(patches, (1, tokens, width), name=grown.name())
    for _ in range(depth):
        inner = normalized(x)
        parts = []
        for _ in range(3):
            split = builder.reshape(linear(inner, width), (1, tokens, heads, size), name=grown.name())
            parts.append(builder.transpose(split, (0, 2, 1, 3), name=grown.name()))
        scores = builder.batch_matmul(parts[0], parts[1], deploy.per_tensor(1 / 16, 0), name=grown.name(), adj_y=True)
        shares = builder.softmax(scores, name=grown.name())
        mixed = builder.batch_matmul(shares, parts[2], grid, name=grown.name())
        turned = builder.transpose(mixed, (0, 2, 1, 3), name=grown.name())
        joined = builder.reshape(turned, (1, tokens, width), name=grown.name())
        x = builder.add(x, linear(joined, width), grid, name=grown.name())
        hidden = builder.gelu(linear(normalized(x), 4 * width), grid, name=grown.name())
        x = builder.add(x, linear(hidden, width), grid, name=grown.name())
    mean = builder.mean(normalized(x), grid, name=grown.name(), axes=(1,))
    return builder.graph([linear(mean, 1000)])


def unet_graph() -> deploy.Graph:
    """A U-Net of five scales at 128x128, 16 channels at the first one, doubled images in between."""
    grown = Random(3, 128)
    builder, layer, kept = grown.builder, "x", []
    for channels in (16, 32, 64, 128):
        layer = grown.conv(grown.conv(layer, channels, 3), channels, 3)
        kept.append(layer)
        layer = str(builder.max_pool_2d(layer, (2, 2), (2, 2), name=grown.name()))
    layer = grown.conv(grown.conv(layer, 256, 3), 256, 3)
    for channels, beside in zip((128, 64, 32, 16), reversed(kept), strict=True):
        size = builder.tensor(beside).shape[1:3]
        layer = grown.conv(builder.resize_bilinear(layer, name=grown.name(), size=size), channels, 3)
        grid = builder.tensor(beside).quantization
        layer = builder.concatenation([beside, layer], grid, name=grown.name(), axis=3)
        layer = grown.conv(grown.conv(layer, channels, 3), channels, 3)
    return builder.graph([grown.conv(layer, 2, activation="NONE")])


def in_int16(graph: deploy.Graph) -> deploy.Graph:
    """The same network with activations of 16 bits: the same real numbers on grids 256 times as fine."""
    tensors, operators = dict(graph.tensors), []
    for name, tensor in graph.tensors.items():
        if tensor.data is None:
            grid = deploy.per_tensor(tensor.quantization.scale[0] / FINENESS, 0, "int16")
            tensors[name] = replace(tensor, dtype="int16", quantization=grid)
    for operator in graph.operators:
        if operator.kind in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"):
            bias = graph.tensors[operator.inputs[2]]
            grid = replace(bias.quantization, scale=bias.quantization.scale / FINENESS)
            codes = bias.data.astype(np.int64) * FINENESS
            tensors[bias.name] = replace(bias, dtype="int64", quantization=grid, data=codes)
        else:
            for name in operator.inputs:
                constant = graph.tensors[name]
                if constant.data is not None:
                    steps = constant.data.astype(np.int64) - constant.quantization.zero_point[0]
                    grid = deploy.per_tensor(constant.quantization.scale[0] / FINENESS, 0, "int16")
                    codes = np.clip(steps * FINENESS, -32767, 32767).astype(np.int16)
                    tensors[name] = replace(constant, dtype="int16", quantization=grid, data=codes)
        if operator.kind == "SOFTMAX":
            (name,) = operator.outputs
            tensors[name] = replace(tensors[name], quantization=deploy.per_tensor(1 / 32768, 0, "int16"))
        if operator.kind == "GELU":  # the device has it in int8 only, in int16 as a table
            attributes = {"function": "gelu", "parameters": (operator.attributes["approximate"],)}
            operator = replace(operator, kind="TABLE", attributes=attributes)
        operators.append(operator)
    result = deploy.Graph(tensors, tuple(operators), graph.inputs, graph.outputs)
    result.validate()
    return result


NETWORKS: dict[str, Callable[[], deploy.Graph]] = {
    "mobilenet_v2": mobilenet_v2_graph,
    "resnet50": resnet50_graph,
    "efficientnet_lite0": efficientnet_lite0_graph,
    "dscnn": dscnn_graph,
    "vit": vit_graph,
    "unet": unet_graph,
}


def rounded(times: dict[str, Any]) -> dict[str, Any]:
    """Four digits of a number; more would be noise."""

    def short(value: Any) -> Any:
        return [short(part) for part in value] if isinstance(value, list) else float(f"{value:.4g}")

    return {name: value if isinstance(value, int) else short(value) for name, value in times.items()}


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class LiteRT:
    """Its interpreter with so many threads."""

    def __init__(self, content: bytes, threads: int, reference: bool = False) -> None:
        resolver = OpResolverType.BUILTIN_REF if reference else OpResolverType.AUTO
        self.interpreter = Interpreter(
            model_content=content, num_threads=threads, experimental_op_resolver_type=resolver
        )

    def given(self, codes: np.ndarray) -> Callable[[], np.ndarray]:
        """A call on these images."""
        (source,), (result,) = self.interpreter.get_input_details(), self.interpreter.get_output_details()
        self.interpreter.resize_tensor_input(source["index"], codes.shape)
        self.interpreter.allocate_tensors()

        def call() -> np.ndarray:
            self.interpreter.set_tensor(source["index"], codes)
            self.interpreter.invoke()
            return np.asarray(self.interpreter.get_tensor(result["index"]))

        return call


def race(graph: deploy.Graph, content: bytes, batch: int, threads: int, options: argparse.Namespace) -> dict[str, Any]:
    """The shortest milliseconds of LiteRT, and of each profile with their ratio to LiteRT's."""
    codes = images(graph, batch)
    eq.set_num_threads(threads)
    theirs = LiteRT(content, threads).given(codes["x"])
    ready = {name: deploy.compile(graph, name) for name in options.profiles}
    calls: dict[str, Callable[[], object]] = {"litert": theirs}
    calls |= {name: functools.partial(program.run, codes) for name, program in ready.items()}
    own = "xnnpack-x86" if platform.machine().lower() in ("x86_64", "amd64") else "xnnpack-arm64"
    expected = deploy.simulate(graph, codes, own)[graph.outputs[0]]
    if not np.array_equal(theirs(), expected):
        raise SystemExit("the integers differ from LiteRT's, so there is nothing to time")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(options.turns + 1):
        for name, call in calls.items():
            taken = seconds(call)
            if turn:  # the first one packs weights
                times[name].append(taken)
    shortest = {name: min(taken) for name, taken in times.items()}
    result: dict[str, Any] = {"litert": 1000 * shortest["litert"]}
    for name in ready:
        result[name] = [1000 * shortest[name], shortest[name] / shortest["litert"]]
    return result


def peers(graph: deploy.Graph, content: bytes) -> dict[str, float]:
    """Milliseconds for one image of what else computes the reference's or TFLite-Micro's integers."""
    codes = images(graph, 1)
    reference = LiteRT(content, 1, reference=True).given(codes["x"])
    result = {"litert reference kernels": 1000 * seconds(reference)}
    if "micro" in profiles_here():
        try:
            runtime = open_runtime(content, graph.inputs, graph.outputs, "micro")
        except deploy.RuntimeRefusal as refusal:
            print(refusal)
        else:
            result["tflite-micro"] = 1000 * seconds(lambda: runtime.run(codes))
    return result


def markdown(saved: dict[str, Any]) -> str:
    """A table of saved results: LiteRT's milliseconds, and each profile's time over LiteRT's."""
    rows = saved["results"]
    profiles = [name for name in rows[0]["times"][0] if name in PROFILES]
    lines = [
        "| network | images | threads | LiteRT, ms | " + " | ".join(profiles) + " |",
        "|---" * (4 + len(profiles)) + "|",
    ]
    for row in rows:
        name = row["network"] + ("" if row["dtype"] == "int8" else f", {row['dtype']}")
        for times in row["times"]:
            ratios = [f"{times[profile][1]:.2f}" for profile in profiles]
            cells = [name, times["images"], times["threads"], f"{times['litert']:.2f}", *ratios]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    settings, versions = saved["settings"], saved["versions"]
    means = ", ".join(f"{dtype} {mean:.2f}" for dtype, mean in settings["geometric_means"].items())
    head = (
        f"Time over LiteRT {versions['ai-edge-litert']}'s own on the same file, shortest of {settings['turns']} turns. "
        f"Geometric mean: {means}."
    )
    return "\n".join(["", head, "", *lines, ""])


def write_page(results: Path) -> None:
    """The table of the page on performance, from a saved run."""
    if not results.exists():
        raise SystemExit(f"there is no {results.name}; run bench/engine.py --save first")
    PAGE.write_text(with_table(PAGE.read_text(), markdown(json.loads(results.read_text())), BEGIN, END))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--dtypes", nargs="+", default=["int8"], choices=["int8", "int16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--profiles", nargs="+", default=that_run(".tflite"), choices=list(PROFILES))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--peers", action="store_true", help="also time LiteRT's reference kernels and TFLite-Micro")
    parser.add_argument("--save", action="store_true", help="write bench/results/<machine>-engine.json")
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK['networks'])}, one thread, few turns")
    parser.add_argument("--page", action="store_true", help="write docs/performance.md's table from saved results")
    options = parser.parse_args()
    path = RESULTS / f"{machine()}-engine.json"
    if options.page:
        write_page(path)
        return 0
    if options.quick:
        vars(options).update(QUICK)
    table = Table(
        "network", "dtype", "images", "threads", "LiteRT, ms", *options.profiles, title="milliseconds (times LiteRT's)"
    )
    console, results, missed = Console(width=WIDTH), [], 0
    ratios: dict[str, list[float]] = {dtype: [] for dtype in options.dtypes}
    for network, dtype in itertools.product(options.networks, options.dtypes):
        graph = NETWORKS[network]()
        graph = in_int16(graph) if dtype == "int16" else graph
        with tempfile.TemporaryDirectory() as folder:
            content = deploy.write_tflite(graph, Path(folder) / "model.tflite").read_bytes()
        row: dict[str, Any] = {"network": network, "dtype": dtype, "times": []}
        left = deploy.compile(graph, options.profiles[0]).without_kernels()
        row["without_kernels"] = sorted({op.kind for op in graph.operators if op.outputs[0] in left})
        for batch, threads in itertools.product(options.batches, options.threads):
            figures = race(graph, content, batch, threads, options)
            row["times"].append({"images": batch, "threads": threads, **figures})
            cells = [f"{figures[name][0]:.2f} ({figures[name][1]:.2f})" for name in options.profiles]
            table.add_row(network, dtype, str(batch), str(threads), f"{figures['litert']:.2f}", *cells)
            ratios[dtype] += [figures[name][1] for name in options.profiles]
            missed += sum(figures[name][1] > LIMITS.get(batch, 2.0) for name in options.profiles)
        if options.peers:
            row["peers"] = peers(graph, content)
            others = ", ".join(f"{name} {taken:.0f} ms" for name, taken in row["peers"].items())
            console.print(f"{network}, {dtype}: {others}")
        results.append(row)
    console.print(table)
    means = {dtype: math.exp(statistics.fmean(map(math.log, factors))) for dtype, factors in ratios.items()}
    said = ", ".join(f"{dtype} {mean:.2f}" for dtype, mean in means.items())
    console.print(f"geometric mean {said} (at most 1.5); {missed} over their limit, {LIMITS}")
    for row in results:
        if row["without_kernels"]:
            console.print(
                f"{row['network']}, {row['dtype']}: by their declarations {', '.join(row['without_kernels'])}"
            )
    if options.save:
        path.parent.mkdir(exist_ok=True)
        versions = {"exactqat": eq.__version__, "ai-edge-litert": ai_edge_litert.__version__}
        settings = {"turns": options.turns, "geometric_means": means}
        results = [{**row, "times": [rounded(times) for times in row["times"]]} for row in results]
        path.write_text(json.dumps({"versions": versions, "settings": settings, "results": results}, indent=1) + "\n")
        console.print(f"saved as {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
