# SPDX-License-Identifier: Apache-2.0
"""The commands as one typer application, and how each of them ends."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand

from . import accuracy, commands  # noqa: F401  they register what they define
from .options import COMMANDS, Command
from .terminal import columns, console_of, in_terminal, say

ORDER = ("train", "report", "export", "verify", "inspect", "convert", "identify", "gate", "tune", "check", "compare")


class Negative(SystemExit):
    """Exits with status 1: the answer to a command's question is no. It means this and nothing else."""

    def __init__(self) -> None:
        super().__init__(1)


class Grouped(TyperCommand):
    """A command whose help has its options in groups where no boxes are drawn, too."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                is_argument = parameter.param_type_name == "argument"
                group = getattr(parameter, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
                name = str(parameter.metavar) if is_argument else record[0]  # without its type
                groups.setdefault(group, []).append((name, record[1]))
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


def command_line() -> typer.Typer:
    # Boxes cut sentences into pieces that no program downstream reassembles.
    framed = in_terminal(console_of()) and in_terminal(console_of(stderr=True))

    application = typer.Typer(
        name="exactqat",
        help="Quantization-aware training with TensorFlow's exact operators: what you train is what the device does.",
        epilog="Start with: exactqat train --out runs/digits (about a minute and a half on two cores)",
        rich_markup_mode="markdown" if framed else None,
        context_settings={"help_option_names": ["-h", "--help"], "terminal_width": min(columns(), 100)},
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )

    @application.callback()
    def program(version: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
        pass  # main shows it

    for name in ORDER:
        command = COMMANDS[name]
        sentences = (inspect.getdoc(command.function) or "").partition("\n\nArgs:")[0]
        application.command(
            name, cls=Grouped, short_help=command.short_help, help=sentences,
            context_settings={"allow_extra_args": command.takes_more},
        )(answered(command))  # fmt: skip
    return application


def answered(command: Command) -> Callable[..., None]:
    """The command's function, whose answer False is status 1. Expected failures end with one clear message, anything
    else is a defect and keeps its traceback; status 2."""

    def fail(first: str, rest: str, status: int = 2) -> NoReturn:
        say(console_of(stderr=True), (first, "bold red"), rest)
        raise typer.Exit(status) from None

    @functools.wraps(command.function)
    def run(*arguments: object, **options: object) -> None:
        try:
            answer = command.function(*arguments, **options)
        except ModuleNotFoundError:
            raise
        except KeyboardInterrupt:
            fail("stopped", " by the keyboard; continue training with --resume", 130)
        except (ValueError, OSError, RuntimeError, ImportError, EOFError, MemoryError) as error:
            if os.environ.get("EXACTQAT_TRACEBACK"):
                raise
            fail("error:", f" {error or type(error).__name__}")
        if answer is False:
            raise Negative

    return run
