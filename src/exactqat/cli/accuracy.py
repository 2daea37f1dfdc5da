# SPDX-License-Identifier: Apache-2.0
"""What `exactqat gate` and `exactqat tune` do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .terminal import columns, console_of, native_messages_kept_back, say


def gate(
    path: Path,
    data: Path | None,
    devices: Sequence[str] | None,
    minimum: float | None,
    max_differ: int | None,
    beside: str | None,
    precision: str | None,
    model: str | None,
    run: bool,
    as_json: bool,
) -> bool:
    """Prints what each network reaches on each device, and says whether all of it is as asked."""
    from ..deploy.verify import verify
    from ..job.judged import networks_of
    from ..tune import Gate

    if minimum is None and max_differ is None and not run:
        raise ValueError("nothing is asked: give --min-accuracy, --max-differ or --run")
    console = console_of()
    passes, written = True, {}
    for each in networks_of(path, data, model, "test", precision):
        asked = Gate(each.data, devices=devices or None, minimum=minimum, max_differ=max_differ, beside=beside)
        verdict = asked.verdict(each.graph)
        failures = list(verdict.failures)
        for found in verdict.devices if run else ():
            with native_messages_kept_back():
                report = verify(each.graph, each.path, device=found.device, data=each.data[0])
            if report.differing:
                failures.append(
                    f"{found.device}: {report.differing:,} of {report.values:,} integers of the runtime differ from "
                    "the simulation"
                )
        passes = passes and not failures
        content = json.loads(verdict.as_json())
        written[each.name] = {**content, "passes": not failures, "failures": failures}
        if as_json:
            continue
        for found in verdict.devices:
            differ = "" if found.differing is None else f", {found.differing:,} of {found.values:,} outputs differ"
            say(console, f"{each.name} on {found.device}: accuracy {found.score:.4g}{differ}")
        for failure in failures:
            say(console, ("fails: ", "bold red"), f"{each.name} on {failure}")
    if as_json:
        console.print(json.dumps(written, indent=2), soft_wrap=True)
    else:
        say(console, ("passes", "bold green") if passes else ("does not pass", "bold red"))
    return passes


def tune(
    path: Path,
    data: Path | None,
    device: str | None,
    precision: str | None,
    model: str | None,
    examples: int | None,
    picture: Path | None,
    search: Path | None,
    budget: int,
    seed: int,
    as_json: bool,
) -> None:
    """Prints which layers cost accuracy and why, and searches for a better network if asked."""
    from .. import tune
    from ..deploy.formats.tflite import write_tflite
    from ..job.judged import networks_of

    console = console_of()
    networks = networks_of(path, data, model, "validation", precision)
    if len(networks) > 1 and (picture is not None or search is not None):
        names = ", ".join(each.name for each in networks)
        raise ValueError(f"{path} holds several networks: choose one by --precision ({names})")
    for each in networks:
        if search is not None and each.model is None:
            raise ValueError("a file does not say what its weights were: --search needs the directory of a job")
        inputs, classes = each.data
        if examples is not None:
            inputs = {name: array[:examples] for name, array in inputs.items()} if isinstance(inputs, dict) else inputs
            inputs = inputs if isinstance(inputs, dict) else inputs[:examples]
            classes = classes[:examples]
        subject = each.graph if each.model is None else each.model
        found = tune.sensitivity(subject, (inputs, classes), device=device)
        if not as_json:
            say(console, (each.name, "bold"))
        # A program may read it: nothing is wrapped or styled.
        console.print(found.as_json() if as_json else found.text(min(columns(), 100)), soft_wrap=True)
        if picture is not None:
            say(console, "Written: ", (str(found.picture(picture)), "bold"), whole=True)
        if search is None:
            continue
        better = tune.search(each.model, (inputs, classes), device=device, budget=budget, seed=seed)
        console.print(better.as_json() if as_json else f"\n{better.text()}", soft_wrap=True)
        write_tflite(better.graph, search)
        say(console, "Written: ", (str(search), "bold"), whole=True)
