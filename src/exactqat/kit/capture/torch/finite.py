# SPDX-License-Identifier: Apache-2.0
"""Guards of models against infinity and NaN: `if not torch.isfinite(x).all(): ...`. A device's numbers are finite."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# What is true of every finite number, and what truth values of such are combined by.
_OF_FINITE = {"isfinite": True, "isinf": False, "isnan": False}
_SAME = ("all", "any")
_NOT = ("logical_not", "bitwise_not", "__invert__")
_OR = ("logical_or", "bitwise_or", "__or__")


class Finite(TorchFunctionMode):
    """While it lasts, a branch on whether numbers are finite is the one for finite numbers."""

    def __init__(self) -> None:
        super().__init__()
        # By the identity of a tensor, which is kept so that no other one gets it: what it holds everywhere.
        self.known: dict[int, tuple[torch.Tensor, bool]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        given = [self.known[id(each)][1] for each in args if id(each) in self.known]
        if name == "__bool__" and given:
            return given[0]
        result = func(*args, **(kwargs or {}))
        holds = None
        if name in _OF_FINITE:
            holds = _OF_FINITE[name]
        elif given and name in _SAME:
            holds = given[0]
        elif given and name in _NOT:
            holds = not given[0]
        elif len(given) == 2 and name in _OR:
            holds = any(given)
        if holds is not None and isinstance(result, torch.Tensor):
            self.known[id(result)] = result, holds
        return result
