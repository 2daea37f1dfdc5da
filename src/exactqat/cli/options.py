# SPDX-License-Identifier: Apache-2.0
"""The commands by name, and their options: the help of each is what the function's docstring says of the argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer

from ..application.job.settings import Settings, declared, documented, option_of, option_value, rules_in

Answer = TypeVar("Answer", bound=Callable[..., bool | None])


@dataclass(frozen=True)
class Command:
    """A command; takes_more: arguments beside those it names."""

    function: Callable[..., bool | None]
    short_help: str
    takes_more: bool


COMMANDS: dict[str, Command] = {}


def path_in(text: str) -> Path:
    """What an option names. For pathlib an empty name, as from an unset variable, is the working directory."""
    if not text:
        raise typer.BadParameter("must not be empty")
    return Path(text)


def command(short_help: str, name: str = "", takes_more: bool = False) -> Callable[[Answer], Answer]:
    """Registers a function as the command of its name.

    Each parameter is an option, a path one with a file's name; what `Annotated` says, such as another name or a
    metavar, is kept. ``**settings`` is an option for each field of `Settings`, after the required options.
    """

    def registered(function: Answer) -> Answer:
        signature, helps = inspect.signature(function, eval_str=True), documented(function)
        own, settings = [], []
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                settings = [_of_setting(setting) for setting in declared()]
                continue
            bare, *more = [parameter.annotation]
            if get_origin(bare) is Annotated:
                bare, *more = get_args(bare)
            annotation: Any = bare
            if bare is not typer.Context:
                about = more[0] if more else typer.Option(*[option_of(parameter.name)] * (bare is bool))
                about.help = about.help or helps.get(parameter.name)
                if bare is not bool:
                    kinds = {int: "INTEGER", float: "NUMBER", int | None: "INTEGER", float | None: "NUMBER"}
                    about.metavar = about.metavar or kinds.get(bare, parameter.name.upper())
                if isinstance(about, typer.models.OptionInfo) and bare in (Path, Path | None):
                    about.parser = path_in
                annotation = Annotated[bare, about]
            own.append(parameter.replace(annotation=annotation, kind=parameter.KEYWORD_ONLY))
        required = [parameter for parameter in own if parameter.default is parameter.empty]
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*required, *settings, *(parameter for parameter in own if parameter not in required)]
        )
        function.__annotations__ = {
            parameter.name: parameter.annotation
            for parameter in function.__signature__.parameters.values()  # type: ignore[attr-defined]
        }
        COMMANDS[name or function.__name__] = Command(function, short_help, takes_more)
        return function

    return registered


def _of_setting(setting: Field[Any]) -> inspect.Parameter:
    """The option of a setting, which its check parses: a default is written as a user would."""
    about, is_switch = setting.metadata, isinstance(setting.default, bool)

    def parsed(text: str) -> object:
        try:
            return about["check"](rules_in(text) if setting.name == "rules" else text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    option = typer.Option(
        *(about["names"] or [option_of(setting.name)]), help=documented(Settings)[setting.name],
        rich_help_panel=about["group"], parser=None if is_switch else parsed,
        metavar=None if is_switch else about["metavar"] or setting.name.upper(),
    )  # fmt: skip
    default = setting.default if isinstance(setting.default, bool | None) else option_value(setting.default)
    kind: Any = bool if is_switch else Any
    annotation = Annotated[kind, option]
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def metavar(name: str) -> Any:
    """An option whose value is called so."""
    return typer.Option(metavar=name)


# Arguments and options that several commands have.
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
MetricName = Annotated[
    str,
    typer.Option(
        "--metric",
        metavar="METRIC",
        help="accuracy, noise (of the outputs, without classes), or a function of outputs and targets y as "
        "module:function, such as metrics:mean_iou of metrics.py in this folder.",
    ),
]
