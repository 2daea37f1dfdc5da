# SPDX-License-Identifier: Apache-2.0
"""The report's charts, drawn by matplotlib as vectors whose colors and letters are the page's, with values on hover.

Each is as wide as a phone's screen, so that its letters can be read there; the page shows them side by side where there
is room.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ...kit.display import shortened
from ..job.results import Outcome, Results
from . import findings
from .page import DARK, INK, LINE, NOTE

FLOAT_COLOR, PTQ_COLORS, QAT_COLORS = "#6b7280", ("#f2b77c", "#e08a3c"), ("#6fa8dc", "#1f5fa8")
METHOD_COLORS = dict(
    zip(("ptq_min_max", "ptq_least_error", "qat_ema", "qat_learned"), PTQ_COLORS + QAT_COLORS, strict=True)
) | {"ptq_searched": "#146c43"}
METHOD_MARKERS = dict(zip(METHOD_COLORS, "v^osP", strict=True))
PRECISION_COLORS = ("#1f5fa8", "#e08a3c", "#146c43", "#b02a37", "#6fa8dc", "#f2b77c", "#6b7280")
# The most characters of a name in a picture, which has to fit the longest; the most points with values on hover.
DRAWN_LENGTH, MOST_TIPS = 20, 400
# Inches of 72 units; a phone's page is some 340 units wide. How small and large they are shown is in `style.css`.
WIDTH, HEIGHT = 4.6, 3.1
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "exactqat", "font.size": 11, "axes.titlesize": 11, "legend.fontsize": 10,
    "text.color": INK, "axes.edgecolor": NOTE, "axes.labelcolor": INK, "xtick.color": NOTE, "ytick.color": NOTE,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.titlelocation": "left", "legend.frameon": False,
    # Names are names: dollar signs are not math, and a user's own text style is not used.
    "text.parse_math": False, "text.usetex": False, "axes.unicode_minus": True, "axes.formatter.use_mathtext": False,
}  # fmt: skip
PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.5g}%")
# Axes with room beyond the possible shares.
SHARE = FuncFormatter(lambda value, _: f"{100 * value:.5g}%" if -1e-9 < value < 1 + 1e-9 else "")
NUMBER = FuncFormatter(lambda value, _: f"{value:.6g}")
DASHED: dict[str, Any] = {"linestyle": "--", "linewidth": 1}
# Bytes, accuracy and name; and by title how points are drawn and in which color.
Point = tuple[int, float, str]
Series = dict[str, tuple[str, str, list[Point]]]
# An artist's id that becomes what is shown next to the pointer.
TIP = "tip:"


@contextmanager
def drawing() -> Iterator[None]:
    """In this context, matplotlib draws in STYLE, whatever the user's style."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)  # type: ignore[arg-type]
        yield


def svg(figure: Figure, caption: str) -> Markup:
    """A figure of the page."""
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # The reader's fonts are used, not those that matplotlib has here.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    drawn = buffer.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(rf'<g id="{TIP}([^"]*)">', lambda match: f"<g><title>{match[1]}</title>", drawn)
    # Other pictures on the page have the same ids; those that are referenced are made from what they name.
    drawn = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", drawn)
    drawn = re.sub(r'\s+(xmlns(:\w+)?|version)="[^"]*"', "", drawn)
    (size,) = re.findall(r'viewBox="[^"]*"', drawn[: drawn.index(">")])
    drawn = f"<svg {size} role='img' aria-label='{escape(caption)}'" + drawn[drawn.index(">") :]
    for color in DARK:
        drawn = drawn.replace(color, f"var(--c{color[1:]})")  # of the page's styles
    return Markup(f"<figure>{drawn}<figcaption>{escape(caption)}</figcaption></figure>")


def _figure(height: float = HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _clean(axes: Axes, grid: str = "y") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=LINE, linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def _below(figure: Figure, axes: Axes, columns: int = 2) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=columns)


def _tips(axes: Axes, x: Sequence[float], y: Sequence[float], texts: Sequence[str]) -> None:
    """Shows a text next to the pointer at each point."""
    for across, up, text in list(zip(x, y, texts, strict=True))[:MOST_TIPS]:
        (point,) = axes.plot([across], [up], "o", color=INK, alpha=0, markersize=11, markeredgewidth=0)
        point.set_gid(TIP + shortened(text, 120))


