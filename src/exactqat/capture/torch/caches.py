# SPDX-License-Identifier: Apache-2.0
"""Tables that a model's functions keep by `functools.lru_cache`: what a run without values leaves there, the next call
would get, the user's own as well."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_CACHED = type(functools.lru_cache(len))


@functools.lru_cache(maxsize=1)
def _known(modules: int, model: type) -> Iterable[Any]:
    """All functions with a cache, as long as neither more modules are there nor another model is looked at."""
    return weakref.WeakSet(each for each in gc.get_objects() if type(each) is _CACHED and each is not _known)


def forget_tensors_without_values(model: type) -> None:
    """Empties the caches that hold some."""
    for each in list(_known(len(sys.modules), model)):
        if each.cache_info().currsize and _holds(each):
            each.cache_clear()


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


__all__ = ["forget_tensors_without_values"]
