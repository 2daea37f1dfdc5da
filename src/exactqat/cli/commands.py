# SPDX-License-Identifier: Apache-2.0
"""The commands: the options of each, and what it does.

Heavy libraries are imported inside, so that `exactqat --help` responds at once.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Sequence
from dataclasses import Field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..application.job.settings import declared, pairs, rules_in
from ..application.report.text import option_of, option_value, shell_word
from .options import Answer, AsJson, Directory, Model, command, path_in
from .terminal import (
    Cell,
    TableRow,
    bars_on,
    columns,
    console_of,
    duration,
    line_of,
    native_messages_kept_back,
    say,
    show_table,
    skip,
    status_on,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ..application.job.restored import Verified
    from ..application.report.results import History, Results


def with_settings(function: Answer) -> Answer:
    """The command with an option for each setting in place of its ``**settings``, after its required options."""

    def option(setting: Field[Any]) -> Any:
        about = setting.metadata

        def parsed(text: str) -> Any:
            try:
                return about["check"](rules_in(text) if setting.name == "rules" else text)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from error

        names = about["names"] or (option_of(setting.name),)
        if isinstance(setting.default, bool):
            return Annotated[bool, typer.Option(*names, help=about["help"], rich_help_panel=about["group"])]
        return Annotated[
            Any,
            typer.Option(
                *names, parser=parsed, metavar=about["metavar"] or setting.name.upper(), help=about["help"],
                rich_help_panel=about["group"],
            ),
        ]  # fmt: skip

    def default(setting: Field[Any]) -> Any:
        """As a user would write it: the option parses it."""
        return setting.default if isinstance(setting.default, bool | None) else option_value(setting.default)

    signature = inspect.signature(function, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    settings = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default(each), annotation=option(each))
        for each in declared()
    ]
    first = [each for each in own if each.default is each.empty]
    parameters = [each.replace(kind=each.KEYWORD_ONLY) for each in (*first, *settings, *own[len(first) :])]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {each.name: each.annotation for each in parameters}
    return function


@command("Train, quantize, deploy and verify a network.", takes_more=True)
@with_settings
def train(
    context: typer.Context,
    out: Annotated[
        Path,
        typer.Option(
            parser=path_in,
            metavar="DIR",
            help="Folder for checkpoints, .tflite files, metrics.json and report.html.",
        ),
    ],
    accelerator: Annotated[str, typer.Option(help="Where to train: cpu, or cuda (needs a GPU).")] = "cpu",
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the job in DIR, or start it if there is none. The bits stay the same."),
    ] = False,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Rename DIR with an existing job to DIR.1 or the next free number."),
    ] = False,
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going", help="Quantize a float network that is no better than guessing, instead of stopping."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only print the table and the closing sentence.")] = False,
    **settings: Any,
) -> bool:
    """Train in float, quantize to several bit widths (W8A8, W4A4 and W3A4), deploy, compare **every integer** with
    the device runtime.

    For each precision: post-training quantization as a baseline, then quantization-aware training with EMA ranges
    and with learned ranges. The better one is delivered as checkpoint.pt and model.tflite in DIR/w8a8/ and so on;
    DIR/report.html is the report. Under torchrun, all processes work together. An existing job in DIR is never
    replaced. Exit status 1 if any integer differs, between the file and its simulation or between the device and
    training; 2 if anything else goes wrong.
    """
    given = {
        name: value
        for name, value in settings.items()
        if getattr(context.get_parameter_source(name), "name", "") not in ("DEFAULT", "DEFAULT_MAP")
    }
    if context.args:
        # As a list without commas is written: --bits 8x8 4x4.
        if "bits" not in given or not all(re.fullmatch(r"[0-9]+x[0-9]+", word) for word in context.args):
            raise typer.BadParameter(f"unexpected: {' '.join(context.args)}")
        given["bits"] = pairs([*given["bits"], *context.args])

    import torch

    from ..application.job import figures, files, pipeline, processes, recipes, store, training
    from ..application.job.progress import Progress
    from ..application.job.settings import Settings
    from ..application.report import findings

    if resume and restart:
        raise ValueError("--resume and --restart cannot be combined")
    # The networks are small: a second thread costs more than it saves, and one thread gives the same bits everywhere.
    torch.set_num_threads(1)
    place = training.accelerator_named(accelerator)
    for name in ("data", "weights"):
        # Other commands, in other directories, will look for it.
        if given.get(name) and Path(given[name]).exists():
            given[name] = str(Path(given[name]).resolve())
    chosen = Settings(out, **recipes.chosen(given))
    # Again once the directory is locked; this avoids reading the data.
    store.check_free(out, resume, restart)
    files.check_writable(out)
    if resume and (out / "job.json").exists():
        # What is not given stays as it was; what is given is compared.
        chosen = replace(store.stored_settings(out, given.get("model")), **given)
    # Before all images are read; again when the job begins.
    pipeline.check_before_data(chosen, resume)
    with processes.joined(place) as (together, place), contextlib.ExitStack() as hold:
        console = console_of(quiet=not together.writes)
        if not quiet:
            several = f", {together.count} processes" if together.count > 1 else ""
            say(
                console, ("exactqat train", "bold"), " on ", (chosen.data, "bold"), f", seed {chosen.seed}, for ",
                (chosen.device, "bold"), ", results in ", (str(out), "bold"), several,
            )  # fmt: skip
            for sentence in chosen.training_sentences():
                say(console, sentence)
        dataset = pipeline.load_for(chosen)
        _print_skipped(console_of(stderr=True, quiet=not together.writes), dataset.skipped, chosen.noun)
        with bars_on(console, disable=quiet or not together.writes) as bars, native_messages_kept_back():
            task = bars.add_task("float training", total=pipeline.total_steps(chosen, dataset), figures="", epoch="")
            progress = Progress(
                begin=lambda text: bars.update(task, description=text, figures="", epoch=""),
                advance=lambda steps: bars.advance(task, steps),
                skip=lambda steps: skip(bars, task, steps),
                epoch=lambda name, history, epochs: show_epoch(name, history, epochs),
                say=lambda sentence: say(console, sentence),
            )

            def show_epoch(name: str, history: History, epochs: int) -> None:
                loss, right, done = history.loss[-1], history.validation_accuracy[-1], len(history.loss)
                bars.update(task, figures=f"loss {loss:.3g}, {right:.1%} right", epoch=f"epoch {done}/{epochs}")
                if not quiet and (bars.disable or done == epochs):
                    frozen = history.frozen_from is not None and done > history.frozen_from
                    say(
                        console,
                        f"{name}: epoch {done}/{epochs}, loss {loss:.4g}, {right:.1%} of the validation {chosen.noun}s "
                        f"right{', frozen' if frozen else ''}",
                    )

            results = pipeline.run(chosen, progress, dataset, together, resume, restart, place, hold, keep_going)
            if not together.writes:
                return True
            # Before anything is drawn or printed, which can fail.
            figures.write_metrics(results)
            progress.begin("report")
            failure = None
            try:
                figures.write_report(results)
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not cost the results
                failure = error
        _print_results(console, results)
        if failure is not None:
            raise RuntimeError(
                f"{out / 'report.html'} could not be written ({type(failure).__name__}: {failure}). All results are in "
                f"{out / 'metrics.json'}; run `exactqat report {shell_word(out)}` to try again"
            ) from failure
        if not quiet:
            say(console, "\nReport with pictures: ", (str(out / "report.html"), "bold"), whole=True)
            say(console, "To compare again at any time: ", (f"exactqat verify {shell_word(out)}", "bold"), whole=True)
    return results.equal and all(passes for passes, _ in findings.passing(results))


def _print_skipped(console: Console, skipped: Sequence[str], noun: str = "image") -> None:
    shown = 20
    for sentence in skipped[:shown]:
        say(console, f"skipped {sentence}")
    if len(skipped) > shown:
        say(console, f"… and {len(skipped) - shown:,} more, all listed in metrics.json")
    if skipped:
        say(console, (f"{noun}s that could not be used: {len(skipped):,}", "bold"))


def _print_results(console: Console, results: Results) -> None:
    from ..application.report import findings

    rows: list[TableRow] = []
    for row in findings.rows(results):
        cells: list[Cell] = [
            row.title,
            row.method.removesuffix(" ranges") + (" ★" if row.delivered else ""),
            f"{row.accuracy:.1%}",
            "–" if row.paired is None else row.paired.in_short(),
            "–" if row.differing is None else _colored(row.differing),
            "–" if row.training_differing is None else _colored(row.training_differing),
        ]
        rows.append((cells, "bold" if row.delivered else ""))
    device, tests, noun = results.settings.device, len(results.dataset.test), results.dataset.noun
    title = f"{results.dataset.name}: accuracy on {tests} test {noun}s on {device}, and how many integers differ"
    header = ("network", "method", "accuracy", "to float", "runtime", "training")
    show_table(console, title, header, rows, texts=2, grouped=True)
    explained = (
        "PTQ: post-training quantization. QAT: quantization-aware training. The second part names the source of the "
        "ranges. "
        f"★ delivered (lowest validation loss). To float: difference in points on the same test {noun}s, and the "
        "probability p that equally good networks differ this much (McNemar's exact test). Runtime: integers in which "
        "the file differs from its simulation; training: integers in which the device differs from what was trained. "
        "Input and logits keep 8 bits unless rules say otherwise; codes of fewer bits are stored in 8-bit containers. "
        f"The job took {duration(results.seconds)}{f', in {results.runs} runs' if results.runs > 1 else ''}."
    )
    say(console, (explained, "dim"))
    if len(results.settings.precisions) > 1:
        widths: list[TableRow] = [(row, "") for row in findings.width_rows(results)]
        show_table(console, "What fewer bits cost and save", findings.WIDTHS_HEADER, widths, texts=1)
        say(console, (findings.WIDTHS_NOTE, "dim"))
    _print_warnings(console, results)
    for good, sentence in findings.closing_sentences(results):
        say(console, _verdict(sentence, good))
    if sentence := findings.recommendation(results):
        say(console, (sentence, "bold"))


def _print_warnings(console: Console, results: Results) -> None:
    from ..application.report import findings

    for sentence in findings.warnings_on(results):
        say(console, ("warning: ", "bold yellow"), sentence)


def _colored(differing: int) -> tuple[str, str]:
    return f"{differing:,}", "red" if differing else "green"


def _verdict(sentence: str, good: bool) -> tuple[str, str]:
    return sentence, "bold green" if good else "bold red"


@command("Write DIR/report.html again, without training.")
def report(directory: Directory, model: Model = None) -> None:
    """Write DIR/report.html again: reload, evaluate and compare the networks in DIR without training."""
    import torch

    from ..application.job import figures, pipeline
    from ..application.job.progress import Progress
    from ..application.report import findings

    torch.set_num_threads(1)
    console = console_of()
    with contextlib.ExitStack() as hold, native_messages_kept_back(), status_on(console, "reading") as status:
        progress = Progress(begin=lambda text: status.update(line_of(text)))
        results = pipeline.finished(directory, progress, model=model, hold=hold)
        figures.write_metrics(results)
        path = figures.write_report(results)
    _print_warnings(console, results)
    for _, sentence in findings.closing_sentences(results):
        say(console, sentence)
    say(console, "Written: ", (str(path), "bold"))


@command("Write the files of DIR again: .tflite, .onnx, C headers.")
def export(
    directory: Directory,
    model: Model = None,
    c_array: Annotated[
        bool,
        typer.Option(
            "--c-array", help="Also write a C header for a board or a phone, named like its contents (--name)."
        ),
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Prefix of the header's file name and of every name in it, followed by the precision; by default the "
            "job's name. Two networks in one firmware need two names.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="The device whose answer to one example the header holds: micro, by default, for a board; "
            "xnnpack-arm64 for a phone.",
        ),
    ] = None,
) -> None:
    """Write model.tflite, and model.onnx if the package onnx is installed, from DIR's checkpoints. Needs no data."""
    from ..application.job import restored

    for option, value in (("--name", name), ("--device", device)):
        if value is not None and not c_array:
            raise ValueError(f"{option} is for the C header: add --c-array")
    console = console_of()
    with native_messages_kept_back():
        paths = restored.export_directory(directory, model, c_array, name, device or "micro")
    _warn_of_unfinished(directory)
    for path in paths:
        say(console, "Written: ", (str(path), "bold"), f" ({path.stat().st_size:,} bytes)")
    if not any(path.suffix == ".onnx" for path in paths):
        say(console, "To write .onnx files as well: pip install 'exactqat[onnx]'")


