# SPDX-License-Identifier: Apache-2.0
"""What is found as pictures, drawn with Matplotlib."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..deploy.inspect import name_in_short

if TYPE_CHECKING:
    from .sensitivity import Sensitivity

COLORS = {"weights": "#3b6fb6", "result": "#d9822b", "input": "#5a9e6f"}
# Bars that fit a page.
MOST = 40


def axes(width: float, height: float) -> tuple[Any, Any]:
    """A figure and its axes, in no window."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures need Matplotlib: pip install matplotlib", name=error.name) from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def sensitivity_picture(found: Sensitivity, path: Path) -> Path:
    """One bar for each part, in order of execution: what it costs alone, or its noise where there is no metric."""
    parts = found.parts if len(found.parts) <= MOST else sorted(found.worst(MOST), key=found.parts.index)
    by_loss = any(part.loss for part in parts)
    figure, plot = axes(7, 1.2 + 0.22 * len(parts))
    values = [
        (part.loss or 0.0) if by_loss else -part.decibels if math.isfinite(part.decibels) else 0.0 for part in parts
    ]
    lowest = 0.0 if by_loss else min(values, default=0.0)
    names = [f"{name_in_short(part.layer, 30)} ({part.kind})".replace("$", r"\$") for part in parts]
    plot.barh(
        range(len(parts)), [value - lowest for value in values], left=lowest, color=[COLORS[p.kind] for p in parts]
    )
    plot.set_yticks(range(len(parts)), names, fontsize=7)
    plot.invert_yaxis()
    plot.set_xlabel(
        "loss of the metric by this part alone" if by_loss else "noise of the outputs by this part alone, dB"
    )
    plot.set_title(f"What costs accuracy on {found.device}, {found.examples:,} examples", fontsize=10)
    figure.savefig(path)
    return path


__all__ = ["axes", "sensitivity_picture"]
