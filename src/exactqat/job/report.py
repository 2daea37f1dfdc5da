# SPDX-License-Identifier: Apache-2.0
"""DIR/report.html: the job's story in one file with all pictures inside, for a reader who was not there."""

from __future__ import annotations

import base64
import html
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ..deploy.simulate import PROFILES, unclaimed
from ..deploy.verify import Comparison
from ..qat import WeightedLayer
from . import files, training
from .models import NETWORKS
from .pipeline import Outcome, Results, Settings
from .text import printable, shell_word, shortened

FLOAT_COLOR, PTQ_COLORS, QAT_COLORS = "#6b7280", ("#f2b77c", "#e08a3c"), ("#6fa8dc", "#1f5fa8")
METHOD_COLORS = dict(
    zip(("ptq_min_max", "ptq_least_error", "qat_ema", "qat_learned"), PTQ_COLORS + QAT_COLORS, strict=True)
)
# Beyond this many classes a table of mistakes replaces the matrix, which nobody could read.
MATRIX_CLASSES = 20
# Characters of a name in a picture, which has to hold the longest, and in a table, which can be scrolled.
DRAWN_LENGTH, WRITTEN_LENGTH = 24, 120


@dataclass(frozen=True)
class Row:
    """One line of the result table; None where a column does not apply."""

    network: str
    method: str
    test_accuracy: float
    device_accuracy: float | None
    file_bytes: int
    differing: int | None
    compared: int | None
    delivered: bool


def _escape(text: object) -> str:
    """Names that others chose, as text of the page and of its attributes."""
    return html.escape(printable(text))


def result_rows(results: Results) -> list[Row]:
    """The result table, for the terminal and the report."""
    rows = [Row("float32", "float training", results.float_test_accuracy, None, results.float_bytes, None, None, False)]
    for outcome in results.outcomes:
        assert outcome.report is not None
        rows.append(
            Row(
                outcome.precision.upper(),
                outcome.method.title,
                outcome.test_accuracy,
                outcome.device_accuracy,
                outcome.file_bytes,
                outcome.report.differing,
                outcome.report.values,
                outcome is results.chosen(outcome.precision),
            )
        )
    return rows


def closing_sentence(results: Results) -> str:
    """How many integers were compared, and with what result."""
    networks, images = len(results.outcomes), len(results.dataset.test)
    compared, differing = results.values_compared, results.values_differing
    outcome = "every single one is equal" if differing == 0 else f"{differing:,} of them differ"
    return (
        f"{compared:,} integers (every layer's output of {networks} networks on all {images} test images) "
        f"were compared between our simulation and the runtime: {outcome}."
    )


def write_report(results: Results) -> Path:
    """Writes DIR/report.html and gives its path."""
    path = results.settings.out / "report.html"
    # Names are names: dollars are no mathematics, and what a user's own style does with text is not tried.
    with matplotlib.rc_context({"text.parse_math": False, "text.usetex": False}):
        page = _page(results)
    files.write_atomically(path, page.encode("utf-8", "backslashreplace"))
    return path


