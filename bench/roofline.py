# SPDX-License-Identifier: Apache-2.0
"""The picture of a run: how near every row comes to what the machine allows.

    python bench/roofline.py bench/results/<machine>.json

Left, operations bound by memory: bytes moved in a second over the bytes of the call, beside the copy of the same row.
Right, depthwise convolutions: multiply-adds in a second over multiply-adds for each byte, under the roofline of the
copy's bandwidth (from the row whose call is largest) and a matrix product's rate. All with preallocated results.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import saved
from operations import BY_KEY

COLORS = {"whole tensor": "tab:blue", "per channel": "tab:green", "batch norm": "tab:orange"}
SHAPES = {"depthwise": ("forward", "tab:blue"), "depthwise_input": ("gradient of input", "tab:green"),
          "depthwise_filter": ("gradient of filter", "tab:orange")}  # fmt: skip


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    threads = max(row["threads"] for row in results["rows"])
    rows = [row for row in results["rows"] if row["threads"] == threads and row["batch"]]
    peak = results["peak_multiply_adds"][str(threads)] / 1e9
    figure, (memory, arithmetic) = pyplot.subplots(1, 2, figsize=(14, 5.2), layout="constrained")
    how = f"{threads} thread{'s' if threads > 1 else ''}, preallocated results"
    if results.get("device", "cpu") != "cpu":
        how = "replayed from CUDA graphs"
    figure.suptitle(f"{results['machine']}, {how}")

    copies = sorted((row["bytes"] / 1e6, row["bytes"] / row["copy"][0] / 1e9) for row in rows)
    memory.plot(*zip(*copies, strict=True), ".", color="lightgray", label="copy of as many bytes", zorder=1)
    for group, color in COLORS.items():
        points = [
            (row["bytes"] / 1e6, row["gigabytes_per_second"]) for row in rows if BY_KEY[row["operation"]].group == group
        ]
        if points:
            memory.plot(*zip(*points, strict=True), "o", markersize=4, alpha=0.7, color=color, label=group)
    memory.set(xscale="log", yscale="log", xlabel="MB that the call must move", ylabel="GB/s")
    memory.set_title("bound by memory")
    memory.legend(fontsize="small")
    memory.grid(alpha=0.3, which="both")

    depthwise = [row for row in rows if row["multiply_adds"]]
    if depthwise:
        largest = max(depthwise, key=lambda row: row["bytes"])
        bandwidth = largest["bytes"] / largest["copy"][0] / 1e9
        intensities = sorted(row["multiply_adds"] / row["bytes"] for row in depthwise)
        edge = peak / bandwidth
        line = [min(intensities[0], edge) * 0.8, edge, max(intensities[-1], edge) * 1.25]
        arithmetic.plot(line, [min(bandwidth * x, peak) for x in line], color="black", linewidth=1)
        arithmetic.annotate(f"copy {bandwidth:.0f} GB/s", (line[0], bandwidth * line[0]), fontsize="small",
                            xytext=(12, -8), textcoords="offset points")  # fmt: skip
        arithmetic.annotate(f"matrix product {peak:.0f} billion/s", (line[2], peak), fontsize="small",
                            xytext=(0, 4), textcoords="offset points", ha="right")  # fmt: skip
        for key, (name, color) in SHAPES.items():
            for form, marker in (("NHWC", "o"), ("NCHW", "x")):
                points = [
                    (row["multiply_adds"] / row["bytes"], row["giga_multiply_adds_per_second"])
                    for row in depthwise
                    if (row["operation"], row["format"]) == (key, form)
                ]
                if points:
                    arithmetic.plot(*zip(*points, strict=True), marker, markersize=4, alpha=0.7, color=color,
                                    label=f"{name}, {form}")  # fmt: skip
        arithmetic.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1))
    arithmetic.set(
        xscale="log", yscale="log", xlabel="multiply-adds for each byte", ylabel="billion multiply-adds a second"
    )
    # Less than two decades: a number at 1, 2 and 5, or none is named.
    arithmetic.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    arithmetic.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    arithmetic.xaxis.set_minor_formatter(NullFormatter())
    arithmetic.set_title("depthwise (above the slope: the tensors fit the cache)")
    arithmetic.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    draw(saved.read(source), source.with_suffix(".png"))