def _warn_of_unfinished(directory: Path) -> None:
    """On stderr, as stdout is for the results that exist."""
    from ..application.job import store

    if sentence := store.unfinished(directory):
        say(console_of(stderr=True), ("warning: ", "bold yellow"), f"{sentence}. These are its networks so far.")


@command("Compare DIR's files with the device again.")
def verify(
    directory: Directory,
    model: Model = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Device to compare with: xnnpack-x86, xnnpack-arm64 (emulated on other machines), reference (LiteRT's "
            "reference kernels), micro (TFLite-Micro); by default the device the job was trained for."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only print the closing sentence.")] = False,
) -> bool:
    """Run DIR's files on the device runtime again, and compare **every integer** with the checkpoints' simulation,
    and the device with what was trained.

    Exit status 1 if any integer differs, in either comparison; 2 if anything else goes wrong.
    """
    import torch

    from ..application.job import devices, restored
    from ..application.job.progress import Progress

    named = "" if device is None else devices.device_named(device)
    console = console_of()
    torch.set_num_threads(1)
    with native_messages_kept_back(), bars_on(console, disable=quiet) as bars:
        task = bars.add_task("comparing", total=None, figures="", epoch="")
        progress = Progress(
            begin=lambda text: bars.reset(task, description=text, total=None),
            compared=lambda done, all: bars.update(task, completed=done, total=all),
        )
        networks = restored.verify_directory(directory, progress, model=model, device=named)
    for precision, verified in networks.items():
        if not quiet:
            _print_comparison(console, directory, precision, verified)
        report = verified.report
        ran, computes, trained = report.sentences()
        for sentence, good in (
            (ran, report.values > 0 and not report.differing + report.predictions_differing),
            (f"{computes}; {verified.beside.accuracies()}", not report.training_differing),
            (trained, report.trained_for == report.profile),
        ):
            say(console, f"{precision.upper()}: ", _verdict(f"{sentence}.", good))
    _warn_of_unfinished(directory)
    profile = next(iter(networks.values())).report.profile
    if any(verified.report.training_differing for verified in networks.values()):
        out, weights = directory.with_name(f"{directory.resolve().name}-{profile}"), directory / "float/checkpoint.pt"
        say(console, f"{profile} does not compute what was trained. Quantize the float network for it:")
        command = (
            f"exactqat train --weights {shell_word(weights)} --epochs-float 0 --device {profile} --out "
            f"{shell_word(out)}{'' if model is None else f' --model {shell_word(model)}'}"
        )
        say(console, (f"  {command}", "bold"), whole=True)
    equal = not any(verified.differing for verified in networks.values())
    not_run = [verified.not_run for verified in networks.values() if verified.not_run]
    if not_run and equal:
        raise RuntimeError(f"the files were not run: {not_run[0]}")
    return equal


def _print_comparison(console: Console, directory: Path, precision: str, verified: Verified) -> None:
    """Tensor by tensor."""
    report = verified.report
    trained = {row.name: row for row in report.training}
    rows: list[TableRow] = []
    for position, row in enumerate(report.table()):
        beside = trained.get(str(row["tensor"])) if position < len(report.operators) else None
        cells: list[Cell] = [
            str(row["tensor"]),
            str(row["operator"]),
            f"{row['values']:,}",
            _colored(int(row["differing"] or 0)),
            "–" if beside is None else _colored(beside.differing),
        ]
        rows.append((cells, ""))
    title = (
        f"{precision.upper()}: {directory / precision / 'model.tflite'}, trained for {report.trained_for}, "
        f"compared with {report.profile}"
    )
    header = ("tensor", "operator", "values", "not as simulated", "not as trained")
    if report.operators:
        show_table(console, title, header, rows, texts=2)


@command("Say what is in a quantized file and where devices differ.", "inspect")
def inspect_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A quantized .tflite or .onnx file, whoever wrote it.")],
    data: Annotated[
        Path | None,
        typer.Option(
            parser=path_in,
            metavar="X.npz",
            help="Inputs by name, each with the batch first: real numbers, or codes; by default random codes.",
        ),
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="How many examples are run, at most.")] = 8,
    device: Annotated[
        list[str] | None,
        typer.Option(help="Device to run it on; several times for several. By default all that this machine has."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random codes.")] = 0,
    as_json: AsJson = False,
    float_file: Annotated[
        Path | None,
        typer.Option(
            "--float",
            metavar="FLOAT",
            help="The float network it was made of (.tflite or .onnx): signal to noise, layer by layer.",
        ),
    ] = None,
    reduced: Annotated[
        Path | None,
        typer.Option(
            "--reduce",
            metavar="OUT",
            help="Write the smallest graph and input that still show a difference: OUT.tflite and OUT.npz.",
        ),
    ] = None,
) -> bool:
    """Say what is in a quantized .tflite or .onnx file, run it on every runtime of this machine beside the
    simulation, and say which devices compute different codes, from which layer on.

    Exit status 1 if an integer differs where equality is claimed; 2 if the file cannot be read, with every reason,
    or if nothing could be compared.
    """
    from ..application.job import files
    from ..deploy.inspect import inspect as inspect_file
    from ..deploy.reduce import reduce

    if reduced is not None:
        files.check_writable(reduced)
    console, errors = console_of(), console_of(stderr=True)
    for option, given in (("--float", float_file), ("--reduce", reduced)):
        if file.suffix.lower() == ".onnx" and given is not None:
            raise ValueError(f"{option} is for .tflite files, and {file} is an .onnx file")
    with status_on(errors, "reading") as status:
        found = inspect_file(file, data, examples, device or None, seed, progress=status.update, float_file=float_file)
    # A program may read it: nothing is wrapped or styled.
    console.print(found.as_json() if as_json else found.text(min(columns(), 100)), soft_wrap=True)
    if reduced is not None:
        with status_on(errors, "reducing") as status:
            made = reduce(file, reduced, data, examples, device or None, seed, progress=status.update)
        said = "no device differs" if made is None else f"{made.graph}, {made.arrays}: {made.sentence}"
        errors.print(said, soft_wrap=True)
    if not found.ran_on:
        raise ValueError(f"{file} ran on no device, nothing was compared; the reasons are above")
    return found.equal


@command("Say whether a model can run on a device.")
def check(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="package.module:name of a PyTorch, Keras or Flax model, or of a function that returns one, without "
            "arguments or, as train --model takes it, of shape and classes; for JAX, of one that returns the function "
            "or module and its parameters; timm/NAME or torchvision/NAME.",
        ),
    ],
    example: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SHAPE",
            help="Shape of an input with its batch, such as 1x3x224x224; once for each input. Keras models that know "
            "their sizes need none.",
        ),
    ] = None,
    classes: Annotated[int, typer.Option(min=1, help="What a function of shape and classes is called with.")] = 10,
    device: Annotated[
        str, typer.Option(help="Device to check for: xnnpack-x86, xnnpack-arm64, reference, micro.")
    ] = "xnnpack-x86",
    keep_final_activation: Annotated[
        bool, typer.Option("--keep-final-activation", help="Keep a final softmax or sigmoid in the file.")
    ] = False,
) -> bool:
    """Say whether a model can run on a device, as which operators and how large, without training it. Runs the code
    of the module that MODEL names.

    Exit status 1 if it cannot, with every place and what to do instead; 2 if there is no such model.
    """
    import numpy as np

    for text in example or []:
        if not re.fullmatch(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8})*", text, re.ASCII):
            raise ValueError(f"--example must be a shape such as 1x3x224x224, got {text!r}")
    shapes = [tuple(map(int, text.split("x"))) for text in example or []]

    from ..application.job.models import built, is_known, network
    from ..qat.dry_run import HEADER, explain
    from ..qat.train.core.frameworks import framework_of

    shape = shapes[0][1:] if shapes else ()
    original, variables = (network(model, shape, classes), None) if is_known(model) else built(model, shape, classes)
    inputs: list[Any] = [np.zeros(shape, np.float32) for shape in shapes]
    if framework_of(original) == "torch":
        import torch

        inputs = [torch.from_numpy(array) for array in inputs]
    arguments = None if not inputs else inputs[0] if len(inputs) == 1 else tuple(inputs)
    try:
        answer = explain(
            original, arguments, variables=variables, device=device, keep_final_activation=keep_final_activation or None
        )
    except TypeError as error:
        raise ValueError(f"{error} (--example SHAPE gives an input's shape)" if not inputs else str(error)) from error
    console = console_of()
    if answer:
        show_table(console, f"{model} on {device}", HEADER, [(row, "") for row in answer.rows()], texts=3)
    for sentence in answer.sentences():
        say(console, sentence)
    return bool(answer)


# The third directory and those after it are extra arguments: help on a list of them would name Python's type.
@command("Compare finished jobs: settings and networks.", takes_more=True)
def compare(
    context: typer.Context,
    first: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a finished job.")],
    second: Annotated[Path, typer.Argument(metavar="DIR...", help="One or more jobs to compare it with.")],
) -> None:
    """Compare finished jobs: the settings that differ, and their delivered networks. Only reads metrics.json and
    job.json, no data or networks."""
    from ..application.job import figures
    from ..application.report import comparison

    console = console_of()
    jobs = [figures.read(directory) for directory in (first, second, *map(Path, context.args))]
    changed: list[TableRow] = [(row, "") for row in comparison.differing_settings(jobs)]
    if changed:
        header = ["setting", *(job.name for job in jobs)]
        show_table(console, "Settings that differ", header, changed, texts=1)
    else:
        say(console, "The jobs have the same settings.")
    networks: list[TableRow] = [(row, "") for row in comparison.rows(jobs)]
    show_table(console, "Delivered networks, on the device", comparison.HEADER, networks, texts=2, grouped=True)
    for sentence in comparison.sentences(jobs):
        say(console, f"{sentence}.")
