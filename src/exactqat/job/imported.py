# SPDX-License-Identifier: Apache-2.0
"""A user's own model, by the name of the Python object that holds or builds it."""

from __future__ import annotations

import importlib
import inspect
import sys
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


def built(name: str) -> tuple[Any, Any]:
    """A model and its variables, None if it holds them itself.

    Args:
        name: of a model, or of a class or function without arguments that makes one; for JAX, of a function that
            returns a pair, the model and its variables.

    Raises:
        ValueError: it cannot be loaded, or fails.
    """
    found = imported(name)
    if inspect.isclass(found) or inspect.isfunction(found):
        try:
            found = found()
        except (Exception, SystemExit) as error:
            raise ValueError(f"model {name!r} failed when called without arguments: {described(error)}") from error
    model, variables = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    return model, variables


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
