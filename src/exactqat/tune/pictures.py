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


def _figure(width: float, height: float, panels: int) -> tuple[Any, list[Any]]:
    """A figure, without a window, and axes side by side that share the vertical axis."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures need Matplotlib: pip install matplotlib", name=error.name) from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, panels, sharey=True, squeeze=False)[0])


def sensitivity_picture(found: Sensitivity, path: Path) -> Path:
    """One bar for each part, in order of execution: what it costs alone; its noise where that costs nothing or there is
    no metric; what keeping it fine brings where nothing else was measured."""
    parts = found.parts if len(found.parts) <= MOST else sorted(found.worst(MOST), key=found.parts.index)
    figure, (plot,) = _figure(7, 1.2 + 0.22 * len(parts), 1)
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
    panels = {"flash": ("flash, KiB", 2**10), "arena": ("arena, KiB", 2**10)}
    panels["multiply_adds"] = "multiply-adds, thousands", 10**3
    shown = [name for name in panels if any(point.costs[name] is not None for point in found.points)]
    figure, plots = _figure(3.3 * len(shown), 3.4, len(shown))
    sign = 1 if found.higher_is_better else -1
    for name, plot in zip(shown, plots, strict=True):
        title, unit = panels[name]
        costs = {id(point): (point.costs[name] or 0) / unit for point in found.points if point.costs[name] is not None}
        known = [point for point in found.points if id(point) in costs]
        plot.plot([costs[id(point)] for point in known], [point.metric for point in known], ".", color="#b5bcc6")
        # Those that are better than all cheaper ones.
        edge: list[PlanPoint] = []
        for point in sorted(known, key=lambda point: (costs[id(point)], -sign * point.metric)):
            if not edge or sign * point.metric > sign * edge[-1].metric:
                edge.append(point)
        style = {"color": COLORS["weights"], "markersize": 4, "drawstyle": "steps-post"}
        plot.plot([costs[id(point)] for point in edge], [point.metric for point in edge], "o-", **style)
        if id(found.chosen) in costs:
            plot.plot([costs[id(found.chosen)]], [found.chosen.metric], "*", color=COLORS["result"], markersize=13)
        limits = {"color": "#444444", "linestyle": "--", "linewidth": 1}
        if name in found.budgets.of_resources:
            plot.axvline(found.budgets.of_resources[name] / unit, **limits)
        if found.budgets.max_drop is not None:
            plot.axhline(found.reference - sign * found.budgets.max_drop, **limits)
        plot.set_xlabel(title)
    plots[0].set_ylabel("metric")
    figure.suptitle(f"Precision plans on {found.device}, {found.examples:,} examples; the star is chosen", fontsize=10)
    figure.savefig(path)
    return path


__all__ = ["plan_picture", "sensitivity_picture"]
