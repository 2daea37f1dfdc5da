# SPDX-License-Identifier: Apache-2.0
"""Times kernels beside PyTorch's on the tensors of MobileNet layers, interleaved, and reports medians as ratios.

    python bench/run.py [--repeats 30] [--threads 2] [--save]

Every row is one operation on one tensor: the same bytes, the same threads, calls of all contestants taking turns. The
ratio is PyTorch's time over ours. `copy` is `torch.Tensor.copy_` of the same tensor into an existing one. Machines are
shared and noisy: read the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import exactqat as eq

SHAPES = [(8, 112, 112, 32), (8, 56, 56, 144), (8, 28, 28, 192), (8, 14, 14, 576), (8, 7, 7, 960)]
NAMES = {
    "fake_quantization": "fake quant",
    "batch_normalization": "batch norm",
    "depthwise_convolution": "depthwise",
}
CPUINFO = Path("/proc/cpuinfo")
Contestants = dict[str, Callable[[], Any]]


def fake_quantization(x: torch.Tensor) -> tuple[Contestants, Contestants]:
    """Per channel, forward and gradient."""
    channels = x.shape[-1]
    low, high = torch.full((channels,), -2.0), torch.full((channels,), 2.0)
    scale, zero = (high - low) / 255, torch.full((channels,), 127.0)
    gradient = torch.randn_like(x)
    leaf, scale_leaf = x.clone().requires_grad_(), scale.clone().requires_grad_()
    zero_leaf = zero.clone().requires_grad_()

    def torch_gradient() -> Any:
        y = torch._fake_quantize_learnable_per_channel_affine(leaf, scale_leaf, zero_leaf, 3, 0, 255)
        return torch.autograd.grad(y, (leaf, scale_leaf, zero_leaf), gradient)

    forward: Contestants = {
        "exactqat": lambda: eq.fake_quant_with_min_max_vars_per_channel(x, low, high),
        "torch": lambda: torch.fake_quantize_per_channel_affine(x, scale, zero.int(), 3, 0, 255),
    }
    backward: Contestants = {
        "exactqat": lambda: eq.fake_quant_with_min_max_vars_per_channel_gradient(gradient, x, low, high),
        "torch": torch_gradient,
    }
    return forward, backward


def batch_normalization(x: torch.Tensor) -> tuple[Contestants, Contestants]:
    """In training; PyTorch on the same memory as a channels_last tensor."""
    channels = x.shape[-1]
    scale, offset = torch.rand(channels) + 0.5, torch.randn(channels)
    image, gradient = x.permute(0, 3, 1, 2), torch.randn_like(x)
    nothing = scale[:0]
    saved = eq.raw_ops.FusedBatchNormV3(x=x, scale=scale, offset=offset, mean=nothing, variance=nothing)
    leaf = image.clone().requires_grad_()

    def torch_gradient() -> Any:
        y = torch.nn.functional.batch_norm(leaf, None, None, scale, offset, True)
        return torch.autograd.grad(y, leaf, gradient.permute(0, 3, 1, 2))

    forward: Contestants = {
        "exactqat": lambda: eq.nn.fused_batch_norm(x, scale, offset),
        "torch": lambda: torch.nn.functional.batch_norm(image, None, None, scale, offset, True),
    }
    backward: Contestants = {
        "exactqat": lambda: (
            eq.nn.fused_batch_norm(x, scale, offset),
            eq.raw_ops.FusedBatchNormGradV3(
                y_backprop=gradient,
                x=x,
                scale=scale,
                reserve_space_1=saved.reserve_space_1,
                reserve_space_2=saved.reserve_space_2,
                reserve_space_3=saved.reserve_space_3,
            ),
        ),
        "torch": torch_gradient,
    }
    return forward, backward


def depthwise_convolution(x: torch.Tensor) -> tuple[Contestants, Contestants]:
    """3x3, stride 1; PyTorch in channels_last, its fast layout."""
    channels = x.shape[-1]
    filter = torch.randn(3, 3, channels, 1)
    gradient = torch.randn_like(x)
    image = x.permute(0, 3, 1, 2)
    weight = filter.permute(2, 3, 0, 1).contiguous(memory_format=torch.channels_last)
    options = {"strides": [1, 1, 1, 1], "padding": "SAME"}
    forward: Contestants = {
        "exactqat": lambda: eq.nn.depthwise_conv2d(x, filter, **options),
        "torch": lambda: torch.nn.functional.conv2d(image, weight, padding=1, groups=channels),
    }
    backward: Contestants = {
        "exactqat": lambda: (
            eq.nn.depthwise_conv2d_backprop_input(x.shape, filter, gradient, **options),
            eq.nn.depthwise_conv2d_backprop_filter(x, filter.shape, gradient, **options),
        ),
        "torch": lambda: torch.ops.aten.convolution_backward(
            gradient.permute(0, 3, 1, 2),
            image,
            weight,
            None,
            [1, 1],
            [1, 1],
            [1, 1],
            False,
            [0, 0],
            channels,
            [True, True, False],
        ),
    }
    return forward, backward


def race(contestants: Contestants, repeats: int) -> dict[str, list[float]]:
    """Seconds of each call; the contestants take turns."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats + 3):
        for name, call in contestants.items():
            start = time.perf_counter()
            call()
            if repeat >= 3:
                times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", action="store_true", help="write bench/results/<machine>.json")
    arguments = parser.parse_args()
    if arguments.repeats < 2:
        parser.error(f"--repeats must be at least 2, got {arguments.repeats}")
    torch.set_num_threads(arguments.threads)
    eq.set_num_threads(arguments.threads)

    table = Table(
        box=SIMPLE,
        title=f"medians of {arguments.repeats} calls in ms, {arguments.threads} threads, results freshly allocated",
    )
    for column in ("operation", "tensor", "copy", "exactqat", "spread", "torch", "ratio"):
        table.add_column(column, justify="left" if column in ("operation", "tensor") else "right", no_wrap=True)
    rows = []
    for operation in (fake_quantization, batch_normalization, depthwise_convolution):
        for shape in SHAPES:
            x = torch.randn(shape)
            target = torch.empty_like(x)
            for direction, contestants in zip(("forward", "gradient"), operation(x), strict=True):
                copy: Contestants = {"copy": lambda target=target, x=x: target.copy_(x)}  # type: ignore[misc]
                times = race(copy | contestants, arguments.repeats)
                median = {name: 1e3 * statistics.median(values) for name, values in times.items()}
                quartiles = statistics.quantiles(times["exactqat"], n=4)
                row = {
                    "operation": f"{NAMES[operation.__name__]} {direction}",
                    "tensor": "x".join(map(str, shape)),
                    **{f"{name}_ms": round(value, 4) for name, value in median.items()},
                    "spread": round((quartiles[2] - quartiles[0]) * 500 / median["exactqat"], 3),
                    "ratio": round(median["torch"] / median["exactqat"], 3),
                }
                rows.append(row)
                cells = [f"{row[f'{name}_ms']:.2f}" for name in ("copy", "exactqat", "torch")]
                cells.insert(2, f"±{row['spread']:.0%}")
                table.add_row(row["operation"], row["tensor"], *cells, f"{row['ratio']:.1f}x")
    Console().print(table)
    if arguments.save:
        path = Path(__file__).parent / "results" / f"{machine()}.json"
        path.parent.mkdir(exist_ok=True)
        versions = {"exactqat": eq.__version__, "torch": torch.__version__}
        settings = {"repeats": arguments.repeats, "threads": arguments.threads}
        path.write_text(json.dumps({"versions": versions, "settings": settings, "rows": rows}, indent=1) + "\n")
        print(f"saved as {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def machine() -> str:
    """The processor's name and number of cores, as a file name."""
    model = next(
        (line for line in CPUINFO.read_text().splitlines() if line.startswith("model name")), platform.machine()
    )
    words = re.findall(r"[A-Za-z0-9]+", model.partition(":")[2] or model)
    return "-".join([*words, f"{os.cpu_count()}-cores"]).lower()


if __name__ == "__main__":
    main()
