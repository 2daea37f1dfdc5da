# SPDX-License-Identifier: Apache-2.0
"""Dispatch: the module for each framework, loaded with its first array, or immediately if PyTorch is already loaded.

A process that is forked while another thread imports a module waits for that module's lock forever: the thread that
holds it does not exist in the child. Data loaders fork. So everything PyTorch needs is loaded early, and a fork waits
for unfinished imports of this package.
"""

import contextlib
import importlib
import os
import sys
from types import ModuleType

from exactqat.operators.declarations.dispatch import FRONTENDS

# Import statements rather than import_module: torch.compile can follow them when the first call is a compiled one.


def _numpy() -> ModuleType:
    import exactqat.operators.numpy

    return exactqat.operators.numpy


def _torch() -> ModuleType:
    import exactqat.operators.torch

    return exactqat.operators.torch


def _jax() -> ModuleType:
    import exactqat.operators.jax

    return exactqat.operators.jax


def _tensorflow() -> ModuleType:
    import exactqat.operators.tensorflow

    return exactqat.operators.tensorflow


FRONTENDS.update(numpy=_numpy, torch=_torch, jax=_jax, tensorflow=_tensorflow)


def _is_loading(name: str) -> bool:
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


def load_early() -> None:
    """What PyTorch's tensors need, if PyTorch is there already."""
    if sys.modules.get("torch") is not None and not _is_loading("torch"):
        with contextlib.suppress(ImportError):  # the first call on its tensors says why
            _torch()


def _finish_loading() -> None:
    """Waits until no thread is in the middle of importing a part of this package."""
    for name in list(sys.modules):
        if name.startswith("exactqat.") and _is_loading(name):
            with contextlib.suppress(Exception):  # which the thread that imports it will see
                importlib.import_module(name)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_finish_loading)