def _page(results: Results) -> str:
    dataset, settings = results.dataset, results.settings
    best = [results.chosen(precision) for precision in settings.precisions]
    finest, coarsest = best[0], best[-1]
    rounding = sum(o.fake_quant_differing for o in results.outcomes if o.method.trained)
    rounded = sum(o.fake_quant_values for o in results.outcomes if o.method.trained)
    equal = results.values_differing == 0
    cards = [
        (f"{results.float_test_accuracy:.1%}", "float32 network, test images"),
        *((f"{o.device_accuracy:.1%}", f"{o.precision.upper()} on the device runtime") for o in best),
        (f"{results.values_differing:,}", f"of {results.values_compared:,} integers differ from our simulation"),
    ]
    precisions = ", ".join(
        f"{name.upper()} with {2**weights - 1} codes for a weight and {2**activations} for an activation"
        for name, (weights, activations) in settings.precisions.items()
    )
    name, layer = _shown_layer(finest)
    out, defaults = shell_word(settings.out), Settings(settings.out).stored()
    options = "".join(
        f" --{key.replace('_', '-')} {shell_word(value)}"
        for key, value in settings.stored().items()
        if value != defaults[key]
    )
    commands = f"exactqat train --restart --out {out}{options}\nexactqat verify {out}{_word_on_model(settings)}"
    sections = [
        _section(
            "What happened",
            f"<p>The network <em>{_escape(settings.model)}</em> ({results.float_bytes // 4:,} parameters) learned "
            f"to tell {len(dataset.class_names)} kinds of images apart, from the data set "
            f"<em>{_escape(dataset.name)}</em> ({len(dataset.train):,} images to train on, "
            f"{len(dataset.validation):,} to choose by, {len(dataset.test):,} to test on). "
            "Phones and microcontrollers compute fastest in small integers, not in such real numbers, so the network "
            "was <strong>quantized</strong>: every weight and every stored activation becomes a code on a grid, "
            f"{precisions}.</p>"
            "<ol><li><strong>Post-training quantization</strong> (PTQ) measures ranges of the float network's values "
            "and rounds. It needs no training; with few codes it costs accuracy. Ranges are the extremes of the "
            "training images (min/max), or are narrowed to where rounding and clipping together "
            "err least (least-error).</li>"
            "<li><strong>Quantization-aware training</strong> (QAT) trains on with the rounding inside the network, so "
            "that the weights learn to live on the grid. Ranges either follow the data (EMA: an exponential moving "
            "average of the extremes), or start as least-error ranges and are trained like weights (learned).</li>"
            "<li>Every network is <strong>lowered</strong> to integer operators, written as <code>model.tflite</code>, "
            "run by the device runtime (LiteRT with XNNPACK), and <strong>every integer of every layer</strong> is "
            "compared with an independent integer simulation.</li></ol>" + _skipped(dataset.skipped),
        ),
        _section(
            "Results",
            _result_table(results) + f"<p class='{'good' if equal else 'bad'}'>{_escape(closing_sentence(results))}</p>"
            "<p class='note'>★ marks what was delivered, chosen by the lower validation loss. Input and logits always "
            "have 8 bits. Weights and activations of fewer bits travel in 8-bit containers, so their files are not "
            "smaller; with weights packed, the parameters would take "
            + ", ".join(f"{_packed_bytes(outcome):,} bytes in {outcome.precision.upper()}" for outcome in best)
            + ". The float32 size counts four bytes per parameter, without a file around it.</p>"
            + _picture(_accuracy_figure(results), "Test accuracy of every network; the line is the float network's."),
        ),
        _section(
            "Does training see what the device computes?",
            "<p>Training computes in float with rounding put in (fake quantization). In its last phase, batch norm is "
            "folded, ranges are fixed, biases stand on the device's int32 grid, and what the network computes are the "
            f"integers of the device itself, here those of <code>{_escape(settings.profile)}</code>. Over all layers "
            f"of all QAT networks and all test images, <strong>{rounding:,} of {rounded:,}</strong> stored values "
            f"({rounding / rounded:.4%}) differ from the simulation's.</p>",
        ),
        _section(
            "Which layer hurts",
            "<p>The same weights without any quantization are the signal; what rounding and clipping change is the "
            "noise, on the first test images. Noise of the layers before is part of every figure: what counts is "
            "where a curve falls. 6 dB are a factor of two, about what one more bit gives.</p><ul>"
            + "".join(f"<li>{_weakest(outcome)}</li>" for outcome in best)
            + "</ul>"
            + _picture(
                _noise_figure(best),
                "Signal to noise of what every layer stores, from input to logits: curves for the device's integers, "
                "crosses for what the trained network stores in PyTorch.",
            ),
        ),
        _section(
            "How it trained",
            _picture(
                _curves_figure(results),
                "Left: loss per epoch. Right: accuracy on the validation images. "
                "Behind the dashed line batch norm and ranges are frozen and biases are on the int32 grid.",
            ),
        ),
        _section(
            "Why each channel has its own scale",
            f"<p>The {_depthwise_and_channels(layer)[1]} channels of <code>{_escape(name)}</code> need ranges of "
            "different width. One scale for the whole layer (dashed) would leave narrow channels only some of the "
            "codes. Folding batch norm multiplies every channel by its own factor; with per-channel scales that "
            "changes the scales and not one integer code.</p>"
            + _picture(
                _ranges_figure(finest),
                "Range of the weights of every channel, before and after batch norm is folded in.",
            ),
        ),
        _section(
            "Weights on their grid",
            "<p>Weights in units of their channel's step: outline before rounding, filled after rounding. The fewer "
            "the bits, the fewer the codes that all weights of a channel share; few enough are drawn as lines.</p>"
            + _picture(
                _histogram_figure(*([finest, coarsest] if finest is not coarsest else [finest])),
                f"Weights of all channels of {name}, in steps.",
            ),
        ),
        _section("Which images are confused", _confusion(results, best)),
        _section("What it takes, and where it is the same", _footprint_table(best) + _claims(best)),
    ]
    for outcome in best:
        sections.append(
            _section(f"Layers of the delivered {outcome.precision.upper()} network", _layer_table(outcome), "layers")
        )
    resumed = " in the last of its runs; it was continued from a checkpoint" if results.resumed else ""
    sections.append(
        _section(
            "Do it again",
            f"<pre>{_escape(commands)}</pre>"
            "<p class='note'>The first command moves what is there aside before it begins. "
            f"The whole job took {results.seconds:.0f} seconds{resumed}. The same seed on the same "
            "machine gives the same bits. Accuracies on a few hundred test images carry luck of about a percentage "
            "point; look at more than one seed before you conclude something from such a difference. All figures are "
            "in <code>metrics.json</code>.</p>",
        )
    )
    shown = "".join(f"<div class='card'><b>{value}</b><span>{_escape(text)}</span></div>" for value, text in cards)
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>exactqat: {_escape(dataset.name)}</title><style>{_STYLE}</style></head><body><main>"
        "<h1>What was trained is what the device computes</h1>"
        f"<p class='lead'>exactqat on <em>{_escape(dataset.name)}</em>, seed {settings.seed}</p>"
        f"<div class='cards'>{shown}</div>{''.join(sections)}</main></body></html>\n"
    )


