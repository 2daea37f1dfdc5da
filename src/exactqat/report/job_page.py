# SPDX-License-Identifier: Apache-2.0
"""DIR/report.html: a report on the job in one file, with all pictures, for readers who did not run it."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..deploy.simulate import PROFILES, unclaimed
from ..device.profile import that_run
from ..qat import WeightedLayer
from . import charts, findings, layer_graph
from .luck import Paired
from .page import cards, escape, page, section, table, warnings
from .page import charts as side_by_side
from .results import Outcome, Results
from .text import shortened

# Beyond this many classes a table of mistakes replaces the matrix, which would be unreadable.
MATRIX_CLASSES = 20
# Beyond this many classes, only those most often wrong are listed.
LISTED_CLASSES = 100
# The most mistaken images shown, and the most pixels of their longer side.
SHOWN_IMAGES, IMAGE_SIDE = 24, 112
# The most characters of a name in a table, which can be scrolled.
WRITTEN_LENGTH = 120


@dataclass(frozen=True)
class Row:
    """One line of the result table; None where a column does not apply. paired: the network on the device compared with
    the float network."""

    network: str
    method: str
    test_accuracy: float
    device_accuracy: float | None
    file_bytes: int
    differing: int | None = None
    compared: int | None = None
    training_differing: int | None = None
    training_compared: int | None = None
    paired: Paired | None = None
    delivered: bool = False


def result_rows(results: Results) -> list[Row]:
    """The result table, for the terminal and the report."""
    rows = [Row("float32", "float training", results.float_test_accuracy, None, results.float_bytes)]
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
                outcome.report.training_differing,
                outcome.report.training_values,
                results.beside_float(outcome.device_predictions),
                outcome is results.chosen(outcome.precision),
            )
        )
    return rows


def closing_sentences(results: Results) -> list[tuple[bool, str]]:
    """How many integers were compared, and with what result: the files on the runtime, the device compared with
    training, and which device that is. Each says whether it is good news."""
    networks, images = len(results.outcomes), len(results.dataset.test)
    device = results.settings.device

    def verdict(differing: int) -> str:
        return "all are equal" if differing == 0 else f"{differing:,} of them differ"

    title = PROFILES[device].title
    ran = (
        f"{results.values_compared:,} integers (every layer's output of {networks} networks on all {images} test "
        f"images) were compared between our simulation and the runtime ({PROFILES[results.ran_as].title}): "
        f"{verdict(results.values_differing)}."
    )
    trained = (
        f"{results.training_values:,} integers were compared between training and what {title} computes: "
        f"{verdict(results.training_differing)}."
    )
    found = [(results.values_differing == 0, ran), (results.training_differing == 0, trained)]
    wrong, fed = results.predictions
    if wrong:
        found.append(
            (False, f"Fed with the images, the files return different integers from the models: {wrong:,} of {fed:,}.")
        )
    found += findings.passing(results)
    formerly = f", starting from a job trained for {results.formerly}" if results.formerly else ""
    named = f"Trained for {device}{formerly}."
    if results.ran_as != device:
        return [
            *found,
            (False, f"{named} The files were not run there: this machine does not have {title}."),
        ]
    return [*found, (True, named)]


def written(results: Results) -> str:
    """The page."""
    with charts.drawing():
        return _page(results)


def _page(results: Results) -> str:
    dataset, settings = results.dataset, results.settings
    best = [results.chosen(precision) for precision in settings.precisions]
    finest, coarsest = best[0], best[-1]
    trained = [o.report for o in results.outcomes if o.method.trained and o.report is not None]
    rounding, rounded = sum(r.training_differing for r in trained), sum(r.training_values for r in trained)
    figures = [
        (f"{results.float_test_accuracy:.1%}", "float32 network, test images"),
        *((f"{o.device_accuracy:.1%}", f"{o.precision.upper()} on {settings.device}") for o in best),
        (f"{results.values_differing:,}", f"of {results.values_compared:,} integers differ from our simulation"),
        (f"{results.training_differing:,}", f"of {results.training_values:,} integers differ from training"),
    ]
    of_weights, of_activations = (sorted(set(bits), reverse=True) for bits in zip(*settings.widths, strict=True))
    precisions = (
        f"a weight of {_listed(of_weights)} bits one of {_listed([2**bits - 1 for bits in of_weights])} codes, an "
        f"activation of {_listed(of_activations)} bits one of {_listed([2**bits for bits in of_activations])}"
    )
    name, layer = charts.shown_layer(finest)
    task = f"to distinguish {len(dataset.class_names)} classes of images"
    if dataset.reconstructs:
        task = "to give normal examples back, and so to find anomalies"
    verb = "learned" if findings.learned(dataset, results.float_test_accuracy) else "was trained"
    sections = [
        section(
            "What happened",
            f"<p>The network <em>{escape(settings.model)}</em> ({results.float_bytes // 4:,} parameters) {verb} "
            f"{task}, with the data set "
            f"<em>{escape(dataset.name)}</em> ({len(dataset.train):,} training images, {len(dataset.validation):,} "
            f"validation images, {len(dataset.test):,} test images). "
            "Phones and microcontrollers compute fastest with small integers, not with real numbers, so the network "
            "was <strong>quantized</strong>: every weight and every stored activation becomes a code on a grid, "
            f"{precisions} (W4A8: weights of 4 bits, activations of 8).</p>"
            "<ol><li><strong>Post-training quantization</strong> (PTQ) measures ranges of the float network's values "
            "and rounds. It needs no training, but costs accuracy when there are few codes. Ranges are the extremes "
            "over the training images (min/max), or are narrowed to minimize the combined error of rounding and "
            "clipping (least-error). A search (--ptq) also equalizes channels, corrects biases and rounds weights by "
            "what the device computes.</li>"
            "<li><strong>Quantization-aware training</strong> (QAT) continues training with rounding inside the "
            "network, so that the weights adapt to the grid. Ranges either follow the data (EMA: an exponential moving "
            "average of the extremes), or start as least-error ranges and are trained like weights (learned).</li>"
            "<li>Every network is <strong>lowered</strong> to integer operators, written as <code>model.tflite</code>, "
            f"run by the device runtime ({escape(PROFILES[results.ran_as].title)}), and <strong>every integer of every "
            "layer</strong> is compared with an independent integer simulation, and the simulation with what training "
            "computed.</li></ol>" + _origin(results) + _fit(results) + _manner(results) + _skipped(dataset.skipped),
        ),
        section(
            "Results",
            _result_table(results)
            + "".join(
                f"<p class='{'good' if good else 'bad'}'>{escape(sentence)}</p>"
                for good, sentence in closing_sentences(results)
            )
            + f"<p class='note'>{escape(findings.LUCK_NOTE)}</p>"
            "<p class='note'>★ marks the delivered networks, chosen by the lowest validation loss. Input and logits "
            "have 8 bits unless rules say otherwise. Weights and activations of fewer bits are in 8-bit containers, so "
            "their files are not smaller. The float32 size is four bytes per parameter, without file overhead. "
            f"{_guessing(results)}</p>" + side_by_side(charts.accuracies(results), charts.accuracy_and_size(results)),
        ),
        section(
            "What fewer bits cost and save",
            _width_table(results)
            + f"<p class='note'>{escape(findings.WIDTHS_NOTE)} Fewer activation bits save none of these bytes; they "
            "are for devices that compute with them.</p>" + side_by_side(*charts.widths(results)),
        ),
        section(
            "Does training see what the device computes?",
            "<p>Training computes in float with added rounding (fake quantization). In its last phase, batch norm is "
            "folded, ranges are fixed, biases are on the device's int32 grid, and the network computes the integers of "
            f"the device itself, here those of <code>{escape(settings.device)}</code>: "
            f"{escape(PROFILES[settings.device].title)}. {_rounding_sentence(rounding, rounded)}</p>"
            + _devices_table(results, best),
        ),
        section(
            "Which layer hurts",
            "<p>The signal is what the same weights give without quantization; the noise is what rounding and clipping "
            "change, on the first test images. Every figure includes the noise of earlier layers, so look for drops in "
            "a curve. 6 dB are a factor of two, about one more bit.</p><ul>"
            + "".join(f"<li>{_weakest(outcome)}</li>" for outcome in best)
            + "</ul>"
            + charts.noise(best),
        ),
        section(
            "Training curves",
            side_by_side(*charts.curves(results))
            + "<p class='note'>After a dashed line, batch norm and ranges are frozen, biases are on the int32 "
            "grid, and the network computes the device's integers.</p>",
        ),
        section(
            "Why each channel has its own scale",
            f"<p>The {charts.depthwise_and_channels(layer)[1]} channels of <code>{escape(name)}</code> need ranges of "
            "different widths. One scale for the whole layer (dashed) would leave narrow channels only a few codes. "
            "Folding batch norm multiplies every channel by its own factor; with per-channel scales this changes the "
            "scales but not a single integer code.</p>" + side_by_side(*charts.weight_ranges(finest)),
        ),
        section(
            "Weights on their grid",
            "<p>Weights in units of their channel's step: outline before rounding, filled after rounding. With fewer "
            "bits, the weights of a channel share fewer codes; if there are few, they are drawn as lines.</p>"
            + side_by_side(*charts.weights_on_grids(*([finest, coarsest] if finest is not coarsest else [finest]))),
        ),
        section("Confused classes", _class_table(results) + _confusion(results, best)),
        section("Misclassified images", _mistaken_images(results)),
        section(
            "What it takes, and where it computes the same",
            _ends(best[0]) + _footprint_table(best) + _parts_table(best) + _claims(best),
        ),
    ]
    sections.append(
        section(
            "What the device runs",
            "<p>Every box is an operator of the file, in execution order: its window, its stride if not 1, its fused "
            "activation, the layer's path, the shape of its output, the bits of weights (W) and outputs (A), and its "
            "share of all multiply-adds, as a number and as a bar. The lines on the left connect tensors with their "
            "readers. In long networks a box is a module.</p>"
            + side_by_side(*(_layer_graph(outcome) for outcome in best)),
        )
    )
    for outcome in best:
        sections.append(
            section(f"Layers of the delivered {outcome.precision.upper()} network", _layer_table(outcome), "layers")
        )
    resumed = f" in {results.runs} runs, each continued from a checkpoint" if results.runs > 1 else ""
    sections.append(
        section(
            "Reproduce this job",
            f"<pre>{escape(chr(10).join(settings.commands()))}</pre>"
            "<p class='note'>The first command moves the existing job aside first. The whole job took "
            f"{results.seconds:.0f} seconds{resumed}. The same seed on the same "
            "machine gives the same bits. All figures are in <code>metrics.json</code>, with every network's answer to "
            "every test image.</p>",
        )
    )
    return page(
        f"exactqat: {dataset.name}",
        f"<h1>What was trained is {'' if results.equal else 'not '}what the device computes</h1>"
        f"<p class='lead'>exactqat on <em>{escape(dataset.name)}</em>, seed {settings.seed}</p>"
        f"<p><strong>{escape(findings.recommendation(results))}</strong></p>"
        f"{warnings(findings.warnings_on(results))}{cards(figures)}{''.join(sections)}",
    )


def _rounding_sentence(differing: int, values: int) -> str:
    """How much of what training stored differs from the device."""
    if not values:
        return "No QAT network was compared."
    return (
        f"Over all layers of all QAT networks and all test images, <strong>{differing:,} of {values:,}</strong> stored "
        f"values ({differing / values:.4%}) differ from the simulation's."
    )


def _guessing(results: Results) -> str:
    guess = findings.guessing(results.dataset)
    return (
        f"Always naming the most frequent class would give {guess['accuracy']:.1%}; an accuracy above "
        f"{min(guess['needed'], 1):.1%} is more than chance."
    )


def _fit(results: Results) -> str:
    """What training started from."""
    if results.fit is None:
        return ""
    first, *rest = results.fit.sentences(shortened(results.settings.weights, WRITTEN_LENGTH))
    listed = "".join(f"<li>{escape(sentence.strip())}</li>" for sentence in rest)
    return f"<p>{escape(first)}.</p><ul class='note'>{listed}</ul>"


def _skipped(sentences: Sequence[str]) -> str:
    """How many images were skipped, and the first of them by name."""
    if not sentences:
        return ""
    shown = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences[:20])
    more = "<li>… all are listed in metrics.json</li>" if len(sentences) > 20 else ""
    return f"<p class='note'>Images that could not be used: {len(sentences):,}</p><ul class='note'>{shown}{more}</ul>"


def _result_table(results: Results) -> str:
    header = [
        "network", "method", "in PyTorch", "on the device", "points to float", "difference", "bytes",
        "compared on the runtime", "differ", "compared with training", "differ",
    ]  # fmt: skip
    rows = [
        (
            row.delivered,
            [
                row.network,
                row.method + (" ★" if row.delivered else ""),
                f"{row.test_accuracy:.1%}",
                "–" if row.device_accuracy is None else f"{row.device_accuracy:.1%}",
                *(("–", "–") if row.paired is None else (row.paired.points(), row.paired.verdict())),
                f"{row.file_bytes:,}",
                *(
                    "–" if count is None else f"{count:,}"
                    for count in (row.compared, row.differing, row.training_compared, row.training_differing)
                ),
            ],
        )
        for row in result_rows(results)
    ]
    return table(header, rows, 2)


def _listed(numbers: Sequence[int]) -> str:
    """As in a sentence."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def _width_table(results: Results) -> str:
    rows = [(False, row) for row in findings.width_rows(results)]
    return table(findings.WIDTHS_HEADER, rows, 1)


