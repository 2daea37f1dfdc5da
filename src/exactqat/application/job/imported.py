# SPDX-License-Identifier: Apache-2.0
"""A user's own model, by the name of the Python object that holds or builds it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence
from typing import Any


def imported(name: str) -> Any:
    """The object called ``"package.module:name"``; runs that module.

    Raises:
        ValueError: the name is not of this form, or the module or the object in it cannot be loaded.
    """
    module_name, _, object_name = name.partition(":")
    if not module_name or not object_name:
        raise ValueError(f"model must be 'package.module:function', got {name!r}")
    if "" not in sys.path:
        # Console scripts lack the working directory, where the user's module may be. Only here, and last: imports of
        # the libraries must not be found there.
        sys.path.append("")
    try:
        return getattr(importlib.import_module(module_name), object_name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"model {name!r} cannot be loaded: {described(error)}") from error


def built(name: str, shape: Sequence[int], classes: int) -> tuple[Any, Any]:
    """A model and its variables, None if it holds them itself.

    Args:
        name: of a model, or of a class or function that makes one: of two arguments, which are the shape of an input
            without the batch and the number of classes, or of none. For JAX, it returns a pair, the model and its
            variables.

    Raises:
        ValueError: it cannot be loaded, or fails.
    """
    made = imported(name)
    if inspect.isclass(made) or inspect.isfunction(made):
        needed = [p for p in inspect.signature(made).parameters.values() if p.default is p.empty]
        takes = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in needed)
        arguments = (tuple(shape), classes) if takes else ()
        try:
            made = made(*arguments)
        except (Exception, SystemExit) as error:
            called = ", ".join(map(str, arguments)) or "no arguments"
            raise ValueError(f"model {name!r} failed when called with {called}: {described(error)}") from error
    model, variables = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    return model, variables


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
