# SPDX-License-Identifier: Apache-2.0
"""The command line. Heavy libraries are imported inside the commands, so that `exactqat --help` responds at once.

Annotations are evaluated here: typer reads them inside `_application`, where its import lives.
"""

import codecs
import contextlib
import inspect
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.status import Status
    from rich.text import Text

    from .job.pipeline import Results, Verified
    from .job.training import History

INSTALL = "pip install 'exactqat[job]'"


class IntegersDiffer(SystemExit):
    """Exits with status 1, which means this and nothing else."""

    def __init__(self) -> None:
        super().__init__(1)


def main() -> None:
    """Entry point of the `exactqat` command."""
    _open_streams()
    if sys.argv[1:] == ["--version"]:  # answered without what the commands need
        print(_version())
        return
    try:
        _application()()
    except IntegersDiffer:
        raise
    except SystemExit as error:
        # Libraries end programs with 1 for failures of any kind.
        raise SystemExit(error.code if error.code in (None, 0, 130) else 2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("exactqat"):
            traceback.print_exc()
        else:
            sys.stderr.write(f"exactqat: {error.name} is not installed. Install it with: {INSTALL}\n")
        raise SystemExit(2) from None
    except Exception:
        traceback.print_exc()
        raise SystemExit(2) from None
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                _to_nobody(stream)


def _open_streams() -> None:
    """A program may be started without them, and a name that cannot be encoded must not end it."""
    codecs.register_error("exactqat", _in_their_place)
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="exactqat")
    _check_columns()


# What is printed for signs of our own where they cannot be; names are escaped.
IN_THEIR_PLACE = {"–": "-", "★": "*", "…": "..."}


def _in_their_place(error: UnicodeError) -> tuple[str, int]:
    """A handler of encoding errors."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(
        IN_THEIR_PLACE.get(sign) or sign.encode("ascii", "backslashreplace").decode() for sign in signs
    ), error.end


def _check_columns() -> None:
    """COLUMNS may hold anything; rich takes it at its word, and prints nothing at all in 0 columns."""
    given = os.environ.get("COLUMNS", "")
    if re.fullmatch(r"0*[1-9][0-9]{0,4}", given, re.ASCII):
        os.environ["COLUMNS"] = str(max(NARROWEST, int(given)))
    else:
        os.environ.pop("COLUMNS", None)


def _to_nobody(stream: IO[str]) -> None:
    """What is written to the stream is lost from here on, as is what it still holds."""
    with contextlib.suppress(OSError, ValueError):
        nobody = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nobody, stream.fileno())
        os.close(nobody)


def _console(**options: Any) -> "Console":
    """A console that prints names as they are: no markup, no emoji; and that outlives its reader."""
    from rich.console import Console

    class Lasting(Console):
        def on_broken_pipe(self) -> None:
            # `exactqat train | head`: the training is worth more than its reader.
            self.quiet = True
            _to_nobody(self.file)

    return Lasting(markup=False, emoji=False, highlight=False, **options)


def _line(*parts: str | tuple[str, str]) -> "Text":
    """Texts, or texts and their styles; what is not printable in them is escaped."""
    from rich.text import Text

    from .job.text import printable

    styled = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((printable(text), style) for text, style in styled))


# Columns that any output takes, from which boxes are drawn, and from which a bar has room.
NARROWEST, FRAMED, WIDE = 20, 70, 90


def _is_terminal(stream: IO[str]) -> bool:
    """Whether a person looks at it, who has given the terminal's name away."""
    try:
        return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
    except ValueError:
        return False


def _in_terminal(console: "Console") -> bool:
    """Whether what is printed there may be drawn over, and has to be cut to a width."""
    return console.is_interactive and _is_terminal(console.file)


def _columns() -> int:
    return max(NARROWEST, shutil.get_terminal_size().columns)


def _say(console: "Console", *parts: str | tuple[str, str], whole: bool = False) -> None:
    """A sentence. On a terminal lines end between words; elsewhere, and where it is to be copied `whole`, it is one."""
    sentence = _line(*parts)
    ends = [] if whole or not _in_terminal(console) else _ends(sentence.plain, console.width)
    for line in sentence.divide(ends):
        line.rstrip()
        console.print(line, soft_wrap=True)


def _ends(text: str, width: int) -> list[int]:
    """Where lines of a text end so that none is wider and no word is cut."""
    from rich.cells import cell_len

    ends, column = [], 0
    for word in re.finditer(r"\s*\S+", text):
        if "\n" in word[0]:
            column = 0
        if column and column + cell_len(word[0]) > width:
            ends.append(word.end() - len(word[0].lstrip()))
            column = cell_len(word[0].lstrip())
        else:
            column += cell_len(word[0].split("\n")[-1])
    return ends


