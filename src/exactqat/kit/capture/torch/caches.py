# SPDX-License-Identifier: Apache-2.0
"""Tables that a model's functions keep by `functools.lru_cache`: what a run without values leaves there, the next call
would get, the user's own as well."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_CACHED = type(functools.lru_cache(len))
# They keep no tensors of a model, but many and large tables.
_OTHERS = frozenset({"exactqat", "jax", "mpmath", "numpy", "scipy", "sympy", "torch", *sys.stdlib_module_names})


class Caches:
    """Those of functions and methods in modules that may be a model's; modules that come later are looked at, too."""

    def __init__(self) -> None:
        self._read: set[str] = set()
        self._found: list[Any] = []

    def forget_tensors_without_values(self) -> None:
        """Empties the caches that hold some."""
        for name in [name for name in sys.modules if name not in self._read]:
            self._read.add(name)
            if name == "__main__" or name.partition(".")[0] not in _OTHERS:
                self._found += _caches_of(sys.modules.get(name))
        for each in self._found:
            if each.cache_info().currsize and _holds(each):
                each.cache_clear()


def _caches_of(module: Any) -> Iterator[Any]:
    for value in list(getattr(module, "__dict__", {}).values()):
        if type(value) is _CACHED:
            yield value
        elif issubclass(type(value), type):
            for each in list(vars(value).values()):
                function = each.__func__ if type(each) in (staticmethod, classmethod) else each
                if type(function) is _CACHED:
                    yield function


def _holds(cache: Any) -> bool:
    pending, seen = [cache], set[int]()
    while pending:
        for each in gc.get_referents(pending.pop()):
            if isinstance(each, torch.Tensor):
                if isinstance(each, FakeTensor) or each.is_meta:
                    return True
            elif id(each) not in seen and type(each).__name__ in ("dict", "list", "tuple", "_lru_list_elem"):
                seen.add(id(each))
                pending.append(each)
    return False


__all__ = ["Caches"]