def _word_on_model(settings: Settings) -> str:
    """The option by which the user vouches for a network that is not one of exactqat's own."""
    return "" if settings.model in NETWORKS else f" --model {shell_word(settings.model)}"


def _skipped(sentences: Sequence[str]) -> str:
    """How many images were left out, and the first of them by name."""
    if not sentences:
        return ""
    shown = "".join(f"<li>{_escape(sentence)}</li>" for sentence in sentences[:20])
    more = "<li>… all of them are in metrics.json</li>" if len(sentences) > 20 else ""
    return f"<p class='note'>Images that could not be used: {len(sentences):,}</p><ul class='note'>{shown}{more}</ul>"


_STYLE = """
body{margin:0;background:#f6f7f9;color:#1c2430;font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1120px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:30px;margin:0}h2{font-size:21px;margin:0 0 8px}
.lead{color:#5a6675;margin:4px 0 20px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(160px,1fr));gap:14px}
.card,section{background:#fff;border:1px solid #e3e7ec;border-radius:10px}
.card{padding:14px 16px}.card b{display:block;font-size:28px}.card span{color:#5a6675;font-size:14px}
section{padding:20px 22px;margin-top:18px;overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{padding:5px 9px;text-align:right;border-bottom:1px solid #e9edf1;white-space:nowrap}
.layers table{font-size:12px}.layers th,.layers td{padding:4px}
.layers th{white-space:normal;vertical-align:bottom}
th{color:#5a6675;font-weight:600}th.t,td.t{text-align:left}
tr.delivered td{background:#eef4fb;font-weight:600}
.good{color:#146c43;font-weight:600}.bad{color:#b02a37;font-weight:600}.note{color:#5a6675;font-size:14px}
figure{margin:14px 0 0}figure img{max-width:100%;height:auto}figcaption{color:#5a6675;font-size:14px}
pre{background:#f2f4f7;padding:12px;border-radius:6px;white-space:pre-wrap}
"""


def _section(title: str, body: str, kind: str = "") -> str:
    return f"<section class='{kind}'><h2>{_escape(title)}</h2>{body}</section>"