# A text, or a text and its style; the cells of a row and the row's style.
Cell = str | tuple[str, str]
TableRow = tuple[Sequence[Cell], str]


def _show_table(
    console: "Console", title: str, header: Sequence[str], rows: Sequence[TableRow], texts: int, grouped: bool = False
) -> None:
    """A table where it fits; on a narrower terminal (or by COLUMNS) one paragraph for each row.

    Args:
        texts: how many columns, the first ones, hold text; the others hold numbers.
        grouped: rows with the same first cell belong together, and it is shown once.
    """
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for column, name in enumerate(header):
        table.add_column(_line(name), justify="left" if column < texts else "right", no_wrap=True)
    previous: Cell | None = None
    for cells, style in rows:
        first = cells[0]
        if grouped and previous is not None and first != previous:
            table.add_section()
        shown = ["" if grouped and first == previous else first, *cells[1:]]
        table.add_row(*map(_line, shown), style=style or None)
        previous = first
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    _say(console, (title, "italic"))
    if needed > console.width and not _in_terminal(console) and "COLUMNS" not in os.environ:
        console.width = needed
    if needed <= console.width:
        console.print(table)
        return
    for cells, style in rows:
        line = Text(" ").join(_line(cell) for cell in cells[:texts])
        line.stylize(style)
        console.print(line, overflow="fold")
        line = Text()
        for label, cell in zip(header[texts:], cells[texts:], strict=True):
            pair = Text.assemble("  ", (label, "dim"), " ", _line(cell))
            if line.cell_len + pair.cell_len > console.width and line:
                console.print(line, overflow="fold")
                line = Text()
            line.append_text(pair)
        console.print(line, overflow="fold")


def _in_lines_of_their_own(command_class: Any) -> Any:
    """A command whose help has no columns: options stand above what they mean."""

    class Narrow(command_class):
        def get_help(self, context: Any) -> str:
            class Formatter(context.formatter_class):
                def write_dl(self, rows: Any, *given: Any, **options: Any) -> None:
                    super().write_dl(rows, col_max=4, col_spacing=2)

            context.formatter_class = Formatter
            return str(super().get_help(context))

    return Narrow


def _numbers(text: str) -> list[int]:
    """Bits between commas."""
    import typer

    if not re.fullmatch(r"\s*[0-9]{1,9}\s*(,\s*[0-9]{1,9}\s*)*", text, re.ASCII):
        raise typer.BadParameter(f"must be a number from 2 to 8, or several such as 8,6,4, got {text!r}")
    numbers = [int(number) for number in text.split(",")]
    for number in numbers:
        if not 2 <= number <= 8:
            raise typer.BadParameter(f"must be from 2 to 8, got {number}")
    return numbers


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8})*", text, re.ASCII):
        raise ValueError(f"--example must be a shape such as 1x3x224x224, got {text!r}")
    return tuple(int(size) for size in text.split("x"))


def _path(text: str) -> Path:
    """What an option names. For pathlib no name, as of a variable that is not set, is the working directory."""
    import typer

    if not text:
        raise typer.BadParameter("must not be empty")
    return Path(text)


def _version() -> str:
    from exactqat import __version__

    return f"exactqat {__version__}"


