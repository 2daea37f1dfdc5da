# SPDX-License-Identifier: Apache-2.0
"""The command line. Heavy libraries are imported inside the commands, so that `exactqat --help` answers at once.

Annotations are evaluated here: typer reads them inside `_application`, where its import lives.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    from rich.console import Console

    from .job.pipeline import Results

INSTALL = "pip install 'exactqat[job]'"


def main() -> None:
    """Entry point of the `exactqat` command."""
    try:
        application = _application()
    except ModuleNotFoundError as error:
        sys.exit(f"exactqat: {error.name} is not installed. Get it with: {INSTALL}")
    # Where `--model module:function` is looked for in the end: console scripts lack the working directory.
    sys.path.append("")
    application()


def _application() -> Any:
    import typer
    from rich.console import Console

    application = typer.Typer(
        name="exactqat",
        help=(
            "Quantization-aware training with TensorFlow's exact operators. "
            "**What was trained is what the device computes.**"
        ),
        epilog="Start with: **exactqat train --out runs/digits** (about a minute and a half on two cores)",
        rich_markup_mode="markdown",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    errors = Console(stderr=True)

    @application.command()
    def train(
        context: typer.Context,
        out: Annotated[
            Path, typer.Option(help="Directory for checkpoints, .tflite files, metrics.json and report.html.")
        ],
        data: Annotated[
            str,
            typer.Option(
                help="digits (scikit-learn's, needs no download), an .npz file with x and y, or a folder with one "
                "folder of images for each class (or train, val and test folders that hold them)."
            ),
        ] = "digits",
        model: Annotated[
            str,
            typer.Option(help="Network, or module:function that builds one; an unknown name lists those there are."),
        ] = "small_mobilenet",
        weight_bits: Annotated[
            int | None, typer.Option(min=2, max=8, help="Quantize to this precision alone, not to W8A8, W4A4 and W3A4.")
        ] = None,
        activation_bits: Annotated[int | None, typer.Option(min=2, max=8, help="Likewise, for activations.")] = None,
        image_size: Annotated[
            int | None, typer.Option(min=1, help="Height and width to which images are scaled, in pixels.")
        ] = None,
        batch_size: Annotated[int, typer.Option(min=2, help="Images in a training step, over all processes.")] = 64,
        epochs_float: Annotated[int, typer.Option(min=1, help="Epochs of float training.")] = 60,
        epochs_qat: Annotated[
            int,
            typer.Option(
                min=1,
                help="Epochs of each quantization-aware training, the last third of them frozen; a quarter at 8 bits, "
                "which only fine-tune.",
            ),
        ] = 80,
        seed: Annotated[
            int, typer.Option(min=0, help="Of weights, order and shifts. The same seed gives the same bits.")
        ] = 0,
        device: Annotated[
            str,
            typer.Option(help="Where networks train: cpu, or cuda (needs a GPU; not yet tried on one)."),
        ] = "cpu",
        resume: Annotated[
            bool,
            typer.Option(
                "--resume", help="Continue the job in DIR; begin it if there is none. The bits stay the same."
            ),
        ] = False,
        restart: Annotated[bool, typer.Option("--restart", help="Replace an unfinished job in DIR.")] = False,
        quiet: Annotated[bool, typer.Option("--quiet", help="Print the table and the closing sentence only.")] = False,
    ) -> None:
        """Train in float, quantize to W8A8, W4A4 and W3A4, deploy, compare **every integer** with the device
        runtime.

        For each precision: post-training quantization as a baseline, then quantization-aware training with EMA ranges
        and with learned ranges. The better one is delivered as checkpoint.pt and model.tflite in DIR/w8a8/ and so on;
        DIR/report.html tells the story. Under torchrun, all processes work together. Exit status 1 if any integer
        differs.
        """
        options = dict(context.params)
        given = {
            name: options[name]
            for name in options
            if name not in ("out", "device", "resume", "restart", "quiet")
            and getattr(context.get_parameter_source(name), "name", "") not in ("DEFAULT", "DEFAULT_MAP")
        }
        with _failures(errors):
            differing = _train(out, given, resume, restart, quiet, device)
        raise typer.Exit(1 if differing else 0)

    @application.command()
    def report(
        directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory written by `exactqat train`.")],
    ) -> None:
        """Write DIR/report.html again: load the networks in DIR, evaluate and compare them again, train nothing."""
        with _failures(errors):
            _report(directory)

    @application.command()
    def export(
        directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory written by `exactqat train`.")],
    ) -> None:
        """Write model.tflite, and model.onnx if the package onnx is installed, again from DIR's checkpoints. Needs no
        data."""
        with _failures(errors):
            _export(directory)

    @application.command()
    def verify(
        directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory written by `exactqat train`.")],
        quiet: Annotated[bool, typer.Option("--quiet", help="Print the closing sentence only.")] = False,
    ) -> None:
        """Run DIR's files on the device runtime again and compare **every integer** with the checkpoints'
        simulation.

        Exit status 1 if any integer differs.
        """
        with _failures(errors):
            differing = _verify(directory, quiet)
        raise typer.Exit(1 if differing else 0)

    @application.command(
        # Everything, --help too, is bench/'s.
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        add_help_option=False,
    )
    def bench(
        context: typer.Context,
        step: Annotated[bool, typer.Option("--step", help="Time a whole training step instead.")] = False,
    ) -> None:
        """Time the kernels beside TensorFlow, PyTorch and JAX, or a training step with --step. Needs a checkout of the
        sources; all other options are those of its bench/run.py or bench/step.py."""
        with _failures(errors):
            script = _bench_script("step.py" if step else "run.py")
        raise typer.Exit(subprocess.run([sys.executable, str(script), *context.args]).returncode)

    return application


def _bench_script(name: str) -> Path:
    """Of the checkout this package runs from, or else of the one around the working directory."""
    here = Path.cwd()
    for root in (Path(__file__).resolve().parents[2], here, *here.parents):
        script = root / "bench" / name
        if script.exists() and (root / "src" / "exactqat").is_dir():
            return script
    raise ValueError(
        f"the benchmarks are not part of the installed package: run this in a checkout of exactqat's sources "
        f"(there is no bench/{name} around {here})"
    )


@contextlib.contextmanager
def _failures(errors: "Console") -> Iterator[None]:
    """Expected failures end with one clear message and status 2; anything else is a defect and keeps its traceback."""
    import typer

    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("exactqat"):
            raise
        errors.print(f"[bold red]error:[/] {error.name} is not installed. Get it with: {INSTALL}", highlight=False)
    except KeyboardInterrupt:
        errors.print("[bold red]stopped[/] by the keyboard; continue with --resume")
        raise typer.Exit(130) from None
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("EXACTQAT_TRACEBACK"):
            raise
        errors.print("[bold red]error:[/] ", end="")
        errors.print(str(error), markup=False, highlight=False)
    else:
        return
    raise typer.Exit(2)


@contextlib.contextmanager
def _native_messages_kept_back() -> Iterator[None]:
    """Keeps the runtime's own lines on stderr out of the progress bar; they come out if something fails."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as messages:
        os.dup2(messages.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(kept, 2)
            messages.seek(0)
            os.write(2, messages.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _train(out: Path, given: dict[str, Any], resume: bool, restart: bool, quiet: bool, device: str = "cpu") -> int:
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from .job import data as sources
    from .job import pipeline, processes, report, training

    if resume and restart:
        raise ValueError("--resume and --restart exclude each other")
    # The networks are small: a second thread costs more than it gives, and one thread gives the same bits everywhere.
    torch.set_num_threads(1)
    place = training.device_named(device)
    if Path(given.get("data", "digits")).exists():
        # Other commands, in other directories, will look for it.
        given["data"] = str(Path(given["data"]).resolve())
    settings = pipeline.Settings(out, **given)
    if resume and (out / "job.json").exists():
        # What is not given is as it was; what is given is compared.
        settings = replace(pipeline.stored_settings(out), **given)
    with processes.joined() as together:
        console = Console(quiet=not together.writes)
        if not quiet:
            console.print(
                f"[bold]exactqat train[/] on [bold]{settings.data}[/], seed {settings.seed}, results in [bold]{out}[/]"
                + (f", {together.count} processes" if together.count > 1 else ""),
                highlight=False,
            )
        dataset = sources.load(settings.data, settings.image_size)
        if together.writes:
            _print_skipped(Console(stderr=True), dataset.skipped)
        with (
            Progress(
                TextColumn("{task.description:<42}"),
                BarColumn(bar_width=20),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=console,
                transient=True,
                disable=quiet or not together.writes,
            ) as bars,
            _native_messages_kept_back(),
        ):
            task = bars.add_task("float training", total=pipeline.total_steps(settings, dataset))
            progress = pipeline.Progress(
                begin=lambda text: bars.update(task, description=text),
                advance=lambda steps: bars.advance(task, steps),
            )
            results = pipeline.run(settings, progress, dataset, together, resume, restart, place)
            if not together.writes:
                return 0
            progress.begin("report")
            report_path = report.write_report(results)
            # Last: it marks the job as finished.
            pipeline.write_metrics(results)
    _print_results(console, results)
    if not quiet:
        console.print(f"\nThe story with pictures: [bold]{report_path}[/]", highlight=False)
        console.print(f"Compare again at any time: [bold]exactqat verify {out}[/]", highlight=False)
    return results.values_differing


def _print_skipped(console: "Console", skipped: Sequence[str]) -> None:
    shown = 20
    for sentence in skipped[:shown]:
        console.print(f"skipped {sentence}", markup=False, highlight=False)
    if len(skipped) > shown:
        console.print(f"… and {len(skipped) - shown:,} more, all of them in metrics.json", highlight=False)
    if skipped:
        console.print(f"[bold]images that could not be used: {len(skipped):,}[/]", highlight=False)


def _report(directory: Path) -> None:
    import torch
    from rich.console import Console

    from .job import pipeline, report

    torch.set_num_threads(1)
    console = Console()
    with _native_messages_kept_back(), console.status("reading") as status:
        results = pipeline.finished(directory, pipeline.Progress(begin=status.update))
        path = report.write_report(results)
        pipeline.write_metrics(results)
    console.print(report.closing_sentence(results), highlight=False)
    console.print(f"Written: [bold]{path}[/]", highlight=False)


def _export(directory: Path) -> None:
    from rich.console import Console

    from .job import pipeline

    with _native_messages_kept_back():
        paths = pipeline.export_directory(directory)
    for path in paths:
        Console().print(f"Written: [bold]{path}[/] ({path.stat().st_size:,} bytes)", highlight=False)
    if not any(path.suffix == ".onnx" for path in paths):
        Console().print("For .onnx files beside them: pip install 'exactqat\\[onnx]'", highlight=False)


def _print_results(console: "Console", results: "Results") -> None:
    from rich.table import Table

    from .job import report

    table = Table(
        title=f"{results.dataset.name}: accuracy on {len(results.dataset.test)} test images, integers compared",
        title_justify="left",
    )
    table.add_column("network")
    table.add_column("method")
    for header in ("PyTorch", "device", "bytes", "compared", "differ"):
        table.add_column(header, justify="right")
    previous = ""
    for row in report.result_rows(results):
        if previous and row.network != previous:
            table.add_section()
        differing = "–" if row.differing is None else f"[{'red' if row.differing else 'green'}]{row.differing:,}[/]"
        table.add_row(
            row.network if row.network != previous else "",
            row.method.removesuffix(" ranges") + (" ★" if row.delivered else ""),
            f"{row.test_accuracy:.1%}",
            "–" if row.device_accuracy is None else f"{row.device_accuracy:.1%}",
            f"{row.file_bytes:,}",
            "–" if row.compared is None else f"{row.compared:,}",
            differing,
            style="bold" if row.delivered else None,
        )
        previous = row.network
    console.print(table)
    console.print(
        "PTQ: post-training quantization. QAT: quantization-aware training. Second word: where ranges come from. "
        "★ delivered (lower validation loss). "
        "Input and logits keep 8 bits; codes of fewer bits travel in 8-bit containers. "
        f"The job took {results.seconds:.0f} seconds.",
        style="dim",
        highlight=False,
    )
    color = "bold red" if results.values_differing else "bold green"
    console.print(report.closing_sentence(results), style=color, highlight=False)


def _verify(directory: Path, quiet: bool) -> int:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    import torch

    from .job import pipeline

    torch.set_num_threads(1)
    with _native_messages_kept_back(), console.status("comparing") as status:
        reports = pipeline.verify_directory(directory, pipeline.Progress(begin=status.update))
    differing = sum(report.differing for report in reports.values())
    values = sum(report.values for report in reports.values())
    if not quiet:
        for precision, report in reports.items():
            table = Table(title=f"{precision.upper()}: {directory / precision / 'model.tflite'}", title_justify="left")
            table.add_column("tensor")
            table.add_column("operator")
            for header in ("values", "differing", "largest"):
                table.add_column(header, justify="right")
            for row in report.table():
                color = "red" if row["differing"] else "green"
                table.add_row(
                    str(row["tensor"]),
                    str(row["operator"]),
                    f"{row['values']:,}",
                    f"[{color}]{row['differing']:,}[/]",
                    str(row["largest_difference"]),
                )
            console.print(table)
    verdict = "every single one is equal" if differing == 0 else f"{differing:,} of them differ"
    console.print(
        f"{values:,} integers were compared between our simulation and the runtime: {verdict}.",
        style="bold red" if differing else "bold green",
        highlight=False,
    )
    return differing


if __name__ == "__main__":
    main()
