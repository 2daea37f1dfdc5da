# SPDX-License-Identifier: Apache-2.0
"""What the figures of a job say: whether anything was learned, which classes suffer, which images are misclassified."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...kit.device import PROFILES
from ...qat.train.core.steps import WeightedStep
from .luck import NOTE, Paired, paired
from .results import Dataset, Outcome, Results, Split

# By how many standard deviations an accuracy has to exceed that of a guess to count: one guess in a hundred does.
BEYOND_LUCK = 2.33
# With few images, for which chance reaches further above the most frequent class, anything above that may be learned.
TELLING = 0.1
# Validation accuracy that a smaller network may lose and still be recommended.
FEWER_BITS_MAY_COST = 0.01
# The most mistakes listed in metrics.json; their number is always there.
MISTAKES_LISTED = 1000


def to_try(noun: str) -> str:
    """What to do about a network that has learned nothing."""
    larger = ", larger ones (--image-size)" if noun == "image" else ""
    return (
        f"Try more epochs (--epochs-float), another learning rate (--lr), more {noun}s of every class{larger}, another "
        f"network (--model), pretrained weights (--weights); and check some {noun}s and their labels"
    )


def chance(part: Split) -> dict[str, float]:
    """The share of images in the most frequent class, which a network gets right by always naming it; and the accuracy
    above which it is more than chance. Above 1 if there are too few images to tell."""
    labels = part.labels.numpy()
    share = float(np.bincount(labels, minlength=1).max() / len(labels))
    # With a single class there is nothing to learn; a guess that is always right shows no more.
    spread = math.sqrt(share * (1 - share) / len(labels))
    return {"accuracy": share, "needed": share + BEYOND_LUCK * spread + 0.5 / len(labels)}


def better_than_guessing(part: Split, accuracy: float) -> bool:
    """Whether an accuracy shows that something was learned, or there are too few images to tell."""
    share, needed = chance(part).values()
    few = needed - share > TELLING
    return needed >= 1 or accuracy > (share if few else needed)


def learned(dataset: Dataset, accuracy: float) -> bool:
    """Whether an accuracy on the test images shows that something was learned."""
    return accuracy > chance(dataset.test)["needed"]


def warnings_on(results: Results) -> list[str]:
    """What readers of the accuracies must know first."""
    dataset = results.dataset
    guess, tests, noun = chance(dataset.test), len(dataset.test), dataset.noun
    sentences = []
    guessed, of_float = f"{guess['accuracy']:.1%}", f"{results.float_test_accuracy:.1%}"
    if guess["needed"] >= 1:
        sentences.append(
            f"{tests:,} test {noun}s, {guessed} of them of one class, are too few to tell whether it learned anything; "
            "use more"
        )
    elif not learned(dataset, results.float_test_accuracy):
        sentences.append(
            f"the float network has not learned to distinguish the classes: {of_float} of {tests:,} test {noun}s are "
            f"right, and always naming the most frequent class gives {guessed}. {to_try(noun)}"
        )
    else:
        for precision in results.settings.precisions:
            accuracy = results.chosen(precision).device_accuracy
            if not learned(dataset, accuracy):
                sentences.append(
                    f"the {precision.upper()} network is no better than guessing: {accuracy:.1%} of {tests:,} test "
                    f"{noun}s are right, of float's {of_float}. Try more epochs (--epochs-qat) or more bits (--bits)"
                )
    if not sentences and guess["accuracy"] < results.float_test_accuracy:
        absent = [row["class"] for row in per_class(results) if row["float"] == 0]
        if absent:
            names = ", ".join(f"'{name}'" for name in absent[:5]) + (" and others" if len(absent) > 5 else "")
            sentences.append(f"the float network recognizes no {noun} of class {names}")
    return sentences


def per_class(results: Results) -> list[dict[str, Any]]:
    """For each class its name, the number of test images, and the share that the float network and the delivered ones,
    on the device, get right; None without images."""
    dataset = results.dataset
    labels = dataset.test.labels.numpy()
    answers = {"float": results.float_predictions}
    answers |= {precision: results.chosen(precision).device_predictions for precision in results.settings.precisions}
    rows = []
    for code, name in enumerate(dataset.class_names):
        members = labels == code
        count = int(members.sum())
        shares = {
            network: float((answer[members] == code).mean()) if count else None for network, answer in answers.items()
        }
        rows.append({"class": name, "images": count, **shares})
    return rows


def mistaken(results: Results) -> list[int]:
    """The test images that the float network or a delivered one gets wrong, those most often wrong first."""
    labels = results.dataset.test.labels.numpy()
    wrong = (results.float_predictions != labels).astype(int)
    for precision in results.settings.precisions:
        wrong += results.chosen(precision).device_predictions != labels
    order = np.argsort(-wrong, kind="stable")
    return [int(image) for image in order if wrong[image]]


def answers_to(results: Results, image: int) -> dict[str, str]:
    """The class that the float network and the delivered ones, on the device, give a test image."""
    names = results.dataset.class_names
    answers = {"float": names[results.float_predictions[image]]}
    for precision in results.settings.precisions:
        answers[precision] = names[results.chosen(precision).device_predictions[image]]
    return answers


def mistakes(results: Results) -> dict[str, Any]:
    """The mistaken test images by number, from 0 in the order of the test part, and file; what each shows, and how it
    is classified."""
    found = mistaken(results)
    labels, names = results.dataset.test.labels.numpy(), results.dataset.class_names
    photos = results.dataset.test.names
    listed = [
        ({"file": photos[image]} if photos else {})
        | {"image": image, "shows": names[labels[image]], "answers": answers_to(results, image)}
        for image in found[:MISTAKES_LISTED]
    ]
    return {"images": len(found), "listed": listed}


def recommended(results: Results) -> Outcome:
    """The delivered network that takes the fewest bytes of flash, then of arena, on the job's device, among those that
    are as good as the best on the validation images: at most FEWER_BITS_MAY_COST below it there, and not significantly
    worse on the test images."""
    delivered = [results.chosen(precision) for precision in results.settings.precisions]
    best = max(delivered, key=lambda outcome: outcome.validation_accuracy)
    enough = [
        outcome
        for outcome in delivered
        if outcome.validation_accuracy >= best.validation_accuracy - FEWER_BITS_MAY_COST
        and not _significantly_worse(results, outcome, best)
    ]
    return min(enough, key=lambda outcome: (*_bytes(outcome), sum(results.settings.precisions[outcome.precision])))


def _bytes(outcome: Outcome) -> tuple[float, float]:
    """Of flash and of arena; infinite where they were not measured."""
    measured = None if outcome.footprint is None else outcome.footprint.arena_bytes
    flash, arena = (math.inf if size is None else size for size in (outcome.file_bytes, measured))
    return flash, arena


def _significantly_worse(results: Results, outcome: Outcome, other: Outcome) -> bool:
    """Whether a network is worse than another on the device by more than chance, on the test images."""
    labels = results.dataset.test.labels.numpy()
    found = paired(outcome.device_predictions == labels, other.device_predictions == labels)
    return found.difference < 0 and not found.may_be_luck


def recommendation(results: Results) -> str:
    """Which network to take, why, and for which device; empty if the float network has learned nothing."""
    if not learned(results.dataset, results.float_test_accuracy):
        return ""
    outcome, device = recommended(results), results.settings.device
    size = f"{outcome.file_bytes:,} bytes"
    why = (
        "the only one delivered"
        if len(results.settings.precisions) == 1
        else f"the smallest on the device ({size}) of those that are not significantly worse than the best"
    )
    rival = max(
        (o for o in results.of(outcome.precision) if not o.method.trained),
        key=lambda other: other.device_accuracy,
        default=outcome,
    )
    without, plain = "", ""
    if rival is not outcome and outcome.method.trained:
        without = f", {rival.method.title} {rival.device_accuracy:.1%}"
        if not _significantly_worse(results, rival, outcome):
            bits = results.settings.precisions[outcome.precision][0]
            plain = f" {bits}-bit PTQ is enough here: training gains nothing that these test images show."
    return (
        f"Take {outcome.precision}/model.tflite ({outcome.method.title}), {why}: {outcome.device_accuracy:.1%} of the "
        f"test images are right on the device (float network {results.float_test_accuracy:.1%}{without}).{plain} It "
        f"was trained for {device} ({PROFILES[device].title}), the device that --device names; others may compute "
        "other integers."
    )


@dataclass(frozen=True)
class Row:
    """A network in tables and in metrics.json; None where something does not apply.

    Attributes:
        network: its precision, or "float32", of 32 bits.
        pytorch_accuracy, device_accuracy: on the test images.
        lost: accuracy below the float network's, on the device; negative if above.
        packed_parameter_bytes: of all parameters, weights at their own bits.
        file_bytes: of the .tflite file, which holds weights of four bits and fewer in four bits where the device takes
            them, and all others in eight.
        compressed_file_bytes: of that file deflated, as it is downloaded.
        flash_bytes: on a microcontroller, for delivered networks.
        differing: of the `compared` integers of the file, from the simulation; training_differing: of the
            `training_compared` integers of the device, from training.
        paired: its answers on the device compared with the float network's.
    """

    network: str
    method: str
    weight_bits: int
    activation_bits: int
    pytorch_accuracy: float
    packed_parameter_bytes: int
    device_accuracy: float | None = None
    lost: float = 0.0
    file_bytes: int | None = None
    compressed_file_bytes: int | None = None
    flash_bytes: int | None = None
    differing: int | None = None
    compared: int | None = None
    training_differing: int | None = None
    training_compared: int | None = None
    paired: Paired | None = None
    delivered: bool = False

    @property
    def title(self) -> str:
        return self.network if self.device_accuracy is None else self.network.upper()

    @property
    def accuracy(self) -> float:
        """On the device, where the network runs there."""
        return self.pytorch_accuracy if self.device_accuracy is None else self.device_accuracy


def rows(results: Results) -> list[Row]:
    """The float network, then all others, the most bits first."""
    table = [Row("float32", "float training", 32, 32, results.float_test_accuracy, results.float_bytes)]
    for outcome in results.outcomes:
        report = outcome.report
        assert report is not None
        table.append(
            Row(
                outcome.precision,
                outcome.method.title,
                *results.settings.precisions[outcome.precision],
                outcome.test_accuracy,
                packed_bytes(outcome),
                outcome.device_accuracy,
                results.float_test_accuracy - outcome.device_accuracy,
                outcome.file_bytes,
                outcome.compressed_bytes,
                None if outcome.footprint is None else outcome.footprint.flash_bytes,
                report.differing,
                report.values,
                report.training_differing,
                report.training_values,
                results.beside_float(outcome.device_predictions),
                outcome is results.chosen(outcome.precision),
            )
        )
    return table


def widths(results: Results) -> list[Row]:
    """The float network, then what was delivered at each precision."""
    return [row for row in rows(results) if row.delivered or row.device_accuracy is None]


WIDTHS_HEADER = (
    "network", "in PyTorch", "on the device", "points to float", "difference", "packed bytes", "file bytes",
    "compressed",
)  # fmt: skip


WIDTHS_NOTE = (
    "Packed: all parameters, weights at their own bits. A .tflite file stores weights of up to four bits in half a "
    "byte where the device computes the same with them (TFLite-Micro), and all others in a byte. The compressed file, "
    "as you would download it, gets smaller everywhere, and so does the memory on a device that unpacks weights itself."
)
LUCK_NOTE = f"Points to float: {NOTE}"


def width_rows(results: Results) -> list[list[str]]:
    """The cells of `widths`, as WIDTHS_HEADER names them."""
    return [
        [
            width.title,
            f"{width.pytorch_accuracy:.1%}",
            "–" if width.device_accuracy is None else f"{width.device_accuracy:.1%}",
            *(("–", "–") if width.paired is None else (width.paired.points(), width.paired.verdict())),
            f"{width.packed_parameter_bytes:,}",
            *("–" if size is None else f"{size:,}" for size in (width.file_bytes, width.compressed_file_bytes)),
        ]
        for width in widths(results)
    ]


def packed_bytes(outcome: Outcome) -> int:
    """Bytes of all parameters with weights at their own bits and biases at 32."""
    bits = 0
    for _, layer in outcome.model.layers():
        if isinstance(layer, WeightedStep):
            weight = layer.weight_source()
            bits += weight.numel() * layer.weight_quantizer.rule.weight_bits + 32 * weight.shape[layer.weight_axis]
    return -(-bits // 8)


def passing(results: Results) -> list[tuple[bool, str]]:
    """For each delivered network, whether it reaches what its recipe requires, on the device, and a sentence that says
    so; nothing without a recipe."""
    mark = results.settings.mark
    if mark is None:
        return []
    found = []
    for precision in results.settings.precisions:
        outcome = results.chosen(precision)
        accuracy = outcome.device_accuracy
        passes = accuracy >= mark.least
        sentence = (
            f"{mark.title}: {precision.upper()} {'passes' if passes else 'does not pass'}, with an accuracy of "
            f"{accuracy:.1%} on {results.settings.device}; at least {mark.least:.0%} is asked."
        )
        found.append((passes, sentence))
    return found


def closing_sentences(results: Results) -> list[tuple[bool, str]]:
    """How many integers were compared, and with what result: the files on the runtime, the device compared with
    training, and which device that is. Each says whether it is good news."""
    networks, tests, noun = len(results.outcomes), len(results.dataset.test), results.dataset.noun
    device = results.settings.device

    def verdict(count: int) -> str:
        return "all are equal" if count == 0 else f"{count:,} of them differ"

    title = PROFILES[device].title
    ran = (
        f"{results.values_compared:,} integers (every layer's output of {networks} networks on all {tests} test "
        f"{noun}s) were compared between our simulation and the runtime ({PROFILES[results.ran_as].title}): "
        f"{verdict(results.values_differing)}."
    )
    trained = (
        f"{results.training_values:,} integers were compared between training and what {title} computes: "
        f"{verdict(results.training_differing)}."
    )
    sentences = [(results.values_differing == 0, ran), (results.training_differing == 0, trained)]
    wrong, fed = results.predictions
    if wrong:
        sentences.append(
            (False, f"Fed with the {noun}s, the files return other integers than the models: {wrong:,} of {fed:,}.")
        )
    sentences += passing(results)
    named = f"Trained for {device}."
    if results.ran_as != device:
        return [*sentences, (False, f"{named} The files were not run there: this machine does not have {title}.")]
    return [*sentences, (True, named)]