def _ends(outcome: Outcome) -> str:
    """What a program passes to the files, and what it gets back."""
    graph = outcome.graph
    sides = (graph.signature.inputs, graph.signature.outputs)
    takes, gives = (
        ", ".join(f"<code>{escape(port.described(graph.tensors[port.tensor]))}</code>" for port in side)
        for side in sides
    )
    return (
        f"<p>The files take {takes} and return {gives}, in integers: names and axes are the network's, after "
        "&ldquo;as&rdquo; the file's. Their metadata contains the same.</p>"
    )


def _footprint_table(outcomes: Sequence[Outcome]) -> str:
    """What the delivered networks need on a microcontroller."""
    header = ["network", "operators", "flash bytes", "arena bytes", "multiply-adds"]
    rows: list[tuple[bool, Sequence[str]]] = []
    missing: dict[str, None] = {}
    for outcome in outcomes:
        taken = outcome.footprint
        assert taken is not None
        arena = "–" if taken.arena_bytes is None else f"{taken.arena_bytes:,}"
        operators = ", ".join(f"{count} {kind}" for kind, count in sorted(taken.operators.items()))
        cells = [
            outcome.precision.upper(),
            operators,
            f"{taken.flash_bytes:,}",
            arena,
            f"{taken.multiply_accumulates:,}",
        ]
        rows.append((False, cells))
        if taken.why_not:
            missing[taken.why_not] = None
    note = (
        "The arena is the memory for all tensors: the smallest in which TFLite-Micro's interpreter ran the network "
        "here, with eight-byte pointers; a microcontroller with four-byte pointers needs somewhat less. "
        "<code>exactqat export DIR --c-array</code> writes the network as a C header, with a recorded input and the "
        "output that TFLite-Micro returns for it."
    )
    reasons = "".join(f"<p class='note'>{escape(reason)}.</p>" for reason in missing)
    return f"<div class='prose'>{table(header, rows, 2)}</div>{reasons}<p class='note'>{note}</p>"


