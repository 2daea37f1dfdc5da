# SPDX-License-Identifier: Apache-2.0
"""What the figures of a job say: whether anything was learned, which classes suffer, which images are misclassified."""

from __future__ import annotations

import math

import numpy as np

from ...kit.device import PROFILES
from ...qat.train.core.steps import WeightedStep
from ..job.files import Record
from ..job.pipeline import chance, to_try
from ..job.recipes import recipe_named
from ..job.results import Dataset, Outcome, Results
from .luck import NOTE, Paired, paired

# Validation accuracy that a smaller network may lose and still be recommended.
FEWER_BITS_MAY_COST = 0.01
# The most mistakes listed in metrics.json; their number is always there.
MISTAKES_LISTED = 1000
WIDTHS_NOTE = (
    "Packed: all parameters, weights at their own bits. A .tflite file stores weights of up to four bits in half a "
    "byte where the device computes the same with them (TFLite-Micro), and all others in a byte. The compressed file, "
    "as you would download it, gets smaller everywhere, and so does the memory on a device that unpacks weights itself."
)
LUCK_NOTE = f"Points to float: {NOTE}"


def learned(dataset: Dataset, accuracy: float) -> bool:
    """Whether an accuracy on the test images shows that something was learned."""
    return accuracy > chance(dataset.test)["needed"]


def warnings_on(results: Results) -> list[str]:
    """What readers of the accuracies must know first."""
    dataset = results.dataset
    guess, tests, noun = chance(dataset.test), len(dataset.test), dataset.noun
    guessed, of_float = f"{guess['accuracy']:.1%}", f"{results.float_test_accuracy:.1%}"
    if guess["needed"] >= 1:
        return [
            f"{tests:,} test {noun}s, {guessed} of them of one class, are too few to tell whether it learned anything; "
            "use more"
        ]
    if not learned(dataset, results.float_test_accuracy):
        return [
            f"the float network has not learned to distinguish the classes: {of_float} of {tests:,} test {noun}s are "
            f"right, and always naming the most frequent class gives {guessed}. {to_try(noun)}"
        ]
    sentences = []
    for precision in results.settings.precisions:
        accuracy = results.chosen(precision).device_accuracy
        if not learned(dataset, accuracy):
            sentences.append(
                f"the {precision.upper()} network is no better than guessing: {accuracy:.1%} of {tests:,} test "
                f"{noun}s are right, of float's {of_float}. Try more epochs (--epochs-qat) or more bits (--bits)"
            )
    if not sentences and guess["accuracy"] < results.float_test_accuracy:
        absent = [f"'{row['class']}'" for row in per_class(results) if row["float"] == 0]
        if absent:
            names = ", ".join(absent[:5]) + (" and others" if len(absent) > 5 else "")
            sentences.append(f"the float network recognizes no {noun} of class {names}")
    return sentences


def answers_of(results: Results) -> dict[str, np.ndarray]:
    """The class that the float network and the delivered ones, on the device, give every test image, [n]."""
    delivered = {precision: results.chosen(precision).device_predictions for precision in results.settings.precisions}
    return {"float": results.float_predictions} | delivered


def per_class(results: Results) -> list[Record]:
    """For each class its name, the number of test images, and the share that the float network and the delivered ones,
    on the device, get right; None without images."""
    labels, answers = results.dataset.test.labels.numpy(), answers_of(results)
    rows = []
    for code, name in enumerate(results.dataset.class_names):
        members = labels == code
        shares = {
            network: float((answer[members] == code).mean()) if members.any() else None
            for network, answer in answers.items()
        }
        rows.append({"class": name, "images": int(members.sum()), **shares})
    return rows


def mistakes(results: Results) -> Record:
    """How many test images the float network or a delivered one gets wrong; and those most often wrong: number, from 0
    in the order of the test part, and file, what each shows, and how it is classified."""
    test, names, answers = results.dataset.test, results.dataset.class_names, answers_of(results)
    labels = test.labels.numpy()
    wrong = np.sum([answer != labels for answer in answers.values()], 0)
    images = [int(image) for image in np.argsort(-wrong, kind="stable") if wrong[image]]
    listed = [
        ({"file": test.names[image]} if test.names else {})
        | {"image": image, "shows": names[labels[image]]}
        | {"answers": {network: names[answer[image]] for network, answer in answers.items()}}
        for image in images[:MISTAKES_LISTED]
    ]
    return {"images": len(images), "listed": listed}


def beside_float(results: Results, outcome: Outcome, answers: np.ndarray | None = None) -> Paired:
    """A network's answers to the test images, on the device, compared image by image with others: the float network's,
    if none are given."""
    labels, others = results.dataset.test.labels.numpy(), results.float_predictions if answers is None else answers
    return paired(outcome.device_predictions == labels, others == labels)


