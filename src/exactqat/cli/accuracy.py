# SPDX-License-Identifier: Apache-2.0
"""`exactqat gate` and `exactqat tune`: their options, and what they do."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import AsJson, DirectoryOrFile, MetricName, Model, OtherExamples, Precision, TestExamples, command
from .terminal import bars_on, columns, console_of, native_messages_kept_back, say

if TYPE_CHECKING:
    from ..application.job.restored import Judged
    from ..tune.metrics import Metric

# A share of all answers that nobody intends to lose: percentage points are meant.
LARGE_DROP = 0.25
ACCURACY, NOISE = "accuracy", "noise"


def metric_named(name: str) -> Metric | None:
    """The metric that --metric names; None: noise alone.

    Raises:
        ValueError: it is neither ``accuracy`` nor ``noise`` nor a function that can be imported.
    """
    from ..tune import accuracy

    if name in (ACCURACY, NOISE):
        return accuracy if name == ACCURACY else None
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ValueError(f"--metric must be {ACCURACY}, {NOISE} or a function as module:function, got {name!r}")
    # As Python finds modules of a script in the current folder.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
        for part in function.split("."):
            found = getattr(found, part)
    except Exception as error:
        # Whatever a module of the user's raises; the exit status of a gate must not say that the network fails.
        raise ValueError(f"--metric {name} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"--metric {name} must be a function of outputs and targets, got {type(found).__name__}")

    def metric(outputs: Any, targets: Any) -> float:
        try:
            return float(found(outputs, targets))
        except Exception as error:
            raise ValueError(f"--metric {name} fails: {type(error).__name__}: {error}") from error

    return metric


@command("Say whether networks are good enough on their devices.")
def gate(
    path: DirectoryOrFile,
    data: TestExamples = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            help="Device whose integers are judged: xnnpack-x86, xnnpack-arm64, reference, micro; several times for "
            "several; all have to pass. By default the one that the network was trained for."
        ),
    ] = None,
    min_accuracy: Annotated[
        float | None, typer.Option(min=0, max=1, help="The least accuracy on each device, such as 0.95.")
    ] = None,
    metric: MetricName = "accuracy",
    min_score: Annotated[float | None, typer.Option(help="The least --metric on each device.")] = None,
    max_score: Annotated[
        float | None, typer.Option(help="The largest --metric on each device, such as of an error.")
    ] = None,
    max_differ: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="How many of the outputs' integers may differ from those of the device that the network was trained "
            "for.",
        ),
    ] = None,
    beside: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Count differences from this device's integers instead.")
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Also run the file on the devices' runtimes; no integer may differ.")
    ] = False,
    precision: Precision = None,
    model: Model = None,
    as_json: AsJson = False,
) -> bool:
    """Say whether networks reach what is asked of them on their devices, for scripts and continuous integration.

    Exit status 0 if all do, 1 if one does not, 2 if anything goes wrong.
    """
    from ..application.job.restored import networks_of
    from ..deploy.verify import verify
    from ..tune import Gate

    minimum, least, most = min_accuracy, min_score, max_score
    if minimum is None and least is None and most is None and max_differ is None and not run:
        raise ValueError("nothing is asked: give --min-accuracy, --min-score, --max-score, --max-differ or --run")
    if minimum is not None and (metric != ACCURACY or least is not None):
        raise ValueError("--min-accuracy bounds the accuracy; of another metric, give --min-score or --max-score")
    judge = metric_named(metric)
    if judge is None:
        raise ValueError("--metric noise has no value that could pass; exactqat tune shows it")
    console = console_of()
    passes, written = True, {}
    for each in networks_of(path, data, model, "test", precision):
        asked = Gate(
            each.data, judge, devices=device or None, minimum=minimum if least is None else least, maximum=most,
            max_differ=max_differ, beside=beside, higher_is_better=most is None or least is not None,
        )  # fmt: skip
        verdict = asked.verdict(each.graph)
        failures = list(verdict.failures)
        compared = {}
        for found in verdict.devices if run else ():
            with native_messages_kept_back(), bars_on(console_of(stderr=True), disable=as_json) as bars:
                task = bars.add_task(f"{each.name} on the runtime of {found.device}", total=None)
                report = verify(
                    each.graph, each.path, device=found.device, data=each.data[0],
                    progress=lambda done, total, bars=bars, task=task: bars.update(  # type: ignore[misc]
                        task, completed=done, total=total or None
                    ),
                )  # fmt: skip
            compared[found.device] = report.values
            if report.differing:
                failures.append(
                    f"{found.device}: {report.differing:,} of {report.values:,} integers of the runtime differ from "
                    "the simulation"
                )
        passes = passes and not failures
        content = json.loads(verdict.as_json())
        written[each.name] = {**content, "passes": not failures, "failures": failures}
        if run:
            written[each.name]["compared"] = compared
        if as_json:
            continue
        for found in verdict.devices:
            differ = "" if found.differing is None else f", {found.differing:,} of {found.values:,} outputs differ"
            ran = f", {compared[found.device]:,} integers of its runtime compared" if run else ""
            say(console, f"{each.name} on {found.device}: {metric} {found.score:.4g}{differ}{ran}")
        for failure in failures:
            say(console, ("fails: ", "bold red"), f"{each.name} on {failure}")
    if as_json:
        console.print(json.dumps(written, indent=2), soft_wrap=True)
    else:
        say(console, ("passes", "bold green") if passes else ("does not pass", "bold red"))
    return passes


@command("Say which layers cost accuracy on the device, and why.")
def tune(
    path: DirectoryOrFile,
    data: OtherExamples = None,
    device: Annotated[
        str | None, typer.Option(help="Device whose integers count; by default the one that was trained for.")
    ] = None,
    precision: Precision = None,
    metric: MetricName = "accuracy",
    lower_is_better: Annotated[
        bool, typer.Option("--lower-is-better", help="The --metric is an error: less is better.")
    ] = False,
    examples: Annotated[int | None, typer.Option(min=1, help="How many examples are used, at most.")] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw what each layer costs, as .svg, .png or .pdf.")
    ] = None,
    search: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Search for ranges, biases and roundings with which the network is more accurate, without training, "
            "and write it to this .tflite file.",
        ),
    ] = None,
    budget: Annotated[int, typer.Option(min=1, help="The most evaluations of a search.")] = 300,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Find the bits of each layer with which the network keeps to the budgets below, and write them to "
            "this text file of rules, which people and `qat.load_rules` read. If the same bits in all layers keep to "
            "the budgets too, they go beside it, as rules-even.txt beside rules.txt: train both.",
        ),
    ] = None,
    max_drop: Annotated[
        str | None, typer.Option(metavar="DROP", help="The most accuracy that a plan may lose, such as 0.5% or 0.005.")
    ] = None,
    flash: Annotated[str | None, typer.Option(metavar="BYTES", help="The largest file, such as 256k.")] = None,
    arena: Annotated[
        str | None, typer.Option(metavar="BYTES", help="The largest arena of TFLite-Micro, such as 64k.")
    ] = None,
    multiply_adds: Annotated[
        str | None,
        typer.Option(metavar="COUNT", help="The most multiply-adds, in those of 8 by 8 bits, such as 10M."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the examples that a search holds out.")] = 0,
    model: Model = None,
    as_json: AsJson = False,
) -> bool:
    """Say which layers cost accuracy on the device, how much and why, in the device's own integers.

    With --plan: find the bits of each layer instead. Exit status 1 if no plan keeps to the budgets; the nearest is
    written then.
    """
    from .. import tune as tuning
    from ..application.job.restored import networks_of
    from ..deploy.formats.tflite import write_tflite

    budgets = {"max_drop": max_drop, "flash": flash, "arena": arena, "multiply_adds": multiply_adds}
    if plan is not None:
        if picture is not None:
            raise ValueError("--picture draws what each layer costs: leave out --plan")
        return find_plan(
            path, data, device, precision, model, examples, plan, budgets, as_json, metric, lower_is_better
        )
    given = [name for name, value in budgets.items() if value is not None]
    if given:
        raise ValueError(f"--{given[0].replace('_', '-')} is a budget of a plan: add --plan FILE")
    _require_folders({"--picture": picture, "--search": search})
    judge = metric_named(metric)
    if judge is None and search is not None:
        raise ValueError("--search decides by a metric: give --metric accuracy, or a function as module:function")
    console = console_of()
    networks = networks_of(path, data, model, "validation", precision, judge is not None)
    if picture is not None or search is not None:
        _require_one(path, networks)
    for each in networks:
        if search is not None and each.model is None:
            raise ValueError("a file does not say what its weights were: --search needs the directory of a job")
        judges = _first(each.data, examples)
        subject = each.graph if each.model is None else each.model
        found = tuning.sensitivity(subject, judges, judge, device=device, higher_is_better=not lower_is_better)
        if not as_json:
            say(console, (each.name, "bold"))
        # A program may read it: nothing is wrapped or styled.
        console.print(found.as_json() if as_json else found.text(min(columns(), 100)), soft_wrap=True)
        if picture is not None:
            say(console, "Written: ", (str(found.picture(picture)), "bold"), whole=True)
        if search is None or judge is None:
            continue
        better = tuning.search(
            each.model, judges, judge, device=device, budget=budget, seed=seed, higher_is_better=not lower_is_better
        )
        console.print(better.as_json() if as_json else f"\n{better.text()}", soft_wrap=True)
        write_tflite(better.graph, search)
        say(console, "Written: ", (str(search), "bold"), whole=True)
    return True


def find_plan(
    path: Path,
    data: Path | None,
    device: str | None,
    precision: str | None,
    model: str | None,
    examples: int | None,
    rules: Path,
    budgets: Mapping[str, str | None],
    as_json: bool,
    metric: str = ACCURACY,
    lower_is_better: bool = False,
) -> bool:
    """Finds the bits of each layer, writes them as rules, and returns whether they keep within the budgets. If another
    plan is worth training, its rules are written alongside."""
    from .. import tune as tuning
    from ..application.job.restored import networks_of
    from ..qat import save_rules

    _require_folders({"--plan": rules})
    judge = metric_named(metric)
    if judge is None:
        raise ValueError("--plan decides by a metric: give --metric accuracy, or a function as module:function")
    console = console_of()
    (network,) = _require_one(path, networks_of(path, data, model, "validation", precision))
    if network.model is None:
        raise ValueError("a file does not say what its weights were: --plan needs the directory of a job")
    drop = budgets["max_drop"]
    if metric == ACCURACY and drop is not None and drop.replace(".", "", 1).isdigit() and float(drop) >= LARGE_DROP:
        raise ValueError(
            f"--max-drop {drop} would be {100 * float(drop):g} points of a hundred; for {drop} points say {drop}%"
        )
    given: dict[str, Any] = {**budgets, "device": device, "higher_is_better": not lower_is_better}
    found = tuning.plan(network.model, _first(network.data, examples), judge, **given)
    console.print(found.as_json() if as_json else found.text(min(columns(), 100)), soft_wrap=True)
    written = [found.save_rules(rules)]
    written += [save_rules(each.rules, _beside(rules)) for each in found.to_train[1:]]
    for each in written if not as_json else ():
        say(console, "Written: ", (str(each), "bold"), whole=True)
    return bool(found)


def _beside(rules: Path) -> Path:
    """The file of the even plan."""
    return rules.with_name(f"{rules.stem}-even{rules.suffix}")


def _require_folders(written: Mapping[str, Path | None]) -> None:
    """Refuses files that cannot be written, before any computation."""
    for option, path in written.items():
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(
                f"{option} {path}: " + ("it is a directory" if path.is_dir() else f"there is no folder {path.parent}")
            )


def _require_one(path: Path, networks: list[Judged]) -> list[Judged]:
    if len(networks) > 1:
        names = ", ".join(each.name for each in networks)
        raise ValueError(f"{path} holds several networks: choose one by --precision ({names})")
    return networks


def _first(data: tuple[Any, Any], examples: int | None) -> Any:
    """The first examples (None: all), with targets if there are any."""
    inputs, classes = data
    if isinstance(inputs, dict):
        inputs = {name: array[:examples] for name, array in inputs.items()}
    else:
        inputs = inputs[:examples]
    return inputs if classes is None else (inputs, classes[:examples])