def _parts_table(outcomes: Sequence[Outcome]) -> str:
    """What the bytes of the delivered files contain."""
    kinds = list(dict.fromkeys(kind for o in outcomes if o.footprint for kind in o.footprint.parts))
    rows = []
    for outcome in outcomes:
        taken = outcome.footprint
        assert taken is not None
        parts = [f"{taken.parts.get(kind, 0):,}" for kind in kinds]
        rows.append((False, [outcome.precision.upper(), f"{taken.flash_bytes:,}", *parts]))
    return (
        "<h3>What the bytes of the files are</h3>"
        + table(["network", "file", *kinds], rows, 1)
        + "<p class='note'>Weights take a byte each, whatever their bits; each channel has a scale, a zero point "
        "of eight bytes, and a bias of four. Names and structure grow with the number of layers, not with their "
        "width.</p>"
    )


def _manner(results: Results) -> str:
    """How the networks were trained."""
    said = " ".join(results.settings.training_sentences())
    return f"<p>{escape(said)} Every epoch&rsquo;s figures are in <code>training/*.csv</code>.</p>"


def _origin(results: Results) -> str:
    """Which job's networks training continued from."""
    settings = results.settings
    if settings.from_job is None:
        return ""
    return (
        f"<p>The networks come from the job in <code>{escape(shortened(settings.from_job, WRITTEN_LENGTH))}</code>, "
        f"which trained them for <code>{escape(results.formerly)}</code>; their last phase was "
        f"repeated for <code>{escape(settings.device)}</code>.</p>"
    )


