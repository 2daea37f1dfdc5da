# SPDX-License-Identifier: Apache-2.0
"""Calls that a checkpoint (`torch.utils.checkpoint`) runs once more in the backward pass.

They compute what they did: on the ranges and statistics from before the call. These move once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .state import ModuleState

# How many calls may wait for their backward passes.
_RECENT = 64


class _Call:
    """A call that may be repeated.

    Attributes:
        inputs: what they are recognized by.
        before: what it moves, as it was.
        task: the backward pass that has repeated it last.
    """

    def __init__(self, inputs: bytes, before: list[Tensor]) -> None:
        self.inputs, self.before, self.task = inputs, before, -1


class Repeats:
    """Remembers what calls of a model move, and puts it back while one is repeated."""

    def __init__(self, state: ModuleState) -> None:
        self._state = state
        self._recent: deque[_Call] = deque(maxlen=_RECENT)

    @contextmanager
    def as_before(self, arguments: Any) -> Iterator[None]:
        """Around a call: if it is a repeated one, what it reads and moves is as it was before that call."""
        repeated = _is_recomputing()
        if not (repeated or _may_be_repeated()) or not self._state.moves():
            yield
            return
        moving, inputs = self._state.moving(), _fingerprint(arguments)
        if not repeated:
            self._recent.append(_Call(inputs, [held[name].clone() for held, name in moving]))
            yield
            return
        present = [held[name] for held, name in moving]
        for (held, name), value in zip(moving, self._call_of(inputs).before, strict=True):
            held[name] = value.clone()
        try:
            yield
        finally:
            for (held, name), value in zip(moving, present, strict=True):
                held[name] = value
            for grid in self._state.grids().values():
                grid.forget_shown()

    def _call_of(self, inputs: bytes) -> _Call:
        """The latest call with these inputs that the current backward pass has not repeated yet."""
        task = torch._C._current_graph_task_id()
        for call in reversed(self._recent):
            if call.inputs == inputs and call.task != task:
                call.task = task
                return call
        raise RuntimeError(
            "a prepared model runs in a backward pass, on inputs that none of its recent calls had: with "
            "torch.utils.checkpoint, give the same inputs in both passes"
        )


def _is_recomputing() -> bool:
    """Whether this runs as part of a backward pass, such as when `torch.utils.checkpoint` recomputes."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _may_be_repeated() -> bool:
    """Whether this may be the first pass of a checkpoint: it replaces what is saved for the backward pass, or, a
    reentrant one, records no gradients."""
    if torch.compiler.is_compiling():
        return False
    return not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _fingerprint(arguments: Any) -> bytes:
    """A number for each tensor that tells it from others: the sum of its bits."""
    tensors = [each.detach() for each in tree_leaves(arguments) if isinstance(each, Tensor)]
    floats = [each.to(torch.float32) if each.is_floating_point() else each for each in tensors]
    bits = [each.contiguous().view(torch.int32) if each.is_floating_point() else each for each in floats]
    return repr([(tuple(each.shape), int(each.sum(dtype=torch.int64))) for each in bits]).encode()
