# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of README and documentation again, for light and dark pages.

`python docs/pictures.py demo` takes the README's from the report of a finished job too; without a folder, those of the
concepts are drawn alone, which the library's own operators compute.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

import exactqat as eq
from exactqat.job import charts
from exactqat.job.page import BAD, DARK, NOTE, variable

PICTURES = Path(__file__).resolve().parent / "_static" / "pictures"
SHOWN = {"accuracy": "Test accuracy of every network"}


def write(name: str, svg: str) -> None:
    """A picture of a page of the job as two files: the page's variables become the colors of its two screens."""
    PICTURES.mkdir(exist_ok=True)
    for screen in ("light", "dark"):
        drawn = svg
        for light, dark in DARK.items():
            drawn = drawn.replace(variable(light), dark if screen == "dark" else light)
        drawn = re.sub(r" style='min-width:[^']*'", "", drawn, count=1)
        drawn = drawn.replace("xlink:href", "href")
        head = "<svg xmlns='http://www.w3.org/2000/svg' font-family='system-ui, sans-serif' "
        (PICTURES / f"{name}-{screen}.svg").write_text(drawn.replace("<svg ", head, 1) + "\n")


def picture_in(figure: str) -> str:
    return figure[figure.index("<svg") : figure.index("</svg>") + len("</svg>")]


def from_report(report: Path) -> None:
    text = report.read_text()
    for name, caption in SHOWN.items():
        at = text.index(f"aria-label='{caption}")
        write(name, text[text.rindex("<svg", 0, at) : text.index("</svg>", at) + len("</svg>")])


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
    axes.set_ylabel("what is stored")
    charts._below(figure, axes)
    charts._clean(axes)
    return charts.svg(figure, "Fake quantization of a number in 3 bits.")


def _ends(axes: Axes, low: np.float32, high: np.float32) -> None:
    for number, end in enumerate((low, high)):
        axes.axvline(
            float(end), color=BAD, linewidth=1, linestyle=":", label="the range asked for" if not number else ""
        )


def nudging() -> str:
    """Ranges move until real 0 is a code."""
    x = np.linspace(-4, 4, 4001, dtype=np.float32)
    asked = [(-1.0, 1.1), (-0.9, 1.2), (-0.35, 1.8), (0.4, 1.6), (-1.7, -0.2)]
    figure, axes = charts._figure()
    for place, (low, high) in enumerate(asked):
        codes = np.unique(eq.quantization.fake_quant_with_min_max_vars(x, low, high, num_bits=3))
        first = place == 0
        axes.plot([low, high], [place - 0.2] * 2, color=BAD, linewidth=2.5, label="range asked for" if first else "")
        axes.plot(
            codes, [place + 0.15] * len(codes), "o", color=charts.QAT_COLORS[1], markersize=5,
            label="what can be stored" if first else "",
        )  # fmt: skip
    axes.axvline(0, color=NOTE, linewidth=1)
    axes.set_yticks(range(len(asked)), [f"{low} … {high}" for low, high in asked])
    axes.invert_yaxis()
    axes.set_xlabel("3 bits: 8 values, one of them exactly 0")
    charts._below(figure, axes)
    charts._clean(axes, "x")
    return charts.svg(figure, "Ranges that were asked for, and the values that can be stored.")


def main(arguments: list[str]) -> int:
    with charts.drawing():
        for picture in (staircase, nudging):
            write(picture.__name__, picture_in(picture()))
    for folder in arguments:
        from_report(Path(folder) / "report.html")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