def _devices_table(results: Results, outcomes: Sequence[Outcome]) -> str:
    """What every device computes for the delivered networks, compared with training."""
    rows: list[tuple[bool, Sequence[str]]] = []
    images = 0
    for outcome in outcomes:
        for device, found in outcome.elsewhere.items():
            here = device == results.settings.device
            cells = [outcome.precision.upper(), device, PROFILES[device].title]
            if isinstance(found, str):
                rows.append((here, [*cells, f"not simulated: {found}", "–", "–", "–", "–"]))
                continue
            images = len(found.labels)
            equal = "what was trained" if found.differing == 0 else "something else"
            cells += [equal, f"{found.differing:,} of {found.values:,}"]
            cells += [f"{found.logits.differing:,} of {found.logits.values:,}", f"{found.device_accuracy:.1%}"]
            cells += [f"{found.answers_differing:,}"]
            rows.append((here, cells))
    header = [
        "network", "device", "runtime", "computes", "integers that differ from training", "logits that differ",
        "accuracy", "answers changed",
    ]  # fmt: skip
    return (
        "<p>Each device computes the same file in its own way. This table shows the delivered networks on the first "
        f"{images:,} test images, by each device's exact simulation; the device that they were trained for is marked. "
        "If a device computes other integers, its accuracy is not what training measured.</p>"
        + table(header, rows, 4)
        + "<p class='note'>To retrain the last phase for another device: <code>exactqat train --from DIR "
        "--device micro --out DIR-micro</code>.</p>"
    )