def _table(header: Sequence[str], rows: Iterable[tuple[bool, Sequence[str]]], text_columns: int) -> str:
    """rows: (highlighted, cells); the first `text_columns` columns are aligned left."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=t' if column < text_columns else ''}>{_escape(cell)}</{tag}>"
            for column, cell in enumerate(cells)
        )

    body = "".join(f"<tr{' class=delivered' if marked else ''}>{line(cells, 'td')}</tr>" for marked, cells in rows)
    return f"<table><thead><tr>{line(header, 'th')}</tr></thead><tbody>{body}</tbody></table>"


def _result_table(results: Results) -> str:
    header = ["network", "method", "in PyTorch", "on the device", "bytes", "integers compared", "differing"]
    rows = [
        (
            row.delivered,
            [
                row.network,
                row.method + (" ★" if row.delivered else ""),
                f"{row.test_accuracy:.1%}",
                "–" if row.device_accuracy is None else f"{row.device_accuracy:.1%}",
                f"{row.file_bytes:,}",
                "–" if row.compared is None else f"{row.compared:,}",
                "–" if row.differing is None else f"{row.differing:,}",
            ],
        )
        for row in result_rows(results)
    ]
    return _table(header, rows, 2)


def _footprint_table(outcomes: Sequence[Outcome]) -> str:
    """What the delivered networks take on a microcontroller."""
    header = ["network", "flash bytes", "arena bytes", "multiply-adds", "operators"]
    rows: list[tuple[bool, Sequence[str]]] = []
    missing: dict[str, None] = {}
    for outcome in outcomes:
        taken = outcome.footprint
        assert taken is not None
        arena = "–" if taken.arena_bytes is None else f"{taken.arena_bytes:,}"
        operators = ", ".join(f"{count} {kind}" for kind, count in sorted(taken.operators.items()))
        cells = [
            outcome.precision.upper(),
            f"{taken.flash_bytes:,}",
            arena,
            f"{taken.multiply_accumulates:,}",
            operators,
        ]
        rows.append((False, cells))
        if taken.why_not:
            missing[taken.why_not] = None
    note = (
        "The arena is the memory for all tensors: the smallest in which TFLite-Micro's interpreter ran the network "
        "here, with pointers of eight bytes; a microcontroller's have four, and it takes somewhat less. "
        "<code>exactqat export DIR --c-array</code> writes the network as a C header, with a recorded input and what "
        "every device answers to it."
    )
    reasons = "".join(f"<p class='note'>{_escape(reason)}.</p>" for reason in missing)
    return f"{_table(header, rows, 1)}{reasons}<p class='note'>{note}</p>"


# What runs a network so, by the profile's name.
_DEVICES = {
    "xnnpack-x86": "LiteRT's default kernels on x86",
    "xnnpack-arm64": "LiteRT's default kernels on 64-bit ARM",
    "reference": "LiteRT's reference kernels",
    "micro": "TFLite-Micro on microcontrollers",
}


def _claims(outcomes: Sequence[Outcome]) -> str:
    """For which devices equality is claimed, and which operators stand in the way elsewhere."""
    lines = []
    for profile in PROFILES:
        missing = dict.fromkeys(kind for outcome in outcomes for kind in unclaimed(outcome.graph, profile))
        claim = f"not claimed for {', '.join(missing)}" if missing else "every integer is claimed to be equal"
        lines.append(f"<li>{_escape(_DEVICES[profile])}: {_escape(claim)}</li>")
    return (
        "<p>This job was compared on the machine that ran it. That other devices compute the same integers is claimed "
        "where every operator of the networks was compared with them over many random cases, without one difference:"
        f"</p><ul>{''.join(lines)}</ul><p class='note'>Compare yourself: "
        "<code>exactqat verify DIR --device micro</code>, <code>--device arm64</code>.</p>"
    )


def _layer_table(outcome: Outcome) -> str:
    assert outcome.report is not None
    compared = {comparison.name: comparison for comparison in outcome.report.operators}
    layers = dict(outcome.model.layers())
    header = [
        "layer", "operator", "result", "bits of weights", "of result", "weight scales", "scale", "zero point",
        "multiply-adds", "dB trained", "dB device", "integers compared", "differ",
    ]  # fmt: skip
    activations = {"RELU": ", relu", "RELU6": ", relu6"}
    rows = []
    for summary, operator in zip(outcome.graph.summary(), outcome.graph.operators, strict=True):
        name = str(summary["output"])
        layer = layers.get(name.removesuffix("/unshifted"))
        weight_bits = bits = scales = "–"
        if layer is not None:
            bits = str(layer.output_quantizer.bits)
        if isinstance(layer, WeightedLayer) and operator.kind != "QUANTIZE":
            weight_bits = str(layer.weight_quantizer.rule.weight_bits)
            scale = outcome.graph.tensors[operator.inputs[1]].quantization.scale
            scales = f"{scale.min():.2g} … {scale.max():.2g}"
        rows.append(
            (
                False,
                [
                    name,
                    operator.kind + activations.get(str(summary["activation"]), ""),
                    str(summary["shape"]),
                    weight_bits,
                    bits,
                    scales,
                    f"{float(summary['scale']):.4g}",
                    str(summary["zero_point"]),
                    f"{int(summary['multiply_accumulates']):,}",
                    _decibels(compared[name].trained_sqnr),
                    _decibels(compared[name].device_sqnr),
                    f"{compared[name].values:,}",
                    f"{compared[name].differing:,}",
                ],
            )
        )
    whole = outcome.report.outputs[0]
    rows.append((True, ["whole network", *[""] * 10, f"{whole.values:,}", f"{whole.differing:,}"]))
    note = (
        "<p class='note'>A QUANTIZE of equal scale behind a layer shifts codes of fewer bits to the other end of int8, "
        "where the device's own saturation is the lower clamp of training. Every layer is computed from the operands "
        "that the device itself had; the last row compares the untouched file from input to logits.</p>"
        if any(operator.kind == "QUANTIZE" for operator in outcome.graph.operators)
        else "<p class='note'>Every layer is computed from the operands that the device itself had; the last row "
        "compares the untouched file from input to logits.</p>"
    )
    return _table(header, rows, 2) + note


def _decibels(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.1f}"


def _noise_by_layer(outcome: Outcome) -> dict[str, Comparison]:
    """What each layer stores, where there is both signal and noise."""
    assert outcome.report is not None
    return {row.name: row for row in outcome.report.operators if row.device_sqnr is not None}


def _weakest(outcome: Outcome) -> str:
    """Where the signal-to-noise ratio falls the most from a layer's operands to its result."""
    rows = _noise_by_layer(outcome)
    # Ratios of all tensors; an operator that merely moves codes hands on its operand's.
    ratios = {name: row.device_sqnr for name, row in rows.items() if row.device_sqnr is not None}
    falls: dict[str, float] = {}
    for operator in outcome.graph.operators:
        name = operator.outputs[0]
        before = min((ratios[source] for source in operator.inputs if source in ratios), default=None)
        if before is None:
            continue
        if name in rows:
            falls[name] = before - ratios[name]
        else:
            ratios[name] = before
    title = _escape(outcome.precision.upper())
    if not falls:
        return f"{title}: no layer has noise"
    worst = max(falls, key=lambda name: falls[name])
    last = rows.get(outcome.graph.outputs[0])
    logits = f"; the logits end at {last.device_sqnr:.1f} dB" if last is not None else ""
    return (
        f"{title}: the largest fall is that of <code>{_escape(worst)}</code>, by {falls[worst]:.1f} dB to "
        f"{ratios[worst]:.1f} dB{logits}"
    )


