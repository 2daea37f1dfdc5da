# SPDX-License-Identifier: Apache-2.0
"""Notices a forward that takes a batch apart, before an export of the stand-in's many examples takes minutes."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..core.refusals import Refused

# Results without a batch, of tensors with one, that say that a loop is at work.
_MANY = 32


class OneByOne(TorchFunctionMode):
    """While it lasts, refuses a forward that goes through the examples of a batch one by one."""

    def __init__(self, batch: int) -> None:
        """batch: every size that follows the batch is a multiple of it, and nothing else is."""
        super().__init__()
        self.batch = batch
        self.taken = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, tuple | list):
            apart = len(result) >= self.batch and isinstance(result[0], torch.Tensor)
        else:
            apart = False
            if isinstance(result, torch.Tensor) and args and self._has_batch(args[0]) and not self._has_batch(result):
                self.taken += 1
                apart = self.taken > _MANY
        if apart:
            raise Refused(
                "forward goes through the examples of a batch one by one; what it does must be the same operation on "
                "all of them"
            )
        return result

    def _has_batch(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and any(size and size % self.batch == 0 for size in value.shape)
