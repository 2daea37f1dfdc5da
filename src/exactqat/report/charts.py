# SPDX-License-Identifier: Apache-2.0
"""The report's charts, drawn by matplotlib as vectors whose colors and letters are the page's.

Each is as wide as a phone's screen, so that its letters can be read there; the page shows them side by side where there
is room.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, Formatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from torch import Tensor

from ..deploy.comparison import Comparison
from ..qat import WeightedLayer
from . import findings
from .page import BAD, DARK, INK, LINE, NOTE, escape, variable
from .text import shortened

if TYPE_CHECKING:
    from .results import Outcome, Results

FLOAT_COLOR, PTQ_COLORS, QAT_COLORS = "#6b7280", ("#f2b77c", "#e08a3c"), ("#6fa8dc", "#1f5fa8")
METHOD_COLORS = dict(
    zip(("ptq_min_max", "ptq_least_error", "qat_ema", "qat_learned"), PTQ_COLORS + QAT_COLORS, strict=True)
) | {"ptq_searched": "#146c43"}
METHOD_MARKERS = dict(zip(METHOD_COLORS, "v^osP", strict=True))
PRECISION_COLORS = ("#1f5fa8", "#e08a3c", "#146c43", "#b02a37", "#6fa8dc", "#f2b77c", "#6b7280")
PRECISION_LINES = ("-", "--", ":", "-.")
# The most characters of a name in a picture, which has to fit the longest.
DRAWN_LENGTH = 20
# Inches of 72 units; a phone's page is some 340 units wide. Pictures that fit are never shown smaller than that.
WIDTH, HEIGHT, SMALLEST = 4.6, 3.1, 0.85
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "exactqat", "font.size": 11, "axes.titlesize": 11, "legend.fontsize": 10,
    "text.color": INK, "axes.edgecolor": NOTE, "axes.labelcolor": INK, "xtick.color": NOTE, "ytick.color": NOTE,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.titlelocation": "left", "legend.frameon": False,
    # Names are names: dollar signs are not math, and a user's own text style is not used.
    "text.parse_math": False, "text.usetex": False, "axes.unicode_minus": True, "axes.formatter.use_mathtext": False,
}  # fmt: skip


@contextmanager
def drawing() -> Iterator[None]:
    """In this context, matplotlib draws in STYLE, whatever the user's style."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)  # type: ignore[arg-type]
        yield


def svg(figure: Figure, caption: str) -> str:
    """A figure of the page."""
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # The reader's fonts are used, not those that matplotlib has here.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    drawn = buffer.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", drawn, flags=re.DOTALL)
    # Other pictures on the page have the same ids; those that are referenced are made from what they name.
    drawn = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", drawn)
    drawn = re.sub(r'\s+(xmlns(:\w+)?|version)="[^"]*"', "", drawn)
    width = figure.get_figwidth() * 72
    # What is wider than a phone scrolls there, at its own size.
    smallest = width * (SMALLEST if width <= WIDTH * 72 else 1.1)
    drawn = re.sub(
        r'<svg\s[^>]*?(viewBox="[^"]*")[^>]*>',
        lambda found: (
            f"<svg {found[1]} role='img' aria-label='{escape(caption)}' "
            f"style='min-width:{smallest:.0f}px;max-width:{width * 1.45:.0f}px'>"
        ),
        drawn,
        count=1,
    )
    for color in DARK:
        drawn = drawn.replace(color, variable(color))
    broad = " class='broad'" if width > WIDTH * 72 else ""
    return f"<figure{broad}>{drawn}<figcaption>{escape(caption)}</figcaption></figure>"


def _figure(height: float = HEIGHT, width: float = WIDTH) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _clean(axes: Axes, grid: str = "y") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=LINE, linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def _below(figure: Figure, axes: Axes, columns: int = 2) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=columns)