def _noise_figure(outcomes: Sequence[Outcome]) -> Figure:
    names = list(dict.fromkeys(name for outcome in outcomes for name in _noise_by_layer(outcome)))
    positions = {name: position for position, name in enumerate(names)}
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    for outcome, color in zip(outcomes, ("#1f5fa8", "#e08a3c", "#146c43"), strict=False):
        rows = _noise_by_layer(outcome)
        places = [positions[name] for name in rows]
        title = outcome.precision.upper()
        device, trained = (
            [np.nan if ratio is None else ratio for ratio in ratios]
            for ratios in zip(*((row.device_sqnr, row.trained_sqnr) for row in rows.values()), strict=True)
        )
        axes.plot(places, device, color=color, marker="o", markersize=4, label=f"{title}, device")
        axes.plot(places, trained, color="#1c2430", linestyle="", marker="x", markersize=6, label=None)
    axes.plot([], [], color="#1c2430", linestyle="", marker="x", label="in training")
    axes.set_ylabel("signal to noise in dB")
    axes.set_xticks(
        range(len(names)), [_tail(name) for name in names], rotation=90, fontsize=8 if len(names) <= 40 else 5
    )
    axes.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    _clean(axes)
    return figure


def _tail(name: str) -> str:
    """The end of a layer's path, which tells it from its neighbours."""
    name = shortened(name, len(name) * 10)
    return name if len(name) <= 2 * DRAWN_LENGTH else "…" + name[1 - 2 * DRAWN_LENGTH :]


