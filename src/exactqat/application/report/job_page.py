# SPDX-License-Identifier: Apache-2.0
"""DIR/report.html: a report on the job in one file, with all pictures, for readers who did not run it.

The page is `templates/job.html`; here are the tables and pictures that it shows.
"""

from __future__ import annotations

import base64
import io
import sys
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
from torch import Tensor

from ...deploy.simulate import PROFILES, unclaimed
from ...kit.device.profile import that_run
from ...kit.display import shortened
from ...qat.train.core.steps import WeightedStep
from ..job.files import Record
from ..job.results import Outcome, Results
from . import charts, findings
from .page import Cell, Table, differing, render

# Beyond this many classes a table of mistakes replaces the matrix, which would be unreadable.
MATRIX_CLASSES = 20
# Beyond this many classes, only those most often wrong are listed.
LISTED_CLASSES = 100
# The most mistaken images shown, and the most pixels of their longer side.
SHOWN_IMAGES, IMAGE_SIDE = 24, 112
# The most characters of a name in a table, which can be scrolled.
WRITTEN_LENGTH = 120


@charts.drawing()
def written(results: Results) -> str:
    """The page."""
    best = results.delivered
    return render(
        "job.html", results=results, tables=sys.modules[__name__], findings=findings, charts=charts, profiles=PROFILES,
        # Which operators prevent that files are claimed to run on a device as simulated.
        claims=[
            (PROFILES[device].title, device, dict.fromkeys(kind for o in best for kind in unclaimed(o.graph, device)))
            for device in that_run(".tflite")
        ],
        shifted=any(operator.kind == "QUANTIZE" for outcome in best for operator in outcome.graph.operators),
    )  # fmt: skip


def result_table(results: Results) -> Table:
    header = (
        "network", "method", "accuracy on the device", "points to float", "file and simulation differ",
        "device and training differ",
    )  # fmt: skip
    tests, noun, device = len(results.dataset.test), results.dataset.noun, results.settings.device
    table = Table(f"{results.dataset.name}: every network on {tests:,} test {noun}s, on {device}", header, 2)
    accuracy = Cell(f"{results.float_test_accuracy:.1%}", f"in PyTorch {results.float_test_accuracy:.2%}")
    table.add(Cell("float32", f"{results.float_bytes:,} bytes"), "float training", accuracy, None, None, None)
    for outcome in results.outcomes:
        report, pair = outcome.report, findings.beside_float(results, outcome)
        luck = f"{'may be' if pair.may_be_luck else 'not'} chance: {pair.in_short()}"
        delivered = outcome is results.chosen(outcome.precision)
        method = outcome.method.title + (" ★" if delivered else "")
        table.add(
            Cell(outcome.precision.upper(), f"{outcome.file_bytes:,} bytes"),
            Cell(method, short=method.replace(" ranges", "")),
            Cell(f"{outcome.device_accuracy:.1%}", f"in PyTorch {outcome.test_accuracy:.2%}"),
            Cell(pair.points(), luck, short=pair.in_short()),
            differing(report.differing, report.values),
            differing(report.training_differing, report.training_values),
            marked=delivered,
        )
    return table


def width_table(results: Results) -> Table:
    header = ("network", "in PyTorch", "on the device", "packed bytes", "file bytes", "compressed")
    table = Table("The delivered networks: accuracy, and bytes on the device", header, 1)
    table.add("float32", results.float_test_accuracy, None, results.float_bytes, None, None)
    for outcome in results.delivered:
        accuracies = outcome.test_accuracy, outcome.device_accuracy
        sizes = findings.packed_bytes(outcome), outcome.file_bytes, outcome.compressed_bytes
        table.add(outcome.precision.upper(), *accuracies, *sizes)
    return table


def devices(results: Results) -> Iterator[tuple[str, Table]]:
    """What every device computes for the delivered networks, compared with training; the job's own device first."""
    own = results.settings.device
    names = dict.fromkeys(name for outcome in results.delivered for name in outcome.elsewhere)
    for device in sorted(names, key=lambda name: name != own):
        header = ("network", "computes", "integers that differ from training", "logits that differ", "answers changed")
        table, tests = Table("", header, 2, "wrap"), 0
        for outcome in results.delivered:
            beside, network = outcome.elsewhere.get(device), outcome.precision.upper()
            if isinstance(beside, str):
                table.add(network, f"not simulated: {beside}", None, None, None)
            elif beside is not None:
                tests, report = len(beside.labels), beside.report
                table.add(
                    network,
                    Cell(beside.in_words(), tone="bad" if report.training_differing else "good"),
                    differing(report.training_differing, report.training_values),
                    differing(*report.outputs_beside_training),
                    Cell(f"{beside.answers_differing:,}", f"accuracy {beside.device_accuracy:.2%}"),
                )
        named = f"{device} ({PROFILES[device].title})"
        table.caption = f"{named}: the delivered networks on the first {tests:,} test {results.dataset.noun}s"
        yield device, table


