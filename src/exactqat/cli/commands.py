# SPDX-License-Identifier: Apache-2.0
"""What each command does. Heavy libraries are imported inside, so that `exactqat --help` responds at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .terminal import (
    Cell,
    Phases,
    TableRow,
    bars_on,
    columns,
    console_of,
    counted,
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


def train(
    out: Path,
    given: dict[str, Any],
    resume: bool,
    restart: bool,
    quiet: bool,
    accelerator: str = "cpu",
    keep_going: bool = False,
    tensorboard: bool = False,
) -> bool:
    """Trains, and returns whether all integers are equal and every network passes what its recipe requires."""
    import torch

    from ..application.job import devices, figures, files, logs, pipeline, processes, recipes, store, training
    from ..application.job.progress import Progress
    from ..application.job.settings import Settings
    from ..application.report import findings
    from ..application.report.text import shell_word

    if resume and restart:
        raise ValueError("--resume and --restart cannot be combined")
    # The networks are small: a second thread costs more than it saves, and one thread gives the same bits everywhere.
    torch.set_num_threads(1)
    place = training.accelerator_named(accelerator)
    if "device" in given:
        devices.device_named(given["device"])
    if given.get("data") and Path(given["data"]).exists():
        # Other commands, in other directories, will look for it.
        given["data"] = str(Path(given["data"]).resolve())
    if "weights" in given:
        given["weights"] = str(Path(given["weights"]).resolve())
    if "from_job" in given:
        given["from_job"] = str(Path(given["from_job"]).resolve())
    again = resume and (out / "job.json").exists()
    if "from_job" in given and not again:
        settings = store.settings_from(Path(given["from_job"]), out, given)
    else:
        settings = Settings(out, **recipes.chosen(given))
    if tensorboard:
        logs.check_tensorboard()
    # Again once the directory is locked; this avoids reading the data.
    store.check_free(out, resume, restart)
    files.check_writable(out)
    if again:
        # What is not given stays as it was; what is given is compared.
        settings = replace(store.stored_settings(out, given.get("model")), **given)
    # Before all images are read; again when the job begins.
    pipeline.check_before_data(settings, resume)
    with processes.joined(place) as (together, place), contextlib.ExitStack() as hold:
        console = console_of(quiet=not together.writes)
        errors = console_of(stderr=True, quiet=not together.writes)
        if not quiet:
            say(
                console,
                ("exactqat train", "bold"), " on ", (settings.data, "bold"), f", seed {settings.seed}, for ",
                (settings.device, "bold"), ", results in ", (str(out), "bold"),
                f", {together.count} processes" if together.count > 1 else "",
            )  # fmt: skip
            for sentence in settings.training_sentences():
                say(console, sentence)
        dataset = pipeline.load_for(settings)
        _print_skipped(errors, dataset.skipped, settings.noun)
        with bars_on(console, disable=quiet or not together.writes) as bars, native_messages_kept_back():
            task = bars.add_task("float training", total=pipeline.total_steps(settings, dataset), figures="", epoch="")
            phases = Phases(lambda sentence: None if quiet else say(console, sentence))

            def begin(text: str) -> None:
                phases.begin(text)
                bars.update(task, description=text, figures="", epoch="")

            def epoch(name: str, history: History, epochs: int) -> None:
                loss, right, done = history.loss[-1], history.validation_accuracy[-1], len(history.loss)
                bars.update(task, figures=f"loss {loss:.3g}, {right:.1%} right", epoch=f"epoch {done}/{epochs}")
                sentence = f"loss {loss:.4g}, {right:.1%} of the validation {settings.noun}s right"
                phases.figures = f"{counted(done, 'epoch')}, {sentence}, "
                if bars.disable and not quiet:
                    frozen = history.frozen_from is not None and done > history.frozen_from
                    say(console, f"{name}: epoch {done}/{epochs}, {sentence}{', frozen' if frozen else ''}")

            progress = Progress(
                begin=begin,
                advance=lambda steps: bars.advance(task, steps),
                skip=lambda steps: skip(bars, task, steps),
                epoch=epoch,
                say=lambda sentence: say(console, sentence),
            )
            results = pipeline.run(
                settings, progress, dataset, together, resume, restart, place, hold, keep_going, tensorboard
            )
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
            report_path = out / "report.html"
            say(console, "\nReport with pictures: ", (str(report_path), "bold"), whole=True)
            verify = f"exactqat verify {shell_word(out)}"
            say(console, "To compare again at any time: ", (verify, "bold"), whole=True)
    return results.equal and all(passes for passes, _ in findings.passing(results))


def _print_skipped(console: Console, skipped: Sequence[str], noun: str = "image") -> None:
    shown = 20
    for sentence in skipped[:shown]:
        say(console, f"skipped {sentence}")
    if len(skipped) > shown:
        say(console, f"… and {len(skipped) - shown:,} more, all listed in metrics.json")
    if skipped:
        say(console, (f"{noun}s that could not be used: {len(skipped):,}", "bold"))


def report(directory: Path, model: str | None = None) -> None:
    import torch

    from ..application.job import figures, pipeline
    from ..application.job.progress import Progress
    from ..application.report import job_page as report

    torch.set_num_threads(1)
    console = console_of()
    with (
        contextlib.ExitStack() as hold,
        native_messages_kept_back(),
        status_on(console, "reading") as status,
    ):
        progress = Progress(begin=lambda text: status.update(line_of(text)))
        results = pipeline.finished(directory, progress, model=model, hold=hold)
        figures.write_metrics(results)
        path = figures.write_report(results)
    _print_warnings(console, results)
    for _, sentence in report.closing_sentences(results):
        say(console, sentence)
    say(console, "Written: ", (str(path), "bold"))


def export(
    directory: Path, model: str | None = None, headers: bool = False, name: str | None = None, device: str = "micro"
) -> None:
    from ..application.job import restored

    console = console_of()
    with native_messages_kept_back():
        paths = restored.export_directory(directory, model, headers, name, device)
    _warn_of_unfinished(directory)
    for path in paths:
        say(console, "Written: ", (str(path), "bold"), f" ({path.stat().st_size:,} bytes)")
    if not any(path.suffix == ".onnx" for path in paths):
        say(console, "To write .onnx files as well: pip install 'exactqat[onnx]'")


def _warn_of_unfinished(directory: Path) -> None:
    """On stderr, as stdout is for the results that exist."""
    from ..application.job import store

    sentence = store.unfinished(directory)
    if sentence:
        say(console_of(stderr=True), ("warning: ", "bold yellow"), f"{sentence}. These are its networks so far.")


def check(name: str, shapes: Sequence[tuple[int, ...]], classes: int, device: str, keep_final_activation: bool) -> bool:
    """Prints what a model becomes on a device, or why it cannot run there, and returns whether it can."""
    import numpy as np

    from ..application.job.imported import built
    from ..application.job.models import is_known, network
    from ..kit.train.core.frameworks import framework_of
    from ..qat.dry_run import HEADER, explain

    shape = shapes[0][1:] if shapes else ()
    model, variables = (network(name, shape, classes), None) if is_known(name) else built(name, shape, classes)
    inputs: list[Any] = [np.zeros(shape, np.float32) for shape in shapes]
    if framework_of(model) == "torch":
        import torch

        inputs = [torch.from_numpy(array) for array in inputs]
    example = None if not inputs else inputs[0] if len(inputs) == 1 else tuple(inputs)
    try:
        answer = explain(
            model, example, variables=variables, device=device, keep_final_activation=keep_final_activation or None
        )
    except TypeError as error:
        raise ValueError(f"{error} (--example SHAPE gives an input's shape)" if not inputs else str(error)) from error
    console = console_of()
    if answer:
        show_table(console, f"{name} on {device}", HEADER, [(row, "") for row in answer.rows()], texts=3)
    for sentence in answer.sentences():
        say(console, sentence)
    return bool(answer)


def compare(directories: Sequence[Path], html: Path | None) -> None:
    from ..application.job import figures, files
    from ..application.report import comparison as compare

    if html is not None:
        if html.exists() or html.is_symlink():
            raise ValueError(f"{html} already exists and is not replaced")
        files.check_writable(html)
    console = console_of()
    jobs = [figures.read(directory) for directory in directories]
    if html is not None:
        files.write_atomically(html, compare.written(jobs).encode("utf-8", "backslashreplace"))
    changed: list[TableRow] = [(row, "") for row in compare.differing_settings(jobs)]
    if changed:
        header = ["setting", *(job.name for job in jobs)]
        show_table(console, "Settings that differ", header, changed, texts=1)
    else:
        say(console, "The jobs have the same settings.")
    networks: list[TableRow] = [(row, "") for row in compare.short_rows(jobs)]
    show_table(console, "Delivered networks, on the device", compare.SHORT_HEADER, networks, texts=2, grouped=True)
    for sentence in compare.sentences(jobs):
        say(console, f"{sentence}.")
    if html is not None:
        say(console, "Written: ", (str(html), "bold"), whole=True)


def _print_results(console: Console, results: Results) -> None:
    from ..application.report import findings
    from ..application.report import job_page as report

    rows: list[TableRow] = []
    for row in report.result_rows(results):
        cells: list[Cell] = [
            row.network,
            row.method.removesuffix(" ranges") + (" ★" if row.delivered else ""),
            f"{row.test_accuracy if row.device_accuracy is None else row.device_accuracy:.1%}",
            "–"
            if row.paired is None
            else f"{round(100 * row.paired.difference, 1) + 0.0:+.1f}, {row.paired.probability()}",
            "–" if row.differing is None else _colored(row.differing),
            "–" if row.training_differing is None else _colored(row.training_differing),
        ]
        rows.append((cells, "bold" if row.delivered else ""))
    device, tests = results.settings.device, len(results.dataset.test)
    noun = results.dataset.noun
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
    for good, sentence in report.closing_sentences(results):
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


def _verify_npu(directory: Path, accelerator: str, model: str | None = None) -> None:
    from ..application.job import restored
    from ..deploy.footprint import DEFAULT_ACCELERATOR

    console = console_of()
    accelerator = accelerator or DEFAULT_ACCELERATOR
    with native_messages_kept_back(), status_on(console, "compiling with Vela"):
        found = restored.npu_directory(directory, accelerator, model)
    rows: list[TableRow] = []
    for precision, footprint in found.items():
        left = ", ".join(f"{count} {kind}" for kind, count in footprint.operators_on_cpu.items()) or "none"
        figures = (footprint.sram_bytes, footprint.flash_bytes, footprint.cycles)
        rows.append(([precision.upper(), left, *(f"{figure:,}" for figure in figures)], ""))
    header = ("network", "operators left to the processor", "SRAM bytes", "flash bytes", "cycles, estimated")
    show_table(console, f"{directory} on {accelerator}, compiled by Vela", header, rows, texts=2)
    say(console, "The NPU itself is not run here, so nothing is claimed about its integers.")


def verify(directory: Path, quiet: bool, model: str | None = None, device: str | None = None) -> bool:
    """Compares, prints, and returns whether all integers are equal."""
    from ..application.job import devices

    named, choice = ("", "") if device is None else devices.device_to_verify(device)
    if named == devices.NPU:
        _verify_npu(directory, choice, model)
        return True
    if choice:
        from ..deploy.runtimes import emulation

        os.environ["EXACTQAT_ARM64_CPU"] = emulation.cpu_named(choice)

    import torch

    from ..application.job import restored
    from ..application.job.progress import Progress
    from ..application.report.text import shell_word

    console = console_of()
    torch.set_num_threads(1)
    with native_messages_kept_back(), bars_on(console, disable=quiet) as bars:
        task = bars.add_task("comparing", total=None, figures="", epoch="")
        progress = Progress(
            begin=lambda text: bars.reset(task, description=text, total=None),
            compared=lambda done, all: bars.update(task, completed=done, total=all),
        )
        found = restored.verify_directory(directory, progress, model=model, device=named)
    for precision, each in found.items():
        if not quiet:
            _print_comparison(console, directory, precision, each)
        report = each.report
        ran, computes, trained = report.sentences()
        for sentence, good in (
            (ran, report.values > 0 and not report.differing + report.predictions_differing),
            (f"{computes}; {each.beside.accuracies()}", not report.training_differing),
            (trained, report.trained_for == report.profile),
        ):
            say(console, f"{precision.upper()}: ", _verdict(f"{sentence}.", good))
    _warn_of_unfinished(directory)
    report = next(iter(found.values())).report
    if any(each.report.training_differing for each in found.values()):
        out = directory.with_name(f"{directory.resolve().name}-{report.profile}")
        say(console, f"{report.profile} does not compute what was trained. Retrain the last phase for it:")
        command = f"exactqat train --from {shell_word(directory)} --device {report.profile} --out {shell_word(out)}"
        say(console, (f"  {command}{_model_option(model)}", "bold"), whole=True)
    not_run = [each.not_run for each in found.values() if each.not_run]
    if not_run and not any(each.differing for each in found.values()):
        raise RuntimeError(f"the files were not run: {not_run[0]}")
    return not any(each.differing for each in found.values())


def inspect(
    file: Path,
    data: Path | None,
    examples: int,
    devices: Sequence[str] | None,
    seed: int,
    as_json: bool,
    float_file: Path | None,
    html: Path | None,
    reduced: Path | None,
) -> bool:
    """Prints what is in a file and how devices compute it, and returns whether everything claimed to be equal is."""
    from .. import qat
    from ..application.job import files
    from ..application.report.file_page import file_page
    from ..deploy.formats.tflite import write_whole
    from ..deploy.inspect import inspect as inspect_file
    from ..deploy.reduce import reduce

    for path in (html, reduced):
        if path is not None:
            files.check_writable(path)
    console, errors = console_of(), console_of(stderr=True)
    is_onnx = file.suffix.lower() == ".onnx"
    for option, given in (("--float", float_file), ("--reduce", reduced)):
        if is_onnx and given is not None:
            raise ValueError(f"{option} is for .tflite files, and {file} is an .onnx file")
    with status_on(errors, "reading") as status:
        if is_onnx:
            found = qat.inspect_onnx(file, data, examples, devices or None, seed, progress=status.update)
        else:
            found = inspect_file(
                file, data, examples, devices or None, seed, progress=status.update, float_file=float_file
            )
    # A program may read it: nothing is wrapped or styled.
    console.print(found.as_json() if as_json else found.text(min(columns(), 100)), soft_wrap=True)
    if html is not None:
        write_whole(html, file_page(found).encode())
    if reduced is not None:
        with status_on(errors, "reducing") as status:
            made = reduce(file, reduced, data, examples, devices or None, seed, progress=status.update)
        said = "no device differs" if made is None else f"{made.graph}, {made.arrays}: {made.sentence}"
        errors.print(said, soft_wrap=True)
    if not found.ran_on:
        raise ValueError(f"{file} ran on no device, nothing was compared; the reasons are above")
    return found.equal


def _model_option(model: str | None) -> str:
    from ..application.report.text import shell_word

    return "" if model is None else f" --model {shell_word(model)}"


def _print_comparison(console: Console, directory: Path, precision: str, found: Verified) -> None:
    """Tensor by tensor."""
    trained = {each.name: each for each in found.report.training}
    outputs = len(found.report.operators)
    rows: list[TableRow] = []
    for position, row in enumerate(found.report.table()):
        beside = trained.get(str(row["tensor"])) if position < outputs else None
        cells: list[Cell] = [
            str(row["tensor"]),
            str(row["operator"]),
            f"{row['values']:,}",
            _colored(int(row["differing"] or 0)),
            "–" if beside is None else _colored(beside.differing),
        ]
        rows.append((cells, ""))
    report = found.report
    title = (
        f"{precision.upper()}: {directory / precision / 'model.tflite'}, trained for {report.trained_for}, "
        f"compared with {report.profile}"
    )
    header = ("tensor", "operator", "values", "not as simulated", "not as trained")
    if report.operators:
        show_table(console, title, header, rows, texts=2)