def _application() -> Any:
    import typer

    # Boxes need room, and cut sentences in pieces that no program downstream puts together again.
    framed = _is_terminal(sys.stdout) and _is_terminal(sys.stderr) and _columns() >= FRAMED

    def written(text: str) -> str:
        return text if framed else text.replace("**", "")

    application = typer.Typer(
        name="exactqat",
        help=written(
            "Quantization-aware training with TensorFlow's exact operators. **What you train is what the device "
            "computes.**"
        ),
        epilog=written("Start with: **exactqat train --out runs/digits** (about a minute and a half on two cores)"),
        rich_markup_mode="markdown" if framed else None,
        context_settings={} if framed else {"terminal_width": min(_columns(), 100)},
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    errors = _console(stderr=True)

    def show_version(asked: bool) -> None:
        if asked:
            typer.echo(_version())
            raise typer.Exit

    @application.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None:
        pass

    @application.command()
    def train(
        context: typer.Context,
        out: Annotated[
            Path,
            typer.Option(
                parser=_path,
                metavar="<path>",
                help="Directory for checkpoints, .tflite files, metrics.json and report.html.",
            ),
        ],
        data: Annotated[
            str,
            typer.Option(
                help="digits (scikit-learn's, needs no download), an .npz file with x and y, or a folder with one "
                "folder of images per class (or with train, val and test folders that contain them)."
            ),
        ] = "digits",
        model: Annotated[
            str,
            typer.Option(help="Network, or module:function that builds one; an unknown name lists the available ones."),
        ] = "small_mobilenet",
        weights: Annotated[
            Path | None,
            typer.Option(
                parser=_path,
                metavar="<path>",
                help="Weights to start float training from: a state dict written by torch.save, or safetensors. "
                "Tensors that match by name and shape are used, the rest is reported.",
            ),
        ] = None,
        weight_bits: Annotated[
            Any,
            typer.Option(
                parser=_numbers,
                metavar="BITS[,BITS...]",
                help="Quantize weights to 2 to 8 bits, or to several widths in turn, such as 8,6,4; instead of "
                "W8A8, W4A4 and W3A4.",
            ),
        ] = None,
        activation_bits: Annotated[
            Any,
            typer.Option(
                parser=_numbers,
                metavar="BITS[,BITS...]",
                help="Likewise for activations (8 if only weights are given); each width is combined with each of "
                "the weights'.",
            ),
        ] = None,
        image_size: Annotated[
            int | None, typer.Option(min=1, help="Height and width to which images are scaled, in pixels.")
        ] = None,
        batch_size: Annotated[int, typer.Option(min=2, help="Images per training step, over all processes.")] = 64,
        epochs_float: Annotated[int, typer.Option(min=1, help="Epochs of float training.")] = 60,
        epochs_qat: Annotated[
            int,
            typer.Option(
                min=1,
                help="Epochs of each quantization-aware training, the last third of them frozen; at 8 bits a "
                "quarter of that, for fine-tuning.",
            ),
        ] = 80,
        device: Annotated[
            str,
            typer.Option(
                help="Device to train for; the frozen epochs compute its integers: xnnpack-x86, xnnpack-arm64 "
                "(LiteRT with XNNPACK), reference (LiteRT's reference kernels) or micro (TFLite-Micro)."
            ),
        ] = "xnnpack-x86",
        from_job: Annotated[
            Path | None,
            typer.Option(
                "--from",
                parser=_path,
                metavar="DIR",
                help="A finished job whose networks are retrained for --device with the same settings, by default "
                "for an eighth of its --epochs-qat. That job is not changed.",
            ),
        ] = None,
        seed: Annotated[
            int,
            typer.Option(
                min=0, help="Seed for weights, order and shifts of the images. The same seed gives the same bits."
            ),
        ] = 0,
        accelerator: Annotated[
            str,
            typer.Option(help="Where to train: cpu, or cuda (needs a GPU; not yet tested on one)."),
        ] = "cpu",
        profile: Annotated[str | None, typer.Option(hidden=True)] = None,
        resume: Annotated[
            bool,
            typer.Option(
                "--resume", help="Continue the job in DIR, or start it if there is none. The bits stay the same."
            ),
        ] = False,
        restart: Annotated[
            bool,
            typer.Option(
                "--restart", help="Move an existing job in DIR aside, to DIR.1 or the next free number, and start over."
            ),
        ] = False,
        quiet: Annotated[bool, typer.Option("--quiet", help="Only print the table and the closing sentence.")] = False,
    ) -> None:
        """Train in float, quantize to several bit widths (W8A8, W4A4 and W3A4), deploy, compare **every integer** with
        the device runtime.

        For each precision: post-training quantization as a baseline, then quantization-aware training with EMA ranges
        and with learned ranges. The better one is delivered as checkpoint.pt and model.tflite in DIR/w8a8/ and so on;
        DIR/report.html is the report. Under torchrun, all processes work together. An existing job in DIR is never
        replaced. Exit status 1 if any integer differs, between the file and its simulation or between the device and
        training; 2 if anything else goes wrong.
        """
        options = dict(context.params)
        given = {
            name: options[name]
            for name in options
            if name not in ("out", "accelerator", "profile", "resume", "restart", "quiet")
            and getattr(context.get_parameter_source(name), "name", "") not in ("DEFAULT", "DEFAULT_MAP")
        }
        equal = True
        with _failures(errors):
            if profile is not None:
                raise ValueError(f"--profile is now called --device: use --device {profile}")
            equal = _train(out, given, resume, restart, quiet, accelerator)
        if not equal:
            raise IntegersDiffer

    @application.command()
    def report(
        directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory written by `exactqat train`.")],
        model: Annotated[
            str | None,
            typer.Option(
                help="The network's name, unless it is one of exactqat's own: files must not decide what code runs."
            ),
        ] = None,
    ) -> None:
        """Write DIR/report.html again: reload, evaluate and compare the networks in DIR without training."""
        with _failures(errors):
            _report(directory, model)

    @application.command()
    def export(
        directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory written by `exactqat train`.")],
        model: Annotated[
            str | None,
            typer.Option(
                help="The network's name, unless it is one of exactqat's own: files must not decide what code runs."
            ),
        ] = None,
        c_array: Annotated[
            bool,
            typer.Option("--c-array", help="Also write a C header for TFLite-Micro, named like its contents (--name)."),
        ] = False,
        name: Annotated[
            str | None,
            typer.Option(
                metavar="NAME",
                help="Prefix of the header's file name and of every name in it, followed by the precision; by "
                "default the job's name. Two networks in one firmware need two names.",
            ),
        ] = None,
    ) -> None:
        """Write model.tflite, and model.onnx if the package onnx is installed, from DIR's checkpoints. Needs no
        data."""
        with _failures(errors):
            if name is not None and not c_array:
                raise ValueError("--name is for the C header: add --c-array")
            _export(directory, model, c_array, name)

    @application.command()
    def verify(
        directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory written by `exactqat train`.")],
        model: Annotated[
            str | None,
            typer.Option(
                help="The network's name, unless it is one of exactqat's own: files must not decide what code runs."
            ),
        ] = None,
        device: Annotated[
            str | None,
            typer.Option(
                help="Device to compare with: xnnpack-x86, xnnpack-arm64 (emulated on other machines; "
                "xnnpack-arm64:CPU chooses one), reference (LiteRT's reference kernels), micro (TFLite-Micro); by "
                "default the device the job was trained for. ethos-u (or ethos-u:ACCELERATOR) shows what Vela compiles "
                "the files to."
            ),
        ] = None,
        quiet: Annotated[bool, typer.Option("--quiet", help="Only print the closing sentence.")] = False,
    ) -> None:
        """Run DIR's files on the device runtime again, and compare **every integer** with the checkpoints' simulation,
        and the device with what was trained.

        Exit status 1 if any integer differs, in either comparison; 2 if anything else goes wrong.
        """
        equal = True
        with _failures(errors):
            equal = _verify(directory, quiet, model, device)
        if not equal:
            raise IntegersDiffer

    @application.command("inspect")
    def inspect_file(
        file: Annotated[Path, typer.Argument(metavar="FILE", help="A quantized .tflite file, whoever wrote it.")],
        data: Annotated[
            Path | None,
            typer.Option(
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
        as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
        reduce: Annotated[
            Path | None,
            typer.Option(
                metavar="OUT",
                help="Write the smallest graph and input that still show a difference: OUT.tflite and OUT.npz.",
            ),
        ] = None,
    ) -> None:
        """Say what is in a quantized .tflite file, run it on every runtime of this machine beside the simulation, and
        say which devices compute different codes, from which layer on.

        Exit status 1 if an integer differs where equality is claimed; 2 if the file cannot be read, with every reason,
        or if nothing could be compared.
        """
        equal = True
        with _failures(errors):
            equal = _inspect(file, data, examples, device, seed, as_json, reduce)
        if not equal:
            raise IntegersDiffer

    @application.command()
    def check(
        model: Annotated[
            str,
            typer.Argument(
                metavar="MODEL",
                help="package.module:name of a PyTorch, Keras or Flax model, or of a function without arguments that "
                "returns one; for JAX, of one that returns the function or module and its parameters.",
            ),
        ],
        example: Annotated[
            list[str] | None,
            typer.Option(
                metavar="SHAPE",
                help="Shape of an input with its batch, such as 1x3x224x224; once for each input. Keras models that "
                "know their sizes need none.",
            ),
        ] = None,
        device: Annotated[
            str, typer.Option(help="Device to check for: xnnpack-x86, xnnpack-arm64, reference, micro.")
        ] = "xnnpack-x86",
        keep_final_activation: Annotated[
            bool, typer.Option("--keep-final-activation", help="Keep a final softmax or sigmoid in the file.")
        ] = False,
    ) -> None:
        """Say whether a model can run on a device, as which operators and how large, without training it. Runs the code
        of the module that MODEL names.

        Exit status 2 if it cannot, with every place and what to do instead.
        """
        with _failures(errors):
            _check(model, [_shape(text) for text in example or []], device, keep_final_activation)

    # The third directory and those after it are extra arguments: help on a list of them would name Python's type.
    @application.command(context_settings={"allow_extra_args": True})
    def compare(
        context: typer.Context,
        first: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a finished job.")],
        second: Annotated[Path, typer.Argument(metavar="DIR...", help="One or more jobs to compare it with.")],
        html: Annotated[
            Path | None, typer.Option(metavar="FILE", help="Also write an HTML page; an existing file is not replaced.")
        ] = None,
    ) -> None:
        """Compare finished jobs: the settings that differ, and their delivered networks. Only reads metrics.json and
        job.json, no data or networks."""
        with _failures(errors):
            _compare([first, second, *map(Path, context.args)], html)

    @application.command(
        # Everything, --help too, is bench/'s.
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        add_help_option=False,
    )
    def bench(
        context: typer.Context,
        step: Annotated[bool, typer.Option("--step", help="Time a whole training step instead.")] = False,
    ) -> None:
        """Time the kernels against TensorFlow, PyTorch and JAX, or a training step with --step. Needs a checkout of the
        sources; all other options are passed to its bench/run.py or bench/step.py."""
        with _failures(errors):
            try:
                script = _bench_script("step.py" if step else "run.py")
            except ValueError as error:
                if "--help" not in context.args:
                    raise
                typer.echo(context.get_help())
                _say(errors, f"The options of the benchmarks cannot be shown: {error}")
                return
        raise typer.Exit(2 if subprocess.run([sys.executable, str(script), *context.args]).returncode else 0)

    if not framed and _columns() < FRAMED:
        application.info.cls = _in_lines_of_their_own(typer.core.TyperGroup)
        for command in application.registered_commands:
            command.cls = _in_lines_of_their_own(typer.core.TyperCommand)
    for command in application.registered_commands:
        command.help = written(inspect.cleandoc(getattr(command.callback, "__doc__", None) or ""))
    return application


def _bench_script(name: str) -> Path:
    """Of the checkout this package runs from, or else of the one around the working directory."""
    here = Path.cwd()
    for root in (Path(__file__).resolve().parents[2], here, *here.parents):
        script = root / "bench" / name
        if script.exists() and (root / "src" / "exactqat").is_dir():
            return script
    raise ValueError(
        "the benchmarks are not part of the installed package: run this in a checkout of exactqat's sources (no "
        f"bench/{name} found above {here})"
    )


@contextlib.contextmanager
def _failures(errors: "Console") -> Iterator[None]:
    """Expected failures end with one clear message, anything else is a defect and keeps its traceback; status 2."""
    import typer

    def say(*parts: str | tuple[str, str]) -> None:
        _say(errors, *parts)

    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("exactqat"):
            raise
        say(("error:", "bold red"), f" {error.name} is not installed. Install it with: {INSTALL}")
    except KeyboardInterrupt:
        say(("stopped", "bold red"), " by the keyboard; continue training with --resume")
        raise typer.Exit(130) from None
    except (ValueError, OSError, RuntimeError, ImportError, EOFError, MemoryError) as error:
        if os.environ.get("EXACTQAT_TRACEBACK"):
            raise
        say(("error:", "bold red"), f" {error or type(error).__name__}")
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
            with contextlib.suppress(OSError):
                os.write(2, messages.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _bars(console: "Console", disable: bool) -> "Progress":
    """What is done, how far, the last epoch's loss and accuracy, and the time left; gone when it ends. A task's field
    `figures` holds the two numbers, or None. On a terminal only."""
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TimeRemainingColumn
    from rich.text import Text

    from .job.text import shortened

    def figures(task: Task) -> str:
        if task.fields.get("figures") is None:
            return ""
        loss, right = task.fields["figures"]
        return f"loss {loss:.3g}, {right:.1%} right" if console.width >= WIDE else f"{loss:.3g} {right:.1%}"

    # Asked for their width at every drawing: windows are resized.
    class Words(ProgressColumn):
        def render(self, task: Task) -> Text:
            room = console.width - (37 if console.width >= WIDE else 16) - len(figures(task))
            return Text(shortened(task.description, min(max(8, room), 44)))

    class Bar(BarColumn):
        def render(self, task: Task) -> Any:
            return super().render(task) if console.width >= WIDE else Text("")

    class Figures(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(figures(task))

    return Progress(
        Words(),
        Bar(bar_width=20),
        TaskProgressColumn(),
        Figures(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=disable or not _in_terminal(console),
    )


def _status(console: "Console", text: str) -> "Status":
    """What is done, beside a sign that turns; on a terminal only."""
    return console.status(_line(text), spinner="dots" if console.encoding.startswith("utf") else "line")


def _train(
    out: Path, given: dict[str, Any], resume: bool, restart: bool, quiet: bool, accelerator: str = "cpu"
) -> bool:
    """Trains, and says whether all integers are equal."""
    import torch

    from .job import data as sources
    from .job import devices, pipeline, processes, report, training
    from .job.text import shell_word

    if resume and restart:
        raise ValueError("--resume and --restart cannot be combined")
    # The networks are small: a second thread costs more than it gives, and one thread gives the same bits everywhere.
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
        given["from_job"] = str(given["from_job"].resolve())
    again = resume and (out / "job.json").exists()
    if "from_job" in given and not again:
        settings = pipeline.settings_from(Path(given["from_job"]), out, given)
    else:
        settings = pipeline.Settings(out, **given)
    # Again when the directory is locked; this spares reading the data.
    pipeline.check_free(out, resume, restart)
    if again:
        # What is not given is as it was; what is given is compared.
        settings = replace(pipeline.stored_settings(out, given.get("model")), **given)
    # Before all images are read; again where the job begins.
    pipeline.check_before_data(settings, resume)
    with processes.joined() as together, contextlib.ExitStack() as hold:
        console = _console(quiet=not together.writes)
        errors = _console(stderr=True, quiet=not together.writes)
        if not quiet:
            _say(
                console,
                ("exactqat train", "bold"), " on ", (settings.data, "bold"), f", seed {settings.seed}, for ",
                (settings.device, "bold"), ", results in ", (str(out), "bold"),
                f", {together.count} processes" if together.count > 1 else "",
            )  # fmt: skip
        dataset = sources.load(settings.data, settings.image_size)
        _print_skipped(errors, dataset.skipped)
        with _bars(console, disable=quiet or not together.writes) as bars, _native_messages_kept_back():
            task = bars.add_task("float training", total=pipeline.total_steps(settings, dataset))

            def epoch(name: str, history: "History", epochs: int) -> None:
                loss, right = history.loss[-1], history.validation_accuracy[-1]
                bars.update(task, figures=(loss, right))
                if bars.disable and not quiet:
                    done = len(history.loss)
                    frozen = history.frozen_from is not None and done > history.frozen_from
                    _say(
                        console,
                        f"{name}: epoch {done} of {epochs}, loss {loss:.4g}, "
                        f"{right:.1%} of the validation images right{', frozen' if frozen else ''}",
                    )

            progress = pipeline.Progress(
                begin=lambda text: bars.update(task, description=text, figures=None),
                advance=lambda steps: bars.advance(task, steps),
                epoch=epoch,
                say=lambda sentence: _say(console, sentence),
            )
            results = pipeline.run(settings, progress, dataset, together, resume, restart, place, hold)
            if not together.writes:
                return True
            # Before anything is drawn or printed, which can fail.
            pipeline.write_metrics(results)
            progress.begin("report")
            failure = None
            try:
                report.write_report(results)
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
            _say(console, "\nReport with pictures: ", (str(report_path), "bold"), whole=True)
            verify = f"exactqat verify {shell_word(out)}"
            _say(console, "To compare again at any time: ", (verify, "bold"), whole=True)
    return results.equal


def _print_skipped(console: "Console", skipped: Sequence[str]) -> None:
    shown = 20
    for sentence in skipped[:shown]:
        _say(console, f"skipped {sentence}")
    if len(skipped) > shown:
        _say(console, f"… and {len(skipped) - shown:,} more, all listed in metrics.json")
    if skipped:
        _say(console, (f"images that could not be used: {len(skipped):,}", "bold"))


def _report(directory: Path, model: str | None = None) -> None:
    import torch

    from .job import pipeline, report

    torch.set_num_threads(1)
    console = _console()
    with (
        contextlib.ExitStack() as hold,
        _native_messages_kept_back(),
        _status(console, "reading") as status,
    ):
        progress = pipeline.Progress(begin=lambda text: status.update(_line(text)))
        results = pipeline.finished(directory, progress, model=model, hold=hold)
        pipeline.write_metrics(results)
        path = report.write_report(results)
    _print_warnings(console, results)
    for _, sentence in report.closing_sentences(results):
        _say(console, sentence)
    _say(console, "Written: ", (str(path), "bold"))


def _export(directory: Path, model: str | None = None, headers: bool = False, name: str | None = None) -> None:
    from .job import pipeline

    console = _console()
    with _native_messages_kept_back():
        paths = pipeline.export_directory(directory, model, headers, name)
    _warn_of_unfinished(directory)
    for path in paths:
        _say(console, "Written: ", (str(path), "bold"), f" ({path.stat().st_size:,} bytes)")
    if not any(path.suffix == ".onnx" for path in paths):
        _say(console, "To write .onnx files as well: pip install 'exactqat[onnx]'")


def _warn_of_unfinished(directory: Path) -> None:
    """On the error output, as what is printed is of what there is."""
    from .job import pipeline

    sentence = pipeline.unfinished(directory)
    if sentence:
        _say(_console(stderr=True), ("warning: ", "bold yellow"), f"{sentence}. These are its networks so far.")


def _check(name: str, shapes: Sequence[tuple[int, ...]], device: str, keep_final_activation: bool) -> None:
    import numpy as np

    from .job.imported import built
    from .qat.dry_run import HEADER, explain
    from .train.core.frameworks import framework_of

    model, variables = built(name)
    inputs: list[Any] = [np.zeros(shape, np.float32) for shape in shapes]
    if framework_of(model) == "torch":
        import torch

        inputs = [torch.from_numpy(each) for each in inputs]
    example = None if not inputs else inputs[0] if len(inputs) == 1 else tuple(inputs)
    try:
        found = explain(
            model, example, variables=variables, device=device, keep_final_activation=keep_final_activation or None
        )
    except TypeError as error:
        raise ValueError(f"{error} (--example SHAPE gives an input's shape)" if not inputs else str(error)) from error
    if not found:
        raise ValueError(" ".join(found.sentences()))
    console = _console()
    _show_table(console, f"{name} on {device}", HEADER, [(row, "") for row in found.rows()], texts=3)
    for sentence in found.sentences():
        _say(console, sentence)


def _compare(directories: Sequence[Path], html: Path | None) -> None:
    from .job import compare, files

    if html is not None and (html.exists() or html.is_symlink()):
        raise ValueError(f"{html} already exists and is not replaced")
    console = _console()
    jobs = [compare.read(directory) for directory in directories]
    if html is not None:
        files.write_atomically(html, compare.written(jobs).encode("utf-8", "backslashreplace"))
    changed: list[TableRow] = [(row, "") for row in compare.differing_settings(jobs)]
    if changed:
        header = ["setting", *(job.name for job in jobs)]
        _show_table(console, "Settings that differ", header, changed, texts=1)
    else:
        _say(console, "The jobs have the same settings.")
    networks: list[TableRow] = [(row, "") for row in compare.rows(jobs)]
    _show_table(
        console, "Delivered networks, on the device", compare.HEADER, networks, texts=compare.TEXTS, grouped=True
    )
    for sentence in compare.sentences(jobs):
        _say(console, f"{sentence}.")
    if html is not None:
        _say(console, "Written: ", (str(html), "bold"), whole=True)


def _print_results(console: "Console", results: "Results") -> None:
    from .job import findings, report

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
    title = f"{results.dataset.name}: accuracy on {tests} test images on {device}, and how many integers differ"
    header = ("network", "method", "accuracy", "to float", "runtime", "training")
    _show_table(console, title, header, rows, texts=2, grouped=True)
    explained = (
        "PTQ: post-training quantization. QAT: quantization-aware training. The second part names the source of the "
        "ranges. "
        "★ delivered (lower validation loss). To float: difference in points on the same test images, and the "
        "probability p that equally good networks differ this much (McNemar's exact test). Runtime: integers in which "
        "the file differs from its simulation; training: integers in which the device differs from what was trained. "
        "Input and logits keep 8 bits; codes of fewer bits are stored in 8-bit containers. "
        f"The job took {results.seconds:.0f} seconds."
    )
    _say(console, (explained, "dim"))
    if len(results.settings.precisions) > 1:
        widths: list[TableRow] = [(row, "") for row in findings.width_rows(results)]
        _show_table(console, "What fewer bits cost and save", findings.WIDTHS_HEADER, widths, texts=1)
        _say(console, (findings.WIDTHS_NOTE, "dim"))
    _print_warnings(console, results)
    for good, sentence in report.closing_sentences(results):
        _say(console, _verdict(sentence, good))


def _print_warnings(console: "Console", results: "Results") -> None:
    from .job import findings

    for sentence in findings.warnings_on(results):
        _say(console, ("warning: ", "bold yellow"), sentence)


def _colored(differing: int) -> tuple[str, str]:
    return f"{differing:,}", "red" if differing else "green"


def _verdict(sentence: str, good: bool) -> tuple[str, str]:
    return sentence, "bold green" if good else "bold red"


def _verify_npu(directory: Path, accelerator: str, model: str | None = None) -> None:
    from .deploy.footprint import DEFAULT_ACCELERATOR
    from .job import pipeline

    console = _console()
    accelerator = accelerator or DEFAULT_ACCELERATOR
    with _native_messages_kept_back(), _status(console, "compiling with Vela"):
        found = pipeline.npu_directory(directory, accelerator, model)
    rows: list[TableRow] = []
    for precision, footprint in found.items():
        left = ", ".join(f"{count} {kind}" for kind, count in footprint.operators_on_cpu.items()) or "none"
        figures = (footprint.sram_bytes, footprint.flash_bytes, footprint.cycles)
        rows.append(([precision.upper(), left, *(f"{figure:,}" for figure in figures)], ""))
    header = ("network", "operators left to the processor", "SRAM bytes", "flash bytes", "cycles, estimated")
    _show_table(console, f"{directory} on {accelerator}, compiled by Vela", header, rows, texts=2)
    _say(console, "The NPU itself is not run here, so nothing is claimed about its integers.")


def _verify(directory: Path, quiet: bool, model: str | None = None, device: str | None = None) -> bool:
    """Compares, prints, and says whether all integers are equal."""
    from .job import devices

    named, choice = ("", "") if device is None else devices.device_to_verify(device)
    if named == devices.NPU:
        _verify_npu(directory, choice, model)
        return True
    if choice:
        from .deploy import emulation

        os.environ["EXACTQAT_ARM64_CPU"] = emulation.cpu_named(choice)

    import torch

    from .job import pipeline
    from .job.text import shell_word

    console = _console()
    torch.set_num_threads(1)
    with _native_messages_kept_back(), _bars(console, disable=quiet) as bars:
        task = bars.add_task("comparing", total=None)
        progress = pipeline.Progress(
            begin=lambda text: bars.reset(task, description=text, total=None),
            compared=lambda done, all: bars.update(task, completed=done, total=all),
        )
        found = pipeline.verify_directory(directory, progress, model=model, device=named)
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
            _say(console, f"{precision.upper()}: ", _verdict(f"{sentence}.", good))
    _warn_of_unfinished(directory)
    report = next(iter(found.values())).report
    if any(each.report.training_differing for each in found.values()):
        out = directory.with_name(f"{directory.resolve().name}-{report.profile}")
        _say(console, f"{report.profile} does not compute what was trained. Retrain the last phase for it:")
        command = f"exactqat train --from {shell_word(directory)} --device {report.profile} --out {shell_word(out)}"
        _say(console, (f"  {command}{_model_option(model)}", "bold"), whole=True)
    not_run = [each.not_run for each in found.values() if each.not_run]
    if not_run and not any(each.differing for each in found.values()):
        raise RuntimeError(f"the files were not run: {not_run[0]}")
    return not any(each.differing for each in found.values())


def _inspect(
    file: Path,
    data: Path | None,
    examples: int,
    devices: Sequence[str] | None,
    seed: int,
    as_json: bool,
    reduced: Path | None,
) -> bool:
    """Prints what is in a file and how devices compute it, and says whether what is claimed to be equal is."""
    from .deploy.inspect import inspect as inspect_file
    from .deploy.inspect import read_arrays
    from .deploy.reduce import reduce as reduce_file

    console, errors = _console(), _console(stderr=True)
    arrays = None if data is None else read_arrays(data)
    with _status(errors, "reading") as status:
        found = inspect_file(file, arrays, examples, devices or None, seed, progress=status.update)
    # A program may read it: nothing is wrapped or styled.
    console.print(found.as_json() if as_json else found.text(min(_columns(), 100)), soft_wrap=True)
    if reduced is not None:
        with _status(errors, "reducing") as status:
            made = reduce_file(file, reduced, arrays, examples, devices or None, seed, progress=status.update)
        said = (
            "nothing to reduce: no device differs" if made is None else f"{made.graph}, {made.arrays}: {made.sentence}"
        )
        errors.print(said, soft_wrap=True)
    if not found.ran_on:
        raise ValueError(f"{file} ran on no device, nothing was compared; the reasons are above")
    return found.equal


def _model_option(model: str | None) -> str:
    from .job.text import shell_word

    return "" if model is None else f" --model {shell_word(model)}"


def _print_comparison(console: "Console", directory: Path, precision: str, found: "Verified") -> None:
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
        _show_table(console, title, header, rows, texts=2)


if __name__ == "__main__":
    main()