def accuracies(results: Results) -> Markup:
    """A bar for each network; quantized ones on the device."""
    rows: list[tuple[str, float, str]] = [("float32", results.float_test_accuracy, FLOAT_COLOR)]
    places = [0.0]
    for precision in results.settings.precisions:
        for position, outcome in enumerate(results.of(precision)):
            places.append(places[-1] + (1.6 if position == 0 else 1.0))
            label = f"{precision.upper()} {outcome.method.title.removesuffix(' ranges')}"
            rows.append((label, outcome.device_accuracy, METHOD_COLORS[outcome.method.name]))
    shares = [share for _, share, _ in rows]
    # The differences are small: the axis starts below the lowest bar, and says so.
    floor = max(0.0, np.floor((min(shares) - 0.03) * 20) / 20)
    figure, axes = _figure(1.1 + 0.21 * places[-1])
    bars = axes.barh(places, [share - floor for share in shares], left=floor, color=[color for *_, color in rows])
    for bar, place, (label, share, _) in zip(bars, places, rows, strict=True):
        bar.set_gid(f"{TIP}{label}: {share:.2%}")
        axes.text(1.02, place, f"{share:.1%}", transform=axes.get_yaxis_transform(), va="center", fontsize=10)
    axes.axvline(shares[0], **DASHED, color=FLOAT_COLOR, label="the float network's")
    axes.set_yticks(places, [label for label, *_ in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(floor, min(1.0, floor + (max(max(shares), floor + 0.05) - floor) * 1.05))
    # Whole percentages, and few: names at the left may leave little room.
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(PERCENT)
    axes.set_xlabel("test accuracy" + (f" (the axis starts at {floor:.0%})" if floor else ""))
    _below(figure, axes)
    _clean(axes, "x")
    return svg(figure, "Test accuracy of every network; quantized networks on the device. Dashed: the float network's.")


def sizes(results: Results) -> list[Markup]:
    """Accuracy against the bytes of all parameters, for all networks, and against the compressed file, for those that
    are delivered."""
    share, precisions = results.float_test_accuracy, results.settings.precisions
    packed: Series = {"float32": ("D", FLOAT_COLOR, [(results.float_bytes, share, "float32")])}
    for outcome in results.outcomes:
        name, title = outcome.method.name, outcome.method.title
        style = METHOD_MARKERS[name], METHOD_COLORS[name], list[Point]()
        *_, points = packed.setdefault(title.removesuffix(" ranges"), style)
        size = findings.packed_bytes(outcome)
        points.append((size, outcome.device_accuracy, f"{outcome.precision.upper()} {title}"))
    files: Series = {}
    for outcome in sorted(results.delivered, key=lambda outcome: -precisions[outcome.precision][1]):
        style = "o-", PRECISION_COLORS[len(files) % len(PRECISION_COLORS)], list[Point]()
        *_, points = files.setdefault(f"{precisions[outcome.precision][1]}-bit activations", style)
        points.append((outcome.compressed_bytes, outcome.device_accuracy, outcome.precision.upper()))
    return [
        _size_picture(
            packed, None, "bytes of all parameters, packed",
            "Accuracy against size: parameters packed at their own bits (files use 8-bit containers).",
        ),
        _size_picture(
            files, share, "bytes of the compressed .tflite file",
            "Accuracy of the delivered networks on the device, against the compressed file, as downloaded.",
        ),
    ]  # fmt: skip


def _size_picture(series: Series, dashed: float | None, label: str, caption: str) -> Markup:
    """Sizes from left to right, accuracies upwards. dashed: the float network's accuracy; then points have names."""
    figure, axes = _figure(3.5)
    for title, (marker, color, points) in series.items():
        across, up, _ = zip(*points, strict=True)
        axes.plot(across, up, marker, color=color, markersize=7, label=title)
    shown = [point for *_, points in series.values() for point in points]
    if dashed is not None:
        axes.axhline(dashed, **DASHED, color=FLOAT_COLOR, label="the float network's")
        for size, share, name in shown:
            axes.annotate(name, (size, share), (0, -16), textcoords="offset points", ha="center", fontsize=10)
    bytes_of = [size for size, *_ in shown]
    texts = [f"{name}: {share:.2%}, {size:,} bytes" for size, share, name in shown]
    _tips(axes, bytes_of, [share for _, share, _ in shown], texts)
    axes.margins(x=0.12, y=0.22)
    if max(bytes_of) > 3 * min(bytes_of):
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(bytes_of) < 30 * min(bytes_of) else (1,)))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    # Accuracies that are all equal are shown side by side, not enlarged.
    low, high = axes.get_ylim()
    if high - low < 0.05:
        low, high = (low + high) / 2 - 0.025, (low + high) / 2 + 0.025
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(SHARE)
    axes.set_xlabel(label)
    axes.set_ylabel("test accuracy")
    _below(figure, axes)
    _clean(axes)
    return svg(figure, caption)