def recommended(results: Results) -> Outcome:
    """The delivered network that takes the fewest bytes of flash, then of arena, then multiply-adds, on the job's
    device, among those that are as good as the best on the validation images: at most FEWER_BITS_MAY_COST below it
    there, and not significantly worse on the test images. Of equal ones the best on the validation images."""
    best = max(results.delivered, key=lambda outcome: outcome.validation_accuracy)
    enough = [
        outcome
        for outcome in results.delivered
        if outcome.validation_accuracy >= best.validation_accuracy - FEWER_BITS_MAY_COST
        and not _significantly_worse(results, outcome, best)
    ]

    def cost(outcome: Outcome) -> tuple[float, ...]:
        arena = getattr(outcome.footprint, "arena_bytes", None) or math.inf  # where it was not measured
        work = getattr(outcome.footprint, "multiply_accumulates", 0)
        return outcome.file_bytes, arena, work, -outcome.validation_accuracy

    return min(enough, key=cost)


def _significantly_worse(results: Results, outcome: Outcome, other: Outcome) -> bool:
    """Whether a network is worse than another on the device by more than chance, on the test images."""
    pair = beside_float(results, outcome, other.device_predictions)
    return pair.difference < 0 and not pair.may_be_luck


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
    untrained = [other for other in results.of(outcome.precision) if not other.method.trained]
    without, enough = "", not outcome.method.trained
    if untrained and outcome.method.trained:
        rival = max(untrained, key=lambda other: other.device_accuracy)
        without = f", {rival.method.title} {rival.device_accuracy:.1%}"
        enough = not _significantly_worse(results, rival, outcome)
    bits = results.settings.precisions[outcome.precision][0]
    plain = f" {bits}-bit PTQ is enough here: training gains nothing that this test shows." if enough else ""
    return (
        f"Take {outcome.precision}/model.tflite ({outcome.method.title}), {why}: an accuracy of "
        f"{outcome.device_accuracy:.1%} on the device (float network {results.float_test_accuracy:.1%}{without})."
        f"{plain} It was trained for {device} ({PROFILES[device].title}); other devices may compute other integers."
    )


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
    if results.settings.recipe is None:
        return []
    recipe = recipe_named(results.settings.recipe)
    sentences = []
    for precision in results.settings.precisions:
        outcome = results.chosen(precision)
        passes, asked = outcome.device_accuracy >= recipe.least, f"at least {recipe.least:.0%} is asked"
        reached = f"an accuracy of {outcome.device_accuracy:.1%}"
        if recipe.most is not None:
            there, heard = results.dataset.test.labels.numpy() == 0, outcome.device_predictions == 0
            errors = int((heard & ~there).sum()), int((there & ~heard).sum())
            passes = max(errors) <= recipe.most and bool((heard & there).any())  # of few sounds it may miss all
            asked = f"at most {recipe.most} of each are allowed"
            reached = "{} false positives and {} false negatives".format(*errors)
        verdict = f"{recipe.title}: {precision.upper()} {'passes' if passes else 'does not pass'}"
        sentences.append((passes, f"{verdict}, with {reached} on {results.settings.device}; {asked}."))
    return sentences


def closing_sentences(results: Results) -> list[tuple[bool, str]]:
    """How many integers were compared, and with what result: the files on the runtime, the device compared with
    training, and which device that is. Each says whether it is good news."""
    networks, tests, noun = len(results.outcomes), len(results.dataset.test), results.dataset.noun
    device, ran, trained, fed = results.settings.device, results.simulation, results.training, results.predictions

    def verdict(count: int) -> str:
        return "all are equal" if count == 0 else f"{count:,} of them differ"

    title = PROFILES[device].title
    by_simulation = (
        f"{ran.values:,} integers (every layer's output of {networks} networks on all {tests} test {noun}s) were "
        f"compared between our simulation and the runtime ({PROFILES[results.ran_as].title}): {verdict(ran.differing)}."
    )
    by_training = (
        f"{trained.values:,} integers were compared between training and what {title} computes: "
        f"{verdict(trained.differing)}."
    )
    sentences = [(ran.differing == 0, by_simulation), (trained.differing == 0, by_training)]
    if fed.differing:
        files = f"{fed.differing:,} of {fed.values:,}"
        sentences.append((False, f"Fed with the {noun}s, the files return other integers than the models: {files}."))
    there = results.ran_as == device
    missing = "" if there else f" The files were not run there: this machine does not have {title}."
    return [*sentences, *passing(results), (there, f"Trained for {device}.{missing}")]
