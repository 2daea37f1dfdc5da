# SPDX-License-Identifier: Apache-2.0
"""Calls that a checkpoint (`torch.utils.checkpoint`) runs once more in the backward pass.

They compute what they did: on the ranges and statistics from before the call. These move once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .state import ModuleState

# How many calls may wait for their backward passes.
_RECENT = 64


@dataclass(eq=False)
class _Call:
    """A call that may be repeated.

    Attributes:
        inputs: what they are recognized by.
        before: what it moves, as it was.
        task: the backward pass that has repeated it last.
    """

    inputs: bytes
    before: list[Tensor]
    task: int = -1


class Repeats:
    """Remembers what calls of a model move, and puts it back while one is repeated."""

    def __init__(self) -> None:
        self._recent: deque[_Call] = deque(maxlen=_RECENT)

    @contextmanager
    def as_before(self, state: ModuleState, arguments: object) -> Iterator[None]:
        """Around a call: if it is a repeated one, what it reads and moves is as it was before that call."""
        if torch.compiler.is_compiling() or not state.moves():
            yield
            return
        repeated = _is_recomputing()
        # Saved tensors are replaced in the first pass of a checkpoint; a reentrant one records no gradients.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks
        first = not torch.is_grad_enabled() or hooks(True) is not None
        if not (repeated or first):
            yield
            return
        moving, inputs = state.moving(), _fingerprint(arguments)
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
    return torch._C._current_graph_task_id() != -1


def _fingerprint(arguments: object) -> bytes:
    """A number for each tensor that tells it from others: the sum of its bits."""
    sums = []
    for tensor in tree_leaves(arguments):
        if isinstance(tensor, Tensor):
            bits = tensor.detach()
            bits = bits.to(torch.float32).contiguous().view(torch.int32) if bits.is_floating_point() else bits
            sums.append((tuple(tensor.shape), int(bits.sum(dtype=torch.int64))))
    return repr(sums).encode()