def footprint_tables(outcomes: Iterable[Outcome]) -> list[Table]:
    """What the delivered networks need on a microcontroller, and what the bytes of their files contain."""
    footprints = {outcome.precision.upper(): outcome.footprint for outcome in outcomes if outcome.footprint is not None}
    kinds = list(dict.fromkeys(kind for footprint in footprints.values() for kind in footprint.parts))
    header = ("network", "operators", "flash bytes", "arena bytes", "multiply-adds")
    needs = Table("What the delivered networks need on a microcontroller", header, 2, "wrap")
    parts = Table("What the bytes of the files are", ("network", "file", *kinds), 1)
    for name, footprint in footprints.items():
        operators = ", ".join(f"{count} {kind}" for kind, count in sorted(footprint.operators.items()))
        needs.add(name, operators, footprint.flash_bytes, footprint.arena_bytes, footprint.multiply_accumulates)
        parts.add(name, footprint.flash_bytes, *(footprint.parts.get(kind, 0) for kind in kinds))
    return [needs, parts]


def layer_table(outcome: Outcome) -> Table:
    header = (
        "layer", "operator", "integers that differ", "result", "bits of weights / result", "scale, zero point",
        "multiply-adds", "dB trained / device",
    )  # fmt: skip
    table = Table(f"Layers of the delivered {outcome.precision.upper()} network", header, 2, "dense")
    compared = {comparison.name: comparison for comparison in outcome.report.operators}
    layers = dict(outcome.model.layers())
    work = sum(outcome.graph.multiply_accumulates(operator) for operator in outcome.graph.operators)
    for summary, operator in zip(outcome.graph.summary(), outcome.graph.operators, strict=True):
        name, activation = str(summary["output"]), str(summary["activation"])
        layer = layers.get(name.removesuffix("/unshifted"))
        weight_bits, scales = "–", "–"
        if isinstance(layer, WeightedStep) and operator.kind != "QUANTIZE":
            weight_bits = str(layer.weight_quantizer.rule.weight_bits)
            scale = outcome.graph.tensors[operator.inputs[1]].quantization.scale
            scales = f"{scale.min():.2g} … {scale.max():.2g}"
        result_bits = "–" if layer is None else str(layer.output_quantizer.bits)
        comparison, count = compared[name], int(summary["multiply_accumulates"])
        ratios = (comparison.trained_sqnr, comparison.device_sqnr)
        table.add(
            name,
            operator.kind + (f", {activation.lower()}" if activation in ("RELU", "RELU6") else ""),
            differing(comparison.differing, comparison.values),
            str(summary["shape"]),
            f"{weight_bits} / {result_bits}",
            Cell(f"{float(summary['scale']):.4g}, {summary['zero_point']}", f"scales of weights: {scales}"),
            Cell(f"{count:,}", f"{count / max(work, 1):.1%}"),
            " / ".join("–" if ratio is None else f"{ratio:.1f}" for ratio in ratios),
        )
    whole = outcome.report.outputs[0]
    table.add("whole network", "", differing(whole.differing, whole.values), "", "", "", work, "", marked=True)
    return table


def weakest(outcome: Outcome) -> tuple[str, str, str]:
    """The network, the layer in which the signal-to-noise ratio falls most from its operands to its result (empty:
    nothing has noise), and by how much."""
    rows = {name: ratio for name, (ratio, _) in charts.noise_by_layer(outcome).items()}
    # Ratios of all tensors; an operator that merely moves codes passes on its operand's.
    ratios, falls = dict(rows), dict[str, float]()
    for operator in outcome.graph.operators:
        name = operator.outputs[0]
        before = min((ratios[source] for source in operator.inputs if source in ratios), default=None)
        if before is not None and name in rows:
            falls[name] = before - rows[name]
        elif before is not None:
            ratios[name] = before
    if not falls:
        return outcome.precision.upper(), "", ""
    worst, last = max(falls, key=lambda name: falls[name]), rows.get(outcome.graph.outputs[0])
    logits = "" if last is None else f"; the logits end at {last:.1f} dB"
    return outcome.precision.upper(), worst, f"{falls[worst]:.1f} dB to {ratios[worst]:.1f} dB{logits}"