def _claims(outcomes: Sequence[Outcome]) -> str:
    """On which devices files are claimed to run as simulated, and which operators prevent the claim elsewhere."""
    lines = []
    for device in that_run(".tflite"):
        missing = dict.fromkeys(kind for outcome in outcomes for kind in unclaimed(outcome.graph, device))
        claim = f"not claimed for {', '.join(missing)}" if missing else "every integer is claimed to be as simulated"
        lines.append(f"<li>{escape(PROFILES[device].title)} (<code>{device}</code>): {escape(claim)}</li>")
    return (
        "<p>These files were run on the machine that ran this job. We claim that they run as simulated on another "
        "device if every operator of the networks was compared with that device over many random cases, without a "
        "single difference. Whether a device computes what was trained is a separate question: see above.</p>"
        f"<ul>{''.join(lines)}</ul><p class='note'>To compare yourself: <code>exactqat verify DIR --device "
        "micro</code>, "
        "<code>--device xnnpack-arm64</code>.</p>"
    )


def _layer_table(outcome: Outcome) -> str:
    assert outcome.report is not None
    compared = {comparison.name: comparison for comparison in outcome.report.operators}
    bits = _bits_of_layers(outcome)
    header = [
        "layer", "operator", "result", "bits of weights", "of result", "weight scales", "scale", "zero point",
        "multiply-adds", "dB trained", "dB device", "integers compared", "differ",
    ]  # fmt: skip
    activations = {"RELU": ", relu", "RELU6": ", relu6"}
    rows = []
    for summary, operator in zip(outcome.graph.summary(), outcome.graph.operators, strict=True):
        name = str(summary["output"])
        weight_bits, result_bits = bits[name]
        scales = "–"
        if weight_bits is not None:
            scale = outcome.graph.tensors[operator.inputs[1]].quantization.scale
            scales = f"{scale.min():.2g} … {scale.max():.2g}"
        rows.append(
            (
                False,
                [
                    name,
                    operator.kind + activations.get(str(summary["activation"]), ""),
                    str(summary["shape"]),
                    "–" if weight_bits is None else str(weight_bits),
                    "–" if result_bits is None else str(result_bits),
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
    work = sum(outcome.graph.multiply_accumulates(operator) for operator in outcome.graph.operators)
    rows.append((True, ["whole network", *[""] * 7, f"{work:,}", "", "", f"{whole.values:,}", f"{whole.differing:,}"]))
    note = (
        "<p class='note'>A QUANTIZE of equal scale after a layer shifts codes of fewer bits to the other end of int8, "
        "where the device's own saturation is the lower clamp of training. Every layer is computed from the operands "
        "that the device itself had; the last row compares the unchanged file from input to logits.</p>"
        if any(operator.kind == "QUANTIZE" for operator in outcome.graph.operators)
        else "<p class='note'>Every layer is computed from the operands that the device itself had; the last row "
        "compares the unchanged file from input to logits.</p>"
    )
    return table(header, rows, 2) + note


def _bits_of_layers(outcome: Outcome) -> dict[str, tuple[int | None, int | None]]:
    """Bits of every operator's weights and of what it stores, by its result's name; None if training has none."""
    layers = dict(outcome.model.layers())
    bits: dict[str, tuple[int | None, int | None]] = {}
    for operator in outcome.graph.operators:
        name = operator.outputs[0]
        layer = layers.get(name.removesuffix("/unshifted"))
        weight_bits = None
        if isinstance(layer, WeightedLayer) and operator.kind != "QUANTIZE":
            weight_bits = layer.weight_quantizer.rule.weight_bits
        bits[name] = (weight_bits, None if layer is None else layer.output_quantizer.bits)
    return bits


def _layer_graph(outcome: Outcome) -> str:
    """The delivered network's operators, and which reads which."""
    said = {
        name: " ".join(f"{what}{bits}" for what, bits in zip("WA", pair, strict=True) if bits is not None)
        for name, pair in _bits_of_layers(outcome).items()
    }
    return layer_graph.picture(outcome.graph, f"{outcome.precision.upper()}: the operators of the file.", said)


def _decibels(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.1f}"


def _weakest(outcome: Outcome) -> str:
    """Where the signal-to-noise ratio falls most from a layer's operands to its result."""
    rows = charts.noise_by_layer(outcome)
    # Ratios of all tensors; an operator that merely moves codes passes on its operand's.
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
    title = escape(outcome.precision.upper())
    if not falls:
        return f"{title}: no layer has noise"
    worst = max(falls, key=lambda name: falls[name])
    last = rows.get(outcome.graph.outputs[0])
    logits = f"; the logits end at {last.device_sqnr:.1f} dB" if last is not None else ""
    return (
        f"{title}: the largest drop is in <code>{escape(worst)}</code>, by {falls[worst]:.1f} dB to "
        f"{ratios[worst]:.1f} dB{logits}"
    )


def _class_table(results: Results) -> str:
    """The share of each class's images classified correctly, for each network."""
    found = findings.per_class(results)
    networks = ["float", *results.settings.precisions]
    if len(found) > LISTED_CLASSES:
        found.sort(key=lambda row: sum(1.0 if row[network] is None else row[network] for network in networks))
        found = found[:LISTED_CLASSES]
    rows = [
        (
            False,
            [
                shortened(row["class"], WRITTEN_LENGTH),
                f"{row['images']:,}",
                *("–" if row[network] is None else f"{row[network]:.1%}" for network in networks),
            ],
        )
        for row in found
    ]
    header = ["the image shows", "test images", "float32", *(f"{name.upper()}, device" for name in networks[1:])]
    more = len(results.dataset.class_names) - len(found)
    note = f"<p class='note'>{more:,} more classes, with fewer mistakes, are in metrics.json.</p>" if more else ""
    return f"<p>Accuracy by class.</p>{table(header, rows, 1)}{note}"


def _mistaken_images(results: Results) -> str:
    """The images themselves, those that most networks get wrong first."""
    found = findings.mistaken(results)
    if not found:
        return "<p>None: the float network and the delivered networks classify every test image correctly.</p>"
    labels, names = results.dataset.test.labels.numpy(), results.dataset.class_names
    photos = results.dataset.test.names
    shown = []
    for image in found[:SHOWN_IMAGES]:
        truth = names[labels[image]]
        answered = Counter(answer for answer in findings.answers_to(results, image).values())
        wrong = {
            answer: [network for network, given in findings.answers_to(results, image).items() if given == answer]
            for answer in answered
            if answer != truth
        }
        said = "".join(
            f"<br>{escape(shortened(answer, charts.DRAWN_LENGTH))}: "
            + escape(", ".join("float32" if network == "float" else network.upper() for network in networks))
            for answer, networks in wrong.items()
        )
        source, small = _picture_of(results.dataset.test.images[image], results.dataset.value_range)
        called = photos[image] if photos else str(image)
        what = f"{'photo' if photos else 'test image'} {called}, which shows {truth}"
        shown.append(
            f"<figure><img alt='{escape(shortened(what, WRITTEN_LENGTH))}' src='{source}'"
            f"{' class=small' if small else ''}><figcaption>{escape(shortened(called, WRITTEN_LENGTH))}: shows "
            f"<strong>{escape(shortened(truth, charts.DRAWN_LENGTH))}</strong>{said}</figcaption></figure>"
        )
    those = "shown are those" if len(found) > len(shown) else "shown first are those"
    return (
        f"<p>{len(found):,} of {len(labels):,} test images are misclassified by the float network or a delivered one; "
        f"{those} that most of them get wrong, with each network's answer. Check whether their labels are "
        f"right.</p><div class='gallery'>{''.join(shown)}</div>"
        "<p class='note'>"
        + ("" if photos else "Images are numbered from 0 in the order of the test part; ")
        + "metrics.json lists them.</p>"
    )


def _picture_of(image: Tensor, value_range: tuple[float, float]) -> tuple[str, bool]:
    """An image [channels, height, width] as the address of a PNG, and whether its pixels should be seen."""
    from PIL import Image

    low, high = value_range
    codes = ((image.double().numpy() - low) / max(high - low, 1e-30)).clip(0, 1)
    codes = np.rint(codes * 255).astype(np.uint8)
    # Two channels have no natural colors; of four, the last is not a color.
    drawn = Image.fromarray(codes[:3].transpose(1, 2, 0) if len(codes) > 2 else codes[0])
    side = max(drawn.size)
    if side > 2 * IMAGE_SIDE:
        drawn.thumbnail((2 * IMAGE_SIDE, 2 * IMAGE_SIDE))
    buffer = io.BytesIO()
    drawn.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}", side < IMAGE_SIDE


def _confusion(results: Results, outcomes: Sequence[Outcome]) -> str:
    labels = results.dataset.test.labels.numpy()
    names = results.dataset.class_names
    if len(names) <= MATRIX_CLASSES:
        return side_by_side(*charts.confusions(results, outcomes))
    mistakes: Counter[tuple[int, int]] = Counter()
    for outcome in outcomes:
        answers = outcome.device_predictions
        mistakes.update((int(a), int(b)) for a, b in zip(labels, answers, strict=True) if a != b)
    names = tuple(shortened(name, WRITTEN_LENGTH) for name in names)
    rows = [(False, [names[shown], names[answer], f"{count}"]) for (shown, answer), count in mistakes.most_common(15)]
    return "<p>The most frequent mistakes of the delivered networks together, on the device.</p>" + table(
        ["the image shows", "the network answers", "times"], rows, 2
    )
