# SPDX-License-Identifier: Apache-2.0
"""The options of `exactqat train`, made from what `job.options` declares."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field
from typing import Annotated, Any

from ..application.job.options import declared
from ..application.report.text import option_of, option_value


def with_settings(command: Callable[..., bool]) -> Callable[..., bool]:
    """The command with an option for each setting instead of its ``**settings``, after its required options."""
    signature = inspect.signature(command)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    settings = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=_default(each), annotation=_option(each))
        for each in declared()
    ]
    first = [each for each in own if each.default is each.empty]
    parameters = [each.replace(kind=each.KEYWORD_ONLY) for each in (*first, *settings, *own[len(first) :])]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _default(setting: Field[Any]) -> Any:
    """As a user would write it: the option parses it."""
    value = setting.default
    return value if value is None or isinstance(value, bool) else option_value(value)


def _option(setting: Field[Any]) -> Any:
    import typer

    about = setting.metadata
    names = about["names"] or (option_of(setting.name),)
    if setting.type == "bool":
        return Annotated[bool, typer.Option(*names, help=about["help"], rich_help_panel=about["group"])]
    metavar = about["metavar"] or ("INTEGER" if str(setting.type).startswith("int") else setting.name.upper())
    return Annotated[
        Any,
        typer.Option(
            *names, parser=_reader(setting), metavar=metavar, help=about["help"], rich_help_panel=about["group"]
        ),
    ]


def _reader(setting: Field[Any]) -> Callable[[str], Any]:
    """Parses a setting from the given text."""
    about = setting.metadata

    def read(text: str) -> Any:
        import typer

        if about["path"] and not text:
            # For pathlib an empty name, as from an unset variable, is the working directory.
            raise typer.BadParameter("must not be empty")
        try:
            return about["check"](about["read"](text) if about["read"] else text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return read


__all__ = ["with_settings"]
