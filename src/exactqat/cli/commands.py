# SPDX-License-Identifier: Apache-2.0
"""The commands: the options of each, and what it does.

Heavy libraries are imported inside, so that `exactqat --help` responds at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..kit.display import shell_word
from .options import AsJson, Directory, Model, command, metavar
from .terminal import bars_on, columns, console_of, native_messages_kept_back, say, show_table, status_on

if TYPE_CHECKING:
    from rich.console import Console

    from ..application.job.results import Dataset, History, Results
    from ..application.job.settings import Settings

# How many of the images that could not be used are named.
SHOWN = 20


@command("Train, quantize, deploy and verify a network.", takes_more=True)
def train(
    context: typer.Context,
    out: Annotated[Path, metavar("DIR")],
    accelerator: str = "cpu",
    resume: bool = False,
    restart: bool = False,
    keep_going: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> bool:
    """Train in float, quantize to several bit widths (W8A8, W4A4 and W3A4), deploy, compare every integer with
    the device runtime.

    For each precision: post-training quantization with two kinds of ranges, then quantization-aware training with EMA
    ranges and with learned ranges. The best one is delivered as checkpoint.pt and model.tflite in DIR/w8a8/ and so
    on; DIR/report.html is the report. Under torchrun, all processes work together. An existing job in DIR is never
    replaced. Exit status 1 if any integer differs, between the file and its simulation or between the device and
    training, or if a --recipe's mark is missed; 2 if anything else goes wrong.

    Args:
        out: Folder for checkpoints, .tflite files, metrics.json and report.html.
        accelerator: Where to train: cpu, or cuda (needs a GPU).
        resume: Continue the job in DIR, or start it if there is none. The bits stay the same.
        restart: Rename DIR with an existing job to DIR.1 or the next free number.
        keep_going: Quantize a float network that is no better than guessing, instead of stopping.
        quiet: Only print the table and the closing sentence.
    """
    options = {
        name: value
        for name, value in settings.items()
        if getattr(context.get_parameter_source(name), "name", "") not in ("DEFAULT", "DEFAULT_MAP")
    }
    if context.args:
        # As a list without commas is written: --bits 8x8 4x4.
        if "bits" not in options or not all(re.fullmatch(r"[0-9]+x[0-9]+", word) for word in context.args):
            raise typer.BadParameter(f"unexpected: {' '.join(context.args)}")
        options["bits"] = [*options["bits"], *context.args]

    from ..application.job import recipes, store
    from ..application.job.settings import Settings

    if resume and restart:
        raise ValueError("--resume and --restart cannot be combined")
    for name in ("data", "weights"):
        # Other commands, in other directories, will look for it.
        if options.get(name) and Path(options[name]).exists():
            options[name] = str(Path(options[name]).resolve())
    chosen = Settings(out, **recipes.chosen(options))
    if resume and (out / "job.json").exists():
        # What is not given stays as it was; what is given is compared.
        chosen = replace(store.stored_settings(out, options.get("model")), **options)
    return _work(chosen, resume, restart, accelerator, keep_going, quiet)


def _work(
    chosen: Settings, resume: bool, restart: bool = False, accelerator: str = "cpu", keep_going: bool = False,
    quiet: bool = True,
) -> bool:  # fmt: skip
    """A job, from its data to the report; whether what was compared is equal, and passes."""
    import torch

    from ..application.job import files, pipeline, processes, training
    from ..application.job.results import Progress
    from ..application.report import findings, metrics

    # The networks are small: a second thread costs more than it saves, and one thread gives the same bits everywhere.
    torch.set_num_threads(1)
    out = chosen.out
    with processes.joined(training.accelerator_named(accelerator)) as (together, place):
        console = console_of(quiet=not together.writes)
        with bars_on(console, disable=quiet or not together.writes) as bars, native_messages_kept_back():
            task = bars.add_task("reading", total=None, figures="", epoch="")

            def read(dataset: Dataset) -> None:
                if not quiet:
                    several = f", {together.count} processes" if together.count > 1 else ""
                    say(
                        console, ("exactqat train", "bold"), " on ", (chosen.data, "bold"),
                        f", seed {chosen.seed}, for ", (chosen.device, "bold"),
                        ", results in ", (str(out), "bold"), several,
                    )  # fmt: skip
                    if chosen.options():
                        say(console, f"Options that are not the defaults:{chosen.options()}")
                _print_skipped(console_of(stderr=True, quiet=not together.writes), dataset.skipped, chosen.noun)

            def epoch(name: str, history: History, epochs: int) -> None:
                loss, right, done = history.loss[-1], history.validation_accuracy[-1], len(history.loss)
                bars.update(task, figures=f"loss {loss:.3g}, {right:.1%} right", epoch=f"epoch {done}/{epochs}")
                if not quiet and (bars.disable or done == epochs):
                    frozen = history.frozen_from is not None and done > history.frozen_from
                    say(
                        console,
                        f"{name}: epoch {done}/{epochs}, loss {loss:.4g}, {right:.1%} of the validation {chosen.noun}s "
                        f"right{', frozen' if frozen else ''}",
                    )

            progress = Progress(
                total=lambda steps: bars.reset(task, total=steps),
                compared=lambda done, all: bars.update(task, completed=done, total=all),
                begin=lambda text: bars.update(task, description=text, figures="", epoch=""),
                advance=lambda steps: bars.advance(task, steps),
                skip=lambda steps: bars.update(task, total=(bars.tasks[0].total or 0) - steps),
                epoch=epoch,
                say=lambda sentence: say(console, sentence),
                read=read,
            )
            finish = metrics.write_metrics
            results = pipeline.run(chosen, progress, None, together, resume, restart, place, keep_going, finish)
        if not together.writes:
            return True
        try:
            with files.locked(out):
                metrics.write_report(results)
        except Exception as error:
            raise RuntimeError(
                f"{out / 'report.html'} could not be written ({type(error).__name__}: {error}). All results are in "
                f"{out / 'metrics.json'}; run `exactqat report {shell_word(out)}` to try again"
            ) from error
        finally:
            _print_results(console, results)
        if not quiet:
            say(console, "\nReport with pictures: ", (str(out / "report.html"), "bold"), whole=True)
            say(console, "To compare again at any time: ", (chosen.commands()[1], "bold"), whole=True)
    return results.equal and all(passes for passes, _ in findings.passing(results))


def _print_skipped(console: Console, skipped: Sequence[str], noun: str = "image") -> None:
    for sentence in skipped[:SHOWN]:
        say(console, f"skipped {sentence}")
    if len(skipped) > SHOWN:
        say(console, f"… and {len(skipped) - SHOWN:,} more, all listed in metrics.json")
    if skipped:
        say(console, (f"{noun}s that could not be used: {len(skipped):,}", "bold"))


def _print_results(console: Console, results: Results) -> None:
    from ..application.report import findings, job_page

    table = job_page.result_table(results)
    table.header = ("network", "method", "accuracy", "to float", "runtime", "training")  # for narrow terminals
    show_table(console, table)
    explained = (
        "PTQ: post-training quantization. QAT: quantization-aware training. Then the source of the ranges. "
        f"★ delivered (lowest validation loss). {findings.LUCK_NOTE} Runtime: integers in which the file differs from "
        "its simulation; training: integers in which the device differs from what was trained. "
        f"The job took {timedelta(seconds=round(results.seconds))} in {results.runs} run{'s' * (results.runs > 1)}."
    )
    say(console, (explained, "dim"))
    if len(results.settings.precisions) > 1:
        show_table(console, job_page.width_table(results))
        say(console, (findings.WIDTHS_NOTE, "dim"))
    for sentence in findings.warnings_on(results):
        say(console, ("warning: ", "bold yellow"), sentence)
    for good, sentence in findings.closing_sentences(results):
        say(console, (sentence, "bold green" if good else "bold red"))
    if sentence := findings.recommendation(results):
        say(console, (sentence, "bold"))


@command("Write DIR/report.html again, without training.")
def report(directory: Directory, model: Model = None) -> None:
    """Write DIR/report.html again: reload, evaluate and compare the networks in DIR without training."""
    from ..application.job import files, store

    settings = store.stored_settings(directory, model)
    files.check_writable(directory, is_folder=True)
    if sentence := store.unfinished(directory):
        raise ValueError(sentence)
    _work(settings, resume=True)
    say(console_of(), "Written: ", (str(directory / "report.html"), "bold"))


@command("Write the files of DIR again: .tflite, .onnx, C headers.")
def export(
    directory: Directory,
    model: Model = None,
    c_array: bool = False,
    name: Annotated[str | None, metavar("NAME")] = None,
    device: Annotated[str | None, metavar("DEVICE")] = None,
    receipt: bool = False,
    firmware: Annotated[str | None, metavar("SYSTEM")] = None,
) -> None:
    """Write model.tflite, and model.onnx if the package onnx is installed, from DIR's checkpoints. Needs no data.

    Args:
        c_array: Also write a C header for a board or a phone, named like its contents (--name).
        name: Prefix of the headers' file names and of every name in them, followed by the precision; by default the
            job's name. Two networks in one firmware need two names.
        device: The device whose answer to one example the header holds: micro, by default, for a board; xnnpack-arm64
            for a phone. Of a receipt, by default the one that was trained for.
        receipt: Also write receipt.json and a C header with digests of what every layer must compute on the first test
            images, and a routine that names the first layer that differs on a board. Reads the job's data.
        firmware: Also write a component of a firmware, a folder with the header and a function that checks the board:
            esp-idf, zephyr or arduino.
    """
    from ..application.job import restored
    from ..deploy.formats.firmware import SYSTEMS

    if firmware is not None and firmware not in SYSTEMS:
        raise ValueError(f"--firmware must be one of {', '.join(SYSTEMS)}, got {firmware!r}")
    for option, value in (("--name", name), ("--device", device)):
        if value is not None and not (c_array or receipt or firmware):
            raise ValueError(f"{option} is for the C headers: add --c-array or --receipt")
    console = console_of()
    with native_messages_kept_back():
        paths = restored.export_directory(directory, model, c_array, name, device, receipt, firmware)
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
def verify(directory: Directory, model: Model = None, device: str | None = None, quiet: bool = False) -> bool:
    """Run DIR's files on the device runtime again, and compare every integer with the checkpoints' simulation,
    and the device with what was trained.

    Exit status 1 if any integer differs, in either comparison; 2 if anything else goes wrong.

    Args:
        device: Device to compare with: xnnpack-x86, xnnpack-arm64 (emulated on other machines), reference (LiteRT's
            reference kernels), micro (TFLite-Micro); by default the device the job was trained for.
        quiet: Show no progress.
    """
    import torch

    from ..application.job import restored
    from ..application.job.results import Progress
    from ..application.job.settings import Settings

    named, console = "" if device is None else Settings(directory, device=device).device, console_of()
    torch.set_num_threads(1)
    with native_messages_kept_back(), bars_on(console, disable=quiet) as bars:
        task = bars.add_task("comparing", total=None, figures="", epoch="")
        progress = Progress(
            begin=lambda text: bars.reset(task, description=text, total=None),
            compared=lambda done, all: bars.update(task, completed=done, total=all),
        )
        networks = restored.verify_directory(directory, progress, model=model, device=named)
    for precision, verified in networks.items():
        report = verified.report
        say(console, f"{precision.upper()}: ", (report.text(), "bold green" if report.equal else "bold red"))
        say(console, f"  {verified.accuracies()}")
    _warn_of_unfinished(directory)
    profile, not_run = report.profile, verified.not_run
    differs = any(verified.report.training_differing for verified in networks.values())
    if differs:
        out, weights = directory.with_name(f"{directory.resolve().name}-{profile}"), directory / "float/checkpoint.pt"
        say(console, f"{profile} does not compute what was trained. Quantize the float network for it:")
        command = (
            f"exactqat train --weights {shell_word(weights)} --epochs-float 0 --device {profile} --out "
            f"{shell_word(out)}{'' if model is None else f' --model {shell_word(model)}'}"
        )
        say(console, (f"  {command}", "bold"), whole=True)
    if not_run and not differs:
        raise RuntimeError(f"the files were not run: {not_run}")
    return all(verified.report.equal for verified in networks.values())


@command("Say what is in a quantized file and where devices differ.", "inspect")
def inspect_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A quantized .tflite or .onnx file, whoever wrote it.")],
    data: Annotated[Path | None, metavar("X.npz")] = None,
    examples: Annotated[int, typer.Option(min=1)] = 8,
    device: list[str] | None = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    as_json: AsJson = False,
    float_file: Annotated[Path | None, typer.Option("--float", metavar="FLOAT")] = None,
    candidates: Annotated[int | None, typer.Option(min=1)] = None,
    reduced: Annotated[Path | None, typer.Option("--reduce", metavar="OUT")] = None,
    node_data: Annotated[Path | None, metavar("OUT")] = None,
) -> bool:
    """Say what is in a quantized .tflite or .onnx file, run it on every runtime of this machine beside the
    simulation, and say which devices compute different codes, from which layer on.

    Exit status 1 if an integer differs where equality is claimed; 2 if the file cannot be read, with every reason,
    or if nothing could be compared.

    Args:
        data: Inputs by name, each with the batch first: real numbers, or codes; by default random codes.
        examples: How many examples are run, at most.
        device: Device to run it on; several times for several. By default all that this machine has.
        seed: Seed of the random codes.
        float_file: The float network it was made of (.tflite or .onnx): signal to noise, layer by layer.
        candidates: How many random examples are simulated to choose those that are run. By default 8192, or as many as
            two billion multiply-adds allow.
        reduced: Write the smallest graph and input that still show a difference: OUT.tflite and OUT.npz.
        node_data: Write what was found for Model Explorer, which shows it in the network's picture: OUT-devices.json,
            OUT-runtimes.json and, with --float, OUT-decibels.json.
    """
    from ..application.job import files
    from ..deploy.inspect import SECONDS, inspect, refused_as_json
    from ..deploy.node_data import write_node_data
    from ..deploy.reduce import reduce
    from ..kit.device import Refusal

    outs = [None if reduced is None else reduced.with_name(f"{reduced.name}.tflite"), node_data]
    for out in filter(None, outs):
        files.check_writable(out)
    console, errors = console_of(), console_of(stderr=True)
    for option, path in (("--float", float_file), ("--reduce", reduced)):
        if file.suffix.lower() == ".onnx" and path is not None:
            raise ValueError(f"{option} is for .tflite files, and {file} is an .onnx file")
    with status_on(errors, "reading") as status:
        try:
            inspection = inspect(
                file, data, examples, device or None, seed, SECONDS, status.update, float_file, candidates=candidates
            )
        except Refusal as refusal:
            if as_json:
                console.print(refused_as_json(file, refusal), soft_wrap=True)
            raise
    # A program may read it: nothing is wrapped or styled.
    console.print(inspection.as_json() if as_json else inspection.text(min(columns(), 100)), soft_wrap=True)
    for written in [] if node_data is None else write_node_data(inspection, node_data):
        say(errors, "Written: ", (str(written), "bold"), whole=True)
    if reduced is not None:
        with status_on(errors, "reducing") as status:
            outcome = reduce(file, reduced, data, examples, device or None, seed, progress=status.update)
        said = "no device differs" if outcome is None else f"{outcome.graph}, {outcome.arrays}: {outcome.sentence}"
        errors.print(said, soft_wrap=True)
    if not inspection.ran_on:
        raise ValueError(f"{file}: nothing was compared; the reasons are above")
    return inspection.equal


@command("Make a .tflite file in uint8 one in int8.")
def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .tflite file in uint8, as TensorFlow 1 wrote it.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The .tflite file in int8 that is written.")],
    data: Annotated[Path | None, metavar("X.npz")] = None,
    examples: Annotated[int, typer.Option(min=1)] = 16,
    device: str = "xnnpack",
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> bool:
    """Make a .tflite file in uint8, as TensorFlow 1 wrote it, one in int8. Says which weights are requantized, as int8
    kernels take none with a zero point, and which results change; then runs the new file beside its simulation.

    Exit status 1 if an integer of the new file differs from its simulation; 2 if the file cannot be converted.

    Args:
        data: Inputs by name, each with the batch first: real numbers, or codes; by default random codes.
        examples: How many examples are compared, at most.
        device: Device by whose arithmetic both are compared, and whose runtime runs the new file.
        seed: Seed of the random codes.
    """
    from ..application.job import files
    from ..deploy.convert import convert as converted
    from ..deploy.formats.tflite import write_tflite
    from ..deploy.inspect import SECONDS, codes_of, read_file
    from ..deploy.random_inputs import random_codes
    from ..deploy.runtimes import profile_here
    from ..deploy.verify import verify as verified

    files.check_writable(out)
    console, profile = console_of(), profile_here(device)
    with status_on(console_of(stderr=True), "reading") as status:
        subject = read_file(file)
        if data is None:
            codes = random_codes(subject.graph, range(examples), seed)
        else:
            codes, _ = codes_of(subject, data, examples, seed, SECONDS)
        status.update("comparing")
        conversion = converted(subject.graph, codes, profile)
        write_tflite(conversion.graph, out, f"converted from uint8: {file.name}")
        with native_messages_kept_back():
            report = verified(conversion.graph, out, codes, profile)
    say(console, conversion.text(), whole=True)
    say(console, (f"{report.sentences()[0]}.", "bold green" if report else "bold red"))
    say(console, "Written: ", (str(out), "bold"), f" ({out.stat().st_size:,} bytes); its codes are 128 below {file}'s")
    return bool(report)


@command("Find a device's arithmetic from outside.")
def identify(
    runner: Annotated[str, metavar("COMMAND")],
    out: Annotated[Path, metavar("DEVICE.json")],
    onnx: bool = False,
    operator: list[str] | None = None,
    codes: Annotated[int, typer.Option(min=1)] = 100_000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    seconds: Annotated[float, typer.Option(min=0)] = 120.0,
) -> bool:
    """Find what a device computes, operator by operator, given only a command that runs a file on it, and write it as
    a file that other commands take where they take a device's name: --device DEVICE.json.

    Exit status 1 if the arithmetic of an operator stays unexplained, with codes that show it; 2 if anything goes wrong.

    Args:
        runner: Command that takes three paths after its own words: a .tflite file, an .npz of its inputs' codes by
            name, with a batch of 1, and the .npz to write with its outputs' codes. If it fails, the device rejects the
            file.
        out: Where to write the device; its name is that of the file.
        onnx: The command runs .onnx files, whose inputs and outputs are real numbers.
        operator: Name of an operator, such as CONV_2D or CONV_2D:int16; several times for several. By default all.
        codes: How many codes of each operator are compared at least.
        seed: Seed of the graphs and codes.
        seconds: Time limit for the command.
    """
    from ..application.job import files
    from ..deploy.identify import CommandRunner, identify

    files.check_writable(out)
    console, file = console_of(), ".onnx" if onnx else ".tflite"
    with status_on(console_of(stderr=True), "asking") as status:
        run = CommandRunner(runner, file, seconds)
        identification = identify(run, out.stem, file, operator or None, codes, seed, status.update)
    if not any(row.hypothesis is not None for row in identification.operators):
        raise ValueError(f"the command ran none of the files: {identification.operators[0].reason}")
    console.print(str(identification), soft_wrap=True, markup=False)
    say(console, "Written: ", (str(identification.write(out)), "bold"))
    return bool(identification)


@command("Say whether a model can run on a device.")
def check(
    model: Annotated[str, typer.Argument(metavar="MODEL")],
    example: Annotated[list[str] | None, metavar("SHAPE")] = None,
    classes: Annotated[int, typer.Option(min=1)] = 10,
    device: str = "xnnpack-x86",
    keep_final_activation: bool = False,
) -> bool:
    """Say whether a model can run on a device, as which operators and how large, without training it. Runs the code
    of the module that MODEL names.

    Exit status 1 if it cannot, with every place and what to do instead; 2 if there is no such model.

    Args:
        model: package.module:name of a PyTorch, Keras or Flax model, or of a function that returns one, without
            arguments or, as train --model takes it, of shape and classes; for JAX, of one that returns the function or
            module and its parameters; timm/NAME or torchvision/NAME; a .keras or .h5 file.
        example: Shape of an input with its batch, such as 1x3x224x224; once for each input. Keras models that know
            their sizes need none.
        classes: What a function of shape and classes is called with.
        device: Device to check for: xnnpack-x86, xnnpack-arm64, reference, micro.
        keep_final_activation: Keep a final softmax or sigmoid in the file.
    """
    import numpy as np

    for text in example or []:
        if not re.fullmatch(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8})*", text, re.ASCII):
            raise ValueError(f"--example must be a shape such as 1x3x224x224, got {text!r}")
    shapes = [tuple(map(int, text.split("x"))) for text in example or []]

    from ..application.job.models import built
    from ..application.report.page import Table
    from ..qat.dry_run import HEADER, explain
    from ..qat.train.core.frameworks import framework_of

    shape = shapes[0][1:] if shapes else ()
    original, variables = built(model, shape, classes)
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
        table = Table(f"{model} on {device}", HEADER, 3)
        for row in answer.rows():
            table.add(*row)
        show_table(console, table)
    for sentence in answer.sentences():
        say(console, sentence)
    return bool(answer)


@command("Compare finished jobs: settings and networks.")
def compare(
    directory: Directory,
    others: Annotated[list[Path], typer.Argument(metavar="DIR", help="One or more jobs to compare it with.")],
) -> None:
    """Compare finished jobs: the settings that differ, and their delivered networks. Only reads metrics.json and
    job.json, no data or networks."""
    from ..application.report import comparison, luck

    console = console_of()
    show_table(console, comparison.table([directory, *others]))
    say(console, f"To the first: {luck.NOTE}")
