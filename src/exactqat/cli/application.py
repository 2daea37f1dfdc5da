# SPDX-License-Identifier: Apache-2.0
"""The commands and their options, for typer.

Annotations are evaluated here: typer reads them inside `command_line`, where its import lives.
"""

import contextlib
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

from ..application.job import options
from . import accuracy, commands
from .terminal import columns, console_of, is_terminal, say
from .train_options import with_settings

INSTALL = "pip install 'exactqat[job]'"
Answer = TypeVar("Answer", bound=Callable[..., bool | None])


class Negative(SystemExit):
    """Exits with status 1: the answer to a command's question is no. It means this and nothing else."""

    def __init__(self) -> None:
        super().__init__(1)


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8})*", text, re.ASCII):
        raise ValueError(f"--example must be a shape such as 1x3x224x224, got {text!r}")
    return tuple(int(size) for size in text.split("x"))


def _path(text: str) -> Path:
    """What an option names. For pathlib an empty name, as from an unset variable, is the working directory."""
    import typer

    if not text:
        raise typer.BadParameter("must not be empty")
    return Path(text)


def version() -> str:
    from exactqat import __version__

    return f"exactqat {__version__}"


def command_line() -> Any:
    import typer

    # Boxes cut sentences into pieces that no program downstream reassembles.
    framed = is_terminal(sys.stdout) and is_terminal(sys.stderr)

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
        context_settings={"help_option_names": ["-h", "--help"], "terminal_width": min(columns(), 100)},
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )

    def command(name: str | None = None, short_help: str = "", **options: Any) -> Callable[[Answer], Answer]:
        """Registers a command whose answer False is status 1; what is known to fail ends with one message and 2."""

        def registered(function: Answer) -> Answer:
            @functools.wraps(function)
            def answered(*given: Any, **named: Any) -> None:
                with _failures():
                    answer = function(*given, **named)
                if answer is False:
                    raise Negative

            text = written(inspect.cleandoc(function.__doc__ or ""))
            application.command(name, short_help=short_help, help=text, **options)(answered)
            return function

        return registered

    # Options shared by several commands.
    Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A directory written by `exactqat train`.")]
    Judged = Annotated[
        Path, typer.Argument(metavar="DIR|FILE", help="A directory written by `exactqat train`, or a .tflite file.")
    ]
    Model = Annotated[
        str | None,
        typer.Option(
            help="The network's name, unless it is one of exactqat's own: files must not decide what code runs."
        ),
    ]
    Precision = Annotated[str | None, typer.Option(metavar="NAME", help="Only this network of the job, such as w8a8.")]
    AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]

    examples = "Inputs, and their classes y; by default the {} images of the job in DIR."
    TestExamples = Annotated[Path | None, typer.Option(metavar="X.npz", help=examples.format("test"))]
    OtherExamples = Annotated[Path | None, typer.Option(metavar="X.npz", help=examples.format("validation"))]

    MetricName = Annotated[
        str,
        typer.Option(
            "--metric",
            metavar="METRIC",
            help="accuracy, noise (of the outputs, without classes), or a function of outputs and targets y as "
            "module:function, such as metrics:mean_iou of metrics.py in this folder.",
        ),
    ]

    def show_version(asked: bool) -> None:
        if asked:
            typer.echo(version())
            raise typer.Exit

    @application.callback()
    def program(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None:
        pass

    @command(short_help="Train, quantize, deploy and verify a network.", context_settings={"allow_extra_args": True})
    @with_settings
    def train(
        context: typer.Context,
        out: Annotated[
            Path,
            typer.Option(
                parser=_path,
                metavar="DIR",
                help="Directory for checkpoints, .tflite files, metrics.json and report.html.",
            ),
        ],
        accelerator: Annotated[
            str,
            typer.Option(help="Where to train: cpu, or cuda (needs a GPU)."),
        ] = "cpu",
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
        keep_going: Annotated[
            bool,
            typer.Option(
                "--keep-going", help="Quantize a float network that is no better than guessing, instead of stopping."
            ),
        ] = False,
        tensorboard: Annotated[
            bool,
            typer.Option(
                "--tensorboard", help="Also write DIR/tensorboard for TensorBoard, in addition to DIR/training/*.csv."
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
            given["bits"] = options.pairs([*given["bits"], *context.args])
        return commands.train(
            out, given, resume, restart, quiet, accelerator, keep_going=keep_going, tensorboard=tensorboard
        )

    @command(short_help="Write DIR/report.html again, without training.")
    def report(
        directory: Directory,
        model: Model = None,
    ) -> None:
        """Write DIR/report.html again: reload, evaluate and compare the networks in DIR without training."""
        commands.report(directory, model)

    @command(short_help="Write the files of DIR again: .tflite, .onnx, C headers.")
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
                help="Prefix of the header's file name and of every name in it, followed by the precision; by "
                "default the job's name. Two networks in one firmware need two names.",
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
        """Write model.tflite, and model.onnx if the package onnx is installed, from DIR's checkpoints. Needs no
        data."""
        for option, value in (("--name", name), ("--device", device)):
            if value is not None and not c_array:
                raise ValueError(f"{option} is for the C header: add --c-array")
        commands.export(directory, model, c_array, name, device or "micro")

    @command(short_help="Compare DIR's files with the device again.")
    def verify(
        directory: Directory,
        model: Model = None,
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
    ) -> bool:
        """Run DIR's files on the device runtime again, and compare **every integer** with the checkpoints' simulation,
        and the device with what was trained.

        Exit status 1 if any integer differs, in either comparison; 2 if anything else goes wrong.
        """
        return commands.verify(directory, quiet, model, device)

    @command("inspect", short_help="Say what is in a quantized file and where devices differ.")
    def inspect_file(
        file: Annotated[
            Path, typer.Argument(metavar="FILE", help="A quantized .tflite or .onnx file, whoever wrote it.")
        ],
        data: Annotated[
            Path | None,
            typer.Option(
                parser=_path,
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
        html: Annotated[
            Path | None, typer.Option(metavar="PAGE.html", help="Write everything as a page too, in one file.")
        ] = None,
        reduce: Annotated[
            Path | None,
            typer.Option(
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
        return commands.inspect(file, data, examples, device, seed, as_json, float_file, html, reduce)

    @command(short_help="Say whether networks are good enough on their devices.")
    def gate(
        path: Judged,
        data: TestExamples = None,
        device: Annotated[
            list[str] | None,
            typer.Option(
                help="Device whose integers are judged: xnnpack-x86, xnnpack-arm64, reference, micro; several times "
                "for several; all have to pass. By default the one that the network was trained for."
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
                help="How many of the outputs' integers may differ from those of the device that the network was "
                "trained for.",
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
        return accuracy.gate(
            path, data, device, min_accuracy, max_differ, beside, precision, model, run, as_json, metric,
            (min_score, max_score),
        )  # fmt: skip

    @command(short_help="Say which layers cost accuracy on the device, and why.")
    def tune(
        path: Judged,
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
                help="Search for ranges, biases and roundings with which the network is more accurate, without "
                "training, and write it to this .tflite file.",
            ),
        ] = None,
        budget: Annotated[int, typer.Option(min=1, help="The most evaluations of a search.")] = 300,
        plan: Annotated[
            Path | None,
            typer.Option(
                metavar="FILE",
                help="Find the bits of each layer with which the network keeps to the budgets below, and write them to "
                "this text file of rules, which people and `qat.load_rules` read. If the same bits in all layers keep "
                "to the budgets too, they go beside it, as rules-even.txt beside rules.txt: train both.",
            ),
        ] = None,
        max_drop: Annotated[
            str | None,
            typer.Option(metavar="DROP", help="The most accuracy that a plan may lose, such as 0.5% or 0.005."),
        ] = None,
        flash: Annotated[str | None, typer.Option(metavar="BYTES", help="The largest file, such as 256k.")] = None,
        arena: Annotated[
            str | None, typer.Option(metavar="BYTES", help="The largest arena of TFLite-Micro, such as 64k.")
        ] = None,
        multiply_adds: Annotated[
            str | None,
            typer.Option(metavar="COUNT", help="The most multiply-adds, in those of 8 by 8 bits, such as 10M."),
        ] = None,
        cycles: Annotated[
            str | None, typer.Option(metavar="COUNT", help="The most cycles on an Ethos-U, as Vela estimates them.")
        ] = None,
        seed: Annotated[int, typer.Option(min=0, help="Of the examples that a search holds out.")] = 0,
        model: Model = None,
        as_json: AsJson = False,
    ) -> bool:
        """Say which layers cost accuracy on the device, how much and why, in the device's own integers.

        With --plan: find the bits of each layer instead. Exit status 1 if no plan keeps to the budgets; the nearest
        is written then.
        """
        budgets = {
            "max_drop": max_drop, "flash": flash, "arena": arena, "multiply_adds": multiply_adds, "cycles": cycles,
        }  # fmt: skip
        if plan is not None:
            return accuracy.plan(
                path, data, device, precision, model, examples, picture, plan, budgets, as_json, metric,
                lower_is_better,
            )  # fmt: skip
        accuracy.tune(
            path, data, device, precision, model, examples, picture, search, budget, seed, budgets, as_json, metric,
            lower_is_better,
        )  # fmt: skip
        return True

    @command(short_help="Say whether a model can run on a device.")
    def check(
        model: Annotated[
            str,
            typer.Argument(
                metavar="MODEL",
                help="package.module:name of a PyTorch, Keras or Flax model, or of a function that returns one, "
                "without arguments or, as train --model takes it, of shape and classes; for JAX, of one that returns "
                "the function or module and its parameters; timm/NAME or torchvision/NAME.",
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
        shapes = [_shape(text) for text in example or []]
        return commands.check(model, shapes, classes, device, keep_final_activation)

    # The third directory and those after it are extra arguments: help on a list of them would name Python's type.
    @command(context_settings={"allow_extra_args": True}, short_help="Compare finished jobs: settings and networks.")
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
        commands.compare([first, second, *map(Path, context.args)], html)

    return application


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Expected failures end with one clear message; anything else is a defect and keeps its traceback; status 2."""
    import typer

    def fail(first: str, rest: str) -> None:
        say(console_of(stderr=True), (first, "bold red"), rest)

    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("exactqat"):
            raise
        fail("error:", f" {error.name} is not installed. Install it with: {INSTALL}")
    except KeyboardInterrupt:
        fail("stopped", " by the keyboard; continue training with --resume")
        raise typer.Exit(130) from None
    except (ValueError, OSError, RuntimeError, ImportError, EOFError, MemoryError) as error:
        if os.environ.get("EXACTQAT_TRACEBACK"):
            raise
        fail("error:", f" {error or type(error).__name__}")
    else:
        return
    raise typer.Exit(2)
