# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of README and documentation again, for light and dark pages.

`python docs/pictures.py demo` draws the README's from the metrics.json of `make demo` too; without a folder, those of
the concepts are drawn alone, which the library's own operators compute.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

import exactqat as eq
from exactqat import deploy
from exactqat.application.report import charts
from exactqat.application.report.page import BAD, DARK, NOTE
from exactqat.qat.train.core import primitives_numpy
from exactqat.qat.train.core.ranges import observed, rank_of_ends

PICTURES = Path(__file__).resolve().parent / "_static" / "pictures"


def write(name: str, svg: str) -> None:
    """A picture of a page of the job as two files: the page's variables become the colors of its two screens."""
    PICTURES.mkdir(exist_ok=True)
    for screen in ("light", "dark"):
        drawn = str(svg)  # which escapes nothing
        for light, dark in DARK.items():
            drawn = drawn.replace(f"var(--c{light[1:]})", dark if screen == "dark" else light)
        drawn = drawn.replace("xlink:href", "href")
        head = "<svg xmlns='http://www.w3.org/2000/svg' font-family='system-ui, sans-serif' "
        (PICTURES / f"{name}-{screen}.svg").write_text(drawn.replace("<svg ", head, 1) + "\n")


def picture_in(figure: str) -> str:
    return figure[figure.index("<svg") : figure.index("</svg>") + len("</svg>")]


def accuracies(metrics: dict[str, Any]) -> str:
    """Test accuracy of a finished job's networks, from its metrics.json: a dot for each."""
    rows = [("float32", metrics["float"]["test_accuracy"], NOTE)]
    colors = {"ptq": charts.PTQ_COLORS, "qat": charts.QAT_COLORS}
    for precision, networks in metrics["networks"].items():
        methods = [(name, found) for name, found in networks.items() if isinstance(found, dict)]
        rows.append(("", float("nan"), NOTE))
        for position, (name, found) in enumerate(methods):
            title = f"{precision.upper()} {found['title'].removesuffix(' ranges')}"
            rows.append((title, found["device_accuracy"], colors[name.partition("_")[0]][position % 2]))
    figure, axes = charts._figure(1.0 + 0.22 * len(rows))
    axes.axvline(100 * rows[0][1], **charts.DASHED, color=NOTE)
    for place, (title, accuracy, color) in enumerate(rows):
        axes.plot([100 * accuracy], [place], "o", color=color, markersize=9)
        if title:
            axes.text(1.02, place, f"{accuracy:.1%}", transform=axes.get_yaxis_transform(), va="center", fontsize=10)
    named = [(place, title) for place, (title, *_) in enumerate(rows) if title]
    axes.set_yticks([place for place, _ in named], [title for _, title in named])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel("test accuracy on the device, %")
    charts._clean(axes, "both")
    return charts.svg(figure, "Test accuracy of the demo's networks, quantized ones on the device; dashed: float32.")


def staircase() -> str:
    """What fake quantization does to a number, and where its gradient is zero."""
    x = np.linspace(-1.6, 1.6, 801, dtype=np.float32)
    low, high = np.float32(-1.0), np.float32(1.05)
    y = eq.quantization.fake_quant_with_min_max_vars(x, low, high, num_bits=3)
    ones = np.ones_like(x)
    inside = eq.fake_quant_with_min_max_vars_gradient(ones, x, low, high, 3).backprops_wrt_input
    figure, axes = charts._figure()
    axes.plot(x, x, color=NOTE, linewidth=1, linestyle="--", label="the number itself")
    axes.plot(x, y, color=charts.QAT_COLORS[1], linewidth=2, label="stored: 3 bits, 8 values")
    axes.fill_between(x, -1.7, -1.6, where=inside > 0, color=charts.QAT_COLORS[0], label="gradient passes", linewidth=0)
    _ends(axes, low, high)
    axes.set_xlabel("x")
    axes.set_ylabel("stored value")
    charts._below(figure, axes)
    charts._clean(axes)
    return charts.svg(figure, "Fake quantization of a number in 3 bits.")