def curves(results: Results) -> list[Markup]:
    """Loss and validation accuracy by epoch: of the float network, then of each precision."""
    groups = {"float": [("float", FLOAT_COLOR, results.float_history)]}
    for precision in results.settings.precisions:
        groups[precision.upper()] = [
            (outcome.method.title, METHOD_COLORS[outcome.method.name], outcome.history)
            for outcome in results.of(precision)
            if outcome.history
        ]
    pictures = []
    for title, histories in groups.items():
        # A network whose weights were given and kept has no curve.
        for what in ("loss", f"accuracy on the validation {results.dataset.noun}s") if histories[0][2].loss else ():
            figure, axes = _figure()
            drawn: list[float] = []
            for number, (label, color, history) in enumerate(histories):
                values = history.loss if what == "loss" else history.validation_accuracy
                epochs = list(range(1, len(values) + 1))
                # A line of one epoch would be invisible, as would one under another of the same width.
                marker, wider = "o" if len(values) == 1 else "", len(histories) - 1 - number
                axes.plot(
                    epochs, values, color=color, label=label, linewidth=1.4 + 1.6 * wider, marker=marker,
                    markersize=6 + 4 * wider,
                )  # fmt: skip
                shown = [f"{value:.4g}" if what == "loss" else f"{value:.2%}" for value in values]
                _tips(axes, epochs, values, [f"{label}, epoch {epoch}: {text}" for epoch, text in enumerate(shown, 1)])
                drawn += values
            frozen = sorted({history.frozen_from for *_, history in histories if history.frozen_from})
            for number, epoch in enumerate(frozen):
                axes.axvline(epoch + 0.5, **DASHED, color=NOTE, label="" if number else "frozen from here on")
            longest = max(len(history.loss) for *_, history in histories)
            room = 0.02 * longest + 0.4 * (longest < 3)
            axes.set_xlim(1 - room, longest + room)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
            axes.set_xlabel("epoch")
            axes.yaxis.set_major_locator(MaxNLocator(5))
            axes.yaxis.set_major_formatter(NUMBER if what == "loss" else PERCENT)
            if what != "loss":
                # The first epochs of a long training start from chance and would flatten the rest.
                low, high = float(np.quantile(drawn, 0.02)) if longest > 20 else min(drawn), max(drawn)
                room = max(0.01, 0.08 * (high - low))
                axes.set_ylim(max(0.0, low - room), min(1.0 + room / 4, high + room))
            elif min(drawn) > 0 and max(drawn) > 5 * min(drawn):
                # The loss falls far; with full numbers.
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_major_formatter(NUMBER)
                axes.yaxis.set_minor_locator(NullLocator())
                axes.set_ylabel("logarithmic")
            axes.set_title(f"{title}: {what}")
            if len(histories) > 1 or frozen:
                _below(figure, axes)
            _clean(axes)
            pictures.append(svg(figure, f"{title}: {what}, by epoch."))
    return pictures


def noise_by_layer(outcome: Outcome) -> dict[str, tuple[float, float]]:
    """The signal-to-noise ratio of what each layer stores on the device and in training, in dB, where there are signal
    and noise."""
    return {
        row.name: (row.device_sqnr, np.nan if row.trained_sqnr is None else row.trained_sqnr)
        for row in outcome.report.operators
        if row.device_sqnr is not None
    }


def noise(outcomes: Sequence[Outcome]) -> Markup:
    """Signal to noise of what every layer stores, a row for each layer."""
    names = list(dict.fromkeys(name for outcome in outcomes for name in noise_by_layer(outcome)))
    figure, axes = _figure(1.3 + 0.2 * max(4, len(names)))
    for number, outcome in enumerate(outcomes):
        color = PRECISION_COLORS[number % len(PRECISION_COLORS)]
        ratios, title = noise_by_layer(outcome), outcome.precision.upper()
        places, device = [names.index(name) for name in ratios], [ratio for ratio, _ in ratios.values()]
        axes.plot(device, places, color=color, marker="o", markersize=4, label=f"{title}, device")
        axes.plot([trained for _, trained in ratios.values()], places, "x", color=INK, markersize=5)
        _tips(axes, device, places, [f"{title}, {name}: {ratio:.1f} dB" for name, (ratio, _) in ratios.items()])
    axes.plot([], [], "x", color=INK, label="in training")
    axes.set_xlabel("signal to noise in dB")
    # The end of a layer's path distinguishes it from its neighbours.
    shown = [shortened(name, 10 * len(name)) for name in names]
    most = DRAWN_LENGTH + 4
    labels = [name if len(name) <= most else "…" + name[1 - most :] for name in shown]
    axes.set_yticks(range(len(names)), labels, fontsize=10)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    _below(figure, axes)
    _clean(axes, "both")
    return svg(
        figure,
        "Signal to noise of every layer's output, from input to logits: lines for the device's integers, crosses for "
        "the trained network in PyTorch.",
    )