def accuracies(results: Results) -> str:
    """A bar for each network; quantized ones on the device."""
    rows: list[tuple[str, float, str]] = [("float32", results.float_test_accuracy, FLOAT_COLOR)]
    places = [0.0]
    for precision in results.settings.precisions:
        for position, outcome in enumerate(results.of(precision)):
            places.append(places[-1] + (1.6 if position == 0 else 1.0))
            label = f"{precision.upper()} {outcome.method.title.removesuffix(' ranges')}"
            rows.append((label, outcome.device_accuracy, METHOD_COLORS[outcome.method.name]))
    heights = [height for _, height, _ in rows]
    # The differences are small: the axis starts below the lowest bar, and says so.
    floor = max(0.0, np.floor((min(heights) - 0.03) * 20) / 20)
    figure, axes = _figure(1.1 + 0.21 * places[-1])
    axes.barh(places, [height - floor for height in heights], left=floor, color=[color for *_, color in rows])
    for place, height in zip(places, heights, strict=True):
        axes.text(1.02, place, f"{height:.1%}", transform=axes.get_yaxis_transform(), va="center", fontsize=10)
    axes.axvline(heights[0], color=FLOAT_COLOR, linestyle="--", linewidth=1, label="the float network's")
    axes.set_yticks(places, [label for label, *_ in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(floor, floor + (max(max(heights), floor + 0.05) - floor) * 1.05)
    # Whole percentages, and few: names at the left may leave little room.
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(Exactly(percent=True))
    axes.set_xlabel("test accuracy" + (f" (the axis starts at {floor:.0%})" if floor else ""))
    _below(figure, axes)
    _clean(axes, "x")
    return svg(figure, "Test accuracy of every network; quantized networks on the device. Dashed: the float network's.")


class Exactly(Formatter):
    """Ticks are exactly what they say, with as many decimals as all of them need.

    Args:
        percent: for shares, which end at 1.
    """

    def __init__(self, percent: bool = False) -> None:
        self.percent = percent

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        shown = [value * (100 if self.percent else 1) for value in values]
        largest = max(map(abs, shown), default=0.0)
        for decimals in range(12):
            if all(abs(round(value, decimals) - value) <= 1e-9 * largest for value in shown):
                break
        sign = "%" if self.percent else ""
        return [
            "" if self.percent and value > 100 + 1e-9 else f"{round(value, decimals) + 0.0:.{decimals}f}{sign}"
            for value in shown
        ]

    def __call__(self, value: float, pos: int | None = None) -> str:
        return self.format_ticks([value])[0]


def accuracy_and_size(results: Results) -> str:
    """Accuracy and size of each network."""
    figure, axes = _figure(3.5)
    titled = set()
    points = [(float(results.float_bytes), results.float_test_accuracy)]
    tops: dict[float, tuple[float, str]] = {}
    for outcome in results.outcomes:
        name = outcome.method.name
        size, accuracy = findings.packed_bytes(outcome), outcome.device_accuracy
        points.append((size, accuracy))
        # Networks with equal weight bits are above one another.
        top, label = tops.get(size, (0.0, outcome.precision.upper()))
        alike = label == outcome.precision.upper()
        tops[size] = max(top, accuracy), label if alike else f"W{results.settings.precisions[outcome.precision][0]}"
        axes.plot(
            size, accuracy, METHOD_MARKERS[name], color=METHOD_COLORS[name], markersize=7,
            label=None if name in titled else outcome.method.title.removesuffix(" ranges"),
        )  # fmt: skip
        titled.add(name)
    axes.plot(*points[0], "D", color=FLOAT_COLOR, markersize=7, label="float32")
    named = [(size, accuracy, name) for size, (accuracy, name) in tops.items()]
    _size_axes(figure, axes, named, points, "bytes of all parameters, packed", 3)
    return svg(
        figure,
        "Accuracy against size: parameters packed at their own bits (files use 8-bit containers).",
    )


def widths(results: Results) -> list[str]:
    """Accuracy of what was delivered, against two sizes."""
    found = [width for width in findings.widths(results) if width.device_accuracy is not None]
    pictures = []
    for size_of, label, caption in (
        ("packed_parameter_bytes", "bytes of all parameters, packed", "weights packed at their own bits"),
        ("compressed_file_bytes", "bytes of the compressed .tflite file", "the compressed file, as downloaded"),
    ):
        figure, axes = _figure(3.5)
        lines = []
        for number, bits in enumerate(sorted({width.activation_bits for width in found}, reverse=True)):
            line = [
                (float(getattr(width, size_of)), float(width.device_accuracy or 0.0), width.network.upper())
                for width in found
                if width.activation_bits == bits
            ]
            axes.plot(
                [size for size, *_ in line], [accuracy for _, accuracy, _ in line], "o-",
                color=PRECISION_COLORS[number % len(PRECISION_COLORS)], label=f"{bits}-bit activations",
            )  # fmt: skip
            lines.append(line)
        points = [point for line in lines for point in line]
        accuracy = results.float_test_accuracy
        axes.axhline(accuracy, color=FLOAT_COLOR, linestyle="--", linewidth=1, label="the float network's")
        sizes = [size for size, *_ in points]
        lines.append([(0.85 * min(sizes), accuracy, ""), (1.15 * max(sizes), accuracy, "")])  # beyond the margins
        _size_axes(figure, axes, points, [point[:2] for point in points], label, 2, lines)
        pictures.append(svg(figure, f"Accuracy of the delivered networks on the device, against size: {caption}."))
    return pictures


def _size_axes(
    figure: Figure,
    axes: Axes,
    named: Sequence[tuple[float, float, str]],
    shown: Sequence[tuple[float, float]],
    label: str,
    columns: int,
    lines: Sequence[Sequence[tuple[float, float, str]]] = (),
) -> None:
    """Sizes from left to right, accuracies upwards; `named`: names of points; `shown`: all points; `lines`: the
    lines."""
    sizes = [size for size, _ in shown]
    axes.margins(x=0.12, y=0.22)
    if max(sizes) > 3 * min(sizes):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(_sizes_between(min(sizes), max(sizes))))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_minor_locator(FixedLocator([]))
    else:
        unit = 1024.0 ** np.floor(np.log2(max(sizes)) / 10)
        low, high = (end / unit for end in axes.get_xlim())
        ticks = MaxNLocator(4).tick_values(low, high)
        axes.xaxis.set_major_locator(FixedLocator([tick * unit for tick in ticks if low <= tick <= high]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _bytes(value)))
    # Accuracies that are all equal are shown side by side, not enlarged.
    low, high = axes.get_ylim()
    if high - low < 0.05:
        low, high = (low + high) / 2 - 0.025, (low + high) / 2 + 0.025
    axes.set_ylim(max(low, -0.12 * (high - low)), min(high, 1 + 0.2 * (high - low)))
    axes.yaxis.set_major_locator(FixedLocator(_accuracies_between(*axes.get_ylim())))
    axes.yaxis.set_major_formatter(Exactly(percent=True))
    axes.set_xlabel(label)
    axes.set_ylabel("test accuracy")
    _below(figure, axes, columns)
    _clean(axes)
    _labelled(figure, axes, named, shown, lines)


def _labelled(
    figure: Figure,
    axes: Axes,
    points: Sequence[tuple[float, float, str]],
    shown: Sequence[tuple[float, float]],
    lines: Sequence[Sequence[tuple[float, float, str]]],
) -> None:
    """Names points (x, y, name), each as near as possible without covering another name, marker or line."""
    figure.draw_without_rendering()
    unit = 72 / figure.dpi
    inside = axes.get_window_extent()
    taken = []
    for x, y in shown:
        across, up = axes.transData.transform((x, y)) * unit
        taken.append((across - 4, up - 4, across + 4, up + 4))
    for line in lines:
        ends = [axes.transData.transform(point[:2]) * unit for point in line]
        for start, end in zip(ends, ends[1:], strict=False):
            for share in np.linspace(0, 1, 24):
                across, up = start + share * (end - start)
                taken.append((across - 1, up - 1, across + 1, up + 1))
    for x, y, name in sorted(points, key=lambda point: (point[0], -point[1])):
        across, up = axes.transData.transform((x, y)) * unit
        half = 3.4 * len(name)
        best: tuple[float, tuple[float, float], tuple[float, float, float, float]] | None = None
        for rows in (1, -1, 2, -2, 3, -3, 4, -4, 5, -5):
            for aside in (0, half + 6, -half - 6):
                middle = (across + aside, up + 12 * rows - 1)
                box = (middle[0] - half, middle[1] - 5, middle[0] + half, middle[1] + 6)
                hidden = sum(
                    max(0.0, min(box[2], other[2]) - max(box[0], other[0]))
                    * max(0.0, min(box[3], other[3]) - max(box[1], other[1]))
                    for other in taken
                )
                outside = max(0.0, inside.y0 * unit - box[1]) + max(0.0, box[3] - inside.y1 * unit)
                outside += max(0.0, inside.x0 * unit - box[0]) + max(0.0, box[2] - inside.x1 * unit)
                cost = 0.5 * hidden + 100 * outside + abs(rows) + 0.5 * (aside != 0) + 0.1 * (rows < 0)
                if best is None or cost < best[0]:
                    best = (cost, (aside, 12 * rows - 1), box)
        assert best is not None
        _, offset, box = best
        taken.append(box)
        leader = {"arrowstyle": "-", "color": NOTE, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 4}
        axes.annotate(
            name, (x, y), offset, textcoords="offset points", ha="center", va="center", color=INK, fontsize=10,
            arrowprops=leader if abs(offset[1]) > 14 else None,
        )  # fmt: skip


def _accuracies_between(low: float, high: float) -> list[float]:
    """Ticks of an axis that leaves room for names beyond the possible accuracies."""
    return [tick for tick in MaxNLocator(6).tick_values(low, high) if max(low, 0.0) <= tick <= min(high, 1.0) + 1e-9]


def _sizes_between(low: float, high: float) -> list[float]:
    """Round sizes, each twice the one before, at least four steps apart on a screen."""
    ticks = [2.0**power for power in range(int(np.ceil(np.log2(low))), int(np.floor(np.log2(high))) + 1)]
    step = -(-len(ticks) // 5) or 1
    return ticks[::step] or [low, high]


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.4g} {unit}"
        value /= 1024
    raise AssertionError


def curves(results: Results) -> list[str]:
    """Loss and validation accuracy by epoch: of the float network, then of each precision."""
    groups = [("float", [("float", FLOAT_COLOR, results.float_history)])]
    for precision in results.settings.precisions:
        trained = [
            (outcome.method.title, METHOD_COLORS[outcome.method.name], outcome.history)
            for outcome in results.of(precision)
            if outcome.history
        ]
        if trained:
            groups.append((precision.upper(), trained))
    pictures = []
    for title, histories in groups:
        for what in ("loss", "accuracy on the validation images"):
            figure, axes = _figure()
            drawn = []
            for number, (label, color, history) in enumerate(histories):
                values = history.loss if what == "loss" else history.validation_accuracy
                epochs = np.arange(1, len(values) + 1)
                # A line of one epoch would be invisible, as would one under another of the same width.
                marker, wider = "o" if len(values) == 1 else "", len(histories) - 1 - number
                axes.plot(
                    epochs, values, color=color, label=label, linewidth=1.4 + 1.6 * wider, marker=marker,
                    markersize=6 + 4 * wider,
                )  # fmt: skip
                drawn += values
            frozen = {history.frozen_from for *_, history in histories if history.frozen_from}
            for number, epoch in enumerate(sorted(frozen)):
                label = "frozen from here on" if number == 0 else ""
                axes.axvline(epoch + 0.5, color=NOTE, linestyle="--", linewidth=1, label=label)
            longest = max(len(history.loss) for *_, history in histories)
            axes.set_xlim(1 - 0.02 * longest - 0.4 * (longest < 3), longest + 0.02 * longest + 0.4 * (longest < 3))
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
            axes.set_xlabel("epoch")
            if what == "loss":
                _loss_axis(axes, drawn)
            else:
                # The first epochs of a long training start from chance and would flatten the rest.
                low, high = float(np.quantile(drawn, 0.02)) if longest > 20 else min(drawn), max(drawn)
                room = max(0.01, 0.08 * (high - low))
                axes.set_ylim(max(0.0, low - room), min(1.0 + room / 4, high + room))
                axes.yaxis.set_major_locator(MaxNLocator(5))
                axes.yaxis.set_major_formatter(Exactly(percent=True))
            axes.set_title(f"{title}: {what}")
            if len(histories) > 1 or frozen:
                _below(figure, axes)
            _clean(axes)
            pictures.append(svg(figure, f"{title}: {what}, by epoch."))
    return pictures


def _loss_axis(axes: Axes, values: Sequence[float]) -> None:
    """Logarithmic if the loss falls far, with full numbers."""
    if min(values) > 0 and max(values) > 5 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(FixedLocator([]))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylabel("logarithmic")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(Exactly())


def noise_by_layer(outcome: Outcome) -> dict[str, Comparison]:
    """What each layer stores, where there is both signal and noise."""
    assert outcome.report is not None
    return {row.name: row for row in outcome.report.operators if row.device_sqnr is not None}


def noise(outcomes: Sequence[Outcome]) -> str:
    """Signal to noise of what every layer stores, a row for each layer."""
    names = list(dict.fromkeys(name for outcome in outcomes for name in noise_by_layer(outcome)))
    positions = {name: position for position, name in enumerate(names)}
    figure, axes = _figure(1.3 + 0.2 * max(4, len(names)))
    for number, outcome in enumerate(outcomes):
        color = PRECISION_COLORS[number % len(PRECISION_COLORS)]
        line = PRECISION_LINES[number // len(PRECISION_COLORS) % len(PRECISION_LINES)]
        rows = noise_by_layer(outcome)
        places = [positions[name] for name in rows]
        title = outcome.precision.upper()
        device = [np.nan if row.device_sqnr is None else row.device_sqnr for row in rows.values()]
        trained = [np.nan if row.trained_sqnr is None else row.trained_sqnr for row in rows.values()]
        axes.plot(device, places, color=color, linestyle=line, marker="o", markersize=4, label=f"{title}, device")
        axes.plot(trained, places, color=INK, linestyle="", marker="x", markersize=5)
    axes.plot([], [], color=INK, linestyle="", marker="x", label="in training")
    axes.set_xlabel("signal to noise in dB")
    axes.set_yticks(range(len(names)), [_tail(name) for name in names], fontsize=10)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    _below(figure, axes)
    _clean(axes, "both")
    return svg(
        figure,
        "Signal to noise of every layer's output, from input to logits: lines for the device's integers, crosses for "
        "the trained network in PyTorch.",
    )


def _tail(name: str) -> str:
    """The end of a layer's path, which distinguishes it from its neighbours."""
    name = shortened(name, len(name) * 10)
    return name if len(name) <= DRAWN_LENGTH + 4 else "…" + name[-DRAWN_LENGTH - 3 :]


def shown_layer(outcome: Outcome) -> tuple[str, WeightedLayer]:
    """The layer whose weights are shown: the widest depthwise one, or the widest if there is none."""
    layers = [(name, layer) for name, layer in outcome.model.layers() if isinstance(layer, WeightedLayer)]
    return max(
        layers,
        key=lambda named: depthwise_and_channels(named[1]),
    )


def depthwise_and_channels(layer: WeightedLayer) -> tuple[bool, int]:
    weight = layer.weight_source()
    depthwise = weight.dim() == 4 and weight.shape[1] == 1 and int(layer.attributes.get("groups", 1)) > 1
    return depthwise, weight.shape[layer.weight_axis]


def _channels_first(layer: WeightedLayer, weight: Tensor) -> Tensor:
    """A layer's weight as [channels, the rest]."""
    return weight.detach().movedim(layer.weight_axis, 0).flatten(1)


def weight_ranges(outcome: Outcome) -> list[str]:
    """Ranges of every channel of one layer, before and after batch norm is folded in."""
    _, layer = shown_layer(outcome)
    weight = _channels_first(layer, layer.weight_source())
    factor = layer.grid().factor.detach()
    pictures = []
    for title, rows in (("weights", weight), ("weights with batch norm folded in", weight * factor[:, None])):
        magnitude = rows.abs().amax(1).numpy()
        order = np.argsort(magnitude)
        low, high = rows.amin(1).numpy()[order], rows.amax(1).numpy()[order]
        limit = magnitude.max()
        figure, axes = _figure()
        axes.bar(np.arange(1, len(order) + 1), high - low, bottom=low, color=QAT_COLORS[0], width=1.0)
        axes.axhline(limit, color=BAD, linestyle="--", linewidth=1, label="range of one scale for the whole layer")
        axes.axhline(-limit, color=BAD, linestyle="--", linewidth=1)
        ratio = limit / max(magnitude[magnitude > 0].min(initial=np.inf), 1e-12)
        axes.set_title(f"{title}\nwidest : narrowest = {ratio:.1f}")
        axes.set_xlim(0.5, len(order) + 0.5)
        # So that both dashed lines are visible next to the frame.
        axes.set_ylim(-1.12 * (limit or 1), 1.12 * (limit or 1))
        axes.set_xlabel("channel, from narrow to wide")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        _below(figure, axes)
        _clean(axes)
        pictures.append(svg(figure, f"Range of every channel: {title}."))
    return pictures


def weights_on_grids(*outcomes: Outcome) -> list[str]:
    """How often each code occurs in one layer, and where its weights were before rounding."""
    pictures = []
    for outcome in outcomes:
        name, layer = shown_layer(outcome)
        weight = layer.weight_source().detach()
        scale = layer.weight_quantizer.scale(weight).detach().numpy()
        alive = scale > 0
        steps = _channels_first(layer, weight).numpy()[alive] / scale[alive, None]
        codes = np.moveaxis(layer.weight_quantizer.codes(weight), layer.weight_axis, 0).reshape(len(alive), -1)[alive]
        bits = layer.weight_quantizer.rule.weight_bits
        limit = 2 ** (bits - 1) - 1
        # As many codes per bar as it takes to distinguish the bars, the same for each.
        width = {6: 3, 8: 15}.get(bits, 1)
        edges = np.arange(-limit - 0.5, limit + 1, width).tolist()
        figure, axes = _figure()
        axes.hist(
            codes.ravel(), bins=edges, color=QAT_COLORS[0], rwidth=0.6 if limit < 16 else 0.95, label="after rounding"
        )
        # The same bins and one step more on both sides, in quarters: weights beyond the grid are clipped to it.
        quarters = np.arange(edges[0] - width, edges[-1] + width * 1.01, width / 4).tolist()
        axes.hist(
            np.clip(steps.ravel(), quarters[0], quarters[-1]),
            bins=quarters,
            weights=np.full(steps.size, 4.0),
            histtype="step",
            color=INK,
            linewidth=0.9,
            label="before rounding, four times as fine",
        )
        if limit <= 7:
            axes.set_xticks(np.arange(-limit, limit + 1))
            for code in range(-limit, limit + 1):
                axes.axvline(code, color=LINE, linewidth=0.6, zorder=0)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
        axes.set_title(f"{outcome.precision.upper()}: {bits} bits, codes -{limit}..{limit}")
        axes.set_xlabel("weight in steps of its channel's grid")
        axes.set_ylabel(f"weights per {f'{width} codes' if width > 1 else 'code'}")
        _below(figure, axes, 1)
        _clean(axes)
        pictures.append(svg(figure, f"Weights of all channels of {shortened(name, 80)}, in steps."))
    return pictures


def confusions(results: Results, outcomes: Sequence[Outcome]) -> list[str]:
    """Confusion matrices, one for each network."""
    labels = results.dataset.test.labels.numpy()
    names = [shortened(name, DRAWN_LENGTH) for name in results.dataset.class_names]
    answers = [("float32", results.float_predictions)]
    answers += [(f"{outcome.precision.upper()}, device", outcome.device_predictions) for outcome in outcomes]
    longest = max(map(len, names))
    # Two-digit numbers fit, and so do names at the edges.
    side = max(WIDTH, 0.34 * len(names) + 0.1 * longest + 0.6)
    pictures = []
    for title, answer in answers:
        counts = np.zeros((len(names), len(names)), int)
        np.add.at(counts, (labels, answer), 1)
        figure, axes = _figure(side, side)
        for row, column in zip(*np.nonzero(counts), strict=True):
            right, count = row == column, counts[row, column]
            # Right answers in one pale color, so that the few mistakes stand out.
            color, alpha = (NOTE, 0.15) if right else (BAD, min(0.85, 0.2 + 0.08 * count))
            axes.add_patch(
                matplotlib.patches.Rectangle((column - 0.5, row - 0.5), 1, 1, color=color, alpha=alpha, linewidth=0)
            )
            axes.text(column, row, str(count), ha="center", va="center", fontsize=10)
        axes.set_xlim(-0.5, len(names) - 0.5)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_aspect("equal")
        axes.set_xticks(range(len(names)), names, rotation=90 if longest > 2 else 0)
        axes.set_yticks(range(len(names)), names)
        wrong = int(counts.sum() - np.trace(counts))
        axes.set_title(f"{title}: {wrong:,} of {len(labels):,} wrong")
        axes.set_xlabel("the network answers")
        axes.set_ylabel("the image shows")
        axes.tick_params(length=0)
        pictures.append(svg(figure, f"{title}: true class and the network's answer. Red: mistakes."))
    return pictures