def _ends(axes: Axes, low: np.float32, high: np.float32) -> None:
    for number, end in enumerate((low, high)):
        axes.axvline(
            float(end), color=BAD, linewidth=1, linestyle=":", label="the requested range" if not number else ""
        )


def nudging() -> str:
    """Ranges move until real 0 is a code."""
    x = np.linspace(-4, 4, 4001, dtype=np.float32)
    asked = [(-1.0, 1.1), (-0.9, 1.2), (-0.35, 1.8), (0.4, 1.6), (-1.7, -0.2)]
    figure, axes = charts._figure()
    for place, (low, high) in enumerate(asked):
        codes = np.unique(eq.quantization.fake_quant_with_min_max_vars(x, low, high, num_bits=3))
        first = place == 0
        axes.plot([low, high], [place - 0.2] * 2, color=BAD, linewidth=2.5, label="requested range" if first else "")
        axes.plot(
            codes, [place + 0.15] * len(codes), "o", color=charts.QAT_COLORS[1], markersize=5,
            label="storable values" if first else "",
        )  # fmt: skip
    axes.axvline(0, color=NOTE, linewidth=1)
    axes.set_yticks(range(len(asked)), [f"{low} … {high}" for low, high in asked])
    axes.invert_yaxis()
    axes.set_xlabel("3 bits: 8 values, one of them exactly 0")
    charts._below(figure, axes)
    charts._clean(axes, "x")
    return charts.svg(figure, "Ranges that were asked for, and the values that can be stored.")


def ranges() -> str:
    """Where the policies put the end of a range, batch after batch, when one value in some thousands is an outlier."""
    random = np.random.default_rng(0)
    batches = np.abs(random.normal(0, 1, (60, 4096))).astype(np.float32)
    for batch in range(7, 60, 12):
        batches[batch, 0] = random.uniform(7, 9)
    policies = {"min_max": BAD, "last_batch": NOTE, "ema": charts.QAT_COLORS[1], "percentile": charts.PTQ_COLORS[1]}
    figure, axes = charts._figure()
    axes.plot(batches.max(1), ".", color=NOTE, markersize=5, label="largest value of a batch")
    for policy, color in policies.items():
        ends, state = [], (np.float32(0), np.float32(0), 0)
        for batch in batches:
            outermost = rank_of_ends(99.9, batch.size) if policy == "percentile" else 1
            shown = np.float32(0), np.sort(batch)[-outermost]
            state = observed(primitives_numpy, policy, 0.9, [shown], 1, state[:2], state[2])
            ends.append(float(state[1]))
        axes.plot(ends, color=color, linewidth=1 if policy == "last_batch" else 2, label=f'"{policy}"')
    axes.set_xlabel("batch")
    axes.set_ylabel("end of the range")
    axes.set_ylim(0)
    charts._below(figure, axes)
    charts._clean(axes)
    return charts.svg(figure, "The end of a range by four policies, batch after batch.")


def folding() -> str:
    """Batch norm's factor moves a channel's weights and its grid together."""
    weights = np.float32([[-1.16, 0.79, -0.62], [-0.41, 2.1, 0.35], [0.83, -1.3, 0.93]])  # [weight, channel]
    factors = np.float32([1.8, 0.5, 1.3])
    versions = {"as trained": (weights, NOTE), "times batch norm's factor": (weights * factors, charts.QAT_COLORS[1])}
    figure, axes = charts._figure()
    for place, (label, (values, color)) in enumerate(versions.items()):
        ends = np.abs(values).max(0)
        stored = eq.quantization.fake_quant_with_min_max_vars_per_channel(
            values, -ends, ends, num_bits=3, narrow_range=True
        )
        scales = ends / np.float32(3)
        for channel, scale in enumerate(scales):
            height = channel - 0.17 + 0.4 * place
            axes.plot(np.arange(-3, 4) * scale, [height] * 7, "|", color=NOTE, markersize=9, markeredgewidth=1)
            axes.plot(stored[:, channel], [height] * 3, "o", color=color, label="" if channel else label)
            for value in stored[:, channel]:
                axes.annotate(
                    str(int(np.rint(value / scale))), (value, height), (0, 7), textcoords="offset points",
                    ha="center", fontsize=10, color=color,
                )  # fmt: skip
    axes.set_yticks(range(3), [f"x {factor:.1f}" for factor in factors])
    axes.set_ylim(2.6, -0.6)
    axes.set_xlabel("weights, with their codes of 3 bits")
    charts._below(figure, axes)
    charts._clean(axes, "x")
    return charts.svg(figure, "Weights of three channels and their codes, before and after folding.")