def _packed_bytes(outcome: Outcome) -> int:
    """Bytes of all parameters with weights at their own bits and biases at 32."""
    bits = 0
    for _, layer in outcome.model.layers():
        if isinstance(layer, WeightedLayer):
            weight = layer.weight_source()
            bits += weight.numel() * layer.weight_quantizer.rule.weight_bits + 32 * weight.shape[layer.weight_axis]
    return -(-bits // 8)


def _picture(figure: Figure, caption: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return (
        f"<figure><img alt='{_escape(caption)}' src='data:image/png;base64,{encoded}'>"
        f"<figcaption>{_escape(caption)}</figcaption></figure>"
    )


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e3e7ec", linewidth=0.8)
    axes.set_axisbelow(True)


def _label(axes: Axes, position: float, accuracy: float) -> None:
    """Writes the accuracy above its bar, on white where the float network's line passes."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    text = f"{accuracy:.1%}"
    axes.annotate(text, (position, accuracy), (0, 2), textcoords="offset points", ha="center", va="bottom", bbox=box)


def _accuracy_figure(results: Results) -> Figure:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    position, ticks = 0.0, []
    heights = [results.float_test_accuracy]
    axes.bar(position, heights[0], color=FLOAT_COLOR, label="float")
    ticks.append((position, "float32"))
    labelled = False
    for precision in results.settings.precisions:
        outcomes = results.of(precision)
        start = position + 1.6
        for offset, outcome in enumerate(outcomes):
            label = outcome.method.title if not labelled else None
            position = start + offset
            axes.bar(position, outcome.device_accuracy, color=METHOD_COLORS[outcome.method.name], label=label)
            _label(axes, position, outcome.device_accuracy)
            heights.append(outcome.device_accuracy)
        labelled = True
        ticks.append(((start + position) / 2, f"{precision.upper()}, on the device"))
    _label(axes, 0.0, heights[0])
    axes.axhline(heights[0], color=FLOAT_COLOR, linestyle="--", linewidth=1)
    axes.set_xticks([tick for tick, _ in ticks], [label for _, label in ticks])
    # The differences are small: the axis starts below the lowest bar, and says so.
    floor = max(0.0, np.floor((min(heights) - 0.03) * 20) / 20)
    axes.set_ylim(floor, min(1.0, max(heights)) + (1 - floor) * 0.08)
    axes.set_ylabel(f"test accuracy (axis from {floor:.0%})")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}" if value <= 1 else "")
    axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    _clean(axes)
    return figure


def _curves_figure(results: Results) -> Figure:
    figure = Figure(figsize=(9, 6), layout="constrained")
    rows = figure.subplots(2, 2)
    styles = dict(zip(results.settings.precisions, ("-", "--", ":"), strict=False))
    histories = [
        ("float", FLOAT_COLOR, "-", results.float_history),
        *(
            (
                f"{outcome.precision.upper()} {outcome.method.title}",
                METHOD_COLORS[outcome.method.name],
                styles[outcome.precision],
                outcome.history,
            )
            for outcome in results.outcomes
            if outcome.history
        ),
    ]
    for row, (title, chosen) in zip(rows, (("float training", histories[:1]), ("QAT", histories[1:])), strict=True):
        for label, color, style, history in chosen:
            epochs = np.arange(1, len(history.loss) + 1)
            row[0].plot(epochs, history.loss, color=color, linestyle=style, linewidth=1.2, label=label)
            row[1].plot(epochs, history.validation_accuracy, color=color, linestyle=style, linewidth=1.2)
            if history.frozen_from is not None:
                for axes in row:
                    axes.axvline(history.frozen_from + 0.5, color="#9aa5b1", linestyle="--", linewidth=1)
        row[0].set_yscale("log")
        row[0].set_title(f"{title}: loss", loc="left", fontsize=11)
        row[1].set_title(f"{title}: validation accuracy", loc="left", fontsize=11)
        row[1].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        # The first epochs of float training start from chance and would flatten the rest.
        values = np.concatenate([history.validation_accuracy for *_, history in chosen])
        row[1].set_ylim(max(0.0, min(np.quantile(values, 0.05), 0.95) - 0.02), min(1.0, values.max() + 0.01))
        for axes in row:
            axes.set_xlabel("epoch")
            _clean(axes)
    figure.legend(
        *rows[1][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    return figure


def _shown_layer(outcome: Outcome) -> tuple[str, WeightedLayer]:
    """The layer whose weights are shown: the widest depthwise one, or the widest if there is none."""
    layers = [(name, layer) for name, layer in outcome.model.layers() if isinstance(layer, WeightedLayer)]
    return max(
        layers,
        key=lambda named: _depthwise_and_channels(named[1]),
    )


def _depthwise_and_channels(layer: WeightedLayer) -> tuple[bool, int]:
    weight = layer.weight_source()
    depthwise = weight.dim() == 4 and weight.shape[1] == 1 and int(layer.attributes.get("groups", 1)) > 1
    return depthwise, weight.shape[layer.weight_axis]


def _channels_first(layer: WeightedLayer, weight: Tensor) -> Tensor:
    """A layer's weight as [channels, the rest]."""
    return weight.detach().movedim(layer.weight_axis, 0).flatten(1)


def _ranges_figure(outcome: Outcome) -> Figure:
    _, layer = _shown_layer(outcome)
    weight = _channels_first(layer, layer.weight_source())
    factor = layer.grid().factor.detach()
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    for axes, title, rows in zip(
        figure.subplots(1, 2),
        ("weights", "weights with batch norm folded in"),
        (weight, weight * factor[:, None]),
        strict=True,
    ):
        magnitude = rows.abs().amax(1).numpy()
        order = np.argsort(magnitude)
        low, high = rows.amin(1).numpy()[order], rows.amax(1).numpy()[order]
        limit = magnitude.max()
        axes.bar(np.arange(len(order)), high - low, bottom=low, color=QAT_COLORS[0], width=1.0)
        axes.axhline(limit, color="#b02a37", linestyle="--", linewidth=1)
        axes.axhline(-limit, color="#b02a37", linestyle="--", linewidth=1)
        ratio = limit / max(magnitude[magnitude > 0].min(), 1e-12)
        axes.set_title(f"{title}\nwidest : narrowest = {ratio:.1f}", loc="left", fontsize=11)
        axes.set_xlabel("channel, from narrow to wide")
        _clean(axes)
    return figure


def _histogram_figure(*outcomes: Outcome) -> Figure:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, outcome in zip(figure.subplots(1, len(outcomes), squeeze=False)[0], outcomes, strict=True):
        _, layer = _shown_layer(outcome)
        weight = layer.weight_source().detach()
        scale = layer.weight_quantizer.scale(weight).detach().numpy()
        alive = scale > 0
        steps = _channels_first(layer, weight).numpy()[alive] / scale[alive, None]
        codes = np.moveaxis(layer.weight_quantizer.codes(weight), layer.weight_axis, 0).reshape(len(alive), -1)[alive]
        bits = layer.weight_quantizer.rule.weight_bits
        limit = 2 ** (bits - 1) - 1
        # 15 codes one by one; of 255 codes always 15 together, so that the bars can be told apart.
        width = 1 if bits <= 4 else 15
        edges = np.arange(-limit - 0.5, limit + 1, width)
        axes.hist(
            codes.ravel(), bins=edges, color=QAT_COLORS[0], rwidth=0.6 if width == 1 else 0.95, label="after rounding"
        )
        # The same bins and one step more on both sides, in quarters: weights beyond the grid are clipped to it.
        quarters = np.arange(edges[0] - width, edges[-1] + width * 1.01, width / 4)
        axes.hist(
            np.clip(steps.ravel(), quarters[0], quarters[-1]),
            bins=quarters,
            weights=np.full(steps.size, 4.0),
            histtype="step",
            color="#1c2430",
            linewidth=0.9,
            label="before rounding, four times as fine",
        )
        if width == 1:
            axes.set_xticks(np.arange(-limit, limit + 1))
            for code in range(-limit, limit + 1):
                axes.axvline(code, color="#c9d2dc", linewidth=0.6, zorder=0)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.18)
        axes.set_title(f"{bits} bits: codes -{limit}..{limit}", loc="left", fontsize=11)
        axes.set_xlabel("weight in steps of its channel's grid")
        axes.set_ylabel(f"weights per {width} code{'s' if width > 1 else ''}")
        axes.legend(frameon=False, fontsize=8, loc="upper left")
        _clean(axes)
    return figure


def _confusion(results: Results, outcomes: Sequence[Outcome]) -> str:
    labels = results.dataset.test.labels.numpy()
    names = results.dataset.class_names
    if len(names) <= MATRIX_CLASSES:
        return _picture(
            _confusion_figure(results, *outcomes),
            "Rows: what the image shows. Columns: what the network answers. Off the diagonal: mistakes.",
        )
    mistakes: Counter[tuple[int, int]] = Counter()
    for outcome in outcomes:
        answers = outcome.device_predictions
        mistakes.update((int(a), int(b)) for a, b in zip(labels, answers, strict=True) if a != b)
    names = tuple(shortened(name, WRITTEN_LENGTH) for name in names)
    rows = [(False, [names[shown], names[answer], f"{count}"]) for (shown, answer), count in mistakes.most_common(15)]
    return "<p>The most frequent mistakes of the delivered networks together, on the device.</p>" + _table(
        ["the image shows", "the network answers", "times"], rows, 2
    )


def _confusion_figure(results: Results, *outcomes: Outcome) -> Figure:
    labels = results.dataset.test.labels.numpy()
    names = [shortened(name, DRAWN_LENGTH) for name in results.dataset.class_names]
    answers = [("float32", training.predictions(results.float_model, results.dataset.test).numpy())]
    answers += [(f"{outcome.precision.upper()}, device", outcome.device_predictions) for outcome in outcomes]
    # Two in a row: with ten classes, three are too small to read.
    figure = Figure(figsize=(9.6, 4.6 * -(-len(answers) // 2)), layout="constrained")
    grid = figure.subplots(-(-len(answers) // 2), 2).ravel()
    for unused in grid[len(answers) :]:
        unused.set_axis_off()
    for axes, (title, answer) in zip(grid, answers, strict=False):
        counts = np.zeros((len(names), len(names)), int)
        np.add.at(counts, (labels, answer), 1)
        mistakes = counts - np.diag(np.diag(counts))
        # Right answers in one pale color, so that the few mistakes stand out.
        axes.imshow(
            np.where(np.eye(len(names), dtype=bool), 0.12, 0.35 * (mistakes > 0) + 0.12 * mistakes),
            cmap="Reds",
            vmin=0,
            vmax=1,
        )
        for row, column in zip(*np.nonzero(counts), strict=True):
            right = row == column
            axes.text(
                column,
                row,
                counts[row, column],
                ha="center",
                va="center",
                fontsize=8,
                color="#6b7280" if right else "#000",
            )
        axes.set_xticks(range(len(names)), names, rotation=90 if max(map(len, names)) > 2 else 0)
        axes.set_yticks(range(len(names)), names)
        axes.set_title(f"{title}: {mistakes.sum()} of {len(labels)} wrong", loc="left", fontsize=11)
        axes.set_xlabel("answer")
        axes.tick_params(length=0)
    return figure
