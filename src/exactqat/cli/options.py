# SPDX-License-Identifier: Apache-2.0
"""The commands by name, and the options that several of them have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

Answer = TypeVar("Answer", bound=Callable[..., bool | None])


@dataclass(frozen=True)
class Command:
    """A command; takes_more: arguments beside those it names."""

    function: Callable[..., bool | None]
    short_help: str
    takes_more: bool


COMMANDS: dict[str, Command] = {}


def command(short_help: str, name: str = "", takes_more: bool = False) -> Callable[[Answer], Answer]:
    """Registers a function as the command of its name."""

    def registered(function: Answer) -> Answer:
        COMMANDS[name or function.__name__] = Command(function, short_help, takes_more)
        return function

    return registered


def path_in(text: str) -> Path:
    """What an option names. For pathlib an empty name, as from an unset variable, is the working directory."""
    if not text:
        raise typer.BadParameter("must not be empty")
    return Path(text)


# Options shared by several commands.
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A directory written by `exactqat train`.")]
DirectoryOrFile = Annotated[
    Path, typer.Argument(metavar="DIR|FILE", help="A directory written by `exactqat train`, or a .tflite file.")
]
Model = Annotated[
    str | None,
    typer.Option(help="The network's name, unless it is one of exactqat's own: files must not decide what code runs."),
]
Precision = Annotated[str | None, typer.Option(metavar="NAME", help="Only this network of the job, such as w8a8.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
EXAMPLES = "Inputs, and their classes y; by default the {} images of the job in DIR."
TestExamples = Annotated[Path | None, typer.Option(metavar="X.npz", help=EXAMPLES.format("test"))]
OtherExamples = Annotated[Path | None, typer.Option(metavar="X.npz", help=EXAMPLES.format("validation"))]
MetricName = Annotated[
    str,
    typer.Option(
        "--metric",
        metavar="METRIC",
        help="accuracy, noise (of the outputs, without classes), or a function of outputs and targets y as "
        "module:function, such as metrics:mean_iou of metrics.py in this folder.",
    ),
]