def rounding() -> str:
    """The same sums, converted to a grid half as fine by two profiles."""
    builder = deploy.Builder()
    source = builder.input("input", (1, 1, 1, 1), deploy.per_tensor(0.5, 0))
    one = np.ones((1, 1, 1, 1), np.int8)
    bias = np.zeros(1, np.int32)
    half = builder.conv_2d(source, one, np.float32([1.0]), bias, deploy.per_tensor(1.0, 0), name="half")
    graph = builder.graph([half])
    codes = np.arange(-6, 7, dtype=np.int8)
    figure, axes = charts._figure()
    sums = np.linspace(-3.2, 3.2, 3)
    axes.plot(sums, sums, color=NOTE, linewidth=1, linestyle="--", label="the sum itself")
    for profile, marker, size, color in (
        ("xnnpack-x86", "o", 10, charts.QAT_COLORS[0]),
        ("reference", "D", 5, charts.PTQ_COLORS[1]),
    ):
        stored = deploy.simulate(graph, codes.reshape(-1, 1, 1, 1), device=profile)[half].ravel()
        axes.plot(codes / 2, stored, marker, color=color, markersize=size, label=profile)
    axes.set_xlabel("sum, in steps of the result")
    axes.set_ylabel("code that is stored")
    charts._below(figure, axes, 3)
    charts._clean(axes)
    return charts.svg(figure, "What two profiles store of the same sums: some of the halves differ.")


def profiles() -> str:
    """How far the profiles diverge, layer after layer, in a network of equal convolutions with random weights."""
    random = np.random.default_rng(0)
    builder = deploy.Builder()
    grid = deploy.per_tensor(0.05, 0)
    result = builder.input("input", (1, 12, 12, 8), grid)
    names = []
    for layer in range(12):
        weights = random.integers(-127, 128, (8, 3, 3, 8)).astype(np.int8)
        scales = random.uniform(0.8, 1.2, 8).astype(np.float32) / np.float32(127 * 5)
        result = builder.conv_2d(
            result, weights, scales, np.zeros(8, np.int32), grid, padding="SAME", name=f"layer {layer + 1}"
        )
        names.append(result)
    graph = builder.graph(names)
    codes = random.integers(-60, 61, (16, 12, 12, 8)).astype(np.int8)
    trained = deploy.simulate(graph, codes, device="xnnpack-x86")
    figure, axes = charts._figure()
    for profile, style, color in (
        ("xnnpack-arm64", "o", charts.QAT_COLORS[0]),
        ("reference", "o-", charts.PTQ_COLORS[1]),
        ("micro", "s:", charts.QAT_COLORS[1]),
    ):
        tensors = deploy.simulate(graph, codes, device=profile)
        parts = [100 * float((tensors[name] != trained[name]).mean()) for name in names]
        axes.plot(range(1, 13), parts, style, color=color, markersize=5, label=profile)
    axes.set_xlabel("layer")
    axes.set_ylabel("codes that differ, %")
    axes.set_ylim(0)
    charts._below(figure, axes, 3)
    charts._clean(axes)
    return charts.svg(figure, "Codes that differ from those of xnnpack-x86, layer after layer, by device.")


def main(arguments: list[str]) -> int:
    with charts.drawing():
        for picture in (staircase, nudging, ranges, folding, rounding, profiles):
            write(picture.__name__, picture_in(picture()))
        for folder in arguments:
            write("accuracy", picture_in(accuracies(json.loads((Path(folder) / "metrics.json").read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