def class_table(results: Results) -> Table:
    """The share of each class's images classified correctly, for each network."""
    classes, noun, more = findings.per_class(results), results.dataset.noun, ""
    networks = ["float", *results.settings.precisions]
    if len(classes) > LISTED_CLASSES:
        classes.sort(key=lambda row: sum(1.0 if row[network] is None else row[network] for network in networks))
        more = f"; {len(classes) - LISTED_CLASSES:,} more, with fewer mistakes, are in metrics.json"
    header = [f"the {noun} shows", f"test {noun}s", "float32", *(f"{name.upper()}, device" for name in networks[1:])]
    table = Table(f"Accuracy by class{more}", header, 1)
    for row in classes[:LISTED_CLASSES]:
        table.add(shortened(row["class"], WRITTEN_LENGTH), row["images"], *(row[network] for network in networks))
    return table


def mistakes(results: Results) -> Record:
    """The misclassified test images, and what each network answered."""
    mistakes, part = findings.mistakes(results), results.dataset.test
    shown = []
    for row in mistakes["listed"][:SHOWN_IMAGES]:
        networks: dict[str, list[str]] = {}
        for network, answer in row["answers"].items():
            if answer != row["shows"]:
                name = "float32" if network == "float" else network.upper()
                networks.setdefault(shortened(answer, charts.DRAWN_LENGTH), []).append(name)
        source, small = _picture_of(part.images[row["image"]], results.dataset.value_range)
        called = row.get("file", str(row["image"]))
        what = f"{'photo' if part.names else f'test {results.dataset.noun}'} {called}, which shows {row['shows']}"
        shown.append(
            {
                "source": source, "small": small, "what": shortened(what, WRITTEN_LENGTH), "answers": networks,
                "name": shortened(called, WRITTEN_LENGTH), "truth": shortened(row["shows"], charts.DRAWN_LENGTH),
            }
        )  # fmt: skip
    return {"count": mistakes["images"], "of": len(part.labels), "shown": shown, "named": bool(part.names)}


def _picture_of(image: Tensor, value_range: tuple[float, float]) -> tuple[str, bool]:
    """An image [channels, height, width] as the address of a PNG, and whether its pixels should be seen."""
    from PIL import Image

    low, high = value_range
    codes = ((image.double().numpy() - low) / max(high - low, 1e-30)).clip(0, 1)
    codes = np.rint(codes * 255).astype(np.uint8)
    # Two channels have no natural colors; of four, the last is not a color.
    drawn = Image.fromarray(codes[:3].transpose(1, 2, 0) if len(codes) > 2 else codes[0])
    side = max(drawn.size)
    drawn.thumbnail((2 * IMAGE_SIDE, 2 * IMAGE_SIDE))
    buffer = io.BytesIO()
    drawn.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}", side < IMAGE_SIDE


def confusions(results: Results, outcomes: Iterable[Outcome]) -> Record:
    """For each network how often each class got each answer; beyond MATRIX_CLASSES the most frequent mistakes."""
    labels, names = results.dataset.test.labels.numpy(), results.dataset.class_names
    if len(names) > MATRIX_CLASSES:
        pairs = (pair for o in outcomes for pair in zip(labels.tolist(), o.device_predictions.tolist(), strict=True))
        mistakes = Counter(pair for pair in pairs if pair[0] != pair[1])
        caption = "The most frequent mistakes of the delivered networks together, on the device"
        table = Table(caption, ("true class", "the network's answer", "times"), 2)
        for pair, count in mistakes.most_common(15):
            table.add(*(shortened(names[code], WRITTEN_LENGTH) for code in pair), count)
        return {"table": table, "networks": []}
    answers = {f"{outcome.precision.upper()}, device": outcome.device_predictions for outcome in outcomes}
    matrices = []
    for title, predictions in ({"float32": results.float_predictions} | answers).items():
        counts = np.zeros((len(names), len(names)), int)
        np.add.at(counts, (labels, predictions), 1)
        wrong = int(counts.sum() - np.trace(counts))
        matrices.append((f"{title}: {wrong:,} of {len(labels):,} wrong", counts.tolist()))
    short = [shortened(name, charts.DRAWN_LENGTH) for name in names]
    return {"table": None, "networks": matrices, "names": short, "long": max(map(len, short)) > 2}
