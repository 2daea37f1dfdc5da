# SPDX-License-Identifier: Apache-2.0
"""The networks that exactqat brings, on every device that this machine has or emulates.

    python tests/campaigns/run_devices.py

Each network is prepared with random weights in several precisions, calibrated, frozen and lowered; every integer of
every layer is compared with TFLite-Micro, with LiteRT's kernels here and, where its emulation is set up, with LiteRT on
several ARM64 processors. Footprints are TFLite-Micro's and Vela's. The status is 1 if an integer differs where equality
is claimed, or if Vela leaves an operator of MLPerf Tiny's four networks to the processor.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from exactqat import qat
from exactqat.application.job.models import NETWORKS, network
from exactqat.deploy import Graph, footprint, npu_footprint, profiles_here, unclaimed, verify, write_tflite
from exactqat.deploy.lower import lower
from exactqat.deploy.runtimes import emulation

# Shapes and classes of MLPerf Tiny: spotting of keywords, classes of images, anomalies in sounds, visual wake words.
MLPERF_TINY = {
    "dscnn": ((1, 49, 10), 12),
    "resnet8": ((3, 32, 32), 10),
    "autoencoder": ((640,), 640),
    "mobilenet_v1": ((3, 96, 96), 2),
}
PRECISIONS = ((8, 8), (4, 4), (4, 8))


def graph_of(name: str, bits: tuple[int, int] = (8, 8), per_channel: bool = True) -> Graph:
    """A network of exactqat's own with random weights and statistics, lowered."""
    shape, classes = MLPERF_TINY.get(name, ((3, 32, 32), 10))
    torch.manual_seed(0)
    model = network("plain_networks:autoencoder" if name == "autoencoder" else name, shape, classes)
    x = torch.randn(8, *shape)
    rules = [qat.Rule("*", weight_bits=bits[0], activation_bits=bits[1], per_channel=per_channel)]
    prepared = qat.prepare(model, x, rules)
    qat.calibrate(prepared, [x])
    qat.freeze(prepared)
    return lower(prepared)


def devices() -> Iterator[tuple[str, str, str]]:
    """Name of a device, its profile, and the processor that is emulated."""
    native = "xnnpack-arm64" in profiles_here() and not emulation.is_set_up()
    for profile in profiles_here():
        if profile == "xnnpack-arm64" and not native:
            yield from ((f"{profile} {cpu}", profile, cpu) for cpu in emulation.CPUS)
        else:
            yield profile, profile, ""


def compare(names: list[str], images: int, console: Console) -> int:
    """Runs everything and prints one row for each network; gives the number of integers that differ."""
    targets = list(devices())
    table = Table(title="integers compared, and how many differ", title_justify="left")
    table.add_column("network")
    for device, _, _ in targets:
        table.add_column(device, justify="right")
    wrong = 0
    for name in names:
        for bits in PRECISIONS:
            graph = graph_of(name, bits)
            rng = np.random.default_rng(0)
            shape = graph.tensors[graph.inputs[0]].shape[1:]
            codes = rng.integers(-128, 128, (images, *shape)).astype(np.int8)
            cells = []
            with tempfile.TemporaryDirectory() as folder:
                path = write_tflite(graph, Path(folder) / "model.tflite")
                for _, profile, cpu in targets:
                    os.environ["EXACTQAT_ARM64_CPU"] = cpu
                    report = verify(graph, path, codes, profile)
                    claimed = not unclaimed(graph, profile)
                    wrong += report.differing * claimed
                    cells.append(f"{report.values:,} / {report.differing:,}" + ("" if claimed else " *"))
            table.add_row(f"{name} W{bits[0]}A{bits[1]}", *cells)
    console.print(table)
    console.print("* not claimed to be equal")
    return wrong


def measure(names: list[str], console: Console) -> int:
    """Prints what the networks take; gives the number of operators that Vela leaves to the processor."""
    table = Table(title="what they take", title_justify="left")
    for header in (
        "network",
        "flash",
        "arena",
        "multiply-adds",
        "NPU: left to the processor",
        "SRAM",
        "flash",
        "cycles",
    ):
        table.add_column(header, justify="left" if "N" in header or header == "network" else "right")
    left = 0
    for name in names:
        for bits in ((8, 8), (4, 4)):
            graph = graph_of(name, bits)
            own, npu = footprint(graph), npu_footprint(graph)
            left += sum(npu.operators_on_cpu.values()) if name in MLPERF_TINY else 0
            arena = f"{own.arena_bytes:,}" if own.arena_bytes else own.why_not
            on_cpu = ", ".join(f"{count} {kind}" for kind, count in npu.operators_on_cpu.items()) or "none"
            figures = (f"{npu.sram_bytes:,}", f"{npu.flash_bytes:,}", f"{npu.cycles:,}")
            work = f"{own.multiply_accumulates:,}"
            table.add_row(f"{name} W{bits[0]}A{bits[1]}", f"{own.flash_bytes:,}", arena, work, on_cpu, *figures)
    console.print(table)
    return left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS), metavar="NAME")
    parser.add_argument("--images", type=int, default=4)
    arguments = parser.parse_args()
    console = Console(width=200)
    if "xnnpack-arm64" not in profiles_here():
        console.print(f"ARM64 is left out: its emulation is not set up. This does it: {emulation.SET_UP}")
    differing = compare(arguments.networks, arguments.images, console)
    left = measure(arguments.networks, console)
    return int(differing > 0 or left > 0)


if __name__ == "__main__":
    sys.exit(main())
