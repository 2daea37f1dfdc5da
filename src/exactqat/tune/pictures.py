# SPDX-License-Identifier: Apache-2.0
"""Findings as pictures, drawn with Matplotlib."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..deploy.inspect import name_in_short

if TYPE_CHECKING:
    from .planned import PlanPoint, PrecisionPlan
    from .sensitivity import Sensitivity

COLORS = {"weights": "#3b6fb6", "result": "#d9822b", "input": "#5a9e6f"}
# Bars that fit a page.
MOST = 40


def axes(width: float, height: float, panels: int = 0) -> tuple[Any, Any]:
    """A figure, without a window, and its axes; a list of axes for panels side by side that share the vertical axis."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures need Matplotlib: pip install matplotlib", name=error.name) from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    if not panels:
        return figure, figure.subplots()
    return figure, list(figure.subplots(1, panels, sharey=True, squeeze=False)[0])


def sensitivity_picture(found: Sensitivity, path: Path) -> Path:
    """One bar for each part, in order of execution: what it costs alone; its noise where that costs nothing or there is
    no metric; what keeping it fine brings where nothing else was measured."""
    parts = found.parts if len(found.parts) <= MOST else sorted(found.worst(MOST), key=found.parts.index)
    figure, plot = axes(7, 1.2 + 0.22 * len(parts))
    noise = [-part.decibels for part in parts if part.decibels is not None and math.isfinite(part.decibels)]
    lowest = 0.0
    if any(part.loss for part in parts):
        title, values = "loss of the metric by this part alone", [part.loss or 0.0 for part in parts]
    elif any(part.decibels is not None for part in parts):
        title, lowest = "noise of the outputs by this part alone, dB", min(noise, default=0.0)
        values = [lowest if part.decibels is None else max(-part.decibels, lowest) for part in parts]
    else:
        title, values = "gain in the metric by keeping this part fine", [part.gain or 0.0 for part in parts]
    names = [f"{name_in_short(part.layer, 30)} ({part.kind})".replace("$", r"\$") for part in parts]
    plot.barh(
        range(len(parts)), [value - lowest for value in values], left=lowest, color=[COLORS[p.kind] for p in parts]
    )
    plot.set_yticks(range(len(parts)), names, fontsize=7)
    plot.invert_yaxis()
    plot.set_xlabel(title)
    plot.set_title(f"What costs accuracy on {found.device}, {found.examples:,} examples", fontsize=10)
    figure.savefig(path)
    return path


def plan_picture(found: PrecisionPlan, path: Path) -> Path:
    """The metric of all plans over what they cost, a panel for flash, arena and multiply-adds each: the front as a
    line, the budgets dashed."""
    panels = {"flash": "flash, KiB", "arena": "arena, KiB", "multiply_adds": "multiply-adds, thousands"}
    units = {"flash": 2**10, "arena": 2**10, "multiply_adds": 10**3}
    shown = [name for name in panels if any(point.costs[name] is not None for point in found.points)]
    figure, plots = axes(3.3 * len(shown), 3.4, len(shown))
    for name, plot in zip(shown, plots, strict=True):

        def cost(point: PlanPoint, name: str = name) -> float:
            return float(point.costs[name] or 0) / units[name]

        known = [point for point in found.points if point.costs[name] is not None]
        plot.plot([cost(point) for point in known], [point.metric for point in known], ".", color="#b5bcc6")
        edge = _edge([(cost(point), point.metric) for point in known], found.higher_is_better)
        plot.plot(*zip(*edge, strict=True), "o-", color=COLORS["weights"], markersize=4, drawstyle="steps-post")
        if found.chosen in known:
            plot.plot([cost(found.chosen)], [found.chosen.metric], "*", color=COLORS["result"], markersize=13)
        limit = found.budgets.of_resources.get(name)
        if limit is not None:
            plot.axvline(limit / units[name], color="#444444", linestyle="--", linewidth=1)
        if found.budgets.max_drop is not None:
            down = found.budgets.max_drop * (-1 if found.higher_is_better else 1)
            plot.axhline(found.reference + down, color="#444444", linestyle="--", linewidth=1)
        plot.set_xlabel(panels[name])
    plots[0].set_ylabel("metric")
    figure.suptitle(f"Precision plans on {found.device}, {found.examples:,} examples; the star is chosen", fontsize=10)
    figure.savefig(path)
    return path


def _edge(points: list[tuple[float, float]], higher_is_better: bool) -> list[tuple[float, float]]:
    """The points that are better than all cheaper ones."""
    sign, best, found = (1 if higher_is_better else -1), -math.inf, []
    for cost, metric in sorted(points, key=lambda point: (point[0], -sign * point[1])):
        if sign * metric > best:
            best = sign * metric
            found.append((cost, metric))
    return found


__all__ = ["axes", "plan_picture", "sensitivity_picture"]
