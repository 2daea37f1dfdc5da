# SPDX-License-Identifier: Apache-2.0
"""`exactqat gate` and `exactqat tune`: their options, and what they do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import AsJson, DirectoryOrFile, MetricName, Model, Precision, command, metavar
from .terminal import columns, console_of, native_messages_kept_back, say, status_on

if TYPE_CHECKING:
    from ..tune.metrics import Metric

# A share of all answers that nobody intends to lose: percentage points are meant.
LARGE_DROP = 0.25
ACCURACY, NOISE = "accuracy", "noise"


def metric_named(name: str) -> Metric | None:
    """The metric that --metric names; None: noise alone."""
    from ..application.job.models import imported
    from ..tune import accuracy

    if name in (ACCURACY, NOISE):
        return accuracy if name == ACCURACY else None
    function = imported(name, "--metric", f"--metric must be {ACCURACY}, {NOISE} or a function as module:function")
    if not callable(function):
        raise ValueError(f"--metric {name} must be a function of outputs and targets, got {type(function).__name__}")

    def metric(outputs: Any, targets: Any) -> float:
        try:
            return float(function(outputs, targets))
        except Exception as error:
            raise ValueError(f"--metric {name} fails: {type(error).__name__}: {error}") from error

    return metric


@command("Say whether networks are good enough on their devices.")
def gate(
    path: DirectoryOrFile,
    data: Annotated[Path | None, metavar("X.npz")] = None,
    device: list[str] | None = None,
    min_accuracy: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    metric: MetricName = "accuracy",
    min_score: float | None = None,
    max_score: float | None = None,
    max_differ: Annotated[int | None, typer.Option(min=0)] = None,
    max_flips: Annotated[int | None, typer.Option(min=0)] = None,
    beside: Annotated[str | None, metavar("DEVICE")] = None,
    run: bool = False,
    precision: Precision = None,
    model: Model = None,
    as_json: AsJson = False,
    junit: Annotated[Path | None, metavar("FILE")] = None,
    markdown: Annotated[Path | None, metavar("FILE")] = None,
    badge: Annotated[Path | None, metavar("FILE")] = None,
) -> bool:
    """Say whether networks reach what is asked of them on their devices, for scripts and continuous integration.

    Exit status 0 if all do, 1 if one does not, 2 if anything goes wrong.

    Args:
        data: Inputs, and their classes y; by default the test images of the job in DIR.
        device: Device whose integers are judged: xnnpack-x86, xnnpack-arm64, reference, micro; several times for
            several; all have to pass. By default the one that the network was trained for.
        min_accuracy: The least accuracy on each device, such as 0.95.
        min_score: The least --metric on each device.
        max_score: The largest --metric on each device, such as of an error.
        max_differ: How many of the outputs' integers may differ from those of the device that the network was trained
            for.
        max_flips: How many examples may have another class on one of the devices than on another.
        beside: Count differences from this device's integers instead.
        run: Also run the file on the devices' runtimes; no integer may differ.
        junit: Write the verdicts to this file as JUnit's XML, a test for each device.
        markdown: Write them to this file as a table in Markdown.
        badge: Write them to this file as a badge of shields.io, in JSON.
    """
    from ..application.job import files
    from ..application.job.restored import networks_of
    from ..deploy.verify import verify
    from ..tune import Gate
    from ..tune.verdict_files import as_badge, as_junit, as_markdown

    for file in filter(None, (junit, markdown, badge)):
        files.check_writable(file)
    if (min_accuracy, min_score, max_score, max_differ, max_flips) == (None,) * 5 and not run:
        options = "--min-accuracy, --min-score, --max-score, --max-differ, --max-flips or --run"
        raise ValueError(f"nothing is asked: give {options}")
    if min_accuracy is not None and (metric != ACCURACY or min_score is not None):
        raise ValueError("--min-accuracy bounds the accuracy; of another metric, give --min-score or --max-score")
    judge = metric_named(metric)
    if judge is None:
        raise ValueError("--metric noise has no value that could pass; exactqat tune shows it")
    console, passes, written = console_of(), True, dict[str, Any]()
    for network in networks_of(path, data, model, "test", precision):
        asked = Gate(
            network.examples(), judge, devices=device or None,
            minimum=min_accuracy if min_score is None else min_score, maximum=max_score, max_differ=max_differ,
            max_flips=max_flips, beside=beside, higher_is_better=max_score is None or min_score is not None,
        )  # fmt: skip
        verdict, compared, failures = asked.verdict(network.graph), dict[str, int](), list[str]()
        for result in verdict.devices if run else ():
            running = f"{network.name} on the runtime of {result.device}"
            with native_messages_kept_back(), status_on(console_of(stderr=True), running):
                report = verify(network.graph, network.path, device=result.device, data=network.inputs)
            compared[result.device] = report.values
            if report.differing:
                failures.append(
                    f"{result.device}: {report.differing:,} of {report.values:,} integers of the runtime differ from "
                    "the simulation"
                )
        verdict = replace(verdict, failures=(*verdict.failures, *failures), asked=True)
        passes = passes and verdict.passes
        written[network.name] = json.loads(verdict.as_json()) | ({"compared": compared} if run else {})
        if not as_json:
            say(console, (network.name, "bold"), f", {metric}: {verdict.text()}")
            for name, values in compared.items():
                say(console, f"  {name}: {values:,} integers of its runtime compared")
    texts = ((junit, as_junit), (markdown, lambda verdicts: as_markdown(verdicts, metric)), (badge, as_badge))
    for out, text in texts:
        if out is not None:
            out.write_text(text(written), "utf-8")
    if as_json:
        console.print(json.dumps(written, indent=2), soft_wrap=True)
    else:
        say(console, ("passes", "bold green") if passes else ("does not pass", "bold red"))
    return passes


@command("Say which layers cost accuracy on the device, and why.")
def tune(
    path: DirectoryOrFile,
    data: Annotated[Path | None, metavar("X.npz")] = None,
    device: str | None = None,
    precision: Precision = None,
    metric: MetricName = "accuracy",
    lower_is_better: bool = False,
    examples: Annotated[int | None, typer.Option(min=1)] = None,
    picture: Annotated[Path | None, metavar("FILE")] = None,
    search: Annotated[Path | None, metavar("FILE")] = None,
    budget: Annotated[int, typer.Option(min=1)] = 300,
    methods: Annotated[str | None, metavar("NAMES")] = None,
    plan: Annotated[Path | None, metavar("FILE")] = None,
    max_drop: Annotated[str | None, metavar("DROP")] = None,
    flash: Annotated[str | None, metavar("BYTES")] = None,
    arena: Annotated[str | None, metavar("BYTES")] = None,
    multiply_adds: Annotated[str | None, metavar("COUNT")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    model: Model = None,
    as_json: AsJson = False,
) -> bool:
    """Say which layers cost accuracy on the device, how much and why, in the device's own integers.

    With --plan: find the bits of each layer instead. Exit status 1 if no plan keeps to the budgets; the nearest is
    written then.

    Args:
        data: Inputs, and their classes y; by default the validation images of the job in DIR.
        device: Device whose integers count; by default the one that was trained for.
        lower_is_better: The --metric is an error: less is better.
        examples: How many examples are used, at most.
        picture: Draw what each layer costs, as .svg, .png or .pdf.
        search: Search for ranges, biases and roundings with which the network is more accurate, without training, and
            write it to this .tflite file.
        budget: The most evaluations of a search.
        methods: What a search tries, such as batch_norm,rounding,bias; by default all.
        plan: Find the bits of each layer with which the network keeps to the budgets below, and write them to this text
            file of rules, which people and `qat.load_rules` read. If the same bits in all layers keep to the budgets
            too, they go beside it, as rules-even.txt beside rules.txt: train both.
        max_drop: The most accuracy that a plan may lose, such as 0.5% or 0.005.
        flash: The largest file, such as 256k.
        arena: The largest arena of TFLite-Micro, such as 64k.
        multiply_adds: The most multiply-adds, in those of 8 by 8 bits, such as 10M.
        seed: Of the examples that a search holds out.
    """
    from .. import tune as tuning
    from ..application.job import files
    from ..application.job.restored import networks_of
    from ..deploy.formats.tflite import write_tflite
    from ..qat import save_rules

    budgets: dict[str, Any] = {"max_drop": max_drop, "flash": flash, "arena": arena, "multiply_adds": multiply_adds}
    if plan is not None and picture is not None:
        raise ValueError("--picture draws what each layer costs: leave out --plan")
    flags = [name for name, value in budgets.items() if value is not None]
    if flags and plan is None:
        raise ValueError(f"--{flags[0].replace('_', '-')} is a budget of a plan: add --plan FILE")
    for file in filter(None, (picture, plan, search)):
        files.check_writable(file)
    judge = metric_named(metric)
    deciding = "--plan" if plan is not None else "--search" if search is not None else ""
    if judge is None and deciding:
        raise ValueError(f"{deciding} decides by a metric: give --metric accuracy, or a function as module:function")
    if metric == ACCURACY and max_drop and max_drop.replace(".", "", 1).isdigit() and float(max_drop) >= LARGE_DROP:
        raise ValueError(
            f"--max-drop {max_drop} would be {100 * float(max_drop):g} points of a hundred; for {max_drop} points say "
            f"{max_drop}%"
        )
    console, written, good = console_of(), list[Path](), True
    networks = networks_of(path, data, model, "validation", precision, judge is not None)
    if len(networks) > 1 and (picture or search or plan):
        names = ", ".join(network.name for network in networks)
        raise ValueError(f"{path} holds several networks: choose one by --precision ({names})")
    options: dict[str, Any] = {"device": device, "higher_is_better": not lower_is_better}

    def show(answer: Any, text: str) -> None:
        # A program may read it: nothing is wrapped or styled.
        console.print(answer.as_json() if as_json else text, soft_wrap=True)

    for network in networks:
        if deciding and network.model is None:
            raise ValueError(f"a file does not say what its weights were: {deciding} needs the directory of a job")
        judges = network.examples(examples)
        result: Any
        if plan is not None:
            result = tuning.plan(network.model, judges, judge or tuning.accuracy, **budgets, **options)
            show(result, result.text(min(columns(), 100)))
            good = bool(result)
            even = plan.with_name(f"{plan.stem}-even{plan.suffix}")
            written += [result.save_rules(plan), *(save_rules(other.rules, even) for other in result.to_train[1:])]
        else:
            if not as_json:
                say(console, (network.name, "bold"))
            subject = network.graph if network.model is None else network.model
            result = tuning.sensitivity(subject, judges, judge, **options)
            show(result, result.text(min(columns(), 100)))
            written += [] if picture is None else [result.picture(picture)]
        if search is not None and plan is None and judge is not None:
            named: dict[str, Any] = {} if methods is None else {"methods": methods.split(",")}
            better = tuning.search(network.model, judges, judge, budget=budget, seed=seed, **named, **options)
            show(better, f"\n{better.text()}")
            write_tflite(better.graph, search)
            written.append(search)
    for file in written if plan is None or not as_json else ():
        say(console, "Written: ", (str(file), "bold"), whole=True)
    return good
